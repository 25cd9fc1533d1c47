"""The mergeable state of a metric, and the merge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bigdl.common.errors import UsageError
from bigdl.orca.learn.metrics.inputs import row_count

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]
    Reduction = Literal["sum", "cat", "max", "min"]

__all__ = ["TensorMetric", "TorchMetric", "check_keys", "merge_states"]


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


class TensorMetric(TorchMetric):
    """A metric whose state is a few tensors, where a batch merges just as a worker does."""

    @abstractmethod
    def _initial_state(self) -> State:
        """Return the state of a worker that has seen no row."""

    @abstractmethod
    def _batch_state(self, preds: Any, targets: Any, *weights: Any) -> State:
        """Return the state of a worker that has seen this batch only.

        Weights of the rows are handed in where ``takes_weights`` says so and there are any.
        """

    def update(self, preds: Any, targets: Any, *weights: Any) -> None:
        """Take one batch in that has rows; gradients are off."""
        for key, tensor in self._batch_state(preds, targets, *weights).items():
            self._parts[key].append(tensor)
            if self.reductions[key] != "cat":  # joined once, in state()
                self._parts[key] = [_REDUCE[self.reductions[key]](key, self._parts[key])]

    def reset(self) -> None:
        """Forget every batch."""
        self.load_state(self._initial_state())

    def state(self) -> State:
        """Return a copy of the state, all tensors on the CPU."""
        return {
            key: _REDUCE[reduction](key, self._parts[key]).clone()
            for key, reduction in self.reductions.items()
        }

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
        ``TorchMetric.reductions``.  "cat" joins 1-D tensors in the order of `states`; the others
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
    return {
        key: _REDUCE[reduction](key, [state[key] for state in states])
        for key, reduction in reductions.items()
    }


def check_keys(state: Mapping[str, Any], reductions: Mapping[str, Any]) -> None:
    """Raise a UsageError unless `state` holds what `reductions` tells how to merge."""
    if set(state) != set(reductions):
        raise UsageError(
            f"the state of a metric is expected to hold {sorted(reductions)}, "
            f"but this one holds {sorted(state)}"
        )


def _cat(key: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    import torch

    filled = [tensor for tensor in tensors if tensor.numel()]
    return torch.cat(filled) if filled else tensors[0]


def _elementwise(operation: str):
    def reduce(key: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        import torch

        filled = [tensor for tensor in tensors if tensor.numel()] or tensors[:1]
        shapes = {tuple(tensor.shape) for tensor in filled}
        if len(shapes) > 1:
            raise UsageError(
                f"the tensors {key!r} of the states to merge have different shapes "
                f"{sorted(shapes)}; every batch must have the same number of classes"
            )
        return getattr(torch, operation)(torch.stack(filled), dim=0)

    return reduce


_REDUCE = {
    "sum": _elementwise("sum"),
    "cat": _cat,
    "max": _elementwise("amax"),
    "min": _elementwise("amin"),
}
