"""Sharded embeddings of a Keras model in a worker.

A sharded layer has a weight without rows, the *anchor*, among the weights of the model.  Gradients
flow to the anchor, so the backward pass reaches the layer.  A torch table holds its rows
(:mod:`bigdl.training.embedding_tables`), and a torch optimizer updates them on their owner.
Lookups and gradients leave the TensorFlow graph or the compiled JAX step through callbacks.  These
run one after the other in the order of the model, so that all workers call the same collectives in
the same order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from bigdl.common.errors import LazyModule
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.checkpoint import Checkpoint
from bigdl.training.slices import SavedSlices
from bigdl.training.state import dumps, loads

if TYPE_CHECKING:
    from typing import SupportsInt

    import jax
    import keras
    import tensorflow as tf
    import torch
    from numpy.typing import ArrayLike

    from bigdl.training.embedding_tables.sharded import ShardedTable
else:
    torch = LazyModule("torch", "orca")
    keras = LazyModule("keras", "tf")
    tf = LazyModule("tensorflow", "tf")

T = TypeVar("T")


class StepErrors:
    """Record of the first callback error in a compiled step, since backends would wrap the error.

    Attributes
    ----------
    first : BaseException or None
    """

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def raising(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function; record and re-raise its error."""
        try:
            return function(*arguments)
        except BaseException as error:
            self.first = self.first or error
            raise

    def instead(self, value: Callable[[], T], function: Callable[..., T], *arguments: object) -> T:
        """Call a function; after an error return a dummy value, as JAX requires.

        An exception would also break the next training of the process.
        """
        if self.first is None:
            try:
                return function(*arguments)
            except BaseException as error:
                self.first = error
        return value()

    def check(self) -> None:
        """Raise the first recorded error, which the compiled step could not raise."""
        if self.first is not None:
            raise self.first


def sharded_layers(model: keras.Model) -> list[Any]:
    """Return the layers of a model, at any depth, that can be backed by a torch table."""
    return [layer for layer in model._flatten_layers() if hasattr(layer, "sharded_rows")]


def by_number(model: keras.Model, layers: Sequence[Any]) -> dict[int, Any]:
    """Return a dict of layers by the index of their weight in ``model.weights``."""
    numbers = {id(variable): n for n, variable in enumerate(model.weights)} if layers else {}
    return {numbers[id(layer.embeddings)]: layer for layer in layers}


