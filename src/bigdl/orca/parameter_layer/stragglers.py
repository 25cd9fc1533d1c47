"""Straggler mitigation: contributions that arrive after an adaptive time limit are dropped.

The rule is that of BigDL (Dai et al., SoCC 2019, section 3.3.2; ``setDropModuleProperty`` of 2.x).
The driver computes the limit from the times of earlier steps and sends it with the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar, cast

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.training.checkpoint import in_thread

_RELAXED = 1.01  # growth of the limit when enough was dropped


@dataclass(frozen=True)
class DropStragglers:
    """Rule for dropping late contributions, with the field names of BigDL 2.x.

    Attributes
    ----------
    drop_percentage : float
        Share of all contributions that may be dropped, e.g. 0.04.
    max_drop_percentage : float
        If a larger share of a single step is late, the step is discarded: it changes nothing and is
        repeated without a limit.
    batchsize : int
        Number of steps between updates of the limit.
    warmup_iteration : int
        Number of initial steps whose times are ignored.
    """

    drop_percentage: float
    max_drop_percentage: float
    batchsize: int = 100
    warmup_iteration: int = 200

    def __post_init__(self):
        share = check_number(
            "drop_percentage of drop_stragglers", self.drop_percentage, most=1, above=0
        )
        check_number(
            "max_drop_percentage of drop_stragglers", self.max_drop_percentage, share, most=1
        )
        check_integer("batchsize of drop_stragglers", self.batchsize, 1)
        check_integer("warmup_iteration of drop_stragglers", self.warmup_iteration, 0)

    @classmethod
    def of(cls, value: DropStragglers | dict) -> DropStragglers:
        """Build the rule from a value of ``fit(drop_stragglers=)``."""
        if isinstance(value, cls):
            return value
        try:
            return cls(**cast("dict", value))
        except TypeError:
            raise UsageError(
                f"drop_stragglers should be a dict with drop_percentage and max_drop_percentage, "
                f"optionally batchsize and warmup_iteration, got {value!r}",
                code="argument-value",
                argument="drop_stragglers",
            ) from None

    def check(self, ranks: int) -> None:
        """Raise an error if the allowed share is less than one contribution."""
        if int(self.drop_percentage * self.batchsize * ranks) < 1:
            raise UsageError(
                f"drop_percentage={self.drop_percentage} of the {self.batchsize * ranks} "
                f"contributions that {ranks} workers make in batchsize={self.batchsize} steps is "
                "less than one; pass a larger batchsize or drop_percentage",
                code="argument-value",
                argument="drop_percentage",
            )


class StragglerLimit:
    """Time limit of a contribution, derived from the durations of earlier steps.

    Parameters
    ----------
    rule : DropStragglers or None
        None sets no limit.

    Attributes
    ----------
    seconds : float or None
        Current limit; None until enough steps were recorded.
    """

    def __init__(self, rule: DropStragglers | None):
        self._rule = rule
        self.seconds: float | None = None
        self._steps = self._dropped = 0
        self._times: list[float] = []

    def add(self, sources: Sequence[dict]) -> None:
        """Add the durations of one step, as every rank reported them, and update the limit."""
        rule = self._rule
        if rule is None:
            return
        self._steps += 1
        if self._steps <= rule.warmup_iteration:
            return
        self._dropped += sum("dropped" in source for source in sources)
        self._times += [source["compute_s"] for source in sources if source["rows"]]
        if (self._steps - rule.warmup_iteration) % rule.batchsize:
            return
        # drop as many more as the rule allows
        times, dropped = sorted(self._times, reverse=True), self._dropped
        missing = int(rule.drop_percentage * (len(times) + dropped)) - dropped
        if missing > 0:
            self.seconds = times[min(missing, len(times)) - 1]
        elif self.seconds is not None:
            self.seconds *= _RELAXED
        self._times, self._dropped = [], 0


T = TypeVar("T")


_late: list[Future] = []  # computations of this process: at most one


def run_within(seconds: float | None, compute: Callable[[], T]) -> T | None:
    """Run `compute` and return its result, or None if it takes longer than `seconds`.

    Parameters
    ----------
    seconds : float or None
        Time limit; None waits without a limit.
    compute : callable

    Raises
    ------
    Exception
        Error of `compute`, or of the previous late computation.
    """
    end = None if seconds is None else time.monotonic() + seconds

    def is_done(future: Future) -> bool:
        return bool(wait([future], None if end is None else max(0.0, end - time.monotonic())).done)

    if _late:
        if not is_done(_late[0]):
            return None
        _late.pop().result()
    if end is None:
        return compute()
    future = in_thread(compute)
    if not is_done(future):
        _late.append(future)
        return None
    return future.result()
