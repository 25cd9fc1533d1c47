"""From what the ranks recorded of their steps to the figures of an epoch."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.training.chart import PanelChart, table_of
from bigdl.training.metrics import EpochSums, LossRule, summaries_of

PHASES = (
    "launch_s",
    "dispatch_s",
    "get_weights_s",
    "compute_s",
    "put_gradient_s",
    "aggregate_s",
    "compute_weight_s",
    "send_weights_s",
)
"""Where the time of a step goes: means over the ranks, in seconds.

``launch_s`` is a step's share of the time from the call for a group to its first gradient, and
``dispatch_s`` passes between the tasks of one stage and those of the next, by the clocks of their
machines: scheduling, and what the JVM does with the bytes. The others are those of BigDL's metrics
("get weights average" and so on); waiting for what is fetched belongs to who fetches it.
"""

_TIMED = PHASES[2:]
_OF_STEPS = (*PHASES, "step_s", "bytes_per_step")
_TIMES_OF_BATCH = ("fetch_s", "forward_s", "backward_s")


class ParameterLayerMetrics:
    """Sums over the steps of an epoch, for every rank.

    Parameters
    ----------
    ranks : int
    weighted : bool
        True if rows count their weights instead of 1.
    loss_is_sum : bool
        True if the loss adds up over the rows.

    Attributes
    ----------
    of_ranks : list of EpochSums
    dropped : dict of str to int
        What stragglers cost: contributions and rows that were left out, discarded steps.
    added : dict of str to ndarray of float64
        What else replicas add up, in the ``sums`` of their records.
    memory : list of int
        The most bytes that each rank's process has had, where replicas say so.
    rows : list of list of float
        Of the last group: loss, counted and rows of each step.
    phases : dict of str to float
        Of the last group: mean seconds per step, at least of :data:`GROUP_PHASES`.
    """

    def __init__(self, ranks: int, *, weighted: bool, loss_is_sum: bool):
        self._rule = LossRule(weighted, loss_is_sum)
        self.of_ranks = [EpochSums() for _ in range(ranks)]
        self._steps, self._totals = 0, dict.fromkeys(_OF_STEPS, 0.0)
        self.dropped = {"dropped_contributions": 0, "dropped_rows": 0, "discarded_steps": 0}
        self.added: dict[str, Any] = {}
        self.memory = [0] * ranks
        self.rows: list[list[float]] = []
        self.phases: dict[str, float] = {}

    def to_json(self) -> dict:
        """Return the sums, for a checkpoint inside an epoch."""
        return {
            "sums": [sums.to_json() for sums in self.of_ranks],
            "dropped": dict(self.dropped),
            "added": {name: np.asarray(values).tolist() for name, values in self.added.items()},
        }

    def restore(self, manifest: dict) -> None:
        """Go on from the sums in the manifest of a checkpoint, of this or of another backend."""
        self.of_ranks = [EpochSums(**values) for values in manifest["sums"]]
        self.dropped.update(manifest.get("dropped", {}))
        self.added = {name: np.asarray(v) for name, v in manifest.get("added", {}).items()}

    def add(self, records: Sequence[Sequence[dict]], seconds: float, began_at: float) -> None:
        """Add a group of steps.

        Parameters
        ----------
        records : list of list of dict
            Of :meth:`~bigdl.orca.parameter_layer.plan.Transport.run`.
        seconds : float
            That the group took.
        began_at : float
            When it was asked for, in seconds since 1970.
        """
        self.rows, count, ended = [], len(records[0]), began_at
        totals = {**dict.fromkeys(_OF_STEPS, 0.0), "step_s": seconds}
        for number, step in enumerate(zip(*records, strict=True)):
            sources = step[0]["sources"]
            self.rows.append(self._add_step(sources, seconds / count))
            waits = _waits(step, ended)
            totals["dispatch_s" if number else "launch_s"] += waits[0]
            totals["dispatch_s"] += sum(waits[1:])
            ended = max(owner["ended_at"] for owner in step)
            for phase in _TIMED:
                holders = step if phase in step[0] else sources
                totals[phase] += statistics.fmean(each[phase] for each in holders)
            totals["bytes_per_step"] += sum(source["bytes"] for source in sources)
            late = [source["dropped"] for source in sources if "dropped" in source]
            self.dropped["dropped_contributions"] += len(late)
            self.dropped["dropped_rows"] += sum(late)
        self._steps += count
        for name, total in totals.items():
            self._totals[name] += total
        totals["rest_s"] = max(0.0, seconds - sum(totals[name] for name in PHASES))
        self.phases = {name: total / count for name, total in totals.items()}

    def _add_step(self, sources, seconds):
        total = sum(source["counted"] for source in sources)
        batch_rows = sum(source["rows"] for source in sources)
        loss = counted = 0.0
        for rank, (sums, source) in enumerate(zip(self.of_ranks, sources, strict=True)):
            for name, values in source.get("sums", {}).items():
                self.added[name] = self.added.get(name, 0.0) + np.asarray(values)
            self.memory[rank] = max(self.memory[rank], source.get("memory", 0))
            parts = self._rule.parts(
                source["loss"], source["counted"], total, source["rows"], batch_rows
            )
            times = {name: source[name] for name in _TIMES_OF_BATCH if name in source}
            sums.add(*parts, source["rows"], step_s=seconds, **times)
            loss, counted = loss + parts[0], counted + parts[1]
        return [loss, counted, float(batch_rows)]

    def mean(self) -> float | None:
        """Mean loss so far."""
        return EpochSums.total(self.of_ranks).mean()

    def entry(self) -> dict | None:
        """The figures of the epoch; None if no step was made.

        Beside those of other backends ``profile`` has the mean seconds per step of the phases of
        the parameter layer, ``sync_s`` (all that is not ``compute_s``), and ``bytes_per_step``,
        which all ranks together sent as gradients.
        """
        figures = EpochSums.merged(self.of_ranks)
        if figures is None or not self._steps:
            return figures
        profile = figures["profile"]
        profile.update({name: total / self._steps for name, total in self._totals.items()})
        profile["sync_s"] = profile["step_s"] - profile["compute_s"]
        profile["ended_at"] = time.time()
        return figures


def _waits(owners, ended: float) -> list[float]:
    """Seconds before the tasks of each stage of a step, of which those before end at `ended`."""
    sources = owners[0]["sources"]
    computed = max(source["ended_at"] for source in sources)
    return [
        max(0.0, statistics.fmean(source["began_at"] for source in sources) - ended),
        max(0.0, statistics.fmean(owner["began_at"] for owner in owners) - computed),
        statistics.fmean(owner.get("wait_s", 0.0) for owner in owners),
    ]


GROUP_PHASES = (*PHASES, "rest_s", "step_s")
"""Figures of every group: means per step of the phases, the rest and the whole step."""


def phase_summaries(rows: list[list[float]]) -> dict[str, list[list[float]]]:
    """Return ``[step, seconds, time]`` of every group, by tag.

    A tag is ``"Phases/"`` and a name of :data:`PHASES`, ``"rest_s"`` (what is left of the whole
    step) or ``"step_s"``.
    """
    return summaries_of(rows, [f"Phases/{name}" for name in GROUP_PHASES])


# -- the chart ------------------------------------------------------------------------------------

_LABELS = [name.removesuffix("_s").replace("_", " ") for name in GROUP_PHASES[:-1]]
_BARS = 120  # at most: a longer training is drawn by means of several groups


def draw_phases(rows: Sequence[Sequence[float]], path: Path) -> None:
    """Draw one stacked bar per group: milliseconds per step.

    Parameters
    ----------
    rows : sequence of sequence of float
        Records of :data:`GROUP_PHASES`.
    path : Path
        See :meth:`bigdl.common.drawing.Chart.write`.
    """
    groups, together = np.asarray(rows), -(-len(rows) // _BARS)
    bars = [groups[first : first + together] for first in range(0, len(rows), together)]
    steps = [int(those[-1, 0]) for those in bars]
    times = np.array([1e3 * those[:, 2:-1].mean(axis=0) for those in bars])
    panel = "ms per step", dict(zip(_LABELS, times.T.tolist(), strict=True)), True
    table = [
        {"step": step, **dict(zip(_LABELS, those, strict=True))}
        for step, those in zip(steps, times, strict=True)
    ]
    chart = PanelChart("step", steps, [panel], 860, 420)
    chart.write(path, "Phases of the parameter layer", table_of(table))
