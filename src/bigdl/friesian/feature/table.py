"""FeatureTable: data preparation for recommenders on Spark."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bigdl.common.checks import check_integer
from bigdl.common.errors import MissingExtraError, UsageError, hide_frames
from bigdl.friesian.feature.aggregates import AggregateEncoders
from bigdl.friesian.feature.files import TableReader
from bigdl.friesian.feature.joins import JoinMethods
from bigdl.friesian.feature.learned import StringIndex, TargetCode
from bigdl.friesian.feature.methods import FeatureMethods
from bigdl.friesian.feature.relations import Table
from bigdl.friesian.feature.sequences import SequenceTable, sequences_of
from bigdl.friesian.feature.vocabularies import VocabularyEncoders
from bigdl.friesian.ops import column_types, spark
from bigdl.friesian.ops.column_types import require_columns
from bigdl.friesian.ops.schema import Feature, FeatureSchema
from bigdl.friesian.ops.spark import F, as_names, check_string, col, dtype_of
from bigdl.orca.cluster.spark_calls import silent_when_closed

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType
    from sentence_transformers import SentenceTransformer


__all__ = ["FeatureTable", "StringIndex", "Table", "TargetCode"]


@hide_frames
class FeatureTable(FeatureMethods, TableReader, JoinMethods, VocabularyEncoders, AggregateEncoders):
    """Table of features on Spark, with methods to clean, encode and join data.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> ratings = pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"], "price": [10.0, None, 20.0]})
    >>> table = FeatureTable.from_pandas(ratings).fillna(0.0, "price")
    >>> table, index = table.category_encode("city")
    >>> table, extremes = table.min_max_scale("price")
    >>> table.to_dict(), extremes
    ({'city': [1, 2, 1], 'price': [0.5, 0.0, 1.0]}, {'price': (0.0, 20.0)})
    """

    def feature_schema(self, columns: str | list[str] | None = None) -> FeatureSchema:
        """Compute types, cardinalities and array lengths of the columns in one Spark job.

        Parameters
        ----------
        columns : str or list of str, optional
            Default: all columns.

        Returns
        -------
        FeatureSchema
            :mod:`bigdl.friesian.models` size their layers from it. Nulls are ignored.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"user": [0, 6], "age": [31.5, 40.0]}))
        >>> schema = table.feature_schema()
        >>> schema["user"].cardinality, schema["age"].dtype
        (7, 'double')
        """
        names = self.columns if columns is None else as_names(columns)
        require_columns(self.columns, names)
        of_columns = {name: dtype_of(self.df, name) for name in names}
        aggregates = [
            each
            for name, dtype in of_columns.items()
            for each in _shape_aggregates(col(name), dtype)
        ]
        values = iter(spark.aggregate_values(self.df, aggregates))
        return FeatureSchema({name: _feature(dtype, values) for name, dtype in of_columns.items()})

    def sequences(
        self,
        user: str = "user",
        item: str = "item",
        time: str = "time",
        *,
        max_len: int = 50,
        order_by: Sequence[str] | None = None,
        windows: str = "last",
        items: pa.Array | None = None,
    ) -> SequenceTable:
        """Build padded histories of users, to train a sequence model and to predict with it.

        Each user's events are grouped by one shuffle. Only the distinct items are collected.

        Parameters
        ----------
        user, item, time : str
            Columns of the interactions. Times are numbers (seconds), dates or timestamps.
        max_len : int, default 50
            Length of the arrays.
        order_by : sequence of str, optional
            Columns that order the events of a user at equal times. Default: `item`. In data with
            coarse times this order changes metrics, so report it with them.
        windows : {"last", "all"}, default "last"
            Train on the newest ``max_len + 1`` events of a user, or on all events in windows of
            this length.
        items : pyarrow.Array, optional
            Items whose positions from 1 are their ids, such as those of earlier sequences. Events
            with other items are dropped. Default: all items in ascending order.

        Returns
        -------
        SequenceTable

        Raises
        ------
        UsageError
            For missing columns, nulls, and unsuitable types.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> clicks = pd.DataFrame({"user": [7, 7, 8], "item": [30, 20, 30], "time": [1, 2, 3]})
        >>> table = FeatureTable.from_pandas(clicks).sequences("user", "item", "time", max_len=2)
        >>> table.df.first().item_seq, table.df.first().next_seq
        ([2, 0], [1, 0])
        >>> table.schema.cardinality("item_seq")
        3
        """
        return sequences_of(
            self.df,
            user,
            item,
            time,
            max_len=max_len,
            order_by=order_by,
            windows=windows,
            items=items,
        )

    def apply(
        self,
        in_col: str | list[str],
        out_col: str,
        func: Callable,
        dtype: str | DataType = "string",
        vectorized: bool = False,
    ) -> Self:
        """Add a column that a Python function computes from other columns.

        Parameters
        ----------
        in_col : str or list of str
        out_col : str
            New column. An existing column of this name is replaced in place.
        func : callable
            Takes a value. For a list of columns it takes the list of their values, which keep their
            types.
        dtype : str or DataType of Spark, default "string"
            Type of the result, such as ``"int"`` or ``"array<float>"``.
        vectorized : bool, default False
            `func` takes a pandas Series, or a list of Series, and returns a Series. This is many
            times faster.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"a": [1, 2], "b": [10, 20]}))
        >>> table.apply(["a", "b"], "total", sum, "long").to_list("total")
        [11, 22]
        """
        check_string(out_col, "out_col")
        if not callable(func):
            raise UsageError(
                f"func should be a function, got {func!r}", code="argument-type", argument="func"
            )
        names = as_names(in_col, "in_col")
        require_columns(self.df.columns, names)
        is_single = isinstance(in_col, str)

        def on_values(*values):
            return func(values[0] if is_single else list(values))

        def on_series(*series):
            import pandas as pd

            results = on_values(*series)
            return results if isinstance(results, pd.Series) else pd.Series(results)

        udf: Any = F.pandas_udf if vectorized else F.udf
        function = udf(silent_when_closed(on_series if vectorized else on_values), dtype)
        return self._clone(spark.replace(self.df, {out_col: function(*map(col, names))}))

    def string_embed(
        self,
        columns: str | list[str],
        bert_model: str | Callable = "distilbert-base-uncased",
        reduce_dim: int | None = None,
        replace: bool = True,
    ) -> Self:
        """Embed strings as arrays of floats.

        Parameters
        ----------
        columns : str or list of str
        bert_model : str or callable, default "distilbert-base-uncased"
            Name of a sentence-transformers model, which each Python worker loads once; or a
            function from a list of strings to a matrix with one row per string.
        reduce_dim : int, optional
            Number of principal components to keep.
        replace : bool, default True
            Replace the strings in place. Otherwise add ``<column>_embed``.

        Returns
        -------
        FeatureTable
            With columns of array<double>; null stays null.

        Examples
        --------
        >>> import numpy as np
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> def embed(texts):  # or the name of a sentence-transformers model
        ...     return np.array([[len(text), text.count("a")] for text in texts], dtype=float)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"title": ["banana", "fig"]}))
        >>> table.string_embed("title", embed).to_list("title")
        [[6.0, 3.0], [3.0, 0.0]]
        """
        names = spark.names_of(self.df, columns, column_types.is_text, "strings")
        if not callable(bert_model):
            check_string(bert_model, "bert_model")
            if importlib.util.find_spec("sentence_transformers") is None:
                raise MissingExtraError(
                    "sentence_transformers is not installed; run: pip install "
                    "sentence-transformers, or pass a function from a list of texts to a matrix "
                    "as bert_model"
                )
            bert_model = partial(_by_sentence_transformer, bert_model)
        outputs = {name: name if replace else f"{name}_embed" for name in names}
        function = _embedding_function(bert_model)
        vectors = {output: function(col(name)) for name, output in outputs.items()}
        df = spark.replace(self.df, vectors)
        if reduce_dim is not None:
            for output in outputs.values():
                df = _reduced(df, output, reduce_dim)
        return self._clone(df)


def _shape_aggregates(value: Column, dtype: str) -> list[Column]:
    """Return the min and max aggregates of the array lengths at each depth, then of the values."""
    aggregates, depth = [], 0
    while column_types.is_array(dtype):
        lengths = F.array(F.when(value.isNotNull(), F.size(value)))
        if depth:  # the elements of `value` are the arrays of this depth
            inner = F.filter(value, lambda each: each.isNotNull())
            lengths, value = F.transform(inner, lambda each: F.size(each)), F.flatten(inner)
        aggregates += [F.min(F.array_min(lengths)), F.max(F.array_max(lengths))]
        dtype, depth = column_types.element_type(dtype), depth + 1
    if column_types.is_integral(dtype):
        low, high = (F.array_min(value), F.array_max(value)) if depth else (value, value)
        aggregates += [F.min(low), F.max(high)]
    return aggregates


def _feature(dtype: str, values: Iterator[Any]) -> Feature:
    """Build the Feature of a column from the results of its :func:`_shape_aggregates`."""
    shape: list[int | None] = []
    while column_types.is_array(dtype):
        short, long = next(values), next(values)
        shape.append(short if short == long else None)
        dtype = column_types.element_type(dtype)
    cardinality = None
    if column_types.is_integral(dtype):
        smallest, largest = next(values), next(values)
        if (smallest or 0) >= 0:
            cardinality = 0 if largest is None else largest + 1
    return Feature(dtype, cardinality, tuple(shape))


# -- embeddings of strings -------------------------------------------------------------------------


def _embedding_function(encoder: Callable) -> Callable:
    def embed(texts):
        import pandas as pd

        distinct = texts.dropna().unique().tolist()
        matrix = np.asarray(encoder(distinct), dtype=float) if distinct else []
        vectors = dict(zip(distinct, map(list, matrix), strict=True))
        cells = [vectors.get(text) if isinstance(text, str) else None for text in texts]
        return pd.Series(cells, dtype=object)

    return F.pandas_udf(silent_when_closed(embed), "array<double>")  # type: ignore[call-overload]  # pyspark's stubs lack a default


@cache
def _sentence_transformer(name: str) -> SentenceTransformer:
    """Load a sentence-transformers model once per Python worker."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(name)


