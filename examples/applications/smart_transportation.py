"""Track vehicles and their plates across several cameras and join their trajectories.

    python examples/applications/smart_transportation.py
    python examples/applications/smart_transportation.py --cameras 4 --seconds 120 --picture a.png

Each file contains the frames of some seconds of one camera. One Structured Streaming query decodes
them, detects vehicles, reads their plates, and joins the boxes to tracks, in frame order per camera
and each frame exactly once. Spark then votes on the plate of each track, and matches the tracks of
one vehicle across cameras by plate and travel time.

The video is generated (``traffic.py``), so the ground truth is known. The metrics are computed on
scenes that were not used for training. Both networks are trained first. For your own video, write
Parquet files of ``camera``, ``frame`` and ``picture`` (a JPEG) to a folder for :func:`seen` and
:func:`tracked`.
"""

import argparse
import itertools
import pickle
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import torch
import tracking
import traffic
from pyspark.sql import Window
from pyspark.sql import functions as F
from scipy.optimize import linear_sum_assignment
from torch import nn
from traffic import GLYPHS, HEIGHT, LENGTH, RATE, WIDTH

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.inference import InferenceModel, map_batches
from bigdl.orca.learn.pytorch import Estimator

SMALL = (HEIGHT // 2, WIDTH // 2)  # input size of the detector
CELL = 8  # pixels of that
MOST = 16  # vehicles of a frame, to train the detector
CUT_OUT, AROUND = (36, 128), (2.0, 1.33)  # pixels, and height and width in those of the plate
PLATE, CLOSE = (24, 96), (1.5, 1.16)  # the same for the reader
LEGIBLE = 28  # pixels: least width of a plate that is read
NEAR = np.ones((3, 3), np.uint8)
FRAMES = "camera int, frame int, picture binary"
FOUND = "boxes array<array<float>>, readings array<string>, chances array<array<float>>"
TRACKS = "camera int, track int, frame int, box array<float>, reading string, chances array<float>"
# Spark only passes rows on here: its JVM should leave the cores to the networks
QUICK_JVM = {"spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}


# -- networks --------------------------------------------------------------------------------------


def block(channels, width, kernel, **options):
    """Return a normalized convolution, which the runtimes fuse into one operation."""
    layers = nn.Conv2d(channels, width, kernel, **options), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(*layers)


class Detector(nn.Module):
    """Detector from uint8 frames to the contents of each cell of 8 x 8 pixels.

    Returns ``(frames, 11, rows, columns)``. Of vehicles: the score of their centre; where it is
    from that of the cell, in cells; logarithms of width and height in cells; about where the centre
    of the plate is from that of the vehicle, in sizes of the vehicle. Of plates: the score of their
    centre; where it is from that of the cell; logarithm of the width.
    """

    def __init__(self, config=None):
        super().__init__()
        few, some, many = (n * (config or {}).get("width", 1) for n in (24, 48, 96))
        self.quarter = block(3, few, 4, stride=4)
        self.eighth = nn.Sequential(
            block(few, some, 3, stride=2, padding=1), block(some, some, 3, padding=1)
        )
        self.sixteenth = nn.Sequential(
            block(some, many, 3, stride=2, padding=1),
            block(many, many, 3, padding=1),
            block(many, many, 3, padding=2, dilation=2),
            block(many, some, 1),
            nn.Upsample(scale_factor=2),
        )
        self.head = nn.Sequential(block(some, 64, 3, padding=1), nn.Conv2d(64, 11, 1))
        with torch.no_grad():
            self.head[-1].bias[[0, 7]] = -4.0  # most cells have no center

    def forward(self, frames):
        x = self.eighth(self.quarter(frames.permute(0, 3, 1, 2).float() / 127.5 - 1))
        return self.head(x + self.sixteenth(x))


class Reader(nn.Module):
    """Plate reader from uint8 plates to scores and position: ``(plates, glyphs + 3, positions)``.

    The mean of the last three is where the plate is: how far its centre is from that of the
    picture, in widths and heights of a plate, and the logarithm of its size.
    """

    def __init__(self, config=None):
        super().__init__()
        self.layers = nn.Sequential(
            block(3, 16, 5, stride=2, padding=2),
            block(16, 32, 3, stride=2, padding=1),
            block(32, 64, 3, padding=1),
            block(64, 64, 3, padding=1),
            block(64, 96, 6, stride=(6, 4), padding=(0, 1)),
            nn.Conv2d(96, len(GLYPHS) + 3, 1),
        )

    def forward(self, plates):
        return self.layers(plates.permute(0, 3, 1, 2).float() / 127.5 - 1)[:, :, 0]


# -- training --------------------------------------------------------------------------------------


def detection_loss(output, vehicles):
    """Return the CenterNet loss (Zhou et al., "Objects as points", 2019) of vehicles and plates.

    A vehicle of a frame is: weight (1; 0 if it need not be found; -1 for none), left, top, right,
    bottom; weight of its plate, its centre and its width; all in pixels that the detector sees.
    """
    low, high = vehicles[..., 1:3] / CELL, vehicles[..., 3:5] / CELL
    centre, size = (low + high) / 2, (high - low).clamp(min=0.3)
    plate, width = vehicles[..., 6:8] / CELL, (vehicles[..., 8:] / CELL).clamp(min=0.3)
    coarse = ((plate - centre) / size).clamp(-1, 1)
    of_vehicles = loss_at(output[:, :7], vehicles[..., 0], centre, size / 6, [size.log(), coarse])
    height = width * (traffic.PLATE[1] / traffic.PLATE[0])
    size = torch.cat([width, height], -1) / 3
    return of_vehicles + loss_at(output[:, 7:], vehicles[..., 5], plate, size, [width.log()])


def loss_at(output, weight, centre, spread, others):
    """Return the focal loss of the center scores and the error of the other outputs there.

    A centre with weight 0 need not be found: what is scored around it does not count.
    """
    rows, columns = output.shape[2:]
    real = (weight > 0).float()
    spread = spread.clamp(min=0.5)

    def along(axis, cells):  # by row and by column, whose product is the normal curve
        away = torch.arange(cells) + 0.5 - centre[..., axis : axis + 1]
        return torch.exp(-(away / spread[..., axis : axis + 1]).pow(2) / 2)

    near = along(1, rows)[..., None] * along(0, columns)[..., None, :]
    wanted = (near * real[..., None, None]).amax(1)
    counts = ~((near > 0.1) & (weight == 0)[..., None, None]).any(1)
    cell = torch.minimum(centre.floor(), torch.tensor([columns, rows]) - 1).clamp(min=0)
    index = (cell[..., 1] * columns + cell[..., 0]).long()
    scores, count = output[:, 0], real.sum().clamp(min=1)
    positive = torch.zeros_like(scores).flatten(1)
    positive = positive.scatter_reduce(1, index, real, "amax").view_as(scores)
    chance = scores.sigmoid()
    hit = (1 - chance) ** 2 * nn.functional.logsigmoid(scores) * positive
    miss = chance**2 * nn.functional.logsigmoid(-scores) * (1 - wanted) ** 4 * (1 - positive)
    right = torch.cat([centre - cell - 0.5, *others], -1)
    made = output[:, 1:].flatten(2).gather(2, index[:, None].expand(-1, right.shape[2], -1))
    off = nn.functional.smooth_l1_loss(made.transpose(1, 2), right, beta=0.05, reduction="none")
    return 4 * (off * real[..., None]).sum() / count - (hit + miss * counts).sum() / count


def reading_loss(output, wanted):
    """Return the cross-entropy of the glyphs plus the error of the position."""
    glyphs, positions = wanted[:, :LENGTH].long(), wanted[:, LENGTH:]
    off = nn.functional.smooth_l1_loss(output[:, len(GLYPHS) :].mean(2), positions, beta=0.02)
    return nn.functional.cross_entropy(output[:, : len(GLYPHS)], glyphs) + 10 * off


def frames_to_train(count, seed):
    """Return frames in the input size of the detector, half mirrored, and their vehicles."""
    images = np.empty((count, *SMALL, 3), np.uint8)
    vehicles = np.zeros((count, MOST, 9), np.float32)
    vehicles[..., [0, 5]] = -1
    for i in range(count):
        if i % 16 == 0:
            scene = traffic.Scene(seed + i // 16, 4, 40)
        image, truth = scene.frame(i % 4, i % 16 // 4 * 93 + i // 16 % 93)
        images[i] = cv2.resize(image, SMALL[::-1], interpolation=cv2.INTER_AREA)
        for k, row in enumerate(truth[-MOST:].itertuples()):
            left, top, right, bottom = row.plate_box
            plate = (left + right) / 2, (top + bottom) / 2, right - left
            needed = row.visible > 0.3, row.plate_visible > 0.8
            vehicles[i, k] = [needed[0], *row.box / 2, needed[1], *np.array(plate) / 2]
    images[::2] = images[::2, :, ::-1]
    vehicles[::2, :, [1, 3, 6]] = SMALL[1] - vehicles[::2, :, [3, 1, 6]]
    return images, vehicles


def plates_to_train(count, seed):
    """Return training plates, some partly hidden, and their glyphs and positions.

    Every third one is as in the first look, which is not for its glyphs.
    """
    rng = np.random.default_rng(seed)
    images = np.empty((count, *PLATE, 3), np.uint8)
    texts = rng.integers(0, len(GLYPHS), (count, LENGTH))
    offsets = rng.normal(0, [0.06, 0.2, 0.08], (count, 3))
    first_look = np.arange(count) % 3 == 0
    offsets[~first_look] *= 0.2
    for i, text in enumerate(texts):
        plate = traffic.draw_plate("".join(GLYPHS[glyph] for glyph in text))
        wide = int(rng.integers(LEGIBLE, 70))
        tall = round(wide * traffic.PLATE[1] / traffic.PLATE[0])
        image = np.full((3 * tall, 2 * wide, 3), rng.integers(20, 230, 3), np.uint8)
        x, y = wide // 2, tall
        image[y : y + tall, x : x + wide] = cv2.resize(
            plate, (wide, tall), interpolation=cv2.INTER_AREA
        )
        if rng.random() < 0.25:  # a post, or all from there on
            left = x + int(rng.integers(0, wide))
            right = left + int(rng.choice([6, 10, 2 * wide]))
            image[:, left:right] = rng.integers(20, 230, 3)
        image = image * rng.uniform(0.5, 1.2) + rng.normal(0, 5, image.shape)
        image = np.clip(image, 0, 255).astype(np.uint8)
        coded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 85])[1]
        image = cv2.imdecode(coded, cv2.IMREAD_COLOR)
        size = np.array([wide, tall]) / np.exp(offsets[i, 2])
        middle = np.array([x + wide / 2, y + tall / 2]) - offsets[i, :2] * size
        box = [*(middle - size / 2), *(middle + size / 2)]
        images[i] = closer(cut_out(image, box), np.zeros(3))
    texts[first_look] = -100  # ignored by cross-entropy
    return images, np.concatenate([texts, offsets], 1).astype(np.float32)


def trained(model, loss, x, y, epochs, batch_size, workers, lr=6e-3, **config):
    steps = epochs * -(-len(x) // batch_size)
    est = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=lr),
        loss=loss,
        scheduler_creator=lambda optimizer, config: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, lr, total_steps=steps + 1
        ),
        scheduler_step_freq="batch",
        config=config,
        workers_per_node=workers,
    )
    stats = est.fit({"x": x, "y": y}, epochs=epochs, batch_size=batch_size, seed=0)
    print(f"{model.__name__}: loss {stats[0]['train_loss']:.3f} to {stats[-1]['train_loss']:.3f}")
    return est.get_model().eval()


