"""Tests of point-in-time joins against plain Python and pandas."""

import datetime

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigdl.common.errors import UsageError

KEYS = st.sampled_from(["a", "b", None])
TIMES = st.one_of(st.none(), st.integers(0, 6))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.tuples(KEYS, TIMES), max_size=8),
    facts=st.dictionaries(st.tuples(KEYS, TIMES), st.one_of(st.none(), st.integers(0, 99))),
    ttl=st.one_of(st.none(), st.integers(0, 3)),
)
def test_the_latest_fact_of_the_time_is_taken(make, rows, facts, ttl):
    left = make([(*row, i) for i, row in enumerate(rows)], "k string, time bigint, n int")
    right = make([(*key, fact) for key, fact in facts.items()], "k string, time bigint, fact int")
    found = left.join_as_of(right, "k", ttl=ttl)
    assert found.columns == ["k", "time", "n", "fact"]
    values = {row.n: (row.k, row.time, row.fact) for row in found.collect()}
    assert len(values) == len(rows)
    for n, (key, now) in enumerate(rows):
        known = []
        if key is not None and now is not None:
            known = [
                (then, fact)
                for (other, then), fact in facts.items()
                if other == key and then is not None and then <= now
            ]
        then, fact = max(known, key=lambda pair: pair[0], default=(None, None))
        if ttl is not None and then is not None and now - then > ttl:
            fact = None
        assert values[n] == (key, now, fact)


def test_seconds_of_timestamps_as_in_pandas(make):
    start = datetime.datetime(2024, 1, 1)
    hours = [datetime.timedelta(hours=h) for h in range(6)]
    left = make([("a", 1, start + h) for h in hours], "k string, j int, t timestamp")
    facts = [("a", 1, start + hours[1], 10.0), ("a", 1, start + hours[4], 40.0)]
    right = make(facts, "k string, j int, t timestamp, price double")
    found = left.join_as_of(right, ["k", "j"], "t", ttl=2 * 3600).sort("t").to_list("price")
    merged = pd.merge_asof(
        pd.DataFrame({"t": [start + h for h in hours]}),
        pd.DataFrame({"t": [fact[2] for fact in facts], "price": [10.0, 40.0]}),
        on="t",
        tolerance=pd.Timedelta(hours=2),
    )
    assert found == [None if pd.isna(price) else price for price in merged["price"]]


def test_wrong_arguments_of_a_join_as_of(make):
    left, right = make([(1, 2, 3)], "k int, time int, v int"), make([(1, 2)], "k int, time int")
    for call, message in [
        (lambda: left.join_as_of(left, "k"), "Both tables have the columns"),
        (lambda: left.join_as_of(right, "k"), "has no columns except"),
        (lambda: left.join_as_of(right, "v"), "do not exist in this Table"),
        (lambda: right.join_as_of(left, "k", ttl=-1), "ttl should be a number"),
        (lambda: right.join_as_of(3, "k"), "table should be a Table"),
    ]:
        with pytest.raises(UsageError, match=message):
            call()
