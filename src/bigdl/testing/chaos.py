"""Disturbed fits: kill, cut off, pause or slow down workers at random, and measure the goodput."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.common.timeouts import CHAOS_LOOK_S
from bigdl.runtime.channel import AttemptChannel
from bigdl.runtime.jobs import active_attempts, running_workers

__all__ = ["Chaos", "ChaosReport"]

ACTIONS = ("kill", "cut_off", "pause", "slow")


@dataclass
class ChaosReport:
    """Result of a disturbed fit.

    Attributes
    ----------
    events : list of dict
        For each disturbance: ``action``, ``rank``, ``pid``, ``host``, ``after_s``, the seconds
        since the first step, and ``stall_s``, the seconds until the next reported step. Workers
        report their steps every half second, so shorter stalls are not measured.
    steps : int
        Steps that count, from the first disturbance to the end.
    step_s : float
        Seconds of an undisturbed step, measured before the first disturbance.
    wall_s : float
        Seconds from the first disturbance to the end.

    Examples
    --------
    >>> from bigdl.testing.chaos import ChaosReport
    >>> ChaosReport(steps=30, step_s=0.1, wall_s=4.0).goodput
    0.75
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    step_s: float = 0.0
    wall_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the time that was spent on steps that count: ``steps * step_s / wall_s``."""
        return self.steps * self.step_s / self.wall_s if self.wall_s else 1.0

    @property
    def longest_stall_s(self) -> float:
        """Longest time without a step after a disturbance."""
        return max((event["stall_s"] for event in self.events), default=0.0)


class Chaos:
    """Context manager that disturbs the workers of the fits inside it, at random.

    It reaches the workers over the connection of their fit, on any backend and any machine.

    Parameters
    ----------
    every : float
        Mean seconds between two disturbances; the first one comes after this time.
    actions : sequence of {"kill", "cut_off", "pause", "slow"}
        A killed worker ends at once. One that is cut off loses all its network connections, also
        that to the driver, as if its machine's network resets them; it ends when it notices. A
        paused one stops for `seconds`. A slow one runs half of the time for `seconds`.
    seconds : float
        Duration of a pause or of a slow phase.
    most : int, optional
        Maximum number of disturbances.
    seed : int
        Determines times, actions and ranks.

    Raises
    ------
    UsageError
        For an invalid argument.

    Examples
    --------
    >>> from bigdl.testing.chaos import Chaos
    >>> with Chaos(every=5.0, actions=["kill"], seed=1) as chaos:
    ...     pass  # estimator.fit(...)
    >>> chaos.report.goodput, chaos.report.events
    (1.0, [])
    """

    def __init__(
        self,
        every: float = 10.0,
        actions: Sequence[str] = ("kill",),
        *,
        seconds: float = 2.0,
        most: int | None = None,
        seed: int = 0,
    ):
        self.every = check_number("every", every, above=0)
        self.seconds = check_number("seconds", seconds, above=0)
        self.most = None if most is None else check_integer("most", most, 0)
        if isinstance(actions, str) or not actions or not set(actions) <= set(ACTIONS):
            raise UsageError(
                f"actions should be a list of {', '.join(map(repr, ACTIONS))}, got {actions!r}",
                code="argument-value",
                argument="actions",
                allowed=list(ACTIONS),
            )
        self.actions = list(actions)
        self.report = ChaosReport()
        self._random = random.Random(check_integer("seed", seed))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bigdl-chaos", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        seen: list[tuple[float, int]] = []  # times of new numbers of finished steps
        started = first = due = None
        report = self.report
        while not self._stopping.wait(CHAOS_LOOK_S):
            attempts, now = active_attempts(), time.monotonic()
            steps = None if not attempts else _steps(attempts[-1])
            if steps is None:
                continue
            if not seen or steps > seen[-1][1]:
                seen.append((now, steps))
                for event in report.events:
                    event.setdefault("stall_s", now - event["at"])
            if started is None:
                started, due = now, now + self.every
            if due is not None and now >= due and len(report.events) != self.most:
                disturbed = self._disturb(attempts[-1])
                if disturbed is not None:
                    first = first or seen[-1]
                    report.events.append({**disturbed, "at": now, "after_s": now - started})
                    due = now + self.every * self._random.uniform(0.5, 1.5)
            if first is not None:
                report.steps, report.wall_s = seen[-1][1] - first[1], seen[-1][0] - first[0]
                since = seen[0]
                report.step_s = (first[0] - since[0]) / max(1, first[1] - since[1])
        for event in report.events:
            event.setdefault("stall_s", time.monotonic() - event["at"])
            del event["at"]

    def _disturb(self, channel: AttemptChannel) -> dict[str, Any] | None:
        """Disturb one worker; return what happened, or None if no worker is connected."""
        workers = running_workers(channel)
        if not workers:
            return None
        task_index = self._random.choice(sorted(workers))
        action = self._random.choice(self.actions)
        channel.set_json(f"disturb/{task_index}", {"action": action, "seconds": self.seconds})
        return {"action": action, **workers[task_index]}


def _steps(channel: AttemptChannel) -> int | None:
    """Return the number of finished steps of a fit; None before its first report."""
    try:
        if not channel.has("progress/0"):
            return None
        progress = channel.get_json("progress/0")
        return int(progress["epoch"] * progress["steps"] + progress["step"])
    except (AttributeError, KeyError, TypeError):  # the fit has ended, or reports other values
        return None
