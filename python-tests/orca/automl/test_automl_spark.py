"""Test AutoEstimator on Spark DataFrames, XShards and files, on both backends."""

import numpy as np
import pandas as pd
import pytest
import ray_models as rays
from refusals import refused
from small_searches import fit, rows, search

from bigdl.orca.data import XShards

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

OPTIONS = {
    "search_space": {"lr": 0.01, "shuffle": False, "batch_size": 32},
    "n_sampling": 1,
    "epochs": 1,
}
NAMES = {"feature_cols": "x", "label_cols": "y"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return fit(search(tmp_path_factory.mktemp("arrays")), **OPTIONS).trials()["mse"][0]


def table(x, y):
    """Return rows in shuffled order."""
    return pd.DataFrame({"i": np.arange(len(y)), "x": [row.tolist() for row in x], "y": y})


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_rows_of_spark_are_searched(orca_spark, tmp_path, expected, backend):
    if backend == "ray":
        rays.active_ray()
    data, validation = rows(), rows(60, 1)
    frames = [orca_spark.createDataFrame(table(*each)).coalesce(1) for each in (data, validation)]
    frames[0].write.parquet(str(tmp_path / "train"))
    shards = [XShards.partition({"x": x, "y": y}, num_shards=1) for x, y in (data, validation)]
    forms = {
        "DataFrame": (*frames, NAMES),
        "XShards": (*shards, {}),
        "Parquet": (str(tmp_path / "train"), frames[1], NAMES),
    }
    for form, (train, held_out, names) in forms.items():
        est = search(tmp_path / form, backend=backend)
        fit(est, train, validation_data=held_out, **names, **OPTIONS)
        assert est.trials()["mse"][0] == pytest.approx(expected, rel=1e-4), form


def test_nulls_are_told_before_a_trial_begins(orca_spark, tmp_path):
    frame = orca_spark.sql("select array(1.0d) x, cast(null as double) y")
    with refused("data-null"):
        fit(search(tmp_path), frame, **NAMES, **OPTIONS)
    assert not any(tmp_path.iterdir())
