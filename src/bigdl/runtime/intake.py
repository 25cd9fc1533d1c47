"""How a task gets its shards: from its input, or from the spools of an earlier attempt."""

from __future__ import annotations

import collections

__all__ = ["choose_rank", "is_accepted", "match", "read_input", "remove_spools", "reopen"]


def read_input(spec, batches, place: int, local_dir: str) -> dict:
    """The shards of a task, spooled from its input."""
    from bigdl.runtime.shards.spool import SpoolWriter, remove_stale_spools

    if spec.reader is None:
        for _ in batches:  # the engine's own empty frame
            pass
        return {}
    remove_stale_spools(local_dir, spec.job, set(spec.active_jobs))
    writers = []

    def open_spool(name, specs):
        writers.append(SpoolWriter(local_dir, spec.job, f"{name}-{place}", specs))
        return writers[-1]

    open_spool.place, open_spool.world_size = place, spec.world_size
    try:
        shards = spec.reader(batches, open_spool)
        for _ in batches:  # of a reader that gets at the rows by itself
            pass
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    return shards


def is_accepted(spec, shards: dict, place: int, line) -> bool:
    """Whether the input goes on with the sizes that its shards turned out to have."""
    line.set_json(f"rows/{place}", sum(shard.rows for shard in shards.values()))
    line.meet("rows", spec.world_size)
    return spec.accept([line.get_json(f"rows/{p}") for p in range(spec.world_size)])


def reopen(spools: dict) -> dict:
    """The shards over spools of an earlier attempt."""
    from bigdl.runtime.shards.shard import open_shard
    from bigdl.runtime.shards.spool import Spool

    return {name: open_shard(Spool.from_json(doc)) for name, doc in spools.items()}


def remove_spools(shards: dict) -> None:
    """Remove the files under shards; who has mapped them keeps them."""
    from bigdl.runtime.shards.spool import remove_spool

    for shard in shards.values():
        remove_spool(shard.spool.path)


def choose_rank(spec, place: int, line) -> int | None:
    """Which shard this task takes, of those whose spools its machine sees; None if it cannot be.

    Every task says what it sees and computes the same assignment.
    """
    from bigdl.runtime.shards.spool import Spool

    seen = [
        rank
        for rank, spools in enumerate(spec.spools)
        if all(Spool.from_json(doc).is_here() for doc in spools.values())
    ]
    line.set_json(f"seen/{place}", seen)
    line.meet("seen", spec.world_size)
    views = [line.get_json(f"seen/{p}") for p in range(spec.world_size)]
    return match(views).get(place)


def match(views: list[list[int]]) -> dict[int, int]:
    """Give every task one of the shards that it sees, each to one task.

    A task keeps the shard of its own number where that leaves a shard for everybody.

    Parameters
    ----------
    views : list of list of int
        The shards that each task sees.

    Returns
    -------
    dict of task to shard; empty when there is no complete assignment
    """
    shard_of = {task: task for task, seen in enumerate(views) if task in seen}
    owner = dict(shard_of)
    for task in range(len(views)):
        if task in shard_of:
            continue
        # the nearest free shard, if those on the way to it move on by one
        reached: dict[int, int] = {}  # shard -> the task that would take it
        queue, free = collections.deque([task]), None
        while queue and free is None:
            taker = queue.popleft()
            for shard in views[taker]:
                if shard not in reached:
                    reached[shard] = taker
                    if shard not in owner:
                        free = shard
                        break
                    queue.append(owner[shard])
        if free is None:
            return {}
        while free is not None:
            taker = reached[free]
            left = shard_of.get(taker)
            shard_of[taker], owner[free] = free, taker
            free = left
    return shard_of
