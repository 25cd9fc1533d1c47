"""Journal of a fit in the driver: settings, durations, metrics of its epochs, and warnings."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from bigdl.common.missing import installed_version
from bigdl.training.position import RunSettings

_LOGGER = "bigdl"
_FITS: list[float] = []
"""Times at which the fits of this process began."""
_PACKAGES = (
    *("bigdl", "torch", "keras", "tensorflow", "jax", "lightning", "pytorch-lightning"),
    *("pyspark", "ray", "horovod", "numpy", "pyarrow"),
)
_HIDDEN = (  # settings that are not arguments of fit
    *("seed", "stop_at", "run_url", "pinned_checkpoint", "data_version", "data_identity"),
    *("inputs", "per_worker", "summary", "verbose", "recovery"),
)


@dataclass
class FitJournal:
    """Journal of one fit, for its report.

    Attributes
    ----------
    facts : dict
        Model, backend and types of the inputs, by name.
    settings : dict of str to str
        Arguments of the fit that were set.
    began_at, attempt_at, ended_at : float
        When the fit, its last attempt and its end began, in seconds since 1970; 0 if it has not.
    ready_at : float
        When the workers began the first epoch.
    trained_at : float
        When the workers ended.
    workers : list of dict
        Host, threads, ``began_at`` and ``read_s`` of each rank, if known.
    epochs : dict of int to dict
        By epoch: ``entry`` with its metrics, and ``ranks`` with the durations of each rank.
    events : list of tuple of (float, str)
        Warnings, losses of workers and resumes, with their times.
    versions : dict of str to str
        Versions of the packages.
    is_first : bool
        True for the first fit of this process, which also starts Spark's Python workers.
    on_change : callable
        Called after each change of the epochs.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    began_at: float = 0.0
    attempt_at: float = 0.0
    ended_at: float = 0.0
    ready_at: float = 0.0
    trained_at: float = 0.0
    workers: list[dict[str, Any]] = field(default_factory=list)
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    is_first: bool = False
    on_change: Callable[[], None] = field(default=lambda: None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "on_change"}

    def begin_attempt(self) -> None:
        """Record that an attempt begins; the durations of the last attempt count."""
        self.attempt_at, self.ready_at, self.workers = time.time(), 0.0, []

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of :meth:`bigdl.training.fit.FitContext.record`."""
        if "entry" in record:
            self.epochs[record["entry"]["epoch"]] = dict(record)
            self.on_change()
        elif "ready_at" in record:
            self.ready_at, self.workers = record["ready_at"], record["workers"]
        else:
            self.trained_at = record["ended_at"]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that records the beginning, the warnings and the end of a fit."""
        handler = _WarningHandler(self.events)
        logger = logging.getLogger(_LOGGER)
        self.began_at = self.attempt_at = time.time()
        self.is_first = not _FITS
        _FITS.append(self.began_at)
        self.versions = versions()
        logger.addHandler(handler)
        try:
            yield
        except BaseException as error:
            self.events.append((time.time(), f"{type(error).__name__}: {error}"))
            raise
        finally:
            logger.removeHandler(handler)
            self.ended_at = time.time()
            self.on_change()


class _WarningHandler(logging.Handler):
    """Handler that records the warnings which the current thread logs."""

    def __init__(self, events: list[tuple[float, str]]):
        super().__init__(logging.WARNING)
        self._events, self._thread = events, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._events.append((record.created, record.getMessage()))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the imported packages that affect a fit."""
    out = {"python": platform.python_version()}
    for package in _PACKAGES:
        if package.replace("-", "_") in sys.modules:
            version = installed_version(package)
            if version is not None:
                out[package] = version
    return out


def settings_of(settings: RunSettings) -> dict[str, str]:
    """Return the arguments of a fit that have a short text, without unset ones."""
    out = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        is_simple = isinstance(value, bool | int | float | str)
        if is_simple and each.default is not MISSING and value == each.default:
            continue
        if each.default_factory is not MISSING and _text_of(value) == _text_of(
            each.default_factory()
        ):
            continue
        if each.name in _HIDDEN or value is None or value is False or value in ("", [], ()):
            continue
        text = value if isinstance(value, str) else _text_of(value)
        if text and len(text) < 400:
            out[each.name] = text
    stop_at = settings.stop_at
    out["steps" if stop_at.epochs is None else "epochs"] = str(stop_at.steps or stop_at.epochs)
    return out


def _text_of(value: object) -> str:
    """Return the text of a setting: of a number, of names, or of the class of an object."""
    if isinstance(value, bool | int | float):
        return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(each if isinstance(each, str) else type(each).__name__ for each in value)
    if isinstance(value, dict):
        return str(value)
    simple = {k: v for k, v in vars(value).items() if isinstance(v, int | float | str)}
    arguments = ", ".join(f"{k}={v!r}" for k, v in simple.items() if not k.startswith("_"))
    return f"{type(value).__name__}({arguments})"
