"""Modules around the user's model: preprocessing before it, the choice of a class after it."""

from __future__ import annotations

import torch
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.callbacks.base import Callback

__all__ = ["ClassHead", "Prepared", "PreparedCreator", "PreparedLabels"]


class Prepared(nn.Module):
    """A model that takes the features column as it is.

    Parameters
    ----------
    model : torch.nn.Module
    preprocessing : Preprocessing
    """

    def __init__(self, model: nn.Module, preprocessing):
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing

    def forward(self, rows):
        made = self.preprocessing.batch(rows)
        return self.model(*made) if isinstance(made, tuple) else self.model(made)


class PreparedCreator:
    """A creator of :class:`Prepared` from a creator of the model."""

    def __init__(self, creator, preprocessing):
        self.creator, self.preprocessing = creator, preprocessing

    def __call__(self, config):
        model = self.creator(config)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"The model creator must return an nn.Module, it returned {type(model).__name__}"
            )
        return Prepared(model, self.preprocessing)


class PreparedLabels(Callback):
    """Labels go through their preprocessing before the loss and the metrics see them."""

    def __init__(self, preprocessing):
        self.preprocessing = preprocessing

    def before_iter(self, runner):
        if runner.batch is not None:
            *features, target = runner.batch
            runner.batch = [*features, self.preprocessing.batch(target)]


class ClassHead(nn.Module):
    """The class that a classifier's outputs stand for.

    One output is the probability of the second class (or its logit), several are scores.

    Parameters
    ----------
    model : torch.nn.Module
    threshold : float
        Probability above which a single output means the second class.
    logits : bool
        Whether a single output is a logit.
    first : int
        Number of the first class of several.
    raw : bool
        Give the scores of the classes too, before the class.
    """

    def __init__(self, model, *, threshold: float, logits: bool, first: int, raw: bool):
        super().__init__()
        self.model = model
        self.threshold, self.logits, self.first, self.raw = threshold, logits, first, raw

    def forward(self, *inputs):
        scores = self.model(*inputs)
        if not isinstance(scores, torch.Tensor):
            raise UsageError(
                "A classifier must return one tensor of scores, it returned "
                f"{type(scores).__name__}"
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
