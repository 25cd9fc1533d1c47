"""Keras Estimators: distributed training, evaluation and prediction."""

from __future__ import annotations

import functools
import numbers
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.common.trust import digest_of
from bigdl.orca.cluster.ray import is_alone
from bigdl.orca.data.file import open_file_system
from bigdl.orca.inference.shipping import ModelBytes, ShippedModel, ship_model
from bigdl.orca.learn.arguments import (
    append_weight_col,
    check_config,
    check_counts,
    check_loss_weight,
    resolve_legacy_kwargs,
    warn_once,
)
from bigdl.orca.learn.backends import BACKENDS, LayerArguments, resolve_backend
from bigdl.orca.learn.estimator import EstimatorOptions, PredictionRequest
from bigdl.orca.learn.prediction.classes import Scores
from bigdl.orca.learn.prediction.sample import Sample
from bigdl.orca.learn.prediction.typed import typed_predict
from bigdl.orca.learn.tf2.model_files import KerasFiles
from bigdl.orca.learn.tf2.parts import KerasParts, KerasSnapshot, keras_scores
from bigdl.orca.parameter_layer.fit.metrics import PHASES
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.shards.texts import with_texts
from bigdl.training.checkpoint import Checkpoint, CheckpointDirectory
from bigdl.training.embedding_tables.keras_model import whole_tables
from bigdl.training.fit import FitCall
from bigdl.training.keras.backends import Packed, backend_of_program
from bigdl.training.keras.callbacks import as_callbacks
from bigdl.training.keras.data import KerasEvaluationSettings
from bigdl.training.keras.loop import KerasEvaluateProgram, KerasFitProgram, KerasFitSettings
from bigdl.training.keras.state import dump_weights
from bigdl.training.metrics import EvaluationMetrics
from bigdl.training.position import EveryEpoch, Position, StoppingCriterion, Trigger
from bigdl.training.progress import progress_form

if TYPE_CHECKING:
    import keras

    from bigdl.runtime.shards.feed import Feed

__all__ = ["Estimator", "KerasEstimator"]


_LAYER_METRICS = (*PHASES, "step_s", "sync_s", "bytes_per_step")


