"""A fit in several processes, after which the model is as if it had been trained here."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import keras
import numpy as np

from bigdl.common.environment import scratch_directory
from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration.structure import flatten
from bigdl.nano.tf.serialization import PackedModel, packed, unpacked
from bigdl.nano.tf.training.feeds import Feed, feed_of
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.worker import Uplink, Worker
from bigdl.training.checkpoint import Snapshot
from bigdl.training.keras.callbacks import Rank0CallbackBridge, as_callbacks
from bigdl.training.keras.data import EvaluationSettings
from bigdl.training.keras.loop import KerasFitSettings, KerasLoop
from bigdl.training.keras.reducer import loss_divisor
from bigdl.training.keras.state import put_optimizers, put_weights
from bigdl.training.position import Goal

if TYPE_CHECKING:
    from bigdl.nano.pytorch.training.options import TrainingOptions

_BACKENDS = {"multiprocessing": "subprocess", "ray": "ray"}


def processes_of(num_processes: int | None, backend: str) -> TrainingOptions:
    """Return the processes that a user asks for.

    Raises
    ------
    UsageError
        If the number or the backend is none.
    """
    from bigdl.nano.pytorch.training.options import TrainingOptions

    if backend not in _BACKENDS:
        raise UsageError(
            f"Backend {backend} is not implemented. Choose one of {', '.join(_BACKENDS)}."
        )
    return TrainingOptions(num_processes, _BACKENDS[backend])


def fit_in_processes(
    model: keras.Model, processes: TrainingOptions, arguments: Mapping[str, Any]
) -> keras.callbacks.History:
    """Train a model in several processes.

    Parameters
    ----------
    model : keras.Model
        Compiled.
    processes : TrainingOptions
    arguments : mapping
        Of ``keras.Model.fit``.

    Returns
    -------
    keras.callbacks.History

    Raises
    ------
    UsageError
        If the model, the data or a callback cannot be sent, or an argument makes no sense.
    """
    from bigdl.nano.pytorch.training.processes import run_processes

    if not getattr(model, "compiled", False):
        raise UsageError("The model is not compiled; call compile() before fit()")
    loss_divisor(model)
    verbose = 2 if arguments["verbose"] == "auto" else arguments["verbose"]
    folder = scratch_directory("bigdl-keras-fit-")
    try:
        feeds = _feeds(arguments, folder)
        feed = feeds["data"]
        if not model.built:  # all processes begin with the same weights
            model(feed.row[0])
        callbacks = _callbacks(arguments["callbacks"])
        settings = KerasFitSettings(
            goal=Goal(epochs=arguments["epochs"] - arguments["initial_epoch"]),
            batch_size=0,  # keeps gradients of embeddings sparse
            seed=int(np.random.randint(2**31 - 1)),
            validation=EvaluationSettings(0, None, None, arguments["validation_steps"]),
            initial_epoch=arguments["initial_epoch"],
            steps_per_epoch=feed.steps,
            validation_freq=arguments["validation_freq"],
            class_weight=arguments["class_weight"] or None,
            verbose=verbose,
            trigger=None,
        )
        job = _FitJob(packed(model), feeds, _pickled(callbacks), settings)
        result = run_processes(processes, _fit, processes.count, job)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    snapshot: Snapshot = result["snapshot"]
    put_weights(model, snapshot.files["model.pt"])
    if model.optimizer is not None:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        put_optimizers(model, snapshot.files["optimizer.pt"])
    for callback, attributes in zip(callbacks, result["callbacks"], strict=True):
        vars(callback).update(pickle.loads(attributes))
    return _history(model, snapshot, settings, stopped=result["stopped"])


def _feeds(arguments: Mapping[str, Any], folder: Path) -> dict[str, Feed]:
    x, y, weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    held_out = arguments["validation_data"]
    if arguments["validation_split"] and held_out is None:
        (x, y, weight), held_out = _split(x, y, weight, arguments["validation_split"])
    feeds: dict[str, Feed] = {}
    feeds["data"] = feed_of(
        x,
        y,
        weight,
        folder=folder,
        batch_size=arguments["batch_size"],
        steps=arguments["steps_per_epoch"],
        epochs=arguments["epochs"] - arguments["initial_epoch"],
        shuffle=arguments["shuffle"],
    )
    if held_out is None:
        return feeds
    parts = held_out if isinstance(held_out, (tuple, list)) else (held_out,)
    feeds["validation"] = feed_of(
        *parts,
        folder=folder,
        batch_size=arguments["validation_batch_size"] or arguments["batch_size"],
        steps=arguments["validation_steps"],
        steps_argument="validation_steps",
    )
    return feeds


def _split(x: Any, y: Any, weight: Any, fraction: float) -> tuple[tuple, tuple]:
    """Return the first rows for training and the last for validation, as Keras does."""
    leaves, structure = flatten((x, y, weight))
    if not leaves or not 0 < fraction < 1:
        raise UsageError("validation_split must be a number from 0 to 1, and x must hold arrays")
    first = int(np.floor(len(leaves[0]) * (1 - fraction)))
    parts = [np.asarray(leaf) for leaf in leaves]
    training = structure.rebuild([part[:first] for part in parts])
    return training, structure.rebuild([part[first:] for part in parts])


def _callbacks(callbacks: Any) -> list:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UsageError("callbacks must be a list of callbacks, not a CallbackList")
    return as_callbacks(callbacks)


def _pickled(callbacks: list) -> bytes:
    copies = [copy.copy(callback) for callback in callbacks]
    for each in copies:
        each._model = None
    try:
        return cloudpickle.dumps(copies)
    except Exception as error:
        raise UsageError(
            f"The callbacks cannot be sent to another process: {one_line(error)}"
        ) from error


def _history(model, snapshot, settings, *, stopped: bool) -> keras.callbacks.History:
    entries = snapshot.position.figures(0, snapshot.position.counted)
    history = keras.callbacks.History()
    history.set_model(model)
    history.set_params(
        {
            "verbose": settings.verbose,
            "epochs": settings.initial_epoch + settings.goal.epochs,
            "steps": entries[-1]["steps"] if entries else None,
        }
    )
    history.epoch = [settings.initial_epoch + entry["epoch"] - 1 for entry in entries]
    history.history = {}
    for entry in entries:
        for name, value in entry["logs"].items():
            history.history.setdefault(name, []).append(value)
    model.history = history
    model.stop_training = stopped
    return history


# -- in the other processes -----------------------------------------------------------------------


@dataclass
class _FitJob:
    """A fit, as sent to the processes.

    Attributes
    ----------
    model : PackedModel
    feeds : dict of str to Feed
        ``data`` and perhaps ``validation``.
    callbacks : bytes
        Pickled.
    settings : KerasFitSettings
    """

    model: PackedModel
    feeds: Mapping[str, Feed]
    callbacks: bytes
    settings: KerasFitSettings

    def build(self, *, training: bool) -> keras.Model:
        """Return the model."""
        return unpacked(self.model)


class _ProcessLoop(KerasLoop):
    """The loop of one process; callbacks run in that of rank 0 for all."""

    def _open(self, shard):
        return shard.open(self.sync, self.settings.seed)

    def _open_callbacks(self, callbacks, **params):
        return Rank0CallbackBridge(callbacks, self.model, self.sync, **params)


def _fit(rank: int, count: int, job: _FitJob) -> dict[str, Any] | None:
    uplink = Uplink()
    worker = Worker(rank, count, shards=dict(job.feeds), uplink=uplink)
    callbacks = pickle.loads(job.callbacks)
    loop = _ProcessLoop(worker, TorchDistributedSync(worker), job, job.settings, callbacks, {})
    loop.fit()
    if rank:
        return None
    return {
        "snapshot": Snapshot.unpack(*uplink.messages["final"]),
        "stopped": bool(loop.model.stop_training),
        "callbacks": [_attributes_of(callback) for callback in callbacks],
    }


def _attributes_of(callback: Any) -> bytes:
    """Return the attributes of a callback that can be pickled."""
    kept = {}
    for name, value in vars(callback).items():
        if name == "_model":
            continue
        with suppress(Exception):  # not open files and the like
            pickle.loads(cloudpickle.dumps(value))
            kept[name] = value
    return cloudpickle.dumps(kept)
