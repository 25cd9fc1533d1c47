"""Parts of models for Keras: embeddings whose rows lie in slices on the workers."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_choice, check_integer, check_number, check_positive
from bigdl.common.errors import UsageError, require

require("keras", "tf")  # this module is about nothing else
require("torch", "orca")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import torch  # noqa: E402

from bigdl.orca.learn.optimizers.rowwise_adagrad import RowwiseAdagrad  # noqa: E402
from bigdl.training.embedding_tables.growing import GrowingEmbedding as GrowingTable  # noqa: E402
from bigdl.training.embedding_tables.keras_model import LayerRows  # noqa: E402
from bigdl.training.embedding_tables.placement import current_placement, table_placement  # noqa: E402
from bigdl.training.embedding_tables.sharded import ShardedEmbedding as Table  # noqa: E402
from bigdl.training.embedding_tables.sharded import ShardedTable, arrow_of  # noqa: E402

if TYPE_CHECKING:
    from bigdl.training.embedding_tables.placement import TablePlacement

__all__ = ["GrowingEmbedding", "ShardedEmbedding"]

_OPTIMIZERS = ("sgd", "adagrad", "adam", "rowwise_adagrad")


class _TableLayer(keras.layers.Layer):
    """An embedding whose rows are a table of torch in a worker, with an optimizer of their own.

    Attributes
    ----------
    sharded_rows : LayerRows or None
        The table, and how calls reach it; None where the rows are a weight of the layer.
    """

    embeddings: Any

    def __init__(
        self,
        output_dim: int,
        embeddings_initializer: Any,
        mask_zero: bool,
        optimizer: str | None,
        learning_rate: float | None,
        storage: str,
        options: dict,
    ):
        super().__init__(**options)
        self.output_dim = check_positive("output_dim", output_dim)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.mask_zero = self.supports_masking = mask_zero
        if optimizer is not None:
            check_choice("optimizer", optimizer, _OPTIMIZERS)
        if learning_rate is not None:
            check_number("learning_rate", learning_rate, above=0)
        self.table_optimizer_name, self.learning_rate = optimizer, learning_rate
        self.storage = check_choice("storage", storage, ("memory", "mmap"))
        self._model_optimizer: list = []  # in a list, so that it is no part of the layer
        self._place: TablePlacement | None = current_placement()
        # as seeds of initializers are drawn: alike on all workers
        self._seed = random.randint(1, 1 << 30)
        self.sharded_rows: LayerRows | None = None

    @property
    def is_placed(self) -> bool:
        """True if it holds the rows of a worker."""
        return self.sharded_rows is not None and self.sharded_rows.table.is_placed

    def _made_table(self, kind: Callable[..., ShardedTable], *sizes: Any, **more: Any) -> Any:
        """Return the table of torch, with this worker's rows or all."""
        dtype = getattr(torch, keras.backend.standardize_dtype(self.variable_dtype), None)
        if dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"The rows of a {type(self).__name__} are float32 or float64, got "
                f"dtype={self.variable_dtype!r}",
                code="argument-value",
                argument="dtype",
                allowed=["float32", "float64"],
            )
        more.update(init=self._first_values, storage=self.storage, dtype=dtype)
        with torch.random.fork_rng(devices=[]), table_placement(self._place):
            torch.manual_seed(self._seed)
            return kind(*sizes, **more)

    def _add_embeddings(self, values: np.ndarray) -> None:
        self.embeddings = self.add_weight(
            shape=values.shape,
            initializer=lambda shape, dtype: keras.ops.convert_to_tensor(values, dtype),
            name="embeddings",
        )
        self.built = True

    def _first_values(self, rows: torch.Tensor) -> None:
        """Set some rows of the table, under the seed of torch that they have."""
        initializer, dtype = self.embeddings_initializer, str(rows.dtype).removeprefix("torch.")
        if isinstance(initializer, keras.initializers.Initializer):
            config = initializer.get_config()
            if "seed" in config:  # it gives the same values again and again
                seed = int(torch.randint(1 << 31, ()))
                initializer = type(initializer).from_config({**config, "seed": seed})
        values = keras.ops.convert_to_numpy(initializer(tuple(rows.shape), dtype=dtype))
        rows.copy_(torch.from_numpy(values.copy()))

    def _looked_up(self, ids: Any) -> Any:
        """Return rows from the table of torch."""
        assert self.sharded_rows is not None
        return self.sharded_rows.lookup(keras.ops.convert_to_tensor(self.embeddings), ids)

    def compute_output_shape(self, input_shape: Any) -> tuple:
        return (*input_shape, self.output_dim)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "mask_zero": self.mask_zero,
            "optimizer": self.table_optimizer_name,
            "learning_rate": self.learning_rate,
            "storage": self.storage,
        }

    def _check_whole(self) -> None:
        if self.is_placed:
            raise UsageError(
                f"A worker has some rows of a {type(self).__name__} only, so it cannot write the "
                "model to a file; fit writes checkpoints to model_dir, and save of the Estimator "
                "files",
                code="unsupported",
            )

    def to_arrow(self, id_col: str = "id", vector_col: str = "vector", field: int = 0) -> pa.Table:
        """Return the ids of a field and their rows, such as for a store of features.

        Parameters
        ----------
        id_col, vector_col : str
            Names of the columns: int64, and lists of as many numbers as a row has.
        field : int

        Returns
        -------
        pyarrow.Table
            By id. The layer has to be in a whole model, as ``Estimator.get_model`` returns it.

        Raises
        ------
        UsageError
            On a worker, which has some of the rows only, and before the layer is built.
        """
        if self.is_placed or not self.built:
            raise UsageError(
                f"to_arrow needs all rows of a {type(self).__name__}: call it on the layer of the "
                "model that get_model of the Estimator returns",
                code="unsupported",
                method="to_arrow",
            )
        return self._as_arrow(id_col, vector_col, field)

    @abstractmethod
    def _as_arrow(self, id_col: str, vector_col: str, field: int) -> pa.Table:
        """Do :meth:`to_arrow` where all rows are."""

    # -- what Estimators do -----------------------------------------------------------------------

    def table_optimizer(self, model_optimizer: Any) -> torch.optim.Optimizer:
        """Return what updates the rows of this worker.

        Parameters
        ----------
        model_optimizer : keras.optimizers.Optimizer

        Raises
        ------
        UsageError
            If the rows cannot be updated as it does, or at its pace.
        """
        optimizer, name = model_optimizer, self.table_optimizer_name
        kind = type(self).__name__
        if optimizer is None:
            raise UsageError(
                f"A {kind} needs a model that is compiled with an optimizer",
                code="argument-missing",
                argument="optimizer",
            )
        advice = f"; use another one, or pass optimizer= to the {kind}"
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise UsageError(
                f"A {kind} does not go with a LossScaleOptimizer, which scales the "
                "gradients of its rows; use the precision mixed_bfloat16",
                code="optimizer-unsupported",
            )
        if optimizer.gradient_accumulation_steps:
            raise UsageError(
                f"A {kind} does not go with gradient_accumulation_steps: its rows are "
                "updated after every batch; use a larger batch_size",
                code="optimizer-unsupported",
                argument="gradient_accumulation_steps",
            )
        if name is None:
            clips = ("clipnorm", "global_clipnorm", "clipvalue")
            if clip := next((each for each in clips if getattr(optimizer, each)), None):
                raise UsageError(
                    f"{clip} of the model's optimizer does not reach the rows of a {kind}{advice}",
                    code="optimizer-unsupported",
                    argument=clip,
                )
            name = _name_of(optimizer, kind, advice)
        self._model_optimizer = [optimizer]
        rate = self.current_learning_rate()
        assert self.sharded_rows is not None
        return _made(name, self.sharded_rows.table.weight, rate, optimizer)

    def current_learning_rate(self) -> float:
        """Return the learning rate of the rows at the next step."""
        if self.learning_rate is not None:
            return self.learning_rate
        return float(keras.ops.convert_to_numpy(self._model_optimizer[0].learning_rate))


