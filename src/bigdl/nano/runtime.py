"""Settings of the running process that speed up numeric code; see :func:`tune`.

``bigdl-nano-init`` and ``bigdl-nano-run`` choose an allocator and thread counts before a process
starts. :func:`tune` changes what can still be changed in a running process, e.g. in a notebook.
Each setting is a context manager: it makes its change, yields a description, and undoes the change
on exit. An impossible setting raises :class:`_Skipped` with the reason.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from bigdl.common.cpu import core_count, thread_scope, topology, usable_cores
from bigdl.common.errors import UsageError, require
from bigdl.common.memory import tuned_allocator
from bigdl.common.platform.cores import can_pin_threads, has_thread, pinned_threads

__all__ = ["Setting", "Tuning", "tune"]

_TRIM_THRESHOLD_IN_SPARK = 128 << 20
_SECONDS_KEPT = 60.0


@dataclass(frozen=True)
class Setting:
    """A process setting that :func:`tune` has applied or skipped.

    Attributes
    ----------
    name : str
    applied : bool
    text : str
        Description of the change, or the reason why it was skipped.

    Examples
    --------
    >>> from bigdl.nano.runtime import tune
    >>> with tune(allocator=False, threads=2) as tuning:
    ...     setting = tuning.settings[0]
    >>> setting.name, setting.applied, setting.text
    ('threads', True, '2 for PyTorch, OpenMP and BLAS')
    """

    name: str
    applied: bool
    text: str


@dataclass(eq=False)
class Tuning(AbstractContextManager["Tuning"]):
    """Changes that :func:`tune` made to the process; as a context manager it undoes them on exit.

    Attributes
    ----------
    settings : tuple of Setting
        Requested settings, applied or skipped.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.runtime import tune
    >>> before = torch.get_num_threads()
    >>> tuning = tune(allocator=False, threads=1)
    >>> torch.get_num_threads(), tuning.applied
    (1, {'threads': '1 for PyTorch, OpenMP and BLAS'})
    >>> tuning.undo()
    >>> torch.get_num_threads() == before
    True
    """

    settings: tuple[Setting, ...]
    _undoing: ExitStack = field(repr=False)

    @property
    def applied(self) -> dict[str, str]:
        """Descriptions of the applied changes, by setting name."""
        return {setting.name: setting.text for setting in self.settings if setting.applied}

    @property
    def skipped(self) -> dict[str, str]:
        """Reasons for skipping settings, by setting name."""
        return {setting.name: setting.text for setting in self.settings if not setting.applied}

    def undo(self) -> None:
        """Undo all changes; a second call has no effect."""
        lasting_tunings.discard(self)
        self._undoing.close()

    def __exit__(self, *exception) -> None:
        self.undo()

    def __str__(self) -> str:
        return "\n".join(
            f"{setting.name}: {setting.text if setting.applied else f'as it was ({setting.text})'}"
            for setting in self.settings
        )


def tune(
    *,
    allocator: bool = True,
    threads: bool | int = True,
    flush_denormals: bool = False,
    pin: bool = False,
) -> Tuning:
    """Tune the running process for numeric code.

    Call it before the first model runs. It does not change results, except for `flush_denormals`.

    Parameters
    ----------
    allocator : bool
        Keep freed memory in the process, as :func:`bigdl.common.memory.tune_allocator` does. In a
        Spark task, free memory beyond 128 MiB is returned at once because executors have a limit.
    threads : bool or int
        Number of threads for PyTorch, OpenMP and BLAS. True: one per usable physical core, within
        the CPU quota; it never raises a count, nor changes one set by ``OMP_NUM_THREADS``.
    flush_denormals : bool
        Treat denormal numbers (below 1.2e-38) as zeros in PyTorch; on some processors arithmetic
        with them is a hundred times slower. It applies to the calling thread and to threads that
        start later.
    pin : bool
        Keep the threads of the process off the second hyperthread of each core.

    Returns
    -------
    Tuning
        Applied and skipped settings. ``undo()`` or the end of a ``with`` block undoes them.

    Raises
    ------
    UsageError
        If `threads` is a number less than 1.

    Examples
    --------
    >>> from bigdl.nano.runtime import tune
    >>> with tune(threads=2) as tuning:  # or tune() alone, until the process ends
    ...     print(tuning)
    allocator: ...
    threads: 2 for PyTorch, OpenMP and BLAS
    """
    if not isinstance(threads, int) or (threads is not False and threads < 1):
        raise UsageError(
            f"threads must be True, False or a number of at least 1, but it is {threads!r}",
            code="argument-value",
            argument="threads",
        )
    requested = {
        "allocator": _allocator() if allocator else None,
        "threads": _threads(threads) if threads else None,
        "flush_denormals": _flush_denormals() if flush_denormals else None,
        "pin": _pin() if pin else None,
    }
    with ExitStack() as undoing:
        settings = [
            _entered(name, change, undoing)
            for name, change in requested.items()
            if change is not None
        ]
        tuning = Tuning(tuple(settings), undoing.pop_all())
    lasting_tunings.add(tuning)
    return tuning


@contextmanager
def tuned_fit(*, tuned: bool = True, cores: Sequence[int] | None = None) -> Iterator[list[str]]:
    """Context manager that applies :func:`tune` for the duration of a fit.

    Freed memory is kept for another minute for a following fit, except in a Spark task, whose
    executor has a memory limit.

    Parameters
    ----------
    tuned : bool
        False changes nothing except what `cores` requests.
    cores : sequence of int, optional
        Logical cores that this process may use, with one thread per physical core.

    Yields
    ------
    list of str
        Short description of each applied setting.
    """
    report: list[str] = []
    with ExitStack() as undoing:
        if cores is not None and can_pin_threads():
            undoing.enter_context(pinned_threads(lambda _: set(cores)))
            report.append(f"cores {sorted(cores)}")
        applied = {}
        if tuned or cores is not None:
            applied = undoing.enter_context(tune(allocator=tuned)).applied
        if "allocator" in applied:
            report.append("tuned allocator")
        try:
            yield report
        finally:
            if "allocator" in applied and not in_task_of_spark():
                _keep_memory(_SECONDS_KEPT)


# Keeps references: a garbage-collected context manager would be closed, which undoes its change.
lasting_tunings: set[Tuning] = set()


class _Skipped(Exception):
    """Raised when a setting cannot or need not be applied; the message is the reason."""


def _entered(name: str, change: AbstractContextManager[str], undoing: ExitStack) -> Setting:
    try:
        return Setting(name, True, undoing.enter_context(change))
    except _Skipped as reason:
        return Setting(name, False, str(reason))


@contextmanager
def _allocator() -> Iterator[str]:
    in_spark = in_task_of_spark()
    with tuned_allocator(_TRIM_THRESHOLD_IN_SPARK if in_spark else None) as tuned:
        if not tuned:
            raise _Skipped("it is not glibc's, or GLIBC_TUNABLES has tuned it")
        limit = f"up to {_TRIM_THRESHOLD_IN_SPARK >> 20} MiB of " if in_spark else ""
        yield f"keeps {limit}freed memory in this process"


@contextmanager
def _threads(requested: bool | int) -> Iterator[str]:
    count = best_thread_count() if requested is True else requested
    if requested is True:
        if "OMP_NUM_THREADS" in os.environ:
            raise _Skipped(f"OMP_NUM_THREADS is {os.environ['OMP_NUM_THREADS']}")
        torch = sys.modules.get("torch")
        if torch is not None and torch.get_num_threads() <= count:
            raise _Skipped(f"{torch.get_num_threads()} are no more than the physical cores")
    with thread_scope(count):
        yield f"{count} for PyTorch, OpenMP and BLAS"


@contextmanager
def _flush_denormals() -> Iterator[str]:
    torch = require("torch", "nano")
    if sys.float_info.min / 2 == 0.0:
        raise _Skipped("they are flushed already")
    if not torch.set_flush_denormal(True):
        raise _Skipped("the processor cannot")
    try:
        yield "taken as zeros in this thread and in those that it starts"
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _pin() -> Iterator[str]:
    first_siblings = {siblings[0] for siblings in topology().cores}
    if len(first_siblings) == len(usable_cores()):
        raise _Skipped("there are no hyperthreads")
    if not can_pin_threads():
        raise _Skipped("this system cannot pin threads")
    with pinned_threads(lambda allowed: allowed & first_siblings or allowed):
        yield f"to cores {sorted(first_siblings)}"


def in_task_of_spark() -> bool:
    if "pyspark" not in sys.modules:
        return False
    from pyspark import TaskContext

    return TaskContext.get() is not None


def best_thread_count() -> int:
    """Return the number of usable physical cores, limited by the CPU quota of the process.

    Hyperthreads share the vector units that limit numeric code, and threads beyond a CPU quota are
    throttled in every period while the others wait for them.

    Returns
    -------
    int
        At least 1.
    """
    return min(len(topology().cores), core_count())


class _KeptMemory(threading.Timer):
    """Timer that keeps memory freed by a fit for the next fit, and returns it to the system later.

    The memory freed by a fit returns to the kernel when the allocator's context ends
    (:func:`bigdl.common.memory.tuned_allocator`), and the next fit has a page fault on each of its
    pages: a third of a million for a ResNet50 on batches of 64. Fits often follow each other
    closely, e.g. in a search or a notebook. So a context stays open for a minute after a fit, and a
    thread closes it.
    """

    def __init__(self, seconds: float):
        context = ExitStack()
        context.enter_context(tuned_allocator())
        super().__init__(seconds, context.close)
        self.name, self.daemon = "bigdl-kept-memory", True
        self.start()

    def end(self) -> None:
        """Return the memory to the system now and stop the timer thread."""
        self.cancel()
        self.join()
        self.function()


_kept: list[_KeptMemory] = []  # at most one, except while it is replaced


def _keep_memory(seconds: float) -> None:
    """Keep freed memory in the process for `seconds`; stop an earlier timer.

    Call it before the allocator's context of the last fit ends. It has no effect if the allocator
    cannot be tuned.
    """
    earlier, _kept[:] = _kept[:], [_KeptMemory(seconds)]
    for kept in earlier:
        kept.end()


def release_memory() -> None:
    """Return memory kept after a fit to the system and stop the timer, e.g. before a fork."""
    while _kept:
        kept = _kept.pop()
        kept.end()
        # The kernel still lists a thread shortly after it has ended.
        give_up = time.monotonic() + 1
        while has_thread(kept.native_id or 0) and time.monotonic() < give_up:
            time.sleep(0.001)
