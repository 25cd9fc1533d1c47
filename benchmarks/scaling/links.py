"""Measured exchanges over limited links, and a check of their simulation.

The costs of each side are fitted to its exchanges without a limit; those with one are held back.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigdl.common.errors import UsageError

from .fitting import fitted
from .model import Cluster, Costs, Workload
from .simulator import simulate

__all__ = ["LIMIT", "POLICIES", "Exchanges", "Setting", "check", "costs_of", "error_of"]

LIMIT = 0.15  # of a prediction's error
OVERLAPPED = "during the backward pass"
POLICIES = {
    "gloo by hand": "ring",
    "halving and doubling": "halving",
    "torch.distributed": "overlap",
    OVERLAPPED: "overlap",
    "barrier": "barrier",
}
_SEGMENT, _FRAME = 1448, 1514  # bytes of data in a packet of TCP, and of the packet
_UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}


@dataclass(frozen=True)
class Setting:
    """Limit of every link, one-way delay, and number of parameters.

    Attributes
    ----------
    rate : str
        As ``tc`` has it, or ``"none"``.
    delay_ms : float
    millions : int
    """

    rate: str
    delay_ms: float
    millions: int

    @property
    def is_free(self) -> bool:
        """True if there is no limit."""
        return self.rate == "none"

    @property
    def bandwidth(self) -> float:
        """Bytes of data per second."""
        if self.is_free:
            return float("inf")
        return float(self.rate[:-4]) * _UNITS[self.rate[-4:]] * _SEGMENT / _FRAME

    def __str__(self):
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return f"{'no limit' if self.is_free else self.rate}{delay}, {self.millions} M"


@dataclass(frozen=True)
class Exchanges:
    """Measured exchanges on simulated hosts of one machine.

    Attributes
    ----------
    hosts : int
    cores : int
        Of the machine, which the hosts share.
    compute_s : float
        What a backward pass and the forward pass before it sleep, where there is one.
    buckets : dict of int to int
        In which gradients leave during a backward pass, by millions of parameters.
    seconds : dict of Setting to dict of str to list of float
        By side.
    """

    hosts: int
    cores: int
    compute_s: float
    buckets: dict[int, int]
    seconds: dict[Setting, dict[str, list[float]]]

    def save(self, path: Path) -> None:
        fields = {**vars(self), "seconds": [[vars(s), f] for s, f in self.seconds.items()]}
        path.write_text(json.dumps(fields, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Exchanges:
        if not path.exists():
            raise UsageError(
                f"{path} is not there; run `sudo python limited_links.py --quick --json {path}`"
            )
        fields = json.loads(path.read_text())
        fields["seconds"] = {Setting(**setting): values for setting, values in fields["seconds"]}
        fields["buckets"] = {int(size): number for size, number in fields["buckets"].items()}
        return cls(**fields)

    def typical_s(self, side: str, setting: Setting) -> float:
        """Return the median of the repeats."""
        return statistics.median(self.seconds[setting][side])


def prediction(side: str, setting: Setting, costs: Costs, exchanges: Exchanges) -> float:
    """Return the simulated seconds of an implementation."""
    policy, hosts = POLICIES[side], exchanges.hosts
    compute_s = exchanges.compute_s if side == OVERLAPPED else 0.0
    parameters = setting.millions * 10**6
    workload = Workload(hosts, parameters, compute_s, buckets=exchanges.buckets[setting.millions])
    latency_s = 2e-3 * setting.delay_ms
    cluster = Cluster(hosts, exchanges.cores, setting.bandwidth, latency_s, machines=1)
    run = simulate(workload, costs, cluster, policy, iterations=3, group_size=3)
    return float(run.seconds[1])  # neither the first nor the last of a group


def error_of(side: str, setting: Setting, costs: dict[str, Costs], exchanges: Exchanges) -> float:
    """Return the relative error of the simulated seconds."""
    simulated = prediction(side, setting, costs[side], exchanges)
    return simulated / exchanges.typical_s(side, setting) - 1


def costs_of(exchanges: Exchanges) -> dict[str, Costs]:
    """Return the costs that reproduce each implementation's exchanges without a limit.

    What hides behind a backward pass says little about its costs: they are those of
    ``torch.distributed``, which is what does it.
    """
    costs = {side: _fitted(side, exchanges) for side in POLICIES if side != OVERLAPPED}
    return {side: costs.get(side, costs["torch.distributed"]) for side in POLICIES}


def _fitted(side: str, exchanges: Exchanges) -> Costs:
    free = [setting for setting in exchanges.seconds if setting.is_free]

    def residuals(values):
        costs = Costs(block_s=float(values[0]), byte_s=float(values[1]))
        simulated = [prediction(side, setting, costs, exchanges) for setting in free]
        return np.log(simulated) - np.log([exchanges.typical_s(side, s) for s in free])

    block_s, byte_s = map(float, fitted(residuals, [1e-3, 1e-9]))
    return Costs(block_s=block_s, byte_s=byte_s)


def check(exchanges: Exchanges, costs: dict[str, Costs]) -> list[str]:
    """Return a message for every limited exchange without a delay that is predicted wrongly."""
    held_back = [s for s in exchanges.seconds if not (s.is_free or s.delay_ms)]
    errors = {
        (side, setting): error_of(side, setting, costs, exchanges)
        for side in POLICIES
        for setting in held_back
    }
    return [
        f"the simulator is off by {error:+.0%}: {side}, {setting}"
        for (side, setting), error in errors.items()
        if abs(error) > LIMIT
    ]
