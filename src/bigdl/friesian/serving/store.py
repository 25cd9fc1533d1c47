"""Stores of user and item features, in a folder or in Redis, that serve reads during updates.

A store holds tables, such as ``user`` and ``item``, each with an id column. Near-line programs
write it. :meth:`FeatureStore.replace` writes a new version of all tables and activates it
atomically. :meth:`FeatureStore.update` changes some rows atomically. Servers call
:meth:`FeatureStore.read` from any number of threads.

:class:`EmbeddedStore` is a folder. Its rows are in memory-mapped Arrow files, which are never
changed. ``store.json`` lists the current files. It is written to a temporary file and renamed, so
that readers and crashes see a change either completely or not at all. Readers check its time stamp
before each read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError
from bigdl.common.platform.files import lock, sync_folder, unlink_unused
from bigdl.friesian.serving.rows import (
    Features,
    Ids,
    Layout,
    StoredRows,
    gather_features,
    ids_of,
    table_of,
)

logger = logging.getLogger(__name__)

_FORMAT = "bigdl.friesian.FeatureStore"
_MANIFEST = "store.json"
_MOST_DELTAS = 16  # maximum number of update files before they are merged


class FeatureStore(ABC):
    """Base class of stores of feature tables; see :class:`EmbeddedStore`, :class:`RedisStore`.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import FeatureStore, open_store
    >>> store = open_store("features")  # or a Redis URL
    >>> isinstance(store, FeatureStore)
    True
    >>> _ = store.replace({"user": pd.DataFrame({"user": [3], "age": [30]})})
    >>> store.tables(), store.names("user"), store.size("user")
    (['user'], ['user', 'age'], 1)
    """

    @property
    @abstractmethod
    def version(self) -> int:
        """Current version; 0 for an empty store."""

    @abstractmethod
    def versions(self) -> list[int]:
        """Return the versions that :meth:`activate` accepts, oldest first."""

    @abstractmethod
    def layout(self, table: str) -> Layout:
        """Return the layout of a table in the current version: columns, types and storage."""

    def names(self, table: str) -> list[str]:
        """Return the column names of a table, the id column first."""
        layout = self.layout(table)
        return [layout.id_column, *layout.names]

    @abstractmethod
    def tables(self) -> list[str]:
        """Return the names of the tables in the current version."""

    @abstractmethod
    def size(self, table: str) -> int:
        """Return the number of rows of a table."""

    @abstractmethod
    def _read(self, table: str, ids: np.ndarray, columns: Sequence[str] | None) -> Features:
        """Return the rows of `ids` as columns; unknown ids get the default values."""

    @abstractmethod
    def _replace(self, tables: dict[str, tuple[Layout, StoredRows]]) -> int:
        """Write a new version of all tables and activate it."""

    @abstractmethod
    def _update(self, changes: Mapping[str, Any]) -> None:
        """Add or replace rows of the current version, from Arrow tables."""

    @abstractmethod
    def _delete(self, table: str, ids: np.ndarray) -> None:
        """Remove the rows of `ids` from a table of the current version."""

    @abstractmethod
    def activate(self, version: int) -> None:
        """Make `version` the current version, atomically.

        Raises
        ------
        UsageError
            If the version does not exist.
        """

    def read(
        self,
        table: str,
        ids: Ids,
        columns: Sequence[str] | None = None,
        missing: str = "default",
    ) -> Features:
        """Return the rows of `ids` as columns.

        Parameters
        ----------
        table : str
        ids : sequence or array of int
            In any order; ids may repeat.
        columns : sequence of str, optional
            Default: all.
        missing : {"default", "error"}
            Result for an unknown id: the defaults of the table, with False in ``Features.found``;
            or an error.

        Returns
        -------
        Features
            One row per id, in the order of the ids.

        Raises
        ------
        UsageError
            If the table or a column does not exist, or for unknown ids with ``missing="error"``.
        """
        wanted = ids_of(ids)
        features = self._read(table, wanted, columns)
        check_choice("missing", missing, ("default", "error"))
        if missing == "error" and not features.found.all():
            unknown = np.unique(wanted[~features.found])
            raise UsageError(
                f"{len(unknown)} ids are not in the table {table}, such as {unknown[0]}",
                code="data-value",
            )
        return features

    def replace(
        self,
        tables: Mapping[str, Any],
        id_cols: Mapping[str, str] | None = None,
        defaults: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> int:
        """Write a new version of the store and activate it.

        The previous version is kept for :meth:`rollback`; older ones are removed.

        Parameters
        ----------
        tables : dict of str to object
            Table name to a :class:`FeatureTable`, a Spark or pandas DataFrame, an Arrow table, or
            the path of Parquet files, for example the output of a pipeline.
        id_cols : dict of str to str, optional
            Id column per table. Default: the column with the name of the table.
        defaults : dict of str to dict, optional
            Values of unknown ids, by table and column. Default: 0, an empty string or list, or null
            in a column that has nulls.

        Returns
        -------
        int
            The new version.

        Raises
        ------
        UsageError
            If an id is null, is not an integer or occurs twice, or a type is not supported. The
            store is then unchanged.
        """
        if not tables:
            raise UsageError(
                "A store needs a table; pass a dict such as {'user': users}",
                code="argument-missing",
                argument="tables",
            )
        id_cols, defaults = dict(id_cols or {}), dict(defaults or {})
        for argument, named in (("id_cols", id_cols), ("defaults", defaults)):
            if strange := [name for name in named if name not in tables]:
                raise UsageError(
                    f"{argument} has entries for {strange}, which are not among the tables",
                    code="name-unknown",
                    argument=argument,
                    allowed=list(tables),
                )
        ready = {}
        for name, source in tables.items():
            if not name.isidentifier():
                raise UsageError(
                    f"The name of a table should be an identifier, got {name!r}",
                    code="argument-value",
                    argument="tables",
                )
            table = table_of(source, f"the table {name}")
            layout = Layout.of(table, id_cols.get(name, name), defaults.get(name))
            ready[name] = layout, StoredRows.of(table, layout, f"the table {name}")
        return self._replace(ready)

    def update(self, changes: Mapping[str, Any]) -> None:
        """Add or replace rows of the current version by id, atomically.

        Parameters
        ----------
        changes : dict of str to object
            As for :meth:`replace`, with all columns of the table.

        Raises
        ------
        UsageError
            If a table does not exist, or the columns do not match. The store is then unchanged.
        """
        self._update({name: table_of(each, f"the table {name}") for name, each in changes.items()})

    def delete(self, table: str, ids: Ids) -> None:
        """Remove rows from the current version, atomically.

        A store in a folder rewrites the table.

        Parameters
        ----------
        table : str
        ids : sequence of int
            Unknown ids are ignored.
        """
        self._delete(table, ids_of(ids))

    def rollback(self) -> int:
        """Activate the previous version and return its number.

        Raises
        ------
        UsageError
            If there is no previous version.
        """
        earlier = [each for each in self.versions() if each < self.version]
        if not earlier:
            raise UsageError(
                f"There is no version before {self.version}", code="state", version=self.version
            )
        self.activate(earlier[-1])
        return earlier[-1]

    def close(self) -> None:  # noqa: B027
        """Release the resources of the store; do nothing for a store in a folder."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def missing_table_error(name: str, known: Sequence[str]) -> UsageError:
    """Return the error for a table that a store lacks."""
    advice = f"its tables are {sorted(known)}" if known else "write tables with replace"
    return UsageError(
        f"The store has no table {name!r}; {advice}", code="name-unknown", allowed=list(known)
    )


