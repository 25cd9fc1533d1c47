"""Modules of PyTorch that run in ONNX Runtime or OpenVINO."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.keywords import refuse_inapplicable
from bigdl.nano.acceleration.method import find_method
from bigdl.nano.acceleration.onnx_quantization import compress_weights
from bigdl.nano.acceleration.onnxruntime import (
    OnnxFile,
    OnnxNetwork,
    OnnxRuntimeFacade,
    check_outputs,
    threads_of,
)
from bigdl.nano.acceleration.options import BuildOptions, OpenVINOOptions
from bigdl.nano.acceleration.structure import Structure
from bigdl.nano.openvino.compiled import CompiledNetwork
from bigdl.nano.openvino.model import OpenVINOFacade, plain, saved_network, saved_properties
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    LoadOptions,
    NetworkModel,
    ask_for_original,
    load_weights,
    save_weights,
)
from bigdl.nano.pytorch.inference.export import onnx_names
from bigdl.nano.pytorch.inference.source import ForwardInputs, TorchSource

if TYPE_CHECKING:
    import torch

__all__ = ["PytorchONNXRuntimeModel", "PytorchOpenVINOModel"]


class PytorchONNXRuntimeModel(OnnxRuntimeFacade, NetworkModel):
    """A network of ONNX Runtime that is called as the user's module is.

    Any number of threads may call it.

    Parameters
    ----------
    network : OnnxNetwork
    inputs, outputs, output_tensors, method, threads
        As of :class:`NetworkModel`.
    """

    def __init__(
        self, network: OnnxNetwork, inputs: ForwardInputs, outputs: Structure, **keywords: Any
    ):
        super().__init__(inputs, outputs, **keywords)
        self.nano_network = network

    @classmethod
    def of(
        cls, source: TorchSource, network: OnnxNetwork, method: str, options: BuildOptions
    ) -> Self:
        """Return the accelerated model of a source."""
        check_outputs(network, len(source.outputs.paths("")), source.model)
        model = cls(
            network,
            source.inputs,
            source.outputs,
            output_tensors=options.output_tensors,
            method=method,
            threads=threads_of(network, options),
        )
        return model.nano_attach(source.model)

    def save_to(self, directory: Path, compression: str) -> dict:
        if compression == "bf16":
            compress_weights(self.nano_network.file.path, directory / OnnxFile.NAME)
        else:
            self.nano_network.file.copy_to(directory)
        given = self.thread_num is not None
        return {
            **self.nano_describe(),
            "onnx_path": OnnxFile.NAME,
            "intra_op_num_threads": self.session_options.intra_op_num_threads if given else None,
            "inter_op_num_threads": self.session_options.inter_op_num_threads if given else None,
            "compression": compression,
        }

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        refuse_inapplicable(
            meta.get("method") or "onnxruntime_fp32",
            {
                "device": (options.device or "CPU", "CPU"),
                "cache_dir": (options.cache_dir, None),
                "shapes": (options.shapes, None),
            },
        )
        compressed = meta.get("compression") == "bf16"
        if compressed:
            # the file is complete, but programs of BigDL 2 count on being asked
            ask_for_original(options)
        file = OnnxFile.read(directory / meta["onnx_path"])
        known = ForwardInputs.from_json(meta["inputs"]) if "inputs" in meta else None
        network = OnnxNetwork(
            file, onnx_names(known) if known else None, session_options=_saved_options(meta)
        )
        described = cls.nano_facts_of(meta, network.input_names, network.output_count, directory)
        threads = meta.get("thread_num") or meta.get("intra_op_num_threads")
        described["threads"] = int(threads) if threads else None
        loaded = cls(network, **described).nano_attach(options.model)
        if compressed:  # refuses a sample, and with it an original, that is not of this network
            args, kwargs = TorchSource(
                cast("torch.nn.Module", options.model), options.input_sample
            ).arguments
            loaded(*args, **kwargs)
        return loaded


def _saved_options(meta: Mapping):
    """Session options with the thread counts of a saved model; None if it had none."""
    intra, inter = meta.get("intra_op_num_threads"), meta.get("inter_op_num_threads")
    if not intra:
        return None
    options = require("onnxruntime", "nano").SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads, options.inter_op_num_threads = int(intra), int(inter or 0)
    return options


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
    ) -> Self:
        """Return the accelerated model of a source."""
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
        original = source.model
        return model.nano_attach(
            original.nano_source if isinstance(original, AcceleratedModel) else original
        )

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
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        config, threads = saved_properties(meta)
        if options.cache_dir is not None:
            config["CACHE_DIR"] = str(options.cache_dir)
        if meta.get("compression") == "bf16":
            return cls._converted_again(directory, meta, config, options)
        compiled = saved_network(
            directory,
            meta,
            device=options.device,
            threads=threads,
            config=config,
            shapes=options.shapes,
        )
        names, outputs = compiled.input_names, len(compiled.output_names)
        described = cls.nano_facts_of(meta, names, outputs, directory)
        described["threads"] = compiled.thread_num
        again = {key: meta[key] for key in ("dynamic_axes", "convert") if key in meta}
        return cls(compiled, **described, rebuilt_with=again).nano_attach(options.model)

    @staticmethod
    def _converted_again(
        directory: Path, meta: Mapping[str, Any], config: dict[str, Any], options: LoadOptions
    ) -> Any:
        """Convert the original again with the weights that were saved."""
        model, input_sample = ask_for_original(options)
        module = load_weights(copy.deepcopy(model), directory / meta["checkpoint"])
        method = find_method(meta.get("method") or "openvino_fp32")
        build_options = BuildOptions(
            threads=meta.get("thread_num"),
            dynamic_axes=meta.get("dynamic_axes", True),
            output_tensors=meta.get("output_tensors", True),
            openvino=OpenVINOOptions(
                options.device or meta.get("device", "CPU"), config, meta.get("convert") or {}
            ),
        )
        built = method.build(TorchSource(module, input_sample), build_options)
        if options.shapes is not None:
            reshaped, error = built.reshape(options.shapes)
            if not reshaped:
                raise UsageError(error)
        return built.nano_attach(model)


def _arguments(call: Any, inputs: ForwardInputs) -> tuple[tuple, dict]:
    """Arguments of one call."""
    if isinstance(call, Mapping) and set(call) <= set(inputs.parameters):
        return (), dict(call)
    if isinstance(call, tuple | list):
        return tuple(call), {}
    return (call,), {}
