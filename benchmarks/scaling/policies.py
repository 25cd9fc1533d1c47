"""Which stages an iteration of synchronous SGD consists of, under each policy.

==============  ================================================================================
``plain``       two jobs per iteration over blocks whose places the driver knows (BigDL, SoCC
                2019, section 3.3): get weights, compute, put gradients; sum, update, put weights
``group``       the same exchange through Spark's shuffle, K iterations chained in one job
                (``transport="shuffle"`` of the parameter layer)
``barrier``     a barrier stage runs K iterations, in which tasks talk to each other
                (``transport="barrier"``)
``ring``        no jobs: an all-reduce in a ring (``torch.distributed`` on gloo)
``halving``     the same by recursive halving and doubling, in fewer rounds
``overlap``     ``ring`` in buckets, which are summed while the backward pass computes others
                (``backend="spark"``)
``overlap-halving``  the same for ``halving``
``driver``      ``RDD.reduce``: all gradients go to the driver, weights by torrent broadcast
``tree``        ``RDD.treeReduce`` of depth 2
==============  ================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bigdl.runtime.collectives.halving import factors

from .model import Cluster, Costs, Workload
from .stage import COMPUTE, Leg, Server

__all__ = ["ALL_REDUCE", "POLICIES", "Overlapped", "Parts", "Stage"]

_CHUNKS = 4  # a task's fetches are interleaved with those of others in so many parts
_FULL = 4  # bytes of a number in the state that an owner keeps


@dataclass(frozen=True)
class Stage:
    """Tasks that begin together.

    Attributes
    ----------
    tasks : int
    legs : tuple of Leg
    """

    tasks: int
    legs: tuple[Leg, ...]


@dataclass(frozen=True)
class Overlapped:
    """Gradients that meet in buckets of equal size while the rest of them is computed.

    A bucket is summed when all tasks have it and the one before it is done; summing does not slow
    computing down.

    Attributes
    ----------
    computing : Stage
    exchange : Stage
        Of a bucket.
    buckets : int
    forward : float
        See :class:`~.model.Workload`.
    """

    computing: Stage
    exchange: Stage
    buckets: int
    forward: float

    def end(self, computing: float, exchange: float) -> float:
        """Seconds of both, given those of all computing and of one bucket's exchange."""
        end = 0.0
        for number in range(1, self.buckets + 1):
            ready = self.forward + (1 - self.forward) * number / self.buckets
            end = max(end, ready * computing) + exchange
        return end


