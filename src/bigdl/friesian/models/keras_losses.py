"""Losses of the models for Keras."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from bigdl.common.errors import UsageError

__all__ = ["InBatchSoftmax"]


@keras.saving.register_keras_serializable("bigdl")
class InBatchSoftmax(keras.losses.Loss):
    """The other items of a batch are the negatives of each of its rows.

    The logarithm of the probability of an item is taken off, since frequent items come up as
    negatives more often (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations", RecSys 2019); see :class:`bigdl.friesian.models.InBatchSoftmax`.  The target
    is the number of the item, below 2**24 since Keras makes targets float32: the same item in
    another row is no negative.  With several workers the negatives are those of the worker's own
    rows.

    Parameters
    ----------
    temperature : float, default 0.1
        By which the products are divided.
    item_counts : sequence of number, optional
        How often each item number occurs in the data; without it nothing is taken off.
    reduction, name, dtype
        Of ``keras.losses.Loss``.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        item_counts: Sequence[float] | None = None,
        reduction: str = "sum_over_batch_size",
        name: str = "in_batch_softmax",
        dtype: str | None = None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if not temperature > 0:
            raise UsageError(f"temperature should be a number above 0, got {temperature!r}")
        self.temperature = temperature
        self.item_counts = None if item_counts is None else [float(each) for each in item_counts]
        if item_counts is None:
            self._log_share = None
        else:
            counts = np.maximum(np.asarray(item_counts, np.float64), 1)
            self._log_share = np.log(counts / counts.sum()).astype(np.float32)

    def call(self, y_true, y_pred):
        """Of each row a loss, of shape ``(n,)``.

        Parameters
        ----------
        y_true : tensor of shape (n,) or (n, 1)
            Numbers of the items.
        y_pred : tensor of shape (n, 2, dim)
            Vectors of the users and of the items.
        """
        number = ops.cast(ops.reshape(y_true, (-1,)), "int64")
        user, item = y_pred[:, 0], y_pred[:, 1]
        logits = ops.matmul(user, ops.transpose(item)) / self.temperature
        if self._log_share is not None:
            logits = logits - ops.take(ops.convert_to_tensor(self._log_share), number)
        place = ops.arange(ops.shape(y_pred)[0])
        is_own = ops.equal(ops.expand_dims(place, 1), place)
        is_again = ops.logical_and(ops.equal(ops.expand_dims(number, 1), number), ~is_own)
        logits = ops.where(is_again, -1e9, logits)
        own = ops.sum(ops.where(is_own, logits, 0.0), 1)
        return ops.logsumexp(logits, 1) - own

    def get_config(self) -> dict:
        """Return the arguments for :meth:`from_config`."""
        own = {"temperature": self.temperature, "item_counts": self.item_counts}
        return {**super().get_config(), **own}
