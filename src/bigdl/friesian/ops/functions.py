"""Functions of users and encoders of text, applied to columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_integer
from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.kinds import require_columns
from bigdl.friesian.ops.spark import F, as_names, check_string, col, names_of, replace

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def apply(
    df: DataFrame, in_col: Any, out_col: str, func: Callable, dtype: Any, vectorized: bool
) -> DataFrame:
    """A column of what a function returns; see :meth:`FeatureTable.apply`."""

    check_string(out_col, "out_col")
    if not callable(func):
        raise UsageError(f"func should be a function, got {func!r}")
    names = as_names(in_col, "in_col")
    require_columns(df.columns, names)
    if vectorized:
        return replace(df, {out_col: _on_series(func, dtype, isinstance(in_col, str), names)})
    if isinstance(in_col, str):
        return replace(df, {out_col: F.udf(func, dtype)(col(in_col))})

    def on_list(*values):
        return func(list(values))

    return replace(df, {out_col: F.udf(on_list, dtype)(*map(col, names))})


def _on_series(func: Callable, dtype: Any, is_single: bool, names: list[str]) -> Column:
    import pandas as pd

    def on_series(*series):
        found = func(series[0]) if is_single else func(list(series))
        return found if isinstance(found, pd.Series) else pd.Series(found)

    function = F.pandas_udf(on_series, dtype)  # type: ignore[call-overload]  # pyspark's stubs lack a default
    return function(*map(col, names))


def string_embed(
    df: DataFrame, columns: Any, encoder: Any, reduce_dim: int | None, replaced: bool
) -> DataFrame:
    """Arrays of numbers in the place of texts; see :meth:`FeatureTable.string_embed`."""
    names = names_of(df, columns, kinds.is_text, "strings")
    if not callable(encoder):
        encoder = _SentenceEncoder(check_string(encoder, "bert_model"))
    outputs = {name: name if replaced else f"{name}_embed" for name in names}
    function = _embedding_function(encoder)
    df = replace(df, {output: function(col(name)) for name, output in outputs.items()})
    if reduce_dim is not None:
        for output in outputs.values():
            df = _reduced(df, output, reduce_dim)
    return df


def _embedding_function(encoder: Callable) -> Callable:
    from pyspark.sql.functions import pandas_udf

    # without annotations: those of this module are text, which pandas_udf does not read
    def embed(texts):
        import pandas as pd

        distinct = texts.dropna().unique().tolist()
        found = np.asarray(encoder(distinct), dtype=float) if distinct else []
        vectors = dict(zip(distinct, map(list, found), strict=True))
        cells = [vectors.get(text) if isinstance(text, str) else None for text in texts]
        return pd.Series(cells, dtype=object)

    return pandas_udf(embed, "array<double>")  # type: ignore[call-overload]  # pyspark's stubs lack a default


class _SentenceEncoder:
    """A model of sentence-transformers, loaded by each Python worker when it first needs it."""

    def __init__(self, name: str):
        import importlib.util

        if importlib.util.find_spec("sentence_transformers") is None:
            raise MissingExtraError(
                "sentence_transformers is not installed; run: pip install sentence-transformers, "
                "or pass a function from a list of texts to a matrix as bert_model"
            )
        self.name = name
        self._model: Any = None

    def __getstate__(self):
        return {"name": self.name, "_model": None}

    def __call__(self, texts: list[str]) -> Any:
        if self._model is None:
            from sentence_transformers import SentenceTransformer

            self._model = SentenceTransformer(self.name)
        return self._model.encode(texts)


def _reduced(df: DataFrame, name: str, dimensions: int) -> DataFrame:
    """Arrays projected on their principal components."""
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
            "only make embeddings shorter"
        )
    vectors = present.select(array_to_vector(col(name)).alias("vector"))
    components = PCA(k=dimensions, inputCol="vector", outputCol="out").fit(vectors).pc.toArray()
    rows = [F.array(*(F.lit(float(x)) for x in column)) for column in components.T]

    def product(row: Column) -> Column:
        pairs = F.zip_with(col(name), row, lambda a, b: a * b)
        return F.aggregate(pairs, F.lit(0.0), lambda total, each: total + each)

    projected = F.array(*(product(row) for row in rows))
    return replace(df, {name: F.when(col(name).isNotNull(), projected)})