@dataclass(frozen=True)
class Parts:
    """Makes the parts of iterations: stages, and legs that the driver does alone.

    Attributes
    ----------
    workload : Workload
    costs : Costs
    cluster : Cluster
    """

    workload: Workload
    costs: Costs
    cluster: Cluster

    # -- what policies are made of -----------------------------------------------------------------

    def launch(self, jobs: float = 1.0) -> Leg:
        return Leg("schedule", Server.SCHEDULER, jobs * self.costs.launch_s)

    def stage(self, *legs: Leg, tasks: int | None = None) -> list:
        """A stage of a job: the driver's part, and its tasks."""
        tasks = tasks or self.workload.workers
        begin = Leg("schedule", Server.SCHEDULER, self.costs.stage_s)
        return [begin, Stage(tasks, (*self._begin(), *legs))]

    def _begin(self) -> tuple[Leg, Leg]:
        return (
            Leg("schedule", Server.SCHEDULER, self.costs.dispatch_s),
            Leg("schedule", Server.CORE, self.costs.task_s),
        )

    def fetch(self, phase: str, sources: int, size: float, lookups: int) -> tuple[Leg, ...]:
        """Get `size` bytes in equal blocks from all `sources`, of which one is the own node."""
        costs, cluster = self.costs, self.cluster
        remote = (sources - 1) / sources
        rounds = math.ceil((sources - 1) / cluster.requests)
        work = sources * costs.block_s + size * costs.byte_s
        legs = (
            Leg(phase, Server.LOCATOR, lookups * costs.lookup_s / _CHUNKS),
            Leg(phase, Server.NOBODY, rounds * cluster.latency_s / _CHUNKS),
            Leg(phase, Server.NETWORK, size * remote / cluster.bandwidth / _CHUNKS),
            Leg(phase, Server.CORE, work / _CHUNKS),
        )
        return tuple(leg for leg in legs if leg.seconds) * _CHUNKS

    def work(self, phase: str, size: float) -> Leg:
        """A core goes through `size` bytes."""
        return Leg(phase, Server.CORE, size * self.costs.byte_s)

    def to_driver(self, size: float) -> tuple[Leg, Leg]:
        """Every task sends `size` bytes to the driver, which sums them."""
        return (
            Leg("gradients", Server.DRIVER_NETWORK, size / self.cluster.bandwidth),
            Leg("gradients", Server.DRIVER_CORE, size * self.costs.byte_s),
        )

    def broadcast(self) -> Leg:
        """Weights from the driver to all, as a torrent: those who have them pass them on."""
        size, rounds = self.workload.vector_bytes, math.ceil(math.log2(self.workload.workers + 1))
        each = size / self.cluster.bandwidth + self.cluster.latency_s
        return Leg("weights", Server.NOBODY, rounds * each + size * self.costs.byte_s)

    # -- policies ----------------------------------------------------------------------------------

    def plain(self, _first: bool, _last: bool) -> Iterator:
        """Blocks are looked up one by one, and an owner stores its weights once."""
        workers, size = self.workload.workers, self.workload.vector_bytes
        yield self.launch()
        yield from self.stage(
            *self.fetch("weights", workers, size, workers - 1),
            _COMPUTE,
            self.work("gradients", size),
        )
        yield self.launch()
        yield from self.stage(
            *self.fetch("gradients", workers, size, workers - 1),
            self.work("update", size / workers),
        )

    def group(self, first: bool, _last: bool) -> Iterator:
        """Places of all blocks of a shuffle come at once; the owner's state travels along."""
        workers, size = self.workload.workers, self.workload.vector_bytes
        state = 2 * _FULL * self.workload.parameters / workers
        if first:
            yield self.launch()
            yield from self.stage(self.work("weights", size + state))
        yield from self.stage(
            *self.fetch("weights", workers, size, 1),
            _COMPUTE,
            self.work("gradients", size + state),
        )
        yield from self.stage(
            *self.fetch("gradients", workers, size, 1),
            self.work("update", size + state),
        )

    def barrier(self, first: bool, last: bool) -> Iterator:
        """A rank reads its state from its disk, and leaves it there with a copy elsewhere."""
        workers, size = self.workload.workers, self.workload.vector_bytes
        state = _FULL * self.workload.parameters / workers
        if first:
            yield self.launch()
            yield from self.stage(self.work("schedule", state))
        yield self._in_blocks(self.fetch("weights", workers, size / 2, 0))
        yield self._together(_COMPUTE, self.work("gradients", size))
        yield self._in_blocks(self.fetch("gradients", workers, size / 2, 0))
        yield self._together(self.work("update", size / workers))
        if last:
            yield self._together(
                Leg("schedule", Server.NETWORK, state / self.cluster.bandwidth),
                self.work("schedule", state),
            )

    def ring(self, _first: bool, _last: bool) -> Iterator:
        """Every task sends a part of the vector to the next one, in as many rounds as it takes.

        Two halves of every part are on their way at once: one is summed while the other is sent.
        """
        yield self._together(_COMPUTE)
        yield self._in_ring(self.workload.vector_bytes)

    def halving(self, _first: bool, _last: bool) -> Iterator:
        """Pairs exchange halves of what they have, then of that half, and back."""
        yield self._together(_COMPUTE)
        yield self._by_halves(self.workload.vector_bytes)

    def overlap(self, _first: bool, _last: bool) -> Iterator:
        """Every task updates all weights."""
        yield from self._overlapped(self._in_ring)

    def overlap_halving(self, _first: bool, _last: bool) -> Iterator:
        yield from self._overlapped(self._by_halves)

    def _overlapped(self, exchange) -> Iterator:
        workload = self.workload
        bucket = exchange(workload.vector_bytes / workload.buckets)
        computing = self._together(_COMPUTE)
        yield Overlapped(computing, bucket, workload.buckets, workload.forward)
        yield self._together(self.work("update", workload.vector_bytes))

    def _in_ring(self, size: float) -> Stage:
        workers = self.workload.workers
        return self._in_blocks(self._rounds([size / workers / 2] * (2 * (workers - 1))))

    def _in_blocks(self, legs: Sequence[Leg]) -> Stage:
        """Legs for each half of what is exchanged: work on one while the other is sent."""
        return Stage(2 * self.workload.workers, legs)

    def _by_halves(self, size: float) -> Stage:
        """The prime factors of the workers take the place of the twos; a round is one message."""
        sizes: list[float] = []
        for factor in factors(self.workload.workers):
            size /= factor
            sizes += [size] * (factor - 1)
        return Stage(self.workload.workers, self._rounds([*sizes, *reversed(sizes)]))

    def _rounds(self, sizes: Sequence[float]) -> tuple[Leg, ...]:
        """Every task sends and gets so many bytes, in turn."""
        costs, cluster = self.costs, self.cluster
        found: list[Leg] = []
        for size in sizes:
            work = costs.block_s + size * costs.byte_s
            found += (
                Leg("gradients", Server.NOBODY, cluster.latency_s / 2),
                Leg("gradients", Server.NETWORK, size / cluster.bandwidth),
                Leg("gradients", Server.CORE, work),
            )
        return tuple(found)

    def driver(self, _first: bool, _last: bool) -> Iterator:
        size = self.workload.vector_bytes
        yield self.launch()
        yield self.broadcast()
        yield from self.stage(_COMPUTE, self.work("gradients", size), *self.to_driver(size))
        yield Leg("update", Server.DRIVER_CORE, size * self.costs.byte_s)

    def tree(self, _first: bool, _last: bool) -> Iterator:
        workers, size = self.workload.workers, self.workload.vector_bytes
        middle = math.isqrt(workers - 1) + 1
        each = math.ceil(workers / middle)
        yield self.launch()
        yield self.broadcast()
        yield from self.stage(_COMPUTE, self.work("gradients", size))
        yield from self.stage(
            *self.fetch("gradients", each, each * size, 1), *self.to_driver(size), tasks=middle
        )
        yield Leg("update", Server.DRIVER_CORE, size * self.costs.byte_s)

    def _together(self, *legs: Leg) -> Stage:
        """Tasks that run already and wait for each other."""
        return Stage(self.workload.workers, legs)


_COMPUTE = Leg(COMPUTE, Server.NOBODY)

POLICIES = {
    "plain": Parts.plain,
    "group": Parts.group,
    "barrier": Parts.barrier,
    "ring": Parts.ring,
    "halving": Parts.halving,
    "overlap": Parts.overlap,
    "overlap-halving": Parts.overlap_halving,
    "driver": Parts.driver,
    "tree": Parts.tree,
}

ALL_REDUCE = ("ring", "halving", "overlap", "overlap-halving")  # by torch.distributed
