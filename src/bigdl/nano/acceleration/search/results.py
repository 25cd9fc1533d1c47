"""Selection of the methods of a search, and its results: table, chart and cache.

Without a cache directory, the last few results are kept while the process lives, so that a notebook
cell can be run again. With a cache directory they are permanent, each in a subdirectory named by
its key.

The key is a digest of everything that affects the results: model, data and options. It is valid
across processes. :mod:`pickle` writes the objects into a hash; classes and functions are replaced
by a digest of their code, and tensors by a digest of their bytes. If a digest differs without a
reason, the search runs again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pickle
import shutil
import sys
import sysconfig
import tempfile
import warnings
import weakref
from collections import UserDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING

from bigdl.common.checks import check_number
from bigdl.common.drawing import GRID, AxisScale, Chart
from bigdl.common.errors import UsageError, as_usage_error, require, user_stacklevel
from bigdl.common.pages import Page
from bigdl.nano.acceleration.accuracy import AccuracyGoal
from bigdl.nano.acceleration.median_interval import MedianInterval
from bigdl.nano.acceleration.method import ORIGINAL, Method
from bigdl.nano.acceleration.precision import Precision
from bigdl.nano.acceleration.search.trial import LatencyMeasurement, SearchOptions, Trial

if TYPE_CHECKING:
    import pandas as pd


def choose(
    known: Mapping[str, Method], everything: Collection[str], options: SearchOptions
) -> list[str]:
    """Return the names of the methods to try, starting with the original.

    ``search_mode="default"`` selects the default methods among `everything`, ``"all"`` selects
    `everything` and ``"extended"`` all `known` methods. ``accelerator``, ``precision`` and
    ``use_ipex`` filter the methods; with one of them, ``"default"`` acts as ``"all"``. A precision
    that `everything` lacks adds its methods. ``includes`` replaces the selection in every mode.

    Parameters
    ----------
    known : mapping of str to Method
        All methods of the framework.
    everything : collection of str
        Names that ``search_mode="all"`` selects.
    options : SearchOptions

    Raises
    ------
    UsageError
        If a name in ``includes`` is unknown.
    """
    filters = (options.accelerator, options.precision, options.use_ipex)
    mode = options.search_mode
    usual = {known[name].precision for name in everything}
    rare = [each for each in options.precision or () if each not in usual]
    if options.includes is not None:
        for name in options.includes:
            if name not in known:
                raise UsageError(
                    f"There is no method {name!r} to include; choose from {', '.join(known)}",
                    code="name-unknown",
                    method=name,
                    allowed=list(known),
                )
        names = [name for name in known if name in options.includes]
    else:
        defaults_only = mode == "default" and filters == (None, None, None)
        names = [
            name
            for name, method in known.items()
            if (mode == "extended" or name in everything or method.precision in rare)
            and (method.default or not defaults_only)
            and fits(method, *filters)
        ]
    excluded = options.excludes or ()
    for name in excluded:
        if name not in known:
            warnings.warn(f"There is no method {name!r} to exclude", stacklevel=user_stacklevel())
    return [ORIGINAL, *(n for n in names if n != ORIGINAL and n not in excluded)]


def fits(
    method: Method,
    accelerators: tuple | None = None,
    precisions: tuple | None = None,
    use_ipex: bool | None = None,
) -> bool:
    """Return True if a method matches the accelerators and precisions; None matches all."""
    return (
        (accelerators is None or method.accelerator in accelerators)
        and (precisions is None or method.precision in precisions)
        and (use_ipex is None or method.ipex == bool(use_ipex))
    )


_FILE = "results.json"


class Results(UserDict[str, Trial]):
    """Trials of a search by method name, with the directory of the saved models.

    The directory is removed when this object is deleted or the interpreter exits, unless
    :meth:`keep` is called.

    Parameters
    ----------
    trials : list of Trial
        All trials, the original first.
    directory : Path
        Directory with a subdirectory ``<name>`` for each saved model.
    direction : {"max", "min"}
        Whether a larger or smaller accuracy is better.
    objective : str
        Metric that ranks the models: ``"latency"``, ``"throughput"`` or ``"memory"``.
    """

    def __init__(self, trials: list[Trial], directory: Path, direction: str, objective: str):
        super().__init__({trial.method: trial for trial in trials})
        self.directory = directory
        self.direction = direction
        self.objective = objective
        self._removal = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    @property
    def is_temporary(self) -> bool:
        """True if the models' directory is temporary and deleted with this object."""
        return self._removal.alive

    @property
    def original(self) -> Trial:
        """Trial of the original model, the baseline of all others."""
        return self[ORIGINAL]

    @property
    def scored(self) -> bool:
        """True if the models were scored with a metric."""
        return self.original.accuracy is not None

    def check_criterion(self, criterion: float | None) -> None:
        """Raise UsageError if a criterion is not a valid number or the models have no scores."""
        if criterion is None:
            return
        if not self.scored:
            raise UsageError(
                "If you want to specify accuracy_criterion, you need to set metric and "
                "validation_data when call 'optimize'.",
                code="argument-missing",
                argument="metric",
            )
        check_number("accuracy_criterion", criterion, 0)

    def keeps_accuracy(self, name: str, criterion: float | None) -> bool:
        """Return True if a model's accuracy drops by at most the fraction `criterion`.

        The drop is relative to the original's absolute value; if that is 0, no drop is accepted.
        NaN is never accepted.
        """
        score = self[name].accuracy
        if criterion is None or name == ORIGINAL:
            return True
        if score is None or self.original.accuracy is None:
            return False
        goal = AccuracyGoal(lambda model: 0.0, self.direction == "max", criterion)
        return goal.met(self.original.accuracy, score)

    def best(self, names: list[str]) -> str | None:
        """Return the best usable method by the objective, or None if no method was measured.

        The original wins if it is within noise of the fastest.
        """
        best, equal = self.ranking(names)
        return ORIGINAL if ORIGINAL in equal else best

    def ranking(self, names: Collection[str]) -> tuple[str | None, list[str]]:
        """Return the method with the best median, and those that differ from it only by noise.

        Memory has no noise: it is measured once in a fresh process.
        """
        measured = {name: self._objective_of(self[name]) for name in names if self[name].usable}
        spreads = {name: spread for name, spread in measured.items() if spread is not None}
        if not spreads:
            return None, []
        best = max(spreads, key=lambda name: spreads[name].middle)
        others = [name for name in spreads if name != best]
        return best, [name for name in others if not spreads[best].exceeds(spreads[name])]

    def _objective_of(self, trial: Trial) -> MedianInterval | None:
        """Return a trial's objective value (larger is better), or None if it was not measured."""
        if self.objective == "memory":
            return None if trial.memory is None else MedianInterval.of([-trial.memory])
        if self.objective == "throughput" and trial.points and self.original.points:
            return trial.relative_throughput(self.original)
        if trial.speedup is None:
            return None
        bounds = (trial.speedup_low, trial.speedup_high)
        low, high = (trial.speedup if bound is None else bound for bound in bounds)
        return MedianInterval(trial.speedup, low, high)

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per method.

        Returns
        -------
        pandas.DataFrame
            Attributes of :class:`Trial` except ``points`` and ``stage``, indexed by method.
        """
        pandas = require("pandas", "nano")
        rows = [asdict(trial) for trial in self.values()]
        return pandas.DataFrame(rows).drop(columns=["points", "stage"]).set_index("method")

    def keep(self, directory: Path) -> None:
        """Write the trials to the models' directory and move this directory to a permanent path."""
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
        """Read the Results that :meth:`keep` wrote, or return None if they are unreadable."""
        try:
            content = json.loads((directory / _FILE).read_text(encoding="utf-8"))
            trials = [
                Trial(
                    **{
                        **each,
                        "points": [LatencyMeasurement.read(point) for point in each["points"]],
                    }
                )
                for each in content["trials"]
            ]
            results = cls(trials, directory, content["direction"], content["objective"])
            results._removal.detach()
            return results
        except (OSError, ValueError, KeyError, TypeError):
            return None


