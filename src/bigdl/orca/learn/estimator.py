"""Estimators of every framework: scikit-learn's manners on distributed data."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, UsersFrames, type_name
from bigdl.orca.data.feeds import Feed, as_feed, kind_of, names_of
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.inference.shipping import ShippedModel
from bigdl.orca.learn.backends import BACKENDS, cluster_of
from bigdl.orca.learn.prediction.inputs import (
    NOT_FITTED,
    PredictOptions,
    opened,
    predict_any,
    predict_dataframe,
)
from bigdl.orca.learn.prediction.sample import needed_sample
from bigdl.orca.learn.prediction.sql import sql_function
from bigdl.runtime.engine import Engine
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.jobs import NoRows
from bigdl.runtime.local import LocalMachine
from bigdl.runtime.shards.columns import float_dtype
from bigdl.runtime.shards.texts import takes_texts, with_texts
from bigdl.training.chart import FitChart
from bigdl.training.fit import TrainingSession


@dataclass
class EstimatorOptions:
    """Arguments of ``from_torch`` and ``from_keras`` that do not depend on the framework."""

    backend: str
    workers_per_node: int
    log_to_driver: bool
    model_dir: str | os.PathLike | None
    num_to_keep: int

    def __post_init__(self):
        check_positive("workers_per_node", self.workers_per_node)
        check_positive("num_to_keep", self.num_to_keep)
        if self.model_dir is not None:
            if not isinstance(self.model_dir, str | os.PathLike):
                raise UsageError(
                    f"model_dir should be a path or URL, got {type(self.model_dir).__name__}",
                    code="argument-type",
                    argument="model_dir",
                )
            self.model_dir = os.fspath(self.model_dir)


class TrainingEstimator(ABC):
    """An Estimator that trains: its workers, its data, and what it has trained so far.

    Parameters
    ----------
    parts : object
        What the model is made of.
    training : callable
        Class of the :class:`~bigdl.training.fit.TrainingSession` that carries the state.
    options : EstimatorOptions
    """

    def __init__(
        self, parts: Any, training: Callable[..., TrainingSession], options: EstimatorOptions
    ):
        self._parts, self._options = parts, options
        self._backend, self._sync = options.backend, BACKENDS[options.backend].sync()
        self._training = training(options.model_dir, self._sync, options.num_to_keep)
        self._shipped: ShippedModel | None = None  # what predict has broadcast last

    @property
    def num_workers(self) -> int:
        """Number of workers that train and evaluate: nodes of the cluster × workers per node."""
        return self._engine().num_workers

    def _engine(self, min_workers: int | None = None) -> Engine:
        """Return the engine whose workers train and evaluate."""
        options = self._options
        return BACKENDS[self._backend].engine(
            min_workers,
            workers_per_node=options.workers_per_node,
            log_to_driver=options.log_to_driver,
        )

    def _weights(self) -> bytes:
        """Return the model's weights; before the first fit those that it would start from."""
        snapshot = self._training.snapshot
        return self._first_weights() if snapshot is None else snapshot.files["model.pt"]

    def _predicting_weights(self, is_whole: bool) -> tuple[bytes, dict | None]:
        """Return weights for tasks, and the slices that they read rows of large tables from.

        Parameters
        ----------
        is_whole : bool
            True if the model outlives its checkpoint, so that it has to hold large tables itself.
        """
        snapshot = self._training.snapshot
        slices = None if snapshot is None else snapshot.slices
        if snapshot is None or slices is None or is_whole or not slices.stay_in_files:
            return self._weights(), None
        return snapshot.files["model.pt"], slices.to_json()

    @abstractmethod
    def _first_weights(self) -> bytes:
        """Return the weights of a new model; nothing if it does not know the shape of its input."""

    def plot(self, path: str | os.PathLike | None = None) -> FitChart:
        """Draw the epochs that were trained so far: losses, metrics, rows per second and times.

        Parameters
        ----------
        path : str or os.PathLike, optional
            Also write the chart there; it ends with ``.html`` or ``.svg``, or with what matplotlib
            writes, such as ``.png``.

        Returns
        -------
        FitChart
            Shows itself in a notebook; ``write(path)`` writes it.

        Raises
        ------
        UsageError
            Before the first epoch, or if the file cannot be written.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.orca.data.file import is_file
        >>> from bigdl.orca.learn.optimizers import SGD
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> estimator = Estimator.from_torch(
        ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
        ...     backend="local",
        ... )
        >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
        >>> figures = estimator.fit((x, x), epochs=2)
        >>> chart = estimator.plot("fit.svg")  # in a notebook it shows itself
        >>> is_file("fit.svg")
        True
        """
        epochs = self._training.position.history
        if not epochs:
            raise UsageError(
                "There is nothing to plot before the first epoch of a fit", code="not-fitted"
            )
        chart = FitChart(epochs)
        if path is not None:
            chart.write(Path(path))
        return chart

    # -- data ----------------------------------------------------------------------------------

    def _kind_of(self, data: Any) -> str:
        """Return the name of an input's type, to tell whether two are alike."""
        return kind_of(data)

    def _feed(
        self, data: Any, feature_cols: Any, label_cols: Any, config: dict, name: str | None = None
    ) -> Any:
        """Return the Feed of an input that has targets."""
        feed = as_feed(data, feature_cols, label_cols, config, name=name)
        if feed.label_cols is not None and not feed.label_cols:
            raise UsageError(
                f"label_cols is required to fit or evaluate on a {feed.kind} with feature_cols; "
                "pass the names of the target columns",
                code="argument-missing",
                argument="label_cols",
            )
        feed.follow(self._inputs())
        return feed

    def _training_feed(
        self, data: Any, validation_data: Any, feature_cols: Any, label_cols: Any, config: dict
    ) -> tuple[FeedGroup, Any]:
        """Return the Feeds of a fit, and that of its training data."""
        feeds = {"data": self._feed(data, feature_cols, label_cols, config)}
        if validation_data is not None:
            if self._kind_of(validation_data) != self._kind_of(data):
                raise UsageError(
                    "validation_data should have the same type with train data, got "
                    f"{type_name(validation_data)} and {type_name(data)}",
                    code="data-type",
                    argument="validation_data",
                )
            feeds["validation"] = self._feed(
                validation_data, feature_cols, label_cols, config, "validation_data"
            )
        return FeedGroup(feeds), feeds["data"]

    @abstractmethod
    def as_udf(self, *args: Any, **options: Any) -> Any:
        """Return the model as a user-defined function of Spark."""

    def register(self, name: str, **options: Any) -> Any:
        """Make the model a function of SQL in the Spark session that is active.

        Parameters
        ----------
        name : str
            Of the function.
        **options
            Of :meth:`as_udf`.

        Returns
        -------
        function
            For DataFrames.

        Examples
        --------
        >>> import torch
        >>> from bigdl.orca import OrcaContext, init_orca_context
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> sc = init_orca_context("local", cores=2)
        >>> spark = OrcaContext.get_spark_session()
        >>> spark.createDataFrame([(7, [1.0, -2.0])], ["id", "x"]).createOrReplaceTempView("t")
        >>> estimator = Estimator.from_torch(model=torch.nn.ReLU())
        >>> relu = estimator.register("relu", feature_cols="x", sample=spark.table("t"))
        >>> spark.sql("select id, relu(x) as y from t").first()
        Row(id=7, y=[1.0, 0.0])
        """
        function = self.as_udf(**options)
        cluster: Any = cluster_of("spark", None, self._options.workers_per_node)
        return cluster.spark.udf.register(name, function)

    # -- evaluate, predict -----------------------------------------------------------------------

    def _run_evaluation(
        self, program: Callable, feed: Feed, max_failures: int | FailurePolicy | None
    ) -> Any:
        """Return what a program gives for the rows of a Feed; None where there are no rows."""
        policy = FailurePolicy.of(max_failures, self._backend)
        snapshot, options = self._training.snapshot, {}
        slices = None if snapshot is None else snapshot.slices
        if snapshot is None or slices is None:
            weights = self._weights()
        else:  # workers read the rows of tables themselves
            weights, options = snapshot.files["model.pt"], {"slices": slices.to_json()}
        with self._engine().open(program, feed) as job:
            try:
                return policy.run(
                    lambda: job.attempt(options, weights or None)[0], "evaluating again"
                )
            except NoRows:
                return None

    def _predict(
        self,
        data: Any,
        config: dict | None,
        feature_cols: Any,
        batch_size: int,
        output_cols: Any,
        ship: Callable[[Any, list[str], Any, list | None], tuple[ShippedModel, list | None]],
    ) -> Any:
        """Predict by tasks.

        Parameters
        ----------
        ship : callable
            ``ship(data, feature_cols, cluster, inputs)`` returns the model for the tasks, and the
            types of its inputs if they are known.
        """
        cluster = cluster_of(self._backend, data, self._options.workers_per_node)
        data, names = opened(data, cluster), names_of(feature_cols)
        shipped, inputs = ship(data, names, cluster, self._inputs())
        outputs = None if output_cols is None else names_of(output_cols)
        options = PredictOptions(config, names, batch_size, outputs, inputs)
        with UsersFrames():
            return predict_any(data, shipped, options, cluster)

    def _predict_stream(
        self,
        data: Any,
        sample: Any,
        config: dict | None,
        feature_cols: Any,
        batch_size: int,
        output_cols: Any,
        ship: Callable[[Any, list[str], Any, list | None], tuple[ShippedModel, list | None]],
    ) -> Any:
        """Predict a streaming DataFrame, of which no row can be looked at before.

        Parameters
        ----------
        sample : Sample, or an input of `predict`, or None
        ship : callable
            As of :meth:`_predict`; it gets the Sample.
        """
        if not getattr(data, "isStreaming", False):
            raise UsageError(
                f"predict_stream takes a streaming DataFrame, got {type(data).__name__}; use "
                "predict for data that has an end",
                code="data-type",
                argument="data",
            )
        cluster: Any = cluster_of("spark", data, self._options.workers_per_node)
        columns = feature_cols, batch_size, output_cols
        rows, shipped, options = self._ship(cluster, sample, config, *columns, ship)
        if rows is None and not options.inputs:
            raise UsageError(NOT_FITTED, code="not-fitted")
        first = None if rows is None else rows.first(2)
        with UsersFrames():
            return predict_dataframe(data, shipped, options, cluster.threads_per_task, first)

    def _sql_function(
        self,
        sample: Any,
        config: dict | None,
        feature_cols: Any,
        batch_size: int,
        output_cols: Any,
        ship: Callable[[Any, list[str], Any, list | None], tuple[ShippedModel, list | None]],
    ) -> Any:
        """Return the user-defined function of Spark that predicts.

        Parameters
        ----------
        sample : Sample, or an input of `predict`, or None
        ship : callable
            As of :meth:`_predict`; it gets the Sample.
        """
        cluster = cluster_of("spark", None, self._options.workers_per_node)
        columns = feature_cols, batch_size, output_cols
        rows, shipped, options = self._ship(cluster, sample, config, *columns, ship)
        first = None if rows is None else rows.first(2)
        with UsersFrames():
            return sql_function(shipped, options, cluster.threads_per_task, first)

    #: its package in requirements
    framework: ClassVar[str]

    def _pack_model(
        self,
        sample: Any,
        config: dict | None,
        feature_cols: Any,
        batch_size: int,
        output_cols: Any,
        ship: Callable[[Any, list[str], Any, list | None], tuple[ShippedModel, list | None]],
    ) -> tuple[bytes, PredictOptions]:
        """Return the model as :class:`ModelBytes` takes it, and how it predicts.

        The arguments are those of :meth:`_sql_function`.
        """
        columns = feature_cols, batch_size, output_cols
        _, shipped, options = self._ship(LocalMachine(), sample, config, *columns, ship)
        kept = {"dtype": float_dtype(config)}
        kept = with_texts(kept) if takes_texts(config) else kept
        return shipped.broadcast.value, replace(options, config=kept)

    def _ship(
        self,
        cluster: Any,
        sample: Any,
        config: dict | None,
        feature_cols: Any,
        batch_size: int,
        output_cols: Any,
        ship: Callable[[Any, list[str], Any, list | None], tuple[ShippedModel, list | None]],
    ) -> tuple[Any, ShippedModel, PredictOptions]:
        """Return the Sample of an input of `predict` (None without one), model and options."""
        names = names_of(feature_cols)
        rows = None if sample is None else opened(sample, cluster)
        known = self._inputs()
        rows = None if rows is None else needed_sample(rows, config or {}, names, known)
        shipped, inputs = ship(rows, names, cluster, known)
        outputs = None if output_cols is None else names_of(output_cols)
        return rows, shipped, PredictOptions(config, names, batch_size, outputs, inputs)

    def _inputs(self) -> list | None:
        """Return the types of the model's inputs in the training, if they are known."""
        snapshot = self._training.snapshot
        return None if snapshot is None else snapshot.manifest.get("inputs")

    def shutdown(self) -> None:
        """Free what prediction has broadcast; frames that were predicted stay valid.

        The workers of Ray, or of this machine, that wait for programs end, too.
        """
        self._shipped = None
        BACKENDS[self._backend].end_workers()
