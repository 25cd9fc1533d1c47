"""Which rows each process gets of the loaders of a fit."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities.data import _is_dataloader_shuffled, _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

__all__ = ["share_rows"]


def share_rows(trainer: Any) -> None:
    """Let a trainer share rows as one process would take them.

    A loader that does not shuffle is not shuffled; Lightning would, for training. Each row of a
    validation is counted once, where this leaves all processes as many batches; Lightning repeats
    rows until all have as many.

    Parameters
    ----------
    trainer : Trainer
        In a process of a fit.
    """
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def prepare_as_here(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        shared = prepare(dataloader, shuffle=_is_dataloader_shuffled(dataloader), mode=mode)
        return shared if mode is RunningStage.TRAINING else _without_repeats(shared)

    connector._prepare_dataloader = prepare_as_here


def _without_repeats(dataloader: object) -> object:
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(dataloader, DataLoader) or type(sampler) is not DistributedSampler:
        return dataloader
    rows, count, size = len(sampler.dataset), sampler.num_replicas, dataloader.batch_size
    if sampler.shuffle or sampler.drop_last or dataloader.drop_last or not size or rows < count:
        return dataloader
    fewest, most = rows // count, -(-rows // count)
    if fewest == most or -(-fewest // size) != -(-most // size):
        return dataloader
    exact = UnrepeatedDistributedSamplerWrapper(
        SequentialSampler(sampler.dataset), num_replicas=count, rank=sampler.rank, shuffle=False
    )
    return _update_dataloader(dataloader, exact)
