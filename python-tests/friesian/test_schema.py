"""Tests of table schemas for sizing models."""

import pytest
from table_reference import column, is_present

from bigdl.common.errors import UsageError
from bigdl.friesian.feature import Feature, FeatureSchema


def test_the_schema_has_sizes_types_and_lengths(messy, rows):
    schema = messy.pad("history", 4).feature_schema()
    items = [item for item in column(rows, "item") if item is not None]
    histories = [each for each in column(rows, "history") if each]
    largest = max(x for each in histories for x in each[-4:] if is_present(x))
    assert list(schema) == messy.columns
    assert schema["item"] == Feature("int", max(items) + 1)
    assert schema["age"] == Feature("int", None)  # has negative values
    assert schema["price"] == Feature("double")
    assert schema["city"] == Feature("string")
    assert schema["history"] == Feature("int", largest + 1, (4,))
    assert messy.feature_schema("history")["history"].shape == (None,)


def test_nested_empty_and_missing_arrays(make):
    rows = [([[1, 2], [3, None]],), (None,), ([[4, 5], None],)]
    nested = make(rows, "a array<array<int>>").feature_schema()
    assert nested["a"] == Feature("int", 6, (2, 2))
    empty = make([([],), (None,)], "a array<array<int>>").feature_schema()
    assert empty["a"] == Feature("int", 0, (0, None))
    nothing = make([(None, None)], "n int, x float").feature_schema()
    assert nothing == {"n": Feature("int", 0), "x": Feature("float")}


def test_a_schema_travels_as_json_and_fits_two_tables():
    one = FeatureSchema({"a": Feature("int", 5, (3,)), "b": Feature("float")})
    two = FeatureSchema({"a": Feature("int", 9, (4,)), "c": Feature("string")})
    assert FeatureSchema.from_json(one.to_json()) == one
    both = one.union(two)
    assert both == {
        "a": Feature("int", 9, (None,)),
        "b": Feature("float"),
        "c": Feature("string"),
    }
    assert (one.cardinality("a"), one.length("a")) == (5, 3)
    for call, message in [
        (lambda: one["x"], "The schema has no column 'x'; it has ['a', 'b']"),
        (lambda: one.cardinality("b"), "encode it first"),
        (lambda: one.length("b"), "holds single values; pad it"),
        (lambda: both.length("a"), "holds arrays of different lengths; pad it"),
        (lambda: one.union(FeatureSchema({"b": Feature("int", 3)})), "in the other"),
    ]:
        with pytest.raises(UsageError) as caught:
            call()
        assert message in str(caught.value)
