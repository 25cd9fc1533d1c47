"""Workers as ordinary tasks, where Spark adds and removes executors by demand."""

import json
import os
import signal
import subprocess
import sys
import time

import executors_by_demand
import faults
import pytest
from connect_server import ConnectServer
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.engine import SparkEngine
from bigdl.orca.engines.dynamic_workers import DynamicWorkers
from bigdl.runtime.channel import Channel
from bigdl.runtime.task import await_first

# In local mode, where the tasks are those of a cluster -------------------------------------------


@pytest.fixture
def by_demand(orca_spark, monkeypatch):
    """What Spark says of a cluster with dynamic allocation."""
    monkeypatch.setattr(SparkCluster, "dynamic_allocation", True)
    return orca_spark


def test_too_few_workers_are_told_in_one_sentence(by_demand):
    engine = SparkEngine(patience=2.0)
    expected = (
        r"^2 of 3 workers started, and no other within 2 s; .*maxExecutors.*or try again later$"
    )
    with pytest.raises(UsageError, match=expected):
        engine.run(lambda worker: worker.channel.barrier("all", 3), num_workers=3)
    assert engine.run(lambda worker: worker.rank, num_workers=2) == [0, 1]


@pytest.mark.slow
def test_a_stage_that_is_repeated_while_workers_wait_begins_anew(by_demand, monkeypatch):
    """As when what the second worker reads goes away with an executor, once the first waits."""
    poll, lines = DynamicWorkers.poll, []

    def repeated(workers):
        if workers.channel not in lines and workers.channel.has("enter/0", "enter/1"):
            lines.append(workers.channel)
            if len(lines) == 1:
                workers.channel.count("enter/0", 1)  # Spark's copy of the first
        poll(workers)

    monkeypatch.setattr(DynamicWorkers, "poll", repeated)
    with refused("resource-limit", "2", "3", "6"):
        SparkEngine(patience=6.0).run(lambda w: w.channel.barrier("all", 3), num_workers=3)
    assert len(lines) == 2


def test_rank_0_cannot_host_without_a_barrier(by_demand):
    with refused("cluster-config", 'rendezvous="rank0"'):
        SparkEngine(rendezvous="rank0").run(lambda worker: 0, num_workers=2)


@pytest.mark.fault
@pytest.mark.parametrize("others", ["collective", "python"])
def test_a_lost_worker_ends_the_stage(by_demand, others):
    def program(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        sync = TorchDistributedSync(worker)
        sync.start()
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            if others == "collective":
                sync.all_gather([1.0])

    # the other one is lost with the stage, sometimes before the driver looks
    with pytest.raises(WorkerLost, match=r"^Workers? .*1 \(process \d+ on [\d.]+\) w\w+ lost: "):
        SparkEngine().run(program, num_workers=2)


def test_an_error_of_the_program_is_reported_once(by_demand):
    def program(worker):
        if worker.rank == 1:
            raise KeyError("this one")
        worker.channel.barrier("never", 3)

    with pytest.raises(WorkerError, match=r"^KeyError in worker 1"):
        SparkEngine().run(program, num_workers=2)


@pytest.mark.fault
def test_ordinary_tasks_train_as_those_of_a_barrier_also_after_a_loss(
    orca_spark, monkeypatch, tmp_path
):
    data = faults.frame(orca_spark)
    expected = faults.fit(faults.estimator(), data)
    monkeypatch.setattr(SparkCluster, "dynamic_allocation", True)
    attempts = faults.Attempts(tmp_path / "attempts")
    kill = faults.Kill(tmp_path / "killed", 1, 20)
    assert faults.fit(faults.estimator(), data, attempts, kill) == expected
    assert attempts.starts() == [0, faults.STEPS // faults.EPOCHS]


# A task that the cluster runs again ------------------------------------------


def test_a_second_run_waits_for_the_first():
    channel = Channel("127.0.0.1")
    driver = channel.attempt(1)
    first, second = channel.address.connect(1), channel.address.connect(1)
    first.set_on_disconnect("gone/0")
    first.set("left/0", "")
    assert await_first(second, 0) == "copy"
    assert driver.count("failed") == 0
    lost = channel.address.connect(1)
    lost.set_on_disconnect("gone/1")
    lost.store.close()
    assert await_first(second, 1) == "void"
    assert driver.count("failed") == 1
    channel.close()


# From no executor to two ------------------------------------------


def on_a_cluster(story, folder, **arguments):
    """What happened in a process of its own, whose cluster starts without executors."""
    program = executors_by_demand.__file__
    command = [sys.executable, program, story, str(folder), json.dumps(arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = {"capture_output": True, "text": True, "timeout": 580}
    run = subprocess.run(command, env=environment, **options)
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
def test_a_cluster_grows_for_a_training_and_loses_an_executor(tmp_path):
    facts = on_a_cluster("growing", tmp_path)
    assert (facts["before"], facts["grown to"], facts["idle"]) == (0, 2, 0)
    assert facts["found"] == facts["expected"]
    assert facts["starts"] == [0, 15]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
def test_no_step_is_lost_before_a_decommissioned_executor_goes(tmp_path):
    facts = on_a_cluster("decommissioned", tmp_path)
    assert facts["found"] == facts["expected"]
    first, second = facts["starts"]
    assert (first, second) == (0, facts["told at"])
    assert 8 <= second < faults.STEPS


SEARCHED = {"before": 0, "grown to": 2, "idle": 0, "joint": [3, 3, 3], "idle again": 0}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_grows_for_a_search_and_shrinks_after_it(tmp_path):
    facts = on_a_cluster("searching", tmp_path)
    assert facts == {**SEARCHED, "states": ["COMPLETE"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_of_spark_connect_grows_for_a_search_and_shrinks_after_it(tmp_path):
    conf = {**executors_by_demand.CONF, **executors_by_demand.TRACKING}
    memory = {"spark.executor.memory": "600m", "spark.executor.cores": "1"}
    server = ConnectServer(tmp_path, "local-cluster[2,1,1024]", **{**conf, **memory})
    try:
        assert server.executors == []
        facts = on_a_cluster("searching", tmp_path, cluster_mode="spark-connect", master=server.url)
        assert facts == {**SEARCHED, "states": ["COMPLETE"]}
        end = time.monotonic() + 120
        while server.executors and time.monotonic() < end:
            time.sleep(0.2)
        assert server.executors == []
    finally:
        server.stop()
