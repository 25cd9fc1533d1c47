"""From a failed Spark job to one of our errors, in one sentence and without JVM frames."""

from __future__ import annotations

import json
import re

from bigdl.common.errors import BigDLError, UsageError, WorkerError, WorkerLost

__all__ = ["JobCancelled", "NoRows", "NoWay", "job_error", "user_error", "worker_lost"]


class NoRows(UsageError):
    """The input of a job has no rows at all."""


class NoWay(UsageError):
    """Workers cannot open a connection to the driver."""


class JobCancelled(BigDLError, RuntimeError):
    """Somebody else cancelled our Spark job, or stopped the SparkContext."""


_ENDED = "its Python process ended unexpectedly", "their Python processes ended unexpectedly"
_AWAY = "its executor went away", "their executors went away"
_INPUT = "its input went away with an executor", "their input went away with an executor"
_BROKE = "its connection broke", "their connections broke"
_LOST = (  # what Spark says, and what it means for one worker and for several
    (r"Python worker (exited|keepalive|faulthandler)", _ENDED),
    (r"ExecutorLostFailure|executor.* (was )?lost|worker lost", _AWAY),
    (r"Executor heartbeat timed out|Remote RPC client disassociated", _AWAY),
    (r"FetchFailed|MetadataFetchFailed", _INPUT),
    (r"Connection reset|Broken pipe", _BROKE),
)
_CANCELLED = re.compile(r"cancelled|SparkContext was shut down|SparkContext is stopped")
_TRACEBACK = re.compile(
    r"(Traceback \(most recent call last\):.*?)(?=\n\s*at [\w.$]+[(/]|\Z)", re.DOTALL
)
_UNREACHABLE = "bigdl-unreachable:"
_REPORT = "bigdl-report:"


def user_error(doc: dict) -> BigDLError:
    """The error that a worker reported."""
    if doc["usage"]:
        return UsageError(doc["message"])
    return WorkerError(doc["rank"], doc["kind"], doc["traceback"])


def unreachable(host: str, reason: str) -> RuntimeError:
    """What a task raises that cannot tell the driver in another way; see :func:`job_error`."""
    return RuntimeError(_UNREACHABLE + json.dumps([host, reason]) + "\n")


def reported(doc: dict) -> RuntimeError:
    """A report as what a task raises; see :func:`job_error`."""
    return RuntimeError(_REPORT + json.dumps(doc) + "\n")


def job_error(error: BaseException, vanished: list[dict]) -> BaseException:
    """A lost worker, the input's own failure, or what else ended a Spark job.

    Parameters
    ----------
    error : exception
        What Spark raised.
    vanished : list of dict
        Rank, pid and host of the workers that did not end by themselves.
    """
    if isinstance(error, BigDLError):
        return error
    text = str(error)
    if _REPORT in text:
        return user_error(_marked(text, _REPORT))
    if _UNREACHABLE in text:
        host, reason = _marked(text, _UNREACHABLE)
        return NoWay(
            f"The worker on {host} cannot connect to the driver at {reason}; open that port for "
            "the workers (channel_port= makes it a fixed one), set spark.driver.host to an "
            'address of the driver that they can reach, or pass rendezvous="rank0"'
        )
    found = _TRACEBACK.search(text)
    if found is None:
        for pattern, reasons in _LOST:
            if re.search(pattern, text, re.IGNORECASE):
                return worker_lost(vanished, *reasons)
        if _CANCELLED.search(text):
            return JobCancelled("The Spark job was cancelled before it was done")
    cause = (found.group(1) if found else text.split("\n\tat ")[0]).strip()
    failure = WorkerError(-1, type(error).__name__, cause)
    failure.args = (f"The input could not be computed:\n{cause}",)
    return failure


def _marked(text, mark):
    return json.loads(text.partition(mark)[2].partition("\n")[0])


def worker_lost(vanished: list[dict], reason: str, reason_of_several: str = "") -> WorkerLost:
    """Who was lost, as far as it is known, and why."""
    if not vanished:
        return WorkerLost(f"A worker was lost: {reason}")
    who = " and ".join(f"{w['rank']} (process {w['pid']} on {w['host']})" for w in vanished[:3])
    if len(vanished) == 1:
        return WorkerLost(f"Worker {who} was lost: {reason}")
    if len(vanished) > 3:
        who += f" and {len(vanished) - 3} more"
    return WorkerLost(f"Workers {who} were lost: {reason_of_several or reason}")