def _integers(inputs: Any) -> Any:
    """Return ids as the backend counts."""
    return keras.ops.cast(inputs, "int32" if keras.backend.backend() == "jax" else "int64")


@keras.saving.register_keras_serializable("bigdl")
class ShardedEmbedding(_TableLayer):
    """An embedding that is cut in slices on the workers of an Estimator.

    Row i lies on worker ``i % N``. A forward pass fetches the rows of its batch from their owners,
    every row once, and the gradients go back to them; there the rows are updated, and there the
    state of their optimizer lies. So N workers together hold the table once, and make the updates
    of one process.

    Anywhere else, in a program of one's own for example, it is an ordinary embedding, and so is
    that of ``Estimator.get_model``.

    Parameters
    ----------
    input_dim : int or sequence of int
        Rows of the table. Several numbers are those of several fields, whose rows lie in one table,
        one field after the other, and are fetched together; the last dimension of the ids is that
        of the fields then.
    output_dim : int
        Width of a row.
    embeddings_initializer : str or keras.initializers.Initializer
        Of the first values, which do not depend on the number of workers.
    mask_zero : bool
        Id 0 is padding, and masked in the layers that follow.
    optimizer : str, optional
        How the rows are updated: ``"sgd"``, ``"adagrad"``, ``"adam"`` (lazy: the averages of a row
        stay as they are while it is not read) or ``"rowwise_adagrad"``, which keeps one number a
        row. Default: as the optimizer of the model does, if that is SGD without momentum, Adagrad
        or Adam, without clipping.
    learning_rate : float, optional
        Of the rows; default that of the model's optimizer, with its schedule.
    storage : str
        ``"memory"``, or ``"mmap"``: a worker keeps its rows in a file that is mapped to memory, so
        the table may be larger than the memory of the workers. The optimizer's state stays in
        memory.
    **options
        Of :class:`keras.layers.Layer`, such as ``name`` and ``trainable``.

    Raises
    ------
    UsageError
        For an argument that cannot work.

    Notes
    -----
    Give the Estimator a function ``model_creator(config)``, so that each worker makes its rows
    alone, and a ``model_dir``, in whose checkpoints every worker writes its rows. Clipping and
    weight decay of the model's optimizer, and its averages of weights, do not reach the rows.
    ``model.predict`` and ``model.evaluate`` in a callback have to be called by all workers alike.

    The table and the optimizer of its own are those of ``DistributedEmbedding`` in keras-rs.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from bigdl.orca.keras import ShardedEmbedding
    >>> table = ShardedEmbedding([1000, 50], 8)  # two fields
    >>> tuple(table(np.array([[999, 0], [3, 49]])).shape)
    (2, 2, 8)
    """

    def __init__(
        self,
        input_dim: int | Sequence[int],
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        *,
        mask_zero: bool = False,
        optimizer: str | None = None,
        learning_rate: float | None = None,
        storage: str = "memory",
        **options: Any,
    ):
        super().__init__(
            output_dim,
            embeddings_initializer,
            mask_zero,
            optimizer,
            learning_rate,
            storage,
            options,
        )
        self._has_fields = not isinstance(input_dim, int)
        self.input_dim = [input_dim] if isinstance(input_dim, int) else list(input_dim)
        for rows in self.input_dim:
            check_positive("input_dim", rows)
        if not self.input_dim:
            raise UsageError(
                "input_dim should be a number or numbers, got an empty list",
                code="argument-value",
                argument="input_dim",
            )

    def build(self, input_shape: Any = None) -> None:
        fields = self.input_dim if self._has_fields else self.input_dim[0]
        table = self._made_table(Table, fields, self.output_dim)
        values = table.weight.detach()
        if table.is_placed:
            self.sharded_rows, values = LayerRows(table), values[:0]
        self._add_embeddings(values.numpy())

    def call(self, inputs: Any) -> Any:
        """Return the rows of some ids, of the shape of the ids and the width of a row."""
        ids = _integers(inputs)
        if self.sharded_rows is not None:
            rows = self._looked_up(ids)
        else:
            if self._has_fields:
                starts = [sum(self.input_dim[:n]) for n in range(len(self.input_dim))]
                ids = ids + keras.ops.cast(keras.ops.convert_to_tensor(starts), ids.dtype)
            rows = keras.ops.take(self.embeddings, ids, axis=0)
        return keras.ops.cast(rows, self.compute_dtype)

    def _as_arrow(self, id_col: str, vector_col: str, field: int) -> pa.Table:
        check_integer("field", field, 0, len(self.input_dim) - 1)
        first = sum(self.input_dim[:field])
        rows = keras.ops.convert_to_numpy(self.embeddings)[first : first + self.input_dim[field]]
        return arrow_of(np.arange(len(rows)), rows, id_col, vector_col)

    def get_config(self) -> dict:
        fields = self.input_dim if self._has_fields else self.input_dim[0]
        return {**super().get_config(), "input_dim": fields}

    def save_own_variables(self, store: Any) -> None:
        self._check_whole()
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        if self.sharded_rows is None:
            super().load_own_variables(store)
            return
        self.sharded_rows.table.take_whole({"weight": torch.from_numpy(store["0"][()])})


