"""A progress bar on the driver, fed by the workers' heartbeat; terminal and notebook alike."""

from __future__ import annotations

import sys

__all__ = ["ProgressBar", "is_interactive"]


def is_interactive() -> bool:
    """Whether somebody watches: a terminal or a notebook."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if hasattr(python, "get_ipython") else None
    if getattr(shell, "kernel", None) is not None:  # that ipykernel is imported says nothing
        return True
    return bool(getattr(sys.stderr, "isatty", lambda: False)())


class ProgressBar:
    """Steps of a fit.

    Parameters
    ----------
    show : bool
        False makes every method do nothing.
    """

    def __init__(self, show: bool):
        self._show = show
        self._bar = None

    def update(self, progress: dict) -> None:
        """Take over what rank 0 reported.

        Parameters
        ----------
        progress : dict
            ``epoch`` (finished in this fit), ``epochs`` (of this fit), ``step`` (finished in this
            epoch), ``steps`` (of an epoch), ``loss`` (a number or None).
        """
        if not self._show:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc="fit", unit="step", leave=True)
        bar = self._bar
        bar.total = progress["epochs"] * progress["steps"]
        bar.n = progress["epoch"] * progress["steps"] + progress["step"]
        text = f"epoch {progress['epoch'] + 1}/{progress['epochs']}"
        bar.set_description(text, refresh=False)
        if progress["loss"] is not None:
            bar.set_postfix(loss=f"{progress['loss']:.4f}", refresh=False)
        bar.refresh()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
