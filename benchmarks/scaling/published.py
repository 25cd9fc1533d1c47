"""Published scaling results of BigDL, and a model of the cluster on which they were measured.

Dai et al., "BigDL: A Distributed Deep Learning Framework for Big Data" (SoCC 2019), figure of
Inception-v1's throughput: BigDL 0.3 on a Cray cluster of two-socket Broadwell nodes.  The values
are read from the chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .fitting import fitted
from .model import Cluster, Costs, Jitter, Workload
from .policies import ALL_REDUCE
from .simulator import Run, simulate

__all__ = ["FITTED_TO", "INCEPTION", "Assumptions", "Inception", "fit_inception"]

#: images per second by nodes
INCEPTION = {
    16: 920,
    32: 1887,
    64: 3421,
    96: 4854,
    128: 5876,
    160: 6191,
    192: 7357,
    256: 7861,
}
FITTED_TO = 96  # the points of more nodes are predicted


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about unpublished parameters.

    Attributes
    ----------
    parameters : int
        Of Inception-v1.
    element_bytes : int
        BigDL sends the upper half of a float32; ``torch.distributed`` sends all of it.
    buckets : int
        In which ``torch.distributed`` sums gradients: of at least 2²⁰ numbers.
    images : int
        Of a node in an iteration. Seconds of the model are proportional to it, so it changes
        fitted costs and not the curve.
    bandwidth : float
        Bytes per second: 10 Gbit/s.
    latency_s : float
    cores : int
        Of a node, for decoding and summing.
    """

    parameters: int = 7_000_000
    element_bytes: int = 2
    buckets: int = 6
    images: int = 112
    bandwidth: float = 1.25e9
    latency_s: float = 2e-4
    cores: int = 28


@dataclass(frozen=True)
class Inception:
    """Model of the published Inception-v1 cluster.

    Attributes
    ----------
    compute_s : float
        A node's gradient.
    costs : Costs
    jitter : Jitter
    assumptions : Assumptions
    """

    compute_s: float
    costs: Costs
    jitter: Jitter
    assumptions: Assumptions = Assumptions()

    def run(self, nodes: int, policy: str = "plain", **options) -> Run:
        """Simulate a run; see :func:`~.simulator.simulate` for the options."""
        given = self.assumptions
        sent = 4 if policy in ALL_REDUCE else given.element_bytes
        workload = Workload(
            nodes, given.parameters, self.compute_s, sent, self.jitter, given.buckets
        )
        cluster = Cluster(nodes, given.cores, given.bandwidth, given.latency_s)
        return simulate(workload, self.costs, cluster, policy, **options)

    def throughput(self, run: Run, nodes: int) -> float:
        """Return the images per second."""
        return nodes * self.assumptions.images / run.mean_s


def fit_inception(
    costs: Costs,
    jitter: Jitter,
    points: dict[int, float] = INCEPTION,
    up_to: int = FITTED_TO,
    iterations: int = 30,
) -> Inception:
    """Fit the model with two free costs: a node's gradient and the look-up of a block.

    Parameters
    ----------
    costs : Costs
        All others, as measured.
    jitter : Jitter
        As measured.
    points : dict of int to float
        Images per second by nodes, of which those up to `up_to` nodes are used.

    Returns
    -------
    Inception
    """
    known = {nodes: value for nodes, value in points.items() if nodes <= up_to}
    largest = max(known)
    start = min(known) * Assumptions.images / known[min(known)]

    def model(values: Sequence[float]) -> Inception:
        compute_s, lookup_s = map(float, values)
        return Inception(compute_s, replace(costs, lookup_s=lookup_s), jitter)

    def residuals(values):
        candidate = model(values)
        return np.array(
            [
                np.log(candidate.throughput(candidate.run(n, iterations=iterations), n) / value)
                for n, value in known.items()
            ]
        )

    return model(fitted(residuals, [start, 0.1 * start / largest**2], rounds=12))
