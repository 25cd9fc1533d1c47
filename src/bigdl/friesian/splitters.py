"""Splits of interactions into training and test rows, without leaking the future.

A splitter holds the rule. :meth:`Splitter.split` applies it to a FeatureTable or a Spark DataFrame;
:meth:`Splitter.folds` yields splits by period or by group of users. All rules are Spark
expressions: no rows are collected, and no window has all rows in one partition.
"""

from __future__ import annotations

import datetime
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.ops.column_types import require_columns
from bigdl.friesian.ops.spark import F, col
from bigdl.orca.cluster.versions import computed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, WindowSpec

__all__ = [
    "ColdUsers",
    "Filtered",
    "GlobalTime",
    "KFoldUsers",
    "LastN",
    "Ratio",
    "Split",
    "Splitter",
    "add_sessions",
    "drop_cold",
    "drop_seen",
    "k_core",
]

Frame = TypeVar("Frame", "FeatureTable", "DataFrame")
TimeValue: TypeAlias = "float | datetime.date"
"""Value of a time column; a datetime is a date."""

_TEST = "__bigdl_test"
_RANK = "__bigdl_rank"
_COUNT = "__bigdl_count"


@dataclass(frozen=True)
class Split(Generic[Frame]):
    """Training rows and test rows.

    Attributes
    ----------
    train, test : FeatureTable or DataFrame, as the input
    start : int, float, datetime or None
        First time of the test rows if it is the same for all users.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import LastN
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> LastN(1).split(table).future_rows()
    0
    """

    train: Frame
    test: Frame
    start: Any = None  # Any: a value of the time column

    def future_rows(self, time_col: str = "time") -> int:
        """Count the training rows that are not older than the oldest test row.

        Only :class:`GlobalTime` guarantees zero. With other splitters a model may learn from what
        other users did after the test rows.

        Parameters
        ----------
        time_col : str, default "time"

        Returns
        -------
        int
        """
        train, test = _frame(self.train), _frame(self.test)
        first = test.agg(F.min(col(time_col)).alias("first"))
        return train.crossJoin(F.broadcast(first)).filter(col(time_col) >= col("first")).count()


@dataclass(frozen=True)
class Filtered(Generic[Frame]):
    """Result of a filter: the remaining rows, and the number of dropped rows by reason.

    Attributes
    ----------
    table : FeatureTable or DataFrame, as the input
    dropped : dict of str to int
        Number of rows by reason, such as ``{"cold users": 12, "cold items": 3}``.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import drop_seen
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> drop_seen(table, table).dropped
    {'seen': 4}
    """

    table: Frame
    dropped: dict[str, int]


class Splitter(ABC):
    """Base class of splitters, which divide interactions into training and test rows.

    Parameters
    ----------
    user_col, item_col, time_col : str
        Columns of the interactions.
    order_by : sequence of str, optional
        Columns that order rows of a user at equal times. Default: `item_col`. In data with coarse
        times this order changes metrics, so report it with them.
    session_col : str, optional
        Session column; rows of a user in one session are never separated.
    session : {"test", "train"}, default "test"
        Part that gets a session which the rule would separate.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import LastN
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> LastN(1, order_by=["item"]).split(table).test.to_dict()["item"]
    [7]
    """

    def __init__(
        self,
        *,
        user_col: str = "user",
        item_col: str = "item",
        time_col: str = "time",
        order_by: Sequence[str] | None = None,
        session_col: str | None = None,
        session: Literal["test", "train"] = "test",
    ):
        self.user_col, self.item_col, self.time_col = user_col, item_col, time_col
        self.order_by = [item_col] if order_by is None else list(order_by)
        self.session_col = session_col
        self.session = check_choice("session", session, ("test", "train"))

    def split(self, table: Frame) -> Split[Frame]:
        """Split interactions; return the newest fold.

        Parameters
        ----------
        table : FeatureTable or pyspark.sql.DataFrame

        Returns
        -------
        Split

        Raises
        ------
        UsageError
            If a column is missing.
        """
        *_, last = self.folds(table)
        return last

    def folds(self, table: Frame) -> Iterator[Split[Frame]]:
        """Yield the splits of all folds, the oldest first.

        Parameters
        ----------
        table : FeatureTable or pyspark.sql.DataFrame
        """
        frame = _frame(table)
        needed = [self.user_col, self.item_col, self.time_col, *self.order_by]
        if self.session_col is not None:
            needed.append(self.session_col)
        require_columns(frame.columns, needed)
        for marked, start in self._marked(frame):
            yield _split(table, self._with_whole_sessions(marked), start)

    @abstractmethod
    def _marked(self, frame: DataFrame) -> Iterator[tuple[DataFrame, Any]]:
        """Yield folds: rows with a ``_TEST`` column (null: unused), and the start time or None."""

    def _with_whole_sessions(self, marked: DataFrame) -> DataFrame:
        if self.session_col is None:
            return marked
        whole = _window(self.user_col, self.session_col)
        merged = F.max(col(_TEST)) if self.session == "test" else F.min(col(_TEST))
        return marked.withColumn(_TEST, merged.over(whole))

    def _newest_first(self) -> list[Column]:
        return [col(name).desc() for name in (self.time_col, *self.order_by)]

    def _ranked(self, frame: DataFrame) -> DataFrame:
        """Add each row's rank in the user's history, 1 for the newest, and the user's row count."""
        from pyspark.sql import Window

        window = Window.partitionBy(col(self.user_col)).orderBy(*self._newest_first())
        ranked = frame.withColumn(_RANK, F.row_number().over(window))
        return ranked.withColumn(_COUNT, F.count(F.lit(1)).over(_window(self.user_col)))


