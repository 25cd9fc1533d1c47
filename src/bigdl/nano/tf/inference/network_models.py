"""Keras models that run in OpenVINO or in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.arguments import refuse_inapplicable
from bigdl.nano.acceleration.onnx_network import OnnxFile, OnnxNetwork
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.openvino.network import SAVED_NAME, read_network, renamed_properties
from bigdl.nano.openvino.shaped import ShapedNetwork
from bigdl.nano.tf.inference.accelerated import AcceleratedKerasModel
from bigdl.nano.tf.inference.source import KerasSource

__all__ = ["KerasONNXRuntimeModel", "KerasOpenVINOModel", "KerasQuantizedModel"]


class KerasOpenVINOModel(AcceleratedKerasModel):
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

    @property
    def ov_model(self) -> Any:
        """The ``openvino.Model``."""
        return self.ov_network.network

    @property
    def additional_config(self) -> dict[str, Any]:
        """Properties of OpenVINO that were asked for, directly or by other arguments."""
        return dict(self.ov_network.additional_config)

    @property
    def final_config(self) -> dict[str, Any]:
        """All properties that the network was compiled with."""
        return dict(self.ov_network.final_config)

    def nano_infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return self.ov_network.infer(arrays)

    def reshape(self, shapes: Any) -> tuple[bool, str | None]:
        """Give the inputs other shapes; nothing is done if they have them.

        Parameters
        ----------
        shapes : str, mapping or sequence
            ``"x[1,224,224,3],y[?,4]"``, a mapping of names to shapes, one shape, or one for each
            input.

        Returns
        -------
        ok : bool
            Whether the inputs have these shapes now. If not, the model works as before.
        error : str or None
            Why not.
        """
        return self.ov_network.reshape(shapes)

    def async_predict(self, input_data: Iterable[Any], num_requests: int = 0) -> list:
        """Run the model on many inputs, several at a time.

        Parameters
        ----------
        input_data : iterable
            What ``model(x)`` takes, many times.
        num_requests : int
            Calls under way at the same time; 0 means the number that OpenVINO finds best.

        Returns
        -------
        list
            What the calls return, in order.
        """
        batches = (self.nano_inputs.arrays([each]) for each in input_data)
        results = self.ov_network.infer_many(batches, num_requests)
        return [self.nano_outputs.structure.rebuild(self._tensors(each)) for each in results]

    def save_to(self, directory: Path) -> dict:
        self.ov_network.save(directory)
        return {
            **self.nano_describe(),
            "config": {str(key): _plain(value) for key, value in self.additional_config.items()},
            "device": self.ov_network.device,
            "precision": self.ov_network.precision,
            "shapes": [str(port.partial_shape) for port in self.ov_model.inputs],
            "xml_path": f"{SAVED_NAME}.xml",
            "weight_path": f"{SAVED_NAME}.bin",
        }

    @classmethod
    def load_from(
        cls, directory: Path, meta: Mapping, *, model: Any, device: str | None, threads: int | None
    ) -> KerasOpenVINOModel:
        facts = cls.nano_facts_of(meta, threads)
        config = renamed_properties(meta.get("config") or {})
        for own in ("CACHE_DIR", "INFERENCE_NUM_THREADS"):
            config.pop(own, None)
        loaded = cls(**facts)
        vars(loaded)["ov_network"] = ShapedNetwork(
            read_network(directory / meta["xml_path"]),
            device or meta.get("device", "CPU"),
            precision=meta.get("precision", "fp32"),
            thread_num=facts["threads"],
            config=config,
            shapes=meta.get("shapes"),
        )
        return loaded.nano_attach(model)


class KerasQuantizedModel(KerasOpenVINOModel):
    """A network with 8-bit integers that the registry chose the runtime of, which is OpenVINO."""


class KerasONNXRuntimeModel(AcceleratedKerasModel):
    """A network of ONNX Runtime that is called as the user's model is; by any number of threads."""

    @classmethod
    def of(
        cls, source: KerasSource, network: OnnxNetwork, method: str, options: BuildOptions
    ) -> KerasONNXRuntimeModel:
        """The accelerated model of a source."""
        threads = options.threads
        if threads is None and options.onnx.session_options is not None:
            threads = network.options.intra_op_num_threads or None
        if network.output_count != len(source.outputs.ports):
            raise UsageError(
                f"The network of {type(source.model).__name__} in ONNX has "
                f"{network.output_count} outputs, but the model has {len(source.outputs.ports)}"
            )
        model = cls(source.inputs, source.outputs, method=method, threads=threads)
        vars(model)["nano_network"] = network
        return model.nano_attach(source.model)

    @property
    def ortsess(self) -> Any:
        """The ``onnxruntime.InferenceSession``."""
        return self.nano_network.session

    @property
    def session_options(self) -> Any:
        """The ``onnxruntime.SessionOptions`` that the session was made with."""
        return self.nano_network.options

    def nano_infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return self.nano_network.run(arrays)

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


def _plain(value: Any) -> Any:
    """A property of OpenVINO in the types of YAML."""
    if isinstance(value, bool | int | float | type(None)) or type(value) is str:
        return value
    return str(getattr(value, "name", value))
