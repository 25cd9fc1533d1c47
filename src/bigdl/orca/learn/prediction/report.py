"""Report of a prediction on Spark: rows per second, durations and repetitions of its partitions."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from bigdl.common.display import call_text
from bigdl.common.errors import UsageError
from bigdl.common.pages import Page
from bigdl.common.platform.network import host_name
from bigdl.common.timeouts import REPORT_WRITE_S
from bigdl.orca.inference.shipping import WrappedModel
from bigdl.training.journal import versions
from bigdl.training.progress import in_words
from bigdl.training.report import named

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext
    from pyspark.accumulators import AccumulatorParam

    from bigdl.orca.inference.shipping import LoadedModel, ShippedModel
    from bigdl.orca.learn.prediction.classes import ShippedClassifier

logger = logging.getLogger("bigdl.orca")

_MAX_SENTENCES = 3
_WORTH_S = 2.0  # a smaller saving needs no advice
_PARTS = {
    "load_s": "loading the model",
    "model_s": "model",
    "other_s": "reading, converting and writing rows",
}


class PartitionRecord(TypedDict):
    """Measurements of one computation of a partition by a task."""

    partition: int
    host: str
    ended_at: float
    rows: int
    load_s: float
    model_s: float
    other_s: float


@dataclass(frozen=True, repr=False)
class PredictionReport:
    """Report of a prediction as a web page that needs no other file; a notebook displays it.

    A prediction of a Spark DataFrame is computed by each action on it, so the report covers the
    tasks that have ended until now.

    Parameters
    ----------
    facts : dict
        Model, backend, type of the input and options, by name.
    records : list of dict
        One for each computation of a partition by a task.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> sc = init_orca_context("local", cores=2)
    >>> df = OrcaContext.get_spark_session().range(100).selectExpr("float(id) AS x")
    >>> estimator = Estimator.from_torch(model=torch.nn.ReLU())
    >>> rows = estimator.predict(df, feature_cols="x", report="predict.html").collect()
    >>> report = estimator.prediction_report()
    >>> report.rows(), report.repeated_rows()
    (100, 0)
    """

    facts: Mapping[str, object]
    records: list[PartitionRecord] = field(default_factory=list)

    def __repr__(self) -> str:
        fields = {"rows": self.rows(), "repeated_rows": self.repeated_rows()}
        return call_text("PredictionReport", {**fields, "advice": self.advice()})

    # -- measurements --------------------------------------------------------------------------

    def rows(self) -> int:
        """Return the number of rows that were predicted, without repetitions."""
        most: dict[int, int] = {}
        for each in self.records:
            most[each["partition"]] = max(most.get(each["partition"], 0), each["rows"])
        return sum(most.values())

    def repeated_rows(self) -> int:
        """Return the number of rows that were predicted again, by another action or a retry."""
        return sum(each["rows"] for each in self.records) - self.rows()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all tasks by part: loading the model, the model, and the rest."""
        return {
            label: sum(each[name] for each in self.records)  # type: ignore[literal-required]
            for name, label in _PARTS.items()
        }

    def advice(self, worth_s: float = _WORTH_S) -> list[str]:
        """Return up to three sentences on how to predict faster, the largest saving first.

        Parameters
        ----------
        worth_s : float
            Smallest saving in seconds that is worth a sentence.

        Returns
        -------
        list of str
            Empty if nothing dominates the time.
        """
        parts, total = self.seconds(), sum(self.seconds().values())
        if not total:
            return []
        load, _, other = parts.values()
        candidates = [*self._advice_on_repetition(total), *self._advice_on_skew()]
        if load >= 0.3 * total:
            text = f"{100 * load / total:.0f} % of the time is loading the model; use larger "
            candidates.append((load, text + "partitions, such as with df.coalesce(n)."))
        if other >= 0.6 * total and self.facts.get("data") == "Spark DataFrame":
            text = (
                f"{100 * other / total:.0f} % of the time is reading, converting and writing rows; "
                "select only the columns that you need, or pass the path of Parquet files, which "
                "the tasks read without the JVM."
            )
            candidates.append((other, text))
        sentences = sorted((each for each in candidates if each[0] >= worth_s), reverse=True)
        return [text for _, text in sentences[:_MAX_SENTENCES]]

    def _advice_on_repetition(self, total: float) -> list[tuple[float, str]]:
        again, rows = self.repeated_rows(), self.rows()
        if again < 0.25 * rows:
            return []
        text = (
            f"{again:,} rows were predicted again, since each action computes the predictions; "
            "write them once, or call cache() on the result."
        )
        return [(total * again / (again + rows), text)]

    def _advice_on_skew(self) -> list[tuple[float, str]]:
        rows = {each["partition"]: each["rows"] for each in self.records}
        if len(rows) < 2:
            return []
        longest = max(self.records, key=_seconds)
        middle = statistics.median(rows.values())
        saved = _seconds(longest) - statistics.median(map(_seconds, self.records))
        if longest["rows"] < 3 * max(middle, 1):
            return []
        text = (
            f"Partition {longest['partition']} has {longest['rows']:,} rows, {middle:,.0f} are "
            "usual; divide the rows evenly with df.repartition(n)."
        )
        return [(saved, text)]

    # -- the page ------------------------------------------------------------------------------

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the report as an HTML file, which replaces an earlier one atomically.

        Parameters
        ----------
        path : str or os.PathLike
            Path or fsspec URL.

        Raises
        ------
        UsageError
            If the file cannot be written.
        """
        self._page().write(path)

    def _repr_html_(self) -> str:
        return self._page().fragment()

    def _page(self) -> Page:
        page = Page(f"Prediction by {named(self.facts.get('model'))}")
        if not self.records:
            page.add_text("No task has ended yet; predictions are computed by actions.")
        else:
            page.add_text(self._summary())
        for sentence in self.advice():
            page.add_text(sentence, "note")
        if self.records:
            page.add_heading("Time of the tasks")
            page.add_bars({"": self.seconds()})
            self._add_hosts(page)
            page.add_heading("Longest partitions")
            longest = sorted(self.records, key=_seconds, reverse=True)[:10]
            names = ("partition", "host", "rows", *(f"{label}, s" for label in _PARTS.values()))
            cells = [
                (r["partition"], r["host"], r["rows"], r["load_s"], r["model_s"], r["other_s"])
                for r in longest
            ]
            page.add_table(names, cells)
        page.add_heading("Settings and versions")
        page.add_table((), [(k, v) for k, v in self.facts.items() if v is not None])
        page.add_table((), list(versions().items()))
        return page

    def _summary(self) -> str:
        """Return a line with rows, repetitions, duration and throughput."""
        began = min(each["ended_at"] - _seconds(each) for each in self.records)
        ended = max(each["ended_at"] for each in self.records)
        computed = sum(each["rows"] for each in self.records)
        parts = [
            f"{self.rows():,} rows in {len({r['partition'] for r in self.records})} partitions",
            f"{self.repeated_rows():,} predicted again",
            f"{in_words(ended - began)} from the first task to the last",
            f"{computed / max(ended - began, 1e-9):,.0f} rows/s",
        ]
        return " · ".join(parts)

    def _add_hosts(self, page: Page) -> None:
        page.add_heading("Hosts")
        rows = []
        for host in sorted({each["host"] for each in self.records}):
            of_host = [each for each in self.records if each["host"] == host]
            count, busy = sum(r["rows"] for r in of_host), sum(map(_seconds, of_host))
            rows.append((host, len(of_host), count, busy, count / max(busy, 1e-9)))
        page.add_table(("host", "tasks", "rows", "seconds of tasks", "rows/s of a task"), rows)


def _seconds(record: PartitionRecord) -> float:
    return record["load_s"] + record["model_s"] + record["other_s"]


# -- measuring ---------------------------------------------------------------------------------


class PredictionWriter:
    """Receiver of the records of ended tasks, which writes the report shortly after each.

    Parameters
    ----------
    report : PredictionReport
    path : str or os.PathLike

    Raises
    ------
    UsageError
        If the file cannot be written.
    """

    def __init__(self, report: PredictionReport, path: str | os.PathLike[str]):
        self.report, self._path = report, path
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        report.write(path)

    def add(self, records: list[PartitionRecord]) -> None:
        """Add records and schedule a write."""
        with self._lock:
            self.report.records.extend(records)
            if self._timer is None:
                self._timer = threading.Timer(REPORT_WRITE_S, self._write)
                self._timer.start()  # not a daemon: a program that ends waits for the last write

    def _write(self) -> None:
        with self._lock:
            self._timer = None
            copy = PredictionReport(self.report.facts, list(self.report.records))
        try:
            copy.write(self._path)
        except UsageError as error:
            logger.warning("%s", error)


class ShippedWithTimer:
    """Shipped model whose tasks report their durations to the driver through an accumulator.

    Parameters
    ----------
    shipped : ShippedModel or another object with its methods
    writer : PredictionWriter
    sc : pyspark.SparkContext
    """

    def __init__(
        self,
        shipped: ShippedModel | ShippedClassifier | ShippedWithTimer,
        writer: PredictionWriter,
        sc: SparkContext,
    ):
        self._shipped = shipped
        self._records = sc.accumulator([], _accumulation(writer))

    @property
    def owner(self) -> object:
        """The SparkContext that broadcast the model."""
        return self._shipped.owner

    def in_task(self, threads: int) -> Callable[[], contextlib.AbstractContextManager[LoadedModel]]:
        """Return a picklable function that loads the model in a task, as ShippedModel does."""
        return functools.partial(_in_task, self._shipped.in_task(threads), self._records)

    def load(self) -> LoadedModel:
        """Load the model on the driver's CPU."""
        return self._shipped.load()


