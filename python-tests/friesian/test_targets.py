"""Tests of target encoding against plain Python."""

import pytest
from table_reference import assert_same, column, is_present

from bigdl.common.errors import UsageError
from bigdl.friesian.feature import TargetCode
from bigdl.friesian.ops import targets as target_operators


def mean(values):
    present = [v for v in values if is_present(v)]
    return sum(present) / len(present)


def code(values, prior, smooth):
    present = [v for v in values if is_present(v)]
    if not present:
        return prior
    return (sum(present) + prior * smooth) / (len(present) + smooth)


def out_of_fold(keys, targets, folds, smooth):
    prior = mean(targets)
    rows = list(zip(keys, targets, folds, strict=True))
    for key, _, fold in rows:
        rest = [t for k, t, f in rows if k == key and f != fold]
        yield code(rest, prior, smooth) if None not in key else prior


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("many", [False, True])
def test_a_row_does_not_help_to_form_its_own_code(messy, rows, many, monkeypatch):
    if many:
        monkeypatch.setattr(target_operators, "DRIVER_VALUES", 2)
    table = messy.append_column("fold", messy.col("time") % 3).cast("fold", "int")
    folds = [time % 3 for time in column(rows, "time")]
    groups = ["city", ["city", "user"]]
    found, codes = table.target_encode(
        groups, ["age", "price"], smooth=5, kfold=3, fold_col="fold", drop_cat=False
    )
    added = ["city_te_age", "city_te_price", "city_user_te_age", "city_user_te_price"]
    assert found.columns == [*messy.columns, "fold", *added]
    values = found.to_dict()
    cities = [(city,) for city in column(rows, "city")]
    both = list(zip(column(rows, "city"), column(rows, "user"), strict=True))
    for name, keys, goal in [
        ("city_te_age", cities, "age"),
        ("city_user_te_price", both, "price"),
    ]:
        wanted = out_of_fold(keys, column(rows, goal), folds, 5)
        ids = list(
            zip(column(rows, "user"), column(rows, "time"), column(rows, "city"), strict=True)
        )
        theirs = list(zip(values["user"], values["time"], values["city"], strict=True))
        expected = sorted(zip(map(repr, ids), wanted, strict=True))
        got = sorted(zip(map(repr, theirs), values[name], strict=True))
        assert [a for a, _ in got] == [a for a, _ in expected]
        assert_same([b for _, b in got], [b for _, b in expected], 1e-9)
    assert [each.cat_col for each in codes] == ["city", ["city", "user"]]
    prior = mean(column(rows, "age"))
    assert codes[0].out_target_mean["city_te_age"] == ("age", pytest.approx(prior))
    for row in codes[0].collect():
        ages = [
            a
            for c, a in zip(column(rows, "city"), column(rows, "age"), strict=True)
            if c == row.city
        ]
        assert row["city_te_age"] == pytest.approx(code(ages, prior, 5))
        assert row["target_encode_count"] == len(ages)


def test_one_fold_gives_every_row_the_code_of_all(messy, rows):
    found, (codes,) = messy.target_encode("city", "age", kfold=1, smooth=0, target_mean={"age": 7})
    cities, ages = column(rows, "city"), column(rows, "age")
    wanted = [
        code([a for c, a in zip(cities, ages, strict=True) if c == city], 7, 0)
        if city is not None
        else 7.0
        for city in cities
    ]
    assert_same(found.to_list("city_te_age"), wanted, 1e-9)
    assert codes.out_target_mean == {"city_te_age": ("age", 7.0)}


@pytest.mark.slow
def test_folds_are_made_in_turn_or_by_chance_and_left_out(messy):
    found, _ = messy.target_encode("city", "age")
    assert found.columns == [*messy.columns, "city_te_age"]
    kept, _ = messy.target_encode(
        "city", "age", kfold=4, fold_seed=3, drop_fold=False, out_cols="x"
    )
    assert kept.columns == [*messy.columns, "__fold__", "x"]
    assert set(kept.to_list("__fold__")) == {0, 1, 2, 3}
    dropped, _ = messy.target_encode(
        ["city", "item"], ["age", "price"], drop_cat=True, out_cols=[["a", "b"], ["c", "d"]]
    )
    assert dropped.columns[-4:] == ["a", "b", "c", "d"]
    assert not {"city", "item"} & set(dropped.columns)


@pytest.mark.slow
def test_a_category_of_one_fold_has_the_mean(make):
    table = make([("x", 1, 0), ("x", 1, 0), ("y", 0, 0), ("y", 1, 1)], "c string, y int, f int")
    found, _ = table.target_encode("c", "y", fold_col="f", smooth=0)
    assert found.columns == ["c", "y", "f", "c_te_y"]
    assert_same(sorted(found.to_list("c_te_y")), [0.0, 0.75, 0.75, 1.0])


