"""The Python tasks of the shuffle transport: stateless functions from frames to frames.

What the tasks of a step send goes through Spark's shuffle to those of the next.  The state is not
handed on by the tasks that compute gradients: the next update reads it from the shuffle of the one
before, where it lies on a line of its own (:func:`~.pairs.key`).

======  =========================================================================
kind    message
======  =========================================================================
``H``   handle of the rows of a partition
``D``   what a rank has for the driver: what its replica says of its rows, records of a group
``S``   :class:`~.rank.RankState` of a rank, to itself
``R``   its residual, to itself
``W``   weights of a slice, to all ranks
``G``   piece of a gradient, to the owner of the slice
``A``   :class:`~.rank.Sum` of a slice, to itself
``T``   statistics of a slice, to all owners
``E``   what went wrong in user code, instead of all others
======  =========================================================================
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import WorkerLost, require
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.cluster.spark import user_import_path
from bigdl.orca.cluster.spark_calls import SparkCall, job_error
from bigdl.orca.parameter_layer.messages import Inbox, frames_of, pack, unpack
from bigdl.orca.parameter_layer.pairs import Pairs, Rows, is_here, key, shards_of
from bigdl.orca.parameter_layer.plan import LayerPlan, Step, Transport
from bigdl.orca.parameter_layer.rank import Rank, RankState, Sum, replica_of
from bigdl.runtime.jobs import job_number, user_error

if TYPE_CHECKING:
    from bigdl.orca.data.feeds.group import FeedGroup
    from bigdl.orca.parameter_layer.rank import Replica
    from bigdl.runtime.engine import Engine

_TO_GRADIENTS, _TO_BOTH, _TO_UPDATE = 1, 2, 3

FOR_GRADIENTS = (_TO_GRADIENTS, _TO_BOTH)
"""First and last of the lines that the tasks of :meth:`Tasks.gradients` read of an update."""

FOR_UPDATE = (_TO_BOTH, _TO_UPDATE)
"""Those that the tasks of :meth:`Tasks.reduce` and :meth:`Tasks.update` read of the one before."""

AWAY = "bigdl-rows-away:"


@dataclass(frozen=True)
class Tasks:
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
    """

    training: str
    plan: LayerPlan
    program: Any
    threads: int
    import_path: tuple[str, ...]

    def begin(self, out: _Outbox, rank: Rank, inbox: Inbox) -> None:
        """Send out the weights at the start of a group."""
        kept = inbox.message(b"S")
        if kept is not None:  # every rank owns a slice, or only the first ones
            out.state_of(rank, RankState.unpack(kept))
        out.pass_on(inbox, b"R", line=_TO_GRADIENTS)

    def describe(self, out: _Outbox, rank: Rank, inbox: Inbox) -> None:
        """Open the replica and say what it has."""
        out.send(rank.rank, b"D", pack(self._replica(rank.rank, inbox).describe()))

    def gradients(self, out: _Outbox, rank: Rank, inbox: Inbox, step: Step) -> None:
        """Compute the gradients of a step."""
        replica = self._replica(rank.rank, inbox)
        pieces, residual = rank.gradients(
            replica, step, inbox.messages(b"W"), _residual(inbox.message(b"R"))
        )
        for owner, piece in enumerate(pieces):
            out.send(owner, b"G", piece)
        if residual is not None:
            out.send(rank.rank, b"R", residual.view(np.uint8))

    def reduce(self, out: _Outbox, rank: Rank, inbox: Inbox) -> None:
        """Sum the gradients and tell all owners about the sums."""
        if self._owns(rank):
            summed = rank.reduce(inbox.messages(b"G"))
            out.send_all(b"T", rank.statistics(summed, _state(rank, inbox)))
            out.send(rank.rank, b"A", summed.pack())
        out.pass_on(inbox, b"R")

    def update(self, out: _Outbox, rank: Rank, inbox: Inbox, step: Step, last: bool) -> None:
        """Change the weights; after the last step of a group the state stays where it is."""
        if self._owns(rank):
            packed = inbox.message(b"A")
            summed = rank.reduce(inbox.messages(b"G")) if packed is None else Sum.unpack(packed)
            state = _state(rank, inbox)
            rank.update(step, summed, state, inbox.messages(b"T") or None)
            if last:
                out.send(rank.rank, b"D", pack(state.records))
                state.begin_group()
                out.send(rank.rank, b"S", state.message())
            else:
                out.state_of(rank, state)
        out.pass_on(inbox, b"R", line=0 if last else _TO_GRADIENTS)

    def _owns(self, rank: Rank) -> bool:
        return rank.rank < self.plan.owners

    def _replica(self, rank, inbox):
        handle = unpack(inbox.message(b"H"))
        make = functools.partial(self._make, rank, handle)
        return replica_of(self.training, rank, handle["version"], make)

    def _make(self, rank, handle):
        import cloudpickle

        if not is_here(handle):
            raise _Away(
                f"{AWAY} The rows of partition {rank} are on executor {handle['executor']} of "
                f"{handle['host']}, which this task cannot read; Spark runs it again"
            )
        return cloudpickle.loads(self.program.value)(rank, shards_of(handle))


