"""Spark ML stages that train PyTorch models and predict values or classes.

The module also defines their parameters, and the conversion of models and optimizers.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import cloudpickle
import pyarrow as pa
import torch
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasSeed,
    HasThreshold,
)
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
)
from pyspark.sql import Row
from pyspark.sql import functions as F
from torch import nn

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError, WorkerError, as_usage_error, hide_frames
from bigdl.common.trust import digest_of
from bigdl.orca.cluster.versions import frame_of_arrow
from bigdl.orca.data.xshards.frames import quoted
from bigdl.orca.learn.nnframes.preprocessing import (
    FeatureLabelPreprocessing,
    ScalarToTensor,
    as_preprocessing,
)
from bigdl.orca.learn.optimizers.schedule import Default
from bigdl.orca.learn.pytorch import Estimator as TorchEstimator
from bigdl.orca.learn.pytorch import PyTorchEstimator
from bigdl.orca.learn.pytorch.callbacks.base import Callback
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.runtime.serialization import pickled_by_value
from bigdl.training.position import EveryEpoch, MaxEpoch, MaxIteration, Trigger

if TYPE_CHECKING:
    from bigdl.orca.learn.types import Criterion

__all__ = [
    "NNClassifier",
    "NNClassifierModel",
    "NNEstimator",
    "NNModel",
    "TrainSummary",
    "ValidationSummary",
    "trusted_loading",
]

T = TypeVar("T")


def _rate(name: str, value: object) -> float:
    return float(check_number(name, value, 0))


def _flag(name: str, value: object) -> bool:
    return TypeConverters.toBoolean(value)


def _text(name: str, value: object) -> str:
    return TypeConverters.toString(value)


def _with_params(**params: tuple[str, Callable | None]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds parameters, each with a getter and a chainable setter.

    Parameters
    ----------
    **params : tuple of str and callable
        Description of each parameter, and ``check(name, value)`` that returns its value. Existing
        attributes of the class are kept.
    """

    def add(cls: type[T]) -> type[T]:
        for name, (doc, check) in params.items():
            title = name[0].upper() + name[1:]
            convert = None if check is None else functools.partial(check, name)
            attributes = {
                name: Param(Params._dummy(), name, doc, convert),
                f"set{title}": _setter(name, doc),
                f"{'is' if check is _flag else 'get'}{title}": _getter(name),
            }
            for attribute, value in attributes.items():
                if not hasattr(cls, attribute):
                    setattr(cls, attribute, value)
        return cls

    return add


def _setter(name: str, doc: str) -> Callable:
    def set_param(self, value):
        return self._set(**{name: value})

    set_param.__doc__ = doc
    return set_param


def _getter(name: str) -> Callable:
    return lambda self: self.getOrDefault(name)


@_with_params(
    batchSize=("Number of rows per batch, over all workers.", check_positive),
    featuresCol=("Input column of the model: vectors, arrays or numbers.", None),
    predictionCol=("Column that ``transform`` adds.", None),
)
class ModelParams(HasFeaturesCol, HasPredictionCol):
    """Spark ML parameters of all stages that hold a model."""


@_with_params(
    maxEpoch=("Number of epochs, unless ``setEndWhen`` sets a condition.", check_positive),
    learningRate=("Learning rate of an optimizer given as class or name, or by default.", _rate),
    learningRateDecay=(
        "Decay: after n steps the rate is ``learningRate / (1 + n * value)``.",
        _rate,
    ),
    workersPerNode=("Number of workers per node, which share its cores.", check_positive),
    seed=("Seed of weights, shuffling and dropout; default random.", None),
    labelCol=("Target column: numbers, arrays or vectors.", None),
    cachingSample=("Accepted for compatibility and ignored: rows are kept in mapped files.", _flag),
    dataCacheLevel=("Accepted for compatibility, as ``cachingSample``.", None),
)
class TrainingParams(ModelParams, HasLabelCol, HasSeed):
    """Spark ML parameters of all stages that train a model."""

    def setDataCacheLevel(self, level: str, numSlice: int | None = None):
        """Accept a cache level for compatibility; the level has no effect.

        Every worker keeps its rows in a memory-mapped file.

        Parameters
        ----------
        level : str
            ``"DRAM"`` or ``"DISK_AND_DRAM"``.
        numSlice : int, optional
        """
        check_choice("dataCacheLevel", level, ("DRAM", "DISK_AND_DRAM"))
        return self._set(dataCacheLevel=[level, numSlice])

    def getDataCacheLevel(self):
        level, slices = self.getOrDefault("dataCacheLevel")
        return level if slices is None else (level, slices)


