"""The interface of a Feed, an input that is read as shards of columnar batches.

A **Feed** represents an input of any type (a Spark DataFrame, XShards, a DataLoader, ...) as N
shards of columnar batches.  It is created on the driver by :func:`bigdl.orca.data.feeds.as_feed`
and lives for one call of ``fit``, ``evaluate`` or ``predict``:

1. The Estimator creates a Feed by ``as_feed`` and passes it to an Engine.
2. The Engine calls :meth:`Feed.prepare` once, on the driver.  The Feed checks the input before a
job
   is submitted, and returns an :class:`InputPlan`, which describes how N tasks get their rows.
3. On every worker the InputPlan's picklable ``reader`` converts the arriving data to a
   :class:`~bigdl.runtime.shards.shard.Shard`: columns in memory-mapped files.  So epochs 2...n do
   not use the engine's data path again, and the memory belongs to the page cache.

A prediction needs no workers: :meth:`Feed.predict` applies a :class:`RowPredictor` to the rows in
their location, and returns them in the form of the input.  :meth:`Feed.sample` applies a
:class:`RowSampler` to some of them.

Guarantees: every row reaches exactly one worker, once; no row goes through the driver; equal input
gives an equal row order in every shard, independent of the network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from bigdl.common.errors import UsageError
from bigdl.runtime.cluster import Cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class SourceError(UsageError):
    """Raised when a row value (a null, a ragged array) cannot be converted.

    It is sent to the driver as text and raised there as a
    :class:`~bigdl.common.errors.UsageError`.
    """

    code = "data-value"


@dataclass
class InputPlan:
    """Plan that determines how an engine's tasks read the rows of an input.

    Attributes
    ----------
    frame : object
        Input of the engine's tasks; for Spark a DataFrame with exactly N partitions. None if the
        workers read the rows themselves.
    reader : callable or None
        ``reader(batches, open_spool) -> dict[str, Shard]``, picklable, runs in the worker; None
        without an input. ``open_spool(name, specs)`` returns a
        :class:`~bigdl.runtime.shards.shard.SpoolWriter`; ``open_spool.rank`` and
        ``open_spool.world_size`` identify the worker.
    close : callable
        Releases frames that were persisted for the call; safe to call twice.
    accept : callable, optional
        ``accept(rows)`` returns whether to continue with these row counts of all shards.
    otherwise : callable, optional
        ``otherwise()`` returns the InputPlan to use if `accept` returned False.
    settings : dict of str to str
        SQL settings for planning the stage over `frame`.
    """

    frame: Any
    reader: Callable[..., Any] | None
    close: Callable[[], None] = field(default=lambda: None)
    accept: Callable[[list[int]], bool] | None = None
    otherwise: Callable[[], InputPlan] | None = None
    settings: dict[str, str] = field(default_factory=dict)


class RowPredictor(Protocol):
    """Protocol of a model that predicts the rows of a Feed."""

    def predict_frame(self, frame: DataFrame, threads: int) -> DataFrame:
        """Return a Spark DataFrame with predictions, computed with `threads` threads per task."""

    def shard_predictor(self, threads: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """Return a picklable function that yields a partition's shards with predictions."""


class RowSampler(Protocol):
    """Protocol of an object that takes sample rows from a Feed.

    Attributes
    ----------
    rows : int
        Maximum number of rows to take.
    """

    @property
    def rows(self) -> int: ...

    def take_from_frame(self, frame: DataFrame, partitions: int) -> list[Any]:
        """Return samples of the first partitions of a Spark DataFrame."""

    def take_from_shards(self, partition: Iterable[Any]) -> Iterator[Any]:
        """Yield sample rows of a partition's first non-empty shard; the method is picklable."""


def not_predicted(input_type: str) -> UsageError:
    """Return the error for an input type that ``predict`` does not accept."""
    return UsageError(
        "Only XShards or Spark DataFrame are supported for predict, besides numpy arrays, "
        "pandas DataFrames and paths of Parquet files, Delta or Iceberg tables, got "
        f"{input_type}",
        code="data-type",
    )


class Feed(ABC):
    """Base class of inputs to ``fit``, ``evaluate``, ``predict`` and ``Engine.run``."""

    #: names of the feature columns and the target columns; None if only the shards know them
    feature_cols: Sequence[str] | None = ()
    label_cols: Sequence[str] | None = ()
    #: name of this input type in messages
    kind: str = "Feed"
    #: name of this input in messages, e.g. "validation_data"
    name: str | None = None
    #: whether the rows are in Spark, which then runs predictions for every backend
    is_in_spark: bool = False

    @property
    def version(self) -> object:
        """JSON-serializable version of the rows, or None for an input without versions."""
        return None

    @property
    def identity(self) -> object:
        """JSON value that, with name and version, identifies the rows; None if unknown."""
        return None

    def at(self, version: Any, identity: Any = None) -> Feed:  # identity: JSON values
        """Return the input at a checkpoint's version, unless the user chose another version.

        A warning says if the input is not the checkpoint's input.
        """
        return self

    def check(self) -> None:  # noqa: B027 - most are checked on creation
        """Raise a UsageError if the driver finds rows that ``fit`` and ``evaluate`` cannot use."""

    def check_local(self) -> None:  # noqa: B027 - most inputs can be read anywhere
        """Raise a UsageError if processes without Spark and Ray cannot read the input."""

    def follow(self, inputs: list[Any] | None) -> None:  # noqa: B027 - the workers cast what they read
        """Have workers cast features directly to the model's input dtypes, without rounding first.

        Parameters
        ----------
        inputs : list or None
            Types of the model's inputs, as in ``BatchSource.types``; None if unknown.
        """

    @abstractmethod
    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        """Check the input; return the input plan that distributes rows to `num_workers` tasks."""

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> object:
        """Return the input with predictions, in the same type and row order.

        Raises
        ------
        UsageError
            If this input type cannot be predicted.
        """
        raise not_predicted(self.kind)

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list[Any]:
        """Return samples of the first partitions, or an empty list if there are no partitions."""
        return []
