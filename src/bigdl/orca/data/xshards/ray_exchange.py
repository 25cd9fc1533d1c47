"""Data between Spark's tasks and Ray's object store, past the driver.

A task of Spark connects to the Ray node of its machine and hands what it has to that node's
*store*, an actor of the driver that owns the objects: they outlive the task and its process.  The
other way round a task asks a store for a reference.  References travel inside Ray only, so Ray
always knows who needs an object.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import LazyModule, UsageError, require
from bigdl.orca.cluster.plan import is_connect
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.cluster.ray_launch import ray_get, set_environment, shared_environment
from bigdl.orca.cluster.versions import to_arrow

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame

ray = LazyModule("ray", "ray")

_BLOCK = 64 << 20  # bytes of a block of cells
_STORE = "bigdl-store-{}"

_stores: dict[tuple[str, str], Any] = {}  # of this driver, by connection and node


class _Store:
    """Owner of objects that processes without a future have made."""

    def __init__(self):
        self._kept: dict[str, dict] = {}

    def put(self, key: str, place, value) -> None:
        """Keep a copy of a value; a second try of a task replaces what the first has left."""
        self._kept.setdefault(key, {})[place] = ray.put(value)

    def keep(self, key: str, references: list) -> None:
        self._kept[key] = dict(enumerate(references))

    def references(self, key: str) -> dict:
        return self._kept.get(key, {})

    def drop(self, key: str) -> None:
        self._kept.pop(key, None)


@dataclass(frozen=True)
class RayAddress:
    """The address at which a task of Spark connects to Ray; pickled to the task.

    Attributes
    ----------
    address : str
    namespace : str
    key : str
        Under which the stores keep the objects of one exchange.
    environment : dict of str to str
        Variables that a process needs to connect; Ray's token is among them.
    """

    address: str
    namespace: str
    key: str
    environment: dict[str, str]

    @classmethod
    def of(cls, cluster: RayCluster) -> RayAddress:
        """The way to the driver's Ray, for one exchange; starts the stores."""
        start_stores(cluster)
        context = ray.get_runtime_context()
        key = secrets.token_hex(8)
        return cls(context.gcs_address, context.namespace, key, shared_environment())

    def connect(self):
        """Connect this process; returns the store of its node."""
        if ray.is_initialized() and ray.get_runtime_context().gcs_address != self.address:
            ray.shutdown()
        if not ray.is_initialized():
            set_environment(self.environment)
            try:
                ray.init(
                    self.address,
                    namespace=self.namespace,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, RuntimeError) as error:
                raise UsageError(
                    f"The Spark task on {os.uname().nodename} cannot connect to Ray at "
                    f"{self.address} ({error}); start Ray on Spark's nodes by "
                    "init_orca_context(init_ray_on_spark=True)",
                    code="cluster-unreachable",
                    address=self.address,
                ) from None
        node = ray.get_runtime_context().get_node_id()
        return ray.get_actor(_STORE.format(node), namespace=self.namespace)

    def put(self, place, value) -> None:
        """Leave a value with the store of this node."""
        ray.get(self.connect().put.remote(self.key, place, value))

    def take(self, place) -> Any:
        """A value that the driver has left with the stores."""
        return ray.get(ray.get(self.connect().references.remote(self.key))[place])

    # -- on the driver -------------------------------------------------------------------------

    def run(self, sc: SparkContext, job: Callable[[], Any]) -> list[tuple]:
        """Run a Spark job that Ctrl-C can end.

        Returns
        -------
        list of (place, ObjectRef)
            What its tasks have left, sorted by the places; the stores let go of it.
        """
        from bigdl.orca.cluster.spark_calls import SparkCall

        SparkCall(sc, job).wait()
        references: dict = {}
        for each in ray_get([store.references.remote(self.key) for store in _stores.values()]):
            references.update(each)
        self.drop()
        return sorted(references.items(), key=lambda item: item[0])

    def leave(self, references: list) -> None:
        """Leave objects for the tasks, by their places in a list."""
        ray_get([store.keep.remote(self.key, references) for store in _stores.values()])

    def drop(self) -> None:
        """Let the stores forget this exchange."""
        from bigdl.orca.cluster.ray import is_connected

        if is_connected():
            for store in _stores.values():
                store.drop.remote(self.key)


