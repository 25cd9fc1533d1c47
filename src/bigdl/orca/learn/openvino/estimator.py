"""The OpenVINO Estimator: distributed prediction with a network that is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import kind_of, names_of
from bigdl.orca.learn.estimator import BaseEstimator
from bigdl.orca.learn.openvino.shipping import Network

__all__ = ["Estimator", "OpenvinoEstimator"]


class Estimator:
    """Makes Estimators of networks of OpenVINO."""

    @staticmethod
    def from_openvino(*, model_path: str) -> OpenvinoEstimator:
        """An Estimator that predicts with a network.

        Parameters
        ----------
        model_path : str
            Path or fsspec URL of the ``.xml`` file; the ``.bin`` file lies beside it.

        Returns
        -------
        OpenvinoEstimator

        Raises
        ------
        UsageError
            If the files are not there or hold no network.
        """
        return OpenvinoEstimator(model_path=model_path)


class OpenvinoEstimator(BaseEstimator):
    """A network of OpenVINO that predicts on Spark; made by :meth:`Estimator.from_openvino`."""

    def __init__(self, *, model_path: str):
        self._shipped: Any = None  # what predict has broadcast last
        self.load(model_path)

    def load(self, model_path: str) -> None:
        """Read another network.

        Parameters
        ----------
        model_path : str
            Path or fsspec URL of the ``.xml`` file.
        """
        self._network = Network.read(model_path)
        self._shipped = None

    def predict(
        self,
        data,
        feature_cols: str | Sequence[str] | None = None,
        batch_size: int = 4,
        input_cols: str | Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        output_cols: str | Sequence[str] | None = None,
    ):
        """`data` with the network's outputs, lazily: all its rows and their order are kept.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, pandas DataFrame or arrays
            An ndarray, or a list of one for each input; shards are ``{"x": ...}`` or pandas
            frames; a str is a path of Parquet files.
        feature_cols : str or list of str, optional
            Columns of a DataFrame that are the network's inputs.
        batch_size : int
            Rows of one inference. A network whose number of rows cannot be changed takes that
            many; the last call is filled up.
        input_cols : str or list of str, optional
            The network's input for each of the features; default its own order.
        config : dict, optional
            Properties of OpenVINO, e.g. ``{"INFERENCE_NUM_THREADS": 2}`` or, by its old name,
            ``CPU_THREADS_NUM``; by default a task has the threads that Spark gives it.
        output_cols : str or list of str, optional
            Names for the columns of the outputs.

        Returns
        -------
        DataFrame, SparkXShards, ndarray or list of ndarray
            As `data`: a DataFrame gets the column ``prediction``, or, with several outputs, a
            column by the name of each: dense vectors for an output of two dimensions, floats for
            one, nested arrays for more. Shards get ``prediction``, a list with
            several outputs. Of arrays the result is the outputs alone, in float32.

        Raises
        ------
        UsageError
            For arguments that cannot work.
        """
        from bigdl.orca.cluster.spark import SparkCluster
        from bigdl.orca.learn.prediction.shards import opened, predict_any

        check_positive("batch_size", batch_size)
        cluster = SparkCluster.from_active()
        data = opened(data, cluster)
        if isinstance(data, list):
            data = tuple(data)
        names = None if input_cols is None else names_of(input_cols)
        network = self._network.for_call(names, config, cluster.threads_per_task)
        outputs = None if output_cols is None else names_of(output_cols)
        if outputs is None and len(network.outputs) > 1 and kind_of(data) == "Spark DataFrame":
            outputs = list(network.outputs)
        return predict_any(
            data,
            self._ship(network, cluster.sc),
            {},
            names_of(feature_cols),
            batch_size,
            outputs,
            None,
            cluster,
        )

    def _ship(self, network: Network, sc):
        from bigdl.orca.learn.prediction.shipping import Shipped

        origin = (repr(sorted(network.config.items())), str(network.order), network.threads)
        if self._shipped is None or not self._shipped.is_of(sc, *origin):
            self._shipped = Shipped(network, sc, origin)
        return self._shipped

    def shutdown(self) -> None:
        """Let go of what prediction has broadcast; frames that were predicted stay valid."""
        self._shipped = None

    # -- what a network that is there already cannot do ----------------------------------------

    def fit(self, data, epochs: int = 1, **options) -> NoReturn:
        """Not implemented: OpenVINO does not train."""
        _refuse("fit", "OpenVINO does not train; train with bigdl.orca.learn.pytorch")

    def evaluate(self, data, **options) -> NoReturn:
        """Not implemented: the network has no loss and no metrics."""
        _refuse("evaluate", "compare the predictions with the labels instead")

    def get_model(self) -> NoReturn:
        """Not implemented: the model is in the file."""
        _refuse("get_model", "read it with bigdl.nano.openvino.OpenVINOModel")

    def save(self, path: str) -> NoReturn:
        """Not implemented: the network does not change."""
        _refuse("save", "copy the files that it was read from")

    def set_tensorboard(self, log_dir: str, app_name: str) -> NoReturn:
        """Not implemented: there is no training."""
        _refuse("set_tensorboard", _NO_TRAINING)

    def get_train_summary(self, tag: str | None = None) -> NoReturn:
        """Not implemented: there is no training."""
        _refuse("get_train_summary", _NO_TRAINING)

    def get_validation_summary(self, tag: str | None = None) -> NoReturn:
        """Not implemented: there is no training."""
        _refuse("get_validation_summary", _NO_TRAINING)

    def clear_gradient_clipping(self) -> NoReturn:
        """Not implemented: there is no training."""
        _refuse("clear_gradient_clipping", _NO_TRAINING)

    def set_constant_gradient_clipping(self, min: float, max: float) -> NoReturn:
        """Not implemented: there is no training."""
        _refuse("set_constant_gradient_clipping", _NO_TRAINING)

    def set_l2_norm_gradient_clipping(self, clip_norm: float) -> NoReturn:
        """Not implemented: there is no training."""
        _refuse("set_l2_norm_gradient_clipping", _NO_TRAINING)

    def load_orca_checkpoint(
        self, path: str, version: int | None = None, prefix: str | None = None
    ) -> NoReturn:
        """Not implemented: there is no training."""
        _refuse("load_orca_checkpoint", "load reads another .xml file")


_NO_TRAINING = "OpenVINO does not train"


def _refuse(verb: str, instead: str) -> NoReturn:
    raise UsageError(f"{verb} is not implemented for networks of OpenVINO: {instead}")
