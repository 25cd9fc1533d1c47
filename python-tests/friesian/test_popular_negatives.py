"""Tests of negative sampling by popularity, and without the user's items."""

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigdl.friesian.ops.sequences import drawn_negatives

SCHEMA = "user int, item int, seen array<int>"


@pytest.fixture(scope="module")
def clicks(make):
    """Return 300 records of 20 users, one of them null; every third record has item 1."""
    rng = np.random.default_rng(3)
    items = np.where(rng.random(300) < 1 / 3, 1, rng.integers(2, 10, 300))
    rows = [
        (None if u == 7 else int(u), None if i == 9 else int(i), [2, None] if u % 2 else None)
        for u, i in zip(rng.integers(0, 20, 300), items, strict=True)
    ]
    return rows, make(rows, SCHEMA)


def negatives_of(table):
    rows = [(r.user, r.item, r.seen, r.label) for r in table.collect()]
    return [row[:3] for row in rows if row[3] == 0], [row[:3] for row in rows if row[3] == 1]


@pytest.mark.slow_cases("0.75")
@pytest.mark.parametrize("popularity", [None, 0.75])
def test_what_a_user_had_is_not_drawn(clicks, popularity):
    rows, table = clicks
    options = {"user_col": "user", "exclude_history_col": "seen", "popularity": popularity}
    drawn, kept = negatives_of(table.add_negative_samples(12, neg_num=3, seed=1, **options))
    had = defaultdict(set)
    for user, item, _ in rows:
        if user is not None:
            had[user].add(item)
    assert Counter(map(repr, kept)) == Counter(map(repr, rows))
    assert drawn
    for user, item, seen in drawn:
        assert 1 <= item < 12
        assert item not in had[user]
        assert item not in (seen or [])
    if popularity is not None:  # items that nobody had are not drawn
        assert {item for _, item, _ in drawn} <= {item for _, item, _ in rows}


def test_popular_items_are_drawn_more_often(clicks):
    rows, table = clicks
    counts = Counter(item for _, item, _ in rows if item is not None)

    def drawn(popularity):
        made = table.add_negative_samples(10, neg_num=20, seed=5, popularity=popularity)
        found, _ = negatives_of(made)
        return [item for _, item, _ in found]

    for power in (0, 1):
        weights = {item: count**power for item, count in counts.items()}
        # of a record with item i, item j ≠ i has its weight of what is left
        expected = Counter()
        for _, item, _ in rows:
            left = {j: w for j, w in weights.items() if j != item}
            for j, w in left.items():
                expected[j] += 20 * w / sum(left.values())
        found = Counter(drawn(power))
        for item, number in expected.items():
            assert abs(found[item] - number) < 6 * number**0.5
    assert drawn(0.5) == drawn(0.5)


@settings(max_examples=60)
@given(
    tickets=st.lists(st.integers(0, 5), min_size=3, max_size=7),
    lists=st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=4),
)
def test_every_ticket_that_is_left_is_drawn_once(tickets, lists):
    tickets = np.array([0, *tickets])
    excluded = [sorted(i + 1 for i in each if i + 1 < len(tickets)) for each in lists]
    total = int(tickets.sum())
    left = [
        [i for i, n in enumerate(tickets) if i not in each for _ in range(n)] for each in excluded
    ]
    bits = [list(range(len(each))) if each else [5, 7] for each in left]
    found = drawn_negatives(
        SimpleNamespace(value=tickets),  # as a broadcast
        pa.array(bits, pa.list_(pa.int64())),
        pa.array(excluded, pa.list_(pa.int64())),
    )
    assert total == 0 or found.to_pylist() == left
    if total == 0:
        assert not any(found.to_pylist())
