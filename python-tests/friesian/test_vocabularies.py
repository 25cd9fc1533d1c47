"""Tests of vocabularies and look-ups against plain Python."""

import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from table_reference import assert_same, column, is_present

from bigdl.friesian.feature import FeaturePipeline, FeatureTable, StringIndex
from bigdl.friesian.feature.table import Table
from bigdl.friesian.ops import vocabulary
from bigdl.orca.cluster.versions import to_arrow
from bigdl.testing.operators import assert_executors_agree


def vocabulary_of(values, limit=0, by_frequency=False):
    counts = Counter(value for value in values if is_present(value))
    kept = sorted(value for value, count in counts.items() if count >= limit)
    if by_frequency:
        kept.sort(key=lambda value: -counts[value])  # stable
    return {value: number for number, value in enumerate(kept, 1)}


def tokens(cells, sep=","):
    return [token for cell in cells if cell is not None for token in re.split(sep, cell)]


@pytest.mark.parametrize("by_frequency", [False, True])
def test_numbers_follow_the_values_or_their_counts(messy, rows, by_frequency):
    names = ["city", "item", "price", "small", "flag"]
    found = messy.gen_string_idx(names, freq_limit=2, order_by_freq=by_frequency)
    assert [index.col_name for index in found] == names
    for name, index in zip(names, found, strict=True):
        wanted = vocabulary_of(column(rows, name), 2, by_frequency)
        assert index.to_dict() == wanted
        assert index.columns == [name, "id"]
        assert dict(index.dtypes)[name] == dict(messy.dtypes)[name]
        assert dict(index.dtypes)["id"] == "int"


def test_numbers_are_the_same_for_any_partitions(messy):
    wanted = messy.gen_string_idx("city", order_by_freq=True).to_dict()
    assert messy.repartition(7).gen_string_idx("city", order_by_freq=True).to_dict() == wanted


@pytest.mark.slow
def test_limits_of_some_columns(messy, rows):
    city, tags = messy.gen_string_idx(["city", "tags"], freq_limit={"city": 9})
    assert city.to_dict() == vocabulary_of(column(rows, "city"), 9)
    assert tags.to_dict() == vocabulary_of(column(rows, "tags"))
    assert isinstance(messy.gen_string_idx("city", freq_limit=10**6), StringIndex)
    assert messy.gen_string_idx("city", freq_limit=10**6).to_dict() == {}


def test_one_vocabulary_of_several_columns(messy, rows):
    both = column(rows, "city") + column(rows, "tags")
    union, named, plain = messy.gen_string_idx(
        [
            {"src_cols": ["city", "tags"]},
            {"src_cols": ["city", "tags"], "col_name": "word"},
            "city",
        ],
        order_by_freq=True,
    )
    assert union.col_name == "city_union"
    assert named.col_name == "word"
    assert union.to_dict() == named.to_dict() == vocabulary_of(both, by_frequency=True)
    assert plain.to_dict() == vocabulary_of(column(rows, "city"), by_frequency=True)
    encoded = messy.encode_string("tags", named.rename({"word": "tags"}))
    assert_same(encoded.to_list("tags"), map(union.to_dict().get, column(rows, "tags")))


@pytest.mark.slow
def test_cells_of_several_values(messy, rows):
    single, union = messy.gen_string_idx(
        ["tags", {"src_cols": ["tags", "city"]}], do_split=True, order_by_freq=True
    )
    assert single.to_dict() == vocabulary_of(tokens(column(rows, "tags")), by_frequency=True)
    both = tokens(column(rows, "tags")) + tokens(column(rows, "city"))
    assert union.to_dict() == vocabulary_of(both, by_frequency=True)
    spaced = messy.gen_string_idx("tags", do_split=True, sep="[,b]")
    assert spaced.to_dict() == vocabulary_of(tokens(column(rows, "tags"), "[,b]"))


