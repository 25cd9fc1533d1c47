"""Runners, which call models of all frameworks with flat lists of arrays.

A runner is created from a directory that ``InferenceOptimizer.save`` wrote, from a network file, or
from a model in memory, which is accelerated first. OpenVINO and ONNX networks are read without
their original framework, so serving them imports neither PyTorch nor TensorFlow.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.common.private_folders import scratch_folder
from bigdl.common.trust import UntrustedFileError, untrusted
from bigdl.nano.acceleration.onnxruntime import OnnxFile, OnnxNetwork, OnnxRuntimeFacade, port_dtype
from bigdl.nano.acceleration.saved import META_FILE, open_saved_model
from bigdl.nano.acceleration.structure import CallSignature, Structure, as_array, flatten
from bigdl.nano.openvino.model import OpenVINOFacade
from bigdl.nano.openvino.network import CompiledNetwork, ShapedNetwork, port_name
from bigdl.nano.serving.signature import Signature, TensorSpec
from bigdl.nano.serving.text_models import ServedText, load_text, text_source
from bigdl.nano.serving.tree_models import TREE_FILES, ServedTrees, is_tree_file

if TYPE_CHECKING:
    import keras
    import openvino as ov
    import torch
    from onnxruntime import NodeArg

    from bigdl.nano.tf.inference.source import Port

__all__ = ["ModelRunner", "make_runner"]

_FLOAT = np.dtype("float32")
_OPEN_SIZE = 8
"""Size of dynamic dimensions in the arrays of a trial run."""
MODEL_FILES = ("model.onnx", "model.xml", "ov_saved_model.xml", "model.keras", *TREE_FILES)


@dataclass(frozen=True)
class ModelRunner:
    """A model that is called with a flat list of arrays; any number of threads may call it.

    Attributes
    ----------
    run : callable
    signature : Signature
    platform : str
        Runtime, e.g. ``"openvino"``.
    method : str
        Acceleration method, e.g. ``"openvino_int8"``; empty if unknown.
    sample : list of ndarray, optional
        Arrays that the model is known to accept.
    joins : bool
        True if the result of a row does not depend on the other rows, so that requests may be
        batched; see :meth:`tried`.
    network : CompiledNetwork, optional
        The OpenVINO network, if the runtime is OpenVINO.
    text : ServedText, optional
        The text model that it runs.
    """

    run: Callable[[list[np.ndarray]], list[np.ndarray]]
    signature: Signature
    platform: str
    method: str = ""
    sample: list[np.ndarray] | None = None
    joins: bool = False
    network: CompiledNetwork | None = None
    text: ServedText | None = None

    def arrays_of(self, rows: int) -> list[np.ndarray]:
        """Return input arrays of `rows` rows, from the sample or with random numbers and zeros."""
        random = np.random.default_rng(rows)
        arrays = []
        for position, spec in enumerate(self.signature.inputs):
            if self.sample is not None:
                array = self.sample[position]
                fixed = not (spec.shape and spec.shape[0] == -1)
                arrays.append(array if fixed else np.resize(array, (rows, *array.shape[1:])))
                continue
            shape = [_OPEN_SIZE if size == -1 else size for size in spec.shape]
            if spec.shape and spec.shape[0] == -1:
                shape[0] = rows
            if spec.dtype.kind == "f":
                arrays.append(random.random(shape).astype(spec.dtype))
            elif spec.dtype == object:
                arrays.append(np.full(shape, b"", object))
            else:  # 0 is a valid index of every embedding table
                arrays.append(np.zeros(shape, spec.dtype))
        return arrays

    def tried(self) -> ModelRunner:
        """Test the model on a few rows; return a runner with the observed outputs and `joins` set.

        Raises
        ------
        UsageError
            If the model does not run, or its output has no finite number.
        """
        with as_usage_error(
            "The model does not run on arrays of its signature", code="model-unsupported"
        ):
            one, two = (self.run(self.arrays_of(rows)) for rows in (1, 2))
        floats = [each for each in two if each.dtype.kind == "f" and each.size]
        if floats and not any(np.isfinite(each).any() for each in floats):
            raise UsageError(
                "The model returns no finite number; its weights may be damaged",
                code="model-output",
            )
        signature = replace(self.signature, outputs=tuple(self._outputs(one, two)))
        joins = signature.has_rows and self._rows_independent(two)
        return replace(self, signature=signature, joins=joins)

    def _outputs(self, one: list[np.ndarray], two: list[np.ndarray]) -> list[TensorSpec]:
        """Return the output specs, with types and sizes from the results for 1 row and 2 rows."""
        specs = []
        for spec, first, second in zip(self.signature.outputs, one, two, strict=True):
            dtype = np.dtype(object) if first.dtype.kind in "SUO" else first.dtype
            shape = spec.shape if len(spec.shape) == first.ndim else (-1,) * first.ndim
            if first.ndim:
                grows = len(first) == 1 and len(second) == 2 and self._rows_are_open
                shape = (-1 if grows else shape[0] if shape[0] != -1 else len(first), *shape[1:])
            specs.append(TensorSpec(spec.name, dtype, shape))
        return specs

    @property
    def _rows_are_open(self) -> bool:
        inputs = self.signature.inputs
        return bool(inputs) and all(spec.shape and spec.shape[0] == -1 for spec in inputs)

    def _rows_independent(self, together: list[np.ndarray]) -> bool:
        """Return True if two rows give the same results separately as in one batch."""
        for row in (0, 1):
            alone = self.run([each[row : row + 1] for each in self.arrays_of(2)])
            for part, whole in zip(alone, together, strict=True):
                if part.dtype.kind != "f":
                    same = np.array_equal(part, whole[row : row + 1])
                else:  # the order of additions may depend on the batch size
                    scale = float(np.abs(whole).max(initial=1e-6))
                    same = np.allclose(part, whole[row : row + 1], 2e-2, 2e-2 * scale, True)
                if not same:
                    return False
        return True


def make_runner(
    model: object,
    *,
    sample: object = None,
    method: str | None = None,
    input_names: Sequence[str] | None = None,
    inputs: str | None = None,
    thread_num: int | None = None,
    device: str | None = None,
    trust: bool = False,
    **arguments: Any,
) -> ModelRunner:
    """Return a runner of a model.

    Parameters
    ----------
    model
        Path of a saved model, of an ONNX, OpenVINO or Keras file, or of trees of XGBoost or
        LightGBM; a PyTorch module; a Keras model; or a model accelerated by
        ``InferenceOptimizer``.
    sample : optional
        Sample input; required for a PyTorch module.
    method : str, optional
        Acceleration method of a model in memory, e.g. ``"openvino_int8"``; ``"original"`` runs it
        in its framework. Default ``"openvino_fp32"``. For a file with trees ``"auto"``: XGBoost or
        ONNX Runtime, whichever is faster.
    input_names : sequence of str, optional
        Names of the inputs in order. Default: the model's names, or the ``feature_cols`` of a
        model of ``bigdl.friesian.models``.
    inputs : str, optional
        Types and shapes of the inputs, as ``"x: FP32[-1,4]"``, for a PyTorch graph file that does
        not contain them.
    thread_num : int, optional
        Threads of one call.
    device : str, optional
        OpenVINO device.
    trust : bool
        Run code that the path contains (a PyTorch graph, a Keras Lambda layer) although no program
        of this user has signed it.
    **arguments
        Arguments of ``InferenceOptimizer.build``, e.g. ``calib_data``.

    Raises
    ------
    UsageError
        If the model cannot be read, accelerated or run.
    """
    if thread_num is not None:
        check_positive("thread_num", thread_num)
    if isinstance(model, ModelRunner):
        runner = model
    elif isinstance(model, str | os.PathLike):
        is_tree = is_tree_file(Path(model).suffix)
        if (method is not None and not (is_tree and method == "auto")) or arguments:
            raise UsageError(
                "A saved model runs as it was saved; method, calib_data and similar arguments are "
                "for models in memory",
                code="argument-conflict",
                argument="method",
            )
        source = text_source(Path(model))
        if source is not None:
            text = load_text(source, thread_num)
            method = f"{text.task}_{text.precision}"
            return ModelRunner(text.run, text.signature, "openvino", method, joins=True, text=text)
        is_fastest = method == "auto"
        runner = _of_path(Path(model), sample, inputs, thread_num, device, trust, is_fastest)
    else:
        runner = _of_model(model, sample, method, inputs, thread_num, device, arguments)
    names = input_names or _column_names(model, runner)
    return replace(runner, signature=runner.signature.renamed(names)).tried()


def _column_names(model: object, runner: ModelRunner) -> Sequence[str] | None:
    """Return the column names of a recommender model if there is one per input, else None."""
    model = getattr(model, "nano_source", None) or model
    columns = getattr(model, "feature_cols", None)
    if isinstance(columns, list) and len(columns) == len(runner.signature.inputs):
        return columns
    return None


# Models in files ----------------------------------------------------------------------------


def _of_path(
    path: Path,
    sample: object,
    inputs: str | None,
    thread_num: int | None,
    device: str | None,
    trust: bool,
    is_fastest: bool,
) -> ModelRunner:
    if not path.exists():
        raise UsageError(f"There is no model at {str(path)!r}", code="path-missing", path=str(path))
    if path.is_dir() and not (path / META_FILE).exists():
        present = [path / name for name in MODEL_FILES if (path / name).exists()]
        if not present:
            raise UsageError(
                f"{str(path)!r} holds no model: neither {META_FILE}, which InferenceOptimizer.save "
                f"writes, nor {', '.join(MODEL_FILES)}",
                code="file-format",
                path=str(path),
            )
        path = present[0]
    if path.is_file():
        return _of_file(path, thread_num, device, trust, is_fastest)
    # Copy the files, so that overwriting them does not change the running model.
    files = {each.name: io.BytesIO(each.read_bytes()) for each in path.iterdir() if each.is_file()}
    with open_saved_model(files, thread_num) as (directory, meta):
        model_type = str(meta["ModelType"])
        complete = "OpenVINO" not in model_type or (directory / str(meta.get("xml_path"))).exists()
        if meta.get("onnx_path") or (meta.get("xml_path") and complete):
            return _of_network_files(directory, meta, device)
    if model_type.startswith("Keras"):
        from bigdl.nano.tf.keras import InferenceOptimizer as KerasOptimizer

        _rewind(files)
        model = KerasOptimizer.load(files, thread_num=thread_num, trust=trust)
        return _of_keras(model, model_type)
    from bigdl.nano.pytorch import InferenceOptimizer

    _rewind(files)
    with as_usage_error(f"{str(path)!r} cannot be served", code="file-damaged", path=str(path)):
        try:
            loaded = InferenceOptimizer.load(files, thread_num=thread_num, trust=trust)
        except UntrustedFileError:
            raise untrusted(path, "a saved graph of PyTorch") from None
    return _of_module(loaded, sample, inputs, str(meta.get("method") or ""), _graph_specs(meta))


def _rewind(files: Mapping[str, io.BytesIO]) -> None:
    """Rewind in-memory files to their beginnings."""
    for file in files.values():
        file.seek(0)


def _of_file(
    path: Path, thread_num: int | None, device: str | None, trust: bool, is_fastest: bool
) -> ModelRunner:
    if path.suffix == ".onnx":
        require("onnxruntime", "nano")
        return _of_onnx(OnnxNetwork(OnnxFile.read(path), threads=thread_num))
    if path.suffix == ".xml":
        weights = path.with_suffix(".bin")
        if not weights.exists():
            raise UsageError(
                f"The weights file {weights.name} next to {str(path)!r} is missing",
                code="path-missing",
                path=str(weights),
            )
        content = (path.read_bytes(), weights.read_bytes())
        return _of_openvino(ShapedNetwork(content, device or "CPU", thread_num=thread_num))
    if path.suffix == ".keras":
        keras = require("keras", "tf")
        with scratch_folder("serving") as folder:
            copy = Path(folder, path.name)
            copy.write_bytes(path.read_bytes())
            with as_usage_error(
                f"Keras cannot load {str(path)!r}", code="file-damaged", path=str(path)
            ):
                model = keras.saving.load_model(copy, compile=False, safe_mode=not trust)
                return _of_keras(model, "KerasModel")
    if is_tree_file(path.suffix):
        return _of_trees(path, thread_num, is_fastest=is_fastest)
    raise UsageError(
        f"{str(path)!r} cannot be served; give a directory that InferenceOptimizer.save wrote, or "
        "a file that ends in .onnx, .xml or .keras, or in .ubj, .json or .txt for trees",
        code="file-format",
        path=str(path),
    )


def _of_trees(path: Path, thread_num: int | None, *, is_fastest: bool = False) -> ModelRunner:
    with as_usage_error(
        f"{str(path)!r} holds no trees of XGBoost or LightGBM", code="file-damaged", path=str(path)
    ):
        served = ServedTrees(path.read_bytes(), thread_num, is_fastest=is_fastest)
    library = served.trees.library
    method = "onnxruntime_fp32" if library == "onnxruntime" else "original"
    return ModelRunner(served.run, served.signature, library, method)


def _of_network_files(directory: Path, meta: Mapping[str, Any], device: str | None) -> ModelRunner:
    ends = None
    if "inputs" in meta:
        names: Sequence[str]
        if "ports" in meta["inputs"]:  # a Keras model
            names = [port[0] for port in meta["inputs"]["ports"]]
        else:
            names = CallSignature.from_json(meta["inputs"]).names
        ends = names, Structure.from_json(meta["outputs"])
    method = str(meta.get("method") or "")
    if meta.get("xml_path"):
        network = OpenVINOFacade.load_network(directory, meta, device=device)
        return _of_openvino(network, ends, method)
    return _of_onnx(OnnxRuntimeFacade.load_network(directory, meta, device=device), ends, method)


Ends = tuple[Sequence[str], Structure]
"""Names of a network's inputs, and the nesting of its outputs."""


