"""A model as a SQL user-defined function, for classic Spark and Spark Connect.

The function takes the model's inputs as arguments. Spark passes Arrow arrays, which are converted
to the dtypes of the training data by the rules for Parquet columns. The value is null for a row
with a null in any argument, including inside arrays and maps. Each Python worker loads the model
once (:mod:`bigdl.orca.inference.shipping`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.spark_calls import check_alive
from bigdl.orca.cluster.versions import arrow_udf
from bigdl.orca.data.arrow_types import cast_to_spec, spark_type
from bigdl.orca.inference.shipping import cast_to_accepted
from bigdl.orca.learn.prediction.outputs import OutputColumns, infer_outputs
from bigdl.orca.learn.prediction.predictor import (
    NOT_FITTED,
    DistributedPredictor,
    PredictOptions,
    leaf_types,
    value_task,
)
from bigdl.runtime.shards.columns import fitted_specs, float_dtype, nulls_are_missing
from bigdl.runtime.shards.texts import takes_texts
from bigdl.training.batches import zero_column

if TYPE_CHECKING:
    from pyspark.sql import Column


def sql_function(
    predictor: DistributedPredictor, threads: int, rows: list | None = None
) -> Callable[..., Column]:
    """Return a Spark user-defined function that predicts with a model.

    Parameters
    ----------
    predictor : DistributedPredictor
        The ``inputs`` of its options are the model's input types; not needed with `rows`.
    threads : int
        Number of torch threads per task.
    rows : list, optional
        Model inputs for two or more rows.
    """
    shipped, options = predictor.shipped, predictor.options
    if rows is None:
        if not options.inputs or not all(options.inputs):
            raise UsageError(NOT_FITTED, code="not-fitted")
        rows = [zero_column(leaves, 2) for leaves in options.inputs]
    model = shipped.load()
    outputs = infer_outputs(model, rows)
    # convert later rows to the types that the outputs were inferred from
    if options.inputs is None:
        options = replace(options, inputs=leaf_types(cast_to_accepted(model, rows)))
    columns = OutputColumns.of(outputs, options.output_cols)
    specs_of = _specs_of(options, len(rows))
    task = value_task(shipped.in_task(threads), specs_of, columns, options.batch_size, cast_to_spec)
    made, owner = arrow_udf(task, columns.ddl, iterates=True), shipped.owner

    @functools.wraps(made)  # Spark reads the function's attributes when it registers it
    def function(*arguments: Column | str) -> Column:
        check_alive(owner, "function")
        return made(*arguments)

    return function


def _specs_of(options: PredictOptions, arguments: int) -> Callable[[Sequence[Any]], list]:
    floats, texts = float_dtype(options.config), takes_texts(options.config)
    names = list(options.feature_cols) or [f"argument {i + 1}" for i in range(arguments)]

    missing = names if nulls_are_missing(options.config) else ()

    def specs_of(arrays: Sequence[Any]) -> list:
        if len(arrays) != arguments:
            raise UsageError(
                f"The model takes {arguments} arguments ({', '.join(names)}), got {len(arrays)}",
                code="model-input",
                columns=names,
            )
        types = [(name, spark_type(name, a.type)) for name, a in zip(names, arrays, strict=True)]
        return fitted_specs(types, floats, texts=texts, known=options.inputs, missing=missing)

    return specs_of
