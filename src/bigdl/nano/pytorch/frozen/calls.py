"""Recording of calls of frozen modules, and selection of calls that can run as one segment.

During one run of a model, each module records its calls. A call is frozen if its output needs no
gradient: its parameters are not trained or gradients are off, and its input has no gradient.
Consecutive calls are joined if one's output is the next one's input, so that another runtime can
fuse a convolution, its norm and its activation.
"""

from __future__ import annotations

import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bigdl.common.errors import one_line
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.frozen.purity import RandomStateTrace, why_mode_matters
from bigdl.nano.pytorch.frozen.state import ModulesState
from bigdl.nano.pytorch.training.steps import ForwardOverride, is_model, state_preserved


@dataclass(eq=False)
class ModuleCall:
    """Recorded call of a module.

    Attributes
    ----------
    input, output : Tensor or None
        None if the module takes or returns anything but one tensor.
    frozen : bool
        True if no parameter in the module gets a gradient.
    tracked : bool
        True if its input requires a gradient.
    autocast : torch.dtype or None
        Dtype of autocast during the call.
    impure : str or None
        Reason why the call is not a pure computation.
    seconds : float
        Duration of the call.
    """

    name: str
    module: nn.Module
    input: torch.Tensor | None = None
    output: torch.Tensor | None = None
    frozen: bool = False
    tracked: bool = False
    autocast: torch.dtype | None = None
    impure: str | None = None
    seconds: float = 0.0
    before: int = 0  # version of the input at the start of the call
    version: int = 0  # version of the output at the end of the call
    inner: list[ModuleCall] = field(default_factory=list)


def autocast_now() -> torch.dtype | None:
    """Return the current autocast dtype on the CPU, or None."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def is_transformed() -> bool:
    """Return True under torch.func transforms, forward-mode AD, tensor modes or inference mode."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
        or torch.is_inference_mode_enabled()
    )


