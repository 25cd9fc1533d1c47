"""A PyTorch model with its data and its metric, for searches and for accuracy goals."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.accuracy import StreamingMetric, as_number, score_function
from bigdl.nano.acceleration.method import ORIGINAL, Method
from bigdl.nano.acceleration.options import AccuracyGoal, BuildOptions, Calibration, JitOptions
from bigdl.nano.acceleration.search.trial import Bench, Candidate
from bigdl.nano.acceleration.structure import flatten
from bigdl.nano.pytorch.inference.accelerated import (
    InferenceContext,
    Settings,
    active_settings,
    context_of,
    settings_of,
)
from bigdl.nano.pytorch.inference.serialization import load_model, save_model
from bigdl.nano.pytorch.inference.source import (
    Batch,
    TorchSource,
    batches_of,
    evaluating,
    rows_of,
    sample_arguments,
    split_batch,
)

__all__ = ["TorchBench", "accuracy_goal", "score_of"]


def accuracy_goal(values: Mapping[str, Any]) -> AccuracyGoal | None:
    """Return the goal of a quantization; None if neither `metric` nor `eval_func` is given.

    Parameters
    ----------
    values : mapping
        Keywords of ``quantize``.

    Raises
    ------
    UsageError
        If the criterion is not of a known form, or stands alone.
    """
    metric, eval_func = values["metric"], values["eval_func"]
    score = None
    if eval_func is not None:
        score = _in_context(lambda model: as_number(eval_func(model)))
    elif metric is not None:
        score = score_of(metric, values["calib_data"])
    return AccuracyGoal.of(
        score, values["accuracy_criterion"], values["max_trials"], values["timeout"]
    )


def score_of(metric: Any, data: Any) -> Callable[[torch.nn.Module], float]:
    """Return a function from a model to its score on data.

    Parameters
    ----------
    metric : torchmetrics.Metric or callable
        A Metric, or a callable with parameters for predictions and targets (names that contain
        "pred" and "target"), is computed on the model's predictions; any other is called as
        ``metric(model, data)``, or as ``metric(model)`` without data.
    data : DataLoader, tuple or None
        Batches with targets.

    Raises
    ------
    UsageError
        If the metric is no callable, or has to have targets and there are no data.
    """
    if not callable(metric):
        raise UsageError(f"metric must be a torchmetrics.Metric or a callable, not {metric!r}")
    streaming = None
    if hasattr(metric, "update") and hasattr(metric, "compute"):
        streaming = StreamingMetric(metric.reset, metric.update, metric.compute)
    return _in_context(
        score_function(
            metric,
            data,
            lambda model: _predictions(model, data),
            streaming=streaming,
            target_words=("target",),
        )
    )


def _predictions(model: torch.nn.Module, data: Any) -> Iterator[tuple[Any, Any, int]]:
    """Yield predictions, targets and the number of rows of each batch."""
    original = getattr(model, "nano_source", None)
    described = original if isinstance(original, torch.nn.Module) else model
    for batch in batches_of(described, data):
        predicted = model(*batch.args, **batch.kwargs)
        if isinstance(predicted, torch.Tensor) and predicted.dtype is torch.bfloat16:
            predicted = predicted.float()
        targets = batch.targets[0] if len(batch.targets) == 1 else batch.targets or None
        yield predicted, targets, rows_of(batch)


def _in_context(score: Callable[[torch.nn.Module], float]) -> Callable[[torch.nn.Module], float]:
    """Return a score that is computed in evaluation mode and within the model's settings."""

    def scored(model: torch.nn.Module) -> float:
        within = context_of(model) if active_settings() is None else nullcontext()
        with evaluating(model), within:
            return score(model)

    return scored


_CALIBRATION_ROWS = 100
_DIFFERENT_BATCHES = 16
"""Batches that are timed in turn where the user does not want one again and again."""


