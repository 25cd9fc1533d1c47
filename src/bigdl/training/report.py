"""Report of a fit: metrics, durations of each worker, warnings, and advice from measured shares."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.display import call_text
from bigdl.common.errors import UsageError
from bigdl.common.pages import Page
from bigdl.training.chart import FitChart
from bigdl.training.journal import FitJournal
from bigdl.training.metrics import headline
from bigdl.training.progress import in_notebook, in_words

__all__ = ["FitReport", "LiveReport"]

logger = logging.getLogger("bigdl.orca")

_PHASE_COLOURS = (  # fetch, forward, backward and exchange as in the chart of the metrics
    *("#1f77b4", "#17a2b8", "#ff7f0e", "#2ca02c", "#d62728"),
    *("#9e9e9e", "#9467bd", "#8c564b", "#bcbd22"),
)
PHASES = {
    "fetch_s": "loading batches",
    "move_s": "moving to the device",
    "forward_s": "forward",
    "backward_s": "backward and update",
    "exchange_s": "exchanging gradients",
    "wait_s": "waiting for the slowest worker",
    "checkpoint_s": "checkpoints",
    "evaluate_s": "validation",
    "other_s": "callbacks and other",
}
"""Phases of an epoch and their names in the report."""

_COLOURS = dict(zip(PHASES.values(), _PHASE_COLOURS, strict=True))

_MAX_SENTENCES = 3
_WORTH = 2.0  # a smaller saving needs no advice
_FIRST_START_S = 20.0  # Python workers, their imports and the first job of Spark, on a busy machine
_REFRESH = 5
_INTERVAL = 1.0  # between two writes of a report
_BUSY = ("fetch_s", "move_s", "forward_s", "backward_s")


@dataclass(frozen=True, repr=False)
class FitReport:
    """Report of a fit as a web page that needs no other file; a notebook displays it.

    Parameters
    ----------
    journal : FitJournal
    earlier : sequence of dict
        History entries of the epochs before the fit.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> metrics = estimator.fit((x, x), epochs=2)
    >>> report = estimator.report("fit.html")
    >>> len(report.advice()) <= 3
    True
    """

    journal: FitJournal
    earlier: Sequence[Mapping[str, Any]] = ()

    def __repr__(self) -> str:
        ended_at, began_at = self.journal.ended_at, self.journal.began_at
        fields = {"epochs": len(self.earlier) + len(self.journal.epochs)}
        seconds = ended_at - began_at if ended_at else None
        return call_text("FitReport", {**fields, "seconds": seconds, "advice": self.advice()})

    # -- measurements --------------------------------------------------------------------------

    def times(self) -> list[dict[str, float]]:
        """Return the rows, peak memory and durations of each rank, summed over the epochs.

        Returns
        -------
        list of dict
            ``rows``, ``memory`` in bytes, seconds by the names in :data:`PHASES`, and ``wall_s``.
        """
        out: list[dict[str, float]] = []
        for record in self.journal.epochs.values():
            ranks = record["ranks"]
            if len(ranks) != len(out):  # workers were lost: the last ones count
                out = [dict.fromkeys(each, 0.0) for each in ranks]
            for total, each in zip(out, ranks, strict=True):
                for name, value in each.items():
                    total[name] = (
                        max(total[name], value) if name == "memory" else (total[name] + value)
                    )
        return out

    def timeline(self) -> dict[str, float]:
        """Return the seconds of the parts of the fit: start, reading, building, epochs and end."""
        journal = self.journal
        end = journal.ended_at or time.time()
        lost = journal.attempt_at - journal.began_at
        ready, trained = journal.ready_at or end, journal.trained_at or end
        begun = max((each["began_at"] for each in journal.workers), default=ready)
        read = max((each["read_s"] for each in journal.workers), default=0.0)
        parts = {
            "lost attempts": lost,
            "starting the workers": begun - journal.attempt_at,
            "reading the input": read,
            "building the model": ready - begun - read,
            "epochs": trained - ready,
            "sending the result": end - trained,
        }
        return {name: seconds for name, seconds in parts.items() if seconds > 0}

    def advice(self, worth_s: float = _WORTH) -> list[str]:
        """Return up to three sentences on how to make the fit faster, the largest saving first.

        Parameters
        ----------
        worth_s : float
            Smallest saving in seconds that is worth a sentence.

        Returns
        -------
        list of str
            Empty if no phase dominates the fit.
        """
        candidates = [*self._advice_on_input(), *self._advice_on_epochs()]
        sentences = sorted(
            ((seconds, text) for seconds, text in candidates if seconds >= worth_s), reverse=True
        )
        return [text for _, text in sentences[:_MAX_SENTENCES]]

    def _advice_on_input(self) -> list[tuple[float, str]]:
        """Return the seconds that could be saved and a sentence, for reading the input."""
        timeline, input_type = self.timeline(), self.journal.facts.get("data")
        if input_type not in _MOVED_ROWS:
            return []
        # Spark computes and moves the rows before and while the workers read them
        seconds = timeline.get("reading the input", 0.0) + timeline.get("starting the workers", 0.0)
        if self.journal.is_first:
            seconds = max(0.0, seconds - _FIRST_START_S)
        share = seconds / (sum(timeline.values()) or 1.0)
        if share < 0.4:
            return []
        text = _MOVED_ROWS[input_type].format(percent=f"{100 * share:.0f}")
        return [(seconds, text)]

    def _advice_on_epochs(self) -> list[tuple[float, str]]:
        """Return the seconds that could be saved and a sentence, for each dominating phase."""
        ranks = self.times()
        wall = max((each["wall_s"] for each in ranks), default=0.0)
        if not wall:
            return []
        mean = {name: sum(each[name] for each in ranks) / len(ranks) for name in PHASES}
        mean["checkpoint_s"] = max(each["checkpoint_s"] for each in ranks)
        facts, candidates = self.journal.facts, []
        for name, least, text in _RULES:
            share = mean[name] / wall
            if share >= least and (name != "fetch_s" or facts.get("data") in _LOADERS):
                candidates.append((mean[name], text(f"{100 * share:.0f}", facts)))
        return [*candidates, *self._advice_on_waiting(ranks, wall)]

    def _advice_on_waiting(
        self, ranks: Sequence[Mapping[str, float]], wall: float
    ) -> list[tuple[float, str]]:
        waiting = max(range(len(ranks)), key=lambda rank: ranks[rank]["wait_s"])
        slow = min(range(len(ranks)), key=lambda rank: ranks[rank]["wait_s"])
        # a rank that writes checkpoints delays the others
        later = ranks[slow]["checkpoint_s"] - ranks[waiting]["checkpoint_s"]
        seconds = ranks[waiting]["wait_s"] - max(0.0, later)
        share = seconds / wall
        if share < 0.25:
            return []
        who = f"Worker {waiting} waits {100 * share:.0f} % of the time for worker {slow}"
        ratio = ranks[slow]["rows"] / max(1.0, ranks[waiting]["rows"])
        if ratio >= 1.25:
            cure = (
                f"which has {ratio:.1f} times as many rows; divide the rows evenly among the "
                "workers"
            )
        else:
            workers = self.journal.workers
            host = workers[slow]["host"] if slow < len(workers) else "its host"
            busy = [sum(each[name] for name in _BUSY) for each in (ranks[slow], ranks[waiting])]
            cure = (
                f"which computes {busy[0] / max(busy[1], 1e-9):.1f} times as long for as many "
                f"rows; see which other programs run on {host}"
            )
        return [(seconds, f"{who}, {cure}.")]

    # -- the page ------------------------------------------------------------------------------

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the report as an HTML file, which replaces an earlier one atomically.

        Parameters
        ----------
        path : str or os.PathLike
            Path or fsspec URL.

        Raises
        ------
        UsageError
            If the file cannot be written.
        """
        is_running = self.journal.began_at > self.journal.ended_at
        self._page().write(path, _REFRESH if is_running else 0)

    def _repr_html_(self) -> str:
        return self._page().fragment()

    def _page(self) -> Page:
        journal = self.journal
        page = Page(f"Fit of {named(journal.facts.get('model'))}")
        entries = [record["entry"] for record in journal.epochs.values()]
        page.add_text(self._summary(entries))
        for sentence in self.advice():
            page.add_text(sentence, "note")
        if entries or self.earlier:
            page.add_heading("Metrics")
            page.add_html(FitChart([*map(dict, self.earlier), *entries])._repr_html_())
        else:
            page.add_text("No epoch has ended yet.")
        if journal.began_at:
            page.add_heading("Time of the fit")
            page.add_bars({"": self.timeline()})
        self._add_times(page)
        if journal.events:
            page.add_heading("Warnings, lost workers and resumes")
            rows = [
                (time.strftime("%H:%M:%S", time.localtime(at)), text) for at, text in journal.events
            ]
            page.add_table((), rows)
        page.add_heading("Settings and versions")
        shown = {**journal.facts, **journal.settings}
        page.add_table((), [(name, value) for name, value in shown.items() if value is not None])
        page.add_table((), list(journal.versions.items()))
        return page

    def _summary(self, entries: Sequence[Mapping[str, Any]]) -> str:
        """Return a line with the state, the duration and the last metrics."""
        journal = self.journal
        if not journal.began_at:
            return f"{len(self.earlier)} epochs, loaded from a checkpoint"
        end = journal.ended_at or time.time()
        state = "ended" if journal.ended_at else "running"
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(journal.began_at))
        parts = [
            f"{state}, {len(entries)} epochs",
            f"began {began}",
            f"{in_words(end - journal.began_at)}",
        ]
        if entries:
            metrics = headline(dict(entries[-1])).items()
            parts += [f"{name} {value:.4g}" for name, value in metrics]
        return " · ".join(parts)

    def _add_times(self, page: Page) -> None:
        """Add the phases and throughput of each worker."""
        ranks = self.times()
        if not ranks:
            return
        page.add_heading("Time of the epochs, by worker")
        bars, rows = {}, []
        for rank, each in enumerate(ranks):
            parts = {label: each[name] for name, label in PHASES.items() if each[name] > 0}
            if not sum(row["backward_s"] for row in ranks):  # Keras measures a step as a whole
                parts = {_WHOLE if k == PHASES["forward_s"] else k: v for k, v in parts.items()}
            bars[f"worker {rank}"] = parts
            worker = dict(self.journal.workers[rank]) if rank < len(self.journal.workers) else {}
            busy = each["wall_s"] or 1.0
            rows.append(
                (
                    rank,
                    worker.get("host", ""),
                    int(each["rows"]),
                    each["rows"] / busy,
                    f"{each['memory'] / 2**20:,.0f} MB",
                    f"{100 * each['wait_s'] / busy:.0f} %",
                )
            )
        page.add_bars(bars, colours={**_COLOURS, _WHOLE: _COLOURS[PHASES["forward_s"]]})
        names = ("worker", "host", "rows", "rows/s", "peak memory", "waiting")
        page.add_table(names, rows)


