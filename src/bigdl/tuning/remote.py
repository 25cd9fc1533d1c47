"""Trials of one study in processes on other machines.

The driver asks and tells: a :class:`TrialServer` holds the study, and answers the calls of workers
over the :mod:`~bigdl.runtime.channel`. Each worker runs a :class:`TrialProgram`, which pulls a
trial, runs the objective on a :class:`RemoteTrial`, and returns its result with the request for the
next trial. A suggestion, a report or a pruning decision is one message, which the driver passes to
Optuna's trial. So samplers, pruners and storages exist in the driver only, and one worker runs the
same trials as ``study.optimize``. With several workers per trial, free workers wait until enough of
them can start a trial together (:mod:`~bigdl.tuning.groups`).
"""

from __future__ import annotations

import builtins
import copy
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from optuna import exceptions
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)
from optuna.samplers import BruteForceSampler, GridSampler
from optuna.trial import BaseTrial, TrialState

from bigdl.common.errors import UsageError, WorkerError
from bigdl.common.timeouts import STUDY_HEARTBEAT_S
from bigdl.tuning.groups import (
    TrialGroup,
    error_of_report,
    error_report,
    group_channel,
    not_json,
    plain_value,
)
from bigdl.tuning.study import propose_again, record_process

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterator

    from optuna.distributions import BaseDistribution, CategoricalChoiceType
    from optuna.study import Study, StudyDirection
    from optuna.trial import FrozenTrial, Trial

    from bigdl.runtime.channel import AttemptChannel
    from bigdl.runtime.shared_objects import SharedReference
    from bigdl.runtime.worker import Worker

logger = logging.getLogger("optuna")

T = TypeVar("T")

_CALLS = "trials"  # name of the channel's function


# The driver --------------------------------------------------------------------------------------


_Key = tuple[int, int]  # number of the attempt, and rank of the worker


@dataclass
class _RunningTrial:
    """A trial that one or several workers run.

    Attributes
    ----------
    trial : optuna.trial.Trial
    members : list of (int, int)
        Its workers; the first one, rank 0 of the trial, calls the driver.
    snapshot : list of FrozenTrial or None
        All trials as of the trial's first suggestion. Optuna keeps it for each thread.
    has_sent_joint : bool
        Whether the worker knows the parameters that the sampler has drawn together.
    error : Exception or None
        Error of a call that the worker did not wait for.
    outcomes : dict
        Outcomes of the members that have ended, in the order of their ends.
    """

    trial: Trial
    members: list[_Key]
    snapshot: Any = None
    has_sent_joint: bool = False
    error: Exception | None = None
    outcomes: dict[_Key, dict[str, Any]] = field(default_factory=dict)

    @property
    def outcome(self) -> dict[str, Any]:
        """The cause of the first failure, or the outcome of rank 0 if no member has failed."""
        failed = [each for each in self.outcomes.values() if "failure" in each]
        causes = [each for each in failed if not each["failure"]["is_peer"]]
        return (causes or failed or [self.outcomes[self.members[0]]])[0]

    @property
    def peer_error(self) -> str | None:
        """Traceback of a failure that began on another rank, which rank 0 cannot record."""
        outcome = self.outcome
        if "failure" not in outcome or outcome is self.outcomes[self.members[0]]:
            return None
        return str(outcome["failure"]["traceback"])


