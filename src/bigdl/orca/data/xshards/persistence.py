"""The time for which Spark keeps computed shards.

A persisted RDD may be released when nobody can ask for its shards again: no XShards has it and no
RDD that is not computed yet reads it.  Python's own references tell that, since an RDD refers to
the one that it was made of; where PySpark drops that reference, :func:`hold` puts it back, and
:func:`detached` takes it away from an RDD that is computed at once and does not need it any more.

The release itself is left to the next call of :func:`persist`: a finalizer can run inside any line
of the program, also in the middle of a call to the JVM.
"""

import weakref
from collections import deque
from contextlib import suppress

_dropped: deque = deque()  # (SparkContext, Java RDD) that nobody refers to any more


def persist(rdd) -> None:
    """Keep the elements of `rdd` once they are computed, for as long as somebody refers to it.

    An RDD that is persisted already is left to the one who did it.
    """
    from pyspark import StorageLevel

    release_dropped()
    if rdd.is_cached:
        return
    # With disk: an evicted shard would be computed again, and perhaps to something else.
    rdd.persist(StorageLevel.MEMORY_AND_DISK)
    rdd._bigdl_release = weakref.finalize(rdd, _dropped.append, (rdd.ctx, rdd._jrdd))
    rdd._bigdl_release.atexit = False


def unpersist(rdd) -> None:
    """Free the elements of `rdd` now."""
    release = getattr(rdd, "_bigdl_release", None)
    if release is not None:
        release.detach()
    if rdd.is_cached:
        rdd.unpersist()


def release_dropped() -> None:
    """Free what nobody refers to any more."""
    while True:
        try:
            sc, jrdd = _dropped.popleft()
        except IndexError:
            return
        if sc._jsc is not None:  # the context was not stopped
            with suppress(Exception):  # its JVM, or the server of Spark Connect, is gone
                jrdd.unpersist(False)


def hold(rdd, *parents):
    """`rdd`, which keeps its `parents` from being released."""
    rdd._bigdl_parents = parents
    return rdd


def detached(rdd):
    """The same RDD without Python references to those that it is computed from."""
    if rdd.context is None:  # of Spark Connect, whose plans refer to nothing in this process
        return rdd
    from pyspark import RDD

    return RDD(rdd._jrdd, rdd.ctx, rdd._jrdd_deserializer)


def hand_over(rdd) -> None:
    """Leave `rdd`, and what it is computed from, to Spark's own cleaner.

    For a use that Python's references do not show, such as a Spark DataFrame: the JVM frees what
    no plan of its own reads.
    """
    release = getattr(rdd, "_bigdl_release", None)
    if release is not None:
        release.detach()
    for parent in (getattr(rdd, "prev", None), *getattr(rdd, "_bigdl_parents", ())):
        if parent is not None:
            hand_over(parent)
