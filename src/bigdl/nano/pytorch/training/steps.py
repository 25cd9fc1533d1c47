"""Faster training steps: bfloat16, channels-last layout, fused optimizers and TorchInductor.

:class:`FastSteps` applies :class:`~bigdl.nano.pytorch.training.options.TrainingOptions` to a module
in one process, and undoes temporary changes after training. Unless the user sets precision and
memory format, a measurement selects them (:mod:`~bigdl.nano.pytorch.training.step_autotune`).
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bigdl.nano.acceleration.autotune import AutotuneResult
from bigdl.nano.attribute_patch import AttributePatch, ForwardOverride
from bigdl.nano.pytorch.inference.compiling import compiled
from bigdl.nano.pytorch.training.optimizers import align_layouts, fuse
from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.pytorch.training.step_autotune import (
    StepAutotuner,
    StepConfig,
    T,
    bf16_instructions,
    describe_speed,
    to_channels_last,
)

_log = logging.getLogger(__name__)
_CONSTANTS = (bool, int, float, str, tuple, type(None))
_LARGE_PRODUCT = 1 << 18  # weights of a linear layer above which bfloat16 repays its casts


class FastSteps:
    """Settings that speed up the training steps of one module.

    Parameters
    ----------
    options : TrainingOptions
    module : Module
        Module on the CPU; modules on another device are not changed.
    calls : bool
        True if a custom loop calls the module. Its first call then replaces the first step as the
        test whether the model supports the memory format.
    device : {"cpu", "cuda"}
        Device of the training; the module may be moved there later.
    steps_left : callable
        Returns the number of remaining steps; None if unknown.
    broadcast : callable, optional
        Returns the value of rank 0; None in a single process.
    notify : callable
        Called with a sentence when precision and memory format are selected.
    on_layout : callable
        Called after the memory format of the weights has changed.
    relayouts : bool
        Whether the memory format may change after training has started.

    Attributes
    ----------
    report : list of str
        Short descriptions of the active settings.
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
        notify: Callable[[str], object] = _log.info,
        on_layout: Callable[[], object] = lambda: None,
        relayouts: bool = True,
    ):
        self._options = options
        self._device = device
        self._module = module
        self._undoing = ExitStack()
        self._guard: ModuleState | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._notify, self._on_layout = notify, on_layout
        self.autotuner: StepAutotuner | None = None
        self.channels_last = False
        self.report: list[str] = []
        if any(parameter.device.type != "cpu" for parameter in module.parameters()):
            return
        if options.inductor is True:  # first, so that the original code is compiled
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
            autotuner = StepAutotuner(
                parts,
                self._configs(relayouts),
                self._faster_than_named(),
                device=device,
                steps_left=steps_left,
                broadcast=broadcast,
            )
            self._plain = autotuner.plain
            self.autotuner = None if autotuner.is_over else autotuner
        if calls:
            self._convert_calls()

    def batch(self, batch: T) -> T:
        """Convert a batch to the module's memory format."""
        return tree_map_only(torch.Tensor, to_channels_last, batch) if self.channels_last else batch

    def begin(self, batch: object, *, possible: bool = True) -> bool:
        """Select precision and memory format before a step, if a selection is due.

        Parameters
        ----------
        batch
            Batch of the step.
        possible : bool
            False while another component controls how parts of the model run.

        Returns
        -------
        bool
            True if precision or memory format has changed.
        """
        autotuner = self.autotuner
        if autotuner is None:
            return False
        chosen = autotuner.begin(batch, possible=possible)
        if autotuner.is_over:
            self.autotuner = None
        return chosen is not None and self._select(*chosen)

    def _select(self, config: StepConfig, choice: AutotuneResult) -> bool:
        """Apply the selected configuration; return True if it is not the plain one."""
        self._apply(config)
        description = describe_speed(config, self._plain, choice)
        self._notify(f"Nano trains with {description}, measured here")
        return config != self._plain

    def _select_within_step(self, config: StepConfig, choice: AutotuneResult) -> None:
        self._select(config, choice)
        self._guard = None  # this step is the one that may be repeated

    @property
    def _compiles_images(self) -> bool:
        """True if TorchInductor may compile convolutions; see :meth:`_warn_of_inductor`."""
        options = self._options
        wanted = bool(options.inductor) and options.channels_last is None
        return wanted and gains_from_channels_last(self._module)

    def _warn_of_inductor(self) -> None:
        if any(isinstance(part, nn.Conv2d) for part in self._module.modules()):
            warnings.warn(
                "TorchInductor of torch 2.13 computes wrong gradients for some convolutional "
                "networks unless channels are last in memory; leave inductor out, or pass "
                "channels_last=True",
                stacklevel=2,
            )

    def _apply(self, config: StepConfig) -> None:
        if config.bf16 and self._named_precision is None:
            # Unlike precision="bf16": products of the step outside of modules remain in float32.
            parts = [self._module, *computing_children(self._module)]
            self._replace_forwards(parts, functools.partial(_Bf16Forward, device=self._device))
            self.report[0] = "bfloat16 in training steps"
        if config.channels_last and not self.channels_last:
            self._guard = ModuleState(self._module)
            self._set_layout(torch.channels_last)
            self.report.insert(1, "channels_last")

    @property
    def _named_precision(self) -> str | None:
        precision = self._options.precision
        return None if precision is None else f"precision {precision}"

    def _configs(self, relayouts: bool) -> list[StepConfig]:
        """Return the configurations that the options allow; the first is the baseline."""
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
        """Return float32 configurations that may be faster than the requested bfloat16."""
        if self._options.precision not in ("bf16-mixed", "16-mixed") or self._device != "cpu":
            return []
        return [StepConfig(False, self.channels_last)]

    @property
    def _has_bf16(self) -> bool:
        return bf16_instructions(self._device) is not None and gains_from_bf16(self._module)

    def step(self, step: Callable[..., Any], *args: object, **kwargs: object) -> object:
        """Run a training step; fall back to contiguous tensors if the first step fails."""
        guard, self._guard = self._guard, None
        autotuner, layout = self.autotuner, self.channels_last
        observed = autotuner if guard is None else None
        if observed is not None and observed.may_change_layout:
            guard = ModuleState(self._module)
        try:
            with observed.observed(self._select_within_step) if observed else nullcontext():
                return step(*args, **kwargs)
        except RuntimeError as error:
            is_tried = observed is None or self.channels_last != layout
            if guard is None or not is_tried or not _is_of_layout(error):
                raise
        finally:
            if autotuner is not None and autotuner.is_over:
                self.autotuner = None
        guard.restore()
        self._drop_layout()
        if self._options.inductor:
            self._warn_of_inductor()
        args, kwargs = tree_map_only(torch.Tensor, _contiguous, (args, kwargs))
        return step(*args, **kwargs)

    def optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Switch optimizers to their fused implementation."""
        self._optimizers = list(optimizers)
        if not self._options.fused_optimizers:
            return
        names = {type(each).__name__ for each in self._optimizers if fuse(each, self._module)}
        if names:
            self.report.append(f"fused {' and '.join(sorted(names))}")

    def align(self) -> None:
        """Convert optimizer states, e.g. from a checkpoint, to the weights' memory format."""
        align_layouts(self._optimizers)

    def undo(self) -> None:
        """Restore the module's forward methods and memory format; keep its weights."""
        self._undoing.close()
        self._on_layout = lambda: None
        if self.channels_last:
            self._set_layout(torch.contiguous_format)

    def _convert_calls(self) -> None:
        """Make the module's forward calls convert inputs and select the step configuration."""
        hook = self._module.register_forward_pre_hook(self._in_layout, with_kwargs=True)
        self._undoing.callback(hook.remove)
        if self.autotuner is not None or self._guard is not None:
            self._replace_forwards(
                [self._module], functools.partial(_AutotuningForward, steps=self)
            )

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
        self._notify(
            "Nano trains with contiguous tensors: the first step has failed with channels_last, as "
            "it takes a view of an activation, and is repeated"
        )


