"""Python as it is on macOS or Windows, seen from BigDL's code and its tests, on a Linux machine.

`install` removes what the other system lacks from ``os``, ``socket``, ``signal``, ``mmap``,
``resource``, ``ctypes``, ``multiprocessing`` and the file system: BigDL gets the errors that it
would get there. The folder of this file is put on ``PYTHONPATH``, so that each Python process that
is started later begins in the same way (`sitecustomize`).

Names are missing where BigDL's code reads them itself, and files where the innermost frame outside
the standard library is BigDL's. The standard library and installed packages keep Linux, since their
compiled parts are those for Linux. So this shows which calls BigDL makes, not how packages and
kernels behave on the other system. It is
stricter than macOS in one respect, for Windows: there is no fork, no ``SO_REUSEPORT`` and no
passing of file descriptors.  The calls that only Windows has are in `windows_calls`.
"""

import builtins
import ctypes
import errno
import importlib
import io
import multiprocessing.connection
import multiprocessing.context
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

HERE = str(Path(__file__).parent)
TESTS = str(Path(__file__).parents[2]) + os.sep
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
PACKAGES = ("/site-packages/", "/dist-packages/")
GENERATED = ("<eval_with_key>", "<frozen ", "/tmp/torchinductor")

LINUX_FOLDERS = ("/proc", "/dev/shm", "/sys")
LINUX_PROGRAMS = ("taskset", "numactl", "ldconfig", "nproc", "lscpu", "free", "prlimit", "unshare")
LINUX_FUNCTIONS = (  # of the C library
    *("prctl", "malloc_trim", "mallopt", "memfd_create", "sched_setaffinity", "sched_getaffinity"),
    *("gettid", "eventfd", "inotify_init", "epoll_create1", "mremap", "sched_getcpu"),
    *("gnu_get_libc_version", "malloc_usable_size", "sigtimedwait"),
)
_NOT_ON_MACOS = {
    "os": "CLONE_* EFD_* MFD_* O_TMPFILE O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC "
    "PIDFD_NONBLOCK POSIX_FADV_* RTLD_DEEPBIND RWF_* SCHED_BATCH SCHED_IDLE SPLICE_* "
    "XATTR_* copy_file_range eventfd eventfd_read eventfd_write fdatasync fork forkpty getrandom "
    "getresgid getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise "
    "posix_fallocate removexattr sched_getaffinity sched_getparam sched_getscheduler "
    "sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler setns setresgid "
    "setresuid setxattr splice unshare",
    "socket": "AF_NETLINK AF_PACKET AF_VSOCK CMSG_* SCM_RIGHTS SOCK_CLOEXEC SOCK_NONBLOCK "
    "SO_BINDTODEVICE SO_PEERCRED SO_REUSEPORT TCP_CORK TCP_DEFER_ACCEPT TCP_KEEPIDLE TCP_QUICKACK "
    "TCP_USER_TIMEOUT recv_fds send_fds",
    "signal": "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait "
    "sigwaitinfo",
    "mmap": "MADV_DODUMP MADV_DOFORK MADV_DONTDUMP MADV_DONTFORK MADV_HUGEPAGE MADV_HWPOISON "
    "MADV_MERGEABLE MADV_NOHUGEPAGE MADV_POPULATE_* MADV_REMOVE MADV_UNMERGEABLE MAP_DENYWRITE "
    "MAP_EXECUTABLE MAP_POPULATE",
    "resource": "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING "
    "RUSAGE_THREAD prlimit",
    "select": "EPOLL* epoll",
    "multiprocessing.reduction": "DupFd recvfds sendfds",
}
_NOT_ON_WINDOWS = {
    "os": "F_LOCK O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC SCHED_* WCOREDUMP WEXITSTATUS "
    "WIF* WNOHANG WSTOPSIG WTERMSIG WUNTRACED chown chroot confstr ctermid fchmod fchown "
    "fpathconf fstatvfs getegid geteuid getgid getgrouplist getgroups getloadavg getpgid getpgrp "
    "getpriority getsid getuid initgroups killpg lchown lockf major makedev minor mkfifo mknod "
    "nice openpty pathconf posix_spawn posix_spawnp pread preadv pwrite pwritev readv "
    "register_at_fork sched_get_priority_max sched_yield sendfile setegid seteuid setgid "
    "setgroups setpgid setpriority setsid setuid statvfs sync sysconf tcgetpgrp tcsetpgrp "
    "ttyname uname wait wait3 wait4 waitid writev",
    "socket": "AF_UNIX MSG_DONTWAIT MSG_NOSIGNAL sethostname",
    "signal": "ITIMER_* SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF "
    "SIGQUIT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM "
    "SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause pthread_kill "
    "pthread_sigmask setitimer siginterrupt sigpending sigwait",
    "mmap": "MADV_* MAP_* PROT_*",
    "select": "poll",
}
_NO_MODULES_ON_WINDOWS = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
_UNIX_PATH_BYTES = 103
_HIDDEN = re.compile(
    r"module '\w+' has no attribute '\w+'|No such file or directory: (?:PosixPath\()?'/"
    r"(proc|sys|dev)"
    r"|is being used by another process"  # the test removes files that Windows protects
    rf"|No module named '({'|'.join(_NO_MODULES_ON_WINDOWS)})'"
)
_origins: dict[str, str] = {}
_current = ""


