"""Estimators for PyTorch: how they are made, and their verbs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError
from bigdl.common.storage import write_bytes
from bigdl.common.trust import digest_of
from bigdl.orca.inference.shipping import ModelBytes, ShippedModel, shipped_of
from bigdl.orca.learn.arguments import (
    append_weight_col,
    check_config,
    check_counts,
    resolve_legacy_kwargs,
    resolve_path,
)
from bigdl.orca.learn.backends import LayerArguments, resolve_backend
from bigdl.orca.learn.estimator import EstimatorOptions, PredictionRequest, TrainingEstimator
from bigdl.orca.learn.metrics import Metric
from bigdl.orca.learn.metrics.metric import metric_by_name
from bigdl.orca.learn.prediction.sample import Sample
from bigdl.orca.learn.prediction.typed import typed_predict
from bigdl.orca.learn.pytorch.callbacks import MainCallback, ModelCheckpoint, TqdmCallback
from bigdl.orca.learn.pytorch.callbacks.base import as_callbacks
from bigdl.orca.learn.pytorch.evaluation import TorchEvaluateProgram, TorchEvaluationSettings
from bigdl.orca.learn.pytorch.forward import check_weighted, is_lightning
from bigdl.orca.learn.pytorch.lightning import unused_hooks
from bigdl.orca.learn.pytorch.loop import Clipping, FitProgram, FitSettings
from bigdl.orca.learn.pytorch.parts import (
    EXTRAS,
    ModelParts,
    check_sizes,
    full_state,
    load_into,
    read_model,
    snapshot_of,
)
from bigdl.orca.learn.pytorch.prediction import TorchSnapshot, predicting_parts
from bigdl.orca.learn.pytorch.summaries import TRAIN_TAGS, EventFiles, validation_summary
from bigdl.orca.learn.pytorch.virtual import VirtualFitProgram
from bigdl.orca.parameter_layer.fit.metrics import draw_phases, phase_summaries
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.engine import Engine
from bigdl.runtime.failure import FailurePolicy
from bigdl.training.checkpoint import Checkpoint, CheckpointDirectory, find_checkpoint
from bigdl.training.embedding_tables.placement import NO_ROWS
from bigdl.training.embedding_tables.torch_model import whole
from bigdl.training.fit import FitCall
from bigdl.training.metrics import as_returned, epoch_as_returned, summaries_of
from bigdl.training.position import EveryEpoch, StoppingCriterion, Trigger
from bigdl.training.progress import progress_form
from bigdl.training.state import check_precision, dumps, isolated_rng, loads
from bigdl.training.virtual_shards import DEFAULT_SHARDS, check_virtual_shards

__all__ = ["Estimator", "PyTorchEstimator", "TrainingOperator"]

logger = logging.getLogger("bigdl.orca")

_NO_MODEL = "Must provide callable function for model_creator or load a saved model."
_INTERVALS = {None: None, "batch": "step", "epoch": "epoch", "manual": "manual"}


class TrainingOperator:
    """The training step of BigDL 2.0; accepted as it is.

    A step of one's own is a :class:`~bigdl.orca.learn.pytorch.callbacks.MainCallback`:
    ``forward_batch`` became ``on_iter_forward``, ``train_batch`` that and ``on_iter_backward``, and
    ``predict_batch`` became ``on_pred_forward``.

    Examples
    --------
    >>> from bigdl.orca.learn.pytorch import Estimator, TrainingOperator
    >>> import torch
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), training_operator_cls=TrainingOperator, backend="local"
    ... )
    """


class Estimator:
    """Makes Estimators; see :meth:`from_torch`.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1),
    ...     optimizer=SGD(learningrate=0.5),
    ...     loss=torch.nn.MSELoss(),
    ...     metrics=["mae"],
    ...     backend="local",  # on this machine; the default is "spark"
    ... )
    >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    >>> figures = estimator.fit((x, 2 * x), epochs=50, batch_size=64, seed=1)
    >>> round(estimator.evaluate((x, 2 * x))["num_samples"])
    64
    >>> estimator.predict(np.ones((1, 1), dtype="float32")).round(2)
    array([2.], dtype=float32)
    """

    @staticmethod
    def from_torch(
        *,
        model: torch.nn.Module | Callable | None = None,
        optimizer: torch.optim.Optimizer | Callable | None = None,
        loss: Callable | None = None,
        metrics: Any = None,
        backend: str = "spark",
        config: dict | None = None,
        workers_per_node: int = 1,
        scheduler_creator: Callable | None = None,
        use_tqdm: bool = False,
        model_dir: str | None = None,
        sync_stats: bool = False,
        log_level: int = logging.INFO,
        log_to_driver: bool = True,
        scheduler_step_freq: str | None = None,
        precision: str = "fp32",
        num_to_keep: int = 2,
        training_operator_cls: Any = None,
        initialization_hook: Callable | None = None,
        loss_weight: Callable | str | None = None,
        **old,
    ) -> PyTorchEstimator:
        """An Estimator that trains a PyTorch model on a cluster (API of BigDL 2.x).

        Parameters
        ----------
        model : callable or torch.nn.Module
            ``model(config)`` returning a module, or a module (a LightningModule brings its own
            loss and optimizer). An instance is copied, never changed. May be None when
            :meth:`PyTorchEstimator.load` follows.
        optimizer : callable or torch.optim.Optimizer, optional
            ``optimizer(model, config)``, one of :mod:`bigdl.orca.learn.optimizers`, or an optimizer
            of the model instance.
        loss : torch.nn.Module or callable, optional
            A loss instance, ``loss(config)``, or a function of (output, target). N workers make
            the update of one process if it is a sum over the rows, or a mean over the rows, the
            labels that are not ignored, the places of a mask, weights of classes, ...: a loss that
            is not of ``torch.nn`` is looked at with the first batches, and what it is divided by is
            read off its graph. One warning names a loss that is none of these, such as one that
            compares the rows of a batch with each other; see `loss_weight`. A module that comes
            with an optimizer needs a loss.
        metrics : Metric, callable, str or list of these, optional
            See :mod:`bigdl.orca.learn.metrics`; merged exactly over the workers.
        backend : str
            ``"spark"``: workers are the tasks of one Spark barrier stage, gradients meet by
            ``torch.distributed``. ``"ray"`` (also ``"torch_distributed"``): the same by actors of
            Ray, which live from one call to the next. ``"horovod"``: gradients meet by Horovod, on
            the actors of the Ray that the program is connected to, else on Spark's tasks.
            ``"bigdl"``: weights, gradients and the optimizer's state are cut in slices that meet in
            ordinary Spark jobs (:mod:`bigdl.orca.parameter_layer`). ``"local"``: processes of this
            machine, without Spark or Ray, for inputs that need neither.
        config : dict, optional
            Passed to every creator. ``dtype`` ("float32", "float64"), ``shuffle`` (True) and
            ``drop_last`` (False) apply to the input; ``batch_size`` is refused.
        workers_per_node : int
            Workers on every node; each gets its share of the node's cores as threads.
        scheduler_creator : callable, optional
            ``scheduler(optimizer, config)``; also one of
            :mod:`bigdl.orca.learn.optimizers.schedule`.
        use_tqdm : bool
            Show a progress bar even where nobody seems to watch (no terminal, no notebook), where
            else a line per epoch is shown.
        model_dir : str, optional
            Folder for checkpoints that the driver and all workers share; a path or fsspec URL.
        sync_stats : bool
            Accepted for compatibility: statistics are always those of all workers.
        log_level : int
            Level to set for the logger ``bigdl.orca``; ``INFO`` leaves it as it is. A fit
            shows no progress where this logger or ``bigdl`` has been given a level above ``INFO``.
        log_to_driver : bool
            Show what workers print.
        scheduler_step_freq : str, optional
            ``"epoch"``, ``"batch"`` (after every update) or ``"manual"``. Default: after updates
            for Orca's own schedules, else once per epoch.
        precision : str
            ``"bf16"`` computes the forward passes of training, evaluation and prediction in
            bfloat16 where torch's autocast does; weights and gradients stay as they are.
        num_to_keep : int
            How many of the newest checkpoints stay in `model_dir`.
        training_operator_cls : None
            Of BigDL 2.0; see :class:`~bigdl.orca.learn.pytorch.callbacks.MainCallback`.
        initialization_hook : callable, optional
            Called without arguments in every worker before the model is made.
        loss_weight : callable or str, optional
            What a part of a batch weighs in the loss, where that cannot be seen from the loss: a
            function ``loss_weight(output, target)`` that returns what the mean of these rows is
            divided by, ``"rows"`` for the number of rows, or ``"sum"`` for a loss that adds up over
            the rows. Default: the loss is looked at, see `loss`.

        Returns
        -------
        PyTorchEstimator

        Raises
        ------
        UsageError
            For an argument that cannot work.
        """
        resolve_legacy_kwargs(Estimator.from_torch, old)
        backend = resolve_backend(backend, {"torch_distributed": "ray"})
        _check_operator(training_operator_cls)
        if scheduler_step_freq not in _INTERVALS:
            raise UsageError(
                'scheduler_step_freq should be "batch", "epoch" or "manual", got '
                f"{scheduler_step_freq!r}",
                code="argument-value",
                argument="scheduler_step_freq",
                allowed=["batch", "epoch", "manual"],
            )
        if initialization_hook is not None and not callable(initialization_hook):
            raise UsageError(
                "initialization_hook must be a function without arguments",
                code="argument-type",
                argument="initialization_hook",
            )
        options = EstimatorOptions(backend, workers_per_node, log_to_driver, model_dir, num_to_keep)
        parts = ModelParts(
            model,
            optimizer,
            loss,
            scheduler_creator,
            check_config(config),
            _INTERVALS[scheduler_step_freq],
            initialization_hook,
            loss_weight=loss_weight,
        )
        parts.check()
        if log_level != logging.INFO:  # the default must not undo what the program has set
            logger.setLevel(log_level)
        return PyTorchEstimator(
            parts, options, metrics=metrics, use_tqdm=use_tqdm, precision=check_precision(precision)
        )

    @staticmethod
    def latest_checkpoint(checkpoint_dir: str) -> str:
        """The newest complete checkpoint below a ``model_dir``, or the file ``last.ckpt`` there.

        Returns
        -------
        str
            A folder that :meth:`PyTorchEstimator.load_checkpoint` and ``fit(resume=)`` take, or a
            file for the former.

        Raises
        ------
        UsageError
            If there is none.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.orca.learn.optimizers import SGD
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> estimator = Estimator.from_torch(
        ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
        ...     backend="local", model_dir="models",
        ... )
        >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
        >>> figures = estimator.fit((x, x), epochs=2)
        >>> estimator.load_checkpoint(Estimator.latest_checkpoint("models"))
        >>> len(estimator.fit((x, x), epochs=3, resume="auto"))  # one more
        3
        """
        run = CheckpointDirectory.latest_run(checkpoint_dir)
        if run is not None:
            return f"{run.url}/{run.newest()}"
        return ModelCheckpoint.get_latest_checkpoint(checkpoint_dir)


def _check_operator(operator) -> None:
    """Refuse an operator that does something of its own."""
    if operator is None or operator is TrainingOperator:
        return
    name = getattr(operator, "__name__", type(operator).__name__)
    raise UsageError(
        f"training_operator_cls={name} cannot be used; make its forward_batch the on_iter_forward "
        "of a MainCallback (its train_batch that and on_iter_backward) and pass it as callbacks=["
        "...] to fit and evaluate",
        code="name-dropped",
        argument="training_operator_cls",
    )


class PyTorchEstimator(TrainingEstimator):
    """A PyTorch model with the verbs of scikit-learn; made by :meth:`Estimator.from_torch`.

    Parameters
    ----------
    parts : ModelParts
    options : EstimatorOptions
    metrics, use_tqdm, precision
        See :meth:`Estimator.from_torch`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [([1.0], [2.0]), ([2.0], [4.0]), ([3.0], [6.0]), ([4.0], [8.0])]
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["x", "y"])
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.05), loss=torch.nn.MSELoss()
    ... )
    >>> figures = estimator.fit(
    ...     frame, epochs=200, batch_size=4, feature_cols=["x"], label_cols=["y"], seed=1
    ... )
    >>> figures[-1]["train_loss"] < 0.1
    True
    >>> predicted = estimator.predict(frame, feature_cols=["x"])  # lazily, with all columns
    >>> [(row.y, round(row.prediction)) for row in predicted.collect()]
    [([2.0], 2), ([4.0], 4), ([6.0], 6), ([8.0], 8)]
    """

    framework = "pytorch"

    def __init__(
        self,
        parts: ModelParts,
        options: EstimatorOptions,
        *,
        metrics: Any = None,
        use_tqdm: bool = False,
        precision: str = "fp32",
    ):
        super().__init__(parts, options)
        # refuses now what would fail later, and gives the names
        self._metrics, self._metric_names = _named_metrics(metrics)
        self._precision, self._use_tqdm = precision, use_tqdm
        self._clipping = Clipping()
        self._events: EventFiles | None = None
        self._saved: set[str] = set()  # digests of the files that this Estimator wrote
        self._shipped_fast: ShippedModel | None = None  # as _shipped, of an accelerated model
        self._said: set[str] = set()  # sentences that the user was told once

    def _parameter_layer(self) -> Callable[[FitCall], Checkpoint]:
        from bigdl.orca.learn.pytorch.parameter_layer import run_by_parameter_layer

        return run_by_parameter_layer

    # -- fit -----------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        max_steps: int | None = None,
        batch_size: int = 32,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        validation_data: Any = None,
        callbacks: Sequence[Any] | None = None,
        *,
        max_failures: int | FailurePolicy | None = None,
        seed: int | None = None,
        resume: str | None = None,
        checkpoint_trigger: Trigger | str | None = None,
        end_trigger: Trigger | None = None,
        accumulate_grad_batches: int = 1,
        local_steps: int = 1,
        weight_col: str | None = None,
        exact: str | None = None,
        virtual_shards: int = DEFAULT_SHARDS,
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
            A str (or a list) is the path of Parquet files or of a Delta Lake or Iceberg table,
            which the workers read themselves; ``"table@v5"`` names a version of it.
            Arrays are ``(x, y)`` or ``{"x": ..., "y": ...}``, and so are the shards of XShards
            unless they are pandas frames. A torch Dataset or a function
            ``creator(config, batch_size)`` stands for a DataLoader; the function gets the
            batch size of its worker, and in config its ``rank`` and the number of workers,
            ``size``. The samples are shared out among the workers. Iterable data are read by every
            worker; if all read the same rows, these are shared out, and a warning says so.
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
            How many failed attempts are followed by another from the latest checkpoint; default
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
            ``MaxScore(0.9)`` (:mod:`bigdl.training.position`; ``TriggerOr`` and ``TriggerAnd``
            combine them). Loss and score, which is the first metric of the validation, are looked
            at after every epoch, the number of steps after every step.
        accumulate_grad_batches : int
            Batches of one update of the weights: k of them equal one of k times as many rows.
        local_steps : int
            Steps that every worker makes with the gradients of its own rows before weights and the
            optimizer's state become the mean of all workers' ("local SGD"): as many times less is
            sent. It is inexact: the result depends on the number of workers. At the end of an epoch
            the mean is taken at any rate; checkpoints within one are written after a mean only.
            Default 1: gradients meet in every step, and workers together equal one process.
        weight_col : str, optional
            Column of the rows' weights: the loss is a mean weighted by it, and so are loss and
            metrics of the validation. Metrics that are a function or an object of torchmetrics are
            refused then.
        exact : str, optional
            ``"bits"``: the same bits of the weights for any number of workers, partitions of `data`
            and backends ``"spark"``, ``"ray"`` and ``"local"``, on CPUs of one instruction set with
            the same versions of PyTorch. The rows are cut into `virtual_shards` by their contents,
            and each worker computes its shards' parts of a batch one by one, with one thread, and
            dropout and batch normalization of their own; all sums have one fixed order. The order
            of the rows in `data` does not matter. Use it to reproduce a run on other machines, or
            to tell a change of the program from rounding. Default None: the same result up to
            rounding.
        virtual_shards : int
            Of ``exact="bits"``: a power of two, at least the number of workers, which is a power of
            two as well. Another number gives other bits. More shards allow more workers; with fewer
            than about 64 rows of a batch in each the fit gets slower.
        transport : str, optional
            Of ``backend="bigdl"``: ``"shuffle"`` (default) makes the steps in stateless Spark tasks
            whose data all goes through Spark's shuffle, ``"barrier"`` in barrier stages whose
            workers talk to each other. Both give the same weights.
        group_size : int, optional
            Of ``backend="bigdl"``: steps of one Spark job, at most; default 10 by shuffle, 100 by
            barrier stages. The weights do not depend on it.
        compression : str, optional
            Of ``backend="bigdl"``: how gradients are sent, ``"fp32"`` (default), ``"fp16"``,
            ``"bf16"`` or ``"int8"`` with error feedback. Sums are made in float32; weights are sent
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
            ``val_<metric>``. With ``backend="bigdl"`` a `profile` also has the phases of
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

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.orca.learn.optimizers import SGD
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> from bigdl.orca.learn.trigger import MinLoss
        >>> estimator = Estimator.from_torch(
        ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.5), loss=torch.nn.MSELoss(),
        ...     backend="local",
        ... )
        >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
        >>> figures = estimator.fit(
        ...     (x, x), epochs=50, validation_data=(x, x), end_trigger=MinLoss(0.01), seed=1
        ... )
        >>> len(figures) < 50, figures[-1]["train_loss"] < 0.01, figures[-1]["num_samples"]
        (True, True, 64)
        """
        resolve_legacy_kwargs(self.fit, old)
        keywords = LayerArguments(
            transport, group_size, compression, sampling, drop_stragglers, min_workers
        )
        layer = self._backend.layer_options(self._options.backend, keywords)
        callbacks = as_callbacks(callbacks)
        accumulate, local = _check_steps(accumulate_grad_batches, local_steps, callbacks)
        trigger = Trigger.convert_trigger(checkpoint_trigger or EveryEpoch())
        end = None if end_trigger is None else Trigger.convert_trigger(end_trigger)
        self._need_model()
        self._parts.check()  # an entire module may have been loaded since
        self._parts.check_training()
        engine = self._engine(min_workers)
        check_counts(0, seed=seed)
        if weight_col is not None:
            label_cols = append_weight_col(label_cols, weight_col)
            check_weighted(self._parts, self._metrics)
        config = self._parts.config
        shards = self._check_exact(exact, virtual_shards, engine, accumulate, local, min_workers)
        feed, columns = self._training_feed(data, validation_data, feature_cols, label_cols, config)
        stop_at = StoppingCriterion(epochs=check_positive("epochs", epochs))
        if max_steps is not None:
            stop_at = StoppingCriterion(steps=check_positive("max_steps", max_steps))
        settings = FitSettings(
            stop_at=stop_at,
            batch_size=check_positive("batch_size", batch_size),
            feature_cols=columns.feature_cols,
            label_cols=columns.label_cols,
            shuffle=bool(config.get("shuffle", True)),
            drop_last=bool(config.get("drop_last", False)),
            checkpoint_trigger=trigger,
            end_trigger=end,
            parameter_layer=layer,
            metrics=self._metrics,
            callbacks=callbacks,
            per_worker=not reduce_results,
            clipping=self._clipping,
            accumulate=accumulate,
            local_steps=local,
            virtual_shards=shards,
            precision=self._precision,
            weighted=weight_col is not None,
            inputs=self._inputs(),
            summary=self._events is not None,
        )
        program = VirtualFitProgram if shards else FitProgram
        figures = self._training.fit(
            engine,
            feed,
            lambda settings: program(self._parts, settings, self._sync),
            settings,
            seed=seed,
            resume=resume,
            policy=self._backend.failure_policy(max_failures),
            progress=self._progress_form(callbacks),
        )
        if self._events is not None:
            train, validation = self.get_train_summary(), self.get_validation_summary()
            self._events.write(cast("dict", train), cast("dict", validation))
        return [epoch_as_returned(entry, reduce_results, profile) for entry in figures]

    def _check_exact(
        self,
        exact: str | None,
        count: int,
        engine: Engine,
        accumulate: int,
        local: int,
        min_workers: int | None,
    ) -> int:
        """Return the number of virtual shards, 0 without ``exact="bits"``; refuse conflicts."""
        if exact is None:
            return 0
        if exact != "bits":
            raise UsageError(
                f'exact should be "bits" or None, got {exact!r}',
                code="argument-value",
                argument="exact",
                allowed=["bits"],
            )
        check_virtual_shards(count, engine.num_workers)
        conflicts = {
            f"accumulate_grad_batches={accumulate}": accumulate > 1,
            f"local_steps={local}": local > 1,
            f"min_workers={min_workers}": min_workers is not None,
            'config={"shuffle": False}': not self._parts.config.get("shuffle", True),
            "a LightningModule": is_lightning(self._parts.model),
            f"backend={self._options.backend!r}": self._backend.has_parameter_layer,
        }
        if conflict := next((name for name, is_there in conflicts.items() if is_there), None):
            raise UsageError(
                f'exact="bits" does not go with {conflict}; leave one of them out',
                code="argument-conflict",
                argument="exact",
            )
        return count

    def _progress_form(self, callbacks: Sequence[Any]) -> str:
        """Return the form in which the driver shows the progress of a fit."""
        if self._use_tqdm or any(isinstance(c, TqdmCallback) for c in callbacks):
            return "bar"
        level = logger.level or logging.getLogger("bigdl").level  # the root's is for log lines only
        return progress_form("auto" if level <= logging.INFO else 0)

    # -- evaluate ------------------------------------------------------------------------------

    def evaluate(
        self,
        data: Any,
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
            ``num_samples``, ``val_loss`` (with a loss), and each metric under its name, which is
            found under its name in ``fit`` (``val_accuracy``), too. Values are floats, of curves
            tensors. On a table without rows they are nan.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> estimator = Estimator.from_torch(
        ...     model=torch.nn.Identity(), loss=torch.nn.MSELoss(), metrics=["mae"], backend="local"
        ... )
        >>> x = np.array([[1.0], [3.0]], dtype="float32")
        >>> figures = estimator.evaluate((x, np.zeros_like(x)))
        >>> figures["num_samples"], float(figures["val_loss"]), float(figures["MAE"])
        (2, 5.0, 2.0)
        """
        old_options = resolve_legacy_kwargs(self.evaluate, old, {"validation_metrics": "metrics"})
        metrics, names = self._metrics, self._metric_names
        if old_options.get("metrics") is not None:
            metrics, names = _named_metrics(old_options["metrics"])
        callbacks = as_callbacks(callbacks)
        self._need_model()
        check_counts(num_steps=num_steps)
        check_positive("batch_size", batch_size)
        if weight_col is not None:
            label_cols = append_weight_col(label_cols, weight_col)
            check_weighted(self._parts, metrics)
        feed = self._feed(data, feature_cols, label_cols, self._parts.config)
        settings = TorchEvaluationSettings(
            batch_size,
            feed.feature_cols,
            feed.label_cols,
            num_steps,
            weight_col is not None,
            metrics,
            not reduce_results,
            self._precision,
            inputs=self._inputs(),
        )
        parts = dataclasses.replace(self._trained_parts, optimizer=None, scheduler_creator=None)
        program = TorchEvaluateProgram(parts, settings, callbacks, self._sync)
        evaluation = self._run_evaluation(program, feed, max_failures)
        if evaluation is None:
            nothing = {"num_samples": 0, "val_loss": None, **dict.fromkeys(names)}
            evaluation = {"metrics": nothing, "profile": {}, "workers": [nothing], "profiles": [{}]}

        if evaluation.get("warning"):
            logger.warning(evaluation["warning"])
        self._say_once(evaluation.get("unused"))

        def returned(figures: dict, times: dict) -> dict:
            return as_returned({**figures, "profile": times} if profile else figures)

        if not reduce_results:
            return list(map(returned, evaluation["workers"], evaluation["profiles"]))
        return returned(evaluation["metrics"], evaluation["profile"])

    # -- predict -----------------------------------------------------------------------------

    @typed_predict
    def predict(
        self,
        data: Any,
        batch_size: int = 32,
        feature_cols: str | Sequence[str] | None = None,
        output_cols: str | Sequence[str] | None = None,
        profile: bool = False,
        callbacks: Sequence[Any] | None = None,
        *,
        accelerate: str | os.PathLike | None = None,
    ) -> Any:
        """`data` with predictions, lazily: all its columns, rows and their order are kept.

        The precision is that of the Estimator, and a machine with GPUs computes on them. Every
        output keeps its dtype, whatever the input is: an id in int64 stays exact. float16 and
        bfloat16 become float32, so that predictions with ``precision="bf16"`` are float32, and
        complex numbers are refused. With `accelerate`, the model runs in another runtime on the
        CPU.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, pandas DataFrame or arrays; with Ray also \
RayXShards or a ray.data.Dataset
            Arrays are an ndarray, or a tuple or dict of them; a str is a path of Parquet files.
            Of one dict, array or tuple the result is the predictions alone.
        batch_size : int
            Rows of one forward pass.
        feature_cols : str or list of str
        output_cols : str or list of str, optional
            Names for the model's outputs, one each; default one column ``prediction``, and for a
            model that returns a dict one column per key.
        profile : bool
            Accepted for compatibility: nothing has run when this returns.
        callbacks : MainCallback, optional
            Its ``on_pred_forward`` makes the outputs; prediction calls no other hooks.
        accelerate : str, optional
            A method of Nano, e.g. ``"openvino_int8"``; ``"auto"`` for the fastest of several whose
            outputs differ from the model's by at most 5 % (relative, Euclidean); or a directory
            that ``InferenceOptimizer.save`` wrote. The model is converted, calibrated and compared
            once, on the driver, with up to 256 rows of the first partitions; it stays as it is.
            The tasks need the packages of the method, and for ``inductor_*`` the driver's kind of
            processor. Another call with the same model and kind of rows converts nothing.

        Returns
        -------
        pyspark.sql.DataFrame
            With ``prediction``: a number of the output's type for one per row (trailing dimensions
            of size 1 are dropped), for several a dense vector of floats or an array of whole
            numbers or booleans, nested arrays for more dimensions; several outputs without
            `output_cols` as an array of them, or as a struct (``_1``, ``_2``, …) where floats and
            whole numbers meet. A row with a null in a feature, also within an array, has null.
        """
        return self._predict(
            data, PredictionRequest(batch_size, feature_cols, output_cols, accelerate, callbacks)
        )

    @classmethod
    def of_packed_model(cls, data: bytes, backend: str) -> PyTorchEstimator:
        """Return an Estimator that predicts with what :meth:`packed_model` returned."""
        snapshot = ModelBytes(data).snapshot()
        if not isinstance(snapshot, TorchSnapshot):
            raise UsageError(
                "A model that was saved with accelerate= makes no Estimator; load it by "
                "mlflow.pyfunc.load_model",
                code="unsupported",
                argument="accelerate",
            )
        with isolated_rng(0):
            model = snapshot.load_on(torch.device("cpu")).model
        return Estimator.from_torch(
            model=model,
            config=snapshot.parts.config,
            backend=backend,
            precision=snapshot.precision,
        )

    def _check_prediction(self, request: PredictionRequest) -> None:
        self._need_model()
        if not request.callbacks:
            return
        if not all(isinstance(each, MainCallback) for each in _listed(request.callbacks)):
            raise UsageError(
                "predict calls no callbacks but the on_pred_forward of a MainCallback; let that or "
                "the model's forward return what you want",
                code="argument-conflict",
                argument="callbacks",
            )
        if request.accelerate is not None:
            raise UsageError(
                f"accelerate={request.accelerate!r} does not go with an on_pred_forward of one's "
                "own, which calls the model as it is; leave one of them out",
                code="argument-conflict",
                argument="accelerate",
            )

    def _prediction_config(self) -> dict:
        return self._parts.config

    def _ship(
        self, request: PredictionRequest, rows: Sample | None, cluster: Cluster
    ) -> ShippedModel:
        parts, is_fast = self._trained_parts, request.accelerate is not None
        if request.callbacks:
            (main,) = as_callbacks(request.callbacks)
            parts = predicting_parts(parts, cast("MainCallback", main))
        if parts.is_instance:  # a creator's model is known to the tasks
            self._say_once(unused_hooks(parts.model, "predict"))
        weights, slices = self._predicting_weights(is_fast or request.is_standalone)
        columns = tuple(request.feature_cols)
        url = "" if slices is None else slices["url"]
        told = "\0".join((url, *columns)).encode()
        sc, origin = cluster.broadcaster, (parts, digest_of(weights + told))

        snapshot = functools.partial(
            TorchSnapshot.of, parts, weights, self._precision, slices, columns
        )
        if is_fast and rows is not None:
            from bigdl.orca.learn.pytorch.accelerated import Acceleration

            fast = Acceleration(
                request.accelerate, rows, request.batch_size, cluster.threads_per_task
            )
            self._shipped_fast = shipped_of(
                lambda: fast.of(snapshot()), self._shipped_fast, sc, *origin, *fast.origin
            )
            return self._shipped_fast
        self._shipped = shipped_of(snapshot, self._shipped, sc, *origin)
        return self._shipped

    def _say_once(self, sentence: str | None) -> None:
        """Warn of something, if there is a sentence that this Estimator has not said yet."""
        if sentence is not None and sentence not in self._said:
            self._said.add(sentence)
            logger.warning(sentence)

    # -- the model and its files -------------------------------------------------------------

    def get_model(self) -> torch.nn.Module:
        """The trained model, a copy of its own on the driver.

        Returns
        -------
        torch.nn.Module
        """
        self._need_model()
        with isolated_rng(0):
            model = self._trained_parts.build_model()
        load_into(model, self._weights())
        return model

    def get_state_dict(self) -> dict:
        """``epoch`` and the states of ``models``, ``optimizers`` and ``schedulers``, as lists."""
        snapshot = self._training.snapshot
        return full_state(self.get_model(), None if snapshot is None else whole(snapshot))

    def load_state_dict(self, state_dict: dict, blocking: bool = True) -> None:
        """Take over what :meth:`get_state_dict` gave, or the state dict of a module.

        Parameters
        ----------
        state_dict : dict
        blocking : bool
            Accepted for compatibility.
        """
        if not isinstance(state_dict, dict):
            raise UsageError(
                f"state_dict should be a dict such as get_state_dict gives, got "
                f"{type(state_dict).__name__}",
                code="argument-type",
                argument="state_dict",
            )
        self._need_model()
        self._take(snapshot_of(state_dict), self._parts, "weights in state_dict")

    def save(self, path: str | None = None, entire: bool = False, **old) -> str:
        """Write the model.

        Parameters
        ----------
        path : str
            A file; a local path or fsspec URL.
        entire : bool
            Pickle the whole module instead of its state dict.

        Returns
        -------
        str
            `path`.
        """
        path = resolve_path(self.save, old, "model_path", path)
        model = self.get_model()
        try:
            data = dumps(model if entire else model.state_dict())
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"The module cannot be pickled ({error}); define its class in a module, or save "
                "its weights with entire=False",
                code="model-copy",
            ) from error
        write_bytes(path, data)
        self._saved.add(digest_of(data))
        return path

    def load(self, path: str | None = None, *, trust: bool = False, **old) -> None:
        """Read what :meth:`save` or :meth:`save_checkpoint` wrote, or a checkpoint's folder.

        Parameters
        ----------
        path : str
        trust : bool
            An entire module is a pickle, which can run any code: it is read only if this Estimator
            wrote it or with ``trust=True``.

        Raises
        ------
        UsageError
            If the file cannot be read, does not fit the model, or is not trusted.
        """

        def is_trusted(data):
            return trust or digest_of(data) in self._saved

        path = resolve_path(self.load, old, "model_path", path)
        snapshot, module = read_model(path, is_trusted)
        parts = self._parts
        if module is not None:
            parts = dataclasses.replace(parts, model=module)
        elif parts.model is None:
            raise UsageError(_NO_MODEL, code="not-fitted")
        self._take(snapshot, parts, f"weights in {path!r}")

    def _take(self, snapshot, parts, what):
        place = None if snapshot.slices is None else NO_ROWS
        with isolated_rng(0):
            model = parts.build_model(place)
        load_into(model, snapshot.files["model.pt"], what)
        self._parts = parts
        self._training.take(snapshot)

    def save_checkpoint(self, path: str | None = None, **old) -> None:
        """Write the full state: model, optimizer, scheduler and epoch."""
        write_bytes(
            resolve_path(self.save_checkpoint, old, "model_path", path),
            dumps(self.get_state_dict()),
        )

    def load_checkpoint(self, path: str | None = None, **old) -> None:
        """Read what :meth:`save_checkpoint` wrote, or a checkpoint's folder in ``model_dir``."""
        self.load(resolve_path(self.load_checkpoint, old, "model_path", path))

    def load_orca_checkpoint(
        self, path: str, version: int | None = None, prefix: str | None = None
    ) -> None:
        """Take over a checkpoint below a ``model_dir``.

        Parameters
        ----------
        path : str
            A ``model_dir``, or the folder of one run in it.
        version : int, optional
            Optimizer steps after which it was taken; default the newest.
        prefix : str, optional
            Accepted for compatibility: a checkpoint holds the optimizer.

        Raises
        ------
        UsageError
            If there is no such checkpoint.
        """
        self._need_model()
        self._take(find_checkpoint(path, version), self._parts, f"weights in {path!r}")

    def _whole(self, snapshot: Checkpoint) -> Checkpoint:
        return whole(snapshot)

    @property
    def _trained_parts(self) -> ModelParts:
        """The parts with what a LightningModule has added to the newest state."""
        snapshot = self._training.snapshot
        extras = None if snapshot is None else snapshot.files.get(EXTRAS)
        return self._parts if extras is None else dataclasses.replace(self._parts, extras=extras)

    def _first_weights(self):
        with isolated_rng(self._training.seed):
            model = self._parts.build_model()
        check_sizes(model)
        return dumps(model.state_dict())

    def _need_model(self):
        if self._parts.model is None:
            raise UsageError(_NO_MODEL, code="not-fitted")

    # -- gradients -----------------------------------------------------------------------------

    def set_constant_gradient_clipping(self, min: float, max: float) -> None:
        """Bring every element of the batch's gradient into a range, from the next fit on."""
        low, high = check_number("min", min), check_number("max", max)
        if low > high:
            raise UsageError(
                f"min should be at most max, got min={min!r} and max={max!r}",
                code="argument-value",
                argument="min",
            )
        self._clipping = dataclasses.replace(self._clipping, minimum=low, maximum=high)

    def set_l2_norm_gradient_clipping(self, clip_norm: float) -> None:
        """Scale the batch's gradient down to an L2 norm, over all weights, from the next fit on."""
        norm = check_number("clip_norm", clip_norm, above=0)
        self._clipping = dataclasses.replace(self._clipping, norm=norm)

    def clear_gradient_clipping(self) -> None:
        """Leave gradients as they are."""
        self._clipping = Clipping()

    # -- summaries -----------------------------------------------------------------------------

    def set_tensorboard(self, log_dir: str, app_name: str) -> None:
        """Record every step of the following fits.

        Event files for TensorBoard are written after each fit to ``<log_dir>/<app_name>/train`` and
        ``.../validation`` if the package tensorboard is installed; the summaries need no package.

        Parameters
        ----------
        log_dir : str
            A local path of the driver or any fsspec URL.
        app_name : str
        """
        for name, value in (("log_dir", log_dir), ("app_name", app_name)):
            if not isinstance(value, str) or not value:
                raise UsageError(
                    f"{name} should be a text, got {value!r}", code="argument-type", argument=name
                )
        self._events = EventFiles(f"{log_dir.rstrip('/')}/{app_name}")

    def get_train_summary(self, tag: str | None = None) -> list | dict[str, list]:
        """Return the records of the steps, after :meth:`set_tensorboard`.

        Parameters
        ----------
        tag : str, optional
            ``"Loss"``, ``"LearningRate"`` or ``"Throughput"`` (samples per second). With
            ``backend="bigdl"`` also ``"Phases/compute_s"`` and other phases of the parameter layer:
            mean seconds per step, for each group of steps. None gives all of them in a dict.

        Returns
        -------
        list of [int, float, float]
            Step, value and time (seconds since 1970).
        """
        if self._events is None:
            raise UsageError(
                "Steps are not recorded; call set_tensorboard before fit", code="state"
            )
        summaries = summaries_of(self._recorded("summary.pt"), TRAIN_TAGS)
        groups = self._recorded("phases.pt")
        if groups:
            summaries |= phase_summaries(groups)
        return summaries if tag is None else summaries[check_choice("tag", tag, summaries)]

    def get_validation_summary(self, tag: str | None = None) -> list | dict[str, list]:
        """The figures of the validations of all fits.

        Parameters
        ----------
        tag : str, optional
            Name of a metric, or ``"Loss"``. None gives all of them in a dict.

        Returns
        -------
        list of [int, float, float]
            Step, value and time (seconds since 1970).
        """
        return validation_summary(self._training.position.history, tag)

    def plot_phases(self, path: str | os.PathLike) -> None:
        """Draw what the groups of the parameter layer spent their time on.

        Parameters
        ----------
        path : str or path
            ``.html`` or ``.svg``, or what matplotlib writes, e.g. ``.png``, if it is installed.

        Raises
        ------
        UsageError
            Without a fit of ``backend="bigdl"`` after :meth:`set_tensorboard`, or if the file
            cannot be written.
        """
        groups = self._recorded("phases.pt")
        if not groups:
            raise UsageError(
                "There are no phases to draw; call set_tensorboard, then fit with backend='bigdl'",
                code="state",
            )
        draw_phases(groups, Path(path))

    def _recorded(self, name: str) -> list[list[float]]:
        snapshot = self._training.snapshot
        data = None if snapshot is None else snapshot.files.get(name)
        return [] if data is None else loads(data).tolist()

    # -- helpers -------------------------------------------------------------------------------

    def shutdown(self, force: bool = False) -> None:
        """Release what prediction has broadcast; frames that were predicted stay valid.

        The workers of Ray, or of this machine, that wait for programs end, too.
        """
        self._shipped_fast = None
        super().shutdown()


