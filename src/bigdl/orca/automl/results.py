"""Charts of a search's results and a TensorBoard leaderboard.

Charts show how the metrics changed per epoch and which parameter values performed well.  HTML and
SVG need no library; PNG and other formats need matplotlib.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from bigdl.common.drawing import AxisScale, Chart
from bigdl.common.errors import MissingExtraError
from bigdl.common.pages import Page
from bigdl.orca.automl.records import TrialRecords

logger = logging.getLogger("bigdl.orca")

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _MARGIN = 860, 460, 90, 40, 50
_BEST, _OTHER = "#ff725c", "#9aa5b8"
_MOST_TICKS = 6


def draw_history(records: TrialRecords, path: Path) -> None:
    """Draw each trial's first metric per epoch, with the best trial highlighted.

    Parameters
    ----------
    records : TrialRecords
        Records of a search with at least one finished trial.
    path : Path
        Output file; the suffix determines the format.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    _history_chart(records).write(path, "Metric per epoch", records.table().to_string())


def report_page(records: TrialRecords) -> Page:
    """Return a page with the best trial, charts, the duration of each trial and all trials.

    Parameters
    ----------
    records : TrialRecords
    """
    table, names = records.table(), records.goal.names
    page = Page("Hyperparameter search")
    counts = table["status"].value_counts()
    page.add_text(" · ".join(f"{count} trials {status}" for status, count in counts.items()))
    if ranked := records.ranked():
        best = ranked[0]
        values = zip(names, records.best_metrics(best), strict=True)
        page.add_heading(f"Best: trial {best.number}")
        page.add_table((), [*values, *records.json_config(best).items()])
        page.add_heading("Metric per epoch")
        page.add_html(_history_chart(records).svg())
        page.add_heading("Parameter values and metrics")
        page.add_html(_parameters_chart(records).svg())
    seconds = table["seconds"].fillna(0.0)
    if seconds.sum():
        page.add_heading("Time of the trials")
        page.add_bars({"": {f"trial {number}": float(s) for number, s in seconds.items()}})
    page.add_heading("Trials")
    shown = table.reset_index().astype(object).where(table.reset_index().notna(), "")
    page.add_table([str(name) for name in shown.columns], shown.itertuples(index=False))
    return page


