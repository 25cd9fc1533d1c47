"""The results of a search as charts, and as a leaderboard of TensorBoard.

Charts show how trials learned, and which values were good ones: HTML and SVG without any library,
PNG and what else matplotlib knows, with it.
"""

from __future__ import annotations

import html
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigdl.common.drawing import Scale, svg, text, write_drawing
from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.orca.automl.records import Records
from bigdl.orca.learn.pytorch.callbacks.tensorboard import writer_class

__all__ = ["draw_history", "draw_parallel_coordinates", "write_leaderboard"]

logger = logging.getLogger("bigdl.orca")

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _MARGIN = 860, 460, 90, 40, 50
_BEST, _OTHER = "#ff725c", "#9aa5b8"
_MOST_TICKS = 6


def draw_history(records: Records, path: Path) -> None:
    """Draw the first metric of each trial after each epoch; the best trial stands out.

    Parameters
    ----------
    records : Records
    path : Path
        Its suffix says in which form.

    Raises
    ------
    UsageError
        If no trial is finished, or the file cannot be written.
    """
    ranked = _ranked(records)
    lines = [sorted(t.intermediate_values.items()) for t in ranked]
    for trial, line in zip(ranked, lines, strict=True):
        if not line:  # of a search by several metrics
            line.append((_epochs(trial), records.figures(trial)[0]))
    metric = records.goal.first.name
    points = [point for line in lines for point in line]
    across = Scale([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    up = Scale([y for _, y in points], _HEIGHT - _MARGIN, _MARGIN)

    def as_svg():
        marks = [_axis(up, _LEFT), text(metric, _LEFT, _MARGIN - 20, "middle")]
        marks += [
            text(f"{x:g}", across(x), _HEIGHT - _MARGIN + 20, "middle") for x in _whole(points)
        ]
        marks.append(text("epoch", _WIDTH - _RIGHT, _HEIGHT - 10, "end"))
        for place, line in _worst_first(lines):
            named = f"trial {ranked[place].number}: {records.json_config(ranked[place])}"
            marks.append(_line([(across(x), up(y)) for x, y in line], place == 0, named))
        return svg(_WIDTH, _HEIGHT, marks)

    def on_figure(figure):
        axes = figure.subplots()
        for place, line in _worst_first(lines):
            axes.plot(*zip(*line, strict=True), "o-", color=_colour(place), markersize=3)
        axes.set(xlabel="epoch", ylabel=metric, title="Trials by their epochs")

    _write(records, path, "Trials by their epochs", as_svg, on_figure)


def draw_parallel_coordinates(records: Records, path: Path) -> None:
    """Draw each finished trial as a line through its values and its figure.

    Parameters
    ----------
    records : Records
    path : Path
        Its suffix says in which form.

    Raises
    ------
    UsageError
        If no trial is finished, or the file cannot be written.
    """
    ranked = _ranked(records)
    axes = _axes(records, ranked)
    step = (_WIDTH - 2 * _LEFT) / max(1, len(axes) - 1)
    places = [_LEFT + step * number for number in range(len(axes))]

    def as_svg():
        scales = [Scale(axis.places, _HEIGHT - _MARGIN, _MARGIN) for axis in axes]
        marks = []
        for axis, scale, x in zip(axes, scales, places, strict=True):
            marks.append(_axis(scale, x, axis.labels))
            marks.append(text(axis.name, x, _MARGIN - 20, "middle"))
        for place, trial in _worst_first(ranked):
            line = [
                (x, scale(axis.places[place]))
                for axis, scale, x in zip(axes, scales, places, strict=True)
            ]
            marks.append(_line(line, place == 0, f"trial {trial.number}"))
        return svg(_WIDTH, _HEIGHT, marks)

    def on_figure(figure):
        plot = figure.subplots()
        for place, _ in _worst_first(ranked):
            heights = [axis.part(place) for axis in axes]
            plot.plot(range(len(axes)), heights, "o-", color=_colour(place), markersize=3)
        for number, axis in enumerate(axes):
            for label, height in axis.marks():
                plot.annotate(label, (number, height), fontsize=7)
        plot.set_xticks(range(len(axes)), [axis.name for axis in axes])
        plot.set(yticks=[], title="Trials by their values")

    _write(records, path, "Trials by their values", as_svg, on_figure)


@dataclass
class _Axis:
    """One value of the trials; names become places in the order of their first use."""

    name: str
    places: list[float]
    labels: dict[float, str] | None

    @classmethod
    def of(cls, name: str, values: list[Any]) -> _Axis:
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            return cls(name, [float(value) for value in values], None)
        names = list(dict.fromkeys(map(str, values)))
        labels = {float(place): each for place, each in enumerate(names)}
        return cls(name, [float(names.index(str(value))) for value in values], labels)

    def part(self, place: int) -> float:
        """Return the place of a trial between the ends of the axis."""
        return self._part(self.places[place])

    def marks(self) -> list[tuple[str, float]]:
        """Texts, and where they stand."""
        if self.labels is not None:
            return [(label, self._part(place)) for place, label in self.labels.items()]
        return [
            (f"{value:.3g}", self._part(value)) for value in {min(self.places), max(self.places)}
        ]

    def _part(self, value):
        low, high = min(self.places), max(self.places)
        return 0.5 if low == high else (value - low) / (high - low)


def _axes(records, ranked) -> list[_Axis]:
    texts = [records.json_config(trial) for trial in ranked]
    paths = [path for path in texts[0] if all(path in each for each in texts)]
    axes = [_Axis.of(path, [each[path] for each in texts]) for path in paths]
    for number, metric in enumerate(records.goal.metrics):
        axes.append(_Axis.of(metric.name, [records.figures(t)[number] for t in ranked]))
    return axes


def _ranked(records):
    ranked = records.ranked()
    if not ranked:
        raise UsageError("There is nothing to draw: no trial of the search is finished")
    return ranked


def _write(records, path, title, as_svg, on_figure):
    write_drawing(
        Path(path),
        title,
        as_svg=as_svg,
        as_text=lambda: records.table().to_string(),
        on_figure=on_figure,
    )


def _worst_first(ranked):
    """Return the best one last, which is drawn, above the others."""
    return reversed(list(enumerate(ranked)))


def _colour(place):
    return _BEST if place == 0 else _OTHER


def _whole(points) -> list[int]:
    epochs = sorted({x for x, _ in points})
    return epochs[:: max(1, len(epochs) // _MOST_TICKS)]


def _epochs(trial):
    return trial.user_attrs["result"]["epochs"]


def _axis(scale, x, labels=None) -> str:
    ticks = scale.ticks() if labels is None else list(labels)
    marks = [f'<line x1="{x}" y1="{_MARGIN}" x2="{x}" y2="{_HEIGHT - _MARGIN}" stroke="#ccc"/>']
    for value in ticks:
        label = f"{value:.3g}" if labels is None else labels[value]
        marks.append(text(label, x - 6, scale(value) + 4, "end"))
    return "\n".join(marks)


def _line(points, is_best, named) -> str:
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    colour, width = (_BEST, 2.5) if is_best else (_OTHER, 1)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points)
    return (
        f'<g fill="{colour}" stroke="none"><title>{html.escape(named)}</title>{dots}'
        f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{width}"/></g>'
    )


# TensorBoard -------------------------------------------------------------------------------------


def write_leaderboard(records: Records, folder: Path) -> None:
    """Write event files of all finished trials, in place of those of an earlier search.

    Parameters
    ----------
    records : Records
    folder : Path
        Gets a folder for each trial.

    Notes
    -----
    The page HPARAMS of TensorBoard shows them as a table.  Without TensorBoard nothing is written,
    and a message says so.
    """
    try:
        make, hparams = _tensorboard()
    except MissingExtraError as error:
        logger.warning("No leaderboard is written to %s: %s", folder, error)
        return
    for old in folder.glob("trial_*"):
        shutil.rmtree(old, ignore_errors=True)
    names = records.goal.names
    for trial in records.finished():
        best = {f"best/{n}": v for n, v in zip(names, records.figures(trial), strict=True)}
        values = {key: _shown(value) for key, value in records.json_config(trial).items()}
        with make(log_dir=str(folder / f"trial_{trial.number:05}")) as writer:
            for epoch, value in sorted(trial.intermediate_values.items()):
                writer.add_scalar(names[0], value, epoch)
            for tag, value in best.items():
                writer.add_scalar(tag, value)
            for summary in hparams(values, best):
                writer.file_writer.add_summary(summary)


def _tensorboard():
    """Return a writer of event files; torch's would load TensorFlow where that is installed."""
    try:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams
    except ImportError:
        make = writer_class()
        from torch.utils.tensorboard.summary import hparams

        return make, hparams
    return SummaryWriter, hparams


def _shown(value):
    return value if isinstance(value, bool | int | float | str) else str(value)