def _of_network(network: OnnxNetwork | CompiledNetwork, ends: Ends, method: str) -> ModelRunner:
    if isinstance(network, OnnxNetwork):
        return _of_onnx(network, ends, method)
    return _of_openvino(network, ends, method)


def _of_openvino(
    network: CompiledNetwork, ends: Ends | None = None, method: str = "openvino_fp32"
) -> ModelRunner:
    ports = network.compiled
    inputs = [TensorSpec(port_name(each), *_port_type(each)) for each in ports.inputs]
    outputs = [TensorSpec(port_name(each), *_port_type(each)) for each in ports.outputs]
    signature = _with_ends(inputs, outputs, ends)
    return ModelRunner(network.infer, signature, "openvino", method, network=network)


def _port_type(port: ov.Output) -> tuple[np.dtype, tuple[int, ...]]:
    element = port.get_element_type()
    is_text = element.get_type_name() == "string"
    dtype = np.dtype(object) if is_text else np.dtype(element.to_dtype())
    shape = port.partial_shape
    if shape.rank.is_dynamic:
        return dtype, (-1,)
    return dtype, tuple(size.get_length() if size.is_static else -1 for size in shape)


def _of_onnx(
    network: OnnxNetwork, ends: Ends | None = None, method: str = "onnxruntime_fp32"
) -> ModelRunner:
    known = {each.name: _onnx_spec(each) for each in network.session.get_inputs()}
    inputs = [known.get(name, TensorSpec(name, _FLOAT, (-1,))) for name in network.input_names]
    outputs = [_onnx_spec(each) for each in network.session.get_outputs()]
    return ModelRunner(network.infer, _with_ends(inputs, outputs, ends), "onnxruntime", method)


