"""Start and stop of Spark.

:class:`LaunchedSpark` is a Spark whose JVM this process started.  ``init_orca_context`` creates it,
and its :meth:`~LaunchedSpark.stop` stops all processes.  Only this module uses the private
interfaces of PySpark for that (the JVM gateway and class-level singletons).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.cpu import passive_waiting
from bigdl.common.environment import EnvContext, set_variables
from bigdl.common.errors import UsageError
from bigdl.common.private_folders import LockedFolder, process_folder
from bigdl.common.timeouts import JVM_EXIT_S, JVM_STOP_S
from bigdl.orca.cluster.class_archive import archive_options, prepare_in_background
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.java import find_java
from bigdl.orca.cluster.jvm import JvmWatch, quiet_accumulators
from bigdl.orca.cluster.standalone import LOGGING, LOOPBACK, QUICK_JVM, spark_home
from bigdl.orca.cluster.versions import python_mismatch
from bigdl.runtime.engine import user_import_path
from bigdl.runtime.jobs import PYSPARK_CONTEXT
from bigdl.runtime.launch import OutputForwarder
from bigdl.runtime.preloaded import ADDRESS, MODULE, Preloaded, can_preload

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkConf, SparkContext

    from bigdl.orca.cluster.standalone import StandaloneCluster

logger = logging.getLogger("bigdl.orca")


EVERYWHERE = {
    "spark.app.name": "orca",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # milliseconds; with Spark's minute, a temporarily single executor keeps storing blocks without
    # replicas long after another executor has registered
    "spark.storage.cachedPeersTtl": "2000",
}
"""Spark properties of every cluster mode."""

TASK_ATTEMPTS = 4
"""Attempts of a task in local mode; Spark's ``local[n]`` fails at the first error."""

START_ATTEMPTS = 3
"""Start attempts of a SparkContext, because of races between Spark's threads."""

DAEMON = "bigdl.orca.cluster.python_daemon"
"""Module that forks Spark's Python workers on this machine."""

FORKING_DAEMON = "bigdl.runtime.preloaded"
"""Module that runs :data:`DAEMON` in a fork of a process that has imported its modules already."""

LONGEST_SOCKET = 103
"""Maximum bytes of a Unix socket path, on all systems."""

_START_LINES = ("WARNING: Using incubator modules: jdk.incubator.vector",)
"""Java's messages about options that Spark sets."""

LATE_COMPILER = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=50000 "
    "-XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000 "
    "-XX:Tier4BackEdgeThreshold=400000"
)
"""JVM options that optimize code after ten times the usual number of calls.

Code that runs at the start only is then not optimized, which took half of the processor; code of
long jobs is optimized a moment later.
"""

_EXECUTOR_OPTIONS = "spark.executor.extraJavaOptions"
_SOCKETS = "spark.python.unix.domain.socket"
_TABLE_MODULES = ("pandas", "pyarrow", "pyspark.sql", "pyspark.testing.utils")
"""Modules that PySpark 4.3 imports for the first list that it sends to the JVM."""

_SHORT_TRACEBACK = "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"
_TEMPORARY = "java.io.tmpdir"
_LOCAL_DIRECTORY = "spark.local.dir"
SECRET = "spark.authenticate.secret"
_SECRETS = re.compile("secret|password|token|access[.]?key|account[.]?key|sas[.]", re.IGNORECASE)
_FETCHED = ("spark.jars", "spark.files", "spark.archives", "spark.submit.pyFiles")
_CLOUD = re.compile("(s3a?|s3n|abfss?|wasbs?|gs|oss|cosn?)://")


_PYSPARK_VARIABLES = ("SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE")
"""Environment variables that PySpark sets for its context."""


