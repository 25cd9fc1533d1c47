"""Ray on the executors of a Spark cluster, each in its own JVM."""

import os
import time

import psutil
import pytest
import rays

from bigdl.common.errors import UsageError
from bigdl.orca import OrcaContext, stop_orca_context
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.engine.ray import RayEngine
from bigdl.orca.engine.spark import SparkEngine
from bigdl.orca.ray import OrcaRayContext

pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
pytestmark = pytest.mark.slow


def keepers():
    """The processes beside the Ray nodes of executors."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(part.endswith("_ray_node_main.py") for part in process.info["cmdline"] or ())
    ]


def test_ray_runs_beside_spark_and_dies_with_it(local_cluster):
    other = set(keepers())
    with pytest.raises(
        UsageError, match=r"3 Ray nodes were asked for .* but Spark has 2 executors"
    ):
        OrcaRayContext("spark", num_ray_nodes=3).init()
    context = OrcaContext.get_ray_context()
    assert (context.num_ray_nodes, context.ray_node_cpu_cores) == (2, 1)
    nodes = set(keepers()) - other
    assert len(nodes) == 2
    below = [child for each in nodes for child in each.children(recursive=True)]

    # the slots of Spark are free
    frame = local_cluster.range(0, 40, 1, 3).selectExpr(
        "id", "array(sin(id), cos(id), double(id % 7)) as x", "double(id % 3) as y"
    )

    def program(worker):
        return [worker.rank, worker.shard.rows, worker.shard.fingerprint]

    found = [e.run(program, as_feed(frame, ["x"], ["y"])) for e in (SparkEngine(), RayEngine())]
    assert found[0] == found[1]
    est = rays.estimator(workers=1)
    (stats,) = est.fit(frame, batch_size=10, feature_cols="x", label_cols="y")
    assert stats["num_samples"] == 40
    assert est.predict(frame, feature_cols="x").count() == 40

    # a node ends with its executor
    stop_orca_context()
    give_up = time.monotonic() + 30
    while (set(keepers()) - other) and time.monotonic() < give_up:
        time.sleep(0.2)
    assert set(keepers()) - other == set()
    _, left = psutil.wait_procs(below, timeout=15)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    assert "RAY_AUTH_TOKEN" not in os.environ
