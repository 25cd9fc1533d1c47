"""The records of a search: an Optuna study and the weights of its trials, in one directory.

``<logs_dir>/<name>/search_00000/`` holds ``study.db`` and ``weights/<trial>``.  All trials are put
into the study at the beginning, where they wait; so a search that was killed knows which ones it
has to run.  The point of a grid and what is drawn by chance are fixed then.  A trial has these
attributes in the study:

``plan``
    Its number in the plan, of which its random numbers and its point of a grid depend.
``result``
    ``best`` (the figures of its best epoch), ``epochs`` and ``seconds`` that it took.
``error``
    The traceback of a trial that failed.
``changed``
    Values of its configuration that the search has changed on its way.
``finalist``
    The number of the trial that was stopped early, and that this one repeats to the end.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.orca.automl.trial import EpochResult, TrialJob
from bigdl.training.progress import ItemLines
from bigdl.tuning import open_study
from bigdl.tuning.spaces import SearchSpace, json_value
from bigdl.tuning.study import RETRY_OF, propose_again

if TYPE_CHECKING:
    import pandas as pd
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

_STUDY = "study.db"
_DESCRIPTION = "search"
_PLAN, _FINALIST = "plan", "finalist"
_STATUS = {"COMPLETE": "finished", "PRUNED": "stopped early", "FAIL": "failed"}


# Directories -------------------------------------------------------------------------------------


def new_search(folder: Path) -> Path:
    """Make a directory for a search, readable by its owner alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(max(_searches(folder), default=-1) + 1):
        path = folder / f"search_{number:05}"
        with contextlib.suppress(FileExistsError):  # of another process, just now
            path.mkdir(mode=0o700)
            break
    return path


def latest_search(folder: Path) -> Path | None:
    """Return the newest search that has begun below a folder."""
    searches = _searches(folder)
    begun = [number for number, path in searches.items() if (path / _STUDY).is_file()]
    return searches[max(begun)] if begun else None


def _searches(folder: Path) -> dict[int, Path]:
    """Return the directories of searches by their numbers."""
    return {int(path.name[7:]): path for path in folder.glob("search_" + "[0-9]" * 5)}


# Records -----------------------------------------------------------------------------------------


