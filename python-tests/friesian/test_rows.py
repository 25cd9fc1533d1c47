"""Tests of row operators and of the table itself."""

import copy
import pickle
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from table_reference import column, is_present

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.feature.table import Table

FEW = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_concat_puts_the_rows_of_the_table_last(make):
    a = make([(1, "x")], "k int, only_a string")
    b = make([(2, 0.5)], "k int, only_b double")
    c = make([(3, 1.5), (2, 0.5)], "k int, only_b double")
    assert a.concat(b).to_dict() == {"k": [2, 1]}
    outer = a.concat([b, c], mode="outer")
    assert outer.to_dict() == {
        "k": [2, 3, 2, 1],
        "only_b": [0.5, 1.5, 0.5, None],
        "only_a": [None, None, None, "x"],
    }
    assert b.concat(c, distinct=True).size() == 2


def test_concat_of_text_and_numbers_becomes_text(make):
    found = make([(1,)], "k int").concat(make([("x",)], "k string"))
    assert found.to_list("k") == ["x", "1"]


@pytest.mark.slow
def test_drop_duplicates_keeps_the_first_by_order(make):
    table = make(
        [("a", 3, 1), ("a", 1, 2), ("b", 5, 3), ("a", 1, 4), (None, 2, 5), (None, 1, 6)],
        "id string, rank int, place int",
    )
    first = table.drop_duplicates("id", "rank").sort("place")
    assert first.columns == ["id", "rank", "place"]
    assert first.to_list("place") == [2, 3, 6]
    assert table.drop_duplicates("id", "rank", keep="max").sort("place").to_list("place") == [
        1,
        3,
        5,
    ]
    assert sorted(table.drop_duplicates(["id", "rank"]).to_list("rank")) == [1, 1, 2, 3, 5]


@pytest.mark.slow
@FEW
@given(
    rows=st.lists(
        st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 3))), max_size=12
    ),
    keep=st.sampled_from(["min", "max"]),
)
def test_drop_duplicates_leaves_one_row_of_each_group(make, rows, keep):
    numbered = [(*row, place) for place, row in enumerate(rows)]
    table = make(numbered, "g string, v int, place int").coalesce(1)
    found = {row.g: row.place for row in table.drop_duplicates("g", "v", keep).collect()}
    wanted = {}
    for group, value, place in numbered:
        order = (value is not None, value or 0)  # nulls come first
        better = group not in wanted or (
            order < wanted[group][0] if keep == "min" else order > wanted[group][0]
        )
        if better:
            wanted[group] = order, place
    assert found == {group: place for group, (_, place) in wanted.items()}


@pytest.mark.slow
def test_filter_by_frequency_gives_values_or_their_rows(messy, rows):
    counts = Counter(zip(column(rows, "city"), column(rows, "item"), strict=True))
    frequent = {pair for pair, n in counts.items() if n >= 3}
    assert frequent
    found = messy.filter_by_frequency(["city", "item"], 3)
    assert found.columns == ["city", "item"]
    assert {(row.city, row.item) for row in found.collect()} == frequent
    assert found.size() == len(frequent)
    kept = messy.filter_by_frequency(["city", "item"], 3, keep_rows=True)
    assert kept.columns == messy.columns
    assert kept.size() == sum(counts[pair] for pair in frequent)


@pytest.mark.slow
def test_join_renames_the_other_common_columns(make):
    left = make([(1, "a"), (2, "b")], "k int, v string")
    right = make([(1, "c"), (3, "d")], "k int, v string")
    found = left.join(right, "k", lsuffix="_l", rsuffix="_r")
    assert found.to_dict() == {"k": [1], "v_l": ["a"], "v_r": ["c"]}
    assert left.join(right, on=["k"], how="outer", rsuffix="_r").size() == 3
    cross = left.join(right, how="cross", rsuffix="_r", lsuffix="_l")
    assert cross.size() == 4
    assert cross.columns == ["k_l", "v_l", "k_r", "v_r"]


def test_random_split_is_a_partition_and_repeats_with_its_seed(messy, rows):
    parts = messy.random_split([8, 2], seed=3)
    assert sum(part.size() for part in parts) == len(rows)
    again = messy.split([0.8, 0.2], seed=3)
    assert [part.to_list("time") for part in parts] == [part.to_list("time") for part in again]


@pytest.mark.slow
def test_shuffle_moves_no_row_to_another_partition(messy):
    def partitions(table):
        return [Counter(map(str, rows)) for rows in table.df.rdd.glom().collect()]

    shuffled = messy.ordinal_shuffle_partition(seed=1)
    assert shuffled.columns == messy.columns
    assert partitions(shuffled) == partitions(messy)
    assert shuffled.to_list("time") != messy.to_list("time")
    assert shuffled.to_list("time") == messy.ordinal_shuffle_partition(seed=1).to_list("time")
    assert messy.ordinal_shuffle_partition().size() == messy.size()


