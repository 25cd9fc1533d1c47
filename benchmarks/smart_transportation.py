"""Frames per second from video to tracks and plates: one Spark program, or three services.

    python benchmarks/smart_transportation.py [--cameras 4] [--seconds 60] [--repeats 3] \
[--json FILE]
    python benchmarks/smart_transportation.py --quick

A folder of Parquet files, each with 20 encoded frames of a camera, becomes a folder of tracks with
a reading of the plate in each frame, on the same cores, with the same two trained networks
(``examples/applications/smart_transportation.py``):

========================  =========================================================================
one program               the Structured Streaming query with both networks in OpenVINO
                          (``--accelerate``)
three services            a process detects, one tracks, one reads plates; queues of multiprocessing
                          carry the pixels between them. Eager PyTorch in batches
three services, cut-outs  the same, but the plates are cut out where frames are decoded, so that no
                          frame goes through a queue
three services, OpenVINO  the services with the networks of the one program
========================  =========================================================================

All run in turn in each repetition. Query and services have worked on some frames before the clock
starts, and go on. Core-seconds are those of all processes of a side, from when the frames are there
until the last is in the table. The vote of the plates and the binding of
trajectories come after it and are the same for all.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.optimize import linear_sum_assignment

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "examples" / "applications")  # this file has the name of one there

import smart_transportation as program  # noqa: E402
import tracking  # noqa: E402
import traffic  # noqa: E402

SIDES = [
    "one program",
    "three services",
    "three services, cut-outs",
    "three services, OpenVINO",
]
COLUMNS = {
    "camera": pa.int32(),
    "track": pa.int32(),
    "frame": pa.int32(),
    "box": pa.list_(pa.float32()),
    "reading": pa.string(),
    "chances": pa.list_(pa.float32()),
}
FILES = 60  # of a micro-batch
READY = "ready"
WARM = 100  # the number of the first camera whose frames are not counted


# -- the services ----------------------------------------------------------------------------------
#
# Each takes chunks from a queue. READY follows those before the timing starts, and at the end a
# number: what core-seconds the services before have used since then.


def network(name, weights, origins):
    """Return a network as a function of arrays: eager PyTorch, or as in the single program."""
    import torch

    torch.set_num_threads(1)
    if origins is not None:
        from bigdl.orca.inference import InferenceModel

        return InferenceModel.of_origin(origins[name], 1).predict
    module = {"detector": program.Detector, "reader": program.Reader}[name]
    module = module({"width": weights["width"]})
    module.load_state_dict(weights[name])
    module.eval()

    def call(array):
        with torch.inference_mode():
            return module(torch.from_numpy(np.ascontiguousarray(array))).numpy()

    return call


def detect(given, taken, weights, origins, early_cut_outs):
    """Decode frames of a camera from a queue and detect vehicles and plates."""
    import cv2

    cv2.setNumThreads(1)
    detector = network("detector", weights, origins)
    begun = 0.0
    while not isinstance(chunk := given.get(), float):
        if chunk == READY:
            begun = time.process_time()
            taken.put(READY)
            continue
        camera, frames, files = chunk
        pictures = [
            cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB) for file in files
        ]
        detections = program.vehicles_in(detector(program.small(pictures)))
        if early_cut_outs:
            pictures = [cut_outs(*each) for each in zip(pictures, detections, strict=True)]
        taken.put((camera, frames, pictures, detections))
    taken.put(chunk + time.process_time() - begun)


def cut_outs(picture, detections):
    """Return the crop of each plate, or None if it is not legible."""
    _, plates = detections
    legible = program.is_legible(plates)
    return [
        program.cut_out(picture, plate) if good else None
        for plate, good in zip(plates, legible, strict=True)
    ]


def track(given, taken, early_cut_outs):
    """Join detections of a camera from a queue to tracks, with the crops of their plates."""
    trackers, begun = {}, 0.0
    while not isinstance(chunk := given.get(), float):
        if chunk == READY:
            begun = time.process_time()
            taken.put(READY)
            continue
        camera, frames, pictures, detections = chunk
        tracker = trackers.setdefault(camera, tracking.Tracker())
        made = []
        for frame, picture, each in zip(frames, pictures, detections, strict=True):
            plates = picture if early_cut_outs else cut_outs(picture, each)
            made += tracker.update(frame, each[0], [*zip(each[0], plates, strict=True)])
        taken.put((camera, made))
    taken.put(chunk + time.process_time() - begun)


def read(given, done, weights, origins, output):
    """Read plate crops from a queue and write the tracks."""
    reader = network("reader", weights, origins)
    begun, number = 0.0, 0
    while not isinstance(chunk := given.get(), float):
        if chunk == READY:
            begun = time.process_time()
            done.put(READY)
            continue
        camera, made = chunk
        plates = [plate for _, _, (_, plate) in made if plate is not None]
        texts, chances = program.read(plates, reader)
        pairs = iter(zip(texts, chances, strict=True))
        rows = [
            (track, frame, box.astype("f4"), *((None, None) if plate is None else next(pairs)))
            for track, frame, (box, plate) in made
        ]
        columns = zip(*rows, strict=True) if rows else [()] * (len(COLUMNS) - 1)
        columns = [[camera] * len(rows), *map(list, columns)]
        table = pa.table([pa.array(c, t) for c, t in zip(columns, COLUMNS.values(), strict=True)],
                         names=[*COLUMNS])  # fmt: skip
        pq.write_table(table, f"{output}/{number:06d}.parquet")
        number += 1
    done.put(chunk + time.process_time() - begun)


# -- sides: each writes its table and returns its seconds and core-seconds -------------------------


def core_seconds():
    """Return the core-seconds of this process and its children, including ended ones."""
    total, own = 0.0, psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # its time is its parent's now
    return total


class Sides:
    """Implementations with their shared data; `warm` is a folder of warm-up frames."""

    def __init__(self, spark, models, weights, warm):
        self.spark, self.models, self.weights, self.warm = spark, models, weights, warm

    def run(self, side, table, output):
        if side == "one program":
            return self.one_program(table, output)
        origins = {name: model.origin for name, model in self.models.items()}
        return self.services(
            table, output, origins if side.endswith("OpenVINO") else None, side.endswith("cut-outs")
        )

    def one_program(self, table, output):
        arrived = f"{output}-arrived"
        shutil.copytree(self.warm, arrived)
        query = program.start(
            self.spark, self.models, arrived, output, f"{output}-checkpoint", FILES
        )
        try:
            query.processAllAvailable()
            cores, started = core_seconds(), time.perf_counter()
            for file in sorted(Path(table).iterdir()):
                os.link(file, f"{arrived}/{file.name}")
            query.processAllAvailable()
            return time.perf_counter() - started, core_seconds() - cores
        finally:
            query.stop()

    def services(self, table, output, origins, early):
        os.mkdir(output)
        context = multiprocessing.get_context("spawn")
        first, second, third, done = (context.Queue(8) for _ in range(4))
        networks = self.weights, origins
        services = [
            context.Process(target=detect, args=(first, second, *networks, early)),
            context.Process(target=track, args=(second, third, early)),
            context.Process(target=read, args=(third, done, *networks, output)),
        ]
        for each in services:
            each.start()

        def send(folder, then):
            for file in sorted(Path(folder).iterdir()):
                chunk = pq.read_table(file).to_pydict()
                first.put((chunk["camera"][0], chunk["frame"], chunk["picture"]))
            first.put(then)
            return done.get(timeout=600)

        try:
            assert send(self.warm, READY) == READY
            cores, started = time.process_time(), time.perf_counter()
            used = send(table, 0.0)
            return time.perf_counter() - started, used + time.process_time() - cores
        finally:
            for each in services:
                each.join(10)
                each.kill()


# -- reports ---------------------------------------------------------------------------------------


def write_frames(scene, folder, name, first_camera=0):
    """Write the frames of a scene and return their ground truth."""
    os.mkdir(folder)
    truths = []
    for number, (chunk, truth) in enumerate(scene.chunks()):
        chunk["camera"] += np.int32(first_camera)
        chunk.to_parquet(f"{folder}/{name}-{number:06d}.parquet")
        truths.append(truth)
    return pd.concat(truths, ignore_index=True)


def differences(reference, output):
    """Return the differences of the tracks from those of the single program."""
    first, second = (pq.read_table(folder).to_pandas() for folder in (reference, output))
    first, second = (each[each["camera"] < WARM] for each in (first, second))
    same = covered = texts = 0
    apart = []
    others = dict(iter(second.groupby(["camera", "frame"])))
    for key, part in first.groupby(["camera", "frame"]):
        if key not in others:
            continue
        other = others[key]
        alike = tracking.overlaps(np.stack(part["box"]), np.stack(other["box"]))
        for i, j in zip(*linear_sum_assignment(alike, True), strict=True):
            same += alike[i, j] >= 0.9
            apart.append(np.abs(part["box"].iloc[i] - other["box"].iloc[j]).max())
            readings = part["reading"].iloc[i], other["reading"].iloc[j]
            covered += all(isinstance(text, str) for text in readings)
            texts += isinstance(readings[0], str) and readings[0] == readings[1]
    return {
        "boxes": [len(first), len(second)],
        "boxes with an overlap of 0.9": float(same / max(len(first), len(second))),
        "pixels apart, median": float(np.median(apart)),
        "equal readings": float(texts / max(1, covered)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cameras", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60, help="of video of each camera")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--width", type=int, default=2, help="of the detector's layers")
    parser.add_argument("--accelerate", default="openvino_bf16")
    parser.add_argument("--networks", help="a file that keeps the networks for another run")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--quick", action="store_true", help="400 frames, once")
    options = parser.parse_args()
    if options.quick:
        options.cameras, options.seconds, options.repeats = 2, 20, 1

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    init_orca_context("local", cores=options.cores, conf=program.QUICK_JVM)
    spark = OrcaContext.get_spark_session()
    spark.conf.set("spark.sql.shuffle.partitions", options.cores)
    try:
        report = measure(spark, options)
    finally:
        stop_orca_context()
    print(f"\nPython {platform.python_version()}, {options.cores} cores, {_cpu()}")
    print_tables(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


def trained(options):
    """Return both networks and sample rows for their conversion, from a file if it exists."""
    import torch

    file = options.networks and Path(options.networks)
    if file and file.exists():
        weights, *rows = torch.load(file, weights_only=True)
        modules = program.Detector({"width": weights["width"]}), program.Reader()
        for module, name in zip(modules, ("detector", "reader"), strict=True):
            module.load_state_dict(weights[name])
        return [module.eval() for module in modules], weights, [each.numpy() for each in rows]
    *modules, images, looks = program.networks(epochs=options.epochs, width=options.width)
    detector, reader = (module.state_dict() for module in modules)
    weights = {"width": options.width, "detector": detector, "reader": reader}
    if file:
        torch.save((weights, torch.from_numpy(images), torch.from_numpy(looks)), file)
    return modules, weights, [images, looks]


def measure(spark, options):
    modules, weights, rows = trained(options)
    models = program.inference_models(*modules, *rows, options.accelerate)
    with tempfile.TemporaryDirectory() as folder:
        scene = traffic.Scene(900, options.cameras, options.seconds)
        write_frames(traffic.Scene(901, options.cameras, 10), f"{folder}/warm", "warm", WARM)
        truth = write_frames(scene, f"{folder}/table", "frames")
        sides = Sides(spark, models, weights, f"{folder}/warm")
        runs = {side: [] for side in options.sides}
        for repeat in range(options.repeats):
            for side in options.sides:
                runs[side].append(sides.run(side, f"{folder}/table", f"{folder}/{repeat} {side}"))
            line = ", ".join(
                f"{side} {runs[side][-1][0]:.2f} s, {runs[side][-1][1]:.2f} core-s"
                for side in options.sides
            )
            print(f"  {repeat}: {line}", flush=True)
        outputs = {side: f"{folder}/0 {side}" for side in options.sides}
        reference = outputs[options.sides[0]]
        return {
            "frames": scene.frames * options.cameras,
            "runs": runs,
            "figures": {s: figures(spark, path, truth, scene) for s, path in outputs.items()},
            "differences": {
                side: differences(reference, path)
                for side, path in outputs.items()
                if path != reference
            },
        }


def figures(spark, output, truth, scene):
    """Return the metrics of the tracks, with the voting and matching of the single program."""
    tracks = spark.read.schema(program.TRACKS).parquet(output).where(f"camera < {WARM}")
    summaries = program.with_plates(tracks).cache()
    pairs = program.bound(summaries).toPandas()
    plates = [vehicle.plate for vehicle in scene.vehicles]
    return program.figures_of(truth, plates, tracks.toPandas(), summaries.toPandas(), pairs)


def print_tables(report):
    """Print the metrics of each implementation, and the ratios of each round to the first."""
    runs, frames = report["runs"], report["frames"]
    first = next(iter(runs))
    print(
        f"{frames} frames\n{'side':25s} {'frames/s':>20s} {'core-s/1000':>20s} "
        f"{'rate, first to it':>20s} {'cores, first to it':>20s}"
    )
    for side, each in runs.items():
        pairs = [*zip(runs[first], each, strict=True)]
        columns = [
            [frames / seconds for seconds, _ in each],
            [1000 * cores / frames for _, cores in each],
            [other[0] / own[0] for own, other in pairs],
            [own[1] / other[1] for own, other in pairs],
        ]
        cells = [
            f"{statistics.median(c):.2f} ({min(c):.2f}-{max(c):.2f})".rjust(20) for c in columns
        ]
        print(f"{side:25s} {' '.join(cells)}")
    for side, each in report["figures"].items():
        print(f"{side}: " + ", ".join(f"{name} {value:.4g}" for name, value in each.items()))
    for side, each in report["differences"].items():
        print(f"{side}: {json.dumps(each)}")


def _cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")


if __name__ == "__main__":
    main()
