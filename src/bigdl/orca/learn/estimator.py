"""Estimators of every framework: scikit-learn's manners on distributed data."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, UserFramesOnly, type_name
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.data.feeds import as_feed, feed_of, kind_of, names_of
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.inference.shipping import ShippedModel
from bigdl.orca.learn.backends import BACKENDS
from bigdl.orca.learn.prediction.predictor import NOT_FITTED, DistributedPredictor, PredictOptions
from bigdl.orca.learn.prediction.sample import Sample, Sampler
from bigdl.orca.learn.prediction.sql import sql_function
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.engine import Engine
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.jobs import NoRows
from bigdl.runtime.local import LocalMachine
from bigdl.runtime.shards.columns import float_dtype
from bigdl.runtime.shards.feed import Feed, not_predicted
from bigdl.runtime.shards.texts import takes_texts, with_texts
from bigdl.training.chart import FitChart
from bigdl.training.checkpoint import Checkpoint
from bigdl.training.fit import FitCall, TrainingSession


@dataclass
class EstimatorOptions:
    """Arguments of ``from_torch`` and ``from_keras`` that do not depend on the framework."""

    backend: str
    workers_per_node: int
    log_to_driver: bool
    model_dir: str | None  # a PathLike becomes text
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


@dataclass
class PredictionRequest:
    """A user's request of predictions: the arguments of ``predict`` and its like.

    Attributes
    ----------
    batch_size : int
        Rows of one forward pass.
    feature_cols, output_cols : str or sequence of str, optional
        Columns of the model's inputs, and names for its outputs; they become lists.
    accelerate : str or path, optional
        A method of Nano, ``"auto"`` or a directory of a model that it saved.
    callbacks : optional
        Of the framework.
    sample : optional
        Some rows of the model's inputs, of any kind that ``predict`` takes.
    is_kept : bool
        True if the model is kept without its checkpoint, so that it holds large tables itself.
    """

    batch_size: int
    feature_cols: Any = None  # a list from here on
    output_cols: Any = None
    accelerate: str | os.PathLike | None = None
    callbacks: Any = None
    sample: Any = None
    is_kept: bool = False

    def __post_init__(self) -> None:
        check_positive("batch_size", self.batch_size)
        self.feature_cols = names_of(self.feature_cols)
        if self.output_cols is not None:
            self.output_cols = names_of(self.output_cols)


class PredictingEstimator(ABC):
    """An Estimator as far as it predicts: by tasks, every kind of input in its own form."""

    #: its package in requirements
    framework: ClassVar[str]

    def __init__(self) -> None:
        self._shipped: ShippedModel | None = None  # what was broadcast last

    @abstractmethod
    def _ship(
        self, request: PredictionRequest, rows: Sample | None, cluster: Cluster
    ) -> ShippedModel:
        """Return the model as the tasks of a cluster get it.

        Parameters
        ----------
        request : PredictionRequest
        rows : Sample, optional
            Rows of the model's inputs, by which it can be accelerated; None if there are none.
        cluster : Cluster
        """

    def _check_prediction(self, request: PredictionRequest) -> None:  # noqa: B027 - most can it all
        """Refuse what the model cannot do."""

    def _prediction_config(self) -> dict:
        """Return the ``config`` by which inputs are converted."""
        return {}

    def _inputs(self) -> list | None:
        """Return the types of the model's inputs in the training, if they are known."""
        return None

    def _cluster(self, feed: Feed) -> Cluster:
        """Return where an input is predicted."""
        return active_spark()

    def _predict(self, data: Any, request: PredictionRequest) -> Any:
        """Predict an input of any kind."""
        self._check_prediction(request)
        options = self._predict_options(request)
        feed = feed_of(data, options.feature_cols, None, options.config, framework=self.framework)
        if feed is None:
            raise not_predicted(type(data).__name__)
        cluster = self._cluster(feed)
        rows = None if request.accelerate is None else Sampler(options).sample_of(feed, cluster)
        predictor = self._predictor(request, rows, cluster)
        with UserFramesOnly():
            return feed.predict(predictor, cluster)

    def _predict_options(self, request: PredictionRequest) -> PredictOptions:
        """Return what the tasks know of a request."""
        return PredictOptions(
            self._prediction_config(),
            request.feature_cols,
            request.batch_size,
            request.output_cols,
            self._inputs(),
        )

    def _predictor(
        self, request: PredictionRequest, rows: Sample | None, cluster: Cluster
    ) -> DistributedPredictor:
        """Return the model as the tasks of a cluster predict with it."""
        options = self._predict_options(request)
        if request.accelerate is not None and rows is not None:
            options = replace(options, inputs=rows.leaves)
        return DistributedPredictor(self._ship(request, rows, cluster), options)

    def _sample(self, request: PredictionRequest, cluster: Cluster) -> Sample | None:
        """Return the rows that the user gives as ``sample=``; None without."""
        data = request.sample
        if data is not None:
            options = self._predict_options(request)
            columns = options.feature_cols, None, options.config
            feed = feed_of(data, *columns, framework=self.framework)
            rows = None if feed is None else Sampler(options).sample_of(feed, cluster)
            if rows is None:
                raise UsageError(
                    "sample must be some rows that predict takes, such as a DataFrame, a pandas "
                    f"DataFrame or arrays; got {type(data).__name__} without rows",
                    code="data-empty",
                    argument="sample",
                )
            return rows
        if request.accelerate is not None:
            raise UsageError(
                f"accelerate={request.accelerate!r} needs some rows to convert the model and to "
                "compare its outputs with; pass sample=, or input_example= to MLflow",
                code="argument-missing",
                argument="sample",
                method=request.accelerate,
            )
        return None

    def _function(self, request: PredictionRequest) -> Any:
        """Return the user-defined function of Spark that predicts."""
        self._check_prediction(request)
        cluster = active_spark()
        rows = self._sample(request, cluster)
        predictor = self._predictor(request, rows, cluster)
        first = None if rows is None else rows.first(2)
        with UserFramesOnly():
            return sql_function(predictor, cluster.threads_per_task, first)

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
        return active_spark().spark.udf.register(name, function)

    def shutdown(self) -> None:
        """Free what prediction has broadcast; frames that were predicted stay valid."""
        self._shipped = None


