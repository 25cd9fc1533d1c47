"""Keras models that run in another way or in another runtime and still look like the user's.

The life of an accelerated model: a method builds it with ``of``, which takes over what the user's
model was compiled with and remembers that model as ``nano_source``. ``save`` asks it for its files
and for the facts that go into the directory's ``nano_model_meta.yml``; ``load`` finds the class by
its name in that file. A loaded model has no source unless the user gives one.
"""

from __future__ import annotations

import abc
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import UsageError, one_line
from bigdl.common.stand_ins import actual
from bigdl.nano.acceleration.saved import directory_of, read_meta, require_files, write_directory
from bigdl.nano.acceleration.structure import flatten, is_tensor
from bigdl.nano.tf.inference.source import CallInputs, CallOutputs
from bigdl.nano.tf.serialization import compiled_like

__all__ = ["AcceleratedKerasModel", "load_model", "save_model"]


_REFUSED = (
    *("fit", "train_on_batch", "get_layer", "get_config", "to_json", "to_yaml", "summary"),
    *("save", "save_weights", "load_weights", "set_weights", "export", "quantize", "pop", "add"),
)


class AcceleratedKerasModel(keras.Model):
    """A model that only predicts and evaluates, and passes unknown attributes on to the original.

    ``model(x)``, ``predict``, ``predict_on_batch``, ``evaluate``, ``test_on_batch`` and
    ``compile`` are those of a Keras model; what trains, changes or describes layers is refused.
    It is always in inference mode.

    Attributes
    ----------
    nano_method : str or None
        Name of the method that built it.
    nano_source : keras.Model or None
        The user's model, whose layers are not this model's.
    nano_inputs : CallInputs
    nano_outputs : CallOutputs
    thread_num : int or None
        Threads of the runtime.
    """

    nano_classes: ClassVar[dict[str, type[AcceleratedKerasModel]]] = {}
    """Every class by its name, which stands in saved directories as ``ModelType``."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        AcceleratedKerasModel.nano_classes[cls.__name__] = cls

    def __init__(
        self,
        inputs: CallInputs,
        outputs: CallOutputs,
        *,
        method: str | None = None,
        threads: int | None = None,
    ):
        super().__init__()
        # Keras would take models and containers that are set as attributes for layers.
        self.__dict__.update(
            nano_method=method,
            nano_source=None,
            nano_inputs=inputs,
            nano_outputs=outputs,
            thread_num=threads,
        )
        self.built = True

    def nano_attach(self, source: keras.Model | None) -> Self:
        """Set the model to which unknown attributes are passed on; returns itself."""
        self.__dict__["nano_source"] = source
        if source is not None:
            compiled_like(self, source)
        return self

    @property
    def forward_args(self) -> list[str]:
        """Names of the inputs."""
        return self.nano_inputs.names

    @abc.abstractmethod
    def nano_infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """A flat list of ndarrays in, a flat list of ndarrays out, which are the caller's."""

    @abc.abstractmethod
    def save_to(self, directory: Path) -> dict:
        """Write this model's files.

        Parameters
        ----------
        directory : Path
            An empty directory.

        Returns
        -------
        dict
            What :meth:`load_from` needs to know, of JSON's types only.
        """

    @classmethod
    @abc.abstractmethod
    def load_from(
        cls, directory: Path, meta: Mapping, *, model: Any, device: str | None, threads: int | None
    ) -> AcceleratedKerasModel:
        """Read what :meth:`save_to` wrote."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the user's model; ``training=True`` is refused."""
        if kwargs.pop("training", None):
            raise UsageError(
                f"{type(self).__name__} only predicts; train the original model and convert it "
                "again"
            )
        kwargs.pop("mask", None)
        leaves = self.nano_inputs.flatten(args, kwargs)
        if any(tf.is_symbolic_tensor(leaf) for leaf in leaves):
            return self._in_a_graph(leaves)
        results = self.nano_infer(self.nano_inputs.arrays(args, kwargs))
        return self.nano_outputs.structure.rebuild(self._tensors(results))

    def call(self, *args: Any, training: bool | None = None, mask: Any = None) -> Any:
        """As ``__call__``."""
        return self(*args)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As ``keras.Model.compile``, without XLA, which cannot call another runtime."""
        super().compile(*args, **{**kwargs, "jit_compile": False})

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """As ``keras.Model.predict``; arrays go to the runtime without a dataset in between."""
        if not _is_nest_of_arrays(x):
            return super().predict(x, batch_size, verbose, steps, callbacks)
        leaves = self.nano_inputs.arrays([x])
        rows, size = len(leaves[0]), batch_size or 32
        starts = range(0, rows, size)[:steps]
        if callbacks is None and verbose in (0, "auto"):
            found = [self.nano_infer([leaf[i : i + size] for leaf in leaves]) for i in starts]
        else:
            found = self._with_callbacks(leaves, starts, size, verbose, callbacks)
        if not found:
            raise UsageError("x holds no row; give at least one")
        columns = [
            column[0] if len(column) == 1 else np.concatenate(column)
            for column in zip(*found, strict=True)
        ]
        return self.nano_outputs.structure.rebuild(map(self._as_declared, columns, self._dtypes))

    def predict_on_batch(self, x: Any) -> Any:
        """As ``keras.Model.predict_on_batch``."""
        results = self.nano_infer(self.nano_inputs.arrays([x]))
        return self.nano_outputs.structure.rebuild(map(self._as_declared, results, self._dtypes))

    def make_predict_function(self, force: bool = False) -> Any:
        """The function that ``predict`` calls with a list of batches of a dataset."""

        def predicted(batches: list) -> Any:
            results = [self.nano_infer(self.nano_inputs.arrays([_features(b)])) for b in batches]
            columns = [np.concatenate(column) for column in zip(*results, strict=True)]
            return self.nano_outputs.structure.rebuild(self._tensors(columns))

        self.predict_function = predicted
        return predicted

    @property
    def _dtypes(self) -> list[str]:
        return [port.dtype for port in self.nano_outputs.ports]

    @staticmethod
    def _as_declared(result: np.ndarray, dtype: str) -> np.ndarray:
        if str(result.dtype) == dtype:
            return result
        return result.astype(tf.as_dtype(dtype).as_numpy_dtype)

    def _tensors(self, results: list[np.ndarray]) -> list:
        return [
            tf.convert_to_tensor(self._as_declared(result, dtype))
            for result, dtype in zip(results, self._dtypes, strict=True)
        ]

    def _in_a_graph(self, leaves: list) -> Any:
        """The call as one operation of a graph of TensorFlow, e.g. that of ``evaluate``."""
        ports = self.nano_outputs.ports

        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            given = self.nano_inputs.arrays(self.nano_inputs.pack(arrays))
            results = self.nano_infer(given)
            return [
                self._as_declared(r, dtype) for r, dtype in zip(results, self._dtypes, strict=True)
            ]

        results = tf.numpy_function(run, leaves, [tf.as_dtype(port.dtype) for port in ports])
        for result, port in zip(results, ports, strict=True):
            result.set_shape((None, *port.shape[1:]) if port.shape else None)
        return self.nano_outputs.structure.rebuild(results)

    def _with_callbacks(self, leaves, starts, size, verbose, callbacks) -> list:
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = keras.callbacks.CallbackList(
                callbacks,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=1,
                steps=len(starts),
                model=self,
            )
        found = []
        self.stop_predicting = False
        callbacks.on_predict_begin()
        for step, start in enumerate(starts):
            callbacks.on_predict_batch_begin(step)
            found.append(self.nano_infer([leaf[start : start + size] for leaf in leaves]))
            outputs = self.nano_outputs.structure.rebuild(found[-1])
            callbacks.on_predict_batch_end(step, {"outputs": outputs})
            if self.stop_predicting:
                break
        callbacks.on_predict_end()
        return found

    def nano_describe(self) -> dict:
        """Facts of the wrapper for the saved directory."""
        return {
            "inputs": self.nano_inputs.to_json(),
            "outputs": self.nano_outputs.to_json(),
            "method": self.nano_method,
            "thread_num": self.thread_num,
        }

    @staticmethod
    def nano_facts_of(meta: Mapping, threads: int | None) -> dict:
        """Keywords of the constructor from what :meth:`nano_describe` returned."""
        if "inputs" not in meta or "outputs" not in meta:
            raise UsageError(
                "The directory does not say what the model's inputs and outputs are, as those of "
                "BigDL 2 do not; save the model again from the original"
            )
        return {
            "inputs": CallInputs.from_json(meta["inputs"]),
            "outputs": CallOutputs.from_json(meta["outputs"]),
            "method": meta.get("method"),
            "threads": threads or meta.get("thread_num"),
        }

    def __getattr__(self, name: str) -> Any:
        source = vars(self).get("nano_source")
        if source is not None and not name.startswith("_"):
            try:
                return getattr(source, name)
            except AttributeError:
                pass
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple:
        """Pickle the files of its saved directory, without the original."""

        with tempfile.TemporaryDirectory(prefix="bigdl-nano-") as folder:
            save_model(self, Path(folder, "model"))
            files = {f.name: f.read_bytes() for f in Path(folder, "model").iterdir()}
        return _unpickled, (files, type(self))


def _refusing(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"{type(self).__name__} has no {name}: it predicts and evaluates only; use the "
            "original model, and InferenceOptimizer.save for this one"
        )

    refuse.__name__ = name
    refuse.__doc__ = "Not of an accelerated model."
    return refuse


for _name in _REFUSED:
    setattr(AcceleratedKerasModel, _name, _refusing(_name))


def _unpickled(
    files: dict[str, bytes], model_class: type[AcceleratedKerasModel]
) -> AcceleratedKerasModel:
    """Return a model from its files; its class is given so that its module is imported."""

    return load_model({name: io.BytesIO(content) for name, content in files.items()})


def _features(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple) else batch


def _is_nest_of_arrays(x: Any) -> bool:
    leaves, structure = flatten(x)
    return bool(leaves) and all(map(is_tensor, leaves)) and "constant" not in _kinds(structure)


def _kinds(structure: Any) -> set[str]:
    return {structure.kind}.union(*map(_kinds, structure.children))


_PLAIN = "KerasModel"
_FILE = "saved_model.keras"
_COMPILED = "compile.json"


def save_model(model: Any, path: str | os.PathLike) -> None:
    """Write a model, accelerated or not, to a directory.

    Parameters
    ----------
    model : keras.Model
    path : str or path
        The directory; an earlier model in it is replaced, when the new one is complete.

    Raises
    ------
    UsageError
        If the model is none, or the directory cannot be written.
    """
    model = actual(model)
    if not isinstance(model, keras.Model):
        raise UsageError(f"A Keras model was to be saved, but got a {type(model).__name__}")

    def write(directory: Path) -> dict:
        if not isinstance(model, AcceleratedKerasModel):
            model.save(directory / _FILE)
            return {"ModelType": _PLAIN, "checkpoint": _FILE}
        meta = {"ModelType": type(model).__name__, **model.save_to(directory)}
        return meta | _write_compiled(model, directory)

    write_directory(path, write)


def load_model(
    path: str | os.PathLike | Mapping[str, BinaryIO],
    model: Any = None,
    device: str | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    thread_num: int | None = None,
) -> Any:
    """Read a model that :func:`save_model` wrote.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.
    model : keras.Model, optional
        The original, whose attributes are found on the loaded one again.
    device : str, optional
        OpenVINO's device, instead of the saved one.
    custom_objects : mapping, optional
        Classes and functions by name that Keras does not know.
    thread_num : int, optional
        Threads of the model, instead of those that it was saved with.

    Raises
    ------
    UsageError
        If the directory or a file of it is missing, or it holds something else.
    """
    model = actual(model)
    with (
        directory_of(path) as directory,
        keras.saving.custom_object_scope(dict(custom_objects or {})),
    ):
        meta = read_meta(directory)
        require_files(directory, meta)
        if meta["ModelType"] == _PLAIN:
            return _load_plain(directory / meta["checkpoint"])
        cls = AcceleratedKerasModel.nano_classes.get(meta["ModelType"])
        if cls is None:
            raise UsageError(
                f"ModelType {meta['ModelType']} or argument 'model={type(model).__name__}' is not "
                "acceptable for tensorflow loading."
            )
        loaded = cls.load_from(directory, meta, model=model, device=device, threads=thread_num)
        if model is None and meta.get("compile"):
            _compile(loaded, directory / meta["compile"])
        return loaded


def _write_compiled(model: AcceleratedKerasModel, directory: Path) -> dict:
    """Write the arguments of ``compile`` as JSON, so that a loaded model evaluates."""
    config = model.get_compile_config()
    if not config:
        return {}
    wanted = {key: config[key] for key in ("loss", "loss_weights", "metrics", "weighted_metrics")}
    try:
        (directory / _COMPILED).write_text(json.dumps(wanted), encoding="utf-8")
    except TypeError:  # an object that Keras does not know how to write
        (directory / _COMPILED).unlink(missing_ok=True)
        return {}
    return {"compile": _COMPILED}


def _compile(model: AcceleratedKerasModel, file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    try:
        model.compile(**keras.saving.deserialize_keras_object(config))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The loaded model cannot be compiled as the saved one was: {one_line(error)}; pass "
            "custom_objects, or model"
        ) from error


def _load_plain(file: Path) -> Any:
    try:
        return keras.saving.load_model(file)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Keras cannot load the model: {one_line(error)}") from error