@dataclass(frozen=True)
class _Task:
    """``task(index, frames)`` that yields keys and frames in turn.

    An object and not a closure, since there are two for every step and a closure's code would be
    pickled with each of them.

    Attributes
    ----------
    tasks : Tasks
    work : callable
        ``work(tasks, outbox, rank, inbox, *arguments)``
    arguments : tuple
    line : int
        Where errors go.
    reads : tuple of int
        Lines besides 0 whose frames are for it; it may be given those of others, too.
    """

    tasks: Tasks
    work: Callable
    arguments: tuple = ()
    line: int = 0
    reads: tuple[int, ...] = ()

    def __call__(self, index, frames):
        from bigdl.runtime.task import describe, task_environment

        tasks, rank = self.tasks, Rank(self.tasks.plan, index)
        with rank.reading():
            inbox = Inbox(frames, (0, *self.reads))
        out = _Outbox(index, tasks.plan.ranks)
        errors = inbox.messages(b"E")
        if errors:
            out.send_all(b"E", errors[0], self.line)
            return iter(out.items)
        with task_environment(tasks), _threads(tasks.threads):
            try:
                self.work(tasks, out, rank, inbox, *self.arguments)
            except _Away:
                raise
            except Exception as error:  # Spark would run the user's code again and again
                out.items.clear()
                out.send_all(b"E", pack({"rank": index, **describe(error)}), self.line)
        return iter(out.items)


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


class _Away(Exception):
    """The rows are elsewhere; raised into Spark, which tries again."""


def _state(rank: Rank, inbox: Inbox) -> RankState:
    """The state of the own slice; its weights may have come as those that all ranks get."""
    state = RankState.unpack(inbox.message(b"S"))
    if not state.has_weights:
        state.weights = rank.own_weights(inbox.message(b"W"))
    return state


