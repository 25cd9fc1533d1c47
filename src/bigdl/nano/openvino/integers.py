"""Integers that OpenVINO would compute wrongly, and how they are computed or refused.

OpenVINO computes integers of all types in 32 bits on a CPU and drops the higher bits of an input;
remainders, quotients, comparisons, powers and sums go through float32, so that they are exact up
to 2**24 only (2026.4). An index outside of a table gives zeros, a negative one the last rows. So
:class:`IntegerGuard` compares each call's integers with limits, which it derives from the network
once by interval arithmetic. Where a call exceeds them, the part of the network that computes
integers from the inputs alone, e.g. ``ids % 1000``, is evaluated by OpenVINO's reference
implementation in 64 bits, and the rest of the network gets its results. What does not fit there
either is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from bigdl.common.errors import LazyModule, UsageError, first_line

openvino = LazyModule("openvino", "nano")

_LOW, _HIGH = -(2**31), 2**31 - 1
_INFO = ["bigdl", "no_negative"]
"""Path in a network's runtime information: names of inputs that must not be negative."""

Box = tuple[Any, Any]
"""Lowest and highest value: integers, or arrays of Python integers that broadcast to the value."""

Interval = Box | None
"""A box; None where the values are not known."""

# Operators whose values are values of their first input.
_MOVING = frozenset(
    (
        *("Broadcast", "Ceiling", "Convert", "Floor", "Gather", "GatherElements", "GatherND"),
        *("Pad", "ReduceMax", "ReduceMin", "Reshape", "Reverse", "Round", "Slice", "Split"),
        *("Squeeze", "StridedSlice", "Tile", "Transpose", "Unsqueeze", "VariadicSplit"),
    )
)
_SLICING = ("Slice", "StridedSlice")
# Operators whose output has each value of their first input.
_KEEPING = frozenset(
    ("Broadcast", "Convert", "Reshape", "Reverse", "Squeeze", "Tile", "Transpose", "Unsqueeze")
)
# Dimensions up to this length have ranges of their own: columns of ids, offsets into one table.
_MOST_COLUMNS = 64
# So often a network is looked at to find the widest ranges.
_MOST_TRIALS = 200
# As many elements are taken to be added up, where the network leaves that open.
_MOST_ADDED = 1 << 16
_LOGICAL = frozenset(
    (
        *("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalNot"),
        *("LogicalOr", "LogicalXor", "NotEqual", "ReduceLogicalAnd", "ReduceLogicalOr"),
    )
)
# What goes through float32, and up to where that is exact.
_IN_FLOATS = frozenset(
    (
        *("Ceiling", "Divide", "Equal", "Floor", "FloorMod", "Greater", "GreaterEqual", "Less"),
        *("LessEqual", "Mod", "NotEqual", "Power", "ReduceMax", "ReduceMin", "ReduceProd"),
        *("ReduceSum", "Round"),
    )
)
_EXACT_FLOATS = 1 << 24
# What the reference implementation computes exactly in 64 bits.
_EXACT = (
    _MOVING
    | _LOGICAL
    | {"Add", "Subtract", "Multiply", "Divide", "Mod", "Maximum", "Minimum", "Negative"}
    | {"Abs", "Concat", "Select", "Sign", "ReduceSum"}
)


class _Lookup(NamedTuple):
    """One table and the integers that index it."""

    indices: Any  # output of a node
    rows: int
    negative: bool  # may count from the end

    @property
    def lowest(self) -> int:
        """Lowest index that the table has."""
        return -self.rows if self.negative else 0


def forbid_negative(network: Any, names: Sequence[str]) -> None:
    """Record in a network that inputs must not be negative, as the original refuses it."""
    known = {*names, *never_negative(network)}
    if known:
        network.set_rt_info("\n".join(sorted(known)), _INFO)


def never_negative(network: Any) -> list[str]:
    """Return what :func:`forbid_negative` recorded in a network."""
    if not network.has_rt_info(_INFO):
        return []
    return [name for name in str(network.get_rt_info(_INFO).value).split("\n") if name]