class _Table:
    """Table of one version: base rows, and rows that were changed later."""

    def __init__(self, layout: Layout, base: StoredRows, changed: StoredRows | None):
        self.layout = layout
        self.parts = [base] if changed is None else [base, changed]

    @property
    def size(self) -> int:
        base, *changed = self.parts
        return len(base) + sum(int((base.positions(part.ids) < 0).sum()) for part in changed)


class EmbeddedStore(FeatureStore):
    """Store in a local folder, for one writer at a time and any number of readers.

    Parameters
    ----------
    path : str or path-like
        Folder; it is created with the first version.
    keep : int, default 2
        Number of versions to keep.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore
    >>> store = EmbeddedStore("features")
    >>> store.replace({"item": pd.DataFrame({"item": [1, 2], "price": [9.5, 4.0]})})
    1
    >>> store.update({"item": pd.DataFrame({"item": [2, 3], "price": [5.0, 7.0]})})
    >>> store.read("item", [3, 2, 1])["price"].tolist()
    [7.0, 5.0, 9.5]
    >>> store.replace({"item": pd.DataFrame({"item": [1], "price": [8.0]})})
    2
    >>> store.rollback(), store.read("item", [1])["price"].tolist()
    (1, [9.5])
    """

    def __init__(self, path: str | os.PathLike, keep: int = 2):
        self._path = Path(path)
        self._manifest_path = str(self._path / _MANIFEST)  # checked before each read
        self._keep = check_integer("keep", keep, 1)
        if self._path.exists() and not self._path.is_dir():
            raise UsageError(
                f"{path} is a file; a store is a folder", code="path-unusable", path=str(path)
            )
        self._stamp: tuple[int, int] | None = None
        self._manifest: dict[str, Any] = _empty()
        self._tables: dict[str, _Table] = {}
        self._files: dict[str, StoredRows] = {}
        self._merged: dict[str, tuple[tuple[str, ...], StoredRows]] = {}
        self._refreshing = threading.Lock()
        self._writing = threading.Lock()
        self._current()  # raise now if the store cannot be read

    def __repr__(self) -> str:
        return f"<EmbeddedStore {str(self._path)!r}, version {self.version}>"

    # -- reading --------------------------------------------------------------------------------

    def _read(self, table: str, ids: np.ndarray, columns: Sequence[str] | None) -> Features:
        each = self._table(table)
        return gather_features(each.layout, each.parts, ids, columns)

    def _table(self, name: str) -> _Table:
        tables = self._current()
        try:
            return tables[name]
        except KeyError:
            raise missing_table_error(name, list(tables)) from None

    def parts(self, table: str) -> tuple[Layout, list[StoredRows]]:
        """Return the layout of a table and its rows: base rows, then changed rows.

        Row objects never change; a change creates new objects.
        """
        each = self._table(table)
        return each.layout, each.parts

    @property
    def version(self) -> int:
        self._current()
        return self._manifest["version"]

    def versions(self) -> list[int]:
        self._current()
        return sorted(map(int, self._manifest["versions"]))

    def layout(self, table: str) -> Layout:
        return self._table(table).layout

    def tables(self) -> list[str]:
        return list(self._current())

    def size(self, table: str) -> int:
        return self._table(table).size

    def _current(self) -> dict[str, _Table]:
        """Return the tables in the manifest on disk; load them if the manifest has changed."""
        stamp = self._stamp_now()
        if stamp != self._stamp:
            with self._refreshing:
                while (stamp := self._stamp_now()) != self._stamp:
                    try:
                        self._refresh()
                    except FileNotFoundError as error:
                        if stamp != self._stamp_now():
                            continue  # a writer changed it meanwhile
                        self._keep_tables(
                            UsageError(
                                f"The store lacks the file {error.filename}",
                                code="path-missing",
                                path=str(error.filename),
                            )
                        )
                    except UsageError as error:
                        self._keep_tables(error)
                    self._stamp = stamp
        return self._tables

    def _keep_tables(self, error: UsageError) -> None:
        """Log `error` and keep the loaded tables; raise `error` if no tables are loaded."""
        if not self._tables:
            raise error
        logger.error("%s; version %s stays in use", error, self._manifest["version"])

    def _stamp_now(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._manifest_path)
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _refresh(self) -> None:
        has_manifest = (self._path / _MANIFEST).exists()
        manifest = self._load_manifest() if has_manifest else _empty()
        tables, files, merged = {}, {}, {}
        for name, content in manifest["versions"].get(str(manifest["version"]), {}).items():
            layout = Layout.from_json(content["layout"])
            names = tuple(content["files"])
            for file in names:
                files[file] = self._files.get(file) or self._mapped(file, layout)
            changed = None
            if len(names) == 2:
                changed = files[names[1]]
            elif len(names) > 2:
                known, rows = self._merged.get(name, ((), None))
                if rows is not None and known == names[: len(known)]:
                    parts = [rows, *(files[each] for each in names[len(known) :])]
                else:
                    parts = [files[each] for each in names[1:]]
                changed = StoredRows.merged(parts)
                merged[name] = names, changed
            tables[name] = _Table(layout, files[names[0]], changed)
        self._manifest, self._files, self._merged = manifest, files, merged
        self._tables = tables

    def _load_manifest(self) -> dict[str, Any]:
        try:
            content = json.loads((self._path / _MANIFEST).read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(
                f"The store at {self._path} cannot be read: {error}",
                code="file-damaged",
                path=str(self._path),
            ) from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise UsageError(
                f"{self._path / _MANIFEST} does not describe a feature store",
                code="file-format",
                path=str(self._path),
            )
        return content

    def _mapped(self, file: str, layout: Layout) -> StoredRows:
        try:
            source = pa.memory_map(str(self._path / file))
            return StoredRows.from_arrow(pa.ipc.open_file(source).get_batch(0), layout)
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            raise UsageError(
                f"The file {self._path / file} of the store is damaged: {error}",
                code="file-damaged",
                path=str(file),
            ) from error

    # -- writing --------------------------------------------------------------------------------

    def _replace(self, tables: dict[str, tuple[Layout, StoredRows]]) -> int:
        with self._writer() as manifest:
            version = max(map(int, manifest["versions"]), default=0) + 1
            manifest["versions"][str(version)] = {
                name: {"layout": layout.to_json(), "files": [self._written(name, version, rows)]}
                for name, (layout, rows) in tables.items()
            }
            manifest["version"] = version
            for old in sorted(map(int, manifest["versions"]))[: -self._keep]:
                del manifest["versions"][str(old)]
        return version

    def _update(self, changes: Mapping[str, Any]) -> None:
        with self._writer() as manifest:
            version = manifest["version"]
            contents = manifest["versions"].get(str(version), {})
            ready = []
            for name, table in changes.items():
                if name not in contents:
                    raise missing_table_error(name, list(contents))
                layout = Layout.from_json(contents[name]["layout"])
                ready.append((name, layout, StoredRows.of(table, layout, f"the table {name}")))
            for name, layout, rows in ready:
                files = contents[name]["files"]
                contents[name]["files"] = self._with_change(name, version, layout, files, rows)

    def _with_change(
        self, name: str, version: int, layout: Layout, files: list[str], rows: StoredRows
    ) -> list[str]:
        """Write added rows to a file; return the table's files, merged if there are many."""
        if len(files) <= _MOST_DELTAS:
            return [*files, self._written(name, version, rows)]
        base, *deltas = self._rows_of(files, layout)
        changed = StoredRows.merged([*deltas, rows])
        if len(changed) < len(base) / 4:
            return [files[0], self._written(name, version, changed)]
        return [self._written(name, version, StoredRows.merged([base, changed]))]

    def _rows_of(self, files: Sequence[str], layout: Layout) -> list[StoredRows]:
        return [self._files.get(file) or self._mapped(file, layout) for file in files]

    def _delete(self, table: str, ids: np.ndarray) -> None:
        with self._writer() as manifest:
            version = manifest["version"]
            contents = manifest["versions"].get(str(version), {})
            if table not in contents:
                raise missing_table_error(table, list(contents))
            layout = Layout.from_json(contents[table]["layout"])
            rows = StoredRows.merged(self._rows_of(contents[table]["files"], layout))
            rows = rows.take(np.flatnonzero(~np.isin(rows.ids, ids)))
            contents[table]["files"] = [self._written(table, version, rows)]

    def _written(self, name: str, version: int, rows: StoredRows) -> str:
        """Write rows to a new file, sync it to disk, and return its name."""
        file = f"v{version}-{name}-{uuid.uuid4().hex}.arrow"
        batch = rows.to_arrow()
        with open(self._path / file, "wb") as sink:
            with pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch)
            sink.flush()
            os.fsync(sink.fileno())
        return file

    @contextlib.contextmanager
    def _writer(self) -> Iterator[dict[str, Any]]:
        """Context manager that yields the manifest for editing, and commits it if no error occurs.

        Files that no version lists are removed: those of old versions, and those of writers that
        were killed or ran out of disk space.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        if not (self._path / _MANIFEST).exists() and any(
            not each.name.startswith((".", "v")) and each.name != "store.json.new"
            for each in self._path.iterdir()
        ):
            raise UsageError(
                f"{self._path} contains other files and no store; choose another folder",
                code="path-exists",
                path=str(self._path),
            )
        with self._writing, open(self._path / ".lock", "w") as file:
            lock(file.fileno())
            manifest = self._load_manifest() if (self._path / _MANIFEST).exists() else _empty()
            before = json.dumps(manifest)
            try:
                yield manifest
                self._commit(manifest)
            except OSError as error:
                self._remove_unnamed(json.loads(before))
                raise UsageError(
                    f"The store at {self._path} cannot be written: {error}",
                    code="path-unusable",
                    path=str(self._path),
                ) from error
            except BaseException:
                self._remove_unnamed(json.loads(before))
                raise
            self._remove_unnamed(manifest)

    def _commit(self, manifest: dict[str, Any]) -> None:
        temporary = self._path / f"{_MANIFEST}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path / _MANIFEST)
        sync_folder(self._path)

    def _remove_unnamed(self, manifest: dict[str, Any]) -> None:
        named = {
            file
            for tables in manifest["versions"].values()
            for content in tables.values()
            for file in content["files"]
        }
        for file in self._path.glob("v*.arrow"):
            if file.name not in named:
                unlink_unused(file)  # else a later writer removes it

    def activate(self, version: int) -> None:
        with self._writer() as manifest:
            if str(version) not in manifest["versions"]:
                known = sorted(map(int, manifest["versions"]))
                raise UsageError(
                    f"The store has no version {version}, only {known}",
                    code="argument-value",
                    argument="version",
                    version=version,
                    allowed=list(known),
                )
            manifest["version"] = version

    def remove(self) -> None:
        """Remove the folder with all versions."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._current()


def _empty() -> dict[str, Any]:
    return {"format": _FORMAT, "version": 0, "versions": {}}
