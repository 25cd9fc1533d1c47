"""A Keras model with its data and its metric, for searches and for accuracy goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.accuracy import StreamingMetric, as_number, score_function
from bigdl.nano.acceleration.method import ORIGINAL, Method
from bigdl.nano.acceleration.options import AccuracyGoal, BuildOptions, Calibration
from bigdl.nano.acceleration.search.trial import Bench, Candidate
from bigdl.nano.acceleration.structure import flatten
from bigdl.nano.tf.inference.accelerated import load_model, save_model
from bigdl.nano.tf.inference.source import (
    CallInputs,
    KerasSource,
    batches_of,
    first_rows,
    inference_call,
)
from bigdl.nano.tf.serialization import PackedModel, packed, unpacked

__all__ = ["KerasBench", "accuracy_goal", "score_of"]


_ROWS = 32


def accuracy_goal(values: Mapping[str, Any], source: KerasSource) -> AccuracyGoal | None:
    """Return the goal of a quantization; None if neither `metric` nor `eval_func` is given.

    Parameters
    ----------
    values : mapping
        Keywords of ``quantize``.
    source : KerasSource
        The model's inputs.

    Raises
    ------
    UsageError
        If the criterion is not of a known form, or stands alone.
    """
    metric, eval_func = values["metric"], values["eval_func"]
    score = None
    if eval_func is not None:
        score = _number_of(eval_func)
    elif metric is not None:
        score = score_of(metric, (values["x"], values["y"]), lambda: source.inputs)
    return AccuracyGoal.of(
        score, values["accuracy_criterion"], values["max_trials"], values["timeout"]
    )


def _number_of(eval_func: Callable[[Any], Any]) -> Callable[[Any], float]:
    return lambda model: as_number(eval_func(model))


def score_of(metric: Any, data: Any, inputs: Callable[[], CallInputs]) -> Callable[[Any], float]:
    """Return a function from a model to its score on data.

    Parameters
    ----------
    metric : keras.metrics.Metric or callable
        A Metric, or a callable with parameters for predictions and targets (one name contains
        "pred", another "target", "true" or "label"), is computed on the model's predictions; any
        other is called as ``metric(model, data)``, or as ``metric(model)`` without data.
    data : Dataset, tuple or None
        ``(x, y)`` or a dataset of such pairs.
    inputs : callable
        Returns the model's inputs.

    Raises
    ------
    UsageError
        If the metric is no callable, or has to have targets and the data have none.
    """
    streaming = None
    if isinstance(metric, keras.metrics.Metric):
        streaming = StreamingMetric(
            metric.reset_state,
            lambda predicted, targets: metric.update_state(targets, predicted),
            metric.result,
        )
    elif not callable(metric):
        raise UsageError("metric should be a tf.keras.metrics.Metric or a Callable")
    pair = data if isinstance(data, tuple) else (data, None)

    def predictions(model: Any) -> Iterator[tuple[Any, Any, int]]:
        call_inputs = inputs()
        for batch in batches_of(pair, call_inputs, _ROWS):
            yield model(*call_inputs.pack(batch.arrays)), batch.targets, batch.rows

    return score_function(
        metric,
        data,
        predictions,
        streaming=streaming,
        target_words=("target", "true", "label"),
    )


_CALIBRATION_ROWS = 100


class KerasBench(Bench[list]):
    """A model on the bench.

    What it keeps of the data are ndarrays, so that it can go to another process. There the threads
    of TensorFlow are set before the model is made, which is the only time that they can be.

    Parameters
    ----------
    model : keras.Model
    methods : mapping of str to Method
    x, y
        See :func:`bigdl.nano.tf.inference.source.batches_of`.
    input_spec : optional
    batch_size : int
        Rows of the sample.
    validation_data, metric
        See :func:`bigdl.nano.tf.inference.bench.score_of`.
    thread_num : int or None
    """

    def __init__(
        self,
        model: Any,
        methods: Mapping[str, Method],
        x: Any,
        y: Any = None,
        *,
        input_spec: Any = None,
        batch_size: int = 1,
        validation_data: Any = None,
        metric: Any = None,
        thread_num: int | None = None,
    ):
        self.model: Any = model
        self.methods = dict(methods)
        self.thread_num = thread_num
        self.has_metric = metric is not None
        self._metric = metric
        self._input_spec = input_spec
        source = KerasSource(model, input_spec, x, y)
        self._calibration = first_rows((x, y), source.inputs, _CALIBRATION_ROWS)
        self._sample = first_rows((x, y), source.inputs, batch_size)
        self._inputs = source.inputs
        if self.has_metric:
            score_of(metric, validation_data, lambda: source.inputs)  # refuses what cannot be
        self._validation_data = _picklable(validation_data)

    @cached_property
    def _source(self) -> KerasSource:
        packed_back = self._inputs.pack(self._calibration)
        x = packed_back[0] if len(packed_back) == 1 else packed_back
        return KerasSource(self.model, self._input_spec, x)

    @cached_property
    def _call_original(self) -> Callable:
        return inference_call(self.model)

    def __getstate__(self) -> dict:
        own = ("_source", "_call_original")
        state = {key: value for key, value in self.__dict__.items() if key not in own}
        state["model"] = packed(self.model)
        if isinstance(self._metric, keras.metrics.Metric):
            state["_metric"] = (type(self._metric), self._metric.get_config())
        return state

    def __setstate__(self, state: dict) -> None:
        _limit_threads(state["thread_num"])
        self.__dict__.update(state)
        if isinstance(state["model"], PackedModel):
            self.model = unpacked(state["model"])
        if isinstance(state["_metric"], tuple):
            cls, config = state["_metric"]
            self._metric = cls.from_config(config)

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def build(self, method: Method, threads: int | None) -> Candidate:
        if method.name == ORIGINAL:
            return Candidate(self.model, nullcontext)
        calibration = Calibration(sample_size=_CALIBRATION_ROWS)
        options = BuildOptions(threads=threads, calibration=calibration)
        return Candidate(method.build(self._source, options), nullcontext)

    def batches(self, size: int | None = None) -> list[list]:
        if size is None:
            return [self._inputs.pack(self._sample)]
        index = np.arange(size) % len(self._sample[0])
        return [self._inputs.pack([array[index] for array in self._sample])]

    def rows(self, batch: list) -> int:
        return len(flatten(batch)[0][0])

    def call(self, model: Any, batch: list) -> Any:
        if model is self.model:
            return self._call_original(*batch)
        return model(*batch)

    def score(self, candidate: Candidate) -> float:
        data = self._validation_data
        if isinstance(data, _PickledDataset):
            data = data.dataset()
        return score_of(self._metric, data, lambda: self._inputs)(candidate.model)

    def save(self, model: Any, directory: Path) -> None:
        save_model(model, directory)

    def load(self, directory: Path) -> Candidate:
        return Candidate(load_model(directory), nullcontext)

    def drop_original(self) -> None:
        self.model = None
        for name in ("_source", "_call_original"):
            self.__dict__.pop(name, None)


class _PickledDataset:
    """The elements of a dataset, which can be pickled."""

    def __init__(self, dataset: Any):
        self._spec = dataset.element_spec
        self._elements = list(dataset.as_numpy_iterator())

    def dataset(self) -> Any:
        tf = require("tensorflow", "tf")
        return tf.data.Dataset.from_generator(
            lambda: iter(self._elements), output_signature=self._spec
        )


def _picklable(data: Any) -> Any:
    if hasattr(data, "as_numpy_iterator"):
        return _PickledDataset(data)
    if isinstance(data, tuple):
        leaves, structure = flatten(data)
        return structure.rebuild([np.asarray(leaf) for leaf in leaves])
    return data


def _limit_threads(threads: int | None) -> None:
    """Set TensorFlow's threads in a process that has not used it yet."""
    if threads is None:
        return
    tf = require("tensorflow", "tf")
    with suppress(RuntimeError):  # it is the caller's process, where they stay as they are
        tf.config.threading.set_intra_op_parallelism_threads(threads)
