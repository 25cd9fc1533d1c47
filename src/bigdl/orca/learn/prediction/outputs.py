"""Dtypes and shapes of model outputs, as arrays and as Spark columns.

Every output keeps its dtype, whatever the input type:

====================  =========  ==================  =================================
model dtype           arrays     scalar column       column of 1-D rows
====================  =========  ==================  =================================
bool                  bool       boolean             array<boolean>
int8                  int8       tinyint             array<tinyint>
uint8, int16          same       smallint            array<smallint>
uint16, int32         same       int                 array<int>
uint32, int64         same       bigint              array<bigint>
uint64                uint64     bigint (or error)   array<bigint>
float16, bfloat16     float32    float               vector (array<float> in SQL)
float32               float32    float               vector (array<float> in SQL)
float64               float64    double              vector (array<double> in SQL)
string                object     string              array<string>
complex               error      error               error
====================  =========  ==================  =================================

Spark needs the schema before any row is computed, so the model runs once on the driver on two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.orca.inference.shipping import LoadedModel

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column
    from pyspark.sql.types import DataType
else:
    pa = LazyModule("pyarrow", "orca")

_TYPES = {  # dtype: Spark class, SQL name, Arrow name
    "bool": ("BooleanType", "boolean", "bool"),
    "int8": ("ByteType", "tinyint", "int8"),
    "uint8": ("ShortType", "smallint", "int16"),
    "int16": ("ShortType", "smallint", "int16"),
    "uint16": ("IntegerType", "int", "int32"),
    "int32": ("IntegerType", "int", "int32"),
    "uint32": ("LongType", "bigint", "int64"),
    "int64": ("LongType", "bigint", "int64"),
    "uint64": ("LongType", "bigint", "int64"),
    "float32": ("FloatType", "float", "float32"),
    "float64": ("DoubleType", "double", "float64"),
    "object": ("StringType", "string", "string"),
}


@dataclass(frozen=True)
class OutputSpec:
    """Key, dtype and row shape of one model output.

    Attributes
    ----------
    key : str or None
        Key of the output if the model returns a dict, else None.
    dtype : str
        NumPy dtype name from this module's table; ``"object"`` for strings.
    shape : tuple of int
        Shape of one row.
    """

    key: str | None = None
    dtype: str = "float32"
    shape: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith("float")

    @property
    def sql(self) -> str:
        """SQL type of one row of the output."""
        return nested_sql(self.dtype, len(self.shape))

    def empty(self) -> np.ndarray:
        """Return an array with zero rows of this output."""
        return np.empty((0, *self.shape), self.dtype)


def nested_sql(dtype: str, ndim: int) -> str:
    """Return the SQL type of a cell with `ndim` dimensions."""
    return "array<" * ndim + _TYPES[dtype][1] + ">" * ndim


# -- model outputs to arrays -----------------------------------------------------------------------


def run_model(
    model: LoadedModel, batch: list, rows: int, known: Sequence[OutputSpec] | None = None
) -> list[tuple[str | None, np.ndarray]]:
    """Run the model on a batch of numpy columns and return its outputs as validated arrays.

    Parameters
    ----------
    model : LoadedModel
    batch : list
    rows : int
        Number of rows in the batch.
    known : sequence of OutputSpec, optional
        Outputs inferred from other rows, to check and convert to.

    Returns
    -------
    list of (key, ndarray of shape (rows, ...))
        The key is None unless the model returns a dict.
    """
    returned = model(batch)
    if isinstance(returned, dict):
        items = list(returned.items())
    elif isinstance(returned, list | tuple):
        items = [(None, item) for item in returned]
    else:
        items = [(None, returned)]
    if known is not None and len(items) != len(known):
        raise UsageError(
            f"The model returned {len(items)} outputs for one batch but {len(known)} for another",
            code="model-output",
        )
    return [
        (key, _rows_of(item, rows, known[i] if known else None, model.squeezes))
        for i, (key, item) in enumerate(items)
    ]


def infer_outputs(model: LoadedModel, batch: list) -> list[OutputSpec]:
    """Infer the dtype and row shape of each output by running the model on two rows.

    One row is not enough: a model that squeezes its output would drop the row dimension.
    """
    return [
        OutputSpec(key, array.dtype.name, array.shape[1:])
        for key, array in run_model(model, batch, 2)
    ]


def as_array(value: object) -> np.ndarray:
    """Convert a model output to an array with a dtype that can be stored in a Spark column.

    Raises
    ------
    UsageError
        If the output is not a tensor or array, or has complex numbers.
    """
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.is_quantized:
            value = value.dequantize()
        if value.layout is not torch.strided:
            value = value.to_dense()
        if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
            value = value.float()
        value = value.resolve_conj().resolve_neg().numpy()
    elif not isinstance(value, np.ndarray):
        raise UsageError(
            "predict needs a model whose forward returns a tensor, or a tuple, list or dict of "
            f"them; it returned {type(value).__name__}",
            code="model-output",
        )
    if value.dtype.kind == "c":
        raise UsageError(
            "The model returns complex numbers, which Spark columns cannot hold; return "
            "torch.view_as_real(x), or x.real, x.imag or x.abs()",
            code="model-output",
        )
    if value.dtype.name in _TYPES and value.dtype.kind != "O":
        return value.astype(value.dtype.newbyteorder("="), copy=False)
    if value.dtype.kind == "f":  # float16, and float128 of NumPy
        return value.astype(np.float32 if value.dtype.itemsize < 4 else np.float64)
    if value.dtype.name.startswith(("bfloat16", "float8")):  # of ml_dtypes
        return value.astype(np.float32)
    if value.dtype.kind in "OSU":
        return _texts(value)
    raise UsageError(
        f"The model returns dtype {value.dtype}, which Spark columns cannot hold; return numbers",
        code="model-output",
    )


def _texts(values):
    texts = np.empty(values.shape, object)
    for position, text in np.ndenumerate(values):
        if not isinstance(text, str | bytes):
            raise UsageError(
                f"The model returns values of type {type(text).__name__}, which Spark columns "
                f"cannot "
                "hold; return numbers",
                code="model-output",
            )
        texts[position] = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return texts


def _rows_of(item, rows, known: OutputSpec | None, squeezes) -> np.ndarray:
    array = as_array(item)
    while squeezes and array.ndim > 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if rows == 1 and known is not None and array.size == np.prod(known.shape, dtype=int):
        array = array.reshape(1, *known.shape)  # squeezed by the model
    if array.ndim == 0 or array.shape[0] != rows:
        raise UsageError(
            f"predict needs one output row per input row; the model returned an output "
            f"of shape {tuple(item.shape)} for {rows} rows",
            code="model-output",
        )
    if known is None:
        return array
    if array.ndim != len(known.shape) + 1:
        raise UsageError(
            f"The model returned an output of shape {tuple(item.shape)} for {rows} rows, but shape "
            f"{tuple(known.shape)} per row before; the number of dimensions must not change",
            code="model-output",
        )
    if array.dtype.name != known.dtype and not np.can_cast(array.dtype, known.dtype):
        raise UsageError(
            f"The model returned dtype {array.dtype} for some rows and {known.dtype} for others; "
            "the output dtype must not change",
            code="model-output",
        )
    return array.astype(known.dtype, copy=False)


# -- names -----------------------------------------------------------------------------------------


def select_outputs(
    keys: Sequence[str | None], output_cols: Sequence[str] | None
) -> tuple[list[str], list[int]]:
    """Return the output column names and the indices of the selected outputs.

    Without `output_cols`, outputs that have no keys share the single name ``prediction``.
    """
    named, everything = [str(key) for key in keys if key is not None], list(range(len(keys)))
    if output_cols is None:
        return named or ["prediction"], everything
    names = list(output_cols)
    if named and set(names) <= set(named):
        return names, [named.index(name) for name in names]
    if len(names) != len(keys):
        returned = f"{len(keys)} outputs" + (f" ({', '.join(named)})" if named else "")
        raise UsageError(
            f"The model returns {returned} but output_cols names {len(names)}: {names}",
            code="argument-value",
            argument="output_cols",
        )
    return names, everything


# -- Spark columns ---------------------------------------------------------------------------------


def spark_type(ndim: int, dtype: str = "float32") -> DataType:
    """Return the Spark type of a column whose cells have `ndim` dimensions."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types as T

    if ndim == 1 and dtype.startswith("float"):
        return VectorUDT()
    nested: T.DataType = getattr(T, _TYPES[dtype][0])()
    for _ in range(ndim):
        nested = T.ArrayType(nested)
    return nested


