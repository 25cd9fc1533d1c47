"""Results as a table and as a chart, and the progress of a search."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from pathlib import Path

from bigdl.common.drawing import Scale, svg, text, write_drawing
from bigdl.nano.acceleration.search.results import Results
from bigdl.nano.acceleration.search.trial import Trial

__all__ = ["Progress", "render", "write_chart"]


_WIDTHS = {"method": 32, "status": 20, "latency(ms)": 14, "speedup": 10, "metric value": 20}


def render(results: Results) -> str:
    """Return a table with one row for each method, and below it why methods failed.

    Parameters
    ----------
    results : Results

    Returns
    -------
    str
        Ends with a line break.
    """
    widths = dict(_WIDTHS)
    longest = max(len(name) for name in results)
    widths["method"] = max(widths["method"], longest + 2)
    if results.objective == "throughput":
        widths["samples/s"] = 14
    if results.objective == "memory":
        widths["memory(MB)"] = 14
    rule = " " + " ".join("-" * width for width in widths.values()) + " "
    lines = [rule, _line(list(widths), widths), rule]
    lines += [_line(_cells(trial, widths), widths) for trial in results.values()]
    lines.append(rule)
    notes = [f"{trial.method}: {trial.reason}" for trial in results.values() if trial.reason]
    return "\n".join([*lines, *notes]) + "\n"


def _cells(trial: Trial, columns) -> list[str]:
    values = {
        "method": trial.method,
        "status": trial.status,
        "latency(ms)": _figure(trial.latency),
        "speedup": "None" if trial.speedup is None else f"{trial.speedup:.2f}x",
        "metric value": _figure(trial.accuracy),
        "samples/s": _figure(trial.throughput),
        "memory(MB)": _figure(trial.memory),
    }
    return [values[column] for column in columns]


def _line(cells, widths) -> str:
    fields = (f"{cell:^{width}}" for cell, width in zip(cells, widths.values(), strict=True))
    return "|" + "|".join(fields) + "|"


def _figure(value: float | None) -> str:
    """A number with five significant figures."""
    return "None" if value is None else f"{value:.5g}"


_WIDTH, _MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN = 860, 90, 200, 50
_HEIGHT, _BAR = 460, 26
_COLOURS = {"fp32": "#4269d0", "bf16": "#efb118", "fp16": "#6cc5b0", "int8": "#ff725c"}


def write_chart(results: Results, path: Path, precisions: Mapping[str, str]) -> None:
    """Draw the methods that work.

    Parameters
    ----------
    results : Results
        With a metric, latency is drawn against accuracy; without one, as bars.
    path : Path
        Its suffix says in which form: ``.html`` and ``.svg`` need no library, others matplotlib.
    precisions : mapping of str to str
        The precision of each method, which decides the colour.

    Raises
    ------
    UsageError
        If the file cannot be written, or not in this form.
    """
    trials = [trial for trial in results.values() if trial.usable]
    write_drawing(
        path,
        "Methods by latency and accuracy",
        as_svg=lambda: _svg(trials, results.scored, precisions),
        as_text=lambda: render(results),
        on_figure=lambda figure: _with_matplotlib(figure, trials, results.scored, precisions),
    )


def _svg(trials: list[Trial], scored: bool, precisions) -> str:
    scatter = scored and all(_is_finite(trial.accuracy) for trial in trials)
    marks = _scatter(trials, precisions) if scatter else _bars(trials, precisions)
    return svg(_WIDTH, _HEIGHT if scatter else 2 * _MARGIN + _BAR * len(trials), marks)


def _scatter(trials, precisions) -> list[str]:
    across = Scale(
        [trial.latency for trial in trials], _MARGIN_LEFT, _WIDTH - _MARGIN_RIGHT, log=True
    )
    up = Scale([trial.accuracy for trial in trials], _HEIGHT - _MARGIN, _MARGIN)
    marks = [*_axis(across, _MARGIN, _HEIGHT - _MARGIN), *_side(up)]
    marks.append(
        text("latency (ms)", (_MARGIN_LEFT + _WIDTH - _MARGIN_RIGHT) / 2, _HEIGHT - 12, "middle")
    )
    marks.append(text("accuracy", _MARGIN_LEFT, _MARGIN - 20, "end"))
    for trial in trials:
        x, y = across(trial.latency), up(trial.accuracy)
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_colour(trial, precisions)}">'
            f"<title>{_title(trial)}</title></circle>"
        )
        marks.append(text(trial.method, x + 8, y + 4))
    return marks


def _bars(trials, precisions) -> list[str]:
    bottom = _MARGIN + _BAR * len(trials)
    left = _MARGIN_LEFT + _MARGIN_RIGHT - 40
    across = Scale([0.0, *(trial.latency for trial in trials)], left, _WIDTH - 80)
    marks = [*_axis(across, _MARGIN, bottom)]
    marks.append(text("latency (ms)", (left + _WIDTH - 80) / 2, bottom + 36, "middle"))
    for number, trial in enumerate(trials):
        y, end = _MARGIN + _BAR * number, across(trial.latency)
        marks.append(
            f'<rect x="{left}" y="{y + 4}" width="{max(end - left, 1):.1f}" height="{_BAR - 8}" '
            f'fill="{_colour(trial, precisions)}"><title>{_title(trial)}</title></rect>'
        )
        marks.append(text(trial.method, left - 6, y + _BAR / 2 + 4, "end"))
        marks.append(text(f"{trial.latency:.3g}", end + 6, y + _BAR / 2 + 4))
    return marks


def _axis(scale, top, bottom) -> list[str]:
    marks = []
    for value in scale.ticks():
        x = scale(value)
        marks.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="#ddd"/>')
        marks.append(text(f"{value:.3g}", x, bottom + 16, "middle"))
    return marks


def _side(scale) -> list[str]:
    marks = []
    for value in scale.ticks():
        y = scale(value)
        marks.append(f'<path d="M{_MARGIN_LEFT} {y:.1f}H{_WIDTH - _MARGIN_RIGHT}" stroke="#ddd"/>')
        marks.append(text(f"{value:.4g}", _MARGIN_LEFT - 6, y + 4, "end"))
    return marks


def _title(trial: Trial) -> str:
    scored = "" if trial.accuracy is None else f", accuracy {trial.accuracy:.5g}"
    return html.escape(f"{trial.method}: {trial.latency:.4g} ms ({trial.speedup:.2f}x){scored}")


def _colour(trial: Trial, precisions) -> str:
    return _COLOURS[precisions[trial.method]]


def _is_finite(value) -> bool:
    return value is not None and math.isfinite(value)


def _with_matplotlib(figure, trials, scored, precisions) -> None:
    axes = figure.add_subplot(xlabel="latency (ms)")
    colours = [_colour(trial, precisions) for trial in trials]
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


class Progress:
    """A progress bar on stderr; a context, and a listener of :func:`isolation.search`.

    Parameters
    ----------
    count : int
        Number of methods.
    always : bool
        Show it also where stderr is not a terminal.
    """

    def __init__(self, count: int, always: bool):
        from tqdm import tqdm

        self._bar = tqdm(total=count, unit="method", disable=False if always else None)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()

    def __call__(self, event: str | Trial) -> None:
        if isinstance(event, str):
            self._bar.set_description(event)
            return
        self._bar.set_postfix_str(event.status)
        self._bar.update()
