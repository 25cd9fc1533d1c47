"""Test programs of users: old imports, the examples, and the benchmark of early stopping."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT / "examples" / "orca" / "automl"), str(ROOT / "benchmarks")]


def test_names_are_where_programs_import_them_from():
    from bigdl.orca.automl import hp
    from bigdl.orca.automl.auto_estimator import AutoEstimator
    from bigdl.orca.automl.metrics import Evaluator
    from bigdl.orca.automl.model.base_keras_model import KerasModelBuilder
    from bigdl.orca.automl.model.base_pytorch_model import PytorchModelBuilder
    from bigdl.orca.automl.pytorch_utils import LR_NAME
    from bigdl.orca.automl.xgboost import AutoXGBClassifier, AutoXGBRegressor, XGBoostModelBuilder

    assert LR_NAME == "lr"
    assert callable(hp.choice)
    assert callable(Evaluator.evaluate)
    assert issubclass(AutoXGBClassifier, AutoEstimator)
    assert issubclass(AutoXGBRegressor, AutoEstimator)
    assert len({KerasModelBuilder, PytorchModelBuilder, XGBoostModelBuilder}) == 3


def test_importing_loads_no_framework():
    heavy = ["torch", "tensorflow", "keras", "ray", "pyspark", "xgboost", "optuna", "pandas"]
    lines = "import bigdl.orca.automl.hp, bigdl.orca.automl.auto_estimator, sys"
    code = f"{lines}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_example_of_digits_learns(tmp_path):
    import auto_digits

    logs, chart = ["--logs", str(tmp_path)], ["--chart", str(tmp_path / "chart.html")]
    sizes = ["--trials", "2", "--epochs", "2", "--backend", "local", "--cores", "1"]
    result = auto_digits.main([*sizes, *logs, *chart])
    assert result["accuracy"] > 0.7
    assert result["accuracy"] == pytest.approx(result["trials"]["accuracy"].max(), abs=1e-6)
    assert (tmp_path / "chart.html").exists()


@pytest.mark.slow
def test_the_example_of_xgboost_learns(tmp_path):
    pytest.importorskip("xgboost", reason="XGBoost is not installed: bigdl[xgboost]")
    import auto_xgboost

    sizes = ["--trials", "3", "--backend", "local", "--cores", "1"]
    result = auto_xgboost.main([*sizes, "--logs", str(tmp_path)])
    assert result["rmse"] < 65
    assert result["rmse"] == pytest.approx(result["trials"]["rmse"].min(), rel=1e-5)


@pytest.mark.slow
def test_early_stopping_finds_as_good_a_model_in_fewer_epochs():
    import automl

    full = automl.search(10, 9, seed=0)
    early = automl.search(10, 9, seed=0, scheduler="AsyncHyperBand")
    assert early["configs"] == full["configs"]
    assert full["epochs"] == 90
    assert early["epochs"] <= 0.6 * full["epochs"]
    assert early["best"] >= full["best"] - 1.0
