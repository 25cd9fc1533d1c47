"""Guard against inexact integer arithmetic in OpenVINO: compute exactly or raise an error.

On a CPU, OpenVINO computes integers of all types in 32 bits and drops the higher bits of an input.
Remainders, quotients, comparisons, powers and sums go through float32, so they are exact only up to
2**24 (2026.4). An index outside of a table yields zeros, a negative one the last rows. So
:class:`IntegerGuard` compares each call's integers with limits, which it derives once from the
network by interval arithmetic. If a call exceeds them, OpenVINO's reference implementation
evaluates the part of the network that computes integers from the inputs alone, e.g. ``ids % 1000``,
in 64 bits, and the rest of the network uses its results. Values that do not fit there either are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bigdl.common.errors import LazyModule, UsageError, first_line

if TYPE_CHECKING:
    import openvino as ov

openvino = LazyModule("openvino", "nano")

_LOW, _HIGH = -(2**31), 2**31 - 1
_INFO = ["bigdl", "no_negative"]
"""Key in a network's runtime information for the names of inputs that must not be negative."""

Box = tuple[Any, Any]
"""Smallest and largest value: integers, or arrays of Python integers that broadcast to it."""

Interval = Box | None
"""A box, or None if the values are unknown."""

# Operators whose output values are values of their first input.
_MOVING = frozenset(
    (
        *("Broadcast", "Ceiling", "Convert", "Floor", "Gather", "GatherElements", "GatherND"),
        *("Pad", "ReduceMax", "ReduceMin", "Reshape", "Reverse", "Round", "Slice", "Split"),
        *("Squeeze", "StridedSlice", "Tile", "Transpose", "Unsqueeze", "VariadicSplit"),
    )
)
_SLICING = ("Slice", "StridedSlice")
# Operators whose output has all values of their first input.
_KEEPING = frozenset(
    ("Broadcast", "Convert", "Reshape", "Reverse", "Squeeze", "Tile", "Transpose", "Unsqueeze")
)
# Up to this length of a dimension each column has a range: columns of ids, offsets into one table.
_MOST_COLUMNS = 64
# Number of analyses of a network to find the widest ranges.
_MOST_TRIALS = 200
# Assumed number of summed elements if the network's shapes are dynamic.
_MOST_ADDED = 1 << 16
_LOGICAL = frozenset(
    (
        *("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalNot"),
        *("LogicalOr", "LogicalXor", "NotEqual", "ReduceLogicalAnd", "ReduceLogicalOr"),
    )
)
# Operators that compute in float32, and the largest exact integer.
_IN_FLOATS = frozenset(
    (
        *("Ceiling", "Divide", "Equal", "Floor", "FloorMod", "Greater", "GreaterEqual", "Less"),
        *("LessEqual", "Mod", "NotEqual", "Power", "ReduceMax", "ReduceMin", "ReduceProd"),
        *("ReduceSum", "Round"),
    )
)
_EXACT_FLOATS = 1 << 24
# Operators that the reference implementation computes exactly in 64 bits.
_EXACT = (
    _MOVING
    | _LOGICAL
    | {"Add", "Subtract", "Multiply", "Divide", "Mod", "Maximum", "Minimum", "Negative"}
    | {"Abs", "Concat", "Select", "Sign", "ReduceSum"}
)


class _Lookup(NamedTuple):
    """An embedding or Gather lookup: the table size, and the node output with the indices."""

    indices: Any  # output of a node
    rows: int
    negative: bool  # negative indices count from the end

    @property
    def lowest(self) -> int:
        """Smallest valid index of the table."""
        return -self.rows if self.negative else 0


def forbid_negative(network: ov.Model, names: Sequence[str]) -> None:
    """Record which inputs of a network must not be negative, as in the original model."""
    known = {*names, *never_negative(network)}
    if known:
        network.set_rt_info("\n".join(sorted(known)), _INFO)


def never_negative(network: ov.Model) -> list[str]:
    """Return the input names that :func:`forbid_negative` recorded in a network."""
    if not network.has_rt_info(_INFO):
        return []
    return [name for name in str(network.get_rt_info(_INFO).value).split("\n") if name]