def _by_sentence_transformer(name: str, texts: list[str]) -> np.ndarray:
    return _sentence_transformer(name).encode(texts)


def _reduced(df: DataFrame, name: str, dimensions: int) -> DataFrame:
    """Reduce the arrays of a column to `dimensions` values by PCA."""
    from pyspark.ml.feature import PCA
    from pyspark.ml.functions import array_to_vector

    check_integer("reduce_dim", dimensions, 1)
    present = df.filter(col(name).isNotNull())
    first = present.select(F.size(col(name))).first()
    if first is None:
        return df
    if first[0] < dimensions:
        raise UsageError(
            f"source vector size {first[0]} must be no less than k={dimensions}: reduce_dim can "
            "only make embeddings shorter",
            code="data-shape",
        )
    vectors = present.select(array_to_vector(col(name)).alias("vector"))
    components = PCA(k=dimensions, inputCol="vector", outputCol="out").fit(vectors).pc.toArray()
    rows = [F.array(*(F.lit(float(x)) for x in column)) for column in components.T]

    def product(row: Column) -> Column:
        pairs = F.zip_with(col(name), row, lambda a, b: a * b)
        return F.aggregate(pairs, F.lit(0.0), lambda total, each: total + each)

    projected = F.array(*(product(row) for row in rows))
    return spark.replace(df, {name: F.when(col(name).isNotNull(), projected)})
