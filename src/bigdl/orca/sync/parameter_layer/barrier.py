"""The barrier transport: a group of steps in one barrier stage, whose ranks talk to each other.

Inside the stage pieces go from peer to peer by gloo: gradients to the owners of the slices (a
reduce-scatter whose sum is made in the order of the ranks), weights to everybody (an all-gather).
The state comes to the driver at the end of every group, through the engine's channel, and goes out
with the next: a group that fails is run again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import require
from bigdl.orca.engine.base import PeerLost
from bigdl.orca.sync.parameter_layer.messages import pack, unpack
from bigdl.orca.sync.parameter_layer.rank import LayerPlan, Rank, Step
from bigdl.orca.sync.parameter_layer.replicas import replica_of
from bigdl.orca.sync.parameter_layer.state import RankState
from bigdl.orca.sync.parameter_layer.transport import Transport
from bigdl.orca.sync.torch_distributed import TorchDistributedSync

__all__ = ["BarrierTransport"]


class BarrierTransport(Transport):
    """A barrier stage for every group.

    Parameters
    ----------
    engine : bigdl.orca.engine.base.Engine
    plan : LayerPlan
    program, feed, threads
        See :class:`~.shuffle.ShuffleTransport`.
    """

    keeps_state = True

    def __init__(self, engine, plan: LayerPlan, program, feed, *, threads: int | None = None):
        self._plan = plan
        training = secrets.token_hex(8)
        self._job = engine.open(
            GroupProgram(training, plan, program),
            feed,
            plan.ranks,
            threads=threads,
            keep_spools=True,
        )
        self._states: list[bytes] = []
        self._residuals: list[bytes | None] = []
        self._known: list[dict] | None = None

    def rows(self):
        if self._known is None:
            self._known = [unpack(found)[0] for found in self._job.attempt({"group": False})]
        return self._known

    def start(self, states):
        self._take(
            [state.pack() for state in states],
            [None if s.residual is None else s.residual.tobytes() for s in states],
        )

    def _take(self, states, residuals):
        self._states, self._residuals = states, residuals

    def run(self, steps):
        cloudpickle = require("cloudpickle", "orca")
        with_residuals = self._residuals[0] is not None
        arrays = [cloudpickle.dumps(list(steps)), *self._states]
        arrays += self._residuals if with_residuals else []
        found = [
            unpack(data)
            for data in self._job.attempt({"group": True}, pack(with_residuals, arrays))
        ]
        self._take(
            [arrays[0].tobytes() for _, arrays in found],
            [arrays[1].tobytes() if len(arrays) > 1 else None for _, arrays in found],
        )
        return [records for records, _ in found]

    def states(self):
        return [
            RankState.unpack(data, None if kept is None else np.frombuffer(kept, np.float32))
            for data, kept in zip(self._states, self._residuals, strict=True)
        ]

    def close(self):
        self._job.close()


@dataclass
class GroupProgram:
    """What a worker does in one group; shipped by the engine."""

    training: str
    plan: LayerPlan
    program: Callable[[int, dict], Any]

    def __call__(self, worker):
        sync = TorchDistributedSync(worker)
        if not worker.options["group"]:
            return pack(self._replica(worker).describe())
        sync.start()
        _, (steps, *arrays) = _given(sync, worker.state())
        ranks, own = self.plan.ranks, worker.rank
        kept = arrays[ranks + own].view(np.float32) if len(arrays) > ranks else None
        state = RankState.unpack(arrays[own], kept)
        state.begin_group()
        replica = self._replica(worker)
        rank = Rank(self.plan, own)
        # from the driver, not from a worker
        for step in pickle.loads(steps):
            self._step(step, rank, replica, state, sync)
        arrays = [state.pack()]
        if state.residual is not None:
            arrays.append(state.residual.view(np.uint8))
        return pack(state.records, arrays)

    def _replica(self, worker):
        version = [shard.spool.nonce for shard in worker.shards.values()]
        shards = dict(worker.shards)  # the engine lets go of its own
        make = functools.partial(self.program, worker.rank, shards)
        return replica_of(self.training, worker.rank, version, make)

    def _step(self, step: Step, rank, replica, state, sync):
        weights = _exchanged(sync, [rank.weights(state)] * self.plan.ranks)
        pieces, state.residual = rank.gradients(replica, step, weights, state.residual)
        found = rank.reduce(_exchanged(sync, pieces))
        statistics = None
        if self.plan.needs_statistics:
            statistics = _exchanged(sync, [rank.statistics(found, state)] * self.plan.ranks)
        rank.update(step, found, state, statistics)


def _given(sync, data):
    return unpack(sync.broadcast(data))


def _exchanged(sync, pieces: Sequence[bytes]) -> list:
    """Give a piece to every rank; returns what the ranks gave, in their order. A collective."""
    if sync.world_size == 1:
        return list(pieces)
    import torch
    import torch.distributed as dist

    sent = torch.tensor([len(piece) for piece in pieces])
    received = torch.empty_like(sent)
    with _peers():
        dist.all_to_all_single(received, sent)
    sizes = received.tolist()
    joined = torch.from_numpy(np.frombuffer(bytearray().join(pieces), np.uint8))
    buffer = torch.empty(sum(sizes), dtype=torch.uint8)
    with _peers():
        dist.all_to_all_single(buffer, joined, sizes, sent.tolist())
    starts = np.concatenate([[0], np.cumsum(sizes)])
    view = buffer.numpy()
    # copies: views would not begin at a multiple of 8 bytes
    return [view[a:b].tobytes() for a, b in itertools.pairwise(starts)]


@contextlib.contextmanager
def _peers():
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).split("\n")[0]) from error
