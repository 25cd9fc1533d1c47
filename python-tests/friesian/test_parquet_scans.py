"""Tests of DataFrames over Parquet files that are read by pyarrow instead of Spark."""

import datetime
import math
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bigdl.friesian.executors import scans
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.ops.batches import decoded
from bigdl.orca.cluster import scan
from bigdl.orca.cluster.versions import spark_release, to_arrow
from bigdl.orca.data.lake_tables import scans as table_scans

SCHEMA = pa.schema(
    [
        ("tiny", pa.int8()),
        ("small", pa.int16()),
        ("number", pa.int32()),
        ("big", pa.int64()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("flag", pa.bool_()),
        ("text", pa.string()),
        ("other text", pa.string()),
        ("day", pa.date32()),
    ]
)
TEXTS = [f"t{i}" for i in range(8)]


def same(batch):
    yield pa.record_batch({name: decoded(batch[name]) for name in batch.names})


def from_files(df):
    return scans.from_files(df, same, df.schema)


def table_of(count, start=0):
    numbers = range(start, start + count)
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(n) for n in numbers]
    return pa.table(
        {
            "tiny": [n % 100 for n in numbers],
            "small": [n * 7 for n in numbers],
            "number": [None if n % 3 == 0 else n for n in numbers],
            "big": [n << 40 for n in numbers],
            "float": [math.nan if n % 4 == 0 else n / 2 for n in numbers],
            "double": [-0.0 if n % 2 else n / 3 for n in numbers],
            "flag": [None if n % 5 == 0 else n % 2 == 0 for n in numbers],
            "text": [None if n % 4 == 1 else f"text {n % 6}" for n in numbers],
            "other text": ["" if n % 2 else f"é{n}" for n in numbers],
            "day": [None if n % 6 == 0 else day for n, day in zip(numbers, days, strict=True)],
        },
        SCHEMA,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write three files, one of them empty and one with several row groups."""
    path = tmp_path_factory.mktemp("a folder of 100%")
    pq.write_table(table_of(30), path / "part-0.parquet", row_group_size=7)
    pq.write_table(table_of(0), path / "part-1.parquet")
    pq.write_table(table_of(11, 30), path / "part-2.parquet")
    return str(path)


@pytest.fixture
def df(orca_spark, folder):
    return orca_spark.read.parquet(folder)


def assert_equal(found, wanted):
    """Check that rows, order and types are equal; NaN equals NaN."""
    assert found.schema.simpleString() == wanted.schema.simpleString()
    found, wanted = to_arrow(found), to_arrow(wanted)
    assert found.num_rows == wanted.num_rows
    for name in wanted.column_names:
        pair = found[name].to_pylist(), wanted[name].to_pylist()
        assert repr(pair[0]) == repr(pair[1]), name


def test_rows_and_partitions_are_those_of_spark(df):
    found = from_files(df)
    assert_equal(found, df)
    assert found.rdd.getNumPartitions() == df.rdd.getNumPartitions()


def test_texts_come_by_their_different_values(df):
    def kinds(batch):
        kind = type(batch["text"]).__name__
        yield pa.record_batch({"kind": [kind], "values": [len(batch["text"].values)]})

    rows = scans.from_files(df, kinds, "kind string, values long").collect()
    assert {row["kind"] for row in rows} == {"DictionaryColumn"}
    assert sum(row["values"] for row in rows) < 41  # existing rows


def test_selected_renamed_and_doubled_columns(df):
    chosen = df.select("day", "text").withColumnRenamed("text", "day off")
    chosen = chosen.selectExpr("`day off`", "day as first", "day as second")
    assert_equal(from_files(chosen), chosen)


def test_a_view_of_the_table_and_names_of_another_case(df, orca_spark):
    df.createOrReplaceTempView("scanned")
    chosen = orca_spark.sql("select TEXT, s.Big as b from scanned s")
    assert_equal(from_files(chosen), chosen)


_texts = st.one_of(st.none(), st.sampled_from(["", "a", "b", "ü" * 9]), st.text("xyz", max_size=3))
_files = st.lists(st.lists(st.tuples(_texts, st.one_of(st.none(), st.integers(-9, 9)))), max_size=4)


@pytest.mark.slow
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(files=_files, group=st.integers(1, 4))
def test_any_rows_in_any_files(orca_spark, tmp_path_factory, files, group):
    path = tmp_path_factory.mktemp("files")
    for i, rows in enumerate([*files, [("last", 1)]]):
        columns = {"text": [row[0] for row in rows], "number": [row[1] for row in rows]}
        schema = pa.schema([("text", pa.string()), ("number", pa.int64())])
        pq.write_table(pa.table(columns, schema), path / f"{i}.parquet", row_group_size=group)
    df = orca_spark.read.parquet(str(path))
    assert_equal(from_files(df), df)


def test_a_large_file_is_read_in_the_parts_that_spark_has(orca_spark, tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table({"value": rng.random(60_000)})
    pq.write_table(table, tmp_path / "one.parquet", row_group_size=5_000)
    size = "spark.sql.files.maxPartitionBytes"
    before = orca_spark.conf.get(size)
    orca_spark.conf.set(size, "100000")
    try:
        df = orca_spark.read.parquet(str(tmp_path))
        found = from_files(df)
        assert found.rdd.getNumPartitions() > 2
        assert_equal(found, df)
    finally:
        orca_spark.conf.set(size, before)


def test_workers_look_into_many_files(df, monkeypatch):
    monkeypatch.setattr(table_scans, "FEW_FILES", 0)
    monkeypatch.setattr(table_scans, "FILES_OF_TASK", 2)
    assert_equal(from_files(df), df)


# -- what is left to Spark -------------------------------------------------------------------------


def left_to_spark(df):
    return from_files(df) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda df: df.filter("number > 3"),
        lambda df: df.where("text is not null").select("text"),
        lambda df: df.limit(5),
        lambda df: df.union(df),
        lambda df: df.withColumn("more", df.number + 1),
        lambda df: df.withColumn("one", df.number.cast("string")),
        lambda df: df.selectExpr("text", "1 as one"),
        lambda df: df.selectExpr("text", "array(text) as texts"),
        lambda df: df.select("text", "_metadata.file_name"),
        lambda df: df.orderBy("big"),
        lambda df: df.coalesce(1),
        lambda df: df.select(),
    ],
    ids=[
        "filter",
        "filter on a text",
        "limit",
        "union",
        "new column",
        "cast",
        "literal",
        "array",
        "metadata",
        "order",
        "coalesce",
        "no column",
    ],
)
def test_plans_that_do_more_than_read(df, change):
    assert left_to_spark(change(df))


def test_cached_tables(df):
    cached = df.select("text").cache()
    assert left_to_spark(cached)
    cached.unpersist()


def test_columns_in_names_of_folders(orca_spark, tmp_path):
    os.mkdir(tmp_path / "part=1")
    pq.write_table(table_of(4), tmp_path / "part=1" / "0.parquet")
    assert left_to_spark(orca_spark.read.parquet(str(tmp_path)))
    assert left_to_spark(orca_spark.read.parquet(str(tmp_path)).select("text"))


def test_other_formats(df, orca_spark, tmp_path):
    df.select("text", "number").write.csv(str(tmp_path / "csv"))
    assert left_to_spark(orca_spark.read.csv(str(tmp_path / "csv")))


@pytest.mark.parametrize(
    "kind",
    [pa.timestamp("us", "UTC"), pa.decimal128(9, 2), pa.list_(pa.int32()), pa.binary()],
    ids=["timestamp", "decimal", "array", "binary"],
)
def test_types_that_come_in_several_ways(orca_spark, tmp_path, kind):
    table = pa.table({"value": pa.nulls(3, kind), "number": [1, 2, 3]})
    pq.write_table(table, tmp_path / "0.parquet")
    df = orca_spark.read.parquet(str(tmp_path))
    assert left_to_spark(df)
    assert not left_to_spark(df.select("number"))


widens = pytest.mark.skipif(
    spark_release() < (4, 0), reason="Spark 3.5 does not read the int of a file as bigint"
)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(pa.table({"number": pa.array([4], pa.int32())}), marks=widens),
        pa.table({"Number": pa.array([4], pa.int64()), "text": ["d"]}),
        pytest.param(pa.table({"number": pa.array([4], pa.int32()), "text": ["d"]}), marks=widens),
        pa.table({"number": pa.array([4], pa.int64()), "text": [b"d"]}),
    ],
    ids=["a column is missing", "its name is of another case", "narrower numbers", "bytes"],
)
def test_files_that_differ(orca_spark, tmp_path, second):
    first = pa.table({"number": pa.array([1, None, 3], pa.int64()), "text": ["a", None, "c"]})
    pq.write_table(first, tmp_path / "0.parquet")
    pq.write_table(second, tmp_path / "1.parquet")
    df = orca_spark.read.schema("number long, text string").parquet(str(tmp_path))
    assert left_to_spark(df)
    assert scans.map_batches(df, same, df.schema).count() == 4


def test_a_schema_of_the_user_that_is_not_that_of_the_files(orca_spark, tmp_path):
    pq.write_table(pa.table({"number": pa.array([1, 2], pa.int32())}), tmp_path / "0.parquet")
    assert left_to_spark(orca_spark.read.schema("number long").parquet(str(tmp_path)))
    assert left_to_spark(orca_spark.read.schema("number int, more int").parquet(str(tmp_path)))
    assert not left_to_spark(orca_spark.read.schema("number int").parquet(str(tmp_path)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mergeSchema", "true"),
        ("modifiedBefore", "2100-01-01T00:00:00"),
        ("pathGlobFilter", "*.parquet"),
        ("ignoreMissingFiles", "true"),
    ],
)
def test_options_of_the_reader(orca_spark, folder, option, value):
    assert left_to_spark(orca_spark.read.option(option, value).parquet(folder))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.sql.files.ignoreCorruptFiles", "true"),
        ("spark.sql.files.ignoreMissingFiles", "TRUE"),
        ("spark.sql.parquet.fieldId.read.enabled", "true"),
    ],
)
def test_settings_of_spark(orca_spark, df, name, value):
    orca_spark.conf.set(name, value)
    try:
        assert left_to_spark(df.select("text"))
    finally:
        orca_spark.conf.unset(name)
    assert not left_to_spark(df.select("text"))


def test_files_that_may_be_encrypted(orca_spark, df):
    name = "parquet.crypto.factory.class"
    orca_spark.conf.set(name, "some.Factory")
    try:
        assert from_files(df) is None
    finally:
        orca_spark.conf.unset(name)


def test_dates_of_files_that_do_not_say_their_calendar(orca_spark, df, tmp_path):
    df.write.parquet(str(tmp_path / "by_spark"))
    by_spark = orca_spark.read.parquet(str(tmp_path / "by_spark"))
    old = {"org.apache.spark.version": "3.1.0", "org.apache.spark.legacyDateTime": ""}
    pq.write_table(table_of(3).replace_schema_metadata(old), tmp_path / "old.parquet")
    name = "spark.sql.parquet.datetimeRebaseModeInRead"
    before = orca_spark.conf.get(name)
    orca_spark.conf.set(name, "LEGACY")
    try:
        assert left_to_spark(df)
        assert not left_to_spark(by_spark)
    finally:
        orca_spark.conf.set(name, before)
    assert left_to_spark(orca_spark.read.parquet(str(tmp_path / "old.parquet")))


@pytest.mark.parametrize(
    ("days", "options", "is_left"),
    [
        ([datetime.date(1582, 10, 15), None], {}, False),
        ([datetime.date(1582, 10, 14)], {}, True),
        ([None, None], {}, False),
        ([datetime.date(2020, 1, 1)], {"write_statistics": False}, True),
    ],
    ids=["late", "early", "nulls", "no statistics"],
)
def test_dates_that_spark_would_refuse_if_they_were_early(
    orca_spark, tmp_path, days, options, is_left
):
    table = pa.table({"number": range(len(days)), "day": pa.array(days, pa.date32())})
    pq.write_table(table, tmp_path / "0.parquet", **options)
    name = "spark.sql.parquet.datetimeRebaseModeInRead"
    before = orca_spark.conf.get(name)
    orca_spark.conf.set(name, "EXCEPTION")
    try:
        df = orca_spark.read.parquet(str(tmp_path))
        assert left_to_spark(df) == is_left
        assert not left_to_spark(df.select("number"))
        if not is_left:
            assert_equal(from_files(df), df)
    finally:
        orca_spark.conf.set(name, before)


def test_row_groups_that_are_too_large_for_memory(df, monkeypatch):
    monkeypatch.setattr(scans, "MOST_BYTES", 300)
    assert left_to_spark(df)
    assert not left_to_spark(df.select("tiny"))


def test_more_parts_of_files_than_can_be_asked_for(df, monkeypatch):
    monkeypatch.setattr(scan, "MOST_PARTS", 1)
    assert left_to_spark(df)


def test_files_that_pyarrow_cannot_open(df, monkeypatch):
    monkeypatch.setattr(table_scans, "open_parquet", lambda *_: 1 / 0)
    assert left_to_spark(df)


def test_another_version_of_spark(df, monkeypatch):
    monkeypatch.setattr(scan, "splits_of_tasks", lambda rdd: rdd.noSuchMethod())
    assert left_to_spark(df)
    assert_equal(scans.map_batches(df, same, df.schema), df)


def test_plans_that_may_not_be_looked_at(df, monkeypatch):
    monkeypatch.setenv("BIGDL_NO_PLAN_INSPECTION", "1")
    assert left_to_spark(df)


def test_files_that_are_gone(orca_spark, tmp_path):
    pq.write_table(table_of(3), tmp_path / "0.parquet")
    pq.write_table(table_of(4), tmp_path / "1.parquet")
    df = orca_spark.read.parquet(str(tmp_path))
    found = from_files(df)
    os.remove(tmp_path / "1.parquet")
    with pytest.raises(Exception, match=r"1\.parquet is no longer there; read the table again"):
        found.collect()


# -- pipelines -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Write files with many string columns and some numbers."""
    path = tmp_path_factory.mktemp("texts")
    for part in range(3):
        numbers = range(part * 20, part * 20 + 20)
        columns = {
            name: [None if (n + i) % 5 == 0 else f"{name}-{n % (2 + 3 * i)}" for n in numbers]
            for i, name in enumerate(TEXTS)
        }
        columns |= {"number": [None if n % 4 == 0 else n for n in numbers], "row": numbers}
        columns["note"] = [f"no step reads {n % 3}" for n in numbers]
        pq.write_table(pa.table(columns), path / f"{part}.parquet", row_group_size=6)
    return str(path)


def pipeline():
    return (
        FeaturePipeline()
        .fillna(0, "number")
        .cross_columns([["t0", "t1"]], [50])
        .category_encode(TEXTS, freq_limit=2)
        .fillna(0, TEXTS)
        .min_max_scale("number")
    )


@pytest.mark.slow
def test_pipelines_learn_and_transform_the_same_in_both_ways(orca_spark, texts, monkeypatch):
    table = FeatureTable(orca_spark.read.parquet(texts))
    fitted = pipeline().fit(table)
    found = fitted.transform(table)
    monkeypatch.setenv("BIGDL_NO_PLAN_INSPECTION", "1")
    other = pipeline().fit(table)
    wanted = other.transform(table)
    assert "parquet" not in found.df._jdf.queryExecution().toString().lower()
    assert "parquet" in wanted.df._jdf.queryExecution().toString().lower()
    assert fitted.explain() == other.explain()
    assert_equal(found.df, wanted.df)
