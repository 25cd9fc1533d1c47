"""Hashing of values into buckets, and crosses of columns.

The bucket of a value is that of BigDL 2.x: the digest of its string as an integer, modulo the
number of buckets. Digests are computed in Python for the distinct strings of a batch. Two crosses
by md5 in Spark expressions took 7 seconds of CPU time for a million rows.

The Spark function ``xxhash64`` of strings is XXH64 with the seed 42.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.batches import apply_function, decoded, to_string, to_strings
from bigdl.friesian.ops.column_types import Field, Schema, check_types, require_columns
from bigdl.friesian.ops.operator import Function, Operator, OutputColumn, register_operator
from bigdl.friesian.ops.spark import F, arrow_function, check_different, check_lengths, check_string

if TYPE_CHECKING:
    from pyspark.sql import Column

    from bigdl.friesian.ops.operator import State

NULL = 42
"""Seed of xxhash64, which is also the hash of null."""


def hashes(texts: Sequence[bytes]) -> np.ndarray:
    """Return the XXH64 hashes of byte strings.

    Parameters
    ----------
    texts : list of bytes

    Returns
    -------
    numpy.ndarray of int64
    """
    from xxhash import xxh64_intdigest

    digests = (xxh64_intdigest(text, NULL) for text in texts)
    return np.fromiter(digests, np.uint64, len(texts)).view(np.int64)


FAST = "xxhash64"


def buckets(texts: pa.Array, bins: int, method: str) -> np.ndarray:
    """Return the bucket index (int32) of each string; null also gets a bucket."""
    data = texts.cast(pa.binary())
    if method == FAST:
        numbers = hashes(data.fill_null(b"").to_pylist())
        if texts.null_count:
            numbers[texts.is_null().to_numpy(zero_copy_only=False)] = NULL
        return (numbers % bins).astype(np.int32)
    bin_of = _bin_by_digest(bins, method)
    return np.array([bin_of(text) for text in data.fill_null(b"None").to_pylist()], np.int32)


def _bin_by_digest(bins: int, method: str) -> Callable[[bytes], int]:
    """Return a function that maps bytes to a bucket."""
    digest_of = getattr(hashlib, method, None) or partial(hashlib.new, method)
    return lambda text: int.from_bytes(digest_of(text).digest()) % bins


def fast_bucket(value: Column, bins: int) -> Column:
    """Return the bucket of each value in a Spark column, computed by Spark's ``xxhash64``."""
    return F.pmod(F.xxhash64(value.cast("string")), F.lit(bins)).cast("int")


class Hash(Function):
    """Function that hashes the string representation of a value into a bucket.

    The string is ``str(value)`` of Python; for ``xxhash64`` it is the string of Spark.
    """

    is_costly = True

    def __init__(self, bins: int, method: str):
        self.bins, self.method = bins, method

    def array(self, values: pa.Array) -> pa.Array:
        if self.method == FAST:
            values = to_strings(values)
        elif not pa.types.is_string(values.type):
            texts = [None if each is None else str(each) for each in values.to_pylist()]
            values = pa.array(texts, pa.string())
        return pa.array(buckets(values, self.bins, self.method), pa.int32())

    def single(self, *input_types: str) -> Callable[..., Any]:
        if self.method == FAST:
            return super().single(*input_types)
        bin_of = _bin_by_digest(self.bins, self.method)
        return lambda value: bin_of(str(value).encode())

    def column(self, value: Column) -> Column:
        if self.method == FAST:
            return fast_bucket(value, self.bins)
        return arrow_function(self._of_distinct, "int")(value)

    def _of_distinct(self, values: pa.Array) -> pa.Array:
        is_nested = pa.types.is_nested(values.type)
        return self.array(values) if is_nested else decoded(apply_function(self, [values]))


class Cross(Hash):
    """Function that hashes the joined strings of several values into a bucket.

    If one of the values is null, it hashes ``"None"``.
    """

    def __init__(self, bins: int, method: str, separator: str):
        super().__init__(bins, method)
        self.separator = separator

    def array(self, *values: pa.Array) -> pa.Array:
        return super().array(pc.binary_join_element_wise(*map(to_strings, values), self.separator))

    def single(self, *input_types: str) -> Callable[..., Any]:
        of_text = super().single("string")

        def of_values(*values: object) -> object:
            is_null = any(value is None for value in values)
            return of_text(
                None if is_null else self.separator.join(map(str, map(to_string, values)))
            )

        return of_values

    def column(self, *values: Column) -> Column:
        spaced = [part for each in values for part in (F.lit(self.separator), each.cast("string"))]
        return super().column(F.concat(*spaced[1:]))


