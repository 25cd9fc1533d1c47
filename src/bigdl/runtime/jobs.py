"""The driver's side of a job, for all engines.

A :class:`Job` has a number and a program that is pickled by value.  Each attempt has a view of the
driver's channel.  An :class:`AttemptMonitor` processes the workers' messages.  :class:`WorkerCalls`
runs an attempt if the workers are processes that can be called.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, cast

from bigdl.common.errors import BigDLError, JobStopped, UsageError, WorkerError, WorkerLost
from bigdl.common.timeouts import (
    DRIVER_LOOK_S,
    ERROR_GRACE_S,
    LOSS_NOTICE_S,
    STAGE_LEAVE_S,
    WORKERS_END_S,
)
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.channel import AttemptChannel, Channel, QueueReader
from bigdl.runtime.engine import Engine, PeerLost, user_import_path
from bigdl.runtime.recovery import RecoveryMonitor
from bigdl.runtime.serialization import pickled_by_value
from bigdl.runtime.shards.feed import Feed, InputPlan
from bigdl.runtime.task import TaskSpec
from bigdl.runtime.worker import decode

_attempts: list[AttemptChannel] = []  # of all running jobs
_numbers = itertools.count()
_active: set[int] = set()


@contextlib.contextmanager
def job_number() -> Iterator[int]:
    """Context manager that yields a new job number and keeps the job's spools until it exits."""
    number = next(_numbers)
    _active.add(number)
    try:
        yield number
    finally:
        _active.discard(number)


def active_jobs() -> tuple[int, ...]:
    """Return the numbers of the jobs whose spools are in use."""
    return tuple(sorted(_active))


def active_attempts() -> list[AttemptChannel]:
    """Return the channels of the running attempts of all jobs of this process."""
    return list(_attempts)


class NoRows(UsageError):
    """Raised when the input of a job has no rows."""

    code = "data-empty"


class WorkersRelocated(WorkerLost):
    """Raised when all workers saved their state because a machine is decommissioned."""


class DriverUnreachable(UsageError):
    """Raised when workers cannot open a connection to the driver."""

    code = "cluster-unreachable"


def user_error(doc: dict[str, Any]) -> BigDLError:
    """Convert a worker's error report to the exception to raise on the driver."""
    if doc["usage"]:
        return UsageError(doc["message"], code=doc["code"], **doc["facts"])
    return WorkerError(doc["rank"], doc["kind"], doc["traceback"])


def worker_lost(
    unfinished: list[dict[str, Any]], reason: str, reason_of_several: str = ""
) -> WorkerLost:
    """Return a WorkerLost error that names the known lost workers and the reason for the loss."""
    if not unfinished:
        return WorkerLost(f"A worker was lost: {reason}")
    who = " and ".join(f"{w['rank']} (process {w['pid']} on {w['host']})" for w in unfinished[:3])
    if len(unfinished) == 1:
        return WorkerLost(f"Worker {who} was lost: {reason}")
    if len(unfinished) > 3:
        who += f" and {len(unfinished) - 3} more"
    return WorkerLost(f"Workers {who} were lost: {reason_of_several or reason}")


logger = logging.getLogger("bigdl.orca")

OnEvent = Callable[[str, Any], None]


OTHER_FAILED = "another worker failed"
OTHER_LOST = "another worker was lost"
BY_DRIVER = "stopped by the driver"


def request_stop(channel: AttemptChannel, reason: str) -> None:
    """Request that all workers of an attempt stop, unless this was already requested."""
    if not channel.has("abort"):
        channel.set("abort", reason)


def raise_if_stopped(channel: AttemptChannel) -> None:
    """Raise JobStopped if anyone other than the engine requested that the workers stop.

    Raises
    ------
    JobStopped
    """
    reason = channel.get("abort").decode(errors="replace") if channel.has("abort") else OTHER_FAILED
    if reason not in (OTHER_FAILED, OTHER_LOST, BY_DRIVER):
        raise JobStopped(f"The job was stopped: {reason or 'no reason was given'}")


