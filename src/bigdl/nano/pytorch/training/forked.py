"""Processes that are copies of this one, where that is safe: nothing needs to be pickled.

A copy has only the thread that made it. Locks that other threads held stay locked in it for ever,
and OpenMP waits for threads that it does not have, so a process that has started any is refused.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.runtime.launch import cause_of_end, worker_shares

__all__ = ["run_forked"]

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL


def run_forked(
    work: Callable[..., Any], count: int, order: tuple, cores: Sequence[Sequence[int]] | None
) -> list[Any]:
    """Call ``work(rank, *order)`` in `count` copies of this process.

    Returns
    -------
    list
        Results in the order of ranks.

    Raises
    ------
    UsageError
        If this process has threads.
    WorkerError
        What went wrong first.
    WorkerLost
        If a copy ended before its function returned.
    """
    _check_threads()
    context = multiprocessing.get_context("fork")
    copies, lines = [], []
    try:
        for rank, (own_cores, threads) in enumerate(worker_shares(count, cores)):
            line, far_end = context.Pipe(duplex=False)
            copy = context.Process(
                target=_run, args=(far_end, own_cores, threads, work, rank, order), daemon=True
            )
            copy.start()
            far_end.close()
            copies.append(copy)
            lines.append(line)
        return _results(copies, lines)
    finally:
        for copy in copies:
            copy.terminate()
        for copy in copies:
            copy.join(_GRACE)
            copy.kill()
            copy.join()
        for line in lines:
            line.close()


def _check_threads() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise UsageError(
            f"distributed_backend='fork' copies this process, which has {threads} threads, and the "
            "copies would hang; use 'subprocess', or start the program with OMP_NUM_THREADS=1 and "
            "OPENBLAS_NUM_THREADS=1"
        )


def _run(
    line: Any, cores: list[int], threads: int, work: Callable[..., Any], rank: int, order: tuple
) -> None:
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    try:
        outcome: tuple[bool, Any] = True, work(rank, *order)
    except BaseException as error:
        frames = error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        outcome = False, (type(error).__name__, text)
    line.send_bytes(pickle.dumps(outcome))


def _results(copies: list, lines: list) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(lines):
        waiting = [line for rank, line in enumerate(lines) if rank not in results]
        for line in wait(waiting):
            rank = lines.index(line)
            try:
                succeeded, content = pickle.loads(line.recv_bytes())
            except EOFError:
                copies[rank].join(_GRACE)
                cause = cause_of_end(copies[rank].exitcode or 0)
                raise WorkerLost(f"worker {rank} {cause}") from None
            if not succeeded:
                raise WorkerError(rank, *content)
            results[rank] = content
    return [results[rank] for rank in range(len(lines))]
