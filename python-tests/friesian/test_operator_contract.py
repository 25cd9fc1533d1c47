"""Tests that every operator passes the published operator contract."""

import datetime

import pyarrow as pa
import pytest

from bigdl.friesian.ops.cells import Cast, Drop, DropNa, FillMedian, FillNa, Filter, Rename, Select
from bigdl.friesian.ops.hashing import CrossColumns, HashEncode
from bigdl.friesian.ops.numbers import Clip, CutBins, Log, MinMaxScale, OneHotEncode
from bigdl.friesian.ops.operator import OPERATORS
from bigdl.friesian.ops.sequences import (
    AddHistSeq,
    AddNegativeSamples,
    AddNegHistSeq,
    Mask,
    PadSequences,
)
from bigdl.friesian.ops.targets import CountEncode, TargetEncode
from bigdl.friesian.ops.vocabulary import CategoryEncode
from bigdl.testing.operators import OperatorContract

SCHEMA = pa.schema(
    [
        ("user", pa.int64()),
        ("kind", pa.int32()),
        ("price", pa.float64()),
        ("city", pa.string()),
        ("flag", pa.bool_()),
        ("day", pa.date32()),
        ("items", pa.list_(pa.int32())),
    ]
)


def table(*rows):
    days = [None if row[5] is None else datetime.date(2024, 5, row[5]) for row in rows]
    columns = [list(each) for each in zip(*rows, strict=True)]
    columns[5] = days
    return pa.table(columns, SCHEMA)


class OfCells(OperatorContract):
    rows = table(
        (1, 0, 2.5, "Rome", True, 1, [3, 1]),
        (1, 2, -1.0, "Oslo", False, 3, []),
        (2, None, None, "Rome", None, 1, [2]),
        (3, 2, 7.25, None, True, None, None),
        (2, 1, 0.0, "Bern", True, 2, [1, None, 1, 4]),
    )
    unknown = table((9, 8, 1e6, "Zürich", True, 9, [9, 3, 9]), (-4, -1, -1e6, "", False, 1, [7]))

    @pytest.fixture(autouse=True)
    def _session(self, orca_spark):
        """Return the shared Spark session."""


class TestNumbers(OfCells):
    tolerance = 1e-14
    operators = (
        FillNa(0, None),
        FillMedian(["price"]),
        Clip(["kind", "price"], -0.5, 2),
        Log(["price"], True),
        MinMaxScale(["price"], -1, 2, False),
        CutBins.of("price", 3, ["a", "b", "c", "d", "e"], None, drop=True),
        CutBins.of("kind", [0, 2], None, "kind", drop=False),
        OneHotEncode(["kind"], None, ["kind"], False),
    )


class TestColumns(OfCells):
    operators = (
        Cast(["kind", "flag"], "string"),
        Rename({"kind": "price", "price": "kind"}),
        Drop(["kind", "none"]),
        Select(["price", "user"]),
    )


class TestCategories(OfCells):
    operators = (
        HashEncode(["flag", "city", "day"], 1000, "md5"),
        HashEncode(["flag", "city", "day"], 1000, "xxhash64"),
        CrossColumns.of([["city", "flag"]], [100], None, "md5", "_"),
        CategoryEncode.of(["city", "items"], None, True, False, ",", True, False, True, 0),
        CategoryEncode.of(["city", "user"], 2, False, False, ",", False, False, True, 3),
        CountEncode.of(["city", ["flag", "user"]], False, None),
        TargetEncode.of("city", ["price"], None, None, 2.0, True),
    )


class TestArrays(OfCells):
    operators = (Mask(["items"], 3), PadSequences(["items"], 3, 0, 0))


class TestTables(OfCells):
    has_nulls = False  # a history needs a time
    rows = OfCells.rows.slice(0, 3)
    operators = (
        Filter("price > 0"),
        DropNa(["price"], "any", None),
        AddHistSeq(["kind"], "user", "day", 1, 10, 5),
        AddNegativeSamples(9, "kind", "label", 2, 5, "items", "user", 0.75),
        AddNegHistSeq(9, "items", 2, 5),
    )


def test_every_operator_is_tried():
    suites = OfCells.__subclasses__()
    # An example in a docstring may have registered another one.
    ours = {n for n, each in OPERATORS.items() if each.__module__.startswith("bigdl.friesian.ops")}
    assert {each.method for suite in suites for each in suite.operators} == ours
