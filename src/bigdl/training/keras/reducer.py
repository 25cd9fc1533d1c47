"""Data-parallel training steps of Keras, whose gradients are all-reduced before the optimizer.

``optimizer.apply`` of a compiled model first replaces every gradient by the sum over the ranks of
``weight * gradient``.  So clipping, accumulation, loss scaling and weight averages, which Keras
does in ``apply``, use the gradients of the global batch, and a custom step needs no change.
(``tf.distribute`` cannot do this: ``fit`` of Keras 3 fails under ``MultiWorkerMirroredStrategy``.)

With TensorFlow the all-reduce is a ``tf.numpy_function`` inside the graph of the training step,
with JAX an ``io_callback`` inside the compiled step.  Both use the same GradientSync as PyTorch.
The gradients are copied once, into the buckets that are sent.

``keras.layers.BatchNormalization(synchronized=True)`` (TensorFlow only) requests the moments of all
replicas from ``tf.distribute``, which sees each worker as the only replica.  Here such a layer
all-reduces its row count and sums inside the graph of the training step, and the backward pass
all-reduces their gradients.  So N workers normalize as one process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.embedding_tables.keras_model import ModelTables, StepErrors
from bigdl.training.keras.backends import KerasBatch, steps_of
from bigdl.training.keras.state import (
    RunningWeights,
    array_of,
    changed_by_rows,
    is_read_in_part,
    kept_values,
    optimizers_of,
    seed_states,
    synchronized_layers,
    tensor_of,
)
from bigdl.training.loss_form import (
    ROWS,
    SUM,
    LossWeights,
    PartialLoss,
    ProbeResult,
    agreed,
    probe_parts,
    tolerance_of,
)
from bigdl.training.state import isolated_rng

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
    import torch
    from numpy.typing import ArrayLike

    from bigdl.common.types import Tensors
else:
    keras = LazyModule("keras", "tf")
    tf = LazyModule("tensorflow", "tf")
    torch = LazyModule("torch", "orca")


_SUMMED = ("float32", "float64")  # others are widened first


class WorkerSteps:
    """Training steps of one worker's model, each of which is a collective operation.

    Parameters
    ----------
    model : keras.Model
        A compiled model.
    sync : GradientSync
    batch_rows : int
        See :class:`GradientReducer`.
    loss_weight : callable or str, optional
        Argument of the Estimator.
    warn : callable, optional
        Called with a message if the parts of a batch cannot be weighted exactly.

    Attributes
    ----------
    running : RunningWeights
        Weights that layers change without training.
    tables : ModelTables or None
        The sharded embeddings of the model.
    """

    running: RunningWeights
    tables: ModelTables | None

    def __init__(
        self,
        model: keras.Model,
        sync: GradientSync,
        batch_rows: int,
        loss_weight: Callable[..., float] | str | None = None,
        warn: Callable[[str], None] | None = None,
    ):
        self._warn = warn or (lambda text: None)
        self._model, self._sync = model, sync
        self._loss = KerasLoss(model, loss_weight)
        self._reducer = GradientReducer(sync, batch_rows)

    def attach(self) -> None:
        """Make the built model's optimizers all-reduce gradients."""
        model = self._model
        if self._sync.world_size > 1:
            self._loss.check_sum()
        if self._sync.rank:  # random layers draw different numbers on each rank
            for variable in seed_states(model):
                entropy = [*(int(n) for n in tensor_of(variable).reshape(-1)), self._sync.rank]
                drawn = np.random.SeedSequence(entropy).generate_state(variable.shape[0]) >> 1
                variable.assign(drawn.astype("int64"))
        self.tables = ModelTables.of(model, training=True)
        self._reducer.attach(model)
        self._reducer.is_active = False
        if self.tables is not None:
            self.tables.connect(self._sync)
            self._reducer.end_forward = self.tables.finish
        self._steps = steps_of(model)
        self.test = self._steps.test
        self.running = RunningWeights(model, self._sync)

    def train(
        self, batch: KerasBatch | None, rows: int, total: int, zero_row: KerasBatch
    ) -> dict[str, Any]:
        """Run a training step together with all other workers; a collective operation.

        Parameters
        ----------
        batch : tuple or None
            This worker's part; None without rows.
        rows, total : int
            Rows of `batch`, and of the parts of all workers.
        zero_row : tuple
            A batch of one row of weight 0, with which a worker without rows takes part.

        Returns
        -------
        dict
            Logs of the model's step; empty without rows.
        """
        reducer = self._reducer
        reducer.weight, reducer.has_rows = self._weight(batch, rows, total), bool(rows)
        reducer.is_active = True
        if self.tables is not None:
            self.tables.begin(is_training=bool(rows))
        try:
            rank_batch = cast("KerasBatch", batch)  # None only without rows
            logs = self._steps.train(rank_batch) if rows else self._train_without_rows(zero_row)
        except Exception:
            self._check()  # the backend wraps the original error
            raise
        finally:
            reducer.is_active = False
        self._check()
        if self.tables is not None:
            self.tables.update(reducer.weight)
        self.running.rows += rows
        return logs

    def _check(self) -> None:
        """Raise the first error that occurred inside the step, if any."""
        if self.tables is not None:
            self.tables.errors.check()
        self._reducer.errors.check()

    def _weight(self, batch: KerasBatch | None, rows: int, total: int) -> float:
        """Return the weight of this worker's loss in the loss of the global batch."""
        if self._sync.world_size == 1:
            return 1.0
        loss = self._loss
        if not loss.weights.is_known and loss.weights.is_due():
            result = ProbeResult("" if self.tables is None else ROWS)
            if batch is not None and rows and self.tables is None:
                result = loss.find(batch)
            codes = [row[0] for row in self._sync.all_gather([result.code])]
            if loss.weights.settle(agreed(codes), result.reason):
                self._warn(loss.sentence())
            loss.check_sum()
        if loss.is_sum:
            return float(rows > 0)
        counted, whole = float(rows), float(total)
        if loss.is_uneven:
            counted = loss.count(batch, rows) if rows else 0.0
            whole = sum(row[0] for row in self._sync.all_gather([counted]))
        return counted / whole if whole else 0.0

    def _train_without_rows(self, zero_row: KerasBatch) -> dict[str, Any]:
        with kept_values(changed_by_rows(self._model)):
            self._steps.train(zero_row)
        return {}


