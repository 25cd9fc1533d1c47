"""A fit in several processes, after which the model is as if it had been trained here."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np

from bigdl.common.environment import scratch_directory
from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration.structure import flatten
from bigdl.nano.tf.compiled import compile_arguments
from bigdl.nano.tf.training.backends import BACKENDS, check_backend
from bigdl.nano.tf.training.feeds import Feed, feed_of
from bigdl.nano.tf.travel import Parcel, packed, unpacked

__all__ = ["fit_in_processes", "processes_of", "take_home", "weights_of"]

_OF_EPOCHS = ("epochs", "initial_epoch", "validation_steps", "validation_freq")


def processes_of(num_processes: int | None, backend: str) -> Any:
    """The processes that a user asks for.

    Raises
    ------
    UsageError
        If the number or the backend is none.
    """
    from bigdl.nano.pytorch.training.processes import Processes

    check_backend(backend)
    return Processes.of(num_processes, BACKENDS[backend], None, None)


def fit_in_processes(model: Any, processes: Any, arguments: Mapping[str, Any]) -> Any:
    """Train a model in several processes.

    Parameters
    ----------
    model : keras.Model
        Compiled.
    processes : Processes
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
    from bigdl.nano.tf.training.shares import check_losses

    if not getattr(model, "compiled", False):
        raise UsageError("The model is not compiled; call compile() before fit()")
    check_losses(compile_arguments(model)["loss"])
    room = scratch_directory("bigdl-keras-fit-")
    try:
        feed, validation = _feeds(dict(arguments), room)
        _build(model, feed)
        callbacks = _callbacks(arguments["callbacks"])
        order = {
            "model": packed(model),
            "feed": feed,
            "validation": validation,
            "callbacks": _pickled(callbacks),
            "fit": {name: arguments[name] for name in _OF_EPOCHS},
            "verbose": 2 if arguments["verbose"] == "auto" else arguments["verbose"],
            "seed": int(np.random.randint(2**31 - 1)),
        }
        home = processes.run(_fit, processes.count, order)[0]
    finally:
        shutil.rmtree(room, ignore_errors=True)
    take_home(model, home["weights"], home["optimizer"])
    for callback, state in zip(callbacks, home["callbacks"], strict=True):
        vars(callback).update(pickle.loads(state))
    return _history(model, home)


