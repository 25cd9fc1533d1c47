"""Compilation of a model's layers during a fit, if timed training steps show a speed-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.frozen.automatic import AutomaticPrefix
from bigdl.nano.pytorch.training.rates import AS_WRITTEN, COMPILED, COMPILING, StepRates
from bigdl.nano.pytorch.training.steps import CompiledForward, ForwardOverride, computing_children

_STEPS = 20  # steps before and after compilation whose medians are compared
_COMPILING = 2  # steps in which forward and backward passes are compiled
SECONDS, SECONDS_PER_LAYER = 10, 1  # compile time; measured: 5 to 45 seconds in all
_MARGIN = 2  # safety factor of the compile time: another batch size compiles again
_SHARE_SAVED = 0.3  # expected share of a step's time; measured: -0.6 to 0.35
LEAST_GAIN = 1.05  # smallest speed-up for keeping compiled layers


class InductorAutotuner:
    """Autotuner that compiles a model's layers during a fit if compilation saves time.

    The first steps run without compilation. If 30 % of the remaining training time exceeds the
    compile time, the layers are compiled. If the compiled steps are not faster, the original code
    is restored.

    Parameters
    ----------
    module : Module
    rates : StepRates
        Rates of the fit's steps.
    steps_left : callable
        Returns the number of remaining steps; None if unknown.
    notify : callable
        Called with a short description of the decision.
    """

    def __init__(
        self,
        module: nn.Module,
        rates: StepRates,
        steps_left: Callable[[], float | None],
        notify: Callable[[str], None],
    ):
        self._module, self._rates, self._notify = module, rates, notify
        self._steps_left = steps_left
        self._replaced = AttributePatch()
        self._chosen = False

    @property
    def is_compiled(self) -> bool:
        """True while compiled layers are in use."""
        return self._replaced.active

    @property
    def phase(self) -> str:
        """Phase of the next training step, used as the key for the step's duration."""
        if not self._replaced.active:
            return AS_WRITTEN
        compiled = self._rates.steps(COMPILING) >= _COMPILING
        return COMPILED if compiled else COMPILING

    def begin(self, prefix: AutomaticPrefix) -> None:
        """Decide before a training step whether to compile layers or restore the original code."""
        if self._chosen or prefix.is_building:
            return
        if self._replaced.active:
            if self._rates.steps(COMPILED) >= _STEPS:
                self._compare()
        elif prefix.segments:
            self._end("no TorchInductor (the frozen prefix runs)")
        elif self._rates.steps(AS_WRITTEN) >= _STEPS:
            self._consider()

    def undo(self) -> None:
        """Restore the original forward methods."""
        self._replaced.undo()

    def _consider(self) -> None:
        left = self._steps_left()
        steps = self._rates.steps(AS_WRITTEN) if left is None else left  # guess: as many again
        layers = sum(1 for part in self._module.modules() if not list(part.children()))
        cost = _MARGIN * (SECONDS + SECONDS_PER_LAYER * layers)
        if steps * self._rates.seconds(AS_WRITTEN) * _SHARE_SAVED > cost:
            self._compile()
        elif left is not None:
            self._end(f"no TorchInductor (the {left:.0f} steps left do not repay it)")

    def _compile(self) -> None:
        for part in computing_children(self._module) or [self._module]:
            owner: Any = part
            while isinstance(owner.forward, ForwardOverride):  # compile the original
                owner = owner.forward
            self._replaced.set(owner, "forward", CompiledForward(owner, optional=True))

    def _compare(self) -> None:
        gain = self._rates.seconds(AS_WRITTEN) / self._rates.seconds(COMPILED)
        if gain < LEAST_GAIN:
            self._replaced.undo()
            self._end(f"no TorchInductor ({gain:.2g} times as fast)")
        else:
            self._end(f"TorchInductor ({gain:.2g} times as fast)")

    def _end(self, phrase: str) -> None:
        self._chosen = True
        self._notify(phrase)
