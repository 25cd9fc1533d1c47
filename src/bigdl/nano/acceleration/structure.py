"""Flattening of nested values to lists of tensors, and the reverse.

Networks of other runtimes take and return flat lists. A :class:`Structure` describes the nesting of
a model's arguments and results and can be written as JSON; a :class:`CallSignature` describes its
calls. Tensors may be of any framework; none is imported.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from bigdl.common.errors import UsageError, as_usage_error

BatchT = TypeVar("BatchT")

_SCALARS = (bool, int, float, str, type(None))
# Types of values without tensors.
_PLAIN = (*_SCALARS, complex, bytes, np.generic, enum.Enum, range, slice)


@dataclasses.dataclass(frozen=True)
class Structure:
    """Structure of a nested value: containers, constants and positions of tensors.

    Attributes
    ----------
    node_type : str
        ``"tensor"``, ``"constant"``, ``"dict"``, ``"list"``, ``"tuple"``, ``"namedtuple"``, or
        ``"dataclass"``.
    children : tuple of Structure
    keys : tuple
        Keys or field names of a dict, a named tuple or a dataclass.
    cls : type or str or None
        Class of a container that is not builtin; its name if the structure was read from a file
        and the class is not imported.
    value
        Value of a constant.
    """

    node_type: str
    children: tuple[Structure, ...] = ()
    keys: tuple = ()
    cls: Any = None
    value: Any = None

    def rebuild(self, leaves: Iterable[Any]) -> Any:  # the nest that was flattened
        """Build a nested value from a flat list of tensors.

        Parameters
        ----------
        leaves : iterable
            Tensors in the order of :func:`flatten`.
        """
        leaves = iter(leaves)
        if self.node_type == "tensor":
            return next(leaves)
        if self.node_type == "constant":
            return self.value
        values = [child.rebuild(leaves) for child in self.children]
        if self.node_type in ("list", "tuple"):
            return values if self.node_type == "list" else tuple(values)
        fields = dict(zip(self.keys, values, strict=True))
        if not isinstance(self.cls, type):
            return fields
        return self.cls(**fields) if self.node_type != "dict" else _mapping(self.cls, fields)

    def take(self, value: object, name: str, leaves: list) -> None:
        """Append the tensors of a value with this structure to `leaves`.

        Keys of a dict may be in another order, and a mapping may be of another class.

        Raises
        ------
        UsageError
            If the value is nested differently, or one of its constants differs.
        """
        if self.node_type == "tensor":
            if not is_tensor(value):
                raise UsageError(
                    f"{name!r} was a tensor when the model was converted, but {value!r} was given; "
                    "give a tensor, or convert the model again with a sample like this",
                    code="model-input",
                    argument=name,
                )
            leaves.append(value)
        elif self.node_type == "constant":
            if is_tensor(value) or value != self.value:
                raise UsageError(
                    f"{name!r} was fixed at {self.value!r} when the model was converted, but "
                    f"{_short(value)} was given; convert the model again with a sample that has it",
                    code="model-input",
                    argument=name,
                )
        else:
            for key, part, child in zip(
                self.labels(), self._parts(value, name), self.children, strict=True
            ):
                child.take(part, f"{name}.{key}", leaves)

    def labels(self) -> Iterable[Any]:
        """Return the key or index of each child."""
        return self.keys or range(len(self.children))

    def _parts(self, value, name) -> list:
        if self.node_type == "dict" and isinstance(value, Mapping):
            if set(value) == set(self.keys):
                return [value[key] for key in self.keys]
        elif self.node_type == "dataclass" and all(hasattr(value, key) for key in self.keys):
            return [getattr(value, key) for key in self.keys]
        elif isinstance(value, (list, tuple)) and len(value) == len(self.children):
            return list(value)
        expected = ", ".join(map(str, self.keys)) or f"{len(self.children)} values"
        raise UsageError(
            f"{name!r} was a {self.node_type} of {expected} when the model was converted, but "
            f"{_short(value)} was given; give it in the same form",
            code="model-input",
            argument=name,
        )

    def paths(self, prefix: str) -> list[str]:
        """Return a name for each tensor, e.g. ``x``, ``batch.ids``, ``args.0``."""
        if self.node_type == "tensor":
            return [prefix]
        return [
            name
            for key, child in zip(self.labels(), self.children, strict=True)
            for name in child.paths(f"{prefix}.{key}" if prefix else str(key))
        ]

    def constants(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each constant."""
        if self.node_type == "constant":
            yield prefix, self.value
        for key, child in zip(self.labels(), self.children, strict=True):
            yield from child.constants(f"{prefix}.{key}" if prefix else str(key))

    def to_json(self) -> dict:
        """Return the structure as a JSON-serializable dict."""
        for each in (self.value, *self.keys):
            if not isinstance(each, _SCALARS):
                raise UsageError(
                    f"The model has the constant {each!r} of type {type(each).__name__} among its "
                    "inputs or outputs, which cannot be saved; only None, bool, int, float and "
                    "str can",
                    code="model-unsupported",
                )
        cls = self.cls
        return {
            "kind": self.node_type,
            "children": [child.to_json() for child in self.children],
            "keys": list(self.keys),
            "class": f"{cls.__module__}:{cls.__qualname__}" if isinstance(cls, type) else cls,
            "value": self.value,
        }

    @classmethod
    def from_json(cls, data: dict) -> Structure:
        """Build a Structure from the output of :meth:`to_json`.

        A container becomes a dict if the module of its class is not imported.
        """
        return cls(
            node_type=data["kind"],
            children=tuple(map(cls.from_json, data["children"])),
            keys=tuple(data["keys"]),
            cls=_find_class(data["class"], data["kind"]) if data["class"] else None,
            value=data["value"],
        )


