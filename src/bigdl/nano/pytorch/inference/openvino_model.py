"""A module of PyTorch that runs in OpenVINO."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.options import BuildOptions, OpenVINOOptions
from bigdl.nano.acceleration.registry import find_method
from bigdl.nano.openvino.compiled import CompiledNetwork
from bigdl.nano.openvino.facade import OpenVINOFacade, plain, saved_network, saved_properties
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    NetworkModel,
    ask_for_original,
)
from bigdl.nano.pytorch.inference.inputs import ForwardInputs
from bigdl.nano.pytorch.inference.source import TorchSource
from bigdl.nano.pytorch.inference.structure import Structure
from bigdl.nano.pytorch.inference.weights import load_weights, save_weights

__all__ = ["PytorchOpenVINOModel"]

_WEIGHTS = "saved_weight.pt"
# Methods whose weights are stored smaller already.
_SMALL = ("fp16", "int8")


class PytorchOpenVINOModel(OpenVINOFacade, NetworkModel):
    """A network of OpenVINO that is called as the user's module is.

    Any number of threads may call it.

    Parameters
    ----------
    network : CompiledNetwork
    inputs, outputs, output_tensors, method, threads
        As of :class:`NetworkModel`.
    rebuilt_with : mapping, optional
        What a loaded model has to be converted with again if only its weights are saved.
    """

    def __init__(
        self,
        network: CompiledNetwork,
        inputs: ForwardInputs,
        outputs: Structure,
        *,
        rebuilt_with: Mapping | None = None,
        **keywords: Any,
    ):
        super().__init__(inputs, outputs, **keywords)
        self.ov_network = network
        self.rebuilt_with = dict(rebuilt_with or {})

    @classmethod
    def of(
        cls, source: TorchSource, network: CompiledNetwork, method: str, options: BuildOptions
    ) -> PytorchOpenVINOModel:
        """The accelerated model of a source."""
        model = cls(
            network,
            source.inputs,
            source.outputs,
            output_tensors=options.output_tensors,
            method=method,
            threads=options.threads,
            rebuilt_with={
                "dynamic_axes": options.dynamic_axes,
                "convert": dict(options.openvino.convert),
            },
        )
        accelerated = isinstance(source.model, AcceleratedModel)
        return model.nano_attach(source.model.nano_source if accelerated else source.model)

    def nano_arrays_of(self, call: Any) -> list[np.ndarray]:
        return self.nano_to_arrays(*_arguments(call, self.nano_inputs))

    def nano_result_of(self, results: list[np.ndarray]) -> Any:
        return self.nano_from_arrays(results)

    def save_to(self, directory: Path, compression: str) -> dict:
        meta = {
            **self.nano_describe(),
            **self.nano_network_facts(),
            **plain(self.rebuilt_with),
        }
        if compression == "bf16" and self.ov_network.precision not in _SMALL:
            return {**meta, **self._save_weights(directory)}
        return {**meta, **self.nano_write_network(directory), "compression": "fp32"}

    def _save_weights(self, directory: Path) -> dict:
        if self.nano_source is None:
            raise UsageError(
                "compression='bf16' stores the weights of the original model, which is not there; "
                "pass model when loading, or save with compression='fp32'"
            )
        save_weights(self.nano_source, directory / _WEIGHTS, "bf16")
        return {"checkpoint": _WEIGHTS, "compression": "bf16"}

    @classmethod
    def load_from(
        cls,
        directory: Path,
        meta: Mapping,
        *,
        model=None,
        input_sample=None,
        device=None,
        cache_dir=None,
        shapes=None,
        **_,
    ) -> PytorchOpenVINOModel:
        config, threads = saved_properties(meta)
        if cache_dir is not None:
            config["CACHE_DIR"] = str(cache_dir)
        if meta.get("compression") == "bf16":
            return cls._rebuilt(directory, meta, model, input_sample, device, config, shapes)
        compiled = saved_network(
            directory, meta, device=device, threads=threads, config=config, shapes=shapes
        )
        names, outputs = compiled.input_names, len(compiled.output_names)
        described = cls.nano_facts_of(meta, names, outputs, directory)
        described["threads"] = compiled.thread_num
        again = {key: meta[key] for key in ("dynamic_axes", "convert") if key in meta}
        return cls(compiled, **described, rebuilt_with=again).nano_attach(model)

    @classmethod
    def _rebuilt(cls, directory, meta, model, input_sample, device, config, shapes):
        """Convert the original again with the weights that were saved."""
        ask_for_original(model, input_sample)
        module = load_weights(copy.deepcopy(model), directory / meta["checkpoint"])
        method = find_method(meta.get("method") or "openvino_fp32")
        options = BuildOptions(
            threads=meta.get("thread_num"),
            dynamic_axes=meta.get("dynamic_axes", True),
            output_tensors=meta.get("output_tensors", True),
            openvino=OpenVINOOptions(
                device or meta.get("device", "CPU"), config, meta.get("convert") or {}
            ),
        )
        built = method.build(TorchSource(module, input_sample), options)
        if shapes is not None:
            ok, error = built.reshape(shapes)
            if not ok:
                raise UsageError(error)
        return built.nano_attach(model)


def _arguments(given: Any, inputs: ForwardInputs) -> tuple[tuple, dict]:
    """Arguments of one call."""
    if isinstance(given, Mapping) and set(given) <= set(inputs.parameters):
        return (), dict(given)
    if isinstance(given, tuple | list) and not isinstance(given, torch.Tensor):
        return tuple(given), {}
    return (given,), {}