def weights_of(model: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights of a model, and the state of its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    state = [np.asarray(each) for each in optimizer.variables] if optimizer else []
    return [np.asarray(each) for each in model.weights], state


def take_home(model: Any, weights: list[np.ndarray], state: list[np.ndarray]) -> None:
    """Give a model weights, and its optimizer a state."""
    model.set_weights(weights)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not state:
        return
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for variable, value in zip(optimizer.variables, state, strict=True):
        variable.assign(value)


def _feeds(arguments: dict[str, Any], room: Path) -> tuple[Feed, Feed | None]:
    x, y, weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    held_out = arguments["validation_data"]
    if arguments["validation_split"] and held_out is None:
        (x, y, weight), held_out = _split(x, y, weight, arguments["validation_split"])
    epochs = arguments["epochs"] - arguments["initial_epoch"]
    feed = feed_of(
        x,
        y,
        weight,
        batch_size=arguments["batch_size"],
        steps=arguments["steps_per_epoch"],
        epochs=epochs,
        shuffle=arguments["shuffle"],
        class_weight=arguments["class_weight"],
        folder=room,
    )
    if held_out is None:
        return feed, None
    parts = held_out if isinstance(held_out, (tuple, list)) else (held_out,)
    validation = feed_of(
        *(*parts, None, None)[:3],
        batch_size=arguments["validation_batch_size"] or arguments["batch_size"],
        steps=arguments["validation_steps"],
        epochs=1,
        shuffle=False,
        class_weight=None,
        folder=room,
        steps_argument="validation_steps",
    )
    # Each evaluation begins with the first batch, so nothing is repeated.
    return feed, replace(validation, steps=None)


def _split(x: Any, y: Any, weight: Any, fraction: float) -> tuple[tuple, tuple]:
    """The first rows for training and the last for validation, as Keras does."""
    leaves, structure = flatten((x, y, weight))
    if not leaves or not 0 < fraction < 1:
        raise UsageError("validation_split must be a number from 0 to 1, and x must hold arrays")
    first = int(np.floor(len(leaves[0]) * (1 - fraction)))
    parts = [np.asarray(leaf) for leaf in leaves]
    training = structure.rebuild([part[:first] for part in parts])
    return training, structure.rebuild([part[first:] for part in parts])


def _build(model: Any, feed: Feed) -> None:
    """Make the weights here, so that all processes begin with the same."""
    if not model.built:
        model(feed.some_rows()[0])


def _callbacks(given: Any) -> list:
    if given is None:
        return []
    if isinstance(given, keras.callbacks.CallbackList):
        raise UsageError("callbacks must be a list of callbacks, not a CallbackList")
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _pickled(callbacks: list) -> bytes:
    own = []
    for callback in callbacks:
        twin = type(callback).__new__(type(callback))
        vars(twin).update({k: v for k, v in vars(callback).items() if k != "_model"})
        vars(twin)["_model"] = None
        own.append(twin)
    try:
        return cloudpickle.dumps(own)
    except Exception as error:
        raise UsageError(
            f"The callbacks cannot be sent to another process: {one_line(error)}"
        ) from error


def _history(model: Any, home: Mapping[str, Any]) -> Any:
    history = keras.callbacks.History()
    history.set_model(model)
    history.set_params(home["params"])
    history.epoch, history.history = home["epochs"], home["history"]
    model.history = history
    model.stop_training = home["stopped"]
    return history


# What follows runs in the other processes.


def _fit(rank: int, count: int, order: Mapping[str, Any]) -> dict[str, Any] | None:
    from bigdl.nano.tf.training.baton import Baton
    from bigdl.nano.tf.training.group import Group
    from bigdl.nano.tf.training.shares import SharedTraining

    # Operations that draw random numbers, a shuffle of the user's say, do it alike everywhere.
    keras.utils.set_random_seed(order["seed"])
    parcel: Parcel = order["model"]
    model = unpacked(parcel)
    model.jit_compile = False  # XLA cannot call Python, which exchanges gradients
    group = Group(rank, count)
    feed, validation = order["feed"], order["validation"]
    _make_figures(model, feed)
    training = SharedTraining(model, group)
    training.take_part()
    callbacks = pickle.loads(order["callbacks"])
    baton = Baton(callbacks if rank == 0 else [], bool(callbacks), group, training)
    history = keras.Model.fit(
        model,
        feed.shares(group, order["seed"]),
        steps_per_epoch=feed.steps,
        shuffle=False,  # the feed has done it
        validation_data=validation and validation.shares(group, order["seed"]),
        callbacks=[baton],
        verbose=order["verbose"] if rank == 0 else 0,
        **order["fit"],
    )
    if rank:
        return None
    weights, state = weights_of(model)
    return {
        "weights": weights,
        "optimizer": state,
        "history": history.history,
        "epochs": history.epoch,
        "params": history.params,
        "stopped": bool(model.stop_training),
        "callbacks": [_state_of(callback) for callback in callbacks],
    }


def _make_figures(model: Any, feed: Feed) -> None:
    """Make the variables of losses and metrics, which a share's step has to know."""
    rows = feed.some_rows()
    model.test_on_batch(*rows)
    model.reset_metrics()
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _state_of(callback: Any) -> bytes:
    """Attributes of a callback that can go home."""
    kept = {}
    for name, value in vars(callback).items():
        if name == "_model":
            continue
        with suppress(Exception):  # open files and the like stay behind
            pickle.loads(cloudpickle.dumps(value))
            kept[name] = value
    return cloudpickle.dumps(kept)
