"""Temporary and permanent folders that only this user can enter.

Temporary folders are below one private root, ``bigdl-<uid>`` in the system's directory for
temporary files. Each process has a folder there (:func:`process_folder`), which contains its
short-lived folders (:func:`scratch_folder`). The process holds a lock (``flock``) on its folder
(:class:`LockedFolder`). Process ids mean nothing in another container that shares the directory;
the lock is visible there and ends with the process. Unlocked folders are removed when a program
creates its first folder. A parent can set ``BIGDL_SCRATCH_DIR`` for a process that may be killed,
and remove that directory itself. For all other processes a small shell waits for their end and
removes the remaining folders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from bigdl.common.errors import UsageError
from bigdl.common.platform.files import (
    close_folder,
    is_closed_to_others,
    is_of_root,
    is_open_folder,
    is_own,
    is_replaceable,
    lock,
    make_private,
    open_folder,
    shell,
    user_id,
)
from bigdl.common.platform.network import short_folder

logger = logging.getLogger("bigdl")

VARIABLE = "BIGDL_SCRATCH_DIR"
"""Environment variable that names a scratch directory created by the parent process."""

_SCRATCH = re.compile(r"[\w-]+\.[a-z0-9_]{8}")  # the name of a temporary folder; no other has a dot
_ATTEMPTS = 100
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_lock = threading.RLock()
_roots: dict[tuple[int, str], str] = {}  # by process and directory
cleaned_roots: set[tuple[int, str]] = set()
process_folders: dict[tuple[int, bool], LockedFolder] = {}  # by process; True: with a short path


def private_root(base: str | None = None) -> str:
    """Return the folder with mode 0700 that contains this user's temporary folders.

    Parameters
    ----------
    base : str, optional
        Parent directory; default: the directory that ``BIGDL_SCRATCH_DIR`` names, which is the root
        itself if it is private, or the system's directory for temporary files.

    Notes
    -----
    The name is predictable, so another user may already have created such a folder. The root then
    gets a random name, and a warning says so.
    """
    parent = os.path.abspath(base or os.environ.get(VARIABLE) or tempfile.gettempdir())
    if base is None and os.environ.get(VARIABLE) and _is_private(parent):
        return parent
    with _lock:
        root = _roots.get((os.getpid(), parent))
        if root is None or not _is_private(root):
            root = _roots[os.getpid(), parent] = _make_root(parent)
        return root


def private_folder(path: str | os.PathLike[str], *, replaceable: bool = False) -> Path:
    """Create a permanent folder that only this user can enter, with its parents.

    Parameters
    ----------
    path : path-like
        Below :func:`private_root` its name must contain no dot: temporary folders have one.
    replaceable : bool, default False
        Accept a parent that others can write to, if the location is not our choice.

    Returns
    -------
    Path

    Raises
    ------
    UsageError
        If it exists and belongs to another user, is a link or no folder, or if others can replace
        it.
    """
    folder = Path(os.path.abspath(path))
    missing = [each for each in [folder, *folder.parents] if not os.path.lexists(each)]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was first
            os.mkdir(each, 0o700)
    above = os.stat(folder.parent)
    is_others = not (is_own(above) or above.st_uid == 0) or is_replaceable(above)
    if (is_others and not replaceable) or not _make_private(str(folder)):
        raise UsageError(
            f"{folder} is for the files of this user only, but it or its parent belongs to or can "
            "be replaced by another user; remove it, or name a folder that only you can write to",
            code="path-unusable",
            path=folder,
        )
    return folder


def scratch_folder(purpose: str) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder inside this process's folder; its ``cleanup`` method removes it.

    Parameters
    ----------
    purpose : str
        Prefix of its name.

    Examples
    --------
    >>> import os
    >>> from bigdl.common.private_folders import scratch_folder
    >>> with scratch_folder("example") as path:
    ...     oct(os.stat(path).st_mode & 0o777)
    '0o700'
    """
    return tempfile.TemporaryDirectory(
        prefix=f"{purpose}-", dir=process_folder(), ignore_cleanup_errors=True
    )


def scratch_directory(prefix: str) -> Path:
    """Create a temporary directory inside this process's folder; the caller removes it.

    Parameters
    ----------
    prefix : str
        Prefix of its name.

    Returns
    -------
    Path
    """
    return Path(tempfile.mkdtemp(prefix=prefix, dir=process_folder()))


