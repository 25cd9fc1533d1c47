"""The Python tasks of the shuffle transport: stateless functions from frames to frames.

What the tasks of a step send goes through Spark's shuffle to those of the next.  The state is not
handed on by the tasks that compute gradients: the next update reads it from the shuffle of the one
before, where it lies on a line of its own (:func:`~.pairs.key`).

In local mode, where all tasks are of one executor, a large message goes to a file, which its reader
maps, and the shuffle carries the file's name.

======  =========================================================================
kind    message
======  =========================================================================
``H``   handle of the rows of a partition
``D``   what a rank has for the driver: what its replica says of its rows, records of a group
``S``   :class:`~.rank.RankState` of a rank, to itself
``R``   its residual, to itself
``W``   weights of a slice, to all ranks
``G``   piece of a gradient, to the owner of the slice
``A``   Sum of the pieces of a slice, to itself
``T``   statistics of a slice, to all owners
``E``   what went wrong in user code, instead of all others
======  =========================================================================
"""

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from bigdl.common.errors import WorkerLost
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.cluster.spark_calls import SparkCall, job_error
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.parameter_layer.messages import (
    ArrayMessage,
    FrameReader,
    RankState,
    codec_for,
    frame_of_file,
    frames_of,
    pack,
)
from bigdl.orca.parameter_layer.pairs import Pairs, SpooledRows, folder_of_messages, key
from bigdl.orca.parameter_layer.plan import LayerPlan, LayerStep, Transport
from bigdl.orca.parameter_layer.rank import Contribution, Rank, Replica, replica_of
from bigdl.runtime.engine import user_import_path
from bigdl.runtime.jobs import job_number, user_error
from bigdl.runtime.task import describe, read_to_end, reopen, task_environment

if TYPE_CHECKING:
    from bigdl.orca.engines.spark import SparkEngine

_TO_GRADIENTS, _TO_BOTH, _TO_UPDATE = 1, 2, 3

FOR_GRADIENTS = (_TO_GRADIENTS, _TO_BOTH)
"""First and last of the lines that the tasks of :meth:`Work.gradients` read of an update."""

FOR_UPDATE = (_TO_BOTH, _TO_UPDATE)
"""Those that the tasks of :meth:`Work.reduce` and :meth:`Work.update` read of the one before."""

AWAY = "bigdl-rows-away:"
_IN_FILE = 1 << 18  # bytes of a message from which on it goes to a file, where it can


@dataclass(frozen=True)
class TaskConstants:
    """Constant parts of the tasks of one training; shipped with every one of them.

    Attributes
    ----------
    training : str
        An unguessable name.
    plan : LayerPlan
    program : pyspark.Broadcast
        Of the cloudpickle of ``program(rank, shards)``, which gives a :class:`~.rank.Replica`.
    threads : int
    import_path : tuple of str
        See :class:`~bigdl.runtime.task.TaskSpec`.
    job : int or None
        The job's number, if large messages go to files.
    group : str
        The name of a group of steps.
    """

    training: str
    plan: LayerPlan
    program: Any
    threads: int
    import_path: tuple[str, ...]
    job: int | None
    group: str = ""