class TimedModel(WrappedModel):
    """A loaded model that measures its calls.

    Parameters
    ----------
    model : LoadedModel
    """

    def __init__(self, model: LoadedModel):
        self.model = model
        self.seconds, self.rows = 0.0, 0

    def __call__(self, batch: list) -> object:
        """Return the outputs of a batch."""
        started = time.perf_counter()
        try:
            return self.model(batch)
        finally:
            self.seconds += time.perf_counter() - started

    def count_rows(self, rows: int) -> None:
        """Count rows whose outputs are complete."""
        self.rows += rows


@contextlib.contextmanager
def _in_task(
    model_of_task: Callable[[], contextlib.AbstractContextManager[LoadedModel]],
    records: Accumulator[list[PartitionRecord]],
) -> Iterator[LoadedModel]:
    from pyspark import TaskContext

    started = time.perf_counter()
    with model_of_task() as model:
        loaded = time.perf_counter()
        timed = TimedModel(model)
        try:
            yield timed
        finally:
            context = TaskContext.get()
            ended = time.perf_counter()
            record: PartitionRecord = {
                "partition": context.partitionId() if context is not None else 0,
                "host": host_name(),
                "ended_at": time.time(),
                "rows": timed.rows,
                "load_s": loaded - started,
                "model_s": timed.seconds,
                "other_s": max(0.0, ended - loaded - timed.seconds),
            }
            records.add([record])


def _accumulation(writer: PredictionWriter) -> AccumulatorParam[list[PartitionRecord]]:
    """Return the AccumulatorParam that passes records to a writer on the driver."""
    from pyspark.accumulators import AccumulatorParam

    class Records(AccumulatorParam[list[PartitionRecord]]):
        """Concatenation of the records; the copy of a task has no writer."""

        def __init__(self, writer: PredictionWriter | None):
            self.writer = writer

        def __reduce__(self) -> tuple[Any, ...]:
            return type(self), (None,)

        def zero(self, value: list[PartitionRecord]) -> list[PartitionRecord]:
            """Return the initial value of a task."""
            return []

        def addInPlace(
            self, value1: list[PartitionRecord], value2: list[PartitionRecord]
        ) -> list[PartitionRecord]:
            """Add records: to those of the task, or on the driver to the report."""
            if self.writer is None:
                return value1 + value2
            self.writer.add(value2)
            return value1

    return Records(writer)