def _history_chart(records: TrialRecords) -> Chart:
    ranked = records.ranked()
    lines = [sorted(t.intermediate_values.items()) for t in ranked]
    for trial, line in zip(ranked, lines, strict=True):
        if not line:  # a search with several metrics reports no epochs
            line.append((trial.user_attrs["result"]["epochs"], records.best_metrics(trial)[0]))
    epochs = sorted({epoch for line in lines for epoch, _ in line})
    across = AxisScale(epochs, _LEFT, _WIDTH - _RIGHT)
    up = AxisScale([value for line in lines for _, value in line], _HEIGHT - _MARGIN, _MARGIN)
    chart = Chart(_WIDTH, _HEIGHT)
    _draw_axis(chart, _LEFT, records.goal.first.name, [(f"{v:.3g}", up(v)) for v in up.ticks()])
    for epoch in epochs[:: max(1, len(epochs) // _MOST_TICKS)]:
        chart.text(f"{epoch:g}", across(epoch), _HEIGHT - _MARGIN + 20, "middle")
    chart.text("epoch", _WIDTH - _RIGHT, _HEIGHT - 10, "end")
    titles = [f"trial {trial.number}: {records.json_config(trial)}" for trial in ranked]
    points = [[(across(epoch), up(value)) for epoch, value in line] for line in lines]
    _add_lines(chart, points, titles)
    return chart


def draw_parallel_coordinates(records: TrialRecords, path: Path) -> None:
    """Draw each finished trial as a line through its parameter values and metrics.

    Parameters
    ----------
    records : TrialRecords
        Records of a search with at least one finished trial.
    path : Path
        Output file; the suffix determines the format.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    chart = _parameters_chart(records)
    chart.write(path, "Parameter values and metrics of trials", records.table().to_string())


def _parameters_chart(records: TrialRecords) -> Chart:
    ranked = records.ranked()
    configs = [records.json_config(trial) for trial in ranked]
    paths = [path for path in configs[0] if all(path in config for config in configs)]
    axes = {path: [config[path] for config in configs] for path in paths}
    for index, metric in enumerate(records.goal.metrics):
        axes[metric.name] = [records.best_metrics(trial)[index] for trial in ranked]
    chart = Chart(_WIDTH, _HEIGHT)
    step = (_WIDTH - 2 * _LEFT) / max(1, len(axes) - 1)
    points: list[list[tuple[float, float]]] = [[] for _ in ranked]
    for index, (name, values) in enumerate(axes.items()):
        x = _LEFT + step * index
        heights, tick_labels = _axis(values)
        _draw_axis(chart, x, name, tick_labels)
        for line, height in zip(points, heights, strict=True):
            line.append((x, height))
    titles = [f"trial {trial.number}" for trial in ranked]
    _add_lines(chart, points, titles)
    return chart


def _axis(values: list[Any]) -> tuple[list[float], list[tuple[str, float]]]:
    """Return the coordinates of values on an axis, and its tick labels with coordinates.

    Values that are not numbers are placed in order of first occurrence.
    """
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        scale = AxisScale(values, _HEIGHT - _MARGIN, _MARGIN)
        return list(map(scale, values)), [(f"{tick:.3g}", scale(tick)) for tick in scale.ticks()]
    names = list(map(str, values))
    numbers = {name: float(number) for number, name in enumerate(dict.fromkeys(names))}
    scale = AxisScale(numbers.values(), _HEIGHT - _MARGIN, _MARGIN)
    return [scale(numbers[n]) for n in names], [(n, scale(i)) for n, i in numbers.items()]


def _draw_axis(chart: Chart, x: float, name: str, tick_labels: list[tuple[str, float]]) -> None:
    chart.line([(x, _MARGIN), (x, _HEIGHT - _MARGIN)])
    chart.text(name, x, _MARGIN - 20, "middle")
    for label, y in tick_labels:
        chart.text(label, x - 6, y + 4, "end")


def _add_lines(chart: Chart, lines: list[list[tuple[float, float]]], titles: list[str]) -> None:
    """Add one line per trial, with the best trial first."""
    best, *others = zip(lines, titles, strict=True)
    for line, name in reversed(others):
        chart.line(line, _OTHER, dots=2.5, title=name)
    chart.line(best[0], _BEST, 2.5, dots=2.5, title=best[1])


# TensorBoard -------------------------------------------------------------------------------------


def write_leaderboard(records: TrialRecords, folder: Path) -> None:
    """Write TensorBoard event files of all finished trials, and remove those of older searches.

    Parameters
    ----------
    records : TrialRecords
    folder : Path
        Output folder, with one subfolder per trial.

    Notes
    -----
    TensorBoard shows the trials as a table on its HPARAMS page.  If TensorBoard is not installed,
    nothing is written and a warning is logged.
    """
    try:
        writer_type, hparams = _tensorboard()
    except MissingExtraError as error:
        logger.warning("Cannot write a leaderboard to %s: %s", folder, error)
        return
    for old in folder.glob("trial_*"):
        shutil.rmtree(old, ignore_errors=True)
    names = records.goal.names
    for trial in records.finished():
        best = {f"best/{n}": v for n, v in zip(names, records.best_metrics(trial), strict=True)}
        values = {key: _as_hparam(value) for key, value in records.json_config(trial).items()}
        with writer_type(log_dir=str(folder / f"trial_{trial.number:05}")) as writer:
            for epoch, value in sorted(trial.intermediate_values.items()):
                writer.add_scalar(names[0], value, epoch)
            for tag, value in best.items():
                writer.add_scalar(tag, value)
            for summary in hparams(values, best):
                writer.file_writer.add_summary(summary)


def _tensorboard():
    """Return the event file writer class and the ``hparams`` function of an installed package."""
    try:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams
    except ImportError:
        from bigdl.orca.learn.pytorch.callbacks.tensorboard import writer_class

        writer = writer_class()  # raises MissingExtraError if the package is missing
        from torch.utils.tensorboard.summary import hparams

        return writer, hparams
    return SummaryWriter, hparams


def _as_hparam(value):
    return value if isinstance(value, bool | int | float | str) else str(value)
