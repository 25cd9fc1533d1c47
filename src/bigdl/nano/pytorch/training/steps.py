"""Faster training steps: bfloat16, channels-last layout, fused optimizers and TorchInductor.

:class:`FastSteps` applies :class:`~bigdl.nano.pytorch.training.options.TrainingOptions` to a module
in one process, and undoes what must not stay.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bigdl.common.cpu import isa_flags
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.training.optimizers import fuse
from bigdl.nano.pytorch.training.options import TrainingOptions

_log = logging.getLogger(__name__)
_CONSTANTS = (bool, int, float, str, tuple, type(None))
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
_LARGE_PRODUCT = 1 << 18  # weights of one linear layer from which on casts cost less than they gain


class FastSteps:
    """Settings of one module while it is trained.

    Parameters
    ----------
    options : TrainingOptions
    module : Module
        In float32 on the CPU, or nothing is done.
    calls : bool
        Whether the module is called by a loop that is not ours: then its first call, and not the
        first step, shows whether the program bears the layout.
    device : {"cpu", "cuda"}
        Where it is trained, if it is moved there afterwards.

    Attributes
    ----------
    report : list of str
        What holds, in a few words each.
    """

    def __init__(
        self,
        options: TrainingOptions,
        module: nn.Module,
        *,
        calls: bool = False,
        device: str = "cpu",
    ):
        self._options = options
        self._device = device
        self._module = module
        self._undoing = ExitStack()
        self._guard: ModuleState | None = None
        self.channels_last = False
        self.report: list[str] = []
        if any(parameter.device.type != "cpu" for parameter in module.parameters()):
            return
        if options.inductor is True:  # first: what compiles is the module's own code
            self._replace_forwards(computing_children(module) or [module], CompiledForward)
        self._choose_precision()
        self._choose_layout()
        if options.inductor is True:
            self.report.append("TorchInductor")
        if self.channels_last and calls:
            self._convert_calls()

    def batch(self, batch: Any) -> Any:
        """Return a batch in the layout of the module."""
        return tree_map_only(torch.Tensor, _last, batch) if self.channels_last else batch

    def step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a training step; the first one shows whether the program bears the layout."""
        guard, self._guard = self._guard, None
        if guard is None:
            return step(*args, **kwargs)
        try:
            return step(*args, **kwargs)
        except RuntimeError as error:
            if not _is_of_layout(error):
                raise
        guard.restore()
        self._drop_layout()
        args, kwargs = tree_map_only(torch.Tensor, _contiguous, (args, kwargs))
        return step(*args, **kwargs)

    def optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let optimizers use their fused implementation."""
        if not self._options.fused_optimizers:
            return
        names = {type(each).__name__ for each in optimizers if fuse(each, self._module)}
        if names:
            self.report.append(f"fused {' and '.join(sorted(names))}")

    def undo(self) -> None:
        """Leave the module as it was, but for what it has learned."""
        self._undoing.close()
        if self.channels_last:
            self._set_layout(torch.contiguous_format)

    def _choose_precision(self) -> None:
        if self._options.precision is not None:
            self.report.append(f"precision {self._options.precision}")
            return
        instructions = bf16_instructions(self._device)
        if instructions is None or not gains_from_bf16(self._module):
            self.report.append("float32")
            return
        parts = [self._module, *computing_children(self._module)]
        self._replace_forwards(parts, functools.partial(_Bf16Forward, device=self._device))
        self.report.append(f"bfloat16 in training steps ({instructions})")

    def _choose_layout(self) -> None:
        wanted = self._options.channels_last
        if wanted is False or (wanted is None and not gains_from_channels_last(self._module)):
            return
        if wanted is None:
            self._guard = ModuleState(self._module)
        self._set_layout(torch.channels_last)
        self.report.append("channels_last")

    def _convert_calls(self) -> None:
        hook = self._module.register_forward_pre_hook(self._in_layout, with_kwargs=True)
        self._undoing.callback(hook.remove)
        if self._guard is not None:
            replaced, forward = AttributePatch(), self._module.forward

            def first(*args: Any, **kwargs: Any) -> Any:
                replaced.undo()
                return self.step(forward, *args, **kwargs)

            replaced.set(self._module, "forward", first)

    def _in_layout(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.batch((args, kwargs))

    def _replace_forwards(
        self, parts: Iterable[nn.Module], forward: Callable[[nn.Module], OtherForward]
    ) -> None:
        replaced = AttributePatch()
        for part in parts:
            replaced.set(part, "forward", forward(part))
        self._undoing.callback(replaced.undo)

    def _set_layout(self, memory_format: torch.memory_format) -> None:
        self._module.to(memory_format=memory_format)  # type: ignore[call-overload]  # not in its stubs
        self.channels_last = memory_format is torch.channels_last

    def _drop_layout(self) -> None:
        self._set_layout(torch.contiguous_format)
        dropped = "contiguous (the model takes views of its activations)"
        self.report[:] = [dropped if text == "channels_last" else text for text in self.report]
        _log.debug("The first step failed with channels_last and is made again without")


def bf16_instructions(device: str = "cpu") -> str | None:
    """Return the instruction set by which a processor multiplies bfloat16, if it has one."""
    if device == "cuda":
        return "CUDA" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    flags = isa_flags()
    return next((name for name in _INSTRUCTIONS if name in flags), None)


def gains_from_bf16(module: nn.Module) -> bool:
    """Return True if a module holds layers for which bfloat16 pays: convolutions or large products.

    The casts of small weights in each step cost more than their products gain.
    """
    if any(parameter.dtype != torch.float32 for parameter in module.parameters()):
        return False
    for part in module.modules():
        if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return True
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            continue
        weights = (weight for weight in part.parameters(recurse=False) if weight.dim() == 2)
        if any(weight.numel() >= _LARGE_PRODUCT for weight in weights):
            return True
    return False


class OtherForward:
    """Another way of a module's forward; a copy of the module has its own, as it is written."""

    def __init__(self, module: Any):
        self.module: Any = module
        self.forward: Callable[..., Any] = module.forward
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __reduce__(self):
        return _as_written, (self.forward,)


