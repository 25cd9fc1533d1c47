"""Keras dataset and callback with which ``fit`` reads a TableLoader, on any Keras backend."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.common.storage import writing
from bigdl.data.loader import WEIGHT, TableLoader

require("keras", "tf")
import keras  # noqa: E402

__all__ = ["LoaderBackup", "TableDataset"]


@hide_frames
class TableDataset(keras.utils.PyDataset):
    """Keras ``PyDataset`` of a loader's batches, as ``(inputs, targets)``.

    The loader determines the order; ``fit(shuffle=)`` has no effect.

    Parameters
    ----------
    loader : TableLoader
        With ``last="pad"`` the column ``row_weight`` gives the sample weights. All batches then
        have one shape, so JAX compiles the step once.
    inputs, targets : str or sequence of str, optional
        One name gives an array, several give a dict. Without `targets` a batch has inputs only.
    weights : str, optional
        Column of sample weights.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from bigdl.data import TableLoader
    >>> from bigdl.data.keras import TableDataset
    >>> x = np.linspace(0, 1, 100, dtype="float32")
    >>> loader = TableLoader({"x": x[:, None], "y": 2 * x}, batch_size=20, format="numpy")
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> history = model.fit(TableDataset(loader, "x", "y"), epochs=2, verbose=0)
    >>> len(history.history["loss"]), loader.epoch
    (2, 2)
    """

    def __init__(
        self,
        loader: TableLoader,
        inputs: str | Sequence[str],
        targets: str | Sequence[str] | None = None,
        weights: str | None = None,
    ):
        super().__init__(workers=1)
        self.loader = loader
        self._inputs, self._targets = inputs, targets
        self._weights = WEIGHT if weights is None and loader.last == "pad" else weights
        if self._weights is not None and targets is None:
            self._weights = None  # Keras accepts weights only together with targets
        names = {each.name for each in loader.fields} | {WEIGHT}
        for name in [*_as_list(inputs), *_as_list(targets), *_as_list(weights)]:
            if name not in names:
                raise UsageError(
                    f"The loader has no column '{name}'; it has {sorted(names - {WEIGHT})}",
                    code="column-missing",
                    column=name,
                )
        self._batches: Any = None
        self._is_in_epoch = False
        self._remaining = 0
        self._is_first = True
        self._begin: dict[str, Any] = {}

    @property
    def num_batches(self) -> int:
        """Number of steps in an epoch, or of the remaining steps in a resumed epoch."""
        # TensorFlow and JAX prefetch up to this number of batches; torch does not, and caches the
        # number
        reads_ahead = keras.backend.backend() != "torch"
        return self._remaining if self._is_in_epoch and reads_ahead else _Steps(self)

    def on_epoch_begin(self) -> None:
        self._begin = self.loader.state_dict()
        if self._is_first and self._begin["next"] and keras.backend.backend() == "jax":
            raise UsageError(
                "With JAX, only the callback LoaderBackup can restore a loader within an epoch; "
                "pass it to fit(callbacks=)",
                code="state",
            )
        self._batches = iter(self.loader)
        self._remaining = self._batches.remaining
        self._is_in_epoch = True

    def on_epoch_end(self) -> None:
        is_probe = (
            self._is_first
            and self._batches is not None
            and self._remaining - self._batches.remaining <= 1
        )
        if is_probe and self._batches.remaining:
            # Keras read one batch to build the model; restart the epoch
            self.loader.load_state_dict(self._begin)
        self._is_first = False
        self._batches = None
        self._is_in_epoch = False

    def __getitem__(self, index: int) -> tuple:
        if not self._is_in_epoch:
            return self._to_keras_batch(self.loader.example(index))  # Keras reads the shapes
        return self._to_keras_batch(next(self._batches))

    def _to_keras_batch(self, batch: dict[str, Any]) -> tuple:
        parts = [_select(batch, self._inputs)]
        if self._targets is not None:
            parts.append(_select(batch, self._targets))
        if self._weights is not None:
            parts.append(_select(batch, self._weights))
        return tuple(parts)


class _Steps(int):
    """Number of steps per epoch; ``<=`` uses the number of remaining steps in a resumed epoch.

    Keras reads the number once and compares with it before each step. If the data ends earlier,
    TensorFlow's training function counts an optimizer step that did not happen.
    """

    _data: TableDataset

    def __new__(cls, data: TableDataset) -> _Steps:
        steps = super().__new__(cls, len(data.loader))
        steps._data = data
        return steps

    def __le__(self, made: int) -> bool:
        return made >= (self._data._remaining if self._data._is_in_epoch else int(self))


def _as_list(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _select(
    batch: dict[str, Any], names: str | Sequence[str]
) -> np.ndarray | dict[str, np.ndarray]:
    if isinstance(names, str):
        return np.asarray(batch[names])
    return {name: np.asarray(batch[name]) for name in names}


class LoaderBackup(keras.callbacks.Callback):
    """Callback that saves weights, optimizer and loader state and resumes an interrupted ``fit``.

    Use it in place of ``keras.callbacks.BackupAndRestore``, which restarts the interrupted epoch.
    Call ``fit`` with the same arguments after the interruption. Metrics of the interrupted epoch
    cover only its remaining steps.

    Parameters
    ----------
    data : TableDataset
        Dataset that is passed to ``fit``.
    backup_dir : str or path-like
        Folder of the backup.
    save_freq : "epoch" or int, default "epoch"
        An integer n saves every n batches as well as after each epoch.
    delete_checkpoint : bool, default True
        Remove the folder at the end of ``fit``.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from bigdl.data import TableLoader
    >>> from bigdl.data.keras import LoaderBackup, TableDataset
    >>> x = np.linspace(0, 1, 100, dtype="float32")
    >>> loader = TableLoader({"x": x[:, None], "y": 2 * x}, batch_size=20, format="numpy")
    >>> data = TableDataset(loader, "x", "y")
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> backup = LoaderBackup(data, "backup", save_freq=2)
    >>> history = model.fit(data, epochs=2, verbose=0, callbacks=[backup])
    """

    def __init__(
        self,
        data: TableDataset,
        backup_dir: str | os.PathLike,
        save_freq: int | str = "epoch",
        delete_checkpoint: bool = True,
    ):
        super().__init__()
        if not isinstance(data, TableDataset):
            raise UsageError(
                f"data must be the TableDataset that is passed to fit, got {type(data).__name__}",
                code="argument-type",
                argument="data",
            )
        self._every = None if save_freq == "epoch" else check_positive("save_freq", save_freq)
        self._data, self._folder = data, Path(backup_dir)
        self._delete, self._epoch, self._count = delete_checkpoint, 0, 0
        self._begin: dict[str, Any] = {}

    @property
    def _pointer(self) -> Path:
        return self._folder / "latest.json"

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not self._pointer.exists():
            return
        saved = json.loads(self._pointer.read_text(encoding="utf-8"))
        model = self.model
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(self._folder / saved["weights"])
        self._data.loader.load_state_dict(saved["loader"])
        self._count = saved["count"]
        model._initial_epoch = saved["epoch"]

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch
        self._begin = self._data.loader.state_dict()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._every is not None and (batch + 1) % self._every == 0:
            # TensorFlow prefetches, so the loader may be ahead of the training loop
            self._save(self._epoch, self._data.loader.state_after(self._begin, batch + 1))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._save(epoch + 1, self._data.loader.state_dict())

    def on_train_end(self, logs: dict | None = None) -> None:
        if self._delete:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _save(self, epoch: int, state: dict[str, Any]) -> None:
        """Write the weights, then atomically update the file that points to them."""
        self._count += 1
        name = f"backup-{self._count}.weights.h5"
        with writing("The backup", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self.model.save_weights(self._folder / name, overwrite=True)
            facts = {"weights": name, "epoch": epoch, "count": self._count, "loader": state}
            temporary = self._folder / "latest.json.new"
            temporary.write_text(json.dumps(facts), encoding="utf-8")
            os.replace(temporary, self._pointer)
        for other in self._folder.glob("backup-*.weights.h5"):
            if other.name != name:
                other.unlink(missing_ok=True)
