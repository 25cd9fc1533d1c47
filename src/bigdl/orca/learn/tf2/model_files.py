"""Methods of the Keras Estimator that access, save and load its model.

A file is written by Keras or by :meth:`KerasFiles.save_checkpoint`, or it is a checkpoint folder in
``model_dir`` (see :mod:`bigdl.training.checkpoint`).

A whole model is a Keras file (``.keras``, a zip), an HDF5 file, or a folder with a SavedModel for
serving and a ``model.keras``. When writing, the suffix determines the format, or ``save_format`` if
there is no known suffix. When reading, only the content determines it.

A subclassed model creates its weights when it is first called. Therefore a fit records the form of
an input row in every snapshot (as ``example``), so that the driver can create the weights, too, and
load those of the snapshot.
"""

from __future__ import annotations

import posixpath
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bigdl.common.errors import UsageError, as_usage_error, hide_frames
from bigdl.common.private_folders import scratch_folder
from bigdl.common.storage import file_exists, put_folder, read_bytes, write_bytes, writing
from bigdl.orca.data.file import open_file_system
from bigdl.orca.learn.arguments import check_path, resolve_path, warn_once
from bigdl.orca.learn.estimator import TrainingEstimator
from bigdl.orca.learn.tf2.parts import KerasParts, call_on
from bigdl.training.checkpoint import Checkpoint, read_checkpoint
from bigdl.training.embedding_tables.keras_model import whole_tables
from bigdl.training.keras.backends import backend_of_program
from bigdl.training.keras.state import (
    array_of,
    dump_optimizers,
    dump_weights,
    form_of,
    put_optimizers,
    put_weights,
    zeros_of,
)
from bigdl.training.position import Position
from bigdl.training.state import dumps, loads

if TYPE_CHECKING:
    import keras

    from bigdl.common.types import Tensors

T = TypeVar("T")

_WHOLE = "model.keras"  # file of the whole model in a folder
_SUFFIXES = {".keras": "keras", ".h5": "h5", ".hdf5": "h5"}
_FILES = {"keras": "a Keras file", "h5": "an HDF5 file", "tf": "a folder"}
_MAGIC = {b"PK\x03\x04": ".keras", b"\x89HDF\r\n\x1a\n": ".h5"}

_WEIGHTS_FORMATS = (None, "h5", "hdf5", "keras", "tf", "tensorflow")
# keys of a snapshot's manifest that describe the model's inputs
_INPUT_KEYS = ("inputs", "example")