@pytest.mark.slow
def test_many_values_are_ranked_by_spark_alike(messy, monkeypatch):
    names = ["city", "item"]
    wanted = [each.to_dict() for each in messy.gen_string_idx(names, order_by_freq=True)]
    by_value = [each.to_dict() for each in messy.gen_string_idx(names)]
    monkeypatch.setattr(vocabulary, "DRIVER_VALUES", 3)
    assert [each.to_dict() for each in messy.gen_string_idx(names, order_by_freq=True)] == wanted
    assert [each.to_dict() for each in messy.gen_string_idx(names)] == by_value


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["broadcast", "too large to collect", "no broadcast"])
def test_encode_keeps_places_and_gives_null_for_the_unknown(messy, rows, plan, monkeypatch):
    if plan == "too large to collect":
        monkeypatch.setattr(vocabulary, "DRIVER_KEYS", 2)
    names = ["price", "city", "item", "flag"]
    indices = messy.gen_string_idx(names, freq_limit=6)
    found = messy.encode_string(names, indices, broadcast=plan != "no broadcast")
    assert found.columns == messy.columns
    for name, index in zip(names, indices, strict=True):
        assert dict(found.dtypes)[name] == "int"
        wanted = vocabulary_of(column(rows, name), 6)
        assert index.to_dict() == wanted
    values = found.to_dict()
    assert Counter(values["user"]) == Counter(column(rows, "user"))
    encoded = Counter(map(repr, zip(*(values[name] for name in names), strict=True)))
    wanted = [
        [vocabulary_of(column(rows, name), 6).get(value) for value in column(rows, name)]
        for name in names
    ]
    assert encoded == Counter(map(repr, zip(*wanted, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["arrow", "joins"])
def test_encode_of_cells_of_several_values(messy, rows, plan, monkeypatch):
    if plan == "joins":
        monkeypatch.setattr(vocabulary, "DRIVER_KEYS", 0)
    numbers = {"b": 1, "a": 2, "c": 3, "": 4}
    cells = Counter(column(rows, "tags"))

    def known(cell):
        found = [numbers[t] for t in cell.split(",") if t in numbers] if cell is not None else []
        return found or None

    found = messy.encode_string("tags", numbers, do_split=True)
    assert dict(found.dtypes)["tags"] == "array<int>"
    assert found.columns == messy.columns
    wanted = Counter(repr(known(cell)) for cell in cells.elements())
    assert Counter(map(repr, found.to_list("tags"))) == wanted
    ordered = messy.encode_string("tags", numbers, do_split=True, sort_for_array=True)
    wanted = Counter(repr(known(cell) and sorted(known(cell))) for cell in cells.elements())
    assert Counter(map(repr, ordered.to_list("tags"))) == wanted
    first = messy.encode_string("tags", numbers, do_split=True, keep_most_frequent=True)
    wanted = Counter(known(cell) and min(known(cell)) for cell in cells.elements())
    assert Counter(first.to_list("tags")) == wanted


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=10),
    known=st.dictionaries(st.text(max_size=3), st.integers(-(2**31), 2**31 - 1), max_size=5),
)
def test_encode_is_a_look_up(make, values, known):
    table = make([(value,) for value in values], "v string").coalesce(1)
    assert table.encode_string("v", known).to_list("v") == [known.get(each) for each in values]


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", [True, False])
def test_unknown_values_can_share_numbers_behind_the_known_ones(make, broadcast):
    values = ["x", "y", None, *(f"new{i}" for i in range(40))]
    table = make([(value,) for value in values], "v string")
    found = table.append_column("was", table.col("v")).encode_string(
        "v", {"x": 3, "y": 1}, broadcast=broadcast, oov_buckets=4
    )
    numbers = dict(zip(found.to_list("was"), found.to_list("v"), strict=True))
    assert (numbers["x"], numbers["y"], numbers[None]) == (3, 1, None)
    assert {numbers[value] for value in values[3:]} == {4, 5, 6, 7}
    assert dict(found.dtypes)["v"] == "int"


@pytest.mark.slow
def test_names_that_an_operator_uses_may_be_taken(make):
    schema = "id int, row_id int, rank int, key int, value int, v string"
    table = make([(1, 2, 3, 4, 5, "x")], schema)
    for broadcast in (True, False):
        found = table.encode_string("v", {"x": 9}, broadcast=broadcast)
        assert found.to_dict() == {
            "id": [1],
            "row_id": [2],
            "rank": [3],
            "key": [4],
            "value": [5],
            "v": [9],
        }


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_value_that_is_twice_in_an_index_does_not_multiply_rows(make, orca_spark, broadcast):
    df = orca_spark.createDataFrame(
        [("x", 7), ("x", 3), (None, 1), ("y", None)], "v string, id int"
    )
    table = make([("x",), ("y",), (None,)], "v string")
    found = table.encode_string("v", StringIndex(df, "v"), broadcast=broadcast)
    assert sorted(map(str, found.to_list("v"))) == ["3", "None", "None"]


