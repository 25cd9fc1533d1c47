"""Conversion of Spark columns to numpy arrays: dtypes, shapes and decoding.

========================  =====================================================
Spark                     in the model
========================  =====================================================
boolean                   bool
tinyint, smallint, int    int32
bigint                    int64
float, double, decimal    float32, or ``config["dtype"]``
Vector (dense, sparse)    dense, floating, one more dimension
array<...>                one more dimension; equal lengths within a column
string                    UTF-8 bytes, if the model accepts texts
map<key, ...>             a dict of the values' arrays; equal keys in every row
========================  =====================================================

Vectors become arrays and doubles become floats **in the JVM**, which halves the transferred bytes.
Scalar columns are sent as one array per row: Spark writes an Arrow list of k values at least twice
as fast as k Arrow columns. Columns of different types are sent as doubles if a double can hold all
of them. Columns of one dtype become one matrix.

Nulls, arrays of unequal lengths, and texts for a numeric model are refused: only the user knows
their meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import TEXT, encoded, is_text, name_of_dtype

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_FLOATS = {"float32": "float", "float64": "double"}


def float_dtype(config: dict[str, Any] | None) -> str:
    """Return the floating dtype that ``config["dtype"]`` selects (default ``"float32"``)."""
    dtype = (config or {}).get("dtype")
    if dtype is None:
        return "float32"
    is_numpy = isinstance(dtype, type | np.dtype)
    name = np.dtype(dtype).name if is_numpy else str(dtype).removeprefix("torch.")
    if name not in _FLOATS:
        raise UsageError(
            f'config["dtype"] must be "float32" or "float64", got {dtype!r}',
            code="argument-value",
            argument="dtype",
            allowed=["float32", "float64"],
        )
    return name


@dataclass(frozen=True)
class ColumnSpec:
    """The conversion of one column of a DataFrame.

    Attributes
    ----------
    name : str
        Name of the column.
    kind : str
        ``"plain"`` or ``"map"``.
    dtype : str
        numpy dtype of the innermost values; ``"S"`` for texts.
    ndim : int
        Number of dimensions without the rows: 0 for scalars, 1 for vectors and arrays, ...
    cast : str
        Spark type to cast to in the JVM, ``"vector"`` for ML vectors.
    missing : bool
        Whether nulls become NaN; otherwise they are refused.
    """

    name: str
    kind: str
    dtype: str
    ndim: int
    cast: str
    missing: bool = False


@dataclass(frozen=True)
class ArraySpec:
    """One array of a shard: source column, dtype and row shape.

    Attributes
    ----------
    column : str or tuple of str
        The column, or the scalar columns of this matrix.
    key : str or None
        Key of a map column.
    dtype : str
    shape : tuple of int
        Shape of one row.
    """

    column: str | tuple[str, ...]
    key: str | None
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> ArraySpec:
        """Create an ArraySpec from its JSON fields."""
        column, shape = doc["column"], tuple(doc["shape"])
        column = tuple(column) if isinstance(column, list) else column
        return cls(column, doc["key"], doc["dtype"], shape)


def nulls_are_missing(config: dict[str, Any] | None) -> bool:
    """Return True if a config converts nulls of scalar features to NaN."""
    return bool((config or {}).get("nulls_are_missing"))


def column_spec(
    name: str,
    spark_type: Any,  # a DataType
    floats: str,
    *,
    texts: bool = False,
    missing: Collection[str] = (),
) -> ColumnSpec:
    """Return the conversion of a column, or raise a UsageError that names the column.

    `texts` allows string columns. Nulls of numeric columns in `missing` become NaN.
    """
    from pyspark.sql import types as T

    numbers = (T.NumericType, T.BooleanType)
    if name in missing and isinstance(spark_type, numbers):
        dtype = floats if isinstance(spark_type, (T.FractionalType, T.BooleanType)) else "float64"
        return ColumnSpec(name, "plain", dtype, 0, _FLOATS[dtype], missing=True)
    if type(spark_type).__name__ == "VectorUDT":
        return ColumnSpec(name, "plain", floats, 1, "vector")
    conversions: list[tuple[Any, str, str]] = [
        (T.BooleanType, "bool", "boolean"),
        ((T.ByteType, T.ShortType, T.IntegerType), "int32", "int"),
        (T.LongType, "int64", "bigint"),
        ((T.FloatType, T.DoubleType, T.DecimalType), floats, _FLOATS[floats]),
        (T.StringType if texts else (), TEXT, "string"),
    ]
    is_map = isinstance(spark_type, T.MapType)
    inner, depth = spark_type.valueType if is_map else spark_type, 0
    while isinstance(inner, T.ArrayType):
        inner, depth = inner.elementType, depth + 1
    has_key = not is_map or isinstance(
        spark_type.keyType, (T.StringType, T.IntegerType, T.LongType)
    )
    for spark_types, dtype, base in conversions:
        if has_key and isinstance(inner, spark_types):
            cast = "array<" * depth + base + ">" * depth
            if not is_map:
                return ColumnSpec(name, "plain", dtype, depth, cast)
            key = spark_type.keyType.simpleString()
            return ColumnSpec(name, "map", dtype, depth, f"map<{key},{cast}>")
    advice = "encode it as numbers first"
    if isinstance(spark_type, T.StringType):
        advice += ", e.g. with StringIndexer, or cast it if it holds numbers"
    elif isinstance(spark_type, (T.TimestampType, T.DateType, T.TimestampNTZType)):
        advice = f'make a number of it first, e.g. month("{name}") or unix_timestamp("{name}")'
    raise UsageError(
        f"Column '{name}' has type {spark_type.simpleString()}, which cannot become a tensor; "
        f"{advice}",
        code="data-dtype",
        column=name,
    )


def unified_spec(
    name: str,
    spark_type: DataType,
    floats: str,
    reference: ColumnSpec,
    owner: str,
    *,
    texts: bool = False,
    missing: Collection[str] = (),
) -> ColumnSpec:
    """Return the conversion that gives a column the dtype of the same column in the training data.

    Numbers get the dtype of `reference`; decoding refuses numbers that it cannot hold.

    Parameters
    ----------
    name, spark_type, floats, texts, missing
        See :func:`column_spec`.
    reference : ColumnSpec
        Spec of the column in the training data.
    owner : str
        Name of the other frame in messages.

    Raises
    ------
    UsageError
        If only one of them is boolean or text, or if their dimensions differ.
    """
    spec = column_spec(name, spark_type, floats, texts=texts, missing=missing)
    dtype_kinds: list[str] = [np.dtype(s.dtype).kind for s in (spec, reference)]
    same_shape = (spec.kind, spec.ndim) == (reference.kind, reference.ndim)
    if not same_shape or dtype_kinds.count("b") == 1 or dtype_kinds.count(TEXT) == 1:
        raise UsageError(
            f"Column '{name}' is {spec.cast} in {owner} but {reference.cast} in the training data; "
            "give both the same type",
            code="data-schema",
            column=name,
        )
    if dtype_kinds == ["f", "i"]:
        # fractions are detected before anything is rounded to float32
        spec = column_spec(name, spark_type, "float64")
    return replace(spec, dtype=reference.dtype)


def fitted_specs(
    columns: Sequence[tuple[str, Any]],
    floats: str,
    *,
    texts: bool,
    known: list[Any] | None,
    owner: str | None = "the rows",
    missing: Collection[str] = (),
) -> list[ColumnSpec]:
    """Return the conversions of columns to the dtypes of the model's inputs.

    Parameters
    ----------
    columns : sequence of (str, DataType)
    floats, texts
        See :func:`column_spec`.
    known : list or None
        Types of the model's inputs, as in ``BatchSource.types``.
    owner : str or None
        Name of the data in the error about booleans or texts instead of numbers; None keeps such
        columns unchanged.
    missing : collection of str
        Columns whose nulls become NaN, whatever the model's inputs are.
    """
    leaves = known if known is not None and len(known) == len(columns) else [None] * len(columns)
    return [
        column_spec(name, type_, floats, texts=texts, missing=missing)
        if name in missing
        else _fitted_spec(name, type_, floats, texts, each, owner)
        for (name, type_), each in zip(columns, leaves, strict=True)
    ]


def _fitted_spec(
    name: str,
    spark_type: DataType,
    floats: str,
    texts: bool,
    leaves: Sequence[Any] | None,
    owner: str | None,
) -> ColumnSpec:
    """Return the conversion of one column to the dtype of a model input."""
    spec = column_spec(name, spark_type, floats, texts=texts)
    dtypes = {TEXT if is_text(dtype) else dtype for _, dtype, _ in leaves or ()}
    is_map = leaves is not None and len(leaves) > 0 and leaves[0][0] is not None
    if len(dtypes) != 1 or is_map != (spec.kind == "map"):
        return spec
    (dtype,) = dtypes
    special = [dtype == each or spec.dtype == each for each in ("bool", TEXT)]
    if owner is None and dtype != spec.dtype and any(special):
        return spec
    reference = replace(spec, dtype=dtype, cast="string" if dtype == TEXT else dtype)
    return unified_spec(name, spark_type, floats, reference, owner or "", texts=texts)


def project(frame: DataFrame, specs: Sequence[ColumnSpec]) -> DataFrame:
    """Select and convert the columns of `specs` in the JVM, for :func:`decode_batch`."""
    from pyspark.sql import functions as F

    out = []
    for i, members in enumerate(_lists(specs)):
        if len(members) > 1:
            casts = {spec.cast for spec in members}
            cast = casts.pop() if len(casts) == 1 else "double"
            # an SQL text: a thousand Column objects take seconds
            column = F.expr(f"array({', '.join(_cast(spec, cast) for spec in members)})")
        else:
            column = convert(members[0])
        out.append(column.alias(f"c{i}"))
    return frame.select(*out)


def _cast(spec: ColumnSpec, cast: str) -> str:
    """Return SQL that casts a column to its spec's type and then to `cast`."""
    text = f"CAST({quoted(spec.name)} AS {spec.cast})"
    if spec.missing:
        text = f"coalesce({text}, CAST('NaN' AS {spec.cast}))"
    return text if cast == spec.cast else f"CAST({text} AS {cast})"