@hide_frames
class KerasFiles(TrainingEstimator):
    """Base class of KerasEstimator with the methods that access, save and load the model.

    Parameters
    ----------
    parts : KerasParts
    options : EstimatorOptions
    """

    _parts: KerasParts

    def get_model(self, sample_input: object = None, set_weights: bool = True) -> keras.Model:
        """Return a copy of the trained model, with its optimizer's state, on the driver.

        Parameters
        ----------
        sample_input : array, or tuple or dict of arrays, optional
            Rows for a subclassed model that has not been fitted or loaded, so that its input shape
            is unknown.
        set_weights : bool
            If False, keep the initial weights of the creator.

        Returns
        -------
        keras.Model
        """
        return self._model(sample_input, set_weights=set_weights)

    def _model(self, sample_input, *, set_weights=True, with_optimizer=True):
        self._parts.require_model()
        model = self._parts.build_on_driver(self._training.seed)
        snapshot = self._training.snapshot if set_weights else None
        _build_from_row(model, sample_input, {} if snapshot is None else snapshot.manifest)
        if snapshot is None:
            return model
        if not model.built:
            raise UsageError(
                "Failed to set model weights, please provide real tensor data for the model: pass "
                "a row as sample_input",
                code="model-unbuilt",
                argument="sample_input",
            )
        snapshot = whole_tables(snapshot)
        put_weights(model, snapshot.files["model.pt"])
        data = snapshot.files.get("optimizer.pt")
        if data is not None and with_optimizer and model.compiled and model.optimizer is not None:
            model.optimizer.build(model.trainable_variables)
            put_optimizers(model, data)
        return model

    def _model_with_weights(self, sample_input, **options):
        """Return the model; raise an error if it has no weights yet."""
        model = self._model(sample_input, **options)
        if not model.built:
            raise UsageError(
                "The model has no weights yet, since its input shape is unknown; pass a row as "
                "sample_input, add an Input, or fit it first",
                code="model-unbuilt",
                argument="sample_input",
            )
        return model

    def _known_inputs(self, sample_input=None) -> dict:
        """Return the known input types or an example row, for a checkpoint's manifest."""
        snapshot = self._training.snapshot
        known = {} if snapshot is None else snapshot.manifest
        inputs = {name: known[name] for name in _INPUT_KEYS if known.get(name) is not None}
        if not inputs and sample_input is not None:
            inputs["example"] = form_of(_first_row(sample_input))
        return inputs

    # -- whole models ----------------------------------------------------------------------------

    def save(
        self,
        filepath: str | None = None,
        overwrite: bool = True,
        include_optimizer: bool = True,
        save_format: str | None = None,
        signatures: object = None,
        options: object = None,
        *,
        sample_input: object = None,
        **old: object,
    ) -> str:
        """Write the whole model.

        Parameters
        ----------
        filepath : str
            Local path or fsspec URL. ``*.keras``, ``*.h5`` and ``*.hdf5`` are Keras files; any
            other name becomes a folder with a SavedModel for serving and a file with the whole
            model.
        overwrite : bool
            If False, raise an error if the path exists.
        include_optimizer : bool
            Whether to write the optimizer's state.
        save_format : str, optional
            ``"h5"``, ``"keras"`` or ``"tf"`` (a folder), if the name has no known suffix.
        signatures, options
            Accepted for compatibility and ignored: a SavedModel has the signature ``serve``.
        sample_input : optional
            See :meth:`get_model`.
        **old
            Keyword of BigDL 2.0: ``checkpoint``, for `filepath`.

        Returns
        -------
        str
            `filepath`.

        Raises
        ------
        UsageError
            If `save_format` contradicts the suffix, the path cannot be written, or the model has no
            weights yet.
        """
        filepath = resolve_path(self.save, old, "checkpoint", filepath)
        file_format = _format_to_write(filepath, save_format)
        _check_target(filepath, overwrite=overwrite, is_folder=file_format == "tf")
        if signatures is not None:
            warn_once("save(signatures=) has no effect: a SavedModel has the signature serve")
        if options is not None:
            warn_once("save(options=) has no effect: the whole model is written by Keras 3")
        model = self._model_with_weights(sample_input, with_optimizer=include_optimizer)
        if file_format != "tf":
            write_bytes(filepath, _written_bytes(f"model.{file_format}", model.save))
            return filepath
        with scratch_folder("model") as folder:
            if backend_of_program() == "tensorflow":
                model.export(folder, verbose=False)
            model.save(Path(folder, _WHOLE))
            with writing("The model", filepath):
                put_folder(folder, filepath)
        return filepath

    def load(
        self,
        filepath: str | None = None,
        custom_objects: dict[str, Any] | None = None,
        compile: bool = True,
        options: object = None,
        *,
        trust: bool = False,
        sample_input: object = None,
        **old: object,
    ) -> None:
        """Load a whole model that :meth:`save` or Keras wrote; it replaces the model creator.

        The content of the file determines its format, whatever the name.

        Parameters
        ----------
        filepath : str
        custom_objects : dict, optional
            Classes and functions that the file refers to by name.
        compile : bool
            Whether to compile the model as it was saved.
        options
            Accepted for compatibility and ignored.
        trust : bool
            Whether to load code in the file, such as that of a Lambda layer; it can do anything.
        sample_input
            Accepted for compatibility and ignored: a whole model includes its input shapes.
        **old
            Keyword of BigDL 2.0: ``checkpoint``, for `filepath`.

        Raises
        ------
        UsageError
            If the file cannot be read.
        """
        import keras

        filepath = resolve_path(self.load, old, "checkpoint", filepath)
        if options is not None:
            warn_once("load(options=) has no effect: the whole model is read by Keras 3")
        data, suffix = _read_whole(filepath)
        # short loss names in HDF5 files, which Keras does not resolve
        names = ("mse", "mae", "mape", "msle") if suffix == ".h5" else ()
        objects = {**{name: keras.losses.get(name) for name in names}, **(custom_objects or {})}

        def read(local):
            model = keras.saving.load_model(
                local, custom_objects=objects, compile=compile, safe_mode=not trust
            )
            if suffix == ".h5" and model.compiled:
                # from HDF5, Keras builds the optimizer without the layers' weights
                model.compile_from_config(model.get_compile_config())
            return model

        model = _read(data, suffix, read, f"{filepath!r} is not a model that can be loaded")
        if not model.built:
            raise UsageError(
                f"{filepath!r} has a model without input shape, so it contains no weights; call "
                "the "
                "model on a row before you save it",
                code="model-unbuilt",
                path=filepath,
            )
        self._parts = self._parts.with_instance(model, custom_objects)
        files = {"model.pt": dump_weights(model)}
        if model.compiled and model.optimizer is not None and model.optimizer.built:
            files["optimizer.pt"] = dump_optimizers(model)
        self._training.take(Checkpoint(Position().to_json(), files))

    # -- weights ---------------------------------------------------------------------------------

    def save_weights(
        self,
        filepath: str,
        overwrite: bool = True,
        save_format: str | None = None,
        *,
        sample_input: object = None,
    ) -> str:
        """Write only the weights, always in Keras's weights format.

        Parameters
        ----------
        filepath : str
            A local path or fsspec URL.
        overwrite : bool
        save_format : str, optional
            ``"h5"`` is always written; ``"tf"`` is accepted for compatibility.
        sample_input : optional
            See :meth:`get_model`.

        Returns
        -------
        str
            `filepath`.
        """
        filepath = check_path("save_weights", filepath)
        if save_format not in _WEIGHTS_FORMATS:
            raise UsageError(
                f'save_format should be "h5" or "tf", got {save_format!r}',
                code="argument-value",
                argument="save_format",
                allowed=["h5", "tf"],
            )
        if save_format in ("tf", "tensorflow"):
            warn_once(
                f'save_weights(save_format="{save_format}") has no effect: Keras 3 has only one '
                "weights format, which load_weights reads"
            )
        _check_target(filepath, overwrite=overwrite)
        model = self._model_with_weights(sample_input)
        write_bytes(filepath, _written_bytes("model.weights.h5", model.save_weights))
        return filepath

    def load_weights(
        self, filepath: str, by_name: bool = False, *, sample_input: object = None
    ) -> None:
        """Load weights that :meth:`save_weights` or Keras wrote; reset the optimizer.

        Parameters
        ----------
        filepath : str
            File of weights or of a whole model.
        by_name : bool
            Whether to match layers of a Keras 2 ``.h5`` file by name.
        sample_input : optional
            See :meth:`get_model`.

        Raises
        ------
        UsageError
            If the file cannot be read or belongs to another model, or if the model's input shape is
            unknown.
        """
        filepath = check_path("load_weights", filepath)
        data, suffix = _read_weights(filepath)
        model = self._model_with_weights(sample_input, with_optimizer=False)
        options = {"by_name": True} if by_name and suffix == ".h5" else {}
        with warnings.catch_warnings():
            # raised for the file of a whole model
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            failure = f"The weights in {filepath!r} cannot be loaded"
            _read(data, suffix, lambda local: model.load_weights(local, **options), failure)
        manifest = {**self._training.position.to_json(), **self._known_inputs(sample_input)}
        self._training.take(Checkpoint(manifest, {"model.pt": dump_weights(model)}))

    # -- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(self, path: str, *, sample_input: object = None) -> None:
        """Write the weights, the optimizer's state and the number of epochs.

        Parameters
        ----------
        path : str
            A local path or fsspec URL.
        sample_input : optional
            See :meth:`get_model`.
        """
        path = check_path("save_checkpoint", path)
        _check_target(path)
        model = self._model_with_weights(sample_input)
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        state = {
            "epoch": self._training.position.epochs_with_metrics,
            "model": loads(dump_weights(model)),
            "optimizer": loads(dump_optimizers(model)),
            "known": self._known_inputs(sample_input),
        }
        snapshot = self._training.snapshot
        if snapshot is not None and "tables.pt" in snapshot.files:
            state["tables"] = loads(whole_tables(snapshot).files["tables.pt"])
        write_bytes(path, dumps(state))

    def load_checkpoint(self, path: str, *, sample_input: object = None) -> None:
        """Load a file that :meth:`save_checkpoint` wrote, or a checkpoint folder in ``model_dir``.

        Parameters
        ----------
        path : str
        sample_input : optional
            See :meth:`get_model`; for a checkpoint without an example row.

        Raises
        ------
        UsageError
            If the file cannot be read or belongs to another model.
        """
        path = check_path("load_checkpoint", path)
        self._parts.require_model()
        snapshot = read_checkpoint(path)
        if snapshot is None:
            snapshot = _read_state(path)
        model = self._parts.build_on_driver(self._training.seed)
        row = _build_from_row(model, sample_input, snapshot.manifest)
        if model.built:
            whole = whole_tables(snapshot)
            put_weights(model, whole.files["model.pt"], f"weights in {path!r}")
        if row is not None:
            snapshot.manifest["example"] = form_of(row)
        self._training.take(snapshot)


