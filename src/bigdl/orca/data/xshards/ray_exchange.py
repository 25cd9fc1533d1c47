"""Exchange of data between Spark tasks and Ray's object store, without the driver.

A Spark task connects to the Ray node of its machine and sends its data to that node's *store*, an
actor of the driver that owns the objects, so they outlive the task.  In the opposite direction, a
task gets references from a store.  References are sent within Ray only, so Ray can track them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import LazyModule, UsageError, require
from bigdl.common.platform.network import host_name
from bigdl.orca.cluster.plan import is_connect
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.cluster.ray_launch import ray_get, set_environment, shared_environment
from bigdl.orca.cluster.versions import to_arrow

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame

ray = LazyModule("ray", "ray")

_BLOCK = 64 << 20  # approximate bytes of a block of cells
_STORE = "bigdl-store-{}"

_stores: dict[tuple[str, str], Any] = {}  # of this driver, by Ray session and node


class _ObjectStore:
    """Actor that owns objects created by short-lived processes, so that the objects persist."""

    def __init__(self):
        self._objects: dict[str, dict] = {}

    def put(self, key: str, index, value) -> None:
        """Store a copy of a value; a repeated task replaces the value of its first attempt."""
        self._objects.setdefault(key, {})[index] = ray.put(value)

    def keep(self, key: str, references: list) -> None:
        self._objects[key] = dict(enumerate(references))

    def references(self, key: str) -> dict:
        return self._objects.get(key, {})

    def drop(self, key: str) -> None:
        self._objects.pop(key, None)


@dataclass(frozen=True)
class RayAddress:
    """Address, token and object key with which Spark tasks connect to Ray for one exchange.

    Attributes
    ----------
    address : str
    namespace : str
    key : str
        Key of the exchange's objects in the stores.
    environment : dict of str to str
        Environment variables for the connection, including Ray's token.
    """

    address: str
    namespace: str
    key: str
    environment: dict[str, str]

    @classmethod
    def of(cls, cluster: RayCluster) -> RayAddress:
        """Start a storage actor on each node; return a RayAddress at which tasks connect to Ray."""
        start_stores(cluster)
        context = ray.get_runtime_context()
        key = secrets.token_hex(8)
        return cls(context.gcs_address, context.namespace, key, shared_environment())

    def connect(self):
        """Connect this process to Ray and return the storage actor of its node."""
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
                    f"The Spark task on {host_name()} cannot connect to Ray at "
                    f"{self.address} ({error}); start Ray on Spark's nodes with "
                    "init_orca_context(init_ray_on_spark=True)",
                    code="cluster-unreachable",
                    address=self.address,
                ) from None
        node = ray.get_runtime_context().get_node_id()
        return ray.get_actor(_STORE.format(node), namespace=self.namespace)

    def put(self, index, value) -> None:
        """Send a value to the storage actor of this node."""
        ray.get(self.connect().put.remote(self.key, index, value))

    def take(self, index) -> object:
        """Return the object at an index of the list that the driver passed to :meth:`leave`."""
        return ray.get(ray.get(self.connect().references.remote(self.key))[index])

    # -- on the driver -------------------------------------------------------------------------

    def run(self, sc: SparkContext, job: Callable[[], Any]) -> list[tuple]:
        """Run an interruptible Spark job whose tasks put values, and return their references.

        Returns
        -------
        list of (index, ObjectRef)
            References of the values that tasks put, sorted by index; the stores release them.
        """
        from bigdl.orca.cluster.spark_calls import SparkCall

        SparkCall(sc, job).wait()
        references: dict = {}
        for each in ray_get([store.references.remote(self.key) for store in _stores.values()]):
            references.update(each)
        self.drop()
        return sorted(references.items(), key=lambda item: item[0])

    def leave(self, references: list) -> None:
        """Pass objects to all storage actors, so that tasks can take them by list index."""
        ray_get([store.keep.remote(self.key, references) for store in _stores.values()])

    def drop(self) -> None:
        """Delete the objects of this exchange from the storage actors."""
        from bigdl.orca.cluster.ray import is_connected

        if is_connected():
            for store in _stores.values():
                store.drop.remote(self.key)


def start_stores(cluster: RayCluster) -> None:
    """Start a storage actor on every node, even on nodes that run no tasks."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    session, hosts = cluster.session, cluster.hosts
    for stale in [key for key in _stores if key[0] != session or key[1] not in hosts]:
        del _stores[stale]
    started = []
    for node in hosts:
        if (session, node) not in _stores:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(_ObjectStore).options(
                name=_STORE.format(node), num_cpus=0, scheduling_strategy=strategy
            )
            _stores[session, node] = actor.remote()
            started.append(_stores[session, node].drop.remote(""))
    ray_get(started)


