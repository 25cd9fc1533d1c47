"""Test AutoEstimator on Ray, with Tune's schedulers and with Ray's data."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import ray_models as rays
import torch
from refusals import refused
from small_searches import SPACE, fit, model, mse, rows, search

from bigdl.common.errors import UsageError
from bigdl.orca.automl import hp
from bigdl.orca.data.xshards.ray import RayXShards

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

VALIDATION = rows(60, 1)
COLUMNS = ["mse", "epochs", "config/lr", "config/units"]


@pytest.fixture(scope="module", autouse=True)
def on_ray():
    return rays.active_ray()


@pytest.mark.slow
def test_ray_finds_what_this_machine_finds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local = fit(search(tmp_path / "local"))
    before = signal.getsignal(signal.SIGINT), dict(os.environ)
    est = fit(search("ray", backend=None), concurrency=None)
    assert (signal.getsignal(signal.SIGINT), dict(os.environ)) == before
    table = est.trials()
    assert table["status"].tolist() == ["finished"] * 3
    assert np.allclose(table[COLUMNS], local.trials()[COLUMNS], rtol=1e-5)
    assert est.get_best_config() == local.get_best_config()
    assert mse(est.get_best_model(), VALIDATION) == pytest.approx(table["mse"].min(), rel=1e-5)
    folder = tmp_path / "ray" / est.name / "search_00000"
    assert {"ray", "study.db", "weights"} & {path.name for path in folder.iterdir()} == {
        "study.db",
        "weights",
    }
    give_up = time.monotonic() + 60
    while left := keepers():
        assert time.monotonic() < give_up, f"{left} are left"
        time.sleep(0.1)


def keepers():
    """Return the actors of searches, which Ray forgets soon after their end."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["name"].startswith("bigdl-search")]


