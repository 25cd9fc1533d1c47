"""Several processes of this machine that train one model.

:class:`Processes` is what the arguments of a Trainer say about them. Its `run` starts them, has
them meet in a process group, and returns what the function returned in each. They are fresh
interpreters (:mod:`bigdl.runtime.launch`), whatever started the program: a script, a notebook, or a
test. They meet through a file in a directory of their own, so no port is guessed, and talk over
the loopback interface.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
import torch
import torch.distributed as dist

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.cpu import core_count, usable_cores
from bigdl.common.environment import scratch_directory
from bigdl.common.errors import UsageError, WorkerError, WorkerLost, require
from bigdl.common.memory import glibc_tunables, tune_allocator
from bigdl.nano.pytorch.training.options import check_bool
from bigdl.nano.runtime import release_memory, tuned_fit
from bigdl.runtime.failure import Failure
from bigdl.runtime.launch import launch
from bigdl.runtime.process import CpuSlot, cpu_slots, exit_message

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BACKENDS = ("subprocess", "spawn", "fork", "ray")


class _DefaultType:
    """The default type of tensors; unpickled, it is in force."""

    def __reduce__(self) -> tuple:
        return torch.set_default_dtype, (torch.get_default_dtype(),)


_inherited: list[Callable[[], Any]] = [_DefaultType]


def inherit(state: Callable[[], Any]) -> None:
    """Let the processes of a training have a state of this one.

    Parameters
    ----------
    state : callable
        Returns an object that puts the state in force where it is unpickled, before anything of
        the program is.
    """
    _inherited.append(state)


def _state_of_this_process() -> list[Any]:
    return [state() for state in reversed(_inherited)]


_GRACE_S = 5.0  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Processes:
    """Number of the processes that train, and the way in which they are started.

    Attributes
    ----------
    count : int
        Number of processes; with 1 none is started.
    backend : str
        One of :data:`BACKENDS`. ``"spawn"`` and ``"subprocess"`` are the same.
    cores : sequence of sequence of int or None
        Logical cores of each process; None splits those of this process.
    tuned : bool
        Whether each keeps freed memory.
    """

    count: int = 1
    backend: str = "subprocess"
    cores: Sequence[Sequence[int]] | None = None
    tuned: bool = True

    @classmethod
    def of(
        cls,
        num_processes: int | None,
        distributed_backend: str,
        process_group_backend: str | None,
        cpu_for_each_process: Sequence[Sequence[int]] | None,
        tune_process: bool = True,
    ) -> Processes:
        """Check what a user asks for, under the names of the Trainer's arguments.

        Raises
        ------
        UsageError
            If an argument is wrong, or one cannot apply.
        """
        count = check_positive("num_processes", 1 if num_processes is None else num_processes)
        _check_backend(distributed_backend)
        if process_group_backend not in (None, "gloo"):
            raise UsageError(
                f"process_group_backend must be None or 'gloo', not {process_group_backend!r}: "
                "oneCCL's bindings for PyTorch are discontinued"
            )
        check_bool("tune_process", tune_process)
        cores = cpu_for_each_process
        if cores is not None:
            _check_cores(cores, count, everywhere=distributed_backend == "ray")
        return cls(count, distributed_backend, cores, tune_process)

    def tuned_here(self) -> AbstractContextManager[list[str]]:
        """:func:`~bigdl.nano.runtime.tuned_fit` of a training in this process alone."""
        return tuned_fit(tuned=self.tuned, cores=self.cores[0] if self.cores else None)

    def describe(self, bucket_cap_mb: float) -> list[str]:
        """Return what holds in one of several processes, in a few words each."""
        allocator = ["tuned allocator"] if self.tuned and glibc_tunables() else []
        threads = f"{self.count} processes × {torch.get_num_threads()} threads"
        return [*allocator, threads, f"gradients by {bucket_cap_mb:g} MB"]

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
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
        try:
            # The state comes first: it is in force before anything else is unpickled.
            order = (_state_of_this_process(), self.count, str(room), self.tuned, fn, args)
            if self.backend == "fork":
                return _run_forked(self.count, order, self.cores)
            if self.backend == "ray":
                return _run_on_ray(self.count, order, self.cores)
            return launch(_work, self.count, order, cores=self.cores, env=_environment())
        except WorkerError as error:
            raise error.as_original(f"In process {error.rank} of the training") from None
        finally:
            shutil.rmtree(room, ignore_errors=True)


def _check_cores(cores: Any, count: int, *, everywhere: bool) -> None:
    """Refuse what is no list of cores for each process; `everywhere`: they may be elsewhere."""
    lists = isinstance(cores, list | tuple) and all(
        isinstance(each, list | tuple) for each in cores
    )
    named: list[Any] = [core for share in cores for core in share] if lists else [None]
    if not all(isinstance(core, int) and not isinstance(core, bool) for core in named):
        raise UsageError(
            "cpu_for_each_process must be a list with a list of core numbers for each process, not "
            f"{cores!r}"
        )
    if len(cores) != count:
        raise UsageError(
            f"cpu_for_each_process must name the cores of each of {count} processes "
            f"(num_processes), but it has {len(cores)} entries"
        )
    usable = usable_cores()
    missing = sorted(set(named) - set(usable))
    if not all(cores) or (missing and not everywhere):
        raise UsageError(
            f"cpu_for_each_process={cores!r} must name at least one core for each process, of "
            f"those that this one may use, {usable}"
        )


def _check_backend(name: str) -> None:
    if name == "k8s":
        raise UsageError(
            "distributed_backend='k8s' has no launcher of its own any more; start the program by a "
            "PyTorchJob or torchrun with Lightning's strategy='ddp' instead"
        )
    check_choice("distributed_backend", name, BACKENDS)
    if name == "ray":
        require("ray", "ray")


def _environment() -> dict[str, str]:
    """Return variables of the workers, but for those that the user has set."""
    # Else DDP writes for each of them that all parameters were used, which is as it should be.
    wanted = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TF_CPP_MIN_LOG_LEVEL": "2"}
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:  # gloo takes the interface of the host's name otherwise
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _work(
    rank: int,
    _state: list[Any],
    count: int,
    room: str,
    tuned: bool,
    fn: Callable[..., Any],
    args: tuple,
) -> Any:
    """Run `fn` in a process that has the state of its parent already."""
    if tuned:
        tune_allocator()
    _set_rank_of_lightning(rank)
    # They meet through a file, so no port is guessed.
    store = dist.FileStore(os.path.join(room, "meeting-point"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    result = fn(rank, *args)
    dist.barrier()  # gloo's sockets must not close while a peer still reads
    dist.destroy_process_group()
    return result


def _set_rank_of_lightning(rank: int) -> None:
    """Tell Lightning, if it is used, before it says anything in this process."""
    if "pytorch_lightning" not in sys.modules:
        return
    from lightning_fabric.utilities.rank_zero import rank_zero_only as of_fabric
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = of_fabric.rank = rank  # type: ignore[attr-defined]  # its stubs know the call only


def _outcome(slot: CpuSlot, work: Callable[..., Any], rank: int, order: tuple) -> bytes:
    """Run one worker; return the pickle of (True, result) or (False, Failure)."""
    os.sched_setaffinity(0, slot.cores)
    torch.set_num_threads(slot.threads)
    try:
        return cloudpickle.dumps((True, work(rank, *order)))
    except BaseException as error:
        return pickle.dumps((False, Failure.of(error)))


def _result(rank: int, outcome: bytes) -> Any:
    succeeded, content = pickle.loads(outcome)
    if not succeeded:
        raise content.error(rank)
    return content


def _run_forked(count: int, order: tuple, cores: Sequence[Sequence[int]] | None) -> list[Any]:
    """Call `_work` in `count` copies of this process, where that is safe: nothing is pickled.

    A copy has only the thread that made it. Locks that other threads held stay locked in it for
    ever, and OpenMP waits for threads that it does not have, so a process that has started any is
    refused.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise UsageError(
            f"distributed_backend='fork' copies this process, which has {threads} threads, and the "
            "copies would hang; use 'subprocess', or start the program with OMP_NUM_THREADS=1 and "
            "OPENBLAS_NUM_THREADS=1"
        )
    context = multiprocessing.get_context("fork")
    copies, pipes = [], []
    try:
        for rank, slot in enumerate(cpu_slots(count, cores)):
            pipe, far_end = context.Pipe(duplex=False)
            copy = context.Process(
                target=lambda end, *args: end.send_bytes(_outcome(*args)),
                args=(far_end, slot, _work, rank, order),
                daemon=True,
            )
            copy.start()
            far_end.close()
            copies.append(copy)
            pipes.append(pipe)
        results: dict[int, Any] = {}
        while len(results) < count:
            for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
                pipe = cast("Connection", ready)
                rank = pipes.index(pipe)
                try:
                    results[rank] = _result(rank, pipe.recv_bytes())
                except EOFError:
                    copies[rank].join(_GRACE_S)
                    cause = exit_message(copies[rank].exitcode or 0)
                    raise WorkerLost(f"worker {rank} {cause}") from None
        return [results[rank] for rank in range(count)]
    finally:
        for copy in copies:
            copy.terminate()
        for copy in copies:
            copy.join(_GRACE_S)
            copy.kill()
            copy.join()
        for pipe in pipes:
            pipe.close()


