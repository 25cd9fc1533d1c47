"""Prediction of distributed data by a model of OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.openvino import CompiledNetwork
from bigdl.nano.openvino.network import loose_shapes, port_name, read_network, renamed_properties
from bigdl.orca.data.feeds import is_path, kind_of, names_of
from bigdl.orca.inference.runtimes import read_openvino
from bigdl.orca.inference.shipping import ShippedModel, shipped_of
from bigdl.orca.learn.estimator import PredictingEstimator, PredictionRequest
from bigdl.orca.learn.prediction.sample import Sample
from bigdl.orca.learn.prediction.typed import typed_predict
from bigdl.runtime.cluster import Cluster

__all__ = [
    "Estimator",
    "OpenvinoEstimator",
]


@dataclass(frozen=True)
class OpenvinoNetwork:
    """A network as :class:`~bigdl.orca.inference.shipping.ShippedModel` broadcasts it.

    Attributes
    ----------
    files : pair of bytes
        Content of the ``.xml`` and the ``.bin`` file.
    inputs, outputs : tuple of str
        Names in the order of the network.
    rows : int or None
        How many rows a call takes; None for any number.
    config : mapping
        Properties of OpenVINO.
    order : tuple of int
        Which of the features each input is.
    threads : int
        Of a task.
    """

    files: tuple[bytes, bytes]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: int | None
    config: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    threads: int = 1

    @classmethod
    def read(cls, path: str) -> OpenvinoNetwork:
        """From the ``.xml`` file at a local path or fsspec URL, with the ``.bin`` beside it.

        Raises
        ------
        UsageError
            If the files are not there or hold no network.
        """
        files = read_openvino(path)
        network = read_network(files)
        return cls(
            files,
            tuple(map(port_name, network.inputs)),
            tuple(map(port_name, network.outputs)),
            _rows_of(network),
        )

    def for_call(self, input_cols: Sequence[str] | None, config: Mapping | None, threads: int):
        """The same for the arguments of ``predict``.

        Raises
        ------
        UsageError
            If `input_cols` are not the network's inputs, or `config` is no mapping.
        """
        if config is not None and not isinstance(config, Mapping):
            raise UsageError(
                f"config should be a dict of properties of OpenVINO, got {config!r}",
                code="argument-type",
                argument="config",
            )
        names = self.inputs if input_cols is None else input_cols
        if sorted(names) != sorted(self.inputs):
            raise UsageError(
                f"input_cols should name the network's inputs {list(self.inputs)} in the order of "
                f"the features, got {list(names)}",
                code="argument-value",
                argument="input_cols",
            )
        order = tuple(names.index(name) for name in self.inputs)
        return replace(self, config=renamed_properties(config or {}), order=order, threads=threads)

    def two_rows(self) -> list[np.ndarray]:
        """Two rows of zeros of every feature.

        Raises
        ------
        UsageError
            If a size is not known.
        """
        features: dict[int, np.ndarray] = {}
        for place, port in zip(self.order, read_network(self.files).inputs, strict=True):
            shape = port.partial_shape
            if shape.rank.is_dynamic or any(size.is_dynamic for size in list(shape)[1:]):
                raise UsageError(
                    f"The network's input '{port_name(port)}' takes arrays of any size ({shape}); "
                    "pass sample=, some rows of the inputs",
                    code="argument-missing",
                    argument="sample",
                )
            sizes = [size.get_length() for size in list(shape)[1:]]
            features[place] = np.zeros((2, *sizes), port.element_type.to_dtype())
        return [features[place] for place in sorted(features)]

    def load_on(self, device) -> _LoadedNetwork:
        """The compiled network; it computes on the CPU wherever it is."""
        network = read_network(self.files)
        compiled = CompiledNetwork(
            network,
            thread_num=None if "INFERENCE_NUM_THREADS" in self.config else self.threads,
            config=self.config,
            shapes=loose_shapes(network) if self.rows is None else None,
        )
        return _LoadedNetwork(compiled, self)


class _LoadedNetwork:
    """A compiled network that is called with a batch of numpy columns."""

    squeezes = False

    def __init__(self, compiled, network: OpenvinoNetwork):
        self._compiled = compiled
        self._network = network

    @property
    def widths(self) -> list[int]:
        """Sizes of the last dimension of the inputs."""
        shapes = [port.partial_shape for port in read_network(self._network.files).inputs]
        known = [s[-1] for s in shapes if s.rank.is_static and len(s) > 1 and s[-1].is_static]
        return list(dict.fromkeys(size.get_length() for size in known))

    def __call__(self, batch: list) -> tuple:
        network = self._network
        if len(batch) != len(network.inputs):
            raise UsageError(
                f"The network has {len(network.inputs)} inputs ({', '.join(network.inputs)}), got "
                f"{len(batch)} features",
                code="model-input",
                columns=list(network.inputs),
            )
        inputs = [batch[place] for place in network.order]
        if network.rows is None:
            return tuple(self._compiled.infer(inputs))
        pieces = [self._padded(inputs, low) for low in range(0, len(inputs[0]), network.rows)]
        return tuple(np.concatenate(each) for each in zip(*pieces, strict=True))

    def _padded(self, inputs, low) -> list[np.ndarray]:
        """Outputs for the rows of one call, of which the last one has too few."""
        size = cast("int", self._network.rows)
        parts = [array[low : low + size] for array in inputs]
        count = len(parts[0])
        if count < size:
            parts = [np.concatenate([p, np.repeat(p[-1:], size - count, 0)]) for p in parts]
        return [output[:count] for output in self._compiled.infer(parts)]


def _rows_of(network) -> int | None:
    """The rows of a call, if the network cannot take another number of them."""
    shapes = [port.partial_shape for port in network.inputs]
    if any(shape.rank.is_dynamic or not len(shape) for shape in shapes):
        return None
    fixed = {int(shape[0].get_length()) for shape in shapes if shape[0].is_static}
    if not fixed:
        return None
    if len(fixed) > 1:
        raise UsageError(
            f"The first dimension of every input should be the rows, but they have {sorted(fixed)}",
            code="model-unsupported",
        )
    rows, twin = fixed.pop(), network.clone()
    try:
        twin.reshape(loose_shapes(twin))
    except RuntimeError:  # a constant in it says how many rows there are
        return rows
    outputs = [port.partial_shape for port in twin.outputs]
    takes_any = all(s.rank.is_static and len(s) and s[0].is_dynamic for s in outputs)
    return None if takes_any else rows


@dataclass
class NetworkRequest(PredictionRequest):
    """A user's request of a network's predictions.

    Attributes
    ----------
    input_cols : str or sequence of str, optional
        The network's input for each of the features; default its own order.
    config : mapping, optional
        Properties of OpenVINO.
    """

    input_cols: str | Sequence[str] | None = None
    config: Mapping[str, Any] | None = None


class Estimator:
    """Makes Estimators of networks of OpenVINO.

    Examples
    --------
    >>> import numpy as np
    >>> import openvino
    >>> import torch
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.learn.openvino import Estimator
    >>> sc = init_orca_context("local", cores=2)
    >>> network = openvino.convert_model(torch.nn.ReLU(), example_input=torch.zeros(1, 2))
    >>> openvino.save_model(network, "relu.xml")
    >>> estimator = Estimator.from_openvino(model_path="relu.xml")
    >>> estimator.predict(np.array([[-1.0, 2.0]], dtype="float32"))
    array([[0., 2.]], dtype=float32)
    """

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


def _refused(verb: str, advice: str = "OpenVINO does not train") -> Callable[..., NoReturn]:
    """Return the method for a verb that a network has not."""

    def refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise UsageError(
            f"{verb} is not implemented for networks of OpenVINO: {advice}",
            code="unsupported",
            method=verb,
        )

    refuse.__name__, refuse.__doc__ = verb, f"Not implemented: {advice}."
    return refuse


class OpenvinoEstimator(PredictingEstimator):
    """A network of OpenVINO that predicts on Spark; made by :meth:`Estimator.from_openvino`.

    Examples
    --------
    >>> import openvino
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.openvino import Estimator
    >>> sc = init_orca_context("local", cores=2)
    >>> network = openvino.convert_model(torch.nn.ReLU(), example_input=torch.zeros(1, 2))
    >>> openvino.save_model(network, "relu.xml")
    >>> frame = OrcaContext.get_spark_session().createDataFrame([([-1.0, 2.0],)], ["x"])
    >>> estimator = Estimator.from_openvino(model_path="relu.xml")
    >>> estimator.predict(frame, feature_cols=["x"]).first().prediction
    DenseVector([0.0, 2.0])
    """

    framework = "openvino"

    def __init__(self, *, model_path: str):
        super().__init__()
        self.load(model_path)

    def load(self, model_path: str) -> None:
        """Read another network.

        Parameters
        ----------
        model_path : str
            Path or fsspec URL of the ``.xml`` file.
        """
        self._network = OpenvinoNetwork.read(model_path)
        self._shipped = None

    @typed_predict
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
            column by the name of each: dense vectors for floats of two dimensions, numbers for
            one, nested arrays for more and for whole numbers. Shards get ``prediction``, a list
            with several outputs. Of arrays the result is the outputs alone. All outputs keep the
            dtype that the network gives them.

        Raises
        ------
        UsageError
            For arguments that cannot work.
        """
        if isinstance(data, list) and not is_path(data):
            data = tuple(data)
        names = self._network.outputs if kind_of(data) in ("Spark DataFrame", "path") else ()
        if output_cols is None and len(names) > 1:
            output_cols = names
        request = NetworkRequest(
            batch_size, feature_cols, output_cols, input_cols=input_cols, config=config
        )
        return self._predict(data, request)

    def as_udf(
        self,
        feature_cols: str | Sequence[str] | None = None,
        batch_size: int = 256,
        input_cols: str | Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        output_cols: str | Sequence[str] | None = None,
        sample: Any = None,
    ) -> Any:
        """The network as a user-defined function of Spark, for DataFrames and for SQL.

        Its arguments are the features, and its values those of :meth:`predict`. It keeps the
        network as it is now; each Python worker of Spark compiles it once.

        Parameters
        ----------
        feature_cols : str or list of str, optional
            Names of the features: of the columns of `sample`, and for messages.
        batch_size, input_cols, config
            As of :meth:`predict`.
        output_cols : str or list of str, optional
            Names for the outputs of a network with several; default its own.
        sample : optional
            Some rows that :meth:`predict` takes. They are needed only where a dimension of an
            input has no size.

        Returns
        -------
        function
            Of the output's type, such as ``float`` or ``bigint``, for one number per row, an array
            of it for several, nested arrays for more dimensions, and a struct for several outputs.
            A row with a null in an argument has the value null.

        Examples
        --------
        >>> import numpy as np
        >>> import openvino
        >>> import torch
        >>> from bigdl.orca import OrcaContext, init_orca_context
        >>> from bigdl.orca.learn.openvino import Estimator
        >>> sc = init_orca_context("local", cores=2)
        >>> network = openvino.convert_model(torch.nn.ReLU(), example_input=torch.zeros(1, 2))
        >>> openvino.save_model(network, "relu.xml")
        >>> estimator = Estimator.from_openvino(model_path="relu.xml")
        >>> frame = OrcaContext.get_spark_session().createDataFrame([([-1.0, 2.0],)], ["x"])
        >>> relu = estimator.as_udf(sample=np.zeros((1, 2), "float32"))
        >>> frame.select(relu("x").alias("y")).first()
        Row(y=[0.0, 2.0])
        """
        names = self._network.outputs
        if output_cols is None and len(names) > 1:
            output_cols = names
        columns = batch_size, feature_cols, output_cols
        request = NetworkRequest(*columns, sample=sample, input_cols=input_cols, config=config)
        return self._function(request)

    def _sample(self, request: PredictionRequest, cluster: Cluster) -> Sample | None:
        if request.sample is not None:
            return super()._sample(request, cluster)
        return Sample.of(self._network_of(request, cluster).two_rows())

    def _network_of(self, request: PredictionRequest, cluster: Cluster) -> OpenvinoNetwork:
        """Return the network for the arguments of ``predict``."""
        call = cast("NetworkRequest", request)
        names = None if call.input_cols is None else names_of(call.input_cols)
        return self._network.for_call(names, call.config, cluster.threads_per_task)

    def _ship(
        self, request: PredictionRequest, rows: Sample | None, cluster: Cluster
    ) -> ShippedModel:
        network = self._network_of(request, cluster)
        origin = (repr(sorted(network.config.items())), str(network.order), network.threads)
        self._shipped = shipped_of(lambda: network, self._shipped, cluster.broadcaster, *origin)
        return self._shipped

    # -- what a network that is there already cannot do ----------------------------------------

    fit = _refused("fit", "OpenVINO does not train; train with bigdl.orca.learn.pytorch")
    evaluate = _refused("evaluate", "compare the predictions with the labels instead")
    get_model = _refused("get_model", "read it with bigdl.nano.openvino.OpenVINOModel")
    save = _refused("save", "copy the files that it was read from")
    load_orca_checkpoint = _refused("load_orca_checkpoint", "load reads another .xml file")
    set_tensorboard = _refused("set_tensorboard")
    get_train_summary = _refused("get_train_summary")
    get_validation_summary = _refused("get_validation_summary")
    clear_gradient_clipping = _refused("clear_gradient_clipping")
    set_constant_gradient_clipping = _refused("set_constant_gradient_clipping")
    set_l2_norm_gradient_clipping = _refused("set_l2_norm_gradient_clipping")
