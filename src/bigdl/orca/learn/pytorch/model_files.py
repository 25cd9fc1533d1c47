"""The model of an Estimator and its files.

A file holds a state dict, the full state of BigDL 2.x (epoch, models, optimizers, schedulers), or a
pickled module.  A folder of ``model_dir`` (see :mod:`bigdl.training.checkpoint`) is read too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.arguments import take_old
from bigdl.orca.learn.estimator import BaseEstimator
from bigdl.orca.learn.pytorch.state import load_into
from bigdl.training.checkpoint import (
    Snapshot,
    find_checkpoint,
    read_bytes,
    read_checkpoint,
    write_bytes,
)
from bigdl.training.position import Position
from bigdl.training.state import dumps, isolated_rng, loads

__all__ = ["ModelFiles"]

_NO_MODEL = "Must provide callable function for model_creator or load a saved model."
_FULL = (("optimizers", "optimizer.pt"), ("schedulers", "scheduler.pt"))


class ModelFiles(BaseEstimator):
    """The verbs of an Estimator that are about its model alone.

    Parameters
    ----------
    parts : ModelParts
    training : Training
        What is trained so far.
    """

    def __init__(self, parts, training):
        self._parts = parts
        self._training = training
        self._saved: set[str] = set()  # digests of the files that this Estimator wrote

    def get_model(self):
        """The trained model, a copy of its own on the driver.

        Returns
        -------
        torch.nn.Module
        """
        self._need_model()
        with isolated_rng(0):
            model = self._parts.build_model()
        load_into(model, self._training.weights(self._parts))
        return model

    def get_state_dict(self) -> dict:
        """``epoch`` and the states of ``models``, ``optimizers`` and ``schedulers``, as lists."""
        return _full_state(self.get_model(), self._training.snapshot)

    def load_state_dict(self, state_dict: dict, blocking: bool = True) -> None:
        """Take over what :meth:`get_state_dict` gave, or the state dict of a module.

        Parameters
        ----------
        state_dict : dict
        blocking : bool
            Accepted for compatibility.
        """
        if not isinstance(state_dict, dict):
            raise UsageError(
                f"state_dict should be a dict such as get_state_dict gives, got "
                f"{type(state_dict).__name__}"
            )
        self._need_model()
        self._take(_snapshot_of(state_dict), self._parts, "weights in state_dict")

    def save(self, path: str | None = None, entire: bool = False, **old) -> str:
        """Write the model.

        Parameters
        ----------
        path : str
            A file; a local path or fsspec URL.
        entire : bool
            Pickle the whole module instead of its state dict.

        Returns
        -------
        str
            `path`.
        """
        path = _path("save", path, old)
        model = self.get_model()
        try:
            data = dumps(model if entire else model.state_dict())
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"The module cannot be pickled ({error}); define its class in a module, or save "
                "its weights with entire=False"
            ) from error
        write_bytes(path, data)
        self._saved.add(hashlib.sha256(data).hexdigest())
        return path

    def load(self, path: str | None = None, *, trust: bool = False, **old) -> None:
        """Read what :meth:`save` or :meth:`save_checkpoint` wrote, or a checkpoint's folder.

        Parameters
        ----------
        path : str
        trust : bool
            An entire module is a pickle, which can run any code: it is read only if this Estimator
            wrote it or with ``trust=True``.

        Raises
        ------
        UsageError
            If the file cannot be read, does not fit the model, or is not trusted.
        """

        def is_trusted(data):
            return trust or hashlib.sha256(data).hexdigest() in self._saved

        path = _path("load", path, old, ("path", "trust"))
        snapshot, module = _read_model(path, is_trusted)
        parts = self._parts
        if module is not None:
            parts = dataclasses.replace(parts, model=module)
        elif parts.model is None:
            raise UsageError(_NO_MODEL)
        self._take(snapshot, parts, f"weights in {path!r}")

    def _take(self, snapshot, parts, what):
        with isolated_rng(0):
            model = parts.build_model()
        load_into(model, snapshot.files["model.pt"], what)
        self._parts = parts
        self._training.take(snapshot)

    def save_checkpoint(self, path: str | None = None, **old) -> None:
        """Write the full state: model, optimizer, scheduler and epoch."""
        write_bytes(_path("save_checkpoint", path, old), dumps(self.get_state_dict()))

    def load_checkpoint(self, path: str | None = None, **old) -> None:
        """Read what :meth:`save_checkpoint` wrote, or a checkpoint's folder in ``model_dir``."""
        self.load(_path("load_checkpoint", path, old))

    def load_orca_checkpoint(
        self, path: str, version: int | None = None, prefix: str | None = None
    ) -> None:
        """Take over a checkpoint below a ``model_dir``.

        Parameters
        ----------
        path : str
            A ``model_dir``, or the folder of one run in it.
        version : int, optional
            Optimizer steps after which it was taken; default the newest.
        prefix : str, optional
            Accepted for compatibility: a checkpoint holds the optimizer.

        Raises
        ------
        UsageError
            If there is no such checkpoint.
        """
        self._need_model()
        self._take(find_checkpoint(path, version), self._parts, f"weights in {path!r}")

    def _need_model(self):
        if self._parts.model is None:
            raise UsageError(_NO_MODEL)


