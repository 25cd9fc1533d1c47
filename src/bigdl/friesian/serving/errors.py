"""Errors of a recommender and its services."""

from __future__ import annotations

from bigdl.nano.serving.batching import UnavailableError


class LostShardError(UnavailableError):
    """Error raised when no replica of a shard answers.

    Examples
    --------
    >>> from bigdl.friesian.serving import LostShardError
    >>> issubclass(LostShardError, RuntimeError)
    True
    """

    code = "worker-lost"
