"""Description of the active Spark Connect session.

Such a session has no SparkContext, so no RDDs, no broadcasts and no information on executors.  Orca
replaces them with features of every Spark Connect version: DataFrames, artifacts, tags and the
server's settings.  :func:`active_spark` serves callers that support both types of sessions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import cloudpickle

from bigdl.common.errors import BigDLError, UsageError, first_line, require
from bigdl.common.platform.network import host_name
from bigdl.common.private_folders import scratch_folder
from bigdl.common.timeouts import TASK_CONNECT_S
from bigdl.orca.cluster.environment import zip_bigdl, zip_modules
from bigdl.orca.cluster.launch import quiet_query_errors
from bigdl.orca.cluster.pieces import PIECE, PIECES, pieces, pieces_frame, whole_values
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.cluster.spark import (
    NEEDS_CONTEXT,
    SparkCluster,
    is_local,
    simulated_cluster,
)
from bigdl.orca.cluster.spark_calls import users_errors
from bigdl.orca.cluster.versions import by_partition, to_arrow

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from bigdl.runtime.cluster import Broadcaster

logger = logging.getLogger("bigdl.orca")

NO_RAY = (
    "Ray cannot be started on Spark's nodes over Spark Connect; use the cluster_mode of the "
    'cluster, or init_orca_context(runtime="ray", address=...)'
)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass
class _Facts:
    """Cached information about a session."""

    nodes: int | None = None  # specified by the program
    cores: int | None = None
    conf: dict[str, str] = field(default_factory=dict)
    task_facts: dict[str, Any] | None = None
    is_client_reachable: bool | None = None
    broadcaster: Broadcaster | None = None
    sent: set[str] = field(default_factory=set)  # names of artifacts
    lock: Any = field(default_factory=threading.RLock)


class ConnectCluster(SparkCluster):
    """Spark cluster of a Spark Connect session, described as nodes × cores.

    Parameters
    ----------
    session : pyspark.sql.connect.session.SparkSession

    Attributes
    ----------
    master : str
        The server's master URL, or "" if it is unknown.
    """

    def __init__(self, session: SparkSession):
        self._session = session
        self._facts: _Facts = vars(session).setdefault("_bigdl_facts", _Facts())
        self.master = self._conf("spark.master")

    @property
    def sc(self) -> SparkContext:  # type: ignore[override]
        """SparkContext, which Spark Connect does not have: always raises UsageError."""
        raise UsageError(NEEDS_CONTEXT, code="unsupported")

    def __repr__(self) -> str:
        return f"ConnectCluster({self.host!r}, {self.nodes} nodes × {self.cores_per_node} cores)"

    def describe(self, nodes: int | None, cores: int | None) -> None:
        """Set the number of executors, and of cores per executor, that the program specified."""
        self._facts.nodes, self._facts.cores = nodes, cores

    @property
    def spark(self) -> SparkSession:
        """SparkSession of this cluster."""
        return self._session

    @property
    def host(self) -> str:
        """Host of the Spark Connect server."""
        return str(self._session.client.host)

    @property
    def temp_dir(self) -> str | None:
        return None

    @property
    def is_local(self) -> bool:
        """Always False: tasks can run on any machine, even if the server's master is local."""
        return False

    @property
    def is_kubernetes(self) -> bool:
        """Always False: pods cannot be queried."""
        return False

    @property
    def job_owner(self) -> Any:  # the session instead of a SparkContext
        return self._session

    @property
    def broadcaster(self) -> Broadcaster:
        """Object whose ``broadcast`` sends bytes to all tasks; one per session."""
        self._facts.broadcaster = self._facts.broadcaster or self
        return self._facts.broadcaster

    def every_task_sees(self, check: Callable[[], bool]) -> bool:
        self._inspect_executors()  # sends modules that tasks lack
        return all(self._tasks(check))

    @property
    def driver_host(self) -> str:
        """Address of this process on the route to the server."""
        if self.host in _LOOPBACK:
            return "127.0.0.1"
        from bigdl.runtime.channel import outgoing_address

        return outgoing_address(self.host, 15002)

    @property
    def dynamic_allocation(self) -> bool:
        allocates = self._conf("spark.dynamicAllocation.enabled") == "true"
        return allocates and not is_local(self.master)

    @property
    def nodes(self) -> int:
        """Number of executors, from the program, the server's settings, or running tasks.

        With dynamic allocation it is ``spark.dynamicAllocation.maxExecutors`` if that is set and
        the program specified no number.
        """
        simulated = simulated_cluster(self.master)
        if is_local(self.master):
            return 1
        if simulated:
            return simulated[0]
        if self._facts.nodes is None and self.dynamic_allocation and self.most_executors:
            return self.most_executors
        configured = self._configured_nodes()
        return len(self._inspect_executors()["executors"]) if configured is None else configured

    def _configured_nodes(self) -> int | None:
        configured = self._facts.nodes or self._conf("spark.executor.instances")
        return int(configured) if configured else None

    @property
    def cores_per_node(self) -> int:
        simulated = simulated_cluster(self.master)
        if simulated:
            return simulated[1]
        configured = self._facts.cores or self._conf("spark.executor.cores")
        if configured and not is_local(self.master):
            return int(configured)
        return max(1, self.slots() * self.threads_per_task // max(1, self.nodes))

    def slots(self) -> int:
        """Return the number of tasks that can run concurrently on the registered executors.

        It is derived from the plan of a range, which has one partition per core.
        """
        if self._conf("spark.default.parallelism"):  # then partitions do not depend on the cores
            nodes = self._configured_nodes()
            configured = self._facts.cores or self._conf("spark.executor.cores")
            if nodes and configured and not is_local(self.master):
                return nodes * (int(configured) // self.threads_per_task)
        match = re.search(r"splits=(?:Some\()?(\d+)", explained(self._session.range(1)))
        if match is None:
            logger.debug("The plan of a range does not contain its number of partitions")
            return (self._facts.nodes or 1) * (self._facts.cores or 1) // self.threads_per_task
        slots = int(match[1]) // self.threads_per_task
        simulated = simulated_cluster(self.master)
        # Spark's minimum is 2
        return min(slots, simulated[0] * simulated[1]) if simulated else slots

    @property
    def parallelism(self) -> int:
        return max(1, self.slots())

    # -- bytes for all tasks -----------------------------------------------------------------------

    def broadcast(self, data: bytes) -> ConnectBytes:
        """Send bytes to all tasks; they stay on the server until the session ends."""
        return ConnectBytes(self, data)

    def send_file(self, data: bytes, name: str, **options: bool) -> None:
        """Send a file to all tasks of the session, once, with `options` of ``addArtifacts``."""
        with self._facts.lock:
            self._send(data, name, **options)

    def _send(self, data, name, **options):
        if name not in self._facts.sent:
            with scratch_folder("artifact") as folder:
                path = Path(folder, name)
                path.write_bytes(data)
                self._session.addArtifacts(str(path), **options)
            self._facts.sent.add(name)

    def ship_modules(self) -> None:
        """Send the program's modules to the executors, unless they can read this machine's files.

        Modules that a program imports later are sent at the next call.
        """
        if not self._inspect_executors()["sees_files"]:
            self._send_modules(zip_modules)

    def _send_modules(self, write: Callable[[Path], bool]) -> None:
        with scratch_folder("modules") as folder:
            file = Path(folder, "modules.zip")
            if write(file):
                data = file.read_bytes()
                name = f"bigdl-modules-{hashlib.sha256(data).hexdigest()[:16]}.zip"
                self._send(data, name, pyfile=True)

    # -- jobs --------------------------------------------------------------------------------------

    def users_errors(self) -> contextlib.AbstractContextManager[None]:
        return users_errors(None)

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the server's output goes to its log

    def map_shards(self, func: Callable, shards: Sequence) -> list:
        """Return the elements of ``func([shard])`` for every shard, computed by Spark tasks."""
        values = [(n, (0, n), cloudpickle.dumps(shard)) for n, shard in enumerate(shards)]
        frame = by_partition(pieces_frame(self._session, values), max(len(values), 1), "target")

        def work(batches):
            for key, shard in whole_values(batches):
                elements = list(func([cloudpickle.loads(shard)]))
                yield from pieces(0, key, cloudpickle.dumps(elements))

        with self.users_errors():
            table = to_arrow(frame.mapInArrow(work, PIECES))
        pairs = sorted(whole_values(table.to_batches()), key=lambda pair: pair[0])
        return [element for _, data in pairs for element in cloudpickle.loads(data)]

    @property
    def is_client_reachable(self) -> bool | None:
        """True if tasks can connect to this process; None if this was not tested."""
        return self._facts.is_client_reachable

    @is_client_reachable.setter
    def is_client_reachable(self, value: bool) -> None:
        self._facts.is_client_reachable = value

    def reaches(self, host: str, port: int) -> bool:
        """Return True if tasks can connect to a port of this process; the result is cached."""
        if self.is_client_reachable is None:
            self.is_client_reachable = all(self._tasks(_connector(host, port)))
        return bool(self.is_client_reachable)

    def has_server(self) -> bool:
        """Return True if a process listens on the server's address."""
        return has_server(self._session)

    def _inspect_executors(self) -> dict[str, Any]:
        """Run tasks once to determine executors, visibility of local files and missing packages.

        Raises
        ------
        UsageError
            If the executors' Python lacks a package.
        """
        with self._facts.lock:
            if self._facts.task_facts is None:
                with tempfile.NamedTemporaryFile(prefix="bigdl-look-") as file:
                    results = self._tasks(_inspector(file.name))
                missing = {name for result in results for name in result["missing"]}
                if missing - {"bigdl"}:
                    raise UsageError(
                        f"The executors' Python at {self.host} lacks "
                        f"{', '.join(sorted(missing - {'bigdl'}))}; install the missing packages "
                        "there",
                        code="package-missing",
                        package=list(missing - {"bigdl"}),
                        address=self.host,
                    )
                if missing:
                    logger.info("Sending BigDL's modules to the executors, which lack BigDL")
                    self._send_modules(zip_bigdl)
                self._facts.task_facts = {
                    "executors": {result["executor"] for result in results},
                    "sees_files": all(result["sees_file"] for result in results),
                }
            return self._facts.task_facts

    def _tasks(self, function: Callable[[], Any]) -> list:
        """Call a function in as many concurrent tasks as possible, and return the results."""
        number = max(1, self.slots())

        def work(batches):
            import json

            import pyarrow as pa

            for _ in batches:
                pass
            yield pa.RecordBatch.from_arrays([pa.array([json.dumps(function())])], ["result"])

        frame = self._session.range(0, number, 1, number)
        with self.users_errors():
            rows = frame.mapInArrow(work, "result string").collect()
        return [json.loads(row[0]) for row in rows]

    def _conf(self, key: str, default: str = "") -> str:
        from pyspark.errors import PySparkException

        known = self._facts.conf  # settings of the server, which do not change while it runs
        if key not in known:
            try:
                known[key] = self._session.conf.get(key, None) or ""
            except PySparkException as error:  # a platform may hide it
                if is_gone(error):
                    raise ServerLost(self.host) from error
                logger.debug("The server does not return %s: %s", key, error)
                known[key] = ""
        return known[key] or default


class ServerLost(BigDLError, RuntimeError):
    """Error raised when the Spark Connect server, and thus the session, was lost or restarted."""

    code = "cluster-unreachable"

    def __init__(self, host: str):
        super().__init__(
            f"The Spark Connect server at {host} was lost or restarted, so the session is gone; "
            'connect again with init_orca_context, and call fit again with resume="auto" to '
            "continue from the newest checkpoint in model_dir"
        )


class ConnectedSession:
    """Spark Connect session that Orca created, and environment variables to restore at its end."""

    def __init__(self, session: Any, environment: dict[str, str | None]):
        self.session, self._environment = session, environment

    @classmethod
    def connect(
        cls, url: str | None, conf: dict[str, str], previous: ConnectedSession | None
    ) -> ConnectedSession | None:
        """Connect to a server; return None if the active session is usable.

        Parameters
        ----------
        url : str or None
            URL of the server, by default that of ``SPARK_REMOTE``.
        conf : dict of str to str
            Settings of the session.
        previous : ConnectedSession or None
            Previous session; it is reused if it is alive, for any `url`.

        Raises
        ------
        UsageError
            If there is no server, or it rejects the connection.
        """
        active = connect_session()
        if active is not None:
            if has_server(active) and cls._is_alive(active):
                return None
            logger.warning(
                "The Spark Connect session and its server are gone; creating a new session"
            )
            session: Any = active  # of Spark Connect
            session.release_session_on_close = False  # the server is gone
            active.stop()
            if previous is not None and previous.session is active:
                previous.stop()
        url = url or os.environ.get("SPARK_REMOTE")
        if not url or not url.startswith("sc://"):
            raise UsageError(
                'cluster_mode="spark-connect" needs master, the address of a Spark Connect server '
                f'such as "sc://host:15002", but got {url!r}',
                code="argument-value",
                argument="master",
            )
        for package in ("grpc", "grpc_status", "google.rpc", "zstandard"):
            require(package, "connect")
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        environment = {name: os.environ.get(name) for name in _CONNECT_VARIABLES}
        if previous is not None:  # the state before the first session
            environment = previous._environment
        host, port = _endpoint(url)
        if not _listens(host, port):
            raise UsageError(
                f"No Spark Connect server answers at {host}:{port}; start it with Spark's "
                "sbin/start-connect-server.sh, and pass its address as master",
                code="cluster-unreachable",
                address=host + ":" + str(port),
            )
        try:
            session = SparkSession.builder.remote(url).getOrCreate()
            for name, value in conf.items():
                session.conf.set(name, value)
            quiet_query_errors()
            logger.info("Connected to Spark %s at %s:%d", session.version, host, port)
        except PySparkException as error:
            raise UsageError(
                f"The Spark Connect server at {host}:{port} rejects the connection: "
                f"{first_line(error)}",
                code="cluster-refused",
                address=host + ":" + str(port),
            ) from error
        return cls(session, environment)

    @staticmethod
    def _is_alive(session: SparkSession) -> bool:
        try:
            session.conf.get("spark.sql.session.timeZone")
        except Exception as error:
            logger.debug("The session does not respond: %s", error)
            return False
        return True

    def stop(self) -> None:
        """Release the session, without an error if the server is gone."""
        if not self.session.is_stopped:
            self.session.release_session_on_close = has_server(self.session)
            self.session.stop()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_CONNECT_VARIABLES = ("SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE", "SPARK_LOCAL_REMOTE")


def _endpoint(url: str) -> tuple[str, int]:
    """Return host and port of a Spark Connect URL."""
    try:
        parts = urlsplit(url.partition("/;")[0])
        return parts.hostname or "localhost", parts.port or 15002
    except ValueError as error:
        raise UsageError(
            f'master must be like "sc://host:15002", but got {url!r}',
            code="argument-value",
            argument="master",
        ) from error


def has_server(session: Any) -> bool:
    """Return True if a process listens on the address of a session's server."""
    endpoint = getattr(session.client._builder, "endpoint", "")
    host, _, port = str(endpoint).rpartition(":")
    # a user's channel may have no endpoint
    return _listens(host.strip("[]"), int(port)) if port.isdigit() else True


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), TASK_CONNECT_S).close()
    except OSError:
        return False
    return True


