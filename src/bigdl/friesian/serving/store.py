"""Features of users and items on disk or in Redis, read by id while they change.

A store holds tables, such as ``user`` and ``item``, each with a column of ids.  Programs write it
near the line: :meth:`FeatureStore.replace` writes a new version of all tables aside and makes it
the current one in a single step, :meth:`FeatureStore.update` changes some rows in a single step.
Servers call :meth:`FeatureStore.read`, from as many threads as they like.

:class:`EmbeddedStore` is a folder.  Its rows lie in files of Arrow, which readers map to memory;
a file is never changed.  ``store.json`` names the files that count.  It is written aside and
renamed, so a reader or a crash sees all of a change or nothing.  Readers look at its time stamp
before each read.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from bigdl.friesian.serving.rows import (
    Features,
    Ids,
    Layout,
    StoredRows,
    gathered,
    ids_of,
    table_of,
)

logger = logging.getLogger(__name__)

_FORMAT = "bigdl.friesian.FeatureStore"
_MANIFEST = "store.json"
_MOST_DELTAS = 16  # files of updates before they become one


class FeatureStore(ABC):
    """Tables of features by id; see :class:`EmbeddedStore` and :class:`RedisStore`.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import FeatureStore, open_store
    >>> store = open_store("features")  # or a URL of Redis
    >>> isinstance(store, FeatureStore)
    True
    >>> _ = store.replace({"user": pd.DataFrame({"user": [3], "age": [30]})})
    >>> store.tables(), store.names("user"), store.size("user")
    (['user'], ['user', 'age'], 1)
    """

    @property
    @abstractmethod
    def version(self) -> int:
        """The version that is read; 0 if nothing was written yet."""

    @abstractmethod
    def versions(self) -> list[int]:
        """Return the versions that :meth:`activate` can choose, the oldest first."""

    @abstractmethod
    def layout(self, table: str) -> Layout:
        """Return the columns of a table of the current version."""

    def names(self, table: str) -> list[str]:
        """Return the names of the columns of a table, that of its ids first."""
        layout = self.layout(table)
        return [layout.id_column, *layout.names]

    @abstractmethod
    def tables(self) -> list[str]:
        """Return the names of the tables of the current version."""

    @abstractmethod
    def size(self, table: str) -> int:
        """Return the number of rows of a table."""

    @abstractmethod
    def _read(self, table: str, ids: np.ndarray, columns: Sequence[str] | None) -> Features:
        """See :meth:`read`; unknown ids have the defaults."""

    @abstractmethod
    def _replace(self, tables: dict[str, tuple[Layout, StoredRows]]) -> int:
        """See :meth:`replace`."""

    @abstractmethod
    def _update(self, changes: Mapping[str, Any]) -> None:
        """See :meth:`update`; the values are tables of Arrow."""

    @abstractmethod
    def _delete(self, table: str, ids: np.ndarray) -> None:
        """See :meth:`delete`."""

    @abstractmethod
    def activate(self, version: int) -> None:
        """Make a version the current one, in a single step.

        Raises
        ------
        UsageError
            If there is no such version.
        """

    def read(
        self,
        table: str,
        ids: Ids,
        columns: Sequence[str] | None = None,
        missing: str = "default",
    ) -> Features:
        """Return the rows of some ids as columns.

        Parameters
        ----------
        table : str
        ids : sequence or array of int
            In any order; an id can be there several times.
        columns : sequence of str, optional
            Default: all.
        missing : {"default", "error"}
            What an unknown id means: a row of the table's defaults, whose place in
            ``Features.found`` is False; or an error.

        Returns
        -------
        Features
            A row for each id, in their order.

        Raises
        ------
        UsageError
            If there is no such table or column, or an id is unknown and that is an error.
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
        """Write a new version of the store and make it the current one.

        The version before stays, for :meth:`rollback`; older ones are removed.

        Parameters
        ----------
        tables : dict of str to object
            By the name of the table a :class:`FeatureTable`, a DataFrame of Spark or pandas, a
            table of Arrow, or the path of Parquet files, such as a pipeline writes.
        id_cols : dict of str to str, optional
            The columns of ids; default: the column that is called like the table.
        defaults : dict of str to dict, optional
            By table and column what an unknown id has; default: 0, an empty text or list, or null
            in a column that has nulls.

        Returns
        -------
        int
            The version.

        Raises
        ------
        UsageError
            If an id is null, is no whole number or is there twice, or a type cannot be kept.
            Nothing has changed then.
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
                    f"{argument} names {strange}, which are not among the tables",
                    code="name-unknown",
                    argument=argument,
                    allowed=list(tables),
                )
        ready = {}
        for name, source in tables.items():
            if not name.isidentifier():
                raise UsageError(
                    f"The name of a table should be a word, got {name!r}",
                    code="argument-value",
                    argument="tables",
                )
            table = table_of(source, f"the table {name}")
            layout = Layout.of(table, id_cols.get(name, name), defaults.get(name))
            ready[name] = layout, StoredRows.of(table, layout, f"the table {name}")
        return self._replace(ready)

    def update(self, changes: Mapping[str, Any]) -> None:
        """Add rows to the current version, or replace those of the same ids, in a single step.

        Parameters
        ----------
        changes : dict of str to object
            As of :meth:`replace`; with all columns of the table.

        Raises
        ------
        UsageError
            If there is no such table, or the columns are not like its own.  Nothing has changed
            then.
        """
        self._update({name: table_of(each, f"the table {name}") for name, each in changes.items()})

    def delete(self, table: str, ids: Ids) -> None:
        """Remove rows from the current version, in a single step.

        A store in a folder writes the table anew.

        Parameters
        ----------
        table : str
        ids : sequence of int
            Those that are unknown are passed over.
        """
        self._delete(table, ids_of(ids))

    def rollback(self) -> int:
        """Make the version before the current one current again; returns it.

        Raises
        ------
        UsageError
            If there is none.
        """
        earlier = [each for each in self.versions() if each < self.version]
        if not earlier:
            raise UsageError(
                f"There is no version before {self.version}", code="state", version=self.version
            )
        self.activate(earlier[-1])
        return earlier[-1]

    def close(self) -> None:  # noqa: B027
        """Free what the store holds; one in a folder holds nothing that has to be freed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def no_table(name: str, known: Sequence[str]) -> UsageError:
    """Return the error for a table that a store lacks."""
    advice = f"its tables are {sorted(known)}" if known else "write some by replace"
    return UsageError(
        f"The store has no table {name!r}; {advice}", code="name-unknown", allowed=list(known)
    )


