"""Several processes of this machine that train one model.

:func:`run_processes` starts them, has them meet in a process group, and returns what a function
returned in each. They are fresh interpreters (:mod:`bigdl.runtime.launch`), whatever started the
program: a script, a notebook, or a test. They meet through a file in a directory of their own, so
no port is guessed, and talk over the loopback interface.
"""

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
import torch.distributed as dist

from bigdl.common.cpu import core_count, passive_waiting
from bigdl.common.environment import tensorflow_log_level
from bigdl.common.errors import UsageError, WorkerError, WorkerLost, require
from bigdl.common.memory import tune_allocator
from bigdl.common.private_folders import scratch_directory
from bigdl.nano.attribute_patch import Patches
from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.runtime import release_memory
from bigdl.runtime._worker_main import end_with_parent
from bigdl.runtime.failure import Failure
from bigdl.runtime.launch import launch
from bigdl.runtime.process import CpuSlot, cpu_slots, exit_message


def run_processes(options: TrainingOptions, fn: Callable[..., Any], *args: object) -> list[Any]:
    """Call ``fn(rank, *args)`` in each process, inside of their process group.

    Returns
    -------
    list
        Results in the order of ranks.

    Raises
    ------
    Exception
        What `fn` raised first, with the traceback of its process as a note; as a WorkerError
        if it cannot be pickled.
    WorkerLost
        If a process was killed.
    UsageError
        If `fn` or `args` cannot be pickled.
    """
    release_memory()  # the processes are about to need it, and a fork may find no thread
    room = scratch_directory("bigdl-training-")
    count, cores = options.count, options.cpu_for_each_process
    try:
        # Patches come first: they hold before anything else is unpickled.
        patches = Patches((torch.set_default_dtype, (torch.get_default_dtype(),)))
        order = (patches, count, room, options.tune_process, fn, args)
        if options.distributed_backend not in ("fork", "ray"):
            return launch(_work, count, order, cores=cores, env=_environment())
        start = _forked if options.distributed_backend == "fork" else _on_ray
        results = {}
        with closing(start(cpu_slots(count, cores), order, room)) as outcomes:
            for rank, outcome in outcomes:
                succeeded, results[rank] = pickle.loads(outcome)
                if not succeeded:
                    raise results[rank].error(rank)
        return [results[rank] for rank in range(count)]
    except WorkerError as error:
        raise error.as_original(f"In process {error.rank} of the training") from None
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Return variables of the processes, where the user has not set them."""
    # Else DDP writes for each of them that all parameters were used, which is as it should be.
    wanted = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TF_CPP_MIN_LOG_LEVEL": tensorflow_log_level()}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # Gloo takes the interface of the host's name otherwise.
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _work(
    rank: int,
    patches: Patches,
    count: int,
    room: Path,
    tuned: bool,
    fn: Callable[..., Any],
    args: tuple,
) -> object:
    """Call a function in one of the processes, as a member of their group."""
    if tuned:
        tune_allocator()
    # They meet through a file, so no port is guessed.
    store = dist.FileStore(str(room / "meeting-point"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    result = fn(rank, *args)
    dist.barrier()  # gloo's sockets must not close while a peer still reads
    dist.destroy_process_group()
    return result


def _outcome(slot: CpuSlot, rank: int, order: tuple) -> bytes:
    """Call the function on the cores of a slot; return True and its result, or False and why."""
    os.sched_setaffinity(0, slot.cores)
    torch.set_num_threads(slot.threads)
    try:
        return cloudpickle.dumps((True, _work(rank, *order)))
    except BaseException as error:
        return pickle.dumps((False, Failure.of(error)))


def _forked(slots: Sequence[CpuSlot], order: tuple, room: Path) -> Generator[tuple[int, bytes]]:
    """Yield rank and outcome of each copy of this process.

    Raises
    ------
    UsageError
        If this process has threads: a copy has none of them, and waits for them without end.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise UsageError(
            f"distributed_backend='fork' copies this process, which has {threads} threads, and the "
            "copies would hang; use 'subprocess', or start the program with OMP_NUM_THREADS=1 and "
            "OPENBLAS_NUM_THREADS=1",
            code="unsupported",
        )

    parent = os.getpid()

    def write_outcome(rank: int, slot: CpuSlot, path: Path) -> None:
        end_with_parent(parent)
        os.setpgid(0, 0)  # an interrupt is for the parent, which ends the copies in order
        path.write_bytes(_outcome(slot, rank, order))

    context = multiprocessing.get_context("fork")
    running: dict[int, tuple[int, Any, Path]] = {}
    try:
        for rank, slot in enumerate(slots):
            path = room / f"outcome-{rank}"
            # no daemon of multiprocessing, which may not start the workers of a loader
            copy = context.Process(target=write_outcome, args=(rank, slot, path))
            copy.start()
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
            with suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(copy.pid, signal.SIGKILL)
            copy.kill()
            copy.join()


def _on_ray(slots: Sequence[CpuSlot], order: tuple, room: Path) -> Generator[tuple[int, bytes]]:
    """Yield rank and outcome of each task of Ray, on one machine."""
    ray = require("ray", "ray")
    started = not ray.is_initialized()
    if started:
        cores = max(len(slots), core_count())
        ray.init(num_cpus=cores, include_dashboard=False, logging_level="error")
    ranks: dict[Any, int] = {}
    running: list[Any] = []
    try:
        content = ray.put(cloudpickle.dumps(order))
        # A process that has trained ends: another may not take over its group and its cores.
        environment = {"env_vars": passive_waiting()}  # torch is imported before the task begins
        options = {"num_cpus": 1, "max_retries": 0, "max_calls": 1, "runtime_env": environment}
        task = ray.remote(**options)(_ray_task)
        for rank, slot in enumerate(slots):
            running.append(task.remote(content, rank, slot, sys.path, _environment()))
            ranks[running[-1]] = rank
        while running:
            [done], running = ray.wait(running)
            try:
                yield ranks[done], ray.get(done)
            except ray.exceptions.RayError as error:
                raise WorkerLost(f"worker {ranks[done]} was lost by Ray: {error}") from error
    finally:
        for reference in running:  # those that are done end by themselves; Ray would abort
            ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def _ray_task(
    content: bytes, rank: int, slot: CpuSlot, path: list[str], environment: dict[str, str]
) -> bytes:
    os.environ.update(environment)
    sys.path[:] = [*dict.fromkeys([*path, *sys.path])]
    return _outcome(slot, rank, pickle.loads(content))
