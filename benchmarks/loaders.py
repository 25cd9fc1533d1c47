"""Rows per second of TableLoader and of other loaders over the same Parquet files.

    python benchmarks/loaders.py [--rows 2000000] [--repeats 3] [--peers PYTHON] [--mosaic PYTHON]
        [--sides NAME,NAME] [--json FILE]

Eight columns of float32 in batches of 4,096 rows, shuffled over all rows where the loader can
(LitData shuffles within windows of 256 rows, Mosaic within blocks, Ray Data within a buffer), and
JPEG files of 96 x 96 pixels in batches of 128. Each side runs in separate processes, interleaved
with the others, by the settings that its documentation calls fastest: Hugging Face datasets by a
batch sampler over mapped Arrow, LitData over files of its format and over Parquet by Polars, Lance
and torchdata by whole batches. The first batch of a side is timed with what it writes before.

PEERS is the Python of an environment with datasets, litdata, polars, torchdata and pylance, MOSAIC
that of one with mosaicml-streaming; both need torch and what BigDL needs for its loader.

After the times: rows that are lost and repeated when two ranks read a third of an epoch, three
ranks another third, and one rank the rest, each from the state of the ones before.

The output is Markdown for docs/benchmarks.md: machine and versions, the tables, and the targets
with the ratios of each repeat.  A target whose loaders did not run is "not measured".
"""

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = [f"c{i}" for i in range(8)]
FILES, BATCH, IMAGES_BATCH = 8, 4096, 128
SECONDS = 300  # of a side, at most
SRC = Path(__file__).resolve().parents[1] / "src"


# -- sides: each is a function of a folder and an epoch's kind, and yields batches -----------------


def files(folder, kind):
    return sorted(str(path) for path in (folder / kind).glob("*.parquet"))


def decoded(data):
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def bigdl(folder, kind):
    from bigdl.data import ImageDecoder, TableLoader

    is_image = kind == "images"
    loader = TableLoader(
        files(folder, kind),
        batch_size=IMAGES_BATCH if is_image else BATCH,
        shuffle="global",
        transform=ImageDecoder("image") if is_image else None,
        cache=folder / "bigdl",
    )
    return lambda: loader


def memmap(folder, kind):
    """Read one array with a permutation and a gather per batch: the upper bound of any loader."""
    import torch

    path = folder / "rows.npy"
    if not path.exists():
        table = pa.concat_tables([pq.read_table(each) for each in files(folder, kind)])
        np.save(path, np.stack([table[name].to_numpy() for name in COLUMNS], 1))
    rows = np.load(path, mmap_mode="r")

    def epoch():
        order = np.random.permutation(len(rows))
        for start in range(0, len(rows), BATCH):
            yield torch.from_numpy(rows[order[start : start + BATCH]])

    return epoch


def hugging_face(folder, kind):
    import datasets
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_parquet(files(folder, kind), cache_dir=str(folder / "datasets"))
    size = IMAGES_BATCH if kind == "images" else BATCH
    data = data.with_format("arrow" if kind == "images" else "torch")
    sampler = BatchSampler(RandomSampler(data), size, False)
    workers = 2 if kind == "images" else 0
    collate = decode_arrow if kind == "images" else None
    loader = DataLoader(
        data, sampler=sampler, batch_size=None, num_workers=workers, collate_fn=collate
    )
    return lambda: loader


def decode_arrow(table):
    import torch

    return {"image": torch.from_numpy(np.stack([decoded(each.as_py()) for each in table["image"]]))}


