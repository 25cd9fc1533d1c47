"""Batches of tensors from a shard."""

from __future__ import annotations

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.common.memory import available_memory
from bigdl.runtime.shards.batches import WindowedOrder, permutation
from bigdl.runtime.shards.shard import LoaderShard
from bigdl.runtime.shards.texts import TEXT, is_text
from bigdl.runtime.shards.values import named_by_shard
from bigdl.training.unified import casts

__all__ = ["KeyedShard", "TensorShard", "open_batches", "open_loader", "shuffle_memory"]


def open_batches(shard, feature_cols, label_cols, worker, config: dict, batch_size: int):
    """What the loop reads batches from.

    Parameters
    ----------
    shard : Shard or LoaderShard
    feature_cols, label_cols : sequence of str or None
        Of batches that are dicts, their keys.
    worker : Worker
    config : dict
        For a function that makes a loader.
    batch_size : int
        Of a global batch.

    Returns
    -------
    TensorShard or bigdl.training.loading.LoaderBatches
    """
    if not isinstance(shard, LoaderShard):
        return TensorShard(shard, feature_cols, label_cols)
    import cloudpickle

    from bigdl.training.loading import as_loader

    size = worker.world_size
    loader = as_loader(cloudpickle.loads(shard.payload()), config, max(1, batch_size // size))
    return open_loader(loader, shard, feature_cols, label_cols, worker)


def open_loader(loader, shard: LoaderShard, feature_cols, label_cols, worker):
    """What the loop reads batches from, of a loader that the worker has made.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    shard, feature_cols, label_cols, worker
        See :func:`open_batches`.
    """
    from torch.utils.data import IterableDataset

    from bigdl.training.loading import LoaderBatches, spooled

    if isinstance(loader.dataset, IterableDataset):
        made, keys = spooled(loader, shard, feature_cols, label_cols)
        return TensorShard(made, None, None) if keys is None else KeyedShard(made, keys)
    batches = LoaderBatches(loader, worker.rank, worker.world_size)
    worker.at_exit(batches.close)
    return batches


def shuffle_memory(config: dict, threads: int) -> int:
    """Bytes that the shuffled rows of one worker may take.

    That is ``config["shuffle_memory"]``, or this worker's share of half of the memory that is
    free; `threads` tells the share.
    """
    given = config.get("shuffle_memory")
    if given is not None:
        return check_positive('config["shuffle_memory"]', given)
    return available_memory() // 2 // max(1, core_count() // max(1, threads))


class TensorShard:
    """The columns of a shard as tensors over the mapped files.

    Parameters
    ----------
    shard : bigdl.runtime.shards.shard.Shard
    feature_cols, label_cols : sequence of str or None
        None for those that the shard itself names so.

    Raises
    ------
    UsageError
        When the shard names no targets, and for targets that are texts.

    Attributes
    ----------
    rows : int
    inputs, targets : list or None
        Key, dtype and row shape of every array of every feature or label column; None without rows.
    """

    def __init__(self, shard, feature_cols, label_cols):
        import torch

        self.rows, self.fingerprint = shard.rows, shard.fingerprint
        self.drop_last = False
        self.inputs = self.targets = None
        self._features = self._labels = ()
        self._casts: dict = {}  # place -> what brings its values into the types of other data
        self._tensors: dict[int, torch.Tensor] = {}
        self._texts: dict[int, np.dtype] = {}  # of the tensors that hold the bytes of texts
        if not self.rows:
            return
        if feature_cols is None:
            feature_cols, label_cols = named_by_shard(shard.names)
            if not label_cols:
                raise UsageError(
                    'The data holds no targets; pass (x, y) or {"x": ..., "y": ...} to fit or '
                    "evaluate"
                )
        self._features = [shard.places(name) for name in feature_cols]
        self._labels = [shard.places(name) for name in label_cols]
        for places in (*self._features, *self._labels):
            for i, _ in places.values():
                if i not in self._tensors:
                    array = shard.arrays[i]
                    if array.dtype.kind == TEXT:
                        self._texts[i] = array.dtype
                        array = array.reshape(*array.shape, 1).view("uint8")
                    self._tensors[i] = torch.from_numpy(array)
        # a matrix of scalar columns is turned once per batch, so that each column is contiguous
        self._matrices = {
            i for p in (*self._features, *self._labels) for i, j in p.values() if j is not None
        }
        self._words = {i: w for i, t in self._tensors.items() if (w := _as_words(t)) is not None}
        leaves = shard.spool.leaves
        self.inputs, self.targets = (
            [
                [
                    [
                        key,
                        TEXT if is_text(leaves[i].dtype) else leaves[i].dtype,
                        list(leaves[i].shape) if j is None else [],
                    ]
                    for key, (i, j) in places.items()
                ]
                for places in columns
            ]
            for columns in (self._features, self._labels)
        )
        self._names = list(feature_cols), list(label_cols)
        for name, places in zip(label_cols, self._labels, strict=True):
            if any(i in self._texts for i, _ in places.values()):
                raise UsageError(
                    f"Column '{name}' of the targets holds texts; encode it as numbers first, e.g. "
                    "with StringIndexer"
                )

    def take_types(self, inputs: list | None, targets: list | None, training) -> None:
        """Give out numbers in the dtypes that they have in the training data.

        Parameters
        ----------
        inputs, targets : list or None
            Those of the training data; None where they are not known.
        training : TensorShard or LoaderBatches
            The training data of this worker.

        Raises
        ------
        UsageError
            For columns that cannot be brought together.
        """
        if not self.rows or inputs is None or targets is None:
            return
        names = self._names
        for columns, found in (
            (self._features, casts(names[0], self.inputs, inputs, is_target=False)),
            (self._labels, casts(names[1], self.targets, targets, is_target=True)),
        ):
            self._casts.update({columns[number][key]: cast for number, key, cast in found})

    def has_label(self, value: float) -> bool:
        """Whether a target somewhere is `value`."""
        return any(
            bool(((self._tensors[i] if j is None else self._tensors[i][:, j]) == value).any())
            for places in self._labels
            for i, j in places.values()
        )

    def window(self, memory: int) -> int:
        """Rows of a window that is shuffled at a time; 0 when all rows fit in `memory` bytes."""
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        return 0 if total <= memory else max(1, memory * self.rows // total)

    def order(self, shuffle: bool, seed: int, epoch: int, rank: int, window: int, ranges=None):
        """The order of an epoch, for :meth:`batch`."""
        if not shuffle:
            return None
        if window:
            return WindowedOrder(self.rows, window, seed, epoch, rank)
        return permutation(self.rows, seed, epoch, rank)

    def in_order(self, batch_size: int) -> None:
        """The order of an evaluation: as spooled."""
        return None

    def batch(self, start: int, stop: int, order=None) -> list:
        """Rows `start`...`stop` of the shard's order, copied.

        Parameters
        ----------
        start, stop : int
        order : ndarray of int, shape (rows,), or WindowedOrder, optional
            The shard's order; default as spooled.

        Returns
        -------
        list of tensor (or dict of tensors)
            One per feature column and then one for the target: a tensor, or a tuple of them for
            several label columns; no target without label columns. Texts are an ndarray of bytes.
        """
        import torch

        taken = {}
        if order is not None:
            index = torch.from_numpy(order[start:stop])
        for i, tensor in self._tensors.items():
            rows = tensor[start:stop] if order is None else self._gathered(i, index)
            if i in self._matrices:
                # not contiguous(): a single row is contiguous already and would not be copied
                turned = rows.t().clone(memory_format=torch.contiguous_format)
                taken[i] = turned.unbind(0)
            else:
                taken[i] = rows.clone() if order is None else rows

        def values(i, j):
            found = taken[i] if j is None else taken[i][j]
            if i in self._texts:
                return found.numpy().view(self._texts[i])[..., 0]
            return self._casts[i, j](found) if (i, j) in self._casts else found

        def column(places):
            found = {key: values(*place) for key, place in places.items()}
            return found.get(None, found)

        out = [column(places) for places in self._features]
        labels = [_target(column(places)) for places in self._labels]
        if labels:
            out.append(labels[0] if len(labels) == 1 else tuple(labels))
        return out

    def _gathered(self, i, index):
        """Some rows of a tensor."""
        tensor = self._tensors[i]
        if i not in self._words:
            return tensor.index_select(0, index)
        return self._words[i].index_select(0, index).view(tensor.dtype).view(-1, *tensor.shape[1:])


class KeyedShard(TensorShard):
    """Columns whose batches are dicts of them.

    Parameters
    ----------
    shard : bigdl.runtime.shards.shard.Shard
    keys : sequence of str
    """

    def __init__(self, shard, keys):
        super().__init__(shard, keys, ())
        self._keys = keys

    def has_label(self, value: float) -> bool:
        """Whether a target may be `value`: which of the columns are targets is not known here."""
        return True

    def batch(self, start: int, stop: int, order=None) -> dict:
        """Rows `start`...`stop` of the shard's order, copied."""
        return dict(zip(self._keys, super().batch(start, stop, order), strict=True))


def _as_words(tensor):
    """Rows of 8 bytes as one number each, which are gathered in half of the time; else None."""
    import torch

    width = tensor[:1].nbytes
    if tensor.ndim < 2 or width != 8 or tensor.itemsize == width or tensor.is_complex():
        return None
    return tensor.reshape(len(tensor), -1).view(torch.int64)[:, 0]


def _target(tensor):
    """Losses that take class indices want int64."""
    import torch

    small = (torch.int32, torch.int16, torch.int8, torch.uint8)
    if isinstance(tensor, torch.Tensor) and tensor.dtype in small:
        return tensor.to(torch.int64)
    return tensor