class TorchBench(Bench[Batch]):
    """A module on the bench.

    Of the training data a few batches are taken at once; they are pickled, not the loader.

    Parameters
    ----------
    model : Module
        Not changed.
    methods : mapping of str to Method
    training_data
        A DataLoader, another iterable of batches, or one batch.
    input_sample : optional
        Instead of the first batch.
    validation_data, metric
        See :func:`bigdl.nano.pytorch.inference.bench.score_of`.
    thread_num : int or None
    many_batches : bool
        Whether successive batches are timed instead of the first.
    jit_strict, dynamic_axes, output_tensors
        As of ``InferenceOptimizer.trace``.

    Raises
    ------
    UsageError
        If there is no batch, or the metric does not go with the validation data.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        methods: Mapping[str, Method],
        training_data: Any,
        *,
        input_sample: Any = None,
        validation_data: Any = None,
        metric: Any = None,
        thread_num: int | None = None,
        many_batches: bool = False,
        jit_strict: bool = True,
        dynamic_axes: bool | Mapping = True,
        output_tensors: bool = True,
    ):
        self.model: torch.nn.Module | None = model
        self.methods = dict(methods)
        self.thread_num = thread_num
        self.has_metric = metric is not None
        self._metric = metric
        self._validation_data = _without_workers(validation_data)
        self._threads_of_caller = torch.get_num_threads()
        if self.has_metric:
            score_of(metric, validation_data)  # refuses what does not go together
        count = _DIFFERENT_BATCHES if many_batches else 1
        elements = _first_elements(model, training_data, count)
        self._batches = [split_batch(model, element) for element in elements[:count]]
        if input_sample is not None:
            self._batches = [Batch(*sample_arguments(model, input_sample))]
        if not self._batches:
            args, kwargs = TorchSource(model).arguments  # its example_input_array
            self._batches = [Batch(args, kwargs)]
        self._options = BuildOptions(
            dynamic_axes=dynamic_axes,
            output_tensors=output_tensors,
            jit=JitOptions(strict=jit_strict),
            calibration=Calibration(elements or None, _CALIBRATION_ROWS),
        )

    @cached_property
    def _source(self) -> TorchSource:
        sample = self._batches[0]
        calibration = self._options.calibration.data
        return TorchSource(
            cast("torch.nn.Module", self.model), sample.args, sample.kwargs, calibration
        )

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_source"}

    @contextmanager
    def session(self) -> Iterator[None]:
        if torch.get_num_threads() != self._threads_of_caller:  # in another process
            torch.set_num_threads(self._threads_of_caller)
        with evaluating(cast("torch.nn.Module", self.model)):
            yield

    def build(self, method: Method, threads: int | None) -> Candidate:
        if method.name == ORIGINAL:
            return Candidate(self.model, lambda: InferenceContext(Settings(threads)))
        options = dataclasses.replace(self._options, threads=threads)
        return _candidate(method.build(self._source, options))

    def batches(self, size: int | None = None) -> list[Batch]:
        if size is None:
            return self._batches
        return [_resized(batch, size) for batch in self._batches]

    def rows(self, batch: Batch) -> int:
        return rows_of(batch)

    def call(self, model: Any, batch: Batch) -> Any:
        return model(*batch.args, **batch.kwargs)

    def score(self, candidate: Candidate) -> float:
        with candidate.context():
            return score_of(self._metric, self._validation_data)(candidate.model)

    def save(self, model: Any, directory: Path) -> None:
        save_model(model, directory)

    def load(self, directory: Path) -> Candidate:
        try:
            return _candidate(load_model(directory))
        except UsageError:  # it holds weights only
            return _candidate(load_model(directory, self.model))

    def drop_original(self) -> None:
        self.model = None
        self.__dict__.pop("_source", None)

    def identity(self) -> tuple:
        """Return the values that a fingerprint of the search is made of."""
        batches = [flatten((batch.args, batch.kwargs))[0] for batch in self._batches]
        shapes = [[(str(x.dtype), tuple(x.shape)) for x in batch] for batch in batches]
        options = (self._options.dynamic_axes, self._options.output_tensors, self._options.jit)
        return (
            (self.model, list(self.methods), shapes, self._metric, self._validation_data),
            (self.thread_num, self._threads_of_caller, options),
        )


def _candidate(model: torch.nn.Module) -> Candidate:
    settings = settings_of(model)
    return Candidate(model, lambda: InferenceContext(settings))


def _first_elements(model, data, count) -> list:
    """As many batches as hold the sample for calibration, and at least `count`."""
    if data is None:
        return []
    if isinstance(data, (torch.Tensor, np.ndarray, tuple, Mapping)):
        return [data]
    if not isinstance(data, Iterable):
        raise UsageError(
            "training_data must be a DataLoader, or a batch of it, that is a tensor, a tuple or a "
            f"dict, not a {type(data).__name__}"
        )
    elements, rows = [], 0
    with torch.random.fork_rng(devices=[]):  # a loader that shuffles draws from it
        for element in data:
            elements.append(element)
            rows += rows_of(split_batch(model, element))
            if rows >= _CALIBRATION_ROWS and len(elements) >= count:
                break
    if not elements:
        raise UsageError("training_data holds no batch; give at least one")
    return elements


def _without_workers(data):
    """A loader without the processes that it keeps."""
    if getattr(data, "_iterator", None) is None or not isinstance(
        data, torch.utils.data.DataLoader
    ):
        return data
    data = copy.copy(data)
    data._iterator = None
    return data


def _resized(batch: Batch, size: int) -> Batch:
    """A batch of this many samples: the first of its own, again and again if it has fewer."""
    rows = rows_of(batch)
    leaves, structure = flatten((batch.args, batch.kwargs))
    index = torch.arange(size) % rows
    resized = [
        torch.as_tensor(leaf)[index] if leaf.ndim and len(leaf) == rows else leaf for leaf in leaves
    ]
    args, kwargs = structure.rebuild(resized)
    return Batch(args, kwargs)
