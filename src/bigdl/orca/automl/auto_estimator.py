"""AutoEstimator: a search for the best configuration of a model.

An :class:`AutoEstimator` has a *builder* (:mod:`bigdl.orca.automl.trial`), which makes a
model of a configuration.  ``fit`` makes of its arguments a *job* that all trials share, and the
*records*, in which the trials are planned; those that wait are run on Ray
(:mod:`bigdl.orca.automl.ray_search`) or by processes of this machine
(:func:`bigdl.tuning.run_trials`).  All results are read from the records, so a search that went on
after an interruption knows no difference.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError, require
from bigdl.common.private_folders import private_root
from bigdl.common.program_state import preserve_rng_state, preserve_start_method
from bigdl.orca.automl.model.data import trial_data
from bigdl.orca.automl.records import TrialRecords
from bigdl.orca.automl.results import (
    draw_history,
    draw_parallel_coordinates,
    write_leaderboard,
)
from bigdl.orca.automl.search import (
    check_that_one_is_finished,
    choose_backend,
    run_locally,
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

__all__ = ["AutoEstimator"]

logger = logging.getLogger("bigdl.orca")


class AutoEstimator:
    """Tries configurations of a model and keeps the best one.

    Make it by :meth:`from_torch` or :meth:`from_keras`;
    :class:`~bigdl.orca.automl.xgboost.AutoXGBClassifier` and
    :class:`~bigdl.orca.automl.xgboost.AutoXGBRegressor` have the same ``fit``.

    Parameters
    ----------
    model_builder : Builder
    logs_dir : str, optional
        Local folder; the search is below it in ``name``. By default
        ``bigdl-<user's number>/auto_estimator_logs`` in the directory for temporary files, where
        only this user can write.
    resources_per_trial : dict, optional
        ``"cpu"`` (default 1 for each worker), ``"gpu"`` and further resources of Ray.
    name : str
    remote_dir : str, optional
        Folder, on storage that all nodes see, for the checkpoints of trials that a scheduler moves
        or sets back (PBT, HyperBand) on a Ray of several machines.
    backend : {"ray", "local"}, optional
        Default: Ray if it is there (or Spark, on whose nodes it can be started), else this machine.
    workers_per_trial : int, default 1
        Processes that train the model of a trial together, on as many nodes as it takes; on Ray,
        of models of PyTorch and Keras.  They share `resources_per_trial` evenly, and
        ``"batch_size"`` is that of all of them, so the number of workers changes no figure.

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
                "AutoEstimator is made by from_torch or from_keras, got "
                f"{type(model_builder).__name__}",
                code="argument-type",
                argument="model_builder",
            )
        check_choice("backend", backend or "local", ("ray", "local"))
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
        self.logs_dir = Path(logs_dir).expanduser().absolute()  # Ray Tune takes no other
        check_positive("workers_per_trial", workers_per_trial)
        if workers_per_trial > 1 and not model_builder.takes_workers:
            raise UsageError(
                f"workers_per_trial={workers_per_trial} is for models of PyTorch and Keras; those "
                "of XGBoost have one worker in each trial, whose threads are cpus_per_trial",
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
        loss: Any,
        logs_dir: str | None = None,
        resources_per_trial: Mapping[str, float] | None = None,
        name: str = "auto_pytorch_estimator",
        remote_dir: str | None = None,
        backend: str | None = None,
        workers_per_trial: int = 1,
    ) -> AutoEstimator:
        """Return a search for the configuration of a model of PyTorch.

        Parameters
        ----------
        model_creator : callable
            ``f(config)`` returns an ``nn.Module``.
        optimizer : str or callable
            Name of a class of ``torch.optim``, whose learning rate is ``config["lr"]`` (default
            1e-3), or ``f(model, config)``.
        loss : str, nn.Module or callable
            Name of a loss of ``torch.nn``, a loss, or ``f(config)``.
        logs_dir, resources_per_trial, name, remote_dir, backend, workers_per_trial
            See :class:`AutoEstimator`.

        Raises
        ------
        UsageError
            For names that torch has not, and for anything else than these.
        """
        from bigdl.orca.automl.model.base_pytorch_model import PytorchModelBuilder

        builder = PytorchModelBuilder(model_creator, optimizer, loss)
        place: dict[str, Any] = {"backend": backend, "workers_per_trial": workers_per_trial}
        return AutoEstimator(builder, logs_dir, resources_per_trial, remote_dir, name, **place)

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
        """Return a search for the configuration of a Keras model.

        Parameters
        ----------
        model_creator : callable
            ``f(config)`` returns a compiled model.
        logs_dir, resources_per_trial, name, remote_dir, backend, workers_per_trial
            See :class:`AutoEstimator`.
        """
        from bigdl.orca.automl.model.base_keras_model import KerasModelBuilder

        builder = KerasModelBuilder(model_creator)
        place: dict[str, Any] = {"backend": backend, "workers_per_trial": workers_per_trial}
        return AutoEstimator(builder, logs_dir, resources_per_trial, remote_dir, name, **place)

    # The search ---------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        validation_data: Any = None,
        metric: Any = None,
        metric_mode: Any = None,
        metric_threshold: float | None = None,
        n_sampling: int = 1,
        search_space: Mapping[str, Any] | None = None,
        search_alg: Any = None,
        search_alg_params: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        scheduler_params: Mapping[str, Any] | None = None,
        feature_cols: Any = None,
        label_cols: Any = None,
        *,
        concurrency: int | None = None,
        seed: int = 0,
        resume: bool | str = False,
    ) -> None:
        """Search.

        Parameters
        ----------
        data : object
            ``(x, y)`` of arrays, each an array or a list of them; a pandas or Spark DataFrame with
            `feature_cols` and `label_cols`; XShards; Parquet files; a torch DataLoader, or
            ``f(config)`` that returns one (of Keras a ``tf.data.Dataset``). Rows go to Ray's object
            store once, or to files that all processes map.
        epochs : int, default 1
            Of a trial at most.
        validation_data : object, optional
            Of the same kinds. Without it the metric is that of the training data.
        metric : str, callable, or list of them
            Name of a metric of :class:`~bigdl.orca.automl.metrics.Evaluator` or of the model, or
            ``f(y_true, y_pred)``. A trial counts by its best epoch. With several metrics the best
            trials are those that no other one beats in all (:meth:`get_best_trials`).
        metric_mode : {"min", "max"} or list of them, optional
            Required for functions and unknown names.
        metric_threshold : float, optional
            A trial that reaches it ends.
        n_sampling : int, default 1
            How many configurations are drawn; with ``hp.grid_search``, for each point of the grid.
        search_space : dict
            Values of :mod:`bigdl.orca.automl.hp` and fixed ones. ``"batch_size"`` (default 32) and
            ``"lr"`` have the meanings of their names.
        search_alg : str or object, optional
            Default: by chance. ``"optuna"`` (TPE), ``"cmaes"`` or ``"nsga2"`` of Optuna, or one of
            its samplers; on Ray also the names and searchers of ``ray.tune``.
        search_alg_params : dict, optional
            Arguments of the searcher.
        scheduler : str or object, optional
            What stops trials early: ``"AsyncHyperBand"`` (ASHA), ``"median_stopping_rule"``,
            ``"hyperband"``; on Ray also ``"pbt"`` and the other ones of ``ray.tune``.
        scheduler_params : dict, optional
            Arguments of the scheduler, such as ``grace_period``; ``max_t`` is `epochs` by default.
            ASHA by default compares trials after a ninth of `epochs` and lets one of two go on.  It
            has ``finalists``, too: so many of the trials that it has stopped, the best ones, are
            trained to their end when all others are done; default 10 % of the trials.
        feature_cols, label_cols : str or list of str, optional
            Columns of frames; the model takes an argument for each feature.
        concurrency : int, optional
            Trials at the same time; default: as many as there is room for.
        seed : int, default 0
            Of configurations drawn by chance or by Optuna, and of the random numbers of trials.
        resume : bool or "auto", default False
            Go on with the newest search below `logs_dir` that has this name; ``"auto"`` starts one
            where there is none. Finished trials are kept, the others are run.

        Raises
        ------
        UsageError
            If an argument is wrong, this object was fitted before, or all trials have failed.
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
        on_ray = (self.backend or choose_backend()) == "ray"
        workers = len(self._bundles)
        if on_ray:
            from bigdl.orca.automl.ray_search import check_room, run_on_ray

            check_room(self._bundles)
        elif workers > 1:
            raise UsageError(
                f"workers_per_trial={workers} needs backend='ray'; on this machine alone a "
                f"trial has threads, such as resources_per_trial={{'cpu': {workers}}}",
                code="unsupported",
                argument="workers_per_trial",
            )
        pruner: Any = strategy.ray_scheduler(epochs) if on_ray else strategy.pruner(epochs)
        trials = n_sampling * space.grid_size
        finalists = strategy.finalists(trials)
        with ExitStack() as stack:
            stack.enter_context(preserve_rng_state())  # trials may run in this process
            require("optuna", "automl")
            stack.enter_context(raise_log_level(logging.ERROR, "optuna"))
            sampler = strategy.sampler(seed, on_ray)
            read = functools.partial(
                trial_data,
                columns=(names_of(feature_cols), names_of(label_cols)),
                on_ray=on_ray,
                floats=builder.floats,
                nulls_are_missing=builder.nulls_are_missing,
                takes_categories=builder.takes_categories,
                on_close=stack.callback,
            )
            train, validation = read("data", data), None
            if validation_data is None:
                logger.warning("Without validation_data the metric is that of the training data")
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
            records.plan(trials, by_chance=strategy.is_random)

            def run_waiting(stage: Strategy) -> None:
                records.watch()
                if records.waiting() and on_ray:
                    run_on_ray(records, job, stage, concurrency, self.remote_dir)
                elif records.waiting():
                    run_locally(records, job, concurrency)

            run_waiting(strategy)
            records.plan_finalists(finalists)
            run_waiting(Strategy())
            check_that_one_is_finished(records)
        with preserve_start_method():  # tensorboardX makes a queue
            write_leaderboard(records, self.logs_dir / f"{self.name}_leaderboard")
        self._records = records

    # What came of it ----------------------------------------------------------------------------

    def get_best_model(self) -> Any:
        """Return the best model as the user's own class, with the weights of its best epoch.

        Returns
        -------
        torch.nn.Module, keras.Model or an estimator of xgboost
            In this process; of PyTorch in evaluation mode.

        Raises
        ------
        UsageError
            Before ``fit``, and after a search by several metrics, whose best models are those of
            :meth:`get_best_trials`.
        """
        return self.get_model(self._best().number)

    def get_best_config(self) -> dict:
        """Return the configuration of the best model; see :meth:`get_best_model`."""
        return self._fitted().config_of(self._best())

    def get_best_trials(self) -> list[dict]:
        """Return the best trial, or those that no other trial beats in all of several metrics.

        Returns
        -------
        list of dict
            ``trial`` (its number), ``config`` and the metrics.
        """
        records = self._fitted()
        names = records.goal.names
        best = records.ranked()[:1] if records.goal.is_single else records.front()
        return [
            {
                "trial": trial.number,
                "config": records.config_of(trial),
                **dict(zip(names, records.figures(trial), strict=True)),
            }
            for trial in best
        ]

    def get_model(self, trial: int | dict) -> Any:
        """Return the model of a finished trial, with the weights of its best epoch.

        Parameters
        ----------
        trial : int or dict
            Its number, or what :meth:`get_best_trials` tells of it.

        Raises
        ------
        UsageError
            If no trial that has finished has this number.
        """
        records = self._fitted()
        number = trial.get("trial") if isinstance(trial, dict) else trial
        trials = [each for each in records.finished() if each.number == number]
        if not trials:
            known = sorted(each.number for each in records.finished())
            raise UsageError(
                f"There is no finished trial {trial!r}; there are {known}",
                code="argument-value",
                argument="trial",
                allowed=known,
            )
        weights = records.weights_file(trials[0].number).read_bytes()
        with preserve_rng_state():  # its first weights are drawn, and replaced
            return self.model_builder.load(records.config_of(trials[0]), weights)

    def trials(self) -> pd.DataFrame:
        """Return all trials, one in each row.

        Returns
        -------
        pandas.DataFrame
            Indexed by ``trial``: ``status``, the metrics of its best epoch, ``epochs`` and
            ``seconds`` that it took, ``config/...`` that it has drawn, and the last line of its
            error as ``failure``. The status is ``"finished"``, ``"stopped early"``, ``"failed"``,
            or ``"lost"`` if it was interrupted or killed and another trial repeats it.
        """
        return self._fitted().table()

    def plot_history(self, path: str | Path) -> None:
        """Draw the metric of each trial after each epoch.

        Parameters
        ----------
        path : str or Path
            ``.html`` and ``.svg`` need no library, ``.png`` and others need matplotlib.
        """
        draw_history(self._fitted(), Path(path))

    def plot_parallel_coordinates(self, path: str | Path) -> None:
        """Draw each trial as a line through its values and its metrics.

        Parameters
        ----------
        path : str or Path
            See :meth:`plot_history`.
        """
        draw_parallel_coordinates(self._fitted(), Path(path))

    def _fitted(self) -> TrialRecords:
        if self._records is None:
            raise UsageError(
                "You must call fit() before asking for what came of it", code="not-fitted"
            )
        return self._records

    def _best(self) -> FrozenTrial:
        records = self._fitted()
        if not records.goal.is_single:
            raise UsageError(
                "A search by several metrics has several best models; choose one of "
                "get_best_trials() and call get_model(trial)",
                code="argument-missing",
                argument="trial",
            )
        return records.ranked()[0]