PYSPARK_CONTEXT = "pyspark.core.context", "pyspark.context"
"""Modules that define PySpark's handler of Ctrl-C, since 4.0 and before."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context manager that makes Ctrl-C raise KeyboardInterrupt and bypass PySpark's handler.

    PySpark's handler cancels every job of the application from inside the main thread's current
    call. Handlers of other programs stay.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if getattr(handler, "__module__", None) not in PYSPARK_CONTEXT:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class AttemptMonitor:
    """The driver's monitor of the workers of one attempt.

    Parameters
    ----------
    channel : AttemptChannel
    cancel : callable
        Ends the running workers.
    on_event : callable, optional
        See :meth:`Job.attempt`.

    Attributes
    ----------
    errors : list of dict
        Error reports of the workers.
    """

    def __init__(
        self, channel: AttemptChannel, cancel: Callable[[], None], on_event: OnEvent | None
    ):
        self._channel, self._cancel = channel, cancel
        self._on_event = on_event or (lambda event, value: None)
        self.errors: list[dict[str, Any]] = []
        self._logs, self._errors = QueueReader(channel, "logs"), QueueReader(channel, "errors")
        self._messages = QueueReader(channel, "messages", data=True)
        self._failed_at: float | None = None
        self._shown = self._phase = None

    def poll(self, *, final: bool = False) -> None:
        """Process new messages, progress, logs and errors; stop all workers after a failure."""
        for doc, _ in self._logs.take(final=final):
            for text in doc["lines"]:
                print(f"[worker {doc['rank']}] {text}", flush=True)
        for message in self._messages.take(final=final):
            self._on_event("message", message)
        if self._shown is None and self._channel.has("phase/0"):
            phase = self._channel.get_json("phase/0")
            if phase != self._phase:
                self._phase = phase
                self._on_event("phase", phase)
        if self._channel.has("progress/0"):
            progress = self._channel.get_json("progress/0")
            if progress != self._shown:
                self._shown = progress
                self._on_event("progress", progress)
        self.errors += [doc for doc, _ in self._errors.take(final=final)]
        if not final:
            self._stop_others()

    def _stop_others(self) -> None:
        """Stop the remaining workers when a grace period has passed since the first failure."""
        if self._failed_at is None and self._channel.count("failed"):
            self._failed_at = time.monotonic()
        if self._failed_at is None:
            return
        waited = time.monotonic() - self._failed_at
        if waited > ERROR_GRACE_S:
            request_stop(self._channel, OTHER_FAILED)
        # A worker whose native code holds the GIL cannot notice the stop request.
        if waited > 2 * ERROR_GRACE_S:
            self._cancel()
            self._failed_at = float("inf")

    @property
    def first_error(self) -> dict[str, Any] | None:
        """Error report of the worker that failed first, the cause of the other failures."""
        return min(self.errors, key=lambda doc: doc["order"], default=None)


def await_survivors(channel: AttemptChannel, world_size: int) -> None:
    """Wait until the surviving workers of a failed stage have ended their tasks."""
    end = time.monotonic() + STAGE_LEAVE_S
    while (remaining := unfinished(channel, world_size)) and time.monotonic() < end:
        if len(remaining) == 1:
            end = min(end, time.monotonic() + 0.3)
        time.sleep(DRIVER_LOOK_S)


def disconnected(channel: AttemptChannel, world_size: int) -> list[int]:
    """Return the task indices of workers that disconnected before their tasks ended."""
    return [
        p for p in range(world_size) if channel.has(f"gone/{p}") and not channel.has(f"left/{p}")
    ]


def unfinished(channel: AttemptChannel, world_size: int) -> list[dict[str, Any]]:
    """Return the rank, pid and host of the workers that started but did not finish."""
    return workers_at(channel, [p for p in range(world_size) if not channel.has(f"left/{p}")])


def running_workers(channel: AttemptChannel) -> dict[int, dict[str, Any]]:
    """Return the rank, pid and host of the connected workers of an attempt, by task index."""
    workers: dict[int, dict[str, Any]] = {}
    for index in itertools.count():
        if not channel.has(f"who/{index}"):
            return workers
        if not channel.has(f"gone/{index}") and not channel.has(f"left/{index}"):
            workers[index] = channel.get_json(f"who/{index}")
    return workers


def workers_at(channel: AttemptChannel, task_indices: Iterable[int]) -> list[dict[str, Any]]:
    """Return the known rank, pid and host of the workers with the given task indices."""
    keys = [f"who/{index}" for index in task_indices]
    return [channel.get_json(key) for key in keys if channel.has(key)]


PROCESS_ENDED = (
    "its Python process ended unexpectedly",
    "their Python processes ended unexpectedly",
)
"""Reason for the loss of one worker, and of several workers."""


DISCONNECTED = "its connections were lost", "their connections were lost"


class Job(contextlib.AbstractContextManager[Any, None]):
    """A program on several workers, which runs in one or more attempts.

    Every attempt has a view of the channel, which carries its options and state.  When all workers
    of an attempt have ended, an engine's job calls :meth:`_answers`.  If results are missing, the
    job determines the reason.  Another attempt may follow a WorkerLost.

    Parameters
    ----------
    engine : Engine
    fn, feed, num_workers, threads, keep_spools
        See :meth:`~bigdl.runtime.engine.Engine.open`.

    Examples
    --------
    >>> from bigdl.orca.engine import LocalEngine
    >>> def add(worker):
    ...     return worker.options["start"] + worker.rank
    >>> with LocalEngine().open(add, num_workers=2) as job:  # the same program, run twice
    ...     [job.attempt({"start": start}) for start in (10, 20)]
    [[10, 11], [20, 21]]
    """

    def __init__(
        self,
        engine: Engine,
        fn: Callable[..., Any],
        feed: Feed | None,
        num_workers: int,
        threads: int,
        keep_spools: bool,
    ):
        self.num_workers = num_workers
        self._engine: Any = engine
        self._feed = feed
        self._attempts = 0
        self._on_loss: Callable[[WorkerLost], bool] | None = None
        self._spools: list[dict[str, Any]] | None = None  # by rank; None until all are known
        self._resources = contextlib.ExitStack()
        self._input_plan = InputPlan(None, None)
        if not callable(fn):
            raise UsageError(
                f"fn should be a function of a worker, got {type(fn).__name__}",
                code="argument-type",
                argument="fn",
            )
        failure = "The program cannot be shipped to the workers"
        program = pickled_by_value(fn, failure, "create such objects inside the function instead")
        try:
            number = self._resources.enter_context(job_number())
            self._resources.callback(lambda: self._input_plan.close())
            self._input_plan = self._input()
            self._certificate = Certificate.make() if engine.is_encrypted else None
            self.channel = self._open_channel()
            self._resources.callback(self.channel.close)
            self._resources.callback(self._remove_spools)
            self.spec = TaskSpec(
                address=self.channel.address,
                job=number,
                active_jobs=active_jobs(),
                world_size=num_workers,
                threads=threads,
                timeout=engine.timeout,
                drops_output=engine.drops_output,
                log_to_driver=engine.log_to_driver,
                import_path=tuple(user_import_path()),
                program=program,
                secret=self.channel.address.secret,
                may_leave=engine.may_leave,
                certificate=self._certificate,
                are_collectives_clear=os.environ.get("BIGDL_CLEAR_COLLECTIVES") == "1",
                keep_spools=keep_spools,
                imports_torch=getattr(fn, "imports_torch", True),
                **self._input_fields(),
            )
        except BaseException:
            self.close()
            raise

    def _open_channel(self) -> Channel:
        engine = self._engine
        return Channel(engine.cluster.driver_host, engine.port, None, self._certificate)

    def _input(self) -> InputPlan:
        """Return the input plan that distributes the input rows to the workers."""
        if self._feed is None:
            return InputPlan(None, None)
        return cast("InputPlan", self._engine.prepare(self._feed, self.num_workers))

    def _read_again(self, prepare: Callable[[], InputPlan] | None = None) -> None:
        """Make the next attempt reread the input, with a new input plan from `prepare` if given."""
        self._spools = None
        if prepare is None:
            logger.info("The spooled input is missing; the input is read again")
        else:
            self._input_plan.close()
            self._input_plan = prepare()
            self.spec = replace(self.spec, world_size=self.num_workers, **self._input_fields())

    def _input_fields(self) -> dict[str, Any]:
        """Return the fields of a TaskSpec that depend on the input."""
        plan = self._input_plan
        # only a frame assigns rows to tasks
        by_host = self._engine.cluster_places_tasks and plan.frame is None
        return {"reader": plan.reader, "accept": plan.accept, "by_host": by_host}

    def _next_spec(self) -> TaskSpec:
        """Return the next attempt's TaskSpec, which reads existing spools or the input."""
        if self._spools is None:
            return self.spec
        return replace(self.spec, reader=None, accept=None, spools=tuple(self._spools))

    def attempt(
        self,
        options: dict[str, Any] | None = None,
        state: bytes | None = None,
        on_event: OnEvent | None = None,
        *,
        before: Callable[[AttemptChannel], None] | None = None,
        on_loss: Callable[[WorkerLost], bool] | None = None,
    ) -> list[Any]:
        """Run the program once on all workers and return their results.

        Parameters
        ----------
        options : dict, optional
            JSON-serializable options, available to the workers as ``worker.options``.
        state : bytes, optional
            Bytes for rank 0, available as ``worker.state()``; e.g. initial weights.
        on_event : callable, optional
            ``on_event(event, value)`` is called on the driver, in the calling thread, with
            ``("progress", dict)``, with ``("message", (dict, bytes))`` for each message of
            ``worker.send``, and with ``("phase", str)`` for the phases of rank 0 before its first
            progress; for independent workers also with ``("poll", None)``.
        before : callable, optional
            Called with the attempt's channel before the workers start.
        on_loss : callable, optional
            ``on_loss(error)`` is called when a worker is lost that could be replaced while the
            others continue, or a collective has failed without a loss; returns False to end the
            attempt instead. If the attempt ends after all, its WorkerLost has ``is_counted``.

        Returns
        -------
        list
            Results of rank 0, 1, ..., N-1: bytes or JSON-serializable values.
        """
        while True:
            self._attempts += 1
            channel = self.channel.attempt(self._attempts)
            channel.set_json("options", options or {})
            if state is not None:
                channel.put_bytes("state", state)
            if before is not None:
                before(channel)
            self._on_loss = on_loss
            _attempts.append(channel)
            try:
                results = self._attempt(channel, on_event, options or {}, state)
            finally:
                _attempts.remove(channel)
            if results is not None:
                return results

    @abstractmethod
    def _attempt(
        self,
        channel: AttemptChannel,
        on_event: OnEvent | None,
        options: dict[str, Any],
        state: bytes | None,
    ) -> list[Any] | None:
        """Return the results in rank order; None if the input must be read again."""

    def close(self) -> None:
        """Close the channel and remove the spools of the job; safe to call twice."""
        self._resources.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, channel: AttemptChannel, watch: AttemptMonitor) -> list[Any] | None:
        """Return the results of all workers in rank order; None if a result is missing.

        Raises
        ------
        UsageError, WorkerError
            The first error that a worker reported.
        JobStopped
            If the end of the workers was requested.
        """
        ranks = range(self.num_workers)
        watch.poll(final=True)
        channel.delete_bytes("state")
        if self._spools is None and self._feed is not None:
            spools = self._spools_of(channel)
            if len(spools) == self.num_workers:
                self._spools = [spools[rank] for rank in ranks]
        if watch.first_error is not None:
            raise user_error(watch.first_error) from None
        if not channel.has(*(f"result/{rank}/kind" for rank in ranks)):
            raise_if_stopped(channel)
            return None
        return [
            decode(
                channel.get(f"result/{rank}/kind").decode(), channel.take_bytes(f"result/{rank}")
            )
            for rank in ranks
        ]

    def _polls(self, watch: AttemptMonitor, on_event: OnEvent | None) -> Callable[[], None]:
        """Return the function to call repeatedly until the attempt's workers have ended."""
        poll = self._poll(watch)
        if on_event is None or not self.spec.is_independent:
            return poll

        def both() -> None:
            poll()
            on_event("poll", None)

        return both

    def _poll(self, watch: AttemptMonitor) -> Callable[[], None]:
        """Return the function that checks the running workers."""
        return watch.poll

    def _end_independent(self, watch: AttemptMonitor) -> None:
        """Process the last messages of independent workers; raise the first reported error."""
        watch.poll(final=True)
        if watch.first_error is not None:
            raise user_error(watch.first_error) from None

    def _spools_of(self, channel: AttemptChannel) -> dict[int, dict[str, Any]]:
        """Return the spools that the workers of one attempt wrote, by rank."""
        keys = {rank: f"spool/{rank}" for rank in range(self.num_workers)}
        return {rank: channel.get_json(key) for rank, key in keys.items() if channel.has(key)}

    def _remove_spools(self) -> None:
        """Remove the remaining spools on this machine; workers elsewhere remove theirs."""
        from bigdl.runtime.shards.shard import remove_spool

        with contextlib.suppress(Exception):
            for channel in self.channel.attempts:
                for spools in self._spools_of(channel).values():
                    for spool in spools.values():
                        remove_spool(spool["path"])


