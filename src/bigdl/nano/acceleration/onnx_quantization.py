"""8-bit quantization of ONNX graphs, and ranking of nodes by their quantization error.

Speed relative to fp32 with ONNX Runtime 1.31 on a processor with AVX512-VNNI: with unsigned
activations and signed weights, ResNet50 is 3.2 to 3.9 times and a small BERT 2.1 times as fast;
with signed activations, 1.0 to 1.5 times and 0.7 to 1.0 times. Weights have one scale per channel,
which costs no time.
"""

from __future__ import annotations

import math
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bigdl.common.cpu import isa_flags, saturates_int8
from bigdl.common.errors import LazyModule, require
from bigdl.common.private_folders import scratch_directory
from bigdl.nano.acceleration.accuracy import relative_error
from bigdl.nano.acceleration.quiet import quiet

nncf = LazyModule("nncf", "nano")
onnx = LazyModule("onnx", "nano")
ort = LazyModule("onnxruntime", "nano")
quantization = LazyModule("onnxruntime.quantization", "nano")

# Smaller tensors are biases, scales and shapes: compressing them saves little and costs accuracy.
_LARGE = 1024
# Operators on attention scores between the product and the softmax.
_ELEMENTWISE = {"Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Reshape", "Sub", "Where"}
# Operators that gain from int8.
_PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
_COMPARED = 4  # batches
# A protocol buffer has at most 2 GiB; the margin is for everything except the weights.
MOST_BYTES = 2**31 - 2**26


