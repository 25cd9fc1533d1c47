"""Torch models whose weights, gradients and optimizer state are divided among the workers.

:func:`divide` divides a model with ``fully_shard`` of PyTorch (FSDP2): every rank keeps a block of
consecutive rows of each weight, and the weights of one part of the model are gathered while it
computes.  A :class:`ShardedModel` writes and reads these rows as slices of a checkpoint
(:mod:`bigdl.training.slices`), which any number of workers can read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bigdl.common.errors import UsageError
from bigdl.common.platform.memory import allocatable_memory
from bigdl.runtime.collectives.base import as_peer_lost
from bigdl.training.checkpoint import Checkpoint
from bigdl.training.slices import SavedSlices
from bigdl.training.state import dumps, loads, parameters_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Mode = Literal["full", "optimizer"]

MODES = ("optimizer", "full", "auto")
"""Values of ``Estimator.from_torch(shard=)``."""

FACTS = "sharding.json"
"""Checkpoint file with facts about the weights that are in slices."""

_WEIGHTS, _STATE = "weights.", "optimizer."  # prefixes of the slices' names
_SMALL_BLOCK = 1 << 20  # bytes of weights from which a block is gathered separately
_FEW_BLOCKS = 64  # a smaller block is gathered separately if it has this part of the weights
_STATE_OF_ADAM = 2.0  # values of optimizer state per weight, if the optimizer is unknown
_BFLOAT16 = np.dtype("V2")  # NumPy has no bfloat16; no other torch dtype is stored as raw bytes
_EXTRA_STATE = "_extra_state"  # last part of the names of the results of get_extra_state


# -- the division of a model ---------------------------------------------------------------------


def divide(
    model: nn.Module, device: torch.device, mesh: DeviceMesh, mode: Mode, *, is_equal: bool
) -> None:
    """Divide the weights of a model among the ranks of a mesh, in place; a collective operation.

    One block after the other is moved to the device, receives the weights of rank 0 and is divided,
    so that the other ranks never hold more than one whole block.

    Parameters
    ----------
    model : torch.nn.Module
        On other ranks than 0 its weights may be on the meta device.
    device : torch.device
        Device of this rank.
    mesh : DeviceMesh
        One-dimensional mesh of all ranks.
    mode : {"full", "optimizer"}
        ``"optimizer"`` keeps the gathered weights of a block until its backward pass.
    is_equal : bool
        True if all ranks have the same weights, so that none need to be sent.
    """
    from torch.distributed.fsdp import fully_shard

    receive = None if is_equal else functools.partial(_receive, group=mesh.get_group())
    frees = mode == "full"
    for module in [*blocks_of(model), model]:
        _materialize(module, device, receive)
        fully_shard(
            module,
            mesh=mesh,
            # None is PyTorch's default for the root of a model
            reshard_after_forward=None if frees and module is model else frees,
            ignored_params={p for p in module.parameters() if p.ndim == 0},
        )
        # sums over the ranks, since the losses are weighted by rows
        cast("Any", module).set_force_sum_reduction_for_comms(True)
        cast("Any", module).set_gradient_divide_factor(1.0)
    for buffer in model.buffers():
        if receive is not None:
            receive(buffer)


def release_gathered(model: nn.Module) -> None:
    """Free the weights that forward passes without gradients have gathered.

    Otherwise a rank that reads the state of the model would free them alone, and gather them again
    in the next pass without the others.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast("Any", module).reshard()


def place_whole(model: nn.Module, device: torch.device, mesh: DeviceMesh) -> None:
    """Give all ranks the weights and buffers of rank 0, on a device; a collective operation."""
    receive = functools.partial(_receive, group=mesh.get_group())
    _materialize(model, device, receive)
    for buffer in model.buffers():
        receive(buffer)


def _receive(tensor: torch.Tensor, group: ProcessGroup) -> None:
    with as_peer_lost(), torch.no_grad():
        content = tensor.detach().contiguous()
        torch.distributed.broadcast(content, group=group, group_src=0)
        if content.data_ptr() != tensor.data_ptr():
            tensor.copy_(content)


