"""Framework-independent base class of InferenceOptimizer."""

from __future__ import annotations

import abc
import inspect
import time
import warnings
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from bigdl.common.errors import UsageError, as_usage_error, hide_frames, user_stacklevel
from bigdl.common.pages import Page
from bigdl.common.placeholders import resolve_placeholder
from bigdl.common.trust import UntrustedFileError
from bigdl.nano.acceleration.accuracy import AccuracyGoal, AccuracyOptions
from bigdl.nano.acceleration.agreement import build_and_check
from bigdl.nano.acceleration.method import (
    ORIGINAL,
    BuildOptions,
    Method,
    MethodChoice,
    check_applicable,
    check_threads,
    find_method,
    options_from_keywords,
)
from bigdl.nano.acceleration.precision import PRECISIONS, Precision
from bigdl.nano.acceleration.search.isolation import search
from bigdl.nano.acceleration.search.results import (
    Cache,
    Results,
    choose,
    fits,
    render,
    report_page,
    write_chart,
)
from bigdl.nano.acceleration.search.trial import (
    ACCELERATORS,
    Bench,
    SearchOptions,
    Trial,
    check_member,
)
from bigdl.training.progress import items_progress

if TYPE_CHECKING:
    import pandas

    from bigdl.common.types import StrPath

Model = TypeVar("Model")
# Arguments of ``quantize`` that hold the model or select the method.
_SELECTION = {
    *("model", "precision", "accelerator", "approach", "method", "kwargs"),
    *("use_ipex", "channels_last", "calib_dataloader"),
}


