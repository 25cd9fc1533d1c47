"""Checkpoints: the complete state of a run, from which training resumes exactly.

A :class:`Checkpoint` is a manifest (JSON) and a few files (bytes).  Rank 0 writes it to a
:class:`CheckpointDirectory` at any fsspec URL, or sends it over the channel to the driver.  A
``model_dir`` has one folder per run, which has one folder per checkpoint::

    <model_dir>/run-20261121T070000.123456-1f2e3d/checkpoint-000002-00000150/
        manifest.json     position, seed, history, size and checksum of the files
        model.pt  optimizer.pt  scheduler.pt  rng.pt
        rows.*.npy        rows of sharded tables (bigdl.training.slices), and ids of the
                          remaining rows of an epoch (bigdl.training.remaining_rows)

The numbers are the finished epochs, and the finished steps of the current epoch.  A checkpoint is
written to a temporary folder and renamed; on stores without rename the manifest is written last.
A checkpoint without a manifest does not count.  The files load with
``torch.load(..., weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import posixpath
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from bigdl.common.errors import UsageError
from bigdl.common.storage import disk_error, is_local_storage, open_file_system, write_reason
from bigdl.training.manifest import FORMAT, check_fields, check_manifest
from bigdl.training.position import Position
from bigdl.training.remaining_rows import IDS
from bigdl.training.slices import SavedSlices, file_name, write_slice

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger("bigdl.orca")

T = TypeVar("T")

_MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-\d{6,}-\d{8,}")


@dataclass
class Checkpoint:
    """State of a run at one position: a manifest and files.

    Attributes
    ----------
    manifest : dict
        JSON: the fields of :class:`~bigdl.training.position.Position`, ``seed``, and the
        settings that determine the batches.
    files : dict of str to bytes
    url : str or None
        Folder that it was read from, which has the files of its slices.
    """

    manifest: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)
    url: str | None = None

    @property
    def slices(self) -> SavedSlices | None:
        """Saved slices of sharded tables, or None."""
        described = self.manifest.get("slices")
        if not described or self.url is None:
            return None
        return SavedSlices(self.url, described)

    def without_slices(self, files: Mapping[str, bytes]) -> Checkpoint:
        """Return a checkpoint in which `files` replace the files of their names and all slices."""
        manifest = {key: value for key, value in self.manifest.items() if key != "slices"}
        return Checkpoint(manifest, {**self.files, **files})

    @property
    def left(self) -> SavedSlices | None:
        """Ids of an epoch's remaining rows (see :mod:`~bigdl.training.remaining_rows`), or None."""
        described = self.manifest.get(IDS)
        if not described or self.url is None:
            return None
        return SavedSlices(self.url, {IDS: described})

    @property
    def position(self) -> Position:
        return Position.of(self.manifest)

    def need(self, *names: str) -> None:
        """Raise an error if the manifest lacks fields that a mid-epoch resume needs.

        Raises
        ------
        UsageError
            Names the checkpoint and the fields.
        """
        try:
            check_fields(self.manifest, names)
        except ValueError as error:
            which = "" if self.url is None else f" {self.url}"
            raise UsageError(
                f"The checkpoint{which} was taken in the middle of an epoch, but {error}; resume "
                "from one at the end of an epoch",
                code="checkpoint-damaged",
            ) from None

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """Serialize the checkpoint to a JSON-serializable description and one blob."""
        sizes = {name: len(data) for name, data in self.files.items()}
        doc = {"manifest": self.manifest, "sizes": sizes, "url": self.url}
        return doc, b"".join(self.files.values())

    @classmethod
    def unpack_head(cls, doc: dict[str, Any]) -> Checkpoint:
        """Build a checkpoint from a description, without its files."""
        return cls(doc["manifest"], url=doc.get("url"))

    @classmethod
    def unpack(cls, doc: dict[str, Any], blob: bytes) -> Checkpoint:
        files, start = {}, 0
        for name, size in doc["sizes"].items():
            files[name] = blob[start : start + size]
            start += size
        return cls(doc["manifest"], files, doc.get("url"))


