"""Values hashed into bins, and crosses of columns.

The number of a value is that of BigDL 2.x: the digest of its text as a whole number, modulo the
bins.  Digests are made in Python, of the different texts of a batch: in Spark's own expressions two
crosses by md5 took 7 seconds of CPU time for a million rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.batches import factored, text_of, texts_of
from bigdl.friesian.ops.columns import check_different, check_string, col, replace
from bigdl.friesian.ops.operator import (
    Cell,
    Field,
    Function,
    Operator,
    Schema,
    State,
    require_fields,
)
from bigdl.friesian.ops.spark import F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["FAST", "CrossColumns", "HashEncode", "bucket", "buckets"]

FAST = "xxhash64"


def buckets(texts: pa.Array, bins: int, method: str) -> np.ndarray:
    """Return the bins (int32) of texts, nulls among them."""

    data = texts.cast(pa.binary())
    if method == FAST:
        from bigdl.friesian.ops import xxhash64

        found = xxhash64.hashes(data.fill_null(b"").to_pylist())
        if texts.null_count:
            found[texts.is_null().to_numpy(zero_copy_only=False)] = xxhash64.NULL
        return (found % bins).astype(np.int32)
    words = _digests(data.fill_null(b"None").to_pylist(), method)
    rest = np.zeros(len(texts), np.uint64)
    for word in words.T:  # the digest is a number of many words, the first one highest
        rest = ((rest << np.uint64(32)) | word) % np.uint64(bins)
    return rest.astype(np.int32)


def _digests(texts: list[bytes], method: str) -> np.ndarray:

    make = getattr(hashlib, method, None) or (lambda text: hashlib.new(method, text))
    digests = b"".join([make(text).digest() for text in texts])
    size = hashlib.new(method).digest_size
    return np.frombuffer(digests, ">u4").reshape(-1, size // 4).astype(np.uint64)


def bucket(text: str | None, bins: int, method: str) -> int:
    """Return the bin of one text."""
    if method != FAST:
        data = b"None" if text is None else text.encode()
        return int.from_bytes(hashlib.new(method, data).digest()) % bins
    from bigdl.friesian.ops import xxhash64

    if text is None:
        return xxhash64.NULL % bins
    return int(xxhash64.hashes([text.encode()])[0]) % bins


class Hash(Function):
    """The bin of the text that Python has for a value."""

    is_costly = True

    def __init__(self, bins: int, method: str):
        self.bins, self.method = bins, method

    def array(self, values: pa.Array) -> pa.Array:
        if not pa.types.is_string(values.type):
            texts = [None if each is None else str(each) for each in values.to_pylist()]
            values = pa.array(texts, pa.string())
        return pa.array(buckets(values, self.bins, self.method), pa.int32())

    def value(self, value: Any) -> int:
        return bucket(None if value is None else str(value), self.bins, self.method)

    def column(self, value: Column) -> Column:
        """Return the bins of a column of Spark."""

        if self.method == FAST:
            return F.pmod(F.xxhash64(value.cast("string")), F.lit(self.bins)).cast("int")

        # without annotations: those of this module are text, which arrow_udf does not read
        def bins_of(values):
            if pa.types.is_nested(values.type):
                return self.array(values)
            found = factored(values)
            return self.array(found.values).take(pa.array(found.codes))

        return F.arrow_udf(bins_of, "int")(value)  # type: ignore[call-overload]  # pyspark's stubs lack a default


class Cross(Function):
    """The bin of the texts of several values behind each other; of ``"None"`` if one is null."""

    is_costly = True

    def __init__(self, bins: int, method: str, separator: str):
        self.bins, self.method, self.separator = bins, method, separator

    def array(self, *values: pa.Array) -> pa.Array:
        texts = pc.binary_join_element_wise(*map(texts_of, values), self.separator)
        return pa.array(buckets(texts, self.bins, self.method), pa.int32())

    def value(self, *values: Any) -> int:
        texts = [text_of(value) for value in values]
        text = None if None in texts else self.separator.join(cast("list[str]", texts))
        return bucket(text, self.bins, self.method)


def _check_method(method: Any) -> None:
    known = [each for each in sorted(hashlib.algorithms_available) if "shake" not in each]
    if method != FAST and method not in known:
        raise UsageError(
            "method should be the name of a hash function, one of "
            f"{', '.join([*known, FAST])}, got {method!r}"
        )


def _check_bins(bins: Any, what: str) -> None:
    if type(bins) is not int or not 0 < bins < 2**31:
        raise UsageError(f"{what} should be a whole number from 1 to 2**31 - 1, got {bins!r}")


def _check_text(before: Schema, names: Sequence[str], others: Sequence[str] = ()) -> None:
    require_fields(before, names)
    for name in names:
        kind = before[name].kind
        if kinds.is_integral(kind) or kind in ("string", "boolean", "date", *others):
            continue
        raise UsageError(
            f"The column {name} of type {kind} cannot be hashed: Spark and Python write such "
            "values differently; cast or bin it first"
        )


@dataclass(frozen=True)
class HashEncode(Operator):
    """``hash_encode``."""

    columns: list[str]
    bins: int
    hash_method: str
    method = "hash_encode"

    def __post_init__(self) -> None:
        _check_bins(self.bins, "bins")
        _check_method(self.hash_method)

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        _check_text(before, self.columns, () if self.hash_method == FAST else ("float", "double"))
        hashed = Hash(self.bins, self.hash_method)
        return [Cell((name,), name, Field("int", self.bins), hashed) for name in self.columns]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        require_fields(before, self.columns)
        hashed = Hash(self.bins, self.hash_method)
        return replace(df, {name: hashed.column(col(name)) for name in self.columns})


@dataclass(frozen=True)
class CrossColumns(Operator):
    """``cross_columns``."""

    crosses: list[list[str]]
    bin_sizes: list[int]
    names: list[str]
    hash_method: str
    sep: str
    method = "cross_columns"

    @classmethod
    def of(
        cls, cross_columns: Any, bin_sizes: Any, cross_col_names: Any, method: str, sep: str
    ) -> CrossColumns:
        """Return the operator for the arguments that users give; a flat list is one cross."""
        if not isinstance(cross_columns, list | tuple) or not cross_columns:
            raise UsageError(
                f"cross_columns should be a nested list of string, but got {cross_columns!r}"
            )
        if all(isinstance(each, str) for each in cross_columns):
            cross_columns, bin_sizes = [cross_columns], [bin_sizes]
            if cross_col_names is not None:
                cross_col_names = [cross_col_names]
            if isinstance(bin_sizes[0], list | tuple):
                bin_sizes = bin_sizes[0]
        for each in cross_columns:
            if not isinstance(each, list | tuple) or not all(isinstance(n, str) for n in each):
                raise UsageError(
                    f"cross_columns should be a nested list of string, but got {cross_columns!r}"
                )
            if len(each) < 2:
                raise UsageError(
                    f"each element in cross_columns should have >= 2 columns, but got {each!r}"
                )
        if not isinstance(bin_sizes, list | tuple) or not all(type(n) is int for n in bin_sizes):
            raise UsageError(f"bin_sizes should be a list of int, but got {bin_sizes!r}")
        if len(cross_columns) != len(bin_sizes):
            raise UsageError(
                "cross_columns and bin_sizes should have the same length, but got "
                f"{len(cross_columns)} and {len(bin_sizes)}"
            )
        names = _cross_names(cross_columns, cross_col_names)
        return cls(list(map(list, cross_columns)), list(bin_sizes), names, method, sep)

    def __post_init__(self) -> None:
        check_different(self.names, "The names of the crosses")
        for bins in self.bin_sizes:
            _check_bins(bins, "each of bin_sizes")
        _check_method(self.hash_method)
        check_string(self.sep, "sep")

    @property
    def reads(self) -> list[str]:
        return list(dict.fromkeys(name for cross in self.crosses for name in cross))

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        _check_text(before, self.reads)
        return [
            Cell(tuple(each), name, Field("int", bins), Cross(bins, self.hash_method, self.sep))
            for each, bins, name in zip(self.crosses, self.bin_sizes, self.names, strict=True)
        ]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        require_fields(before, self.reads)
        made = {}
        for names, bins, name in zip(self.crosses, self.bin_sizes, self.names, strict=True):
            parts = [col(each).cast("string") for each in names]
            spaced = [each for part in parts for each in (F.lit(self.sep), part)][1:]
            made[name] = Hash(bins, self.hash_method).column(F.concat(*spaced))
        return replace(df, made)


def _cross_names(cross_columns: Sequence[Sequence[str]], cross_col_names: Any) -> list[str]:
    default = ["_".join(each) for each in cross_columns]
    if cross_col_names is None:
        return default
    if not isinstance(cross_col_names, list | tuple):
        raise UsageError(
            f"cross_col_names should be None or a list of string, but got {cross_col_names!r}"
        )
    if len(cross_columns) != len(cross_col_names):
        raise UsageError(
            "cross_columns and cross_col_names should have the same length, but got "
            f"{len(cross_columns)} and {len(cross_col_names)}"
        )
    for name in cross_col_names:
        if name is not None and not isinstance(name, str):
            raise UsageError(
                f"each element in cross_col_names should be None or string, but got {name!r}"
            )
    return [b if a is None else a for a, b in zip(cross_col_names, default, strict=True)]
