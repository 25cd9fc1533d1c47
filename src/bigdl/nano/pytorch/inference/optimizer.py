"""InferenceOptimizer for PyTorch: applies acceleration methods to a model, or finds the fastest."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from bigdl.common.cpu import isa_flags, thread_scope, usable_cores
from bigdl.common.errors import UsageError, hide_frames, user_stacklevel
from bigdl.common.missing import installed_version
from bigdl.common.platform.cores import processor_type
from bigdl.nano.acceleration.accuracy import AccuracyOptions, score_function
from bigdl.nano.acceleration.autotune import warn_if_slower
from bigdl.nano.acceleration.method import (
    ORIGINAL,
    BuildOptions,
    Method,
    MethodChoice,
    select_quantize_method,
    select_trace_method,
)
from bigdl.nano.acceleration.precision import FP32, INT8, WeightOptions
from bigdl.nano.acceleration.search.optimizer import BaseInferenceOptimizer
from bigdl.nano.acceleration.search.results import fingerprint
from bigdl.nano.acceleration.search.trial import Bench, Candidate, SearchOptions, Trial
from bigdl.nano.acceleration.structure import ModelBatch, first_batches, flatten, read, rows_of
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    InferenceContext,
    Settings,
    active_settings,
    context_of,
    remember_settings,
    settings_of,
)
from bigdl.nano.pytorch.inference.decoders import accelerated
from bigdl.nano.pytorch.inference.methods import ALL_METHODS, DEFAULT_METHODS, METHODS
from bigdl.nano.pytorch.inference.network_models import PytorchOpenVINOModel
from bigdl.nano.pytorch.inference.pipeline import to_multi_instance
from bigdl.nano.pytorch.inference.serialization import load_model, save_model
from bigdl.nano.pytorch.inference.source import (
    ONE_BATCH,
    TorchSource,
    batches_of,
    evaluating,
    fastpath_disabled,
    split_batch,
    state_restored,
)

__all__ = ["InferenceOptimizer", "SwitchableModel", "TorchBench", "score_of"]


def score_of(
    metric: object, data: object, source: object = None
) -> Callable[[torch.nn.Module], float]:
    """Return a function that scores a model on data with the user's metric.

    Parameters
    ----------
    metric : torchmetrics.Metric or callable
        A Metric, or a callable with parameters for predictions and targets (names that contain
        "pred" and "target"), is computed on the model's predictions. Any other callable is called
        as ``metric(model, data)``, or as ``metric(model)`` without data.
    data : DataLoader, tuple or None
        Batches with targets.
    source : optional
        Not used.

    Raises
    ------
    UsageError
        If the metric is not callable, or needs targets and there are no data.
    """
    if not callable(metric):
        raise UsageError(
            f"metric must be a torchmetrics.Metric or a callable, not {metric!r}",
            code="argument-type",
            argument="metric",
        )
    score = score_function(
        metric,
        data,
        lambda model: _predictions(model, data),
        streaming=metric if hasattr(metric, "update") and hasattr(metric, "compute") else None,
        target_words=("target",),
    )

    def scored(model: torch.nn.Module) -> float:
        """Score a model in evaluation mode with the model's thread count and precision."""
        within = context_of(model) if active_settings() is None else nullcontext()
        with evaluating(model), within:
            return score(model)

    return scored


def _predictions(model: torch.nn.Module, data: object) -> Iterator[tuple[Any, Any, int]]:
    """Yield predictions, targets and the number of rows of each batch."""
    original = getattr(model, "nano_source", None)
    described = original if isinstance(original, torch.nn.Module) else model
    for batch in batches_of(described, data, name="The validation data"):
        predicted = model(*batch.args, **batch.kwargs)
        if isinstance(predicted, torch.Tensor) and predicted.dtype is torch.bfloat16:
            predicted = predicted.float()
        targets = batch.targets[0] if len(batch.targets) == 1 else batch.targets or None
        yield predicted, targets, rows_of(batch)


_CALIBRATION_ROWS = 100
_DIFFERENT_BATCHES = 16


