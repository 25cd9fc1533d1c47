"""Start, describe and stop Spark.

:class:`LaunchedSpark` is a Spark whose JVM this process started: it is made by
``init_orca_context`` and its :meth:`~LaunchedSpark.stop` leaves no process behind.
:class:`SparkCluster` describes the Spark that is active, whoever started it; feeds and engines
ask it for nodes, cores and slots.

What PySpark does not offer publicly (the gateway to the JVM, the class-level singletons, the
number of slots) is looked up in this module only.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.java import JavaHome, find_java

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["LaunchedSpark", "SparkCluster", "active_context", "local_properties"]

NO_CONTEXT = "No active SparkContext. Please create a SparkContext first"

TASK_ATTEMPTS = 4
"""Times a task is tried in local mode; Spark's own ``local[n]`` gives up at the first failure."""

EXIT_GRACE_S = 10.0
"""Seconds that a JVM has to end by itself before it is killed."""

logger = logging.getLogger("bigdl.orca")


class SparkCluster:
    """The active Spark, as nodes × cores.

    Build it with :meth:`from_active` at the time of use and do not keep it: on a real cluster
    executors come and go.

    Parameters
    ----------
    sc : pyspark.SparkContext

    Attributes
    ----------
    sc : pyspark.SparkContext
    master : str
        Spark's master URL, e.g. ``"local[4,4]"``.
    """

    def __init__(self, sc: SparkContext):
        self.sc = sc
        self.master: str = sc.master

    @classmethod
    def from_active(cls) -> SparkCluster:
        """Describe the active SparkContext.

        Raises
        ------
        UsageError
            If there is none.
        """
        sc = active_context()
        if sc is None:
            raise UsageError(NO_CONTEXT)
        return cls(sc)

    def __repr__(self) -> str:
        return f"SparkCluster({self.master!r}, {self.nodes} nodes × {self.cores_per_node} cores)"

    @property
    def spark(self) -> SparkSession:
        """The SparkSession on this context, made if there is none."""
        from pyspark.sql import SparkSession

        return SparkSession.builder.getOrCreate()

    @property
    def is_local(self) -> bool:
        """Whether tasks run in the driver's JVM (``local[…]``, not ``local-cluster[…]``)."""
        return is_local(self.master)

    @property
    def driver_host(self) -> str:
        """The address at which executors reach the driver."""
        return self._conf("spark.driver.host", "127.0.0.1")

    @property
    def dynamic_allocation(self) -> bool:
        """Whether Spark may add and remove executors while a program runs."""
        return not self.is_local and self._conf("spark.dynamicAllocation.enabled") == "true"

    @property
    def nodes(self) -> int:
        """Number of executors; 1 in local mode.

        It is the number that was asked for where that is fixed, since executors register over
        time, and otherwise the number that has registered so far.
        """
        if self.is_local:
            return 1
        simulated = _local_cluster(self.master)
        if simulated:
            return simulated[0]
        asked = self._conf("spark.executor.instances")
        if asked and not self.dynamic_allocation:
            return int(asked)
        # The driver is one of them.
        return len(self.sc._jsc.sc().statusTracker().getExecutorInfos()) - 1

    @property
    def cores_per_node(self) -> int:
        """Cores that tasks may use on one executor."""
        simulated = _local_cluster(self.master)
        if simulated:
            return simulated[1]
        if not self.is_local:
            asked = self._conf("spark.executor.cores")
            if asked:
                return int(asked)
        task_cpus = int(self._conf("spark.task.cpus", "1"))
        return max(1, self.slots() * task_cpus // max(1, self.nodes))

    def slots(self) -> int:
        """Number of tasks that can run at the same time on the executors registered now."""
        from py4j.protocol import Py4JError

        scala_context = self.sc._jsc.sc()
        try:
            profile = scala_context.resourceProfileManager().defaultResourceProfile()
            return scala_context.maxNumConcurrentTasks(profile)
        except Py4JError as error:  # not public in Spark: it may change
            logger.debug("maxNumConcurrentTasks failed, using defaultParallelism: %s", error)
            return self.sc.defaultParallelism

    def _conf(self, key: str, default: str | None = None) -> str | None:
        return self.sc.getConf().get(key, default)


class LaunchedSpark:
    """A SparkContext and the JVM that this process started for it.

    Use :meth:`launch`, and :meth:`stop` at the end.

    Attributes
    ----------
    sc : pyspark.SparkContext
    """

    def __init__(self, sc: SparkContext, java: JavaHome, readers: list[threading.Thread], sigint):
        from pyspark import SparkFiles

        self.sc = sc
        self._gateway = sc._gateway
        self._java = java
        self._readers = readers
        self._sigint = sigint
        self._files = SparkFiles.getRootDirectory()

    @classmethod
    def launch(
        cls,
        properties: Mapping[str, str],
        environment: Mapping[str, str],
        *,
        log_output: bool = False,
    ) -> LaunchedSpark:
        """Start a JVM and a SparkContext in it.

        Parameters
        ----------
        properties : mapping of str to str
            Spark properties, also those that are options of the JVM such as
            ``spark.driver.memory``.
        environment : mapping of str to str
            Environment variables for the JVM and what it starts.  ``os.environ`` of this process
            is the same before and after.
        log_output : bool
            Copy what the JVM writes to ``sys.stdout`` and ``sys.stderr`` of this process, which
            a notebook shows, and not to the file descriptors it inherited.

        Raises
        ------
        UsageError
            If there is no suitable Java, the JVM ends at once or Spark refuses a property.
        """
        from pyspark import SparkConf

        shut_down_idle_gateway()
        java = find_java()
        sigint = signal.getsignal(signal.SIGINT)
        conf = SparkConf().setAll(list(properties.items()))
        gateway, readers = None, []
        try:
            with _environment({**environment, "JAVA_HOME": str(java.home)}):
                gateway = _launch_gateway(conf, readers if log_output else None)
                sc = _new_context(conf, gateway)
        except BaseException:
            if gateway is not None:
                _shut_down(gateway)
            _join(readers)
            java.close()
            raise
        return cls(sc, java, readers, sigint)

    def stop(self) -> None:
        """Stop the context and the JVM; no process is left when this returns."""
        from pyspark import SparkContext

        # The user may have stopped our context and started another one in the same JVM.
        active = SparkContext._active_spark_context
        if active is not None and active._gateway is self._gateway:
            _stop_context(active)
        _shut_down(self._gateway)
        _join(self._readers)
        self._java.close()
        with suppress(ValueError):
            sys.path.remove(self._files)  # PySpark added it
        _restore_sigint(self._sigint)


def active_context() -> SparkContext | None:
    """The SparkContext of this process, or None if there is none or its JVM is gone."""
    if "pyspark" not in sys.modules:
        return None
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    sc = SparkContext._active_spark_context
    if sc is None or sc._jsc is None:
        return None
    try:
        stopped = sc._jsc.sc().isStopped()
    except (Py4JError, OSError):
        stopped = True
    return None if stopped else sc


def use_this_python(sc: SparkContext) -> None:
    """On this machine, let the workers of `sc` use this interpreter unless another was asked for.

    PySpark's own default is the ``python3`` on ``PATH``, in a virtual environment often another.
    """
    asked = "PYSPARK_PYTHON" in os.environ or sc.getConf().get("spark.pyspark.python")
    if sc.master.startswith("local") and not asked:
        sc.pythonExec = sys.executable


def set_log_level(sc: SparkContext, level: str) -> None:
    """Set the level of Spark's log.

    Spark does nothing if the root logger has that level already, as it has INFO at the start,
    and leaves the filter of its shell in place, which hides all below WARN; so the level is
    changed in any case.
    """
    sc.setLogLevel("WARN" if level != "WARN" else "ERROR")
    sc.setLogLevel(level)


def stop_foreign_context() -> None:
    """Stop the active context, if any, and leave its JVM to whoever started it."""
    if "pyspark" not in sys.modules:
        return
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        _stop_context(SparkContext._active_spark_context)


def attach(properties: Mapping[str, str], environment: Mapping[str, str]) -> SparkContext:
    """Start a SparkContext in the JVM of ``spark-submit``, whose start options stay as they are."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    with _environment(environment):
        return _new_context(SparkConf().setAll(list(properties.items())))


def has_foreign_gateway() -> bool:
    """Whether there is a JVM that this process did not start, as under ``spark-submit``."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return "PYSPARK_GATEWAY_PORT" in os.environ
    return vars(gateway).get("proc") is None


def shut_down_idle_gateway() -> None:
    """End a JVM that this process started earlier and that has no context any more.

    Memory is a start option of the JVM, so a new context with other memory needs a new JVM.
    """
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        logger.warning("The JVM of the last SparkContext is gone, a new one is started.")
        _stop_context(SparkContext._active_spark_context)
    if SparkContext._gateway is not None:
        _shut_down(SparkContext._gateway)


def is_local(master: str) -> bool:
    """Whether `master` runs its tasks in the driver's JVM."""
    return master == "local" or master.startswith("local[")


def local_properties(cores: int, memory: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Spark properties for one machine; those of `conf` win.

    Parameters
    ----------
    cores : int
        Tasks that run at the same time.
    memory : str
        Memory of the JVM, e.g. ``"2g"``.
    conf : mapping of str to str
        The user's own properties.
    """
    import pyspark
    from packaging.version import Version

    properties = {
        "spark.master": f"local[{cores},{TASK_ATTEMPTS}]",
        "spark.app.name": "orca",
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "true" if "spark.ui.port" in conf else "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.python.worker.reuse": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Spark's default of 200 is for clusters; a few more than cores keep them all busy.
        "spark.sql.shuffle.partitions": str(max(8, 2 * cores)),
        # A worker is another process of this machine: it can import what the driver can.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(user_import_path()),
    }
    if hasattr(socket, "AF_UNIX") and Version(pyspark.__version__) >= Version("4.1"):
        properties["spark.python.unix.domain.socket.enabled"] = "true"
    return {**properties, **conf}


def local_environment(python: str) -> dict[str, str]:
    """Environment variables of the JVM for one machine.

    Parameters
    ----------
    python : str
        Path of the Python interpreter of the workers.
    """
    return {
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def user_import_path() -> list[str]:
    """Entries of ``sys.path`` that are not the interpreter's own, such as the script's folder."""
    own = {
        os.path.realpath(sysconfig.get_path(name, vars=variables))
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        for variables in ({}, {"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    }
    found = []
    for entry in sys.path:
        path = os.path.realpath(entry or os.getcwd())
        is_own = any(path == each or path.startswith(each + os.sep) for each in own)
        if os.path.exists(path) and not is_own and path not in found and os.pathsep not in path:
            found.append(path)
    return found


def _local_cluster(master: str) -> tuple[int, int] | None:
    """Executors and cores per executor of ``local-cluster[executors,cores,memory]``."""
    match = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master)
    return (int(match[1]), int(match[2])) if match else None


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the time of launching a process."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _launch_gateway(conf: Any, readers: list[threading.Thread] | None) -> Any:
    """Start a JVM; with a list of `readers`, add the threads that copy its output."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    pipes = {}
    if readers is not None:
        for name in ("stdout", "stderr"):
            source, pipes[name] = os.pipe()
            readers.append(threading.Thread(target=_copy, args=(source, name), daemon=True))
            readers[-1].start()
    try:
        return launch_gateway(conf, dict(pipes))
    except PySparkRuntimeError as error:
        raise UsageError(
            "the Java process of Spark ended at once, and standard error shows why; "
            f"memory was {conf.get('spark.driver.memory')!r}"
        ) from error
    finally:
        for pipe in pipes.values():
            os.close(pipe)  # the JVM has it now


def _join(readers: list[threading.Thread]) -> None:
    for reader in readers:
        reader.join(timeout=1)  # it ends with the JVM


def _copy(source: int, name: str) -> None:
    """Copy lines to ``sys.stdout`` or ``sys.stderr``, whatever that is at the time."""
    with open(source, "rb") as lines:
        for line in lines:
            with suppress(ValueError, OSError):  # the stream was closed
                getattr(sys, name).write(line.decode(errors="replace"))


def _new_context(conf: Any, gateway: Any = None) -> SparkContext:
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext

    try:
        return SparkContext(conf=conf, gateway=gateway)
    except Py4JJavaError as error:
        # The text of the Java exception lies in the JVM, which is about to be shut down.
        reason = error.java_exception.toString()
    raise UsageError(f"Spark refused to start: {reason}")


def _stop_context(sc: SparkContext) -> None:
    """Stop `sc` and forget every session on it, also when its JVM is gone."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext

    try:
        sc.stop()
    except Exception as error:
        logger.debug("SparkContext.stop failed: %s", error)
    SparkContext._active_spark_context = None
    session = SparkSession._instantiatedSession
    if session is not None and session._sc is sc:
        SparkSession._instantiatedSession = None
        SparkSession._activeSession = None
    context = SQLContext._instantiatedContext
    if context is not None and context._sc is sc:
        SQLContext._instantiatedContext = None


def _shut_down(gateway: Any) -> None:
    """Close `gateway` and end its JVM if this process started it."""
    from pyspark import SparkContext

    process = vars(gateway).get("proc")
    if process is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    with suppress(OSError):
        process.stdin.close()  # the JVM ends at the end of its standard input
    try:
        process.wait(EXIT_GRACE_S)
    except subprocess.TimeoutExpired:
        logger.warning("The JVM of Spark did not end within %g s and is killed.", EXIT_GRACE_S)
        process.kill()
        process.wait()
    if SparkContext._gateway is gateway:
        SparkContext._gateway = None
        SparkContext._jvm = None


def _restore_sigint(handler: Any) -> None:
    """Take back PySpark's handler, which would cancel the jobs of the stopped context."""
    current = signal.getsignal(signal.SIGINT)
    if (
        handler is not None
        and threading.current_thread() is threading.main_thread()
        and getattr(current, "__module__", None) == "pyspark.core.context"
    ):
        signal.signal(signal.SIGINT, handler)
