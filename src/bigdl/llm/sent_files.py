"""Files of a converted model for machines that cannot read the folder of the driver."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from bigdl.common.platform.files import lock
from bigdl.common.private_folders import private_cache
from bigdl.llm.facts import FACTS
from bigdl.runtime.cluster import BroadcastBytes, Broadcaster

logger = logging.getLogger("bigdl.llm")

PART = 64 << 20  # bytes of a broadcast


class SentFiles:
    """Files of a converted model as broadcasts, which each machine reads at most once.

    Parameters
    ----------
    folder : Path
        Folder of the converted model.
    broadcaster : Broadcaster
    """

    def __init__(self, folder: Path, broadcaster: Broadcaster):
        self._contents: list[list[tuple[str, int]]] = []  # names and sizes in each part
        self._parts: list[BroadcastBytes] = []
        for contents, data in _parts(folder):
            self._contents.append(contents)
            self._parts.append(broadcaster.broadcast(data))

    def write(self, digest: str) -> Path:
        """Return the model's folder in this machine's cache, which is written if it is missing."""
        cache = private_cache("llm")
        target = cache / digest
        with locked_model(cache, digest):
            if not has_model(target, digest):
                logger.info("Writing the model that the driver has sent to %s", target)
                with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as scratch:
                    new = Path(scratch, "model")
                    self._write(new)
                    shutil.rmtree(target, ignore_errors=True)
                    os.replace(new, target)
        return target

    def _write(self, folder: Path) -> None:
        for contents, part in zip(self._contents, self._parts, strict=True):
            data, start = memoryview(part.value), 0
            for name, size in contents:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(data[start : start + size])
                start += size


def _parts(folder: Path) -> Iterator[tuple[list[tuple[str, int]], bytes]]:
    """Yield the files of a folder, packed into parts of at most ``PART`` bytes."""
    contents: list[tuple[str, int]] = []
    data = bytearray()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder).as_posix()
        with path.open("rb") as file:
            piece: bytes | None = None
            while piece is None or piece:  # an empty file has one piece
                piece = file.read(PART - len(data))
                contents.append((name, len(piece)))
                data += piece
                if len(data) == PART:
                    yield contents, bytes(data)
                    contents, data = [], bytearray()
    if contents:
        yield contents, bytes(data)


def has_model(folder: Path, digest: str) -> bool:
    """Return True if a folder has the model with this digest."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(facts.get("digest") == digest)


_sent: weakref.WeakKeyDictionary[Broadcaster, dict[str, SentFiles | None]]
_sent = weakref.WeakKeyDictionary()


def sent_files(
    folder: Path,
    digest: str,
    broadcaster: Broadcaster,
    every_task_sees: Callable[[Callable[[], bool]], bool],
) -> SentFiles | None:
    """Return the broadcasts of a model, or None if all tasks see it in its folder.

    The result is determined once for each broadcaster.

    Parameters
    ----------
    folder : Path
    digest : str
    broadcaster : Broadcaster
    every_task_sees : callable
        Returns True if a check of files holds in all tasks.
    """
    models = _sent.setdefault(broadcaster, {})
    if digest not in models:
        is_seen = every_task_sees(functools.partial(has_model, folder, digest))
        models[digest] = None if is_seen else SentFiles(folder, broadcaster)
    return models[digest]


@contextlib.contextmanager
def locked_model(cache: Path, digest: str) -> Iterator[None]:
    """Context manager that lets one process of this machine write a model to the cache."""
    descriptor = os.open(cache / f"{digest}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
