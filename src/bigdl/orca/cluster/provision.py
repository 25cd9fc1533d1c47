"""Carry out a request for a cluster: look whether it is there, ship what it needs, start Spark."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from bigdl.common.errors import UsageError
from bigdl.orca.cluster import submit
from bigdl.orca.cluster.address import (
    Address,
    check_reachable,
    kubernetes_address,
    resource_managers,
    standalone_masters,
)
from bigdl.orca.cluster.environment import (
    conda_prefix,
    packed_environment,
    ship_modules,
    zip_modules,
)
from bigdl.orca.cluster.java import find_java
from bigdl.orca.cluster.launch import LaunchedSpark, loopback_properties
from bigdl.orca.cluster.standalone import LOOPBACK, StandaloneCluster, numa_prefixes
from bigdl.orca.cluster.submit import Machine, Request, Submission, submission

__all__ = ["OwnStandalone", "connect", "submit_program"]

logger = logging.getLogger("bigdl.orca")


class OwnStandalone:
    """Spark on a standalone cluster that this process started for it.

    Attributes
    ----------
    sc : pyspark.SparkContext
    cluster : StandaloneCluster
    """

    def __init__(self, spark: LaunchedSpark, cluster: StandaloneCluster):
        self.sc = spark.sc
        self.cluster = cluster
        self._spark = spark

    def stop(self) -> None:
        """Stop the context, then the cluster; no process is left when this returns."""
        try:
            self._spark.stop()
        finally:
            self.cluster.stop()


def connect(request: Request, *, log_output: bool = False) -> LaunchedSpark | OwnStandalone:
    """Start Spark with this process as the driver.

    Raises
    ------
    UsageError
        If the cluster cannot be reached or something that it needs is missing.
    """
    if submit.family(request.mode) == "standalone" and not _master(request):
        return _start_standalone(request, log_output)
    address = _reach(request)
    described = _prepare(request, Machine.this_one(address))
    launched = LaunchedSpark.launch(
        described.properties, described.environment, log_output=log_output
    )
    try:
        ship_modules(launched.sc)
    except BaseException:
        launched.stop()
        raise
    return launched


def submit_program(request: Request) -> int:
    """Run this program again on the cluster; returns the exit code of ``spark-submit``.

    Raises
    ------
    UsageError
        If the cluster cannot be reached or something that it needs is missing.
    """
    machine = Machine.this_one()
    described = submission(request, machine)  # complain before anything is packed
    _reach(request)
    with tempfile.TemporaryDirectory(prefix="bigdl-submit-") as directory:
        modules = str(Path(directory) / "modules.zip")
        if submit.family(request.mode) == "yarn" and zip_modules(modules):
            machine = replace(machine, modules=modules)
        described = _prepare(request, machine)
        java = find_java()
        try:
            logger.info("Submitting the program with cluster_mode=%s", request.mode)
            return submit.run(
                described.command, {**described.environment, "JAVA_HOME": str(java.home)}
            )
        finally:
            java.close()


def _prepare(request: Request, machine: Machine) -> Submission:
    if request.packs_environment:
        archive = packed_environment(conda_prefix(request.get("conda_name")))
        machine = replace(machine, environment_archive=archive)
    return submission(request, machine)


def _master(request: Request) -> str | None:
    return request.get("master") or request.conf.get("spark.master")


def _reach(request: Request) -> Address:
    """Find the cluster within seconds; Spark would try for minutes."""
    family = submit.family(request.mode)
    if family == "yarn":
        directory = submit.hadoop_conf(request, os.environ)
        return check_reachable(
            resource_managers(directory),
            "The resource manager of YARN",
            f"check that it runs and that yarn-site.xml in {directory} is the one of this cluster",
        )
    if family == "k8s":
        submission(request, Machine(environ=os.environ, program=("program.py",)))
        return check_reachable(
            [kubernetes_address(_master(request))],
            "The API server of Kubernetes",
            "check master against the address that `kubectl cluster-info` shows",
        )
    return check_reachable(
        standalone_masters(_master(request)),
        "The master of the standalone cluster",
        "check that it runs there, or leave out master to start a cluster on this machine",
    )


def _start_standalone(request: Request, log_output: bool) -> OwnStandalone:
    prefixes = [[]]
    if request.get("enable_numa_binding"):
        prefixes = numa_prefixes(request.num_nodes)
    cluster = StandaloneCluster.start(
        request.cores,
        request.memory,
        request.num_nodes,
        prefixes=prefixes,
        directory=_local_directory(request),
    )
    try:
        conf = {"spark.master": cluster.master, **request.conf}
        machine = replace(Machine.this_one(), address=LOOPBACK)
        described = submission(replace(request, conf=conf), machine)
        properties = {
            **described.properties,
            **loopback_properties(request.conf),
            "spark.authenticate": "true",
            "spark.authenticate.secret": cluster.secret,
            **request.conf,
        }
        environment = {**described.environment, "SPARK_LOCAL_IP": LOOPBACK}
        spark = LaunchedSpark.launch(properties, environment, log_output=log_output)
    except BaseException:
        cluster.stop()
        raise
    return OwnStandalone(spark, cluster)


def _local_directory(request: Request) -> str | None:
    """Where the cluster keeps what does not fit in memory: where the user wants such files."""
    asked = os.environ.get("SPARK_LOCAL_DIRS") or request.conf.get("spark.local.dir")
    if not asked:
        return None
    directory = asked.split(",")[0]
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The directory {directory} for local files cannot be made: {error}"
        ) from None
    return directory
