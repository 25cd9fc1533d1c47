"""Engines, which run a model's rows: in this process, or in one process that tasks share.

The first task of an executor starts the process of the engine, and all tasks connect to its Unix
socket, in a folder that only this user can enter. Both sides prove that they know the key in that
folder. The engine ends when its last client has disconnected, also if clients are killed. If the
engine dies, a client starts it again and repeats its unfinished rows only. Rows that were running
at two deaths move to a private engine and are divided in halves, until the row that kills the
engine is alone; that row gets an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Protocol

from bigdl.common.cpu import THREAD_VARIABLES, passive_waiting, usable_cores
from bigdl.common.errors import UsageError, one_line
from bigdl.common.platform.network import (
    disconnect,
    local_client,
    local_listener,
    short_folder,
)
from bigdl.common.platform.processes import parent_id
from bigdl.common.private_folders import SharedFolder, private_root
from bigdl.common.timeouts import ENGINE_IDLE_S, ENGINE_LOOK_S, ENGINE_START_S
from bigdl.llm.facts import GENERATE
from bigdl.llm.sent_files import SentFiles, has_model
from bigdl.runtime.messages import encode, opened, receive, send

logger = logging.getLogger("bigdl.llm")

Deliver = Callable[[Sequence[int], Sequence[Any], Sequence[str | None]], None]
"""Receives indices of finished rows, their values, and the error of each row or None."""

_DEATHS = 2  # deaths of an engine that a row may see before it is suspected
_PROGRAM = """\
import ast, sys
sys.path[:] = dict.fromkeys([*ast.literal_eval(sys.argv[1]), *sys.path])
from bigdl.llm.engine import serve
serve(sys.argv[2])
"""


class Runner(Protocol):
    """A loaded model that computes rows."""

    def start(self, items: Sequence[Any], options: Mapping[str, Any], deliver: Deliver) -> None:
        """Compute rows, now or later, and deliver each of them once."""

    def cancel(self, deliver: Deliver) -> None:
        """Forget the rows that would be delivered to `deliver`."""


def load_runner(path: Path, facts: dict[str, Any], threads: int) -> Runner:
    """Load the runner of a converted folder."""
    if facts["task"] == GENERATE:
        from bigdl.llm.generator import Generator

        return Generator(path, facts, threads)
    from bigdl.llm.encoder import TextEncoder

    return TextEncoder(path, facts, threads)


def start_rows(
    runner: Runner, items: Sequence[Any], options: Mapping[str, Any], deliver: Deliver
) -> None:
    """Start rows; if a runner raises, divide them until the row that it cannot compute is alone."""
    try:
        runner.start(items, options, deliver)
    except Exception as error:
        if len(items) == 1:
            deliver([0], [None], [one_line(error)])
            return
        middle = len(items) // 2
        for low, part in ((0, items[:middle]), (middle, items[middle:])):
            start_rows(runner, part, options, _shifted(deliver, low))


def _shifted(deliver: Deliver, low: int) -> Deliver:
    return lambda rows, *parts: deliver([low + row for row in rows], *parts)


@dataclass(frozen=True)
class ModelReference:
    """Picklable reference to the converted files of a model.

    Attributes
    ----------
    path : str
    facts : dict
    threads : int
        Threads of the shared engine, 0 to load the model in this process.
    files : SentFiles, optional
        The files, for machines that do not have them.
    """

    path: str
    facts: dict[str, Any]
    threads: int = 0
    files: SentFiles | None = field(default=None, compare=False)

    def on_this_machine(self) -> ModelReference:
        """Return the reference with a folder that this machine can read."""
        digest = str(self.facts["digest"])
        if self.files is None or has_model(Path(self.path), digest):
            return self
        return replace(self, path=str(self.files.write(digest)), files=None)

    def engine(self) -> LoadedEngine | SharedEngine:
        """Return the engine, which is created at the first call of this process."""
        key = os.getpid(), str(self.facts["digest"]), self.threads
        with _engines_lock:
            if key not in _engines:
                make = SharedEngine if self.threads else LoadedEngine
                _engines[key] = make(self.on_this_machine())
            return _engines[key]


_engines: dict[tuple[int, str, int], Any] = {}
_engines_lock = threading.Lock()


@dataclass
class _Rows:
    """Rows of one call: their items, and the values and errors that have arrived."""

    items: list[Any]
    options: Mapping[str, Any]
    values: list[Any] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    deaths: int = 0
    arrived: Deliver | None = None

    def __post_init__(self) -> None:
        self.values, self.errors = [None] * len(self.items), [None] * len(self.items)
        self.missing = set(range(len(self.items)))

    def store(
        self, rows: Sequence[int], values: Sequence[Any], errors: Sequence[str | None]
    ) -> None:
        """Store delivered rows."""
        for row, value, error in zip(rows, values, errors, strict=True):
            self.values[row], self.errors[row] = value, error
        if self.arrived is not None:
            self.arrived(rows, values, errors)
        self.missing.difference_update(rows)

    def result(self) -> tuple[list[Any], list[str | None]]:
        return self.values, self.errors


class LoadedEngine:
    """A model loaded in this process."""

    def __init__(self, reference: ModelReference):
        self._runner = load_runner(Path(reference.path), reference.facts, len(usable_cores()))

    def submit(
        self, items: list, options: Mapping[str, Any], arrived: Deliver | None = None
    ) -> Callable[[], tuple[list, list]]:
        """Start rows; return a function that waits for their values and errors.

        Parts of them are passed to `arrived` when they are finished.
        """
        rows, done = _Rows(items, options, arrived=arrived), threading.Event()

        def deliver(
            done_rows: Sequence[int], values: Sequence[Any], errors: Sequence[str | None]
        ) -> None:
            rows.store(done_rows, values, errors)
            if not rows.missing:
                done.set()

        if items:
            start_rows(self._runner, items, options, deliver)

        def wait() -> tuple[list, list]:
            if items:
                done.wait()
            return rows.result()

        return wait


# -- the client ------------------------------------------------------------------------------------


class SharedEngine:
    """Connection of this process to the engine that it shares with its siblings.

    Parameters
    ----------
    reference : ModelReference
    private : bool
        Use an engine that no other process uses.
    """

    def __init__(self, reference: ModelReference, private: bool = False):
        self._reference, self._private = reference, private
        self._token = secrets.token_hex(8) if private else str(parent_id())
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._folder: SharedFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: dict[int, _Rows] = {}
        self._number = 0

    @property
    def process_id(self) -> int | None:
        """Id of the engine's process, if this process has started it."""
        return None if self._process is None else self._process.pid

    def submit(
        self, items: list, options: Mapping[str, Any], arrived: Deliver | None = None
    ) -> Callable[[], tuple[list, list]]:
        """Start rows; return a function that waits for their values and errors.

        Parts of them are passed to `arrived` when they are finished.
        """
        rows = _Rows(items, options, arrived=arrived)
        with self._lock:
            self._number += 1
            number = self._number
            if items:
                self._calls[number] = rows
                self._send(number)
        return lambda: self._wait(number, rows)

    def close(self) -> None:
        """Disconnect; the engine ends if nobody else uses it."""
        with self._lock:
            if self._connection is not None:
                disconnect(self._connection)
                self._connection = None
            if self._folder is not None:
                self._folder.close()
                self._folder = None
            if self._process is not None:
                self._process.poll()  # reaps it if it has ended

    def _send(self, number: int) -> None:
        """Send the missing rows of a call; a broken connection is noticed when it is read."""
        rows = self._calls[number]
        missing = sorted(rows.missing)
        connection = self._connected()
        message = encode((number, missing, [rows.items[row] for row in missing], rows.options))
        try:
            send(connection, message)
        except OSError:
            pass
        finally:
            message.close()

    def _wait(self, number: int, rows: _Rows) -> tuple[list, list]:
        with self._lock:
            while rows.missing:
                try:
                    arrived, *parts = opened(receive(self._connected()))
                except (EOFError, OSError):
                    self._restart()
                    continue
                if arrived in self._calls:
                    self._calls[arrived].store(*parts)
            self._calls.pop(number, None)
        return rows.result()

    def _restart(self) -> None:
        """Repeat all missing rows in a new engine, those that may kill it in a private one."""
        self.close()
        logger.warning("The engine of %s ended; it is started again", self._reference.path)
        for rows in self._calls.values():
            rows.deaths += bool(rows.missing)
            if rows.deaths >= _DEATHS:
                self._isolate(rows)
        for number in self._calls:
            self._send(number)

    def _isolate(self, rows: _Rows) -> None:
        """Compute the missing rows of a call in private engines, in halves after each death."""
        groups = [sorted(rows.missing)]
        while groups:
            group = groups.pop()
            engine = SharedEngine(self._reference, private=True)
            try:
                part = engine._once([rows.items[row] for row in group], rows.options)
            finally:
                engine.close()
            done = [index for index in range(len(group)) if index not in part.missing]
            rows.store(
                [group[i] for i in done],
                [part.values[i] for i in done],
                [part.errors[i] for i in done],
            )
            lost = [group[index] for index in sorted(part.missing)]
            if len(lost) == 1 and len(group) == 1:
                rows.store(lost, [None], ["the engine ended while it computed this row"])
            elif lost:
                middle = (len(lost) + 1) // 2
                groups += [half for half in (lost[middle:], lost[:middle]) if half]

    def _once(self, items: list, options: Mapping[str, Any]) -> _Rows:
        """Run rows until they are finished or the engine ends."""
        self._calls[0] = rows = _Rows(items, options)
        self._send(0)
        with contextlib.suppress(EOFError, OSError):
            while rows.missing:
                rows.store(*opened(receive(self._connected()))[1:])
        return rows

    # -- connections -------------------------------------------------------------------------------

    def _connected(self) -> Connection:
        """Return the connection; start the engine if no process has started it."""
        if self._connection is None:
            self._folder = SharedFolder(self._path())
            deadline = time.monotonic() + ENGINE_START_S
            while self._connection is None:
                with self._folder.writing():
                    connection = self._try_connect()
                    while connection is None:
                        process = self._start()
                        while connection is None and process.poll() is None:
                            self._check_start(deadline)
                            time.sleep(ENGINE_LOOK_S)
                            connection = self._try_connect()
                        self._check_start(deadline)
                self._connection = self._greeted(connection)
                self._check_start(deadline)
        return self._connection

    def _path(self) -> str:
        spec = [self._reference.facts["digest"], self._reference.threads, self._token]
        code = [sys.prefix, str(Path(__file__).parent)]
        name = hashlib.blake2b(repr([spec, code]).encode(), digest_size=8).hexdigest()
        return os.path.join(private_root(short_folder()), f"engine-{name[:8]}.{name[8:]}")

    def _try_connect(self) -> Connection | None:
        try:
            return local_client(os.path.join(self._path(), "socket"))
        except OSError:
            return None

    def _greeted(self, connection: Connection) -> Connection | None:
        """Authenticate the connection; None if the engine ended before its greeting."""
        key = Path(self._path(), "key").read_bytes()
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            if connection.poll(ENGINE_START_S) and connection.recv_bytes() == b"ready":
                return connection
        except (EOFError, OSError):
            pass
        disconnect(connection)
        return None

    def _check_start(self, deadline: float) -> None:
        """Raise an error if the engine reported one, or does not start in time."""
        report = Path(self._path(), "error")
        if report.exists():
            message = report.read_text(encoding="utf-8")
            raise UsageError(
                f"The engine of {self._reference.path!r} cannot start: {message}",
                code="model-unsupported",
            )
        if time.monotonic() > deadline:
            raise UsageError(
                f"The engine of {self._reference.path!r} did not start in {ENGINE_START_S:.0f} s; "
                f"see {self._path()}/log",
                code="resource-limit",
            )

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process of the engine; the caller holds the lock of the folder."""
        folder = self._path()
        for name in ("error", "socket"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        descriptor = os.open(
            os.path.join(folder, "key"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
        )
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        threads = self._reference.threads
        settings = [folder, self._reference.path, self._reference.facts, threads]
        removed = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "BIGDL_SCRATCH_DIR")
        env = {name: value for name, value in os.environ.items() if name not in removed}
        env |= {**dict.fromkeys(THREAD_VARIABLES, str(threads)), **passive_waiting(env)}
        paths = repr([path for path in sys.path if isinstance(path, str)])
        with open(os.path.join(folder, "log"), "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, paths, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                cwd=folder,
            )
        return self._process


# -- the server ------------------------------------------------------------------------------------


def serve(settings: str) -> None:
    """Run an engine until its last client has disconnected; the program of its process."""
    folder, path, facts, threads = json.loads(settings)
    shared = SharedFolder(folder)
    key = Path(folder, "key").read_bytes()
    listener = local_listener(os.path.join(folder, "socket"), 128)
    server = _Server(key)
    code = 0
    try:
        server.runner = load_runner(Path(path), facts, threads)
        threading.Thread(target=server.accept, args=(listener,), daemon=True).start()
        server.wait()
    except BaseException as error:
        code = 1
        Path(folder, "error").write_text(one_line(error), encoding="utf-8")
        raise
    finally:
        with contextlib.suppress(OSError), shared.writing():
            listener.close()
        shared.close()
        sys.stderr.flush()
        if not code:
            os._exit(0)  # without the slow destructors of the runtime


class _Server:
    """Connections of an engine."""

    def __init__(self, key: bytes):
        self.runner: Any = None
        self._key = key
        self._clients = 0
        self._last = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until there was no client for a while; the first one connected before the start."""
        self._last = time.monotonic()
        while True:
            time.sleep(ENGINE_LOOK_S)
            with self._lock:
                if not self._clients and time.monotonic() - self._last > ENGINE_IDLE_S:
                    return

    def accept(self, listener: Listener) -> None:
        """Accept connections until the process ends."""
        while True:
            try:
                connection = listener.accept()
            except OSError:
                return
            with self._lock:
                self._clients += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        sending = threading.Lock()
        deliveries: list[Deliver] = []
        # Rows are read at once, or both sides could wait for each other with full buffers.
        worker = ThreadPoolExecutor(1, "bigdl-rows")
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            connection.send_bytes(b"ready")
            while True:
                number, rows, items, options = opened(receive(connection))
                deliver = _delivery(connection, sending, number, rows)
                deliveries.append(deliver)
                worker.submit(start_rows, self.runner, items, options, deliver)
        except (EOFError, OSError):
            pass
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
            for deliver in deliveries:
                self.runner.cancel(deliver)
            connection.close()
            with self._lock:
                self._clients -= 1
                self._last = time.monotonic()


def _delivery(
    connection: Connection, sending: threading.Lock, number: int, rows: Sequence[int]
) -> Deliver:
    """Return a function that sends finished rows of a call to its client."""

    def deliver(
        indices: Sequence[int], values: Sequence[Any], errors: Sequence[str | None]
    ) -> None:
        message = encode((number, [rows[index] for index in indices], values, list(errors)))
        try:
            with sending, contextlib.suppress(OSError, ValueError):  # the client has left
                send(connection, message)
        finally:
            message.close()

    return deliver