class LastN(Splitter):
    """Splitter that uses each user's newest rows as test rows.

    With ``n=1`` this is leave-one-out. It trains on later rows of other users, see
    :meth:`Split.future_rows`. Use :class:`GlobalTime` for metrics as in production.

    Parameters
    ----------
    n : int, default 1
        Test rows of each user.
    folds : int, default 1
        Fold i tests the i-th newest n rows, and trains on older ones.
    short_users : {"train", "drop"}, default "train"
        Handling of users who would have no training row.
    **columns
        As in :class:`Splitter`.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import LastN
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 3, 1]})
    >>> split = LastN(1).split(FeatureTable.from_pandas(clicks))
    >>> split.test.to_dict()
    {'user': [1], 'item': [7], 'time': [3]}
    >>> split.train.size()
    3
    """

    def __init__(
        self,
        n: int = 1,
        *,
        folds: int = 1,
        short_users: Literal["train", "drop"] = "train",
        **columns: Any,  # Any: keywords of Splitter
    ):
        super().__init__(**columns)
        self.n, self.number = check_positive("n", n), check_positive("folds", folds)
        self.short_users = check_choice("short_users", short_users, ("train", "drop"))

    def _marked(self, frame: DataFrame) -> Iterator[tuple[DataFrame, Any]]:
        ranked = self._ranked(frame)
        for fold in reversed(range(self.number)):
            first, last = fold * self.n, (fold + 1) * self.n
            rank = col(_RANK)
            is_test = F.when(rank > first, rank <= last)  # null for rows newer than the fold
            if self.short_users == "drop":
                is_test = F.when(col(_COUNT) > last, is_test)
            else:
                is_test = F.when(col(_COUNT) > last, is_test).otherwise(
                    F.when(rank > first, F.lit(False))
                )
            yield ranked.withColumn(_TEST, is_test), None


class Ratio(Splitter):
    """Splitter that uses the most recent fraction of each user's rows as test rows.

    Parameters
    ----------
    test_size : float, default 0.2
        Share between 0 and 1; the number of a user's test rows is rounded up.
    min_rows : int, default 2
        Users with fewer rows are used for training only.
    **columns
        As in :class:`Splitter`.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import Ratio
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> sorted(Ratio(0.5).split(table).test.to_dict()["item"])
    [6, 7]
    """

    def __init__(
        self,
        test_size: float = 0.2,
        *,
        min_rows: int = 2,
        **columns: Any,  # Any: keywords of Splitter
    ):
        super().__init__(**columns)
        self.test_size = check_number("test_size", test_size, above=0, below=1)
        self.min_rows = check_positive("min_rows", min_rows)

    def _marked(self, frame: DataFrame) -> Iterator[tuple[DataFrame, Any]]:
        # Round first: 0.2 * 10 may give 2.0000000000000004, whose ceiling is 3.
        tested = F.ceil(F.round(col(_COUNT) * F.lit(self.test_size), 6))
        is_test = (col(_RANK) <= tested) & (col(_COUNT) >= self.min_rows)
        yield self._ranked(frame).withColumn(_TEST, is_test), None


