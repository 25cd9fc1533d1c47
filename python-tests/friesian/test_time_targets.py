"""Tests of target encoding by time folds, and of counts, against pandas."""

import datetime

import numpy as np
import pandas as pd
import pytest

from bigdl.friesian.ops import targets as target_operators

SCHEMA = "id int, city string, kind int, label double, time bigint"


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(8)
    size = 90
    frame = pd.DataFrame(
        {
            "id": np.arange(size),
            "city": rng.choice(["oslo", "bern", "", None], size),
            "kind": pd.array(rng.integers(0, 3, size), "Int32"),
            "label": rng.choice([0.0, 1.0, 1.0, np.nan], size),
            "time": rng.integers(0, 40, size),
        }
    )
    frame.loc[rng.random(size) < 0.2, "kind"] = None
    return frame


@pytest.fixture(scope="module")
def table(make, frame):
    present = frame.astype(object).where(frame.notna(), None)
    return make([tuple(row) for row in present.itertuples(index=False)], SCHEMA)


def codes_by_time(frame, keys, edges, smooth):
    """Compute the smoothed mean of the rows in earlier folds with the same keys, row by row."""
    fold = np.searchsorted(edges, frame["time"], "right")
    present = frame[keys].astype(object).where(frame[keys].notna(), None)
    values = list(present.itertuples(index=False, name=None))
    found = []
    for mine, key in zip(fold, values, strict=True):
        is_first = mine == min(fold)
        earlier = fold == mine if is_first else fold < mine
        prior = frame["label"][earlier].mean()
        counts = not is_first and None not in key
        same = [bool(e) and counts and v == key for e, v in zip(earlier, values, strict=True)]
        labels = frame["label"][same].dropna()
        found.append((labels.sum() + prior * smooth) / (len(labels) + smooth))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True])
def test_only_earlier_rows_form_a_code(table, frame, many, monkeypatch):
    if many:
        monkeypatch.setattr(target_operators, "DRIVER_VALUES", 2)
    edges = [8, 15, 33]
    made, codes = table.target_encode_by_time(
        ["city", ["city", "kind"]], "label", "time", edges, smooth=3
    )
    assert made.columns == [*table.columns, "city_te_label", "city_kind_te_label"]
    found = made.to_pandas().sort_values("id")
    for name, keys in [("city_te_label", ["city"]), ("city_kind_te_label", ["city", "kind"])]:
        wanted = codes_by_time(frame, keys, edges, 3)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-9)
    # the codes for later data are made of all rows
    assert codes[0].out_target_mean["city_te_label"][1] == pytest.approx(frame["label"].mean())
    (oslo,) = codes[0].filter("city = 'oslo'").to_list("city_te_label")
    labels = frame[frame["city"] == "oslo"]["label"].dropna()
    assert oslo == pytest.approx((labels.sum() + frame["label"].mean() * 3) / (len(labels) + 3))


def test_a_label_of_the_future_changes_no_code(make):
    rows = [(i, "x", 0, float(i % 2), i) for i in range(20)]
    changed = [(*row[:3], 7.0, row[4]) if row[4] >= 15 else row for row in rows]
    found = []
    for each in (rows, changed):
        made, _ = make(each, SCHEMA).target_encode_by_time("city", "label", "time", [5, 10, 15])
        found.append(made.sort("id").to_list("city_te_label"))
    assert found[0] == found[1]


@pytest.mark.slow
def test_folds_of_equal_size_dates_and_given_means(make):
    days = [(i, "x", 0, 1.0, datetime.date(2024, 1, 1 + i)) for i in range(20)]
    table = make(days, SCHEMA.replace("time bigint", "time date"))
    made, _ = table.target_encode_by_time("city", "label", "time", 4, {"label": 0.0}, smooth=1)
    codes = made.sort("id").to_list("city_te_label")
    assert codes == sorted(codes)
    begins = sorted({round(code / (1 - code)) for code in codes})  # how many rows were earlier
    assert begins == pytest.approx([0, 5, 10, 15], abs=1)
    by_date, _ = table.target_encode_by_time(
        "city", "label", "time", ["2024-01-11"], {"label": 0.0}, 0, drop_cat=True, out_cols="code"
    )
    assert by_date.columns == ["id", "kind", "label", "time", "code"]
    assert by_date.sort("id").to_list("code") == [0.0] * 10 + [1.0] * 10


def test_a_null_in_the_time_fails_with_a_sentence(make):
    table = make([(1, "x", 0, 1.0, None), (2, "x", 0, 1.0, 3)], SCHEMA)
    with pytest.raises(Exception, match="The column time has nulls; drop or fill them first"):
        table.target_encode_by_time("city", "label", "time", [2])[0].compute()


@pytest.mark.slow
def test_counts_and_frequencies_are_those_of_pandas(table, frame):
    groups = ["city", ["city", "kind"]]
    made, counts = table.count_encode(groups)
    assert made.columns == [*table.columns, "city_count", "city_kind_count"]
    assert dict(made.dtypes)["city_count"] == "bigint"
    found = made.to_pandas().sort_values("id")
    pairs = frame[["city", "kind"]].dropna().value_counts()
    both = zip(frame["city"], frame["kind"], strict=True)
    wanted = [pairs.get(pair, 0) if pd.notna(pair[0]) and pd.notna(pair[1]) else 0 for pair in both]
    assert found["city_kind_count"].tolist() == wanted
    shares, _ = table.count_encode("city", normalize=True)
    expected = frame["city"].map(frame["city"].value_counts(normalize=True)).fillna(0)
    np.testing.assert_allclose(
        shares.to_pandas().sort_values("id")["city_frequency"], expected.to_numpy(float)
    )
    assert [each.columns[-2:] for each in counts] == [["count", "frequency"]] * 2


@pytest.mark.slow
def test_counts_of_other_data_are_taken(make):
    _, counts = make([("x",), ("x",), ("y",), (None,)], "c string").count_encode("c")
    test = make([("x",), ("new",), (None,)], "c string")
    found, again = test.count_encode("c", counts=counts, out_cols="n")
    assert found.to_dict() == {"c": ["x", "new", None], "n": [2, 0, 0]}
    assert again == counts
    shares, _ = test.count_encode("c", normalize=True, counts=counts[0])
    assert shares.to_list("c_frequency") == pytest.approx([2 / 3, 0, 0])


@pytest.mark.slow
def test_one_vocabulary_of_several_columns(make):
    rows = [("ann", "bob"), ("bob", "eve"), (None, "ann"), ("eve", None)]
    table = make(rows, "user string, friend string")
    found, index = table.joint_encode(["user", "friend"], name="person")
    assert index.to_dict() == {"ann": 1, "bob": 2, "eve": 3}
    assert found.to_dict() == {"user": [1, 2, None, 3], "friend": [2, 3, 1, None]}
    later = make([("eve", "new")], "user string, friend string")
    assert later.joint_encode(["user", "friend"], index=index)[0].to_dict() == {
        "user": [3],
        "friend": [None],
    }
    _, frequent = table.joint_encode(["user", "friend"], freq_limit=2, order_by_freq=True)
    assert (frequent.col_name, frequent.size()) == ("user_union", 3)
