"""The programs of examples/applications, on as little data as shows that they work."""

import image_pipeline


def test_animals_are_found_described_and_found_again(orca_spark):
    found = image_pipeline.main(
        ["--pictures", "60", "--animals", "20", "--training-scenes", "400", "--epochs", "6"]
    )
    assert found["ids"] == list(range(60))
    assert found["found"] > 0.8
    assert found["again"] > 0.5