@_with_params(
    threshold=("Probability above which a model with one output predicts class 1.", None),
    zeroBasedLabel=("Whether classes start at 0.0 (default) instead of 1.0 (BigDL 2.x).", _flag),
    rawPredictionCol=("Additional column with the scores of all classes, e.g. for a ROC.", _text),
)
class ClassifierParams(HasThreshold):
    """Parameters of classifiers and their models."""

    def getRawPredictionCol(self) -> str | None:
        return self.getOrDefault("rawPredictionCol") if self.isDefined("rawPredictionCol") else None


def optimizer_of(method: object, lr: float) -> object:
    """Convert a stage's optimizer to the ``optimizer=`` argument of ``Estimator.from_torch``.

    Parameters
    ----------
    method : None, str, type, torch.optim.Optimizer or callable
        None means SGD. A torch class, or its name, gets the learning rate `lr`. An optimizer
        instance (of a model instance), an Orca optimizer and a creator ``f(model, config)`` define
        their learning rate.
    lr : float
    """
    if method is None:
        method = torch.optim.SGD
    if isinstance(method, str):
        known = {
            name.lower(): cls
            for name, cls in vars(torch.optim).items()
            if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        }
        known.pop("optimizer", None)
        if method.lower() not in known:
            raise UsageError(
                f"torch.optim has no optimizer {method!r}; it has "
                f"{', '.join(sorted(cls.__name__ for cls in known.values()))}",
                code="name-unknown",
                argument="optimMethod",
            )
        method = known[method.lower()]
    if isinstance(method, type) and issubclass(method, torch.optim.Optimizer):

        def create(model, config):
            return method(model.parameters(), lr=lr)

        return create
    if isinstance(method, torch.optim.Optimizer) or (
        callable(method) and not isinstance(method, type)
    ):
        return method
    raise UsageError(
        "setOptimMethod takes a torch optimizer (a class, its name, or an instance created from "
        "the same model), one of bigdl.orca.learn.optimizers, or a function of (model, config), "
        f"got {method!r}",
        code="argument-type",
        argument="optimMethod",
    )


class Summary:
    """Base class of summaries, which record a fit's metrics and return them as rows.

    Parameters
    ----------
    log_dir : str
        TensorBoard files are written to ``<log_dir>/<app_name>``.
    app_name : str
    """

    _getter = ""

    def __init__(self, log_dir: str, app_name: str):
        self.log_dir, self.app_name = log_dir, app_name
        self._estimator: PyTorchEstimator | None = None  # Estimator of the last fit

    def read_scalar(self, tag: str) -> list:
        """Return the values recorded under a TensorBoard tag as rows ``[step, value, time]``.

        Raises
        ------
        UsageError
            If no ``fit`` with this summary has run.
        """
        if self._estimator is None:
            raise UsageError(
                f"{type(self).__name__} has no values yet; set it on an NNEstimator and call fit",
                code="not-fitted",
            )
        return getattr(self._estimator, self._getter)(tag)

    def __repr__(self):
        return f"{type(self).__name__}({self.log_dir!r}, {self.app_name!r})"


class TrainSummary(Summary):
    """Summary of ``Loss``, ``LearningRate`` and ``Throughput`` of every training step.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.nnframes import NNEstimator, TrainSummary
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [([1.0, 0.0], 1.0), ([0.0, 1.0], 2.0)] * 4
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features", "label"])
    >>> summary = TrainSummary("logs", "sums")
    >>> estimator = NNEstimator(torch.nn.Linear(2, 1), torch.nn.MSELoss()).setBatchSize(4)
    >>> model = estimator.setMaxEpoch(1).setTrainSummary(summary).fit(frame)
    >>> [step for step, loss, time in summary.read_scalar("Loss")]  # two batches of 4 rows
    [1, 2]
    """

    _getter = "get_train_summary"


class ValidationSummary(Summary):
    """Summary of the loss and metrics of every validation, by name.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.nnframes import NNEstimator, ValidationSummary
    >>> from bigdl.orca.learn.trigger import EveryEpoch
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [([1.0, 0.0], 1.0), ([0.0, 1.0], 2.0)] * 4
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features", "label"])
    >>> summary = ValidationSummary("logs", "sums")
    >>> estimator = NNEstimator(torch.nn.Linear(2, 1), torch.nn.MSELoss()).setMaxEpoch(2)
    >>> estimator = estimator.setValidation(EveryEpoch(), frame, ["mse"], 8)
    >>> model = estimator.setValidationSummary(summary).fit(frame)
    >>> len(summary.read_scalar("mse"))  # after each epoch
    2
    """

    _getter = "get_validation_summary"


