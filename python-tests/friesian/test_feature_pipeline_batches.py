"""Tests of pipelines with many string columns, which run in Arrow batches on Spark."""

import datetime
import decimal

import pytest

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.ops import vocabulary
from bigdl.orca.cluster.versions import to_arrow

TEXTS = [f"t{i}" for i in range(8)]


@pytest.fixture(scope="module")
def rows():
    """Build rows with low- and high-cardinality strings, and unused columns."""
    return [
        {
            "at": datetime.datetime(2024, 5, 1, 12, 0, n),
            "price": decimal.Decimal(n).scaleb(-2),
            "words": None if n % 7 == 0 else [f"w{n}", None],
            **{
                name: None if (n + i) % 5 == 0 else f"{name}-{n % (2 + 3 * i)}"
                for i, name in enumerate(TEXTS)
            },
            "number": None if n % 4 == 0 else n,
        }
        for n in range(40)
    ]


@pytest.fixture(scope="module")
def table(orca_spark, rows):
    schema = ", ".join(
        ["at timestamp", "price decimal(10,2)", "words array<string>"]
        + [f"{name} string" for name in TEXTS]
        + ["number int"]
    )
    return FeatureTable(orca_spark.createDataFrame(rows, schema).repartition(3).cache())


def pipeline(**options):
    return (
        FeaturePipeline()
        .fillna(0, "number")
        .cross_columns([["t0", "t1"]], [50])
        .category_encode(TEXTS, freq_limit=2, order_by_freq=True, **options)
        .fillna(0, TEXTS)
        .min_max_scale("number")
    )


def sorted_rows(table):
    return sorted(to_arrow(table.df).to_pylist(), key=lambda row: row["price"])


def goes_through_arrow(table):
    return "MapInArrow" in table.df._jdf.queryExecution().toString()


@pytest.mark.slow
def test_all_steps_go_one_way_with_the_results_of_joins(table):
    joined = pipeline(broadcast=False).fit(table).transform(table)
    found = pipeline().fit(table).transform(table)
    assert goes_through_arrow(found)
    assert not goes_through_arrow(joined)
    assert found.df.schema.simpleString() == joined.df.schema.simpleString()
    assert sorted_rows(found) == sorted_rows(joined)


def test_columns_that_the_steps_do_not_know_are_left_out_and_unread_ones_may_be_missing(table):
    fitted = pipeline().fit(table)
    other = table.drop("words", "at")
    other = FeatureTable(other.df.selectExpr("*", "1 as new"))
    found = fitted.transform(other)
    assert goes_through_arrow(found)
    wanted = [
        {name: value for name, value in row.items() if name not in ("words", "at")}
        for row in sorted_rows(fitted.transform(table))
    ]
    assert sorted_rows(found) == wanted


@pytest.mark.slow
def test_large_vocabularies_are_joined(table, monkeypatch):
    wanted = sorted_rows(pipeline().fit(table).transform(table))
    monkeypatch.setattr(vocabulary, "DRIVER_KEYS", 8)
    found = pipeline().fit(table).transform(table)
    assert found.df._jdf.queryExecution().toString().count("Join") > 0
    assert sorted_rows(found) == wanted


@pytest.mark.slow
def test_a_table_with_vectors_is_joined(table):
    from pyspark.ml.feature import VectorAssembler

    encode = FeaturePipeline().category_encode(TEXTS)
    wanted = sorted_rows(encode.fit(table).transform(table))
    assembler = VectorAssembler(inputCols=["price"], outputCol="vector")
    with_vector = FeatureTable(assembler.transform(table.df))
    found = encode.fit(with_vector).transform(with_vector)
    assert not goes_through_arrow(found)
    vectors = [float(row.vector[0]) for row in found.df.orderBy("price").collect()]
    assert vectors == [float(row["price"]) for row in wanted]
    assert sorted_rows(found.drop("vector")) == wanted


@pytest.mark.slow
def test_rows_that_taught_target_codes_get_those_of_their_fold(table):
    steps = FeaturePipeline().category_encode(TEXTS).target_encode("t0", "number", kfold=2)
    trained = steps.fit_transform(table)
    assert "MapInArrow" in trained.df._jdf.queryExecution().toString()
    codes = {row["t0_te_number"] for row in sorted_rows(steps.transform(table))}
    assert len({row["t0_te_number"] for row in sorted_rows(trained)}) > len(codes)
