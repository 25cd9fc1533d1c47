"""InferenceOptimizer: one model, made faster in the way that suits it best."""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.cpu import isa_flags, usable_cores
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.keywords import Keywords, MethodTable, check_threads, options_of
from bigdl.nano.acceleration.method import Method, find_method
from bigdl.nano.acceleration.search.cache import Cache, fingerprint
from bigdl.nano.acceleration.search.isolation import Limits
from bigdl.nano.acceleration.search.optimizer import (
    BaseInferenceOptimizer,
    check_counts,
    check_direction,
)
from bigdl.nano.acceleration.search.results import choose
from bigdl.nano.acceleration.search.trial import OBJECTIVES, Plan, Trial
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    InferenceContext,
    Settings,
    context_of,
    remember_settings,
)
from bigdl.nano.pytorch.inference.bench import TorchBench, accuracy_goal
from bigdl.nano.pytorch.inference.multi_instance import to_multi_instance
from bigdl.nano.pytorch.inference.serialization import load_model, save_model
from bigdl.nano.pytorch.inference.source import TorchSource
from bigdl.nano.pytorch.methods import ALL_METHODS, DEFAULT_METHODS, METHODS

__all__ = ["InferenceOptimizer", "SwitchableModel"]

_PACKAGES = ("torch", "openvino", "nncf", "onnx", "onnxruntime", "torchao", "bigdl")
_TABLE = MethodTable(
    accelerators=("openvino", "onnxruntime", "jit", None),
    int8={
        "jit": {None: "jit_int8", "fx": "jit_int8"},
        None: {
            None: "static_int8",
            "fx": "static_int8",
            "eager": "static_int8",
            "ipex": "static_int8_ipex",
            "torchao": "torchao_int8",
            "weight_only": "int8_weight_only",
            "inc": "neural_compressor_int8",
        },
    },
    dynamic={"onnxruntime": "onnxruntime_int8_integer", None: "torchao_int8"},
)