@hide_frames
class Estimator:
    """Factory of Keras Estimators, see :meth:`from_keras`.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from bigdl.orca.learn.tf2 import Estimator
    >>> def model_creator(config):
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    ...     model.compile(keras.optimizers.SGD(config["lr"]), "mse")
    ...     return model
    >>> estimator = Estimator.from_keras(
    ...     model_creator=model_creator, config={"lr": 0.5}, backend="local"
    ... )
    >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    >>> history = estimator.fit((x, 2 * x), epochs=20, batch_size=64, verbose=0)
    >>> estimator.predict(np.ones((1, 1), dtype="float32")).round(1)
    array([[2.]], dtype=float32)
    """

    @staticmethod
    def from_keras(
        *,
        model_creator: Callable | None = None,
        config: dict | None = None,
        verbose: bool = False,
        workers_per_node: int = 1,
        compile_args_creator: Callable | None = None,
        backend: str | None = None,
        cpu_binding: bool = False,
        log_to_driver: bool = True,
        model_dir: str | None = None,
        keras_model: keras.Model | None = None,
        model: keras.Model | None = None,
        custom_objects: dict | None = None,
        num_to_keep: int = 2,
        loss_weight: Callable | str | None = None,
        **old: object,
    ) -> KerasEstimator:
        """Create an Estimator that trains a Keras model on a cluster (API of BigDL 2.x).

        The workers use the same Keras backend as the driver: TensorFlow, torch or JAX.

        Parameters
        ----------
        model_creator : callable, optional
            ``model_creator(config)`` returns a compiled ``keras.Model``, or an uncompiled one if
            `compile_args_creator` is passed. None requires a later call of
            :meth:`KerasEstimator.load`.
        config : dict, optional
            Passed to every creator. ``intra_op_parallelism`` (default: the worker's threads) and
            ``inter_op_parallelism`` (default 2) are TensorFlow options. ``dtype`` ("float32" or
            "float64"), ``shuffle`` (default True) and ``drop_last`` (default False) apply to the
            input. ``batch_size`` raises an error.
        verbose : bool
            Accepted for compatibility and ignored; use ``verbose`` of ``fit``.
        workers_per_node : int
            Number of workers per node; each uses its share of the node's cores as threads.
        compile_args_creator : callable, optional
            ``compile_args_creator(config)`` returns the arguments of ``model.compile`` as a dict.
        backend : str, optional
            ``"spark"``: workers are the tasks of a Spark barrier stage. ``"ray"`` (also ``"tf2"``):
            workers are Ray actors, which stay alive between calls. ``"horovod"``: gradients are
            all-reduced by Horovod. ``"bigdl"``: synchronous SGD with ordinary Spark jobs
            (:mod:`bigdl.orca.parameter_layer`), for the optimizers SGD, Adam, AdamW, Adagrad and
            RMSprop. ``"local"``: processes on this machine, without Spark or Ray, for inputs that
            need neither. All backends give the same results. Default: Ray if
            ``init_orca_context(runtime="ray")`` has started it, else Spark.
        cpu_binding : bool
            Accepted for compatibility and ignored: workers are not bound to cores.
        log_to_driver : bool
            Whether to show the output of workers.
        model_dir : str, optional
            Path or fsspec URL of a folder for checkpoints, on storage that the driver and all
            workers share.
        keras_model, model : keras.Model, optional
            A compiled model instead of `model_creator`. It is copied and never modified.
        custom_objects : dict, optional
            Further classes and functions by the names that the configurations of the model's layers
            use. Those that the model consists of are shipped automatically.
        num_to_keep : int
            Number of latest checkpoints to keep in `model_dir`.
        loss_weight : callable or str, optional
            Divisor of the loss, if it cannot be detected: a function ``loss_weight(x, y)`` that
            returns the divisor of the loss of these rows, ``"rows"`` for the number of rows, or
            ``"sum"`` for a loss that is a sum. Default: Keras losses are known, with their
            `reduction` and ``ignore_class``. For other losses and models with masks, the losses of
            the first batches are compared with those of their parts; a warning is logged if the
            loss is neither a mean nor a sum over rows.

        Returns
        -------
        KerasEstimator

        Raises
        ------
        UsageError
            If an argument is invalid.
        """
        resolve_legacy_kwargs(Estimator.from_keras, old)
        chosen = BACKENDS.get(backend or "")
        if chosen is not None and not chosen.trains_jax and backend_of_program() == "jax":
            raise UsageError(
                f"backend={backend!r} does not train Keras models on JAX; use backend='spark' or "
                "'ray', which give the same updates",
                code="unsupported",
            )
        if backend is None:
            backend = "ray" if is_alone() else "spark"
        backend = resolve_backend(backend, {"tf2": "ray"})
        options = EstimatorOptions(backend, workers_per_node, log_to_driver, model_dir, num_to_keep)
        if cpu_binding and backend == "spark":
            raise UsageError(
                "cpu_binding should not be True when using spark backend",
                code="argument-conflict",
                argument="cpu_binding",
            )
        if backend == "horovod" and model_creator is not None and compile_args_creator is None:
            raise UsageError(
                "compile_args_creator should not be None, when backend is set to horovod",
                code="argument-missing",
                argument="compile_args_creator",
            )
        instances = [each for each in (model, keras_model) if each is not None]
        if len(instances) + (model_creator is not None) > 1:
            raise UsageError(
                "Pass only one of model_creator, model and keras_model",
                code="argument-conflict",
                argument="model_creator",
            )
        if cpu_binding:
            warn_once("from_keras(cpu_binding=True) has no effect: workers are not bound to cores")
        require("torch", "orca")
        require("keras", "tf")
        parts = KerasParts(model_creator, compile_args_creator, check_config(config))
        parts.check()
        if instances:
            parts = parts.with_instance(instances[0], custom_objects)
        check_loss_weight(loss_weight, "(x, y)", "these rows")
        return KerasEstimator(parts, options, loss_weight)

    @staticmethod
    def latest_checkpoint(checkpoint_dir: str) -> str:
        """Return the latest complete checkpoint in a ``model_dir``, or the latest Keras file.

        Returns
        -------
        str
            A folder for :meth:`KerasEstimator.load_checkpoint` and ``fit(resume=)``, or a file that
            a ModelCheckpoint wrote.

        Raises
        ------
        UsageError
            If there is no checkpoint.
        """
        run = CheckpointDirectory.latest_run(checkpoint_dir)
        if run is not None:
            return f"{run.url}/{run.newest()}"
        fs, root = open_file_system(os.fspath(checkpoint_dir))
        files = [
            (str(info.get("mtime", info.get("LastModified", ""))), info["name"])
            for info in (fs.ls(root, detail=True) if fs.exists(root) else ())
            if info["type"] == "file" and info["name"].endswith((".keras", ".h5"))
        ]
        if not files:
            raise UsageError(
                f"There is no checkpoint in {checkpoint_dir!r}; pass a model_dir",
                code="checkpoint-missing",
                path=checkpoint_dir,
            )
        newest = max(files)[1]
        return fs.unstrip_protocol(newest) if "://" in checkpoint_dir else newest


