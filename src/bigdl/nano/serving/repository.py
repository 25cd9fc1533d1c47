"""ModelRepository: models of a server by name and version, replaceable while in use.

Each request holds a lease on a version. A replaced or removed version leaves the repository at
once, so that new requests do not get it, and is closed when its last lease ends. So no request
fails because of a change.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError, first_line
from bigdl.nano.acceleration.saved import META_FILE
from bigdl.nano.serving.batching import BatchingOptions
from bigdl.nano.serving.model import ServedModel
from bigdl.nano.serving.runners import MODEL_FILES
from bigdl.nano.serving.text_models import text_source

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["ModelRepository", "UnknownModelError"]

_log = logging.getLogger(__name__)


class UnknownModelError(UsageError, LookupError):
    """Exception raised for an unknown model or an unknown version of a model.

    Examples
    --------
    >>> from bigdl.nano.serving import ModelRepository, UnknownModelError
    >>> try:
    ...     ModelRepository().find("ranker")
    ... except UnknownModelError as error:
    ...     print(error)
    There is no model 'ranker'; the models are none
    """

    code = "name-unknown"


@dataclass(eq=False)
class Deployment:
    """One loaded version of a model.

    Attributes
    ----------
    name, version : str
    model : ServedModel
    path : Path or None
        Directory or file it was loaded from.
    loaded : float
        Load time in seconds since 1970.
    """

    name: str
    version: str
    model: ServedModel
    path: Path | None = None
    fingerprint: Any = None
    loaded: float = field(default_factory=time.time)
    leases: int = 0


@dataclass(frozen=True)
class Traffic:
    """Traffic split: the share of each version in requests that name no version.

    Attributes
    ----------
    shares : dict of str to float
        Share of each version. Shares need not add up to 1; empty means the latest version.
    shadow : str or None
        Version that receives a copy of every request; its results are discarded.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    shadow: str | None = None

    def chosen(self, key: str | None) -> str | None:
        """Choose a version by share, randomly or by `key`; return None if there are no shares."""
        if not self.shares:
            return None
        point = random.random() if key is None else _point_of(key)
        point *= sum(self.shares.values())
        for version, share in self.shares.items():
            point -= share
            if point < 0:
                return version
        return list(self.shares)[-1]


