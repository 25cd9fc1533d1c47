"""Tests of cell operators against plain Python."""

import math
import statistics

import pytest
from refusals import refused
from table_reference import assert_same, column, is_nan, is_present

from bigdl.friesian.feature import FeatureTable


def clipped(value, low, high):
    if not is_present(value):
        return value
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


@pytest.mark.parametrize("name", ["age", "small", "time", "price", "weight"])
@pytest.mark.parametrize(("low", "high"), [(0, None), (None, 2), (-1.7, 2.7), (3, 3)])
def test_clip_casts_bounds_to_the_column_and_leaves_nulls_and_nan(messy, rows, name, low, high):
    found = messy.clip(name, min=low, max=high)
    assert found.dtypes == messy.dtypes
    if name in ("age", "small", "time"):
        low, high = (None if bound is None else math.trunc(bound) for bound in (low, high))
    assert_same(
        found.to_list(name), [clipped(value, low, high) for value in column(rows, name)], 1e-6
    )


def test_clip_by_a_bound_that_the_type_does_not_reach_changes_nothing(messy, rows):
    assert_same(messy.clip("small", -(10**9), 10**9).to_list("small"), column(rows, "small"))
    assert_same(messy.clip("age", max=math.inf).to_list("age"), column(rows, "age"))


@pytest.mark.parametrize("name", ["age", "price"])
def test_log_of_clipped_numbers(messy, rows, name):
    def wanted(value):
        if not is_present(value):
            return value
        return math.log1p(max(value, 0))

    found = messy.log([name])
    assert dict(found.dtypes)[name] == "double"
    assert found.columns == messy.columns
    assert_same(found.to_list(name), map(wanted, column(rows, name)), 1e-12)


def test_log_without_clipping_is_null_unless_positive(messy, rows):
    wanted = [math.log(age) if age is not None and age > 0 else None for age in column(rows, "age")]
    assert_same(messy.log("age", clipping=False).to_list("age"), wanted, 1e-12)


def test_log_of_a_large_long_and_of_a_fraction_is_exact(make):
    table = make([(2**40, 2.7)], "big bigint, part double").log(["big", "part"])
    assert table.to_dict() == {"big": [math.log1p(2**40)], "part": [pytest.approx(math.log(3.7))]}


@pytest.mark.parametrize(
    ("value", "columns", "wanted"),
    [
        (5, ["item", "age"], {"item": 5, "age": 5}),
        (5, None, {"item": 5, "age": 5, "small": 5, "price": 5.0, "weight": 5.0}),
        (2**40, None, {"price": 2.0**40, "weight": 2.0**40}),
        (2.5, None, {"item": 2, "age": 2, "small": 2, "price": 2.5, "weight": 2.5}),
        (3, ["price", "small", "time"], {"price": 3.0, "small": 3}),
        ("?", None, {"city": "?", "tags": "?"}),
        ("?", "city", {"city": "?"}),
        (True, None, {"flag": True}),
    ],
)
def test_fillna_fills_nulls_of_matching_columns(messy, rows, value, columns, wanted):
    found = messy.fillna(value, columns)
    assert found.dtypes == messy.dtypes
    values = found.to_dict()
    for name in messy.columns:
        filled = [wanted.get(name) if v is None else v for v in column(rows, name)]
        assert_same(values[name], filled, 1e-6 if name == "weight" else 0)


def test_fillna_of_a_whole_number_without_columns_fills_every_column_of_numbers(make):
    table = make([(None, None, None, None)], "a bigint, b float, c int, d string").fillna(0, None)
    assert table.to_dict() == {"a": [0], "b": [0.0], "c": [0], "d": [None]}


def test_dropna_by_any_all_and_a_threshold(messy, rows):
    pairs = list(zip(column(rows, "city"), column(rows, "price"), strict=True))
    known = [sum(map(is_present, pair)) for pair in pairs]
    assert messy.dropna(["city", "price"]).size() == sum(n == 2 for n in known)
    assert messy.dropna(["city", "price"], how="all").size() == sum(n > 0 for n in known)
    assert messy.dropna(["city", "price"], how="any", thresh=1).size() == sum(n > 0 for n in known)
    assert messy.dropna(None).size() == sum(all(map(is_present, row)) for row in rows)


def test_medians_skip_nulls_and_nan(messy, rows):
    names = ["user", "item", "time", "price", "weight", "age", "small"]
    found = messy.median()
    assert type(found) is type(messy)
    assert found.dtypes == [("column", "string"), ("median", "double")]
    medians = {row["column"]: row["median"] for row in found.collect()}
    assert list(medians) == names
    for name in names:
        present = [value for value in column(rows, name) if is_present(value)]
        assert statistics.median_low(present) <= medians[name] <= statistics.median_high(present)


