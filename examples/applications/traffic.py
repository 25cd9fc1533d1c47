"""Generated video of a road with several cameras, with ground truth.

The cameras are placed along a road with three lanes and look against the traffic, from different
heights and sides. Cars, vans and trucks drive towards them at different speeds, so they overtake
and occlude each other, and a sign in front of each camera occludes all of them for a while. Each
vehicle has a plate of six characters. It reaches the next camera after its travel time, unless it
leaves the road; other vehicles enter in between.

:class:`Scene` returns frames and ground truth. A scene is a function of its seed.
"""

from dataclasses import dataclass, field

import cv2
import numpy as np
import pandas as pd

HEIGHT, WIDTH = 352, 640
RATE = 10  # frames per second
GLYPHS = "0123456789ABCDEFGHJKLMNPRSTUVWXY"  # without similar letters
LENGTH = 6  # of a plate
LANES = (-3.3, 0.0, 3.3)  # metres from the middle of the road
DISTANCE = 150.0  # metres from a camera to the next
SLOWEST, FASTEST = 6.0, 16.0  # meters per second
FIRST, LAST, COUNTS = (
    56.0,
    3.0,
    45.0,
)  # meters: where a vehicle enters, leaves, and is first counted
VISIBLE = 0.35  # minimum visible share of a counted vehicle
FOCUS = 800.0  # pixels
KINDS = {  # width, height and length in metres, and how common
    "car": (1.8, 1.5, 4.2, 0.6),
    "van": (2.0, 2.2, 5.0, 0.2),
    "truck": (2.5, 3.1, 8.0, 0.2),
}
PLATE = (0.9, 0.26)  # metres


@dataclass
class Vehicle:
    """Vehicle on the whole road.

    Attributes
    ----------
    number : int
    plate : str
    size : tuple of float
        Width, height and length in metres.
    colour : ndarray (3,)
    pace : float
        Speed relative to that of others in its lane.
    first, last : int
        Cameras between which it is on the road.
    image : ndarray
        The plate.
    """

    number: int
    plate: str
    size: tuple
    colour: np.ndarray
    pace: float
    first: int
    last: int
    image: np.ndarray = field(repr=False)


@dataclass
class Passage:
    """Passage of a vehicle through one camera's view: start in seconds, speed and lane."""

    vehicle: Vehicle
    camera: int
    enters: float
    speed: float
    lane: float

    @property
    def leaves(self):
        return self.enters + (FIRST - LAST) / self.speed


class Camera:
    """Position of a camera, and its view of the empty road."""

    def __init__(self, seed, number):
        rng = np.random.default_rng([seed, 1, number])
        self.height = rng.uniform(4.2, 5.2)
        self.side = rng.uniform(-1.8, 1.8)
        self.horizon = rng.uniform(25, 45)
        self.middle = WIDTH / 2 + 20 * self.side
        self.light = rng.uniform(0.6, 1.1)
        self.swing = rng.uniform(0, 2 * np.pi)
        self.background = self._background(rng)
        left = int(rng.uniform(0.25, 0.6) * WIDTH)
        self.sign = (left, int(rng.uniform(100, 130)), left + 70, int(rng.uniform(160, 180)))
        self.paint = tuple(map(int, rng.integers(40, 200, 3)))

    def at(self, x, z, d):
        """Project points (meters across, above and along the road) to pixel coordinates."""
        scale = FOCUS / np.maximum(d, 0.5)
        return np.stack(
            [self.middle + (x - self.side) * scale, self.horizon + (self.height - z) * scale], -1
        )

    def _background(self, rng):
        coarse = rng.integers(70, 130, (22, 40, 1), dtype=np.uint8) + np.uint8([0, 25, 0])
        image = cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
        image[: int(self.horizon)] = (190, 205, 220)
        edge = LANES[-1] + 1.8
        corners = [(-edge, 90), (edge, 90), (edge, 5), (-edge, 5)]
        _fill(image, [self.at(x, 0, d) for x, d in corners], (95, 95, 98))
        for x in (-1.65, 1.65):
            for d in range(6, 80, 6):
                dash = [(x - 0.1, d + 2), (x + 0.1, d + 2), (x + 0.1, d), (x - 0.1, d)]
                _fill(image, [self.at(*each[:1], 0, each[1]) for each in dash], (215, 215, 215))
        return image

    def draw_sign(self, image):
        left, top, right, bottom = self.sign
        middle = (left + right) // 2
        cv2.rectangle(image, (middle - 4, bottom), (middle + 4, HEIGHT), (70, 70, 75), -1)
        cv2.rectangle(image, (left, top), (right, bottom), self.paint, -1)
        cv2.rectangle(image, (left + 5, top + 5), (right - 5, bottom - 5), (230, 230, 230), 2)