@pytest.mark.slow
def test_sets_of_rows(make):
    a = make([(1,), (1,), (2,), (None,)], "k int")
    b = make([(2,), (3,)], "k int")
    assert sorted(a.subtract(b).to_list("k"), key=str) == [1, None]
    assert a.intersect(b).to_list("k") == [2]
    assert a.distinct().size() == 3


def test_sort_filter_limit_and_sample(messy, rows):
    found = messy.sort("user", "time", ascending=[True, False]).to_dict()
    pairs = list(zip(found["user"], found["time"], strict=True))
    assert pairs == sorted(pairs, key=lambda pair: (pair[0], -pair[1]))
    assert messy.order_by(messy.col("time").desc()).to_list("time")[0] == 19
    assert messy.filter("age > 20").size() == messy.filter(messy.age > 20).size()
    assert messy.filter(messy.age > 20).size() == sum((a or 0) > 20 for a in column(rows, "age"))
    assert messy.limit(3).size() == 3
    assert messy.sample(0.5, seed=1).size() == messy.sample(0.5, seed=1).size() < len(rows)


def test_partitions_and_their_rows(messy, rows):
    assert messy.repartition(5).df.rdd.getNumPartitions() == 5
    assert messy.repartition(5).coalesce(2).df.rdd.getNumPartitions() == 2
    counts = messy.get_partition_row_number()
    assert counts.columns == ["partitionId", "count"]
    assert sum(counts.to_list("count")) == len(rows)


def test_select_and_drop(messy):
    from pyspark.sql import functions as F

    assert messy.select("user", "item").columns == ["user", "item"]
    assert messy.select(["user"]).columns == ["user"]
    assert messy.select(F.col("user").alias("who")).columns == ["who"]
    assert messy.drop("user", "nowhere").columns == messy.columns[1:]


def test_columns_are_attributes(messy):
    assert messy.select((messy.age + 1).alias("x"), messy.col("age")).columns == ["x", "age"]
    with pytest.raises(AttributeError, match="no attribute or column 'nowhere'"):
        _ = messy.nowhere
    assert not hasattr(messy, "__array__")
    with pytest.raises(AttributeError):
        _ = Table.__new__(Table).anything


def test_a_table_can_be_copied_but_not_pickled_for_ever(messy):
    assert copy.copy(messy).df is messy.df
    with pytest.raises(Exception, match=r"pickle|CONTEXT_ONLY"):
        pickle.dumps(messy)


def test_methods_return_tables_of_the_same_class(messy):
    assert isinstance(messy.limit(1), FeatureTable)
    assert type(Table(messy.df).limit(1)) is Table
    assert messy.compute() is messy
    assert messy.to_spark_df() is messy.df
    assert messy.dtypes == messy.df.dtypes
    assert messy.schema == messy.df.schema
    assert type(messy.max()) is Table


def test_cache_and_broadcast(make):
    table = make([(1,), (2,)], "k int")
    assert table.cache() is table
    assert table.df.is_cached
    assert not table.uncache().df.is_cached
    assert table.uncache() is table
    assert table.broadcast() is None
    plan = make([(1,)], "k int").df.join(table.df, "k")._jdf.queryExecution().toString()
    assert "broadcast" in plan.lower()


def test_values_come_out_as_python_objects(messy, rows):
    assert messy.to_list("history") == column(rows, "history")
    assert messy.to_list("flag") == column(rows, "flag")
    assert set(messy.to_dict()) == set(messy.columns)
    assert messy.to_dict()["city"] == column(rows, "city")
    assert len(messy.collect()) == messy.size() == len(rows)
    assert list(messy.to_pandas().columns) == messy.columns
    with refused("argument-type"):
        messy.to_list(["city"])
    assert any(map(is_present, messy.to_list("price")))


def test_show_prints_rows(make, capsys):
    make([(1, "a long text that is cut")], "k int, t string").show(1, 5)
    assert "a ..." in capsys.readouterr().out


def test_names_with_dots_are_names(make):
    table = make([(1, None), (2, 3), (None, None)], "`a.b` int, `c` int")
    assert table.dropna("a.b").to_list("a.b") == [1, 2]
    assert table.dropna(None).to_list("c") == [3]
    assert table.dropna(None, how="all").size() == 2


def test_columns_can_swap_their_names(make):
    table = make([(1, 2, 3)], "a int, b int, c int").rename({"a": "b", "b": "a", "no": "x"})
    assert (table.columns, table.collect()[0]) == (["b", "a", "c"], (1, 2, 3))


def test_figures_of_text_are_called_as_those_of_numbers(make):
    table = make([("a", "1", 1), ("a", "1", 1), ("a", "x", 2)], "k string, text string, n int")
    aggregates = ["sumDistinct", "mean", "sum", "stddev"]
    found = table.group_by("k", agg={"text": aggregates, "n": aggregates})
    texts, numbers = found.columns[1:5], found.columns[5:]
    assert [name.replace("text", "n") for name in texts] == numbers
    assert found.to_list("sum(DISTINCT text)") == [1.0]
