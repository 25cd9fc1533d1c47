"""Snapshots of process-wide state that imports of dependencies change.

A first call of BigDL imports packages.  Some of them change process-wide state when they are
imported, such as logger classes and handlers, warning filters and random number generators.  BigDL
restores that state, so the program behaves the same with and without the call.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class SharedChange:
    """Context manager for a process-wide change that lasts while at least one thread is inside.

    The first thread makes the change and the last one undoes it. Otherwise overlapping threads
    would not restore the original state.

    Parameters
    ----------
    make : callable
        Makes the change, and pushes its undo functions on the ``contextlib.ExitStack`` argument.
    """

    def __init__(self, make: Callable[[contextlib.ExitStack], object]):
        self._make = make
        self._lock = threading.Lock()
        self._threads = 0
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                with contextlib.ExitStack() as stack:
                    self._make(stack)
                    self._undo = stack.pop_all()
            self._threads += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._undo.close()


def preserve_program_state() -> SharedChange:
    """Return a context manager that restores logging, hooks, signals, RNG and environment.

    The last thread that leaves restores it. Environment variables that a package adds stay, except
    ``LD_LIBRARY_PATH``; changed ones are restored.
    """
    return _kept


@contextlib.contextmanager
def preserve_start_method() -> Iterator[None]:
    """Context manager that restores the start method of multiprocessing on exit."""
    restore = _start_method()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Context manager that restores the random number generators of Python, NumPy and torch."""
    restores = _random_numbers()
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _save_state(stack: contextlib.ExitStack) -> None:
    """Push functions on a stack that restore the current state of the process."""
    restores = [
        *_logging(),
        *_random_numbers(),
        *_hooks(),
        *_signals(),
        *_environment(),
        _start_method(),
    ]
    for restore in reversed(restores):
        stack.callback(restore)


_kept = SharedChange(_save_state)


def _logging() -> list[Callable[[], object]]:
    root = logging.getLogger()
    handlers, disabled = list(root.handlers), root.manager.disable
    named = [each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    levels = [(logger, logger.level) for logger in (root, *named) if logger.level]
    logger_class, factory = logging.getLoggerClass(), logging.getLogRecordFactory()

    def restore() -> None:
        for handler in [each for each in root.handlers if each not in handlers]:
            root.removeHandler(handler)
        for logger, level in levels:  # also a package's logger that the program configured
            if logger.level != level:
                logger.setLevel(level)
        if root.manager.disable != disabled:
            logging.disable(disabled)
        logging.setLoggerClass(logger_class)
        logging.setLogRecordFactory(factory)

    return [restore]


def _random_numbers() -> list[Callable[[], object]]:
    state = random.getstate()
    restore: list[Callable[[], object]] = [lambda: random.setstate(state)]
    # packages that are not imported yet seed themselves at import
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        of_numpy = numpy.random.get_state()
        restore.append(lambda: numpy.random.set_state(of_numpy))
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        of_torch = torch.get_rng_state()
        restore.append(lambda: torch.set_rng_state(of_torch))
    return restore


def _hooks() -> list[Callable[[], object]]:
    names = ("excepthook", "unraisablehook", "displayhook", "breakpointhook")
    of_sys = {name: getattr(sys, name) for name in names}
    of_warnings = warnings.showwarning, warnings.formatwarning
    of_threads, temporary = threading.excepthook, tempfile.tempdir
    limit, shows_faults = sys.getrecursionlimit(), faulthandler.is_enabled()

    def restore() -> None:
        for name, hook in of_sys.items():
            setattr(sys, name, hook)
        warnings.showwarning, warnings.formatwarning = of_warnings
        threading.excepthook, tempfile.tempdir = of_threads, temporary
        sys.setrecursionlimit(limit)
        if faulthandler.is_enabled() and not shows_faults:
            faulthandler.disable()

    return [restore]


def _signals() -> list[Callable[[], object]]:
    if threading.current_thread() is not threading.main_thread():
        return []  # only the main thread can change them
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        if threading.current_thread() is threading.main_thread():
            restore_signals(before)

    return [restore]


def restore_signals(before: Mapping[signal.Signals, Any]) -> None:
    """Restore signal handlers; call in the main thread only.

    This includes handlers that seem unchanged: native code may have set others without Python.
    """
    for number, handler in before.items():
        if handler is not None:  # Python cannot restore a handler of native code
            signal.signal(number, handler)


def _environment() -> list[Callable[[], object]]:
    before = dict(os.environ)

    def restore() -> None:
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if "LD_LIBRARY_PATH" not in before:  # set by OpenCV for its plug-ins
            os.environ.pop("LD_LIBRARY_PATH", None)

    return [restore]


def _start_method() -> Callable[[], object]:
    before = multiprocessing.get_start_method(allow_none=True)

    def restore() -> None:
        if multiprocessing.get_start_method(allow_none=True) != before:
            multiprocessing.set_start_method(before, force=True)

    return restore
