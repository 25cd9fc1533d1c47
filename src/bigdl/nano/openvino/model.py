"""Models that run an OpenVINO network.

:class:`OpenVINOFacade` is independent of frameworks: the models for PyTorch and Keras, and
:class:`OpenVINOModel`, convert the arguments of a call to arrays, and arrays to results.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.accuracy import AccuracyGoal, keep_accuracy
from bigdl.nano.acceleration.precision import FP32, INT4, INT8, PRECISIONS, WeightOptions
from bigdl.nano.acceleration.structure import TENSOR, CallSignature, as_array, rows_of
from bigdl.nano.openvino.network import (
    SAVED_NAME,
    CompiledNetwork,
    ShapedNetwork,
    renamed_properties,
)

if TYPE_CHECKING:
    import os

    import openvino as ov
    from numpy.typing import ArrayLike

    from bigdl.nano.openvino.network import NetworkSource, Shapes


class OpenVINOFacade(abc.ABC):
    """Mix-in for models that run an OpenVINO network.

    Attributes
    ----------
    nano_network : CompiledNetwork

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.openvino.model import OpenVINOFacade
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> x = torch.ones(1, 2)
    >>> fast = InferenceOptimizer.trace(torch.nn.ReLU(), x, accelerator="openvino", thread_num=2)
    >>> isinstance(fast, OpenVINOFacade)
    True
    >>> fast.additional_config["INFERENCE_NUM_THREADS"]
    2
    >>> fast.async_predict([-x, x], num_requests=2)
    [tensor([[0., 0.]]), tensor([[1., 1.]])]
    """

    nano_network: CompiledNetwork
    nano_describe: Callable[[], dict[str, Any]]
    nano_result_of: Callable[[list[np.ndarray]], Any]
    """Function that nests the flat list of the network's results as the result of a call."""

    @property
    def ov_model(self) -> ov.Model:
        """The ``openvino.Model``."""
        return self.nano_network.network

    @property
    def additional_config(self) -> dict[str, Any]:
        """Requested OpenVINO properties, including those derived from other arguments."""
        return dict(self.nano_network.additional_config)

    @property
    def final_config(self) -> dict[str, Any]:
        """All properties that the network was compiled with."""
        return dict(self.nano_network.final_config)

    def reshape(self, shapes: Shapes) -> tuple[bool, str | None]:
        """Change the input shapes; do nothing if the inputs already have them.

        Parameters
        ----------
        shapes : str, mapping or sequence
            ``"[1,3,224,224]"``, ``"x[1,3],y[?,4]"``, a mapping of names to shapes, one shape, or
            a shape for each input. ``?`` or -1 stands for any size, ``1..8`` for a range.

        Returns
        -------
        ok : bool
            True if the inputs have these shapes now; otherwise nothing has changed.
        error : str or None
            Reason for a failure.

        Examples
        --------
        >>> import torch
        >>> from bigdl.nano.pytorch import InferenceOptimizer
        >>> fast = InferenceOptimizer.trace(
        ...     torch.nn.ReLU(), torch.ones(1, 2), accelerator="openvino", dynamic_axes=False
        ... )
        >>> fast.reshape("[4,2]")
        (True, None)
        >>> fast(torch.ones(4, 2)).shape
        torch.Size([4, 2])
        """
        return self.nano_network.reshape(shapes)

    def async_predict(self, input_data: Iterable[Any], num_requests: int = 0) -> list:
        """Run the model on many inputs, several at a time.

        Parameters
        ----------
        input_data : iterable
            Inputs of one call each: an array or tensor, a tuple or list of arguments, or a mapping
            of names to them. A PyTorch model also takes a DataLoader, whose targets are ignored.
        num_requests : int
            Number of concurrent calls; 0 uses OpenVINO's optimal number. More than one is faster
            with the property ``{"PERFORMANCE_HINT": "THROUGHPUT"}``.

        Returns
        -------
        list
            Results of the calls, in order.

        Raises
        ------
        UsageError
            If the inputs of one call do not fit; the message is about that call.
        """
        calls = map(self.nano_arrays_of, input_data)
        results = self.nano_network.infer_many(calls, num_requests)
        return [self.nano_result_of(each) for each in results]

    @abc.abstractmethod
    def nano_arrays_of(self, call: object) -> list[np.ndarray]:
        """Convert an element of ``input_data`` to a flat list of the network's input arrays."""

    def nano_network_facts(self) -> dict[str, Any]:
        """Return the network's properties for the metadata of a saved model."""
        return {
            "config": {str(key): plain(value) for key, value in self.additional_config.items()},
            "device": self.nano_network.device,
            "precision": self.nano_network.precision.name,
        }

    def save_to(self, directory: Path, compression: str = "fp32") -> dict[str, Any]:
        """Write the network's files; return the metadata for :meth:`load_network`."""
        self.nano_network.save(directory)
        return {
            **self.nano_describe(),
            **self.nano_network_facts(),
            "compression": "fp32",
            "shapes": [str(port.partial_shape) for port in self.ov_model.inputs],
            "xml_path": f"{SAVED_NAME}.xml",
            "weight_path": f"{SAVED_NAME}.bin",
        }

    @classmethod
    def load_network(
        cls,
        directory: Path,
        meta: Mapping[str, Any],
        *,
        device: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        shapes: Shapes | None = None,
    ) -> ShapedNetwork:
        """Load the network of a saved model.

        Parameters
        ----------
        directory : Path
        meta : mapping
            Metadata from :meth:`save_to`.
        device, shapes : optional
            Device and shapes to use instead of the saved ones.
        cache_dir : str or Path, optional
            See :class:`~bigdl.nano.openvino.network.CompiledNetwork`.
        """
        config, threads = saved_properties(meta)
        return ShapedNetwork(
            directory / meta["xml_path"],
            device or meta.get("device", "CPU"),
            precision=meta.get("precision", FP32),
            thread_num=threads,
            config=config,
            shapes=meta.get("shapes") if shapes is None else shapes,
            cache_dir=cache_dir,
        )