class _Outbox:
    """Frames on their way, each after the key of the partition that it goes to."""

    def __init__(self, rank: int, ranks: int):
        self._rank, self._ranks = rank, ranks
        self.items: list = []

    def send(self, target: int, kind: bytes, data, line: int = 0) -> None:
        self._send_frames([target], frames_of(kind, self._rank, data, line), line)

    def send_all(self, kind: bytes, data, line: int = 0) -> None:
        self._send_frames(range(self._ranks), frames_of(kind, self._rank, data, line), line)

    def _send_frames(self, targets, frames, line):
        places = [key(target, line) for target in targets]
        for frame in frames:
            for place in places:
                self.items += (place, frame)

    def pass_on(self, inbox: Inbox, kind: bytes, line: int = 0) -> None:
        """Send what came from the same rank on to it."""
        data = inbox.message(kind)
        if data is not None:
            self.send(self._rank, kind, data, line)

    def state_of(self, rank: Rank, state: RankState) -> None:
        """Weights to all ranks; what the next update needs to the own one, nothing twice."""
        exact = rank.sends_exact_weights
        others = [n for n in range(self._ranks) if n != self._rank]
        with rank.sending(state):
            weights = rank.weights(state)
            for targets, line in (
                (others, _TO_GRADIENTS),
                ([self._rank], _TO_BOTH if exact else _TO_GRADIENTS),
            ):
                self._send_frames(targets, frames_of(b"W", self._rank, weights, line), line)
        self.send(self._rank, b"S", state.message(with_weights=not exact), _TO_UPDATE)


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
        engine: Engine,
        plan: LayerPlan,
        program: Callable[[int, dict], Replica],
        feed: FeedGroup,
        *,
        threads: int | None = None,
    ):
        cloudpickle, cluster = require("cloudpickle", "orca"), engine.cluster
        if threads is None:
            per_node = -(-plan.ranks // max(cluster.nodes, 1))
            threads = max(1, cluster.cores_per_node // per_node)
        self._cluster, self._sc, self._plan = cluster, cluster.sc, plan
        are_small = 4 * plan.geometry.total <= _SMALL
        self._pairs = Pairs(self._sc, plan.ranks, are_small=are_small)
        self._state = None
        self._known: list[dict] | None = None
        with contextlib.ExitStack() as opened:
            opened.enter_context(quiet(self._sc))  # again for each job takes its time
            ship_modules(self._sc)
            number = opened.enter_context(job_number())
            shipped = self._sc.broadcast(cloudpickle.dumps(program))
            opened.callback(shipped.unpersist)
            self._tasks = Tasks(
                secrets.token_hex(8), plan, shipped, threads, tuple(user_import_path())
            )
            self._rows = self._call(lambda: Rows(cluster, self._pairs, feed, number))
            opened.callback(self._rows.close)
            self._resources = opened.pop_all()

    def rows(self) -> list[dict]:
        if self._known is None:
            describe = _Task(self._tasks, Tasks.describe)
            self._known = self._call(
                lambda: self._answers(self._pairs.mapped(self._rows.handles, describe))
            )
        return self._known

    def _answers(self, pairs) -> list:
        """Return what the ranks have for the driver, or raise the first error of user code."""
        collected = self._pairs.values(pairs).mapPartitionsWithIndex(_answers).collect()
        answers = [answer for _, answer in sorted(collected, key=lambda pair: pair[0])]
        for answer in answers:
            if "error" in answer:
                raise user_error(answer["error"])
        return [answer["doc"] for answer in answers]

    def start(self, states: Sequence[RankState]) -> None:
        if self._state is not None:  # again: what was lost may be the rows
            self._call(self._rows.renew)
        self.recut(states)

    def recut(self, states: Sequence[RankState]) -> None:
        def begin():
            if self._state is not None:
                self._pairs.drop_for_good(self._state)
            self._cut(len(states))
            packed = dict(enumerate(map(_packed, states)))
            shipped = self._sc.broadcast(packed)

            def give(index, items):
                for _ in items:
                    pass
                for kind, data in shipped.value.get(index, ()):
                    for frame in frames_of(kind, index, data):
                        yield key(index)
                        yield frame

            state = self._pairs.mapped(self._pairs.tokens(), give)
            self._take(state)
            self._pairs.values(state).count()
            shipped.unpersist()

        self._call(begin)

    def _cut(self, slices):
        """Have so many owners of slices from now on."""
        self._plan = replace(self._plan, slices=slices)
        self._tasks = replace(self._tasks, plan=self._plan)

    def run(self, steps: Sequence[Step]) -> list[list[dict]]:
        return self._call(lambda: self._group(steps))

    def _group(self, steps):
        pairs, shuffles, before = self._pairs, [], self._state

        def task(work, *arguments, line=0, reads=()):
            return _Task(self._tasks, work, arguments, line, reads)

        def shuffled(source, task):
            shuffles.append(pairs.shuffled(source, task))
            return shuffles[-1]

        def with_state(contributions, update):
            return pairs.beside(contributions, pairs.on_lines(update, *FOR_UPDATE))

        update = shuffled(before, task(Tasks.begin, line=_TO_GRADIENTS))
        for number, step in enumerate(steps, 1):
            weights = pairs.beside(self._rows.handles, pairs.on_lines(update, *FOR_GRADIENTS))
            contributions = shuffled(weights, task(Tasks.gradients, step, reads=FOR_GRADIENTS))
            if self._plan.needs_statistics:
                summed = with_state(contributions, update)
                contributions = shuffled(summed, task(Tasks.reduce, reads=FOR_UPDATE))
            contributions = with_state(contributions, update)
            if number < len(steps):
                make = task(Tasks.update, step, False, line=_TO_GRADIENTS, reads=FOR_UPDATE)
                update = shuffled(contributions, make)
        state = pairs.mapped(contributions, task(Tasks.update, steps[-1], True, reads=FOR_UPDATE))
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
            inbox = Inbox(self._pairs.values(self._state).collect())
            states = [RankState.unpack(data) for data in inbox.messages(b"S")]
            residuals = inbox.messages(b"R") or [None] * len(states)
            for state, residual in zip(states, residuals, strict=True):
                state.residual = _residual(residual)
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


def _answers(index, frames):
    """Yield the rank, and its document for the driver, if it has one, or its error."""
    inbox = Inbox(frames)
    for name, kind in (("error", b"E"), ("doc", b"D")):
        for message in inbox.messages(kind)[:1]:
            yield index, {name: unpack(message)}
            return


def _packed(state: RankState) -> list:
    messages = [(b"S", bytes(state.message()))]
    if state.residual is not None:
        messages.append((b"R", state.residual.tobytes()))
    return messages


def _residual(data):
    return None if data is None else np.frombuffer(data, np.float32)
