"""Shuffle transport: stateless Python tasks that exchange frames through Spark's shuffle.

Spark's shuffle carries the messages of one stage to the next.  The tasks that compute gradients do
not forward the state: the next update reads it from the shuffle of the previous update, in a
separate lane (:func:`~.pairs.key`).

In local mode, with one executor, a large message is written to a file that the receiver
memory-maps, and the shuffle carries only the file's name.

======  =========================================================================
tag     message
======  =========================================================================
``H``   handle of the rows of a partition
``D``   message to the driver: description of a replica's rows, or records of a group
``S``   :class:`~.rank.RankState` of a rank, to itself
``R``   its residual, to itself
``W``   weights of a slice, to all ranks
``G``   piece of a gradient, to the owner of the slice
``A``   Sum of the pieces of a slice, to itself
``T``   statistics of a slice, to all owners
``E``   error of user code, which replaces all other messages
======  =========================================================================
"""

from __future__ import annotations

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
    from bigdl.orca.parameter_layer.messages import Message

_TO_GRADIENTS, _TO_BOTH, _TO_UPDATE = 1, 2, 3

FOR_GRADIENTS = (_TO_GRADIENTS, _TO_BOTH)
"""First and last lane of an update that the tasks of :meth:`Work.gradients` read."""

FOR_UPDATE = (_TO_BOTH, _TO_UPDATE)
"""First and last lane of the previous update that reduce and update tasks read."""

AWAY = "bigdl-rows-away:"
_IN_FILE = 1 << 18  # bytes from which on a message is sent in a file, in local mode


@dataclass(frozen=True)
class TaskConstants:
    """Settings of a training run that are sent with every task.

    Attributes
    ----------
    training : str
        Unguessable name of the training.
    plan : LayerPlan
    program : pyspark.Broadcast
        Broadcast cloudpickle of ``program(rank, shards)``, which returns a :class:`~.rank.Replica`.
    threads : int
    import_path : tuple of str
        See :class:`~bigdl.runtime.task.TaskSpec`.
    job : int or None
        Job number, if large messages are sent in files.
    group : str
        Name of a group of steps.
    imports_torch : bool
        See :class:`~bigdl.runtime.task.TaskSpec`.
    """

    training: str
    plan: LayerPlan
    program: Any
    threads: int
    import_path: tuple[str, ...]
    job: int | None
    group: str = ""
    imports_torch: bool = True