def _read_state(path: str) -> Checkpoint:
    """Read a file that :meth:`KerasFiles.save_checkpoint` wrote."""
    try:
        state = loads(read_bytes(path))
        position = Position(epoch=int(state["epoch"]))
        parts = ("model", "optimizer", *({"tables"} & set(state)))
        files = {f"{part}.pt": dumps(state[part]) for part in parts}
        return Checkpoint({**position.to_json(), **state.get("known", {})}, files)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{path!r} is not a checkpoint of an Estimator; for a Keras file use load or "
            "load_weights",
            code="file-format",
            path=path,
        ) from error


def _written_bytes(name: str, write: Callable[[Path], Any]) -> bytes:
    """Return the bytes that a function writes to a temporary file."""
    with scratch_folder("model") as folder:
        local = Path(folder, name)
        write(local)
        return local.read_bytes()


def _read(data: bytes, suffix: str, read: Callable[[Path], T], failure: str) -> T:
    """Write the bytes to a temporary file and return the result of a function that reads it."""
    with scratch_folder("model") as folder:
        local = Path(folder, f"model{suffix}")
        local.write_bytes(data)
        # Keras raises many exception types for a file in another format
        with as_usage_error(failure, code="file-damaged"):
            return read(local)


# -- shapes of subclassed models -----------------------------------------------------------------


