"""Calls that run Spark jobs, and conversion of job failures to errors without JVM frames."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import BigDLError, UsageError, WorkerError, short_traceback
from bigdl.common.private_folders import process_folder
from bigdl.common.timeouts import (
    DRIVER_LOOK_S,
    FAILED_TASKS_S,
    JVM_BROKEN_S,
    SPARK_ANSWER_S,
    SPARK_CANCEL_S,
    TASKS_LOOK_S,
)
from bigdl.orca.cluster import plan, versions
from bigdl.orca.cluster.jvm import loss_of, may_be_lost_connection
from bigdl.runtime.jobs import (
    PROCESS_ENDED,
    DriverUnreachable,
    interruptible,
    user_error,
    worker_lost,
)

if TYPE_CHECKING:
    from py4j.java_gateway import JVMView
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

logger = logging.getLogger("bigdl.orca")


def task_directory(number: int = 0) -> str:
    """Return a local directory of this task's executor; tasks rotate over several directories.

    Parameters
    ----------
    number : int
        Number of the task.
    """
    directories = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    return directories[number % len(directories)] or process_folder()


_MOST_TASKS = 1000  # maximum number of inspected tasks per stage


def check_alive(owner: object, what: str = "data") -> None:
    """Raise UsageError if a SparkContext or Spark Connect session has been stopped.

    Parameters
    ----------
    owner : pyspark.SparkContext, or SparkSession of Spark Connect
        Other objects are accepted.
    what : str
        Name of the dependent object, for the message.

    Raises
    ------
    UsageError
        If the context or session has been stopped.
    """
    if getattr(owner, "_jsc", owner) is None or getattr(owner, "is_stopped", False) is True:
        raise UsageError(
            f"This {what} belongs to a Spark context that has been stopped, so it is no longer "
            "usable; create it again in the active context",
            code="context-stopped",
        )


def check_frame(frame: DataFrame) -> None:
    """Raise UsageError for a DataFrame of a stopped context; see :func:`check_alive`."""
    session = frame.sparkSession
    check_alive(getattr(session, "_sc", session), "DataFrame")


class SparkCall:
    """Call that runs Spark jobs in a separate thread.

    The calling thread only waits, so Ctrl-C never interrupts a request to the JVM. The jobs have a
    unique tag, so only they are cancelled.

    Parameters
    ----------
    owner : pyspark.SparkContext, or SparkSession of Spark Connect
    call : callable
        Function that runs the jobs.
    """

    def __init__(self, owner: Any, call: Callable[[], Any]):
        check_alive(owner)
        self._call, self._session = call, None
        self._sc: Any = None
        if hasattr(owner, "addJobTag"):
            self._add, self._remove = owner.addJobTag, owner.removeJobTag
            self._cancel = owner.cancelJobsWithTag
            self._sc = owner
        else:
            self._session = owner
            self._add, self._remove = owner.addTag, owner.removeTag
            self._cancel = owner.interruptTag
        self._tag = f"bigdl-{secrets.token_hex(6)}"
        self.future: Future[Any] = Future()
        self.cancelled = threading.Event()

    def wait(
        self, poll: Callable[[], None] = lambda: None, stop: Callable[[], None] = lambda: None
    ):
        """Start the call, poll until it ends, and return its result or raise its error.

        `stop` is called before the jobs are cancelled, e.g. on Ctrl-C.
        """
        with interruptible():
            try:
                versions.spark_thread(self._run, self._session).start()
                while wait([self.future], DRIVER_LOOK_S).not_done:
                    poll()
            except BaseException:
                self.cancelled.set()
                stop()
                self._end()
                raise
        return self.future.result()

    def _run(self):
        try:
            self._add(self._tag)
            value = self._call()
        except BaseException as error:  # raised in the calling thread
            self.future.set_exception(_loss(self._sc, error) or error)
        else:
            self.future.set_result(value)
        with contextlib.suppress(Exception):
            self._remove(self._tag)

    def leaving(self) -> list[str]:
        """Return ids of executors that run tasks of this call and are being decommissioned."""
        try:
            jvm = self._sc._jsc.sc()
            executors = {
                task.executorId()
                for stage in _stages(self._sc, self._tag)
                if stage.numActiveTasks
                for task in _tasks(jvm, stage)
                if task.status() == "RUNNING"
            }
            state = jvm.taskScheduler().getExecutorDecommissionState
            return sorted(each for each in executors if state(each).isDefined())
        except Exception as error:  # a private API, or the SparkContext was stopped
            logger.debug("Cannot tell which executors are decommissioned: %s", error)
            return []

    def cancel(self) -> None:
        """Cancel the running jobs."""
        # a lost remote server does not respond
        thread = threading.Thread(target=self._request_cancel, daemon=True)
        thread.start()
        thread.join(None if self._session is None else SPARK_ANSWER_S)

    def _request_cancel(self):
        with contextlib.suppress(Exception):
            self._cancel(self._tag)

    def _end(self):
        deadline = time.monotonic() + SPARK_CANCEL_S
        while not self.future.done() and time.monotonic() < deadline:
            if loss_of(self._sc) is not None:
                return
            self.cancel()  # repeatedly, because the call may be between two jobs
            wait([self.future], 0.2)
        if not self.future.done():
            logger.warning(
                "Spark did not end a job within %g s after its cancellation", SPARK_CANCEL_S
            )


def one_row(values: Iterable[Any], schema: str):
    """Return values as a one-row Arrow record batch for a schema such as ``"id int, x string"``."""
    import pyarrow as pa

    types = {
        "boolean": pa.bool_(),
        "int": pa.int32(),
        "long": pa.int64(),
        "string": pa.string(),
        "binary": pa.binary(),
    }
    names, type_names = zip(*(field.split() for field in schema.split(", ")), strict=True)
    arrays = [pa.array([value], types[t]) for value, t in zip(values, type_names, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names)


def silent_when_closed(function: Callable) -> Callable:
    """Make a function for ``mapInArrow`` or a UDF end silently if its output is closed.

    ``show``, ``limit`` and ``take`` end a task when they have enough rows.  Spark's Python daemon
    then prints a traceback of ``BrokenPipeError``, even before the function is called.  Therefore
    the process is silenced when it unpickles the function.
    """
    silence = _Silence()

    def work(*values):  # without annotations, which Spark would interpret
        _ = silence  # pickled with this function
        return function(*values)

    return work


class _Silence:
    """Object that suppresses closed-connection tracebacks in the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _silenced, ()


