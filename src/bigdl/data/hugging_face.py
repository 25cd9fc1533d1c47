"""Callback that saves a TableLoader's state in checkpoints of the Hugging Face Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bigdl.common.errors import MissingExtraError
from bigdl.data.loader import TableLoader

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainingArguments

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
    """Callback that saves a loader's state in ``trainer_state.json`` and restores it on resume.

    Override the Trainer's ``get_train_dataloader`` to return the loader, and pass
    ``ignore_data_skip=True``. Without it, the Trainer itself skips the batches seen before the
    checkpoint.

    Parameters
    ----------
    loader : TableLoader
        Loader that the Trainer iterates over.

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
        """Return the loader state for the Trainer to save with each checkpoint."""
        return {"args": {}, "attributes": {"loader_state": self.loader.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any
    ) -> None:  # kwargs: the dataloader and others
        """Load the loader state of the checkpoint that the Trainer resumes from."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and saved is not None:
            saved = saved[-1] if isinstance(saved, list) else saved
            self.loader.load_state_dict(saved["attributes"]["loader_state"])
