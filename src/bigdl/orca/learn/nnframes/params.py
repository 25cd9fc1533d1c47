"""Parameters of the stages, and what fits take from them: optimizers, preprocessing, summaries."""

from __future__ import annotations

import logging
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasPredictionCol, HasSeed

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.nnframes.preprocessing import FeatureLabelPreprocessing
from bigdl.training.position import EveryEpoch, Trigger

__all__ = [
    "ClassifierParams",
    "IterationDecay",
    "ModelParams",
    "OptimizerOf",
    "Summary",
    "TrainSummary",
    "TrainingOptions",
    "TrainingParams",
    "ValidationSummary",
    "optimizer_of",
]


def _param(name: str, doc: str, converter=None) -> Any:
    return Param(Params._dummy(), name, doc, typeConverter=converter)


class ModelParams(HasFeaturesCol, HasPredictionCol):
    """Of every stage that has a model."""

    batchSize = _param("batchSize", "rows of a batch, over all workers", TypeConverters.toInt)

    def setBatchSize(self, value: int):
        """Rows of a batch, over all workers together."""
        return self._set(batchSize=check_positive("batchSize", value))

    def getBatchSize(self) -> int:
        return self.getOrDefault(self.batchSize)

    def setFeaturesCol(self, value: str):
        """The column of the model's input: vectors, arrays or numbers."""
        return self._set(featuresCol=value)

    def setPredictionCol(self, value: str):
        """The column that ``transform`` adds."""
        return self._set(predictionCol=value)


class TrainingParams(ModelParams, HasLabelCol, HasSeed):
    """Of every stage that trains."""

    maxEpoch = _param("maxEpoch", "how often every row is seen", TypeConverters.toInt)
    learningRate = _param("learningRate", "rate of the optimizer", TypeConverters.toFloat)
    learningRateDecay = _param(
        "learningRateDecay",
        "after n steps the rate is learningRate / (1 + n * this)",
        TypeConverters.toFloat,
    )
    workersPerNode = _param("workersPerNode", "workers on every node", TypeConverters.toInt)
    cachingSample = _param("cachingSample", "accepted: data is always kept", None)
    dataCacheLevel = _param("dataCacheLevel", "accepted: data lies in mapped files", None)

    def setMaxEpoch(self, value: int):
        """How often every row is seen, unless ``setEndWhen`` says when to stop."""
        return self._set(maxEpoch=check_positive("maxEpoch", value))

    def getMaxEpoch(self) -> int:
        return self.getOrDefault(self.maxEpoch)

    def setLearningRate(self, value: float):
        """Rate of the default optimizer and of those given as a class or a name."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"learningRate must be a number of at least 0, got {value!r}")
        return self._set(learningRate=float(value))

    def getLearningRate(self) -> float:
        return self.getOrDefault(self.learningRate)

    def setLearningRateDecay(self, value: float):
        """After n steps the rate is ``learningRate / (1 + n * value)``."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"learningRateDecay must be a number of at least 0, got {value!r}")
        return self._set(learningRateDecay=float(value))

    def getLearningRateDecay(self) -> float:
        return self.getOrDefault(self.learningRateDecay)

    def setWorkersPerNode(self, value: int):
        """Workers on every node; each gets its share of the node's cores."""
        return self._set(workersPerNode=check_positive("workersPerNode", value))

    def getWorkersPerNode(self) -> int:
        return self.getOrDefault(self.workersPerNode)

    def setSeed(self, value: int):
        """Seed of weights, shuffling and dropout; default random."""
        return self._set(seed=value)

    def setLabelCol(self, value: str):
        """The column of the targets: numbers, arrays or vectors."""
        return self._set(labelCol=value)

    def setCachingSample(self, value: bool):
        """Accepted for compatibility: every worker keeps its rows in a mapped file."""
        return self._set(cachingSample=bool(value))

    def isCachingSample(self) -> bool:
        return self.getOrDefault(self.cachingSample)

    def setDataCacheLevel(self, level: str, numSlice: int | None = None):
        """Accepted for compatibility: every worker keeps its rows in a mapped file.

        Parameters
        ----------
        level : str
            ``"DRAM"`` or ``"DISK_AND_DRAM"``.
        numSlice : int, optional
        """
        if level not in ("DRAM", "DISK_AND_DRAM"):
            raise UsageError(f'dataCacheLevel must be "DRAM" or "DISK_AND_DRAM", got {level!r}')
        return self._set(dataCacheLevel=[level, numSlice])

    def getDataCacheLevel(self):
        level, slices = self.getOrDefault(self.dataCacheLevel)
        return level if slices is None else (level, slices)


