"""A flat module in a form that runs without the user's Python code, or with little of it.

Each form takes and gives flat lists of tensors, and is written to and read from a directory.
"""

from __future__ import annotations

import copy
import shutil
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bigdl.common.cpu import isa_flags
from bigdl.common.environment import scratch_directory
from bigdl.common.errors import UsageError, first_line
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.pytorch.inference.inputs import ForwardInputs
from bigdl.nano.pytorch.inference.source import FlatModule
from bigdl.nano.pytorch.inference.structure import flatten
from bigdl.nano.pytorch.inference.weights import load_weights, save_weights

__all__ = [
    "CompiledGraph",
    "ModuleGraph",
    "ScriptGraph",
    "export_flat",
    "graph_from",
]

# Instruction sets for which inductor writes code of its own.
_VECTOR_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def export_flat(
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    dynamic: bool | Mapping = True,
    names: Sequence[str] = (),
) -> torch.export.ExportedProgram:
    """Export a module of flat inputs.

    Parameters
    ----------
    module : FlatModule or GraphModule
    tensors : sequence of Tensor
        The sample.
    dynamic : bool or dict
        True: the first dimension of each input may change, where the model allows that. A dict
        names the dimensions of each input: ``{"x": {0: "batch", 2: "length"}}`` or
        ``{"x": [0, 2]}``.
    names : sequence of str
        Names of the inputs; a FlatModule knows them.

    Raises
    ------
    UsageError
        If the model cannot be exported, e.g. for control flow that depends on data.
    """
    flat = isinstance(module, FlatModule)
    names = module.input_names if flat else names
    axes = [_axes(name, tensor, dynamic) for name, tensor in zip(names, tensors, strict=True)]
    # The exporter takes a size of 1 for a constant, and the sample's strides for those of all.
    sample = tuple(_without_ones(tensor, each) for tensor, each in zip(tensors, axes, strict=True))
    shapes = tuple(dict.fromkeys(each, torch.export.Dim.AUTO) for each in axes)
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(module, sample, dynamic_shapes=(shapes,) if flat else shapes)
    except Exception as error:
        raise UsageError(
            f"{type(module.model if flat else module).__name__} cannot be exported as one graph: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


class CompiledGraph:
    """An exported graph that TorchInductor has compiled ahead of time, weights included.

    Sizes are checked and strides put right before each call: the compiled code looks at neither.

    Parameters
    ----------
    package : Path
        File that ``torch._inductor.aoti_compile_and_package`` wrote.
    shapes : list of list of int or None
        Of each input; None where any size is allowed.
    dtypes : list of str
        Of each input, e.g. ``"float32"``.
    """

    file = "compiled.pt2"

    def __init__(self, package: Path, shapes: list, dtypes: list[str], names: Sequence[str]):
        self._shapes = shapes
        self._dtypes = [getattr(torch, name) for name in dtypes]
        self._names = names
        self._package = package
        with quiet():
            self._run = torch._inductor.aoti_load_package(str(package), run_single_threaded=False)

    @classmethod
    def compile(cls, program: torch.export.ExportedProgram, names: Sequence[str]) -> CompiledGraph:
        """Compile an exported program; takes seconds to minutes, and a C++ compiler."""
        directory = scratch_directory("bigdl-inductor-")
        values = [
            node.meta["val"]
            for node in program.graph.nodes
            if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
        ]
        shapes = [[size if isinstance(size, int) else None for size in v.shape] for v in values]
        dtypes = [str(value.dtype).removeprefix("torch.") for value in values]
        try:
            with torch.no_grad(), quiet():
                package = torch._inductor.aoti_compile_and_package(
                    program,
                    package_path=str(directory / cls.file),
                    inductor_configs={"freezing": True},
                )
            graph = cls(Path(package), shapes, dtypes, names)
        except Exception as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise UsageError(
                f"The graph cannot be compiled: {type(error).__name__}: {first_line(error)}"
            ) from error
        weakref.finalize(graph, shutil.rmtree, directory, ignore_errors=True)
        return graph

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        checked = [
            _fitting(*each)
            for each in zip(tensors, self._shapes, self._dtypes, self._names, strict=True)
        ]
        return list(self._run(checked))

    def write(self, directory: Path) -> dict:
        """Write its file; returns what :meth:`read` needs."""
        shutil.copyfile(self._package, directory / self.file)
        return {
            "graph": "compiled",
            "package_path": self.file,
            "shapes": self._shapes,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self._dtypes],
            "isa": sorted(isa_flags().intersection(_VECTOR_SETS)),
        }

    @classmethod
    def read(cls, directory: Path, meta: Mapping, names: Sequence[str]) -> CompiledGraph:
        """Read what :meth:`write` wrote; raises UsageError on another kind of processor."""
        lacking = set(meta["isa"]).difference(isa_flags())
        if lacking:
            raise UsageError(
                f"The model was compiled for a processor with {', '.join(sorted(lacking))}, which "
                "this one does not have; accelerate the original model again here"
            )
        own = scratch_directory("bigdl-inductor-")
        package = own / cls.file
        shutil.copyfile(directory / meta["package_path"], package)  # outlives the directory
        graph = cls(package, meta["shapes"], meta["dtypes"], names)
        weakref.finalize(graph, shutil.rmtree, own, ignore_errors=True)
        return graph


