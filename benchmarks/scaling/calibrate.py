"""Measurement of the parameter layer on this machine, with few workers.

Both transports run as they are; only the gradient is a sleep, so that workers beyond the cores of
the machine wait, not compute.  All settings are open at once and take turns, so what else the
machine does meets all of them.  Small settings come first; every round runs a group of each, and
the first round of each does not count.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bigdl.orca.parameter_layer.plan import LayerPlan, LayerStep
from bigdl.orca.parameter_layer.rank import Contribution

from .validate import Calibration, Point

__all__ = ["POINTS", "Layer", "measured"]

_SLEEP_S = 0.02
_WORKERS = 8
_ROUNDS = 12  # more give nothing
_EMPTY_TASKS = (2, 4, 8, 16, 32, 64)

_SHUFFLE = [  # workers, parameters, group size
    (1, 100_000, 1),
    (1, 100_000, 6),
    (2, 100_000, 1),
    (2, 100_000, 6),
    (8, 100_000, 1),
    (8, 100_000, 3),
    (2, 2_000_000, 3),
    (8, 2_000_000, 1),
    (8, 1_000_000, 2),
]
_SHUFFLE_HELD = [(4, 100_000, 4), (6, 100_000, 2), (2, 1_000_000, 4), (4, 1_000_000, 2)]
_BARRIER = [
    (2, 100_000, 10),
    (2, 100_000, 40),
    (8, 100_000, 10),
    (8, 100_000, 40),
    (2, 2_000_000, 10),
    (8, 1_000_000, 10),
]
_BARRIER_HELD = [(4, 100_000, 20), (4, 1_000_000, 15)]


def _points(transport, settings, held_back):
    return [Point(transport, *setting, _SLEEP_S, held_back) for setting in settings]


POINTS = (
    *_points("shuffle", _SHUFFLE, False),
    *_points("shuffle", _SHUFFLE_HELD, True),
    *_points("barrier", _BARRIER, False),
    *_points("barrier", _BARRIER_HELD, True),
)


@dataclass
class Sleeper:
    """Replica that sleeps and returns a zero gradient."""

    parameters: int
    sleep_s: float

    def describe(self) -> dict:
        return {"rows": 1}

    def compute(self, step, weights, buffers) -> Contribution:
        time.sleep(self.sleep_s)
        return Contribution(self._gradient, counted=1.0, rows=1)

    @functools.cached_property
    def _gradient(self):
        return np.zeros(self.parameters, np.float32)


@dataclass(frozen=True)
class SleeperProgram:
    """Picklable factory of :class:`Sleeper` for the workers."""

    parameters: int
    sleep_s: float

    def __call__(self, rank, shards):
        return Sleeper(self.parameters, self.sleep_s)


def measured(
    points: Sequence[Point] = POINTS, seconds: float = 100.0, say: Callable = print
) -> Calibration:
    """Measure points until the time is over.

    Parameters
    ----------
    points : sequence of Point
    seconds : float
        For the rounds that count, of all points together.
    say : callable
        Receives progress messages.

    Returns
    -------
    Calibration
        Of at least three rounds.
    """
    import pyspark

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    samples: dict[Point, list[float]] = {}
    computing: list[float] = []
    load = os.getloadavg()[0]
    init_orca_context("local", cores=_WORKERS, memory="4g")
    try:
        jobs = _empty_jobs(OrcaContext.get_spark_session().sparkContext)
        say(f"empty jobs: {', '.join(f'{n} tasks {s * 1e3:.0f} ms' for n, s in jobs)}")
        for transport in ("shuffle", "barrier"):
            chosen = [point for point in points if point.transport == transport]
            share = seconds * len(chosen) / len(points)
            _take_turns(chosen, share, samples, computing, say)
    finally:
        stop_orca_context()
    typical = statistics.median(computing)
    quantiles = np.quantile(np.array(computing) - typical, np.linspace(0.005, 0.995, 100))
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "pyspark": pyspark.__version__,
        "load": round(load, 1),
    }
    reached = [
        replace(point, sleep_s=typical, seconds=tuple(round(s, 5) for s in all_of_it))
        for point, all_of_it in samples.items()
    ]
    return Calibration(machine, tuple(reached), jobs, tuple(quantiles.tolist()))


def _empty_jobs(sc, repeats: int = 7):
    """Return the numbers of tasks and the seconds of empty JVM jobs."""
    numbers, samples = sc._jvm.java.util.ArrayList(), []
    for number in range(max(_EMPTY_TASKS)):
        numbers.add(number)
    for tasks in (_EMPTY_TASKS[-1], *_EMPTY_TASKS):  # the first one starts what is needed
        taken = []
        for _ in range(repeats):
            started = time.perf_counter()
            sc._jsc.parallelize(numbers, tasks).count()
            taken.append(time.perf_counter() - started)
        samples.append((tasks, float(np.quantile(taken, 0.25))))
    return tuple(samples[1:])


def _take_turns(points, seconds, samples, computing, say):
    """Run rounds of a group of every point, until the time is over."""
    with contextlib.ExitStack() as opened:
        layers = {point: opened.enter_context(Layer(point)) for point in points}
        spent = 0.0
        for number in range(_ROUNDS + 1):
            begun = time.perf_counter()
            for point, layer in layers.items():
                taken, computed = layer.group()
                if number:
                    samples.setdefault(point, []).append(taken)
                    computing += computed
            taken = time.perf_counter() - begun
            say(f"{points[0].transport}: round {number} took {taken:.1f} s")
            spent += taken if number else 0.0
            if number > 2 and spent + taken > seconds:
                break


class Layer:
    """Parameter layer of one point, open for groups of steps.

    Parameters
    ----------
    point : Point
    """

    def __init__(self, point: Point):
        import torch

        from bigdl.orca.data.feeds import as_feed
        from bigdl.orca.data.feeds.group import FeedGroup
        from bigdl.orca.parameter_layer.rank import RankState

        self._point = point
        plan = LayerPlan((point.parameters,), (0,), torch.optim.SGD, point.workers)
        rows = np.zeros(point.workers, np.float32)
        feed = FeedGroup({"data": as_feed((rows, rows))})
        self._transport = _opened(
            point.transport, plan, SleeperProgram(point.parameters, point.sleep_s), feed
        )
        tensor = torch.nn.Parameter(torch.zeros(1))
        (group,) = torch.optim.SGD([tensor], lr=0.1).param_groups
        self._hyper = ({k: v for k, v in group.items() if k != "params"},)
        self._transport.start(
            [
                RankState(np.zeros(high - low, np.float32), [{} for _ in plan.geometry.segments(n)])
                for n, (low, high) in enumerate(plan.geometry.bounds)
            ]
        )
        self._done = 0

    def group(self) -> tuple[float, list[float]]:
        """Return the seconds of a group, and the computing seconds of every rank in every step."""
        started = time.perf_counter()
        records = self._run(self._point.group_size)
        taken = time.perf_counter() - started
        return taken, [s["compute_s"] for step in records[0] for s in step["sources"]]

    def step(self, steps: int) -> float:
        """Return the seconds per step after the first of a group, on the slowest rank."""
        ends = [[step["ended_at"] for step in of_rank] for of_rank in self._run(steps + 1)]
        return max(of_rank[-1] - of_rank[0] for of_rank in ends) / steps

    def _run(self, steps: int) -> list[list[dict]]:
        numbers = range(self._done, self._done + steps)
        self._done = numbers.stop
        return self._transport.run([LayerStep(0, number, self._hyper) for number in numbers])

    def close(self) -> None:
        """Remove the data that the transport keeps."""
        self._transport.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _opened(transport, plan, program, feed):
    from bigdl.orca.engines.spark import SparkEngine
    from bigdl.orca.parameter_layer.barrier import BarrierTransport
    from bigdl.orca.parameter_layer.shuffle import ShuffleTransport

    # more threads would be more than the machine has cores for, and spin while they wait
    carrier = {"barrier": BarrierTransport, "shuffle": ShuffleTransport}[transport]
    return carrier(SparkEngine(), plan, program, feed, threads=1)
