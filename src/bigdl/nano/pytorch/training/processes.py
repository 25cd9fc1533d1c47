"""Several processes of this machine that train one model.

:class:`Processes` is what the arguments of a Trainer say about them. Its `run` starts them, has
them meet in a process group, and returns what the function returned in each. They are fresh
interpreters (:mod:`bigdl.runtime.launch`), whatever started the program: a script, a notebook, or a
test. They meet through a file in a directory of their own, so no port is guessed, and talk over
the loopback interface.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigdl.common.cpu import usable_cores
from bigdl.common.environment import scratch_directory
from bigdl.common.errors import UsageError, WorkerError, require
from bigdl.common.memory import glibc_tunables, tune_allocator
from bigdl.nano.pytorch.patching.state import Patches
from bigdl.nano.runtime.keeping import release_memory
from bigdl.nano.runtime.tuning import tuned_fit
from bigdl.runtime.launch import launch

__all__ = ["BACKENDS", "Processes"]

BACKENDS = ("subprocess", "spawn", "fork", "ray")
_MEETING_POINT = "meeting-point"


@dataclass(frozen=True)
class Processes:
    """How many processes train, and how they are started.

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
        count = 1 if num_processes is None else num_processes
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"num_processes must be an int of at least 1, but it is {count!r}")
        _check_backend(distributed_backend)
        if process_group_backend not in (None, "gloo"):
            raise UsageError(
                f"process_group_backend must be None or 'gloo', not {process_group_backend!r}: "
                "oneCCL's bindings for PyTorch are discontinued"
            )
        if not isinstance(tune_process, bool):
            raise UsageError(f"tune_process must be True or False, not {tune_process!r}")
        cores = cpu_for_each_process
        if cores is not None:
            _check_cores(cores, count, everywhere=distributed_backend == "ray")
        return cls(count, distributed_backend, cores, tune_process)

    def tuned_here(self) -> AbstractContextManager[list[str]]:
        """:func:`~bigdl.nano.runtime.tuning.tuned_fit` of a training in this process alone."""
        return tuned_fit(tuned=self.tuned, cores=self.cores[0] if self.cores else None)

    def told(self, bucket_cap_mb: float) -> list[str]:
        """What holds in one of several processes, in a few words each."""
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
            # The patches come first: they are in force before anything else is unpickled.
            order = (Patches.of_this_process(), self.count, str(room), self.tuned, fn, args)
            if self.backend == "fork":
                from bigdl.nano.pytorch.training.forked import run_forked

                return run_forked(_work, self.count, order, self.cores)
            if self.backend == "ray":
                from bigdl.nano.pytorch.training.on_ray import run_on_ray

                return run_on_ray(_work, self.count, order, self.cores, _environment())
            return launch(_work, self.count, order, cores=self.cores, env=_environment())
        except WorkerError as error:
            original = _original(room, error)
            if original is None:
                raise
            raise original from None
        finally:
            shutil.rmtree(room, ignore_errors=True)


def _check_cores(given: Any, count: int, *, everywhere: bool) -> None:
    """Refuse what is no list of cores for each process; `everywhere`: they may be elsewhere."""
    lists = isinstance(given, list | tuple) and all(isinstance(own, list | tuple) for own in given)
    named = [core for own in given for core in own] if lists else [None]
    if not all(isinstance(core, int) and not isinstance(core, bool) for core in named):
        raise UsageError(
            "cpu_for_each_process must be a list with a list of core numbers for each process, not "
            f"{given!r}"
        )
    if len(given) != count:
        raise UsageError(
            f"cpu_for_each_process must name the cores of each of {count} processes "
            f"(num_processes), but it has {len(given)} entries"
        )
    usable = usable_cores()
    missing = sorted(set(named) - set(usable))
    if not all(given) or (missing and not everywhere):
        raise UsageError(
            f"cpu_for_each_process={given!r} must name at least one core for each process, of "
            f"those that this one may use, {usable}"
        )


def _check_backend(name: str) -> None:
    if name == "k8s":
        raise UsageError(
            "distributed_backend='k8s' has no launcher of its own any more; start the program by a "
            "PyTorchJob or torchrun with Lightning's strategy='ddp' instead"
        )
    if name not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise UsageError(f"distributed_backend must be one of {names}, not {name!r}")
    if name == "ray":
        require("ray", "ray")


def _environment() -> dict[str, str]:
    """Variables of the workers, but for those that the user has set."""
    # Else DDP writes for each of them that all parameters were used, which is as it should be.
    wanted = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TF_CPP_MIN_LOG_LEVEL": "2"}
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:  # gloo takes the interface of the host's name otherwise
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _work(
    rank: int,
    _patches: Patches,
    count: int,
    room: str,
    tuned: bool,
    fn: Callable[..., Any],
    args: tuple,
) -> Any:
    """What each process does; it is patched already."""
    if tuned:
        tune_allocator()
    _become(rank)
    try:
        _meet(rank, count, Path(room))
        result = fn(rank, *args)
    except Exception as error:
        _leave_note(Path(room), rank, error)
        raise
    _part()
    return result


def _become(rank: int) -> None:
    """Tell Lightning, if it is used, before it says anything in this process."""
    if "pytorch_lightning" not in sys.modules:
        return
    from lightning_fabric.utilities.rank_zero import rank_zero_only as of_fabric
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = of_fabric.rank = rank


def _meet(rank: int, count: int, room: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(room / _MEETING_POINT), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)


def _part() -> None:
    """Leave the group together: gloo's sockets must not close while a peer still reads."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _leave_note(room: Path, rank: int, error: Exception) -> None:
    """Keep an exception for the parent, which is told only its text."""
    import cloudpickle

    frames = error.__traceback__.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    with suppress(Exception):  # what cannot be pickled is told as text
        content = cloudpickle.dumps((error, text))
        pickle.loads(content)
        (room / f"error-{rank}").write_bytes(content)


def _original(room: Path, error: WorkerError) -> Exception | None:
    try:
        original, text = pickle.loads((room / f"error-{error.rank}").read_bytes())
    except Exception:
        return None
    if type(original).__name__ != error.kind:
        return None
    original.add_note(f"In process {error.rank} of the training:\n{text}")
    return original
