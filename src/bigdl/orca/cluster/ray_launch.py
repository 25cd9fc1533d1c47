"""Start of Ray on this machine or on Spark's executors, and connection to a running Ray.

A Ray that is started here listens on one address only (loopback unless other machines join), has no
dashboard and sends no usage statistics; connections need its token.  It ends with this process: a
supervisor process (:mod:`bigdl.orca.cluster.supervisor`) stops it even if this process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from bigdl.common.checks import check_supported
from bigdl.common.environment import EnvContext, set_variables
from bigdl.common.errors import UsageError, require
from bigdl.common.platform.memory import shared_memory_space
from bigdl.common.platform.network import host_name
from bigdl.common.platform.processes import has_parent_death_signal
from bigdl.common.private_folders import LockedFolder
from bigdl.common.program_state import preserve_program_state
from bigdl.common.telemetry import is_allowed, opt_out_variables
from bigdl.common.timeouts import RAY_ANSWER_S, RAY_LOOK_S, RAY_SHUTDOWN_S, RAY_START_S
from bigdl.orca.cluster import connect, supervisor
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.runtime.channel import outgoing_address
from bigdl.runtime.engine import user_import_path

logger = logging.getLogger("bigdl.orca")


LOOPBACK = "127.0.0.1"
_LEAST_STORE = 100 << 20
USAGE_STATS = "RAY_USAGE_STATS_ENABLED"
ENVIRONMENT = {
    # waiting workers of an engine reserve no CPUs but can use their node's accelerators
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_WAIT = "RAY_gcs_server_port_wait_time_s"  # start timeout, which a busy machine may exceed
_SEVERAL_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0" keeps Ray on the loopback interface
_MAIN = ("gcs_server", "raylet")
TOKEN = "RAY_AUTH_TOKEN"
_token = secrets.token_hex(32)  # one per process, because Ray reads it once


def start_ray(
    cleanup: contextlib.ExitStack,
    cores: int,
    *,
    host: str | None = LOOPBACK,
    object_store_memory: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Start a one-node Ray on this machine, and return its address information.

    Parameters
    ----------
    cleanup : contextlib.ExitStack
        Closing it stops all processes of this Ray and removes its files.
    cores : int
        Number of CPUs of the node.
    host : str, optional
        Address at which other machines join; None lets Ray choose one.
    object_store_memory : int, optional
        Bytes, by default Ray's default, limited by the shared memory.
    options : dict, optional
        Further arguments of ``ray.init``.
    """
    require("ray", "ray")
    if "logging_level" not in (options or {}):
        cleanup.enter_context(_shorten_raylet_messages())
    # ignore a value inherited from another program with a Ray
    loopback = {_SEVERAL_NODES: "0" if host == LOOPBACK else None}
    debugger = {"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT")}  # Ray overwrites it
    wait = {_WAIT: os.environ.get(_WAIT, "120")}
    before = set_environment(
        {**ENVIRONMENT, **_usage_stats(), **wait, **loopback, **_authentication()}
    )
    cleanup.callback(set_environment, {**before, **debugger})
    folder = LockedFolder("ray", longest=supervisor.LONGEST_RAY, remover=False)
    cleanup.callback(folder.close)
    directory = folder.path
    # it outlives this process until its Ray has ended
    node_settings = {"parent": os.getpid(), "directory": directory}
    process = supervisor.start("ray-head", node_settings, lock=folder.descriptor)
    cleanup.callback(supervisor.end, process)
    cleanup.callback(_kill_remaining_processes, directory)
    options = {
        "include_dashboard": False,
        **(options or {}),
        "num_cpus": cores,
        "object_store_memory": object_store_memory or _store_size(),
        **({"_node_ip_address": host} if host else {}),
        # Ray's directory is world-writable, but the parent is accessible only to this user
        "_temp_dir": f"{directory}/0",
    }
    with EnvContext({supervisor.MARK: directory, "PYTHONPATH": _import_path()}):
        info = connect_ray(cleanup, **options)
    RayWatch.start(cleanup, directory)
    return info


class RayLost(UsageError):
    """Error raised when a main process of the Ray that this program started is gone."""

    code = "context-stopped"


