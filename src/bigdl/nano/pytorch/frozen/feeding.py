"""A training that is fed with cached features instead of images."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, default_collate

from bigdl.common.errors import UsageError, first_line
from bigdl.nano.pytorch.frozen.cache import CachedFeatures
from bigdl.nano.pytorch.frozen.prefix import FrozenPrefix

__all__ = ["Watch", "fed_with_features"]

_ON_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_COLLATES = (
    ("torch.utils.data._utils.collate", "default_collate"),
    ("bigdl.nano.pytorch.vision.datasets.folders", "collate_channels_last"),
)


def fed_with_features(
    trainer: Any, prefix: FrozenPrefix, loader: Any, directory: str | os.PathLike
) -> Any:
    """A loader like the given one over the cached features of its samples.

    Parameters
    ----------
    trainer : Trainer
        In a fit. Of several processes the first computes the features.
    prefix : FrozenPrefix
        Its notes say what was done, or why not.
    loader : DataLoader
        Its sampler, batches and workers are those of the result.
    directory : path

    Returns
    -------
    DataLoader
        The given one, if features cannot take the place of its samples.
    """
    features, reason = None, None
    if trainer.global_rank == 0:
        reason = _why_not(trainer, loader)
        try:
            features = None if reason else prefix.cached(loader.dataset, directory)
        except UsageError as error:
            reason = first_line(error)
    features, reason = trainer.strategy.broadcast((features, reason))
    if features is None:
        note = f"features are not cached: {reason}"
    else:
        done = "read from" if features.reused else "computed into"
        note = f"features of {len(features)} samples {done} {features.directory}"
    if note not in prefix.notes:  # loaders may be made again for each epoch
        prefix.notes.append(note)
    return loader if features is None else _over(loader, features)


def _why_not(trainer: Any, loader: Any) -> str | None:
    """Why features cannot take the place of samples, before any is computed."""
    if type(loader) is not DataLoader:
        return f"the training data are a {type(loader).__name__}, not a DataLoader"
    collate = loader.collate_fn
    if (getattr(collate, "__module__", ""), getattr(collate, "__name__", "")) not in _COLLATES:
        return "the loader's collate_fn is not torch's, so it may change images"
    for owner in (trainer.lightning_module, trainer.datamodule):
        for name in _ON_BATCHES:
            if owner is not None and is_overridden(name, owner):
                return f"{type(owner).__name__}.{name} may change images"
    sample = loader.dataset[0]
    pair = isinstance(sample, (tuple, list)) and len(sample) == 2
    if not pair or not torch.is_tensor(sample[0]):
        return "its samples are not pairs of a tensor and a target"
    return None


def _over(loader: DataLoader, features: CachedFeatures) -> DataLoader:
    """The loader over other samples; its sampler, which knows their number only, stays."""
    other = copy.copy(loader)
    # A loader guards its attributes; what Lightning keeps of its constructor names the images.
    kept = {
        name: value
        for name, value in vars(loader).items()
        if not name.startswith("__pl_") and name != "__dataset"
    }
    vars(other).clear()
    vars(other).update(kept, dataset=features, collate_fn=default_collate, _iterator=None)
    return other


class Watch:
    """Refuses a training step that changes a batch of features as if it held images.

    Parameters
    ----------
    prefix : FrozenPrefix
    batch : structure of Tensor
        That the training step is given.
    """

    def __init__(self, prefix: FrozenPrefix, batch: Any):
        self._batch = batch
        self._handle = prefix.segments[0].modules[0].register_forward_pre_hook(self._look)

    def _look(self, module: torch.nn.Module, given: tuple) -> None:
        # A layout of memory may have been changed, but no value.
        if not any(torch.is_tensor(x) and torch.equal(given[0], x) for x in self._batch):
            raise UsageError(
                "training_step changes the images before the model is called, so cached features "
                "cannot take their place; leave cache_dir out, or let the dataset change them"
            )

    def remove(self) -> None:
        """Look no longer."""
        self._handle.remove()
