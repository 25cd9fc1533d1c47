"""A Keras model whose layers compute in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.acceleration.structure import flatten
from bigdl.nano.tf.inference.accelerated import AcceleratedKerasModel
from bigdl.nano.tf.inference.calls import CallInputs, CallOutputs, plain
from bigdl.nano.tf.inference.source import KerasSource, inference_call
from bigdl.nano.tf.travel import packed, unpacked

__all__ = ["KerasBF16Model", "bf16_clone"]

_POLICY = "mixed_bfloat16"
_FILE = "saved_model.keras"


class KerasBF16Model(AcceleratedKerasModel):
    """A clone of the user's model under the policy ``mixed_bfloat16``, run as a graph.

    Weights are in float32, layers compute in bfloat16, and results have the original's types.
    """

    def __init__(self, clone: Any, inputs: CallInputs, outputs: CallOutputs, **keywords: Any):
        super().__init__(inputs, outputs, **keywords)
        vars(self)["nano_clone"] = clone
        vars(self)["nano_graph"] = _graph(clone, inputs, outputs)

    @classmethod
    def of(cls, source: KerasSource, method: str, options: BuildOptions) -> KerasBF16Model:
        """The accelerated model of a source."""
        clone = bf16_clone(source.model)
        model = cls(clone, source.inputs, source.outputs, method=method, threads=options.threads)
        return model.nano_attach(source.model)

    def nano_infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(result) for result in self.nano_graph(*arrays)]

    def save_to(self, directory: Path) -> dict:
        self.nano_clone.save(directory / _FILE)
        return {**self.nano_describe(), "checkpoint": _FILE}

    @classmethod
    def load_from(
        cls, directory: Path, meta: Mapping, *, model: Any, device: str | None, threads: int | None
    ) -> KerasBF16Model:
        clone = keras.saving.load_model(directory / meta["checkpoint"], compile=False)
        return cls(clone, **cls.nano_facts_of(meta, threads)).nano_attach(model)


def bf16_clone(model: Any) -> Any:
    """A copy of a model, with its weights, whose layers in float32 compute in bfloat16.

    Raises
    ------
    UsageError
        If Keras cannot rebuild the model from its configuration.
    """
    clone = unpacked(packed(model, compiled=False))
    policy = keras.dtype_policies.get(_POLICY)
    for layer in clone._flatten_layers():
        if getattr(layer.dtype_policy, "name", None) == "float32":
            layer.dtype_policy = policy
    return clone


def _graph(clone: Any, inputs: CallInputs, outputs: CallOutputs) -> Any:
    call = inference_call(clone)

    def flat(*tensors: Any) -> tuple:
        leaves, structure = flatten(plain(call(*inputs.pack(tensors))))
        if structure != outputs.structure:
            raise UsageError("The clone in bfloat16 gives a result that is nested in another way")
        pairs = zip(leaves, outputs.ports, strict=True)
        return tuple(tf.cast(leaf, port.dtype) for leaf, port in pairs)

    specs = [tf.TensorSpec(port.shape, port.dtype) for port in inputs.ports]
    return tf.function(flat, input_signature=specs, autograph=False)