_COLUMNS: dict[str, tuple[int, str, str]] = {  # title: width, attribute of a trial, format
    "method": (32, "method", "{}"),
    "status": (20, "status", "{}"),
    "latency(ms)": (14, "latency", "{:.4g}"),
    "spread(ms)": (19, "latency_spread", "{}"),
    "speedup": (20, "speedup_spread", "{}"),
    "metric value": (20, "accuracy", "{:.5g}"),
}
_OF_OBJECTIVES: dict[str, dict[str, tuple[int, str, str]]] = {
    "latency": {},
    "throughput": {"samples/s": (14, "throughput", "{:.5g}")},
    "memory": {"memory(MB)": (14, "memory", "{:.5g}")},
}


def render(results: Results) -> str:
    """Return a table with one row per method, followed by the reasons of failures.

    Parameters
    ----------
    results : Results

    Returns
    -------
    str
        Text that ends with a line break.
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
    best, equal = results.ranking(list(results))
    if equal:
        notes.append(f"Not significantly slower than {best}: {', '.join(equal)}")
    return "\n".join([rule, title, rule, *lines, rule, *notes]) + "\n"


_WIDTH, _HEIGHT, _MARGIN = 860, 460, 50
_ROW = 26  # height of a row in a chart without a metric


def write_chart(results: Results, path: Path, precisions: Mapping[str, Precision]) -> None:
    """Draw a chart of the usable methods.

    Parameters
    ----------
    results : Results
        With a metric, latency is plotted against accuracy; without one, as bars.
    path : Path
        The suffix selects the format: ``.html`` and ``.svg`` need no library, others matplotlib.
    precisions : mapping of str to Precision
        Precision of each method, which selects the colour.

    Raises
    ------
    UsageError
        If the file cannot be written, or not in this format.
    """
    chart = _chart_of(results, precisions)
    chart.write(path, "Methods by latency and accuracy", render(results))


def _chart_of(results: Results, precisions: Mapping[str, Precision]) -> Chart:
    trials = [trial for trial in results.values() if trial.usable]
    scored = results.scored and all(math.isfinite(trial.accuracy or 0.0) for trial in trials)
    return (_by_accuracy if scored else _in_rows)(trials, precisions)


def report_page(results: Results, precisions: Mapping[str, Precision]) -> Page:
    """Return a page with the best method, a chart, durations, all methods, and their failures.

    Parameters
    ----------
    results : Results
    precisions : mapping of str to Precision
        Precision of each method, which selects the colour.
    """
    page = Page("Acceleration methods")
    best, equal = results.ranking(list(results))
    if best is not None:
        trial = results[best]
        text = f"Best by {results.objective}: {best}, {_title(trial).split(': ')[1]}"
        page.add_text(text + (f", accuracy {trial.accuracy:.5g}" if results.scored else ""))
        if equal:
            page.add_text(f"Not significantly slower: {', '.join(equal)}")
        page.add_heading("Usable methods")
        page.add_html(_chart_of(results, precisions).svg())
    page.add_heading("Time of the search, by method")
    page.add_bars({"": {trial.method: trial.seconds or 0.0 for trial in results.values()}})
    page.add_heading("All methods")
    columns = _COLUMNS | _OF_OBJECTIVES[results.objective]
    rows = []
    for trial in results.values():
        values = [(getattr(trial, name), form) for _, name, form in columns.values()]
        cells = ["" if value is None else form.format(value) for value, form in values]
        rows.append([*cells, trial.reason or ""])
    page.add_table([*columns, "reason"], rows)
    return page


def _by_accuracy(trials, precisions: Mapping[str, Precision]) -> Chart:
    left, right, bottom = 90, _WIDTH - 200, _HEIGHT - _MARGIN
    across = AxisScale(_bounds(trials), left, right, log=True)
    up = AxisScale([trial.accuracy for trial in trials], bottom, _MARGIN)
    chart = _with_latencies(across, left, right, bottom)
    chart.text("accuracy", left, _MARGIN - 20, "end")
    for value in up.ticks():
        chart.line([(left, up(value)), (right, up(value))], GRID)
        chart.text(f"{value:.4g}", left - 6, up(value) + 4, "end")
    for trial in trials:
        x, y = across(trial.latency), up(trial.accuracy)
        title = f"{_title(trial)}, accuracy {trial.accuracy:.5g}"
        chart.line([(x, y)], precisions[trial.method].colour, dots=5, title=title)
        chart.line(_ends(trial, across, y), precisions[trial.method].colour)
        chart.text(trial.method, x + 8, y + 4)
    return chart


def _in_rows(trials, precisions: Mapping[str, Precision]) -> Chart:
    left, right, bottom = 250, _WIDTH - 80, _MARGIN + _ROW * len(trials)
    across = AxisScale([0.0, *_bounds(trials)], left, right)
    chart = _with_latencies(across, left, right, bottom)
    for number, trial in enumerate(trials):
        x, y = across(trial.latency), _MARGIN + _ROW * (number + 0.5)
        colour = precisions[trial.method].colour
        chart.line([(left, y), (x, y)], colour, 9, title=_title(trial))
        chart.text(trial.method, left - 6, y + 4, "end")
        spread = _ends(trial, across, y)
        chart.line(spread, "#888")
        chart.text(f"{trial.latency:.3g}", max(x, spread[1][0]) + 6, y + 4)
    return chart


def _with_latencies(across: AxisScale, left: float, right: float, bottom: float) -> Chart:
    """Return an empty chart with a latency axis."""
    chart = Chart(_WIDTH, bottom + _MARGIN)
    for value in across.ticks():
        chart.line([(across(value), _MARGIN), (across(value), bottom)], GRID)
        chart.text(f"{value:.3g}", across(value), bottom + 16, "middle")
    chart.text("latency (ms)", (left + right) / 2, bottom + 36, "middle")
    return chart


def _bounds(trials) -> list[float]:
    """Return the low and high ends of the latency intervals of all trials."""
    return [value for trial in trials for value in _spread_of(trial)]


def _spread_of(trial) -> tuple[float, float]:
    return (
        trial.latency if trial.latency_low is None else trial.latency_low,
        trial.latency if trial.latency_high is None else trial.latency_high,
    )


def _ends(trial, across: AxisScale, y: float) -> list[tuple[float, float]]:
    """Return the chart points between which to draw a trial's latency interval."""
    return [(across(value), y) for value in _spread_of(trial)]


