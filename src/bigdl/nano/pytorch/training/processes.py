"""Training of one model in several processes of this machine.

:func:`run_processes` starts the processes, initializes a process group, calls a function in each
rank and returns the results. By default the processes are new interpreters
(:mod:`bigdl.runtime.launch`), so scripts, notebooks and tests work alike. Rendezvous uses a file
in a private directory, so no port is guessed; communication uses the loopback interface.
"""

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
import torch.distributed as dist

from bigdl.common.checks import check_supported
from bigdl.common.cpu import core_count, passive_waiting
from bigdl.common.environment import tensorflow_log_level
from bigdl.common.errors import UsageError, WorkerError, WorkerLost, require
from bigdl.common.memory import tune_allocator
from bigdl.common.platform.cores import pin_process, thread_count
from bigdl.common.platform.network import loopback_interface
from bigdl.common.platform.processes import (
    can_fork,
    fork,
    kill_group_of,
    leave_group,
    signal_at_parent_end,
)
from bigdl.common.private_folders import scratch_directory
from bigdl.nano.attribute_patch import Patches
from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.runtime import release_memory
from bigdl.runtime.failure import Failure
from bigdl.runtime.launch import launch
from bigdl.runtime.process import CpuSlot, cpu_slots, exit_message


def run_processes(options: TrainingOptions, fn: Callable[..., Any], *args: object) -> list[Any]:
    """Call ``fn(rank, *args)`` in each process of a new process group.

    Returns
    -------
    list
        Results, ordered by rank.

    Raises
    ------
    Exception
        The first exception of `fn`, with its traceback as a note; a WorkerError if the exception
        cannot be pickled.
    WorkerLost
        If a process was killed.
    UsageError
        If `fn` or `args` cannot be pickled.
    """
    release_memory()  # for the processes; and a fork requires that no threads exist
    directory = scratch_directory("bigdl-training-")
    count, cores = options.count, options.cpu_for_each_process
    try:
        # Patches come first: they apply before anything else is unpickled.
        patches = Patches((torch.set_default_dtype, (torch.get_default_dtype(),)))
        task = (patches, count, directory, options.tune_process, fn, args)
        if options.distributed_backend not in ("fork", "ray"):
            return launch(_run_rank, count, task, cores=cores, env=_environment())
        start = _run_forked if options.distributed_backend == "fork" else _run_on_ray
        results = {}
        with closing(start(cpu_slots(count, cores), task, directory)) as outcomes:
            for rank, outcome in outcomes:
                succeeded, results[rank] = pickle.loads(outcome)
                if not succeeded:
                    raise results[rank].error(rank)
        return [results[rank] for rank in range(count)]
    except WorkerError as error:
        raise error.as_original(f"In process {error.rank} of the training") from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Return the environment variables for the processes, except those that the user has set."""
    # Otherwise each DDP process warns that all parameters were used, which is expected.
    wanted = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TF_CPP_MIN_LOG_LEVEL": tensorflow_log_level()}
    loopback = loopback_interface()
    if loopback is not None:
        # Otherwise Gloo uses the interface of the host name.
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _run_rank(
    rank: int,
    patches: Patches,
    count: int,
    directory: Path,
    tuned: bool,
    fn: Callable[..., Any],
    args: tuple,
) -> object:
    """Join the process group as one rank and run a function."""
    if tuned:
        tune_allocator()
    # File-based rendezvous: no port is guessed.
    store = dist.FileStore(str(directory / "meeting-point"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    result = fn(rank, *args)
    dist.barrier()  # gloo's sockets must not close while a peer still reads
    dist.destroy_process_group()
    return result


def _outcome(slot: CpuSlot, rank: int, task: tuple) -> bytes:
    """Run the function on a slot's cores; return the pickled success flag and result or error."""
    pin_process(slot.cores)
    torch.set_num_threads(slot.threads)
    try:
        return cloudpickle.dumps((True, _run_rank(rank, *task)))
    except BaseException as error:
        return pickle.dumps((False, Failure.of(error)))


def _run_forked(
    slots: Sequence[CpuSlot], task: tuple, directory: Path
) -> Generator[tuple[int, bytes]]:
    """Fork one process per slot; yield each rank with its outcome.

    Raises
    ------
    UsageError
        If this process has threads: a forked process lacks them and would wait forever.
    """
    check_supported("forked training processes", can_fork())
    threads = thread_count()
    if threads > 1:
        raise UsageError(
            f"distributed_backend='fork' copies this process, which has {threads} threads, and the "
            "copies would hang; use 'subprocess', or start the program with OMP_NUM_THREADS=1 and "
            "OPENBLAS_NUM_THREADS=1",
            code="unsupported",
        )

    parent = os.getpid()

    def write_outcome(rank: int, slot: CpuSlot, path: Path) -> None:
        signal_at_parent_end(parent)
        leave_group()  # only the parent gets interrupts, and then ends the forked processes
        path.write_bytes(_outcome(slot, rank, task))

    running: dict[int, tuple[int, Any, Path]] = {}
    try:
        for rank, slot in enumerate(slots):
            path = directory / f"outcome-{rank}"
            # not a multiprocessing daemon, which could not start a loader's workers
            copy = fork(write_outcome, (rank, slot, path))
            running[copy.sentinel] = rank, copy, path
        while running:
            sentinel, *_ = wait(running)
            rank, ended, path = running.pop(cast("int", sentinel))
            ended.join()
            if ended.exitcode:
                raise WorkerLost(f"worker {rank} {exit_message(ended.exitcode)}")
            yield rank, path.read_bytes()
    finally:
        for _, copy, _ in running.values():
            kill_group_of(copy.pid)
            copy.kill()
            copy.join()


def _run_on_ray(
    slots: Sequence[CpuSlot], task: tuple, directory: Path
) -> Generator[tuple[int, bytes]]:
    """Run one Ray task per slot on this machine; yield each rank with its outcome."""
    ray = require("ray", "ray")
    started = not ray.is_initialized()
    if started:
        cores = max(len(slots), core_count())
        ray.init(num_cpus=cores, include_dashboard=False, logging_level="error")
    ranks: dict[Any, int] = {}
    running: list[Any] = []
    try:
        content = ray.put(cloudpickle.dumps(task))
        # max_calls=1: another task must not inherit the process group and the cores.
        environment = {"env_vars": passive_waiting()}  # torch is imported before the task begins
        options = {"num_cpus": 1, "max_retries": 0, "max_calls": 1, "runtime_env": environment}
        remote_task = ray.remote(**options)(_ray_task)
        for rank, slot in enumerate(slots):
            running.append(remote_task.remote(content, rank, slot, sys.path, _environment()))
            ranks[running[-1]] = rank
        while running:
            [done], running = ray.wait(running)
            try:
                yield ranks[done], ray.get(done)
            except ray.exceptions.RayError as error:
                raise WorkerLost(f"worker {ranks[done]} was lost by Ray: {error}") from error
    finally:
        for reference in running:  # finished tasks end by themselves; cancelling aborts Ray
            ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def _ray_task(
    content: bytes, rank: int, slot: CpuSlot, path: list[str], environment: dict[str, str]
) -> bytes:
    os.environ.update(environment)
    sys.path[:] = [*dict.fromkeys([*path, *sys.path])]
    return _outcome(slot, rank, pickle.loads(content))
