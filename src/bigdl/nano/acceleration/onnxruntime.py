"""ONNX Runtime for all frameworks: networks, facades of accelerated models, and methods.

A framework calls :func:`onnxruntime_methods` with its exporter and its model class.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.cpu import core_count, topology
from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.nano.acceleration.accuracy import keep_accuracy
from bigdl.nano.acceleration.agreement import check_agreement
from bigdl.nano.acceleration.method import BuildOptions, Method, ModelSource, refuse_inapplicable
from bigdl.nano.acceleration.onnx_quantization import (
    FloatGraph,
    Quantize,
    compress_weights,
    quantize_dynamically,
    quantize_statically,
    quantize_with_nncf,
)
from bigdl.nano.acceleration.onnx_quantization import OnnxFile as OnnxFile
from bigdl.nano.acceleration.precision import FP32, INT8, Precision
from bigdl.nano.acceleration.structure import cast_array
from bigdl.nano.acceleration.texts import as_strings

if TYPE_CHECKING:
    from types import ModuleType

    import onnxruntime


_NO_NEGATIVE = "bigdl.no_negative"
"""Metadata key of an ONNX file: names of inputs that must not be negative."""
# Session settings that are kept when a network is pickled.
_SETTINGS = (
    *("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "execution_mode"),
    *("execution_order", "graph_optimization_level", "inter_op_num_threads"),
    *("intra_op_num_threads", "log_severity_level", "use_deterministic_compute"),
)
_NUMBERS = re.compile(r"tensor\((float|float16|double|bool|u?int\d+)\)")
_BFLOAT16 = "tensor(bfloat16)"


class OnnxNetwork:
    """A thread-safe network in an ONNX Runtime inference session.

    Parameters
    ----------
    file : OnnxFile
    names : sequence of str, optional
        Input names in the order in which :meth:`infer` gets the arrays; the session's order by
        default. Inputs that the network does not use may be missing from the session.
    threads : int, optional
        Threads per call; by default one for each physical core that the process may use, within
        its CPU quota. ONNX Runtime's default would be all cores of the machine.
    session_options : onnxruntime.SessionOptions, optional
        Used unchanged if `threads` is None; otherwise their thread counts are set.

    Attributes
    ----------
    session : onnxruntime.InferenceSession
    options : onnxruntime.SessionOptions
        Options of the session.
    thread_num : int or None
        Requested number of threads, from `threads` or the session options.

    Raises
    ------
    UsageError
        If the session options have a wrong type, or ONNX Runtime cannot run the network.
    """

    def __init__(
        self,
        file: OnnxFile,
        names: Sequence[str] | None = None,
        *,
        threads: int | None = None,
        session_options: onnxruntime.SessionOptions | None = None,
    ):
        ort = require("onnxruntime", "nano")
        self.file = file
        self.options = _session_options(ort, threads, session_options)
        requested = threads is not None or session_options is not None
        self.thread_num = (self.options.intra_op_num_threads or None) if requested else None
        self._open(names)

    def _open(self, names: Sequence[str] | None) -> None:
        ort = require("onnxruntime", "nano")
        with as_usage_error(
            "ONNX Runtime cannot run the network", text=_reason, code="model-unsupported"
        ):
            self.session = ort.InferenceSession(
                str(self.file.path), self.options, providers=["CPUExecutionProvider"]
            )
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = 4  # exceptions already have the message
        ends = (*self.session.get_inputs(), *self.session.get_outputs())
        self._has_bfloat16 = any(port.type == _BFLOAT16 for port in ends)
        ports = {port.name: port_dtype(port) for port in self.session.get_inputs()}
        for port in self.session.get_outputs():
            port_dtype(port)
        self.input_names = list(ports) if names is None else list(names)
        recorded = self.session.get_modelmeta().custom_metadata_map.get(_NO_NEGATIVE, "")
        self._not_negative = {name for name in recorded.split("\n") if name}
        self._ports = [
            (position, name, ports[name])
            for position, name in enumerate(self.input_names)
            if name in ports
        ]

    def __deepcopy__(self, memo: Mapping) -> OnnxNetwork:
        return self  # immutable

    def __getstate__(self) -> dict[str, Any]:
        """Return the ONNX file and the session settings for pickling."""
        return {
            "file": self.file,
            "names": self.input_names,
            "thread_num": self.thread_num,
            "options": {name: getattr(self.options, name) for name in _SETTINGS},
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.file, self.thread_num = state["file"], state["thread_num"]
        self.options = require("onnxruntime", "nano").SessionOptions()
        for name, value in state["options"].items():
            setattr(self.options, name, value)
        self._open(state["names"])

    @property
    def output_names(self) -> list[str]:
        """Names of the arrays that :meth:`infer` returns."""
        return [port.name for port in self.session.get_outputs()]

    def forbid_negative(self, positions: Iterable[int]) -> None:
        """Make later calls reject negative integers in these inputs; record this in the ONNX file.

        ONNX counts a negative index from the end; the original framework may reject it.
        """
        names = {self.input_names[each] for each in positions} - self._not_negative
        if names:
            onnx = require("onnx", "nano")
            self._not_negative |= names
            text = "\n".join(sorted(self._not_negative))
            entry = onnx.StringStringEntryProto(key=_NO_NEGATIVE, value=text)
            # concatenated protocol buffers are merged
            with open(self.file.path, "ab") as file:
                file.write(onnx.ModelProto(metadata_props=[entry]).SerializeToString())

    def feed(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays by session input name, cast to the session's dtypes.

        A bfloat16 input is passed as float32, because NumPy lacks bfloat16.

        Raises
        ------
        UsageError
            If an array cannot be cast, e.g. from floats to integers, or has negative integers that
            the original model rejects.
        """
        for name in self._not_negative:
            array = arrays[self.input_names.index(name)]
            if array.size and array.min() < 0:
                raise UsageError(
                    f"Input {name!r} holds {array.min()}, but the original model takes no negative "
                    "integers there",
                    code="data-value",
                    argument=name,
                )
        return {
            name: _cast(array, dtype, name) if dtype.hasobject or array.dtype != dtype else array
            for position, name, dtype in self._ports
            for array in (arrays[position],)
        }

    def infer(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the network and return its outputs; the caller owns the arrays.

        Raises
        ------
        UsageError
            If an array does not fit the network.
        """
        feed = self.feed(arrays)
        # Measured: binding inputs and outputs costs more than the output copy that it saves.
        try:
            if self._has_bfloat16:
                return self._run_with_bfloat16(feed)
            return self.session.run(None, feed, self._run_options)
        except Exception as error:
            raise runtime_error(error) from error

    def _run_with_bfloat16(self, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run the session; convert between its bfloat16 tensors and NumPy's float32 arrays."""
        ort = require("onnxruntime", "nano")
        types = {port.name: port.type for port in self.session.get_inputs()}
        values = {
            name: _bfloat16_value(ort, array)
            if types[name] == _BFLOAT16
            else ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in feed.items()
        }
        results = self.session.run_with_ort_values(None, values, self._run_options)
        return [
            _floats(each) if each.data_type() == _BFLOAT16 else each.numpy() for each in results
        ]


def port_dtype(port: onnxruntime.NodeArg) -> np.dtype:
    """Return the NumPy dtype of a session's input or output.

    Strings have dtype object. bfloat16 is float32, because NumPy lacks bfloat16.

    Parameters
    ----------
    port : onnxruntime.NodeArg

    Raises
    ------
    UsageError
        If it is not a tensor (converted classifiers return maps), or NumPy lacks its dtype.
    """
    if port.type == "tensor(string)":
        return np.dtype(object)
    if port.type == _BFLOAT16:
        return np.dtype("float32")
    match = _NUMBERS.fullmatch(port.type)
    if match is None:
        advice = "; convert a classifier with zipmap=False" if "map(" in port.type else ""
        raise UsageError(
            f"{port.name!r} of the network is a {port.type}, which cannot be passed as an array; "
            f"inputs and outputs are tensors of numbers, booleans or texts{advice}",
            code="model-unsupported",
            argument=port.name,
        )
    return np.dtype({"float": "float32"}.get(match[1], match[1]))


def _bfloat16_value(ort: ModuleType, array: np.ndarray) -> onnxruntime.OrtValue:
    """Convert a float array to a bfloat16 OrtValue, rounding to nearest."""
    bfloat16 = require("ml_dtypes", "nano").bfloat16
    words = np.ascontiguousarray(array).astype(bfloat16).view("uint16")
    number = require("onnx", "nano").TensorProto.BFLOAT16
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(words, number)


def _floats(value: onnxruntime.OrtValue) -> np.ndarray:
    """Convert a bfloat16 OrtValue to a float32 array without loss."""
    shape = tuple(value.shape())
    count = math.prod(shape)
    if not count:
        return np.empty(shape, "float32")
    words = np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(value.data_ptr()))
    return (words.astype("uint32") << 16).view("float32").reshape(shape)


