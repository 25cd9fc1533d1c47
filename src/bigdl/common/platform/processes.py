"""Processes that end with their parent, process groups, forks, limits and signals."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO

from bigdl.common.platform.memory import c_library
from bigdl.common.timeouts import PARENT_LOOK_S

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection

_PR_SET_PDEATHSIG = 1


# Parents ------------------------------------------------------------------------------------------


def has_parent_death_signal() -> bool:
    """Return True if the kernel can signal a process when its parent ends."""
    libc = c_library()
    return libc is not None and hasattr(libc, "prctl")


def signal_at_parent_end(parent: int | None = None, number: signal.Signals | None = None) -> bool:
    """Make the kernel signal this process when the thread that started it ends.

    Parameters
    ----------
    parent : int, optional
        Process id of the parent; if it has ended already, this process receives the signal.
        Default: the present parent.
    number : signal.Signals, optional
        Default: SIGKILL.

    Returns
    -------
    bool
        False if the kernel cannot.
    """
    libc = c_library()
    if sys.platform == "win32" or libc is None or not hasattr(libc, "prctl"):
        return False
    if number is None:
        number = signal.SIGKILL
    if parent is None:
        parent = os.getppid()
    libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before
        os.kill(os.getpid(), number)
    return True


def start_bound(command: Sequence[str], number: signal.Signals) -> subprocess.Popen[str]:
    """Start a process that receives a signal when the calling thread ends, where the kernel can.

    It exits if that thread has already ended. Its standard output is a pipe of text.
    """
    libc = c_library()
    if libc is None or not hasattr(libc, "prctl"):
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    parent = os.getpid()

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent)


_background: list[subprocess.Popen[bytes]] = []


def start_in_background(command: Sequence[str]) -> None:
    """Start a process with the lowest priority, without output, that may outlive this one."""
    silent = subprocess.DEVNULL
    if sys.platform == "win32":
        flags = subprocess.IDLE_PRIORITY_CLASS | subprocess.DETACHED_PROCESS
        process = subprocess.Popen(
            command, stdin=silent, stdout=silent, stderr=silent, creationflags=flags
        )
    else:
        nice = ["nice", "-n", "19", *command]
        process = subprocess.Popen(
            nice, stdin=silent, stdout=silent, stderr=silent, start_new_session=True
        )
    _background.append(process)  # Python warns of a forgotten process


def wait_for_parent(parent: int) -> None:
    """Wait until the parent process has ended.

    Parameters
    ----------
    parent : int
        Its process id.
    """
    if sys.platform == "win32":  # the number of the parent never changes there
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(parent).wait()
        return
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)


def kill_own_group() -> None:
    """Kill this process, and the processes of its group."""
    if sys.platform == "win32":
        os._exit(1)
    os.killpg(0, signal.SIGKILL)


def kill_self() -> None:
    """Kill this process like the kernel does when memory runs out."""
    if sys.platform == "win32":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL)


def parent_id() -> int:
    """Return the id of this process's parent, which tasks of a Spark executor have in common."""
    return os.getppid()


# Workers ------------------------------------------------------------------------------------------


