"""The PyTorch Estimator on Ray: every form of data that it takes, and what it refuses.

That it computes what one process computes is in ``test_engines_training``.
"""

import os

import numpy as np
import pandas as pd
import pytest
import ray_models as rays
import torch
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.spark import active_context
from bigdl.orca.data import SparkXShards, XShards
from bigdl.orca.data.xshards.ray import RayXShards

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


# -- fit and evaluate ---------------------------------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_old_names_of_the_backend(data):
    (stats,) = rays.estimator(backend="torch_distributed").fit(data, batch_size=50)
    assert stats["num_samples"] == ROWS


@pytest.mark.slow_cases("Ray Dataset-columns1-label_cols is required to fit or evaluate on a Ray")
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


@pytest.mark.slow
def test_accelerated_predictions_of_what_is_in_ray(data, trained):
    expected = pytest.approx(expected_predictions(trained, data), abs=1e-4)
    forms = in_every_form(data)
    shards = trained.predict(forms["RayXShards"][0], accelerate="jit_fp32").collect()
    assert np.concatenate([shard["prediction"] for shard in shards]) == expected
    dataset = trained.predict(forms["Ray Dataset"][0], feature_cols="a", accelerate="jit_fp32")
    assert dataset.to_pandas().sort_values("i")["prediction"].to_numpy() == expected
    assert trained.predict(data[0], accelerate="jit_fp32") == expected


def test_acceleration_of_wrong_columns_is_one_sentence(data, trained):
    forms = in_every_form(data)
    with refused("argument-missing", "feature_cols"):
        trained.predict(forms["Ray Dataset"][0], accelerate="jit_fp32")
    with refused("column-missing", "'b'"):
        trained.predict(forms["RayXShards"][0], feature_cols="b", accelerate="jit_fp32")


def test_kinds_of_data_are_not_mixed(data):
    forms = in_every_form(data)
    with pytest.raises(UsageError, match="validation_data should have the same type with train"):
        rays.estimator().fit(forms["arrays"][0], validation_data=forms["RayXShards"][0])


@pytest.mark.slow
def test_shutdown_ends_the_workers_and_the_next_fit_starts_new_ones(data, trained):
    from bigdl.orca.engines.ray import RayEngine

    before = set(RayEngine(workers_per_node=2).run(lambda worker: os.getpid()))
    trained.shutdown()
    assert not before & set(RayEngine(workers_per_node=2).run(lambda worker: os.getpid()))
