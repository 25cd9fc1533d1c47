"""Test Spark functions that Orca needs, and their replacements for older Spark versions."""

import logging
import math

import pyarrow as pa
import pytest

from bigdl.common.errors import UsageError
from bigdl.orca.cluster import versions


@pytest.mark.parametrize("version", ["3.5.7", "4.0.5", "4.1.4", "4.3.0", "4.4.0.dev1", "10.0"])
def test_a_spark_that_is_new_enough_is_taken(version):
    versions.check_version(version)


@pytest.mark.parametrize("version", ["2.4.6", "3.4.4", "3.0"])
def test_a_spark_that_is_too_old_is_told_in_a_sentence(version):
    with pytest.raises(UsageError, match=rf"needs Spark 3.5 or newer, but .* is {version}; use"):
        versions.check_version(version)


def test_rows_go_to_the_partition_of_their_number_on_every_spark(orca_spark, monkeypatch):
    from pyspark.sql import functions as F

    frame = orca_spark.range(200).withColumn("target", (F.col("id") % 20).cast("int"))
    moved = [versions.by_partition(frame, 7, "target")]
    frame_type = type(frame)
    for each in (each for each in frame_type.__mro__ if "repartitionById" in vars(each)):
        monkeypatch.delattr(each, "repartitionById")
    for each in (*moved, versions.by_partition(frame, 7, "target")):
        rows = each.select("target", F.spark_partition_id().alias("place")).collect()
        assert len(rows) == 200
        assert all(row.target % 7 == row.place for row in rows)


def test_a_table_of_arrow_becomes_a_frame_and_comes_back(orca_spark):
    table = pa.table({"id": pa.array([1, None, 2**60]), "texts": [["a"], None, ["b", "c"]]})
    frame = versions.frame_of_arrow(orca_spark, table)
    assert versions.to_arrow(frame.sort("id")).to_pylist() == [
        {"id": None, "texts": None},
        {"id": 1, "texts": ["a"]},
        {"id": 2**60, "texts": ["b", "c"]},
    ]
    empty = versions.to_arrow(frame.where("id < 0"))
    assert empty.schema.names == ["id", "texts"]
    assert empty.num_rows == 0


def test_chunks_without_rows_end_no_table_of_arrow(orca_spark):
    table = pa.table({"id": [1, 2]})
    chunks = pa.concat_tables([table, table.slice(0, 0), table, table.slice(1)])
    assert versions.frame_of_arrow(orca_spark, chunks).count() == 5


def test_sets_of_columns_are_grouped_alike_on_every_spark(orca_spark, monkeypatch):
    from pyspark.sql import functions as F

    frame = orca_spark.range(12).selectExpr("id % 2 as a", "if(id < 4, null, id % 3) as b", "id")
    sets = [["a"], ["a", "b"], ["b"]]
    aggregates = [F.count("id").alias("n"), F.sum("id").alias("s")]
    grouped = versions.by_sets(frame, ["a", "b"], sets, aggregates)
    assert grouped.columns == ["a", "b", "source", "n", "s"]
    rows = sorted(map(str, grouped.collect()))
    assert len(rows) == 2 + 8 + 4
    frame_type = type(frame)
    for each in (each for each in frame_type.__mro__ if "groupingSets" in vars(each)):
        monkeypatch.delattr(each, "groupingSets")
    again = versions.by_sets(frame, ["a", "b"], sets, aggregates)
    assert sorted(map(str, again.collect())) == rows


def test_arrays_are_shuffled_by_a_seed_on_every_spark(orca_spark, monkeypatch):
    from pyspark.sql import functions as F

    original = F.shuffle
    frame = orca_spark.range(50).select(F.sequence(F.lit(0), F.lit(9)).alias("a"))
    for function in (original, lambda col: original(col)):
        monkeypatch.setattr(F, "shuffle", function)
        first, again, other = (
            [row.a for row in frame.select(versions.shuffle(F.col("a"), s).alias("a")).collect()]
            for s in (3, 3, 4)
        )
        assert first == again != other
        assert all(sorted(each) == list(range(10)) for each in first)
        assert len(set(map(tuple, first))) > 45


def test_a_value_that_cannot_be_cast_is_null(orca_spark):
    from pyspark.sql import functions as F

    frame = orca_spark.createDataFrame([("7",), ("x",), ("99999999999",)], ["text"])
    rows = frame.select(versions.try_cast(F.col("text"), "int").alias("n")).collect()
    assert [row.n for row in rows] == [7, None, None]


def test_a_function_of_arrow_has_the_types_of_its_columns(orca_spark):
    from pyspark.sql import functions as F

    def lengths(values, numbers):
        import pyarrow.compute as pc

        assert str(numbers.type) == "int64", numbers.type
        return pc.add(pc.list_value_length(values).cast("int64"), numbers)

    frame = orca_spark.createDataFrame(
        [([1, None], 1), ([], None), ([5], 2**40)], "a array<bigint>, n bigint"
    )
    column = versions.arrow_udf(lengths, "bigint")(F.col("a"), F.col("n"))
    assert [row[0] for row in frame.select(column).collect()] == [3, None, 2**40 + 1]


def test_errors_of_queries_are_told_by_exceptions_alone(orca_spark):
    pytest.importorskip("pyspark.logger", reason="Spark 3.5 prints none")
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    number = F.lit("17,99").cast("double")
    if orca_spark.conf.get("spark.sql.ansi.enabled") == "true":  # null otherwise
        with pytest.raises(PySparkException, match="CAST_INVALID_INPUT"):
            orca_spark.range(1).select(number).collect()
    assert not logging.getLogger("DataFrameQueryContextLogger").isEnabledFor(logging.ERROR)


@pytest.mark.slow
def test_a_function_of_arrow_tells_nan_from_null(orca_spark):
    from pyspark.sql import functions as F

    def kinds(values, others):
        import pyarrow.compute as pc

        assert str(values.type) == "double", values.type
        assert str(others.type) == "float", others.type
        is_nan = pc.is_nan(values).cast("int32")
        return pc.add(pc.fill_null(is_nan, 2), pc.multiply(pc.is_null(others).cast("int32"), 10))

    rows = [(1.5, 1.5), (math.nan, None), (None, math.nan)]
    frame = orca_spark.createDataFrame(rows, "d double, f float")
    function = versions.arrow_udf(kinds, "int")
    assert [row[0] for row in frame.select(function(F.col("d"), F.col("f"))).collect()] == [
        0,
        11,
        2,
    ]
    for name in ("d", "f"):
        data_type = dict(frame.dtypes)[name]
        same = versions.arrow_udf(lambda values: values, data_type)
        actual = [row[0] for row in frame.select(same(F.col(name))).collect()]
        assert list(map(str, actual)) == [str(getattr(row, name)) for row in frame.collect()]
