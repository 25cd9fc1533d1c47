"""A model as a function of SQL, for classic Spark and for Spark Connect.

The function takes the model's inputs as arguments.  Spark hands it Arrow arrays; they become the
model's arrays by the rules by which columns of Parquet files do, in the dtypes of the training.  A
row with a null in an argument, also within an array or a map, has the value null.  Each Python
worker loads the model once (:mod:`bigdl.orca.inference.shipping`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.spark_calls import check_alive
from bigdl.orca.cluster.versions import arrow_udf
from bigdl.orca.data.arrow_types import in_type_of, spark_type
from bigdl.orca.inference.shipping import accepted_by
from bigdl.orca.learn.prediction.outputs import OutputColumns, outputs_of_rows
from bigdl.orca.learn.prediction.predictor import (
    NOT_FITTED,
    DistributedPredictor,
    PredictOptions,
    types_of,
    value_task,
)
from bigdl.runtime.shards.columns import fitted_specs, float_dtype
from bigdl.runtime.shards.texts import takes_texts
from bigdl.training.batches import zero_column


def sql_function(predictor: DistributedPredictor, threads: int, rows: list | None = None) -> Any:
    """Return the user-defined function of a model.

    Parameters
    ----------
    predictor : DistributedPredictor
        The ``inputs`` of its options are the types of the model's inputs, unless there are `rows`.
    threads : int
        Of torch in each task.
    rows : list, optional
        The model's inputs for two or more rows, as it takes them.
    """
    shipped, options = predictor.shipped, predictor.options
    if rows is None:
        if not options.inputs or not all(options.inputs):
            raise UsageError(NOT_FITTED, code="not-fitted")
        rows = [zero_column(leaves, 2) for leaves in options.inputs]
    model = shipped.load()
    outputs = outputs_of_rows(model, rows)
    if options.inputs is None:  # later rows come in the types that decided those of the outputs
        options = replace(options, inputs=types_of(accepted_by(model, rows)))
    columns = OutputColumns.of(outputs, options.output_cols)
    specs_of = _specs_of(options, len(rows))
    task = value_task(shipped.in_task(threads), specs_of, columns, options.batch_size, in_type_of)
    made, owner = arrow_udf(task, columns.ddl, iterates=True), shipped.owner

    @functools.wraps(made)  # Spark registers it by its attributes
    def function(*arguments: Any) -> Any:
        check_alive(owner, "function")
        return made(*arguments)

    return function


def _specs_of(options: PredictOptions, arguments: int) -> Callable[[Sequence[Any]], list]:
    floats, texts = float_dtype(options.config), takes_texts(options.config)
    names = list(options.feature_cols) or [f"argument {i + 1}" for i in range(arguments)]

    def specs_of(arrays: Sequence[Any]) -> list:
        if len(arrays) != arguments:
            raise UsageError(
                f"The model takes {arguments} arguments ({', '.join(names)}), got {len(arrays)}",
                code="model-input",
                columns=names,
            )
        types = [(name, spark_type(name, a.type)) for name, a in zip(names, arrays, strict=True)]
        return fitted_specs(types, floats, texts=texts, known=options.inputs)

    return specs_of
