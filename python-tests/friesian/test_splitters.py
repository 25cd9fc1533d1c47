"""Tests of splits by users and time, and of leakage from test rows into training."""

import datetime

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.splitters import (
    ColdUsers,
    GlobalTime,
    KFoldUsers,
    LastN,
    Ratio,
    add_sessions,
    drop_cold,
    drop_seen,
    k_core,
)


@pytest.fixture(scope="module")
def clicks(orca_spark):
    """Return rows of twelve users with many equal times, in three partitions."""
    random = np.random.default_rng(3)
    rows = pd.DataFrame(
        {
            "user": random.integers(0, 12, 150),
            "item": random.permutation(150),
            "time": random.integers(0, 40, 150),
        }
    )
    return rows, orca_spark.createDataFrame(rows).repartition(3).cache()


def rows_of(frame) -> set[tuple]:
    frame = frame.df if isinstance(frame, FeatureTable) else frame
    return {tuple(row) for row in frame.collect()}


def pandas_rows(rows: pd.DataFrame) -> set[tuple]:
    return set(rows.itertuples(index=False, name=None))


def newest_first(rows: pd.DataFrame) -> pd.DataFrame:
    ordered = rows.sort_values(["user", "time", "item"], ascending=[True, False, False])
    return ordered.assign(
        number=ordered.groupby("user").cumcount() + 1,
        count=ordered.groupby("user")["item"].transform("size"),
    )


def chosen(rows: pd.DataFrame, where: pd.Series) -> set[tuple]:
    return pandas_rows(rows[where][["user", "item", "time"]])


def test_the_last_rows_of_each_user_are_ordered_by_time_and_item(clicks):
    rows, frame = clicks
    ordered = newest_first(rows)
    folds = list(LastN(2, folds=2).folds(frame))
    for fold, split in zip((1, 0), folds, strict=True):
        number, long = ordered["number"], ordered["count"] > 2 * fold + 2
        is_test = long & (number > 2 * fold) & (number <= 2 * fold + 2)
        assert rows_of(split.test) == chosen(ordered, is_test)
        assert rows_of(split.train) == chosen(ordered, ~is_test & (number > 2 * fold))
    assert rows_of(LastN(2).split(frame).test) == rows_of(folds[-1].test)


def test_short_histories_are_trained_with_or_dropped(orca_spark):
    rows = pd.DataFrame({"user": [1, 1, 2], "item": [1, 2, 3], "time": [1, 2, 3]})
    table = FeatureTable.from_pandas(rows)
    split = LastN(1).split(table)
    assert isinstance(split.train, FeatureTable)
    assert rows_of(split.test) == {(1, 2, 2)}
    assert rows_of(split.train) == {(1, 1, 1), (2, 3, 3)}
    assert rows_of(LastN(1, short_users="drop").split(table).train) == {(1, 1, 1)}


def test_a_share_of_each_user_is_rounded_up(clicks):
    rows, frame = clicks
    ordered = newest_first(rows)
    is_test = ordered["number"] <= np.ceil((ordered["count"] * 0.2).round(6))
    split = Ratio(0.2).split(frame)
    assert rows_of(split.test) == chosen(ordered, is_test)
    assert rows_of(split.train) == chosen(ordered, ~is_test)


@pytest.mark.parametrize("size", [0.1, 0.2, 0.5])
def test_a_global_share_begins_at_one_moment(clicks, size):
    rows, frame = clicks
    start = np.sort(rows["time"])[-int(np.ceil(round(len(rows) * size, 6)))]
    split = GlobalTime(test_size=size).split(frame)
    assert split.start == start
    assert rows_of(split.test) == chosen(rows, rows["time"] >= start)
    assert rows_of(split.train) == chosen(rows, rows["time"] < start)
    assert split.future_rows() == 0


def test_periods_are_expanding_windows(clicks):
    rows, frame = clicks
    newest = rows["time"].max()
    for fold, split in zip((1, 0), GlobalTime(period=5, folds=2).folds(frame), strict=True):
        end = newest - 5 * fold
        assert rows_of(split.train) == chosen(rows, rows["time"] <= end - 5)
        is_test = (rows["time"] > end - 5) & (rows["time"] <= end)
        assert rows_of(split.test) == chosen(rows, is_test)


def test_the_target_can_be_one_row_of_a_user(clicks):
    rows, frame = clicks
    later = rows[rows["time"] >= 30].sort_values(["user", "time", "item"]).groupby("user")
    for target, expected in (("first", later.head(1)), ("last", later.tail(1))):
        split = GlobalTime(30, target=target).split(frame)
        assert rows_of(split.test) == pandas_rows(expected)
        assert rows_of(split.train) == chosen(rows, rows["time"] < 30)


