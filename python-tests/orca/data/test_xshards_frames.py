"""Test XShards of pandas frames against pandas, with empty shards, nulls and hostile names."""

import datetime
import decimal

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca import OrcaContext
from bigdl.orca.data import SparkXShards
from bigdl.orca.data.utils import spark_df_to_pd_sparkxshards

KEY = "a b.c`d"


def frame(keys, names, values):
    return pd.DataFrame(
        {
            KEY: pd.Series(keys, dtype="float64"),
            "S": pd.Series(names, dtype="str"),
            "s": pd.Series(values, dtype="float64"),
        }
    )


FRAMES = [
    frame([3, 1, 2, 1], ["x", None, "z", "x"], [1.5, None, 2, 1.5]),
    frame([], [], []),
    frame([1, None], ["x", "q"], [1.5, 7]),
    frame([None], ["q"], [8]),
]
ALL = pd.concat(FRAMES, ignore_index=True)


@pytest.fixture(scope="module")
def shards(orca_spark):
    return SparkXShards(orca_spark.sparkContext.parallelize(FRAMES, 3))


def made(orca_spark, frames, partitions=2):
    return SparkXShards(orca_spark.sparkContext.parallelize(frames, partitions))


def rows(shards):
    return shards.concat_to_pdf().reset_index(drop=True)


def same(left, right):
    assert_frame_equal(left, right.reset_index(drop=True), check_dtype=False)


# Rows -------------------------------------------------------------------------------------------


def test_all_rows_come_back_in_order(shards):
    assert_frame_equal(rows(shards), ALL)
    assert len(shards) == len(ALL)
    assert shards.get_schema() == {"columns": list(ALL), "dtypes": ALL.dtypes.to_dict()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "ascending"), [(None, True), ("S", False), ([KEY, "s"], [False, True])]
)
def test_sort_values(shards, columns, ascending):
    by = list(ALL) if columns is None else columns
    expected = ALL.sort_values(by, ascending=ascending, kind="stable")
    same(rows(shards.sort_values(columns, ascending)), expected)


@pytest.mark.slow
def test_deduplicates(shards):
    same(rows(shards.deduplicates()), ALL.drop_duplicates())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inner", "left", "right", "outer"])
def test_merge(orca_spark, shards, how):
    other = pd.DataFrame({"S": ["q", "x", None, "new"], "s": [1, 2, 3, 4], "t": list("abcd")})
    merged = shards.merge(made(orca_spark, [other]), how, "S")
    same(rows(merged), ALL.merge(other, how, "S"))


@pytest.mark.slow
def test_merge_says_what_does_not_fit(orca_spark, shards):
    other = made(orca_spark, [pd.DataFrame({"S": [1]})])
    with refused("data-schema"):
        shards.merge(other)
    with pytest.raises(UsageError, match="how must be"):
        shards.merge(other, how="cross")
    with pytest.raises(UsageError, match="Both frames must have"):
        shards.merge(other, on="s")


@pytest.mark.slow
def test_group_by(shards):
    groups = ALL.groupby("S", dropna=False, sort=True)
    result = rows(shards.group_by("S", {KEY: ["sum", "mean"], "s": "count"}))
    assert list(result) == ["S", f"sum({KEY})", f"avg({KEY})", "count(s)"]
    expected = pd.concat(
        [groups[KEY].sum(min_count=1), groups[KEY].mean(), groups["s"].count()], axis=1
    ).reset_index()
    same(result, expected.set_axis(list(result), axis=1))


def test_group_by_joined_to_the_rows(shards):
    result = rows(shards.group_by("S", "max", join=True))
    same(result[list(ALL)], ALL)
    same(
        result[["max(s)"]],
        ALL.groupby("S", dropna=False)[["s"]].transform("max").set_axis(["max(s)"], axis=1),
    )


def test_group_by_says_what_is_wrong(shards):
    with refused("name-unknown"):
        shards.group_by("S", "collect")
    with refused("column-missing"):
        shards.group_by("nowhere")


