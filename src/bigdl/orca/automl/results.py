"""The results of a search as charts, and as a leaderboard of TensorBoard.

Charts show how trials learned, and which values were good ones: HTML and SVG without any library,
PNG and what else matplotlib knows, with it.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from bigdl.common.drawing import AxisScale, Chart
from bigdl.common.errors import MissingExtraError
from bigdl.orca.automl.records import TrialRecords

logger = logging.getLogger("bigdl.orca")

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _MARGIN = 860, 460, 90, 40, 50
_BEST, _OTHER = "#ff725c", "#9aa5b8"
_MOST_TICKS = 6


def draw_history(records: TrialRecords, path: Path) -> None:
    """Draw the first metric of each trial after each epoch; the best trial stands out.

    Parameters
    ----------
    records : TrialRecords
        Of a search with a finished trial.
    path : Path
        Its suffix says in which form.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    ranked = records.ranked()
    lines = [sorted(t.intermediate_values.items()) for t in ranked]
    for trial, line in zip(ranked, lines, strict=True):
        if not line:  # of a search by several metrics
            line.append((trial.user_attrs["result"]["epochs"], records.figures(trial)[0]))
    epochs = sorted({epoch for line in lines for epoch, _ in line})
    across = AxisScale(epochs, _LEFT, _WIDTH - _RIGHT)
    up = AxisScale([figure for line in lines for _, figure in line], _HEIGHT - _MARGIN, _MARGIN)
    chart = Chart(_WIDTH, _HEIGHT)
    _draw_axis(chart, _LEFT, records.goal.first.name, [(f"{v:.3g}", up(v)) for v in up.ticks()])
    for epoch in epochs[:: max(1, len(epochs) // _MOST_TICKS)]:
        chart.text(f"{epoch:g}", across(epoch), _HEIGHT - _MARGIN + 20, "middle")
    chart.text("epoch", _WIDTH - _RIGHT, _HEIGHT - 10, "end")
    titles = [f"trial {trial.number}: {records.json_config(trial)}" for trial in ranked]
    places = [[(across(epoch), up(figure)) for epoch, figure in line] for line in lines]
    _write(records, path, "Trials by their epochs", chart, places, titles)


def draw_parallel_coordinates(records: TrialRecords, path: Path) -> None:
    """Draw each finished trial as a line through its values and its figure.

    Parameters
    ----------
    records : TrialRecords
        Of a search with a finished trial.
    path : Path
        Its suffix says in which form.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    ranked = records.ranked()
    configs = [records.json_config(trial) for trial in ranked]
    paths = [path for path in configs[0] if all(path in config for config in configs)]
    axes = {path: [config[path] for config in configs] for path in paths}
    for number, metric in enumerate(records.goal.metrics):
        axes[metric.name] = [records.figures(trial)[number] for trial in ranked]
    chart = Chart(_WIDTH, _HEIGHT)
    step = (_WIDTH - 2 * _LEFT) / max(1, len(axes) - 1)
    points: list[list[tuple[float, float]]] = [[] for _ in ranked]
    for number, (name, values) in enumerate(axes.items()):
        x = _LEFT + step * number
        heights, marks = _axis(values)
        _draw_axis(chart, x, name, marks)
        for line, height in zip(points, heights, strict=True):
            line.append((x, height))
    titles = [f"trial {trial.number}" for trial in ranked]
    _write(records, path, "Trials by their values", chart, points, titles)


def _axis(values: list[Any]) -> tuple[list[float], list[tuple[str, float]]]:
    """Return the places of values on an axis, and texts with theirs.

    Names have places in the order of their first use.
    """
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        scale = AxisScale(values, _HEIGHT - _MARGIN, _MARGIN)
        return list(map(scale, values)), [(f"{tick:.3g}", scale(tick)) for tick in scale.ticks()]
    names = list(map(str, values))
    numbers = {name: float(number) for number, name in enumerate(dict.fromkeys(names))}
    scale = AxisScale(numbers.values(), _HEIGHT - _MARGIN, _MARGIN)
    return [scale(numbers[n]) for n in names], [(n, scale(i)) for n, i in numbers.items()]


def _draw_axis(chart: Chart, x: float, name: str, marks: list[tuple[str, float]]) -> None:
    chart.line([(x, _MARGIN), (x, _HEIGHT - _MARGIN)])
    chart.text(name, x, _MARGIN - 20, "middle")
    for label, y in marks:
        chart.text(label, x - 6, y + 4, "end")


def _write(
    records: TrialRecords,
    path: Path,
    title: str,
    chart: Chart,
    lines: list[list[tuple[float, float]]],
    titles: list[str],
) -> None:
    """Add the lines of trials, of which the first is the best one, and write the chart."""
    best, *others = zip(lines, titles, strict=True)
    for line, name in reversed(others):
        chart.line(line, _OTHER, dots=2.5, title=name)
    chart.line(best[0], _BEST, 2.5, dots=2.5, title=best[1])
    chart.write(path, title, records.table().to_string())


# TensorBoard -------------------------------------------------------------------------------------


def write_leaderboard(records: TrialRecords, folder: Path) -> None:
    """Write event files of all finished trials, in place of those of an earlier search.

    Parameters
    ----------
    records : TrialRecords
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
        from bigdl.orca.learn.pytorch.callbacks.tensorboard import writer_class

        writer = writer_class()  # says which package is missing
        from torch.utils.tensorboard.summary import hparams

        return writer, hparams
    return SummaryWriter, hparams


def _shown(value):
    return value if isinstance(value, bool | int | float | str) else str(value)
