"""ServingLimits: limits of one request to a server."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

from bigdl.common.checks import check_integer, check_number, check_positive
from bigdl.common.errors import UsageError

__all__ = ["ServingLimits"]

_SECONDS = ("timeout", "body_timeout")


@dataclass(frozen=True)
class ServingLimits:
    """Limits of one request.

    Attributes
    ----------
    max_request_bytes : int
        Largest request body.
    max_rows : int
        Largest number of rows of a request.
    timeout : float
        Seconds after which a request fails. It caps the deadline that a client sends.
    body_timeout : float
        Seconds within which the body of an HTTP request has to arrive.
    max_answer_bytes : int
        Largest response body.
    max_bytes_at_once : int
        Largest size of all requests in progress together; further requests are refused. Requests
        below 64 KiB are not counted. It is at least `max_request_bytes`.
    max_new_tokens : int
        Largest number of generated tokens of a request, and the default of a chat.
    max_requests : int, optional
        Largest number of concurrent gRPC requests and HTTP recommendations; further ones are
        refused. Default: 32 for each gRPC thread.
    max_ids, max_k, max_pairs : int
        Limits of a recommender; see :class:`bigdl.friesian.serving.Limits`.

    Examples
    --------
    >>> from bigdl.nano.serving import ServingLimits
    >>> ServingLimits(max_rows=512).max_request_bytes
    67108864
    """

    max_request_bytes: int = 64 << 20
    max_rows: int = 65_536
    timeout: float = 60.0
    body_timeout: float = 30.0
    max_answer_bytes: int = 256 << 20
    max_bytes_at_once: int = 512 << 20
    max_new_tokens: int = 1024
    max_requests: int | None = None
    max_ids: int = 10_000
    max_k: int = 10_000
    max_pairs: int = 5_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in _SECONDS:
                check_number(name, value, above=0)
            elif value is not None or name != "max_requests":
                check_positive(name, value)

    def check_ids(self, ids: Sized) -> None:
        """Raise a UsageError if a request has too many ids."""
        if len(ids) > self.max_ids:
            raise UsageError(
                f"A request may have {self.max_ids} ids, got {len(ids)}", code="request-limit"
            )

    def check_pairs(self, users: int, candidates: int) -> None:
        """Raise a UsageError if a request has too many user-candidate pairs."""
        if users * candidates > self.max_pairs:
            raise UsageError(
                f"A request may have {self.max_pairs} candidates for all its ids, got {users} ids "
                f"and {candidates} candidates of each; ask for fewer at a time",
                code="request-limit",
                limit=self.max_pairs,
            )

    def check_k(self, name: str, value: int) -> int:
        """Return `value`; raise a UsageError if it is not a valid number of items."""
        return check_integer(name, value, 1, self.max_k)
