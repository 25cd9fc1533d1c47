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
from bigdl.tuning.study import check_description, without_experimental_warnings

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

    from bigdl.friesian.metrics.tables import Table
    from bigdl.friesian.splitters import Splitter

__all__ = ["MODELS", "RecommenderSearch", "search_recommenders"]

_METRICS = ("precision", "recall", "hit_rate", "map", "mrr", "ndcg")
_ERROR = "error"  # user attribute with the error of a failed trial
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
        """Parameters of the best trial.

        Raises
        ------
        UsageError
            If no trial has ended.
        """
        return dict(self._best().params)

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
        best = self._best(name)
        return self.builders[best.params["model"]](best, self.common)

    def _best(self, name: str | None = None) -> FrozenTrial:
        """Return the best trial that has ended, of one model or of all."""
        trials = [
            each
            for each in self.study.trials
            if each.value is not None and name in (None, each.params["model"])
        ]
        if not trials:
            raise UsageError(
                f"No trial of {name or 'any model'} has ended; search with more trials or time",
                code="data-empty" if name is None else "name-unknown",
                **({} if name is None else {"argument": "name"}),
            )
        return max(trials, key=lambda each: each.value or 0.0)


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
    others. A trial whose model cannot be trained, such as EASE of too many items, is logged and
    recorded as failed, and the search continues. The rows of all folds are in the driver's memory.

    Parameters
    ----------
    table : FeatureTable or pyspark.sql.DataFrame
        Training and validation rows: users, items and times.
    splitter : Splitter
        Separates the validation rows, as the test rows will be: ``LastN(1)`` for leave-one-out,
        ``GlobalTime`` for later rows. The metric is the mean over its folds.
    models : sequence of str, or dict of str to callable
        Names of :data:`MODELS`, default all; or functions of a trial and of a dict of common
        options, which return an untrained recommender. The ``days`` of ``popular`` assume that
        numeric times are in seconds.
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
        Continue the study of `storage`. Models, metric, options and rows must be those of the saved
        search.
    seed : int, default 0
        Of the sampler and the sequence models.

    Returns
    -------
    RecommenderSearch

    Raises
    ------
    UsageError
        For unknown models and metrics, if no test row remains, if no model could be trained, and if
        a resumed search has other arguments or rows.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.automl import search_recommenders
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import LastN
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
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
    folds = [(fold.train, fold.test) for fold in folds_as_arrow(table, splitter)]
    description = {
        "metric": metric,
        "models": list(builders),
        **common,
        "folds": [_fingerprint(train, test) for train, test in folds],
    }
    study = open_study(storage=storage, directions=["maximize"], resume=resume)
    check_description(study, description, f"The search {study.study_name!r} in {storage}")
    with without_experimental_warnings():
        study.set_metric_names([metric])
    # a resumed search draws other parameters than the trials that it has
    study.sampler = create_sampler(seed=seed + len(study.trials))
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
        catch=(Exception,),
        data=folds,
    )
    _check_not_all_failed(study)
    return RecommenderSearch(study, metric, builders, common)


def _fingerprint(train: pa.Table, test: pa.Table) -> dict[str, int]:
    """Return row counts and a checksum of the test rows, independent of their order."""
    import pandas as pd

    checksum = int(pd.util.hash_pandas_object(test.to_pandas(), index=False).sum())
    return {"train": train.num_rows, "test": test.num_rows, "checksum": checksum}


def _check_not_all_failed(study: Study) -> None:
    trials = study.get_trials(deepcopy=False)
    failed = [each for each in trials if _ERROR in each.user_attrs]
    if failed and all(each.value is None for each in trials):
        last = failed[-1]
        raise UsageError(
            f"No model could be trained in {len(failed)} trials; the last one, of "
            f"{last.params['model']!r}, ended with {last.user_attrs[_ERROR]}",
            code="search-failed",
        )


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
        from optuna import TrialPruned

        name = trial.suggest_categorical("model", list(builders))
        values = []
        try:
            for train, test in folds:
                model = builders[name](trial, common)
                result = ranked(name, model, train, test, metric, k, *columns)
                values.append(result[f"{metric}@{k}"])
        except TrialPruned:
            raise
        except Exception as error:
            trial.set_user_attr(_ERROR, f"{type(error).__name__}: {error}")
            raise
        return sum(values) / len(values)

    return objective