class ArrayRows:
    """Map-style dataset over one array, which takes whole batches of row numbers."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        import torch

        return torch.from_numpy(self.rows[index])


def torchdata(folder, kind):
    from torch.utils.data import BatchSampler, RandomSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    memmap(folder, kind)
    data = ArrayRows(np.load(folder / "rows.npy", mmap_mode="r"))
    sampler = BatchSampler(RandomSampler(data), BATCH, False)
    loader = StatefulDataLoader(data, sampler=sampler, batch_size=None, snapshot_every_n_steps=100)
    return lambda: loader


def lance(folder, kind):
    import lance
    from lance.sampler import ShardedBatchSampler
    from lance.torch.data import LanceDataset

    path = str(folder / f"{kind}.lance")
    if not os.path.exists(path):
        lance.write_dataset(pa.concat_tables(map(pq.read_table, files(folder, kind))), path)
    data = LanceDataset(
        path, batch_size=BATCH, sampler=ShardedBatchSampler(0, 1, randomize=True, seed=0)
    )
    return lambda: data


def samples(job):
    """Yield the rows of a range as samples of LitData."""
    path, start, stop = job
    for row in np.load(path, mmap_mode="r")[start:stop]:
        yield {"row": np.array(row)}


def litdata(folder, kind):
    import litdata

    memmap(folder, kind)
    path, target = str(folder / "rows.npy"), str(folder / "litdata")
    if not os.path.exists(target):
        rows = len(np.load(path, mmap_mode="r"))
        jobs = [(path, start, min(start + 50_000, rows)) for start in range(0, rows, 50_000)]
        litdata.optimize(samples, jobs, target, chunk_bytes="64MB", num_workers=1)
    data = litdata.StreamingDataset(target, shuffle=True)
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=2)
    return lambda: loader


def litdata_parquet(folder, kind):
    import litdata
    from litdata.streaming.item_loader import ParquetLoader

    source = str(folder / kind)
    if not os.path.exists(os.path.join(source, "index.json")):
        litdata.index_parquet_dataset(source)
    rows = ParquetLoader(low_memory=False)
    data = litdata.StreamingDataset(source, item_loader=rows, shuffle=True)
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=0)
    return lambda: loader


def mosaic(folder, kind):
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    target = str(folder / "mds")
    if not os.path.exists(target):
        memmap(folder, kind)
        rows = np.load(folder / "rows.npy")
        with MDSWriter(out=target, columns={"row": "ndarray:float32:8"}) as out:
            for row in rows:
                out.write({"row": row})
    data = StreamingDataset(local=target, shuffle=True, batch_size=BATCH)
    loader = DataLoader(data, batch_size=BATCH, num_workers=2)
    return lambda: loader


def ray_data(folder, kind):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = ray.data.read_parquet(files(folder, kind)).materialize()
    return lambda: data.iter_torch_batches(
        batch_size=BATCH, prefetch_batches=2, local_shuffle_buffer_size=4 * BATCH
    )


SIDES = {
    "TableLoader": (bigdl, "own"),
    "np.memmap": (memmap, "own"),
    "HF datasets": (hugging_face, "peers"),
    "torchdata": (torchdata, "peers"),
    "Lance (batches)": (lance, "peers"),
    "LitData (windows)": (litdata, "peers"),
    "LitData Parquet (windows)": (litdata_parquet, "peers"),
    "Mosaic (blocks)": (mosaic, "mosaic"),
    "Ray Data (buffer)": (ray_data, "own"),
    "TableLoader JPEG": (bigdl, "own"),
    "HF datasets JPEG": (hugging_face, "peers"),
}


def rows_in(batch):
    if isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return len(batch)


def written(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def side(name, folder, epochs):
    """Measure one implementation in a separate process; print JSON."""
    import torch

    torch.set_num_threads(1)
    kind = "images" if "JPEG" in name else "numbers"
    before, start = written(folder), time.perf_counter()
    epoch = SIDES[name][0](folder, kind)
    times, first = [], 0.0
    for number in range(epochs + 1):
        begin, rows = time.perf_counter(), 0
        for batch in epoch():
            if not rows and not number:
                first = time.perf_counter() - start
            rows += rows_in(batch)
        times.append(rows / (time.perf_counter() - begin))
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) >> 10
    print(
        json.dumps(
            {
                "rows": rows,
                "first batch": first,
                "first epoch": times[0],
                "later epochs": times[1:],
                "written": written(folder) - before,
                "peak MB": peak,
            }
        )
    )


# -- rows after another number of ranks ------------------------------------------------------------


def resume_bigdl(folder, rows):
    from bigdl.data import TableLoader

    seen, state = [], None
    for ranks, share in [(2, 1 / 3), (3, 1 / 3), (1, 1)]:
        loaders = [
            TableLoader(folder, batch_size=100, rank=r, world_size=ranks) for r in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for step, batches in enumerate(zip(*loaders, strict=True), 1):
            seen += [row for batch in batches for row in batch["id"].tolist()]
            if step * 100 * ranks >= share * rows:
                break
        state = loaders[0].state_dict()
    return seen


def resume_torchdata(folder, rows):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    seen, state = [], None
    for ranks, share in [(2, 1 / 3), (3, 1 / 3), (1, 1)]:
        loaders = []
        for rank in range(ranks):
            sampler = StatefulDistributedSampler(range(rows), ranks, rank, shuffle=True)
            loaders.append(StatefulDataLoader(range(rows), batch_size=100, sampler=sampler))
            if state is not None:
                loaders[-1].load_state_dict(state)
        for step, batches in enumerate(zip(*loaders, strict=False), 1):
            seen += [row for batch in batches for row in batch.tolist()]
            if step * 100 * ranks >= share * rows:
                break
        state = loaders[0].state_dict()
    return seen


def resume_hugging_face(folder, rows):
    import datasets
    from datasets.distributed import split_dataset_by_node

    datasets.disable_progress_bars()
    seen, state = [], None
    for ranks, share in [(2, 1 / 3), (3, 1 / 3), (1, 1)]:
        whole = datasets.load_dataset(
            "parquet", data_files=f"{folder}/*.parquet", streaming=True, split="train"
        ).shuffle(seed=0, buffer_size=1000)
        parts = [split_dataset_by_node(whole, rank, ranks) for rank in range(ranks)]
        for part in parts:
            if state is not None:
                part.load_state_dict(state)
        streams = [part.batch(100) for part in parts]
        taken = 0
        for batches in zip(*streams, strict=False):
            got = [row for batch in batches for row in batch["id"]]
            seen += got
            taken += len(got)
            if taken >= share * rows:
                break
        state = parts[0].state_dict()
    return seen


RESUMES = {
    "TableLoader": (resume_bigdl, "own"),
    "torchdata": (resume_torchdata, "peers"),
    "HF datasets, streaming": (resume_hugging_face, "peers"),
}


def resume(name, folder):
    rows = 30_000
    path = folder / "ids"
    if not path.exists():
        path.mkdir()
        for number, ids in enumerate(np.array_split(np.arange(rows), 6)):
            pq.write_table(pa.table({"id": ids}), path / f"{number}.parquet")
    counts = np.bincount(RESUMES[name][0](str(path), rows), minlength=rows)
    print(
        json.dumps({"lost": int((counts == 0).sum()), "repeated": int((counts - 1).clip(0).sum())})
    )


# -- driver ----------------------------------------------------------------------------------------


def prepare(folder, rows, images):
    from PIL import Image

    rng = np.random.default_rng(0)
    for kind in ("numbers", "images"):
        (folder / kind).mkdir()
    for number in range(FILES):
        part = {name: rng.random(rows // FILES, dtype=np.float32) for name in COLUMNS}
        pq.write_table(pa.table(part), folder / "numbers" / f"{number}.parquet")
        pictures = []
        for _ in range(images // FILES):
            small = rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((96, 96)).save(file, "JPEG")
            pictures.append(file.getvalue())
        pq.write_table(pa.table({"image": pictures}), folder / "images" / f"{number}.parquet")


def call(python, *arguments):
    """Call this file with another Python; return None if it fails or takes too long."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        print(f"{arguments}: no result after {SECONDS} s", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{arguments}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


