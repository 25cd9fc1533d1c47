"""One task of a job, from its input to its outcome.

A task does not raise the exceptions of a program.  It returns an *outcome*:

``"ok"``
    The program returned.
``"error"``
    The program raised; the error was reported to the driver.
``"peer"``
    Another worker was lost.
``"leaving"``
    The worker saved its state and ended on the driver's request.
``"nospool"``
    Expected spools are missing on this machine.
``"refused"``
    The input plan does not accept the sizes of the shards.
``"void"``
    The cluster ran this task again after a loss.
``"copy"``
    The cluster ran this task again while the first run was active.

The driver adds ``"aborted"`` for a process that ended on request, and the Ray engine
``"unreachable"`` for an actor on an unreachable node.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, cast

from bigdl.common.cpu import wait_passively
from bigdl.common.environment import EnvContext
from bigdl.common.errors import UsageError
from bigdl.common.memory import freeze_modules, release_memory
from bigdl.common.timeouts import CAUSE_S, CLEAN_UP_S
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.channel import Address, AttemptChannel, ConnectionLost, outgoing_address
from bigdl.runtime.engine import Leaving, PeerLost
from bigdl.runtime.failure import user_traceback
from bigdl.runtime.worker import (
    CapturedOutput,
    ChannelConnection,
    DriverConnection,
    HeartbeatThread,
    Worker,
    capture_output,
    encode,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from bigdl.runtime.shards.columns import ColumnSpec
    from bigdl.runtime.shards.shard import SpoolWriter


def read_input(
    spec: Any, batches: Iterator[pa.RecordBatch], rank: int, local_dir: str
) -> dict[str, Any]:  # spec: a TaskSpec, or an object with its fields
    """Read a task's input into spools and return its shards."""
    from bigdl.runtime.shards.shard import SpoolWriter, remove_stale_spools

    if spec.reader is None:
        read_to_end(batches)  # the engine's empty frame
        return {}
    remove_stale_spools(local_dir, spec.job, set(spec.active_jobs))
    writers = []

    def open_spool(name: str, specs: list[ColumnSpec]) -> SpoolWriter:
        writers.append(SpoolWriter(local_dir, spec.job, f"{name}-{rank}", specs))
        return writers[-1]

    # attributes for the reader, see InputPlan.reader
    opener: Any = open_spool
    opener.rank, opener.world_size = rank, spec.world_size
    try:
        shards = spec.reader(batches, open_spool)
        read_to_end(batches)  # a reader may have another source of rows
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    release_memory()
    return cast("dict[str, Any]", shards)


def read_to_end(source: Iterable[Any]) -> None:
    """Exhaust an iterator, since Spark reuses a Python process only after it has read all input."""
    for _ in source:
        pass


def is_accepted(spec: TaskSpec, shards: dict[str, Any], rank: int, channel: AttemptChannel) -> bool:
    """Return True if the input plan accepts the row counts of all shards."""
    rows = sum(shard.rows for shard in shards.values())
    accept = cast("Callable[..., bool]", spec.accept)
    return bool(accept(channel.all_gather("rows", rank, rows, spec.world_size)))


def reopen(spools: dict[str, Any]) -> dict[str, Any] | None:
    """Return shards over an earlier attempt's spools, or None if this machine lacks a spool.

    The files are mapped, so they stay readable when another process removes them. Spark does so
    with the files of a decommissioned executor.
    """
    from bigdl.runtime.shards.shard import Spool, open_shard

    by_feed = {name: Spool.from_json(doc) for name, doc in spools.items()}
    if not all(spool.is_here() for spool in by_feed.values()):
        return None
    try:
        return {name: open_shard(spool) for name, spool in by_feed.items()}
    except FileNotFoundError:
        return None


def remove_spools(shards: dict[str, Any]) -> None:
    """Remove the files of shards; processes that have mapped them keep the data."""
    from bigdl.runtime.shards.shard import remove_spool

    for shard in shards.values():
        remove_spool(shard.spool.path)


def ranks_by_host(hosts: Sequence[str]) -> list[int]:
    """Return a rank for each task such that the tasks on one host have consecutive ranks.

    Sums over many workers then cross the network once per host. Hosts are ordered by their first
    task, so the first task has rank 0. With one task per host, ranks equal task indices.

    Parameters
    ----------
    hosts : sequence of str
        Host of each task.
    """
    order = sorted(range(len(hosts)), key=lambda task: hosts.index(hosts[task]))
    return [order.index(task) for task in range(len(hosts))]