def process_folder(longest: int | None = None) -> str:
    """Return the temporary folder of this process; recreate it if it was removed.

    A forked process has a separate folder.

    Parameters
    ----------
    longest : int, optional
        Maximum length of the path in bytes; a folder in ``/tmp`` is used if it is longer.
    """
    with _lock:
        folder = process_folders.get((os.getpid(), False))
        if folder is None:
            folder = process_folders[os.getpid(), False] = LockedFolder("process")
        if longest is not None and len(os.fsencode(folder.path)) > longest:
            folder = process_folders.get((os.getpid(), True))
            if folder is None:
                folder = LockedFolder("process", longest=longest)
                process_folders[os.getpid(), True] = folder
        return folder.path


class LockedFolder:
    """A new temporary folder with mode 0700 and a lock, directly below the private root.

    The folder is removed by :meth:`close`, by garbage collection of this object, and at the end of
    the process, even if it is killed. A copy of this object in a forked process removes nothing.

    Parameters
    ----------
    purpose : str
        Prefix of its name.
    longest : int, optional
        Maximum length of the path in bytes, for Unix sockets; a folder in ``/tmp`` is used if it is
        longer.
    remover : bool, default True
        Remove it at once if this process is killed. False leaves that to the next program: for
        folders that another process still uses.
    parent : str, optional
        Another parent directory; only folders of the same purpose there can be stale.

    Attributes
    ----------
    descriptor : int
        File descriptor that holds the lock; a process that inherits it holds the lock, too.
    """

    def __init__(
        self,
        purpose: str,
        *,
        longest: int | None = None,
        remover: bool = True,
        parent: str | None = None,
    ):
        self._owner = os.getpid()
        self._guard = threading.Lock()
        self._remover = remover
        if parent is not None:
            remove_unlocked(parent, purpose)
            self._hold(*_create_locked(os.path.abspath(parent), purpose))
            return
        root = private_root()
        if longest is not None and len(os.fsencode(root)) + len(purpose) + 10 > longest:
            root = private_root(short_folder())
        _remove_stale_folders(root)
        self._hold(*_create_locked(root, purpose))

    @property
    def path(self) -> str:
        """Path of the folder, which is recreated if it was removed.

        Raises a UsageError if another user's folder replaced it.
        """
        with self._guard:
            if not _is_private(self._path) and os.getpid() == self._owner:
                self._finalizer.detach()
                os.close(self.descriptor)
                self._hold(self._path, _recreate(self._path))
            return self._path

    def _hold(self, path: str, descriptor: int) -> None:
        self._path, self.descriptor = path, descriptor
        self._finalizer = weakref.finalize(self, _remove, self._owner, path, descriptor)
        if self._remover and not os.environ.get(VARIABLE):
            _remove_at_end(path)

    def hand_over(self) -> None:
        """Transfer the folder to a process that inherited its `descriptor`."""
        if self._finalizer.detach():
            os.close(self.descriptor)

    def close(self) -> None:
        """Remove the temporary folder and release its lock."""
        self._finalizer()

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.close()


class SharedFolder:
    """A folder that processes of this machine share, removed by the last process that uses it.

    Every process holds a shared lock on the folder while it uses it, so a folder without a lock is
    left over from killed processes.

    Parameters
    ----------
    path : str
        Folder, created if it does not exist. With the name of a temporary folder, such as
        ``data-1234.abcdefgh``, below the private root, it is removed like those if it is left over.
    keep : bool, default False
        Keep the folder at the end.

    Attributes
    ----------
    close : callable
        Releases the folder; also called when this object is garbage-collected.
    """

    def __init__(self, path: str, *, keep: bool = False):
        self.path = path
        self.close = weakref.finalize(
            self, _release_shared, os.getpid(), self._locked(), path, keep
        )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager that lets one process at a time write to the folder."""
        descriptor = os.open(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)

    def _locked(self) -> int:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            try:
                descriptor = open_folder(self.path)
            except FileNotFoundError:  # its last user removed it
                os.makedirs(os.path.dirname(self.path), 0o700, exist_ok=True)
                continue
            lock(descriptor, shared=True)
            if is_open_folder(self.path, descriptor):
                return descriptor
            close_folder(self.path, descriptor)


def _release_shared(owner: int, folder: int, path: str, keep: bool) -> None:
    """Release the folder's lock, and remove the folder if no process holds another lock."""
    if os.getpid() == owner and not keep:
        with contextlib.suppress(OSError):
            lock(folder, wait=False)
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
    close_folder(path, folder)


