"""Stages of an iteration of synchronous SGD, for each policy.

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

_CHUNKS = 4  # number of parts in which a task's fetches are interleaved with those of others
_FULL = 4  # bytes of a number in the state that an owner keeps


@dataclass(frozen=True)
class Stage:
    """Tasks that start together.

    Attributes
    ----------
    tasks : int
    legs : tuple of Leg
    """

    tasks: int
    legs: tuple[Leg, ...]


@dataclass(frozen=True)
class Overlapped:
    """Bucketed gradient exchange that overlaps with computing.

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
        """Return the seconds of both, from those of all computing and of one bucket's exchange."""
        end = 0.0
        for number in range(1, self.buckets + 1):
            ready = self.forward + (1 - self.forward) * number / self.buckets
            end = max(end, ready * computing) + exchange
        return end


@dataclass(frozen=True)
class Parts:
    """Builder of the parts of iterations: stages, and legs of the driver alone.

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
        """Return a stage of a job: the driver's part, and its tasks."""
        tasks = tasks or self.workload.workers
        begin = Leg("schedule", Server.SCHEDULER, self.costs.stage_s)
        return [begin, Stage(tasks, (*self._begin(), *legs))]

    def _begin(self) -> tuple[Leg, Leg]:
        return (
            Leg("schedule", Server.SCHEDULER, self.costs.dispatch_s),
            Leg("schedule", Server.CORE, self.costs.task_s),
        )

    def fetch(self, phase: str, sources: int, size: float, lookups: int) -> tuple[Leg, ...]:
        """Return a leg that reads `size` bytes in equal blocks from all `sources`."""
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
        """Return a leg in which a core processes `size` bytes."""
        return Leg(phase, Server.CORE, size * self.costs.byte_s)

    def to_driver(self, size: float) -> tuple[Leg, Leg]:
        """Return a leg in which every task sends `size` bytes to the driver, which sums them."""
        return (
            Leg("gradients", Server.DRIVER_NETWORK, size / self.cluster.bandwidth),
            Leg("gradients", Server.DRIVER_CORE, size * self.costs.byte_s),
        )

    def broadcast(self) -> Leg:
        """Return a torrent broadcast of the weights from the driver."""
        size, rounds = self.workload.vector_bytes, math.ceil(math.log2(self.workload.workers + 1))
        each = size / self.cluster.bandwidth + self.cluster.latency_s
        return Leg("weights", Server.NOBODY, rounds * each + size * self.costs.byte_s)

    # -- policies ----------------------------------------------------------------------------------

    def plain(self, _first: bool, _last: bool) -> Iterator:
        """Return an iteration with per-block look-ups, where an owner stores its weights once."""
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
        """Return an iteration with one look-up per shuffle, which also carries the state."""
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
        """Return an iteration of barrier stages, with states on local disks and a remote copy."""
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
        """Return an iteration with a ring all-reduce.

        Two halves of every part are in flight at once: one is summed while the other is sent.
        """
        yield self._together(_COMPUTE)
        yield self._in_ring(self.workload.vector_bytes)

    def halving(self, _first: bool, _last: bool) -> Iterator:
        """Return an iteration with recursive halving and doubling."""
        yield self._together(_COMPUTE)
        yield self._by_halves(self.workload.vector_bytes)

    def overlap(self, _first: bool, _last: bool) -> Iterator:
        """Return an iteration with an overlapped all-reduce and replicated updates."""
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
        """Return legs for each half of the data, so that sending overlaps with computing."""
        return Stage(2 * self.workload.workers, legs)

    def _by_halves(self, size: float) -> Stage:
        """Return the rounds of halving by the prime factors of the number of workers."""
        sizes: list[float] = []
        for factor in factors(self.workload.workers):
            size /= factor
            sizes += [size] * (factor - 1)
        return Stage(self.workload.workers, self._rounds([*sizes, *reversed(sizes)]))

    def _rounds(self, sizes: Sequence[float]) -> tuple[Leg, ...]:
        """Return rounds in which every task sends and receives the given sizes."""
        costs, cluster = self.costs, self.cluster
        legs: list[Leg] = []
        for size in sizes:
            work = costs.block_s + size * costs.byte_s
            legs += (
                Leg("gradients", Server.NOBODY, cluster.latency_s / 2),
                Leg("gradients", Server.NETWORK, size / cluster.bandwidth),
                Leg("gradients", Server.CORE, work),
            )
        return tuple(legs)

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
        """Return a stage of running tasks that wait for each other."""
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
