"""The cores of several processes of this machine."""

from __future__ import annotations

import os
from dataclasses import replace

from bigdl.common.checks import invalidInputError
from bigdl.common.cpu import split_cores, topology, usable_cores

__all__ = ["get_affinity_core_num", "schedule_processors", "schedule_workers"]


def get_affinity_core_num() -> int:
    """Number of logical cores on which this process may run."""
    return len(usable_cores())


def schedule_workers(num_workers: int, cores_per_worker: int | None = None) -> list[list[int]]:
    """The cores of each worker: one logical core of each physical one; workers share none.

    Only the affinity mask limits what is handed out, ``OMP_NUM_THREADS`` does not.

    Parameters
    ----------
    num_workers : int
    cores_per_worker : int, optional
        Physical cores of each worker. By default all of them are split evenly, and neighbours
        by socket and NUMA node stay together.

    Returns
    -------
    list of list of int
        Ids of logical cores.

    Raises
    ------
    UsageError
        If a number is less than 1 or the process may not use that many physical cores.
    """
    machine = topology()
    first_siblings = tuple(siblings[:1] for siblings in machine.cores)
    have = f"{len(first_siblings)} of them may be used"
    invalidInputError(num_workers > 0, f"`num_workers` must be greater than 0, not {num_workers}")
    invalidInputError(
        num_workers <= len(first_siblings),
        "The number of processes must be less or equal to the number of physical cores, "
        f"but {num_workers} processes were asked for and {have}",
    )
    if cores_per_worker is None:
        return split_cores(num_workers, replace(machine, cores=first_siblings))
    invalidInputError(
        cores_per_worker > 0, f"`cores_per_worker` must be greater than 0, not {cores_per_worker}"
    )
    wanted = num_workers * cores_per_worker
    invalidInputError(
        wanted <= len(first_siblings),
        "The total number of cores requested must be smaller or equal than the physical cores "
        f"available, but {num_workers} × {cores_per_worker} were asked for and {have}",
    )
    order = [core for siblings in first_siblings for core in siblings]
    return [order[start : start + cores_per_worker] for start in range(0, wanted, cores_per_worker)]


def schedule_processors(
    num_workers: int, cores_per_worker: int | None = None
) -> list[dict[str, str]]:
    """The environment of each worker, by which Intel's OpenMP pins it to its cores.

    GNU's OpenMP, which the wheels of torch bring, reads ``OMP_NUM_THREADS`` alone;
    :func:`bigdl.runtime.launch.launch` pins its workers under any runtime.

    Parameters
    ----------
    num_workers : int
    cores_per_worker : int, optional
        As in :func:`schedule_workers`.

    Returns
    -------
    list of dict
        A copy of this process's environment for each worker, with ``KMP_AFFINITY``,
        ``OMP_NUM_THREADS`` and ``PROCESS_IDX``.

    Raises
    ------
    UsageError
        As :func:`schedule_workers` does.
    """
    return [
        dict(os.environ)
        | {
            "KMP_AFFINITY": f"granularity=fine,proclist=[{','.join(map(str, cores))}],explicit",
            "OMP_NUM_THREADS": str(len(cores)),
            "PROCESS_IDX": str(index),
        }
        for index, cores in enumerate(schedule_workers(num_workers, cores_per_worker))
    ]