class GlobalTime(Splitter):
    """Splitter whose test rows start at the same time for all users.

    Parameters
    ----------
    start : int, float, str or datetime, optional
        First time of the test.
    test_size : float, optional
        Share of the newest rows; all rows at the start time are test rows.
    period : timedelta, int or float, optional
        Length of the test in the unit of the time column, up to the newest row; a timedelta for
        timestamps. With `folds` there are several periods, each trained on all older rows.
    folds : int, default 1
    target : {"all", "first", "last"}, default "all"
        Test rows of a user: all, the first or the last one.
    **columns
        As in :class:`Splitter`.

    Raises
    ------
    UsageError
        Unless exactly one of `start`, `test_size` and `period` is passed.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import GlobalTime
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> split = GlobalTime(test_size=0.25).split(table)
    >>> split.start, split.test.to_dict()["item"], split.future_rows()
    (9, [7], 0)
    """

    def __init__(
        self,
        start: object = None,  # Any: a value of the time column
        *,
        test_size: float | None = None,
        period: datetime.timedelta | float | None = None,
        folds: int = 1,
        target: Literal["all", "first", "last"] = "all",
        **columns: Any,  # Any: keywords of Splitter
    ):
        super().__init__(**columns)
        if [start, test_size, period].count(None) != 2:
            raise UsageError(
                "Pass exactly one of start=, test_size= and period=",
                code="argument-conflict",
                argument="start",
            )
        if folds != 1 and period is None:
            raise UsageError(
                f"folds={folds!r} needs period=, the length of each test",
                code="argument-conflict",
                argument="folds",
            )
        self.start, self.period = start, period
        self.target = check_choice("target", target, ("all", "first", "last"))
        self.number = check_positive("folds", folds)
        self.test_size = test_size
        if test_size is not None:
            self.test_size = check_number("test_size", test_size, above=0, below=1)

    def _marked(self, frame: DataFrame) -> Iterator[tuple[DataFrame, Any]]:
        for start, end in self._periods(frame):
            time = col(self.time_col)
            is_test = time >= F.lit(start)
            if end is not None:
                is_test = F.when(time < F.lit(end), is_test)
            yield self._of_target(frame.withColumn(_TEST, is_test)), start

    def _periods(self, frame: DataFrame) -> list[tuple[Any, Any]]:
        if self.start is not None:
            return [(self.start, None)]
        time = col(self.time_col)
        if self.test_size is not None:
            return [(self._start_of_share(frame, self.test_size), None)]
        newest = frame.agg(F.max(time)).collect()[0][0]
        if newest is None:
            raise UsageError("There are no rows to split", code="data-empty")
        period: Any = self.period  # type of `newest`, or a timedelta
        ends = [newest - fold * period for fold in range(self.number)]
        # The newest row is in the newest period, so periods exclude their start.
        return [
            (self._after(end - period), self._after(end) if fold else None)
            for fold, end in reversed(list(enumerate(ends)))
        ]

    def _start_of_share(self, frame: DataFrame, share: float) -> TimeValue:
        rows = frame.count()
        if not rows:
            raise UsageError("There are no rows to split", code="data-empty")
        tested = math.ceil(round(rows * share, 6))
        # Quantile position of the first test row.
        position = (rows - tested + 0.5) / rows
        quantile = f"percentile_disc({position!r}) WITHIN GROUP (ORDER BY number)"
        number = _as_number(frame, self.time_col).cast("double")
        first = frame.select(number.alias("number")).agg(F.expr(quantile)).collect()[0][0]
        later = frame.filter(number >= F.lit(first)).agg(F.min(col(self.time_col)))
        return later.collect()[0][0]

    @staticmethod
    def _after(moment: TimeValue) -> TimeValue:
        """Return the earliest time after `moment`."""
        if isinstance(moment, datetime.datetime):
            return moment + datetime.timedelta(microseconds=1)
        if isinstance(moment, datetime.date):
            return moment + datetime.timedelta(days=1)
        return moment + 1 if isinstance(moment, int) else math.nextafter(moment, math.inf)

    def _of_target(self, marked: DataFrame) -> DataFrame:
        if self.target == "all":
            return marked
        from pyspark.sql import Window

        order = self._newest_first()
        if self.target == "first":
            order = [col(name).asc() for name in (self.time_col, *self.order_by)]
        window = Window.partitionBy(col(self.user_col), col(_TEST)).orderBy(*order)
        kept = F.when(~col(_TEST), F.lit(False)).when(F.row_number().over(window) == 1, F.lit(True))
        return marked.withColumn(_TEST, kept)