def choose_shards(
    spec: TaskSpec, task_index: int, channel: AttemptChannel, wanted: Sequence[int]
) -> tuple[int, dict[str, Any]] | None:
    """Choose this task's rank and shards among the spools on its machine, or return None.

    All tasks exchange the spools that they see and compute the same assignment. `wanted` are the
    ranks of the tasks if all tasks see all spools.
    """
    reopened = ((rank, reopen(spools)) for rank, spools in enumerate(spec.spools or ()))
    opened = {rank: shards for rank, shards in reopened if shards is not None}
    views = channel.all_gather("seen", task_index, [*opened], spec.world_size)
    rank = match(views, wanted).get(task_index)
    return None if rank is None else (rank, opened[rank])


def match(views: list[list[int]], wanted: Sequence[int]) -> dict[int, int]:
    """Assign each task a different shard that it sees; prefer the shard in `wanted`.

    A task gets its wanted shard if every other task can still get one.

    Parameters
    ----------
    views : list of list of int
        The shards that each task sees.
    wanted : sequence of int
        The preferred shard of each task; a permutation.

    Returns
    -------
    dict of task to shard; empty when there is no complete assignment
    """
    shard_of = {task: wanted[task] for task, seen in enumerate(views) if wanted[task] in seen}
    owner = {shard: task for task, shard in shard_of.items()}
    for task in range(len(views)):
        if task in shard_of:
            continue
        # find the nearest free shard along an augmenting path
        reached: dict[int, int] = {}  # shard -> task that would take it
        takers = [task]
        for taker in takers:  # the loop appends to it
            new = [shard for shard in views[taker] if shard not in reached]
            reached.update(dict.fromkeys(new, taker))
            free = next((shard for shard in new if shard not in owner), None)
            if free is not None:
                break
            takers += [owner[shard] for shard in new]
        else:
            return {}
        while free is not None:
            taker = reached[free]
            left = shard_of.get(taker)
            shard_of[taker], owner[free] = free, taker
            free = left
    return shard_of


