"""The Keras Estimator: the verbs fit and evaluate."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.arguments import with_weight
from bigdl.orca.learn.old_keywords import take_old
from bigdl.orca.learn.tf2.arguments import (
    check_batch_size,
    check_class_weight,
    check_frequency,
    history,
)
from bigdl.orca.learn.tf2.callbacks import as_callbacks
from bigdl.orca.learn.tf2.feeds import as_keras_feed, kind_of_input
from bigdl.orca.learn.tf2.fit_settings import EvaluationSettings, KerasFitSettings
from bigdl.orca.learn.tf2.predictor import KerasPredictor
from bigdl.training.failure import FailurePolicy
from bigdl.training.progress import is_interactive
from bigdl.training.trigger import EveryEpoch, Trigger

__all__ = ["KerasEstimator"]


class KerasEstimator(KerasPredictor):
    """A Keras model with the verbs of scikit-learn; made by :meth:`Estimator.from_keras`."""

    def __init__(
        self,
        parts,
        *,
        workers_per_node=1,
        log_to_driver=True,
        model_dir=None,
        num_to_keep=2,
        backend="spark",
    ):
        from bigdl.orca.learn.backends import sync_of
        from bigdl.orca.learn.tf2.layer_training import KerasLayerTraining
        from bigdl.orca.learn.tf2.training import KerasTraining

        self._sync = sync_of(backend)
        training = KerasLayerTraining if backend == "bigdl" else KerasTraining
        training = training(model_dir, self._sync, num_to_keep)
        super().__init__(parts, training, backend, workers_per_node)
        self._log_to_driver = log_to_driver

    # -- fit -----------------------------------------------------------------------------------

    def fit(
        self,
        data,
        epochs: int = 1,
        batch_size: int | None = 32,
        verbose: int | str = 1,
        callbacks: Sequence[Any] | None = None,
        validation_data=None,
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
        **old,
    ) -> dict:
        """Train the model; another call goes on where this one ended.

        Parameters
        ----------
        data : Spark DataFrame, SparkXShards, str, arrays, pandas DataFrame, tf.data.Dataset, \
