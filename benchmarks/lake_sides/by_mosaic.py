"""Rows of Parquet files as shards of Mosaic Streaming (MDS), read with its dataset.

Runs in an environment with mosaicml-streaming. It writes the shards, says how many rows they have,
and for each line of the standard input reads all of them by a DataLoader of two workers.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

BATCH = 4096


def write(source: str, target: str, rows: int) -> int:
    """Write the first rows of the files and return their number."""
    kinds = {"float": "float32", "double": "float64", "int64": "int64"}
    written = 0
    with MDSWriter(out=target, columns=columns_of(source, kinds), compression="zstd") as out:
        for file in sorted(Path(source).glob("*.parquet")):
            for batch in pq.ParquetFile(file).iter_batches():
                names = batch.schema.names
                for values in zip(*(column.to_numpy() for column in batch), strict=True):
                    if written == rows:
                        return written
                    out.write(dict(zip(names, values, strict=True)))
                    written += 1
    return written


def columns_of(source: str, kinds: dict[str, str]) -> dict[str, str]:
    schema = pq.read_schema(next(Path(source).glob("*.parquet")))
    return {field.name: kinds[str(field.type)] for field in schema}


def main() -> None:
    source, target, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
    print(json.dumps(write(source, target, rows)), flush=True)
    for _ in sys.stdin:
        cache = f"{target}-cache"
        shutil.rmtree(cache, ignore_errors=True)
        started = time.perf_counter()
        data = StreamingDataset(remote=target, local=cache, batch_size=BATCH, shuffle=False)
        ids = count = 0
        for batch in DataLoader(data, batch_size=BATCH, num_workers=2):
            ids += int(batch["id"].sum())
            count += len(batch["id"])
        print(json.dumps([time.perf_counter() - started, ids, count]), flush=True)


if __name__ == "__main__":
    main()
