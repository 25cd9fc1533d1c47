"""The contract of a Feed.

A **Feed** is an input of any kind (a Spark DataFrame, XShards, a DataLoader, ...) seen as
"N shards of columnar batches".  It is made on the driver by :func:`bigdl.orca.data.feeds.as_feed`
and lives for one call of ``fit``, ``evaluate`` or ``predict``:

1. The Estimator asks the chooser for a Feed and passes it to an Engine.
2. The Engine calls :meth:`Feed.prepare` once, on the driver.  The Feed checks everything that can
   be known before a job is submitted and describes, in the terms of the engine, how N tasks get
   their rows (an :class:`InputPlan`).
3. On every worker the InputPlan's picklable ``reader`` turns what arrives into a
   :class:`~bigdl.runtime.shards.shard.Shard`: columns in memory-mapped files, so that epochs
   2...n do not touch the engine's data path again and memory is the page cache's.

A prediction needs no workers: :meth:`Feed.predict` brings a :class:`RowPredictor` to the rows where
they are, and returns them in the form of the input; :meth:`Feed.sample` brings a
:class:`RowSampler` to some of them.

Promises: every row reaches exactly one worker, once; nothing goes through the driver; equal input
gives an equal order of the rows in every shard, whatever the network did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bigdl.common.errors import UsageError
from bigdl.runtime.cluster import Cluster


class SourceError(UsageError):
    """A fault in the rows themselves (a null, a ragged array), found while they are converted.

    It travels to the driver as text and is raised there as a
    :class:`~bigdl.common.errors.UsageError`.
    """

    code = "data-value"


@dataclass
class InputPlan:
    """The way in which the N tasks of an engine get their rows.

    Attributes
    ----------
    frame : object
        What the engine runs its tasks over; for Spark a DataFrame with exactly N partitions. None
        where the workers get at the rows by themselves.
    reader : callable or None
        None without an input. ``reader(batches, open_spool) -> dict[str, Shard]``; picklable,
        runs in the worker, where ``open_spool(name, specs)`` gives it a
        :class:`~bigdl.runtime.shards.shard.SpoolWriter`, and ``open_spool.rank`` and
        ``open_spool.world_size`` say which worker it is.
    close : callable
        Frees what was persisted for the time of the call; safe to call twice.
    accept : callable, optional
        ``accept(rows)`` says, of the rows of every shard, whether to go on with them.
    otherwise : callable, optional
        ``otherwise()`` makes the InputPlan that is used when `accept` said no.
    settings : dict of str to str
        SQL settings under which the stage over `frame` is planned.
    """

    frame: Any
    reader: Callable[..., Any] | None
    close: Callable[[], None] = field(default=lambda: None)
    accept: Callable[[list[int]], bool] | None = None
    otherwise: Callable[[], InputPlan] | None = None
    settings: dict[str, str] = field(default_factory=dict)


class RowPredictor(Protocol):
    """A model that predicts rows, as a Feed is given it."""

    def predict_frame(self, frame: Any, threads: int) -> Any:
        """Return a DataFrame of Spark with predictions, computed with `threads` in each task."""

    def shard_predictor(self, threads: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """Return a function that yields the shards of a partition with predictions; picklable."""


class RowSampler(Protocol):
    """A taker of some rows of an input, as a Feed is given it.

    Attributes
    ----------
    rows : int
        That it takes at most.
    """

    @property
    def rows(self) -> int: ...

    def take_from_frame(self, frame: Any, partitions: int) -> list[Any]:
        """Return samples of the first partitions of a DataFrame of Spark."""

    def take_from_shards(self, partition: Iterable[Any]) -> Iterator[Any]:
        """Yield the sample of a partition that has rows; picklable."""


def not_predicted(given: str) -> UsageError:
    """Return the error of an input that predictions do not take."""
    return UsageError(
        "Only XShards or Spark DataFrame are supported for predict, besides numpy arrays, "
        "pandas DataFrames and paths of Parquet files, Delta or Iceberg tables, got "
        f"{given}",
        code="data-type",
    )


class Feed(ABC):
    """An input to ``fit``, ``evaluate``, ``predict`` or ``Engine.run``."""

    #: names of the columns given to the model, and of the targets; None where only the shards know
    feature_cols: Sequence[str] | None = ()
    label_cols: Sequence[str] | None = ()
    #: what messages call inputs like this one
    kind: str = "Feed"
    #: what messages call the input itself, e.g. "validation_data"
    name: str | None = None
    #: whether it lies in Spark, which then predicts it whatever the backend is
    is_in_spark: bool = False

    @property
    def version(self) -> Any:
        """The name of the version of the rows, JSON-able, if the input has versions; else None."""
        return None

    @property
    def identity(self) -> Any:
        """The identity of the rows beyond name and version, JSON-able; None if it is unknown."""
        return None

    def at(self, version: Any, identity: Any = None) -> Feed:
        """Return the input at the version of a checkpoint, unless the user asked for another.

        Where the input is another one than that of the checkpoint, a warning says so.
        """
        return self

    def check(self) -> None:  # noqa: B027 - most are checked when they are made
        """Raise a UsageError for rows that fit and evaluate cannot use, if the driver sees them."""

    def check_local(self) -> None:  # noqa: B027 - most inputs can be read anywhere
        """Raise a UsageError if processes that have neither Spark nor Ray cannot read the input."""

    def follow(self, inputs: list[Any] | None) -> None:  # noqa: B027 - the workers cast what they read
        """Convert the features to the dtypes that the model was fitted on, before they are rounded.

        Parameters
        ----------
        inputs : list or None
            Types of the model's inputs, as in ``BatchSource.types``; None if they are not known.
        """

    @abstractmethod
    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        """Check the input and describe how `num_workers` tasks get its rows."""

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> Any:
        """Return the input with predictions, in its own form and order.

        Raises
        ------
        UsageError
            If inputs of this kind cannot be predicted.
        """
        raise not_predicted(self.kind)

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list[Any]:
        """Return samples of the first partitions; none if inputs of this kind have none."""
        return []
