"""Gradients of Keras meet between ``backward`` and the optimizer.

``optimizer.apply`` of a compiled model first replaces every gradient by the sum over the ranks of
``weight * gradient``.  So clipping, accumulation, loss scaling and averages of the weights, which
Keras does in ``apply``, see the gradients of the whole batch, and a model with a training step of
its own needs no change.  (``tf.distribute`` cannot do this: ``fit`` of Keras 3 fails under
``MultiWorkerMirroredStrategy``.)

With TensorFlow it is a ``tf.numpy_function`` inside the graph of the training step, with JAX an
``io_callback`` inside the compiled step. They call the GradientSync that PyTorch uses, too, with
the memory of the gradients, which is copied once, into the buckets that travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bigdl.orca.learn.tf2.jax_steps import called_back, intercept_stateless
from bigdl.orca.learn.tf2.shared_moments import SharedMoments
from bigdl.orca.learn.tf2.state import optimizers_of

__all__ = ["GradientReducer"]

_SUMMED = ("float32", "float64")  # others are widened first


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
    has_rows : bool
        Whether this rank's rows are rows of the batch, and not made up to take part.
    failure : BaseException or None
        What went wrong inside a graph, where the backend makes another exception of it.
    """

    def __init__(self, sync, batch_rows: int):
        self._sync, self._batch_rows = sync, batch_rows
        self._parts: dict[tuple, list[_Part]] = {}
        self._moments = SharedMoments(self)
        self.weight = 1.0
        self.has_rows = True
        self.failure: BaseException | None = None

    def attach(self, model) -> None:
        """Let the optimizers of a model reduce gradients before they apply them.

        Layers that want the moments of the whole batch get them, too.
        """
        import keras

        if self._sync.world_size == 1:
            return
        intercept, reduce = {
            "tensorflow": (_intercept, self._in_graph),
            "torch": (_intercept, self._of_tensors),
            "jax": (intercept_stateless, self._in_step),
        }[keras.backend.backend()]
        for optimizer in optimizers_of(model):
            intercept(optimizer, reduce)
        self._moments.attach(model)

    def detach(self, model) -> None:
        """Leave the optimizers and layers as they came."""
        self._moments.detach(model)
        for optimizer in optimizers_of(model):
            for name in ("apply", "stateless_apply"):
                vars(optimizer).pop(name, None)

    def check(self) -> None:
        """Raise what went wrong in the last step, where the step could not."""
        if self.failure is not None:
            raise self.failure

    def sum_array(self, array: np.ndarray, weight: float) -> np.ndarray:
        """The sum over the ranks of ``weight * array``, called from inside a graph."""
        try:
            return self._sync.sum_arrays([array], weight)[0]
        except BaseException as error:
            self.failure = error
            raise

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
                return self._sum_of_all(kinds, sparse, arrays)
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

    def _sum_of_all(self, kinds, sparse, arrays) -> list:
        """The sums of what a graph has sent, in its order."""
        given, dense, tables = iter(arrays), [], []
        for kind, is_sparse in zip(kinds, sparse, strict=True):
            values = np.asarray(next(given))
            if is_sparse:
                tables.append((kind, values, next(given)))
            else:
                dense.append(values)
        sums = iter(self._sync.sum_arrays(dense, self.weight) if dense else ())
        rows = iter(self._sum_of_rows(tables) if tables else ())
        return [
            each for is_sparse in sparse for each in (next(rows) if is_sparse else [next(sums)])
        ]

    def _sum_of_rows(self, tables) -> list[list]:
        """The values and indices of the rows that any rank has."""
        import torch

        parts = self._parts_of(
            [(shape, getattr(torch, dtype), None) for (shape, dtype), *_ in tables]
        )
        for part, (_, values, indices) in zip(parts, tables, strict=True):
            # copied: the memory is TensorFlow's, and the sum is written to it
            rows = torch.from_numpy(values.copy()).reshape(-1, *part.shape[1:])
            places = torch.from_numpy(indices.copy()).reshape(1, -1)
            part.grad = torch.sparse_coo_tensor(places, rows, part.shape, check_invariants=False)
        self._sync.reduce(parts, self.weight, parts)
        out = []
        for part in parts:
            if part.grad is None:  # the rows of all ranks weigh nothing
                part.grad = part.zeros()
            summed = part.grad.to_sparse(1).coalesce()
            out.append([summed.values().numpy(), summed.indices()[0].numpy()])
            part.grad = None
        return out

    # -- the JAX backend -------------------------------------------------------------------------

    def _in_step(self, gradients: Sequence, variables: Sequence) -> list:
        from keras import ops

        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        kinds = [gradients[i].dtype.name for i in present]
        sent = [
            gradients[i] if kind in _SUMMED else ops.cast(gradients[i], "float32")
            for i, kind in zip(present, kinds, strict=True)
        ]
        back = called_back(self._sum_or_zeros, sent)
        out = list(gradients)
        for i, kind, value in zip(present, kinds, back, strict=True):
            out[i] = ops.cast(value, kind)
        return out

    def _sum_or_zeros(self, *arrays) -> list:
        """What is raised here would meet the next training of this process, too."""
        if self.failure is None:
            try:
                return self._sync.sum_arrays(arrays, self.weight)
            except BaseException as error:
                self.failure = error
        return [np.zeros_like(array) for array in arrays]

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

    return tensor if tensor.dtype.name in _SUMMED else tf.cast(tensor, tf.float32)
