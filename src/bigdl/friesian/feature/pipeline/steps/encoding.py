"""Values replaced by their numbers in vocabularies that were learned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.dictionary import DRIVER_KEYS
from bigdl.friesian.feature.pipeline import in_batches, kinds
from bigdl.friesian.feature.pipeline.requests import Counts, Request
from bigdl.friesian.feature.pipeline.step import (
    Cell,
    Field,
    Fitted,
    Function,
    Schema,
    State,
    Step,
    require_fields,
)
from bigdl.friesian.feature.pipeline.steps import encoding_on_spark as on_spark
from bigdl.friesian.feature.pipeline.steps.hashing import bucket, buckets, text_of, texts_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["CategoryEncode", "Encode", "EncodeTokens", "Vocabulary"]

_FAST = "xxhash64"
_JOINED_COLUMNS = 6  # that are joined faster than they go through Arrow


class Vocabulary:
    """Values, whose numbers are their places from 1 on.

    Parameters
    ----------
    values : pyarrow.Array
    """

    def __init__(self, values: pa.Array):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def numbers(self) -> dict[Any, int]:
        """The numbers by the values."""
        return {value: place for place, value in enumerate(self.values.to_pylist(), 1)}

    def find(self, values: pa.Array) -> pa.Array:
        """The numbers (int32) of values, null for a null or an unknown one."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if len(self) < 4 * len(values):  # it builds a table of its own of the whole vocabulary
            places = pc.index_in(values, value_set=self.values)
            return pc.add(places, pa.scalar(1, pa.int32()))
        numbers = self.numbers
        return pa.array([numbers.get(value) for value in values.to_pylist()], pa.int32())


class Encode(Function):
    """The number of a value; unknown ones share some numbers behind the largest, if any."""

    is_costly = True

    def __init__(self, vocabulary: Vocabulary, oov_buckets: int):
        self.vocabulary, self.oov_buckets = vocabulary, oov_buckets

    def array(self, values: pa.Array) -> pa.Array:

        found = self.vocabulary.find(values)
        return with_buckets(values, found, len(self.vocabulary) + 1, self.oov_buckets)

    def value(self, value: Any) -> int | None:
        found = self.vocabulary.numbers.get(value)
        if found is not None or value is None or not self.oov_buckets:
            return found
        return bucket(text_of(value), self.oov_buckets, _FAST) + len(self.vocabulary) + 1