class ClassifierParams(Params):
    """Of classifiers, trained or not."""

    threshold = _param(
        "threshold", "probability above which one output means class 1", TypeConverters.toFloat
    )
    zeroBasedLabel = _param(
        "zeroBasedLabel", "whether classes count from 0 or from 1", TypeConverters.toBoolean
    )
    rawPredictionCol = _param(
        "rawPredictionCol", "column for the scores of the classes", TypeConverters.toString
    )

    def setThreshold(self, value: float):
        """Probability above which a model of one output means class 1; default 0.5."""
        return self._set(threshold=value)

    def getThreshold(self) -> float:
        return self.getOrDefault(self.threshold)

    def setZeroBasedLabel(self, value: bool):
        """Whether the first of several classes is 0.0 (default), or 1.0 as in BigDL 2.x."""
        return self._set(zeroBasedLabel=value)

    def isZeroBasedLabel(self) -> bool:
        return self.getOrDefault(self.zeroBasedLabel)

    def setRawPredictionCol(self, value: str):
        """Add a column of the scores of all classes too, e.g. for the area under a ROC curve."""
        return self._set(rawPredictionCol=value)

    def getRawPredictionCol(self) -> str | None:
        return self.getOrDefault(self.rawPredictionCol) if self._has_raw else None

    @property
    def _has_raw(self) -> bool:
        return self.isDefined(self.rawPredictionCol)


class OptimizerOf:
    """A creator: an optimizer class of torch with a learning rate."""

    def __init__(self, cls, lr: float):
        self.cls, self.lr = cls, lr

    def __call__(self, model, config):
        return self.cls(model.parameters(), lr=self.lr)


class IterationDecay:
    """A scheduler's creator: after n steps the rate is ``lr / (1 + n * decay)``."""

    def __init__(self, decay: float):
        self.decay = decay

    def __call__(self, optimizer, config):
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, self._factor)

    def _factor(self, step: int) -> float:
        return 1.0 / (1.0 + step * self.decay)


def optimizer_of(method: Any, lr: float) -> Any:
    """What ``Estimator.from_torch`` takes as ``optimizer=``.

    Parameters
    ----------
    method : None, str, type, torch.optim.Optimizer or callable
        None is SGD.  A class of torch, or its name, gets the learning rate `lr`; an optimizer
        instance (of a model instance), an optimizer of Orca and a creator ``f(model, config)``
        bring their own.
    lr : float
    """
    import torch

    if method is None:
        return OptimizerOf(torch.optim.SGD, lr)
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
                f"{', '.join(sorted(cls.__name__ for cls in known.values()))}"
            )
        method = known[method.lower()]
    if isinstance(method, type) and issubclass(method, torch.optim.Optimizer):
        return OptimizerOf(method, lr)
    if isinstance(method, torch.optim.Optimizer) or (
        callable(method) and not isinstance(method, type)
    ):
        return method
    raise UsageError(
        "setOptimMethod takes an optimizer of torch (a class, its name, or an instance made from "
        "the same model), one of bigdl.orca.learn.optimizers, or a function of (model, config), "
        f"got {method!r}"
    )


class Summary:
    """Where the figures of a training go; read them here when it has ended.

    Parameters
    ----------
    log_dir : str
        TensorBoard finds the figures below ``<log_dir>/<app_name>``.
    app_name : str
    """

    _getter = ""

    def __init__(self, log_dir: str, app_name: str):
        self.log_dir, self.app_name = log_dir, app_name
        self._estimator = None

    def read_scalar(self, tag: str) -> list:
        """The figures under a tag, as ``[step, value, time]``.

        Raises
        ------
        UsageError
            Before a ``fit`` that this summary was given to.
        """
        if self._estimator is None:
            raise UsageError(
                f"{type(self).__name__} has no figures yet; give it to an NNEstimator and call fit"
            )
        return getattr(self._estimator, self._getter)(tag)

    def _take(self, estimator) -> None:
        self._estimator = estimator

    def __repr__(self):
        return f"{type(self).__name__}({self.log_dir!r}, {self.app_name!r})"


class TrainSummary(Summary):
    """``Loss``, ``LearningRate`` and ``Throughput`` of every step."""

    _getter = "get_train_summary"


class ValidationSummary(Summary):
    """The loss and the metrics of every validation, by their names."""

    _getter = "get_validation_summary"


logger = logging.getLogger("bigdl.orca")


