"""Rows per second of Delta Lake and Iceberg tables and of the same rows as Parquet files.

    python benchmarks/lakes.py [--rows 5000000] [--repeats 5] [--mosaic PYTHON] [--json FILE]

What is timed is what a fit does before its first step: the table is opened, two workers read
their shares and write them to their spools. For comparison, in one process, the readers of the two
libraries need for the same columns as an Arrow table. All sides are interleaved; medians and
ranges. The rows that the workers read are compared with those of the libraries.

With the Python of an environment that has mosaicml-streaming and pyarrow, the first 200,000 of the
rows are also read from shards of MDS by its dataset and a DataLoader of two workers.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.memory import InMemoryCatalog

from bigdl.orca.data.feeds import as_feed
from bigdl.orca.engine import LocalEngine

FEATURES = [f"f{i}" for i in range(8)]
FILES = 8
MOSAIC, MOSAIC_ROWS = "Mosaic Streaming, two workers", 200_000


def table(rows: int, number: int) -> pa.Table:
    rng = np.random.default_rng(number)
    columns = {"id": np.arange(number * rows, (number + 1) * rows)}
    columns |= {name: rng.normal(size=rows).astype(np.float32) for name in FEATURES}
    columns |= {"item": rng.integers(0, 100_000, rows), "label": rng.integers(0, 2, rows)}
    return pa.table(columns)


def write(folder: Path, rows: int) -> dict:
    """Write the same rows in all three formats; return the Feed input of each."""
    catalog = InMemoryCatalog("benchmark", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace("db")
    parquet, delta = folder / "parquet", str(folder / "delta")
    parquet.mkdir()
    for number in range(FILES):
        part = table(rows // FILES, number)
        pq.write_table(part, parquet / f"{number:02}.parquet", compression="zstd")
        deltalake.write_deltalake(
            delta,
            part,
            mode="append",
            writer_properties=deltalake.WriterProperties(compression="ZSTD"),
        )
        if not number:
            iceberg = catalog.create_table("db.rows", part.schema)
        iceberg.append(part)
    return {
        "Parquet files": str(parquet),
        "Delta table": delta,
        "Iceberg table": iceberg.location().removeprefix("file://"),
    }


def seconds_of_feed(data) -> tuple[float, list]:
    """Seconds to the spools of two workers, and a sum and a count of each."""
    start = time.perf_counter()
    feed = as_feed(data, [*FEATURES, "item"], ["label", "id"])

    def read(worker):
        ids = worker.shard.column("id")
        return [time.time(), int(ids.sum()), len(ids)]

    begin = time.time() - (time.perf_counter() - start)
    results = ENGINE.run(read, feed, num_workers=2)
    return max(end for end, *_ in results) - begin, [rest for _, *rest in results]


def seconds_of_library(read) -> tuple[float, pa.Table]:
    start = time.perf_counter()
    result = read()
    return time.perf_counter() - start, result


class Mosaic:
    """A process that reads rows by Mosaic Streaming."""

    def __init__(self, python: str, source: str, folder: str, rows: int):
        script = str(Path(__file__).parent / "lake_sides" / "by_mosaic.py")
        command = [python, script, source, f"{folder}/mds", str(rows)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, **pipes)
        self.rows = self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The process of Mosaic ended with {self._process.wait()}")
        return json.loads(line)

    def read(self) -> float:
        """Read all rows; return the seconds."""
        self._process.stdin.write("read\n")
        self._process.stdin.flush()
        seconds, ids, count = self._answer()
        assert (ids, count) == (self.rows * (self.rows - 1) // 2, self.rows), (ids, count)
        return seconds

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


ENGINE = LocalEngine()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=5_000_000)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--mosaic", metavar="PYTHON")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    columns = [*FEATURES, "item", "label", "id"]
    with tempfile.TemporaryDirectory() as folder:
        sides = write(Path(folder), chosen.rows)
        iceberg = open_iceberg(sides["Iceberg table"])
        libraries = {
            "deltalake, one process": lambda: pa.table(
                deltalake.DeltaTable(sides["Delta table"]).to_pyarrow_table(columns=columns)
            ),
            "pyiceberg, one process": lambda: (
                iceberg().scan(selected_fields=(*columns,)).to_arrow()
            ),
        }
        mosaic = None
        if chosen.mosaic:
            rows = min(MOSAIC_ROWS, chosen.rows)
            mosaic = Mosaic(chosen.mosaic, sides["Parquet files"], folder, rows)
        # million rows per second
        rates: dict[str, list[float]] = {name: [] for name in [*sides, *libraries]}
        sums = set()
        for repeat in range(chosen.repeats + 1):
            for name, data in sides.items():
                seconds, read = seconds_of_feed(data)
                sums.add((sum(s for s, _ in read), sum(n for _, n in read)))
                if repeat:  # the first one warms the page cache
                    rates[name].append(chosen.rows / seconds / 1e6)
            for name, load in libraries.items():
                seconds, loaded = seconds_of_library(load)
                ids = loaded.column("id").to_numpy()
                sums.add((int(ids.sum()), len(ids)))
                if repeat:
                    rates[name].append(chosen.rows / seconds / 1e6)
            if mosaic and repeat:
                rates.setdefault(MOSAIC, []).append(mosaic.rows / mosaic.read() / 1e6)
        if mosaic:
            mosaic.close()
        assert len(sums) == 1, f"The sides read different rows: {sums}"
    base = statistics.median(rates["Parquet files"])
    print("| Implementation | million rows/s | range | against Parquet |\n|---|---|---|---|")
    for name, each in rates.items():
        median = statistics.median(each)
        spread = f"{min(each):.2f}–{max(each):.2f}"
        print(f"| {name} | {median:.2f} | {spread} | {median / base:.2f}× |")
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": chosen.rows, "rates": rates}, indent=1))


def open_iceberg(path: str):
    from pyiceberg.table import StaticTable

    newest = sorted(Path(path, "metadata").glob("*.metadata.json"))[-1]
    return lambda: StaticTable.from_metadata(str(newest))


if __name__ == "__main__":
    main()
