"""The parameter layer loses an executor."""

import functools

import numpy as np
import pytest
from slices import ROWS, KilledOnce, adam, trained, whole

from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.feeds.group import FeedGroup


@pytest.mark.fault
@pytest.mark.slow
def test_rows_and_state_of_a_killed_executor_come_back_by_lineage(local_cluster, tmp_path):
    frame = local_cluster.range(0, ROWS, 1, 3).selectExpr("float(id) as x", "float(id) as y")
    feed = FeedGroup({"data": as_feed(frame, ["x"], ["y"])})
    program = functools.partial(KilledOnce, folder=str(tmp_path), step=12, victim="executor")
    weights, _, records, _ = trained("shuffle", 2, 5, 20, program=program, feed=feed)
    assert (tmp_path / "killed").exists()
    assert np.array_equal(weights, whole(adam, 2, 20)[0])
    seen = [sorted(source["seen"]) for source in records[-1]["sources"]]
    assert sorted(row for own in seen for row in own) == list(range(ROWS))
