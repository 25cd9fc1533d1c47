"""The engine where executors cannot connect to the driver: the workers meet at rank 0."""

import os
import time

import faults
import pytest
from refusals import refused

from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.orca.data.feeds.spark_dataframe import SparkDataFrameFeed
from bigdl.orca.engine import SparkEngine


@pytest.fixture
def without_driver(orca_spark):
    return SparkEngine(rendezvous="rank0")


def test_rendezvous_is_one_of_three(orca_spark):
    with refused("argument-value", "rank0", "'mine'"):
        SparkEngine(rendezvous="mine")


@pytest.mark.slow
def test_results_and_messages_come_back(orca_spark, without_driver):
    frame = orca_spark.range(0, 40, 1, 4).selectExpr("double(id) as x")
    big = 9 << 20

    def program(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        print("not to be seen")
        worker.progress(step=1)
        sync = TorchDistributedSync(worker)
        sync.start()
        total = sync.all_gather([float(worker.shard.column("x").sum())])
        if worker.rank == 0:
            worker.send("checkpoint", {"n": 1}, b"old")
            worker.send("checkpoint", {"n": 2}, b"new")
            worker.send("final", {}, b"f" * big)
            return b"0" * big
        return [worker.rank, sum(t[0] for t in total), worker.options, worker.state().decode()]

    events = []
    feed = SparkDataFrameFeed(frame, ["x"])
    with without_driver.open(program, feed, num_workers=2) as job:
        ports = faults.listening()
        found = job.attempt({"o": 1}, b"state", lambda kind, value: events.append((kind, value)))
        assert faults.listening() == ports
    assert found == [b"0" * big, [1, 780.0, {"o": 1}, "state"]]
    assert [event for event in events if event[0] != "phase"] == [
        ("message", ({"topic": "checkpoint", "rank": 0, "n": 2}, b"new")),
        ("message", ({"topic": "final", "rank": 0}, b"f" * big)),
    ]


@pytest.mark.slow_cases("python-failing1", "python-failing2")
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
@pytest.mark.parametrize("others", ["collective", "python"])
def test_errors_are_reported_in_time(orca_spark, without_driver, tmp_path, failing, others):
    def program(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        sync = TorchDistributedSync(worker)
        sync.start()
        if worker.rank in failing:
            time.sleep(0.3)
            (tmp_path / "time").write_text(str(time.time()))
            raise KeyError("this one")
        while True:
            if others == "collective":
                sync.all_gather([1.0])

    with pytest.raises(WorkerError, match=r"^KeyError in worker [01]:\nTraceback") as error:
        without_driver.run(program, num_workers=2)
    assert time.time() - float((tmp_path / "time").read_text()) < 5
    assert error.value.rank in failing
    assert str(error.value).endswith("KeyError: 'this one'")
    assert "bigdl/orca/engine" not in str(error.value)


def test_refuses_what_the_channel_refuses(without_driver):
    with refused("function-result"):
        without_driver.run(lambda worker: object(), num_workers=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_loses_a_worker(without_driver, tmp_path, rank):
    def program(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        sync = TorchDistributedSync(worker)
        sync.start()
        if worker.rank == rank:
            (tmp_path / "time").write_text(str(time.time()))
            os.kill(os.getpid(), 9)
        while True:
            sync.all_gather([1.0])

    with pytest.raises(WorkerLost, match="its Python process ended unexpectedly"):
        without_driver.run(program, num_workers=2)
    assert time.time() - float((tmp_path / "time").read_text()) < 5


def test_waits_for_those_who_meet_later(without_driver):
    def program(worker):
        if worker.rank:
            time.sleep(2)
            worker.channel.count("late", 1)
        return worker.rank

    assert without_driver.run(program, num_workers=2) == [0, 1]


class InThrees(SparkDataFrameFeed):
    """Rows that Spark is to hand out in threes; a worker notes what it gets."""

    def __init__(self, frame, folder):
        super().__init__(frame, ["x"])
        self.folder = folder

    def prepare(self, cluster, num_workers, *, name="data"):
        ingest = self.direct(name)
        ingest.settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": "3"}
        read, folder = ingest.reader, self.folder

        def noted(batches):
            for batch in batches:
                with open(folder / "rows", "a") as file:
                    file.write(f"{batch.num_rows}\n")
                yield batch

        ingest.reader = lambda batches, open_spool: read(noted(batches), open_spool)
        return ingest


def test_plans_the_input_under_its_settings(orca_spark, without_driver, tmp_path):
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = orca_spark.conf.get(name)
    frame = orca_spark.range(0, 12, 1, 2).selectExpr("double(id) as x")
    feed = InThrees(frame, tmp_path)
    assert without_driver.run(lambda w: w.shard.rows, feed, num_workers=2) == [6, 6]
    assert (tmp_path / "rows").read_text().split() == ["3"] * 4
    assert orca_spark.conf.get(name) == before


@pytest.mark.slow
def test_trains_a_model(orca_spark, monkeypatch, tmp_path):
    data = faults.frame(orca_spark)
    expected = faults.fit(faults.estimator(), data)
    monkeypatch.setattr(SparkEngine, "is_driver_reachable", False)
    assert faults.fit(faults.estimator(), data) == expected
    # a retry needs a folder to find its checkpoint in
    est = faults.estimator(model_dir=str(tmp_path / "model"))
    attempts = faults.Attempts(tmp_path / "attempts")
    kill = faults.Kill(tmp_path / "killed", 1, 20)
    assert faults.fit(est, data, attempts, kill) == expected
    assert attempts.starts() == [0, faults.STEPS // faults.EPOCHS]
