"""Records of a search: an Optuna study and the weights of its trials, in one folder.

``<logs_dir>/<name>/search_00000/`` holds ``study.db`` and ``weights/<trial>``.  All trials are
enqueued in the study at the start, so a resumed search knows which trials remain.  Grid points and
random values are fixed at that time.  A trial has these attributes in the study:

``plan``
    Number of the trial in the plan, which determines its random values and grid point.
``result``
    ``best`` (metrics of the best epoch), ``epochs`` and ``seconds``.
``error``
    Traceback of a failed trial.
``changed``
    Configuration values that the scheduler changed during the trial.
``finalist``
    Number of the early-stopped trial that this trial repeats to the end.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.orca.automl.trial import EpochResult, SearchGoal, TrialJob
from bigdl.training.progress import ItemLines
from bigdl.tuning import open_study
from bigdl.tuning.spaces import SearchSpace, json_value
from bigdl.tuning.study import RETRY_OF, check_description, propose_again

if TYPE_CHECKING:
    import pandas as pd
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial, TrialState

_STUDY = "study.db"
_PLAN, _FINALIST = "plan", "finalist"
_STATUS = {"COMPLETE": "finished", "PRUNED": "stopped early", "FAIL": "failed"}


# Directories -------------------------------------------------------------------------------------


def new_search(folder: Path) -> Path:
    """Create the folder of a new search, readable only by its owner."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(max(_searches(folder), default=-1) + 1):
        path = folder / f"search_{number:05}"
        with contextlib.suppress(FileExistsError):  # another process created it
            path.mkdir(mode=0o700)
            break
    return path


def latest_search(folder: Path) -> Path | None:
    """Return the folder of the newest search that has a study."""
    searches = _searches(folder)
    begun = [number for number, path in searches.items() if (path / _STUDY).is_file()]
    return searches[max(begun)] if begun else None


def _searches(folder: Path) -> dict[int, Path]:
    """Return the folders of all searches by search number."""
    return {int(path.name[7:]): path for path in folder.glob("search_" + "[0-9]" * 5)}


# Records -----------------------------------------------------------------------------------------


@dataclass
class TrialReporting:
    """Reports of a trial to its record, also from another machine.

    Attributes
    ----------
    space : SearchSpace
    goal : SearchGoal
    seed : int
    """

    space: SearchSpace
    goal: SearchGoal
    seed: int

    def may_stop(self, trial: Trial) -> bool:
        """Return True if a trial can stop early: it is not a finalist and there is one metric."""
        return self.goal.is_single and _FINALIST not in trial.user_attrs

    def begin(self, trial: Trial) -> dict[str, Any]:
        """Return a trial's configuration: fixed values, drawn values and sampler suggestions."""
        return self.space.resolve(trial, self.seed, trial.user_attrs[_PLAN])

    def report(self, trial: Trial, step: EpochResult) -> None:
        """Record an epoch of a running trial."""
        if self.goal.is_single:
            trial.report(step.metrics[0], step.epoch)

    def set_result(self, trial: Trial, step: EpochResult) -> list[float]:
        """Record the result of a trial after its last epoch.

        Returns
        -------
        list of float
            Metrics of the best epoch.

        Raises
        ------
        UsageError
            If a metric is NaN.
        """
        best = list(step.best)
        result = {"best": best, "epochs": step.epoch, "seconds": round(step.seconds, 3)}
        trial.set_user_attr("result", result)
        for name, value in zip(self.goal.names, best, strict=True):
            if value != value:
                raise UsageError(
                    f"The metric {name} is NaN after every epoch", code="search-failed", metric=name
                )
        return best


