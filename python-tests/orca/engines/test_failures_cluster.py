"""Executors that are killed: the training ends as if nothing had happened."""

import time

import faults
import pytest

from bigdl.common.errors import WorkerLost
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.feeds.spark_dataframe import SparkDataFrameFeed
from bigdl.orca.engine import SparkEngine
from bigdl.orca.engines import spark
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.runtime.channel import Address, Channel

pytestmark = pytest.mark.fault

PER_EPOCH = faults.STEPS // faults.EPOCHS


@pytest.fixture(scope="module")
def undisturbed(local_cluster):
    return faults.fit(faults.estimator(), faults.frame(local_cluster))


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "input"
    path.mkdir()
    return path


def test_workers_are_on_two_executors(local_cluster):
    def program(worker):
        import psutil

        return [worker.rank, psutil.Process().parent().parent().pid]

    (first, one), (second, other) = SparkEngine().run(program)
    assert (first, second) == (0, 1)
    assert one != other


@pytest.mark.parametrize("in_directory", [pytest.param(False, marks=pytest.mark.slow), True])
def test_killed_executor_changes_nothing(local_cluster, undisturbed, tmp_path, log, in_directory):
    est = faults.estimator(model_dir=str(tmp_path / "model") if in_directory else None)
    attempts = faults.Attempts(tmp_path / "attempts")
    rank, step = faults.random_place(11 + in_directory)
    kill = faults.KillExecutor(tmp_path / "killed", rank, step)
    data = faults.frame(local_cluster, log)
    found = faults.fit(est, data, attempts, kill, checkpoint_trigger=SeveralIteration(5))
    assert found == undisturbed
    assert attempts.starts() == [0, (step - 1) // 5 * 5]
    # a killed executor's directory stays, and both are on this machine
    assert faults.times_computed(log) == [1] * faults.SOURCES


@pytest.mark.slow
def test_input_of_a_killed_executor_is_computed_again(local_cluster, undisturbed, tmp_path, log):
    """Where its directory went with it, what it computed is lost and nothing else."""

    class KillWithDirectory(faults.KillExecutor):
        def act(self, runner):
            import shutil
            from pathlib import Path

            shutil.rmtree(Path(runner.worker.local_dir).parent)
            super().act(runner)

    attempts = faults.Attempts(tmp_path / "attempts")
    kill = KillWithDirectory(tmp_path / "killed", 1, 17)
    data = faults.frame(local_cluster, log)
    assert faults.fit(faults.estimator(), data, attempts, kill) == undisturbed
    assert attempts.starts() == [0, PER_EPOCH]
    assert set(faults.times_computed(log)) in ({1, 2}, {2})


@pytest.mark.slow
def test_executor_killed_while_the_model_is_made(local_cluster, undisturbed, tmp_path):
    marker = tmp_path / "killed"

    def creator(config):
        import os

        import psutil

        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return faults.model(config)
        psutil.Process().parent().parent().kill()
        time.sleep(60)

    assert faults.fit(faults.estimator(model=creator), faults.frame(local_cluster)) == undisturbed


def test_lost_executor_is_named(local_cluster, tmp_path):
    def program(worker):
        import psutil

        worker.channel.barrier("all", worker.world_size)
        if worker.rank == 1:
            (tmp_path / "time").write_text(str(time.time()))
            psutil.Process().parent().parent().kill()
        while True:
            pass

    with pytest.raises(WorkerLost, match=r"^Worker 1 \(process \d+ on [\d.]+\) was lost: its exec"):
        SparkEngine().run(program)
    assert time.time() - float((tmp_path / "time").read_text()) < 20
    # the next program waits for the new executor
    assert SparkEngine().run(lambda worker: worker.rank) == [0, 1]
    assert SparkCluster.from_active().slots() == 2


# Executors that cannot reach the driver --------------------------------------------------------


@pytest.mark.slow_cases("auto")
@pytest.mark.parametrize("rendezvous", ["rank0", "auto"])
def test_workers_meet_at_rank_0(local_cluster, monkeypatch, rendezvous):
    """With "auto" after the first program has found that there is no way to the driver."""

    class Elsewhere(Channel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.address = Address("127.0.0.1", 9, self.address.secret)  # nobody listens there

    def program(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        sync = TorchDistributedSync(worker)
        sync.start()
        total = sync.all_gather([float(worker.shard.column("x").sum())])
        return [worker.rank, sum(t[0] for t in total)]

    monkeypatch.setattr("bigdl.runtime.jobs.Channel", Elsewhere)
    monkeypatch.setattr(spark, "unreachable_applications", set())
    frame = local_cluster.range(0, 40, 1, 4).selectExpr("double(id) as x")
    engine = SparkEngine(rendezvous=rendezvous)
    assert engine.is_driver_reachable is (rendezvous == "auto")
    for _ in range(2):
        found = engine.run(program, SparkDataFrameFeed(frame, ["x"]))
        assert found == [[0, 780.0], [1, 780.0]]
        assert not engine.is_driver_reachable


@pytest.mark.slow
def test_executor_killed_where_workers_meet_at_rank_0(
    local_cluster, undisturbed, tmp_path, monkeypatch
):
    monkeypatch.setattr(SparkEngine, "is_driver_reachable", False)
    est = faults.estimator(model_dir=str(tmp_path / "model"))
    attempts = faults.Attempts(tmp_path / "attempts")
    kill = faults.KillExecutor(tmp_path / "killed", 0, 20)
    assert faults.fit(est, faults.frame(local_cluster), attempts, kill) == undisturbed
    assert attempts.starts() == [0, PER_EPOCH]
