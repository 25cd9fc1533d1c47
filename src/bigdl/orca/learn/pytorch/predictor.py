"""The verb predict of a PyTorch Estimator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bigdl.common.checks import check_positive
from bigdl.orca.learn.pytorch.arguments import check_not_accelerated, takes_over_prediction
from bigdl.orca.learn.pytorch.callbacks.base import as_callbacks
from bigdl.orca.learn.pytorch.options import EstimatorOptions

__all__ = ["TorchPredictor"]


class TorchPredictor(EstimatorOptions):
    """The verbs of an Estimator that ship its model to the tasks, and let go of it.

    Parameters
    ----------
    parts : ModelParts
    training : TorchTraining
        What is trained so far.
    backend : str
    workers_per_node : int
    precision : str
        ``"fp32"`` or ``"bf16"``.
    """

    def __init__(self, parts, training, backend: str, workers_per_node: int, precision: str):
        super().__init__(parts, training)
        self._backend, self._workers_per_node = backend, workers_per_node
        self._precision = precision
        self._shipped = None  # what predict has broadcast last
        self._shipped_fast = None  # the same of an accelerated model

    def predict(
        self,
        data,
        batch_size: int = 32,
        feature_cols: str | Sequence[str] | None = None,
        output_cols: str | Sequence[str] | None = None,
        profile: bool = False,
        callbacks: Sequence[Any] | None = None,
        *,
        accelerate: str | os.PathLike | None = None,
    ):
        """`data` with predictions, lazily: all its columns, rows and their order are kept.

        The precision is that of the Estimator, and a machine with GPUs computes on them; the
        predictions are float32. With `accelerate`, the model runs in another runtime on the CPU.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, pandas DataFrame or arrays; with Ray also \
RayXShards or a ray.data.Dataset
            Arrays are an ndarray, or a tuple or dict of them; a str is a path of Parquet files.
            Of one dict, array or tuple the result is the predictions alone.
        batch_size : int
            Rows of one forward pass.
        feature_cols : str or list of str
        output_cols : str or list of str, optional
            Names for the model's outputs, one each; default one column ``prediction``, and for a
            model that returns a dict one column per key.
        profile : bool
            Accepted for compatibility: nothing has run when this returns.
        callbacks : MainCallback, optional
            Its ``on_pred_forward`` makes the outputs; prediction calls no other hooks.
        accelerate : str, optional
            A method of Nano, e.g. ``"openvino_int8"``; ``"auto"`` for the fastest of several whose
            outputs differ from the model's by at most 5 % (relative, Euclidean); or a directory
            that ``InferenceOptimizer.save`` wrote. The model is converted, calibrated and compared
            once, on the driver, with up to 256 rows of the first partitions; it stays as it is.
            The tasks need the packages of the method, and for ``inductor_*`` the driver's kind of
            processor. Another call with the same model and kind of rows converts nothing.

        Returns
        -------
        pyspark.sql.DataFrame
            With ``prediction``: float for one number per row (trailing dimensions of size 1 are
            dropped), a dense vector for several, nested arrays for more dimensions; several
            outputs without `output_cols` as an array of vectors.
        """
        from bigdl.orca.learn.backends import cluster_of
        from bigdl.orca.learn.prediction.shards import opened, predict_any
        from bigdl.orca.learn.pytorch.shipping import ship

        self._need_model()
        check_positive("batch_size", batch_size)
        parts = self._parts
        if takes_over_prediction(callbacks):
            check_not_accelerated(accelerate)
            from bigdl.orca.learn.pytorch.predicting import predicting_parts

            parts = predicting_parts(parts, *as_callbacks(callbacks))
        feature_cols = [feature_cols] if isinstance(feature_cols, str) else list(feature_cols or ())
        output_cols = [output_cols] if isinstance(output_cols, str) else output_cols
        cluster = cluster_of(self._backend, data, self._workers_per_node)
        weights = self._training.weights(self._parts)
        data = opened(data, cluster)
        snapshot = self._training.snapshot
        inputs = None if snapshot is None else snapshot.manifest.get("inputs")
        shipped = None
        if accelerate is not None:
            shipped, inputs = self._accelerated(
                accelerate, data, weights, feature_cols, batch_size, inputs, cluster
            )
        if shipped is None:
            shipped = ship(parts, weights, cluster.broadcaster, self._precision, self._shipped)
            self._shipped = shipped
        return predict_any(
            data,
            shipped,
            self._parts.config,
            feature_cols,
            batch_size,
            output_cols,
            inputs,
            cluster,
        )

    def _accelerated(
        self, accelerate, data, weights, feature_cols, batch_size, inputs, cluster
    ) -> tuple[Any, Any]:
        """What to ship instead of the model, if anything, and what is known of the inputs."""
        from bigdl.orca.learn.pytorch.accelerated import ship_accelerated
        from bigdl.orca.learn.pytorch.sampling import sample_of

        sample = sample_of(data, self._parts.config, feature_cols, cluster)
        if sample is None:  # there are no rows
            return None, inputs
        shipped = ship_accelerated(
            accelerate,
            sample,
            self._parts,
            weights,
            precision=self._precision,
            batch_size=batch_size,
            threads=cluster.threads_per_task,
            sc=cluster.broadcaster,
            previous=self._shipped_fast,
        )
        self._shipped_fast = shipped
        return shipped, sample.leaves

    def shutdown(self, force: bool = False) -> None:
        """Let go of what prediction has broadcast; frames that were predicted stay valid.

        The workers of Ray, or of this machine, that wait for programs end, too.
        """
        from bigdl.orca.learn.backends import end_workers

        self._shipped = self._shipped_fast = None
        end_workers(self._backend)
