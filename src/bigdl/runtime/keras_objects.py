"""Pickling of Keras models, layers, losses, metrics and optimizers by value.

Keras writes an object as a configuration and its weights. The configuration names classes and
functions; the reader looks the names up in the registry of its process. Classes of a script or a
notebook are not registered in other processes, a lambda loses its closure, and two classes may have
one name. :class:`KerasArchive` therefore contains the named objects next to the configuration, each
under a unique name, and is pickled by value.

For a subclassed model without ``get_config`` Keras writes the defaults of ``__init__`` instead of
the actual arguments. Such a model or layer is written as its attributes
(:class:`_LayerAttributes`).

The pickler of :mod:`bigdl.runtime.serialization` writes every Keras object as such an archive.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from bigdl.common.errors import LazyModule, UsageError

if TYPE_CHECKING:
    import keras
    import numpy as np
else:
    keras = LazyModule("keras", "tf")

T = TypeVar("T")

_lock = threading.RLock()


@dataclass(frozen=True)
class KerasArchive:
    """A saved Keras object together with the classes and functions that it refers to.

    Attributes
    ----------
    content : bytes
        Configuration and weights.
    objects : dict of str to object
        Classes and functions by name in the content, and the caller's custom objects.
    registered : dict of str to object
        Classes and functions by their registered names in the program.
    compiled : dict of str to object
        Compile arguments and attributes that Keras does not write.
    """

    content: bytes
    objects: dict[str, Any] = field(default_factory=dict)
    registered: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        value: object,
        custom_objects: Mapping[str, Any] | None = None,
        *,
        compiled: bool = True,
    ) -> KerasArchive:
        """Return the archive of a model, layer, loss, metric or optimizer.

        Parameters
        ----------
        value : object
        custom_objects : mapping, optional
            Further classes and functions by name, for configurations with plain names.
        compiled : bool
            Whether to include losses, metrics and optimizers of a model.

        Raises
        ------
        Exception
            An exception of Keras for an object that it cannot write.
        """
        known = keras.saving.get_custom_objects()
        registered = {name: each for name, each in known.items() if not _is_of_library(each)}
        with (
            contextlib.nullcontext() if compiled else _temporary_attribute(value, "compiled", False)
        ):
            content, objects = _serialize(value, _file_of)
            rest = _compile_state(value) if compiled else {}
        objects = {**registered, **dict(custom_objects or {}), **objects}
        return cls(content, objects, registered, rest)

    def made(self) -> Any:  # the class of the original
        """Rebuild the object in this process and return it.

        Raises
        ------
        Exception
            An exception of Keras for a configuration that it cannot read.
        """
        for name, each in self.registered.items():
            _register(name, each)
        with _resolve_names(self.objects), warnings.catch_warnings():
            # Keras warns for a model that was not trained yet
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            if self.compiled:
                warnings.filterwarnings("ignore", "`compile\\(\\)` was not called as part of")
            value = keras.Model._unpickle_model(io.BytesIO(self.content))
        if self.compiled:
            _compile_copy(value, self.compiled)
        return value


def _file_of(value: object) -> bytes:
    """Save a Keras object in Keras' file format and return the bytes of the file."""
    return bytes(keras.layers.Layer.__reduce__(value)[1][0].getvalue())


@dataclass(frozen=True)
class KerasConfig:
    """Picklable configuration of a Keras object, without its weights.

    Attributes
    ----------
    content : str
        The configuration as JSON.
    objects : dict of str to object
        See :class:`KerasArchive`.
    """

    content: str
    objects: dict[str, Any]

    @classmethod
    def of(cls, value: object) -> KerasConfig:
        """Return the configuration of a Keras object."""
        return cls(*_serialize(value, _json_of))

    def made(self) -> Any:  # the class of the original
        """Build a new object from this configuration, with initial weights."""
        with _resolve_names(self.objects):
            return keras.saving.deserialize_keras_object(json.loads(self.content), safe_mode=False)


def _json_of(value: object) -> str:
    """Return the configuration of a Keras object as JSON."""
    return json.dumps(keras.saving.serialize_keras_object(value))


def reduce_keras_object(value: Any) -> object:  # value: any object
    """Return the pickle reduction of a Keras object or ``tf.function``, or NotImplemented.

    The receiver traces a ``tf.function`` again, without XLA, which cannot call Python.
    """
    if isinstance(
        value, _class_if_imported("tensorflow", "types.experimental.PolymorphicFunction")
    ):
        if not hasattr(value, "python_function"):
            return NotImplemented
        options = {
            "input_signature": value.input_signature,
            "autograph": getattr(value, "_autograph", True),
            "reduce_retracing": getattr(value, "_reduce_retracing", False),
        }
        return _tf_function, (value.python_function, options)
    if isinstance(value, _class_if_imported("keras.src.saving.keras_saveable", "KerasSaveable")):
        return KerasArchive.made, (KerasArchive.of(value),)
    return NotImplemented


