"""A server of Spark Connect in a process of its own, as users have one.

A process holds a SparkContext or a session of Spark Connect, so tests of Spark Connect are in a
process of their own, or in one whose only Spark is this server: see ``over_connect``.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from quick_jvm import QUICK_JVM

OVER_CONNECT = "BIGDL_TEST_SPARK"
"""Environment variable; ``connect`` lets the tests of ``orca_spark`` run over Spark Connect."""


def over_connect() -> bool:
    """Return True if the Spark of this test process is a server of Spark Connect."""
    return os.environ.get(OVER_CONNECT) == "connect"


def _jar() -> Path | None:
    """The JAR of the server that pip's PySpark 3.5 lacks; None where the server is inside.

    A test is skipped where there is none.
    """
    import pyspark

    if not pyspark.__version__.startswith("3."):
        return None
    folder = Path(os.environ.get("BIGDL_CLUSTERS", "none"), "spark-connect-3.5")
    jars = sorted(folder.glob("spark-connect_*.jar"))
    if not jars:
        pytest.skip("the server of Spark Connect 3.5 is a JAR, which is not in BIGDL_CLUSTERS")
    return jars[-1]


def _is_executor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it has ended
        return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    return False


class ConnectServer:
    """A server on the loopback interface.

    Parameters
    ----------
    folder : Path
        For its log, and what it writes.
    master : str
    environment : dict of str to str, optional
    conf : dict of str to str
    """

    def __init__(
        self,
        folder: Path,
        master: str = "local[2,4]",
        environment: dict[str, str] | None = None,
        **conf: str,
    ):
        self._environment = environment or {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"sc://127.0.0.1:{self.port}"
        self.folder = Path(folder)
        self._master, self._conf = master, conf
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        home = self._home()
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": QUICK_JVM,
            "spark.executor.extraJavaOptions": QUICK_JVM,
            "spark.ui.enabled": "false",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            **self._conf,
        }
        confs = [part for pair in settings.items() for part in ("--conf", "=".join(pair))]
        jar = _jar()
        if jar is not None:
            confs += ["--jars", str(jar), "--driver-class-path", str(jar)]
        server = "org.apache.spark.sql.connect.service.SparkConnectServer"
        command = [str(home / "bin/spark-submit"), "--master", self._master, "--class", server]
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))},
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            **self._environment,
        }
        with open(self.folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [*command, *confs, "spark-internal"],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        give_up = time.monotonic() + 300
        while not self.listens():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            if time.monotonic() > give_up:
                self.kill()
                raise AssertionError("the server did not listen within 300 s")
            time.sleep(0.1)

    def _home(self) -> Path:
        """PySpark's own Spark; behind links where executors write their logs below it."""
        import pyspark

        home = Path(pyspark.__file__).parent
        if not self._master.startswith("local-cluster"):
            return home
        linked = self.folder / "home"
        if not linked.exists():
            linked.mkdir()
            for part in home.iterdir():
                (linked / part.name).symlink_to(part)
        return linked

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def executors(self) -> list[psutil.Process]:
        """The JVMs of the executors of ``local-cluster[...]``."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in children if _is_executor(process)]

    def kill(self) -> None:
        """Kill it, its executors and their Python."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            process.kill()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        while self.listens():
            time.sleep(0.05)

    stop = kill