class RayWatch:
    """Thread that stops this program's Ray when one of its main processes is gone.

    Otherwise, Ray ends the program a minute later.

    Parameters
    ----------
    directory : str
        Directory that marks this Ray's processes.
    processes : dict of str to subprocess.Popen
        Main processes by name.
    """

    _of_program: RayWatch | None = None

    def __init__(self, directory: str, processes: Mapping[str, Any]):
        self._directory, self._processes = directory, dict(processes)
        self._is_stopped, self._is_over = threading.Event(), threading.Event()
        self._sentence = ""
        threading.Thread(target=self._run, name="bigdl-ray", daemon=True).start()

    @classmethod
    def start(cls, cleanup: contextlib.ExitStack, directory: str) -> None:
        """Watch the Ray that this process has just started, until `cleanup` is closed."""
        from ray._private import worker

        node = getattr(worker, "_global_node", None)
        started = getattr(node, "all_processes", {})  # a private API
        main = {name: started[name][0].process for name in _MAIN if started.get(name)}
        cls._of_program = watch = cls(directory, main)

        def stop() -> None:
            watch._is_stopped.set()
            if watch.sentence():
                watch._is_over.wait(RAY_SHUTDOWN_S)
            _allow_auto_start(True)
            cls._of_program = None

        cleanup.callback(stop)

    def sentence(self) -> str:
        """Return the message about the lost process, or an empty string."""
        for name, process in self._processes.items():
            if not self._sentence and process.poll() is not None:
                self._sentence = (
                    f"The Ray that this program started is gone: its {name} (process "
                    f"{process.pid}) {supervisor.exit_text(process.returncode)}; call "
                    "stop_orca_context and init_orca_context"
                )
        return self._sentence

    def loss(self) -> RayLost | None:
        """Return the error for a lost Ray, or None if it is running."""
        sentence = "" if self._is_stopped.is_set() else self.sentence()
        if not sentence:
            return None
        self._is_over.wait(RAY_SHUTDOWN_S)  # until then calls into Ray may hang
        return RayLost(sentence)

    def _run(self) -> None:
        while not self._is_stopped.wait(RAY_LOOK_S):
            sentence = self.sentence()
            if sentence and not self._is_stopped.is_set():
                logger.error(sentence)  # threads within Ray calls end without a message
                _allow_auto_start(False)
                supervisor.kill(supervisor.marked(self._directory))
                _disconnect()
                break
        self._is_over.set()


def _allow_auto_start(allowed: bool) -> None:
    """Set whether Ray calls before ``ray.init`` start Ray automatically."""
    with contextlib.suppress(ImportError):  # a private API
        from ray._private import auto_init_hook

        is_enabled_by_user = os.environ.get("RAY_ENABLE_AUTO_CONNECT", "") != "0"
        auto_init_hook.enable_auto_connect = allowed and is_enabled_by_user


def ray_loss() -> RayLost | None:
    """Return the error for the lost Ray of this program, or None."""
    watch = RayWatch._of_program
    return None if watch is None else watch.loss()


@contextlib.contextmanager
def ray_calls() -> Iterator[None]:
    """Context manager that converts errors to RayLost if this program's Ray is gone.

    Raises
    ------
    RayLost
        If Ray has ended.
    """
    try:
        yield
    except (Exception, SystemExit):  # errors after Ray was shut down
        loss = ray_loss()
        if loss is None:
            raise
        raise loss from None


def connect_ray(
    cleanup: contextlib.ExitStack, **options: Any
) -> dict[str, Any]:  # options: of ray.init
    """Connect to Ray until `cleanup` is closed, and return Ray's address information.

    Returns
    -------
    dict
        ``address`` and ``redis_address``, at which other nodes and processes can join.
    """
    ray = require("ray", "ray")
    if options.get("address"):
        _check_answer(options["address"])
        cleanup.callback(set_variables, set_variables(_usage_stats()))
    try:
        # Ray installs a SIGTERM handler that would end the program, among other changes.
        with preserve_program_state():
            context = ray.init(
                **{"namespace": "bigdl", "logging_level": logging.WARNING, **options}
            )
    except Exception as error:
        where = f" at {options['address']}" if options.get("address") else ""
        reason = str(error).strip().split("\n")[0]
        raise UsageError(
            f"Ray{where} cannot be started or reached: {reason}", code="cluster-unreachable"
        ) from error
    cleanup.callback(_disconnect)
    address = ray.get_runtime_context().gcs_address
    return {
        "address": address,
        "redis_address": address,
        **(getattr(context, "address_info", None) or {}),
    }