@pytest.mark.parametrize(
    ("scheduler", "params"),
    [
        ("AsyncHyperBand", {"grace_period": 1, "reduction_factor": 4}),
        pytest.param(
            "median_stopping_rule",
            {"grace_period": 1, "min_samples_required": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_schedulers_stop_trials_early(tmp_path, scheduler, params):
    space = {"lr": hp.grid_search([0.05, 1e-6, 1e-6])}
    est = search(tmp_path, backend="ray")
    fit(
        est,
        epochs=4,
        n_sampling=1,
        search_space=space,
        scheduler=scheduler,
        scheduler_params=params,
    )
    table = est.trials()
    assert table["status"][0] == "finished"
    assert "stopped early" in table["status"].tolist()
    assert est.get_best_config() == {"lr": 0.05}


@pytest.mark.slow
def test_the_best_of_the_stopped_trials_get_to_their_end(tmp_path):
    options = {
        "search_space": {"lr": hp.grid_search([0.05, 0.01, 1e-6, 1e-6])},
        "epochs": 4,
        "n_sampling": 1,
        "scheduler": "asha",
        "scheduler_params": {"finalists": 2},
    }
    epochs_run = [
        fit(search(tmp_path / backend, backend=backend), **options).trials()
        for backend in ("ray", "local")
    ]
    columns = ["mse", "epochs", "config/lr"]
    assert np.allclose(epochs_run[0][columns], epochs_run[1][columns], rtol=1e-5)
    assert epochs_run[0]["status"].tolist()[4:] == ["finished"] * 2


@pytest.mark.slow
def test_hyperband_pauses_trials_and_lets_them_go_on(tmp_path):
    est = search(tmp_path, backend="ray")
    space = {"lr": hp.grid_search([0.05, 1e-6, 1e-6])}
    fit(est, epochs=3, n_sampling=1, search_space=space, scheduler="hyperband", concurrency=None)
    assert set(est.trials()["status"]) <= {"finished", "stopped early"}
    assert est.get_best_config() == {"lr": 0.05}


@pytest.mark.slow
def test_pbt_moves_the_bad_trials_to_the_good_ones(tmp_path):
    est = search(tmp_path, backend="ray", optimizer="SGD")
    fit(
        est,
        epochs=6,
        n_sampling=1,
        concurrency=2,
        search_space={"lr": hp.grid_search([1e-7, 0.05])},
        scheduler="pbt",
        scheduler_params={
            "synch": True,  # the trials wait for one another
            "perturbation_interval": 2,
            "quantile_fraction": 0.5,
            "hyperparam_mutations": {"lr": [0.02, 0.05]},
        },
    )
    table = est.trials()
    assert table["status"].tolist() == ["finished", "finished"]
    assert table["mse"].max() < 4  # without the other's weights, the first stays at 5
    for number, row in table.iterrows():
        assert mse(est.get_model(number), VALIDATION) == pytest.approx(row["mse"], rel=1e-5)


@pytest.mark.slow
def test_optuna_proposes_on_ray_for_several_metrics(tmp_path):
    options = {"metric": ["mse", "mae"], "search_alg": "nsga2", "n_sampling": 3, "epochs": 1}
    runs = [
        fit(search(tmp_path / backend, backend=backend), **options).trials()
        for backend in ("ray", "local")
    ]
    assert np.allclose(runs[0][COLUMNS], runs[1][COLUMNS], rtol=1e-5)


@pytest.mark.slow
def test_searchers_of_ray_propose(tmp_path):
    from ray.tune.search.optuna import OptunaSearch

    space = {
        **SPACE,
        "units": hp.qrandint(4, 8, 2),
        "none": hp.choice([None, print]),
        "some": hp.choice_n(["a", "b"], 1, 2),
        "normal": hp.randn(),
        "nested": {"a": hp.quniform(0, 1, 0.25)},
    }
    est = search(tmp_path, backend="ray")
    fit(est, epochs=1, n_sampling=3, search_space=space, search_alg=OptunaSearch(seed=1))
    table = est.trials()
    assert table["status"].tolist() == ["finished"] * 3
    assert set(table["config/units"]) <= {4, 6, 8}
    assert set(table["config/nested/a"]) <= {0, 0.25, 0.5, 0.75, 1}
    assert set(est.get_best_config()) == set(space)


@pytest.mark.slow
def test_failures_of_trials_are_told(tmp_path):
    def picky(config):
        if config["units"] == 8:
            raise ArithmeticError("not eight")
        return model(config)

    est = search(tmp_path, backend="ray", model_creator=picky)
    fit(est, epochs=1, n_sampling=1, search_space={"units": hp.grid_search([8, 4])})
    assert est.trials()["status"].tolist() == ["failed", "finished"]
    assert est.trials()["failure"][0] == "ArithmeticError: not eight"


@pytest.mark.slow
@pytest.mark.fault
def test_a_trial_whose_process_is_killed_is_tried_again(tmp_path):
    marker = tmp_path / "killed"

    def deadly(config):
        if config["units"] == 8 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return model(config)

    est = search(tmp_path, backend="ray", model_creator=deadly)
    fit(est, epochs=1, n_sampling=1, search_space={"units": hp.grid_search([4, 8])})
    table = est.trials()
    assert table["status"].tolist() == ["finished", "lost", "finished"]
    assert table["config/units"].tolist() == [4, 8, 8]


PROGRAM = """
import sys, time
from pathlib import Path
from small_searches import fit, hp, model, search
from bigdl.orca import init_orca_context, stop_orca_context

logs, gate = map(Path, sys.argv[1:])

def waits(config):
    if config["units"] == 8 and not gate.exists():
        gate.touch()
        time.sleep(600)
    return model(config)

init_orca_context(runtime="ray", cores=1, object_store_memory="100m")
space = {"units": hp.grid_search([4, 8, 5])}
est = search(logs, backend="ray", model_creator=waits)
fit(est, n_sampling=1, search_space=space, resume="auto")
print(sorted(est.trials()["status"]))
stop_orca_context()
"""


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(700)
@pytest.mark.parametrize("sent_signal", [signal.SIGINT, signal.SIGKILL], ids=lambda sent: sent.name)
def test_a_search_that_was_ended_goes_on(tmp_path, sent_signal):
    program, logs, gate = tmp_path / "program.py", tmp_path / "logs", tmp_path / "gate"
    program.write_text(PROGRAM)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])

    def start():
        return subprocess.Popen(
            [sys.executable, program, logs, gate],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )

    first = start()
    try:
        give_up = time.monotonic() + 200
        while not gate.exists():
            assert first.poll() is None, "the search ended before its second trial"
            assert time.monotonic() < give_up, "the second trial did not begin"
            time.sleep(0.1)
        first.send_signal(sent_signal)
        first.wait(120)
    finally:
        first.kill()
        first.wait(60)
    second = start()
    try:
        said, _ = second.communicate(timeout=250)
    finally:
        second.kill()
        second.wait(60)
    assert second.returncode == 0
    assert said.splitlines()[-1] == "['finished', 'finished', 'finished', 'lost']"


@pytest.mark.slow
def test_data_of_ray_is_searched_where_it_is(tmp_path):
    (x, y), (vx, vy) = rows(), VALIDATION
    frames = [pd.DataFrame({"x": list(a), "y": b}) for a, b in ((x, y), (vx, vy))]
    forms = {
        "arrays": ((x, y), (vx, vy), {}),
        "RayXShards": (
            RayXShards([ray.put([{"x": x[a:b], "y": y[a:b]}]) for a, b in ((0, 50), (50, 160))]),
            RayXShards([ray.put([{"x": vx, "y": vy}])]),
            {},
        ),
        "Dataset": (*map(ray.data.from_pandas, frames), {"feature_cols": "x", "label_cols": "y"}),
    }
    space = {"lr": 0.01, "shuffle": False, "batch_size": 32}
    metrics = {}
    for form, (data, validation, names) in forms.items():
        est = search(tmp_path / form, backend="ray")
        fit(
            est,
            data,
            validation_data=validation,
            search_space=space,
            n_sampling=1,
            epochs=1,
            **names,
        )
        metrics[form] = est.trials()["mse"][0]
    assert max(metrics.values()) == pytest.approx(min(metrics.values()), rel=1e-6), metrics


@pytest.mark.slow
def test_wrong_rows_are_told_before_a_trial_begins(tmp_path):
    shards = RayXShards([ray.put([{"x": np.array(["a"]), "y": np.zeros(1)}])])
    with pytest.raises(UsageError, match="cannot become a tensor"):
        fit(search(tmp_path, backend="ray"), shards)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "best"}, ("name-unknown",)),
        ({"scheduler": "asha", "scheduler_params": {"grace": 1}}, ("argument-unknown", "'grace'")),
        ({"scheduler": "asha", "scheduler_params": {"grace_period": 9}}, ("argument-value",)),
        ({"scheduler_params": {"grace_period": 1}}, ("argument-conflict",)),
        ({"search_alg": "best"}, ("name-unknown", "search_alg")),
        ({"search_alg": "hyperopt"}, ("package-missing", "search_alg", "'hyperopt'")),
        (
            {"search_alg": "hyperopt", "search_space": {"a": hp.grid_search([1])}},
            ("argument-conflict", "grid_search"),
        ),
        ({"search_alg": "hyperopt", "metric": ["mse", "mae"]}, ("argument-conflict", "'nsga2'")),
    ],
)
def test_wrong_names_are_told(tmp_path, options, message):
    with refused(*message):
        fit(search(tmp_path, backend="ray"), **options)


def test_a_trial_that_no_node_has_room_for_is_refused(tmp_path):
    est = search(tmp_path, backend="ray", resources_per_trial={"cpu": 99})
    with refused("resource-limit"):
        fit(est)


@pytest.mark.slow
def test_the_models_of_trials_see_their_share_of_the_cores(tmp_path):
    def threads(config):
        assert torch.get_num_threads() == 2
        return model(config)

    est = search(tmp_path, backend="ray", resources_per_trial={"cpu": 2}, model_creator=threads)
    fit(est, n_sampling=1, epochs=1)
    assert est.trials()["status"].tolist() == ["finished"]