class Work:
    """Work of one task in a shuffle stage: its received frames and the frames that it sends.

    Parameters
    ----------
    constants : TaskConstants
    rank : int
    frames : iterable of bytes-like
    lanes : sequence of int
        Lanes to read; frames of other lanes are skipped.

    Attributes
    ----------
    ranks : range
        All ranks.
    items : list of bytes
        Frames to send, each after the key of its target partition.
    """

    def __init__(
        self, constants: TaskConstants, rank: int, frames: Iterable[bytes], lanes: Sequence[int]
    ):
        self._constants, self._number, self.ranks = constants, rank, range(constants.plan.ranks)
        self._rank, self.items = Rank(constants.plan, rank), cast("list[bytes]", [])
        self._folder = None if constants.job is None else folder_of_messages(constants.job)
        with self._rank.reading():
            self.inbox = FrameReader(frames, lanes)

    # -- phases of a step -------------------------------------------------------------------------

    def begin(self) -> None:
        """Send this rank's slice of the weights to all ranks, before the steps of a group."""
        self._remove_old_messages()
        kept = self.inbox.message(b"S")
        if kept is not None:  # this rank owns a slice
            self._send_state(RankState.unpack(kept))
        self._pass_on_residual(_TO_GRADIENTS)

    def describe(self) -> None:
        """Open the replica and send its description of the rows."""
        self.send([self._number], b"D", pack(self._replica().describe()))

    def gradients(self, step: LayerStep) -> None:
        """Compute the gradients of a step and send them to the owners."""
        replica, residual = self._replica(), self.inbox.document(b"R")
        weights = self.inbox.messages(b"W")
        pieces, residual = self._rank.gradients(replica, step, weights, residual)
        for owner, piece in enumerate(pieces):
            self.send([owner], b"G", piece)
        if residual is not None:
            self.send([self._number], b"R", ArrayMessage(residual))

    def reduce(self) -> None:
        """Sum the gradients and send the statistics of the sums to all owners."""
        if self._is_owner:
            summed = self._rank.reduce(self.inbox.messages(b"G"))
            self.send(self.ranks, b"T", self._rank.statistics(summed, self._state()))
            self.send([self._number], b"A", summed.message())
        self._pass_on_residual()

    def update(self, step: LayerStep, last: bool) -> None:
        """Update the weights and send them, or keep the state after the last step of a group."""
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
                self._send_frames([self._number], b"S", state.message())  # Spark persists it
            else:
                self._send_state(state)
        self._pass_on_residual(0 if last else _TO_GRADIENTS, is_kept=last)

    # -- receiving ----------------------------------------------------------------------

    @property
    def _is_owner(self) -> bool:
        return self._number < self._constants.plan.owners

    def _state(self) -> RankState:
        """Return this rank's state; take missing weights from the message sent to all ranks."""
        state = RankState.unpack(cast("Message", self.inbox.message(b"S")))
        if not len(state.weights):
            weights = self.inbox.document(b"W")["weights"]
            state.weights = codec_for("fp32").decode(weights).copy()
        return state

    def _replica(self):
        handle = self.inbox.document(b"H")
        make, version = functools.partial(self._make, handle), tuple(handle["version"])
        return replica_of(self._constants.training, self._number, version, make)

    def _make(self, handle):
        shards = reopen(handle["spools"])
        if shards is None:
            raise _RowsNotLocal(
                f"{AWAY} The rows of partition {self._number} are on executor "
                f"{handle['executor']} of {handle['host']}, which this task cannot read; Spark "
                "runs it again"
            )
        return cloudpickle.loads(self._constants.program.value)(self._number, shards)

    # -- sending --------------------------------------------------------------------------

    def send(self, targets: Iterable[int], tag: bytes, data, lane: int = 0) -> None:
        """Send a message to the ranks `targets`; in local mode, write a large message to a file."""
        if self._folder is None or len(data) < _IN_FILE:
            self._send_frames(targets, tag, data, lane)
            return
        frame = frame_of_file(tag, self._number, self._written(data, self._folder), lane)
        for target in targets:
            self.items += (key(target, lane), frame)

    def _written(self, data: Any, folder: str) -> str:
        """Write a message to a file and return its path."""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, f"{self._constants.group}-{secrets.token_hex(8)}")
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.writelines(data.parts if isinstance(data, ArrayMessage) else [data])
        return path

    def _remove_old_messages(self) -> None:
        """Remove the message files of other groups."""
        if self._folder is None or not os.path.exists(self._folder):
            return
        for entry in list(os.scandir(self._folder)):
            if not entry.name.startswith(self._constants.group):
                with contextlib.suppress(FileNotFoundError):  # other tasks do the same
                    os.unlink(entry.path)

    def _send_frames(self, targets: Iterable[int], tag: bytes, data, lane: int = 0) -> None:
        keys = [key(target, lane) for target in targets]
        for frame in frames_of(tag, self._number, data, lane):
            for target_key in keys:
                self.items += (target_key, frame)

    def _pass_on_residual(self, lane: int = 0, *, is_kept: bool = False) -> None:
        data, send = self.inbox.message(b"R"), self._send_frames if is_kept else self.send
        if data is not None:
            send([self._number], b"R", data, lane)

    def _send_state(self, state: RankState) -> None:
        """Send the weights to all ranks and the rest of the state to this rank's next update."""
        exact = self._rank.sends_exact_weights
        others = [n for n in self.ranks if n != self._number]
        with self._rank.sending(state):
            weights = self._rank.weights(state)
            self.send(others, b"W", weights, _TO_GRADIENTS)
            self.send([self._number], b"W", weights, _TO_BOTH if exact else _TO_GRADIENTS)
        if exact:
            state = replace(state, weights=state.weights[:0])
        self.send([self._number], b"S", state.message(), _TO_UPDATE)


def _run(constants, work, arguments, lane, reads, index, frames):
    """Run the work of one task; return an iterator that alternates keys and frames.

    Parameters
    ----------
    constants : TaskConstants
    work : callable
        Method of :class:`Work`, called as ``work(task, *arguments)``.
    arguments : tuple
    lane : int
        Lane for errors.
    reads : tuple of int
        Lanes to read in addition to lane 0.
    index, frames
        Partition index and input of the task.
    """
    task = Work(constants, index, frames, (0, *reads))
    errors = task.inbox.messages(b"E")
    if errors:
        task.send(task.ranks, b"E", errors[0], lane)
        return iter(task.items)
    with task_environment(constants), _threads(constants.threads):
        try:
            work(task, *arguments)
        except _RowsNotLocal:
            raise
        except Exception as error:  # Spark would retry the user's code
            task.items.clear()
            task.send(task.ranks, b"E", pack({"rank": index, **describe(error)}), lane)
    return iter(task.items)