class LaunchedSpark:
    """SparkContext and the JVM that this process started for it.

    Create it with :meth:`launch`, and call :meth:`stop` at the end.

    Attributes
    ----------
    sc : pyspark.SparkContext
    cluster : StandaloneCluster or None
        Cluster that was started for it and is stopped with it.
    """

    cluster: StandaloneCluster | None = None

    def __init__(self, sc: SparkContext, cleanup: contextlib.ExitStack):
        self.sc = sc
        self._cleanup = cleanup

    @classmethod
    def launch(
        cls,
        properties: Mapping[str, str],
        environment: Mapping[str, str],
        *,
        log_output: bool = False,
        resources: contextlib.ExitStack | None = None,
        prepare: Callable[[Any], Mapping[str, str]] | None = None,
        explain: Callable[[Any], str] = lambda jvm: "",
    ) -> LaunchedSpark:
        """Start a JVM and a SparkContext in it.

        Parameters
        ----------
        properties : mapping of str to str
            Spark properties, including JVM options such as ``spark.driver.memory``.
        environment : mapping of str to str
            Environment variables of the JVM and its child processes.  ``os.environ`` of this
            process is restored.
        log_output : bool
            Forward the JVM's output to ``sys.stdout`` and ``sys.stderr``, which a notebook shows,
            instead of the inherited file descriptors.
        resources : contextlib.ExitStack, optional
            Resources to close at the end, or if the start fails.
        prepare : callable, optional
            Called with the JVM before Spark starts; returns changed Spark properties.
        explain : callable, optional
            Called with the JVM if Spark does not start; returns details of the reason, or "".

        Raises
        ------
        UsageError
            If there is no suitable Java, the JVM ends immediately, or Spark rejects a property.
        """
        from pyspark import SparkConf, SparkFiles

        shut_down_idle_gateway()
        conf = SparkConf().setAll(list(properties.items()))
        # Other users of this machine can read the JVM's command line.
        shown = SparkConf().setAll(list(without_secrets(properties).items()))
        with resources or contextlib.ExitStack() as cleanup:
            # It outlives this process as long as the JVM is running.
            folder = LockedFolder("spark", remover=False)
            cleanup.callback(folder.close)
            java = find_java()
            cleanup.callback(java.close)
            cleanup.callback(_restore_sigint, signal.getsignal(signal.SIGINT))
            cleanup.callback(
                set_variables, {name: os.environ.get(name) for name in _PYSPARK_VARIABLES}
            )
            archive = archive_options(java.home)
            if archive and properties.get("spark.driver.host") == LOOPBACK:
                options = properties.get(_EXECUTOR_OPTIONS, "")
                conf.set(_EXECUTOR_OPTIONS, f"{archive} {options}".strip())
            variables = _java_environment(java.home, archive, folder.path)
            with EnvContext({**environment, **variables}):
                with contextlib.suppress(OSError):  # Spark's daemon then imports them itself
                    conf.setAll(list(_preload(properties, cleanup).items()))
                with _importing(_TABLE_MODULES):
                    gateway = _launch_gateway(shown, cleanup, log_output)
                cleanup.callback(_shut_down, gateway)
                JvmWatch.of(gateway)
                if prepare is not None:
                    conf.setAll(list(prepare(gateway.jvm).items()))
                try:
                    sc = _new_context(conf, gateway)
                except UsageError as error:
                    details = explain(gateway.jvm)
                    raise (
                        error.with_message(f"{error}; {details}") if details else error
                    ) from None
            cleanup.callback(_stop_context_of, gateway)
            quiet_accumulators(sc)
            cleanup.callback(_forget_path, SparkFiles.getRootDirectory())
            ship_modules(sc)
            if not archive and properties.get("spark.driver.host") == LOOPBACK:
                prepare_in_background(java.home)
            return cls(sc, cleanup.pop_all())

    def end(self, reason: str) -> None:
        """Kill the JVM, so that all waiting calls fail with the given reason."""
        JvmWatch.of(self.sc._gateway).end(reason)

    def stop(self) -> None:
        """Stop the context, the JVM and the cluster, and wait until all processes have ended."""
        self._cleanup.close()


