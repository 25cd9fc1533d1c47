"""The stack on which signals are handled, kept where OpenVINO would lose it."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_signal_stack"]


class _Stack(ctypes.Structure):
    """``stack_t`` of ``sigaltstack(2)`` on Linux."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("size", ctypes.c_size_t),
    )


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Leave this thread with the alternate signal stack that it had.

    Every ``openvino.Core`` whose CPU plugin is loaded sets one and takes it back when it goes. Of
    two that go in the order in which they came, the second brings back what the first has freed;
    then the next signal that Python handles, such as Ctrl-C or the end of a child process, ends
    the process without a word. NNCF makes several (openvino 2026.4, nncf 3.4).
    """
    sigaltstack = _sigaltstack()
    if sigaltstack is None:
        yield
        return
    before = _Stack()
    known = sigaltstack(None, ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if known:
            sigaltstack(ctypes.byref(before), None)


@functools.cache
def _sigaltstack():
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).sigaltstack
    function.argtypes = [ctypes.POINTER(_Stack), ctypes.POINTER(_Stack)]
    return function