def cells_to_ray(frame: DataFrame, cluster: RayCluster, num_workers: int) -> list[list]:
    """Compute a DataFrame of cells (:mod:`bigdl.orca.data.feeds.packing`) and put it into Ray.

    Returns
    -------
    list of list of ObjectRef
        Tables of cells of every worker.
    """

    def keyed_tables(source: int, batches: Iterable) -> Iterator[tuple[Any, Any]]:
        for number, (target, table) in enumerate(_by_target(batches)):
            yield (target, source, number), table

    blocks: list[list] = [[] for _ in range(num_workers)]
    for (target, *_), reference in _batches_to_ray(frame, cluster, keyed_tables):
        blocks[target].append(reference)
    return blocks


def _by_target(batches: Iterable) -> Iterator[tuple[int, Any]]:
    """Group cells by worker; yield ``(worker, table)`` pairs with tables of a limited size."""
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
    """Compute a DataFrame and store it in Ray; return a reference to one table per partition."""
    schema = to_arrow(frame.limit(0)).schema

    def keyed_tables(source: int, batches: Iterable) -> Iterator[tuple[Any, Any]]:
        import pyarrow as pa

        batches = [batch for batch in batches if batch.num_rows]
        yield source, pa.Table.from_batches(batches) if batches else schema.empty_table()

    return [reference for _, reference in _batches_to_ray(frame, cluster, keyed_tables)]


def _batches_to_ray(frame: DataFrame, cluster: RayCluster, keyed_tables: Callable) -> list[tuple]:
    """Store the ``(key, table)`` pairs that ``keyed_tables(partition, batches)`` yields in Ray.

    Returns
    -------
    list of (key, ObjectRef)
        References of the tables, sorted by key.
    """
    exchange = RayAddress.of(cluster)

    def put(batches: Iterable) -> Iterator:
        from pyspark import TaskContext

        partition = cast("TaskContext", TaskContext.get()).partitionId()
        for key, table in keyed_tables(partition, batches):
            exchange.put(key, table)
        yield from ()

    job = frame.mapInArrow(put, "done long")
    return exchange.run(frame.sparkSession.sparkContext, job.collect)


def partitions_to_ray(rdd: RDD, cluster: RayCluster) -> list:
    """Compute an RDD and store it in Ray; return a reference to each partition's element list."""
    exchange = RayAddress.of(cluster)

    def put(partition: int, elements: Iterable) -> Iterator[int]:
        exchange.put(partition, list(elements))
        yield partition

    job = rdd.mapPartitionsWithIndex(put)
    return [reference for _, reference in exchange.run(rdd.context, job.collect)]


def spark_df_to_ray_dataset(df):
    """Convert a Spark DataFrame to a Ray Dataset.

    Spark computes it immediately, once; every partition becomes a block, in order.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Classic Spark DataFrame; vectors become arrays.

    Returns
    -------
    ray.data.Dataset

    Raises
    ------
    UsageError
        If `df` has another type, or Ray does not run on Spark's nodes.

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
            f"spark_df_to_ray_dataset needs a classic Spark DataFrame, got {type(df).__name__}",
            code="data-type",
            argument="df",
        )
    return ray.data.from_arrow_refs(arrow_to_ray(without_vectors(df), RayCluster.of_program()))


def ordered_blocks(dataset) -> list:
    """Return references to a dataset's blocks, as dicts of arrays, in the dataset's order.

    By default Ray returns blocks in the order of their completion.
    """
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return dataset.materialize().to_numpy_refs()
    finally:
        options.preserve_order = before


def parquet_dataset(paths: list[str]):
    """Return a Ray Dataset that reads Parquet files."""
    return require("ray.data", "ray").read_parquet(paths)
