"""Test AutoEstimator on this machine: results, records and charts."""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from small_searches import SPACE, fit, model, mse, rows, search

from bigdl.orca.automl import hp
from bigdl.orca.automl.records import latest_search
from bigdl.training.state import seed_everything

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

VALIDATION = rows(60, 1)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return fit(search(tmp_path_factory.mktemp("logs")), epochs=3)


# -- results ------------------------------------------------------------------------------------


def test_the_best_model_has_the_best_figure_of_all_trials(fitted):
    table = fitted.trials()
    assert list(table["status"]) == ["finished"] * 3
    assert mse(fitted.get_best_model(), VALIDATION) == pytest.approx(table["mse"].min(), rel=1e-5)
    best = table.loc[table["mse"].idxmin()]
    config = fitted.get_best_config()
    assert (config["lr"], config["units"]) == (best["config/lr"], best["config/units"])
    assert config["batch_size"] == 32


def test_every_trial_has_its_own_model(fitted):
    for number, row in fitted.trials().iterrows():
        assert mse(fitted.get_model(number), VALIDATION) == pytest.approx(row["mse"], rel=1e-5)


def test_a_trial_is_what_a_plain_loop_computes(tmp_path):
    """Compare with a plain torch loop with the same seed and unshuffled batches."""
    config = {"lr": 0.05, "units": 4, "batch_size": 40, "shuffle": False}
    est = fit(search(tmp_path), n_sampling=1, search_space=config, seed=11)
    seed_everything(11)
    net, (x, y) = model(config), map(torch.from_numpy, rows())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(2):
        for start in range(0, 160, 40):
            loss = torch.nn.functional.mse_loss(
                net(x[start : start + 40])[:, 0], y[start : start + 40]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert est.trials()["mse"][0] == pytest.approx(mse(net, VALIDATION), rel=1e-6)


@pytest.mark.slow
def test_processes_find_what_one_process_finds(tmp_path, fitted):
    est = fit(search(tmp_path), epochs=3, concurrency=2)
    columns = ["mse", "epochs", "config/lr", "config/units"]
    assert est.trials()[columns].equals(fitted.trials()[columns])


def test_a_search_leaves_the_random_numbers_of_the_program_alone(tmp_path):
    states = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        if states:
            fit(search(tmp_path), n_sampling=1)
        states.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert states[0] == states[1]


def test_a_trial_counts_by_its_best_epoch(tmp_path):
    """Use a rate so high that the last epoch is not the best one."""
    est = fit(search(tmp_path, optimizer="SGD"), epochs=6, n_sampling=1, search_space={"lr": 0.9})
    (trial,) = est._records.finished()
    values = trial.intermediate_values
    assert sorted(values) == [1, 2, 3, 4, 5, 6]
    assert est.trials()["mse"][0] == min(values.values())
    assert mse(est.get_best_model(), VALIDATION) == pytest.approx(min(values.values()), rel=1e-5)


def test_a_threshold_ends_trials(tmp_path):
    est = fit(search(tmp_path), epochs=50, n_sampling=1, metric_threshold=100.0)
    assert est.trials()["epochs"].tolist() == [1]


def test_metrics_may_be_functions(tmp_path):
    def largest_error(y_true, y_pred):
        assert y_true.shape == y_pred.shape == (60,)
        return np.abs(y_true - y_pred).max()

    est = fit(search(tmp_path), metric=largest_error, metric_mode="min")
    table = est.trials()
    with torch.no_grad():
        predicted = est.get_best_model()(torch.from_numpy(VALIDATION[0])).numpy()[:, 0]
    assert table["largest_error"].min() == pytest.approx(abs(predicted - VALIDATION[1]).max())


# -- searching ----------------------------------------------------------------------------------


def test_grids_are_searched_completely(tmp_path):
    space = {"lr": hp.grid_search([0.01, 0.1]), "units": hp.grid_search([4, 8])}
    table = fit(search(tmp_path), epochs=1, n_sampling=2, search_space=space).trials()
    assert len(table) == 8
    counts = table.groupby(["config/lr", "config/units"]).size()
    assert counts.tolist() == [2, 2, 2, 2]


def test_optuna_proposes_and_the_seed_decides(tmp_path):
    runs = [
        fit(search(tmp_path / str(k)), epochs=1, n_sampling=4, search_alg="optuna", seed=seed)
        .trials()["config/lr"]
        .tolist()
        for k, seed in enumerate([0, 0, 1])
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_scheduler_stops_trials_early(tmp_path):
    space = {"lr": hp.grid_search([0.05, 1e-6, 1e-6, 1e-6])}
    options = {"grace_period": 1, "reduction_factor": 4, "finalists": 0}
    est = fit(
        search(tmp_path),
        epochs=4,
        n_sampling=1,
        search_space=space,
        scheduler="AsyncHyperBand",
        scheduler_params=options,
    )
    table = est.trials()
    assert table["status"].tolist() == ["finished", *["stopped early"] * 3]
    assert table["epochs"].tolist() == [4, 1, 1, 1]
    assert est.get_best_config()["lr"] == 0.05


def test_several_metrics_have_a_front_of_best_trials(tmp_path):
    def size(y_true, y_pred):
        return float(np.abs(y_pred).mean())

    est = fit(
        search(tmp_path),
        metric=["mse", size],
        metric_mode=["min", "min"],
        n_sampling=6,
        search_alg="nsga2",
    )
    table, front = est.trials(), est.get_best_trials()
    best = {each["trial"] for each in front}
    for number, row in table.iterrows():
        beaten = (
            (table["mse"] <= row["mse"])
            & (table["size"] <= row["size"])
            & ((table["mse"] < row["mse"]) | (table["size"] < row["size"]))
        )
        assert (number in best) == (not beaten.any())
    with refused("argument-missing"):
        est.get_best_model()
    assert mse(est.get_model(front[0]), VALIDATION) == pytest.approx(front[0]["mse"])


def test_a_trial_that_fails_does_not_end_the_search(tmp_path):
    def picky(config):
        if config["units"] == 8:
            raise ArithmeticError("not eight")
        return model(config)

    space = {"units": hp.grid_search([4, 8])}
    table = fit(search(tmp_path, model_creator=picky), n_sampling=1, search_space=space).trials()
    assert table["status"].tolist() == ["finished", "failed"]
    assert table["failure"][1] == "ArithmeticError: not eight"


def test_when_all_trials_fail_the_first_cause_is_said(tmp_path):
    def broken(config):
        raise ArithmeticError("no such model")

    with refused("search-failed", "2") as caught:
        fit(search(tmp_path, model_creator=broken), n_sampling=2)
    assert "in broken" in caught.value.__notes__[0]


# -- data ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_arrays_loaders_frames_and_functions_give_the_same_figures(tmp_path):
    import pandas as pd

    (x, y), (vx, vy) = rows(), VALIDATION
    columns = {"feature_cols": "x", "label_cols": "y"}

    def tensors(x, y):
        return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    def loader(x, y):
        return torch.utils.data.DataLoader(tensors(x, y), batch_size=32)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(x, y, strict=True)

    forms = {
        "arrays": ((x, y), (vx, vy), {}),
        "float64": ((x.astype("f8"), y.astype("f8")), (vx, vy), {}),
        "frame": (*(pd.DataFrame({"x": list(a), "y": b}) for a, b in ((x, y), (vx, vy))), columns),
        "loader": (loader(x, y), loader(vx, vy), {}),
        "function": (lambda config: loader(x, y), lambda config: loader(vx, vy), {}),
        "dataset": (lambda config: tensors(x, y), lambda config: tensors(vx, vy), {}),
        "stream": (torch.utils.data.DataLoader(Stream(), 32), (vx, vy), {}),
    }
    space = {"lr": 0.01, "shuffle": False, "batch_size": 32}
    metrics = {}
    for form, (data, validation, names) in forms.items():
        est = search(tmp_path / form)
        fit(est, data, validation_data=validation, search_space=space, n_sampling=1, **names)
        metrics[form] = est.trials()["mse"][0]
    assert len(set(metrics.values())) == 1, metrics


@pytest.mark.slow
def test_models_of_several_inputs_take_several_features(tmp_path):
    import pandas as pd

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, a, b):
            return self.linear(
                torch.stack([*a.T, *b.T], 1) if a.ndim > 1 else torch.stack([a, b, a, b], 1)
            )

    (x, y) = rows()
    parts = {"model_creator": lambda config: Two()}
    lists = ([x[:, :2], x[:, 2:]], y)
    one = fit(search(tmp_path / "a", **parts), lists, validation_data=lists, n_sampling=1)
    assert one.trials()["status"][0] == "finished"
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y})
    names = {"feature_cols": ["a", "b"], "label_cols": ["y"]}
    two = fit(search(tmp_path / "b", **parts), frame, validation_data=frame, n_sampling=1, **names)
    assert two.trials()["status"][0] == "finished"