TENSOR = Structure("tensor")


def flatten(value: object, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list, Structure]:
    """Flatten a nested value to a list of tensors and its structure.

    Parameters
    ----------
    value
        Tensors and ndarrays in dicts, lists, tuples, named tuples, dataclasses and subclasses of
        ``Mapping``. Anything else is a constant.
    is_leaf : callable, optional
        Returns True for values to treat as tensors; :func:`is_tensor` by default.

    Returns
    -------
    leaves : list of Tensor or ndarray
    structure : Structure
    """
    leaves: list = []
    return leaves, _describe(value, leaves, is_leaf or is_tensor)


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """Signature of a network's calls: maps arguments to a flat list of inputs.

    Values other than tensors became constants when the network was built: calls with another value
    raise an error.

    Attributes
    ----------
    parameters : tuple of str
        Names of the named parameters, in order.
    structures : dict of str to Structure
        Structure of each argument; ``*args`` is a tuple, ``**kwargs`` a dict.
    keyword_only : frozenset of str
        Names of keyword-only parameters.
    star, double_star : str or None
        Names of the ``*args`` and ``**kwargs`` parameters, if any.
    """

    parameters: tuple[str, ...]
    structures: dict[str, Structure]
    keyword_only: frozenset[str] = frozenset()
    star: str | None = None
    double_star: str | None = None

    tensor_types: ClassVar[tuple[type, ...]] = (np.ndarray,)
    """Types that are recognized as tensors without further checks."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the network's inputs in the order of the flat list."""
        return tuple(
            n for name, structure in self.structures.items() for n in structure.paths(name)
        )

    @cached_property
    def _fast(self) -> int | None:
        """Number of arguments of calls that need no flattening, or None if all calls need it."""
        plain = [self.structures[name].node_type == "tensor" for name in self.parameters]
        fixed = plain.index(False) if False in plain else len(plain)
        return fixed if fixed == len(self.names) and not self.keyword_only else None

    def flatten(self, args: tuple, kwargs: Mapping) -> list:
        """Flatten the arguments of a call to a list of tensors.

        Raises
        ------
        UsageError
            If an argument is given twice, unknown or missing, is nested differently than in the
            sample, or differs from the constant in the network.
        """
        if (
            len(args) == self._fast
            and not kwargs
            and all(isinstance(value, self.tensor_types) for value in args)
        ):
            return list(args)
        leaves: list = []
        for name, value in self._bind(args, kwargs).items():
            self.structures[name].take(value, name, leaves)
        return leaves

    def unflatten(self, leaves: Iterable[Any]) -> tuple[tuple, dict]:
        """Build the arguments of a call from the flat list of tensors."""
        leaves = iter(leaves)
        values: dict[str | None, Any] = {
            name: structure.rebuild(leaves) for name, structure in self.structures.items()
        }
        names = [name for name in self.parameters if name not in self.keyword_only]
        if not values.get(self.star):
            # arguments after the last tensor by name: decorators may fill them in
            held = [index for index, name in enumerate(names) if self.structures[name].paths(name)]
            names = names[: max(held, default=-1) + 1]
        args = [values[name] for name in names]
        kwargs = {name: values[name] for name in self.parameters if name not in names}
        return (*args, *values.get(self.star, ())), kwargs | values.get(self.double_star, {})

    def _bind(self, args: Sequence[object], kwargs: Mapping) -> dict[str, Any]:
        """Bind call arguments to parameters; missing constants keep the sample's value."""
        positional = [name for name in self.parameters if name not in self.keyword_only]
        if len(args) > len(positional) and self.star is None:
            raise UsageError(
                f"The model takes {len(positional)} positional arguments "
                f"({', '.join(positional)}), but {len(args)} were given",
                code="model-input",
            )
        bound = dict(zip(positional, args, strict=False))
        rest = {}
        for name, value in kwargs.items():
            if name in bound:
                # The misspelling is BigDL 2.x's.
                raise UsageError(
                    f"You shouldn't pass arguement {name} as it has been passed as a positional "
                    "arguement.",
                    code="argument-conflict",
                    argument=name,
                )
            if name in self.parameters:
                bound[name] = value
            elif self.double_star is not None:
                rest[name] = value
            else:
                raise UsageError(
                    f"The model has no argument {name!r}; it takes {', '.join(self.parameters)}",
                    code="argument-unknown",
                    argument=name,
                    allowed=list(self.parameters),
                )
        if self.star is not None:
            bound[self.star] = tuple(args[len(positional) :])
        if self.double_star is not None:
            bound[self.double_star] = rest
        values = {}
        for name, structure in self.structures.items():
            if name in bound:
                values[name] = bound[name]
            elif not structure.paths(name):
                values[name] = structure.rebuild(())
            else:
                raise UsageError(
                    f"The model's argument {name!r} is missing; it was a tensor",
                    code="argument-missing",
                    argument=name,
                )
        return values

    def to_json(self) -> dict:
        """Return the signature as a JSON-serializable dict."""
        return {
            "parameters": list(self.parameters),
            "structures": {name: s.to_json() for name, s in self.structures.items()},
            "keyword_only": sorted(self.keyword_only),
            "star": self.star,
            "double_star": self.double_star,
        }

    @classmethod
    def from_json(cls, data: Mapping, **others: Any) -> Self:  # others: fields
        """Build a CallSignature from the output of :meth:`to_json`."""
        return cls(
            tuple(data["parameters"]),
            {name: Structure.from_json(s) for name, s in data["structures"].items()},
            frozenset(data["keyword_only"]),
            data["star"],
            data["double_star"],
            **others,
        )


