"""Ray's own datasets: made from Spark DataFrames, and read in their order."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError, require

__all__ = ["is_ray_dataset", "ordered_blocks", "parquet_dataset", "spark_df_to_ray_dataset"]


def is_ray_dataset(data: Any) -> bool:
    """Whether `data` is a ``ray.data.Dataset``; does not import Ray."""
    return any(
        c.__name__ == "Dataset" and c.__module__.startswith("ray.data") for c in type(data).__mro__
    )


def spark_df_to_ray_dataset(df):
    """A Spark DataFrame as a dataset of Ray.

    It is computed once, now, by Spark; every partition becomes a block, in order.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Vectors become arrays.

    Returns
    -------
    ray.data.Dataset

    Raises
    ------
    UsageError
        If `df` is something else, or Ray does not run on Spark's nodes.
    """
    from pyspark.sql import functions as F

    require("ray.data", "ray")
    import ray

    from bigdl.orca.cluster.ray import RayCluster
    from bigdl.orca.data.feeds.spark_dataframe import is_connect
    from bigdl.orca.data.ray_exchange import arrow_to_ray

    if not hasattr(df, "mapInArrow") or is_connect(df):
        raise UsageError(
            f"spark_df_to_ray_dataset takes a classic Spark DataFrame, got {type(df).__name__}"
        )
    columns = [
        _plain_array(field.name)
        if type(field.dataType).__name__ == "VectorUDT"
        else F.col(f"`{field.name.replace('`', '``')}`")
        for field in df.schema
    ]
    cluster = RayCluster.of_program()
    return ray.data.from_arrow_refs(arrow_to_ray(df.select(*columns), cluster))


def _plain_array(name):
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    return vector_to_array(F.col(f"`{name.replace('`', '``')}`")).alias(name)


def ordered_blocks(dataset) -> list:
    """References of a dataset's blocks as dicts of arrays, in the order of the dataset.

    Ray gives blocks in the order in which they were made unless it is told otherwise.
    """
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return dataset.materialize().to_numpy_refs()
    finally:
        options.preserve_order = before


def parquet_dataset(paths: list[str]):
    """The dataset of Parquet files."""
    return require("ray.data", "ray").read_parquet(paths)