@hide_frames
class KerasEstimator(KerasFiles):
    """Estimator of a Keras model, created by :meth:`Estimator.from_keras`.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from bigdl.orca.learn.tf2 import Estimator
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse", metrics=["mae"])
    >>> estimator = Estimator.from_keras(model=model, backend="local")
    >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    >>> history = estimator.fit((x, 2 * x), epochs=2, verbose=0)
    >>> len(history["loss"])  # one value per epoch
    2
    >>> sorted(estimator.evaluate((x, 2 * x), verbose=0))
    ['validation_loss', 'validation_mae']
    """

    framework = "keras"

    def __init__(
        self,
        parts: KerasParts,
        options: EstimatorOptions,
        loss_weight: Callable | str | None = None,
    ):
        super().__init__(parts, options)
        self._loss_weight = loss_weight

    def _parameter_layer(self) -> Callable[[FitCall], Checkpoint]:
        from bigdl.orca.learn.tf2.parameter_layer import run_by_parameter_layer

        return run_by_parameter_layer

    def fit(
        self,
        data: object,
        epochs: int = 1,
        batch_size: int | None = 32,
        verbose: int | str = 1,
        callbacks: Sequence[Any] | None = None,
        validation_data: object = None,
        class_weight: dict[int, float] | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        data_config: dict | None = None,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        *,
        max_failures: int | FailurePolicy | None = None,
        seed: int | None = None,
        resume: str | None = None,
        checkpoint_trigger: Trigger | str | None = None,
        weight_col: str | None = None,
        profile: bool = False,
        transport: str | None = None,
        group_size: int | None = None,
        compression: str | None = None,
        sampling: str | None = None,
        drop_stragglers: dict | None = None,
        min_workers: int | None = None,
        report: str | os.PathLike | None = None,
        **old: object,
    ) -> dict:
        """Train the model; a further call continues the training.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, arrays, pandas DataFrame, tf.data.Dataset, \
function or DataLoader; with Ray also RayXShards or a ray.data.Dataset
            A str (or a list) is the path of Parquet files or of a Delta Lake or Iceberg table,
            which the workers read directly; ``"table@v5"`` selects version 5 of a table. Arrays are
            ``(x, y)`` or ``{"x": ..., "y": ...}``, and so are the shards of XShards unless they are
            pandas DataFrames; ``y`` may be a dict by the names of the model's outputs. A function
            ``creator(config, batch_size)`` returns a ``tf.data.Dataset`` in batches of that
            (global) size, or a torch DataLoader; see :mod:`bigdl.training.keras.data` for how a
            dataset is divided among workers.
        epochs : int
            Number of the last epoch, as in Keras: ``epochs - initial_epoch`` epochs are trained.
        batch_size : int
            Number of rows per global batch, over all workers. A creator function may allow None.
        verbose : int
            0 shows no progress, 2 shows a line per epoch. 1 and ``"auto"`` show a progress bar in a
            terminal or notebook, and lines elsewhere.
        callbacks : list of keras.callbacks.Callback, optional
            Every worker gets a copy. Callbacks that write files write them on the first worker's
            machine.
        validation_data : optional
            Data to evaluate after every epoch, of the same type and with the same columns as
            `data`.
        class_weight : dict of int to float, optional
            Weight of each class in the loss.
        initial_epoch : int
            Number of the first epoch, for callbacks.
        steps_per_epoch : int, optional
            Number of batches per epoch; the next epoch continues after them. Default all rows.
        validation_steps : int, optional
            Number of batches per worker and validation; default all.
        validation_freq : int or list of int
            Number of epochs between validations, or the list of epochs (from 1) to validate after.
        data_config : dict, optional
            Added to the ``config`` of data creator functions, which also contains ``rank`` and
            ``size``.
        feature_cols, label_cols : str or list of str
            Columns of the model's inputs and targets. A functional model with a dict input gets
            them by name, other models in this order.
        max_failures : int or FailurePolicy
            Maximum number of retries from the latest checkpoint after failures; default 3, or 5
            within 120 seconds with ``backend="bigdl"``.
        seed : int, optional
            Seed of weights, shuffling and dropout, also for later fits. Default: random.
        resume : str, optional
            ``"auto"`` resumes from the latest checkpoint in `model_dir`, or starts a new run
            without one, so that a killed program can simply run again. A path resumes from that
            checkpoint. `epochs` then counts from the start of the run.
        checkpoint_trigger : Trigger or str, optional
            When to write a checkpoint; default after every epoch.
        weight_col : str, optional
            Column of row weights (``sample_weight`` of Keras).
        profile : bool
            Whether to add ``profile``: per epoch, mean seconds per batch for fetching and for the
            step, and the peak memory of each worker in bytes. With ``backend="bigdl"``, also the
            phases of a step.
        transport, group_size, compression, sampling, drop_stragglers, min_workers
            Options of the parameter layer, for ``backend="bigdl"``; see
            :meth:`bigdl.orca.learn.pytorch.PyTorchEstimator.fit`.
        report : str or os.PathLike, optional
            HTML file or fsspec URL to write a report of this fit to, see :meth:`report`. It is
            written again after each epoch, and a browser reloads it while the fit runs.
        **old
            Keywords of earlier releases.

        Returns
        -------
        dict
            Per metric, a list with one value per epoch, merged over all workers: ``loss``, the
            compiled metrics, and with validation ``val_loss`` etc. Also ``epochs``, ``steps`` and
            ``verbose``. `drop_stragglers` adds ``dropped_contributions``, ``dropped_rows`` and
            ``discarded_steps``.

        Raises
        ------
        UsageError
            If an argument or the data is invalid.
        WorkerError
            If the model or another creator raised an error in a worker.
        WorkerLost
            If workers were lost more often than `max_failures` allows.
        """
        resolve_legacy_kwargs(self.fit, old)
        keywords = LayerArguments(
            transport, group_size, compression, sampling, drop_stragglers, min_workers
        )
        layer = self._backend.layer_options(self._options.backend, keywords)
        self._parts.require_model()
        callbacks = as_callbacks(callbacks)
        trigger = Trigger.convert_trigger(checkpoint_trigger or EveryEpoch())
        first = check_positive("initial_epoch", initial_epoch, minimum=0)
        count = check_positive("epochs", epochs) - first
        if count < 1:
            raise UsageError(
                f"epochs should be more than initial_epoch={first}, got {epochs}",
                code="argument-value",
                argument="epochs",
            )
        check_counts(0, seed=seed)
        check_counts(steps_per_epoch=steps_per_epoch, validation_steps=validation_steps)
        engine = self._engine()
        config = self._data_config(data_config)
        label_cols = append_weight_col(label_cols, weight_col)
        feed, columns = self._training_feed(data, validation_data, feature_cols, label_cols, config)
        batch_size = _check_batch_size(batch_size, columns)
        settings = KerasFitSettings(
            stop_at=StoppingCriterion(epochs=count),
            batch_size=batch_size,
            feature_cols=columns.feature_cols,
            label_cols=columns.label_cols,
            num_steps=validation_steps,
            weighted=weight_col is not None,
            inputs=self._inputs(),
            initial_epoch=first,
            steps_per_epoch=steps_per_epoch,
            validation_freq=_check_frequency(validation_freq),
            class_weight=_check_class_weight(class_weight),
            shuffle=bool(config.get("shuffle", True)),
            drop_last=bool(config.get("drop_last", False)),
            checkpoint_trigger=trigger,
            parameter_layer=layer,
            verbose=verbose,
            loss_weight=self._loss_weight,
        )
        packed = Packed.of(self._parts, callbacks)
        history = self._training.fit(
            engine,
            feed,
            functools.partial(KerasFitProgram, packed, config, self._sync),
            settings,
            seed=seed,
            resume=resume,
            policy=self._backend.failure_policy(max_failures),
            progress=progress_form(verbose),
            journal=self._journal(data, validation_data, engine, report),
        )
        return _history(history, {"verbose": verbose, "epochs": epochs}, profile)

    def evaluate(
        self,
        data: object,
        batch_size: int | None = 32,
        num_steps: int | None = None,
        verbose: int | str = 1,
        sample_weight: None = None,
        callbacks: Sequence[Any] | None = None,
        data_config: dict | None = None,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        *,
        max_failures: int | FailurePolicy | None = None,
        weight_col: str | None = None,
        **old: object,
    ) -> dict:
        """Return the loss and metrics, which do not depend on the number of workers.

        Parameters
        ----------
        data : see fit
        batch_size : int
            Number of rows per batch, over all workers.
        num_steps : int, optional
            Number of batches per worker to evaluate; default all.
        verbose : int
            Accepted for compatibility and ignored.
        sample_weight : None
            Not supported; use `weight_col`.
        callbacks : list of keras.callbacks.Callback, optional
        data_config : dict, optional
        feature_cols, label_cols : str or list of str
        max_failures : int or FailurePolicy
        weight_col : str, optional
            Column of row weights.
        **old
            Keywords of earlier releases.

        Returns
        -------
        dict
            ``validation_loss``, and ``validation_<name>`` for each compiled metric, as floats. The
            names of `fit`, ``val_loss`` and ``val_<name>``, are also accepted as keys.
        """
        resolve_legacy_kwargs(self.evaluate, old)
        self._parts.require_model()
        if sample_weight is not None:
            raise UsageError(
                "sample_weight cannot be divided among the workers; put the weights in a column "
                "and "
                "pass its name as weight_col=",
                code="unsupported",
                argument="sample_weight",
            )
        check_counts(num_steps=num_steps)
        callbacks = as_callbacks(callbacks)
        config = self._data_config(data_config)
        label_cols = append_weight_col(label_cols, weight_col)
        feed = self._feed(data, feature_cols, label_cols, config)
        settings = KerasEvaluationSettings(
            _check_batch_size(batch_size, feed),
            feed.feature_cols,
            feed.label_cols,
            num_steps,
            weight_col is not None,
            inputs=self._inputs(),
        )
        packed = Packed.of(self._parts, callbacks)
        program = KerasEvaluateProgram(packed, config, self._sync, settings, self._training.seed)
        metrics = self._run_evaluation(program, feed, max_failures, verbose)
        if metrics is None:
            raise UsageError("The data to evaluate has no rows", code="data-empty")
        return EvaluationMetrics({f"validation_{name}": value for name, value in metrics.items()})

    @typed_predict
    def predict(
        self,
        data: object,
        batch_size: int | None = 32,
        verbose: int | str = 1,
        steps: int | None = None,
        callbacks: Sequence[Any] | None = None,
        data_config: dict | None = None,
        feature_cols: str | Sequence[str] | None = None,
        min_partition_num: int | None = None,
        output_cols: str | Sequence[str] | None = None,
        *,
        output: str = "raw",
        report: str | os.PathLike[str] | None = None,
    ) -> object:
        """Return `data` with lazily computed predictions, preserving all columns and the row order.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, pandas DataFrame or arrays; with Ray also \
RayXShards or a ray.data.Dataset
            For an array, tuple or dict, the result holds only the predictions.
        batch_size : int
            Number of rows per forward pass.
        verbose, steps, callbacks, data_config, min_partition_num
            Accepted for compatibility and ignored: tasks predict all rows, lazily.
        feature_cols : str or list of str
        output_cols : str or list of str, optional
            One name per model output; default one column ``prediction``, or one column per key if
            the model returns a dict.
        output : {"raw", "class", "probability"}
            ``"raw"`` (default): the model's outputs. ``"class"``: int64 classes of a classifier,
            one per row, or 0 and 1 per label for several independent labels. ``"probability"``: the
            probability of each class or label. The model must be compiled with a categorical or
            binary cross-entropy, which determines the meaning of the outputs.
        report : str or os.PathLike, optional
            HTML file or fsspec URL of a report on Spark's tasks: rows per second, durations, rows
            that were predicted again, and advice. It is written again when tasks end. See
            :meth:`prediction_report`.

        Returns
        -------
        pyspark.sql.DataFrame, or in the form of the input
            `data` with ``prediction``. The column of a Spark DataFrame has scalars if the model
            returns a scalar per row, dense vectors for one dimension (even of size 1, as for
            ``Dense(1)``), and nested arrays for more dimensions and for integers. Several outputs
            without `output_cols` become an array of vectors, or a struct if their types differ. All
            outputs keep their dtypes (float16 and bfloat16 become float32). The prediction is null
            for a row with a null in a feature.
        """
        for name, value in (("steps", steps), ("callbacks", callbacks)):
            if value:
                warn_once(f"predict({name}=) has no effect: all rows are predicted, by tasks")
        size = 32 if batch_size is None else batch_size
        request = PredictionRequest(size, feature_cols, output_cols, output=output, report=report)
        return self._predict(data, request)

    def _scores(self, output: str) -> Scores:
        return keras_scores(self.get_model(), output)

    def _check_prediction(self, request: PredictionRequest) -> None:
        self._parts.require_model()
        if request.accelerate is not None:
            raise UsageError(
                f"accelerate={request.accelerate!r} is for PyTorch models; omit it for a Keras "
                "model",
                code="unsupported",
                argument="accelerate",
            )

    def _prediction_config(self) -> dict:
        return _data_config_of(self._parts.config)

    @classmethod
    def of_packed_model(cls, data: bytes, backend: str) -> KerasEstimator:
        """Create an Estimator from the bytes that :meth:`packed_model` returned."""
        snapshot = ModelBytes(data).snapshot()
        (parts,) = snapshot.packed.unpack(snapshot.config, snapshot.threads)
        options = EstimatorOptions(resolve_backend(backend, {"tf2": "ray"}), 1, True, None, 2)
        estimator = cls(parts, options)
        manifest = Position().to_json()
        estimator._training.take(Checkpoint(manifest, {"model.pt": snapshot.weights}))
        return estimator

    def _whole(self, snapshot: Checkpoint) -> Checkpoint:
        return whole_tables(snapshot)

    def _initial_weights(self):
        model = self._parts.build_on_driver(self._training.seed)
        return dump_weights(model) if model.built else b""

    def _ship(
        self, request: PredictionRequest, rows: Sample | None, cluster: Cluster
    ) -> ShippedModel:
        weights, slices = self._prediction_weights(request.is_standalone)
        if not weights:
            raise UsageError(
                "The model has no weights yet, since its input shape is unknown; fit or load it "
                "first, or add an Input",
                code="model-unbuilt",
            )
        parts, names, threads = self._parts, request.feature_cols, cluster.threads_per_task
        self._shipped = ship_model(
            lambda: KerasSnapshot(Packed.of(parts), weights, names, parts.config, threads, slices),
            self._shipped,
            cluster.broadcaster,
            parts,
            digest_of(weights),
            repr((names, threads, slices and slices["url"])),
        )
        return self._shipped

    def _feed(self, data, feature_cols, label_cols, config, name=None):
        config = _data_config_of(config)
        return super()._feed(data, feature_cols, label_cols, config, name)

    def _data_config(self, data_config) -> dict:
        return {**self._parts.config, **check_config(data_config, "data_config")}