class TrialServer:
    """Server of a study's trials, which workers pull over the channel.

    One thread makes all calls of Optuna and of the callbacks, in the order of the requests.

    Parameters
    ----------
    study : optuna.Study
    n_trials : int, optional
        Number of trials to run.
    catch : tuple of exception types
        Exceptions of the objective that do not end the search.
    callbacks : sequence of callable
        Called with the study and each finished trial.
    on_upload : callable, optional
        Called with a trial's number and the bytes of :meth:`RemoteTrial.upload`.
    workers_per_trial : int
        Number of workers that run each trial together.
    total_workers : int, optional
        Number of workers of an attempt, if the cluster does not replace lost ones.

    Attributes
    ----------
    finished : int
        Number of finished trials.
    error : Exception or None
        Error of the objective or of a callback, which ends the search.
    """

    def __init__(
        self,
        study: Study,
        n_trials: int | None,
        catch: tuple[type[Exception], ...] = (),
        callbacks: Sequence[Callable[[Study, FrozenTrial], None]] = (),
        on_upload: Callable[[int, bytes], None] | None = None,
        workers_per_trial: int = 1,
        total_workers: int | None = None,
    ):
        self._study, self._catch, self._callbacks = study, catch, callbacks
        self._on_upload, self._workers_per_trial = on_upload, workers_per_trial
        self._remaining = math.inf if n_trials is None else n_trials
        self._running: dict[_Key, _RunningTrial] = {}
        self._using: dict[_Key, _RunningTrial] = {}  # whose shared keys a worker may still use
        self._total_workers = total_workers
        self._gone: set[_Key] = set()  # workers that were lost, or that get no more trials
        self._waiting: list[_Key] = []  # workers without a trial, if trials have several
        self._changed = time.monotonic()  # when a worker began to wait, or a trial ended
        self._seen: set[_Key] = set()
        self._attempt = 0
        self._thread = ThreadPoolExecutor(1, "bigdl-search")
        self._beaten = time.monotonic()
        self._is_closed = False
        self.finished = 0
        self.error: Exception | None = None
        study._stop_flag = False

    @property
    def is_done(self) -> bool:
        """True if no trial is running and none will start."""
        return not self._running and not self._has_more

    @property
    def _has_more(self) -> bool:
        is_stopped = self._study._stop_flag or self._is_closed or self.error is not None
        return self._remaining > 0 and not is_stopped

    @property
    def running(self) -> int:
        """Number of running trials."""
        return len({each.trial.number for each in list(self._running.values())})

    def seconds_short_of_workers(self) -> float:
        """Return for how long some workers have waited for others, and no trial has run."""
        if not self._waiting or self._running or not self._has_more:
            return 0.0
        return time.monotonic() - self._changed

    @property
    def waiting(self) -> int:
        """Number of workers that wait for others to start a trial together."""
        return len(self._waiting)

    def serve(self, channel: AttemptChannel) -> None:
        """Answer the workers of an attempt, when those of the previous one have ended."""
        self._thread.submit(self._lose_all).result()
        self._attempt += 1
        self._channel = channel
        answer = functools.partial(self._answer, self._attempt)
        channel.answer_calls(_CALLS, answer, self._thread)

    def beat(self) -> None:
        """Record a heartbeat of the running trials if the storage uses them."""
        if time.monotonic() - self._beaten < STUDY_HEARTBEAT_S:
            return
        self._beaten = time.monotonic()
        storage: Any = self._study._storage
        if getattr(storage, "get_heartbeat_interval", lambda: None)() is not None:
            self._thread.submit(self._record_heartbeats)

    def stop(self) -> None:
        """Start and repeat no more trials."""
        self._is_closed = True

    def close(self) -> None:
        """Mark the running trials as failed, and release the thread."""
        self.stop()
        with self._suppressed_errors():
            self._thread.submit(self._fail_running).result()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # In the thread ------------------------------------------------------------------------------

    def _answer(self, attempt: int, request: dict[str, Any]) -> dict[str, Any]:
        key = attempt, request["rank"]
        try:
            if request["call"] == "next":
                return self._next(key, request["outcome"])
            running = self._running.get(key)
            if running is None or running.trial.number != request["trial"]:
                given_up = RuntimeError("The search has given up this trial")
                return {"error": error_report(given_up)}
            if running.error is not None:
                raise running.error
            with self._in_optimization(running):
                value = self._call(running, **request)
            return {"value": plain_value(value), **_joint_parameters(running)}
        except Exception as error:
            if request.get("is_posted"):
                self._running[key].error = error
            return {"error": error_report(error)}

    def _call(
        self, running: _RunningTrial, call: str, rank: int, arguments: dict[str, Any], **_: object
    ) -> object:
        trial, name = running.trial, call
        if name in _METHODS:
            return getattr(trial, name)(**arguments)
        if name == "distributions":
            return {k: distribution_to_json(v) for k, v in trial.distributions.items()}
        if name == "distribution":
            distribution = json_to_distribution(arguments["distribution"])
            return trial._suggest(arguments["name"], distribution)
        if name == "accept":
            distribution = json_to_distribution(arguments["distribution"])
            value = trial._suggest(arguments["name"], distribution)
            if value != arguments["value"]:
                raise RuntimeError(f"The sampler changed parameter {arguments['name']}")
            return None
        if name == "upload":
            data = self._channel.take_bytes(f"upload/{rank}")
            if self._on_upload is not None:
                self._on_upload(trial.number, data)
            return None
        if name == "stop":
            self._study.stop()
            return None
        if name == "study":
            return getattr(self._study, arguments["attribute"])
        raise ValueError(f"Unknown call of a trial: {name}")

    def _next(self, key: _Key, outcome: dict[str, Any] | None) -> dict[str, Any]:
        """Record the result of a worker's trial, and return its next trial."""
        if key not in self._seen:
            self._seen.add(key)
            self._channel.when(f"gone/{key[1]}", lambda: self._note_loss(key))
        try:
            self._end(key, outcome)
            if self._workers_per_trial > 1:
                self._waiting.append(key)
                self._changed = time.monotonic()
                self._assign()
                return {"waits": True}
            if self._has_more:
                return self._start([key])
        except Exception as error:  # of a callback, a sampler or the storage
            self.error = self.error or error
        self._gone.add(key)
        return {"trial": None}

    def _end(self, key: _Key, outcome: dict[str, Any] | None) -> None:
        """End the trial of a worker; it runs until its result is recorded."""
        running = self._running.get(key)
        try:
            if running is not None and outcome is not None:
                self._record(running, key, outcome)
        finally:
            self._changed = time.monotonic()
            self._running.pop(key, None)
            self._leave(key)

    def _record(self, running: _RunningTrial, key: _Key, outcome: dict[str, Any]) -> None:
        """Record the outcome of a worker, and the result of its trial if it was the last one."""
        running.outcomes[key] = outcome
        if len(running.outcomes) < len(running.members):
            if "failure" in outcome:
                self._release(running)
            group = group_channel(self._channel, running.trial.number)
            group.set(f"ended/{running.members.index(key)}", "")
            return
        if running.error is not None:
            self._study.tell(running.trial, state=TrialState.FAIL)
            raise running.error
        if running.peer_error is not None:
            running.trial.set_user_attr("error", running.peer_error)
        self._finish(running, running.outcome)

    def _leave(self, key: _Key) -> None:
        """Delete the keys that the workers of a trial share if this worker was its last one."""
        running = self._using.pop(key, None)
        if running is not None and all(each is not running for each in self._using.values()):
            group_channel(self._channel, running.trial.number).clear()

    def _release(self, running: _RunningTrial) -> None:
        """Notify the workers of a trial that wait for another one that it has failed."""
        if len(running.members) > 1:
            group_channel(self._channel, running.trial.number).count("failed", 1)

    def _assign(self) -> None:
        """Start trials on the waiting workers; end these workers if no trial remains."""
        while self._has_more and len(self._waiting) >= self._workers_per_trial:
            members = self._waiting[: self._workers_per_trial]
            del self._waiting[: self._workers_per_trial]
            description = self._start(members)
            for rank, (_, worker) in enumerate(members):
                group = [rank, self._workers_per_trial]
                self._channel.set_json(f"assigned/{worker}", {**description, "group": group})
        if not self._has_more:
            self._end_waiting()
        self._end_if_too_few()

    def _end_waiting(self) -> None:
        """End the workers that wait for others."""
        self._gone.update(self._waiting)
        for _, worker in self._waiting:
            self._channel.set_json(f"assigned/{worker}", {"trial": None})
        self._waiting.clear()

    def _start(self, members: list[_Key]) -> dict[str, Any]:
        """Start a trial on some workers, and return its description for them."""
        self._remaining -= 1
        with self._in_optimization():
            trial = self._study.ask()
        record_process(trial)
        snapshot = self._study._thread_local.cached_all_trials
        self._study._thread_local.cached_all_trials = None
        running = _RunningTrial(trial, members, snapshot)
        self._running.update(dict.fromkeys(members, running))
        if len(members) > 1:
            self._using.update(dict.fromkeys(members, running))
        return {
            "trial": trial.number,
            "user_attrs": _json_items(trial.user_attrs),
            "params": _json_items(trial.params),
            "directions": [each.name for each in self._study.directions],
            "study_name": self._study.study_name,
            "time": time.time(),
        }

    def _finish(self, running: _RunningTrial, outcome: dict[str, Any]) -> None:
        trial, study = running.trial, self._study
        failure = outcome.get("failure")
        with self._in_optimization():
            if failure is not None:
                record = study.tell(trial, state=TrialState.FAIL)
            elif "pruned" in outcome:
                record = study.tell(trial, state=TrialState.PRUNED)
            else:
                record = study.tell(trial, outcome["values"])
            self._log(record, outcome)
            self.finished += 1
            if failure is not None and not _matches(failure["classes"], self._catch):
                self.error = _error_of(failure, trial.number)
                return
            for callback in self._callbacks:
                frozen = study._storage.get_trial(trial._trial_id)
                callback(study, copy.deepcopy(frozen))

    def _log(self, record: FrozenTrial, outcome: dict[str, Any]) -> None:
        number, params = record.number, record.params
        if record.state == TrialState.COMPLETE:
            self._study._log_completed_trial(record.values, number, params)
        elif record.state == TrialState.PRUNED:
            logger.info("Trial %d pruned. %s", number, outcome["pruned"])
        else:
            failure = outcome.get("failure")
            cause = failure["message"] if failure else "its result is not a valid value"
            logger.warning("Trial %d failed with parameters %s: %s", number, params, cause)

    def _note_loss(self, key: _Key) -> None:
        with self._suppressed_errors():  # the thread may have ended
            self._thread.submit(self._lose, key)

    def _lose_all(self) -> None:
        self._waiting.clear()
        for key in list({**self._running, **self._using}):
            self._lose(key)

    def _lose(self, key: _Key) -> None:
        """Give up the trial of a lost worker."""
        self._gone.add(key)
        if key in self._waiting:
            self._waiting.remove(key)
        running = self._running.get(key)
        if running is not None:
            self._give_up(running)
        self._leave(key)
        self._end_if_too_few()

    def _give_up(self, running: _RunningTrial) -> None:
        """Mark a trial as failed, and repeat it once."""
        try:
            with self._in_optimization():
                record = self._study.tell(running.trial, state=TrialState.FAIL)
            is_ending = self._is_closed or self._channel.has("abort")
            is_repeated = not is_ending and propose_again(self._study, record)
            self._remaining += is_repeated
            rest = "it is repeated" if is_repeated else "it is not repeated again"
            if not is_ending:
                logger.warning("The worker of trial %d was lost; %s", record.number, rest)
        except Exception as error:
            self.error = self.error or error
        finally:  # at last: until then the search is not done
            self._changed = time.monotonic()
            for member in running.members:
                if self._running.get(member) is running:  # it may run the next trial already
                    del self._running[member]
            self._release(running)

    def _end_if_too_few(self) -> None:
        """End the waiting workers if the remaining ones of the attempt cannot run a trial."""
        if self._total_workers is None or self._workers_per_trial == 1:
            return
        gone = sum(attempt == self._attempt for attempt, _ in self._gone)
        if self._total_workers - gone < self._workers_per_trial:
            self._end_waiting()

    def _fail_running(self) -> None:
        for trial in {each.trial.number: each.trial for each in self._running.values()}.values():
            with self._suppressed_errors(), self._in_optimization():
                self._study.tell(trial, state=TrialState.FAIL)
        self._running.clear()
        self._study._storage.remove_session()

    def _record_heartbeats(self) -> None:
        storage: Any = self._study._storage
        with self._suppressed_errors():
            for trial in {each.trial._trial_id for each in self._running.values()}:
                storage.record_heartbeat(trial)

    @contextmanager
    def _in_optimization(self, running: _RunningTrial | None = None) -> Iterator[None]:
        """Context manager in which Optuna behaves as in ``study.optimize``, for one trial."""
        local: Any = self._study._thread_local
        local.in_optimize_loop = True
        local.cached_all_trials = running and running.snapshot
        try:
            yield
        finally:
            local.in_optimize_loop = False
            if running is not None:
                running.snapshot, local.cached_all_trials = local.cached_all_trials, None

    @contextmanager
    def _suppressed_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            logger.debug("Ignored at the end of a search: %s", error)


