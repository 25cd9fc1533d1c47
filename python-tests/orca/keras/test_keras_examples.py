"""The programs of examples/orca/keras, on as little data as shows that they learn."""

import importlib
import sys
from pathlib import Path

import cloudpickle
import pytest
from pyspark import cloudpickle as cloudpickle_of_spark

pytestmark = pytest.mark.timeout(900)

FOLDER = Path(__file__).parents[3] / "examples" / "orca" / "keras"


@pytest.fixture
def program(request, orca_spark):
    """A program as if it were run: Python workers cannot import it by its name."""
    sys.path.insert(0, str(FOLDER))
    try:
        module = importlib.import_module(request.param)
    finally:
        sys.path.remove(str(FOLDER))
    for pickler in (cloudpickle, cloudpickle_of_spark):
        pickler.register_pickle_by_value(module)
    yield module
    for pickler in (cloudpickle, cloudpickle_of_spark):
        pickler.unregister_pickle_by_value(module)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["digits_keras"], indirect=True)
def test_digits_are_told_apart(program):
    found = program.main(["--epochs", "4"])
    assert found["accuracy"] > 0.7
    assert found["validation_accuracy"] == pytest.approx(found["accuracy"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dataframe", "xshards"])
@pytest.mark.parametrize("program", ["ncf_keras"], indirect=True)
def test_ncf_learns_from_made_up_ratings(program, form):
    found = program.main(["--input", form, "--epochs", "4", "--batch-size", "128"])
    assert len(found["loss"]) == 4
    assert found["loss"][-1] < found["loss"][0]
    assert found["validation_AUC"] > 0.6
    assert found["rows"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("program", ["ncf_keras"], indirect=True)
def test_ncf_learns_from_movielens(program, data_dir):
    found = program.main(["--data-dir", str(data_dir / "ml-100k"), "--epochs", "3"])
    assert found["validation_AUC"] > 0.8