def _materialize(
    module: nn.Module, device: torch.device, receive: Callable[[torch.Tensor], None] | None
) -> None:
    """Allocate the weights and buffers of a module that are not divided yet, and receive them."""
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # tied weights stay tied
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None or is_divided_tensor(parameter):
                continue
            if id(parameter) not in replaced:
                placed = parameter
                if parameter.device != device:
                    placed = _moved_parameter(parameter, device)
                if receive is not None:
                    receive(placed)
                replaced[id(parameter)] = parameter, placed
            each._parameters[name] = replaced[id(parameter)][1]
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.device != device:
                whole = torch.empty_like(buffer, device=device)
                each._buffers[name] = whole if buffer.is_meta else whole.copy_(buffer)


def _moved_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    values = torch.empty_like(parameter, device=device)
    if not parameter.is_meta:
        with torch.no_grad():
            values.copy_(parameter)
    return nn.Parameter(values.detach(), requires_grad=parameter.requires_grad)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that are gathered separately, inner ones first.

    These are the classes in a Hugging Face model's ``_no_split_modules``, or else the elements of
    ``ModuleList``, ``ModuleDict`` and ``Sequential``, such as the layers of a transformer. Very
    small ones, and those that share weights with the rest of the model, are not separated.
    """
    total = bytes_of(model.parameters())
    smallest = min(_SMALL_BLOCK, total // _FEW_BLOCKS)
    names = set(getattr(model, "_no_split_modules", None) or ())
    uses = _count_uses(model)
    blocks = []
    for candidate in _candidates(model, names, total):
        parameters, inner = list(candidate.parameters()), _count_uses(candidate)
        is_separate = all(uses[id(p)] == inner[id(p)] for p in parameters)
        if is_separate and parameters and bytes_of(parameters) >= smallest:
            blocks.append(candidate)
    return blocks


def _count_uses(model: nn.Module) -> Counter[int]:
    """Return how many names each parameter has, by its id; tied weights have several."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values())


def _candidates(module: nn.Module, names: set[str], total: int) -> Iterator[nn.Module]:
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    for child in module.children():
        is_part = isinstance(module, containers) and not isinstance(child, containers)
        if names:
            # fully_shard derives another class from that of a divided module
            is_part = any(each.__name__ in names for each in type(child).__mro__)
        if not is_part:
            yield from _candidates(child, names, total)
            continue
        if bytes_of(child.parameters()) > total // 4:  # a large part, such as an encoder
            yield from _candidates(child, names, total)
        yield child


