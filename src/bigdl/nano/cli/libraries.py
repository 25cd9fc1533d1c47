"""Search for shared libraries to preload."""

import ctypes.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

OPENMP = ("iomp5",)
JEMALLOC = ("jemalloc",)
TCMALLOC = ("tcmalloc_minimal", "tcmalloc")  # the first has no profiler


def find_library(names: tuple[str, ...]) -> Path | None:
    """Find a shared library in the environment of this Python, then in the system.

    Parameters
    ----------
    names : tuple of str
        Names without ``lib`` and ``.so``, the preferred one first.

    Returns
    -------
    Path or None
        The first library for the processor of this Python, searched in the virtual or conda
        environment, installed packages, the linker's cache, and with ``ctypes.util``.
    """
    return next((path for name in names for path in _candidates(name) if _fits(path)), None)


def _candidates(name: str) -> Iterator[Path]:
    prefixes = [sys.prefix, os.environ.get("CONDA_PREFIX"), sys.base_prefix]
    for prefix in filter(None, prefixes):
        yield from _in(Path(prefix, "lib"), name)
    for packages in map(Path, {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for directory in sorted(packages.glob("*/lib")):
            yield from _in(directory, name)
    yield from _in_linker_cache(name)
    path = ctypes.util.find_library(name)
    if path is not None and os.path.isabs(path):
        yield Path(path)


def _in(directory: Path, name: str) -> list[Path]:
    return sorted(directory.glob(f"lib{name}.so*"))


def _in_linker_cache(name: str) -> Iterator[Path]:
    search_path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/sbin", "/usr/sbin"])
    ldconfig = shutil.which("ldconfig", path=search_path)
    if ldconfig is None:
        return
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        soname, arrow, path = line.strip().partition(" => ")
        if arrow and soname.startswith(f"lib{name}.so"):
            yield Path(path)


def _fits(library: Path) -> bool:
    """Return True if a file is a library for the processor and word size of this Python."""
    of_python = _elf_identity(Path(sys.executable))
    return of_python is not None and _elf_identity(library) == of_python


def _elf_identity(path: Path) -> tuple[bytes, bytes] | None:
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return None
    # Compare the word size, byte order and processor; the bytes in between differ between files.
    return (header[4:6], header[18:20]) if header.startswith(b"\x7fELF") else None
