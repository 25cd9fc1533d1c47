"""The records of a search: an Optuna study and the weights of its trials, in one directory.

``<logs_dir>/<name>/search_00000/`` holds ``study.db`` and ``weights/<trial>``.  All trials are put
into the study at the beginning, where they wait; so a search that was killed knows which ones it
has to run.  A trial has these attributes in the study:

``plan``
    Its number in the plan, of which its random draws and its point of a grid depend.
``draws``
    What it has drawn of the search space (:mod:`bigdl.orca.automl.space`).
``best``, ``epochs``, ``seconds``
    The figures of its best epoch, and what it took.
``error``
    The traceback of a trial that failed.
``changed``
    Values of its configuration that the search has changed on its way.
``finalist``
    The number of the trial that was stopped early, and that this one repeats to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.orca.automl.search.folders import STUDY, write_whole
from bigdl.orca.automl.search.objective import Goal
from bigdl.orca.automl.search.trial import Step
from bigdl.orca.automl.space import SearchSpace, plain

__all__ = ["Records"]

_DESCRIPTION = "search"
_FINALIST = "finalist"


class Records:
    """What is known of the trials of a search.

    Parameters
    ----------
    folder : Path
        Of :func:`~bigdl.orca.automl.search.folders.new_search`, or of a search that goes on.
    space : SearchSpace
    goal : Goal
    seed : int
    is_random : bool
        Whether values are drawn by chance, of the seed and the number of the trial alone.
    sampler, pruner : optional
        Of Optuna.
    description : dict
        What a search must have in common with the one that it goes on with, as JSON.

    Raises
    ------
    UsageError
        If the search in the folder was another one.
    """

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        goal: Goal,
        seed: int,
        *,
        is_random: bool = True,
        sampler: Any = None,
        pruner: Any = None,
        description: Mapping[str, Any],
    ):
        from bigdl.tuning import open_study
        from bigdl.tuning.storage import open_database

        self.folder, self.space, self.goal, self.seed = Path(folder), space, goal, seed
        self.is_random = is_random
        self.weights_folder = self.folder / "weights"
        self.weights_folder.mkdir(exist_ok=True)
        self.study = open_study(
            storage=open_database(f"sqlite:///{self.folder / STUDY}", write_ahead=True),
            name="search",
            directions=["minimize" if m.mode == "min" else "maximize" for m in goal.metrics],
            sampler=sampler,
            pruner=pruner,
            resume=True,
            metric_names=[metric.name for metric in goal.metrics],
        )
        self._describe(dict(description))

    def _describe(self, description):
        before = self.study.user_attrs.get(_DESCRIPTION)
        if before is None:
            self.study.set_user_attr(_DESCRIPTION, description)
            return
        for key, value in description.items():
            if before.get(key) != value:
                raise UsageError(
                    f"The search in {self.folder} has {key} {before.get(key)!r}, this one has "
                    f"{value!r}; go on with the same arguments, or start a new search without "
                    "resume"
                )

    # The plan -----------------------------------------------------------------------------------

    def plan(self, count: int) -> None:
        """Let trials wait until there are `count`, those that have ended included.

        One that was interrupted, or whose process was lost, has not ended.  Finalists of an earlier
        run are chosen anew when all others have ended.
        """
        for trial in self._trials("WAITING"):
            if self.repeated(trial) is not None:
                self.study._storage.set_trial_state_values(trial._trial_id, state=_state("FAIL"))
        planned = {
            self.plan_of(trial)
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.name != "FAIL" or "error" in trial.user_attrs
        }
        for number in range(count):
            if number not in planned:
                self.study.enqueue_trial({}, user_attrs={"plan": number})

    def plan_finalists(self, count: int) -> int:
        """Let the best trials that were stopped early wait again, to be trained to their end.

        Parameters
        ----------
        count : int
            How many there are in the whole search.

        Returns
        -------
        int
            How many of them wait.
        """
        known = {
            self.repeated(trial)
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.name != "FAIL" or "error" in trial.user_attrs
        }
        stopped = [t for t in self._best_first(self._trials("PRUNED")) if self.repeated(t) is None]
        added = [trial for trial in stopped[:count] if trial.number not in known]
        for trial in added:
            attributes = {"plan": self.plan_of(trial), _FINALIST: trial.number}
            self.study.enqueue_trial({}, user_attrs=attributes)
        return len(added)

    def waiting(self) -> int:
        """How many trials have yet to be run."""
        return len(self._trials("WAITING"))

    def plan_of(self, trial) -> int:
        """A trial's number in the plan; one that repeats a trial has that trial's."""
        return self._origin(trial)["plan"]

    def repeated(self, trial) -> int | None:
        """The number of the trial that was stopped early and is trained to its end by this one."""
        return self._origin(trial).get(_FINALIST)

    def _origin(self, trial) -> Mapping[str, Any]:
        """The attributes of a trial, or of the lost one that it stands for."""
        from bigdl.tuning.recovery import RETRY_OF

        attributes = trial.user_attrs
        if "plan" not in attributes and RETRY_OF in attributes:
            attributes = self.study.get_trials(deepcopy=False)[attributes[RETRY_OF]].user_attrs
        return attributes

    def proposal(self, trial) -> dict:
        """The draws of a trial: by chance, or what the sampler suggests."""
        number, repeated = self.plan_of(trial), self.repeated(trial)
        if repeated is not None:
            return dict(self.study.get_trials(deepcopy=False)[repeated].user_attrs["draws"])
        if self.is_random:
            return self.space.random_draws(self.seed, number)
        return self.space.suggest(trial, number)

    def draw(self, trial, draws: Mapping[str, Any]) -> dict:
        """Note what a trial has drawn, and give its configuration."""
        trial.set_user_attr("draws", dict(draws))
        return self.space.resolve(dict(draws), self.seed, self.plan_of(trial))

    # What comes of trials -----------------------------------------------------------------------

    def note(self, trial, step: Step) -> None:
        """Write down an epoch; `trial` is one that runs."""
        if self.goal.is_single:
            trial.report(step.figures[0], step.epoch)

    def conclude(self, trial, step: Step) -> None:
        """Write down what came of a trial, of which `step` was the last."""
        result = {"best": list(step.best), "epochs": step.epoch, "seconds": round(step.seconds, 3)}
        trial.set_user_attr("result", result)

    def end(self, trial, step: Step, *, stopped: bool) -> None:
        """Write down that a trial has ended, or was stopped early."""
        self.conclude(trial, step)
        problem = self.problem(step)
        if problem is not None:
            self.fail(trial, problem)
        elif stopped:
            self.study.tell(trial, state=_state("PRUNED"))
        else:
            self.study.tell(trial, list(step.best))

    def problem(self, step: Step) -> str | None:
        """Why what came of a trial is of no use, if it is of none."""
        names = [
            m.name for m, value in zip(self.goal.metrics, step.best, strict=True) if value != value
        ]
        return f"The metric {names[0]} is nan after each epoch" if names else None

    def fail(self, trial, error: str) -> None:
        """Write down that a trial has failed, and by which error."""
        trial.set_user_attr("error", error)
        self.study.tell(trial, state=_state("FAIL"))

    def lose(self, trial, error: str) -> None:
        """Write down that the process of a trial was lost, and let it be tried again, once."""
        from bigdl.tuning.recovery import RETRY_OF, propose_again

        if RETRY_OF in trial.user_attrs:
            self.fail(trial, error)
            return
        self.study.tell(trial, state=_state("FAIL"))
        propose_again(self.study, self.study.get_trials(deepcopy=False)[trial.number])

    def weights_file(self, number: int) -> Path:
        """Where the weights of a trial's best epoch are."""
        return self.weights_folder / f"{number:05}"

    def save_weights(self, number: int, weights: bytes) -> None:
        """Keep the weights of a trial, in place of earlier ones."""
        write_whole(self.weights_file(number), weights)

    # What is known ------------------------------------------------------------------------------

    def finished(self) -> list:
        """Trials that ended well, or were stopped early, as Optuna's frozen ones."""
        return [t for t in self._trials("COMPLETE", "PRUNED") if "result" in t.user_attrs]

    def failed(self) -> list:
        """Trials that raised an error."""
        return [t for t in self._trials("FAIL") if "error" in t.user_attrs]

    def figures(self, trial) -> list[float]:
        """Those of the best epoch of a finished trial."""
        return trial.user_attrs["result"]["best"]

    def ranked(self) -> list:
        """Finished trials, the best one first; equal ones in their order.

        Of a trial that was stopped early and is repeated the repetition counts.
        """
        again = {self.repeated(trial) for trial in self._trials("COMPLETE")}
        return self._best_first([t for t in self.finished() if t.number not in again])

    def _best_first(self, trials) -> list:
        metric = self.goal.first
        found = [t for t in trials if "result" in t.user_attrs]
        found = [t for t in found if self.figures(t)[0] == self.figures(t)[0]]
        return sorted(found, key=lambda t: (-metric.sign * self.figures(t)[0], t.number))

    def front(self) -> list:
        """Finished trials than which no other is better in one metric and as good in all."""
        signs = [metric.sign for metric in self.goal.metrics]

        def of(trial):
            return [s * value for s, value in zip(signs, self.figures(trial), strict=True)]

        found = self.ranked()
        return [t for t in found if not any(_dominates(of(other), of(t)) for other in found)]

    def config_of(self, trial) -> dict:
        """The configuration of a trial that has drawn."""
        draws = trial.user_attrs["draws"]
        config = self.space.resolve(draws, self.seed, self.plan_of(trial))
        return {**config, **trial.user_attrs.get("changed", {})}

    def texts_of(self, trial) -> dict[str, Any]:
        """The values that a trial has drawn, by their paths, as JSON can write them."""
        draws = trial.user_attrs.get("draws", {})
        found = {path: self.space.text(path, draw) for path, draw in draws.items()}
        return {**found, **plain(trial.user_attrs.get("changed", {}))}

    def table(self):
        """The trials that have begun, one in each row.

        Returns
        -------
        pandas.DataFrame
            Indexed by ``trial``: ``status``, the metrics of the best epoch, ``epochs``,
            ``seconds``, what was drawn, and ``failure``.
        """
        import pandas as pd

        names = [metric.name for metric in self.goal.metrics]
        paths = [*self.space.grids, *self.space.domains]
        rows = []
        for trial in self._trials("RUNNING", "COMPLETE", "PRUNED", "FAIL"):
            if _has_not_begun(trial):
                continue
            result = trial.user_attrs.get("result", {})
            figures = result.get("best", [None] * len(names))
            rows.append(
                {
                    "trial": trial.number,
                    "status": _status(trial),
                    **dict(zip(names, figures, strict=True)),
                    "epochs": result.get("epochs", 0),
                    "seconds": result.get("seconds", 0.0),
                    **{f"config/{path}": value for path, value in self.texts_of(trial).items()},
                    "failure": _last_line(trial.user_attrs.get("error")),
                }
            )
        columns = ["trial", "status", *names, "epochs", "seconds"]
        columns += [f"config/{path}" for path in paths]
        more = [key for row in rows for key in row if key not in columns and key != "failure"]
        return pd.DataFrame(rows, columns=[*columns, *dict.fromkeys(more), "failure"]).set_index(
            "trial"
        )

    def close(self) -> None:
        """Let go of the study's database, which is one file then."""
        storage = self.study._storage
        storage.remove_session()
        storage._backend.engine.dispose()

    def _trials(self, *states):
        found = self.study.get_trials(deepcopy=False)
        return [trial for trial in found if trial.state.name in states]


_STATUS = {
    "RUNNING": "running",
    "COMPLETE": "finished",
    "PRUNED": "stopped early",
    "FAIL": "failed",
}


def _status(trial) -> str:
    lost = trial.state.name == "FAIL" and "error" not in trial.user_attrs
    return "lost" if lost else _STATUS[trial.state.name]


def _has_not_begun(trial) -> bool:
    """Whether a trial was given up while it waited."""
    return trial.state.name == "FAIL" and not {"draws", "error"} & set(trial.user_attrs)


def _state(name: str):
    return require("optuna", "automl").trial.TrialState[name]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _last_line(traceback: str | None) -> str | None:
    return traceback.strip().rpartition("\n")[2] if traceback else None
