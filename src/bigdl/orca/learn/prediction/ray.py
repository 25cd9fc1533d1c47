"""Prediction for what is in Ray: RayXShards and Ray Datasets."""

from __future__ import annotations

from collections.abc import Sequence

from bigdl.common.errors import UsageError
from bigdl.orca.learn.prediction.shards import predictor

__all__ = ["predict_ray"]


def predict_ray(
    data,
    kind: str,
    shipped,
    config: dict,
    feature_cols: Sequence[str],
    batch_size: int,
    output_cols: Sequence[str] | None,
):
    """Predictions in the form of the input.

    Parameters
    ----------
    data : RayXShards or ray.data.Dataset
    kind : str
        Of :data:`bigdl.orca.data.feeds.ON_RAY`.
    shipped, config, feature_cols, batch_size, output_cols
        See :func:`~bigdl.orca.learn.prediction.dataframe.predict_dataframe`.

    Returns
    -------
    RayXShards, computed in the background, or a lazy ray.data.Dataset
        Of the same rows in the same order.
    """
    predict = predictor(shipped, config, feature_cols, batch_size, output_cols, threads=1)
    if kind == "RayXShards":
        return data.map_partitions(lambda partition: list(predict(partition)))
    if not feature_cols:
        raise UsageError(
            "feature_cols is required for a Ray Dataset; pass the names of the columns that the "
            "model takes"
        )

    def predict_block(block):
        (found,) = predict([block])
        return found

    return data.map_batches(predict_block, batch_format="pandas", batch_size=None)