def without_secrets(properties: Mapping[str, str]) -> dict[str, str]:
    """Remove secrets from properties for a JVM's command line; Spark reads them from SparkConf.

    They are kept if Spark needs them to fetch files before it reads the SparkConf.
    """
    needs_all = any(_CLOUD.search(properties.get(name, "")) for name in _FETCHED)
    return {
        name: value
        for name, value in properties.items()
        if name != SECRET and (needs_all or not _SECRETS.search(name))
    }


@contextlib.contextmanager
def _importing(names: Sequence[str]) -> Iterator[None]:
    """Context manager that imports modules in another thread and joins the thread on exit."""

    def run() -> None:
        for name in names:
            with suppress(Exception):  # the module's user raises the error
                importlib.import_module(name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()  # avoids concurrent imports of the same packages


@contextlib.contextmanager
def hadoop_jvm(environment: Mapping[str, str]) -> Iterator[Any]:
    """Context manager that runs a JVM with Spark's and Hadoop's classes but no SparkContext.

    Parameters
    ----------
    environment : mapping of str to str
        Environment variables of the JVM, in particular ``HADOOP_CONF_DIR``.
    """
    from pyspark import SparkConf

    with contextlib.closing(find_java()) as java, contextlib.ExitStack() as cleanup:
        with EnvContext({**environment, **_java_environment(java.home, "")}):
            gateway = _launch_gateway(SparkConf(loadDefaults=False), cleanup)
        try:
            yield gateway.jvm
        finally:
            _shut_down(gateway)


def _stop_context_of(gateway: object) -> None:
    """Stop a JVM's active SparkContext, even one that the user started."""
    from pyspark import SparkContext

    active = SparkContext._active_spark_context
    if active is not None and active._gateway is gateway:
        _stop_context(active)


def _forget_path(entry: str) -> None:
    with suppress(ValueError):
        sys.path.remove(entry)  # PySpark added it


def use_this_python(sc: SparkContext) -> None:
    """Use this interpreter for local workers of `sc`, unless the user chose another one.

    PySpark's default is the ``python3`` on ``PATH``, which may differ in a virtual environment.

    Raises
    ------
    UsageError
        If the chosen interpreter has another version, with which tasks fail.
    """
    is_configured = "PYSPARK_PYTHON" in os.environ or sc.getConf().get("spark.pyspark.python")
    if not cast("str", sc.master).startswith("local"):
        return
    if not is_configured:
        sc.pythonExec = sys.executable
    elif os.path.realpath(sc.pythonExec) != os.path.realpath(sys.executable):
        version = _python_version(sc.pythonExec)
        if version not in (None, "{}.{}".format(*sys.version_info)):
            raise UsageError(
                python_mismatch(cast("str", version)),
                code="version-unsupported",
                package="python",
                version=version,
            )


@functools.lru_cache
def _python_version(executable: str) -> str | None:
    """Return the version of an interpreter, or None if it cannot be determined."""
    program = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        done = subprocess.run(
            [executable, "-c", program], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def set_log_level(sc: SparkContext, level: str) -> None:
    """Set Spark's log level.

    Spark does nothing if the root logger already has the level (initially INFO), and keeps its
    shell's filter, which hides messages below WARN.  Therefore the level is always changed.
    """
    sc.setLogLevel("WARN" if level != "WARN" else "ERROR")
    sc.setLogLevel(level)
    if level not in ("ALL", "TRACE", "DEBUG", "INFO"):
        quiet_query_errors()


def quiet_query_errors() -> None:
    """Silence PySpark's log of query errors, which are raised as exceptions.

    PySpark 4 logs each one as a line of JSON with the JVM's stack before raising it. A level that
    the program has set is kept.
    """
    with contextlib.suppress(ImportError):  # Spark 3.5
        from pyspark.logger import PySparkLogger

        for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
            logger = PySparkLogger.getLogger(name)
            if logger.level == logging.WARNING:  # PySpark's default
                logger.setLevel(logging.CRITICAL)


def stop_foreign_context() -> None:
    """Stop the active context, if any, but not its JVM."""
    if "pyspark" not in sys.modules:
        return
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        _stop_context(SparkContext._active_spark_context)


def attach(properties: Mapping[str, str], environment: Mapping[str, str]) -> SparkContext:
    """Start a SparkContext in the JVM that ``spark-submit`` started, with the given properties."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    conf = SparkConf().setAll(list(properties.items()))
    is_configured = conf.contains(_LOCAL_DIRECTORY) or "SPARK_LOCAL_DIRS" in os.environ
    if properties.get("spark.master", "").startswith("local") and not is_configured:
        conf.set(
            _LOCAL_DIRECTORY, process_folder()
        )  # otherwise other users can read Spark's blocks
    with EnvContext(environment):
        return _new_context(conf)


def has_foreign_gateway() -> bool:
    """Return True if another process started the JVM, as under ``spark-submit``."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return "PYSPARK_GATEWAY_PORT" in os.environ
    return vars(gateway).get("proc") is None


def shut_down_idle_gateway() -> None:
    """Stop a JVM without SparkContext that this process started earlier.

    Memory is a start option of the JVM, so a new context with other memory needs a new JVM.
    """
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        logger.warning("The JVM of the last SparkContext is gone; starting a new one.")
        _stop_context(SparkContext._active_spark_context)
    if SparkContext._gateway is not None:
        _shut_down(SparkContext._gateway)


def local_properties(cores: int, memory: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Return Spark properties for local mode; properties in `conf` take precedence.

    Parameters
    ----------
    cores : int
        Number of concurrent tasks.
    memory : str
        Memory of the JVM, e.g. ``"2g"``.
    conf : mapping of str to str
        Properties of the user.
    """
    return {
        "spark.master": f"local[{cores},{TASK_ATTEMPTS}]",
        "spark.driver.memory": memory,
        **loopback_properties(conf),
        **EVERYWHERE,
        **waiting_properties(conf),
        **_authentication(conf),
        # Spark's default of 200 suits clusters; slightly more than the cores keeps them busy.
        "spark.sql.shuffle.partitions": str(max(8, 2 * cores)),
        **conf,
    }


def waiting_properties(conf: Mapping[str, str]) -> dict[str, str]:
    """Return Spark properties that make idle OpenMP threads of Python workers sleep.

    Parameters
    ----------
    conf : mapping of str to str
        Properties of the user.
    """
    prefix = "spark.executorEnv."
    user_variables = {name.removeprefix(prefix): value for name, value in conf.items()}
    variables = passive_waiting({**os.environ, **user_variables})
    return {f"{prefix}{name}": value for name, value in variables.items()}


def _authentication(conf: Mapping[str, str]) -> dict[str, str]:
    """Return properties that require authentication at Spark's ports in local mode.

    Spark then generates the secret.  If `conf` sets another master, its cluster's secret is needed.
    """
    is_local = re.fullmatch(r"local(\[.*\])?", conf.get("spark.master", "local"))
    return {"spark.authenticate": "true"} if is_local else {}


def loopback_properties(conf: Mapping[str, str]) -> dict[str, str]:
    """Return Spark properties of a driver whose executors are on the same machine.

    Parameters
    ----------
    conf : mapping of str to str
        Properties of the user.
    """
    return {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "true" if "spark.ui.port" in conf else "false",
        # Workers run on this machine and can import the same modules as the driver.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(user_import_path()),
        **_daemon_properties(conf),
        **_socket_properties(conf.get(f"{_SOCKETS}.dir")),
    }


def _java_environment(home: Path, archive: str, directory: str = "") -> dict[str, str]:
    """Return environment variables for Spark's JVM and for its launcher JVM.

    The JVM writes temporary files to `directory`.  They include Spark's blocks, which are readable
    by all users, unless ``spark.local.dir`` or ``SPARK_LOCAL_DIRS`` sets another directory.
    """
    user_options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    settings = [
        LATE_COMPILER,
        _temporary_option(directory),
        archive,
        _logging_option(user_options),
        user_options,
    ]
    options = " ".join(filter(None, settings))
    return {
        "JAVA_HOME": str(home),
        "SPARK_LAUNCHER_OPTS": os.environ.get("SPARK_LAUNCHER_OPTS", QUICK_JVM),
        **({"SPARK_SUBMIT_OPTS": options} if options else {}),
    }


def _temporary_option(directory: str) -> str:
    """Return the JVM option for the temporary directory, or "" if the user set it."""
    names = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
    is_set = any(_TEMPORARY in os.environ.get(name, "") for name in names)
    if not directory or is_set:
        return ""
    return _temporary_in(directory)


def _temporary_in(directory: str) -> str:
    quoted = directory.replace("\\", "\\\\").replace('"', '\\"')
    return f'"-D{_TEMPORARY}={quoted}"'


def executor_temporary(conf: Mapping[str, str], directory: str) -> dict[str, str]:
    """Return the property that sets the temporary directory of executors.

    The result is empty if the user set the directory, or sets executor options in a Spark file.
    """
    user_options = conf.get(_EXECUTOR_OPTIONS, "")
    if _TEMPORARY in user_options or (
        not user_options and _EXECUTOR_OPTIONS in default_properties()
    ):
        return {}
    return {_EXECUTOR_OPTIONS: f"{_temporary_in(directory)} {user_options}".strip()}


def _logging_option(options: str) -> str:
    """Return the JVM option for Orca's log configuration, or "" if the user has one."""
    if "log4j" in options or any(_conf_folder().glob("log4j2*")):
        return ""
    return f"-Dlog4j2.configurationFile={LOGGING.as_uri()}"


def _conf_folder() -> Path:
    return Path(os.environ.get("SPARK_CONF_DIR") or Path(spark_home(), "conf"))


def default_properties() -> frozenset[str]:
    """Return the names of the properties that ``spark-defaults.conf`` sets."""
    try:
        lines = (_conf_folder() / "spark-defaults.conf").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset(re.split(r"[\s=:]", line.strip(), maxsplit=1)[0] for line in lines)


def _daemon_properties(conf: Mapping[str, str]) -> dict[str, str]:
    """Return properties that make Spark fork workers from ``bigdl.orca.cluster.python_daemon``.

    The daemon preloads the modules that Orca's tasks need, including torch if this process uses it.
    """
    modules = ["numpy", "pandas", "pyarrow", "pyspark.worker"]
    modules += ["torch"] * ("torch" in sys.modules)
    if "bigdl.orca.learn.pytorch" in sys.modules:
        # the first optimizer of a process imports torch's compiler
        modules += ["bigdl.orca.learn.pytorch.loop", "torch._dynamo"]
    # It is the default for DataFrame tasks. RDD tasks with other variables would need a separate
    # daemon.
    short = {} if conf.get(_SHORT_TRACEBACK) == "false" else {"SPARK_SIMPLIFIED_TRACEBACK": "1"}
    variables = {"BIGDL_PRELOAD": ",".join(modules), **short}
    return {
        "spark.python.daemon.module": DAEMON,
        **{f"spark.executorEnv.{name}": value for name, value in variables.items()},
    }


def _preload(properties: Mapping[str, str], cleanup: contextlib.ExitStack) -> dict[str, str]:
    """Import the modules of Spark's Python daemon while the JVM starts, if torch is one of them.

    Returns properties with which Spark's daemon is a fork of the process that imports them.  A
    program without torch may use no Python worker, and other modules are imported in a second.
    """
    modules = properties.get("spark.executorEnv.BIGDL_PRELOAD", "").split(",")
    is_local = properties.get("spark.master", "").startswith("local[")
    is_ours = properties.get("spark.python.daemon.module") == DAEMON
    if not (is_local and is_ours and "torch" in modules and can_preload()):
        return {}
    prefix = "spark.executorEnv."
    of_executors = {
        name.removeprefix(prefix): value
        for name, value in properties.items()
        if name.startswith(prefix)
    }
    variables = {**os.environ, **of_executors}
    # as Spark sets them for its daemon; if they differed, the daemon would not use this process
    variables.setdefault("PYTHONHASHSEED", "0")
    variables.setdefault("OMP_NUM_THREADS", properties.get("spark.task.cpus", "1"))
    variables["PYTHONUNBUFFERED"] = "YES"
    home = Path(spark_home())
    archives = [*home.glob("python/lib/pyspark.zip"), *home.glob("python/lib/py4j-*-src.zip")]
    archives += home.glob("jars/spark-core_*.jar")
    variables["PYTHONPATH"] = os.pathsep.join([*map(str, archives), variables["PYTHONPATH"]])
    folder = LockedFolder("preloaded", longest=LONGEST_SOCKET - len("/preloaded"))
    cleanup.callback(folder.close)
    process = Preloaded(
        variables.get("PYSPARK_PYTHON", sys.executable),
        [*modules, "pyspark.daemon"],
        variables,
        folder.path,
    )
    cleanup.callback(process.close)
    return {
        "spark.python.daemon.module": FORKING_DAEMON,
        f"{prefix}{ADDRESS}": process.address,
        f"{prefix}{MODULE}": DAEMON,
    }


def _socket_properties(configured: str | None) -> dict[str, str]:
    """Return properties for Unix sockets between a JVM and its Python workers.

    They are faster than TCP, but their paths are limited in length.  On other machines, where an
    executor's directory may be in a container, Spark uses its default, TCP.
    """
    name = f"/.{uuid.uuid4()}.sock"  # Spark's name pattern
    longest = LONGEST_SOCKET - len(name)
    directory = configured or process_folder(longest)
    if len(os.fsencode(directory)) > longest or not os.access(directory, os.W_OK | os.X_OK):
        return {}
    return {f"{_SOCKETS}.enabled": "true", f"{_SOCKETS}.dir": directory}


def local_environment(python: str) -> dict[str, str]:
    """Return environment variables of the JVM in local mode.

    Parameters
    ----------
    python : str
        Path of the Python interpreter of the workers.
    """
    return {
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "SPARK_LOCAL_IP": LOOPBACK,
    }


def _launch_gateway(
    conf: SparkConf, cleanup: contextlib.ExitStack, log_output: bool = False
) -> JavaGateway:
    """Start a JVM, and the threads that forward its output."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    _check_spark_home()
    pipes = {}
    for name in ("stdout", "stderr") if log_output else ("stderr",):
        source, pipes[name] = os.pipe()
        reader = OutputForwarder(FileIO(source), name, hidden=_START_LINES)
        cleanup.callback(reader.join, timeout=1)
    try:
        return launch_gateway(conf, dict(pipes))
    except PySparkRuntimeError as error:
        raise UsageError(
            "Spark's Java process ended immediately; see standard error for the reason; "
            f"memory was {conf.get('spark.driver.memory')!r}",
            code="program-failed",
        ) from error
    finally:
        for pipe in pipes.values():
            os.close(pipe)  # the JVM has inherited it


def spark_versions_in(home: str | Path) -> list[str]:
    """Return the versions of Spark in a folder, such as ``["4.1.0"]``, or an empty list."""
    return [jar.stem.split("-", 2)[-1] for jar in Path(home, "jars").glob("spark-core_*.jar")]


def _check_spark_home() -> None:
    """Raise UsageError if Spark in SPARK_HOME and the installed PySpark differ in version."""
    import pyspark

    home, required = spark_home(), pyspark.__version__
    versions = spark_versions_in(home)
    if versions and not any(
        each.startswith(f"{required.rpartition('.')[0]}.") for each in versions
    ):
        raise UsageError(
            f"SPARK_HOME={home} has Spark {versions[0]}, but the installed PySpark is {required}: "
            "unset SPARK_HOME, or set it to the same version",
            code="version-unsupported",
            package="spark",
            path=str(home),
            version=versions[0],
        )


def _new_context(conf: SparkConf, gateway: JavaGateway = None) -> SparkContext:
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext

    for _ in range(START_ATTEMPTS):
        try:
            return SparkContext(conf=conf, gateway=gateway)
        except Py4JJavaError as error:
            # Read the Java exception's text before the JVM is shut down.
            causes = [error.java_exception]
            while (cause := causes[-1].getCause()) is not None:
                causes.append(cause)
            reason = ", caused by ".join(dict.fromkeys(str(each.toString()) for each in causes))
        if "ConcurrentModificationException" not in reason:
            break
        # YARN's proxy adds a filter to the pages of Spark's UI while Spark starts them.
        logger.warning("Two threads of Spark's UI conflicted at its start; restarting Spark.")
    if "waiting for backend" in reason:  # Spark's message if no executor remained
        reason += "; the cluster has removed the executors; see their logs for the reason"
    raise UsageError(f"Spark refused to start: {reason}", code="cluster-refused")


def _stop_context(sc: SparkContext) -> None:
    """Stop `sc` and clear all sessions on it, even if its JVM is gone."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext

    with _kill_unless_stopped(sc, JVM_STOP_S):
        try:
            sc.stop()
        except Exception as error:
            logger.debug("SparkContext.stop failed: %s", error)
            with suppress(Exception):
                sc.stop()  # clean up its state in this process
    SparkContext._active_spark_context = None
    if getattr(SparkSession._instantiatedSession, "_sc", None) is sc:
        SparkSession._instantiatedSession = None
        SparkSession._activeSession = None
    if getattr(SQLContext._instantiatedContext, "_sc", None) is sc:
        SQLContext._instantiatedContext = None


@contextlib.contextmanager
def _kill_unless_stopped(sc: SparkContext, seconds: float) -> Iterator[None]:
    """Context manager that kills this process's JVM if the SparkContext does not stop in time."""
    process = vars(sc._gateway).get("proc") if getattr(sc, "_gateway", None) else None
    if process is None:
        yield
        return

    def kill() -> None:
        logger.warning("Spark did not stop within %g s; killing its JVM.", seconds)
        process.kill()

    timer = threading.Timer(0.0 if JvmWatch.of(sc._gateway).is_paused() else seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut_down(gateway: JavaGateway) -> None:
    """Close `gateway` and stop its JVM if this process started it."""
    from pyspark import SparkContext

    process = vars(gateway).get("proc")
    if process is None:
        return
    watch = JvmWatch.of(gateway)
    if watch.is_paused():
        process.kill()
    watch.expect_end()
    with suppress(Exception):
        gateway.shutdown()
    with suppress(OSError):
        process.stdin.close()  # the JVM ends when its standard input closes
    try:
        process.wait(JVM_EXIT_S)
    except subprocess.TimeoutExpired:
        logger.warning("Spark's JVM did not end within %g s; killing it.", JVM_EXIT_S)
        process.kill()
        process.wait()
    if SparkContext._gateway is gateway:
        SparkContext._gateway = None
        SparkContext._jvm = None


def _restore_sigint(handler: Any) -> None:
    """Remove PySpark's signal handler, which would cancel jobs of the stopped context."""
    current = signal.getsignal(signal.SIGINT)
    if (
        handler is not None
        and threading.current_thread() is threading.main_thread()
        and getattr(current, "__module__", None) in PYSPARK_CONTEXT
    ):
        signal.signal(signal.SIGINT, handler)