class OnnxFile:
    """An ONNX model file in a temporary directory that is deleted with the object.

    A model of more than 2 GB has its weights in a second file in the same directory. The first file
    refers to the second by name, so the names are fixed and both files move together.

    Attributes
    ----------
    path : Path
        Path of the ``.onnx`` file; the file does not exist before the first write.
    """

    NAME = "onnx_saved_model.onnx"

    def __init__(self) -> None:
        folder = scratch_directory("bigdl-onnx-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = folder / self.NAME

    @classmethod
    def read(cls, path: Path) -> OnnxFile:
        """Copy an ONNX file and its external weights to a new temporary directory."""
        file = cls()
        shutil.copyfile(path, file.path)
        data = path.with_name(path.name + ".data")
        if data.exists():
            shutil.copyfile(data, file.path.with_name(data.name))
        return file

    def __getstate__(self) -> dict[str, bytes]:
        """Pickle the contents of the model's files."""
        return {each.name: each.read_bytes() for each in self.path.parent.iterdir()}

    def __setstate__(self, files: dict[str, bytes]) -> None:
        OnnxFile.__init__(self)
        for name, content in files.items():
            self.path.with_name(name).write_bytes(content)

    def copy_to(self, directory: Path) -> None:
        """Copy the model's files to a directory."""
        shutil.copytree(self.path.parent, directory, dirs_exist_ok=True)

    @property
    def external(self) -> bool:
        """True if the weights are in a separate file."""
        return self.path.with_name(self.path.name + ".data").exists()


class FloatGraph(OnnxFile):
    """A floating-point ONNX graph prepared for quantizers, with calibration data.

    Every node has a name. Inferred shapes are removed, because they contradict ONNX Runtime's
    transposed weights. No Gemm shares its weight: ONNX Runtime transposes weights in place, which
    would change the other nodes.

    Parameters
    ----------
    original : OnnxFile
    feeds : list of dict of str to ndarray
        Calibration batches by input name.

    Attributes
    ----------
    ranges : Path
        File that keeps the activation ranges between trials.
    in_floats : list of str
        Names of nodes that stay in floating point in all trials; the first trial finds them.
    """

    def __init__(self, original: OnnxFile, feeds: list[dict[str, np.ndarray]]):
        self.feeds = feeds
        self.in_floats: list[str] = []
        super().__init__()
        self.ranges = self.path.with_name("ranges.json")
        model = onnx.load(original.path)
        del model.graph.value_info[:]
        _unshare_weights(model.graph)
        for number, node in enumerate(model.graph.node):
            node.name = node.name or f"{node.op_type}_{number}"
        # Tells ONNX Runtime's quantizers that preprocessing is done.
        onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
        save(model, self.path)

    def error(self, quantized: Path) -> float:
        """Return the relative error of a quantized version of this graph on calibration data."""
        return relative_error(self._expected, self._outputs(quantized))

    @cached_property
    def _expected(self) -> list[np.ndarray]:
        return self._outputs(self.path)

    def _outputs(self, path: Path) -> list[np.ndarray]:
        """Return the outputs of a version of this graph for a few calibration batches."""
        names = [tensor.name for tensor in _graph_of(self.path).output]
        values = (_tensors(path, feed, names) for feed in self.feeds[:_COMPARED])
        return [each[name] for each in values for name in names]

    def rank(self, quantized: Path, feed: Mapping[str, np.ndarray]) -> list[str]:
        """Rank quantized nodes by the error they introduce, largest first.

        Both graphs run once on one batch. A node introduces the error of its output beyond that of
        its inputs; errors are assumed to be independent.

        Parameters
        ----------
        quantized : Path
            The quantized version of this graph; tensors keep their names.
        feed : mapping of str to ndarray
        """
        graph = _graph_of(self.path)
        nodes = _changed(graph, _graph_of(quantized))
        readers = {name: node for node in graph.node for name in node.input}
        watched = {name for node in graph.node for name in (*node.input, *node.output) if name}
        watched -= {tensor.name for tensor in graph.initializer} | set(feed)
        expected, actual = (_tensors(path, feed, watched) for path in (self.path, quantized))
        errors = {
            name: relative_error([expected[name]], [actual[name]])
            for name in expected.keys() & actual.keys()
        }

        def output_error(node) -> float:
            known = [errors[name] for name in node.output if name in errors]
            if known:
                return max(known)
            # An activation was fused into the node, so the node's output no longer exists.
            reader = readers.get(node.output[0])
            return output_error(reader) if reader is not None else 0.0

        def introduced_error(node) -> float:
            before = max((errors.get(name, 0.0) for name in node.input), default=0.0)
            return (
                math.sqrt(max(output_error(node) ** 2 - before**2, 0.0))
                if before < math.inf
                else 0.0
            )

        return [node.name for node in sorted(nodes, key=introduced_error, reverse=True)]


Quantize = Callable[[FloatGraph, Path, Collection[str]], None]
"""Writes the quantized version of a graph to a file. The named nodes stay in floating point."""


def _unshare_weights(graph) -> None:
    uses = Counter(name for node in graph.node for name in node.input)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for number, node in enumerate(graph.node):
        if node.op_type == "Gemm" and uses[node.input[1]] > 1 and node.input[1] in constants:
            weight = constants[node.input[1]]
            node.input[1] = f"{weight.name}_of_{number}"
            graph.initializer.add().CopyFrom(weight)
            graph.initializer[-1].name = node.input[1]


def save(model, path: Path) -> None:
    """Write a model to a file, with external weights if it is too large for one file."""
    # ``ByteSize`` fails for a model that is too large
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < MOST_BYTES:
        onnx.save(model, path)
        return
    onnx.save(model, path, save_as_external_data=True, location=path.name + ".data")


def _graph_of(path: Path):
    """Read the graph of an ONNX file without its external weights."""
    return onnx.load(path, load_external_data=False).graph


def has_attention(path: Path) -> bool:
    """Return True if a graph multiplies two activations and has a softmax (attention)."""
    graph = _graph_of(path)
    types = {node.op_type for node in graph.node}
    constants = {tensor.name for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    return "Attention" in types or (
        "Softmax" in types and any(constants.isdisjoint(node.input) for node in products)
    )


def nodes_of_scores(path: Path) -> list[str]:
    """Return the names of softmax nodes and of the elementwise nodes that compute their inputs.

    These nodes add masks to attention scores. With minus infinity or -10,000 in the range, 8 bits
    cannot represent the scores.
    """
    graph = _graph_of(path)
    makers = {name: node for node in graph.node for name in node.output}
    waiting = [node for node in graph.node if node.op_type == "Softmax"]
    names: dict[str, None] = {}
    while waiting:
        node = waiting.pop()
        if node.name not in names:
            names[node.name] = None
            before = (makers[name] for name in node.input if name in makers)
            waiting.extend(maker for maker in before if maker.op_type in _ELEMENTWISE)
    return list(names)


def unsigned_activations(model) -> None:
    """Convert activations from signed to unsigned 8-bit integers in place.

    Results do not change: range and zero point move by 128. Kernels on x86 multiply unsigned
    activations with signed weights; with signed activations they are up to four times slower.

    Parameters
    ----------
    model : onnx.ModelProto
        Model with QuantizeLinear and DequantizeLinear around its operators.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    of_weights: set[str] = set()
    of_activations: set[str] = set()
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) == 3:
            group = of_weights if node.input[0] in constants else of_activations
            group.add(node.input[2])
    for name in of_activations.difference(of_weights).intersection(constants):
        values = onnx.numpy_helper.to_array(constants[name])
        if values.dtype == np.int8:
            unsigned = (values.astype(np.int16) + 128).astype(np.uint8)
            constants[name].CopyFrom(onnx.numpy_helper.from_array(unsigned, name))
    del model.graph.value_info[:]  # the types of inner tensors have changed


def compress_weights(source: Path, target: Path) -> None:
    """Write a model with its large fp32 weights stored in bfloat16, which halves their size.

    The graph casts them back to fp32; ONNX Runtime does so once, when it creates a session.
    """
    ml_dtypes = require("ml_dtypes", "nano")
    model = onnx.load(source)
    graph = model.graph
    casts = []
    for weight in list(graph.initializer):
        if weight.data_type != onnx.TensorProto.FLOAT or np.prod(weight.dims) < _LARGE:
            continue
        name = weight.name
        values = onnx.numpy_helper.to_array(weight).astype(ml_dtypes.bfloat16)
        weight.CopyFrom(onnx.numpy_helper.from_array(values, f"{name}_bf16"))
        casts.append(
            onnx.helper.make_node(
                "Cast", [weight.name], [name], f"{name}_cast", to=onnx.TensorProto.FLOAT
            )
        )
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    save(model, target)


# Operators that inherit quantization from their predecessor and introduce no error themselves.
_PASSED_ON = {
    *("Clip", "Flatten", "Identity", "MaxPool", "Pad", "ReduceMax", "ReduceMean", "ReduceSum"),
    *("Relu", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
}


def quantize_statically(graph: FloatGraph, target: Path, excluded: Collection[str]) -> None:
    """Quantize weights and activations with ranges from calibration data.

    In graphs with attention, operators other than products stay in floating point if quantizing
    them more than doubles the error. A small BERT is a seventh faster with them quantized; a ViT
    becomes useless (error 0.38 instead of 0.04).
    """
    _quantize_statically(graph, target, [*excluded, *graph.in_floats])
    if excluded or not has_attention(graph.path):  # not the first trial, or nothing to decide
        return
    nodes = _graph_of(graph.path).node
    others = [node.name for node in nodes if node.op_type not in _PRODUCTS]
    of_products = OnnxFile()
    _quantize_statically(graph, of_products.path, others)
    if graph.error(target) > 2 * graph.error(of_products.path):
        of_products.copy_to(target.parent)
        graph.in_floats = others


def _quantize_statically(graph: FloatGraph, target: Path, excluded: Collection[str]) -> None:
    dtypes = quantization.QuantType
    feeds = iter(graph.feeds)
    with quiet(), ExitStack() as stack:
        stack.callback(ort.set_default_logger_severity, 2)  # the default: warnings
        ort.set_default_logger_severity(3)
        quantization.quantize_static(
            graph.path,
            target,
            SimpleNamespace(get_next=lambda: next(feeds, None)),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            reduce_range=saturates_int8(),
            activation_type=dtypes.QUInt8 if _is_x86() else dtypes.QInt8,
            weight_type=dtypes.QInt8,
            nodes_to_exclude=[*excluded, *nodes_of_scores(graph.path)],
            use_external_data_format=graph.external,
            calibration_cache_path=graph.ranges,
            extra_options={
                # Quantized products of two activations (attention) lose accuracy and gain no time.
                # Outputs of products stay in floating point, as the accumulators have them.
                "MatMulConstBOnly": True,
                "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
            },
        )


def quantize_dynamically(graph: FloatGraph, target: Path, excluded: Collection[str]) -> None:
    """Quantize weights in advance, and activations at run time using their actual ranges.

    Linear layers, LSTMs and embeddings are quantized, convolutions are not.
    """
    registry = require("onnxruntime.quantization.registry", "nano")
    # ResNet50 with dynamically quantized convolutions takes 20 times as long as in fp32.
    operators = [name for name in registry.IntegerOpsRegistry if name != "Conv"]
    with quiet():
        quantization.quantize_dynamic(
            graph.path,
            target,
            op_types_to_quantize=operators,
            per_channel=True,
            reduce_range=saturates_int8(),
            weight_type=quantization.QuantType.QInt8,
            nodes_to_exclude=[*excluded, *(f"{name}_MatMul" for name in excluded)],
            use_external_data_format=graph.external,
        )


def quantize_with_nncf(graph: FloatGraph, target: Path, excluded: Collection[str]) -> None:
    """Quantize weights and activations with NNCF, including bias correction.

    In graphs with attention, activation outliers are moved into the weights (SmoothQuant, Xiao et
    al., 2022).
    """
    transformer = nncf.ModelType.TRANSFORMER if has_attention(graph.path) else None
    overflow = nncf.OverflowFix.ENABLE if saturates_int8() else nncf.OverflowFix.DISABLE
    with quiet():
        quantized = nncf.quantize(
            onnx.load(graph.path),
            nncf.Dataset(graph.feeds),
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(graph.feeds),
            model_type=transformer,
            # NNCF's quantized embeddings make ONNX Runtime dequantize the whole table in each call.
            ignored_scope=nncf.IgnoredScope(list(excluded), types=["Gather"], validate=False),
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=overflow),
        )
    if _is_x86():
        unsigned_activations(quantized)
    save(quantized, target)


def _changed(source, quantized) -> list:
    """Return the nodes of `source` that were removed or get quantized inputs in `quantized`."""
    restored = {
        name
        for node in quantized.node
        if node.op_type == "DequantizeLinear"
        for name in node.output
    }
    kept = {node.name for node in quantized.node if restored.isdisjoint(node.input)}
    return [
        node for node in source.node if node.name not in kept and node.op_type not in _PASSED_ON
    ]


def _tensors(path: Path, feed, watched: Collection[str]) -> dict[str, np.ndarray]:
    """Run a graph on the inputs `feed`; return the values of the `watched` tensors by name."""
    model = onnx.load(path)
    made = {name for node in model.graph.node for name in node.output}
    names = sorted(made.intersection(watched))
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    file = OnnxFile()
    save(model, file.path)
    session = ort.InferenceSession(str(file.path), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def _is_x86() -> bool:
    return "sse2" in isa_flags()
