"""Faster training steps: bfloat16, channels-last layout, fused optimizers and TorchInductor.

:class:`FastSteps` applies :class:`~bigdl.nano.pytorch.training.options.TrainingOptions` to a module
in one process, and undoes what must not stay. Precision and layout are chosen by measurement
(:mod:`~bigdl.nano.pytorch.training.step_autotune`), where the user names none.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bigdl.nano.attribute_patch import AttributePatch, ForwardOverride
from bigdl.nano.pytorch.inference.compiling import compiled
from bigdl.nano.pytorch.training.optimizers import align_layouts, fuse
from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.pytorch.training.step_autotune import (
    StepAutotuner,
    StepConfig,
    T,
    bf16_instructions,
    last,
    speed_in_words,
)

_log = logging.getLogger(__name__)
_CONSTANTS = (bool, int, float, str, tuple, type(None))
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
    steps_left : callable
        Returns how many steps there will be; None if nobody knows.
    broadcast : callable, optional
        Returns what rank 0 gave; None in a single process.
    tell : callable
        Called with a sentence when the precision and the layout are chosen.
    on_layout : callable
        Called when the layout of the weights has changed.
    relayouts : bool
        Whether the layout may change once the training has begun.

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
        steps_left: Callable[[], float | None] = lambda: None,
        broadcast: Callable[[Any], Any] | None = None,
        tell: Callable[[str], object] = _log.info,
        on_layout: Callable[[], object] = lambda: None,
        relayouts: bool = True,
    ):
        self._options = options
        self._device = device
        self._module = module
        self._undoing = ExitStack()
        self._guard: ModuleState | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._tell, self._on_layout = tell, on_layout
        self.chooser: StepAutotuner | None = None
        self.channels_last = False
        self.report: list[str] = []
        if any(parameter.device.type != "cpu" for parameter in module.parameters()):
            return
        if options.inductor is True:  # first: what compiles is the module's own code
            self._replace_forwards(computing_children(module) or [module], CompiledForward)
        self.report.append(self._named_precision or "float32")
        if options.channels_last or self._compiles_images:
            if not options.channels_last:
                self._guard = ModuleState(self._module)
            self._set_layout(torch.channels_last)
            self.report.append("channels_last")
        elif options.inductor:
            self._warn_of_inductor()
        if options.inductor is True:
            self.report.append("TorchInductor")
        if not options.inductor:
            parts = {"": module, **_computing_parts(module)}
            chooser = StepAutotuner(
                parts,
                self._ways(relayouts),
                self._faster_than_named(),
                device=device,
                steps_left=steps_left,
                broadcast=broadcast,
            )
            self.chooser = None if chooser.is_over else chooser
        if calls:
            self._convert_calls()

    def batch(self, batch: T) -> T:
        """Return a batch in the layout of the module."""
        return tree_map_only(torch.Tensor, last, batch) if self.channels_last else batch

    def begin(self, batch: object, *, possible: bool = True) -> bool:
        """Choose precision and layout before a step, if it is time to.

        Parameters
        ----------
        batch
            Of the step.
        possible : bool
            False while something else decides how parts of the model run.

        Returns
        -------
        bool
            Whether they are others than before.
        """
        chooser = self.chooser
        if chooser is None:
            return False
        chosen = chooser.begin(batch, possible=possible)
        if chooser.is_over:
            self.chooser = None
        if chosen is None:
            return False
        way, choice = chosen
        plain = chooser.plain
        self._apply(way, plain)
        self._tell(f"Nano trains with {speed_in_words(way, plain, choice)}, measured here")
        return way != plain

    @property
    def _compiles_images(self) -> bool:
        """True if TorchInductor may compile convolutions: see :meth:`_warn_of_inductor`."""
        options = self._options
        wanted = bool(options.inductor) and options.channels_last is None
        return wanted and gains_from_channels_last(self._module)

    def _warn_of_inductor(self) -> None:
        if any(isinstance(part, nn.Conv2d) for part in self._module.modules()):
            warnings.warn(
                "TorchInductor of torch 2.13 gives some networks of convolutions wrong gradients "
                "where their channels are not last in memory; leave inductor out, or pass "
                "channels_last=True",
                stacklevel=2,
            )

    def _apply(self, way: StepConfig, plain: StepConfig) -> None:
        if way.bf16 and self._named_precision is None:
            parts = [self._module, *computing_children(self._module)]
            self._replace_forwards(parts, functools.partial(_Bf16Forward, device=self._device))
            self.report[0] = "bfloat16 in training steps"
        if way.channels_last and not self.channels_last:
            self._guard = ModuleState(self._module)
            self._set_layout(torch.channels_last)
            self.report.insert(1, "channels_last")

    @property
    def _named_precision(self) -> str | None:
        precision = self._options.precision
        return None if precision is None else f"precision {precision}"

    def _ways(self, relayouts: bool) -> list[StepConfig]:
        """Return the ways that the options allow; the first is that of the plain program."""
        wanted = self._options.channels_last
        layouts = [self.channels_last]
        if (
            wanted is None
            and relayouts
            and not self.channels_last
            and gains_from_channels_last(self._module)
        ):
            layouts.append(True)
        precision = self._options.precision
        if precision is None and self._has_bf16:
            precisions = [False, True]
        else:
            precisions = [precision in ("bf16-mixed", "16-mixed")]
        return [StepConfig(bf16, layout) for bf16 in precisions for layout in layouts]

    def _faster_than_named(self) -> list[StepConfig]:
        """Return ways in float32 that may be faster than the bfloat16 that the user names."""
        if self._options.precision not in ("bf16-mixed", "16-mixed") or self._device != "cpu":
            return []
        return [StepConfig(False, self.channels_last)]

    @property
    def _has_bf16(self) -> bool:
        return bf16_instructions(self._device) is not None and gains_from_bf16(self._module)

    def step(self, step: Callable[..., Any], *args: object, **kwargs: object) -> object:
        """Call a training step; the first one shows whether the program bears the layout."""
        guard, self._guard = self._guard, None
        if guard is None:
            if self.chooser is None:
                return step(*args, **kwargs)
            with self.chooser.observed():
                return step(*args, **kwargs)
        try:
            return step(*args, **kwargs)
        except RuntimeError as error:
            if not _is_of_layout(error):
                raise
        guard.restore()
        self._drop_layout()
        if self._options.inductor:
            self._warn_of_inductor()
        args, kwargs = tree_map_only(torch.Tensor, _contiguous, (args, kwargs))
        return step(*args, **kwargs)

    def optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let optimizers use their fused implementation."""
        self._optimizers = list(optimizers)
        if not self._options.fused_optimizers:
            return
        names = {type(each).__name__ for each in self._optimizers if fuse(each, self._module)}
        if names:
            self.report.append(f"fused {' and '.join(sorted(names))}")

    def align(self) -> None:
        """Let states of optimizers, which may come from a checkpoint, have the weights' layout."""
        align_layouts(self._optimizers)

    def undo(self) -> None:
        """Leave the module as it was, but for what it has learned."""
        self._undoing.close()
        self._on_layout = lambda: None
        if self.channels_last:
            self._set_layout(torch.contiguous_format)

    def _convert_calls(self) -> None:
        """Choose and convert in the calls of the module, of which a loop makes one in a step."""
        hook = self._module.register_forward_pre_hook(self._in_layout, with_kwargs=True)
        self._undoing.callback(hook.remove)
        if self.chooser is not None or self._guard is not None:
            self._replace_forwards([self._module], functools.partial(_ChoosingForward, steps=self))

    def _in_layout(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        return self.batch((args, kwargs))

    def _replace_forwards(
        self, parts: Iterable[nn.Module], forward: Callable[[nn.Module], ForwardOverride]
    ) -> None:
        replaced = AttributePatch()
        for part in parts:
            replaced.set(part, "forward", forward(part))
        self._undoing.callback(replaced.undo)

    def _set_layout(self, memory_format: torch.memory_format) -> None:
        self._module.to(memory_format=memory_format)  # type: ignore[call-overload]  # not in its stubs
        self.channels_last = memory_format is torch.channels_last
        self.align()
        self._on_layout()

    def _drop_layout(self) -> None:
        self._set_layout(torch.contiguous_format)
        dropped = "contiguous (the model takes views of its activations)"
        self.report[:] = [dropped if text == "channels_last" else text for text in self.report]
        _log.debug("The first step failed with channels_last and is made again without")


def _computing_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the direct children of a module that are no losses or metrics, by their names."""
    return {name: child for name, child in module.named_children() if is_model(child)}


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


class CompiledForward(ForwardOverride):
    """The forward of a module, compiled by TorchInductor when it is first called.

    Parameters
    ----------
    module : Module or ForwardOverride
    optional : bool
        Whether what cannot be compiled in the first call runs as written.
    """

    def __init__(self, module: torch.nn.Module, optional: bool = False):
        super().__init__(module)
        self._compiled = compiled(module.forward)
        self._is_tried = optional

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not self._is_tried:
            return self._compiled(*args, **kwargs)
        self._is_tried = False
        with torch._dynamo.config.patch(suppress_errors=True):
            return self._compiled(*args, **kwargs)


class _ChoosingForward(ForwardOverride):
    """The forward of a module whose calls in training mode are the steps of a loop."""

    def __init__(self, module: nn.Module, steps: FastSteps):
        super().__init__(module)
        self._steps, self._inside = steps, False

    def __call__(self, *args: object, **kwargs: object) -> object:
        steps = self._steps
        is_over = steps.chooser is None and steps._guard is None
        if self._inside or is_over or not self.module.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.forward(*args, **kwargs)
        self._inside = True
        try:
            if steps.begin((args, kwargs)):
                args, kwargs = steps.batch((args, kwargs))
                return steps.step(self.module.forward, *args, **kwargs)
            if steps._guard is not None:
                return steps.step(self.forward, *args, **kwargs)
            if steps.chooser is not None:
                steps.chooser.observe(args, kwargs)
            return self.forward(*args, **kwargs)
        finally:
            self._inside = False


class _Bf16Forward(ForwardOverride):
    """The forward of a module in bfloat16 while it is in training mode; it gives float32.

    Only the outermost of such modules switches.
    """

    def __init__(self, module: nn.Module, device: str = "cpu"):
        super().__init__(module)
        self._device = device

    def __call__(self, *args: object, **kwargs: object) -> object:
        # Gradients or not: a frozen backbone has none.
        if not self.module.training or torch.is_autocast_enabled(self._device):
            return self.forward(*args, **kwargs)
        with torch.autocast(self._device, torch.bfloat16):
            output = self.forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, full_precision, output)


def computing_children(module: nn.Module) -> list[nn.Module]:
    """Return the direct children of a module that are no losses or metrics."""
    return list(_computing_parts(module).values())


def is_model(value: object) -> bool:
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


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if tensor.layout == torch.strided else tensor
