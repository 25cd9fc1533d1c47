"""Speed of training steps, before and after layers are replaced by faster ones."""

import time
from array import array
from statistics import median

_KEPT = 1000  # newest steps of a phase that are kept; a fit may have millions
_ENOUGH = 3  # smallest number of steps for a median
AS_WRITTEN = "as written"
BUILDING = "while the prefix is built"
WITH_PREFIX = "with the frozen prefix"
COMPILING = "while layers are compiled"
COMPILED = "with compiled layers"


class StepRates:
    """Durations of a fit's steps by phase, as rows and as a text table.

    A step lasts until the next one starts, so it includes the optimizer and the wait for the next
    batch. The first step (slow) and the last step (no known end) are excluded.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, array] = {}
        self._steps: dict[str, int] = {}
        self._begun: tuple[str, float] | None = None
        self._is_first = True
        self._newest: str | None = None

    @property
    def has_begun(self) -> bool:
        """True after the first step has started."""
        return self._begun is not None or not self._is_first

    def end(self) -> None:
        """Record the end of the current training step, if any."""
        if self._begun is not None:
            phase, begun = self._begun
            if self._is_first:
                self._is_first = False
            else:
                self._add(phase, time.perf_counter() - begun)
            self._begun = None

    def begin(self, phase: str) -> None:
        """Record the start of a training step in a phase, and end the previous step."""
        self.end()
        self._begun = phase, time.perf_counter()

    def steps(self, phase: str) -> int:
        """Return the number of finished steps of a phase."""
        return self._steps.get(phase, 0)

    def seconds(self, phase: str) -> float:
        """Return the median duration of a phase's steps in seconds; there must be at least one."""
        return median(self._seconds[phase])

    def _add(self, phase: str, seconds: float) -> None:
        self._newest = phase
        kept = self._seconds.setdefault(phase, array("d"))
        steps = self._steps.get(phase, 0)
        if len(kept) < _KEPT:
            kept.append(seconds)
        else:
            kept[steps % _KEPT] = seconds
        self._steps[phase] = steps + 1

    def rows(self) -> list[dict]:
        """Return the statistics of each phase.

        Returns
        -------
        list of dict
            ``phase``, ``steps``, ``milliseconds`` (median of a step), ``steps_per_second``, and
            ``times``, the speed relative to phase "as written". ``times`` is None if one of the two
            phases had fewer than three steps.
        """
        plain = self._median(AS_WRITTEN)
        rows = []
        for phase, seconds in self._seconds.items():
            middle, reliable = median(seconds), self._median(phase)
            rows.append(
                {
                    "phase": phase,
                    "steps": self._steps[phase],
                    "milliseconds": 1000 * middle,
                    "steps_per_second": 1 / middle,
                    "times": None if plain is None or reliable is None else plain / reliable,
                }
            )
        return rows

    def _median(self, phase: str) -> float | None:
        seconds = self._seconds.get(phase, ())
        return median(seconds) if len(seconds) >= _ENOUGH else None

    @property
    def gain(self) -> str | None:
        """Short text with the speed-up of the latest steps; None if the speed-up is unknown."""
        rows = {row["phase"]: row for row in self.rows()}
        after = rows.get(self._newest) if self._newest in (WITH_PREFIX, COMPILED) else None
        if after is None or after["times"] is None:
            return None
        before = rows[AS_WRITTEN]["steps_per_second"]
        return (
            f"{after['steps_per_second']:.3g} steps/s {after['phase']}, {before:.3g} before: "
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