def _joint_parameters(running: _RunningTrial) -> dict[str, Any]:
    """Return the parameters that the sampler has drawn together, for the trial's first suggestion.

    Optuna's trial returns them for the distributions with which they were drawn. So the worker
    needs no further answers for them.
    """
    trial: Any = running.trial
    if running.has_sent_joint or trial._relative_params is None:
        return {}
    running.has_sent_joint = True
    drawn = {
        name: [distribution_to_json(trial.relative_search_space[name]), plain_value(value)]
        for name, value in trial._relative_params.items()
        if name not in trial._fixed_params and not trial.relative_search_space[name].single()
    }
    return {"joint": drawn} if drawn else {}


def needs_end(study: Study, n_trials: int | None, timeout: float | None) -> bool:
    """Return True if nothing would end a search."""
    is_exhaustive = isinstance(study.sampler, GridSampler | BruteForceSampler)
    return n_trials is None and timeout is None and not is_exhaustive


def _matches(classes: Sequence[str], catch: tuple[type[Exception], ...]) -> bool:
    names = {f"{each.__module__}.{each.__qualname__}" for each in catch}
    return not names.isdisjoint(classes)


def _error_of(failure: dict[str, Any], number: int) -> Exception:
    """Return the exception to raise for a failed objective; a builtin one keeps its class."""
    if failure["usage"]:
        return UsageError(failure["message"], code=failure["code"], **failure["facts"])
    name, text = failure["kind"], failure["traceback"]
    error = WorkerError(-1, name, text, location=f"trial {number}")
    original = getattr(builtins, name, None)
    if f"builtins.{name}" != failure["classes"][0] or not isinstance(original, type):
        return error
    try:
        converted = original(failure["message"])
    except Exception:  # its constructor has other arguments
        return error
    converted.add_note(str(error))
    return converted if isinstance(converted, Exception) else error


