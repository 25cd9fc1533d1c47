"""Encoding of column values as integers, with a vocabulary collected from all shards.

Numbers start at 1; 0 represents nulls and values outside the vocabulary.  The numbers depend only
on the data: values are sorted, or with ``order_by_freq`` sorted by descending count and then by
value.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bigdl.common.errors import LazyModule, UsageError
from bigdl.orca.cluster.spark_calls import silent_when_closed, users_errors
from bigdl.orca.data.feeds.spark_dataframe import find_columns
from bigdl.orca.data.xshards import SparkXShards
from bigdl.orca.data.xshards.frames import F, quoted
from bigdl.orca.settings import OrcaContext

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame
else:
    pd = LazyModule("pandas", "orca")

DataT = TypeVar("DataT", bound="SparkXShards | DataFrame")

_ERROR = -1  # marks an error instead of a vocabulary index


class StringIndexer:
    """Encoder that replaces the values of columns with integers.

    Parameters
    ----------
    inputCol : str or list of str, optional
        Columns to encode.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import SparkXShards
    >>> from bigdl.orca.data.transformer import StringIndexer
    >>> sc = init_orca_context("local", cores=2)
    >>> train = SparkXShards(sc.parallelize([pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"]})], 1))
    >>> test = SparkXShards(sc.parallelize([pd.DataFrame({"city": ["Rome", "Bern"]})], 1))
    >>> indexer = StringIndexer(inputCol="city")
    >>> indexer.fit_transform(train).first()["city"].tolist()
    [1, 2, 1]
    >>> indexer.transform(test).first()["city"].tolist()  # Bern is new
    [2, 0]
    """

    def __init__(self, inputCol: str | list[str] | None = None):
        self.inputCol = inputCol
        self.indices: StringIndex | list[StringIndex] | None = None

    def setInputCol(self, inputCol: str | list[str]) -> StringIndexer:
        """Set the columns, discard the vocabulary, and return this object."""
        self.inputCol, self.indices = inputCol, None
        return self

    def fit_transform(self, shard: SparkXShards) -> SparkXShards:
        """Build the vocabulary of the columns and replace values with their numbers.

        Parameters
        ----------
        shard : SparkXShards of pandas.DataFrame

        Returns
        -------
        SparkXShards
            Shards with the same columns; the numbers are int32.
        """
        columns = as_columns(self.inputCol, "inputCol")
        encoded, self.indices = category_encode(shard, columns)
        return encoded

    def transform(self, shard: SparkXShards) -> SparkXShards:
        """Replace known values with their numbers in the vocabulary, and unknown values with 0."""
        if self.indices is None:
            raise UsageError("Please call fit_transform first", code="not-fitted")
        return encode_string(shard, as_columns(self.inputCol, "inputCol"), self.indices)


def gen_string_idx(
    df: Any,
    columns: str | Mapping | list,
    freq_limit: int | Mapping[str, int] | None = None,
    order_by_freq: bool = False,
    do_split: bool = False,
    sep: str = ",",
) -> StringIndex | list[StringIndex]:
    """Build the vocabularies of columns in one pass over the data.

    Parameters
    ----------
    df : SparkXShards of pandas.DataFrame, or pyspark.sql.DataFrame
    columns : str, dict or list of them
        A dict ``{"src_cols": [...], "col_name": ...}`` defines one vocabulary of several columns.
    freq_limit : int or dict of str to int, optional
        Exclude values with a lower count; a dict sets the limit per column.
    order_by_freq : bool, default False
        Number the values by descending count.
    do_split : bool, default False
        Split cells into several values.
    sep : str, default ","
        Regular expression of the separator.

    Returns
    -------
    StringIndex or list of StringIndex
        A list if `columns` is a list.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import SparkXShards
    >>> from bigdl.orca.data.transformer import gen_string_idx
    >>> sc = init_orca_context("local", cores=2)
    >>> shards = SparkXShards(sc.parallelize([pd.DataFrame({"city": ["Oslo", "Rome", "Rome"]})], 1))
    >>> gen_string_idx(shards, "city", order_by_freq=True).to_dict()
    {'Rome': 1, 'Oslo': 2}
    """
    sources = sources_of(columns, freq_limit)
    require_columns(df, [column for source in sources for column in source.columns])
    split = sep if do_split else None
    count_values = _count_spark if is_spark_frame(df) else _count_shards
    counts: list[Counter] = [Counter() for _ in sources]
    for (i, value), count in count_values(df, sources, split):
        counts[i][value] += count
    indices = []
    for source, counted in zip(sources, counts, strict=True):
        values = _in_order([v for v in counted if counted[v] >= source.min_count])
        if order_by_freq:
            values.sort(key=counted.__getitem__, reverse=True)  # stable
        numbers = {value: number for number, value in enumerate(values, 1)}
        indices.append(StringIndex.from_dict(numbers, source.name))
    return indices if isinstance(columns, list | tuple) else indices[0]


def encode_string(
    df: DataT,
    columns: str | list[str],
    indices: StringIndex | Mapping | list,
    broadcast: bool = True,
    do_split: bool = False,
    sep: str = ",",
    sort_for_array: bool = False,
    keep_most_frequent: bool = False,
) -> DataT:
    """Replace the values of columns with their numbers in given vocabularies.

    Parameters
    ----------
    df : SparkXShards of pandas.DataFrame, or pyspark.sql.DataFrame
    columns : str or list of str
    indices : StringIndex, dict of str to int, or list of them
        One vocabulary per column.
    broadcast : bool, default True
        Has no effect: the whole vocabulary is always sent to the workers.
    do_split : bool, default False
        Split text cells into several values, which become lists of numbers without unknown values.
        Cells that are lists are encoded this way in any case.
    sep : str, default ","
        Regular expression of the separator.
    sort_for_array : bool, default False
        Sort the numbers of a list.
    keep_most_frequent : bool, default False
        Keep only the smallest number of a list, or 0 for an empty list. In a vocabulary ordered by
        frequency this is the most frequent value.

    Returns
    -------
    SparkXShards or pyspark.sql.DataFrame
        Data like `df`, with int32 numbers (or lists of them) instead of the values.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import SparkXShards
    >>> from bigdl.orca.data.transformer import encode_string
    >>> sc = init_orca_context("local", cores=2)
    >>> shards = SparkXShards(sc.parallelize([pd.DataFrame({"tags": ["new,red", "blue"]})], 1))
    >>> index = {"red": 1, "new": 2}
    >>> encode_string(shards, "tags", index, do_split=True).first()["tags"].map(list).tolist()
    [[2, 1], []]
    """
    names = as_columns(columns, "columns")
    chosen = list(indices) if isinstance(indices, list | tuple) else [indices]
    if len(chosen) != len(names):
        raise UsageError(
            f"Pass one index per column, got {len(chosen)} for {len(names)} columns",
            code="argument-value",
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
        for name, index in zip(names, chosen, strict=True)
    ]
    if is_spark_frame(df):
        frame = cast("DataFrame", df)
        for name, encoder in zip(names, encoders, strict=True):
            frame = encoder.on_spark(frame, name)
        return cast("DataT", frame)

    def encode(frame: pd.DataFrame) -> pd.DataFrame:
        pairs = zip(names, encoders, strict=True)
        return frame.assign(**{name: encoder(frame[name]) for name, encoder in pairs})

    return cast("DataT", cast("SparkXShards", df).transform_shard(encode))


def category_encode(
    df: DataT,
    columns: str | list[str],
    freq_limit: int | Mapping[str, int] | None = None,
    order_by_freq: bool = False,
    do_split: bool = False,
    sep: str = ",",
    sort_for_array: bool = False,
    keep_most_frequent: bool = False,
    broadcast: bool = True,
) -> tuple[DataT, StringIndex | list[StringIndex]]:
    """Build the vocabularies of columns and encode the columns.

    Combines :func:`gen_string_idx` and :func:`encode_string`.

    Returns
    -------
    (SparkXShards or pyspark.sql.DataFrame, StringIndex or list of StringIndex)
        Encoded data, and the vocabularies: a list if `columns` is a list.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import SparkXShards
    >>> from bigdl.orca.data.transformer import category_encode
    >>> sc = init_orca_context("local", cores=2)
    >>> shards = SparkXShards(sc.parallelize([pd.DataFrame({"city": ["Rome", "Oslo", "Rome"]})], 1))
    >>> encoded, index = category_encode(shards, "city")
    >>> encoded.first()["city"].tolist(), index.to_dict()
    ([2, 1, 2], {'Oslo': 1, 'Rome': 2})
    """
    indices = gen_string_idx(df, columns, freq_limit, order_by_freq, do_split, sep)
    encoded = encode_string(
        df, columns, indices, broadcast, do_split, sep, sort_for_array, keep_most_frequent
    )
    return encoded, indices


@dataclass(frozen=True)
class VocabularySource:
    """Columns whose values form one vocabulary, and the vocabulary's frequency limit.

    Attributes
    ----------
    name : str
        Name of the vocabulary's value column.
    columns : tuple of str
        Columns with the values.
    min_count : int
        Values with a lower count are excluded.
    """

    name: str
    columns: tuple[str, ...]
    min_count: int = 0


def sources_of(columns: object, freq_limit: Any) -> list[VocabularySource]:
    """Return the columns of each vocabulary that the arguments of ``gen_string_idx`` define.

    Parameters
    ----------
    columns : str, dict or list of them
        A dict ``{"src_cols": [...], "col_name": ...}`` defines one vocabulary of several columns.
    freq_limit : int, dict of str to int, or None
        Minimum counts of values.
    """
    columns = columns if isinstance(columns, list | tuple) else [columns]
    if not columns:
        raise UsageError(
            "columns should be str or a list of str, but got None.",
            code="argument-missing",
            argument="columns",
        )
    limits = freq_limit if isinstance(freq_limit, Mapping) else {None: freq_limit}
    for limit in limits.values():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise UsageError(
                f"freq_limit should be int, dict of str to int, or None, but got {limit!r}",
                code="argument-type",
                argument="freq_limit",
            )
    sources = []
    for each in columns:
        if isinstance(each, Mapping):
            if "src_cols" not in each:
                raise UsageError(
                    f"src_cols must be provided if columns is a dictionary, but got {dict(each)!r}",
                    code="argument-missing",
                    argument="src_cols",
                )
            names = as_names(each["src_cols"], "src_cols")
            name = each.get("col_name") or f"{names[0]}_union"
        else:
            names = as_names(each)
            name = names[0]
        limit = limits.get(name) if isinstance(freq_limit, Mapping) else freq_limit
        sources.append(VocabularySource(name, tuple(names), limit or 0))
    return sources


def _in_order(values: list) -> list:
    try:
        return sorted(values)
    except TypeError:  # values of several types
        return sorted(values, key=lambda value: (type(value).__name__, str(value)))


def _count_shards(shards: SparkXShards, sources: list[VocabularySource], split: str | None) -> list:
    def count(frame: pd.DataFrame) -> Iterator[tuple[tuple, int]]:
        for i, column in _columns(sources):
            values = frame[column].dropna()
            if _are_lists(values):
                values = values.explode().dropna()
            elif split is not None:
                values = _tokens(values, split)
            try:
                counts = values.value_counts()
                pairs = dict(zip(counts.index.tolist(), counts.tolist(), strict=True))
            except TypeError as error:  # not hashable
                message = (
                    f"Column {column!r} cannot be encoded ({error}); only strings and other "
                    "hashable values are supported"
                )
                yield (_ERROR, message), 1
                return
            for value, number in pairs.items():
                if number:  # unused categories have count 0
                    yield (i, value), number

    limits = {_ERROR: 0, **{i: source.min_count for i, source in enumerate(sources)}}
    counts = shards.rdd.flatMap(count).reduceByKey(operator.add)
    with users_errors(counts.context):
        frequent = counts.filter(lambda pair: pair[1] >= limits[pair[0][0]]).collect()
    for (i, message), _ in frequent:
        if i == _ERROR:
            raise UsageError(message, code="data-dtype")
    return frequent


def _count_spark(df: DataFrame, sources: list[VocabularySource], split: str | None) -> Iterator:
    for i, column in _columns(sources):
        value = F.col(quoted(column))
        if _is_array(df, column):
            value = F.explode(value)
        elif split is not None:
            value = F.explode(F.split(value, split))
        rows = df.select(value.alias("value")).dropna().groupBy("value").count().collect()
        # excludes NaN
        yield from (((i, value), number) for value, number in rows if value == value)


def _columns(sources: list[VocabularySource]) -> list[tuple[int, str]]:
    return [(i, column) for i, source in enumerate(sources) for column in source.columns]


class _Encoder:
    """Encoder of one column with a given vocabulary."""

    def __init__(self, ids: Mapping, split: str | None, sort: bool, first: bool):
        import numpy as np

        self.values = pd.Index(list(ids), dtype=None if ids else object)
        self.ids = np.array(
            [*ids.values(), 0], dtype=np.int32
        )  # index −1 of unknown values gives 0
        self.split, self.sort, self.first = split, sort, first

    def numbers(self, values: pd.Series):
        """Return the number of each value, 0 for unknown values, as an int32 array."""
        return self.ids[self.values.get_indexer(pd.Index(values))]

    def __call__(self, series: pd.Series) -> pd.Series:
        if isinstance(series.dtype, pd.CategoricalDtype):
            series = series.astype(series.cat.categories.dtype)
        import numpy as np

        cells = series.reset_index(drop=True)
        are_lists = _are_lists(cells.dropna())
        if self.split is None and not are_lists:
            return pd.Series(self.numbers(series), index=series.index, name=series.name)
        lists: list[Any] = [[] for _ in range(len(series))]
        if are_lists:
            tokens = cells.dropna().explode().dropna()
        else:
            tokens = _tokens(cells.dropna(), cast("str", self.split))
        for row, number in zip(tokens.index, self.numbers(tokens).tolist(), strict=True):
            if number:
                lists[row].append(number)
        if self.first:
            least = [min(row, default=0) for row in lists]
            return pd.Series(least, index=series.index, name=series.name, dtype="int32")
        if self.sort:
            lists = [sorted(row) for row in lists]
        if are_lists:  # keep nulls distinct from empty lists
            for row in np.flatnonzero(cells.isna()):
                lists[row] = None
        return pd.Series(lists, index=series.index, name=series.name, dtype=object)

    def on_spark(self, df: DataFrame, column: str) -> DataFrame:
        """Return `df` with the encoded column at the same position."""
        is_array = _is_array(df, column)
        gives_lists = (is_array or self.split is not None) and not self.first
        result_type = "array<int>" if gives_lists else "int"
        value = F.col(quoted(column))
        if is_array:
            pass
        elif self.split is not None or all(isinstance(v, str) for v in self.values):
            value = value.cast("string")
        encode = F.pandas_udf(silent_when_closed(self), result_type)  # type: ignore[call-overload]
        return df.withColumn(column, encode(value))


def _are_lists(cells: pd.Series) -> bool:
    """Return True if cells without nulls are arrays of values."""
    import numpy as np

    return len(cells) > 0 and isinstance(cells.iloc[0], list | tuple | np.ndarray)


def _is_array(df: DataFrame, column: str) -> bool:
    return df.select(quoted(column)).dtypes[0][1].startswith("array<")


def _tokens(cells: pd.Series, split: str) -> pd.Series:
    """Split cells without nulls into values, each with the index of its cell."""
    return cells.astype(str).str.split(split, regex=True).explode()


class StringIndex:
    """Vocabulary of a column, which numbers known values from 1 and maps all other values to 0.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Frame with the columns ``id`` and `col_name`.
    col_name : str
        Column of the values.

    Attributes
    ----------
    df : pyspark.sql.DataFrame
        Frame with the columns `col_name` and ``id``, created on first access.
    col_name : str

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.transformer import StringIndex
    >>> sc = init_orca_context("local", cores=2)
    >>> index = StringIndex.from_dict({"Oslo": 1, "Rome": 2}, "city")
    >>> sorted(index.df.collect())
    [Row(city='Oslo', id=1), Row(city='Rome', id=2)]
    """

    def __init__(self, df: DataFrame, col_name: str):
        check_string(col_name, "col_name")
        missing = {"id", col_name} - set(df.columns)
        if missing:
            raise UsageError(
                f"{sorted(missing)[0]} should be a column of the DataFrame, which has {df.columns}",
                code="column-missing",
                column=next(iter(missing)),
                columns=list(df.columns),
            )
        self._df: DataFrame | None = df
        self._ids: dict[Hashable, int] | None = None
        self.col_name = col_name

    @classmethod
    def from_dict(cls, indices: Mapping[Hashable, int], col_name: str) -> StringIndex:
        """Create a StringIndex from a dict that maps values to their numbers.

        Parameters
        ----------
        indices : dict of str to int
            Number of each value.
        col_name : str
            Column of the values.
        """
        if not isinstance(indices, Mapping):
            raise UsageError(
                f"indices should be dict, but get {type(indices).__name__}",
                code="argument-type",
                argument="indices",
            )
        check_string(col_name, "col_name")
        for value, number in indices.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise UsageError(
                    f"indices should have integers from 0, but get {number!r} for {value!r}",
                    code="argument-value",
                    argument="indices",
                )
        index = cls.__new__(cls)
        index._df, index._ids, index.col_name = None, dict(indices), col_name
        return index

    @property
    def df(self) -> DataFrame:
        if self._df is None:
            rows = list(self.to_dict().items())
            schema: Any = [self.col_name, "id"]
            if all(isinstance(value, str) for value, _ in rows):
                schema = f"{quoted(self.col_name)} string, id int"
            frame = OrcaContext.get_spark_session().createDataFrame(rows, schema)
            self._df = frame.withColumn("id", F.col("id").cast("int"))
        return self._df

    def to_dict(self) -> dict[Any, int]:
        """Return a dict that maps each value to its number."""
        if self._ids is None:
            rows = cast("DataFrame", self._df).select(self.col_name, "id").collect()
            self._ids = {value: number for value, number in rows if value is not None}
        return dict(self._ids)

    def broadcast(self) -> None:
        """Mark :attr:`df` for a broadcast join."""
        self._df = F.broadcast(self.df)

    def __len__(self) -> int:
        return len(self.to_dict())

    def __repr__(self) -> str:
        return f"StringIndex({self.col_name!r}, {len(self)} values)"


def check_string(value: object, what: str) -> str:
    """Return `value`, or raise UsageError if it is not a str."""
    if not isinstance(value, str):
        shown = "None" if value is None else type(value).__name__
        raise UsageError(
            f"{what} should be str, but get {shown}", code="argument-type", argument=what
        )
    return value


def as_names(columns: object, what: str = "columns") -> list[str]:
    """Convert a column name or a list of column names to a list."""
    if isinstance(columns, str):
        return [columns]
    if (
        not isinstance(columns, list | tuple)
        or not columns
        or not all(isinstance(each, str) for each in columns)
    ):
        shown = None if columns in ([], ()) else columns
        raise UsageError(
            f"{what} should be str or a list of str, but got {shown}.",
            code="argument-type",
            argument=what,
        )
    return list(columns)


def as_columns(columns: object, what: str) -> list[str]:
    """Convert a column name or a list of distinct column names to a list."""
    names = as_names(columns, what)
    if len(set(names)) < len(names):
        raise UsageError(
            f"{what} should be different columns, but got {columns!r}",
            code="argument-value",
            argument=what,
        )
    return names


def is_spark_frame(data: object) -> bool:
    return any(c.__module__.startswith("pyspark.sql.") for c in type(data).__mro__)


def require_columns(data: Any, columns: list[str]) -> None:
    """Raise UsageError unless data is XShards of pandas frames or a Spark frame with `columns`."""
    if is_spark_frame(data):
        names = data.columns
    else:
        if not isinstance(data, SparkXShards):
            raise UsageError(
                f"The data must be SparkXShards of pandas frames, got {type(data)}",
                code="data-type",
            )
        schema = data.get_schema()
        if schema is None and len(data):
            raise UsageError(
                f"The data must be XShards of pandas frames, but a shard is a {type(data.first())}",
                code="data-type",
            )
        if schema is None:  # there are no shards
            return
        names = schema["columns"]
    find_columns(columns, names, "The data")
