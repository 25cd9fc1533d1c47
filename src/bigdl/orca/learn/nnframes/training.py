"""What a training stage is told besides its params: things that are no plain values."""

from __future__ import annotations

import logging
from typing import Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.nnframes.optimizers import optimizer_of
from bigdl.orca.learn.nnframes.preprocessing import FeatureLabelPreprocessing
from bigdl.orca.learn.nnframes.summary import TrainSummary, ValidationSummary
from bigdl.training.position import EveryEpoch, Trigger

__all__ = ["TrainingOptions"]

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
