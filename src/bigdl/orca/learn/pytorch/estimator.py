"""PyTorch Estimators: their factory and their public methods."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError, hide_frames
from bigdl.common.storage import write_bytes
from bigdl.common.trust import digest_of
from bigdl.orca.inference.shipping import ModelBytes, ShippedModel, ship_model
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
from bigdl.orca.learn.prediction.classes import Scores
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
    to_checkpoint,
)
from bigdl.orca.learn.pytorch.prediction import TorchSnapshot, predicting_parts, torch_scores
from bigdl.orca.learn.pytorch.sharded_fit import (
    ShardedFitProgram,
    check_shard,
    check_shard_fit,
)
from bigdl.orca.learn.pytorch.summaries import TRAIN_TAGS, EventFiles, validation_summary
from bigdl.orca.learn.pytorch.virtual import VirtualFitProgram
from bigdl.orca.learn.streaming import StreamLearner, TrainedBatch, train_stream
from bigdl.orca.parameter_layer.fit.metrics import draw_phases, phase_summaries
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.engine import Engine
from bigdl.runtime.failure import FailurePolicy
from bigdl.training.checkpoint import Checkpoint, CheckpointDirectory, find_checkpoint
from bigdl.training.embedding_tables.placement import NO_ROWS
from bigdl.training.embedding_tables.torch_model import whole
from bigdl.training.fit import FitCall
from bigdl.training.metrics import as_returned, epoch_as_returned, summaries_of
from bigdl.training.position import RECOVERIES, EveryEpoch, StoppingCriterion, Trigger
from bigdl.training.progress import progress_form, progress_level
from bigdl.training.sharded_model import check_weights, has_sliced_weights, merged
from bigdl.training.state import check_precision, dumps, isolated_rng, loads
from bigdl.training.virtual_shards import DEFAULT_SHARDS, check_virtual_shards

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from bigdl.llm.tuning import TextEstimator

_STREAM_STATE = "estimator.pt"

__all__ = ["Estimator", "PyTorchEstimator", "TrainingOperator"]

logger = logging.getLogger("bigdl.orca")

_TUNING = "bigdl.llm.tuning.estimator"
_NO_MODEL = "Must provide callable function for model_creator or load a saved model."
_INTERVALS = {None: None, "batch": "step", "epoch": "epoch", "manual": "manual"}


class TrainingOperator:
    """Default training operator of BigDL 2.0, accepted for compatibility and ignored.

    Replace a custom operator with a :class:`~bigdl.orca.learn.pytorch.callbacks.MainCallback`:
    ``forward_batch`` is now ``on_iter_forward``, ``train_batch`` is now ``on_iter_forward`` and
    ``on_iter_backward``, and ``predict_batch`` is now ``on_pred_forward``.

    Examples
    --------
    >>> from bigdl.orca.learn.pytorch import Estimator, TrainingOperator
    >>> import torch
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), training_operator_cls=TrainingOperator, backend="local"
    ... )
    """


@hide_frames
class Estimator:
    """Factory of PyTorch Estimators, see :meth:`from_torch`.

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
    ...     backend="local",  # processes on this machine; default "spark"
    ... )
    >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    >>> history = estimator.fit((x, 2 * x), epochs=50, batch_size=64, seed=1)
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
        metrics: object = None,
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
        training_operator_cls: None = None,
        initialization_hook: Callable | None = None,
        loss_weight: Callable | str | None = None,
        shard: str | None = None,
        **old,
    ) -> PyTorchEstimator:
        """Create an Estimator that trains a PyTorch model on a cluster (API of BigDL 2.x).

        Parameters
        ----------
        model : callable or torch.nn.Module
            ``model(config)`` that returns a module, or a module (a LightningModule may define its
            loss and optimizer). An instance is copied and never modified. None requires a later
            call of :meth:`PyTorchEstimator.load`.
        optimizer : callable or torch.optim.Optimizer, optional
            ``optimizer(model, config)`` that returns an optimizer, one of
            :mod:`bigdl.orca.learn.optimizers`, or an optimizer of the model instance.
        loss : torch.nn.Module or callable, optional
            A loss instance, ``loss(config)`` that returns one, or a function of (output, target). N
            workers compute the update of one process if the loss is a sum over rows, or a mean over
            rows, non-ignored labels, mask elements, class weights etc. For a loss that is not of
            ``torch.nn``, the first batches are used to detect its divisor from the autograd graph.
            A warning names a loss that has another form, e.g. one that compares rows of a batch
            with each other; see `loss_weight`. A plain module with an optimizer needs a loss.
        metrics : Metric, callable, str or list of these, optional
            Evaluation metrics, merged exactly over the workers; see
            :mod:`bigdl.orca.learn.metrics`.
        backend : str
            ``"spark"``: workers are the tasks of a Spark barrier stage and all-reduce gradients
            with ``torch.distributed``. ``"ray"`` (also ``"torch_distributed"``): the same with Ray
            actors, which stay alive between calls. ``"horovod"``: gradients are all-reduced by
            Horovod, on Ray actors if the program is connected to Ray, else on Spark tasks.
            ``"bigdl"``: weights, gradients and optimizer state are divided into slices that are
            exchanged in ordinary Spark jobs (:mod:`bigdl.orca.parameter_layer`). ``"local"``:
            processes on this machine, without Spark or Ray, for inputs that need neither.
        config : dict, optional
            Passed to every creator. The entries ``dtype`` ("float32" or "float64"), ``shuffle``
            (default True) and ``drop_last`` (default False) apply to the input. ``batch_size``
            raises an error.
        workers_per_node : int
            Number of workers per node; each uses its share of the node's cores as threads.
        scheduler_creator : callable, optional
            ``scheduler(optimizer, config)`` that returns a scheduler, or one of
            :mod:`bigdl.orca.learn.optimizers.schedule`.
        use_tqdm : bool
            Show a progress bar even without a terminal or notebook. By default, one line per epoch
            is printed there.
        model_dir : str, optional
            Path or fsspec URL of a folder for checkpoints, on storage that the driver and all
            workers share.
        sync_stats : bool
            Accepted for compatibility and ignored: statistics always cover all workers.
        log_level : int
            Level of the logger ``bigdl.orca``; ``INFO`` keeps its current level. A fit shows no
            progress if this logger or ``bigdl`` has a level above ``INFO``.
        log_to_driver : bool
            Whether to show the output of workers.
        scheduler_step_freq : str, optional
            When to step the scheduler: ``"epoch"``, ``"batch"`` (after every update) or
            ``"manual"``. Default: after updates for Orca's schedules, else once per epoch.
        precision : str
            ``"bf16"`` runs the forward passes of training, evaluation and prediction under torch's
            bfloat16 autocast; weights and gradients keep their dtype.
        num_to_keep : int
            Number of latest checkpoints to keep in `model_dir`.
        training_operator_cls : None
            Custom operators of BigDL 2.0 are not supported; see
            :class:`~bigdl.orca.learn.pytorch.callbacks.MainCallback`.
        initialization_hook : callable, optional
            Called without arguments in every worker before the model is created.
        loss_weight : callable or str, optional
            Divisor of the loss, if it cannot be detected: a function ``loss_weight(output,
            target)`` that returns the divisor of the mean over these rows, ``"rows"`` for the
            number of rows, or ``"sum"`` for a loss that is a sum over rows. Default: detect it, see
            `loss`.
        shard : {"optimizer", "full", "auto"}, optional
            Divide the model among the workers of `fit` and `evaluate`, so that it can be larger
            than the memory of one worker; see the guide "Large models". ``"full"`` divides weights,
            gradients and optimizer state, and gathers the weights of one layer at a time.
            ``"optimizer"`` does the same, but keeps the gathered weights from the forward to the
            backward pass, which sends a third less. ``"auto"`` divides only as much as the memory
            requires. The result is that of the undivided model up to rounding. Needs `model_dir`;
            not with the backends ``"bigdl"`` and ``"horovod"``, nor with a LightningModule. Default
            None: every worker has the whole model.

        Returns
        -------
        PyTorchEstimator

        Raises
        ------
        UsageError
            If an argument is invalid.
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
            shard=check_shard(shard, backend, model_dir),
        )
        parts.check()
        if log_level != logging.INFO:  # the default must not override the program's level
            logger.setLevel(log_level)
        return PyTorchEstimator(
            parts, options, metrics=metrics, use_tqdm=use_tqdm, precision=check_precision(precision)
        )

    @staticmethod
    def from_transformers(
        model_dir: str | os.PathLike,
        *,
        task: str,
        peft: object = None,
        tokenizer: object = None,
        labels: Sequence[str] | None = None,
        optimizer: Callable | None = None,
        learning_rate: float | None = None,
        gradient_checkpointing: bool = False,
        precision: str = "fp32",
        base_precision: str = "fp32",
        backend: str = "spark",
        checkpoint_dir: str | None = None,
        **options: object,
    ) -> TextEstimator:
        """Create an Estimator that fine-tunes a language model on text columns of a table.

        Parameters
        ----------
        model_dir : str or os.PathLike
            Folder with the files of a Hugging Face model, which the driver and all workers read.
        task : {"causal_lm", "classification", "embedding"}
            ``"causal_lm"``: continue texts or answer prompts. ``"classification"``: one class of a
            text. ``"embedding"``: near vectors for texts that belong together.
        peft : peft.PeftConfig, optional
            Adapter to train instead of the weights, such as ``peft.LoraConfig(r=8)``. Checkpoints
            then hold the adapter only. None trains all weights.
        tokenizer : transformers tokenizer or str, optional
            A tokenizer or its folder; default: that of `model_dir`.
        labels : list of str, optional
            Names of the classes, in their order; default: the distinct labels of the first fit.
        optimizer : callable, optional
            ``optimizer(model, config)``, whose model has the trained parameters only; default
            AdamW.
        learning_rate : float, optional
            Rate of the default optimizer; default 2e-4 with an adapter and 5e-5 without.
        gradient_checkpointing : bool
            Whether the backward pass computes activations again, to save memory.
        precision : {"fp32", "bf16"}
            ``"bf16"`` runs the passes under bfloat16 autocast. It is slower on CPUs without AMX.
        base_precision : {"fp32", "bf16"}
            Precision of the frozen weights under an adapter.
        backend : {"spark", "ray", "local", "horovod"}
            See :meth:`from_torch`.
        checkpoint_dir : str, optional
            Path or fsspec URL of a folder for checkpoints, which `from_torch` calls ``model_dir``.
        **options
            Further arguments of :meth:`from_torch`, such as ``workers_per_node``, ``metrics``,
            ``scheduler_creator`` and ``config``.

        Returns
        -------
        bigdl.llm.tuning.TextEstimator

        Raises
        ------
        UsageError
            If an argument is invalid, or the files cannot be read.

        Examples
        --------
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> from peft import LoraConfig  # doctest: +SKIP
        >>> estimator = Estimator.from_transformers(  # doctest: +SKIP
        ...     "SmolLM2-135M", task="causal_lm", peft=LoraConfig(r=8), backend="local"
        ... )
        """
        keywords = locals().copy()
        further = keywords.pop("options")
        # bigdl.llm builds on this package, so it is only imported by name, like a plug-in
        tuning = importlib.import_module(_TUNING)
        return tuning.from_transformers(**keywords, **further)

    @staticmethod
    def latest_checkpoint(checkpoint_dir: str) -> str:
        """Return the path of the newest complete checkpoint in a ``model_dir``, or ``last.ckpt``.

        Returns
        -------
        str
            A folder for :meth:`PyTorchEstimator.load_checkpoint` and ``fit(resume=)``, or a file
            for the former only.

        Raises
        ------
        UsageError
            If there is no checkpoint.

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
        >>> history = estimator.fit((x, x), epochs=2)
        >>> estimator.load_checkpoint(Estimator.latest_checkpoint("models"))
        >>> len(estimator.fit((x, x), epochs=3, resume="auto"))  # one further epoch
        3
        """
        run = CheckpointDirectory.latest_run(checkpoint_dir)
        if run is not None:
            return f"{run.url}/{run.newest()}"
        return ModelCheckpoint.get_latest_checkpoint(checkpoint_dir)


def _check_operator(operator) -> None:
    """Raise an error for a custom training operator."""
    if operator is None or operator is TrainingOperator:
        return
    name = getattr(operator, "__name__", type(operator).__name__)
    raise UsageError(
        f"training_operator_cls={name} is not supported; move its forward_batch to on_iter_forward "
        "of a MainCallback (its train_batch to on_iter_forward and on_iter_backward) and pass it "
        "as callbacks=[...] to fit and evaluate",
        code="name-dropped",
        argument="training_operator_cls",
    )


@hide_frames
class PyTorchEstimator(TrainingEstimator):
    """Estimator of a PyTorch model, created by :meth:`Estimator.from_torch`.

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
    >>> history = estimator.fit(
    ...     frame, epochs=200, batch_size=4, feature_cols=["x"], label_cols=["y"], seed=1
    ... )
    >>> history[-1]["train_loss"] < 0.1
    True
    >>> predicted = estimator.predict(frame, feature_cols=["x"])  # lazy, with all columns
    >>> [(row.y, round(row.prediction)) for row in predicted.collect()]
    [([2.0], 2), ([4.0], 4), ([6.0], 6), ([8.0], 8)]
    """

    framework = "pytorch"

    def __init__(
        self,
        parts: ModelParts,
        options: EstimatorOptions,
        *,
        metrics: object = None,
        use_tqdm: bool = False,
        precision: str = "fp32",
    ):
        super().__init__(parts, options)
        # report invalid metrics now, not in a fit
        self._metrics, self._metric_names = _named_metrics(metrics)
        self._precision, self._use_tqdm = precision, use_tqdm
        self._clipping = Clipping()
        self._events: EventFiles | None = None
        self._saved: set[str] = set()  # digests of files written by this Estimator
        self._shipped_fast: ShippedModel | None = None  # latest broadcast of an accelerated model
        self._warned: set[str] = set()  # logged warnings

    def _parameter_layer(self) -> Callable[[FitCall], Checkpoint]:
        from bigdl.orca.learn.pytorch.parameter_layer import run_by_parameter_layer

        return run_by_parameter_layer

    # -- fit -----------------------------------------------------------------------------------

    def fit(
        self,
        data: object,
        epochs: int = 1,
        max_steps: int | None = None,
        batch_size: int = 32,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        validation_data: object = None,
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
        report: str | os.PathLike | None = None,
        recovery: str | None = None,
        **old,
    ) -> list:
        """Train the model; a further call continues the training.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, arrays, pandas DataFrame or DataLoader; with \
