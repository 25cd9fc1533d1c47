"""One training on every engine and by every way in which gradients meet.

N workers compute what one process computes, predictions keep their rows, and workers that are lost,
paused or run again change nothing.
"""

import os
import shutil
import signal
import subprocess
import time

import faults
import numpy as np
import pytest
import torch
from engine_cases import slow_on_ray
from reference_training import largest_difference, rows_of, train_alone
from refusals import refused
from torch import nn

from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.feeds.spark_dataframe import SparkDataFrameFeed
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.trigger import EveryEpoch, SeveralIteration
from bigdl.orca.torch import RowwiseAdagrad, ShardedEmbedding

COLUMNS = {"feature_cols": "x", "label_cols": "y"}
PER_EPOCH = faults.STEPS // faults.EPOCHS


@pytest.fixture(scope="module")
def undisturbed(orca_spark):
    """Weights after the training of `faults`, on Spark: those of every other way are the same."""
    return faults.fit(faults.estimator(), faults.frame(orca_spark))


@pytest.fixture
def log(tmp_path):
    """Where the partitions of the input leave a line each time that they are computed."""
    path = tmp_path / "input"
    path.mkdir()
    return path


# -- exactness ----------------------------------------------------------------------------------


def net(config):
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return made.to(getattr(torch, config["dtype"]))


def sgd(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model, config=None):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def squared(model, batch):
    return nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])


def in_partitions(spark, shards):
    """A DataFrame with a partition for every shard, also for an empty one."""
    parts = [{"x": s["x"].tolist(), "y": s["y"].tolist()} for s in shards]

    def part(batches):
        import pyarrow as pa

        schema = pa.schema({"x": pa.list_(pa.float64()), "y": pa.float64()})
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pydict(parts[number], schema)

    numbers = spark.range(0, len(parts), 1, len(parts))
    return numbers.mapInArrow(part, "x array<double>, y double")


def estimator(way, dtype="float64", workers=2, optimizer=sgd, **options):
    return Estimator.from_torch(
        model=net,
        optimizer=optimizer,
        loss=nn.MSELoss(),
        backend=way.backend,
        workers_per_node=workers,
        config={"dtype": dtype, **options.pop("config", {})},
        **options,
    )


def shards_of(way, feed):
    """What each worker has of an input, as the engine shares it out."""

    def program(worker):
        x, y = (worker.shard.column(name) for name in "xy")
        return [x.tolist(), y.tolist(), x.dtype.name]

    found = way.engine().run(program, feed)
    return [
        {"x": np.array(x, dtype).reshape(-1, 4), "y": np.array(y, dtype)} for x, y, dtype in found
    ]


class AsItIs(SparkDataFrameFeed):
    """A frame whose partitions are the shards, whatever their sizes are."""

    def prepare(self, cluster, num_workers, *, name="data"):
        return self.direct(name)


@pytest.mark.slow_cases(
    *("local-float32", "spark-float32", "ray-float32", "ray-one has none", "ray-one row")
)
@pytest.mark.parametrize(
    ("sizes", "optimizer", "dtype", "tolerance", "shuffle"),
    [
        ([7, 4], sgd, "float64", 1e-12, True),
        ([9, 0], adam, "float64", 1e-12, False),
        ([1, 0], sgd, "float64", 1e-12, True),
        ([7, 4], adam, "float32", 1e-6, True),
    ],
    ids=["uneven", "one has none", "one row", "float32"],
)
def test_workers_equal_one_process(orca_spark, way, sizes, optimizer, dtype, tolerance, shuffle):
    config = {"dtype": dtype, "shuffle": shuffle}
    frame = in_partitions(orca_spark, rows_of(sizes, dtype=dtype))
    if way.reads_spark:
        feed = (SparkDataFrameFeed if way.on_ray else AsItIs)(frame, ["x"], ["y"], config)
    else:
        feed = as_feed(way.data(frame), ["x"], ["y"], config)
    shards = shards_of(way, feed)
    assert sum(len(shard["y"]) for shard in shards) == sum(sizes)
    est = estimator(way, dtype, optimizer=optimizer, config=config)
    stats = est.fit(feed, epochs=3, batch_size=4, seed=5)
    expected, means = train_alone(
        net(config), optimizer, squared, shards, epochs=3, batch_size=4, seed=5, shuffle=shuffle
    )
    assert largest_difference(est.get_model().state_dict(), expected.state_dict()) <= tolerance
    assert [s["train_loss"] for s in stats] == pytest.approx(means, rel=tolerance)


@pytest.mark.slow
def test_the_number_of_workers_does_not_matter(orca_spark, way):
    """Without shuffling; the figures of an evaluation are the same in any case."""
    frame = way.data(in_partitions(orca_spark, rows_of([20, 3, 7])))
    found, figures = [], []
    for workers in (1, 2):
        est = estimator(way, workers=workers, config={"shuffle": False}, metrics=["mae"])
        est.fit(frame, epochs=2, batch_size=30, seed=3, **COLUMNS)
        found.append(est.get_model().state_dict())
        figures.append({k: float(v) for k, v in est.evaluate(frame, **COLUMNS).items()})
    assert largest_difference(*found) <= 1e-12
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
    assert figures[0]["num_samples"] == 30


