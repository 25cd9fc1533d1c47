"""Pictures to boxes and features: one Spark program, or Spark, files and process pools.

    python benchmarks/image_pipeline.py [--data-dir cats-dogs] [--pictures 1200] [--repeats 3] \
[--json FILE]
    python benchmarks/image_pipeline.py --quick

A Parquet table of JPEGs of 1024 x 768 becomes a Parquet table of ids, boxes and features, on the
same cores, with the same two trained networks (``examples/applications/image_pipeline.py``):

===============  ==================================================================================
one program      ``map_batches`` with both networks in OpenVINO (``--accelerate``)
connector        Spark writes a file for each picture; a pool of processes decodes and detects, and
                 writes the cut-outs; a pool extracts the features; Spark reads what they wrote and
                 writes the table. Eager PyTorch in batches, a thread per process, Pillow; the pools
                 stand ready before the clock starts
mapInPandas      a custom function for ``mapInPandas``: Pillow and eager PyTorch in batches,
                 networks loaded once per task
===============  ==================================================================================

Pillow decodes the whole picture and resizes it. ``connector, same decoder`` and ``mapInPandas, same
decoder`` have our decoder instead, so their pixels are ours, and boxes and features must be equal.
Each side writes its table; all run in turn in each repetition, after one of each on 100 pictures
that is not counted.
"""

import argparse
import io
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
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "examples" / "applications")  # this file has the name of one there

import image_pipeline as program  # noqa: E402
import scenes  # noqa: E402

CHUNK = 64
SIDES = [
    "one program",
    "connector",
    "connector, same decoder",
    "mapInPandas",
    "mapInPandas, same decoder",
]


# -- decoding and networks of the other sides ------------------------------------------------------


def pillow(data):
    from PIL import Image

    size = program.WIDTH, program.HEIGHT
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    return np.asarray(picture.resize(size, Image.Resampling.BILINEAR))


def ours(data):
    from bigdl.orca.inference.images import decode_images

    size = program.HEIGHT, program.WIDTH
    return decode_images(pa.array([data]), size)()[0][0]


DECODERS = {True: ours, False: pillow}


def loaded(weights):
    """Return both networks with their weights as functions of arrays."""
    import torch

    torch.set_num_threads(1)
    modules = [program.Detector(), program.Describer()]
    for module, state in zip(modules, weights, strict=True):
        module.load_state_dict(state)
        module.eval()

    def caller(module):
        def call(array):
            with torch.inference_mode():
                return module(torch.from_numpy(np.ascontiguousarray(array))).numpy()

        return call

    return [caller(module) for module in modules]


# -- the connector's processes ---------------------------------------------------------------------

_networks: list = []


def start_worker(weights):
    _networks[:] = loaded(weights)


def detect(task):
    """Detect objects in picture files; write crops and a table of boxes."""
    import cv2

    names, folder, same_decoder = task
    decode = DECODERS[same_decoder]
    pictures = np.stack([decode(Path(name).read_bytes()) for name in names])
    boxes, scores = program.best_boxes(_networks[0](pictures))
    ids = [Path(name).stem for name in names]
    for key, picture, box in zip(ids, pictures, boxes, strict=True):
        crop = program.cut_out(picture, box)
        cv2.imwrite(f"{folder}/crops/{key}.png", cv2.cvtColor(crop, cv2.COLOR_RGB2BGR))
    frame = {"id": [int(key) for key in ids], "box": list(boxes), "score": scores}
    pq.write_table(pa.table(frame), f"{folder}/boxes/{ids[0]}.parquet")
    return ids


def extract(task):
    """Compute features of crop files and write a table."""
    import cv2

    ids, folder = task
    crops = [cv2.imread(f"{folder}/crops/{key}.png") for key in ids]
    crops = np.stack([cv2.cvtColor(crop, cv2.COLOR_BGR2RGB) for crop in crops])
    features = _networks[1](crops)
    frame = {
        "id": [int(key) for key in ids],
        "feature": list(features),
        "code": [row.tobytes() for row in np.packbits(features > 0, axis=1)],
    }
    pq.write_table(pa.table(frame), f"{folder}/features/{ids[0]}.parquet")


def write_files(folder):
    def write(rows):
        for row in rows:
            Path(folder, f"{row.id}.jpg").write_bytes(row.picture)

    return write


# -- sides: each writes its table and returns the seconds of its parts -----------------------------