def active_spark() -> SparkCluster:
    """Return the cluster of the active Spark Connect session, or else of the active SparkContext.

    Raises
    ------
    UsageError
        If there is no active Spark.
    """
    session = connect_session()
    return SparkCluster.from_active() if session is None else ConnectCluster(session)


def active_spark_or_local() -> SparkCluster:
    """Return the active Spark cluster, or start a local one if there is none."""
    session = connect_session()
    return SparkCluster.active_or_local() if session is None else ConnectCluster(session)


def explained(frame: Any, extended: bool = False) -> str:  # frame: classic or Connect
    """Return the query plan of a DataFrame as text."""
    return frame._explain_string(extended=extended)


def is_gone(error: BaseException) -> bool:
    """Return True if an error means that the server, or its session, is gone."""
    text = str(error)
    # job failures may contain similar texts
    return _JOB_FAILURE.search(text) is None and _GONE.search(text) is not None


_JOB_FAILURE = re.compile(r"Job aborted|Traceback \(most recent call last\)")
_GONE = re.compile(
    r"SESSION_CHANGED|SESSION_NOT_FOUND|SESSION_CLOSED|RESPONSE_ALREADY_RECEIVED|RETRIES_EXCEEDED|"
    r"StatusCode\.UNAVAILABLE|Connection refused|driver instance has restarted|closed channel"
)