class ModelData(Protocol):
    """Protocol of a dataclass with the data arguments of ``quantize`` in one framework."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def source(self, model: Any) -> Any:  # a ModelSource of the framework
        """Return the source of a model, with its calibration data."""


@hide_frames
class BaseInferenceOptimizer(abc.ABC, Generic[Model]):
    """Base class of InferenceOptimizer: builds models by method and searches for the best method.

    A framework's class adds ``trace``, ``quantize``, ``optimize``, ``save`` and ``load``, whose
    signatures have the framework's keywords.
    """

    ALL_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]]

    load: ClassVar[Callable[..., Any]]
    quantize: ClassVar[Callable[..., Any]]

    _framework: ClassVar[str]
    """Name of the framework in the registry."""
    _methods: ClassVar[Mapping[str, Method]]
    """All methods of the framework."""
    _data_class: ClassVar[type[ModelData]]
    _always: ClassVar[frozenset[str]] = frozenset()
    """Framework-specific options that every method accepts."""
    _data_argument: ClassVar[str]
    """Name of the argument of ``optimize`` that holds the inputs."""
    _model_class: ClassVar[type]
    _accelerated_class: ClassVar[type]
    _nouns: ClassVar[tuple[str, str]]
    """Nouns for a model in the two errors of :meth:`_check_model`."""

    _results: Results | None = None
    _bench: Bench
    _models: dict[str, Model]

    @classmethod
    def build(cls, model: Model, method: str, **arguments: Any) -> Model:
        """Apply one registered method to a model.

        Parameters
        ----------
        model
            The original model; it is not changed.
        method : str
            Name in the registry, e.g. ``"openvino_int8_bf16"``.
        **arguments
            Arguments of ``quantize`` that apply to the method.

        Returns
        -------
        model

        Raises
        ------
        UsageError
            See ``quantize``.

        Examples
        --------
        >>> import torch
        >>> from bigdl.nano.pytorch import InferenceOptimizer
        >>> x = torch.tensor([[-1.0, 2.0]])
        >>> fast = InferenceOptimizer.build(torch.nn.ReLU(), "openvino_fp32", input_sample=x)
        >>> with InferenceOptimizer.get_context(fast):
        ...     fast(x)
        tensor([[0., 2.]])
        """
        chosen = find_method(method, cls._framework)
        names = set(inspect.signature(cls.quantize).parameters) - _SELECTION
        conversion = {name: arguments.pop(name) for name in set(arguments) - names}
        return cls._accelerate(
            model,
            chosen,
            MethodChoice(),
            BuildOptions.of(arguments, conversion=conversion),
            options_from_keywords(AccuracyOptions, arguments),
            options_from_keywords(cls._data_class, arguments),
            arguments.get("strict_check", True),
        )

    @classmethod
    def _accelerate(
        cls,
        model: Model,
        method: Method,
        choice: MethodChoice,
        options: BuildOptions,
        accuracy: AccuracyOptions,
        data: ModelData,
        strict: bool = True,
    ) -> Model:
        """Check arguments, build a model, compare it with the original and warn if it is slower."""
        model = resolve_placeholder(model)
        cls._check_model(model, method)
        method.require()
        check_applicable(method, choice, options, accuracy, data, always=cls._always)
        check_threads(options.thread_num)
        source = data.source(model)
        metric, eval_func, samples = accuracy.metric, accuracy.eval_func, source.data
        if eval_func is not None:
            metric, samples = (lambda candidate: eval_func(candidate)), None
        score = None if metric is None else cls._score_of(metric, samples, source)
        options = replace(options, goal=AccuracyGoal.of(score, accuracy))
        strict = strict and method.name != ORIGINAL
        built = cls._accelerated(method, source, options, scored=score is not None, strict=strict)
        cls._compare_speed(method, source, built, options)
        return built

    _accelerated = staticmethod(build_and_check)
    """Builds a method's model from a source and compares it with the original."""

    @classmethod
    @abc.abstractmethod
    def _compare_speed(cls, method: Method, source: Any, built: Any, options: BuildOptions) -> None:
        """Warn if a model in a lower precision is slower than the original on the sample."""

    @classmethod
    def _check_model(cls, model: object, method: Method | None = None) -> None:
        """Raise UsageError if `model` has the wrong type, or is accelerated but must not be."""
        if not isinstance(model, cls._model_class):
            raise UsageError(
                f"model should be a {cls._nouns[0]}. A {type(model).__name__} was given.",
                code="model-type",
            )
        if isinstance(model, cls._accelerated_class) and not cls._takes(model, method):
            raise UsageError(
                f"Expect a {cls._nouns[1]} that is not traced or quantized but got type "
                f"{type(model)}; pass the original model",
                code="model-type",
            )

    @classmethod
    def _takes(cls, model: Any, method: Method | None) -> bool:
        """Return True if a method accepts an accelerated model."""
        return False

    @staticmethod
    @abc.abstractmethod
    def _score_of(metric: Any, data: Any, source: Any) -> Callable[[Any], float]:
        """Return a function that scores a model on data."""

    def summary(self) -> None:
        """Print the table of tried methods.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called.
        """
        print(render(self._searched("optimization result", "summary")))

    def results(self) -> pandas.DataFrame:
        """Return all metrics of the search.

        Returns
        -------
        pandas.DataFrame
            One row per method, indexed by name. Columns: ``status``, ``reason``, ``latency`` (ms)
            and ``speedup`` with their intervals ``…_low`` and ``…_high``, ``throughput``
            (samples/s), ``accuracy``, ``difference`` (relative, from the original's result),
            ``memory`` (MB), ``threads``, ``saved`` and ``seconds``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called.
        """
        return self._searched("optimization result", "results").to_pandas()

    def plot(self, path: StrPath) -> None:
        """Plot the usable methods by latency and accuracy.

        Parameters
        ----------
        path : str or path
            ``.html`` or ``.svg``; with matplotlib installed also its formats, e.g. ``.png``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, or the file cannot be written.
        """
        write_chart(self._searched("optimization result", "plot"), Path(path), self._precisions())

    def report(self, path: StrPath | None = None) -> Page:
        """Report the best method, all tried methods, their durations and the reasons of failures.

        Parameters
        ----------
        path : str or path, optional
            HTML file to write the report to. It needs no other file.

        Returns
        -------
        bigdl.common.pages.Page
            Page that a notebook displays.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, or the file cannot be written.
        """
        results = self._searched("optimization result", "report")
        page = report_page(results, self._precisions())
        if path is not None:
            page.write(path)
        return page

    def _precisions(self) -> dict[str, Precision]:
        """Return the precision of each method."""
        return {name: method.precision for name, method in self._methods.items()}

    @property
    def optimized_model_dict(self) -> Mapping[str, Mapping[str, Any]]:
        """Status, latency (ms), accuracy and model of each tried method.

        Keys of an entry are ``"status"``, ``"latency"``, ``"accuracy"`` and ``"model"``;
        ``"latency_low"`` and ``"latency_high"`` for the interval of the latency; and ``"speedup"``,
        ``"speedup_low"`` and ``"speedup_high"`` relative to the original. The model is loaded on
        first access; it is None if the method failed.
        """
        return {name: _ModelRow(self, trial) for name, trial in (self._results or {}).items()}

    def get_model(self, method_name: str) -> Model:
        """Return the model of a tried method.

        Parameters
        ----------
        method_name : str

        Returns
        -------
        model
            Model ready for inference; the user's model for ``"original"``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, or the method is unknown, was not tried or failed.
        """
        results = self._searched("optimized model", "get_model")
        find_method(method_name, self._framework)
        trial = results.get(method_name)
        if trial is None or not trial.usable:
            why = "it was not tried" if trial is None else f"{trial.status}: {trial.reason}"
            raise UsageError(
                "Unable to get the specified model as it doesn't exist in optimized_model_dict. "
                f"Method {method_name!r}: {why}",
                code="search-failed",
                method=method_name,
            )
        if method_name not in self._models:
            self._models[method_name] = self._loaded(results, trial)
        return self._models[method_name]

    def _best(
        self,
        accelerator: str | None,
        precision: str | None,
        use_ipex: bool | None,
        accuracy_criterion: float | None,
    ) -> tuple[Model, str]:
        """Return the best model with these properties and its method, e.g. "openvino + int8"."""
        results = self._searched("optimized model", "get_best_model")
        check_member("accelerator", accelerator, ACCELERATORS)
        check_member("precision", precision, (None, *PRECISIONS))
        results.check_criterion(accuracy_criterion)
        accelerators = None if accelerator is None else (accelerator,)
        precisions = None if precision is None else (precision,)
        related = [
            name
            for name, trial in results.items()
            if trial.usable and fits(self._methods[name], accelerators, precisions, use_ipex)
        ]
        if not related:
            raise UsageError(
                "Don't find related model in optimize's results.", code="search-failed"
            )
        kept = [name for name in related if results.keeps_accuracy(name, accuracy_criterion)]
        if not kept:
            warnings.warn(
                "No model with these properties keeps the accuracy of the original within "
                f"{accuracy_criterion:.3g} of its value, so the original is returned",
                stacklevel=user_stacklevel(),
            )
        best = results.best(kept) or ORIGINAL
        return self.get_model(best), self._methods[best].option

    def _loaded(self, results: Results, trial: Trial) -> Model:
        if trial.method == ORIGINAL:
            return self._original(trial)
        directory = results.directory / trial.method
        if trial.saved and directory.exists():
            try:
                return type(self).load(directory, self._bench.model, trust=results.is_temporary)
            except UntrustedFileError as error:  # another user wrote to cache_dir
                warnings.warn(f"The model is built again: {error}", stacklevel=user_stacklevel())
        return self._bench.build(self._methods[trial.method], trial.threads).model

    @abc.abstractmethod
    def _original(self, trial: Trial) -> Model:
        """Return the user's model, prepared as ``get_model`` returns it, e.g. in eval mode."""

    def _searched(self, noun: str, caller: str) -> Results:
        if self._results is None:
            raise UsageError(
                f"There is no {noun}. You should call .optimize() before {caller}()",
                code="not-fitted",
            )
        return self._results

    def _to_try(self, options: SearchOptions) -> dict[str, Method]:
        """Return the methods that the search options select."""
        names = choose(self._methods, self.ALL_INFERENCE_ACCELERATION_METHOD, options)
        return {name: self._methods[name] for name in names}

    def _search(self, bench: Bench, options: SearchOptions, data: Any = None) -> None:
        """Run the trials of a bench, keep the results and print their table.

        Parameters
        ----------
        bench : Bench
        options : SearchOptions
        data : optional
            Data from which the bench takes its samples; part of the cache key.
        """
        names = list(bench.methods)
        cache, key = Cache(options.cache_dir), None
        if options.cache or options.cache_dir is not None:
            key = self._key(bench, options, data)
        began = time.monotonic()
        results = cache.find(key) if options.cache else None
        if results is None:
            results = Results([], cache.new_directory(), options.direction, options.objective)
            with closing(items_progress("method", len(names), bar=options.logging)) as progress:

                def show(event: str | Trial) -> None:
                    if isinstance(event, str):
                        progress.begin(event)
                    else:
                        progress.end(event.status)

                trials = search(bench, names, options, results.directory, show)
            self._check_original(trials[0])
            results.update((trial.method, trial) for trial in trials)
            cache.put(key, results)
        else:
            print("Results of an equal search were cached; pass cache=False to search again.")
        self._results, self._bench, self._models = results, bench, {}
        self.summary()
        print(f"Optimization cost {time.monotonic() - began:.1f}s in total.")
        if options.output_filename is not None:
            path = Path(options.output_filename)
            with as_usage_error(
                f"The table cannot be written to {path}",
                text=attrgetter("strerror"),
                code="path-unusable",
                path=str(path),
            ):
                path.write_text(render(results), encoding="utf-8")

    def _key(self, bench: Any, options: SearchOptions, data: Any) -> str | None:
        """Return a digest of everything that affects the results, or None to disable the cache."""
        return None

    def _check_original(self, trial: Trial) -> None:
        if trial.usable:
            return
        if trial.stage == "score":
            raise UsageError(
                "Your metric is incompatible with validation_data, or with the model: "
                f"{trial.reason}; a metric with the parameters pred and target is called with the "
                "model's result and the values after the inputs of a batch, any other with (model, "
                "validation_data)",
                code="metric-unsupported",
            )
        if trial.status == "fail to forward":
            raise UsageError(
                f"{self._data_argument} is incompatible with your model input. {trial.reason}",
                code="model-input",
                argument=self._data_argument,
            )
        raise UsageError(
            f"The original model cannot be run ({trial.status}): {trial.reason}",
            code="model-unsupported",
        )


_SPREADS = tuple(f"{name}{end}" for name in ("latency", "speedup") for end in ("_low", "_high"))
_ROW = ("status", "latency", "accuracy", "speedup", *_SPREADS)


class _ModelRow(UserDict):
    """Entry of ``optimized_model_dict``; loads its model on first access."""

    def __init__(self, optimizer: BaseInferenceOptimizer, trial: Trial):
        super().__init__({key: getattr(trial, key) for key in _ROW})
        self.data["model"] = None
        self._optimizer = optimizer
        self._trial = trial

    def __getitem__(self, key: str) -> Any:
        if key == "model" and self._trial.usable:
            return self._optimizer.get_model(self._trial.method)
        return super().__getitem__(key)
