"""Gradients of Keras meet between ``backward`` and the optimizer.

``optimizer.apply`` of a compiled model first replaces every gradient by the sum over the ranks of
``weight * gradient``.  So clipping, accumulation, loss scaling and averages of the weights, which
Keras does in ``apply``, see the gradients of the whole batch, and a model with a training step of
its own needs no change.  (``tf.distribute`` cannot do this: ``fit`` of Keras 3 fails under
``MultiWorkerMirroredStrategy``.)

With TensorFlow it is a ``tf.numpy_function`` inside the graph of the training step, which calls the
GradientSync that PyTorch uses, too; so gradients travel in the same flat buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigdl.orca.learn.tf2.state import optimizers_of

__all__ = ["GradientReducer"]


class GradientReducer:
    """What the optimizers of one worker ask for the gradients of all.

    Parameters
    ----------
    sync : GradientSync
    batch_rows : int
        Rows of a global batch: a table of far more rows keeps the gradients of an embedding sparse.

    Attributes
    ----------
    weight : float
        Of this rank's loss in that of the batch; 0 for a rank that takes part with zeros.
    failure : BaseException or None
        What went wrong inside a graph, where TensorFlow makes another exception of it.
    """

    def __init__(self, sync, batch_rows: int):
        self._sync, self._batch_rows = sync, batch_rows
        self._parts: dict[tuple, list[_Part]] = {}
        self.weight = 1.0
        self.failure: BaseException | None = None

    def attach(self, model) -> None:
        """Let the optimizers of a model reduce gradients before they apply them."""
        import keras

        if self._sync.world_size == 1:
            return
        in_graph = keras.backend.backend() == "tensorflow"
        for optimizer in optimizers_of(model):
            _intercept(optimizer, self._in_graph if in_graph else self._of_tensors)

    def detach(self, model) -> None:
        """Leave the optimizers as they came."""
        for optimizer in optimizers_of(model):
            vars(optimizer).pop("apply", None)

    # -- the torch backend -----------------------------------------------------------------------

    def _of_tensors(self, gradients: Sequence, variables: Sequence) -> list:
        parts = self._parts_of([(tuple(v.shape), v.value.dtype, v.value.device) for v in variables])
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = gradient
        self._sync.reduce(parts, self.weight)
        return [
            part.zeros() if part.grad is None and gradient is not None else part.grad
            for part, gradient in zip(parts, gradients, strict=True)
        ]

    # -- the TensorFlow backend ------------------------------------------------------------------

    def _in_graph(self, gradients: Sequence, variables: Sequence) -> list:
        import tensorflow as tf

        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sent, kinds, sparse = [], [], []
        for i in present:
            gradient = gradients[i]
            if isinstance(gradient, tf.IndexedSlices) and self._stays_sparse(variables[i]):
                sent += [_wide(gradient.values), tf.cast(gradient.indices, tf.int64)]
                sparse.append(True)
            else:
                sent.append(_wide(tf.convert_to_tensor(gradient)))
                sparse.append(False)
            kinds.append((tuple(variables[i].shape), sent[-1 - sparse[-1]].dtype.name))

        def reduce(*arrays):
            try:
                return self._reduce_arrays(kinds, sparse, arrays)
            except BaseException as error:
                self.failure = error
                raise

        back = tf.numpy_function(reduce, sent, [s.dtype for s in sent], stateful=True)
        out, pieces = list(gradients), iter(back if isinstance(back, list | tuple) else [back])
        for i, (shape, _), is_sparse in zip(present, kinds, sparse, strict=True):
            values = next(pieces)
            values.set_shape((None, *shape[1:]) if is_sparse else shape)
            values = tf.cast(values, gradients[i].dtype)
            if is_sparse:
                indices = next(pieces)
                indices.set_shape((None,))
                values = tf.IndexedSlices(values, indices, tf.constant(shape, tf.int64))
            out[i] = values
        return out

    def _stays_sparse(self, variable) -> bool:
        """Whether few of a table's rows can be in a batch, as far as all ranks know."""
        return variable.shape[0] > 2 * self._batch_rows

    def _reduce_arrays(self, kinds, sparse, arrays) -> list:
        import torch

        parts = self._parts_of([(shape, getattr(torch, kind), None) for shape, kind in kinds])
        given = iter(arrays)
        for part, is_sparse in zip(parts, sparse, strict=True):
            # copied: the array may be a view of TensorFlow's memory, and the sum is written to it
            values = torch.from_numpy(next(given).copy())
            if is_sparse:
                indices = torch.from_numpy(next(given).copy()).reshape(1, -1)
                values = torch.sparse_coo_tensor(
                    indices, values.reshape(-1, *part.shape[1:]), part.shape, check_invariants=False
                )
            part.grad = values
        self._sync.reduce(parts, self.weight, [p for p, s in zip(parts, sparse, strict=True) if s])
        out = []
        for part, is_sparse in zip(parts, sparse, strict=True):
            if part.grad is None:  # the rows of all ranks weigh nothing
                part.grad = part.zeros()
            if is_sparse:
                summed = part.grad.to_sparse(1).coalesce()
                out += [summed.values().numpy(), summed.indices()[0].numpy()]
            else:
                out.append(part.grad.numpy())
            part.grad = None
        return out

    def _parts_of(self, kinds: Sequence[tuple]) -> list[_Part]:
        key = tuple(kinds)
        if key not in self._parts:  # the same objects each time: the sync keeps buffers for them
            self._parts[key] = [_Part(*kind) for kind in kinds]
        return self._parts[key]


class _Part:
    """What a GradientSync has to know of a parameter, without its memory."""

    grad: Any = None

    def __init__(self, shape, dtype, device=None):
        import torch

        self.shape, self.dtype = torch.Size(shape), dtype
        self.device = device or torch.device("cpu")

    def numel(self) -> int:
        return self.shape.numel()

    def zeros(self):
        """A gradient of nothing."""
        import torch

        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def detach(self):
        """Of this shape and dtype, in the memory of one element."""
        import torch

        return torch.zeros(1, dtype=self.dtype, device=self.device).expand(self.shape)


def _intercept(optimizer, reduce):
    """Let `reduce` see the gradients that an optimizer is to apply."""
    base = type(optimizer).apply

    def apply(grads, trainable_variables=None):
        grads = list(grads)
        if not grads:
            return None
        variables = list(trainable_variables or optimizer._trainable_variables)
        return base(optimizer, reduce(grads, variables), variables)

    # the instance keeps its class, so a file of the model tells nothing of this
    object.__setattr__(optimizer, "apply", apply)


def _wide(tensor):
    """In a dtype that gradients are summed in."""
    import tensorflow as tf

    return tensor if tensor.dtype in (tf.float32, tf.float64) else tf.cast(tensor, tf.float32)
