"""Start and stop Orca on a cluster, and its process-wide settings.

Messages go to the logger ``bigdl.orca``: what is being done at INFO, what had to be ignored at
WARNING.
"""

from __future__ import annotations

import atexit
import difflib
import logging
import operator
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext

    from bigdl.orca.cluster.spark import LaunchedSpark

__all__ = ["OrcaContext", "init_orca_context", "stop_orca_context"]

logger = logging.getLogger("bigdl.orca")

SUBMIT_MODES = ("spark-submit", "bigdl-submit")
CLUSTER_MODES = (
    "local",
    "yarn",
    "yarn-client",
    "yarn-cluster",
    "k8s",
    "k8s-client",
    "k8s-cluster",
    "standalone",
    *SUBMIT_MODES,
)
RUNTIMES = ("spark", "ray")
LOG_LEVELS = ("ALL", "DEBUG", "ERROR", "FATAL", "INFO", "OFF", "TRACE", "WARN")
THIS_VERSION = (
    'this version of BigDL supports cluster_mode="local" and, for any cluster, a SparkContext that '
    'is already active or cluster_mode="spark-submit"'
)

# Arguments of `**kwargs`: for every mode, for Ray, and for other cluster modes than local.
COMMON_OPTIONS = ("conf", "spark_log_level", "redirect_spark_log", "python_location")
RAY_OPTIONS = (
    "redis_port",
    "redis_password",
    "password",
    "object_store_memory",
    "verbose",
    "env",
    "extra_params",
    "num_ray_nodes",
    "ray_node_cpu_cores",
    "include_webui",
    "system_config",
)
CLUSTER_OPTIONS = (
    "additional_archive",
    "conda_name",
    "container_image",
    "driver_cores",
    "driver_memory",
    "enable_numa_binding",
    "extra_executor_memory_for_ray",
    "extra_python_lib",
    "hadoop_conf",
    "hadoop_user_name",
    "jars",
    "master",
    "penv_archive",
    "spark_yarn_archive",
)

SMALLEST_MEMORY = 512 * 2**20
"""Spark refuses to start with less than 450 MiB of heap, and a JVM uses a bit of it for itself."""


class _State:
    """What ``init_orca_context`` has done in this process."""

    lock = threading.RLock()
    launched: LaunchedSpark | None = None
    request: tuple | None = None  # the arguments that `launched` was started with
    ray_options: Mapping[str, Any] = {}
    pid: int | None = None  # the process that registered `stop_orca_context` for its exit