def _computing_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module's direct children except losses and metrics, by name."""
    return {name: child for name, child in module.named_children() if is_model(child)}


def gains_from_bf16(module: nn.Module) -> bool:
    """Return True if a module has convolutions or linear layers large enough to gain from bfloat16.

    For small weights, the casts in each step cost more than the products gain.
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
    """Forward method of a module, compiled by TorchInductor at its first call.

    Parameters
    ----------
    module : Module or ForwardOverride
    optional : bool
        True to run the original code if the first call cannot be compiled.
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


class _AutotuningForward(ForwardOverride):
    """Forward method of a module that treats each call in training mode as a step."""

    def __init__(self, module: nn.Module, steps: FastSteps):
        super().__init__(module)
        self._steps, self._inside = steps, False

    def __call__(self, *args: object, **kwargs: object) -> object:
        steps = self._steps
        is_over = steps.autotuner is None and steps._guard is None
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
            if steps.autotuner is not None:
                steps.autotuner.observe(args, kwargs)
            return self.forward(*args, **kwargs)
        finally:
            self._inside = False


class _Bf16Forward(ForwardOverride):
    """Forward method that computes in bfloat16 in training mode and returns float32.

    Among nested modules, only the outermost enters autocast.
    """

    def __init__(self, module: nn.Module, device: str = "cpu"):
        super().__init__(module)
        self._device = device

    def __call__(self, *args: object, **kwargs: object) -> object:
        # Does not depend on gradients: a frozen backbone has none.
        if not self.module.training or torch.is_autocast_enabled(self._device):
            return self.forward(*args, **kwargs)
        with torch.autocast(self._device, torch.bfloat16):
            output = self.forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, full_precision, output)


