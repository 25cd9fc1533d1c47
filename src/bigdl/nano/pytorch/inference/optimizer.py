"""InferenceOptimizer: one model, made faster in the way that suits it best."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration import find_method
from bigdl.nano.acceleration.arguments import thread_count
from bigdl.nano.pytorch.inference import routes
from bigdl.nano.pytorch.inference.building import (
    APPLIES_TO_ALL,
    DEFAULTS,
    build,
    refuse_accelerated,
)
from bigdl.nano.pytorch.inference.context import InferenceContext, context_of
from bigdl.nano.pytorch.inference.search import Search
from bigdl.nano.pytorch.inference.storage import load_model, save_model

__all__ = ["InferenceOptimizer"]


class InferenceOptimizer(Search):
    """Makes a PyTorch model faster without changing it.

    ``trace`` and ``quantize`` apply one method that the caller names by its properties, ``build``
    one by its name; ``optimize`` tries many and measures each. What comes back is called as the
    original is, best inside ``with InferenceOptimizer.get_context(model):``.

    Examples
    --------
    >>> fast = InferenceOptimizer.trace(model, input_sample=x, accelerator="openvino")
    >>> with InferenceOptimizer.get_context(fast):
    ...     y = fast(x)

    >>> optimizer = InferenceOptimizer()
    >>> optimizer.optimize(model, training_data=loader, validation_data=loader, metric=accuracy)
    >>> best, option = optimizer.get_best_model(accuracy_criterion=0.01)
    """

    @staticmethod
    def trace(
        model: torch.nn.Module,
        input_sample: Any = None,
        accelerator: str | None = None,
        use_ipex: bool = False,
        channels_last: bool = False,
        thread_num: int | None = None,
        device: str = "CPU",
        onnxruntime_session_options: Any = None,
        openvino_config: Mapping | None = None,
        simplification: bool = True,
        jit_strict: bool = True,
        jit_method: str | None = None,
        dynamic_axes: bool | Mapping = True,
        logging: bool = True,
        inplace: bool = False,
        weights_prepack: bool | None = None,
        enable_onednn: bool = False,
        output_tensors: bool = True,
        strict_check: bool = True,
        example_kwarg_inputs: Mapping | None = None,
        **kwargs: Any,
    ) -> torch.nn.Module:
        """A model in fp32 in another runtime or memory layout.

        Parameters
        ----------
        model : Module
            Not changed.
        input_sample : Tensor, tuple, list or dict, optional
            A sample of the input; ``model.example_input_array`` by default.
        accelerator : {"openvino", "onnxruntime", "jit"}, optional
        use_ipex : bool
            What Intel's extension of PyTorch did: graph compilation with frozen weights.
        channels_last : bool
            Lay out images with their channels last.
        thread_num : int, optional
            Threads of the runtime, and of PyTorch within ``get_context``.
        device : str
            Of OpenVINO: ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"VPUX"`` or ``"NPU"``.
        onnxruntime_session_options : onnxruntime.SessionOptions, optional
        openvino_config : mapping, optional
            Properties for OpenVINO's ``compile_model``.
        simplification : bool
            Whether an exported ONNX graph is simplified.
        jit_strict, jit_method
            Of TorchScript; the method is ``"trace"``, ``"script"``, or None for what works.
        dynamic_axes : bool or dict
            Whether the first dimension of each input, or the ones named, may change.
        logging : bool
            Whether the conversion says what it does.
        inplace : bool
            Convert the user's module itself instead of a copy.
        weights_prepack, enable_onednn
            Accepted; graph compilation decides about both.
        output_tensors : bool
            Tensors, or ndarrays.
        strict_check : bool
            Whether the accelerated model is run once on the sample.
        example_kwarg_inputs : mapping, optional
            Keyword arguments of the sample.
        **kwargs
            Of ``torch.onnx.export``, or of OpenVINO's conversion.

        Returns
        -------
        Module

        Raises
        ------
        UsageError
            If the arguments name no method, an argument does not apply to it, the method is not
            possible on this machine, or the model cannot be converted.
        """
        name = routes.trace_method(accelerator, use_ipex, channels_last, device, kwargs)
        refuse_accelerated(model, "traced or quantized")
        arguments = dict(locals())
        return build(find_method(name), arguments)

    @staticmethod
    def quantize(
        model: torch.nn.Module,
        precision: str = "int8",
        accelerator: str | None = None,
        use_ipex: bool = False,
        calib_data: Any = None,
        calib_dataloader: Any = None,
        eval_func: Callable | None = None,
        metric: Any = None,
        accuracy_criterion: Mapping | None = None,
        approach: str = "static",
        method: str | None = None,
        conf: Any = None,
        tuning_strategy: str | None = None,
        timeout: float | None = None,
        max_trials: int | None = None,
        input_sample: Any = None,
        channels_last: bool = False,
        thread_num: int | None = None,
        device: str = "CPU",
        onnxruntime_session_options: Any = None,
        openvino_config: Mapping | None = None,
        simplification: bool = True,
        jit_strict: bool = True,
        jit_method: str | None = None,
        dynamic_axes: bool | Mapping = True,
        sample_size: int = 100,
        logging: bool = True,
        inplace: bool = False,
        weights_prepack: bool | None = None,
        enable_onednn: bool = False,
        q_config: Any = None,
        output_tensors: bool = True,
        example_kwarg_inputs: Mapping | None = None,
        **kwargs: Any,
    ) -> torch.nn.Module:
        """A model in bf16, fp16 or int8.

        Parameters
        ----------
        model : Module
            Not changed. Also a model of ``trace(accelerator="openvino")``, with the same
            accelerator.
        precision : {"int8", "bf16", "fp16"}
        accelerator, use_ipex, channels_last, thread_num, device
            As of :meth:`trace`.
        calib_data : DataLoader, Tensor, tuple or dict, optional
            Needed for static int8.
        calib_dataloader : DataLoader, optional
            Old name of `calib_data`.
        eval_func : callable, optional
            Called with a model, returns its score: an alternative to `metric`.
        metric : torchmetrics.Metric or callable, optional
            With it, and with labels in the calibration data, int8 keeps the accuracy within
            `accuracy_criterion`, or is refused.
        accuracy_criterion : dict, optional
            ``{"relative": 0.01, "higher_is_better": True}`` (the default) or ``"absolute"``.
        approach : {"static", "dynamic"}
        method : str, optional
            A variant: ``"qlinear"``, ``"integer"`` or ``"nncf"`` with ONNX Runtime; ``"fx"``,
            ``"eager"``, ``"ipex"``, ``"torchao"``, ``"weight_only"`` or ``"inc"`` with none;
            ``"weight_only"`` or ``"bf16"`` (the rest in bf16) with OpenVINO.
        conf, tuning_strategy, q_config
            Accepted for programs that were written for Neural Compressor 2; they change nothing.
        timeout : float, optional
            Seconds after which no further layer selection is tried; 0 sets no limit.
        max_trials : int, optional
            How many quantized models are scored at most.
        sample_size : int
            Number of samples for calibration.
        input_sample, jit_strict, jit_method, dynamic_axes, simplification, logging, inplace
            As of :meth:`trace`.
        onnxruntime_session_options, openvino_config, output_tensors, example_kwarg_inputs
            As of :meth:`trace`.
        weights_prepack, enable_onednn, **kwargs
            As of :meth:`trace`.

        Returns
        -------
        Module

        Raises
        ------
        UsageError
            As of :meth:`trace`; also if calibration data are missing, or the accuracy criterion
            cannot be met.
        """
        name = routes.quantize_method(
            precision, accelerator, use_ipex, channels_last, device, approach, method
        )
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                "Invalid model to quantize. Please use a nn.Module or a model from "
                "InferenceOptimizer.trace(accelerator=='openvino')"
            )
        if not (name.startswith("openvino") and type(model).__name__ == "PytorchOpenVINOModel"):
            refuse_accelerated(model, "traced or quantized")
        if calib_dataloader is not None:
            warnings.warn("calib_dataloader is now called calib_data", stacklevel=2)
            calib_data = calib_data if calib_data is not None else calib_dataloader
        arguments = dict(locals())
        return build(find_method(name), arguments)

    @staticmethod
    def build(model: torch.nn.Module, method: str, **arguments: Any) -> torch.nn.Module:
        """Apply one method of the registry by its name.

        Parameters
        ----------
        model : Module
            Not changed.
        method : str
            A key of ``InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD``.
        **arguments
            Those of :meth:`quantize` that apply to the method.

        Returns
        -------
        Module

        Raises
        ------
        UsageError
            As of :meth:`quantize`.
        """
        found = find_method(method)
        refuse_accelerated(model, "traced or quantized")
        unknown = set(arguments) - set(DEFAULTS)
        own = "onnxruntime" if found.accelerator == "onnxruntime" else "openvino"
        if unknown and found.accelerator != own:
            raise UsageError(
                f"Method {method!r} has no argument {', '.join(map(repr, sorted(unknown)))}; it "
                f"takes {', '.join(sorted(APPLIES_TO_ALL))}"
            )
        rest = {key: arguments.pop(key) for key in unknown}
        return build(found, {**DEFAULTS, **arguments, "model": model, "kwargs": rest})

    @staticmethod
    def save(model: torch.nn.Module, path: Any, compression: str = "fp32") -> None:
        """Write a model to a directory.

        Parameters
        ----------
        model : Module
            Accelerated or not.
        path : str or path
            The directory; an earlier model in it is replaced when the new one is complete.
        compression : {"fp32", "bf16"}
            How weights are stored.

        Raises
        ------
        UsageError
            If the model cannot be saved there or in this form.
        """
        save_model(model, path, compression)

    @staticmethod
    def load(
        path: Any,
        model: torch.nn.Module | None = None,
        input_sample: Any = None,
        inplace: bool = False,
        device: str | None = None,
        cache_dir: str | None = None,
        shapes: str | None = None,
        thread_num: int | None = None,
    ) -> torch.nn.Module:
        """Read a model from a directory that :meth:`save` wrote.

        Parameters
        ----------
        path : str, path, or dict of str to binary file
            The directory, or its files by name.
        model : Module, optional
            The original. Needed where the directory holds weights only; else its attributes are
            found on the model again.
        input_sample : optional
            Needed with models that were saved with ``compression="bf16"`` and run in another
            runtime.
        inplace : bool
            Load into `model` itself instead of a copy.
        device : str, optional
            OpenVINO's device, instead of the saved one.
        cache_dir : str, optional
            Directory in which OpenVINO keeps compiled models.
        shapes : str, optional
            Input shapes for OpenVINO, e.g. ``"x[1,3,224,224],y[1,4]"``.
        thread_num : int, optional
            Threads of the model, instead of those that it was saved with; those of a graph that
            TorchInductor has compiled stay.

        Returns
        -------
        Module

        Raises
        ------
        UsageError
            If a file is missing or an argument is needed.
        """
        return load_model(
            path,
            model,
            thread_count(thread_num),
            input_sample=input_sample,
            inplace=inplace,
            device=device,
            cache_dir=cache_dir,
            shapes=shapes,
        )

    @staticmethod
    def get_context(model: torch.nn.Module, *models: torch.nn.Module) -> InferenceContext:
        """A context in which models run without gradients, with their threads and precision.

        Parameters
        ----------
        model, *models : Module
            Also lists of modules.

        Returns
        -------
        context manager
        """
        return context_of(model, *models)

    @staticmethod
    def to_multi_instance(
        model: torch.nn.Module,
        num_processes: int = 4,
        cores_per_process: int | None = None,
        cpu_for_each_process: Sequence[Sequence[int]] | None = None,
    ) -> torch.nn.Module:
        """Copies of a model in several processes, each with cores of its own.

        See :func:`bigdl.nano.pytorch.inference.multi_instance.to_multi_instance`.
        """
        from bigdl.nano.pytorch.inference.multi_instance import to_multi_instance

        return to_multi_instance(model, num_processes, cores_per_process, cpu_for_each_process)