@pytest.mark.slow
def test_partition_by_brings_equal_values_together(orca_spark):
    # only one of the dtypes can represent a null
    frames = [pd.DataFrame({"k": [1, 2, 3, 1]}), pd.DataFrame({"k": [1.0, None, 3.0]})]
    parts = made(orca_spark, frames).partition_by("k", 3).rdd.glom().collect()
    assert all(len(part) <= 1 for part in parts)
    keys = [set(part[0]["k"].fillna(-1)) for part in parts if part]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 4
    assert sum(len(part[0]) for part in parts if part) == 7


def test_partition_by_keeps_its_errors(orca_spark, shards):
    with pytest.raises(UsageError, match="Only support partition by a column name"):
        shards.partition_by(["S"])
    with pytest.raises(UsageError, match="The partition column is not in the DataFrame"):
        shards.partition_by("nowhere")
    other = SparkXShards(orca_spark.sparkContext.parallelize([[1]], 1))
    with pytest.raises(UsageError, match="Currently only support partition by for XShards of"):
        other.partition_by("a")


@pytest.mark.slow
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4), number=st.integers(1, 5))
def test_repartition(orca_spark, sizes, number):
    frames = [pd.DataFrame({"v": range(size), "t": ["x"] * size}) for size in sizes]
    frames = [each.astype({"v": "int32", "t": "str"}) for each in frames]
    result = made(orca_spark, frames).to_lazy().repartition(number).collect()
    assert len(result) == number
    assert_frame_equal(pd.concat(result), pd.concat(frames))


def test_head_takes_what_it_needs(shards):
    assert_frame_equal(shards.head(5).reset_index(drop=True), ALL.head(5))
    assert_frame_equal(shards.head(100).reset_index(drop=True), ALL)
    assert list(shards.head(0)) == list(ALL)


@pytest.mark.slow
def test_samples_are_those_of_pandas(shards):
    expected = [each.sample(frac=0.5, random_state=1) for each in FRAMES]
    sample = shards.sample(0.5, random_state=1).collect()
    for one, two in zip(sample, expected, strict=True):
        assert_frame_equal(one, two)
    assert_frame_equal(shards.sample_to_pdf(0.5, random_state=1), pd.concat(expected))


# Columns ----------------------------------------------------------------------------------------


def test_columns_are_counted_and_chosen(shards):
    nulls = shards.get_null_sum()
    assert dict(zip(nulls["col"], nulls["total"], strict=True)) == ALL.isna().sum().to_dict()
    assert_frame_equal(rows(shards.select("s")), ALL[["s"]])
    assert_frame_equal(rows(shards.select(["s", KEY])), ALL[["s", KEY]])
    assert (shards.max_values("S"), shards.max_values("s")) == ("z", 8.0)
    assert shards["S"].unique().tolist()[0::2] == ["x", "z"]
    assert len(shards["S"].unique()) == 4
    with refused("data-type", "unique"):
        shards.unique()


@pytest.mark.slow
def test_columns_with_nulls_are_dropped_from_every_shard(orca_spark):
    frames = [pd.DataFrame({"a": [1.0], "b": [2.0]}), pd.DataFrame({"a": [None], "b": [3.0]})]
    assert all(list(f) == ["b"] for f in made(orca_spark, frames).drop_missing_value().collect())


@pytest.mark.slow
def test_describe_is_the_summary_of_spark(shards):
    summary = shards.describe([KEY, "s"])
    assert list(summary["summary"]) == ["count", "mean", "stddev", "min", "max"]
    expected = ALL[[KEY, "s"]].agg(["count", "mean", "std", "min", "max"])
    np.testing.assert_allclose(summary[[KEY, "s"]].astype(float), expected)


@pytest.mark.slow
def test_features_and_labels_are_assembled(shards):
    parts = shards.assembleFeatureLabelCols([KEY, "s"], "s").collect()
    np.testing.assert_array_equal(np.concatenate([p["x"] for p in parts]), ALL[[KEY, "s"]])
    assert np.concatenate([p["y"] for p in parts]).shape == (len(ALL), 1)


# Spark ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_spark_frame_has_the_rows_and_partitions(shards):
    frame = shards.to_spark_df()
    assert frame.columns == list(ALL)
    assert frame.rdd.getNumPartitions() == 3
    assert_frame_equal(frame.toPandas(), ALL)
    assert [row["S"] for row in frame.collect()] == ["x", None, "z", "x", "x", "q", "q"]