def _is_private(path: str) -> bool:
    """Return True if a path is a real folder of this user that nobody else can enter."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_own(status) and is_closed_to_others(status)


def _make_private(path: str) -> bool:
    """Remove other users' permissions on a folder; return False if another user owns it."""
    if _is_private(path):
        return True
    with contextlib.suppress(OSError):
        make_private(path)
    return _is_private(path)


def _make_root(base: str) -> str:
    name = f"bigdl-{user_id()}"
    root = os.path.join(base, name)
    if is_replaceable(os.stat(base), 0o002):
        logger.warning(
            "Every user can replace temporary files in %s, as its sticky bit is not set; set it "
            "(chmod +t), or set TMPDIR to another folder",
            base,
        )
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            os.mkdir(root, 0o700)
        if _make_private(root):
            return root
        if os.path.lexists(root):  # otherwise an ending program has removed the empty root
            break
    other = tempfile.mkdtemp(prefix=f"{name}-", dir=base)
    logger.warning(
        "%s is not private to this user, so temporary files go to %s; remove that folder",
        root,
        other,
    )
    return other


def _create_locked(root: str, purpose: str) -> tuple[str, int]:
    """Create a folder and return its path and the descriptor that holds its lock."""
    for _ in range(_ATTEMPTS):
        try:
            path = tempfile.mkdtemp(prefix=f"{purpose}.", dir=root)
        except FileNotFoundError:  # an ending program has removed the empty root
            if not _is_root(root):
                raise
            with contextlib.suppress(FileExistsError):  # another one has created it again
                os.makedirs(root, 0o700)
            if not _make_private(root) and os.path.lexists(root):
                root = private_root(os.path.dirname(root))
            continue
        descriptor = _try_lock(path)
        if descriptor is not None:
            return path, descriptor
    raise OSError(f"no folder can be created in {root}: another process removes it at once")


def _recreate(path: str) -> int:
    """Recreate a removed folder and return the descriptor that holds its lock."""
    root = os.path.dirname(path)
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            os.makedirs(root, 0o700)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.mkdir(path, 0o700)
        if not os.path.lexists(path):  # an ending program has removed the empty root
            continue
        if not ((_make_private(root) or not _is_root(root)) and _is_private(path)):
            break
        descriptor = _try_lock(path)
        if descriptor is not None:
            return descriptor
    raise UsageError(
        f"The folder {path} of this program was removed and cannot be created again; start the "
        "program again, with another TMPDIR if others write to that one",
        code="path-unusable",
        path=path,
    )


def _try_lock(path: str, *, is_new: bool = True) -> int | None:
    """Lock a folder and return its descriptor; None if it is locked elsewhere or removed."""
    try:
        descriptor = open_folder(path)
    except OSError:
        return None
    try:
        lock(descriptor, wait=False)
    except BlockingIOError:
        close_folder(path, descriptor)
        return None
    except OSError:  # a file system without locks: no process treats it as stale, either
        if not is_new:
            close_folder(path, descriptor)
            return None
    if is_open_folder(path, descriptor):
        return descriptor
    close_folder(path, descriptor)
    return None


def _remove(owner: int, path: str, descriptor: int) -> None:
    is_owner = os.getpid() == owner
    if is_owner:
        shutil.rmtree(path, ignore_errors=True)
    close_folder(path, descriptor)
    if is_owner:
        _remove_empty_root(os.path.dirname(path))


def _is_root(path: str) -> bool:
    """Return True if a path is named like a folder that :func:`private_root` creates."""
    name = rf"bigdl-{user_id()}(-[a-z0-9_]{{8}})?"
    return re.fullmatch(name, os.path.basename(path)) is not None