class InferenceOptimizer(BaseInferenceOptimizer[torch.nn.Module]):
    """Makes a PyTorch model faster without changing it.

    ``trace`` and ``quantize`` apply one method that the caller names by its properties, ``build``
    one by its name; ``optimize`` tries many and measures each. What comes back is called as the
    original is, best inside ``with InferenceOptimizer.get_context(model):``.

    Attributes
    ----------
    ALL_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The 27 methods of ``search_mode="all"``.
    DEFAULT_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The 11 methods that are tried unasked.

    Examples
    --------
    >>> fast = InferenceOptimizer.trace(model, input_sample=x, accelerator="openvino")
    >>> with InferenceOptimizer.get_context(fast):
    ...     y = fast(x)

    >>> optimizer = InferenceOptimizer()
    >>> optimizer.optimize(model, training_data=loader, validation_data=loader, metric=accuracy)
    >>> best, option = optimizer.get_best_model(accuracy_criterion=0.01)
    """

    ALL_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]] = ALL_METHODS
    DEFAULT_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]] = DEFAULT_METHODS

    _methods = METHODS
    _data_argument = "training_data"
    _bench: TorchBench

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
        """Return a model in fp32 in another runtime or memory layout.

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
        name = _TABLE.traced(
            accelerator, device, kwargs, use_ipex=use_ipex, channels_last=channels_last
        )
        _check_model(model)
        return _build(find_method(name), {**locals()})

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
        """Return a model in bf16, fp16 or int8.

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
        name = _TABLE.quantized(
            precision,
            accelerator,
            device,
            approach,
            method,
            use_ipex=use_ipex,
            channels_last=channels_last,
        )
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                "Invalid model to quantize. Please use a nn.Module or a model from "
                "InferenceOptimizer.trace(accelerator=='openvino')"
            )
        if not (name.startswith("openvino") and type(model).__name__ == "PytorchOpenVINOModel"):
            _check_model(model)
        if calib_dataloader is not None:
            warnings.warn("calib_dataloader is now called calib_data", stacklevel=2)
            calib_data = calib_data if calib_data is not None else calib_dataloader
        return _build(find_method(name), {**locals()})

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
        chosen = find_method(method)
        _check_model(model)
        unknown = _KEYWORDS.refuse_unknown(chosen, arguments)
        conversion = {key: arguments.pop(key) for key in unknown}
        return _build(chosen, {**arguments, "model": model, "kwargs": conversion})

    def optimize(
        self,
        model: torch.nn.Module,
        training_data: Any = None,
        validation_data: Any = None,
        input_sample: Any = None,
        metric: Any = None,
        direction: str = "max",
        thread_num: int | None = None,
        accelerator: tuple | None = None,
        precision: tuple | None = None,
        use_ipex: bool | None = None,
        jit_strict: bool = True,
        enable_onednn: bool = False,
        search_mode: str = "default",
        dynamic_axes: bool | Mapping = True,
        logging: bool = False,
        output_tensors: bool = True,
        latency_sample_num: int = 100,
        includes: Collection[str] | None = None,
        excludes: Collection[str] | None = None,
        output_filename: str | None = None,
        no_cache: bool = False,
        *,
        objective: str = "latency",
        batch_sizes: Sequence[int] | None = None,
        thread_counts: Sequence[int] | None = None,
        time_limit: float | None = None,
        memory_limit: int | None = None,
        cache: bool = True,
        cache_dir: str | None = None,
    ) -> None:
        """Try methods on a model: convert it, compare its results, time it, score it.

        Each method is tried in a process of its own, so that one that hangs, crashes or takes too
        much memory costs its row only. It is timed in alternation with the original. The table is
        printed at the end; :meth:`summary`, :meth:`results` and :meth:`plot` give it again.

        Parameters
        ----------
        model : Module
            Not changed.
        training_data : DataLoader, Tensor, tuple or dict
            Batches for int8's calibration, of which the first is the sample: a loader, or one
            batch. A batch is ``x``, ``(x,)``, ``(x, y)`` (``x`` may be a tuple of inputs),
            ``(x1, …, xk, y…)`` for a model of k inputs, or a dict of arguments.
        validation_data : DataLoader, Tensor, tuple or dict, optional
            Batches with targets, for `metric`.
        input_sample : Tensor, tuple or dict, optional
            The sample, instead of the first batch of `training_data`.
        metric : torchmetrics.Metric or callable, optional
            A Metric, or a callable with parameters for predictions and targets (names that contain
            "pred" and "target"), whose results are averaged over the samples; or any other
            callable, called as ``metric(model, validation_data)``, or as ``metric(model)``
            without validation data.
        direction : {"max", "min"}
            Whether a higher or a lower metric is better.
        thread_num : int, optional
            Threads of every model.
        accelerator : tuple, optional
            Only methods of these runtimes: None (PyTorch itself), ``"jit"``, ``"onnxruntime"``,
            ``"openvino"``.
        precision : tuple, optional
            Only methods of these precisions: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``.
        use_ipex : bool, optional
            Only methods with, or without, what Intel's extension of PyTorch did.
        jit_strict : bool
            Passed to ``torch.jit.trace``.
        enable_onednn : bool
            Accepted; it changes nothing.
        search_mode : {"default", "all", "grid", "extended"}
            ``"default"`` tries 11 methods, ``"all"`` 27, ``"extended"`` these and the ones that
            BigDL 2.x did not have. ``"grid"`` is ``"all"`` filtered by `accelerator`, `precision`
            and `use_ipex`, and is meant wherever one of the three is given.
        dynamic_axes : bool or dict
            As of :meth:`trace`.
        logging : bool
            Show what methods print, and a progress bar also where there is no terminal.
        output_tensors : bool
            Tensors, or ndarrays.
        latency_sample_num : int
            Calls that are timed; fewer where they take more than ten seconds.
        includes : list of str, optional
            Try these methods only, and the original.
        excludes : list of str, optional
            Leave these methods out; the original is always tried.
        output_filename : str, optional
            File for the table.
        no_cache : bool
            Time successive batches of `training_data` instead of the sample again and again.
        objective : {"latency", "throughput", "memory"}
            What the best model is best in: milliseconds of a call, samples per second at the best
            of `batch_sizes`, or memory of a process that loads and runs it.
        batch_sizes : list of int, optional
            Sizes to which the sample is brought for timing; the table shows the latency at the
            first. By default the sample's own.
        thread_counts : list of int, optional
            Thread counts of which the best is found for each method, instead of `thread_num`.
        time_limit : float, optional
            Seconds for one method. By default 20 times what the original took, and at least 300;
            the original is not limited.
        memory_limit : int, optional
            Bytes of resident memory of the process that tries methods; by default 90 % of what is
            free at the beginning.
        cache : bool
            Whether the results of an equal search (model, data, metric, options, versions) are
            taken if there are any. They are kept for the life of this process, or in `cache_dir`.
        cache_dir : str, optional
            Directory in which results and models are kept for other processes.

        Raises
        ------
        UsageError
            If an argument makes no sense, or the original does not run on the data or the metric.

        Warns
        -----
        UserWarning
            If model, data or metric cannot go to another process, so that methods are tried in
            this one.
        """
        _check_model(model)
        check_direction(direction)
        check_choice("objective", objective, OBJECTIVES)
        names = choose(
            METHODS,
            ALL_METHODS,
            search_mode=search_mode,
            accelerator=accelerator,
            precision=precision,
            use_ipex=use_ipex,
            includes=includes,
            excludes=excludes,
        )
        plan = Plan(
            runs=check_positive("latency_sample_num", latency_sample_num),
            objective=objective,
            threads=check_counts("thread_counts", thread_counts, check_threads(thread_num)),
            batch_sizes=check_counts("batch_sizes", batch_sizes, None),
        )
        bench = TorchBench(
            model,
            {name: METHODS[name] for name in names},
            training_data,
            input_sample=input_sample,
            validation_data=validation_data,
            metric=metric,
            thread_num=thread_num,
            many_batches=no_cache,
            jit_strict=jit_strict,
            dynamic_axes=dynamic_axes,
            output_tensors=output_tensors,
        )
        cached = cache or cache_dir is not None
        self._search(
            bench,
            plan,
            direction,
            limits=Limits(time_limit, memory_limit),
            threads=torch.get_num_threads(),
            logging=logging,
            output_filename=output_filename,
            cache=Cache(cache_dir),
            key=_key(bench, plan, direction, training_data) if cached else None,
            reuse=cache,
        )

    def get_best_model(
        self,
        accelerator: str | None = None,
        precision: str | None = None,
        use_ipex: bool | None = None,
        accuracy_criterion: float | None = None,
    ) -> tuple[torch.nn.Module, str]:
        """Return the best model by the objective of :meth:`optimize`.

        Parameters
        ----------
        accelerator, precision : str, optional
            Only methods of this runtime, of this precision.
        use_ipex : bool, optional
            Only methods with, or without, what Intel's extension of PyTorch did.
        accuracy_criterion : float, optional
            Largest drop of the accuracy, as a fraction of the original's: 0.05 is 5 %. Without
            it, the accuracy does not matter.

        Returns
        -------
        model : Module
            In evaluation mode. The original, if nothing is better; if methods were restricted,
            the best of those, and the original if none of them keeps its accuracy (with a
            warning).
        option : str
            What it uses, e.g. ``"openvino + int8"``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, no method that was tried and works is of this
            kind, or there is a criterion and no accuracy.
        """
        return self._best(accelerator, precision, use_ipex, accuracy_criterion)

    def _original(self, trial: Trial) -> torch.nn.Module:
        original = _evaluating(cast("torch.nn.Module", self._bench.model))
        remember_settings(original, Settings(threads=trial.threads))
        return original

    def _read(self, directory: Path) -> torch.nn.Module:
        return load_model(directory, self._bench.model)

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
            check_threads(thread_num),
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
        return to_multi_instance(model, num_processes, cores_per_process, cpu_for_each_process)