@contextlib.contextmanager
def _threads(count: int):
    """Context manager that limits torch to `count` threads; cheaper than :func:`thread_scope`."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _RowsNotLocal(Exception):
    """Raised when the rows are on another executor, so that Spark retries the task."""


_SMALL = 2 << 20  # bytes of all weights; see Pairs
_GONE = "Checkpoint block"  # start of Spark's message about lost persisted state


class ShuffleTransport(Transport):
    """Transport that sends everything through Spark's shuffle.

    Parameters
    ----------
    engine : SparkEngine
        Engine of the cluster; its barrier stages are not used.
    plan : LayerPlan
        Plan, which may have more ranks than task slots, and fewer slices than ranks.
    program : callable
        ``program(rank, shards)`` returns the rank's :class:`~.rank.Replica`; pickled by value.
    feed : FeedGroup
        Group of one feed.
    threads : int, optional
        Threads of a task; default its share of the node's cores.
    """

    group_size = 10

    def __init__(
        self,
        engine: SparkEngine,
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
            opened.enter_context(quiet(self._sc))  # entering it for each job would cost time
            opened.enter_context(cluster.keep_tasks_local())
            ship_modules(self._sc)
            number = opened.enter_context(job_number())
            shipped = self._sc.broadcast(cloudpickle.dumps(program))
            opened.callback(shipped.unpersist)
            self._constants = TaskConstants(
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

    def _task(self, work: Callable, *arguments: object, lane: int = 0, reads: tuple[int, ...] = ()):
        """Return a task for :class:`~.pairs.Pairs` as a partial, to avoid sending a closure."""
        return functools.partial(_run, self._constants, work, arguments, lane, reads)

    def _answers(self, pairs) -> list:
        """Return the ranks' messages for the driver, or raise the first user error."""
        inbox = FrameReader(self._pairs.values(pairs).filter(_is_for_driver).collect())
        for error in inbox.documents(b"E"):
            raise user_error(error)
        return inbox.documents(b"D")

    def start(self, states: Sequence[RankState]) -> None:
        plan = self._constants.plan
        if self._state is not None and len(states) == plan.owners:  # the rows may be lost, too
            self._call(self._rows.renew)
        self._constants = replace(self._constants, plan=replace(plan, slices=len(states)))
        self._call(lambda: self._give(states))

    def _give(self, states):
        """Replace the rank states that are stored on the executors."""
        if self._state is not None:
            self._pairs.drop_for_good(self._state)
        shipped = self._sc.broadcast(dict(enumerate(map(_packed, states))))

        def give(index, items):
            read_to_end(items)
            for tag, data in shipped.value.get(index, ()):
                for frame in frames_of(tag, index, data):
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
        self._constants = replace(self._constants, group=secrets.token_hex(4))

        def shuffled(source, task):
            shuffles.append(pairs.shuffled(source, task))
            return shuffles[-1]

        def with_state(contributions, update):
            return contributions.union(pairs.on_lanes(update, *FOR_UPDATE))

        update = shuffled(before, task(Work.begin, lane=_TO_GRADIENTS))
        for number, step in enumerate(steps, 1):
            # partition n of the union runs where the handle of n is cached
            weights = self._rows.handles.union(pairs.on_lanes(update, *FOR_GRADIENTS))
            contributions = shuffled(weights, task(Work.gradients, step, reads=FOR_GRADIENTS))
            if self._constants.plan.needs_statistics:
                summed = with_state(contributions, update)
                contributions = shuffled(summed, task(Work.reduce, reads=FOR_UPDATE))
            contributions = with_state(contributions, update)
            if number < len(steps):
                make = task(Work.update, step, False, lane=_TO_GRADIENTS, reads=FOR_UPDATE)
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
        """Persist an RDD of states on the executors, in two copies if there are several nodes."""
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
        """Call a function that runs Spark jobs; cancel them on Ctrl-C and convert their errors."""

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
    """Return the owners' records; raise WorkerLost if owners disagree about late contributions.

    If Spark recomputes a contribution after an executor loss, it may be late once and in time once.
    Then some owners have added it and others have not.
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
