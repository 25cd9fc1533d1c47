"""Values hashed into bins, and crosses of columns.

The number of a value is that of BigDL 2.x: the digest of its text as a whole number, modulo the
bins.  It is computed by Spark: a digest is read a few hexadecimal digits at a time, and every
intermediate result fits into 64 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_different,
    check_string,
    col,
    is_integral,
    is_textual,
    replace,
    require_columns,
    type_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["Cross", "cross_hash_encode", "crosses_of", "hash_encode"]

_FAST = "xxhash64"
_HEX_DIGITS = {"md5": 32, "sha1": 40, "sha224": 56, "sha256": 64, "sha384": 96, "sha512": 128}


def hash_encode(df: DataFrame, columns: Any, bins: int, method: str) -> DataFrame:
    """Hash columns in their place; see :meth:`FeatureTable.hash_encode`."""
    names = as_names(columns)
    require_columns(df, names)
    _check_bins(bins, "bins")
    _check_method(method)
    return replace(
        df, {name: _hashed(col(name), type_of(df, name), bins, method) for name in names}
    )


def _check_bins(bins: Any, what: str) -> None:
    if isinstance(bins, bool) or not isinstance(bins, int) or not 0 < bins < 2**31:
        raise UsageError(f"{what} should be a whole number from 1 to 2**31 - 1, got {bins!r}")


def _check_method(method: Any) -> None:
    if method != _FAST and method not in hashlib.algorithms_available:
        raise UsageError(
            f"method should be the name of a hash function of hashlib or {_FAST!r}, got {method!r}"
        )


def _hashed(value: Column, kind: DataType, bins: int, method: str) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    if isinstance(kind, T.BooleanType):
        value, kind = F.when(value, "True").when(~value, "False"), T.StringType()
    has_pythons_text = is_textual(kind) or is_integral(kind) or isinstance(kind, T.DateType)
    if method == _FAST:
        return F.pmod(F.xxhash64(value.cast("string")), F.lit(bins)).cast("int")
    if has_pythons_text and method in _HEX_DIGITS:
        return _bin_of_text(F.coalesce(value.cast("string"), F.lit("None")), bins, method)
    return _python_text_function(bins, method)(value)


def _bin_of_text(text: Column, bins: int, method: str) -> Column:
    from pyspark.sql import functions as F

    data = text.cast("binary")
    if method == "md5":
        digest = F.md5(data)
    elif method == "sha1":
        digest = F.sha1(data)
    else:
        digest = F.sha2(data, int(method[3:]))
    digits = min((62 - bins.bit_length()) // 4, 15)
    rest = F.lit(0).cast("bigint")
    for start in range(0, _HEX_DIGITS[method], digits):
        width = min(digits, _HEX_DIGITS[method] - start)
        chunk = F.conv(F.substring(digest, start + 1, width), 16, 10).cast("bigint")
        rest = (rest * F.lit(16**width) + chunk) % F.lit(bins)
    return rest.cast("int")


def _python_text_function(bins: int, method: str):
    """For values that Python and Spark write differently, and other hash functions of hashlib.

    Every distinct value of a batch is hashed once.
    """
    from pyspark.sql.functions import arrow_udf

    # without annotations: those of this module are text, which arrow_udf does not read
    def apply(values):
        import pyarrow as pa

        numbers: dict[str, int] = {}
        texts = [str(value) for value in values.to_pylist()]
        for text in set(texts):
            numbers[text] = int(hashlib.new(method, text.encode()).hexdigest(), 16) % bins
        return pa.array([numbers[text] for text in texts], pa.int32())

    return arrow_udf(apply, "int")


class Cross:
    """One cross: its columns, the number of its bins, and the name of its result."""

    def __init__(self, columns: Sequence[str], bins: int, name: str | None):
        self.columns, self.bins = list(columns), bins
        self.name = "_".join(columns) if name is None else name


def crosses_of(cross_columns: Any, bin_sizes: Any, cross_col_names: Any) -> list[Cross]:
    """Check the arguments of ``cross_hash_encode``; a flat list of columns is one cross."""
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
        if not isinstance(each, list | tuple) or not all(isinstance(name, str) for name in each):
            raise UsageError(
                f"cross_columns should be a nested list of string, but got {cross_columns!r}"
            )
        if len(each) < 2:
            raise UsageError(
                f"each element in cross_columns should have >= 2 columns, but got {each!r}"
            )
    if not isinstance(bin_sizes, list | tuple) or not all(type(each) is int for each in bin_sizes):
        raise UsageError(f"bin_sizes should be a list of int, but got {bin_sizes!r}")
    if len(cross_columns) != len(bin_sizes):
        raise UsageError(
            "cross_columns and bin_sizes should have the same length, but got "
            f"{len(cross_columns)} and {len(bin_sizes)}"
        )
    names = _cross_names(cross_columns, cross_col_names)
    whole = ["_".join(each) for each in cross_columns]
    named = [b if a is None else a for a, b in zip(names, whole, strict=True)]
    check_different(named, "The names of the crosses")
    for bins in bin_sizes:
        _check_bins(bins, "each of bin_sizes")
    return [Cross(*each) for each in zip(cross_columns, bin_sizes, names, strict=True)]


def _cross_names(cross_columns: Sequence, cross_col_names: Any) -> Sequence:
    if cross_col_names is None:
        return [None] * len(cross_columns)
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
    return cross_col_names


def cross_hash_encode(
    df: DataFrame, crosses: Sequence[Cross], method: str, separator: str
) -> DataFrame:
    """New columns with the bins of several columns written one behind the other."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType

    require_columns(df, [name for cross in crosses for name in cross.columns])
    _check_method(method)
    check_string(separator, "sep")

    def crossed(cross: Cross) -> Column:
        parts: list[Column] = []
        for name in cross.columns:
            parts += [F.lit(separator)] if parts and separator else []
            parts.append(col(name).cast("string"))
        return _hashed(F.concat(*parts), StringType(), cross.bins, method)

    return replace(df, {cross.name: crossed(cross) for cross in crosses})