def _option(name: str) -> Callable[[Any], Any]:
    """Return a getter method for an option; the getter returns None if the option is not set."""
    return lambda self: self._options.get(name)


class PreprocessedModel(nn.Module):
    """Module that preprocesses its input and then calls the model.

    Parameters
    ----------
    model : nn.Module
    preprocessing : Preprocessing
    """

    def __init__(self, model: nn.Module, preprocessing):
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing

    def forward(self, rows):
        made = self.preprocessing.batch(rows)
        return self.model(*made) if isinstance(made, tuple) else self.model(made)


class PreprocessedLabels(Callback):
    """Callback that preprocesses the labels before the loss and the metrics."""

    def __init__(self, preprocessing):
        self.preprocessing = preprocessing

    def before_iter(self, runner):
        if runner.batch is not None:
            *features, target = runner.batch
            runner.batch = [*features, self.preprocessing.batch(target)]


class ClassHead(nn.Module):
    """Module that converts a classifier's outputs to the predicted class.

    A single output is the probability of the second class (or its logit); several are class scores.

    Parameters
    ----------
    model : nn.Module
    threshold : float
        Probability above which a single output predicts the second class.
    logits : bool
        Whether a single output is a logit.
    first : int
        Label of the first class if there are several outputs.
    raw : bool
        Whether to return the class scores in addition, before the class.
    """

    def __init__(self, model: nn.Module, threshold: float, logits: bool, first: int, raw: bool):
        super().__init__()
        self.model = model
        self.threshold, self.logits, self.first, self.raw = threshold, logits, first, raw

    def forward(self, *inputs):
        scores = self.model(*inputs)
        if not isinstance(scores, torch.Tensor):
            raise UsageError(
                f"A classifier must return one tensor of scores, got {type(scores).__name__}",
                code="model-output",
            )
        scores = scores.reshape(len(scores), -1)
        if scores.shape[1] == 1:
            score = scores[:, 0]
            probability = torch.sigmoid(score) if self.logits else score
            chosen = (probability > self.threshold).float()
            scores = torch.stack([-score if self.logits else 1 - score, score], dim=1)
        else:
            chosen = (scores.argmax(dim=1) + self.first).float()
        return (scores, chosen) if self.raw else chosen


_PIECE = 16 << 20
written_pickles: set[str] = set()  # digests of pickles written by this process
_trusts = contextvars.ContextVar("trusts", default=False)


@contextlib.contextmanager
def trusted_loading() -> Iterator[None]:
    """Return a context manager that disables the trust check for loading saved stages.

    Use it with ``PipelineModel.load`` and similar functions without ``trust=``. Loading a saved
    model runs code of the person who saved it.

    Examples
    --------
    >>> import torch
    >>> from pyspark.ml import Pipeline, PipelineModel
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.nnframes import NNModel, trusted_loading
    >>> sc = init_orca_context("local", cores=2)
    >>> frame = OrcaContext.get_spark_session().createDataFrame([([1.0],)], ["features"])
    >>> Pipeline(stages=[NNModel(torch.nn.ReLU(), [1])]).fit(frame).save("pipeline")
    >>> with trusted_loading():  # any writer
    ...     pipeline = PipelineModel.load("pipeline")
    >>> pipeline.transform(frame).first()["prediction"]
    1.0
    """
    token = _trusts.set(True)
    try:
        yield
    finally:
        _trusts.reset(token)


class StageWriter(DefaultParamsWriter):
    """Writes a stage: parameters in Spark's format, other content as a pickle in chunks."""

    def saveImpl(self, path: str) -> None:
        stage: Any = self.instance
        advice = "create such objects inside a model creator instead"
        data = pickled_by_value(stage._saved(), "The stage cannot be saved", advice)
        session: Any = self.sparkSession
        params = self._get_metadata_to_save(stage, session)
        # as in Spark 4.0; earlier versions use an RDD, which Spark Connect does not support
        line = frame_of_arrow(session, pa.table({"value": [params]}))
        line.coalesce(1).write.text(f"{path}/metadata")
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        table = pa.table({"number": pa.array(range(len(pieces)), pa.int32()), "piece": pieces})
        frame_of_arrow(session, table).coalesce(1).write.parquet(f"{path}/torch")
        written_pickles.add(digest_of(data))


