"""Model copies for PyTorch, ONNX Runtime, OpenVINO and Nano, as functions on lists of arrays."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.common.private_folders import scratch_folder
from bigdl.common.trust import untrusted
from bigdl.orca.data.file import read_bytes

if TYPE_CHECKING:
    import torch

Copy = Callable[[list[np.ndarray]], list[np.ndarray]]


def torch_copy(module: Callable[..., Any]) -> Copy:
    """Return a function that runs a module's forward pass on numpy arrays."""

    def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
        import torch

        with torch.inference_mode():
            outputs = module(*[torch.from_numpy(np.ascontiguousarray(a)) for a in inputs])
        # NumPy has no bfloat16
        return [(x.float() if x.dtype is torch.bfloat16 else x).numpy() for x in _listed(outputs)]

    return run


def _listed(outputs: object) -> list:
    """Return a model's outputs as a list."""
    if isinstance(outputs, dict):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def network_copies(count: int, run: Copy, names: Sequence[str]) -> list[Copy]:
    """Return `count` references to one network; its runtime allows concurrent calls.

    Parameters
    ----------
    count : int
    run : callable
        Runs the network; it must return new arrays for every call.
    names : sequence of str
        Names of the inputs.
    """

    def checked(inputs: list[np.ndarray]) -> list[np.ndarray]:
        if len(inputs) != len(names):
            raise UsageError(
                f"The model has {len(names)} inputs ({', '.join(names)}), got {len(inputs)} arrays",
                code="model-input",
                columns=names,
            )
        return run(inputs)

    return [checked] * count


def module_copies(count: int, module: torch.nn.Module, *, threads: int | None = None) -> list[Copy]:
    """Return functions that run `count` deep copies of a module with the process's threads."""
    check_module(module)
    copies = [copy.deepcopy(module) for _ in range(count)]
    for each in copies:
        with contextlib.suppress(NotImplementedError):  # an exported program has one mode only
            each.eval()
    return [torch_copy(each) for each in copies]


def check_module(module: object) -> None:
    """Raise a UsageError if an object is not a PyTorch module."""
    torch = require("torch", "orca")
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"Expected a PyTorch module, got {type(module).__name__}", code="model-type"
        )


def file_copies(
    count: int, data: bytes, path: str, trust: bool, *, threads: int | None = None
) -> list[Copy]:
    """Return copies of the module in a PyTorch file, see :func:`torch_module`."""
    return module_copies(count, torch_module(data, path, trust))


def onnx_copies(count: int, data: bytes, *, threads: int | None = None) -> list[Copy]:
    """Load the content of an ONNX file in ONNX Runtime; its copies share one session."""
    require("onnxruntime", "nano")
    from bigdl.nano.acceleration.onnxruntime import OnnxFile, OnnxNetwork

    file = OnnxFile()
    file.path.write_bytes(data)
    network = OnnxNetwork(file, threads=threads)
    return network_copies(count, network.infer, network.input_names)


def openvino_copies(
    count: int, xml: bytes, weights: bytes, batch_size: int = 0, *, threads: int | None = None
) -> list[Copy]:
    """Compile an OpenVINO network from its two files' content; all copies share the network."""
    require("openvino", "nano")
    from bigdl.nano.openvino import CompiledNetwork
    from bigdl.nano.openvino.network import read_network

    network = read_network((xml, weights))
    shapes = {
        position: [batch_size, *list(port.partial_shape)[1:]]
        for position, port in enumerate(network.inputs)
        if batch_size
    }
    compiled = CompiledNetwork(network, shapes=shapes or None, thread_num=threads)
    compiled.expect_callers(count)
    return network_copies(count, compiled.infer, compiled.input_names)


