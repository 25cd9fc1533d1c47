"""Test Ray on the executors of a Spark cluster, each in a separate JVM."""

import contextlib
import os
import re
import time
from pathlib import Path

import psutil
import pytest
import ray_models as rays
from test_context import survivors

from bigdl.common.errors import UsageError
from bigdl.orca import OrcaContext, stop_orca_context
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.xshards.ray import RayXShards
from bigdl.orca.engines.ray import RayEngine
from bigdl.orca.engines.spark import SparkEngine
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.orca.ray import OrcaRayContext

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
pytestmark = pytest.mark.slow


def processes_of(context):
    """Return the executors' processes other than Ray nodes, with all their descendants."""
    node = f"--address={context.address_info['address']}"
    nodes = []
    for process in psutil.process_iter(["cmdline"]):
        if any(part == "ray-node" for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):  # other users' processes may end at any time
                below = process.children(recursive=True)
                if any(node in command_of(child) for child in below):
                    nodes.append((process, below))
    return [process for process, _ in nodes], [child for _, below in nodes for child in below]


def command_of(process):
    """Return the words of a process's command, or none if it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def assert_gone(*processes):
    assert survivors([process.pid for each in processes for process in each], 90) == []


@pytest.fixture(autouse=True)
def _no_ray_is_left(local_cluster):
    yield
    rays.stop_ray()
    if ray.is_initialized():
        OrcaRayContext.get(initialize=False).stop()


def frame_of(spark):
    return spark.range(0, 40, 1, 3).selectExpr(
        "id", "array(sin(id), cos(id), double(id % 7)) as x", "double(id % 3) as y"
    )


def remote_on(node):
    """Create an actor without CPUs on a node, which may have none."""

    class Idle:
        pass

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(Idle).remote()


class KillNode(Callback):
    """Callback that kills a worker's Ray node after one step, and the process that restarts it."""

    def after_train_iter(self, runner):
        if runner.rank == 1 and runner.global_step == 6:
            raylet = psutil.Process().parent()
            for process in (raylet.parent().parent(), raylet.parent(), raylet):
                process.kill()
            time.sleep(60)


@pytest.mark.timeout(600)
def test_ray_starts_three_times_in_one_process(local_cluster):
    for number in range(3):
        context = (OrcaRayContext.get, OrcaContext.get_ray_context)[number % 2]()
        assert (context.num_ray_nodes, context.ray_node_cpu_cores) == (2, 1)
        nodes, below = processes_of(context)
        assert len(nodes) == 2
        ranks = RayEngine().run(lambda worker, number=number: [number, worker.rank])
        assert ranks == [[number, 0], [number, 1]]
        context.stop()
        assert_gone(nodes, below)


def test_nodes_are_started_whatever_the_master_is_called(local_cluster, monkeypatch):
    """Simulate Kubernetes: the head on the driver's address, then a node on each executor."""
    monkeypatch.setattr(local_cluster.sparkContext, "master", "k8s://https://10.0.0.1:6443")
    assert not SparkCluster.from_active().is_local
    context = OrcaRayContext("spark", env={"SAID_TO_NODES": "yes"})
    info = context.init()
    assert not info["node_ip_address"].startswith("127.")
    nodes, below = processes_of(context)
    assert len(nodes) == 2
    said = RayEngine().run(lambda worker: [worker.rank, os.environ.get("SAID_TO_NODES")])
    assert said == [[0, "yes"], [1, "yes"]]
    on_head = remote_on(ray.get_runtime_context().get_node_id())
    shards = RayXShards([ray.put([1])])
    assert shards.assign_partitions_to_actors([on_head]) == (
        [[0]],
        [info["node_ip_address"]],
        [on_head],
    )
    context.stop()
    assert_gone(nodes, below)


def test_parameter_servers_learn_on_the_executors(local_cluster, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples" / "orca" / "ray"))
    import parameter_server
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(parameter_server)  # in a program, it is __main__
    results = parameter_server.main(["--runtime", "spark", "--steps", "60"])
    assert set(results) == set(parameter_server.WAYS)
    assert min(results.values()) > 0.8
    assert "Ray on Spark:" in capsys.readouterr().out


@pytest.mark.slow_cases("1")
@pytest.mark.fault
@pytest.mark.parametrize("every", [None, 1])
def test_a_fit_goes_on_with_the_workers_that_are_left(local_cluster, caplog, tmp_path, every):
    """Repeat the epoch in which a node was lost, or what remains of it after a checkpoint."""
    OrcaContext.get_ray_context()
    model_dir = None if every is None else str(tmp_path)
    est = rays.estimator(workers=1, model_dir=model_dir)
    stats = est.fit(
        frame_of(local_cluster),
        epochs=3,
        batch_size=10,
        seed=1,
        feature_cols="x",
        label_cols="y",
        callbacks=[KillNode()],
        checkpoint_trigger=None if every is None else SeveralIteration(every),
        min_workers=1,
    )
    assert [entry["num_samples"] for entry in stats] == [40] * 3
    if every is not None:
        assert re.search(r"resuming from epoch 2, step [12]\b", caplog.text)
    assert [entry["epoch"] for entry in stats] == [1, 2, 3]
    assert "Nodes were lost: 1 of 2 workers continue" in caplog.text


def test_ray_runs_beside_spark_and_dies_with_it(local_cluster):
    with pytest.raises(UsageError, match=r"num_ray_nodes is 3, but Spark has 2 executors"):
        OrcaRayContext("spark", num_ray_nodes=3).init()
    context = OrcaContext.get_ray_context()
    assert (context.num_ray_nodes, context.ray_node_cpu_cores) == (2, 1)
    nodes, below = processes_of(context)
    assert len(nodes) == 2

    # Spark's slots are free
    frame = frame_of(local_cluster)

    def program(worker):
        return [worker.rank, worker.shard.rows, worker.shard.fingerprint]

    results = [e.run(program, as_feed(frame, ["x"], ["y"])) for e in (SparkEngine(), RayEngine())]
    assert results[0] == results[1]
    est = rays.estimator(workers=1)
    (stats,) = est.fit(frame, batch_size=10, feature_cols="x", label_cols="y")
    assert stats["num_samples"] == 40
    assert est.predict(frame, feature_cols="x").count() == 40

    # a node ends with its executor
    stop_orca_context()
    assert_gone(nodes, below)
    assert "RAY_AUTH_TOKEN" not in os.environ
