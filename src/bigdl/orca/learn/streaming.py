"""Training on the micro-batches of a streaming query, each of them exactly once.

A folder contains the checkpoint of Spark's query (``query``) and one folder per trained micro-batch
(``batch-<number>``) with the state of the learner. A micro-batch is committed by renaming its
folder. If the program is killed before, Spark repeats the micro-batch with the same rows, and the
state is that before it. If it is killed after, the repeated micro-batch is skipped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.common.storage import committed_folder
from bigdl.orca.cluster.plan import is_connect
from bigdl.orca.cluster.versions import to_arrow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["StreamLearner", "TrainedBatch", "train_stream"]

logger = logging.getLogger(__name__)

_PROGRESS = "progress.json"
_NAME = re.compile(r"batch-(\d+)")
_OF_KAFKA = ("topic", "partition", "offset")


@dataclass(frozen=True)
class TrainedBatch:
    """Micro-batch that was trained and committed.

    Attributes
    ----------
    number : int
        Number of the micro-batch in the query.
    rows : int
    metrics : dict of str to float
        Result of the learner: metrics of the rows before they are trained on, and of the training.
    folder : str
        Checkpoint that contains the state after the micro-batch.

    Examples
    --------
    >>> from bigdl.orca.learn.streaming import TrainedBatch
    >>> TrainedBatch(3, 100, {"train_loss": 0.5}).rows
    100
    """

    number: int
    rows: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    folder: str = ""


class StreamLearner(ABC):
    """Base class of what a stream trains: updates by rows, and its state as files.

    Examples
    --------
    >>> from bigdl.orca.learn.streaming import StreamLearner
    >>> class Total(StreamLearner):
    ...     value = 0
    ...
    ...     def update(self, rows):
    ...         self.value += sum(rows["x"].to_pylist())
    ...         return {"total": self.value}
    ...
    ...     def save(self, folder):
    ...         (folder / "total.txt").write_text(str(self.value))
    ...
    ...     def load(self, folder):
    ...         self.value = int((folder / "total.txt").read_text())
    >>> Total().value
    0
    """

    @abstractmethod
    def update(self, rows: pa.Table) -> Mapping[str, float]:
        """Train on the rows of a micro-batch; return metrics."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the complete state into an existing folder."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read the state that :meth:`save` wrote."""


def newest_batch(checkpoint_dir: str | os.PathLike) -> TrainedBatch | None:
    """Return the newest committed micro-batch of a folder, or None.

    Parameters
    ----------
    checkpoint_dir : str or path-like
        Folder of :func:`train_stream`.
    """
    numbers = _numbers(Path(checkpoint_dir))
    if not numbers:
        return None
    folder = Path(checkpoint_dir) / f"batch-{numbers[-1]}"
    try:
        content = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
        return TrainedBatch(
            content["number"], content["rows"], content["metrics"], folder=str(folder)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"The checkpoint {folder} cannot be read: {error}",
            code="checkpoint-damaged",
            path=str(folder),
        ) from error


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(each.name) for each in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


class _StreamBatches:
    """Function for ``foreachBatch`` that trains each micro-batch once."""

    def __init__(
        self,
        learner: StreamLearner,
        folder: Path,
        order_by: Sequence[str] | None,
        on_commit: Callable[[TrainedBatch], object] | None,
        keep: int,
    ):
        self._learner, self._folder, self._keep = learner, folder, keep
        self._order_by, self._on_commit = order_by, on_commit
        self._newest = newest_batch(folder)
        if self._newest is not None:
            if not (folder / "query" / "metadata").exists():
                raise UsageError(
                    f"{folder} has trained micro-batches, but the checkpoint of the query, "
                    f"{folder / 'query'}, is missing; restore it, or choose another folder",
                    code="checkpoint-missing",
                    path=str(folder),
                )
            learner.load(Path(self._newest.folder))

    def __call__(self, df: DataFrame, number: int) -> None:
        newest = self._newest
        if newest is not None and number <= newest.number:
            if number == newest.number and self._on_commit is not None:
                self._on_commit(newest)  # the program may have been killed before it
            return
        rows = _ordered(to_arrow(df), self._order_by)
        if not rows.num_rows:
            return
        metrics = {name: float(value) for name, value in self._learner.update(rows).items()}
        self._newest = self._commit(TrainedBatch(number, rows.num_rows, metrics))
        logger.info("micro-batch %s: %s rows, %s", number, rows.num_rows, metrics)
        if self._on_commit is not None:
            self._on_commit(self._newest)
        for old in _numbers(self._folder)[: -self._keep]:
            shutil.rmtree(self._folder / f"batch-{old}", ignore_errors=True)

    def _commit(self, batch: TrainedBatch) -> TrainedBatch:
        folder = self._folder / f"batch-{batch.number}"
        with committed_folder(folder, "The checkpoint") as new:
            self._learner.save(new)
            content = {name: value for name, value in asdict(batch).items() if name != "folder"}
            (new / _PROGRESS).write_text(json.dumps(content), encoding="utf-8")
        return TrainedBatch(batch.number, batch.rows, batch.metrics, str(folder))


def _ordered(rows: pa.Table, order_by: Sequence[str] | None) -> pa.Table:
    """Order rows, because Spark does not repeat a micro-batch in the same order."""
    import pyarrow as pa

    if order_by is None:
        order_by = [name for name in _OF_KAFKA if name in rows.column_names]
        if len(order_by) < len(_OF_KAFKA):
            order_by = [
                name
                for name, each in zip(rows.column_names, rows.schema.types, strict=True)
                if not pa.types.is_nested(each)
            ]
    if missing := [name for name in order_by if name not in rows.column_names]:
        raise UsageError(
            f"The stream has no columns {missing} to order by, only {rows.column_names}",
            code="column-missing",
            columns=missing,
        )
    return rows.sort_by([(name, "ascending") for name in order_by]) if order_by else rows


def train_stream(
    data: DataFrame,
    learner: StreamLearner,
    checkpoint_dir: str | os.PathLike,
    *,
    order_by: Sequence[str] | None = None,
    trigger_s: float | None = None,
    available_now: bool = False,
    on_commit: Callable[[TrainedBatch], object] | None = None,
    keep: int = 2,
) -> StreamingQuery:
    """Start a query that trains a learner on a stream.

    The rows of a micro-batch are collected to the driver; bound its size by an option of the
    source, such as ``most_records`` of ``read_kafka`` or ``maxFilesPerTrigger``.

    Parameters
    ----------
    data : pyspark.sql.DataFrame
        Streaming DataFrame.
    learner : StreamLearner
    checkpoint_dir : str or path-like
        Local folder. A query that starts with an existing folder continues from it: the learner
        loads the newest state, and each row of the stream is trained exactly once.
    order_by : sequence of str, optional
        Columns by which the rows of a micro-batch are ordered. Default: topic, partition and offset
        of Kafka, or all columns that are not nested.
    trigger_s : float, optional
        Seconds between the starts of two micro-batches. Default: immediately after the last one.
    available_now : bool, default False
        Train on the available rows, and stop.
    on_commit : callable, optional
        Called with each TrainedBatch after its commit, for example to publish the model. It is
        called again for the newest one after a restart, so calling it twice should be harmless.
    keep : int, default 2
        Number of checkpoints to keep.

    Returns
    -------
    pyspark.sql.streaming.StreamingQuery

    Raises
    ------
    UsageError
        If the DataFrame is not a stream, or the folder cannot be used.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.streaming import StreamLearner, train_stream
    >>> class Total(StreamLearner):
    ...     value = 0
    ...
    ...     def update(self, rows):
    ...         self.value += sum(rows["x"].to_pylist())
    ...         return {"total": self.value}
    ...
    ...     def save(self, folder):
    ...         (folder / "total.txt").write_text(str(self.value))
    ...
    ...     def load(self, folder):
    ...         self.value = int((folder / "total.txt").read_text())
    >>> sc = init_orca_context("local", cores=2)
    >>> spark = OrcaContext.get_spark_session()
    >>> spark.range(4).withColumnRenamed("id", "x").write.mode("overwrite").parquet("numbers")
    >>> rows = spark.readStream.schema("x long").parquet("numbers")
    >>> learner = Total()
    >>> query = train_stream(rows, learner, "trained", available_now=True)
    >>> query.awaitTermination()
    >>> learner.value
    6
    """
    if not getattr(data, "isStreaming", False):
        raise UsageError(
            "data should be a streaming DataFrame, such as read_kafka or spark.readStream returns; "
            "use fit for other data",
            code="data-type",
            argument="data",
        )
    if is_connect(data):
        raise UsageError(
            "A stream trains in the driver program, which Spark Connect does not support; use a "
            "classic Spark session",
            code="unsupported",
            argument="data",
        )
    if available_now and trigger_s is not None:
        raise UsageError(
            "Pass trigger_s= or available_now=, not both",
            code="argument-conflict",
            argument="trigger_s",
        )
    if trigger_s is not None:
        check_number("trigger_s", trigger_s, above=0)
    check_integer("keep", keep, 1)
    folder = Path(checkpoint_dir)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
    batches = _StreamBatches(learner, folder, order_by, on_commit, keep)
    writer: Any = data.writeStream.foreachBatch(batches)
    writer = writer.option("checkpointLocation", str(folder / "query"))
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif trigger_s is not None:
        writer = writer.trigger(processingTime=f"{round(1000 * trigger_s)} milliseconds")
    query: StreamingQuery = writer.start()
    return query
