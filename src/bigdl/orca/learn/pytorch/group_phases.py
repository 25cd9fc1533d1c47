"""What the groups of the parameter layer spent their time on, for TensorBoard and as a chart."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bigdl.common.drawing import Scale, svg, text, write_drawing
from bigdl.orca.learn.layer_fit.figures import PHASES

__all__ = ["PHASE_TAGS", "GroupPhases", "draw_phases", "phase_summary"]

_COLUMNS = (*PHASES, "rest_s", "step_s")

PHASE_TAGS = tuple(f"Phases/{name}" for name in _COLUMNS)
"""Mean seconds per step of each phase; ``rest_s`` is what is left of the whole ``step_s``."""


class GroupPhases:
    """Mean seconds per step of the phases, for every group; kept in checkpoints.

    Attributes
    ----------
    rows : list of list of float
        Number of the group's last step, time, and a column for each of :data:`PHASE_TAGS`.
    """

    def __init__(self):
        self.rows: list[list[float]] = []

    def add(self, step: int, seconds: Mapping[str, float]) -> None:
        """Add a group.

        Parameters
        ----------
        step : int
        seconds : mapping
            Of the phases and the whole step.
        """
        own = [seconds[name] for name in PHASES]
        rest = max(0.0, seconds["step_s"] - sum(own))
        self.rows.append([float(step), time.time(), *own, rest, seconds["step_s"]])

    def take(self):
        """All rows as a tensor."""
        import torch

        return torch.tensor(self.rows, dtype=torch.float64).reshape(-1, 2 + len(_COLUMNS))

    def put(self, tensor) -> None:
        """The inverse of :meth:`take`."""
        # a checkpoint of another release may have had other phases
        self.rows = tensor.tolist() if tensor.shape[1] == 2 + len(_COLUMNS) else []


def phase_summary(rows: list[list[float]], tag: str) -> list[list[float]]:
    """``[step, seconds, time]`` of every group, for one of :data:`PHASE_TAGS`."""
    column = 2 + PHASE_TAGS.index(tag)
    return [[int(row[0]), row[column], row[1]] for row in rows]


# -- the chart ------------------------------------------------------------------------------------

_DRAWN = _COLUMNS[:-1]
_COLOURS = (
    "#97bbf5",
    "#9c6b4e",
    "#6cc5b0",
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#a463f2",
    "#3ca951",
    "#9c9c9c",
)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _MARGIN = 860, 420, 70, 150, 40
_BARS = 120  # at most: a longer training is drawn by means of several groups


def draw_phases(rows: Sequence[Sequence[float]], path: Path) -> None:
    """Draw one stacked bar per group: milliseconds per step.

    Parameters
    ----------
    rows : sequence of sequence of float
        See :class:`GroupPhases`.
    path : Path
        See :func:`bigdl.common.drawing.write_drawing`.
    """
    bars = _means(rows)
    write_drawing(
        path,
        "Phases of the parameter layer",
        as_svg=lambda: _svg(bars),
        as_text=lambda: _table(bars),
        on_figure=lambda figure: _with_matplotlib(figure, bars),
    )


def _means(rows) -> list[tuple[int, list[float]]]:
    """Last step and milliseconds of each phase, of not too many bars."""
    together = -(-len(rows) // _BARS)
    bars = []
    for first in range(0, len(rows), together):
        own = rows[first : first + together]
        phases = zip(*(row[2 : 2 + len(_DRAWN)] for row in own), strict=True)
        bars.append((int(own[-1][0]), [1e3 * sum(phase) / len(own) for phase in phases]))
    return bars


def _svg(bars) -> str:
    bottom, width = _HEIGHT - _MARGIN, (_WIDTH - _LEFT - _RIGHT) / len(bars)
    up = Scale([0.0, max(sum(values) for _, values in bars)], bottom, _MARGIN)
    marks = []
    for value in up.ticks():
        y = up(value)
        marks.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        marks.append(text(f"{value:.3g}", _LEFT - 6, y + 4, "end"))
    for number, (step, values) in enumerate(bars):
        marks += _bar(_LEFT + number * width, width * 0.9, step, values, up)
    for number in sorted({0, len(bars) // 2, len(bars) - 1}):
        x = _LEFT + (number + 0.45) * width
        marks.append(text(f"{bars[number][0]}", x, bottom + 16, "middle"))
    marks.append(text("step", (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "middle"))
    marks.append(text("ms per step", _LEFT, _MARGIN - 16, "end"))
    return svg(_WIDTH, _HEIGHT, [*marks, *_legend(bottom)])


def _bar(x, width, step, values, up) -> list[str]:
    marks, begin = [], 0.0
    for name, value, colour in zip(_DRAWN, values, _COLOURS, strict=True):
        top = up(begin + value)
        title = html.escape(f"step {step}, {_label(name)}: {value:.3g} ms")
        marks.append(
            f'<rect x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{up(begin) - top:.2f}" '
            f'fill="{colour}"><title>{title}</title></rect>'
        )
        begin += value
    return marks


def _legend(bottom) -> list[str]:
    marks, x = [], _WIDTH - _RIGHT + 16
    for number, (name, colour) in enumerate(zip(_DRAWN, _COLOURS, strict=True)):
        y = bottom - 20 * number
        marks.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        marks.append(text(_label(name), x + 18, y))
    return marks


def _table(bars) -> str:
    head = "".join(f"{_label(name):>16}" for name in _DRAWN)
    lines = [f"{step:>8}" + "".join(f"{v:>16.3f}" for v in values) for step, values in bars]
    return "\n".join([f"{'step':>8}{head}", *lines])


def _with_matplotlib(figure, bars) -> None:
    axes = figure.add_subplot(xlabel="step", ylabel="ms per step")
    steps = [str(step) for step, _ in bars]
    begin = [0.0] * len(bars)
    for number, (name, colour) in enumerate(zip(_DRAWN, _COLOURS, strict=True)):
        values = [own[number] for _, own in bars]
        axes.bar(steps, values, bottom=begin, color=colour, label=_label(name))
        begin = [low + value for low, value in zip(begin, values, strict=True)]
    axes.legend()


def _label(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")