class Observation:
    """Recorder of the calls of a model's modules.

    Attributes
    ----------
    root : ModuleCall
        Root of the call tree; its ``inner`` are the outermost calls.
    counts : Counter
        Number of calls of each module.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self.root = ModuleCall("", cast("nn.Module", None))
        self.counts: Counter[nn.Module] = Counter()
        self._stack = [self.root]
        self._thread = threading.get_ident()
        self._replaced = AttributePatch()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that records this thread's module calls."""
        try:
            compiled = {m for m in self._model.modules() if _is_compiled(m)}
            within = {part for module in compiled for part in module.modules()}
            for name, module in self._model.named_modules():
                if is_model(module) and module not in within:
                    self._replaced.set(module, "forward", _ObservedForward(self, name, module))
            yield
        finally:
            self._replaced.undo()

    def call(self, observed: _ObservedForward, args: tuple, kwargs: dict) -> object:
        """Run a module's original forward and record input, output and side effects."""
        module, parent = observed.module, self._stack[-1]
        self.counts[module] += 1
        if parent.frozen or threading.get_ident() != self._thread or is_transformed():
            return observed.forward(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        call = ModuleCall(observed.name, module, autocast=autocast_now())
        grad = torch.is_grad_enabled()
        call.tracked = grad and any(tensor.requires_grad for tensor in tensors)
        call.frozen = not (grad and any(p.requires_grad for p in module.parameters()))
        single = args[0] if len(tensors) == len(args) == 1 and not kwargs else None
        parent.inner.append(call)
        self._stack.append(call)
        try:
            if call.frozen and not call.tracked:
                call.input = single if single is not None and tensors[0] is single else None
                return self._run_observed(call, observed, args, kwargs)
            return observed.forward(*args, **kwargs)
        finally:
            self._stack.pop()

    def _run_observed(
        self, call: ModuleCall, observed: _ObservedForward, args: tuple, kwargs: dict
    ) -> object:
        if call.input is None:
            return observed.forward(*args, **kwargs)
        call.before = call.input._version
        try:
            state, trace = ModulesState([observed.module]), RandomStateTrace()
        except Exception as error:  # e.g. tensors without memory or on another device
            call.impure = f"its contents cannot be inspected ({one_line(error)})"
            return observed.forward(*args, **kwargs)
        started = time.perf_counter()
        output = observed.forward(*args, **kwargs)
        call.seconds = time.perf_counter() - started
        try:
            call.impure = state.unknown or trace.why_changed() or _why_written(state)
            if type(output) is torch.Tensor:
                call.output, call.version = output, output._version
                call.impure = call.impure or _why_aliased(call, state)
        except Exception as error:
            call.impure = f"its contents cannot be inspected ({one_line(error)})"
        return output


def _why_written(state: ModulesState) -> str | None:
    changed = state.why_changed()
    return changed and f"a run changes it ({changed.partition(';')[0]})"


def _why_aliased(call: ModuleCall, state: ModulesState) -> str | None:
    """Return a message if a call's output shares memory or its input was changed, else None."""
    argument, output = cast("torch.Tensor", call.input), cast("torch.Tensor", call.output)
    if output is argument:
        return None
    if _shares_memory(output, [argument, *state.tensors]):
        return "its result is a part of its input or weights"
    return "it changes its input in address" if call.before != argument._version else None


def _shares_memory(output: torch.Tensor, others: list[torch.Tensor]) -> bool:
    address = output.untyped_storage().data_ptr()
    return any(address == other.untyped_storage().data_ptr() for other in others)


class MethodForward(ForwardOverride):
    """Replacement for a module's forward that compilers treat as the original method.

    TorchScript and Dynamo expect a method as ``forward`` and read the code of its function.
    """

    @property  # type: ignore[misc]  # isinstance uses it
    def __class__(self) -> type:
        return types.MethodType

    def __getattr__(self, name: str) -> Any:  # an attribute of the function
        if name in ("__func__", "__self__", "__globals__", "__code__", "__closure__"):
            return getattr(vars(self)["forward"], name)
        raise AttributeError(name)


class _ObservedForward(MethodForward):
    """Forward method of a module that records its calls."""

    def __init__(self, observation: Observation, name: str, module: nn.Module):
        super().__init__(module)
        self.observation, self.name = observation, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.forward(*args, **kwargs)
        return self.observation.call(self, args, kwargs)


def _is_compiled(module: nn.Module) -> bool:
    optimized = type(module).__module__.startswith("torch._dynamo.")  # avoids its slow import
    script = isinstance(module, torch.jit.ScriptModule)
    return optimized or script or module._compiled_call_impl is not None


@dataclass(eq=False)
class Chain:
    """Consecutive module calls by one caller that can be accelerated as one segment."""

    parent: ModuleCall
    calls: list[ModuleCall]


def chains_of(
    observation: Observation, repeated: bool = False
) -> tuple[list[Chain], list[tuple[str, str]]]:
    """Return chains of calls of frozen modules, and the frozen modules that cannot be replaced.

    Parameters
    ----------
    observation : Observation
    repeated : bool
        True to accept modules that were called more than once.
    """
    left_alone: list[tuple[str, str]] = []
    all_chains = list(_chains(observation.root, observation.counts, left_alone, repeated))
    # For a single layer the overhead of another runtime exceeds the gain.
    chains: list[Chain] = []
    seen: set[str] = set()
    for chain in all_chains:
        names = tuple(call.name for call in chain.calls)
        if _layers_with_weights(chain.calls) > 1 and not seen.intersection(names):
            chains.append(chain)
            seen.update(names)
    return chains, list(dict.fromkeys(left_alone))


def find_frozen(
    model: nn.Module, args: tuple, kwargs: dict
) -> tuple[list[Chain], list[tuple[str, str]]]:
    """Run a model in its current train or eval mode and find the calls of its frozen modules.

    Parameters
    ----------
    model : Module
        The model; it and the random state are not changed.
    args, kwargs
        Sample of its input.

    Returns
    -------
    chains : list of Chain
        Consecutive calls that can run as one.
    left_alone : list of (str, str)
        Names of frozen modules that cannot be replaced, with the reason.
    """
    observation = Observation(model)
    with state_preserved(model), torch.enable_grad(), observation.recording():
        model(*args, **kwargs)
    return chains_of(observation)


def _chains(
    parent: ModuleCall, counts: Counter, left_alone: list[tuple[str, str]], repeated: bool
) -> Iterator[Chain]:
    chain: list[ModuleCall] = []
    for call in parent.inner:
        reason = _why_not_replaceable(call) if call.frozen else None
        if call.frozen and counts[call.module] > 1 and not repeated:
            reason = reason or "it is called more than once"
        watched = _is_watched(call.module)
        joins = bool(chain) and _follows(chain[-1], call)
        argument = chain[0].input if joins else call.input
        if call.output is not None and call.output is argument and call.version != call.before:
            reason = reason or "it changes its input in address"
        if not call.frozen or reason or watched or not joins:
            yield Chain(parent, chain)
            chain = []
        if not call.frozen:
            yield from _chains(call, counts, left_alone, repeated)
        elif reason is None and watched:
            yield Chain(parent, [call])  # in a longer chain, hooks would see other tensors
        elif reason is None:
            chain.append(call)
        elif _layers_with_weights([call]):
            left_alone.append((call.name, reason))
    yield Chain(parent, chain)


def _follows(last: ModuleCall, call: ModuleCall) -> bool:
    """Return True if a call's input is the unchanged output of the previous call."""
    same = last.output is call.input and last.version == call.before
    return same and last.autocast == call.autocast


def _layers_with_weights(calls: list[ModuleCall]) -> int:
    parts = (part for call in calls for part in call.module.modules())
    return sum(bool(part._parameters) for part in parts)


def _why_not_replaceable(call: ModuleCall) -> str | None:
    """Return the reason why a frozen module cannot be replaced, or None."""
    if call.tracked:
        return "gradients flow through its input to modules before it"
    for name, part in call.module.named_modules(prefix=call.name):
        reason = why_mode_matters(part)
        if reason:
            return f"{name} ({type(part).__name__}) {reason}"
    inner = (part for part in call.module.modules() if part is not call.module)
    if any(map(_is_watched, inner)):
        return "a hook watches a module in it"
    if call.input is None or call.output is None:
        return "its input or result is not a single tensor"
    return call.impure


def _is_watched(module: nn.Module) -> bool:
    """Return True if a module has hooks other than Nano's training hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(
        not _owner_of(hook).startswith("bigdl.nano.") for each in hooks for hook in each.values()
    )


def _owner_of(hook: object) -> str:
    """Return the name of the Python module in which a hook or its class is defined."""
    owner = getattr(hook, "__self__", None)
    return str(getattr(hook if owner is None else type(owner), "__module__", ""))
