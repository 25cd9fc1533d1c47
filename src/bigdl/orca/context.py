"""Functions that start and stop Orca on a cluster.

The logger ``bigdl.orca`` reports actions at INFO and ignored arguments at WARNING.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.checks import check_positive
from bigdl.common.cpu import check_cores
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.orca import arguments
from bigdl.orca.cluster import connect, launch, spark, submit
from bigdl.orca.cluster.connect import ConnectCluster, ConnectedSession, active_spark
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.cluster.ray import OrcaRayContext
from bigdl.orca.cluster.spark_calls import ignore_pandas_warning
from bigdl.orca.cluster.submit import ContextRequest
from bigdl.orca.cluster.versions import require_pyspark
from bigdl.orca.settings import OrcaContext

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["OrcaContext", "init_orca_context", "stop_orca_context"]

logger = logging.getLogger("bigdl.orca")


class _Clusters:
    """Clusters that ``init_orca_context`` has started in this process."""

    lock = threading.RLock()
    launched: launch.LaunchedSpark | None = None
    connected: ConnectedSession | None = None
    request: ContextRequest | None = None  # the arguments that `launched` was started with
    pid: int | None = None  # the process that registered `stop_orca_context` for its exit


@hide_frames
def init_orca_context(
    cluster_mode: str | None = None,
    runtime: str = "spark",
    cores: int | str | None = None,
    memory: str = "2g",
    num_nodes: int = 1,
    init_ray_on_spark: bool = False,
    init_executor_gateway: bool = True,
    **kwargs: Any,
) -> SparkContext | SparkSession | OrcaRayContext:
    """Start Orca, or reuse the active SparkContext or Spark Connect session.

    An active context or session is reused, whatever the arguments are. In a program that
    ``spark-submit`` runs, Spark starts with the settings of that command.
    :func:`stop_orca_context` is called at process exit at the latest.

    Parameters
    ----------
    cluster_mode : str, optional
        Case-insensitive.

        * ``"local"`` (the default): this machine, over the loopback interface only.
        * ``"standalone"``: the standalone cluster at `master`, or one on this machine that is
          started for this program and stopped afterwards.
        * ``"yarn-client"`` (``"yarn"``), ``"k8s-client"`` (``"k8s"``): a YARN or Kubernetes
          cluster, with this process as the driver.
        * ``"yarn-cluster"``, ``"k8s-cluster"``: the same clusters, but the program runs again with
          its driver on the cluster; this call waits for it and exits with its exit code.
        * ``"spark-submit"`` or its alias ``"bigdl-submit"``: the cluster and the settings of the
          command that runs the program.
        * ``"spark-connect"`` (``"connect"``): a session of the Spark Connect server at `master`.
    runtime : str, default "spark"
        ``"ray"``: without Spark, a Ray on this machine (loopback only, its dashboard off), or the
        cluster that `address` names. Omit `cluster_mode`; of the other arguments `cores`,
        ``object_store_memory`` and those of ``ray.init`` are used.
    cores : int or str, optional
        Cores to use on a node.  ``"*"`` is every core that this process may use, by its CPU
        affinity and the CPU quota of its container. Default ``"*"`` in local mode, else 2.
    memory : str, default "2g"
        Memory of Spark's JVM on a node, in Spark's format: an integer and one of k, m, g, t.
        Python workers use additional memory.
    num_nodes : int, default 1
        Number of executors; local mode has one node. For Spark Connect, the number of executors of
        the server, by default as the server reports it.
    init_ray_on_spark : bool, default False
        Whether to start Ray on Spark's nodes now; otherwise it starts when it is first needed.
    init_executor_gateway : bool, default True
        Accepted for programs of BigDL 2.x, without effect: workers need no JVM gateway.
    **kwargs
        ``conf`` : dict of Spark properties, which override those that Orca sets.
        ``spark_log_level`` : level of Spark's log, default ``"WARN"``.
        ``redirect_spark_log`` : accepted without effect: Spark's log is never redirected.
        ``python_location`` : the Python interpreter of the workers, a path on the nodes; default:
        this one, or the shipped environment, or on Kubernetes the ``python3`` of the image.

        For standalone, YARN and Kubernetes: ``driver_cores`` (4), ``driver_memory`` (``"2g"``),
        ``extra_executor_memory_for_ray`` (memory of an executor in addition to its JVM),
        ``extra_python_lib`` (Python files, zip files or eggs for the workers) and ``jars``, each a
        list or a string with commas.

        For YARN: ``hadoop_conf`` (default: ``HADOOP_CONF_DIR``), ``hadoop_user_name`` (default:
        ``HADOOP_USER_NAME``, else ``"root"``), ``penv_archive`` (a packed Python environment;
        default: this one is packed once by conda-pack or venv-pack), ``conda_name`` (another
        conda environment to pack), ``additional_archive``, ``spark_yarn_archive``.

        For Kubernetes: ``master`` (``"k8s://https://host:port"``) and ``container_image``, which
        are required, and ``penv_archive`` (default: the image has the Python environment).

        For standalone: ``master`` (``"spark://host:port"``), ``enable_numa_binding`` (a cluster
        on this machine gets one Spark worker per NUMA node).

        For Spark Connect: ``master`` (``"sc://host:15002"``, with options such as ``/;token=…``;
        default: ``SPARK_REMOTE``). ``conf`` are settings of the session.

        The arguments for Ray (``redis_port``, ``redis_password``, ``object_store_memory``,
        ``verbose``, ``env``, ``extra_params``, ``num_ray_nodes``, ``ray_node_cpu_cores``,
        ``include_webui``, ``system_config``) are kept until Ray is started.  An argument that the
        cluster mode does not use is ignored with a warning.

    Returns
    -------
    pyspark.SparkContext, or OrcaRayContext with ``runtime="ray"``, or the SparkSession of Spark
    Connect

    Raises
    ------
    UsageError
        If an argument is wrong, no suitable Java is found, or the cluster cannot
        be reached.
    MissingExtraError
        If PySpark or Ray is not installed, or the program that packs the Python environment.

    Notes
    -----
    In local mode failed tasks are retried (``local[cores,4]``), Spark's web UI is off unless
    ``conf`` has ``spark.ui.enabled`` or ``spark.ui.port``, and the workers import modules from the
    same paths as this program.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2, memory="2g")
    >>> sc.parallelize([1, 2, 3]).map(lambda number: number * 10).collect()
    [10, 20, 30]
    """
    if arguments.check_runtime(runtime, cluster_mode, init_ray_on_spark) == "ray":
        return _init_ray(cores, memory, num_nodes, kwargs)
    ignore_pandas_warning()
    mode = arguments.check_cluster_mode(cluster_mode)
    if mode in arguments.CONNECT_MODES or connect_session() is not None:
        return _connect(cluster_mode, cores, memory, num_nodes, init_ray_on_spark, kwargs)
    is_local = mode == "local" or mode in arguments.SUBMIT_MODES
    arguments.check_names(kwargs)
    conf = arguments.check_conf(kwargs.get("conf"))
    log_level = arguments.check_log_level(kwargs.get("spark_log_level", "WARN"))
    if is_local:
        options = {"python_location": arguments.check_python(kwargs.get("python_location"), conf)}
    else:
        options = arguments.check_cluster_options(mode, kwargs)
    # arguments that differ from their default, for the warning about ignored ones
    passed = kwargs.keys() & arguments.CLUSTER_OPTIONS
    values = {"cores": cores is not None, "memory": memory != "2g", "conf": conf}
    passed |= {name for name, is_passed in values.items() if is_passed}
    if not is_local and cores is None:
        cores = arguments.CORES_OF_A_NODE
    request = ContextRequest(
        mode,
        check_cores(cores),
        arguments.check_memory(memory),
        check_positive("num_nodes", num_nodes),
        conf,
        options,
    )

    require_pyspark()

    with _Clusters.lock:
        sc = spark.active_context()
        if sc is None and mode == "local":
            arguments.warn_of_memory(request.memory)
        if sc is not None:
            if cluster_mode is not None and mode not in arguments.SUBMIT_MODES:
                passed.add("cluster_mode")
            if not _is_ours(sc):
                launch.use_this_python(sc)
            if not _is_ours(sc) or request != _Clusters.request:
                arguments.warn_ignored(
                    passed, f"the active SparkContext (master {sc.master}) is reused"
                )
            if "spark_log_level" in kwargs:
                launch.set_log_level(sc, log_level)
        else:
            arguments.refuse_what_cannot_start(mode, conf)
            logger.info("Initializing orca context")
            from bigdl.training.progress import say_phase

            say_phase(f'starting Spark, cluster_mode="{mode}"')
            ray = OrcaRayContext._of_program
            if ray is not None and ray.runtime == "spark":
                OrcaRayContext.stop_of_program()  # its Spark has stopped
            _stop_launched()
            if mode == "local":
                ignored = passed.difference(arguments.MEANT_FOR_ALL)
                if request.num_nodes > 1:
                    ignored.add("num_nodes")
                arguments.warn_ignored(ignored, "this is local mode, with one node")
                sc = _start_local(request)
            elif not is_local and not _is_submitted(mode):
                if "cores" not in passed:
                    message = "cores is not set: this program uses %d cores of each node."
                    logger.warning(message, request.cores)
                ignored = passed.difference(arguments.MEANT_FOR_ALL, options)
                arguments.warn_ignored(ignored, f'cluster_mode="{mode}" does not use it')
                sc = _start_on_cluster(request)
            else:
                arguments.warn_ignored(passed, "the settings are those of the spark-submit command")
                sc = _start_as_submitted()
            _Clusters.request = request
            launch.set_log_level(sc, log_level)
        ray_options = {name: kwargs[name] for name in arguments.RAY_OPTIONS if name in kwargs}
        OrcaRayContext._program_options.update(ray_options)
        _stop_at_exit()
        if init_ray_on_spark:
            OrcaRayContext.of_program()
        return sc


def _connect(cluster_mode, cores, memory, num_nodes, init_ray_on_spark, kwargs) -> SparkSession:
    """Reuse the active Spark Connect session, or connect to a server."""
    arguments.check_names(kwargs)
    conf = arguments.check_conf(kwargs.get("conf"))
    options = arguments.check_cluster_options("connect", kwargs)
    if init_ray_on_spark:
        raise UsageError(connect.NO_RAY, code="unsupported")
    # num_nodes=1 counts as unset, unless cores is set
    nodes = check_positive("num_nodes", num_nodes)
    of_node = None if cores is None else check_cores(cores)
    require_pyspark()
    with _Clusters.lock:
        if spark.active_context() is not None:
            raise UsageError(
                "A SparkContext is active in this process, which excludes a Spark Connect "
                "session; call stop_orca_context first",
                code="state",
            )
        if memory != "2g":
            arguments.warn_ignored({"memory"}, "it is that of the Spark Connect server")
        size = None if nodes == 1 and cores is None else nodes, of_node
        connected = ConnectedSession.connect(options.get("master"), conf, _Clusters.connected)
        if connected is None:
            ignored = {name for name in ("master", "conf") if kwargs.get(name)}
            if cluster_mode is not None and cluster_mode.lower() not in arguments.CONNECT_MODES:
                ignored.add("cluster_mode")
            arguments.warn_ignored(ignored, "the active session of Spark Connect is reused")
        else:
            _Clusters.connected = connected
            _stop_at_exit()
        cluster = active_spark()
        if cores is not None or nodes != 1 or connected is not None:
            cast("ConnectCluster", cluster).describe(*size)
        return cluster.spark


def _init_ray(cores, memory, num_nodes, options) -> OrcaRayContext:
    require("ray", "ray")
    values = {"memory": memory != "2g", "num_nodes": num_nodes != 1}
    ignored = {name for name, is_passed in values.items() if is_passed}
    arguments.warn_ignored(ignored, "Ray determines its memory and nodes")
    if options.get("address") in (None, "local"):
        cores = check_cores(cores)
    elif cores is not None:
        arguments.warn_ignored({"cores"}, "the Ray cluster at address determines its cores")
    with _Clusters.lock:
        active = OrcaRayContext._of_program
        if active is not None and active.initialized:
            logger.warning("The active Ray is reused: %r.", active)
            return active
        logger.info("Initializing orca context")
        from bigdl.training.progress import say_phase

        say_phase("starting Ray" if options.get("address") is None else "connecting to Ray")
        context = OrcaRayContext("ray", cores, num_nodes, **options)
        context.init()
        OrcaRayContext.set_of_program(context)
        _stop_at_exit()
        return context


def _stop_at_exit() -> None:
    if _Clusters.pid != os.getpid():
        atexit.register(stop_orca_context)
        _Clusters.pid = os.getpid()


@hide_frames
def stop_orca_context() -> None:
    """Stop Ray and the active SparkContext, and every process that was started for them.

    A Spark Connect session is released if Orca created it; a session of the program stays open.
    The JVM that Orca started, its executors and Python workers have ended when this returns.  If
    the program or ``spark-submit`` created the SparkContext, only the context is stopped.  Without
    a context this does nothing.

    Notes
    -----
    Objects in the JVM (data frames, broadcast variables, functions created by ``udf``) cannot be
    used with a later context.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> stop_orca_context()
    >>> try:
    ...     OrcaContext.get_spark_context()
    ... except ValueError as error:
    ...     print(error)
    No active SparkContext. Please create a SparkContext first: call init_orca_context
    """
    with _Clusters.lock:
        if _Clusters.pid not in (None, os.getpid()):
            return  # this process was forked from the one that owns the context
        OrcaRayContext.stop_of_program()
        _stop_launched()
        if connect_session() is None:  # its server may run in this process
            launch.stop_foreign_context()
        OrcaRayContext._program_options.clear()


def init_spark_with(
    properties: Mapping[str, str], spark_log_level: str = "WARN", redirect_spark_log: bool = True
) -> SparkContext:
    """Start Spark with the user's properties, which include the master.

    They override the settings of a ``spark-submit`` command.  An active SparkContext is reused.

    Parameters
    ----------
    properties : mapping of str to str
    spark_log_level, redirect_spark_log
        See :func:`init_orca_context`.
    """
    require_pyspark()

    if connect_session() is not None:
        raise UsageError(spark.NEEDS_CONTEXT, code="unsupported")
    with _Clusters.lock:
        if spark.active_context() is None:
            arguments.refuse_spark_connect()
            _stop_launched()
            sc = _start_as_submitted(arguments.check_conf(properties))
            launch.set_log_level(sc, arguments.check_log_level(spark_log_level))
        context = init_orca_context("spark-submit", redirect_spark_log=redirect_spark_log)
        return cast("SparkContext", context)


def stop_launched_cluster() -> None:
    """Stop Spark and the standalone cluster that this process started, if any."""
    with _Clusters.lock:
        if _Clusters.launched is not None and _Clusters.launched.cluster is not None:
            stop_orca_context()


def _is_ours(sc: SparkContext) -> bool:
    return _Clusters.launched is not None and _Clusters.launched.sc is sc


def _is_submitted(mode: str) -> bool:
    """Return True if ``spark-submit`` started this process as the driver."""
    return launch.has_foreign_gateway() or submit.is_inside(mode, os.environ)


def _stop_launched() -> None:
    launched, _Clusters.launched, _Clusters.request = (
        _Clusters.launched,
        None,
        None,
    )
    if launched is not None:
        launched.stop()
    connected, _Clusters.connected = _Clusters.connected, None
    if connected is not None:
        connected.stop()


def _start_local(request: ContextRequest) -> SparkContext:
    if launch.has_foreign_gateway():
        logger.warning(
            'cluster_mode="local" replaces the master of the spark-submit command, while its '
            'memory stays in effect; use cluster_mode="spark-submit" for its settings.'
        )
    properties = launch.local_properties(request.cores, request.memory, request.conf)
    return _start(properties, launch.local_environment(request.get("python_location")))


def _start_as_submitted(properties: Mapping[str, str] | None = None) -> SparkContext:
    sc = _start(properties or {}, {})
    launch.use_this_python(sc)
    return sc


def _start(properties: Mapping[str, str], environment: Mapping[str, str]) -> SparkContext:
    """Start Spark in the JVM of ``spark-submit`` if there is one, else in a new JVM.

    A notebook kernel with ``PYSPARK_SUBMIT_ARGS``, for example, has none.
    """
    if launch.has_foreign_gateway():
        return launch.attach(properties, environment)
    _Clusters.launched = launch.LaunchedSpark.launch(
        properties, environment, log_output=OrcaContext.log_output
    )
    return _Clusters.launched.sc


def _start_on_cluster(request: ContextRequest) -> SparkContext:
    if request.is_cluster_mode:
        code = submit.submit_program(request)
        logger.info("The program has run on the cluster and ended with exit code %d", code)
        sys.exit(code)  # the cluster has run the rest of the program
    _Clusters.launched = submit.connect(request, log_output=OrcaContext.log_output)
    return _Clusters.launched.sc


spark.SparkCluster.start_local = staticmethod(init_orca_context)
