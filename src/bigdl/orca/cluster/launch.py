"""Start and stop Spark.

:class:`LaunchedSpark` is a Spark whose JVM this process started: it is made by
``init_orca_context`` and its :meth:`~LaunchedSpark.stop` leaves no process behind.  What PySpark
does not offer publicly for that (the gateway to the JVM, the class-level singletons) is used in
this module only.
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
from bigdl.orca.cluster.class_archive import archive_options, suggest_archive
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.java import find_java
from bigdl.orca.cluster.jvm import JvmWatch, quiet_accumulators
from bigdl.orca.cluster.standalone import LOGGING, LOOPBACK, QUICK_JVM, spark_home
from bigdl.orca.cluster.versions import another_python
from bigdl.runtime.engine import user_import_path
from bigdl.runtime.jobs import PYSPARK_CONTEXT
from bigdl.runtime.launch import OutputForwarder

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkContext

    from bigdl.orca.cluster.standalone import StandaloneCluster

logger = logging.getLogger("bigdl.orca")


EVERYWHERE = {
    "spark.app.name": "orca",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # milliseconds; with Spark's minute, an executor that was alone for a moment goes on keeping
    # its blocks without a copy long after another one has come
    "spark.storage.cachedPeersTtl": "2000",
}
"""Spark properties of every cluster mode."""

TASK_ATTEMPTS = 4
"""Times a task is tried in local mode; Spark's own ``local[n]`` gives up at the first failure."""

START_ATTEMPTS = 3
"""Times a SparkContext is made where Spark's own threads get in each other's way."""

DAEMON = "bigdl.orca.cluster.python_daemon"
"""The module that forks Spark's Python workers on this machine."""

LONGEST_SOCKET = 103
"""Bytes that the path of a Unix socket may have for Spark, on every system."""

_START_LINES = ("WARNING: Using incubator modules: jdk.incubator.vector",)
"""Lines of Java about options that Spark itself gives."""

_EXECUTOR_OPTIONS = "spark.executor.extraJavaOptions"
_SOCKETS = "spark.python.unix.domain.socket"
_OF_TABLES = ("pandas", "pyarrow", "pyspark.sql", "pyspark.testing.utils")
"""Modules that PySpark 4.3 imports for its first list that goes to the JVM."""

_SHORT_TRACEBACK = "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"
_TEMPORARY = "java.io.tmpdir"
_LOCAL_DIRECTORY = "spark.local.dir"
SECRET = "spark.authenticate.secret"
_SECRETS = re.compile("secret|password|token|access[.]?key|account[.]?key|sas[.]", re.IGNORECASE)
_FETCHED = ("spark.jars", "spark.files", "spark.archives", "spark.submit.pyFiles")
_CLOUD = re.compile("(s3a?|s3n|abfss?|wasbs?|gs|oss|cosn?)://")


_OF_PYSPARK = ("SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE")
"""Variables of the environment that PySpark sets for its context."""


