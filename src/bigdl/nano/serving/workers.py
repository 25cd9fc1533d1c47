"""Several processes of one server behind the same ports, and the parent that keeps them.

Each worker is a whole server that listens on the same ports (``SO_REUSEPORT``); the system gives
each connection to one of them.  The parent answers nothing: it starts the workers, starts another
for one that ends, and ends all at SIGTERM after the requests that run.

A worker gives a sign of life as long as its event loops run.  The parent kills one that gives none
for some time and starts another, since half of all clients would wait for it.

Workers know each other by sockets in a folder of their own.  So each can show the metrics of all,
what a client changes at one is changed at all, and a new one learns what the others were told.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, Self

from bigdl.common.checks import MOST_PORT, check_integer, check_number
from bigdl.common.errors import BigDLError, UsageError, one_line, require
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

_PR_SET_PDEATHSIG = 1
_LONGEST_FOLDER = 90  # bytes: it holds sockets, whose paths may have 107


class WorkerStartError(BigDLError, RuntimeError):
    """A worker did not start.

    Examples
    --------
    >>> from bigdl.nano.serving.workers import WorkerStartError
    >>> issubclass(WorkerStartError, RuntimeError)
    True
    """

    code = "worker-lost"


@dataclass(frozen=True)
class ServerWorker:
    """Which of several workers a process is.

    Attributes
    ----------
    number, count : int
    folder : str
        Where the sockets of all workers are.
    ports : dict of str to int
        By their names.
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
    """The messages that a worker and the others exchange.

    Metrics of the service are those of all workers from now on, and what a client changes at its
    repository is changed at all.

    Parameters
    ----------
    worker : ServerWorker
    service : InferenceService
    functions : dict of str to callable, optional
        Further questions by their names; each gets the bytes of one and returns those of an answer.
    """

    def __init__(
        self,
        worker: ServerWorker,
        service: InferenceService,
        functions: Mapping[str, Callable[[bytes], bytes]] | None = None,
    ):
        self.worker = worker
        self._service = service
        own, number = service.metrics, worker.number
        generate_latest = require("prometheus_client", "serving").generate_latest
        self._functions: dict[str, Callable[[bytes], bytes]] = {
            "metrics": lambda _: generate_latest(own.registry),
            "change": self._change,
            "state": self._state,
            **(functions or {}),
        }
        path = self._path(worker.number)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a worker that was killed
        self._listener = Listener(path, "AF_UNIX", backlog=16)
        self._is_open = True
        self._ended = threading.Event()
        threading.Thread(target=self._give_signs, name="sign of life", daemon=True).start()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()
        own.join = lambda text: joined_metrics({number: text, **self.ask("metrics")})
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
        """Change what clients had changed before this worker began."""
        repository = self._service.repository
        for name in repository.names():
            try:
                if name not in state:
                    repository.unload(name)
                elif any(state[name]):
                    repository.set_traffic(name, *state[name])
            except UsageError as error:  # files that changed meanwhile
                logger.warning("The model %s is not as in the other workers: %s", name, error)

    def _path(self, number: int) -> str:
        return os.path.join(self.worker.folder, f"worker-{number}")

    def _listen(self) -> None:
        while self._is_open:
            try:
                with self._listener.accept() as line:
                    name = line.recv_bytes().decode()
                    line.send_bytes(self._functions[name](line.recv_bytes(1 << 20)))
            except (OSError, EOFError):
                continue
            except UsageError as error:
                logger.error("What another worker asked cannot be done: %s", one_line(error))
            except Exception:
                logger.exception("A question of another worker failed")

    def _give_signs(self) -> None:
        """Count up the time of a file while the event loops of this process answer.

        No message is sent: nobody has to wait for a process that is stopped.
        """
        path = _sign_of(self.worker.folder, self.worker.number)
        number = 0
        while True:
            try:
                for loop in list(self._service.loops):
                    _wait_for(loop)
                number += 1
                if not os.path.exists(path):
                    Path(path).touch(0o600)
                os.utime(path, ns=(number, number))
            except RuntimeError:  # a loop that has ended
                pass
            except OSError:  # the folder is gone; then the parent cannot look either
                pass
            if self._ended.wait(SERVING_HEARTBEAT_S):
                return

    def ask(self, name: str, content: bytes = b"") -> dict[int, bytes]:
        """Ask all others; returns the answers of those that are there, by their numbers."""
        answers = {}
        for number in range(self.worker.count):
            if number == self.worker.number:
                continue
            with contextlib.suppress(OSError, EOFError), Client(self._path(number)) as line:
                line.send_bytes(name.encode())
                line.send_bytes(content)
                if line.poll(SIBLING_ANSWER_S):
                    answers[number] = line.recv_bytes()
        return answers

    def close(self) -> None:
        """Take no more questions."""
        self._is_open = False
        self._ended.set()
        for end in (self._listener.close, lambda: os.unlink(self._path(self.worker.number))):
            with contextlib.suppress(FileNotFoundError):  # the folder goes with a killed parent
                end()


