"""One trial of a search: build a method's model, run, time, score and save it.

Load, frequency and temperature of the processor change during a search of several minutes. Each
model is therefore timed in rounds of a few calls of the original and a few of the model. Its
speed-up is the median over rounds of the ratio of the two. Calls come in blocks that start with one
warm-up call, so that a model does not pay for caches that the other has filled.
"""

from __future__ import annotations

import abc
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import MissingExtraError, UsageError, one_line
from bigdl.nano.acceleration.agreement import DisagreementError
from bigdl.nano.acceleration.median_interval import MedianInterval
from bigdl.nano.acceleration.method import ORIGINAL, Method, check_threads
from bigdl.nano.acceleration.precision import FP32, PRECISIONS
from bigdl.nano.acceleration.structure import ModelBatch, as_array, flatten, rows_of

_ROUNDS = 10
_WARM_UPS = 2
_PROBES = 3
_FEWEST = 2  # calls in a round
_LEAST = 0.4  # seconds of all rounds at least; less is not reliable on a busy machine
_BUDGET = 10.0  # seconds of all rounds at most
_HOPELESS = 4.0  # times as slow as the original: not timed further
_SETTLING = 0.005  # seconds until a runtime's spinning threads sleep

Block = Callable[[int, float], list[float]]
"""Times at least two and at most `count` calls of a model within `limit` seconds; returns the
seconds of each call."""


class Timing(NamedTuple):
    """Measured latency and speed-up of a model.

    Attributes
    ----------
    latency : MedianInterval
        Milliseconds of a call.
    speedup : MedianInterval
        Speed relative to the original, from pairs of rounds.
    stopped : bool
        True if timing was stopped early because the model is far slower than the original.
    """

    latency: MedianInterval
    speedup: MedianInterval
    stopped: bool = False


def time_against(original: Block, model: Block, runs: int) -> Timing:
    """Time a model against the original in alternating rounds.

    Parameters
    ----------
    original, model : callable
        See :data:`Block`.
    runs : int
        Calls of the model. There are fewer, but at least 20, if they would take more than ten
        seconds, and more if they would take less than 0.4 seconds.
    """
    model(_WARM_UPS, _BUDGET)
    original(1, _BUDGET)
    reference, probe = median(original(_PROBES, _BUDGET)), median(model(_PROBES, _BUDGET))
    if probe > _HOPELESS * reference:
        return Timing(
            MedianInterval.of([1e3 * probe]), MedianInterval.of([reference / probe]), stopped=True
        )
    calls, room = _calls_per_round(runs, reference + probe), _BUDGET / _ROUNDS / 2
    ratios, latencies = [], []
    for number in range(_ROUNDS):
        # the order alternates, so that neither always runs first
        if number % 2:
            reference_s, model_s = original(calls, room), model(calls, room)
        else:
            model_s, reference_s = model(calls, room), original(calls, room)
        ratios.append(median(reference_s) / median(model_s))
        latencies.append(1e3 * median(model_s))
    return Timing(MedianInterval.of(latencies), MedianInterval.of(ratios))


def time_alone(model: Block, runs: int) -> Timing:
    """Time the original model."""
    model(_WARM_UPS, _BUDGET)
    calls = _calls_per_round(runs, median(model(_PROBES, _BUDGET)))
    rounds = [median(model(calls, _BUDGET / _ROUNDS)) for _ in range(_ROUNDS)]
    return Timing(
        MedianInterval.of([1e3 * seconds for seconds in rounds]), MedianInterval.of([1.0])
    )


def block(candidate: Candidate, batches: Sequence[ModelBatch]) -> Block:
    """Return a function that calls a model repeatedly on the batches and times each call."""

    def call(number: int) -> None:
        batch = batches[number % len(batches)]
        candidate.model(*batch.args, **batch.kwargs)

    def run(count: int, limit: float) -> list[float]:
        seconds: list[float] = []
        time.sleep(_SETTLING)
        with candidate.context():
            call(0)
            end = time.perf_counter() + limit
            while len(seconds) < count and (len(seconds) < _FEWEST or time.perf_counter() < end):
                begin = time.perf_counter()
                call(len(seconds))
                seconds.append(time.perf_counter() - begin)
        return seconds

    return run


def _calls_per_round(runs: int, seconds: float) -> int:
    """Return the number of calls per round, given the seconds of one call."""
    wanted = max(math.ceil(runs / _ROUNDS), math.ceil(_LEAST / _ROUNDS / max(seconds, 1e-6)))
    return max(_FEWEST, min(wanted, int(_BUDGET / _ROUNDS / max(seconds, 1e-6))))


