"""The programs of examples/applications, on as little data as shows that they work."""

from pathlib import Path

import image_pipeline
import nbformat
import nowcasting
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sequence_recommender
import smart_transportation
import streaming_speech
import tracking
import traffic
from nbclient import NotebookClient

APPLICATIONS = Path(smart_transportation.__file__).parent
CHECKS = {
    "image_pipeline": """
assert sorted(result["id"]) == list(range(60))
assert figures["found"] > 0.8 and figures["again"] > 0.25, figures  # by chance 2 of 59
""",
    "streaming_speech": """
assert table["key"].tolist() == list(range(len(test))) and len(test) == 200
assert right > 0.9, right
""",
    "nowcasting": """
for threshold in program.THRESHOLDS:
    mean = {name: index[name, threshold].mean() for name in forecasts}
    assert mean["ConvLSTM"] > mean["persistence"], mean
""",
    "sequence_recommender": """
assert figures["ndcg@10 of SASRec"] > 2 * figures["ndcg@10 of what is popular"], figures
lists = recommender.recommend(k=program.BEST)
best = {user: group["item"].tolist() for user, group in lists.groupby("user")}
same = [a == b for user in best for a, b in zip(best[user], answers[user], strict=True)]
assert np.mean(same) > 0.98  # rounding may swap items with nearly equal scores
""",
    "smart_transportation": "assert figures['mota'] > 0.6 and figures['plates'] > 0.6, figures",
}
"""What holds after the last cell of each notebook, of the variables that it defines."""


@pytest.mark.slow
def test_animals_are_found_described_and_found_again(orca_spark):
    found = image_pipeline.main(
        ["--pictures", "60", "--animals", "20", "--training-scenes", "320", "--epochs", "5"]
    )
    assert found["ids"] == list(range(60))
    assert found["found"] > 0.8
    assert found["again"] > 0.25  # by chance it would be 2 of 59


@pytest.mark.slow
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
    result = sequence_recommender.main(["--users", "100", "--epochs", "10"])
    assert result["ndcg@10 of SASRec"] > 2 * result["ndcg@10 of what is popular"]
    lists = result["lists"].groupby("user")["item"]
    best = {user: items.tolist() for user, items in lists}
    same = [
        a == b for user in best for a, b in zip(best[user], result["answers"][user], strict=True)
    ]
    assert np.mean(same) > 0.98  # rounding may swap items with nearly equal scores


@pytest.fixture
def two_parts(orca_spark):
    """A session whose shuffles have two partitions: each has its state and files in every batch."""
    name = "spark.sql.shuffle.partitions"
    before = orca_spark.conf.get(name)
    orca_spark.conf.set(name, "2")
    yield orca_spark
    orca_spark.conf.set(name, before)


@pytest.mark.slow
def test_a_stream_that_was_stopped_has_the_tracks_of_all_frames_once(two_parts, tmp_path):
    scene = traffic.Scene(5, cameras=2, seconds=8)
    chunks, expected = [], set()
    for camera in range(2):
        tracker = tracking.Tracker()
        for low in range(0, scene.frames, 20):
            rows = []
            for number in range(low, low + 20):
                truth = scene.frame(camera, number)[1]
                boxes = [box.tolist() for box in truth["box"][truth["counts"]]]
                known = [None] * len(boxes)
                rows.append([camera, number, boxes, known, known])
                expected |= {(camera, *each[:2]) for each in tracker.update(number, boxes)}
            chunks.append(rows)
    order = [0, 4, 2, 1, 5, 6, 3, 7]  # a part of a camera comes before its turn
    schema = f"camera int, frame int, {smart_transportation.FOUND}"
    numbers = pa.list_(pa.list_(pa.float32()))
    types = [pa.int32(), pa.int32(), numbers, pa.list_(pa.string()), numbers]
    names = ["camera", "frame", "boxes", "readings", "chances"]
    arrived, output = tmp_path / "arrived", str(tmp_path / "tracks")
    arrived.mkdir()
    for part in (order[:3], order[3:]):
        for chunk in part:
            columns = zip(*chunks[chunk], strict=True)
            arrays = [pa.array(each, kind) for each, kind in zip(columns, types, strict=True)]
            pq.write_table(pa.table(arrays, names=names), arrived / f"{order.index(chunk)}.parquet")
        stream = two_parts.readStream.schema(schema).option("maxFilesPerTrigger", 2)
        tracks = smart_transportation.tracked(stream.parquet(str(arrived)))
        writer = tracks.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start(output)
        query.awaitTermination()
    made = two_parts.read.parquet(output).select("camera", "track", "frame").collect()
    assert len(made) == len(expected) > 300
    assert {tuple(row) for row in made} == expected


@pytest.mark.slow
def test_plates_are_voted_and_tracks_bound(orca_spark):
    def seen(camera, track, first, *readings):
        chances = [[0.9 if glyph != "?" else 0.2 for glyph in text] for text in readings]
        frames = zip(readings, chances, strict=True)
        return [(camera, track, first + i, [0.0] * 4, *each) for i, each in enumerate(frames)]

    rows = [
        *seen(0, 0, 10, "AB12CD", "AB12C8", "A?12CD"),
        *seen(0, 1, 20, "XY34ZW"),
        *seen(1, 5, 160, "AB12CE", "AB12CE"),  # a glyph is wrong
        *seen(1, 6, 30, "XY34ZW"),  # it cannot have come so early
        *seen(1, 7, 170, "AB99CD"),
        *seen(2, 3, 300, "AB12CD"),
        (2, 4, 310, [0.0] * 4, None, None),
    ]
    tracks = orca_spark.createDataFrame(rows, smart_transportation.TRACKS)
    summaries = smart_transportation.with_plates(tracks).cache()
    found = {(row.camera, row.track): row for row in summaries.collect()}
    assert found[0, 0].plate == "AB12CD"
    assert (found[0, 0].first, found[0, 0].last, found[0, 0].frames) == (10, 12, 3)
    assert found[2, 4].plate is None
    pairs = smart_transportation.bound(summaries).select("from_track", "to_track", "seconds")
    assert sorted(map(tuple, pairs.collect())) == [(0, 5, 15.0), (5, 3, 14.0)]


@pytest.mark.slow
@pytest.mark.timeout(900)  # it trains four networks
def test_vehicles_are_tracked_read_and_bound_across_cameras(orca_spark, tmp_path):
    picture = tmp_path / "tracks.png"
    found = smart_transportation.main(["--picture", str(picture)])
    assert found["mota"] >= 0.8
    assert found["plates"] >= 0.95
    assert found["binding"] >= 0.9
    assert picture.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_notebook_of_the_application_runs(name, tmp_path, monkeypatch):
    notebook = nbformat.read(APPLICATIONS / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    monkeypatch.setenv("PYTHONPATH", str(APPLICATIONS))  # Jupyter runs a notebook in its folder
    client = NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
