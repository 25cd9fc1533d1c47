"""Standalone Spark cluster on this machine: one master and its workers, on loopback only.

:class:`StandaloneCluster` starts and stops a cluster.  Its daemons are children of a supervisor
process (:mod:`bigdl.orca.cluster.supervisor`), which stops them on request or when this process
ends in any way, and removes their directory.  Applications authenticate with a secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from bigdl.common.checks import check_supported
from bigdl.common.errors import UsageError
from bigdl.common.platform.cores import numa_numbers
from bigdl.common.platform.processes import has_parent_death_signal
from bigdl.common.private_folders import LockedFolder
from bigdl.orca.cluster import supervisor
from bigdl.orca.cluster.java import find_java

LOOPBACK = "127.0.0.1"

QUICK_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Options for a fast start of JVMs that hold no data."""

LOGGING = Path(__file__).with_name("log4j2.properties")
"""Logging configuration of Spark JVMs."""

_DAEMON_MEMORY = "512m"


@dataclass(frozen=True)
class StandaloneCluster:
    """Master and workers that this process started; created by :meth:`start`.

    Attributes
    ----------
    master : str
        ``"spark://127.0.0.1:port"``.
    secret : str
        Value of ``spark.authenticate.secret`` for applications.
    directory : str
        Directory of the cluster's files.
    supervisor : subprocess.Popen
        Process that runs the daemons.
    cleanup : contextlib.ExitStack
        Callbacks that stop the cluster.
    """

    master: str
    secret: str = field(repr=False)
    directory: str
    supervisor: subprocess.Popen
    cleanup: contextlib.ExitStack
    _is_stopping: threading.Event = field(default_factory=threading.Event, repr=False)

    @classmethod
    def start(
        cls,
        cores: int,
        memory: str,
        executors: int = 1,
        *,
        prefixes: Sequence[Sequence[str]] = ((),),
        directory: str | None = None,
    ) -> StandaloneCluster:
        """Start a cluster with resources for `executors` executors.

        Parameters
        ----------
        cores : int
            Cores per executor.
        memory : str
            Memory of an executor including overhead, e.g. ``"2g"``.
        executors : int
            Number of executors, a multiple of the number of workers.
        prefixes : sequence of sequence of str
            Command prefix for each Spark worker; see :func:`numa_prefixes`.
        directory : str, optional
            Parent of the cluster's directory, by default the temporary directory.

        Raises
        ------
        UsageError
            If there is no suitable Java, or a daemon does not start.
        """
        check_supported("standalone Spark cluster", has_parent_death_signal())
        secret = secrets.token_hex(32)
        with contextlib.ExitStack() as cleanup:
            java = find_java()
            cleanup.callback(java.close)
            locked = LockedFolder("bigdl-standalone", parent=directory, remover=False)
            cleanup.callback(locked.close)
            folder = locked.path
            each = executors // len(prefixes)
            request = _start_request(folder, secret, str(java.home), cores, memory, each, prefixes)
            process = supervisor.start("standalone", request, replies=True, lock=locked.descriptor)
            output = cleanup.enter_context(cast("IO[bytes]", process.stdout))
            cleanup.callback(supervisor.end, process)
            reply = json.loads(output.readline() or b"{}")
            if "master" not in reply:
                reason = reply.get("error", "its supervisor was killed")
                raise UsageError(
                    f"The standalone cluster did not start: {reason}", code="cluster-refused"
                )
            return cls(reply["master"], secret, folder, process, cleanup.pop_all())

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Call `on_loss` with the reason, in another thread, if the cluster ends unexpectedly."""

        def wait() -> None:
            # blocks until the supervisor reports or exits
            try:
                reply = json.loads(cast("IO[bytes]", self.supervisor.stdout).readline() or b"{}")
            except ValueError:  # the pipe was closed, or the line is incomplete
                reply = {}
            if not self._is_stopping.is_set():
                gone = f"its supervisor (process {self.supervisor.pid}) was killed"
                reason = reply.get("lost", gone)
                on_loss(f"The standalone cluster of this program is gone: {reason}")

        threading.Thread(target=wait, name="bigdl-standalone", daemon=True).start()

    def stop(self) -> None:
        """Stop the cluster, and wait until its processes and files are removed."""
        self._is_stopping.set()
        self.cleanup.close()


def numa_prefixes(executors: int) -> list[list[str]]:
    """Return, for each NUMA node, the ``numactl`` command that binds a Spark worker to it.

    Raises
    ------
    UsageError
        If ``numactl`` is not installed, or `executors` is not a multiple of the NUMA nodes.
    """
    from bigdl.common.cpu import topology

    numactl = shutil.which("numactl")
    if numactl is None:
        raise UsageError(
            "enable_numa_binding=True needs the program numactl, which is not on PATH: "
            "install it (apt-get install numactl), or omit enable_numa_binding",
            code="package-missing",
            package="numactl",
        )
    nodes = numa_numbers(topology().numa_nodes)
    if executors % len(nodes):
        raise UsageError(
            f"enable_numa_binding=True needs num_nodes to be a multiple of this machine's "
            f"{len(nodes)} NUMA nodes, but got num_nodes={executors}",
            code="argument-value",
            argument="num_nodes",
        )
    return [
        [numactl, "-m", str(node), "-C", ",".join(map(str, cores))] for node, cores in nodes.items()
    ]


def spark_home() -> str:
    """Return Spark's directory: ``SPARK_HOME``, else the installed PySpark."""
    from pyspark.find_spark_home import _find_spark_home

    return _find_spark_home()


