"""Attributes of the items of a feature store, by which requests filter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import ATTRIBUTES_LOOK_S
from bigdl.friesian.serving.filters import ItemAttributes, ItemFilter

if TYPE_CHECKING:
    from bigdl.friesian.serving.stages import FeatureReader

__all__ = ["StoreAttributes"]

_ROWS_AT_ONCE = 10_000  # items per read of the store


class StoreAttributes(ItemAttributes):
    """Attributes of the items of a feature store, which follow the changes of the store.

    A store in a folder is checked before each use, other stores every few seconds.

    Parameters
    ----------
    store : FeatureReader
    table : str
    columns : sequence of str
    ids : callable
        Returns the ids of the items to read.
    """

    def __init__(
        self,
        store: FeatureReader,
        table: str,
        columns: Sequence[str],
        ids: Callable[[], np.ndarray],
    ):
        super().__init__()
        self._store, self._table, self._wanted = store, table, list(columns)
        self._item_ids = ids
        self._stamp: tuple | None = None
        self._now = ItemAttributes()
        self._reading = threading.Lock()
        if missing := [name for name in columns if name not in store.names(table)]:
            raise UsageError(
                f"The table {table} has no columns {missing} for filters, only "
                f"{store.names(table)}",
                code="column-missing",
                columns=missing,
            )

    def _current(self) -> ItemAttributes:
        if self._stamp is not None and _are_same(self._stamp_now(), self._stamp):
            return self._now
        # One thread reads the changed items; others use the previous attributes until then.
        if not self._reading.acquire(blocking=self._stamp is None):
            return self._now
        try:
            stamp = self._stamp_now()
            if self._stamp is None or not _are_same(stamp, self._stamp):
                self._now, self._stamp = self._read(stamp[-1]), stamp
            return self._now
        finally:
            self._reading.release()

    def _stamp_now(self) -> tuple:
        """Return objects that change with the attributes; the last are the ids."""
        parts = getattr(self._store, "parts", None)
        if parts is None:
            return int(time.monotonic() / ATTRIBUTES_LOOK_S), self._item_ids()
        return (*parts(self._table)[1], self._item_ids())

    def _read(self, ids: np.ndarray) -> ItemAttributes:
        chunks = []
        for start in range(0, max(len(ids), 1), _ROWS_AT_ONCE):
            rows = self._store.read(self._table, ids[start : start + _ROWS_AT_ONCE], self._wanted)
            batch = rows.to_arrow().filter(pa.array(rows.found)).select(self._wanted)
            chunks.append(batch.append_column("__item__", pa.array(rows.ids[rows.found])))
        return ItemAttributes(pa.Table.from_batches(chunks), "__item__", self._wanted)

    @property
    def names(self) -> list[str]:
        return list(self._wanted)

    def check(self, chosen: ItemFilter) -> None:
        self._current().check(chosen)

    def mask(self, ids: np.ndarray, chosen: ItemFilter) -> np.ndarray:
        return self._current().mask(ids, chosen)


def _are_same(one: tuple, two: tuple) -> bool:
    """Compare numbers by value and other objects by identity."""
    return len(one) == len(two) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(one, two, strict=True)
    )
