"""Calls that run Spark jobs, and the errors that a failed job means, without JVM frames."""

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
from bigdl.orca.cluster.jvm import is_of_connection, loss_of
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

logger = logging.getLogger("bigdl.orca")


def task_directory(number: int = 0) -> str:
    """The local directory of this task's executor; where it has several, tasks take turns.

    Parameters
    ----------
    number : int
        Of the task.
    """
    directories = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    return directories[number % len(directories)] or process_folder()


_MOST_TASKS = 1000  # of a stage that are looked at


def check_alive(owner: Any, what: str = "data") -> None:
    """Refuse what was made in a SparkContext, or a session of Spark Connect, that has been stopped.

    Parameters
    ----------
    owner : pyspark.SparkContext, or SparkSession of Spark Connect
        Other objects pass.
    what : str
        What was made in it, for the message.

    Raises
    ------
    UsageError
    """
    if getattr(owner, "_jsc", owner) is None or getattr(owner, "is_stopped", False) is True:
        raise UsageError(
            f"This {what} belongs to a Spark context that has been stopped, and ended with it; "
            "make it again in the context that is active",
            code="context-stopped",
        )


def check_frame(frame: Any) -> None:
    """Refuse a DataFrame of a context that has been stopped, see :func:`check_alive`."""
    session = frame.sparkSession
    check_alive(getattr(session, "_sc", session), "DataFrame")


class SparkCall:
    """A call that runs Spark jobs, in a thread of its own.

    The calling thread only waits: Ctrl-C never hits it in the middle of a conversation with the
    JVM. The jobs carry a tag, so that they can be cancelled and no others.

    Parameters
    ----------
    owner : pyspark.SparkContext, or SparkSession of Spark Connect
    call : callable
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
        """Start, call `poll` until the end, and return what the call returned or raise its error.

        `stop` is called before the jobs are cancelled, on Ctrl-C above all.
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
        """The numbers of executors that run its tasks and are being decommissioned."""
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
        except Exception as error:  # an internal API, or the SparkContext was stopped
            logger.debug("Cannot tell which executors are decommissioned: %s", error)
            return []

    def cancel(self) -> None:
        """Cancel the jobs that run now."""
        # a remote server that went away does not answer
        asking = threading.Thread(target=self._ask_to_cancel, daemon=True)
        asking.start()
        asking.join(None if self._session is None else SPARK_ANSWER_S)

    def _ask_to_cancel(self):
        with contextlib.suppress(Exception):
            self._cancel(self._tag)

    def _end(self):
        end = time.monotonic() + SPARK_CANCEL_S
        while not self.future.done() and time.monotonic() < end:
            if loss_of(self._sc) is not None:
                return
            self.cancel()  # again and again: a call may be between two of its jobs
            wait([self.future], 0.2)
        if not self.future.done():
            logger.warning(
                "Spark did not end a job within %g s after its cancellation", SPARK_CANCEL_S
            )


