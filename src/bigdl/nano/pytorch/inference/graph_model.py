"""Models that run as a graph of PyTorch: traced, scripted, or compiled."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.context import Settings
from bigdl.nano.pytorch.inference.graphs import graph_from
from bigdl.nano.pytorch.inference.inputs import ForwardInputs
from bigdl.nano.pytorch.inference.layout import apply_layouts, layouts_of, module_to_channels_last
from bigdl.nano.pytorch.inference.structure import Structure

__all__ = [
    "GraphModel",
    "PytorchIPEXJITBF16Model",
    "PytorchIPEXJITModel",
    "PytorchIPEXQuantizationModel",
    "PytorchJITINT8Model",
    "PytorchQuantizedModel",
]


class GraphModel(AcceleratedModel):
    """A graph of PyTorch behind the user's signature.

    Parameters
    ----------
    graph
        One of :mod:`~bigdl.nano.pytorch.inference.graphs`.
    inputs : ForwardInputs
    outputs : Structure
    method, threads
        As of :class:`AcceleratedModel`.
    channels_last : bool
        Whether 4-D and 5-D inputs are laid out with their channels last.
    use_ipex : bool
        Whether the method's name stands for Intel's extension of PyTorch.
    jit_strict, jit_method
        Of TorchScript.
    """

    bf16 = False

    def __init__(
        self,
        graph: Any,
        inputs: ForwardInputs,
        outputs: Structure,
        *,
        method: str | None = None,
        threads: int | None = None,
        channels_last: bool = False,
        layouts: list[str] | tuple = (),
        use_ipex: bool = False,
        jit_strict: bool = True,
        jit_method: str | None = None,
    ):
        super().__init__(method=method, threads=threads)
        self.nano_graph = graph
        self.nano_inputs = inputs
        self.nano_outputs = outputs
        self.channels_last = channels_last
        self.channels_last_available = list(layouts)
        self.use_ipex = use_ipex
        self.jit_strict = jit_strict
        self.jit_method = jit_method
        self.weights_prepack = None
        self.enable_onednn = False

    @classmethod
    def of(cls, graph, source, method, options) -> GraphModel:
        """The model of a method's graph."""
        return cls(
            graph,
            source.inputs,
            source.outputs,
            method=method.name,
            threads=options.threads,
            channels_last=method.channels_last,
            layouts=layouts_of(source.sample_tensors),
            use_ipex=method.ipex,
            jit_strict=options.jit.strict,
            jit_method=options.jit.method,
        ).nano_attach(source.model)

    @property
    def inference_settings(self) -> Settings:
        return Settings(threads=self.thread_num, bf16=self.bf16)

    def nano_run(self, args: tuple, kwargs: dict) -> Any:
        tensors = [torch.as_tensor(leaf) for leaf in self.nano_inputs.flatten(args, kwargs)]
        if self.channels_last:
            tensors = [apply_layouts(tensor) for tensor in tensors]
        lowered = self.bf16 and not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16) if lowered else nullcontext():
            results = self.nano_graph(tensors)
        if self.nano_outputs.kind == "tensor":
            return results[0]
        return self.nano_outputs.rebuild(results)

    def save_to(self, directory: Path, compression: str) -> dict:
        parts = {"compression": compression} if self.writes_weights else {}
        if compression != "fp32" and not parts:
            raise UsageError(
                f"compression={compression!r} does not apply to {type(self).__name__} of method "
                f"{self.nano_method!r}: its weights are part of a compiled graph; leave it out"
            )
        return {
            **self.nano_graph.write(directory, **parts),
            "inputs": self.nano_inputs.to_json(),
            "outputs": self.nano_outputs.to_json(),
            "method": self.nano_method,
            "thread_num": self.thread_num,
            "channels_last": self.channels_last,
            "channels_last_available": self.channels_last_available,
            "use_ipex": self.use_ipex,
            "jit_strict": self.jit_strict,
            "jit_method": self.jit_method,
        }

    @property
    def writes_weights(self) -> bool:
        """Whether its directory holds weights only."""
        from bigdl.nano.pytorch.inference.graphs import ModuleGraph

        return isinstance(self.nano_graph, ModuleGraph)

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping, *, model=None, inplace=False, **_):
        if "inputs" not in meta:
            raise UsageError(
                "The directory was written by BigDL 2, whose compiled models cannot be read; "
                "accelerate the original model again"
            )
        inputs = ForwardInputs.from_json(meta["inputs"])
        options = {}
        if meta["graph"] == "module":
            prepare = cls.preparation(meta["channels_last"])
            options = {"model": model, "inplace": inplace, "prepare": prepare}
        return cls(
            graph_from(directory, meta, inputs, **options),
            inputs,
            Structure.from_json(meta["outputs"]),
            method=meta["method"],
            threads=meta["thread_num"],
            channels_last=meta["channels_last"],
            layouts=meta["channels_last_available"],
            use_ipex=meta["use_ipex"],
            jit_strict=meta["jit_strict"],
            jit_method=meta["jit_method"],
        ).nano_attach(model)

    @classmethod
    def preparation(cls, channels_last: bool):
        """What is done to a copy of the user's module before it becomes a graph."""
        return module_to_channels_last if channels_last else _unchanged


class PytorchIPEXJITModel(GraphModel):
    """A graph in fp32."""


class PytorchIPEXJITBF16Model(GraphModel):
    """A graph that runs in bfloat16 where autocast deems that safe."""

    bf16 = True

    @classmethod
    def preparation(cls, channels_last: bool):
        from bigdl.nano.pytorch.methods.eager import BF16Model

        return lambda module: BF16Model.convert(module, channels_last=channels_last).nano_module


class PytorchQuantizedModel(GraphModel):
    """A graph in int8."""


class PytorchIPEXQuantizationModel(PytorchQuantizedModel):
    """A graph in int8 that was asked for with ``method="ipex"``."""


class PytorchJITINT8Model(PytorchQuantizedModel):
    """A graph in int8 that was asked for with ``accelerator="jit"``."""


def _unchanged(module: torch.nn.Module) -> torch.nn.Module:
    return module
