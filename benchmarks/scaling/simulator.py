"""Simulation of consecutive iterations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError

from .model import Cluster, Costs, Workload
from .policies import POLICIES, Overlapped, Parts, Stage
from .stage import COMPUTE, run_stage

__all__ = ["PHASES", "Run", "simulate"]

PHASES = ("schedule", "weights", COMPUTE, "gradients", "update")


@dataclass(frozen=True)
class Run:
    """Result of a simulation.

    Attributes
    ----------
    seconds : ndarray of float64
        Of every iteration.
    phases : dict of str to ndarray of float64
        Seconds of every iteration on its critical path, by phase.
    """

    seconds: np.ndarray
    phases: dict[str, np.ndarray]

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration."""
        return float(self.seconds.mean())

    def share(self, phase: str) -> float:
        """Return the share of the time of a phase."""
        return float(self.phases[phase].sum() / self.seconds.sum())


def simulate(
    workload: Workload,
    costs: Costs,
    cluster: Cluster,
    policy: str = "plain",
    *,
    iterations: int = 50,
    group_size: int = 1,
    seed: int = 0,
) -> Run:
    """Simulate a training.

    Parameters
    ----------
    workload : Workload
    costs : Costs
    cluster : Cluster
    policy : str
        Of :mod:`.policies`.
    iterations : int
    group_size : int
        Iterations of a group, for the policies ``"group"`` and ``"barrier"``.
    seed : int
        Equal seeds give equal runs.

    Raises
    ------
    UsageError
        For a policy that is not known, or a number below 1.
    """
    if policy not in POLICIES:
        raise UsageError(f"policy should be one of {tuple(POLICIES)}, got {policy!r}")
    for name, value in (("iterations", iterations), ("group_size", group_size)):
        if value < 1:
            raise UsageError(f"{name} should be at least 1, got {value}")
    random = np.random.default_rng(seed)
    player = _Player(workload, cluster, random)
    parts = Parts(workload, costs, cluster)
    phases = {phase: np.zeros(iterations) for phase in PHASES}
    seconds = np.zeros(iterations)
    for number in range(iterations):
        first = number % group_size == 0
        last = number % group_size == group_size - 1 or number == iterations - 1
        for part in POLICIES[policy](parts, first, last):
            played = player.play(part)
            seconds[number] += sum(played.values())
            for phase, spent in played.items():
                phases[phase][number] += spent
    return Run(seconds, phases)


class _Player:
    """Simulator of parts; deterministic parts are simulated once."""

    def __init__(self, workload, cluster, random):
        self._workload, self._cluster, self._random = workload, cluster, random
        self._played: dict[Stage, dict[str, float]] = {}

    def play(self, part) -> dict[str, float]:
        if isinstance(part, Overlapped):
            phases = self._play(part.computing)
            computing, exchange = phases[COMPUTE], sum(self._play(part.exchange).values())
            return {**phases, "gradients": part.end(computing, exchange) - computing}
        return self._play(part) if isinstance(part, Stage) else {part.phase: part.seconds}

    def _play(self, stage: Stage) -> dict[str, float]:
        jitter = self._workload.jitter
        draws = not jitter.is_none and any(leg.phase == COMPUTE for leg in stage.legs)
        if not draws and stage in self._played:
            return self._played[stage]
        compute = [self._workload.compute_s] * stage.tasks
        if draws:
            compute = jitter.draw(self._random, stage.tasks, self._workload.compute_s).tolist()
        cluster = self._cluster
        phases = run_stage(
            stage.legs, compute, cluster.nodes, cluster.cores, cluster.others, cluster.machines
        )
        if not draws:
            self._played[stage] = phases
        return phases
