"""How many threads a numeric library should start."""

from __future__ import annotations

from bigdl.common.cpu import core_count, topology

__all__ = ["best_thread_count"]


def best_thread_count() -> int:
    """One thread for each physical core that this process may use, within its CPU quota.

    Hyperthreads share the vector units that numeric code is bound by, and threads beyond a quota
    are stopped in every period while the others wait for them.

    Returns
    -------
    int
        At least 1.
    """
    return min(len(topology().cores), core_count())
