"""Tests of histories, arrays and differences against plain Python."""

from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_reference import column


def histories(events, min_len=1, max_len=100, last=None):
    """Return (user, item, time, history) of sorted events (user, item, time)."""
    by_user = defaultdict(list)
    for event in events:
        by_user[event[0]].append(event)
    found = []
    for user, records in by_user.items():
        records = sorted(records, key=lambda event: event[2])  # stable
        rows = [
            (user, item, time, [each[1] for each in records[max(0, i - max_len) : i]])
            for i, (_, item, time) in enumerate(records)
            if i >= min_len
        ]
        found += rows if last is None else rows[-last:]
    return Counter(map(repr, found))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from([1, 2, None]),
            st.one_of(st.none(), st.integers(1, 9)),
            st.integers(0, 4),
        ),
        max_size=14,
    ),
    min_len=st.integers(0, 3),
    max_len=st.integers(1, 4),
    last=st.one_of(st.none(), st.integers(1, 3)),
)
def test_histories_end_before_the_record(make, events, min_len, max_len, last):
    table = make(events, "user int, item int, time bigint").coalesce(1)
    arguments = {} if last is None else {"num_seqs": last}
    found = table.add_hist_seq("item", "user", "time", min_len, max_len, **arguments)
    assert found.columns == ["user", "item", "item_hist_seq", "time"]
    rows = [(r.user, r.item, r.time, r.item_hist_seq) for r in found.collect()]
    assert Counter(map(repr, rows)) == histories(events, min_len, max_len, last)


def test_histories_of_any_type(messy, rows):
    found = messy.add_hist_seq(["city", "price", "history"], "user", max_len=2, num_seqs=1)
    assert found.size() == len(set(column(rows, "user")))
    kinds = dict(found.dtypes)
    assert kinds["city_hist_seq"] == "array<string>"
    assert kinds["history_hist_seq"] == "array<array<int>>"


def test_a_null_in_the_order_of_a_history_fails_with_a_sentence(make):
    table = make([(1, 2, None), (1, 3, 4)], "user int, item int, time bigint")
    with pytest.raises(Exception, match="The column time has nulls; drop or fill them first"):
        table.add_hist_seq("item", "user").compute()


