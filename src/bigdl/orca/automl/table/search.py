"""Search over the models of a table: the trials, their objective and the leaderboard."""

from __future__ import annotations

import functools
import importlib.util
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.cpu import thread_scope
from bigdl.common.errors import UsageError, check_installed, require
from bigdl.common.timeouts import TRIAL_START_S
from bigdl.orca.automl import hp
from bigdl.orca.automl.table.columns import MatrixRows
from bigdl.orca.automl.table.folds import TableFold
from bigdl.orca.automl.table.metrics import TableMetric
from bigdl.orca.automl.table.model import (
    ConstantModel,
    FoldModel,
    LinearModel,
    TrainingRows,
    TrainingSettings,
)
from bigdl.orca.automl.table.net import NetModel
from bigdl.orca.automl.table.trees import BoostedTrees, ForestModel, LightGBMModel
from bigdl.training.state import dumps, loads
from bigdl.tuning import open_study, optimize
from bigdl.tuning.spaces import SearchSpace
from bigdl.tuning.study import raise_log_level

if TYPE_CHECKING:
    import pandas as pd
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from bigdl.tuning.remote import RemoteTrial

logger = logging.getLogger("bigdl.orca")

MODELS: dict[str, type[FoldModel]] = {
    each.name: each
    for each in (ConstantModel, BoostedTrees, LinearModel, NetModel, LightGBMModel, ForestModel)
}
"""Models by name, in the order in which they are tried first."""

_DRAWN = ("xgboost", "lightgbm", "net", "xgboost", "lightgbm", "forest", "net", "linear")
"""Models of the trials after the defaults, which repeat."""

_SHARE = 0.5  # of the remaining time that one trial may use


def available_models(names: Sequence[str] | None) -> list[str]:
    """Return the models to try: the named ones, or those whose packages are installed.

    Raises
    ------
    UsageError
        If there is no model with a name, or its package is missing.
    """
    for name in names or ():
        if name not in MODELS:
            raise UsageError(
                f"models has {name!r}; the models are {', '.join(MODELS)}",
                code="name-unknown",
                argument="models",
                allowed=list(MODELS),
            )
        check_installed(MODELS[name].extra, *MODELS[name].packages)
    installed = [
        name
        for name, model in MODELS.items()
        if all(importlib.util.find_spec(package) is not None for package in model.packages)
    ]
    return [name for name in installed if names is None or name in names or name == "constant"]


@dataclass
class TableJob:
    """Rows, folds and settings that all trials of a search share.

    Attributes
    ----------
    rows : MatrixRows
    y : ndarray
        Class indices, or values.
    folds : list of TableFold
    settings : TrainingSettings
    deadline : float
        Time of the driver's clock at which training ends; infinite without a time limit.
    """

    rows: MatrixRows
    y: np.ndarray
    folds: list[TableFold]
    settings: TrainingSettings
    deadline: float

    def training_rows(self, fold: TableFold, deadline: float) -> TrainingRows:
        """Return the rows on which the model of a fold is trained."""
        return TrainingRows(
            self.rows.take(fold.train),
            self.y[fold.train],
            self.rows.take(fold.held_out),
            self.y[fold.held_out],
            self.settings,
            deadline,
        )


