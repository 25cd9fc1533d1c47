"""Error statuses of all servers: one table for metrics, HTTP and gRPC."""

from __future__ import annotations

from dataclasses import dataclass

from bigdl.common.errors import UsageError
from bigdl.nano.serving.access import AccessError, ForbiddenError
from bigdl.nano.serving.batching import DeadlineError, OverloadError, UnavailableError
from bigdl.nano.serving.repository import UnknownModelError

__all__ = ["ERROR", "CallerGoneError", "Status", "status_of"]


class CallerGoneError(Exception):
    """Exception raised when the caller of a recommendation has stopped waiting for it.

    Examples
    --------
    >>> from bigdl.friesian.serving.recommender import CallerGoneError
    >>> str(CallerGoneError())
    'The caller has gone'
    """

    def __init__(self) -> None:
        super().__init__("The caller has gone")


@dataclass(frozen=True)
class Status:
    """Metrics label, HTTP status and gRPC status code of an error.

    Attributes
    ----------
    word : str
        Value of the metrics label ``code``.
    http : int
    grpc : str
        Name of a gRPC status code.
    """

    word: str
    http: int
    grpc: str


ERROR = Status("error", 500, "INTERNAL")
"""Status of an unexpected error in the server."""
_STATUSES: dict[type[Exception], Status] = {  # the first matching class counts
    UnknownModelError: Status("not_found", 404, "NOT_FOUND"),
    ForbiddenError: Status("denied", 403, "PERMISSION_DENIED"),
    AccessError: Status("denied", 401, "UNAUTHENTICATED"),
    UsageError: Status("bad_request", 400, "INVALID_ARGUMENT"),
    OverloadError: Status("overloaded", 503, "RESOURCE_EXHAUSTED"),
    UnavailableError: Status("unavailable", 503, "UNAVAILABLE"),
    DeadlineError: Status("deadline", 504, "DEADLINE_EXCEEDED"),
    CallerGoneError: Status("cancelled", 503, "CANCELLED"),
}


def status_of(error: BaseException) -> Status:
    """Return the status of an error; :data:`ERROR` if the table has none."""
    return next((each for cls, each in _STATUSES.items() if isinstance(error, cls)), ERROR)