def saved_properties(meta: Mapping) -> tuple[dict[str, Any], int | None]:
    """Return the OpenVINO properties and the thread count of a saved model.

    Properties with file paths, such as the directory of OpenVINO's cache, are dropped: the files
    may not exist on this machine, and a saved model must not choose files to read and write.
    """
    config = _without_files(renamed_properties(meta.get("config") or {}))
    threads = config.pop("INFERENCE_NUM_THREADS", None)
    threads = meta.get("thread_num") or threads
    return config, int(threads) if threads else None


def _without_files(config: Mapping) -> dict[str, Any]:
    return {
        key: _without_files(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not str(key).endswith(("_DIR", "_PATH", "_FILE"))
    }


def plain(value: object) -> object:
    """Convert a value, such as an OpenVINO property, to types that YAML supports."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, int) else str(key): plain(each) for key, each in value.items()
        }
    if isinstance(value, bool | int | float | type(None)) or type(value) is str:
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(getattr(value, "name", value))


class OpenVINOModel(OpenVINOFacade):
    """A network in OpenVINO's format, called with arrays by position or by name.

    Several threads may call one object at the same time.

    Parameters
    ----------
    ie_network : str, Path, or openvino.Model
        An ``.xml`` file with its ``.bin`` file next to it, an ``.onnx`` file, a directory from
        :meth:`save`, or a network in memory.
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"`` (formerly ``"VPUX"``), ``"AUTO"``, ….
    precision : str
        Precision of the computation, or of a quantized network; see
        :data:`bigdl.nano.acceleration.PRECISIONS`. Use :meth:`pot` to quantize.
    thread_num : int, optional
        Threads of one inference on a CPU. Default: one per physical core in the affinity mask.
    config : mapping, optional
        OpenVINO properties. They override the properties set by other parameters.
    shapes : str, mapping or sequence, optional
        New shapes of the inputs, as in :meth:`reshape`.
    cache_dir : str or Path, optional
        Directory in which OpenVINO caches compiled networks, so that the next start is faster.

    Raises
    ------
    UsageError
        If the network cannot be read, reshaped or compiled, or the device or precision is not
        available.

    Examples
    --------
    >>> import numpy as np
    >>> import openvino
    >>> from openvino import opset13
    >>> from bigdl.nano.openvino import OpenVINOModel
    >>> x = opset13.parameter([-1, 2], np.float32, name="x")
    >>> openvino.save_model(openvino.Model([opset13.multiply(x, x)], [x]), "squares.xml")
    >>> model = OpenVINOModel("squares.xml", thread_num=2)
    >>> rows = np.array([[1, 2], [3, 4]], np.float32)
    >>> model(rows)
    array([[ 1.,  4.],
           [ 9., 16.]], dtype=float32)
    >>> [result.sum() for result in model.async_predict([rows, rows[:1]], num_requests=2)]
    [np.float32(30.0), np.float32(5.0)]
    """

    def __init__(
        self,
        ie_network: NetworkSource,
        device: str = "CPU",
        precision: str = FP32,
        thread_num: int | None = None,
        config: Mapping[str, Any] | None = None,
        shapes: Shapes | None = None,
        *,
        cache_dir: str | os.PathLike | None = None,
    ):
        self.nano_network = CompiledNetwork(
            ie_network,
            device,
            precision=precision,
            thread_num=thread_num,
            config=config,
            shapes=shapes,
            cache_dir=cache_dir,
        )

    def __call__(self, *inputs: ArrayLike, **named: ArrayLike) -> np.ndarray | list[np.ndarray]:
        """Run the network.

        Parameters
        ----------
        *inputs : array_like or torch.Tensor
            The first inputs in the network's order.
        **named : array_like or torch.Tensor
            The other inputs by name.

        Returns
        -------
        ndarray or list of ndarray
            The output; a list if there are several.

        Raises
        ------
        UsageError
            If inputs are missing, duplicate or do not fit.
        """
        return self.nano_result_of(self.nano_network.infer(self._ordered(inputs, named)))

    forward = __call__

    def nano_arrays_of(self, call: object) -> list[np.ndarray]:
        if isinstance(call, Mapping):
            return self._ordered((), call)
        return self._ordered(call if isinstance(call, tuple | list) else (call,), {})

    def nano_result_of(self, results: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
        return results[0] if len(results) == 1 else results

    def save(self, path: str | os.PathLike) -> None:
        """Write the network to files.

        Parameters
        ----------
        path : str or Path
            An ``.xml`` file, or a directory for ``ov_saved_model.xml`` and ``.bin``, which is
            created.
        """
        self.nano_network.save(path)

    def pot(
        self,
        dataloader: Iterable[Any],
        metric: Callable[[Any, Any], float] | None = None,
        higher_better: bool = True,
        drop_type: str = "relative",
        maximal_drop: float = 0.999,
        max_iter_num: int = 1,
        sample_size: int = 300,
        **options: Any,
    ) -> OpenVINOModel:
        """Quantize the network to 8-bit integers with post-training quantization.

        Parameters
        ----------
        dataloader : iterable
            Batches for calibration: inputs, or pairs (inputs, target), or (input, …, target).
            Elements beyond the network's inputs are the target.
        metric : callable or torchmetrics.Metric, optional
            ``metric(predictions, targets) -> float``. If set, layers are restored to floating
            point until the metric on `dataloader` is good enough.
        higher_better : bool
            True if a higher metric is better.
        drop_type : str
            ``"relative"`` if `maximal_drop` is relative to the metric of this model, or
            ``"absolute"``.
        maximal_drop : float
            Largest allowed loss of the metric.
        max_iter_num : int
            Largest number of rounds of restoring layers.
        sample_size : int
            Number of calibration samples.
        **options
            Further arguments of ``nncf.quantize``, e.g. ``preset`` or ``ignored_scope`` (default:
            recurrent layers); `smooth` of
            :class:`bigdl.nano.openvino.quantization.Quantizer`; ``weights_only=True`` to quantize
            no activations, optionally with ``precision="int4"`` and `weight_options`, a
            :class:`~bigdl.nano.acceleration.WeightOptions`.

        Returns
        -------
        OpenVINOModel
            The quantized model, on the same device with the same threads. This model is not
            changed.

        Raises
        ------
        UsageError
            If `dataloader` is empty or does not fit the network, or an argument is invalid.

        Examples
        --------
        >>> import numpy as np
        >>> import openvino
        >>> from openvino import opset13
        >>> from bigdl.nano.openvino import OpenVINOModel
        >>> weights = np.eye(16, dtype=np.float32)
        >>> x = opset13.parameter([-1, 16], np.float32, name="x")
        >>> model = OpenVINOModel(openvino.Model([opset13.matmul(x, weights, False, False)], [x]))
        >>> rows = np.random.default_rng(0).uniform(0, 1, (8, 16)).astype(np.float32)
        >>> quantized = model.pot([rows])
        >>> bool(np.allclose(quantized(rows), rows, atol=0.02))
        True
        """
        from bigdl.nano.openvino.quantization import Quantizer, metric_of, split_batch

        check_choice("drop_type", drop_type, ("relative", "absolute"))
        check_positive("sample_size", sample_size)
        calibration: list[list[np.ndarray]] = []
        labelled: list[tuple[list[np.ndarray], np.ndarray | None]] = []
        samples = 0
        for batch in dataloader:
            inputs, target = split_batch(batch, self.forward_args)
            if samples < sample_size:
                calibration.append(inputs)
                samples += rows_of(inputs)
            elif metric is None:
                break
            labelled.append((inputs, target))
        if not calibration:
            raise UsageError(
                "Quantization needs calibration samples, but the data is empty",
                code="data-empty",
            )
        chosen = check_choice("precision", options.pop("precision", INT8), (INT8, INT4))
        precision, smooth = PRECISIONS[chosen], options.pop("smooth", None)
        weights_only = options.pop("weights_only", "weight_options" in options)
        weights = options.pop("weight_options", WeightOptions()) if weights_only else None
        quantizer = Quantizer(self.ie_network, calibration, precision, weights, smooth, options)
        goal = None
        if metric is not None:
            goal = AccuracyGoal(
                lambda network: metric_of(network, metric, labelled),
                bool(higher_better),
                maximal_drop if drop_type == "relative" else None,
                maximal_drop if drop_type == "absolute" else None,
                max_iter_num + 1,
            )
        network = keep_accuracy(
            quantizer.quantized, lambda: quantizer.ranking, goal, self.ie_network, refuse=False
        )
        config = self.additional_config
        config.pop("INFERENCE_PRECISION_HINT", None)
        return OpenVINOModel(network, self.device, precision, self.thread_num, config)

    @property
    def ie_network(self):
        """The ``openvino.Model``; assigning another model compiles it with the same properties."""
        return self.nano_network.network

    @ie_network.setter
    def ie_network(self, network: NetworkSource) -> None:
        self.nano_network.network = network

    @property
    def forward_args(self) -> list[str]:
        """Names of the inputs in order."""
        return self.nano_network.input_names

    @property
    def device(self) -> str:
        """Device name as OpenVINO spells it."""
        return self.nano_network.device

    @property
    def thread_num(self) -> int | None:
        """Requested number of threads of one inference."""
        return self.nano_network.thread_num

    def _ordered(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return one array for each input of the network."""
        if not named:
            return [as_array(each) for each in inputs]
        names = tuple(self.forward_args)
        call = CallSignature(names, dict.fromkeys(names, TENSOR))
        arrays = {name: np.asarray(as_array(value)) for name, value in named.items()}
        return call.flatten(tuple(np.asarray(as_array(value)) for value in inputs), arrays)
