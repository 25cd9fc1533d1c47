"""Outputs of a model: their dtypes and shapes, as arrays and as columns of Spark.

Every output keeps its dtype, whatever the input was:

====================  =========  ==================  =================================
model                 arrays     number of a column  several numbers of a column
====================  =========  ==================  =================================
bool                  bool       boolean             array<boolean>
int8                  int8       tinyint             array<tinyint>
uint8, int16          as it is   smallint            array<smallint>
uint16, int32         as it is   int                 array<int>
uint32, int64         as it is   bigint              array<bigint>
uint64                uint64     bigint (or error)   array<bigint>
float16, bfloat16     float32    float               vector (array<float> in SQL)
float32               float32    float               vector (array<float> in SQL)
float64               float64    double              vector (array<double> in SQL)
text                  object     string              array<string>
complex               refused    refused             refused
====================  =========  ==================  =================================

A schema must be known before a row is computed, so the model runs once on the driver, on two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.orca.inference.shipping import LoadedModel

pa = LazyModule("pyarrow", "orca")

_TYPES = {  # by dtype: Spark's class, its name in SQL, Arrow's name
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
    """One output of a model.

    Attributes
    ----------
    key : str or None
        None unless the model returns a dict.
    dtype : str
        numpy name of a dtype of the module's table; ``"object"`` for texts.
    shape : tuple of int
        Of a row.
    """

    key: str | None = None
    dtype: str = "float32"
    shape: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith("float")

    @property
    def sql(self) -> str:
        """Its type as a value of SQL."""
        return nested_sql(self.dtype, len(self.shape))

    def empty(self) -> np.ndarray:
        """Return no rows of it."""
        return np.empty((0, *self.shape), self.dtype)


def nested_sql(dtype: str, ndim: int) -> str:
    """Return the SQL type of cells that have `ndim` dimensions."""
    return "array<" * ndim + _TYPES[dtype][1] + ">" * ndim


# -- from what a model returns to arrays -----------------------------------------------------------


def run_model(
    model: LoadedModel, batch: list, rows: int, known: Sequence[OutputSpec] | None = None
) -> list[tuple[str | None, np.ndarray]]:
    """Return the outputs for a batch of numpy columns.

    Parameters
    ----------
    model : LoadedModel
    batch : list
    rows : int
        Of the batch.
    known : sequence of OutputSpec, optional
        What the model returned for other rows.

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
            f"The model returned {len(items)} outputs for one batch and {len(known)} for another",
            code="model-output",
        )
    return [
        (key, _rows_of(item, rows, known[i] if known else None, model.squeezes))
        for i, (key, item) in enumerate(items)
    ]


def outputs_of_rows(model: LoadedModel, batch: list) -> list[OutputSpec]:
    """Return what a model returns for a row, seen on two rows.

    A model that squeezes its output hides the dimension of a single row.
    """
    return [
        OutputSpec(key, array.dtype.name, array.shape[1:])
        for key, array in run_model(model, batch, 2)
    ]


def as_array(value: Any) -> np.ndarray:
    """Return an output as an array of a dtype of the module's table.

    Raises
    ------
    UsageError
        For what is no tensor, and for complex numbers.
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
            "The model returns complex numbers, for which there is no column; return "
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
        f"The model returns values of {value.dtype}, for which there is no column; return numbers",
        code="model-output",
    )


def _texts(values):
    texts = np.empty(values.shape, object)
    for place, text in np.ndenumerate(values):
        if not isinstance(text, str | bytes):
            raise UsageError(
                f"The model returns values of {type(text).__name__}, for which there is no column; "
                "return numbers",
                code="model-output",
            )
        texts[place] = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return texts


def _rows_of(item, rows, known: OutputSpec | None, squeezes) -> np.ndarray:
    array = as_array(item)
    while squeezes and array.ndim > 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if rows == 1 and known is not None and array.size == np.prod(known.shape, dtype=int):
        array = array.reshape(1, *known.shape)  # squeezed by the model
    if array.ndim == 0 or array.shape[0] != rows:
        raise UsageError(
            f"predict needs one row of output for each row of input; the model returned an output "
            f"of shape {tuple(item.shape)} for {rows} rows",
            code="model-output",
        )
    if known is None:
        return array
    if array.ndim != len(known.shape) + 1:
        raise UsageError(
            f"The model returned an output of shape {tuple(item.shape)} for {rows} rows, but "
            f"{tuple(known.shape)} per row for others; its number of dimensions must not change",
            code="model-output",
        )
    if array.dtype.name != known.dtype and not np.can_cast(array.dtype, known.dtype):
        raise UsageError(
            f"The model returned an output of {array.dtype} for some rows and of {known.dtype} for "
            "others; its dtype must not change",
            code="model-output",
        )
    return array.astype(known.dtype, copy=False)


# -- names -----------------------------------------------------------------------------------------


def chosen_outputs(
    keys: Sequence[str | None], output_cols: Sequence[str] | None
) -> tuple[list[str], list[int]]:
    """Return names for the outputs of a model, and the numbers of the outputs that have them.

    Several outputs without keys or names of the user's have one name together, ``prediction``.
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