GLOBAL_PEERS = ("HF datasets", "torchdata")
"""Peers that shuffle over all rows; the others shuffle batches, windows, blocks or a buffer."""

OTHER_PEERS = (
    *("Lance (batches)", "LitData (windows)", "LitData Parquet (windows)"),
    *("Mosaic (blocks)", "Ray Data (buffer)"),
)


def ratios(results, name, others):
    """Return the name of the fastest of other sides, and the ratio to it in each repeat."""

    def speeds(side):
        return [statistics.median(run["later epochs"]) for run in results.get(side) or ()]

    measured = {each: statistics.median(speeds(each)) for each in others if speeds(each)}
    if not measured or not speeds(name):
        return None, []
    fastest = max(measured, key=measured.get)
    return fastest, [a / b for a, b in zip(speeds(name), speeds(fastest), strict=False)]


def targets(results, resumes):
    """Yield a target, its measurement, and whether it is met (None if not measured)."""
    for text, name, others, least in (
        ("global shuffle: at least 3 x the fastest peer", "TableLoader", GLOBAL_PEERS, 3.0),
        ("any shuffle of a peer (no target)", "TableLoader", OTHER_PEERS, None),
        ("at least 0.7 x a bare np.memmap", "TableLoader", ("np.memmap",), 0.7),
        ("JPEG: at least 1.5 x the fastest peer", "TableLoader JPEG", ("HF datasets JPEG",), 1.5),
    ):
        fastest, measured = ratios(results, name, others)
        if fastest is None:
            yield text, "not measured", None
            continue
        middle = statistics.median(measured)
        spread = f"{middle:.2f} ({min(measured):.2f} to {max(measured):.2f}) x {fastest}"
        yield text, spread, None if least is None else middle >= least
    runs = results.get("TableLoader") or ()
    if len(runs) < 2:  # the first run converts the table
        yield "first batch, warm: at most 0.5 s", "not measured", None
    else:
        warm = [run["first batch"] for run in runs[1:]]
        shown = f"{statistics.median(warm):.2f} ({min(warm):.2f} to {max(warm):.2f}) s"
        yield "first batch, warm: at most 0.5 s", shown, statistics.median(warm) <= 0.5
    moved = resumes.get("TableLoader")
    if moved is None:
        yield "0 rows lost, 0 repeated after 2, 3 and 1 ranks", "not measured", None
    else:
        shown = f"{moved['lost']:,} lost, {moved['repeated']:,} repeated"
        is_met = not moved["lost"] and not moved["repeated"]
        yield "0 rows lost, 0 repeated after 2, 3 and 1 ranks", shown, is_met


