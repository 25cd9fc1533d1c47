"""Frozen modules that always compute the same, so that another runtime may run them.

They are found by running the model once: each call of a module is noted with its input and its
output. A frozen module whose input needs no gradient can be replaced as a whole. Neighbours are
joined where one's output is the next one's input, so that a convolution, its norm and its
activation stay one in the other runtime. That nothing else uses what lies between them cannot be
seen here: it is tried out afterwards.
"""

from __future__ import annotations

import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from bigdl.nano.pytorch.training.steps import OtherForward, undisturbed
from bigdl.nano.replaced import Replaced

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)


@dataclass(eq=False)
class Call:
    """One call of a module in a run of the model."""

    name: str
    module: nn.Module
    input: torch.Tensor | None = None  # None: it takes something else than one tensor
    output: torch.Tensor | None = None
    tracked: bool = False  # whether gradients flow through its input
    inner: list[Call] = field(default_factory=list)


class Segment:
    """Consecutive frozen modules that run as one.

    It is found, then built, then attached, which gives its modules a new ``forward``; the first of
    them runs the whole segment and the others pass its result on. In each call it asks first
    whether its modules are still what they were. If not, they run as their author wrote them, and
    ``reason`` says why. ``detach`` takes the new ``forward`` away.

    Parameters
    ----------
    calls : sequence of Call
        The calls of the modules, in their order, with tensors as inputs and outputs.

    Attributes
    ----------
    names : tuple of str
    method : str
        What it runs by.
    error : float
        Relative L2 distance of its result to that of the modules, on the sample.
    reason : str or None
        Why the modules ran as written in the last call; None if they did not.
    """

    def __init__(self, calls: Sequence[Call]):
        self.names = tuple(call.name for call in calls)
        self.modules = tuple(call.module for call in calls)
        self.sample = cast("torch.Tensor", calls[0].input).detach()
        self.output = cast("torch.Tensor", calls[-1].output).detach()
        self.method, self.error = "eager", 0.0
        self.reason: str | None = None
        self._run: Callable[[torch.Tensor], torch.Tensor] = self.eager
        self._replaced = Replaced()
        self._last = threading.local()
        self._remember()

    @property
    def name(self) -> str:
        """Return the name of the first module, and of the last if there are more."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} … {self.names[-1]}"

    @property
    def module(self) -> nn.Module:
        """Return the modules as one."""
        return self.modules[0] if len(self.modules) == 1 else nn.Sequential(*self.modules)

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        """Run the modules as written, without autograd."""
        with torch.no_grad():
            for module in self.modules:
                x = plain_forward(module)(x)
        return x

    def use(self, method: str, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Run by something else from now on, with the weights that the modules have now."""
        self.method, self._run = method, run
        self._remember()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            expected, result = self.eager(self.sample), run(self.sample)
            scale = torch.linalg.vector_norm(expected)
            distance = torch.linalg.vector_norm(result - expected)
            self.error = float(distance / scale.clamp_min(1e-12))

    def _remember(self) -> None:
        parameters = [p for module in self.modules for p in module.parameters()]
        buffers = [b for module in self.modules for b in module.buffers()]
        self._parameters = parameters
        self._versions = [(tensor, tensor._version) for tensor in (*parameters, *buffers)]
        self._modes = modes_of(self.modules)

    def attach(self) -> None:
        """Give the modules their new ``forward``."""
        for module in self.modules:
            self._replaced.set(module, "forward", _SegmentForward(self, module))

    def detach(self) -> None:
        """Give the modules their own ``forward`` back."""
        self._replaced.undo()

    def why_plain(self, x: torch.Tensor) -> str | None:
        """Return why the modules have to run as written on this input; None if they need not."""
        if x.requires_grad and torch.is_grad_enabled():
            return "its input needs a gradient"
        if x.dtype != self.sample.dtype or x.device != self.sample.device:
            return f"its input is {x.dtype} on {x.device}"
        if any(parameter.requires_grad for parameter in self._parameters):
            return "some of its parameters are trained now"
        if any(module.training != mode for module, mode in self._modes):
            return "some of its modules changed between train and eval mode"
        if any(tensor._version != version for tensor, version in self._versions):
            return "its weights have changed; call refresh()"
        return None

    def takes_features(self) -> bool:
        """Return True if its results can be told from its inputs by their shape."""
        image, features = self.sample.shape[1:], self.output.shape[1:]
        return len(features) > 0 and (len(image) != len(features) or image[0] != features[0])

    def enter(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the segment's result; None if the modules have to run as written."""
        self._last.result = None
        if self.takes_features() and x.shape[1:] == self.output.shape[1:]:
            self._last.result = x
            return x
        self.reason = self.why_plain(x)
        if self.reason is not None:
            return None
        with torch.no_grad():
            self._last.result = self._run(x)
        return self._last.result

    def result_in(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Return what one of the modules gives, called with `x`; None to run it as written.

        The first gives the segment's result, and a later one has nothing to do with that.
        """
        if module is self.modules[0]:
            return self.enter(x)
        return x if x is getattr(self._last, "result", None) else None


class _SegmentForward(OtherForward):
    """The forward of a replaced module, which asks the segment first."""

    def __init__(self, segment: Segment, module: nn.Module):
        super().__init__(module)
        self.segment = segment

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = self.segment.result_in(self.module, x)
        return self.forward(x) if result is None else result


def plain_forward(module: nn.Module) -> Callable:
    """Return a module's ``forward`` as its class has it."""
    return types.MethodType(type(module).forward, module)


def _why_random(part: nn.Module) -> str | None:
    """Return why a module may not always compute the same; None if it does."""
    if isinstance(part, _NORMS) and (part.training or part.running_mean is None):
        if part.running_mean is None and not part.training:
            return "has no running statistics, so an image's result depends on its batch"
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or part.track_running_stats:
            return "is in train mode, so its statistics follow the batches; call eval() on it"
    if not part.training:
        return None
    if isinstance(part, _RANDOM) and getattr(part, "p", cast("Any", getattr(part, "dropout", 1))):
        return "is in train mode, so it draws at random; call eval() on it"
    if _of_user_and_reads_mode(part):
        return "is in train mode and asks for its mode; call eval() on it"
    return None


def _of_user_and_reads_mode(part: nn.Module) -> bool:
    if type(part).__module__.startswith("torch.nn."):
        return False
    code = getattr(type(part).forward, "__code__", None)
    return code is None or "training" in code.co_names


def modes_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, bool]]:
    """Return the modules whose mode matters, and the modes that they have."""
    return [
        (part, part.training)
        for module in modules
        for part in module.modules()
        if isinstance(part, _NORMS + _RANDOM) or _of_user_and_reads_mode(part)
    ]