@dataclass(frozen=True)
class Candidate:
    """Model to be timed, with its runtime context.

    Attributes
    ----------
    model
        An accelerated model, or the user's.
    context : callable
        Creates the context in which the model runs: thread count and precision.
    """

    model: Any
    context: Callable[[], AbstractContextManager]

    def __call__(self, batch: ModelBatch) -> object:
        with self.context():
            return self.model(*batch.args, **batch.kwargs)


class Bench(abc.ABC):
    """Framework adapter of a search: builds, runs, scores and saves models.

    A bench has the model, a sample of its input, its data and its metric. It is pickled to the
    process that runs the trials. There, each trial calls the other methods inside :meth:`session`.

    Parameters
    ----------
    methods : mapping of str to Method
        The methods to try.
    model
        The user's model.
    thread_num : int or None
        Number of threads of the original during comparisons.
    metric : optional
        See ``optimize``.

    Attributes
    ----------
    has_metric : bool
        True if there is a metric for :meth:`score`.
    library_threads : int
        Threads of the numeric libraries in the process that runs the trials.
    """

    library_threads: int
    _batches: list[ModelBatch]
    """The user's inputs."""
    _source: Any
    """The model and its sample, as methods take it."""
    _options: Any
    """Build options of the methods."""

    def __init__(
        self, methods: Mapping[str, Method], model: Any, thread_num: int | None, metric: Any
    ):
        self.model, self.methods, self.thread_num = model, dict(methods), thread_num
        self._metric, self.has_metric = metric, metric is not None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_source"}

    def session(self) -> AbstractContextManager:
        """Return a context manager for a trial that sets, e.g., threads and the model's mode."""
        return nullcontext()

    @abc.abstractmethod
    def build(self, method: Method, threads: int | None) -> Candidate:
        """Build a method's model."""

    def batches(self, size: int | None = None) -> list[ModelBatch]:
        """Return the batches for timing; with `size`, repeat or drop rows to get that many rows."""
        if size is None:
            return self._batches
        return [self._resized(batch, size) for batch in self._batches]

    def _resized(self, batch: ModelBatch, size: int) -> ModelBatch:
        rows = rows_of(batch)
        leaves, structure = flatten(batch)
        index = np.arange(size) % rows
        return structure.rebuild(
            leaf[index] if leaf.ndim and len(leaf) == rows else leaf for leaf in leaves
        )

    def references(self) -> list[Any]:
        """Return the original's results on several inputs, to determine their typical magnitude."""
        return [probe.expected for probe in self._source.probes(self._options)]

    def alternative(self, batch: ModelBatch) -> object:
        """Return the original's result from an equally valid code path, or None."""
        return None

    @abc.abstractmethod
    def score(self, candidate: Candidate) -> float:
        """Return a model's score by the user's metric."""

    save: ClassVar[Callable[..., None]]
    """Writes an accelerated model to a directory."""

    @abc.abstractmethod
    def load(self, directory: Path) -> Candidate:
        """Load a model that :meth:`save` wrote, without the original if possible."""

    def drop_original(self) -> None:
        """Release the user's model; afterwards this bench only measures loaded models."""
        self.model = None
        vars(self).pop("_source", None)


_DIFFERENCE_TO_REPORT = 0.25


ACCELERATORS = (None, "onnxruntime", "openvino", "jit")
_LISTED = ", ".join(map(repr, PRECISIONS))
_WRONG = {
    "accelerator": "Only support accelerator None, 'onnxruntime', 'openvino' and 'jit'.",
    "precision": "Only support precision " + " and ".join(_LISTED.rsplit(", ", 1)) + ".",
}
_OBJECTIVES = ("latency", "throughput", "memory")