def networks(frames=1920, plates=20_000, epochs=6, seed=0, workers=2, width=1):
    """Train the detector and the plate reader; return them with some training rows."""
    images, vehicles = frames_to_train(frames, 1000 * (seed + 1))
    detector = trained(Detector, detection_loss, images, vehicles, epochs, 8, workers, width=width)
    looks, texts = plates_to_train(plates, seed)
    reader = trained(Reader, reading_loss, looks, texts, epochs, 64, workers)
    return detector, reader, images[:: len(images) // 64].copy(), looks[:128].copy()


def inference_models(detector, reader, images, looks, accelerate):
    """Convert both networks for inference on the workers."""

    def model(module, sample):
        return InferenceModel().load_module(module, accelerate=accelerate, sample=sample)

    return {"detector": model(detector, images), "reader": model(reader, looks)}


# -- what is in a frame ----------------------------------------------------------------------------


def vehicles_in(output, least=0.3, alike=0.6):
    """Return the boxes of vehicles and of their plates in each frame, in its pixels.

    Parameters
    ----------
    output : ndarray
        Of :class:`Detector`.
    least : float
        Least score.
    alike : float
        Overlap from which two boxes are of one vehicle.

    Returns
    -------
    list of (ndarray (vehicles, 4), ndarray (vehicles, 4))
        A plate that is not seen is NaN.
    """
    scale = CELL * HEIGHT / SMALL[0]
    return [
        (np.clip(boxes * scale, 0, [WIDTH, HEIGHT] * 2), plates * scale)
        for boxes, plates in (_in_cells(each, least, alike) for each in output)
    ]


def _in_cells(output, least, alike):
    centre, part = _peaks(output[:7], least)
    boxes = _boxes(centre, np.exp(part[:, 2:4]))
    again = np.triu(tracking.overlaps(boxes, boxes) >= alike, 1).any(
        0
    )  # of a box with a better score
    boxes, coarse = boxes[~again], (centre + part[:, 4:6] * np.exp(part[:, 2:4]))[~again]
    middle, part = _peaks(output[7:], least)
    plates = np.full((len(boxes), 4), np.nan)
    if len(boxes) and len(middle):
        away = np.abs(coarse[:, None] - middle).max(-1) / (boxes[:, 2:] - boxes[:, :2])[:, :1]
        vehicles, seen = linear_sum_assignment(np.minimum(away, 1))
        seen, vehicles = (each[away[vehicles, seen] < 0.2] for each in (seen, vehicles))
        width = np.exp(part[seen, 2:])
        size = width * [1, traffic.PLATE[1] / traffic.PLATE[0]]
        plates[vehicles] = _boxes(middle[seen], size)
    return boxes, plates


def _peaks(output, least):
    """Return the cells of local score maxima and their other outputs, the best score first."""
    scores = output[0]
    y, x = np.nonzero(
        (scores >= np.log(least / (1 - least))) & (scores == cv2.dilate(scores, NEAR))
    )
    order = np.argsort(-scores[y, x])
    y, x = y[order], x[order]
    part = output[1:, y, x].T
    return np.stack([x, y], 1) + 0.5 + part[:, :2], part


def _boxes(centre, size):
    return np.concatenate([centre - size / 2, centre + size / 2], 1)


def cut_out(picture, box):
    """Return an enlarged crop around the box of a plate that contains the whole plate."""
    middle, size = np.add(box[:2], box[2:]) / 2, np.subtract(box[2:], box[:2])
    return _resized(picture, CUT_OUT, middle, size * AROUND[::-1])


def closer(cut_out, position):
    """Return a plate in the input size of the reader from its position in a crop."""
    unit = np.array(CUT_OUT[::-1]) / AROUND[::-1]
    middle = np.array(CUT_OUT[::-1]) / 2 + position[:2] * unit
    return _resized(cut_out, PLATE, middle, np.exp(position[2]) * unit * CLOSE[::-1])


def _resized(picture, shape, middle, size):
    scale = size / shape[::-1]
    shift = middle - size / 2 + (scale - 1) / 2
    moved = np.array([[scale[0], 0, shift[0]], [0, scale[1], shift[1]]])
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(picture, moved, shape[::-1], flags=how, borderMode=cv2.BORDER_REPLICATE)


def is_legible(plates):
    """Return a mask of the plates that are large enough and within the frame."""
    inside = (plates[:, :2] >= 0).all(1) & (plates[:, 2:] <= [WIDTH, HEIGHT]).all(1)
    return inside & (plates[:, 2] - plates[:, 0] >= LEGIBLE)


def read(cut_outs, reader):
    """Return the texts of plates and the probability of each glyph.

    The reader looks twice: where exactly the plate is, and then what it says.

    Parameters
    ----------
    cut_outs : list of ndarray
        Of :func:`cut_out`.
    reader : callable
        The network on arrays.
    """
    if not cut_outs:
        return [], []
    first = reader(np.stack([closer(each, np.zeros(3)) for each in cut_outs]))
    positions = first[:, len(GLYPHS) :].mean(2)
    looks = [closer(*each) for each in zip(cut_outs, positions, strict=True)]
    scores = reader(np.stack(looks))[:, : len(GLYPHS)]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances = chances.max(1) / chances.sum(1)
    texts = ["".join(GLYPHS[i] for i in row) for row in scores.argmax(1)]
    return texts, chances.tolist()


def small(pictures):
    """Resize frames to the input size of the detector."""
    each = [cv2.resize(picture, SMALL[::-1], interpolation=cv2.INTER_AREA) for picture in pictures]
    return np.stack(each)


def look(batch, models):
    """Return boxes, plate readings and their probabilities for each frame of a batch."""
    pictures = batch["picture"]
    detections = vehicles_in(models["detector"].predict(small(pictures)))
    legible = [is_legible(plates) for _, plates in detections]
    cut_outs = [
        cut_out(picture, plate)
        for picture, (_, plates), good in zip(pictures, detections, legible, strict=True)
        for plate in plates[good]
    ]
    texts, chances = read(cut_outs, models["reader"].predict)
    pairs = iter(zip(texts, chances, strict=True))
    each = [[next(pairs) if known else (None, None) for known in row] for row in legible]
    return {
        "boxes": [boxes.tolist() for boxes, _ in detections],
        "readings": [[text for text, _ in row] for row in each],
        "chances": [[chance for _, chance in row] for row in each],
    }


# -- the stream ------------------------------------------------------------------------------------


def seen(frames, models, batch_size=32):
    """Replace the pictures of a table or stream of frames by their detections."""
    images = {"picture": (HEIGHT, WIDTH)}
    return map_batches(frames, look, FOUND, models=models, images=images, batch_size=batch_size)


def follow(key, parts, state):
    """Join the detections of one camera to tracks, as a stateful Spark function.

    The state is the tracker, the number of the next frame, and frames that came before their turn.
    """
    tracker, following, early = tracking.Tracker(), 0, {}
    if state.exists:
        tracker, following, early = pickle.loads(state.get[0])
    for part in parts:
        rows = zip(part["frame"], part["boxes"], part["readings"], part["chances"], strict=True)
        early |= {frame: values for frame, *values in rows}
    made = []
    while early:
        if following not in early:
            if len(early) < 20 * RATE:
                break
            following = min(early)  # intermediate values are lost
        values = [*zip(*early.pop(following), strict=True)]
        made += tracker.update(following, [box for box, *_ in values], values)
        following += 1
    state.update((pickle.dumps((tracker, following, early)),))
    rows = [(*key, track, frame, *values) for track, frame, values in made]
    yield pd.DataFrame(rows, columns=["camera", "track", "frame", "box", "reading", "chances"])


def tracked(detections):
    """Return a stream of tracks, one row per frame, from the stream of :func:`seen`."""
    return detections.groupBy("camera").applyInPandasWithState(
        follow, TRACKS, "tracker binary", "append", "NoTimeout"
    )


def start(spark, models, arrived, output, checkpoint, files=6, **trigger):
    """Start the query from a folder of frames to a folder of tracks.

    Each frame is in the tracks exactly once, also if the query is stopped or killed and started
    again with the same checkpoint. Files of a camera must come in the order of their frames.
    """
    stream = spark.readStream.schema(FRAMES).option("maxFilesPerTrigger", files)
    writer = tracked(seen(stream.parquet(arrived), models)).writeStream.format("parquet")
    writer = writer.option("checkpointLocation", checkpoint)
    return (writer.trigger(**trigger) if trigger else writer).start(output)


# -- plates and trajectories -----------------------------------------------------------------------


def with_plates(tracks):
    """Aggregate tracks to one row each: camera, track, plate, first and last frame, readings.

    Each reading votes for the glyph at each position with the square of its chance: a few sure
    readings count for more than many from far away.
    """
    glyphs = F.arrays_zip(F.split("reading", "").alias("glyph"), F.col("chances").alias("chance"))
    each = tracks.where("reading is not null").select(
        "camera", "track", F.posexplode(glyphs).alias("place", "vote")
    )
    votes = each.groupBy("camera", "track", "place", "vote.glyph").agg(
        F.sum(F.pow("vote.chance", F.lit(2))).alias("votes")
    )
    best = votes.groupBy("camera", "track", "place").agg(F.max_by("glyph", "votes").alias("glyph"))
    listed = F.array_sort(F.collect_list(F.struct("place", "glyph")))
    plates = best.groupBy("camera", "track").agg(
        F.array_join(F.transform(listed, lambda each: each["glyph"]), "").alias("plate")
    )
    spans = tracks.groupBy("camera", "track").agg(
        F.min("frame").alias("first"),
        F.max("frame").alias("last"),
        F.count("reading").alias("frames"),
    )
    return spans.join(plates, ["camera", "track"], "left")


def bound(tracks, slack=12.0):
    """Match tracks of one vehicle across two cameras, from the output of :func:`with_plates`.

    Their plates differ by at most a glyph, and the time between them is such as vehicles need, with
    so many seconds more in a jam. Where several fit, the nearest camera is taken, then the plate
    with the fewest differences, then the shortest time; both tracks must choose each other.
    """
    # plates that differ by one glyph share a form with one glyph removed
    forms = F.transform(
        F.sequence(F.lit(1), F.lit(LENGTH)), lambda i: F.overlay("plate", F.lit("_"), i, F.lit(1))
    )
    read = tracks.where("plate is not null").select("*", F.explode(forms).alias("form"))

    def side(name):
        return read.select("form", *(F.col(c).alias(f"{name}_{c}") for c in tracks.columns))

    seconds = (F.col("to_first") - F.col("from_first")) / RATE
    metres = traffic.DISTANCE * (F.col("to_camera") - F.col("from_camera"))
    pairs = side("from").join(side("to"), "form").where(F.col("from_camera") < F.col("to_camera"))
    pairs = pairs.withColumn("seconds", seconds).drop("form").distinct()
    pairs = pairs.where(F.col("seconds") >= metres / traffic.FASTEST - 3)
    pairs = pairs.where(F.col("seconds") <= metres / traffic.SLOWEST + slack)
    cost = F.struct(
        F.col("to_camera") - F.col("from_camera"),
        F.levenshtein("from_plate", "to_plate"),
        "seconds",
    )
    for name in ("from", "to"):
        window = Window.partitionBy(f"{name}_camera", f"{name}_track").orderBy(cost)
        pairs = pairs.withColumn(f"{name}_choice", F.row_number().over(window))
    return pairs.where("from_choice = 1 and to_choice = 1").drop("from_choice", "to_choice")


# -- accuracy -------------------------------------------------------------------------------------


def legible_passages(truth):
    """Return the cameras and vehicles whose plate is legible in at least five frames."""
    plates = np.stack(truth["plate_box"])
    good = truth[is_legible(plates) & (truth["plate_visible"] >= 0.8)]
    counts = good.groupby(["camera", "vehicle"]).size()
    return {(int(c), int(v)) for c, v in counts[counts >= 5].index}


def figures_of(truth, plates, tracks, summaries, pairs):
    """Return MOTA, IDF1, plate accuracy and F1 of matched tracks.

    Parameters
    ----------
    truth : pandas.DataFrame
        Of :meth:`traffic.Scene.chunks`.
    plates : list of str
        By vehicle.
    tracks, summaries, pairs : pandas.DataFrame
        Of :func:`tracked`, :func:`with_plates` and :func:`bound`.

    Returns
    -------
    dict of str to float
        ``"plates"`` is the share of legible passages whose track has the plate, letter by letter;
        of several tracks of a passage that with the most readings counts. ``"binding"`` is about
        pairs of consecutive legible passages of a vehicle; a pair that is right but not legible
        counts neither way.
    """
    matched = tracking.matches(truth, tracks)
    vehicle_of = tracking.owners(matched)
    legible = legible_passages(truth)
    read = {
        (row.camera, vehicle_of.get((row.camera, row.track))): row.plate
        for row in summaries.sort_values("frames").itertuples()
    }
    right = [read.get((camera, vehicle)) == plates[vehicle] for camera, vehicle in legible]
    real = set()
    for vehicle, cameras in truth[truth["counts"]].groupby("vehicle")["camera"]:
        real |= {(vehicle, *pair) for pair in itertools.pairwise(sorted(cameras.unique()))}
    wanted = {(v, a, b) for v, a, b in real if (a, v) in legible and (b, v) in legible}
    made = set()
    for row in pairs.itertuples():
        first = vehicle_of.get((row.from_camera, row.from_track))
        second = vehicle_of.get((row.to_camera, row.to_track))
        wrong = first is None or first != second
        vehicle = (row.from_track, row.to_track) if wrong else first
        made.add((vehicle, row.from_camera, row.to_camera))
    return {
        "frames": int(truth.groupby("camera")["frame"].nunique().sum()),
        "passages": len(legible),
        "mota": float(tracking.mota(matched)),
        "idf1": float(tracking.idf1(matched)),
        "switches": tracking.switches(matched),
        "plates": float(np.mean(right)),
        "bindings": len(wanted),
        "binding": tracking.f1(made - (real - wanted), wanted),
    }


def draw(path, scene, tracks, summaries, pairs):
    """Write a picture of the vehicles of a camera and of one vehicle at another camera."""
    plates = summaries.set_index(["camera", "track"])["plate"].fillna("")
    read = (
        tracks.dropna(subset="reading").groupby(["camera", "track"])["frame"].agg(["max", "size"])
    )
    if len(pairs):
        last = pairs.loc[pairs[["from_frames", "to_frames"]].min(axis=1).idxmax()]
        shown = [(last[f"{side}_camera"], last[f"{side}_track"]) for side in ("from", "to")]
    else:
        shown = [read["size"].idxmax()]
    halves = []
    for camera, track in shown:
        number = int(read["max"][camera, track])
        image = scene.frame(camera, number)[0].copy()
        for row in tracks[(tracks["camera"] == camera) & (tracks["frame"] == number)].itertuples():
            left, top, right, bottom = (round(float(side)) for side in row.box)
            colour = (255, 220, 0) if row.track == track else (0, 230, 255)
            cv2.rectangle(image, (left, top), (right, bottom), colour, 2)
            _write(image, f"{row.track} {plates[camera, row.track]}", left + 2, top - 5, colour)
        _write(image, f"camera {camera}, {number / RATE:.1f} s", 8, 18, (255, 255, 255))
        halves.append(image)
    cv2.imwrite(path, cv2.cvtColor(np.hstack(halves), cv2.COLOR_RGB2BGR))


def _write(image, text, x, y, colour):
    for width, paint in ((4, (0, 0, 0)), (1, colour)):
        cv2.putText(image, text, (x, max(14, y)), cv2.FONT_HERSHEY_SIMPLEX, 0.5, paint, width)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cameras", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40, help="seconds of video per camera")
    parser.add_argument("--training-frames", type=int, default=1920)
    parser.add_argument(
        "--plates", type=int, default=20_000, help="number of plates to train the reader"
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--width", type=int, default=1, help="width multiplier of the detector's layers"
    )
    parser.add_argument("--accelerate", default="openvino_bf16", help="a method of Nano")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="number of training workers")
    parser.add_argument(
        "--picture", help="file for a picture of a frame with its tracks and plates"
    )
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores, conf=QUICK_JVM)
    spark = OrcaContext.get_spark_session()
    spark.conf.set("spark.sql.shuffle.partitions", options.cores)  # each has separate states
    begun = time.perf_counter()
    *modules, images, looks = networks(
        options.training_frames,
        options.plates,
        options.epochs,
        options.seed,
        options.workers,
        options.width,
    )
    models = inference_models(*modules, images, looks, options.accelerate)
    print(f"networks: {time.perf_counter() - begun:.1f} s")

    scene = traffic.Scene(500 + options.seed, options.cameras, options.seconds)
    truths = []
    with tempfile.TemporaryDirectory() as folder:
        arrived, output = Path(folder, "frames"), Path(folder, "tracks")
        arrived.mkdir()
        begun = time.perf_counter()
        query = start(spark, models, str(arrived), str(output), f"{folder}/checkpoint")
        for number, (chunk, truth) in enumerate(scene.chunks()):
            chunk.to_parquet(Path(folder, "part"))
            Path(folder, "part").rename(arrived / f"{number:06d}.parquet")  # written atomically
            truths.append(truth)
        query.processAllAvailable()
        query.stop()
        print(f"stream: {time.perf_counter() - begun:.1f} s")
        tracks = spark.read.parquet(str(output))
        summaries = with_plates(tracks).cache()
        pairs = bound(summaries).toPandas()
        tracks, summaries = tracks.toPandas(), summaries.toPandas()
    truth = pd.concat(truths, ignore_index=True)
    plates = [vehicle.plate for vehicle in scene.vehicles]
    metrics = figures_of(truth, plates, tracks, summaries, pairs)
    if options.picture:
        draw(options.picture, scene, tracks, summaries, pairs)
    for name, value in metrics.items():
        print(f"{name:10s} {value:.4g}")
    return metrics


if __name__ == "__main__":
    main()
    stop_orca_context()