def runtime_error(error: Exception) -> Exception:
    """Convert an exception of ONNX Runtime to a UsageError if the input caused it."""
    text = _reason(error)
    if "invalid dimensions" in text or "Invalid rank" in text:
        return UsageError(
            f"The input has another shape than the network takes: {text}; give it in that shape, "
            "or convert the model again with a sample of this shape or other dynamic_axes",
            code="model-input",
        )
    if type(error).__module__.startswith("onnxruntime"):
        return UsageError(f"ONNX Runtime cannot compute this input: {text}", code="model-input")
    return error


def _reason(error: Exception) -> str:
    """Return an exception's message in one line without the error code."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return text.removesuffix(" Please fix either the inputs/outputs or the model.")


def _session_options(ort, threads: int | None, options: onnxruntime.SessionOptions | None):
    if options is not None and not isinstance(options, ort.SessionOptions):
        raise UsageError(
            "onnxruntime_session_options must be an onnxruntime.SessionOptions, not a "
            f"{type(options).__name__}",
            code="argument-type",
            argument="onnxruntime_session_options",
        )
    if options is None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors only: users cannot act on the optimizer's warnings
        options.intra_op_num_threads = min(len(topology().cores), core_count())
    if threads is not None:
        options.intra_op_num_threads = options.inter_op_num_threads = threads
    return options


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    if dtype.hasobject:
        return as_strings(array, name)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UsageError(
            f"Input {name!r} must be of type {dtype}, but it is of type {array.dtype}; convert it "
            "first",
            code="model-input",
            argument=name,
        )
    return cast_array(array, dtype, name)


class OnnxRuntimeFacade:
    """Mix-in for accelerated models that run in ONNX Runtime.

    Attributes
    ----------
    nano_network : OnnxNetwork
    """

    nano_network: OnnxNetwork
    nano_describe: Callable[[], dict[str, Any]]

    @property
    def ortsess(self) -> onnxruntime.InferenceSession:
        """The ``onnxruntime.InferenceSession``."""
        return self.nano_network.session

    @property
    def session_options(self) -> onnxruntime.SessionOptions:
        """The session's ``onnxruntime.SessionOptions``."""
        return self.nano_network.options

    def save_to(self, directory: Path, compression: str = "fp32") -> dict[str, Any]:
        """Write the network's file; return the metadata that :meth:`load_network` reads.

        With ``compression="bf16"``, large weights are stored in half the size.
        """
        file = self.nano_network.file
        if compression == "bf16":
            compress_weights(file.path, directory / file.NAME)
        else:
            file.copy_to(directory)
        threads = self.nano_network.thread_num
        return {
            **self.nano_describe(),
            "onnx_path": file.NAME,
            "onnx_inputs": self.nano_network.input_names,
            "intra_op_num_threads": threads,
            "inter_op_num_threads": threads,
            "compression": compression,
        }

    @classmethod
    def load_network(cls, directory: Path, meta: Mapping[str, Any], **options: Any) -> OnnxNetwork:
        """Load the network of a saved model.

        Parameters
        ----------
        directory : Path
        meta : mapping
            Metadata from :meth:`save_to`. Models saved by BigDL 2 have neither input names nor
            compression.
        **options
            Options of :meth:`OpenVINOFacade.load_network`; any value except the default is an
            error.
        """
        defaults = {"device": "CPU"} if options.get("device") else {}
        refused = {name: (value, defaults.get(name)) for name, value in options.items()}
        refuse_inapplicable(meta.get("method") or "onnxruntime_fp32", refused)
        threads = meta.get("intra_op_num_threads")
        file = OnnxFile.read(directory / meta["onnx_path"])
        return OnnxNetwork(file, meta.get("onnx_inputs"), threads=int(threads) if threads else None)