class ScriptGraph:
    """A frozen TorchScript module.

    Parameters
    ----------
    script : torch.jit.ScriptModule
    inputs : ForwardInputs or None
        None if the script takes and gives flat tensors (it was traced); else it takes the
        arguments of the user's forward (it was scripted).
    """

    file = "ckpt.pth"

    def __init__(self, script: torch.jit.ScriptModule, inputs: ForwardInputs | None):
        self._script = script
        self._inputs = inputs

    @classmethod
    def make(
        cls, module: FlatModule, tensors: Sequence[torch.Tensor], method: str | None, strict: bool
    ) -> ScriptGraph:
        """Trace or script a module.

        Parameters
        ----------
        module : FlatModule
        tensors : sequence of Tensor
            The sample.
        method : {"trace", "script"} or None
            None traces, and scripts where a trace would have lost control flow.
        strict : bool
            Of ``torch.jit.trace``.

        Raises
        ------
        UsageError
            If the method is unknown, or the model cannot be converted so.
        """
        if method not in (None, "trace", "script"):
            raise UsageError(f"jit_method {method} is invalid.")
        if method == "trace":
            return cls(_traced(module, tensors, strict, lossy=True), None)
        if method == "script":
            return cls(_scripted(module.model), module.inputs)
        try:
            return cls(_traced(module, tensors, strict, lossy=False), None)
        except UsageError as untraceable:
            try:
                return cls(_scripted(module.model), module.inputs)
            except UsageError as error:
                raise UsageError(f"{untraceable}; {error}") from error

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._inputs is None:
            return list(self._script(*tensors))
        args, kwargs = self._inputs.unflatten(tensors)
        return flatten(self._script(*args, **kwargs))[0]

    def write(self, directory: Path) -> dict:
        """Write its file; returns what :meth:`read` needs."""
        with quiet():
            torch.jit.save(self._script, str(directory / self.file))
        return {"graph": "script", "checkpoint": self.file, "flat": self._inputs is None}

    @classmethod
    def read(cls, directory: Path, meta: Mapping, inputs: ForwardInputs) -> ScriptGraph:
        """Read what :meth:`write` wrote."""
        with quiet():
            script = torch.jit.load(str(directory / meta["checkpoint"]), map_location="cpu")
        return cls(script, None if meta["flat"] else inputs)