def _title(trial) -> str:
    return f"{trial.method}: {trial.latency:.4g} ms ({trial.speedup:.2f}x)"


# Packages whose classes and functions are digested by name; their versions are digested, too.
_LIBRARIES = {"torch", "numpy", "pandas", "pytorch_lightning", "lightning", "torchmetrics"}


def fingerprint(*objects: object) -> str | None:
    """Return a digest of objects, or None if one cannot be pickled.

    Parameters
    ----------
    *objects
        Objects of any type.

    Returns
    -------
    str or None
        Hexadecimal digest; None if an object cannot be pickled.
    """
    target = _Hash()
    try:
        _DigestPickler(target).dump(objects)
    except Exception:
        return None
    return target.digest.hexdigest()


class _Hash:
    """Writable file that keeps only the digest of its content."""

    def __init__(self):
        self.digest = hashlib.blake2b(digest_size=20)

    def write(self, data) -> int:
        self.digest.update(data)
        return len(data)


class _DigestPickler(pickle.Pickler):
    def __init__(self, file):
        super().__init__(file, protocol=5)
        self._seen: set[int] = set()

    def reducer_override(self, value):
        if isinstance(value, (type, FunctionType)):
            return self._code_of(value)
        if isinstance(value, MethodType):
            return tuple, ([value.__func__, value.__self__],)
        if isinstance(value, _CachedFunction):
            return tuple, ([value.__wrapped__],)
        if isinstance(value, ModuleType):
            return str, (value.__name__,)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return str, (_tensor_digest(value),)
        if torch is not None and isinstance(value, torch.Generator):
            return str, ("generator",)
        return NotImplemented

    def _code_of(self, value):
        name = f"{value.__module__}:{value.__qualname__}"
        if _is_library(value.__module__):
            return NotImplemented if value.__module__ == "builtins" else (str, (name,))
        if id(value) in self._seen:
            return str, (name,)
        self._seen.add(id(value))
        if isinstance(value, type):
            parts = _members_of(value)
            return tuple, ([name, value.__bases__, parts],)
        return tuple, ([name, *self._parts_of(value)],)

    def _parts_of(self, function: FunctionType) -> list:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        codes = list(_codes_in(function.__code__))
        names = {name for code in codes for name in code.co_names}
        used = _used_of(function.__globals__, names, function.__module__)
        texts = [
            (each.co_code, each.co_names, each.co_varnames, [*map(_text_of, each.co_consts)])
            for each in codes
        ]
        return [texts, function.__defaults__, function.__kwdefaults__, cells, used]


