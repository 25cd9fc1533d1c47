"""What is looked up and changed in ONNX graphs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from bigdl.common.errors import require

__all__ = [
    "compress_weights",
    "has_attention",
    "nodes_of_scores",
    "prepare_for_quantization",
    "save",
    "unsigned_activations",
]

# Smaller tensors are biases, scales and shapes: little to save, much to lose.
_LARGE = 1024
# What scores of attention go through between a product and a softmax.
_ELEMENTWISE = {"Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Reshape", "Sub", "Where"}
# A protocol buffer has at most 2 GiB; some are left for what is not weights.
_LIMIT = 2**31 - 2**26


def prepare_for_quantization(source: Path, target: Path) -> None:
    """Write a graph as quantizers need it.

    Every node has a name. Inferred shapes are left out, since they contradict what ONNX Runtime
    makes of a transposed weight. A Gemm has its weight to itself: ONNX Runtime transposes it in
    place, for the other nodes too.
    """
    onnx = require("onnx", "nano")
    model = onnx.load(source)
    del model.graph.value_info[:]
    _unshare_weights(model.graph)
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"
    # Tells ONNX Runtime's quantizers that nothing is left to be done first.
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    save(model, target)


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
    """Write a model, with its weights in a second file if it is too large for one."""
    onnx = require("onnx", "nano")
    # the size of all of it cannot be asked of a model that is too large
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < _LIMIT:
        onnx.save(model, path)
        return
    onnx.save(model, path, save_as_external_data=True, location=path.name + ".data")


def has_attention(path: Path) -> bool:
    """Whether the graph multiplies activations with each other after a softmax."""
    onnx = require("onnx", "nano")
    graph = onnx.load(path, load_external_data=False).graph
    kinds = {node.op_type for node in graph.node}
    constants = {tensor.name for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    return "Attention" in kinds or (
        "Softmax" in kinds and any(constants.isdisjoint(node.input) for node in products)
    )


def nodes_of_scores(path: Path) -> list[str]:
    """Names of the softmaxes of a graph, and of what is done to their inputs element by element.

    There masks are added to attention's scores. A range that holds minus infinity, or -10,000,
    leaves nothing of the scores in 8 bits.
    """
    onnx = require("onnx", "nano")
    graph = onnx.load(path, load_external_data=False).graph
    makers = {name: node for node in graph.node for name in node.output}
    waiting = [node for node in graph.node if node.op_type == "Softmax"]
    found: dict[str, None] = {}
    while waiting:
        node = waiting.pop()
        if node.name not in found:
            found[node.name] = None
            before = (makers[name] for name in node.input if name in makers)
            waiting.extend(maker for maker in before if maker.op_type in _ELEMENTWISE)
    return list(found)


def unsigned_activations(model) -> None:
    """Change activations from signed to unsigned 8-bit integers, in place.

    The same numbers come out: the zero point is moved by 128 with the range. Kernels of x86
    processors multiply unsigned activations with signed weights; on signed ones they take up to
    four times as long.

    Parameters
    ----------
    model : onnx.ModelProto
        With QuantizeLinear and DequantizeLinear around its operators.
    """
    onnx = require("onnx", "nano")
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    of_weights, of_activations = set(), set()
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) == 3:
            group = of_weights if node.input[0] in constants else of_activations
            group.add(node.input[2])
    for name in of_activations.difference(of_weights).intersection(constants):
        values = onnx.numpy_helper.to_array(constants[name])
        if values.dtype == np.int8:
            unsigned = (values.astype(np.int16) + 128).astype(np.uint8)
            constants[name].CopyFrom(onnx.numpy_helper.from_array(unsigned, name))
    del model.graph.value_info[:]  # they hold the types of what lies between


def compress_weights(source: Path, target: Path) -> None:
    """Write a model whose large fp32 weights are stored in bfloat16, half of the size.

    The graph casts them back, which ONNX Runtime does once, when it makes a session.
    """
    onnx = require("onnx", "nano")
    model = onnx.load(source)
    graph = model.graph
    casts = []
    for weight in list(graph.initializer):
        if weight.data_type != onnx.TensorProto.FLOAT or np.prod(weight.dims) < _LARGE:
            continue
        name = weight.name
        values = _to_bfloat16(onnx.numpy_helper.to_array(weight))
        stored = onnx.helper.make_tensor(
            f"{name}_bf16", onnx.TensorProto.BFLOAT16, weight.dims, values.tobytes(), raw=True
        )
        weight.CopyFrom(stored)
        casts.append(
            onnx.helper.make_node(
                "Cast", [stored.name], [name], f"{name}_cast", to=onnx.TensorProto.FLOAT
            )
        )
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    save(model, target)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of floats, rounded to nearest even, as 16-bit integers."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")
