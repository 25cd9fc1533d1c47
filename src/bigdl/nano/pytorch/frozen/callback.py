"""The frozen prefix in Lightning's Trainer."""

import copy
import os
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
_SAMPLE_ROWS = 2  # two, since batch normalisation in train mode refuses one

require("pytorch_lightning", "nano")

from pytorch_lightning import Callback, Trainer  # noqa: E402


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
    cache_dir : path, optional
        Where the outputs of the prefix are kept for the samples of the training, computed once and
        used again while weights, method and data are the same: epochs then go over them instead of
        images. The model has to begin with the prefix, and the dataset has to give pairs of a
        tensor and a target that are the same each time; otherwise training goes on with images and
        the report says why. Validation always takes images. Of several loaders the first is cached.
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

    Raises
    ------
    UsageError
        In a fit, if the model does not run on the sample, or a training step changes what is cached
        before it calls the model.

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
        self._cached_in: int | None = None  # an epoch
        self._watch_next = False
        self._watch = ExitStack()  # of the first batch of features

    def setup(self, trainer, pl_module, stage) -> None:
        if stage != "fit":
            return
        self.prefix = self.report = self._cached_in = None
        # Already here: whoever counts the steps to come makes the loaders before the fit starts.
        if self.cache_dir is not None:
            self._take_loaders(trainer)

    def _take_loaders(self, trainer) -> None:
        """See each loader of the training before Lightning makes an iterator of it."""
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
        with torch.random.fork_rng(devices=[]):  # as if nothing had been computed
            prefix = cast("FrozenPrefix", self.prefix)
            fed = _loader_of_features(
                trainer, prefix, loader, cast("str | os.PathLike", self.cache_dir)
            )
        self._watch_next = fed is not loader
        self._cached_in = trainer.current_epoch if self._watch_next else None
        return fed

    def on_train_start(self, trainer, pl_module) -> None:
        if self.prefix is not None:  # it made features
            self._report(trainer)
            return
        loader = trainer.train_dataloader
        sample = self._sample(loader)
        if sample is not None:
            self._accelerate(trainer, sample, loader)
            self._report(trainer)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        # Another iterator over data without an index could take rows away from the training.
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
                    "The training data have no samples by index, so that a pass over them for int8 "
                    "could take rows away from the training; pass calib_data",
                    code="argument-missing",
                    argument="calib_data",
                )
            options["calib_data"] = loader
        self.prefix = accelerate_frozen_prefix(trainer.lightning_module, sample, **options)
        if self.cache_dir is not None and not _has_index(loader):
            self.prefix.notes.append("features are not cached: samples have no index")

    def _sample(self, loader: Any) -> object:
        """Return what the user gave, else some samples as a batch; None if they have no index."""
        if self.sample is not None:
            return self.sample
        if not _has_index(loader):
            return None
        dataset = loader.dataset
        with torch.random.fork_rng(devices=[]):  # random transforms draw
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
        # Runtimes do not travel to other processes, nor does what belongs to a running fit.
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
    """Return True if a loader makes batches of samples that a dataset gives by their number."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return False
    batches = getattr(loader, "batch_sampler", None) is not None
    return batches and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _loader_of_features(
    trainer: Trainer, prefix: FrozenPrefix, loader: Any, directory: str | os.PathLike
) -> Any:
    """Return a loader like the given one over the cached features of its samples.

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
        reason = _why_not_cached(trainer, loader)
        try:
            features = None if reason else prefix.cached(loader.dataset, directory)
        except UsageError as error:
            reason = first_line(error)
    features, reason = trainer.strategy.broadcast((features, reason))
    if features is None:
        note = f"features are not cached: {reason}"
    else:
        prefix.segments[0].takes_cached = True  # in the other processes
        done = "read from" if features.reused else "computed into"
        note = f"features of {len(features)} samples {done} {features.directory}"
    if note not in prefix.notes:  # loaders may be made again for each epoch
        prefix.notes.append(note)
    return loader if features is None else _over(loader, features)


def _why_not_cached(trainer: Trainer, loader: Any) -> str | None:
    """Return why features cannot take the place of samples, before any is computed."""
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


def _over(loader: DataLoader, features: CachedFeatures) -> DataLoader:
    """Return the loader over other samples; its sampler, which knows their number only, stays."""
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


def _watch_batch(prefix: FrozenPrefix, batch: Any) -> RemovableHandle:
    """Refuse a training step that changes a batch of features as if it held images.

    Parameters
    ----------
    prefix : FrozenPrefix
    batch : structure of Tensor
        That the training step is given.
    """

    def check(module: torch.nn.Module, inputs: tuple) -> None:
        # A layout of memory may have been changed, but no value.
        if not any(torch.is_tensor(x) and torch.equal(inputs[0], x) for x in batch):
            raise UsageError(
                "training_step changes the images before the model is called, so cached features "
                "cannot take their place; leave cache_dir out, or let the dataset change them",
                code="argument-conflict",
                argument="cache_dir",
            )

    return prefix.segments[0].modules[0].register_forward_pre_hook(check)
