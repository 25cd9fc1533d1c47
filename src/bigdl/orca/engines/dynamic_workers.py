"""Workers that run as ordinary Spark tasks, for clusters with dynamic allocation.

Spark has no barrier stages with dynamic allocation, since it cannot know how many executors will
come.  Ordinary tasks make it start as many executors as they need.  Each task waits at the driver's
channel until all have started.  :class:`DynamicWorkers` watches this and does the work of a
barrier: it ends the stage when too few workers start in time, and when one is lost.  A task that
Spark runs again, after a loss or by speculation, does nothing (see
:func:`bigdl.runtime.task.await_first`).  If Spark repeats a task before all workers have started,
the copy takes the slot of a missing worker: then the stage is ended and run again.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from bigdl.common.errors import BigDLError, UsageError, WorkerLost
from bigdl.common.timeouts import DEPARTURES_LOOK_S, DYNAMIC_WORKERS_LOG_S, DYNAMIC_WORKERS_NOTICE_S
from bigdl.orca.cluster.spark_calls import SparkCall
from bigdl.runtime.channel import AttemptChannel
from bigdl.runtime.jobs import OTHER_LOST, disconnected, request_stop, worker_lost, workers_at

logger = logging.getLogger("bigdl.orca")

_GONE = "its process or its executor went away", "their processes or executors went away"


class StageRepeated(WorkerLost):
    """Raised when Spark repeats a stage before all workers have started; no work is lost."""


class StageWatch(ABC):
    """Base class of monitors that are polled while a stage runs."""

    @abstractmethod
    def poll(self) -> None:
        """Check the stage once."""

    def poll_with(self, poll: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `poll` and then this monitor's :meth:`poll`."""

        def both():
            poll()
            self.poll()

        return both


class DecommissionWatch(StageWatch):
    """Monitor that notifies the workers when Spark decommissions one of their executors.

    Parameters
    ----------
    channel : AttemptChannel
    call : SparkCall
        Spark call that runs the stage.
    """

    def __init__(self, channel: AttemptChannel, call: SparkCall):
        self.channel, self._call = channel, call
        self._next = time.monotonic() + DEPARTURES_LOOK_S
        self._is_notified = False

    def poll(self) -> None:
        """Query Spark for decommissioned executors, about once a second."""
        if self._is_notified or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + DEPARTURES_LOOK_S
        leaving = self._call.leaving()
        if leaving:
            self._is_notified = True
            logger.info("Spark decommissions executor %s; the state is kept", " and ".join(leaving))
            self.channel.set("leave", ",".join(leaving))


class DynamicWorkers(StageWatch):
    """Monitor of one attempt's workers, which run as ordinary tasks.

    Parameters
    ----------
    channel : AttemptChannel
    world_size : int
    patience : float
        Seconds within which the next missing worker must start.
    has_executors : callable
        Returns True if the cluster has an executor, without which no worker can start.
    cancel : callable
        Ends the stage.
    is_first : bool
        True for the first attempt of the job.

    Attributes
    ----------
    failure : BigDLError or None
        Reason for ending the stage.
    """

    def __init__(
        self,
        channel: AttemptChannel,
        world_size: int,
        patience: float,
        has_executors: Callable[[], bool],
        cancel: Callable[[], None],
        is_first: bool,
    ):
        self.channel, self._world_size, self._patience = channel, world_size, patience
        self._has_executors, self._cancel, self._is_first = has_executors, cancel, is_first
        self._entries = [f"enter/{rank}" for rank in range(world_size)]
        self._begin = self._changed = time.monotonic()
        self._started = 0
        self._is_logged = False
        self._lost_at: float | None = None
        self.failure: BigDLError | None = None

    def poll(self) -> None:
        """Check which workers have started and which are lost."""
        if self.failure is not None:
            self._cancel()  # repeated, since Spark may have been between two jobs
        elif self._started < self._world_size:
            self._await_all()
        if self.failure is None and self._started:
            self._look_for_losses()

    def _await_all(self) -> None:
        now = time.monotonic()
        entered = [self.channel.count(key) for key in self._entries if self.channel.has(key)]
        started = len(entered)
        if started != self._started:
            self._started, self._changed = started, now
        if started == self._world_size:
            if self._is_logged:
                logger.info("All %d workers have started", started)
            return
        if max(entered, default=0) > 1 and not disconnected(self.channel, self._world_size):
            self._end(StageRepeated("Spark repeats the stage before all workers have started"))
            return
        if not started and self._has_executors():  # they compute the input first
            self._changed = now
        if now - self._begin > DYNAMIC_WORKERS_LOG_S and not self._is_logged:
            self._is_logged = True
            logger.info(
                "%d of %d workers have started; the others wait for executors",
                started,
                self._world_size,
            )
        if now - self._changed > self._patience:
            few = (
                f"{started} of {self._world_size} workers started, and no other within "
                f"{self._patience:g} s"
            )
            cure = (
                "; the cluster has no room for more executors now: request fewer workers "
                "(workers_per_node, spark.dynamicAllocation.maxExecutors), or try again later"
            )
            self._end(
                UsageError(few + cure, code="resource-limit") if self._is_first else WorkerLost(few)
            )

    def _look_for_losses(self) -> None:
        lost = disconnected(self.channel, self._world_size)
        if not lost:
            return
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        elif time.monotonic() - self._lost_at > DYNAMIC_WORKERS_NOTICE_S:
            self._end(worker_lost(workers_at(self.channel, lost), *_GONE))

    def _end(self, failure: BigDLError) -> None:
        self.failure = failure
        request_stop(self.channel, OTHER_LOST)
        self._cancel()