def ray_get(references: Any) -> Any:  # the referenced objects
    """Call ``ray.get`` on the driver; raise RayLost if this program's Ray is gone."""
    import ray

    with ray_calls():
        loss = ray_loss()  # otherwise Ray starts a new instance
        if loss is not None:
            raise loss
        return ray.get(references)


def _usage_stats() -> dict[str, str]:
    """Return the environment variable that disables Ray's usage statistics, unless it is set."""
    variables = opt_out_variables()
    return {USAGE_STATS: variables[USAGE_STATS]} if USAGE_STATS in variables else {}


_CLIENT = "ray://"
_CLIENT_PORT = 10001


def _check_answer(address: str) -> None:
    """Raise UsageError if no Ray responds at an address; ``ray.init`` would wait for minutes."""
    where = address
    if address == "auto":
        from ray._private.services import get_ray_address_from_environment

        with contextlib.suppress(Exception):  # ray.init raises the error with its reason
            where = get_ray_address_from_environment(address, None)
    is_client = where.startswith(_CLIENT)
    host, _, port = where.removeprefix(_CLIENT).partition("?")[0].strip("/").rpartition(":")
    if is_client and not host:
        host, port = port, str(_CLIENT_PORT)
    if not port.isdigit() or "://" in host:
        if address != "auto" and "://" not in address:
            raise UsageError(
                f'address should be "auto" or the host:port of a Ray, such as "10.0.0.1:6379", '
                f"got {address!r}",
                code="argument-value",
                argument="address",
            )
        return  # ray.init checks it
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=RAY_ANSWER_S
        ) as client:
            if os.environ.get("RAY_USE_TLS") != "1" and not _speaks_http2(client):
                raise OSError("the server there is not a Ray")
    except OSError as error:
        start = "ray start --head" + (" --ray-client-server-port=" + port if is_client else "")
        raise UsageError(
            f"No Ray answers at {where} ({error.strerror or error}); start one there ({start}), "
            "correct address=, or omit it for a Ray on this machine",
            code="cluster-unreachable",
            address=where,
        ) from error


def _speaks_http2(client: socket.socket) -> bool:
    """Return True if the other end responds like a gRPC server, such as Ray's."""
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # an empty SETTINGS frame
    client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    return client.recv(9)[3:4] == settings[3:4]


_LONG = 200


@contextlib.contextmanager
def _shorten_raylet_messages() -> Iterator[None]:
    """Temporarily shorten raylet messages about dead workers, which the job also reports."""
    from ray._private import worker

    original = getattr(worker, "print_to_stdstream", None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def print_shortened(data: dict[str, Any], *args: object, **kwargs: object) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [shortened(line) for line in data.get("lines", [])]}
        original(data, *args, **kwargs)

    worker.print_to_stdstream = print_shortened
    try:
        yield
    finally:
        if worker.print_to_stdstream is print_shortened:
            worker.print_to_stdstream = original


def shortened(line: str) -> str:
    """Return the first sentence of a long raylet line, with the process id."""
    if len(line) <= _LONG:
        return line
    process = re.search(r"Worker PID: (\d+)", line)
    about = f" (process {process[1]})" if process else ""
    return f"{line.split('. ')[0][:_LONG].rstrip('.')}{about}. Ray's logs have more."


def _disconnect() -> None:
    import ray

    with preserve_program_state(), contextlib.suppress(Exception):
        ray.shutdown()


def _kill_remaining_processes(directory: str) -> None:
    """Kill the remaining processes of a Ray instance that this program started."""
    if supervisor.end_marked(directory):
        logger.warning("Ray's processes did not end by themselves and were killed")


