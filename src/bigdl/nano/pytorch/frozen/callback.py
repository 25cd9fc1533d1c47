"""The frozen prefix in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.frozen.prefix import FrozenPrefix, accelerate_frozen_prefix

__all__ = ["FrozenPrefixCallback"]

_SAMPLE_ROWS = 2  # two, since batch normalisation in train mode refuses one

Callback = require("pytorch_lightning", "nano").Callback


class FrozenPrefixCallback(Callback):
    """Run the frozen part of the model fast while it is fitted.

    Modes, weights and ``requires_grad`` are those at the start of training, after a checkpoint was
    loaded. Afterwards the model is as it was. One line of the log says what was done, and the
    ``settings`` of Nano's Trainer name it.

    Parameters
    ----------
    sample : optional
        A batch of the model's input; by default two samples of the training data, or their first
        batch where samples have no index.
    **options
        Of :func:`accelerate_frozen_prefix`. int8 is calibrated on the training data by default, if
        their samples have an index.

    Attributes
    ----------
    prefix : FrozenPrefix or None
        That of the last fit; None if it ran in other processes, where it stays.
    report : str or None
        What was done in the last fit, as :meth:`FrozenPrefix.report` said at its end. With several
        processes that of the first.
    """

    def __init__(self, sample: Any = None, **options: Any):
        self.sample, self.options = sample, options
        self.prefix: FrozenPrefix | None = None
        self.report: str | None = None

    def on_fit_start(self, trainer, pl_module) -> None:
        self.prefix = self.report = None

    def on_train_start(self, trainer, pl_module) -> None:
        loader = trainer.train_dataloader
        sample = self._sample_of(loader) if self.sample is None else self.sample
        if sample is not None:
            self._accelerate(trainer, sample, loader)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        # Another iterator over data without an index could take rows away from the training.
        if self.prefix is None:
            self._accelerate(trainer, batch, trainer.train_dataloader)

    def _accelerate(self, trainer, sample: Any, loader: Any) -> None:
        options = dict(self.options)
        if options.get("precision") == "int8" and "calib_data" not in options:
            if not _has_index(loader):
                raise UsageError(
                    "The training data have no samples by index, so that a pass over them for int8 "
                    "could take rows away from the training; pass calib_data"
                )
            options["calib_data"] = loader
        self.prefix = accelerate_frozen_prefix(trainer.lightning_module, sample, **options)
        self.report = self.prefix.report()
        self._tell(trainer)

    def _sample_of(self, loader: Any) -> Any:
        """Some samples as a batch; None if they have no index."""
        if not _has_index(loader):
            return None
        dataset = loader.dataset
        with torch.random.fork_rng(devices=[]):  # random transforms draw
            rows = [dataset[index] for index in range(min(_SAMPLE_ROWS, len(dataset)))]
            return (loader.collate_fn or default_collate)(rows)

    def _tell(self, trainer) -> None:
        from pytorch_lightning.utilities.rank_zero import rank_zero_info

        methods = dict.fromkeys(segment.method for segment in self.prefix.segments)
        phrase = f"frozen prefix {' and '.join(methods)}" if methods else "no frozen prefix"
        rank_zero_info(f"{phrase.capitalize()}: {'; '.join(self.report.splitlines())}")
        strategy = trainer.strategy
        if hasattr(strategy, "settings"):  # of Nano's Trainer
            strategy.settings = (*strategy.settings, phrase)

    def on_train_end(self, trainer, pl_module) -> None:
        self._release()

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._release()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "prefix": None}  # runtimes do not travel to other processes

    def _release(self) -> None:
        if self.prefix is not None:
            self.prefix.release()
            self.report = self.prefix.report()


def _has_index(loader: Any) -> bool:
    """Whether a loader makes batches of samples that a dataset gives by their number."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return False
    batches = getattr(loader, "batch_sampler", None) is not None
    return batches and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