@dataclass(frozen=True)
class TaskSpec:
    """Description of a job for each of its tasks, reused by later attempts with the same input.

    Attributes
    ----------
    address : Address or None
        Address of the channel, if there is one.
    job : int
        Number of the job; later jobs of a driver have higher numbers.
    active_jobs : tuple of int
        Jobs whose spools are in use.
    world_size, threads, timeout : see Worker
    drops_output : bool
        Whether output goes to the driver only; False also writes it to the process's output.
    log_to_driver : bool
    import_path : tuple of str
        Module folders of the driver; used if they exist on the worker.
    program : bytes
        The function, pickled by cloudpickle.
    secret : bytes
        Authenticates the workers of the job, also without a channel.
    may_leave : bool
        Whether the driver may request the workers to save their state and end.
    certificate : Certificate or None
        Encrypts connections, if the cluster requires it.
    are_collectives_clear : bool
        Whether collectives stay unencrypted despite a certificate.
    reader, accept : callable or None
        See :class:`~bigdl.runtime.shards.feed.InputPlan`.
    by_host : bool
        Whether tasks of one host get consecutive ranks, for inputs without an assignment of rows to
        tasks. Otherwise the rank is the task index.
    spools : tuple of dict, or None
        Spools of an earlier attempt by rank, which replace the input.
    options : dict, state : bytes or None
        Options and state from the driver, if there is no channel.
    keep_spools : bool
        Whether further attempts may follow a successful one.
    is_independent : bool
        Whether workers do not depend on each other, see
        :meth:`~bigdl.runtime.engine.Engine.open_independent`.
    replaced_rank : int or None
        Rank of the lost worker that the task replaces.
    group : int
        Number of the group that a replacement joins, see :mod:`bigdl.runtime.recovery`.
    imports_torch : bool
        Whether torch is imported before the program runs, with log messages turned off.
    """

    address: Address | None
    job: int
    active_jobs: tuple[int, ...]
    world_size: int
    threads: int
    timeout: float
    drops_output: bool
    log_to_driver: bool
    import_path: tuple[str, ...]
    program: bytes = field(repr=False)
    secret: bytes = field(repr=False)
    reader: Callable[..., Any] | None
    accept: Callable[..., Any] | None = None
    spools: tuple[dict[str, Any], ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    state: bytes | None = None
    keep_spools: bool = False
    may_leave: bool = False
    by_host: bool = False
    certificate: Certificate | None = field(default=None, repr=False)
    are_collectives_clear: bool = False
    is_independent: bool = False
    replaced_rank: int | None = None
    group: int = 0
    imports_torch: bool = True


def execute(
    spec: TaskSpec, attempt: int, batches: Iterator[pa.RecordBatch], task_index: int, local_dir: str
) -> tuple[int, str, str]:
    """Run one task of a job and return its rank, the outcome and a detail text.

    Parameters
    ----------
    spec : TaskSpec
    attempt : int
        Number of the attempt of this task. A task of an earlier attempt may still start while the
        next attempt runs.
    batches : iterator of pyarrow.RecordBatch
        The input of this task; empty if spools of an earlier attempt are used.
    task_index : int
        Index of the task, which is its rank unless spools or ranks by host are used.
    local_dir : str

    Returns
    -------
    tuple of (rank, outcome, detail)

    Raises
    ------
    Unreachable
        If the channel cannot be reached, so only the cluster can notify the driver.
    """
    wait_passively()
    with task_environment(spec):
        address = cast("Address", spec.address)
        channel = address.connect(attempt)
        entries = channel.count(f"enter/{task_index}", 1)
        if spec.is_independent:  # each run of the task is another worker
            *earlier, task_index = range(task_index, entries * spec.world_size, spec.world_size)
            channel.set_on_disconnect(f"gone/{task_index}")
            outcome = _await_earlier(channel, earlier) if earlier else "void"
            if outcome == "copy" or channel.has("abort"):
                return task_index, outcome, "The task has ended already"
        else:
            if entries > 1:
                outcome = await_first(channel, task_index)
                return task_index, outcome, "The cluster ran this task again"
            channel.set_on_disconnect(f"gone/{task_index}")
        with capture_output(spec.log_to_driver, spec.drops_output) as log:
            task = Task(spec, task_index, local_dir, channel, address, ChannelConnection(channel))
            watcher = HeartbeatThread(address.connect(attempt), task_index, task.worker, log)
            watcher.start()
            try:
                return task.run(batches)
            finally:
                watcher.stop(channel)
                with contextlib.suppress(Exception):
                    channel.set(f"left/{task_index}", "")


def await_first(channel: AttemptChannel, task_index: int) -> str:
    """Wait until the first run of a task has ended; return the outcome of the repeated run."""
    outcome = _await_earlier(channel, [task_index])
    if outcome == "void":
        channel.count("failed", 1)  # no worker shall wait for this task
    return outcome


def _await_earlier(channel: AttemptChannel, task_indices: Sequence[int]) -> str:
    """Wait until all earlier runs of a task have ended; return the outcome of the repeated run.

    If an earlier run is active, the cluster runs this one speculatively. It must not finish first:
    the cluster would take its outcome and kill the first run.
    """
    while True:
        are_gone = channel.has(*(f"gone/{index}" for index in task_indices), seconds=0.5)
        if any(channel.has(f"left/{index}") for index in task_indices):
            return "copy"
        if are_gone:
            return "void"


@contextlib.contextmanager
def task_environment(spec: TaskSpec) -> Iterator[None]:
    """Context manager that applies the driver's import path, and imports torch if it is needed."""
    path, name = list(sys.path), "TORCH_CPP_LOG_LEVEL"
    sys.path[:0] = [p for p in spec.import_path if p not in path and os.path.exists(p)]
    # our error messages name the lost worker; torch's are noise
    with EnvContext({} if name in os.environ else {name: "ERROR"}):
        if spec.imports_torch:
            import torch  # noqa: F401 - it looks at the variable once

        freeze_modules()
        try:
            yield
        finally:
            sys.path[:] = path


@contextlib.contextmanager
def exits_as_errors() -> Iterator[None]:
    """Context manager that makes this thread's ``os._exit`` raise SystemExit; no worker is lost."""
    here, leave = (os.getpid(), threading.get_ident()), os._exit

    def raise_here(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) == here:
            raise SystemExit(f"os._exit({status}) was called")
        leave(status)

    os._exit = raise_here
    try:
        yield
    finally:
        os._exit = leave


class Task:
    """One run of a program in one worker, with its connection to the driver."""

    def __init__(
        self,
        spec: TaskSpec,
        task_index: int,
        local_dir: str,
        channel: AttemptChannel,
        address: Address,
        driver: DriverConnection,
    ):
        self._spec, self._task_index, self._channel = spec, task_index, channel
        self.worker = Worker(
            task_index,
            spec.world_size,
            threads=spec.threads,
            channel=channel,
            driver=driver,
            host=outgoing_address(address.host, address.port),
            local_dir=local_dir,
            timeout=spec.timeout,
            may_leave=spec.may_leave,
            certificate=None if spec.are_collectives_clear else spec.certificate,
            group=spec.group,
        )
        self._take_rank(task_index if spec.replaced_rank is None else spec.replaced_rank)

    def _take_rank(self, rank: int) -> None:
        self.worker.rank = rank
        who = {"rank": rank, "pid": os.getpid(), "host": self.worker.host}
        self._channel.set_json(f"who/{self._task_index}", who)

    def run(self, batches: Iterator[Any]) -> tuple[int, str, str]:
        """Run the program and return the rank, the outcome and a detail text.

        Parameters
        ----------
        batches : iterator of pyarrow.RecordBatch
            The input.
        """
        from bigdl.common.cpu import thread_scope

        worker = self.worker
        try:
            with thread_scope(self._spec.threads):
                outcome = self._attempt(batches)
            return worker.rank, outcome, ""
        except Leaving:
            return worker.rank, "leaving", ""
        except BaseException as error:  # exceptions of user code are an outcome
            if is_peer_failure(error):
                self._await_cause()
                return worker.rank, "peer", str(error).split("\n")[0]
            self._fail(error)
            read_to_end(batches)  # otherwise Spark logs an error at the task's end
            return worker.rank, "error", ""
        finally:
            worker.clean_up()
            worker.shards.clear()

    def _enter(self, phase: str) -> None:
        """Report a phase of rank 0 to the driver."""
        if self.worker.rank == 0:
            self._channel.set_json("phase/0", phase)

    def _attempt(self, batches: Iterator[pa.RecordBatch]) -> str:
        import cloudpickle

        spec, channel, worker = self._spec, self._channel, self.worker
        # unless spools require other ranks; independent workers may have higher ones
        wanted: Sequence[int] = range(max(spec.world_size, self._task_index + 1))
        if spec.by_host and spec.world_size > 1:
            hosts = channel.all_gather("host", self._task_index, worker.host, spec.world_size)
            wanted = ranks_by_host(hosts)
        if spec.replaced_rank is not None:
            rank = spec.replaced_rank
            of_ranks = spec.spools or [
                channel.get_json(f"spool/{each}") for each in range(spec.world_size)
            ]
            opened = [reopen(spools) for spools in of_ranks]
            shards = opened[rank]
            if shards is None:
                return "nospool"
            worker.shards = shards
            worker.shards_of_ranks = opened
        elif spec.spools is not None:
            read_to_end(batches)  # an empty frame
            chosen = choose_shards(spec, self._task_index, channel, wanted)
            if chosen is None:
                return "nospool"
            rank, worker.shards = chosen
            self._take_rank(rank)
        else:
            if (rank := wanted[self._task_index]) != self._task_index:
                self._take_rank(rank)
            started = time.perf_counter()
            self._enter("reading rows")
            shards = read_input(spec, batches, rank, worker.local_dir)
            worker.read_s = time.perf_counter() - started
            if spec.accept is not None and not is_accepted(spec, shards, rank, channel):
                remove_spools(shards)
                return "refused"
            docs = {name: shard.spool.to_json() for name, shard in shards.items()}
            channel.set_json(f"spool/{rank}", docs)
            worker.shards = shards
        self._enter("running")
        with exits_as_errors():
            result_format, data = encode(cloudpickle.loads(spec.program)(worker))
        worker.clean_up()
        worker.driver.send_result(worker.rank, result_format, data)
        if worker.shards and not spec.keep_spools:
            # spools are not needed any more after all workers have sent their results
            channel.barrier("results", spec.world_size, longest=0.5)
            remove_spools(worker.shards)
        return "ok"

    def _await_cause(self) -> None:
        """Give the driver time to find the cause of a peer's failure.

        After the loss of a process, Spark closes our connection. An end by the driver logs less.
        """
        self.worker.clean_up(CLEAN_UP_S)
        end = time.monotonic() + CAUSE_S
        with contextlib.suppress(RuntimeError):  # the connection may be lost
            while time.monotonic() < end:
                if self._channel.count("failed"):  # an error ends the job: no attempt follows
                    remove_spools(self.worker.shards)
                    break
                time.sleep(0.05)

    def _fail(self, error: BaseException) -> None:
        """Report an error to the driver, then run the clean-up that releases waiting peers.

        The driver kills workers that hang. The clean-up of gloo can end the process during a
        running collective, so the report comes first.
        """
        worker = self.worker
        order, report = worker.driver.report_failing(), describe(error)
        worker.driver.report({"order": order, "rank": worker.rank, **report})
        if isinstance(sys.stderr, CapturedOutput):  # for readers of the executor's log
            sys.stderr.note(f"Worker {worker.rank} failed:\n{report['traceback'].rstrip()}")
        worker.clean_up(CLEAN_UP_S)
        remove_spools(worker.shards)


_TRANSPORT = "gloo/transport/"


def is_peer_failure(error: BaseException) -> bool:
    """Return True if an exception means that a peer or the connection is lost.

    A program may use ``torch.distributed`` without our GradientSync, which would raise PeerLost.
    """
    if isinstance(error, PeerLost | ConnectionLost):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return _TRANSPORT in text and "enforce fail" not in text


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as a JSON-serializable report."""
    try:
        message = str(error)
    except Exception as unprintable:
        message = f"<{type(error).__name__} that cannot be printed: {type(unprintable).__name__}>"
    return {
        "kind": type(error).__name__,
        "usage": isinstance(error, UsageError),
        "code": error.code if isinstance(error, UsageError) else None,
        "facts": error.facts if isinstance(error, UsageError) else {},
        "message": message,
        "traceback": user_traceback(error),
    }
