"""A bar that shows how far a search is."""

from __future__ import annotations

from bigdl.nano.acceleration.search.trial import Trial

__all__ = ["Progress"]


class Progress:
    """A progress bar on stderr; a context, and a listener of :func:`walk.search`.

    Parameters
    ----------
    count : int
        Number of methods.
    always : bool
        Show it also where stderr is not a terminal.
    """

    def __init__(self, count: int, always: bool):
        from tqdm import tqdm

        self._bar = tqdm(total=count, unit="method", disable=False if always else None)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()

    def __call__(self, event: str | Trial) -> None:
        if isinstance(event, str):
            self._bar.set_description(event)
            return
        self._bar.set_postfix_str(event.status)
        self._bar.update()