def _tf_function(function: Callable[..., Any], options: dict[str, Any]) -> object:
    return importlib.import_module("tensorflow").function(function, **options)


def _class_if_imported(module: str, name: str) -> Any:
    """Return a module's class for ``isinstance``, or () if the module is not imported."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value or ()


# -- names in a configuration ----------------------------------------------------------------------


def _is_of_library(value: object) -> bool:
    """Return True for a class or function that Keras finds in every process."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in ("keras", "builtins")


class _NameRecorder(dict[str, Any]):
    """Replacement for Keras' name registry that gives all objects unique names in one thread.

    Parameters
    ----------
    names : dict
        The original table, which other threads use.
    """

    def __init__(self, names: dict[str, Any]):
        super().__init__(names)
        self._thread = threading.get_ident()
        self._numbers: dict[int, str] = {}
        self._kept: list[Any] = []  # keeps objects alive, so that their ids stay unique
        self.objects: dict[str, Any] = {}

    def _is_ours(self, value: object) -> bool:
        return threading.get_ident() == self._thread and not _is_of_library(value)

    def __contains__(self, value: object) -> bool:
        return self._is_ours(value) or super().__contains__(value)

    def __getitem__(self, value: Any) -> str:
        return self.name_of(value) if self._is_ours(value) else super().__getitem__(value)

    def name_of(self, value: object) -> str:
        """Return a unique name for a class or function."""
        if id(value) not in self._numbers:
            label = getattr(value, "__name__", type(value).__name__)
            name = self._numbers[id(value)] = f"bigdl>{len(self._numbers)}>{label}"
            self._kept.append(value)
            self.objects[name] = value
        return self._numbers[id(value)]