def start_worker(
    command: Sequence[str],
    end: Connection,
    env: Mapping[str, str],
    stream: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a new process group, which inherits one end of a pipe.

    Ctrl-C of the terminal goes to this process only.

    Parameters
    ----------
    command : sequence of str
        The number for :func:`inherited_end` is added to it.
    end : Connection
        The end of a pipe of :mod:`multiprocessing`; the caller closes it.
    env : mapping of str to str
        The environment.
    stream : int, optional
        Standard output and errors, as in :class:`subprocess.Popen`.
    """
    number = end.fileno()
    if sys.platform == "win32":
        os.set_handle_inheritable(number, True)
        return subprocess.Popen(
            [*command, str(number)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            bufsize=0,
            env=env,
            startupinfo=subprocess.STARTUPINFO(lpAttributeList={"handle_list": [number]}),
            creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
        )
    return subprocess.Popen(
        [*command, str(number)],
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=stream,
        bufsize=0,
        pass_fds=[number],
        env=env,
        process_group=0,
    )


def inherited_end(number: int) -> Connection:
    """Return the end of a pipe that this process has inherited from :func:`start_worker`."""
    if sys.platform == "win32":
        os.set_handle_inheritable(number, False)
        return PipeConnection(number)  # type: ignore[return-value]  # it has the same methods
    os.set_inheritable(number, False)
    return Connection(number)


class ProcessGroup:
    """The processes that a worker has started, and the worker itself.

    Parameters
    ----------
    process : subprocess.Popen or ForkedProcess
        From :func:`start_worker`, or forked by another process.

    Notes
    -----
    On Windows the group is a job object, whose processes end with this process, too.
    """

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess):
        self._process = process
        self._job: int | None = None
        if sys.platform == "win32" and isinstance(process, subprocess.Popen):
            self._job = _new_job(process)

    def kill(self) -> None:
        """Kill the processes of the group that run."""
        if sys.platform == "win32":
            import ctypes

            if self._job is not None:
                ctypes.windll.kernel32.TerminateJobObject(self._job, 1)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _new_job(process: subprocess.Popen[bytes]) -> int | None:
    """Assign a process to a new job object whose processes end with its last handle."""
    if sys.platform != "win32":
        return None
    import ctypes
    from ctypes import wintypes

    class BasicLimits(ctypes.Structure):
        _fields_ = (
            ("per_process_time", wintypes.LARGE_INTEGER),
            ("per_job_time", wintypes.LARGE_INTEGER),
            ("flags", wintypes.DWORD),
            ("least_working_set", ctypes.c_size_t),
            ("most_working_set", ctypes.c_size_t),
            ("active_processes", wintypes.DWORD),
            ("affinity", ctypes.c_size_t),
            ("priority", wintypes.DWORD),
            ("scheduling", wintypes.DWORD),
        )

    class ExtendedLimits(ctypes.Structure):
        _fields_ = (
            ("basic", BasicLimits),
            ("io", ctypes.c_ulonglong * 6),
            ("process_memory", ctypes.c_size_t),
            ("job_memory", ctypes.c_size_t),
            ("peak_process_memory", ctypes.c_size_t),
            ("peak_job_memory", ctypes.c_size_t),
        )

    kernel = ctypes.windll.kernel32
    kernel.CreateJobObjectW.restype = wintypes.HANDLE
    job = kernel.CreateJobObjectW(None, None)
    limits = ExtendedLimits()
    limits.basic.flags = 0x2000  # JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    about = 9  # JobObjectExtendedLimitInformation
    job = wintypes.HANDLE(job)
    kernel.SetInformationJobObject(job, about, ctypes.byref(limits), ctypes.sizeof(limits))
    kernel.AssignProcessToJobObject(job, wintypes.HANDLE(int(process._handle)))  # type: ignore[attr-defined]
    return job  # type: ignore[return-value]


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped, e.g. by SIGSTOP, and cannot respond."""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


# Forks --------------------------------------------------------------------------------------------


def can_fork() -> bool:
    """Return True if a process can be forked after it has loaded native libraries."""
    return sys.platform == "linux" and hasattr(os, "fork")


def can_adopt_forks() -> bool:
    """Return True if this process can control processes that another process forks."""
    return can_fork() and hasattr(os, "pidfd_open")


class ForkedProcess:
    """A process that another process has forked, with the methods of :class:`subprocess.Popen`.

    Parameters
    ----------
    pid : int
        Its process id. It may have ended already.

    Attributes
    ----------
    returncode : int or None
        None while it runs. Its parent has the exit code, so the code of an ended process is 1.
    """

    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._handle = -1
        try:
            if sys.platform == "linux":
                self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self.returncode = 1

    def poll(self) -> int | None:
        """Return None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended.

        Raises
        ------
        subprocess.TimeoutExpired
            If it runs longer than `timeout` seconds.
        """
        if self.returncode is None:
            if not multiprocessing.connection.wait([self._handle], timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = 1
            os.close(self._handle)
        return self.returncode

    def kill(self) -> None:
        """Kill the process."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the process to end."""
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is None and sys.platform == "linux":
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)


def forget_children() -> None:
    """Let the kernel forget the ended children of this process, which then waits for none."""
    if sys.platform != "win32":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def fork_bound() -> int:
    """Fork this process; return 0 in the child, which ends with the calling thread.

    The child is in a new process group. Only if :func:`can_fork`.
    """
    if sys.platform == "win32":
        raise OSError("Windows cannot fork processes")
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        leave_group()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal_at_parent_end(parent)
    return pid


def leave_group() -> None:
    """Move this process to a new process group, which interrupts of the terminal do not reach."""
    if sys.platform != "win32":
        os.setpgid(0, 0)


def kill_group_of(pid: int) -> None:
    """Kill the process group of a process that has called :func:`leave_group`."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError):  # it does not exist yet
            os.killpg(pid, signal.SIGKILL)


def fork(target: Callable[..., object], args: tuple[object, ...]) -> BaseProcess:
    """Start a forked process that calls a function; only if :func:`can_fork`."""
    if sys.platform == "win32":
        raise OSError("Windows cannot fork processes")
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def fork_program(program: Callable[[], object]) -> int:
    """Fork a process that runs a program and exits with its status; only if :func:`can_fork`.

    Returns
    -------
    int
        The process id, for :func:`exit_status`.
    """
    if sys.platform == "win32":
        raise OSError("Windows cannot fork processes")
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        program()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def exit_status(pid: int) -> int | None:
    """Return the exit status of a process of :func:`fork_program`, or None while it runs.

    It is negative if a signal has ended the process, and can be read once.
    """
    if sys.platform == "win32":
        raise OSError("Windows cannot fork processes")
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def loader_context(preload: Sequence[str]) -> multiprocessing.context.BaseContext:
    """Return the :mod:`multiprocessing` context for processes that load samples.

    Parameters
    ----------
    preload : sequence of str
        Modules for the server that forks the processes. Without forks each process imports them.
    """
    if not hasattr(os, "fork"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    after_in_parent: Callable[[], object] | None = None,
    after_in_child: Callable[[], object] | None = None,
) -> None:
    """Register functions that run around each fork, where processes can be forked."""
    if sys.platform == "win32" or not hasattr(os, "register_at_fork"):
        return
    nothing: Callable[[], object] = lambda: None  # noqa: E731
    os.register_at_fork(
        before=before or nothing,
        after_in_parent=after_in_parent or nothing,
        after_in_child=after_in_child or nothing,
    )


# Limits -------------------------------------------------------------------------------------------


def open_file_limits() -> tuple[int | None, int | None]:
    """Return how many files this process may open, and the largest limit that it may set.

    None stands for no limit.
    """
    if sys.platform == "win32":
        return None, None
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if each == resource.RLIM_INFINITY else each for each in limits)
    return soft, hard


def set_open_file_limit(limit: int) -> None:
    """Set the number of files that this process may open.

    Raises
    ------
    OSError or ValueError
        If the system refuses the limit.
    """
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_file_count() -> int | None:
    """Return the number of files that this process has open; None if it cannot be counted."""
    with contextlib.suppress(OSError):  # no system files, or no free descriptor for the folder
        return len(os.listdir("/proc/self/fd"))
    if sys.platform == "win32":
        return None
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        return int(psutil.Process().num_fds())
    return None


def describe_start_limit(error: OSError) -> tuple[str, str] | None:
    """Return which limit of this process prevents a process start, and the command to raise it.

    Parameters
    ----------
    error : OSError
        The error of the start.

    Returns
    -------
    (str, str) or None
        A phrase that follows "this program", and a command; empty texts if the limit is one of the
        machine; None if the error has another cause.
    """
    if error.errno not in (errno.EMFILE, errno.EAGAIN, errno.ENOMEM):
        return None
    if sys.platform == "win32":
        return "", ""
    import resource

    number, text, command = {
        errno.EMFILE: (resource.RLIMIT_NOFILE, "may not open more than {} files", "ulimit -n"),
        errno.EAGAIN: (resource.RLIMIT_NPROC, "may not have more than {} processes", "ulimit -u"),
        errno.ENOMEM: (resource.RLIMIT_AS, "may not take more than {} bytes", "ulimit -v"),
    }[error.errno]
    limit = resource.getrlimit(number)[0]
    return ("", "") if limit == resource.RLIM_INFINITY else (text.format(limit), command)


# Signals ------------------------------------------------------------------------------------------


def tune_signals() -> list[signal.Signals]:
    """Return the signals whose handlers Ray Tune replaces."""
    names = ("SIGINT", "SIGUSR1")
    return [signal.Signals[name] for name in names if name in signal.Signals.__members__]


def exit_at_alarm(seconds: float) -> None:
    """Let the kernel end this process after a time, even if a thread never releases the GIL.

    It has an effect in the main thread of systems with alarm signals.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # handled by the kernel
    signal.setitimer(signal.ITIMER_REAL, seconds)