def _check_hash(bins: object, what: str, method: object) -> None:
    if type(bins) is not int or not 0 < bins < 2**31:
        raise UsageError(
            f"{what} should be a whole number from 1 to 2**31 - 1, got {bins!r}",
            code="argument-value",
            argument=what,
        )
    known = [each for each in sorted(hashlib.algorithms_available) if "shake" not in each]
    if method != FAST and method not in known:
        raise UsageError(
            "method should be the name of a hash function, one of "
            f"{', '.join([*known, FAST])}, got {method!r}",
            code="name-unknown",
            method=method,
            allowed=[*known, FAST],
        )


_NO_HASH = (
    "The column {name} of type {dtype} cannot be hashed: Spark and Python convert such values to "
    "different strings; cast or bin it first"
)


@register_operator
@dataclass(frozen=True)
class HashEncode(Operator):
    """Operator that implements ``hash_encode``."""

    columns: list[str]
    bins: int
    hash_method: str
    method = "hash_encode"

    def __post_init__(self) -> None:
        _check_hash(self.bins, "bins", self.hash_method)

    def check(self, before: Schema) -> None:
        def is_same(dtype: str) -> bool:
            return column_types.is_category(dtype) or (
                self.hash_method != FAST and column_types.is_fractional(dtype)
            )

        check_types(before, self.columns, is_same, _NO_HASH)

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        require_columns(before, self.columns)
        hashed = Hash(self.bins, self.hash_method)
        return [
            OutputColumn((name,), name, Field("int", self.bins), hashed) for name in self.columns
        ]


@register_operator
@dataclass(frozen=True)
class CrossColumns(Operator):
    """Operator that implements ``cross_columns``."""

    crosses: list[list[str]]
    bin_sizes: list[int]
    names: list[str]
    hash_method: str
    sep: str
    method = "cross_columns"

    @classmethod
    def of(
        cls, cross_columns: Any, bin_sizes: Any, cross_col_names: Any, method: str, sep: str
    ) -> CrossColumns:  # cross_columns: as the user wrote them
        """Build the operator from the user's arguments; a flat list of columns means one cross."""
        if _is_list_of(str, cross_columns) and cross_columns:
            if not isinstance(bin_sizes, list | tuple):
                bin_sizes = [bin_sizes]
            if cross_col_names is not None:
                cross_col_names = [cross_col_names]
            cross_columns = [cross_columns]
        is_list = isinstance(cross_columns, list | tuple) and cross_columns
        if not is_list or not all(_is_list_of(str, each) for each in cross_columns):
            raise UsageError(
                f"cross_columns should be a nested list of string, but got {cross_columns!r}",
                code="argument-type",
                argument="cross_columns",
            )
        for each in cross_columns:
            if len(each) < 2:
                raise UsageError(
                    f"each element in cross_columns should have >= 2 columns, but got {each!r}",
                    code="argument-value",
                    argument="cross_columns",
                )
        if not _is_list_of(int, bin_sizes):
            raise UsageError(
                f"bin_sizes should be a list of int, but got {bin_sizes!r}",
                code="argument-type",
                argument="bin_sizes",
            )
        check_lengths("cross_columns", cross_columns, "bin_sizes", bin_sizes)
        names = _cross_names(cross_columns, cross_col_names)
        return cls(list(map(list, cross_columns)), list(bin_sizes), names, method, sep)

    def __post_init__(self) -> None:
        check_different(self.names, "The names of the crosses")
        for bins in self.bin_sizes:
            _check_hash(bins, "each of bin_sizes", self.hash_method)
        check_string(self.sep, "sep")

    @property
    def reads(self) -> list[str]:
        return list(dict.fromkeys(name for cross in self.crosses for name in cross))

    def check(self, before: Schema) -> None:
        check_types(before, self.reads, column_types.is_category, _NO_HASH)

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        require_columns(before, self.reads)
        return [
            OutputColumn(
                tuple(each), name, Field("int", bins), Cross(bins, self.hash_method, self.sep)
            )
            for each, bins, name in zip(self.crosses, self.bin_sizes, self.names, strict=True)
        ]


def _is_list_of(element_type: type, values: object) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(each, element_type) for each in values
    )


def _cross_names(crosses: Sequence[Sequence[str]], cross_col_names: object) -> list[str]:
    if cross_col_names is None:
        cross_col_names = [None] * len(crosses)
    if not isinstance(cross_col_names, list | tuple):
        raise UsageError(
            f"cross_col_names should be None or a list of string, but got {cross_col_names!r}",
            code="argument-type",
            argument="cross_col_names",
        )
    check_lengths("cross_columns", crosses, "cross_col_names", cross_col_names)
    for name in cross_col_names:
        if name is not None and not isinstance(name, str):
            raise UsageError(
                f"each element in cross_col_names should be None or string, but got {name!r}",
                code="argument-type",
                argument="cross_col_names",
            )
    return ["_".join(a) if b is None else b for a, b in zip(crosses, cross_col_names, strict=True)]
