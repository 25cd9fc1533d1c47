#!/usr/bin/env python3
"""Remove from installed packages what no program in a container uses.

python docker/trim.py SITE_PACKAGES            # changes that folder; prints what was freed

docker/Dockerfile runs it. What goes: tests, headers and static libraries, which only a compiler
uses, symbols of shared libraries, second copies of them, libraries of other processors inside of
JARs, Arrow Flight, and the Scala shells of Spark. Hive, Kerberos, MLlib, Spark Connect and YARN
stay. It needs the standard library alone, and `strip` of binutils for the symbols, which stay
without it.
"""

import fnmatch
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# Paths below site-packages; `*` also matches slashes.
RULES = {
    "tests": ["*/tests/*", "onnx/backend/test/*", "onnx/test/*", "torch/test/*"],
    "what only compilers use": [
        "*/include/*",
        "*.a",
        "*.h",
        "*.hpp",
        "*.pxd",
        "*.pxi",
        "*.pyx",
        "*.cmake",
    ],
    "programs and tests of PyTorch's build": [
        "torch/bin/protoc*",
        "torch/bin/*[Tt]est*",
        "torch/lib/libaoti_custom_ops.so",
        "torch/lib/libbackend_with_compiler.so",
        "torch/lib/libjitbackend_test.so",
        "torch/lib/libtorchbind_test.so",
    ],
    "Arrow Flight": [
        "pyarrow/*flight*",
    ],
    "Scala shells, examples and R of Spark": [
        "pyspark/examples/*",
        "pyspark/R/*",
        "pyspark/jars/connect-repl/*",
        "pyspark/jars/jline-*",
        "pyspark/jars/scala-compiler-*",
        "pyspark/jars/spark-repl_*",
    ],
}

KEPT = [
    "*.dist-info/*",  # licences, and what pip knows
    "pyspark/jars/jline-2*",  # of Hive's command line
]

PROCESSORS = {"x86_64": {"amd64", "linux64"}, "aarch64": {"aarch64"}}
OTHERS = re.compile(
    r"aarch64|amd64|arm(v\d)?|i386|linux(32|64)|loongarch64|mips64|ppc(64(le)?)?|riscv64|s390x|x86"
    r"|musl|aix|android|darwin|freebsd|mac(os)?|osx|sunos|win(dows)?(32|64)?"
)
SAME = {"x86_64": "amd64", "aarch_64": "aarch64", "arm64": "aarch64"}
LIBRARIES = (".so", ".dll", ".dylib", ".jnilib", ".a", ".exe")


def rule_of(path: str) -> str | None:
    """Name of the rule that removes a file, which is named below site-packages, if there is one."""
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in KEPT):
        return None
    for name, patterns in RULES.items():
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
            return name
    return None


def is_foreign(entry: str, machine: str) -> bool:
    """Return True if an entry of a JAR is a library of another processor or operating system."""
    if not entry.endswith(LIBRARIES):
        return False
    name = entry.lower()
    for written, known in SAME.items():
        name = name.replace(written, known)
    words = set(re.split(r"[^a-z0-9]+", name)) - PROCESSORS[machine]
    return any(OTHERS.fullmatch(word) for word in words)


def files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def remove_files(folder: Path) -> dict[str, int]:
    """Remove what the rules name; returns bytes by rule."""
    freed = dict.fromkeys(RULES, 0)
    for path in files(folder):
        rule = rule_of(path.relative_to(folder).as_posix())
        if rule:
            freed[rule] += path.lstat().st_size
            path.unlink()
    for parent, _, _ in os.walk(folder, topdown=False):
        if not os.listdir(parent):
            os.rmdir(parent)
    return freed


def link_copies(folder: Path) -> int:
    """Make links of shared libraries that lie beside an equal one; returns bytes."""
    freed = 0
    originals: dict[tuple, Path] = {}
    for path in sorted(files(folder)):
        if ".so" not in path.name or path.is_symlink():
            continue
        content = hashlib.sha256(path.read_bytes()).digest()
        original = originals.setdefault((path.parent, content), path)
        if original is not path:
            freed += path.stat().st_size
            path.unlink()
            path.symlink_to(original.name)
    return freed


def trim_jars(folder: Path, machine: str) -> int:
    """Remove libraries of other processors from JARs; returns bytes."""
    freed = 0
    for path in folder.glob("pyspark/jars/*.jar"):
        with zipfile.ZipFile(path) as jar:
            entries = jar.infolist()
            kept = [each for each in entries if not is_foreign(each.filename, machine)]
            if len(kept) == len(entries):
                continue
            size = path.stat().st_size
            has_content = any(each.filename.endswith((".class", *LIBRARIES)) for each in kept)
            if has_content:
                _rewrite(path, jar, kept)
            else:
                path.unlink()
            freed += size - (path.stat().st_size if has_content else 0)
    return freed


def _rewrite(path: Path, jar: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> None:
    aside = path.with_suffix(".part")
    with zipfile.ZipFile(aside, "w") as smaller:
        for entry in entries:
            smaller.writestr(entry, jar.read(entry), zipfile.ZIP_DEFLATED, 9)
    aside.chmod(path.stat().st_mode)
    aside.replace(path)


def strip_symbols(folder: Path) -> int:
    """Remove from shared libraries the symbols that only a debugger reads; returns bytes."""
    strip = shutil.which("strip")
    freed = 0
    for path in files(folder) if strip else ():
        if ".so" not in path.name or path.is_symlink() or not _is_elf(path):
            continue
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            smaller = Path(aside, path.name)
            command = [strip, "--strip-unneeded", "-o", smaller, path]
            done = subprocess.run(command, capture_output=True, check=False)
            # strip spoils some of the libraries whose names of others patchelf has changed
            if done.returncode or not _is_aligned(smaller):
                continue
            gain = path.stat().st_size - smaller.stat().st_size
            if gain > 0:
                smaller.replace(path)
                freed += gain
    return freed


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(5) == b"\x7fELF\x02"  # of 64 bits


def _is_aligned(path: Path) -> bool:
    """Return True if the segments of a library lie where they can be mapped to memory."""
    content = path.read_bytes()
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    for place in range(table, table + size * count, size):
        kind, _, offset, address, *_, alignment = struct.unpack_from("<IIQQQQQQ", content, place)
        if kind == 1 and (address - offset) % alignment:  # 1: what the loader maps
            return False
    return True


def trim(folder: Path, machine: str = "") -> dict[str, int]:
    """Do all of it in a site-packages folder; returns the bytes that each part has freed."""
    freed = remove_files(folder)
    freed["libraries of other processors in JARs"] = trim_jars(
        folder, machine or platform.machine()
    )
    freed["second copies of libraries"] = link_copies(folder)
    freed["symbols of libraries"] = strip_symbols(folder)
    return freed


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    freed = trim(Path(sys.argv[1]))
    for name, size in freed.items():
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{sum(freed.values()) / 1e6:8.1f} MB  together")


if __name__ == "__main__":
    main()
