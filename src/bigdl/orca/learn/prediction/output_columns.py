"""Columns of a Spark DataFrame from the outputs of a model.

One number per row is a float, a vector per row a ``DenseVector``, more dimensions nested arrays of
float.  Several outputs are one array of vectors, or a column each if they have names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError

__all__ = ["Output", "OutputColumns"]


@dataclass(frozen=True)
class Output:
    """Key (if the model returns a dict) and shape (without rows) of one output of a model."""

    key: str | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OutputColumns:
    """The columns that prediction adds.

    Attributes
    ----------
    outputs : sequence of Output
        In the order of the model.
    names : list of str
        One for each output, or a single one for all of them together.
    order : sequence of int
        Which outputs become columns.
    """

    outputs: Sequence[Output]
    names: list[str]
    order: Sequence[int]

    @classmethod
    def of(cls, outputs: Sequence[Output], output_cols: Sequence[str] | None) -> OutputColumns:
        """The columns for what a model returns and what the user wants to call it."""
        everything = range(len(outputs))
        keys = [str(o.key) for o in outputs if o.key is not None]
        if output_cols is None:
            return cls(outputs, keys or ["prediction"], everything)
        names = list(output_cols)
        if keys and set(names) <= set(keys):
            return cls(outputs, names, [keys.index(name) for name in names])
        if len(names) != len(outputs):
            returned = f"{len(outputs)} outputs" + (f" ({', '.join(keys)})" if keys else "")
            raise UsageError(
                f"The model returns {returned} but output_cols names {len(names)}: {names}"
            )
        return cls(outputs, names, everything)

    def check(self, columns: Sequence[str]) -> None:
        """Refuse names that the DataFrame has already; Spark does not tell their case apart."""
        taken = {name.lower() for name in columns}
        for name in self.names:
            if name.lower() in taken:
                raise UsageError(
                    f"The DataFrame has a column '{name}' already; rename it, or name the outputs "
                    "with output_cols="
                )
            taken.add(name.lower())

    @property
    def _shapes(self):
        return [self.outputs[i].shape for i in self.order]

    @property
    def _is_joined(self) -> bool:
        return len(self.names) < len(self.order)

    @property
    def places(self) -> list[str]:
        """Names of the columns in :meth:`schema`, free of what Spark reads as syntax."""
        return [f"p{i}" for i in range(len(self.names))]

    def schema(self, schema):
        """A frame's schema with these columns added, under the names of :attr:`places`."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql import types as T

        def of(shape):
            if len(shape) == 1:
                return VectorUDT()
            nested: T.DataType = T.FloatType()
            for _ in shape:
                nested = T.ArrayType(nested)
            return nested

        kinds = [T.ArrayType(VectorUDT())] if self._is_joined else [of(s) for s in self._shapes]
        added = [T.StructField(n, k) for n, k in zip(self.places, kinds, strict=True)]
        return T.StructType([*schema.fields, *added])

    def arrow(self, arrays: Sequence[np.ndarray]) -> list:
        """The columns in the Arrow types that Spark reads for :meth:`schema`.

        Parameters
        ----------
        arrays : sequence of ndarray
            Every output, of shape ``(rows, ...)``.
        """
        chosen = [arrays[i] for i in self.order]
        return [_joined(chosen)] if self._is_joined else [_column(a) for a in chosen]


def _column(array):
    import pyarrow as pa

    if array.ndim == 2:
        return _vectors(array)
    out = pa.array(np.ascontiguousarray(array).reshape(-1), pa.float32())
    for axis in range(array.ndim - 1, 0, -1):
        out = _lists(out, int(np.prod(array.shape[:axis])), array.shape[axis])
    return out


def _lists(values, count, width):
    """`count` lists of `width` values each."""
    import pyarrow as pa

    offsets = np.arange(count + 1, dtype=np.int64) * width
    if offsets[-1] >= 2**31:
        raise UsageError(
            "The predictions of one batch of Spark have more than 2**31 numbers; set "
            "spark.sql.execution.arrow.maxRecordsPerBatch to fewer rows"
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _vectors(array):
    """Rows of a 2-D array as Spark's dense vectors."""
    import pyarrow as pa

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


def _joined(arrays):
    """Several outputs as one column: an array of vectors per row."""
    import pyarrow as pa

    rows = len(arrays[0])
    flat = [a.reshape(rows, -1) if rows else a.reshape(0, 1) for a in arrays]
    pieces = [_vectors(a) for a in flat]
    order = np.arange(rows * len(flat)).reshape(len(flat), rows).T.reshape(-1)
    mixed = pa.concat_arrays(pieces).take(pa.array(order))
    return _lists(mixed, rows, len(flat))
