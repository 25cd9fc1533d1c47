"""The model of a Keras Estimator and its files.

A file is what Keras writes (``.keras``, ``.h5``, ``.weights.h5``), a folder with a SavedModel and a
``model.keras`` beside it, a checkpoint of :meth:`KerasFiles.save_checkpoint`, or a folder of
``model_dir`` (see :mod:`bigdl.orca.learn.checkpoint`).
"""

from __future__ import annotations

import os
import posixpath
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.checkpoint import Snapshot, read_bytes, read_checkpoint, write_bytes
from bigdl.orca.learn.estimator import BaseEstimator
from bigdl.orca.learn.position import Position
from bigdl.orca.learn.state import dumps, loads
from bigdl.orca.learn.tf2.data import Assembly, made_up
from bigdl.orca.learn.tf2.runtime import backend_of_program
from bigdl.orca.learn.tf2.shipping import call_on
from bigdl.orca.learn.tf2.state import dump_optimizers, dump_weights, put_optimizers, put_weights

__all__ = ["KerasFiles"]

_WHOLE = "model.keras"


class KerasFiles(BaseEstimator):
    """The verbs of an Estimator that are about its model alone.

    Parameters
    ----------
    parts : KerasParts
    training : KerasTraining
        What is trained so far.
    """

    def __init__(self, parts, training):
        self._parts, self._training = parts, training

    def get_model(self, sample_input: Any = None, set_weights: bool = True):
        """The trained model, a copy of its own on the driver, with its optimizer's state.

        Parameters
        ----------
        sample_input : array, or tuple or dict of arrays, optional
            A row for a subclassed model that has been fed by a tf.data.Dataset: only inputs of
            other kinds are remembered.
        set_weights : bool
            False gives the model with the weights that the creator gives it.

        Returns
        -------
        keras.Model
        """
        return self._model(sample_input, set_weights=set_weights)

    def _model(self, sample_input=None, *, set_weights=True, with_optimizer=True):
        self._parts.need()
        model = self._parts.build_on_driver(self._training.seed)
        snapshot = self._training.snapshot
        if snapshot is None or not set_weights:
            return model
        if not model.built:
            call_on(model, self._a_row(snapshot) if sample_input is None else sample_input)
        put_weights(model, snapshot.files["model.pt"])
        data = snapshot.files.get("optimizer.pt")
        if data is not None and with_optimizer and model.compiled and model.optimizer is not None:
            model.optimizer.build(model.trainable_variables)
            put_optimizers(model, data)
        return model

    def _a_row(self, snapshot):
        inputs = snapshot.manifest.get("inputs")
        if inputs is None:
            raise UsageError(
                "Failed to set model weights, please provide real tensor data for the model: pass "
                "a row as sample_input"
            )
        *features, _ = made_up(inputs, [])
        as_arrays = [
            {k: np.asarray(v) for k, v in f.items()} if isinstance(f, dict) else np.asarray(f)
            for f in features
        ]
        return Assembly().inputs(as_arrays)

    # -- whole models ----------------------------------------------------------------------------

    def save(
        self,
        filepath: str,
        overwrite: bool = True,
        include_optimizer: bool = True,
        save_format: str | None = None,
        signatures: Any = None,
        options: Any = None,
    ) -> str:
        """Write the whole model.

        Parameters
        ----------
        filepath : str
            A local path or fsspec URL. ``*.keras`` and ``*.h5`` are files of Keras; any other name
            becomes a folder with a SavedModel for serving and the whole model beside it.
        overwrite : bool
            False refuses a path that exists.
        include_optimizer : bool
            Whether the optimizer's state is written.
        save_format : str, optional
            ``"h5"``, ``"keras"`` or ``"tf"``, where the name does not tell.
        signatures, options
            Accepted for compatibility: a SavedModel has the signature ``serve``.

        Returns
        -------
        str
            `filepath`.
        """
        filepath = _path("save", filepath)
        if save_format not in (None, "h5", "keras", "tf"):
            raise UsageError(f'save_format should be "keras", "h5" or "tf", got {save_format!r}')
        _check_free(filepath, overwrite)
        model = self._model(with_optimizer=include_optimizer)
        suffix = {"h5": ".h5", "keras": ".keras"}.get(save_format or "") or _suffix(filepath)
        if suffix in (".keras", ".h5", ".hdf5"):
            write_bytes(filepath, _whole(model, suffix))
            return filepath
        with tempfile.TemporaryDirectory() as folder:
            if backend_of_program() == "tensorflow" and model.built:
                model.export(folder, verbose=False)
            Path(folder, _WHOLE).write_bytes(_whole(model, ".keras"))
            _upload(folder, filepath)
        return filepath

    def load(
        self,
        filepath: str,
        custom_objects: dict[str, Any] | None = None,
        compile: bool = True,
        options: Any = None,
        *,
        trust: bool = False,
    ) -> None:
        """Read a whole model that :meth:`save` or Keras wrote; it takes the creator's place.

        Parameters
        ----------
        filepath : str
        custom_objects : dict, optional
            Classes and functions that the file names.
        compile : bool
            Compile it as it was.
        options
            Accepted for compatibility.
        trust : bool
            Run code that the file may hold, such as a Lambda layer's.

        Raises
        ------
        UsageError
            If the file cannot be read.
        """
        import keras

        filepath = _path("load", filepath)
        where = filepath if _suffix(filepath) else posixpath.join(filepath, _WHOLE)
        data = read_bytes(where)
        with tempfile.TemporaryDirectory() as folder:
            suffix = ".h5" if data.startswith(b"\x89HDF") else ".keras"
            local = Path(folder, "model" + suffix)
            local.write_bytes(data)
            objects = {**(_short_names() if suffix == ".h5" else {}), **(custom_objects or {})}
            try:
                model = keras.saving.load_model(
                    local, custom_objects=objects, compile=compile, safe_mode=not trust
                )
                if suffix == ".h5" and model.compiled:
                    # from HDF5 Keras builds the optimizer for none of the layers' weights
                    model.compile_from_config(model.get_compile_config())
            except Exception as error:  # a file of something else shows in many ways
                text = " ".join(str(error).split())[:600]
                raise UsageError(
                    f"{filepath!r} is not a model that can be loaded: {text}"
                ) from error
        self._parts = self._parts.with_instance(model, custom_objects)
        self._training.take(_snapshot_of(model))

    # -- weights ---------------------------------------------------------------------------------

    def save_weights(
        self, filepath: str, overwrite: bool = True, save_format: str | None = None
    ) -> str:
        """Write the weights alone, in Keras's own format whatever the name is.

        Parameters
        ----------
        filepath : str
            A local path or fsspec URL.
        overwrite : bool
        save_format : str, optional
            Accepted for compatibility.

        Returns
        -------
        str
            `filepath`.
        """
        filepath = _path("save_weights", filepath)
        _check_free(filepath, overwrite)
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, "model.weights.h5")
            self._model(with_optimizer=False).save_weights(local)
            write_bytes(filepath, local.read_bytes())
        return filepath

    def load_weights(self, filepath: str, by_name: bool = False) -> None:
        """Read weights that :meth:`save_weights` or Keras wrote; the optimizer starts anew.

        Parameters
        ----------
        filepath : str
        by_name : bool
            Take the layers of equal names from a ``.h5`` file of Keras 2.

        Raises
        ------
        UsageError
            If the file cannot be read or is of another model.
        """
        import h5py

        filepath = _path("load_weights", filepath)
        data = read_bytes(filepath)
        model = self.get_model()
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.h5")
            probe.write_bytes(data)
            try:
                with h5py.File(probe) as file:
                    is_old = "layer_names" in file.attrs
                local = Path(folder, "old.h5" if is_old else "model.weights.h5")
                probe.rename(local)
                model.load_weights(local, **({"by_name": True} if by_name and is_old else {}))
            except Exception as error:
                text = " ".join(str(error).split())[:600]
                raise UsageError(f"The weights in {filepath!r} cannot be loaded: {text}") from error
        self._training.take(
            Snapshot(self._training.position.to_json(), {"model.pt": dump_weights(model)})
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(self, path: str) -> None:
        """Write weights, the optimizer's state and the number of epochs."""
        model = self.get_model()
        state = {
            "epoch": self._training.position.counted,
            "model": loads(dump_weights(model)),
            "optimizer": loads(dump_optimizers(model)),
        }
        write_bytes(_path("save_checkpoint", path), dumps(state))

    def load_checkpoint(self, path: str) -> None:
        """Read what :meth:`save_checkpoint` wrote, or a checkpoint's folder in ``model_dir``."""
        path = _path("load_checkpoint", path)
        self._parts.need()
        snapshot = read_checkpoint(path)
        if snapshot is None:
            try:
                state = loads(read_bytes(path))
                position = Position(epoch=int(state["epoch"]))
                files = {f"{part}.pt": dumps(state[part]) for part in ("model", "optimizer")}
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(
                    f"{path!r} is not a checkpoint of an Estimator; for a file of Keras use "
                    "load or load_weights"
                ) from error
            snapshot = Snapshot(position.to_json(), files)
        model = self._parts.build_on_driver(self._training.seed)
        if model.built:
            put_weights(model, snapshot.files["model.pt"], f"weights in {path!r}")
        self._training.take(snapshot)


def _short_names() -> dict[str, Any]:
    """Losses by names that a file of HDF5 may hold and Keras does not find there."""
    import keras

    return {name: keras.losses.get(name) for name in ("mse", "mae", "mape", "msle")}


def _snapshot_of(model) -> Snapshot:
    """The state of a model that has just been loaded."""
    files = {"model.pt": dump_weights(model)}
    if model.compiled and model.optimizer is not None and model.optimizer.built:
        files["optimizer.pt"] = dump_optimizers(model)
    return Snapshot(Position().to_json(), files)


def _whole(model, suffix) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "model" + suffix)
        model.save(local)
        return local.read_bytes()


def _suffix(path: str) -> str:
    suffix = posixpath.splitext(path)[1]
    return suffix if suffix in (".keras", ".h5", ".hdf5") else ""


def _path(verb, path) -> str:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"{verb} needs the path of a file, got {path!r}")
    return os.fspath(path)


def _check_free(path, overwrite):
    import fsspec

    fs, inner = fsspec.core.url_to_fs(path)
    if not overwrite and fs.exists(inner):
        raise UsageError(f"{path!r} is there already; pass overwrite=True")


def _upload(folder, path):
    import fsspec

    fs, inner = fsspec.core.url_to_fs(path)
    fs.makedirs(inner, exist_ok=True)
    fs.put(f"{folder}/", f"{inner}/", recursive=True)
