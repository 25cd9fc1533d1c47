"""Results as a chart: the latency of each method against its accuracy.

HTML and SVG are written without any library; PNG and what else matplotlib knows, with it.
"""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.nano.acceleration.search.results import Results
from bigdl.nano.acceleration.search.table import render
from bigdl.nano.acceleration.search.trial import Trial

__all__ = ["write_chart"]

_OWN = (".html", ".htm", ".svg")
_WIDTH, _MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN = 860, 90, 200, 50
_HEIGHT, _BAR = 460, 26
_COLOURS = {"fp32": "#4269d0", "bf16": "#efb118", "fp16": "#6cc5b0", "int8": "#ff725c"}
_TICKS = 5


def write_chart(results: Results, path: Path, precision: Callable[[str], str]) -> None:
    """Draw the methods that work.

    Parameters
    ----------
    results : Results
        With a metric, latency is drawn against accuracy; without one, as bars.
    path : Path
        Its suffix says in which form: ``.html`` and ``.svg`` need no library, others matplotlib.
    precision : callable
        The precision of a method, from its name; it decides the colour.

    Raises
    ------
    UsageError
        If the file cannot be written, or not in this form.
    """
    trials = [trial for trial in results.values() if trial.usable]
    try:
        if path.suffix.lower() not in _OWN:
            _write_with_matplotlib(trials, results.scored, path, precision)
            return
        drawing = _svg(trials, results.scored, precision)
        if path.suffix.lower() != ".svg":
            drawing = _page(drawing, render(results))
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The chart cannot be written to {path}: {error.strerror}") from error


def _page(drawing: str, table: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<title>Methods by latency and accuracy</title>"
        "<style>body{font-family:sans-serif;margin:2em}</style></head>\n"
        f"<body>\n{drawing}\n<pre>{html.escape(table)}</pre>\n</body></html>\n"
    )


def _svg(trials: list[Trial], scored: bool, precision) -> str:
    scatter = scored and all(_is_finite(trial.accuracy) for trial in trials)
    marks = _scatter(trials, precision) if scatter else _bars(trials, precision)
    height = _HEIGHT if scatter else 2 * _MARGIN + _BAR * len(trials)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
            *marks,
            "</svg>",
        ]
    )


def _scatter(trials, precision) -> list[str]:
    across = _Scale(
        [trial.latency for trial in trials], _MARGIN_LEFT, _WIDTH - _MARGIN_RIGHT, log=True
    )
    up = _Scale([trial.accuracy for trial in trials], _HEIGHT - _MARGIN, _MARGIN)
    marks = [*_axis(across, _MARGIN, _HEIGHT - _MARGIN), *_side(up)]
    marks.append(
        _text("latency (ms)", (_MARGIN_LEFT + _WIDTH - _MARGIN_RIGHT) / 2, _HEIGHT - 12, "middle")
    )
    marks.append(_text("accuracy", _MARGIN_LEFT, _MARGIN - 20, "end"))
    for trial in trials:
        x, y = across(trial.latency), up(trial.accuracy)
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_colour(trial, precision)}">'
            f"<title>{_title(trial)}</title></circle>"
        )
        marks.append(_text(trial.method, x + 8, y + 4))
    return marks


def _bars(trials, precision) -> list[str]:
    bottom = _MARGIN + _BAR * len(trials)
    left = _MARGIN_LEFT + _MARGIN_RIGHT - 40
    across = _Scale([0.0, *(trial.latency for trial in trials)], left, _WIDTH - 80)
    marks = [*_axis(across, _MARGIN, bottom)]
    marks.append(_text("latency (ms)", (left + _WIDTH - 80) / 2, bottom + 36, "middle"))
    for number, trial in enumerate(trials):
        y, end = _MARGIN + _BAR * number, across(trial.latency)
        marks.append(
            f'<rect x="{left}" y="{y + 4}" width="{max(end - left, 1):.1f}" height="{_BAR - 8}" '
            f'fill="{_colour(trial, precision)}"><title>{_title(trial)}</title></rect>'
        )
        marks.append(_text(trial.method, left - 6, y + _BAR / 2 + 4, "end"))
        marks.append(_text(f"{trial.latency:.3g}", end + 6, y + _BAR / 2 + 4))
    return marks


class _Scale:
    """From values to places."""

    def __init__(self, values, begin: float, end: float, log: bool = False):
        self._begin, self._end, self._log = begin, end, log
        low, high = (self._inner(pick(values)) for pick in (min, max))
        room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
        self._low, self._high = (low if low == 0.0 and not log else low - room), high + room

    def __call__(self, value: float) -> float:
        part = (self._inner(value) - self._low) / (self._high - self._low)
        return self._begin + part * (self._end - self._begin)

    def ticks(self) -> list[float]:
        span = self._high - self._low
        inner = [self._low + span * number / (_TICKS - 1) for number in range(_TICKS)]
        return [math.exp(value) if self._log else value for value in inner]

    def _inner(self, value: float) -> float:
        return math.log(value) if self._log else value


def _axis(scale, top, bottom) -> list[str]:
    marks = []
    for value in scale.ticks():
        x = scale(value)
        marks.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="#ddd"/>')
        marks.append(_text(f"{value:.3g}", x, bottom + 16, "middle"))
    return marks


def _side(scale) -> list[str]:
    marks = []
    for value in scale.ticks():
        y = scale(value)
        marks.append(f'<path d="M{_MARGIN_LEFT} {y:.1f}H{_WIDTH - _MARGIN_RIGHT}" stroke="#ddd"/>')
        marks.append(_text(f"{value:.4g}", _MARGIN_LEFT - 6, y + 4, "end"))
    return marks


def _text(text: str, x: float, y: float, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _title(trial: Trial) -> str:
    scored = "" if trial.accuracy is None else f", accuracy {trial.accuracy:.5g}"
    return html.escape(f"{trial.method}: {trial.latency:.4g} ms ({trial.speedup:.2f}x){scored}")


def _colour(trial: Trial, precision) -> str:
    return _COLOURS[precision(trial.method)]


def _is_finite(value) -> bool:
    return value is not None and math.isfinite(value)


def _write_with_matplotlib(trials, scored, path, precision) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            f"matplotlib, which writes {path.suffix} files, is not installed; run: pip install "
            "matplotlib, or choose .html or .svg"
        )
    # Figures of their own: pyplot's state and backend are the user's.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="latency (ms)")
    colours = [_colour(trial, precision) for trial in trials]
    latencies = [trial.latency for trial in trials]
    if scored:
        axes.set(ylabel="accuracy", xscale="log")
        axes.scatter(latencies, [trial.accuracy for trial in trials], c=colours)
        for trial in trials:
            axes.annotate(
                trial.method,
                (trial.latency, trial.accuracy),
                xytext=(5, 3),
                textcoords="offset points",
            )
    else:
        axes.barh([trial.method for trial in trials], latencies, color=colours)
        axes.invert_yaxis()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"The chart cannot be written to {path}: {error}") from error