class TableSpace:
    """Configurations of a search: the defaults of the models, then drawn ones.

    Parameters
    ----------
    models : sequence of str
    """

    def __init__(self, models: Sequence[str]):
        self._defaults: list[dict[str, Any]] = []
        for position in range(max(len(MODELS[name].defaults) for name in models)):
            for name in models:
                each = MODELS[name].defaults[position : position + 1]
                self._defaults += [{"model": name, **config} for config in each]
        self._drawn = [name for name in _DRAWN if name in models]
        spaces: list[dict[str, Any]] = [
            {"model": name, **(MODELS[name].space() or {})} for name in dict.fromkeys(self._drawn)
        ]
        self._names = [space["model"] for space in spaces]
        self._space = SearchSpace({"of": hp.choice([*self._defaults, *spaces])})

    @property
    def default_count(self) -> int:
        """Number of default configurations."""
        return len(self._defaults)

    def parameters(self, seed: int, number: int) -> dict[str, Any] | None:
        """Return the parameters of a trial, determined by seed and number; None at the end."""
        drawn = self._space.random_parameters(seed, number)
        if number < len(self._defaults):
            chosen = number
        elif self._drawn:
            model = self._drawn[(number - len(self._defaults)) % len(self._drawn)]
            chosen = len(self._defaults) + self._names.index(model)
        else:
            return None
        prefix = f"of/{chosen}/"
        return {"of": chosen} | {k: v for k, v in drawn.items() if k.startswith(prefix)}

    def config(self, source: Any) -> dict[str, Any]:  # source: a trial or a mapping
        """Return the configuration of a trial or of parameters."""
        config: dict[str, Any] = self._space.resolve(source, 0, 0)["of"]
        return config


@dataclass
class TableObjective:
    """Objective that trains one configuration on all folds and returns its mean score."""

    space: TableSpace
    metric: TableMetric

    def __call__(self, trial: RemoteTrial, job: TableJob) -> float:
        remaining = job.deadline - trial.driver_time()
        if remaining < TRIAL_START_S and trial.number > 0:
            trial.study.stop()
            raise require("optuna", "automl").TrialPruned("There was no time left")
        config = self.space.config(trial)
        trial.set_user_attr("config", config)
        started = time.perf_counter()
        try:
            with thread_scope(job.settings.threads):
                models, scores, is_late = self._train(job, dict(config), remaining)
        except Exception:
            trial.set_user_attr("error", traceback.format_exc())
            raise
        known = [score for score in scores if score == score]
        if not known:
            trial.set_user_attr("error", f"The metric {self.metric.name} is NaN in all folds")
            raise UsageError("The metric is NaN in all folds", code="search-failed")
        seconds = time.perf_counter() - started
        facts = {"scores": scores, "seconds": round(seconds, 3), "is_late": is_late}
        trial.set_user_attr("result", facts)
        trial.upload(dumps({"model": config["model"], "states": [m.state() for m in models]}))
        return float(np.mean(known))

    def _train(
        self, job: TableJob, config: dict[str, Any], remaining: float
    ) -> tuple[list[FoldModel], list[float], bool]:
        """Train and score a model for each fold; keep those of the last fold if it has no test."""
        model_class = MODELS[config.pop("model")]
        end = time.time() + _SHARE * remaining
        models: list[FoldModel] = []
        scores: list[float] = []
        is_late = False
        for number, fold in enumerate(job.folds):
            left = end - time.time()
            deadline = time.time() + left / (len(job.folds) - number)
            data = job.training_rows(fold, deadline)
            model = model_class.fit(dict(config), data)
            is_late = is_late or data.is_late
            if fold.test is None:
                return [model], scores, is_late
            predicted = model.scores(job.rows.take(fold.test))
            scores.append(float(self.metric.compute(job.y[fold.test], predicted)))
            models.append(model)
        return models, scores, is_late


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