Export = Callable[[Any, str, BuildOptions], list[str]]
"""Exports a source's model to an ONNX file with flat inputs and outputs. Returns the input names in
order, including unused inputs that the file lacks."""
Wrap = Callable[[Any, OnnxNetwork, str, BuildOptions], Any]
"""Builds the accelerated model from a source, its network, the method's name and options."""


@dataclass(frozen=True)
class OnnxRuntimeMethod(Method[ModelSource]):
    """Method that runs a model in ONNX Runtime without quantizing it."""

    accelerator: str | None = "onnxruntime"
    export: Export = field(kw_only=True)
    wrap: Wrap = field(kw_only=True)

    def build(self, source: ModelSource, options: BuildOptions) -> object:
        return self.model_of(*self.exported(source, options), source, options)

    def exported(self, source: ModelSource, options: BuildOptions) -> tuple[OnnxFile, list[str]]:
        """Export the model of a source to ONNX; return the file and the input names."""
        file = OnnxFile()
        return file, self.export(source, str(file.path), options)

    def model_of(
        self, file: OnnxFile, names: list[str], source: ModelSource, options: BuildOptions
    ) -> object:
        """Build the accelerated model that runs an exported ONNX file."""
        network = OnnxNetwork(
            file,
            names,
            threads=options.thread_num,
            session_options=options.onnxruntime_session_options,
        )
        expected = len(source.outputs.paths(""))
        if len(network.output_names) != expected:
            raise UsageError(
                f"The network of {type(source.model).__name__} in ONNX has "
                f"{len(network.output_names)} outputs, but the model has {expected}",
                code="model-unsupported",
            )
        return self.wrap(source, network, self.name, options)