class LaunchedSpark:
    """A SparkContext and the JVM that this process started for it.

    Use :meth:`launch`, and :meth:`stop` at the end.

    Attributes
    ----------
    sc : pyspark.SparkContext
    cluster : StandaloneCluster or None
        The cluster that was started for it, which is stopped with it.
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
            Spark properties, also those that are options of the JVM such as
            ``spark.driver.memory``.
        environment : mapping of str to str
            Environment variables for the JVM and what it starts.  ``os.environ`` of this process
            is the same before and after.
        log_output : bool
            Copy what the JVM writes to ``sys.stdout`` and ``sys.stderr`` of this process, which
            a notebook shows, and not to the file descriptors it inherited.
        resources : contextlib.ExitStack, optional
            What is closed at the end, or if it does not start.
        prepare : callable, optional
            Called with the JVM before Spark starts in it; returns Spark properties that it changes.
        explain : callable, optional
            Called with the JVM when Spark does not start; returns more about the reason, or "".

        Raises
        ------
        UsageError
            If there is no suitable Java, the JVM ends at once or Spark refuses a property.
        """
        from pyspark import SparkConf, SparkFiles

        shut_down_idle_gateway()
        conf = SparkConf().setAll(list(properties.items()))
        # Other users of this machine can read the command line of the JVM.
        shown = SparkConf().setAll(list(without_secrets(properties).items()))
        with resources or contextlib.ExitStack() as cleanup:
            # It outlives this process for as long as the JVM does.
            folder = LockedFolder("spark", remover=False)
            cleanup.callback(folder.close)
            java = find_java()
            cleanup.callback(java.close)
            cleanup.callback(_restore_sigint, signal.getsignal(signal.SIGINT))
            cleanup.callback(set_variables, {name: os.environ.get(name) for name in _OF_PYSPARK})
            archive = archive_options(java.home)
            if archive and properties.get("spark.driver.host") == LOOPBACK:
                options = properties.get(_EXECUTOR_OPTIONS, "")
                conf.set(_EXECUTOR_OPTIONS, f"{archive} {options}".strip())
            variables = _java_environment(java.home, archive, folder.path)
            with EnvContext({**environment, **variables}):
                with _importing(_OF_TABLES):
                    gateway = _launch_gateway(shown, cleanup, log_output)
                cleanup.callback(_shut_down, gateway)
                JvmWatch.of(gateway)
                if prepare is not None:
                    conf.setAll(list(prepare(gateway.jvm).items()))
                try:
                    sc = _new_context(conf, gateway)
                except UsageError as error:
                    more = explain(gateway.jvm)
                    raise (error.with_message(f"{error}; {more}") if more else error) from None
            cleanup.callback(_stop_context_of, gateway)
            quiet_accumulators(sc)
            cleanup.callback(_forget_path, SparkFiles.getRootDirectory())
            ship_modules(sc)
            if not archive and properties.get("spark.driver.host") == LOOPBACK:
                suggest_archive(java.home)
            return cls(sc, cleanup.pop_all())

    def end(self, reason: str) -> None:
        """Let whatever waits for this Spark fail at once, with the reason as its error."""
        JvmWatch.of(self.sc._gateway).end(reason)

    def stop(self) -> None:
        """Stop the context, the JVM and the cluster; no process is left when this returns."""
        self._cleanup.close()


def without_secrets(properties: Mapping[str, str]) -> dict[str, str]:
    """Leave out what the command line of a JVM need not show: Spark has it all from its SparkConf.

    The command line must show them where Spark fetches files with them before there is a SparkConf.
    """
    needs_all = any(_CLOUD.search(properties.get(name, "")) for name in _FETCHED)
    return {
        name: value
        for name, value in properties.items()
        if name != SECRET and (needs_all or not _SECRETS.search(name))
    }