@dataclass(frozen=True)
class SearchOptions:
    """Framework-independent arguments of ``optimize``; see its documentation for their meaning.

    Raises
    ------
    UsageError
        If a value is invalid.
    """

    direction: str = "max"
    thread_num: int | None = None
    accelerator: tuple | None = None
    precision: tuple | None = None
    use_ipex: bool | None = None
    search_mode: str = "default"
    logging: bool = False
    latency_sample_num: int = 100
    includes: Collection[str] | None = None
    excludes: Collection[str] | None = None
    output_filename: str | None = None
    objective: str = "latency"
    batch_sizes: Sequence[int] | None = None
    thread_counts: Sequence[int] | None = None
    time_limit: float | None = None
    memory_limit: int | None = None
    cache: bool = False
    cache_dir: str | os.PathLike | None = None

    def __post_init__(self) -> None:
        if self.direction not in ("min", "max"):
            raise UsageError(
                f"Only support direction 'min', 'max'. {self.direction!r} was given.",
                code="argument-value",
                argument="direction",
                allowed=["min", "max"],
            )
        check_choice("objective", self.objective, _OBJECTIVES)
        check_choice("search_mode", self.search_mode, ("default", "all", "grid", "extended"))
        _check_tuple("accelerator", self.accelerator, ACCELERATORS, "accelerator must be a tuple.")
        # The misspelling is BigDL 2.x's.
        _check_tuple("precision", self.precision, (None, *PRECISIONS), "precison must be a tuple.")
        check_positive("latency_sample_num", self.latency_sample_num)
        check_threads(self.thread_num)
        for name in ("includes", "excludes"):
            if isinstance(getattr(self, name), str):
                raise UsageError(
                    f"{name} must be a list of names of methods, not the string "
                    f"{getattr(self, name)!r}",
                    code="argument-type",
                    argument=name,
                )
        for name in ("batch_sizes", "thread_counts"):
            values = getattr(self, name)
            if values is not None and not (isinstance(values, (list, tuple, range)) and values):
                raise UsageError(
                    f"{name} should be a list of positive integers, got {values!r}",
                    code="argument-type",
                    argument=name,
                )
            for value in values or ():
                check_positive(name, value)


def check_member(name: str, value: object, allowed: tuple) -> None:
    """Raise UsageError for an unknown accelerator or precision."""
    if value not in allowed:
        raise UsageError(
            f"{_WRONG[name]} {value!r} was given.",
            code="argument-value",
            argument=name,
            allowed=list(allowed),
        )


def _check_tuple(name: str, values: object, allowed: tuple, wrong_form: str) -> None:
    if values is None:
        return
    if not isinstance(values, tuple):
        raise UsageError(
            f"{wrong_form} Write {name}=({values!r},) instead of {values!r}.",
            code="argument-type",
            argument=name,
        )
    for value in values:
        check_member(name, value, allowed)


