"""Keras callbacks in a worker.

Every worker calls them, so that all workers make the same decisions (to stop, or a learning rate);
epoch metrics are the same on all ranks.  Callbacks that only write files run on rank 0.
Checkpoints include the counters of callbacks.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.storage import RemoteFolder
from bigdl.training.keras.state import share_state

if TYPE_CHECKING:
    import keras

    from bigdl.runtime.collectives.base import GradientSync
else:
    keras = LazyModule("keras", "tf")


_FILES, _FOLDERS = ("filepath", "filename"), ("log_dir", "backup_dir")
_WRITERS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore", "RemoteMonitor")

BATCH_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
)
"""Hooks that Keras calls for each training batch."""


def as_callbacks(callbacks: object) -> list[Any]:
    """Return a new list of the callbacks that a user passed.

    Raises
    ------
    UsageError
        If it is neither None, a callback, nor a list or tuple of callbacks.
    """
    if callbacks is None:
        return []
    listed = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in listed:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UsageError(
                f"callbacks must be a list of keras.callbacks.Callback, got {callback!r}",
                code="argument-type",
                argument="callbacks",
            )
    return listed


class WorkerCallbacks:
    """Callbacks of one worker.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
    model : keras.Model
    rank : int
    **params
        Parameters that Keras passes to callbacks: ``epochs``, ``steps``, ``verbose``.

    Attributes
    ----------
    stops_in_epoch : bool
        Whether a callback of any rank may stop the training after a batch.
    is_empty : bool
        Whether no rank has callbacks.
    logs : dict
        Metrics of the last epoch, with additions of callbacks, such as a learning rate.
    """

    def __init__(self, callbacks: Sequence[Any], model: keras.Model, rank: int, **params: Any):
        self._callbacks = self._on_rank(callbacks, rank)
        self._numbered = [c for c in callbacks if not _writes_only(c)]
        self.logs: dict[str, Any] = {}
        self.is_empty = not callbacks
        base = keras.callbacks.Callback
        self.stops_in_epoch = any(
            getattr(type(c), hook) is not getattr(base, hook)
            for c in callbacks
            for hook in BATCH_HOOKS
        )
        folders = [f for f in map(_redirect, self._callbacks) if f is not None]

        def upload(*_: object) -> None:
            for folder in folders:
                folder.upload()

        def end_epoch(epoch: int, logs: dict[str, Any]) -> None:
            self.logs = dict(logs)
            upload()

        last = keras.callbacks.LambdaCallback(on_epoch_end=end_epoch, on_train_end=upload)
        self.list = keras.callbacks.CallbackList(
            [*self._callbacks, last],
            add_history=False,
            add_progbar=False,
            model=model,
            **params,
        )

    def _on_rank(self, callbacks: Sequence[Any], rank: int) -> list[Any]:
        """Return the callbacks that run on a rank."""
        return [c for c in callbacks if rank == 0 or not _writes_only(c)]

    def numbers(self) -> str:
        """Serialize the counters and comparison functions of the callbacks to JSON."""
        return json.dumps([_numbers(c) for c in self._numbered])

    def put_numbers(self, text: str) -> None:
        """Restore the counters that :meth:`numbers` serialized, if the callbacks match."""
        kept = json.loads(text)
        if len(kept) != len(self._numbered):
            return
        for callback, (name, numbers, operations) in zip(self._numbered, kept, strict=True):
            if name == type(callback).__name__:
                vars(callback).update(numbers)
                vars(callback).update({k: getattr(keras.ops, o) for k, o in operations.items()})


class Rank0CallbackBridge(WorkerCallbacks):
    """Callbacks that run only on rank 0 and whose changes are broadcast to all ranks.

    At the start of the fit and of each epoch, rank 0 broadcasts its weights and optimizer state,
    including the learning rate. Rank 0 also has the history and the progress bar.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        Callbacks; the same on all ranks.
    model : keras.Model
    sync : GradientSync
    **params
        See :class:`WorkerCallbacks`.
    """

    def __init__(
        self, callbacks: Sequence[Any], model: keras.Model, sync: GradientSync, **params: Any
    ):
        self._model, self._sync, self._verbose = model, sync, params["verbose"]
        super().__init__(callbacks, model, sync.rank, **params)

    def _on_rank(self, callbacks: Sequence[Any], rank: int) -> list[Any]:
        def share(*_: object) -> None:
            share_state(self._model, self._sync)

        bridge = [keras.callbacks.LambdaCallback(on_train_begin=share, on_epoch_begin=share)]
        bridge = bridge if callbacks else []
        if rank:
            return bridge
        self._model.history = keras.callbacks.History()
        bar = [keras.callbacks.ProgbarLogger()] if self._verbose else []
        return [*callbacks, *bridge, self._model.history, *bar]


def _writes_only(callback: object) -> bool:
    """Return True for a callback that only writes, such as log files."""
    return getattr(callback, "rank0_only", False) or any(
        c.__name__ in _WRITERS and c.__module__.startswith("keras.") for c in type(callback).__mro__
    )


def _numbers(callback: object) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a callback's class name, scalar attributes and ``keras.ops`` functions."""
    attributes = {key: value for key, value in vars(callback).items() if not key.startswith("_")}
    numbers = {
        key: value
        for key, value in attributes.items()
        if isinstance(value, bool | int | float | str | None)
        and not (isinstance(value, float) and math.isnan(value))
    }
    operations = {
        key: value.__name__
        for key, value in attributes.items()
        if inspect.isfunction(value)
        and cast("Any", getattr(keras.ops, value.__name__, None)) is value
    }
    return type(callback).__name__, numbers, operations


def _redirect(callback: object) -> RemoteFolder | None:
    """Redirect a callback that writes to a URL to a local folder.

    Returns
    -------
    RemoteFolder or None
        None if the callback writes locally.
    """
    for attribute in (*_FILES, *_FOLDERS):
        url = getattr(callback, attribute, None)
        if isinstance(url, str) and "://" in url:
            parent, name = posixpath.split(url) if attribute in _FILES else (url, "")
            folder = RemoteFolder(parent)
            setattr(callback, attribute, os.path.join(folder.path, name))
            return folder
    return None
