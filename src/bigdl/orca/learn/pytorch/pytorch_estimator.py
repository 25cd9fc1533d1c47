"""The PyTorch Estimator: the verbs fit and evaluate."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import as_feed, kind_of
from bigdl.orca.learn.arguments import with_weight
from bigdl.orca.learn.old_keywords import take_old
from bigdl.orca.learn.pytorch.arguments import (
    check_accumulation,
    measures_of,
    shows_progress,
)
from bigdl.orca.learn.pytorch.callbacks.base import as_callbacks
from bigdl.orca.learn.pytorch.predictor import TorchPredictor
from bigdl.orca.learn.pytorch.weighted import check_weighted
from bigdl.training.failure import FailurePolicy
from bigdl.training.figures import as_returned, epoch_as_returned
from bigdl.training.trigger import EveryEpoch, Trigger

__all__ = ["PyTorchEstimator"]


class PyTorchEstimator(TorchPredictor):
    """A PyTorch model with the verbs of scikit-learn; made by :meth:`Estimator.from_torch`."""

    def __init__(
        self,
        parts,
        *,
        metrics=None,
        workers_per_node=1,
        use_tqdm=False,
        model_dir=None,
        log_to_driver=True,
        precision="fp32",
        num_to_keep=2,
        backend="spark",
    ):
        from bigdl.orca.learn.backends import sync_of
        from bigdl.orca.learn.pytorch.layer_training import TorchLayerTraining
        from bigdl.orca.learn.pytorch.training import TorchTraining

        sync = sync_of(backend)
        training = TorchLayerTraining if backend == "bigdl" else TorchTraining
        training = training(model_dir, sync, num_to_keep)
        super().__init__(parts, training, backend, workers_per_node, precision)
        # refuses now what would fail later, and gives the names
        self._metrics, self._metric_names = measures_of(metrics)
        self._use_tqdm = use_tqdm
        self._log_to_driver = log_to_driver
        self._sync = sync

    # -- fit -----------------------------------------------------------------------------------

    def fit(
        self,
        data,
        epochs: int = 1,
        max_steps: int | None = None,
        batch_size: int = 32,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        validation_data=None,
        callbacks: Sequence[Any] | None = None,
        *,
        max_failures: int | FailurePolicy | None = None,
        seed: int | None = None,
        resume: str | None = None,
        checkpoint_trigger: Trigger | str | None = None,
        end_trigger: Trigger | None = None,
        accumulate_grad_batches: int = 1,
        weight_col: str | None = None,
        transport: str | None = None,
        group_size: int | None = None,
        compression: str | None = None,
        sampling: str | None = None,
        drop_stragglers: dict | None = None,
        min_workers: int | None = None,
        **old,
    ) -> list:
        """Train the model; another call goes on where this one ended.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, arrays, pandas DataFrame or DataLoader; with \
