"""From the rows of a worker to what a Keras model takes: ``(x, y)`` or ``(x, y, weights)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.texts import TEXT

__all__ = ["Assembly", "made_up", "with_class_weight"]


@dataclass(frozen=True)
class Assembly:
    """How the columns of a batch become the arguments of a training step.

    Attributes
    ----------
    names : sequence of str or None
        Of the feature columns; a model whose input is a dict gets them by name.
    by_name : bool
        Whether it is such a model.
    weighted : bool
        Whether the last label column holds the weights of the rows.
    class_weight : dict of int to float, optional
    outputs : sequence of str, optional
        Of a model whose output is a dict, the keys that the target columns belong to.
    """

    names: Sequence[str] | None = None
    by_name: bool = False
    weighted: bool = False
    class_weight: dict[int, float] | None = None
    outputs: Sequence[str] | None = None

    @classmethod
    def of(cls, model, names, labels=None, *, weighted=False, class_weight=None) -> Assembly:
        """For a model and the columns that it is given, features and targets."""
        by_name = bool(names) and isinstance(_form_of(model, "input"), dict)
        output, outputs = _form_of(model, "output"), None
        if isinstance(output, dict):
            targets = list(labels or ())[: -1 if weighted else None]
            outputs = targets if set(targets) == set(output) else list(output)
        return cls(names, by_name, weighted, class_weight, outputs)

    def inputs(self, features: Sequence) -> Any:
        """``x`` of the feature columns."""
        if self.by_name:
            return dict(zip(self.names or (), features, strict=True))
        return features[0] if len(features) == 1 else tuple(features)

    def __call__(self, columns: Sequence) -> tuple:
        """A batch of the feature columns and the target, or a tuple of targets."""
        if isinstance(columns, dict):
            raise UsageError(
                "The loader gives batches that are dicts; let it give (inputs, targets), where the "
                "inputs may be a dict"
            )
        *features, target = columns
        weights = None
        if self.weighted:
            *targets, weights = target
            target = targets[0] if len(targets) == 1 else tuple(targets)
        if self.outputs and isinstance(target, tuple) and len(target) == len(self.outputs):
            # Keras would take a tuple for that of the keys in alphabetical order
            target = dict(zip(self.outputs, target, strict=True))
        batch = (self.inputs(features), target)
        batch = batch if weights is None else (*batch, weights)
        return batch if self.class_weight is None else with_class_weight(batch, self.class_weight)


def _form_of(model, name: str):
    """A functional model's ``input`` or ``output``; None of one that is not built yet."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError):
        return None


def with_class_weight(batch: tuple, table: dict[int, float]) -> tuple:
    """A batch whose rows weigh what their class does, besides their own weight.

    Classes are whole numbers, or the largest entry of a one-hot row; one without an entry weighs 1.
    """
    import numpy as np
    import torch

    x, y, *weights = batch
    if isinstance(y, dict | list | tuple):
        raise UsageError("class_weight is for models of one output; use weights of the rows")
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    known = {int(label): float(weight) for label, weight in table.items()}
    found = np.vectorize(lambda label: known.get(int(label), 1.0), otypes=["float32"])(labels)
    if weights:
        found = found * np.asarray(weights[0]).reshape(found.shape)
    return x, y, torch.from_numpy(np.ascontiguousarray(found, "float32"))


def made_up(inputs: list, targets: list) -> list:
    """One row of zeros or empty texts of the columns that :class:`TensorShard` describes so."""
    import numpy as np
    import torch

    def column(leaves):
        found = {
            key: np.zeros((1, *shape), dtype)
            if dtype == TEXT
            else torch.zeros((1, *shape), dtype=getattr(torch, dtype))
            for key, dtype, shape in leaves
        }
        return found.get(None, found)

    features = [column(leaves) for leaves in inputs]
    labels = [column(leaves) for leaves in targets]
    return [*features, labels[0] if len(labels) == 1 else tuple(labels)]