class IntegerGuard:
    """Guard that checks each call's integer inputs against the ranges with exact results.

    Parameters
    ----------
    network : openvino.Model
    names : sequence of str
        Names of the network's inputs.
    compile : callable
        Compiles a network; used when a call first exceeds 32 bits.

    Raises
    ------
    UsageError
        If the network has integer constants beyond 32 bits that OpenVINO would truncate.
    """

    def __init__(self, network: ov.Model, names: Sequence[str], compile: Callable[[Any], Any]):
        self._network = network
        self._names = list(names)
        self._compile = compile
        parameters = network.get_parameters()
        self._whole = {
            position: _range_of(each.get_element_type())
            for position, each in enumerate(parameters)
            if _is_whole(each.get_element_type())
        }
        self._columns = {
            position: _columns_of(parameters[position].get_partial_shape())
            for position in self._whole
        }
        self.limits: list[tuple[int, Any, Any]] = []
        """Position of an input, and the smallest and largest values that need no further check, of
        all values or of each column."""
        self._graph: _Integers | None = None
        if self._whole or _has_wide_constants(network):
            self._graph = _Integers(network)
            self._graph.refuse_constants()
            self.limits = self._derive_limits(self._graph)

    def _derive_limits(self, graph: _Integers) -> list[tuple[int, Any, Any]]:
        """Return the range with exact results for each integer input that has to be checked."""
        boxes: dict[int, Box] = {
            position: (
                np.full(self._columns[position], max(low, _LOW), object),
                np.full(self._columns[position], min(high, _HIGH), object),
            )
            for position, (low, high) in self._whole.items()
        }
        forbidden = never_negative(self._network)
        for position, (low, high) in boxes.items():
            if self._names[position] in forbidden:
                boxes[position] = (np.maximum(low, 0), high)
        for position, column, lookup in graph.direct():
            low, high = boxes[position]
            if column is None:
                boxes[position] = (
                    np.maximum(low, lookup.lowest),
                    np.minimum(high, lookup.rows - 1),
                )
            elif self._columns[position][-1] > 1:
                low[..., column] = np.maximum(low[..., column], lookup.lowest)
                high[..., column] = np.minimum(high[..., column], lookup.rows - 1)
        self._forbidden = {
            p for p, (low, _) in boxes.items() if np.all(low == 0) and self._whole[p][0] < 0
        }
        return [
            (position, _compact(low), _compact(high))
            for position, (low, high) in _widest_boxes(graph, boxes).items()
            if np.any(low > self._whole[position][0]) or np.any(high < self._whole[position][1])
        ]

    def checked(self, arrays: Sequence[np.ndarray]) -> tuple[Any, list[np.ndarray]] | None:
        """Check the integers of a call; return an exact network and its inputs if one is needed.

        Parameters
        ----------
        arrays : sequence of ndarray
            Inputs of the network's types.

        Returns
        -------
        tuple or None
            None if the network computes them correctly. Otherwise another compiled network, and
            its input arrays.

        Raises
        ------
        UsageError
            If an index is outside of its table, or an integer cannot be computed in 32 bits.
        """
        for position, low, high in self.limits:
            array = arrays[position]
            if not array.size or array.dtype.kind not in "iu":
                continue
            if isinstance(low, int) and isinstance(high, int):
                is_outside = array.min() < low or array.max() > high
            else:
                is_outside = (array < low).any() or (array > high).any()
            if is_outside:
                return self._check_in_detail(arrays)
        return None

    def _check_in_detail(self, arrays: Sequence[np.ndarray]) -> tuple[Any, list[np.ndarray]] | None:
        assert self._graph is not None
        columns = {
            position: _box_of(arrays[position], self._columns[position])
            for position in self._whole
            if arrays[position].size
        }
        boxes = {position: _whole_range(box) for position, box in columns.items()}
        for position in self._forbidden & set(boxes):
            if boxes[position][0] < 0:
                raise UsageError(
                    f"Input {self._names[position]!r} holds {boxes[position][0]}, but the original "
                    "model takes no negative integers there",
                    code="data-value",
                    argument=self._names[position],
                )
        for position, column, lookup in self._graph.direct():
            if column is None:
                self._check_lookup(lookup, boxes.get(position), self._names[position])
        if self._graph.problem(columns) is None:
            return None
        if self._graph.problem(columns, lookups=False) is None:
            name = self._names[_largest(boxes)]
            for lookup, interval in self._indices.ranges(arrays):
                self._check_lookup(lookup, interval, name)
            return None
        return self._exactly(arrays, boxes)

    @cached_property
    def _indices(self) -> _Indices:
        return _Indices(self._network.clone(), self._compile)

    def _check_lookup(self, lookup: _Lookup, box: Interval, name: str) -> None:
        if box is None or (box[0] >= lookup.lowest and box[1] < lookup.rows):
            return
        wrong = box[1] if box[1] >= lookup.rows else box[0]
        raise UsageError(
            f"Input {name!r} leads to row {wrong} of a table that has the rows {lookup.lowest} to "
            f"{lookup.rows - 1}; map ids that the model does not know to one that it knows",
            code="data-value",
            argument=name,
        )

    def _exactly(self, arrays, boxes) -> tuple[Any, list[np.ndarray]]:
        largest = _largest(boxes)
        low, high = boxes[largest]
        sentence = (
            f"Input {self._names[largest]!r} holds {high if high > -low else low}, with which this "
            "network computes integers that OpenVINO, limited to 32 bits, would get wrong"
        )
        advice = "; use accelerator='onnxruntime' or 'jit', or map the ids to smaller ones first"
        split = self._split
        if isinstance(split, str):
            raise UsageError(
                f"{sentence} ({split}){advice}", code="data-value", argument=self._names[largest]
            )
        values = split.evaluate(arrays)
        for index, lookup in split.lookups:
            value = values[index]
            if value.size:
                box = int(value.min()), int(value.max())
                self._check_lookup(lookup, box, self._names[largest])
        ranges = {
            index: (int(values[index].min()), int(values[index].max()))
            for index in split.narrowed
            if values[index].size
        }
        if split.rest.problem(ranges, lookups=False) is not None:
            raise UsageError(sentence + advice, code="data-value", argument=self._names[largest])
        inputs = [
            values[index] if source == "value" else arrays[index] for source, index in split.inputs
        ]
        if split.rest.problem(ranges) is not None:
            for lookup, interval in split.indices.ranges(inputs):
                self._check_lookup(lookup, interval, self._names[largest])
        return split.compiled, inputs

    @cached_property
    def _split(self) -> _Split | str:
        if self._network.get_sinks() or self._network.get_variables():
            return "it is stateful"
        try:
            return _Split(self._network.clone(), self._compile)
        except Exception as error:
            return first_line(error)


