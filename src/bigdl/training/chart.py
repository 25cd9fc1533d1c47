"""Charts of metrics over time, such as the metrics of a fit's epochs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigdl.common.drawing import GRID, AxisScale, Chart
from bigdl.training.metrics import headline

__all__ = ["FitChart", "PanelChart", "table_of"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 90.0, 150.0, 26.0, 28.0  # room around the panel's inside
_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
_THROUGHPUT = "rows per second"
_PHASES = {
    "mean_fetch_s": "fetch",
    "mean_fwd_s": "forward",
    "mean_bwd_s": "backward",
    "mean_exchange_s": "exchange",
}


def _short(value: float, digits: int) -> str:
    """Format a number with `digits` significant digits; write thousands and millions in full."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.{digits}g}"


class PanelChart(Chart):
    """Stacked panels of lines or bars over a common x axis.

    Parameters
    ----------
    name : str
        Name of the x axis, e.g. ``"epoch"``.
    ticks : sequence of int
        Values of the x axis.
    panels : sequence of (str, dict of str to sequence of float, bool)
        Title of each panel, its values by label, and whether they are stacked.
    width, height : float
        Size of a panel in pixels.
    """

    def __init__(
        self,
        name: str,
        ticks: Sequence[int],
        panels: Sequence[tuple[str, Mapping[str, Sequence[float]], bool]],
        width: float = 640.0,
        height: float = 170.0,
    ):
        super().__init__(width, height * len(panels))
        self._name, self._ticks = name, ticks
        self._right, self._panel = width - _RIGHT, height
        self._step = (self._right - _LEFT) / len(ticks)
        for number, (title, values, is_stacked) in enumerate(panels):
            draw = self._draw_bars if is_stacked else self._draw_lines
            draw(number * height, title, values)

    def _draw_frame(self, top: float, title: str, values: Sequence[float]) -> AxisScale:
        """Draw the grid and title of a panel; return the scale of its values."""
        bottom = top + self._panel - _BOTTOM
        known = [value for value in values if math.isfinite(value)]
        up = AxisScale(known or [0.0, 1.0], bottom, top + _TOP)
        for tick in up.ticks():
            self.line([(_LEFT, up(tick)), (self._right, up(tick))], GRID)
            self.text(_short(tick, 3), _LEFT - 6, up(tick) + 4, "end")
        for number in sorted({0, len(self._ticks) // 2, len(self._ticks) - 1}):
            middle = _LEFT + (number + 0.5) * self._step
            self.text(f"{self._ticks[number]}", middle, bottom + 16, "middle")
        self.text(self._name, self._right + 16, bottom + 16)
        self.text(title, _LEFT, top + 16)
        return up

    def _draw_lines(self, top: float, title: str, values: Mapping[str, Sequence[float]]) -> None:
        series_values = list(itertools.chain(*values.values()))
        if title == _THROUGHPUT:  # a change of 2 % does not look like a change
            series_values.append(0.0)
        up = self._draw_frame(top, title, series_values)
        for number, (label, series) in enumerate(values.items()):
            points = [
                (_LEFT + (index + 0.5) * self._step, up(value))
                for index, value in enumerate(series)
                if math.isfinite(value)
            ]
            last = f"{label} {_short(series[-1], 4)}".strip()
            self.line(points, _COLOURS[number], 2, dots=2.5, title=last)
            self._draw_key(top, number, last)

    def _draw_bars(self, top: float, title: str, values: Mapping[str, Sequence[float]]) -> None:
        sums = [math.fsum(each) for each in zip(*values.values(), strict=True)]
        up = self._draw_frame(top, title, [0.0, *sums])
        base = [0.0] * len(sums)
        for number, (label, series) in enumerate(values.items()):
            for index, value in enumerate(series):
                low, high = up(base[index]), up(base[index] + value)
                left = _LEFT + (index + 0.1) * self._step
                tooltip = f"{self._name} {self._ticks[index]}, {label}: {value:.3g} ms"
                self.box(left, high, 0.8 * self._step, low - high, _COLOURS[number], tooltip)
                base[index] += value
            self._draw_key(top, number, label)

    def _draw_key(self, top: float, number: int, label: str) -> None:
        x, y = self._right + 16, top + _TOP + 18 * number
        self.box(x, y, 12, 12, _COLOURS[number])
        self.text(label, x + 18, y + 11)


def table_of(rows: Sequence[Mapping[str, float]]) -> str:
    """Format rows of metrics as a text table."""
    import pandas as pd

    return pd.DataFrame(rows).to_string(index=False, float_format="{:.6g}".format)


class FitChart:
    """Chart of a fit's epochs, with panels for loss, each metric, throughput and time.

    A notebook displays it as SVG.

    Parameters
    ----------
    epochs : sequence of dict
        Epoch entries of a run's history.
    """

    def __init__(self, epochs: Sequence[dict[str, Any]]):
        self._epochs = epochs

    def write(self, path: str | Path) -> None:
        """Write the chart to a file.

        Parameters
        ----------
        path : str or Path
            Path ending in ``.html`` or ``.svg``, or in a format of matplotlib, such as ``.png``.

        Raises
        ------
        UsageError
            If the file cannot be written.
        """
        self._chart().write(Path(path), "Training", self._table())

    def _repr_html_(self) -> str:
        return self._chart().svg()

    def _table(self) -> str:
        """Return the metrics of all epochs as a text table."""
        rows = [{"epoch": e["epoch"], **headline(e), **self._speed(e)} for e in self._epochs]
        return table_of(rows)

    @staticmethod
    def _speed(entry: dict[str, Any]) -> dict[str, float]:
        seconds = entry["profile"].get("mean_train_epoch_s") or math.inf
        return {"rows/s": entry["num_samples"] / seconds}

    def _panels(self) -> list[tuple[str, dict[str, list[float]], bool]]:
        """Return each panel's title, values by label, and whether they are stacked."""
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
            (_THROUGHPUT, {"": speed}, False),
            *([("ms per batch", times, True)] if times else []),
        ]

    def _chart(self) -> Chart:
        return PanelChart("epoch", [entry["epoch"] for entry in self._epochs], self._panels())