def test_the_metric_is_that_of_the_training_data_without_validation_data(tmp_path, caplog):
    est = fit(search(tmp_path), validation_data=None, n_sampling=1)
    assert "without validation_data" in caplog.text.lower()
    assert mse(est.get_best_model(), rows()) == pytest.approx(est.trials()["mse"][0], rel=1e-5)


# -- what is shown ------------------------------------------------------------------------------


def test_charts_are_drawn(fitted, tmp_path):
    for suffix in ("html", "svg", "png"):
        for draw in (fitted.plot_history, fitted.plot_parallel_coordinates):
            path = tmp_path / f"chart.{suffix}"
            draw(path)
            assert path.stat().st_size > 1000
    fitted.plot_parallel_coordinates(tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text()
    assert drawn.count("<circle") == 3 * 3
    assert all(name in drawn for name in ("lr", "units", "mse"))


def test_a_report_has_the_best_trial_and_all_trials(fitted, tmp_path):
    page = fitted.report(tmp_path / "search.html")
    text = (tmp_path / "search.html").read_text()
    assert page._repr_html_() in text
    assert f"Best: trial {fitted.trials()['mse'].idxmin()}" in text
    assert text.count("<svg") == 2
    assert all(f"trial {number}" in text for number in fitted.trials().index)


def events(folder):
    """Yield tags and values of the event files in a folder."""
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    for path in folder.glob("events*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            yield from ((value.tag, value.simple_value) for value in event.summary.value)


def test_the_leaderboard_has_a_run_for_each_trial(fitted):
    folder = fitted.logs_dir / "auto_pytorch_estimator_leaderboard"
    runs = sorted(path.name for path in folder.iterdir())
    assert runs == ["trial_00000", "trial_00001", "trial_00002"]
    for number, run in enumerate(runs):
        recorded = list(events(folder / run))
        tags = [tag for tag, _ in recorded]
        assert tags.count("mse") == 3
        assert dict(recorded)["best/mse"] == pytest.approx(fitted.trials()["mse"][number])
        assert any("hparams" in tag for tag in tags)


# -- interruptions ------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from small_searches import fit, model, search

logs, builds, deadly = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def counted(config):
    with builds.open("a") as file:
        file.write(f"{config['lr']}\\n")
    if len(builds.read_text().splitlines()) == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return model(config)

est = fit(search(logs, model_creator=counted), epochs=1, n_sampling=5, resume="auto")
print(est.trials()[["status", "config/lr"]].to_json(double_precision=15))
"""


@pytest.mark.slow
@pytest.mark.fault
def test_a_search_that_was_killed_loses_no_finished_trial(tmp_path):
    program, logs, builds = tmp_path / "program.py", tmp_path / "logs", tmp_path / "builds"
    program.write_text(PROGRAM)

    def run(deadly):
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        return subprocess.run(
            [sys.executable, program, logs, builds, str(deadly)],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=240,
        )

    assert run(3).returncode == -signal.SIGKILL
    assert len(builds.read_text().split()) == 3  # two have finished, the third has begun
    result = run(0)
    assert result.returncode == 0, result.stderr
    tried = builds.read_text().split()
    assert len(tried) == 6
    assert tried.count(tried[2]) == 2  # only the lost trial is repeated
    assert len(set(tried)) == 5
    table = json.loads(result.stdout.splitlines()[-1])
    finished = [number for number, status in table["status"].items() if status == "finished"]
    kept = sorted(table["config/lr"][number] for number in finished)
    assert sorted(float(each) for each in set(tried)) == pytest.approx(kept, rel=1e-9)


def test_a_search_that_is_interrupted_goes_on(tmp_path):
    def stops(config):
        if len(list(latest_search(folder).glob("weights/0*"))) == 2:
            raise KeyboardInterrupt
        return model(config)

    folder = tmp_path / "auto_pytorch_estimator"
    for resume in (False, True):  # twice during the same trial
        with pytest.raises(KeyboardInterrupt):
            fit(search(tmp_path, model_creator=stops), n_sampling=4, resume=resume)
    resumed = fit(search(tmp_path), n_sampling=4, resume=True)
    table = resumed.trials()
    assert (table["status"] == "finished").sum() == 4
    whole = fit(search(tmp_path / "whole"), n_sampling=4)
    assert resumed.get_best_config() == whole.get_best_config()
    assert sorted(table["mse"].dropna()) == sorted(whole.trials()["mse"])


def test_a_finished_search_can_be_asked_for_more_trials(tmp_path):
    first = fit(search(tmp_path), n_sampling=2).trials()
    more = fit(search(tmp_path), n_sampling=4, resume=True)
    assert more.trials()["mse"].tolist()[:2] == first["mse"].tolist()
    assert len(more.trials()) == 4


def test_another_search_is_not_gone_on_with(tmp_path):
    fit(search(tmp_path), n_sampling=1)
    with refused("checkpoint-mismatch", "2", "3"):
        fit(search(tmp_path), n_sampling=1, epochs=3, resume=True)
    with refused("checkpoint-mismatch", "search_space"):
        fit(search(tmp_path), n_sampling=1, search_space={**SPACE, "lr": 0.1}, resume=True)
    with refused("checkpoint-missing"):
        fit(search(tmp_path / "elsewhere"), resume=True)


def test_searches_of_one_name_lie_side_by_side(tmp_path):
    for _ in range(2):
        fit(search(tmp_path), n_sampling=1)
    folders = sorted(path.name for path in (tmp_path / "auto_pytorch_estimator").iterdir())
    assert folders == ["search_00000", "search_00001"]


def test_each_trial_that_ends_is_shown(tmp_path, capfd):
    fit(search(tmp_path), epochs=1, n_sampling=2)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("trial ")]
    assert [line.split(":")[0] for line in lines] == ["trial 1/2", "trial 2/2"]
    assert "left" in lines[0]
    assert "best" in lines[1]


def test_searches_without_a_folder_are_kept_where_only_their_user_can_write(tmp_path, monkeypatch):
    from bigdl.orca.automl.auto_estimator import AutoEstimator
    from bigdl.orca.automl.xgboost import AutoXGBRegressor

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = tmp_path / f"bigdl-{os.geteuid()}"
    for made, name in (
        (AutoEstimator.from_keras(model_creator=print, backend="local"), "auto_estimator_logs"),
        (AutoXGBRegressor(backend="local"), "auto_xgb_regressor_logs"),
    ):
        assert made.logs_dir == root / name
    assert root.stat().st_mode & 0o777 == 0o700
