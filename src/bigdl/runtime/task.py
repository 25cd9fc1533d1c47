"""One task of a job, from its input to its outcome.

A task never raises because of what a program did.  It returns an *outcome*: ``"ok"``; ``"error"``,
reported on the way to the driver; ``"peer"``, when another worker went away; ``"leaving"``, when
the driver asked for it and the state is kept; ``"nospool"``, when spools expected here are gone;
``"refused"``, when the input does not accept the sizes of its shards; ``"void"``, when the cluster
ran this task again after a loss; and ``"copy"``, when it did so while the first run was at work.
The driver itself writes ``"aborted"`` of a process that ended as it was told, and the engine of Ray
``"unreachable"`` of an actor whose node it cannot reach.
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
from bigdl.common.memory import freeze_modules
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
) -> dict[str, Any]:
    """The shards of a task, spooled from its input; of `spec` only what is about the input."""
    from bigdl.runtime.shards.shard import SpoolWriter, remove_stale_spools

    if spec.reader is None:
        read_to_end(batches)  # the engine's own empty frame
        return {}
    remove_stale_spools(local_dir, spec.job, set(spec.active_jobs))
    writers = []

    def open_spool(name: str, specs: list[ColumnSpec]) -> SpoolWriter:
        writers.append(SpoolWriter(local_dir, spec.job, f"{name}-{rank}", specs))
        return writers[-1]

    # what a reader may ask, see InputPlan.reader
    opener: Any = open_spool
    opener.rank, opener.world_size = rank, spec.world_size
    try:
        shards = spec.reader(batches, open_spool)
        read_to_end(batches)  # of a reader that gets at the rows by itself
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    return cast("dict[str, Any]", shards)


def read_to_end(source: Iterable[Any]) -> None:
    """Read what is left, e.g. of a task's input: Spark re-uses only a process that has read all."""
    for _ in source:
        pass


def is_accepted(spec: TaskSpec, shards: dict[str, Any], rank: int, channel: AttemptChannel) -> bool:
    """Return True if the input accepts the sizes that its shards turned out to have."""
    rows = sum(shard.rows for shard in shards.values())
    accept = cast("Callable[..., bool]", spec.accept)
    return bool(accept(channel.all_gather("rows", rank, rows, spec.world_size)))


def reopen(spools: dict[str, Any]) -> dict[str, Any] | None:
    """The shards over spools of an earlier attempt; None if this machine does not see all of them.

    Their files are mapped, so that they stay readable when another process removes them, as Spark
    does with what an executor that goes has written.
    """
    from bigdl.runtime.shards.shard import Spool, open_shard

    found = {name: Spool.from_json(doc) for name, doc in spools.items()}
    if not all(spool.is_here() for spool in found.values()):
        return None
    try:
        return {name: open_shard(spool) for name, spool in found.items()}
    except FileNotFoundError:
        return None


def remove_spools(shards: dict[str, Any]) -> None:
    """Remove the files under shards; who has mapped them keeps them."""
    from bigdl.runtime.shards.shard import remove_spool

    for shard in shards.values():
        remove_spool(shard.spool.path)


def ranks_by_host(hosts: Sequence[str]) -> list[int]:
    """The rank of every task, so that those of one host lie side by side.

    Sums over many workers then cross the network once for each host. The hosts come as their first
    tasks do, so the first task has rank 0, and without several on a host each has its number.

    Parameters
    ----------
    hosts : sequence of str
        Of the tasks.
    """
    order = sorted(range(len(hosts)), key=lambda task: hosts.index(hosts[task]))
    return [order.index(task) for task in range(len(hosts))]


def choose_shards(
    spec: TaskSpec, task_index: int, channel: AttemptChannel, wanted: Sequence[int]
) -> tuple[int, dict[str, Any]] | None:
    """Choose the rank of this task and its shards, of those that its machine sees; None if none is.

    Every task says what it sees and computes the same assignment; `wanted` are the ranks that they
    have where all see all.
    """
    reopened = ((rank, reopen(spools)) for rank, spools in enumerate(spec.spools or ()))
    opened = {rank: shards for rank, shards in reopened if shards is not None}
    views = channel.all_gather("seen", task_index, [*opened], spec.world_size)
    rank = match(views, wanted).get(task_index)
    return None if rank is None else (rank, opened[rank])