@dataclass(frozen=True)
class QuantizedOnnxRuntimeMethod(OnnxRuntimeMethod):
    """Method that runs a model in ONNX Runtime with 8-bit integers.

    With an accuracy goal, the nodes that introduce the largest errors stay in floating point.

    Attributes
    ----------
    quantize : callable
        See :data:`~bigdl.nano.acceleration.onnx_quantization.Quantize`.
    calibrates : bool
        True if it needs calibration data.
    """

    precision: Precision = INT8
    quantize: Quantize = field(kw_only=True)
    calibrates: bool = True

    def build(self, source: ModelSource, options: BuildOptions) -> object:
        original = OnnxNetwork(*self.exported(source, options))
        plain = replace(self, precision=FP32)
        model = self.wrap(source, original, self.name, options)
        check_agreement(source, model, plain, source.probes(options))
        batches = source.calibration_arrays(options) if self.calibrates else ()
        graph = FloatGraph(original.file, [original.feed(each) for each in batches])
        file = OnnxFile()

        def build(excluded: tuple[str, ...]) -> object:
            nonlocal file
            file = OnnxFile()
            try:
                self.quantize(graph, file.path, excluded)
            except Exception as error:
                with as_usage_error(
                    f"The network cannot be quantized by method {self.name!r}",
                    code="model-unsupported",
                    method=self.name,
                ):
                    raise runtime_error(error) from error
            return self.model_of(file, original.input_names, source, options)

        def rank() -> list[str]:
            feed = graph.feeds[0] if graph.feeds else original.feed(source.sample_arrays())
            return graph.rank(file.path, feed)

        return keep_accuracy(build, rank, options.goal, source.model)


def onnxruntime_methods(
    export: Export, wrap: Wrap, exporter: str, extra: str = "nano"
) -> list[OnnxRuntimeMethod]:
    """Return the ONNX Runtime methods of a framework.

    Parameters
    ----------
    export, wrap : callable
        See :data:`Export` and :data:`Wrap`.
    exporter : str
        The package that `export` needs.
    extra : str
        Extra of the distribution that installs all packages.
    """
    packages = ("onnx", "onnxruntime", exporter)
    common: dict[str, Any] = {"export": export, "wrap": wrap, "extra": extra}
    ends = {**common, "packages": packages}
    return [
        OnnxRuntimeMethod("onnxruntime_fp32", option="onnxruntime", default=True, **ends),
        QuantizedOnnxRuntimeMethod(
            "onnxruntime_int8_qlinear",
            option="inc + onnxruntime + qlinear",
            default=True,
            variants=(None, "qlinear"),
            quantize=quantize_statically,
            **ends,
        ),
        QuantizedOnnxRuntimeMethod(
            "onnxruntime_int8_integer",
            option="inc + onnxruntime + integer",
            variants=("integer",),
            dynamic=(None, "integer"),
            quantize=quantize_dynamically,
            calibrates=False,
            **ends,
        ),
        QuantizedOnnxRuntimeMethod(
            "onnxruntime_int8_nncf",
            option="onnxruntime + int8 + nncf",
            variants=("nncf",),
            packages=(*packages, "nncf"),
            quantize=quantize_with_nncf,
            extended=True,
            **common,
        ),
    ]