def _listed(values: Any) -> list:
    return list(values) if isinstance(values, list | tuple) else [values]


def _named_metrics(metrics) -> tuple[list, list[str]]:
    """Metrics as a list of its own, and their names."""
    listed = _listed([] if metrics is None else metrics)
    measures = [metric_by_name(each) if isinstance(each, str) else each for each in listed]
    return measures, list(Metric.convert_metrics_dict(measures, backend="pytorch"))


def _check_steps(batches, local_steps, callbacks) -> tuple[int, int]:
    """``accumulate_grad_batches`` and ``local_steps``; steps of the user's own would do neither."""
    batches = check_positive("accumulate_grad_batches", batches)
    local_steps = check_positive("local_steps", local_steps)
    if batches > 1 and local_steps > 1:
        raise UsageError(
            f"accumulate_grad_batches={batches} does not go with local_steps={local_steps}; pass a "
            f"batch_size that is {batches} times as large instead",
            code="argument-conflict",
            argument="accumulate_grad_batches",
        )
    if any(isinstance(c, MainCallback) and c.owns_backward for c in callbacks):
        if batches > 1:
            raise UsageError(
                f"accumulate_grad_batches={batches} does not go with an on_iter_backward of one's "
                "own; accumulate there, or leave on_iter_backward as it is",
                code="argument-conflict",
                argument="accumulate_grad_batches",
            )
        if local_steps > 1:
            raise UsageError(
                f"local_steps={local_steps} does not go with an on_iter_backward of one's own; "
                "leave on_iter_backward as it is",
                code="argument-conflict",
                argument="local_steps",
            )
    return batches, local_steps