@dataclass(frozen=True)
class LatencyMeasurement:
    """Latency and speed-up of a model for one batch size and thread count.

    Attributes
    ----------
    threads : int or None
        Number of threads; None for the runtime's default.
    batch_size : int
        Samples per call.
    latency : MedianInterval
        Milliseconds of a call.
    speedup : MedianInterval
        Speed relative to the original on the same batch, measured in alternation.
    stopped : bool
        True if timing was stopped early because the model is far slower than the original.
    """

    threads: int | None
    batch_size: int
    latency: MedianInterval
    speedup: MedianInterval
    stopped: bool = False

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Build a LatencyMeasurement from the dict that ``dataclasses.asdict`` and JSON produce."""
        spreads = {name: MedianInterval(*content[name]) for name in ("latency", "speedup")}
        return cls(**{**content, **spreads})


@dataclass
class Trial:
    """Trial of one method: a row of the search results.

    Attributes
    ----------
    method : str
    status : str
        ``"successful"``, ``"early stopped"`` (works, but far slower than the original), ``"lack
        dependency"``, ``"fail to convert"``, ``"differs"`` (converted, but gives other results than
        the original), ``"fail to forward"``, ``"timed out"``, ``"crashed"`` or ``"out of memory"``.
    reason : str
        Reason of the failure in one line.
    stage : str
        Last stage that started: ``"convert"``, ``"forward"``, ``"measure"``, ``"score"`` or
        ``"save"``.
    latency, latency_low, latency_high : float or None
        Measured milliseconds per call: median of the rounds, and its interval.
    speedup, speedup_low, speedup_high : float or None
        Speed relative to the original, measured in alternation: median of the pairs, and its
        interval. It ranks the methods, because the speed of a machine changes during a search.
    throughput : float or None
        Measured samples per second at the best batch size.
    accuracy : float or None
        Score by the user's metric.
    difference : float or None
        Largest deviation from the original's result on the sample, relative to its largest value;
        None if the original is not deterministic.
    memory : float or None
        Megabytes (2**20 bytes) that a fresh process needs to load and run the model.
    threads : int or None
    points : list of LatencyMeasurement
        All measurements.
    saved : bool
        True if the model was saved.
    seconds : float
        Duration of the trial in seconds.
    """

    method: str
    status: str = "successful"
    reason: str = ""
    stage: str = "convert"
    latency: float | None = None
    latency_low: float | None = None
    latency_high: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    throughput: float | None = None
    accuracy: float | None = None
    difference: float | None = None
    memory: float | None = None
    threads: int | None = None
    points: list[LatencyMeasurement] = field(default_factory=list)
    saved: bool = False
    seconds: float = 0.0

    def summarize(self) -> None:
        """Set latency, speed-up and throughput from measurements at the chosen thread count."""
        chosen = [point for point in self.points if point.threads == self.threads]
        first = chosen[0]
        self.latency, self.latency_low, self.latency_high = first.latency
        self.speedup, self.speedup_low, self.speedup_high = first.speedup
        self.throughput = max(1e3 * each.batch_size / each.latency.middle for each in chosen)

    @property
    def latency_spread(self) -> str | None:
        """Latency interval as text."""
        return _range_of(self.latency_low, self.latency_high, ".4g")

    @property
    def speedup_spread(self) -> str | None:
        """Speed-up and its interval as text."""
        spread = _range_of(self.speedup_low, self.speedup_high, ".2f")
        if self.speedup is None or spread is None:
            return None if self.speedup is None else f"{self.speedup:.2f}x"
        return f"{self.speedup:.2f}x ({spread})"

    def relative_throughput(self, original: Trial) -> MedianInterval:
        """Return the highest throughput (samples/s): the original's speed times the speed-up.

        It ranks trials independently of changes of the machine's speed during a search.
        """
        speeds = {p.batch_size: 1e3 * p.batch_size / p.latency.middle for p in original.points}
        spreads = [
            MedianInterval(*(speeds[point.batch_size] * value for value in point.speedup))
            for point in self.points
            if point.threads == self.threads and point.batch_size in speeds
        ]
        return max(spreads)

    @property
    def usable(self) -> bool:
        """True if the trial has produced a model."""
        return self.status in ("successful", "early stopped")


def _difference(result: object, reference: object, others: Sequence[object] = ()) -> float:
    """Return the largest deviation from a reference, relative to the reference's largest value.

    If the values of other samples are larger, the deviation is relative to their median maximum.

    Raises
    ------
    UsageError
        If the number of tensors or a shape differs.
    """
    values, expected = (flatten(each)[0] for each in (result, reference))
    if len(values) != len(expected):
        raise UsageError(
            f"its result holds {len(values)} tensors, the original's {len(expected)}",
            code="model-output",
        )
    largest = [_largest(index, expected, others) for index in range(len(expected))]
    return max(map(_deviation, values, expected, largest), default=0.0)


def _largest(index: int, expected: list, others: Sequence[Any]) -> float:
    """Return the median over samples of one output tensor's largest absolute value."""
    tensors = [expected[index]]
    for each in others:
        leaves = flatten(each)[0]
        if len(leaves) == len(expected):
            tensors.append(leaves[index])
    arrays = [np.abs(np.asarray(as_array(each)).astype(np.float64)) for each in tensors]
    return float(median(each.max(initial=0.0) for each in arrays))


def _deviation(value: object, reference: object, largest: float = 0.0) -> float:
    value, reference = (np.asarray(as_array(x)).astype(np.float64) for x in (value, reference))
    if value.shape != reference.shape:
        raise UsageError(
            f"its result has the shape {value.shape}, the original's {reference.shape}",
            code="model-output",
        )
    if not reference.size:
        return 0.0
    largest = max(largest, float(np.abs(reference).max())) or 1.0
    return float(np.abs(value - reference).max()) / largest


def _range_of(low: float | None, high: float | None, form: str) -> str | None:
    if low is None or high is None or low == high:
        return None
    return f"{low:{form}}-{high:{form}}"


class _Failure(Exception):
    """Raised when a trial fails, with its status and reason."""


def try_method(
    bench: Bench,
    name: str,
    options: SearchOptions,
    directory: Path,
    report_stage: Callable[[str], object] = str,
) -> Trial:
    """Build, run, time, score and save one method's model.

    Parameters
    ----------
    bench : Bench
        The bench, inside its session.
    name : str
        Name of the method.
    options : SearchOptions
        Options of the search.
    directory : Path
        Directory for the model; it does not exist yet.
    report_stage : callable
        Called with the name of each stage when it starts.

    Returns
    -------
    Trial
        The trial, also if the method failed.
    """
    begin = time.monotonic()
    trial = Trial(name)
    try:
        _Attempt(bench, bench.methods[name], options, directory, trial, report_stage).run()
    except _Failure as failure:
        trial.status, trial.reason = failure.args
    trial.seconds = time.monotonic() - begin
    return trial


