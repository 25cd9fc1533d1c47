"""Conversion of Spark columns to arrays of the model."""

import decimal

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.versions import data_type, to_arrow
from bigdl.orca.data.feeds import as_feed
from bigdl.runtime.shards.columns import (
    ColumnSpec,
    column_spec,
    decode,
    decode_batch,
    float_dtype,
    project,
    unified_spec,
)
from bigdl.runtime.shards.shard import Shard, SpoolWriter

TYPES = """
    flag boolean, tiny tinyint, small smallint, plain int, long bigint, real float, wide double,
    money decimal(12, 2), words array<smallint>, grid array<array<double>>, flags array<boolean>,
    named map<string, float>, numbered map<int, array<double>>
"""
ROWS = [
    {
        "flag": i % 2 == 0,
        "tiny": i,
        "small": -i,
        "plain": 2**31 - 1 - i,
        "long": 2**62 + i,
        "real": i + 0.5,
        "wide": i / 3,
        "money": decimal.Decimal(i) + decimal.Decimal("0.25"),
        "words": [i, -i, 7],
        "grid": [[float(i), 1.5], [2.5, i / 3], [0.0, 0.0]],
        "flags": [True, i == 1],
        "named": {"left": float(i), "right": -float(i)},
        "numbered": {10: [i / 3, 0.0], 9: [1.0, float(i)]},
    }
    for i in range(5)
]
MATRIX = [[[r["grid"][j][k] for k in range(2)] for j in range(3)] for r in ROWS]


def spool(frame, names, directory, config=None):
    """Return the shard of a whole frame without an engine."""
    feed = as_feed(frame, names, config=config)
    writer = SpoolWriter(str(directory), 0, "test", feed.specs)
    (batch,) = to_arrow(project(frame, feed.specs)).combine_chunks().to_batches()
    writer.append(0, 0, batch.num_rows, *decode_batch(feed.specs, batch))
    return Shard(writer.finish())


@pytest.fixture(scope="module")
def typed(orca_spark):
    return orca_spark.createDataFrame(ROWS, TYPES)


@pytest.fixture(scope="module")
def frame_of(orca_spark):
    """Return a function that creates a frame with one column ``x`` of a type."""

    def make(values, type_name):
        return orca_spark.createDataFrame([(v,) for v in values], f"x {type_name}")

    return make


# Types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "floats"),
    [(None, "float32"), ({"dtype": "float64"}, "float64"), ({"dtype": torch.float64}, "float64")],
)
def test_every_convertible_type_gets_its_dtype_and_values(typed, tmp_path, config, floats):
    shard = spool(typed, list(ROWS[0]), tmp_path, config)
    expected = {
        "flag": np.array([r["flag"] for r in ROWS]),
        "tiny": np.array([r["tiny"] for r in ROWS], np.int32),
        "small": np.array([r["small"] for r in ROWS], np.int32),
        "plain": np.array([r["plain"] for r in ROWS], np.int32),
        "long": np.array([r["long"] for r in ROWS], np.int64),
        "real": np.array([r["real"] for r in ROWS], floats),
        "wide": np.array([r["wide"] for r in ROWS], floats),
        "money": np.array([float(r["money"]) for r in ROWS], floats),
        "words": np.array([r["words"] for r in ROWS], np.int32),
        "grid": np.array(MATRIX, floats),
        "flags": np.array([r["flags"] for r in ROWS]),
    }
    for name, values in expected.items():
        column = shard.column(name)
        assert (column.dtype, column.shape) == (values.dtype, values.shape), name
        np.testing.assert_array_equal(column, values, err_msg=name)


def test_a_map_column_is_a_dict_of_arrays_by_key(typed, tmp_path):
    shard = spool(typed, ["named", "numbered"], tmp_path)
    named, numbered = shard.column("named"), shard.column("numbered")
    assert list(named) == ["left", "right"]
    np.testing.assert_array_equal(named["right"], np.float32([0, -1, -2, -3, -4]))
    assert list(numbered) == ["9", "10"]
    expected = np.float32([r["numbered"][10] for r in ROWS])
    np.testing.assert_array_equal(numbered["10"], expected)


