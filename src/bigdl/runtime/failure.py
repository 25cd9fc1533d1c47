"""Worker failures: exceptions sent to the driver, and the retry policy."""

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
    """A picklable record of an exception that a worker raised.

    Attributes
    ----------
    time : float
        Time by ``CLOCK_MONOTONIC``, which all processes of a machine share.
    kind, traceback : str
        Class name, and traceback from the first frame outside of BigDL.
    pickled : bytes or None
        The exception, if it can be pickled.
    """

    time: float
    kind: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Create a Failure from an exception."""
        failed = time.monotonic()
        return cls(failed, type(error).__name__, user_traceback(error), _pickled(error))

    def original(self) -> BaseException | None:
        """Unpickle and return the exception, or return None if this process cannot unpickle it."""
        try:
            return None if self.pickled is None else pickle.loads(self.pickled)
        except Exception:  # its class may exist in the worker only
            return None

    def error(self, rank: int) -> WorkerError:
        """Convert the failure to the WorkerError of a rank."""
        return WorkerError(rank, self.kind, self.traceback, self.original())


def user_traceback(error: BaseException) -> str:
    """Return an exception's traceback from the first frame outside of BigDL."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(package):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    try:
        content = cloudpickle.dumps(error.with_traceback(None))
        pickle.loads(content)  # some exceptions cannot be unpickled
    except Exception:
        return None
    return cast("bytes | None", content)


@dataclass
class FailurePolicy:
    """Retry policy: a maximum number of failed attempts within a time window.

    The policy counts failed attempts of one call, not lost workers. A fit that replaces lost
    workers in place counts each loss.

    Parameters
    ----------
    max_failures : int
        Maximum number of failed attempts that are retried; 0 raises the first error.
    window : float, optional
        Only failures of the last `window` seconds count; None counts all of them.
    clock : callable, optional
        Returns seconds; replaced in tests.
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
        """Create a policy from the ``max_failures`` argument of ``fit``, with no failures yet."""
        if value is None:
            return cls()
        if isinstance(value, FailurePolicy):
            return replace(value)
        return cls(value)

    def allow_retry(self, error: WorkerLost) -> str:
        """Record a failed attempt; raise its error if the limit is exceeded.

        An error with ``is_counted`` has been recorded before.

        Returns
        -------
        str
            Description of the count, for a message.

        Raises
        ------
        WorkerLost
            The error, with the reason why it is not retried.
        """
        now = self.clock()
        if not error.is_counted:
            self._failures.append(now)
        while self._failures and self.window and self._failures[0] < now - self.window:
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
        """Call a function; retry it after a lost worker as often as the policy allows.

        Parameters
        ----------
        call : callable
        consequence : str
            Consequence of a failure, for the log.
        only_if : callable
            Called after a failure; False raises its error without counting it.

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
