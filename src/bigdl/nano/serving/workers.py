"""Worker processes of one server that share its ports, and the parent that supervises them.

Each worker is a complete server that listens on the same ports (``SO_REUSEPORT``); the kernel
distributes the connections.  The parent answers no requests.  It starts the workers, replaces those
that end, and stops all of them at SIGTERM after the running requests.

A worker updates a heartbeat file as long as its event loops respond.  The parent kills and replaces
a worker whose heartbeat stops, because its share of the clients would wait for it.

Workers talk to each other through Unix sockets in a private folder.  So each worker can report the
metrics of all, forward changes by a client to all, and bring a new worker up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bigdl.common.checks import MOST_PORT, check_integer, check_number, check_supported
from bigdl.common.errors import BigDLError, UsageError, one_line, require
from bigdl.common.platform.network import can_share_ports, local_client, local_listener, share_port
from bigdl.common.platform.processes import start_bound
from bigdl.common.private_folders import LockedFolder
from bigdl.common.timeouts import (
    SERVING_HEARTBEAT_S,
    SIBLING_ANSWER_S,
    SILENCE_S,
    WORKER_END_S,
    WORKER_PAUSE_S,
)
from bigdl.nano.serving.service import InferenceService

logger = logging.getLogger(__name__)

_LONGEST_FOLDER = 90  # bytes: socket paths in the folder may have at most 107


class WorkerStartError(BigDLError, RuntimeError):
    """Exception raised when a worker process does not start.

    Examples
    --------
    >>> from bigdl.nano.serving.workers import WorkerStartError
    >>> issubclass(WorkerStartError, RuntimeError)
    True
    """

    code = "worker-lost"


@dataclass(frozen=True)
class ServerWorker:
    """Identity of a worker process: its number, the number of workers, and their shared ports.

    Attributes
    ----------
    number, count : int
    folder : str
        Folder of the workers' sockets and heartbeat files.
    ports : dict of str to int
        Ports by name.
    """

    number: int
    count: int
    folder: str
    ports: dict[str, int]

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> ServerWorker:
        return cls(**json.loads(text))


class PeerWorkers:
    """Connection through which a worker exchanges messages with the server's other workers.

    From now on the service reports the metrics of all workers, and a change by a client is made in
    all workers.

    Parameters
    ----------
    worker : ServerWorker
    service : InferenceService
    functions : dict of str to callable, optional
        Further request handlers by name; each maps the bytes of a request to those of a reply.
    """

    def __init__(
        self,
        worker: ServerWorker,
        service: InferenceService,
        functions: Mapping[str, Callable[[bytes], bytes]] | None = None,
    ):
        self.worker = worker
        self._service = service
        metrics, number = service.metrics, worker.number
        generate_latest = require("prometheus_client", "serving").generate_latest
        self._functions: dict[str, Callable[[bytes], bytes]] = {
            "metrics": lambda _: generate_latest(metrics.registry),
            "change": self._change,
            "state": self._state,
            **(functions or {}),
        }
        self._listener = local_listener(self._path(worker.number), backlog=16)
        self._is_open = True
        self._ended = threading.Event()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()
        metrics.join = lambda text: joined_metrics({number: text, **self.ask("metrics")})
        service.changed = lambda *change: self.ask("change", json.dumps(change).encode())
        for state in self.ask("state").values():
            self._take_over(json.loads(state))
            break

    def _change(self, content: bytes) -> bytes:
        name, *arguments = json.loads(content)
        getattr(self._service.repository, name)(*arguments)
        return b""

    def _state(self, _: bytes) -> bytes:
        repository = self._service.repository
        traffic = {name: repository.traffic(name) for name in repository.names()}
        return json.dumps(
            {name: [dict(each.shares), each.shadow] for name, each in traffic.items()}
        ).encode()

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Apply the model changes that clients made before this worker started."""
        repository = self._service.repository
        for name in repository.names():
            try:
                if name not in state:
                    repository.unload(name)
                elif any(state[name]):
                    repository.set_traffic(name, *state[name])
            except UsageError as error:  # the files have changed
                logger.warning("The model %s differs from the other workers': %s", name, error)

    def _path(self, number: int) -> str:
        return os.path.join(self.worker.folder, f"worker-{number}")

    def _listen(self) -> None:
        while self._is_open:
            try:
                with self._listener.accept() as connection:
                    name = connection.recv_bytes().decode()
                    connection.send_bytes(self._functions[name](connection.recv_bytes(1 << 20)))
            except (OSError, EOFError):
                continue
            except UsageError as error:
                logger.error("A change from another worker was refused: %s", one_line(error))
            except Exception:
                logger.exception("A request from another worker failed")

    def _send_heartbeats(self) -> None:
        """Update the heartbeat file while the event loops of this process respond.

        The heartbeat is the file's modification time, so a stopped process blocks no sender.
        """
        path = _heartbeat_file(self.worker.folder, self.worker.number)
        number = 0
        while True:
            try:
                for loop in list(self._service.loops):
                    _wait_for(loop)
                number += 1
                if not os.path.exists(path):
                    Path(path).touch(0o600)
                os.utime(path, ns=(number, number))
            except RuntimeError:  # the loop has ended
                pass
            except OSError:  # the folder is gone; the parent cannot check the heartbeat either
                pass
            if self._ended.wait(SERVING_HEARTBEAT_S):
                return

    def ask(self, name: str, content: bytes = b"") -> dict[int, bytes]:
        """Send a request to all other workers and return the replies by worker number."""
        replies = {}
        for number in range(self.worker.count):
            if number == self.worker.number:
                continue
            with contextlib.suppress(OSError, EOFError), local_client(self._path(number)) as peer:
                peer.send_bytes(name.encode())
                peer.send_bytes(content)
                if peer.poll(SIBLING_ANSWER_S):
                    replies[number] = peer.recv_bytes()
        return replies

    def close(self) -> None:
        """Stop answering requests from the other workers."""
        self._is_open = False
        self._ended.set()
        for end in (self._listener.close, lambda: os.unlink(self._path(self.worker.number))):
            with contextlib.suppress(FileNotFoundError):  # a killed parent takes the folder with it
                end()


