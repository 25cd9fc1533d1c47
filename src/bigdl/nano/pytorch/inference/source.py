"""A user's module together with a sample of its input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch

from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.pytorch.inference.batches import batches_of, rows_of
from bigdl.nano.pytorch.inference.inputs import ForwardInputs, sample_arguments
from bigdl.nano.pytorch.inference.structure import Structure, flatten

__all__ = ["FlatModule", "TorchSource", "evaluating"]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model in evaluation mode and without gradients; each part is as before afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield model
    finally:
        for module, training in before:
            module.training = training


class FlatModule(torch.nn.Module):
    """A module that takes and gives flat lists of tensors: what is exported to other runtimes.

    Parameters
    ----------
    model : Module
    inputs : ForwardInputs
    """

    def __init__(self, model: torch.nn.Module, inputs: ForwardInputs):
        super().__init__()
        self.model = model
        self.inputs = inputs

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return self.inputs.names

    def forward(self, *tensors):
        args, kwargs = self.inputs.unflatten(tensors)
        return tuple(flatten(self.model(*args, **kwargs))[0])


class TorchSource:
    """A module and a sample, as methods see them.

    Parameters
    ----------
    model : Module
        Not changed.
    sample : Tensor, tuple, list or dict, optional
        By default the first batch of `data`, or the model's ``example_input_array``.
    example_kwargs : mapping, optional
        Further keyword arguments of the sample.
    data : optional
        Calibration data.

    Raises
    ------
    UsageError
        If something other than a module is given; later, where a sample is needed, if there is
        none or it does not fit the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Any = None,
        example_kwargs: Mapping | None = None,
        data: Any = None,
    ):
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"A torch.nn.Module is needed, but a {type(model).__name__} was given")
        self.model = model
        self._sample = sample
        self._example_kwargs = example_kwargs
        self._data = data

    @property
    def has_sample(self) -> bool:
        """Whether there is anything that a sample can be taken from."""
        return (
            self._sample is not None
            or self._data is not None
            or getattr(self.model, "example_input_array", None) is not None
        )

    @cached_property
    def arguments(self) -> tuple[tuple, dict]:
        """``args, kwargs`` of the sample."""
        sample = self._sample
        if sample is None:
            sample = getattr(self.model, "example_input_array", None)
        if sample is None and self._data is not None:
            batch = next(batches_of(self.model, self._data), None)
            if batch is None:
                raise UsageError("The data hold no batch, so there is no sample of the input")
            return batch.args, {**batch.kwargs, **(self._example_kwargs or {})}
        if sample is None:
            raise UsageError(
                f"A sample of the input of {type(self.model).__name__} is needed; pass input_sample"
            )
        return sample_arguments(self.model, sample, self._example_kwargs)

    @cached_property
    def inputs(self) -> ForwardInputs:
        """The network's inputs."""
        known = getattr(self.model, "nano_inputs", None)
        if isinstance(known, ForwardInputs):  # a model in another runtime
            return known
        return ForwardInputs.of(self.model, *self.arguments)

    @cached_property
    def outputs(self) -> Structure:
        """What the model's result looks like; the model is run once on the sample.

        Raises
        ------
        UsageError
            If it does not run, or gives no tensor.
        """
        known = getattr(self.model, "nano_outputs", None)
        if isinstance(known, Structure):  # a model in another runtime
            return known
        args, kwargs = self.arguments
        kind = type(self.model).__name__
        try:
            with evaluating(self.model):
                leaves, structure = flatten(self.model(*args, **kwargs))
        except Exception as error:
            raise UsageError(
                f"{kind} fails on the sample of its input: {one_line(error)}; pass another "
                "input_sample"
            ) from error
        if not leaves:
            raise UsageError(f"{kind} returns no tensor for the sample, so it cannot be converted")
        return structure

    @cached_property
    def sample_tensors(self) -> list[torch.Tensor]:
        """The sample as a flat list of tensors."""
        leaves = self.inputs.flatten(*self.arguments)
        return [torch.as_tensor(leaf) for leaf in leaves]

    def sample_arrays(self) -> list[np.ndarray]:
        """The sample as a flat list of ndarrays."""
        return [tensor.detach().cpu().numpy() for tensor in self.sample_tensors]

    @contextmanager
    def flat_module(self) -> Iterator[FlatModule]:
        """The model with flat inputs and outputs, in evaluation mode inside the context."""
        with evaluating(self.model):
            yield FlatModule(self.model, self.inputs).eval()

    def calibration_tensors(self, options: BuildOptions) -> Iterator[list[torch.Tensor]]:
        """Flat lists of tensors of the calibration data, as many batches as hold its sample size.

        Raises
        ------
        UsageError
            If there are no calibration data.
        """
        calibration = options.calibration
        data = calibration.data if calibration.data is not None else self._data
        if data is None:
            raise UsageError(
                "Calibration data are needed to quantize to int8; pass calib_data, a DataLoader or "
                "a batch of the model's input"
            )
        rows = 0
        for batch in batches_of(self.model, data, self.inputs):
            yield [torch.as_tensor(x) for x in self.inputs.flatten(batch.args, batch.kwargs)]
            rows += rows_of(batch)
            if rows >= calibration.sample_size:
                break
        if not rows:
            raise UsageError("The calibration data hold no batch; give at least one")

    def calibration_arrays(self, options: BuildOptions) -> Iterator[list[np.ndarray]]:
        """:meth:`calibration_tensors` as ndarrays."""
        for tensors in self.calibration_tensors(options):
            yield [tensor.detach().cpu().numpy() for tensor in tensors]

    def to_openvino(self, options: BuildOptions):
        """The model as an ``openvino.Model``."""
        from bigdl.nano.pytorch.inference.export_openvino import to_openvino

        return to_openvino(self, options)

    def from_openvino(self, network, method: str, options: BuildOptions):
        """The accelerated model of a ``CompiledNetwork`` of this model's inputs and outputs."""
        from bigdl.nano.pytorch.inference.openvino_model import PytorchOpenVINOModel

        return PytorchOpenVINOModel.of(self, network, method, options)

    def to_onnx(self, path: str, options: BuildOptions) -> None:
        """Write the model as an ONNX file."""
        from bigdl.nano.pytorch.inference.export_onnx import to_onnx

        to_onnx(self, path, options)

    def onnx_names(self) -> list[str]:
        """Names of the inputs in the ONNX file."""
        from bigdl.nano.pytorch.inference.export_onnx import onnx_names

        return onnx_names(self.inputs)

    def from_onnx(self, network, method: str, options: BuildOptions):
        """The accelerated model of an ``OnnxNetwork`` of this model's inputs and outputs."""
        from bigdl.nano.pytorch.inference.onnxruntime_model import PytorchONNXRuntimeModel

        return PytorchONNXRuntimeModel.of(self, network, method, options)