class IntegerGuard:
    """Limits of the integers that a network takes.

    Parameters
    ----------
    network : openvino.Model
    names : sequence of str
        Of its inputs.
    compile : callable
        Returns what runs a network; called when a call first exceeds 32 bits.

    Raises
    ------
    UsageError
        If the network itself holds integers beyond 32 bits that OpenVINO would cut.
    """

    def __init__(self, network: Any, names: Sequence[str], compile: Callable[[Any], Any]):
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
        """Position of an input, and the lowest and the highest value that need no other look, of
        all values or of each column."""
        self._graph: _Integers | None = None
        if self._whole or _has_wide_constants(network):
            self._graph = _Integers(network)
            self._graph.refuse_constants()
            self.limits = self._derived(self._graph)

    def _derived(self, graph: _Integers) -> list[tuple[int, Any, Any]]:
        """Return the widest boxes that can be proved, of inputs that may hold more."""
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
            (position, _least_form(low), _least_form(high))
            for position, (low, high) in _proved(graph, boxes).items()
            if np.any(low > self._whole[position][0]) or np.any(high < self._whole[position][1])
        ]

    def checked(self, arrays: Sequence[np.ndarray]) -> tuple[Any, list[np.ndarray]] | None:
        """Look at the integers of one call.

        Parameters
        ----------
        arrays : sequence of ndarray
            Of the network's types.

        Returns
        -------
        tuple or None
            None if the network computes them right. Else what `compile` returned for another
            network, and the arrays that this one takes.

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
                return self._looked_at(arrays)
        return None

    def _looked_at(self, arrays: Sequence[np.ndarray]) -> tuple[Any, list[np.ndarray]] | None:
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
            "network computes integers that OpenVINO, which has 32 bits for them, would get wrong"
        )
        advice = "; use accelerator='onnxruntime' or 'jit', or map the ids to smaller ones first"
        split = self._split
        if isinstance(split, str):
            raise UsageError(
                f"{sentence} ({split}){advice}", code="data-value", argument=self._names[largest]
            )
        values = split.evaluate(arrays)
        for place, lookup in split.lookups:
            value = values[place]
            if value.size:
                box = int(value.min()), int(value.max())
                self._check_lookup(lookup, box, self._names[largest])
        left = {
            place: (int(values[place].min()), int(values[place].max()))
            for place in split.narrowed
            if values[place].size
        }
        if split.rest.problem(left, lookups=False) is not None:
            raise UsageError(sentence + advice, code="data-value", argument=self._names[largest])
        inputs = [
            values[place] if kind == "value" else arrays[place] for kind, place in split.inputs
        ]
        if split.rest.problem(left) is not None:
            for lookup, interval in split.indices.ranges(inputs):
                self._check_lookup(lookup, interval, self._names[largest])
        return split.compiled, inputs

    @cached_property
    def _split(self) -> _Split | str:
        if self._network.get_sinks() or self._network.get_variables():
            return "it keeps a state"
        try:
            return _Split(self._network.clone(), self._compile)
        except Exception as error:
            return first_line(error)


class _Integers:
    """The integers of a network that are computed from its inputs alone."""

    def __init__(self, network: Any):
        self.network = network
        self.parameters = {each.get_name(): i for i, each in enumerate(network.get_parameters())}
        self.exact: set[str] = set()  # names of nodes that can be evaluated apart
        self.lookups: list[_Lookup] = []
        self._nodes: list[Any] = []
        self._constants: dict[str, Interval] = {}
        known: set[str] = set(self.parameters)
        for node in network.get_ordered_ops():
            name, kind = node.get_name(), node.get_type_name()
            if kind in ("Parameter", "Constant", "Result"):
                continue
            self._see_lookup(node, kind, known)
            varying = [v for v in node.input_values() if not _is_constant(v)]
            if kind == "ShapeOf":
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
            elif kind != "Convert":
                continue
            sources = (v.get_node().get_name() for v in varying)
            apart = all(each in self.exact or each in self.parameters for each in sources)
            if apart and kind in _EXACT and not (kind == "Convert" and _narrows(node)):
                self.exact.add(name)

    def _see_lookup(self, node: Any, kind: str, known: set[str]) -> None:
        if kind not in ("Gather", "EmbeddingBagOffsets", "EmbeddingBagOffsetsSum", *_PACKED):
            return
        table, indices = node.input_value(0), _before_converts(node.input_value(1))
        if indices.get_node().get_name() not in known or _is_constant(indices):
            return
        axis = 0
        if kind == "Gather":
            axes = node.input_value(2).get_node()
            if axes.get_type_name() != "Constant":
                return
            axis = int(np.ravel(axes.get_data())[0])
        shape = table.get_partial_shape()
        if shape.rank.is_dynamic or shape[axis].is_dynamic:
            return
        embedding = kind != "Gather" or "aten::embedding" in node.get_friendly_name()
        self.lookups.append(_Lookup(indices, shape[axis].get_length(), not embedding))

    def direct(self) -> list[tuple[int, int | None, _Lookup]]:
        """Return lookups by all values of an input, or by a column, with their positions."""
        found = []
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
                found.append((self.parameters[node.get_name()], column, lookup))
        return found

    def refuse_constants(self) -> None:
        """Refuse integers of the network itself that OpenVINO would cut.

        Raises
        ------
        UsageError
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
                    "The network holds integers beyond 32 bits, which OpenVINO would cut "
                    f"({node.get_friendly_name()}); use accelerator='onnxruntime' or 'jit', or "
                    "return positions and look the integers up outside of the model",
                    code="model-unsupported",
                )

    def problem(self, boxes: Mapping[int, Box], *, lookups: bool = True) -> str | None:
        """Return what may be computed wrongly for inputs in these ranges; None if nothing is.

        Parameters
        ----------
        boxes : mapping
            Range of each input's values by its position.
        lookups : bool
            Whether an index may be outside of its table, too.
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
            for place in range(node.get_output_size()):
                values[node.get_name(), place] = made
        for lookup in self.lookups if lookups else ():
            box = self._interval(lookup.indices, values)
            if box is not None and (
                np.any(box[0] < lookup.lowest) or np.any(box[1] >= lookup.rows)
            ):
                return "an index"
        return None

    def _interval(self, value: Any, values: Mapping[tuple[str, int], Interval]) -> Interval:
        node = value.get_node()
        if node.get_type_name() == "Constant":
            return self._constant(node)
        return values.get((node.get_name(), value.get_index()))

    def _constant(self, node: Any) -> Interval:
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
    """The indices of a network's lookups, computed from its inputs by a network of their own.

    Parameters
    ----------
    network : openvino.Model
        Belongs to this object from now on.
    compile : callable
        Returns what runs a network.
    """

    def __init__(self, network: Any, compile: Callable[[Any], Any]):
        from openvino import opset13

        self._lookups = _Integers(network).lookups
        parameters = list(network.get_parameters())
        self._positions = [i for i, e in enumerate(parameters) if _is_whole(e.get_element_type())]
        results = [opset13.result(each.indices) for each in self._lookups]
        whole = [parameters[position] for position in self._positions]
        self._compiled = compile(openvino.Model(results, whole, "indices"))

    def ranges(self, arrays: Sequence[np.ndarray]) -> list[tuple[_Lookup, Interval]]:
        """Return each lookup with the range of its indices for a call's arrays."""
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
    """A network whose integers are computed first, by the reference implementation.

    Attributes
    ----------
    lookups : list
        Place of a value that indexes a table, and the lookup.
    narrowed : list of int
        Places of the values that the rest of the network computes with in 32 bits.
    rest : _Integers
        Of the rest of the network.
    compiled
        What runs the rest.
    inputs : list
        For each input of the rest, ``"value"`` and its place, or ``"input"`` and its position.
    """

    def __init__(self, network: Any, compile: Callable[[Any], Any]):
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
        wanted = {
            (e.indices.get_node().get_name(), e.indices.get_index()): e for e in graph.lookups
        }
        results: list[Any] = []
        twins: list[Any] = []
        for node in [*whole, *computed]:
            for output in node.outputs():
                users = [
                    each
                    for each in output.get_target_inputs()
                    if each.get_node().get_name() not in graph.exact
                ]
                key = node.get_name(), output.get_index()
                if not users and key not in wanted:
                    continue
                place = len(results)
                results.append(opset13.result(output))
                if key in wanted:
                    self.lookups.append((place, wanted[key]))
                kind = output.get_element_type()
                plain = all(each.get_node().get_type_name() == "Result" for each in users)
                if _is_whole(kind) and not plain:
                    self.narrowed.append(place)
                twin = opset13.parameter(output.get_partial_shape(), kind)
                twins.append(twin)
                for each in users:
                    each.replace_source_output(twin.output(0))
        self._first = openvino.Model(results, parameters, "integers")
        ends = network.get_results()
        self.inputs = [("value", place) for place in range(len(twins))]
        others = [(i, each) for i, each in enumerate(parameters) if each not in whole]
        self.inputs += [("input", i) for i, _ in others]
        rest = openvino.Model(ends, [*twins, *(each for _, each in others)], "rest")
        self.rest = _Integers(rest)
        self.compiled = compile(rest)
        self._network, self._compile = rest, compile

    @cached_property
    def indices(self) -> _Indices:
        """Indices that the rest of the network computes."""
        return _Indices(self._network.clone(), self._compile)

    def evaluate(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the values of the first part."""
        empty = openvino.Shape([0])
        tensors = [openvino.Tensor(each.get_element_type(), empty) for each in self._first.outputs]
        given = [openvino.Tensor(np.ascontiguousarray(each)) for each in arrays]
        self._first.evaluate(tensors, given)
        return [each.data for each in tensors]


def _without_remainders(network: Any) -> None:
    """Write ``a % b`` as ``a - a // b * b``: the reference of the first goes through float64."""
    from openvino import opset13

    for node in network.get_ordered_ops():
        if node.get_type_name() == "FloorMod" and node.get_element_type().is_integral():
            dividend, divisor = node.input_values()
            whole = opset13.multiply(opset13.divide(dividend, divisor), divisor)
            rest = opset13.subtract(dividend, whole)
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(rest.output(0))


def _without_rounding(network: Any) -> None:
    """Leave out operators that round integers."""
    for node in network.get_ordered_ops():
        kind = node.get_type_name()
        if kind in ("Ceiling", "Floor", "Round") and node.get_element_type().is_integral():
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(node.input_value(0))


def _without_bits_of_booleans(network: Any) -> None:
    """Write operators on the bits of booleans as logical ones, whose reference is exact."""
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
    """Return the position of the input with the largest integer."""
    return max(boxes, key=lambda position: max(map(abs, boxes[position])))


def _in_floats(node: Any, intervals: Sequence[Interval]) -> bool:
    """Return True if a node's integers are computed exactly in float32."""
    signs = node.get_type_name() != "Divide"  # which rounds towards zero
    return all(
        each is None
        or (np.all(each[0] >= -_EXACT_FLOATS * signs) and np.all(each[1] <= _EXACT_FLOATS))
        for each in intervals
    )


def _computed(node: Any, inputs: list[Interval]) -> Interval:
    """Return the interval of a node's values from those of its inputs; None if it is not known."""
    kind = node.get_type_name()
    if kind in _LOGICAL or node.get_element_type().get_type_name() == "boolean":
        return 0, 1
    if kind in _BY_COLUMN:
        return _BY_COLUMN[kind](node, inputs)
    if kind == "Select":
        return _union(inputs[1:])
    if kind in _CORNERS:
        one, other = inputs
        if one is None or other is None:
            return None
        corners = [_CORNERS[kind](x, y) for x in one for y in other]
        return functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners)
    return _computed_of_all(node, kind, [_of_all(each) for each in inputs])


