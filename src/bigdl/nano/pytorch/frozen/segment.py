"""Consecutive frozen modules that another runtime executes as a unit.

Before each call the modules are compared with the state for which the runtime was built. If they
have changed, their original code runs.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bigdl.common.errors import one_line
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.frozen.calls import Chain, MethodForward, autocast_now, is_transformed
from bigdl.nano.pytorch.frozen.state import ModulesState

T = TypeVar("T")

_MOST_SIZES = 8  # batch sizes whose results are compared with the modules' results
_TIMED = 6  # calls after which the segment must be faster
_GAIN = 0.95  # largest accepted time relative to the original modules


class FrozenSegment:
    """Consecutive frozen modules that are executed as a unit.

    ``attach`` replaces ``forward`` of the modules: the first module runs the whole segment, and the
    others pass its result on. Each call first checks whether the modules have changed. If so, their
    original code runs, and ``reason`` has the cause. ``detach`` restores ``forward``.

    Parameters
    ----------
    chain : Chain
        The calls of the modules.
    bound : float, optional
        Largest accepted relative distance from the modules' results. If given, both run the first
        batch of each size, and autocast must be as in the recorded call.

    Attributes
    ----------
    names : tuple of str
    method : str
        Name of the method that runs the segment.
    error : float
        Relative L2 distance of its result from that of the modules, on the sample.
    reason : str or None
        Reason why the last call ran the original modules; None if it did not.
    autocast : torch.dtype or None
        Autocast dtype of the recorded call.
    broken : str or None
        Reason why the segment is permanently disabled.
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
        self.accepts_cached = False  # its outputs are valid inputs, too
        self.plain_calls = 0  # consecutive calls of the original modules
        self.intermediates_used = 0  # how often the output of an inner module was used
        self._plain_seconds: dict[int, float] = {}  # by batch size
        self._fast_seconds: dict[int, list[float]] = {}
        self._intermediates = [_IntermediateSpec.of(call.input, call.output) for call in calls[:-1]]
        self._layout = _memory_format_of(self.output)
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
        """Name of the first module of the segment, and of the last module if there are several."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} … {self.names[-1]}"

    @property
    def module(self) -> nn.Module:
        """The modules combined into a single module."""
        return sequence_of(self.modules)

    @property
    def state(self) -> ModulesState:
        """Snapshot of the modules' tensors, attributes and code at the time of the build."""
        if self._state is None:
            self._state = ModulesState(self.modules)
        return self._state

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        """Run the original modules without autograd."""
        with torch.no_grad():
            for module in self.modules:
                x = plain_forward(module)(x)
        return x

    def use(
        self, method: str, run: Callable[[torch.Tensor], torch.Tensor], error: float | None = None
    ) -> None:
        """Set the method that runs the segment until the modules' weights change."""
        self.method, self._run = method, run
        if error is None:
            self._state = ModulesState(self.modules)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                error = distance(run(self.sample), self.eager(self.sample))
        self.error = error
        self._sizes.clear()

    def attach(self) -> None:
        """Replace ``forward`` of the modules."""
        self._thread = threading.get_ident()
        self._forwards = [module.forward for module in self.modules]
        for position, module in enumerate(self.modules):
            self._replaced.set(module, "forward", _SegmentForward(self, module, position))
        if self._parent is not None:
            self._replaced.set(self._parent, "forward", _ParentForward(self, self._parent))

    def detach(self) -> None:
        """Restore the original ``forward`` of the modules."""
        self._replaced.undo()

    # -- a call ------------------------------------------------------------------------------------

    def why_plain(self, x: object) -> str | None:
        """Return the reason why this input must run through the original modules, or None."""
        if self.broken:
            return self.broken
        if not isinstance(x, torch.Tensor) or type(x) not in (torch.Tensor, nn.Parameter):
            return "it is not called with one tensor"
        if torch.is_grad_enabled():
            if x.requires_grad:
                return "its input needs a gradient"
            if self.state.trains():
                return "some of its parameters require a gradient now"
        if x.dtype != self.sample.dtype or x.device != self.sample.device:
            return f"its input is {x.dtype} on {x.device}"
        if x.dim() != self.sample.dim() or x.shape[1:] != self.sample.shape[1:] or not len(x):
            return f"its input has the shape {tuple(x.shape)}"
        if is_transformed():
            return "it is called inside a transform of torch.func"
        if threading.get_ident() != self._thread:
            return "it is called by another thread"
        if self.bound is not None and autocast_now() != self.autocast:
            return "autocast settings have changed"
        try:
            return self.state.why_changed()
        except Exception as error:  # e.g. tensors that have moved to another device
            return f"its contents cannot be inspected ({one_line(error)})"

    def has_distinct_feature_shape(self) -> bool:
        """Return True if features and inputs differ in shape, so that they can be distinguished."""
        image, features = self.sample.shape[1:], self.output.shape[1:]
        return len(features) > 0 and (len(image) != len(features) or image[0] != features[0])

    def compute(self, x: Any) -> torch.Tensor | None:  # x: any input
        """Return the segment's result, or None if the original modules must run."""
        may_be_cached = (
            self.accepts_cached
            and self.has_distinct_feature_shape()
            and isinstance(x, torch.Tensor)
        )
        if may_be_cached and x.shape[1:] == self.output.shape[1:]:
            return x
        self.reason = self.why_plain(x)
        if self.reason is not None:
            return None
        if self.bound is not None and len(x) not in self._sizes:
            return self._run_both(x)
        started = time.perf_counter()
        try:
            with torch.no_grad():
                result = self._match_format(self._run(x))
        except Exception as error:  # runtimes may raise anything
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
        """Return True if measured calls are not faster than the original modules."""
        return any(
            len(self._fast_seconds.get(size, ())) == _TIMED
            and min(self._fast_seconds[size]) > _GAIN * plain
            for size, plain in self._plain_seconds.items()
        )

    def original(self, x: torch.Tensor) -> torch.Tensor:
        """Run the modules' forward methods that :meth:`attach` replaced."""
        with torch.no_grad():
            for forward in self._forwards:
                x = forward(x)
        return x

    def _run_both(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compare the accelerated method and the modules on a batch; return the modules' result."""
        if len(self._sizes) >= _MOST_SIZES:
            self.reason = "batches have many sizes"
            return None
        try:
            with torch.no_grad():
                other = self._match_format(self._run(x))
        except Exception as error:
            self.broken = self.reason = f"{self.method} cannot run ({one_line(error)})"
            return None
        started = time.perf_counter()
        result = self.original(x)
        self._plain_seconds[len(x)] = time.perf_counter() - started
        same = other.shape == result.shape and other.dtype == result.dtype
        if not same or not distance(other, result) <= cast("float", self.bound):
            self.broken = self.reason = f"a batch of {len(x)} has a different result"
        self._sizes.add(len(x))
        return result

    def _match_format(self, result: torch.Tensor) -> torch.Tensor:
        """Convert a result to the dtype and memory format of the modules' output."""
        if self.bound is None:
            return result
        result = result.to(self.output.dtype)
        if self._layout is not torch.contiguous_format:
            return result.contiguous(memory_format=self._layout)
        return result

    def first_output(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> object:
        """Return the first module's output: the full result, or a placeholder if modules follow."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if self._parent is not None and not self._inside:
            return forward(*args, **kwargs)
        result = self.compute(x)
        if result is None:
            self.plain_calls += 1
            return forward(*args, **kwargs)
        self.plain_calls = 0
        if len(self.modules) == 1:
            return result
        return _IntermediateTensor.of(self, 0, _SegmentRun(cast("torch.Tensor", x), result))

    def next_output(
        self, position: int, forward: Callable[..., Any], args: tuple, kwargs: dict
    ) -> object:
        """Return a later module's output; run its original code unless `args` is a placeholder."""
        intermediate = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(intermediate, _IntermediateTensor) or not intermediate.continues(
            self, position
        ):
            return forward(*_materialize(args), **_materialize(kwargs))
        if position == len(self.modules) - 1:
            return intermediate.run.result
        if self._intermediates[position].same:  # an in-place activation returns its input
            intermediate.position = position
            return intermediate
        return _IntermediateTensor.of(self, position, intermediate.run)

    def compute_intermediate(self, position: int, run: _SegmentRun) -> torch.Tensor:
        """Compute the output of an inner module, for use outside the segment."""
        self.intermediates_used += 1
        if run.x._version != run.version:
            raise RuntimeError(
                f"{self.names[0]} was given a tensor that has been changed in place before "
                f"{self.names[position]} was done; pass frozen_prefix=False"
            )
        x = run.x
        with torch.no_grad():
            for forward in self._forwards[: position + 1]:
                x = forward(x)
        return x


class _SegmentRun:
    """Input and result of one run of a segment, shared by the calls of its modules."""

    def __init__(self, x: torch.Tensor, result: torch.Tensor):
        self.x, self.version, self.result = x, x._version, result


class _IntermediateSpec:
    """Shape and dtype of an inner module's output, and whether the module returns its input."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, same: bool):
        self.shape, self.dtype, self.same = shape, dtype, same

    @classmethod
    def of(cls, previous: torch.Tensor | None, output: torch.Tensor | None) -> _IntermediateSpec:
        output = cast("torch.Tensor", output)
        return cls(output.shape, output.dtype, previous is output)


class _IntermediateTensor(torch.Tensor):
    """Placeholder for a tensor between the modules of a segment.

    The next module passes it on. Any other use computes the real tensor with the original modules.
    """

    segment: FrozenSegment
    position: int
    run: _SegmentRun
    value: torch.Tensor | None

    @classmethod
    def of(cls, segment: FrozenSegment, position: int, run: _SegmentRun) -> _IntermediateTensor:
        form = segment._intermediates[position]
        size = (len(run.x), *form.shape[1:])
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=form.dtype)  # type: ignore[attr-defined]  # not in its stubs
        vars(made).update(segment=segment, position=position, run=run, value=None)
        return made

    def continues(self, segment: FrozenSegment, position: int) -> bool:
        """Return True if this is an unused output of the module before `position` in `segment`."""
        attributes = vars(self)
        return (
            attributes["segment"] is segment
            and attributes["position"] == position - 1
            and attributes["value"] is None
        )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*_materialize(args), **_materialize(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*_materialize(args), **_materialize(kwargs or {}))


def _materialize(values: T) -> T:
    """Replace placeholders in nested arguments with the real tensors."""
    return tree_map_only(_IntermediateTensor, _value_of, values)


def _value_of(intermediate: _IntermediateTensor) -> torch.Tensor:
    attributes = vars(intermediate)
    if attributes["value"] is None:
        attributes["value"] = attributes["segment"].compute_intermediate(
            attributes["position"], attributes["run"]
        )
    return attributes["value"]


class _SegmentForward(MethodForward):
    """Forward method of a replaced module; runs the segment if possible."""

    def __init__(self, segment: FrozenSegment, module: nn.Module, position: int):
        super().__init__(module)
        self.segment, self.position = segment, position

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.forward(*args, **kwargs)
        if self.position == 0:
            return self.segment.first_output(self.forward, args, kwargs)
        return self.segment.next_output(self.position, self.forward, args, kwargs)


class _ParentForward(MethodForward):
    """Forward method of the module that calls a segment; the segment runs only in this method."""

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
    """Return True if a module belongs to an attached segment."""
    return type(vars(module).get("forward")) is _SegmentForward


def plain_forward(module: nn.Module) -> Callable:
    """Return a module's ``forward`` as defined by its class."""
    return types.MethodType(type(module).forward, module)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative L2 distance between two tensors."""
    one, other = one.detach().float(), other.detach().float()
    scale = torch.linalg.vector_norm(other).clamp_min(1e-12)
    return float(torch.linalg.vector_norm(one - other) / scale)


def _memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    if tensor.dim() != 4 or tensor.is_contiguous():
        return torch.contiguous_format
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def sequence_of(modules: Sequence[nn.Module]) -> nn.Module:
    """Combine modules into a single module."""
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)
