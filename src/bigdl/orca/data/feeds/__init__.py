"""Inputs of ``fit`` and ``evaluate``: one class per kind, and the function that chooses."""

from __future__ import annotations

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.base import Feed, Ingest

__all__ = ["Feed", "Ingest", "as_feed"]


def as_feed(data, feature_cols=None, label_cols=None, config=None, *, name=None) -> Feed:
    """The Feed that belongs to an input.

    Parameters
    ----------
    data : pyspark.sql.DataFrame or Feed
    feature_cols, label_cols : str or sequence of str, optional
        Columns for the model and targets.
    config : dict, optional
    name : str, optional
        What messages call the input, e.g. ``"validation_data"``.

    Raises
    ------
    UsageError
        For an input of another kind.
    """
    if isinstance(data, Feed):
        return data
    if any(c.__module__.startswith("pyspark.sql.") for c in type(data).__mro__):
        from bigdl.orca.data.feeds.spark_dataframe import SparkDataFrameFeed, is_connect

        if hasattr(data, "mapInArrow") or is_connect(data):
            features, labels = _names(feature_cols), _names(label_cols)
            return SparkDataFrameFeed(data, features, labels, config, name=name)
    given = f"{type(data).__module__}.{type(data).__qualname__}"
    raise UsageError(f"{name or 'data'} must be a Spark DataFrame, got {given}")


def _names(columns) -> list:
    if columns is None:
        return []
    if isinstance(columns, str):
        return [columns]
    try:
        return list(columns)
    except TypeError:  # e.g. a Column, which the feed refuses
        return [columns]
