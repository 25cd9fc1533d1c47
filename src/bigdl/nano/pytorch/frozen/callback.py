"""Lightning callback that accelerates frozen layers during a fit."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.hooks import RemovableHandle

from bigdl.common.errors import UsageError, first_line, require
from bigdl.nano.acceleration.precision import INT8
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.frozen.features import CachedFeatures
from bigdl.nano.pytorch.frozen.prefix import FrozenPrefix, accelerate_frozen_prefix

_ON_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_COLLATES = (
    ("torch.utils.data._utils.collate", "default_collate"),
    ("bigdl.nano.pytorch.vision.datasets.folders", "collate_channels_last"),
)
_SAMPLE_ROWS = 2  # batch normalisation in train mode rejects a single row

require("pytorch_lightning", "nano")

from pytorch_lightning import Callback, Trainer  # noqa: E402


class FrozenPrefixCallback(Callback):
    """Callback that accelerates the frozen layers of a model during a fit.

    It uses the modes, weights and ``requires_grad`` at the start of training, after a checkpoint
    was loaded, and restores the model after training. It logs one line and adds it to the
    ``settings`` of Nano's Trainer.

    Parameters
    ----------
    sample : optional
        A batch of the model's input; by default two samples of the training data, or their first
        batch for iterable datasets.
    cache_dir : path, optional
        Directory for the outputs of the frozen layers. They are computed once per training sample
        and reused while weights, method and data are the same; epochs then read them instead of
        images. The model must start with the frozen layers, and the dataset must return
        deterministic pairs of a tensor and a target. Otherwise training uses images, and the report
        has the reason. Validation always uses images. Of several loaders only the first is cached.
    **options
        Options of :func:`accelerate_frozen_prefix`. By default int8 is calibrated on the training
        data, which must then be a map-style dataset.

    Attributes
    ----------
    prefix : FrozenPrefix or None
        The prefix of the last fit; None if the fit ran in other processes.
    report : str or None
        :meth:`FrozenPrefix.report` at the end of the last fit; with several processes, rank 0's.

    Raises
    ------
    UsageError
        During a fit, if the model does not run on the sample, or if ``training_step`` changes
        cached inputs before it calls the model.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import Trainer
    >>> from bigdl.nano.pytorch.frozen import FrozenPrefixCallback
    >>> backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6))
    >>> net = torch.nn.Sequential(backbone.requires_grad_(False), torch.nn.Linear(6, 1))
    >>> model = Trainer.compile(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    >>> rows = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
    >>> callback = FrozenPrefixCallback(precision="fp32")
    >>> trainer = Trainer(max_epochs=1, callbacks=[callback], logger=False,
    ...                   enable_progress_bar=False, enable_model_summary=False)
    >>> trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
    >>> callback.report
    'model.0: eager, relative error 0'
    """

    def __init__(
        self, sample: object = None, *, cache_dir: str | os.PathLike | None = None, **options: Any
    ):
        self.sample, self.cache_dir, self.options = sample, cache_dir, options
        self.prefix: FrozenPrefix | None = None
        self.report: str | None = None
        self._replaced = AttributePatch()
        self._cached_in: int | None = None  # epoch
        self._watch_next = False
        self._watch = ExitStack()  # check of the first batch of features

    def setup(self, trainer, pl_module, stage) -> None:
        if stage != "fit":
            return
        self.prefix = self.report = self._cached_in = None
        # Here, because counting the steps creates the loaders before the fit starts.
        if self.cache_dir is not None:
            self._intercept_loaders(trainer)

    def _intercept_loaders(self, trainer) -> None:
        """Intercept each training loader before Lightning creates its iterator."""
        connector = trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepare_features(dataloader: object, shuffle: bool, mode: object) -> object:
            if mode == "train" and self._cached_in != trainer.current_epoch:
                dataloader = self._with_features(trainer, dataloader)
            return prepare(dataloader, shuffle=shuffle, mode=mode)

        self._replaced.set(connector, "_prepare_dataloader", prepare_features)

    def _with_features(self, trainer, loader: object) -> object:
        if not _has_index(loader):
            return loader
        if self.prefix is None:
            self._accelerate(trainer, self._sample(loader), loader)
        with torch.random.fork_rng(devices=[]):  # computing features must not advance the state
            prefix = cast("FrozenPrefix", self.prefix)
            fed = _loader_of_features(
                trainer, prefix, loader, cast("str | os.PathLike", self.cache_dir)
            )
        self._watch_next = fed is not loader
        self._cached_in = trainer.current_epoch if self._watch_next else None
        return fed

    def on_train_start(self, trainer, pl_module) -> None:
        if self.prefix is not None:  # created for cached features
            self._report(trainer)
            return
        loader = trainer.train_dataloader
        sample = self._sample(loader)
        if sample is not None:
            self._accelerate(trainer, sample, loader)
            self._report(trainer)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        # A second iterator over an iterable dataset could consume rows of the training.
        if self.prefix is None:
            self._accelerate(trainer, batch, trainer.train_dataloader)
            self._report(trainer)
        if self._watch_next:
            prefix = cast("FrozenPrefix", self.prefix)
            self._watch.callback(_watch_batch(prefix, batch).remove)
            self._watch_next = False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._watch.close()

    def _accelerate(self, trainer, sample: object, loader: object) -> None:
        options = dict(self.options)
        if options.get("precision") == INT8 and "calib_data" not in options:
            if not _has_index(loader):
                raise UsageError(
                    "The training data cannot be indexed, and reading them to calibrate int8 could "
                    "consume rows of the training; pass calib_data",
                    code="argument-missing",
                    argument="calib_data",
                )
            options["calib_data"] = loader
        self.prefix = accelerate_frozen_prefix(trainer.lightning_module, sample, **options)
        if self.cache_dir is not None and not _has_index(loader):
            self.prefix.notes.append("features are not cached: samples have no index")

    def _sample(self, loader: Any) -> object:
        """Return the user's sample or a small batch of the loader; None for an iterable dataset."""
        if self.sample is not None:
            return self.sample
        if not _has_index(loader):
            return None
        dataset = loader.dataset
        with torch.random.fork_rng(devices=[]):  # random transforms must not advance the state
            rows = [dataset[index] for index in range(min(_SAMPLE_ROWS, len(dataset)))]
            return (loader.collate_fn or default_collate)(rows)

    def _report(self, trainer) -> None:
        from pytorch_lightning.utilities.rank_zero import rank_zero_info

        prefix = cast("FrozenPrefix", self.prefix)
        self.report = prefix.report()
        methods = dict.fromkeys(segment.method for segment in prefix.segments)
        phrase = f"frozen prefix {' and '.join(methods)}" if methods else "no frozen prefix"
        if self._cached_in is not None:
            phrase += " with cached features"
        rank_zero_info(f"{phrase.capitalize()}: {'; '.join(self.report.splitlines())}")
        strategy = trainer.strategy
        if hasattr(strategy, "settings"):  # of Nano's Trainer
            strategy.settings = (*strategy.settings, phrase)

    def on_validation_start(self, trainer, pl_module) -> None:
        if self.prefix is not None:
            self.prefix.release()

    def on_validation_end(self, trainer, pl_module) -> None:
        if self.prefix is not None:
            self.prefix.attach()

    def on_train_end(self, trainer, pl_module) -> None:
        self._release()

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._release()
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer, pl_module, stage) -> None:
        self._replaced.undo()

    def __getstate__(self) -> dict:
        # Runtimes and the state of a running fit cannot be pickled.
        return {
            **self.__dict__,
            "prefix": None,
            "_replaced": AttributePatch(),
            "_watch": ExitStack(),
        }

    def _release(self) -> None:
        self._watch.close()
        if self.prefix is not None:
            self.prefix.release()
            self.report = self.prefix.report()


