"""Base classes of the Estimators of all frameworks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.display import call_text, html_table
from bigdl.common.errors import UsageError, UserFramesOnly, hide_frames, type_name
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.data.feeds import as_feed, feed_of, input_type_of, names_of
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.inference.shipping import ShippedModel
from bigdl.orca.learn.backends import BACKENDS
from bigdl.orca.learn.prediction.classes import (
    OUTPUTS,
    Scores,
    ShippedClassifier,
    unknown_scores,
)
from bigdl.orca.learn.prediction.predictor import NOT_FITTED, DistributedPredictor, PredictOptions
from bigdl.orca.learn.prediction.report import (
    PredictionReport,
    PredictionWriter,
    ShippedWithTimer,
)
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
from bigdl.training.journal import FitJournal
from bigdl.training.metrics import headline
from bigdl.training.progress import say_phase, slow_phase
from bigdl.training.report import FitReport, LiveReport

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from bigdl.common.types import ColumnNames


@dataclass
class EstimatorOptions:
    """Framework-independent arguments of ``from_torch`` and ``from_keras``."""

    backend: str
    workers_per_node: int
    log_to_driver: bool
    model_dir: str | None  # a PathLike is converted to str
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
    """Arguments of ``predict``, ``as_udf`` and the other prediction methods.

    Attributes
    ----------
    batch_size : int
        Number of rows per forward pass.
    feature_cols, output_cols : str or sequence of str, optional
        Input columns and output names; converted to lists.
    accelerate : str or path, optional
        A Nano acceleration method, ``"auto"`` or the directory of a model that Nano saved.
    callbacks : optional
        Callbacks of the framework.
    sample : optional
        Sample rows of the model's inputs, of any type that ``predict`` takes.
    is_standalone : bool
        True if the model is stored without its checkpoint and must contain large tables.
    output : {"raw", "class", "probability"}
        Form of the predictions.
    report : str or path, optional
        HTML file of the prediction's report.
    """

    batch_size: int
    feature_cols: Any = None  # a list after __post_init__
    output_cols: Any = None
    accelerate: str | os.PathLike | None = None
    callbacks: Any = None
    sample: Any = None
    is_standalone: bool = False
    output: str = "raw"
    report: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_positive("batch_size", self.batch_size)
        check_choice("output", self.output, OUTPUTS)
        self.feature_cols = names_of(self.feature_cols)
        if self.output_cols is not None:
            self.output_cols = names_of(self.output_cols)


@hide_frames
class PredictingEstimator(ABC):
    """Base class of Estimators that run prediction on every input type in distributed tasks."""

    # : name of the framework's extra in setup.py
    framework: ClassVar[str]

    def __init__(self) -> None:
        self._shipped: ShippedModel | None = None  # the latest broadcast
        self._prediction_report: PredictionReport | None = None

    @abstractmethod
    def _ship(
        self, request: PredictionRequest, rows: Sample | None, cluster: Cluster
    ) -> ShippedModel:
        """Ship the model to the tasks of a cluster.

        Parameters
        ----------
        request : PredictionRequest
        rows : Sample, optional
            Sample rows of the model's inputs, for acceleration; None if there are none.
        cluster : Cluster
        """

    def _check_prediction(self, request: PredictionRequest) -> None:  # noqa: B027
        """Raise an error if the model does not support the request."""

    def _prediction_config(self) -> dict:
        """Return the ``config`` that input conversion uses."""
        return {}

    def _inputs(self) -> list | None:
        """Return the model's input types from training, if they are known."""
        return None

    def _scores(self, output: str) -> Scores:
        """Return whether outputs are logits or probabilities, and whether classes are exclusive.

        Parameters
        ----------
        output : str
            Requested form of the predictions, for error messages.

        Raises
        ------
        UsageError
            If the meaning is unknown.
        """
        raise unknown_scores(output, "unknown")

    def _cluster(self, feed: Feed) -> Cluster:
        """Return the cluster that runs the prediction tasks for an input."""
        return active_spark()

    def _predict(self, data: object, request: PredictionRequest) -> object:
        """Return predictions for an input of any supported type."""
        self._check_prediction(request)
        options = self._predict_options(request)
        feed = feed_of(data, options.feature_cols, None, options.config, framework=self.framework)
        if feed is None:
            raise not_predicted(type(data).__name__)
        cluster = self._cluster(feed)
        rows = None if request.accelerate is None else Sampler(options).sample_of(feed, cluster)
        predictor = self._predictor(request, rows, cluster)
        if request.report is not None:
            facts = {"data": input_type_of(data, self.framework), **self._prediction_facts(request)}
            self._prediction_report = PredictionReport(facts)
            predictor = _with_report(predictor, self._prediction_report, request.report, cluster)
        with UserFramesOnly(), slow_phase("predicting"):
            return feed.predict(predictor, cluster)

    def _prediction_facts(self, request: PredictionRequest) -> dict[str, object]:
        """Return the settings that the report of a prediction shows."""
        return {
            "model": self._model_name(),
            "batch_size": request.batch_size,
            "accelerate": None if request.accelerate is None else str(request.accelerate),
            "output": request.output,
        }

    def _model_name(self) -> str | None:
        """Return the name of the model, or of the function that creates it."""
        return None

    def prediction_report(self, path: str | os.PathLike[str] | None = None) -> PredictionReport:
        """Report the tasks of the last ``predict(..., report=)`` that have ended until now.

        Parameters
        ----------
        path : str or os.PathLike, optional
            HTML file or fsspec URL to write the report to.

        Returns
        -------
        PredictionReport
            Report that a notebook displays; ``advice()`` returns up to three sentences on how to
            predict faster.

        Raises
        ------
        UsageError
            If no prediction had a report, or if the file cannot be written.

        Examples
        --------
        >>> import torch
        >>> from bigdl.orca import OrcaContext, init_orca_context
        >>> from bigdl.orca.learn.pytorch import Estimator
        >>> sc = init_orca_context("local", cores=2)
        >>> df = OrcaContext.get_spark_session().range(100).selectExpr("float(id) AS x")
        >>> estimator = Estimator.from_torch(model=torch.nn.ReLU())
        >>> count = estimator.predict(df, feature_cols="x", report="predict.html").collect()
        >>> len(estimator.prediction_report().advice()) <= 3
        True
        """
        report = self._prediction_report
        if report is None:
            raise UsageError(
                "There is no report of a prediction; pass report= to predict, such as "
                'report="predict.html"',
                code="not-fitted",
            )
        if path is not None:
            report.write(path)
        return report

    def _predict_options(self, request: PredictionRequest) -> PredictOptions:
        """Return the options of a request that the prediction tasks need."""
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
        """Ship the model and return its predictor."""
        options = self._predict_options(request)
        if request.accelerate is not None and rows is not None:
            options = replace(options, inputs=rows.leaves)
        shipped = self._ship(request, rows, cluster)
        if request.output == "raw":
            return DistributedPredictor(shipped, options)
        scores = self._scores(request.output)
        return DistributedPredictor(ShippedClassifier(shipped, scores, request.output), options)

    def _sample(self, request: PredictionRequest, cluster: Cluster) -> Sample | None:
        """Return sample rows from the user's ``sample=``, or None if it was not passed."""
        data = request.sample
        if data is not None:
            options = self._predict_options(request)
            columns = options.feature_cols, None, options.config
            feed = feed_of(data, *columns, framework=self.framework)
            rows = None if feed is None else Sampler(options).sample_of(feed, cluster)
            if rows is None:
                raise UsageError(
                    "sample must hold rows in a form that predict takes, such as a DataFrame, a "
                    "pandas "
                    f"DataFrame or arrays; got {type(data).__name__} without rows",
                    code="data-empty",
                    argument="sample",
                )
            return rows
        if request.accelerate is not None:
            raise UsageError(
                f"accelerate={request.accelerate!r} needs sample rows to convert the model and to "
                "compare its outputs; pass sample=, or input_example= to MLflow",
                code="argument-missing",
                argument="sample",
                method=request.accelerate,
            )
        return None

    def _function(self, request: PredictionRequest) -> Callable[..., Column]:
        """Return a Spark user-defined function that predicts with the model."""
        self._check_prediction(request)
        cluster = active_spark()
        rows = self._sample(request, cluster)
        predictor = self._predictor(request, rows, cluster)
        first = None if rows is None else rows.first(2)
        with UserFramesOnly():
            return sql_function(predictor, cluster.threads_per_task, first)

    @abstractmethod
    def as_udf(self, *args: Any, **options: Any) -> Callable[..., Column]:  # args: see subclasses
        """Return the model as a Spark user-defined function."""

    def register(self, name: str, **options: Any) -> Callable[..., Column]:
        """Register the model as a SQL function in the active Spark session.

        Parameters
        ----------
        name : str
            Name of the SQL function.
        **options
            Arguments of :meth:`as_udf`.

        Returns
        -------
        function
            The user-defined function, for DataFrames.

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
        """Release the broadcast model; DataFrames with predictions stay valid."""
        self._shipped = None


@hide_frames
class TrainingEstimator(PredictingEstimator):
    """Base class of Estimators that train as well as predict.

    Parameters
    ----------
    parts : object
        Components of the model.
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

    def _fields(self) -> dict[str, object]:
        """Return the fields that ``repr`` shows, including the backend and the last metrics."""
        options, history = self._options, self._training.position.history
        return {
            "model": self._model_name(),
            "backend": options.backend,
            "workers_per_node": options.workers_per_node,
            "model_dir": options.model_dir,
            "epochs": len(history) or None,
            **(headline(history[-1]) if history else {}),
        }

    def _model_name(self) -> str | None:
        model = getattr(self._parts, "model", None)
        return getattr(model, "__name__", type(model).__name__) if model else None

    def __repr__(self) -> str:
        return call_text(type(self).__name__, self._fields())

    def _repr_html_(self) -> str:
        history = self._training.position.history
        chart = FitChart(history)._repr_html_() if history else ""
        return html_table(type(self).__name__, self._fields(), chart)

    @property
    def num_workers(self) -> int:
        """Number of training and evaluation workers: cluster nodes times workers per node."""
        return self._engine().num_workers

    @abstractmethod
    def _parameter_layer(self) -> Callable[[FitCall], Checkpoint]:
        """Return the function that runs a fit with the parameter layer."""

    def _engine(self, min_workers: int | None = None) -> Engine:
        """Return the engine that runs the training and evaluation workers."""
        options = self._options
        return self._backend.engine(
            min_workers,
            workers_per_node=options.workers_per_node,
            log_to_driver=options.log_to_driver,
        )

    def _weights(self) -> bytes:
        """Return the model's current weights, or its initial weights before the first fit."""
        snapshot = self._training.snapshot
        if snapshot is None:
            return self._initial_weights()
        if snapshot.slices is not None:
            snapshot = self._whole(snapshot)
        return snapshot.files["model.pt"]

    @abstractmethod
    def _whole(self, snapshot: Checkpoint) -> Checkpoint:
        """Return the checkpoint with its sharded embedding tables merged into the weights."""

    def _prediction_weights(self, is_whole: bool) -> tuple[bytes, dict | None]:
        """Return weights for prediction tasks, and the table slices that tasks read from files.

        Parameters
        ----------
        is_whole : bool
            True if the model is stored without its checkpoint and must contain large tables.
        """
        snapshot = self._training.snapshot
        slices = None if snapshot is None else snapshot.slices
        if snapshot is None or slices is None or is_whole or not slices.stay_in_files:
            return self._weights(), None
        return snapshot.files["model.pt"], slices.to_json()

    @abstractmethod
    def _initial_weights(self) -> bytes:
        """Return the weights of a new model, or ``b""`` if its input shape is unknown."""

    def plot(self, path: str | os.PathLike | None = None) -> FitChart:
        """Plot losses, metrics, rows per second and durations of all epochs trained so far.

        Parameters
        ----------
        path : str or os.PathLike, optional
            File to write the chart to. The suffix is ``.html``, ``.svg`` or a format of matplotlib,
            such as ``.png``.

        Returns
        -------
        FitChart
            Chart that a notebook displays; ``write(path)`` writes it to a file.

        Raises
        ------
        UsageError
            If no epoch has been trained, or if the file cannot be written.

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
        >>> metrics = estimator.fit((x, x), epochs=2)
        >>> chart = estimator.plot("fit.svg")  # a notebook displays it
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

    def report(self, path: str | os.PathLike | None = None) -> FitReport:
        """Report the metrics of all epochs, and the durations and warnings of the last fit.

        Parameters
        ----------
        path : str or os.PathLike, optional
            HTML file or fsspec URL to write the report to. The page needs no other file.

        Returns
        -------
        FitReport
            Report that a notebook displays. ``advice()`` returns up to three sentences on how to
            make the fit faster; ``times()`` and ``timeline()`` return the durations.

        Raises
        ------
        UsageError
            If no epoch has been trained, or if the file cannot be written.

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
        >>> metrics = estimator.fit((x, x), epochs=2)
        >>> report = estimator.report("fit.html")
        >>> is_file("fit.html"), len(report.times())  # one worker
        (True, 1)
        """
        training = self._training
        position, journal = training.position, training.journal
        if not (position.epochs_with_metrics or journal.began_at):
            raise UsageError(
                "There is nothing to report before the first epoch of a fit", code="not-fitted"
            )
        epochs = position.epoch_metrics(0, position.epochs_with_metrics)
        report = FitReport(journal, [e for e in epochs if e["epoch"] not in journal.epochs])
        if path is not None:
            report.write(path)
        return report

    def _journal(
        self,
        data: object,
        validation_data: object,
        engine: Engine,
        report: str | os.PathLike | None,
    ) -> FitJournal:
        """Return the journal of a new fit; with a path, write its report after each epoch."""
        framework = self.framework
        facts = {
            "model": self._fields()["model"],
            "framework": framework,
            "backend": self._options.backend,
            "workers": engine.num_workers,
            "model_dir": self._options.model_dir,
            "data": input_type_of(data, framework),
        }
        if validation_data is not None:
            facts["validation_data"] = input_type_of(validation_data, framework)
        journal = FitJournal(facts)
        if report is not None:
            position = self._training.position
            earlier = position.epoch_metrics(0, position.epochs_with_metrics)
            journal.on_change = LiveReport(journal, earlier, report).update
        return journal

    # -- data ----------------------------------------------------------------------------------

    def _feed(
        self,
        data: object,
        feature_cols: ColumnNames | None,
        label_cols: ColumnNames | None,
        config: dict,
        name: str | None = None,
    ) -> Feed:
        """Convert training or evaluation data to a Feed; raise an error if labels are missing."""
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
        self,
        data: object,
        validation_data: object,
        feature_cols: ColumnNames | None,
        label_cols: ColumnNames | None,
        config: dict,
    ) -> tuple[FeedGroup, Any]:
        """Return a FeedGroup of the training and validation data, and the training data's Feed."""
        feeds = {"data": self._feed(data, feature_cols, label_cols, config)}
        if validation_data is not None:
            input_type = input_type_of(data, self.framework)
            if input_type_of(validation_data, self.framework) != input_type:
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
        self,
        program: Callable,
        feed: Feed,
        max_failures: int | FailurePolicy | None,
        verbose: int | str = 1,
    ) -> dict[str, Any] | None:
        """Run an evaluation program on a Feed's rows; return None if there are no rows."""
        policy = self._backend.failure_policy(max_failures)
        snapshot, options = self._training.snapshot, {}
        slices = None if snapshot is None else snapshot.slices
        if snapshot is None or slices is None:
            weights = self._weights()
        else:  # workers read the table rows themselves
            weights, options = snapshot.files["model.pt"], {"slices": slices.to_json()}

        engine, say = self._engine(), say_phase if verbose != 0 else lambda phase: None

        def on_event(topic: str, value: object) -> None:
            if topic == "phase" and value != "running":
                say(str(value))

        say(f"evaluating with {engine.num_workers} workers".replace(" 1 workers", " 1 worker"))
        with engine.open(program, feed) as job:
            try:
                return policy.run(
                    lambda: job.attempt(options, weights or None, on_event)[0], "evaluating again"
                )
            except NoRows:
                return None

    def _cluster(self, feed: Feed) -> Cluster:
        backend = BACKENDS["spark"] if feed.is_in_spark else self._backend
        return backend.cluster(self._options.workers_per_node)

    def predict_stream(
        self,
        data: DataFrame,
        batch_size: int = 256,
        feature_cols: str | Sequence[str] | None = None,
        output_cols: str | Sequence[str] | None = None,
        *,
        accelerate: str | os.PathLike | None = None,
        sample: object = None,
        output: str = "raw",
    ) -> DataFrame:
        """Return a streaming DataFrame with predictions.

        The streaming query keeps the current model, even if this Estimator trains further. With
        :func:`bigdl.orca.data.kafka.write_kafka`, each row is predicted exactly once, even if the
        query restarts.

        Parameters
        ----------
        data : pyspark.sql.DataFrame
            Streaming DataFrame.
        batch_size, feature_cols, output_cols
            See ``predict``.
        accelerate : str, optional
            See ``predict`` of the PyTorch Estimator; requires `sample`.
        sample : optional
            Sample rows in any form that ``predict`` takes; up to 256 are used. Required for a
            model that was not fitted.
        output : {"raw", "class", "probability"}
            See ``predict``.

        Returns
        -------
        pyspark.sql.DataFrame
            Streaming DataFrame with the columns that ``predict`` returns.

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
            batch_size, feature_cols, output_cols, accelerate, sample=sample, output=output
        )
        self._check_prediction(request)
        if not getattr(data, "isStreaming", False):
            raise UsageError(
                f"predict_stream takes a streaming DataFrame, got {type(data).__name__}; use "
                "predict for batch data",
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
        sample: object = None,
        output: str = "raw",
    ) -> Callable[..., Column]:
        """Return the model as a Spark user-defined function, for DataFrames and SQL.

        The function takes the model's inputs in order and returns the values of ``predict``. It
        keeps the current model. It works in the active Spark session, classic or Spark Connect,
        with every backend of the Estimator. Each Python worker of Spark loads the model once.

        Parameters
        ----------
        feature_cols : str or list of str, optional
            Input names, for the columns of `sample` and for error messages.
        batch_size : int
            Number of rows per forward pass.
        output_cols : str or list of str, optional
            One name per model output, or a selection of keys if the model returns a dict.
        accelerate : str, optional
            See ``predict`` of the PyTorch Estimator; requires `sample`.
        sample : optional
            Sample rows in any form that ``predict`` takes; up to 256 are used. Required for a
            model that was not fitted.
        output : {"raw", "class", "probability"}
            See ``predict``.

        Returns
        -------
        function
            User-defined function. It returns a scalar such as ``float`` or ``bigint`` if an output
            has one number per row, and (nested) arrays otherwise. A trailing dimension of size 1 is
            dropped, except for Keras models. Several outputs are returned as a struct if they have
            names or different types, else as an array of arrays. The result is null for a row with
            a null argument, including nulls inside arrays and maps. The function is valid until its
            SparkContext stops.

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
            PredictionRequest(
                batch_size, feature_cols, output_cols, accelerate, sample=sample, output=output
            )
        )

    def packed_model(
        self,
        sample: object = None,
        feature_cols: str | Sequence[str] | None = None,
        batch_size: int = 256,
        output_cols: str | Sequence[str] | None = None,
        accelerate: str | os.PathLike | None = None,
    ) -> tuple[bytes, PredictOptions]:
        """Return the pickled model and its prediction options, for :mod:`bigdl.mlflow`.

        See :meth:`as_udf` for the arguments.
        """
        request = PredictionRequest(
            batch_size, feature_cols, output_cols, accelerate, sample=sample, is_standalone=True
        )
        self._check_prediction(request)
        cluster = LocalMachine()
        predictor = self._predictor(request, self._sample(request, cluster), cluster)
        options = predictor.options
        kept = {"dtype": float_dtype(options.config)}
        kept = with_texts(kept) if takes_texts(options.config) else kept
        return cast("ShippedModel", predictor.shipped).broadcast.value, replace(
            options, config=kept
        )

    def _inputs(self) -> list | None:
        """Return the model's input types from training, if they are known."""
        snapshot = self._training.snapshot
        return None if snapshot is None else snapshot.manifest.get("inputs")

    def shutdown(self) -> None:
        """Release the broadcast model and stop idle workers of the backend.

        DataFrames with predictions stay valid. Idle workers are Ray actors or local processes that
        wait for the next program.
        """
        super().shutdown()
        self._backend.end_workers()


def _with_report(
    predictor: DistributedPredictor,
    report: PredictionReport,
    path: str | os.PathLike[str],
    cluster: Cluster,
) -> DistributedPredictor:
    """Return a predictor whose tasks add their durations to a report."""
    sc = getattr(cluster, "sc", None)
    if sc is None:
        raise UsageError(
            "report= of predict needs a SparkContext, which this backend or Spark Connect does not "
            "have; omit it",
            code="unsupported",
            argument="report",
        )
    timed = ShippedWithTimer(predictor.shipped, PredictionWriter(report, path), sc)
    return replace(predictor, shipped=timed)
