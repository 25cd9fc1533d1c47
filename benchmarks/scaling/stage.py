"""Event loop of tasks that start together, share resources, and end one after another.

A task is a row of *legs*.  A leg takes some seconds of a *server*, which serves in the order of
arrival; waiting for it counts as part of the leg.  So the legs of the task that ends last add up to
the time of the stage, and say what it was spent on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["COMPUTE", "Leg", "Server", "run_stage"]

COMPUTE = "compute"  # the phase whose seconds every task draws for itself


class Server(Enum):
    """Resource that serves a leg."""

    NOBODY = 0  # passing time
    CORE = 1  # one of the task's node
    NETWORK = 2  # of the task's node
    SCHEDULER = 3  # a thread of the driver
    LOCATOR = 4  # another
    DRIVER_NETWORK = 5
    DRIVER_CORE = 6


@dataclass(frozen=True)
class Leg:
    """Part of every task of a stage.

    Attributes
    ----------
    phase : str
    server : Server
    seconds : float
        Of the server; ignored for the phase :data:`COMPUTE`.
    """

    phase: str
    server: Server
    seconds: float = 0.0


def run_stage(
    legs: Sequence[Leg],
    compute: Sequence[float],
    nodes: int,
    cores: int,
    others: float = 0.0,
    machines: int | None = None,
) -> dict[str, float]:
    """Run the tasks of a stage.

    Parameters
    ----------
    legs : sequence of Leg
        Of every task.
    compute : sequence of float
        The seconds of computing, for each task.
    nodes, cores, others, machines
        See :class:`~.model.Cluster`.

    Returns
    -------
    dict of str to float
        Seconds by phase of the task that ended last; their sum is the time of the stage.
    """
    machines = machines or min(nodes, len(compute))
    own = {Server.NOBODY, Server.CORE, Server.NETWORK}
    if len({*compute}) == 1 and machines == nodes and all(leg.server in own for leg in legs):
        compute, nodes, machines = compute[::nodes], 1, 1  # all nodes do what the first one does
    ends = [[0.0] * (len(legs) + 1) for _ in compute]
    of_machines = [_Cores(cores, others) for _ in range(machines)]
    free: dict[object, float] = {}
    events = [(0.0, task, 0) for task in range(len(compute))]  # sorted, so a heap
    last = 0
    while events:
        now, task, number = heapq.heappop(events)
        if number == len(legs):
            last = task
            continue
        leg = legs[number]
        seconds = compute[task] if leg.phase == COMPUTE else leg.seconds
        if leg.server is Server.NOBODY:
            end = now + seconds
        elif leg.server is Server.CORE:
            end = of_machines[task % nodes % machines].end(now, seconds)
        else:
            server = task % nodes if leg.server is Server.NETWORK else leg.server
            end = free[server] = max(now, free.get(server, 0.0)) + seconds
        ends[task][number + 1] = end
        heapq.heappush(events, (end, task, number + 1))
    phase_seconds: dict[str, float] = {}
    for leg, (start, end) in zip(legs, itertools.pairwise(ends[last]), strict=True):
        phase_seconds[leg.phase] = phase_seconds.get(leg.phase, 0.0) + end - start
    return phase_seconds


class _Cores:
    """Cores of a node, which other programs may also use."""

    def __init__(self, cores: int, others: float):
        self._free = [0.0] * cores
        self._others = others
        self._pending: list[float] = []  # when the tasks end that run or wait now

    def end(self, now: float, seconds: float) -> float:
        """Return the end time of a task that arrives now with `seconds` of work."""
        if self._others:
            seconds /= self._speed(now)
        end = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        if self._others:
            self._pending.append(end)
        return end

    def _speed(self, now):
        """Return the speed of a core, shared equally among all running programs."""
        self._pending = [end for end in self._pending if end > now]
        own, cores = len(self._pending) + 1, len(self._free)
        each = min(1.0, cores / (own + self._others))
        return own * each / min(own, cores)
