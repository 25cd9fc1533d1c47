"""A module of PyTorch that runs in OpenVINO."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.options import BuildOptions, OpenVINOOptions
from bigdl.nano.acceleration.registry import find_method
from bigdl.nano.openvino.compiled import CompiledNetwork
from bigdl.nano.openvino.network import SAVED_NAME, read_network, renamed_properties
from bigdl.nano.openvino.shaped import ShapedNetwork
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


class PytorchOpenVINOModel(NetworkModel):
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

    @property
    def ov_model(self):
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

    def nano_infer(self, arrays: list) -> list:
        return self.ov_network.infer(arrays)

    def reshape(self, shapes: Any) -> tuple[bool, str | None]:
        """Give the inputs other shapes; nothing is done if they have them.

        Parameters
        ----------
        shapes : str, mapping or sequence
            ``"x[1,3,224,224],y[?,4]"``, a mapping of names to shapes, one shape, or a shape for
            each input. ``?`` or -1 stands for any size, ``1..8`` for a range.

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
            Inputs of one call each: a tensor or array, a tuple or list of arguments, or a dict of
            keyword arguments.
        num_requests : int
            Calls under way at the same time; 0 means the number that OpenVINO finds best. More
            than one gains with ``openvino_config={"PERFORMANCE_HINT": "THROUGHPUT"}``.

        Returns
        -------
        list
            What the calls return, in order.

        Raises
        ------
        UsageError
            If the inputs of one call do not fit.
        """
        batches = (self.nano_to_arrays(*_arguments(each, self.nano_inputs)) for each in input_data)
        results = self.ov_network.infer_many(batches, num_requests)
        return [self.nano_from_arrays(each) for each in results]

    def save_to(self, directory: Path, compression: str) -> dict:
        meta = {
            **self.nano_describe(),
            "config": {str(key): _plain(value) for key, value in self.additional_config.items()},
            "device": self.ov_network.device,
            "precision": self.ov_network.precision,
            **_plain(self.rebuilt_with),
        }
        if compression == "bf16" and self.ov_network.precision not in _SMALL:
            return {**meta, **self._save_weights(directory)}
        self.ov_network.save(directory)
        shapes = [str(port.partial_shape) for port in self.ov_model.inputs]
        files = {"xml_path": f"{SAVED_NAME}.xml", "weight_path": f"{SAVED_NAME}.bin"}
        return {**meta, **files, "shapes": shapes, "compression": "fp32"}

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
        config = renamed_properties(meta.get("config") or {})
        config.pop("CACHE_DIR", None)  # where it was saved, which may not be here
        threads = meta.get("thread_num") or config.get("INFERENCE_NUM_THREADS")
        config.pop("INFERENCE_NUM_THREADS", None)
        if cache_dir is not None:
            config["CACHE_DIR"] = str(cache_dir)
        device = device or meta.get("device", "CPU")
        if meta.get("compression") == "bf16":
            return cls._rebuilt(directory, meta, model, input_sample, device, config, shapes)
        compiled = ShapedNetwork(
            read_network(directory / meta["xml_path"]),
            device,
            precision=meta.get("precision", "fp32"),
            thread_num=int(threads) if threads else None,
            config=config,
            shapes=shapes if shapes is not None else meta.get("shapes"),
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
            openvino=OpenVINOOptions(device, config, meta.get("convert") or {}),
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


def _plain(value: Any) -> Any:
    """A value in the types of YAML."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, int) else str(key): _plain(each) for key, each in value.items()
        }
    if isinstance(value, bool | int | float | type(None)) or type(value) is str:
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(getattr(value, "name", value))
