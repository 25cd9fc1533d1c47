"""Schemas that models are sized from: kinds of values, how many there are, lengths of arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from bigdl.common.errors import UsageError


@dataclass(frozen=True)
class Feature:
    """A column.

    Attributes
    ----------
    dtype : str
        Spark's name of the type of the innermost values: ``"int"``, ``"float"``, ``"string"``.
    cardinality : int or None
        The largest value plus 1, which is how many rows an embedding needs; None unless the values
        are whole numbers from 0 on.
    shape : tuple of (int or None)
        Lengths of the arrays, from the outermost on: ``()`` for single values, ``(100,)`` for
        arrays that all have 100 values, ``(None,)`` for arrays of different lengths.
    """

    dtype: str
    cardinality: int | None = None
    shape: tuple[int | None, ...] = ()


class FeatureSchema(Mapping):
    """The columns of a table, by name; what models are sized from.

    Parameters
    ----------
    features : mapping of str to Feature

    Examples
    --------
    >>> schema = FeatureSchema({"user": Feature("int", 944), "age": Feature("float")})
    >>> schema["user"].cardinality
    944
    >>> FeatureSchema.from_json(schema.to_json()) == schema
    True
    """

    def __init__(self, features: Mapping[str, Feature]):
        self._features = dict(features)

    def __getitem__(self, name: str) -> Feature:
        if name not in self._features:
            raise UsageError(f"The schema has no column {name!r}; it has {list(self._features)}")
        return self._features[name]

    def __contains__(self, name: object) -> bool:
        return name in self._features

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._features!r})"

    def cardinality(self, name: str) -> int:
        """Return the number of rows of an embedding of a column.

        Raises
        ------
        UsageError
            If the column does not hold whole numbers from 0 on.
        """
        feature = self[name]
        if feature.cardinality is None:
            raise UsageError(
                f"{name} of type {feature.dtype} has no embedding: its values should be whole "
                "numbers from 0 on; encode it first"
            )
        return feature.cardinality

    def length(self, name: str) -> int:
        """The one length of the arrays of a column.

        Raises
        ------
        UsageError
            If it holds no arrays, or of different lengths.
        """
        shape = self[name].shape
        if not shape or shape[0] is None:
            content = "arrays of different lengths" if shape else "single values"
            raise UsageError(
                f"{name} should hold arrays of one length, but holds {content}; pad it"
            )
        return shape[0]

    def union(self, other: FeatureSchema) -> FeatureSchema:
        """A schema that fits both tables, such as those of training and validation.

        Raises
        ------
        UsageError
            If a column of both has another type or depth in the other.
        """
        features = dict(self._features)
        for name, theirs in other.items():
            features[name] = _fitting(name, features[name], theirs) if name in self else theirs
        return FeatureSchema(features)

    def to_json(self) -> str:
        """As text, for :meth:`from_json`."""
        return json.dumps({name: asdict(each) for name, each in self._features.items()})

    @classmethod
    def from_json(cls, text: str) -> FeatureSchema:
        """Read what :meth:`to_json` wrote."""
        features: dict[str, Any] = json.loads(text)
        return cls(
            {
                name: Feature(each["dtype"], each["cardinality"], tuple(each["shape"]))
                for name, each in features.items()
            }
        )


def _fitting(name: str, ours: Feature, theirs: Feature) -> Feature:
    if (ours.dtype, len(ours.shape)) != (theirs.dtype, len(theirs.shape)):
        raise UsageError(f"{name} is {ours} in one table and {theirs} in the other")
    sizes = (ours.cardinality, theirs.cardinality)
    size = None if None in sizes else max(cast("tuple[int, int]", sizes))
    shape = tuple(a if a == b else None for a, b in zip(ours.shape, theirs.shape, strict=True))
    return Feature(ours.dtype, size, shape)