StartReplacement = Callable[
    [int, int, int], tuple["Future[tuple[int, str, str]]", Callable[[], None]]
]
"""Starts a replacement; see :meth:`WorkerCalls.recover_with`."""


class WorkerCalls(contextlib.AbstractContextManager["WorkerCalls", None]):
    """Context manager that calls every worker process of an attempt once.

    Workers that have not returned at the end of the block are killed.

    Parameters
    ----------
    channel : AttemptChannel
    calls : sequence of concurrent.futures.Future
        Futures of :func:`~bigdl.runtime.task.execute` on the worker of each task.
    kills : sequence of callable
        Functions that kill the process of each task.
    death : type of exception
        Exception of a call whose process died.

    Attributes
    ----------
    outcomes : dict of int to tuple
        Results of the calls by task index.
    lost : dict of int to exception
        Exceptions of the dead workers by task index.
    """

    def __init__(
        self,
        channel: AttemptChannel,
        calls: Sequence[Future[tuple[int, str, str]]],
        kills: Sequence[Callable[[], None]],
        death: type[Exception],
    ):
        self._channel, self._kills, self._death = channel, kills, death
        self._running = {call: task_index for task_index, call in enumerate(calls)}
        self.outcomes: dict[int, tuple[int, str, str]] = {}
        self.lost: dict[int, BaseException] = {}
        self.are_independent = False
        self._recovery: RecoveryMonitor | None = None
        self._start: StartReplacement | None = None
        self._replaced: dict[int, int] = {}  # rank of each replacement, by its task index
        self._accepted: dict[int, BaseException] = {}  # the latest loss that was accepted
        self._accepted_in: int | None = None  # and the number of its group
        self._counted: set[int] = set()  # all losses that were accepted

    def recover_with(
        self,
        recovery: RecoveryMonitor,
        start: StartReplacement,
        is_replaceable: Callable[[BaseException], bool],
    ) -> None:
        """Replace lost workers while the others run.

        Parameters
        ----------
        recovery : RecoveryMonitor
        start : callable
            ``start(lost, rank, group)`` starts a replacement of the task `lost`, with the next
            task index, and returns its call and the function that kills it.
        is_replaceable : callable
            Returns False for the error of a worker whose loss must end the attempt.
        """
        self._recovery, self._start, self._is_replaceable = recovery, start, is_replaceable

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def run(self, poll: Callable[[], None]) -> None:
        """Wait for all calls to end; call `poll` repeatedly."""
        try:
            lost_at = None
            while self._running:
                self._take()
                if self.lost and lost_at is None and not self.are_independent:
                    lost_at = time.monotonic()
                if lost_at is not None and time.monotonic() - lost_at > LOSS_NOTICE_S:
                    self._stop(OTHER_LOST)
                    lost_at = float("inf")
                if self._recovery is not None and not self.lost:
                    self._recovery.poll(self._kill_rank)
                poll()
        except BaseException:
            self._stop(BY_DRIVER)
            raise

    def cancel(self) -> None:
        """Kill the workers that have not returned."""
        for task_index in (*self._running.values(), *self.lost):
            self._kills[task_index]()

    def _take(self) -> None:
        for call in wait(self._running, DRIVER_LOOK_S, FIRST_COMPLETED).done:
            task_index, error = self._running.pop(call), call.exception()
            if error is None:
                self._take_outcome(task_index, call.result())
            elif not isinstance(error, self._death):
                raise error
            elif self._channel.has("abort"):  # it ended on request
                self.outcomes[task_index] = task_index, "aborted", str(error)
            elif not self._replace(task_index, error):
                self.lost[task_index] = error

    def _take_outcome(self, task_index: int, outcome: tuple[int, str, str]) -> None:
        _, name, detail = outcome
        is_recovering = self._recovery is not None and self._recovery.group == self._accepted_in
        if name == "peer" and not is_recovering:
            # no other worker has failed: it has lost its connections
            if self._replace(task_index, PeerLost(detail), DISCONNECTED):
                return
        elif name in ("nospool", "peer") and is_recovering:
            self.lost.update(self._accepted)  # the rest waits for a group in vain
        self.outcomes[task_index] = outcome

    def _replace(
        self, task_index: int, error: BaseException, reason: tuple[str, str] = PROCESS_ENDED
    ) -> bool:
        """Start a replacement of a lost worker; return False if the attempt must end."""
        recovery, start = self._recovery, self._start
        if recovery is None or start is None or self.lost or self._has_failure():
            return False
        if not self._is_replaceable(error):
            return False
        rank = self._rank_of(task_index)
        lost = worker_lost(workers_at(self._channel, [task_index]), *reason)
        if rank is None or not recovery.accept(rank, lost):
            return False
        self._counted.add(task_index)
        call, kill = start(task_index, rank, recovery.group + 1)
        following = len(self._kills)
        self._replaced[following], self._running[call] = rank, following
        self._accepted, self._accepted_in = {task_index: error}, recovery.group
        self._kills = [*self._kills, kill]
        return True

    @property
    def is_counted(self) -> bool:
        """True if `on_loss` has counted the losses that ended the attempt."""
        if self._recovery is not None and self._recovery.is_refused:
            return True
        return bool(self.lost) and self._counted.issuperset(self.lost)

    def _rank_of(self, task_index: int) -> int | None:
        """Return the rank of a task; None if it has not started."""
        if task_index in self._replaced:
            return self._replaced[task_index]
        return next((each["rank"] for each in workers_at(self._channel, [task_index])), None)

    def _has_failure(self) -> bool:
        """Return True if a worker has ended without a result."""
        return any(outcome != "ok" for _, outcome, _ in self.outcomes.values())

    def _kill_rank(self, rank: int) -> None:
        self._kills[max(t for t in range(len(self._kills)) if self._rank_of(t) == rank)]()

    def _stop(self, reason: str) -> None:
        """Request that the workers stop, then kill the workers that still run."""
        with contextlib.suppress(Exception):
            request_stop(self._channel, reason)
        with contextlib.suppress(Exception):
            end = time.monotonic() + WORKERS_END_S
            while self._running and time.monotonic() < end:
                self._take()
        self.cancel()


