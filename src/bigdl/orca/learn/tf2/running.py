"""What every worker makes from its own rows: running statistics of layers, and metrics."""

from __future__ import annotations

from bigdl.orca.learn.tf2.shared_moments import synchronized_layers
from bigdl.orca.learn.tf2.state import tensor_of, to_variable
from bigdl.training.state import RunningState

__all__ = ["RunningWeights", "changed_by_rows", "merge_metrics"]


class RunningWeights(RunningState):
    """The weights of a model that are not trained, such as the averages of BatchNormalization."""

    def own(self) -> list:
        """A copy of this worker's."""
        return [tensor_of(weight) for weight in self._model.non_trainable_weights]

    def put(self, values: list) -> None:
        """Set this worker's, e.g. to what :meth:`own` gave."""
        for weight, value in zip(self._model.non_trainable_weights, values, strict=True):
            to_variable(weight, value)


def changed_by_rows(model) -> list:
    """The variables that a step changes by the worker's own rows: metrics and running weights.

    Those of layers whose moments are of all workers are not among them.
    """
    shared = {id(v) for layer in synchronized_layers(model) for v in layer.non_trainable_variables}
    variables = [*model.metrics_variables, *model.non_trainable_variables]
    return [variable for variable in variables if id(variable) not in shared]


def merge_metrics(model, sync, initial: list) -> None:
    """Let the metrics of a model be those of the rows of all workers; a collective.

    The state of a metric is what its rows add to the state that it has after ``reset_state``, so
    the states of several workers add up.

    Parameters
    ----------
    model : keras.Model
    sync : GradientSync
    initial : list of tensor
        Of ``model.metrics_variables``, when they were reset.
    """
    import torch

    variables = model.metrics_variables
    if sync.world_size == 1 or not variables:
        return
    own = [tensor_of(v) for v in variables]
    added = torch.cat(
        [(v.double() - i.double()).reshape(-1) for v, i in zip(own, initial, strict=True)]
    )
    sync.all_reduce(added)
    start = 0
    for variable, value, first in zip(variables, own, initial, strict=True):
        part = added[start : start + value.numel()].reshape(value.shape)
        to_variable(variable, (first.double() + part).to(value.dtype))
        start += value.numel()
