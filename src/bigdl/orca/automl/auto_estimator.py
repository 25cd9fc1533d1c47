"""AutoEstimator: search for the best hyperparameter configuration of a model.

An :class:`AutoEstimator` has a *builder* (:mod:`bigdl.orca.automl.trial`), which creates a model
from a configuration.  ``fit`` creates a *job*, which all trials share, and the *records*, in which
the trials are enqueued.  Waiting trials run on Ray (:mod:`bigdl.orca.automl.ray_search`), on Spark
(:func:`bigdl.tuning.optimize`) or in local processes (:func:`bigdl.tuning.run_trials`).  All
results are read from the records, so a resumed search behaves like an uninterrupted one.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.common.pages import Page
from bigdl.common.private_folders import private_root
from bigdl.common.program_state import preserve_rng_state, preserve_start_method
from bigdl.orca.automl.model.data import trial_data
from bigdl.orca.automl.records import TrialRecords
from bigdl.orca.automl.results import (
    draw_history,
    draw_parallel_coordinates,
    report_page,
    write_leaderboard,
)
from bigdl.orca.automl.search import (
    check_any_finished,
    choose_backend,
    run_locally,
    run_on_spark,
    search_folder,
    shared_resources,
)
from bigdl.orca.automl.strategy import Strategy, from_ray
from bigdl.orca.automl.trial import Builder, SearchGoal, TrialJob
from bigdl.orca.data.feeds import names_of
from bigdl.tuning.spaces import SearchSpace
from bigdl.tuning.study import raise_log_level

if TYPE_CHECKING:
    import pandas as pd
    from optuna.trial import FrozenTrial

    from bigdl.common.types import ColumnNames
    from bigdl.orca.automl.table.estimator import TableEstimator

__all__ = ["AutoEstimator"]

logger = logging.getLogger("bigdl.orca")


@hide_frames
class AutoEstimator:
    """Hyperparameter search that trains configurations of a model and keeps the best one.

    Create it with :meth:`from_torch` or :meth:`from_keras`;
    :class:`~bigdl.orca.automl.xgboost.AutoXGBClassifier` and
    :class:`~bigdl.orca.automl.xgboost.AutoXGBRegressor` have the same ``fit``.

    Parameters
    ----------
    model_builder : Builder
        Builder of the models.
    logs_dir : str, optional
        Local folder; the search is saved in its subfolder `name`. By default
        ``bigdl-<user id>/auto_estimator_logs`` in the temporary directory, writable only by this
        user.
    resources_per_trial : dict, optional
        ``"cpu"`` (default 1 per worker), ``"gpu"`` and other Ray resources.
    name : str
        Name of the search's folder.
    remote_dir : str, optional
        Folder on shared storage for the checkpoints of trials that a scheduler moves or rolls back
        (PBT, HyperBand); needed if Ray runs on several machines.
    backend : {"ray", "spark", "local"}, optional
        Where trials run: on Ray, as tasks of the active Spark (also over Spark Connect), or on this
        machine. By default Ray if it is connected or can start on an active Spark, else this
        machine.
    workers_per_trial : int, default 1
        Number of processes that train the model of a trial together, possibly on several nodes.
        More than one needs Ray or Spark, and a PyTorch or Keras model.  They divide
        `resources_per_trial` evenly, and ``"batch_size"`` is their total, so results do not depend
        on the number.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.automl import hp
    >>> from bigdl.orca.automl.auto_estimator import AutoEstimator
    >>> def model_creator(config):
    ...     return torch.nn.Linear(1, 1)
    >>> auto_est = AutoEstimator.from_torch(
    ...     model_creator=model_creator, optimizer="SGD", loss="MSELoss", logs_dir="logs",
    ...     backend="local",
    ... )
    >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    >>> auto_est.fit(
    ...     (x, 2 * x), epochs=3, validation_data=(x, 2 * x), metric="mse",
    ...     search_space={"lr": hp.grid_search([1e-6, 0.5])},
    ... )
    >>> auto_est.get_best_config()["lr"]
    0.5
    """

    def __init__(
        self,
        model_builder: Builder,
        logs_dir: str | None = None,
        resources_per_trial: Mapping[str, float] | None = None,
        remote_dir: str | None = None,
        name: str | None = None,
        *,
        backend: str | None = None,
        workers_per_trial: int = 1,
    ):
        if not isinstance(model_builder, Builder):
            raise UsageError(
                "model_builder must be a Builder; use AutoEstimator.from_torch or from_keras, got "
                f"{type(model_builder).__name__}",
                code="argument-type",
                argument="model_builder",
            )
        check_choice("backend", backend or "local", ("ray", "spark", "local"))
        name = name or "auto_estimator"
        if not isinstance(name, str) or Path(name).name != name:
            raise UsageError(
                f"name must be the name of a folder, got {name!r}",
                code="argument-value",
                argument="name",
            )
        self.model_builder = model_builder
        self.name = name
        if logs_dir is None:
            logs_dir = os.path.join(private_root(tempfile.gettempdir()), "auto_estimator_logs")
        self.logs_dir = Path(logs_dir).expanduser().absolute()  # Ray Tune needs absolute paths
        check_positive("workers_per_trial", workers_per_trial)
        if workers_per_trial > 1 and not model_builder.takes_workers:
            raise UsageError(
                f"workers_per_trial={workers_per_trial} is supported for PyTorch and Keras only; "
                "XGBoost trials have one worker with cpus_per_trial threads",
                code="unsupported",
                argument="workers_per_trial",
            )
        self._bundles = shared_resources(resources_per_trial, workers_per_trial)
        self.remote_dir = remote_dir
        self.backend = backend
        self._records: TrialRecords | None = None

    @staticmethod
    def from_torch(
        *,
        model_creator: Callable,
        optimizer: str | Callable,
        loss: str | Callable[..., Any],
        logs_dir: str | None = None,
        resources_per_trial: Mapping[str, float] | None = None,
        name: str = "auto_pytorch_estimator",
        remote_dir: str | None = None,
        backend: str | None = None,
        workers_per_trial: int = 1,
    ) -> AutoEstimator:
        """Create a search over configurations of a PyTorch model.

        Parameters
        ----------
        model_creator : callable
            ``f(config)`` returns an ``nn.Module``.
        optimizer : str or callable
            Name of a class of ``torch.optim`` with learning rate ``config["lr"]`` (default 1e-3),
            or ``f(model, config)``.
        loss : str, nn.Module or callable
            Name of a loss of ``torch.nn``, a loss, or ``f(config)``.
        logs_dir, resources_per_trial, name, remote_dir, backend, workers_per_trial
            See :class:`AutoEstimator`.

        Raises
        ------
        UsageError
            If torch has no such optimizer or loss, or an argument has another type.
        """
        from bigdl.orca.automl.model.base_pytorch_model import PytorchModelBuilder

        builder = PytorchModelBuilder(model_creator, optimizer, loss)
        options: dict[str, Any] = {"backend": backend, "workers_per_trial": workers_per_trial}
        return AutoEstimator(builder, logs_dir, resources_per_trial, remote_dir, name, **options)

    @staticmethod
    def from_keras(
        *,
        model_creator: Callable,
        logs_dir: str | None = None,
        resources_per_trial: Mapping[str, float] | None = None,
        name: str = "auto_keras_estimator",
        remote_dir: str | None = None,
        backend: str | None = None,
        workers_per_trial: int = 1,
    ) -> AutoEstimator:
        """Create a search over configurations of a Keras model.

        Parameters
        ----------
        model_creator : callable
            ``f(config)`` returns a compiled model.
        logs_dir, resources_per_trial, name, remote_dir, backend, workers_per_trial
            See :class:`AutoEstimator`.
        """
        from bigdl.orca.automl.model.base_keras_model import KerasModelBuilder

        builder = KerasModelBuilder(model_creator)
        options: dict[str, Any] = {"backend": backend, "workers_per_trial": workers_per_trial}
        return AutoEstimator(builder, logs_dir, resources_per_trial, remote_dir, name, **options)

    @staticmethod
    def from_table(
        data: object,
        label: str,
        *,
        time_limit: float | None = None,
        n_trials: int | None = None,
        task: str | None = None,
        metric: str | Callable | None = None,
        metric_mode: str | None = None,
        models: Sequence[str] | None = None,
        feature_cols: ColumnNames | None = None,
        categorical_cols: ColumnNames | None = None,
        group_col: str | None = None,
        time_col: str | None = None,
        folds: int = 5,
        backend: str | None = None,
        concurrency: int | None = None,
        cpus_per_trial: int | None = None,
        seed: int = 0,
    ) -> TableEstimator:
        """Train several models on a table, compare them by cross-validation, and keep the best.

        First each model is trained with its default configurations, then with configurations drawn
        from its search space. The rows are divided into folds before anything is fitted:
        categories, scales and the moment at which training stops are decided by the training rows
        of a fold, never by those on which it is scored.

        Parameters
        ----------
        data : pandas.DataFrame, pyspark.sql.DataFrame or str
            Table of numbers, texts, booleans and dates, with missing values; or the path of a CSV
            file, of Parquet files, or of a Delta or Iceberg table. It must fit in the memory of
            this process, and of each machine that runs trials.
        label : str
            Column to predict.
        time_limit : float, optional
            Seconds after which the search ends. A trial that is running then ends with the trees
            or epochs that it has; one of a linear model, or one within an epoch or in the first
            25 trees of a forest, is stopped.
        n_trials : int, optional
            Number of trials. By default the defaults and 10 drawn configurations, or up to 200
            within `time_limit`.
        task : {"binary", "multiclass", "regression"}, optional
            By default texts, booleans, and numbers with at most 20 different integer values are
            classes.
        metric : str or callable, optional
            A name as in :meth:`TableEstimator.evaluate
            <bigdl.orca.automl.table.estimator.TableEstimator.evaluate>`, or ``f(y_true, y_pred)``
            of labels. By default ``"auc"`` for two classes, ``"logloss"`` for more, and
            ``"rmse"``.
        metric_mode : {"min", "max"}, optional
            Required for functions; named metrics have a mode.
        models : str or list of str, optional
            Among ``"xgboost"``, ``"lightgbm"``, ``"forest"``, ``"linear"`` and ``"net"``; by
            default all whose packages are installed. A constant model is always tried, as a
            baseline.
        feature_cols : str or list of str, optional
            Feature columns, by default all others.
        categorical_cols : str or list of str, optional
            Columns of numbers that are categories. Texts always are.
        group_col : str, optional
            Column with groups, such as customers: all rows of a group are in the same fold. It is
            not a feature.
        time_col : str, optional
            Column with times: a model is scored on rows that are newer than its training rows, and
            the best configuration is also trained on all rows. It is not a feature.
        folds : int, default 5
            Number of folds.
        backend : {"spark", "ray", "local"}, optional
            Where trials run, by default on Spark for a Spark DataFrame, else on this machine.
        concurrency : int, optional
            Maximum number of concurrent trials.
        cpus_per_trial : int, optional
            Threads of a trial, by default all of this machine, or one on a cluster.
        seed : int, default 0
            Seed of the folds, the configurations and the models. With the same `n_trials` and
            `cpus_per_trial` the results are the same.

        Returns
        -------
        bigdl.orca.automl.table.estimator.TableEstimator
            Trained estimator.

        Raises
        ------
        UsageError
            If an argument or a column cannot be used, or no model could be trained.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from bigdl.orca.automl.auto_estimator import AutoEstimator
        >>> rows = load_diabetes(as_frame=True).frame
        >>> table = AutoEstimator.from_table(rows[:300], label="target", n_trials=3, folds=3)
        >>> table.task
        'regression'
        >>> table.evaluate(rows[300:], ["r2"])["r2"] > 0.3
        True
        """
        from bigdl.orca.automl.table.estimator import fit_table

        return fit_table(
            data,
            label,
            time_limit=time_limit,
            n_trials=n_trials,
            task=task,
            metric=metric,
            metric_mode=metric_mode,
            models=models,
            feature_cols=feature_cols,
            categorical_cols=categorical_cols,
            group_col=group_col,
            time_col=time_col,
            folds=folds,
            backend=backend,
            concurrency=concurrency,
            cpus_per_trial=cpus_per_trial,
            seed=seed,
        )

    # The search ---------------------------------------------------------------------------------

    def fit(
        self,
        data: object,
        epochs: int = 1,
        validation_data: object = None,
        metric: object = None,
        metric_mode: object = None,
        metric_threshold: float | None = None,
        n_sampling: int = 1,
        search_space: Mapping[str, Any] | None = None,
        search_alg: object = None,
        search_alg_params: Mapping[str, Any] | None = None,
        scheduler: object = None,
        scheduler_params: Mapping[str, Any] | None = None,
        feature_cols: ColumnNames | None = None,
        label_cols: ColumnNames | None = None,
        *,
        concurrency: int | None = None,
        seed: int = 0,
        resume: bool | str = False,
    ) -> None:
        """Run the search.

        Parameters
        ----------
        data : object
            ``(x, y)`` of arrays, each an array or a list of them; a pandas or Spark DataFrame with
            `feature_cols` and `label_cols`; XShards; Parquet files; a torch DataLoader, or
            ``f(config)`` that returns one (for Keras a ``tf.data.Dataset``). Rows are stored once
            in Ray's object store, or in memory-mapped files that all processes of a machine share.
        epochs : int, default 1
            Maximum epochs of a trial.
        validation_data : object, optional
            Validation data, of the same types. Without it metrics are computed on the training
            data.
        metric : str, callable, or list of them
            Name of a metric of :class:`~bigdl.orca.automl.metrics.Evaluator` or of the model, or
            ``f(y_true, y_pred)``. Trials are compared by their best epoch. With several metrics
            the best trials are the Pareto-optimal ones (:meth:`get_best_trials`).
        metric_mode : {"min", "max"} or list of them, optional
            Required for functions and unknown names.
        metric_threshold : float, optional
            A trial ends when its first metric reaches this value.
        n_sampling : int, default 1
            Number of configurations; with ``hp.grid_search``, per point of the grid.
        search_space : dict
            Distributions of :mod:`bigdl.orca.automl.hp` and fixed values. ``"batch_size"``
            (default 32) and ``"lr"`` set the batch size and the learning rate.
        search_alg : str or object, optional
            Search algorithm, by default random. ``"optuna"`` (TPE), ``"cmaes"`` or ``"nsga2"`` of
            Optuna, or an Optuna sampler; on Ray also the names and searchers of ``ray.tune``.
        search_alg_params : dict, optional
            Arguments of the searcher.
        scheduler : str or object, optional
            Scheduler that stops trials early: ``"AsyncHyperBand"`` (ASHA),
            ``"median_stopping_rule"``, ``"hyperband"``; on Ray also ``"pbt"`` and others of
            ``ray.tune``.
        scheduler_params : dict, optional
            Arguments of the scheduler, such as ``grace_period``; ``max_t`` is `epochs` by default.
            ASHA by default compares trials after a ninth of `epochs` and keeps one of two.
            ``finalists`` is the number of early-stopped trials, the best ones, that ASHA trains to
            the end after all others; by default 10 % of the trials.
        feature_cols, label_cols : str or list of str, optional
            Columns of frames; each feature is an argument of the model.
        concurrency : int, optional
            Maximum number of concurrent trials, by default as many as the resources allow.
        seed : int, default 0
            Seed of the configurations and of each trial's random numbers.
        resume : bool or "auto", default False
            Resume the newest search with this name below `logs_dir`; ``"auto"`` starts a new
            search if there is none. Finished trials are kept, the others run.

        Raises
        ------
        UsageError
            If an argument is invalid, this object was already fitted, or all trials failed.
        """
        if self._records is not None:
            raise UsageError(
                "This AutoEstimator has already been fitted and cannot fit again.", code="state"
            )
        check_positive("epochs", epochs)
        check_positive("n_sampling", n_sampling)
        check_positive("concurrency", 1 if concurrency is None else concurrency)
        builder, space = self.model_builder, SearchSpace(search_space or {}, convert=from_ray)
        if metric is None:
            metric = builder.default_metric(
                lambda: space.resolve(space.random_parameters(seed, 0), seed, 0)
            )
        goal = SearchGoal.of(metric, metric_mode, metric_threshold, known=builder.knows)
        strategy = Strategy(search_alg, search_alg_params, scheduler, scheduler_params)
        backend = self.backend or choose_backend()
        on_ray, on_spark = backend == "ray", backend == "spark"
        workers = len(self._bundles)
        if on_ray:
            from bigdl.orca.automl.ray_search import check_resources, run_on_ray

            check_resources(self._bundles)
        elif workers > 1 and not on_spark:
            raise UsageError(
                f"workers_per_trial={workers} needs backend='ray' or 'spark'; a trial on this "
                "machine can use several threads, such as "
                f"resources_per_trial={{'cpu': {workers}}}",
                code="unsupported",
                argument="workers_per_trial",
            )
        pruner: Any = strategy.ray_scheduler(epochs) if on_ray else strategy.pruner(epochs)
        trials = n_sampling * space.grid_size
        finalists = strategy.finalists(trials)
        with ExitStack() as stack:
            stack.enter_context(
                preserve_rng_state()
            )  # trials that run in this process draw random numbers
            require("optuna", "automl")
            stack.enter_context(raise_log_level(logging.ERROR, "optuna"))
            sampler = strategy.sampler(seed, on_ray)
            read = functools.partial(
                trial_data,
                columns=(names_of(feature_cols), names_of(label_cols)),
                backend=backend,
                floats=builder.floats,
                nulls_are_missing=builder.nulls_are_missing,
                takes_categories=builder.takes_categories,
                on_close=stack.callback,
            )
            train, validation = read("data", data), None
            if validation_data is None:
                logger.warning("Without validation_data, metrics are computed on the training data")
            else:
                validation = read("validation_data", validation_data)
            job = TrialJob(builder, train, validation, goal, epochs, seed, self._bundles)
            records = TrialRecords(
                search_folder(self.logs_dir / self.name, resume),
                space,
                job,
                sampler=sampler,
                pruner=None if on_ray else pruner,
                algorithm=strategy.algorithm,
            )
            stack.callback(records.close)
            records.plan(trials, is_random=strategy.is_random)

            def run_waiting(stage: Strategy) -> None:
                records.watch()
                if records.waiting() and on_ray:
                    run_on_ray(records, job, stage, concurrency, self.remote_dir)
                elif records.waiting() and on_spark:
                    run_on_spark(records, job, concurrency)
                elif records.waiting():
                    run_locally(records, job, concurrency)

            run_waiting(strategy)
            records.plan_finalists(finalists)
            run_waiting(Strategy())
            check_any_finished(records)
        with preserve_start_method():  # tensorboardX creates a multiprocessing queue
            write_leaderboard(records, self.logs_dir / f"{self.name}_leaderboard")
        self._records = records

    # Results ------------------------------------------------------------------------------------

    def get_best_model(self) -> Any:  # the user's class
        """Return the best model, as the user's class with the weights of its best epoch.

        Returns
        -------
        torch.nn.Module, keras.Model or an estimator of xgboost
            Model in this process; a PyTorch model is in evaluation mode.

        Raises
        ------
        UsageError
            Before ``fit``, and after a search with several metrics; use :meth:`get_best_trials`.
        """
        return self.get_model(self._best().number)

    def get_best_config(self) -> dict:
        """Return the configuration of the best model; see :meth:`get_best_model`."""
        return self._fitted().config_of(self._best())

    def get_best_trials(self) -> list[dict]:
        """Return the best trial, or the Pareto-optimal trials of a search with several metrics.

        Returns
        -------
        list of dict
            ``trial`` (the trial number), ``config`` and the metrics.
        """
        records = self._fitted()
        names = records.goal.names
        best = records.ranked()[:1] if records.goal.is_single else records.front()
        return [
            {
                "trial": trial.number,
                "config": records.config_of(trial),
                **dict(zip(names, records.best_metrics(trial), strict=True)),
            }
            for trial in best
        ]

    def get_model(self, trial: int | dict) -> Any:  # the user's class
        """Return the model of a finished trial with the weights of its best epoch.

        Parameters
        ----------
        trial : int or dict
            Trial number, or an item of :meth:`get_best_trials`.

        Raises
        ------
        UsageError
            If no finished trial has this number.
        """
        records = self._fitted()
        number = trial.get("trial") if isinstance(trial, dict) else trial
        trials = [each for each in records.finished() if each.number == number]
        if not trials:
            known = sorted(each.number for each in records.finished())
            raise UsageError(
                f"There is no finished trial {trial!r}; finished trials are {known}",
                code="argument-value",
                argument="trial",
                allowed=known,
            )
        weights = records.weights_file(trials[0].number).read_bytes()
        with preserve_rng_state():  # the model draws initial weights, which are replaced
            return self.model_builder.load(records.config_of(trials[0]), weights)

    def trials(self) -> pd.DataFrame:
        """Return a table of all trials, one per row.

        Returns
        -------
        pandas.DataFrame
            Indexed by ``trial``: ``status``, the metrics of the best epoch, ``epochs``,
            ``seconds``, the drawn values as ``config/...``, and the last line of the error as
            ``failure``. The status is ``"finished"``, ``"stopped early"``, ``"failed"``, or
            ``"lost"`` if the trial was interrupted or killed and another trial repeats it.
        """
        return self._fitted().table()

    def report(self, path: str | Path | None = None) -> Page:
        """Report the best trial, charts, the duration of each trial, and all trials.

        Parameters
        ----------
        path : str or Path, optional
            HTML file to write the report to. It needs no other file.

        Returns
        -------
        bigdl.common.pages.Page
            Page that a notebook displays.

        Raises
        ------
        UsageError
            If :meth:`fit` was not called, or the file cannot be written.
        """
        page = report_page(self._fitted())
        if path is not None:
            page.write(path)
        return page

    def plot_history(self, path: str | Path) -> None:
        """Draw each trial's metric per epoch.

        Parameters
        ----------
        path : str or Path
            Output file. ``.html`` and ``.svg`` need no library, ``.png`` and others need
            matplotlib.
        """
        draw_history(self._fitted(), Path(path))

    def plot_parallel_coordinates(self, path: str | Path) -> None:
        """Draw each trial as a line through its parameter values and metrics.

        Parameters
        ----------
        path : str or Path
            See :meth:`plot_history`.
        """
        draw_parallel_coordinates(self._fitted(), Path(path))

    def _fitted(self) -> TrialRecords:
        if self._records is None:
            raise UsageError("You must call fit() before reading results", code="not-fitted")
        return self._records

    def _best(self) -> FrozenTrial:
        records = self._fitted()
        if not records.goal.is_single:
            raise UsageError(
                "A search with several metrics has several best models; choose one of "
                "get_best_trials() and call get_model(trial)",
                code="argument-missing",
                argument="trial",
            )
        return records.ranked()[0]
