"""How predictions and targets are read: the shape rules that all metrics share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "batch_to_cpu",
    "binary_scores",
    "class_scores",
    "cpu_tensors",
    "labels_below",
    "row_count",
    "row_weights",
    "same_shape",
    "several_labels",
]


def row_count(name: str, preds: Any, targets: Any) -> int:
    """Return the number of rows of a batch of any structure: that of its first tensor."""
    for leaf in _leaves([targets, preds]):
        return leaf.shape[0] if leaf.ndim else 1
    raise UsageError(
        f"{name}: preds and targets are expected to hold tensors, "
        f"got {type(preds).__name__} and {type(targets).__name__}"
    )


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for item in batch:
            yield from _leaves(item)
    elif hasattr(batch, "shape") and hasattr(batch, "ndim"):
        yield batch


def batch_to_cpu(batch: Any) -> Any:
    """Return a batch of any structure with its tensors detached and on the CPU."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.detach().cpu()
    if isinstance(batch, Mapping):
        return {key: batch_to_cpu(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [batch_to_cpu(item) for item in batch]
    return batch


def cpu_tensors(name: str, preds: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as detached CPU tensors with at least one dimension."""
    return _cpu_tensor(name, "preds", preds), _cpu_tensor(name, "targets", targets)


def _cpu_tensor(name: str, role: str, value: Any) -> torch.Tensor:
    import numpy as np
    import torch

    if isinstance(value, np.ndarray | np.generic):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"{name}: {role} are expected to be one tensor, got {type(value).__name__}; for a "
            "model with several inputs or outputs pass a function fn(preds, targets) as the metric"
        )
    value = value.detach().cpu()
    return value.reshape(1) if value.ndim == 0 else value


def row_weights(name: str, weights: Any, rows: int) -> torch.Tensor:
    """Return the weights of a batch's rows as float64 of shape ``(rows,)``, on the CPU."""
    import torch

    weights = _cpu_tensor(name, "weights", weights).to(torch.float64)
    if weights.numel() != rows:
        raise UsageError(
            f"{name}: expected one weight for each of {rows} rows, got weights of shape "
            f"{tuple(weights.shape)}"
        )
    weights = weights.reshape(rows)
    if bool((weights < 0).any()) or not bool(torch.isfinite(weights).all()):
        raise UsageError(f"{name}: weights are expected to be finite numbers >= 0")
    return weights


def _drop_trailing_ones(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.ndim > 1 and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    return tensor


def same_shape(
    name: str, preds: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with trailing dimensions of size 1 dropped, so ``(n, 1)`` meets ``(n,)``."""
    if preds.shape == targets.shape:
        return preds, targets
    squeezed = _drop_trailing_ones(preds), _drop_trailing_ones(targets)
    if squeezed[0].shape != squeezed[1].shape:
        raise UsageError(
            f"{name}: preds and targets are expected to have the same shape, "
            f"got {tuple(preds.shape)} and {tuple(targets.shape)}"
        )
    return squeezed


def _align(
    preds: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
    """Return preds, targets and whether preds have a class dimension; None if they do not fit."""
    pairs = [(preds, targets), (_drop_trailing_ones(preds), _drop_trailing_ones(targets))]
    for scores, labels in pairs:
        if scores.shape[:-1] == labels.shape and scores.shape[-1] > 1:
            return scores, labels, True
    scores, labels = pairs[-1]
    return (scores, labels, False) if scores.shape == labels.shape else None


def class_scores(
    name: str, preds: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Tell class scores from plain predictions.

    Returns
    -------
    preds, targets : torch.Tensor
        ``(..., C)`` and ``(...)`` if there is a class dimension (the last one, of size > 1), else
        of equal shape.  Trailing dimensions of size 1 are dropped where that makes them fit.
    has_classes : bool
        Whether there is a class dimension.
    """
    aligned = _align(preds, targets)
    if aligned is None:
        raise UsageError(
            f"{name}: expected preds of shape (..., classes) or (...) for targets of shape (...), "
            f"got {tuple(preds.shape)} and {tuple(targets.shape)}; the class dimension comes last"
        )
    return aligned


def binary_scores(
    name: str, preds: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the score of class 1 and the 0/1 labels, both 1-D, from one or two columns."""
    preds, targets, has_classes = class_scores(name, preds, targets)
    if has_classes:
        if preds.shape[-1] != 2:
            raise UsageError(
                f"{name} is for two classes: expected preds with one or two columns, "
                f"got {preds.shape[-1]}; for more classes pass a torchmetrics metric"
            )
        preds = preds[..., 1]
    elif preds.ndim > 1:
        raise several_labels(name, targets)
    return preds.flatten(), labels_below(2, name, targets.flatten())


def several_labels(name: str, targets: torch.Tensor) -> UsageError:
    """Return the error for targets with more than one column."""
    return UsageError(
        f"{name}: targets are expected to be labels, one per row, got targets of shape "
        f"{tuple(targets.shape)}; for several labels per row pass a torchmetrics metric"
    )


def labels_below(classes: int, name: str, labels: torch.Tensor, role="targets") -> torch.Tensor:
    """Return class labels as int64 after checking that each is one of 0 ... `classes` - 1."""
    import torch

    integers = labels.to(torch.int64)
    wrong = (integers < 0) | (integers >= classes) | (integers != labels)
    if wrong.any():
        raise UsageError(
            f"{name}: {role} are expected to be labels from 0 to {classes - 1}, "
            f"got {labels[wrong][0].item()}"
        )
    return integers
