"""Tests that tables and all executors of pipelines give the same values."""

import math
import re
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bigdl.friesian.feature import FeaturePipeline, FeatureTable
from bigdl.orca.cluster.versions import frame_of_arrow, to_arrow
from bigdl.testing.operators import assert_executors_agree, assert_same_values

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


class TableVerbs:
    """FeatureTable with the method signatures of a pipeline."""

    def __init__(self, table):
        self.table = table

    def __getattr__(self, name):
        def verb(*args, **options):
            made = getattr(self.table, name)(*args, **options)
            return TableVerbs(made[0] if isinstance(made, tuple) else made)

        return verb

    def category_encode(self, columns, oov_buckets=0, sep=",", **options):
        if not oov_buckets:
            return TableVerbs(self.table.category_encode(columns, sep=re.escape(sep), **options)[0])
        indices = self.table.gen_string_idx(columns, **options)
        return TableVerbs(self.table.encode_string(columns, indices, oov_buckets=oov_buckets))

    def min_max_scale(self, columns, clip, **options):
        return TableVerbs(self.table.min_max_scale(columns, **options)[0])


@pytest.fixture(scope="module")
def agree(orca_spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines")
    return partial(assert_executors_agree, spark=orca_spark, folder=folder)


def table_of(rows):
    return pa.Table.from_pylist(rows, SCHEMA)


def cells(on):
    return (
        on.fillna(2.7, ["small", "weight", "price"])
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


def categories(on):
    return (
        on.cross_columns([["city", "user"], ["flag", "day", "tags"]], [1000, 2**31 - 1], sep="_")
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


def numbers(on):
    return (
        on.clip(["price", "weight"], min=-1e6, max=1e6)
        .min_max_scale(["price", "weight", "age"], min=-1, max=2, clip=True)
        .cut_bins("small", [-3, 0, 8], labels=["low", "some", "more", "most"])
        .cut_bins(["user", "price"], {"user": [-0.5, 7, 20], "price": 4}, out_cols=["user", "bin"])
        .pad("history", seq_len=3, mask_cols=["history", "nested"])
        .pad("nested", seq_len=2, row_len=2, mask_token=1)
        .one_hot_encode("label", sizes=2)
    )


def tokens(on):
    return (
        on.category_encode("tags", do_split=True, sep="|", freq_limit=2, order_by_freq=True)
        .category_encode("city", do_split=True, sep=".", keep_most_frequent=True)
        .select("tags", "city", "label")
        .pad("tags", seq_len=2)
    )


def wholes(on):
    return (
        on.select("city", "flag", "user", "label", "age")
        .target_encode(["city", ["flag", "user"]], ["label", "age"], smooth=2, kfold=1)
        .count_encode(["user", ["city", "flag"]])
        .count_encode("flag", normalize=True)
        # outputs that replace inputs of other outputs
        .count_encode(["user", ["flag", "user"]], out_cols=["flag", "user"])
        .target_encode([["city", "flag"]], "age", out_cols="city", kfold=1, drop_cat=True)
        .rename({"age": "label", "label": "age"})
    )


@pytest.mark.slow
@pytest.mark.parametrize("verbs", [cells, categories, numbers, tokens, wholes])
@given(data=st.data())
@FEW
def test_tables_and_all_executors_of_pipelines_give_the_same_values(agree, verbs, data):
    rows = data.draw(st.lists(rows_of(), min_size=12, max_size=30))
    # what extremes, bins and medians are made of
    known = {"age": 5, "price": 1.5, "weight": 0.5, "flag": True, "city": "a", "label": 1}
    rows[0] = rows[0] | known
    others = data.draw(st.lists(rows_of(), min_size=2, max_size=10))
    by_pipeline = agree(verbs(FeaturePipeline()), rows=table_of(rows), others=table_of(others))
    frame = frame_of_arrow(agree.keywords["spark"], table_of(rows)).coalesce(2)
    at_once = to_arrow(verbs(TableVerbs(FeatureTable(frame))).table.df)
    of_rows = by_pipeline.slice(0, len(rows))
    assert_same_values(at_once.to_pydict(), of_rows.to_pydict())
    assert at_once.schema.types == of_rows.schema.types


@pytest.mark.slow
def test_a_table_of_one_row_has_arrays_of_one_number(agree):
    table = table_of([{"price": 1.5, "age": 5, "weight": 0.5}])
    pipeline = FeaturePipeline().log("price").log("age", clipping=False).min_max_scale("weight")
    agree(pipeline.select("price", "age", "weight"), rows=table, tolerance=1e-14)


@given(data=st.data())
@FEW
def test_logarithms_agree_to_the_last_bits(agree, data):
    table = table_of(data.draw(st.lists(rows_of(), min_size=3, max_size=20)))
    pipeline = FeaturePipeline().log(["price", "age"]).log(["weight", "user"], clipping=False)
    agree(pipeline.select("price", "age", "weight", "user"), rows=table, tolerance=1e-14)