class _Integers:
    """Range analysis of the integers that a network computes from its integer inputs."""

    def __init__(self, network: ov.Model):
        self.network = network
        self.parameters = {each.get_name(): i for i, each in enumerate(network.get_parameters())}
        self.exact: set[str] = set()  # names of nodes that can be evaluated separately
        self.lookups: list[_Lookup] = []
        self._nodes: list[Any] = []
        self._constants: dict[str, Interval] = {}
        known: set[str] = set(self.parameters)
        for node in network.get_ordered_ops():
            name, op_type = node.get_name(), node.get_type_name()
            if op_type in ("Parameter", "Constant", "Result"):
                continue
            self._record_lookup(node, op_type, known)
            varying = [v for v in node.input_values() if not _is_constant(v)]
            if op_type == "ShapeOf":
                if all(v.get_node().get_name() in self.parameters for v in varying):
                    self.exact.add(name)
                continue
            if not varying or not all(_is_whole(v.get_element_type()) for v in varying):
                continue
            if not all(v.get_node().get_name() in known for v in varying):
                continue
            outputs = [each.get_element_type() for each in node.outputs()]
            if all(map(_is_whole, outputs)):
                self._nodes.append(node)
                known.add(name)
            elif op_type != "Convert":
                continue
            sources = (v.get_node().get_name() for v in varying)
            separable = all(each in self.exact or each in self.parameters for each in sources)
            narrows = op_type == "Convert" and _narrows(node)
            if separable and op_type in _EXACT and not narrows:
                self.exact.add(name)

    def _record_lookup(self, node: ov.Node, op_type: str, known: set[str]) -> None:
        if op_type not in ("Gather", "EmbeddingBagOffsets", "EmbeddingBagOffsetsSum", *_PACKED):
            return
        table, indices = node.input_value(0), _before_converts(node.input_value(1))
        if indices.get_node().get_name() not in known or _is_constant(indices):
            return
        axis = 0
        if op_type == "Gather":
            axes = node.input_value(2).get_node()
            if axes.get_type_name() != "Constant":
                return
            axis = int(np.ravel(axes.get_data())[0])
        shape = table.get_partial_shape()
        if shape.rank.is_dynamic or shape[axis].is_dynamic:
            return
        embedding = op_type != "Gather" or "aten::embedding" in node.get_friendly_name()
        self.lookups.append(_Lookup(indices, shape[axis].get_length(), not embedding))

    def direct(self) -> list[tuple[int, int | None, _Lookup]]:
        """Return input position, column and lookup for each lookup that an input indexes."""
        direct = []
        for lookup in self.lookups:
            node, column = lookup.indices.get_node(), None
            while not _is_constant(node.output(0)) and node.get_type_name() in _KEEPING:
                node = node.input_value(0).get_node()
            if node.get_type_name() == "Gather":
                column = _column_of(node)
                node = _before_converts(node.input_value(0)).get_node()
                if column is None:
                    continue
            if node.get_type_name() == "Parameter":
                direct.append((self.parameters[node.get_name()], column, lookup))
        return direct

    def refuse_constants(self) -> None:
        """Refuse integer constants of the network that OpenVINO would truncate.

        Raises
        ------
        UsageError
            If the network has such constants.
        """
        for node in self.network.get_ordered_ops():
            if node.get_type_name() != "Constant" or _fits(self._constant(node)):
                continue
            for target in node.output(0).get_target_inputs():
                user = target.get_node()
                if user.get_type_name() in _SLICING or user.get_name() in self.exact:
                    continue
                if user.get_type_name() == "Convert" and not _is_whole(
                    user.output(0).get_element_type()
                ):
                    continue
                raise UsageError(
                    "The network holds integers beyond 32 bits, which OpenVINO would truncate "
                    f"({node.get_friendly_name()}); use accelerator='onnxruntime' or 'jit', or "
                    "return positions and look the integers up outside of the model",
                    code="model-unsupported",
                )

    def problem(self, boxes: Mapping[int, Box], *, lookups: bool = True) -> str | None:
        """Describe a value that may be inexact for inputs in these ranges, or return None.

        Parameters
        ----------
        boxes : mapping
            Range of each input's values by position.
        lookups : bool
            Also report indices outside of their tables.
        """
        values: dict[tuple[str, int], Interval] = {}
        for name, position in self.parameters.items():
            box = boxes.get(position)
            if not _fits(box):
                return f"input {position}"
            values[name, 0] = box
        for node in self._nodes:
            inputs = [self._interval(each, values) for each in node.input_values()]
            made = _computed(node, inputs)
            inexact = node.get_type_name() in _IN_FLOATS and not _in_floats(node, [*inputs, made])
            if inexact or not all(map(_fits, [*inputs, made])):
                return node.get_friendly_name()
            for index in range(node.get_output_size()):
                values[node.get_name(), index] = made
        for lookup in self.lookups if lookups else ():
            box = self._interval(lookup.indices, values)
            if box is not None and (
                np.any(box[0] < lookup.lowest) or np.any(box[1] >= lookup.rows)
            ):
                return "an index"
        return None

    def _interval(self, value: ov.Output, values: Mapping[tuple[str, int], Interval]) -> Interval:
        node = value.get_node()
        if node.get_type_name() == "Constant":
            return self._constant(node)
        return values.get((node.get_name(), value.get_index()))

    def _constant(self, node: ov.Node) -> Interval:
        name = node.get_name()
        if name not in self._constants:
            self._constants[name] = None
            if _is_whole(node.get_element_type()):
                data = node.get_data()
                if data.size and data.ndim and max(data.shape) <= _MOST_COLUMNS:
                    self._constants[name] = (data.astype(object), data.astype(object))
                elif data.size:
                    self._constants[name] = int(data.min()), int(data.max())
        return self._constants[name]