def refuse_objects(structure: Structure, who: str) -> None:
    """Raise UsageError if a nested value contains objects other than tensors and plain constants.

    An object may hold tensors of the sample, which would become constants.

    Parameters
    ----------
    structure : Structure
    who : str
        Start of the sentence, e.g. ``"Net returns"``.

    Raises
    ------
    UsageError
        Names the class of the object and its path.
    """
    for path, value in structure.constants(""):
        if not isinstance(value, _PLAIN):
            class_name = f"{type(value).__module__}.{type(value).__qualname__}"
            where = f" at {path!r}" if path else ""
            raise UsageError(
                f"{who} an object of the class {class_name}{where}, which would become a constant; "
                "use tensors in tuples, lists, dicts or dataclasses instead, or leave it out "
                "(use_cache=False for a cache of transformers, which decoders keep in OpenVINO and "
                "ONNX Runtime)",
                code="model-unsupported",
            )


def is_tensor(value: object) -> bool:
    """Return True if a value is an ndarray or a tensor of any framework."""
    cls = type(value)
    return isinstance(value, np.ndarray) or (
        hasattr(cls, "__array__")
        and hasattr(cls, "dtype")
        and hasattr(cls, "shape")
        and not isinstance(value, np.generic)
    )


class ModelBatch(NamedTuple):
    """Arguments of one model call, with targets.

    Attributes
    ----------
    args, kwargs
        The model's arguments.
    targets : tuple
        Targets of the batch.
    """

    args: tuple
    kwargs: dict
    targets: tuple = ()


