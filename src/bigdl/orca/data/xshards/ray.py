"""XShards in Ray's object store."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from bigdl.common.display import call_text
from bigdl.common.errors import LazyModule, UsageError, hide_frames
from bigdl.common.timeouts import ACTOR_PLACE_S
from bigdl.orca.cluster.ray import RayBroadcast, RayCluster
from bigdl.orca.cluster.ray_launch import ray_get
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.xshards.ray_exchange import RayAddress, partitions_to_ray
from bigdl.orca.data.xshards.spark import (
    SharedValue,
    SparkXShards,
    XShards,
    unwrap_shared_values,
)

__all__ = ["RayXShards"]

ray = LazyModule("ray", "ray")
logger = logging.getLogger("bigdl.orca")


@hide_frames
class RayXShards(XShards):
    """XShards whose partitions are objects in Ray's object store, each a list of shards.

    Create them with :meth:`from_spark_xshards`, with ``XShards.partition`` in a program with
    ``runtime="ray"``, or with :meth:`from_partition_refs`.  Ray computes transformations
    immediately, in the background.

    Parameters
    ----------
    references : sequence of ray.ObjectRef
        References of the partitions, each a list of shards.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import XShards
    >>> from bigdl.orca.data.xshards.ray import RayXShards
    >>> sc = init_orca_context("local", cores=2, init_ray_on_spark=True)
    >>> shards = RayXShards.from_spark_xshards(XShards.partition(np.arange(4), num_shards=2))
    >>> [shard.tolist() for shard in shards.transform_shard(lambda shard: shard * 10).collect()]
    [[0, 10], [20, 30]]
    """

    def __init__(self, references: Sequence):
        self._references = list(references)

    @classmethod
    def _from_shards(cls, shards: list) -> RayXShards:
        return cls([ray.put([shard]) for shard in shards])

    # From and to others -------------------------------------------------------------------------

    @staticmethod
    def from_spark_xshards(spark_xshards: SparkXShards) -> RayXShards:
        """Compute SparkXShards and store them in Ray's object store, bypassing the driver.

        Raises
        ------
        UsageError
            If `spark_xshards` has another type, or Ray does not run on Spark's nodes.
        """
        if not isinstance(spark_xshards, SparkXShards):
            raise UsageError(
                f"from_spark_xshards needs SparkXShards, got {type(spark_xshards).__name__}",
                code="data-type",
                argument="spark_xshards",
            )
        return RayXShards(partitions_to_ray(spark_xshards.rdd, RayCluster.of_program()))

    def to_spark_xshards(self) -> SparkXShards:
        """Return the same shards as SparkXShards, in the same partitions and order.

        Spark tasks fetch them from Ray, which keeps them while the result is in use.
        """
        exchange = RayAddress.of(RayCluster.of_program())
        exchange.leave(self._references)

        def fetch(indices):
            for index in indices:
                yield from exchange.take(index)

        number = max(1, self.num_partitions())
        indices = SparkCluster.from_active().sc.parallelize(range(self.num_partitions()), number)
        rdd = indices.mapPartitions(fetch)
        weakref.finalize(rdd, exchange.drop)
        return SparkXShards(rdd)

    @staticmethod
    def from_partition_refs(
        ip2part_id: dict[str, list[int]], part_id2ref: dict[int, Any], old_rdd: object = None
    ) -> RayXShards:
        """Create RayXShards from references to objects in Ray's object store.

        Parameters
        ----------
        ip2part_id : dict
            Partition ids by node address; only the ids are used.
        part_id2ref : dict of int to ray.ObjectRef
            References of the partitions, each a list of shards.
        old_rdd : optional
            Has no effect; accepted for programs of BigDL 2.x.
        """
        numbers = sorted(number for part in ip2part_id.values() for number in part)
        if numbers != sorted(part_id2ref):
            raise UsageError(
                f"ip2part_id names the partitions {numbers} but part_id2ref has "
                f"{sorted(part_id2ref)}",
                code="argument-conflict",
                argument="ip2part_id",
            )
        return RayXShards([part_id2ref[number] for number in numbers])

    # What is in them ----------------------------------------------------------------------------

    def num_partitions(self) -> int:
        """Return the number of partitions."""
        return len(self._references)

    def __repr__(self) -> str:
        return call_text(type(self).__name__, {"partitions": self.num_partitions()})

    def get_partition_refs(self) -> list:
        """Return object references of the partitions, each a list of shards."""
        return list(self._references)

    def get_refs(self) -> list:
        """Return object references of the shards."""
        count_of: Any = ray.remote(lambda partition: len(partition))
        item_of: Any = ray.remote(lambda partition, number: partition[number])
        counts = ray_get([count_of.remote(each) for each in self._references])
        return [
            item_of.remote(partition, number)
            for count, partition in zip(counts, self._references, strict=True)
            for number in range(count)
        ]

    def collect_partitions(self) -> list[list]:
        """Return all shards, as one list per partition."""
        return ray_get(self._references)

    def collect(self) -> list:
        """Return all shards, in order."""
        return [shard for partition in self.collect_partitions() for shard in partition]

    # New ones -----------------------------------------------------------------------------------

    def transform_shard(self, func: Callable, *args: object) -> RayXShards:
        """Return new XShards of ``func(shard, *args)`` for every shard.

        `func` receives the value of each :class:`~bigdl.orca.data.SharedValue` argument.
        """

        def transform(partition, *args):
            values = unwrap_shared_values(func, args)
            return [func(shard, *values) for shard in partition]

        return self.map_partitions(transform, *map(_to_ray_argument, args))

    def map_partitions(self, func: Callable, *args: object) -> RayXShards:
        """Return new XShards of ``func(partition, *args)`` for each partition, a list of shards."""
        task: Any = ray.remote(func)
        return RayXShards([task.remote(each, *args) for each in self._references])

    # With actors --------------------------------------------------------------------------------

    def transform_shards_with_actors(self, actors: Sequence, func: Callable) -> RayXShards:
        """Call a function with an actor and each partition; return the results as new XShards.

        Parameters
        ----------
        actors : sequence of Ray actors
        func : callable
            ``func(actor, partition_ref)`` returns the reference of a list of shards.
        """
        assigned, _, _ = self.assign_partitions_to_actors(actors)
        results_by_partition = {
            number: func(actor, self._references[number])
            for actor, numbers in zip(actors, assigned, strict=False)
            for number in numbers
        }
        return RayXShards([reference for _, reference in sorted(results_by_partition.items())])

    def reduce_partitions_for_actors(
        self, actors: Sequence, reduce_partitions_func: Callable, return_refs: bool = False
    ) -> list:
        """Call a function with each actor and all of its partitions; return the results.

        Parameters
        ----------
        actors : sequence of Ray actors
        reduce_partitions_func : callable
            ``f(actor, references)`` returns a reference.
        return_refs : bool, default False
            Return the references instead of their values.

        Raises
        ------
        UsageError
            If there are fewer partitions than actors.
        """
        return self._reduce(actors, reduce_partitions_func, return_refs)

    def zip_reduce_shards_with_actors(
        self,
        xshards: RayXShards,
        actors: Sequence,
        reduce_partitions_func: Callable,
        return_refs: bool = False,
    ) -> list:
        """Call a function with each actor and its partitions of both XShards; return the results.

        Parameters
        ----------
        xshards : RayXShards
            XShards with the same number of partitions.
        actors : sequence of Ray actors
        reduce_partitions_func : callable
            ``f(actor, references, others)`` returns a reference.
        return_refs : bool, default False
            Return the references instead of their values.

        Raises
        ------
        UsageError
            If the numbers of partitions differ, or there are fewer partitions than actors.
        """
        if xshards.num_partitions() != self.num_partitions():
            raise UsageError(
                "The two RayXShards should have the same number of partitions, but they have "
                f"{self.num_partitions()} and {xshards.num_partitions()}",
                code="data-shape",
            )
        return self._reduce(actors, reduce_partitions_func, return_refs, xshards)

    def _reduce(self, actors, func, return_refs, *others):
        if self.num_partitions() < len(actors):
            raise UsageError(
                f"The number of partitions, {self.num_partitions()}, should not be smaller than "
                f"the number of actors, {len(actors)}; use fewer actors",
                code="argument-value",
                argument="actors",
            )
        assigned, _, _ = self.assign_partitions_to_actors(actors)
        results = [
            func(actor, *([x._references[n] for n in numbers] for x in (self, *others)))
            for actor, numbers in zip(actors, assigned, strict=True)
        ]
        return results if return_refs else ray_get(results)

    def assign_partitions_to_actors(
        self, actors: Sequence
    ) -> tuple[list[list[int]], list[str], list[Any]]:
        """Assign partitions evenly to actors, preferring actors on the partition's node.

        Returns
        -------
        assigned : list of list of int
            Partition indices of every actor; lengths differ by at most 1.  Actors without
            partitions are omitted.
        addresses : list of str
            Node addresses of those actors.
        actors : list of Ray actors
            The actors that have partitions.
        """
        if not actors:
            raise UsageError("Pass at least one actor", code="argument-value", argument="actors")
        if self.num_partitions() < len(actors):
            logger.warning(
                "There are %d actors but only %d partitions; the remaining actors are not used",
                len(actors),
                self.num_partitions(),
            )
            actors = list(actors)[: self.num_partitions()]
        locations = _node_of_actors(actors)
        ray.wait(self._references, num_returns=len(self._references), fetch_local=False)
        located = ray.experimental.get_object_locations(self._references)
        homes = [located.get(each, {}).get("node_ids", []) for each in self._references]
        assigned = assign_evenly(homes, [node for node, _ in locations])
        return assigned, [address for _, address in locations], list(actors)


XShards._on_ray = RayXShards


def assign_evenly(homes: Sequence[Sequence[str]], nodes: Sequence[str]) -> list[list[int]]:
    """Assign partitions evenly to actors, preferring actors on the partition's nodes.

    Parameters
    ----------
    homes : sequence of sequence of str
        Node ids that hold each partition.
    nodes : sequence of str
        Node id of each actor.

    Returns
    -------
    list of list of int
        Partition indices of each actor; lengths differ by at most 1.
    """
    share, larger = divmod(len(homes), len(nodes))
    assigned: list[list[int]] = [[] for _ in nodes]
    unassigned = []
    for number, home in enumerate(homes):
        near = [i for i, node in enumerate(nodes) if node in home and len(assigned[i]) < share]
        if near:
            assigned[min(near, key=lambda i: len(assigned[i]))].append(number)
        else:
            unassigned.append(number)
    for number in unassigned:
        full = sum(len(each) > share for each in assigned)
        most = share + 1 if full < larger else share
        free = [i for i, each in enumerate(assigned) if len(each) < most]
        near = [i for i in free if nodes[i] in homes[number]]
        assigned[min(near or free, key=lambda i: len(assigned[i]))].append(number)
    return [sorted(each) for each in assigned]


def _node_of_actors(actors) -> list[tuple[str, str]]:
    """Return each actor's node id and address, or empty strings if the actor has not started."""
    from ray._private.state import actors as states

    def node_of(actor) -> str | None:
        state = states(actor._actor_id.hex()) or {}  # the NodeID is nil before placement
        return state["Address"]["NodeID"] if state.get("State") in ("ALIVE", "DEAD") else None

    deadline = time.monotonic() + ACTOR_PLACE_S
    while None in (nodes := list(map(node_of, actors))) and time.monotonic() < deadline:
        time.sleep(0.05)
    # an actor without CPUs may run on the head node of Ray on Spark, which has no CPUs
    addresses = RayCluster.from_active().hosts
    return [(node or "", addresses.get(node or "", "")) for node in nodes]


def _to_ray_argument(argument: object) -> object:
    """Move a Spark-held SharedValue into Ray's object store; return other arguments unchanged."""
    if isinstance(argument, SharedValue) and not isinstance(argument.broadcast_data, RayBroadcast):
        return ray.put(argument.value)
    return argument