def _run_on_ray(count: int, order: tuple, cores: Sequence[Sequence[int]] | None) -> list[Any]:
    """Call `_work` in `count` tasks of Ray: one that runs already, else one for the call."""
    ray = require("ray", "ray")
    started = not ray.is_initialized()
    if started:
        slots = max(count, core_count())
        ray.init(num_cpus=slots, include_dashboard=False, logging_level="error")
    references: list[Any] = []
    try:
        content = ray.put(cloudpickle.dumps((_work, order)))
        # A process that has trained ends: another may not take over its group and its cores.
        task = ray.remote(num_cpus=1, max_retries=0, max_calls=1)(_ray_task)
        for rank, slot in enumerate(cpu_slots(count, cores)):
            references.append(task.remote(content, rank, slot, sys.path, _environment()))
        results: dict[Any, Any] = {}
        while len(results) < count:
            (done, *_), _ = ray.wait([each for each in references if each not in results])
            rank = references.index(done)
            try:
                outcome = ray.get(done)
            except ray.exceptions.RayError as error:
                raise WorkerLost(f"worker {rank} was lost by Ray: {error}") from error
            results[done] = _result(rank, outcome)
        return [results[reference] for reference in references]
    finally:
        for reference in references:
            ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def _ray_task(
    content: bytes,
    rank: int,
    slot: CpuSlot,
    path: list[str],
    environment: dict[str, str],
) -> bytes:
    os.environ.update(environment)
    sys.path[:] = [*dict.fromkeys([*path, *sys.path])]
    work, order = pickle.loads(content)
    return _outcome(slot, work, rank, order)