def start_stores(cluster: RayCluster) -> None:
    """A store on every node, also on those that run no tasks."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    session, hosts = cluster.session, cluster.hosts
    for gone in [key for key in _stores if key[0] != session or key[1] not in hosts]:
        del _stores[gone]
    started = []
    for node in hosts:
        if (session, node) not in _stores:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(_Store).options(
                name=_STORE.format(node), num_cpus=0, scheduling_strategy=strategy
            )
            _stores[session, node] = actor.remote()
            started.append(_stores[session, node].drop.remote(""))
    ray_get(started)


def cells_to_ray(frame: DataFrame, cluster: RayCluster, num_workers: int) -> list[list]:
    """Compute a DataFrame of cells (:mod:`bigdl.orca.data.feeds.packing`) into Ray.

    Returns
    -------
    list of list of ObjectRef
        For every worker, tables of its cells.
    """

    def place(source: int, batches: Iterable) -> Iterator[tuple[Any, Any]]:
        for number, (target, table) in enumerate(_by_target(batches)):
            yield (target, source, number), table

    blocks: list[list] = [[] for _ in range(num_workers)]
    for (target, *_), reference in _batches_to_ray(frame, cluster, place):
        blocks[target].append(reference)
    return blocks


def _by_target(batches: Iterable) -> Iterator[tuple[int, Any]]:
    """Tables of cells for one worker, each of about a block."""
    import pyarrow as pa
    import pyarrow.compute as pc

    waiting: dict[int, list] = {}
    sizes: dict[int, int] = {}
    for batch in batches:
        for target in pc.unique(batch.column("target")).to_pylist():
            part = batch.filter(pc.equal(batch.column("target"), target))
            waiting.setdefault(target, []).append(part)
            sizes[target] = sizes.get(target, 0) + part.nbytes
            if sizes[target] > _BLOCK:
                yield target, pa.Table.from_batches(waiting.pop(target))
                sizes[target] = 0
    for target, parts in waiting.items():
        yield target, pa.Table.from_batches(parts)


def arrow_to_ray(frame: DataFrame, cluster: RayCluster) -> list:
    """Compute a DataFrame into Ray: references of an Arrow table for every partition, in order."""
    schema = to_arrow(frame.limit(0)).schema

    def place(source: int, batches: Iterable) -> Iterator[tuple[Any, Any]]:
        import pyarrow as pa

        batches = [batch for batch in batches if batch.num_rows]
        yield source, pa.Table.from_batches(batches) if batches else schema.empty_table()

    return [reference for _, reference in _batches_to_ray(frame, cluster, place)]


def _batches_to_ray(frame: DataFrame, cluster: RayCluster, place: Callable) -> list[tuple]:
    """Compute the pairs ``place(partition, batches)`` of a place and a table into Ray.

    Returns
    -------
    list of (place, ObjectRef)
        Sorted by the places.
    """
    side = RayAddress.of(cluster)

    def put(batches: Iterable) -> Iterator:
        from pyspark import TaskContext

        for each, table in place(cast("TaskContext", TaskContext.get()).partitionId(), batches):
            side.put(each, table)
        yield from ()

    job = frame.mapInArrow(put, "done long")
    return side.run(frame.sparkSession.sparkContext, job.collect)


def partitions_to_ray(rdd: RDD, cluster: RayCluster) -> list:
    """Compute an RDD into Ray: references of the list of elements of every partition, in order."""
    side = RayAddress.of(cluster)

    def put(place: int, elements: Iterable) -> Iterator[int]:
        side.put(place, list(elements))
        yield place

    job = rdd.mapPartitionsWithIndex(put)
    return [reference for _, reference in side.run(rdd.context, job.collect)]


def spark_df_to_ray_dataset(df):
    """A Spark DataFrame as a dataset of Ray.

    It is computed once, now, by Spark; every partition becomes a block, in order.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Vectors become arrays.

    Returns
    -------
    ray.data.Dataset

    Raises
    ------
    UsageError
        If `df` is something else, or Ray does not run on Spark's nodes.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.data import spark_df_to_ray_dataset
    >>> sc = init_orca_context("local", cores=2, init_ray_on_spark=True)
    >>> frame = OrcaContext.get_spark_session().range(4)
    >>> spark_df_to_ray_dataset(frame).to_pandas()["id"].tolist()
    [0, 1, 2, 3]
    """
    from pyspark.sql import DataFrame

    require("ray.data", "ray")
    from bigdl.orca.data.xshards.frames import without_vectors

    if not isinstance(df, DataFrame) or is_connect(df):
        raise UsageError(
            f"spark_df_to_ray_dataset takes a classic Spark DataFrame, got {type(df).__name__}",
            code="data-type",
            argument="df",
        )
    return ray.data.from_arrow_refs(arrow_to_ray(without_vectors(df), RayCluster.of_program()))


def ordered_blocks(dataset) -> list:
    """References of a dataset's blocks as dicts of arrays, in the order of the dataset.

    Ray gives blocks in the order in which they were made unless it is told otherwise.
    """
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return dataset.materialize().to_numpy_refs()
    finally:
        options.preserve_order = before


def parquet_dataset(paths: list[str]):
    """The dataset of Parquet files."""
    return require("ray.data", "ray").read_parquet(paths)
