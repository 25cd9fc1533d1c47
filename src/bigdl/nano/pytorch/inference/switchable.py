"""A model that is switched between PyTorch and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.source import TorchSource

__all__ = ["SwitchableModel"]


class SwitchableModel(torch.nn.Module):
    """The user's module, and its quantized form in ONNX Runtime.

    It starts as the user's module, which it trains and evaluates as ever.

    Parameters
    ----------
    model : Module
    quantized : AcceleratedModel
    source : TorchSource, optional
        The module with what it was quantized with, of which a sample of the input is taken.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        quantized: AcceleratedModel,
        source: TorchSource | None = None,
    ):
        super().__init__()
        self.model = model
        self.__dict__["_quantized"] = quantized
        self.__dict__["_sample"] = (
            source.arguments if source is not None and source.has_sample else None
        )
        self.__dict__["_plain"] = None
        self.__dict__["_active"] = None
        self.training = model.training

    def eval_onnx(self, input_sample: Any = None, quantize: bool = False, **kwargs: Any):
        """Evaluate in ONNX Runtime from now on.

        Parameters
        ----------
        input_sample : optional
            A sample of the input for ``quantize=False``; by default the one that the model was
            quantized with: the sample given then, the model's ``example_input_array``, or the
            first batch of the calibration data.
        quantize : bool
            The quantized graph, or the one in fp32, which is made at the first time.
        **kwargs
            Of ``InferenceOptimizer.trace``.

        Returns
        -------
        SwitchableModel
            Itself.
        """
        if quantize:
            if kwargs:
                raise UsageError(
                    f"{', '.join(map(repr, kwargs))} does not apply to quantize=True, whose graph "
                    "is there already; leave it out"
                )
            self.__dict__["_active"] = self._quantized
        else:
            if self._plain is None or input_sample is not None or kwargs:
                self.__dict__["_plain"] = self._traced(input_sample, kwargs)
            self.__dict__["_active"] = self._plain
        super().train(False)
        return self

    def exit_onnx(self):
        """Evaluate in PyTorch again; returns itself."""
        self.__dict__["_active"] = None
        return self

    def train(self, mode: bool = True):
        """Training mode goes back to PyTorch."""
        if mode:
            self.exit_onnx()
        return super().train(mode)

    def forward(self, *args, **kwargs):
        """The model's output in the runtime that was chosen last."""
        return (self._active or self.model)(*args, **kwargs)

    def _traced(self, sample, kwargs) -> torch.nn.Module:
        from bigdl.nano.pytorch.inference.optimizer import InferenceOptimizer

        if sample is None and self._sample is not None:
            sample, named = self._sample
            kwargs = {"example_kwarg_inputs": named or None, **kwargs}
        return InferenceOptimizer.trace(self.model, sample, accelerator="onnxruntime", **kwargs)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)