# The workers -------------------------------------------------------------------------------------

_METHODS = (
    *("suggest_float", "suggest_int", "suggest_categorical"),
    *("report", "should_prune", "set_user_attr", "set_constraint"),
)


class TrialProgram:
    """Program of a worker that runs trials until the driver has no more.

    Parameters
    ----------
    objective : callable
        Objective of the study; it must be picklable.
    data : SharedReference, optional
        Second argument of the objective.
    """

    def __init__(self, objective: Callable[..., Any], data: SharedReference | None):
        self._objective, self._data = objective, data

    def __call__(self, worker: Worker) -> int:
        """Run trials and return their number."""
        if self._data is None:
            return self._run_all(worker, self._objective)
        with self._data.open(worker.channel) as data:
            return self._run_all(worker, lambda trial: self._objective(trial, data))

    def _run_all(self, worker: Worker, objective: Callable[[RemoteTrial], Any]) -> int:
        outcome: dict[str, Any] | None = None
        for count in range(1 << 62):
            request = {"call": "next", "rank": worker.rank, "outcome": outcome}
            answer = worker.channel.call(_CALLS, request)
            if answer.get("waits"):
                key = f"assigned/{worker.rank}"
                answer = worker.channel.get_json(key)
                worker.channel.delete(key)
            if answer.get("trial") is None:
                return count
            group = TrialGroup(worker, answer["trial"], *answer.get("group", (0, 1)))
            try:
                trial = RemoteTrial(worker.channel, worker.rank, answer, group)
                outcome = _outcome(objective, trial)
            finally:
                group.close()
        return 0


