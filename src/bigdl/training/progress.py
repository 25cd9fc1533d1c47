"""Progress display of a fit or a search in the driver: a bar on a terminal, else lines."""

import contextlib
import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bigdl.training.metrics import headline

__all__ = [
    "EpochLines",
    "ItemBar",
    "ItemLines",
    "Progress",
    "ProgressBar",
    "items_progress",
    "progress_form",
    "progress_of",
]

_SILENCE = 2.0  # seconds; a shorter wait needs no line


def in_notebook() -> bool:
    """Return True in a notebook kernel."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None and hasattr(python, "get_ipython") else None
    # an imported ipykernel does not prove that this is a notebook
    return getattr(shell, "kernel", None) is not None


def progress_form(verbose: int | str = "auto") -> str:
    """Return ``"bar"``, ``"lines"`` or ``"none"`` for a value of ``verbose=``.

    Parameters
    ----------
    verbose : int or str
        As in Keras: 0 shows nothing, 2 a line per epoch. Other values show a bar in a terminal or a
        notebook, and a line per epoch elsewhere.
    """
    if verbose in (0, 2):
        return "lines" if verbose else "none"
    is_terminal = bool(getattr(sys.stderr, "isatty", lambda: False)())
    return "bar" if is_terminal or in_notebook() else "lines"


def progress_of(form: str) -> "Progress":
    """Create a fit's progress display from a result of :func:`progress_form`."""
    return {"bar": ProgressBar, "lines": EpochLines, "none": Progress}[form]()


class Progress:
    """Base class of progress displays; it shows nothing itself."""

    def start(self, workers: int) -> None:
        """Report the number of workers before they start."""

    def phase(self, name: str) -> None:
        """Report what the workers do before their first step."""

    def update(self, progress: dict[str, Any]) -> None:
        """Update the display with a report of rank 0.

        Parameters
        ----------
        progress : dict
            ``epoch`` (finished in this fit), ``epochs`` (of this fit), ``step`` (finished in this
            epoch), ``steps`` (of an epoch), ``loss`` (a number or None), and ``first`` and
            ``last``: metrics of the first and the last finished epoch, or None.
        """

    def finish(self, metrics: Sequence[dict[str, Any]]) -> None:
        """Report the metrics of all epochs at the end of a fit."""

    def close(self) -> None:
        """Close the display and leave its last state visible."""


class ProgressBar(Progress):
    """Progress bar that shows the steps of a fit with tqdm."""

    def __init__(self) -> None:
        self._bar: Any = None  # of tqdm

    def start(self, workers: int) -> None:
        _say_start(workers)

    def phase(self, name: str) -> None:
        if self._bar is None:
            say(name)

    def update(self, progress: dict[str, Any]) -> None:
        done = progress["epoch"] * progress["steps"] + progress["step"]
        total = progress["epochs"] * progress["steps"]
        text = f"epoch {progress['epoch'] + 1}/{progress['epochs']}"
        if self._bar is None:
            # without ipywidgets tqdm's bar for notebooks only warns
            if in_notebook() and importlib.util.find_spec("ipywidgets"):
                from tqdm.notebook import tqdm
            else:
                from tqdm.std import tqdm
            # the time before the first report is startup, not steps
            self._bar = tqdm(desc=text, total=total, unit="step", initial=done)
        bar = self._bar
        bar.total, bar.n = total, done
        bar.set_description(text, refresh=False)
        if progress["loss"] is not None:
            bar.set_postfix(loss=f"{progress['loss']:.4f}", refresh=False)
        bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class EpochLines(Progress):
    """One line of metrics per epoch, on standard error.

    Workers report twice a second, so some epochs shorter than that are not shown. The first and the
    last epoch always are.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = self._epochs = 0

    def start(self, workers: int) -> None:
        _say_start(workers)

    def phase(self, name: str) -> None:
        say(name)

    def update(self, progress: dict[str, Any]) -> None:
        last, self._epochs = progress["last"], progress["epochs"]
        if last is not None and last["epoch"] > self._shown:
            self._show(last, progress["first"])

    def finish(self, metrics: Sequence[dict[str, Any]]) -> None:
        self._epochs = self._epochs or len(metrics)
        if len(metrics) > self._shown:
            first, last = headline(metrics[0]), headline(metrics[-1])
            self._show({**last, "epoch": len(metrics)}, {**first, "epoch": 1})

    def _show(self, last: dict[str, Any], first: dict[str, Any] | None) -> None:
        if not self._shown and first is not None and first["epoch"] < last["epoch"]:
            print(self._line(first), file=sys.stderr)
        self._shown = last["epoch"]
        seconds = time.monotonic() - self._started
        print(f"{self._line(last)} ({seconds:.1f} s)", file=sys.stderr, flush=True)

    def _line(self, metrics: dict[str, Any]) -> str:
        values = [f"{name} {value:.4g}" for name, value in metrics.items() if name != "epoch"]
        return f"epoch {metrics['epoch']}/{self._epochs}: {', '.join(values)}"


def _say_start(workers: int) -> None:
    """Print that workers are starting, since the first progress line can take seconds."""
    say(f"starting {workers} worker{'s' if workers != 1 else ''}")


def say_phase(phase: str) -> None:
    """Print the name of a phase unless the level of BigDL's loggers hides progress."""
    if progress_level() <= logging.INFO:
        say(phase)


