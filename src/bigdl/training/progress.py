"""Progress of a fit or a search, shown by the driver: a bar on a terminal, else lines."""

import importlib.util
import sys
import time
from collections.abc import Sequence
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


def in_notebook() -> bool:
    """Return True in the kernel of a notebook."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None and hasattr(python, "get_ipython") else None
    # that ipykernel is imported says nothing
    return getattr(shell, "kernel", None) is not None


def progress_form(verbose: int | str = "auto") -> str:
    """Return ``"bar"``, ``"lines"`` or ``"none"``.

    Parameters
    ----------
    verbose : int or str
        As of Keras: 0 for nothing, 2 for a line per epoch, else a bar in a terminal or a notebook,
        and a line per epoch elsewhere.
    """
    if verbose in (0, 2):
        return "lines" if verbose else "none"
    is_terminal = bool(getattr(sys.stderr, "isatty", lambda: False)())
    return "bar" if is_terminal or in_notebook() else "lines"


def progress_of(form: str) -> "Progress":
    """Return what shows a fit in a form of :func:`progress_form`."""
    return {"bar": ProgressBar, "lines": EpochLines, "none": Progress}[form]()


class Progress:
    """Shows nothing."""

    def start(self, workers: int) -> None:
        """Take over how many workers are started, before their start."""

    def update(self, progress: dict[str, Any]) -> None:
        """Take over what rank 0 reported.

        Parameters
        ----------
        progress : dict
            ``epoch`` (finished in this fit), ``epochs`` (of this fit), ``step`` (finished in this
            epoch), ``steps`` (of an epoch), ``loss`` (a number or None), and ``first`` and
            ``last``: figures of the epochs that were finished first and last, or None.
        """

    def finish(self, figures: Sequence[dict[str, Any]]) -> None:
        """Take over the figures of all epochs."""

    def close(self) -> None:
        """Leave what is shown as it stands."""


class ProgressBar(Progress):
    """Steps of a fit as a bar of tqdm."""

    def __init__(self) -> None:
        self._bar: Any = None  # of tqdm

    def start(self, workers: int) -> None:
        _say_start(workers)

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
            # the time before the first report is that of the start, not of steps
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
    """A line of figures on standard error after an epoch.

    A worker reports twice a second, so of shorter epochs not every one is shown; the first one and
    the last one are shown in any case.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = self._epochs = 0

    def start(self, workers: int) -> None:
        _say_start(workers)

    def update(self, progress: dict[str, Any]) -> None:
        last, self._epochs = progress["last"], progress["epochs"]
        if last is not None and last["epoch"] > self._shown:
            self._show(last, progress["first"])

    def finish(self, figures: Sequence[dict[str, Any]]) -> None:
        self._epochs = self._epochs or len(figures)
        if len(figures) > self._shown:
            first, last = headline(figures[0]), headline(figures[-1])
            self._show({**last, "epoch": len(figures)}, {**first, "epoch": 1})

    def _show(self, last: dict[str, Any], first: dict[str, Any] | None) -> None:
        if not self._shown and first is not None and first["epoch"] < last["epoch"]:
            print(self._line(first), file=sys.stderr)
        self._shown = last["epoch"]
        seconds = time.monotonic() - self._started
        print(f"{self._line(last)} ({seconds:.1f} s)", file=sys.stderr, flush=True)

    def _line(self, figures: dict[str, Any]) -> str:
        values = [f"{name} {value:.4g}" for name, value in figures.items() if name != "epoch"]
        return f"epoch {figures['epoch']}/{self._epochs}: {', '.join(values)}"


def _say_start(workers: int) -> None:
    """Tell what takes the seconds until the first line."""
    text = f"starting {workers} worker{'s' if workers != 1 else ''}"
    print(text, file=sys.stderr, flush=True)


def items_progress(unit: str, total: int, *, bar: bool = False) -> "ItemBar | ItemLines":
    """Return what shows the methods or trials of a search, and how much time is left.

    Parameters
    ----------
    unit : str
        What one item is, e.g. ``"trial"``.
    total : int
        Number of items.
    bar : bool
        True shows a bar in any case; by default there are lines where there is no terminal.
    """
    return ItemBar(unit, total) if bar or progress_form() == "bar" else ItemLines(unit, total)


class ItemBar:
    """Items of a search as a bar of tqdm, which shows the time that is left.

    Parameters
    ----------
    unit : str
    total : int
    """

    def __init__(self, unit: str, total: int):
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit=unit)

    def begin(self, name: str) -> None:
        """Show the name of the item that begins."""
        self._bar.set_description(name)

    def end(self, text: str) -> None:
        """Show the outcome of an item."""
        self._bar.set_postfix_str(text)
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


class ItemLines:
    """A line on standard error for each item of a search, with the time that is left.

    Parameters
    ----------
    unit : str
    total : int
    done : int
        Items that had ended before, of a search that goes on.
    """

    def __init__(self, unit: str, total: int, done: int = 0):
        self.total = total
        self._unit, self._done, self._before = unit, done, done
        self._started = time.monotonic()
        self._name = ""

    def begin(self, name: str) -> None:
        """Note the name of the item that begins; the first one gets a line of its own."""
        self._name = f" {name}"
        if not self._done:
            self._print(f"{self._unit} 1/{self.total}{self._name} begins")

    def end(self, text: str) -> None:
        """Print the outcome of an item."""
        self._done += 1
        elapsed = time.monotonic() - self._started
        left = time_left(elapsed, self._done - self._before, self.total - self._before)
        place = f"{self._unit} {self._done}/{self.total}{self._name}"
        self._print(f"{place}: {text} ({in_words(elapsed)}{left})")

    def close(self) -> None:
        """Nothing is open."""

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def time_left(elapsed: float, done: int, total: int) -> str:
    """Return the time that is left after some of the items, as the end of a line.

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
    """Return a duration in its largest unit."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
