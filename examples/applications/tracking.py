"""Multi-object tracking for one camera, and tracking metrics.

:class:`Tracker` follows SORT (Bewley et al., "Simple online and realtime tracking", 2016): a Kalman
filter predicts the position of each track in the next frame, and the Hungarian method matches
tracks and boxes by overlap. A track that is not detected for a while moves with its speed, and is
resumed when it is detected again.
"""

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment


def overlaps(first, second):
    """Return the intersection over union of each pair of boxes.

    The shape is ``(len(first), len(second))``. Boxes are left, top, right, bottom.
    """
    both, areas, others = _areas(first, second)
    return both / np.maximum(areas + others - both, 1e-9)


def shares(first, second):
    """Return the covered share of each box by each other box: ``(len(first), len(second))``."""
    both, areas, _ = _areas(first, second)
    return both / np.maximum(areas, 1e-9)


def _areas(first, second):
    """Return the areas of the intersections, of the first and of the second boxes."""
    first, second = np.reshape(first, (-1, 1, 4)), np.reshape(second, (1, -1, 4))
    low = np.maximum(first[..., :2], second[..., :2])
    high = np.minimum(first[..., 2:], second[..., 2:])
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (first, second)]
    return np.clip(high - low, 0, None).prod(-1), *areas


# -- the tracker -----------------------------------------------------------------------------------


class Tracker:
    """Tracker of one camera, updated frame by frame.

    The state of a track are its four sides and their speeds in pixels per frame. All sides have the
    same noise, in shares of the box's height, so one covariance of position and speed serves the
    four.

    Parameters
    ----------
    confirm : int
        In how many frames a track must be seen before it counts.
    patience : int
        For how many frames a track goes on without being seen.
    least, least_next : float
        Least overlap of a track and a box that are joined, and of one that counts and was seen in
        the frame before: where a vehicle goes, one that it hid comes into sight.
    taller : float
        How many times as tall as the other one of them may be; a tenth more for each frame without
        being seen.
    """

    def __init__(self, confirm=3, patience=15, least=0.15, least_next=0.3, taller=1.5):
        self.confirm, self.patience = confirm, patience
        self.least, self.least_next, self.taller = least, least_next, taller
        self.next_track = 0
        self.numbers, self.seen, self.missed = (np.zeros(0, int) for _ in range(3))
        self.sides, self.speeds = np.zeros((0, 4)), np.zeros((0, 4))
        self.covariance = np.zeros((0, 2, 2))
        self.early = {}  # detections of unconfirmed tracks

    def update(self, frame, boxes, values=None):
        """Update the tracks with the boxes of the next frame.

        Parameters
        ----------
        frame : int
            Its number, larger than that of the frame before.
        boxes : ndarray (boxes, 4)
        values : sequence, optional
            What is known of each box; default its number.

        Returns
        -------
        list of (int, int, object)
            Track, frame, and value of the box. A track that begins to count gives the frames
            before, too.
        """
        values = range(len(boxes)) if values is None else values
        boxes = np.reshape(np.asarray(boxes, float), (-1, 4))
        self._predict()
        tracks, matched = self._pairs(boxes)
        self._correct(tracks, boxes[matched])
        self.missed += 1
        self.missed[tracks], self.seen[tracks] = 0, self.seen[tracks] + 1
        new = np.setdiff1d(np.arange(len(boxes)), matched)
        results = []
        pairs = [*zip(self.numbers[tracks], self.seen[tracks], matched, strict=True)]
        pairs += [(self.next_track + i, 1, box) for i, box in enumerate(new)]
        for number, seen, box in pairs:
            entry = (int(number), frame, values[box])
            if seen < self.confirm:
                self.early.setdefault(number, []).append(entry)
            else:
                results += [*self.early.pop(number, ()), entry]
        self._begin(boxes[new])
        self._end()
        return results

    def _predict(self):
        step = np.array([[1.0, 1.0], [0.0, 1.0]])
        self.sides = self.sides + self.speeds
        self.covariance = step @ self.covariance @ step.T + np.diag([0.02, 0.015]) ** 2

    def _pairs(self, boxes):
        if not len(boxes) or not len(self.numbers):
            return np.zeros(0, int), np.zeros(0, int)
        alike = overlaps(self.sides, boxes)
        tall, others = (np.maximum(each[:, 3] - each[:, 1], 1.0) for each in (self.sides, boxes))
        ratio = tall[:, None] / others
        most = self.taller * (1 + 0.1 * self.missed)[:, None]
        is_near = (self.missed == 0) & (self.seen >= self.confirm)
        least = np.where(is_near, self.least_next, self.least)[:, None]
        alike[(alike < least) | (np.maximum(ratio, 1 / ratio) > most)] = 0.0
        # detected tracks first, then undetected ones, new ones last
        worth = (
            alike - 0.01 * np.minimum(self.missed, 10)[:, None] - 0.1 * (self.seen == 1)[:, None]
        )
        tracks, matched = linear_sum_assignment(np.where(alike > 0, worth, -1.0), True)
        good = alike[tracks, matched] > 0
        return tracks[good], matched[good]

    def _correct(self, tracks, boxes):
        covariance = self.covariance[tracks]
        gain = covariance[:, :, 0] / (covariance[:, :1, 0] + 0.04**2)
        error = boxes - self.sides[tracks]
        self.sides[tracks] += gain[:, :1] * error
        self.speeds[tracks] += gain[:, 1:] * error
        self.covariance[tracks] = covariance - gain[:, :, None] * covariance[:, :1]

    def _begin(self, boxes):
        count = len(boxes)
        self.numbers = np.append(self.numbers, self.next_track + np.arange(count))
        self.next_track += count
        self.seen = np.append(self.seen, np.ones(count, int))
        self.missed = np.append(self.missed, np.zeros(count, int))
        self.sides = np.concatenate([self.sides, boxes])
        self.speeds = np.concatenate([self.speeds, np.zeros((count, 4))])
        start = np.broadcast_to(np.diag([0.04, 0.2]) ** 2, (count, 2, 2))
        self.covariance = np.concatenate([self.covariance, start])

    def _end(self):
        """Drop tracks that were not seen for too long, and unconfirmed tracks immediately."""
        stay = self.missed <= np.where(self.seen < self.confirm, 1, self.patience)
        if stay.all():
            return
        for number in self.numbers[~stay]:
            self.early.pop(number, None)
        for name in ("numbers", "seen", "missed", "sides", "speeds", "covariance"):
            setattr(self, name, getattr(self, name)[stay])


