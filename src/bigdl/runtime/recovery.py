"""In-place recovery: the driver replaces a lost worker of a running job, the others keep theirs.

The groups of an attempt's workers are numbered, from 0.  When a worker is lost or a collective
fails, every surviving worker leaves its group, returns to its last agreed state, and reports to the
driver that it is ready for the next group, with its position.  The driver starts a replacement for
a lost worker, which builds its program from the recorded results of the start-up collectives and
then reports, too.  When all ranks are ready, the driver announces the next group.  All ranks then
know which of them have the newest state, and send it to the others.

A program opts in by publishing its start-up record; without it a loss ends the attempt.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import WorkerLost
from bigdl.common.timeouts import GO_LOOK_S, HANG_GRACE_S, SPARE_START_S
from bigdl.runtime.engine import PeerLost

if TYPE_CHECKING:
    from bigdl.runtime.channel import AttemptChannel

logger = logging.getLogger("bigdl.orca")

_RECORD = "startup"  # key of the record of the start-up collectives
_MODULES = "modules"  # key of the modules that a worker has imported
_PREPARED = frozenset(
    ("bigdl", "cloudpickle", "mpmath", "numpy", "pandas", "pyarrow", "sympy", "torch")
)
"""Packages whose modules are imported before a loss: large, and without effects on a program."""
_ACTIVE = ("bigdl.runtime._worker_main", "torch._inductor")  # modules that start something
_REPORTS = "ready#"  # key of the number of reports

Report = dict[str, Any]
"""A rank's report: ``position``, None for a replacement without a state, and facts of the fit."""


def broken_key(group: int) -> str:
    """Return the key that is set when a worker of a group is lost."""
    return f"broken/{group}"


def publish_record(channel: AttemptChannel, record: bytes) -> None:
    """Publish the results of the start-up collectives; from now on lost workers are replaced."""
    modules = [name for name in list(sys.modules) if name.split(".")[0] in _PREPARED]
    channel.set_json(_MODULES, [name for name in modules if not name.startswith(_ACTIVE)])
    channel.put_bytes(_RECORD, record)


def read_record(channel: AttemptChannel) -> bytes:
    """Return the published record."""
    return channel.take_bytes(_RECORD, delete=False)


def await_group(
    channel: AttemptChannel, group: int, rank: int, report: Report, cause: PeerLost | None
) -> list[Report]:
    """Report that a rank is ready for a group; wait for the others and return all reports.

    Parameters
    ----------
    channel : AttemptChannel
    group : int
        Number of the next group.
    rank : int
    report : dict
    cause : PeerLost or None
        Error to raise if the job ends instead.

    Raises
    ------
    PeerLost
        If another worker reports an error, which ends the job.
    """
    channel.set_json(f"ready/{group}/{rank}", report)
    channel.count(_REPORTS, 1)
    while not channel.has(f"go/{group}", seconds=GO_LOOK_S):
        if channel.has("abort") or channel.count("failed"):
            raise cause or PeerLost("another worker failed before this one joined")
    reports: list[Report] = channel.get_json(f"go/{group}")
    return reports


class RecoveryMonitor:
    """The driver's side of the recovery of one attempt.

    Parameters
    ----------
    channel : AttemptChannel
    world_size : int
    timeout : float
        Seconds after which a collective without progress fails: a silent worker that makes the
        others wait longer is ended.
    on_loss : callable
        ``on_loss(error)`` counts a failure and returns True if the attempt may continue.
    prepare : callable, optional
        ``prepare(modules)`` is called a few seconds after the start of the steps and of each group,
        to prepare a process for the next loss, which will import the modules. If it fails, the
        next replacement is started after the loss.

    Attributes
    ----------
    group : int
        Number of the current group.
    is_refused : bool
        Whether `on_loss` has ended the attempt.
    """

    def __init__(
        self,
        channel: AttemptChannel,
        world_size: int,
        timeout: float,
        on_loss: Callable[[WorkerLost], bool],
        prepare: Callable[[list[str]], None] | None = None,
    ):
        self._channel, self._world_size, self._timeout = channel, world_size, timeout
        self._on_loss, self._prepare = on_loss, prepare
        self._prepare_at: float | None = None
        self.group = 0
        self.is_refused = False
        self._reports = 0
        self._waiting_since: float | None = None
        self._has_loss = False

    def accept(self, rank: int, error: WorkerLost) -> bool:
        """Handle the loss of a rank; return True if a replacement shall start."""
        channel = self._channel
        if not channel.has(_RECORD) or channel.has("abort") or channel.count("failed"):
            return False
        if not self._count(error):
            return False
        self._has_loss = True
        channel.delete(f"ready/{self.group + 1}/{rank}")
        channel.set(broken_key(self.group), "")
        return True

    def _count(self, error: WorkerLost) -> bool:
        """Count a failure; return False if it must end the attempt."""
        self.is_refused = not self._on_loss(error)
        return not self.is_refused

    def poll(self, kill_rank: Callable[[int], None]) -> None:
        """Announce the next group once all ranks are ready; end silent workers.

        Raises
        ------
        WorkerLost
            If no rank has a state any more, or a group without a loss is one failure too many.
        """
        channel = self._channel
        self._prepare_for_loss()
        if channel.count(_REPORTS) == self._reports and self._waiting_since is None:
            return
        self._reports = channel.count(_REPORTS)
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        following = self.group + 1
        keys = [f"ready/{following}/{rank}" for rank in range(self._world_size)]
        if channel.has(*keys):
            reports = [channel.get_json(key) for key in keys]
            self._start(following, reports)
            return
        waited = time.monotonic() - self._waiting_since
        if waited > (self._timeout if self._has_loss else HANG_GRACE_S):
            for rank, key in enumerate(keys):
                if not channel.has(key):
                    logger.warning("Worker %d does not respond, so it is ended", rank)
                    kill_rank(rank)
            self._waiting_since, self._has_loss = time.monotonic(), True

    def _prepare_for_loss(self) -> None:
        now = time.monotonic()
        if self._prepare is None or self._prepare_at is None:
            if self._prepare is not None and self._channel.has(_RECORD):
                self._prepare_at = now + SPARE_START_S
        elif now >= self._prepare_at:
            self._prepare_at = float("inf")
            modules = self._channel.get_json(_MODULES)
            try:
                self._prepare(modules)
            except Exception as error:  # for example a limit of processes
                logger.warning(
                    "No process can be started in advance, so the replacement of a lost worker "
                    "takes seconds longer: %s",
                    error,
                )

    def _start(self, group: int, reports: list[Report]) -> None:
        if all(report["position"] is None for report in reports):
            raise _counted(WorkerLost("All workers were lost"))
        if not self._has_loss:  # a collective has failed, and might fail again and again
            causes = filter(None, (report.get("cause") for report in reports))
            cause = next(causes, "a collective operation has failed")
            error = WorkerLost(f"The workers lost their connections: {cause}")
            if not self._count(error):
                raise _counted(error)
        self._channel.set_json(f"go/{group}", reports)
        self.group, self._waiting_since, self._has_loss = group, None, False
        self._prepare_at = time.monotonic() + SPARE_START_S


def _counted(error: WorkerLost) -> WorkerLost:
    error.is_counted = True
    return error