class TableSearch:
    """Search over configurations; it keeps the models of the best trial.

    Parameters
    ----------
    job : TableJob
    metric : TableMetric
    models : sequence of str
    n_trials : int, optional
        Number of trials; by default the defaults of all models and 10 others, or with a time limit
        as many as it allows, up to 200.
    """

    def __init__(
        self,
        job: TableJob,
        metric: TableMetric,
        models: Sequence[str],
        n_trials: int | None,
    ):
        self._job, self._metric = job, metric
        self._space = TableSpace(models)
        has_limit = job.deadline < float("inf")
        count = n_trials or (200 if has_limit else self._space.default_count + 10)
        direction = "maximize" if metric.mode == "max" else "minimize"
        with raise_log_level(logging.ERROR, "optuna"):
            self.study = open_study(directions=[direction], metric_names=[metric.name])
            self._count = self._plan(count)
        self._uploads: dict[int, bytes] = {}
        self._best: bytes | None = None

    def _plan(self, count: int) -> int:
        for number in range(count):
            parameters = self._space.parameters(self._job.settings.seed, number)
            if parameters is None:
                return number
            self.study.enqueue_trial(parameters)
        return count

    def run(
        self, backend: str, concurrency: int | None, on_trial: Callable[[str], None] | None = None
    ) -> None:
        """Run the trials until all have ended or the time limit is reached."""
        has_limit = self._job.deadline < float("inf")
        timeout = max(0.1, self._job.deadline - time.time()) if has_limit else None
        with raise_log_level(logging.ERROR, "optuna"):
            optimize(
                self.study,
                TableObjective(self._space, self._metric),
                self._count,
                backend=backend,
                concurrency=concurrency,
                cores_per_trial=self._job.settings.threads,
                timeout=timeout,
                catch=(Exception,),
                callbacks=[functools.partial(self._end, on_trial)],
                data=self._job,
                on_upload=self._uploads.__setitem__,
            )

    def _end(
        self, on_trial: Callable[[str], None] | None, study: Study, trial: FrozenTrial
    ) -> None:
        """Keep the models of a trial if it is the best one."""
        models = self._uploads.pop(trial.number, b"")
        if models and trial.state.name == "COMPLETE" and study.best_trial.number == trial.number:
            self._best = models
        if on_trial is not None and "config" in trial.user_attrs:
            name = trial.user_attrs["config"]["model"]
            if trial.value is None:
                value = f"failed: {_last_line(trial.user_attrs.get('error', ''))}"
            else:
                value = f"{self._metric.name} {trial.value:.5g}"
            on_trial(f"trial {trial.number}, {name}: {value}")

    def best(self) -> tuple[str, list[FoldModel]]:
        """Return model name and trained models of the best trial.

        Raises
        ------
        UsageError
            If no trial has finished.
        """
        if self._best is None:
            errors = [t.user_attrs["error"] for t in self.study.trials if "error" in t.user_attrs]
            if errors:
                error = UsageError(
                    f"No model could be trained: {_last_line(errors[0])}",
                    code="search-failed",
                )
                error.add_note(errors[0])
                raise error
            raise UsageError(
                "No model was trained within the time limit; raise time_limit",
                code="search-failed",
                argument="time_limit",
            )
        content = loads(self._best)
        model_class = MODELS[content["model"]]
        return content["model"], [model_class.of_state(s) for s in content["states"]]

    def leaderboard(self) -> pd.DataFrame:
        """Return one row per trial, best first; failed trials are last."""
        import pandas as pd

        rows = []
        for trial in self.study.trials:
            config = dict(trial.user_attrs.get("config", {}))
            if not config:
                continue  # it was not started
            result = trial.user_attrs.get("result", {})
            known = [score for score in result.get("scores", []) if score == score]
            status = "finished" if trial.value is not None else "failed"
            if status == "failed" and "error" not in trial.user_attrs:
                status = "stopped"
            rows.append(
                {
                    "model": config.pop("model"),
                    self._metric.name: trial.value,
                    "std": float(np.std(known)) if known else None,
                    "seconds": result.get("seconds"),
                    "status": "time limit" if result.get("is_late") else status,
                    "trial": trial.number,
                    "config": config,
                    "error": _last_line(trial.user_attrs.get("error", "")),
                }
            )
        names = [*("model", self._metric.name, "std", "seconds"), *("status", "trial", "config")]
        table = pd.DataFrame(rows, columns=[*names, "error"])
        table = table.astype({self._metric.name: float, "std": float, "seconds": float})
        ascending = self._metric.mode == "min"
        return table.sort_values(
            [self._metric.name, "trial"], ascending=[ascending, True], ignore_index=True
        )