def with_buckets(values: pa.Array, found: pa.Array, first: int, count: int) -> pa.Array:
    """Numbers that were found, and one of some from `first` on for each unknown value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not count or found.null_count == values.null_count:
        return found
    unknown = pc.and_(values.is_valid(), found.is_null())
    others = buckets(texts_of(values.filter(unknown)), count, _FAST)
    return pc.replace_with_mask(found, unknown, pa.array(others + first, pa.int32()))


class EncodeTokens(Function):
    """The numbers of the values in a cell that are known; null if there is none."""

    is_costly = True

    def __init__(self, vocabulary: Vocabulary, separator: str, sort: bool, smallest: bool):
        self.vocabulary, self.separator = vocabulary, separator
        self.sort, self.smallest = sort, smallest

    def array(self, values: pa.Array) -> pa.Array:
        import pyarrow as pa

        kind = pa.int32() if self.smallest else pa.list_(pa.int32())
        return pa.array(map(self.value, values.to_pylist()), kind)

    def value(self, value: str | None) -> list[int] | int | None:
        if value is None:
            return None
        numbers = self.vocabulary.numbers
        found = [numbers[each] for each in value.split(self.separator) if each in numbers]
        if not found:
            return None
        if self.smallest:
            return min(found)
        return sorted(found) if self.sort else found


@dataclass(frozen=True)
class CategoryEncode(Step):
    """``category_encode``; the state has a table of one column for each vocabulary.

    Attributes
    ----------
    columns : list of dict
        ``{"src_cols": [...], "col_name": ...}`` for each vocabulary.
    freq_limit : dict of str to int
        By the name of the vocabulary.
    """

    columns: list[dict[str, Any]]
    freq_limit: dict[str, int]
    order_by_freq: bool
    do_split: bool
    sep: str
    sort_for_array: bool
    keep_most_frequent: bool
    broadcast: bool
    oov_buckets: int
    method = "category_encode"

    def __post_init__(self) -> None:
        if not self.sep or "\\" in self.sep:
            raise UsageError(
                f"sep should be plain text without a backslash in a pipeline, got {self.sep!r}"
            )
        if type(self.oov_buckets) is not int or self.oov_buckets < 0:
            raise UsageError(
                f"oov_buckets should be an integer from 0 on, got {self.oov_buckets!r}"
            )
        if self.oov_buckets and self.do_split:
            raise UsageError("oov_buckets cannot be used with do_split; leave one of them out")

    @property
    def reads(self) -> list[str]:
        return [name for each in self.columns for name in each["src_cols"]]

    def requests(self, before: Schema) -> dict[str, Request]:
        found = {}
        for each in self.columns:
            self._check(before, each["src_cols"])
            separator = self.sep if self.do_split else None
            limit = self.freq_limit.get(each["col_name"], 0)
            found[each["col_name"]] = Counts(tuple(each["src_cols"]), separator, limit)
        return found

    def _check(self, before: Schema, names: Sequence[str]) -> None:
        require_fields(before, names)
        found = {before[name].kind for name in names}
        for kind in found:
            if not (kinds.is_integral(kind) or kind in ("string", "boolean", "date")):
                raise UsageError(
                    f"The columns {list(names)} of type {kind} have no vocabulary in a pipeline: "
                    "cells should be strings, whole numbers, booleans or dates; cast or bin them "
                    "first"
                )
            if self.do_split and kind != "string":
                raise UsageError(f"do_split needs strings, but {list(names)} are of type {kind}")
        if len(found) > 1:
            raise UsageError(
                f"The columns {list(names)} of one vocabulary should be of one type, but are "
                f"{sorted(found)}; cast them first"
            )

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        return {name: self._ranked(counts) for name, counts in answers.items()}

    def _ranked(self, counts: pa.Table) -> pa.Table:
        order = [("count", "descending")] if self.order_by_freq else []
        return counts.sort_by([*order, ("value", "ascending")]).select(["value"]).combine_chunks()

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        cells = []
        for each in self.columns:
            vocabulary = None if state is None else _vocabulary(state[each["col_name"]])
            rows = None if vocabulary is None else len(vocabulary) + self.oov_buckets + 1
            is_array = self.do_split and not self.keep_most_frequent
            made = Field("array<int>" if is_array else "int", rows)
            for name in each["src_cols"]:
                function = None if vocabulary is None else self._function(vocabulary)
                cells.append(Cell((name,), name, made, function))
        return cells

    def _function(self, vocabulary: Vocabulary) -> Function:
        if self.do_split:
            return EncodeTokens(vocabulary, self.sep, self.sort_for_array, self.keep_most_frequent)
        return Encode(vocabulary, self.oov_buckets)

    def pays_in_batches(self, state: State) -> bool:
        return len(self._fit_in_workers(state)) == len(self.columns) and self._are_many()

    def _are_many(self) -> bool:
        count = sum(len(each["src_cols"]) for each in self.columns)
        return self.broadcast and not self.do_split and count > _JOINED_COLUMNS

    def _fit_in_workers(self, state: State) -> list[dict[str, Any]]:
        return [each for each in self.columns if len(state[each["col_name"]]) <= DRIVER_KEYS]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        small = self._fit_in_workers(state)
        if small and self._are_many() and in_batches.can_travel(df):
            df = in_batches.mapped(df, [Fitted(replace(self, columns=small), before, state)])
            rest = [each for each in self.columns if each not in small]
        else:
            rest = self.columns
        return self._joined(df, rest, state)

    def _joined(self, df: DataFrame, columns: list[dict[str, Any]], state: State) -> DataFrame:
        from bigdl.friesian.feature.operators import lookup

        learned = {
            each["col_name"]: on_spark.learned(df.sparkSession, state[each["col_name"]])
            for each in columns
        }
        dictionaries = {
            name: learned[each["col_name"]] for each in columns for name in each["src_cols"]
        }
        if self.do_split:
            return lookup.encode_tokens(
                df,
                dictionaries,
                re.escape(self.sep),
                self.broadcast,
                self.sort_for_array,
                self.keep_most_frequent,
            )
        return lookup.encode(df, dictionaries, self.broadcast, self.oov_buckets)


def _vocabulary(table: pa.Table) -> Vocabulary:
    return Vocabulary(table["value"].combine_chunks())