def init_orca_context(
    cluster_mode: str | None = None,
    runtime: str = "spark",
    cores: int | str | None = None,
    memory: str = "2g",
    num_nodes: int = 1,
    init_ray_on_spark: bool = False,
    init_executor_gateway: bool = True,
    **kwargs: Any,
) -> SparkContext:
    """Start Orca, or take over the SparkContext that is already active.

    A SparkContext that is active in this process is reused whatever the arguments say.  Otherwise
    Spark is started on this machine, or as the ``spark-submit`` command says.
    :func:`stop_orca_context` is called at the exit of the process at the latest.

    Parameters
    ----------
    cluster_mode : str, optional
        ``"local"`` (the default) for this machine, over the loopback interface only;
        ``"spark-submit"`` or its alias ``"bigdl-submit"`` for the cluster and the settings of the
        command that runs the program.  Upper and lower case mean the same.  The other modes of
        BigDL 2.x (``"yarn-client"``, ``"k8s-client"``, ``"standalone"``, …) are not available in
        this version.
    runtime : str, default "spark"
        ``"ray"`` is not available in this version.
    cores : int or str, optional
        Cores to use on a node.  ``"*"`` or None: every core that this process may use, by its CPU
        affinity and the CPU quota of its container.
    memory : str, default "2g"
        Memory of Spark's JVM on a node, in Spark's form: a whole number and one of k, m, g, t.
        The Python workers take theirs beside it.
    num_nodes : int, default 1
        Number of nodes; there is only one in local mode.
    init_ray_on_spark : bool, default False
        True is not available in this version.
    init_executor_gateway : bool, default True
        Accepted for programs of BigDL 2.x, without effect: workers need no gateway to a JVM.
    **kwargs
        ``conf`` : dict of Spark properties, which win over those that Orca sets.
        ``spark_log_level`` : level of Spark's own log, default ``"WARN"``.
        ``redirect_spark_log`` : accepted without effect: Spark's log is never moved to a file.
        ``python_location`` : the Python interpreter of the workers, default: this one.
        The arguments for Ray (``redis_port``, ``redis_password``, ``object_store_memory``,
        ``verbose``, ``env``, ``extra_params``, ``num_ray_nodes``, ``ray_node_cpu_cores``,
        ``include_webui``, ``system_config``) are kept until Ray is started.  Those for other
        cluster modes are ignored with a warning.

    Returns
    -------
    pyspark.SparkContext

    Raises
    ------
    UsageError
        If an argument is wrong or not available, or no suitable Java is found.
    MissingExtraError
        If PySpark is not installed.

    Notes
    -----
    In local mode a failed task is tried again (``local[cores,4]``), Spark's web UI is off unless
    ``conf`` has ``spark.ui.enabled`` or ``spark.ui.port``, and the workers import modules from
    where this program does.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context, stop_orca_context
    >>> sc = init_orca_context(cluster_mode="local", cores=4, memory="4g")
    >>> stop_orca_context()
    """
    mode = _cluster_mode(cluster_mode)
    _check_runtime(runtime, init_ray_on_spark)
    _check_names(kwargs)
    conf = _conf(kwargs.get("conf"))
    log_level = _log_level(kwargs.get("spark_log_level", "WARN"))
    python = _python(kwargs.get("python_location"), conf)
    # Those that differ from their default, to say which ones have no effect.
    given = {"cores": cores is not None, "memory": memory != "2g", "conf": bool(conf)}
    given.update((name, True) for name in CLUSTER_OPTIONS if name in kwargs)
    cores, memory, num_nodes = _cores(cores), _memory(memory), _num_nodes(num_nodes)

    require("pyspark", "orca")
    from bigdl.orca.cluster import spark

    with _State.lock:
        request = (mode, cores, memory, conf, python)
        sc = spark.active_context()
        if sc is not None:
            given["cluster_mode"] = cluster_mode is not None and mode not in SUBMIT_MODES
            if not _is_ours(sc):
                spark.use_this_python(sc)
            if not _is_ours(sc) or request != _State.request:
                _warn_ignored(given, f"the active SparkContext (master {sc.master}) is reused")
            if "spark_log_level" in kwargs:
                spark.set_log_level(sc, log_level)
        else:
            _refuse_what_cannot_start(mode, conf)
            logger.info("Initializing orca context")
            _stop_launched()
            if mode == "local":
                given.update(cores=False, memory=False, conf=False, num_nodes=num_nodes > 1)
                _warn_ignored(given, "this is local mode, with one node")
                sc = _start_local(cores, memory, conf, python)
            else:
                _warn_ignored(given, "the settings are those of the spark-submit command")
                sc = _start_as_submitted()
            _State.request = request
            spark.set_log_level(sc, log_level)
        ray_options = {name: kwargs[name] for name in RAY_OPTIONS if name in kwargs}
        _State.ray_options = {**_State.ray_options, **ray_options}
        if _State.pid != os.getpid():
            atexit.register(stop_orca_context)
            _State.pid = os.getpid()
        return sc


def stop_orca_context() -> None:
    """Stop the active SparkContext, and every process that :func:`init_orca_context` started.

    The JVM that Orca started, its executors and Python workers are gone when this returns.  Of a
    SparkContext that the program or ``spark-submit`` made, only the context is stopped.  Without
    a context this does nothing.

    Notes
    -----
    Objects that live in the JVM (data frames, broadcast variables, functions made by ``udf``)
    cannot be used with a context that is started later.
    """
    with _State.lock:
        if _State.pid not in (None, os.getpid()):
            return  # this process was forked from the one that owns the context
        _stop_launched()
        if "pyspark" in sys.modules:
            from bigdl.orca.cluster import spark

            spark.stop_foreign_context()
        _State.ray_options = {}


def _is_ours(sc: SparkContext) -> bool:
    return _State.launched is not None and _State.launched.sc is sc


def _stop_launched() -> None:
    launched, _State.launched, _State.request = _State.launched, None, None
    if launched is not None:
        launched.stop()


def _start_local(cores: int, memory: str, conf: Mapping[str, str], python: str) -> SparkContext:
    from bigdl.orca.cluster import spark

    properties = spark.local_properties(cores, memory, conf)
    environment = spark.local_environment(python)
    if spark.has_foreign_gateway():
        logger.warning(
            'cluster_mode="local" takes the place of the master of the spark-submit command, whose '
            'memory stays in effect; use cluster_mode="spark-submit" to run as the command says.'
        )
        return spark.attach(properties, environment)
    _State.launched = spark.LaunchedSpark.launch(
        properties, environment, log_output=OrcaContext.log_output
    )
    return _State.launched.sc