@contextlib.contextmanager
def slow_phase(phase: str) -> Iterator[None]:
    """Print the name of a phase if it takes longer than two seconds."""
    timer = threading.Timer(_SILENCE, say_phase, [phase])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def progress_level() -> int:
    """Return the log level that decides about progress displays; 0 if the program set none."""
    # the root's level is for log lines
    return logging.getLogger("bigdl.orca").level or logging.getLogger("bigdl").level


def say(phase: str) -> None:
    """Print the name of a phase that can take seconds, on standard error."""
    print(phase, file=sys.stderr, flush=True)


def items_progress(unit: str, total: int, *, bar: bool = False) -> "ItemBar | ItemLines":
    """Create the progress display of a search, with an estimate of the remaining time.

    Parameters
    ----------
    unit : str
        Name of one item, e.g. ``"trial"``.
    total : int
        Number of items.
    bar : bool
        True always shows a bar; by default a process without a terminal shows lines.
    """
    return ItemBar(unit, total) if bar or progress_form() == "bar" else ItemLines(unit, total)


class ItemBar:
    """Progress bar that shows a search's items and the estimated remaining time with tqdm.

    Parameters
    ----------
    unit : str
    total : int
    """

    def __init__(self, unit: str, total: int):
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit=unit)

    def begin(self, name: str) -> None:
        """Show the name of the item that is starting."""
        self._bar.set_description(name)

    def end(self, text: str) -> None:
        """Show the result of an item and advance the bar."""
        self._bar.set_postfix_str(text)
        self._bar.update()

    def close(self) -> None:
        """Close the bar and leave its last state visible."""
        self._bar.close()


class ItemLines:
    """One line per item of a search on standard error, with an estimate of the remaining time.

    Parameters
    ----------
    unit : str
    total : int
    done : int
        Items that were finished before a search was resumed.
    """

    def __init__(self, unit: str, total: int, done: int = 0):
        self.total = total
        self._unit, self._done, self._before = unit, done, done
        self._started = time.monotonic()
        self._name = ""

    def begin(self, name: str) -> None:
        """Print the name of the item that is starting, with the remaining time if it is known."""
        self._name = f" {name}"
        left = self._left()[1] if self._done > self._before else ""
        say(f"measuring {self._done + 1} of {self.total} {self._unit}s: {name}{left}")

    def end(self, text: str) -> None:
        """Print the result of an item."""
        self._done += 1
        elapsed, left = self._left()
        item = f"{self._unit} {self._done}/{self.total}{self._name}"
        say(f"{item}: {text} ({in_words(elapsed)}{left})")

    def _left(self) -> tuple[float, str]:
        """Return the elapsed seconds and the text of the remaining time."""
        elapsed = time.monotonic() - self._started
        return elapsed, time_left(elapsed, self._done - self._before, self.total - self._before)

    def close(self) -> None:
        """Do nothing, since lines need no closing."""


def time_left(elapsed: float, done: int, total: int) -> str:
    """Format the estimated remaining time after `done` of `total` items.

    Examples
    --------
    >>> from bigdl.training.progress import time_left
    >>> time_left(30.0, 2, 11)
    '; about 2 min left'
    >>> time_left(30.0, 11, 11)
    ''
    """
    left = (total - done) * elapsed / max(done, 1)
    return f"; about {in_words(left)} left" if done < total else ""


def in_words(seconds: float) -> str:
    """Format a duration in its largest unit."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