_KEYWORDS = Keywords(
    InferenceOptimizer.trace, InferenceOptimizer.quantize, only_build=("streams", "smooth")
)


def _build(method: Method, arguments: Mapping[str, Any]) -> torch.nn.Module:
    """Apply a method to ``arguments["model"]``; the other arguments are those of ``quantize``."""
    method.require()
    values = _KEYWORDS.checked(method, arguments)
    source = TorchSource(
        arguments["model"],
        values["input_sample"],
        values["example_kwarg_inputs"],
        values["calib_data"],
    )
    if source.has_sample and method.name != "original":
        source.outputs  # noqa: B018 - says what is wrong with a sample before a runtime does
    options = options_of(method, values, arguments.get("kwargs"), accuracy_goal(values))
    model = method.build(source, options)
    if values["strict_check"] and source.has_sample and isinstance(model, AcceleratedModel):
        args, kwargs = source.arguments
        with context_of(model):
            method.try_out(lambda: model(*args, **kwargs))
    return model


def _check_model(model: Any) -> None:
    """Refuse what is no module, or not an original one."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model should be a nn module. A {type(model).__name__} was given.")
    if isinstance(model, AcceleratedModel):
        raise UsageError(
            "Expect a nn.Module instance that is not traced or quantized but got type "
            f"{type(model)}; pass the original model"
        )


def _key(bench: TorchBench, plan: Plan, direction: str, training_data: Any) -> str | None:
    """Digest of all that the results depend on."""
    surroundings = (platform.processor(), sorted(isa_flags()), usable_cores())
    versions = [(package, _version(package)) for package in _PACKAGES]
    data = training_data
    if isinstance(data, torch.utils.data.DataLoader):  # without its state
        data = (data.dataset, data.batch_size, type(data.sampler), data.collate_fn)
    with bench.session():  # whether the model is in training mode does not matter
        return fingerprint(bench.identity(), plan, direction, data, surroundings, versions)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _evaluating(model: torch.nn.Module) -> torch.nn.Module:
    """The model if it is in eval mode, else a twin that is, with the same parameters."""
    if not any(module.training for module in model.modules()):
        return model
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


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
        if sample is None and self._sample is not None:
            sample, named = self._sample
            kwargs = {"example_kwarg_inputs": named or None, **kwargs}
        return InferenceOptimizer.trace(self.model, sample, accelerator="onnxruntime", **kwargs)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)