def _build_from_row(model: keras.Model, sample_input: object, known: dict) -> Tensors | None:
    """Build an unbuilt model by calling it on an example row; return the row used, if any.

    Parameters
    ----------
    model : keras.Model
    sample_input : arrays or None
    known : dict
        Manifest of a snapshot, which may have an example row.

    Returns
    -------
    arrays or None
        The input row that the model was called on.
    """
    if model.built:
        return None
    if sample_input is not None:
        row = _first_row(sample_input)
    elif known.get("example") is not None:
        row = zeros_of(known["example"])
    else:
        return None
    rows = "rows of this form" if sample_input is None else "sample_input"
    # user code in call() may raise any error
    with as_usage_error(f"The model does not accept {rows}", code="model-input"):
        call_on(model, row)
    return row


def _first_row(sample_input: object) -> Tensors:
    """Return the first row of the user's arrays."""
    import keras

    def first(value):
        array = array_of(value)
        if not array.ndim:
            raise UsageError(
                "sample_input should be an array of rows, or a tuple or dict of arrays, got an "
                f"element of type {type(value).__name__}",
                code="data-type",
                argument="sample_input",
            )
        return array[:1]

    return keras.tree.map_structure(first, sample_input)


# -- formats of files ----------------------------------------------------------------------------


def _format_to_write(filepath: str, save_format: str | None) -> str:
    """Return the file format: ``"keras"``, ``"h5"``, or ``"tf"`` for a folder.

    Raises
    ------
    UsageError
        If `save_format` is unknown, or contradicts the suffix of `filepath`.
    """
    if save_format not in (None, *_FILES):
        raise UsageError(
            f'save_format should be "keras", "h5" or "tf", got {save_format!r}',
            code="argument-value",
            argument="save_format",
            allowed=["keras", "h5", "tf"],
        )
    named = _SUFFIXES.get(posixpath.splitext(filepath)[1])
    if named is not None and save_format is not None and named != save_format:
        raise UsageError(
            f"save_format={save_format!r} means {_FILES[save_format]}, but the suffix of "
            f"{filepath!r} means {_FILES[named]}; omit save_format, or use a name without suffix",
            code="argument-conflict",
            argument="save_format",
            path=filepath,
        )
    return save_format or named or "tf"


