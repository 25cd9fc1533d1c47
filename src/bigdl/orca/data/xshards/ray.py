"""XShards in Ray's object store."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.timeouts import ACTOR_PLACE_S
from bigdl.orca.cluster.ray import RayBroadcast, RayCluster
from bigdl.orca.cluster.ray_launch import ray_get
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.xshards.ray_exchange import RayAddress, partitions_to_ray
from bigdl.orca.data.xshards.spark import SharedValue, SparkXShards, XShards, unwrapped

__all__ = ["RayXShards"]

ray = LazyModule("ray", "ray")
logger = logging.getLogger("bigdl.orca")


class RayXShards(XShards):
    """XShards whose partitions are objects of Ray: lists of shards.

    They are made by :meth:`from_spark_xshards`, by ``XShards.partition`` in a program with
    ``runtime="ray"``, and from references by :meth:`from_partition_refs`.  What is made of them is
    computed by Ray at once, in the background.

    Parameters
    ----------
    references : sequence of ray.ObjectRef
        Of every partition, a list of shards.

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
        """The shards of SparkXShards, computed by Spark into Ray; nothing goes through the driver.

        Raises
        ------
        UsageError
            If it is something else, or Ray does not run on Spark's nodes.
        """
        if not isinstance(spark_xshards, SparkXShards):
            raise UsageError(
                f"from_spark_xshards takes SparkXShards, got {type(spark_xshards).__name__}",
                code="data-type",
                argument="spark_xshards",
            )
        return RayXShards(partitions_to_ray(spark_xshards.rdd, RayCluster.of_program()))

    def to_spark_xshards(self) -> SparkXShards:
        """The same shards as SparkXShards, in the same partitions.

        Spark's tasks fetch them from Ray, which keeps them as long as the result is in use.
        """
        side = RayAddress.of(RayCluster.of_program())
        side.leave(self._references)

        def fetch(places):
            for place in places:
                yield from side.take(place)

        number = max(1, self.num_partitions())
        places = SparkCluster.from_active().sc.parallelize(range(self.num_partitions()), number)
        rdd = places.mapPartitions(fetch)
        weakref.finalize(rdd, side.drop)
        return SparkXShards(rdd)

    @staticmethod
    def from_partition_refs(
        ip2part_id: dict[str, list[int]], part_id2ref: dict[int, Any], old_rdd: Any = None
    ) -> RayXShards:
        """XShards of objects that are in Ray already.

        Parameters
        ----------
        ip2part_id : dict
            Numbers of the partitions on each node; Ray itself knows where they are.
        part_id2ref : dict of int to ray.ObjectRef
            Lists of shards.
        old_rdd : optional
            Accepted for programs of BigDL 2.x, without effect.
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
        """Number of partitions."""
        return len(self._references)

    def get_partition_refs(self) -> list:
        """References of the partitions, each a list of shards."""
        return list(self._references)

    def get_refs(self) -> list:
        """References of the shards."""
        count_of: Any = ray.remote(lambda partition: len(partition))
        item_of: Any = ray.remote(lambda partition, number: partition[number])
        counts = ray_get([count_of.remote(each) for each in self._references])
        return [
            item_of.remote(partition, number)
            for count, partition in zip(counts, self._references, strict=True)
            for number in range(count)
        ]

    def collect_partitions(self) -> list[list]:
        """All shards, as a list for every partition."""
        return ray_get(self._references)

    def collect(self) -> list:
        """All shards, in order."""
        return [shard for partition in self.collect_partitions() for shard in partition]

    # New ones -----------------------------------------------------------------------------------

    def transform_shard(self, func: Callable, *args: Any) -> RayXShards:
        """New XShards of ``func(shard, *args)`` of every shard.

        In the place of a :class:`~bigdl.orca.data.SharedValue`, `func` gets its value.
        """

        def transform(partition, *args):
            values = unwrapped(func, args)
            return [func(shard, *values) for shard in partition]

        return self.map_partitions(transform, *map(_reachable, args))

    def map_partitions(self, func: Callable, *args: Any) -> RayXShards:
        """New XShards of ``func(partition, *args)``, a list of shards, of every partition."""
        task: Any = ray.remote(func)
        return RayXShards([task.remote(each, *args) for each in self._references])

    # With actors --------------------------------------------------------------------------------

    def transform_shards_with_actors(self, actors: Sequence, func: Callable) -> RayXShards:
        """New XShards of what actors make of the partitions.

        Parameters
        ----------
        actors : sequence of Ray actors
        func : callable
            ``func(actor, reference)`` of a partition gives the reference of a list of shards.
        """
        assigned, _, _ = self.assign_partitions_to_actors(actors)
        made = {
            number: func(actor, self._references[number])
            for actor, numbers in zip(actors, assigned, strict=False)
            for number in numbers
        }
        return RayXShards([reference for _, reference in sorted(made.items())])

    def reduce_partitions_for_actors(
        self, actors: Sequence, reduce_partitions_func: Callable, return_refs: bool = False
    ) -> list:
        """Call a function with all partitions of each actor, and return its results.

        Parameters
        ----------
        actors : sequence of Ray actors
        reduce_partitions_func : callable
            ``f(actor, references)`` gives a reference.
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
        """Call a function with the partitions of each actor of these and of other XShards.

        Parameters
        ----------
        xshards : RayXShards
            Of as many partitions.
        actors : sequence of Ray actors
        reduce_partitions_func : callable
            ``f(actor, references, others)`` gives a reference.
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
        """Share the partitions out: on their own node where that is even, else anywhere.

        Returns
        -------
        assigned : list of list of int
            Numbers of the partitions of every actor, which differ in length by at most 1.  Actors
            without any are left out.
        addresses : list of str
            Of the nodes of those actors.
        actors : list of Ray actors
            The actors that have partitions.
        """
        if not actors:
            raise UsageError(
                "There must be at least one actor", code="argument-value", argument="actors"
            )
        if self.num_partitions() < len(actors):
            logger.warning(
                "There are %d actors but only %d partitions; the other actors get none",
                len(actors),
                self.num_partitions(),
            )
            actors = list(actors)[: self.num_partitions()]
        where = _node_of_actors(actors)
        ray.wait(self._references, num_returns=len(self._references), fetch_local=False)
        located = ray.experimental.get_object_locations(self._references)
        homes = [located.get(each, {}).get("node_ids", []) for each in self._references]
        assigned = evenly(homes, [node for node, _ in where])
        return assigned, [address for _, address in where], list(actors)


XShards._on_ray = RayXShards


def evenly(homes: Sequence[Sequence[str]], nodes: Sequence[str]) -> list[list[int]]:
    """Give partitions to actors: as many on their own nodes as an even share allows.

    Parameters
    ----------
    homes : sequence of sequence of str
        The nodes that have each partition.
    nodes : sequence of str
        The node of each actor.

    Returns
    -------
    list of list of int
        Of each actor; the lengths differ by at most 1.
    """
    share, larger = divmod(len(homes), len(nodes))
    assigned: list[list[int]] = [[] for _ in nodes]
    left = []
    for number, home in enumerate(homes):
        near = [i for i, node in enumerate(nodes) if node in home and len(assigned[i]) < share]
        if near:
            assigned[min(near, key=lambda i: len(assigned[i]))].append(number)
        else:
            left.append(number)
    for number in left:
        full = sum(len(each) > share for each in assigned)
        most = share + 1 if full < larger else share
        free = [i for i, each in enumerate(assigned) if len(each) < most]
        near = [i for i in free if nodes[i] in homes[number]]
        assigned[min(near or free, key=lambda i: len(assigned[i]))].append(number)
    return [sorted(each) for each in assigned]


def _node_of_actors(actors) -> list[tuple[str, str]]:
    """Node and address of actors; ones that Ray does not place in time count as anywhere."""
    from ray._private.state import actors as states

    def node_of(actor) -> str | None:
        said = states(actor._actor_id.hex()) or {}  # before it is placed it has a nil NodeID
        return said["Address"]["NodeID"] if said.get("State") in ("ALIVE", "DEAD") else None

    end = time.monotonic() + ACTOR_PLACE_S
    while None in (nodes := list(map(node_of, actors))) and time.monotonic() < end:
        time.sleep(0.05)
    # an actor without CPUs may be on the head of a Ray on Spark, which has none
    addresses = RayCluster.from_active().hosts
    return [(node or "", addresses.get(node or "", "")) for node in nodes]


def _reachable(argument: Any) -> Any:
    """A SharedValue that Spark holds as an object of Ray, and anything else as it is."""
    if isinstance(argument, SharedValue) and not isinstance(argument.broadcast_data, RayBroadcast):
        return ray.put(argument.value)
    return argument
