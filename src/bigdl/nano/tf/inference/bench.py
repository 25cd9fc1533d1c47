"""A Keras model, its data and its metric, as a search sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.options import BuildOptions, Calibration
from bigdl.nano.acceleration.search.bench import Bench, Contestant
from bigdl.nano.acceleration.search.candidates import ORIGINAL
from bigdl.nano.acceleration.structure import flatten
from bigdl.nano.tf.inference.batches import first_rows
from bigdl.nano.tf.inference.goals import score_of
from bigdl.nano.tf.inference.source import KerasSource, inference_call
from bigdl.nano.tf.inference.storage import load_model, save_model
from bigdl.nano.tf.travel import Parcel, packed, unpacked

__all__ = ["KerasBench"]

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
        See :func:`bigdl.nano.tf.inference.batches.batches_of`.
    input_spec : optional
    batch_size : int
        Rows of the sample.
    validation_data, metric
        See :func:`bigdl.nano.tf.inference.goals.score_of`.
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
        self._validation_data = _portable(validation_data)

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
        if isinstance(state["model"], Parcel):
            self.model = unpacked(state["model"])
        if isinstance(state["_metric"], tuple):
            cls, config = state["_metric"]
            self._metric = cls.from_config(config)

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def build(self, method: Method, threads: int | None) -> Contestant:
        if method.name == ORIGINAL:
            return Contestant(self.model, nullcontext)
        calibration = Calibration(sample_size=_CALIBRATION_ROWS)
        options = BuildOptions(threads=threads, calibration=calibration)
        return Contestant(method.build(self._source, options), nullcontext)

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

    def difference(self, result: Any, reference: Any) -> float:
        (values, structure), (expected, own) = flatten(result), flatten(reference)
        if structure != own:
            raise UsageError("its result is nested in another way than the original's")
        return max(map(_deviation, values, expected), default=0.0)

    def score(self, contestant: Contestant) -> float:
        data = self._validation_data
        if isinstance(data, _Elements):
            data = data.dataset()
        return score_of(self._metric, data, lambda: self._inputs)(contestant.model)

    def save(self, model: Any, directory: Path) -> None:
        save_model(model, directory)

    def load(self, directory: Path) -> Contestant:
        return Contestant(load_model(directory), nullcontext)

    def drop_original(self) -> None:
        self.model = None
        for name in ("_source", "_call_original"):
            self.__dict__.pop(name, None)


class _Elements:
    """The elements of a dataset, which can be pickled."""

    def __init__(self, dataset: Any):
        self._spec = dataset.element_spec
        self._elements = list(dataset.as_numpy_iterator())

    def dataset(self) -> Any:
        tf = require("tensorflow", "tf")
        return tf.data.Dataset.from_generator(
            lambda: iter(self._elements), output_signature=self._spec
        )


def _portable(data: Any) -> Any:
    if hasattr(data, "as_numpy_iterator"):
        return _Elements(data)
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


def _deviation(value: Any, reference: Any) -> float:
    value, reference = (np.asarray(each).astype(np.float64) for each in (value, reference))
    if value.shape != reference.shape:
        raise UsageError(
            f"its result has the shape {value.shape}, the original's {reference.shape}"
        )
    if not reference.size:
        return 0.0
    largest = float(np.abs(reference).max())
    return float(np.abs(value - reference).max()) / (largest or 1.0)