class Looked(nn.Module):
    """Looks up a row for each number of `x`."""

    def __init__(self):
        super().__init__()
        self.table = ShardedEmbedding(10, 3, dtype=torch.float64)
        self.last = nn.Linear(12, 1, dtype=torch.float64)

    def forward(self, x):
        return self.last(self.table((3 * x.abs()).long().clamp(max=9)).flatten(1))


@slow_on_ray
@pytest.mark.parametrize("sizes", [[7, 4], [9, 0]], ids=["uneven", "one has none"])
def test_rows_on_their_owners_equal_those_of_one_process(orca_spark, way, sizes, tmp_path):
    def made(config=None):
        torch.manual_seed(1)
        return Looked()

    def optimizer(model, config=None):
        return RowwiseAdagrad(model.parameters(), lr=0.1)

    config = {"dtype": "float64"}
    frame = in_partitions(orca_spark, rows_of(sizes))
    if way.reads_spark:
        feed = (SparkDataFrameFeed if way.on_ray else AsItIs)(frame, ["x"], ["y"], config)
    else:
        feed = as_feed(way.data(frame), ["x"], ["y"], config)
    est = Estimator.from_torch(
        model=made,
        optimizer=optimizer,
        loss=nn.MSELoss(),
        backend=way.backend,
        workers_per_node=2,
        config=config,
        model_dir=str(tmp_path),
    )
    est.fit(feed, epochs=2, batch_size=4, seed=5)
    expected, _ = train_alone(
        made(), optimizer, squared, shards_of(way, feed), epochs=2, batch_size=4, seed=5
    )
    assert largest_difference(est.get_model().state_dict(), expected.state_dict()) <= 1e-12


@pytest.mark.slow_cases("spark")
def test_every_way_gives_the_same_weights(orca_spark, way, undisturbed):
    data = way.data(faults.frame(orca_spark))
    assert faults.fit(faults.estimator(backend=way.backend), data) == undisturbed


@pytest.mark.slow_cases("ray")
def test_predict_keeps_rows_columns_and_order(orca_spark, way):
    frame = orca_spark.range(0, 61, 1, 3).selectExpr(
        "id", "array(sin(id), cos(id), double(id % 7), 1) x", "string(id) s"
    )
    est = estimator(way, "float32")
    predicted = est.predict(frame, batch_size=16, feature_cols="x")
    assert predicted.columns == ["id", "x", "s", "prediction"]
    rows = predicted.collect()
    assert [row.id for row in rows] == [row.id for row in frame.collect()]
    x = torch.tensor(np.array([row.x for row in rows], np.float32))
    with torch.no_grad():
        expected = est.get_model().eval()(x)[:, 0].numpy()
    assert [row.prediction for row in rows] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow_cases("ray", "spark")
def test_a_run_that_was_cut_in_two_equals_one_that_was_not(orca_spark, way, undisturbed, tmp_path):
    data, directory = way.data(faults.frame(orca_spark)), str(tmp_path / "model")
    first = faults.estimator(backend=way.backend, model_dir=directory)
    assert faults.fit(first, data, epochs=1) != undisturbed
    second = faults.estimator(backend=way.backend, model_dir=directory)
    assert faults.fit(second, data, resume="auto") == undisturbed


def test_what_the_model_raises_is_raised(orca_spark, way):
    class Broken(nn.Linear):
        def forward(self, x):
            raise ZeroDivisionError("in the model")

    est = faults.estimator(backend=way.backend, model=lambda config: Broken(3, 1))
    with pytest.raises(WorkerError, match="ZeroDivisionError: in the model"):
        faults.fit(est, way.data(faults.frame(orca_spark)))


def test_rows_that_do_not_fit_the_model_are_one_sentence(orca_spark, way):
    frame = way.data(orca_spark.range(8).selectExpr("array(1.0D) as x", "string(id) as y"))
    with refused("data-dtype") as error:
        faults.fit(faults.estimator(backend=way.backend), frame)
    assert "\n" not in str(error.value)


# -- lost and paused workers --------------------------------------------------------------------


