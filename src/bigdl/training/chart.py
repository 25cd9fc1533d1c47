"""A chart of a fit: losses, metrics, speed and where the time went, by epoch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bigdl.common.drawing import Chart, Scale
from bigdl.training.figures import headline

__all__ = ["FitChart"]

_WIDTH, _PANEL = 640.0, 170.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 90.0, 150.0, 26.0, 28.0  # room around the panel's inside
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
_PHASES = {"mean_fetch_s": "fetch", "mean_fwd_s": "forward", "mean_bwd_s": "backward"}


class FitChart:
    """Epochs as lines and bars, one panel for the loss, for each metric, for speed and for time.

    In a notebook it shows itself.

    Parameters
    ----------
    epochs : sequence of dict
        Figures of epochs, as a run keeps them.
    """

    def __init__(self, epochs: Sequence[dict]):
        self._epochs = epochs

    def write(self, path: str | Path) -> None:
        """Write the chart to a file.

        Parameters
        ----------
        path : str or Path
            Ends with ``.html`` or ``.svg``, or with what matplotlib writes, such as ``.png``.

        Raises
        ------
        UsageError
            If the file cannot be written.
        """
        self._chart().write(Path(path), "Training", self._table())

    def _repr_html_(self) -> str:
        return self._chart().svg()

    def _table(self) -> str:
        """Return the figures as text."""
        rows = [{"epoch": e["epoch"], **headline(e), **self._speed(e)} for e in self._epochs]
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = ["".join(f"{name:>16}" for name in names)]
        for row in rows:
            lines.append("".join(f"{row.get(name, math.nan):>16.6g}" for name in names))
        return "\n".join(lines)

    @staticmethod
    def _speed(entry: dict) -> dict[str, float]:
        seconds = entry["profile"].get("mean_train_epoch_s") or math.inf
        return {"rows/s": entry["num_samples"] / seconds}

    def _panels(self) -> list[tuple[str, dict[str, list[float]], bool]]:
        """Return title, values by name, and whether they are stacked, of each panel."""
        values = [headline(entry) for entry in self._epochs]
        names = list(dict.fromkeys(name for row in values for name in row))
        panels: dict[str, dict[str, list[float]]] = {}
        for name in names:
            title = name.removeprefix("train_").removeprefix("val_")
            label = "validation" if name.startswith("val_") else "training"
            panels.setdefault(title, {})[label] = [row.get(name, math.nan) for row in values]
        speed = [self._speed(entry)["rows/s"] for entry in self._epochs]
        profiles = [entry["profile"] for entry in self._epochs]
        times = {
            label: [1e3 * profile[key] for profile in profiles]
            for key, label in _PHASES.items()
            if any(profile.get(key) for profile in profiles)
        }
        return [
            *((title, lines, False) for title, lines in panels.items()),
            ("rows per second", {"": speed}, False),
            *([("ms per batch", times, True)] if times else []),
        ]

    def _chart(self) -> Chart:
        panels = self._panels()
        chart = Chart(_WIDTH, _PANEL * len(panels))
        for number, (title, values, is_stacked) in enumerate(panels):
            draw = self._bars if is_stacked else self._lines
            draw(chart, number * _PANEL, title, values)
        return chart

    def _frame(self, chart: Chart, top: float, title: str, up: Scale) -> float:
        """Draw the grid of a panel; return the width of an epoch."""
        bottom, right = top + _PANEL - _BOTTOM, _WIDTH - _RIGHT
        for tick in up.ticks():
            chart.line([(_LEFT, up(tick)), (right, up(tick))], "#ddd")
            chart.text(f"{tick:.3g}", _LEFT - 6, up(tick) + 4, "end")
        width = (right - _LEFT) / len(self._epochs)
        for number in sorted({0, len(self._epochs) // 2, len(self._epochs) - 1}):
            epoch = self._epochs[number]["epoch"]
            chart.text(f"{epoch}", _LEFT + (number + 0.5) * width, bottom + 16, "middle")
        chart.text(title, _LEFT, top + 16)
        return width

    def _scale(self, top: float, values: Sequence[float]) -> Scale:
        known = [value for value in values if math.isfinite(value)]
        return Scale(known or [0.0, 1.0], top + _PANEL - _BOTTOM, top + _TOP)

    def _lines(
        self, chart: Chart, top: float, title: str, values: Mapping[str, Sequence[float]]
    ) -> None:
        up = self._scale(top, list(itertools.chain(*values.values())))
        width = self._frame(chart, top, title, up)
        for number, (label, those) in enumerate(values.items()):
            points = [
                (_LEFT + (place + 0.5) * width, up(value))
                for place, value in enumerate(those)
                if math.isfinite(value)
            ]
            last = f"{label} {those[-1]:.4g}".strip()
            chart.line(points, _COLOURS[number], 2, dots=2.5, title=last)
            self._key(chart, top, number, last)

    def _bars(
        self, chart: Chart, top: float, title: str, values: Mapping[str, Sequence[float]]
    ) -> None:
        sums = [math.fsum(each) for each in zip(*values.values(), strict=True)]
        up = self._scale(top, [0.0, *sums])
        width = self._frame(chart, top, title, up)
        base = [0.0] * len(sums)
        for number, (label, those) in enumerate(values.items()):
            for place, value in enumerate(those):
                low, high = up(base[place]), up(base[place] + value)
                left, told = _LEFT + (place + 0.1) * width, f"{label}: {value:.3g} ms"
                chart.box(left, high, 0.8 * width, low - high, _COLOURS[number], told)
                base[place] += value
            self._key(chart, top, number, label)

    def _key(self, chart: Chart, top: float, number: int, label: str) -> None:
        x, y = _WIDTH - _RIGHT + 16, top + _TOP + 18 * number
        chart.box(x, y, 12, 12, _COLOURS[number])
        chart.text(label, x + 18, y + 11)