def _silenced() -> _Silence:
    daemon = sys.modules["__main__"]  # the daemon that forked this process, if Spark uses one
    if hasattr(daemon, "manager"):
        silence_daemon(daemon)
    return _Silence()


def ignore_pandas_warning() -> None:
    """Ignore a warning about PySpark's pandas API, which Orca does not use."""
    warnings.filterwarnings(
        "ignore", message="PySpark does not yet fully support pandas", category=FutureWarning
    )


def silence_daemon(daemon: Any) -> None:
    """Suppress tracebacks about closed connections in the module ``pyspark.daemon``."""
    if getattr(daemon, "traceback", None) is traceback:
        daemon.traceback = SimpleNamespace(**{**vars(traceback), "print_exc": _print_exc})


def _print_exc(*args: Any, **options: Any) -> None:
    """Print the exception like ``traceback``, unless the connection was closed by the reader."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
        traceback.print_exc(*args, **options)


def _loss(sc: SparkContext | None, error: BaseException) -> BigDLError | None:
    """Return a SparkLost error if the end of the JVM caused `error`."""
    is_known = isinstance(error, BigDLError) or not isinstance(error, Exception)
    return None if is_known else loss_of(sc, JVM_BROKEN_S if may_be_lost_connection(error) else 0.0)


class JobCancelled(BigDLError, RuntimeError):
    """Error raised when the Spark job was cancelled, or the SparkContext was stopped."""

    code = "job-stopped"


_AWAY = "its executor was lost", "their executors were lost"
_INPUT = "its input was lost with an executor", "their input was lost with an executor"
_BROKE = "its connection broke", "their connections broke"
_LOST = (  # Spark's messages, and the reason for one worker and for several
    (r"Python worker (exited|keepalive|faulthandler)", PROCESS_ENDED),
    (r"ExecutorLostFailure|executor.* (was )?lost|worker lost", _AWAY),
    (r"Executor heartbeat timed out|Remote RPC client disassociated", _AWAY),
    (r"FetchFailed|MetadataFetchFailed", _INPUT),
    (r"Connection reset|Broken pipe", _BROKE),
)


_CANCELLED = re.compile(r"cancelled|SparkContext was shut down|SparkContext is stopped")


_TRACEBACK = re.compile(
    r"(Traceback \(most recent call last\):.*?)(?=\n\s*at [\w.$]+[(/]|\Z)", re.DOTALL
)


def failed_function(text: str) -> BigDLError | None:
    """Return the error of a user's function that a Spark failure message contains."""
    match = _TRACEBACK.search(text)
    if match is None:
        return None
    return error_of(_without_state(match[1]), "a task of Spark")