_PACKED = ("EmbeddingBagPacked", "EmbeddingBagPackedSum", "EmbeddingSegmentsSum")


class _Indices:
    """A network that computes the indices of another network's lookups.

    Parameters
    ----------
    network : openvino.Model
        Network that this object takes over and changes.
    compile : callable
        Compiles a network.
    """

    def __init__(self, network: ov.Model, compile: Callable[[Any], Any]):
        from openvino import opset13

        self._lookups = _Integers(network).lookups
        parameters = list(network.get_parameters())
        self._positions = [i for i, e in enumerate(parameters) if _is_whole(e.get_element_type())]
        results = [opset13.result(each.indices) for each in self._lookups]
        whole = [parameters[position] for position in self._positions]
        self._compiled = compile(openvino.Model(results, whole, "indices"))

    def ranges(self, arrays: Sequence[np.ndarray]) -> list[tuple[_Lookup, Interval]]:
        """Return each lookup with its smallest and largest index for the input arrays."""
        request = self._compiled.take()
        try:
            values = self._compiled.infer(request, [arrays[each] for each in self._positions])
            return [
                (lookup, (int(value.min()), int(value.max())) if value.size else None)
                for lookup, value in zip(self._lookups, values, strict=True)
            ]
        finally:
            self._compiled.idle.append(request)