def _point_of(key: str) -> float:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class ModelRepository:
    """Models by name and version that can be loaded, replaced and unloaded while in use.

    Parameters
    ----------
    root : str or path, optional
        A directory of one saved model; of versions of it (``1``, ``2``, …); or of several models,
        each a saved model or a directory of versions. Its models are loaded by :meth:`load_all`.
    name : str, optional
        Name of the model if the directory is one model. Default: the directory's name.
    batching : BatchingOptions, optional
        Options for every model.
    **options
        Options of :class:`ServedModel` for the models of the directory, e.g. ``thread_num``.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> from bigdl.nano.serving import ModelRepository
    >>> fast = InferenceOptimizer.trace(torch.nn.ReLU(), torch.ones(1, 2), accelerator="openvino")
    >>> InferenceOptimizer.save(fast, "models/relu/1")
    >>> with ModelRepository("models") as repository:
    ...     repository.load_all()
    ...     with repository.lease("relu") as deployed:
    ...         print(deployed.version, deployed.model.predict(np.array([[-1, 2]], "float32")))
    1 [[0. 2.]]
    """

    def __init__(
        self,
        root: str | os.PathLike | None = None,
        *,
        name: str | None = None,
        batching: BatchingOptions | None = None,
        **options: Any,
    ):
        self.root = None if root is None else Path(root)
        self._name = name
        self._options = {"batching": batching, **options}
        self._models: dict[str, dict[str, Deployment]] = {}
        self._failures: dict[tuple[str, str], tuple[Any, str]] = {}
        self._traffic: dict[str, Traffic] = {}
        self._changed = threading.Condition()
        self._loading = threading.Lock()  # one load at a time
        self._retiring: list[threading.Thread] = []
        self._watching: threading.Event | None = None
        self.on_load: Callable[[Deployment], None] = lambda deployed: None
        self.on_reload: Callable[[str, bool], None] = lambda name, succeeded: None

    # -- lookup --------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the loaded models."""
        return sorted(self._models)

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, oldest first.

        Raises
        ------
        UnknownModelError
            If there is no such model.
        """
        return sorted(self._versions(name), key=_order)

    def deployments(self) -> list[Deployment]:
        """Return all loaded versions of all models."""
        with self._changed:
            return [each for versions in self._models.values() for each in versions.values()]

    def find(self, name: str, version: str | None = None) -> Deployment:
        """Return a version of a model, by default the latest.

        Raises
        ------
        UnknownModelError
            If there is no such model or version.
        """
        versions = self._versions(name)
        if version:
            if version not in versions:
                listed = ", ".join(self.versions(name))
                raise UnknownModelError(
                    f"Model {name!r} has no version {version!r}; it has {listed}"
                )
            return versions[version]
        return max(versions.values(), key=lambda each: _order(each.version))

    def _versions(self, name: str) -> dict[str, Deployment]:
        versions = self._models.get(name)
        if not versions:
            listed = ", ".join(self.names()) or "none"
            raise UnknownModelError(f"There is no model {name!r}; the models are {listed}")
        return versions

    def index(self) -> list[dict[str, str]]:
        """Return the name, version and state of all models, and the reason for each failure."""
        entries = {
            (each.name, each.version): {
                "name": each.name,
                "version": each.version,
                "state": "READY",
                "reason": "",
            }
            for each in self.deployments()
        }
        for (name, version), (_, reason) in list(self._failures.items()):
            entry = entries.setdefault(
                (name, version), {"name": name, "version": version, "state": "UNAVAILABLE"}
            )
            entry["reason"] = reason
        return [entries[key] for key in sorted(entries)]

    # -- requests ------------------------------------------------------------------------------

    @contextmanager
    def lease(
        self, name: str, version: str | None = None, key: str | None = None
    ) -> Iterator[Deployment]:
        """Context manager that keeps a version of a model loaded for the duration of a request.

        Parameters
        ----------
        name : str
        version : str, optional
            Default: chosen by the split of :meth:`set_traffic`, or the latest.
        key : str, optional
            Requests with the same key, such as a user id, get the same version.

        Raises
        ------
        UnknownModelError
            If there is no such model or version.
        """
        deployed = self._acquire(name, version, key)
        try:
            yield deployed
        finally:
            self._release(deployed)

    def _acquire(self, name: str, version: str | None, key: str | None) -> Deployment:
        with self._changed:
            if not version:
                chosen = self.traffic(name).chosen(key)
                version = chosen if chosen in self._models.get(name, {}) else None
            deployed = self.find(name, version)
            deployed.leases += 1
            return deployed

    def _release(self, deployed: Deployment) -> None:
        with self._changed:
            deployed.leases -= 1
            if not deployed.leases:
                self._changed.notify_all()

    def traffic(self, name: str) -> Traffic:
        """Return the traffic split of a model."""
        return self._traffic.get(name, _ALL_TO_LATEST)

    def mirror(self, deployed: Deployment, arrays: list, done: Callable[[bool], None]) -> None:
        """Send a copy of a request to the model's shadow version, if there is one; do not wait.

        Parameters
        ----------
        deployed : Deployment
            Version that answers the request.
        arrays : list of ndarray
        done : callable
            Called with True when the shadow has answered, or with False after an error.
        """
        shadow = self.traffic(deployed.name).shadow
        if shadow is None or shadow == deployed.version:
            return
        try:
            other = self._acquire(deployed.name, shadow, None)
        except UnknownModelError:
            return
        try:
            future = other.model.submit(arrays)
        except Exception:  # e.g. a full queue; it does not affect the caller
            self._release(other)
            done(False)
            return

        def finish(future: Future) -> None:
            self._release(other)
            done(future.exception() is None)

        future.add_done_callback(finish)

    def set_traffic(
        self, name: str, shares: Mapping[str, float] | None = None, shadow: str | None = None
    ) -> None:
        """Split the requests that name no version among versions of a model.

        Parameters
        ----------
        name : str
        shares : dict of str to float, optional
            Share of each version, e.g. ``{"1": 90, "2": 10}``. Default: all requests go to the
            latest version.
        shadow : str, optional
            Version that receives a copy of every request; its results are discarded.

        Raises
        ------
        UsageError
            If a version does not exist, takes other inputs, or a share is negative.
        """
        shares = dict(shares or {})
        for version, share in shares.items():
            check_number(f"The share of version {version}", share, 0)
        if shares and not sum(shares.values()) > 0:
            raise UsageError(
                f"At least one share of {name!r} has to be above 0, got {shares}",
                code="argument-value",
                argument="shares",
            )
        named = [self.find(name, each) for each in (*shares, *([shadow] if shadow else []))]
        if len({each.model.signature.inputs for each in (*named, self.find(name))}) > 1:
            raise UsageError(
                f"The versions {', '.join(each.version for each in named)} of {name!r} take "
                "different inputs, so they cannot share requests",
                code="argument-conflict",
            )
        with self._changed:
            self._traffic[name] = Traffic(shares, shadow)

    # -- loading -------------------------------------------------------------------------------

    def add(self, name: str, model: ServedModel, version: str = "1") -> Deployment:
        """Add a model, or replace the model with this name and version.

        Parameters
        ----------
        name : str
        model : ServedModel
            The repository takes it over and closes it.
        version : str
        """
        return self._put(Deployment(name, str(version), model))

    def load_all(self, *, keep_going: bool = False) -> None:
        """Load every model of the directory that is not loaded yet.

        A model that fails to load does not prevent the others from loading; :meth:`index` has the
        reason.

        Parameters
        ----------
        keep_going : bool
            Log the models that cannot be loaded, and raise only if no model is left.

        Raises
        ------
        UsageError
            If there is no model, or if some failed to load (after the others were loaded).
        """
        models = self._on_disk()
        if not models:
            raise UsageError(
                f"{str(self.root)!r} holds no model; give a directory that InferenceOptimizer.save "
                "wrote, or one of such directories",
                code="file-format",
                path=str(self.root),
            )
        problems = []
        for name in models:
            try:
                self.load(name, force=False)
            except UsageError as error:
                problems.append(error)
        if problems and not (keep_going and self._models):
            raise _joined(problems)
        for problem in problems:
            _log.error("%s; the other models are served", problem)

    def load(self, name: str, *, force: bool = True) -> None:
        """Load or reload all versions of a model of the directory.

        If a version fails to load, its previously loaded state stays in use.

        Parameters
        ----------
        name : str
        force : bool
            False loads only what has changed.

        Raises
        ------
        UnknownModelError
            If the directory has no such model.
        UsageError
            If a version fails to load; the others are loaded.
        """
        with self._loading:
            versions = self._on_disk().get(name)
            if not versions:
                raise UnknownModelError(f"There is no model {name!r} in {str(self.root)!r}")
            problems = []
            for version, path in versions.items():
                try:
                    self._load(name, version, path, force)
                except UsageError as error:
                    problems.append(
                        error.with_message(f"Version {version} of model {name!r}: {error}")
                    )
            for deployed in list(self._models.get(name, {}).values()):
                if deployed.path is not None and deployed.version not in versions:
                    self._remove(name, deployed.version)
            for known in [key for key in self._failures if key[0] == name]:
                if known[1] not in versions:
                    self._failures.pop(known, None)
            if problems:
                raise _joined(problems)

    def _load(self, name: str, version: str, path: Path, force: bool) -> None:
        fingerprint = _fingerprint(path)
        present = self._models.get(name, {}).get(version)
        failed = self._failures.get((name, version))
        if not force and (
            (present is not None and present.fingerprint == fingerprint and failed is None)
            or (failed is not None and failed[0] == fingerprint)
        ):
            return
        try:
            model = ServedModel(path, **self._options)
            model.warm_up()
        except Exception as error:
            reason = str(error) if isinstance(error, UsageError) else first_line(error)
            self._failures[name, version] = (fingerprint, reason)
            self.on_reload(name, False)
            code = error.code if isinstance(error, UsageError) else "file-damaged"
            raise UsageError(reason, code=code) from error
        self._failures.pop((name, version), None)
        self._put(Deployment(name, version, model, path, fingerprint))
        self.on_reload(name, True)

    def unload(self, name: str) -> None:
        """Unload all versions of a model after their running requests have finished.

        Raises
        ------
        UnknownModelError
            If there is no such model.
        """
        for version in self.versions(name):
            self._remove(name, version)

    def _put(self, deployed: Deployment) -> Deployment:
        self.on_load(deployed)
        with self._changed:
            versions = self._models.setdefault(deployed.name, {})
            replaced = versions.get(deployed.version)
            versions[deployed.version] = deployed
        if replaced is not None:
            self._retire(replaced)
        return deployed

    def _remove(self, name: str, version: str) -> None:
        with self._changed:
            versions = self._models.get(name, {})
            removed = versions.pop(version, None)
            if not versions:
                self._models.pop(name, None)
                self._traffic.pop(name, None)
        if removed is not None:
            self._retire(removed)

    def _retire(self, deployed: Deployment) -> None:
        """Close a model version, in a separate thread, once no request uses it."""

        def close() -> None:
            with self._changed:
                while deployed.leases:
                    self._changed.wait()
            deployed.model.close()

        thread = threading.Thread(target=close, name="bigdl-serving-retire", daemon=True)
        self._retiring = [each for each in self._retiring if each.is_alive()]
        self._retiring.append(thread)
        thread.start()

    def _on_disk(self) -> dict[str, dict[str, Path]]:
        if self.root is None:
            return {}
        if not self.root.is_dir():
            raise UsageError(
                f"There is no directory {str(self.root)!r}",
                code="path-missing",
                path=str(self.root),
            )
        if _is_model(self.root):
            return {self._name or self.root.resolve().name: {"1": self.root}}
        versions = _versions_in(self.root)
        if versions:
            return {self._name or self.root.resolve().name: versions}
        models = {}
        for path in sorted(self.root.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                inside = {"1": path} if _is_model(path) else _versions_in(path)
                if inside:
                    models[path.name] = inside
        return models

    # -- changes on disk -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Load changed models of the directory, and unload removed ones.

        Problems are logged and reported by :meth:`index`.
        """
        models = self._on_disk()
        for name in models:
            try:
                self.load(name, force=False)
            except UsageError as error:
                _log.warning("%s; the version loaded before stays in use", error)
        for deployed in self.deployments():
            if deployed.path is not None and deployed.name not in models:
                self._remove(deployed.name, deployed.version)

    def watch(self, seconds: float = 2.0) -> None:
        """Check the directory for changes periodically, in a thread, until :meth:`close`."""
        if self._watching is not None:
            return
        stopped = self._watching = threading.Event()

        def look() -> None:
            while not stopped.wait(seconds):
                with suppress(UsageError, OSError):  # the directory may be missing during a move
                    self.refresh()

        threading.Thread(target=look, name="bigdl-serving-watch", daemon=True).start()

    def close(self) -> None:
        """Finish running requests and close all models."""
        if self._watching is not None:
            self._watching.set()
        with self._loading:
            for deployed in self.deployments():
                self._remove(deployed.name, deployed.version)
        for thread in self._retiring:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_ALL_TO_LATEST = Traffic()


def _order(version: str) -> tuple[bool, int, str]:
    """Return a sort key for versions: other names first, then numbers in numeric order."""
    return (version.isdecimal(), int(version) if version.isdecimal() else 0, version)


def _is_model(path: Path) -> bool:
    known = any((path / name).is_file() for name in (META_FILE, *MODEL_FILES))
    return known or text_source(path) is not None


def _versions_in(path: Path) -> dict[str, Path]:
    return {
        each.name: each
        for each in sorted(path.iterdir())
        if each.name.isdecimal() and each.is_dir() and _is_model(each)
    }


def _joined(problems: list[UsageError]) -> UsageError:
    """Return one error with the messages of several errors and the code of the first."""
    return problems[0].with_message("; ".join(map(str, problems)))


def _fingerprint(path: Path) -> tuple:
    """Return a value that changes when a file of a model is written."""
    facts = []
    for each in sorted(path.iterdir()):
        if each.is_file():
            status = each.stat()
            facts.append((each.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(facts)
