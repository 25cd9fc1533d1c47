"""Conversion of a classifier's outputs to classes or probabilities.

``predict(..., output="class")`` uses it. The loss of the training determines the meaning of the
outputs: logits, probabilities or log-probabilities of exclusive classes or of independent labels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.inference.shipping import LoadedModel, ShippedModel, WrappedModel
from bigdl.orca.learn.prediction.outputs import as_array

ScoreForm = Literal["logits", "probabilities", "log_probabilities"]

OUTPUTS = ("raw", "class", "probability")
"""Values of ``output=`` of ``predict``."""


@dataclass(frozen=True)
class Scores:
    """Type of a classifier's scores, their class axis, and whether the classes are exclusive.

    Attributes
    ----------
    form : {"logits", "probabilities", "log_probabilities"}
    are_exclusive : bool
        True for exclusive classes with one score each; False for independent labels, such as the
        single output of a binary classifier.
    axis : int
        Axis of the classes.
    """

    form: ScoreForm
    are_exclusive: bool
    axis: int = 1

    def classes(self, scores: np.ndarray) -> np.ndarray:
        """Return int64 classes; independent labels are 1 if their probability is at least 0.5.

        The axis of a single label is dropped, so that a binary classifier returns one integer per
        row.
        """
        if self.are_exclusive:
            return np.asarray(scores.argmax(self.axis), np.int64)
        if scores.ndim > 1 and scores.shape[-1] == 1:
            scores = scores[..., 0]
        return np.asarray(scores >= (0.0 if self.form == "logits" else 0.5), np.int64)

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Return probabilities with the shape and dtype of the scores."""
        if self.form == "probabilities":
            return scores
        if self.form == "log_probabilities":
            return np.asarray(np.exp(scores), scores.dtype)
        exact = scores.astype(np.float64)
        if self.are_exclusive:
            powers = np.exp(exact - exact.max(self.axis, keepdims=True))
            exact = powers / powers.sum(self.axis, keepdims=True)
        else:
            exact = np.exp(-np.logaddexp(0.0, -exact))
        return exact.astype(scores.dtype)


@dataclass(frozen=True)
class ClassifierModel(WrappedModel):
    """A loaded model whose outputs are converted to classes or probabilities.

    Attributes
    ----------
    model : LoadedModel
    scores : Scores
    output : {"class", "probability"}
    """

    model: LoadedModel
    scores: Scores
    output: str

    def __call__(self, batch: list) -> np.ndarray:
        """Return the classes or probabilities of a batch of numpy columns."""
        returned = self.model(batch)
        if isinstance(returned, list | tuple) and len(returned) == 1:
            (returned,) = returned
        if isinstance(returned, dict | list | tuple):
            raise UsageError(
                f"output={self.output!r} needs a model with one output, but it returned "
                f'{len(returned)}; use output="raw"',
                code="model-output",
                argument="output",
            )
        scores = as_array(returned)
        is_short = self.scores.are_exclusive and scores.ndim < 2
        if is_short or scores.dtype.kind != "f":
            raise UsageError(
                f"output={self.output!r} needs a model that returns floating-point scores"
                + (" of each class" if self.scores.are_exclusive else "")
                + f', but it returned {scores.dtype} of shape {scores.shape}; use output="raw"',
                code="model-output",
                argument="output",
            )
        return (
            self.scores.classes(scores)
            if self.output == "class"
            else self.scores.probabilities(scores)
        )


@dataclass(frozen=True)
class ShippedClassifier:
    """A shipped model whose outputs the tasks convert to classes or probabilities.

    Attributes
    ----------
    shipped : ShippedModel
    scores : Scores
    output : {"class", "probability"}
    """

    shipped: ShippedModel
    scores: Scores
    output: str

    @property
    def owner(self) -> object:
        """The SparkContext that broadcast the model."""
        return self.shipped.owner

    def in_task(self, threads: int) -> Callable[[], contextlib.AbstractContextManager[LoadedModel]]:
        """Return a picklable function that loads the model in a task, as ShippedModel does."""
        return functools.partial(_in_task, self.shipped.in_task(threads), self.scores, self.output)

    def load(self) -> LoadedModel:
        """Load the model on the driver's CPU."""
        return ClassifierModel(self.shipped.load(), self.scores, self.output)


@contextlib.contextmanager
def _in_task(
    model_of_task: Callable[[], contextlib.AbstractContextManager[LoadedModel]],
    scores: Scores,
    output: str,
) -> Iterator[LoadedModel]:
    with model_of_task() as model:
        yield ClassifierModel(model, scores, output)


def unknown_scores(output: str, loss: str) -> UsageError:
    """Return the error for a loss from which the type of the model's scores cannot be inferred."""
    return UsageError(
        f"output={output!r} needs a loss that determines the meaning of the outputs, such as "
        f'CrossEntropyLoss or BCEWithLogitsLoss, but the loss is {loss}; use output="raw" and '
        "convert the predictions",
        code="argument-conflict",
        argument="output",
    )