class _Split:
    """A network split into a part that computes integers exactly and a part for the rest.

    Attributes
    ----------
    lookups : list
        Index of each value that indexes a table, with the lookup.
    narrowed : list of int
        Indices of the values that the rest of the network uses in 32 bits.
    rest : _Integers
        Analysis of the rest of the network.
    compiled
        Compiled rest of the network.
    inputs : list
        Source of each input of the rest: ``"value"`` or ``"input"``, and its index.
    """

    def __init__(self, network: ov.Model, compile: Callable[[Any], Any]):
        from openvino import opset13

        _without_remainders(network)
        _without_rounding(network)
        _without_bits_of_booleans(network)
        graph = _Integers(network)
        parameters = list(network.get_parameters())
        whole = [each for each in parameters if _is_whole(each.get_element_type())]
        computed = [node for node in network.get_ordered_ops() if node.get_name() in graph.exact]
        self.narrowed: list[int] = []
        self.lookups: list[tuple[int, _Lookup]] = []
        lookups = {
            (e.indices.get_node().get_name(), e.indices.get_index()): e for e in graph.lookups
        }
        results: list[Any] = []
        computed_inputs: list[Any] = []
        for node in [*whole, *computed]:
            for output in node.outputs():
                users = [
                    each
                    for each in output.get_target_inputs()
                    if each.get_node().get_name() not in graph.exact
                ]
                key = node.get_name(), output.get_index()
                if not users and key not in lookups:
                    continue
                index = len(results)
                results.append(opset13.result(output))
                if key in lookups:
                    self.lookups.append((index, lookups[key]))
                element_type = output.get_element_type()
                only_result = all(each.get_node().get_type_name() == "Result" for each in users)
                if _is_whole(element_type) and not only_result:
                    self.narrowed.append(index)
                parameter = opset13.parameter(output.get_partial_shape(), element_type)
                computed_inputs.append(parameter)
                for each in users:
                    each.replace_source_output(parameter.output(0))
        self._first = openvino.Model(results, parameters, "integers")
        ends = network.get_results()
        self.inputs = [("value", index) for index in range(len(computed_inputs))]
        others = [(i, each) for i, each in enumerate(parameters) if each not in whole]
        self.inputs += [("input", i) for i, _ in others]
        rest = openvino.Model(ends, [*computed_inputs, *(each for _, each in others)], "rest")
        self.rest = _Integers(rest)
        self.compiled = compile(rest)
        self._network, self._compile = rest, compile

    @cached_property
    def indices(self) -> _Indices:
        """Network that computes the lookup indices of the rest of the network."""
        return _Indices(self._network.clone(), self._compile)

    def evaluate(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the integers, computed from the inputs by OpenVINO's reference implementation."""
        empty = openvino.Shape([0])
        tensors = [openvino.Tensor(each.get_element_type(), empty) for each in self._first.outputs]
        inputs = [openvino.Tensor(np.ascontiguousarray(each)) for each in arrays]
        self._first.evaluate(tensors, inputs)
        return [each.data for each in tensors]


def _without_remainders(network: ov.Model) -> None:
    """Replace ``a % b`` by ``a - a // b * b``; the reference implementation of % uses float64."""
    from openvino import opset13

    for node in network.get_ordered_ops():
        if node.get_type_name() == "FloorMod" and node.get_element_type().is_integral():
            dividend, divisor = node.input_values()
            whole = opset13.multiply(opset13.divide(dividend, divisor), divisor)
            rest = opset13.subtract(dividend, whole)
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(rest.output(0))


def _without_rounding(network: ov.Model) -> None:
    """Remove Ceiling, Floor and Round nodes that have integer inputs, which they do not change."""
    for node in network.get_ordered_ops():
        op_type = node.get_type_name()
        if op_type in ("Ceiling", "Floor", "Round") and node.get_element_type().is_integral():
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(node.input_value(0))


def _without_bits_of_booleans(network: ov.Model) -> None:
    """Replace bitwise operators on booleans by logical ones, which are computed exactly."""
    from openvino import opset13

    logical = {
        "BitwiseAnd": opset13.logical_and,
        "BitwiseOr": opset13.logical_or,
        "BitwiseXor": opset13.logical_xor,
        "BitwiseNot": opset13.logical_not,
    }
    for node in network.get_ordered_ops():
        make = logical.get(node.get_type_name())
        if make is not None and node.get_element_type().get_type_name() == "boolean":
            made = make(*node.input_values())
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(made.output(0))


def _largest(boxes: Mapping[int, tuple[int, int]]) -> int:
    """Return the position of the input with the largest absolute integer."""
    return max(boxes, key=lambda position: max(map(abs, boxes[position])))


def _in_floats(node: ov.Node, intervals: Sequence[Interval]) -> bool:
    """Return True if float32 represents all integers in the given ranges of a node's values."""
    signs = node.get_type_name() != "Divide"  # a division rounds towards zero
    return all(
        each is None
        or (np.all(each[0] >= -_EXACT_FLOATS * signs) and np.all(each[1] <= _EXACT_FLOATS))
        for each in intervals
    )


def _computed(node: ov.Node, inputs: list[Interval]) -> Interval:
    """Return the range of a node's output from the ranges of its inputs, or None if unknown."""
    op_type = node.get_type_name()
    if op_type in _LOGICAL or node.get_element_type().get_type_name() == "boolean":
        return 0, 1
    if op_type in _BY_COLUMN:
        return _BY_COLUMN[op_type](node, inputs)
    if op_type == "Select":
        return _union(inputs[1:])
    if op_type in _CORNERS:
        one, other = inputs
        if one is None or other is None:
            return None
        corners = [_CORNERS[op_type](x, y) for x in one for y in other]
        return functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners)
    return _computed_of_all(node, op_type, [_of_all(each) for each in inputs])