@pytest.mark.slow
def test_numbers_are_found_by_text_and_text_by_numbers(make, orca_spark):
    table = make([(1, "1", 1.0), (2, "x", 2.5), (300, None, None)], "i int, s string, d double")
    found = table.encode_string(["i", "s"], [{"1": 5, "300": 6}, {"1": 5}])
    assert found.to_list("i") == [5, None, 6]
    index = orca_spark.createDataFrame([(1, 5), (2, 6)], "s int, id int")
    for broadcast in (True, False):
        found = table.encode_string("s", StringIndex(index, "s"), broadcast=broadcast)
        assert sorted(map(str, found.to_list("s"))) == ["5", "None", "None"]
    halves = StringIndex(index.withColumnRenamed("s", "d"), "d")
    assert table.encode_string("d", halves).to_list("d") == [5, None, None]


@pytest.mark.slow
def test_an_index_is_not_changed_by_its_use(messy):
    index = messy.gen_string_idx("city")
    before = index.df
    messy.encode_string("city", index, broadcast=True)
    assert index.df is before


@pytest.mark.slow
def test_category_encode_learns_and_applies(messy, rows):
    table, index = messy.category_encode("city", freq_limit=3, order_by_freq=True)
    wanted = vocabulary_of(column(rows, "city"), 3, by_frequency=True)
    assert index.to_dict() == wanted
    assert_same(table.to_list("city"), map(wanted.get, column(rows, "city")))
    table, indices = messy.category_encode(["city", "tags"], do_split=True)
    assert [each.col_name for each in indices] == ["city", "tags"]
    assert dict(table.dtypes)["tags"] == "array<int>"


def test_vocabularies_with_null(messy, rows):
    found = messy.get_vocabularies(["city", "item"])
    for name in ("city", "item"):
        values = column(rows, name)
        assert found[name] == [*sorted({v for v in values if v is not None}), None]


@pytest.mark.slow
def test_reindex_by_frequency(messy, rows):
    mappings = messy.gen_reindex_mapping(["item", "city"], freq_limit=4)
    assert [each.columns for each in mappings] == [["item", "item_new"], ["city", "city_new"]]
    found = messy.reindex(["item", "city"], mappings)
    assert found.columns == messy.columns
    for name in ("item", "city"):
        wanted = vocabulary_of(column(rows, name), 4, by_frequency=True)
        numbers = [None if v is None else wanted.get(v, 0) for v in column(rows, name)]
        assert_same(found.to_list(name), numbers)
    (one,) = messy.gen_reindex_mapping("item", {"item": 1})
    assert one.size() == len(vocabulary_of(column(rows, "item")))
    found = messy.reindex("item", one).to_list("item")
    assert [each is None for each in found] == [v is None for v in column(rows, "item")]
    assert messy.reindex("item", one).df.columns == messy.df.columns


@pytest.mark.slow
def test_value_features_of_items_histories_and_nested_histories(make):
    schema = "item int, item_hist array<int>, neg_item_hist array<array<int>>"
    rows = [
        (1, [1, 2, None], [[1, 9], [], None]),
        (9, [], []),
        (None, None, None),
    ]
    pairs = make([(1, 10), (2, 20), (3, None), (None, 5)], "item int, category int")
    names = ["item", "item_hist", "neg_item_hist"]
    found = make(rows, schema).add_value_features(names, pairs, key="item", value="category")
    assert found.columns == [*names, "category", "category_hist", "neg_category_hist"]
    assert found.to_list("category") == [10, 0, 0]
    assert found.to_list("category_hist") == [[10, 20, 0], [], None]
    assert found.to_list("neg_category_hist") == [[[10, 0], [], None], [], None]


def test_value_features_by_the_first_two_columns_or_by_name(make, monkeypatch):
    table = make([(1,), (2,)], "k int")
    by_place = make([(1, 7), (2, 8)], "a int, b int")
    assert table.add_value_features("k", by_place, "k", "v").to_dict() == {"k": [1, 2], "v": [7, 8]}
    by_name = make([(7, "x", 1)], "v int, other string, k int")
    found = table.add_value_features("k", by_name, "k", "v")
    assert found.to_list("v") == [7, 0]
    monkeypatch.setattr(vocabulary, "DRIVER_KEYS", 0)
    joined = table.add_value_features("k", by_name, "k", "v")
    assert sorted(joined.to_list("v")) == [0, 7]


