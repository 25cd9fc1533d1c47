"""NNClassifier and NNClassifierModel: the stages of classification."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.nnframes.params import ClassifierParams
from bigdl.orca.learn.nnframes.stages import NNEstimator, NNModel, _quoted

__all__ = ["NNClassifier", "NNClassifierModel"]


class NNClassifierModel(NNModel, ClassifierParams):
    """A Transformer that adds the class that a PyTorch model chooses, as a double.

    A model of one output gives the probability of class 1 and is compared to ``threshold``; of
    several outputs the greatest one is the class, counted from 0 (or from 1, see
    :meth:`setZeroBasedLabel`).

    Parameters
    ----------
    model : torch.nn.Module or callable
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
    logits : bool
        Whether a single output is a logit, as ``BCEWithLogitsLoss`` trains it, rather than a
        probability.
    """

    def __init__(self, model: Any, feature_preprocessing: Any = None, *, logits: bool = False):
        super().__init__(model, feature_preprocessing)
        self._setDefault(threshold=0.5, zeroBasedLabel=True)
        self._logits = logits

    def _output_columns(self):
        raw = [self.getRawPredictionCol()] if self._has_raw else []
        return [*raw, self.getPredictionCol()]

    def _head_key(self):
        return self.getThreshold(), self.isZeroBasedLabel(), self._has_raw, self._logits

    def _head(self, module):
        from bigdl.orca.learn.nnframes.modules import ClassHead

        return ClassHead(
            module,
            threshold=self.getThreshold(),
            logits=self._logits,
            first=0 if self.isZeroBasedLabel() else 1,
            raw=self._has_raw,
        )

    def _files(self):
        return {**super()._files(), "logits": b"1" if self._logits else b"0"}

    @classmethod
    def _from_files(cls, files, unpickled):
        stage = super()._from_files(files, unpickled)
        stage._logits = files["logits"] == b"1"
        return stage


class NNClassifier(NNEstimator, ClassifierParams):
    """An Estimator that trains a PyTorch model to choose a class.

    Labels are numbers from 0 to k - 1, as Spark ML's StringIndexer makes them; programs for BigDL
    2.x whose labels start at 1 call ``setZeroBasedLabel(False)``.

    Parameters
    ----------
    model : torch.nn.Module or callable
    criterion : torch.nn.Module or callable
        ``CrossEntropyLoss`` or ``NLLLoss`` for a model of k outputs, ``BCELoss`` or
        ``BCEWithLogitsLoss`` for one output.
    feature_preprocessing : Preprocessing, callable, list of int or list of lists, optional
    zero_based_label : bool
        Whether the first of several classes is 0 or 1.
    """

    def __init__(
        self,
        model: Any,
        criterion: Any,
        feature_preprocessing: Any = None,
        *,
        zero_based_label: bool = True,
    ):
        super().__init__(model, criterion, feature_preprocessing)
        self._setDefault(threshold=0.5, zeroBasedLabel=True)
        if not zero_based_label:
            self.setZeroBasedLabel(False)

    def _labelled(self, dataset):
        from pyspark.sql import functions as F

        name = self.getLabelCol()
        if self.isZeroBasedLabel() or name not in dataset.columns or self._is_binary:
            return dataset
        return dataset.withColumn(name, F.col(_quoted(name)) - 1)

    @property
    def _is_binary(self) -> bool:
        """Whether the loss takes one output, whose classes are 0 and 1 in any counting."""
        from torch import nn

        return isinstance(self._criterion, nn.BCELoss | nn.BCEWithLogitsLoss)

    def _explained(self, error: WorkerError) -> Exception:
        if "out of bounds" not in error.traceback or "Target" not in error.traceback:
            return error
        first = 0 if self.isZeroBasedLabel() else 1
        advice = "if they start at 1, call setZeroBasedLabel(False)"
        if first:
            advice = "if they start at 0, call setZeroBasedLabel(True)"
        return UsageError(
            f"A label in column '{self.getLabelCol()}' is no class of the model, which counts "
            f"them from {first} to its number of outputs{' - 1' if not first else ''}; {advice}"
        )

    def _new_model(self, module):
        from torch import nn

        logits = isinstance(self._criterion, nn.BCEWithLogitsLoss)
        return NNClassifierModel(module, self._preprocessing, logits=logits)

    @classmethod
    def _from_files(cls, files, unpickled):
        parts = unpickled(files["parts.pkl"])
        stage = cls(parts["model"], parts["criterion"], parts["preprocessing"])
        stage._label_preprocessing, stage._options = parts["label_preprocessing"], parts["options"]
        return stage