def match(views: list[list[int]], wanted: Sequence[int]) -> dict[int, int]:
    """Give every task one of the shards that it sees, each to one task.

    A task gets the one that it wants where that leaves a shard for everybody.

    Parameters
    ----------
    views : list of list of int
        The shards that each task sees.
    wanted : sequence of int
        The shard that each task wants, each by one task.

    Returns
    -------
    dict of task to shard; empty when there is no complete assignment
    """
    shard_of = {task: wanted[task] for task, seen in enumerate(views) if wanted[task] in seen}
    owner = {shard: task for task, shard in shard_of.items()}
    for task in range(len(views)):
        if task in shard_of:
            continue
        # the nearest free shard, if those on the way to it move on by one
        reached: dict[int, int] = {}  # shard -> the task that would take it
        takers = [task]
        for taker in takers:  # which grow meanwhile
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
    """The description of a job for every task; the same for all attempts that read the input.

    Attributes
    ----------
    address : Address or None
        Of the channel, where there is one.
    job : int
        Number of the job; jobs of one driver are numbered upwards.
    active_jobs : tuple of int
        Jobs whose spools are in use.
    world_size, threads, timeout : see Worker
    drops_output : bool
        True if what a program prints only goes to the driver, False if to the process's own output,
        too.
    log_to_driver : bool
    import_path : tuple of str
        The driver's own folders of modules; used where they exist.
    program : bytes
        The function, pickled by cloudpickle.
    secret : bytes
        What proves who belongs to the run, also where there is no channel.
    may_leave : bool
        Whether the driver may ask the workers to keep their state and end.
    certificate : Certificate or None
        Encrypts connections, where the cluster asks for it.
    are_collectives_clear : bool
        Whether what the workers say to each other is not encrypted all the same.
    reader, accept : callable or None
        See :class:`~bigdl.runtime.shards.feed.InputPlan`.
    by_host : bool
        Whether tasks of one host get ranks side by side, wherever the cluster has put them: where
        it does not say which rows a task gets. Else the rank is the number of the task.
    spools : tuple of dict, or None
        Spools of an earlier attempt, by rank, to be used instead of the input.
    options : dict, state : bytes or None
        What the driver has to say, where there is no channel.
    keep_spools : bool
        Whether other attempts follow one that succeeded.
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


def execute(
    spec: TaskSpec, attempt: int, batches: Iterator[pa.RecordBatch], task_index: int, local_dir: str
) -> tuple[int, str, str]:
    """Run one task of a job.

    Parameters
    ----------
    spec : TaskSpec
    attempt : int
        Number of the attempt that this task was started for. A task of an earlier attempt can still
        be starting when the next one runs.
    batches : iterator of pyarrow.RecordBatch
        The input of this task; an empty one when the spools of an earlier attempt are used.
    task_index : int
        Number of the task. It is also its rank, unless spools or ranks by host are used.
    local_dir : str

    Returns
    -------
    tuple of (rank, outcome, detail)

    Raises
    ------
    Unreachable
        If there is no way to the channel, so that only the cluster can tell the driver.
    """
    wait_passively()
    with task_environment(spec):
        address = cast("Address", spec.address)
        channel = address.connect(attempt)
        if channel.count(f"enter/{task_index}", 1) > 1:
            return task_index, await_first(channel, task_index), "The cluster ran this task again"
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
    """The outcome of a task that the cluster runs although it has been run.

    Where the first run still works, the cluster speculates that this one will be faster: it must
    not be, for the cluster would take its outcome and end the other.
    """
    while not channel.has(f"left/{task_index}"):
        if channel.has(f"gone/{task_index}", seconds=0.5):
            channel.count("failed", 1)  # nobody shall wait for this task
            return "void"
    return "copy"


@contextlib.contextmanager
def task_environment(spec: TaskSpec) -> Iterator[None]:
    """Let the program import what the driver can; leave the reused process as it was."""
    path, name = list(sys.path), "TORCH_CPP_LOG_LEVEL"
    sys.path[:0] = [p for p in spec.import_path if p not in path and os.path.exists(p)]
    # we say ourselves who went away
    with EnvContext({} if name in os.environ else {name: "ERROR"}):
        import torch  # noqa: F401 - it looks at the variable once

        freeze_modules()
        try:
            yield
        finally:
            sys.path[:] = path


@contextlib.contextmanager
def exits_as_errors() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit in this thread: it is no loss, and no retry would help."""
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
        )
        self._take_rank(task_index)

    def _take_rank(self, rank: int) -> None:
        self.worker.rank = rank
        who = {"rank": rank, "pid": os.getpid(), "host": self.worker.host}
        self._channel.set_json(f"who/{self._task_index}", who)

    def run(self, batches: Iterator[Any]) -> tuple[int, str, str]:
        """Return the rank, the outcome and its detail.

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
        except BaseException as error:  # whatever user code raises is an outcome
            if is_peer_failure(error):
                self._await_cause()
                return worker.rank, "peer", str(error).split("\n")[0]
            self._fail(error)
            read_to_end(batches)  # Spark ends a task quietly only then
            return worker.rank, "error", ""
        finally:
            worker.clean_up()
            worker.shards.clear()

    def _attempt(self, batches: Iterator[pa.RecordBatch]) -> str:
        import cloudpickle

        spec, channel, worker = self._spec, self._channel, self.worker
        wanted: Sequence[int] = range(spec.world_size)  # where no spools ask for other ranks
        if spec.by_host and spec.world_size > 1:
            hosts = channel.all_gather("host", self._task_index, worker.host, spec.world_size)
            wanted = ranks_by_host(hosts)
        if spec.spools is not None:
            read_to_end(batches)  # of an empty frame
            chosen = choose_shards(spec, self._task_index, channel, wanted)
            if chosen is None:
                return "nospool"
            rank, worker.shards = chosen
            self._take_rank(rank)
        else:
            if (rank := wanted[self._task_index]) != self._task_index:
                self._take_rank(rank)
            shards = read_input(spec, batches, rank, worker.local_dir)
            if spec.accept is not None and not is_accepted(spec, shards, rank, channel):
                remove_spools(shards)
                return "refused"
            docs = {name: shard.spool.to_json() for name, shard in shards.items()}
            channel.set_json(f"spool/{rank}", docs)
            worker.shards = shards
        with exits_as_errors():
            kind, data = encode(cloudpickle.loads(spec.program)(worker))
        worker.clean_up()
        worker.driver.send_result(worker.rank, kind, data)
        if worker.shards and not spec.keep_spools:
            # nobody can need them any more once all results are on their way
            channel.barrier("results", spec.world_size, longest=0.5)
            remove_spools(worker.shards)
        return "ok"

    def _await_cause(self) -> None:
        """Give the driver time to see what happened.

        When a process was lost, Spark is about to close our connection; it is quieter to be ended
        by the driver than by that.
        """
        self.worker.clean_up(CLEAN_UP_S)
        end = time.monotonic() + CAUSE_S
        with contextlib.suppress(RuntimeError):  # it may be the line that went away
            while time.monotonic() < end:
                if self._channel.count("failed"):  # an error ends the job: no attempt follows
                    remove_spools(self.worker.shards)
                    break
                time.sleep(0.05)

    def _fail(self, error: BaseException) -> None:
        """Report the error, then release the peers; the driver ends workers that hang.

        Cleaning up may end the process: that of gloo does, at times, with a collective under way.
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
    """Return True if an exception says that another worker, or the line, went away.

    A program may use ``torch.distributed`` without our GradientSync, which says it by PeerLost.
    """
    if isinstance(error, PeerLost | ConnectionLost):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return _TRANSPORT in text and "enforce fail" not in text


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as a JSON-able report."""
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
