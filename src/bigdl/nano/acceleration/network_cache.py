"""Cache on disk of converted networks, for all processes of a user.

Each entry is a folder in ``~/.cache/bigdl/networks``, or below ``XDG_CACHE_HOME``. Its name is a
digest of everything that determines its files: weights, code, shapes, versions, processor. A new
entry is written to a temporary folder and renamed, so other processes never see a partial one. The
entries together have at most ``BIGDL_NANO_CACHE_GB`` gigabytes (default 4; 0 disables the cache);
the least recently used are removed first.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bigdl.common.cpu import isa_flags, processor_name
from bigdl.common.errors import UsageError
from bigdl.common.missing import installed_version
from bigdl.common.private_folders import cache_directory, is_writable_only_by_user
from bigdl.common.timeouts import OLD_NETWORK_S, UNFINISHED_NETWORK_S

VARIABLE = "BIGDL_NANO_CACHE_GB"
"""Environment variable with the largest size of the cache in gigabytes."""

_DEFAULT_GB = 4.0
_FORMAT = 1  # of the entries, and of what the networks compute
_ABOUT = "about.json"
_UNFINISHED = ".new-"
_PACKAGES = ("torch", "openvino", "nncf", "keras")


class CacheEntry(NamedTuple):
    """Entry of the cache.

    Attributes
    ----------
    key : str
        Name of its folder.
    folder : Path
    size : int
        Bytes of all its files.
    used_s : float
        Time of the last use, in seconds since the epoch.
    about : dict
        What :func:`store_entry` was given, such as the name of the model's class.
    """

    key: str
    folder: Path
    size: int
    used_s: float
    about: dict[str, Any]


def largest_size() -> int:
    """Return the largest total size of the entries in bytes; 0 if the cache is disabled.

    Raises
    ------
    UsageError
        If ``BIGDL_NANO_CACHE_GB`` is not a number of gigabytes.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        gigabytes = float(text) if text.strip() else _DEFAULT_GB
        if 0 <= gigabytes < float("inf"):
            return int(gigabytes * 2**30)
    except ValueError:
        pass
    raise UsageError(
        f"{VARIABLE} is the size of the cache in gigabytes, 0 or more, not {text!r}",
        code="argument-value",
        argument=VARIABLE,
    )


def surroundings() -> list[Any]:
    """Return what determines a network besides model and options: versions and processor."""
    versions = {name: installed_version(name) for name in _PACKAGES}
    return [_FORMAT, versions, processor_name(), sorted(isa_flags())]


def find_entry(key: str | None) -> CacheEntry | None:
    """Return the entry with this key and record its use; None if there is no complete entry."""
    if key is None or not largest_size():
        return None
    directory = cache_directory("networks")
    try:
        if not is_writable_only_by_user(directory):
            return None
        entry = _read(directory / key)
        if entry is not None:
            os.utime(entry.folder)
        return entry
    except OSError:
        return None


def store_entry(
    key: str | None, write: Callable[[Path], object], about: Mapping[str, Any]
) -> CacheEntry | None:
    """Add an entry, and remove old ones if the cache is too large.

    Parameters
    ----------
    key : str or None
        None stores nothing.
    write : callable
        Writes the entry's files into the folder that it is called with.
    about : mapping
        JSON values that describe the entry for :func:`list_entries`.

    Returns
    -------
    CacheEntry or None
        None if the cache is disabled, its folder is not writable or not private, `write` fails, or
        the entry is larger than the cache.
    """
    if key is None or not (most := largest_size()):
        return None
    directory = cache_directory("networks")
    temporary: Path | None = None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_writable_only_by_user(directory):
            return None
        temporary = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=directory))
        try:
            write(temporary)
        except Exception:  # runtimes raise other errors, e.g. if the disk is full
            return None
        sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
        if sum(sizes.values()) > most:
            return None
        text = json.dumps({"about": dict(about), "sizes": sizes})
        (temporary / _ABOUT).write_text(text, encoding="utf-8")
        _rename_to_entry(temporary, directory / key)
        _shrink(directory, most, key)
        return _read(directory / key)
    except OSError:
        return None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_entry(key: str) -> None:
    """Remove an entry, if it exists; a process that has mapped its files keeps them."""
    folder = cache_directory("networks") / key
    # Renamed first, so that no process sees a part of it.
    with contextlib.suppress(OSError):
        gone = tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent)
        with contextlib.suppress(OSError):
            os.rename(folder, Path(gone, "removed"))
        shutil.rmtree(gone, ignore_errors=True)


def list_entries() -> list[CacheEntry]:
    """Return all entries, the most recently used first.

    Examples
    --------
    >>> from bigdl.nano.acceleration.network_cache import list_entries, store_entry
    >>> entry = store_entry("0" * 40, lambda folder: (folder / "a.bin").write_bytes(b"12345"), {})
    >>> entry.size, entry in list_entries()
    (5, True)
    """
    directory = cache_directory("networks")
    try:
        folders = [each for each in directory.iterdir() if not each.name.startswith(_UNFINISHED)]
    except OSError:
        return []
    entries = [entry for entry in map(_read, folders) if entry is not None]
    return sorted(entries, key=lambda entry: entry.used_s, reverse=True)


def clear_entries() -> int:
    """Remove all entries and return their total size in bytes.

    Folders that a process is writing are kept.
    """
    directory = cache_directory("networks")
    size = 0
    if directory.is_dir() and not directory.is_symlink():
        for folder in list(directory.iterdir()):
            if not folder.name.startswith(_UNFINISHED):
                size += _size_of(folder)
                remove_entry(folder.name)
            elif _age_s(folder) > UNFINISHED_NETWORK_S:
                shutil.rmtree(folder, ignore_errors=True)
    return size


def _rename_to_entry(temporary: Path, folder: Path) -> None:
    """Make a complete temporary folder the entry, unless there is a complete one."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if _read(folder) is not None:
            return  # another process has stored the same entry, which is as good
        remove_entry(folder.name)
        with contextlib.suppress(OSError):
            os.rename(temporary, folder)


def _age_s(folder: Path) -> float:
    """Return the seconds since a folder's last change or use; 0 if it is removed."""
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0


def _size_of(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    size = 0
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.name != _ABOUT:
                size += file.stat().st_size
    return size


def _read(folder: Path) -> CacheEntry | None:
    """Return a folder's entry, or None if a file is missing or has another size."""
    try:
        used_s = folder.stat().st_mtime
        content = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        sizes = content["sizes"]
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return None
        return CacheEntry(folder.name, folder, sum(sizes.values()), used_s, content["about"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _shrink(directory: Path, most: int, newest: str) -> None:
    """Remove unused and damaged entries, folders of killed processes, and the oldest entries.

    All folders together then have at most `most` bytes.
    """
    total = 0
    for folder in list(directory.iterdir()):
        unfinished = folder.name.startswith(_UNFINISHED)
        if _age_s(folder) > (UNFINISHED_NETWORK_S if unfinished else OLD_NETWORK_S):
            shutil.rmtree(folder, ignore_errors=True)
        elif unfinished:
            total += _size_of(folder)
        elif _read(folder) is None:
            remove_entry(folder.name)
    for entry in list_entries():
        total += entry.size
        if total > most and entry.key != newest:
            remove_entry(entry.key)
