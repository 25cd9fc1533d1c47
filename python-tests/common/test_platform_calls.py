"""Only `bigdl.common.platform` names an operating system or uses calls that some of them lack."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigdl.common.checks import check_supported
from bigdl.common.errors import UsageError
from bigdl.common.platform import LOSSES, loss, system_name

SOURCES = Path(__file__).parents[2] / "src" / "bigdl"
ROOM = SOURCES / "common" / "platform"

# Of modules of the standard library: what macOS or Windows lacks, and what names a system.
NAMES = {
    "sys": "platform getwindowsversion",
    "os": "name uname memfd_create MFD_* sched_* fork forkpty register_at_fork killpg getp?gid* "
    "setpgid setsid getsid get*uid set*uid get*gid set*gid getppid getloadavg posix_* sendfile "
    "copy_file_range pread* pwrite* preadv pwritev O_DIRECTORY O_NOFOLLOW O_CLOEXEC O_TMPFILE "
    "O_DIRECT fchmod fchown chown lchown sysconf statvfs wait waitpid WNOHANG WIF* mkfifo "
    "eventfd pidfd_open splice link symlink sync fdatasync",
    "signal": "SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGHUP SIGCHLD SIGPIPE SIGSTOP SIGCONT setitimer "
    "alarm pause pthread_* sigwait* ITIMER_*",
    "socket": "AF_UNIX AF_PACKET SCM_RIGHTS SO_REUSEPORT send_fds recv_fds TCP_USER_TIMEOUT "
    "TCP_KEEP* if_nameindex",
    "mmap": "MAP_* PROT_* MADV_*",
    "platform": "system machine processor uname node mac_ver win32_ver libc_ver release version",
    "ctypes": "CDLL PyDLL windll WinDLL",
    "select": "epoll kqueue EPOLL*",
    "multiprocessing": "get_context",
}
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "msvcrt", "winreg", "_winapi"}
PATHS = re.compile(r"/(?:proc|sys|dev/shm|dev/fd)(?:/|$)")
ARGUMENTS = {"preexec_fn", "pass_fds", "process_group", "creationflags", "startupinfo"}

# Files that run on Linux only, or whose use of a name is the same on all systems.
ALLOWED = {
    "orca/cluster/supervisor.py": "a script without this package; it asks for each Linux call",
    "orca/learn/mxnet/program.py": "a script of an environment without this package, on Linux",
}


def pattern(names: str) -> re.Pattern[str]:
    return re.compile(
        "|".join(each.replace("*", r"\w*").replace("?", r"\w?") for each in names.split())
    )


PATTERNS = {module: pattern(names) for module, names in NAMES.items()}


def is_of_one_system(module: str, name: str) -> bool:
    return module in PATTERNS and PATTERNS[module].fullmatch(name) is not None


def calls_of_systems(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of what a file uses of an operating system."""
    tree = ast.parse(source)
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if is_of_one_system(node.value.id, node.attr):
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] in MODULES:
                    yield node.lineno, f"import {each.name}"
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                if node.module in MODULES or is_of_one_system(node.module or "", each.name):
                    yield node.lineno, f"{node.module}.{each.name}"
        elif isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
            yield node.value.lineno, f"{node.arg}="
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in documents and PATHS.match(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr"):
            of, *rest = node.args
            name = rest[0].value if rest and isinstance(rest[0], ast.Constant) else ""
            if isinstance(of, ast.Name) and is_of_one_system(of.id, str(name)):
                yield node.lineno, f"{of.id}.{name}"


def test_no_other_file_names_a_system_or_calls_one():
    elsewhere = [
        f"{path.relative_to(SOURCES)}:{line}: {name}"
        for path in sorted(SOURCES.rglob("*.py"))
        if ROOM not in path.parents and str(path.relative_to(SOURCES)) not in ALLOWED
        for line, name in calls_of_systems(path.read_text(encoding="utf-8"))
    ]
    assert elsewhere == []


def test_allowed_files_exist_and_use_such_calls():
    for name in ALLOWED:
        assert list(calls_of_systems((SOURCES / name).read_text(encoding="utf-8"))), name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import os\nos.memfd_create('x')", "os.memfd_create"),
        ("from os import killpg", "os.killpg"),
        ("import fcntl", "import fcntl"),
        ("open('/proc/self/status')", "/proc/self/status"),
        ("import sys\nif sys.platform == 'linux': pass", "sys.platform"),
        ("hasattr(os, 'fork')", "os.fork"),
        ("Popen(['x'], preexec_fn=f)", "preexec_fn="),
    ],
)
def test_calls_are_noticed(source, name):
    assert [each for _, each in calls_of_systems(source)] == [name]


def test_each_loss_is_a_sentence_about_a_known_system():
    for feature, losses in LOSSES.items():
        assert losses, feature
        assert set(losses) <= {"macOS", "Windows", "Linux on ARM"}
        assert all(text.endswith(".") for text in losses.values())


def test_an_unsupported_feature_is_refused_with_its_loss():
    feature = "several processes of a server"
    check_supported(feature, True)
    with pytest.raises(UsageError, match="needs Linux") as refused:
        check_supported(feature, False)
    assert loss(feature).rstrip(".") in str(refused.value)
    assert system_name() in str(refused.value)
