"""The PyTorch Estimator on Ray: what it takes, and that it computes what one process computes."""

import os
import signal

import numpy as np
import pandas as pd
import pytest
import rays
import torch
from alone import largest_difference, train_alone

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.orca.cluster.spark import active_context
from bigdl.orca.data import SparkXShards, XShards
from bigdl.orca.data.ray_xshards import RayXShards
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")

ROWS = 101
CUTS = ((0, 40), (40, 41), (41, 101))
FRAME = {"feature_cols": "a", "label_cols": "y"}


@pytest.fixture(scope="module")
def data():
    rays.active_ray()
    return rays.rows(ROWS)


@pytest.fixture(scope="module")
def trained(data):
    """An Estimator of two workers that has seen the data twice."""
    est = rays.estimator(metrics=["mse"])
    est.fit(data, epochs=2, batch_size=10, seed=3)
    return est


def frame_of(data):
    x, y = data
    return pd.DataFrame({"a": list(x), "y": y, "i": np.arange(len(y))})


def in_every_form(data):
    """The same rows in the same order, in everything that is in memory or in Ray."""
    x, y = data
    frame = frame_of(data)
    return {
        "arrays": ((x, y), {}),
        "pandas": (frame, FRAME),
        "RayXShards": (RayXShards([ray.put([{"x": x[a:b], "y": y[a:b]}]) for a, b in CUTS]), {}),
        "Ray Dataset": (ray.data.from_pandas([frame[a:b] for a, b in CUTS]), FRAME),
    }


# -- exactness ----------------------------------------------------------------------------------


def squared(model, batch):
    return torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])


@pytest.mark.parametrize("shuffle", [True, False])
def test_workers_equal_one_process(data, shuffle):
    x, y = data
    est = rays.estimator(model=rays.still, config={"shuffle": shuffle})
    stats = est.fit((x, y), epochs=2, batch_size=8, seed=5)
    shards = [{"x": x[rank::2], "y": y[rank::2]} for rank in range(2)]  # as arrays are shared out
    expected, means = train_alone(
        rays.still({}),
        lambda model: rays.optimizer(model, {}),
        squared,
        shards,
        epochs=2,
        batch_size=8,
        seed=5,
        shuffle=shuffle,
    )
    assert largest_difference(est.get_model().state_dict(), expected.state_dict()) <= 1e-12
    assert [entry["train_loss"] for entry in stats] == pytest.approx(means, rel=1e-12)


def test_the_number_of_workers_does_not_matter_without_shuffling(data):
    found = []
    for workers in (1, 2):
        est = rays.estimator(workers, model=rays.still, config={"shuffle": False})
        est.fit(data, epochs=2, batch_size=10, seed=3)
        found.append(rays.weights(est))
    assert np.abs(found[0] - found[1]).max() <= 1e-12


def test_evaluate_gives_the_same_figures_for_every_form_of_the_data(data, trained):
    x, y = data
    with torch.no_grad():
        loss = float(
            ((trained.get_model().eval()(torch.from_numpy(x))[:, 0].numpy() - y) ** 2).mean()
        )
    for form, (given, columns) in in_every_form(data).items():
        found = trained.evaluate(given, batch_size=16, **columns)
        assert found["num_samples"] == ROWS, form
        assert found["val_loss"] == pytest.approx(loss, rel=1e-12), form
        assert float(found["MSE"]) == pytest.approx(loss, rel=1e-6), form


def test_fit_takes_every_form_of_the_data(data):
    for form, (given, columns) in in_every_form(data).items():
        (stats,) = rays.estimator().fit(
            given, batch_size=20, validation_data=given, seed=1, **columns
        )
        assert (stats["num_samples"], stats["val_num_samples"]) == (ROWS, ROWS), form


def test_fit_takes_a_function_that_makes_a_loader(data):
    x, y = (torch.from_numpy(each) for each in data)

    def creator(config, batch_size):
        assert batch_size == 10
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size)

    (stats,) = rays.estimator().fit(creator, batch_size=20)
    assert stats["num_samples"] == ROWS


