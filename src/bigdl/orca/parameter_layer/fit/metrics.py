"""Aggregation of the ranks' step records into epoch metrics."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.training.chart import PanelChart, table_of
from bigdl.training.metrics import EpochSums, LossRule, summaries_of
from bigdl.training.timing import StepSums

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
"""Phases of a step, in seconds, as means over the ranks.

``launch_s`` is a step's share of the time from the start of a group to its first gradient.
``dispatch_s`` passes between the tasks of consecutive stages, by the clocks of their machines:
scheduling, and the JVM's handling of the bytes. The others are those of BigDL's metrics ("get
weights average" and so on); a task's time includes waiting for its input.
"""

_TIMED = PHASES[2:]
_OF_STEPS = (*PHASES, "step_s", "bytes_per_step")
_TIMES_OF_BATCH = ("fetch_s", "forward_s", "backward_s")


class ParameterLayerMetrics:
    """Metrics of every rank, summed over the steps of an epoch.

    Parameters
    ----------
    ranks : int
    weighted : bool
        True if rows count by their weights instead of 1.
    loss_is_sum : bool
        True if the loss is a sum over the rows, not a mean.

    Attributes
    ----------
    of_ranks : list of EpochSums
    exchanges : list of StepSums
        Seconds of each rank's steps that were not used for its gradient.
    dropped : dict of str to int
        Losses to stragglers: dropped contributions and rows, and discarded steps.
    added : dict of str to ndarray of float64
        Additional sums of replicas, from the ``sums`` of their records.
    memory : list of int
        Peak memory of each rank's process in bytes, if replicas report it.
    rows : list of list of float
        Loss, divisor and rows of each step of the last group.
    phases : dict of str to float
        Mean seconds per step of the last group, at least for :data:`GROUP_PHASES`.
    """

    def __init__(self, ranks: int, *, weighted: bool, loss_is_sum: bool):
        self._rule = LossRule(weighted, loss_is_sum)
        self.of_ranks = [EpochSums() for _ in range(ranks)]
        self.exchanges = [StepSums() for _ in range(ranks)]
        self._steps, self._totals = 0, dict.fromkeys(_OF_STEPS, 0.0)
        self.dropped = {"dropped_contributions": 0, "dropped_rows": 0, "discarded_steps": 0}
        self.added: dict[str, Any] = {}
        self.memory = [0] * ranks
        self.rows: list[list[float]] = []
        self.phases: dict[str, float] = {}

    def to_json(self) -> dict:
        """Return the metric sums as JSON-serializable values, for a mid-epoch checkpoint."""
        return {
            "sums": [sums.to_json() for sums in self.of_ranks],
            "dropped": dict(self.dropped),
            "added": {name: np.asarray(values).tolist() for name, values in self.added.items()},
        }

    def restore(self, manifest: dict) -> None:
        """Restore metric sums from a checkpoint's manifest, even if another backend wrote it."""
        self.of_ranks = [EpochSums(**values) for values in manifest["sums"]]
        self.dropped.update(manifest.get("dropped", {}))
        self.added = {name: np.asarray(v) for name, v in manifest.get("added", {}).items()}

    def add(self, records: Sequence[Sequence[dict]], seconds: float, began_at: float) -> None:
        """Add the records of a group of steps.

        Parameters
        ----------
        records : list of list of dict
            Result of :meth:`~bigdl.orca.parameter_layer.plan.Transport.run`.
        seconds : float
            Duration of the group.
        began_at : float
            Start of the group, in seconds since 1970.
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
            exchange_s = max(0.0, seconds - source.get("compute_s", 0.0))
            sums.add(*parts, source["rows"], step_s=seconds, exchange_s=exchange_s, **times)
            self.exchanges[rank].add(exchange_s)
            loss, counted = loss + parts[0], counted + parts[1]
        return [loss, counted, float(batch_rows)]

    def mean(self) -> float | None:
        """Return the mean loss so far."""
        return EpochSums.total(self.of_ranks).mean()

    def entry(self) -> dict | None:
        """Return the metrics of the epoch, or None if no step was run.

        In addition to the fields of other backends, ``profile`` has the mean seconds per step of
        each phase, ``sync_s`` (the time other than ``compute_s``), and ``bytes_per_step``, the size
        of the gradients that all ranks sent.
        """
        metrics = EpochSums.merged(self.of_ranks)
        if metrics is None or not self._steps:
            return metrics
        profile = metrics["profile"]
        profile.update({name: total / self._steps for name, total in self._totals.items()})
        profile["sync_s"] = profile["step_s"] - profile["compute_s"]
        profile["ended_at"] = time.time()
        return metrics


def _waits(owners, ended: float) -> list[float]:
    """Return the waiting time before each stage of a step, in seconds."""
    sources = owners[0]["sources"]
    computed = max(source["ended_at"] for source in sources)
    return [
        max(0.0, statistics.fmean(source["began_at"] for source in sources) - ended),
        max(0.0, statistics.fmean(owner["began_at"] for owner in owners) - computed),
        statistics.fmean(owner.get("wait_s", 0.0) for owner in owners),
    ]


GROUP_PHASES = (*PHASES, "rest_s", "step_s")
"""Mean seconds per step that are recorded for every group: phases, remainder, whole step."""


def phase_summaries(rows: list[list[float]]) -> dict[str, list[list[float]]]:
    """Return a dict from tag to a list with ``[step, seconds, time]`` of every group of steps.

    A tag is ``"Phases/"`` and a name of :data:`PHASES`, ``"rest_s"`` (the remainder of the whole
    step) or ``"step_s"``.
    """
    return summaries_of(rows, [f"Phases/{name}" for name in GROUP_PHASES])


# -- the chart ------------------------------------------------------------------------------------

_LABELS = [name.removesuffix("_s").replace("_", " ") for name in GROUP_PHASES[:-1]]
_BARS = 120  # maximum; a longer training averages several groups per bar


def draw_phases(rows: Sequence[Sequence[float]], path: Path) -> None:
    """Draw a chart with one stacked bar per group: milliseconds per step and phase.

    Parameters
    ----------
    rows : sequence of sequence of float
        Records of :data:`GROUP_PHASES`.
    path : Path
        See :meth:`bigdl.common.drawing.Chart.write`.
    """
    groups, together = np.asarray(rows), -(-len(rows) // _BARS)
    bars = [groups[first : first + together] for first in range(0, len(rows), together)]
    steps = [int(bar[-1, 0]) for bar in bars]
    times = np.array([1e3 * bar[:, 2:-1].mean(axis=0) for bar in bars])
    panel = "ms per step", dict(zip(_LABELS, times.T.tolist(), strict=True)), True
    table = [
        {"step": step, **dict(zip(_LABELS, phases, strict=True))}
        for step, phases in zip(steps, times, strict=True)
    ]
    chart = PanelChart("step", steps, [panel], 860, 420)
    chart.write(path, "Phases of the parameter layer", table_of(table))