def _full_state(model, snapshot: Snapshot | None) -> dict[str, Any]:
    """Epoch and the states of model, optimizer and scheduler, as BigDL 2.x gave them."""
    files = {} if snapshot is None else snapshot.files
    epoch = 0 if snapshot is None else snapshot.position.counted
    state: dict[str, Any] = {"epoch": epoch, "models": [model.state_dict()]}
    for key, file in _FULL:
        if file in files:
            state[key] = [loads(files[file])]
    return state


def _read_model(path: str, is_trusted: Callable[[bytes], bool]) -> tuple[Snapshot, Any]:
    """Read any of the files.

    Parameters
    ----------
    path : str
        A local path or fsspec URL.
    is_trusted : callable
        Whether a file of these bytes may run code, as a pickled module can.

    Returns
    -------
    snapshot : Snapshot
    module : torch.nn.Module or None
        If the file held an entire module.
    """
    import torch

    snapshot = read_checkpoint(path)
    if snapshot is not None:
        return snapshot, None
    found, module = _unpickle(path, read_bytes(path), is_trusted), None
    if isinstance(found, torch.nn.Module):
        found, module = found.state_dict(), found
    if not isinstance(found, dict):
        raise UsageError(
            f"{path!r} holds a {type(found).__name__}; expected a state dict, a full state or an "
            "entire module"
        )
    return _snapshot_of(found), module


def _snapshot_of(found: dict) -> Snapshot:
    """The snapshot that a state dict or a full state stands for."""
    position, files = Position(), {}
    if isinstance(found.get("models"), list) and found["models"]:
        position.epoch = int(found.get("epoch", 0))
        for key, file in _FULL:
            if found.get(key):
                files[file] = dumps(found[key][0])
        found = found["models"][0]
    files["model.pt"] = dumps(found)
    return Snapshot(position.to_json(), files)


def _path(verb, path, old, known=("path",)) -> str:
    """The location that a call names, by either of its names."""
    path = take_old(verb, old, {"model_path": "path"}, known).get("path", path)
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"{verb} needs the path of a file, got {path!r}")
    return os.fspath(path)


def _unpickle(path, data, is_trusted):
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not data.startswith((b"PK", b"\x80")):  # neither torch's archive nor a pickle
            raise _damaged(path, "its content is something else") from error
        if not is_trusted(data):
            raise UsageError(
                f"{path!r} holds more than weights (an entire module, perhaps); loading it can run "
                "any code, so pass trust=True if you know where it comes from"
            ) from error
    except Exception as error:  # a damaged archive shows in many ways
        raise _damaged(path, error) from error
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the code in it raises
        raise _damaged(path, error) from error


def _damaged(path, reason):
    text = " ".join(str(reason).split())
    return UsageError(f"{path!r} is not a file that torch can load: {text}")
