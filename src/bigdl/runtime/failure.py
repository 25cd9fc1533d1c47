"""Exceptions of workers, as they travel to the process that raises an error for them."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from types import TracebackType
from typing import NamedTuple

from bigdl.common.errors import WorkerError


class Failure(NamedTuple):
    """An exception in a worker, as it travels.

    Attributes
    ----------
    time : float
        Of ``CLOCK_MONOTONIC``, which is one clock for all processes of a machine.
    kind, traceback : str
        Class name, and the traceback without the frames of this package.
    pickled : bytes or None
        The exception, if it can be pickled.
    """

    time: float
    kind: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that an exception is."""
        failed = time.monotonic()
        frames = traceback.format_exception(type(error), error, user_frames(error))
        return cls(failed, type(error).__name__, "".join(frames), _pickled(error))

    def original(self) -> BaseException | None:
        """Return the exception; None if it cannot be made in this process."""
        try:
            return None if self.pickled is None else pickle.loads(self.pickled)
        except Exception:  # its class may be found in the worker only
            return None

    def error(self, rank: int) -> WorkerError:
        """Return the error of the worker."""
        return WorkerError(rank, self.kind, self.traceback, self.original())


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception from the first frame outside of this package."""
    package = os.path.dirname(os.path.abspath(__file__))
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(package):
        frames = frames.tb_next
    return frames


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    try:
        content = cloudpickle.dumps(error.with_traceback(None))
        pickle.loads(content)  # some exceptions can be written only
    except Exception:
        return None
    return content