class CheckpointDirectory:
    """Folder with the checkpoints of one run.

    Parameters
    ----------
    url : str
        Folder of the run; a local path or any fsspec URL.
    keep : int
        Number of newest checkpoints to keep.

    Attributes
    ----------
    pinned : str or None
        Name of a checkpoint that is never removed.
    """

    pinned: str | None = None

    def __init__(self, url: str, keep: int = 2):
        self._fs, self._root = open_file_system(url)
        # a relative path would differ in a worker with another working directory
        self.url = self._root if is_local_storage(self._fs) else url.rstrip("/")
        self.keep = keep

    @classmethod
    def create(cls, model_dir: str, keep: int = 2) -> CheckpointDirectory:
        """Create the folder of a new run below `model_dir`."""
        now = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f"{now % 1:.6f}"[1:]
        name = f"run-{stamp}-{secrets.token_hex(3)}"
        directory = cls(f"{model_dir.rstrip('/')}/{name}", keep)
        try:
            directory._fs.makedirs(directory._root, exist_ok=True)
            make_private(directory._fs, directory._root)
            probe = f"{directory._root}/.probe"
            directory._fs.pipe_file(probe, name.encode())
            make_private(directory._fs, probe, 0o600)
        except Exception as error:
            reason = write_reason(error, model_dir)
            raise UsageError(
                f"model_dir {model_dir!r} cannot be written ({reason}); pass a folder that the "
                "driver and all workers can write",
                code="path-unusable",
                argument="model_dir",
                path=model_dir,
            ) from error
        return directory

    @classmethod
    def latest_run(cls, model_dir: str, keep: int = 2) -> CheckpointDirectory | None:
        """Return the newest run below `model_dir` that has a complete checkpoint, or None."""
        for name in sorted(_names_in(*open_file_system(model_dir)), reverse=True):
            if name.startswith("run-"):
                directory = cls(f"{model_dir.rstrip('/')}/{name}", keep)
                if directory.names():
                    return directory
        return None

    def is_shared(self) -> bool:
        """Return True if this machine can read the folder that the driver created."""
        return bool(self._fs.exists(f"{self._root}/.probe"))

    def names(self) -> list[str]:
        """Return the names of the complete checkpoints, oldest first."""
        self._fs.invalidate_cache(self._root)
        return sorted(
            name
            for name in _names_in(self._fs, self._root)
            if _NAME.fullmatch(name) and self._fs.exists(f"{self._root}/{name}/{_MANIFEST}")
        )

    def newest(self) -> str:
        """Return the name of the newest complete checkpoint, or an empty string."""
        return (self.names() or [""])[-1]

    def prepare(self, name: str) -> str:
        """Create a temporary folder for the files of a checkpoint; return its path."""
        with self._writing(name):
            return self._prepare(name)

    def _prepare(self, name: str) -> str:
        aside = f"{self._root}/{name}"
        if is_local_storage(self._fs):
            aside = f"{self._root}/.{name}-{secrets.token_hex(4)}"
        else:
            self._remove(name)
        self._fs.makedirs(aside, exist_ok=True)
        make_private(self._fs, aside)
        return aside

    def _remove(self, name: str) -> None:
        """Remove the checkpoint `name`, if it exists, before it is written again."""
        if self._fs.exists(f"{self._root}/{name}"):
            self._fs.rm(f"{self._root}/{name}", recursive=True)

    def write_slices(
        self, aside: str, arrays: dict[str, Any], rank: int
    ) -> dict[str, dict[str, Any]]:
        """Write the slices of one rank to a folder that :meth:`prepare` created.

        Parameters
        ----------
        aside : str
        arrays : dict of str to ndarray
        rank : int

        Returns
        -------
        dict
            Description of each slice for the manifest.
        """
        described = {}
        with self._writing(posixpath.basename(aside).lstrip(".").rpartition("-")[0]):
            for name, rows in arrays.items():
                path = f"{aside}/{file_name(name, rank)}"
                described[name] = write_slice(self._fs, path, rows)
                make_private(self._fs, path, 0o600)
        return described

    def write(self, snapshot: Checkpoint, aside: str | None = None) -> str:
        """Write a checkpoint and remove the oldest ones; return its name.

        Parameters
        ----------
        snapshot : Checkpoint
        aside : str, optional
            Folder of :meth:`prepare`, if slices were written to it.
        """
        with self._writing(checkpoint_name(snapshot), aside):
            return self._write(snapshot, aside)

    @contextlib.contextmanager
    def _writing(self, name: str, aside: str | None = None) -> Iterator[None]:
        """Context manager that converts write errors to UsageError and removes unfinished files."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            cause = disk_error(error) or error
            if not isinstance(cause, OSError):
                raise
            with contextlib.suppress(Exception):  # free the disk space
                for each in _names_in(self._fs, self._root):
                    if each.startswith(f".{name}-"):
                        self._fs.rm(f"{self._root}/{each}", recursive=True)
            whole = ""
            with contextlib.suppress(Exception):
                whole = self.newest()
            advice = "there is no earlier checkpoint"
            if whole:
                advice = f"{whole} is complete, and fit(resume='auto') resumes from it"
            model_dir, _, run = self.url.rpartition("/")
            raise UsageError(
                f"The checkpoint {run}/{name} cannot be written below model_dir {model_dir!r}: "
                f"{write_reason(cause, self.url)}; {advice}",
                code="path-unusable",
                argument="model_dir",
                path=self.url,
            ) from error

    def _write(self, snapshot: Checkpoint, aside: str | None) -> str:
        manifest = dict(snapshot.manifest, format=FORMAT, saved_at=time.time())
        manifest["files"] = {
            name: {"size": len(data), "crc32": zlib.crc32(data)}
            for name, data in snapshot.files.items()
        }
        name = checkpoint_name(snapshot)
        aside = self.prepare(name) if aside is None else aside
        content = {**snapshot.files, _MANIFEST: json.dumps(manifest).encode()}  # the manifest last
        for file, data in content.items():
            self._fs.pipe_file(f"{aside}/{file}", data)
            make_private(self._fs, f"{aside}/{file}", 0o600)
        if aside != f"{self._root}/{name}":
            self._remove(name)
            self._fs.mv(aside, f"{self._root}/{name}", recursive=True)
        complete, listed = self.names(), _names_in(self._fs, self._root)
        unfinished = [n for n in listed if n.startswith(".checkpoint-")]  # left by a dead writer
        oldest = [n for n in complete[: -self.keep] if n != self.pinned]
        for old in [*unfinished, *oldest]:
            self._fs.rm(f"{self._root}/{old}", recursive=True)
        return name

    def read(self, name: str) -> Checkpoint:
        """Read and verify a checkpoint.

        Raises
        ------
        UsageError
            If it is damaged or has another format.
        """
        files = {}
        with self._reading(name) as manifest:
            for file, expected in manifest["files"].items():
                data = self._fs.cat_file(f"{self._root}/{name}/{file}")
                if len(data) != expected["size"] or zlib.crc32(data) != expected["crc32"]:
                    raise ValueError(f"{file} is damaged")
                files[file] = data
        return Checkpoint(manifest, files, f"{self.url}/{name}")

    def position(self, name: str) -> Position:
        """Return the position of a checkpoint without reading its files."""
        with self._reading(name) as manifest:
            return Position.of(manifest)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[dict[str, Any]]:
        """Context manager that yields a validated manifest and adds its path to errors."""
        try:
            manifest = json.loads(self._fs.cat_file(f"{self._root}/{name}/{_MANIFEST}"))
            check_manifest(manifest)
            yield manifest
        except (OSError, ValueError) as error:
            raise UsageError(
                f"The checkpoint {self.url}/{name} cannot be read: {error}",
                code="checkpoint-damaged",
                path=self.url,
            ) from error

    def latest(self, warn: Callable[[str], None] = logger.warning) -> tuple[str, Checkpoint] | None:
        """Return the name and content of the newest readable checkpoint; skip damaged ones."""
        for name in reversed(self.names()):
            try:
                return name, self.read(name)
            except UsageError as error:
                before = name != self.names()[0]
                warn(f"{error}; the previous checkpoint is used" if before else str(error))
        return None


def checkpoint_name(snapshot: Checkpoint) -> str:
    """Return the folder name of a checkpoint; names sort by position."""
    return f"checkpoint-{snapshot.manifest['epoch']:06d}-{snapshot.manifest['step']:08d}"


def read_checkpoint(path: str) -> Checkpoint | None:
    """Read the checkpoint in the folder `path`; return None if `path` is not one."""
    parent, name = posixpath.split(path.rstrip("/"))
    if not _NAME.fullmatch(name):
        return None
    return CheckpointDirectory(parent).read(name)


def find_checkpoint(path: str, version: int | None = None) -> Checkpoint:
    """Read a checkpoint below a ``model_dir`` or a run's folder.

    Parameters
    ----------
    path : str
    version : int, optional
        Number of optimizer steps at which it was taken; default the newest readable one.
    """
    run = CheckpointDirectory(path)
    if not run.names():
        run = CheckpointDirectory.latest_run(path) or run
    if version is None:
        latest = run.latest()
        if latest is None:
            damaged = run.names()
            if damaged:
                raise UsageError(
                    f"No checkpoint below {path!r} can be read: {' and '.join(damaged)} of "
                    f"{run.url!r} {'is' if len(damaged) == 1 else 'are'} damaged, as the warnings "
                    "say; restore the files, or train again in another model_dir",
                    code="checkpoint-damaged",
                    path=path,
                )
            raise UsageError(
                f"There is no checkpoint below {path!r}; pass a model_dir",
                code="checkpoint-missing",
                path=path,
            )
        return latest[1]
    names = {}
    for name in run.names():
        try:
            names[run.position(name).global_step] = name
        except UsageError as error:
            logger.warning("%s; it is skipped", error)
    if version not in names:
        raise UsageError(
            f"There is no checkpoint of version {version!r} below {path!r}; the existing versions "
            f"are {sorted(names)}",
            code="checkpoint-missing",
            path=path,
            version=version,
            allowed=list(names),
        )
    return run.read(names[version])


def make_private(fs: AbstractFileSystem, path: str, mode: int = 0o700) -> None:
    """Restrict a file or folder to its owner, on local file systems and WebHDFS.

    Other stores have no file permissions, or configure them elsewhere.
    """
    if is_local_storage(fs):
        os.chmod(path, mode)
    elif "webhdfs" in fs.protocol:
        with contextlib.suppress(OSError):  # it may belong to another user
            fs.chmod(path, f"{mode:o}")


def _names_in(fs: AbstractFileSystem, folder: str) -> list[str]:
    """Return the names of a folder's entries; an empty list if the folder does not exist."""
    if not fs.exists(folder):
        return []
    return [posixpath.basename(path.rstrip("/")) for path in fs.ls(folder, detail=False)]


class BackgroundWriter:
    """Background thread for writes, one at a time.

    The next call of :meth:`start` or :meth:`wait` raises the error of a failed write.
    """

    def __init__(self) -> None:
        self._written: Future[Any] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Wait for the current write, then start `write` in the background."""
        self.wait()
        self._written = in_thread(write)

    def wait(self) -> None:
        """Wait until the current write has finished."""
        written, self._written = self._written, None
        if written is not None:
            written.result()


def in_thread(compute: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread; return its Future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:  # raised where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
