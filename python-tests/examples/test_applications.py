"""The programs of examples/applications, on as little data as shows that they work."""

import image_pipeline
import nowcasting
import pytest
import streaming_speech


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