def named(model: object) -> str:
    """Return the name of a model for a title."""
    return "a model" if model in (None, "<lambda>") else str(model)


class LiveReport:
    """Writer of a fit's report after each epoch, which also updates it in a notebook.

    Parameters
    ----------
    journal : FitJournal
    earlier : sequence of dict
    path : str or os.PathLike

    Raises
    ------
    UsageError
        If the file cannot be written.
    """

    def __init__(
        self,
        journal: FitJournal,
        earlier: Sequence[Mapping[str, Any]],
        path: str | os.PathLike[str],
    ):
        self._report, self._path = FitReport(journal, earlier), path
        self._written_at, self._handle = 0.0, None
        self._report.write(path)
        if in_notebook():
            from IPython.display import display

            self._handle = display(self._report, display_id=True)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Write the report unless the last one is less than a second old; log a failed write."""
        now = time.monotonic()
        if now - self._written_at < _INTERVAL and not self._report.journal.ended_at:
            return
        self._written_at = now
        try:
            self._report.write(self._path)
        except UsageError as error:
            logger.warning("%s", error)
        if self._handle is not None:
            self._handle.update(self._report)


_WHOLE = "forward, backward and update"
_LOADERS = ("DataLoader", "tf.data.Dataset", "Orca Dataset")
_MOVED_ROWS = {
    "Spark DataFrame": (
        "{percent} % of the fit is computing and reading a DataFrame through the JVM before the "
        "first step; write it once with df.write.parquet(path) and pass the path to fit."
    ),
    "SparkXShards": (
        "{percent} % of the fit is computing and reading XShards through the JVM before the first "
        "step; write the rows once as Parquet and pass the path to fit."
    ),
}


def _loading(percent: str, facts: Mapping[str, Any]) -> str:
    if facts.get("data") == "DataLoader":
        cure = "pass num_workers= to the DataLoader, or apply its transforms once before the fit"
    else:
        cure = "add cache() or prefetch() to the dataset, or apply its functions before the fit"
    return f"{percent} % of a step is loading batches; {cure}."


def _exchanging(percent: str, facts: Mapping[str, Any]) -> str:
    if facts.get("backend") == "bigdl":
        cure = "use a larger batch_size or group_size=, or transport='barrier'"
    elif facts.get("framework") == "pytorch":
        cure = "use a larger batch_size, accumulate_grad_batches=, or fewer workers"
    else:
        cure = "use a larger batch_size or fewer workers"
    return f"{percent} % of a step is exchanging gradients between the workers; {cure}."


def _writing(percent: str, facts: Mapping[str, Any]) -> str:
    return (
        f"{percent} % of the time is writing checkpoints; write fewer with checkpoint_trigger=, "
        "such as SeveralIteration(1000)."
    )


def _validating(percent: str, facts: Mapping[str, Any]) -> str:
    is_keras = facts.get("framework") == "keras"
    cure = "pass validation_freq=" if is_keras else "pass fewer rows as validation_data"
    return f"{percent} % of the time is validation; {cure}."


def _calling(percent: str, facts: Mapping[str, Any]) -> str:
    return f"{percent} % of the time is in callbacks, outside of the steps; make them cheaper."


def _moving(percent: str, facts: Mapping[str, Any]) -> str:
    return (
        f"{percent} % of a step is moving rows to the device; pass arrays, a DataFrame or a path, "
        "whose batches are prefetched."
    )


_RULES = (
    ("fetch_s", 0.4, _loading),
    ("move_s", 0.3, _moving),
    ("exchange_s", 0.4, _exchanging),
    ("checkpoint_s", 0.3, _writing),
    ("evaluate_s", 0.6, _validating),
    ("other_s", 0.5, _calling),
)
"""Name of a phase, its smallest share of the epochs that is worth a sentence, and the sentence."""