def _sign_of(folder: str, number: int) -> str:
    return os.path.join(folder, f"sign-{number}")


def _wait_for(loop: asyncio.AbstractEventLoop) -> None:
    """Return when an event loop of another thread has run."""
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    while not answered.wait(SERVING_HEARTBEAT_S) and not loop.is_closed():
        pass


def joined_metrics(texts: Mapping[int, bytes]) -> bytes:
    """Return the metrics of all workers as one text, each with a label ``worker``.

    Parameters
    ----------
    texts : dict of int to bytes
        Of each worker, in the format of Prometheus.
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
    """The parent of several workers; a context manager that ends them.

    Parameters
    ----------
    command : sequence of str
        What starts a worker, but for ``--worker`` and what it is told behind it.  It prints a line
        that begins with ``ready`` when it answers.
    count : int
    host : str
    ports : dict of str to int
        By their names; 0 takes a free one.
    grace : float
        Seconds that requests have at the end.
    silence : float
        Seconds without a sign of life after which a worker is killed and replaced; 0: never, e.g.
        to stop one by a debugger.

    Attributes
    ----------
    ports : dict of str to int
    ready : str
        What the first worker said behind ``ready``.

    Raises
    ------
    UsageError
        If a port cannot be used.
    WorkerStartError
        If a worker does not start; the others are ended.
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
        self._command, self._count, self._grace = list(command), count, grace
        self._looks = math.ceil(
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
            said = [_wait_ready(each, number) for number, each in enumerate(self._processes)]
            self.ready = said[0]
        except BaseException:
            self.stop()
            raise
        self._keeper = threading.Thread(target=self._keep, name="workers", daemon=True)
        self._keeper.start()

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [each.pid for each in self._processes]

    def _started(self, number: int) -> subprocess.Popen:
        worker = ServerWorker(number, self._count, self._folder.path, self.ports)
        libc = ctypes.CDLL(None)
        parent = os.getpid()

        def end_with_the_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        return subprocess.Popen(
            [*self._command, "--worker", worker.to_json()],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_the_parent,
        )

    def _keep(self) -> None:
        """Start another worker for each that ends.

        The system ends a worker when the thread that started it ends, so it is this one that lasts.
        """
        begun = [time.monotonic()] * self._count
        signs = [_WorkerHeartbeat() for _ in range(self._count)]
        next_look = time.monotonic()
        while not self._ended.wait(0.05):
            is_look = bool(self._looks) and time.monotonic() >= next_look
            if is_look:
                next_look = time.monotonic() + SERVING_HEARTBEAT_S
            for number, process in enumerate(self._processes):
                status = process.poll()
                if status is None and is_look:
                    path = _sign_of(self._folder.path, number)
                    if signs[number].missing(path) >= self._looks:
                        logger.warning(
                            "The worker %s has given no sign of life for %g s; it is killed",
                            number,
                            self._looks * SERVING_HEARTBEAT_S,
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
                signs[number] = _WorkerHeartbeat()
                with contextlib.suppress(OSError):
                    os.unlink(_sign_of(self._folder.path, number))
                self._processes[number] = self._started(number)
                begun[number] = time.monotonic()

    def stop(self) -> None:
        """Let the workers answer what was asked, and end them."""
        self._ended.set()
        keeper = getattr(self, "_keeper", None)
        if keeper is not None:
            keeper.join()
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
    """Signs of life that the parent has seen of a worker.

    Looks are counted, not seconds: where the parent itself was stopped it must blame no worker.
    """

    def __init__(self) -> None:
        self._last, self._missing = 0, 0

    def missing(self, path: str) -> int:
        """Look once more; return how many looks have passed since the last sign, 0 before one."""
        try:
            sign = os.stat(path).st_mtime_ns
        except OSError:  # it starts, or somebody has removed the folder
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
    """Return a socket that holds a port for the workers; it does not listen."""
    check_integer(name, port, 0, MOST_PORT)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port:  # one that somebody else shares with SO_REUSEPORT is refused here
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        holder = socket.socket(family)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"{name}: {host}:{port} cannot be used: {error}", code="address-unusable", address=host
        ) from None
    return holder