Ray also RayXShards or a ray.data.Dataset
            A str (or a list) is the path of Parquet files or of a Delta Lake or Iceberg table,
            which the workers read directly; ``"table@v5"`` selects version 5 of a table. Arrays are
            ``(x, y)`` or ``{"x": ..., "y": ...}``, and so are the shards of XShards unless they are
            pandas DataFrames. A torch Dataset or a function ``creator(config, batch_size)`` can
            replace a DataLoader; the function gets the batch size per worker, and ``config``
            contains the worker's ``rank`` and the number of workers, ``size``. The samples are
            divided among the workers. Every worker reads iterable data; if all read the same rows,
            the rows are divided among them and a warning is logged.
        epochs : int
            Number of epochs to train.
        max_steps : int, optional
            Number of optimizer steps to train, instead of `epochs`. The next fit starts a new
            epoch.
        batch_size : int
            Number of rows per global batch, over all workers.
        profile : bool
            Whether to add ``profile``: seconds per epoch, and mean seconds per batch for fetching,
            forward and backward.
        reduce_results : bool
            If False, return a list of the workers' metrics per epoch.
        feature_cols, label_cols : str or list of str
            Columns of the model's inputs and targets. If a loader's batches are dicts, `label_cols`
            are the keys of the targets, and the other entries (or `feature_cols`) are passed to the
            model by name: ``model(**inputs)``.
        validation_data : optional
            Data to evaluate after every epoch, of the same type and with the same columns as
            `data`.
        callbacks : list of Callback, optional
            Shipped to the workers; see :mod:`bigdl.orca.learn.pytorch.callbacks`.
        max_failures : int or FailurePolicy
            Maximum number of retries from the latest checkpoint after failed attempts; default 3,
            or 5 within 120 seconds with ``backend="bigdl"``.
        seed : int, optional
            Seed of weights, shuffling and dropout, also for later fits. Default: random.
        resume : str, optional
            ``"auto"`` resumes from the latest checkpoint in `model_dir`, or starts a new run
            without one, so that a killed program can simply run again. A path resumes from that
            checkpoint. `epochs` and `max_steps` then count from the start of the run; a finished
            run returns its metrics immediately.
        checkpoint_trigger : Trigger or str, optional
            When to write a checkpoint; default after every epoch.
        end_trigger : Trigger, optional
            Condition to stop before `epochs` or `max_steps`, such as ``MinLoss(0.1)`` or
            ``MaxScore(0.9)`` (:mod:`bigdl.training.position`; combine them with ``TriggerOr`` and
            ``TriggerAnd``). Loss and score (the first validation metric) are checked after every
            epoch, the number of steps after every step.
        accumulate_grad_batches : int
            Number of batches per update; k batches equal one batch with k times as many rows.
        local_steps : int
            Number of steps that every worker makes with local gradients before weights and
            optimizer state are averaged over all workers (local SGD). This divides the
            communication by `local_steps`, but the result depends on the number of workers. Weights
            are always averaged at the end of an epoch; checkpoints within an epoch are only written
            after an average. Default 1: gradients are all-reduced in every step, so that the
            workers together equal one process.
        weight_col : str, optional
            Column of row weights for the loss and for the validation loss and metrics. Functions
            and torchmetrics objects do not support it and raise an error.
        exact : str, optional
            ``"bits"``: the weights have the same bits for any number of workers, any partitions of
            `data` and the backends ``"spark"``, ``"ray"`` and ``"local"``, on CPUs with the same
            instruction set and PyTorch version. The contents of the rows divide them into
            `virtual_shards`. Each worker computes its shards' parts of a batch one after another,
            with one thread and with separate dropout and batch normalization; all sums have a fixed
            order. The order of the rows in `data` has no effect. Use it to reproduce a run on other
            machines, or to distinguish a change of the program from rounding. Default None: equal
            results up to rounding.
        virtual_shards : int
            For ``exact="bits"``: number of virtual shards, a power of two that is at least the
            number of workers, which must be a power of two, too. The bits depend on it. More shards
            allow more workers; with fewer than about 64 rows per batch and shard the fit is slower.
        transport : str, optional
            For ``backend="bigdl"``: ``"shuffle"`` (default) runs the steps in stateless Spark tasks
            that exchange all data through Spark's shuffle; ``"barrier"`` runs them in barrier
            stages whose workers communicate directly. Both give the same weights.
        group_size : int, optional
            For ``backend="bigdl"``: maximum number of steps per Spark job; default 10 with shuffle,
            100 with barrier stages. It does not affect the weights.
        compression : str, optional
            For ``backend="bigdl"``: format of sent gradients, ``"fp32"`` (default), ``"fp16"``,
            ``"bf16"`` or ``"int8"`` with error feedback. Sums are computed in float32. With
            compression, weights are sent in 16 bits but kept in 32 bits.
        sampling : str, optional
            For ``backend="bigdl"``: ``"exact"`` (default) uses every row once per epoch;
            ``"window"`` draws random runs of consecutive rows, as BigDL 2.x did.
        drop_stragglers : dict or DropStragglers, optional
            For ``backend="bigdl"``: drop late contributions; see
            :class:`~bigdl.orca.parameter_layer.stragglers.DropStragglers` for the keys. The result
            then depends on the speed of the workers. Default: wait for all workers.
        min_workers : int, optional
            For ``backend="bigdl"`` with shuffle: minimum number of slices to divide the weights
            into while fewer tasks than workers can run concurrently; it does not affect the result.
            For ``backend="ray"``: minimum number of workers to continue with, from the latest
            checkpoint, after a loss of nodes. The checkpoint must be from the end of an epoch (the
            default).
        report : str or os.PathLike, optional
            HTML file or fsspec URL to write a report of this fit to, see :meth:`report`. It is
            written again after each epoch, and a browser reloads it while the fit runs.
        recovery : str, optional
            What happens after the loss of a worker. ``"in_place"``: a new process takes its rank
            and gets its state from the other workers, which keep their processes, models and rows
            and repeat at most one step. ``"restart"``: all workers start again from the latest
            checkpoint. The weights equal those of an undisturbed fit in both cases. Default: in
            place where it is supported, see the guide "Lost workers"; an explicit ``"in_place"``
            raises an error elsewhere.
        **old
            Keywords of BigDL 2.0, such as ``info``.

        Returns
        -------
        list of dict
            Per epoch: ``epoch``, ``batch_count``, ``num_samples``, ``train_loss``,
            ``last_train_loss`` and, with validation, ``val_loss``, ``val_num_samples`` and
            ``val_<metric>``. With ``backend="bigdl"``, `profile` also has the phases of
            a step, and `drop_stragglers` adds ``dropped_contributions``, ``dropped_rows`` and
            ``discarded_steps``.

        Raises
        ------
        UsageError
            If an argument or the data is invalid.
        WorkerError
            If the model or another creator raised an error in a worker.
        WorkerLost
            If workers were lost more often than `max_failures` allows.

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
        >>> history = estimator.fit(
        ...     (x, x), epochs=50, validation_data=(x, x), end_trigger=MinLoss(0.01), seed=1
        ... )
        >>> len(history) < 50, history[-1]["train_loss"] < 0.01, history[-1]["num_samples"]
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
        self._require_model()
        self._parts.check()  # an entire module may have been loaded
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
            recovery=self._recovery(recovery, engine),
        )
        program = VirtualFitProgram if shards else FitProgram
        if self._parts.shard is not None:
            check_shard_fit(local, recovery, shards)
            program = ShardedFitProgram
        history = self._training.fit(
            engine,
            feed,
            lambda settings: program(self._parts, settings, self._sync),
            settings,
            seed=seed,
            resume=resume,
            policy=self._backend.failure_policy(max_failures),
            progress=self._progress_form(callbacks),
            journal=self._journal(data, validation_data, engine, report),
        )
        if self._events is not None:
            train, validation = self.get_train_summary(), self.get_validation_summary()
            self._events.write(cast("dict", train), cast("dict", validation))
        return [epoch_as_returned(entry, reduce_results, profile) for entry in history]

    def fit_stream(
        self,
        data: DataFrame,
        checkpoint_dir: str | os.PathLike,
        *,
        batch_size: int = 32,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        epochs: int = 1,
        transform: Callable[[pa.Table], object] | None = None,
        evaluate: bool = True,
        seed: int | None = None,
        order_by: Sequence[str] | None = None,
        trigger_s: float | None = None,
        available_now: bool = False,
        on_commit: Callable[[TrainedBatch], object] | None = None,
        keep: int = 2,
    ) -> StreamingQuery:
        """Train on a stream continuously, with each row exactly once, also after restarts.

        Each micro-batch is collected to the driver and trained by :meth:`fit`, on any backend. The
        state of the Estimator is then written to `checkpoint_dir`. If the program is killed, the
        same call in a new program continues: a row is neither lost nor used twice.

        Parameters
        ----------
        data : pyspark.sql.DataFrame
            Streaming DataFrame, for example of :func:`bigdl.orca.data.kafka.read_kafka` or of a
            folder with arriving files.
        checkpoint_dir : str or path-like
            Local folder for the state of the query and the model.
        batch_size, feature_cols, label_cols, epochs, seed
            See :meth:`fit`.
        transform : callable, optional
            Maps the rows of a micro-batch, an Arrow table, to data for :meth:`fit`. Default: a
            pandas DataFrame.
        evaluate : bool, default True
            Whether to evaluate each micro-batch before it is trained on (prequential metrics).
        order_by, trigger_s, available_now, on_commit, keep
            See :func:`bigdl.orca.learn.streaming.train_stream`.

        Returns
        -------
        pyspark.sql.streaming.StreamingQuery
            Running query; ``awaitTermination()`` waits for it, ``stop()`` ends it.

        Raises
        ------
        UsageError
            If `data` is not a stream, or the folder cannot be used.
        """
        self._require_model()
        columns = {"feature_cols": feature_cols, "label_cols": label_cols}
        options = {"epochs": epochs, "batch_size": batch_size, "seed": seed, **columns}
        learner = _EstimatorLearner(self, options, transform, evaluate)
        return train_stream(
            data,
            learner,
            checkpoint_dir,
            order_by=order_by,
            trigger_s=trigger_s,
            available_now=available_now,
            on_commit=on_commit,
            keep=keep,
        )

    def _check_exact(
        self,
        exact: str | None,
        count: int,
        engine: Engine,
        accumulate: int,
        local: int,
        min_workers: int | None,
    ) -> int:
        """Check a fit's ``exact=`` argument; return the number of virtual shards (0: unused)."""
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
        if conflict := next((name for name, is_set in conflicts.items() if is_set), None):
            raise UsageError(
                f'exact="bits" is not supported with {conflict}; remove one of them',
                code="argument-conflict",
                argument="exact",
            )
        return count

    def _recovery(self, recovery: str | None, engine: Engine) -> str:
        """Check a fit's ``recovery=`` argument and return the setting of the workers."""
        can_replace = engine.can_replace and not self._backend.has_parameter_layer
        if recovery is None:
            return "auto" if can_replace else "restart"
        if recovery not in RECOVERIES:
            raise UsageError(
                f'recovery should be "in_place" or "restart", got {recovery!r}',
                code="argument-value",
                argument="recovery",
                allowed=list(RECOVERIES),
            )
        if recovery == "in_place" and not can_replace:
            raise UsageError(
                'recovery="in_place" is not supported with '
                f"backend={self._options.backend!r}, whose lost workers restart the fit from the "
                "latest checkpoint; remove recovery",
                code="argument-conflict",
                argument="recovery",
            )
        return recovery

    def _progress_form(self, callbacks: Sequence[Any]) -> str:
        """Return the format of the progress display on the driver, such as ``"bar"``."""
        if self._use_tqdm or any(isinstance(c, TqdmCallback) for c in callbacks):
            return "bar"
        return progress_form("auto" if progress_level() <= logging.INFO else 0)

    # -- evaluate ------------------------------------------------------------------------------

    def evaluate(
        self,
        data: object,
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
        """Return the loss and metrics, which do not depend on the number of workers.

        Parameters
        ----------
        data : see fit
        batch_size : int
            Number of rows per batch, over all workers.
        num_steps : int, optional
            Number of batches per worker to evaluate; default all.
        profile : bool
            Whether to add ``profile``: seconds of the evaluation, and mean seconds per batch.
        reduce_results : bool
            If False, return a list with the metrics of every worker's rows.
        feature_cols, label_cols : str or list of str
        callbacks : list of Callback, optional
            Their ``*_val_*`` hooks are called.
        max_failures : int or FailurePolicy
        weight_col : str, optional
            Column of row weights: ``val_loss`` is a weighted mean, and in the metrics a row of
            weight 2 counts as two rows.
        **old
            Keywords of BigDL 2.0: ``info``, and ``validation_metrics``, which overrides the
            Estimator's metrics.

        Returns
        -------
        dict
            ``num_samples``, ``val_loss`` (if there is a loss), and each metric under its name and
            under its name in ``fit`` (``val_accuracy``). Values are floats, or tensors for curves.
            They are nan if there are no rows.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> estimator = Estimator.from_torch(
        ...     model=torch.nn.Identity(), loss=torch.nn.MSELoss(), metrics=["mae"], backend="local"
        ... )
        >>> x = np.array([[1.0], [3.0]], dtype="float32")
        >>> metrics = estimator.evaluate((x, np.zeros_like(x)))
        >>> metrics["num_samples"], float(metrics["val_loss"]), float(metrics["MAE"])
        (2, 5.0, 2.0)
        """
        old_options = resolve_legacy_kwargs(self.evaluate, old, {"validation_metrics": "metrics"})
        metrics, names = self._metrics, self._metric_names
        if old_options.get("metrics") is not None:
            metrics, names = _named_metrics(old_options["metrics"])
        callbacks = as_callbacks(callbacks)
        self._require_model()
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
            empty = {"num_samples": 0, "val_loss": None, **dict.fromkeys(names)}
            evaluation = {"metrics": empty, "profile": {}, "workers": [empty], "profiles": [{}]}

        if evaluation.get("warning"):
            logger.warning(evaluation["warning"])
        self._warn_once(evaluation.get("unused"))

        def returned(values: dict, times: dict) -> dict:
            return as_returned({**values, "profile": times} if profile else values)

        if not reduce_results:
            return list(map(returned, evaluation["workers"], evaluation["profiles"]))
        return returned(evaluation["metrics"], evaluation["profile"])

    # -- predict -----------------------------------------------------------------------------

    @typed_predict
    def predict(
        self,
        data: object,
        batch_size: int = 32,
        feature_cols: str | Sequence[str] | None = None,
        output_cols: str | Sequence[str] | None = None,
        profile: bool = False,
        callbacks: Sequence[Any] | None = None,
        *,
        accelerate: str | os.PathLike | None = None,
        output: str = "raw",
        report: str | os.PathLike[str] | None = None,
    ) -> object:
        """Return `data` with lazily computed predictions, preserving all columns and the row order.

        Prediction uses the Estimator's precision, and the GPUs of a machine if it has any. Every
        output keeps its dtype, whatever the input type: an int64 id stays exact. float16 and
        bfloat16 become float32, also with ``precision="bf16"``, and complex numbers raise an error.
        With `accelerate`, the model runs in another runtime on the CPU.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, pandas DataFrame or arrays; with Ray also \
RayXShards or a ray.data.Dataset
            Arrays are an ndarray, or a tuple or dict of these; a str is a path of Parquet files.
            For a dict, array or tuple, the result holds only the predictions.
        batch_size : int
            Number of rows per forward pass.
        feature_cols : str or list of str
        output_cols : str or list of str, optional
            One name per model output; default one column ``prediction``, or one column per key if
            the model returns a dict.
        profile : bool
            Accepted for compatibility and ignored: prediction is lazy.
        callbacks : MainCallback, optional
            Callback whose ``on_pred_forward`` computes the outputs; no other hooks are called.
        accelerate : str, optional
            A Nano acceleration method, e.g. ``"openvino_int8"``; ``"auto"`` for the fastest method
            whose outputs differ from the model's by at most 5 % (relative Euclidean error); or a
            directory that ``InferenceOptimizer.save`` wrote. The model is converted, calibrated and
            compared once, on the driver, with up to 256 rows of the first partitions; the original
            is not modified. The tasks need the packages of the method, and for ``inductor_*`` the
            same CPU type as the driver. A further call with the same model and input types reuses
            the conversion.
        output : {"raw", "class", "probability"}
            ``"raw"`` (default): the model's outputs, such as logits. ``"class"``: int64 classes of
            a classifier, one per row, or 0 and 1 per label for several independent labels.
            ``"probability"``: the probability of each class or label. The loss determines whether
            the outputs are logits, log-probabilities or probabilities. Supported losses are
            ``CrossEntropyLoss``, ``NLLLoss``, ``BCEWithLogitsLoss``, ``BCELoss``, their functions
            in ``torch.nn.functional``, and the loss of a Hugging Face model.
        report : str or os.PathLike, optional
            HTML file or fsspec URL of a report on Spark's tasks: rows per second, durations, rows
            that were predicted again, and advice. It is written again when tasks end. See
            :meth:`prediction_report`.

        Returns
        -------
        pyspark.sql.DataFrame
            `data` with the column ``prediction``. It has scalars if there is one number per row
            (trailing dimensions of size 1 are dropped), dense vectors for several floats, arrays
            for several integers or booleans, and nested arrays for more dimensions. Several outputs
            without `output_cols` become an array, or a struct (``_1``, ``_2``, ...) if floats and
            integers are mixed. The prediction is null for a row with a null in a feature, including
            nulls inside arrays.
        """
        return self._predict(
            data,
            PredictionRequest(
                batch_size,
                feature_cols,
                output_cols,
                accelerate,
                callbacks,
                output=output,
                report=report,
            ),
        )

    def _scores(self, output: str) -> Scores:
        return torch_scores(self._parts, output)

    @classmethod
    def of_packed_model(cls, data: bytes, backend: str) -> PyTorchEstimator:
        """Create an Estimator from the bytes that :meth:`packed_model` returned."""
        snapshot = ModelBytes(data).snapshot()
        if not isinstance(snapshot, TorchSnapshot):
            raise UsageError(
                "A model that was saved with accelerate= cannot be loaded as an Estimator; use "
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
        self._require_model()
        if not request.callbacks:
            return
        if not all(isinstance(each, MainCallback) for each in _as_list(request.callbacks)):
            raise UsageError(
                "predict only calls on_pred_forward of a MainCallback, no other callbacks; return "
                "the "
                "outputs from it or from the model's forward",
                code="argument-conflict",
                argument="callbacks",
            )
        if request.accelerate is not None:
            raise UsageError(
                f"accelerate={request.accelerate!r} is not supported with a custom "
                "on_pred_forward, "
                "which calls the original model; remove one of them",
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
        if parts.is_instance:  # with a creator, only the tasks know the model
            self._warn_once(unused_hooks(parts.model, "predict"))
        weights, slices = self._prediction_weights(is_fast or request.is_standalone)
        columns = tuple(request.feature_cols)
        url = "" if slices is None else slices["url"]
        source = "\0".join((url, *columns)).encode()
        sc, origin = cluster.broadcaster, (parts, digest_of(weights + source))

        snapshot = functools.partial(
            TorchSnapshot.of, parts, weights, self._precision, slices, columns
        )
        if is_fast and rows is not None:
            from bigdl.orca.learn.pytorch.accelerated import Acceleration

            fast = Acceleration(
                request.accelerate, rows, request.batch_size, cluster.threads_per_task
            )
            self._shipped_fast = ship_model(
                lambda: fast.of(snapshot()), self._shipped_fast, sc, *origin, *fast.origin
            )
            return self._shipped_fast
        self._shipped = ship_model(snapshot, self._shipped, sc, *origin)
        return self._shipped

    def _warn_once(self, sentence: str | None) -> None:
        """Log a warning once per Estimator; do nothing if `sentence` is None."""
        if sentence is not None and sentence not in self._warned:
            self._warned.add(sentence)
            logger.warning(sentence)

    # -- the model and its files -------------------------------------------------------------

    def get_model(self) -> torch.nn.Module:
        """Return a copy of the trained model on the driver.

        Returns
        -------
        torch.nn.Module
        """
        self._require_model()
        with isolated_rng(0):
            model = self._trained_parts.build_model()
        load_into(model, self._weights())
        return model

    def get_state_dict(self) -> dict:
        """Return a dict with the epoch and lists of model, optimizer and scheduler states."""
        snapshot = self._training.snapshot
        return full_state(self.get_model(), None if snapshot is None else self._whole(snapshot))

    def load_state_dict(self, state_dict: dict, blocking: bool = True) -> None:
        """Load the result of :meth:`get_state_dict`, or the state dict of a module.

        Parameters
        ----------
        state_dict : dict
        blocking : bool
            Accepted for compatibility and ignored.
        """
        if not isinstance(state_dict, dict):
            raise UsageError(
                f"state_dict should be a dict as get_state_dict returns, got "
                f"{type(state_dict).__name__}",
                code="argument-type",
                argument="state_dict",
            )
        self._require_model()
        self._restore(to_checkpoint(state_dict), self._parts, "weights in state_dict")

    def save(self, path: str | None = None, entire: bool = False, **old) -> str:
        """Write the model to a file.

        Parameters
        ----------
        path : str
            Local path or fsspec URL of the file.
        entire : bool
            Whether to pickle the entire module instead of its state dict.

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
        """Load a file that :meth:`save` or :meth:`save_checkpoint` wrote, or a checkpoint folder.

        Parameters
        ----------
        path : str
        trust : bool
            Confirm that the file is safe. An entire module is a pickle, which can run arbitrary
            code when it is loaded; it is only loaded if this Estimator wrote it or with
            ``trust=True``.

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
        self._restore(snapshot, parts, f"weights in {path!r}")

    def _restore(self, snapshot, parts, what):
        with isolated_rng(0):
            if has_sliced_weights(snapshot.slices):
                check_weights(parts.outline(), snapshot.slices, what)
            else:
                model = parts.build_model(None if snapshot.slices is None else NO_ROWS)
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
        """Load a file that :meth:`save_checkpoint` wrote, or a checkpoint folder."""
        self.load(resolve_path(self.load_checkpoint, old, "model_path", path))

    def load_orca_checkpoint(
        self, path: str, version: int | None = None, prefix: str | None = None
    ) -> None:
        """Load a checkpoint from a ``model_dir``.

        Parameters
        ----------
        path : str
            A ``model_dir``, or the folder of one of its runs.
        version : int, optional
            Number of optimizer steps of the checkpoint; default the latest.
        prefix : str, optional
            Accepted for compatibility and ignored: a checkpoint includes the optimizer.

        Raises
        ------
        UsageError
            If the checkpoint does not exist.
        """
        self._require_model()
        self._restore(find_checkpoint(path, version), self._parts, f"weights in {path!r}")

    def _whole(self, snapshot: Checkpoint) -> Checkpoint:
        return whole(merged(snapshot))

    @property
    def _trained_parts(self) -> ModelParts:
        """Model components, including the latest checkpoint entries of a LightningModule."""
        snapshot = self._training.snapshot
        extras = None if snapshot is None else snapshot.files.get(EXTRAS)
        return self._parts if extras is None else dataclasses.replace(self._parts, extras=extras)

    def _initial_weights(self):
        with isolated_rng(self._training.seed):
            model = self._parts.build_model()
        check_sizes(model)
        return dumps(model.state_dict())

    def _require_model(self):
        if self._parts.model is None:
            raise UsageError(_NO_MODEL, code="not-fitted")

    # -- gradients -----------------------------------------------------------------------------

    def set_constant_gradient_clipping(self, min: float, max: float) -> None:
        """Clip every element of the batch's gradient to a range, starting with the next fit."""
        low, high = check_number("min", min), check_number("max", max)
        if low > high:
            raise UsageError(
                f"min should be at most max, got min={min!r} and max={max!r}",
                code="argument-value",
                argument="min",
            )
        self._clipping = dataclasses.replace(self._clipping, minimum=low, maximum=high)

    def set_l2_norm_gradient_clipping(self, clip_norm: float) -> None:
        """Clip the L2 norm of the batch's gradient over all weights, starting with the next fit."""
        norm = check_number("clip_norm", clip_norm, above=0)
        self._clipping = dataclasses.replace(self._clipping, norm=norm)

    def clear_gradient_clipping(self) -> None:
        """Disable gradient clipping."""
        self._clipping = Clipping()

    # -- summaries -----------------------------------------------------------------------------

    def set_tensorboard(self, log_dir: str, app_name: str) -> None:
        """Record values at every step of subsequent fits, and write TensorBoard event files.

        The files are written after each fit to ``<log_dir>/<app_name>/train`` and
        ``.../validation`` if tensorboard is installed; summaries are also recorded without it.

        Parameters
        ----------
        log_dir : str
            Local path on the driver, or fsspec URL.
        app_name : str
            Name of the subfolder.
        """
        for name, value in (("log_dir", log_dir), ("app_name", app_name)):
            if not isinstance(value, str) or not value:
                raise UsageError(
                    f"{name} should be a non-empty str, got {value!r}",
                    code="argument-type",
                    argument=name,
                )
        self._events = EventFiles(f"{log_dir.rstrip('/')}/{app_name}")

    def get_train_summary(self, tag: str | None = None) -> list | dict[str, list]:
        """Return the values recorded at each step; requires :meth:`set_tensorboard` before the fit.

        Parameters
        ----------
        tag : str, optional
            ``"Loss"``, ``"LearningRate"`` or ``"Throughput"`` (samples per second). With
            ``backend="bigdl"`` also ``"Phases/compute_s"`` and other phases of the parameter layer,
            in mean seconds per step for each group of steps. None returns a dict of all tags.

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
        """Return the validation metrics of all fits.

        Parameters
        ----------
        tag : str, optional
            Name of a metric, or ``"Loss"``. None returns a dict of all metrics.

        Returns
        -------
        list of [int, float, float]
            Step, value and time (seconds since 1970).
        """
        return validation_summary(self._training.position.history, tag)

    def plot_phases(self, path: str | os.PathLike) -> None:
        """Plot the time that each group of parameter-layer steps spent per phase.

        Parameters
        ----------
        path : str or path
            File with the suffix ``.html``, ``.svg``, or a format of matplotlib, e.g. ``.png``, if
            it is installed.

        Raises
        ------
        UsageError
            If there was no fit with ``backend="bigdl"`` after :meth:`set_tensorboard`, or if the
            file cannot be written.
        """
        groups = self._recorded("phases.pt")
        if not groups:
            raise UsageError(
                "No phases were recorded; call set_tensorboard, then fit with backend='bigdl'",
                code="state",
            )
        draw_phases(groups, Path(path))

    def _recorded(self, name: str) -> list[list[float]]:
        snapshot = self._training.snapshot
        data = None if snapshot is None else snapshot.files.get(name)
        return [] if data is None else loads(data).tolist()

    # -- helpers -------------------------------------------------------------------------------

    def shutdown(self, force: bool = False) -> None:
        """Release the broadcast models and stop idle workers of the backend.

        DataFrames with predictions stay valid. Idle workers are Ray actors or local processes that
        wait for the next program.
        """
        self._shipped_fast = None
        super().shutdown()


def seed_of_update(estimator: PyTorchEstimator, seed: int) -> int:
    """Return the seed of an Estimator's next fit in a stream.

    The Estimator's random generators start again, as those of a loaded one do, whose checkpoint
    lacks them.  So a stream that was restarted trains as one that was not.

    Parameters
    ----------
    estimator : PyTorchEstimator
    seed : int
        Seed of the stream.
    """
    state = estimator.get_state_dict()
    estimator.load_state_dict(state)
    return int(seed + state["epoch"]) % (1 << 31)


class _EstimatorLearner(StreamLearner):
    """Estimator that a stream trains."""

    def __init__(
        self,
        estimator: PyTorchEstimator,
        options: dict[str, Any],
        transform: Callable[[pa.Table], object] | None,
        evaluate: bool,
    ):
        self._estimator, self._options = estimator, options
        self._transform, self._evaluate = transform, evaluate

    def update(self, rows: pa.Table) -> dict[str, float]:
        data = rows.to_pandas() if self._transform is None else self._transform(rows)
        metrics: dict[str, float] = {}
        if self._evaluate:
            names = ("batch_size", "feature_cols", "label_cols")
            before = self._estimator.evaluate(data, **{name: self._options[name] for name in names})
            metrics = _numbers_of(cast("dict[str, object]", before))
        options = dict(self._options)
        if options.get("seed") is not None:
            options["seed"] = seed_of_update(self._estimator, options["seed"])
        return metrics | _numbers_of(self._estimator.fit(data, **options)[-1])

    def save(self, folder: Path) -> None:
        self._estimator.save_checkpoint(str(folder / _STREAM_STATE))

    def load(self, folder: Path) -> None:
        self._estimator.load_checkpoint(str(folder / _STREAM_STATE))


def _numbers_of(values: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics that are numbers."""
    is_number = {name: isinstance(value, int | float) for name, value in values.items()}
    return {name: float(values[name]) for name in values if is_number[name]}  # type: ignore[arg-type]


def _as_list(values: object) -> list:
    return list(values) if isinstance(values, list | tuple) else [values]


def _named_metrics(metrics) -> tuple[list, list[str]]:
    """Return the metrics as a new list, and their names."""
    listed = _as_list([] if metrics is None else metrics)
    measures = [metric_by_name(each) if isinstance(each, str) else each for each in listed]
    return measures, list(Metric.convert_metrics_dict(measures, backend="pytorch"))


def _check_steps(batches, local_steps, callbacks) -> tuple[int, int]:
    """Check ``accumulate_grad_batches`` and ``local_steps`` and return both as integers."""
    batches = check_positive("accumulate_grad_batches", batches)
    local_steps = check_positive("local_steps", local_steps)
    if batches > 1 and local_steps > 1:
        raise UsageError(
            f"accumulate_grad_batches={batches} is not supported with local_steps={local_steps}; "
            "pass a "
            f"batch_size that is {batches} times as large instead",
            code="argument-conflict",
            argument="accumulate_grad_batches",
        )
    if any(isinstance(c, MainCallback) and c.owns_backward for c in callbacks):
        if batches > 1:
            raise UsageError(
                f"accumulate_grad_batches={batches} is not supported with a custom "
                "on_iter_backward; "
                "accumulate there, or do not override on_iter_backward",
                code="argument-conflict",
                argument="accumulate_grad_batches",
            )
        if local_steps > 1:
            raise UsageError(
                f"local_steps={local_steps} is not supported with a custom on_iter_backward; do "
                "not "
                "override on_iter_backward",
                code="argument-conflict",
                argument="local_steps",
            )
    return batches, local_steps