class GradientReducer:
    """Patch for Keras optimizers that all-reduces the gradients before they are applied.

    Parameters
    ----------
    sync : GradientSync
    batch_rows : int
        Rows of a global batch; a table with far more rows keeps its embedding gradients sparse.

    Attributes
    ----------
    weight : float
        Weight of this rank's loss in the loss of the batch; 0 for a rank without rows.
    has_rows : bool
        Whether this rank has rows of the batch, instead of a row of zeros.
    is_active : bool
        False outside the training loop: a callback that trains the model does not all-reduce.
    end_forward : callable
        Called before gradients are all-reduced.
    errors : StepErrors
        Errors of all-reduces inside a graph.
    """

    def __init__(self, sync: GradientSync, batch_rows: int):
        self._sync, self._batch_rows = sync, batch_rows
        self._tables: dict[tuple[Any, ...], list[Any]] = {}
        self.weight = 1.0
        self.has_rows = self.is_active = True
        self.end_forward: Callable[[], None] = lambda: None
        self.errors = StepErrors()

    def attach(self, model: keras.Model, others: Sequence[Any] = ()) -> None:
        """Make the optimizers of a model and the optimizers `others` all-reduce gradients.

        Synchronized BatchNormalization layers all-reduce their moments, too.
        """
        backend = keras.backend.backend()
        if self._sync.world_size == 1:
            for optimizer in [*optimizers_of(model), *others] if backend == "tensorflow" else ():
                object.__setattr__(optimizer, "apply", partial(self._apply, optimizer, _coalesced))
            return
        # patch instances, not classes, so that saved models are unaffected
        for optimizer in [*optimizers_of(model), *others]:
            if backend == "jax":
                # a loss-scaling optimizer reads the gradients before it calls ``apply``
                apply = partial(self._stateless_apply, optimizer)
                object.__setattr__(optimizer, "stateless_apply", apply)
            else:
                reduce = self._in_graph if backend == "tensorflow" else self._of_tensors
                object.__setattr__(optimizer, "apply", partial(self._apply, optimizer, reduce))
        for layer in synchronized_layers(model):
            object.__setattr__(layer, "_moments", partial(self._moments, layer))

    def _apply(
        self,
        optimizer: keras.Optimizer,
        reduce: Callable[[list[Any], list[Any]], list[Any]],
        grads: Iterable[Any],
        trainable_variables: Sequence[Any] | None = None,
    ) -> object:
        """All-reduce the gradients, then call the optimizer's ``apply``."""
        grads = list(grads)
        if not grads:
            return None
        variables = list(trainable_variables or optimizer._trainable_variables)
        if self.is_active:
            grads = reduce(grads, variables)
        return type(optimizer).apply(optimizer, grads, variables)

    def _stateless_apply(
        self,
        optimizer: keras.Optimizer,
        optimizer_variables: Sequence[keras.Variable],
        grads: Iterable[Any],
        trainable_variables: Sequence[Any],
    ) -> object:
        """All-reduce the gradients, then call the optimizer's ``stateless_apply``."""
        grads = self._in_step(list(grads), list(trainable_variables))
        return type(optimizer).stateless_apply(
            optimizer, optimizer_variables, grads, trainable_variables
        )

    # -- the torch backend -----------------------------------------------------------------------

    def _of_tensors(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self.end_forward()
        parameters = [variable.value for variable in variables]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._sync.all_reduce_gradients(parameters, self.weight)
        return [
            torch.zeros_like(p) if p.grad is None and gradient is not None else p.grad
            for p, gradient in zip(parameters, gradients, strict=True)
        ]

    # -- the TensorFlow backend ------------------------------------------------------------------

    def _in_graph(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        tables = [
            i
            for i, gradient in enumerate(gradients)
            if isinstance(gradient, tf.IndexedSlices)
            and is_read_in_part(variables[i], self._batch_rows)
        ]
        dense = [i for i, each in enumerate(gradients) if each is not None and i not in tables]
        values = [_wide(gradients[i].values) for i in tables]
        indices = [tf.cast(gradients[i].indices, tf.int64) for i in tables]
        sent = [*(_wide(tf.convert_to_tensor(gradients[i])) for i in dense), *values, *indices]
        shapes = [tuple(variables[i].shape) for i in tables]
        specs = [(shape, v.dtype.name) for shape, v in zip(shapes, values, strict=True)]

        def reduce(*arrays: np.ndarray) -> list[np.ndarray]:
            return self.errors.raising(self._sum_of_all, specs, arrays)

        received = tf.numpy_function(reduce, sent, [s.dtype for s in sent], stateful=True)
        is_list = isinstance(received, list | tuple)
        pieces, out = iter(received if is_list else [received]), list(gradients)
        for i in dense:
            total = next(pieces)
            total.set_shape(variables[i].shape)
            out[i] = tf.cast(total, gradients[i].dtype)
        rows, indices = [next(pieces) for _ in tables], [next(pieces) for _ in tables]
        for i, shape, row, index in zip(tables, shapes, rows, indices, strict=True):
            row.set_shape((None, *shape[1:]))
            index.set_shape((None,))
            row = tf.cast(row, gradients[i].dtype)
            out[i] = tf.IndexedSlices(row, index, tf.constant(shape, tf.int64))
        return out

    def _sum_of_all(
        self, specs: Sequence[tuple[Any, ...]], arrays: Sequence[np.ndarray]
    ) -> list[Any]:
        """Sum gradients over all workers; `arrays` has the dense, then the sparse gradients."""
        self.end_forward()
        first = len(arrays) - 2 * len(specs)
        dense = [np.asarray(array) for array in arrays[:first]]
        sums = self._sync.sum_arrays(dense, self.weight) if dense else []
        if not specs:
            return sums
        values, indices = arrays[first : first + len(specs)], arrays[first + len(specs) :]
        rows, row_indices = zip(*self._sum_of_rows(specs, values, indices), strict=True)
        return [*sums, *rows, *row_indices]

    def _sum_of_rows(
        self,
        specs: Sequence[tuple[Any, ...]],
        all_values: Sequence[np.ndarray],
        all_indices: Sequence[np.ndarray],
    ) -> list[tuple[Any, ...]]:
        """Return the values and the indices of each table's summed sparse gradient."""
        key = tuple(specs)
        if key not in self._tables:  # the same objects each time: the sync keeps buffers for them
            # placeholders with the tables' shapes and dtypes, in the memory of one element
            self._tables[key] = [
                torch.zeros(1, dtype=getattr(torch, dtype)).expand(shape) for shape, dtype in specs
            ]
        parts = self._tables[key]
        for part, values, indices in zip(parts, all_values, all_indices, strict=True):
            # copied, since the memory is TensorFlow's and the sum is written in place
            rows = torch.from_numpy(values.copy()).reshape(-1, *part.shape[1:])
            index = torch.from_numpy(indices.copy()).reshape(1, -1)
            part.grad = torch.sparse_coo_tensor(index, rows, part.shape, check_invariants=False)
        self._sync.all_reduce_gradients(parts, self.weight, parts)
        out = []
        for part in parts:
            if part.grad is None:  # the rows of all ranks have weight 0
                part.grad = torch.zeros_like(part)
            summed = part.grad.to_sparse(1).coalesce()
            out.append((summed.values().numpy(), summed.indices()[0].numpy()))
            part.grad = None
        return out

    # -- the JAX backend -------------------------------------------------------------------------

    def _in_step(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        import jax
        from jax.experimental import io_callback

        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        dtypes = [gradients[i].dtype.name for i in present]
        sent = [
            gradients[i] if dtype in _SUMMED else keras.ops.cast(gradients[i], "float32")
            for i, dtype in zip(present, dtypes, strict=True)
        ]
        forms = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in sent]
        # ordered: a step with two optimizers makes its all-reduces in the same order on all ranks
        received = io_callback(self._sum_or_zeros, forms, *sent, ordered=True)
        out = list(gradients)
        for i, dtype, value in zip(present, dtypes, received, strict=True):
            out[i] = keras.ops.cast(value, dtype)
        return out

    def _sum_or_zeros(self, *arrays: ArrayLike) -> list[np.ndarray]:
        received = [np.asarray(array) for array in arrays]

        def zeros() -> list[np.ndarray]:
            return [np.zeros_like(array) for array in received]

        return self.errors.instead(zeros, self._summed, received)

    def _summed(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        self.end_forward()
        return self._sync.sum_arrays(arrays, self.weight)

    # -- moments of BatchNormalization -------------------------------------------------------------

    def _moments(
        self, layer: keras.Layer, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tuple[Any, ...]:
        """Compute the mean and the variance of a layer's inputs over all workers."""
        if mask is None:
            mean, variance = keras.ops.moments(inputs, axes=layer._reduction_axes)
            count = tf.size(inputs) / tf.size(mean)
        else:
            mean, variance = type(layer)._moments(layer, inputs, mask)
            count = tf.reduce_sum(tf.cast(mask, tf.float64))
        # sums of squares would cancel in the layer's precision
        count = tf.reshape(tf.cast(count, tf.float64), (1,))
        local_mean = tf.reshape(tf.cast(mean, tf.float64), (-1,))
        local_square = tf.reshape(tf.cast(variance, tf.float64), (-1,)) + local_mean**2
        sums = self._summed_moments(tf.concat([count, count * local_mean, count * local_square], 0))
        count, *sums = tf.split(sums, [1, tf.size(local_mean), tf.size(local_mean)])
        both_mean, both_square = (each / count for each in sums)
        both_variance = tf.maximum(both_square - both_mean**2, 0)
        return tuple(
            tf.reshape(tf.cast(new, old.dtype), tf.shape(old))
            for new, old in ((both_mean, mean), (both_variance, variance))
        )

    def _summed_moments(self, values: tf.Tensor) -> tf.Tensor:
        """Sum values over all workers, with support for gradients."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def summed(values: tf.Tensor) -> tuple[Any, Callable[[Any], Any]]:
            return called(self._forward, values), partial(called, self._backward)

        def called(function: Callable[[Any], Any], values: tf.Tensor) -> tf.Tensor:
            result = tf.numpy_function(function, [values], values.dtype, stateful=True)
            result.set_shape(values.shape)
            return result

        return summed(values)

    def _forward(self, values: np.ndarray) -> np.ndarray:
        return self.errors.raising(self._sync.sum_arrays, [values], float(self.has_rows))[0]

    def _backward(self, gradient: np.ndarray) -> np.ndarray:
        """Return the weighted sum of all workers' gradients, divided by this worker's weight."""
        weight = self.weight if self.has_rows else 0.0
        total = self.errors.raising(self._sync.sum_arrays, [gradient], weight)[0]
        return total / weight if weight else np.zeros_like(total)


def _coalesced(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Sum the duplicate rows of sparse gradients, as an all-reduce does.

    Keras optimizers that square a gradient would treat a repeated id in a batch as two rows.
    """
    out = list(gradients)
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            indices, segments = tf.unique(gradient.indices)
            values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.size(indices))
            out[i] = tf.IndexedSlices(values, indices, gradient.dense_shape)
    return out


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    """Cast a tensor to float32 unless gradients can be summed in its dtype."""
    return tensor if tensor.dtype.name in _SUMMED else tf.cast(tensor, tf.float32)


class KerasLoss:
    """Per-worker weights that combine the losses of a batch's parts, for a compiled model.

    Keras losses are known: means over the rows, sums, or means over the sample weights or over the
    labels that are not ``ignore_class``. Other losses, and those of models with mask layers, are
    probed with parts of the first batches.

    Parameters
    ----------
    model : keras.Model
        A compiled model.
    loss_weight : callable or str, optional
        ``loss_weight(x, y)`` returns the divisor of the loss of these rows; or ``"rows"`` or
        ``"sum"``.

    Attributes
    ----------
    weights : LossWeights

    Raises
    ------
    UsageError
        If the losses have different divisors, or one is not reduced.
    """

    def __init__(self, model: keras.Model, loss_weight: Callable[..., float] | str | None = None):
        self._model, self._loss_weight = model, loss_weight if callable(loss_weight) else None
        losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
        self._ignored = [getattr(loss, "ignore_class", None) for loss in losses]
        self._divisor = _loss_divisor(losses, self._ignored)
        is_sum = self._divisor == "none"
        known = SUM if is_sum else ROWS
        if any(map(_is_unknown, losses)) or (not is_sum and _masks(model)):
            known = ""
        if type(model).train_step is not keras.Model.train_step:
            known = known or ROWS  # a custom step may use its loss freely
        self.weights = LossWeights(known, loss_weight)

    @property
    def is_sum(self) -> bool:
        """True if the loss is a sum over the rows."""
        return self.weights.is_sum

    @property
    def is_uneven(self) -> bool:
        """True if a part's loss may be divided by a number other than its row count."""
        return self._loss_weight is not None or (
            not self.weights.is_sum and self._divisor != "rows"
        )

    def count(self, batch: object, rows: int) -> float:
        """Return the number that divides a batch's loss: its rows, labels or sum of weights."""
        if not isinstance(batch, tuple):  # of a custom training step
            return float(rows)
        x, y, weights = (*batch, None, None)[:3]
        if self._loss_weight is not None:
            return float(self._loss_weight(x, y))
        kept = np.ones(rows)
        if self._divisor == "labels":
            labels = np.asarray(y)
            kept = (labels != self._ignored[0]).astype("float64")
        if self._divisor == "weights" and weights is not None:
            kept = np.asarray(weights, "float64")
        return float(kept.sum()) if self.is_uneven else float(rows)

    def check_sum(self) -> None:
        """Raise an error for a summed loss with regularization."""
        if self.is_sum and self._model.losses:
            raise UsageError(
                "A loss with reduction='sum' is not supported with regularization, which every "
                "worker would add; use reduction='sum_over_batch_size'",
                code="loss-unsupported",
            )

    def find(self, batch: KerasBatch) -> ProbeResult:
        """Probe the loss with parts of a batch, without changing the model."""
        model = self._model
        if model.optimizer is None or not isinstance(batch, tuple):
            return ProbeResult(ROWS)

        def some(value: Tensors, index: torch.Tensor) -> Tensors:
            return keras.tree.map_structure(
                lambda leaf: None if leaf is None else array_of(leaf)[index.numpy()], value
            )

        def part_of(index: torch.Tensor) -> PartialLoss:
            x, y, weights = (*some(batch, index), None, None)[:3]
            outputs = model(x, training=False)
            loss = float(array_of(model.compute_loss(x, y, outputs, weights)))
            loss -= float(sum(array_of(each).sum() for each in model.losses))
            return PartialLoss(loss, len(index), None, tolerance_of(model.compute_dtype))

        rows = len(array_of(keras.tree.flatten(batch[0])[0]))
        kept = [*changed_by_rows(model), *model.metrics_variables]
        with kept_values(kept), isolated_rng(0):
            return probe_parts(part_of, rows)

    def sentence(self) -> str:
        """Return the warning for a loss whose parts cannot be weighted exactly."""
        name, what = f"The loss of {self._model.name}", self.weights.reason
        if _masks(self._model):
            what += "; a mask of its layers may exclude elements"
        return (
            f"{name} is no mean and no sum over the rows of a batch: {what}. So the result differs "
            "from that of one process with the whole batch; workers are weighted by their rows. "
            "Pass loss_weight= to Estimator.from_keras, a function (x, y) that returns the divisor "
            'of the loss of these rows; loss_weight="rows" accepts the weights by rows'
        )


def _is_unknown(loss: object) -> bool:
    """Return True for a loss that Keras does not define."""
    if isinstance(loss, str | dict):
        return False
    function = getattr(loss, "fn", loss)  # the function that Keras wrapped
    name = getattr(function, "__module__", None) or ""
    if function is loss and not callable(getattr(loss, "get_config", None)):
        return not name.startswith("keras.")
    return not (name.startswith("keras.") and type(loss).__module__.startswith("keras."))


def _masks(model: keras.Model) -> bool:
    """Return True if a layer of the model creates a mask."""
    return any(
        getattr(layer, "mask_zero", False) or type(layer).__name__ == "Masking"
        for layer in model._flatten_layers()
    )


def _loss_divisor(losses: Sequence[Any], ignored: Sequence[Any]) -> str:
    """Return what divides a batch's loss: ``"rows"``, ``"labels"``, ``"weights"`` or ``"none"``."""
    divisors = set()
    for loss, label in zip(losses, ignored, strict=True):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction == "none" or reduction is None:
            raise UsageError(
                "A loss has reduction='none'; training needs one number, use "
                "'sum_over_batch_size' or 'sum'",
                code="loss-unsupported",
            )
        divisor = {"sum": "none", "mean_with_sample_weight": "weights"}.get(reduction, "rows")
        divisors.add("labels" if divisor == "rows" and label is not None else divisor)
    if len(divisors) > 1 or (divisors == {"labels"} and len(losses) > 1):
        raise UsageError(
            "The losses of the outputs have different reductions, or ignore classes, which workers "
            "cannot weight exactly; use the same reduction for all, without ignore_class",
            code="loss-unsupported",
        )
    return divisors.pop() if divisors else "rows"


def check_optimizer(model: keras.Model) -> None:
    """Raise an error for a model without an optimizer, unless it overrides ``train_step``."""
    if model.optimizer is None and type(model).train_step is keras.Model.train_step:
        raise UsageError(
            "fit needs an optimizer; pass it to model.compile",
            code="argument-missing",
            argument="optimizer",
        )
