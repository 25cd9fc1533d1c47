"""Ray on the nodes of a Spark application, which dies with it.

The head is on the driver, without CPUs of Ray's unless asked for.  One Spark job starts a node on
every executor's machine and ends; the nodes stay and take no slot of Spark, so Spark jobs and Ray
run side by side on the same cores.  A process beside every node
(:mod:`bigdl.orca.cluster._ray_node_main`) ends it when its executor or the head is gone.

(``ray.util.spark`` holds a Spark task for every node as long as Ray runs: on a cluster that is as
large as its Ray, Spark could then not compute the data that Ray is to train on.)
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.cluster.ray_launch import LOOPBACK, LaunchedRay, shared_environment
from bigdl.orca.cluster.spark import SparkCluster, user_import_path

__all__ = ["RayOnSpark"]

logger = logging.getLogger("bigdl.orca")

_START_S = 120.0  # seconds in which all nodes must have joined


class RayOnSpark:
    """Ray on Spark's nodes; made by :meth:`start`.

    Attributes
    ----------
    address : str
        Of the head.
    info : dict
        What Ray says of itself.
    """

    def __init__(self, head: LaunchedRay):
        self._head = head
        self.address, self.info = head.address, head.info

    @classmethod
    def start(
        cls,
        cluster: SparkCluster,
        *,
        nodes: int,
        cores: int,
        driver_cores: int = 0,
        object_store_memory: int | None = None,
        env: Mapping[str, str] | None = None,
        extra_params: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RayOnSpark:
        """Start the head here and a node on every executor.

        Parameters
        ----------
        cluster : SparkCluster
        nodes : int
            Number of Ray nodes, at most that of executors.
        cores : int
            CPUs of Ray of a node.
        driver_cores : int
            CPUs of Ray on the driver's machine.
        object_store_memory : int, optional
            Bytes of a node.
        env : dict, optional
            Environment variables of the nodes.
        extra_params : dict, optional
            Further options of ``ray start``, without their dashes.
        options : dict, optional
            Further arguments of ``ray.init`` on the driver.

        Raises
        ------
        UsageError
            When there are fewer executors than nodes, they may go, or a node does not start.
        """
        if cluster.dynamic_allocation:
            raise UsageError(
                "Ray needs executors that stay, but Spark may end them by dynamic allocation; set "
                "spark.dynamicAllocation.enabled=false"
            )
        if nodes > cluster.nodes:
            raise UsageError(
                f"{nodes} Ray nodes were asked for (num_ray_nodes) but Spark has {cluster.nodes} "
                "executors; ask for as many nodes or fewer"
            )
        host = cluster.driver_host  # `ray start` refuses to join one on the loopback interface
        head = LaunchedRay.start(
            driver_cores,
            host=None if host == LOOPBACK else host,
            object_store_memory=object_store_memory,
            options=options,
        )
        try:
            command = _command(head.address, cores, object_store_memory, extra_params or {})
            environment = {**shared_environment(), **(env or {})}
            order = {"head": head.address, "command": command, "environment": environment}
            ship_modules(cluster.sc)
            failed = _start_nodes(cluster, nodes, order)
            _await_nodes(nodes + bool(driver_cores), failed)
        except BaseException:
            head.stop()
            raise
        return cls(head)

    def stop(self) -> None:
        """Stop the head; the nodes notice within seconds."""
        self._head.stop()


def _command(address, cores, object_store_memory, extra_params) -> list[str]:
    options = {
        "address": address,
        "num-cpus": cores,
        "object-store-memory": object_store_memory,
        **{name.replace("_", "-"): value for name, value in extra_params.items()},
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return ["-m", "ray.scripts.scripts", "start", *given, "--disable-usage-stats", "--block"]


def _start_nodes(cluster: SparkCluster, nodes: int, order: dict) -> list[str]:
    """Start a node on as many executors; returns where that failed, and why."""
    from bigdl.orca.cluster.spark_calls import SparkCall

    def start(batches):
        import pyarrow as pa
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        for _ in batches:
            pass
        executor = executor_process()
        everyone = [json.loads(each) for each in context.allGather(json.dumps(executor))]
        place = context.partitionId()
        # several tasks may be on one executor: the first of them starts the node
        firsts = [i for i, each in enumerate(everyone) if each not in everyone[:i]][:nodes]
        if place in firsts:
            _start_node({**order, "executor": executor[1:]})
        yield pa.RecordBatch.from_pydict({"executors": [len(firsts)]})

    tasks = _await_slots(cluster, nodes)
    frame = cluster.spark.range(0, tasks, 1, tasks)

    def job():
        return frame.mapInArrow(start, "executors long", barrier=True).collect()

    (found, *_) = SparkCall(cluster.sc, job).wait()
    if found[0] < nodes:
        return [f"only {found[0]} executors have registered"]
    return []


def _await_slots(cluster: SparkCluster, nodes: int) -> int:
    """As many tasks as run at once when the executors are there: then every executor has one."""
    task_cpus = int(cluster.sc.getConf().get("spark.task.cpus", "1"))
    wanted = nodes * max(1, cluster.cores_per_node // task_cpus)
    end = time.monotonic() + _START_S
    while (slots := cluster.slots()) < wanted and time.monotonic() < end:
        time.sleep(0.1)
    if not slots:
        raise UsageError(f"No executor of Spark has registered within {_START_S:g} s")
    return slots


def executor_process() -> list:
    """Host, pid and start time of the JVM of the executor that this task belongs to."""
    pid = os.getpid()
    while True:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().rpartition(")")
        fields = rest.split()
        parent = int(fields[1])
        if "java" in name or parent <= 1:
            return [os.uname().nodename, pid, fields[19]]
        pid = parent


def _start_node(order: dict) -> None:
    """Start the keeper of a node, in a session of its own: Spark ends its Python workers."""
    from bigdl.orca.cluster import _ray_node_main

    directory = os.environ.get("SPARK_LOCAL_DIRS", "/tmp").split(",")[0]
    # Ray's workers import what those of Spark can, the program's own modules too
    path = {"PYTHONPATH": os.pathsep.join(user_import_path())}
    order = {
        **order,
        "environment": {**path, **order["environment"]},
        "command": [sys.executable, *order["command"]],
        "log": os.path.join(directory, f"bigdl-ray-node-{os.getpid()}.log"),
    }
    keeper = subprocess.Popen(
        [sys.executable, _ray_node_main.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    with keeper.stdin as line:
        line.write(json.dumps(order) + "\n")
    # Spark uses this process again: it shall not be the parent of a dead one
    threading.Thread(target=keeper.wait, daemon=True).start()


def _await_nodes(nodes: int, failed: list[str]) -> None:
    end = time.monotonic() + _START_S
    while not failed and RayCluster.from_active().nodes < nodes:
        if time.monotonic() > end:
            failed = [f"{RayCluster.from_active().nodes} of {nodes} joined within {_START_S:g} s"]
        time.sleep(0.2)
    if failed:
        raise UsageError(
            f"Ray's nodes could not be started on Spark's executors: {failed[0]}; look at "
            "bigdl-ray-node-*.log in the executors' local directories"
        )
