"""ONNX Runtime for every framework: networks, models that run them, and the methods.

A framework calls :func:`onnxruntime_methods` with its exporter and its class of models.
"""

from __future__ import annotations

import abc
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.cpu import core_count, topology
from bigdl.common.environment import scratch_directory, scratch_home
from bigdl.common.errors import UsageError, one_line, require
from bigdl.nano.acceleration.accuracy import keep_accuracy
from bigdl.nano.acceleration.method import Method, Source
from bigdl.nano.acceleration.onnx_quantization import (
    prepare_for_quantization,
    quantize_dynamically,
    quantize_statically,
    quantize_with_nncf,
    rank_nodes,
)
from bigdl.nano.acceleration.options import BuildOptions

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = [
    "OnnxFile",
    "OnnxNetwork",
    "OnnxRuntimeFacade",
    "check_outputs",
    "onnxruntime_methods",
    "threads_of",
]


_TYPES: dict[str, DTypeLike] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
    **{f"tensor({kind}{bits})": np.dtype(f"{kind}{bits}") for kind in ("int", "uint")
       for bits in (8, 16, 32, 64)},
}  # fmt: skip


class OnnxFile:
    """An ONNX model in a directory of its own, which goes when nobody uses it any more.

    A model of more than 2 GB has its weights in a second file beside the first, whose name the
    first one knows. So the names are always the same, and a model is moved by moving all files.

    Attributes
    ----------
    path : Path
        The ``.onnx`` file; it does not exist until somebody writes it.
    """

    NAME = "onnx_saved_model.onnx"

    def __init__(self):
        folder = scratch_directory("bigdl-onnx-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = folder / self.NAME

    @classmethod
    def read(cls, path: Path) -> OnnxFile:
        """A copy of a file that lies elsewhere, and of its weights."""
        file = cls()
        shutil.copyfile(path, file.path)
        data = path.with_name(path.name + ".data")
        if data.exists():
            shutil.copyfile(data, file.path.with_name(data.name))
        return file

    def copy_to(self, directory: Path) -> None:
        """Write the model's files into a directory."""
        for part in self.path.parent.iterdir():
            shutil.copyfile(part, directory / part.name)

    @property
    def external(self) -> bool:
        """True if the weights are in a file of their own."""
        return self.path.with_name(self.path.name + ".data").exists()


class OnnxNetwork:
    """A network that is ready to run; any number of threads may call it.

    Parameters
    ----------
    file : OnnxFile
    names : sequence of str, optional
        Names of the inputs in the order in which :meth:`run` gets them, by default the session's.
        An input that the network does not use need not be one of the session's.
    threads : int, optional
        Threads of one call; by default one for each physical core that the process may use,
        within its CPU quota. ONNX Runtime alone would take those of the whole machine.
    session_options : onnxruntime.SessionOptions, optional
        Used as they are if `threads` is None; their thread counts are set if it is given.

    Attributes
    ----------
    session : onnxruntime.InferenceSession
    options : onnxruntime.SessionOptions
        What the session was made with.

    Raises
    ------
    UsageError
        If the session options are none, or ONNX Runtime cannot run the network.
    """

    def __init__(
        self,
        file: OnnxFile,
        names: Sequence[str] | None = None,
        *,
        threads: int | None = None,
        session_options: Any = None,
    ):
        ort = require("onnxruntime", "nano")
        self.file = file
        self.options = _session_options(ort, threads, session_options)
        try:
            self.session = ort.InferenceSession(
                str(file.path), self.options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise UsageError(f"ONNX Runtime cannot run the network: {_reason(error)}") from error
        ports = {port.name: _TYPES.get(port.type) for port in self.session.get_inputs()}
        self.input_names = list(ports) if names is None else list(names)
        self._ports = [
            (position, name, np.dtype(ports[name]) if ports[name] is not None else None)
            for position, name in enumerate(self.input_names)
            if name in ports
        ]

    def __deepcopy__(self, memo: Mapping) -> OnnxNetwork:
        return self  # nothing in it changes

    @property
    def output_count(self) -> int:
        """Number of arrays that :meth:`run` returns."""
        return len(self.session.get_outputs())

    def feed(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays by the names of the session's inputs, in the types that it takes.

        Raises
        ------
        UsageError
            If an array has a type that cannot be cast, e.g. floats where integers are needed.
        """
        return {
            name: array if array.dtype == dtype or dtype is None else _cast(array, dtype, name)
            for position, name, dtype in self._ports
            for array in (arrays[position],)
        }

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The network's outputs, which are the caller's.

        Raises
        ------
        UsageError
            If an array does not fit the network.
        """
        feed = self.feed(arrays)
        # Measured: binding inputs and outputs costs more than the copy of the outputs it saves.
        try:
            return self.session.run(None, feed)
        except Exception as error:
            raise runtime_error(error) from error


def runtime_error(error: Exception) -> Exception:
    """Return what to raise for an exception of ONNX Runtime: a UsageError for a wrong input."""
    text = _reason(error)
    if "invalid dimensions" in text or "Invalid rank" in text:
        return UsageError(
            f"The input has another shape than the network takes: {text}; give it in that shape, "
            "or convert the model again with a sample of this shape or other dynamic_axes"
        )
    if type(error).__module__.startswith("onnxruntime"):
        return UsageError(f"ONNX Runtime cannot compute this input: {text}")
    return error


def _reason(error: Exception) -> str:
    """The message in one line, without its code."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return text.removesuffix(" Please fix either the inputs/outputs or the model.")


def _session_options(ort, threads: int | None, given: Any):
    if given is not None and not isinstance(given, ort.SessionOptions):
        raise UsageError(
            "onnxruntime_session_options must be an onnxruntime.SessionOptions, not a "
            f"{type(given).__name__}"
        )
    options = given
    if options is None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors; warnings of the optimizer are of no use to users
        options.intra_op_num_threads = min(len(topology().cores), core_count())
    if threads is not None:
        options.intra_op_num_threads = options.inter_op_num_threads = threads
    return options


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UsageError(
            f"Input {name!r} must be of type {dtype}, but it is of type {array.dtype}; convert it "
            "first"
        )
    return array.astype(dtype)


class OnnxRuntimeFacade:
    """A mix-in for models with a network of ONNX Runtime.

    Attributes
    ----------
    nano_network : OnnxNetwork
    """

    nano_network: OnnxNetwork

    @property
    def ortsess(self) -> Any:
        """The ``onnxruntime.InferenceSession``."""
        return self.nano_network.session

    @property
    def session_options(self) -> Any:
        """The ``onnxruntime.SessionOptions`` that the session was made with."""
        return self.nano_network.options

    def nano_infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Run the network on a flat list of arrays; the results are the caller's."""
        return self.nano_network.run(arrays)


def threads_of(network: OnnxNetwork, options: BuildOptions) -> int | None:
    """Return the threads that were asked for, by their number or in options of a session."""
    if options.threads is None and options.onnx.session_options is not None:
        return network.options.intra_op_num_threads or None
    return options.threads


def check_outputs(network: OnnxNetwork, expected: int, model: Any) -> None:
    """Refuse a network that has not as many outputs as the model it was exported from.

    Raises
    ------
    UsageError
    """
    if network.output_count != expected:
        raise UsageError(
            f"The network of {type(model).__name__} in ONNX has {network.output_count} outputs, "
            f"but the model has {expected}"
        )


Export = Callable[[Any, str, BuildOptions], list[str]]
"""Writes a source's model to an ONNX file, with flat inputs and outputs; returns the names of its
inputs in order, among them any that the file lacks because the model does not use them."""
Wrap = Callable[[Any, OnnxNetwork, str, BuildOptions], Any]
"""Returns the accelerated model of a source and the network that it became, by a method."""


@dataclass(frozen=True)
class OnnxRuntimeMethod(Method[Source]):
    """ONNX Runtime in the precision of the model's operators."""

    accelerator: str | None = "onnxruntime"
    packages: tuple[str, ...] = ("onnx", "onnxruntime", "onnxscript")
    export: Export = field(kw_only=True)
    wrap: Wrap = field(kw_only=True)

    def build(self, source: Source, options: BuildOptions) -> Any:
        return self.model_of(*self.exported(source, options), source, options)

    def exported(self, source: Source, options: BuildOptions) -> tuple[OnnxFile, list[str]]:
        """Return a source's model as an ONNX file, and the names of its inputs."""
        file = OnnxFile()
        return file, self.export(source, str(file.path), options)

    def model_of(
        self, file: OnnxFile, names: list[str], source: Source, options: BuildOptions
    ) -> Any:
        """Return the accelerated model of an ONNX file."""
        network = OnnxNetwork(
            file, names, threads=options.threads, session_options=options.onnx.session_options
        )
        return self.wrap(source, network, self.name, options)


@dataclass(frozen=True)
class QuantizedMethod(OnnxRuntimeMethod, abc.ABC):
    """ONNX Runtime with 8-bit integers.

    With an accuracy goal, nodes are left in floating point, those first whose quantization brings
    the largest error into the network.
    """

    precision: str = "int8"

    def build(self, source: Source, options: BuildOptions) -> Any:
        self.check(options)
        original = OnnxNetwork(*self.exported(source, options))
        with _QuantizationFiles(original, self.feeds(source, original, options)) as files:

            def build(excluded: tuple[str, ...] = ()) -> Any:
                file = self.quantized(files, excluded, options)
                return self.model_of(file, original.input_names, source, options)

            goal = options.calibration.goal
            if goal is None:
                return build()
            sample = original.feed(source.sample_arrays())
            return keep_accuracy(build, lambda: files.rank(sample), goal, source.model)

    def check(self, options: BuildOptions) -> None:
        """Refuse what this way of quantization does not have."""
        if options.calibration.smooth:
            raise UsageError(
                f"Method {self.name!r} has no smooth quantization; use accelerator='onnxruntime' "
                "with method='nncf', or leave smooth out"
            )

    def feeds(self, source: Source, network: OnnxNetwork, options: BuildOptions) -> list[dict]:
        """Calibration batches by the names of the network's inputs."""
        return [network.feed(arrays) for arrays in source.calibration_arrays(options)]

    def quantized(
        self, files: _QuantizationFiles, excluded: tuple[str, ...], options: BuildOptions
    ) -> OnnxFile:
        """The model in int8 but for some nodes."""
        files.quantized = file = OnnxFile()
        try:
            self.quantize(files, file.path, excluded, options)
        except Exception as error:
            said = runtime_error(error)
            if said is error:
                said = UsageError(
                    f"The network cannot be quantized by method {self.name!r}: {one_line(error)}"
                )
            raise said from error
        return file

    @abc.abstractmethod
    def quantize(
        self,
        files: _QuantizationFiles,
        target: Path,
        excluded: Collection[str],
        options: BuildOptions,
    ) -> None:
        """Write the quantized graph."""


@dataclass(frozen=True)
class StaticMethod(QuantizedMethod):
    """Weights and activations, by ONNX Runtime's own quantizer."""

    def quantize(self, files, target, excluded, options):
        quantize_statically(
            files.source,
            target,
            files.feeds,
            excluded,
            ranges=files.ranges,
            external=files.external,
        )


@dataclass(frozen=True)
class DynamicMethod(QuantizedMethod):
    """Weights, and activations at each call; it needs no calibration data."""

    def feeds(self, source, network, options):
        return []

    def quantize(self, files, target, excluded, options):
        quantize_dynamically(files.source, target, excluded, external=files.external)


@dataclass(frozen=True)
class NNCFMethod(QuantizedMethod):
    """Weights and activations, by NNCF, with corrected biases and smoothed outliers."""

    packages: tuple[str, ...] = ("onnx", "onnxruntime", "onnxscript", "nncf")

    def check(self, options: BuildOptions) -> None:
        """Takes everything."""

    def quantize(self, files, target, excluded, options):
        quantize_with_nncf(
            files.source, target, files.feeds, excluded, smooth=options.calibration.smooth
        )


class _QuantizationFiles:
    """Files that are made on the way to a quantized model, while the context lasts.

    Attributes
    ----------
    source : Path
        The graph in floating point, ready for quantizers.
    feeds : list of dict of str to ndarray
        Calibration batches.
    ranges : Path
        Where the ranges of activations are kept from one trial to the next.
    quantized : OnnxFile or None
        The latest result.
    """

    def __init__(self, original: OnnxNetwork, feeds: Sequence[dict[str, np.ndarray]]):
        self.feeds = feeds
        self.external = original.file.external
        self.quantized: OnnxFile | None = None
        self._original = original
        self._folder = tempfile.TemporaryDirectory(prefix="bigdl-int8-", dir=scratch_home())
        self.ranges = Path(self._folder.name, "ranges.json")

    def __enter__(self) -> _QuantizationFiles:
        return self

    def __exit__(self, *exception) -> None:
        self._folder.cleanup()

    @cached_property
    def source(self) -> Path:
        path = Path(self._folder.name, "source.onnx")
        prepare_for_quantization(self._original.file.path, path)
        return path

    def rank(self, sample: dict[str, np.ndarray]) -> list[str]:
        """Quantized nodes, the most harmful one first."""
        feed = self.feeds[0] if self.feeds else sample
        return rank_nodes(self.source, cast("OnnxFile", self.quantized).path, feed)


def onnxruntime_methods(export: Export, wrap: Wrap) -> list[OnnxRuntimeMethod]:
    """Return the methods that run a framework's models in ONNX Runtime.

    Parameters
    ----------
    export, wrap : callable
        See :data:`Export` and :data:`Wrap`.
    """
    ends: dict[str, Any] = {"export": export, "wrap": wrap}
    return [
        OnnxRuntimeMethod("onnxruntime_fp32", option="onnxruntime", default=True, **ends),
        StaticMethod(
            "onnxruntime_int8_qlinear", option="inc + onnxruntime + qlinear", default=True, **ends
        ),
        DynamicMethod("onnxruntime_int8_integer", option="inc + onnxruntime + integer", **ends),
        NNCFMethod("onnxruntime_int8_nncf", option="onnxruntime + int8 + nncf", **ends),
    ]
