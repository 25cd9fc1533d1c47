"""Progress of a fit, shown by the driver: a bar on a terminal, else a line per epoch."""

import importlib.util
import sys
import time
from collections.abc import Sequence
from typing import Any

from bigdl.training.figures import headline

__all__ = ["EpochLines", "Progress", "ProgressBar", "progress_form", "progress_of"]


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

    def update(self, progress: dict) -> None:
        """Take over what rank 0 reported.

        Parameters
        ----------
        progress : dict
            ``epoch`` (finished in this fit), ``epochs`` (of this fit), ``step`` (finished in this
            epoch), ``steps`` (of an epoch), ``loss`` (a number or None), and ``last``: figures of
            the epoch that was finished last, or None.
        """

    def finish(self, figures: Sequence[dict]) -> None:
        """Take over the figures of all epochs."""

    def close(self) -> None:
        """Leave what is shown as it stands."""


class ProgressBar(Progress):
    """Steps of a fit as a bar of tqdm."""

    def __init__(self) -> None:
        self._bar: Any = None  # of tqdm

    def update(self, progress: dict) -> None:
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
    """A line of figures on standard error after an epoch, and in any case after the last one.

    A worker reports twice a second, so of shorter epochs not every one is shown.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = self._epochs = 0

    def update(self, progress: dict) -> None:
        last, self._epochs = progress["last"], progress["epochs"]
        if last is not None and last["epoch"] > self._shown:
            self._show(last)

    def finish(self, figures: Sequence[dict]) -> None:
        self._epochs = self._epochs or len(figures)
        if len(figures) > self._shown:
            self._show({**headline(figures[-1]), "epoch": len(figures)})

    def _show(self, last: dict) -> None:
        self._shown = last["epoch"]
        values = [f"{name} {value:.4g}" for name, value in last.items() if name != "epoch"]
        seconds = time.monotonic() - self._started
        where = f"epoch {self._shown}/{self._epochs}"
        print(f"{where}: {', '.join(values)} ({seconds:.1f} s)", file=sys.stderr, flush=True)
