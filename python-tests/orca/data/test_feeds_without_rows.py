"""Test shards and blocks without rows, which may have no columns."""

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from bigdl.orca.data.feeds.xshards import ShardsFeed

FULL = {"x": np.ones((3, 2), "float32"), "y": np.zeros(3)}


class Feed(ShardsFeed):
    kind = "shards"

    def prepare(self, cluster, num_workers, *, name="data"):
        raise NotImplementedError


def rows(*shards):
    chunks = Feed(None, ["x"], ["y"]).chunker()(shards)
    return [len(arrays[0]) for _, arrays in chunks]


@pytest.mark.parametrize("empty", [{}, {"x": np.empty(0, object), "y": np.empty(0)}])
def test_blocks_without_rows_are_left_out(empty):
    assert rows(empty, FULL, empty) == [3]


def test_frames_without_rows_are_left_out():
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [0.0, 1.0]})
    assert rows(pd.DataFrame(), frame, frame[:0]) == [2]


def test_a_block_with_rows_needs_its_columns():
    with refused("column-missing", "'x'"):
        rows({"z": np.ones(2), "y": np.ones(2)})