def _history(history: list[dict], params: dict, profile: bool) -> dict:
    """Convert per-epoch metrics to the dict of Keras's History, with the arguments of fit."""
    out: dict[str, Any] = {**params, "steps": history[-1]["steps"] if history else None}
    for entry in history:
        for name, value in entry["logs"].items():
            out.setdefault(name, []).append(value)
    if profile:
        kept = ("mean_train_epoch_s", "mean_fetch_s", "mean_fwd_s", "peak_memory_bytes")
        names = ("epoch_s", "mean_fetch_s", "mean_step_s", "peak_memory_bytes")
        out["profile"] = [
            {name: entry["profile"][key] for name, key in zip(names, kept, strict=True)}
            | {name: entry["profile"][name] for name in _LAYER_METRICS if name in entry["profile"]}
            for entry in history
        ]
    return out


def _check_batch_size(batch_size: int | None, feed: Feed) -> int | None:
    """Check and return the batch size; it may be None if the data comes from a creator function."""
    if batch_size is None and feed.kind == "DataLoader":
        return None
    return check_positive("batch_size", batch_size)


def _check_class_weight(table: object) -> dict | None:
    """Check that ``class_weight`` is None or a dict from class to number, and return it."""
    if table is None:
        return None
    if not isinstance(table, dict) or not all(isinstance(v, int | float) for v in table.values()):
        raise UsageError(
            f"class_weight should be a dict of class to weight, got {table!r}",
            code="argument-type",
            argument="class_weight",
        )
    return table


def _check_frequency(frequency: object) -> int | list[int]:
    """Check the validation frequency; return it as an int or as a sorted list of epochs."""
    if isinstance(frequency, list | tuple | set | range) and frequency:
        return sorted(check_positive("an epoch of validation_freq", each) for each in frequency)
    if isinstance(frequency, numbers.Integral):
        return check_positive("validation_freq", frequency)
    raise UsageError(
        "validation_freq should be a positive integer, or a list of epoch numbers (from 1), got "
        f"{frequency!r}",
        code="argument-value",
        argument="validation_freq",
    )


# -- inputs --------------------------------------------------------------------------------------


def _data_config_of(config: dict) -> dict:
    """Return the config for input conversion; with TensorFlow, it permits text columns."""
    return with_texts(config) if backend_of_program() == "tensorflow" else config