def _outcome(objective: Callable[[RemoteTrial], Any], trial: RemoteTrial) -> dict[str, Any]:
    """Run the objective on a trial and describe its result."""
    from bigdl.runtime.channel import ConnectionLost
    from bigdl.runtime.task import describe, is_peer_failure

    try:
        return {"values": _plain_values(objective(trial))}
    except exceptions.TrialPruned as pruned:
        return {"pruned": str(pruned)}
    except ConnectionLost:
        raise
    except (Exception, SystemExit) as error:
        classes = [f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]
        is_peer = is_peer_failure(error) or trial.group.is_of_rank_0(error)
        failure = {**describe(error), "classes": classes, "is_peer": is_peer}
        return {"values": None, "failure": failure}


class RemoteTrial(BaseTrial):
    """Trial of an objective that runs on another machine, with the interface of Optuna's trials.

    Each suggestion, report and pruning decision is one message to the driver. If several workers
    run the trial, rank 0 sends it and the other ranks receive its result.

    Parameters
    ----------
    channel : AttemptChannel
    worker : int
        Rank of the worker in the search.
    answer : dict
        The driver's description of the trial.
    group : TrialGroup
        The workers of the trial.
    """

    def __init__(
        self, channel: AttemptChannel, worker: int, answer: Mapping[str, Any], group: TrialGroup
    ):
        self._channel, self._worker, self.group = channel, worker, group
        self._number = answer["trial"]
        self._params = dict(answer["params"])
        self._user_attrs = dict(answer["user_attrs"])
        self._constraints: dict[str, float] = {}
        self._joint: dict[str, tuple[BaseDistribution, Any]] = {}
        self.study = RemoteStudy(self, answer["study_name"], answer["directions"])
        self._start = time.time()
        self._clock_lead = self._start - float(answer["time"])

    def __repr__(self) -> str:
        return f"RemoteTrial(number={self._number}, params={self._params})"

    def driver_time(self) -> float:
        """Return the time of the driver's clock, which may differ from that of this machine."""
        return time.time() - self._clock_lead

    def call(self, method: str, /, **arguments: object) -> dict[str, Any]:
        """Call the driver and return its answer's ``value``; raise the error of Optuna there."""
        plain = {key: plain_value(value) for key, value in arguments.items()}
        request = {"call": method, "rank": self._worker, "trial": self._number, "arguments": plain}
        try:
            answer = self._channel.call(_CALLS, request)
        except TypeError as error:  # of JSON
            advice = "for other categories, suggest their index"
            raise not_json(method, arguments, error, advice) from None
        if "error" in answer:
            raise error_of_report(answer["error"])
        for name, (text, value) in answer.get("joint", {}).items():
            self._joint[name] = json_to_distribution(text), value
        return answer

    def suggest_float(
        self,
        name: str,
        low: float,
        high: float,
        *,
        step: float | None = None,
        log: bool = False,
    ) -> float:
        arguments = {"low": low, "high": high, "step": step, "log": log}
        return float(self._ask("suggest_float", name, FloatDistribution, **arguments))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        arguments = {"low": low, "high": high, "step": step, "log": log}
        return int(self._ask("suggest_int", name, IntDistribution, **arguments))

    def suggest_categorical(  # type: ignore[override]  # Optuna has an overload for each type
        self, name: str, choices: Sequence[CategoricalChoiceType]
    ) -> CategoricalChoiceType:
        choice: CategoricalChoiceType = self._ask(
            "suggest_categorical", name, CategoricalDistribution, choices=list(choices)
        )
        return choice

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        return self.suggest_float(name, low, high, step=q)

    def _suggest(self, name: str, distribution: BaseDistribution) -> object:
        # the interface of search spaces, as in Optuna's Trial
        def compute() -> object:
            if self._is_joint(name, distribution):
                return self._accept(name)
            text = distribution_to_json(distribution)
            return self.call("distribution", name=name, distribution=text)["value"]

        return self._suggested(name, compute)

    def upload(self, data: bytes) -> None:
        """Send bytes, such as trained weights, to the ``on_upload`` of the search."""
        if self.rank == 0:
            self._channel.put_bytes(f"upload/{self._worker}", data)
            self.call("upload")

    def _ask(
        self,
        method: str,
        name: str,
        distribution_type: Callable[..., BaseDistribution],
        **arguments: object,
    ) -> Any:
        def compute() -> object:
            if name in self._joint:
                with suppress(Exception):  # the driver raises the error
                    if self._is_joint(name, distribution_type(**arguments)):
                        return self._accept(name)
            return self.call(method, name=name, **arguments)["value"]

        return self._suggested(name, compute)

    def _suggested(self, name: str, compute: Callable[[], T]) -> T:
        value = self.group.shared(f"a suggestion of {name!r}", compute)
        self._params[name] = value
        return value

    def _is_joint(self, name: str, distribution: BaseDistribution) -> bool:
        """Return True if the driver would return the parameter that was drawn with others."""
        joint = self._joint.get(name)
        return joint is not None and joint[0] == distribution and name not in self._params

    def _accept(self, name: str) -> Any:
        """Return a parameter that was drawn with others, and let the driver record it."""
        distribution, value = self._joint[name]
        text = distribution_to_json(distribution)
        arguments = {"name": name, "distribution": text, "value": value}
        request = {"call": "accept", "rank": self._worker, "trial": self._number}
        self._channel.post_call(_CALLS, {**request, "arguments": arguments, "is_posted": True})
        return value

    def report(self, value: float, step: int) -> None:
        value, step = float(value), int(step)
        if self.rank == 0:
            self.call("report", value=value, step=step)

    def should_prune(self) -> bool:
        return bool(self._shared_call("should_prune"))

    def set_user_attr(self, key: str, value: object) -> None:
        if self.rank == 0:
            self.call("set_user_attr", key=key, value=value)
        self._user_attrs[key] = value

    def set_constraint(self, key: str, value: float) -> None:
        if self.rank == 0:
            self.call("set_constraint", key=key, value=float(value))
        self._constraints[key] = float(value)

    def _shared_call(self, method: str, **arguments: object) -> object:
        """Call the driver from rank 0; return its answer's ``value`` on all ranks."""
        called = " ".join([method, *map(str, arguments.values())])
        value: object = self.group.shared(called, lambda: self.call(method, **arguments)["value"])
        return value

    # Workers of a trial --------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this worker in the trial; its reports and its result count if it is 0."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of workers that run the trial."""
        return self.group.world_size

    def init_process_group(self) -> None:
        """Make the trial's workers the default group of ``torch.distributed``, until its end."""
        self.group.init_process_group()

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on all workers of the trial; it must be a JSON value."""
        return self.group.broadcast(value)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all workers of the trial in rank order; they must be JSON values."""
        return self.group.all_gather(value)

    # Facts of the trial --------------------------------------------------------------------------

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._params)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        stored = cast("dict[str, str]", self._shared_call("distributions"))
        return {name: json_to_distribution(text) for name, text in stored.items()}

    @property
    def user_attrs(self) -> dict[str, Any]:
        return dict(self._user_attrs)

    @property
    def constraints(self) -> dict[str, float]:
        return dict(self._constraints)

    @property
    def datetime_start(self) -> datetime.datetime | None:
        import datetime

        return datetime.datetime.fromtimestamp(self._start)

    @property
    def number(self) -> int:
        return int(self._number)