class StageReader(MLReader):
    """Reads a stage that a :class:`StageWriter` wrote."""

    def __init__(self, cls: type, trust: bool = False):
        super().__init__()
        self._cls, self._trust = cls, trust

    def load(self, path: str) -> Any:  # a stage of the reader's class
        line = self.sparkSession.read.text(f"{path}/metadata").first()
        metadata = json.loads(cast("Row", line).value)
        expected = f"{self._cls.__module__}.{self._cls.__name__}"
        if metadata["class"] != expected:
            raise UsageError(
                f"{path!r} has a {metadata['class']}, not a {self._cls.__name__}; load it with "
                "the class that saved it",
                code="file-format",
                path=path,
            )
        arguments, attributes = self._unpickled(path)
        stage = self._cls(*arguments)
        vars(stage).update(attributes)
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage

    def _unpickled(self, path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unpickle the stage's content if it is trusted."""
        rows = self.sparkSession.read.parquet(f"{path}/torch").orderBy("number").collect()
        data = b"".join(row["piece"] for row in rows)
        if not (self._trust or _trusts.get() or digest_of(data) in written_pickles):
            raise UsageError(
                f"{path!r} has a pickled model, and loading it can run arbitrary code; if you "
                "trust "
                "its source, pass trust=True, or load a pipeline inside "
                "`with trusted_loading():`",
                code="file-untrusted",
                path=path,
            )
        with as_usage_error(
            f"The model in {path!r} cannot be loaded", text=str, code="file-damaged", path=path
        ):
            return cloudpickle.loads(data)


logger = logging.getLogger("bigdl.orca")

_UNLIMITED_EPOCHS = 1_000_000  # for training that only a trigger ends
_UNSAVED = {
    "validation": "setValidation",
    "train_summary": "setTrainSummary",
    "validation_summary": "setValidationSummary",
}


class _Storable(MLWritable, MLReadable):
    """Base class of stages that are saved with their pickled model."""

    @abstractmethod
    def _saved(self) -> tuple[tuple, dict[str, Any]]:
        """Return constructor arguments, and attributes set after construction, for pickling."""

    def write(self):
        return StageWriter(self)

    @classmethod
    def read(cls):
        return StageReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False):
        """Load a saved stage.

        Parameters
        ----------
        path : str
        trust : bool
            Confirm that the file is safe. The model is a pickle, which can run arbitrary code. It
            is only loaded if this process wrote it, with ``trust=True``, or inside
            :func:`trusted_loading`.
        """
        return StageReader(cls, trust).load(path)


@hide_frames
class NNModel(Model, ModelParams, _Storable):
    """A Transformer that adds the predictions of a PyTorch model.

    Parameters
    ----------
    model : nn.Module or callable
        A module, or ``model(config)`` that returns one.
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
        Preprocessing of a row's features; see :mod:`bigdl.orca.learn.nnframes.preprocessing`. By
        default, vectors and arrays are unchanged, and a float becomes an array of size 1.

    Notes
    -----
    ``transform`` is lazy and keeps all rows, their order and columns. The prediction is a double if
    there is one float per row, and a dense vector if there are several; integers and booleans keep
    their types.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.nnframes import NNModel
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [([-1.0],), ([2.0],)]
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features"])
    >>> predicted = NNModel(torch.nn.ReLU(), [1]).setPredictionCol("positive").transform(frame)
    >>> [row.positive for row in predicted.collect()]
    [0.0, 2.0]
    """

    def __init__(self, model: object, feature_preprocessing: object = None):
        super().__init__()
        self._setDefault(batchSize=32)
        self._model = as_module(model)
        self._preprocessing = as_preprocessing(feature_preprocessing)
        self._predictor: tuple | None = None  # (settings, Estimator)

    @property
    def model(self):
        """The PyTorch model or its creator."""
        return self._model

    def getModel(self):
        """Return the PyTorch model as a module."""
        return self._model if isinstance(self._model, nn.Module) else self._model({})

    def _transform(self, dataset):
        names = self._output_columns()
        frame = self._estimator(dataset).predict(
            dataset,
            batch_size=self.getOrDefault("batchSize"),
            feature_cols=[self.getFeaturesCol()],
            output_cols=names,
        )
        number = frame.schema[names[-1]].dataType
        if number.typeName() != "float":
            return frame
        return frame.withColumn(names[-1], F.col(quoted(names[-1])).cast("double"))

    def _output_columns(self) -> list[str]:
        return [self.getPredictionCol()]

    def _estimator(self, dataset):
        """Return an Estimator for a dataset, cached until the settings change."""
        preprocessing = preprocessing_for(self._preprocessing, dataset, self.getFeaturesCol())
        head = self._head()
        wanted = (preprocessing, head)
        if self._predictor is None or self._predictor[0] != wanted:
            module = with_preprocessing(self.getModel(), preprocessing)
            module = module if head is None else ClassHead(module, *head)
            self._predictor = (wanted, TorchEstimator.from_torch(model=module))
        return self._predictor[1]

    def _head(self) -> tuple | None:
        """Return the arguments of the model's :class:`ClassHead`, or None if it has no head."""
        return None

    def _saved(self):
        module = copy.deepcopy(self.getModel()).cpu()  # the machine that loads it may have no GPU
        return (module, self._preprocessing), {}


