"""The programs of examples/orca, on as little data as shows that they learn."""

import inputs
import main_callback
import pytest
import segmentation
import tabular
import transfer_learning


@pytest.mark.slow
def test_loader_dataframe_and_shards_train_the_same_model(orca_spark):
    found = inputs.main(["--epochs", "4"])
    assert min(found.values()) > 0.9


@pytest.mark.slow
def test_a_table_is_cleaned_and_learned(orca_spark, tmp_path):
    found = tabular.main(["--rows", "600", "--epochs", "10"])
    assert found["rows"] == 600  # rows that came twice are there once
    assert sorted(found["table"]["flat"]) == list(range(600))
    assert found["table"]["prediction"].between(0, 1).all()
    assert found["accuracy"] > 0.85


@pytest.mark.slow
def test_masks_of_generated_images_are_found(orca_spark):
    found = segmentation.main(["--images", "40", "--epochs", "15", "--size", "24"])
    assert found["iou"] > 0.5
    assert found["stats"][-1]["train_loss"] < 0.5 * found["stats"][0]["train_loss"]


@pytest.mark.slow
def test_a_step_of_ones_own_trains_an_autoencoder(orca_spark):
    found = main_callback.main(["--epochs", "8"])
    assert found["code"].shape == (1797, 8)
    assert found["error"] < 0.8 * found["spread"]


def test_a_frozen_backbone_is_transferred(orca_spark, data_dir):
    argv = ["--data-dir", str(data_dir / "cats-dogs"), "--limit", "24", "--epochs", "4"]
    found = transfer_learning.main([*argv, "--size", "32", "--channels", "8"])
    assert found["turns"][-1]["train_loss"] < found["turns"][0]["train_loss"]
    assert found["stats"][-1]["train_loss"] < found["stats"][0]["train_loss"]
    assert len(found["right"]) == 48
    assert abs(found["right"].mean() - found["accuracy"]) < 1e-6
