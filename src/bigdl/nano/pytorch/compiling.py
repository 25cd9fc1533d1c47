"""The choice whether TorchInductor compiles a model's layers, by the time of a fit's own steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.frozen.automatic import AutomaticPrefix
from bigdl.nano.pytorch.training.rates import AS_WRITTEN, COMPILED, COMPILING, StepRates
from bigdl.nano.pytorch.training.steps import CompiledForward, ForwardOverride, computing_children

_STEPS = 20  # as written, and compiled, whose medians are compared
_COMPILING = 2  # the steps in which layers are compiled, forwards and backwards
SECONDS, SECONDS_PER_LAYER = 10, 1  # that compiling takes, measured from 5 to 45 seconds
_MARGIN = 2  # of what it may take: another size of batch is compiled again
_SHARE_SAVED = 0.3  # of a step; measured: from -0.6 to 0.35
LEAST_GAIN = 1.05  # from which on the compiled layers stay


class CompilerChoice:
    """Lets TorchInductor compile a model's layers in the middle of a fit, if that pays.

    The first steps run as written. If a third of the time of those that are left would repay
    compiling, the layers are compiled; if their steps are no faster, the model's own code goes on.

    Parameters
    ----------
    module : Module
    rates : StepRates
        Of the fit's steps.
    steps_left : callable
        Returns how many steps there will be; None if nobody knows.
    tell : callable
        Gets a phrase for the settings.
    """

    def __init__(
        self,
        module: nn.Module,
        rates: StepRates,
        steps_left: Callable[[], float | None],
        tell: Callable[[str], None],
    ):
        self._module, self._rates, self._tell = module, rates, tell
        self._steps_left = steps_left
        self._replaced = AttributePatch()
        self._chosen = False

    @property
    def is_compiled(self) -> bool:
        """True while compiled layers run."""
        return self._replaced.active

    @property
    def phase(self) -> str:
        """The kind of the next step, for the rates."""
        if not self._replaced.active:
            return AS_WRITTEN
        compiled = self._rates.steps(COMPILING) >= _COMPILING
        return COMPILED if compiled else COMPILING

    def begin(self, prefix: AutomaticPrefix) -> None:
        """Choose, before a step."""
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
        """Leave the module as it was."""
        self._replaced.undo()

    def _consider(self) -> None:
        left = self._steps_left()
        steps = self._rates.steps(AS_WRITTEN) if left is None else left  # as many as there were
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
        self._tell(phrase)
