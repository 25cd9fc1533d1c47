"""What processes that train a Keras model together tell each other.

They are in a process group of PyTorch's gloo (:mod:`bigdl.nano.pytorch.training.processes`). All
calls are collective: every process makes them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Group"]


class Group:
    """The processes of a training.

    Attributes
    ----------
    rank : int
    count : int
    """

    def __init__(self, rank: int, count: int):
        self.rank = rank
        self.count = count

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sums over all processes, in float64 so that counts stay exact."""
        if not arrays:
            return []
        shapes = [array.shape for array in arrays]
        flat = np.concatenate([np.ravel(array).astype(np.float64) for array in arrays])
        total = _all_reduced(flat)
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [part.reshape(s) for part, s in zip(np.split(total, ends), shapes, strict=True)]

    def of_first(self, value: Any) -> Any:
        """What the process of rank 0 has, of anything that can be pickled."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum_gradients(self, gradients: Sequence[Any], fraction: Any) -> list[Any]:
        """Gradients of all processes, each weighted by its fraction of the rows, added up.

        Parameters
        ----------
        gradients : sequence of tf.Tensor, tf.IndexedSlices or None
            Means over the rows of this process.
        fraction : tf.Tensor
            This process's rows over those of all.

        Returns
        -------
        list
            Rows of an ``IndexedSlices`` are those of all processes.
        """
        dense = [g for g in gradients if g is not None and not isinstance(g, tf.IndexedSlices)]
        sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        flat = [tf.reshape(tf.cast(g, tf.float32), [-1]) for g in dense]
        vector = tf.concat(flat, 0) if flat else tf.zeros([0])
        slices = [(g.indices, tf.cast(g.values, tf.float32) * fraction) for g in sparse]
        given = [vector * fraction, *(each for pair in slices for each in pair)]
        # One operation for all: the order of several would not be that of the other processes.
        found = tf.numpy_function(self._exchanged, given, [each.dtype for each in given])
        sizes = [tf.size(part) for part in flat]
        parts = iter(tf.split(found[0], sizes) if sizes else [])
        rows = iter(zip(found[1::2], found[2::2], strict=True))
        return [self._restored(g, parts, rows) for g in gradients]

    @staticmethod
    def _restored(gradient: Any, parts: Any, rows: Any) -> Any:
        if gradient is None:
            return None
        if not isinstance(gradient, tf.IndexedSlices):
            total = tf.reshape(next(parts), tf.shape(gradient))
            total.set_shape(gradient.shape)
            return tf.cast(total, gradient.dtype)
        indices, values = next(rows)
        indices.set_shape([None])
        values.set_shape([None, *gradient.values.shape[1:]])
        values = tf.cast(values, gradient.values.dtype)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def _exchanged(self, vector: np.ndarray, *slices: np.ndarray) -> list[np.ndarray]:
        gathered = [_all_gathered(each, self.count) for each in slices]
        return [_all_reduced(vector) if len(vector) else vector, *gathered]


def _all_reduced(array: np.ndarray) -> np.ndarray:
    import torch
    import torch.distributed as dist

    total = torch.from_numpy(np.array(array))
    dist.all_reduce(total)
    return total.numpy()


def _all_gathered(array: np.ndarray, count: int) -> np.ndarray:
    """Rows of all processes, in the order of ranks."""
    import torch
    import torch.distributed as dist

    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([len(array)]))
    longest = max(int(length) for length in lengths)
    padded = np.zeros((longest, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    received = [torch.empty_like(torch.from_numpy(padded)) for _ in range(count)]
    dist.all_gather(received, torch.from_numpy(padded))
    pairs = zip(received, lengths, strict=True)
    return np.concatenate([each.numpy()[: int(length)] for each, length in pairs])
