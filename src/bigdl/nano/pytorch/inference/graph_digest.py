"""Digest of a traced graph, which determines the network that OpenVINO's frontend makes of it.

The graph holds every constant that the Python code contributed. Two programs with equal graphs thus
convert to equal networks, however their code is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

# Operators of other namespaces can be defined in Python, outside of the graph.
_NAMESPACES = ("aten", "prim", "torchvision")
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
)


class _UnknownContent(Exception):
    """Raised if a graph contains something that cannot be digested."""


def graph_digest(graph: torch.Graph, module: torch.nn.Module) -> str | None:
    """Return a digest of a traced graph with its weights and constants.

    Parameters
    ----------
    graph : torch.Graph
        Inlined graph of `module`.
    module : Module
        Traced module, whose attributes the graph reads.

    Returns
    -------
    str or None
        Hexadecimal digest, equal in all processes; None if the graph contains an operator or a
        value whose content is unknown.
    """
    try:
        return _GraphDigest(graph, module).hexdigest()
    except _UnknownContent:
        return None


class _GraphDigest:
    def __init__(self, graph, module):
        self._digest = hashlib.blake2b(digest_size=20)
        self._numbers: dict[int, int] = {}
        self._objects: dict[int, object] = {}
        for value in graph.inputs():
            if isinstance(value.type(), torch.ClassType):
                self._objects[value.unique()] = module
            self._define(value, value.debugName())
        for node in graph.nodes():
            self._add_node(node)
        self._add([(self._numbers[each.unique()], each.debugName()) for each in graph.outputs()])

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _add(self, *parts: object) -> None:
        self._digest.update(f"{parts!r}\n".encode())

    def _define(self, value, *parts: object) -> None:
        """Give a value a number, as its name may vary between processes, and add its type."""
        number = self._numbers[value.unique()] = len(self._numbers)
        # names of modules' classes contain a counter of the process
        type_name = "module" if isinstance(value.type(), torch.ClassType) else str(value.type())
        self._add("value", number, type_name, *parts)

    def _add_node(self, node) -> None:
        operator = node.kind()
        if operator.partition("::")[0] not in _NAMESPACES or operator == "prim::PythonOp":
            raise _UnknownContent(operator)
        self._add("node", operator, [self._numbers[each.unique()] for each in node.inputs()])
        for name in sorted(node.attributeNames()):
            content = getattr(node, node.kindOf(name))(name)
            self._add("attribute", name, node.kindOf(name))
            self._add_content(content)
        for value in node.outputs():
            self._define(value)
        if operator == "prim::GetAttr":
            self._read_attribute(node)
        for block in node.blocks():
            self._add("block")
            for value in block.inputs():
                self._define(value)
            for inner in block.nodes():
                self._add_node(inner)
            self._add("end", [self._numbers[each.unique()] for each in block.outputs()])

    def _read_attribute(self, node) -> None:
        """Add the value of an attribute of the module or of one of its children."""
        parent = next(iter(node.inputs())).unique()
        if parent not in self._objects:
            raise _UnknownContent("attribute of an unknown object")
        content = getattr(self._objects[parent], node.s("name"))
        if isinstance(content, torch.nn.Module):
            self._objects[next(iter(node.outputs())).unique()] = content
        else:
            self._add_content(content)

    def _add_content(self, content: object) -> None:
        if isinstance(content, torch.Tensor):
            self._add_tensor(content)
        elif isinstance(content, _PLAIN):
            self._add(type(content).__name__, content)
        elif isinstance(content, torch._C.Type):
            self._add(str(content))
        elif isinstance(content, Mapping):
            self._add_content(list(content.items()))
        elif isinstance(content, Sequence):
            self._add(type(content).__name__, len(content))
            for each in content:
                self._add_content(each)
        else:
            raise _UnknownContent(type(content).__name__)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) not in _TENSORS:
            raise _UnknownContent("tensor without plain bytes")
        plain = tensor.detach().cpu()
        # strides, because operators such as as_strided read them
        self._add("tensor", plain.dtype, tuple(plain.shape), plain.stride())
        content = plain.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        self._digest.update(content.numpy().data)


_TENSORS = (torch.Tensor, torch.nn.Parameter)
