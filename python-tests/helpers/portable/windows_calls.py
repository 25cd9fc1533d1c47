"""Calls of Windows that BigDL makes, on Linux: locks, handles, job objects and named pipes.

Windows also refuses what Linux allows, and so does `other_platform` with the functions here: open
or mapped files keep their names, folders cannot be opened, and files that are opened without
``O_BINARY`` get a carriage return before each line feed.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import multiprocessing.connection
import os
import resource
import signal
import struct
import subprocess
import types

import psutil

O_BINARY, O_TEMPORARY = 1 << 28, 1 << 29  # bits that Linux does not use
NEW_GROUP = 0x200
PIPES = "\\\\.\\pipe\\"
_SIGKILL = signal.SIGKILL
_text_files: set[int] = set()
_open, _write, _close, _readlink = os.open, os.write, os.close, os.readlink
_listdir, _open_file, _unlink, _kill = os.listdir, open, os.unlink, os.kill
_killpg, _Connection = os.killpg, multiprocessing.connection.Connection


def _locking(file: int, mode: int, count: int) -> None:
    """Lock or unlock bytes from the position of a file, for this open file only."""
    kind = fcntl.F_UNLCK if mode == msvcrt.LK_UNLCK else fcntl.F_WRLCK
    start = os.lseek(file, 0, os.SEEK_CUR)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, 0, start, count, 0))


msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_UNLCK, msvcrt.LK_LOCK, msvcrt.LK_NBLCK = 0, 1, 2
msvcrt.locking = _locking


def _setmode(file: int, flags: int) -> int:
    before = 0 if file in _text_files else O_BINARY
    (_text_files.discard if flags & O_BINARY else _text_files.add)(file)
    return before


msvcrt.setmode = _setmode


class _Function:
    """A function of a library, with the type of its result."""

    restype = None

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*(getattr(each, "value", each) for each in args))


class _Kernel:
    """Job objects, whose processes are one process group, and features of the processor."""

    def __init__(self):
        self._jobs: dict[int, list[int]] = {}
        self._numbers = itertools.count(1)
        self.CreateJobObjectW = _Function(lambda security, name: next(self._numbers))
        self.SetInformationJobObject = _Function(lambda *args: 1)
        self.AssignProcessToJobObject = _Function(self._assign)
        self.TerminateJobObject = _Function(self._terminate)
        self.IsProcessorFeaturePresent = _Function(lambda number: number in (10, 39, 40))

    def _assign(self, job: int, process: int) -> int:
        self._jobs.setdefault(job, []).append(process)
        return 1

    def _terminate(self, job: int, status: int) -> int:
        for process in self._jobs.get(job, ()):
            with contextlib.suppress(ProcessLookupError):
                _killpg(process, _SIGKILL)
        return 1


class STARTUPINFO:
    """What a new process inherits."""

    def __init__(self, *, lpAttributeList=None):
        self.lpAttributeList = lpAttributeList or {}


def popen_arguments(kwargs: dict) -> None:
    """Replace the arguments of a process for Windows by those for Linux."""
    for name in ("preexec_fn", "pass_fds"):
        if kwargs.get(name):
            raise ValueError(f"{name} is not supported on Windows platforms")
    for name in ("process_group", "start_new_session"):  # they are ignored
        kwargs.pop(name, None)
    if kwargs.pop("creationflags", 0) & NEW_GROUP:
        kwargs["process_group"] = 0
    started = kwargs.pop("startupinfo", None)
    if started is not None:
        kwargs["pass_fds"] = started.lpAttributeList.get("handle_list", ())


def _address(address, family):
    """Return the address and the family of a socket for a named pipe."""
    if family != "AF_PIPE":
        return address, family
    if not address.startswith(PIPES) or "\\" in address[len(PIPES) :] or len(address) > 256:
        raise OSError(errno.EINVAL, "the name of the pipe is invalid", address)
    return "\0" + hashlib.sha1(address.encode()).hexdigest(), "AF_UNIX"


class PipeListener(multiprocessing.connection.Listener):
    """A listener that also knows named pipes, whose names end with their process."""

    def __init__(self, address=None, family=None, backlog=1, authkey=None):
        super().__init__(*_address(address, family), backlog, authkey)
        if family == "AF_PIPE":
            self._listener._unlink.cancel()
            self._listener._unlink = None


def pipe_client(address, family=None, authkey=None, connect=multiprocessing.connection.Client):
    """Connect to a :class:`PipeListener`."""
    return connect(*_address(address, family), authkey)


def open_descriptor(path, flags, mode=0o777, **kwargs) -> int:
    """Open a file, not a folder; keep whether it is one of text."""
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    file = _open(path, flags & ~(O_BINARY | O_TEMPORARY), mode, **kwargs)
    if flags & O_TEMPORARY:
        _unlink(path)
    (_text_files.discard if flags & O_BINARY else _text_files.add)(file)
    return file


def write_descriptor(file: int, content) -> int:
    """Write to a descriptor, with a carriage return before each line feed of text."""
    if file not in _text_files:
        return _write(file, content)
    content = bytes(content)
    text = content.replace(b"\n", b"\r\n")
    written = _write(file, text)
    return len(content) if written == len(text) else written


def close_descriptor(file: int) -> None:
    """Close a descriptor."""
    _text_files.discard(file)
    _close(file)


def as_binary(file) -> None:
    """Let a descriptor, or that of an open file, write bytes unchanged."""
    _text_files.discard(file if isinstance(file, int) else file.fileno())


def end_process(process: int, number: int) -> None:
    """End a process, whatever the number of the signal."""
    if number == 0:
        raise OSError(errno.EINVAL, "CTRL_C_EVENT would interrupt a process group")
    _kill(process, _SIGKILL if process != os.getpid() else number)


def check_not_in_use(path) -> None:
    """Raise Windows' error if this process has a file, or one below a folder, open or mapped."""
    full = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
    full = os.path.join(full, os.path.basename(os.fsdecode(path)))
    names = []
    for descriptor in _listdir("/proc/self/fd"):
        try:
            names.append(_readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    with _open_file("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        names += [line.split(None, 5)[5].rstrip("\n") for line in maps if "/" in line]
    if any(name == full or name.startswith(full + "/") for name in names):
        text = "The process cannot access the file because it is being used by another process"
        raise PermissionError(errno.EACCES, text, path)


def _memory_info(self, get=psutil.Process.memory_info) -> types.SimpleNamespace:
    """Return the memory of a process with the field that only Windows has."""
    info = get(self)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return types.SimpleNamespace(**info._asdict(), peak_wset=max(peak, info.rss))


def install() -> None:
    """Add what BigDL calls on Windows to Python's modules."""
    os.environ.setdefault("USERNAME", "user")
    os.O_BINARY, os.O_TEMPORARY = O_BINARY, O_TEMPORARY
    os.set_handle_inheritable = os.set_inheritable
    kernel = _Kernel()
    ctypes.windll = types.SimpleNamespace(kernel32=kernel)
    subprocess.STARTUPINFO = STARTUPINFO
    subprocess.CREATE_NEW_PROCESS_GROUP = NEW_GROUP
    subprocess.Popen._handle = property(lambda self: self.pid)
    psutil.Process.memory_info = _memory_info
    connections = multiprocessing.connection
    connections.PipeConnection = _Connection
    connections.Listener, connections.Client = PipeListener, pipe_client
