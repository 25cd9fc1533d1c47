"""The programs of examples/applications, on as little data as shows that they work."""

from pathlib import Path

import image_pipeline
import nbformat
import nowcasting
import numpy as np
import pytest
import sequence_recommender
import smart_transportation
import streaming_speech
from nbclient import NotebookClient

NOTEBOOK = Path(smart_transportation.__file__).with_suffix(".ipynb")


def test_animals_are_found_described_and_found_again(orca_spark):
    found = image_pipeline.main(
        ["--pictures", "60", "--animals", "20", "--training-scenes", "320", "--epochs", "5"]
    )
    assert found["ids"] == list(range(60))
    assert found["found"] > 0.8
    assert found["again"] > 0.25  # by chance it would be 2 of 59


def test_a_stream_of_sounds_is_answered(orca_spark):
    found = streaming_speech.main(["--epochs", "8"])
    assert found["keys"] == list(range(found["sounds"]))
    assert found["right"] > 0.9


@pytest.mark.slow
def test_rain_is_forecast_better_than_by_no_change(orca_spark, tmp_path):
    picture = tmp_path / "forecast.png"
    small = ["--events", "40", "--test-events", "8", "--epochs", "6", "--hidden", "16"]
    found = nowcasting.main([*small, "--picture", str(picture)])
    for threshold in nowcasting.THRESHOLDS:
        mean = {name: found[name, threshold].mean() for name in ("ConvLSTM", "persistence")}
        assert mean["ConvLSTM"] > mean["persistence"]
    assert picture.stat().st_size > 1000


@pytest.mark.slow
def test_what_comes_next_is_recommended_by_the_sequence_of_clicks(orca_spark):
    result = sequence_recommender.main(["--users", "100", "--epochs", "3"])
    assert result["ndcg@10 of the transformers"] > result["ndcg@10 of two towers"]
    assert result["ndcg@10 of two towers"] > result["ndcg@10 of what is popular"]
    last = result["last"]
    for user, seen, scores in zip(last["user"], last["seen"], result["scores"], strict=True):
        scores[[0, *seen]] = -np.inf
        best = np.sort(scores)[::-1][: sequence_recommender.BEST]
        served = scores[result["answers"][user]]
        assert (np.diff(served) <= 1e-4).all()  # by the transformers' scores, best first
        np.testing.assert_allclose(served, best, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_vehicles_are_tracked_read_and_bound_across_cameras(orca_spark, tmp_path):
    picture = tmp_path / "tracks.png"
    found = smart_transportation.main(["--picture", str(picture)])
    assert found["mota"] >= 0.8
    assert found["plates"] >= 0.95
    assert found["binding"] >= 0.9
    assert picture.stat().st_size > 1000


@pytest.mark.slow
def test_the_notebook_of_smart_transportation_runs(tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    check = "assert figures['mota'] > 0.6 and figures['plates'] > 0.6, figures"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parent))  # Jupyter runs a notebook in its folder
    client = NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