class TrialRecords:
    """Trials of a search: what is planned, what has come of them, and their weights.

    Parameters
    ----------
    folder : Path
        Of :func:`new_search`, or of a search that goes on.
    space : SearchSpace
    job : TrialJob
    sampler, pruner : optional
        Of Optuna.
    algorithm : str
        Name of what proposes configurations.

    Raises
    ------
    UsageError
        If the search in the folder was another one.
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

        self.folder, self.space, self.goal, self.seed = folder, space, job.goal, job.seed
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
        # what a search must have in common with the one that it goes on with
        description = {
            "metric": self.goal.names,
            "metric_mode": modes,
            "epochs": job.epochs,
            "seed": job.seed,
            "search_alg": algorithm,
            "search_space": repr(space),
        }
        before = self.study.user_attrs.get(_DESCRIPTION)
        if before is None:
            self.study.set_user_attr(_DESCRIPTION, description)
            before = description
        for key, value in description.items():
            if before.get(key) != value:
                raise UsageError(
                    f"The search in {self.folder} has {key} {before.get(key)!r}, this one has "
                    f"{value!r}; go on with the same arguments, or start a new search without "
                    "resume",
                    code="checkpoint-mismatch",
                    path=str(self.folder),
                    argument=key,
                )

    # The plan -----------------------------------------------------------------------------------

    def plan(self, count: int, *, by_chance: bool) -> None:
        """Let trials wait until there are `count`, those that have ended included.

        One that was interrupted, or whose process was lost, has not ended.  Finalists of an earlier
        run are chosen anew when all others have ended.

        Parameters
        ----------
        count : int
        by_chance : bool
            Draw values of the seed and the number of the trial alone; else the sampler suggests.
        """
        for trial in self._trials("WAITING"):
            if _FINALIST in trial.user_attrs:
                self.study._storage.set_trial_state_values(trial._trial_id, state=_state("FAIL"))
        planned = {trial.user_attrs[_PLAN] for trial in self._ended_or_queued()}
        for number in range(count):
            if number not in planned:
                drawn = self.space.random_parameters(self.seed, number) if by_chance else {}
                parameters = {**self.space.grid_point(number), **drawn}
                self.study.enqueue_trial(parameters, user_attrs={_PLAN: number})

    def plan_finalists(self, count: int) -> None:
        """Let the best trials that were stopped early wait again, to be trained to their end.

        Parameters
        ----------
        count : int
            How many there are in the whole search.
        """
        known = {trial.user_attrs.get(_FINALIST) for trial in self._ended_or_queued()}
        stopped = [t for t in self._trials("PRUNED") if _FINALIST not in t.user_attrs]
        for trial in self._best_first(stopped)[:count]:
            if trial.number not in known:
                attributes = {_PLAN: trial.user_attrs[_PLAN], _FINALIST: trial.number}
                self.study.enqueue_trial(trial.params, user_attrs=attributes)

    def waiting(self) -> int:
        """Return how many trials have yet to be run."""
        return len(self._trials("WAITING"))

    def may_stop(self, trial: Trial) -> bool:
        """Return True if a trial may be stopped early: it has one figure and is no finalist."""
        return self.goal.is_single and _FINALIST not in trial.user_attrs

    def begin(self, trial: Trial) -> dict[str, Any]:
        """Return the configuration of a trial, of what is fixed and what the sampler suggests."""
        return self.space.resolve(trial, self.seed, trial.user_attrs[_PLAN])

    # Outcomes of trials -------------------------------------------------------------------------

    def report(self, trial: Trial, step: EpochResult) -> None:
        """Write down an epoch of a trial that runs."""
        if self.goal.is_single:
            trial.report(step.figures[0], step.epoch)

    def set_result(self, trial: Trial, step: EpochResult) -> list[float]:
        """Write down the result of a trial, of which `step` was the last.

        Returns
        -------
        list of float
            The figures of its best epoch.

        Raises
        ------
        UsageError
            If they are no numbers.
        """
        best = list(step.best)
        result = {"best": best, "epochs": step.epoch, "seconds": round(step.seconds, 3)}
        trial.set_user_attr("result", result)
        for name, value in zip(self.goal.names, best, strict=True):
            if value != value:
                raise UsageError(
                    f"The metric {name} is nan after each epoch", code="search-failed", metric=name
                )
        return best

    def end(self, trial: Trial, step: EpochResult) -> None:
        """Write down that a trial has ended, or was stopped early."""
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
        """Write down that a trial has failed, and by which error."""
        trial.set_user_attr("error", error)
        self.study.tell(trial, state=_state("FAIL"))
        self.show(trial)

    def mark_lost(self, trial: Trial, error: str) -> None:
        """Write down that the process of a trial was lost, and let it be tried again, once."""
        if RETRY_OF in trial.user_attrs:
            self.fail(trial, error)
            return
        self.study.tell(trial, state=_state("FAIL"))
        propose_again(self.study, self.study.get_trials(deepcopy=False)[trial.number])

    def weights_file(self, number: int) -> Path:
        """Return the path of the weights of a trial's best epoch."""
        return self.weights_folder / f"{number:05}"

    def watch(self) -> None:
        """From now on, show on standard error which trials have ended, and the time left."""
        ended, waiting = len(self.finished()) + len(self.failed()), self.waiting()
        self._progress = ItemLines("trial", ended + waiting, done=ended)

    def show(self, trial: Trial | FrozenTrial) -> None:
        """Show the outcome of a trial that has ended, and the best one so far."""
        if self._progress is None:
            return
        record, ranked = self.study.get_trials(deepcopy=False)[trial.number], self.ranked()
        text = _STATUS[record.state.name]
        if text == "failed" and "error" not in record.user_attrs:
            return  # it is lost, and tried again
        if text != "failed":
            text = ", ".join([text, *self._named(record)])
        best = ""
        if ranked and self.goal.is_single:
            best = f"; best {self._named(ranked[0])[0]} in trial {ranked[0].number}"
        self._progress.end(f"number {record.number} {text}{best}")

    def _named(self, trial: FrozenTrial) -> list[str]:
        """Return the metrics of a finished trial as text."""
        figures = zip(self.goal.names, self.figures(trial), strict=True)
        return [f"{name} {value:.4g}" for name, value in figures]

    # What is known ------------------------------------------------------------------------------

    def finished(self) -> list[FrozenTrial]:
        """Return the trials that ended well, or were stopped early."""
        return self._trials("COMPLETE", "PRUNED")

    def failed(self) -> list[FrozenTrial]:
        """Return the trials that raised an error."""
        return [t for t in self._trials("FAIL") if "error" in t.user_attrs]

    def figures(self, trial: FrozenTrial) -> list[float]:
        """Return the figures of the best epoch of a finished trial."""
        return trial.user_attrs["result"]["best"]

    def ranked(self) -> list[FrozenTrial]:
        """Return finished trials, the best one first; equal ones in their order.

        Of a trial that was stopped early and is repeated the repetition counts.
        """
        repeated = {trial.user_attrs.get(_FINALIST) for trial in self._trials("COMPLETE")}
        return self._best_first([t for t in self.finished() if t.number not in repeated])

    def _best_first(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        sign = self.goal.first.sign
        return sorted(trials, key=lambda trial: -sign * self.figures(trial)[0])

    def front(self) -> list[FrozenTrial]:
        """Return finished trials than which no other is better in one metric and as good in all."""
        trials = self.ranked()
        signs = [metric.sign for metric in self.goal.metrics]
        scores = np.array([self.figures(trial) for trial in trials]).reshape(-1, len(signs)) * signs
        return [
            trial
            for trial, score in zip(trials, scores, strict=True)
            if not ((scores >= score).all(axis=1) & (scores > score).any(axis=1)).any()
        ]

    def config_of(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the configuration of a trial that has begun."""
        attributes = trial.user_attrs
        config = self.space.resolve(trial.params, self.seed, attributes[_PLAN])
        return {**config, **attributes.get("changed", {})}

    def json_config(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values that a trial has drawn, by their paths, as values of JSON."""
        changed = json_value(trial.user_attrs.get("changed", {}))
        return {**self.space.json_values(trial.params), **changed}

    def table(self) -> pd.DataFrame:
        """Return the trials that have begun, one in each row.

        Returns
        -------
        pandas.DataFrame
            Indexed by ``trial``: ``status``, the metrics of the best epoch, ``epochs``,
            ``seconds``, what was drawn, and ``failure``.
        """
        import pandas as pd

        names = self.goal.names
        rows = []
        for trial in self._trials("RUNNING", *_STATUS):
            if trial.datetime_start is None:
                continue  # it was given up while it waited
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
        return table.assign(failure=table.pop("failure"))  # the last column

    def close(self) -> None:
        """Close the study's database, which is one file then."""
        storage: Any = self.study._storage  # Optuna's cache in front of the database
        storage.remove_session()
        storage._backend.engine.dispose()

    def _trials(self, *states: str) -> list[FrozenTrial]:
        return [t for t in self.study.get_trials(deepcopy=False) if t.state.name in states]

    def _ended_or_queued(self) -> list[FrozenTrial]:
        """Return all trials but those that were lost or given up."""
        every = self.study.get_trials(deepcopy=False)
        return [t for t in every if t.state.name != "FAIL" or "error" in t.user_attrs]


def _state(name: str) -> Any:
    return require("optuna", "automl").trial.TrialState[name]
