"""Describe the session of Spark Connect that is active, whoever made it.

Such a session has no SparkContext: no RDDs, no broadcasts and no view of the executors.  What Orca
needs of these is made of what every version of Spark Connect has: DataFrames, artifacts, tags and
the server's settings.  :func:`active_spark` is for callers that work on either kind of session.
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

logger = logging.getLogger("bigdl.orca")

NO_RAY = (
    "Ray cannot be started on the nodes of Spark over Spark Connect; use the cluster_mode of the "
    'cluster itself, or init_orca_context(runtime="ray", address=...)'
)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass
class _Facts:
    """Facts about a session, for as long as it lives."""

    nodes: int | None = None  # as the program said
    cores: int | None = None
    conf: dict[str, str] = field(default_factory=dict)
    look: dict[str, Any] | None = None
    is_client_reachable: bool | None = None
    broadcaster: Any = None
    sent: set[str] = field(default_factory=set)  # names of artifacts
    lock: Any = field(default_factory=threading.RLock)


class ConnectCluster(SparkCluster):
    """The Spark behind a session of Spark Connect, as nodes × cores.

    Parameters
    ----------
    session : pyspark.sql.connect.session.SparkSession

    Attributes
    ----------
    master : str
        The server's master URL; nothing where the server does not tell it.
    """

    def __init__(self, session: Any):
        self._session = session
        self._facts: _Facts = vars(session).setdefault("_bigdl_facts", _Facts())
        self.master = self._conf("spark.master")

    @property
    def sc(self) -> SparkContext:  # type: ignore[override]
        """Refused: there is none."""
        raise UsageError(NEEDS_CONTEXT, code="unsupported")

    def __repr__(self) -> str:
        return f"ConnectCluster({self.host!r}, {self.nodes} nodes × {self.cores_per_node} cores)"

    def describe(self, nodes: int | None, cores: int | None) -> None:
        """Take the program's word for the number of executors, and of the cores of each."""
        self._facts.nodes, self._facts.cores = nodes, cores

    @property
    def spark(self) -> Any:
        """The session."""
        return self._session

    @property
    def host(self) -> str:
        """Host of the server."""
        return str(self._session.client.host)

    @property
    def temp_dir(self) -> str | None:
        return None

    @property
    def is_local(self) -> bool:
        """False: tasks may run on any machine, also where the server's master is local."""
        return False

    @property
    def is_kubernetes(self) -> bool:
        """False: nothing is known of pods."""
        return False

    @property
    def job_owner(self) -> Any:
        return self._session

    @property
    def broadcaster(self) -> Any:
        """The sender of bytes to all tasks; the same for all clusters of a session."""
        self._facts.broadcaster = self._facts.broadcaster or self
        return self._facts.broadcaster

    @property
    def driver_host(self) -> str:
        """The address of this process on the route to the server."""
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
        """Number of executors: as the program said, as the server is set up, or as tasks saw."""
        simulated = simulated_cluster(self.master)
        if is_local(self.master):
            return 1
        if simulated:
            return simulated[0]
        asked = self._asked_nodes()
        return len(self._look()["executors"]) if asked is None else asked

    def _asked_nodes(self) -> int | None:
        asked = self._facts.nodes or self._conf("spark.executor.instances")
        return int(asked) if asked else None

    @property
    def cores_per_node(self) -> int:
        simulated = simulated_cluster(self.master)
        if simulated:
            return simulated[1]
        asked = self._facts.cores or self._conf("spark.executor.cores")
        if asked and not is_local(self.master):
            return int(asked)
        return max(1, self.slots() * self.threads_per_task // max(1, self.nodes))

    def slots(self) -> int:
        """Number of tasks that can run at the same time on the executors registered now.

        The plan of a range tells it, whose partitions are as many as the cores.
        """
        if self._conf("spark.default.parallelism"):  # then it says nothing of the cores
            nodes = self._asked_nodes()
            asked = self._facts.cores or self._conf("spark.executor.cores")
            if nodes and asked and not is_local(self.master):
                return nodes * (int(asked) // self.threads_per_task)
        match = re.search(r"splits=(?:Some\()?(\d+)", explained(self._session.range(1)))
        if match is None:
            logger.debug("The plan of a range does not say how many partitions it has")
            return (self._facts.nodes or 1) * (self._facts.cores or 1) // self.threads_per_task
        slots = int(match[1]) // self.threads_per_task
        simulated = simulated_cluster(self.master)
        # Spark says 2 at least
        return min(slots, simulated[0] * simulated[1]) if simulated else slots

    @property
    def parallelism(self) -> int:
        return max(1, self.slots())

    # -- bytes for all tasks -----------------------------------------------------------------------

    def broadcast(self, data: bytes) -> ConnectBytes:
        """Bytes for all tasks, which stay on the server for as long as the session lives."""
        return ConnectBytes(self, data)

    def send_file(self, data: bytes, name: str, **kind: bool) -> None:
        """Give all tasks of the session a file, unless they have it; `kind` as of addArtifacts."""
        with self._facts.lock:
            self._send(data, name, **kind)

    def _send(self, data, name, **kind):
        if name not in self._facts.sent:
            with scratch_folder("artifact") as folder:
                path = Path(folder, name)
                path.write_bytes(data)
                self._session.addArtifacts(str(path), **kind)
            self._facts.sent.add(name)

    def ship_modules(self) -> None:
        """Send the program's own modules to the executors, unless these see this machine's files.

        What a program imports later is sent at the next call.
        """
        if not self._look()["sees_files"]:
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
        return contextlib.nullcontext()  # what the server prints goes to its own log

    def map_shards(self, func: Callable, shards: Sequence) -> list:
        """The elements of ``func([shard])`` of every shard, each computed by a task of Spark."""
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
        """True if tasks can open connections to this process; None where nobody has tried."""
        return self._facts.is_client_reachable

    @is_client_reachable.setter
    def is_client_reachable(self, value: bool) -> None:
        self._facts.is_client_reachable = value

    def reaches(self, host: str, port: int) -> bool:
        """Return True if tasks can open a connection to a port of this process; tried once."""
        if self.is_client_reachable is None:
            self.is_client_reachable = all(self._tasks(_connector(host, port)))
        return bool(self.is_client_reachable)

    def has_server(self) -> bool:
        """Return True if something listens where the server is."""
        return has_server(self._session)

    def _look(self) -> dict[str, Any]:
        """Return facts that tasks see, asked once: executors, this machine's files, packages.

        Raises
        ------
        UsageError
            If their Python lacks a package.
        """
        with self._facts.lock:
            if self._facts.look is None:
                with tempfile.NamedTemporaryFile(prefix="bigdl-look-") as file:
                    answers = self._tasks(_looker(file.name))
                missing = {name for answer in answers for name in answer["missing"]}
                if missing - {"bigdl"}:
                    raise UsageError(
                        f"The Python of the executors behind {self.host} has no "
                        f"{', '.join(sorted(missing - {'bigdl'}))}; install what is missing there",
                        code="package-missing",
                        package=list(missing - {"bigdl"}),
                        address=self.host,
                    )
                if missing:
                    logger.info("The executors have no BigDL: its modules are sent to them")
                    self._send_modules(zip_bigdl)
                self._facts.look = {
                    "executors": {answer["executor"] for answer in answers},
                    "sees_files": all(answer["sees_file"] for answer in answers),
                }
            return self._facts.look

    def _tasks(self, ask: Callable[[], Any]) -> list:
        """Return a function's results in as many tasks as can run at once; it goes by value."""
        number = max(1, self.slots())

        def work(batches):
            import json

            import pyarrow as pa

            for _ in batches:
                pass
            yield pa.RecordBatch.from_arrays([pa.array([json.dumps(ask())])], ["answer"])

        frame = self._session.range(0, number, 1, number)
        with self.users_errors():
            rows = frame.mapInArrow(work, "answer string").collect()
        return [json.loads(row[0]) for row in rows]

    def _conf(self, key: str, default: str = "") -> str:
        from pyspark.errors import PySparkException

        known = self._facts.conf  # of the server: it does not change while it runs
        if key not in known:
            try:
                known[key] = self._session.conf.get(key, None) or ""
            except PySparkException as error:  # a platform may keep it to itself
                if is_gone(error):
                    raise ServerLost(self.host) from error
                logger.debug("The server does not tell %s: %s", key, error)
                known[key] = ""
        return known[key] or default


class ServerLost(BigDLError, RuntimeError):
    """The server of Spark Connect went away, or was restarted, so that the session is gone."""

    code = "cluster-unreachable"

    def __init__(self, host: str):
        super().__init__(
            f"The Spark Connect server at {host} went away or was restarted, and the session with "
            'it; connect again by init_orca_context, and call fit again with resume="auto" to '
            "go on from the newest checkpoint in model_dir"
        )


class ConnectedSession:
    """A session of Spark Connect that Orca made, and what the process was like before."""

    def __init__(self, session: Any, environment: dict[str, str | None]):
        self.session, self._environment = session, environment

    @classmethod
    def connect(
        cls, url: str | None, conf: dict[str, str], previous: ConnectedSession | None
    ) -> ConnectedSession | None:
        """Connect to a server; None if the session that is active can be used.

        Parameters
        ----------
        url : str or None
            Default: that of ``SPARK_REMOTE``.
        conf : dict of str to str
            Settings of the session.
        previous : ConnectedSession or None
            What was connected before: it is used if it is alive, whatever `url` is.

        Raises
        ------
        UsageError
            If there is no server, or it refuses.
        """
        active = connect_session()
        if active is not None:
            if has_server(active) and cls._is_alive(active):
                return None
            logger.warning(
                "The session of Spark Connect is gone, with its server; a new one is made"
            )
            active.release_session_on_close = False  # there is nothing to release
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

        environment = {name: os.environ.get(name) for name in _OF_CONNECT}
        if previous is not None:  # as it was before the first session
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
                f"The Spark Connect server at {host}:{port} refuses: {first_line(error)}",
                code="cluster-refused",
                address=host + ":" + str(port),
            ) from error
        return cls(session, environment)

    @staticmethod
    def _is_alive(session: Any) -> bool:
        try:
            session.conf.get("spark.sql.session.timeZone")
        except Exception as error:
            logger.debug("The session does not answer: %s", error)
            return False
        return True

    def stop(self) -> None:
        """Release the session; does not fail if the server is gone."""
        if not self.session.is_stopped:
            self.session.release_session_on_close = has_server(self.session)
            self.session.stop()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_OF_CONNECT = ("SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE", "SPARK_LOCAL_REMOTE")


def _endpoint(url: str) -> tuple[str, int]:
    """Host and port of a Spark Connect URL."""
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
    """Return True if something listens where the server of a session is."""
    endpoint = getattr(session.client._builder, "endpoint", "")
    host, _, port = str(endpoint).rpartition(":")
    # a channel of the user's own may have none
    return _listens(host.strip("[]"), int(port)) if port.isdigit() else True


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), TASK_CONNECT_S).close()
    except OSError:
        return False
    return True


