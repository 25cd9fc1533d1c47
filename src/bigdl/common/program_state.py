"""State of the program that imports of dependencies change, and that is put back.

A program that calls BigDL for the first time imports packages by it.  What these set up for the
whole process when they are imported, such as classes and handlers of loggers, filters of warnings
and drawn random numbers, is the program's own: with and without the call the program goes on alike.
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
    """A change of the whole process that lasts while at least one thread is inside.

    The first thread makes it and the last one undoes it: threads that come and go in any order
    would not leave the process as it was, if each undid its own.

    Parameters
    ----------
    make : callable
        Makes the change, and pushes what undoes it on the ``contextlib.ExitStack`` that it gets.
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
    """Leave the program's state as it was when the last thread that is inside leaves.

    Variables of the environment that a package adds for itself stay; those that were there before,
    and the path for libraries of other processes, are put back.
    """
    return _kept


@contextlib.contextmanager
def preserve_start_method() -> Iterator[None]:
    """Leave it to the program to choose how its processes start, as long as it has not."""
    restore = _start_method()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Leave the program's random numbers as they were before the block drew from them."""
    restores = _random_numbers()
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _keep(stack: contextlib.ExitStack) -> None:
    """Push functions that put back what the process has now."""
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


_kept = SharedChange(_keep)


def _logging() -> list[Callable[[], object]]:
    root = logging.getLogger()
    handlers, disabled = list(root.handlers), root.manager.disable
    named = [each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    levels = [(logger, logger.level) for logger in (root, *named) if logger.level]
    kind, factory = logging.getLoggerClass(), logging.getLogRecordFactory()

    def restore() -> None:
        for handler in [each for each in root.handlers if each not in handlers]:
            root.removeHandler(handler)
        for logger, level in levels:  # of a package, too, where the program has set it before
            if logger.level != level:
                logger.setLevel(level)
        if root.manager.disable != disabled:
            logging.disable(disabled)
        logging.setLoggerClass(kind)
        logging.setLogRecordFactory(factory)

    return [restore]


def _random_numbers() -> list[Callable[[], object]]:
    state = random.getstate()
    restore: list[Callable[[], object]] = [lambda: random.setstate(state)]
    # what is not imported yet is seeded by its own import
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
        return []  # only the main thread can have changed them
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        if threading.current_thread() is threading.main_thread():
            restore_signals(before)

    return [restore]


def restore_signals(before: Mapping[signal.Signals, Any]) -> None:
    """Set handlers of signals again; only in the main thread.

    Also where they seem to be the same: native code may have set others than Python knows of.
    """
    for number, handler in before.items():
        if handler is not None:  # one that was not set from Python cannot be set by it
            signal.signal(number, handler)


def _environment() -> list[Callable[[], object]]:
    before = dict(os.environ)

    def restore() -> None:
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if "LD_LIBRARY_PATH" not in before:  # of OpenCV, for its plug-ins
            os.environ.pop("LD_LIBRARY_PATH", None)

    return [restore]


def _start_method() -> Callable[[], object]:
    before = multiprocessing.get_start_method(allow_none=True)

    def restore() -> None:
        if multiprocessing.get_start_method(allow_none=True) != before:
            multiprocessing.set_start_method(before, force=True)

    return restore