class ColdUsers(Splitter):
    """Splitter that tests on all rows of a subset of users, chosen by a hash of the user id.

    Parameters
    ----------
    test_size : float, default 0.2
        Expected share of the users.
    seed : int, default 0
    **columns
        As in :class:`Splitter`.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import ColdUsers
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> split = ColdUsers(0.5).split(table)
    >>> split.train.size() + split.test.size()
    4
    """

    def __init__(
        self,
        test_size: float = 0.2,
        *,
        seed: int = 0,
        **columns: Any,  # Any: keywords of Splitter
    ):
        super().__init__(**columns)
        self.test_size = check_number("test_size", test_size, above=0, below=1)
        self.seed = seed

    def _marked(self, frame: DataFrame) -> Iterator[tuple[DataFrame, Any]]:
        bucket = _bucket(self.user_col, self.seed, 1_000_000)
        yield frame.withColumn(_TEST, bucket < round(self.test_size * 1_000_000)), None


class KFoldUsers(Splitter):
    """Splitter that divides users into groups by a hash; each fold uses one group for testing.

    Parameters
    ----------
    n : int, default 5
        Number of groups; at least 2.
    seed : int, default 0
    **columns
        As in :class:`Splitter`.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import KFoldUsers
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> sum(fold.test.size() for fold in KFoldUsers(2).folds(table))
    4
    """

    def __init__(self, n: int = 5, *, seed: int = 0, **columns: Any):  # Any: of Splitter
        super().__init__(**columns)
        self.n, self.seed = check_positive("n", n, minimum=2), seed

    def _marked(self, frame: DataFrame) -> Iterator[tuple[DataFrame, Any]]:
        for fold in range(self.n):
            yield frame.withColumn(_TEST, _bucket(self.user_col, self.seed, self.n) == fold), None


# -- filters -------------------------------------------------------------------------------


def add_sessions(
    table: Frame,
    gap: datetime.timedelta | float,
    *,
    user_col: str = "user",
    time_col: str = "time",
    session_col: str = "session",
) -> Frame:
    """Add a column with the session number of each row, from 0 per user.

    Parameters
    ----------
    table : FeatureTable or pyspark.sql.DataFrame
    gap : timedelta, int or float
        Minimum time since the user's previous row that starts a session: in seconds for timestamps,
        otherwise in the unit of the time column.
    user_col, time_col : str
    session_col : str, default "session"
        Name of the new column.

    Returns
    -------
    FeatureTable or DataFrame, as the input

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import add_sessions
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> sorted(add_sessions(table, gap=5).to_dict()["session"])
    [0, 0, 0, 1]
    """
    from pyspark.sql import Window

    frame = _frame(table)
    require_columns(frame.columns, [user_col, time_col])
    window = Window.partitionBy(col(user_col)).orderBy(col(time_col))
    time = _as_number(frame, time_col)
    length = gap.total_seconds() if isinstance(gap, datetime.timedelta) else gap
    begins = F.coalesce(time - F.lag(time).over(window) >= F.lit(length), F.lit(False))
    running = window.rangeBetween(Window.unboundedPreceding, Window.currentRow)
    marked = frame.withColumn(_TEST, begins.cast("int"))
    sessions = F.sum(col(_TEST)).over(running)
    return _like(table, marked.withColumn(session_col, sessions).drop(_TEST))


def k_core(
    table: Frame,
    k: int = 5,
    *,
    user_col: str = "user",
    item_col: str = "item",
) -> Filtered[Frame]:
    """Drop users and items with fewer than k rows, repeatedly until all have at least k rows.

    Filter training rows only. If test rows decide what is dropped, the filter leaks them to the
    model.

    Parameters
    ----------
    table : FeatureTable or pyspark.sql.DataFrame
    k : int, default 5
    user_col, item_col : str

    Returns
    -------
    Filtered

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import k_core
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> filtered = k_core(table, 1)
    >>> filtered.table.size(), filtered.dropped
    (4, {'1-core': 0})
    """
    check_positive("k", k)
    frame = _frame(table)
    require_columns(frame.columns, [user_col, item_col])
    before = remaining = frame.count()
    while True:
        for column in (user_col, item_col):
            many = frame.groupBy(col(column)).count().filter(F.col("count") >= k)
            frame = frame.join(many.select(col(column)), on=column, how="left_semi")
        frame = computed(frame)  # materialize, or each round repeats all earlier ones
        last, remaining = remaining, frame.count()
        if remaining == last:
            columns = _frame(table).columns
            return Filtered(
                _like(table, frame.select(*map(col, columns))), {f"{k}-core": before - remaining}
            )