function or DataLoader; with Ray also RayXShards or a ray.data.Dataset
            A str (or a list) is the path of Parquet files, which the workers read themselves.
            Arrays are ``(x, y)`` or ``{"x": ..., "y": ...}``, and so are the shards of XShards
            unless they are pandas frames. A function ``creator(config, batch_size)`` returns a
            ``tf.data.Dataset`` in batches of that (global) size or a torch DataLoader; see
            :mod:`bigdl.orca.learn.tf2.datasets` for how workers share a dataset out.
        epochs : int
            The number of the last epoch, as Keras counts: so many less `initial_epoch` are made.
        batch_size : int
            Rows of a global batch, over all workers together. None is possible for a function that
            does not need it.
        verbose : int
            0 shows no progress bar.
        callbacks : list of keras.callbacks.Callback, optional
            Every worker has a copy of its own. Those that write files do so on the first worker's
            machine.
        validation_data : optional
            Evaluated after every epoch; of the same kind and columns as `data`.
        class_weight : dict of int to float, optional
        initial_epoch : int
            Number of the first epoch, for callbacks.
        steps_per_epoch : int, optional
            Batches of an epoch, which go on where those of the last epoch ended; default all rows.
        validation_steps : int, optional
            Batches of every worker that a validation looks at; default all.
        validation_freq : int or list of int
            Validate after every so many epochs, or after those epochs (from 1).
        data_config : dict, optional
            Added to the ``config`` that functions given as data get, beside ``rank`` and ``size``.
        feature_cols, label_cols : str or list of str
            Columns of the model's inputs and targets. A functional model whose input is a dict
            gets them by name, others in this order.
        max_failures : int or FailurePolicy
            How many losses of workers are answered by going on from the latest checkpoint; default
            3, with ``backend="bigdl"`` 5 within 120 seconds.
        seed : int, optional
            Seed of weights, shuffling and dropout; kept for later fits. Default: random.
        resume : str, optional
            ``"auto"`` goes on from the newest checkpoint below `model_dir` (and starts afresh
            without one): a program that was killed is just run again. A path of a checkpoint goes
            on from that. `epochs` then counts from the start of the run.
        checkpoint_trigger : Trigger or str, optional
            When to write a checkpoint; default after every epoch.
        weight_col : str, optional
            Column of the rows' weights (``sample_weight`` of Keras).
        profile : bool
            Add ``profile``: per epoch, mean seconds per batch of fetching and of the step, and
            the most memory that each worker has had, in bytes. With ``backend="bigdl"`` also the
            phases of a step.
        transport, group_size, compression, sampling, drop_stragglers, min_workers
            Of ``backend="bigdl"``: how a training goes through the parameter layer; see
            :meth:`bigdl.orca.learn.pytorch.pytorch_estimator.PyTorchEstimator.fit`.
        **old
            Keywords of earlier releases.

        Returns
        -------
        dict
            A list per figure, with an entry for each epoch, of all workers together: ``loss``, the
            compiled metrics, and with validation ``val_loss`` and so on. Also ``epochs``, ``steps``
            and ``verbose``. `drop_stragglers` adds ``dropped_contributions``, ``dropped_rows`` and
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
        from bigdl.orca.learn.layer_fit.options import layer_options
        from bigdl.orca.learn.layer_fit.training import Opening
        from bigdl.orca.learn.tf2.parts import Packed
        from bigdl.orca.learn.tf2.training import OnItsWay
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
                "min_workers": min_workers,
            },
        )
        self._parts.need()
        callbacks = as_callbacks(callbacks)
        trigger = Trigger.convert_trigger(checkpoint_trigger or EveryEpoch())
        first = check_positive("initial_epoch", initial_epoch, minimum=0)
        count = check_positive("epochs", epochs) - first
        if count < 1:
            raise UsageError(f"epochs should be more than initial_epoch={first}, got {epochs}")
        if seed is not None:
            check_positive("seed", seed, minimum=0)
        for name, value in (
            ("steps_per_epoch", steps_per_epoch),
            ("validation_steps", validation_steps),
        ):
            if value is not None:
                check_positive(name, value)
        engine = self._engine()
        config = self._data_config(data_config)
        label_cols = with_weight(label_cols, weight_col)
        feed, columns = self._training_feed(data, validation_data, feature_cols, label_cols, config)
        batch_size = check_batch_size(batch_size, columns)
        settings = KerasFitSettings(
            goal=Goal(epochs=count),
            batch_size=batch_size,
            seed=0,
            validation=EvaluationSettings(
                batch_size,
                columns.feature_cols,
                columns.label_cols,
                validation_steps,
                weight_col is not None,
            ),
            initial_epoch=first,
            steps_per_epoch=steps_per_epoch,
            validation_freq=check_frequency(validation_freq),
            class_weight=check_class_weight(class_weight),
            shuffle=bool(config.get("shuffle", True)),
            drop_last=bool(config.get("drop_last", False)),
            trigger=trigger,
            verbose=verbose,
        )
        figures = self._training.fit(
            Opening(engine, feed, layer),
            OnItsWay(Packed.of(self._parts, callbacks), config),
            settings,
            seed=seed,
            resume=resume,
            policy=FailurePolicy.of(max_failures, self._backend),
            show_progress=bool(verbose) and is_interactive(),
        )
        return history(figures, {"verbose": verbose, "epochs": epochs}, profile)

    def _training_feed(self, data, validation_data, feature_cols, label_cols, config):
        from bigdl.orca.data.feeds.group import FeedGroup

        feeds = {"data": as_keras_feed(data, feature_cols, label_cols, config)}
        if validation_data is not None:
            if kind_of_input(validation_data) != kind_of_input(data):
                raise UsageError(
                    "train data and validation data should be both XShards, DataFrames or of "
                    f"another kind, got {type(data).__name__} and {type(validation_data).__name__}"
                )
            feeds["validation"] = as_keras_feed(
                validation_data, feature_cols, label_cols, config, name="validation_data"
            )
        return FeedGroup(feeds), feeds["data"]

    # -- evaluate ------------------------------------------------------------------------------

    def evaluate(
        self,
        data,
        batch_size: int | None = 32,
        num_steps: int | None = None,
        verbose: int | str = 1,
        sample_weight=None,
        callbacks: Sequence[Any] | None = None,
        data_config: dict | None = None,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        *,
        max_failures: int | FailurePolicy | None = None,
        weight_col: str | None = None,
        **old,
    ) -> dict:
        """Loss and metrics; the same figures for any number of workers.

        Parameters
        ----------
        data : see fit
        batch_size : int
            Rows of a batch over all workers together.
        num_steps : int, optional
            Batches per worker to look at; default all.
        verbose : int
            Accepted for compatibility.
        sample_weight : None
            Of BigDL 2.x; use `weight_col`.
        callbacks : list of keras.callbacks.Callback, optional
        data_config : dict, optional
        feature_cols, label_cols : str or list of str
        max_failures : int or FailurePolicy
        weight_col : str, optional
            Column of the rows' weights.
        **old
            Keywords of earlier releases.

        Returns
        -------
        dict
            ``validation_loss``, and ``validation_<name>`` of each compiled metric.
        """
        from bigdl.orca.learn.tf2.evaluation import EvaluateProgram, run_evaluation
        from bigdl.orca.learn.tf2.parts import Packed

        take_old("evaluate", old, known=_EVALUATE)
        self._parts.need()
        if sample_weight is not None:
            raise UsageError(
                "sample_weight cannot be shared out among the workers; put the weights in a column "
                "and name it by weight_col="
            )
        if num_steps is not None:
            check_positive("num_steps", num_steps)
        callbacks = as_callbacks(callbacks)
        engine = self._engine()
        config = self._data_config(data_config)
        label_cols = with_weight(label_cols, weight_col)
        feed = as_keras_feed(data, feature_cols, label_cols, config)
        settings = EvaluationSettings(
            check_batch_size(batch_size, feed),
            feed.feature_cols,
            feed.label_cols,
            num_steps,
            weight_col is not None,
        )
        packed = Packed.of(self._parts, callbacks)
        program = EvaluateProgram(packed, config, settings, self._training.seed, self._sync)
        weights = self._training.weights(self._parts)
        found = run_evaluation(
            engine.open(program, feed), weights, FailurePolicy.of(max_failures, self._backend)
        )
        return {f"validation_{name}": value for name, value in found.items()}

    # -- helpers -------------------------------------------------------------------------------

    def _engine(self):
        from bigdl.orca.learn.backends import engine_of

        return engine_of(self._backend, self._workers_per_node, self._log_to_driver)

    def _data_config(self, data_config) -> dict:
        if data_config is not None and not isinstance(data_config, dict):
            raise UsageError(f"data_config must be a dict, got {type(data_config).__name__}")
        return {**self._parts.config, **(data_config or {})}


_FIT = tuple(inspect.signature(KerasEstimator.fit).parameters)
_EVALUATE = tuple(inspect.signature(KerasEstimator.evaluate).parameters)
