"""What a search found."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.options import AccuracyGoal
from bigdl.nano.acceleration.search.candidates import ORIGINAL
from bigdl.nano.acceleration.search.trial import Point, Trial

__all__ = ["Results"]

_FILE = "results.json"
_FORMAT = 1


class Results(Mapping):
    """The trials of a search by the names of their methods, and the directory of its models.

    The directory is removed when this object goes, or the interpreter ends, unless :meth:`keep` is
    called.

    Parameters
    ----------
    trials : list of Trial
        The original first.
    directory : Path
        Holds a directory ``<name>`` for each model that was saved.
    direction : {"max", "min"}
        Whether a higher or a lower accuracy is better.
    objective : str
        What the best model is best in: ``"latency"``, ``"throughput"`` or ``"memory"``.
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
        """Whether there was a metric."""
        return self.original.accuracy is not None

    def keeps_accuracy(self, trial: Trial, criterion: float | None) -> bool:
        """Whether a model's accuracy is within a relative drop from the original's.

        The drop is relative to the original's absolute value; where that is 0, nothing worse than
        it is accepted. A score that is no number is never accepted.
        """
        if criterion is None or trial.method == ORIGINAL:
            return True
        if trial.accuracy is None:
            return False
        goal = AccuracyGoal(lambda model: 0.0, self.direction == "max", criterion)
        return goal.met(self.original.accuracy, trial.accuracy)

    def best(self, names: list[str]) -> str | None:
        """The method among these that is best by the objective; None if none was measured."""
        measured = [name for name in names if self.merit(self[name]) is not None]
        return max(measured, key=lambda name: self.merit(self[name]), default=None)

    def merit(self, trial: Trial) -> float | None:
        """A figure by which trials are compared: the higher the better."""
        if not trial.usable:
            return None
        if self.objective == "memory":
            return None if trial.memory is None else -trial.memory
        return trial.throughput if self.objective == "throughput" else trial.speedup

    def to_pandas(self):
        """One row for each method.

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
        """What :meth:`keep` has kept; None if there is nothing that can be read."""
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
