"""The Feed of an input of a Keras Estimator: the kinds of all Estimators, and those of tf.data."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import as_feed, kind_of
from bigdl.runtime.shards.feed import Feed
from bigdl.runtime.shards.texts import with_texts
from bigdl.training.keras.backends import backend_of_program
from bigdl.training.keras.data import is_dataset

__all__ = ["as_keras_feed", "data_config_of", "kind_of_input", "prediction_input"]


def as_keras_feed(
    data: Any, feature_cols: Any, label_cols: Any, config: dict | None, *, name: str | None = None
) -> Feed:
    """Return the Feed that belongs to an input.

    Parameters
    ----------
    data
        What :func:`bigdl.orca.data.feeds.as_feed` takes, a ``tf.data.Dataset``, or an Orca
        :class:`~bigdl.orca.data.tf.data.Dataset`.
    feature_cols, label_cols, config, name
        See there.
    """
    config = data_config_of(config)
    if is_dataset(data):
        from bigdl.training.keras.datasets import shipped_dataset

        data = shipped_dataset(data, name or "data")
    elif _is_orca_dataset(data):
        return data.feed(config, name=name)
    feed = as_feed(data, feature_cols, label_cols, config, name=name)
    if feed.label_cols is not None and not feed.label_cols:
        raise UsageError(
            f"label_cols is required to fit or evaluate on a {feed.kind} with feature_cols; "
            "pass the names of the target columns"
        )
    return feed


def data_config_of(config: dict | None) -> dict | None:
    """Return the config of a feed or a prediction: Keras has texts in its models on TensorFlow."""
    return with_texts(config) if backend_of_program() == "tensorflow" else config


def kind_of_input(data: Any) -> str:
    """Return the name of an input's type, for messages and to tell whether two are alike."""
    if is_dataset(data):
        return "tf.data.Dataset"
    return "Orca Dataset" if _is_orca_dataset(data) else kind_of(data)


def prediction_input(data: Any) -> Any:
    """Return an input of predict; an Orca Dataset is its XShards."""
    if is_dataset(data):
        raise UsageError(
            "Only XShards or Spark DataFrame are supported for predict, besides numpy arrays, "
            "pandas DataFrames and paths of Parquet files, got a tf.data.Dataset; use "
            "get_model().predict for it"
        )
    return data.rows_for_predict() if _is_orca_dataset(data) else data


def _is_orca_dataset(data: Any) -> bool:
    return any(c.__module__ == "bigdl.orca.data.tf.data" for c in type(data).__mro__)