def rows_of(batch: object) -> int:
    """Return the number of rows of a batch (length of its first tensor), or 1 if it has none."""
    leaves, _ = flatten(batch)
    return len(leaves[0]) if leaves and leaves[0].ndim else 1


def read(data: Iterable[BatchT], name: str = "The data") -> Iterator[BatchT]:
    """Yield the elements of the user's data; raise UsageError if an element cannot be read.

    Raises
    ------
    UsageError
        If an element cannot be read. The message names the data, not the model.
    """
    advice = "; make sure that it can be iterated over without the model"
    with as_usage_error(f"{name} cannot be read", advice, code="data-type"):
        elements = iter(data)
    end = object()
    while True:
        with as_usage_error(f"{name} cannot be read", advice, code="data-type"):
            element: Any = next(elements, end)
        if element is end:
            return
        yield element


def first_batches(
    batches: Iterable[BatchT],
    rows: int,
    least: int = 1,
    empty: str = "The calibration data hold no batch; give at least one",
) -> Iterator[BatchT]:
    """Yield batches until at least `rows` rows and at least `least` batches have been yielded.

    Parameters
    ----------
    batches : iterable
        Nested tensors.
    rows : int
        Minimum total number of rows.
    least : int
        Minimum number of batches.
    empty : str
        Error message if there are no rows.

    Raises
    ------
    UsageError
        If there are no rows.
    """
    held = 0
    for number, batch in enumerate(batches, start=1):
        yield batch
        held += rows_of(batch)
        if held >= rows and number >= least:
            return
    if not held:
        raise UsageError(empty, code="data-empty")


def as_array(value: Any) -> Any:  # other values are returned as they are
    """Convert a PyTorch tensor to an ndarray, bfloat16 to float32; pass other values through."""
    if not hasattr(value, "detach"):
        return value
    try:
        return value.numpy()  # works for most tensors and is ten times as fast
    except (RuntimeError, TypeError):  # with a gradient, on another device, of bfloat16
        tensor = value.detach().cpu()
        return tensor.float().numpy() if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()


def cast_array(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Cast an array to another dtype; raise UsageError if integers overflow.

    Raises
    ------
    UsageError
        If an integer does not fit the dtype. The message names the input.
    """
    if array.dtype.kind in "iu" and dtype.kind in "iu" and array.size:
        limits, low, high = np.iinfo(dtype), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise UsageError(
                f"Input {name!r} is of {dtype}, which cannot hold "
                f"{high if high > limits.max else low}; give integers from {limits.min} to "
                f"{limits.max}",
                code="data-value",
                argument=name,
            )
    return array.astype(dtype)


def _describe(value: object, leaves: list, is_leaf: Callable[[Any], bool]) -> Structure:
    keys: tuple = ()
    if is_leaf(value):
        leaves.append(value)
        return TENSOR
    if isinstance(value, Mapping):
        keys, container = tuple(value), "dict"
        children = [value[key] for key in keys]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        keys, container, children = tuple(value._fields), "namedtuple", list(value)
    elif isinstance(value, (list, tuple)):
        container, children = "list" if isinstance(value, list) else "tuple", list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys, container = tuple(field.name for field in dataclasses.fields(value)), "dataclass"
        children = [getattr(value, key) for key in keys]
    else:
        return Structure("constant", value=value)
    builtin = type(value) in (dict, list, tuple)
    described = tuple(_describe(child, leaves, is_leaf) for child in children)
    return Structure(container, described, keys, None if builtin else type(value))


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _mapping(cls: type, fields: dict):
    """Build an instance of a mapping class or dataclass from a dict."""
    if dataclasses.is_dataclass(cls):
        return cls(**fields)
    try:
        return cls(fields)
    except TypeError:
        return cls(**fields)


def _find_class(path: str, container: str):
    """Return a container class by name if its module is imported, else return the name.

    A file must not be able to name arbitrary code, so other classes are not returned.
    """
    module, _, name = path.partition(":")
    cls: Any = sys.modules.get(module)
    for part in name.split("."):
        cls = getattr(cls, part, None)
    fits = isinstance(cls, type) and (
        (container == "dict" and issubclass(cls, Mapping))
        or (container == "namedtuple" and issubclass(cls, tuple) and hasattr(cls, "_fields"))
        or (container == "dataclass" and dataclasses.is_dataclass(cls))
    )
    return cls if fits else path