def _without_state(cause: str) -> str:
    """Remove Spark's SQLSTATE suffix from a traceback."""
    return re.sub(r"\s+SQLSTATE: \w+$", "", cause.strip())


def error_of(cause: str, location: str, rank: int = -1, code: str = UsageError.code) -> BigDLError:
    """Convert a traceback to an error; a UsageError stays a UsageError.

    Parameters
    ----------
    cause : str
        Traceback.
    location : str
        Description of where it was raised.
    rank : int
        Rank of the worker.
    code : str
        Error code of a UsageError, if known.
    """
    lines = short_traceback(cause).split("\n")
    summary = next((line for line in lines[1:] if not line.startswith(" ")), lines[-1].strip())
    error_class, _, message = summary.partition(": ")
    error_class = error_class.rpartition(".")[2]
    if error_class == UsageError.__name__:
        return UsageError(message, code=code)
    if "PYTHON_VERSION_MISMATCH" in cause:
        return UsageError(
            versions.python_mismatch(cause), code="version-unsupported", package="python"
        )
    return WorkerError(rank, error_class, cause, location=location)


@contextlib.contextmanager
def users_errors(sc: SparkContext | None) -> Iterator[None]:
    """Context manager that raises the original error of a user's function that fails in a job.

    Otherwise Spark prints the failure of each task, retries the function several times, and adds
    Spark and Java frames to the error.

    Parameters
    ----------
    sc : pyspark.SparkContext or None
        None for a remote Spark.

    Raises
    ------
    WorkerError
        Error with the lines of the user's code.
    """
    if sc is not None:
        check_alive(sc)
    watch = None if sc is None or plan.is_switched_off() else TaskWatch(sc)
    with contextlib.ExitStack() as stack:
        if sc is not None:
            stack.enter_context(plan.quiet(sc))
        if watch is not None:
            stack.enter_context(watch)
        try:
            yield
        except BigDLError:
            raise
        except Exception as error:
            if (loss := _loss(sc, error)) is not None:
                raise loss from None
            failure = (watch and watch.failure) or failed_function(str(error))
            if failure is None:
                raise
            if watch is not None:
                watch.wait_for_tasks()
            time.sleep(FAILED_TASKS_S)
            raise failure from None


class TaskWatch:
    """Context manager that cancels jobs if a task fails twice with the same error.

    Such an error comes from a user's function.  Single failures, such as of the network, are left
    to Spark's retries.

    Parameters
    ----------
    sc : pyspark.SparkContext

    Attributes
    ----------
    text : str
        Spark's message about the task.
    failure : BigDLError or None
        Error of the user's function.
    """

    def __init__(self, sc: SparkContext):
        self._sc = sc
        self._tag = f"bigdl-{secrets.token_hex(6)}"
        self._ended = threading.Event()
        self.text = ""
        self.failure: BigDLError | None = None

    def __enter__(self) -> TaskWatch:
        self._sc.addJobTag(self._tag)
        versions.spark_thread(self._run).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        with contextlib.suppress(Exception):
            self._sc.removeJobTag(self._tag)

    def wait_for_tasks(self) -> None:
        """Wait, with a timeout, for tasks to end; tasks can outlive a cancelled job."""
        until = time.monotonic() + SPARK_CANCEL_S
        while time.monotonic() < until and is_busy(self._sc, self._tag):
            time.sleep(DRIVER_LOOK_S)

    def _run(self) -> None:
        try:
            while self.failure is None and not self._ended.wait(TASKS_LOOK_S):
                self.failure = self._look()
            if self.failure is not None:
                self._sc.cancelJobsWithTag(self._tag)
        except Exception as error:  # a private API, or the SparkContext was stopped
            logger.debug("Cannot tell why tasks fail: %s", error)

    def _look(self) -> BigDLError | None:
        """Return the error of a user's function if a task has failed twice with it, or None."""
        for stage in _stages(self._sc, self._tag):
            # a barrier stage is retried as a whole
            if not (stage.numFailedTasks or stage.currentAttemptId):
                continue
            seen = set()
            for task in _tasks(self._sc._jsc.sc(), stage):
                message = task.errorMessage()
                text = message.get() if message.isDefined() else ""
                files = re.findall(r'^ +File "([^"]+)"', text, re.MULTILINE)
                is_internal = _REPORT in text or (files and f"{os.sep}pyspark{os.sep}" in files[-1])
                if files and not is_internal:
                    failure = failed_function(text)
                    key = task.index(), str(failure)
                    if key in seen:
                        self.text = text
                        return failure
                    seen.add(key)
        return None


