"""What makes training steps faster, each with a switch, and how it is said in one line.

:class:`Wishes` are the arguments of a Trainer or TorchNano. :class:`FastSteps` applies them to a
module in one process, and undoes what must not stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.training.compiled import Compiled
from bigdl.nano.pytorch.training.layout import (
    LayoutGuard,
    batch_channels_last,
    gains_from_channels_last,
    to_channels_last,
    to_contiguous,
)
from bigdl.nano.pytorch.training.mixed import Bf16Calls, bf16_instructions, gains_from_bf16
from bigdl.nano.pytorch.training.optimizers import fuse

__all__ = ["FastSteps", "Wishes"]

_PRECISIONS = {
    **dict.fromkeys((None,), None),
    **dict.fromkeys((64, "64", "64-true"), "64-true"),
    **dict.fromkeys((32, "32", "32-true"), "32-true"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16-mixed"),
    # Processors have no fp16 of their own: where Lightning runs, it takes bfloat16 for it.
    **dict.fromkeys((16, "16", "16-mixed"), "16-mixed"),
    "bf16-true": "bf16-true",
    "16-true": "16-true",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wishes:
    """How steps are made faster.

    Attributes
    ----------
    precision : str or None
        Lightning's name; None is bfloat16 in training where the processor has it and it pays.
    channels_last : bool or None
        None is where the model has convolutions in two dimensions.
    fused_optimizers : bool
        Whether optimizers that have a fused implementation use it.
    inductor : bool
        Whether TorchInductor compiles the layers.
    """

    precision: str | None = None
    channels_last: bool | None = None
    fused_optimizers: bool = True
    inductor: bool = False

    @classmethod
    def of(
        cls,
        precision: Any,
        channels_last: bool | None,
        fused_optimizers: bool,
        use_ipex: bool,
        inductor: bool = False,
    ) -> Wishes:
        """Check arguments as users give them.

        Raises
        ------
        UsageError
            If one is wrong.
        """
        if not isinstance(precision, (int, str, type(None))) or precision not in _PRECISIONS:
            raise UsageError(
                "precision must be None, 64, 32, 16, 'bf16' or a name of Lightning's such as "
                f"'bf16-mixed', not {precision!r}"
            )
        switches = {"use_ipex": use_ipex, "fused_optimizers": fused_optimizers}
        for name, value in {**switches, "inductor": inductor}.items():
            if not isinstance(value, bool):
                raise UsageError(f"{name} must be True or False, not {value!r}")
        if channels_last not in (None, True, False):
            raise UsageError(f"channels_last must be True, False or None, not {channels_last!r}")
        if use_ipex:
            _log.warning(
                "IPEX is discontinued and PyTorch has its optimizations: use_ipex=True means the "
                "automatic settings, which are the default"
            )
        return cls(_PRECISIONS[precision], channels_last, fused_optimizers, inductor)


class FastSteps:
    """Settings of one module while it is trained.

    Parameters
    ----------
    wishes : Wishes
    module : Module
        In float32 on the CPU, or nothing is done.
    calls : bool
        Whether the module is called by a loop that is not ours: then its first call, and not the
        first step, shows whether the program bears the layout.

    Attributes
    ----------
    report : list of str
        What holds, in a few words each.
    """

    def __init__(self, wishes: Wishes, module: nn.Module, *, calls: bool = False):
        self._wishes = wishes
        self._module = module
        self._handles: list[Any] = []
        self._calls: Bf16Calls | None = None
        self._guard: LayoutGuard | None = None
        self._compiled: Compiled | None = None
        self.channels_last = False
        self.report: list[str] = []
        if any(parameter.device.type != "cpu" for parameter in module.parameters()):
            return
        self._choose_precision()
        self._choose_layout()
        if wishes.inductor:
            self._compiled = Compiled(module)
            self.report.append("TorchInductor")
        if self.channels_last and calls:
            self._convert_calls()

    def batch(self, batch: Any) -> Any:
        """A batch in the layout of the module."""
        return batch_channels_last(batch) if self.channels_last else batch

    def step(self, step, *args: Any, **kwargs: Any) -> Any:
        """Call a training step; the first one shows whether the program bears the layout."""
        guard, self._guard = self._guard, None
        if guard is None:
            return step(*args, **kwargs)
        try:
            return step(*args, **kwargs)
        except RuntimeError as error:
            if not guard.caused(error):
                raise
        guard.rewind()
        self._drop_layout("contiguous (the model takes views of its activations)")
        args, kwargs = to_contiguous((args, kwargs))
        return step(*args, **kwargs)

    def optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let optimizers use their fused implementation."""
        if not self._wishes.fused_optimizers:
            return
        names = {type(each).__name__ for each in optimizers if fuse(each, self._module)}
        if names:
            self.report.append(f"fused {' and '.join(sorted(names))}")

    def undo(self) -> None:
        """Leave the module as it was, but for what it has learned."""
        if self._calls is not None:
            self._calls.remove()
            self._calls = None
        if self._compiled is not None:
            self._compiled.remove()
            self._compiled = None
        for handle in self._handles:
            handle.remove()
        if self.channels_last:
            to_contiguous(self._module)
            self.channels_last = False

    def _choose_precision(self) -> None:
        if self._wishes.precision is not None:
            self.report.append(f"precision {self._wishes.precision}")
            return
        instructions = bf16_instructions()
        if instructions is None or not gains_from_bf16(self._module):
            self.report.append("float32")
            return
        self._calls = Bf16Calls(self._module)
        self.report.append(f"bfloat16 in training steps ({instructions})")

    def _choose_layout(self) -> None:
        wished = self._wishes.channels_last
        if wished is False or (wished is None and not gains_from_channels_last(self._module)):
            return
        if wished is None:
            self._guard = LayoutGuard(self._module)
        self.channels_last = True
        to_channels_last(self._module)
        self.report.append("channels_last")

    def _convert_calls(self) -> None:
        convert = _BatchHook(self)
        handle = self._module.register_forward_pre_hook(convert, with_kwargs=True)
        self._handles.append(handle)
        if self._guard is not None:
            attributes, forward = vars(self._module), self._module.forward
            before = attributes.get("forward")

            def first(*args: Any, **kwargs: Any) -> Any:
                del attributes["forward"]
                if before is not None:
                    attributes["forward"] = before
                return self.step(forward, *args, **kwargs)

            attributes["forward"] = first

    def _drop_layout(self, said: str) -> None:
        to_contiguous(self._module)
        self.channels_last = False
        with suppress(ValueError):
            self.report[self.report.index("channels_last")] = said
        _log.debug("The first step failed with channels_last and is made again without")


class _BatchHook:
    """Gives inputs the layout of the module; a copy of the module has one of its own."""

    def __init__(self, steps: FastSteps):
        self._steps = steps

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._steps.batch((args, kwargs))
