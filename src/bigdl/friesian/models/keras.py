"""Recommender models for Keras, sized from the schema of a table.

Each function returns an uncompiled functional model, whose inputs are named after the columns. An
Orca Estimator builds and trains it on the cluster that holds the table::

    from bigdl.friesian.models import keras as models
    from bigdl.orca.learn.tf2 import Estimator

    schema = table.feature_schema()
    est = Estimator.from_keras(
        model_creator=lambda config: models.deepfm(schema, ["user", "item"], ["price"]),
        compile_args_creator=lambda config: {"optimizer": "adam", "loss": "binary_crossentropy"},
    )
    est.fit(table.df, feature_cols=["user", "item", "price"], label_cols=["label"])

The models use built-in Keras layers only, so that Keras loads a saved model without BigDL, unless
the embeddings are sharded. Ids outside of a column's range become 0, the id of unknown values.

:class:`InBatchSoftmax` is the loss of :func:`two_tower`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.friesian.ops.schema import FeatureSchema, cardinalities, check_numbers

require("keras", "tf")
import keras  # noqa: E402
from keras import layers, ops  # noqa: E402

__all__ = ["InBatchSoftmax", "deepfm", "mmoe", "ncf", "two_tower", "wide_and_deep"]


def ncf(
    schema: FeatureSchema,
    user: str = "user",
    item: str = "item",
    factors: int = 16,
    hidden: Sequence[int] = (64, 32, 16),
    dropout: float = 0.0,
    sharded: bool = False,
) -> keras.Model:
    """Build an NCF model (NeuMF), which predicts click probabilities from user and item ids.

    He et al., "Neural Collaborative Filtering", WWW 2017; see :class:`bigdl.friesian.models.NCF`.

    Parameters
    ----------
    schema : FeatureSchema
    user, item : str
        Category columns of integer ids.
    factors : int, default 16
        Length of the embeddings of the product.
    hidden : sequence of int, default (64, 32, 16)
        Widths of the network.
    dropout : float, default 0.0
    sharded : bool, default False
        Shard the embedding tables over the workers, by a
        :class:`~bigdl.orca.keras.ShardedEmbedding`.

    Returns
    -------
    keras.Model
        Output of shape ``(n, 1)``.

    Examples
    --------
    >>> from bigdl.friesian.feature import Feature, FeatureSchema
    >>> from bigdl.friesian.models.keras import ncf
    >>> schema = FeatureSchema({"user": Feature("int", 944), "item": Feature("int", 1683)})
    >>> model = ncf(schema, factors=8)
    >>> model.output_shape
    (None, 1)
    """
    sizes = cardinalities(schema, [user, item])
    inputs = _inputs(sizes, ())
    product = layers.Multiply()(_embedded(inputs, sizes, factors, "product", sharded))
    network = _embedded(inputs, sizes, hidden[0] // 2, "network", sharded)
    network = layers.Concatenate()(network)
    network = _network(network, hidden, dropout)
    return _model(inputs, layers.Dense(1)(layers.Concatenate()([product, network])))


def wide_and_deep(
    schema: FeatureSchema,
    wide: Iterable[str],
    categories: Iterable[str],
    numbers: Iterable[str] = (),
    dim: int = 16,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
    sharded: bool = False,
) -> keras.Model:
    """Build a Wide & Deep model: a linear part for crossed columns, and a neural network.

    Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016; see
    :class:`bigdl.friesian.models.WideAndDeep`.

    Parameters
    ----------
    schema : FeatureSchema
    wide, categories : list of str
        Category columns of the linear part and of the network.
    numbers : list of str
        Scaled numeric columns, for the network.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0
    sharded : bool, default False
        Shard the embedding tables over the workers, by a
        :class:`~bigdl.orca.keras.ShardedEmbedding`.

    Returns
    -------
    keras.Model
        Output of shape ``(n, 1)``.

    Examples
    --------
    >>> from bigdl.friesian.feature import Feature, FeatureSchema
    >>> from bigdl.friesian.models.keras import wide_and_deep
    >>> schema = FeatureSchema({"user_city": Feature("int", 1000), "city": Feature("int", 50)})
    >>> model = wide_and_deep(schema, wide=["user_city"], categories=["city"])
    >>> model.output_shape
    (None, 1)
    """
    linear, deep = cardinalities(schema, wide), cardinalities(schema, categories)
    numbers = check_numbers(schema, numbers)
    if not linear:
        raise UsageError(
            "wide has no columns; pass those of the linear part",
            code="argument-missing",
            argument="wide",
        )
    inputs = _inputs(linear | deep, numbers)
    network = _network(_rows(inputs, deep, numbers, dim, sharded), hidden, dropout)
    first = _embedded(inputs, linear, 1, "wide", sharded, "zeros")
    return _model(inputs, layers.Add()([*first, layers.Dense(1)(network)]))


def deepfm(
    schema: FeatureSchema,
    categories: Iterable[str],
    numbers: Iterable[str] = (),
    dim: int = 16,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
    sharded: bool = False,
) -> keras.Model:
    """Build a DeepFM model: pairwise products of column embeddings, and a neural network.

    Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI
    2017; see :class:`bigdl.friesian.models.DeepFM`.

    Parameters
    ----------
    schema : FeatureSchema
    categories : list of str
        Category columns of integer ids.
    numbers : list of str
        Scaled numeric columns.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0
    sharded : bool, default False
        Shard the embedding tables over the workers, by a
        :class:`~bigdl.orca.keras.ShardedEmbedding`.

    Returns
    -------
    keras.Model
        Output of shape ``(n, 1)``.

    Examples
    --------
    >>> from bigdl.friesian.feature import Feature, FeatureSchema
    >>> from bigdl.friesian.models.keras import deepfm
    >>> schema = FeatureSchema({"user": Feature("int", 944), "age": Feature("float")})
    >>> deepfm(schema, categories=["user"], numbers=["age"]).output_shape
    (None, 1)
    """
    sizes, numbers = cardinalities(schema, categories), check_numbers(schema, numbers)
    if not sizes:
        raise UsageError(
            "categories has no columns; pass the columns to embed",
            code="argument-missing",
            argument="categories",
        )
    inputs = _inputs(sizes, numbers)
    rows = layers.Reshape((1, dim))
    fields = [rows(each) for each in _embedded(inputs, sizes, dim, "fields", sharded)]
    first = _embedded(inputs, sizes, 1, "linear", sharded, "zeros")
    if numbers:
        values = _joined([_column(inputs[name]) for name in numbers])
        first.append(layers.Dense(1, kernel_initializer="zeros", name="linear_numbers")(values))
        small = keras.initializers.RandomNormal(stddev=0.05)
        vectors = layers.EinsumDense(
            "bm,md->bmd", (len(numbers), dim), kernel_initializer=small, name="fields_numbers"
        )
        fields.append(vectors(values))
    fields = layers.Concatenate(axis=1)(fields) if len(fields) > 1 else fields[0]
    # sum of all pairwise products = (square of the sum − sum of the squares) / 2
    squares = ops.square(ops.sum(fields, 1)) - ops.sum(ops.square(fields), 1)
    pairs = ops.sum(squares, 1, keepdims=True) / 2
    network = _network(layers.Flatten()(fields), hidden, dropout)
    return _model(inputs, layers.Add()([*first, pairs, layers.Dense(1)(network)]))


def mmoe(
    schema: FeatureSchema,
    categories: Iterable[str],
    numbers: Iterable[str] = (),
    tasks: Sequence[str] = ("label",),
    dim: int = 16,
    experts: int = 4,
    expert_hidden: Sequence[int] = (64,),
    tower_hidden: Sequence[int] = (32,),
    dropout: float = 0.0,
    sharded: bool = False,
) -> keras.Model:
    """Build a multi-gate mixture of experts, which predicts one probability per task.

    Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts", KDD 2018; see :class:`bigdl.friesian.models.MMoE`.

    The outputs are a list, because Keras matches several targets to the keys of a dict in
    alphabetical order.

    Parameters
    ----------
    schema : FeatureSchema
    categories : list of str
        Category columns of integer ids.
    numbers : list of str
        Scaled numeric columns.
    tasks : sequence of str
        Names of the outputs, in the order of ``label_cols``.
    dim : int, default 16
        Length of an embedding.
    experts : int, default 4
    expert_hidden : sequence of int, default (64,)
        Widths of each expert network.
    tower_hidden : sequence of int, default (32,)
        Widths of the network of each task.
    dropout : float, default 0.0
    sharded : bool, default False
        Shard the embedding tables over the workers, by a
        :class:`~bigdl.orca.keras.ShardedEmbedding`.

    Returns
    -------
    keras.Model
        One output of shape ``(n, 1)`` per task. The layers ``<task>_gate`` output the weights of
        the experts, of shape ``(n, experts)``.

    Examples
    --------
    >>> from bigdl.friesian.feature import Feature, FeatureSchema
    >>> from bigdl.friesian.models.keras import mmoe
    >>> schema = FeatureSchema({"user": Feature("int", 944), "item": Feature("int", 1683)})
    >>> model = mmoe(schema, ["user", "item"], tasks=["click", "purchase"], experts=2)
    >>> len(model.outputs), model.get_layer("click_gate").output.shape
    (2, (None, 2))
    """
    if isinstance(tasks, str) or not tasks:
        raise UsageError(
            f"tasks should be a list of names, got {tasks!r}",
            code="argument-type",
            argument="tasks",
        )
    sizes, numbers = cardinalities(schema, categories), check_numbers(schema, numbers)
    taken = [task for i, task in enumerate(tasks) if task in [*sizes, *numbers, *tasks[:i]]]
    if taken:
        raise UsageError(
            f"tasks should differ from each other and from columns, but {taken[0]!r} is taken",
            code="column-duplicate",
            column=taken[0],
            argument="tasks",
        )
    inputs = _inputs(sizes, numbers)
    rows = _rows(inputs, sizes, numbers, dim, sharded)
    expert_outputs = [_network(rows, expert_hidden, dropout) for _ in range(experts)]
    expert_outputs = layers.Concatenate(axis=1)(
        [layers.Reshape((1, -1))(each) for each in expert_outputs]
    )
    outputs = []
    for task in tasks:
        weights = layers.Dense(experts, activation="softmax", name=f"{task}_gate")(rows)
        mixed = ops.einsum("ne,new->nw", weights, expert_outputs)
        tower = _network(mixed, tower_hidden, dropout)
        outputs.append(layers.Dense(1, activation="sigmoid", name=task)(tower))
    return keras.Model(dict(inputs), outputs)


def two_tower(
    schema: FeatureSchema,
    user: Iterable[str],
    item: Iterable[str],
    user_numbers: Iterable[str] = (),
    item_numbers: Iterable[str] = (),
    user_sequences: Iterable[str] = (),
    dim: int = 32,
    hidden: Sequence[int] = (64,),
    sharded: bool = False,
) -> keras.Model:
    """Build a two-tower model: user and item vectors whose dot product is the score.

    The layers ``user_tower`` and ``item_tower`` are separate models, so that item vectors
    can be stored and searched (Covington et al., "Deep Neural Networks for YouTube
    Recommendations", RecSys 2016); see :class:`bigdl.friesian.models.TwoTower`.

    Parameters
    ----------
    schema : FeatureSchema
    user, item : list of str
        Category columns of integer ids.
    user_numbers, item_numbers : list of str
        Scaled numeric columns.
    user_sequences : list of str
        Columns of id arrays, with 0 as padding; their embeddings are averaged.
    dim : int, default 32
        Length of an embedding, and of the vectors.
    hidden : sequence of int, default (64,)
    sharded : bool, default False
        Shard the embedding tables over the workers, by a
        :class:`~bigdl.orca.keras.ShardedEmbedding`.

    Returns
    -------
    keras.Model
        Output of shape ``(n, 2, dim)``: unit-length vectors of the user and of the item, for
        :class:`InBatchSoftmax`.

    Examples
    --------
    >>> from bigdl.friesian.feature import Feature, FeatureSchema
    >>> from bigdl.friesian.models.keras import two_tower
    >>> schema = FeatureSchema({"user": Feature("int", 944), "item": Feature("int", 1683)})
    >>> model = two_tower(schema, ["user"], ["item"], dim=8)
    >>> model.output_shape, model.get_layer("item_tower").output_shape
    ((None, 2, 8), (None, 8))
    """
    towers = [
        _tower("user_tower", schema, user, user_numbers, user_sequences, dim, hidden, sharded),
        _tower("item_tower", schema, item, item_numbers, (), dim, hidden, sharded),
    ]
    shared = set(towers[0].input) & set(towers[1].input)
    if shared:
        raise UsageError(
            f"The columns {sorted(shared)} are in user and in item columns; choose one",
            code="column-duplicate",
            columns=list(shared),
        )
    vectors = [layers.Reshape((1, dim))(tower(tower.input)) for tower in towers]
    inputs = towers[0].input | towers[1].input
    return keras.Model(inputs, layers.Concatenate(axis=1, name="vectors")(vectors))


def _tower(label, schema, categories, numbers, sequences, dim, hidden, sharded) -> keras.Model:
    """Build a tower, which maps the columns of a user or an item to a unit-length vector."""
    sizes, numbers = cardinalities(schema, categories), check_numbers(schema, numbers)
    lists = cardinalities(schema, sequences)
    inputs = _inputs(sizes, numbers, lists)
    rows = _rows(inputs, sizes, numbers, dim, sharded, lists)
    vectors = layers.Dense(dim)(_network(rows, hidden, 0.0))
    return keras.Model(dict(inputs), layers.UnitNormalization(axis=1)(vectors), name=label)


def _inputs(
    categories: Iterable[str], numbers: Iterable[str], sequences: Iterable[str] = ()
) -> dict[str, Any]:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in categories}
    inputs |= {name: keras.Input((None,), dtype="int64", name=name) for name in sequences}
    return inputs | {name: keras.Input((), dtype="float32", name=name) for name in numbers}


def _rows(
    inputs: Mapping[str, Any],
    sizes: Mapping[str, int],
    numbers: Sequence[str],
    dim: int,
    sharded: bool,
    sequences: Mapping[str, int] = MappingProxyType({}),
) -> keras.KerasTensor:
    """Concatenate embeddings and numbers into one vector per row."""
    parts = _embedded(inputs, sizes, dim, "fields", sharded)
    lists = _embedded(inputs, sequences, dim, "lists", sharded, have_lengths=True)
    parts += [_mean_of_known(each, inputs[n]) for n, each in zip(sequences, lists, strict=True)]
    parts += [_column(inputs[name]) for name in numbers]
    if not parts:
        raise UsageError(
            "The model has no columns; pass categories or numbers",
            code="argument-missing",
            argument="categories",
        )
    return _joined(parts)


def _mean_of_known(vectors: keras.KerasTensor, numbers: keras.KerasTensor) -> keras.KerasTensor:
    """Average the vectors of each row in an array ``(n, length, dim)``, except vectors of id 0."""
    known = ops.cast(ops.expand_dims(ops.not_equal(numbers, 0), -1), vectors.dtype)
    return ops.sum(vectors * known, 1) / ops.maximum(ops.sum(known, 1), 1.0)


def _embedded(
    inputs: Mapping[str, Any],
    sizes: Mapping[str, int],
    dim: int,
    prefix: str,
    sharded: bool,
    initializer: str | None = None,
    *,
    have_lengths: bool = False,
) -> list[Any]:
    """Embed each column of ids; `have_lengths` is True if the columns are arrays."""
    if not sizes:
        return []
    rows = [max(1, size) for size in sizes.values()]
    numbers = [_known(inputs[name], size) for name, size in zip(sizes, rows, strict=True)]
    embedding_class: Any = layers.Embedding
    if sharded:
        from bigdl.orca.keras import ShardedEmbedding as embedding_class

        if not have_lengths:  # fetch the rows of all columns at once
            sharded_embedding = embedding_class(rows, dim, _initializer(initializer), name=prefix)
            vectors = sharded_embedding(ops.stack(numbers, 1))
            return [vectors[:, n] for n in range(len(rows))]
    return [
        embedding_class(size, dim, _initializer(initializer), name=f"{prefix}_{name}")(number)
        for name, size, number in zip(sizes, rows, numbers, strict=True)
    ]


def _initializer(initializer: str | None) -> str | keras.Initializer:
    """Return a new initializer for an embedding table; a shared one would repeat its values."""
    return initializer or keras.initializers.RandomNormal(stddev=0.05)


def _known(number: keras.KerasTensor, size: int) -> keras.KerasTensor:
    """Replace out-of-range ids with 0."""
    is_known = ops.logical_and(number >= 0, number < size)
    return ops.where(is_known, number, ops.zeros_like(number))


def _column(numbers: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Reshape((1,))(numbers)


def _joined(parts: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
    return layers.Concatenate()(parts) if len(parts) > 1 else parts[0]


def _network(
    vectors: keras.KerasTensor, hidden: Sequence[int], dropout: float
) -> keras.KerasTensor:
    for width in hidden:
        vectors = layers.Dense(width, activation="relu")(vectors)
        if dropout:
            vectors = layers.Dropout(dropout)(vectors)
    return vectors


def _model(inputs: Mapping[str, Any], score: keras.KerasTensor) -> keras.Model:
    return keras.Model(dict(inputs), layers.Activation("sigmoid", name="chance")(score))


@keras.saving.register_keras_serializable("bigdl")
class InBatchSoftmax(keras.losses.Loss):
    """Softmax loss with the other items of the batch as negatives.

    Frequent items occur more often as negatives. To correct for that, the loss subtracts the log
    probability of each item (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus
    Item Recommendations", RecSys 2019); see :class:`bigdl.friesian.models.InBatchSoftmax`. The
    target is the item id, so the same item in another row is not a negative. Ids must be below
    2**24, because Keras converts targets to float32. With several workers, negatives come from the
    worker's local batch.

    Parameters
    ----------
    temperature : float, default 0.1
        Divisor of the dot products.
    item_counts : sequence of number, optional
        Number of occurrences of each item id in the data. Without it nothing is subtracted.
    reduction, name, dtype
        Arguments of ``keras.losses.Loss``.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.models.keras import InBatchSoftmax
    >>> vectors = np.stack([np.eye(2), np.eye(2)], axis=1).astype("float32")  # matching pairs
    >>> loss = InBatchSoftmax(temperature=1.0)
    >>> round(float(loss(np.array([7, 8]), vectors)), 4)  # -log(e / (e + 1))
    0.3133
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
            raise UsageError(
                f"temperature should be a number above 0, got {temperature!r}",
                code="argument-value",
                argument="temperature",
            )
        self.temperature = temperature
        self.item_counts = None if item_counts is None else [float(each) for each in item_counts]
        if item_counts is None:
            self._log_share = None
        else:
            counts = np.maximum(np.asarray(item_counts, np.float64), 1)
            self._log_share = np.log(counts / counts.sum()).astype(np.float32)

    def call(self, y_true, y_pred):
        """Return the loss of each row, of shape ``(n,)``.

        Parameters
        ----------
        y_true : tensor of shape (n,) or (n, 1)
            Item ids.
        y_pred : tensor of shape (n, 2, dim)
            Vectors of the users and of the items.
        """
        number = ops.cast(ops.reshape(y_true, (-1,)), "int64")
        user, item = y_pred[:, 0], y_pred[:, 1]
        logits = ops.matmul(user, ops.transpose(item)) / self.temperature
        if self._log_share is not None:
            logits = logits - ops.take(ops.convert_to_tensor(self._log_share), number)
        row = ops.arange(ops.shape(y_pred)[0])
        is_positive = ops.equal(ops.expand_dims(row, 1), row)
        is_repeat = ops.logical_and(ops.equal(ops.expand_dims(number, 1), number), ~is_positive)
        logits = ops.where(is_repeat, -1e9, logits)
        positive_logits = ops.sum(ops.where(is_positive, logits, 0.0), 1)
        return ops.logsumexp(logits, 1) - positive_logits

    def get_config(self) -> dict:
        """Return the constructor arguments for :meth:`from_config`."""
        config = super().get_config()
        return config | {"temperature": self.temperature, "item_counts": self.item_counts}