def _heartbeat_file(folder: str, number: int) -> str:
    return os.path.join(folder, f"sign-{number}")


def _wait_for(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until an event loop in another thread has run a callback."""
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    while not answered.wait(SERVING_HEARTBEAT_S) and not loop.is_closed():
        pass


def joined_metrics(texts: Mapping[int, bytes]) -> bytes:
    """Merge the metrics of all workers into one text, each sample with a label ``worker``.

    Parameters
    ----------
    texts : dict of int to bytes
        Each worker's metrics in the Prometheus text format.
    """
    parser = require("prometheus_client.parser", "serving")
    core = require("prometheus_client.core", "serving")
    families: dict[str, Any] = {}
    for number, text in sorted(texts.items()):
        for family in parser.text_string_to_metric_families(text.decode()):
            known = families.setdefault(
                family.name, core.Metric(family.name, family.documentation, family.type)
            )
            for each in family.samples:
                labels = {**each.labels, "worker": str(number)}
                known.add_sample(each.name, labels, each.value, each.timestamp)

    class Joined:
        def collect(self) -> Iterable[object]:
            return families.values()

    return require("prometheus_client", "serving").generate_latest(Joined())


class Workers:
    """Parent of the worker processes; a context manager that stops them on exit.

    Parameters
    ----------
    command : sequence of str
        Command that starts a worker, without ``--worker`` and its value. The worker prints a line
        that begins with ``ready`` when it accepts requests.
    count : int
        Number of workers.
    host : str
    ports : dict of str to int
        Ports by name; 0 takes a free port.
    grace : float
        Seconds that running requests have at shutdown.
    silence : float
        Seconds without a heartbeat after which a worker is killed and replaced. 0 disables it, e.g.
        to stop a worker in a debugger.

    Attributes
    ----------
    ports : dict of str to int
        Ports by name, with the chosen free ports.
    ready : str
        Text after ``ready`` in the first worker's line.

    Raises
    ------
    UsageError
        If a port cannot be used.
    WorkerStartError
        If a worker does not start; the others are stopped.
    """

    ready = ""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        host: str,
        ports: Mapping[str, int],
        grace: float,
        silence: float = SILENCE_S,
    ):
        check_supported("several processes of a server", can_share_ports())
        self._command, self._count, self._grace = list(command), count, grace
        self._checks = math.ceil(
            check_number("The worker timeout", silence, 0) / SERVING_HEARTBEAT_S
        )
        self._ended = threading.Event()
        self._reserved: list[socket.socket] = []
        self._processes: list[subprocess.Popen] = []
        self._folder = LockedFolder("workers", longest=_LONGEST_FOLDER)
        self.ports: dict[str, int] = {}
        try:
            for key, port in ports.items():
                self._reserved.append(_reserved(host, port, key))
                self.ports[key] = self._reserved[-1].getsockname()[1]
            self._processes = [self._started(number) for number in range(count)]
            lines = [_wait_ready(each, number) for number, each in enumerate(self._processes)]
            self.ready = lines[0]
        except BaseException:
            self.stop()
            raise
        self._supervisor = threading.Thread(target=self._supervise, name="workers", daemon=True)
        self._supervisor.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [each.pid for each in self._processes]

    def _started(self, number: int) -> subprocess.Popen:
        worker = ServerWorker(number, self._count, self._folder.path, self.ports)
        return start_bound([*self._command, "--worker", worker.to_json()], signal.SIGTERM)

    def _supervise(self) -> None:
        """Replace workers that exit or whose heartbeat stops.

        The kernel ends a worker together with the thread that started it, so this thread runs until
        :meth:`stop`.
        """
        begun = [time.monotonic()] * self._count
        heartbeats = [_WorkerHeartbeat() for _ in range(self._count)]
        next_check = time.monotonic()
        while not self._ended.wait(0.05):
            is_check = bool(self._checks) and time.monotonic() >= next_check
            if is_check:
                next_check = time.monotonic() + SERVING_HEARTBEAT_S
            for number, process in enumerate(self._processes):
                status = process.poll()
                if status is None and is_check:
                    path = _heartbeat_file(self._folder.path, number)
                    if heartbeats[number].missing(path) >= self._checks:
                        logger.warning(
                            "The worker %s has sent no heartbeat for %g s; killing it",
                            number,
                            self._checks * SERVING_HEARTBEAT_S,
                        )
                        process.kill()
                        status = process.wait()
                if status is None or self._ended.is_set():
                    continue
                logger.warning("The worker %s ended with %s; another is started", number, status)
                lived = time.monotonic() - begun[number]
                if lived < 2 * WORKER_PAUSE_S and self._ended.wait(WORKER_PAUSE_S):
                    return
                if process.stdout is not None:
                    process.stdout.close()
                heartbeats[number] = _WorkerHeartbeat()
                with contextlib.suppress(OSError):
                    os.unlink(_heartbeat_file(self._folder.path, number))
                self._processes[number] = self._started(number)
                begun[number] = time.monotonic()

    def stop(self) -> None:
        """Stop the workers after their running requests have finished."""
        self._ended.set()
        supervisor = getattr(self, "_supervisor", None)
        if supervisor is not None:
            supervisor.join()
        for process in self._processes:
            process.terminate()
        end = time.monotonic() + self._grace + WORKER_END_S
        for process in self._processes:
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for each in self._reserved:
            each.close()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class _WorkerHeartbeat:
    """The parent's record of a worker's heartbeat.

    It counts checks, not seconds, so that a pause of the parent itself kills no worker.
    """

    def __init__(self) -> None:
        self._last, self._missing = 0, 0

    def missing(self, path: str) -> int:
        """Check the heartbeat file; return the number of checks since its last change."""
        try:
            sign = os.stat(path).st_mtime_ns
        except OSError:  # the worker is starting, or the folder was removed
            self._missing = 0
            return 0
        self._missing = 0 if sign != self._last else self._missing + 1
        self._last = sign
        return self._missing


def _wait_ready(process: subprocess.Popen, number: int) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            return line.removeprefix("ready").strip()
    raise WorkerStartError(f"The worker {number} did not start and ended with {process.wait()}")


def _reserved(host: str, port: int, name: str) -> socket.socket:
    """Return a bound socket that reserves a port for the workers without listening."""
    check_integer(name, port, 0, MOST_PORT)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port:  # refuse a port that another program shares with SO_REUSEPORT
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        holder = socket.socket(family)
        share_port(holder)
        holder.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"{name}: {host}:{port} cannot be used: {error}", code="address-unusable", address=host
        ) from None
    return holder
