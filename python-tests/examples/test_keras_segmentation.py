"""The segmentation of examples/orca/keras, on images that are made up."""

import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest
from pyspark import cloudpickle as cloudpickle_of_spark

pytestmark = pytest.mark.timeout(900)

FOLDER = Path(__file__).parents[2] / "examples" / "orca" / "keras"


@pytest.fixture
def segmentation(orca_spark, monkeypatch):
    """The program as if it were run: Python workers cannot import it by its name."""
    place = FOLDER / "segmentation.py"
    spec = importlib.util.spec_from_file_location("keras_segmentation", place)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for pickler in (cloudpickle, cloudpickle_of_spark):
        pickler.register_pickle_by_value(module)
    yield module
    for pickler in (cloudpickle, cloudpickle_of_spark):
        pickler.unregister_pickle_by_value(module)


@pytest.mark.slow
def test_discs_are_found(segmentation):
    found = segmentation.main(["--images", "120", "--epochs", "10"])
    assert found["loss"][-1] < found["loss"][0]
    assert found["overlap"] > 0.5
    assert found["validation_iou"] == pytest.approx(found["overlap"], abs=1e-4)
