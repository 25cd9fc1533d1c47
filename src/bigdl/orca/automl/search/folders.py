"""The directories of searches, and files in them that are whole or not there."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

__all__ = ["STUDY", "latest_search", "new_search", "write_whole"]

_NAME = re.compile(r"search_(\d{5})")
STUDY = "study.db"
"""The file of the study of a search."""


def new_search(folder: Path) -> Path:
    """A new directory for a search, readable by its owner alone."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number = max((number for number, _ in _searches(folder)), default=-1) + 1
        path = folder / f"search_{number:05}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # of another process, just now
            continue
        return path


def latest_search(folder: Path) -> Path | None:
    """The newest search that has begun below a folder."""
    begun = [path for _, path in sorted(_searches(folder)) if (path / STUDY).is_file()]
    return begun[-1] if begun else None


def _searches(folder):
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        found = _NAME.fullmatch(path.name)
        if found and path.is_dir():
            yield int(found[1]), path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there with all of its content or not at all."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