class TorchBench(Bench):
    """PyTorch adapter of a search: builds, runs, scores and saves modules.

    It reads a few batches of the training data at construction; these are pickled instead of the
    loader.

    Parameters
    ----------
    methods : mapping of str to Method
    model, thread_num, metric
        See :class:`~bigdl.nano.acceleration.search.trial.Bench`.
    training_data, validation_data, input_sample
        See ``InferenceOptimizer.optimize``.
    options : BuildOptions
        Build options of all methods.
    different : bool
        True to cycle through several batches for timing instead of repeating one.

    Raises
    ------
    UsageError
        If there is no batch, or the metric does not fit the validation data.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        model: torch.nn.Module,
        thread_num: int | None,
        metric: object,
        training_data: object,
        validation_data: object,
        input_sample: object,
        options: BuildOptions,
        different: bool,
    ):
        super().__init__(methods, model, thread_num, metric)
        self.library_threads = torch.get_num_threads()
        self._validation_data = _without_workers(validation_data)
        if self.has_metric:
            score_of(self._metric, self._validation_data)  # raises if they do not fit
        count = _DIFFERENT_BATCHES if different else 1
        self._elements = _first_elements(training_data, count)
        self._batches = [split_batch(model, element) for element in self._elements[:count]]
        if input_sample is not None:
            self._batches = [ModelBatch(*TorchSource(model, input_sample).arguments)]
        if not self._batches:  # its example_input_array
            self._batches = [ModelBatch(*TorchSource(model).arguments)]
        self._options = options

    @cached_property
    def _source(self) -> TorchSource:
        sample = self._batches[0]
        return TorchSource(self.model, sample.args, sample.kwargs, self._elements or None)

    @contextmanager
    def session(self) -> Iterator[None]:
        if torch.get_num_threads() != self.library_threads:  # in another process
            torch.set_num_threads(self.library_threads)
        with evaluating(self.model):
            yield

    def build(self, method: Method, threads: int | None) -> Candidate:
        if method.name == ORIGINAL:
            return Candidate(self.model, lambda: InferenceContext(Settings(threads)))
        options = dataclasses.replace(self._options, thread_num=threads)
        built = accelerated(method, self._source, options, scored=self.has_metric)
        return _candidate(built)

    def alternative(self, batch: ModelBatch) -> object:
        if not any(isinstance(part, torch.nn.MultiheadAttention) for part in self.model.modules()):
            return None
        with fastpath_disabled(), torch.no_grad():
            return self.model(*batch.args, **batch.kwargs)

    def score(self, candidate: Candidate) -> float:
        with candidate.context():
            return score_of(self._metric, self._validation_data)(candidate.model)

    save = staticmethod(save_model)

    def load(self, directory: Path) -> Candidate:
        try:
            return _candidate(load_model(directory, trust=True))  # written by this search
        except UsageError:  # the directory contains weights only
            return _candidate(load_model(directory, self.model, trust=True))

    def identity(self) -> tuple:
        """Return the values that identify the search, for its fingerprint."""
        batches = [flatten((batch.args, batch.kwargs))[0] for batch in self._batches]
        shapes = [[(str(x.dtype), tuple(x.shape)) for x in batch] for batch in batches]
        return (
            (self.model, list(self.methods), shapes, self._metric, self._validation_data),
            (self.thread_num, self.library_threads, self._options),
        )


def _candidate(model: torch.nn.Module) -> Candidate:
    settings = settings_of(model)
    return Candidate(model, lambda: InferenceContext(settings))


def _first_elements(data, count) -> list:
    """Return the first batches of the data: enough for calibration, and at least `count`."""
    if data is None:
        return []
    if isinstance(data, ONE_BATCH):
        return [data]
    if not isinstance(data, Iterable):
        raise UsageError(
            "training_data must be a DataLoader, or a batch of it, that is a tensor, a tuple or a "
            f"dict, not a {type(data).__name__}",
            code="data-type",
            argument="training_data",
        )
    empty = "training_data holds no batch; give at least one"
    with torch.random.fork_rng(devices=[]):  # a shuffling loader must not advance the state
        elements = read(data, "training_data")
        return list(first_batches(elements, _CALIBRATION_ROWS, count, empty))


def _without_workers(data):
    """Copy a loader without its persistent workers."""
    if isinstance(data, torch.utils.data.DataLoader):
        data = copy.copy(data)
        data._iterator = None
    return data


_PACKAGES = ("torch", "openvino", "nncf", "onnx", "onnxruntime", "torchao", "bigdl")


@dataclasses.dataclass(frozen=True)
class TorchData:
    """Arguments of ``trace`` and ``quantize`` that provide sample inputs and calibration data."""

    input_sample: object = None
    example_kwarg_inputs: Mapping[str, object] | None = None
    calib_data: object = None

    def source(self, model: torch.nn.Module) -> TorchSource:
        """Return a model source with these data; run the model once to check the sample."""
        source = TorchSource(model, self.input_sample, self.example_kwarg_inputs, self.calib_data)
        if source.has_sample and not isinstance(model, AcceleratedModel):
            source.result  # noqa: B018 - raises a clear error for a wrong sample
        return source


@hide_frames
class InferenceOptimizer(BaseInferenceOptimizer[torch.nn.Module]):
    """Methods that accelerate PyTorch models, and a search for the fastest of them.

    ``trace`` and ``quantize`` apply the method with the given properties, ``build`` the method with
    a name, and ``optimize`` tries and measures many. The results have the original's signature;
    call them inside ``with InferenceOptimizer.get_context(model):``.

    Attributes
    ----------
    ALL_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The 27 methods of ``search_mode="all"``.
    DEFAULT_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The 11 methods that are tried by default.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.rand(3, 4)
    >>> fast = InferenceOptimizer.trace(model, input_sample=x, accelerator="openvino")
    >>> with InferenceOptimizer.get_context(fast):
    ...     y = fast(x)
    >>> torch.allclose(y, model(x), atol=1e-5)
    True

    Try methods and select the fastest that keeps the accuracy:

    >>> classes = model(x).argmax(1)
    >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, classes), 3)
    >>> def accuracy(pred, target):
    ...     return (pred.argmax(1) == target).float().mean()
    >>> optimizer = InferenceOptimizer()
    >>> optimizer.optimize(model, loader, loader, metric=accuracy, includes=["openvino_fp32"])
    -------------------------------- ...
    | method | status | latency(ms) | speedup | metric value |
    ...
    | original | successful | ... | 1.00x | ... |
    | openvino_fp32 | ...
    Optimization cost ...s in total.
    >>> best, option = optimizer.get_best_model(accuracy_criterion=0.01)
    >>> option in ("original", "openvino")
    True
    """

    ALL_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]] = ALL_METHODS
    DEFAULT_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]] = DEFAULT_METHODS

    _framework = "torch"
    _methods = METHODS
    _data_argument = "training_data"
    _data_class = TorchData
    _model_class, _accelerated_class = torch.nn.Module, AcceleratedModel
    _nouns = ("nn module", "nn.Module instance")
    _score_of = staticmethod(score_of)
    _accelerated = staticmethod(accelerated)

    @staticmethod
    def trace(
        model: torch.nn.Module,
        input_sample: object = None,
        accelerator: str | None = None,
        use_ipex: bool = False,
        channels_last: bool = False,
        thread_num: int | None = None,
        device: str = "CPU",
        onnxruntime_session_options: object = None,
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
        **kwargs: object,
    ) -> torch.nn.Module:
        """Return a model in fp32 that runs in another runtime or memory layout.

        Parameters
        ----------
        model : Module
            The original model; it is not changed.
        input_sample : Tensor, tuple, list, dict or DataLoader, optional
            Sample of the input; for a loader its first batch without targets. The default is
            ``model.example_input_array``, or the first batch of a loader of the LightningModule's
            trainer.
        accelerator : {"openvino", "onnxruntime", "jit"}, optional
        use_ipex : bool
            Compile the graph with frozen weights, as Intel Extension for PyTorch did.
        channels_last : bool
            Store images with channels last.
        thread_num : int, optional
            Number of threads of the runtime, and of PyTorch inside ``get_context``.
        device : str
            OpenVINO device: ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"VPUX"`` or ``"NPU"``.
        onnxruntime_session_options : onnxruntime.SessionOptions, optional
        openvino_config : mapping, optional
            Properties for OpenVINO's ``compile_model``.
        simplification : bool
            Whether to simplify the exported ONNX graph.
        jit_strict, jit_method
            Options of TorchScript; the method is ``"trace"``, ``"script"``, or None for either.
        dynamic_axes : bool or dict
            True if the first dimension of each input may change; a dict names other dimensions.
        logging : bool
            Accepted; it has no effect.
        inplace : bool
            Convert the user's module in place instead of a copy.
        weights_prepack, enable_onednn
            Accepted; they have no effect, because graph compilation controls both.
        output_tensors : bool
            True to return tensors, False for ndarrays.
        strict_check : bool
            Whether to compare the accelerated model with the original, on the sample and on inputs
            derived from it.
        example_kwarg_inputs : mapping, optional
            Keyword arguments of the sample.
        **kwargs
            Keywords of ``torch.onnx.export``, or of OpenVINO's conversion.

        Returns
        -------
        Module

        Raises
        ------
        UsageError
            If no method matches the arguments, an argument does not apply to it, the method cannot
            run on this machine, or the model cannot be converted.

        Examples
        --------
        >>> import torch
        >>> from bigdl.nano.pytorch import InferenceOptimizer
        >>> x = torch.tensor([[-1.0, 2.0]])
        >>> fast = InferenceOptimizer.trace(
        ...     torch.nn.ReLU(), input_sample=x, accelerator="onnxruntime", thread_num=2
        ... )
        >>> with InferenceOptimizer.get_context(fast):
        ...     fast(x), torch.get_num_threads()
        (tensor([[0., 2.]]), 2)
        """
        choice = MethodChoice(
            accelerator=accelerator, use_ipex=use_ipex, channels_last=channels_last
        )
        options = BuildOptions(
            thread_num=thread_num,
            dynamic_axes=dynamic_axes,
            output_tensors=output_tensors,
            inplace=inplace,
            onnxruntime_session_options=onnxruntime_session_options,
            simplification=simplification,
            device=device,
            openvino_config=openvino_config,
            jit_method=jit_method,
            jit_strict=jit_strict,
            conversion=kwargs,
        )
        data = TorchData(input_sample, example_kwarg_inputs)
        method = select_trace_method("torch", choice, options)
        return InferenceOptimizer._accelerate(
            model, method, choice, options, AccuracyOptions(), data, strict_check
        )

    @staticmethod
    def quantize(
        model: torch.nn.Module,
        precision: str = INT8,
        accelerator: str | None = None,
        use_ipex: bool = False,
        calib_data: object = None,
        calib_dataloader: object = None,
        eval_func: Callable | None = None,
        metric: object = None,
        accuracy_criterion: Mapping | None = None,
        approach: str = "static",
        method: str | None = None,
        conf: object = None,
        tuning_strategy: str | None = None,
        timeout: float | None = None,
        max_trials: int | None = None,
        input_sample: object = None,
        channels_last: bool = False,
        thread_num: int | None = None,
        device: str = "CPU",
        onnxruntime_session_options: object = None,
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
        q_config: object = None,
        output_tensors: bool = True,
        example_kwarg_inputs: Mapping | None = None,
        strict_check: bool = True,
        weight_options: WeightOptions | None = None,
        **kwargs: object,
    ) -> torch.nn.Module:
        """Return a model quantized to bf16, fp16, int8 or int4.

        Parameters
        ----------
        model : Module
            The original model; it is not changed. A model of ``trace(accelerator="openvino")`` is
            accepted with the same accelerator.
        precision : {"int8", "bf16", "fp16", "int4"} or Precision
            int4 quantizes weights only, by groups in OpenVINO. Embeddings and the last layer have
            8 bits. No calibration data are needed.
        accelerator, use_ipex, channels_last, thread_num, device
            See :meth:`trace`.
        calib_data : DataLoader, Tensor, tuple or dict, optional
            Calibration data, required for static int8.
        calib_dataloader : DataLoader, optional
            Former name of `calib_data`.
        eval_func : callable, optional
            Function that returns a model's score: an alternative to `metric`.
        metric : torchmetrics.Metric or callable, optional
            With a metric and with labels in the calibration data, int8 keeps the accuracy within
            `accuracy_criterion`, or an error is raised.
        accuracy_criterion : dict, optional
            ``{"relative": 0.01, "higher_is_better": True}`` (the default) or ``"absolute"``.
        approach : {"static", "dynamic"}
        method : str, optional
            A variant: ``"qlinear"``, ``"integer"`` or ``"nncf"`` with ONNX Runtime; ``"fx"``,
            ``"eager"``, ``"ipex"``, ``"torchao"``, ``"weight_only"`` or ``"inc"`` with none;
            ``"weight_only"`` or ``"bf16"`` (the rest in bf16) with OpenVINO.
        conf, tuning_strategy, q_config
            Accepted for programs written for Neural Compressor 2; they have no effect.
        timeout : float, optional
            Seconds after which no further layer selection is tried; 0 sets no limit.
        max_trials : int, optional
            Largest number of quantized models that are scored.
        sample_size : int
            Number of calibration samples.
        input_sample, jit_strict, jit_method, dynamic_axes, simplification, logging, inplace
            See :meth:`trace`.
        onnxruntime_session_options, openvino_config, output_tensors, example_kwarg_inputs
            See :meth:`trace`.
        strict_check : bool
            See :meth:`trace`.
        weight_options : WeightOptions, optional
            Options of int4, and of int8 with ``method="weight_only"`` and OpenVINO: group size,
            symmetry, share of layers in int8, AWQ and scale estimation.
        weights_prepack, enable_onednn, **kwargs
            See :meth:`trace`.

        Returns
        -------
        Module

        Raises
        ------
        UsageError
            See :meth:`trace`; also if calibration data are missing, or the accuracy criterion
            cannot be met.

        Examples
        --------
        >>> import torch
        >>> from bigdl.nano.pytorch import InferenceOptimizer
        >>> model, x = torch.nn.Linear(4, 2), torch.rand(64, 4)
        >>> small = InferenceOptimizer.quantize(
        ...     model, precision="int8", accelerator="onnxruntime", calib_data=x
        ... )
        >>> with InferenceOptimizer.get_context(small):
        ...     torch.allclose(small(x), model(x), atol=0.05)
        True
        """
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                "Invalid model to quantize. Please use a nn.Module or a model from "
                "InferenceOptimizer.trace(accelerator=='openvino')",
                code="model-type",
            )
        if calib_dataloader is not None:
            warnings.warn("calib_dataloader is now called calib_data", stacklevel=user_stacklevel())
            calib_data = calib_dataloader if calib_data is None else calib_data
        choice = MethodChoice(precision, accelerator, approach, method, use_ipex, channels_last)
        options = BuildOptions(
            thread_num=thread_num,
            dynamic_axes=dynamic_axes,
            output_tensors=output_tensors,
            inplace=inplace,
            onnxruntime_session_options=onnxruntime_session_options,
            simplification=simplification,
            device=device,
            openvino_config=openvino_config,
            jit_method=jit_method,
            jit_strict=jit_strict,
            sample_size=sample_size,
            weight_options=weight_options,
            conversion=kwargs,
        )
        accuracy = AccuracyOptions(metric, eval_func, accuracy_criterion, timeout, max_trials)
        data = TorchData(input_sample, example_kwarg_inputs, calib_data)
        chosen = select_quantize_method("torch", choice, options)
        return InferenceOptimizer._accelerate(
            model, chosen, choice, options, accuracy, data, strict_check
        )

    def optimize(
        self,
        model: torch.nn.Module,
        training_data: object = None,
        validation_data: object = None,
        input_sample: object = None,
        metric: object = None,
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
        """Try acceleration methods on a model: convert, compare results, time and score.

        Methods are tried in a separate process, so that a hang, a crash or a lack of memory loses
        one row only. Each is timed in alternation with the original. The table is printed at the
        end; :meth:`summary`, :meth:`results` and :meth:`plot` show the results again.

        Parameters
        ----------
        model : Module
            The original model; it is not changed.
        training_data : DataLoader, Tensor, tuple or dict
            Batches for int8 calibration, of which the first is the sample: a loader, or one batch.
            A batch is ``x``, ``(x,)``, ``(x, y)`` (``x`` may be a tuple of inputs),
            ``(x1, …, xk, y…)`` for a model of k inputs, or a dict of arguments.
        validation_data : DataLoader, Tensor, tuple or dict, optional
            Batches with targets, for `metric`.
        input_sample : Tensor, tuple or dict, optional
            Sample of the input; by default the first batch of `training_data`.
        metric : torchmetrics.Metric or callable, optional
            A Metric, or a callable with parameters for predictions and targets (names that contain
            "pred" and "target"), whose results are averaged over the samples. Any other callable is
            called as ``metric(model, validation_data)``, or as ``metric(model)`` without
            validation data.
        direction : {"max", "min"}
            Whether a higher or a lower metric is better.
        thread_num : int, optional
            Number of threads of every model.
        accelerator : tuple, optional
            Restrict the search to these runtimes: None (PyTorch itself), ``"jit"``,
            ``"onnxruntime"``, ``"openvino"``.
        precision : tuple, optional
            Restrict the search to these precisions: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"int4"``.
        use_ipex : bool, optional
            Restrict the search to methods with (True) or without (False) ``ipex`` in their names.
        jit_strict : bool
            Passed to ``torch.jit.trace``.
        enable_onednn : bool
            Accepted; it has no effect.
        search_mode : {"default", "all", "grid", "extended"}
            ``"default"`` tries 11 methods, ``"all"`` 27, and ``"extended"`` also those that are new
            since BigDL 2.x. ``"grid"`` is ``"all"`` filtered by `accelerator`, `precision` and
            `use_ipex`; it is used if one of the three is given.
        dynamic_axes : bool or dict
            See :meth:`trace`.
        logging : bool
            Show the output of methods, and a progress bar also without a terminal.
        output_tensors : bool
            True to return tensors, False for ndarrays.
        latency_sample_num : int
            Number of timed calls; fewer if they would take more than ten seconds.
        includes : list of str, optional
            Names of methods to try; the original is always tried.
        excludes : list of str, optional
            Names of methods to skip; the original is always tried.
        output_filename : str, optional
            File to which the table is written.
        no_cache : bool
            Time successive batches of `training_data` instead of repeating the sample.
        objective : {"latency", "throughput", "memory"}
            Metric that ranks the models: milliseconds per call, samples per second at the best of
            `batch_sizes`, or memory of a process that loads and runs the model.
        batch_sizes : list of int, optional
            Batch sizes for timing, to which the sample is resized. The table shows the latency of
            the first. By default the sample's size.
        thread_counts : list of int, optional
            Thread counts to try for each method instead of `thread_num`; the best is kept.
        time_limit : float, optional
            Seconds per method; by default 20 times the duration of the original's trial, and at
            least 300. The original has no limit.
        memory_limit : int, optional
            Bytes of resident memory of the process that tries methods; by default 90 % of the
            memory available at the start.
        cache : bool
            Whether to reuse the results of an equal search (model, data, metric, options and
            versions). They are kept while this process lives, or in `cache_dir`.
        cache_dir : str, optional
            Directory that keeps results and models for other processes.

        Raises
        ------
        UsageError
            If an argument is invalid, or the original does not run on the data or the metric.

        Warns
        -----
        UserWarning
            If model, data or metric cannot be sent to another process; methods are then tried in
            this one.
        """
        self._check_model(model)
        options = SearchOptions(
            direction=direction,
            thread_num=thread_num,
            accelerator=accelerator,
            precision=precision,
            use_ipex=use_ipex,
            search_mode=search_mode,
            logging=logging,
            latency_sample_num=latency_sample_num,
            includes=includes,
            excludes=excludes,
            output_filename=output_filename,
            objective=objective,
            batch_sizes=batch_sizes,
            thread_counts=thread_counts,
            time_limit=time_limit,
            memory_limit=memory_limit,
            cache=cache,
            cache_dir=cache_dir,
        )
        building = BuildOptions(
            jit_strict=jit_strict,
            dynamic_axes=dynamic_axes,
            output_tensors=output_tensors,
            sample_size=_CALIBRATION_ROWS,
        )
        bench = TorchBench(
            self._to_try(options),
            model,
            thread_num,
            metric,
            training_data,
            validation_data,
            input_sample,
            building,
            no_cache,
        )
        self._search(bench, options, training_data)

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
            Restrict the result to this runtime and this precision.
        use_ipex : bool, optional
            Restrict the result to methods with (True) or without (False) ``ipex`` in their names.
        accuracy_criterion : float, optional
            Largest drop of the accuracy as a fraction of the original's: 0.05 is 5 %. None ignores
            the accuracy.

        Returns
        -------
        model : Module
            Model in evaluation mode: the original if nothing is better. With restrictions, the
            best of the matching methods, or the original (with a warning) if none of them keeps
            its accuracy.
        option : str
            Description of the method, e.g. ``"openvino + int8"``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, no usable method matches the restrictions, or there
            is a criterion and no accuracy.
        """
        return self._best(accelerator, precision, use_ipex, accuracy_criterion)

    def _original(self, trial: Trial) -> torch.nn.Module:
        original = _evaluating(self._bench.model)
        remember_settings(original, Settings(threads=trial.threads))
        return original

    @classmethod
    def _takes(cls, model: torch.nn.Module, method: Method | None) -> bool:
        quantizes = method and method.accelerator == "openvino" and method.precision != FP32
        return bool(quantizes) and isinstance(model, PytorchOpenVINOModel)

    @classmethod
    def _compare_speed(
        cls, method: Method, source: TorchSource, built: torch.nn.Module, options: BuildOptions
    ) -> None:
        model = source.model
        if method.precision == FP32 or not source.has_sample or options.device != "CPU":
            return
        if isinstance(model, AcceleratedModel) or built is model:
            return
        args, kwargs = source.arguments
        tensors = [value for value in flatten((args, kwargs))[0] if hasattr(value, "dtype")]
        sizes = [(list(value.shape), str(value.dtype)) for value in tensors]
        weights = [(name, list(each.shape)) for name, each in model.named_parameters()]
        threads = options.thread_num or torch.get_num_threads()
        with thread_scope(threads), evaluating(model), state_restored(model), torch.no_grad():
            warn_if_slower(
                method,
                lambda: model(*args, **kwargs),
                lambda: built(*args, **kwargs),
                type(model).__qualname__,
                weights,
                sizes,
                threads,
            )

    def _key(self, bench: TorchBench, options: SearchOptions, data: object) -> str | None:
        surroundings = (processor_type(), sorted(isa_flags()), usable_cores())
        versions = [(package, installed_version(package)) for package in _PACKAGES]
        if isinstance(data, torch.utils.data.DataLoader):  # its state does not matter
            data = (data.dataset, data.batch_size, type(data.sampler), data.collate_fn)
        measured = (options.latency_sample_num, options.thread_counts, options.batch_sizes)
        plan = (*measured, options.objective, options.direction)
        with bench.session():  # the model's mode does not matter
            return fingerprint(bench.identity(), plan, data, surroundings, versions)

    save = staticmethod(save_model)
    load = staticmethod(load_model)
    get_context = staticmethod(context_of)
    to_multi_instance = staticmethod(to_multi_instance)


