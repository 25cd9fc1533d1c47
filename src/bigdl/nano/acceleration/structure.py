"""Nested values, taken apart into tensors and put together again.

A network of another runtime takes and gives flat lists. What a model's arguments and results look
like around their tensors is kept as a :class:`Structure`, which can be written as JSON. Tensors may
be of any framework; none is imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError

__all__ = ["TENSOR", "Structure", "as_array", "flatten", "is_tensor"]

_SCALARS = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Structure:
    """The shape of one nested value.

    Attributes
    ----------
    kind : str
        ``"tensor"``, ``"constant"``, ``"dict"``, ``"list"``, ``"tuple"``, ``"namedtuple"``, or
        ``"dataclass"``.
    children : tuple of Structure
    keys : tuple
        Of a dict, a named tuple, or a dataclass.
    cls : type or str or None
        The class of a container that is not a builtin one; its name where the structure was read
        from a file and the class is not known.
    value
        Of a constant.
    """

    kind: str
    children: tuple[Structure, ...] = ()
    keys: tuple = ()
    cls: Any = None
    value: Any = None

    def rebuild(self, leaves) -> Any:
        """Put a value together.

        Parameters
        ----------
        leaves : iterable
            In the order of :func:`flatten`.
        """
        return self._rebuild(iter(leaves))

    def _rebuild(self, leaves):
        if self.kind == "tensor":
            return next(leaves)
        if self.kind == "constant":
            return self.value
        values = [child._rebuild(leaves) for child in self.children]
        if self.kind in ("list", "tuple"):
            return values if self.kind == "list" else tuple(values)
        fields = dict(zip(self.keys, values, strict=True))
        if not isinstance(self.cls, type):
            return fields
        return self.cls(**fields) if self.kind != "dict" else _mapping(self.cls, fields)

    def take(self, value: Any, name: str, leaves: list) -> None:
        """Append the tensors of another value of this structure to `leaves`.

        Keys of a dict may come in another order, and a mapping may be of another class.

        Raises
        ------
        UsageError
            If the value is nested in another way, or one of its constants differs.
        """
        if self.kind == "tensor":
            if not is_tensor(value):
                raise UsageError(
                    f"{name!r} was a tensor when the model was converted, but {value!r} was given; "
                    "give a tensor, or convert the model again with a sample like this"
                )
            leaves.append(value)
        elif self.kind == "constant":
            if is_tensor(value) or value != self.value:
                raise UsageError(
                    f"{name!r} was fixed at {self.value!r} when the model was converted, but "
                    f"{_short(value)} was given; convert the model again with a sample that has it"
                )
        else:
            for key, part, child in zip(
                self._labels(), self._parts(value, name), self.children, strict=True
            ):
                child.take(part, f"{name}.{key}", leaves)

    def _labels(self):
        return self.keys or range(len(self.children))

    def _parts(self, value, name) -> list:
        if self.kind == "dict" and isinstance(value, Mapping):
            if set(value) == set(self.keys):
                return [value[key] for key in self.keys]
        elif self.kind == "dataclass" and all(hasattr(value, key) for key in self.keys):
            return [getattr(value, key) for key in self.keys]
        elif isinstance(value, (list, tuple)) and len(value) == len(self.children):
            return list(value)
        expected = ", ".join(map(str, self.keys)) or f"{len(self.children)} values"
        raise UsageError(
            f"{name!r} was a {self.kind} of {expected} when the model was converted, but "
            f"{_short(value)} was given; give it in the same form"
        )

    def paths(self, prefix: str) -> list[str]:
        """A name for each tensor, e.g. ``x``, ``batch.ids``, ``args.0``."""
        if self.kind == "tensor":
            return [prefix]
        return [
            name
            for key, child in zip(self._labels(), self.children, strict=True)
            for name in child.paths(f"{prefix}.{key}" if prefix else str(key))
        ]

    def to_json(self) -> dict:
        """As JSON; raises UsageError for a constant or a key that JSON does not know."""
        out: dict = {"kind": self.kind}
        if self.kind == "constant":
            if not isinstance(self.value, _SCALARS):
                raise UsageError(
                    f"The model has the constant {self.value!r} of type "
                    f"{type(self.value).__name__} among its inputs or outputs, which cannot be "
                    "saved; only None, bool, int, float and str can"
                )
            out["value"] = self.value
        if self.children:
            out["children"] = [child.to_json() for child in self.children]
        if self.keys:
            if not all(isinstance(key, _SCALARS) for key in self.keys):
                raise UsageError(f"Keys {list(self.keys)} of a dict cannot be saved; use strings")
            out["keys"] = list(self.keys)
        if isinstance(self.cls, type):
            out["class"] = f"{self.cls.__module__}:{self.cls.__qualname__}"
        elif self.cls:
            out["class"] = self.cls
        return out

    @classmethod
    def from_json(cls, data: dict) -> Structure:
        """Read what :meth:`to_json` wrote.

        A container of a class whose module is not imported comes back as a dict.
        """
        return cls(
            kind=data["kind"],
            children=tuple(cls.from_json(child) for child in data.get("children", ())),
            keys=tuple(data.get("keys", ())),
            cls=_find_class(data["class"], data["kind"]) if "class" in data else None,
            value=data.get("value"),
        )


TENSOR = Structure("tensor")


def flatten(value: Any) -> tuple[list, Structure]:
    """Take a nested value apart.

    Parameters
    ----------
    value
        Tensors and ndarrays in dicts, lists, tuples, named tuples, dataclasses and subclasses of
        ``Mapping``. Anything else is a constant.

    Returns
    -------
    leaves : list of Tensor or ndarray
    structure : Structure
    """
    leaves: list = []
    return leaves, _describe(value, leaves)


def is_tensor(value: Any) -> bool:
    """Return True if a value is an ndarray, or a tensor of any framework."""
    if isinstance(value, np.ndarray):
        return True
    kind = type(value)
    return (
        hasattr(kind, "__array__")
        and hasattr(kind, "dtype")
        and hasattr(kind, "shape")
        and not isinstance(value, np.generic)
    )


def as_array(value: Any) -> Any:
    """Return a tensor of PyTorch as an ndarray, bfloat16 as float32; anything else as it is."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return tensor.float().numpy() if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()