@keras.saving.register_keras_serializable("bigdl")
class GrowingEmbedding(_TableLayer):
    """An embedding of any ids, whose rows lie in slices on the workers of an Estimator.

    An id has a row from when a training has read it often enough, and may lose it when batches do
    not read it any more. An id without a row reads zeros, which are not trained. In all else it is
    a :class:`ShardedEmbedding`: owners update their rows, which N workers together hold once, and
    the updates are those of one process. It grows in the fits of Estimators alone; anywhere else
    it reads the rows that it was loaded with, by a callback, so a model cannot be exported with it.

    Parameters
    ----------
    output_dim : int
        Width of a row.
    embeddings_initializer : str or keras.initializers.Initializer
        Of the first values. It is called once, for 65,536 rows; an id has the values of one of
        these, whatever the number of workers.
    fields : int, optional
        Fields that have ids of their own and one table together; the last dimension of the ids is
        that of the fields then.
    admit_after : int
        How often the rows of a training must have an id until it gets a row.
    expire_after : int, optional
        Number of updates. After every so many, the rows that none of the last so many batches have
        read are dropped, with what the optimizer keeps of them, and so are the counts of ids that
        have no row. By default all stay.
    mask_zero, optimizer, learning_rate, storage
        See :class:`ShardedEmbedding`.
    **options
        Of :class:`keras.layers.Layer`, such as ``name`` and ``trainable``.

    Raises
    ------
    UsageError
        For an argument that cannot work.

    Notes
    -----
    JAX computes with integers of 32 bits: ids beyond them are refused there.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from bigdl.orca.keras import GrowingEmbedding
    >>> table = GrowingEmbedding(8, fields=2)
    >>> tuple(table(np.array([[-7, 1 << 30]])).shape)
    (1, 2, 8)
    >>> table.to_arrow().num_rows
    0
    """

    def __init__(
        self,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        *,
        fields: int | None = None,
        admit_after: int = 1,
        expire_after: int | None = None,
        mask_zero: bool = False,
        optimizer: str | None = None,
        learning_rate: float | None = None,
        storage: str = "memory",
        **options: Any,
    ):
        super().__init__(
            output_dim,
            embeddings_initializer,
            mask_zero,
            optimizer,
            learning_rate,
            storage,
            options,
        )
        self.fields = None if fields is None else check_positive("fields", fields)
        self.admit_after = check_positive("admit_after", admit_after)
        if expire_after is not None:
            check_positive("expire_after", expire_after)
        self.expire_after = expire_after

    def build(self, input_shape: Any = None) -> None:
        table = self._made_table(
            GrowingTable,
            self.output_dim,
            fields=self.fields,
            admit_after=self.admit_after,
            expire_after=self.expire_after,
        )
        self.sharded_rows = LayerRows(table)
        self.sharded_rows.is_connected = not table.is_placed
        self._add_embeddings(table.weight.detach()[:0].numpy())

    def call(self, inputs: Any) -> Any:
        """Return the rows of some ids, of the shape of the ids and the width of a row."""
        return keras.ops.cast(self._looked_up(_integers(inputs)), self.compute_dtype)

    def _as_arrow(self, id_col: str, vector_col: str, field: int) -> pa.Table:
        assert self.sharded_rows is not None
        return self.sharded_rows.table.to_arrow(id_col, vector_col, field)

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "fields": self.fields,
            "admit_after": self.admit_after,
            "expire_after": self.expire_after,
        }

    # -- all rows of a model that is whole --------------------------------------------------------

    def whole_arrays(self) -> dict[str, torch.Tensor]:
        """Return all rows that are in use, and their ids; see :meth:`take_whole`."""
        self._check_whole()
        assert self.sharded_rows is not None
        return self.sharded_rows.table.state_dict()

    def take_whole(self, arrays: dict[str, torch.Tensor]) -> None:
        """Have the rows of a whole table, on a worker those that are its own."""
        assert self.sharded_rows is not None
        self.sharded_rows.table.take_whole(arrays)

    def save_own_variables(self, store: Any) -> None:
        for name, array in self.whole_arrays().items():
            store[name] = array.numpy()

    def load_own_variables(self, store: Any) -> None:
        names = tuple(store.keys())
        self.take_whole({name: torch.from_numpy(store[name][()]) for name in names})