@dataclass
class _Attempt:
    bench: Bench
    method: Method
    options: SearchOptions
    directory: Path
    trial: Trial
    report_stage: Callable[[str], object]

    def run(self) -> None:
        missing = self.method.missing()
        if missing:
            raise _Failure("lack dependency", missing)
        counts: Sequence[int | None] = self.options.thread_counts or [self.options.thread_num]
        tried = (self._build_and_time(threads) for threads in counts)
        candidate, points = max(tried, key=lambda each: self._rank(each[1]))
        self.trial.threads = points[0].threads
        if all(point.stopped for point in points):
            self.trial.status = "early stopped"
        if self.bench.has_metric:
            with self._stage("score", "fail to forward"):
                self.trial.accuracy = self.bench.score(candidate)
        self.trial.summarize()
        if self.method.name != ORIGINAL:
            self._save(candidate.model)

    def _build_and_time(self, threads) -> tuple[Candidate, list[LatencyMeasurement]]:
        with self._stage("convert", "fail to convert"):
            candidate = self.bench.build(self.method, threads)
        with self._stage("forward", "fail to forward"):
            self._compare(candidate)
        with self._stage("measure", "fail to forward"):
            sizes: Sequence[int | None] = self.options.batch_sizes or [None]
            points = [self._timed(candidate, threads, size) for size in sizes]
        self.trial.points += points
        return candidate, points

    def _compare(self, candidate: Candidate) -> None:
        """Compare a candidate's result on the sample with the original's; raise if it differs."""
        batch = self.bench.batches()[0]
        reference, result = self._original()(batch), candidate(batch)
        if self.method.name == ORIGINAL:
            return
        again = self._original()(batch)
        if not _difference(again, reference) <= FP32.deviation_bound:
            return  # the original is random or not finite: no reference
        others = self.bench.references()
        difference = _difference(result, reference, others)
        other = self.bench.alternative(batch)
        if other is not None:
            difference = min(difference, _difference(result, other, others))
        self.trial.difference = difference
        if not difference <= self.method.precision.deviation_bound:
            raise _Failure("differs", _deviates(difference))
        if difference > _DIFFERENCE_TO_REPORT:
            self.trial.reason = _deviates(difference)

    def _timed(self, candidate, threads, size) -> LatencyMeasurement:
        batches, runs = self.bench.batches(size), self.options.latency_sample_num
        model = block(candidate, batches)
        if self.method.name == ORIGINAL and threads == self.bench.thread_num:
            timing = time_alone(model, runs)
        else:
            timing = time_against(block(self._original(), batches), model, runs)
        return LatencyMeasurement(threads, rows_of(batches[0]), *timing)

    def _rank(self, points: list[LatencyMeasurement]) -> float:
        if self.options.objective == "throughput":
            return max(point.batch_size / point.latency.middle for point in points)
        return points[0].speedup.middle

    def _save(self, model: object) -> None:
        self.trial.stage = "save"
        self.report_stage("save")
        try:
            self.bench.save(model, self.directory)
            self.trial.saved = True
        except Exception as error:  # get_model builds it again
            self.trial.reason = f"cannot be saved: {one_line(error)}"

    def _original(self) -> Candidate:
        return self.bench.build(self.bench.methods[ORIGINAL], self.bench.thread_num)

    @contextmanager
    def _stage(self, stage: str, status: str) -> Iterator[None]:
        self.trial.stage = stage
        self.report_stage(stage)
        try:
            yield
        except _Failure:
            raise
        except MissingExtraError as error:
            raise _Failure("lack dependency", one_line(error)) from error
        except DisagreementError as error:
            raise _Failure("differs", one_line(error)) from error
        except Exception as error:
            if is_out_of_memory(error):
                status = "out of memory"
            raise _Failure(status, one_line(error)) from error


def _deviates(difference: float) -> str:
    return (
        f"its result on the sample differs from the original's by {100 * difference:.3g} % of the "
        "largest value"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception reports lack of memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        part in text for part in ("can't allocate memory", "out of memory", "bad_alloc")
    )
