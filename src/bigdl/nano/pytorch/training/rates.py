"""Rates of training steps: as the model is written, and with its frozen prefix accelerated."""

import time
from array import array
from statistics import median

from bigdl.nano.pytorch.frozen.automatic import AutomaticPrefix

_KEPT = 1000  # of the newest steps of a phase: a fit may have millions
_ENOUGH = 3  # steps, for a median to be one
AS_WRITTEN = "as written"
BUILDING = "while the prefix is built"
WITH_PREFIX = "with the frozen prefix"


class StepRates:
    """How fast the steps of a fit were, by what ran: a table as text, and a row for each phase.

    A step lasts until the next one begins, so it includes the optimizer and the wait for the next
    batch. The first step, which is slow, and the last, which has no end, are left out.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, array] = {}
        self._steps: dict[str, int] = {}
        self._begun: tuple[str | None, float] | None = None

    def begin(self, prefix: AutomaticPrefix) -> None:
        """Note that a training step begins."""
        now = time.perf_counter()
        if self._begun is None:
            self._begun = None, now
            return
        phase, begun = self._begun
        if phase is not None:
            self._add(phase, now - begun)
        self._begun = self._phase_of(prefix), now

    @staticmethod
    def _phase_of(prefix: AutomaticPrefix) -> str:
        if prefix.is_building:
            return BUILDING
        return WITH_PREFIX if prefix.segments else AS_WRITTEN

    def _add(self, phase: str, seconds: float) -> None:
        kept = self._seconds.setdefault(phase, array("d"))
        steps = self._steps.get(phase, 0)
        if len(kept) < _KEPT:
            kept.append(seconds)
        else:
            kept[steps % _KEPT] = seconds
        self._steps[phase] = steps + 1

    def rows(self) -> list[dict]:
        """Return a dict for each phase.

        Returns
        -------
        list of dict
            ``phase``, ``steps``, ``milliseconds`` of a step (median), ``steps_per_second``, and
            ``times``: how many times as fast as the steps as written; None if there were fewer
            than three of these, or of the phase.
        """
        plain = self._median(AS_WRITTEN)
        rows = []
        for phase, seconds in self._seconds.items():
            middle, own = median(seconds), self._median(phase)
            rows.append(
                {
                    "phase": phase,
                    "steps": self._steps[phase],
                    "milliseconds": 1000 * middle,
                    "steps_per_second": 1 / middle,
                    "times": None if plain is None or own is None else plain / own,
                }
            )
        return rows

    def _median(self, phase: str) -> float | None:
        seconds = self._seconds.get(phase, ())
        return median(seconds) if len(seconds) >= _ENOUGH else None

    @property
    def gain(self) -> str | None:
        """What the frozen prefix gained, in a few words; None if it did not run long enough."""
        rows = {row["phase"]: row for row in self.rows()}
        after = rows.get(WITH_PREFIX)
        if after is None or after["times"] is None:
            return None
        before = rows[AS_WRITTEN]["steps_per_second"]
        return (
            f"{after['steps_per_second']:.3g} steps/s {WITH_PREFIX}, {before:.3g} before: "
            f"{after['times']:.2g} times as fast"
        )

    def __str__(self) -> str:
        if not self._seconds:
            return "There were fewer than three training steps"
        lines = [f"{'phase':26} {'steps':>7} {'ms/step':>9} {'steps/s':>9} {'times':>6}"]
        for row in self.rows():
            times = "" if row["times"] is None else f"{row['times']:.2f}"
            lines.append(
                f"{row['phase']:26} {row['steps']:7} {row['milliseconds']:9.2f} "
                f"{row['steps_per_second']:9.2f} {times:>6}"
            )
        return "\n".join(lines)

    __repr__ = __str__