def _start_as_submitted() -> SparkContext:
    from bigdl.orca.cluster import spark

    if spark.has_foreign_gateway():
        sc = spark.attach({}, {})
    else:  # a notebook kernel with PYSPARK_SUBMIT_ARGS, or only a spark-defaults.conf
        _State.launched = spark.LaunchedSpark.launch({}, {}, log_output=OrcaContext.log_output)
        sc = _State.launched.sc
    spark.use_this_python(sc)
    return sc


def _refuse_what_cannot_start(mode: str, conf: Mapping[str, str]) -> None:
    if mode != "local" and mode not in SUBMIT_MODES:
        raise UsageError(f'cluster_mode="{mode}" is not available: {THIS_VERSION}')
    master = conf.get("spark.master", "local")
    if mode == "local" and not master.startswith("local"):
        raise UsageError(
            f'cluster_mode="local" cannot use spark.master={master} of conf: {THIS_VERSION}'
        )
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_API_MODE"):
        value = os.environ.get(name)
        if value and (name != "SPARK_API_MODE" or value.lower() == "connect"):
            raise UsageError(
                f"Orca needs a classic Spark session, but {name}={value} asks for Spark Connect:"
                f" unset {name}"
            )


def _warn_ignored(given: Mapping[str, bool], reason: str) -> None:
    names = sorted(name for name, is_given in given.items() if is_given)
    if names:
        logger.warning("%s: no effect, because %s.", ", ".join(names), reason)


def _cluster_mode(value: Any) -> str:
    mode = "local" if value is None else value
    if not isinstance(mode, str) or mode.lower() not in CLUSTER_MODES:
        raise UsageError(
            f"cluster_mode must be one of {', '.join(CLUSTER_MODES)}, but got {value!r}"
        )
    return mode.lower()


def _check_runtime(runtime: Any, init_ray_on_spark: bool) -> None:
    if not isinstance(runtime, str) or runtime.lower() not in RUNTIMES:
        raise UsageError(f"runtime must be one of {', '.join(RUNTIMES)}, but got {runtime!r}")
    if runtime.lower() == "ray":
        raise UsageError(f'runtime="ray" is not available: {THIS_VERSION}')
    if init_ray_on_spark:
        raise UsageError(f"init_ray_on_spark=True is not available: {THIS_VERSION}")


def _check_names(kwargs: Mapping[str, Any]) -> None:
    known = (*COMMON_OPTIONS, *RAY_OPTIONS, *CLUSTER_OPTIONS)
    named = ("cluster_mode", "runtime", "cores", "memory", "num_nodes", "init_ray_on_spark")
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, *named), n=1, cutoff=0.0)
            raise UsageError(
                f"init_orca_context has no argument {name!r}: did you mean {near[0]!r}?"
            )


def _whole_number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _cores(value: Any) -> int:
    from bigdl.common.cpu import core_count

    if value is None or value == "*":
        return core_count()
    text = isinstance(value, str) and value.strip()
    number = int(text) if text and text.isascii() and text.isdigit() else _whole_number(value)
    if number is None or number < 1:
        raise UsageError(f'cores must be a whole number of at least 1 or "*", but got {value!r}')
    return number


def _num_nodes(value: Any) -> int:
    number = _whole_number(value)
    if number is None or number < 1:
        raise UsageError(f"num_nodes must be a whole number of at least 1, but got {value!r}")
    return number


def _memory(value: Any) -> str:
    """Check a size and write it the way that both Spark and ``java -Xmx`` understand."""
    match = isinstance(value, str) and re.fullmatch(r"\s*(\d+)\s*([kmgt])b?\s*", value.lower())
    if not match:
        raise UsageError(
            'memory must be a whole number and a unit of k, m, g or t, such as "2g" or "1536m", '
            f"but got {value!r}"
        )
    number, unit = int(match[1]), match[2]
    if number * 2 ** (10 * ("kmgt".index(unit) + 1)) < SMALLEST_MEMORY:
        raise UsageError(f'memory must be at least "512m" for Spark to start, but got {value!r}')
    return f"{number}{unit}"


