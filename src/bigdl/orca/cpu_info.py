"""Assignment of CPU cores to the workers of one machine, at the import path of BigDL 2.x."""

from bigdl.common.cpu import split_cores, topology, usable_cores
from bigdl.common.errors import UsageError

__all__ = ["get_cgroup_cpuset", "schedule_workers"]


get_cgroup_cpuset = usable_cores


def schedule_workers(num_workers: int, cores_per_worker: int | None = None) -> list[list[int]]:
    """Return the logical cores of each worker; workers share no core.

    Parameters
    ----------
    num_workers : int
    cores_per_worker : int, optional
        Cores of each worker; default an equal share of all. Physical cores are assigned before
        their hyperthreads.

    Returns
    -------
    list of list of int

    Raises
    ------
    UsageError
        If the machine has fewer usable cores.

    Examples
    --------
    >>> from bigdl.orca.cpu_info import schedule_workers
    >>> cores = schedule_workers(1, cores_per_worker=1)
    >>> len(cores), len(cores[0])  # of one worker, one core
    (1, 1)
    """
    machine = topology()
    usable = sum(len(siblings) for siblings in machine.cores)
    wanted = num_workers * (1 if cores_per_worker is None else cores_per_worker)
    if not num_workers > 0 or not wanted > 0:
        raise UsageError(
            "num_workers and cores_per_worker must be at least 1, got "
            f"{num_workers} and {cores_per_worker}",
            code="argument-value",
            argument="num_workers",
        )
    if wanted > usable:
        raise UsageError(
            f"{num_workers} workers need {wanted} cores and this process may use {usable}; pass "
            "smaller numbers",
            code="resource-limit",
            argument="num_workers",
        )
    if cores_per_worker is None:
        return split_cores(num_workers, machine)
    return _first_of_each(num_workers, cores_per_worker, machine)


def _first_of_each(num_workers, cores_per_worker, machine):
    """Assign cores to workers; use all physical cores before any hyperthread."""
    deepest = max(len(siblings) for siblings in machine.cores)
    order = [s[i] for i in range(deepest) for s in machine.cores if i < len(s)]
    return [
        sorted(order[i * cores_per_worker : (i + 1) * cores_per_worker]) for i in range(num_workers)
    ]
