"""A worker's view of its job, its connection to the driver, and its heartbeat thread."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from bigdl.common.errors import UsageError
from bigdl.common.platform.processes import kill_self
from bigdl.common.timeouts import COLLECTIVE_S, HEARTBEAT_S, PULSE_S

if TYPE_CHECKING:
    from bigdl.runtime.channel import AttemptChannel


@dataclass(eq=False)
class Worker:
    """A worker process as the user's program sees it: rank, threads, shards and channel.

    Attributes
    ----------
    rank : int
        0 ... `world_size` - 1.
    world_size : int
        Number of workers.
    threads : int
        Threads of this worker; already set in torch and OpenMP.
    shards : dict of str to Shard
        This worker's rows of every feed, by feed name.
    options : dict
        The driver's options for this attempt.
    host : str
        IP address of this worker on the route to the driver.
    local_dir : str
        Local directory that is removed with the application.
    driver : DriverConnection
        Connection to the driver.
    timeout : float
        Seconds after which a collective that makes no progress fails.
    channel : bigdl.runtime.channel.AttemptChannel
        Keys that all workers of this attempt share. None in processes that no engine runs: they are
        in a process group before the program begins.
    may_leave : bool
        Whether the cluster can announce decommissioned machines, see :meth:`is_leaving`.
    certificate : bigdl.runtime.certificate.Certificate or None
        Certificate for traffic between workers, if the cluster requires encryption.
    began_at : float
        When the task began, in seconds since 1970.
    read_s : float
        Seconds that the task took to read its input, before the program began.
    group : int
        For a replacement of a lost worker, number of the group that it joins; otherwise 0.
    shards_of_ranks : list of dict
        For a replacement of a lost worker, the shards of every rank; None if they are elsewhere.
    """

    rank: int
    world_size: int
    _: KW_ONLY
    threads: int = 1
    shards: dict[str, Any] = field(default_factory=dict)
    channel: Any = None
    driver: DriverConnection = field(default_factory=lambda: DriverConnection(), repr=False)
    host: str = "127.0.0.1"
    local_dir: str = ""
    timeout: float = COLLECTIVE_S
    certificate: Any = field(default=None, repr=False)
    may_leave: bool = False
    began_at: float = field(default_factory=time.time)
    read_s: float = 0.0
    group: int = 0
    shards_of_ranks: list[dict[str, Any] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options = self.driver.options
        self._cleanups: list[Callable[[], None]] = []
        self._cleaner: threading.Thread | None = None

    @property
    def line(self) -> Any:  # the AttemptChannel of a job, which few programs need
        """Former name of `channel`."""
        return self.channel

    @property
    def shard(self) -> Any:  # a Shard if the job has a feed
        """The shard of the only feed, or None if there is no feed."""
        return next(iter(self.shards.values()), None)

    def is_leaving(self) -> bool:
        """Return True if the driver reports that a worker's machine is being decommissioned."""
        return self.may_leave and self.channel.has("leave")

    def state(self) -> bytes | None:
        """Return the `state` bytes that the driver passed to this attempt; for rank 0 only."""
        return self.driver.state()

    def progress(self, **values: object) -> None:
        """Record the program's progress; the next heartbeat sends it to the driver."""
        self.driver.note_progress(values)

    def send(self, topic: str, doc: dict[str, Any], data: bytes) -> None:
        """Send a message to the driver's ``on_event`` without waiting for its delivery."""
        self.driver.send({"topic": topic, "rank": self.rank, **doc}, data)

    def at_exit(self, cleanup: Callable[[], None]) -> None:
        """Register `cleanup` to run when the program ends or fails, before any error report.

        A process group must be destroyed here: while it is open, the peers of a failed worker stay
        blocked in their collective.
        """
        self._cleanups.append(cleanup)

    def clean_up(self, patience: float | None = None) -> None:
        """Run the registered clean-up functions; stop waiting after `patience` seconds.

        Destroying a process group waits for running collectives, which may wait for a peer.
        """
        if self._cleaner is None:
            self._cleaner = threading.Thread(target=self._clean_up, daemon=True)
            self._cleaner.start()
        self._cleaner.join(patience)

    def _clean_up(self) -> None:
        while self._cleanups:
            with contextlib.suppress(Exception):
                self._cleanups.pop()()
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available():
            with contextlib.suppress(Exception):
                if distributed.is_initialized():  # the program left it open
                    distributed.destroy_process_group()


RESULT_LIMIT = 2 << 30  # maximum bytes of one value that is sent to the driver