def _start_request(directory, secret, java, cores, memory, executors, prefixes) -> dict:
    home = spark_home()
    conf = os.path.join(directory, "conf")
    for name in (conf, *(os.path.join(directory, part) for part in ("work", "local"))):
        os.mkdir(name)
    # the supervisor parses INFO messages of the daemons
    log = LOGGING.read_text().replace("rootLogger.level = warn", "rootLogger.level = info")
    Path(conf, LOGGING.name).write_text(log)
    properties = os.path.join(conf, "cluster.conf")
    with open(os.open(properties, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(
            f"spark.authenticate true\nspark.authenticate.secret {secret}\n"
            "spark.master.rest.enabled false\n"
        )
    spark_class = os.path.join(home, "bin", "spark-class")
    common = ["--host", LOOPBACK, "--port", "0", "--webui-port", "0"]
    common += ["--properties-file", properties]
    worker = [spark_class, "org.apache.spark.deploy.worker.Worker", *common]
    worker += ["--cores", str(cores * executors), "--memory", _times(memory, executors)]
    worker += ["--work-dir", os.path.join(directory, "work")]
    return {
        "parent": os.getpid(),
        "directory": directory,
        "environment": _environment(os.environ, home, conf, directory, java),
        "master": [spark_class, "org.apache.spark.deploy.master.Master", *common],
        "workers": [[*prefix, *worker] for prefix in prefixes],
    }


def _environment(environ: Mapping[str, str], home, conf, directory, java) -> dict[str, str]:
    """Return environment variables of Spark's daemons, without settings for other clusters."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SPARK_MASTER_", "SPARK_WORKER_", "PYSPARK_GATEWAY_"))
        and name != "SPARK_ENV_LOADED"
    }
    options = f"{QUICK_JVM} {environ.get('SPARK_DAEMON_JAVA_OPTS', '')}".strip()
    return {
        **kept,
        "JAVA_HOME": java,
        "SPARK_HOME": home,
        "SPARK_CONF_DIR": conf,
        "SPARK_LOCAL_DIRS": os.path.join(directory, "local"),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_PUBLIC_DNS": LOOPBACK,
        "SPARK_DAEMON_MEMORY": _DAEMON_MEMORY,
        "SPARK_DAEMON_JAVA_OPTS": options,
    }


def _times(memory: str, number: int) -> str:
    match = cast("re.Match[str]", re.fullmatch(r"(\d+)([kmgt])", memory))
    # in MiB, the smallest unit of Spark's worker
    factor = {"k": 2**-10, "m": 1, "g": 2**10, "t": 2**20}[match[2]]
    return f"{int(int(match[1]) * factor) * number}m"