def _serialize(value: object, write: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """Save an object with `write`; return the output and a dict of the objects that it names."""
    attributes = {id(layer): _LayerAttributes.of(layer) for layer in _without_config(value)}
    registration: Any = importlib.import_module("keras.src.saving.object_registration")
    with _lock, contextlib.ExitStack() as stack:
        before = registration.GLOBAL_CUSTOM_NAMES
        names = registration.GLOBAL_CUSTOM_NAMES = _NameRecorder(before)
        stack.callback(setattr, registration, "GLOBAL_CUSTOM_NAMES", before)
        stack.enter_context(
            _replace_lambda_functions(lambda function: (names.name_of(function), None, None))
        )
        for layer in _without_config(value):
            makers = names.objects.setdefault(names[type(layer)], type(layer))
            if not isinstance(makers, _Makers):
                makers = names.objects[names[type(layer)]] = _Makers()
            makers.append(attributes[id(layer)])
            config = {"number": len(makers) - 1}
            stack.enter_context(
                _temporary_attribute(layer, "get_config", functools.partial(dict, config))
            )
        stack.enter_context(_writable_compile_config(value, names))
        for function in _lambdas_of(value):
            stack.enter_context(_temporary_attribute(function, "__name__", names.name_of(function)))
        stack.enter_context(warnings.catch_warnings())
        # lambdas are pickled by value
        warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
        return write(value), names.objects


@contextlib.contextmanager
def _resolve_names(objects: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that makes Keras resolve names in a configuration to the given objects."""

    def load(
        code: str | Sequence[str],
        defaults: object = None,
        closure: object = None,
        globs: object = None,
    ) -> object:
        return objects[code if isinstance(code, str) else code[0]]

    with _replace_lambda_functions(load=load), keras.saving.custom_object_scope(dict(objects)):
        yield


@contextlib.contextmanager
def _temporary_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Temporarily set an attribute of an object, bypassing Keras' attribute tracking."""
    if isinstance(owner, types.FunctionType):
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)
        return
    attributes = vars(owner)
    is_set, before = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if is_set:
            attributes[name] = before
        else:
            del attributes[name]


@contextlib.contextmanager
def _replace_lambda_functions(dump: Any = None, load: Any = None) -> Iterator[None]:
    """Temporarily replace Keras' functions that write and read lambdas, in this thread only."""
    functions: Any = importlib.import_module("keras.src.utils.python_utils")
    thread = threading.get_ident()

    def dispatcher(replacement: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*arguments: Any, **keywords: Any) -> object:
            is_ours = replacement is not None and threading.get_ident() == thread
            return (replacement if is_ours else original)(*arguments, **keywords)

        return function

    with _lock:
        before = functions.func_dump, functions.func_load
        functions.func_dump, functions.func_load = map(dispatcher, (dump, load), before)
        try:
            yield
        finally:
            functions.func_dump, functions.func_load = before


def _lambdas_of(value: object) -> list[Any]:
    """Return the lambdas in layer attributes, whose source code Keras would search for."""
    layers = value._flatten_layers() if isinstance(value, keras.layers.Layer) else [value]
    functions = {
        id(each): each
        for layer in layers
        for each in vars(layer).values()
        if isinstance(each, types.FunctionType) and each.__name__ == "<lambda>"
    }
    return list(functions.values())


def _register(name: str, value: object) -> None:
    """Register a class or function under its original name, so that Keras files keep the name."""
    package, separator, label = name.partition(">")
    if separator and name not in keras.saving.get_custom_objects():
        keras.saving.register_keras_serializable(package, label)(value)


# -- layers and models without a configuration -----------------------------------------------------


def _without_config(value: object) -> list[Any]:
    """Return an object's layers that have no configuration and are saved as attributes."""
    if not isinstance(value, keras.layers.Layer):
        return []
    if _has_no_config(value):
        return [value]
    inner = value._flatten_layers(include_self=False, recursive=False)
    return [each for layer in inner for each in _without_config(layer)]


def _has_no_config(layer: object) -> bool:
    """Return True if a layer has only the default ``get_config`` or ``from_config`` of Keras."""
    if _is_of_library(type(layer)) or isinstance(layer, keras.Sequential):
        return False
    owners = [cls for cls in type(layer).__mro__ if "get_config" in vars(cls)]
    makers = [cls for cls in type(layer).__mro__ if "from_config" in vars(cls)]
    is_functional = hasattr(layer, "_functional") or hasattr(layer, "_operations")
    return not is_functional and all(
        cls in (keras.Model, keras.layers.Layer, keras.Operation) for cls in (owners[0], makers[0])
    )


class _Makers(list[Any]):
    """List of pickled layers with a ``from_config`` that Keras calls to rebuild one of them."""

    def from_config(self, config: Mapping[str, int]) -> keras.Layer:
        """Rebuild the layer whose list index is in `config`."""
        return self[config["number"]].made()


@dataclass(frozen=True)
class _LayerAttributes:
    """Pickled class and attributes of a layer or model without a configuration.

    Attributes
    ----------
    kind : type
        Class of the layer.
    arguments : dict
        Arguments of the base class.
    content : bytes
        Pickled names and values of attributes, in the order in which Keras tracks them.
    objects : list of object
        Classes and functions to which the pickle refers by number.
    weights : int
        Number of weights.
    """

    kind: type
    arguments: dict[str, Any]
    content: bytes
    objects: list[Any]
    weights: int

    @classmethod
    def of(cls, layer: keras.Layer) -> _LayerAttributes:
        """Return the attributes of a layer for pickling.

        Raises
        ------
        UsageError
            If one of them cannot be pickled.
        """
        policy = layer.dtype_policy
        arguments = {
            "name": layer.name,
            "dtype": keras.dtype_policies.serialize(policy) if policy else None,
        }
        known = _names_of_base(isinstance(layer, keras.Model))
        kept: list[tuple[str, Any]] = []
        modules = getattr(layer, "_modules", {})  # the torch backend stores layers separately
        for name, value in {**vars(layer), **modules}.items():
            if name in known:
                if name in _STATE or (isinstance(value, _PLAIN) and name not in _NO_STATE):
                    kept.append((name, value))
            elif name not in _NO_STATE and not isinstance(value, keras.optimizers.Optimizer):
                kept.append((name, value))
        tracked = {id(each): number for number, each in enumerate(layer._layers)}

        def first_layer(item: tuple[str, Any]) -> int:
            leaves = keras.tree.flatten(item[1]) if item[0] not in known else []
            return min((tracked[id(leaf)] for leaf in leaves if id(leaf) in tracked), default=-1)

        buffer = io.BytesIO()
        objects: list[Any] = []
        for name, value in (kept := sorted(kept, key=first_layer)):
            try:
                _AttributePickler(io.BytesIO(), layer, []).dump(value)
            except Exception as error:
                raise UsageError(
                    f"the attribute {name!r} of {type(layer).__name__} cannot be copied ({error})",
                    code="model-copy",
                ) from error
        _AttributePickler(buffer, layer, objects).dump(kept)
        return cls(type(layer), arguments, buffer.getvalue(), objects, len(layer.weights))

    def made(self) -> keras.Layer:
        """Build the layer with initial weights."""
        is_model = issubclass(self.kind, keras.Model)
        layer: Any = self.kind.__new__(self.kind)  # type: ignore[call-overload]
        policy = self.arguments["dtype"]
        policy = None if policy is None else keras.dtype_policies.deserialize(policy)
        base = keras.Model if is_model else keras.layers.Layer
        base.__init__(layer, name=self.arguments["name"], dtype=policy)
        later = {}
        known = _names_of_base(is_model)
        for name, value in _AttributeUnpickler(self.content, layer, self.objects).load():
            if name in known:
                later[name] = value
            else:
                setattr(layer, name, value)
        vars(layer).update(later)
        if layer.built:
            layer._lock_state()
        if len(layer.weights) != self.weights:
            raise UsageError(
                f"the copy of {self.kind.__name__} has {len(layer.weights)} weights and the "
                f"original {self.weights}: Keras cannot repeat how its layers are created or "
                "shared; define get_config, or pass a model_creator",
                code="model-copy",
            )
        return layer


_Attributes = _LayerAttributes  # the name in pickles of earlier versions
_PLAIN = (bool, int, float, str, tuple, type(None))
_STATE = frozenset(("_build_shapes_dict", "_input_spec", "_activity_regularizer"))
_NO_STATE = frozenset(
    (
        *("_lock", "_path", "_name", "name", "_auto_config", "_parent_path", "_inbound_nodes"),
        *("_outbound_nodes", "history", "compiled", "optimizer", "loss", "stop_training"),
        *("_epoch_iterator", "_compile_config", "train_function", "test_function"),
        *("predict_function", "_jit_compile", "_run_eagerly", "steps_per_execution"),
        *("_auto_config_error_args", "_distribute_strategy", "_object__state", "_pytree__state"),
        *("torch_params", "_torch_params", "training", "_dtype_policy"),
    )
)
"""Attributes of the process, the class or the compilation, which are not copied."""


@functools.cache
def _names_of_base(is_model: bool) -> frozenset[str]:
    """Return the names of attributes that Keras sets on a layer or a compiled model."""
    if not is_model:
        return frozenset(vars(keras.layers.Layer()))

    class Bare(keras.Model):
        def call(self, x: T) -> T:
            return x

    bare = Bare()
    bare.compile("sgd", "mse", metrics=["mae"])
    bare.build((1, 1))
    return frozenset(vars(bare)) | {"_compile_metrics", "_compile_loss", "_loss_tracker"}


class _AttributePickler(cloudpickle.Pickler):
    """Pickler of layer attributes; it stores program classes as indices, Keras objects by value."""

    def __init__(self, buffer: io.BytesIO, owner: keras.Layer, objects: list[Any]):
        super().__init__(buffer)
        self._owner, self._objects = owner, objects

    def persistent_id(self, value: object) -> str | int | None:
        """Return the placeholder that the pickle stores for an object, or None to pickle it."""
        if value is self._owner:
            return "owner"
        if isinstance(value, types.FunctionType | type) and not _is_of_library(value):
            self._objects.append(value)
            return len(self._objects) - 1
        return None

    def reducer_override(self, value: Any) -> object:
        """Return the pickle reduction of a Keras object or tracked container."""
        if isinstance(
            value, _class_if_imported("keras.src.saving.keras_saveable", "KerasSaveable")
        ):
            return KerasConfig.made, (KerasConfig.of(value),)
        for name, plain in (("TrackedList", list), ("TrackedDict", dict), ("TrackedSet", set)):
            if isinstance(value, _class_if_imported("keras.src.utils.tracking", name)):
                return plain, (plain(value),)
        if isinstance(value, keras.random.SeedGenerator):
            state = keras.ops.convert_to_numpy(value.state)
            return _seed_generator, (value.get_config(), state)
        if isinstance(value, keras.Variable):
            options = {"dtype": value.dtype, "trainable": value.trainable, "name": value.name}
            return _variable, (keras.ops.convert_to_numpy(value), options)
        return super().reducer_override(value)


class _AttributeUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, owner: keras.Layer, objects: list[Any]):
        super().__init__(io.BytesIO(content))
        self._owner, self._objects = owner, objects

    def persistent_load(self, pid: Any) -> object:
        return self._owner if pid == "owner" else self._objects[pid]


