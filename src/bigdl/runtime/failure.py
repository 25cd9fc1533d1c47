"""Failures of workers: exceptions as they travel to the driver, and the policy for retries."""

from __future__ import annotations

import logging
import os
import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar, cast

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import WorkerError, WorkerLost

logger = logging.getLogger("bigdl.orca")

T = TypeVar("T")


class Failure(NamedTuple):
    """An exception in a worker, as it travels.

    Attributes
    ----------
    time : float
        Of ``CLOCK_MONOTONIC``, which is one clock for all processes of a machine.
    kind, traceback : str
        Class name, and the traceback from the first frame outside of BigDL.
    pickled : bytes or None
        The exception, if it can be pickled.
    """

    time: float
    kind: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that an exception is."""
        failed = time.monotonic()
        return cls(failed, type(error).__name__, user_traceback(error), _pickled(error))

    def original(self) -> BaseException | None:
        """Return the exception; None if it cannot be made in this process."""
        try:
            return None if self.pickled is None else pickle.loads(self.pickled)
        except Exception:  # its class may be found in the worker only
            return None

    def error(self, rank: int) -> WorkerError:
        """Return the error of the worker."""
        return WorkerError(rank, self.kind, self.traceback, self.original())


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception from the first frame outside of BigDL."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(package):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    try:
        content = cloudpickle.dumps(error.with_traceback(None))
        pickle.loads(content)  # some exceptions can be written only
    except Exception:
        return None
    return cast("bytes | None", content)


@dataclass
class FailurePolicy:
    """Retry from the latest checkpoint, at most a number of times within a window.

    What counts are attempts of one call that failed, not the workers that each of them lost.

    Parameters
    ----------
    max_failures : int
        Failed attempts that may be followed by a retry; 0 raises the first.
    window : float, optional
        Only failures of the last `window` seconds count; None counts all of them.
    clock : callable, optional
        Seconds; for tests.
    """

    max_failures: int = 3
    window: float | None = None
    clock: Callable[[], float] = time.monotonic
    _failures: deque[float] = field(default_factory=deque, init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("max_failures", self.max_failures, 0)
        if self.window is not None:
            check_number("window", self.window, above=0)

    @classmethod
    def of(cls, value: int | FailurePolicy | None) -> FailurePolicy:
        """A policy from what ``fit(max_failures=)`` accepts; its count starts at zero."""
        if value is None:
            return cls()
        if isinstance(value, FailurePolicy):
            return replace(value)
        return cls(value)

    def allow_retry(self, error: WorkerLost) -> str:
        """Record a failed attempt, and raise its error if it is one too many.

        Returns
        -------
        str
            Why the work may go on, for a message.

        Raises
        ------
        WorkerLost
            What was lost, and why that is not retried.
        """
        now = self.clock()
        self._failures.append(now)
        while self.window is not None and self._failures[0] < now - self.window:
            self._failures.popleft()
        count = len(self._failures)
        within = "" if self.window is None else f" within {self.window:g} s"
        if count > self.max_failures:
            noun, verb = ("failure", "is") if count == 1 else ("failures", "are")
            reason = f"{count} {noun}{within} {verb} more than max_failures={self.max_failures}"
            raise WorkerLost(f"{error} ({reason})") from None
        return f"failure {count} of {self.max_failures}{within}"

    def run(
        self,
        call: Callable[[], T],
        consequence: str,
        *,
        only_if: Callable[[], bool] = lambda: True,
    ) -> T:
        """Call until no worker is lost meanwhile, as often as the policy allows.

        Parameters
        ----------
        call : callable
        consequence : str
            What follows from a failure, for the log.
        only_if : callable
            Asked after a failure; False raises its error without counting it.

        Raises
        ------
        WorkerLost
        """
        while True:
            try:
                return call()
            except WorkerLost as error:
                if not only_if():
                    raise
                logger.warning("%s; %s (%s)", error, consequence, self.allow_retry(error))
