"""Data classes of a simulated run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Cluster", "Costs", "Jitter", "Workload"]


@dataclass(frozen=True)
class Costs:
    """Costs of the parts of a program, in seconds.

    Attributes
    ----------
    launch_s : float
        Of the driver, for each job.
    stage_s : float
        Of the driver, for each stage of a job.
    dispatch_s : float
        Of the driver, for each task, one after another.
    lookup_s : float
        Of the driver, for each question where a block is, one after another.
    task_s : float
        Of a core, for each task.
    block_s : float
        Of a core, for each block that a task fetches or is sent.
    byte_s : float
        Of a core, for each byte that a task encodes, decodes or sums.
    """

    launch_s: float = 0.0
    stage_s: float = 0.0
    dispatch_s: float = 0.0
    lookup_s: float = 0.0
    task_s: float = 0.0
    block_s: float = 0.0
    byte_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Simulated cluster.

    Attributes
    ----------
    nodes : int
        Task n runs on node ``n % nodes``.
    cores : int
        Of a node; shared by all its tasks except computing gradients.
    bandwidth : float
        Bytes per second of a node's network, in each direction; the driver has the same.
    latency_s : float
        From a request to the first byte of the answer.
    requests : int
        That a task has under way at once.
    others : float
        Processes of other programs that compete for the cores of a node.
    machines : int, optional
        That the nodes are on, where several have a separate network each but share cores, of
        which `cores` is the number on a machine then. Default: one for each node.
    """

    nodes: int
    cores: int = 1
    bandwidth: float = math.inf
    latency_s: float = 0.0
    requests: int = 4
    others: float = 0.0
    machines: int | None = None


@dataclass(frozen=True)
class Jitter:
    """Distribution of the seconds of computing a gradient.

    Attributes
    ----------
    delays : tuple of float
        Measured seconds, of which every task draws one ("replay") that comes on top.
    sigma : float
        Standard deviation of the logarithm of a log-normal factor.
    straggling : float
        Probability that a task is a straggler.
    slowness : float
        Further factor of a straggler.
    """

    delays: tuple[float, ...] = ()
    sigma: float = 0.0
    straggling: float = 0.0
    slowness: float = 1.0

    @property
    def is_none(self) -> bool:
        return not (self.delays or self.sigma or self.straggling)

    def draw(self, random: np.random.Generator, tasks: int, compute_s: float) -> np.ndarray:
        """Draw the seconds of every task."""
        seconds = np.full(tasks, compute_s)
        if self.sigma:
            seconds *= random.lognormal(0.0, self.sigma, tasks)
        if self.straggling:
            seconds *= np.where(random.random(tasks) < self.straggling, self.slowness, 1)
        if self.delays:
            seconds += random.choice(self.delays, tasks)
        return np.maximum(seconds, 0.0)


@dataclass(frozen=True)
class Workload:
    """Simulated model and batch.

    Attributes
    ----------
    workers : int
        Tasks at once, each the owner of a slice.
    parameters : int
    compute_s : float
        A gradient of a worker's part of the batch.
    element_bytes : int
        Bytes of a number in a message.
    jitter : Jitter
    buckets : int
        In which gradients leave while others are computed.
    forward : float
        Part of the computing after which the first gradients are there.
    """

    workers: int
    parameters: int
    compute_s: float
    element_bytes: int = 4
    jitter: Jitter = field(default_factory=Jitter)
    buckets: int = 1
    forward: float = 1 / 3

    @property
    def vector_bytes(self) -> float:
        """Bytes of all parameters in a message."""
        return float(self.parameters * self.element_bytes)
