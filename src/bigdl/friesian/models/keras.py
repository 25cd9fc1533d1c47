"""Models of recommenders for Keras, sized from the schema of a table.

Each function returns a functional model that is not compiled, whose inputs have the names of the
columns.  An Estimator of Orca makes and trains it on the cluster that holds the table::

    from bigdl.friesian.models import keras as models
    from bigdl.orca.learn.tf2 import Estimator

    schema = table.feature_schema()
    est = Estimator.from_keras(
        model_creator=lambda config: models.deepfm(schema, ["user", "item"], ["price"]),
        compile_args_creator=lambda config: {"optimizer": "adam", "loss": "binary_crossentropy"},
    )
    est.fit(table.df, feature_cols=["user", "item", "price"], label_cols=["label"])

They have only layers of Keras' own, so that a file of a model is read without BigDL.  A number that
a column did not have when the model was sized stands for 0, the number of unknown values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError, require
from bigdl.friesian.models.columns import cardinalities, check_numbers

if TYPE_CHECKING:
    import keras

    from bigdl.friesian.feature.schema import FeatureSchema

__all__ = ["deepfm", "ncf", "wide_and_deep"]


def ncf(
    schema: FeatureSchema,
    user: str = "user",
    item: str = "item",
    factors: int = 16,
    hidden: Sequence[int] = (64, 32, 16),
    dropout: float = 0.0,
) -> keras.Model:
    """The probability that a user chooses an item, of their two numbers alone (NeuMF).

    He et al., "Neural Collaborative Filtering", WWW 2017; see :class:`bigdl.friesian.models.NCF`.

    Parameters
    ----------
    schema : FeatureSchema
    user, item : str
        Columns of whole numbers.
    factors : int, default 16
        Length of the embeddings of the product.
    hidden : sequence of int, default (64, 32, 16)
        Widths of the network.
    dropout : float, default 0.0

    Returns
    -------
    keras.Model
        Its output has the shape ``(n, 1)``.
    """
    layers = require("keras", "tf").layers
    sizes = cardinalities(schema, [user, item])
    inputs = _inputs(sizes, ())
    product = layers.Multiply()(_embedded(inputs, sizes, factors, "product"))
    network = layers.Concatenate()(_embedded(inputs, sizes, hidden[0] // 2, "network"))
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
) -> keras.Model:
    """The probability of a click, by a linear model of crosses and a network.

    Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016; see
    :class:`bigdl.friesian.models.WideAndDeep`.

    Parameters
    ----------
    schema : FeatureSchema
    wide, categories : list of str
        Columns of whole numbers, of the linear part and of the network.
    numbers : list of str
        Columns of scaled numbers, for the network.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0

    Returns
    -------
    keras.Model
        Its output has the shape ``(n, 1)``.
    """
    layers = require("keras", "tf").layers
    linear, deep = cardinalities(schema, wide), cardinalities(schema, categories)
    numbers = check_numbers(schema, numbers)
    if not linear:
        raise UsageError("wide has no columns; name those of the linear part")
    if not deep and not numbers:
        raise UsageError("The model has no columns; name categories or numbers")
    inputs = _inputs(linear | deep, numbers)
    parts = _embedded(inputs, deep, dim, "deep") + [_column(inputs[name]) for name in numbers]
    network = _network(_joined(parts), hidden, dropout)
    first = _embedded(inputs, linear, 1, "wide", initializer="zeros")
    return _model(inputs, layers.Add()([*first, layers.Dense(1)(network)]))


def deepfm(
    schema: FeatureSchema,
    categories: Iterable[str],
    numbers: Iterable[str] = (),
    dim: int = 16,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
) -> keras.Model:
    """The probability of a click, by products of all pairs of fields and a network on them.

    Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI
    2017; see :class:`bigdl.friesian.models.DeepFM`.

    Parameters
    ----------
    schema : FeatureSchema
    categories : list of str
        Columns of whole numbers.
    numbers : list of str
        Columns of scaled numbers.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0

    Returns
    -------
    keras.Model
        Its output has the shape ``(n, 1)``.
    """
    keras = require("keras", "tf")
    layers, ops = keras.layers, keras.ops
    sizes, numbers = cardinalities(schema, categories), check_numbers(schema, numbers)
    if not sizes:
        raise UsageError("categories has no columns; name those that are embedded")
    inputs = _inputs(sizes, numbers)
    rows = layers.Reshape((1, dim))
    fields = [rows(each) for each in _embedded(inputs, sizes, dim, "fields")]
    first = _embedded(inputs, sizes, 1, "linear", initializer="zeros")
    if numbers:
        values = _joined([_column(inputs[name]) for name in numbers])
        first.append(layers.Dense(1, kernel_initializer="zeros", name="linear_numbers")(values))
        small = keras.initializers.RandomNormal(stddev=0.05)
        vectors = layers.EinsumDense(
            "bm,md->bmd", (len(numbers), dim), kernel_initializer=small, name="fields_numbers"
        )
        fields.append(vectors(values))
    fields = layers.Concatenate(axis=1)(fields) if len(fields) > 1 else fields[0]
    # the sum of the products of all pairs is half of (square of the sum − sum of the squares)
    squares = ops.square(ops.sum(fields, 1)) - ops.sum(ops.square(fields), 1)
    pairs = ops.sum(squares, 1, keepdims=True) / 2
    network = _network(layers.Flatten()(fields), hidden, dropout)
    return _model(inputs, layers.Add()([*first, pairs, layers.Dense(1)(network)]))


def _inputs(categories: Mapping[str, int], numbers: Sequence[str]) -> dict[str, Any]:
    import keras

    found = {name: keras.Input((), dtype="int64", name=name) for name in categories}
    return found | {name: keras.Input((), dtype="float32", name=name) for name in numbers}


def _embedded(
    inputs: Mapping[str, Any],
    sizes: Mapping[str, int],
    dim: int,
    prefix: str,
    initializer: str | None = None,
) -> list[Any]:
    """A vector for each of some columns."""
    import keras

    found = []
    for name, size in sizes.items():
        table = keras.layers.Embedding(
            max(1, size),
            dim,
            name=f"{prefix}_{name}",
            embeddings_initializer=initializer or keras.initializers.RandomNormal(stddev=0.05),
        )
        number = inputs[name]
        is_known = keras.ops.logical_and(number >= 0, number < max(1, size))
        found.append(table(keras.ops.where(is_known, number, keras.ops.zeros_like(number))))
    return found


def _column(numbers: Any) -> Any:
    import keras

    return keras.layers.Reshape((1,))(numbers)


def _joined(parts: Sequence[Any]) -> Any:
    import keras

    return keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]


def _network(vectors: Any, hidden: Sequence[int], dropout: float) -> Any:
    import keras

    for width in hidden:
        vectors = keras.layers.Dense(width, activation="relu")(vectors)
        if dropout:
            vectors = keras.layers.Dropout(dropout)(vectors)
    return vectors


def _model(inputs: Mapping[str, Any], score: Any) -> keras.Model:
    import keras

    return keras.Model(dict(inputs), keras.layers.Activation("sigmoid", name="chance")(score))
