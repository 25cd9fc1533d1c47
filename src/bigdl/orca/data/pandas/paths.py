"""The files that a path means: a file, a directory, a pattern, or several of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bigdl.common.errors import UsageError
from bigdl.orca.data.file import exists, is_local_path, open_file_system

__all__ = ["files_of", "for_spark", "split_paths"]


def split_paths(file_path: str | os.PathLike | Sequence) -> list[str]:
    """The single paths of a list, or of a text with commas between them."""
    given = file_path if isinstance(file_path, list | tuple) else [file_path]
    if not given or not all(isinstance(each, str | os.PathLike) for each in given):
        raise UsageError(f"file_path must be a str or a list of str, got {file_path!r}")
    paths = []
    for each in map(os.fspath, given):
        is_one = "," not in each or (is_local_path(each) and exists(each))
        paths += [each] if is_one else [part.strip() for part in each.split(",") if part.strip()]
    return paths


def files_of(path: str, *, nested: bool = False) -> list[str]:
    """The files that one path means, sorted; with `nested`, also those in folders of a folder."""
    fs, inside = open_file_system(path)
    if fs.isdir(inside):
        found = fs.find(inside) if nested else fs.ls(inside, detail=False)
        parts = [each[len(inside) :].strip("/").split("/") for each in found]
        found = [
            each
            for each, names in zip(found, parts, strict=True)
            if not any(name.startswith(("_", ".")) for name in names) and fs.isfile(each)
        ]
    elif fs.isfile(inside):
        found = [inside]
    else:
        found = [each for each in fs.glob(inside) if fs.isfile(each)]
    if not found:
        raise UsageError(f"There is no file at {path!r}")
    if is_local_path(path):
        return sorted(found)
    return sorted(fs.unstrip_protocol(each) for each in found)


def for_spark(file_path) -> list[str]:
    """Paths as Spark's readers take them.

    On one machine a path that exists is given in full: the JVM may have another working directory.
    """
    from bigdl.orca.cluster.spark import SparkCluster

    is_one_machine = SparkCluster.from_active().is_local
    paths = split_paths(file_path)
    if not is_one_machine:
        return paths
    return [
        "file://" + open_file_system(path)[1] if is_local_path(path) and exists(path) else path
        for path in paths
    ]