def _describe(value, leaves) -> Structure:
    if is_tensor(value):
        leaves.append(value)
        return TENSOR
    if isinstance(value, Mapping):
        keys, kind = tuple(value), "dict"
        children = [value[key] for key in keys]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        keys, kind, children = tuple(value._fields), "namedtuple", list(value)
    elif isinstance(value, (list, tuple)):
        keys, kind, children = (), "list" if isinstance(value, list) else "tuple", list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys, kind = tuple(field.name for field in dataclasses.fields(value)), "dataclass"
        children = [getattr(value, key) for key in keys]
    else:
        return Structure("constant", value=value)
    plain = type(value) in (dict, list, tuple)
    described = tuple(_describe(child, leaves) for child in children)
    return Structure(kind, described, keys, None if plain else type(value))


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _mapping(cls: type, fields: dict):
    """A mapping of a class that is built from a dict, or from keywords as dataclasses are."""
    if dataclasses.is_dataclass(cls):
        return cls(**fields)
    try:
        return cls(fields)
    except TypeError:
        return cls(**fields)


def _find_class(path: str, kind: str):
    """A class by its name, but only one of an imported module, and only a container of this kind:
    a file must not be able to name something to be run."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    fits = isinstance(found, type) and (
        (kind == "dict" and issubclass(found, Mapping))
        or (kind == "namedtuple" and issubclass(found, tuple) and hasattr(found, "_fields"))
        or (kind == "dataclass" and dataclasses.is_dataclass(found))
    )
    return found if fits else path
