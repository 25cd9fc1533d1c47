"""Processes that run the trials of a study.

Optuna's threads of this process ask for trials, and each gives its own to a free process, which has
the objective and a connection to the study's storage. There the trial proposes its parameters and
reports its epochs; its figures come back here, where Optuna writes them down and calls callbacks.
So there is one that asks and tells, as if the trials had run here.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bigdl.common.errors import WorkerLost
from bigdl.runtime.launch import worker_shares
from bigdl.runtime.pool import CpuSlot, Stage, TaskError, Worker, WorkerManager, encoded, opened
from bigdl.tuning._by_name import optuna
from bigdl.tuning.lost import mark, propose_again

__all__ = ["Crew", "TrialLost"]

_FIGURES, _PRUNED = "figures", "pruned"


class Crew:
    """The processes of a search; an objective that runs in one of them, and a context.

    Parameters
    ----------
    study : optuna.Study
        In a database.
    objective : callable
    count : int
    cores : sequence of iterable of int or None

    Attributes
    ----------
    loss : TrialLost or None
        The last loss of a process.
    has_finished : bool
        Whether a process has come to the end of a trial.
    """

    def __init__(
        self,
        study: Any,
        objective: Callable[[Any], Any],
        count: int,
        cores: Sequence[Iterable[int]] | None = None,
    ):
        seats = [CpuSlot(tuple(share), threads) for share, threads in worker_shares(count, cores)]
        make = functools.partial(_TrialRunner, study, objective)
        self._study = study
        self._staff = WorkerManager([Stage("the search", make, seats)], TaskError)
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._proposed_again: list[int] = []
        self.loss: TrialLost | None = None
        self.has_finished = False

    def __enter__(self) -> Crew:
        try:
            self._staff.fill()
        except BaseException:
            self._staff.end()
            raise
        for worker in self._staff.everyone():
            self._idle.put(worker)
        return self

    def __exit__(self, *exception) -> None:
        self._staff.end()

    def __call__(self, trial: Any) -> Any:
        """Run one trial in a process that is free; Optuna calls this in several threads."""
        self._check_not_ended()
        mark(trial)
        worker = self._idle.get()
        try:
            worker = self._living(worker)
            kind, content = self._answer(worker, trial)
        except _Hung:
            self._check_not_ended()
            self.loss = self._loss(worker, trial)
            raise self.loss from None
        finally:
            self._idle.put(worker)
        self.has_finished = True
        # Optuna's copy of the trial has not seen what was proposed there.
        trial._cached_frozen_trial = self._study.get_trials(deepcopy=False)[trial.number]
        if kind == _PRUNED:
            raise optuna().TrialPruned(content)
        return content

    def count_proposed_again(self) -> int:
        """How many trials wait to be repeated, since the last time this was asked."""
        count = len(self._proposed_again)
        self._proposed_again.clear()
        return count

    def end(self) -> None:
        """Give up all trials that are under way, from another thread."""
        self._ended.set()
        for worker in self._staff.everyone():
            worker.end()

    def _living(self, worker: Worker) -> Worker:
        """A worker, or the one that takes its place."""
        return worker if worker.process.poll() is None else self._staff.replace(worker)

    def _answer(self, worker: Worker, trial: Any) -> tuple[str, Any]:
        message = encoded(trial.number, "The number of a trial")
        try:
            worker.ask(message)
            succeeded, answer = worker.hear()
        except (EOFError, OSError):
            raise _Hung from None
        finally:
            message.close()
        content = opened(answer)
        if succeeded:
            return content
        error = self._staff.task_error(worker, trial.number, content)
        self.has_finished = True
        if error.original is None:
            raise error
        error.original.add_note(f"In the process of trial {trial.number}:\n{error.traceback}")
        raise error.original

    def _loss(self, worker: Worker, trial: Any) -> TrialLost:
        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        if propose_again(self._study, frozen):
            self._proposed_again.append(trial.number)
        cause = str(worker.loss("the search")).partition(";")[0]
        return TrialLost(f"{cause}, at trial {trial.number}")

    def _check_not_ended(self) -> None:
        if self._ended.is_set():
            raise _SearchEnded("the search was interrupted")


class TrialLost(WorkerLost):
    """The process of a trial was killed or ended."""


class _Hung(Exception):
    """A process hung up."""


class _SearchEnded(KeyboardInterrupt):
    """The trial's process was ended with all others: no error that a search may catch."""


class _TrialRunner:
    """What a process of a search does."""

    def __init__(self, study: Any, objective: Callable[[Any], Any]):
        # All processes have got the same random state.
        study.sampler.reseed_rng()
        self._study = study
        self._objective = objective

    def __call__(self, number: int) -> tuple[str, Any]:
        # Reading all trials also tells the storage's cache of the new one.
        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = optuna().trial.Trial(self._study, frozen._trial_id)
        try:
            return _FIGURES, self._objective(trial)
        except optuna().TrialPruned as pruned:
            return _PRUNED, str(pruned)
        finally:
            self._study._storage.remove_session()