def current() -> str:
    """Return the platform that this process imitates, or an empty string."""
    return _current


def environment(platform: str) -> dict[str, str]:
    """Return the environment variables with which Python processes imitate a platform."""
    paths = [HERE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "BIGDL_TEST_PLATFORM": platform,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def install(platform: str) -> None:
    """Imitate ``"darwin"`` or ``"win32"`` in this process and the Python processes it starts."""
    global _current
    if _current == platform:
        return
    if _current or platform not in ("darwin", "win32") or sys.platform != "linux":
        raise ValueError(f"cannot imitate {platform!r} on {_current or sys.platform}")
    windows = platform == "win32"
    if windows:
        importlib.import_module("windows_calls")  # it keeps the functions that are changed below
    os.environ.update(environment(platform))
    for module_name, on_macos in _NOT_ON_MACOS.items():
        module = importlib.import_module(module_name)
        patterns = on_macos.split()
        patterns += _NOT_ON_WINDOWS.get(module_name, "").split() if windows else []
        _hide(module, [name for name in dir(module) if _matches(name, patterns)])
    _show(sys, "platform", platform)
    _show(os, "name", "nt" if windows else "posix")
    _hide_folders(windows)
    _change_functions(windows)
    _change_classes(windows)
    _take_fork(windows)
    if windows:
        import windows_calls

        windows_calls.install()
        _hide_modules()
    _current = platform


def skip_test_of_linux(error: BaseException) -> None:
    """Skip the present test if its error is that the test itself calls what only Linux has.

    The call can be in a worker, whose traceback is in the message of the error.
    """
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    missing = next((line for line in text.splitlines() if _HIDDEN.search(line)), "")
    files = re.findall(r'^\s*File "(.+)", line \d+', text, re.MULTILINE)
    files = files or [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if _origin(file) != "python"]
    if missing and files and files[-1].startswith((TESTS, "<string>")):  # python -c
        import pytest

        pytest.skip(f"the test itself needs Linux: {missing.strip()}")


def _matches(name: str, patterns: list[str]) -> bool:
    return any(
        name == pattern or (pattern[-1] == "*" and name.startswith(pattern[:-1]))
        for pattern in patterns
    )


def _origin(filename: str) -> str:
    """Return where code of this file comes from: ``"python"``, ``"package"`` or ``"bigdl"``."""
    origin = _origins.get(filename)
    if origin is None:
        if filename == __file__ or filename.startswith("<frozen "):
            origin = "python"
        elif any(part in filename for part in PACKAGES) and "-packages/bigdl/" not in filename:
            origin = "package"
        elif filename.startswith(STANDARD_LIBRARY):
            origin = "python"
        else:
            origin = "package" if filename.startswith(GENERATED) else "bigdl"
        _origins[filename] = origin
    return origin


def _is_ours() -> bool:
    """Return True if BigDL's code is responsible for the present call."""
    frame = sys._getframe(1)
    while frame is not None:
        origin = _origin(frame.f_code.co_filename)
        if origin != "python":
            return origin == "bigdl"
        frame = frame.f_back
    return False


def _subclass(module: types.ModuleType) -> type:
    """Return the class of this module alone, to which properties can be added."""
    if type(module) is types.ModuleType:
        by_name = {"__reduce__": lambda self: (importlib.import_module, (self.__name__,))}
        module.__class__ = type("module", (types.ModuleType,), by_name)
    return type(module)


def _hide(module: types.ModuleType, names: list[str]) -> None:
    """Remove names from a module, for BigDL's code; what a test sets instead is there."""
    kind = _subclass(module)

    def hidden(name: str) -> property:
        replaced = False

        def get(self: types.ModuleType) -> object:
            filename = sys._getframe(1).f_code.co_filename
            if replaced or _origin(filename) != "bigdl":
                return self.__dict__[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        def put(self: types.ModuleType, value: object) -> None:
            nonlocal replaced
            replaced = value is not original
            self.__dict__[name] = value

        def remove(self: types.ModuleType) -> None:
            """Do nothing: a test removes what is not there."""

        original = module.__dict__[name]
        return property(get, put, remove)

    for name in names:
        setattr(kind, name, hidden(name))


def _show(module: types.ModuleType, name: str, value: str) -> None:
    """Let an attribute of a module have another value where BigDL's code reads it itself."""
    here = module.__dict__[name]

    def get(self: types.ModuleType) -> object:
        present = self.__dict__[name]
        is_ours = _origin(sys._getframe(1).f_code.co_filename) == "bigdl"
        return value if is_ours and present is here else present

    def put(self: types.ModuleType, present: object) -> None:
        self.__dict__[name] = present

    setattr(_subclass(module), name, property(get, put))


class _Changed:
    """A function of the standard library with another behavior for BigDL's code.

    It is no function, so that classes that hold it do not bind it as a method.
    """

    def __init__(self, original: Callable, change: Callable):
        self._original, self._change = original, change
        self.__name__ = self.__qualname__ = original.__name__
        self.__module__ = original.__module__ if original.__module__ != "posix" else "os"
        self.__doc__ = original.__doc__

    def __call__(self, *args, **kwargs):
        return self._change(self._original, *args, **kwargs)

    def __reduce__(self):
        return self.__name__


def _change(module: types.ModuleType, name: str, change: Callable) -> None:
    original = module.__dict__[name]
    changed = _Changed(original, change)
    module.__dict__[name] = changed
    for group in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks"):
        if module is os and original in getattr(os, group):
            getattr(os, group).add(changed)


def _hide_folders(windows: bool) -> None:
    folders = (*LINUX_FOLDERS, "/dev") if windows else LINUX_FOLDERS

    def is_hidden(path: object) -> bool:
        if isinstance(path, int) or path is None:
            return False
        text = os.fsdecode(path)
        return text.startswith(folders) and any(
            text == folder or text.startswith(folder + "/") for folder in folders
        )

    def check(original, path=".", *args, **kwargs):
        if is_hidden(path) and _is_ours():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return original(path, *args, **kwargs)

    def access(original, path, *args, **kwargs):
        hidden = is_hidden(path) and _is_ours()
        return False if hidden else original(path, *args, **kwargs)

    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "mkdir", "statvfs"):
        _change(os, name, check)
    _change(os, "access", access)
    _change(io, "open", check)
    if windows:
        _change_files_of_windows()
    builtins.open = io.open


def _change_files_of_windows() -> None:
    import windows_calls

    def descriptor(original, path, flags, *args, **kwargs):
        if _is_ours():
            original = windows_calls.open_descriptor
        else:
            flags &= ~(windows_calls.O_BINARY | windows_calls.O_TEMPORARY)
        return original(path, flags, *args, **kwargs)

    def write(original, *args):
        return windows_calls.write_descriptor(*args)

    def close(original, file):
        windows_calls.close_descriptor(file)

    def open_file(original, file, mode="r", buffering=-1, encoding=None, *args, **kwargs):
        if not _is_ours():
            return original(file, mode, buffering, encoding, *args, **kwargs)
        if "b" not in mode and encoding in (None, "locale"):
            encoding = "cp1252"
        opened = original(file, mode, buffering, encoding, *args, **kwargs)
        windows_calls.as_binary(opened)
        return opened

    def remove(original, path, *args, **kwargs):
        caller = sys._getframe(2).f_code.co_filename
        if os.path.basename(caller) != "tempfile.py" and _is_ours():  # it does this on Linux only
            windows_calls.check_not_in_use(path)
        return original(path, *args, **kwargs)

    def rename(original, source, target, *args, **kwargs):
        if _is_ours():
            for path in (source, target):
                windows_calls.check_not_in_use(path)
            if original.__name__ == "rename" and os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)
        return original(source, target, *args, **kwargs)

    def kill(original, process, number):
        if _is_ours():
            original = windows_calls.end_process
        original(process, number)

    _change(os, "open", descriptor)
    _change(os, "write", write)
    _change(os, "close", close)
    _change(io, "open", open_file)
    for name in ("unlink", "remove"):
        _change(os, name, remove)
    for name in ("rename", "replace"):
        _change(os, name, rename)
    _change(os, "kill", kill)
    shutil._use_fd_functions = False