class CalledJob(Job):
    """Base class of jobs whose workers are called by :class:`WorkerCalls`."""

    _replacements: StartReplacement | None = None  # set in `_calls` if the engine can replace one
    _prepare_replacement: Callable[[list[str]], None] | None = None

    @abstractmethod
    def _calls(self, channel: AttemptChannel) -> contextlib.AbstractContextManager[WorkerCalls]:
        """Return a context manager that starts an attempt's workers and yields their calls."""

    def _attempt(
        self, channel: AttemptChannel, on_event: OnEvent | None, *ignored: object
    ) -> list[Any] | None:
        with interruptible(), self._calls(channel) as calls:
            watch = AttemptMonitor(channel, calls.cancel, on_event)
            calls.are_independent = self.spec.is_independent
            if self._on_loss is not None and self._replacements is not None:
                recovery = RecoveryMonitor(
                    channel,
                    self.num_workers,
                    self.spec.timeout,
                    self._on_loss,
                    self._prepare_replacement,
                )
                calls.recover_with(recovery, self._replacements, self._is_replaceable)
            calls.run(self._polls(watch, on_event))
        if self.spec.is_independent:
            self._end_independent(watch)
            if any(outcome == "unreachable" for _, outcome, _ in calls.outcomes.values()):
                outcomes = {outcome: detail for _, outcome, detail in calls.outcomes.values()}
                raise self._failure(channel, calls, outcomes)
            return []
        results = self._answers(channel, watch)
        if results is not None:
            return results
        outcomes = {outcome: detail for _, outcome, detail in calls.outcomes.values()}
        if "nospool" in outcomes and not calls.lost:
            self._read_again()
            return None
        error = self._failure(channel, calls, outcomes)
        if isinstance(error, WorkerLost):
            error.is_counted = calls.is_counted
        raise error

    def _replacing_spec(self, rank: int, group: int) -> TaskSpec:
        """Return the TaskSpec of a replacement."""
        spec = self._next_spec()
        return replace(spec, replaced_rank=rank, group=group, reader=None, accept=None)

    def _is_replaceable(self, error: BaseException) -> bool:
        """Return False for the error of a worker that no other one can replace."""
        return True

    def _failure(
        self, channel: AttemptChannel, calls: WorkerCalls, outcomes: dict[str, str]
    ) -> Exception:
        """Return the error to raise for an attempt in which some workers returned no result."""
        reason = PROCESS_ENDED if calls.lost else (next(iter(outcomes.values())),)
        return worker_lost(lost_workers(channel, calls), *reason)


def lost_workers(channel: AttemptChannel, calls: WorkerCalls) -> list[dict[str, Any]]:
    """Return the known rank, pid and host of the dead workers."""
    return workers_at(channel, sorted(calls.lost))