class TrialRecords(TrialReporting):
    """Planned trials of a search, their results and their weights.

    Parameters
    ----------
    folder : Path
        Folder of :func:`new_search`, or of a search to resume.
    space : SearchSpace
    job : TrialJob
    sampler, pruner : optional
        Sampler and pruner of Optuna.
    algorithm : str
        Name of the search algorithm.

    Raises
    ------
    UsageError
        If the search in the folder has different arguments.
    """

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        job: TrialJob,
        *,
        sampler: BaseSampler | None = None,
        pruner: BasePruner | None = None,
        algorithm: str,
    ):
        from bigdl.tuning.storage import open_database

        super().__init__(space, job.goal, job.seed)
        self.folder = folder
        self.weights_folder = self.folder / "weights"
        self.weights_folder.mkdir(exist_ok=True)
        self._progress: ItemLines | None = None
        modes = [metric.mode for metric in self.goal.metrics]
        self.study = open_study(
            storage=open_database(f"sqlite:///{self.folder / _STUDY}", write_ahead=True),
            name="search",
            directions=["minimize" if mode == "min" else "maximize" for mode in modes],
            sampler=sampler,
            pruner=pruner,
            resume=True,
            metric_names=self.goal.names,
        )
        # arguments that a resumed search must share with the saved search
        description = {
            "metric": self.goal.names,
            "metric_mode": modes,
            "epochs": job.epochs,
            "seed": job.seed,
            "search_alg": algorithm,
            "search_space": repr(space),
        }
        check_description(self.study, description, f"The search in {self.folder}")

    # Planning -----------------------------------------------------------------------------------

    def plan(self, count: int, *, is_random: bool) -> None:
        """Enqueue trials until `count` trials have ended or are waiting.

        Interrupted and lost trials do not count as ended.  Finalists of an earlier run are selected
        again after all other trials have ended.

        Parameters
        ----------
        count : int
            Number of trials of the search.
        is_random : bool
            Draw values from the seed and the trial number only, without the sampler.
        """
        for trial in self._trials("WAITING"):
            if _FINALIST in trial.user_attrs:
                self.study._storage.set_trial_state_values(trial._trial_id, state=_state("FAIL"))
        planned = {trial.user_attrs[_PLAN] for trial in self._ended_or_queued()}
        for number in range(count):
            if number not in planned:
                drawn = self.space.random_parameters(self.seed, number) if is_random else {}
                parameters = {**self.space.grid_point(number), **drawn}
                self.study.enqueue_trial(parameters, user_attrs={_PLAN: number})

    def plan_finalists(self, count: int) -> None:
        """Enqueue the best early-stopped trials again, to train them to the end.

        Parameters
        ----------
        count : int
            Number of finalists of the whole search.
        """
        known = {trial.user_attrs.get(_FINALIST) for trial in self._ended_or_queued()}
        stopped = [t for t in self._trials("PRUNED") if _FINALIST not in t.user_attrs]
        for trial in self._best_first(stopped)[:count]:
            if trial.number not in known:
                attributes = {_PLAN: trial.user_attrs[_PLAN], _FINALIST: trial.number}
                self.study.enqueue_trial(trial.params, user_attrs=attributes)

    def reporting(self) -> TrialReporting:
        """Return the part of the records that trials on other machines need."""
        return TrialReporting(self.space, self.goal, self.seed)

    def waiting(self) -> int:
        """Return the number of waiting trials."""
        return len(self._trials("WAITING"))

    # Outcomes of trials -------------------------------------------------------------------------

    def end(self, trial: Trial, step: EpochResult) -> None:
        """Record that a trial has finished or was stopped early."""
        try:
            best = self.set_result(trial, step)
        except UsageError as error:
            self.fail(trial, str(error))
        else:
            if step.is_last:
                self.study.tell(trial, best)
            else:
                self.study.tell(trial, state=_state("PRUNED"))
            self.show(trial)

    def fail(self, trial: Trial, error: str) -> None:
        """Record the error of a failed trial."""
        trial.set_user_attr("error", error)
        self.study.tell(trial, state=_state("FAIL"))
        self.show(trial)

    def mark_lost(self, trial: Trial, error: str) -> None:
        """Record that a trial's process was lost, and enqueue the trial once more."""
        if RETRY_OF in trial.user_attrs:
            self.fail(trial, error)
            return
        self.study.tell(trial, state=_state("FAIL"))
        propose_again(self.study, self.study.get_trials(deepcopy=False)[trial.number])

    def weights_file(self, number: int) -> Path:
        """Return the path of the weights of a trial's best epoch."""
        return self.weights_folder / f"{number:05}"

    def watch(self) -> None:
        """Start a progress display on standard error, with ended trials and the remaining time."""
        ended, waiting = len(self.finished()) + len(self.failed()), self.waiting()
        self._progress = ItemLines("trial", ended + waiting, done=ended)

    def show(self, trial: Trial | FrozenTrial) -> None:
        """Display the result of an ended trial, and the best trial so far."""
        if self._progress is None:
            return
        record, ranked = self.study.get_trials(deepcopy=False)[trial.number], self.ranked()
        text = _STATUS[record.state.name]
        if text == "failed" and "error" not in record.user_attrs:
            return  # lost, and enqueued again
        if text != "failed":
            text = ", ".join([text, *self._format_metrics(record)])
        best = ""
        if ranked and self.goal.is_single:
            best = f"; best {self._format_metrics(ranked[0])[0]} in trial {ranked[0].number}"
        self._progress.end(f"number {record.number} {text}{best}")

    def _format_metrics(self, trial: FrozenTrial) -> list[str]:
        """Format the metrics of a finished trial as text."""
        metrics = zip(self.goal.names, self.best_metrics(trial), strict=True)
        return [f"{name} {value:.4g}" for name, value in metrics]

    # Queries ------------------------------------------------------------------------------------

    def finished(self) -> list[FrozenTrial]:
        """Return the trials that completed or were stopped early."""
        return self._trials("COMPLETE", "PRUNED")

    def failed(self) -> list[FrozenTrial]:
        """Return the trials that raised an error."""
        return [t for t in self._trials("FAIL") if "error" in t.user_attrs]

    def best_metrics(self, trial: FrozenTrial) -> list[float]:
        """Return the metrics of a finished trial's best epoch."""
        return trial.user_attrs["result"]["best"]

    def ranked(self) -> list[FrozenTrial]:
        """Return the finished trials, best first; ties keep their order.

        A repeated early-stopped trial is represented by its repetition.
        """
        repeated = {trial.user_attrs.get(_FINALIST) for trial in self._trials("COMPLETE")}
        return self._best_first([t for t in self.finished() if t.number not in repeated])

    def _best_first(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        sign = self.goal.first.sign
        return sorted(trials, key=lambda trial: -sign * self.best_metrics(trial)[0])

    def front(self) -> list[FrozenTrial]:
        """Return the Pareto-optimal finished trials."""
        trials = self.ranked()
        signs = [metric.sign for metric in self.goal.metrics]
        scores = (
            np.array([self.best_metrics(trial) for trial in trials]).reshape(-1, len(signs)) * signs
        )
        return [
            trial
            for trial, score in zip(trials, scores, strict=True)
            if not ((scores >= score).all(axis=1) & (scores > score).any(axis=1)).any()
        ]

    def config_of(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the configuration of a trial that has started."""
        attributes = trial.user_attrs
        config = self.space.resolve(trial.params, self.seed, attributes[_PLAN])
        return {**config, **attributes.get("changed", {})}

    def json_config(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's drawn values as a dict of JSON values by parameter path."""
        changed = cast("dict[str, Any]", json_value(trial.user_attrs.get("changed", {})))
        return {**self.space.json_values(trial.params), **changed}

    def table(self) -> pd.DataFrame:
        """Return a table of all started trials, one per row.

        Returns
        -------
        pandas.DataFrame
            Indexed by ``trial``: ``status``, the metrics of the best epoch, ``epochs``,
            ``seconds``, the drawn values, and ``failure``.
        """
        import pandas as pd

        names = self.goal.names
        rows = []
        for trial in self._trials("RUNNING", *_STATUS):
            if trial.datetime_start is None:
                continue  # abandoned while waiting
            attributes, status = trial.user_attrs, _STATUS.get(trial.state.name, "running")
            result = attributes.get("result", {})
            if status == "failed" and "error" not in attributes:
                status = "lost"
            rows.append(
                {
                    "trial": trial.number,
                    "status": status,
                    **dict(zip(names, result.get("best", [None] * len(names)), strict=True)),
                    "epochs": result.get("epochs", 0),
                    "seconds": result.get("seconds", 0.0),
                    **{f"config/{path}": value for path, value in self.json_config(trial).items()},
                    "failure": attributes.get("error", "").strip().rpartition("\n")[2] or None,
                }
            )
        table = pd.DataFrame(rows).set_index("trial")
        return table.assign(failure=table.pop("failure"))  # moved to the last column

    def close(self) -> None:
        """Close the study's database."""
        storage: Any = self.study._storage  # Optuna's caching wrapper of the database
        storage.remove_session()
        storage._backend.engine.dispose()

    def _trials(self, *states: str) -> list[FrozenTrial]:
        return [t for t in self.study.get_trials(deepcopy=False) if t.state.name in states]

    def _ended_or_queued(self) -> list[FrozenTrial]:
        """Return all trials except lost and abandoned ones."""
        every = self.study.get_trials(deepcopy=False)
        return [t for t in every if t.state.name != "FAIL" or "error" in t.user_attrs]


def _state(name: str) -> TrialState:
    return require("optuna", "automl").trial.TrialState[name]