class RemoteStudy:
    """The study of a RemoteTrial: its name and directions, the best trial so far, and ``stop``."""

    def __init__(self, trial: RemoteTrial, name: str, directions: Iterable[str]):
        from optuna.study import StudyDirection

        self._trial, self.study_name = trial, name
        self.directions = [StudyDirection[each] for each in directions]

    @property
    def direction(self) -> StudyDirection:
        """Direction of a study with one metric."""
        if self._is_multi_objective():
            raise RuntimeError("A single direction cannot be read from a multi-objective study")
        return self.directions[0]

    @property
    def best_value(self) -> float:
        """Best value so far."""
        return float(cast("float", self._trial._shared_call("study", attribute="best_value")))

    @property
    def best_params(self) -> dict[str, Any]:
        """Parameters of the best trial so far."""
        return dict(
            cast("dict[str, Any]", self._trial._shared_call("study", attribute="best_params"))
        )

    @property
    def user_attrs(self) -> dict[str, Any]:
        """User attributes of the study."""
        return dict(
            cast("dict[str, Any]", self._trial._shared_call("study", attribute="user_attrs"))
        )

    def stop(self) -> None:
        """Start no more trials; the running trials finish."""
        if self._trial.rank == 0:
            self._trial.call("stop")

    def _is_multi_objective(self) -> bool:
        return len(self.directions) > 1


def _json_items(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of a mapping that JSON can represent."""
    items = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            items[name] = json.loads(json.dumps(plain_value(value)))
    return items


def _plain_values(values: object) -> object:
    """Convert an objective's result to floats; a value that is no number becomes its text."""
    if values is None:
        return None
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [_plain_values(value) for value in values]
    try:
        return float(cast("float", values))
    except (TypeError, ValueError):
        return repr(values)