def test_dense_and_sparse_vectors_become_dense_rows(orca_spark, tmp_path):
    rows = [(Vectors.dense(1.0, 0.0, 1 / 3),), (Vectors.sparse(3, [1], [2.0]),)]
    frame = orca_spark.createDataFrame(rows, ["v"])
    for config, floats in ((None, np.float32), ({"dtype": "float64"}, np.float64)):
        column = spool(frame, "v", tmp_path, config).column("v")
        assert column.dtype == floats
        np.testing.assert_array_equal(column, np.array([[1, 0, 1 / 3], [0, 2, 0]], floats))


def test_scalar_columns_of_one_dtype_share_an_array(typed, tmp_path):
    shard = spool(typed, ["tiny", "wide", "plain", "real", "words"], tmp_path)
    assert [leaf.column for leaf in shard.spool.leaves] == [
        ("tiny", "plain"),
        ("wide", "real"),
        "words",
    ]


@pytest.mark.parametrize(
    "name", ["a.b", "a`b", "`", "two words", "größe", "列", "select", "c0", "x'y", 'x"y', "1"]
)
def test_any_column_name_works(orca_spark, tmp_path, name):
    frame = orca_spark.range(3).toDF(name).withColumn("other", F.lit(1.0))
    np.testing.assert_array_equal(spool(frame, name, tmp_path).column(name), [0, 1, 2])


@pytest.mark.parametrize(
    ("type_name", "advice"),
    [
        ("string", "StringIndexer"),
        ("timestamp", "unix_timestamp"),
        ("timestamp_ntz", "unix_timestamp"),
        ("date", "unix_timestamp"),
        ("binary", "encode it as numbers"),
        ("void", "encode it as numbers"),
        ("struct<a: int>", "encode it as numbers"),
        ("array<string>", "encode it as numbers"),
        ("map<string, string>", "encode it as numbers"),
        ("map<double, float>", "encode it as numbers"),
    ],
)
def test_a_type_that_cannot_become_a_tensor_is_refused_with_advice(orca_spark, type_name, advice):
    frame = orca_spark.sql(f"SELECT 1 AS y, CAST(null AS {type_name}) AS x")
    with pytest.raises(UsageError) as caught:
        as_feed(frame, ["y", "x"])
    text = str(caught.value)
    assert text.startswith("Column 'x' has type ")
    assert advice in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "dtype", ["float32", torch.float32, np.float32, np.dtype("float32"), None, "default"]
)
def test_float_dtype_is_float32_by_any_name_and_by_default(dtype):
    assert float_dtype({} if dtype == "default" else {"dtype": dtype}) == "float32"


@pytest.mark.parametrize("dtype", ["float64", torch.float64, torch.double, np.float64, float])
def test_float_dtype_is_float64_by_any_name(dtype):
    assert float_dtype({"dtype": dtype}) == "float64"


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16, int, str, object, 64, "doubel"])
def test_another_float_dtype_is_refused(dtype):
    with refused("argument-value", '"float32"', '"float64"'):
        float_dtype({"dtype": dtype})


