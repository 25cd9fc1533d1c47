"""Processes that are tasks of a Ray on this machine."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bigdl.common.cpu import core_count
from bigdl.common.errors import WorkerError, WorkerLost, require
from bigdl.runtime.launch import worker_shares

__all__ = ["run_on_ray"]


def run_on_ray(
    work: Callable[..., Any],
    count: int,
    order: tuple,
    cores: Sequence[Sequence[int]] | None,
    environment: Mapping[str, str],
) -> list[Any]:
    """Call ``work(rank, *order)`` in `count` tasks.

    A Ray that runs already is used; otherwise one is started for the call.

    Returns
    -------
    list
        Results in the order of ranks.

    Raises
    ------
    WorkerError
        What went wrong first.
    WorkerLost
        If a task was lost.
    """
    ray = require("ray", "ray")
    import cloudpickle

    started = not ray.is_initialized()
    if started:
        slots = max(count, core_count())
        ray.init(num_cpus=slots, include_dashboard=False, logging_level="error")
    references: list[Any] = []
    try:
        content = ray.put(cloudpickle.dumps((work, order)))
        # A process that has trained ends: another may not take over its group and its cores.
        task = ray.remote(num_cpus=1, max_retries=0, max_calls=1)(_run)
        for rank, (own_cores, threads) in enumerate(worker_shares(count, cores)):
            place = {"rank": rank, "cores": own_cores, "threads": threads, "path": sys.path}
            references.append(task.remote(content, place, dict(environment)))
        return _results(ray, references)
    finally:
        for reference in references:
            ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def _run(content: bytes, place: dict[str, Any], environment: dict[str, str]) -> tuple[bool, bytes]:
    os.environ.update(environment)
    os.sched_setaffinity(0, place["cores"])
    sys.path[:] = [*dict.fromkeys([*place["path"], *sys.path])]
    import cloudpickle
    import torch

    torch.set_num_threads(place["threads"])
    try:
        work, order = pickle.loads(content)
        return True, cloudpickle.dumps(work(place["rank"], *order))
    except Exception as error:
        frames = error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        return False, pickle.dumps((type(error).__name__, text))


def _results(ray: Any, references: list[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = list(references)
    while waiting:
        done, waiting = ray.wait(waiting)
        for reference in done:
            rank = references.index(reference)
            try:
                succeeded, content = ray.get(reference)
            except ray.exceptions.RayError as error:
                raise WorkerLost(f"worker {rank} was lost by Ray: {error}") from error
            if not succeeded:
                raise WorkerError(rank, *pickle.loads(content))
            results[rank] = pickle.loads(content)
    return [results[rank] for rank in range(len(references))]
