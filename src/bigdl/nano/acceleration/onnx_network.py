"""An ONNX file in a session of ONNX Runtime: lists of arrays in, lists of arrays out.

This is the part that every accelerated model in ONNX Runtime stands on, whatever framework it came
from. It knows no framework itself.
"""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.cpu import core_count, topology
from bigdl.common.environment import scratch_directory
from bigdl.common.errors import UsageError, require

__all__ = ["OnnxFile", "OnnxNetwork", "runtime_error"]

_TYPES = {
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
        """Whether the weights are in a file of their own."""
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
    """What to raise for an exception of ONNX Runtime: a UsageError where the input is at fault."""
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