# Rows that cannot be converted ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "type_name", "message"),
    [
        ([1, None, 2], "int", ("data-null",)),
        ([1.0, None], "double", ("data-null",)),
        ([True, None], "boolean", ("data-null",)),
        ([[1, 2], None], "array<int>", ("data-null",)),
        ([[1, 2], [3, None]], "array<int>", ("data-null",)),
        ([[[1.0], [2.0]], [[3.0], None]], "array<array<float>>", ("data-null",)),
        ([[[1.0], [2.0]], [[3.0], [None]]], "array<array<float>>", ("data-null",)),
        ([{"a": 1.0}, None], "map<string, float>", ("data-null",)),
        ([{"a": 1.0}, {"a": None}], "map<string, float>", ("data-null",)),
        ([[1, 2], [3, 4, 5]], "array<int>", ("data-shape", "2", "3")),
        ([[[1], [2]], [[3], [4, 5]]], "array<array<int>>", ("data-shape", "1", "2")),
        ([[], []], "array<int>", ("data-empty",)),
        ([[[]], [[]]], "array<array<int>>", ("data-empty",)),
        ([{"a": 1.0}, {"a": 1.0, "b": 2.0}], "map<string, float>", ("data-shape",)),
        ([{"a": 1.0}, {"b": 1.0}], "map<string, float>", ("data-structure",)),
        ([{}, {}], "map<string, float>", ("data-empty",)),
    ],
)
def test_rows_that_cannot_be_converted_are_named_in_one_sentence(
    frame_of, tmp_path, values, type_name, message
):
    with refused(*message) as caught:
        spool(frame_of(values, type_name), "x", tmp_path)
    assert "'x'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_null_among_several_scalar_columns_names_its_own(orca_spark, tmp_path):
    frame = orca_spark.createDataFrame([(1, 2, 3), (4, None, 6)], "a int, b int, c int")
    with refused("data-null", "'b'"):
        spool(frame, ["a", "b", "c"], tmp_path)


def test_a_null_in_a_vector_column_is_named(orca_spark, tmp_path):
    rows = [(Vectors.dense(1.0, 2.0),), (None,)]
    frame = orca_spark.createDataFrame(rows, StructType().add("v", VectorUDT()))
    with refused("data-null", "'v'"):
        spool(frame, "v", tmp_path)


def test_vectors_of_different_sizes_are_refused(orca_spark, tmp_path):
    rows = [(Vectors.dense(1.0, 2.0),), (Vectors.dense(1.0),)]
    with refused("data-shape", "2", "1"):
        spool(orca_spark.createDataFrame(rows, ["v"]), "v", tmp_path)


# Columns of a frame -----------------------------------------------------------------------------


def test_a_misspelt_column_gets_a_suggestion(typed):
    with refused("column-missing", "'MONY'", "'money'"):
        as_feed(typed, "MONY")


def test_a_missing_column_of_a_named_frame_names_the_frame(typed):
    with refused("column-missing", "validation_data", "'nothing'"):
        as_feed(typed, "tiny", "nothing", name="validation_data")


@pytest.mark.parametrize("names", [3, ["tiny", 3], [None], [["tiny"]]])
def test_column_names_must_be_strings(typed, names):
    with refused("argument-type"):
        as_feed(typed, names)


def test_a_column_object_is_no_name(typed):
    with refused("argument-type"):
        as_feed(typed, typed["tiny"])


@pytest.mark.parametrize("features", [None, [], ()])
def test_feature_columns_are_required(typed, features):
    with refused("argument-missing", "feature_cols"):
        as_feed(typed, features, ["tiny"])


def test_a_column_that_exists_twice_is_refused_only_where_it_is_used(orca_spark):
    frame = orca_spark.sql("SELECT 1 AS x, 2 AS x, 3 AS y")
    with refused("column-duplicate", "'x'"):
        as_feed(frame, "x")
    assert as_feed(frame, "y").specs[0].name == "y"


def test_columns_that_differ_in_case_only_are_refused_as_spark_cannot_tell_them_apart(orca_spark):
    frame = orca_spark.sql("SELECT 1 AS x, 2 AS X")
    with refused("column-duplicate", "'x'", "'X'"):
        as_feed(frame, "x")


def test_a_column_may_be_named_twice_and_be_feature_and_label(typed):
    feed = as_feed(typed, ["tiny", "tiny", "real"], "tiny")
    assert feed.feature_cols == ("tiny", "tiny", "real")
    assert [spec.name for spec in feed.specs] == ["tiny", "real"]


@pytest.mark.parametrize("data", [None, 3, dict])
def test_another_input_is_refused_with_its_type(data):
    with refused("data-type", "DataFrame", str(type(data).__name__)):
        as_feed(data, "x")


# Two frames with one type -----------------------------------------------------------------------


def spec(type_name, floats="float32"):
    return column_spec("x", data_type(type_name), floats)