@hide_frames
class NNEstimator(Estimator, TrainingParams, _Storable):
    """A Spark ML Estimator that trains a PyTorch model on DataFrame columns.

    Parameters
    ----------
    model : nn.Module or callable
        A module, of which a copy is trained, or ``model(config)`` that returns one.
    criterion : nn.Module or callable
        A loss, as in ``Estimator.from_torch``.
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
        Preprocessing of a row's features; see :mod:`bigdl.orca.learn.nnframes.preprocessing`. By
        default, vectors and arrays are unchanged, and a float becomes an array of size 1.
    label_preprocessing : Preprocessing, callable or list of int, optional
        Preprocessing of a row's label; by default it gets the shape that the loss needs.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.nnframes import NNEstimator
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [([1.0, 0.0], 1.0), ([0.0, 1.0], 2.0)] * 4
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features", "label"])
    >>> estimator = NNEstimator(torch.nn.Linear(2, 1), torch.nn.MSELoss(), [2])
    >>> estimator = estimator.setBatchSize(8).setLearningRate(0.5).setMaxEpoch(50)
    >>> model = estimator.fit(frame)
    >>> round(model.transform(frame).first()["prediction"], 2)
    1.0
    """

    def __init__(
        self,
        model: object,
        criterion: object,
        feature_preprocessing: object = None,
        label_preprocessing: object = None,
    ):
        super().__init__()
        self._setDefault(
            batchSize=1,
            maxEpoch=50,
            learningRate=1e-3,
            learningRateDecay=0.0,
            workersPerNode=1,
            cachingSample=True,
            dataCacheLevel=["DRAM", None],
        )
        # PySpark's default is a hash of the class name, which would be the same for all fits
        self._defaultParamMap.pop(self.seed, None)
        self._model = as_module(model)
        self._criterion = as_loss(criterion)
        self._preprocessing = as_preprocessing(feature_preprocessing)
        self._label_preprocessing = as_preprocessing(label_preprocessing)
        self._options: dict[str, Any] = {}
        self.train_stats: list[dict] = []

    def _set_option(self, **options):
        self._options = {
            **self._options,
            **options,
        }  # a new dict, since copies of the stage share the old one
        return self

    def _set_summary(self, name: str, summary: Summary, cls: type[Summary]):
        if not isinstance(summary, cls):
            raise UsageError(
                f"Expected a {cls.__name__}, got {type(summary).__name__}", code="argument-type"
            )
        return self._set_option(**{name: summary})

    def setOptimMethod(self, val):
        """Set the optimizer; default SGD.

        Parameters
        ----------
        val : type, str, torch.optim.Optimizer or callable
            A class of ``torch.optim`` or its name (these get ``learningRate``), an instance created
            from the same model, an optimizer of :mod:`bigdl.orca.learn.optimizers`, a
            ``TorchOptim``, or a function of (model, config).
        """
        optimizer_of(getattr(val, "optimizer", val), 0.0)  # report invalid values now, not in a fit
        return self._set_option(optim=val)

    getOptimMethod = _option("optim")

    def setEndWhen(self, trigger: Trigger):
        """Set a condition that ends training, instead of the epoch limit ``maxEpoch``.

        ``MinLoss`` and ``MaxScore`` check the mean loss and the first metric at the end of every
        epoch. With them, a ``maxEpoch`` that was set explicitly remains a limit.
        """
        return self._set_option(end_when=Trigger.convert_trigger(trigger))

    getEndWhen = _option("end_when")

    def setValidation(self, trigger, val_df, val_method, batch_size: int):
        """Set the data and metrics of the validation that runs after every epoch.

        Parameters
        ----------
        trigger : Trigger
            Only ``EveryEpoch`` is supported; other triggers are replaced by it with a warning.
        val_df : pyspark.sql.DataFrame
            Validation data.
        val_method : list
            Metrics as in ``Estimator.from_torch``.
        batch_size : int
            Accepted for compatibility and ignored: the result does not depend on it.
        """
        trigger = Trigger.convert_trigger(trigger)
        if not isinstance(trigger, EveryEpoch):
            logger.warning("Validation runs after every epoch, not on %s", type(trigger).__name__)
        check_positive("batch_size", batch_size)
        methods = list(val_method) if isinstance(val_method, list | tuple) else [val_method]
        return self._set_option(validation=(trigger, val_df, methods, batch_size))

    #: trigger, DataFrame, metrics and batch size, or None.
    getValidation = _option("validation")

    def setConstantGradientClipping(self, min: float, max: float):
        """Clip every element of the gradient to a range."""
        if not min <= max:
            raise UsageError(
                f"min must be at most max, got min={min} and max={max}",
                code="argument-value",
                argument="min",
            )
        return self._set_option(clip=(float(min), float(max)))

    def setGradientClippingByL2Norm(self, clip_norm: float):
        """Clip the L2 norm of the whole gradient."""
        if not clip_norm > 0:
            raise UsageError(
                f"clip_norm must be greater than 0, got {clip_norm!r}",
                code="argument-value",
                argument="clip_norm",
            )
        return self._set_option(clip_norm=float(clip_norm))

    def clearGradientClipping(self):
        """Disable gradient clipping."""
        return self._set_option(clip=None, clip_norm=None)

    def setCheckpoint(self, path: str, trigger: Trigger, isOverWrite: bool = True):
        """Set the folder and trigger of checkpoints.

        Parameters
        ----------
        path : str
            Folder on storage that the driver and all workers share; every fit creates a subfolder.
            :meth:`Estimator.latest_checkpoint` returns the latest checkpoint.
        trigger : Trigger
            When to write a checkpoint.
        isOverWrite : bool
            Accepted for compatibility and ignored: a fit never modifies checkpoints of another.
        """
        return self._set_option(checkpoint=(path, Trigger.convert_trigger(trigger), isOverWrite))

    #: path, trigger and whether to overwrite, or None.
    getCheckpoint = _option("checkpoint")

    def setTrainSummary(self, summary: TrainSummary):
        """Record loss, learning rate and throughput of every step."""
        return self._set_summary("train_summary", summary, TrainSummary)

    getTrainSummary = _option("train_summary")

    def setValidationSummary(self, summary: ValidationSummary):
        """Record the metrics of every validation."""
        return self._set_summary("validation_summary", summary, ValidationSummary)

    getValidationSummary = _option("validation_summary")

    def setSamplePreprocessing(self, val: FeatureLabelPreprocessing):
        """Replace the preprocessing of features and labels."""
        if not isinstance(val, FeatureLabelPreprocessing):
            raise UsageError(
                "setSamplePreprocessing takes a FeatureLabelPreprocessing, got "
                f"{type(val).__name__}",
                code="argument-type",
                argument="val",
            )
        self._preprocessing, self._label_preprocessing = val.feature, val.label
        return self

    def _fit(self, dataset) -> NNModel:
        preprocessing = preprocessing_for(self._preprocessing, dataset, self.getFeaturesCol())
        estimator = self._new_estimator(preprocessing)
        options = self._options
        if clip := options.get("clip"):
            estimator.set_constant_gradient_clipping(*clip)
        if norm := options.get("clip_norm"):
            estimator.set_l2_norm_gradient_clipping(norm)
        for summary in filter(None, (self.getTrainSummary(), self.getValidationSummary())):
            estimator.set_tensorboard(summary.log_dir, summary.app_name)
            summary._estimator = estimator
        validation, checkpoint = self.getValidation(), self.getCheckpoint()
        labels = self._label_preprocessing
        try:
            self.train_stats = estimator.fit(
                self._with_labels(dataset),
                batch_size=self.getOrDefault("batchSize"),
                feature_cols=[self.getFeaturesCol()],
                label_cols=[self.getLabelCol()],
                validation_data=validation and self._with_labels(validation[1]),
                callbacks=labels and [PreprocessedLabels(labels)],
                seed=self.getSeed() if self.isDefined(self.seed) else None,
                checkpoint_trigger=checkpoint and checkpoint[1],
                **self._stop_arguments(),
            )
        except (WorkerError, UsageError) as error:
            better = self._clearer_error(getattr(error, "traceback", str(error)))
            if better is None:
                raise
            raise better from error
        module = estimator.get_model()
        if preprocessing is not None:
            module = module.model
        assert isinstance(module, nn.Module)
        return self._copyValues(self._new_model(module))

    def _new_estimator(self, preprocessing):
        method = self.getOptimMethod()
        scheduler, frequency = None, None
        if hasattr(method, "scheduler_creator"):  # a TorchOptim
            scheduler, frequency = method.scheduler_creator, method.step_frequency
            method = method.optimizer
        decay = self.getOrDefault("learningRateDecay")
        if decay and scheduler is None:
            scheduler = Default(decay)
        validation, checkpoint = self.getValidation(), self.getCheckpoint()
        return TorchEstimator.from_torch(
            model=with_preprocessing(self._model, preprocessing),
            optimizer=optimizer_of(method, self.getOrDefault("learningRate")),
            loss=self._criterion,
            metrics=validation and validation[2],
            workers_per_node=self.getOrDefault("workersPerNode"),
            scheduler_creator=scheduler,
            model_dir=checkpoint and checkpoint[0],
            scheduler_step_freq=frequency,
        )

    def _stop_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``fit`` that determine when training ends."""
        trigger = self.getEndWhen()
        if trigger is None:
            return {"epochs": self.getOrDefault("maxEpoch")}
        if type(trigger) is MaxEpoch:
            return {"epochs": trigger.max_epoch}
        if type(trigger) is MaxIteration:
            return {"max_steps": trigger.max_iteration}
        limit = self.getOrDefault("maxEpoch") if self.isSet("maxEpoch") else _UNLIMITED_EPOCHS
        return {"epochs": limit, "end_trigger": trigger}

    def _with_labels(self, dataset):
        """Return the dataset with labels converted to the class numbers that the loss expects."""
        return dataset

    def _clearer_error(self, text: str) -> UsageError | None:
        """Return a clearer error for a training error's text, or None to keep the original."""

    def _new_model(self, module) -> NNModel:
        return NNModel(module, self._preprocessing)

    def _saved(self):
        options = {k: v for k, v in self._options.items() if k not in _UNSAVED}
        left_out = [setter for k, setter in _UNSAVED.items() if self._options.get(k) is not None]
        if left_out:
            logger.warning(
                "The value of %s is not saved with the stage, since it belongs to this session; "
                "set "
                "it on the loaded stage again",
                " and ".join(left_out),
            )
        return (self._model, self._criterion, self._preprocessing), {
            "_label_preprocessing": self._label_preprocessing,
            "_options": options,
        }


