"""Charts of figures that come one after the other, such as those of the epochs of a fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigdl.common.drawing import AxisScale, Chart
from bigdl.training.metrics import headline

__all__ = ["FitChart", "PanelChart", "table_of"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 90.0, 150.0, 26.0, 28.0  # room around the panel's inside
_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
_PHASES = {"mean_fetch_s": "fetch", "mean_fwd_s": "forward", "mean_bwd_s": "backward"}


def _short(value: float, digits: int) -> str:
    """Return a number with so many digits; thousands are written out."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.{digits}g}"


class PanelChart(Chart):
    """Panels of lines or stacked bars, one below the other, over the same places.

    Parameters
    ----------
    name : str
        Of what is counted by the places, e.g. ``"epoch"``.
    places : sequence of int
    panels : sequence of (str, dict of str to sequence of float, bool)
        Of each panel the title, the values by their label, and whether they are stacked.
    width, height : float
        Of a panel, in pixels.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[int],
        panels: Sequence[tuple[str, Mapping[str, Sequence[float]], bool]],
        width: float = 640.0,
        height: float = 170.0,
    ):
        super().__init__(width, height * len(panels))
        self._name, self._places = name, places
        self._right, self._panel = width - _RIGHT, height
        self._step = (self._right - _LEFT) / len(places)
        for number, (title, values, is_stacked) in enumerate(panels):
            draw = self._draw_bars if is_stacked else self._draw_lines
            draw(number * height, title, values)

    def _draw_frame(self, top: float, title: str, values: Sequence[float]) -> AxisScale:
        """Draw the grid of a panel; return the scale of its values."""
        bottom = top + self._panel - _BOTTOM
        known = [value for value in values if math.isfinite(value)]
        up = AxisScale(known or [0.0, 1.0], bottom, top + _TOP)
        for tick in up.ticks():
            self.line([(_LEFT, up(tick)), (self._right, up(tick))], "#ddd")
            self.text(_short(tick, 3), _LEFT - 6, up(tick) + 4, "end")
        for number in sorted({0, len(self._places) // 2, len(self._places) - 1}):
            middle = _LEFT + (number + 0.5) * self._step
            self.text(f"{self._places[number]}", middle, bottom + 16, "middle")
        self.text(title, _LEFT, top + 16)
        return up

    def _draw_lines(self, top: float, title: str, values: Mapping[str, Sequence[float]]) -> None:
        up = self._draw_frame(top, title, list(itertools.chain(*values.values())))
        for number, (label, those) in enumerate(values.items()):
            points = [
                (_LEFT + (place + 0.5) * self._step, up(value))
                for place, value in enumerate(those)
                if math.isfinite(value)
            ]
            last = f"{label} {_short(those[-1], 4)}".strip()
            self.line(points, _COLOURS[number], 2, dots=2.5, title=last)
            self._draw_key(top, number, last)

    def _draw_bars(self, top: float, title: str, values: Mapping[str, Sequence[float]]) -> None:
        sums = [math.fsum(each) for each in zip(*values.values(), strict=True)]
        up = self._draw_frame(top, title, [0.0, *sums])
        base = [0.0] * len(sums)
        for number, (label, those) in enumerate(values.items()):
            for place, value in enumerate(those):
                low, high = up(base[place]), up(base[place] + value)
                left = _LEFT + (place + 0.1) * self._step
                told = f"{self._name} {self._places[place]}, {label}: {value:.3g} ms"
                self.box(left, high, 0.8 * self._step, low - high, _COLOURS[number], told)
                base[place] += value
            self._draw_key(top, number, label)

    def _draw_key(self, top: float, number: int, label: str) -> None:
        x, y = self._right + 16, top + _TOP + 18 * number
        self.box(x, y, 12, 12, _COLOURS[number])
        self.text(label, x + 18, y + 11)


def table_of(rows: Sequence[Mapping[str, float]]) -> str:
    """Return rows of figures by name as text."""
    import pandas as pd

    return pd.DataFrame(rows).to_string(index=False, float_format="{:.6g}".format)


class FitChart:
    """Epochs as lines and bars, one panel for the loss, for each metric, for speed and for time.

    In a notebook it shows itself.

    Parameters
    ----------
    epochs : sequence of dict
        Figures of epochs, as a run keeps them.
    """

    def __init__(self, epochs: Sequence[dict[str, Any]]):
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
        return table_of(rows)

    @staticmethod
    def _speed(entry: dict[str, Any]) -> dict[str, float]:
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
        return PanelChart("epoch", [entry["epoch"] for entry in self._epochs], self._panels())