@pytest.mark.slow
def test_types_go_to_spark_and_back(orca_spark):
    day = pd.Timestamp("2020-07-01 12:34:56.123456")
    rich = pd.DataFrame(
        {
            "category": pd.Categorical(["u", "v"]),
            "date": [datetime.date(2020, 1, 1), None],
            "time": [day, None],
            "zoned": pd.Series([day, day]).dt.tz_localize("Asia/Tokyo"),
            "decimal": [decimal.Decimal("1.50"), None],
            "array": [np.arange(3.0), None],
            "matrix": [np.ones((2, 2)), np.zeros((2, 2))],
            "byte": np.array([1, 255], np.uint8),
            "truth": [True, None],
            "bytes": [b"a", b"\x00"],
            "nothing": [None, None],
            "struct": [{"a": 1}, {"a": 2}],
        }
    )
    back = spark_df_to_pd_sparkxshards(made(orca_spark, [rich], 1).to_spark_df()).collect()[0]
    assert list(back) == list(rich)
    plain = ["category", "date", "time", "decimal", "byte", "truth", "bytes", "struct"]
    for name in plain:
        for one, two in zip(rich[name], back[name], strict=True):
            assert one == two or (pd.isna(one) and pd.isna(two)), name
    np.testing.assert_array_equal(back["array"][0], np.arange(3.0))
    assert back["array"][1] is None
    assert np.stack([np.stack(m) for m in back["matrix"]]).tolist() == [
        [[1, 1], [1, 1]],
        [[0, 0], [0, 0]],
    ]
    assert back["nothing"].isna().all()
    zone = orca_spark.conf.get("spark.sql.session.timeZone")
    assert back["zoned"][0] == rich["zoned"][0].tz_convert(zone).tz_localize(None)


@pytest.mark.slow
def test_types_of_shards_are_brought_together(orca_spark):
    frames = [pd.DataFrame({"a": [1], "b": [None]}), pd.DataFrame({"a": [0.5], "b": ["x"]})]
    actual = made(orca_spark, frames).to_spark_df().collect()
    assert [tuple(row) for row in actual] == [(1.0, None), (0.5, "x")]
    mixed = [pd.DataFrame({"a": [1]}), pd.DataFrame({"a": ["x"]})]
    with pytest.raises(UsageError, match="Column 'a' is int64 in one shard and"):
        made(orca_spark, mixed).to_spark_df()
    other = [pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]})]
    with pytest.raises(UsageError, match="do not have the same columns"):
        made(orca_spark, other).to_spark_df()


@pytest.mark.slow
def test_a_spark_frame_becomes_shards(orca_spark):
    frame = orca_spark.range(0, 25, 1, 2).withColumnRenamed("id", "x.y")
    assert [len(s) for s in spark_df_to_pd_sparkxshards(frame).collect()] == [12, 13]
    OrcaContext._shard_size = 5
    try:
        shards = spark_df_to_pd_sparkxshards(frame)
    finally:
        OrcaContext._shard_size = None
    assert [len(s) for s in shards.collect()] == [5, 5, 2, 5, 5, 3]
    assert rows(shards)["x.y"].tolist() == list(range(25))
    first = shards.first()
    first.loc[0, "x.y"] = 7  # a shard is writable


@pytest.mark.slow
def test_vectors_become_arrays_and_an_empty_frame_one_shard(orca_spark):
    from pyspark.ml.linalg import Vectors

    data = [(Vectors.dense([1.0, 2.0]),), (Vectors.sparse(2, [1], [3.0]),), (None,)]
    frame = orca_spark.createDataFrame(data, ["v"]).coalesce(1)
    (shard,) = spark_df_to_pd_sparkxshards(frame).collect()
    assert [None if v is None else v.tolist() for v in shard["v"]] == [[1, 2], [0, 3], None]
    (empty,) = spark_df_to_pd_sparkxshards(orca_spark.range(0)).collect()
    assert (len(empty), empty["id"].dtype) == (0, np.int64)