def _change_functions(windows: bool) -> None:
    def sendfile(original, out_fd, *args, **kwargs):
        if _is_ours() and not stat.S_ISSOCK(os.fstat(out_fd).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        return original(out_fd, *args, **kwargs)

    def sysconf(original, name):
        if name == "SC_AVPHYS_PAGES" and _is_ours():
            raise ValueError("unrecognized configuration name")
        return original(name)

    def uname(original):
        actual = original()
        if _origin(sys._getframe(2).f_code.co_filename) != "bigdl":  # platform.system() is cached
            return actual
        release = ("24.6.0", "Darwin Kernel Version 24.6.0", actual.machine)
        return os.uname_result(("Darwin", actual.nodename, *release))

    def getrusage(original, *args):
        usage = original(*args)
        if not _is_ours():
            return usage
        fields = list(usage)
        fields[2] *= 1024  # the peak in bytes, not KiB
        return type(usage)(fields)

    def which(original, cmd, *args, **kwargs):
        if os.path.basename(os.fsdecode(cmd)) in LINUX_PROGRAMS and _is_ours():
            return None
        return original(cmd, *args, **kwargs)

    _change(os, "sendfile", sendfile)
    _change(os, "sysconf", sysconf)
    _change(os, "uname", uname)
    _change(importlib.import_module("resource"), "getrusage", getrusage)
    _change(shutil, "which", which)


def _change_classes(windows: bool) -> None:
    library, function = ctypes.CDLL.__init__, ctypes.CDLL.__getattr__

    def open_library(self, name, *args, **kwargs):
        if _is_ours():
            if name is None and windows:
                raise TypeError("argument of type 'NoneType' is not iterable")
            if isinstance(name, str) and name.startswith(("libc.so", "libc.musl", "libnuma")):
                raise OSError(f"dlopen({name}, 0x0006): tried: {name!r} (no such file)")
        library(self, name, *args, **kwargs)

    def find_function(self, name):
        if name in LINUX_FUNCTIONS and _is_ours():
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return function(self, name)

    def bind(self, address):
        if self.family == _AF_UNIX and _is_ours():
            path = os.fsencode(address)
            if (path.startswith(b"\0") and not windows) or len(path) > _UNIX_PATH_BYTES:
                raise OSError("AF_UNIX path too long")
        return super(socket.socket, self).bind(address)

    start = subprocess.Popen.__init__

    def open_process(self, args, *others, **kwargs):
        if _is_ours():
            program = args if isinstance(args, str | bytes | os.PathLike) else args[0]
            if os.path.basename(os.fsdecode(program).partition(" ")[0]) in LINUX_PROGRAMS:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
            if windows:
                import windows_calls

                windows_calls.popen_arguments(kwargs)
        start(self, args, *others, **kwargs)

    ctypes.CDLL.__init__, ctypes.CDLL.__getattr__ = open_library, find_function
    subprocess.Popen.__init__ = open_process
    socket.socket.bind = bind


_AF_UNIX = getattr(socket, "AF_UNIX", None)


class _Contexts(dict):
    """The start methods of `multiprocessing`: BigDL's code may only use ``"spawn"``."""

    def __getitem__(self, method):
        if method != "spawn" and _is_ours():
            raise KeyError(method)
        return super().__getitem__(method)


def _take_fork(windows: bool) -> None:
    context = multiprocessing.context
    context._concrete_contexts = _Contexts(context._concrete_contexts)
    context._default_context._default_context = dict.__getitem__(
        context._concrete_contexts, "spawn"
    )
    multiprocessing.get_all_start_methods = lambda: ["spawn"]


def _hide_modules() -> None:
    imported, import_module = builtins.__import__, importlib.import_module

    def refuse(name: str) -> None:
        if name in _NO_MODULES_ON_WINDOWS and _is_ours():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def import_name(name, *args, **kwargs):
        refuse(name)
        if name == "msvcrt" and _is_ours():
            import windows_calls

            return windows_calls.msvcrt
        return imported(name, *args, **kwargs)

    def import_by_name(name, package=None):
        refuse(name)
        return import_module(name, package)

    builtins.__import__, importlib.import_module = import_name, import_by_name
