"""Schemas that models are sized from: kinds of values, how many there are, lengths of arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NoReturn

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

    Examples
    --------
    >>> from bigdl.friesian.feature import Feature
    >>> Feature("int", cardinality=944, shape=(100,))  # histories of 100 users each
    Feature(dtype='int', cardinality=944, shape=(100,))
    >>> Feature("float").cardinality is None  # numbers that no embedding is made for
    True
    """

    dtype: str
    cardinality: int | None = None
    shape: tuple[int | None, ...] = ()


class FeatureSchema(dict[str, Feature]):
    """The columns of a table, by name; what models are sized from.

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
                "numbers from 0 on; encode it first",
                code="data-dtype",
                column=name,
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
                f"{name} should hold arrays of one length, but holds {content}; pad it",
                code="data-shape",
                column=name,
            )
        return shape[0]

    def union(self, other: FeatureSchema) -> FeatureSchema:
        """A schema that fits both tables, such as those of training and validation.

        Raises
        ------
        UsageError
            If a column of both has another type or depth in the other.

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
        """As text, for :meth:`from_json`."""
        return json.dumps({name: asdict(each) for name, each in self.items()})

    @classmethod
    def from_json(cls, text: str) -> FeatureSchema:
        """Read what :meth:`to_json` wrote."""
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
    """Return the numbers of different values of columns of categories."""
    return {name: schema.cardinality(name) for name in names}


def check_numbers(schema: FeatureSchema, names: Iterable[str]) -> list[str]:
    """Return columns of single numbers; a UsageError if one holds something else."""
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
