"""Versions of a sequence model as a folder of full states and deltas, for servers that follow.

Each version is a folder ``<number>-full`` or ``<number>-delta``, which is complete when it exists.
A delta contains the values that changed since the version before: rows of embedding tables, other
weights as a whole, new items, and changed rows of the tables of the feature store. A
:class:`DeltaFollower` applies them in order. If a version is missing, it starts again from the
newest full state. :meth:`DeltaFolder.rollback` makes followers return to an earlier version.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.common.storage import committed_folder

if TYPE_CHECKING:
    from bigdl.friesian.models.sequences import SavedSequenceModel
    from bigdl.friesian.serving.store import FeatureStore

__all__ = ["DeltaFolder", "DeltaFollower", "ModelVersion"]

_NAME = re.compile(r"(\d+)-(full|delta)")
_MANIFEST, _ARRAYS, _ITEMS, _PIN = "manifest.json", "arrays.npz", "items.parquet", "current.json"
_ROWS, _VALUES = "::rows", "::values"  # suffixes of the arrays of changed rows
_SPARSE_SHARE = 0.5  # a table of which more rows changed is written as a whole


@dataclass(frozen=True)
class ModelVersion:
    """Version of a model that a server can use.

    Attributes
    ----------
    number : int
    model : SavedSequenceModel
    newest_event : float or None
        Time of the newest event that the weights were trained on, in seconds since 1970.
    tables : dict of str to pyarrow.Table
        Changed rows of the tables of the feature store since the version acknowledged before.

    Examples
    --------
    >>> from bigdl.friesian.serving.deltas import DeltaFolder, DeltaFollower
    >>> DeltaFollower(DeltaFolder("deltas")).poll() is None  # no version yet
    True
    """

    number: int
    model: SavedSequenceModel
    newest_event: float | None = None
    tables: Mapping[str, pa.Table] = field(default_factory=dict)


class DeltaFolder:
    """Folder into which a trainer publishes versions of a sequence model.

    Parameters
    ----------
    path : str or path-like
    full_every : int, default 20
        Number of versions from one full state to the next.
    keep : int, default 2
        Number of full states to keep, with the deltas after the oldest of them. A follower that was
        stopped until newer versions replaced all of them lacks their rows of tables.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.models.sequences import SavedSequenceModel
    >>> from bigdl.friesian.sequential import SequenceRecommender
    >>> from bigdl.friesian.serving.deltas import DeltaFolder, DeltaFollower
    >>> clicks = pd.DataFrame({"user": [1, 1, 1], "item": [5, 8, 9], "time": [1, 2, 3]})
    >>> SequenceRecommender("gru4rec", dim=8, epochs=1).fit(clicks).save("model")
    >>> folder, saved = DeltaFolder("deltas"), SavedSequenceModel.read("model")
    >>> folder.publish(1, saved, "gru4rec", {"dim": 8}), folder.publish(2, saved)
    ('1-full', '2-delta')
    >>> follower = DeltaFollower(folder)
    >>> version = follower.poll()
    >>> follower.acknowledge(version)  # after its tables and weights are in use
    >>> version.number, folder.rollback(), follower.poll().number
    (2, 1, 1)
    """

    def __init__(self, path: str | os.PathLike, full_every: int = 20, keep: int = 2):
        self.path = Path(path)
        self._full_every = check_integer("full_every", full_every, 1)
        self._keep = check_integer("keep", keep, 1)
        self._last: tuple[int, dict[str, np.ndarray], pa.Array] | None = None
        self._facts: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<DeltaFolder {str(self.path)!r}>"

    def versions(self) -> dict[int, str]:
        """Return the published versions: number to ``"full"`` or ``"delta"``, oldest first."""
        if not self.path.is_dir():
            return {}
        matches = (_NAME.fullmatch(each.name) for each in self.path.iterdir())
        return dict(sorted((int(match[1]), match[2]) for match in matches if match))

    # -- writing ----------------------------------------------------------------------------------

    def publish(
        self,
        number: int,
        saved: SavedSequenceModel,
        name: str | None = None,
        options: Mapping[str, object] | None = None,
        *,
        newest_event: float | None = None,
        tables: Mapping[str, pa.Table] | None = None,
    ) -> str:
        """Publish a version; do nothing if it is published already.

        Parameters
        ----------
        number : int
            Greater than those of the earlier versions.
        saved : SavedSequenceModel
        name, options
            As for ``SavedSequenceModel.write``; needed for the first version of this object.
        newest_event : float, optional
            Time of the newest event that the model was trained on.
        tables : dict of str to pyarrow.Table, optional
            Changed rows for the feature store.

        Returns
        -------
        str
            Name of the version's folder.
        """
        known = self.versions()
        if number in known:
            return f"{number}-{known[number]}"
        if known and number < max(known):
            raise UsageError(
                f"The version {number} should be greater than {max(known)}, the newest in "
                f"{self.path}",
                code="argument-value",
                argument="number",
            )
        if name is not None:
            from bigdl.friesian.models.sequences.saved import plain_options

            self._facts = {
                "model": name,
                "options": plain_options(options),
            }
        if not self._facts:
            raise UsageError(
                "The first version needs the name of the model, such as 'sasrec', and its options",
                code="argument-missing",
                argument="name",
            )
        state = {key: value.numpy().copy() for key, value in saved.network.state_dict().items()}
        fulls = [each for each, form in known.items() if form == "full"]
        last = self._last
        since_full = sum(each >= fulls[-1] for each in known) if fulls else 0
        is_delta = (
            last is not None
            and last[0] == max(known, default=-1)
            and since_full < self._full_every
            and saved.items[: len(last[2])].equals(last[2])
        )
        form = "delta" if is_delta else "full"
        arrays = _changes(last[1], state) if is_delta and last is not None else state
        first_new = len(last[2]) if is_delta and last is not None else 0
        facts = {
            **self._facts,
            "number": number,
            "base": last[0] if is_delta and last is not None else None,
            "max_len": saved.max_len,
            "stride": saved.stride,
            "shapes": {key: list(value.shape) for key, value in state.items()},
            "newest_event": newest_event,
            "tables": sorted(tables or {}),
        }
        self._write(f"{number}-{form}", facts, arrays, saved.items[first_new:], tables or {})
        self._last = number, state, saved.items
        self._remove_old()
        return f"{number}-{form}"

    def _write(
        self,
        name: str,
        facts: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        items: pa.Array,
        tables: Mapping[str, pa.Table],
    ) -> None:
        with committed_folder(self.path / name, "The version") as new:
            np.savez(new / _ARRAYS, **arrays)  # type: ignore[arg-type]
            pq.write_table(pa.table({"item": items}), new / _ITEMS)
            for table, rows in tables.items():
                pq.write_table(rows, new / f"table-{table}.parquet")
            (new / _MANIFEST).write_text(json.dumps(facts), encoding="utf-8")

    def _remove_old(self) -> None:
        known = self.versions()
        fulls = [each for each, form in known.items() if form == "full"]
        pinned = self.pinned()
        if len(fulls) <= self._keep:
            return
        first = fulls[-self._keep]
        if pinned is not None:
            first = min(first, max([each for each in fulls if each <= pinned], default=first))
        for number, form in known.items():
            if number < first:
                shutil.rmtree(self.path / f"{number}-{form}", ignore_errors=True)

    # -- choosing a version -----------------------------------------------------------------------

    def pinned(self) -> int | None:
        """Return the version that :meth:`rollback` selected, or None."""
        try:
            content = json.loads((self.path / _PIN).read_text(encoding="utf-8"))
            return int(content["version"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path / _PIN} cannot be read: {error}",
                code="file-damaged",
                path=str(self.path / _PIN),
            ) from error

    def rollback(self, number: int | None = None) -> int:
        """Make all followers use an earlier version, until :meth:`resume`.

        Parameters
        ----------
        number : int, optional
            Default: the version before the current one.

        Returns
        -------
        int
            The version.
        """
        known = list(self.versions())
        if number is None:
            current = self.pinned()
            current = max(known, default=0) if current is None else current
            number = max([each for each in known if each < current], default=-1)
        if number not in known:
            raise UsageError(
                f"{self.path} has no version {number if number >= 0 else 'before this one'}; it "
                f"has {known[-20:]}",
                code="argument-value",
                argument="number",
                allowed=known,
            )
        temporary = self.path / f"{_PIN}.new"
        temporary.write_text(json.dumps({"version": number}), encoding="utf-8")
        os.replace(temporary, self.path / _PIN)
        return number

    def resume(self) -> None:
        """End a rollback: followers use the newest version again."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / _PIN).unlink()


