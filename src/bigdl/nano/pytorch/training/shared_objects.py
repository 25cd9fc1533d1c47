"""Objects that caller and worker share, and the changes that a worker sends back.

Caller and worker hold the same objects, as the worker got a copy of them: modules with their
parameters, a trainer, optimizers. :class:`ObjectRegistry` gives each of them a name. A value that
refers to them is pickled with these names in their place, so what comes back refers to the
caller's objects: an optimizer to its parameters, a callback to its trainer. :class:`Changes` finds
what has changed meanwhile.
"""

import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigdl.runtime.serialization import value_pickler

# Attributes that say what a module consists of, and which mode it is in; all others of every module
# are hooks.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training", "_modules", "_parameters", "_buffers"}


class ObjectRegistry:
    """Objects that both sides have, each under a name.

    Parameters
    ----------
    roots : mapping of str to object
        The same on both sides. Of a module its submodules, parameters and buffers get names, too.
    unwrap : callable, optional
        Gives for a wrapper the object that travels in its place, and any other object itself.
    """

    def __init__(
        self, roots: Mapping[str, Any], unwrap: Callable[[Any], Any] = lambda value: value
    ):
        self.roots = dict(roots)
        self._unwrap = unwrap
        self._objects = {
            (name, path): part for name, root in self.roots.items() for path, part in _parts(root)
        }
        self._names = {id(value): name for name, value in self._objects.items()}

    def dumps(self, value: object) -> bytes:
        """Pickle a value; what is known here is named and not copied."""
        file = io.BytesIO()
        pickler = _RegistryPickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.registry = self
        pickler.dump(value)
        return file.getvalue()

    def loads(self, content: bytes) -> Any:
        """Unpickle a value, with this side's objects in the places of the other's."""
        unpickler: Any = pickle.Unpickler(io.BytesIO(content))
        unpickler.persistent_load = self._objects.__getitem__
        return unpickler.load()

    def modules(self) -> dict[tuple[str, str], nn.Module]:
        """Return the modules that are known, by their names."""
        return {name: part for name, part in self._objects.items() if isinstance(part, nn.Module)}

    def optimizers(self) -> dict[str, Optimizer | LRScheduler]:
        """Return the optimizers and schedulers among the roots."""
        classes = (Optimizer, LRScheduler)
        return {name: root for name, root in self.roots.items() if isinstance(root, classes)}


class _RegistryPickler(value_pickler()):  # type: ignore[misc]  # a class that is made
    registry: ObjectRegistry

    def persistent_id(self, value: object) -> tuple[str, str] | None:
        return self.registry._names.get(id(value))

    def reducer_override(self, value: object) -> object:
        inner = self.registry._unwrap(value)
        return super().reducer_override(value) if inner is value else (_itself, (inner,))


class GlobalState:
    """Settings that are global in a process and that a training depends on."""

    def __init__(self) -> None:
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._random = _collect_rng_states(include_cuda=False)

    def restore(self) -> None:
        """Put them in force in this process."""
        enabled, warn_only = self._deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        _set_rng_states(self._random)


class Changes:
    """Changes of modules and other objects since this was made.

    Parameters
    ----------
    registry : ObjectRegistry
    objects : mapping of str to object
        Roots that are no modules, whose attributes are watched, too.
    ignored : iterable of str
        Attributes of any of them that do not count.
    """

    def __init__(
        self,
        registry: ObjectRegistry,
        objects: Mapping[str, Any] | None = None,
        ignored: Iterable[str] = (),
    ):
        self._registry = registry
        self._watched = {(name, ""): value for name, value in (objects or {}).items()}
        self._watched |= registry.modules()
        self._ignored = _OF_MODULES.union(ignored)
        self._before = {name: self._digests(value) for name, value in self._watched.items()}

    def collect(self) -> dict[str, Any]:
        """Return weights, attributes that are new or different, and states.

        Among the attributes of a module are those that hold its parts. The states are those of
        optimizers and schedulers, and of random numbers.

        Returns
        -------
        dict
            To be pickled by `registry`, and given to :meth:`apply` on the other side.
        """
        modules = self._registry.modules()
        return {
            "weights": {name: _own_weights(module) for name, module in modules.items()},
            "attributes": {name: self._different(name) for name in self._watched},
            "optimizers": {
                name: root.__getstate__() for name, root in self._registry.optimizers().items()
            },
            "random": _collect_rng_states(include_cuda=False),
        }

    @staticmethod
    def apply(registry: ObjectRegistry, content: Mapping[str, Any]) -> None:
        """Make the caller's objects as those of the worker are."""
        known = registry._objects
        for name, attributes in content["attributes"].items():
            vars(known[name]).update(attributes)
        for name, weights in content["weights"].items():
            _take_weights(known[name], weights)
        for name, state in content["optimizers"].items():
            vars(registry.roots[name]).update(state)
        _set_rng_states(content["random"])

    def _digests(self, value: object) -> dict[str, bytes | None]:
        attributes = vars(value).items()
        return {name: self._digest(each) for name, each in attributes if name not in self._ignored}

    def _digest(self, value: object) -> bytes | None:
        """Return the hash of a value; None for what cannot be pickled."""
        try:
            return hashlib.blake2b(self._registry.dumps(value)).digest()
        except Exception:
            return None

    def _different(self, name: tuple[str, str]) -> dict[str, Any]:
        before = self._before[name]
        now = self._digests(self._watched[name])
        attributes = vars(self._watched[name])
        return {
            attribute: attributes[attribute]
            for attribute, digest in now.items()
            if digest is not None and digest != before.get(attribute)
        }


def _itself(value: object) -> object:
    return value


def _parts(root: object) -> Iterable[tuple[str, Any]]:
    """Yield an object under no name, and what a module consists of under names."""
    if not isinstance(root, nn.Module):
        yield "", root
        return
    yield from root.named_modules()
    for prefix, parts in (("p", root.named_parameters()), ("b", root.named_buffers())):
        for path, tensor in parts:
            yield f"{prefix}:{path}", tensor


def _own_weights(module: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    tensors = {**module._parameters, **module._buffers}
    return {
        name: (tensor.detach().contiguous(), tensor.requires_grad)
        for name, tensor in tensors.items()
        if tensor is not None and not nn.parameter.is_lazy(tensor)
    }


@torch.no_grad()
def _take_weights(module: nn.Module, weights: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
    for name, (tensor, requires_grad) in weights.items():
        target = module._parameters.get(name, module._buffers.get(name))
        if target is None:
            continue
        if target.shape == tensor.shape and target.dtype == tensor.dtype:
            target.copy_(tensor)
        else:
            target.data = tensor
        target.requires_grad_(requires_grad)
