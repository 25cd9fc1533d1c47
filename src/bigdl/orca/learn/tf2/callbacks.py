"""Callbacks of Keras in a worker.

Every worker calls them, so that what they decide (to stop, or a learning rate) is decided
everywhere; figures of an epoch are the same on all ranks.  Those that only write files run on rank
0.  What they keep in numbers is part of checkpoints.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.tf2.remote import redirect

__all__ = ["BATCH_HOOKS", "WorkerCallbacks", "as_callbacks"]

_WRITERS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore", "RemoteMonitor")

BATCH_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
)
"""Hooks that are called in an epoch."""


def as_callbacks(given) -> list:
    """A list of its own of the callbacks that a verb was given.

    Raises
    ------
    UsageError
        For anything else.
    """
    if given is None:
        return []
    import keras

    callbacks = list(given) if isinstance(given, list | tuple) else [given]
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UsageError(
                f"callbacks must be a list of keras.callbacks.Callback, got {callback!r}"
            )
    return callbacks


class WorkerCallbacks:
    """The callbacks of one worker.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
    model : keras.Model
    rank : int
    **params
        What Keras tells callbacks: ``epochs``, ``steps``, ``verbose``.

    Attributes
    ----------
    stops_in_epoch : bool
        Whether one of them may end the training after a batch, on any rank.
    noted : dict
        The figures of the last epoch, with what callbacks have added, such as a learning rate.
    """

    def __init__(self, callbacks: Sequence[Any], model, rank: int, **params):
        import keras

        self._callbacks = [c for c in callbacks if rank == 0 or not _writes_only(c)]
        self._numbered = [c for c in callbacks if not _writes_only(c)]
        self.noted: dict[str, Any] = {}
        base = keras.callbacks.Callback
        self.stops_in_epoch = any(
            getattr(type(c), hook) is not getattr(base, hook)
            for c in callbacks
            for hook in BATCH_HOOKS
        )
        folders = [f for f in map(redirect, self._callbacks) if f is not None]

        def upload(*_):
            for folder in folders:
                folder.upload()

        def end_epoch(epoch, logs):
            self.noted = dict(logs)
            upload()

        last = keras.callbacks.LambdaCallback(on_epoch_end=end_epoch, on_train_end=upload)
        self.list = keras.callbacks.CallbackList(
            [*self._callbacks, last],
            add_history=False,
            add_progbar=False,
            model=model,
            **params,
        )

    def numbers(self) -> str:
        """What they count and compare, as JSON."""
        return json.dumps([_numbers(c) for c in self._numbered])

    def put_numbers(self, text: str) -> None:
        """The inverse of :meth:`numbers`, for the same callbacks."""
        import keras

        found = json.loads(text)
        if len(found) != len(self._numbered):
            return
        for callback, (kind, numbers, operations) in zip(self._numbered, found, strict=True):
            if kind == type(callback).__name__:
                vars(callback).update(numbers)
                vars(callback).update({k: getattr(keras.ops, o) for k, o in operations.items()})


def _writes_only(callback) -> bool:
    """Whether a callback does nothing but write files."""
    return any(
        c.__name__ in _WRITERS and c.__module__.startswith("keras.") for c in type(callback).__mro__
    )


def _numbers(callback) -> tuple[str, dict, dict]:
    """The class of a callback, its numbers, and the operations of Keras that it compares by."""
    import keras

    own = {key: value for key, value in vars(callback).items() if not key.startswith("_")}
    numbers = {
        key: value
        for key, value in own.items()
        if isinstance(value, bool | int | float | str | None)
        and not (isinstance(value, float) and math.isnan(value))
    }
    operations = {
        key: value.__name__
        for key, value in own.items()
        if inspect.isfunction(value) and getattr(keras.ops, value.__name__, None) is value
    }
    return type(callback).__name__, numbers, operations
