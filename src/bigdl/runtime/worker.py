"""A worker as a program sees it, its ways to the driver, and what runs beside the program."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import COLLECTIVE_S, HEARTBEAT_S

if TYPE_CHECKING:
    from bigdl.runtime.channel import AttemptChannel


@dataclass(eq=False)
class Worker:
    """A process as the program in it sees it: its rank, threads, input and channel.

    Attributes
    ----------
    rank : int
        0 ... `world_size` - 1.
    world_size : int
        Number of workers.
    threads : int
        Threads that this worker may use; already set in torch and OpenMP.
    shards : dict of str to Shard
        The worker's rows of every feed, by the feed's name.
    options : dict
        What the driver said of this attempt.
    host : str
        IP address of this worker on the route to its rendezvous.
    local_dir : str
        A directory on this machine that goes with the application.
    driver : DriverConnection
        Its way to the driver.
    timeout : float
        Seconds after which a collective that makes no progress fails.
    channel : bigdl.runtime.channel.AttemptChannel
        Keys that all workers of this attempt share; None in processes that no engine runs, which
        are in a process group before the program begins.
    may_leave : bool
        Whether the driver may ask for what :meth:`is_leaving` tells.
    certificate : bigdl.runtime.certificate.Certificate or None
        For what the workers say to each other, where the cluster asks for encryption.
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

    def __post_init__(self) -> None:
        self.options = self.driver.options
        self._cleanups: list[Callable[[], None]] = []
        self._cleaner: threading.Thread | None = None

    @property
    def line(self) -> Any:
        """The former name of `channel`."""
        return self.channel

    @property
    def shard(self) -> Any:  # a Shard, where the job has a feed
        """The shard of the only feed, or None."""
        return next(iter(self.shards.values()), None)

    def is_leaving(self) -> bool:
        """Return True if a machine of the workers is about to go; asks the driver."""
        return self.may_leave and self.channel.has("leave")

    def state(self) -> bytes | None:
        """Return the driver's `state` of the attempt; for rank 0 only."""
        return self.driver.state()

    def progress(self, **values: Any) -> None:
        """Tell the driver how far this worker is; cheap, the heartbeat takes it along."""
        self.driver.note_progress(values)

    def send(self, topic: str, doc: dict[str, Any], data: bytes) -> None:
        """Send a message to the driver's ``on_event``; returns when it is on its way."""
        self.driver.send({"topic": topic, "rank": self.rank, **doc}, data)

    def at_exit(self, cleanup: Callable[[], None]) -> None:
        """Run `cleanup` when the program ends, however it ends, before anything is reported.

        A process group must be destroyed here: as long as it is open, the peers of a failed worker
        stay blocked in their collective.
        """
        self._cleanups.append(cleanup)

    def clean_up(self, patience: float | None = None) -> None:
        """Run what :meth:`at_exit` was given; go on after `patience` seconds if it hangs.

        Destroying a process group waits for collectives under way, which may wait for a peer.
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
                if distributed.is_initialized():  # one that the program made and left open
                    distributed.destroy_process_group()


RESULT_LIMIT = 2 << 30  # bytes of one value that may go through the driver


@dataclass
class DriverConnection:
    """A worker's connection to the driver, for one attempt.

    This one keeps what the worker says in memory; others send it.

    Attributes
    ----------
    options : dict
        The driver's options of this attempt.
    given : bytes or None
        The bytes that the driver has for rank 0, where they are there already.
    progress : dict or None
        The figures that the program reported last.
    messages : dict of str to tuple of (dict, bytes)
        The last message of each topic, in the order in which these came.
    result : tuple of (kind, bytes) or None
    error : dict or None
        The exception that the program raised; see :func:`~bigdl.runtime.task.describe`.
    """

    options: dict[str, Any] = field(default_factory=dict)
    given: bytes | None = None
    progress: dict[str, Any] | None = None
    messages: dict[str, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    result: tuple[str, bytes] | None = None
    error: dict[str, Any] | None = None

    def state(self) -> bytes | None:
        """Return the bytes that the driver has for rank 0."""
        return self.given

    def note_progress(self, values: dict[str, Any]) -> None:
        """Take figures of the program."""
        self.progress = values

    def send(self, doc: dict[str, Any], data: bytes) -> None:
        """Take a message of the program."""
        self.messages.pop(doc["topic"], None)
        self.messages[doc["topic"]] = doc, data

    def send_result(self, rank: int, kind: str, data: bytes) -> None:
        """Take the result of the program."""
        self.result = kind, data

    def report_failing(self) -> int:
        """Say that this worker fails; returns how many have failed by now, this one included.

        It is said before anything is cleaned up. Cleaning up breaks the collectives of the other
        workers, which then fail, too: the cause of all is the error of the first.
        """
        return 1

    def report(self, doc: dict[str, Any]) -> None:
        """Take the exception that a program raised."""
        self.error = doc


class ChannelConnection(DriverConnection):
    """A connection by the channel, which sends each thing at once."""

    def __init__(self, channel: AttemptChannel):
        super().__init__(channel.get_json("options"))
        self._channel = channel

    def state(self) -> bytes | None:
        has = self._channel.has("state")
        return self._channel.take_bytes("state", delete=False) if has else None

    def send(self, doc: dict[str, Any], data: bytes) -> None:
        check_size("message", data)
        self._channel.push("messages", doc, data)

    def send_result(self, rank: int, kind: str, data: bytes) -> None:
        self._channel.put_bytes(f"result/{rank}", data)
        self._channel.set(f"result/{rank}/kind", kind)

    def report_failing(self) -> int:
        return self._channel.count("failed", 1)

    def report(self, doc: dict[str, Any]) -> None:
        self._channel.push("errors", doc)


def encode(result: object) -> tuple[str, bytes]:
    """Kind and bytes of what a program returned."""
    if isinstance(result, bytes | bytearray | memoryview):
        kind, data = "bytes", bytes(result)
    else:
        try:
            kind, data = "json", json.dumps(result).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(
                "A program run by an engine must return bytes or JSON-able values, got "
                f"{type(result).__name__} ({error})",
                code="function-result",
            ) from None
    check_size("result", data)
    return kind, data


def decode(kind: str, data: bytes) -> Any:
    """The inverse of :func:`encode`."""
    return data if kind == "bytes" else json.loads(data)


def check_size(what: str, data: bytes) -> None:
    if len(data) > RESULT_LIMIT:
        raise UsageError(
            f"The {what} of {len(data) >> 20} MB is too large to come back through the driver "
            f"(limit {RESULT_LIMIT >> 20} MB); pass model_dir= so that it is written there",
            code="data-size",
        )


_LINES = 10_000  # newest lines that wait for the next heartbeat
_PART = 1 << 16  # characters of a line without an end


class HeartbeatThread(threading.Thread):
    """A thread that sends heartbeat and logs, and ends the process on abort or without a driver.

    Nothing else interrupts a thread that is blocked in a collective.

    Parameters
    ----------
    channel : AttemptChannel
        A connection of its own.
    task_index : int
        Number of the task.
    worker : Worker
        Its connection to the driver has the progress.
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
                with self._flushing:
                    self.flush(self._channel)
            except Exception:  # a slow or stopped driver answers late; a dead one hangs up
                self._exit()

    def flush(self, channel: AttemptChannel) -> None:
        progress = self._worker.driver.progress
        if progress is not None:
            channel.set_json(f"progress/{self._worker.rank}", progress)
        while lines := self._log.take():
            channel.push("logs", {"rank": self._worker.rank, "lines": lines})

    def stop(self, channel: AttemptChannel) -> None:
        """End the thread at once, and send what is left by another connection."""
        with self._flushing:
            self._stopping.set()
            self._channel.store.hang_up()  # it waits for a beat to be over
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
        _end_children()
        os._exit(17)


def _end_children() -> None:
    """End what the program started, such as the processes of a DataLoader."""
    with contextlib.suppress(Exception):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


class CapturedOutput:
    """Stands in for stdout and stderr.

    Parameters
    ----------
    stream : file
        What it stands in for.
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
        # of a line that is written over and over, as a progress bar does, the last state
        self._lines.extend(line.rstrip("\r").rpartition("\r")[2] for line in whole)
        return len(text)

    def note(self, text: str) -> None:
        """Write to what it stands in for, and not to the driver."""
        if self._tee:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def take(self) -> list[str]:
        out: list[str] = []
        with contextlib.suppress(IndexError):
            while len(out) < 1000:
                out.append(self._lines.popleft())
        return out

    def flush(self) -> None:
        if self._tee:
            self._stream.flush()

    def end_line(self) -> None:
        if self._part:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def capture_output(to_driver: bool, drop: bool) -> Iterator[CapturedOutput]:
    """Take what is written meanwhile, for the driver or, with `drop`, for nobody.

    The log of an executor gets it in any case; that of local mode is the driver's own output.
    """
    log = CapturedOutput(sys.stderr, keep=to_driver, tee=not drop)
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        yield log