def test_mask_and_pad_agree(make):
    table = make([([1, 2],), ([],), (None,), ([1, 2, 3, 4, 5],)], "a array<int>")
    found = table.pad("a", seq_len=4, mask_cols="a")
    assert found.columns == ["a", "a_mask"]
    assert found.to_list("a") == [[1, 2, 0, 0], [0] * 4, [0] * 4, [2, 3, 4, 5]]
    assert found.to_list("a_mask") == [[1, 1, 0, 0], [0] * 4, [0] * 4, [1] * 4]
    assert table.mask("a", 2).to_list("a_mask") == [[1, 1], [0, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("kind", "values", "token"),
    [
        ("array<bigint>", [7], 0),
        ("array<double>", [7.5], 0.5),
        ("array<float>", [7.5], 0),
        ("array<string>", ["x"], "?"),
    ],
)
def test_pad_of_every_type(make, kind, values, token):
    found = make([(values,)], f"a {kind}").pad("a", 3, mask_token=token)
    assert found.to_list("a") == [[*values, token, token]]
    assert found.dtypes == [("a", kind)]


def test_pad_of_nested_arrays_adds_rows(make):
    table = make([([[1, 2], [3]],), ([],), (None,), ([[1], [2], [3], [4]],)], "a array<array<int>>")
    found = table.pad("a", 3, mask_token=9).to_list("a")
    assert found == [[[1, 2], [3], [9, 9]], [[], [], []], [[], [], []], [[2], [3], [4]]]
    assert table.pad("a", 2, row_len=2).to_list("a")[1] == [[0, 0], [0, 0]]


@pytest.mark.slow
def test_differences_along_an_order(make):
    rows = [("a", 3, 9, 1.0), ("a", 1, 5, None), ("b", 2, 7, 2.0), ("a", 2, 8, 4.0)]
    table = make(rows, "g string, t int, v int, w double")
    found = table.difference_lag(["v", "w"], "t", [1, -1], "g").sort("g", "t")
    assert found.columns == [
        *table.columns,
        *("t_diff_lag_v_1", "t_diff_lag_v_-1", "t_diff_lag_w_1", "t_diff_lag_w_-1"),
    ]
    assert found.to_list("t_diff_lag_v_1") == [None, 3, 1, None]
    assert found.to_list("t_diff_lag_v_-1") == [-3, -1, None, None]
    assert found.to_list("t_diff_lag_w_-1") == [None, 3.0, None, None]
    assert dict(found.dtypes)["t_diff_lag_v_1"] == "int"
    whole = table.difference_lag("v", ["g", "t"], 2).sort("g", "t")
    assert whole.columns[-1] == "g_t_diff_lag_v_2"
    assert whole.to_list("g_t_diff_lag_v_2") == [None, None, 4, -1]
    assert "x" in table.difference_lag("v", "t", out_cols="x").columns
    assert table.difference_lag(["v", "w"], "t", out_cols=["x", "y"]).columns[-2:] == ["x", "y"]
    named = table.difference_lag("v", "t", [1, 2], out_cols=[["x", "y"]])
    assert named.columns[-2:] == ["x", "y"]


def test_samples_of_lists_take_the_same_places_of_all_columns(make):
    rows = [(1, [1, 2, 3, 4], list("abcd")), (2, [5], ["e"]), (3, [6, 7], ["f", "g"])]
    table = make(rows, "user int, items array<int>, names array<string>")
    found = table.sample_listwise(["items", "names"], 5, 2, random_seed=3)
    assert found.columns == table.columns
    values = found.to_dict()
    assert Counter(values["user"]) == {1: 5, 3: 5}
    letters = dict(zip(range(1, 8), "abcdefg", strict=True))
    for items, names in zip(values["items"], values["names"], strict=True):
        assert [letters[item] for item in items] == names
        assert len(set(items)) == 2
    assert len({tuple(items) for items in values["items"]}) > 3
    assert table.sample_listwise(["items", "names"], 5, 2, random_seed=3).to_dict() == values
    added = table.sample_listwise("items", 1, 2, replace=False)
    assert added.columns == [*table.columns, "sampled_items"]
    uneven = make([(1, [1, 2], ["a"])], "user int, items array<int>, names array<string>")
    with pytest.raises(Exception, match="should have the same array length"):
        uneven.sample_listwise(["items", "names"], 1, 1).compute()


@pytest.mark.slow
def test_negative_samples_come_before_their_record(make):
    table = make(
        [(1, "x", 3), (2, "y", 1), (3, "z", None), (4, "w", 99)], "u int, v string, item int"
    )
    found = table.add_negative_samples(item_size=4, neg_num=2, seed=5)
    assert found.columns == ["u", "v", "item", "label"]
    values = found.to_dict()
    assert values["u"] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert values["label"] == [0, 0, 1] * 4
    assert values["item"][2::3] == [3, 1, None, 99]
    assert set(values["item"][0:2]) <= {1, 2}
    assert set(values["item"][3:5]) <= {2, 3}
    assert set(values["item"][6:8] + values["item"][9:11]) <= {1, 2, 3}
    assert table.add_negative_samples(4, neg_num=2, seed=5).to_dict() == values
    other = table.add_negative_samples(item_size=1000, neg_num=2, seed=6)
    assert other.to_list("item") != table.add_negative_samples(1000, neg_num=2, seed=7).to_list(
        "item"
    )
    assert other.to_list("item") == other.to_list("item")
    replaced = other.add_negative_samples(1000)  # an existing label keeps its position
    assert replaced.columns == other.columns


def test_negative_samples_are_uniform_over_the_other_items(make):
    table = make([(i, 1 + i % 5) for i in range(500)], "u int, item bigint")
    found = table.add_negative_samples(6, neg_num=10, seed=1)
    assert dict(found.dtypes)["item"] == "bigint"
    values = found.to_dict()
    pairs = Counter()
    for user, item, label in zip(values["u"], values["item"], values["label"], strict=True):
        if not label:
            pairs[1 + user % 5, item] += 1
    assert set(pairs) == {(a, b) for a in range(1, 6) for b in range(1, 6) if a != b}
    # 250 of each pair are expected, with a standard deviation of 14
    assert all(180 < count < 320 for count in pairs.values())


@pytest.mark.slow
def test_negative_samples_avoid_a_history(make):
    rows = [(1, 2, [1, 3, 3, None, 77]), (2, 5, None), (3, 1, [2, 3, 4, 5]), (4, None, [])]
    table = make(rows, "u int, item int, seen array<int>")
    found = table.add_negative_samples(6, neg_num=20, seed=2, exclude_history_col="seen").to_dict()
    drawn = defaultdict(set)
    for user, item, label in zip(found["u"], found["item"], found["label"], strict=True):
        if not label:
            drawn[user].add(item)
    assert drawn == {1: {4, 5}, 2: {1, 2, 3, 4}, 4: {1, 2, 3, 4, 5}}
    assert found["u"].count(3) == 1


@pytest.mark.slow
def test_negatives_of_each_item_of_a_history(make):
    table = make([([1, 2, None, 2],), ([],), (None,)], "h array<int>")
    found = table.add_neg_hist_seq(4, "h", 25, seed=1)
    assert found.columns == ["h", "neg_h"]
    first, empty, null = found.to_list("neg_h")
    assert [set(items) for items in first] == [{2, 3}, {1, 3}, {1, 2, 3}, {1, 3}]
    assert first[1] != first[3]
    assert {len(items) for items in first} == {25}
    assert (empty, null) == ([], None)
