"""Which rows of which shard form which batch."""

from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.batches import BatchPlan, permutation

shards = st.lists(st.integers(0, 30), min_size=1, max_size=6)
batch_sizes = st.integers(1, 40)


def by_place(rows):
    """Every row as (rank, index), in the order of the places (index + 1/2) / n, ties by rank."""
    places = [
        (Fraction(2 * index + 1, 2 * n), rank, index)
        for rank, n in enumerate(rows)
        for index in range(n)
    ]
    return [(rank, index) for _, rank, index in sorted(places)]


def cut(plan, ranks):
    """Batches of (rank, index) as the workers see them."""
    batches = []
    for step in range(plan.steps):
        parts = [plan.batch(step, rank) for rank in range(ranks)]
        batch = [(rank, i) for rank, (low, high, _) in enumerate(parts) for i in range(low, high)]
        assert {size for _, _, size in parts} == {len(batch)}
        batches.append(batch)
    return batches


@settings(max_examples=200)
@given(rows=shards, batch_size=batch_sizes, drop_last=st.booleans())
def test_batches_are_the_interleaved_rows_cut_in_pieces(rows, batch_size, drop_last):
    order = by_place(rows)
    pieces = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    if drop_last and pieces and len(pieces[-1]) < batch_size:
        pieces.pop()
    plan = BatchPlan(rows, batch_size, drop_last)
    assert plan.steps == len(pieces)
    assert plan.total == sum(map(len, pieces))
    batches, expected = cut(plan, len(rows)), [sorted(piece) for piece in pieces]
    assert batches[:-2] == expected[:-2]
    # a short last batch may take other rows than the one before, so that no shard gives one alone
    assert sorted(chain(*batches[-2:])) == sorted(chain(*expected[-2:]))
    assert list(map(len, batches)) == list(map(len, expected))


@settings(max_examples=50)
@given(rows=shards, batch_size=batch_sizes)
def test_steps_can_be_asked_for_in_any_order(rows, batch_size):
    plan, backwards = BatchPlan(rows, batch_size), BatchPlan(rows, batch_size)
    forth = [plan.batch(step, 0) for step in range(plan.steps)]
    back = [backwards.batch(step, 0) for step in reversed(range(plan.steps))]
    assert forth == back[::-1]


@given(workers=st.integers(1, 8), each=st.integers(1, 20), rows=st.integers(1, 200))
def test_equal_shards_have_an_equal_part_of_every_full_batch(workers, each, rows):
    plan = BatchPlan([rows] * workers, each * workers, drop_last=True)
    for step in range(plan.steps):
        sizes = [high - low for low, high, _ in (plan.batch(step, r) for r in range(workers))]
        assert sizes == [each] * workers


@settings(max_examples=60)
@given(
    rows=st.lists(st.integers(0, 2**40), min_size=1, max_size=12),
    batch_size=st.integers(1, 2**30),
    data=st.data(),
)
def test_batches_of_very_large_shards_are_exact(rows, batch_size, data):
    plan = BatchPlan(rows, batch_size)
    if not plan.steps:
        return
    step = data.draw(st.integers(0, plan.steps - 1))
    parts = [plan.batch(step, rank) for rank in range(len(rows))]
    size = min(batch_size, sum(rows) - step * batch_size)
    assert sum(high - low for low, high, _ in parts) == size
    assert {given for _, _, given in parts} == {size}
    if step == plan.steps - 2:  # the last batch begins so that no shard has a single row there
        return
    # every row that was taken so far stands before every one that was not
    ends = [(rank, high, rows[rank]) for rank, (_, high, _) in enumerate(parts)]
    taken = [(Fraction(2 * high - 1, 2 * n), rank) for rank, high, n in ends if high]
    left = [(Fraction(2 * high + 1, 2 * n), rank) for rank, high, n in ends if high < n]
    assert not left or max(taken) < min(left)


def test_shards_without_rows_take_no_part():
    plan = BatchPlan([0, 3, 0], 2)
    assert [plan.batch(step, 0)[:2] for step in range(2)] == [(0, 0), (0, 0)]
    assert [plan.batch(step, 1) for step in range(2)] == [(0, 2, 2), (2, 3, 1)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_no_rows_make_no_steps(drop_last):
    assert BatchPlan([0, 0], 4, drop_last).steps == 0


def test_a_batch_larger_than_the_data_is_one_short_batch_or_none():
    assert [BatchPlan([3, 2], 100).batch(0, rank) for rank in (0, 1)] == [(0, 3, 5), (0, 2, 5)]
    assert BatchPlan([3, 2], 100, drop_last=True).steps == 0


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "8", None])
def test_a_batch_size_that_is_no_positive_integer_is_refused(batch_size):
    with pytest.raises(UsageError, match="batch_size should be a positive integer"):
        BatchPlan([3], batch_size)


# Order of an epoch ------------------------------------------------------------------------------

seeds = st.integers(0, 2**63)
epochs = st.integers(0, 1000)


@given(rows=st.integers(0, 300), seed=seeds, epoch=epochs, shard=st.integers(0, 9))
def test_a_permutation_has_every_row_once_and_is_a_function_of_its_arguments(
    rows, seed, epoch, shard
):
    order = permutation(rows, seed, epoch, shard)
    assert sorted(order.tolist()) == list(range(rows))
    assert order.dtype == np.int32  # half of the memory, as long as it is enough
    np.testing.assert_array_equal(order, permutation(rows, seed, epoch, shard))


@given(seed=seeds, epoch=epochs, shard=st.integers(0, 9))
def test_each_of_seed_epoch_and_shard_changes_the_order(seed, epoch, shard):
    order = permutation(100, seed, epoch, shard).tolist()
    assert order != permutation(100, seed + 1, epoch, shard).tolist()
    assert order != permutation(100, seed, epoch + 1, shard).tolist()
    assert order != permutation(100, seed, epoch, shard + 1).tolist()


def test_the_order_is_the_same_on_every_machine():
    assert permutation(8, 1, 2, 3).tolist() == [4, 2, 6, 5, 1, 3, 7, 0]


def test_a_short_last_batch_leaves_no_shard_a_single_row():
    for rows, batch_size in (([27, 27], 26), ([18, 18, 19], 26), ([28, 28, 29], 40), ([9, 8], 8)):
        plan = BatchPlan(rows, batch_size)
        bounds = [
            [plan.batch(step, rank) for rank in range(len(rows))] for step in range(plan.steps)
        ]
        sizes = [[stop - start for start, stop, _ in batch] for batch in bounds]
        assert [sum(each) for each in sizes[:-1]] == [batch_size] * (plan.steps - 1)
        assert [sum(each) for each in zip(*sizes, strict=True)] == rows
        assert 1 not in sizes[-1] or sum(sizes[-1]) == 1
        assert 1 not in sizes[-2]
        # read from the middle it is the same
        fresh = BatchPlan(rows, batch_size)
        assert [fresh.batch(plan.steps - 1, rank) for rank in range(len(rows))] == bounds[-1]
