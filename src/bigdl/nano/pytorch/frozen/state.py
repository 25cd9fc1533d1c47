"""Captured state of frozen modules, and detection of changes.

The state is checked before each accelerated call, so the check must be cheap: half a millisecond
for the 320 tensors of a ResNet50. Values of dicts are compared by identity. Tensors are compared by
version, memory address and a few elements; each check also compares all elements of some tensors.
"""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from bigdl.nano.pytorch.frozen.purity import (
    framework_attributes,
    is_constant,
    is_of_user,
    why_impure,
)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTENTS = ("_parameters", "_buffers", "_modules")
_PROBES = 8  # elements of each tensor that are compared in each call
_SUMMED = 1 << 19  # bytes whose checksums are compared in each call, round-robin
_DEEPEST = 3  # nesting of lists and dicts in attributes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_version, _requires_grad = operator.attrgetter("_version"), operator.attrgetter("requires_grad")


class ModulesState:
    """Snapshot of modules: tensors, attributes, hooks and code.

    Parameters
    ----------
    modules : sequence of Module
        Modules, including their submodules. ``forward`` of these modules may be replaced.

    Attributes
    ----------
    unknown : str or None
        Reason why some changes cannot be detected; None if all can.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._heads = list(modules)
        self._parts = list(dict.fromkeys(p for head in self._heads for p in head.modules()))
        self._inner = [part for part in self._parts if part not in self._heads]
        self._uses: dict[tuple[int, str], tuple[dict, str, Any]] = {}
        self.unknown = next(filter(None, map(self._why_unknown, self._parts)), None)
        self._remember()
        self._remember_code()
        held = (value for value in self._values if isinstance(value, torch.Tensor))
        self._tensors = list(dict.fromkeys(held))
        self._versions = list(map(_version, self._tensors))
        self._fingerprints = list(map(_fingerprint, self._tensors))
        self._sample_elements()

    # -- snapshot ----------------------------------------------------------------------------------

    def _why_unknown(self, part: nn.Module) -> str | None:
        reason = why_impure(part, self._uses)
        if reason is None and not type(part).__module__.startswith("torch.nn.modules."):
            for name, value in _user_attributes(part):
                opaque = _why_opaque(value)
                if opaque:
                    return f"{type(part).__name__}.{name} is {opaque}, which may change"
        return reason and f"{type(part).__name__} may have side effects: {reason}"

    def _remember(self) -> None:
        """Store the current attributes, tensors and submodules."""
        nested = [
            c for part in self._parts for _, v in _user_attributes(part) for c in _mutable_parts(v)
        ]
        self._dicts = [getattr(part, name) for part in self._parts for name in _CONTENTS]
        self._dicts += [each for each in nested if isinstance(each, dict)]
        self._lists = [each for each in nested if isinstance(each, list)]
        self._items = [list(each) for each in self._lists]
        sets = (each for each in nested if isinstance(each, set))
        self._sets = [(each, set(each)) for each in sets]
        self._values = list(self._all_values())
        self._size = len(self._values)
        self._keys = [list(each) for each in self._all_dicts()]
        self._hooks = [getattr(p, name) for p in self._watched_parts() for name in _HOOKS]

    def _remember_code(self) -> None:
        self._types = [type(part) for part in self._parts]
        classes = dict.fromkeys(self._types)
        self._codes = [(cls, cls.forward) for cls in classes]
        bases = dict.fromkeys(base for cls in classes for base in cls.__mro__ if is_of_user(base))
        self._classes = [(vars(base), dict(vars(base))) for base in bases]

    def _sample_elements(self) -> None:
        """Store addresses, sampled elements and checksums of the tensors."""
        self._addresses = list(map(_address, self._tensors))
        flat = [_flat(tensor) for tensor in self._tensors if tensor.numel()]
        views: dict[int, list[np.ndarray]] = {}
        for each in flat:
            some = each[:: max(1, each.numel() // _PROBES)]
            views.setdefault(each.element_size(), []).append(some.numpy())
        self._views = list(views.values())
        self._seen = self._probe()
        chunks = (chunk for each in flat for chunk in _chunks(each))
        self._sums = [(chunk, _sum(chunk)) for chunk in chunks]
        self._next_sum = 0

    def _watched_parts(self) -> list[nn.Module]:
        return self._inner if len(self._heads) == 1 else self._parts

    def _all_dicts(self) -> list[dict]:
        heads = ({k: v for k, v in vars(head).items() if k != "forward"} for head in self._heads)
        return [*map(vars, self._inner), *self._dicts, *heads]

    def _all_values(self) -> Iterator[Any]:
        values = map(dict.values, self._all_dicts())
        return itertools.chain.from_iterable(itertools.chain(values, self._lists))

    def _probe(self) -> list[bytes]:
        return [np.concatenate(views).tobytes() for views in self._views]

    # -- detection of changes ----------------------------------------------------------------------

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers and tensor attributes of the modules."""
        return self._tensors

    def trains(self) -> bool:
        """Return True if a tensor of the modules requires a gradient."""
        return any(map(_requires_grad, self._tensors))

    def why_changed(self) -> str | None:
        """Return a description of the first change found since the snapshot, or None."""
        if any(self._hooks) or nn.modules.module._has_any_global_hook():
            return "a hook watches a module in it"
        values = list(self._all_values())
        if len(values) != self._size or not all(map(operator.is_, values, self._values)):
            reason = self._why_other_values()
            if reason:
                return reason
        for container, name, value in self._uses.values():
            if container.get(name, container) is not value:
                return f"{name}, which its code uses, has changed"
        if self._sets and any(each != before for each, before in self._sets):
            return "a set that it holds has changed"
        if list(map(type, self._parts)) != self._types:
            return "the class of one of its modules has changed"
        if any(cls.forward is not forward for cls, forward in self._codes):
            return "the code of one of its modules has changed"
        for now, before in self._classes:
            if len(now) != len(before) or not all(map(operator.is_, now.values(), before.values())):
                return "an attribute of the class of one of its modules has changed"
        return self._why_other_contents()

    def _why_other_values(self) -> str | None:
        """Return a message that names an attribute with a changed value, or None."""
        left = iter(self._values)
        ignored = framework_attributes() - {"training", *_CONTENTS, *_HOOKS}
        for before, container in zip(self._keys, self._all_dicts(), strict=True):
            old = dict(zip(before, left, strict=False))
            for name in {**old, **container}:
                if name not in ignored and not _same(old.get(name), container.get(name)):
                    if name == "training":
                        return "some of its modules changed between train and eval mode"
                    subject = (
                        "weights have" if isinstance(old.get(name), torch.Tensor) else f"{name} has"
                    )
                    return f"its {subject} changed; call refresh()"
        for now, before in zip(self._lists, self._items, strict=True):
            if len(now) != len(before) or not all(map(_same, now, before)):
                return "a list that it holds has changed"
        if any(each != before for each, before in self._sets):
            return "a set that it holds has changed"
        self._remember()
        return None

    def _why_other_contents(self) -> str | None:
        versions = list(map(_version, self._tensors))
        addresses = list(map(_address, self._tensors))
        unwritten = versions == self._versions and addresses == self._addresses
        if unwritten and self._probe() == self._seen and self._sums_are_same():
            return None
        # Written, but perhaps with equal values: DDP broadcasts buffers before each step.
        moved = addresses != self._addresses
        one_by_one = versions != self._versions and not moved and self._probe() == self._seen
        for index, tensor in enumerate(self._tensors):
            if one_by_one and versions[index] == self._versions[index]:
                continue
            if _fingerprint(tensor) != self._fingerprints[index]:
                return "its weights have changed; call refresh()"
        self._versions = versions
        if not one_by_one:
            self._sample_elements()
        return None

    def _sums_are_same(self) -> bool:
        left = _SUMMED
        for _ in range(len(self._sums)):
            chunk, before = self._sums[self._next_sum]
            left -= chunk.nbytes
            if left < 0:
                break
            self._next_sum = (self._next_sum + 1) % len(self._sums)
            if _sum(chunk) != before:
                return False
        return True


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as integers."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    else:
        flat = tensor.new_empty(0).set_(tensor.untyped_storage())
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _chunks(flat: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield a flat tensor's memory in chunks of 8-byte integers, then the remaining bytes."""
    whole = flat.view(torch.uint8).numpy()
    long = len(whole) - len(whole) % 8
    for start in range(0, long, _SUMMED):
        yield whole[start : min(start + _SUMMED, long)].view(np.int64)
    if long < len(whole):
        yield whole[long:]


def _sum(chunk: np.ndarray) -> int:
    return int(np.add.reduce(chunk))


def _fingerprint(tensor: torch.Tensor) -> tuple:
    whole = tensor.detach().contiguous()
    return tuple(tensor.shape), tensor.dtype, zlib.crc32(_flat(whole).numpy().data)


def _user_attributes(part: nn.Module) -> list[tuple[str, Any]]:
    known = framework_attributes()
    return [(name, v) for name, v in vars(part).items() if name not in known and name != "forward"]


def _mutable_parts(value: object, deepest: int = _DEEPEST) -> Iterator[Any]:
    """Yield the mutable containers in an attribute: lists, dicts and sets."""
    if is_constant(value) or isinstance(value, torch.Tensor | nn.Module | type) or not deepest:
        return
    if isinstance(value, list | tuple):
        if isinstance(value, list):
            yield value
        for each in value:
            yield from _mutable_parts(each, deepest - 1)
    elif isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _mutable_parts(each, deepest - 1)
    elif isinstance(value, set):
        yield value
    elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        yield from _mutable_parts(vars(value), deepest)


def _why_opaque(value: object, deepest: int = _DEEPEST) -> str | None:
    """Return a message that names an attribute whose changes cannot be detected, or None."""
    if is_constant(value) or isinstance(value, type):
        return None
    if isinstance(value, torch.Tensor):
        return None if type(value) in (torch.Tensor, nn.Parameter) else f"a {type(value).__name__}"
    if isinstance(value, nn.Module):
        return "a module that is not registered"
    if callable(value) and hasattr(value, "__name__"):
        return None  # purity analyses its code
    if not deepest:
        return "deeply nested"
    if isinstance(value, tuple) and any(isinstance(each, torch.Tensor) for each in value):
        return "a tuple of tensors"
    if isinstance(value, list | tuple):
        return next(filter(None, (_why_opaque(each, deepest - 1) for each in value)), None)
    if isinstance(value, dict):
        return next(filter(None, (_why_opaque(v, deepest - 1) for v in value.values())), None)
    if isinstance(value, set):
        return None if all(map(is_constant, value)) else "a set"
    if isinstance(getattr(value, "__dict__", None), dict) and not hasattr(value, "__slots__"):
        return _why_opaque(vars(value), deepest)
    return f"a {type(value).__name__}"


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return not one and not other  # hooks
    return type(one) is type(other) and is_constant(one) and one == other