def active_spark() -> SparkCluster:
    """Describe the active Spark: behind a session of Spark Connect, or a SparkContext.

    Raises
    ------
    UsageError
        If there is none.
    """
    session = connect_session()
    return SparkCluster.from_active() if session is None else ConnectCluster(session)


def active_spark_or_local() -> SparkCluster:
    """Describe the active Spark; start one on this machine if there is none."""
    session = connect_session()
    return SparkCluster.active_or_local() if session is None else ConnectCluster(session)


def explained(frame: Any, extended: bool = False) -> str:
    """The plan of a DataFrame as Spark explains it."""
    return frame._explain_string(extended=extended)


def is_gone(error: BaseException) -> bool:
    """Return True if an error says that the server, or this session of it, is not there."""
    text = str(error)
    # what a job says of its tasks may look alike
    return _OF_JOB.search(text) is None and _GONE.search(text) is not None


_OF_JOB = re.compile(r"Job aborted|Traceback \(most recent call last\)")
_GONE = re.compile(
    r"SESSION_CHANGED|SESSION_NOT_FOUND|SESSION_CLOSED|RESPONSE_ALREADY_RECEIVED|RETRIES_EXCEEDED|"
    r"StatusCode\.UNAVAILABLE|Connection refused|driver instance has restarted|closed channel"
)