@contextlib.contextmanager
def _importing(names: Sequence[str]) -> Iterator[None]:
    """Import modules in another thread for the time of a block, which waits for something else."""

    def run() -> None:
        for name in names:
            with suppress(Exception):  # whoever needs it says so
                importlib.import_module(name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()  # two threads that import the same packages can get in each other's way


@contextlib.contextmanager
def hadoop_jvm(environment: Mapping[str, str]) -> Iterator[Any]:
    """A JVM with Spark's and Hadoop's classes and no SparkContext, which ends afterwards.

    Parameters
    ----------
    environment : mapping of str to str
        Its environment variables, ``HADOOP_CONF_DIR`` above all.
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
    """Stop the active context of a JVM: the user may have started another one in it."""
    from pyspark import SparkContext

    active = SparkContext._active_spark_context
    if active is not None and active._gateway is gateway:
        _stop_context(active)


def _forget_path(entry: str) -> None:
    with suppress(ValueError):
        sys.path.remove(entry)  # PySpark added it


def use_this_python(sc: SparkContext) -> None:
    """On this machine, let the workers of `sc` use this interpreter unless another was asked for.

    PySpark's own default is the ``python3`` on ``PATH``, in a virtual environment often another.

    Raises
    ------
    UsageError
        If another was asked for whose version differs: its tasks would fail.
    """
    asked = "PYSPARK_PYTHON" in os.environ or sc.getConf().get("spark.pyspark.python")
    if not cast("str", sc.master).startswith("local"):
        return
    if not asked:
        sc.pythonExec = sys.executable
    elif os.path.realpath(sc.pythonExec) != os.path.realpath(sys.executable):
        version = _python_version(sc.pythonExec)
        if version not in (None, "{}.{}".format(*sys.version_info)):
            raise UsageError(
                another_python(cast("str", version)),
                code="version-unsupported",
                package="python",
                version=version,
            )


@functools.lru_cache
def _python_version(executable: str) -> str | None:
    """The version of an interpreter; None if it does not say it."""
    program = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        said = subprocess.run(
            [executable, "-c", program], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()


def set_log_level(sc: SparkContext, level: str) -> None:
    """Set the level of Spark's log.

    Spark does nothing if the root logger has that level already, as it has INFO at the start,
    and leaves the filter of its shell in place, which hides all below WARN; so the level is
    changed in any case.
    """
    sc.setLogLevel("WARN" if level != "WARN" else "ERROR")
    sc.setLogLevel(level)
    if level not in ("ALL", "TRACE", "DEBUG", "INFO"):
        quiet_query_errors()


def quiet_query_errors() -> None:
    """Leave errors of queries to the exceptions that tell them.

    PySpark 4 prints each one before it raises it, as a line of JSON with the JVM's stack. A level
    that the program has set stays.
    """
    with contextlib.suppress(ImportError):  # Spark 3.5
        from pyspark.logger import PySparkLogger

        for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
            logger = PySparkLogger.getLogger(name)
            if logger.level == logging.WARNING:  # as PySpark makes it
                logger.setLevel(logging.CRITICAL)


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
    conf = SparkConf().setAll(list(properties.items()))
    is_asked = conf.contains(_LOCAL_DIRECTORY) or "SPARK_LOCAL_DIRS" in os.environ
    if properties.get("spark.master", "").startswith("local") and not is_asked:
        conf.set(_LOCAL_DIRECTORY, process_folder())  # everybody can read Spark's blocks
    with EnvContext(environment):
        return _new_context(conf)


def has_foreign_gateway() -> bool:
    """Return True if there is a JVM that this process did not start, as under ``spark-submit``."""
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
    return {
        "spark.master": f"local[{cores},{TASK_ATTEMPTS}]",
        "spark.driver.memory": memory,
        **loopback_properties(conf),
        **EVERYWHERE,
        **waiting_properties(conf),
        **_authentication(conf),
        # Spark's default of 200 is for clusters; a few more than cores keep them all busy.
        "spark.sql.shuffle.partitions": str(max(8, 2 * cores)),
        **conf,
    }


def waiting_properties(conf: Mapping[str, str]) -> dict[str, str]:
    """Spark properties that let OpenMP's threads of Python workers sleep while they wait.

    Parameters
    ----------
    conf : mapping of str to str
        The user's own properties.
    """
    prefix = "spark.executorEnv."
    given = {name.removeprefix(prefix): value for name, value in conf.items()}
    variables = passive_waiting({**os.environ, **given})
    return {f"{prefix}{name}": value for name, value in variables.items()}


def _authentication(conf: Mapping[str, str]) -> dict[str, str]:
    """Close the ports of Spark to other users of this machine; in local mode it makes the secret.

    `conf` may name another master, which needs the secret of its own cluster.
    """
    is_local = re.fullmatch(r"local(\[.*\])?", conf.get("spark.master", "local"))
    return {"spark.authenticate": "true"} if is_local else {}


def loopback_properties(conf: Mapping[str, str]) -> dict[str, str]:
    """Spark properties of a driver whose executors are on the same machine.

    Parameters
    ----------
    conf : mapping of str to str
        The user's own properties.
    """
    return {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "true" if "spark.ui.port" in conf else "false",
        # A worker is another process of this machine: it can import what the driver can.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(user_import_path()),
        **_daemon_properties(conf),
        **_socket_properties(conf.get(f"{_SOCKETS}.dir")),
    }


def _java_environment(home: Path, archive: str, directory: str = "") -> dict[str, str]:
    """Variables that start Spark's JVM, and before it the one that makes its command line.

    The JVM puts temporary files into `directory`; among them are Spark's blocks, which everybody on
    the machine can read, unless ``spark.local.dir`` or ``SPARK_LOCAL_DIRS`` names another place.
    """
    given = os.environ.get("SPARK_SUBMIT_OPTS", "")
    settings = [_temporary_option(directory), archive, _logging_option(given), given]
    options = " ".join(filter(None, settings))
    return {
        "JAVA_HOME": str(home),
        "SPARK_LAUNCHER_OPTS": os.environ.get("SPARK_LAUNCHER_OPTS", QUICK_JVM),
        **({"SPARK_SUBMIT_OPTS": options} if options else {}),
    }


def _temporary_option(directory: str) -> str:
    """The option of a JVM for its temporary files, or "" if the user has said where they go."""
    names = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
    is_set = any(_TEMPORARY in os.environ.get(name, "") for name in names)
    if not directory or is_set:
        return ""
    return _temporary_in(directory)


def _temporary_in(directory: str) -> str:
    quoted = directory.replace("\\", "\\\\").replace('"', '\\"')
    return f'"-D{_TEMPORARY}={quoted}"'


def executor_temporary(conf: Mapping[str, str], directory: str) -> dict[str, str]:
    """Return the property that has executors put temporary files into a directory.

    Empty if the user has said where they go, or gives executors options in a file of Spark.
    """
    given = conf.get(_EXECUTOR_OPTIONS, "")
    if _TEMPORARY in given or (not given and _EXECUTOR_OPTIONS in default_properties()):
        return {}
    return {_EXECUTOR_OPTIONS: f"{_temporary_in(directory)} {given}".strip()}


def _logging_option(options: str) -> str:
    """The option of a JVM for the log of Spark as of Orca, or "" if the user configures it."""
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
    """Properties that make Spark fork workers from ``bigdl.orca.cluster.python_daemon``.

    The daemon imports for all of them what tasks of ours need, torch if this process uses it.
    """
    modules = ["numpy", "pandas", "pyarrow", "pyspark.worker"]
    modules += ["torch"] * ("torch" in sys.modules)
    if "bigdl.orca.learn.pytorch" in sys.modules:
        # the first optimizer of a process imports the compiler of torch
        modules += ["bigdl.orca.learn.pytorch.loop", "torch._dynamo"]
    # Tasks of tables have it by default, and with other variables those of RDDs would get a daemon
    # of their own.
    short = {} if conf.get(_SHORT_TRACEBACK) == "false" else {"SPARK_SIMPLIFIED_TRACEBACK": "1"}
    variables = {"BIGDL_PRELOAD": ",".join(modules), **short}
    return {
        "spark.python.daemon.module": DAEMON,
        **{f"spark.executorEnv.{name}": value for name, value in variables.items()},
    }


def _socket_properties(asked: str | None) -> dict[str, str]:
    """Properties for Unix sockets between a JVM and its Python workers, where they are `asked` for.

    They are faster than TCP, but the path of one may not be long: on other machines, where an
    executor's directory may be that of a container, Spark keeps its default, TCP.
    """
    name = f"/.{uuid.uuid4()}.sock"  # as Spark calls them
    longest = LONGEST_SOCKET - len(name)
    directory = asked or process_folder(longest)
    if len(os.fsencode(directory)) > longest or not os.access(directory, os.W_OK | os.X_OK):
        return {}
    return {f"{_SOCKETS}.enabled": "true", f"{_SOCKETS}.dir": directory}


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
        "SPARK_LOCAL_IP": LOOPBACK,
    }


def _launch_gateway(conf: Any, cleanup: contextlib.ExitStack, log_output: bool = False) -> Any:
    """Start a JVM, and the threads that pass on its output, which end with it."""
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
            "the Java process of Spark ended at once, and standard error shows why; "
            f"memory was {conf.get('spark.driver.memory')!r}",
            code="program-failed",
        ) from error
    finally:
        for pipe in pipes.values():
            os.close(pipe)  # the JVM has it now


def spark_versions_in(home: str | Path) -> list[str]:
    """Return the versions of the Spark in a folder, such as ``["4.1.0"]``; none if it has none."""
    return [jar.stem.split("-", 2)[-1] for jar in Path(home, "jars").glob("spark-core_*.jar")]


def _check_spark_home() -> None:
    """Refuse a SPARK_HOME, such as that of a platform, with another Spark than the PySpark here."""
    import pyspark

    home, wanted = spark_home(), pyspark.__version__
    versions = spark_versions_in(home)
    if versions and not any(each.startswith(f"{wanted.rpartition('.')[0]}.") for each in versions):
        raise UsageError(
            f"SPARK_HOME={home} holds Spark {versions[0]}, but the installed PySpark is {wanted}: "
            "unset SPARK_HOME, or let it name the same Spark",
            code="version-unsupported",
            package="spark",
            path=str(home),
            version=versions[0],
        )


def _new_context(conf: Any, gateway: JavaGateway = None) -> SparkContext:
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext

    for _ in range(START_ATTEMPTS):
        try:
            return SparkContext(conf=conf, gateway=gateway)
        except Py4JJavaError as error:
            # The text of the Java exception lies in the JVM, which is about to be shut down.
            causes = [error.java_exception]
            while (cause := causes[-1].getCause()) is not None:
                causes.append(cause)
            reason = ", caused by ".join(dict.fromkeys(str(each.toString()) for each in causes))
        if "ConcurrentModificationException" not in reason:
            break
        # YARN's proxy adds its filter to the pages of Spark's UI while Spark starts them.
        logger.warning("Two threads of Spark's UI met at its start; Spark is started again.")
    if "waiting for backend" in reason:  # so Spark says that no executor stayed
        reason += "; the cluster has given up the executors, whose own logs say why they ended"
    raise UsageError(f"Spark refused to start: {reason}", code="cluster-refused")


def _stop_context(sc: SparkContext) -> None:
    """Stop `sc` and forget every session on it, also when its JVM is gone."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext

    with _stopped_within(sc, JVM_STOP_S):
        try:
            sc.stop()
        except Exception as error:
            logger.debug("SparkContext.stop failed: %s", error)
            with suppress(Exception):
                sc.stop()  # what of it is in this process
    SparkContext._active_spark_context = None
    if getattr(SparkSession._instantiatedSession, "_sc", None) is sc:
        SparkSession._instantiatedSession = None
        SparkSession._activeSession = None
    if getattr(SQLContext._instantiatedContext, "_sc", None) is sc:
        SQLContext._instantiatedContext = None


@contextlib.contextmanager
def _stopped_within(sc: SparkContext, seconds: float) -> Iterator[None]:
    """Kill the JVM that this process started if it has not stopped its context in time."""
    process = vars(sc._gateway).get("proc") if getattr(sc, "_gateway", None) else None
    if process is None:
        yield
        return

    def kill() -> None:
        logger.warning("Spark did not stop within %g s, and its JVM is killed.", seconds)
        process.kill()

    timer = threading.Timer(0.0 if JvmWatch.of(sc._gateway).is_paused() else seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut_down(gateway: JavaGateway) -> None:
    """Close `gateway` and end its JVM if this process started it."""
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
        process.stdin.close()  # the JVM ends at the end of its standard input
    try:
        process.wait(JVM_EXIT_S)
    except subprocess.TimeoutExpired:
        logger.warning("The JVM of Spark did not end within %g s and is killed.", JVM_EXIT_S)
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
        and getattr(current, "__module__", None) in PYSPARK_CONTEXT
    ):
        signal.signal(signal.SIGINT, handler)
