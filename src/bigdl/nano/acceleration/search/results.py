"""Methods that a search tries, and its results."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from bigdl.common.checks import check_choice, check_number
from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.method import ORIGINAL, Method
from bigdl.nano.acceleration.options import AccuracyGoal
from bigdl.nano.acceleration.search.trial import Point, Trial

__all__ = ["ACCELERATORS", "ORIGINAL", "PRECISIONS", "Results", "check_member", "choose", "fits"]


ACCELERATORS = (None, "onnxruntime", "openvino", "jit")
PRECISIONS = (None, "int8", "bf16", "fp16", "fp32")
_WRONG = {
    "accelerator": "Only support accelerator None, 'onnxruntime', 'openvino' and 'jit'.",
    "precision": "Only support precision 'int8', 'bf16', 'fp16' and 'fp32'.",
}


def choose(
    known: Mapping[str, Method],
    everything: Collection[str],
    *,
    search_mode: str = "default",
    accelerator: tuple | None = None,
    precision: tuple | None = None,
    use_ipex: bool | None = None,
    includes: Collection[str] | None = None,
    excludes: Collection[str] | None = None,
) -> list[str]:
    """Return the names of the methods to try, the original first.

    Parameters
    ----------
    known : mapping of str to Method
        All methods of the framework.
    everything : collection of str
        Names that ``search_mode="all"`` means.
    search_mode : {"default", "all", "grid", "extended"}
        ``"default"``: the methods among `everything` that are tried unasked. ``"extended"``: all
        that are known. ``"grid"``: `everything`, or what is left of it by the next three; it is
        implied where one of these is given and the mode is not ``"extended"``.
    accelerator, precision : tuple, optional
        Keep methods of these runtimes and of these precisions.
    use_ipex : bool, optional
        Keep methods with, or without, Intel's extension.
    includes : collection of str, optional
        Try these methods and no other, whatever the mode.
    excludes : collection of str, optional
        Leave these out; the original cannot be.

    Returns
    -------
    list of str

    Raises
    ------
    UsageError
        If a value is unknown or of the wrong form.
    """
    check_choice("search_mode", search_mode, ("default", "all", "grid", "extended"))
    _check_tuple("accelerator", accelerator, ACCELERATORS, "accelerator must be a tuple.")
    # The spelling of this text is the old interface's.
    _check_tuple("precision", precision, PRECISIONS, "precison must be a tuple.")
    if includes is not None:
        names = _includes(known, includes)
    else:
        filtered = (accelerator, precision, use_ipex) != (None, None, None)
        base = list(known) if search_mode == "extended" else [n for n in known if n in everything]
        if search_mode == "default" and not filtered:
            base = [name for name in base if known[name].default]
        names = [n for n in base if fits(known[n], accelerator, precision, use_ipex)]
    left_out = _names("excludes", excludes or ())
    for name in left_out:
        if name not in known:
            warnings.warn(f"There is no method {name!r} to exclude", stacklevel=4)
    return [ORIGINAL, *(n for n in names if n != ORIGINAL and n not in left_out)]


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


def _includes(known: Mapping[str, Method], includes: Collection[str]) -> list[str]:
    names = _names("includes", includes)
    for name in names:
        if name not in known:
            raise UsageError(
                f"There is no method {name!r} to include; choose from {', '.join(known)}"
            )
    return [name for name in known if name in names]


def _names(argument: str, names: Collection[str]) -> list[str]:
    if isinstance(names, str):
        raise UsageError(f"{argument} must be a list of names of methods, not the string {names!r}")
    return list(names)


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
        measured = [name for name in names if self.merit(self[name]) is not None]
        return max(measured, key=lambda name: cast("float", self.merit(self[name])), default=None)

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
        self._write()
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(self.directory, directory)
        self._removal.detach()
        self.directory = directory

    def _write(self) -> None:
        content: dict[str, Any] = {
            "format": _FORMAT,
            "direction": self.direction,
            "objective": self.objective,
            "trials": [asdict(trial) for trial in self.values()],
        }
        (self.directory / _FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Results | None:
        """Return what :meth:`keep` wrote; None if there is nothing that can be read."""
        try:
            content = json.loads((directory / _FILE).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                return None
            trials = [_trial(each) for each in content["trials"]]
            results = cls(trials, directory, content["direction"], content["objective"])
            results._removal.detach()
            return results
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _trial(content: dict) -> Trial:
    known = {field.name for field in fields(Trial)}
    if set(content) - known:
        raise UsageError("written by another version")
    points = [Point(**each) for each in content.pop("points")]
    return Trial(**content, points=points)
