"""Costs fitted to measured runs, and a check of their predictions of held-out runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError

from .fitting import fitted
from .model import Cluster, Costs, Jitter, Workload
from .simulator import simulate

__all__ = [
    "LIMIT",
    "Calibration",
    "Fit",
    "Point",
    "Prediction",
    "calibrated",
    "check",
    "group_seconds",
    "predictions",
]

LIMIT = 0.10

_POLICIES = {"shuffle": "group", "barrier": "barrier"}
_NAMES = {
    "shuffle": ("launch_s", "stage_s", "task_s", "block_s", "byte_s"),
    "barrier": ("launch_s", "task_s", "block_s", "byte_s"),
}
_START = Costs(launch_s=3e-2, stage_s=1e-2, task_s=5e-3, block_s=1e-4, byte_s=2e-9)
_OTHERS = 1.0


@dataclass(frozen=True)
class Point:
    """Measured setting of the parameter layer.

    Attributes
    ----------
    transport : str
    workers, parameters, group_size : int
    sleep_s : float
        What stands for the gradient's computation.
    held_back : bool
        Whether it is to be predicted.
    seconds : tuple of float
        Of every group.
    """

    transport: str
    workers: int
    parameters: int
    group_size: int
    sleep_s: float
    held_back: bool = False
    seconds: tuple[float, ...] = ()

    @property
    def typical_s(self) -> float:
        """Median of the seconds of the groups."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Interquartile range of the groups' seconds, relative to their median."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(high - low) / self.typical_s

    def __str__(self):
        return (
            f"{self.transport}, {self.workers} workers, {self.parameters / 1e6:g} M parameters, "
            f"groups of {self.group_size}"
        )


@dataclass(frozen=True)
class Calibration:
    """Measurements on one machine.

    Attributes
    ----------
    machine : dict
        What is known of it: ``cores``, versions, load.
    points : tuple of Point
    empty_jobs : tuple of (int, float)
        Tasks of a job that does nothing, and its seconds.
    delays : tuple of float
        Seconds by which computing a gradient took longer than typical, in all steps. A gradient is
        a sleep, which tells how late a core is given to a task, whatever it computes.
    """

    machine: dict[str, Any]
    points: tuple[Point, ...]
    empty_jobs: tuple[tuple[int, float], ...]
    delays: tuple[float, ...] = field(default=())

    def save(self, path: Path) -> None:
        doc = {
            "machine": self.machine,
            "points": [vars(point) for point in self.points],
            "empty_jobs": self.empty_jobs,
            "delays": [round(seconds, 6) for seconds in self.delays],
        }
        path.write_text(json.dumps(doc, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        if not path.exists():
            raise UsageError(f"{path} is not there; run `python -m scaling calibrate` first")
        doc = json.loads(path.read_text())
        points = [Point(**{**p, "seconds": tuple(p["seconds"])}) for p in doc["points"]]
        jobs = tuple((tasks, seconds) for tasks, seconds in doc["empty_jobs"])
        return cls(doc["machine"], tuple(points), jobs, tuple(doc["delays"]))

    @property
    def jitter(self) -> Jitter:
        return Jitter(delays=self.delays)

    @property
    def dispatch_s(self) -> float:
        """Slope of the seconds of empty jobs over their tasks."""
        tasks, seconds = np.array(self.empty_jobs).T
        return max(float(np.polyfit(tasks, seconds, 1)[0]), 1e-6)


@dataclass(frozen=True)
class Prediction:
    """Held-out point and its simulated result.

    Attributes
    ----------
    point : Point
    simulated_s : float
    """

    point: Point
    simulated_s: float

    @property
    def error(self) -> float:
        """Error relative to the measurement."""
        return self.simulated_s / self.point.typical_s - 1


@dataclass(frozen=True)
class Fit:
    """Costs of a transport on the measured machine.

    Attributes
    ----------
    costs : Costs
    machine : Cluster
        Of one node; its ``others`` are fitted, too, since a machine is seldom idle.
    """

    costs: Costs
    machine: Cluster


def group_seconds(point: Point, fit: Fit, jitter: Jitter) -> float:
    """Return the simulated seconds of a group."""
    workload = Workload(point.workers, point.parameters, point.sleep_s, 4, jitter)
    groups = 1 if jitter.is_none else 10
    result = simulate(
        workload,
        fit.costs,
        fit.machine,
        _POLICIES[point.transport],
        iterations=groups * point.group_size,
        group_size=point.group_size,
    )
    return float(result.seconds.sum() / groups)


def calibrated(calibration: Calibration, transport: str) -> Fit:
    """Return the costs that best fit the points that are not held out.

    Raises
    ------
    UsageError
        If there are too few points.
    """
    points = _chosen(calibration.points, transport, held_back=False)
    names = _NAMES[transport]
    machine = Cluster(1, calibration.machine["cores"])
    known = replace(_START, dispatch_s=calibration.dispatch_s)
    if "stage_s" not in names:
        known = replace(known, stage_s=0.0)  # one stage per group: part of the launch
    if len(points) <= len(names):
        raise UsageError(
            f"{len(points)} measured points of the {transport} transport are too few for "
            f"{len(names) + 1} fitted numbers; calibrate with more time"
        )

    def fit(values) -> Fit:
        *seconds, others = map(float, values)
        costs = replace(known, **dict(zip(names, seconds, strict=True)))
        return Fit(costs, replace(machine, others=others))

    def residuals(values):
        candidate = fit(values)
        simulated = [group_seconds(p, candidate, calibration.jitter) for p in points]
        return np.log(np.array(simulated) / [p.typical_s for p in points])

    return fit(fitted(residuals, [*(getattr(_START, name) for name in names), _OTHERS]))


def predictions(calibration: Calibration, fits: dict[str, Fit]) -> list[Prediction]:
    """Return the simulated results of all held-out points."""
    return [
        Prediction(p, group_seconds(p, fits[p.transport], calibration.jitter))
        for transport in fits
        for p in _chosen(calibration.points, transport, held_back=True)
    ]


def check(predictions: Sequence[Prediction]) -> None:
    """Raise an error if the costs do not predict the held-out points.

    Raises
    ------
    UsageError
        If nothing was held back, or a prediction is off by more than :data:`LIMIT`.
    """
    if not predictions:
        raise UsageError("No measured point was held back to validate the simulation; calibrate")
    worst = max(predictions, key=lambda p: abs(p.error))
    if abs(worst.error) > LIMIT:
        missed = sum(abs(p.error) > LIMIT for p in predictions)
        raise UsageError(
            f"The simulation is not validated: {missed} of {len(predictions)} held-back points are "
            f"off by more than {LIMIT:.0%}, at worst {worst.error:+.0%} ({worst.point}; the middle "
            f"half of its groups spread over {worst.point.spread:.0%}), so no larger cluster is "
            "simulated; calibrate on a quieter machine, or for longer (--seconds)"
        )


def _chosen(points, transport, *, held_back):
    return [
        p for p in points if p.transport == transport and p.held_back == held_back and p.seconds
    ]
