"""Parameters of the stages, and what fits take from them: optimizers, preprocessing, summaries."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasSeed,
    HasThreshold,
)

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.nnframes.preprocessing import FeatureLabelPreprocessing
from bigdl.training.position import EveryEpoch, Trigger

if TYPE_CHECKING:
    from bigdl.orca.learn.pytorch import PyTorchEstimator

T = TypeVar("T")


def _rate(name: str, value: Any) -> float:
    return float(check_number(name, value, 0))


def _flag(name: str, value: Any) -> bool:
    return TypeConverters.toBoolean(value)


def _text(name: str, value: Any) -> str:
    return TypeConverters.toString(value)


def _with_params(**params: tuple[str, Callable | None]) -> Callable[[type[T]], type[T]]:
    """Return a decorator that gives a class parameters, with a getter and a chaining setter each.

    Parameters
    ----------
    **params : tuple of str and callable
        What the parameter is, and ``check(name, value)`` that returns its value. What the class
        has already stays.
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
    batchSize=("Rows of a batch, over all workers together.", check_positive),
    featuresCol=("The column of the model's input: vectors, arrays or numbers.", None),
    predictionCol=("The column that ``transform`` adds.", None),
)
class ModelParams(HasFeaturesCol, HasPredictionCol):
    """Of every stage that has a model."""


@_with_params(
    maxEpoch=("Passes over all rows, unless ``setEndWhen`` says when to stop.", check_positive),
    learningRate=("Rate of the default optimizer, and of a class or a name of one.", _rate),
    learningRateDecay=("After n steps the rate is ``learningRate / (1 + n * value)``.", _rate),
    workersPerNode=("Workers on every node, which share its cores.", check_positive),
    seed=("Seed of weights, shuffling and dropout; default random.", None),
    labelCol=("The column of the targets: numbers, arrays or vectors.", None),
    cachingSample=("Accepted for compatibility: workers keep their rows in mapped files.", _flag),
    dataCacheLevel=("Accepted for compatibility, as ``cachingSample``.", None),
)
class TrainingParams(ModelParams, HasLabelCol, HasSeed):
    """Of every stage that trains."""

    def setDataCacheLevel(self, level: str, numSlice: int | None = None):
        """Accepted for compatibility: every worker keeps its rows in a mapped file.

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
    threshold=("Probability above which a model of one output means class 1.", None),
    zeroBasedLabel=("The first of several classes is 0.0 (default), else 1.0 (BigDL 2.x).", _flag),
    rawPredictionCol=("Another column, for the scores of all classes, e.g. for a ROC.", _text),
)
class ClassifierParams(HasThreshold):
    """Of classifiers, trained or not."""

    def getRawPredictionCol(self) -> str | None:
        return self.getOrDefault("rawPredictionCol") if self.isDefined("rawPredictionCol") else None


class _OptimizerOf:
    """A creator: an optimizer class of torch with a learning rate."""

    def __init__(self, cls, lr: float):
        self.cls, self.lr = cls, lr

    def __call__(self, model, config):
        return self.cls(model.parameters(), lr=self.lr)


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
    if method is None:
        return _OptimizerOf(torch.optim.SGD, lr)
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
        return _OptimizerOf(method, lr)
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
        self._estimator: PyTorchEstimator | None = None  # of the last fit

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

    def __repr__(self):
        return f"{type(self).__name__}({self.log_dir!r}, {self.app_name!r})"


class TrainSummary(Summary):
    """``Loss``, ``LearningRate`` and ``Throughput`` of every step."""

    _getter = "get_train_summary"


class ValidationSummary(Summary):
    """The loss and the metrics of every validation, by their names."""

    _getter = "get_validation_summary"


logger = logging.getLogger("bigdl.orca")


def _option(name: str) -> Any:
    """Return the method that returns an option that was set, or None."""
    return lambda self: self._options.get(name)


class TrainingOptions:
    """Setters that chain, for the stage whose ``_options`` dict holds what they are given."""

    _options: dict[str, Any]

    def _set_option(self, **options):
        self._options = {**self._options, **options}  # copies of the stage share the old dict
        return self

    def _set_summary(self, name: str, summary: Summary, cls: type[Summary]):
        if not isinstance(summary, cls):
            raise UsageError(f"A {cls.__name__} is expected, got {type(summary).__name__}")
        return self._set_option(**{name: summary})

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

    getOptimMethod = _option("optim")

    def setEndWhen(self, trigger: Trigger):
        """When to stop, instead of after ``maxEpoch`` epochs.

        ``MinLoss`` and ``MaxScore`` look at the mean loss and the first metric at the end of every
        epoch; a ``maxEpoch`` that was set remains a limit then.
        """
        return self._set_option(end_when=Trigger.convert_trigger(trigger))

    getEndWhen = _option("end_when")

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

    #: trigger, DataFrame, metrics and batch size, or None.
    getValidation = _option("validation")

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

    #: path, trigger and whether to overwrite, or None.
    getCheckpoint = _option("checkpoint")

    def setTrainSummary(self, summary: TrainSummary):
        """Record loss, learning rate and throughput of every step."""
        return self._set_summary("train_summary", summary, TrainSummary)

    getTrainSummary = _option("train_summary")

    def setValidationSummary(self, summary: ValidationSummary):
        """Record the figures of every validation."""
        return self._set_summary("validation_summary", summary, ValidationSummary)

    getValidationSummary = _option("validation_summary")

    def setSamplePreprocessing(self, val: FeatureLabelPreprocessing):
        """Replace the preprocessing of features and of labels."""
        if not isinstance(val, FeatureLabelPreprocessing):
            raise UsageError(
                "setSamplePreprocessing takes a FeatureLabelPreprocessing, got "
                f"{type(val).__name__}"
            )
        self._preprocessing, self._label_preprocessing = val.feature, val.label
        return self
