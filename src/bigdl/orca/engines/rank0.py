"""Jobs without a channel to the driver, for clusters whose executors cannot reach it.

Rank 0 hosts the channel at which the workers meet; they learn its address by Spark's ``allGather``,
which takes about a second.  Options, state and the secret of the channel travel with the task, and
what the workers have to say comes back in the rows of the stage, large values in several, once all
of them have ended: no progress, no output, and of the messages of one topic the last.  After a
lost worker Spark has no rows, so the next attempt reads the input again and goes on from the latest
checkpoint in ``model_dir``, if there is one.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import RANK0_LEAVE_S
from bigdl.orca.cluster.spark_calls import reported
from bigdl.runtime.channel import (
    CHUNK,
    Address,
    AttemptChannel,
    Channel,
    ConnectionLost,
    Unreachable,
)
from bigdl.runtime.task import Task, TaskSpec, describe, task_environment
from bigdl.runtime.worker import ChannelConnection, DriverConnection, capture_output

Row = tuple[int, str, str, bytes | None]


class RowConnection(DriverConnection):
    """Keeps what there is to say until the task ends."""

    def __init__(self, spec: TaskSpec, line: AttemptChannel):
        super().__init__(spec.options, spec.state)
        self._line, self._world_size = line, spec.world_size

    def report_failing(self):
        try:
            return self._line.count("failed", 1)
        except ConnectionLost:  # rank 0 and its channel are gone
            return self._world_size + 1

    def rows(self, rank: int, outcome: str, detail: str) -> Iterator[Row]:
        """Everything, and the outcome as the last row."""
        for doc, data in self.messages.values():
            yield from _with_data(rank, "message", json.dumps(doc), data)
        if self.result is not None:
            yield from _with_data(rank, "result", *self.result)
        if self.error is not None:
            yield rank, "report", json.dumps(self.error), None
        yield rank, outcome, detail, None


def _with_data(rank: int, kind: str, detail: str, data: bytes) -> Iterator[Row]:
    """Yield the pieces of some bytes, and a row that ends them."""
    for start in range(0, len(data), CHUNK):
        yield rank, "piece", "", data[start : start + CHUNK]
    yield rank, kind, detail, None


def execute(spec: TaskSpec, context, batches, local_dir: str) -> Iterator[Row]:
    """Run one task of a job.

    Parameters
    ----------
    spec : TaskSpec
    context : pyspark.BarrierTaskContext
    batches : iterator of pyarrow.RecordBatch
    local_dir : str

    Yields
    ------
    rank, kind, detail, data

    Raises
    ------
    RuntimeError
        With the report of a program's exception, where the other workers do not end by themselves:
        Spark then ends them.
    """
    place = context.partitionId()
    with task_environment(spec), contextlib.ExitStack() as hosted:
        line, address = _meet(spec, context, place, hosted)
        driver = RowConnection(spec, line)
        with capture_output(False, spec.drops_output):
            outcome = Task(spec, place, local_dir, line, address, driver).run(batches)
        _leave(spec, line, place, driver.error)
        hosted.close()
        yield from driver.rows(*outcome)


def _meet(spec, context, place, hosted):
    """A line to the channel of rank 0, which is `hosted` until the end of the task."""
    channel, said = None, ""
    try:
        if place == 0:
            host = context.getTaskInfos()[0].address.rpartition(":")[0] or os.uname().nodename
            channel = Channel(host, secret=spec.secret, certificate=spec.certificate)
            hosted.callback(channel.close)
            said = json.dumps([host, channel.address.port])
        host, port = json.loads(context.allGather(said)[0])
        address = Address(host, port, spec.secret, spec.certificate)
        line = channel.attempt(0) if channel is not None else address.connect(0)
        return line, address
    except Unreachable as error:
        failure = UsageError(
            f"The worker on {os.uname().nodename} cannot connect to worker 0 at {error}; the "
            "workers must be able to open connections to each other",
            code="cluster-unreachable",
        )
        raise reported(describe(failure)) from None
    except UsageError as error:
        raise reported(describe(error)) from None


def _leave(spec, line, place, error):
    """End together, rank 0 with its channel as the last; after an error wait for nobody long."""
    with contextlib.suppress(ConnectionLost):  # rank 0 and its channel may be gone
        line.set(f"left/{place}", "")
        others = [f"left/{p}" for p in range(spec.world_size)]
        end = time.monotonic() + RANK0_LEAVE_S
        while not line.has(*others):
            failed = line.count("failed")
            if failed and time.monotonic() > end:
                break
            if place and not failed:
                return
            time.sleep(0.05)
        else:
            return
    if error is not None:
        raise reported(error)


def read(rows: list[Row], line: AttemptChannel) -> tuple[set[str], list[str]]:
    """Read the rows of a stage, and say on the driver's line what workers would have said there.

    Returns
    -------
    outcomes : set of str
    details : list of str
    """
    driver, outcomes, details = ChannelConnection(line), set(), []
    pieces: list[bytes] = []  # those of a rank follow each other
    for rank, kind, detail, data in rows:
        if kind == "piece":
            pieces.append(data or b"")
        elif kind == "message":
            driver.send(json.loads(detail), b"".join(pieces))
            pieces = []
        elif kind == "result":
            driver.send_result(rank, detail, b"".join(pieces))
            pieces = []
        elif kind == "report":
            driver.report(json.loads(detail))
        else:
            outcomes.add(kind)
            details += [detail] if detail else []
    return outcomes, details
