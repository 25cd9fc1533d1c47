"""The contract of a Feed.

A **Feed** is an input of any kind (a Spark DataFrame, XShards, a DataLoader, ...) seen as
"N shards of columnar batches".  It is made on the driver by :func:`bigdl.orca.data.feeds.as_feed`
and lives for one call of ``fit`` or ``evaluate``:

1. The Estimator asks the chooser for a Feed and passes it to an Engine.
2. The Engine calls :meth:`Feed.prepare` once, on the driver.  The Feed checks everything that can
   be known before a job is submitted and describes, in the terms of the engine, how N tasks get
   their rows (an :class:`InputPlan`).
3. On every worker the InputPlan's picklable ``reader`` turns what arrives into a
   :class:`~bigdl.runtime.shards.shard.Shard`: columns in memory-mapped files, so that epochs
   2...n do not touch the engine's data path again and memory is the page cache's.

Promises: every row reaches exactly one worker, once; nothing goes through the driver; equal input
gives an equal order of the rows in every shard, whatever the network did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    reader: Callable | None
    close: Callable[[], None] = field(default=lambda: None)
    accept: Callable[[list[int]], bool] | None = None
    otherwise: Callable[[], InputPlan] | None = None
    settings: dict[str, str] = field(default_factory=dict)


class Feed(ABC):
    """An input to ``fit``, ``evaluate`` or ``Engine.run``."""

    #: names of the columns given to the model, and of the targets; None where only the shards know
    feature_cols: Sequence[str] | None = ()
    label_cols: Sequence[str] | None = ()
    #: what messages call inputs like this one
    kind: str = "Feed"
    #: what messages call the input itself, e.g. "validation_data"
    name: str | None = None

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

    def check_local(self) -> None:  # noqa: B027 - most inputs can be read anywhere
        """Raise a UsageError if processes that have neither Spark nor Ray cannot read the input."""

    def follow(self, inputs: list | None) -> None:  # noqa: B027 - the workers cast what they read
        """Convert the features to the dtypes that the model was fitted on, before they are rounded.

        Parameters
        ----------
        inputs : list or None
            Types of the model's inputs, as in ``BatchSource.types``; None if they are not known.
        """

    @abstractmethod
    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        """Check the input and describe how `num_workers` tasks get its rows."""