def find_frozen(
    model: nn.Module, args: tuple, kwargs: dict
) -> tuple[list[list[Call]], list[tuple[str, str]]]:
    """Run a model in the modes that it is in, and find what is frozen.

    Parameters
    ----------
    model : Module
        Neither it nor the random state is changed.
    args, kwargs
        A sample of its input.

    Returns
    -------
    chains : list of list of Call
        Neighbours that can run as one.
    left_alone : list of (str, str)
        Name of a frozen module, and why it cannot be replaced.
    """
    root, counts = _record(model, args, kwargs)
    left_alone: list[tuple[str, str]] = []
    # Of a single layer the way into another runtime costs more.
    chains = [each for each in _chains(root, counts, left_alone) if _layers_with_weights(each) > 1]
    return chains, left_alone


def _record(model: nn.Module, args: tuple, kwargs: dict) -> tuple[Call, Counter[nn.Module]]:
    """Run the model once; return its call, with all calls in it, and how often each is called."""
    names = {module: name for name, module in model.named_modules()}
    stack = [Call("", model)]
    counts: Counter[nn.Module] = Counter()

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x)]
        single = tensors[0] if len(tensors) == len(args) == 1 and not kwargs else None
        tracked = any(tensor.requires_grad for tensor in tensors)
        call = Call(names[module], module, single, tracked=tracked)
        stack[-1].inner.append(call)
        stack.append(call)
        counts[module] += 1

    def after(module: nn.Module, args: tuple, result: Any) -> None:
        stack.pop().output = result if torch.is_tensor(result) else None

    with ExitStack() as hooks, undisturbed(model), torch.enable_grad():
        for module in names:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        model(*args, **kwargs)
    return stack[0].inner[0], counts


def _chains(
    parent: Call, counts: Counter, left_alone: list[tuple[str, str]]
) -> Iterator[list[Call]]:
    """Yield chains of the calls that a module makes, and of those within what is trained."""
    chain: list[Call] = []
    for call in parent.inner:
        trained = any(parameter.requires_grad for parameter in call.module.parameters())
        reason = None if trained else _why_not_replaceable(call, counts)
        watched = _is_watched(call.module)
        if trained or reason or watched or (chain and chain[-1].output is not call.input):
            yield chain
            chain = []
        if trained:
            yield from _chains(call, counts, left_alone)
        elif reason is None and watched:
            yield [call]  # its own hooks see what they saw, neighbours' would not
        elif reason is None:
            chain.append(call)
        elif _layers_with_weights([call]):
            left_alone.append((call.name, reason))
    yield chain


def _layers_with_weights(calls: list[Call]) -> int:
    parts = (part for call in calls for part in call.module.modules())
    return sum(bool(part._parameters) for part in parts)


def _why_not_replaceable(call: Call, counts: Counter) -> str | None:
    """Return why a frozen module cannot be replaced; None if it can."""
    if call.tracked:
        return "gradients flow through its input to modules before it"
    for name, part in call.module.named_modules(prefix=call.name):
        reason = _why_random(part)
        if reason:
            return f"{name} ({type(part).__name__}) {reason}"
    if counts[call.module] > 1:
        return "it is called more than once"
    if call.input is None or call.output is None:
        return "it takes or gives something else than one tensor"
    inner = (part for part in call.module.modules() if part is not call.module)
    if any(map(_is_watched, inner)):
        return "a hook watches a module in it"
    return None


def _is_watched(module: nn.Module) -> bool:
    """Return True if a module has hooks of the user's; those of Nano's own training do not mind."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(
        not _owner_of(hook).startswith("bigdl.nano.") for each in hooks for hook in each.values()
    )


def _owner_of(hook: Any) -> str:
    """Return the module in which the class of a bound method is, or the function."""
    owner = getattr(hook, "__self__", None)
    return str(getattr(hook if owner is None else type(owner), "__module__", ""))
