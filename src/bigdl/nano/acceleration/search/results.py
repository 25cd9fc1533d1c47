"""Methods that a search tries, its progress, and its results as a table and as a chart."""

from __future__ import annotations

import html
import json
import math
import os
import shutil
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.drawing import Scale, svg, text, write_drawing
from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.accuracy import AccuracyGoal
from bigdl.nano.acceleration.keywords import check_threads
from bigdl.nano.acceleration.method import ORIGINAL, Method
from bigdl.nano.acceleration.search.trial import OBJECTIVES, Plan, Point, Trial

__all__ = [
    "ACCELERATORS",
    "ORIGINAL",
    "PRECISIONS",
    "Results",
    "SearchOptions",
    "check_member",
    "choose",
    "fits",
    "render",
    "show_progress",
    "write_chart",
]


ACCELERATORS = (None, "onnxruntime", "openvino", "jit")
PRECISIONS = (None, "int8", "bf16", "fp16", "fp32")
_WRONG = {
    "accelerator": "Only support accelerator None, 'onnxruntime', 'openvino' and 'jit'.",
    "precision": "Only support precision 'int8', 'bf16', 'fp16' and 'fp32'.",
}


@dataclass(frozen=True)
class SearchOptions:
    """Arguments of ``optimize`` that do not depend on the framework; they mean what they do there.

    Raises
    ------
    UsageError
        If one makes no sense.
    """

    direction: str = "max"
    thread_num: int | None = None
    accelerator: tuple | None = None
    precision: tuple | None = None
    use_ipex: bool | None = None
    search_mode: str = "default"
    logging: bool = False
    latency_sample_num: int = 100
    includes: Collection[str] | None = None
    excludes: Collection[str] | None = None
    output_filename: str | None = None
    objective: str = "latency"
    batch_sizes: Sequence[int] | None = None
    thread_counts: Sequence[int] | None = None
    time_limit: float | None = None
    memory_limit: int | None = None
    cache: bool = False
    cache_dir: str | os.PathLike | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options among the arguments of a framework's ``optimize``."""
        names = {each.name for each in fields(cls)}.intersection(arguments)
        return cls(**{name: arguments[name] for name in names})

    def __post_init__(self) -> None:
        if self.direction not in ("min", "max"):
            raise UsageError(f"Only support direction 'min', 'max'. {self.direction!r} was given.")
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("search_mode", self.search_mode, ("default", "all", "grid", "extended"))
        _check_tuple("accelerator", self.accelerator, ACCELERATORS, "accelerator must be a tuple.")
        # The spelling of this text is the old interface's.
        _check_tuple("precision", self.precision, PRECISIONS, "precison must be a tuple.")
        check_positive("latency_sample_num", self.latency_sample_num)
        check_threads(self.thread_num)
        for name in ("includes", "excludes"):
            if isinstance(getattr(self, name), str):
                raise UsageError(
                    f"{name} must be a list of names of methods, not the string "
                    f"{getattr(self, name)!r}"
                )
        for name in ("batch_sizes", "thread_counts"):
            values = getattr(self, name)
            if values is not None and not (isinstance(values, (list, tuple, range)) and values):
                raise UsageError(f"{name} should be a list of positive integers, got {values!r}")
            for value in values or ():
                check_positive(name, value)

    @property
    def plan(self) -> Plan:
        """The measurements to make."""
        return Plan(
            self.latency_sample_num,
            self.objective,
            tuple(self.thread_counts or [self.thread_num]),
            tuple(self.batch_sizes or [None]),
        )


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


def check_member(name: str, value: Any, allowed: tuple) -> None:
    """Refuse an accelerator or a precision that does not exist."""
    if value not in allowed:
        raise UsageError(f"{_WRONG[name]} {value!r} was given.")


def _check_tuple(name: str, values: Any, allowed: tuple, wrong_form: str) -> None:
    if values is None:
        return
    if not isinstance(values, tuple):
        raise UsageError(f"{wrong_form} Write {name}=({values!r},) instead of {values!r}.")
    for value in values:
        check_member(name, value, allowed)


_FILE = "results.json"
_FORMAT = 1


class Results(Mapping[str, Trial]):
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
        self._trials = {trial.method: trial for trial in trials}
        self.directory = directory
        self.direction = direction
        self.objective = objective
        self._removal = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    def __getitem__(self, name: str) -> Trial:
        return self._trials[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trials)

    def __len__(self) -> int:
        return len(self._trials)

    def add(self, trials: list[Trial]) -> None:
        """Append trials."""
        self._trials.update((trial.method, trial) for trial in trials)

    @property
    def original(self) -> Trial:
        """The trial that all others are compared with."""
        return self._trials[ORIGINAL]

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
        content: dict[str, Any] = {
            "format": _FORMAT,
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
            if content["format"] != _FORMAT:
                return None
            trials = [
                Trial(**{**each, "points": [Point(**point) for point in each["points"]]})
                for each in content["trials"]
            ]
            results = cls(trials, directory, content["direction"], content["objective"])
            results._removal.detach()
            return results
        except (OSError, ValueError, KeyError, TypeError):
            return None


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
    scatter = scored and all(math.isfinite(trial.accuracy or 0.0) for trial in trials)
    marks = _scatter(trials, precisions) if scatter else _bars(trials, precisions)
    return svg(_WIDTH, _HEIGHT if scatter else 2 * _MARGIN + _BAR * len(trials), marks)


def _scatter(trials, precisions) -> list[str]:
    across = Scale(
        [trial.latency for trial in trials], _MARGIN_LEFT, _WIDTH - _MARGIN_RIGHT, log=True
    )
    up = Scale([trial.accuracy for trial in trials], _HEIGHT - _MARGIN, _MARGIN)
    marks = [*_columns(across, _MARGIN, _HEIGHT - _MARGIN), *_rows(up)]
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
    marks = _columns(across, _MARGIN, bottom)
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


def _columns(scale: Scale, top: float, bottom: float) -> list[str]:
    """Return vertical lines at the ticks of a scale, with their values below."""
    marks = []
    for value in scale.ticks():
        x = scale(value)
        marks.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="#ddd"/>')
        marks.append(text(f"{value:.3g}", x, bottom + 16, "middle"))
    return marks


def _rows(scale: Scale) -> list[str]:
    """Return horizontal lines at the ticks of a scale, with their values beside."""
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


def show_progress(bar: Any, event: str | Trial) -> None:
    """Show on a bar of tqdm what :func:`isolation.search` says."""
    if isinstance(event, str):
        bar.set_description(event)
        return
    bar.set_postfix_str(event.status)
    bar.update()
