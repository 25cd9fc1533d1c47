"""Charts written to files: HTML and SVG without any library, other formats with matplotlib."""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from bigdl.common.errors import MissingExtraError, UsageError

_BUILTIN_SUFFIXES = (".html", ".htm", ".svg")
_TICKS = 5
GRID = "#88888866"
"""Colour of grid lines on light and dark backgrounds."""

_THEMES = (
    "<style>:root{color:#1d2329;background:#fff}@media (prefers-color-scheme:dark)"
    "{:root{color:#dfe3e8;background:#15181c}}</style>"
)
_ALIGNMENT = {"start": "left", "middle": "center", "end": "right"}


def _page(title: str, drawing: str, below: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>"
        "<style>:root{color-scheme:light dark}body{font-family:sans-serif;margin:2em;"
        "color:#1d2329;background:#fff}@media (prefers-color-scheme:dark){body{color:#dfe3e8;"
        "background:#15181c}}</style></head>\n"
        f"<body>\n{drawing}\n<pre>{html.escape(below)}</pre>\n</body></html>\n"
    )


class Chart:
    """Lines, boxes and texts that are drawn as SVG or with matplotlib.

    Parameters
    ----------
    width, height : float
        Size in pixels; the origin is the upper left corner.
    """

    def __init__(self, width: float, height: float) -> None:
        self._width, self._height = width, height
        self._lines: list[tuple[list[tuple[float, float]], str, float, float, str]] = []
        self._boxes: list[tuple[float, float, float, float, str, str]] = []
        self._texts: list[tuple[str, float, float, str]] = []

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str = GRID,
        width: float = 1,
        *,
        dots: float = 0,
        title: str = "",
    ) -> None:
        """Draw a line through points.

        Parameters
        ----------
        points : iterable of (x, y)
        colour : str
        width : float
        dots : float
            Radius of a dot at each point; 0 for none.
        title : str
            Tooltip in a browser.
        """
        self._lines.append((list(points), colour, width, dots, title))

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, title: str = ""
    ) -> None:
        """Draw a filled box whose upper left corner is (x, y); see :meth:`line` for the title."""
        self._boxes.append((x, y, width, height, colour, title))

    def text(self, content: str, x: float, y: float, anchor: str = "start") -> None:
        """Draw text; `anchor` is ``"start"``, ``"middle"`` or ``"end"``."""
        self._texts.append((content, x, y, anchor))

    def svg(self, *, is_alone: bool = False) -> str:
        """Return the chart as SVG.

        Parameters
        ----------
        is_alone : bool
            True for a separate file, which follows the light or dark theme of the browser. In an
            HTML page the texts have the colour of the page's text.
        """
        marks = []
        for points, colour, width, dots, title in self._lines:
            marks.append(f'<g fill="{colour}"><title>{html.escape(title)}</title>')
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            marks.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
            )
            circles = points if dots else ()
            marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dots}"/>' for x, y in circles]
            marks.append("</g>")
        for x, y, width, height, colour, title in self._boxes:
            marks.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
                f'fill="{colour}"><title>{html.escape(title)}</title></rect>'
            )
        for content, x, y, anchor in self._texts:
            position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
            marks.append(f"<text {position}>{html.escape(content)}</text>")
        size = f'width="{self._width}" height="{self._height}"'
        box = f'viewBox="0 0 {self._width} {self._height}"'
        font = 'font-family="sans-serif" font-size="12"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} {font} fill="currentColor">'
        return "\n".join([head, *([_THEMES] if is_alone else []), *marks, "</svg>"])

    def _write_with_matplotlib(self, path: Path) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingExtraError(
                f"matplotlib, which writes {path.suffix} files, is not installed; run: pip install "
                "matplotlib, or choose .html or .svg"
            )
        from matplotlib.figure import Figure

        mpl_figure = Figure(
            figsize=(9, 5), layout="constrained"
        )  # leaves the user's pyplot state alone
        axes: Any = mpl_figure.subplots()
        axes.set(xlim=(0, self._width), ylim=(self._height, 0))
        axes.axis("off")
        for points, colour, width, dots, _ in self._lines:
            axes.plot(*zip(*points, strict=True), "o-", c=colour, lw=width, ms=2 * dots)
        for x, y, width, height, colour, _ in self._boxes:
            axes.bar(x, height, width, y, align="edge", color=colour, zorder=3)
        for content, x, y, anchor in self._texts:
            axes.text(x, y, content, ha=_ALIGNMENT[anchor], fontsize=8)
        try:
            mpl_figure.savefig(path)
        except ValueError as error:
            raise UsageError(
                f"The chart cannot be written to {path}: {error}",
                code="path-unusable",
                path=str(path),
            ) from error

    def write(self, path: Path, title: str, below: str) -> None:
        """Write the chart to a file in the format of the path's suffix.

        Parameters
        ----------
        path : Path
            ``.svg``, ``.html`` or a suffix that matplotlib knows.
        title : str
            Title of the HTML page.
        below : str
            Text below the chart on the HTML page.

        Raises
        ------
        UsageError
            If the file cannot be written, or the format is unknown.
        """
        suffix = path.suffix.lower()
        try:
            if suffix not in _BUILTIN_SUFFIXES:
                self._write_with_matplotlib(path)
                return
            is_svg = suffix == ".svg"
            drawing = self.svg(is_alone=True) if is_svg else _page(title, self.svg(), below)
            path.write_text(drawing, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"The chart cannot be written to {path}: {error.strerror}",
                code="path-unusable",
                path=str(path),
            ) from error


class AxisScale:
    """Linear or logarithmic mapping from values to pixel positions, with a margin.

    Parameters
    ----------
    values : sequence of float
        The values to show. An axis that begins at 0 has no margin there.
    begin, end : float
        Pixel positions of the ends.
    log : bool
        Whether the scale is logarithmic.
    """

    def __init__(
        self, values: Collection[float], begin: float, end: float, log: bool = False
    ) -> None:
        self._begin, self._end, self._log = begin, end, log
        low, high = (self._inner(pick(values)) for pick in (min, max))
        room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
        self._low, self._high = (low if low == 0.0 and not log else low - room), high + room

    def __call__(self, value: float) -> float:
        part = (self._inner(value) - self._low) / (self._high - self._low)
        return self._begin + part * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Return about five round values within the axis, such as 0, 20 and 40."""
        low, high = (math.exp(v) if self._log else v for v in (self._low, self._high))
        if self._log and high > 5 * low:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            return [value for value in values if low <= value <= high]
        return round_values(low, high, _TICKS)

    def _inner(self, value: float) -> float:
        return math.log(value) if self._log else value


def round_values(low: float, high: float, count: int) -> list[float]:
    """Return at most `count` + 1 multiples of 1, 2 or 5 times a power of ten within a range.

    Examples
    --------
    >>> from bigdl.common.drawing import round_values
    >>> round_values(0.0, 97.0, 5)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    >>> round_values(0.12, 0.35, 5)
    [0.15, 0.2, 0.25, 0.3, 0.35]
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))
    digits = max(0, 1 - math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, digits) for number in range(first, last + 1)]
