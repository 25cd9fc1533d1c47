"""Estimator of the trees of LightGBM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bigdl.common.errors import UsageError, hide_frames
from bigdl.nano.acceleration.trees import read_lightgbm
from bigdl.orca.data.feeds import names_of
from bigdl.orca.learn.trees.estimator import FitPlan, TreeEstimator
from bigdl.orca.learn.trees.lightgbm_program import LGBMEvaluation, LGBMFit
from bigdl.orca.learn.trees.matrix import TreeColumns
from bigdl.orca.learn.trees.program import Metric
from bigdl.runtime.failure import FailurePolicy

if TYPE_CHECKING:
    import lightgbm
    import pandas as pd

    from bigdl.common.types import ColumnNames

_THREADS = "the backend sets the threads of its workers"
_NETWORK = "the workers exchange their addresses"
_ROUNDS = "pass num_rounds"
_STOPPING = "pass early_stopping_rounds to fit"
_COLUMNS = "pass the columns to fit"
_SETTINGS = {
    "num_threads": _THREADS,
    **dict.fromkeys(
        ("machines", "machine_list_filename", "num_machines", "local_listen_port"), _NETWORK
    ),
    "pre_partition": _NETWORK,
    "num_iterations": _ROUNDS,
    "early_stopping_round": _STOPPING,
    "early_stopping_min_delta": "early stopping counts each improvement",
    "first_metric_only": "early stopping takes the last metric",
    "categorical_feature": "pass categorical_cols to fit",
    **dict.fromkeys(
        ("label_column", "weight_column", "group_column", "ignore_column", "header"), _COLUMNS
    ),
    "missing": "pass missing= to LGBMEstimator",
}
"""Parameters by LightGBM's main name that an Estimator does not take, and what to do instead."""
_OF_FEATURES = (
    *("monotone_constraints", "interaction_constraints", "feature_contri", "max_bin_by_feature"),
    *("forcedsplits_filename", "forcedbins_filename"),
    *("cegb_penalty_feature_lazy", "cegb_penalty_feature_coupled"),
)
"""Parameters that depend on the number of features, which only the data has."""
_RANDOM_FOREST = ("rf", "random_forest")
_NO_METRIC = ("", "none", "None", "null", "custom", "na")
_NOT_IN_NAMES = set(',:"[]{}')


