"""Distributed prediction with OpenVINO models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from bigdl.common.errors import UsageError, hide_frames
from bigdl.nano.openvino import CompiledNetwork
from bigdl.nano.openvino.network import loose_shapes, port_name, read_network, renamed_properties
from bigdl.orca.data.feeds import input_type_of, is_path, names_of
from bigdl.orca.inference.runtimes import read_openvino
from bigdl.orca.inference.shipping import ShippedModel, ship_model
from bigdl.orca.learn.estimator import PredictingEstimator, PredictionRequest
from bigdl.orca.learn.prediction.sample import Sample
from bigdl.orca.learn.prediction.typed import typed_predict
from bigdl.runtime.cluster import Cluster

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = [
    "Estimator",
    "OpenvinoEstimator",
]


@dataclass(frozen=True)
class OpenvinoNetwork:
    """An OpenVINO network with its call options, as shipped to tasks.

    Attributes
    ----------
    files : pair of bytes
        Content of the ``.xml`` and the ``.bin`` file.
    inputs, outputs : tuple of str
        Names in the network's order.
    rows : int or None
        Fixed number of rows per call, or None for any number.
    config : mapping
        OpenVINO properties.
    order : tuple of int
        For each input, the index of its feature.
    threads : int
        Number of threads per task.
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
        """Read a network from its ``.xml`` file and the ``.bin`` file of the same name.

        Raises
        ------
        UsageError
            If the files are missing or are not an OpenVINO network.
        """
        files = read_openvino(path)
        network = read_network(files)
        return cls(
            files,
            tuple(map(port_name, network.inputs)),
            tuple(map(port_name, network.outputs)),
            _fixed_batch_size(network),
        )

    def for_call(self, input_cols: Sequence[str] | None, config: Mapping | None, threads: int):
        """Return a copy of the network with the arguments of one ``predict`` call.

        Raises
        ------
        UsageError
            If `input_cols` are not the network's inputs, or `config` is not a mapping.
        """
        if config is not None and not isinstance(config, Mapping):
            raise UsageError(
                f"config should be a dict of OpenVINO properties, got {config!r}",
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

    def dummy_rows(self) -> list[np.ndarray]:
        """Return two rows of zeros for every input of the network, in the order of the features.

        Raises
        ------
        UsageError
            If an input has a dynamic dimension other than the rows.
        """
        features: dict[int, np.ndarray] = {}
        for index, port in zip(self.order, read_network(self.files).inputs, strict=True):
            shape = port.partial_shape
            if shape.rank.is_dynamic or any(size.is_dynamic for size in list(shape)[1:]):
                raise UsageError(
                    f"The network's input '{port_name(port)}' has a dynamic shape ({shape}); pass "
                    "sample=, some rows of the inputs",
                    code="argument-missing",
                    argument="sample",
                )
            sizes = [size.get_length() for size in list(shape)[1:]]
            features[index] = np.zeros((2, *sizes), port.element_type.to_dtype())
        return [features[index] for index in sorted(features)]

    def load_on(self, device) -> _LoadedNetwork:
        """Compile the network on the CPU; `device` is ignored."""
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
        """Distinct static sizes of the inputs' last dimensions; dynamic sizes are omitted."""
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
        inputs = [batch[index] for index in network.order]
        if network.rows is None:
            return tuple(self._compiled.infer(inputs))
        pieces = [self._padded(inputs, low) for low in range(0, len(inputs[0]), network.rows)]
        return tuple(np.concatenate(each) for each in zip(*pieces, strict=True))

    def _padded(self, inputs, low) -> list[np.ndarray]:
        """Run the network on one fixed-size batch, padding a short batch with its last row."""
        size = cast("int", self._network.rows)
        parts = [array[low : low + size] for array in inputs]
        count = len(parts[0])
        if count < size:
            parts = [np.concatenate([p, np.repeat(p[-1:], size - count, 0)]) for p in parts]
        return [output[:count] for output in self._compiled.infer(parts)]


def _fixed_batch_size(network) -> int | None:
    """Return the network's fixed batch size, or None if it accepts any batch size."""
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
    rows, clone = fixed.pop(), network.clone()
    try:
        clone.reshape(loose_shapes(clone))
    except RuntimeError:  # a constant in the network fixes the number of rows
        return rows
    outputs = [port.partial_shape for port in clone.outputs]
    takes_any = all(s.rank.is_static and len(s) and s[0].is_dynamic for s in outputs)
    return None if takes_any else rows


@dataclass
class NetworkRequest(PredictionRequest):
    """Arguments of ``OpenvinoEstimator.predict`` and ``as_udf``.

    Attributes
    ----------
    input_cols : str or sequence of str, optional
        The network's input for each feature; default the network's input order.
    config : mapping, optional
        OpenVINO properties.
    """

    input_cols: str | Sequence[str] | None = None
    config: Mapping[str, Any] | None = None


@hide_frames
class Estimator:
    """Factory of Estimators for OpenVINO networks.

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
        """Create an Estimator that predicts with an OpenVINO network.

        Parameters
        ----------
        model_path : str
            Path or fsspec URL of the ``.xml`` file. The ``.bin`` file has the same base name.

        Returns
        -------
        OpenvinoEstimator

        Raises
        ------
        UsageError
            If the files are missing or are not an OpenVINO network.
        """
        return OpenvinoEstimator(model_path=model_path)


def _unsupported_method(
    method: str, advice: str = "OpenVINO does not train"
) -> Callable[..., NoReturn]:
    """Return a method that raises a UsageError, since OpenVINO networks do not support it."""

    def refuse(self, *args: object, **options: object) -> NoReturn:
        raise UsageError(
            f"{method} is not implemented for OpenVINO networks: {advice}",
            code="unsupported",
            method=method,
        )

    refuse.__name__, refuse.__doc__ = method, f"Not implemented: {advice}."
    return refuse


@hide_frames
class OpenvinoEstimator(PredictingEstimator):
    """An Estimator that predicts with an OpenVINO network on Spark.

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
        """Load a network that replaces the current one.

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
        """Return `data` with the network's lazily computed outputs, in the original row order.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, pandas DataFrame or arrays
            An ndarray, or a list with one ndarray per input. Shards are ``{"x": ...}`` or pandas
            DataFrames. A str is a path of Parquet files.
        feature_cols : str or list of str, optional
            DataFrame columns that hold the network's inputs.
        batch_size : int
            Number of rows per inference. A network with a fixed batch size ignores it; its last
            batch is padded.
        input_cols : str or list of str, optional
            The network's input for each feature; default the network's input order.
        config : dict, optional
            OpenVINO properties, e.g. ``{"INFERENCE_NUM_THREADS": 2}`` (formerly
            ``CPU_THREADS_NUM``). By default, a task uses the threads that Spark assigns to it.
        output_cols : str or list of str, optional
            Names of the output columns.

        Returns
        -------
        DataFrame, SparkXShards, ndarray or list of ndarray
            The same type as `data`. A DataFrame gets the column ``prediction``, or one column per
            named output if there are several. 1-D outputs become scalars, 2-D float outputs become
            dense vectors, and other outputs become nested arrays. Shards get ``prediction``, a list
            if there are several outputs. For arrays, the result holds only the outputs. All outputs
            keep the network's dtype.

        Raises
        ------
        UsageError
            If an argument is invalid.
        """
        if isinstance(data, list) and not is_path(data):
            data = tuple(data)
        names = self._network.outputs if input_type_of(data) in ("Spark DataFrame", "path") else ()
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
        sample: object = None,
    ) -> Callable[..., Column]:
        """Return the network as a Spark user-defined function, for DataFrames and SQL.

        The function takes the features and returns the values of :meth:`predict`. It keeps the
        current network even if another one is loaded later. Each Python worker of Spark compiles it
        once.

        Parameters
        ----------
        feature_cols : str or list of str, optional
            Feature names, for the columns of `sample` and for error messages.
        batch_size, input_cols, config
            See :meth:`predict`.
        output_cols : str or list of str, optional
            Names of the outputs if there are several; default the network's output names.
        sample : optional
            Sample rows, in any form that :meth:`predict` takes. Required only if an input has a
            dynamic dimension other than the rows.

        Returns
        -------
        function
            User-defined function. It returns a scalar such as ``float`` or ``bigint`` for 1-D
            outputs, arrays for outputs with more dimensions, and a struct for several outputs. It
            returns null for a row with a null argument.

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
        return Sample.of(self._network_of(request, cluster).dummy_rows())

    def _network_of(self, request: PredictionRequest, cluster: Cluster) -> OpenvinoNetwork:
        """Return the network with the arguments of a ``predict`` call."""
        call = cast("NetworkRequest", request)
        names = None if call.input_cols is None else names_of(call.input_cols)
        return self._network.for_call(names, call.config, cluster.threads_per_task)

    def _ship(
        self, request: PredictionRequest, rows: Sample | None, cluster: Cluster
    ) -> ShippedModel:
        network = self._network_of(request, cluster)
        origin = (repr(sorted(network.config.items())), str(network.order), network.threads)
        self._shipped = ship_model(lambda: network, self._shipped, cluster.broadcaster, *origin)
        return self._shipped

    # -- methods that a compiled network does not support --------------------------------------

    fit = _unsupported_method("fit", "OpenVINO does not train; train with bigdl.orca.learn.pytorch")
    evaluate = _unsupported_method("evaluate", "compare the predictions with the labels instead")
    get_model = _unsupported_method("get_model", "read it with bigdl.nano.openvino.OpenVINOModel")
    save = _unsupported_method("save", "copy the files that it was read from")
    load_orca_checkpoint = _unsupported_method(
        "load_orca_checkpoint", "load reads another .xml file"
    )
    set_tensorboard = _unsupported_method("set_tensorboard")
    get_train_summary = _unsupported_method("get_train_summary")
    get_validation_summary = _unsupported_method("get_validation_summary")
    clear_gradient_clipping = _unsupported_method("clear_gradient_clipping")
    set_constant_gradient_clipping = _unsupported_method("set_constant_gradient_clipping")
    set_l2_norm_gradient_clipping = _unsupported_method("set_l2_norm_gradient_clipping")
