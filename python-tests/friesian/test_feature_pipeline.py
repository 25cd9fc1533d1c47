"""Pipelines: the three executors give the same values, whatever the table."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from table_reference import assert_same

from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.ops import kinds
from bigdl.orca.cluster.versions import frame_of_arrow, to_arrow

# Every example runs jobs of Spark: few of them, and none to shrink what failed.
FEW = settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

SCHEMA = pa.schema(
    [
        ("user", pa.int64()),
        ("small", pa.int8()),
        ("age", pa.int32()),
        ("price", pa.float64()),
        ("weight", pa.float32()),
        ("city", pa.string()),
        ("tags", pa.string()),
        ("flag", pa.bool_()),
        ("day", pa.date32()),
        ("label", pa.int32()),
        ("history", pa.list_(pa.int32())),
        ("nested", pa.list_(pa.list_(pa.int32()))),
    ]
)

_texts = st.sampled_from(["", "a", "ab", "b", "None", "Zürich", "x" * 40, " 12", "-3.7e1", "1e40"])
_skewed = st.one_of(st.just(7), st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1))
_doubles = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e300]),
    st.floats(-1e6, 1e6, allow_subnormal=False),
)
_lists = st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=6)


def maybe(values):
    return st.one_of(st.none(), values)


def rows_of():
    return st.fixed_dictionaries(
        {
            "user": maybe(_skewed),
            "small": maybe(st.integers(-128, 127)),
            "age": maybe(st.integers(-(2**31), 2**31 - 1)),
            "price": maybe(_doubles),
            "weight": maybe(st.floats(width=32, allow_subnormal=False)),
            "city": maybe(_texts),
            "tags": maybe(st.lists(_texts, max_size=4).map("|".join)),
            "flag": maybe(st.booleans()),
            "day": maybe(st.dates(min_value=np.datetime64("1900-01-01").item())),
            "label": maybe(st.integers(0, 1)),
            "history": maybe(_lists),
            "nested": maybe(st.lists(maybe(_lists), max_size=4)),
        }
    )


class Executors:
    """Runs a pipeline in all ways and compares."""

    def __init__(self, spark, folder):
        self.spark, self.folder = spark, folder

    def frame(self, table):
        return frame_of_arrow(self.spark, table).coalesce(2)

    def write(self, table, name="src"):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        half = len(table) // 2
        pq.write_table(table.slice(0, half), folder / "a.parquet", row_group_size=max(half // 2, 1))
        pq.write_table(table.slice(half), folder / "b.parquet", use_dictionary=False)
        return str(folder)

    def by_files(self, pipeline, table, host="here"):
        target = str(self.folder / "dst")
        assert pipeline.transform_files(self.write(table), target, host=host) == len(table)
        return pq.read_table(target)

    def assert_equal(self, pipeline, fitted_on, table, tolerance=0.0):
        """All executors make the same table of `table`; returns it."""
        pipeline.fit(self.frame(fitted_on))
        wanted = to_arrow(pipeline.transform(self.frame(table)).df)
        by_files = self.by_files(pipeline, table)
        rows = [pipeline.transform_row(row) for row in table.to_pylist()]
        assert by_files.column_names == wanted.column_names
        for name in wanted.column_names:
            expected = wanted[name].to_pylist()
            assert_same(by_files[name].to_pylist(), expected, tolerance)
            assert_same([row[name] for row in rows], expected, tolerance)
            types = (each.schema.field(name).type for each in (by_files, wanted))
            assert len(set(map(kinds.of_arrow, types))) == 1, name
        assert all(list(row) == wanted.column_names for row in rows)
        return wanted


@pytest.fixture(scope="module")
def executors(orca_spark, tmp_path_factory):
    return Executors(orca_spark, tmp_path_factory.mktemp("pipelines"))


def table_of(rows):
    return pa.Table.from_pylist(rows, SCHEMA)


CELLS = (
    FeaturePipeline()
    .fillna(2.7, ["small", "weight", "price"])
    .fillna("", "city")
    .fillna(True, "flag")
    .clip(["age", "user"], min=-5.5, max=1000)
    .clip("weight", max=2.3)
    .cast("age", "double")
    .cast("city", "int")
    .cast(["flag", "day"], "string")
    .cast("user", "float")
    .cast("price", "long")
    .rename({"label": "clicked", "tags": "words"})
    .cast("clicked", "bool")
    .drop("nested", "missing")
)

CATEGORIES = (
    FeaturePipeline()
    .cross_columns([["city", "user"], ["flag", "day", "tags"]], [1000, 2**31 - 1], sep="_")
    .cross_columns([["city", "tags"]], [50], ["fast"], method="xxhash64")
    .hash_encode(["tags"], 2**20, method="sha256")
    .hash_encode(["price", "weight"], 10_000)
    .category_encode(["city", "user"], order_by_freq=True, oov_buckets=3)
    .category_encode("day", freq_limit=2)
    .category_encode("flag")
    .fillna(0, ["city", "flag", "day"])
    .hash_encode("small", 7, method="xxhash64")
    .one_hot_encode("flag", keep_original_columns=True)
)

NUMBERS = (
    FeaturePipeline()
    .clip(["price", "weight"], min=-1e6, max=1e6)
    .min_max_scale(["price", "weight", "age"], min=-1, max=2, clip=True)
    .cut_bins("small", [-3, 0, 8], labels=["low", "some", "more", "most"])
    .cut_bins(["user", "price"], {"user": [-0.5, 7, 20], "price": 4}, out_cols=["user", "bin"])
    .pad("history", seq_len=3, mask_cols=["history", "nested"])
    .pad("nested", seq_len=2, row_len=2, mask_token=1)
    .one_hot_encode("label", sizes=2)
)

TOKENS = (
    FeaturePipeline()
    .category_encode("tags", do_split=True, sep="|", freq_limit=2, order_by_freq=True)
    .category_encode("city", do_split=True, sep=".", keep_most_frequent=True)
    .select("tags", "city", "label")
    .pad("tags", seq_len=2)
)

WHOLES = (
    FeaturePipeline()
    .select("city", "flag", "user", "label", "age")
    .target_encode(["city", ["flag", "user"]], ["label", "age"], smooth=2, kfold=1)
    .count_encode(["user", ["city", "flag"]])
    .count_encode("flag", normalize=True)
    # results in the place of the columns that others are made of
    .count_encode(["user", ["flag", "user"]], out_cols=["flag", "user"])
    .target_encode([["city", "flag"]], "age", out_cols="city", kfold=1, drop_cat=True)
    .rename({"age": "label", "label": "age"})
)


@pytest.mark.slow_cases("cells", "numbers", "tokens", "wholes")
@pytest.mark.parametrize(
    "pipeline",
    [CELLS, CATEGORIES, NUMBERS, TOKENS, WHOLES],
    ids=["cells", "categories", "numbers", "tokens", "wholes"],
)
@given(data=st.data())
@FEW
def test_executors_give_the_same_values(executors, pipeline, data):
    rows = data.draw(st.lists(rows_of(), min_size=12, max_size=30))
    # what extremes, bins and medians are made of
    known = {"age": 5, "price": 1.5, "weight": 0.5, "flag": True, "city": "a", "label": 1}
    rows[0] = rows[0] | known
    others = data.draw(st.lists(rows_of(), min_size=2, max_size=10))
    executors.assert_equal(pipeline, table_of(rows), table_of(rows + others))


@pytest.mark.slow
def test_a_table_of_one_row_has_arrays_of_one_number(executors):
    table = table_of([{"price": 1.5, "age": 5, "weight": 0.5}])
    pipeline = FeaturePipeline().log("price").log("age", clipping=False).min_max_scale("weight")
    executors.assert_equal(pipeline.select("price", "age", "weight"), table, table, 1e-14)


@given(data=st.data())
@FEW
def test_logarithms_agree_to_the_last_bits(executors, data):
    table = table_of(data.draw(st.lists(rows_of(), min_size=3, max_size=20)))
    pipeline = FeaturePipeline().log(["price", "age"]).log(["weight", "user"], clipping=False)
    executors.assert_equal(pipeline.select("price", "age", "weight", "user"), table, table, 1e-14)
