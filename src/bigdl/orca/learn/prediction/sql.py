"""A model as a function of SQL, for classic Spark and for Spark Connect.

The function takes the model's inputs as arguments.  Spark hands it Arrow arrays; they become the
model's arrays by the rules by which columns of Parquet files do.  Each Python worker loads the
model once (:mod:`bigdl.orca.inference.shipping`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.orca.cluster.versions import arrow_udf
from bigdl.orca.data.feeds.arrow_types import in_type_of, spark_type
from bigdl.orca.inference.shipping import ShippedModel
from bigdl.orca.learn.prediction.inputs import (
    NOT_FITTED,
    OutputColumns,
    PredictOptions,
    chosen_outputs,
    list_column,
    outputs_of_rows,
    predict_rows,
)
from bigdl.runtime.shards.columns import column_spec, decode, float_dtype
from bigdl.runtime.shards.texts import takes_texts
from bigdl.training.batches import zero_column

pa = LazyModule("pyarrow", "orca")


@dataclass(frozen=True)
class _Result:
    """The value of the function for a row.

    Attributes
    ----------
    columns : OutputColumns
        One name: an array of so many dimensions, or a number; several: a struct. Several outputs
        without names are an array of arrays.
    """

    columns: OutputColumns

    @property
    def is_joined(self) -> bool:
        return len(self.columns.names) < len(self.columns.order)

    @property
    def ddl(self) -> str:
        """Its type."""
        types = []
        for number in self.columns.order:
            depth = len(self.columns.shapes[number])
            types.append("array<" * depth + "float" + ">" * depth)
        if self.is_joined:
            return "array<array<float>>"
        if len(types) == 1:
            return types[0]
        fields = zip(self.columns.names, types, strict=True)
        return f"struct<{','.join(f'`{name}`:{type_}' for name, type_ in fields)}>"

    def arrow(self, outputs: Sequence[np.ndarray], rows: int) -> Any:
        """The values for the rows of a batch, of every output."""
        shapes, order = self.columns.shapes, self.columns.order
        arrays = list(outputs) or [np.empty((0, *shape), np.float32) for shape in shapes]
        chosen = [arrays[number] for number in order]
        if self.is_joined:
            return _joined(chosen, rows)
        if len(chosen) == 1:
            return list_column(chosen[0])
        made = [list_column(array) for array in chosen]
        return pa.StructArray.from_arrays(made, names=self.columns.names)


def _joined(arrays: Sequence[np.ndarray], rows: int) -> Any:
    """Several outputs as an array of arrays per row."""
    flat = [array.reshape(rows, -1) if rows else np.empty((0, 1), np.float32) for array in arrays]
    widths = np.tile([array.shape[1] for array in flat], rows)
    values = np.concatenate(flat, axis=1).astype(np.float32, copy=False).reshape(-1)
    inner = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(inner), pa.array(values))
    outer = np.arange(rows + 1, dtype=np.int32) * len(flat)
    return pa.ListArray.from_arrays(pa.array(outer), lists)


def sql_function(
    shipped: ShippedModel, options: PredictOptions, threads: int, rows: list | None = None
) -> Any:
    """Return the user-defined function of a model.

    Parameters
    ----------
    shipped : ShippedModel
    options : PredictOptions
        ``inputs`` are the types of the model's inputs, unless there are `rows`.
    threads : int
        Of torch in each task.
    rows : list, optional
        The model's inputs for two or more rows, as it takes them.
    """
    if rows is None:
        if not options.inputs or not all(options.inputs):
            raise UsageError(NOT_FITTED)
        rows = [zero_column(leaves, 2) for leaves in options.inputs]
    outputs = outputs_of_rows(shipped.load(), rows)
    names = chosen_outputs([key for key, _ in outputs], options.output_cols)
    result = _Result(OutputColumns([shape for _, shape in outputs], *names))
    task = _task(shipped.in_task(threads), options, len(rows), result)
    return arrow_udf(task, result.ddl, iterates=True)


def _task(
    model_of_task: Callable, options: PredictOptions, arguments: int, result: _Result
) -> Callable[[Iterable], Iterator]:
    floats, texts = float_dtype(options.config), takes_texts(options.config)
    names = list(options.feature_cols) or [f"argument {i + 1}" for i in range(arguments)]
    batch_size, shapes = options.batch_size, result.columns.shapes

    def predict(batches: Iterable) -> Iterator:
        with model_of_task() as model:
            for batch in batches:
                arrays = batch if isinstance(batch, tuple) else (batch,)
                if len(arrays) != arguments:
                    raise UsageError(
                        f"The model takes {arguments} arguments ({', '.join(names)}), got "
                        f"{len(arrays)}"
                    )
                specs = [
                    column_spec(name, spark_type(name, array.type), floats, texts=texts)
                    for name, array in zip(names, arrays, strict=True)
                ]

                def take(start, count, specs=specs, arrays=arrays):
                    columns = []
                    for spec, array in zip(specs, arrays, strict=True):
                        leaves = decode(spec, in_type_of(spec, array.slice(start, count)))
                        columns.append(leaves[0][1] if spec.kind == "plain" else dict(leaves))
                    return columns

                rows = len(arrays[0])
                predicted = predict_rows(model, rows, batch_size, take, shapes)
                yield result.arrow([array for _, array in predicted], rows)

    return predict