class Sides:
    """Implementations with their shared data."""

    def __init__(self, spark, modules, models, pools):
        self.spark, self.models, self.pools = spark, models, pools
        self.weights = [module.state_dict() for module in modules]

    def run(self, side, table, output):
        same = side.endswith("same decoder")
        if side == "one program":
            return self.one_program(table, output)
        if side.startswith("connector"):
            return self.connector(table, output, same)
        return self.map_in_pandas(table, output, same)

    def one_program(self, table, output):
        result = program.described(self.spark.read.parquet(table), self.models, keep="id")
        return timed(all=lambda: result.write.parquet(output))

    def connector(self, table, output, same):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("pictures", "crops", "boxes", "features"):
                os.mkdir(f"{folder}/{name}")

            def to_files():
                frame = self.spark.read.parquet(table).select("id", "picture")
                frame.foreachPartition(write_files(f"{folder}/pictures"))

            def find():
                names = sorted(map(str, Path(folder, "pictures").iterdir()))
                chunks = [names[i : i + CHUNK] for i in range(0, len(names), CHUNK)]
                tasks = [(chunk, folder, same) for chunk in chunks]
                batches.extend(self.pools[0].imap_unordered(detect, tasks))

            def describe():
                self.pools[1].map(extract, [(ids, folder) for ids in batches], chunksize=1)

            def to_table():
                boxes = self.spark.read.parquet(f"{folder}/boxes")
                features = self.spark.read.parquet(f"{folder}/features")
                boxes.join(features, "id").write.parquet(output)

            batches = []
            return timed(files=to_files, detect=find, extract=describe, table=to_table)

    def map_in_pandas(self, table, output, same):
        weights = self.spark.sparkContext.broadcast(self.weights)
        decode = DECODERS[same]

        def describe(frames):
            detector, describer = loaded(weights.value)
            for frame in frames:
                for low in range(0, len(frame), CHUNK):
                    part = frame.iloc[low : low + CHUNK]
                    pictures = np.stack([decode(data) for data in part["picture"]])
                    boxes, scores = program.best_boxes(detector(pictures))
                    pairs = zip(pictures, boxes, strict=True)
                    features = describer(np.stack([program.cut_out(*pair) for pair in pairs]))
                    codes = np.packbits(features > 0, axis=1)
                    yield pd.DataFrame(
                        {
                            "id": part["id"],
                            "box": list(boxes),
                            "score": scores,
                            "feature": list(features),
                            "code": [code.tobytes() for code in codes],
                        }
                    )

        frame = self.spark.read.parquet(table).select("id", "picture")
        result = frame.mapInPandas(describe, f"id long, {program.RETURNS}")
        return timed(all=lambda: result.write.parquet(output))


def timed(**parts):
    seconds = {}
    for name, part in parts.items():
        started = time.perf_counter()
        part()
        seconds[name] = time.perf_counter() - started
    return seconds


# -- where the time of the one program goes --------------------------------------------------------


def breakdown(spark, table, models):
    """Return the seconds of the single program with increasing parts: copy, decode, compute."""
    from bigdl.orca.inference import map_batches

    pictures = spark.read.parquet(table).select("id", "picture")

    def copied(batch, models):
        return {"bytes": np.array([len(each) for each in batch["picture"]], np.int32)}

    def decoded(batch, models):
        return {"bytes": batch["picture"][:, 0, 0, 0].astype(np.int32)}

    size = {"picture": (program.HEIGHT, program.WIDTH)}
    stages = {
        "copy": map_batches(pictures, copied, "bytes int", columns="picture", keep="id"),
        "decode": map_batches(pictures, decoded, "bytes int", images=size, keep="id"),
        "decode in full": map_batches(
            pictures, decoded, "bytes int", images=size, keep="id", reduced=False
        ),
        "all": program.described(pictures, models, keep="id"),
    }
    return timed(
        **{
            name: lambda frame=frame: frame.write.format("noop").mode("overwrite").save()
            for name, frame in stages.items()
        }
    )


# -- reports ---------------------------------------------------------------------------------------


