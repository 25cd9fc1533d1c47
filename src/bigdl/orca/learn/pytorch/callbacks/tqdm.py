"""A progress bar."""

from __future__ import annotations

from bigdl.orca.learn.pytorch.callbacks.base import Callback

__all__ = ["TqdmCallback"]


class TqdmCallback(Callback):
    """Show a progress bar on the driver, also where nobody seems to watch; as ``use_tqdm=True``."""
