"""Methods that make one graph of a module: TorchScript, and TorchInductor with frozen weights.

Intel's extension of PyTorch has ended (its last version is for torch 2.8), and what it did is in
PyTorch itself now. A method whose name says ``ipex`` uses it only where the installed one is made
for the installed torch; else it compiles the graph with TorchInductor, weights frozen.
"""

from __future__ import annotations

import abc
import copy
import importlib.metadata
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.pytorch.inference.graph_model import (
    GraphModel,
    PytorchIPEXJITBF16Model,
    PytorchIPEXJITModel,
)
from bigdl.nano.pytorch.inference.graphs import (
    CompiledGraph,
    ModuleGraph,
    ScriptGraph,
    export_flat,
)
from bigdl.nano.pytorch.inference.source import FlatModule, TorchSource

__all__ = ["BF16_IPEX", "CHANNELS_LAST", "FP32_IPEX", "INDUCTOR", "JIT", "compiler_missing"]

_log = logging.getLogger("bigdl.nano")


def compiler_missing() -> str | None:
    """Why TorchInductor cannot work here; None if it can."""
    if shutil.which("g++") or shutil.which("clang++"):
        return None
    return "no C++ compiler is installed, which TorchInductor needs; install g++"


@dataclass(frozen=True)
class _GraphMethod(Method):
    """What the methods of this module share."""

    @property
    def model_class(self) -> type[GraphModel]:
        return PytorchIPEXJITBF16Model if self.precision == "bf16" else PytorchIPEXJITModel

    def build(self, source: TorchSource, options: BuildOptions) -> GraphModel:
        if self.ipex and _ipex_fits():
            graph = self._with_ipex(source, options)
        else:
            graph = self.graph(source, options)
        return self.model_class.of(graph, source, self, options)

    @abc.abstractmethod
    def graph(self, source: TorchSource, options: BuildOptions):
        """The graph of the source's module."""

    def prepared(self, source: TorchSource, options: BuildOptions) -> FlatModule:
        """A copy of the module, in this method's precision and layout."""
        module = source.model if options.inplace else copy.deepcopy(source.model)
        prepare = self.model_class.preparation(self.channels_last)
        return FlatModule(prepare(module.eval()), source.inputs).eval()

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Autocast, if this is a method in bf16."""
        bf16 = self.precision == "bf16"
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            yield

    def _with_ipex(self, source, options):
        import intel_extension_for_pytorch as ipex

        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        prepared = self.prepared(source, options)
        prepared.model = ipex.optimize(prepared.model, dtype=dtype)
        with self.lowered():
            if self.accelerator == "jit":
                return ScriptGraph.make(prepared, source.sample_tensors, "trace", False)
            return ModuleGraph(prepared, compiled=False)


@dataclass(frozen=True)
class LayoutMethod(_GraphMethod):
    """The module as it is, with its channels last."""

    def graph(self, source, options):
        return ModuleGraph(self.prepared(source, options), compiled=False)


@dataclass(frozen=True)
class ScriptMethod(_GraphMethod):
    """A frozen TorchScript."""

    def graph(self, source, options):
        with self.lowered():
            return ScriptGraph.make(
                self.prepared(source, options),
                source.sample_tensors,
                options.jit.method,
                options.jit.strict,
            )


@dataclass(frozen=True)
class InductorMethod(_GraphMethod):
    """A graph compiled ahead of time, its weights frozen into it.

    A module that cannot be exported as one graph, for example because its control flow depends on
    data, runs through ``torch.compile`` instead, which compiles the parts between.
    """

    arguments: tuple[str, ...] = ("dynamic_axes",)

    def missing(self) -> str | None:
        return super().missing() or compiler_missing()

    def graph(self, source, options):
        _say_once(self.name, self.ipex)
        # exporting needs no copy: weights become constants of the graph
        with source.flat_module() as module, self.lowered():
            try:
                program = export_flat(module, source.sample_tensors, options.dynamic_axes)
            except UsageError as error:
                _log.info("%s; its parts are compiled instead", error)
                return ModuleGraph(self.prepared(source, options), compiled=True)
            return CompiledGraph.compile(program, source.inputs.names)


@cache
def _ipex_fits() -> bool:
    """Whether an extension is installed that is made for this torch."""
    try:
        found = importlib.metadata.version("intel_extension_for_pytorch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return found.split(".")[:2] == torch.__version__.split(".")[:2]


_said: set[str] = set()


def _say_once(name: str, ipex: bool) -> None:
    if ipex and not _said:
        _said.add(name)
        _log.warning(
            "Intel's extension of PyTorch is not installed for torch %s; %s and the other methods "
            "with ipex in their names compile the graph with TorchInductor, weights frozen",
            torch.__version__,
            name,
        )


def _both_layouts(method: Method) -> list[Method]:
    """A method, and the same with channels last."""
    other = replace(
        method,
        name=f"{method.name}_channels_last",
        option=f"{method.option} + channels_last".removeprefix(" + "),
        channels_last=True,
    )
    return [method, other]


CHANNELS_LAST = _both_layouts(LayoutMethod("fp32"))[1:]
FP32_IPEX = _both_layouts(InductorMethod("fp32_ipex", option="ipex", ipex=True))
BF16_IPEX = _both_layouts(
    InductorMethod("bf16_ipex", precision="bf16", option="bf16 + ipex", ipex=True)
)
JIT = [
    *_both_layouts(ScriptMethod("jit_fp32", accelerator="jit", option="jit")),
    *_both_layouts(
        ScriptMethod("jit_bf16", accelerator="jit", precision="bf16", option="bf16 + jit")
    ),
    *_both_layouts(
        InductorMethod(
            "jit_fp32_ipex", accelerator="jit", option="ipex + jit", ipex=True, default=True
        )
    ),
    *_both_layouts(
        InductorMethod(
            "jit_bf16_ipex",
            accelerator="jit",
            precision="bf16",
            option="bf16 + ipex + jit",
            ipex=True,
            default=True,
        )
    ),
]
INDUCTOR = [
    InductorMethod("inductor_fp32", option="inductor"),
    InductorMethod("inductor_bf16", precision="bf16", option="bf16 + inductor"),
]