def _fill(image, points, colour):
    points = np.clip(np.float64(points), -4000, 4000)
    cv2.fillConvexPoly(image, np.rint(points * 16).astype(np.int32), colour, cv2.LINE_AA, 4)


def draw_plate(text):
    """Return the picture of a plate, 32 × 108 pixels."""
    image = np.full((32, 108, 3), (235, 235, 215), np.uint8)
    cv2.rectangle(image, (0, 0), (107, 31), (40, 40, 60), 1)
    for i, glyph in enumerate(text):
        (wide, _), _ = cv2.getTextSize(glyph, cv2.FONT_HERSHEY_SIMPLEX, 0.8, 2)
        corner = (6 + 16 * i + (16 - wide) // 2, 25)
        cv2.putText(image, glyph, corner, cv2.FONT_HERSHEY_SIMPLEX, 0.8, (20, 20, 30), 2)
    return image


class Scene:
    """Vehicles on a road, as seen by its cameras.

    Parameters
    ----------
    seed : int
    cameras : int
    seconds : float
        How long each camera records, all from the same moment.
    interval : float
        Seconds between two vehicles, in the mean.

    Attributes
    ----------
    vehicles : list of Vehicle
    passages : list of Passage
    frames : int
        Of each camera.
    """

    def __init__(self, seed, cameras=3, seconds=40.0, interval=1.3):
        self.seed, self.frames = seed, round(seconds * RATE)
        self.cameras = [Camera(seed, number) for number in range(cameras)]
        rng = np.random.default_rng([seed, 0])
        self.vehicles, self.passages = [], []
        self._fill_road(rng, seconds, interval)
        grain = np.random.default_rng([seed, 2]).standard_normal((HEIGHT + 64, WIDTH + 64, 3), "f4")
        self._grain = (5 * grain).astype(np.int16)

    def _fill_road(self, rng, seconds, interval):
        coming, cameras = [[] for _ in self.cameras], len(self.cameras)
        for first in range(cameras):
            mean = interval if first == 0 else 6 * interval
            time = -cameras * DISTANCE / SLOWEST  # so that the road is full at the start
            while time < seconds:
                vehicle = self._vehicle(rng, first)
                coming[first].append((time, vehicle))
                time += rng.exponential(mean)
        for camera, arrivals in enumerate(coming):
            before = {}
            for time, vehicle in sorted(arrivals, key=lambda each: each[0]):
                passage = self._passage(rng, vehicle, camera, time, before)
                if passage.enters < seconds and passage.leaves > 0:
                    self.passages.append(passage)
                if camera < vehicle.last:
                    speed = np.clip(passage.speed * rng.uniform(0.9, 1.1), SLOWEST, FASTEST)
                    arrival = passage.enters + DISTANCE / speed
                    coming[camera + 1].append((arrival, vehicle))

    def _vehicle(self, rng, first):
        *sizes, common = zip(*KINDS.values(), strict=True)
        type_index = rng.choice(len(KINDS), p=common)
        plate = "".join(rng.choice(list(GLYPHS), LENGTH))
        if self.vehicles and rng.random() < 0.05:  # a plate that differs from another by a glyph
            other, position = self.vehicles[rng.integers(len(self.vehicles))].plate, rng.integers(6)
            plate = other[:position] + plate[position] + other[position + 1 :]
        if plate in {each.plate for each in self.vehicles}:
            return self._vehicle(rng, first)
        leaves = rng.random(len(self.cameras)) < 0.15
        last = next((i for i in range(first, len(leaves)) if leaves[i]), len(leaves) - 1)
        vehicle = Vehicle(
            number=len(self.vehicles),
            plate=plate,
            size=tuple(each[type_index] * rng.uniform(0.92, 1.08) for each in sizes),
            colour=rng.integers(40, 230, 3),
            pace=rng.uniform(0.88, 1.12),
            first=first,
            last=last,
            image=draw_plate(plate),
        )
        self.vehicles.append(vehicle)
        return vehicle

    def _passage(self, rng, vehicle, camera, time, before):
        """Return a passage that keeps a distance to the previous vehicle in its lane."""
        lane = int(rng.integers(len(LANES)))
        speed = float(np.clip((8, 10, 12.5)[lane] * vehicle.pace, SLOWEST, FASTEST))
        if lane in before:
            other = before[lane]
            room = other.vehicle.size[2] + 3.0
            time = max(time, other.enters + room / other.speed)
            time = max(time, other.leaves + (room - FIRST + LAST) / speed)
        aside = LANES[lane] + rng.uniform(-0.3, 0.3)
        passage = Passage(vehicle, camera, float(time), speed, aside)
        before[lane] = passage
        return passage

    def frame(self, camera, number):
        """Return a frame and its ground truth.

        Parameters
        ----------
        camera, number : int

        Returns
        -------
        ndarray (HEIGHT, WIDTH, 3)
            uint8: red, green and blue.
        pandas.DataFrame
            Vehicle, box (left, top, right, bottom in pixels), plate_box; visible and
            plate_visible: which share of both is seen, 0 for a vehicle that is too far away; and
            counts: whether it must be found, for it is near enough, its front is still in the
            frame, and enough of it is seen. The farthest vehicle first.
        """
        view, time = self.cameras[camera], number / RATE
        rng = np.random.default_rng([self.seed, 3, camera, number])
        here = [
            (FIRST - (time - each.enters) * each.speed, each)
            for each in self.passages
            if each.camera == camera and each.enters <= time < each.leaves
        ]
        here.sort(key=lambda pair: -pair[0])
        image, owner = view.background.copy(), np.zeros((HEIGHT, WIDTH), np.uint8)
        rows = []
        for label, (distance, passage) in enumerate(here, 1):
            sway = 0.15 * np.sin(0.12 * distance + passage.vehicle.number)
            x = passage.lane + sway
            rows.append(_draw(view, image, owner, label, passage.vehicle, x, distance))
        view.draw_sign(image)
        left, top, right, bottom = view.sign
        owner[top : bottom + 1, left : right + 1] = 0
        seen = np.bincount(owner.ravel(), minlength=len(here) + 1)
        light = view.light * (1 + 0.1 * np.sin(0.3 * time + view.swing))
        image = cv2.convertScaleAbs(image, alpha=light)
        y, x = rng.integers(0, 64, 2)
        image = cv2.add(image, self._grain[y : y + HEIGHT, x : x + WIDTH], dtype=cv2.CV_8U)
        near = np.array([distance <= COUNTS for distance, _ in here], bool)
        shown = seen[1:] / np.array([row[2] for row in rows])
        plates = [_share(owner, label, row[1]) for label, row in enumerate(rows, 1)]
        in_frame = np.array([row[1][3] <= HEIGHT for row in rows], bool)
        truth = pd.DataFrame(
            {
                "vehicle": np.array([passage.vehicle.number for _, passage in here], int),
                "box": [row[0] for row in rows],
                "plate_box": [row[1] for row in rows],
                "visible": near * shown,
                "plate_visible": near * np.array(plates, float),
                "counts": near & in_frame & (shown >= VISIBLE),
            }
        )
        return image, truth

    def encoded(self, camera, number):
        """Return a frame as a JPEG, and its ground truth."""
        image, truth = self.frame(camera, number)
        image = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 85])[1].tobytes()
        return data, truth.assign(camera=camera, frame=number)

    def chunks(self, frames=20):
        """Yield chunks of each camera's frames in time order, with their ground truth.

        Yields
        ------
        pandas.DataFrame
            Camera, frame and picture (a JPEG).
        pandas.DataFrame
            As :meth:`frame` gives it, with camera and frame.
        """
        for low in range(0, self.frames, frames):
            for camera in range(len(self.cameras)):
                numbers = range(low, min(low + frames, self.frames))
                pictures, truths = zip(*(self.encoded(camera, n) for n in numbers), strict=True)
                chunk = {"camera": camera, "frame": list(numbers), "picture": list(pictures)}
                chunk = pd.DataFrame(chunk).astype({"camera": "int32", "frame": "int32"})
                yield chunk, pd.concat(truths, ignore_index=True)


