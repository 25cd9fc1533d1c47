"""What a Keras model is called with and what it returns, as flat lists.

A network of another runtime takes and gives flat lists of arrays. :class:`CallInputs` knows how
the arguments of a call are nested, :class:`CallOutputs` the results.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.structure import Structure, flatten, is_tensor

__all__ = ["CallInputs", "CallOutputs", "Port", "as_array", "plain"]

_OF_KERAS = ("training", "mask")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Port:
    """One tensor of a call.

    Attributes
    ----------
    name : str
    shape : tuple of int or None
        None where it is not fixed; the first dimension is the batch.
    dtype : str
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class CallInputs:
    """The arguments of a model's calls.

    Attributes
    ----------
    parameters : tuple of str
        Of ``call``, as many as there are arguments.
    structures : tuple of Structure
        How each argument is nested.
    ports : tuple of Port
        The tensors in the order of the structures.
    """

    parameters: tuple[str, ...]
    structures: tuple[Structure, ...]
    ports: tuple[Port, ...]

    @classmethod
    def of_specs(cls, model: Any, arguments: Sequence[Any]) -> CallInputs:
        """Inputs that are described by specs, one nest of them for each argument.

        Parameters
        ----------
        model : keras.Model
        arguments : sequence
            Nests of whatever has a shape and a dtype: ``tf.TensorSpec``, ``keras.KerasTensor``,
            ``keras.InputSpec``, tensors, ndarrays. The first dimension counts as the batch.
        """
        parameters = tuple(_parameters(model)[: len(arguments)])
        if len(parameters) < len(arguments):
            raise UsageError(
                f"{type(model).__name__}.call takes {len(parameters)} inputs, but {len(arguments)} "
                "were given"
            )
        specs, structures = [], []
        for argument in arguments:
            found, structure = flatten(_standing_in(argument))
            specs += [stand_in.spec for stand_in in found]
            structures.append(structure)
        names = [path for s, p in zip(structures, parameters, strict=True) for path in s.paths(p)]
        return cls(parameters, tuple(structures), tuple(map(_port, specs, _unique(specs, names))))

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return [port.name for port in self.ports]

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list:
        """The tensors of a call in the order of :attr:`ports`.

        The first parameter is as forgiving as Keras is: names in place of a list, a list of one
        in place of a tensor, nested Python numbers.

        Raises
        ------
        UsageError
            If an argument is missing, given twice, unknown or nested in another way.
        """
        values = self._by_parameter(args, dict(kwargs or {}))
        leaves: list = []
        for name, structure, value in zip(self.parameters, self.structures, values, strict=True):
            structure.take(self._brought_to(structure, value), name, leaves)
        return leaves

    def arrays(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list:
        """:meth:`flatten` as ndarrays of the ports' types and ranks."""
        leaves = self.flatten(args, kwargs)
        return [as_array(leaf, port) for leaf, port in zip(leaves, self.ports, strict=True)]

    def pack(self, leaves: Sequence[Any]) -> list:
        """The positional arguments of a call from its tensors."""
        rest = iter(leaves)
        return [structure.rebuild(rest) for structure in self.structures]

    def to_json(self) -> dict:
        """As JSON."""
        return {
            "parameters": list(self.parameters),
            "structures": [structure.to_json() for structure in self.structures],
            "ports": [[port.name, list(port.shape), port.dtype] for port in self.ports],
        }

    @classmethod
    def from_json(cls, data: Mapping) -> CallInputs:
        """Read what :meth:`to_json` wrote."""
        return cls(
            tuple(data["parameters"]),
            tuple(map(Structure.from_json, data["structures"])),
            tuple(Port(name, tuple(shape), dtype) for name, shape, dtype in data["ports"]),
        )

    def _by_parameter(self, args: Sequence[Any], kwargs: dict) -> list:
        if len(args) > len(self.parameters):
            raise UsageError(
                f"The model takes {len(self.parameters)} arguments "
                f"({', '.join(self.parameters)}), but {len(args)} were given"
            )
        for name in kwargs:
            if name not in self.parameters:
                raise UsageError(
                    f"The model has no argument {name!r}; it takes {', '.join(self.parameters)}"
                )
            if name in self.parameters[: len(args)]:
                # The spelling of this text is the old interface's.
                raise UsageError(
                    f"You shouldn't pass arguement {name} as it has been passed as a positional "
                    "arguement."
                )
        missing = [name for name in self.parameters[len(args) :] if name not in kwargs]
        if missing:
            raise UsageError(f"The model's argument {missing[0]!r} is missing")
        return [*args, *(kwargs[name] for name in self.parameters[len(args) :])]

    def _brought_to(self, structure: Structure, value: Any) -> Any:
        """A value in the form of a structure, where Keras would take it too."""
        single = structure.kind == "tensor"
        if isinstance(value, Mapping) and len(self.parameters) == 1 and structure.kind != "dict":
            if set(self.names) <= set(value):
                listed = [value[name] for name in self.names]
                return listed[0] if single else listed
        elif single and isinstance(value, (list, tuple)):
            one = len(value) == 1 and (is_tensor(value[0]) or isinstance(value[0], (list, tuple)))
            return value[0] if one and is_tensor(value[0]) else np.asarray(value)
        elif not single and len(structure.children) == 1 and is_tensor(value):
            return [value] if structure.kind != "dict" else {structure.keys[0]: value}
        elif structure.kind == "dict" and isinstance(value, (list, tuple)):
            return dict(zip(structure.keys, value, strict=False))
        return value


@dataclasses.dataclass(frozen=True)
class CallOutputs:
    """The results of a model's calls.

    Attributes
    ----------
    structure : Structure
    ports : tuple of Port
    """

    structure: Structure
    ports: tuple[Port, ...]

    def to_json(self) -> dict:
        """As JSON."""
        return {
            "structure": self.structure.to_json(),
            "ports": [[port.name, list(port.shape), port.dtype] for port in self.ports],
        }

    @classmethod
    def from_json(cls, data: Mapping) -> CallOutputs:
        """Read what :meth:`to_json` wrote."""
        return cls(
            Structure.from_json(data["structure"]),
            tuple(Port(name, tuple(shape), dtype) for name, shape, dtype in data["ports"]),
        )


def as_array(value: Any, port: Port | None = None) -> np.ndarray:
    """A tensor as an ndarray, without a copy where that is possible; of a port's type and rank."""
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if port is None or port.dtype == "string":
        return array
    if str(array.dtype) != port.dtype:
        array = array.astype(_numpy_type(port.dtype))
    elif array.dtype.name == "bfloat16":  # which runtimes do not take from numpy
        array = array.astype(np.float32)
    rank = len(port.shape)
    if array.ndim == rank - 1 and port.shape[-1] == 1:
        return array[..., None]
    if array.ndim == rank + 1 and array.shape[-1] == 1:
        return array[..., 0]
    return array


def plain(value: Any) -> Any:
    """Nested tensors with builtin containers, as Keras wraps those that are attributes."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value] if isinstance(value, list) else tuple(map(plain, value))
    return value


def _numpy_type(name: str) -> np.dtype:
    return np.dtype(np.float32 if name == "bfloat16" else name)


class _StandIn:
    """Something that counts as a tensor, in the place of a spec."""

    shape = dtype = None

    def __init__(self, spec: Any):
        self.spec = spec

    def __array__(self, *args: Any, **kwargs: Any):
        raise TypeError("a spec has no values")


def _standing_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _standing_in(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_standing_in(each) for each in value]
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise UsageError(
            "input_spec must be a tf.TensorSpec, or a list or dict of them, not "
            f"{type(value).__name__}"
        )
    return _StandIn(value)


def _port(spec: Any, name: str) -> Port:
    dtype = getattr(spec.dtype, "name", None) or str(spec.dtype)
    shape = tuple(None if size is None else int(size) for size in spec.shape)
    return Port(name, (None, *shape[1:]), dtype)


def _unique(specs: list, paths: list[str]) -> list[str]:
    """The specs' own names; those of their places unless all are there and different."""
    own = [getattr(spec, "name", None) for spec in specs]
    return own if all(own) and len(set(own)) == len(own) else [p.replace(".", "_") for p in paths]


def _parameters(model: Any) -> list[str]:
    """Positional parameters of ``call`` that hold inputs."""
    signature = inspect.signature(model.call)
    found = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in _VARIADIC and name not in _OF_KERAS
    ]
    return found or ["inputs"]