def test_timestamps_are_split_like_numbers(clicks):
    frame = clicks[1]
    days = frame.selectExpr("user", "item", "timestamp_seconds(time * 86400) AS time")
    day = datetime.timedelta(days=1)
    split, same = GlobalTime(period=5 * day).split(days), GlobalTime(period=5).split(frame)
    items = [{row["item"] for row in each.test.collect()} for each in (split, same)]
    assert items[0] == items[1]
    split, same = GlobalTime(test_size=0.2).split(days), GlobalTime(test_size=0.2).split(frame)
    items = [{row["item"] for row in each.test.collect()} for each in (split, same)]
    assert items[0] == items[1]


def test_users_are_wholly_on_one_side(clicks):
    rows, frame = clicks
    tested = []
    for split in KFoldUsers(3, seed=1).folds(frame):
        train, test = ({row[0] for row in rows_of(each)} for each in (split.train, split.test))
        assert train.isdisjoint(test)
        tested += sorted(test)
    assert sorted(tested) == sorted(rows["user"].unique())
    split = ColdUsers(0.5).split(frame)
    parts = rows_of(split.train), rows_of(split.test)
    assert parts[0] | parts[1] == pandas_rows(rows)
    assert {row[0] for row in parts[0]}.isdisjoint({row[0] for row in parts[1]})
    assert parts == tuple(map(rows_of, (ColdUsers(0.5).split(frame).train, split.test)))


def test_sessions_stay_together(clicks):
    rows, frame = clicks
    sessions = add_sessions(frame, 3)
    ordered = rows.sort_values(["user", "time"])
    begins = ordered.groupby("user")["time"].diff() >= 3
    expected = ordered.assign(session=begins.groupby(ordered["user"]).cumsum())
    assert rows_of(sessions) == pandas_rows(expected)
    cut = LastN(1).split(sessions)
    whole = {row[3:] + row[:1] for row in rows_of(cut.test)}
    for side in ("test", "train"):
        split = LastN(1, session_col="session", session=side).split(sessions)
        parts = [{(row[0], row[3]) for row in rows_of(each)} for each in (split.train, split.test)]
        assert parts[0].isdisjoint(parts[1])
        assert sum(len(rows_of(each)) for each in (split.train, split.test)) == len(rows)
        if side == "test":
            assert {(session, user) for user, session in parts[1]} == whole


@pytest.mark.slow
def test_a_core_is_filtered_until_nothing_changes(orca_spark):
    random = np.random.default_rng(0)
    rows = pd.DataFrame(
        {"user": random.zipf(1.6, 400) % 60, "item": random.zipf(1.6, 400) % 60}
    ).drop_duplicates()
    left = rows
    while True:
        before = len(left)
        for column in ("user", "item"):
            left = left[left.groupby(column)[column].transform("size") >= 3]
        if len(left) == before:
            break
    filtered = k_core(FeatureTable.from_pandas(rows), 3)
    assert rows_of(filtered.table) == pandas_rows(left)
    assert filtered.dropped == {"3-core": len(rows) - len(left)}


def test_cold_and_seen_rows_are_dropped_and_counted(orca_spark):
    def frame(*pairs):
        return orca_spark.createDataFrame(pairs, "user int, item int")

    train = frame((1, 1), (2, 2), (2, 2))
    test = frame((1, 2), (1, 1), (3, 1), (2, 9), (3, 9))
    cold = drop_cold(test, train)
    assert rows_of(cold.table) == {(1, 2), (1, 1)}
    assert cold.dropped == {"cold users": 2, "cold items": 1}
    assert drop_cold(test, train, users=False).dropped == {"cold items": 2}
    seen = drop_seen(cold.table, train)
    assert rows_of(seen.table) == {(1, 2)}
    assert seen.dropped == {"seen": 1}


def test_rows_that_leak_the_future_are_counted(clicks):
    rows, frame = clicks
    split = LastN(1).split(frame)
    train, test = (
        pd.DataFrame(rows_of(each), columns=rows.columns) for each in (split.train, split.test)
    )
    expected = int((train["time"] >= test["time"].min()).sum())
    assert split.future_rows() == expected > 0


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda: GlobalTime(), "argument-conflict", ["start", "test_size", "period"]),
        (lambda: GlobalTime(3, folds=2), "argument-conflict", ["folds=2", "period"]),
        (lambda: GlobalTime(3, target="best"), "argument-value", ["'best'"]),
        (lambda: Ratio(1.5), "argument-value", ["test_size", "1.5"]),
        (lambda: LastN(0), "argument-value", ["n ", "0"]),
        (lambda: LastN(short_users="keep"), "argument-value", ["'keep'"]),
        (lambda: KFoldUsers(1), "argument-value", ["1"]),
        (lambda: LastN(session="both"), "argument-value", ["'both'"]),
        (lambda: LastN().split(pd.DataFrame()), "argument-type", ["FeatureTable"]),
    ],
)
def test_bad_options_are_named(make, code, words):
    with refused(code, *words):
        make()


def test_missing_columns_and_rows_are_named(clicks):
    with refused("column-missing", "movie"):
        LastN(item_col="movie").split(clicks[1])
    with refused("data-empty"):
        GlobalTime(test_size=0.1).split(clicks[1].limit(0))