# -- bytes -----------------------------------------------------------------------------------------


class ConnectBytes:
    """Bytes that tasks can read, sent in the query plan or, if large, as a file of the session.

    Attributes
    ----------
    value : bytes
    """

    def __init__(self, cluster: ConnectCluster, data: bytes):
        self.value = data
        self._name = f"bigdl-{hashlib.sha256(data).hexdigest()[:32]}"
        self._is_file = len(data) > PIECE
        if self._is_file:
            cluster.send_file(data, self._name, file=True)

    def __reduce__(self):
        return (_FileBytes, (self._name,)) if self._is_file else (_PlanBytes, (self.value,))


class ConnectValue:
    """Object that tasks can read, with the interface of a Spark broadcast variable.

    Attributes
    ----------
    value : object
    """

    def __init__(self, data: Any):  # data: with a field `value`
        self._data = data  # ConnectBytes, or its form in a task

    @classmethod
    def of(cls, session: SparkSession, value: object) -> ConnectValue:
        """Share an object with the tasks of a session."""
        return cls(ConnectCluster(session).broadcast(cloudpickle.dumps(value)))

    @functools.cached_property
    def value(self) -> Any:  # the object that was sent
        return cloudpickle.loads(self._data.value)

    def __reduce__(self):
        return ConnectValue, (self._data,)


