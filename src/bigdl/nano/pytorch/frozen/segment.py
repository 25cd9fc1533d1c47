"""A run of frozen modules that always compute the same, so that another runtime may run them."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

__all__ = ["Segment"]

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)


class Segment:
    """Consecutive frozen modules that run as one.

    It is found, then built, then attached, which gives its modules a new ``forward``; the first of
    them runs the whole segment and the others pass its result on. In each call it asks first
    whether its modules are still what they were. If not, they run as their author wrote them, and
    ``reason`` says why. ``detach`` takes the new ``forward`` away.

    Parameters
    ----------
    names : sequence of str
        Of the modules in the model.
    modules : sequence of Module
    sample : Tensor
        An input of the first of them.
    output : Tensor
        What the last of them makes of it.

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

    def __init__(
        self,
        names: Sequence[str],
        modules: Sequence[nn.Module],
        sample: torch.Tensor,
        output: torch.Tensor,
    ):
        self.names = tuple(names)
        self.modules = tuple(modules)
        self.sample, self.output = sample.detach(), output.detach()
        self.method, self.error = "eager", 0.0
        self.reason: str | None = None
        self._run: Callable[[torch.Tensor], torch.Tensor] = self.eager
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
        first, *others = self.modules
        first.forward = _First(self, first)
        for module in others:
            module.forward = _Follower(self, module)

    def detach(self) -> None:
        """Give the modules their own ``forward`` back."""
        for module in self.modules:
            if isinstance(module.__dict__.get("forward"), _Replaced):
                del module.forward

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

    def passes(self, x: torch.Tensor) -> bool:
        """Return True for the result of the segment, so that a later module has nothing to do."""
        return x is getattr(self._last, "result", None)


class _Replaced:
    """A module's ``forward``; a pickled or copied module gets its own back."""

    def __init__(self, segment: Segment, module: nn.Module):
        self.segment, self.module = segment, module

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_forward, (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable:
        # A module is in the memo before its attributes are copied.
        return plain_forward(memo[id(self.module)])


class _First(_Replaced):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = self.segment.enter(x)
        return plain_forward(self.module)(x) if result is None else result


class _Follower(_Replaced):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.segment.passes(x) else plain_forward(self.module)(x)


def plain_forward(module: nn.Module) -> Callable:
    """Return a module's ``forward`` as its class has it."""
    return types.MethodType(type(module).forward, module)


def why_not_deterministic(module: nn.Module, name: str) -> str | None:
    """Return why a module without trained parameters may not be replaced.

    Parameters
    ----------
    module : Module
    name : str
        What the user calls it.

    Returns
    -------
    str or None
        One sentence; None if it always computes the same.
    """
    for inner, part in module.named_modules(prefix=name):
        reason = _why_random(part)
        if reason:
            return f"{inner} ({type(part).__name__}) {reason}"
    return None


def _why_random(part: nn.Module) -> str | None:
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
