"""The barrier transport: a group of steps in one barrier stage, whose ranks talk to each other.

Inside the stage pieces go from peer to peer by gloo: gradients to the owners of the slices (a
reduce-scatter whose sum is made in the order of the ranks), weights to everybody (an all-gather).
After a group the executors keep the state (:mod:`~.kept`), and a group that fails is run again.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import WorkerLost, require
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.parameter_layer.kept import KeptStates, folder_of
from bigdl.orca.parameter_layer.messages import Message, pack, unpack
from bigdl.orca.parameter_layer.peers import exchanged
from bigdl.orca.parameter_layer.plan import LayerPlan, Step
from bigdl.orca.parameter_layer.rank import Rank
from bigdl.orca.parameter_layer.replicas import replica_of
from bigdl.orca.parameter_layer.state import RankState
from bigdl.orca.parameter_layer.transport import Transport
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.jobs import job_number
from bigdl.runtime.shards.shard import remove_spool

__all__ = ["BarrierTransport"]

_DESCRIBE, _RUN, _GIVE = "describe", "run", "give"  # what a stage is for
_LOST = "lost"  # the answer of ranks where the state of one is gone


class BarrierTransport(Transport):
    """A barrier stage for every group.

    Parameters
    ----------
    engine : bigdl.runtime.engine.Engine
    plan : LayerPlan
    program, feed, threads
        See :class:`~.shuffle.ShuffleTransport`.
    """

    def __init__(self, engine, plan: LayerPlan, program, feed, *, threads: int | None = None):
        self._plan = plan
        self._resources = contextlib.ExitStack()
        try:
            # again for each group takes its time
            self._resources.enter_context(quiet(engine.cluster.sc))
            number = self._resources.enter_context(job_number())
            training = secrets.token_hex(8)
            self._job = engine.open(
                GroupProgram(training, number, plan, program),
                feed,
                plan.ranks,
                threads=threads,
                keep_spools=True,
            )
            self._resources.callback(self._job.close)
        except BaseException:
            self._resources.close()
            raise
        self._given: list[RankState] = []  # by `start`, and not with the executors yet
        self._name: str | None = None  # of the states that the executors keep
        self._known: list[dict] | None = None
        self._folders: set[str] = set()  # where states are, perhaps on other machines

    def rows(self):
        if self._known is None:
            self._known = [known for known, _ in self._asked({"stage": _DESCRIBE})]
        return self._known

    def start(self, states):
        self._given, self._name, self.keeps_state = list(states), None, True

    def run(self, steps):
        cloudpickle = require("cloudpickle", "orca")
        arrays = [cloudpickle.dumps(list(steps))]
        arrays += [_message(state).written() for state in self._given]
        following = secrets.token_hex(8)
        found = self._asked({"stage": _RUN, "next": following}, pack(None, arrays))
        self._given, self._name = [], following
        return [records for records, _ in found]

    def states(self):
        if self._given:
            return self._given
        return [_state(arrays[0]) for _, arrays in self._asked({"stage": _GIVE})]

    def _asked(self, options, data=None):
        """What the ranks answer: documents and arrays."""
        found = []
        for answer in self._job.attempt({**options, "name": self._name}, data):
            (folder, doc), arrays = unpack(answer)
            self._folders.add(folder)
            found.append((doc, arrays))
        if any(doc == _LOST for doc, _ in found):
            self.keeps_state = False
            raise WorkerLost("The weights were lost with all executors that had them")
        return found

    def close(self):
        self._resources.close()
        for folder in self._folders:  # those of other machines go when the next job begins there
            remove_spool(folder)


@dataclass
class GroupProgram:
    """What a worker does in one group; shipped by the engine."""

    training: str
    job: int
    plan: LayerPlan
    program: Callable[[int, dict], Any]

    def __call__(self, worker):
        folder = folder_of(worker.local_dir, self.job, self.training)
        doc, arrays = self._answer(worker, folder)
        return pack([folder, doc], arrays)

    def _answer(self, worker, folder):
        """A document and arrays for the driver."""
        options = worker.options
        if options["stage"] == _DESCRIBE:
            return self._replica(worker).describe(), []
        sync = TorchDistributedSync(worker)
        sync.start()
        states = KeptStates(sync, folder)
        states.keep_only(options["name"])
        steps, *given = _told(sync, worker.state())
        own = given[worker.rank] if given else states.read(options["name"])
        if own is None:
            return _LOST, []
        if options["stage"] == _GIVE:
            return None, [own]
        state = _state(own)
        state.begin_group()
        replica, rank = self._replica(worker), Rank(self.plan, worker.rank)
        # from the driver, not from a worker
        for step in pickle.loads(steps):
            self._step(step, rank, replica, state, sync)
        states.write(options["next"], _message(state))
        return state.records, []

    def _replica(self, worker):
        version = [shard.spool.nonce for shard in worker.shards.values()]
        shards = dict(worker.shards)  # the engine lets go of its own
        make = functools.partial(self.program, worker.rank, shards)
        return replica_of(self.training, worker.rank, version, make)

    def _step(self, step: Step, rank, replica, state, sync):
        with rank.sending(state):
            own = rank.weights(state)
        with rank.reading():
            weights = exchanged(sync, [own] * self.plan.ranks)
        pieces, state.residual = rank.gradients(replica, step, weights, state.residual)
        with rank.reading():
            pieces = exchanged(sync, pieces)
        found = rank.reduce(pieces)
        statistics = None
        if self.plan.needs_statistics:
            own = Message(None, [rank.statistics(found, state)])
            with rank.reading():
                told = exchanged(sync, [own] * self.plan.ranks)
            statistics = [arrays[0] for _, arrays in map(unpack, told)]
        rank.update(step, found, state, statistics)


def _told(sync, data) -> list:
    """What the driver told rank 0: nothing, or the steps and perhaps all states."""
    data = sync.broadcast(data)
    return [None] if data is None else unpack(data)[1]


def _message(state: RankState) -> Message:
    """A state with its residual."""
    arrays = [] if state.residual is None else [state.residual]
    return Message(None, [state.message().written(), *arrays])


def _state(data) -> RankState:
    """The inverse of :func:`_message`."""
    _, (packed, *residual) = unpack(data)
    return RankState.unpack(packed, residual[0].copy() if residual else None)
