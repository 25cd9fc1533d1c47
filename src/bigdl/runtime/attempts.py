"""The attempts of a job whose workers meet at the driver's channel, whatever engine runs them."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from bigdl.runtime.causes import user_error
from bigdl.runtime.channel import Channel, Line
from bigdl.runtime.engine import Job
from bigdl.runtime.stage import Watch
from bigdl.runtime.task import TaskSpec
from bigdl.runtime.uplink import decode

__all__ = ["ChannelJob", "WorkerCalls"]

_LOOK_S = 0.05  # seconds between two looks of the driver
_END_S = 5.0  # seconds that workers get to end when they are told to
_GRACE_S = 2.0  # seconds that survivors get to notice that a peer went away


class ChannelJob(Job):
    """A job whose attempts each have a line of the channel, and whose spools outlive an attempt.

    An engine's job calls :meth:`_open_line` before its workers start, :meth:`_note_end` when none
    is left, then :meth:`_answers`; what it means that there are none, the engine knows.
    """

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        self._channel: Channel | None = None
        self._has_input = False
        self._attempts = 0
        self._spools: list[dict] | None = None  # by rank, once all are known
        self._lines: list[Line] = []

    def _open_line(self, options: dict, state: bytes | None) -> Line:
        """The line of the next attempt, with what the workers are told."""
        self._attempts += 1
        line = self._channel.line(self._attempts)
        self._lines.append(line)
        line.set_json("options", options)
        if state is not None:
            line.put_bytes("state", state)
        return line

    def _note_end(self, line: Line, watch: Watch) -> None:
        """Take what the workers of an attempt have left."""
        watch.poll(final=True)
        line.delete_bytes("state")
        if self._spools is None and self._has_input:
            made = self._spools_of(line)
            if len(made) == self.num_workers:
                self._spools = [made[rank] for rank in range(self.num_workers)]

    def _answers(self, line: Line, watch: Watch) -> list | None:
        """Results in rank order; None if they are not complete.

        Raises
        ------
        UsageError, WorkerError
            The first error that a worker reported.
        """
        ranks = range(self.num_workers)
        if watch.first_error is not None:
            raise user_error(watch.first_error) from None
        if not line.has(*(f"result/{rank}/kind" for rank in ranks)):
            return None
        return [
            decode(line.get(f"result/{rank}/kind").decode(), line.take_bytes(f"result/{rank}"))
            for rank in ranks
        ]

    def _spools_of(self, line: Line) -> dict[int, dict]:
        """Spools that the workers of one attempt made, by their place."""
        keys = {place: f"spool/{place}" for place in range(self.num_workers)}
        return {place: line.get_json(key) for place, key in keys.items() if line.has(key)}

    def _remove_spools(self) -> None:
        """Remove what is left of them on this machine; workers on others removed theirs."""
        from bigdl.runtime.shards.spool import remove_spool

        lines, self._lines = self._lines, []
        with contextlib.suppress(Exception):
            for doc in (d for line in lines for d in self._spools_of(line).values()):
                for spool in doc.values():
                    remove_spool(spool["path"])


class WorkerCalls(ABC):
    """One call of every worker process of an attempt, for engines whose workers are called.

    Attributes
    ----------
    outcomes : dict of int to tuple
        What the workers returned, by their place.
    lost : dict of int to exception
        The workers that died.
    """

    def __init__(self, num_workers: int, line: Line):
        self._num_workers, self._line = num_workers, line
        self.outcomes: dict[int, tuple[int, str, str]] = {}
        self.lost: dict[int, BaseException] = {}

    @abstractmethod
    def _submit(self, spec: TaskSpec, attempt: int) -> None:
        """Start :func:`~bigdl.runtime.task.execute` on every worker."""

    @abstractmethod
    def _ended(self, timeout: float) -> Iterable[tuple[int, tuple[int, str, str] | BaseException]]:
        """Wait for calls to end; place and outcome of each, or what says that its process died."""

    @abstractmethod
    def _kill(self, place: int) -> None:
        """End a worker's process."""

    def run(self, spec: TaskSpec, attempt: int, poll: Callable[[], None]) -> None:
        """Run a task on every worker and call `poll` until all have ended."""
        try:
            self._submit(spec, attempt)
            lost_at = None
            while self._is_running:
                self._take(_LOOK_S)
                if self.lost and lost_at is None:
                    lost_at = time.monotonic()
                if lost_at is not None and time.monotonic() - lost_at > _GRACE_S:
                    self._stop("another worker was lost")
                    lost_at = float("inf")
                poll()
        except BaseException:
            self._stop("stopped by the driver")
            raise

    def cancel(self) -> None:
        """End the workers that have not returned."""
        for place in range(self._num_workers):
            if place not in self.outcomes:
                self._kill(place)

    @property
    def _is_running(self) -> bool:
        return len(self.outcomes) + len(self.lost) < self._num_workers

    def _take(self, timeout: float) -> None:
        for place, outcome in self._ended(timeout):
            if not isinstance(outcome, BaseException):
                self.outcomes[place] = outcome
            elif self._line.has("abort"):  # it ended as it was told
                self.outcomes[place] = place, "aborted", str(outcome)
            else:
                self.lost[place] = outcome

    def _stop(self, why: str) -> None:
        """End the workers: by themselves if they can."""
        with contextlib.suppress(Exception):
            self._line.set("abort", why)
        with contextlib.suppress(Exception):
            end = time.monotonic() + _END_S
            while self._is_running and time.monotonic() < end:
                self._take(_LOOK_S)
        self.cancel()
