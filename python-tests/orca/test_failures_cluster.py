"""Executors that are killed: the training ends as if nothing had happened."""

import time

import faults
import pytest

from bigdl.common.errors import WorkerLost
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.engine import SparkEngine
from bigdl.orca.learn.trigger import SeveralIteration

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


@pytest.mark.parametrize("in_directory", [False, True])
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

        worker.line.meet("all", worker.world_size)
        if worker.rank == 1:
            (tmp_path / "time").write_text(str(time.time()))
            psutil.Process().parent().parent().kill()
        while True:
            pass

    with pytest.raises(WorkerLost, match=r"^Worker 1 \(process \d+ on [\d.]+\) was lost: its exec"):
        SparkEngine().run(program)
    assert time.time() - float((tmp_path / "time").read_text()) < 5
    # the next program waits for the new executor, and not for 15 s as Spark would
    assert SparkEngine().run(lambda worker: worker.rank) == [0, 1]
    assert time.time() - float((tmp_path / "time").read_text()) < 15
    assert SparkCluster.from_active().slots() == 2