def is_busy(sc: SparkContext, tag: str) -> bool:
    """Return True if a task of a job with this tag is running."""
    with contextlib.suppress(Exception):  # a private API, or the SparkContext was stopped
        return any(stage.numActiveTasks for stage in _stages(sc, tag))
    return False


def _stages(sc: SparkContext, tag: str) -> list[Any]:
    """Return Spark's information on the stages of jobs with a tag."""
    tracker = sc.statusTracker()
    jobs = map(tracker.getJobInfo, sc._jsc.sc().statusTracker().getJobIdsForTag(tag))
    numbers = {stage for job in jobs if job is not None for stage in job.stageIds}
    return [stage for stage in map(tracker.getStageInfo, numbers) if stage is not None]


def _tasks(jvm: JVMView, stage: Any) -> Iterator[Any]:
    """Yield Spark's information on a stage's tasks, in all attempts."""
    for attempt in range(stage.currentAttemptId + 1):
        tasks = jvm.statusStore().taskList(stage.stageId, attempt, _MOST_TASKS)
        yield from map(tasks.apply, range(tasks.size()))


_REPORT = "bigdl-report:"


def unreachable(host: str, reason: str) -> RuntimeError:
    """Return the error of a task that cannot reach the driver's channel; see :func:`job_error`."""
    return reported({"unreachable": [host, reason]})


def reported(doc: dict) -> RuntimeError:
    """Encode a report as JSON in an exception for a task to raise; see :func:`job_error`."""
    return RuntimeError(_REPORT + json.dumps(doc) + "\n")


def _container_state(text: str, reasons: tuple[str, str], in_pod: bool) -> str:
    """Return the state of the container that lost a worker, as the end of a sentence."""
    advice = "extra_executor_memory_for_ray requests more"
    if reasons is PROCESS_ENDED:
        return f"; if memory was insufficient, {advice}" if in_pod else ""
    if re.search(r"OOMKilled|possible container OOM|YARN for exceeding \w+ memory", text):
        return f"; its container was killed, probably for exceeding its memory; {advice}"
    match = re.search(r"The API gave the following message: (?!N/A|null)([^\n]+)", text)
    return f"; {match[1].strip(' .')}" if match else ""


def job_error(error: BaseException, unfinished: list[dict], in_pod: bool = False) -> BaseException:
    """Convert a failed Spark job to an error: a lost worker, failed input or another failure.

    Parameters
    ----------
    error : exception
        Exception that Spark raised.
    unfinished : list of dict
        Rank, pid and host of the workers that did not report an end.
    in_pod : bool
        True if executors are Kubernetes pods.
    """
    if isinstance(error, BigDLError):
        return error
    text = str(error)
    if _REPORT in text:
        doc = json.loads(text.partition(_REPORT)[2].partition("\n")[0])
        if "unreachable" not in doc:
            return user_error(doc)
        host, reason = doc["unreachable"]
        return DriverUnreachable(
            f"The worker on {host} cannot connect to the driver at {reason}; open that port for "
            "the workers (channel_port= sets a fixed one), set spark.driver.host to a driver "
            'address that they can reach, or pass rendezvous="rank0"'
        )
    match = _TRACEBACK.search(text)
    if match is None:
        for pattern, reasons in _LOST:
            if re.search(pattern, text, re.IGNORECASE):
                state = _container_state(text, reasons, in_pod)
                return worker_lost(unfinished, *(f"{reason}{state}" for reason in reasons))
        if _CANCELLED.search(text):
            return JobCancelled("The Spark job was cancelled before it finished")
    cause = _without_state(match[1]) if match else text.split("\n\tat ")[0].strip()
    failure = WorkerError(-1, type(error).__name__, cause)
    failure.args = (f"The input could not be computed:\n{short_traceback(cause)}",)
    return failure