@pytest.mark.slow_cases(
    *("local-epochs-directory", "local-steps-driver", "spark-epochs-directory"),
    *("ray-epochs-directory", "ray-steps-driver"),
)
@pytest.mark.fault
@pytest.mark.parametrize(
    ("trigger", "in_directory", "seed"),
    [
        pytest.param(EveryEpoch(), False, 1, marks=pytest.mark.slow),
        (SeveralIteration(5), False, 2),
        (EveryEpoch(), True, 3),
        pytest.param(SeveralIteration(5), True, 4, marks=pytest.mark.slow),
    ],
    ids=["epochs-driver", "steps-driver", "epochs-directory", "steps-directory"],
)
def test_killed_worker_changes_nothing(
    orca_spark, way, undisturbed, tmp_path, log, trigger, in_directory, seed
):
    rank, step = faults.random_place(seed)
    directory = str(tmp_path / "model") if in_directory else None
    est = faults.estimator(backend=way.backend, model_dir=directory)
    attempts = faults.Attempts(tmp_path / "attempts")
    kill = faults.Kill(tmp_path / "killed", rank, step)
    data = way.data(faults.frame(orca_spark, log))
    options = {"checkpoint_trigger": trigger, "recovery": "restart"}
    found = faults.fit(est, data, attempts, kill, **options)
    assert found == undisturbed
    every = 5 if isinstance(trigger, SeveralIteration) else PER_EPOCH
    # the callback comes before the checkpoint of its step
    assert attempts.starts() == [0, (step - 1) // every * every]
    if way.reads_spark:
        assert faults.times_computed(log) == [1] * faults.SOURCES


@pytest.mark.slow
@pytest.mark.fault
@slow_on_ray
def test_all_workers_killed_twice_change_nothing(orca_spark, way, undisturbed, tmp_path, log):
    kills = [faults.Kill(tmp_path / f"killed-{rank}", rank, 17, times=2) for rank in (0, 1)]
    attempts = faults.Attempts(tmp_path / "attempts")
    data = way.data(faults.frame(orca_spark, log))
    est = faults.estimator(backend=way.backend)
    options = {"checkpoint_trigger": SeveralIteration(4), "recovery": "restart"}
    found = faults.fit(est, data, attempts, *kills, **options)
    assert found == undisturbed
    # whether the second one lives long enough to be killed too is chance
    assert set(attempts.starts()) == {0, 16}
    assert len(attempts.starts()) >= 3
    if way.reads_spark:
        assert faults.times_computed(log) == [1] * faults.SOURCES


@pytest.mark.slow_cases("local")
@pytest.mark.fault
@slow_on_ray
def test_lost_spool_is_made_again(orca_spark, way, undisturbed, tmp_path):
    class LoseSpoolAndDie(faults.Kill):
        def act(self, runner):
            (self.marker.parent / "local").symlink_to(runner.worker.local_dir)
            shutil.rmtree(runner.worker.shard.spool.path)
            super().act(runner)

    kill = LoseSpoolAndDie(tmp_path / "killed", 1, 20)
    attempts = faults.Attempts(tmp_path / "attempts")
    data = way.data(faults.frame(orca_spark))
    est = faults.estimator(backend=way.backend)
    assert faults.fit(est, data, attempts, kill, recovery="restart") == undisturbed
    assert attempts.starts() == [0, PER_EPOCH]
    assert faults.spools((tmp_path / "local").resolve()) == []


@pytest.mark.slow
@pytest.mark.fault
@slow_on_ray
@pytest.mark.parametrize("max_failures", [0, 1])
def test_more_failures_than_allowed_raise(orca_spark, way, tmp_path, max_failures):
    kill = faults.Kill(tmp_path / "killed", 1, 2, times=9)
    est = faults.estimator(backend=way.backend)
    with pytest.raises(WorkerLost, match=r"^Worker 1 \(process \d+ on 127.0.0.1\) was lost: ") as e:
        faults.fit(
            est, way.data(faults.frame(orca_spark)), kill, max_failures=max_failures, epochs=1
        )
    assert "its Python process ended unexpectedly" in str(e.value)
    failures = ["1 failure is more than", "2 failures are more than"][max_failures]
    assert failures in str(e.value)
    assert "\n" not in str(e.value)
    assert len(kill.marker.read_text().splitlines()) == max_failures + 1


@pytest.mark.slow
@pytest.mark.fault
@slow_on_ray
def test_worker_killed_in_evaluate_changes_nothing(orca_spark, way, tmp_path):
    data = way.data(faults.frame(orca_spark))
    est = faults.estimator(backend=way.backend, metrics=["mse"])
    faults.fit(est, data, epochs=1)
    expected = est.evaluate(data, **COLUMNS)
    marker = tmp_path / "killed"

    def deadly(output, target):
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ((output - target) ** 2).mean()

    again = faults.estimator(backend=way.backend, loss=deadly, metrics=["mse"])
    again.load(est.save(str(tmp_path / "weights")))
    assert again.evaluate(data, **COLUMNS) == expected
    assert marker.exists()


@pytest.mark.fault
@pytest.mark.slow
def test_paused_worker_is_waited_for(orca_spark, way, undisturbed, tmp_path):
    class Pause(faults.Once):
        def act(self, runner):
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 8; kill -CONT {pid}"])
            time.sleep(1)  # in which it is stopped

    pause = Pause(tmp_path / "paused", 1, 11)
    attempts = faults.Attempts(tmp_path / "attempts")
    started = time.monotonic()
    est = faults.estimator(backend=way.backend)
    assert faults.fit(est, way.data(faults.frame(orca_spark)), attempts, pause) == undisturbed
    assert attempts.starts() == [0]
    assert time.monotonic() - started > 8