def _changes(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a delta."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in new.items():
        before = old.get(name)
        if before is None or value.ndim != 2 or before.shape[1:] != value.shape[1:]:
            if before is None or not np.array_equal(before, value):
                arrays[name] = value
            continue
        kept = min(len(before), len(value))
        changed = np.ones(len(value), bool)
        changed[:kept] = (before[:kept] != value[:kept]).any(1)
        if changed.sum() > _SPARSE_SHARE * len(value):
            arrays[name] = value
        elif changed.any() or len(before) != len(value):
            rows = np.flatnonzero(changed)
            arrays[name + _ROWS], arrays[name + _VALUES] = rows, value[rows]
    return arrays


class DeltaFollower:
    """Reader of a DeltaFolder that applies new versions in order.

    Parameters
    ----------
    folder : DeltaFolder, str or path-like

    Attributes
    ----------
    number : int
        The version of the last :meth:`acknowledge`, or 0.

    Examples
    --------
    >>> from bigdl.friesian.serving.deltas import DeltaFollower
    >>> DeltaFollower("deltas").number  # nothing is applied yet
    0
    """

    def __init__(self, folder: DeltaFolder | str | os.PathLike):
        self._folder = folder if isinstance(folder, DeltaFolder) else DeltaFolder(folder)
        self.number = 0
        self._at = 0  # version of the state, which deltas can be applied to
        self._state: dict[str, np.ndarray] = {}
        self._items: list[pa.Array] = []
        self._polled: tuple[ModelVersion, dict[str, np.ndarray], list[pa.Array]] | None = None

    def poll(self) -> ModelVersion | None:
        """Return the version to use now, or None if it is the last acknowledged one.

        The tables of the version contain the rows of all versions since the last acknowledged one;
        of the rows with one id, the last one counts.

        Raises
        ------
        UsageError
            If a file is damaged. The next call tries again.
        """
        known = self._folder.versions()
        pinned = self._folder.pinned()
        target = max(known, default=0) if pinned is None else pinned
        if target == self.number or target not in known:
            return None
        if self._polled is not None and self._polled[0].number == target:
            return self._polled[0]
        fulls = [each for each, form in known.items() if form == "full" and each <= target]
        later = [each for each in known if self._at < each <= target]
        state, items, at = dict(self._state), list(self._items), self._at
        is_chain = at > 0 and target > at and (not fulls or fulls[-1] <= at)
        if not is_chain:
            if not fulls:
                return None  # the full state was removed, and a newer one is being written
            state, items, at = {}, [], 0
            later = [each for each in known if fulls[-1] <= each <= target]
        paths = {each: self._folder.path / f"{each}-{form}" for each, form in known.items()}
        facts: dict[str, Any] = {}
        for number in later:
            facts, arrays, new_items = _read(paths[number])
            if facts["base"] is not None and facts["base"] != at:
                self._at = 0  # start from the newest full state in the next call
                return None
            _apply(state, arrays, facts["shapes"])
            items.append(new_items)
            at = number
        since = self.number if self.number < target else 0  # after a rollback, all rows until then
        tables = _changed_rows([paths[each] for each in known if since < each <= target])
        version = ModelVersion(
            target, _model_of(state, items, facts), facts["newest_event"], tables
        )
        self._polled = version, state, items
        return version

    def acknowledge(self, version: ModelVersion) -> None:
        """Note that a version of :meth:`poll` is in use; until then, it is returned again.

        Parameters
        ----------
        version : ModelVersion
        """
        if self._polled is None or self._polled[0] is not version:
            raise UsageError(
                f"The version {version.number} is not the one that poll returned last",
                code="state",
            )
        _, self._state, self._items = self._polled
        self.number = self._at = version.number
        self._polled = None


def _changed_rows(paths: Sequence[Path]) -> dict[str, pa.Table]:
    """Read the changed rows of the tables of several versions."""
    parts: dict[str, list[pa.Table]] = {}
    for path in paths:
        try:
            for name in json.loads((path / _MANIFEST).read_text(encoding="utf-8"))["tables"]:
                parts.setdefault(name, []).append(pq.read_table(path / f"table-{name}.parquet"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, error) from error
    return {name: _joined(name, each) for name, each in parts.items()}


def _joined(name: str, parts: list[pa.Table]) -> pa.Table:
    for each in parts[1:]:
        if set(each.column_names) != set(parts[0].column_names):
            raise UsageError(
                f"The versions have different columns of the table {name}: "
                f"{parts[0].column_names} and {each.column_names}; publish all columns",
                code="data-shape",
            )
    return pa.concat_tables(parts, promote_options="permissive")


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"The version {path} cannot be read: {error}", code="file-damaged", path=str(path)
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], pa.Array]:
    try:
        facts = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        with np.load(path / _ARRAYS, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
        items = pq.read_table(path / _ITEMS)["item"].combine_chunks()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error
    return facts, arrays, items


def _apply(
    state: dict[str, np.ndarray], arrays: Mapping[str, np.ndarray], shapes: Mapping[str, list[int]]
) -> None:
    """Apply the arrays of a version to a state; arrays of the state are replaced, not changed."""
    for name, value in arrays.items():
        if name.endswith(_ROWS):
            name = name.removesuffix(_ROWS)
            before, changed = state[name], np.zeros(shapes[name], state[name].dtype)
            changed[: len(before)] = before[: len(changed)]
            changed[value] = arrays[name + _VALUES]
            state[name] = changed
        elif not name.endswith(_VALUES):
            state[name] = value
    for name in [each for each in state if each not in shapes]:
        del state[name]


def _model_of(
    state: Mapping[str, np.ndarray], items: list[pa.Array], facts: Mapping[str, Any]
) -> SavedSequenceModel:
    import torch

    from bigdl.friesian.models.sequences.saved import SavedSequenceModel, network_of

    tensors = {name: torch.from_numpy(value.copy()) for name, value in state.items()}
    network = network_of(facts["model"], facts, tensors)
    network.load_state_dict(tensors)
    return SavedSequenceModel(
        network.eval(), pa.concat_arrays(items), facts["max_len"], facts["stride"]
    )


def apply_tables(store: FeatureStore, version: ModelVersion) -> None:
    """Write the changed rows of a version to the tables of a feature store, atomically.

    Of several rows with one id, the last one counts.
    """
    if version.tables:
        changes = {
            name: _newest_rows(rows, store.layout(name).id_column)
            for name, rows in version.tables.items()
        }
        store.update(changes)


def _newest_rows(rows: pa.Table, id_column: str) -> pa.Table:
    if id_column not in rows.column_names:
        return rows  # the store raises the error
    ids = rows[id_column].to_numpy()
    _, from_end = np.unique(ids[::-1], return_index=True)
    return rows.take(pa.array(np.sort(len(ids) - 1 - from_end)))


def delay_of(version: ModelVersion) -> float | None:
    """Return the seconds since the newest event that a version was trained on."""
    return None if version.newest_event is None else max(time.time() - version.newest_event, 0.0)
