"""What a process that trained brings back, so that the caller's own objects have changed.

Caller and worker hold the same objects, as the worker got a copy of them: modules with their
parameters, a trainer, optimizers. :class:`Belongings` gives each of them a name. A value that
refers to them is pickled with these names in their place, so what comes back refers to the
caller's objects: an optimizer to its parameters, a callback to its trainer. :class:`Changes` finds
what has changed meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import nn

__all__ = ["Belongings", "Changes"]

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


class Belongings:
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
        self._objects: dict[tuple[str, str], Any] = {}
        for name, root in self.roots.items():
            self._add((name, ""), root)
            if isinstance(root, nn.Module):
                for path, part in _parts(root):
                    self._add((name, path), part)
        self._names = {id(value): name for name, value in self._objects.items()}

    def _add(self, name: tuple[str, str], value: Any) -> None:
        self._objects.setdefault(name, value)

    def dumps(self, value: Any) -> bytes:
        """Pickle a value; what is known here is named and not copied."""
        file = io.BytesIO()
        _Pickler(file, self._names, self._unwrap).dump(value)
        return file.getvalue()

    def loads(self, content: bytes) -> Any:
        """The value, with this side's objects in the places of the other's."""
        return _Unpickler(io.BytesIO(content), self._objects).load()

    def modules(self) -> Iterable[tuple[tuple[str, str], nn.Module]]:
        """Modules that are known, with their names."""
        return ((name, part) for name, part in self._objects.items() if isinstance(part, nn.Module))


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file, names: dict[int, tuple[str, str]], unwrap: Callable[[Any], Any]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names, self._unwrap = names, unwrap

    def persistent_id(self, value: Any) -> tuple[str, str] | None:
        return self._names.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        inner = self._unwrap(value)
        return super().reducer_override(value) if inner is value else (_itself, (inner,))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, objects: dict[tuple[str, str], Any]):
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, name: tuple[str, str]) -> Any:
        return self._objects[name]


class Changes:
    """What becomes different in modules and other objects, from the moment this is made.

    Parameters
    ----------
    belongings : Belongings
    objects : mapping of str to object
        Roots that are no modules, whose attributes are watched, too.
    ignored : iterable of str
        Attributes of any of them that do not count.
    """

    def __init__(
        self,
        belongings: Belongings,
        objects: Mapping[str, Any] | None = None,
        ignored: Iterable[str] = (),
    ):
        self._belongings = belongings
        self._watched = {(name, ""): value for name, value in (objects or {}).items()}
        self._watched |= dict(belongings.modules())
        self._ignored = _OF_MODULES.union(ignored)
        self._before = {name: self._digests(value) for name, value in self._watched.items()}
        self._children = {name: _children(value) for name, value in self._watched.items()}

    def collect(self) -> dict[str, Any]:
        """Weights, attributes that are new or different, and modules that were added.

        Returns
        -------
        dict
            To be pickled by `belongings`, and given to :meth:`apply` on the other side.
        """
        modules = dict(self._belongings.modules())
        return {
            "weights": {name: _own_weights(module) for name, module in modules.items()},
            "attributes": {name: self._different(name) for name in self._watched},
            "added": {name: self._added(name, module) for name, module in modules.items()},
        }

    @staticmethod
    def apply(belongings: Belongings, content: Mapping[str, Any]) -> None:
        """Make the caller's objects as those of the worker are."""
        known = belongings._objects
        for name, added in content["added"].items():
            for kind, parts in added.items():
                vars(known[name])[kind].update(parts)
        for name, weights in content["weights"].items():
            _take_weights(known[name], weights)
        for name, attributes in content["attributes"].items():
            for attribute, value in attributes.items():
                vars(known[name])[attribute] = value

    def _attributes(self, value: Any) -> dict[str, Any]:
        return {name: each for name, each in vars(value).items() if name not in self._ignored}

    def _digests(self, value: Any) -> dict[str, bytes | None]:
        return {name: self._digest(each) for name, each in self._attributes(value).items()}

    def _digest(self, value: Any) -> bytes | None:
        """None for what cannot travel."""
        try:
            return hashlib.blake2b(self._belongings.dumps(value)).digest()
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

    def _added(self, name: tuple[str, str], module: nn.Module) -> dict[str, dict[str, Any]]:
        before = self._children[name]
        return {
            kind: {each: parts[each] for each in parts if each not in before[kind]}
            for kind, parts in ((kind, vars(module)[kind]) for kind in before)
        }


def _itself(value: Any) -> Any:
    return value


_KINDS = ("_modules", "_parameters", "_buffers")


def _parts(root: nn.Module) -> Iterable[tuple[str, Any]]:
    yield from root.named_modules()
    for kind, parts in (("p", root.named_parameters()), ("b", root.named_buffers())):
        for path, tensor in parts:
            yield f"{kind}:{path}", tensor


def _children(value: Any) -> dict[str, set[str]]:
    if not isinstance(value, nn.Module):
        return {}
    return {kind: set(vars(value)[kind]) for kind in _KINDS}


def _own_weights(module: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    own = {**module._parameters, **module._buffers}
    return {
        name: (tensor.detach().contiguous(), tensor.requires_grad)
        for name, tensor in own.items()
        if tensor is not None and not nn.parameter.is_lazy(tensor)
    }


@torch.no_grad()
def _take_weights(module: nn.Module, weights: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
    for name, (tensor, requires_grad) in weights.items():
        kind = module._parameters if name in module._parameters else module._buffers
        own = kind.get(name)
        if own is None:
            continue
        if own.shape == tensor.shape and own.dtype == tensor.dtype:
            own.copy_(tensor)
        else:
            own.data = tensor
        own.requires_grad_(requires_grad)