def test_fit_takes_parquet_files(data, tmp_path):
    frame_of(data).to_parquet(tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    (stats,) = rays.estimator().fit(path, batch_size=20, **FRAME)
    assert stats["num_samples"] == ROWS


def test_arrays_are_cut_in_shards_of_ray_where_there_is_no_spark(data):
    x, y = data
    shards = XShards.partition({"x": x, "y": y})
    assert isinstance(shards, SparkXShards if active_context() else RayXShards)
    assert [len(shard["y"]) for shard in shards.collect()] == [51, 50]
    assert np.concatenate([shard["x"] for shard in shards.collect()]).tolist() == x.tolist()


# -- predict ------------------------------------------------------------------------------------


def expected_predictions(est, data):
    with torch.no_grad():
        return est.get_model().eval()(torch.from_numpy(data[0]))[:, 0].numpy()


def test_predict_keeps_the_rows_of_every_form(data, trained):
    expected = pytest.approx(expected_predictions(trained, data), abs=1e-6)
    forms = in_every_form(data)
    assert trained.predict(data[0]) == expected
    frame = trained.predict(forms["pandas"][0], feature_cols="a")
    assert frame["prediction"].to_numpy() == expected
    assert frame["i"].tolist() == list(range(ROWS))
    shards = trained.predict(forms["RayXShards"][0]).collect()
    assert np.concatenate([shard["prediction"] for shard in shards]) == expected
    assert [len(shard["y"]) for shard in shards] == [40, 1, 60]
    dataset = trained.predict(forms["Ray Dataset"][0], feature_cols="a").to_pandas()
    dataset = dataset.sort_values("i")
    assert list(dataset.columns) == ["a", "y", "i", "prediction"]
    assert dataset["prediction"].to_numpy() == expected


# -- failures -----------------------------------------------------------------------------------


class Kill(Callback):
    """Ends a worker's process after one step, the first time."""

    def __init__(self, marker, rank, step):
        self.marker, self.rank, self.step = marker, rank, step

    def after_train_iter(self, runner):
        here = (runner.rank, runner.global_step) == (self.rank, self.step)
        if here and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.fault
@pytest.mark.parametrize(
    "in_directory",
    [
        pytest.param(False, id="by the driver", marks=pytest.mark.slow),
        pytest.param(True, id="by dir"),
    ],
)
def test_a_killed_worker_changes_nothing(data, tmp_path, in_directory):
    settings = {"epochs": 2, "batch_size": 10, "seed": 3}
    undisturbed = rays.estimator()
    undisturbed.fit(data, **settings)
    est = rays.estimator(model_dir=str(tmp_path / "model") if in_directory else None)
    kill = Kill(tmp_path / "killed", 1, 15)
    est.fit(data, callbacks=[kill], checkpoint_trigger=SeveralIteration(4), **settings)
    assert kill.marker.exists()
    assert rays.weights(est).tolist() == rays.weights(undisturbed).tolist()


@pytest.mark.fault
def test_more_losses_than_forgiven_raise(data, tmp_path):
    kill = Kill(tmp_path / "killed", 0, 2)
    with pytest.raises(WorkerLost, match=r"^Worker 0 \(process .*1 losses are more than 0"):
        rays.estimator().fit(data, callbacks=[kill], max_failures=0)


def test_a_run_that_was_cut_in_two_equals_one_that_was_not(data, tmp_path):
    whole = rays.estimator()
    whole.fit(data, epochs=3, batch_size=10, seed=3)
    first = rays.estimator(model_dir=str(tmp_path))
    first.fit(data, epochs=2, batch_size=10, seed=3)
    second = rays.estimator(model_dir=str(tmp_path))
    second.fit(data, epochs=3, batch_size=10, seed=3, resume="auto")
    assert rays.weights(second).tolist() == rays.weights(whole).tolist()


def test_what_the_model_raises_is_raised(data):
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise ZeroDivisionError("in the model")

    with pytest.raises(WorkerError, match="ZeroDivisionError: in the model"):
        rays.estimator(model=lambda config: Broken()).fit(data)


# -- refused ------------------------------------------------------------------------------------


def test_old_names_of_the_backend(data):
    (stats,) = rays.estimator(backend="torch_distributed").fit(data, batch_size=50)
    assert stats["num_samples"] == ROWS
    with pytest.raises(UsageError, match=r"horovod backend is not supported .*backend='ray'"):
        rays.estimator(backend="horovod")


@pytest.mark.parametrize(
    ("given", "columns", "message"),
    [
        ("Ray Dataset", {}, "feature_cols is required for a Ray Dataset"),
        (
            "Ray Dataset",
            {"feature_cols": "a"},
            "label_cols is required to fit or evaluate on a Ray",
        ),
        ("Ray Dataset", {**FRAME, "label_cols": "z"}, "'z'"),
        ("RayXShards", {**FRAME, "feature_cols": "b"}, "'b'"),
    ],
)
def test_wrong_columns_are_one_sentence(data, given, columns, message):
    with pytest.raises(UsageError, match=message) as error:
        rays.estimator().fit(in_every_form(data)[given][0], **columns)
    assert "\n" not in str(error.value)


def test_acceleration_takes_no_shards_of_ray(data, trained):
    for form in ("RayXShards", "Ray Dataset"):
        with pytest.raises(UsageError, match=rf"^accelerate= does not take a {form}; predict arr"):
            trained.predict(in_every_form(data)[form][0], accelerate="jit_fp32")


def test_kinds_of_data_are_not_mixed(data):
    forms = in_every_form(data)
    with pytest.raises(UsageError, match="validation_data should have the same type with train"):
        rays.estimator().fit(forms["arrays"][0], validation_data=forms["RayXShards"][0])


@pytest.mark.slow
def test_shutdown_ends_the_workers_and_the_next_fit_starts_new_ones(data, trained):
    from bigdl.orca.engine.ray import RayEngine

    before = set(RayEngine(workers_per_node=2).run(lambda worker: os.getpid()))
    trained.shutdown()
    assert not before & set(RayEngine(workers_per_node=2).run(lambda worker: os.getpid()))