def _computed_of_all(
    node: Any, kind: str, inputs: list[tuple[int, int] | None]
) -> tuple[int, int] | None:
    """Return the range of all values of a node from those of all values of its inputs."""
    if kind in ("FloorMod", "Mod"):
        divisor = inputs[1]
        if divisor is None or divisor[0] <= 0:
            return None
        low, high = -(divisor[1] - 1), divisor[1] - 1
        if kind == "FloorMod" or (inputs[0] is not None and inputs[0][0] >= 0):
            low = 0
        return low, high
    if kind in _MOVING:
        return inputs[0]
    if any(each is None for each in inputs):
        return None
    boxes = [each for each in inputs if each is not None]
    low, high = boxes[0]
    if kind == "Divide":
        (low, high), (least, most) = boxes
        return (low // least, high // least) if low >= 0 and least > 0 else None
    if kind == "Power":
        least, most = boxes[1]
        ends = [0] if least < 0 or most > 64 else [abs(low) ** most, abs(high) ** most, 1]
        return (-max(ends) if low < 0 else 0), max(ends)
    if kind == "Negative":
        return -high, -low
    if kind == "Abs":
        return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
    if kind in ("ReduceSum", "CumSum"):
        shape = node.input_value(0).get_partial_shape()
        count = _MOST_ADDED
        if shape.is_static:
            count = max(1, int(np.prod([each.get_length() for each in shape], dtype=np.int64)))
        return min(low, low * count), max(high, high * count)
    return None


def _moved(move: Callable[[np.ndarray, list[int]], np.ndarray], axes_from: int) -> Callable:
    """Return how an operator moves the dimensions of a box; of all values where that is unknown."""

    def moved(node: Any, inputs: list[Interval]) -> Interval:
        box = inputs[0]
        axes = _integers_of(node, axes_from)
        if box is None or axes is None or not _has_rank(box, node.input_value(0)):
            return _of_all(box)
        return move(box[0], axes), move(box[1], axes)

    return moved


def _gathered(node: Any, inputs: list[Interval]) -> Interval:
    """Return the box of the columns that constant indices name."""
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


def _concatenated(node: Any, inputs: list[Interval]) -> Interval:
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
"""Operators whose columns have ranges of their own."""


def _has_rank(box: Box, value: Any) -> bool:
    """Return True if a box has the rank of its value, so that axes mean the same for both."""
    rank = value.get_partial_shape().rank
    return rank.is_static and np.ndim(box[0]) == rank.get_length()


def _column_of(node: Any) -> int | None:
    """Return the column that a Gather takes of its input's last dimension; None if it differs."""
    indices, axes = _integers_of(node, 1), _integers_of(node, 2)
    rank = node.input_value(0).get_partial_shape().rank
    if indices is None or len(indices) != 1 or axes is None or rank.is_dynamic:
        return None
    return indices[0] if axes[0] % rank.get_length() == rank.get_length() - 1 else None


def _integers_of(node: Any, position: int) -> list[int] | None:
    """Return the values of a constant input; None if it is none."""
    if node.get_input_size() <= position:
        return None
    source = node.input_value(position).get_node()
    if source.get_type_name() != "Constant":
        return None
    return [int(each) for each in np.ravel(source.get_data())]


def _of_all(interval: Interval) -> tuple[int, int] | None:
    """Return the range of the values of all columns; None if it is not known."""
    return None if interval is None else _whole_range(interval)


def _whole_range(box: Box) -> tuple[int, int]:
    """Return the range of the values of all columns."""
    return int(np.min(box[0])), int(np.max(box[1]))


def _columns_of(shape: Any) -> tuple[int, ...]:
    """Return the shape of an input's box, which has columns if the last dimension is short."""
    if shape.rank.is_dynamic:
        return ()
    ones = [1] * shape.rank.get_length()
    if len(ones) > 1 and shape[-1].is_static and shape[-1].get_length() <= _MOST_COLUMNS:
        ones[-1] = shape[-1].get_length()
    return tuple(ones)


def _box_of(array: np.ndarray, columns: tuple[int, ...]) -> Box:
    """Return the box of an array, of shape `columns`."""
    if array.ndim != len(columns):
        return int(array.min()), int(array.max())
    axes = tuple(axis for axis, length in enumerate(columns) if length == 1)
    low, high = array.min(axes, keepdims=True), array.max(axes, keepdims=True)
    return low.astype(object), high.astype(object)


def _least_form(end: np.ndarray) -> Any:
    """Return an end of a box as one integer where its columns are alike, else as int64."""
    alike = np.all(end == end.flat[0])
    return int(end.flat[0]) if alike else end.astype(np.int64)


def _proved(graph: _Integers, boxes: dict[int, Box]) -> dict[int, Box]:
    """Return the widest boxes within `boxes` for which nothing is computed wrongly.

    They are found by trying: one width for all inputs, then each end of each column by halving.
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
    """Move each end of one of `boxes` towards that of `most`, as far as nothing is wrong."""
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


def _is_whole(element_type: Any) -> bool:
    return element_type.is_integral() or element_type.get_type_name() == "boolean"


def _range_of(element_type: Any) -> tuple[int, int]:
    if element_type.get_type_name() == "boolean":
        return 0, 1
    bits = element_type.get_bitwidth()
    if element_type.is_signed():
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return 0, (1 << bits) - 1


def _narrows(node: Any) -> bool:
    """Return True if a Convert drops bits of integers."""
    target = node.output(0).get_element_type()
    if target.get_type_name() == "boolean" or not target.is_integral():
        return False
    low, high = _range_of(node.input_value(0).get_element_type())
    lowest, highest = _range_of(target)
    return low < lowest or high > highest


def _before_converts(value: Any) -> Any:
    """Return what an index was before it was converted to another type of integers."""
    node = value.get_node()
    while node.get_type_name() == "Convert":
        before = node.input_value(0)
        if not _is_whole(before.get_element_type()):
            break
        value, node = before, before.get_node()
    return value


def _is_constant(value: Any) -> bool:
    return value.get_node().get_type_name() == "Constant"


def _has_wide_constants(network: Any) -> bool:
    for node in network.get_ops():
        if node.get_type_name() == "Constant":
            kind = node.get_element_type()
            if kind.is_integral() and kind.get_bitwidth() == 64:
                return True
    return False