class _Table:
    """A table of one version as its files hold it: a base, and rows that were changed since."""

    def __init__(self, layout: Layout, base: StoredRows, changed: StoredRows | None):
        self.layout = layout
        self.parts = [base] if changed is None else [base, changed]

    @property
    def size(self) -> int:
        base, *changed = self.parts
        return len(base) + sum(int((base.places(part.ids) < 0).sum()) for part in changed)


class EmbeddedStore(FeatureStore):
    """A store in a folder of this machine, for one writer at a time and any number of readers.

    Parameters
    ----------
    path : str or path-like
        The folder; it is made with the first version.
    keep : int, default 2
        How many versions stay.

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
        self._manifest_path = str(self._path / _MANIFEST)  # asked about with each read
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
        self._current()  # what cannot be read is told now

    def __repr__(self) -> str:
        return f"<EmbeddedStore {str(self._path)!r}, version {self.version}>"

    # -- reading --------------------------------------------------------------------------------

    def _read(self, table: str, ids: np.ndarray, columns: Sequence[str] | None) -> Features:
        each = self._table(table)
        return gathered(each.layout, each.parts, ids, columns)

    def _table(self, name: str) -> _Table:
        tables = self._current()
        try:
            return tables[name]
        except KeyError:
            raise no_table(name, list(tables)) from None

    def parts(self, table: str) -> tuple[Layout, list[StoredRows]]:
        """Return the layout of a table and its rows: a base, and behind it those that changed.

        Rows never change: others are other objects.
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
        """Return the tables of the manifest as it is now on disk."""
        stamp = self._stamp_now()
        if stamp != self._stamp:
            with self._refreshing:
                while (stamp := self._stamp_now()) != self._stamp:
                    try:
                        self._refresh()
                    except FileNotFoundError as error:
                        if stamp != self._stamp_now():
                            continue  # a writer was faster
                        self._refuse(
                            UsageError(
                                f"The store lacks the file {error.filename}",
                                code="path-missing",
                                path=str(error.filename),
                            )
                        )
                    except UsageError as error:
                        self._refuse(error)
                    self._stamp = stamp
        return self._tables

    def _refuse(self, error: UsageError) -> None:
        """Go on with the tables that are there, if there are some, and say so."""
        if not self._tables:
            raise error
        logger.error("%s; version %s is read on", error, self._manifest["version"])

    def _stamp_now(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._manifest_path)
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _refresh(self) -> None:
        is_there = (self._path / _MANIFEST).exists()
        manifest = self._load_manifest() if is_there else _empty()
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
                f"{self._path / _MANIFEST} is not that of a store of features",
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
                    raise no_table(name, list(contents))
                layout = Layout.from_json(contents[name]["layout"])
                ready.append((name, layout, StoredRows.of(table, layout, f"the table {name}")))
            for name, layout, rows in ready:
                files = contents[name]["files"]
                contents[name]["files"] = self._with_change(name, version, layout, files, rows)

    def _with_change(
        self, name: str, version: int, layout: Layout, files: list[str], rows: StoredRows
    ) -> list[str]:
        """Return the files of a table with some rows more; many small ones become one."""
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
                raise no_table(table, list(contents))
            layout = Layout.from_json(contents[table]["layout"])
            rows = StoredRows.merged(self._rows_of(contents[table]["files"], layout))
            rows = rows.take(np.flatnonzero(~np.isin(rows.ids, ids)))
            contents[table]["files"] = [self._written(table, version, rows)]

    def _written(self, name: str, version: int, rows: StoredRows) -> str:
        """Write rows to a file of their own, down to the disk; returns its name."""
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
        """The manifest to change, which counts when the block ends without an error.

        Files that no version names are removed: those of old versions, and what a writer left that
        was killed or had no room.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        if not (self._path / _MANIFEST).exists() and any(
            not each.name.startswith((".", "v")) and each.name != "store.json.new"
            for each in self._path.iterdir()
        ):
            raise UsageError(
                f"{self._path} has other files and is no store; choose another folder",
                code="path-exists",
                path=str(self._path),
            )
        with self._writing, open(self._path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
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
        aside = self._path / f"{_MANIFEST}.new"
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self._path / _MANIFEST)
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _remove_unnamed(self, manifest: dict[str, Any]) -> None:
        named = {
            file
            for tables in manifest["versions"].values()
            for content in tables.values()
            for file in content["files"]
        }
        for file in self._path.glob("v*.arrow"):
            if file.name not in named:
                file.unlink(missing_ok=True)

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