class TrainingOptions:
    """Setters that chain, for the stage whose ``_options`` dict holds what they are given."""

    _options: dict[str, Any]

    def _set_option(self, **options):
        self._options = {**self._options, **options}  # copies of the stage share the old dict
        return self

    def setOptimMethod(self, val):
        """The optimizer; default SGD.

        Parameters
        ----------
        val : type, str, torch.optim.Optimizer or callable
            A class of ``torch.optim`` or its name (these get ``learningRate``), an instance made
            from the same model, an optimizer of :mod:`bigdl.orca.learn.optimizers`, a
            ``TorchOptim``, or a function of (model, config).
        """
        optimizer_of(getattr(val, "optimizer", val), 0.0)  # refuses now what would fail later
        return self._set_option(optim=val)

    def getOptimMethod(self):
        return self._options.get("optim")

    def setEndWhen(self, trigger: Trigger):
        """When to stop, instead of after ``maxEpoch`` epochs.

        ``MinLoss`` and ``MaxScore`` look at the mean loss and the first metric at the end of every
        epoch; a ``maxEpoch`` that was set remains a limit then.
        """
        return self._set_option(end_when=Trigger.convert_trigger(trigger))

    def getEndWhen(self):
        return self._options.get("end_when")

    def setValidation(self, trigger, val_df, val_method, batch_size: int):
        """Evaluate during training, after every epoch.

        Parameters
        ----------
        trigger : Trigger
            Any other than ``EveryEpoch`` is taken as it, with a warning.
        val_df : pyspark.sql.DataFrame
        val_method : list
            Metrics as in ``Estimator.from_torch``.
        batch_size : int
            Accepted for compatibility: validation does not depend on it, so training's is taken.
        """
        trigger = Trigger.convert_trigger(trigger)
        if not isinstance(trigger, EveryEpoch):
            logger.warning(
                "Validation takes place after every epoch, not by %s", type(trigger).__name__
            )
        check_positive("batch_size", batch_size)
        methods = list(val_method) if isinstance(val_method, list | tuple) else [val_method]
        return self._set_option(validation=(trigger, val_df, methods, batch_size))

    def getValidation(self):
        """Trigger, DataFrame, metrics and batch size, or None."""
        return self._options.get("validation")

    def setConstantGradientClipping(self, min: float, max: float):
        """Bring every element of the gradient into a range."""
        if not min <= max:
            raise UsageError(f"The range of gradients must be from low to high, got {min} to {max}")
        return self._set_option(clip=(float(min), float(max)))

    def setGradientClippingByL2Norm(self, clip_norm: float):
        """Scale the whole gradient down to an L2 norm."""
        if not clip_norm > 0:
            raise UsageError(f"clip_norm must be greater than 0, got {clip_norm!r}")
        return self._set_option(clip_norm=float(clip_norm))

    def clearGradientClipping(self):
        """Do not limit gradients."""
        return self._set_option(clip=None, clip_norm=None)

    def setCheckpoint(self, path: str, trigger: Trigger, isOverWrite: bool = True):
        """Write checkpoints, of which :meth:`Estimator.latest_checkpoint` finds the newest.

        Parameters
        ----------
        path : str
            Folder that the driver and all workers share; every fit makes its own below it.
        trigger : Trigger
        isOverWrite : bool
            Accepted for compatibility: a fit never touches the checkpoints of another.
        """
        return self._set_option(checkpoint=(path, Trigger.convert_trigger(trigger), isOverWrite))

    def getCheckpoint(self):
        """Path, trigger and whether to overwrite, or None."""
        return self._options.get("checkpoint")

    def setTrainSummary(self, summary: TrainSummary):
        """Record loss, learning rate and throughput of every step."""
        return self._set_option(train_summary=_summary(summary, TrainSummary))

    def getTrainSummary(self):
        return self._options.get("train_summary")

    def setValidationSummary(self, summary: ValidationSummary):
        """Record the figures of every validation."""
        return self._set_option(validation_summary=_summary(summary, ValidationSummary))

    def getValidationSummary(self):
        return self._options.get("validation_summary")

    def setSamplePreprocessing(self, val: FeatureLabelPreprocessing):
        """Replace the preprocessing of features and of labels."""
        if not isinstance(val, FeatureLabelPreprocessing):
            raise UsageError(
                "setSamplePreprocessing takes a FeatureLabelPreprocessing, got "
                f"{type(val).__name__}"
            )
        self._preprocessing, self._label_preprocessing = val.feature, val.label
        return self


def _summary(given, cls):
    if not isinstance(given, cls):
        raise UsageError(f"A {cls.__name__} is expected, got {type(given).__name__}")
    return given