class LayerRows:
    """One layer's table in a worker, and its lookups in the current step.

    Parameters
    ----------
    table : bigdl.training.embedding_tables.sharded.ShardedTable

    Attributes
    ----------
    is_connected : bool
        False while a worker builds its model; lookups then return zeros.
    is_training : bool
        True if the lookups need gradients.
    errors : StepErrors
        Errors of lookups; the tables of a model share the object.
    """

    def __init__(self, table: ShardedTable):
        self.table = table
        self.is_connected = self.is_training = False
        self.errors = StepErrors()
        self._lookups: list[torch.Tensor] = []  # of the current step, with their autograd graph

    def begin(self, *, is_training: bool) -> None:
        """Reset the lookups before a step."""
        self.is_training = is_training
        self._lookups.clear()

    def lookup(self, anchor: tf.Tensor, ids: tf.Tensor) -> tf.Tensor | jax.Array | torch.Tensor:
        """Return the rows of `ids` as tensors of the Keras backend.

        Parameters
        ----------
        anchor : tensor
            Value of the layer's anchor weight.
        ids : tensor
            Integers of any shape.
        """
        backend = {"tensorflow": self._in_graph, "jax": self._in_step, "torch": self._of_tensors}
        return backend[keras.backend.backend()](anchor, ids)

    def _fetch(self, ids: torch.Tensor) -> torch.Tensor:
        if not self.is_connected:
            return torch.zeros(*ids.shape, self.table.embedding_dim, dtype=self.table.weight.dtype)
        with torch.set_grad_enabled(self.is_training):
            return cast("torch.Tensor", self.table(ids))

    def _answer(self, ids: ArrayLike) -> tuple[np.ndarray, np.int32]:
        """Return the rows of `ids`, and the number of this lookup for :meth:`_take_gradient`."""
        rows = self._fetch(torch.from_numpy(np.array(ids, "int64")))
        number = len(self._lookups)
        if rows.requires_grad:
            self._lookups.append(rows)
        return rows.detach().numpy(), np.int32(number)

    def _take_gradient(self, number: SupportsInt, gradient: ArrayLike) -> np.float32:
        if self.is_training and int(number) < len(self._lookups):
            torch.autograd.backward(
                self._lookups[int(number)], torch.from_numpy(np.array(gradient))
            )
        return np.float32(0)

    # -- the torch backend -----------------------------------------------------------------------

    def _of_tensors(self, anchor: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if ids.device.type == "meta":
            shape = *ids.shape, self.table.embedding_dim
            return torch.empty(shape, dtype=anchor.dtype, device="meta")
        rows = self._fetch(ids.detach().to("cpu", torch.int64)).to(ids.device)
        return cast("torch.Tensor", _anchored()(anchor, rows))

    # -- the TensorFlow backend ------------------------------------------------------------------

    def _in_graph(self, anchor: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        forms = [anchor.dtype, tf.int32]

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def lookup(anchor: tf.Tensor, ids: tf.Tensor) -> tuple[Any, Callable[[Any], Any]]:
            answer = partial(self.errors.raising, self._answer)
            rows, number = tf.numpy_function(answer, [ids], forms, stateful=True)
            rows.set_shape((*ids.shape, anchor.shape[1]))

            def gradient(upstream: tf.Tensor) -> tuple[Any, None]:
                take = partial(self.errors.raising, self._take_gradient)
                sent = [number, tf.convert_to_tensor(upstream)]
                done = tf.numpy_function(take, sent, tf.float32, stateful=True)
                with tf.control_dependencies([done]):
                    return tf.zeros_like(anchor), None

            return rows, gradient

        return lookup(tf.convert_to_tensor(anchor), ids)

    # -- the JAX backend -------------------------------------------------------------------------

    def _in_step(self, anchor: jax.Array, ids: jax.Array) -> jax.Array:
        import jax
        from jax.experimental import io_callback

        number_form = jax.ShapeDtypeStruct((), "int32")
        done_form = jax.ShapeDtypeStruct((), "float32")

        def ask(anchor: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            shape = *ids.shape, anchor.shape[1]
            forms = jax.ShapeDtypeStruct(shape, anchor.dtype), number_form

            def zeros() -> tuple[np.ndarray, np.int32]:
                return np.zeros(shape, anchor.dtype), np.int32(0)

            answer = partial(self.errors.instead, zeros, self._answer)
            # ordered: all lookups run before the gradients of the step are all-reduced
            rows, number = io_callback(answer, forms, ids, ordered=True)
            return rows, number

        @jax.custom_vjp
        def lookup(anchor: jax.Array, ids: jax.Array) -> jax.Array:
            return ask(anchor, ids)[0]

        def forward(anchor: jax.Array, ids: jax.Array) -> tuple[Any, Any]:
            rows, number = ask(anchor, ids)
            return rows, (number, anchor)

        def backward(kept: tuple[jax.Array, jax.Array], upstream: jax.Array) -> tuple[Any, None]:
            number, anchor = kept
            take = partial(self.errors.instead, np.float32, self._take_gradient)
            io_callback(take, done_form, number, upstream, ordered=True)
            return jax.numpy.zeros_like(anchor), None

        lookup.defvjp(forward, backward)
        return lookup(anchor, ids)


@functools.cache
def _anchored() -> Callable[..., Any]:
    """Create an autograd function of `anchor` and `rows` that returns `rows`."""

    class Anchored(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, anchor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(anchor)
            return rows.view_as(rows)

        @staticmethod
        def backward(context: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (anchor,) = context.saved_tensors
            return torch.zeros_like(anchor), upstream

    return Anchored.apply


class ModelTables:
    """Sharded embeddings of a worker's model, and the optimizers that update their rows.

    Parameters
    ----------
    model : keras.Model
        A model whose weights are built.
    training : bool
        False for evaluation and prediction, which need no optimizer.

    Attributes
    ----------
    modules : torch.nn.ModuleDict
        The torch tables.
    errors : StepErrors
        Errors of lookups inside a step.
    """

    def __init__(self, model: keras.Model, *, training: bool = False):
        from bigdl.training.embedding_tables.torch_model import ShardedTables

        #: by the number of the anchor among the weights of the model, which names its files, too
        self._layers = by_number(model, [e for e in sharded_layers(model) if e.is_placed])
        self._optimizers = {
            number: layer.table_optimizer(model.optimizer)
            for number, layer in self._layers.items()
            if training
        }
        self.modules = torch.nn.ModuleDict(
            {str(number): layer.sharded_rows.table for number, layer in self._layers.items()}
        )
        states = _States(self._optimizers.values()) if training else None
        self._tables = ShardedTables(self.modules, states)
        self._is_open = False
        self.errors = StepErrors()
        for rows in self._rows:
            rows.errors = self.errors

    @classmethod
    def of(cls, model: keras.Model, *, training: bool = False) -> ModelTables | None:
        """Return the sharded embeddings of a model, or None if it has none."""
        has_tables = any(layer.is_placed for layer in sharded_layers(model))
        return cls(model, training=training) if has_tables else None

    @property
    def _rows(self) -> list[LayerRows]:
        return [layer.sharded_rows for layer in self._layers.values()]

    def connect(self, sync: GradientSync) -> None:
        """Connect the tables of all workers, so that they can fetch each other's rows."""
        self._tables.connect(sync)
        self._connected()

    def read_from(self, slices: SavedSlices) -> None:
        """Read rows from memory-mapped files of a checkpoint."""
        from bigdl.training.embedding_tables.torch_model import SavedRows

        SavedRows(slices, self.modules)
        self._connected()

    def _connected(self) -> None:
        for rows in self._rows:
            rows.is_connected = True

    # -- a step; collectives ---------------------------------------------------------------------

    def begin(self, *, is_training: bool) -> None:
        """Prepare the tables for a training step, or for several forward passes."""
        for layer in self._layers.values():
            layer.sharded_rows.begin(is_training=is_training)
            layer.sharded_rows.table.weight.requires_grad_(layer.trainable)
        for number, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self._layers[number].current_learning_rate()
        self._tables.begin()
        self._is_open = True

    def finish(self) -> None:
        """Serve lookups of the other ranks until their forward passes have ended."""
        if self._is_open:
            self._is_open = False
            self._tables.finish()
            self.errors.check()

    def update(self, weight: float) -> None:
        """Sum the gradients of the rows over the ranks, and update the rows.

        Parameters
        ----------
        weight : float
            Weight of this rank's loss in the loss of the batch.
        """
        self.finish()
        self._tables.send_gradients(weight)
        # torch's default, without its warning
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            for optimizer in self._optimizers.values():
                optimizer.step()
        for rows in self._rows:
            rows.begin(is_training=False)

    # -- the state -------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """Return this worker's rows and their optimizer state, without copying."""
        return self._tables.arrays()

    def files(self) -> dict[str, bytes]:
        """Return the checkpoint files of optimizer state that is equal on all ranks."""
        from bigdl.training.embedding_tables.sharded import of_rows

        states = {}
        for number, optimizer in self._optimizers.items():
            weight = self._table(number).weight
            state = optimizer.state.get(weight, {})
            kept = of_rows(state, len(weight))
            states[number] = {key: value for key, value in state.items() if key not in kept}
        return {"tables.pt": dumps(states)}

    def load(self, slices: SavedSlices) -> None:
        """Load this worker's rows from a checkpoint."""
        self._tables.load(slices)

    def cut(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Load this worker's rows from whole tables; return the files without the tables.

        Parameters
        ----------
        files : dict of str to bytes
            Files of a checkpoint.
        """
        from bigdl.training.embedding_tables.sharded import of_rows

        files = dict(files)
        states = loads(files.pop("tables.pt")) if "tables.pt" in files else {}
        model = loads(files["model.pt"])
        growing = model.pop("tables", {})
        for number in self._layers:
            table, whole = self._table(number), model["weights"][number]
            arrays = growing.get(number, {"weight": whole} if len(whole) else None)
            if arrays is not None:
                table.take_whole(arrays)
                model["weights"][number] = whole[:0]
            if number in self._optimizers:
                state = self._optimizers[number].state[table.weight]
                state.update(states.get(number, {}))
                for key, value in of_rows(state, table.whole_rows).items():
                    state[key] = table.local_rows(value).clone()
        return {**files, "model.pt": dumps(model)}

    def _table(self, number: int) -> ShardedTable:
        table: ShardedTable = self._layers[number].sharded_rows.table
        return table


class _States:
    """Combined view of the states of several optimizers with one weight each."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]):
        self._of = {id(o.param_groups[0]["params"][0]): o for o in optimizers}

    @property
    def state(self) -> _States:
        return self

    def get(self, weight: torch.Tensor, default: object = None) -> Any:
        return self._of[id(weight)].state.get(weight, default)

    def __getitem__(self, weight: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._of[id(weight)].state[weight]
        return state


@contextlib.contextmanager
def optimizers_cut() -> Iterator[None]:
    """Context manager that keeps Keras optimizers from loading the state of sharded table rows.

    The torch optimizers of the sharded rows keep the state of the rows.
    """
    optimizer_class = keras.optimizers.Optimizer

    def load(optimizer: keras.Optimizer, store: Any) -> None:
        values = {key: store[key][()] for key in store.keys()}  # noqa: SIM118
        for number, variable in enumerate(optimizer.variables):
            value = values.get(str(number))
            if value is not None and tuple(variable.shape) == (0, *value.shape[1:]):
                values[str(number)] = value[:0]
        before(optimizer, values)

    before = optimizer_class.load_own_variables
    is_defined = "load_own_variables" in vars(optimizer_class)
    optimizer_class.load_own_variables = load
    try:
        yield
    finally:
        if is_defined:
            optimizer_class.load_own_variables = before
        else:
            del optimizer_class.load_own_variables


def whole_tables(snapshot: Checkpoint) -> Checkpoint:
    """Return a Keras checkpoint whose files hold all rows of its tables."""
    slices = snapshot.slices
    if slices is None:
        return snapshot
    from bigdl.training.embedding_tables.torch_model import whole_table

    model, states = loads(snapshot.files["model.pt"]), loads(snapshot.files["tables.pt"])
    for name in slices.names:
        number, _, key = name.partition(".")
        if key == "weight":
            arrays, kept = whole_table(slices, name)
            arrays = {each.removeprefix(f"{number}."): array for each, array in arrays.items()}
            states.setdefault(int(number), {}).update(kept)
            if len(arrays) > 1:  # with the ids of its rows
                model.setdefault("tables", {})[int(number)] = arrays
            else:
                model["weights"][int(number)] = arrays["weight"]
    return snapshot.without_slices({"model.pt": dumps(model), "tables.pt": dumps(states)})