def _check_target(filepath: str, *, overwrite: bool = True, is_folder: bool = False) -> None:
    """Raise an error if a file or folder cannot be written at a path."""
    fs, inner = open_file_system(filepath)
    if not fs.exists(inner):
        return
    if not overwrite:
        raise UsageError(
            f"{filepath!r} already exists; pass overwrite=True", code="path-exists", path=filepath
        )
    if fs.isfile(inner) == is_folder:
        existing, new = ("file", "folder") if is_folder else ("folder", "file")
        raise UsageError(
            f"Cannot write a {new} to {filepath!r}, which is a {existing}; remove it, or choose "
            "another name",
            code="path-exists",
            path=filepath,
        )


def _read_whole(filepath: str) -> tuple[bytes, str]:
    """Return the content of a whole-model file, and its suffix.

    Raises
    ------
    UsageError
        If there is no such file.
    """
    path = filepath
    if _is_folder(filepath):
        path = posixpath.join(filepath, _WHOLE)
        if file_exists(posixpath.join(filepath, "saved_model.pb")) and not file_exists(path):
            raise UsageError(
                f"{filepath!r} is a SavedModel, which Keras 3 cannot load as a model; load it with "
                "tf_keras (the Keras of TensorFlow before 2.16), save it to a .h5 file and load "
                "that with compile=False, or wrap it in keras.layers.TFSMLayer, which can only "
                "predict",
                code="file-format",
                path=filepath,
            )
        if not file_exists(path):
            raise UsageError(
                f"{filepath!r} is not a model that can be loaded: the folder has no {_WHOLE}; "
                "use load_checkpoint for a checkpoint of fit",
                code="file-format",
                path=filepath,
            )
    return _read_content(path, f"{path!r} is not a model that can be loaded")


def _read_weights(filepath: str) -> tuple[bytes, str]:
    """Return the content of a weights or whole-model file, and the suffix that Keras expects.

    Raises
    ------
    UsageError
        If there is no such file.
    """
    if not file_exists(filepath):
        if file_exists(f"{filepath}.index"):
            raise UsageError(
                f"The weights in {filepath!r} cannot be loaded: they are a TensorFlow checkpoint, "
                "which Keras 3 does not read; load them with tf_keras (the Keras of TensorFlow "
                "before 2.16) and write them with save_weights to a .weights.h5 file",
                code="file-format",
                path=filepath,
            )
        if _is_folder(filepath):
            raise UsageError(
                f"The weights in {filepath!r} cannot be loaded: it is a folder; use load for a "
                "whole model and load_checkpoint for a checkpoint",
                code="file-format",
                path=filepath,
            )
    data, suffix = _read_content(filepath, f"The weights in {filepath!r} cannot be loaded")
    return data, suffix if suffix == ".keras" or _is_keras_2_file(data) else ".weights.h5"


def _read_content(path: str, failure: str) -> tuple[bytes, str]:
    """Return the content of a Keras or HDF5 file, and its suffix."""
    data = read_bytes(path)
    for magic, suffix in _MAGIC.items():
        if data.startswith(magic):
            return data, suffix
    raise UsageError(
        f"{failure}: it is neither a Keras nor an HDF5 file", code="file-format", path=path
    )


def _is_keras_2_file(data: bytes) -> bool:
    """Return True if HDF5 data is in the Keras 2 format, which all whole-model HDF5 files use."""
    import io

    import h5py

    try:
        with h5py.File(io.BytesIO(data)) as file:
            return "layer_names" in file.attrs or "model_weights" in file
    except OSError:  # a truncated file; loading it raises an error
        return False


def _is_folder(filepath: str) -> bool:
    # check for a file first: on some stores, isdir of a file is slow
    if file_exists(filepath):
        return False
    fs, inner = open_file_system(filepath)
    return fs.isdir(inner)
