"""The state of a TableLoader in the checkpoints of Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import MissingExtraError
from bigdl.data.loader import TableLoader

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingExtraError(
        "transformers is not installed; run: pip install transformers accelerate",
        package="transformers",
    ) from error

__all__ = ["TableLoaderCallback"]


class TableLoaderCallback(TrainerCallback, ExportableState):
    """Keep a loader's state in ``trainer_state.json``, and go on from it after a resume.

    The Trainer gets its batches from a ``get_train_dataloader`` that returns the loader, and
    ``ignore_data_skip=True``: it would skip the batches that it has seen otherwise, by a DataLoader
    of its own.

    Parameters
    ----------
    loader : TableLoader

    Examples
    --------
    >>> import pyarrow as pa
    >>> from bigdl.data import TableLoader
    >>> from bigdl.data.hugging_face import TableLoaderCallback
    >>> loader = TableLoader(pa.table({"x": range(10)}), batch_size=4)
    >>> callback = TableLoaderCallback(loader)
    >>> callback.state()["attributes"]["loader_state"]["next"]
    0
    """

    def __init__(self, loader: TableLoader):
        self.loader = loader

    def state(self) -> dict[str, Any]:
        """Return what the Trainer writes with each checkpoint."""
        return {"args": {}, "attributes": {"loader_state": self.loader.state_dict()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the state that the Trainer has read, if it goes on from a checkpoint."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and saved is not None:
            saved = saved[-1] if isinstance(saved, list) else saved
            self.loader.load_state_dict(saved["attributes"]["loader_state"])