# -- metrics ---------------------------------------------------------------------------------------
#
# Truth and tracks are DataFrames with camera, frame and box; truth has vehicle and counts (whether
# it must be found), tracks have track. The numbers of tracks are those of their camera.


def matches(truth, tracks, least=0.5):
    """Match track boxes with true boxes, frame by frame.

    As CLEAR MOT does (Bernardin and Stiefelhagen, "Evaluating multiple object tracking performance:
    the CLEAR MOT metrics", 2008): a pair of the frame before stays as long as it overlaps enough,
    and what is left is matched by the Hungarian method.

    Parameters
    ----------
    truth, tracks : pandas.DataFrame
    least : float
        Least overlap of a pair.

    Returns
    -------
    pandas.DataFrame
        Camera, frame, vehicle and track; vehicle is -1 for a false positive, and track for a miss.
        What need not be found is left out, and so are boxes of which at least half lies on it.
    """
    rows, last = [], {}
    tracked, known = (dict(iter(each.groupby(["camera", "frame"]))) for each in (tracks, truth))
    nothing = pd.DataFrame({"vehicle": [], "box": [], "counts": [], "track": []})
    for camera, frame in sorted(known.keys() | tracked.keys()):
        real = known.get((camera, frame), nothing)
        made = tracked.get((camera, frame), nothing)
        vehicles, numbers = real["vehicle"].to_numpy(int), made["track"].to_numpy(int)
        needed = real["counts"].to_numpy(bool)
        boxes = [np.reshape(each["box"].tolist(), (-1, 4)) for each in (real, made)]
        alike = overlaps(*boxes)
        stays = np.array([[last.get((camera, v)) == t for t in numbers] for v in vehicles])
        worth = alike + 2 * stays.reshape(alike.shape) + needed[:, None]
        left, right = linear_sum_assignment(np.where(alike < least, -9.0, worth), True)
        good = alike[left, right] >= least
        left, right = left[good], right[good]
        for v, t in zip(left, right, strict=True):
            last[camera, vehicles[v]] = numbers[t]
            if needed[v]:
                rows.append((camera, frame, vehicles[v], numbers[t]))
        for v in np.setdiff1d(np.flatnonzero(needed), left):
            rows.append((camera, frame, vehicles[v], -1))
        other = shares(boxes[1], boxes[0][~needed]).max(1, initial=0) >= 0.5
        for t in np.setdiff1d(np.flatnonzero(~other), right):
            rows.append((camera, frame, -1, numbers[t]))
    return pd.DataFrame(rows, columns=["camera", "frame", "vehicle", "track"])


def mota(matched):
    """Return the multiple object tracking accuracy of the output of :func:`matches`.

    One minus misses, false positives and switches of identity by the number of true boxes
    (Bernardin and Stiefelhagen, "Evaluating multiple object tracking performance: the CLEAR MOT
    metrics", 2008).
    """
    missed, false = (matched["track"] == -1).sum(), (matched["vehicle"] == -1).sum()
    return 1 - (missed + false + switches(matched)) / (matched["vehicle"] != -1).sum()


def switches(matched):
    """Return the number of identity switches within a camera."""
    pairs = matched[(matched["track"] != -1) & (matched["vehicle"] != -1)].sort_values("frame")
    before = pairs.groupby(["camera", "vehicle"])["track"].shift()
    return int((before.notna() & (before != pairs["track"])).sum())


def idf1(matched):
    """Return the identity F1 of the output of :func:`matches`.

    Vehicles and tracks of a camera are paired once for all frames, so that most boxes are of their
    pair (Ristani et al., "Performance measures and a data set for multi-target, multi-camera
    tracking", 2016): twice the boxes of the pairs by all true boxes and all boxes of tracks.
    """
    real, made = matched["vehicle"] != -1, matched["track"] != -1
    return 2 * sum(pairs(matched).values()) / (real.sum() + made.sum())


def pairs(matched):
    """Return the pairs of :func:`idf1`: frame counts by (camera, track, vehicle)."""
    both = matched[(matched["vehicle"] != -1) & (matched["track"] != -1)]
    result = {}
    for camera, part in both.groupby("camera"):
        table = pd.crosstab(part["track"], part["vehicle"])
        for i, j in zip(*linear_sum_assignment(table.to_numpy(), True), strict=True):
            if table.iat[i, j]:
                key = int(camera), int(table.index[i]), int(table.columns[j])
                result[key] = int(table.iat[i, j])
    return result


def owners(matched):
    """Return the most frequent vehicle of each track, by (camera, track)."""
    both = matched[(matched["vehicle"] != -1) & (matched["track"] != -1)]
    counts = both.groupby(["camera", "track", "vehicle"]).size().sort_values()
    return {(int(camera), int(track)): int(vehicle) for camera, track, vehicle in counts.index}


def f1(predicted, true):
    """Return the harmonic mean of precision and recall of a set of pairs."""
    return 2 * len(predicted & true) / max(1, len(predicted) + len(true))