@pytest.mark.slow
def test_string_index_from_a_dict_and_a_file(make, tmp_path):
    numbers = {"x": 2, "y": 1}
    index = StringIndex.from_dict(numbers, "letter")
    assert index.columns == ["letter", "id"]
    index.write_parquet(str(tmp_path))
    assert (tmp_path / "letter.parquet").is_dir()
    read = StringIndex.read_parquet(str(tmp_path / "letter.parquet"))
    assert read.col_name == "letter"
    assert read.to_dict() == numbers
    assert StringIndex.read_parquet([str(tmp_path / "letter.parquet")], "letter").size() == 2
    with refused("column-missing", "DataFrame"):
        StringIndex.read_parquet(str(tmp_path / "letter.parquet"), "other")
    assert isinstance(index.cast("id", "long"), StringIndex)
    assert isinstance(index.limit(1), StringIndex)
    assert type(index.select("id")) is Table


def test_an_empty_table_has_empty_vocabularies(make):
    empty = make([], "a string, b int")
    table, indices = empty.category_encode(["a", "b"])
    assert [index.to_dict() for index in indices] == [{}, {}]
    assert table.dtypes == [("a", "int"), ("b", "int")]
    assert empty.get_vocabularies("a") == {"a": []}
    assert isinstance(table, FeatureTable)


def test_a_column_called_id_has_a_vocabulary(make, tmp_path):
    table = make([(30, "a"), (10, "b"), (30, "c"), (None, "d")], "id int, x string")
    encoded, index = table.category_encode("id", order_by_freq=True)
    assert encoded.to_dict() == {"id": [1, 2, 1, None], "x": ["a", "b", "c", "d"]}
    assert (index.columns, index.to_dict()) == (["id", "id_number"], {30: 1, 10: 2})
    index.write_parquet(str(tmp_path))
    read = StringIndex.read_parquet(str(tmp_path / "id.parquet"))
    assert table.encode_string("id", read).to_list("id") == [1, 2, 1, None]
    renamed = read.rename({"id": "user"})
    assert (renamed.col_name, renamed.columns) == ("user", ["user", "id"])
    assert renamed.rename({"user": "id"}).columns == ["id", "id_number"]
    assert StringIndex.from_dict({"a": 7}, "id").to_dict() == {"a": 7}
    with refused("column-missing", "id_number"):
        table.encode_string("id", Table(read.df).rename({"id_number": "number"}))


LISTS = [(1, ["b", "a", None], [20, 10], "x"), (2, [], [], "y"), (3, None, None, "x")]
LISTS += [(4, ["a"], [20], None)]


@pytest.fixture
def listed(make):
    return make(LISTS, "id int, tags array<string>, n array<bigint>, city string")


def test_arrays_of_categories_are_encoded_value_by_value(listed):
    table, indices = listed.category_encode(["tags", "n", "city"])
    assert table.dtypes[1:] == [("tags", "array<int>"), ("n", "array<int>"), ("city", "int")]
    assert table.to_list("tags") == [[2, 1], [], None, [1]]
    assert table.to_list("n") == [[2, 1], [], None, [2]]
    assert table.to_list("city") == [1, 2, 1, None]
    assert indices[0].to_dict() == {"a": 1, "b": 2}
    assert listed.gen_string_idx("tags", order_by_freq=True, freq_limit=2).to_dict() == {"a": 1}
    union = listed.gen_string_idx({"src_cols": ["tags", "city"], "col_name": "all"})
    assert union.to_dict() == {"a": 1, "b": 2, "x": 3, "y": 4}
    assert listed.encode_string("tags", {"a": 7}).to_list("tags") == [[7], [], None, [7]]
    smallest = listed.category_encode("tags", keep_most_frequent=True)[0]
    assert smallest.to_list("tags") == [1, None, None, 1]
    ordered = listed.category_encode("tags", sort_for_array=True)[0]
    assert ordered.to_list("tags") == [[1, 2], [], None, [1]]


@pytest.mark.parametrize("options", [{}, {"sort_for_array": True}, {"keep_most_frequent": True}])
def test_pipelines_encode_arrays_alike_by_spark_by_files_and_row_by_row(listed, tmp_path, options):
    pipeline = FeaturePipeline().category_encode(["tags", "n"], **options)
    found = assert_executors_agree(pipeline, listed.df.sparkSession, tmp_path, to_arrow(listed.df))
    if not options:
        assert found["tags"].to_pylist() == [[2, 1], [], None, [1]]
