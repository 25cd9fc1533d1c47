"""Where the pieces of files are worked on: tasks of Spark, processes of this machine, or here."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.friesian.ops.spark import active_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PIECES = 4  # for each worker, so that none waits long for the last


class Host(AbstractContextManager):
    """Runs a function on items; a context manager that closes it.

    Attributes
    ----------
    workers : int
        How many items are worked on at the same time.
    """

    workers: int = 1

    @property
    def pieces(self) -> int:
        """Number of pieces that keep all workers busy."""
        return self.workers if self.workers == 1 else self.workers * _PIECES

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The results in the order of the items; raises the first error of the user."""
        results = self._outcomes(partial(_outcome, function), items)
        for result in results:
            if isinstance(result, UsageError):
                raise result
        return results

    @abstractmethod
    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The results in the order of the items, with errors of the user in their place."""

    def close(self) -> None:
        """Free what the host holds."""

    def __exit__(self, *exception: object) -> None:
        self.close()


class Here(Host):
    """This process."""

    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return [function(item) for item in items]


class SparkTasks(Host):
    """A task of Spark for each item.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
    """

    def __init__(self, spark: SparkSession):
        self._spark = spark
        context = getattr(spark, "_sc", None)
        self.workers = context.defaultParallelism if context is not None else 8

    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            pa.set_cpu_count(1)
            for batch in batches:
                for place in batch.column(0).to_pylist():
                    result = pickle.dumps(function(items[place]))
                    yield pa.record_batch(
                        [pa.array([place]), pa.array([result], pa.binary())],
                        names=["place", "result"],
                    )

        if not items:
            return []
        tasks = self._spark.range(0, len(items), 1, len(items))
        done = tasks.mapInArrow(work, "place bigint, result binary").toArrow()
        return [pickle.loads(each.as_py()) for each in done.sort_by("place")["result"]]


def _outcome(function: Callable[[Any], Any], item: Any) -> Any:
    """The result, or the error of the user, whose words Spark would bury."""
    try:
        return function(item)
    except UsageError as error:
        return error


class LocalWorkers(Host):
    """Processes of this machine, which live until :meth:`close`; a context manager.

    Parameters
    ----------
    workers : int, optional
        Default: one for each core.
    """

    def __init__(self, workers: int | None = None):
        from bigdl.runtime.pool import CpuSlot, Stage, WorkerPool

        cores = sorted(os.sched_getaffinity(0))
        if workers is not None:
            check_integer("workers", workers, 1)
        self.workers = workers or len(cores)
        slots = [CpuSlot((cores[i % len(cores)],), 1) for i in range(self.workers)]
        self._pool = WorkerPool([Stage("the pipeline", _caller, slots)])

    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="bigdl-") as folder:
            path = os.path.join(folder, "work")
            with open(path, "wb") as file:
                pickle.dump(function, file, protocol=5)
            return self._pool.run((path, item) for item in items)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def _caller() -> Callable[[tuple[str, Any]], Any]:
    """In a worker: return what calls the function of a file, which is read once."""
    pa.set_cpu_count(1)
    return lambda work: _read_function(work[0])(work[1])


@lru_cache(maxsize=1)
def _read_function(path: str) -> Callable[[Any], Any]:
    with open(path, "rb") as file:
        return pickle.load(file)


def host_of(host: Any) -> AbstractContextManager[Host]:
    """Return the host that a user named; one that is made for this call ends with it.

    None means Spark if it runs, else this machine.
    """
    return nullcontext(host) if isinstance(host, Host) else _new_host(host)


def _new_host(host: Any) -> Host:
    if host in (None, "spark"):
        session = _running_session() or (active_spark() if host == "spark" else None)
        if session is not None:
            return SparkTasks(session)
    if host in (None, "local"):
        return LocalWorkers()
    if host == "here":
        return Here()
    raise UsageError(f"host should be spark, local, here, a host or None, got {host!r}")


def _running_session() -> SparkSession | None:
    if "pyspark" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()