@dataclass(frozen=True)
class OutputColumns:
    """Mapping of a model's outputs to Spark columns, or to one SQL value.

    Attributes
    ----------
    outputs : sequence of OutputSpec
        All outputs, in the model's order.
    names : list of str
        One name per selected output, or a single name that they share.
    order : sequence of int
        Indices of the selected outputs.
    """

    outputs: Sequence[OutputSpec]
    names: list[str]
    order: Sequence[int]

    @classmethod
    def of(cls, outputs: Sequence[OutputSpec], output_cols: Sequence[str] | None) -> OutputColumns:
        """Build the mapping from the user's column names, or from default names if None."""
        return cls(outputs, *select_outputs([each.key for each in outputs], output_cols))

    def check(self, columns: Sequence[str]) -> None:
        """Raise an error if the DataFrame already has one of these column names, ignoring case."""
        taken = {name.lower() for name in columns}
        for name in self.names:
            if name.lower() in taken:
                raise UsageError(
                    f"The DataFrame already has a column '{name}'; rename it, or name the outputs "
                    "with output_cols=",
                    code="column-duplicate",
                    column=name,
                )
            taken.add(name.lower())

    @property
    def chosen(self) -> list[OutputSpec]:
        return [self.outputs[number] for number in self.order]

    @property
    def joined(self) -> str | None:
        """Type of a column that holds several outputs: ``"array"``, ``"struct"``, or None.

        ``"array"`` if one type holds all outputs exactly, ``"struct"`` for mixed dtypes (such as
        ids and scores), None if each output is a separate column.
        """
        if len(self.names) == len(self.order):
            return None
        outputs = self.chosen
        alike = len({_TYPES[each.dtype] for each in outputs}) == 1
        return "array" if alike or all(each.is_float for each in outputs) else "struct"

    @property
    def joined_dtype(self) -> str:
        """Common dtype of the outputs that share an array column."""
        dtypes = [each.dtype for each in self.chosen]
        return "float64" if "float64" in dtypes else dtypes[0]

    @property
    def aliases(self) -> list[str]:
        """Positional column names for :meth:`schema`, which need no quoting in Spark."""
        return [f"p{i}" for i in range(len(self.names))]

    def schema(self, schema):
        """Return a DataFrame schema with these columns appended, named by :attr:`aliases`."""
        from pyspark.sql import types as T

        added = [T.StructField(n, k) for n, k in zip(self.aliases, self.types(), strict=True)]
        return T.StructType([*schema.fields, *added])

    def types(self) -> list:
        """Return the Spark types of the columns."""
        from pyspark.sql import types as T

        types: list[T.DataType] = [spark_type(len(each.shape), each.dtype) for each in self.chosen]
        if self.joined == "array":
            types = [T.ArrayType(spark_type(1, self.joined_dtype))]
        elif self.joined == "struct":
            types = [T.StructType([T.StructField(f"_{i + 1}", k) for i, k in enumerate(types)])]
        return types

    @property
    def ddl(self) -> str:
        """SQL type of the outputs as one value; a struct if there are several names."""
        chosen = self.chosen
        if self.joined == "array":
            return f"array<{nested_sql(self.joined_dtype, 1)}>"
        if len(chosen) == 1:
            return chosen[0].sql
        names = self.names if self.joined is None else [f"_{i + 1}" for i in range(len(chosen))]
        fields = zip(names, chosen, strict=True)
        return f"struct<{','.join(f'{_quoted(name)}:{each.sql}' for name, each in fields)}>"

    def arrow(self, arrays: Sequence[np.ndarray], rows: int) -> list:
        """Convert the outputs to Arrow arrays of the types in :meth:`schema`.

        Parameters
        ----------
        arrays : sequence of ndarray
            All outputs, each of shape ``(rows, ...)``; an empty list if `rows` is 0.
        rows : int
        """
        return self._columns(arrays, rows, _vectors_of_floats)

    def sql_value(self, arrays: Sequence[np.ndarray], rows: int) -> pa.Array:
        """Convert the outputs to one Arrow array of SQL type :attr:`ddl`."""
        made = self._columns(arrays, rows, list_column)
        return made[0] if len(made) == 1 else pa.StructArray.from_arrays(made, names=self.names)

    def of_value(self, value: Column) -> list:
        """Split a column that :meth:`sql_value` returned into the columns of :meth:`schema`."""
        from pyspark.sql import functions as F

        chosen = self.chosen
        if self.joined == "array":
            is_float = chosen[0].is_float
            return [F.transform(value, _as_vector) if is_float else value]
        if len(chosen) == 1:
            fields = [value]
        elif self.joined == "struct":
            fields = [value.getField(f"_{i + 1}") for i in range(len(chosen))]
        else:
            fields = [value.getField(name) for name in self.names]
        made = [
            _as_vector(field) if each.is_float and len(each.shape) == 1 else field
            for field, each in zip(fields, chosen, strict=True)
        ]
        if self.joined is None:
            return made
        both = F.struct(*(each.alias(f"_{i + 1}") for i, each in enumerate(made)))
        return [F.when(value.isNotNull(), both)]

    def _columns(self, arrays, rows, column: Callable[[np.ndarray], Any]) -> list:
        arrays = list(arrays) or [each.empty() for each in self.outputs]
        chosen = [arrays[number] for number in self.order]
        if self.joined == "array":
            return [_joined([a.astype(self.joined_dtype) for a in chosen], rows, column)]
        made = [column(array) for array in chosen]
        if self.joined is None:
            return made
        return [pa.StructArray.from_arrays(made, names=[f"_{i + 1}" for i in range(len(made))])]