def _draw(view, image, owner, label, vehicle, x, distance):
    """Draw a vehicle; return its box, the box of its plate, and its area in pixels."""
    wide, tall, long = vehicle.size
    sides, levels = (x - wide / 2, x + wide / 2), (tall, 0.2)

    def face(d):  # clockwise from the upper left
        corners = [(sides[0], levels[0]), (sides[1], levels[0]), (sides[1], 0.2), (sides[0], 0.2)]
        return np.stack([view.at(*corner, d) for corner in corners])

    front, back = face(distance), face(distance + long)
    hull = cv2.convexHull(np.concatenate([front, back]).astype(np.float32))[:, 0]
    colour = vehicle.colour.astype(float)
    _fill(image, hull, (0.6 * colour).tolist())
    _fill(image, [front[0], front[1], back[1], back[0]], (0.85 * colour).tolist())
    _fill(image, front, colour.tolist())

    def on_front(left, top, right, bottom):
        corner, size = front[0], front[2] - front[0]
        return corner + size * [left, top], corner + size * [right, bottom]

    def patch(left, top, right, bottom, paint):
        (x0, y0), (x1, y1) = on_front(left, top, right, bottom)
        _fill(image, [(x0, y0), (x1, y0), (x1, y1), (x0, y1)], paint)

    patch(0.08, 0.06, 0.92, 0.42, (45, 55, 65))
    for left in (0.05, 0.80):
        patch(left, 0.62, left + 0.15, 0.74, (250, 245, 200))
    (x0, y0), (x1, y1) = on_front(
        0.5 - PLATE[0] / wide / 2, 0.95 - PLATE[1] / tall, 0.5 + PLATE[0] / wide / 2, 0.95
    )
    _paste(image, vehicle.image, x0, y0, x1, y1)
    cv2.fillConvexPoly(owner, np.rint(np.clip(hull, -4000, 4000)).astype(np.int32), label)
    low, high = hull.min(0), hull.max(0)
    box = np.clip([*low, *high], 0, [WIDTH, HEIGHT] * 2)
    return box, np.array([x0, y0, x1, y1]), max(1.0, cv2.contourArea(hull))


def _share(owner, label, box):
    left, top, right, bottom = np.rint(box).astype(int)
    part = owner[max(0, top) : max(0, bottom), max(0, left) : max(0, right)]
    return (part == label).sum() / max(1, (right - left) * (bottom - top))


def _paste(image, plate, x0, y0, x1, y1):
    left, top = round(x0), round(y0)
    wide, tall = max(2, round(x1 - x0)), max(2, round(y1 - y0))
    if left < 0 or top < 0 or left + wide > WIDTH or top + tall > HEIGHT:
        return
    small = cv2.resize(plate, (wide, tall), interpolation=cv2.INTER_AREA)
    image[top : top + tall, left : left + wide] = small