def unified(type_name, reference):
    return unified_spec("x", data_type(type_name), "float32", spec(reference), "other")


@pytest.mark.parametrize(
    ("column", "reference"),
    [
        ("int", "bigint"),
        ("bigint", "int"),
        ("double", "int"),
        ("int", "float"),
        ("decimal(5, 1)", "bigint"),
        ("float", "double"),
        ("array<bigint>", "array<double>"),
        ("map<string, int>", "map<string, float>"),
        ("boolean", "boolean"),
    ],
)
def test_numbers_take_the_dtype_of_the_reference(column, reference):
    assert unified(column, reference).dtype == spec(reference).dtype


@pytest.mark.parametrize(
    ("column", "reference"),
    [
        ("boolean", "int"),
        ("float", "boolean"),
        ("int", "array<int>"),
        ("array<array<float>>", "array<float>"),
        ("map<string, float>", "array<float>"),
    ],
)
def test_types_without_a_common_meaning_are_refused(column, reference):
    with refused("data-schema", "'x'"):
        unified(column, reference)


@pytest.mark.parametrize(
    ("values", "column", "reference"),
    [
        (pa.array([1, 2**31], pa.int64()), "bigint", "int"),
        (pa.array([1.0, 2.5], pa.float64()), "double", "int"),
        (pa.array([1.0, float("nan")], pa.float64()), "double", "bigint"),
        (pa.array([1.0, 2.0**63], pa.float64()), "double", "bigint"),
    ],
)
def test_a_number_that_the_reference_cannot_hold_is_refused(values, column, reference):
    with refused("data-value", "'x'"):
        decode(unified(column, reference), values)


def test_whole_numbers_of_any_type_are_taken_over_exactly():
    values = pa.array([0.0, 16777217.0, -1.0])
    ((_, array),) = decode(unified("double", "int"), values)
    assert array.dtype == np.int32
    assert array.tolist() == [0, 16777217, -1]


# Arrow arrays of any form -----------------------------------------------------------------------


def nested(array):
    """Return an Arrow list array with the values and dimensions of an array."""
    out = pa.array(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        count, width = int(np.prod(array.shape[:axis])), array.shape[axis]
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
        out = pa.ListArray.from_arrays(offsets, out)
    return out


shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)
dtypes = st.sampled_from(["float32", "float64", "int32", "int64", "bool"])


@settings(max_examples=60)
@given(data=st.data())
def test_decode_is_the_inverse_of_nesting_for_every_slice(data):
    array = data.draw(hnp.arrays(data.draw(dtypes), data.draw(shapes)))
    start = data.draw(st.integers(0, len(array)))
    length = data.draw(st.integers(0, len(array) - start))
    column = ColumnSpec("x", "plain", array.dtype.name, array.ndim - 1, "")
    ((key, decoded),) = decode(column, nested(array).slice(start, length))
    assert key is None
    assert decoded.dtype == array.dtype
    assert decoded.ndim == array.ndim
    if length:
        np.testing.assert_array_equal(decoded, array[start : start + length])


@settings(max_examples=60)
@given(data=st.data())
def test_the_order_of_a_maps_keys_does_not_matter(data):
    keys = data.draw(st.lists(st.text(max_size=3), min_size=1, max_size=4, unique=True))
    rows = data.draw(st.integers(1, 5))
    values = np.arange(rows * len(keys) * 2, dtype=np.float32).reshape(rows, len(keys), 2)
    cells = []
    for row in range(rows):
        order = data.draw(st.permutations(range(len(keys))))
        cells.append([(keys[i], values[row, i].tolist()) for i in order])
    start = data.draw(st.integers(0, rows - 1))
    array = pa.array(cells, pa.map_(pa.string(), pa.list_(pa.float32()))).slice(start)
    decoded = dict(decode(ColumnSpec("x", "map", "float32", 1, ""), array))
    assert list(decoded) == sorted(keys)
    for i, key in enumerate(keys):
        np.testing.assert_array_equal(decoded[key], values[start:, i])
