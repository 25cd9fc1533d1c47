"""Tests of scaling, indicators and bins against NumPy and pandas."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from table_reference import assert_same, column, is_nan, is_present

FEW = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def scaled(values, low, high, to=(0.0, 1.0)):
    for value in values:
        if not is_present(value):
            yield value
        elif low == high:
            yield (to[0] + to[1]) / 2
        else:
            yield (value - low) / (high - low) * (to[1] - to[0]) + to[0]


def test_min_max_scale_of_numbers(messy, rows):
    names = ["age", "price", "weight", "time"]
    table, extremes = messy.min_max_scale(names, -1, 3)
    assert table.columns == messy.columns
    for name in names:
        present = [v for v in column(rows, name) if is_present(v)]
        assert extremes[name] == (min(present), max(present))
        assert dict(table.dtypes)[name] == "float"
        wanted = scaled(column(rows, name), *extremes[name], (-1, 3))
        assert_same(table.to_list(name), wanted, 1e-6)


@pytest.mark.slow
def test_min_max_scale_of_arrays_goes_by_position(make):
    table = make(
        [([1, 10], [0.5]), ([3, None], []), (None, [math.nan]), ([2, 30], [1.5])],
        "a array<int>, b array<float>",
    )
    found, extremes = table.min_max_scale(["a", "b"])
    assert extremes == {"a": ([1.0, 10.0], [3.0, 30.0]), "b": ([0.5], [1.5])}
    assert found.dtypes == [("a", "array<double>"), ("b", "array<double>")]
    assert_same(found.to_list("a"), [[0.0, 0.0], [1.0, None], None, [0.5, 1.0]])
    assert_same(found.to_list("b"), [[0.0], [], [math.nan], [1.0]])


@pytest.mark.slow
def test_min_max_scale_of_vectors_keeps_them(orca_spark):
    from pyspark.ml.linalg import Vectors

    from bigdl.friesian.feature import FeatureTable

    df = orca_spark.createDataFrame(
        [(Vectors.dense(1, 5),), (Vectors.dense(3, 5),), (None,)], ["v"]
    )
    found, extremes = FeatureTable(df).min_max_scale("v", 0.0, 2.0)
    assert extremes == {"v": ([1.0, 5.0], [3.0, 5.0])}
    assert found.columns == ["v"]
    assert found.to_list("v") == [Vectors.dense(0, 1), Vectors.dense(2, 1), None]


@pytest.mark.slow
def test_transform_uses_the_extremes_of_other_data(make):
    train = make([(0, 5, [1.0]), (10, 5, [3.0])], "a int, same int, v array<double>")
    test = make(
        [(5, 7, [4.0]), (20, 5, None), (None, None, [1.0])], "a int, same int, v array<double>"
    )
    names = ["a", "same", "v"]
    _, extremes = train.min_max_scale(names)
    found = test.transform_min_max_scale(names, extremes)
    assert_same(found.to_list("a"), [0.5, 2.0, None])
    assert_same(found.to_list("same"), [0.5, 0.5, None])
    assert_same(found.to_list("v"), [[1.5], None, [0.0]])
    clipped = test.transform_min_max_scale(names, extremes, 10, 20, clip=True)
    assert_same(clipped.to_list("a"), [15.0, 20.0, None])
    assert_same(clipped.to_list("v"), [[20.0], None, [10.0]])
    with refused("argument-value", "min_max_dict", "'same'"):
        test.transform_min_max_scale("same", {"a": (0, 1)})


def test_a_column_without_values_scales_to_nulls(make):
    table = make([(None,), (None,)], "a int")
    found, extremes = table.min_max_scale("a")
    assert extremes == {"a": (None, None)}
    assert found.to_list("a") == [None, None]


@pytest.mark.slow
def test_one_hot_indicators_stand_where_the_column_was(make):
    table = make([("p", 0, 9), ("q", 2, 8), ("r", None, 7), ("s", -1, 6)], "n string, c int, z int")
    found = table.one_hot_encode("c")
    assert found.columns == ["n", "c_0", "c_1", "c_2", "z"]
    assert [found.to_list(f"c_{j}") for j in range(3)] == [[1, 0, 0, 0], [0] * 4, [0, 1, 0, 0]]
    kept = table.one_hot_encode(["c", "z"], [2, 1], prefix=["x", "y"], keep_original_columns=True)
    assert kept.columns == ["n", "c", "x_0", "x_1", "z", "y_0"]
    assert kept.to_list("x_1") == [0, 0, 0, 0]


@pytest.mark.slow
@FEW
@given(
    values=st.lists(st.one_of(st.none(), st.floats(-9, 9), st.just(math.nan)), max_size=10),
    edges=st.lists(st.integers(-8, 8), min_size=1, max_size=5, unique=True).map(sorted),
)
def test_bins_of_edges_are_those_of_numpy(make, values, edges):
    table = make([(value,) for value in values], "v double").coalesce(1)
    found = table.cut_bins("v", [float(edge) for edge in edges])
    assert found.columns == ["v_bin"]
    wanted = [
        int(np.searchsorted(edges, v, side="right")) if is_present(v) else len(edges) + 1
        for v in values
    ]
    assert found.to_list("v_bin") == wanted


def test_an_int_makes_equal_parts(make):
    ages = [33, 25, 44, 68, 55, 10, 29, 40, 41]
    edges = np.linspace(10, 68, 5)
    table = make([(age,) for age in ages], "age int")
    found = table.cut_bins("age", 4).to_list("age_bin")
    assert found == [int(np.searchsorted(edges, age, side="right")) for age in ages]
    assert found[3] == 5  # the largest value has a separate bin
    assert found[5] == 1


@pytest.mark.slow
def test_labels_names_and_places_of_bins(make):
    table = make(
        [(5, 1.0, "k"), (None, 2.0, "l"), (20, math.nan, "m")], "a int, b double, c string"
    )
    found = table.cut_bins("a", [10], labels=["young", "old"], out_cols="a")
    assert found.columns == ["a", "b", "c"]
    assert found.to_list("a") == ["young", None, "old"]
    both = table.cut_bins(
        ["a", "b"], {"a": [10], "b": 1}, labels={"b": ["under", "part", "over"]}, drop=False
    )
    assert both.columns == ["a", "b", "c", "a_bin", "b_bin"]
    assert both.to_list("a_bin") == [0, 2, 1]
    assert both.to_list("b_bin") == ["part", "over", None]


def test_edges_at_quantiles_make_bins_of_equal_size(make):
    rows = [(float(i), 7 if i < 90 else i) for i in range(100)] + [(math.nan, None)]
    table = make(rows, "a double, b int")
    edges = table.quantile_edges(["a", "b"], 4)
    assert len(edges["a"]) == 3
    assert edges["b"] == [7.0]
    found = table.cut_bins(["a", "b"], edges).to_dict()
    assert all(abs(found["a_bin"].count(i) - 25) <= 1 for i in range(4))
    assert (found["a_bin"].count(4), found["b_bin"].count(2)) == (1, 1)


def test_a_constant_column_can_be_cut(make):
    found = make([(3,), (3,), (None,)], "a int").cut_bins("a", 2)
    assert found.to_list("a_bin") == [3, 3, 4]


def test_statistics_are_those_of_pandas(messy, rows):
    frame = pd.DataFrame({name: column(rows, name) for name in ("age", "time")}, dtype="float64")
    found = messy.get_stats(["age", "time"], ["sum", "avg", "count", "min", "max"])
    for name in frame:
        numbers = frame[name]
        wanted = [numbers.sum(), numbers.mean(), numbers.count(), numbers.min(), numbers.max()]
        assert found[name] == pytest.approx(wanted)
    single = messy.get_stats("age", {"age": "max"})
    assert single == {"age": frame["age"].max()}
    assert isinstance(messy.get_stats(None, "count")["age"], int)
    assert set(messy.get_stats(None, "min")) == {
        *("user", "item", "time", "price", "weight", "age", "small")
    }


@pytest.mark.slow
def test_min_and_max_are_exact_for_large_numbers(make):
    table = make([(2**24 + 1, None), (5, None)], "a bigint, b double")
    assert table.max().to_dict() == {"column": ["a", "b"], "max": [float(2**24 + 1), None]}
    assert table.min("a").to_dict() == {"column": ["a"], "min": [5.0]}


def test_groups_have_the_names_of_spark(messy, rows):
    frame = pd.DataFrame({"user": column(rows, "user"), "age": column(rows, "age")})
    grouped = messy.select("user", "age").group_by("user", ["sum", "count"]).sort("user")
    assert grouped.columns == ["user", "sum(age)", "count(age)"]
    wanted = frame.groupby("user")["age"].agg(["sum", "count"])
    assert grouped.to_list("sum(age)") == wanted["sum"].tolist()
    assert grouped.to_list("count(age)") == wanted["count"].tolist()
    whole = messy.group_by(agg={"age": ["max", "approx_count_distinct"], "time": "collect_list"})
    assert whole.columns == ["max(age)", "approx_count_distinct(age)", "collect_list(time)"]
    assert len(whole.to_list("collect_list(time)")[0]) == len(rows)


def test_groups_joined_to_the_rows_count_nulls_too(messy, rows):
    found = messy.group_by("city", {"user": "count"}, join=True)
    assert found.columns == [*messy.columns, "count(user)"]
    values = found.to_dict()
    cities = column(rows, "city")
    assert len(values["city"]) == len(rows)
    for city, count in zip(values["city"], values["count(user)"], strict=True):
        assert count == cities.count(city)


@pytest.mark.parametrize(
    "name",
    [
        *("max", "min", "count", "sum", "avg", "mean", "sumDistinct", "stddev", "stddev_pop"),
        *("variance", "var_pop", "skewness", "kurtosis", "collect_list", "collect_set"),
        *("approx_count_distinct", "first", "last"),
    ],
)
def test_every_aggregate_is_accepted_also_for_text(make, name):
    table = make([(1, 2, "3"), (1, 4, "x")], "k int, v int, s string")
    row = table.group_by("k", name).collect()[0]
    assert len(row) == 3
    if name in ("sum", "avg", "mean"):
        assert list(row)[1:] == ([6, 3.0] if name == "sum" else [3.0, 3.0])


def test_functions_of_python(messy, rows):
    found = messy.apply("city", "length", lambda v: -1 if v is None else len(v), "int")
    assert found.columns == [*messy.columns, "length"]
    wanted = [-1 if v is None else len(v) for v in column(rows, "city")]
    assert found.to_list("length") == wanted
    both = messy.apply(["user", "city"], "city", lambda v: f"{v[0] + 1}-{v[1]}")
    assert both.columns == messy.columns
    wanted = [
        f"{u + 1}-{c}" for u, c in zip(column(rows, "user"), column(rows, "city"), strict=True)
    ]
    assert both.to_list("city") == wanted


def test_functions_of_series(messy, rows):
    doubled = messy.apply("user", "user", lambda s: s * 2, "bigint", vectorized=True)
    assert doubled.to_list("user") == [2 * v for v in column(rows, "user")]
    summed = messy.apply(["user", "time"], "x", lambda s: s[0] + s[1], "bigint", vectorized=True)
    wanted = [u + t for u, t in zip(column(rows, "user"), column(rows, "time"), strict=True)]
    assert summed.to_list("x") == wanted


@pytest.mark.slow
def test_embedding_by_a_function(make):
    def encode(texts):
        return [[len(text), text.count("a"), 1.0] for text in texts]

    table = make([("aa", "x"), ("b", None), ("aa", "yy")], "s string, t string")
    found = table.string_embed(["s", "t"], encode)
    assert found.columns == ["s", "t"]
    assert found.to_list("s") == [[2.0, 2.0, 1.0], [1.0, 0.0, 1.0], [2.0, 2.0, 1.0]]
    assert found.to_list("t") == [[1.0, 0.0, 1.0], None, [2.0, 0.0, 1.0]]
    added = table.string_embed("s", encode, reduce_dim=2, replace=False)
    assert added.columns == ["s", "t", "s_embed"]
    assert [len(v) for v in added.to_list("s_embed")] == [2, 2, 2]
    with refused("data-shape", "k=5"):
        table.string_embed("s", encode, reduce_dim=5)
    assert not any(is_nan(x) for v in added.to_list("s_embed") for x in v)