def check_ray_arguments(options: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that ``ray.init`` does not accept."""
    ray = require("ray", "ray")
    known = inspect.signature(inspect.unwrap(ray.init)).parameters
    private = ("_redis_password", "_redis_username", "_system_config", "_metrics_export_port")
    for name in options:
        if name not in known and name not in private:
            raise UsageError(
                f'init_orca_context has no argument {name!r} with runtime="ray"; besides cores, '
                "num_nodes, address and object_store_memory it accepts those of ray.init",
                code="argument-unknown",
                argument=name,
            )


def _import_path() -> str:
    """Return the ``PYTHONPATH`` with which other processes can import the same modules."""
    return os.pathsep.join([*user_import_path(), *filter(None, [os.environ.get("PYTHONPATH")])])


def _authentication() -> dict[str, str]:
    """Return environment variables with Ray's token, unless the user configured authentication."""
    if any(os.environ.get(name) for name in (TOKEN, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")):
        return {}
    return {"RAY_AUTH_MODE": "token", TOKEN: _token}


def shared_environment() -> dict[str, str]:
    """Return the environment variables, including the token, that processes need to join Ray."""
    names = (
        *ENVIRONMENT,
        USAGE_STATS,
        _SEVERAL_NODES,
        TOKEN,
        "RAY_AUTH_TOKEN_PATH",
        "RAY_AUTH_MODE",
    )
    return {name: os.environ[name] for name in names if name in os.environ}


def set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set environment variables, or unset those that are None; return the previous values.

    Ray reads some of them at import only, so its cached values are updated.
    """
    from ray._private import ray_constants
    from ray._raylet import (  # type: ignore[attr-defined]  # compiled; its stub lacks them
        AuthenticationTokenLoader,
        Config,
    )

    before = set_variables(values)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(_SEVERAL_NODES) != "0"
    return before


def _store_size() -> int:
    """Return the object store's size in bytes: Ray's default, limited by the shared memory."""
    from bigdl.common.memory import available_memory

    shared = shared_memory_space()
    preferred = int(0.3 * available_memory())
    return max(_LEAST_STORE, min(preferred, int(0.9 * shared)) if shared else preferred)


_WITHOUT_EFFECT = {
    "redis_port": "Ray no longer uses Redis",
    "redis_password": "Ray uses a generated token",
    "password": "Ray uses a generated token",
    "include_webui": "Ray's dashboard is disabled",
}


def start_on_spark(
    cleanup: contextlib.ExitStack,
    options: Mapping[str, Any],
    object_store_memory: int | None,
    driver_cores: int,
) -> dict[str, Any]:
    """Start a Ray head on this machine and a node per executor; return Ray's address information.

    In local mode Ray has one node, on this machine.  Nodes end within seconds after the head.

    Parameters
    ----------
    cleanup : contextlib.ExitStack
        Closing it stops this Ray.
    options : dict
        Options for Spark of :class:`~bigdl.orca.cluster.ray.OrcaRayContext`.
    object_store_memory : int or None
        Bytes of the object store per node.
    driver_cores : int
        CPUs of Ray on the driver's machine, in addition to the nodes.

    Raises
    ------
    UsageError
        If there are fewer executors than nodes, Spark may remove executors, or a node does not
        start.
    """
    check_supported("Ray on Spark", has_parent_death_signal())
    for name, reason in _WITHOUT_EFFECT.items():
        if options.get(name) is not None:
            logger.info("%s has no effect: %s", name, reason)
    sc = options.get("sc")
    if sc is None and connect_session() is not None:
        raise UsageError(connect.NO_RAY, code="unsupported")
    cluster = SparkCluster(sc) if sc is not None else SparkCluster.from_active()
    cores = options.get("ray_node_cpu_cores") or cluster.cores_per_node
    system_config = options.get("system_config")
    config = {"_system_config": system_config} if system_config else {}
    if cluster.is_local:
        return start_ray(cleanup, cores, object_store_memory=object_store_memory, options=config)
    nodes = options.get("num_ray_nodes") or cluster.nodes
    if cluster.dynamic_allocation:
        raise UsageError(
            "Ray needs permanent executors, but dynamic allocation may remove them; set "
            "spark.dynamicAllocation.enabled=false",
            code="cluster-config",
        )
    if nodes > cluster.nodes:
        raise UsageError(
            f"num_ray_nodes is {nodes}, but Spark has {cluster.nodes} executors; pass at most "
            "that number",
            code="resource-limit",
            argument="num_ray_nodes",
        )
    host = cluster.driver_host  # `ray start` cannot join a head on the loopback interface
    info = start_ray(
        cleanup,
        driver_cores,
        host=None if host == LOOPBACK else host,
        object_store_memory=object_store_memory,
        options=config,
    )
    extra_params = options.get("extra_params") or {}
    node_settings = {
        "head": info["address"],
        "options": {
            "address": info["address"],
            "num-cpus": cores,
            "object-store-memory": object_store_memory,
            **{name.replace("_", "-"): value for name, value in extra_params.items()},
        },
        # override a "0" inherited from a program with a Ray on loopback
        "environment": {_SEVERAL_NODES: "1", **shared_environment(), **(options.get("env") or {})},
    }
    ship_modules(cluster.sc)
    _start_nodes(cluster, nodes, node_settings)
    _await_nodes(nodes + bool(driver_cores))
    return info


def _command(node_settings: Mapping[str, Any]) -> list[str]:
    """Return the command that starts a Ray node on this machine and joins it to the head."""
    host, _, port = node_settings["head"].rpartition(":")
    options = {"node-ip-address": outgoing_address(host, int(port)), **node_settings["options"]}
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    quiet = [] if is_allowed() else ["--disable-usage-stats"]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *quiet, "--block"]


def _start_nodes(cluster: SparkCluster, nodes: int, node_settings: dict) -> None:
    """Start a node on each of `nodes` executors."""
    from bigdl.orca.cluster.spark_calls import SparkCall

    def start(batches):
        import pyarrow as pa
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        for _ in batches:
            pass
        executor = executor_process()
        everyone = [json.loads(each) for each in context.allGather(json.dumps(executor))]
        partition = context.partitionId()
        # if an executor has several tasks, the first one starts the node
        firsts = [i for i, each in enumerate(everyone) if each not in everyone[:i]][:nodes]
        if partition in firsts:
            _start_node({**node_settings, "executor": executor[1:]})
        yield pa.RecordBatch.from_pydict({"executors": [len(firsts)]})

    tasks = _await_slots(cluster, nodes)
    frame = cluster.spark.range(0, tasks, 1, tasks)

    def job():
        return frame.mapInArrow(start, "executors long", barrier=True).collect()

    executors = SparkCall(cluster.sc, job).wait()[0][0]
    if executors < nodes:
        raise _not_started(f"only {executors} executors registered")


def _await_slots(cluster: SparkCluster, nodes: int) -> int:
    """Wait for the executors, so that each one can get a task, and return the number of slots."""
    preferred = nodes * max(1, cluster.cores_per_node // cluster.threads_per_task)
    slots = cluster.await_slots(preferred)
    if not slots:
        raise UsageError(f"No Spark executor registered within {RAY_START_S:g} s", code="timeout")
    return slots


def executor_process() -> list:
    """Return host, pid and start time of the JVM of this task's executor."""
    import psutil

    parents = psutil.Process().parents()
    jvm = next((process for process in parents if "java" in process.name()), parents[-1])
    return [host_name(), jvm.pid, jvm.create_time()]


def _start_node(node_settings: dict) -> None:
    """Start the supervisor of a node in a new session, because Spark ends its Python workers."""
    from bigdl.orca.cluster.spark_calls import task_directory

    folder = LockedFolder("ray", longest=supervisor.LONGEST_RAY, remover=False)
    # Ray's workers can import what Spark's can, including the program's modules
    path = {"PYTHONPATH": os.pathsep.join(user_import_path())}
    node_settings = {
        **node_settings,
        "environment": {**path, **node_settings["environment"]},
        "command": _command(node_settings),
        "directory": folder.path,
        "log": os.path.join(task_directory(), f"bigdl-ray-node-{os.getpid()}.log"),
    }
    process = supervisor.start("ray-node", node_settings, lock=folder.descriptor)
    folder.hand_over()
    # Spark reuses this process, so collect the exit status of its child
    threading.Thread(target=process.wait, daemon=True).start()


def nodes_with_cpus() -> list[dict[str, Any]]:
    """Return Ray's description of the live nodes that run tasks."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def _await_nodes(nodes: int) -> None:
    deadline = time.monotonic() + RAY_START_S
    while (joined := len(nodes_with_cpus())) < nodes:
        if time.monotonic() > deadline:
            raise _not_started(f"{joined} of {nodes} joined within {RAY_START_S:g} s")
        time.sleep(0.2)


def _not_started(reason: str) -> UsageError:
    return UsageError(
        f"Ray's nodes could not be started on Spark's executors: {reason}; see "
        "bigdl-ray-node-*.log in the executors' local directories",
        code="cluster-refused",
    )