def as_module(model: object) -> nn.Module | Callable[..., nn.Module]:
    """Return a module or model creator, unwrapping a ``TorchModel``."""
    model = model.to_pytorch() if hasattr(model, "to_pytorch") else model
    if isinstance(model, type) or not callable(model):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise UsageError(
            "model must be an nn.Module or a function model(config) that returns one, got "
            f"{'the class ' if isinstance(model, type) else ''}{name}",
            code="model-type",
            argument="model",
        )
    return model


def as_loss(criterion: object) -> Criterion:
    """Return a loss, unwrapping a ``TorchLoss``."""
    criterion = criterion.to_pytorch() if hasattr(criterion, "to_pytorch") else criterion
    if isinstance(criterion, type) or not callable(criterion):
        raise UsageError(
            f"criterion must be a loss such as torch.nn.MSELoss(), got {criterion!r}",
            code="argument-type",
            argument="criterion",
        )
    return criterion


def with_preprocessing(model: object, preprocessing: object) -> object:
    """Add input preprocessing to a model or model creator."""
    if preprocessing is None:
        return model
    if isinstance(model, nn.Module):
        return PreprocessedModel(model, preprocessing)

    def create(config):
        return PreprocessedModel(ModelParts(model, config=config).build_model(), preprocessing)

    return create


