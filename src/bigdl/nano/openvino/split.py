"""Networks split into parts for common and per-row inputs, and a joint part that combines them.

A ranking model scores one user with many items, so the user's inputs are equal in all rows. The
part of the network that depends on these *common* inputs alone is computed for one row. The part
that depends on the *per-row* inputs alone is computed once for each item and can be cached. Only
the *joint* part is computed for every pair.

The graph is traversed from its inputs. A value with columns of both parts, such as a concatenation,
is kept as pieces, each of one part, as long as the operations allow it: an elementwise operation
works on each piece, a sum over them is a sum of sums, and the product of a concatenation with a
matrix is the sum of the products of the pieces with parts of the matrix. All other operations
belong to the joint network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.openvino.integers import forbid_negative, never_negative
from bigdl.nano.openvino.network import (
    CompiledNetwork,
    ShapedNetwork,
    openvino,
    port_name,
    reason,
)

if TYPE_CHECKING:
    import openvino as ov

__all__ = ["SplitError", "SplitNetwork"]

_CONSTANT, _COMMON, _PER_ROW, _BOTH = 0, 1, 2, 3  # inputs that a value depends on, as bits

_ELEMENTWISE = frozenset(
    (
        *("Abs", "Add", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
        *("Ceiling", "Clamp", "Convert", "Divide", "Elu", "Equal"),
        *("Erf", "Exp", "FakeQuantize", "Floor", "FloorMod", "Gelu"),
        *("Greater", "GreaterEqual", "HSigmoid", "HSwish", "HardSigmoid", "Less"),
        *("LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr", "LogicalXor"),
        *("Maximum", "Minimum", "Mish", "Mod", "Multiply", "Negative"),
        *("NotEqual", "Power", "Relu", "Round", "Select", "Selu"),
        *("Sigmoid", "Sign", "SoftPlus", "Sqrt", "SquaredDifference", "Subtract"),
        *("Swish", "Tanh"),
    )
)
_REDUCTIONS = {"ReduceMax": "Maximum", "ReduceMin": "Minimum", "ReduceProd": "Multiply"}
_RESHAPES = frozenset(("Reshape", "Squeeze", "Unsqueeze"))
_MOST_VALUES = 1 << 20  # values of one row up to which a reshape is tracked


class SplitError(UsageError):
    """Exception raised when a network cannot be split by its common inputs.

    Examples
    --------
    >>> from bigdl.nano.openvino.split import SplitError
    >>> issubclass(SplitError, ValueError)
    True
    """

    code = "model-unsupported"


@dataclass(frozen=True)
class _Plain:
    """A tensor that a single node computes as a whole."""

    side: int
    output: Any


@dataclass(frozen=True)
class _Pieces:
    """A tensor cut along one axis into pieces that different parts of the network compute.

    The value at ``positions[i]`` along the axis is the i-th of the piece.
    """

    axis: int
    size: int
    pieces: list[tuple[int, Any, np.ndarray]]  # side, output, positions


@dataclass(frozen=True)
class _Sum:
    """A tensor that is the sum of terms that different parts of the network compute."""

    terms: dict[int, Any]  # by side


_Value = _Plain | _Pieces | _Sum


class SplitNetwork:
    """A network split for rows with equal common inputs; any number of threads may call it.

    Parameters
    ----------
    network : CompiledNetwork
        Network whose inputs and outputs have the batch as their first dimension.
    common : sequence of int
        Positions of the inputs that are equal in all rows.

    Attributes
    ----------
    width : int
        Number of values per row that :meth:`own` returns.

    Raises
    ------
    SplitError
        If the network cannot be split, or a split would not save computation.

    Examples
    --------
    >>> import numpy as np
    >>> import openvino
    >>> from openvino import opset13 as ops
    >>> from bigdl.nano.openvino import CompiledNetwork, SplitNetwork
    >>> user, item = (ops.parameter([-1, 2], np.float32, name=name) for name in ("user", "item"))
    >>> joined = ops.concat([user, item], 1)
    >>> weights = np.array([[1, 0], [0, 1], [2, 0], [0, 2]], np.float32)
    >>> output = ops.relu(ops.matmul(joined, ops.constant(weights), False, False))
    >>> network = CompiledNetwork(openvino.Model([output], [user, item]))
    >>> split = SplitNetwork(network, common=[0])
    >>> split.width
    2
    >>> rows = split.own([np.array([[1, 1], [-9, 3]], np.float32)])  # can be cached
    >>> split.joint(split.common([np.array([[1, 2]], np.float32)]), rows)
    [array([[3., 4.],
           [0., 8.]], dtype=float32)]
    """

    def __init__(self, network: CompiledNetwork, common: Sequence[int]):
        try:
            parts = _Graph(network.network, frozenset(common)).parts()
            how: dict[str, Any] = {
                "precision": network.precision,
                "thread_num": network.thread_num,
                "config": network.final_config,
            }
            classes = (ShapedNetwork, CompiledNetwork, ShapedNetwork)
            made = [
                cls(part, network.device, **how)
                for cls, part in zip(classes, parts.networks, strict=True)
            ]
        except SplitError:
            raise
        except Exception as error:  # OpenVINO raises various errors for invalid graphs
            raise SplitError(f"The network cannot be split: {reason(error)}") from error
        self._common, self._per_row, self._joint = made
        self.width = parts.width

    def common(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the part for the common inputs on one row of these inputs."""
        return self._common.infer(inputs)

    def own(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Run the part for the per-row inputs; return a matrix of shape ``(rows, width)``."""
        return self._per_row.infer(inputs)[0]

    def joint(self, common: Sequence[np.ndarray], own: np.ndarray) -> list[np.ndarray]:
        """Run the joint part, which combines both results, and return the outputs of the network.

        Parameters
        ----------
        common : list of ndarray
            Result of :meth:`common`.
        own : ndarray
            Result of :meth:`own`, or rows of it.
        """
        return self._joint.infer([*common, own])


@dataclass(frozen=True)
class _Parts:
    networks: list[Any]
    width: int


class _Graph:
    """Traversal of a network that builds the common, the per-row and the joint part from it."""

    def __init__(self, network: ov.Model, common: frozenset[int]):
        from openvino import opset13

        self._ops = opset13
        self._network = network
        self._common = common
        self._values: dict[tuple[str, int], _Value] = {}
        self._lifted: dict[tuple[str, int], tuple[int, Any, Any]] = {}
        self._packed = opset13.parameter([-1, -1], np.float32, name="own")
        self._rows: Any = None
        self._factories: dict[str, Any] = {}

    def parts(self) -> _Parts:
        """Return the networks of the common, the per-row and the joint part."""
        network, ops = self._network, self._ops
        inputs: dict[int, list[Any]] = {_COMMON: [], _PER_ROW: []}
        forbidden, unsigned = never_negative(network), list[str]()
        for index, parameter in enumerate(network.get_parameters()):
            shape = parameter.partial_shape
            if shape.rank.is_dynamic or not len(shape):
                raise SplitError("An input of the network has no rows")
            side = _COMMON if index in self._common else _PER_ROW
            rows = openvino.PartialShape([-1, *list(shape)[1:]])
            part_input = ops.parameter(rows, parameter.get_element_type(), name=_name(parameter))
            if port_name(parameter.output(0)) in forbidden:
                unsigned.append(_name(parameter))
            inputs[side].append(part_input)
            self._values[parameter.get_name(), 0] = _Plain(side, part_input.output(0))
        if not all(inputs.values()):
            raise SplitError("The inputs of the network are all common or all per row")
        for node in network.get_ordered_ops():
            if node.get_type_name() not in ("Parameter", "Result"):
                for index, value in enumerate(self._made(node)):
                    self._values[node.get_name(), index] = value
        results = [
            ops.result(self._for_all_rows(self._of(node.input(0))))
            for node in network.get_results()
        ]
        common = [
            (out, joint_input)
            for side, out, joint_input in self._lifted.values()
            if side == _COMMON
        ]
        per_row = [
            (out, joint_input)
            for side, out, joint_input in self._lifted.values()
            if side == _PER_ROW
        ]
        if not common or not per_row:
            raise SplitError(
                "The outputs of the network depend on only the common or only the per-row inputs"
            )
        width, packed = self._pack(per_row)
        first = [ops.result(out) for out, _ in common]
        joint = [*(joint_input.get_node() for _, joint_input in common), self._packed]
        models = [
            openvino.Model(first, inputs[_COMMON], "common"),
            openvino.Model([ops.result(packed)], inputs[_PER_ROW], "own"),
            openvino.Model(results, joint, "joint"),
        ]
        for model in models[:2]:
            forbid_negative(model, unsigned)
        models[2].validate_nodes_and_infer_types()
        for made, names in zip(models[2].outputs, network.outputs, strict=True):
            made.get_tensor().set_names(names.get_names())
        return _Parts(models, width)

    def _pack(self, per_row: list[tuple[Any, Any]]) -> tuple[int, Any]:
        """Pack the per-row results into one matrix, and unpack it in the joint part.

        A single matrix is easy to cache, and its rows can be selected with one call.
        """
        ops, columns, sizes = self._ops, [], []
        for out, _ in per_row:
            shape = _fixed(_sizes(out))
            if shape is None:
                raise SplitError("A part of the network has rows of dynamic size")
            sizes.append(int(np.prod(shape, dtype=np.int64)))
            flat = ops.reshape(out, ops.constant(np.array([-1, sizes[-1]])), False)
            is_float = out.get_element_type() == openvino.Type.f32
            columns.append(flat if is_float else ops.convert(flat, "f32"))
        self._packed.set_partial_shape(openvino.PartialShape([-1, sum(sizes)]))
        cuts = ops.variadic_split(self._packed, 1, ops.constant(np.array(sizes)))
        for index, (out, joint_input) in enumerate(per_row):
            part = self._with_rows(cuts.output(index), _fixed(_sizes(out)) or ())
            if out.get_element_type() != openvino.Type.f32:
                part = ops.convert(part, out.get_element_type().get_type_name()).output(0)
            for each in list(joint_input.get_target_inputs()):
                each.replace_source_output(part)
        return sum(sizes), ops.concat(columns, 1)

    # -- values -----------------------------------------------------------------------------------

    def _of(self, port: ov.Input) -> _Value:
        source = port.get_source_output()
        return self._values[source.get_node().get_name(), source.get_index()]

    def _lift(self, side: int, output: ov.Output) -> ov.Output:
        """Return the joint part's input for a tensor that another part computes."""
        if side in (_CONSTANT, _BOTH):
            return output
        key = output.get_node().get_name(), output.get_index()
        if key not in self._lifted:
            dtype = output.get_element_type()
            if side == _PER_ROW and dtype not in (openvino.Type.f32, openvino.Type.boolean):
                raise SplitError(f"A part of the network returns {dtype.get_type_name()}")
            shape = output.get_partial_shape()
            if shape.rank.is_dynamic or not len(shape):
                raise SplitError("A part of the network returns no rows")
            rows = openvino.Dimension(1 if side == _COMMON else -1)
            joint_input = self._ops.parameter(
                openvino.PartialShape([rows, *list(shape)[1:]]), dtype
            )
            joint_input.set_friendly_name(f"cut{len(self._lifted)}")
            self._lifted[key] = side, output, joint_input.output(0)
        return self._lifted[key][2]

    def _plain(self, value: _Value) -> _Plain:
        """Convert a value to the output of one node: join its pieces, or add its terms."""
        if isinstance(value, _Plain):
            return value
        if isinstance(value, _Sum):
            first, *others = (self._lift(*each) for each in value.terms.items())
            for each in others:
                first = self._ops.add(first, each).output(0)
            return _Plain(_BOTH, first)
        outputs = [self._broadcast(self._lift(side, out)) for side, out, _ in value.pieces]
        joined = self._ops.concat(outputs, value.axis)
        positions = np.concatenate([each for *_, each in value.pieces])
        if not np.array_equal(positions, np.arange(value.size)):
            joined = self._gather(joined.output(0), np.argsort(positions), value.axis)
            return _Plain(_BOTH, joined)
        return _Plain(_BOTH, joined.output(0))

    def _for_all_rows(self, value: _Value) -> ov.Output:
        plain = self._plain(value)
        if plain.side == _CONSTANT:
            raise SplitError("An output of the network is constant")
        return self._broadcast(self._lift(plain.side, plain.output))

    def _broadcast(self, output: ov.Output) -> ov.Output:
        """Repeat a tensor of one row for all rows; return other tensors unchanged."""
        shape = output.get_partial_shape()
        if not shape[0].is_static:
            return output
        ops = self._ops
        if self._rows is None:
            self._rows = ops.gather(ops.shape_of(self._packed), [0], 0)
        ones = ops.constant(np.ones(len(shape) - 1, np.int64))
        target = ops.concat([self._rows, ones], 0) if len(shape) > 1 else self._rows
        return ops.broadcast(output, target, broadcast_spec="BIDIRECTIONAL").output(0)

    def _gather(self, output: ov.Output, positions: np.ndarray, axis: int) -> ov.Output:
        ops = self._ops
        return ops.gather(output, ops.constant(positions.astype(np.int64)), axis).output(0)

    def _clone(self, node: ov.Node, inputs: Sequence[Any]) -> ov.Node:
        """Return a copy of a node with other inputs."""
        version = node.get_type_info().version_id
        if version not in self._factories:
            from openvino.utils.node_factory import NodeFactory

            self._factories[version] = NodeFactory(version)
        factory = self._factories[version]
        return factory.create(node.get_type_name(), list(inputs), node.get_attributes())

    def _joined(self, axis: int, size: int, pieces: list[tuple[int, Any, np.ndarray]]) -> _Value:
        """Join pieces along an axis into one value, after concatenating the pieces of each part."""
        merged = []
        for side in (_CONSTANT, _COMMON, _PER_ROW, _BOTH):
            of_side = [(out, positions) for each, out, positions in pieces if each == side]
            if len(of_side) > 1:
                out = self._ops.concat([out for out, _ in of_side], axis).output(0)
                merged.append((side, out, np.concatenate([positions for _, positions in of_side])))
            elif of_side:
                merged.append((side, *of_side[0]))
        if len(merged) > 1:
            return _Pieces(axis, size, merged)
        side, out, positions = merged[0]
        if not np.array_equal(positions, np.arange(size)):
            out = self._gather(out, np.argsort(positions), axis)
        return _Plain(side, out)

    def _summed(self, terms: Sequence[tuple[int, Any]]) -> _Value:
        total: dict[int, Any] = {}
        for side, out in terms:
            total[side] = self._ops.add(total[side], out).output(0) if side in total else out
        if _CONSTANT in total and len(total) > 1:
            constant = total.pop(_CONSTANT)
            side = min(total)  # the common part, if there is one
            total[side] = self._ops.add(total[side], constant).output(0)
        if len(total) == 1:
            return _Plain(*total.popitem())
        return _Sum(total)

    # -- operations -------------------------------------------------------------------------------

    def _made(self, node: ov.Node) -> list[_Value]:
        """Add a node to the parts that compute it, and return the values of its outputs."""
        values = [self._of(port) for port in node.inputs()]
        if not values:
            return [_Plain(_CONSTANT, out) for out in node.outputs()]
        sides = {each.side for each in values if isinstance(each, _Plain)}
        is_mixed = any(not isinstance(each, _Plain) for each in values)
        if not is_mixed and len(sides - {_CONSTANT}) < 2:
            return self._cloned(node, [self._plain(each) for each in values])
        op_type = node.get_type_name()
        value = None
        if op_type in ("Add", "Subtract"):
            value = self._added(node, values)
        if value is None and op_type in ("Multiply", "Divide"):
            value = self._scaled(node, values)
        if value is None and op_type in _ELEMENTWISE:
            value = self._elementwise(node, values)
        if value is None and op_type in _RULES:
            value = _RULES[op_type](self, node, values)
        if isinstance(value, list):
            return value
        return [value] if value is not None else self._cloned(node, map(self._plain, values))

    def _cloned(self, node: ov.Node, values: Iterable[_Plain]) -> list[_Value]:
        values = list(values)
        side = 0
        for each in values:
            side |= each.side
        outputs = [each.output for each in values]
        if side == _BOTH:
            outputs = [self._lift(each.side, each.output) for each in values]
            if node.get_type_name() not in (*_ELEMENTWISE, "MatMul"):
                outputs = [
                    self._broadcast(out) if each.side == _COMMON else out
                    for each, out in zip(values, outputs, strict=True)
                ]
        return [_Plain(side, out) for out in self._clone(node, outputs).outputs()]

    def _added(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        """Add or subtract two values with one sum per part, or return None if impossible."""
        if any(isinstance(each, _Pieces) for each in values):
            return None
        rank = _rank(node)
        terms: list[tuple[int, Any]] = []
        for index, value in enumerate(values):
            value_terms = (
                [(value.side, value.output)]
                if isinstance(value, _Plain)
                else [
                    *value.terms.items()  # type: ignore[union-attr]
                ]
            )
            for side, out in value_terms:
                if side != _CONSTANT and len(out.get_partial_shape()) != rank:
                    return None
                if index and node.get_type_name() == "Subtract":
                    minus = np.array(-1, out.get_element_type().to_dtype())
                    out = self._ops.multiply(out, self._ops.constant(minus)).output(0)
                terms.append((side, out))
        return self._summed(terms)

    def _scaled(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        """Multiply each term of a sum by a constant, or return None for other operands."""
        for index, other in ((0, 1), (1, 0)):
            value, factor = values[index], values[other]
            if not (isinstance(value, _Sum) and isinstance(factor, _Plain) and not factor.side):
                continue
            if index and node.get_type_name() == "Divide":
                continue
            terms = []
            for side, out in value.terms.items():
                inputs = [out, factor.output] if not index else [factor.output, out]
                terms.append((side, self._clone(node, inputs).output(0)))
            return self._summed(terms)
        return None

    def _elementwise(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        """Apply an elementwise operation to each piece of its operands, or return None."""
        values = [self._plain(each) if isinstance(each, _Sum) else each for each in values]
        pieces = [each for each in values if isinstance(each, _Pieces)]
        rank = _rank(node)
        if not pieces or any(_rank_of(each) != rank for each in pieces):
            return None
        axis, size = pieces[0].axis, pieces[0].size
        if any((each.axis, each.size) != (axis, size) for each in pieces):
            return None
        label = np.zeros(size, np.int64)  # equal labels: positions in the same pieces
        for each in pieces:
            for number, (_, _, positions) in enumerate(each.pieces):
                label[positions] += number
            label *= 8
        made = []
        for number in np.unique(label):
            positions = np.flatnonzero(label == number)
            cuts = [self._cut(each, axis, size, positions, rank) for each in values]
            (value,) = self._cloned(node, cuts)
            made.append((value.side, value.output, positions))  # type: ignore[union-attr]
        return self._joined(axis, size, made)

    def _cut(self, value: _Value, axis: int, size: int, positions: np.ndarray, rank: int) -> _Plain:
        """Select positions along an axis of an operand, unless the operand is broadcast on it."""
        if isinstance(value, _Pieces):
            for side, out, piece in value.pieces:
                if np.isin(positions, piece).all():
                    if np.array_equal(piece, positions):
                        return _Plain(side, out)
                    order = np.argsort(piece)
                    indices = order[np.searchsorted(piece[order], positions)]
                    return _Plain(side, self._gather(out, indices, axis))
        assert isinstance(value, _Plain)
        shape = _sizes(value.output)
        at = axis - (rank - len(shape))
        if at < 0 or shape[at] == 1:
            return value
        if shape[at] != size:
            raise SplitError("The size of an operand does not match the columns")
        return _Plain(value.side, self._gather(value.output, positions, at))

    def _each_part(self, value: _Value, function: Callable[[Any], Any]) -> dict[int, Any] | None:
        """Apply a linear function to each term of a sum; return None for other values."""
        if not isinstance(value, _Sum):
            return None
        return {side: function(out) for side, out in value.terms.items()}

    def _concat(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        axis = node.get_axis()
        rank = _rank(node)
        axis += rank if axis < 0 else 0
        begin, pieces = 0, []
        for port, value in zip(node.inputs(), values, strict=True):
            size = _length(port.get_partial_shape()[axis])
            if size is None or not axis:
                return None
            if isinstance(value, _Pieces) and value.axis == axis:
                pieces += [(side, out, begin + positions) for side, out, positions in value.pieces]
            else:
                plain = self._plain(value)
                if plain.side == _CONSTANT:
                    return None
                pieces.append((plain.side, plain.output, begin + np.arange(size)))
            begin += size
        return self._joined(axis, begin, pieces)

    def _gathered(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        data, indices, at = values
        axes = _constant(at)
        if axes is None or node.get_attributes().get("batch_dims"):
            return None
        axis = int(axes.ravel()[0])
        if isinstance(indices, _Pieces):  # a table lookup
            if not (isinstance(data, _Plain) and data.side == _CONSTANT and axis == 0):
                return None
            pieces = [
                (side, self._clone(node, [data.output, out, at.output]).output(0), positions)  # type: ignore[union-attr]
                for side, out, positions in indices.pieces
            ]
            return self._joined(indices.axis, indices.size, pieces)
        chosen = _constant(indices)
        rank = len(node.input(0).get_partial_shape())
        axis += rank if axis < 0 else 0
        if chosen is None or not axis:
            return None
        if isinstance(data, _Sum):
            terms = [
                (side, self._clone(node, [out, indices.output, at.output]).output(0))  # type: ignore[union-attr]
                for side, out in data.terms.items()
            ]
            return self._summed(terms) if _are_even(node, data) else None
        if not isinstance(data, _Pieces) or data.axis != axis or chosen.ndim > 1:
            return None
        selected = np.where(chosen < 0, chosen + data.size, chosen).ravel()
        value = self._chosen(data, selected)
        return self._reshaped_value(value, node) if chosen.ndim == 0 else value

    def _chosen(self, data: _Pieces, selected: np.ndarray) -> _Value:
        """Select positions of a value along the axis on which it is cut into pieces."""
        pieces = []
        for side, out, positions in data.pieces:
            to = np.flatnonzero(np.isin(selected, positions))
            if len(to):
                order = np.argsort(positions)
                at = order[np.searchsorted(positions[order], selected[to])]
                pieces.append((side, self._gather(out, at, data.axis), to))
        return self._joined(data.axis, len(selected), pieces)

    def _split(self, node: ov.Node, values: list[_Value]) -> list[_Value] | None:
        data, axis = values[0], _constant(values[1])
        if not isinstance(data, _Pieces) or axis is None:
            return None
        rank = len(node.input(0).get_partial_shape())
        at = int(axis.ravel()[0])
        at += rank if at < 0 else 0
        parts, end = [], 0
        for out in node.outputs():
            size = _sizes(out)[at]
            if at != data.axis or size is None:
                return None
            parts.append(self._chosen(data, np.arange(end, end + size)))
            end += size
        return parts

    def _reduced(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        data, axes = values[0], _constant(values[1])
        op_type = node.get_type_name()
        if axes is None or isinstance(data, _Plain):
            return None
        rank = len(node.input(0).get_partial_shape())
        at = sorted(int(each) + (rank if each < 0 else 0) for each in axes.ravel())
        if 0 in at:
            return None
        inputs = values[1].output  # type: ignore[union-attr]
        if isinstance(data, _Sum):
            if op_type not in ("ReduceSum", "ReduceMean") or not _are_even(node, data):
                return None
            made = self._each_part(data, lambda out: self._clone(node, [out, inputs]).output(0))
            return self._summed(list(made.items()))  # type: ignore[union-attr]
        keeps = node.get_attributes()["keep_dims"]
        if data.axis not in at:
            axis = data.axis if keeps else data.axis - sum(each < data.axis for each in at)
            pieces = [
                (side, self._clone(node, [out, inputs]).output(0), positions)
                for side, out, positions in data.pieces
            ]
            return self._joined(axis, data.size, pieces)
        parts = []
        for side, out, positions in data.pieces:
            part = self._clone(node, [out, inputs]).output(0)
            if op_type == "ReduceMean":
                share = np.array(len(positions) / data.size, part.get_element_type().to_dtype())
                part = self._ops.multiply(part, self._ops.constant(share)).output(0)
            parts.append((side, part))
        if op_type in ("ReduceSum", "ReduceMean"):
            return self._summed(parts)
        total = self._lift(*parts[0])
        for each in parts[1:]:
            other = self._lift(*each)
            join = getattr(self._ops, _REDUCTIONS[op_type].lower())
            total = join(total, other).output(0)
        return _Plain(_BOTH, total)

    def _reshaped(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        return self._reshaped_value(values[0], node)

    def _reshaped_value(self, value: _Value, node: ov.Node) -> _Value | None:
        """Reshape each row of a value to a node's output shape, or return None if impossible."""
        after = _fixed(_sizes(node.output(0)))
        if after is None:
            return None
        if isinstance(value, _Plain):
            return _Plain(value.side, self._with_rows(value.output, after))
        if isinstance(value, _Sum):
            if not _are_even(node, value):
                return None
            return self._summed(
                [(side, self._with_rows(out, after)) for side, out in value.terms.items()]
            )
        before = _fixed(_sizes_of(value))
        if before is None or np.prod(before) > _MOST_VALUES:
            return None
        numbers = np.arange(np.prod(before, dtype=np.int64)).reshape(before)
        label = np.zeros(before, np.int64)
        for number, (_, _, positions) in enumerate(value.pieces):
            label[(slice(None),) * (value.axis - 1) + (positions,)] = number
        if numbers.size != np.prod(after):
            return None
        numbers_after, label_after = numbers.reshape(after), label.reshape(after)
        for axis, size in enumerate(after):
            line = np.moveaxis(label_after, axis, 0).reshape(size, -1)
            if not (line == line[:, :1]).all():
                continue
            pieces = []
            for number, (side, out, positions) in enumerate(value.pieces):
                to = np.flatnonzero(line[:, 0] == number)
                shape = [*after[:axis], len(to), *after[axis + 1 :]]
                moved = numbers.take(positions, value.axis - 1).reshape(shape)
                if not np.array_equal(moved, numbers_after.take(to, axis)):
                    break
                pieces.append((side, self._with_rows(out, shape), to))
            else:
                return self._joined(axis + 1, size, pieces)
        return None

    def _with_rows(self, output: ov.Output, shape: Sequence[int]) -> ov.Output:
        target = self._ops.constant(np.array([-1, *shape], np.int64))
        return self._ops.reshape(output, target, False).output(0)

    def _transposed(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        data, order = values[0], _constant(values[1])
        if not isinstance(data, _Pieces) or order is None or order.ravel()[0] != 0:
            return None
        axis = int(np.flatnonzero(order.ravel() == data.axis)[0])
        pieces = [
            (side, self._clone(node, [out, values[1].output]).output(0), positions)  # type: ignore[union-attr]
            for side, out, positions in data.pieces
        ]
        return self._joined(axis, data.size, pieces)

    def _multiplied(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        """Multiply a value by a constant matrix piece by piece, or return None if impossible."""
        data, matrix = values
        how = node.get_attributes()
        if how["transpose_a"] or not (isinstance(matrix, _Plain) and matrix.side == _CONSTANT):
            return None
        rank = len(node.input(0).get_partial_shape())
        shape = _sizes(matrix.output)
        if rank < 2 or len(shape) > 2:
            return None
        if isinstance(data, _Sum):
            return (
                self._summed(
                    [
                        (side, self._clone(node, [out, matrix.output]).output(0))
                        for side, out in data.terms.items()
                    ]
                )
                if _are_even(node, data)
                else None
            )
        if not isinstance(data, _Pieces):
            return None
        if data.axis < rank - 1:
            pieces = [
                (side, self._clone(node, [out, matrix.output]).output(0), positions)
                for side, out, positions in data.pieces
            ]
            return self._joined(data.axis, data.size, pieces)
        at = len(shape) - 1 if len(shape) == 1 or how["transpose_b"] else 0
        terms = []
        for side, out, positions in data.pieces:
            part = self._gather(matrix.output, positions, at)
            terms.append((side, self._clone(node, [out, part]).output(0)))
        return self._summed(terms)

    def _shape(self, node: ov.Node, values: list[_Value]) -> _Value | None:
        """Return the result of a ShapeOf node without computing its input, or None."""
        sizes = _sizes(node.input(0))
        if None in sizes[1:] or sizes[0] is not None:
            return None
        ops = self._ops
        if self._rows is None:
            self._rows = ops.gather(ops.shape_of(self._packed), [0], 0)
        rows = ops.concat([self._rows, ops.constant(np.array(sizes[1:], np.int64))], 0)
        if node.output(0).get_element_type() != openvino.Type.i64:
            rows = ops.convert(rows, node.output(0).get_element_type().get_type_name())
        return _Plain(_BOTH, rows.output(0))


_RULES: dict[str, Callable[[_Graph, Any, list[_Value]], Any]] = {
    "Concat": _Graph._concat,
    "Gather": _Graph._gathered,
    "Split": _Graph._split,
    "VariadicSplit": _Graph._split,
    "Transpose": _Graph._transposed,
    "MatMul": _Graph._multiplied,
    "ShapeOf": _Graph._shape,
    **dict.fromkeys(("ReduceSum", "ReduceMean", *_REDUCTIONS), _Graph._reduced),
    **dict.fromkeys(_RESHAPES, _Graph._reshaped),
}


def _name(parameter: ov.Node) -> str:
    return parameter.get_friendly_name()


def _length(dimension: ov.Dimension) -> int | None:
    return dimension.get_length() if dimension.is_static else None


def _sizes(port: ov.Output | ov.Input) -> list[int | None]:
    """Return the sizes of an output's dimensions, with None for dynamic dimensions."""
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        raise SplitError("A value of the network may have any number of axes")
    return [_length(each) for each in shape]


def _fixed(sizes: list[int | None]) -> list[int] | None:
    """Return the dimensions of one row, or None if the batch is fixed or a size is dynamic."""
    row = [each for each in sizes[1:] if each is not None]
    return row if sizes and sizes[0] is None and len(row) == len(sizes) - 1 else None


def _sizes_of(value: _Pieces) -> list[int | None]:
    sizes = _sizes(value.pieces[0][1])
    sizes[0] = None
    sizes[value.axis] = value.size
    return sizes


def _rank(node: ov.Node) -> int:
    return len(_sizes(node.output(0)))


def _rank_of(value: _Pieces) -> int:
    return len(value.pieces[0][1].get_partial_shape())


def _are_even(node: ov.Node, value: _Sum) -> bool:
    """Return True if every term has the sum's row shape, so that no term needs broadcasting."""
    expected = _sizes(node.input(0))[1:]
    return None not in expected and all(_sizes(out)[1:] == expected for out in value.terms.values())


def _constant(value: _Value) -> np.ndarray | None:
    """Return the array of a constant node, or None for other values."""
    if not isinstance(value, _Plain) or value.side != _CONSTANT:
        return None
    node = value.output.get_node()
    return node.get_data() if node.get_type_name() == "Constant" else None
