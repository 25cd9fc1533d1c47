"""State of a Keras model: capture, merge over workers, serialization and restore.

Files load with ``torch.load(..., weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.runtime.shards.texts import TEXT
from bigdl.training.embedding_tables.keras_model import by_number, sharded_layers
from bigdl.training.state import RunningState, dumps, loads

if TYPE_CHECKING:
    import keras
    import torch

    from bigdl.runtime.collectives.base import GradientSync
else:
    torch = LazyModule("torch", "orca")
    keras = LazyModule("keras", "tf")


def array_of(value: Any) -> np.ndarray:  # value: of any backend
    """Convert a variable or tensor of any backend, or a number, to an array."""
    value = getattr(value, "value", value)  # of a Keras variable
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def tensor_of(variable: keras.Variable) -> torch.Tensor:
    """Copy a variable to a torch tensor on the CPU."""
    array = np.array(array_of(variable))
    if array.dtype.name == "bfloat16":  # NumPy has no such dtype
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_variable(variable: keras.Variable, tensor: torch.Tensor) -> None:
    """Set a variable to the value of a tensor."""
    variable.assign((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy())


def values_of(variables: Iterable[Any]) -> list[torch.Tensor]:
    """Copy variables to torch tensors on the CPU."""
    return [tensor_of(variable) for variable in variables]


def set_values(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Set variables to the values that :func:`values_of` returned."""
    for variable, value in zip(variables, values, strict=True):
        to_variable(variable, value)


@contextlib.contextmanager
def kept_values(variables: list[Any]) -> Iterator[None]:
    """Context manager that restores the values of variables on exit, except after an error."""
    before = values_of(variables)
    yield
    set_values(variables, before)


def growing_layers(model: keras.Model) -> dict[int, Any]:
    """Return the layers with a growing table in this process, keyed by the index of their weight.

    See :class:`bigdl.orca.keras.GrowingEmbedding`.
    """
    layers = [each for each in sharded_layers(model) if hasattr(each, "whole_arrays")]
    return by_number(model, [each for each in layers if each.built and not each.is_placed])


def dump_weights(model: keras.Model) -> bytes:
    """Serialize the weights of a model, in the order of ``model.weights``."""
    state: dict[str, Any] = {"weights": values_of(model.weights)}
    layers = growing_layers(model)
    if layers:
        state["tables"] = {number: layer.whole_arrays() for number, layer in layers.items()}
    return dumps(state)


def put_weights(model: keras.Model, data: bytes, what: str = "weights") -> None:
    """Load the weights that :func:`dump_weights` serialized into a built model.

    Raises
    ------
    UsageError
        If the shapes do not fit the model.
    """
    state = loads(data)
    _put(model.weights, state["weights"], what, "model")
    tables = state.get("tables", {})
    for number, layer in growing_layers(model).items():
        if number in tables:
            layer.take_whole(tables[number])


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return the compiled optimizer, and optimizers that the model has as attributes."""
    values = [getattr(model, "optimizer", None), *vars(model).values()]
    kept = {id(each): each for each in values if isinstance(each, keras.optimizers.Optimizer)}
    return list(kept.values())


def optimizer_name(optimizer: keras.Optimizer) -> str:
    """Return the class name of an optimizer, including that of its schedule.

    A constant learning rate is part of the optimizer's state and has no name.
    """
    inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer
    if inner is not None:
        return f"{type(optimizer).__name__} of {optimizer_name(inner)}"
    rate = getattr(optimizer, "_learning_rate", None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    schedule = f" with the schedule {type(rate).__name__}" if is_schedule else ""
    return f"{type(optimizer).__name__}{schedule}"


_SLOTS = ("use_ema", "momentum", "amsgrad", "centered", "gradient_accumulation_steps")


def _slots_of(optimizer: keras.Optimizer) -> list[str]:
    """Return the enabled options of an optimizer that determine which state it has."""
    optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer
    values = {name: getattr(optimizer, name, None) for name in _SLOTS}
    return [name for name, value in values.items() if isinstance(value, numbers.Number) and value]


def dump_optimizers(model: keras.Model) -> bytes:
    """Serialize the states of all optimizers of a model, with their classes and options."""
    optimizers = optimizers_of(model)
    states = [values_of(optimizer.variables) for optimizer in optimizers]
    names, slots = (list(map(f, optimizers)) for f in (optimizer_name, _slots_of))
    return dumps({"optimizers": states, "names": names, "slots": slots})


def put_optimizers(model: keras.Model, data: bytes) -> None:
    """Load the states that :func:`dump_optimizers` serialized into built optimizers.

    The states have no rows of sharded tables; a whole table keeps its current rows.

    Raises
    ------
    UsageError
        If the states belong to optimizers of another class, schedule or model, or with options
        that need other state.
    """
    kept = loads(data)
    states, optimizers = kept["optimizers"], optimizers_of(model)
    # files of earlier versions have no names
    for optimizer, name in zip(optimizers, kept.get("names", ()), strict=False):
        current = optimizer_name(optimizer)
        if current != name:
            raise UsageError(
                f"The checkpoint has the state of the optimizer {name}, but the program uses "
                f"{current}; resume with {name}, or load only the weights: save_weights in a "
                f"program with {name}, load_weights in this one, and fit without resume",
                code="checkpoint-mismatch",
            )
    for optimizer, slots in zip(optimizers, kept.get("slots", ()), strict=False):
        other = [name for name in _SLOTS if (name in slots) != (name in _slots_of(optimizer))]
        if other:  # equal shapes do not suffice: averages are no momentum
            one = other[0]
            has, lacks = ("checkpoint", "program") if one in slots else ("program", "checkpoint")
            raise UsageError(
                f"The optimizer {optimizer_name(optimizer)} of the {has} has {one}, and that of "
                f"the {lacks} has not, so their states differ; resume with the options of the "
                "checkpoint, or load only the weights: load_weights, and fit without resume",
                code="checkpoint-mismatch",
            )
    if optimizers and states and len(optimizers) != len(states):
        raise UsageError(
            f"The checkpoint has the states of {len(states)} optimizers, but the model has "
            f"{len(optimizers)}; resume with the program that wrote it, or load only the weights: "
            "load_weights, and fit without resume",
            code="checkpoint-mismatch",
        )
    for optimizer, values in zip(optimizers, states, strict=False):
        if len(values) == len(optimizer.variables):  # else _put reports the first mismatch
            values = list(map(_of_size, optimizer.variables, values))
        _put(optimizer.variables, values, "optimizer's state", "optimizer")


def _of_size(variable: keras.Variable, stored: torch.Tensor) -> torch.Tensor:
    """Return the stored value, or the variable's current value if either has no rows."""
    shape, other = tuple(variable.shape), tuple(stored.shape)
    if shape[1:] == other[1:] and shape != other and shape and 0 in (shape[0], other[0]):
        return tensor_of(variable)
    return stored


