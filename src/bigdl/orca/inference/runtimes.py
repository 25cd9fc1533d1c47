"""One copy of a model in one runtime: ``run(inputs) -> outputs``, lists of arrays."""

from __future__ import annotations

import contextlib
import copy
import io
import zipfile

import numpy as np

from bigdl.common.errors import UsageError, require

__all__ = ["OnnxCopy", "OpenVinoCopy", "TorchCopy", "read_model", "torch_module"]


class TorchCopy:
    """A module in eval mode."""

    def __init__(self, module):
        self._module = module

    @classmethod
    def of(cls, module) -> TorchCopy:
        """A copy of its own."""
        torch = require("torch", "orca")
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"A module of PyTorch is expected, got {type(module).__name__}")
        made = copy.deepcopy(module)
        with contextlib.suppress(NotImplementedError):  # an exported program has one mode only
            made.eval()
        return cls(made)

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        import torch

        with torch.inference_mode():
            found = self._module(*[torch.from_numpy(np.ascontiguousarray(a)) for a in inputs])
        if isinstance(found, dict):
            found = list(found.values())
        outputs = found if isinstance(found, list | tuple) else [found]
        return [each.numpy() for each in outputs]


class OnnxCopy:
    """A session of ONNX Runtime."""

    def __init__(self, data: bytes):
        runtime = require("onnxruntime", "nano")
        try:
            self._session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
        except Exception as error:  # of many classes
            raise UsageError(f"The ONNX model cannot be loaded: {error}") from error
        self._names = [each.name for each in self._session.get_inputs()]

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        _check_count(inputs, self._names)
        return self._session.run(None, dict(zip(self._names, inputs, strict=True)))


class OpenVinoCopy:
    """An infer request of a compiled model; the requests of one model share its weights."""

    def __init__(self, compiled):
        self._request = compiled.create_infer_request()
        self._names = [port.get_any_name() for port in compiled.inputs]
        self._outputs = list(compiled.outputs)

    @staticmethod
    def compiled(xml: bytes, weights: bytes, batch_size: int = 0):
        """Compile a model from the content of its two files."""
        openvino = require("openvino", "nano")
        core = openvino.Core()
        try:
            model = core.read_model(model=xml, weights=weights)
            if batch_size:
                model.reshape(
                    {
                        i: [batch_size, *list(p.partial_shape)[1:]]
                        for i, p in enumerate(model.inputs)
                    }
                )
            return core.compile_model(model, "CPU")
        except RuntimeError as error:
            raise UsageError(f"The OpenVINO model cannot be loaded: {error}") from error

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        _check_count(inputs, self._names)
        found = self._request.infer(dict(enumerate(inputs)))
        return [np.array(found[port]) for port in self._outputs]  # the request's own are reused


def _check_count(inputs, names):
    if len(inputs) != len(names):
        raise UsageError(
            f"The model has {len(names)} inputs ({', '.join(names)}), got {len(inputs)} arrays"
        )


def read_model(path: str) -> bytes:
    """The content of a model's file on a local path or fsspec URL."""
    fsspec = require("fsspec", "orca")
    try:
        with fsspec.open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"The model {path!r} cannot be read: {error}") from error


def torch_module(data: bytes, path: str, trust: bool):
    """The module in a file of PyTorch.

    Parameters
    ----------
    data : bytes
        A TorchScript archive, an exported program, or a pickled module.
    path : str
        What messages call the file.
    trust : bool
        Whether to read a pickled module or an exported program, which can run any code.
    """
    torch = require("torch", "orca")
    names = _entries(data)
    try:
        if "constants.pkl" in names:
            return torch.jit.load(io.BytesIO(data), map_location="cpu")
        if not trust:
            raise UsageError(
                f"{path!r} holds a pickled module or an exported program, and loading it can run "
                "any code; pass trust=True if you know where it comes from"
            )
        if names & {"serialized_exported_program.json", "model.json"}:
            return torch.export.load(io.BytesIO(data)).module()
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except UsageError:
        raise
    except Exception as error:  # a damaged file shows in many ways
        text = " ".join(str(error).split())
        raise UsageError(f"{path!r} is not a model that torch can load: {text}") from error
    if not isinstance(found, torch.nn.Module):
        raise UsageError(
            f"{path!r} holds a {type(found).__name__}, not a module; load its weights into a "
            "model and use load_module"
        )
    return found


def _entries(data: bytes) -> set[str]:
    """Names of the files in an archive, without their folders."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name.rpartition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile:
        return set()
