"""The walk through the methods of a search."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigdl.common.errors import UsageError
from bigdl.common.memory import available_memory
from bigdl.nano.acceleration.search.bench import Bench
from bigdl.nano.acceleration.search.isolation import InThisProcess, Isolated
from bigdl.nano.acceleration.search.trial import Plan, Trial

__all__ = ["Limits", "search"]

_LEAST_TIME = 300.0  # seconds
_TIMES_OF_ORIGINAL = 20
_SHARE_OF_MEMORY = 0.9


@dataclass(frozen=True)
class Limits:
    """What one method may take.

    Attributes
    ----------
    seconds : float or None
        None: 20 times what the original took, and at least five minutes; the original may take as
        long as it needs.
    memory : int or None
        Bytes of resident memory of the process in which methods are tried; None: 90 % of what is
        free at the beginning.
    """

    seconds: float | None = None
    memory: int | None = None

    def after(self, original: Trial) -> float:
        """Seconds for each method but the original."""
        if self.seconds is not None:
            return self.seconds
        return max(_LEAST_TIME, _TIMES_OF_ORIGINAL * original.seconds)

    @property
    def bytes(self) -> int:
        """Bytes of resident memory."""
        return self.memory or int(_SHARE_OF_MEMORY * available_memory())


def search(
    bench: Bench,
    names: Sequence[str],
    plan: Plan,
    limits: Limits,
    directory: Path,
    *,
    threads: int,
    show: bool = False,
    progress: Callable[[Trial | str], None] = lambda event: None,
) -> list[Trial]:
    """Try methods one after the other.

    Parameters
    ----------
    bench : Bench
    names : sequence of str
        The original first.
    plan : Plan
    limits : Limits
    directory : Path
        Gets a directory ``<name>`` for each model that was saved.
    threads : int
        Threads of the numeric libraries in the process in which methods are tried.
    show : bool
        Whether the output of that process appears.
    progress : callable
        Told the name of each method as its trial begins, and the trial when it is over.

    Returns
    -------
    list of Trial
        If the original does not work, it is the only one.
    """
    files = directory / ".work"
    files.mkdir()
    runner = _runner(bench, plan, files, threads, limits, show)
    trials: list[Trial] = []
    try:
        for name in names:
            progress(name)
            seconds = limits.after(trials[0]) if trials else limits.seconds
            trial = runner.run(name, directory / name, seconds)
            if plan.objective == "memory" and trial.usable:
                runner.weigh(trial, directory / name, seconds)
            if not trial.saved:
                shutil.rmtree(directory / name, ignore_errors=True)
            trials.append(trial)
            if trial.usable:
                trial.on_the_scale_of(trials[0])
            progress(trial)
            if not trials[0].usable:
                break
    finally:
        runner.close()
        shutil.rmtree(files, ignore_errors=True)
    return trials


def _runner(bench, plan, files, threads, limits, show) -> Isolated | InThisProcess:
    try:
        return Isolated(bench, plan, files, threads, limits.bytes, show)
    except UsageError as error:
        warnings.warn(
            "Methods are tried in this process, where a crash or a hang of one ends the whole "
            f"search, as the model, the data and the metric have to go to another one and {error}",
            stacklevel=4,
        )
        return InThisProcess(bench, plan)