def _as_vector(column):
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    return F.when(column.isNotNull(), array_to_vector(column))


def _quoted(name):
    return "`" + name.replace("`", "``") + "`"


def list_column(array: np.ndarray) -> pa.Array:
    """Convert an array's rows to an Arrow array of scalars or nested lists."""
    out = _values(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        out = _lists(out, int(np.prod(array.shape[:axis])), array.shape[axis])
    return out


def _values(flat):
    arrow_type = pa.type_for_alias(_TYPES[flat.dtype.name][2])
    if flat.dtype == np.uint64 and len(flat) and int(flat.max()) >= 2**63:
        raise UsageError(
            f"The model returned {flat.max()}, which exceeds Spark's bigint; return int64 or "
            "strings",
            code="model-output",
        )
    if flat.dtype.kind == "u":
        flat = flat.astype(arrow_type.to_pandas_dtype())
    return pa.array(flat, arrow_type)


def _lists(values, count, width):
    """Build an Arrow array of `count` lists with `width` values each."""
    offsets = np.arange(count + 1, dtype=np.int64) * width
    if offsets[-1] >= 2**31:
        raise UsageError(
            "The predictions of one Spark batch have more than 2**31 numbers; lower "
            "spark.sql.execution.arrow.maxRecordsPerBatch",
            code="data-size",
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _vectors_of_floats(array):
    return _vectors(array) if array.ndim == 2 and array.dtype.kind == "f" else list_column(array)


def _vectors(array):
    """Convert the rows of a 2-D array to Spark dense vectors in Arrow."""
    rows, width = array.shape
    values = _lists(pa.array(array.astype(np.float64).reshape(-1)), rows, width)
    return pa.StructArray.from_arrays(
        [
            pa.array(np.ones(rows, np.int8)),
            pa.nulls(rows, pa.int32()),
            pa.nulls(rows, pa.list_(pa.int32())),
            values,
        ],
        fields=[
            pa.field("type", pa.int8(), nullable=False),
            pa.field("size", pa.int32()),
            pa.field("indices", pa.list_(pa.int32())),
            pa.field("values", values.type),
        ],
    )


def _joined(arrays, rows, column):
    """Combine several outputs into one Arrow column: per row, a list of the flattened outputs."""
    flat = [a.reshape(rows, -1) if rows else a.reshape(0, 1) for a in arrays]
    pieces = [column(a) for a in flat]
    order = np.arange(rows * len(flat)).reshape(len(flat), rows).T.reshape(-1)
    mixed = pa.concat_arrays(pieces).take(pa.array(order))
    return _lists(mixed, rows, len(flat))


# -- rows with nulls -------------------------------------------------------------------------------


def rows_without_null(columns: Sequence[pa.Array], are_whole: Sequence[bool]) -> np.ndarray | None:
    """Return a mask of the rows without nulls at any depth, or None if no row has a null.

    Parameters
    ----------
    columns : sequence of pyarrow.Array
    are_whole : sequence of bool
        Which columns the model takes as integers, so that NaN also counts as null.
    """
    missing = None
    for column, is_whole in zip(columns, are_whole, strict=True):
        rows = _null_rows(column, is_whole)
        if rows is not None:
            missing = rows if missing is None else missing | rows
    return None if missing is None else ~missing


def _null_rows(array, is_whole: bool) -> np.ndarray | None:
    types = pa.types
    rows = None
    if array.null_count:
        rows = array.is_null().to_numpy(zero_copy_only=False)
    if types.is_struct(array.type):  # a Spark vector: only its values matter
        inside = _null_rows(array.flatten()[-1], is_whole)
        return inside if rows is None or inside is None else rows | inside
    is_map = types.is_map(array.type)
    if is_map or types.is_list(array.type) or types.is_large_list(array.type):
        offsets = array.offsets.to_numpy()
        values = (array.items if is_map else array.values)[int(offsets[0]) : int(offsets[-1])]
        inside = _null_rows(values, is_whole)
        if inside is not None:
            rows = np.zeros(len(array), bool) if rows is None else np.array(rows)
            rows[np.repeat(np.arange(len(array)), np.diff(offsets))[inside]] = True
        return rows
    if is_whole and types.is_floating(array.type):
        nan = np.isnan(array.fill_null(0).to_numpy(zero_copy_only=False))
        if nan.any():
            return nan if rows is None else rows | nan
    return rows


def with_nulls(column: pa.Array, valid: np.ndarray | None) -> pa.Array:
    """Expand a column of valid rows to all rows, with nulls in the invalid rows."""
    if valid is None:
        return column
    aliases = np.zeros(len(valid), np.int64)
    aliases[valid] = np.arange(len(column))
    return column.take(pa.array(aliases, mask=~valid))