# -- bytes -----------------------------------------------------------------------------------------


class ConnectBytes:
    """Bytes that tasks have: in the plan, or if they are many in a file of the session.

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
    """An object that tasks have, as a broadcast gives it.

    Attributes
    ----------
    value : object
    """

    def __init__(self, data: Any):
        self._data = data  # ConnectBytes, or what it is in a task

    @classmethod
    def of(cls, session: Any, value: Any) -> ConnectValue:
        """Share an object with the tasks of a session."""
        return cls(ConnectCluster(session).broadcast(cloudpickle.dumps(value)))

    @functools.cached_property
    def value(self) -> Any:
        return cloudpickle.loads(self._data.value)

    def __reduce__(self):
        return ConnectValue, (self._data,)


class _FileBytes:
    """The bytes of a file of the session, in a task."""

    def __init__(self, name: str):
        self._name = name

    @property
    def value(self) -> bytes:
        from pyspark import SparkFiles

        return Path(SparkFiles.get(self._name)).read_bytes()


@dataclass
class _PlanBytes:
    """Bytes that have come with the plan, in a task."""

    value: bytes


# -- what tasks are asked, by functions that travel by value --------------------------------------


def _looker(file: str) -> Callable[[], dict]:
    def look():
        import importlib.util
        import os

        names = ("bigdl", "cloudpickle", "numpy", "psutil", "torch")
        return {
            "executor": f"{os.uname().nodename}:{os.environ.get('SPARK_LOCAL_DIRS', '')}",
            "sees_file": os.path.exists(file),
            "missing": [name for name in names if importlib.util.find_spec(name) is None],
        }

    return look


def _connector(host: str, port: int) -> Callable[[], bool]:
    patience = TASK_CONNECT_S

    def connect():
        import socket

        try:
            socket.create_connection((host, port), patience).close()
        except OSError:
            return False
        return True

    return connect


def refuse(what: str, instead: str) -> NoReturn:
    """Raise the error of what Spark Connect cannot do."""
    raise UsageError(
        f"{what} does not work over Spark Connect; {instead}", code="unsupported", method=what
    )
