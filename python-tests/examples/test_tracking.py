"""Tracks and their figures, on boxes whose answers are known."""

import itertools

import numpy as np
import pandas as pd
import pytest
import tracking
import traffic


def boxes_of(centres, side=40.0):
    centres = np.reshape(centres, (-1, 2))
    return np.concatenate([centres - side / 2, centres + side / 2], 1)


def tracks_of(frames, **options):
    """Track by (frame, number of the box)."""
    tracker = tracking.Tracker(**options)
    made = []
    for number, boxes in enumerate(frames):
        made += tracker.update(number, boxes)
    return {(frame, box): track for track, frame, box in made}


@pytest.fixture(scope="module")
def truth():
    """Four vehicles before two cameras, each for 20 frames."""
    rows = [
        (camera, frame, 2 * camera + k, boxes_of([20.0 + 5 * frame, 60.0 + 90 * k])[0], True)
        for camera in range(2)
        for frame in range(20)
        for k in range(2)
    ]
    return pd.DataFrame(rows, columns=["camera", "frame", "vehicle", "box", "counts"])


def as_tracks(truth):
    return truth.rename(columns={"vehicle": "track"}).drop(columns="counts")


def test_the_truth_itself_is_tracked_perfectly(truth):
    matched = tracking.matches(truth, as_tracks(truth))
    assert tracking.mota(matched) == tracking.idf1(matched) == 1.0
    assert tracking.pairs(matched) == {(v // 2, v, v): 20 for v in range(4)}
    assert tracking.owners(matched) == {(v // 2, v): v for v in range(4)}


def test_identities_that_are_swapped_lower_idf1_and_are_switches(truth):
    tracks = as_tracks(truth)
    late = (tracks["camera"] == 0) & (tracks["frame"] >= 15)
    tracks.loc[late, "track"] = 1 - tracks.loc[late, "track"]
    matched = tracking.matches(truth, tracks)
    assert tracking.switches(matched) == 2
    assert tracking.mota(matched) == 1 - 2 / 80
    assert tracking.idf1(matched) == (40 + 30) / 80


def test_misses_and_false_positives_lower_mota(truth):
    tracks = as_tracks(truth)
    away = tracks["box"].map(lambda box: box + 200.0)
    wrong = tracks["frame"] < 2
    tracks["box"] = tracks["box"].where(~wrong, away)
    matched = tracking.matches(truth, tracks)
    assert tracking.mota(matched) == 1 - (8 + 8) / 80
    assert tracking.idf1(matched) == 72 / 80


def test_what_need_not_be_found_counts_neither_way(truth):
    tracks = as_tracks(truth)
    truth = truth.assign(counts=truth["vehicle"] != 3)
    for part in (tracks, tracks[tracks["track"] != 3]):
        matched = tracking.matches(truth, part)
        assert len(matched) == 60
        assert tracking.mota(matched) == 1.0


def test_no_track_at_all_is_zero(truth):
    matched = tracking.matches(truth, as_tracks(truth).iloc[:0])
    assert tracking.mota(matched) == tracking.idf1(matched) == 0.0


def test_overlaps_are_those_of_their_definition():
    first, second = [[0, 0, 10, 10]], [[5, 0, 15, 10], [20, 0, 30, 10], [0, 0, 10, 20]]
    np.testing.assert_allclose(tracking.overlaps(first, second), [[1 / 3, 0, 1 / 2]])
    np.testing.assert_allclose(tracking.shares(first, second), [[1 / 2, 0, 1]])


def test_a_track_goes_on_behind_what_hides_it():
    frames = [boxes_of([10.0 + 8 * n, 50.0]) if not 12 <= n < 22 else [] for n in range(40)]
    tracks = tracks_of(frames)
    assert set(tracks.values()) == {0}
    assert {frame for frame, _ in tracks} == {*range(12), *range(22, 40)}


def test_a_track_that_is_hidden_for_too_long_ends():
    frames = [boxes_of([10.0 + 8 * n, 50.0]) if not 12 <= n < 32 else [] for n in range(40)]
    assert set(tracks_of(frames, patience=10).values()) == {0, 1}


def test_vehicles_that_overtake_each_other_keep_their_tracks():
    frames = [boxes_of([[10.0 + 9 * n, 50.0], [130.0 + 3 * n, 66.0]]) for n in range(40)]
    tracks = tracks_of(frames)
    assert {track for (_, box), track in tracks.items() if box == 0} == {0}
    assert {track for (_, box), track in tracks.items() if box == 1} == {1}


def test_what_is_seen_once_or_twice_is_no_track():
    frames = [boxes_of([50.0, 50.0]) if n in (3, 4, 9) else [] for n in range(20)]
    assert tracks_of(frames) == {}


def test_a_track_that_begins_to_count_has_its_first_frames():
    frames = [boxes_of([10.0 + 5 * n, 50.0]) for n in range(3)]
    assert tracks_of(frames[:2]) == {}
    assert [*tracks_of(frames)] == [(0, 0), (1, 0), (2, 0)]


def test_scenes_are_functions_of_their_seed():
    frames = [traffic.Scene(seed, 2, 5).frame(1, 30) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(frames[0][0], frames[1][0])
    pd.testing.assert_frame_equal(frames[0][1], frames[1][1])
    assert (frames[0][0] != frames[2][0]).any()
    empty = traffic.Scene(1, 2, 5, interval=1e6).frame(0, 0)[1]
    assert len(empty) == 0
    assert empty["counts"].dtype == bool


def test_vehicles_come_to_one_camera_after_the_other():
    scene = traffic.Scene(3, cameras=3, seconds=60)
    assert len({each.plate for each in scene.vehicles}) == len(scene.vehicles)
    entered = {}
    for passage in sorted(scene.passages, key=lambda each: each.camera):
        entered.setdefault(passage.vehicle.number, []).append((passage.camera, passage.enters))
    several = [each for each in entered.values() if len(each) > 1]
    assert len(several) > 10
    for passages in several:
        for (camera, time), (following, later) in itertools.pairwise(passages):
            assert following == camera + 1
            assert later - time >= traffic.DISTANCE / traffic.FASTEST


def test_a_plate_behind_a_sign_is_not_visible():
    scene = traffic.Scene(3, cameras=1, seconds=40)
    left, top, right, bottom = scene.cameras[0].sign
    shares = [
        row.plate_visible
        for number in range(0, scene.frames, 5)
        for row in scene.frame(0, number)[1].itertuples()
        if (row.plate_box[:2] >= (left, top)).all() and (row.plate_box[2:] <= (right, bottom)).all()
    ]
    assert shares
    assert set(shares) == {0.0}
