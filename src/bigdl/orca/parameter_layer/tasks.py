"""The Python tasks of the shuffle transport: stateless functions from frames to frames.

What the tasks of a step send goes through Spark's shuffle to those of the next.  The state is not
handed on by the tasks that compute gradients: the next update reads it from the shuffle of the one
before, where it lies on a line of its own (:func:`~.pairs.key`).

======  =========================================================================
kind    message
======  =========================================================================
``H``   handle of the rows of a partition
``D``   what a replica says of its rows, to the driver
``S``   :class:`~.state.RankState` of a rank, to itself
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.orca.parameter_layer.frames import Inbox, frames_of
from bigdl.orca.parameter_layer.messages import pack, unpack
from bigdl.orca.parameter_layer.pairs import key
from bigdl.orca.parameter_layer.plan import LayerPlan, Step
from bigdl.orca.parameter_layer.rank import Rank, Sum
from bigdl.orca.parameter_layer.replicas import replica_of
from bigdl.orca.parameter_layer.rows import is_here, shards_of
from bigdl.orca.parameter_layer.state import RankState

__all__ = ["AWAY", "FOR_GRADIENTS", "FOR_UPDATE", "Tasks"]

_TO_GRADIENTS, _TO_BOTH, _TO_UPDATE = 1, 2, 3

FOR_GRADIENTS = (_TO_GRADIENTS, _TO_BOTH)
"""First and last of the lines that the tasks of :meth:`Tasks.gradients` read of an update."""

FOR_UPDATE = (_TO_BOTH, _TO_UPDATE)
"""Those that the tasks of :meth:`Tasks.reduce` and :meth:`Tasks.update` read of the one before."""

AWAY = "bigdl-rows-away:"


@dataclass(frozen=True)
class Tasks:
    """What the tasks of one training are made of; travels with every one of them.

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

    def begin(self) -> Callable:
        """Send out the weights at the start of a group."""
        return _Task(self, Tasks._begin, line=_TO_GRADIENTS)

    def describe(self) -> Callable:
        """Open the replica and say what it has."""
        return _Task(self, Tasks._describe)

    def gradients(self, step: Step) -> Callable:
        """Compute the gradients of a step."""
        return _Task(self, Tasks._gradients, (step,), reads=FOR_GRADIENTS)

    def reduce(self) -> Callable:
        """Sum the gradients and tell all owners about the sums."""
        return _Task(self, Tasks._reduce, reads=FOR_UPDATE)

    def update(self, step: Step, *, last: bool) -> Callable:
        """Change the weights; after the last step of a group the state stays where it is."""
        line = 0 if last else _TO_GRADIENTS
        return _Task(self, Tasks._update, (step, last), line, reads=FOR_UPDATE)

    def _begin(self, out, rank, inbox):
        kept = inbox.message(b"S")
        if kept is not None:  # every rank owns a slice, or only the first ones
            state = RankState.unpack(kept)
            state.begin_group()
            out.state_of(rank, state)
        out.pass_on(inbox, b"R", line=_TO_GRADIENTS)

    def _describe(self, out, rank, inbox):
        doc = self._replica(rank.rank, inbox).describe()
        out.send(rank.rank, b"D", pack(doc))

    def _gradients(self, out, rank, inbox, step):
        replica = self._replica(rank.rank, inbox)
        residual = inbox.message(b"R")
        if residual is not None:
            residual = np.frombuffer(residual, np.float32)
        pieces, residual = rank.gradients(replica, step, inbox.messages(b"W"), residual)
        for owner, piece in enumerate(pieces):
            out.send(owner, b"G", piece)
        if residual is not None:
            out.send(rank.rank, b"R", residual.view(np.uint8))

    def _reduce(self, out, rank, inbox):
        if self._owns(rank):
            found = rank.reduce(inbox.messages(b"G"))
            out.send_all(b"T", rank.statistics(found, _state(rank, inbox)))
            out.send(rank.rank, b"A", found.pack())
        out.pass_on(inbox, b"R")

    def _update(self, out, rank, inbox, step, last):
        if self._owns(rank):
            summed = inbox.message(b"A")
            found = rank.reduce(inbox.messages(b"G")) if summed is None else Sum.unpack(summed)
            state = _state(rank, inbox)
            rank.update(step, found, state, inbox.messages(b"T") or None)
            if last:
                out.send(rank.rank, b"S", state.message())
            else:
                out.state_of(rank, state)
        out.pass_on(inbox, b"R", line=0 if last else _TO_GRADIENTS)

    def _owns(self, rank: Rank) -> bool:
        return rank.rank < self.plan.owners

    def _replica(self, rank, inbox):
        handle = unpack(inbox.message(b"H"))[0]
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
