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
    """Spark runs a stage again whose workers still wait for others: no work is lost."""


class StageWatch(ABC):
    """A watch on a stage that runs, which is polled."""

    @abstractmethod
    def poll(self) -> None:
        """Look once."""

    def poll_with(self, poll: Callable[[], None]) -> Callable[[], None]:
        """Look after another has looked."""

        def both():
            poll()
            self.poll()

        return both


class DecommissionWatch(StageWatch):
    """Tells the workers when Spark decommissions an executor of theirs.

    Parameters
    ----------
    line : AttemptChannel
    call : SparkCall
        Which runs the stage.
    """

    def __init__(self, line: AttemptChannel, call: SparkCall):
        self.line, self._call = line, call
        self._next = time.monotonic() + DEPARTURES_LOOK_S
        self._told = False

    def poll(self) -> None:
        """Ask Spark about once a second."""
        if self._told or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + DEPARTURES_LOOK_S
        leaving = self._call.leaving()
        if leaving:
            self._told = True
            logger.info("Spark decommissions executor %s; the state is kept", " and ".join(leaving))
            self.line.set("leave", ",".join(leaving))


class DynamicWorkers(StageWatch):
    """The workers of one attempt, from the driver's view.

    Parameters
    ----------
    line : AttemptChannel
    world_size : int
    patience : float
        Seconds in which another worker must come as long as some are missing.
    has_executors : callable
        Whether the cluster has any; without one nobody can come.
    cancel : callable
        Ends the stage.
    is_first : bool
        Whether no attempt of the job has run before.

    Attributes
    ----------
    failure : BigDLError or None
        Why the gang has ended the stage.
    """

    def __init__(
        self,
        line: AttemptChannel,
        world_size: int,
        patience: float,
        has_executors: Callable[[], bool],
        cancel: Callable[[], None],
        is_first: bool,
    ):
        self.line, self._world_size, self._patience = line, world_size, patience
        self._has_executors, self._cancel, self._is_first = has_executors, cancel, is_first
        self._entries = [f"enter/{place}" for place in range(world_size)]
        self._begin = self._changed = time.monotonic()
        self._came = 0
        self._said = False
        self._lost_at: float | None = None
        self.failure: BigDLError | None = None

    def poll(self) -> None:
        """Look at who has come and who is gone; called again and again while the stage runs."""
        if self.failure is not None:
            self._cancel()  # again: Spark may have been between two jobs
        elif self._came < self._world_size:
            self._await_all()
        if self.failure is None and self._came:
            self._look_for_losses()

    def _await_all(self) -> None:
        now = time.monotonic()
        entered = [self.line.count(key) for key in self._entries if self.line.has(key)]
        came = len(entered)
        if came != self._came:
            self._came, self._changed = came, now
        if came == self._world_size:
            if self._said:
                logger.info("All %d workers have come", came)
            return
        if max(entered, default=0) > 1 and not disconnected(self.line, self._world_size):
            self._end(StageRepeated("Spark runs the stage again before all workers have come"))
            return
        if not came and self._has_executors():  # they compute the input first
            self._changed = now
        if now - self._begin > DYNAMIC_WORKERS_LOG_S and not self._said:
            self._said = True
            logger.info(
                "%d of %d workers have come; the others wait for executors", came, self._world_size
            )
        if now - self._changed > self._patience:
            few = (
                f"{came} of {self._world_size} workers came, and no other within "
                f"{self._patience:g} s"
            )
            cure = (
                "; the cluster has no room for more executors now: ask for fewer workers "
                "(workers_per_node, spark.dynamicAllocation.maxExecutors), or try later"
            )
            self._end(
                UsageError(few + cure, code="resource-limit") if self._is_first else WorkerLost(few)
            )

    def _look_for_losses(self) -> None:
        lost = disconnected(self.line, self._world_size)
        if not lost:
            return
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        elif time.monotonic() - self._lost_at > DYNAMIC_WORKERS_NOTICE_S:
            self._end(worker_lost(workers_at(self.line, lost), *_GONE))

    def _end(self, failure: BigDLError) -> None:
        self.failure = failure
        request_stop(self.line, OTHER_LOST)
        self._cancel()
