"""A function that runs in a process of its own."""

from __future__ import annotations

import functools
import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from bigdl.common.cpu import THREAD_VARIABLES, usable_cores
from bigdl.runtime.launch import launch

__all__ = ["spawn_new_process"]


def spawn_new_process(func: Callable) -> Callable:
    """A decorator: each call runs in a fresh interpreter, with the environment that it asks for.

    Variables such as ``OMP_NUM_THREADS`` are read when a library loads; in a new process they
    still count. What the function gets, and what it returns, travels by ``cloudpickle``.

    Parameters
    ----------
    func : callable
        It may be of a script or a notebook.

    Returns
    -------
    callable
        `func` with one more keyword, ``env_var``: a mapping of variables to add. An exception of
        `func` is raised by the call, with the traceback of the new process as a note; one that
        cannot be pickled as a WorkerError.

    Examples
    --------
    >>> threads = spawn_new_process(count_threads)(env_var={"OMP_NUM_THREADS": "1"})
    """

    @functools.wraps(func)
    def call_in_new_process(*args, env_var: Mapping[str, Any] | None = None, **kwargs):
        # What a launch would choose by itself is as it is here, unless the caller wants another.
        variables = {name: os.environ.get(name) for name in THREAD_VARIABLES} | dict(env_var or {})
        env = {name: None if value is None else str(value) for name, value in variables.items()}
        outcomes = launch(_call, 1, (func, args, kwargs), cores=[usable_cores()], env=env)
        result, error = outcomes[0]
        if error is not None:
            raise error
        return result

    return call_in_new_process


def _call(rank: int, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Exception | None]:
    try:
        return func(*args, **kwargs), None
    except Exception as error:
        frames = error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        error.add_note(f"In the new process:\n{text}")
        if not _survives_a_pickle(error):
            raise
        return None, error


def _survives_a_pickle(error: Exception) -> bool:
    import cloudpickle

    try:
        return type(pickle.loads(cloudpickle.dumps(error))) is type(error)
    except Exception:
        return False
