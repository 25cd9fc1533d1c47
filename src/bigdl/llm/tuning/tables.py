"""Tables of texts as training data: rows of tokens in each type of table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import LazyModule, UsageError, type_name
from bigdl.llm.tuning.rows import LABELS, TOKENS, RowTokenizer, label_text

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = LazyModule("pandas", "llm")

_WINDOW = 1000  # rows of one call of the tokenizer
_MOST_CLASSES = 1000


@dataclass(frozen=True)
class TrainingData:
    """Rows of tokens, as an Estimator takes them.

    Attributes
    ----------
    data : object
    feature_cols, label_cols : str, optional
        Columns of a table; None for arrays.
    """

    data: Any
    feature_cols: str | None = None
    label_cols: str | None = None


def opened(data: object, *, in_spark: bool) -> object:
    """Return the table of a path of Parquet files, or other data unchanged."""
    if not isinstance(data, str | os.PathLike):
        return data
    path = os.fspath(data)
    if in_spark:
        from bigdl.orca.cluster.connect import active_spark

        return active_spark().spark.read.parquet(path)
    from bigdl.common.errors import as_usage_error

    with as_usage_error(f"{path!r} cannot be read", code="path-unusable", path=path):
        return pd.read_parquet(path)


def column_names(data: object) -> list[str]:
    """Return the column names of a table; empty if they are unknown."""
    columns: Any = getattr(data, "column_names", getattr(data, "columns", None))
    return list(columns() if callable(columns) else columns) if columns is not None else []


def tokenized(source: object, tokenizer: RowTokenizer) -> TrainingData:
    """Return the rows of tokens of a table.

    Tables of Spark and Ray are tokenized by their tasks, when the rows are read.

    Parameters
    ----------
    source : pandas.DataFrame, pyarrow.Table, pyspark.sql.DataFrame, XShards or ray.data.Dataset
    tokenizer : RowTokenizer

    Raises
    ------
    UsageError
        If the type is not supported, or a column is missing or has other values than strings.
    """
    data: Any = source
    names = tokenizer.columns.names
    existing = column_names(data)
    for name in names if existing else ():
        if name not in existing:
            raise UsageError(
                f"The table has no column '{name}'; it has {', '.join(map(str, existing))}",
                code="column-missing",
                column=name,
                columns=existing,
            )
    modules = {each.__module__.partition(".")[0] for each in type(data).__mro__}
    if "pyspark" in modules and hasattr(data, "sparkSession"):
        from bigdl.orca.inference import map_batches

        returns = ", ".join(f"`{name}` {type_}" for name, type_ in tokenizer.returns.items())
        frame = map_batches(
            data, _Batches(tokenizer), returns, columns=names, keep=[], batch_size=_WINDOW
        )
        return TrainingData(frame, TOKENS, LABELS)
    if hasattr(data, "transform_shard"):
        return TrainingData(data.transform_shard(_Shards(tokenizer)))
    if "ray" in modules and hasattr(data, "map_batches"):
        rows = data.map_batches(_Shards(tokenizer, True), batch_format="pandas", batch_size=_WINDOW)
        return TrainingData(rows, TOKENS, LABELS)
    if hasattr(data, "append_column"):
        data = data.select(names).to_pandas()
    if "pandas" not in modules and not hasattr(data, "iloc"):
        raise UsageError(
            "A fit of texts takes a Spark DataFrame, a pandas DataFrame, an Arrow table, XShards, "
            f"a Ray Dataset or a path of Parquet files, got {type_name(data)}",
            code="data-type",
            argument="data",
        )
    return TrainingData(arrays_of(data, tokenizer))


def arrays_of(frame: pd.DataFrame, tokenizer: RowTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and labels of an in-memory table."""
    parts = []
    for low in range(0, max(1, len(frame)), _WINDOW):
        some = frame.iloc[low : low + _WINDOW]
        parts.append(tokenizer(_rows(some, tokenizer.columns.names)))
    tokens, labels = ([part[name] for part in parts] for name in (TOKENS, LABELS))
    return np.concatenate(tokens), np.concatenate(labels)


def _rows(frame: pd.DataFrame, names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: frame[name].tolist() for name in names}


class _Batches:
    """Tokenizer as a function of :func:`bigdl.orca.inference.map_batches`."""

    def __init__(self, tokenizer: RowTokenizer):
        self._tokenizer = tokenizer

    def __call__(self, batch: Mapping[str, np.ndarray], models: object) -> dict[str, np.ndarray]:
        return self._tokenizer({name: batch[name].tolist() for name in batch})


class _Shards:
    """Tokenizer of in-memory tables: a shard of XShards, or a batch of a Ray Dataset."""

    def __init__(self, tokenizer: RowTokenizer, named: bool = False):
        self._tokenizer, self._named = tokenizer, named

    def __call__(self, shard: pd.DataFrame) -> dict[str, np.ndarray]:
        tokens, labels = arrays_of(shard, self._tokenizer)
        return {TOKENS: tokens, LABELS: labels} if self._named else {"x": tokens, "y": labels}


def class_names(source: object, column: str) -> tuple[str, ...]:
    """Return the distinct labels of a table's column, in their order.

    Raises
    ------
    UsageError
        If the labels of this type of table must be passed.
    """
    data: Any = source
    if column not in column_names(data):
        raise UsageError(
            f"The classes of {type_name(data)} are unknown, or it has no column '{column}'; pass "
            "labels= to Estimator.from_transformers",
            code="argument-missing",
            argument="labels",
        )
    if hasattr(data, "sparkSession"):
        name = "`" + column.replace("`", "``") + "`"
        rows = data.select(name).distinct().limit(_MOST_CLASSES + 1).collect()
        values = {row[0] for row in rows}
    elif hasattr(data, "unique") and not hasattr(data, "iloc"):
        values = set(data.unique(column))
    else:
        cells = data[column]
        values = set(cells.to_pylist() if hasattr(cells, "to_pylist") else cells.tolist())
    texts = {label_text(value) for value in values} - {None}
    if len(texts) > _MOST_CLASSES or len(texts) < 2:
        raise UsageError(
            f"Column '{column}' has {len(texts)} distinct labels, but a classifier needs 2 to "
            f"{_MOST_CLASSES}; pass a column of classes",
            code="data-value",
            column=column,
        )
    numbers = all(text is not None and text.lstrip("-").isdigit() for text in texts)
    return tuple(sorted(map(str, texts), key=(lambda text: int(text)) if numbers else None))