def one_row(values: Iterable[Any], schema: str):
    """Values as a record batch of Arrow with one row, by Spark's text of its schema."""
    import pyarrow as pa

    types = {
        "boolean": pa.bool_(),
        "int": pa.int32(),
        "long": pa.int64(),
        "string": pa.string(),
        "binary": pa.binary(),
    }
    names, kinds = zip(*(field.split() for field in schema.split(", ")), strict=True)
    arrays = [pa.array([value], types[k]) for value, k in zip(values, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names)


def silent_when_closed(function: Callable) -> Callable:
    """A function for ``mapInArrow`` or a UDF whose process ends silently when nobody reads on.

    ``show``, ``limit`` and ``take`` end a task when they have enough rows.  Spark's daemon for
    Python would print a traceback of ``BrokenPipeError`` then, also where the function has not
    been called yet, so the process is told as soon as it unpickles the function.
    """
    silence = _Silence()

    def work(*values):  # without annotations, which Spark would read
        _ = silence  # travels with this function
        return function(*values)

    return work


class _Silence:
    """Silences Spark's daemon in the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _silenced, ()


def _silenced() -> _Silence:
    daemon = sys.modules["__main__"]  # that forked this process, unless Spark uses none
    if hasattr(daemon, "manager"):
        silence_daemon(daemon)
    return _Silence()


def ignore_pandas_warning() -> None:
    """Leave out a warning about PySpark's pandas API, which Orca does not use."""
    warnings.filterwarnings(
        "ignore", message="PySpark does not yet fully support pandas", category=FutureWarning
    )


def silence_daemon(daemon: Any) -> None:
    """Have a module ``pyspark.daemon`` print nothing about connections that Spark has closed."""
    if getattr(daemon, "traceback", None) is traceback:
        daemon.traceback = SimpleNamespace(**{**vars(traceback), "print_exc": _print_exc})


def _print_exc(*args: Any, **options: Any) -> None:
    """Print the exception as ``traceback`` does, unless it says that nobody reads on."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
        traceback.print_exc(*args, **options)


def _loss(sc: Any, error: BaseException) -> BigDLError | None:
    """Return what an error is if it comes of the end of the JVM."""
    is_known = isinstance(error, BigDLError) or not isinstance(error, Exception)
    return None if is_known else loss_of(sc, JVM_BROKEN_S if is_of_connection(error) else 0.0)


class JobCancelled(BigDLError, RuntimeError):
    """Somebody else cancelled our Spark job, or stopped the SparkContext."""

    code = "job-stopped"


_AWAY = "its executor went away", "their executors went away"
_INPUT = "its input went away with an executor", "their input went away with an executor"
_BROKE = "its connection broke", "their connections broke"
_LOST = (  # what Spark says, and what it means for one worker and for several
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
    """Return the error of a user's function that Spark's text about a failed job holds."""
    match = _TRACEBACK.search(text)
    if match is None:
        return None
    return error_of(_without_state(match[1]), "a task of Spark")


def _without_state(cause: str) -> str:
    """A traceback without what Spark writes behind it."""
    return re.sub(r"\s+SQLSTATE: \w+$", "", cause.strip())


def error_of(cause: str, place: str, rank: int = -1, code: str = UsageError.code) -> BigDLError:
    """Return the error that a traceback tells of: one of the caller is one here, too.

    Parameters
    ----------
    cause : str
        The traceback.
    place : str
        Where it was raised.
    rank : int
    code : str
        Of a UsageError, if it is known.
    """
    lines = short_traceback(cause).split("\n")
    said = next((line for line in lines[1:] if not line.startswith(" ")), lines[-1].strip())
    kind, _, message = said.partition(": ")
    kind = kind.rpartition(".")[2]
    if kind == UsageError.__name__:
        return UsageError(message, code=code)
    if "PYTHON_VERSION_MISMATCH" in cause:
        return UsageError(
            versions.another_python(cause), code="version-unsupported", package="python"
        )
    return WorkerError(rank, kind, cause, location=place)


@contextlib.contextmanager
def users_errors(sc: SparkContext | None) -> Iterator[None]:
    """Raise for a function of the user that fails in a job of a block its own error, and no more.

    Spark would print what fails in each task, run the function again as often as a task may fail,
    and wrap the error in its own and Java's frames.

    Parameters
    ----------
    sc : pyspark.SparkContext or None
        None where Spark is remote.

    Raises
    ------
    WorkerError
        With the lines of the user's code.
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
    """Cancels the jobs of a block once one of their tasks has failed twice by the same error.

    It is one of a function of the user; what fails once, such as a network, is for Spark's retries.

    Parameters
    ----------
    sc : pyspark.SparkContext

    Attributes
    ----------
    text : str
        What Spark says of the task.
    failure : BigDLError or None
        The error of the user's function.
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
        """Wait for the end of the tasks: those of a cancelled job end later than it."""
        until = time.monotonic() + SPARK_CANCEL_S
        while time.monotonic() < until and is_busy(self._sc, self._tag):
            time.sleep(DRIVER_LOOK_S)

    def _run(self) -> None:
        try:
            while self.failure is None and not self._ended.wait(TASKS_LOOK_S):
                self.failure = self._look()
            if self.failure is not None:
                self._sc.cancelJobsWithTag(self._tag)
        except Exception as error:  # an internal API, or the SparkContext was stopped
            logger.debug("Cannot tell why tasks fail: %s", error)

    def _look(self) -> BigDLError | None:
        """Return an error of the user's function with which a task failed twice."""
        for stage in _stages(self._sc, self._tag):
            # a barrier stage is tried again as a whole
            if not (stage.numFailedTasks or stage.currentAttemptId):
                continue
            seen = set()
            for task in _tasks(self._sc._jsc.sc(), stage):
                message = task.errorMessage()
                text = message.get() if message.isDefined() else ""
                files = re.findall(r'^ +File "([^"]+)"', text, re.MULTILINE)
                is_own = _REPORT in text or (files and f"{os.sep}pyspark{os.sep}" in files[-1])
                if files and not is_own:
                    failure = failed_function(text)
                    once = task.index(), str(failure)
                    if once in seen:
                        self.text = text
                        return failure
                    seen.add(once)
        return None


def is_busy(sc: SparkContext, tag: str) -> bool:
    """Return True if a task of a job with a tag runs."""
    with contextlib.suppress(Exception):  # an internal API, or the SparkContext was stopped
        return any(stage.numActiveTasks for stage in _stages(sc, tag))
    return False


def _stages(sc: SparkContext, tag: str) -> list[Any]:
    """Return Spark's facts about the stages of the jobs with a tag."""
    tracker = sc.statusTracker()
    jobs = map(tracker.getJobInfo, sc._jsc.sc().statusTracker().getJobIdsForTag(tag))
    numbers = {stage for job in jobs if job is not None for stage in job.stageIds}
    return [stage for stage in map(tracker.getStageInfo, numbers) if stage is not None]


def _tasks(jvm: JVMView, stage: Any) -> Iterator[Any]:
    """Yield what Spark knows of the tasks of a stage, in all its attempts."""
    for attempt in range(stage.currentAttemptId + 1):
        tasks = jvm.statusStore().taskList(stage.stageId, attempt, _MOST_TASKS)
        yield from map(tasks.apply, range(tasks.size()))


_REPORT = "bigdl-report:"


def unreachable(host: str, reason: str) -> RuntimeError:
    """Return the error of a task that cannot reach the driver's channel; see :func:`job_error`."""
    return reported({"unreachable": [host, reason]})


def reported(doc: dict) -> RuntimeError:
    """A report as what a task raises; see :func:`job_error`."""
    return RuntimeError(_REPORT + json.dumps(doc) + "\n")


def _said_of_container(text: str, reasons: tuple[str, str], in_pod: bool) -> str:
    """Return the state of the container that lost a worker, as the end of a sentence."""
    more = "extra_executor_memory_for_ray asks for more"
    if reasons is PROCESS_ENDED:
        return f"; if that was for want of memory, {more}" if in_pod else ""
    if re.search(r"OOMKilled|possible container OOM|YARN for exceeding \w+ memory", text):
        return f"; its container was killed, as one is that needs too much memory, and {more}"
    match = re.search(r"The API gave the following message: (?!N/A|null)([^\n]+)", text)
    return f"; {match[1].strip(' .')}" if match else ""


def job_error(error: BaseException, unfinished: list[dict], in_pod: bool = False) -> BaseException:
    """A lost worker, the input's own failure, or what else ended a Spark job.

    Parameters
    ----------
    error : exception
        What Spark raised.
    unfinished : list of dict
        Rank, pid and host of the workers that did not end by themselves.
    in_pod : bool
        True if executors are pods of Kubernetes.
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
            "the workers (channel_port= makes it a fixed one), set spark.driver.host to an "
            'address of the driver that they can reach, or pass rendezvous="rank0"'
        )
    match = _TRACEBACK.search(text)
    if match is None:
        for pattern, reasons in _LOST:
            if re.search(pattern, text, re.IGNORECASE):
                said = _said_of_container(text, reasons, in_pod)
                return worker_lost(unfinished, *(f"{reason}{said}" for reason in reasons))
        if _CANCELLED.search(text):
            return JobCancelled("The Spark job was cancelled before it was done")
    cause = _without_state(match[1]) if match else text.split("\n\tat ")[0].strip()
    failure = WorkerError(-1, type(error).__name__, cause)
    failure.args = (f"The input could not be computed:\n{short_traceback(cause)}",)
    return failure
