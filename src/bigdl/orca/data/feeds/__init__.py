"""Inputs of ``fit`` and ``evaluate``: one class per kind, and the function that chooses."""

from __future__ import annotations

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.base import Feed, Ingest

__all__ = ["Feed", "Ingest", "as_feed"]


def as_feed(data, feature_cols=None, label_cols=None, config=None) -> Feed:
    """The Feed that belongs to an input.

    Parameters
    ----------
    data : pyspark.sql.DataFrame or Feed
    feature_cols, label_cols : str or sequence of str, optional
        Columns for the model and targets.
    config : dict, optional

    Raises
    ------
    UsageError
        For an input of another kind.
    """
    if isinstance(data, Feed):
        return data
    if type(data).__module__.startswith("pyspark.sql") and hasattr(data, "mapInArrow"):
        from bigdl.orca.data.feeds.spark_dataframe import SparkDataFrameFeed

        return SparkDataFrameFeed(data, _names(feature_cols), _names(label_cols), config)
    raise UsageError(
        f"data must be a Spark DataFrame, got {type(data).__module__}.{type(data).__qualname__}"
    )


def _names(columns) -> list[str]:
    if columns is None:
        return []
    return [columns] if isinstance(columns, str) else list(columns)