def test_fill_median_cuts_it_for_whole_numbers(make):
    table = make([(1, 1.5), (4, None), (None, 2.5), (7, math.nan)], "a int, b double")
    assert_same(table.fill_median("a").to_list("a"), [1, 4, 4, 7])
    assert_same(table.fill_median(["a", "b"]).to_list("b"), [1.5, 1.5, 2.5, math.nan])


def test_median_of_a_column_of_nulls_is_null_and_does_not_fill(make):
    table = make([(None, 1), (None, 2)], "a int, b int")
    assert table.median("a").collect()[0]["median"] is None
    with refused("data-null", "'a'"):
        table.fill_median(["a", "b"])


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("int", [12, None, 1, None, -3, 2147483647]),
        ("integer", [12, None, 1, None, -3, 2147483647]),
        ("long", [12, None, 1, None, -3, 2147483647]),
        ("short", [12, None, 1, None, -3, None]),
        ("double", [12.0, None, 1.5, None, -3.9, 2147483647.0]),
        ("float", [12.0, None, 1.5, None, -3.9, 2147483647.0]),
        ("string", ["12", "x", "1.5", None, "-3.9", "2147483647"]),
        ("bool", [None, None, None, None, None, None]),
    ],
)
def test_cast_of_text_gives_null_where_it_is_no_value(make, dtype, wanted):
    table = make([("12",), ("x",), ("1.5",), (None,), ("-3.9",), ("2147483647",)], "a string")
    assert_same(table.cast("a", dtype).to_list("a"), wanted, 1e-6 if dtype == "float" else 0)


def test_cast_of_all_columns_and_to_a_type_of_spark(make):
    from pyspark.sql.types import DecimalType

    table = make([(1, 2.6)], "a int, b double")
    assert table.cast(None, "str").to_dict() == {"a": ["1"], "b": ["2.6"]}
    assert table.cast(["b"], "int").dtypes == [("a", "int"), ("b", "int")]
    assert table.cast("b", DecimalType(4, 1)).dtypes[1] == ("b", "decimal(4,1)")


def test_cast_of_a_number_that_is_too_large_gives_null(make):
    table = make([(2**40,), (7,)], "a bigint")
    assert table.cast("a", "int").to_list("a") == [None, 7]


def test_add_widens_where_it_must(make):
    table = make([(1, 2, 1.5), (None, 3, None)], "a int, b smallint, c double")
    assert table.add(["a", "c"]).to_dict() == {"a": [2, None], "b": [2, 3], "c": [2.5, None]}
    assert table.add("b", 1.5).to_list("b") == [3.5, 4.5]


def test_rename_skips_names_that_do_not_exist(messy):
    found = messy.rename({"city": "town", "nowhere": "x"})
    assert found.columns == ["town" if name == "city" else name for name in messy.columns]
    assert isinstance(found, FeatureTable)


def test_merge_cols_makes_an_array_and_drops_the_columns(make):
    table = make([(1, 2, "x"), (3, None, "y")], "a int, b bigint, c string")
    merged = table.merge_cols(["a", "b"], "ab")
    assert merged.columns == ["c", "ab"]
    assert merged.to_list("ab") == [[1, 2], [3, None]]
    assert table.merge_cols(["a", "c"], "ac").to_list("ac") == [["1", "x"], ["3", "y"]]
    assert table.merge_cols(["a", "b"], "a").columns == ["a", "c"]


def test_append_column_takes_an_expression(messy):
    from pyspark.sql import functions as F

    found = messy.append_column("one", F.lit(1)).append_column("older", F.col("age") + 1)
    assert found.columns[-2:] == ["one", "older"]
    assert set(found.to_list("one")) == {1}


def test_columns_with_strange_names_work(make):
    table = make([(1, None), (None, 2.0)], "`a.b` int, `c ``d` double")
    found = table.fillna(7, None).add("a.b").log("c `d").clip("a.b", max=5).cast("a.b", "string")
    assert found.columns == ["a.b", "c `d"]
    assert found.to_list("a.b") == ["2", "5"]
    assert table.fill_median().to_list("c `d") == [2.0, 2.0]


def test_an_empty_table_goes_through(make):
    empty = make([], "a int, b double, s string")
    found = empty.fillna(1, None).clip(["a", "b"], 0, 1).log("b").add("a").cast("s", "int")
    assert found.size() == 0
    assert found.dtypes == [("a", "int"), ("b", "double"), ("s", "int")]
    assert empty.median().to_dict() == {"column": ["a", "b"], "median": [None, None]}
    assert not any(map(is_nan, empty.to_list("b")))