@pytest.mark.slow
def test_codes_are_applied_to_new_data(make):
    train = make([("x", 1, 2.0), ("x", 0, 4.0), ("y", 1, None)], "c string, y int, z double")
    _, codes = train.target_encode("c", ["y", "z"], kfold=2, smooth=0)
    test = make([("x",), ("new",), (None,)], "c string")
    found = test.encode_target(codes, drop_cat=False)
    assert found.columns == ["c", "c_te_y", "c_te_z"]
    assert_same(found.to_list("c_te_y"), [0.5, 2 / 3, 2 / 3], 1e-9)
    assert_same(found.to_list("c_te_z"), [3.0, 3.0, 3.0], 1e-9)
    assert test.encode_target(codes[0], target_cols="z").columns == ["c_te_z"]


@pytest.mark.slow
def test_names_of_codes_can_be_changed(make):
    df = make([("x", 1, 0.5)], "c string, target_encode_count int, out double").df
    means = {"out": ("y", 0.25)}
    codes = TargetCode(df, "c", means)
    renamed = codes.rename({"c": "k", "out": "code"})
    assert renamed.cat_col == "k"
    assert renamed.out_target_mean == {"code": ("y", 0.25)}
    assert (codes.cat_col, means) == ("c", {"out": ("y", 0.25)})
    assert isinstance(codes.limit(1), TargetCode)
    assert not isinstance(codes.drop("out"), TargetCode)
    table = make([("x",), ("z",)], "k string").encode_target(renamed)
    assert table.to_dict() == {"code": [0.5, 0.25]}


@pytest.fixture(scope="module")
def clicks(make):
    rows = [(1, 1, 5), (1, 0, 6), (2, 1, 7), (3, 0, 8)]
    table = make(rows, "c int, l int, x int")
    table.df.cache()
    return table


@pytest.mark.slow
def test_counts_can_take_the_place_of_their_categories(clicks, make):
    found, counts = clicks.count_encode("c", out_cols="c")
    assert found.columns == ["c", "l", "x"]
    assert found.to_list("c") == [2, 2, 1, 1]
    again, _ = clicks.count_encode(["c", ["c", "l"]], out_cols=["l", "c"])
    assert again.to_dict() == {"c": [1, 1, 1, 1], "l": [2, 2, 1, 1], "x": [5, 6, 7, 8]}
    texts = make([("a",), ("b",), ("a",)], "c string")
    assert texts.count_encode("c", out_cols="c")[0].to_list("c") == [2, 1, 2]
    twice = counts[0].concat(counts[0])
    assert clicks.count_encode("c", counts=twice)[0].to_list("c_count") == [2, 2, 1, 1]


@pytest.mark.slow
def test_codes_can_take_the_place_of_their_categories(clicks):
    found, codes = clicks.target_encode("c", "l", out_cols="c", kfold=1, smooth=0)
    assert found.to_dict() == {"c": [0.5, 0.5, 1.0, 0.0], "l": [1, 0, 1, 0], "x": [5, 6, 7, 8]}
    for drop_cat in (True, False):
        applied = clicks.encode_target(codes, drop_cat=drop_cat)
        assert applied.to_dict() == found.to_dict()
    renamed = codes[0].rename({"c": "k"})
    assert clicks.rename({"c": "k"}).encode_target(renamed).to_list("k") == [0.5, 0.5, 1.0, 0.0]
    assert isinstance(codes[0].limit(1), TargetCode)


@pytest.mark.slow
def test_no_code_is_made_of_another_code(clicks):
    found, codes = clicks.target_encode(
        ["c", "l"], "x", out_cols=["l", "k"], kfold=1, smooth=0, drop_cat=True
    )
    wanted = {"l": [5.5, 5.5, 7.0, 8.0], "x": [5, 6, 7, 8], "k": [6.0, 7.0, 6.0, 7.0]}
    assert found.to_dict() == wanted
    assert clicks.encode_target(codes).to_dict() == wanted


def test_a_category_that_a_target_code_has_twice_does_not_multiply_rows(make):
    rows = [("x", 1, 0.25), ("x", 5, 0.5), ("y", 1, 0.75)]
    df = make(rows, "c string, target_encode_count int, out double").df
    table = make([("x",), ("y",), ("z",)], "c string")
    found = table.encode_target(TargetCode(df, "c", {"out": ("y", 0.0)}), drop_cat=False)
    assert found.to_dict() == {"c": ["x", "y", "z"], "out": [0.5, 0.75, 0.0]}


@pytest.mark.slow
def test_wrong_names_of_codes_are_refused(clicks, make):
    _, codes = clicks.target_encode("c", "l", kfold=1)
    for call, message in [
        (lambda: clicks.encode_target(codes, "typo"), "targets have no codes of ['typo']"),
        (lambda: clicks.encode_target(codes * 2), "The codes of targets should differ"),
        (lambda: TargetCode(codes[0].df, "c", {}, ["c", "l"]), "key_cols should be as many"),
        (
            lambda: make([(1,)], "count int").count_encode("count"),
            "The columns ['count'] cannot be counted",
        ),
    ]:
        with pytest.raises(UsageError) as caught:
            call()
        assert message in str(caught.value)
