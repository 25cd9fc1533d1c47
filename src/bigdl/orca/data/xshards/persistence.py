"""Lifetime of persisted shards in Spark.

A persisted RDD may be released when its shards cannot be read again: no XShards refers to it, and
no lazy RDD depends on it.  Python references track this, because an RDD refers to its parent.
:func:`hold` adds the reference where PySpark drops it, and :func:`detached` removes it from an RDD
that is computed immediately.

The next call of :func:`persist` does the release, because a finalizer can run at any point of the
program, even during a call to the JVM.
"""

import weakref
from collections import deque
from contextlib import suppress

_dropped: deque = deque()  # (SparkContext, Java RDD) of unreachable RDDs


def persist(rdd) -> None:
    """Persist the elements of `rdd` until no Python object refers to it.

    An RDD that the caller persisted is left unchanged.
    """
    from pyspark import StorageLevel

    release_dropped()
    if rdd.is_cached:
        return
    # With disk, because an evicted shard would be recomputed, possibly with another result.
    rdd.persist(StorageLevel.MEMORY_AND_DISK)
    rdd._bigdl_release = weakref.finalize(rdd, _dropped.append, (rdd.ctx, rdd._jrdd))
    rdd._bigdl_release.atexit = False


def unpersist(rdd) -> None:
    """Release the persisted elements of `rdd` now."""
    release = getattr(rdd, "_bigdl_release", None)
    if release is not None:
        release.detach()
    if rdd.is_cached:
        rdd.unpersist()


def release_dropped() -> None:
    """Release the persisted elements of unreachable RDDs."""
    while True:
        try:
            sc, jrdd = _dropped.popleft()
        except IndexError:
            return
        if sc._jsc is not None:  # the context is running
            with suppress(Exception):  # the JVM or Spark Connect server has exited
                jrdd.unpersist(False)


def hold(rdd, *parents):
    """Attach `parents` to `rdd`, so that they are not released before it; return `rdd`."""
    rdd._bigdl_parents = parents
    return rdd


def detached(rdd):
    """Return the same RDD, but without Python references to its parents."""
    if rdd.context is None:  # Spark Connect plans have no references in this process
        return rdd
    from pyspark import RDD

    return RDD(rdd._jrdd, rdd.ctx, rdd._jrdd_deserializer)


def hand_over(rdd) -> None:
    """Leave the release of `rdd` and its parents to Spark's context cleaner.

    For uses without Python references, such as a Spark DataFrame: the JVM releases data that no
    plan reads.
    """
    release = getattr(rdd, "_bigdl_release", None)
    if release is not None:
        release.detach()
    for parent in (getattr(rdd, "prev", None), *getattr(rdd, "_bigdl_parents", ())):
        if parent is not None:
            hand_over(parent)