def _as_written(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class CompiledForward(OtherForward):
    """The forward of a module, compiled by TorchInductor when it is first called.

    Parameters
    ----------
    module : Module or OtherForward
    optional : bool
        Whether what cannot be compiled in the first call runs as written.
    """

    def __init__(self, module: Any, optional: bool = False):
        super().__init__(module)
        self._compiled = torch.compile(module.forward)
        self._is_tried = optional

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_tried:
            return self._compiled(*args, **kwargs)
        self._is_tried = False
        with torch._dynamo.config.patch(suppress_errors=True):
            return self._compiled(*args, **kwargs)


class _Bf16Forward(OtherForward):
    """The forward of a module in bfloat16 while it is in training mode; it gives float32.

    Only the outermost of such modules switches.
    """

    def __init__(self, module: nn.Module, device: str = "cpu"):
        super().__init__(module)
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Gradients or not: a frozen backbone has none.
        if not self.module.training or torch.is_autocast_enabled(self._device):
            return self.forward(*args, **kwargs)
        with torch.autocast(self._device, torch.bfloat16):
            output = self.forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, full_precision, output)


def computing_children(module: nn.Module) -> list[nn.Module]:
    """Return the direct children of a module that are no losses or metrics."""
    return [child for child in module.children() if is_model(child)]


def is_model(value: Any) -> bool:
    """Return True for a module that is no loss or metric."""
    from torchmetrics import Metric, MetricCollection

    figures = (nn.modules.loss._Loss, Metric, MetricCollection)
    return isinstance(value, nn.Module) and not isinstance(value, figures)


def full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of bfloat16 in float32, another one as it is."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def gains_from_channels_last(module: nn.Module) -> bool:
    """Return True if there are convolutions over images, and none that lack the layout."""
    parts = list(module.modules())
    return any(isinstance(part, nn.Conv2d) for part in parts) and not any(
        isinstance(part, (nn.Conv3d, nn.ConvTranspose3d)) for part in parts
    )


class ModuleState:
    """The state that calls of a module change without training it.

    These are its buffers and the random state.

    Parameters
    ----------
    module : Module
    attributes : bool
        Whether numbers and other constants among its attributes are to come back, too.
    """

    def __init__(self, module: nn.Module, attributes: bool = False):
        # by name: a module that moves to another device gets other tensors
        self._module = module
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        parts: Iterable[nn.Module] = module.modules() if attributes else ()
        self._attributes = [(vars(part), dict(vars(part))) for part in parts]
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Undo what calls have done since then."""
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                before = self._buffers.get(name)
                if before is None or torch.equal(buffer, before.to(buffer.device)):
                    continue  # its version counts
                buffer.copy_(before)
        for attributes, earlier in self._attributes:
            for name, now in list(attributes.items()):
                if not isinstance(now, _CONSTANTS) or earlier.get(name, now) is now:
                    continue
                if isinstance(earlier[name], _CONSTANTS):
                    attributes[name] = earlier[name]
        torch.set_rng_state(self._random)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Let a module run as in training; buffers, counters and the random state come back."""
    state = ModuleState(module, attributes=True)
    try:
        yield
    finally:
        state.restore()


def _is_of_layout(error: RuntimeError) -> bool:
    """Return True if a program does not bear channels-last tensors.

    ``view`` needs a stride that such a tensor may not have, so a program that flattens activations
    by it fails in its first step.
    """
    return "view size is not compatible" in str(error) or "channels_last" in str(error)


def _last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4 or tensor.layout != torch.strided:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if tensor.layout == torch.strided else tensor
