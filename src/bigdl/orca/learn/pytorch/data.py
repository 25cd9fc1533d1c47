"""Batches of tensors from a shard."""

from __future__ import annotations

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.values import named_by_shard

__all__ = ["TensorShard"]


class TensorShard:
    """The columns of a shard as tensors over the mapped files.

    Parameters
    ----------
    shard : bigdl.orca.data.feeds.shard.Shard
    feature_cols, label_cols : sequence of str or None
        None for those that the shard itself names so.

    Raises
    ------
    UsageError
        When the shard names no targets.

    Attributes
    ----------
    rows : int
    inputs : list or None
        Key, dtype and row shape of every array of every feature column; None without rows.
    """

    def __init__(self, shard, feature_cols, label_cols):
        import torch

        self.rows = shard.rows
        self.inputs = None
        self._features = self._labels = ()
        self._tensors: dict[int, torch.Tensor] = {}
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
                    self._tensors[i] = torch.from_numpy(shard.arrays[i])
        # a matrix of scalar columns is turned once per batch, so that each column is contiguous
        self._matrices = {
            i for p in (*self._features, *self._labels) for i, j in p.values() if j is not None
        }
        leaves = shard.spool.leaves
        self.inputs = [
            [
                [key, leaves[i].dtype, list(leaves[i].shape) if j is None else []]
                for key, (i, j) in places.items()
            ]
            for places in self._features
        ]

    def has_label(self, value: float) -> bool:
        """Whether a target somewhere is `value`."""
        return any(
            bool(((self._tensors[i] if j is None else self._tensors[i][:, j]) == value).any())
            for places in self._labels
            for i, j in places.values()
        )

    def batch(self, start: int, stop: int, order: np.ndarray | None = None) -> list:
        """Rows `start`...`stop` of the shard's order, copied.

        Parameters
        ----------
        start, stop : int
        order : ndarray of int, shape (rows,), optional
            The shard's order; default as spooled.

        Returns
        -------
        list of tensor (or dict of tensors)
            One per feature column and then one for the target: a tensor, or a tuple of them for
            several label columns; no target without label columns.
        """
        import torch

        taken = {}
        if order is not None:
            index = torch.from_numpy(order[start:stop])
        for i, tensor in self._tensors.items():
            if i in self._matrices:
                rows = tensor[start:stop] if order is None else tensor.index_select(0, index)
                # not contiguous(): a single row is contiguous already and would not be copied
                turned = rows.t().clone(memory_format=torch.contiguous_format)
                taken[i] = turned.unbind(0)
            elif order is None:
                taken[i] = tensor[start:stop].clone()
            else:
                taken[i] = tensor.index_select(0, index)

        def column(places):
            found = {k: taken[i] if j is None else taken[i][j] for k, (i, j) in places.items()}
            return found.get(None, found)

        out = [column(places) for places in self._features]
        labels = [_target(column(places)) for places in self._labels]
        if labels:
            out.append(labels[0] if len(labels) == 1 else tuple(labels))
        return out


def _target(tensor):
    """Losses that take class indices want int64."""
    import torch

    small = (torch.int32, torch.int16, torch.int8, torch.uint8)
    if isinstance(tensor, torch.Tensor) and tensor.dtype in small:
        return tensor.to(torch.int64)
    return tensor