class ModuleGraph:
    """A module of Python, optionally through ``torch.compile``, which splits it where it has to.

    Parameters
    ----------
    module : FlatModule
        A copy of the user's.
    compiled : bool
    """

    file = "ckpt.pth"

    def __init__(self, module: FlatModule, compiled: bool):
        self._module = module
        self._compiled = compiled
        self._run: Callable = torch.compile(module, dynamic=None) if compiled else module

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._compiled:
            return list(self._run(*tensors))
        with torch._inductor.config.patch(freezing=True), torch.no_grad():
            return list(self._run(*tensors))

    def write(self, directory: Path, compression: str) -> dict:
        """Write its weights; returns what :meth:`read` needs."""
        save_weights(self._module.model, directory / self.file, compression)
        return {
            "graph": "module",
            "checkpoint": self.file,
            "compiled": self._compiled,
            "compression": compression,
        }

    @classmethod
    def read(cls, directory, meta, inputs, model, prepare: Callable, inplace=False) -> ModuleGraph:
        """Read what :meth:`write` wrote into a copy of the user's module."""
        if model is None:
            raise UsageError(
                "You must pass model when loading this model: its directory holds weights only"
            )
        copied = model if inplace else copy.deepcopy(model)
        load_weights(copied, directory / meta["checkpoint"])
        return cls(FlatModule(prepare(copied), inputs).eval(), meta["compiled"])


def _traced(module, tensors, strict, lossy: bool):
    try:
        with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            script = torch.jit.trace(module, tuple(tensors), strict=strict, check_trace=False)
            lost = [w for w in seen if issubclass(w.category, torch.jit.TracerWarning)]
            if not lost or lossy:
                return torch.jit.freeze(script.eval())
    except Exception as error:
        raise UsageError(
            f"{type(module.model).__name__} cannot be traced: {first_line(error)}"
        ) from error
    raise UsageError(
        f"A trace of {type(module.model).__name__} would lose its control flow: "
        f"{first_line(lost[0].message)}"
    )


def _scripted(model):
    try:
        with torch.no_grad(), quiet():
            return torch.jit.freeze(torch.jit.script(model).eval())
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} cannot be scripted: {first_line(error)}"
        ) from error


def _axes(name: str, tensor: torch.Tensor, dynamic: bool | Mapping) -> list[int]:
    if not dynamic or not tensor.ndim:
        return []
    if dynamic is True:
        return [0]
    axes = sorted(int(axis) for axis in dynamic.get(name, ()))
    if any(not 0 <= axis < tensor.ndim for axis in axes):
        raise UsageError(
            f"dynamic_axes names the axes {axes} of {name!r}, which has {tensor.ndim} dimensions"
        )
    return axes


def _without_ones(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    for axis in axes:
        if tensor.shape[axis] == 1:
            tensor = torch.cat([tensor, tensor], axis)
    return tensor.contiguous()


def _fitting(tensor, shape, dtype, name):
    if tensor.dtype is not dtype:
        if tensor.dtype.is_floating_point and not dtype.is_floating_point:
            raise UsageError(
                f"Input {name!r} must be of {dtype}, but it is of {tensor.dtype}; convert it"
            )
        tensor = tensor.to(dtype)
    sizes = tensor.shape
    if len(sizes) != len(shape) or any(
        wanted is not None and wanted != size for wanted, size in zip(shape, sizes, strict=True)
    ):
        wanted = [("any" if size is None else size) for size in shape]
        raise UsageError(
            f"Input {name!r} must have the shape {wanted}, but it has {list(sizes)}; give it in "
            "this shape, or convert the model with other dynamic_axes"
        )
    return tensor.contiguous()


def graph_from(directory, meta, inputs, **options) -> Any:
    """The graph that stands in a saved directory."""
    if meta.get("graph") == "compiled":
        return CompiledGraph.read(directory, meta, inputs.names)
    if meta.get("graph") == "script":
        return ScriptGraph.read(directory, meta, inputs)
    if meta.get("graph") == "module":
        return ModuleGraph.read(directory, meta, inputs, **options)
    raise UsageError(
        "The directory was written by another version of BigDL, whose compiled models cannot be "
        "read; accelerate the original model again"
    )
