"""Search over recommenders and their usual hyperparameters, by a ranking metric.

Baselines are searched next to sequence models, because on some data they are better. All
recommenders rank all items, and are compared on the same validation rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError, require
from bigdl.friesian.baselines import (
    EASE,
    ItemKNN,
    Markov,
    Popular,
    Recommender,
    folds_as_arrow,
    ranked,
)
from bigdl.tuning import create_sampler, open_study, optimize, trial_table

if TYPE_CHECKING:
    import pandas as pd
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

    from bigdl.friesian.metrics.tables import Table
    from bigdl.friesian.splitters import Splitter

__all__ = ["MODELS", "RecommenderSearch", "search_recommenders"]

_METRICS = ("precision", "recall", "hit_rate", "map", "mrr", "ndcg")
_LOSSES = ("softmax", "sampled_softmax", "gbce", "bce")

Build = Callable[["Trial | FrozenTrial", dict[str, Any]], Recommender]
"""Function of a trial and of common options that returns an untrained recommender."""


def _popular(trial: Trial | FrozenTrial, common: dict[str, Any]) -> Recommender:
    days: Any = trial.suggest_categorical("popular.days", [None, 3, 7, 30, 90])
    seconds = None if days is None else days * 86_400.0
    return Popular(seconds, **common["columns"])


def _markov(trial: Trial | FrozenTrial, common: dict[str, Any]) -> Recommender:
    return Markov(**common["columns"])


def _item_knn(trial: Trial | FrozenTrial, common: dict[str, Any]) -> Recommender:
    neighbours = trial.suggest_int("item_knn.neighbours", 10, 500, log=True)
    shrink = trial.suggest_float("item_knn.shrink", 0, 100)
    return ItemKNN(neighbours, shrink, **common["columns"])


def _ease(trial: Trial | FrozenTrial, common: dict[str, Any]) -> Recommender:
    return EASE(trial.suggest_float("ease.l2", 10, 2000, log=True), **common["columns"])


def _sequence(name: str) -> Build:
    """Return the function of a sequence model; options of all networks have the same ranges."""

    def build(trial: Trial | FrozenTrial, common: dict[str, Any]) -> Recommender:
        from bigdl.friesian.sequential import SequenceRecommender

        options: dict[str, Any] = {
            "dim": trial.suggest_categorical(f"{name}.dim", [32, 64, 128]),
            "dropout": trial.suggest_categorical(f"{name}.dropout", [0.1, 0.2, 0.3, 0.5]),
            "loss": trial.suggest_categorical(f"{name}.loss", _LOSSES),
            "max_len": trial.suggest_categorical(f"{name}.max_len", common["max_len"]),
        }
        if name != "gru4rec":
            options["blocks"] = trial.suggest_int(f"{name}.blocks", 1, 3)
            options["heads"] = trial.suggest_categorical(f"{name}.heads", [1, 2, 4])
        if name == "sasrec":
            options["block"] = trial.suggest_categorical("sasrec.block", ["sasrec", "ligr"])
        return SequenceRecommender(
            name,
            windows="all",
            epochs=common["epochs"],
            seed=common["seed"],
            **common["columns"],
            **options,
        )

    return build


MODELS: Mapping[str, Build] = {
    "popular": _popular,
    "markov": _markov,
    "item_knn": _item_knn,
    "ease": _ease,
    **{name: _sequence(name) for name in ("sasrec", "hstu", "gru4rec", "bert4rec")},
}
"""Recommenders by name, with the ranges of their hyperparameters."""


@dataclass(frozen=True)
class RecommenderSearch:
    """Result of :func:`search_recommenders`.

    Attributes
    ----------
    study : optuna.Study
        All trials; their parameters are ``model``, and ``<model>.<hyperparameter>``.
    metric : str
    builders : dict of str to callable
        Functions of the searched recommenders.
    common : dict
        Options of all recommenders.

    Examples
    --------
    >>> import optuna
    >>> from bigdl.friesian.automl import MODELS, RecommenderSearch
    >>> study = optuna.create_study(direction="maximize")
    >>> study.enqueue_trial({"model": "ease", "ease.l2": 100.0})
    >>> def objective(trial):
    ...     name = trial.suggest_categorical("model", ["ease"])
    ...     MODELS[name](trial, {"columns": {}})
    ...     return 0.5
    >>> study.optimize(objective, n_trials=1)
    >>> RecommenderSearch(study, "ndcg@10", MODELS, {"columns": {}}).best_model().l2
    100.0
    """

    study: Study
    metric: str
    builders: Mapping[str, Build]
    common: dict[str, Any]

    @property
    def best_params(self) -> dict[str, Any]:
        """Parameters of the best trial."""
        return dict(self.study.best_params)

    @property
    def table(self) -> pd.DataFrame:
        """Trials, the best first: state, metric, seconds, and parameters."""
        table = trial_table(self.study)
        return table.sort_values(self.metric, ascending=False, kind="stable")

    def best_model(self, name: str | None = None) -> Recommender:
        """Return an untrained recommender with the best parameters, to be trained on all rows.

        Parameters
        ----------
        name : str, optional
            Best trial of this model. Default: the best trial of all.

        Raises
        ------
        UsageError
            If no trial of the model has ended.
        """
        trials = [
            each
            for each in self.study.trials
            if each.value is not None and name in (None, each.params["model"])
        ]
        if not trials:
            raise UsageError(
                f"No trial of {name or 'any model'} has ended; search with more trials",
                code="name-unknown",
                argument="name",
            )
        best = max(trials, key=lambda each: each.value or 0.0)
        return self.builders[best.params["model"]](best, self.common)


def search_recommenders(
    table: Table,
    splitter: Splitter,
    models: Sequence[str] | Mapping[str, Build] = tuple(MODELS),
    *,
    metric: str = "ndcg@10",
    n_trials: int = 40,
    timeout: float | None = None,
    epochs: int = 30,
    max_len: Sequence[int] = (50, 100, 200),
    backend: str = "local",
    concurrency: int | None = 1,
    cores_per_trial: int = 1,
    storage: str | None = None,
    resume: bool = False,
    seed: int = 0,
) -> RecommenderSearch:
    """Search for the recommender with the best ranking metric on validation rows.

    Each model has one of the first trials, so that a short search compares all of them; then TPE
    chooses. All items are ranked, and known items of a user are neither recommended nor tested.
    Keep test rows out of `table`: the best of many trials is better on the validation rows than on
    others.

    Parameters
    ----------
    table : FeatureTable or pyspark.sql.DataFrame
        Training and validation rows: users, items and times.
    splitter : Splitter
        Separates the validation rows, as the test rows will be: ``LastN(1)`` for leave-one-out,
        ``GlobalTime`` for later rows. The metric is the mean over its folds.
    models : sequence of str, or dict of str to callable
        Names of :data:`MODELS`, default all; or functions of a trial and of a dict of common
        options, which return an untrained recommender.
    metric : str, default "ndcg@10"
        ``precision``, ``recall``, ``hit_rate``, ``map``, ``mrr`` or ``ndcg``, and the number of
        recommendations.
    n_trials : int, default 40
    timeout : float, optional
        Seconds after which the search ends.
    epochs : int, default 30
        Of sequence models.
    max_len : sequence of int, default (50, 100, 200)
        Lengths of histories that sequence models try.
    backend, concurrency, cores_per_trial
        As in :func:`bigdl.tuning.optimize`. Default: one trial at a time, in a process of this
        machine.
    storage : str, optional
        URL of a database for the study, such as ``"sqlite:///search.db"``.
    resume : bool, default False
        Continue the study of `storage`.
    seed : int, default 0
        Of the sampler and the sequence models.

    Returns
    -------
    RecommenderSearch

    Raises
    ------
    UsageError
        For unknown models and metrics, and if no test row remains.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.automl import search_recommenders
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import LastN
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> random = np.random.default_rng(0)
    >>> user = np.repeat(np.arange(40), 15)
    >>> item = (user + 3 * np.tile(np.arange(15), 40)) % 50  # an item determines the next one
    >>> clicks = pd.DataFrame({"user": user, "item": item, "time": np.arange(600)})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> search = search_recommenders(table, LastN(1), ["popular", "markov"], n_trials=3)
    >>> search.best_params
    {'model': 'markov'}
    >>> best = search.best_model().fit(table)
    """
    require("optuna", "automl")
    builders = _builders(models)
    name, k = _parsed(metric)
    check_integer("n_trials", n_trials, 1)
    columns = {f"{each}_col": getattr(splitter, f"{each}_col") for each in ("user", "item", "time")}
    common = {
        "columns": columns,
        "epochs": check_integer("epochs", epochs, 1),
        "max_len": [check_integer("max_len", each, 1) for each in max_len],
        "seed": seed,
    }
    folds = [
        (fold.train.to_pandas(), fold.test.to_pandas()) for fold in folds_as_arrow(table, splitter)
    ]
    study = open_study(
        storage=storage,
        directions=["maximize"],
        sampler=create_sampler(seed=seed),
        resume=resume,
        metric_names=[metric],
    )
    if not study.trials:
        for each in builders:
            study.enqueue_trial({"model": each})
    optimize(
        study,
        _objective(builders, common, name, k),
        n_trials,
        backend=backend,
        concurrency=concurrency,
        cores_per_trial=cores_per_trial,
        timeout=timeout,
        data=folds,
    )
    return RecommenderSearch(study, metric, builders, common)


def _builders(models: Sequence[str] | Mapping[str, Build]) -> dict[str, Build]:
    if not models:
        raise UsageError(
            f"models is empty; name at least one of {list(MODELS)}", code="argument-value"
        )
    if isinstance(models, Mapping):
        return dict(models)
    names = [models] if isinstance(models, str) else models
    return {check_choice("models", each, tuple(MODELS)): MODELS[each] for each in names}


def _parsed(metric: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\w+)@([1-9]\d*)", metric)
    if match is None or match[1] not in _METRICS:
        raise UsageError(
            f"metric should be one of {list(_METRICS)} with a number of recommendations, such as "
            f"'ndcg@10', got {metric!r}",
            code="argument-value",
            argument="metric",
        )
    return match[1], int(match[2])


def _objective(
    builders: Mapping[str, Build], common: dict[str, Any], metric: str, k: int
) -> Callable[[Trial, Any], float]:
    columns = common["columns"]["user_col"], common["columns"]["item_col"]

    def objective(trial: Trial, folds: Any) -> float:
        import pyarrow as pa

        name = trial.suggest_categorical("model", list(builders))
        values = []
        for train, test in folds:
            rows, wanted = (
                pa.Table.from_pandas(each, preserve_index=False) for each in (train, test)
            )
            model = builders[name](trial, common)
            result = ranked(name, model, rows, wanted, metric, k, *columns)
            values.append(result[f"{metric}@{k}"])
        return sum(values) / len(values)

    return objective