def _onnx_spec(port: NodeArg) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else -1 for size in port.shape)
    return TensorSpec(port.name, port_dtype(port), shape)


def _with_ends(inputs: list[TensorSpec], outputs: list[TensorSpec], ends: Ends | None) -> Signature:
    """Return a network's signature with the input and output names of the user's model."""
    if ends is None:
        return Signature(tuple(inputs), tuple(outputs))
    names = output_names(ends[1])
    return Signature(
        tuple(replace(spec, name=name) for spec, name in zip(inputs, ends[0], strict=True)),
        tuple(replace(spec, name=name) for spec, name in zip(outputs, names, strict=True)),
    )


def output_names(structure: Structure) -> list[str]:
    """Return names for the tensors of a result: dict keys, ``output``, or ``output_0``, …."""
    if structure.node_type == "tensor":
        return ["output"]
    paths = structure.paths("")
    if structure.node_type in ("list", "tuple"):
        paths = [f"output_{path}" for path in paths]
    return [path.replace(".", "_") for path in paths]


# Models in memory ---------------------------------------------------------------------------


def _of_model(
    model: Any,
    sample: object,
    method: str | None,
    inputs: str | None,
    thread_num: int | None,
    device: str | None,
    arguments: dict[str, Any],
) -> ModelRunner:
    framework = _framework_of(model)
    accelerated = hasattr(model, "nano_method")
    if accelerated and (method is not None or arguments):
        raise UsageError(
            f"The model is accelerated already, by {model.nano_method}; pass the original, or "
            "leave method and its arguments out",
            code="argument-conflict",
            argument="method",
            method=model.nano_method,
        )
    method = method or "openvino_fp32"
    threads: dict[str, Any] = {} if thread_num is None else {"thread_num": thread_num}
    if device is not None:
        threads["device"] = device
    if framework == "keras":
        from bigdl.nano.tf.keras import InferenceOptimizer as KerasOptimizer

        if not accelerated and method != "original":
            if sample is not None:
                arguments.setdefault("x", sample)
            model = KerasOptimizer.build(model, method, **arguments, **threads)
        return _of_keras(model, "KerasModel")
    from bigdl.nano.pytorch import InferenceOptimizer

    if not accelerated:
        if sample is None:
            sample = getattr(model, "example_input_array", None)
        if sample is None:
            raise UsageError(
                f"A sample of the input of {type(model).__name__} is needed to serve it; pass "
                "sample",
                code="argument-missing",
                argument="sample",
            )
        if method != "original":
            model = InferenceOptimizer.build(
                model, method, input_sample=sample, **arguments, **threads
            )
    return _of_module(model, sample, inputs, method)