def environment():
    """Describe the machine and the versions in one line."""
    from importlib.metadata import version

    names = ("torch", "pyarrow", "numpy")
    model = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    model = model.strip().lstrip(":").strip() or "an unknown CPU"
    return f"{os.cpu_count()} cores of {model}; {versions}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--images", type=int, default=4_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--peers")
    parser.add_argument("--mosaic")
    parser.add_argument("--sides", help="names, separated by commas")
    parser.add_argument("--json")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        what, name, folder = options.run
        folder = Path(folder)
        return side(name, folder, options.epochs) if what == "side" else resume(name, folder)
    pythons = {"own": sys.executable, "peers": options.peers, "mosaic": options.mosaic}
    wanted = options.sides.split(",") if options.sides else list(SIDES)
    unknown = set(wanted) - set(SIDES)
    if unknown:
        parser.error(f"no sides {sorted(unknown)}; there are {list(SIDES)}")
    sides = [name for name in wanted if pythons[SIDES[name][1]]]
    root = Path(tempfile.mkdtemp())
    results = {name: [] for name in sides}
    try:
        folder = root / "data"
        folder.mkdir()
        prepare(folder, options.rows, options.images)
        for _ in range(options.repeats):
            for name in sides:
                python = pythons[SIDES[name][1]]
                result = call(python, "--epochs", options.epochs, "--run", "side", name, folder)
                if result is not None:
                    results[name].append(result)
        resumes = {
            name: call(pythons[where], "--run", "resume", name, root)
            for name, (_, where) in RESUMES.items()
            if pythons[where]
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{environment()}; {options.rows:,} rows, {options.images:,} images\n")
    print(
        "| loader | rows/s, first epoch | later epochs | first batch cold / warm | written | peak |"
    )
    print("|---|---|---|---|---|---|")
    for name, runs in results.items():
        if not runs:
            print(f"| {name} | failed | | | | |")
            continue
        later = [each for run in runs for each in run["later epochs"]]
        warm = min(run["first batch"] for run in runs)
        print(
            f"| {name} | {runs[0]['first epoch']:,.0f} | {statistics.median(later):,.0f} "
            f"({min(later):,.0f} to {max(later):,.0f}) "
            f"| {runs[0]['first batch']:.2f} / {warm:.2f} s "
            f"| {runs[0]['written'] >> 20:,} MB | {runs[-1]['peak MB']:,} MB |"
        )
    print("\n| after 2, 3 and 1 ranks, of 30,000 rows | lost | repeated |\n|---|---|---|")
    for name, result in resumes.items():
        print(
            f"| {name} | {result['lost']:,} | {result['repeated']:,} |"
            if result
            else f"| {name} | failed | |"
        )
    print("\n| target | measured | met |\n|---|---|---|")
    for text, measured, is_met in targets(results, resumes):
        print(f"| {text} | {measured} | {'-' if is_met is None else 'yes' if is_met else 'no'} |")
    if options.json:
        Path(options.json).write_text(json.dumps({"sides": results, "resumes": resumes}))
    return None


if __name__ == "__main__":
    main()