def _variable(value: object, options: dict[str, Any]) -> keras.Variable:
    return keras.Variable(value, **options)


def _seed_generator(config: dict[str, Any], state: np.ndarray) -> keras.random.SeedGenerator:
    generator = keras.random.SeedGenerator.from_config(config)
    generator.state.assign(state)
    return generator


# -- what a model was compiled with ----------------------------------------------------------------


@contextlib.contextmanager
def _writable_compile_config(value: object, names: _NameRecorder) -> Iterator[None]:
    """Context manager that lets Keras save a model compiled with callables without a config."""
    config = getattr(value, "_compile_config", None)
    if config is None or not getattr(value, "compiled", False):
        yield
        return

    def written(each: object) -> object:
        if not callable(each) or isinstance(each, type) or hasattr(each, "get_config"):
            return each
        is_named = isinstance(each, types.FunctionType) and each.__name__ != "<lambda>"
        return each if is_named else _named_placeholder(names.name_of(each))

    arguments = keras.tree.map_structure(written, dict(config.config))
    with _temporary_attribute(value, "_compile_config", type(config)(**arguments)):
        yield


def _named_placeholder(name: str) -> Callable[[], None]:
    """Return a placeholder function that Keras saves as `name`."""

    def token() -> None:
        """Do nothing; Keras saves only the name of this function."""

    token.__name__ = token.__qualname__ = name
    token.__module__ = "keras"  # Keras then writes the name unchanged
    return token


