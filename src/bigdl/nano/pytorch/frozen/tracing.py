"""Find the frozen modules of a model by running it once.

Each call of a module is noted with its input and its output. A frozen module whose input needs no
gradient can be replaced as a whole. Neighbours are joined where one's output is the next one's
input, so that a convolution, its norm and its activation stay one in the other runtime. That
nothing else uses what lies between them cannot be seen here: it is tried out afterwards.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bigdl.nano.pytorch.frozen.segment import why_not_deterministic


@dataclass(eq=False)
class Call:
    """One call of a module in a run of the model."""

    name: str
    module: nn.Module
    input: torch.Tensor | None = None  # None: it takes something else than one tensor
    output: torch.Tensor | None = None
    tracked: bool = False  # whether gradients flow through its input
    inner: list[Call] = field(default_factory=list)


@dataclass
class FrozenCalls:
    """The frozen modules that a run has shown.

    Attributes
    ----------
    chains : list of list of Call
        Neighbours that can run as one.
    left_alone : list of (str, str)
        Name of a frozen module, and why it cannot be replaced.
    arguments : list of Tensor
        Of the model's call.
    """

    chains: list[list[Call]]
    left_alone: list[tuple[str, str]]
    arguments: list[torch.Tensor]

    def is_argument(self, tensor: torch.Tensor | None) -> bool:
        """Return True if the model itself was called with this tensor."""
        return any(tensor is argument for argument in self.arguments)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, a model may run as in training; its buffers and the random state come back."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def find_frozen(model: nn.Module, args: tuple, kwargs: dict) -> FrozenCalls:
    """Run a model in the modes that it is in, and find what is frozen.

    Parameters
    ----------
    model : Module
        Neither it nor the random state is changed.
    args, kwargs
        A sample of its input.
    """
    root = _record(model, args, kwargs)
    counts = Counter(id(call.module) for call in _all(root))
    frozen = FrozenCalls([], [], [x for x in (*args, *kwargs.values()) if torch.is_tensor(x)])
    _collect(root, counts, frozen)
    return frozen


def _record(model: nn.Module, args: tuple, kwargs: dict) -> Call:
    names = {module: name for name, module in model.named_modules()}
    root = Call("", model)
    stack = [Call("", nn.Identity(), inner=[])]
    handles = []

    def before(module: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        call = root if module is model else Call(names[module], module)
        tensors = [x for x in (*given, *named.values()) if torch.is_tensor(x)]
        call.input = tensors[0] if len(tensors) == len(given) == 1 and not named else None
        call.tracked = any(tensor.requires_grad for tensor in tensors)
        stack[-1].inner.append(call)
        stack.append(call)

    def after(module: nn.Module, given: tuple, result: Any) -> None:
        stack.pop().output = result if torch.is_tensor(result) else None

    try:
        for module in names:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        with undisturbed(model), torch.enable_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return root


def _all(call: Call) -> Iterator[Call]:
    for inner in call.inner:
        yield inner
        yield from _all(inner)


def _collect(parent: Call, counts: Counter, frozen: FrozenCalls) -> None:
    """Add the chains among the calls that a module makes, and within those that are trained."""
    chain: list[Call] = []
    for call in parent.inner:
        trained = any(parameter.requires_grad for parameter in call.module.parameters())
        reason = None if trained else _why_not_replaceable(call, counts)
        watched = _is_watched(call.module)
        if trained or reason or watched or (chain and chain[-1].output is not call.input):
            _close(chain, frozen)
            chain = []
        if trained:
            _collect(call, counts, frozen)
        elif reason is None and watched:
            _close([call], frozen)  # its own hooks see what they saw, neighbours' would not
        elif reason is None:
            chain.append(call)
        elif _layers_with_weights([call]):
            frozen.left_alone.append((call.name, reason))
    _close(chain, frozen)


def _close(chain: list[Call], frozen: FrozenCalls) -> None:
    """Add a chain, unless it is a single layer: the way into another runtime costs more."""
    if _layers_with_weights(chain) > 1:
        frozen.chains.append(chain)


def _layers_with_weights(calls: list[Call]) -> int:
    parts = (part for call in calls for part in call.module.modules())
    return sum(bool(part._parameters) for part in parts)


def _why_not_replaceable(call: Call, counts: Counter) -> str | None:
    """Return why a frozen module cannot be replaced; None if it can."""
    if call.tracked:
        return "gradients flow through its input to modules before it"
    reason = why_not_deterministic(call.module, call.name)
    if reason is not None:
        return reason
    if counts[id(call.module)] > 1:
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
