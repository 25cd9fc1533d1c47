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
        self._stamped = np.zeros(0, np.int64)  # keeps the address in the stamp unique
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
        parts = getattr(self._store, "parts", None)
        if parts is None:
            stamp: tuple = (int(time.monotonic() / ATTRIBUTES_LOOK_S),)
        else:
            stamp = tuple(map(id, parts(self._table)[1]))
        ids = self._item_ids()
        stamp = (*stamp, id(ids))
        if stamp != self._stamp:
            with self._reading:
                if stamp != self._stamp:
                    rows = self._store.read(self._table, ids, self._wanted)
                    batch = rows.to_arrow().filter(pa.array(rows.found))
                    batch = batch.select(self._wanted).append_column(
                        "__item__", pa.array(ids[rows.found])
                    )
                    made = ItemAttributes(pa.table(batch), "__item__", self._wanted)
                    self._now, self._stamp, self._stamped = made, stamp, ids
        return self._now

    @property
    def names(self) -> list[str]:
        return list(self._wanted)

    def check(self, chosen: ItemFilter) -> None:
        self._current().check(chosen)

    def mask(self, ids: np.ndarray, chosen: ItemFilter) -> np.ndarray:
        return self._current().mask(ids, chosen)
