"""Frozen modules that run as one, by something else than their own code.

Before each call it is asked whether they would still compute what they computed when the other
way was made; if not, they run as their author wrote them.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bigdl.common.errors import one_line
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.frozen.calls import Chain, MethodForward, autocast_now, is_transformed
from bigdl.nano.pytorch.frozen.state import ModulesState

_MOST_SIZES = 8  # of batches that are compared with what the modules give themselves
_TIMED = 6  # calls after which it has to be faster
_GAIN = 0.95  # largest share of the time of the modules themselves


class FrozenSegment:
    """Consecutive frozen modules that run as one.

    It is found, then built, then attached, which gives its modules a new ``forward``; the first of
    them runs the whole segment and the others pass its result on. In each call it asks first
    whether its modules are still what they were. If not, they run as their author wrote them, and
    ``reason`` says why. ``detach`` takes the new ``forward`` away.

    Parameters
    ----------
    chain : Chain
        The calls of the modules.
    bound : float, optional
        Largest relative distance to what the modules give themselves. With it the first batch of
        each size is run by both, and calls have to be as the one that was seen (autocast).

    Attributes
    ----------
    names : tuple of str
    method : str
        What it runs by.
    error : float
        Relative L2 distance of its result to that of the modules, on the sample.
    reason : str or None
        Why the modules ran as written in the last call; None if they did not.
    autocast : torch.dtype or None
        In which its modules were called.
    broken : str or None
        Why it does not run any more.
    """

    def __init__(self, chain: Chain, bound: float | None = None):
        calls = chain.calls
        self.names = tuple(call.name for call in calls)
        self.modules = tuple(call.module for call in calls)
        self.sample = cast("torch.Tensor", calls[0].input).detach()
        self.output = cast("torch.Tensor", calls[-1].output).detach()
        self.method, self.error, self.bound = "eager", 0.0, bound
        self.reason: str | None = None
        self.broken: str | None = None
        self.takes_cached = False  # what it gave may come in as well
        self.plain_calls = 0  # one after the other that ran as written
        self.opened = 0  # how often something between its modules was used
        self._plain_seconds: dict[int, float] = {}  # by the size of the batch
        self._fast_seconds: dict[int, list[float]] = {}
        self._between = [_Between.of(call.input, call.output) for call in calls[:-1]]
        self._layout = _layout_of(self.output)
        self.autocast = calls[0].autocast
        self._sizes: set[int] = set()
        self._run: Callable[[torch.Tensor], torch.Tensor] = self.eager
        self._replaced = AttributePatch()
        self._parent: nn.Module | None = None if len(calls) == 1 else chain.parent.module
        self._inside = 0  # calls of the parent that are running
        self._thread = threading.get_ident()
        self._forwards: list[Callable[..., Any]] = []
        self._state: ModulesState | None = None

    @property
    def name(self) -> str:
        """Return the name of the first module, and of the last if there are more."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} … {self.names[-1]}"

    @property
    def module(self) -> nn.Module:
        """Return the modules as one."""
        return sequence_of(self.modules)

    @property
    def state(self) -> ModulesState:
        """Return what its result depends on, as it was when it was built."""
        if self._state is None:
            self._state = ModulesState(self.modules)
        return self._state

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        """Run the modules as written, without autograd."""
        with torch.no_grad():
            for module in self.modules:
                x = plain_forward(module)(x)
        return x

    def use(
        self, method: str, run: Callable[[torch.Tensor], torch.Tensor], error: float | None = None
    ) -> None:
        """Run by something else from now on, with the weights that the modules have now."""
        self.method, self._run = method, run
        if error is None:
            self._state = ModulesState(self.modules)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                error = distance(run(self.sample), self.eager(self.sample))
        self.error = error
        self._sizes.clear()

    def attach(self) -> None:
        """Give the modules their new ``forward``."""
        self._thread = threading.get_ident()
        self._forwards = [module.forward for module in self.modules]
        for place, module in enumerate(self.modules):
            self._replaced.set(module, "forward", _SegmentForward(self, module, place))
        if self._parent is not None:
            self._replaced.set(self._parent, "forward", _ParentForward(self, self._parent))

    def detach(self) -> None:
        """Give the modules their own ``forward`` back."""
        self._replaced.undo()

    # -- a call ------------------------------------------------------------------------------------

    def why_plain(self, x: object) -> str | None:
        """Return why the modules have to run as written on this input; None if they need not."""
        if self.broken:
            return self.broken
        if not isinstance(x, torch.Tensor) or type(x) not in (torch.Tensor, nn.Parameter):
            return "it is not called with one tensor"
        if torch.is_grad_enabled():
            if x.requires_grad:
                return "its input needs a gradient"
            if self.state.trains():
                return "some of its parameters are trained now"
        if x.dtype != self.sample.dtype or x.device != self.sample.device:
            return f"its input is {x.dtype} on {x.device}"
        if x.dim() != self.sample.dim() or x.shape[1:] != self.sample.shape[1:] or not len(x):
            return f"its input has the shape {tuple(x.shape)}"
        if is_transformed():
            return "it is called within a transformation of functions"
        if threading.get_ident() != self._thread:
            return "it is called by another thread"
        if self.bound is not None and autocast_now() != self.autocast:
            return "autocast is another"
        try:
            return self.state.why_changed()
        except Exception as error:  # of tensors that are no longer in this memory
            return f"what it holds cannot be looked at ({one_line(error)})"

    def takes_features(self) -> bool:
        """Return True if its results can be told from its inputs by their shape."""
        image, features = self.sample.shape[1:], self.output.shape[1:]
        return len(features) > 0 and (len(image) != len(features) or image[0] != features[0])

    def enter(self, x: Any) -> torch.Tensor | None:
        """Return the segment's result; None if the modules have to run as written."""
        may_be_cached = self.takes_cached and self.takes_features() and isinstance(x, torch.Tensor)
        if may_be_cached and x.shape[1:] == self.output.shape[1:]:
            return x
        self.reason = self.why_plain(x)
        if self.reason is not None:
            return None
        if self.bound is not None and len(x) not in self._sizes:
            return self._compared(x)
        started = time.perf_counter()
        try:
            with torch.no_grad():
                result = self._in_form(self._run(x))
        except Exception as error:  # runtimes raise whatever they like
            if self.bound is None:
                raise
            self.broken = self.reason = f"{self.method} cannot run ({one_line(error)})"
            return None
        if self.bound is not None:
            times = self._fast_seconds.setdefault(len(x), [])
            times.append(time.perf_counter() - started)
            del times[:-_TIMED]
        return result

    def is_slow(self) -> bool:
        """Return True if it has turned out to take as long as the modules."""
        return any(
            len(self._fast_seconds.get(size, ())) == _TIMED
            and min(self._fast_seconds[size]) > _GAIN * plain
            for size, plain in self._plain_seconds.items()
        )

    def original(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the modules give themselves, as they would in this call."""
        with torch.no_grad():
            for forward in self._forwards:
                x = forward(x)
        return x

    def _compared(self, x: torch.Tensor) -> torch.Tensor | None:
        """Run a batch of a new size by both; the result is that of the modules."""
        if len(self._sizes) >= _MOST_SIZES:
            self.reason = "batches have many sizes"
            return None
        try:
            with torch.no_grad():
                other = self._in_form(self._run(x))
        except Exception as error:
            self.broken = self.reason = f"{self.method} cannot run ({one_line(error)})"
            return None
        started = time.perf_counter()
        result = self.original(x)
        self._plain_seconds[len(x)] = time.perf_counter() - started
        same = other.shape == result.shape and other.dtype == result.dtype
        if not same or not distance(other, result) <= cast("float", self.bound):
            self.broken = self.reason = f"a batch of {len(x)} has another result"
        self._sizes.add(len(x))
        return result

    def _in_form(self, result: torch.Tensor) -> torch.Tensor:
        """Return a result in the type and the layout that the modules give."""
        if self.bound is None:
            return result
        result = result.to(self.output.dtype)
        if self._layout is not torch.contiguous_format:
            return result.contiguous(memory_format=self._layout)
        return result

    def first(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> object:
        """Return what the first module gives: the result, or what stands for it until the last."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if self._parent is not None and not self._inside:
            return forward(*args, **kwargs)
        result = self.enter(x)
        if result is None:
            self.plain_calls += 1
            return forward(*args, **kwargs)
        self.plain_calls = 0
        if len(self.modules) == 1:
            return result
        return _Passing.of(self, 0, _Passed(cast("torch.Tensor", x), result))

    def later(self, place: int, forward: Callable[..., Any], args: tuple, kwargs: dict) -> object:
        """Return what a later module gives; given something of others, it runs as written."""
        passing = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(passing, _Passing) or not passing.continues(self, place):
            return forward(*_real(args), **_real(kwargs))
        if place == len(self.modules) - 1:
            return passing.passed.result
        if self._between[place].same:  # an activation in place gives the tensor that it got
            passing.place = place
            return passing
        return _Passing.of(self, place, passing.passed)

    def between(self, place: int, passed: _Passed) -> torch.Tensor:
        """Return what a module in the middle gives, for somebody else who wants it."""
        self.opened += 1
        if passed.x._version != passed.version:
            raise RuntimeError(
                f"{self.names[0]} was given a tensor that has been changed in place before "
                f"{self.names[place]} was done; pass frozen_prefix=False"
            )
        x = passed.x
        with torch.no_grad():
            for forward in self._forwards[: place + 1]:
                x = forward(x)
        return x


class _Passed:
    """The input and the result of a segment while its modules are called one after the other."""

    def __init__(self, x: torch.Tensor, result: torch.Tensor):
        self.x, self.version, self.result = x, x._version, result


class _Between:
    """The shape of what a module in the middle gives, and whether it is the tensor it was given."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, same: bool):
        self.shape, self.dtype, self.same = shape, dtype, same

    @classmethod
    def of(cls, given: torch.Tensor | None, output: torch.Tensor | None) -> _Between:
        output = cast("torch.Tensor", output)
        return cls(output.shape, output.dtype, given is output)


class _Passing(torch.Tensor):
    """Stands for a tensor between the modules of a segment.

    Only the next module takes it as it is. For anybody else it is the tensor itself, which the
    modules then compute as written.
    """

    segment: FrozenSegment
    place: int
    passed: _Passed
    value: torch.Tensor | None

    @classmethod
    def of(cls, segment: FrozenSegment, place: int, passed: _Passed) -> _Passing:
        form = segment._between[place]
        size = (len(passed.x), *form.shape[1:])
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=form.dtype)  # type: ignore[attr-defined]  # not in its stubs
        vars(made).update(segment=segment, place=place, passed=passed, value=None)
        return made

    def continues(self, segment: FrozenSegment, place: int) -> bool:
        """Return True if a module of a segment is the next, and nobody has looked."""
        mine = vars(self)
        return mine["segment"] is segment and mine["place"] == place - 1 and mine["value"] is None

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        return function(*_real(args), **_real(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        return function(*_real(args), **_real(kwargs or {}))


def _real(values: object) -> Any:
    """Return arguments with tensors in the place of what stands for them."""
    return tree_map_only(_Passing, _value_of, values)


def _value_of(passing: _Passing) -> torch.Tensor:
    mine = vars(passing)
    if mine["value"] is None:
        mine["value"] = mine["segment"].between(mine["place"], mine["passed"])
    return mine["value"]


class _SegmentForward(MethodForward):
    """The forward of a replaced module, which asks the segment first."""

    def __init__(self, segment: FrozenSegment, module: nn.Module, place: int):
        super().__init__(module)
        self.segment, self.place = segment, place

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.forward(*args, **kwargs)
        if self.place == 0:
            return self.segment.first(self.forward, args, kwargs)
        return self.segment.later(self.place, self.forward, args, kwargs)


class _ParentForward(MethodForward):
    """The forward of the module that calls those of a segment, which run as one only within it."""

    def __init__(self, segment: FrozenSegment, module: nn.Module):
        super().__init__(module)
        self.segment = segment

    def __call__(self, *args: object, **kwargs: object) -> object:
        if threading.get_ident() != self.segment._thread:
            return self.forward(*args, **kwargs)
        self.segment._inside += 1
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.segment._inside -= 1


def is_replaced(module: nn.Module) -> bool:
    """Return True while a module is one of a segment's that is attached."""
    return type(vars(module).get("forward")) is _SegmentForward


def plain_forward(module: nn.Module) -> Callable:
    """Return a module's ``forward`` as its class has it."""
    return types.MethodType(type(module).forward, module)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative L2 distance of a tensor to another."""
    one, other = one.detach().float(), other.detach().float()
    scale = torch.linalg.vector_norm(other).clamp_min(1e-12)
    return float(torch.linalg.vector_norm(one - other) / scale)


def _layout_of(tensor: torch.Tensor) -> torch.memory_format:
    if tensor.dim() != 4 or tensor.is_contiguous():
        return torch.contiguous_format
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def sequence_of(modules: Sequence[nn.Module]) -> nn.Module:
    """Return modules as one."""
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)
