"""Methods that a search tries, and its results as a table and as a chart."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
import weakref
from collections import UserDict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigdl.common.checks import check_number
from bigdl.common.drawing import Chart, Scale, write_drawing
from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.accuracy import AccuracyGoal
from bigdl.nano.acceleration.method import ORIGINAL, Method
from bigdl.nano.acceleration.search.trial import Point, SearchOptions, Trial


def choose(
    known: Mapping[str, Method], everything: Collection[str], options: SearchOptions
) -> list[str]:
    """Return the names of the methods to try, the original first.

    ``search_mode="default"`` means the methods among `everything` that are tried unasked,
    ``"extended"`` all that are known, ``"grid"`` `everything`, or what is left of it by
    ``accelerator``, ``precision`` and ``use_ipex``; it is implied where one of these is given and
    the mode is not ``"extended"``. ``includes`` are tried whatever the mode.

    Parameters
    ----------
    known : mapping of str to Method
        All methods of the framework.
    everything : collection of str
        Names that ``search_mode="all"`` means.
    options : SearchOptions

    Raises
    ------
    UsageError
        If a method to include is unknown.
    """
    filters = (options.accelerator, options.precision, options.use_ipex)
    mode = options.search_mode
    if options.includes is not None:
        for name in options.includes:
            if name not in known:
                raise UsageError(
                    f"There is no method {name!r} to include; choose from {', '.join(known)}"
                )
        names = [name for name in known if name in options.includes]
    else:
        unasked = mode == "default" and filters == (None, None, None)
        names = [
            name
            for name, method in known.items()
            if (mode == "extended" or name in everything)
            and (method.default or not unasked)
            and fits(method, *filters)
        ]
    excluded = options.excludes or ()
    for name in excluded:
        if name not in known:
            warnings.warn(f"There is no method {name!r} to exclude", stacklevel=4)
    return [ORIGINAL, *(n for n in names if n != ORIGINAL and n not in excluded)]


def fits(
    method: Method,
    accelerators: tuple | None = None,
    precisions: tuple | None = None,
    use_ipex: bool | None = None,
) -> bool:
    """Return True if a method is one of these runtimes and precisions; None restricts nothing."""
    return (
        (accelerators is None or method.accelerator in accelerators)
        and (precisions is None or method.precision in precisions)
        and (use_ipex is None or method.ipex == bool(use_ipex))
    )


_FILE = "results.json"


class Results(UserDict[str, Trial]):
    """Trials of a search by the names of their methods, and the directory of its models.

    The directory is removed when this object goes, or the interpreter ends, unless :meth:`keep` is
    called.

    Parameters
    ----------
    trials : list of Trial
        The original first.
    directory : Path
        Holds a directory ``<name>`` for each model that was saved.
    direction : {"max", "min"}
        Which accuracy is better.
    objective : str
        Figure by which the best model is chosen: ``"latency"``, ``"throughput"`` or ``"memory"``.
    """

    def __init__(self, trials: list[Trial], directory: Path, direction: str, objective: str):
        super().__init__({trial.method: trial for trial in trials})
        self.directory = directory
        self.direction = direction
        self.objective = objective
        self._removal = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    @property
    def original(self) -> Trial:
        """The trial that all others are compared with."""
        return self[ORIGINAL]

    @property
    def scored(self) -> bool:
        """True if there was a metric."""
        return self.original.accuracy is not None

    def check_criterion(self, criterion: float | None) -> None:
        """Refuse a criterion that is no fraction, or that stands without a metric."""
        if criterion is None:
            return
        if not self.scored:
            raise UsageError(
                "If you want to specify accuracy_criterion, you need to set metric and "
                "validation_data when call 'optimize'."
            )
        check_number("accuracy_criterion", criterion, 0)

    def keeps_accuracy(self, name: str, criterion: float | None) -> bool:
        """Return True if a model's accuracy is within a relative drop from the original's.

        The drop is relative to the original's absolute value; where that is 0, nothing worse than
        it is accepted. A score that is no number is never accepted.
        """
        score = self[name].accuracy
        if criterion is None or name == ORIGINAL:
            return True
        if score is None or self.original.accuracy is None:
            return False
        goal = AccuracyGoal(lambda model: 0.0, self.direction == "max", criterion)
        return goal.met(self.original.accuracy, score)

    def best(self, names: list[str]) -> str | None:
        """Return the best of these methods by the objective; None if none was measured."""
        merits = {name: merit for name in names if (merit := self.merit(self[name])) is not None}
        return max(merits, key=merits.__getitem__, default=None)

    def merit(self, trial: Trial) -> float | None:
        """Return the figure by which trials are compared, the higher the better."""
        if not trial.usable:
            return None
        if self.objective == "memory":
            return None if trial.memory is None else -trial.memory
        return trial.throughput if self.objective == "throughput" else trial.speedup

    def to_pandas(self) -> Any:
        """Return one row for each method.

        Returns
        -------
        pandas.DataFrame
            With the attributes of :class:`Trial` but the points; the index is the method.
        """
        pandas = require("pandas", "nano")
        rows = [asdict(trial) for trial in self.values()]
        return pandas.DataFrame(rows).drop(columns=["points", "stage"]).set_index("method")

    def keep(self, directory: Path) -> None:
        """Write the trials beside the models, and move all to a directory in which they stay."""
        content = {
            "direction": self.direction,
            "objective": self.objective,
            "trials": [asdict(trial) for trial in self.values()],
        }
        (self.directory / _FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(self.directory, directory)
        self._removal.detach()
        self.directory = directory

    @classmethod
    def read(cls, directory: Path) -> Results | None:
        """Return what :meth:`keep` wrote; None if there is nothing that can be read."""
        try:
            content = json.loads((directory / _FILE).read_text(encoding="utf-8"))
            trials = [
                Trial(**{**each, "points": [Point(**point) for point in each["points"]]})
                for each in content["trials"]
            ]
            results = cls(trials, directory, content["direction"], content["objective"])
            results._removal.detach()
            return results
        except (OSError, ValueError, KeyError, TypeError):
            return None


_COLUMNS = {  # title: width, attribute of a trial, its form
    "method": (32, "method", "{}"),
    "status": (20, "status", "{}"),
    "latency(ms)": (14, "latency", "{:.5g}"),
    "speedup": (10, "speedup", "{:.2f}x"),
    "metric value": (20, "accuracy", "{:.5g}"),
}
_OF_OBJECTIVES = {
    "latency": {},
    "throughput": {"samples/s": (14, "throughput", "{:.5g}")},
    "memory": {"memory(MB)": (14, "memory", "{:.5g}")},
}


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
    columns = _COLUMNS | _OF_OBJECTIVES[results.objective]
    widths = [width for width, _, _ in columns.values()]
    widths[0] = max(widths[0], *(len(name) + 2 for name in results))
    rows = [list(columns)]
    for trial in results.values():
        values = [(getattr(trial, name), form) for _, name, form in columns.values()]
        rows.append(["None" if value is None else form.format(value) for value, form in values])
    rule = " " + " ".join("-" * width for width in widths) + " "
    title, *lines = [
        "|" + "|".join(f"{cell:^{width}}" for cell, width in zip(row, widths, strict=True)) + "|"
        for row in rows
    ]
    notes = [f"{trial.method}: {trial.reason}" for trial in results.values() if trial.reason]
    return "\n".join([rule, title, rule, *lines, rule, *notes]) + "\n"


_WIDTH, _HEIGHT, _MARGIN = 860, 460, 50
_ROW = 26  # of a chart without a metric
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
    scored = results.scored and all(math.isfinite(trial.accuracy or 0.0) for trial in trials)
    chart = (_by_accuracy if scored else _in_rows)(trials, precisions)
    write_drawing(
        path,
        "Methods by latency and accuracy",
        as_svg=chart.svg,
        as_text=lambda: render(results),
        on_figure=chart.draw,
    )


def _by_accuracy(trials, precisions: Mapping[str, str]) -> Chart:
    left, right, bottom = 90, _WIDTH - 200, _HEIGHT - _MARGIN
    across = Scale([trial.latency for trial in trials], left, right, log=True)
    up = Scale([trial.accuracy for trial in trials], bottom, _MARGIN)
    chart = _with_latencies(across, left, right, bottom)
    chart.text("accuracy", left, _MARGIN - 20, "end")
    for value in up.ticks():
        chart.line([(left, up(value)), (right, up(value))], "#ddd")
        chart.text(f"{value:.4g}", left - 6, up(value) + 4, "end")
    for trial in trials:
        x, y = across(trial.latency), up(trial.accuracy)
        title = f"{_title(trial)}, accuracy {trial.accuracy:.5g}"
        chart.line([(x, y)], _COLOURS[precisions[trial.method]], dots=5, title=title)
        chart.text(trial.method, x + 8, y + 4)
    return chart


def _in_rows(trials, precisions: Mapping[str, str]) -> Chart:
    left, right, bottom = 250, _WIDTH - 80, _MARGIN + _ROW * len(trials)
    across = Scale([0.0, *(trial.latency for trial in trials)], left, right)
    chart = _with_latencies(across, left, right, bottom)
    for number, trial in enumerate(trials):
        x, y = across(trial.latency), _MARGIN + _ROW * (number + 0.5)
        colour = _COLOURS[precisions[trial.method]]
        chart.line([(left, y), (x, y)], colour, 9, title=_title(trial))
        chart.text(trial.method, left - 6, y + 4, "end")
        chart.text(f"{trial.latency:.3g}", x + 6, y + 4)
    return chart


def _with_latencies(across: Scale, left: float, right: float, bottom: float) -> Chart:
    """Return a chart with latencies along its lower side."""
    chart = Chart(_WIDTH, bottom + _MARGIN)
    for value in across.ticks():
        chart.line([(across(value), _MARGIN), (across(value), bottom)], "#ddd")
        chart.text(f"{value:.3g}", across(value), bottom + 16, "middle")
    chart.text("latency (ms)", (left + right) / 2, bottom + 36, "middle")
    return chart


def _title(trial: Trial) -> str:
    return f"{trial.method}: {trial.latency:.4g} ms ({trial.speedup:.2f}x)"
