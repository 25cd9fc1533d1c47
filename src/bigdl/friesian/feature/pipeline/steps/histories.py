"""Histories of users, which the executor ``arrow`` makes of all rows of some users at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import check_count, check_string
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.batches import factored, normal
from bigdl.friesian.feature.pipeline.requests import Request
from bigdl.friesian.feature.pipeline.step import Field, GroupStep, Schema, State, require_fields
from bigdl.friesian.feature.pipeline.steps.tables import TableStep

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["AddHistSeq"]

_ROWS = 1 << 16  # of a table that comes out: histories are many times as large as what they are of


class AddHistSeq(GroupStep, TableStep):
    """``add_hist_seq``."""

    method = "add_hist_seq"

    def __post_init__(self) -> None:
        given = self.given
        check_string(given["user_col"], "user_col")
        check_string(given["sort_col"], "sort_col")
        check_count(given["min_len"], "min_len", 0)
        check_count(given["max_len"], "max_len", 1)
        check_count(given["num_seqs"], "num_seqs", 1)

    def requests(self, before: Schema) -> dict[str, Request]:
        require_fields(before, self.columns)
        return {}

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        fields = self._fields(before)
        return {
            "kinds": {name: each.kind for name, each in fields.items()},
            "cardinalities": {name: each.cardinality for name, each in fields.items()},
        }

    def hides_columns(self, before: Schema) -> bool:
        return False

    def after(self, before: Schema, state: State | None) -> Schema:
        return self._fields(before)

    def _fields(self, before: Schema) -> dict[str, Field]:
        columns = self._order(before)
        return {
            name: Field(f"array<{before[of].kind}>", before[of].cardinality) if of else before[name]
            for name, of in columns.items()
        }

    def _order(self, names: Any) -> dict[str, str | None]:
        """The columns that come out, with what the histories among them are made of."""
        histories = {f"{name}_hist_seq": name for name in self.given["cols"]}
        found: dict[str, str | None] = {}
        for name in names:
            if name not in histories:
                found[name] = None
            if name in self.given["cols"]:
                found[f"{name}_hist_seq"] = name
        return found

    @property
    def key(self) -> str:
        return self.given["user_col"]

    @property
    def columns(self) -> list[str]:
        return [*self.given["cols"], self.given["user_col"], self.given["sort_col"]]

    def of_groups(self, table: pa.Table) -> Iterator[pa.Table]:
        import numpy as np
        import pyarrow as pa

        order, place, size = self._places(table)
        found = np.flatnonzero(
            (place >= self.given["min_len"]) & (place + self.given["num_seqs"] >= size)
        )
        columns = self._order(table.column_names)
        arrays = {name: table[name].combine_chunks() for name in table.column_names}
        for start in range(0, max(len(found), 1), _ROWS):  # one without rows has the columns
            rows = found[start : start + _ROWS]
            lengths = np.minimum(place[rows], self.given["max_len"])
            ends = np.cumsum(lengths)
            # the places of all values of all histories, one history behind the other
            past = np.repeat(rows - ends, lengths) + np.arange(ends[-1] if len(ends) else 0)
            offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
            taken, items = pa.array(order[rows]), pa.array(order[past])
            made = {
                name: pa.ListArray.from_arrays(offsets, arrays[of].take(items))
                if of
                else arrays[name].take(taken)
                for name, of in columns.items()
            }
            yield pa.table(made)

    def _places(self, table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows by user and time, the place of each among those of its user, and their number.

        Rows of equal time keep their order.
        """
        import numpy as np

        user, time = (_ranks(table[self.given[name]]) for name in ("user_col", "sort_col"))
        order = np.lexsort((time, user))
        sizes = np.bincount(user)
        starts = np.cumsum(sizes) - sizes
        users = user[order]
        return order, np.arange(len(order)) - starts[users], sizes[users]

    def check_rows(self, table: pa.Table) -> None:
        sort_col = self.given["sort_col"]
        if table[sort_col].null_count:
            raise UsageError(f"The column {sort_col} has nulls; drop or fill them first")


def _ranks(column: pa.ChunkedArray) -> np.ndarray:
    """Numbers from 0 on that are ordered as the values are; a null is one of them."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_integer(column.type) and not column.null_count:
        values = column.combine_chunks().to_numpy(zero_copy_only=False)
        low = int(values.min()) if len(values) else 0
        if len(values) and int(values.max()) - low < 4 * len(values):
            return (values - low).astype(np.int64)
    if kinds.is_fractional(kinds.of_arrow(column.type)):  # both zeros are equal
        column = pc.add(column, pa.scalar(0.0, column.type))
    parts = factored(normal(column))
    values = parts.values
    ordered = pc.sort_indices(values).to_numpy()
    ranks = np.empty(len(ordered), np.int64)
    ranks[ordered] = np.arange(len(ordered))
    return ranks[parts.codes]
