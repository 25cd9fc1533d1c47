"""Table schemas for sizing models: types, cardinalities and array lengths."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NoReturn

from bigdl.common.errors import UsageError


@dataclass(frozen=True)
class Feature:
    """Type, cardinality and array shape of a column.

    Attributes
    ----------
    dtype : str
        Spark name of the innermost element type: ``"int"``, ``"float"``, ``"string"``.
    cardinality : int or None
        Largest value plus 1, which is the number of rows of an embedding. None unless the values
        are non-negative integers.
    shape : tuple of (int or None)
        Array lengths, outermost first: ``()`` for single values, ``(100,)`` for arrays of 100
        values, ``(None,)`` for arrays of different lengths.

    Examples
    --------
    >>> from bigdl.friesian.feature import Feature
    >>> Feature("int", cardinality=944, shape=(100,))  # histories of 100 users each
    Feature(dtype='int', cardinality=944, shape=(100,))
    >>> Feature("float").cardinality is None  # floats have no embedding
    True
    """

    dtype: str
    cardinality: int | None = None
    shape: tuple[int | None, ...] = ()


class FeatureSchema(dict[str, Feature]):
    """Schema of a table for sizing models: a dict from column names to :class:`Feature`.

    Parameters
    ----------
    features : mapping of str to Feature

    Examples
    --------
    >>> from bigdl.friesian.feature import Feature, FeatureSchema
    >>> schema = FeatureSchema({"user": Feature("int", 944), "age": Feature("float")})
    >>> schema.cardinality("user")
    944
    >>> FeatureSchema.from_json(schema.to_json()) == schema
    True
    """

    def __missing__(self, name: str) -> NoReturn:
        raise UsageError(
            f"The schema has no column {name!r}; it has {list(self)}",
            code="column-missing",
            column=name,
            allowed=list(self),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__repr__()})"

    def cardinality(self, name: str) -> int:
        """Return the number of embedding rows for a column.

        Raises
        ------
        UsageError
            If the column does not hold non-negative integers.
        """
        feature = self[name]
        if feature.cardinality is None:
            raise UsageError(
                f"{name} of type {feature.dtype} has no embedding: its values should be "
                "non-negative whole numbers; encode it first",
                code="data-dtype",
                column=name,
            )
        return feature.cardinality

    def length(self, name: str) -> int:
        """Return the common length of the arrays in a column.

        Raises
        ------
        UsageError
            If the column holds no arrays, or arrays of different lengths.
        """
        shape = self[name].shape
        if not shape or shape[0] is None:
            content = "arrays of different lengths" if shape else "single values"
            raise UsageError(
                f"{name} should hold arrays of one length, but holds {content}; pad it",
                code="data-shape",
                column=name,
            )
        return shape[0]

    def union(self, other: FeatureSchema) -> FeatureSchema:
        """Return a schema that fits both tables, such as training and validation data.

        Raises
        ------
        UsageError
            If a column has another type or nesting depth in the other table.

        Examples
        --------
        >>> from bigdl.friesian.feature import Feature, FeatureSchema
        >>> train = FeatureSchema({"user": Feature("int", 944)})
        >>> test = FeatureSchema({"user": Feature("int", 951)})
        >>> train.union(test).cardinality("user")
        951
        """
        both = {name: _fitting(name, self[name], other[name]) for name in self if name in other}
        return FeatureSchema({**self, **other, **both})

    def to_json(self) -> str:
        """Return the schema as a JSON string for :meth:`from_json`."""
        return json.dumps({name: asdict(each) for name, each in self.items()})

    @classmethod
    def from_json(cls, text: str) -> FeatureSchema:
        """Create a FeatureSchema from the JSON string that :meth:`to_json` returned."""
        features = json.loads(text).items()
        return cls({n: Feature(**each | {"shape": tuple(each["shape"])}) for n, each in features})


def _fitting(name: str, ours: Feature, theirs: Feature) -> Feature:
    if (ours.dtype, len(ours.shape)) != (theirs.dtype, len(theirs.shape)):
        raise UsageError(
            f"{name} is {ours} in one table and {theirs} in the other",
            code="data-schema",
            column=name,
        )
    size = None
    if ours.cardinality is not None and theirs.cardinality is not None:
        size = max(ours.cardinality, theirs.cardinality)
    shape = tuple(a if a == b else None for a, b in zip(ours.shape, theirs.shape, strict=True))
    return Feature(ours.dtype, size, shape)


def cardinalities(schema: FeatureSchema, names: Iterable[str]) -> dict[str, int]:
    """Return the cardinality of each category column by name."""
    return {name: schema.cardinality(name) for name in names}


def check_numbers(schema: FeatureSchema, names: Iterable[str]) -> list[str]:
    """Return the names as a list; raise a UsageError unless the columns hold single numbers."""
    names = list(names)
    for name in names:
        feature = schema[name]
        if feature.shape or feature.dtype in ("string", "boolean"):
            raise UsageError(
                f"{name} should hold numbers, but its type is {feature}",
                code="data-dtype",
                column=name,
            )
    return names
