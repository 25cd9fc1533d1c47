"""Batches of tensors from a shard."""

from __future__ import annotations

import numpy as np

__all__ = ["TensorShard"]


class TensorShard:
    """The columns of a shard as tensors over the mapped files.

    Parameters
    ----------
    shard : bigdl.orca.data.feeds.shard.Shard
    feature_cols, label_cols : sequence of str
    """

    def __init__(self, shard, feature_cols, label_cols):
        self.rows = shard.rows
        #: key, dtype and row shape of every array of every feature column; None without rows
        self.inputs = None
        if self.rows:
            self.inputs = [
                [[x.key, x.dtype, list(x.shape)] for x in shard.spool.leaves if x.column == name]
                for name in feature_cols
            ]
        self._features = [_tensors(shard, name) for name in feature_cols] if self.rows else []
        self._labels = [_tensors(shard, name) for name in label_cols] if self.rows else []

    def batch(self, start: int, stop: int, order: np.ndarray | None = None):
        """Rows `start`...`stop` of the shard's order, copied once.

        Returns
        -------
        list of tensor (or dict of tensors), one per feature column and then one for the target: a
        tensor, or a tuple of them for several label columns; no target without label columns.
        """
        if order is None:

            def take(tensor):
                return tensor[start:stop].clone()
        else:
            import torch

            index = torch.from_numpy(order[start:stop])

            def take(tensor):
                return tensor.index_select(0, index)

        out = [_each(take, column) for column in self._features]
        labels = [_each(_target(take), column) for column in self._labels]
        if labels:
            out.append(labels[0] if len(labels) == 1 else tuple(labels))
        return out


def _target(take):
    import torch

    def convert(tensor):
        # losses that take class indices want int64
        return take(tensor).to(torch.int64) if tensor.dtype == torch.int32 else take(tensor)

    return convert


def _each(function, column):
    if isinstance(column, dict):
        return {key: function(tensor) for key, tensor in column.items()}
    return function(column)


def _tensors(shard, name):
    import torch

    return _each(torch.from_numpy, shard.column(name))