class _FileBytes:
    """Unpickled ConnectBytes in a task, whose bytes are read from a file of the session."""

    def __init__(self, name: str):
        self._name = name

    @property
    def value(self) -> bytes:
        from pyspark import SparkFiles

        return Path(SparkFiles.get(self._name)).read_bytes()


@dataclass
class _PlanBytes:
    """Unpickled ConnectBytes in a task, whose bytes were sent in the query plan."""

    value: bytes


# -- functions that tasks call, pickled by value -------------------------------------------------


def _inspector(file: str) -> Callable[[], dict]:
    def inspect():
        import importlib.util
        import os

        names = ("bigdl", "cloudpickle", "numpy", "psutil", "torch")
        return {
            "executor": f"{host_name()}:{os.environ.get('SPARK_LOCAL_DIRS', '')}",
            "sees_file": os.path.exists(file),
            "missing": [name for name in names if importlib.util.find_spec(name) is None],
        }

    return inspect


def _connector(host: str, port: int) -> Callable[[], bool]:
    timeout = TASK_CONNECT_S

    def connect():
        import socket

        try:
            socket.create_connection((host, port), timeout).close()
        except OSError:
            return False
        return True

    return connect


def refuse(what: str, instead: str) -> NoReturn:
    """Raise the UsageError for a feature that Spark Connect does not support."""
    raise UsageError(
        f"{what} does not work over Spark Connect; {instead}", code="unsupported", method=what
    )
