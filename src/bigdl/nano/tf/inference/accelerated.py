"""Accelerated Keras models, which run in another runtime or precision with the Keras interface.

A method builds an accelerated model with ``of``, which copies the compile arguments of the user's
model and keeps that model as ``nano_source``. ``save`` writes its files and the metadata in
``nano_model_meta.yml``; ``load`` finds the class by its name in that file. A loaded model has no
source unless the user passes one.

OpenVINO reads frozen TensorFlow graphs. If it cannot convert one, the model is exported to ONNX,
where tf2onnx has replaced some loops by a single operator.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Self

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import LazyModule, UsageError, as_usage_error, one_line, require
from bigdl.common.placeholders import resolve_placeholder
from bigdl.common.private_folders import scratch_folder
from bigdl.nano.acceleration.method import BuildOptions, RuntimeNetwork, check_threads
from bigdl.nano.acceleration.onnxruntime import OnnxRuntimeFacade
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.acceleration.saved import SavedModel, class_of, open_saved_model, write_directory
from bigdl.nano.acceleration.structure import Structure, is_tensor
from bigdl.nano.openvino.methods import preprocessed
from bigdl.nano.openvino.model import OpenVINOFacade
from bigdl.nano.tf.inference.source import (
    KerasCallSignature,
    KerasSource,
    Port,
    numpy_type,
    ports_as_json,
    ports_from_json,
)
from bigdl.nano.tf.serialization import compiled_like
from bigdl.runtime.keras_objects import KerasArchive

if TYPE_CHECKING:
    import openvino as ov
    from tf2onnx.graph import Graph, Node

openvino = LazyModule("openvino", "nano")

_REFUSED = (
    *("fit", "train_on_batch", "get_layer", "get_config", "to_json", "to_yaml", "summary"),
    *("save", "save_weights", "load_weights", "set_weights", "export", "quantize", "pop", "add"),
)


class AcceleratedKerasModel(SavedModel, keras.Model):
    """A Keras model for inference that delegates unknown attributes to the original model.

    It has ``model(x)``, ``predict``, ``predict_on_batch``, ``evaluate``, ``test_on_batch`` and
    ``compile`` of a Keras model; methods that train, change or describe layers are refused. It is
    always in inference mode.

    Attributes
    ----------
    nano_method : str or None
        Name of the method that built it.
    nano_source : keras.Model or None
        The user's model, whose layers are not part of this model.
    nano_network
        Network whose ``infer`` takes and returns flat lists of ndarrays. The caller owns the
        results.
    nano_inputs : KerasCallSignature
    nano_outputs : Structure
    nano_ports : tuple of Port
        Specs of the output tensors.
    thread_num : int or None
        Number of threads of the runtime.
    """

    def __init__(
        self,
        network: RuntimeNetwork,
        inputs: KerasCallSignature,
        outputs: Structure,
        ports: tuple[Port, ...],
        *,
        method: str | None = None,
        threads: int | None = None,
    ):
        super().__init__()
        # Bypass __setattr__: Keras would track models and containers as layers.
        self.__dict__.update(
            nano_network=network,
            nano_method=method,
            nano_source=None,
            nano_inputs=inputs,
            nano_outputs=outputs,
            nano_ports=ports,
            thread_num=threads,
        )
        self.built = True

    @classmethod
    def of(
        cls, source: KerasSource, network: RuntimeNetwork, method: str, options: BuildOptions
    ) -> Self:
        """Create the accelerated model from a source and the network made from it."""
        ends = (source.inputs, source.outputs, source.output_ports)
        model = cls(network, *ends, method=method, threads=network.thread_num)
        return model.nano_attach(source.model)

    def nano_attach(self, source: keras.Model | None) -> Self:
        """Set the original model, to which attribute access is delegated; return this model."""
        self.__dict__["nano_source"] = source
        if source is not None:
            compiled_like(self, source)
        return self

    save_to: Callable[[Path], dict[str, Any]]
    """Function that writes this model's files into an empty directory and returns the metadata for
    :attr:`load_network`, in JSON types."""
    load_network: ClassVar[Callable[..., Any]]
    """Function that loads the network of a saved directory."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the model like the original; ``training=True`` is refused."""
        if kwargs.pop("training", None):
            raise UsageError(
                f"{type(self).__name__} only predicts; train the original model and convert it "
                "again",
                code="unsupported",
            )
        kwargs.pop("mask", None)
        leaves = self.nano_inputs.flatten(args, kwargs)
        if any(tf.is_symbolic_tensor(leaf) for leaf in leaves):
            return self._in_a_graph(leaves)
        results = self.nano_network.infer(self.nano_inputs.arrays(args, kwargs))
        return self._rebuilt(results, tf.convert_to_tensor)

    def call(self, *args: object, training: bool | None = None, mask: object = None) -> object:
        """Call the model, as ``__call__`` does."""
        return self(*args)

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile like ``keras.Model.compile`` without XLA, which cannot call other runtimes."""
        super().compile(*args, **{**kwargs, "jit_compile": False})

    def predict(
        self,
        x: object,
        batch_size: int | None = None,
        verbose: object = "auto",
        steps: int | None = None,
        callbacks: object = None,
    ) -> object:
        """Predict like ``keras.Model.predict``; arrays are passed to the runtime directly."""
        arrays = all(map(is_tensor, keras.tree.flatten(x)))
        if callbacks is not None or verbose not in (0, "auto") or not arrays:
            return super().predict(x, batch_size, verbose, steps, callbacks)
        leaves = self.nano_inputs.arrays([x])
        size = batch_size or 32
        starts = range(0, len(leaves[0]), size)[:steps]
        if not starts:
            raise UsageError("x holds no row; give at least one", code="data-empty", argument="x")
        batches = ([leaf[start : start + size] for leaf in leaves] for start in starts)
        results = list(map(self.nano_network.infer, batches))
        return self._rebuilt(_joined(results))

    def predict_on_batch(self, x: object) -> object:
        """Predict one batch like ``keras.Model.predict_on_batch``."""
        return self._rebuilt(self.nano_network.infer(self.nano_inputs.arrays([x])))

    def make_predict_function(self, force: bool = False) -> object:
        """Return the function that ``predict`` calls with a list of batches of a dataset."""

        def predicted(batches: list) -> object:
            inputs = (batch[0] if isinstance(batch, tuple) else batch for batch in batches)
            results = [self.nano_network.infer(self.nano_inputs.arrays([x])) for x in inputs]
            return self._rebuilt(_joined(results), tf.convert_to_tensor)

        self.predict_function = predicted
        return predicted

    def nano_describe(self) -> dict[str, Any]:
        return {**super().nano_describe(), "ports": ports_as_json(self.nano_ports)}

    def _declared(self, results: list[np.ndarray]) -> list[np.ndarray]:
        """Cast results to the dtypes of the original model's results."""
        return [
            result.astype(tf.as_dtype(port.dtype).as_numpy_dtype, copy=False)
            for result, port in zip(results, self.nano_ports, strict=True)
        ]

    def _rebuilt(
        self, results: list[np.ndarray], convert: Callable[[np.ndarray], object] | None = None
    ) -> object:
        """Nest flat results like the original model's results; apply `convert` to each if set."""
        declared = self._declared(results)
        return self.nano_outputs.rebuild(map(convert, declared) if convert else declared)

    def _in_a_graph(self, leaves: list) -> object:
        """Run the model as one operation of a TensorFlow graph, e.g. the graph of ``evaluate``."""
        ports = self.nano_ports

        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            inputs = self.nano_inputs.arrays(self.nano_inputs.pack(arrays))
            return self._declared(self.nano_network.infer(inputs))

        results = tf.numpy_function(run, leaves, [tf.as_dtype(port.dtype) for port in ports])
        for result, port in zip(results, ports, strict=True):
            result.set_shape((None, *port.shape[1:]) if port.shape else None)
        return self.nano_outputs.rebuild(results)

    @classmethod
    def load_from(
        cls, directory: Path, meta: Mapping, model: keras.Model, device: str | None
    ) -> Self:
        """Load an accelerated model from a directory that :func:`save_model` wrote."""
        if "ports" not in meta:
            raise UsageError(
                "The directory does not describe the model's inputs and outputs; directories of "
                "BigDL 2 do not. Save the model again from the original",
                code="version-unsupported",
            )
        return cls(
            cls.load_network(directory, meta, device=device),
            KerasCallSignature.from_json(meta["inputs"]),
            Structure.from_json(meta["outputs"]),
            ports_from_json(meta["ports"]),
            method=meta.get("method"),
            threads=meta.get("thread_num"),
        ).nano_attach(model)

    def __getattr__(self, name: str) -> Any:  # an attribute of the original
        source = vars(self).get("nano_source")
        if not name.startswith("_") and hasattr(source, name):
            return getattr(source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple:
        """Pickle the files that saving the model writes, without the original model."""
        with scratch_folder("nano") as folder:
            save_model(self, Path(folder, "model"))
            files = {f.name: f.read_bytes() for f in Path(folder, "model").iterdir()}
        return _unpickled, (files, type(self))


def _refusing(name: str) -> object:
    def refuse(self: object, *args: object, **kwargs: object) -> object:
        raise UsageError(
            f"{type(self).__name__} has no {name}: it predicts and evaluates only; use the "
            "original model, and InferenceOptimizer.save for this one",
            code="unsupported",
            method=name,
        )

    refuse.__name__ = name
    refuse.__doc__ = "Raise a UsageError: an accelerated model does not support this."
    return refuse


for _name in _REFUSED:
    setattr(AcceleratedKerasModel, _name, _refusing(_name))


def _unpickled(
    files: dict[str, bytes], model_class: type[AcceleratedKerasModel]
) -> AcceleratedKerasModel:
    """Load a model from its files; the argument `model_class` makes pickle import its module."""
    files_in_memory = {name: io.BytesIO(content) for name, content in files.items()}
    return load_model(files_in_memory, trust=True)  # the files come from a pickle


def _joined(results: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Concatenate the rows of all batches for each output."""
    if len(results) == 1:
        return results[0]
    return [np.concatenate(each) for each in zip(*results, strict=True)]


_PLAIN = "KerasModel"
_FILE = "saved_model.keras"
_COMPILED = "compile.json"


def save_model(model: keras.Model, path: str | os.PathLike) -> None:
    """Save a model, accelerated or not, to a directory.

    Parameters
    ----------
    model : keras.Model
    path : str or path
        The directory. A model in it is replaced once the new one is complete.

    Raises
    ------
    UsageError
        If `model` is no Keras model, or the directory cannot be written.
    """
    model = resolve_placeholder(model)
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"model must be a Keras model, not a {type(model).__name__}", code="model-type"
        )

    def write(directory: Path) -> dict:
        if not isinstance(model, AcceleratedKerasModel):
            model.save(directory / _FILE)
            return {"ModelType": _PLAIN, "checkpoint": _FILE}
        meta = {"ModelType": type(model).__name__, **model.save_to(directory)}
        return meta | _write_compiled(model, directory)

    write_directory(path, write)


def load_model(
    path: str | os.PathLike | Mapping[str, BinaryIO],
    model: keras.Model = None,
    device: str | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    thread_num: int | None = None,
    *,
    trust: bool = False,
) -> keras.Model:
    """Load a model from a directory written by :func:`save_model`.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.
    model : keras.Model, optional
        The original model, to which unknown attributes are passed on.
    device : str, optional
        OpenVINO device to use instead of the saved one.
    custom_objects : mapping, optional
        Custom classes and functions by name.
    thread_num : int, optional
        Number of threads to use instead of the saved one.
    trust : bool
        Run code in a Keras file, such as that of a Lambda layer.

    Raises
    ------
    UsageError
        If the directory or a file of it is missing, or it holds no such model.
    """
    model = resolve_placeholder(model)
    scope = keras.saving.custom_object_scope(dict(custom_objects or {}))
    with open_saved_model(path, check_threads(thread_num), trust) as (directory, meta), scope:
        if meta["ModelType"] == _PLAIN:
            with as_usage_error(
                "Keras cannot load the model", code="file-damaged", path=str(directory)
            ):
                return read_keras(directory, meta)
        cls = class_of(meta, AcceleratedKerasModel, model, "tensorflow")
        loaded = cls.load_from(directory, meta, model, device)
        if model is None and meta.get("compile"):
            _compile(loaded, directory / meta["compile"])
        return loaded


def read_keras(directory: Path, meta: Mapping[str, Any], **options: object) -> keras.Model:
    """Load the Keras file of a saved directory; code in it runs only if the caller trusts it."""
    file = directory / meta["checkpoint"]
    if file.suffix != ".keras":  # in other formats Keras checks less
        raise UsageError(
            f"{file} must be a Keras file with the suffix .keras",
            code="file-format",
            path=str(file),
        )
    return keras.saving.load_model(file, safe_mode=not getattr(meta, "trust", False), **options)


def _write_compiled(model: AcceleratedKerasModel, directory: Path) -> dict:
    """Write the arguments of ``compile`` as JSON, so that a loaded model can evaluate."""
    config = model.get_compile_config()
    if not config:
        return {}
    saved = {key: config[key] for key in ("loss", "loss_weights", "metrics", "weighted_metrics")}
    try:
        content = json.dumps(saved)
    except TypeError:  # an object that Keras cannot serialize
        return {}
    (directory / _COMPILED).write_text(content, encoding="utf-8")
    return {"compile": _COMPILED}


def _compile(model: AcceleratedKerasModel, file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    sentence = "The loaded model cannot be compiled as the saved one was"
    with as_usage_error(
        sentence,
        "; pass custom_objects, or model",
        code="argument-missing",
        argument="custom_objects",
    ):
        model.compile(**keras.saving.deserialize_keras_object(config))


_OPSET = 18  # the newest one that tf2onnx supports


def to_openvino(source: KerasSource, options: BuildOptions) -> object:
    """Convert a source's model to an ``openvino.Model`` with flat inputs and outputs.

    Raises
    ------
    UsageError
        If OpenVINO cannot convert it, or a keyword of the conversion does not fit.
    """
    if isinstance(source.model, KerasOpenVINOModel):
        if options.conversion:
            raise UsageError(
                f"{', '.join(map(repr, options.conversion))} applies to the conversion, but the "
                "model is an OpenVINO model already; pass the original model",
                code="argument-conflict",
                argument=next(iter(options.conversion)),
            )
        return source.model.ov_model.clone()
    with scratch_folder("keras") as folder:
        network = _converted(source, Path(folder))
    keywords = dict(options.conversion)
    if keywords and "layout" not in keywords:  # Keras images have their channels last
        pairs = zip(source.graph_names, source.inputs.ports, strict=True)
        images = {name: "NHWC" for name, port in pairs if len(port.shape) == 4}
        keywords |= {"layout": images} if images else {}
    return preprocessed(network, keywords)


def to_onnx(source: KerasSource, path: str, options: BuildOptions) -> list[str]:
    """Export a source's model to ONNX with flat inputs and outputs; return its input names.

    Raises
    ------
    UsageError
        If it cannot be converted, or a keyword of the conversion does not fit.
    """
    tf2onnx = require("tf2onnx", "tf")
    keywords = dict(options.conversion)
    opset = keywords.pop("opset", keywords.pop("opset_version", _OPSET))
    if keywords:
        raise UsageError(
            f"The export of a Keras model to ONNX has no argument {', '.join(sorted(keywords))}; "
            "it takes opset",
            code="argument-unknown",
            argument=next(iter(keywords)),
            allowed=["opset"],
        )
    with (
        as_usage_error(
            f"tf2onnx cannot convert {type(source.model).__name__}", code="model-unsupported"
        ),
        quiet(),
    ):
        tf2onnx.convert.from_function(
            source.graph,
            input_signature=source.graph.input_signature,
            opset=opset,
            custom_op_handlers={"Erfc": (_erfc, [])},
            output_path=path,
        )
    _keep_constants(source, path)
    return source.graph_names


def _keep_constants(source: KerasSource, path: str) -> None:
    """Turn captured tensors of the graph, e.g. of Normalization, into ONNX constants.

    tf2onnx converts only variables to constants, and other captured tensors to inputs.
    """
    import onnx

    captured = {inner.name: outer for outer, inner in source.concrete.graph.captures}
    model = onnx.load(path)
    lost = [port for port in model.graph.input if port.name in captured]
    for port in lost:
        value = onnx.numpy_helper.from_array(captured[port.name].numpy(), port.name)
        model.graph.initializer.append(value)
        model.graph.input.remove(port)
    if lost:
        onnx.save(model, path)


def _converted(source: KerasSource, folder: Path) -> object:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    try:
        frozen = convert_variables_to_constants_v2(source.concrete)
        tf.io.write_graph(frozen.graph.as_graph_def(), str(folder), "model.pb", as_text=False)
        with quiet():
            network = openvino.convert_model(folder / "model.pb")
        inputs, outputs = (
            [tensor.name for tensor in ends] for ends in (frozen.inputs, frozen.outputs)
        )
        return _in_order(network, source, inputs, outputs)
    except Exception as error:
        file = folder / "model.onnx"
        try:
            inputs = to_onnx(source, str(file), BuildOptions())
            with quiet():
                network = openvino.convert_model(file)
        except Exception:  # any error of OpenVINO; report the first one, which is more specific
            raise UsageError(
                f"OpenVINO cannot convert {type(source.model).__name__}: {one_line(error)}",
                code="model-unsupported",
            ) from error
        outputs = [tensor.name for tensor in source.concrete.outputs]
        return _in_order(network, source, inputs, outputs)


def _in_order(
    network: ov.Model,  # openvino.Model
    source: KerasSource,
    inputs: list[str],
    outputs: list[str],
) -> object:
    """Return the network with only the function's inputs and outputs, in the function's order.

    OpenVINO adds outputs for unused values, and drops unused inputs.
    """
    ends = _named(network.outputs, outputs)
    if None in ends:
        raise UsageError("an output was lost", code="model-unsupported")
    begins = _named(network.inputs, inputs)
    parameters = []
    for begin, port, name in zip(begins, source.inputs.ports, source.graph_names, strict=True):
        shape = [-1 if size is None else size for size in port.shape]
        if begin is None:
            parameter = openvino.opset13.parameter(shape, numpy_type(port.dtype))
        else:
            parameter = begin.get_node()
        parameter.set_friendly_name(name)
        parameter.output(0).set_names({name})
        parameters.append(parameter)
    results = [openvino.opset13.result(end.get_node().input_value(0)) for end in ends]
    return openvino.Model(results, parameters, type(source.model).__name__)


def _named(ports: list, names: list[str]) -> list:
    """Return the network port for each of `names`, or None for a name that no port has."""
    by_name = {name.removesuffix(":0"): port for port in ports for name in port.get_names()}
    return [by_name.get(name.removesuffix(":0")) for name in names]


def _erfc(context: Graph, node: Node, name: str, arguments: object) -> None:
    """Convert ``erfc(x)``, a part of GELU that ONNX lacks, to ``1 - erf(x)``."""
    from tf2onnx import utils

    dtype, shape = context.get_dtype(node.output[0]), context.get_shape(node.output[0])
    one = np.array(1, utils.map_onnx_to_numpy_type(dtype))
    constant = context.make_const(utils.make_name("one"), one).output[0]
    erf = context.make_node("Erf", [node.input[0]]).output[0]
    outputs = list(node.output)
    context.remove_node(node.name)
    context.make_node(
        "Sub", [constant, erf], outputs=outputs, name=node.name, dtypes=[dtype], shapes=[shape]
    )


class KerasOpenVINOModel(OpenVINOFacade, AcceleratedKerasModel):
    """An OpenVINO network with the interface of the user's model."""

    def nano_arrays_of(self, call: object) -> list[np.ndarray]:
        return self.nano_inputs.arrays([call])

    def nano_result_of(self, results: list[np.ndarray]) -> object:
        return self._rebuilt(results, tf.convert_to_tensor)


class KerasONNXRuntimeModel(OnnxRuntimeFacade, AcceleratedKerasModel):
    """An ONNX Runtime network with the interface of the user's model."""


class KerasBF16Model(AcceleratedKerasModel):
    """A clone of the user's model under the policy ``mixed_bfloat16``, run as a graph.

    Weights are float32, layers compute in bfloat16, and results have the original's types.
    """

    def save_to(self, directory: Path) -> dict:
        self.nano_network.source.model.save(directory / _FILE)
        return {**self.nano_describe(), "checkpoint": _FILE}

    @classmethod
    def load_network(cls, directory: Path, meta: Mapping, *, device: str | None) -> BF16Graph:
        clone = read_keras(directory, meta, compile=False)
        return BF16Graph(clone, KerasCallSignature.from_json(meta["inputs"]))


class BF16Graph:
    """Graph with flat inputs and outputs of a model whose layers compute in bfloat16.

    Parameters
    ----------
    model : keras.Model
        See :func:`bf16_clone`.
    inputs : KerasCallSignature
    threads : int, optional
        Requested number of TensorFlow threads.
    """

    def __init__(self, model: object, inputs: KerasCallSignature, threads: int | None = None):
        self.source = KerasSource(model)
        self.source.inputs = inputs
        self.thread_num = threads

    def infer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the graph on a flat list of arrays."""
        return [np.asarray(result) for result in self.source.graph(*inputs)]


def bf16_clone(model: keras.Model) -> keras.Model:
    """Return a copy of a model, with its weights, whose float32 layers compute in bfloat16.

    Raises
    ------
    UsageError
        If Keras cannot rebuild the model from its configuration.
    """
    with as_usage_error(f"{type(model).__name__} cannot be copied", code="model-copy"):
        clone = KerasArchive.of(model, compiled=False).made()
    policy = keras.dtype_policies.get("mixed_bfloat16")
    for layer in clone._flatten_layers():
        if getattr(layer.dtype_policy, "name", None) == "float32":
            layer.dtype_policy = policy
    return clone