def bytes_of(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> int:
    """Return the size of parameters in bytes, of whole ones if they are divided."""
    return sum(p.numel() * p.element_size() for p in parameters)


def check_equal_structure(
    model: nn.Module, gather: Callable[[Sequence[float]], list[list[float]]]
) -> None:
    """Raise an error unless all ranks have parameters of the same names, shapes and dtypes.

    Parameters
    ----------
    model : torch.nn.Module
    gather : callable
        Returns a list with the numbers of every rank, such as ``GradientSync.all_gather``.
    """
    facts = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    digest = float(zlib.crc32(repr(facts).encode()))
    if len({row[0] for row in gather([digest])}) > 1:
        raise UsageError(
            "The model creator returns models of different structure on different workers, which "
            "shard= does not support; let it depend on config only",
            code="model-unsupported",
            argument="shard",
        )


# -- memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryNeed:
    """Estimated bytes that one worker needs for the state of a model, without activations.

    Attributes
    ----------
    weights, gradients, optimizer : int
        Rows of this worker.
    gathered : int
        Weights and gradients of the blocks that are gathered at the same time.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.gathered

    @classmethod
    def of(
        cls, model: nn.Module, mode: Mode | None, ranks: int, state: float = _STATE_OF_ADAM
    ) -> MemoryNeed:
        """Estimate the need of a model.

        Parameters
        ----------
        model : torch.nn.Module
            Divided or not; its weights may be on the meta device.
        mode : {"full", "optimizer"} or None
            None is a model that is not divided.
        ranks : int
        state : float
            Values of optimizer state per trained weight; default as for Adam.
        """
        everything = bytes_of(model.parameters())
        trained = bytes_of([p for p in model.parameters() if p.requires_grad])
        if mode is None:
            return cls(everything, 2 * trained, int(state * trained), 0)  # gradients and buckets
        blocks = [bytes_of(block.parameters()) for block in blocks_of(model)]
        largest = max(blocks, default=0)
        rest = max(0, everything - sum(blocks))
        gathered = everything if mode == "optimizer" else rest + 2 * largest
        gradients = max(largest, rest) if trained else 0
        return cls(
            everything // ranks,
            trained // ranks,
            int(state * trained / ranks),
            gathered + gradients,
        )

    def check(self, available: int, host: str, advice: str) -> None:
        """Raise an error if the gradients, optimizer state and gathered weights do not fit.

        Parameters
        ----------
        available : int
            Bytes that the worker may still allocate, after its rows of the weights.
        host : str
        advice : str
            What the user can do.
        """
        missing = self.total - self.weights
        if missing <= available:
            return
        parts = {
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "gathered weights": self.gathered,
        }
        listed = ", ".join(f"{name} {_size(value)}" for name, value in parts.items())
        raise UsageError(
            f"The fit needs about {_size(missing)} more memory per worker ({listed}; activations "
            f"are extra), but a worker on {host} can allocate {_size(available)}; {advice}",
            code="resource-limit",
            argument="shard",
        )


def free_memory(device: torch.device, processes: int) -> int:
    """Return the bytes that this process can allocate on a device.

    Parameters
    ----------
    device : torch.device
        A GPU, or the CPU for the memory of the machine.
    processes : int
        Number of processes that share the memory of the machine; a GPU belongs to one process.
    """
    if device.type != "cuda":
        return allocatable_memory(processes)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def state_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Return the number of values that an optimizer keeps for each weight, by a trial step."""
    weight = nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.ones(4, 4)
    try:
        trial = cast("Any", type(optimizer))([weight], **optimizer.defaults)
        trial.step()
        kept = trial.state[weight].values()
    except Exception:  # an optimizer with other arguments
        return _STATE_OF_ADAM
    return sum(v.numel() for v in kept if isinstance(v, torch.Tensor) and v.ndim) / weight.numel()


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error for an optimizer that cannot update rows of weights."""
    name = type(optimizer).__name__
    reason = ""
    if isinstance(optimizer, torch.optim.Adafactor):
        reason = "whose state has other shapes than the weights"
    elif isinstance(optimizer, torch.optim.SparseAdam):
        reason = "which needs sparse gradients"
    elif isinstance(optimizer, torch.optim.SGD) and any(
        group.get("fused") for group in optimizer.param_groups
    ):
        name, reason = "SGD(fused=True)", "whose kernel has no rule for divided weights"
    if reason:
        raise _unsupported(name, reason)


@contextlib.contextmanager
def naming_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager for a step, which names an optimizer that cannot update rows of weights.

    Raises
    ------
    UsageError
        If the step combines divided and whole tensors, or needs an operation that PyTorch does not
        have for divided ones.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "mixed torch.Tensor and DTensor" in text:
            reason = "which combines weights with tensors that are not divided"
        elif "sharding strategy" in text:
            reason = "which uses an operation that PyTorch does not have for divided weights"
        else:
            raise
        raise _unsupported(type(optimizer).__name__, reason) from error


def _unsupported(name: str, reason: str) -> UsageError:
    return UsageError(
        f"shard= does not support the optimizer {name}, {reason}; use SGD, Adam, AdamW or "
        "another optimizer that updates every weight separately",
        code="optimizer-unsupported",
        argument="shard",
    )


# -- the state of a divided model ------------------------------------------------------------------


def is_divided_tensor(tensor: object) -> bool:
    """Return True if a tensor is divided among ranks (a DTensor)."""
    return hasattr(tensor, "to_local")


def is_divided(model: object) -> bool:
    """Return True if the weights of a model are divided among ranks, also while gathered."""
    return isinstance(model, nn.Module) and hasattr(model, "set_requires_gradient_sync")


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a divided tensor, or the tensor itself."""
    return cast("Any", tensor).to_local() if is_divided_tensor(tensor) else tensor


class ShardedModel:
    """State of a model whose weights and optimizer state are stored in slices.

    Parameters
    ----------
    model : torch.nn.Module
        Divided by :func:`divide`, or whole on a single rank.
    rank, world_size : int
        Rank of this worker and number of ranks that share the rows; 0 and 1 for a whole model.
    """

    def __init__(self, model: nn.Module, rank: int = 0, world_size: int = 1):
        self._model, self._rank, self._world_size = model, rank, world_size
        self.is_divided = world_size > 1
        self.weights: dict[str, nn.Parameter] = {
            name: p for name, p in model.named_parameters() if p.ndim
        }
        self._names = names = {id(p): name for name, p in self.weights.items()}
        self._aliases = {
            alias: names[id(p)]
            for alias, p in model.named_parameters(remove_duplicate=False)
            if id(p) in names and alias != names[id(p)]
        }

    def replicated(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that every rank holds, which are scalars."""
        return [p for p in parameters if id(p) not in self._names]

    def sharded(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that are divided among the ranks."""
        return [p for p in parameters if id(p) in self._names]

    # -- to a checkpoint

    def model_state(self) -> dict[str, Any]:
        """Return the state dict of the model without the divided weights."""
        sliced = {*self.weights, *self._aliases}
        return {name: v for name, v in self._model.state_dict().items() if name not in sliced}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer without the values of divided weights."""
        state = optimizer.state_dict()
        parameters = parameters_of(optimizer)
        state["state"] = {
            number: {
                key: value
                for key, value in entries.items()
                if not self._is_sliced(value, parameters[number])
            }
            for number, entries in state["state"].items()
        }
        return state

    def facts(self, optimizer: torch.optim.Optimizer) -> bytes:
        """Return the content of the file :data:`FACTS`."""
        parameters = parameters_of(optimizer)
        numbers = {self._names.get(id(p)): number for number, p in enumerate(parameters)}
        facts = {
            "numbers": {name: numbers.get(name) for name in self.weights},
            "aliases": self._aliases,
        }
        return json.dumps(facts).encode()

    def arrays(self, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
        """Return this rank's rows of the weights and of their optimizer state, without copying.

        Raises
        ------
        UsageError
            If the optimizer has divided state of another shape than its weight.
        """
        arrays = {f"{_WEIGHTS}{name}": _array(p) for name, p in self.weights.items()}
        for name, parameter in self.weights.items():
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                if self._is_sliced(state[key], parameter):
                    arrays[f"{_STATE}{key}.{name}"] = _array(state[key])
                elif any(map(is_divided_tensor, tree_leaves(state[key]))):
                    raise _unsupported(
                        type(optimizer).__name__, "whose state has other shapes than the weights"
                    )
        return arrays

    def _is_sliced(self, value: object, parameter: nn.Parameter) -> bool:
        if id(parameter) not in self._names or not isinstance(value, torch.Tensor):
            return False
        return value.ndim > 0 and value.shape == parameter.shape

    # -- from a checkpoint

    def load_model(self, state: dict[str, Any], *, is_partial: bool) -> None:
        """Load the state dict of a model, or one that :meth:`model_state` returned.

        Parameters
        ----------
        state : dict
        is_partial : bool
            True if the divided weights are in slices.

        Raises
        ------
        RuntimeError
            If names or shapes differ.
        """
        current = self._model.state_dict()
        sliced = {*self.weights, *self._aliases} if is_partial else set()
        differing = (set(current) - sliced) ^ set(state)
        if differing:
            raise RuntimeError(f"names differ: {', '.join(sorted(differing)[:5])}")
        others = {
            name: value
            for name, value in state.items()
            if name.rpartition(".")[2] == _EXTRA_STATE or not isinstance(value, torch.Tensor)
        }
        if others:  # results of get_extra_state
            self._model.load_state_dict(others, strict=False)
        with torch.no_grad():
            for name, value in state.items():
                if name in others:
                    continue
                if value.shape != current[name].shape:
                    raise RuntimeError(
                        f"{name} has the shape {tuple(value.shape)} instead of "
                        f"{tuple(current[name].shape)}"
                    )
                local_rows(current[name]).copy_(self._rows(value, current[name]))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state dict of an optimizer, or one of :meth:`optimizer_state`."""
        parameters, state = parameters_of(optimizer), dict(state)
        entries = state.get("state", {})
        state["state"] = {
            number: {
                key: self._like(self._rows(value, parameters[number]), parameters[number])
                if number < len(parameters) and self._is_sliced(value, parameters[number])
                else value
                for key, value in of_parameter.items()
            }
            for number, of_parameter in entries.items()
        }
        optimizer.load_state_dict(state)

    def load(self, slices: SavedSlices, optimizer: torch.optim.Optimizer | None) -> None:
        """Load this rank's rows of the weights, and of the state of an optimizer.

        Raises
        ------
        UsageError
            If the slices belong to another model, or cannot be read.
        """
        _check_names(slices, self.weights)
        states = _states_of(slices)
        trained = set() if optimizer is None else {id(p) for p in parameters_of(optimizer)}
        for name, parameter in self.weights.items():
            with torch.no_grad():
                rows = self._read(slices, f"{_WEIGHTS}{name}", parameter)
                local_rows(parameter).copy_(rows)  # which converts the dtype
            if optimizer is None or id(parameter) not in trained:
                continue
            for key, array in states.get(name, {}).items():
                value = self._read(slices, array, parameter)
                if value.dtype == rows.dtype:  # as in the optimizer's load_state_dict
                    value = value.to(parameter.dtype)
                optimizer.state[parameter][key] = self._like(value, parameter)

    def _read(self, slices: SavedSlices, array: str, parameter: torch.Tensor) -> torch.Tensor:
        """Read this rank's rows of an array with the shape of a parameter."""
        rows, first, last = slices.rows(array), *self._range(len(parameter))
        pieces, start = [], 0
        if rows == len(parameter):
            for owner in range(slices.count(array)):
                count = slices.shape(array, owner)[0]
                low, high = max(first, start), min(last, start + count)
                if low < high:
                    pieces.append(slices.of_owner(array, owner, np.arange(low, high) - start))
                start += count
        shape = (max(0, last - first), *parameter.shape[1:])
        if not pieces:
            pieces = [np.empty((0, *slices.shape(array, 0)[1:]), slices.dtype(array))]
        content = _tensor(pieces)
        if tuple(content.shape) != shape:
            raise UsageError(
                f"The weights do not fit the model: {array} has {rows} rows of shape "
                f"{tuple(content.shape[1:])}, the model {tuple(parameter.shape)}",
                code="model-mismatch",
            )
        return content

    def _range(self, rows: int) -> tuple[int, int]:
        """Return the first row of this rank and the row after its last, as ``torch.chunk``."""
        size = -(-rows // self._world_size)
        return min(rows, self._rank * size), min(rows, (self._rank + 1) * size)

    def _rows(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole tensor, if `like` is divided."""
        if not is_divided_tensor(like):
            return value
        first, last = self._range(len(value))
        return value[first:last]

    def _like(self, rows: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows as a tensor that is divided like a parameter."""
        if not is_divided_tensor(parameter):
            return rows.clone().to(parameter.device)
        from torch.distributed.tensor import DTensor

        like = cast("Any", parameter)
        return cast(
            "torch.Tensor",
            DTensor.from_local(
                rows.clone().to(like.device),
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ),
        )


def _array(tensor: torch.Tensor) -> np.ndarray:
    values = local_rows(tensor.detach()).contiguous().cpu()
    if values.dtype == torch.bfloat16:
        return cast("np.ndarray", values.view(torch.int16).numpy().view(_BFLOAT16))
    return cast("np.ndarray", values.numpy())


def _tensor(pieces: Sequence[np.ndarray]) -> torch.Tensor:
    """Return the rows of several arrays that :func:`_array` returned, in their dtype."""
    content = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if content.dtype == _BFLOAT16:
        return torch.from_numpy(content.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(content)


def _weights_of(slices: SavedSlices) -> list[str]:
    """Return the names of the weights that are in slices."""
    return [name[len(_WEIGHTS) :] for name in slices.names if name.startswith(_WEIGHTS)]


def _states_of(slices: SavedSlices) -> dict[str, dict[str, str]]:
    """Return the arrays of optimizer state by the name of the weight and the key of the state."""
    arrays: dict[str, dict[str, str]] = {}
    for array in slices.names:
        if array.startswith(_STATE):
            key, _, name = array[len(_STATE) :].partition(".")
            arrays.setdefault(name, {})[key] = array
    return arrays


def _check_names(slices: SavedSlices, weights: Iterable[str], what: str = "weights") -> None:
    if differing := sorted({*_weights_of(slices)} ^ {*weights}):
        raise UsageError(
            f"The {what} do not fit the model: names differ: {', '.join(differing[:5])}",
            code="model-mismatch",
        )


# -- checkpoints of divided models ---------------------------------------------------------------


def has_sliced_weights(slices: SavedSlices | None) -> bool:
    """Return True if slices of a checkpoint are weights of a divided model."""
    return slices is not None and bool(_weights_of(slices))


def check_weights(model: nn.Module, slices: SavedSlices, what: str = "weights") -> None:
    """Raise an error unless a model has the weights that are in the slices of a checkpoint.

    Parameters
    ----------
    model : torch.nn.Module
        Its weights may be on the meta device.
    slices : SavedSlices
    what : str
        Name of the weights in the error message.
    """
    weights = ShardedModel(model).weights
    _check_names(slices, weights, what)
    for name, weight in weights.items():
        array, shape = f"{_WEIGHTS}{name}", tuple(weight.shape)
        if (saved := (slices.rows(array), *slices.shape(array, 0)[1:])) != shape:
            raise UsageError(
                f"The {what} do not fit the model: {name} has the shape {saved}, in the model "
                f"{shape}",
                code="model-mismatch",
            )


def load_whole(model: nn.Module, state: dict[str, Any], slices: SavedSlices) -> None:
    """Load the weights of a divided model into a whole one in this process."""
    whole = ShardedModel(model)
    whole.load_model(state, is_partial=True)
    whole.load(slices, None)


def merged(snapshot: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the sliced weights and optimizer state in its files."""
    slices = snapshot.slices
    if slices is None or not has_sliced_weights(slices):
        return snapshot
    model, optimizer = (loads(snapshot.files[name]) for name in ("model.pt", "optimizer.pt"))
    facts, states = json.loads(snapshot.files[FACTS]), _states_of(slices)
    for name, number in facts["numbers"].items():
        model[name] = _whole(slices, f"{_WEIGHTS}{name}")
        if number is not None:
            for key, array in states.get(name, {}).items():
                optimizer["state"].setdefault(number, {})[key] = _whole(slices, array)
    model.update({alias: model[name] for alias, name in facts["aliases"].items()})
    whole = snapshot.without_slices({"model.pt": dumps(model), "optimizer.pt": dumps(optimizer)})
    del whole.files[FACTS]
    return whole


def _whole(slices: SavedSlices, array: str) -> torch.Tensor:
    return _tensor([slices.of_owner(array, owner) for owner in range(slices.count(array))])
