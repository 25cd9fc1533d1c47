"""Trials of several workers on Ray: they find what one worker finds."""

import numpy as np
import pytest
import rays
from searches import fit, mse, rows, search

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

VALIDATION = rows(61, 1)
COLUMNS = ["mse", "epochs", "config/lr", "config/units"]


@pytest.fixture(scope="module", autouse=True)
def on_ray():
    return rays.active_ray()


def shared(logs_dir, **parts):
    """A search whose trials have two workers each."""
    return search(logs_dir, backend="ray", workers_per_trial=2, **parts)


def test_two_workers_find_what_one_worker_finds(tmp_path):
    one = fit(search(tmp_path / "one"), rows(159), validation_data=VALIDATION)
    two = fit(shared(tmp_path / "two"), rows(159), validation_data=VALIDATION)
    table = two.trials()
    assert table["status"].tolist() == ["finished"] * 3
    assert np.allclose(table[COLUMNS], one.trials()[COLUMNS], rtol=1e-5, atol=1e-6)
    assert two.get_best_config() == one.get_best_config()
    assert mse(two.get_best_model(), VALIDATION) == pytest.approx(table["mse"].min(), rel=1e-5)
