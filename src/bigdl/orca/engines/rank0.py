"""Jobs without a channel to the driver, for clusters whose executors cannot reach it.

Rank 0 hosts the channel of the workers; Spark's ``allGather`` distributes its address, which takes
about a second.  Options, state and the channel's secret are sent with the task.  The workers'
messages and results are returned in the rows of the stage, large values in several rows, after all
workers have ended.  So there is no progress or output, and only the last message of a topic is
kept.  If a worker is lost, Spark returns no rows; the next attempt reads the input again and
resumes from the latest checkpoint in ``model_dir``, if there is one.
"""

import contextlib
import json
import time
from collections.abc import Iterator

from bigdl.common.errors import UsageError
from bigdl.common.platform.network import host_name
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
    """Driver connection that buffers messages and results until the task ends."""

    def __init__(self, spec: TaskSpec, channel: AttemptChannel):
        super().__init__(spec.options, spec.state)
        self._channel, self._world_size = channel, spec.world_size

    def report_failing(self):
        try:
            return self._channel.count("failed", 1)
        except ConnectionLost:  # rank 0 and its channel are gone
            return self._world_size + 1

    def rows(self, rank: int, outcome: str, detail: str) -> Iterator[Row]:
        """Yield the buffered messages and results, then the outcome as the last row."""
        for doc, data in self.messages.values():
            yield from _with_data(rank, "message", json.dumps(doc), data)
        if self.result is not None:
            yield from _with_data(rank, "result", *self.result)
        if self.error is not None:
            yield rank, "report", json.dumps(self.error), None
        yield rank, outcome, detail, None


def _with_data(rank: int, row_type: str, detail: str, data: bytes) -> Iterator[Row]:
    """Yield the data in pieces, as rows, then the row that the data belongs to."""
    for start in range(0, len(data), CHUNK):
        yield rank, "piece", "", data[start : start + CHUNK]
    yield rank, row_type, detail, None


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
    rank, type, detail, data

    Raises
    ------
    RuntimeError
        Report of a program's exception, if the other workers do not end by themselves, so that
        Spark ends them.
    """
    rank = context.partitionId()
    with task_environment(spec), contextlib.ExitStack() as hosted:
        channel, address = _meet(spec, context, rank, hosted)
        driver = RowConnection(spec, channel)
        with capture_output(False, spec.drops_output):
            outcome = Task(spec, rank, local_dir, channel, address, driver).run(batches)
        _leave(spec, channel, rank, driver.error)
        hosted.close()
        yield from driver.rows(*outcome)


def _meet(spec, context, rank, hosted):
    """Connect to rank 0's channel, which rank 0 opens and registers in the ExitStack `hosted`."""
    server, location = None, ""
    try:
        if rank == 0:
            host = context.getTaskInfos()[0].address.rpartition(":")[0] or host_name()
            server = Channel(host, secret=spec.secret, certificate=spec.certificate)
            hosted.callback(server.close)
            location = json.dumps([host, server.address.port])
        host, port = json.loads(context.allGather(location)[0])
        address = Address(host, port, spec.secret, spec.certificate)
        channel = server.attempt(0) if server is not None else address.connect(0)
        return channel, address
    except Unreachable as error:
        failure = UsageError(
            f"The worker on {host_name()} cannot connect to worker 0 at {error}; the "
            "workers must be able to open connections to each other",
            code="cluster-unreachable",
        )
        raise reported(describe(failure)) from None
    except UsageError as error:
        raise reported(describe(error)) from None


def _leave(spec, channel, rank, error):
    """Wait on rank 0 until all workers end; after a failure, all ranks wait for a limited time."""
    with contextlib.suppress(ConnectionLost):  # rank 0 and its channel may be gone
        channel.set(f"left/{rank}", "")
        others = [f"left/{p}" for p in range(spec.world_size)]
        end = time.monotonic() + RANK0_LEAVE_S
        while not channel.has(*others):
            failed = channel.count("failed")
            if failed and time.monotonic() > end:
                break
            if rank and not failed:
                return
            time.sleep(0.05)
        else:
            return
    if error is not None:
        raise reported(error)


def read(rows: list[Row], channel: AttemptChannel) -> tuple[set[str], list[str]]:
    """Read the rows of a stage and replay the workers' messages on the driver's channel.

    Returns
    -------
    outcomes : set of str
    details : list of str
    """
    driver, outcomes, details = ChannelConnection(channel), set(), []
    pieces: list[bytes] = []  # pieces of a rank are consecutive
    for rank, row_type, detail, data in rows:
        if row_type == "piece":
            pieces.append(data or b"")
        elif row_type == "message":
            driver.send(json.loads(detail), b"".join(pieces))
            pieces = []
        elif row_type == "result":
            driver.send_result(rank, detail, b"".join(pieces))
            pieces = []
        elif row_type == "report":
            driver.report(json.loads(detail))
        else:
            outcomes.add(row_type)
            details += [detail] if detail else []
    return outcomes, details