def _framework_of(model: object) -> str:
    modules = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "keras" in modules:
        return "keras"
    if "torch" in modules:
        return "torch"
    raise UsageError(
        "A model to serve is a path, a module of PyTorch or a model of Keras, not "
        f"{type(model).__name__}",
        code="model-type",
    )


def _of_module(
    module: Any,
    sample: object,
    inputs: str | None = None,
    method: str = "original",
    specs: list[TensorSpec] | None = None,
) -> ModelRunner:
    """Return a runner of a PyTorch module, accelerated or not."""
    method = getattr(module, "nano_method", None) or method
    network = getattr(module, "nano_network", None)
    if network is not None:
        ends = (module.nano_inputs.names, module.nano_outputs)
        return replace(_of_network(network, ends, method), sample=_flat_sample(module, sample))
    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.nano.pytorch.inference.source import TorchSource

    torch = require("torch", "nano")
    source = TorchSource(module, sample)
    calls: CallSignature = getattr(module, "nano_inputs", None) or source.inputs
    arrays = _flat_sample(module, sample)
    if inputs is not None:
        specs = TensorSpec.parsed(inputs)
    if specs is None and arrays is None:
        raise UsageError(
            f"A saved graph of {method} does not contain the types and shapes of its inputs "
            f"{', '.join(calls.names)}; pass inputs, e.g. 'x: FP32[-1,4]', or a sample",
            code="argument-missing",
            argument="inputs",
            method=method,
        )
    if specs is None:
        assert arrays is not None
        specs = [
            TensorSpec(name, each.dtype, (-1,) * min(each.ndim, 1) + each.shape[1:])
            for name, each in zip(calls.names, arrays, strict=True)
        ]
    training, lock = getattr(module, "training", False), threading.Lock()
    if training:
        module.eval()
    names: list[str] = []

    def run(values: list[np.ndarray]) -> list[np.ndarray]:
        tensors = [torch.from_numpy(_writable(each)) for each in values]
        args, kwargs = calls.unflatten(tensors)
        # The context sets the number of threads of the process; concurrent calls could not restore
        # it.
        with lock, InferenceOptimizer.get_context(module):
            leaves, structure = flatten(module(*args, **kwargs))
        if not names:
            names.extend(output_names(structure))
        return [np.asarray(as_array(leaf)) for leaf in leaves]

    runner = ModelRunner(run, Signature(tuple(specs), ()), "pytorch", method, arrays)
    with as_usage_error("The model does not run on a sample of its input", code="model-input"):
        results = run(runner.arrays_of(1))
    outputs = tuple(
        TensorSpec(name, each.dtype, (-1,) * each.ndim)
        for name, each in zip(names, results, strict=True)
    )
    return replace(runner, signature=Signature(tuple(specs), outputs))


