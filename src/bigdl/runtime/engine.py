"""What an Engine is, in prose.

An **Engine** runs one program on N workers of a cluster at the same time, each with its shard of
the input.  ``fit`` and ``evaluate`` of every Estimator go through it, and ``Engine.run`` is public:

    >>> engine = SparkEngine()                                          # doctest: +SKIP
    >>> engine.run(lambda worker: worker.shard.rows, feed, num_workers=2)   # doctest: +SKIP
    [500, 500]

The life of a job:

1. :meth:`Engine.open` checks what can be known before anything is submitted (free slots, dynamic
   allocation, the input) and prepares the input.  It returns a :class:`Job`.
2. :meth:`Job.attempt` runs the program once on all workers and returns their results, or raises
   the first cause of the failure: :class:`~bigdl.common.errors.UsageError` and
   :class:`~bigdl.common.errors.WorkerError` for what the user's code did,
   :class:`~bigdl.common.errors.WorkerLost` when a process or a host went away.  Only the latter is
   worth another attempt, about which a FailurePolicy decides; a later attempt finds the spooled
   input of the first where it survives.
3. :meth:`Job.close` leaves no process, port, file or persisted frame behind.

A worker never raises into the engine: it returns an *outcome*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

__all__ = ["Engine", "Job", "PeerLost"]


class PeerLost(Exception):
    """Raised in a worker when a collective fails because another worker went away.

    It is a symptom: the engine reports the cause, which another worker or the cluster knows.
    """


class Job(ABC):
    """One program on N workers, run once or, after a WorkerLost, again."""

    @abstractmethod
    def attempt(
        self,
        options: dict | None = None,
        state: bytes | None = None,
        on_event: Callable[[str, Any], None] | None = None,
    ) -> list:
        """Run the program on all workers.

        Parameters
        ----------
        options : dict, optional
            JSON-able; the workers find it as ``worker.options``.
        state : bytes, optional
            For rank 0, as ``worker.state()``; e.g. the weights to start from.
        on_event : callable, optional
            ``on_event(kind, value)`` is called on the driver, in the calling thread, with
            ``("progress", dict)`` and with ``("message", (topic, bytes))`` for what rank 0 sends by
            ``worker.send``.

        Returns
        -------
        list
            What the program returned on rank 0, 1, ..., N-1: bytes or JSON-able values.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Engine(ABC):
    """Runs programs on the workers of a cluster."""

    @abstractmethod
    def open(
        self,
        fn: Callable,
        feed=None,
        num_workers: int | None = None,
        *,
        threads: int | None = None,
        keep_spools: bool = False,
    ) -> Job:
        """Check, prepare the input, and return the job (nothing runs yet)."""

    def run(self, fn: Callable, feed=None, num_workers: int | None = None, **options) -> list:
        """Run ``fn(worker)`` once on every worker and return the results in rank order.

        Parameters
        ----------
        fn : callable
            Takes a :class:`~bigdl.runtime.worker.Worker`; returns bytes or a JSON-able value.
            It is shipped by value, so lambdas and classes of a notebook work.
        feed : Feed, optional
            Its shard is ``worker.shard``.
        num_workers : int, optional
            Default: one per node of the cluster.

        Returns
        -------
        list

        Raises
        ------
        UsageError
            When it cannot be run as asked for, or for bad rows in the input.
        WorkerError
            When `fn` raised: the first worker's own traceback.
        WorkerLost
            When a worker process or its host went away.
        """
        with self.open(fn, feed, num_workers, **options) as job:
            return job.attempt()