def computing_children(module: nn.Module) -> list[nn.Module]:
    """Return a module's direct children except losses and metrics."""
    return list(_computing_parts(module).values())


def is_model(value: object) -> bool:
    """Return True for a module that is neither a loss nor a metric."""
    from torchmetrics import Metric, MetricCollection

    others = (nn.modules.loss._Loss, Metric, MetricCollection)
    return isinstance(value, nn.Module) and not isinstance(value, others)


def full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a bfloat16 tensor to float32; return other tensors unchanged."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def gains_from_channels_last(module: nn.Module) -> bool:
    """Return True if a module has 2-d convolutions and no 3-d convolutions."""
    parts = list(module.modules())
    return any(isinstance(part, nn.Conv2d) for part in parts) and not any(
        isinstance(part, (nn.Conv3d, nn.ConvTranspose3d)) for part in parts
    )


class ModuleState:
    """Snapshot of the state that forward calls change: buffers and random number generators.

    Parameters
    ----------
    module : Module
    attributes : bool
        Whether to restore numbers and other constants among its attributes, too.
    """

    def __init__(self, module: nn.Module, attributes: bool = False):
        # by name: moving a module to another device creates new tensors
        self._module = module
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        parts: Iterable[nn.Module] = module.modules() if attributes else ()
        self._attributes = [(vars(part), dict(vars(part))) for part in parts]
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Restore the state at the time of construction."""
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                before = self._buffers.get(name)
                if before is None or torch.equal(buffer, before.to(buffer.device)):
                    continue  # do not increase the version of an equal buffer
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
def state_preserved(module: nn.Module) -> Iterator[None]:
    """Context manager that restores a module's buffers, constants and random state at exit."""
    state = ModuleState(module, attributes=True)
    try:
        yield
    finally:
        state.restore()


def _is_of_layout(error: RuntimeError) -> bool:
    """Return True if an error indicates that a model does not support channels-last tensors.

    ``view`` requires strides that channels-last tensors may lack, so a model that flattens
    activations with it fails in its first step.
    """
    return "view size is not compatible" in str(error) or "channels_last" in str(error)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if tensor.layout == torch.strided else tensor