class Work:
    """The work of one task: what it has received, and what it sends.

    Parameters
    ----------
    shipped : TaskConstants
    rank : int
    frames : iterable of bytes-like
    lines : sequence of int
        Those whose frames are for it; it may be given those of others, too.

    Attributes
    ----------
    ranks : range
        All of them.
    items : list of bytes
        Frames on their way, each after the key of the partition that it goes to.
    """

    def __init__(self, shipped: TaskConstants, rank: int, frames: Any, lines: Sequence[int]):
        self._shipped, self._number, self.ranks = shipped, rank, range(shipped.plan.ranks)
        self._rank, self.items = Rank(shipped.plan, rank), cast("list[bytes]", [])
        self._folder = None if shipped.job is None else folder_of_messages(shipped.job)
        with self._rank.reading():
            self.inbox = FrameReader(frames, lines)

    # -- kinds of work -------------------------------------------------------------------------

    def begin(self) -> None:
        """Send out the weights at the start of a group."""
        self._remove_old_messages()
        kept = self.inbox.message(b"S")
        if kept is not None:  # every rank owns a slice, or only the first ones
            self._send_state(RankState.unpack(kept))
        self._pass_on_residual(_TO_GRADIENTS)

    def describe(self) -> None:
        """Open the replica and say what it has."""
        self.send([self._number], b"D", pack(self._replica().describe()))

    def gradients(self, step: LayerStep) -> None:
        """Compute the gradients of a step."""
        replica, residual = self._replica(), self.inbox.document(b"R")
        weights = self.inbox.messages(b"W")
        pieces, residual = self._rank.gradients(replica, step, weights, residual)
        for owner, piece in enumerate(pieces):
            self.send([owner], b"G", piece)
        if residual is not None:
            self.send([self._number], b"R", ArrayMessage(residual))

    def reduce(self) -> None:
        """Sum the gradients and tell all owners about the sums."""
        if self._is_owner:
            summed = self._rank.reduce(self.inbox.messages(b"G"))
            self.send(self.ranks, b"T", self._rank.statistics(summed, self._state()))
            self.send([self._number], b"A", summed.message())
        self._pass_on_residual()

    def update(self, step: LayerStep, last: bool) -> None:
        """Change the weights; after the last step of a group the state stays where it is."""
        if self._is_owner:
            inbox, rank = self.inbox, self._rank
            packed = inbox.message(b"A")
            if packed is None:
                summed = rank.reduce(inbox.messages(b"G"))
            else:
                summed = Contribution.unpack(packed)
                summed.gradient = summed.gradient.copy()
                summed.touched = {table: rows.copy() for table, rows in summed.touched.items()}
            state = self._state()
            rank.update(step, summed, state, inbox.messages(b"T") or None)
            if last:
                self.send([self._number], b"D", pack(state.records))
                state.begin_group()
                self._send_frames([self._number], b"S", state.message())  # Spark keeps it
            else:
                self._send_state(state)
        self._pass_on_residual(0 if last else _TO_GRADIENTS, is_kept=last)

    # -- what is received ----------------------------------------------------------------------

    @property
    def _is_owner(self) -> bool:
        return self._number < self._shipped.plan.owners

    def _state(self) -> RankState:
        """The state of the own slice; its weights may have come as those that all ranks get."""
        state = RankState.unpack(self.inbox.message(b"S"))
        if not len(state.weights):
            weights = self.inbox.document(b"W")["weights"]
            state.weights = codec_for("fp32").decode(weights).copy()
        return state

    def _replica(self):
        handle = self.inbox.document(b"H")
        make, version = functools.partial(self._make, handle), tuple(handle["version"])
        return replica_of(self._shipped.training, self._number, version, make)

    def _make(self, handle):
        shards = reopen(handle["spools"])
        if shards is None:
            raise _RowsNotLocal(
                f"{AWAY} The rows of partition {self._number} are on executor "
                f"{handle['executor']} of {handle['host']}, which this task cannot read; Spark "
                "runs it again"
            )
        return cloudpickle.loads(self._shipped.program.value)(self._number, shards)

    # -- what is sent --------------------------------------------------------------------------

    def send(self, targets: Iterable[int], kind: bytes, data, line: int = 0) -> None:
        """Send a message to some ranks."""
        if self._folder is None or len(data) < _IN_FILE:
            self._send_frames(targets, kind, data, line)
            return
        frame = frame_of_file(kind, self._number, self._written(data, self._folder), line)
        for target in targets:
            self.items += (key(target, line), frame)

    def _written(self, data: Any, folder: str) -> str:
        """Write a message to a file and return its path."""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, f"{self._shipped.group}-{secrets.token_hex(8)}")
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.writelines(data.parts if isinstance(data, ArrayMessage) else [data])
        return path

    def _remove_old_messages(self) -> None:
        """Remove the files of other groups."""
        if self._folder is None or not os.path.exists(self._folder):
            return
        for entry in list(os.scandir(self._folder)):
            if not entry.name.startswith(self._shipped.group):
                with contextlib.suppress(FileNotFoundError):  # others do the same
                    os.unlink(entry.path)

    def _send_frames(self, targets: Iterable[int], kind: bytes, data, line: int = 0) -> None:
        places = [key(target, line) for target in targets]
        for frame in frames_of(kind, self._number, data, line):
            for place in places:
                self.items += (place, frame)

    def _pass_on_residual(self, line: int = 0, *, is_kept: bool = False) -> None:
        data, send = self.inbox.message(b"R"), self._send_frames if is_kept else self.send
        if data is not None:
            send([self._number], b"R", data, line)

    def _send_state(self, state: RankState) -> None:
        """Weights to all ranks; what the next update needs to the own one, nothing twice."""
        exact = self._rank.sends_exact_weights
        others = [n for n in self.ranks if n != self._number]
        with self._rank.sending(state):
            weights = self._rank.weights(state)
            self.send(others, b"W", weights, _TO_GRADIENTS)
            self.send([self._number], b"W", weights, _TO_BOTH if exact else _TO_GRADIENTS)
        if exact:
            state = replace(state, weights=state.weights[:0])
        self.send([self._number], b"S", state.message(), _TO_UPDATE)