def preprocessing_for(preprocessing: object, dataset, column: str) -> object:
    """Return the user's preprocessing of a column, or the default for its type."""
    fields = {f.name: f.dataType.typeName() for f in dataset.schema.fields}
    if preprocessing is None and fields.get(column) in ("float", "double", "decimal"):
        return _ONE
    return preprocessing


_ONE = ScalarToTensor()


@hide_frames
class NNClassifierModel(NNModel, ClassifierParams):
    """A Transformer that adds the class predicted by a PyTorch model, as a double.

    A single output is the probability of class 1 and is compared with ``threshold``. With several
    outputs, the index of the largest one is the class, counted from 0 (or from 1, see
    :meth:`setZeroBasedLabel`).

    Parameters
    ----------
    model : nn.Module or callable
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
    logits : bool
        Whether a single output is a logit, as with ``BCEWithLogitsLoss``, rather than a
        probability.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.nnframes import NNClassifierModel
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [([0.9, 0.1],), ([0.2, 0.8],)]
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features"])
    >>> model = NNClassifierModel(torch.nn.Softmax(dim=1), [2])
    >>> [row.prediction for row in model.transform(frame).collect()]
    [0.0, 1.0]
    """

    def __init__(
        self, model: object, feature_preprocessing: object = None, *, logits: bool = False
    ):
        super().__init__(model, feature_preprocessing)
        self._setDefault(threshold=0.5, zeroBasedLabel=True)
        self._logits = logits

    def _output_columns(self):
        raw = self.getRawPredictionCol()
        return [*([raw] if raw else []), self.getPredictionCol()]

    def _head(self):
        first = 0 if self.getOrDefault("zeroBasedLabel") else 1
        return self.getThreshold(), self._logits, first, bool(self.getRawPredictionCol())

    def _saved(self):
        arguments, _ = super()._saved()
        return arguments, {"_logits": self._logits}


