"""What to do after a worker was lost.

A decision is data: :meth:`FailurePolicy.decide` is asked after every
:class:`~bigdl.common.errors.WorkerLost` and answers with a :class:`Decision`; the Estimator acts on
it.  What user code raised is never retried and never asked about.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bigdl.common.errors import UsageError, WorkerLost

__all__ = ["Decision", "FailurePolicy"]


@dataclass(frozen=True)
class Decision:
    """Whether to try again, and why."""

    retry: bool
    reason: str


class FailurePolicy:
    """Retry from the latest checkpoint, at most a number of times within a window.

    Parameters
    ----------
    max_failures : int
        Losses that are forgiven; 0 raises at the first.
    window : float, optional
        Only losses of the last `window` seconds count; None counts all of them.
    clock : callable, optional
        Seconds; for tests.
    """

    def __init__(
        self,
        max_failures: int = 3,
        window: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 0:
            raise UsageError(
                f"max_failures should be an integer of at least 0, got {max_failures!r}"
            )
        if window is not None and window <= 0:
            raise UsageError(f"window should be a positive number of seconds, got {window!r}")
        self.max_failures = max_failures
        self.window = window
        self._clock = clock
        self._losses: deque[float] = deque()

    @classmethod
    def of(cls, value: int | FailurePolicy | None, backend: str = "spark") -> FailurePolicy:
        """A policy from what ``fit(max_failures=)`` accepts; its count starts at zero.

        By default 3 losses are forgiven, with ``backend="bigdl"`` 5 within 120 seconds.
        """
        if value is None:
            return cls(5, 120.0) if backend == "bigdl" else cls(3)
        if isinstance(value, FailurePolicy):
            return cls(value.max_failures, value.window, value._clock)
        return cls(value)

    def decide(self) -> Decision:
        """Record one loss and say what to do about it."""
        now = self._clock()
        self._losses.append(now)
        while self.window is not None and self._losses[0] < now - self.window:
            self._losses.popleft()
        count = len(self._losses)
        within = "" if self.window is None else f" within {self.window:g} s"
        if count > self.max_failures:
            return Decision(False, f"{count} losses{within} are more than {self.max_failures}")
        return Decision(True, f"loss {count} of {self.max_failures}{within}")

    def forgive(self, error: WorkerLost) -> str:
        """Record a loss, and raise it if it is one too many.

        Returns
        -------
        str
            Why the work may go on, for a message.

        Raises
        ------
        WorkerLost
            What was lost, and why that is not forgiven.
        """
        decision = self.decide()
        if not decision.retry:
            raise WorkerLost(f"{error} ({decision.reason})") from None
        return decision.reason
