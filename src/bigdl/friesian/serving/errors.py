"""Errors of a recommender and its services, and the limit of their log messages."""

from __future__ import annotations

import threading
import time

from bigdl.nano.serving.batching import UnavailableError

_SILENCE = 10.0  # minimum seconds between two messages about one subject


class LostShardError(UnavailableError):
    """Error raised when no replica of a shard answers.

    Examples
    --------
    >>> from bigdl.friesian.serving import LostShardError
    >>> issubclass(LostShardError, RuntimeError)
    True
    """

    code = "worker-lost"


class LogRateLimit:
    """Limit of one log message per subject in ten seconds.

    Examples
    --------
    >>> from bigdl.friesian.serving.errors import LogRateLimit
    >>> limit = LogRateLimit()
    >>> limit.allows("recall"), limit.allows("recall"), limit.allows("ranking")
    (True, False, True)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}  # time of the last message, by subject

    def allows(self, subject: str = "") -> bool:
        """Return whether to log a message now; if so, the next interval of its subject begins.

        Parameters
        ----------
        subject : str, default ""
        """
        with self._lock:
            now = time.monotonic()
            if now - self._logged.get(subject, -_SILENCE) < _SILENCE:
                return False
            self._logged[subject] = now
            return True