# -- columns of Spark ------------------------------------------------------------------------------


def spark_type(ndim: int, dtype: str = "float32") -> Any:
    """Return the type of a column whose cells have `ndim` dimensions."""
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
    """The columns, or the value of SQL, that a model's outputs become.

    Attributes
    ----------
    outputs : sequence of OutputSpec
        In the order of the model.
    names : list of str
        One for each chosen output, or a single one for all of them together.
    order : sequence of int
        Which outputs are chosen.
    """

    outputs: Sequence[OutputSpec]
    names: list[str]
    order: Sequence[int]

    @classmethod
    def of(cls, outputs: Sequence[OutputSpec], output_cols: Sequence[str] | None) -> OutputColumns:
        """Return the columns for names that the user chose, or for none."""
        return cls(outputs, *chosen_outputs([each.key for each in outputs], output_cols))

    def check(self, columns: Sequence[str]) -> None:
        """Refuse names that the DataFrame has already; Spark does not tell their case apart."""
        taken = {name.lower() for name in columns}
        for name in self.names:
            if name.lower() in taken:
                raise UsageError(
                    f"The DataFrame has a column '{name}' already; rename it, or name the outputs "
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
        """The form of a column that several outputs share.

        ``"array"`` where one type holds all of them exactly, ``"struct"`` for other dtypes together
        (ids and scores), None where each has its own column.
        """
        if len(self.names) == len(self.order):
            return None
        outputs = self.chosen
        alike = len({_TYPES[each.dtype] for each in outputs}) == 1
        return "array" if alike or all(each.is_float for each in outputs) else "struct"

    @property
    def joined_dtype(self) -> str:
        """The dtype of all outputs that share an array."""
        dtypes = [each.dtype for each in self.chosen]
        return "float64" if "float64" in dtypes else dtypes[0]

    @property
    def places(self) -> list[str]:
        """Names of the columns in :meth:`schema`, free of what Spark reads as syntax."""
        return [f"p{i}" for i in range(len(self.names))]

    def schema(self, schema):
        """A frame's schema with these columns added, under the names of :attr:`places`."""
        from pyspark.sql import types as T

        added = [T.StructField(n, k) for n, k in zip(self.places, self.types(), strict=True)]
        return T.StructType([*schema.fields, *added])

    def types(self) -> list:
        """Return the Spark types of the columns."""
        from pyspark.sql import types as T

        kinds = [spark_type(len(each.shape), each.dtype) for each in self.chosen]
        if self.joined == "array":
            kinds = [T.ArrayType(spark_type(1, self.joined_dtype))]
        elif self.joined == "struct":
            kinds = [T.StructType([T.StructField(f"_{i + 1}", k) for i, k in enumerate(kinds)])]
        return kinds

    @property
    def ddl(self) -> str:
        """The type of the outputs as one value of SQL: a struct for several names."""
        chosen = self.chosen
        if self.joined == "array":
            return f"array<{nested_sql(self.joined_dtype, 1)}>"
        if len(chosen) == 1:
            return chosen[0].sql
        names = self.names if self.joined is None else [f"_{i + 1}" for i in range(len(chosen))]
        fields = zip(names, chosen, strict=True)
        return f"struct<{','.join(f'{_quoted(name)}:{each.sql}' for name, each in fields)}>"

    def arrow(self, arrays: Sequence[np.ndarray], rows: int) -> list:
        """The columns in the Arrow types that Spark reads for :meth:`schema`.

        Parameters
        ----------
        arrays : sequence of ndarray
            Every output, of shape ``(rows, ...)``; none without rows.
        rows : int
        """
        return self._columns(arrays, rows, _vectors_of_floats)

    def sql_value(self, arrays: Sequence[np.ndarray], rows: int) -> Any:
        """The same as one array of values of SQL of type :attr:`ddl`."""
        made = self._columns(arrays, rows, list_column)
        return made[0] if len(made) == 1 else pa.StructArray.from_arrays(made, names=self.names)

    def of_value(self, value: Any) -> list:
        """The columns of :meth:`schema` from a column that holds :meth:`sql_value`."""
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


def list_column(array: np.ndarray) -> Any:
    """Rows of an array as numbers or texts, or as nested lists of them."""
    out = _values(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        out = _lists(out, int(np.prod(array.shape[:axis])), array.shape[axis])
    return out


def _values(flat):
    kind = pa.type_for_alias(_TYPES[flat.dtype.name][2])
    if flat.dtype == np.uint64 and len(flat) and int(flat.max()) >= 2**63:
        raise UsageError(
            f"The model returned {flat.max()}, which is beyond Spark's bigint; return int64, or "
            "texts",
            code="model-output",
        )
    if flat.dtype.kind == "u":
        flat = flat.astype(kind.to_pandas_dtype())
    return pa.array(flat, kind)


def _lists(values, count, width):
    """`count` lists of `width` values each."""
    offsets = np.arange(count + 1, dtype=np.int64) * width
    if offsets[-1] >= 2**31:
        raise UsageError(
            "The predictions of one batch of Spark have more than 2**31 numbers; set "
            "spark.sql.execution.arrow.maxRecordsPerBatch to fewer rows",
            code="data-size",
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _vectors_of_floats(array):
    return _vectors(array) if array.ndim == 2 and array.dtype.kind == "f" else list_column(array)


def _vectors(array):
    """Rows of a 2-D array as Spark's dense vectors."""
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
    """Several outputs as one column: an array of the flat outputs per row."""
    flat = [a.reshape(rows, -1) if rows else a.reshape(0, 1) for a in arrays]
    pieces = [column(a) for a in flat]
    order = np.arange(rows * len(flat)).reshape(len(flat), rows).T.reshape(-1)
    mixed = pa.concat_arrays(pieces).take(pa.array(order))
    return _lists(mixed, rows, len(flat))


# -- rows that cannot be answered ------------------------------------------------------------------


def answered_rows(columns: Sequence[Any], are_whole: Sequence[bool]) -> np.ndarray | None:
    """Return which rows of Arrow columns hold no null at any depth; None if all do.

    Parameters
    ----------
    columns : sequence of pyarrow.Array
    are_whole : sequence of bool
        Of which columns the model takes whole numbers, so that NaN is a missing one, too.
    """
    missing = None
    for column, is_whole in zip(columns, are_whole, strict=True):
        rows = _null_rows(column, is_whole)
        if rows is not None:
            missing = rows if missing is None else missing | rows
    return None if missing is None else ~missing


def _null_rows(array, is_whole: bool) -> np.ndarray | None:
    kinds = pa.types
    rows = None
    if array.null_count:
        rows = array.is_null().to_numpy(zero_copy_only=False)
    if kinds.is_struct(array.type):  # a vector, of which only the values are of interest
        inside = _null_rows(array.flatten()[-1], is_whole)
        return inside if rows is None or inside is None else rows | inside
    is_map = kinds.is_map(array.type)
    if is_map or kinds.is_list(array.type) or kinds.is_large_list(array.type):
        offsets = array.offsets.to_numpy()
        values = (array.items if is_map else array.values)[int(offsets[0]) : int(offsets[-1])]
        inside = _null_rows(values, is_whole)
        if inside is not None:
            rows = np.zeros(len(array), bool) if rows is None else np.array(rows)
            rows[np.repeat(np.arange(len(array)), np.diff(offsets))[inside]] = True
        return rows
    if is_whole and kinds.is_floating(array.type):
        nan = np.isnan(array.fill_null(0).to_numpy(zero_copy_only=False))
        if nan.any():
            return nan if rows is None else rows | nan
    return rows


def with_nulls(column: Any, answered: np.ndarray | None) -> Any:
    """Return a column of the answered rows with nulls for the others."""
    if answered is None:
        return column
    places = np.zeros(len(answered), np.int64)
    places[answered] = np.arange(len(column))
    return column.take(pa.array(places, mask=~answered))
