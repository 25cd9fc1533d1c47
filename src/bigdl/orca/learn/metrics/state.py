"""The mergeable state of a metric, and how it reads predictions and targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch

    from bigdl.orca.learn.metrics.metric import MergedMetric

    State = dict[str, torch.Tensor]
    Reduction = Literal["sum", "cat", "max", "min"]

__all__ = [
    "TensorState",
    "TorchMetric",
    "binary_scores",
    "check_keys",
    "class_scores",
    "cpu_tensors",
    "labels_below",
    "merge_states",
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
    pairs = [(preds, targets), (_drop_trailing_ones(preds), _drop_trailing_ones(targets))]
    for scores, labels in pairs:
        if scores.shape[:-1] == labels.shape and scores.shape[-1] > 1:
            return scores, labels, True
    scores, labels = pairs[-1]
    if scores.shape == labels.shape:
        return scores, labels, False
    raise UsageError(
        f"{name}: expected preds of shape (..., classes) or (...) for targets of shape (...), "
        f"got {tuple(preds.shape)} and {tuple(targets.shape)}; the class dimension comes last"
    )


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


class TorchMetric(ABC):
    """What one worker has seen of a metric so far.

    A worker calls the object once per batch and hands in :meth:`state` at the end.  The states of
    all workers are merged in rank order by :func:`merge_states` and loaded by an object made the
    same way, which then computes the figure.  A merged state may be fed and merged again.

    Parameters
    ----------
    name : str
        The name under which the figure is reported.

    Attributes
    ----------
    reductions : dict of str to {"sum", "cat", "max", "min"}
        How each tensor of the state merges, see :func:`merge_states`.
    takes_weights : bool
        Whether rows may have weights. A row of weight 2 then counts as two rows, one of weight 0 as
        none, and :meth:`update` takes the weights as its third argument.
    """

    reductions: Mapping[str, Reduction] = {}
    takes_weights = False

    def __init__(self, name: str):
        self.name = name
        self.reset()

    def __call__(self, preds: Any, targets: Any, weights: Any = None) -> None:
        """Take one batch in.

        Parameters
        ----------
        preds, targets : torch.Tensor
            Output of the model and its truth, any number of rows (none is fine), on any device;
            neither is changed.
        weights : torch.Tensor, shape (rows,) or (rows, 1), optional
            What each row counts, 0 or more; default 1.

        Raises
        ------
        UsageError
            If there are weights and the metric has no notion of them.
        """
        import torch

        if weights is not None and not self.takes_weights:
            raise UsageError(
                f"The metric {self.name} has no notion of rows that count more than others; leave "
                "it out where rows have weights"
            )
        with torch.no_grad():
            if row_count(self.name, preds, targets):
                self.update(preds, targets, *(() if weights is None else (weights,)))

    @abstractmethod
    def update(self, preds: Any, targets: Any) -> None:
        """Take one batch in that has rows; gradients are off."""

    @abstractmethod
    def compute(self) -> torch.Tensor:
        """Return the figure, a float32 tensor without dimensions; nan when there was no row."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every batch."""

    @abstractmethod
    def state(self) -> State:
        """Return a copy of the state, all tensors on the CPU."""

    @abstractmethod
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by a copy of another one.

        Raises
        ------
        UsageError
            If the names of its tensors are not those of this metric.
        """

    def merge(self, other_state: Mapping[str, torch.Tensor]) -> None:
        """Add the rows that another state has seen; its rows come after those of this one."""
        self.load_state(merge_states([self.state(), other_state], self.reductions))


class TensorState(TorchMetric):
    """The state of one of our metrics: a few tensors, to which a batch adds just as a worker does.

    Parameters
    ----------
    metric : MergedMetric
    """

    def __init__(self, metric: MergedMetric):
        self._metric, self.reductions = metric, metric.reductions
        self.takes_weights = metric.takes_weights
        super().__init__(metric.get_name())

    def update(self, preds: Any, targets: Any, *weights: Any) -> None:
        """Take one batch in that has rows; gradients are off."""
        for key, tensor in self._metric._batch_state(preds, targets, *weights).items():
            parts = [*self._parts[key], tensor]
            # what is joined is joined once, in state()
            is_joined = self.reductions[key] == "cat"
            self._parts[key] = parts if is_joined else [_merged(key, parts, self.reductions[key])]

    def compute(self) -> torch.Tensor:
        """Return the figure."""
        return self._metric._figure(self.state())

    def reset(self) -> None:
        """Forget every batch."""
        self._parts: dict[str, list[torch.Tensor]] = {key: [] for key in self.reductions}

    def state(self) -> State:
        """Return a copy of the state, all tensors on the CPU."""
        return {key: _merged(key, self._parts[key], how) for key, how in self.reductions.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by a copy of another one."""
        check_keys(state, self.reductions)
        self._parts = {key: [state[key].clone()] for key in self.reductions}


def merge_states(
    states: Sequence[Mapping[str, torch.Tensor]], reductions: Mapping[str, Reduction]
) -> State:
    """Merge the states of all workers into the state of one that saw every row.

    Parameters
    ----------
    states : sequence of dict of str to torch.Tensor
        One per worker, in rank order.
    reductions : dict of str to {"sum", "cat", "max", "min"}
        ``TorchMetric.reductions``.  "cat" joins 1-D tensors in the order of `states`, and lists of
        tensors where a metric of torchmetrics has them; the others
        go element by element over tensors of one shape.  A tensor without elements is one of a
        worker that saw no row: it takes no part, whatever its shape and dtype.

    Returns
    -------
    dict of str to torch.Tensor

    Raises
    ------
    UsageError
        If there is no state, or the states are not of one and the same metric.
    """
    if not states:
        raise UsageError("merge_states expects the state of at least one worker, got none")
    for state in states:
        check_keys(state, reductions)
    return {key: _merged(key, [s[key] for s in states], how) for key, how in reductions.items()}


def check_keys(state: Mapping[str, Any], reductions: Mapping[str, Any]) -> None:
    """Raise a UsageError unless `state` holds what `reductions` tells how to merge."""
    if set(state) != set(reductions):
        raise UsageError(
            f"the state of a metric is expected to hold {sorted(reductions)}, "
            f"but this one holds {sorted(state)}"
        )


_OPERATIONS = {"sum": "sum", "max": "amax", "min": "amin"}


def _merged(key: str, values: Sequence, reduction: Reduction) -> Any:
    """Return what the tensors (or lists of them) of several states merge to."""
    import torch

    if any(isinstance(value, list) for value in values):
        return [tensor for tensors in values for tensor in tensors]
    filled = [tensor for tensor in values if tensor.numel()]
    if not filled:
        return torch.zeros(0)
    if reduction == "cat":
        return torch.cat(filled)
    shapes = {tuple(tensor.shape) for tensor in filled}
    if len(shapes) > 1:
        raise UsageError(
            f"the tensors {key!r} of the states to merge have different shapes "
            f"{sorted(shapes)}; every batch must have the same number of classes"
        )
    return getattr(torch, _OPERATIONS[reduction])(torch.stack(filled), dim=0)
