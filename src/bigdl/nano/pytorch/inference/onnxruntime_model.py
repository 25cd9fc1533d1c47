"""A module of PyTorch that runs in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigdl.common.errors import require
from bigdl.nano.acceleration.onnx_facade import OnnxRuntimeFacade, check_outputs, threads_of
from bigdl.nano.acceleration.onnx_graph import compress_weights
from bigdl.nano.acceleration.onnx_network import OnnxFile, OnnxNetwork
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.pytorch.inference.accelerated import NetworkModel, ask_for_original
from bigdl.nano.pytorch.inference.export_onnx import onnx_names
from bigdl.nano.pytorch.inference.inputs import ForwardInputs
from bigdl.nano.pytorch.inference.routes import refuse_inapplicable
from bigdl.nano.pytorch.inference.source import TorchSource
from bigdl.nano.pytorch.inference.structure import Structure

__all__ = ["PytorchONNXRuntimeModel"]


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
    ) -> PytorchONNXRuntimeModel:
        """The accelerated model of a source."""
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
    ) -> PytorchONNXRuntimeModel:
        refuse_inapplicable(
            meta.get("method") or "onnxruntime_fp32",
            {"device": (device or "CPU", "CPU"), "cache_dir": (cache_dir, None),
             "shapes": (shapes, None)},
        )  # fmt: skip
        compressed = meta.get("compression") == "bf16"
        if compressed:
            # the file is complete, but programs of BigDL 2 count on being asked
            ask_for_original(model, input_sample)
        file = OnnxFile.read(directory / meta["onnx_path"])
        known = ForwardInputs.from_json(meta["inputs"]) if "inputs" in meta else None
        network = OnnxNetwork(
            file, known and onnx_names(known), session_options=_saved_options(meta)
        )
        described = cls.nano_facts_of(meta, network.input_names, network.output_count, directory)
        threads = meta.get("thread_num") or meta.get("intra_op_num_threads")
        described["threads"] = int(threads) if threads else None
        loaded = cls(network, **described).nano_attach(model)
        if compressed:
            _check(loaded, TorchSource(model, input_sample))
        return loaded


def _check(loaded: PytorchONNXRuntimeModel, source: TorchSource) -> None:
    """Refuse a sample, and with it an original, that is not of this network."""
    args, kwargs = source.arguments
    loaded(*args, **kwargs)


def _saved_options(meta: Mapping):
    """Session options with the thread counts of a saved model; None if it had none."""
    intra, inter = meta.get("intra_op_num_threads"), meta.get("inter_op_num_threads")
    if not intra:
        return None
    options = require("onnxruntime", "nano").SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads, options.inter_op_num_threads = int(intra), int(inter or 0)
    return options