def quoted(name: str) -> str:
    """Quote a column name for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def convert(spec: ColumnSpec) -> Column:
    """Return the Spark expression that converts the column of a spec in the JVM."""
    from pyspark.sql import functions as F

    if spec.missing:
        return F.expr(_cast(spec, spec.cast))
    column = F.col(quoted(spec.name))
    if spec.cast != "vector":
        return column.cast(spec.cast)
    from pyspark.ml.functions import vector_to_array

    floats = spec.dtype if spec.dtype in _FLOATS else "float64"
    # a dense vector has all its values; a sparse one is expanded
    inside = F.unwrap_udt(column)
    dense = inside.getField("values").cast(f"array<{_FLOATS[floats]}>")
    array = F.when(inside.getField("type") == 1, dense).otherwise(vector_to_array(column, floats))
    # vector_to_array fails on a null without naming the column
    return F.when(column.isNotNull(), array)


def _lists(specs: Sequence[ColumnSpec]) -> list[list[ColumnSpec]]:
    """Group scalar columns to be sent as one list per row; keep every other column separate."""
    lists: dict[object, list[ColumnSpec]] = {}
    for i, spec in enumerate(specs):
        key: object = i
        if spec.kind == "plain" and spec.ndim == 0 and not is_text(spec.dtype):
            key = "bigint" if spec.cast == "bigint" else "double"
        lists.setdefault(key, []).append(spec)
    return list(lists.values())


def _matrices(specs: Sequence[ColumnSpec]) -> list[list[ColumnSpec]]:
    """Group columns of equal dtype in a list column; each group becomes one matrix."""
    groups: dict[tuple[str, str], list[ColumnSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.dtype, spec.cast), []).append(spec)
    return list(groups.values())


def decode_batch(
    specs: Sequence[ColumnSpec], batch: pa.RecordBatch
) -> tuple[list[ArraySpec], list[np.ndarray]]:
    """Decode a record batch from :func:`project` to C-contiguous arrays and their specs."""
    leaves, arrays = [], []
    decoded: list[tuple[Any, str | None, npt.NDArray[Any]]]
    for members, column in zip(_lists(specs), batch.columns, strict=True):
        if len(members) == 1:
            decoded = [(members[0].name, *pair) for pair in decode(members[0], column)]
        else:
            decoded = _decode_list(members, column)
        for name, key, array in decoded:
            leaves.append(ArraySpec(name, key, name_of_dtype(array), array.shape[1:]))
            arrays.append(np.ascontiguousarray(array))
    return leaves, arrays


def _decode_list(
    specs: Sequence[ColumnSpec], array: pa.Array
) -> list[tuple[Any, str | None, npt.NDArray[Any]]]:
    values = array.flatten()
    if values.null_count:
        missing = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) % len(specs)
        first = specs[int(missing[0])]
        raise _nulls(first, int((missing == missing[0]).sum()))
    values = values.to_numpy(zero_copy_only=False).reshape(len(array), len(specs))
    index_of = {spec.name: i for i, spec in enumerate(specs)}
    decoded: list[tuple[Any, str | None, npt.NDArray[Any]]] = []
    for members in _matrices(specs):
        columns = [index_of[spec.name] for spec in members]
        if columns == list(range(columns[0], columns[-1] + 1)):
            part = values[:, columns[0] : columns[-1] + 1]  # a view, without a copy
        else:
            part = values[:, columns]
        names: str | tuple[str, ...] = tuple(spec.name for spec in members)
        if len(members) == 1:
            names, part = members[0].name, part[:, 0]
        decoded.append((names, None, _in_dtype(members, part)))
    return decoded


def decode(spec: ColumnSpec, array: pa.Array) -> list[tuple[str | None, np.ndarray]]:
    """Decode an Arrow column to numpy arrays of shape ``(rows, ...)``.

    Returns
    -------
    list of (key, ndarray)
        One entry with key None, or one entry per key of a map column, sorted by key.

    Raises
    ------
    SourceError
        For nulls, empty arrays and maps, arrays of unequal lengths, maps with unequal keys, and
        numbers that the dtype cannot hold.
    """
    _no_nulls(spec, array)
    if spec.kind == "map":
        return _decode_map(spec, array)
    return [(None, _decode_values(spec, array, spec.ndim))]


def _no_nulls(spec: ColumnSpec, array: pa.Array) -> None:
    if array.null_count:
        raise _nulls(spec, array.null_count)


def _nulls(spec: ColumnSpec, count: int) -> SourceError:
    return SourceError(
        f"Column '{spec.name}' holds nulls ({count} in the first batch that has any); fill or "
        f'drop them first, e.g. df.dropna(subset=["{spec.name}"])',
        code="data-null",
        column=spec.name,
    )


def _decode_values(spec: ColumnSpec, array: pa.Array, ndim: int) -> npt.NDArray[Any]:
    rows, shape = len(array), []
    for _ in range(ndim):
        _no_nulls(spec, array)
        shape.append(common_length(spec, np.diff(array.offsets.to_numpy()), "arrays"))
        array = array.flatten()
    _no_nulls(spec, array)
    if is_text(spec.dtype):
        return encoded(array, spec.name).reshape(rows, *shape)
    return _in_dtype([spec], array.to_numpy(zero_copy_only=False)).reshape(rows, *shape)


def common_length(
    spec: ColumnSpec,
    lengths: npt.NDArray[Any],
    noun: str,
    advice: str = "pad or cut them to one length first",
) -> int:
    """Return the length of every list or map of a column; raise if lengths differ."""
    if not len(lengths):
        return 0
    length = int(lengths[0])
    if (lengths != length).any():
        other = int(lengths[lengths != length][0])
        raise SourceError(
            f"Column '{spec.name}' holds {noun} of different lengths ({length} and {other}); "
            f"{advice}",
            code="data-shape",
            column=spec.name,
        )
    if not length:
        raise SourceError(
            f"Column '{spec.name}' holds empty {noun}; leave it out",
            code="data-empty",
            column=spec.name,
        )
    return length


def _in_dtype(members: Sequence[ColumnSpec], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Cast values to the dtype of their columns; raise if an integer cannot hold a value."""
    wanted = np.dtype(members[0].dtype)
    if values.dtype == wanted:
        return values
    with np.errstate(invalid="ignore"):
        cast = values.astype(wanted)
    if members[0].cast == "int":  # Spark has cast it, and a double can hold it
        return cast
    if wanted.kind == "i" and (lossy := cast != values).any():
        first = int(np.flatnonzero(lossy)[0])
        raise SourceError(
            f"Column '{members[first % len(members)].name}' holds {values.flat[first]}, which is "
            f"no {wanted.name}, its type in the training data; cast one of the two columns",
            code="data-value",
        )
    return cast


def _decode_map(spec: ColumnSpec, array: pa.Array) -> list[tuple[str | None, npt.NDArray[Any]]]:
    rows = len(array)
    if rows == 0:
        return []
    advice = "give every row the same keys"
    offsets = array.offsets.to_numpy()
    width = common_length(spec, np.diff(offsets), "maps", advice)
    inside = slice(int(offsets[0]), int(offsets[-1]))
    keys = array.keys[inside].dictionary_encode()
    names = keys.dictionary.to_pylist()
    codes = keys.indices.to_numpy().reshape(rows, width)
    # the key order of maps may differ between rows
    order = np.argsort(codes, axis=1)
    if (np.take_along_axis(codes, order, 1) != np.arange(width)).any():
        raise SourceError(
            f"Column '{spec.name}' is a map whose keys differ between rows (the first one has "
            f"{names[:width]}); {advice}",
            code="data-structure",
            column=spec.name,
        )
    values = _decode_values(spec, array.items[inside], spec.ndim)
    values = values.reshape(rows, width, *values.shape[1:])
    row = np.arange(rows)
    ranked = sorted(range(width), key=lambda i: names[i])
    return [(str(names[i]), np.ascontiguousarray(values[row, order[:, i]])) for i in ranked]
