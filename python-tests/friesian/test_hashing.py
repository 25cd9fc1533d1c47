"""Tests of hashes against hashlib."""

import datetime
import hashlib

import pytest
from table_reference import column

from bigdl.friesian.ops.hashing import hashes

# XXH64 with the seed 42 of "", "a" and 32 times "x".
KNOWN = [-7444071767201028348, -8582455328737087284, 1299777543150008824]


def hashed(value, bins, method="md5"):
    return int(hashlib.new(method, str(value).encode()).hexdigest(), 16) % bins


@pytest.mark.slow_cases("10")
@pytest.mark.parametrize("bins", [1, 2, 10, 1000, 2**20 - 3, 2**31 - 1])
def test_hash_of_text_is_that_of_hashlib(messy, rows, bins):
    found = messy.hash_encode("city", bins)
    assert found.columns == messy.columns
    assert dict(found.dtypes)["city"] == "int"
    assert found.to_list("city") == [hashed(v, bins) for v in column(rows, "city")]


@pytest.mark.parametrize("method", ["sha1", "sha224", "sha256", "sha384", "sha512", "sha3_256"])
def test_other_hash_functions(messy, rows, method):
    found = messy.hash_encode("city", 12345, method).to_list("city")
    assert found == [hashed(v, 12345, method) for v in column(rows, "city")]


def test_values_are_hashed_as_python_writes_them(messy, rows):
    names = ["item", "price", "weight", "flag", "small", "history"]
    found = messy.hash_encode(names, 99).to_dict()
    for name in names:
        assert found[name] == [hashed(v, 99) for v in column(rows, name)], name


@pytest.mark.slow
def test_days_and_times_are_hashed_as_python_writes_them(make):
    day, time = datetime.date(2020, 2, 1), datetime.datetime(2020, 2, 1, 3, 4, 5)
    found = make([(day, time), (None, None)], "d date, t timestamp_ntz").hash_encode(["d", "t"], 97)
    assert found.to_list("d") == [hashed(day, 97), hashed(None, 97)]
    assert found.to_list("t") == [hashed(time, 97), hashed(None, 97)]


@pytest.mark.slow
def test_the_fast_hash_spreads_values(make):
    found = make([(str(i),) for i in range(300)], "v string").hash_encode("v", 10, "xxhash64")
    counts = [found.to_list("v").count(i) for i in range(10)]
    assert sum(counts) == 300
    assert min(counts) > 10


@pytest.mark.slow
def test_cross_hashes_the_values_behind_each_other(messy, rows):
    def wanted(names, bins, sep=""):
        for values in zip(*(column(rows, name) for name in names), strict=True):
            text = None if None in values else sep.join(map(str, values))
            yield hashed(text, bins)

    found = messy.cross_hash_encode(
        [["city", "item"], ["city", "tags", "user"]], [100, 200], [None, "both"]
    )
    assert found.columns == [*messy.columns, "city_item", "both"]
    assert found.to_list("city_item") == list(wanted(["city", "item"], 100))
    assert found.to_list("both") == list(wanted(["city", "tags", "user"], 200))
    flat = messy.cross_columns(["city", "item"], 100)
    assert flat.to_list("city_item") == list(wanted(["city", "item"], 100))
    apart = messy.cross_columns([["city", "item"]], [100], ["x"], sep="|")
    assert apart.to_list("x") == list(wanted(["city", "item"], 100, "|"))


def test_the_fast_hash_is_that_of_spark(make):
    """Test XXH64 for each class of input lengths."""
    texts = ["Zürich"[: n % 7] + "x" * n for n in range(100)]
    found = make([(text,) for text in texts], "v string")
    bins = 2**31 - 1
    expected = hashes([text.encode() for text in texts]) % bins
    assert found.hash_encode("v", bins, "xxhash64").to_list("v") == expected.tolist()
    assert hashes([b"", b"a", b"x" * 32]).tolist() == KNOWN
    assert hashes([]).tolist() == []