def _computed_of_all(
    node: ov.Node, op_type: str, inputs: list[tuple[int, int] | None]
) -> tuple[int, int] | None:
    """Return one range for a node's whole output from one range per input, or None if unknown."""
    if op_type in ("FloorMod", "Mod"):
        divisor = inputs[1]
        if divisor is None or divisor[0] <= 0:
            return None
        low, high = -(divisor[1] - 1), divisor[1] - 1
        if op_type == "FloorMod" or (inputs[0] is not None and inputs[0][0] >= 0):
            low = 0
        return low, high
    if op_type in _MOVING:
        return inputs[0]
    if any(each is None for each in inputs):
        return None
    boxes = [each for each in inputs if each is not None]
    low, high = boxes[0]
    if op_type == "Divide":
        (low, high), (least, most) = boxes
        return (low // least, high // least) if low >= 0 and least > 0 else None
    if op_type == "Power":
        least, most = boxes[1]
        ends = [0] if least < 0 or most > 64 else [abs(low) ** most, abs(high) ** most, 1]
        return (-max(ends) if low < 0 else 0), max(ends)
    if op_type == "Negative":
        return -high, -low
    if op_type == "Abs":
        return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
    if op_type in ("ReduceSum", "CumSum"):
        shape = node.input_value(0).get_partial_shape()
        count = _MOST_ADDED
        if shape.is_static:
            count = max(1, int(np.prod([each.get_length() for each in shape], dtype=np.int64)))
        return min(low, low * count), max(high, high * count)
    return None


def _moved(move: Callable[[np.ndarray, list[int]], np.ndarray], axes_from: int) -> Callable:
    """Return a function that computes the output range of an operator that adds or removes axes."""

    def moved(node: ov.Node, inputs: list[Interval]) -> Interval:
        box = inputs[0]
        axes = _integers_of(node, axes_from)
        if box is None or axes is None or not _has_rank(box, node.input_value(0)):
            return _of_all(box)
        return move(box[0], axes), move(box[1], axes)

    return moved


def _gathered(node: ov.Node, inputs: list[Interval]) -> Interval:
    """Return the output range of a Gather node, per column if its indices are constant."""
    box, axes = inputs[0], _integers_of(node, 2)
    indices = node.input_value(1).get_node()
    if (
        box is None
        or axes is None
        or indices.get_type_name() != "Constant"
        or not _has_rank(box, node.input_value(0))
        or np.shape(box[0])[axes[0]] == 1
    ):
        return _of_all(box)
    return np.take(box[0], indices.get_data(), axes[0]), np.take(
        box[1], indices.get_data(), axes[0]
    )


def _concatenated(node: ov.Node, inputs: list[Interval]) -> Interval:
    shape, axis = node.output(0).get_partial_shape(), node.get_axis()
    boxes = [each for each in inputs if each is not None]
    if len(boxes) < len(inputs):
        return None
    values = node.input_values()
    if (
        shape.rank.is_dynamic
        or shape[axis].is_dynamic
        or shape[axis].get_length() > _MOST_COLUMNS
        or not all(map(_has_rank, boxes, values))
    ):
        return _union([_of_all(each) for each in boxes])
    ends = []
    for end, take in enumerate((np.minimum, np.maximum)):
        parts = []
        for box, value in zip(boxes, values, strict=True):
            others = tuple(i for i in range(box[end].ndim) if i != axis % box[end].ndim)
            part = take.reduce(box[end], axis=others, keepdims=True)
            length = value.get_partial_shape()[axis].get_length()
            parts.append(np.repeat(part, length // part.shape[axis], axis))
        ends.append(np.concatenate(parts, axis))
    return ends[0], ends[1]


_BY_COLUMN: dict[str, Callable[[Any, list[Interval]], Interval]] = {
    **dict.fromkeys(("Ceiling", "Convert", "Floor", "Round"), lambda node, inputs: inputs[0]),
    "Concat": _concatenated,
    "Gather": _gathered,
    "Squeeze": _moved(lambda end, axes: np.squeeze(end, tuple(axes)), 1),
    "Unsqueeze": _moved(lambda end, axes: np.expand_dims(end, tuple(axes)), 1),
}
"""Functions that return the range of each column for an operator, by operator type."""


def _has_rank(box: Box, value: ov.Output) -> bool:
    """Return True if the bounds in `box` have as many axes as the node output `value`."""
    rank = value.get_partial_shape().rank
    return rank.is_static and np.ndim(box[0]) == rank.get_length()


def _column_of(node: ov.Node) -> int | None:
    """Return the column if a Gather selects a single column of the last axis, else None."""
    indices, axes = _integers_of(node, 1), _integers_of(node, 2)
    rank = node.input_value(0).get_partial_shape().rank
    if indices is None or len(indices) != 1 or axes is None or rank.is_dynamic:
        return None
    return indices[0] if axes[0] % rank.get_length() == rank.get_length() - 1 else None


def _integers_of(node: ov.Node, position: int) -> list[int] | None:
    """Return the values of a constant input as integers, or None if it is not constant."""
    if node.get_input_size() <= position:
        return None
    source = node.input_value(position).get_node()
    if source.get_type_name() != "Constant":
        return None
    return [int(each) for each in np.ravel(source.get_data())]


def _of_all(interval: Interval) -> tuple[int, int] | None:
    """Merge the ranges of all columns into one range; return None if the range is unknown."""
    return None if interval is None else _whole_range(interval)


def _whole_range(box: Box) -> tuple[int, int]:
    """Merge the ranges of all columns into one range."""
    return int(np.min(box[0])), int(np.max(box[1]))


def _columns_of(shape: ov.PartialShape) -> tuple[int, ...]:
    """Return the shape of an input's bounds: one bound per column if the last axis is short."""
    if shape.rank.is_dynamic:
        return ()
    ones = [1] * shape.rank.get_length()
    if len(ones) > 1 and shape[-1].is_static and shape[-1].get_length() <= _MOST_COLUMNS:
        ones[-1] = shape[-1].get_length()
    return tuple(ones)


def _box_of(array: np.ndarray, columns: tuple[int, ...]) -> Box:
    """Return the smallest and largest values of an array, in the shape `columns`."""
    if array.ndim != len(columns):
        return int(array.min()), int(array.max())
    axes = tuple(axis for axis, length in enumerate(columns) if length == 1)
    low, high = array.min(axes, keepdims=True), array.max(axes, keepdims=True)
    return low.astype(object), high.astype(object)


def _compact(end: np.ndarray) -> int | np.ndarray:
    """Return the bounds of all columns as one integer if they are equal, else as an int64 array."""
    alike = np.all(end == end.flat[0])
    return int(end.flat[0]) if alike else end.astype(np.int64)


def _widest_boxes(graph: _Integers, boxes: dict[int, Box]) -> dict[int, Box]:
    """Return the widest input ranges within `boxes` for which all integers are exact.

    Search first one width for all inputs, then each bound of each column by bisection.
    """
    for bits in (31, 30, 24, 20, 16, 12, 8, 4, 2, 0):
        for least in (-(1 << bits), 0):
            tried: dict[int, Box] = {
                position: (np.maximum(low, least), np.minimum(high, (1 << bits) - 1))
                for position, (low, high) in boxes.items()
            }
            if graph.problem(tried) is None:
                trials = iter(range(_MOST_TRIALS))
                for position, box in tried.items():
                    _widen(graph, tried, box, boxes[position], trials)
                return tried
    return {p: (np.zeros_like(low), np.full_like(low, -1)) for p, (low, _) in boxes.items()}


def _widen(
    graph: _Integers, boxes: dict[int, Box], box: Box, most: Box, trials: Iterator[int]
) -> None:
    """Widen each bound of `box` up to the bound of `most` while all results stay exact."""
    for end in (1, 0):
        for column in range(box[end].size):
            proved, outer = box[end].flat[column], most[end].flat[column]
            while proved != outer and next(trials, None) is not None:
                middle = (proved + outer + (outer > proved)) // 2
                box[end].flat[column] = middle
                if graph.problem(boxes) is None:
                    proved = middle
                else:
                    outer = middle - 1 if outer > proved else middle + 1
            box[end].flat[column] = proved


_CORNERS: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Subtract": lambda a, b: a - b,
    "Multiply": lambda a, b: a * b,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
}


def _union(intervals: Sequence[Interval]) -> Interval:
    boxes = [each for each in intervals if each is not None]
    if len(boxes) < len(intervals):
        return None
    lows, highs = zip(*boxes, strict=True)
    return functools.reduce(np.minimum, lows), functools.reduce(np.maximum, highs)


def _fits(interval: Interval) -> bool:
    return interval is None or bool(np.all(interval[0] >= _LOW) and np.all(interval[1] <= _HIGH))


def _is_whole(element_type: ov.Type) -> bool:
    return element_type.is_integral() or element_type.get_type_name() == "boolean"


def _range_of(element_type: ov.Type) -> tuple[int, int]:
    if element_type.get_type_name() == "boolean":
        return 0, 1
    bits = element_type.get_bitwidth()
    if element_type.is_signed():
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return 0, (1 << bits) - 1


def _narrows(node: ov.Node) -> bool:
    """Return True if a Convert node's output type cannot represent all its input integers."""
    target = node.output(0).get_element_type()
    if target.get_type_name() == "boolean" or not target.is_integral():
        return False
    low, high = _range_of(node.input_value(0).get_element_type())
    lowest, highest = _range_of(target)
    return low < lowest or high > highest


def _before_converts(value: ov.Output) -> ov.Output:
    """Return the integer output that Convert nodes turn into `value`, or `value` itself."""
    node = value.get_node()
    while node.get_type_name() == "Convert":
        before = node.input_value(0)
        if not _is_whole(before.get_element_type()):
            break
        value, node = before, before.get_node()
    return value


def _is_constant(value: ov.Output) -> bool:
    return value.get_node().get_type_name() == "Constant"


def _has_wide_constants(network: ov.Model) -> bool:
    for node in network.get_ops():
        if node.get_type_name() == "Constant":
            element_type = node.get_element_type()
            if element_type.is_integral() and element_type.get_bitwidth() == 64:
                return True
    return False