Ray also RayXShards or a ray.data.Dataset
            A str (or a list) is the path of Parquet files, which the workers read themselves.
            Arrays are ``(x, y)`` or ``{"x": ..., "y": ...}``, and so are the shards of XShards
            unless they are pandas frames. A torch Dataset or a function
            ``creator(config, batch_size)`` stands for a DataLoader; the function is told the
            batch size of its worker. The samples are shared out among the workers; of iterable
            data every worker reads a stream of its own.
        epochs : int
        max_steps : int, optional
            Train for so many optimizer steps instead of `epochs`. The next fit starts a new epoch.
        batch_size : int
            Rows of a global batch, over all workers together.
        profile : bool
            Add ``profile``: seconds of an epoch, and mean seconds per batch of fetching, forward
            and backward.
        reduce_results : bool
            False gives, per epoch, a list of the workers' own figures.
        feature_cols, label_cols : str or list of str
            Columns of the model's inputs and targets. Of a loader whose batches are dicts,
            `label_cols` are the keys of the targets, and the others (or `feature_cols`) are given
            to the model by name: ``model(**inputs)``.
        validation_data : optional
            Evaluated after every epoch; of the same kind and columns as `data`.
        callbacks : list of Callback, optional
            Shipped to the workers; see :mod:`bigdl.orca.learn.pytorch.callbacks`.
        max_failures : int or FailurePolicy
            How many losses of workers are answered by going on from the latest checkpoint; default
            3, with ``backend="bigdl"`` 5 within 120 seconds.
        seed : int, optional
            Seed of weights, shuffling and dropout; kept for later fits. Default: random.
        resume : str, optional
            ``"auto"`` goes on from the newest checkpoint below `model_dir` (and starts afresh
            without one): a program that was killed is just run again. A path of a checkpoint goes
            on from that. `epochs` and `max_steps` then count from the start of the run, so a run
            that has ended returns its figures at once.
        checkpoint_trigger : Trigger or str, optional
            When to write a checkpoint; default after every epoch.
        end_trigger : Trigger, optional
            Stop before `epochs` or `max_steps` when it fires, such as ``MinLoss(0.1)`` or
            ``MaxScore(0.9)`` (:mod:`bigdl.training.trigger`; ``TriggerOr`` and ``TriggerAnd``
            combine them). Loss and score, which is the first metric of the validation, are looked
            at after every epoch, the number of steps after every step.
        accumulate_grad_batches : int
            Batches of one update of the weights: k of them equal one of k times as many rows.
        weight_col : str, optional
            Column of the rows' weights: the loss is a mean weighted by it, and so are loss and
            metrics of the validation. Metrics that are a function or an object of torchmetrics are
            refused then.
        transport : str, optional
            Of ``backend="bigdl"``: ``"shuffle"`` (default) makes the steps in stateless Spark tasks
            whose data all goes through Spark's shuffle, ``"barrier"`` in barrier stages whose
            workers talk to each other. Both give the same weights.
        group_size : int, optional
            Of ``backend="bigdl"``: steps of one Spark job, at most; default 10 by shuffle, 100 by
            barrier stages. The weights do not depend on it.
        compression : str, optional
            Of ``backend="bigdl"``: how gradients travel, ``"fp32"`` (default), ``"fp16"``,
            ``"bf16"`` or ``"int8"`` with error feedback. Sums are made in float32; weights travel
            in 16 bits then, and are kept in 32.
        sampling : str, optional
            Of ``backend="bigdl"``: ``"exact"`` (default) sees every row once per epoch,
            ``"window"`` draws runs of consecutive rows at random, as BigDL 2.x did.
        drop_stragglers : dict or DropStragglers, optional
            Of ``backend="bigdl"``: leave contributions out that come too late; see
            :class:`~bigdl.orca.parameter_layer.stragglers.DropStragglers` for its keys. The
            result then depends on the speed of the workers. Default: wait for everybody.
        min_workers : int, optional
            Of ``backend="bigdl"`` by shuffle: while fewer tasks than workers can run at once, cut
            the weights in fewer slices, but at least so many. The result does not depend on it.
            Of ``backend="ray"``: when nodes are lost, go on with fewer workers, but at least so
            many, from the latest checkpoint, which must be of an epoch's end (the default).
        **old
            Keywords of BigDL 2.0, such as ``info``.

        Returns
        -------
        list of dict
            Per epoch: ``epoch``, ``batch_count``, ``num_samples``, ``train_loss``,
            ``last_train_loss`` and, with validation, ``val_loss``, ``val_num_samples`` and
            ``val_<metric>`` (a tensor). With ``backend="bigdl"`` a `profile` also has the phases of
            a step, and `drop_stragglers` adds ``dropped_contributions``, ``dropped_rows`` and
            ``discarded_steps``.

        Raises
        ------
        UsageError
            For arguments or rows that cannot work.
        WorkerError
            When the model or another creator raised in a worker.
        WorkerLost
            When workers were lost more often than `max_failures` allows.
        """
        from bigdl.orca.learn.backends import is_on_ray
        from bigdl.orca.learn.layer_fit.options import layer_options
        from bigdl.orca.learn.layer_fit.training import Opening
        from bigdl.orca.learn.pytorch.fit_settings import FitSettings
        from bigdl.training.position import Goal

        take_old("fit", old, known=_FIT)
        layer = layer_options(
            self._backend,
            {
                "transport": transport,
                "group_size": group_size,
                "compression": compression,
                "sampling": sampling,
                "drop_stragglers": drop_stragglers,
                "min_workers": None if is_on_ray(self._backend) else min_workers,
            },
        )
        callbacks = as_callbacks(callbacks)
        accumulate = check_accumulation(accumulate_grad_batches, callbacks)
        trigger = Trigger.convert_trigger(checkpoint_trigger or EveryEpoch())
        end = None if end_trigger is None else Trigger.convert_trigger(end_trigger)
        self._need_model()
        self._parts.check()  # an entire module may have been loaded since
        engine = self._engine(min_workers)
        if seed is not None:
            check_positive("seed", seed, minimum=0)
        if weight_col is not None:
            label_cols = with_weight(label_cols, weight_col)
            check_weighted(self._parts.loss, self._metrics)
        feed, columns = self._training_feed(data, validation_data, feature_cols, label_cols)
        goal = Goal(epochs=check_positive("epochs", epochs))
        if max_steps is not None:
            goal = Goal(steps=check_positive("max_steps", max_steps))
        settings = FitSettings(
            goal=goal,
            batch_size=check_positive("batch_size", batch_size),
            seed=0,
            feature_cols=columns.feature_cols,
            label_cols=columns.label_cols,
            shuffle=bool(self._parts.config.get("shuffle", True)),
            drop_last=bool(self._parts.config.get("drop_last", False)),
            trigger=trigger,
            end=end,
            metrics=self._metrics,
            callbacks=callbacks,
            per_worker=not reduce_results,
            clipping=self._clipping,
            accumulate=accumulate,
            precision=self._precision,
            weighted=weight_col is not None,
            summary=self._events is not None,
        )
        figures = self._training.fit(
            Opening(engine, feed, layer),
            self._parts,
            settings,
            seed=seed,
            resume=resume,
            policy=FailurePolicy.of(max_failures, self._backend),
            show_progress=self._use_tqdm or shows_progress(callbacks),
        )
        self._write_events()
        return [epoch_as_returned(entry, reduce_results, profile) for entry in figures]

    def _training_feed(self, data, validation_data, feature_cols, label_cols):
        from bigdl.orca.data.feeds.group import FeedGroup

        feeds = {"data": self._feed(data, feature_cols, label_cols)}
        if validation_data is not None:
            if kind_of(validation_data) != kind_of(data):
                raise UsageError(
                    "validation_data should have the same type with train data, got "
                    f"{type(validation_data).__name__} and {type(data).__name__}"
                )
            feeds["validation"] = self._feed(
                validation_data, feature_cols, label_cols, name="validation_data"
            )
        return FeedGroup(feeds), feeds["data"]

    def _feed(self, data, feature_cols, label_cols, name=None):
        feed = as_feed(data, feature_cols, label_cols, self._parts.config, name=name)
        if feed.label_cols is not None and not feed.label_cols:
            raise UsageError(
                f"label_cols is required to fit or evaluate on a {feed.kind} with feature_cols; "
                "pass the names of the target columns"
            )
        return feed

    # -- evaluate ------------------------------------------------------------------------------

    def evaluate(
        self,
        data,
        batch_size: int = 32,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        callbacks: Sequence[Any] | None = None,
        *,
        max_failures: int | FailurePolicy | None = None,
        weight_col: str | None = None,
        **old,
    ) -> dict | list[dict]:
        """Loss and metrics; the same figures for any number of workers.

        Parameters
        ----------
        data : see fit
        batch_size : int
            Rows of a batch over all workers together.
        num_steps : int, optional
            Batches per worker to look at; default all.
        profile : bool
            Add ``profile``: seconds of the evaluation, and mean seconds per batch.
        reduce_results : bool
            False gives a list of the figures of every worker's own rows.
        feature_cols, label_cols : str or list of str
        callbacks : list of Callback, optional
            Their ``*_val_*`` hooks are called.
        max_failures : int or FailurePolicy
        weight_col : str, optional
            Column of the rows' weights: ``val_loss`` is a mean weighted by it, and in the metrics a
            row of weight 2 counts as two rows.
        **old
            Keywords of BigDL 2.0: ``info``, and ``validation_metrics`` instead of those of the
            Estimator.

        Returns
        -------
        dict
            ``num_samples``, ``val_loss`` (with a loss), and each metric under its name as a
            tensor. On a table without rows the figures are nan.
        """
        from bigdl.orca.learn.pytorch.evaluation import (
            EvaluateProgram,
            EvaluationSettings,
            run_evaluation,
        )

        given = take_old("evaluate", old, {"validation_metrics": "metrics"}, _EVALUATE)
        metrics, names = self._metrics, self._metric_names
        if given.get("metrics") is not None:
            metrics, names = measures_of(given["metrics"])
        callbacks = as_callbacks(callbacks)
        self._need_model()
        engine = self._engine()
        if num_steps is not None:
            check_positive("num_steps", num_steps)
        settings = EvaluationSettings(
            check_positive("batch_size", batch_size),
            metrics,
            num_steps,
            per_worker=not reduce_results,
            precision=self._precision,
            weighted=weight_col is not None,
        )
        if weight_col is not None:
            label_cols = with_weight(label_cols, weight_col)
            check_weighted(self._parts.loss, metrics)
        feed = self._feed(data, feature_cols, label_cols)
        program = EvaluateProgram(
            dataclasses.replace(self._parts, optimizer=None, scheduler_creator=None),
            settings,
            feed.feature_cols,
            feed.label_cols,
            callbacks,
            self._sync,
        )
        policy = FailurePolicy.of(max_failures, self._backend)
        weights = self._training.weights(self._parts)
        found = run_evaluation(engine.open(program, feed), weights, names, policy)
        if not reduce_results:
            return [as_returned(figures) for figures in found["workers"]]
        figures = as_returned(found["figures"])
        return {**figures, "profile": found["profile"]} if profile else figures

    # -- helpers -------------------------------------------------------------------------------

    def _engine(self, min_workers=None):
        from bigdl.orca.learn.backends import engine_of

        return engine_of(self._backend, self._workers_per_node, self._log_to_driver, min_workers)


_FIT = tuple(inspect.signature(PyTorchEstimator.fit).parameters)
_EVALUATE = tuple(inspect.signature(PyTorchEstimator.evaluate).parameters)