def _name_of(optimizer: Any, kind: str, advice: str) -> str:
    """Return which optimizer of rows does as one of Keras does."""
    # with torch an optimizer is of a subclass with the same name
    given = type(optimizer).__name__
    is_known = given in ("SGD", "Adagrad", "Adam") and isinstance(
        optimizer, getattr(keras.optimizers, given)
    )
    has_more = getattr(optimizer, "momentum", 0) or getattr(optimizer, "amsgrad", False)
    if is_known and not has_more:
        return given.lower()
    raise UsageError(
        f"The rows of a {kind} are updated as by SGD without momentum, Adagrad or Adam, "
        f"the model's optimizer is {given}{advice}",
        code="optimizer-unsupported",
    )


def _made(name: str, weight: Any, rate: float, like: Any) -> torch.optim.Optimizer:
    """Return an optimizer of rows, with what it shares with one of Keras."""

    def option(attribute: str, default: float) -> float:
        return float(getattr(like, attribute, default))

    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD([weight], lr=rate),
        "adagrad": lambda: torch.optim.Adagrad(
            [weight],
            lr=rate,
            initial_accumulator_value=option("initial_accumulator_value", 0.1),
            eps=1e-10,
        ),
        "adam": lambda: torch.optim.SparseAdam(
            [weight],
            lr=rate,
            betas=(option("beta_1", 0.9), option("beta_2", 0.999)),
            eps=option("epsilon", 1e-7),
        ),
        "rowwise_adagrad": lambda: RowwiseAdagrad([weight], lr=rate, initial_accumulator_value=0.1),
    }
    return makers[name]()