@hide_frames
class LGBMEstimator(TreeEstimator):
    """Estimator that trains boosted trees with LightGBM.

    Each worker writes its rows to disk. LightGBM bins them and keeps one byte per value in memory,
    and about 40 bytes per row and class. With one worker, the trees are those of
    ``lightgbm.train`` on the same rows. Several workers sum their histograms through unencrypted
    sockets between their addresses.

    Parameters
    ----------
    params : dict, optional
        Parameters of LightGBM, such as ``{"objective": "binary", "num_leaves": 31}``. The values of
        ``objective`` and ``metric`` may be functions of (scores, dataset), as in
        ``lightgbm.train``. ``force_col_wise`` and ``deterministic`` are true by default.
    num_rounds : int, default 100
        Number of boosting rounds of each fit.
    backend : str, default "spark"
        ``"spark"``, ``"ray"`` or ``"local"``.
    workers_per_node : int, default 1
        Number of workers on each node of the cluster.
    missing : float, default NaN
        Value of missing features, in addition to nulls.
    model_dir : str, optional
        Path or fsspec URL of a folder for the checkpoints of :meth:`fit`.
    log_to_driver : bool, default True
        Whether to show the output of the workers.
    **more_params
        More parameters of LightGBM, by keyword.

    Raises
    ------
    UsageError
        If a parameter is unknown or has a wrong value, or if LightGBM is missing.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.learn.trees import LGBMEstimator
    >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
    >>> y = (x[:, 0] > 0.25).astype("float32")
    >>> estimator = LGBMEstimator(objective="binary", num_rounds=5, backend="local")
    >>> history = estimator.fit((x, y))
    >>> estimator.predict(x[[0, -1]], output="class")
    array([0, 1])
    """

    framework = "lightgbm"
    library = "LightGBM"
    metric_name = "metric"
    booster_name = "boosting"
    class_objectives: ClassVar[Mapping[str, bool]] = {
        "binary": False,
        "multiclass": True,
        "softmax": True,
        "multiclassova": True,
    }

    def _with_main_names(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return _with_main_names(params)

    def _check_parameters(self, params: dict[str, Any]) -> None:
        _check_parameters(params)

    def _check_column(self, name: str) -> None:
        if set(name) & _NOT_IN_NAMES:
            raise UsageError(
                f"LightGBM does not allow any of {''.join(sorted(_NOT_IN_NAMES))} in feature "
                f"names, got {name!r}; rename the column",
                code="argument-value",
                column=name,
            )

    def _rounds_of(self, data: bytes) -> int:
        return int(read_lightgbm(data).current_iteration())

    @classmethod
    def _objective_of(cls, data: bytes) -> tuple[str | None, int]:
        header = data.decode().partition("\n\n")[0].splitlines()
        values = {name: value for name, _, value in (line.partition("=") for line in header)}
        objective = values.get("objective")
        name = None if objective is None else objective.partition(" ")[0]
        return name, int(values.get("num_class", 1))

    def _fit_program(self, plan: FitPlan) -> LGBMFit:
        return LGBMFit(
            dict(self._params),
            plan.stop_at,
            plan.columns,
            self._missing,
            objective=self._objective,
            metric=self._metric,
            early_stopping_rounds=plan.early_stopping_rounds,
            maximize=plan.maximize,
            checkpoint_rounds=plan.checkpoint_rounds,
        )

    def _evaluation_program(
        self, columns: TreeColumns, metrics: list[str] | None, metric: Metric | None
    ) -> LGBMEvaluation:
        has_objective = self._objective is not None
        return LGBMEvaluation(columns, self._missing, metrics, metric, has_objective)

    def fit(
        self,
        data: object,
        feature_cols: ColumnNames | None = None,
        label_cols: ColumnNames | None = None,
        validation_data: object = None,
        *,
        weight_col: str | None = None,
        base_margin_col: str | None = None,
        group_col: str | None = None,
        categorical_cols: ColumnNames | None = None,
        num_rounds: int | None = None,
        early_stopping_rounds: int | None = None,
        maximize: bool | None = None,
        checkpoint_rounds: int | None = None,
        max_failures: int | FailurePolicy | None = None,
        resume: str | None = None,
    ) -> list[dict[str, float]]:
        """Grow trees; a further call adds trees to the model.

        Parameters
        ----------
        data, feature_cols, validation_data, weight_col, group_col, categorical_cols, num_rounds
            See :meth:`XGBEstimator.fit`.
        checkpoint_rounds, max_failures, resume
            See :meth:`XGBEstimator.fit`.
        label_cols : str, optional
            Label column; LightGBM takes one.
        base_margin_col : str, optional
            Column with the score from which boosting starts (LightGBM's ``init_score``); not in a
            fit that adds trees, or that has checkpoints.
        early_stopping_rounds : int, optional
            Stop after this number of rounds without an improvement of the last metric on
            `validation_data`, and keep the trees until the best round.
        maximize : bool, optional
            Whether a larger metric is better; default LightGBM's rule for the metric.

        Returns
        -------
        list of dict
            For each round its number, and metrics such as ``train_l2`` and ``validation_l2``. The
            rounds end early if no leaf can be split.

        Raises
        ------
        UsageError
            If an argument, a column or a value cannot be used.
        WorkerLost
            If workers are lost too often.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import LGBMEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = LGBMEstimator(objective="binary", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> [sorted(entry) for entry in history][-1]
        ['round', 'train_binary_logloss']
        """
        columns = self._columns_of(
            data, feature_cols, label_cols, weight_col, base_margin_col, group_col, categorical_cols
        )
        if base_margin_col is not None and (self._model is not None or checkpoint_rounds):
            raise UsageError(
                "LightGBM replaces base_margin_col by the scores of earlier trees; fit a new "
                "LGBMEstimator without checkpoint_rounds",
                code="argument-conflict",
                argument="base_margin_col",
            )
        is_forest = self._params.get("boosting") in _RANDOM_FOREST
        if is_forest and (self._model is not None or checkpoint_rounds):
            raise UsageError(
                "LightGBM cannot add trees to a random forest; fit a new LGBMEstimator without "
                "checkpoint_rounds, or pass another boosting=",
                code="argument-conflict",
                argument="boosting",
            )
        return self._fit(
            data,
            validation_data,
            columns,
            num_rounds=num_rounds,
            early_stopping_rounds=early_stopping_rounds,
            maximize=maximize,
            checkpoint_rounds=checkpoint_rounds,
            max_failures=max_failures,
            resume=resume,
        )

    def get_model(self) -> lightgbm.Booster:
        """Return a copy of the trees as ``lightgbm.Booster``.

        Returns
        -------
        lightgbm.Booster

        Raises
        ------
        UsageError
            If the Estimator was not fitted.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import LGBMEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = LGBMEstimator(objective="binary", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> estimator.get_model().num_trees()
        3
        """
        return read_lightgbm(self._require_model())

    def feature_importances(self) -> pd.DataFrame:
        """Return the importances of the features that the trees use.

        Returns
        -------
        pandas.DataFrame
            One row per feature, with the columns ``feature``, ``gain`` and ``split`` of LightGBM,
            sorted by gain.

        Raises
        ------
        UsageError
            If the Estimator was not fitted.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import LGBMEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = LGBMEstimator(objective="binary", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> estimator.feature_importances()["feature"].tolist()
        ['Column_0']
        """
        import pandas as pd

        booster = self.get_model()
        table = pd.DataFrame(
            {
                "feature": self._feature_names() or booster.feature_name(),
                "gain": booster.feature_importance("gain"),
                "split": booster.feature_importance("split"),
            }
        )
        used = table[table["split"] > 0]
        return used.sort_values("gain", ascending=False, ignore_index=True)


def _with_main_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with LightGBM's main names instead of their aliases, without None.

    Raises
    ------
    UsageError
        If a parameter is unknown, is passed twice, or is set by other means.
    """
    main_names = _main_names()
    passed: dict[str, str] = {}
    for name, value in params.items():
        main = main_names.get(name, name)
        if main in _SETTINGS:
            raise UsageError(
                f"{name}={value!r} is not a parameter of LGBMEstimator: {_SETTINGS[main]}",
                code="argument-unknown",
                argument=name,
            )
        if name not in main_names:
            raise UsageError(
                f"LightGBM has no parameter {name!r}; check the spelling",
                code="argument-unknown",
                argument="params",
            )
        if main in passed:
            raise UsageError(
                f"{passed[main]} and {name} are the same parameter of LightGBM; pass one of them",
                code="argument-conflict",
                argument=name,
            )
        passed[main] = name
    return {main: params[name] for main, name in passed.items() if params[name] is not None}


def _main_names() -> dict[str, str]:
    """Return the main name of each parameter of LightGBM and of each alias."""
    from lightgbm.basic import _ConfigAliases

    _ConfigAliases.get("num_leaves")  # reads them from the library
    aliases = _ConfigAliases.aliases or {}
    return {name: main for main, names in aliases.items() for name in names}


def _check_parameters(params: dict[str, Any]) -> None:
    """Raise a UsageError for parameters that LightGBM or its workers do not support."""
    learner = params.get("tree_learner", "data")
    if learner not in ("data", "serial"):
        raise UsageError(
            f"tree_learner={learner!r} is not supported; the workers have different rows, so "
            "leave it out",
            code="unsupported",
            argument="tree_learner",
        )
    checked = {name: value for name, value in params.items() if name not in _OF_FEATURES}
    _try_parameters(checked)
    for metric in names_of(params.get("metric")):
        if metric not in _NO_METRIC and not _try_parameters({**checked, "metric": metric}):
            raise UsageError(
                f"LightGBM has no metric {metric!r}; check the spelling",
                code="argument-value",
                argument="metric",
            )


def _try_parameters(params: dict[str, Any]) -> bool:
    """Return whether LightGBM computes metrics with parameters.

    Raises
    ------
    UsageError
        If LightGBM refuses them.
    """
    import lightgbm
    from lightgbm.basic import LightGBMError

    rows = lightgbm.Dataset(
        np.arange(8, dtype=np.float32)[:, None],
        np.ones(8, np.float32),  # of all objectives
        group=[8],
        params={"verbosity": -1},
    )
    try:
        booster = lightgbm.Booster({**params, "verbosity": -1, "num_threads": 1}, rows)
        return bool(booster.eval_train())
    except (LightGBMError, TypeError, ValueError) as error:
        raise UsageError(
            f"LightGBM refuses the parameters: {error}", code="argument-value", argument="params"
        ) from error
