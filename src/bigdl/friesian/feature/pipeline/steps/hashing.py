"""Values hashed into bins, and crosses of columns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.step import (
    Cell,
    Field,
    Function,
    Schema,
    State,
    Step,
    require_fields,
)

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["Cross", "CrossColumns", "Hash", "HashEncode", "buckets", "text_of", "texts_of"]

_FAST = "xxhash64"


def text_of(value: Any) -> str | None:
    """The text that Spark has for a string, a whole number, a boolean or a date."""
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def texts_of(values: pa.Array) -> pa.Array:
    """:func:`text_of` for an array."""
    import pyarrow as pa

    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def buckets(texts: pa.Array, bins: int, method: str) -> np.ndarray:
    """The bins (int32) of texts, nulls among them."""
    import numpy as np
    import pyarrow as pa

    data = texts.cast(pa.binary())
    if method == _FAST:
        from bigdl.friesian.feature.pipeline.steps import xxhash64

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
    import numpy as np

    make = getattr(hashlib, method, None) or (lambda text: hashlib.new(method, text))
    digests = b"".join([make(text).digest() for text in texts])
    size = hashlib.new(method).digest_size
    return np.frombuffer(digests, ">u4").reshape(-1, size // 4).astype(np.uint64)


def bucket(text: str | None, bins: int, method: str) -> int:
    """The bin of one text."""
    if method != _FAST:
        data = b"None" if text is None else text.encode()
        return int.from_bytes(hashlib.new(method, data).digest()) % bins
    from bigdl.friesian.feature.pipeline.steps import xxhash64

    if text is None:
        return xxhash64.NULL % bins
    return int(xxhash64.hashes([text.encode()])[0]) % bins


class Hash(Function):
    """The bin of the text that Python has for a value."""

    is_costly = True

    def __init__(self, bins: int, method: str):
        self.bins, self.method = bins, method

    def array(self, values: pa.Array) -> pa.Array:
        import pyarrow as pa

        if not pa.types.is_string(values.type):
            texts = [None if each is None else str(each) for each in values.to_pylist()]
            values = pa.array(texts, pa.string())
        return pa.array(buckets(values, self.bins, self.method), pa.int32())

    def value(self, value: Any) -> int:
        return bucket(None if value is None else str(value), self.bins, self.method)


class Cross(Function):
    """The bin of the texts of several values behind each other; of ``"None"`` if one is null."""

    is_costly = True

    def __init__(self, bins: int, method: str, separator: str):
        self.bins, self.method, self.separator = bins, method, separator

    def array(self, *values: pa.Array) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = pc.binary_join_element_wise(*map(texts_of, values), self.separator)
        return pa.array(buckets(texts, self.bins, self.method), pa.int32())

    def value(self, *values: Any) -> int:
        texts = [text_of(value) for value in values]
        text = None if None in texts else self.separator.join(texts)
        return bucket(text, self.bins, self.method)


def _check_method(method: Any) -> None:
    known = [each for each in sorted(hashlib.algorithms_guaranteed) if "shake" not in each]
    if method != _FAST and method not in known:
        raise UsageError(f"method should be one of {', '.join([*known, _FAST])}, got {method!r}")


def _check_text(before: Schema, names: Sequence[str], kinds_too: Sequence[str] = ()) -> None:
    require_fields(before, names)
    for name in names:
        kind = before[name].kind
        if kinds.is_integral(kind) or kind in ("string", "boolean", "date", *kinds_too):
            continue
        raise UsageError(
            f"The column {name} of type {kind} cannot be hashed: Spark and Python write such "
            "values differently; cast or bin it first"
        )


@dataclass(frozen=True)
class HashEncode(Step):
    """``hash_encode``."""

    columns: list[str]
    bins: int
    hash_method: str
    method = "hash_encode"

    def __post_init__(self) -> None:
        if type(self.bins) is not int or not 0 < self.bins < 2**31:
            raise UsageError(
                f"bins should be a whole number from 1 to 2**31 - 1, got {self.bins!r}"
            )
        _check_method(self.hash_method)

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        _check_text(before, self.columns, () if self.hash_method == _FAST else ("float", "double"))
        hashed = Hash(self.bins, self.hash_method)
        return [Cell((name,), name, Field("int", self.bins), hashed) for name in self.columns]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.operators.hashing import hash_encode

        return hash_encode(df, self.columns, self.bins, self.hash_method)


@dataclass(frozen=True)
class CrossColumns(Step):
    """``cross_columns``."""

    crosses: list[list[str]]
    bin_sizes: list[int]
    names: list[str]
    hash_method: str
    sep: str
    method = "cross_columns"

    def __post_init__(self) -> None:
        _check_method(self.hash_method)

    @property
    def reads(self) -> list[str]:
        return list(dict.fromkeys(name for cross in self.crosses for name in cross))

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        _check_text(before, [name for each in self.crosses for name in each])
        return [
            Cell(tuple(each), name, Field("int", bins), Cross(bins, self.hash_method, self.sep))
            for each, bins, name in zip(self.crosses, self.bin_sizes, self.names, strict=True)
        ]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.operators.hashing import cross_hash_encode, crosses_of

        if self.hash_method == _FAST:
            crosses = crosses_of(self.crosses, self.bin_sizes, self.names)
            return cross_hash_encode(df, crosses, self.hash_method, self.sep)
        return self._by_arrow(df)

    def _by_arrow(self, df: DataFrame) -> DataFrame:
        """Digests in Python, of the different texts of a batch.

        In Spark's own expressions two crosses by md5 took 7 seconds of CPU time for a million rows.
        """
        from pyspark.sql import functions as F

        from bigdl.friesian.feature.operators.columns import col, replace

        made = {}
        for names, bins, name in zip(self.crosses, self.bin_sizes, self.names, strict=True):
            parts = [col(each).cast("string") for each in names]
            spaced = [each for part in parts for each in (F.lit(self.sep), part)][1:]
            made[name] = _arrow_function(bins, self.hash_method)(F.concat(*spaced))
        return replace(df, made)


def _arrow_function(bins: int, method: str) -> Callable:
    from pyspark.sql.functions import arrow_udf

    # without annotations: those of this module are text, which arrow_udf does not read
    def apply(texts):
        import pyarrow as pa

        from bigdl.friesian.feature.pipeline.batches import factored

        found = factored(texts)
        return pa.array(buckets(found.values, bins, method)[found.codes])

    return arrow_udf(apply, "int")
