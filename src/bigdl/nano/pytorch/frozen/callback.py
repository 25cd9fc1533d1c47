"""The frozen prefix in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_collate

from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.frozen.prefix import FrozenPrefix, accelerate_frozen_prefix

__all__ = ["FrozenPrefixCallback"]

_SAMPLE_ROWS = 2  # two, since batch normalisation in train mode refuses one

Callback = require("pytorch_lightning", "nano").Callback


class FrozenPrefixCallback(Callback):
    """Run the frozen part of the model fast while it is fitted.

    Modes, weights and ``requires_grad`` are those at the start of training, after a checkpoint was
    loaded. Afterwards the model is as it was.

    Parameters
    ----------
    sample : optional
        A batch of the model's input; by default two samples of the training data.
    **options
        Of :func:`accelerate_frozen_prefix`. int8 is calibrated on the training data by default.

    Attributes
    ----------
    prefix : FrozenPrefix or None
        That of the last fit; its ``report()`` says what was done.
    """

    def __init__(self, sample: Any = None, **options: Any):
        self.sample, self.options = sample, options
        self.prefix: FrozenPrefix | None = None

    def on_train_start(self, trainer, pl_module) -> None:
        options = dict(self.options)
        loader = trainer.train_dataloader
        if options.get("precision") == "int8":
            options.setdefault("calib_data", loader)
        sample = self._sample_of(loader) if self.sample is None else self.sample
        self.prefix = accelerate_frozen_prefix(pl_module, sample, **options)

    def _sample_of(self, loader: Any) -> Any:
        dataset = getattr(loader, "dataset", None)
        if not hasattr(dataset, "__getitem__"):
            raise UsageError("The training data have no samples by index; pass sample")
        collate = getattr(loader, "collate_fn", None) or default_collate
        with torch.random.fork_rng(devices=[]):  # random transforms draw
            return collate([dataset[i] for i in range(min(_SAMPLE_ROWS, len(dataset)))])

    def on_train_end(self, trainer, pl_module) -> None:
        self._release()

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._release()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "prefix": None}  # runtimes do not travel to other processes

    def _release(self) -> None:
        if self.prefix is not None:
            self.prefix.release()
