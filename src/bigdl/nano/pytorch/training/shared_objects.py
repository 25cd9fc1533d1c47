"""Registry of objects that exist in caller and worker, and transfer of the worker's changes.

The worker gets copies of the caller's objects: modules with their parameters, a trainer,
optimizers. :class:`ObjectRegistry` gives each of them a name. Values that refer to them are pickled
with names instead of the objects. After unpickling in the caller, an optimizer refers to the
caller's parameters and a callback to the caller's trainer. :class:`Changes` collects what the
worker has changed.
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

# Attributes that every module has, except its parts and its mode: hooks and flags.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training", "_modules", "_parameters", "_buffers"}


class ObjectRegistry:
    """Registry of named objects that exist in the caller and in the worker process.

    Parameters
    ----------
    roots : mapping of str to object
        The same in both processes. Submodules, parameters and buffers of a module get names, too.
    unwrap : callable, optional
        Returns the wrapped object of a wrapper, which is pickled instead; returns any other object
        unchanged.
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
        """Pickle a value; replace registered objects by their names."""
        file = io.BytesIO()
        pickler = _RegistryPickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.registry = self
        pickler.dump(value)
        return file.getvalue()

    def loads(self, content: bytes) -> Any:  # any value
        """Unpickle a value; resolve names to this process's objects."""
        unpickler: Any = pickle.Unpickler(io.BytesIO(content))
        unpickler.persistent_load = self._objects.__getitem__
        return unpickler.load()

    def modules(self) -> dict[tuple[str, str], nn.Module]:
        """Return the registered modules by name."""
        return {name: part for name, part in self._objects.items() if isinstance(part, nn.Module)}

    def optimizers(self) -> dict[str, Optimizer | LRScheduler]:
        """Return the registered optimizers and learning-rate schedulers by name."""
        classes = (Optimizer, LRScheduler)
        return {name: root for name, root in self.roots.items() if isinstance(root, classes)}


class _RegistryPickler(value_pickler()):  # type: ignore[misc]  # class created at runtime
    registry: ObjectRegistry

    def persistent_id(self, value: object) -> tuple[str, str] | None:
        return self.registry._names.get(id(value))

    def reducer_override(self, value: object) -> object:
        inner = self.registry._unwrap(value)
        return super().reducer_override(value) if inner is value else (_identity, (inner,))


class GlobalState:
    """Process-wide settings that affect training: deterministic algorithms and random states."""

    def __init__(self) -> None:
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._random = _collect_rng_states(include_cuda=False)

    def restore(self) -> None:
        """Apply the captured settings to this process."""
        enabled, warn_only = self._deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        _set_rng_states(self._random)


class Changes:
    """Tracker of changes to modules and other objects since the tracker was created.

    Parameters
    ----------
    registry : ObjectRegistry
    objects : mapping of str to object
        Further roots whose attributes are compared.
    ignored : iterable of str
        Names of attributes that are not compared.
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
        """Return weights, new or changed attributes, optimizer states and random states.

        The attributes of a module include the containers of its parts.

        Returns
        -------
        dict
            Content to pickle with `registry` and to pass to :meth:`apply` in the other process.
        """
        modules = self._registry.modules()
        return {
            "weights": {name: _weights_of(module) for name, module in modules.items()},
            "attributes": {name: self._changed_attributes(name) for name in self._watched},
            "optimizers": {
                name: root.__getstate__() for name, root in self._registry.optimizers().items()
            },
            "random": _collect_rng_states(include_cuda=False),
        }

    @staticmethod
    def apply(registry: ObjectRegistry, content: Mapping[str, Any]) -> None:
        """Apply collected changes to the caller's objects."""
        known = registry._objects
        for name, attributes in content["attributes"].items():
            vars(known[name]).update(attributes)
        for name, weights in content["weights"].items():
            _load_weights(known[name], weights)
        for name, state in content["optimizers"].items():
            vars(registry.roots[name]).update(state)
        _set_rng_states(content["random"])

    def _digests(self, value: object) -> dict[str, bytes | None]:
        attributes = vars(value).items()
        return {name: self._digest(each) for name, each in attributes if name not in self._ignored}

    def _digest(self, value: object) -> bytes | None:
        """Return the hash of a value, or None if it cannot be pickled."""
        try:
            return hashlib.blake2b(self._registry.dumps(value)).digest()
        except Exception:
            return None

    def _changed_attributes(self, name: tuple[str, str]) -> dict[str, Any]:
        before = self._before[name]
        now = self._digests(self._watched[name])
        attributes = vars(self._watched[name])
        return {
            attribute: attributes[attribute]
            for attribute, digest in now.items()
            if digest is not None and digest != before.get(attribute)
        }


def _identity(value: object) -> object:
    return value


def _parts(root: object) -> Iterable[tuple[str, Any]]:
    """Yield (name, object) pairs: a module's submodules, parameters and buffers, or only `root`."""
    if not isinstance(root, nn.Module):
        yield "", root
        return
    yield from root.named_modules()
    for prefix, parts in (("p", root.named_parameters()), ("b", root.named_buffers())):
        for path, tensor in parts:
            yield f"{prefix}:{path}", tensor


def _weights_of(module: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    tensors = {**module._parameters, **module._buffers}
    return {
        name: (tensor.detach().contiguous(), tensor.requires_grad)
        for name, tensor in tensors.items()
        if tensor is not None and not nn.parameter.is_lazy(tensor)
    }


@torch.no_grad()
def _load_weights(module: nn.Module, weights: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
    for name, (tensor, requires_grad) in weights.items():
        target = module._parameters.get(name, module._buffers.get(name))
        if target is None:
            continue
        if target.shape == tensor.shape and target.dtype == tensor.dtype:
            target.copy_(tensor)
        else:
            target.data = tensor
        target.requires_grad_(requires_grad)