def share_state(model: keras.Model, sync: GradientSync) -> None:
    """Broadcast weights and optimizer state from rank 0; a collective operation."""
    for dump, put in ((dump_weights, put_weights), (dump_optimizers, put_optimizers)):
        state = sync.broadcast(dump(model) if sync.rank == 0 else None)
        if sync.rank:
            put(model, cast("bytes", state))


def _put(variables: Sequence[Any], values: Sequence[Any], what: str, whose: str) -> None:
    shapes = [tuple(v.shape) for v in variables]
    stored = [tuple(v.shape) for v in values]
    if shapes != stored:
        i = next(
            (i for i, pair in enumerate(zip(shapes, stored, strict=False)) if len(set(pair)) > 1),
            min(len(shapes), len(stored)),
        )
        has, got = (str(s[i]) if i < len(s) else "nothing" for s in (shapes, stored))
        raise UsageError(
            f"The {what} do not fit the {whose}: of {len(shapes)} variables, number {i} has shape "
            f"{has} in the {whose} and {got} there ({len(stored)} variables)",
            code="model-mismatch",
        )
    set_values(variables, values)


def seed_states(model: keras.Model) -> list[Any]:
    """Return the seed variables of a model's random layers."""
    weights = {id(weight) for weight in model.weights}
    return [v for v in model.variables if id(v) not in weights]


def is_read_in_part(table: keras.Variable, batch_rows: int) -> bool:
    """Return True if a table has more than twice as many rows as a batch.

    All workers agree on this, whichever rows they read.
    """
    return bool(table.shape[0] > 2 * batch_rows)


def form_of(batch: object) -> dict[str, Any] | None:
    """Return a batch's structure, dtypes and shapes as JSON values, for :func:`zeros_of`."""
    if batch is None:
        return None
    if isinstance(batch, dict):
        return {"dict": {name: form_of(each) for name, each in batch.items()}}
    if isinstance(batch, list | tuple):
        return {"tuple": [form_of(each) for each in batch]}
    array = array_of(batch)
    is_text = array.dtype.kind in "OSU"
    return {"dtype": f"{TEXT}1" if is_text else array.dtype.name, "shape": list(array.shape)}


def zeros_of(form: dict[str, Any] | None) -> Any:  # arrays in the structure of the batch
    """Build a batch of zeros or empty texts from a result of :func:`form_of`."""
    if form is None:
        return None
    if "dict" in form:
        return {name: zeros_of(each) for name, each in form["dict"].items()}
    if "tuple" in form:
        return tuple(zeros_of(each) for each in form["tuple"])
    return np.zeros(form["shape"], form["dtype"])


# -- state that depends on the rows of each worker ----------------------------------------------


def synchronized_layers(model: keras.Model) -> list[Any]:
    """Return the model's BatchNormalization layers with ``synchronized=True``, at any depth."""
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]


class RunningWeights(RunningState):
    """Non-trainable weights of a model, such as the averages of BatchNormalization."""

    def local_values(self) -> list[Any]:
        """Return copies of this worker's non-trainable weights."""
        return values_of(self._model.non_trainable_weights)

    def put(self, values: list[Any]) -> None:
        """Set this worker's non-trainable weights, as returned by :meth:`local_values`."""
        set_values(self._model.non_trainable_weights, values)


def changed_by_rows(model: keras.Model) -> list[Any]:
    """Return the metric and running-weight variables that depend on this worker's rows only.

    Layers with synchronized moments are excluded.
    """
    shared = {id(v) for layer in synchronized_layers(model) for v in layer.non_trainable_variables}
    variables = [*model.metrics_variables, *model.non_trainable_variables]
    return [variable for variable in variables if id(variable) not in shared]


def merge_metrics(model: keras.Model, sync: GradientSync, initial: list[Any]) -> None:
    """Merge the metric states of a model over all workers; a collective operation.

    A metric's rows add to its state after ``reset_state``, so the states of several workers add
    up.

    Parameters
    ----------
    model : keras.Model
    sync : GradientSync
    initial : list of tensor
        Values of ``model.metrics_variables`` after their reset.
    """
    variables = model.metrics_variables
    if sync.world_size == 1 or not variables:
        return
    states = values_of(variables)
    added = torch.cat(
        [(v.double() - i.double()).reshape(-1) for v, i in zip(states, initial, strict=True)]
    )
    sync.all_reduce(added)
    start = 0
    for variable, value, first in zip(variables, states, initial, strict=True):
        part = added[start : start + value.numel()].reshape(value.shape)
        to_variable(variable, (first.double() + part).to(value.dtype))
        start += value.numel()