def _evaluating(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model if it is in eval mode, else a copy in eval mode that shares parameters."""
    if not any(module.training for module in model.modules()):
        return model
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


class SwitchableModel(torch.nn.Module):
    """Module that can switch between PyTorch and ONNX Runtime for evaluation.

    At first it trains and evaluates the user's module in PyTorch.

    Parameters
    ----------
    model : Module
    quantized : AcceleratedModel
    source : TorchSource, optional
        Source of the quantized model; provides a sample of the input.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        quantized: AcceleratedModel,
        source: TorchSource | None = None,
    ):
        super().__init__()
        self.model = model
        # in a dict, so that they are not submodules
        self._runtimes: dict[str, torch.nn.Module] = {"quantized": quantized}
        self._sample = source.arguments if source is not None and source.has_sample else None
        self._active: str | None = None
        self.training = model.training

    def eval_onnx(self, input_sample: object = None, quantize: bool = False, **kwargs: Any):
        """Switch to ONNX Runtime for all following evaluation.

        Parameters
        ----------
        input_sample : optional
            Sample of the input for ``quantize=False``. The default is the sample that the model was
            quantized with: the one passed then, the model's ``example_input_array``, or the first
            batch of the calibration data.
        quantize : bool
            True for the quantized graph; False for the fp32 graph, which is exported on first use.
        **kwargs
            Arguments of ``InferenceOptimizer.trace``.

        Returns
        -------
        SwitchableModel
            This object.
        """
        if quantize:
            if kwargs:
                raise UsageError(
                    f"{', '.join(map(repr, kwargs))} does not apply to quantize=True, whose graph "
                    "exists already; leave it out",
                    code="argument-conflict",
                    argument=next(iter(kwargs)),
                )
        elif "plain" not in self._runtimes or input_sample is not None or kwargs:
            if input_sample is None and self._sample is not None:
                input_sample, named = self._sample
                kwargs = {"example_kwarg_inputs": named or None, **kwargs}
            self._runtimes["plain"] = InferenceOptimizer.trace(
                self.model, input_sample, accelerator="onnxruntime", **kwargs
            )
        self._active = "quantized" if quantize else "plain"
        super().train(False)
        return self

    def exit_onnx(self):
        """Switch back to PyTorch for evaluation; return this object."""
        self._active = None
        return self

    def train(self, mode: bool = True):
        """Set the mode; training mode switches back to PyTorch."""
        if mode:
            self.exit_onnx()
        return super().train(mode)

    def forward(self, *args, **kwargs):
        """Return the model's output in the active runtime."""
        return (self._runtimes[self._active] if self._active else self.model)(*args, **kwargs)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)