def drop_cold(
    test: Frame,
    train: Frame,
    *,
    users: bool = True,
    items: bool = True,
    user_col: str = "user",
    item_col: str = "item",
) -> Filtered[Frame]:
    """Drop test rows of users and items that have no training row.

    Parameters
    ----------
    test, train : FeatureTable or pyspark.sql.DataFrame
    users, items : bool, default True
        Drop rows of cold users, and of cold items.
    user_col, item_col : str

    Returns
    -------
    Filtered
        A row with a cold user and a cold item counts as a row of a cold user.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import drop_cold
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> drop_cold(table, table.filter("user = 1")).dropped
    {'cold users': 1, 'cold items': 0}
    """
    frame, dropped = _frame(test), {}
    columns, remaining = frame.columns, frame.count()
    for name, column, wanted in (("users", user_col, users), ("items", item_col, items)):
        if wanted:
            known = _frame(train).select(col(column)).distinct()
            frame = frame.join(known, on=column, how="left_semi")
            remaining, dropped[f"cold {name}"] = (count := frame.count()), remaining - count
    return Filtered(_like(test, frame.select(*map(col, columns))), dropped)


def drop_seen(
    test: Frame, train: Frame, *, user_col: str = "user", item_col: str = "item"
) -> Filtered[Frame]:
    """Drop test rows whose user and item also occur together in a training row.

    Use it only if recommendations leave out seen items. Such test rows could then never be hits.

    Parameters
    ----------
    test, train : FeatureTable or pyspark.sql.DataFrame
    user_col, item_col : str

    Returns
    -------
    Filtered

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import drop_seen
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [1, 2, 9, 1]})
    >>> table = FeatureTable.from_pandas(clicks)
    >>> drop_seen(table, table.filter("item = 5")).dropped
    {'seen': 2}
    """
    frame = _frame(test)
    columns, before = frame.columns, frame.count()
    pairs = _frame(train).select(col(user_col), col(item_col)).distinct()
    frame = frame.join(pairs, on=[user_col, item_col], how="left_anti")
    dropped = {"seen": before - frame.count()}
    return Filtered(_like(test, frame.select(*map(col, columns))), dropped)


# -- expressions -------------------------------------------------------------------------------


def _frame(table: FeatureTable | DataFrame) -> DataFrame:
    frame = table.df if isinstance(table, FeatureTable) else table
    if not hasattr(frame, "sparkSession"):
        raise UsageError(
            f"The table should be a FeatureTable or a Spark DataFrame, got {type(table)}",
            code="argument-type",
            argument="table",
        )
    return frame


def _like(table: Frame, frame: DataFrame) -> Frame:
    result: Any = type(table)(frame) if isinstance(table, FeatureTable) else frame
    return result


def _split(table: Frame, marked: DataFrame, start: TimeValue | None) -> Split[Frame]:
    helpers = [_TEST, _RANK, _COUNT]
    train = marked.filter(~col(_TEST)).drop(*helpers)
    test = marked.filter(col(_TEST)).drop(*helpers)
    return Split(_like(table, train), _like(table, test), start)


def _window(*columns: str) -> WindowSpec:
    from pyspark.sql import Window

    return Window.partitionBy(*map(col, columns))


def _bucket(column: str, seed: int, count: int) -> Column:
    return F.pmod(F.xxhash64(col(column).cast("string"), F.lit(seed)), F.lit(count))


def _as_number(frame: DataFrame, column: str) -> Column:
    """Convert timestamps and dates to seconds; return numbers unchanged."""
    if frame.schema[column].dataType.typeName() in ("timestamp", "timestamp_ntz", "date"):
        return F.unix_micros(col(column).cast("timestamp")) / F.lit(1e6)
    return col(column)