@dataclass
class DriverConnection:
    """A worker's connection to the driver for one attempt, which keeps all messages in memory.

    Subclasses send messages and results to the driver.

    Attributes
    ----------
    options : dict
        The driver's options of this attempt.
    initial_state : bytes or None
        The driver's bytes for rank 0, if they are already here.
    progress : dict or None
        The latest progress values of the program.
    messages : dict of str to tuple of (dict, bytes)
        The latest message of each topic, in order of arrival.
    result : tuple of (format, bytes) or None
        See :func:`encode`.
    error : dict or None
        The exception that the program raised; see :func:`~bigdl.runtime.task.describe`.
    """

    options: dict[str, Any] = field(default_factory=dict)
    initial_state: bytes | None = None
    progress: dict[str, Any] | None = None
    messages: dict[str, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    result: tuple[str, bytes] | None = None
    error: dict[str, Any] | None = None

    def state(self) -> bytes | None:
        """Return the `state` bytes that the driver passed to this attempt, for rank 0."""
        return self.initial_state

    def note_progress(self, values: dict[str, Any]) -> None:
        """Record progress values of the program."""
        self.progress = values

    def send(self, doc: dict[str, Any], data: bytes) -> None:
        """Record a message of the program; it replaces the last message of its topic."""
        self.messages.pop(doc["topic"], None)
        self.messages[doc["topic"]] = doc, data

    def send_result(self, rank: int, format: str, data: bytes) -> None:
        """Record the result of the program."""
        self.result = format, data

    def report_failing(self) -> int:
        """Report that this worker is failing; return the number of failed workers so far.

        Call this before the clean-up. The clean-up breaks the collectives of the other workers,
        which then fail, too: the error of the first worker is the cause.
        """
        return 1

    def report(self, doc: dict[str, Any]) -> None:
        """Record the exception that the program raised."""
        self.error = doc


class ChannelConnection(DriverConnection):
    """A connection to the driver that sends every message over the channel immediately."""

    def __init__(self, channel: AttemptChannel):
        super().__init__(channel.get_json("options"))
        self._channel = channel

    def state(self) -> bytes | None:
        has_state = self._channel.has("state")
        return self._channel.take_bytes("state", delete=False) if has_state else None

    def send(self, doc: dict[str, Any], data: bytes) -> None:
        check_size("message", data)
        self._channel.push("messages", doc, data)

    def send_result(self, rank: int, format: str, data: bytes) -> None:
        self._channel.put_bytes(f"result/{rank}", data)
        self._channel.set(f"result/{rank}/kind", format)

    def report_failing(self) -> int:
        return self._channel.count("failed", 1)

    def report(self, doc: dict[str, Any]) -> None:
        self._channel.push("errors", doc)


def encode(result: object) -> tuple[str, bytes]:
    """Serialize a program's result to bytes; return the format and the bytes."""
    if isinstance(result, bytes | bytearray | memoryview):
        format, data = "bytes", bytes(result)
    else:
        try:
            format, data = "json", json.dumps(result).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(
                "A program run by an engine must return bytes or JSON-serializable values, got "
                f"{type(result).__name__} ({error})",
                code="function-result",
            ) from None
    check_size("result", data)
    return format, data


def decode(format: str, data: bytes) -> Any:  # bytes, or a JSON value
    """Deserialize a result that :func:`encode` serialized."""
    return data if format == "bytes" else json.loads(data)


def check_size(what: str, data: bytes) -> None:
    """Raise a UsageError if a message or result is too large for the driver."""
    if len(data) > RESULT_LIMIT:
        raise UsageError(
            f"The {what} of {len(data) >> 20} MB is too large to come back through the driver "
            f"(limit {RESULT_LIMIT >> 20} MB); pass model_dir= so that it is written there",
            code="data-size",
        )


_LINES = 10_000  # maximum buffered lines until the next heartbeat
_PART = 1 << 16  # maximum characters of a buffered partial line


class HeartbeatThread(threading.Thread):
    """Thread that sends heartbeats and logs, and ends the process on abort or driver loss.

    Only the end of the process interrupts a thread that is blocked in a collective.

    Parameters
    ----------
    channel : AttemptChannel
        A separate connection to the channel for this thread.
    task_index : int
        Index of the task.
    worker : Worker
        Its driver connection has the progress.
    log : CapturedOutput
    """

    def __init__(
        self, channel: AttemptChannel, task_index: int, worker: Worker, log: CapturedOutput
    ):
        super().__init__(name="bigdl-watcher", daemon=True)
        self._channel, self._task_index, self._worker, self._log = channel, task_index, worker, log
        self._stopping = threading.Event()
        self._flushing = threading.Lock()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._channel.has("abort", seconds=HEARTBEAT_S):
                    self._exit()
                if self._channel.has(f"disturb/{self._task_index}"):
                    disturb(self._channel.get_json(f"disturb/{self._task_index}"))
                    self._channel.delete(f"disturb/{self._task_index}")
                with self._flushing:
                    self.flush(self._channel)
            except Exception:  # a slow driver answers late; a dead one closes the connection
                self._exit()

    def flush(self, channel: AttemptChannel) -> None:
        """Send progress and captured output to the driver."""
        progress = self._worker.driver.progress
        if progress is not None:
            channel.set_json(f"progress/{self._worker.rank}", progress)
        while lines := self._log.take():
            channel.push("logs", {"rank": self._worker.rank, "lines": lines})

    def stop(self, channel: AttemptChannel) -> None:
        """Stop the thread at once and send the remaining output over another channel."""
        with self._flushing:
            self._stopping.set()
            self._channel.store.hang_up()  # interrupts a waiting heartbeat
        self.join(timeout=10)
        self._log.end_line()
        with contextlib.suppress(Exception):
            self.flush(channel)

    def _exit(self) -> None:
        if self._stopping.is_set():
            return
        with contextlib.suppress(Exception):
            self.flush(self._channel)
        with contextlib.suppress(Exception):
            self._channel.set(f"left/{self._task_index}", "")
        _kill_children()
        os._exit(17)


def disturb(order: dict[str, Any]) -> None:
    """Kill, cut off, pause or slow down this process, as :mod:`bigdl.testing.chaos` requests.

    Parameters
    ----------
    order : dict
        ``action``, and ``seconds`` of a pause or of a slow phase.
    """
    import subprocess

    if order["action"] == "kill":
        kill_self()
    if order["action"] == "cut_off":
        _close_connections()
        return
    # another process must resume this one
    seconds = float(order["seconds"])
    stopped, pulses = seconds, 1
    if order["action"] == "slow":
        stopped, pulses = PULSE_S, max(1, round(seconds / (2 * PULSE_S)))
    numbers = [str(each) for each in (os.getpid(), pulses, stopped, PULSE_S)]
    subprocess.Popen([sys.executable, "-P", "-c", _PULSES, *numbers])


def _close_connections() -> None:
    """Shut down all network connections of this process; those of local pipes stay."""
    import socket

    import psutil

    for connection in psutil.Process().net_connections("inet"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as cut:
            cut.shutdown(socket.SHUT_RDWR)


_PULSES = """\
import contextlib, psutil, sys, time
process, pulses = psutil.Process(int(sys.argv[1])), int(sys.argv[2])
with contextlib.suppress(psutil.NoSuchProcess):
    for _ in range(pulses):
        process.suspend()
        time.sleep(float(sys.argv[3]))
        process.resume()
        time.sleep(float(sys.argv[4]))
"""


def _kill_children() -> None:
    """Kill the child processes of the program, such as DataLoader workers."""
    with contextlib.suppress(Exception):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


class CapturedOutput:
    """Replacement of stdout and stderr that keeps lines for the driver.

    Parameters
    ----------
    stream : file
        The replaced stream.
    keep : bool
        Keep whole lines for the driver.
    tee : bool
        Write to `stream` too.
    """

    def __init__(self, stream: TextIO, *, keep: bool, tee: bool):
        self._stream, self._tee = stream, tee
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES if keep else 0)
        self._part = ""

    def write(self, text: str) -> int:
        if self._tee:
            self._stream.write(text)
        *whole, part = (self._part + text).split("\n")
        if len(part) > _PART:
            whole, part = [*whole, part], ""
        self._part = part
        # progress bars overwrite their line: keep its last state
        self._lines.extend(line.rstrip("\r").rpartition("\r")[2] for line in whole)
        return len(text)

    def note(self, text: str) -> None:
        """Write text to the replaced stream only, without keeping it for the driver."""
        if self._tee:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def take(self) -> list[str]:
        """Remove and return up to 1,000 captured lines."""
        out: list[str] = []
        with contextlib.suppress(IndexError):
            while len(out) < 1000:
                out.append(self._lines.popleft())
        return out

    def flush(self) -> None:
        if self._tee:
            self._stream.flush()

    def end_line(self) -> None:
        """Complete an unfinished last line of the output."""
        if self._part:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:  # an attribute of the stream
        return getattr(self._stream, name)


@contextlib.contextmanager
def capture_output(to_driver: bool, drop: bool) -> Iterator[CapturedOutput]:
    """Context manager that captures stdout and stderr for the driver; `drop` hides local output.

    Executors also write the output to their log. In local mode that log is the driver's output,
    which would show it twice.
    """
    log = CapturedOutput(sys.stderr, keep=to_driver, tee=not drop)
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        yield log