@dataclass(frozen=True)
class KerasOptimizer:
    """An optimizer in a model attribute, with the values of its variables.

    Attributes
    ----------
    config : KerasConfig
    weights : list of int
        Indices of the weights that it updates; empty before it is built.
    values : list of numpy.ndarray
    """

    config: KerasConfig
    weights: list[int]
    values: list[Any]

    @classmethod
    def of(cls, optimizer: keras.Optimizer, model: keras.Model) -> KerasOptimizer:
        """Return the serialized optimizer of a model."""
        config = KerasConfig.of(optimizer)
        numbers = {id(weight): n for n, weight in enumerate(model.weights)}
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        updated = [numbers.get(id(weight)) for weight in inner._trainable_variables]
        if not optimizer.built or None in updated:
            return cls(config, [], [])
        values = [keras.ops.convert_to_numpy(each) for each in optimizer.variables]
        return cls(config, [n for n in updated if n is not None], values)

    def made(self, model: keras.Model) -> keras.Optimizer:
        """Rebuild the optimizer for a copy of the model."""
        optimizer = self.config.made()
        if self.weights and model.built:
            optimizer.build([model.weights[n] for n in self.weights])
            for variable, value in zip(optimizer.variables, self.values, strict=True):
                variable.assign(value)
        return optimizer


def _compile_state(model: keras.Model) -> dict[str, Any]:
    """Return the compile arguments and attributes that Keras does not save with a model."""
    if not isinstance(model, keras.Model):
        return {}

    def carried(each: object) -> object:
        if isinstance(each, keras.optimizers.Optimizer):
            return KerasOptimizer.of(each, model)
        return KerasConfig.of(each) if isinstance(each, compile_classes) else each

    compile_classes = keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer
    functions = types.FunctionType, types.MethodType, functools.partial
    optimizers = {
        name: carried(each)
        for name, each in vars(model).items()
        if name != "optimizer" and isinstance(each, keras.optimizers.Optimizer)
    }
    base, model_class = keras.Model, type(model)
    writes = model_class.compile_from_config is not base.compile_from_config
    if not model.compiled or model_class.compile is base.compile or writes:
        return {"set": optimizers} if optimizers and _has_no_config(model) else {}
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    known = _names_of_base(True) | _NO_STATE
    attributes = {
        name: carried(each)
        for name, each in vars(model).items()
        if isinstance(each, (*_PLAIN, *functions, *compile_classes)) and name not in known
        if getattr(each, "__self__", None) is not model
    }
    arguments = keras.tree.map_structure(carried, dict(config))
    return {"compile": arguments, "set": {**optimizers, **attributes}}


def _compile_copy(model: keras.Model, compiled: Mapping[str, Any]) -> None:
    """Compile a copy of a model like the original, bypassing a custom ``compile``."""

    def made(each: object) -> object:
        if isinstance(each, KerasOptimizer):
            return each.made(model)
        return each.made() if isinstance(each, KerasConfig) else each

    if "compile" in compiled:
        arguments = keras.tree.map_structure(made, compiled["compile"])
        keras.Model.compile(model, **arguments, auto_scale_loss=False)
    for name, each in compiled["set"].items():
        if isinstance(each, _PLAIN) or getattr(model, name, None) is None:
            with contextlib.suppress(AttributeError):  # a property
                setattr(model, name, made(each))
