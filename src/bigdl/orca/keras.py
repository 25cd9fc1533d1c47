"""Keras layers for large embeddings, whose rows are sharded over the workers of an Estimator."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from bigdl.common.checks import check_choice, check_integer, check_number, check_positive
from bigdl.common.errors import UsageError, require

require("keras", "tf")  # the whole module needs it
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
    from collections.abc import Mapping, MutableMapping

    from bigdl.training.embedding_tables.placement import TablePlacement

TableT = TypeVar("TableT", bound="ShardedTable")

__all__ = ["GrowingEmbedding", "ShardedEmbedding"]

_OPTIMIZERS = ("sgd", "adagrad", "adam", "rowwise_adagrad")


class _TableLayer(keras.layers.Layer):
    """Base class of embedding layers; in a worker, a torch table holds and updates their rows.

    Attributes
    ----------
    sharded_rows : LayerRows or None
        The torch table and its lookups; None if the rows are a weight of the layer.
    """

    embeddings: Any

    def __init__(
        self,
        output_dim: int,
        embeddings_initializer: str | keras.Initializer,
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
        self._model_optimizer: list = []  # in a list, so that Keras does not track it
        self._placement: TablePlacement | None = current_placement()
        # drawn like the seeds of initializers: the same on all workers
        self._seed = random.randint(1, 1 << 30)
        self.sharded_rows: LayerRows | None = None

    @property
    def is_placed(self) -> bool:
        """True if the layer holds one worker's rows."""
        return self.sharded_rows is not None and self.sharded_rows.table.is_placed

    def _create_table(
        self, table_class: Callable[..., TableT], *sizes: object, **more: object
    ) -> TableT:
        """Create the torch table, with this worker's rows or all rows."""
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
        with torch.random.fork_rng(devices=[]), table_placement(self._placement):
            torch.manual_seed(self._seed)
            return table_class(*sizes, **more)

    def _add_embeddings(self, values: np.ndarray) -> None:
        self.embeddings = self.add_weight(
            shape=values.shape,
            initializer=lambda shape, dtype: keras.ops.convert_to_tensor(values, dtype),
            name="embeddings",
        )
        self.built = True

    def _first_values(self, rows: torch.Tensor) -> None:
        """Initialize rows of the table; the values depend on torch's current random state."""
        initializer, dtype = self.embeddings_initializer, str(rows.dtype).removeprefix("torch.")
        if isinstance(initializer, keras.initializers.Initializer):
            config = initializer.get_config()
            if "seed" in config:  # it would return the same values each time
                seed = int(torch.randint(1 << 31, ()))
                initializer = type(initializer).from_config({**config, "seed": seed})
        values = keras.ops.convert_to_numpy(initializer(tuple(rows.shape), dtype=dtype))
        rows.copy_(torch.from_numpy(values.copy()))

    def _looked_up(self, ids: keras.KerasTensor) -> keras.KerasTensor:
        """Look up the rows of `ids` in the torch table."""
        assert self.sharded_rows is not None
        return self.sharded_rows.lookup(keras.ops.convert_to_tensor(self.embeddings), ids)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple:
        return (*input_shape, self.output_dim)

    def compute_mask(
        self, inputs: keras.KerasTensor, mask: object = None
    ) -> keras.KerasTensor | None:
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
                f"A worker has only some rows of a {type(self).__name__}, so it cannot save the "
                "model; use the checkpoints of fit in model_dir, or save of the Estimator",
                code="unsupported",
            )

    def to_arrow(self, id_col: str = "id", vector_col: str = "vector", field: int = 0) -> pa.Table:
        """Return the ids of a field and their rows as an Arrow table.

        Parameters
        ----------
        id_col, vector_col : str
            Names of the columns: int64 ids, and fixed-size lists of floats.
        field : int

        Returns
        -------
        pyarrow.Table
            Rows sorted by id. The layer must belong to a whole model, such as that of
            ``Estimator.get_model``.

        Raises
        ------
        UsageError
            If the layer is on a worker, which has only some rows, or is not built.
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
        """Build the table of :meth:`to_arrow` in a process that has all rows."""

    # -- for Estimators -----------------------------------------------------------------------

    def table_optimizer(self, model_optimizer: keras.Optimizer | None) -> torch.optim.Optimizer:
        """Create the torch optimizer that updates this worker's rows.

        Parameters
        ----------
        model_optimizer : keras.optimizers.Optimizer

        Raises
        ------
        UsageError
            If the torch optimizer cannot reproduce the updates of `model_optimizer`.
        """
        optimizer, name = model_optimizer, self.table_optimizer_name
        layer_name = type(self).__name__
        if optimizer is None:
            raise UsageError(
                f"A {layer_name} needs a model that is compiled with an optimizer",
                code="argument-missing",
                argument="optimizer",
            )
        advice = f"; use another optimizer, or pass optimizer= to the {layer_name}"
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise UsageError(
                f"A {layer_name} does not support a LossScaleOptimizer, which scales the "
                "gradients of its rows; use the precision mixed_bfloat16",
                code="optimizer-unsupported",
            )
        if optimizer.gradient_accumulation_steps:
            raise UsageError(
                f"A {layer_name} does not support gradient_accumulation_steps: its rows are "
                "updated after every batch; use a larger batch_size",
                code="optimizer-unsupported",
                argument="gradient_accumulation_steps",
            )
        if name is None:
            clips = ("clipnorm", "global_clipnorm", "clipvalue")
            if clip := next((each for each in clips if getattr(optimizer, each)), None):
                raise UsageError(
                    f"{clip} of the model's optimizer does not apply to the rows of a "
                    f"{layer_name}{advice}",
                    code="optimizer-unsupported",
                    argument=clip,
                )
            name = _name_of(optimizer, layer_name, advice)
        self._model_optimizer = [optimizer]
        rate = self.current_learning_rate()
        assert self.sharded_rows is not None
        return _create_optimizer(name, self.sharded_rows.table.weight, rate, optimizer)

    def current_learning_rate(self) -> float:
        """Return the learning rate of the rows for the next step."""
        if self.learning_rate is not None:
            return self.learning_rate
        return float(keras.ops.convert_to_numpy(self._model_optimizer[0].learning_rate))


def _integers(inputs: keras.KerasTensor) -> keras.KerasTensor:
    """Cast ids to the integer type of the backend."""
    return keras.ops.cast(inputs, "int32" if keras.backend.backend() == "jax" else "int64")


@keras.saving.register_keras_serializable("bigdl")
class ShardedEmbedding(_TableLayer):
    """Embedding whose rows are sharded over the workers of an Estimator.

    Worker ``i % N`` owns row i. The forward pass fetches the rows of a batch from their owners,
    each row once, and the backward pass sends the gradients back. Each owner updates its rows and
    keeps their optimizer state. So N workers hold the table once, and make the same updates as one
    process.

    Outside an Estimator, and in the model of ``Estimator.get_model``, it is an ordinary embedding.

    Parameters
    ----------
    input_dim : int or sequence of int
        Number of rows. A sequence gives the number of rows of several fields, which share one table
        and are fetched together; the last dimension of the ids is then the field.
    output_dim : int
        Width of a row.
    embeddings_initializer : str or keras.initializers.Initializer
        Initializer of the rows. The initial values do not depend on the number of workers.
    mask_zero : bool
        Treat id 0 as padding that following layers mask.
    optimizer : str, optional
        Optimizer of the rows: ``"sgd"``, ``"adagrad"``, ``"adam"`` (lazy: the averages of a row
        change only when the row is read) or ``"rowwise_adagrad"``, which keeps one number per row.
        By default it matches the model's optimizer, which must then be SGD without momentum,
        Adagrad or Adam, without clipping.
    learning_rate : float, optional
        Learning rate of the rows; default that of the model's optimizer, with its schedule.
    storage : str
        ``"memory"``, or ``"mmap"``: a worker keeps its rows in a memory-mapped file, so the table
        may be larger than the memory of the workers. The optimizer state stays in memory.
    **options
        Options of :class:`keras.layers.Layer`, such as ``name`` and ``trainable``.

    Raises
    ------
    UsageError
        If an argument is invalid.

    Notes
    -----
    Pass the Estimator a function ``model_creator(config)``, so that each worker allocates only its
    rows, and a ``model_dir``, to whose checkpoints every worker writes its rows. Clipping, weight
    decay and weight averages of the model's optimizer do not apply to the rows. All workers must
    call ``model.predict`` and ``model.evaluate`` in a callback alike.

    A separate optimizer for the table is the design of ``DistributedEmbedding`` in keras-rs.

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
        embeddings_initializer: str | keras.Initializer = "uniform",
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

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        fields = self.input_dim if self._has_fields else self.input_dim[0]
        table = self._create_table(Table, fields, self.output_dim)
        values = table.weight.detach()
        if table.is_placed:
            self.sharded_rows, values = LayerRows(table), values[:0]
        self._add_embeddings(values.numpy())

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Return the embedding rows of `inputs`, one vector for each id."""
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

    def save_own_variables(self, store: object) -> None:
        self._check_whole()
        super().save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        if self.sharded_rows is None:
            super().load_own_variables(store)
            return
        self.sharded_rows.table.take_whole({"weight": torch.from_numpy(store["0"][()])})


@keras.saving.register_keras_serializable("bigdl")
class GrowingEmbedding(_TableLayer):
    """Sharded embedding of arbitrary ids, which adds rows when training reads new ids.

    An id gets a row once a training has read it often enough, and may lose it when batches stop
    reading it. An id without a row reads zeros, which are not trained. Otherwise it works like
    :class:`ShardedEmbedding`: N workers hold the table once, owners update their rows, and the
    updates equal those of one process. The table grows only in the fits of Estimators. Elsewhere a
    callback looks up the loaded rows, so a model with this layer cannot be exported.

    Parameters
    ----------
    output_dim : int
        Width of a row.
    embeddings_initializer : str or keras.initializers.Initializer
        Initializer of the rows. It is called once, for 65,536 rows; an id takes the values of one
        of them, which does not depend on the number of workers.
    fields : int, optional
        Number of fields that share the table, each with separate ids; the last dimension of the ids
        is then the field.
    admit_after : int
        Number of training rows with an id after which it gets a table row. Raise it to skip rare
        ids.
    expire_after : int, optional
        Number of updates. After every `expire_after` updates, the rows that none of these batches
        read are dropped with their optimizer state; the counts of ids without a row are reset. By
        default all rows stay.
    mask_zero, optimizer, learning_rate, storage
        See :class:`ShardedEmbedding`.
    **options
        Options of :class:`keras.layers.Layer`, such as ``name`` and ``trainable``.

    Raises
    ------
    UsageError
        If an argument is invalid.

    Notes
    -----
    JAX uses 32-bit integers: larger ids raise an error there.

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
        embeddings_initializer: str | keras.Initializer = "uniform",
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

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        table = self._create_table(
            GrowingTable,
            self.output_dim,
            fields=self.fields,
            admit_after=self.admit_after,
            expire_after=self.expire_after,
        )
        self.sharded_rows = LayerRows(table)
        self.sharded_rows.is_connected = not table.is_placed
        self._add_embeddings(table.weight.detach()[:0].numpy())

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Return the embedding rows of `inputs`, one vector for each id."""
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

    # -- all rows of a whole model --------------------------------------------------------

    def whole_arrays(self) -> dict[str, torch.Tensor]:
        """Return all rows in use and their ids, for :meth:`take_whole`."""
        self._check_whole()
        assert self.sharded_rows is not None
        return self.sharded_rows.table.state_dict()

    def take_whole(self, arrays: dict[str, torch.Tensor]) -> None:
        """Load a whole table; a worker keeps only the rows that it owns."""
        assert self.sharded_rows is not None
        self.sharded_rows.table.take_whole(arrays)

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        for name, array in self.whole_arrays().items():
            store[name] = array.numpy()

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        names = tuple(store.keys())
        self.take_whole({name: torch.from_numpy(store[name][()]) for name in names})


def _name_of(optimizer: keras.Optimizer | None, layer_name: str, advice: str) -> str:
    """Return the name of the torch optimizer that matches a Keras optimizer."""
    # with the torch backend an optimizer belongs to a subclass of the same name
    name = type(optimizer).__name__
    is_known = name in ("SGD", "Adagrad", "Adam") and isinstance(
        optimizer, getattr(keras.optimizers, name)
    )
    has_more = getattr(optimizer, "momentum", 0) or getattr(optimizer, "amsgrad", False)
    if is_known and not has_more:
        return name.lower()
    raise UsageError(
        f"The rows of a {layer_name} support SGD without momentum, Adagrad and Adam, "
        f"the model's optimizer is {name}{advice}",
        code="optimizer-unsupported",
    )


def _create_optimizer(
    name: str, weight: torch.Tensor, rate: float, like: keras.Optimizer
) -> torch.optim.Optimizer:
    """Create a torch optimizer for table rows that has the options of a Keras optimizer."""

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