def _has_index(loader: object) -> bool:
    """Return True if a loader batches samples of a map-style dataset."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return False
    batches = getattr(loader, "batch_sampler", None) is not None
    return batches and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _loader_of_features(
    trainer: Trainer, prefix: FrozenPrefix, loader: Any, directory: str | os.PathLike
) -> DataLoader:
    """Return a loader of cached features, or the original loader if features cannot be cached.

    Parameters
    ----------
    trainer : Trainer
        Trainer of the fit; rank 0 computes the features.
    prefix : FrozenPrefix
        A note about the result is added to it.
    loader : DataLoader
        The loader; its sampler, batch size and workers are kept.
    directory : path

    Returns
    -------
    DataLoader
        A new loader; `loader` itself if its samples cannot be replaced by features.
    """
    features, reason = None, None
    if trainer.global_rank == 0:
        reason = _why_not_cached(trainer, loader)
        try:
            features = None if reason else prefix.cached(loader.dataset, directory)
        except UsageError as error:
            reason = first_line(error)
    features, reason = trainer.strategy.broadcast((features, reason))
    if features is None:
        note = f"features are not cached: {reason}"
    else:
        prefix.segments[0].accepts_cached = True  # on the other ranks, too
        done = "read from" if features.reused else "computed into"
        note = f"features of {len(features)} samples {done} {features.directory}"
    if note not in prefix.notes:  # loaders may be created again for each epoch
        prefix.notes.append(note)
    return loader if features is None else _with_dataset(loader, features)


def _why_not_cached(trainer: Trainer, loader: object) -> str | None:
    """Return why cached features cannot replace the samples, or None if they can."""
    if type(loader) is not DataLoader:
        return f"the training data are a {type(loader).__name__}, not a DataLoader"
    from pytorch_lightning.utilities.model_helpers import is_overridden

    collate = loader.collate_fn
    if (getattr(collate, "__module__", ""), getattr(collate, "__name__", "")) not in _COLLATES:
        return "the loader's collate_fn is not torch's, so it may change images"
    for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        for name in _ON_BATCHES:
            if owner is not None and is_overridden(name, owner):
                return f"{type(owner).__name__}.{name} may change images"
    sample = loader.dataset[0]
    pair = isinstance(sample, (tuple, list)) and len(sample) == 2
    if not pair or not torch.is_tensor(sample[0]):
        return "its samples are not pairs of a tensor and a target"
    return None


def _with_dataset(loader: DataLoader, features: CachedFeatures) -> DataLoader:
    """Copy a loader with the cached features as its dataset and with the same sampler."""
    other = copy.copy(loader)
    # DataLoader forbids setting attributes, and Lightning's record of its arguments has the images.
    kept = {
        name: value
        for name, value in vars(loader).items()
        if not name.startswith("__pl_") and name != "__dataset"
    }
    vars(other).clear()
    vars(other).update(kept, dataset=features, collate_fn=default_collate, _iterator=None)
    return other


def _watch_batch(prefix: FrozenPrefix, batch: Iterable[object]) -> RemovableHandle:
    """Register a hook that raises UsageError if the training step changes a batch of features.

    Parameters
    ----------
    prefix : FrozenPrefix
    batch : structure of Tensor
        The batch that the training step gets.
    """

    def check(module: torch.nn.Module, inputs: tuple) -> None:
        # The memory layout may have changed, but not the values.
        if not any(torch.is_tensor(x) and torch.equal(inputs[0], x) for x in batch):
            raise UsageError(
                "training_step changes the images before the model is called, so cached features "
                "cannot replace them; leave cache_dir out, or change the images in the dataset",
                code="argument-conflict",
                argument="cache_dir",
            )

    return prefix.segments[0].modules[0].register_forward_pre_hook(check)