def nano_copies(
    count: int,
    files: Mapping[str, bytes],
    module: torch.nn.Module | None,
    trust: bool,
    *,
    threads: int | None = None,
) -> list:
    """Load the files that ``InferenceOptimizer.save`` wrote, as copies of the model.

    Threads share a network of another runtime, so its copies are one object. PyTorch graphs use the
    threads of the process: concurrent calls must not change and restore that setting.
    """
    from bigdl.nano.openvino import CompiledNetwork
    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.nano.pytorch.inference.accelerated import NetworkModel

    def load():
        opened = {name: io.BytesIO(content) for name, content in files.items()}
        return InferenceOptimizer.load(opened, module, thread_num=threads, trust=trust).eval()

    model = load()
    if isinstance(model, NetworkModel):
        if isinstance(model.nano_network, CompiledNetwork):
            model.nano_network.expect_callers(count)
        model.output_tensors = False
        run = model.nano_run  # accepts arrays as well as tensors
        return network_copies(
            count, lambda inputs: _listed(run(tuple(inputs), {})), model.forward_args
        )
    models = [model, *(load() for _ in range(count - 1))]
    for each in models:
        each.thread_num = None
    return [torch_copy(each) for each in models]


def accelerated_model(
    model: torch.nn.Module, method: str, batches: Sequence[tuple], threads: int | None
) -> torch.nn.Module:
    """Convert a module with a Nano acceleration method.

    Parameters
    ----------
    model : torch.nn.Module
    method : str
    batches : sequence of tuple
        Model arguments: the first batch is used for conversion, all batches for int8 calibration.
    threads : int, optional
    """
    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.nano.pytorch.inference.methods import METHODS

    options: dict[str, Any] = {}
    if METHODS[method].precision.needs_calibration:
        options = {"calib_data": batches, "sample_size": sum(len(batch[0]) for batch in batches)}
    return InferenceOptimizer.build(
        model, method, input_sample=batches[0], thread_num=threads, **options
    )


def saved_files(accelerated: torch.nn.Module) -> dict[str, bytes]:
    """Return the files that ``InferenceOptimizer.save`` writes for a model, by name."""
    from bigdl.nano.pytorch import InferenceOptimizer

    with scratch_folder("accelerated") as folder:
        directory = Path(folder, "model")
        InferenceOptimizer.save(accelerated, directory)
        return nano_files(directory)


def nano_files(path: str | os.PathLike) -> dict[str, bytes]:
    """Read the files of a directory that ``InferenceOptimizer.save`` wrote, by name."""
    from bigdl.nano.acceleration.saved import META_FILE

    directory = Path(path)
    if not (directory / META_FILE).exists():
        raise UsageError(
            f"{str(path)!r} does not hold a model that InferenceOptimizer.save wrote: it has no "
            f"{META_FILE}",
            code="path-missing",
            path=str(path),
        )
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.is_file()}


def read_openvino(path: str, weight_path: str | None = None) -> tuple[bytes, bytes]:
    """Read a network's ``.xml`` and ``.bin`` files; the ``.bin`` defaults to the same base name."""
    weight_path = weight_path or str(path).removesuffix(".xml") + ".bin"
    return read_model(str(path)), read_model(weight_path)


def read_model(path: str) -> bytes:
    """Read a model file from a local path or fsspec URL."""
    try:
        return read_bytes(path)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"The model {path!r} cannot be read: {error}", code="file-damaged", path=path
        ) from error


def torch_module(data: bytes, path: str, trust: bool):
    """Load a module from the content of a PyTorch file.

    Parameters
    ----------
    data : bytes
        A TorchScript archive, an exported program, or a pickled module.
    path : str
        Name of the file in error messages.
    trust : bool
        Whether to load it: each of these formats can run arbitrary code.
    """
    torch = require("torch", "orca")
    names: set[str] = set()
    if data and not trust:
        raise untrusted(path, "a TorchScript program, an exported program or a pickled module")
    failure = f"{path!r} is not a model that torch can load"
    # a damaged file raises many types of errors
    with as_usage_error(
        failure, text=lambda error: " ".join(str(error).split()), code="file-damaged", path=path
    ):
        if zipfile.is_zipfile(io.BytesIO(data)):
            paths = zipfile.ZipFile(io.BytesIO(data)).namelist()
            names = {each.rpartition("/")[2] for each in paths}
        if "constants.pkl" in names:
            return torch.jit.load(io.BytesIO(data), map_location="cpu")
        if names & {"serialized_exported_program.json", "model.json"}:
            return torch.export.load(io.BytesIO(data)).module()
        module = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"{path!r} holds a {type(module).__name__}, not a module; load its weights into a "
            "model and use load_module",
            code="model-type",
            path=path,
        )
    return module