def _run(shipped, work, arguments, line, reads, index, frames):
    """Do the work of one task; returns keys and frames in turn.

    Parameters
    ----------
    shipped : TaskConstants
    work : callable
        ``work(Work, *arguments)``
    arguments : tuple
    line : int
        Where errors go.
    reads : tuple of int
        Lines besides 0 whose frames are for it.
    index, frames
        What the task is given.
    """
    task = Work(shipped, index, frames, (0, *reads))
    errors = task.inbox.messages(b"E")
    if errors:
        task.send(task.ranks, b"E", errors[0], line)
        return iter(task.items)
    with task_environment(shipped), _threads(shipped.threads):
        try:
            work(task, *arguments)
        except _RowsNotLocal:
            raise
        except Exception as error:  # Spark would run the user's code again and again
            task.items.clear()
            task.send(task.ranks, b"E", pack({"rank": index, **describe(error)}), line)
    return iter(task.items)


@contextlib.contextmanager
def _threads(count: int):
    """Threads of torch for a task; the common scope takes longer than many a task."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _RowsNotLocal(Exception):
    """The rows are elsewhere; raised into Spark, which tries again."""


_SMALL = 2 << 20  # bytes of all weights; see Pairs
_GONE = "Checkpoint block"  # what Spark says of state that was kept and is gone


class ShuffleTransport(Transport):
    """Everything through Spark's shuffle.

    Parameters
    ----------
    engine : SparkEngine
        Of the cluster; its barrier stages are not used.
    plan : LayerPlan
        There may be more ranks than the cluster runs tasks at once, and fewer slices than ranks.
    program : callable
        ``program(rank, shards)`` gives the rank's :class:`~.rank.Replica`; shipped by value.
    feed : FeedGroup
        Of one feed.
    threads : int, optional
        Threads of a task; default its share of the node's cores.
    """

    group_size = 10

    def __init__(
        self,
        engine: "SparkEngine",
        plan: LayerPlan,
        program: Callable[[int, dict], Replica],
        feed: FeedGroup,
        *,
        threads: int | None = None,
    ):
        cluster = engine.cluster
        if threads is None:
            per_node = -(-plan.ranks // max(cluster.nodes, 1))
            threads = max(1, cluster.cores_per_node // per_node)
        self._cluster, self._sc = cluster, cluster.sc
        are_small = 4 * plan.geometry.total <= _SMALL
        self._pairs = Pairs(self._sc, plan.ranks, are_small=are_small)
        self._state = None
        with contextlib.ExitStack() as opened:
            opened.enter_context(quiet(self._sc))  # again for each job takes its time
            opened.enter_context(cluster.tasks_stay())
            ship_modules(self._sc)
            number = opened.enter_context(job_number())
            shipped = self._sc.broadcast(cloudpickle.dumps(program))
            opened.callback(shipped.unpersist)
            self._shipped = TaskConstants(
                secrets.token_hex(8),
                plan,
                shipped,
                threads,
                tuple(user_import_path()),
                number if cluster.is_local else None,
            )
            self._rows = self._call(lambda: SpooledRows(cluster, self._pairs, feed, number))
            opened.callback(self._rows.close)
            self._resources = opened.pop_all()

    def rows(self) -> list[dict]:
        describe = self._task(Work.describe)
        return self._call(lambda: self._answers(self._pairs.mapped(self._rows.handles, describe)))

    def _task(self, work: Callable, *arguments: Any, line: int = 0, reads: tuple[int, ...] = ()):
        """A task for :class:`~.pairs.Pairs`, without a closure, whose code would travel with it."""
        return functools.partial(_run, self._shipped, work, arguments, line, reads)

    def _answers(self, pairs) -> list:
        """Return what the ranks have for the driver, or raise the first error of user code."""
        inbox = FrameReader(self._pairs.values(pairs).filter(_is_for_driver).collect())
        for error in inbox.documents(b"E"):
            raise user_error(error)
        return inbox.documents(b"D")

    def start(self, states: Sequence[RankState]) -> None:
        plan = self._shipped.plan
        if self._state is not None and len(states) == plan.owners:  # what was lost may be the rows
            self._call(self._rows.renew)
        self._shipped = replace(self._shipped, plan=replace(plan, slices=len(states)))
        self._call(lambda: self._give(states))

    def _give(self, states):
        """Let executors keep these states instead of those that they have."""
        if self._state is not None:
            self._pairs.drop_for_good(self._state)
        shipped = self._sc.broadcast(dict(enumerate(map(_packed, states))))

        def give(index, items):
            read_to_end(items)
            for kind, data in shipped.value.get(index, ()):
                for frame in frames_of(kind, index, data):
                    yield key(index)
                    yield frame

        state = self._pairs.mapped(self._pairs.tokens(), give)
        self._take(state)
        self._pairs.values(state).count()
        shipped.unpersist()

    def run(self, steps: Sequence[LayerStep]) -> list[list[dict]]:
        return self._call(lambda: self._group(steps))

    def _group(self, steps):
        pairs, shuffles, before, task = self._pairs, [], self._state, self._task
        self._shipped = replace(self._shipped, group=secrets.token_hex(4))

        def shuffled(source, task):
            shuffles.append(pairs.shuffled(source, task))
            return shuffles[-1]

        def with_state(contributions, update):
            return contributions.union(pairs.on_lines(update, *FOR_UPDATE))

        update = shuffled(before, task(Work.begin, line=_TO_GRADIENTS))
        for number, step in enumerate(steps, 1):
            # partition n holds those of n of both, where the handles are cached
            weights = self._rows.handles.union(pairs.on_lines(update, *FOR_GRADIENTS))
            contributions = shuffled(weights, task(Work.gradients, step, reads=FOR_GRADIENTS))
            if self._shipped.plan.needs_statistics:
                summed = with_state(contributions, update)
                contributions = shuffled(summed, task(Work.reduce, reads=FOR_UPDATE))
            contributions = with_state(contributions, update)
            if number < len(steps):
                make = task(Work.update, step, False, line=_TO_GRADIENTS, reads=FOR_UPDATE)
                update = shuffled(contributions, make)
        state = pairs.mapped(contributions, task(Work.update, steps[-1], True, reads=FOR_UPDATE))
        self._take(state)
        try:
            records = _agreed(self._answers(state))
        except BaseException:
            self._state = before
            pairs.drop_for_good(state)
            raise
        else:
            pairs.drop_for_good(before)
        finally:
            pairs.remove_shuffles(shuffles)
        return records

    def _take(self, state):
        """Let executors keep a state; in two copies, where one of them may be lost."""
        copies = 2 if self._cluster.nodes > 1 else 1
        self._pairs.keep(state, copies)
        self._pairs.forget_lineage(state)
        self._state = state

    def states(self) -> list[RankState]:
        def collect():
            inbox = FrameReader(self._pairs.values(self._state).collect())
            states = [RankState.unpack(data) for data in inbox.messages(b"S")]
            residuals = inbox.documents(b"R") or [None] * len(states)
            for state, residual in zip(states, residuals, strict=True):
                state.residual = residual
            return states

        return self._call(collect)

    def close(self) -> None:
        if self._state is not None:
            self._pairs.drop_for_good(self._state)
            self._state = None
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._resources.close()

    def _call(self, function):
        """Run Spark jobs so that Ctrl-C ends them, and say what became of them."""

        def call():
            with quiet(self._sc):
                return function()

        try:
            return SparkCall(self._sc, call).wait()
        except Exception as error:
            text = str(error)
            if AWAY in text:
                reason = text.partition(AWAY)[2].partition("\n")[0].strip()
                raise WorkerLost(f"Rows were lost: {reason}") from None
            if _GONE in text:
                raise WorkerLost("The weights were lost with all executors that had them") from None
            raise job_error(error, []) from None


def _agreed(records):
    """The records of the owners, if the same contributions came late for all of them.

    A contribution that Spark has computed again, since its executor was lost, may be late once and
    in time once; then some owners have added it and others have not.
    """
    if len({json.dumps([record["late"] for record in of_owner]) for of_owner in records}) > 1:
        raise WorkerLost("An executor was lost while a contribution was late")
    return records


def _is_for_driver(frame) -> bool:
    return bytes(frame[:1]) in (b"D", b"E")


def _packed(state: RankState) -> list:
    messages = [(b"S", replace(state, residual=None).pack())]
    if state.residual is not None:
        messages.append((b"R", pack(state.residual)))
    return messages