def _writable(array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if it is read-only or not contiguous."""
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def _flat_sample(module: torch.nn.Module, sample: object) -> list[np.ndarray] | None:
    if sample is None:
        return None
    from bigdl.nano.pytorch.inference.source import TorchSource

    return TorchSource(module, sample).sample_arrays()


def _graph_specs(meta: Mapping[str, Any]) -> list[TensorSpec] | None:
    """Return the input specs of a compiled PyTorch graph, or None for other graphs."""
    if "shapes" not in meta or "dtypes" not in meta:
        return None
    names = CallSignature.from_json(meta["inputs"]).names
    return [
        TensorSpec(name, np.dtype(dtype), tuple(-1 if size is None else size for size in shape))
        for name, dtype, shape in zip(names, meta["dtypes"], meta["shapes"], strict=True)
    ]


def _of_keras(model: keras.Model, model_type: str) -> ModelRunner:
    """Return a runner of a Keras model, accelerated or not."""
    network = getattr(model, "nano_network", None)
    if network is None:
        from bigdl.nano.tf.inference.source import KerasSource

        source = KerasSource(model)
        calls, structure, ports = source.inputs, source.outputs, source.output_ports
        graph, method = source.graph, "original"

        def infer(arrays: list[np.ndarray]) -> list[np.ndarray]:
            return [np.asarray(each) for each in graph(*arrays)]
    else:
        calls, structure, ports = model.nano_inputs, model.nano_outputs, model.nano_ports
        infer, method = network.infer, model.nano_method
    if isinstance(network, OnnxNetwork | CompiledNetwork):
        return _of_network(network, (calls.names, structure), method)
    inputs = tuple(map(_port_spec, calls.ports))
    outputs = tuple(
        replace(_port_spec(port), name=name)
        for port, name in zip(ports, output_names(structure), strict=True)
    )
    return ModelRunner(infer, Signature(inputs, outputs), "tensorflow", method or model_type)


def _port_spec(port: Port) -> TensorSpec:
    dtype = np.dtype(object) if port.dtype == "string" else np.dtype(port.dtype)
    sizes = [-1 if size is None else size for size in port.shape]
    return TensorSpec(port.name, dtype, tuple(sizes))
