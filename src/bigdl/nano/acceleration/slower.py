"""A warning where a model in a named precision is slower than the original on this processor."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from bigdl.common.program_state import random_numbers_kept
from bigdl.nano.acceleration import choices
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.spread import Spread

_LEAST_S = 1e-4  # of a call of the original: below, calls cost more than computing
_SLOWER = 1.1
_BUDGET_S = 0.5


def warn_if_slower(
    method: Method, original: Callable[[], Any], model: Callable[[], Any], *facts: Any
) -> None:
    """Warn once if a model in a precision below fp32 is slower than the original.

    Parameters
    ----------
    method : Method
        Of the model; nothing is measured for one in fp32.
    original, model : callable
        Run them on the sample.
    *facts
        Values of JSON that describe model, sample and threads: a measurement is made once for them.
    """
    if method.precision == "fp32":
        return
    key = choices.key_of("beside the original", method.name, facts)
    choice = choices.find(key)
    if choice is None:
        with random_numbers_kept():  # that the models may draw
            seconds = choices.race({"original": original, method.name: model}, _BUDGET_S)
        if min(seconds["original"]) < _LEAST_S:
            return
        choice = choices.choose(seconds, "original")
        choices.keep(key, choice)
    speedup = choice.speedups[method.name]
    times = Spread(1 / speedup.middle, 1 / speedup.high, 1 / speedup.low)
    if times.exceeds(_SLOWER):
        warnings.warn(
            f"{method.name} takes {times:.2f} times as long as the original on this processor; "
            "InferenceOptimizer().optimize measures which method is fast",
            stacklevel=_frames_of_ours(),
        )


def _frames_of_ours() -> int:
    """Return the stacklevel of the first caller outside of this library."""
    frame, level = sys._getframe(1), 1
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("bigdl."):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level
