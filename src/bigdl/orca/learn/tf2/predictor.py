"""The verb predict of a Keras Estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.old_keywords import warn_once
from bigdl.orca.learn.tf2.feeds import data_config_of, prediction_input
from bigdl.orca.learn.tf2.model_files import KerasFiles

__all__ = ["KerasPredictor"]


class KerasPredictor(KerasFiles):
    """The verbs of an Estimator that ship its model to the tasks, and let go of it.

    Parameters
    ----------
    parts : KerasParts
    training : KerasTraining
        What is trained so far.
    backend : str
    workers_per_node : int
    """

    def __init__(self, parts, training, backend: str, workers_per_node: int):
        super().__init__(parts, training)
        self._backend, self._workers_per_node = backend, workers_per_node
        self._shipped = None  # what predict has broadcast last

    def predict(
        self,
        data,
        batch_size: int | None = 32,
        verbose: int | str = 1,
        steps: int | None = None,
        callbacks: Sequence[Any] | None = None,
        data_config: dict | None = None,
        feature_cols: str | Sequence[str] | None = None,
        min_partition_num: int | None = None,
        output_cols: str | Sequence[str] | None = None,
    ):
        """`data` with predictions, lazily: all its columns, rows and their order are kept.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, pandas DataFrame or arrays; with Ray also \
RayXShards or a ray.data.Dataset
            Of one array, tuple or dict the result is the predictions alone.
        batch_size : int
            Rows of one forward pass.
        verbose, steps, callbacks, data_config, min_partition_num
            Accepted for compatibility: all rows are predicted where they are, later.
        feature_cols : str or list of str
        output_cols : str or list of str, optional
            Names for the model's outputs, one each; default one column ``prediction``, and for a
            model that returns a dict one column per key.

        Returns
        -------
        pyspark.sql.DataFrame, or in the form of the input
            With ``prediction``: of a Spark DataFrame a float where the model gives one number
            without a dimension per row, a dense vector for one dimension (also of one number, as
            ``Dense(1)`` gives it), nested arrays for more; several outputs without `output_cols`
            as an array of vectors.
        """
        from bigdl.orca.learn.backends import cluster_of
        from bigdl.orca.learn.prediction.shards import opened, predict_any

        self._parts.need()
        size = 32 if batch_size is None else check_positive("batch_size", batch_size)
        for name, value in (("steps", steps), ("callbacks", callbacks)):
            if value:
                warn_once(f"predict({name}=) has no effect: all rows are predicted, by tasks")
        names = [feature_cols] if isinstance(feature_cols, str) else list(feature_cols or ())
        output_cols = [output_cols] if isinstance(output_cols, str) else output_cols
        data = prediction_input(data)
        cluster = cluster_of(self._backend, data, self._workers_per_node)
        data = opened(data, cluster)
        snapshot = self._training.snapshot
        inputs = None if snapshot is None else snapshot.manifest.get("inputs")
        shipped = self._ship(names, cluster.broadcaster, cluster.threads_per_task)
        config = data_config_of(self._parts.config)
        return predict_any(data, shipped, config, names, size, output_cols, inputs, cluster)

    def _ship(self, names, sc, threads):
        """Broadcast the model, unless it is what was broadcast last."""
        from bigdl.orca.learn.prediction.shipping import Shipped, digest_of
        from bigdl.orca.learn.tf2.parts import Packed
        from bigdl.orca.learn.tf2.shipping import KerasSnapshot

        weights = self._training.weights(self._parts)
        if not weights:
            raise UsageError(
                "The model has no weights yet, since it does not know the shape of its input; fit "
                "or load it first, or give it an Input"
            )
        origin = self._parts, digest_of(weights, repr((names, threads)).encode())
        if self._shipped is None or not self._shipped.is_of(sc, *origin):
            packed = Packed.of(self._parts)
            snapshot = KerasSnapshot(packed, weights, names, self._parts.config, threads)
            self._shipped = Shipped(snapshot, sc, origin)
        return self._shipped

    def shutdown(self) -> None:
        """Let go of what prediction has broadcast; frames that were predicted stay valid.

        The workers of Ray, or of this machine, that wait for programs end, too.
        """
        from bigdl.orca.learn.backends import end_workers

        self._shipped = None
        end_workers(self._backend)
