"""Keras models that run in OpenVINO or in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.nano.acceleration.arguments import refuse_inapplicable
from bigdl.nano.acceleration.onnx_facade import OnnxRuntimeFacade, check_outputs, threads_of
from bigdl.nano.acceleration.onnx_network import OnnxFile, OnnxNetwork
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.openvino.facade import OpenVINOFacade, saved_network, saved_properties
from bigdl.nano.tf.inference.accelerated import AcceleratedKerasModel
from bigdl.nano.tf.inference.source import KerasSource

__all__ = ["KerasONNXRuntimeModel", "KerasOpenVINOModel", "KerasQuantizedModel"]


class KerasOpenVINOModel(OpenVINOFacade, AcceleratedKerasModel):
    """A network of OpenVINO that is called as the user's model is; by any number of threads."""

    @classmethod
    def of(
        cls, source: KerasSource, network: Any, method: str, options: BuildOptions
    ) -> KerasOpenVINOModel:
        """The accelerated model of a source."""
        facts = {"method": method, "threads": options.threads}
        model = cls(source.inputs, source.outputs, **facts)
        vars(model)["ov_network"] = network
        original = getattr(source.model, "nano_source", None) or source.model
        return model.nano_attach(original)

    def nano_arrays_of(self, call: Any) -> list[np.ndarray]:
        return self.nano_inputs.arrays([call])

    def nano_result_of(self, results: list[np.ndarray]) -> Any:
        return self.nano_outputs.structure.rebuild(self._tensors(results))

    def save_to(self, directory: Path) -> dict:
        facts = {**self.nano_describe(), **self.nano_network_facts()}
        return {**facts, **self.nano_write_network(directory)}

    @classmethod
    def load_from(
        cls, directory: Path, meta: Mapping, *, model: Any, device: str | None, threads: int | None
    ) -> KerasOpenVINOModel:
        facts = cls.nano_facts_of(meta, threads)
        config, _ = saved_properties(meta)
        loaded = cls(**facts)
        vars(loaded)["ov_network"] = saved_network(
            directory, meta, device=device, threads=facts["threads"], config=config
        )
        return loaded.nano_attach(model)


class KerasQuantizedModel(KerasOpenVINOModel):
    """A network with 8-bit integers that the registry chose the runtime of, which is OpenVINO."""


class KerasONNXRuntimeModel(OnnxRuntimeFacade, AcceleratedKerasModel):
    """A network of ONNX Runtime that is called as the user's model is; by any number of threads."""

    @classmethod
    def of(
        cls, source: KerasSource, network: OnnxNetwork, method: str, options: BuildOptions
    ) -> KerasONNXRuntimeModel:
        """The accelerated model of a source."""
        check_outputs(network, len(source.outputs.ports), source.model)
        facts = {"method": method, "threads": threads_of(network, options)}
        model = cls(source.inputs, source.outputs, **facts)
        vars(model)["nano_network"] = network
        return model.nano_attach(source.model)

    def save_to(self, directory: Path) -> dict:
        self.nano_network.file.copy_to(directory)
        return {
            **self.nano_describe(),
            "onnx_path": OnnxFile.NAME,
            "onnx_inputs": self.nano_network.input_names,
        }

    @classmethod
    def load_from(
        cls, directory: Path, meta: Mapping, *, model: Any, device: str | None, threads: int | None
    ) -> KerasONNXRuntimeModel:
        refuse_inapplicable(meta.get("method") or "onnxruntime_fp32", {"device": (device, None)})
        facts = cls.nano_facts_of(meta, threads)
        file = OnnxFile.read(directory / meta["onnx_path"])
        loaded = cls(**facts)
        vars(loaded)["nano_network"] = OnnxNetwork(
            file, meta.get("onnx_inputs"), threads=facts["threads"]
        )
        return loaded.nano_attach(model)
