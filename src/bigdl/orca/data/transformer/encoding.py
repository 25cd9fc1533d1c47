"""Values of a column to whole numbers, by a vocabulary that is learned from all shards.

Numbers begin with 1; 0 stands for nulls and for values that are not in the vocabulary.  The order
of the numbers depends on nothing but the values: that of the values, or with ``order_by_freq``
falling counts and that of the values among equal counts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import UsageError
from bigdl.orca.data.xshards import SparkXShards
from bigdl.orca.settings import OrcaContext

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame


__all__ = [
    "StringIndex",
    "StringIndexer",
    "as_columns",
    "category_encode",
    "encode_string",
    "gen_string_idx",
    "is_spark_frame",
    "require_columns",
]


_ERROR = -1  # in place of the number of a vocabulary


class StringIndexer:
    """Replaces the values of columns by whole numbers.

    Parameters
    ----------
    inputCol : str or list of str, optional

    Examples
    --------
    >>> indexer = StringIndexer(inputCol="city")  # doctest: +SKIP
    >>> train = indexer.fit_transform(train)  # doctest: +SKIP
    >>> test = indexer.transform(test)  # doctest: +SKIP
    """

    def __init__(self, inputCol: str | list[str] | None = None):
        self.inputCol = inputCol
        self.indices: StringIndex | list[StringIndex] | None = None

    def setInputCol(self, inputCol: str | list[str]) -> StringIndexer:
        """Set the columns, which :meth:`fit_transform` has to learn then; returns this object."""
        self.inputCol, self.indices = inputCol, None
        return self

    def fit_transform(self, shards: SparkXShards) -> SparkXShards:
        """Learn the values of the columns and replace them by their numbers.

        Parameters
        ----------
        shards : SparkXShards of pandas.DataFrame

        Returns
        -------
        SparkXShards
            The same columns in the same order; the numbers are int32.
        """
        columns = as_columns(self.inputCol, "inputCol")
        indices = gen_string_idx(shards, columns)
        encoded = encode_string(shards, columns, indices)
        self.indices = indices
        return encoded

    def transform(self, shards: SparkXShards) -> SparkXShards:
        """Replace the values by the numbers that were learned, new ones by 0."""
        if self.indices is None:
            raise UsageError("Please call fit_transform first")
        return encode_string(shards, as_columns(self.inputCol, "inputCol"), self.indices)


def gen_string_idx(
    df: Any,
    columns: str | Mapping | list,
    freq_limit: int | Mapping[str, int] | None = None,
    order_by_freq: bool = False,
    do_split: bool = False,
    sep: str = ",",
) -> StringIndex | list[StringIndex]:
    """Learn the vocabularies of columns, all in one pass.

    Parameters
    ----------
    df : SparkXShards of pandas.DataFrame, or pyspark.sql.DataFrame
    columns : str, dict or list of them
        A dict ``{"src_cols": [...], "col_name": ...}`` means one vocabulary of several columns.
    freq_limit : int or dict of str to int, optional
        Values that occur less often are left out; a dict has the limits of some of the columns.
    order_by_freq : bool, default False
        Number the values by falling count.
    do_split : bool, default False
        Cells hold several values.
    sep : str, default ","
        Regular expression between them.

    Returns
    -------
    StringIndex or list of StringIndex
        A list if `columns` is one.
    """
    several = isinstance(columns, list | tuple)
    vocabularies = [_vocabulary(each) for each in (columns if several else [columns])]
    limits = [_limit(freq_limit, name) for name, _ in vocabularies]
    sources = [(i, c) for i, (_, found) in enumerate(vocabularies) for c in found]
    require_columns(df, list(dict.fromkeys(column for _, column in sources)))
    split = sep if do_split else None
    counting = _count_spark if is_spark_frame(df) else _count_shards
    counts: list[dict] = [{} for _ in vocabularies]
    for (i, value), count in counting(df, sources, split, limits):
        counts[i][value] = count
    indices = []
    for (name, _), counted in zip(vocabularies, counts, strict=True):
        values = _in_order(counted)
        if order_by_freq:
            values.sort(key=counted.__getitem__, reverse=True)  # stable
        indices.append(StringIndex.from_dict({v: i for i, v in enumerate(values, 1)}, name))
    return indices if several else indices[0]


def encode_string(
    df: Any,
    columns: str | list[str],
    indices: StringIndex | Mapping | list,
    broadcast: bool = True,
    do_split: bool = False,
    sep: str = ",",
    sort_for_array: bool = False,
    keep_most_frequent: bool = False,
) -> Any:
    """Replace the values of columns by their numbers.

    Parameters
    ----------
    df : SparkXShards of pandas.DataFrame, or pyspark.sql.DataFrame
    columns : str or list of str
    indices : StringIndex, dict of str to int, or list of them
        One for each column.
    broadcast : bool, default True
        Accepted without effect: a vocabulary is always sent to the workers as a whole.
    do_split : bool, default False
        Cells hold several values: they become lists of numbers, without unknown values.
    sep : str, default ","
        Regular expression between them.
    sort_for_array : bool, default False
        Sort the numbers of a list.
    keep_most_frequent : bool, default False
        Of a list keep the smallest number only, 0 of an empty one; it is that of the most
        frequent value in a vocabulary ordered by frequency.

    Returns
    -------
    SparkXShards or pyspark.sql.DataFrame
        As `df`, with int32 numbers (or lists of them) in place of the values.
    """
    names = as_columns(columns, "columns")
    given = list(indices) if isinstance(indices, list | tuple) else [indices]
    if len(given) != len(names):
        raise UsageError(
            f"There must be one index for each column, got {len(given)} for {len(names)} columns"
        )
    require_columns(df, names)
    encoders = [
        _Encoder(
            index.to_dict()
            if isinstance(index, StringIndex)
            else StringIndex.from_dict(index, name).to_dict(),
            sep if do_split else None,
            sort_for_array,
            keep_most_frequent,
        )
        for name, index in zip(names, given, strict=True)
    ]
    if is_spark_frame(df):
        for name, encoder in zip(names, encoders, strict=True):
            df = encoder.on_spark(df, name)
        return df
    return df.transform_shard(_EncodeShard(dict(zip(names, encoders, strict=True))))


def category_encode(
    df: Any,
    columns: str | list[str],
    freq_limit: int | Mapping[str, int] | None = None,
    order_by_freq: bool = False,
    do_split: bool = False,
    sep: str = ",",
    sort_for_array: bool = False,
    keep_most_frequent: bool = False,
    broadcast: bool = True,
) -> tuple[Any, StringIndex | list[StringIndex]]:
    """:func:`gen_string_idx` and :func:`encode_string` in one.

    Returns
    -------
    (SparkXShards or pyspark.sql.DataFrame, StringIndex or list of StringIndex)
        A list if `columns` is one.
    """
    indices = gen_string_idx(df, columns, freq_limit, order_by_freq, do_split, sep)
    encoded = encode_string(
        df, columns, indices, broadcast, do_split, sep, sort_for_array, keep_most_frequent
    )
    return encoded, indices


def _vocabulary(column: Any) -> tuple[str, list[str]]:
    """Name and source columns of one vocabulary."""
    if not isinstance(column, Mapping):
        return as_columns(column, "columns")[0], as_columns(column, "columns")
    if "src_cols" not in column:
        raise UsageError(f'A dict of columns must have the key "src_cols", got {dict(column)!r}')
    sources = as_columns(column["src_cols"], "src_cols")
    return column.get("col_name", f"{sources[0]}_union"), sources


def _limit(freq_limit: Any, name: str) -> int:
    limit = freq_limit.get(name, 0) if isinstance(freq_limit, Mapping) else freq_limit or 0
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise UsageError(
            f"freq_limit must be a whole number or a dict of them by column, got {freq_limit!r}"
        )
    return limit


def _in_order(values: Any) -> list:
    try:
        return sorted(values)
    except TypeError:  # values of several types
        return sorted(values, key=lambda value: (type(value).__name__, str(value)))


def _count_shards(shards, sources, split, limits) -> list:
    def count(frame: pd.DataFrame) -> Iterator[tuple[tuple, int]]:
        for i, column in sources:
            values = frame[column].dropna()
            if split is not None:
                values = values.astype(str).str.split(split, regex=True).explode()
            try:
                found = values.value_counts()
                pairs = dict(zip(found.index.tolist(), found.tolist(), strict=True))
            except TypeError as error:  # not hashable
                message = (
                    f"The column {column!r} cannot be encoded ({error}); only strings and other "
                    "single values have a number"
                )
                yield (_ERROR, message), 1
                return
            for value, number in pairs.items():
                if number:  # 0 of a category that does not occur
                    yield (i, value), number

    limit_of = {**dict(enumerate(limits)), _ERROR: 0}
    counts = shards.rdd.flatMap(count).reduceByKey(operator.add)
    found = counts.filter(lambda pair: pair[1] >= limit_of[pair[0][0]]).collect()
    for (i, message), _ in found:
        if i == _ERROR:
            raise UsageError(message)
    return found


def _count_spark(df, sources, split, limits) -> list:
    from pyspark.sql import functions as F

    counts: dict[tuple, int] = {}
    for i, column in sources:
        value = F.col(_quoted(column))
        if split is not None:
            value = F.explode(F.split(value, split))
        rows = df.select(value.alias("value")).dropna().groupBy("value").count().collect()
        for found, number in rows:
            counts[i, found] = counts.get((i, found), 0) + number
    return [(key, n) for key, n in counts.items() if n >= limits[key[0]] and key[1] == key[1]]


def _quoted(column: str) -> str:
    return "`" + column.replace("`", "``") + "`"


class _Encoder:
    """Numbers of the values of one column."""

    def __init__(self, ids: dict, split: str | None, sort: bool, first: bool):
        import numpy as np

        self.values = list(ids)
        self.ids = np.array([*ids.values(), 0], dtype=np.int32)  # −1 finds the 0 of the unknown
        self.split, self.sort, self.first = split, sort, first
        self._table: Any = None

    def __getstate__(self):
        return {**self.__dict__, "_table": None}

    def numbers(self, values: Any):
        """The numbers of a Series or an array, as an int32 array."""
        import pandas as pd

        if self._table is None:
            self._table = pd.Index(self.values, dtype=None if self.values else object)
        return self.ids[self._table.get_indexer(pd.Index(values))]

    def __call__(self, series: pd.Series) -> pd.Series:
        import numpy as np
        import pandas as pd

        if isinstance(series.dtype, pd.CategoricalDtype):
            series = series.astype(series.cat.categories.dtype)
        if self.split is None:
            return pd.Series(self.numbers(series), index=series.index, name=series.name)
        known = series.notna().to_numpy()
        tokens = series[known].astype(str).str.split(self.split, regex=True).tolist()
        numbers = self.numbers(np.array([t for row in tokens for t in row], dtype=object))
        ends = np.cumsum([len(row) for row in tokens], dtype=int)
        lists: list = [[] for _ in range(len(series))]
        pieces = np.split(numbers, ends[:-1]) if len(tokens) else []
        for place, piece in zip(np.flatnonzero(known), pieces, strict=True):
            found = piece[piece > 0]
            lists[place] = (np.sort(found) if self.sort else found).tolist()
        if self.first:
            first = np.array([min(row, default=0) for row in lists], dtype=np.int32)
            return pd.Series(first, index=series.index, name=series.name)
        return pd.Series(lists, index=series.index, name=series.name, dtype=object)

    def on_spark(self, df: Any, column: str) -> Any:
        """`df` with the column replaced in its place."""
        from pyspark.sql import functions as F

        wanted = "array<int>" if self.split is not None and not self.first else "int"
        value = F.col(_quoted(column))
        if self.split is not None or all(isinstance(v, str) for v in self.values):
            value = value.cast("string")
        return df.withColumn(column, _series_function(self, wanted)(value))


def _series_function(encoder: _Encoder, wanted: str) -> Callable:
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    def encode(values: pd.Series) -> pd.Series:
        return encoder(values)

    # the annotations of this module are text, which pandas_udf does not read
    encode.__annotations__ = {"values": pd.Series, "return": pd.Series}
    return cast("Any", pandas_udf)(encode, wanted)


class _EncodeShard:
    def __init__(self, encoders: dict[str, _Encoder]):
        self._encoders = encoders

    def __call__(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(
            **{name: encode(frame[name]) for name, encode in self._encoders.items()}
        )


class StringIndex:
    """A number from 1 on for each value of a column; 0 stands for every other value.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        With the columns ``id`` and `col_name`.
    col_name : str
        The column of the values.

    Attributes
    ----------
    df : pyspark.sql.DataFrame
        With the columns `col_name` and ``id``; made when it is asked for.
    col_name : str
    """

    def __init__(self, df: DataFrame, col_name: str):
        _check_name(col_name)
        missing = {"id", col_name} - set(df.columns)
        if missing:
            raise UsageError(
                f"{sorted(missing)[0]} should be a column of the DataFrame, which has {df.columns}"
            )
        self._df: DataFrame | None = df
        self._ids: dict[Hashable, int] | None = None
        self.col_name = col_name

    @classmethod
    def from_dict(cls, indices: Mapping[Hashable, int], col_name: str) -> StringIndex:
        """The index with these numbers.

        Parameters
        ----------
        indices : dict of str to int
        col_name : str
        """
        if not isinstance(indices, Mapping):
            raise UsageError(f"indices should be dict, but get {type(indices).__name__}")
        _check_name(col_name)
        for value, number in indices.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise UsageError(
                    f"indices should have whole numbers from 0 on, but get {number!r} for {value!r}"
                )
        index = cls.__new__(cls)
        index._df, index._ids, index.col_name = None, dict(indices), col_name
        return index

    @property
    def df(self) -> DataFrame:
        if self._df is None:
            from pyspark.sql import functions as F
            from pyspark.sql import types as T

            spark = OrcaContext.get_spark_session()
            rows = list(self.to_dict().items())
            if rows and not all(isinstance(value, str) for value, _ in rows):
                made = spark.createDataFrame(rows, [self.col_name, "id"])
                self._df = made.withColumn("id", F.col("id").cast("int"))
            else:
                fields = [T.StructField(self.col_name, T.StringType())]
                fields += [T.StructField("id", T.IntegerType())]
                self._df = spark.createDataFrame(rows, T.StructType(fields))
        return self._df

    def to_dict(self) -> dict[Any, int]:
        """The number of each value."""
        if self._ids is None:
            rows = cast("DataFrame", self._df).select(self.col_name, "id").collect()
            self._ids = {value: number for value, number in rows if value is not None}
        return dict(self._ids)

    def broadcast(self) -> None:
        """Let Spark send :attr:`df` whole to every executor when it is joined."""
        from pyspark.sql import functions as F

        self._df = F.broadcast(self.df)

    def __len__(self) -> int:
        return len(self.to_dict())

    def __repr__(self) -> str:
        return f"StringIndex({self.col_name!r}, {len(self)} values)"


def _check_name(col_name: Any) -> None:
    if not isinstance(col_name, str):
        given = None if col_name is None else type(col_name).__name__
        raise UsageError(f"col_name should be str, but get {given}")


def as_columns(columns: Any, name: str) -> list[str]:
    """One column name or several, as a list without repetitions."""
    found = [columns] if isinstance(columns, str) else columns
    good = isinstance(found, list | tuple) and found and all(isinstance(c, str) for c in found)
    if not good or len(set(found)) < len(found):
        raise UsageError(
            f"{name} must be the name of a column or a list of different ones, got {columns!r}"
        )
    return list(found)


def is_spark_frame(data: Any) -> bool:
    return any(c.__module__.startswith("pyspark.sql.") for c in type(data).__mro__)


def require_columns(data: Any, columns: list[str]) -> None:
    """Refuse data that are not XShards of pandas frames, or a Spark frame, with these columns."""
    if is_spark_frame(data):
        names = data.columns
    else:
        if not isinstance(data, SparkXShards):
            raise UsageError(f"The data must be SparkXShards of pandas frames, got {type(data)}")
        schema = data.get_schema()
        if schema is None and len(data):
            raise UsageError(
                f"The data must be XShards of pandas frames, but a shard is a {type(data.first())}"
            )
        if schema is None:  # there is no shard
            return
        names = schema["columns"]
    missing = [column for column in columns if column not in names]
    if missing:
        raise UsageError(f"The data have no column {missing[0]!r}; they have {list(names)}")