def _conf(value: Any) -> dict[str, str]:
    """Spark properties as strings, in the way Spark writes booleans."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(
            'conf must be a dict of Spark properties, such as {"spark.ui.enabled": "true"}, '
            f"but got {value!r}"
        )
    return {
        key: str(item).lower() if isinstance(item, bool) else str(item)
        for key, item in value.items()
    }


def _log_level(value: Any) -> str:
    if not isinstance(value, str) or value.upper() not in LOG_LEVELS:
        raise UsageError(
            f"spark_log_level must be one of {', '.join(LOG_LEVELS)}, but got {value!r}"
        )
    return value.upper()


def _python(location: Any, conf: Mapping[str, str]) -> str:
    if location is None:
        return conf.get("spark.pyspark.python", sys.executable)
    found = shutil.which(os.fspath(location)) if isinstance(location, str | os.PathLike) else None
    if found is None:
        raise UsageError(
            f"python_location must be the path of a Python interpreter, but got {location!r}"
        )
    return os.path.abspath(found)  # a link is kept: it may belong to a virtual environment


_REFUSED = object()


class _Setting:
    """One setting of :class:`OrcaContext`, kept for the whole process."""

    def __init__(self, default: Any, allowed: str, normalize: Callable[[Any], Any]):
        self.value = default
        self.allowed = allowed
        self.normalize = normalize

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.value

    def __set__(self, instance: Any, value: Any) -> None:
        normalized = self.normalize(value)
        if normalized is _REFUSED:
            raise UsageError(f"OrcaContext.{self.name} must be {self.allowed}, but got {value!r}")
        self.value = normalized


def _boolean(value: Any) -> Any:
    return value if isinstance(value, bool) else _REFUSED


def _read_backend(value: Any) -> Any:
    name = value.lower() if isinstance(value, str) else None
    return name if name in ("spark", "pandas") else _REFUSED


def _data_store(value: Any) -> Any:
    name = value.upper() if isinstance(value, str) else ""
    return name if re.fullmatch(r"DRAM|PMEM|DISK_[1-9][0-9]*", name) else _REFUSED


def _positive_or_none(value: Any) -> Any:
    number = None if value is None else _whole_number(value)
    return _REFUSED if value is not None and (number is None or number < 1) else number


class _OrcaContextMeta(type):
    log_output = _Setting(False, "True or False", _boolean)
    pandas_read_backend = _Setting("spark", '"spark" or "pandas"', _read_backend)
    _eager_mode = _Setting(True, "True or False", _boolean)
    serialize_data_creator = _Setting(False, "True or False", _boolean)
    train_data_store = _Setting(
        "DRAM", '"DRAM", "PMEM" or "DISK_n" with a whole number n', _data_store
    )
    _shard_size = _Setting(None, "None or a whole number of at least 1", _positive_or_none)
    barrier_mode = _Setting(True, "True or False", _boolean)


class OrcaContext(metaclass=_OrcaContextMeta):
    """Settings of Orca for this process, as attributes of the class, and what is active in it.

    Attributes
    ----------
    log_output : bool, default False
        Show the output of Spark's JVM in ``sys.stdout`` and ``sys.stderr`` of this process, which
        a notebook displays.  Set it before the context is created.
    pandas_read_backend : {"spark", "pandas"}, default "spark"
        Engine behind ``bigdl.orca.data.pandas.read_*``.
    serialize_data_creator : bool, default False
        Whether the workers of a node call a data creator one after the other, so that they do
        not all download the same data.
    train_data_store : {"DRAM", "PMEM", "DISK_n"}, default "DRAM"
        Where training data are cached; ``DISK_n`` keeps 1/n of them in memory.
    barrier_mode : bool, default True
        Whether Ray is launched on Spark by a barrier job.
    _eager_mode : bool, default True
        Whether XShards are computed and cached when they are made.
    _shard_size : int, optional
        Rows in a shard when a Spark data frame becomes XShards; None is one shard per partition.

    Raises
    ------
    UsageError
        When an attribute is set to a value that it cannot have.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext
    >>> OrcaContext.pandas_read_backend = "pandas"
    """

    @staticmethod
    def get_spark_context() -> SparkContext:
        """The active SparkContext.

        Raises
        ------
        UsageError
            If there is none.
        """
        from bigdl.orca.cluster.spark import SparkCluster

        return SparkCluster.from_active().sc

    @staticmethod
    def get_spark_session() -> SparkSession:
        """The SparkSession on the active SparkContext.

        Raises
        ------
        UsageError
            If there is no active SparkContext.
        """
        from bigdl.orca.cluster.spark import SparkCluster

        return SparkCluster.from_active().spark

    @staticmethod
    def get_sql_context() -> SQLContext:
        """Spark's older SQLContext on the active SparkContext.

        Raises
        ------
        UsageError
            If there is no active SparkContext.
        """
        sc = OrcaContext.get_spark_context()
        from pyspark.sql import SQLContext

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return SQLContext.getOrCreate(sc)

    @staticmethod
    def get_ray_context() -> NoReturn:
        """Not available in this version: it runs on Spark.

        Raises
        ------
        UsageError
            Always.
        """
        raise UsageError(f"OrcaContext.get_ray_context is not available: {THIS_VERSION}")