def differences(reference, output):
    """Return the differences of boxes and features from those of the single program."""
    first, second = (
        pq.read_table(path).to_pandas().sort_values("id", ignore_index=True)
        for path in (reference, output)
    )
    assert first["id"].equals(second["id"]), "ids differ"
    boxes = [np.stack(each["box"]) for each in (first, second)]
    features = [np.stack(each["feature"]) for each in (first, second)]
    norms = np.linalg.norm(features[0], axis=1) * np.linalg.norm(features[1], axis=1)
    cosine = (features[0] * features[1]).sum(1) / norms
    apart = np.abs(boxes[0] - boxes[1]).max(1)
    bits = [np.unpackbits(np.stack([np.frombuffer(c, np.uint8) for c in x["code"]]), axis=1)
            for x in (first, second)]  # fmt: skip
    return {
        "equal boxes": float((apart == 0).mean()),
        "most pixels apart": int(apart.max()),
        "cosine, median": float(np.median(cosine)),
        "cosine, least": float(cosine.min()),
        "cosine of equal boxes, least": float(cosine[apart == 0].min()),
        "equal bits": float((bits[0] == bits[1]).mean()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="train and val, each with a folder per class")
    parser.add_argument("--pictures", type=int, default=1200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--accelerate", default="openvino_fp32", help="a method of Nano, or none")
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--quick", action="store_true", help="200 pictures, once")
    options = parser.parse_args()
    if options.quick:
        options.pictures, options.repeats, options.epochs = 200, 1, 3

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    init_orca_context("local", cores=options.cores, memory="4g")
    spark = OrcaContext.get_spark_session()
    try:
        report = measure(spark, options)
    finally:
        stop_orca_context()
    print(f"\nPython {platform.python_version()}, {options.cores} cores, {_cpu()}")
    print_tables(report, options)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


def measure(spark, options):
    if options.data_dir:
        train = scenes.photographs(options.data_dir, "train")
        animals = scenes.photographs(options.data_dir, "val", 100)
    else:
        train, animals = scenes.drawn_animals(300, 0), scenes.drawn_animals(100, 1)
    *modules, images, boxes = program.networks(train, epochs=options.epochs)
    method = None if options.accelerate == "none" else options.accelerate
    models = program.inference_models(*modules, images, boxes, method)
    weights = [module.state_dict() for module in modules]
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        context.Pool(options.cores, start_worker, (weights,)) as first,
        context.Pool(options.cores, start_worker, (weights,)) as second,
    ):
        sides = Sides(spark, modules, models, (first, second))
        scenes.write_scenes(f"{folder}/warm", animals, 100, seed=4, rows=50)
        scenes.write_scenes(f"{folder}/table", animals, options.pictures, seed=3)
        for side in SIDES:
            sides.run(side, f"{folder}/warm", f"{folder}/warm-{side}")
        breakdown(spark, f"{folder}/warm", models)
        runs, parts = {side: [] for side in SIDES}, []
        for repeat in range(options.repeats):
            for side in SIDES:
                output = f"{folder}/{side}"
                shutil.rmtree(output, ignore_errors=True)
                runs[side].append(sides.run(side, f"{folder}/table", output))
            parts.append(breakdown(spark, f"{folder}/table", models))
            line = ", ".join(f"{side} {sum(runs[side][-1].values()):.2f} s" for side in SIDES)
            print(f"  {repeat}: {line}", flush=True)
        apart = {
            side: differences(f"{folder}/{SIDES[0]}", f"{folder}/{side}") for side in SIDES[1:]
        }
        predictions = pq.read_table(f"{folder}/{SIDES[0]}").to_pandas().sort_values("id")
        truth = pq.read_table(f"{folder}/table", columns=["id", "truth"]).to_pandas()
    frame = np.array([program.WIDTH, program.HEIGHT] * 2)
    iou = program.overlaps(np.stack(predictions["box"]) / frame, np.stack(truth["truth"]))
    return {
        "pictures": options.pictures,
        "runs": runs,
        "breakdown": parts,
        "differences": apart,
        "iou": float(iou.mean()),
        "found": float((iou > 0.5).mean()),
    }


def print_tables(report, options):
    runs = report["runs"]
    totals = {side: [sum(run.values()) for run in runs[side]] for side in runs}
    own = statistics.median(totals[SIDES[0]])
    print(f"\n{'side':27s} {'seconds':>8s} {'(range)':>15s} {'pictures/s':>11s} {'ratio':>6s}")
    for side, seconds in totals.items():
        middle = statistics.median(seconds)
        print(
            f"{side:27s} {middle:8.2f} {min(seconds):7.2f}-{max(seconds):7.2f} "
            f"{report['pictures'] / middle:11.0f} {middle / own:6.2f}"
        )
    for side in SIDES[1:3]:
        parts = {name: statistics.median(run[name] for run in runs[side]) for name in runs[side][0]}
        print(f"{side}: " + ", ".join(f"{name} {value:.2f} s" for name, value in parts.items()))
    stages = {
        name: statistics.median(each[name] for each in report["breakdown"])
        for name in report["breakdown"][0]
    }
    print(
        f"one program: copy {stages['copy']:.2f} s, decode {stages['decode'] - stages['copy']:.2f} "
        f"s (in full it would be {stages['decode in full'] - stages['copy']:.2f} s), compute "
        f"{stages['all'] - stages['decode']:.2f} s"
    )
    print(f"\nboxes: IoU {report['iou']:.3f}, {100 * report['found']:.1f} % above 0.5")
    for side, each in report["differences"].items():
        print(f"{side}: " + ", ".join(f"{name} {value:.6g}" for name, value in each.items()))


def _cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")


if __name__ == "__main__":
    main()