@hide_frames
class NNClassifier(NNEstimator, ClassifierParams):
    """A Spark ML Estimator that trains a PyTorch classifier.

    Labels are numbers from 0 to k - 1, as produced by Spark ML's StringIndexer. Programs for BigDL
    2.x whose labels start at 1 call ``setZeroBasedLabel(False)``.

    Parameters
    ----------
    model : nn.Module or callable
    criterion : nn.Module or callable
        ``CrossEntropyLoss`` or ``NLLLoss`` for a model with k outputs, ``BCELoss`` or
        ``BCEWithLogitsLoss`` for a single output.
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
    zero_based_label : bool
        Whether classes start at 0 instead of 1.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.nnframes import NNClassifier
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [([1.0, 0.0], 0.0), ([0.0, 1.0], 1.0)] * 4
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features", "label"])
    >>> classifier = NNClassifier(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), [2])
    >>> model = classifier.setBatchSize(8).setLearningRate(0.5).setMaxEpoch(20).fit(frame)
    >>> [row.prediction for row in model.transform(frame).limit(2).collect()]
    [0.0, 1.0]
    """

    def __init__(
        self,
        model: object,
        criterion: object,
        feature_preprocessing: object = None,
        *,
        zero_based_label: bool = True,
    ):
        super().__init__(model, criterion, feature_preprocessing)
        self._setDefault(threshold=0.5, zeroBasedLabel=True)
        if not zero_based_label:
            self._set(zeroBasedLabel=False)

    def _with_labels(self, dataset):
        name = self.getLabelCol()
        if self.getOrDefault("zeroBasedLabel") or name not in dataset.columns or self._is_binary:
            return dataset
        return dataset.withColumn(name, F.col(quoted(name)) - 1)

    @property
    def _is_binary(self) -> bool:
        """True if the loss takes a single output per row, so that the classes are 0 and 1."""
        return isinstance(self._criterion, nn.BCELoss | nn.BCEWithLogitsLoss)

    def _clearer_error(self, text):
        if "out of bounds" not in text or "Target" not in text:
            return None
        first = 0 if self.getOrDefault("zeroBasedLabel") else 1
        advice = "if they start at 1, call setZeroBasedLabel(False)"
        if first:
            advice = "if they start at 0, call setZeroBasedLabel(True)"
        return UsageError(
            f"A label in column '{self.getLabelCol()}' is not a class of the model, whose classes "
            f"are {first} to the number of outputs{' - 1' if not first else ''}; {advice}",
            code="data-value",
        )

    def _new_model(self, module):
        logits = isinstance(self._criterion, nn.BCEWithLogitsLoss)
        return NNClassifierModel(module, self._preprocessing, logits=logits)