# Attributes of a class that do not affect what its code computes, or differ between processes.
_IGNORED_MEMBERS = {
    "__abstractmethods__",
    "__annotations__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__qualname__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_CachedFunction = type(functools.lru_cache(len))
_NOT_FOUND = object()


def _members_of(value: type) -> list[tuple[str, object]]:
    """Return a class's functions and values; of an installed package only constants."""
    installed = _is_installed(value.__module__)
    members: list[tuple[str, object]] = []
    for key, member in sorted(vars(value).items()):
        if key in _IGNORED_MEMBERS or isinstance(member, MemberDescriptorType):
            continue
        functions = _functions_in(member)
        if functions:
            members.append((key, functions))
        elif not installed or isinstance(member, _CONSTANTS):
            members.append((key, member))
    return members


def _used_of(known: Mapping[str, object], names: Collection[str], module: str | None) -> list:
    """Return what code of a module may use among its globals: names and values.

    Installed packages are identified by their versions, so their other modules are left out.
    """
    installed = _is_installed(module)
    used: list[tuple[str, object]] = []
    for name in sorted(set(names)):
        value = known[name] if name in known else _imported(name, module)
        if value is _NOT_FOUND:
            continue
        origin = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
        if isinstance(value, ModuleType):
            if not installed and not _is_installed(origin):
                others = set(names) - {name}  # a package has its modules as attributes
                used.append((name, _used_of(vars(value), others, origin)))
        elif (
            isinstance(value, _CONSTANTS)
            or origin == module
            or not (installed or (origin and _is_installed(origin) and _is_code(value)))
        ):
            used.append((name, value))
    return used


def _imported(name: str, module: str | None) -> object:
    """Return the module that a function of `module` may import under a name."""
    package = str(module).rpartition(".")[0]
    names = (f"{package}.{name}" if package else name, name)
    modules = (sys.modules.get(each) for each in names)
    return next((each for each in modules if isinstance(each, ModuleType)), _NOT_FOUND)


def _is_code(value: object) -> bool:
    return isinstance(value, (type, FunctionType, BuiltinFunctionType, _CachedFunction))


def _module_of(value: object) -> str | None:
    name = getattr(value, "__module__", None)
    return name if isinstance(name, str) else None


def _is_library(module: str | None) -> bool:
    """Return True for a module whose code is digested by name."""
    package = str(module).partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Return True for a module of an installed package, of BigDL or of Python itself."""
    package = str(module).partition(".")[0]
    if package == "__main__":
        return False
    if package == "bigdl" or _is_library(module):
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return Path(file).is_relative_to(sysconfig.get_path("purelib"))


def _functions_in(member: object) -> list[FunctionType]:
    """Return the functions of a method, property or other descriptor."""
    candidates: tuple[object, ...]
    if isinstance(member, property):
        candidates = (member.fget, member.fset, member.fdel)
    elif isinstance(member, functools.cached_property):
        candidates = (member.func,)
    else:  # of a staticmethod or a classmethod, or of a cached function
        member = getattr(member, "__func__", member)
        candidates = (member.__wrapped__ if isinstance(member, _CachedFunction) else member,)
    return [each for each in candidates if isinstance(each, FunctionType)]


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code object and those of its inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _text_of(constant: object) -> str:
    if isinstance(constant, CodeType):
        return "code"
    # the order of a set differs from process to process
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _tensor_digest(tensor) -> str:
    import torch

    plain = tensor.detach().cpu()
    head = f"{plain.dtype} {tuple(plain.shape)} {plain.layout} {tensor.requires_grad}"
    if plain.layout != torch.strided or plain.is_quantized:
        raise pickle.PicklingError("a tensor without plain bytes")
    content = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
    return head + hashlib.blake2b(content.data, digest_size=20).hexdigest()


_MOST = 4
_of_this_process: dict[str | None, Results] = {}


class Cache:
    """Cache of the results of earlier searches.

    Parameters
    ----------
    directory : str, path or None
        Directory of the cache; None keeps results in this process only.
    """

    def __init__(self, directory: str | os.PathLike | None):
        self._directory = None if directory is None else Path(directory)

    def find(self, key: str | None) -> Results | None:
        """Return the cached results of a search with the same key, or None."""
        if key is not None and self._directory is not None:
            return Results.read(self._directory / key)
        return _of_this_process.get(key)

    def new_directory(self) -> Path:
        """Create an empty directory for the models of a search."""
        sentence = f"No directory can be created in cache_dir {self._directory}"
        with as_usage_error(
            sentence, text=attrgetter("strerror"), code="path-unusable", path=str(self._directory)
        ):
            if self._directory is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="bigdl-nano-optimize-", dir=self._directory))

    def put(self, key: str | None, results: Results) -> None:
        """Add results to the cache."""
        if key is None:
            return
        if self._directory is not None:
            results.keep(self._directory / key)
            return
        _of_this_process[key] = results
        if len(_of_this_process) > _MOST:
            _of_this_process.pop(next(iter(_of_this_process)))