def _remove_empty_root(root: str) -> None:
    """Remove an empty root; the next process that needs it creates it again."""
    if _is_root(root):
        with contextlib.suppress(OSError):
            os.rmdir(root)


def _remove_stale_folders(root: str) -> None:
    """Remove the folders of killed processes, at most once per process and root."""
    with _lock:
        if os.environ.get(VARIABLE) or (os.getpid(), root) in cleaned_roots:
            return
        cleaned_roots.add((os.getpid(), root))
    with contextlib.suppress(OSError):
        for entry in os.scandir(os.path.dirname(root)):
            if _is_root(entry.path) and _is_private(entry.path):
                remove_unlocked(entry.path)
                if entry.path != root:
                    _remove_empty_root(entry.path)


def remove_unlocked(root: str, purpose: str | None = None) -> None:
    """Remove the temporary folders below a root whose processes have ended."""
    with contextlib.suppress(OSError):
        for name in filter(_SCRATCH.fullmatch, os.listdir(root)):
            if purpose not in (None, name.rpartition(".")[0]):
                continue
            path = os.path.join(root, name)
            descriptor = _try_lock(path, is_new=False)
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                close_folder(path, descriptor)


# Reads directory names until no process holds the other end of its input. It is no child of the
# process and not in its group, so signals to these do not reach it.
_REMOVER = """
exec 3<&0
(
  while IFS= read -r name <&3; do set -- "$@" "$name"; done
  for name do rm -rf -- "$name"; done
  for name do rmdir -- "${name%/*}" 2>/dev/null; done
) &
"""
_remover_lock = threading.Lock()
_remover: int | None = None


def _remove_at_end(directory: str) -> None:
    """Register a directory for removal after this process and all its forks have ended."""
    global _remover
    command = shell(_REMOVER)
    if command is None:
        return  # the next program removes it
    with _remover_lock, contextlib.suppress(OSError):
        if _remover is None:
            end, _remover = os.pipe()
            subprocess.run(
                command,
                stdin=end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                check=False,
            )
            os.close(end)
        os.write(_remover, os.fsencode(directory) + b"\n")


def cache_directory(name: str) -> Path:
    """Return the path ``$XDG_CACHE_HOME/bigdl/<name>``, by default ``~/.cache/bigdl/<name>``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "bigdl" / name


def private_cache(name: str) -> Path:
    """Return the cache folder ``~/.cache/bigdl/<name>``, or a temporary folder if it is unsafe.

    It is created with mode 0700. A temporary folder of this process replaces it if it cannot be
    created, if another user owns it, or if others can write to it.
    """
    folder = cache_directory(name)
    if folder in _replaced:
        return _replaced[folder]
    try:
        make_private_directory(folder)
    except OSError as error:
        logger.warning("The cache %s is not used: %s", folder, error)
        _replaced[folder] = scratch_directory(f"{name}-")
        return _replaced[folder]
    return folder


def is_writable_only_by_user(folder: Path) -> bool:
    """Return True if the current user owns a folder and nobody else can write to it."""
    status = folder.stat()
    return is_own(status) and is_closed_to_others(status, _WRITABLE_BY_OTHERS)


def make_private_directory(folder: Path) -> None:
    """Create a folder with mode 0700; check that nobody else can write to an existing folder.

    Its parents may let the user's group write, as home directories often do.

    Raises
    ------
    OSError
        If it cannot be created, or others can write to it or replace it.
    """
    for each in [*reversed(folder.parents), folder]:
        if not os.path.lexists(each):
            with contextlib.suppress(FileExistsError):  # another process was first
                each.mkdir(0o700)  # parents, too, at any umask
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or not is_own(about):
        raise PermissionError(f"{folder} is a link or belongs to another user; remove it")
    if not is_closed_to_others(about, _WRITABLE_BY_OTHERS):
        raise PermissionError(f"others can write to {folder}; remove it")
    for above in folder.absolute().parents:
        about = above.stat()
        if not (is_own(about) or is_of_root(about)) or is_replaceable(about, 0o002):
            raise PermissionError(f"another user can replace {above}")


_replaced: dict[Path, Path] = {}


def remove_old(files: Iterable[Path], age_s: float) -> None:
    """Remove cache files that have not changed for `age_s` seconds."""
    for file in files:
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > age_s:
                file.unlink()