class TrainingEstimator(PredictingEstimator):
    """An Estimator that trains: its workers, its data, and what it has trained so far.

    Parameters
    ----------
    parts : object
        What the model is made of.
    options : EstimatorOptions
    """

    def __init__(self, parts: Any, options: EstimatorOptions):
        super().__init__()
        self._parts, self._options = parts, options
        self._backend = BACKENDS[options.backend]
        self._sync = self._backend.sync()
        run_call = self._parameter_layer() if self._backend.has_parameter_layer else None
        self._training = TrainingSession(
            options.model_dir, self._sync, options.num_to_keep, run_call
        )

    @property
    def num_workers(self) -> int:
        """Number of workers that train and evaluate: nodes of the cluster × workers per node."""
        return self._engine().num_workers

    @abstractmethod
    def _parameter_layer(self) -> Callable[[FitCall], Checkpoint]:
        """Return what runs a fit by the parameter layer."""

    def _engine(self, min_workers: int | None = None) -> Engine:
        """Return the engine whose workers train and evaluate."""
        options = self._options
        return self._backend.engine(
            min_workers,
            workers_per_node=options.workers_per_node,
            log_to_driver=options.log_to_driver,
        )

    def _weights(self) -> bytes:
        """Return the model's weights; before the first fit those that it would start from."""
        snapshot = self._training.snapshot
        if snapshot is None:
            return self._first_weights()
        if snapshot.slices is not None:
            snapshot = self._whole(snapshot)
        return snapshot.files["model.pt"]

    @abstractmethod
    def _whole(self, snapshot: Checkpoint) -> Checkpoint:
        """Return the state with its large tables in the weights."""

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

    def _feed(
        self, data: Any, feature_cols: Any, label_cols: Any, config: dict, name: str | None = None
    ) -> Any:
        """Return the Feed of an input that has targets."""
        feed = as_feed(data, feature_cols, label_cols, config, name=name, framework=self.framework)
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
            if kind_of(validation_data, self.framework) != kind_of(data, self.framework):
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

    # -- evaluate, predict -----------------------------------------------------------------------

    def _run_evaluation(
        self, program: Callable, feed: Feed, max_failures: int | FailurePolicy | None
    ) -> Any:
        """Return what a program gives for the rows of a Feed; None where there are no rows."""
        policy = self._backend.failure_policy(max_failures)
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

    def _cluster(self, feed: Feed) -> Cluster:
        backend = BACKENDS["spark"] if feed.is_in_spark else self._backend
        return backend.cluster(self._options.workers_per_node)

    def predict_stream(
        self,
        data: Any,
        batch_size: int = 256,
        feature_cols: str | Sequence[str] | None = None,
        output_cols: str | Sequence[str] | None = None,
        *,
        accelerate: str | os.PathLike | None = None,
        sample: Any = None,
    ) -> Any:
        """A streaming DataFrame with predictions.

        The query that writes it goes on with the model as it is now. With
        :func:`bigdl.orca.data.kafka.write_kafka` each row is answered exactly once, also when the
        query is started again.

        Parameters
        ----------
        data : pyspark.sql.DataFrame
            Streaming.
        batch_size, feature_cols, output_cols
            As of ``predict``.
        accelerate : str, optional
            As of ``predict`` of an Estimator of PyTorch; it needs a `sample`.
        sample : optional
            Some rows, up to 256 are taken: any input that ``predict`` takes. A model that was
            not fitted needs them.

        Returns
        -------
        pyspark.sql.DataFrame
            Streaming, in the form of ``predict``.

        Examples
        --------
        >>> import torch
        >>> from bigdl.orca import OrcaContext, init_orca_context
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> sc = init_orca_context("local", cores=2)
        >>> spark = OrcaContext.get_spark_session()
        >>> rows = spark.createDataFrame([(1, [1.0, -2.0])], "id int, x array<double>")
        >>> rows.write.parquet("rows")
        >>> stream = spark.readStream.schema(rows.schema).parquet("rows")
        >>> estimator = Estimator.from_torch(model=torch.nn.ReLU())
        >>> answered = estimator.predict_stream(stream, feature_cols="x", sample=rows)
        >>> query = answered.writeStream.format("memory").queryName("answers").start()
        >>> query.processAllAvailable()
        >>> query.stop()
        >>> spark.table("answers").first()
        Row(id=1, x=[1.0, -2.0], prediction=DenseVector([1.0, 0.0]))
        """
        request = PredictionRequest(
            batch_size, feature_cols, output_cols, accelerate, sample=sample
        )
        self._check_prediction(request)
        if not getattr(data, "isStreaming", False):
            raise UsageError(
                f"predict_stream takes a streaming DataFrame, got {type(data).__name__}; use "
                "predict for data that has an end",
                code="data-type",
                argument="data",
            )
        cluster = active_spark()
        rows = self._sample(request, cluster)
        predictor = self._predictor(request, rows, cluster)
        if rows is None and not predictor.options.inputs:
            raise UsageError(NOT_FITTED, code="not-fitted")
        first = None if rows is None else rows.first(2)
        with UserFramesOnly():
            return predictor.predict_frame(data, cluster.threads_per_task, first)

    def as_udf(
        self,
        feature_cols: str | Sequence[str] | None = None,
        batch_size: int = 256,
        output_cols: str | Sequence[str] | None = None,
        *,
        accelerate: str | os.PathLike | None = None,
        sample: Any = None,
    ) -> Any:
        """The model as a user-defined function of Spark, for DataFrames and for SQL.

        Its arguments are the model's inputs, in their order; its values are those of
        ``predict``. It keeps the model as it is now, and works in the Spark session that is
        active, classic or of Spark Connect, whatever the backend of the Estimator. Each Python
        worker of Spark loads the model once.

        Parameters
        ----------
        feature_cols : str or list of str, optional
            Names of the inputs: of the columns of `sample`, and for messages.
        batch_size : int
            Rows of one forward pass.
        output_cols : str or list of str, optional
            Names for the model's outputs, one each, or some of the keys of a model that returns a
            dict.
        accelerate : str, optional
            As of ``predict`` of an Estimator of PyTorch; it needs a `sample`.
        sample : optional
            Some rows, up to 256 are taken: any input that ``predict`` takes. A model that was
            not fitted needs them.

        Returns
        -------
        function
            Of the output's type, such as ``float`` or ``bigint``, for one number per row, an array
            of it for several, nested arrays for more dimensions. Of a Keras model also a dimension
            of one number per row gives an array. A model with several outputs gives
            a struct of them if they have names or several types, else an array of arrays. A row
            with a null in an argument, also within an array or a map, has the value null. It ends
            with its Spark context.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.orca import OrcaContext, init_orca_context
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> sc = init_orca_context("local", cores=2)
        >>> frame = OrcaContext.get_spark_session().createDataFrame([([1.0, 2.0],)], ["x"])
        >>> estimator = Estimator.from_torch(model=torch.nn.ReLU())
        >>> relu = estimator.as_udf("x", sample=frame)
        >>> frame.select(relu("x").alias("y")).first()
        Row(y=[1.0, 2.0])
        """
        return self._function(
            PredictionRequest(batch_size, feature_cols, output_cols, accelerate, sample=sample)
        )

    def packed_model(
        self,
        sample: Any = None,
        feature_cols: str | Sequence[str] | None = None,
        batch_size: int = 256,
        output_cols: str | Sequence[str] | None = None,
        accelerate: str | os.PathLike | None = None,
    ) -> tuple[bytes, PredictOptions]:
        """Return the model as bytes, and how it predicts, for :mod:`bigdl.mlflow`.

        The arguments are those of :meth:`as_udf`.
        """
        request = PredictionRequest(
            batch_size, feature_cols, output_cols, accelerate, sample=sample, is_kept=True
        )
        self._check_prediction(request)
        cluster = LocalMachine()
        predictor = self._predictor(request, self._sample(request, cluster), cluster)
        options = predictor.options
        kept = {"dtype": float_dtype(options.config)}
        kept = with_texts(kept) if takes_texts(options.config) else kept
        return predictor.shipped.broadcast.value, replace(options, config=kept)

    def _inputs(self) -> list | None:
        """Return the types of the model's inputs in the training, if they are known."""
        snapshot = self._training.snapshot
        return None if snapshot is None else snapshot.manifest.get("inputs")

    def shutdown(self) -> None:
        """Free what prediction has broadcast; frames that were predicted stay valid.

        The workers of Ray, or of this machine, that wait for programs end, too.
        """
        super().shutdown()
        self._backend.end_workers()
