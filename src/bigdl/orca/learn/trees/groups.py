"""Exchange of rows between workers, so that one worker has all rows of a ranking's group."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.shard import Shard, SpoolWriter

if TYPE_CHECKING:
    from bigdl.runtime.worker import Worker

_CHUNK_BYTES = 64 << 20
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # spreads consecutive ids (Fibonacci hashing)


def exchange_groups(worker: Worker, group: str, folder: str) -> dict[str, Shard]:
    """Return the shards of a worker after all rows of a group were sent to one worker.

    Rows of a group keep their order: that of the workers, and of the rows of each. Workers exchange
    them in chunks of 64 MB with gloo, which uses the encryption of the cluster.

    Parameters
    ----------
    worker : Worker
    group : str
        Name of the column with the ids of groups.
    folder : str
        Folder for the exchanged rows, which the caller removes.
    """
    sync = TorchDistributedSync(worker)
    sync.start()
    try:
        return {
            name: _exchanged(worker, sync, shard, group, folder, name)
            for name, shard in worker.shards.items()
        }
    finally:
        sync.stop()


def owners_of(ids: np.ndarray, workers: int) -> np.ndarray:
    """Return the rank of the worker for each group id."""
    if ids.dtype.kind == "f":
        ids = (ids + 0.0).astype(np.float64).view(np.uint64)  # -0.0 is 0.0
    mixed = ids.astype(np.uint64) * _MULTIPLIER
    return ((mixed >> np.uint64(33)) % np.uint64(workers)).astype(np.int64)


def _exchanged(
    worker: Worker, sync: TorchDistributedSync, shard: Shard, group: str, folder: str, name: str
) -> Shard:
    import torch

    world_size = worker.world_size
    width = sum(array[:1].nbytes for array in shard.arrays) if shard.rows else 1
    step = max(1, _CHUNK_BYTES // max(1, width))
    facts = {
        "steps": -(-shard.rows // step),
        "rows": shard.rows,
        "leaves": [asdict(leaf) for leaf in shard.spool.leaves],
    }
    gathered = worker.channel.all_gather(f"groups/{name}", worker.rank, facts, world_size)
    leaves = [[ArraySpec.from_json(each) for each in one["leaves"]] for one in gathered]
    known = [leaves[rank] for rank in range(world_size) if gathered[rank]["rows"]]
    if any(len(each) != len(known[0]) for each in known):
        raise UsageError(
            "The workers have different columns; give all rows the same columns",
            code="data-schema",
        )
    writer = SpoolWriter(folder, 0, name, [])
    if known:
        writer.append(0, -1, 0, known[0], [])  # also for a worker without rows
    owners = owners_of(_ids(shard, group), world_size)
    for number in range(max(one["steps"] for one in gathered)):
        rows = np.arange(number * step, max(number * step, min(shard.rows, (number + 1) * step)))
        rows = rows[np.argsort(owners[rows], kind="stable")]
        counts = np.bincount(owners[rows], minlength=world_size).tolist()
        received = [int(each[worker.rank]) for each in sync.all_gather(counts)]
        pieces: list[list[np.ndarray]] = [[] for _ in range(world_size)]
        for index in range(len(known[0])):
            sizes = [_row_bytes(each[index]) if each else 0 for each in leaves]
            values = np.ascontiguousarray(shard.arrays[index][rows]) if len(rows) else None
            flat = np.empty(0, np.uint8) if values is None else values.reshape(-1).view(np.uint8)
            out = sync.all_to_all(
                torch.from_numpy(flat),
                [count * sizes[worker.rank] for count in counts],
                [count * size for count, size in zip(received, sizes, strict=True)],
            ).numpy()
            end = 0
            for sender, count in enumerate(received):
                start, end = end, end + count * sizes[sender]
                pieces[sender].append(out[start:end])
        for sender, count in enumerate(received):
            if count:
                writer.append(sender, number, count, leaves[sender], pieces[sender])
    return Shard(writer.finish())


def _ids(shard: Shard, group: str) -> np.ndarray:
    """Return the group ids of a shard."""
    if not shard.rows:
        return np.empty(0, np.int64)
    values = shard.column(group)
    if isinstance(values, dict) or values.dtype.kind not in "biuf" or values[:1].size > 1:
        raise UsageError(
            f"Column '{group}' must contain one number per row, the id of its group; encode it "
            "first",
            code="data-dtype",
            column=group,
        )
    return values.reshape(-1)


def _row_bytes(leaf: ArraySpec) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
