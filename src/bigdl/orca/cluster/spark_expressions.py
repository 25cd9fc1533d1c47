"""Translation of Spark's expressions to expressions over record batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from bigdl.data.lake_tables.expressions import (
    Both,
    CastTo,
    Coalesce,
    Compare,
    Constant,
    Either,
    Expression,
    HasText,
    IsIn,
    IsNan,
    IsNull,
    Not,
    NullSafeEqual,
    ReplaceNan,
)

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

__all__ = ["UnknownExpression", "class_of", "items_of", "translate"]

_PACKAGE = "org.apache.spark.sql.catalyst.expressions."
_TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_COMPARISONS = {
    "EqualTo": "equal",
    "LessThan": "less",
    "LessThanOrEqual": "less_equal",
    "GreaterThan": "greater",
    "GreaterThanOrEqual": "greater_equal",
}
_TEXT_TESTS = {
    "StartsWith": "starts_with",
    "EndsWith": "ends_with",
    "Contains": "match_substring",
}

Columns = Mapping[int, Expression]


class UnknownExpression(Exception):
    """Expression of Spark that has no exact counterpart."""


def translate(java: JavaObject, columns: Columns) -> Expression:
    """Translate an expression of Spark.

    Parameters
    ----------
    java : JavaObject
    columns : dict of int to Expression
        Columns by the ids of Spark's attributes.

    Raises
    ------
    UnknownExpression
    """
    name = class_of(java).removeprefix(_PACKAGE)
    if name in _COMPARISONS:
        left, right = _same_types(java, columns)
        return Compare(_COMPARISONS[name], left, right)
    if name in _TEXT_TESTS:
        child, text = translate(java.left(), columns), translate(java.right(), columns)
        is_text = child.type in (pa.string(), pa.binary()) and child.type == text.type
        if not is_text or not isinstance(text, Constant) or text.value is None:
            raise _unknown(java)
        part = text.value if isinstance(text.value, bytes) else str(text.value)
        return HasText(_TEXT_TESTS[name], child, part)
    if name not in _TRANSLATIONS:
        raise _unknown(java)
    return _TRANSLATIONS[name](java, columns)


def class_of(java: JavaObject) -> str:
    """Return the full name of the class of a Java object."""
    return str(java.getClass().getName())


def items_of(sequence: JavaObject) -> Iterator[JavaObject]:
    """Yield the items of a sequence of Scala."""
    return (sequence.apply(i) for i in range(sequence.size()))


def _unknown(java: JavaObject) -> UnknownExpression:
    return UnknownExpression(str(java.toString()))


def _type_of(java_type: JavaObject) -> pa.DataType:
    text = str(java_type.catalogString())
    depth = text.count("array<")
    inner = text.removeprefix("array<" * depth).removesuffix(">" * depth)
    if inner.startswith("decimal("):
        precision, scale = map(int, inner[len("decimal(") : -1].split(","))
        type_ = pa.decimal128(precision, scale)
    elif inner in _TYPES:
        type_ = _TYPES[inner]
    else:  # also strings with a collation
        raise UnknownExpression(f"the type {text}")
    for _ in range(depth):
        type_ = pa.list_(type_)
    return type_


def _alias(java: JavaObject, columns: Columns) -> Expression:
    return translate(java.child(), columns)


def _attribute(java: JavaObject, columns: Columns) -> Expression:
    column = columns.get(java.exprId().id())
    if column is None:
        raise _unknown(java)
    return column


def _literal(java: JavaObject, columns: Columns) -> Expression:
    type_ = _type_of(java.dataType())
    return Constant(_value(java.value(), type_), type_)


def _value(value: JavaObject, type_: pa.DataType) -> object:
    """Convert a value of Spark's internal representation to Python."""
    if value is None or pa.types.is_list(type_):
        if value is not None:
            raise UnknownExpression("an array")
        return None
    if pa.types.is_string(type_):
        text = value if isinstance(value, str) else str(value.toString())
        if "\ufffd" in text:  # perhaps no UTF-8
            raise UnknownExpression("a string that may not be UTF-8")
        return text
    if pa.types.is_decimal(type_):
        from decimal import Decimal

        return Decimal(str(value.toString()))
    # dates and times are integers
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        return pa.scalar(value, pa.int32() if pa.types.is_date(type_) else pa.int64()).cast(type_)
    return bytes(value) if pa.types.is_binary(type_) else value


def _cast(java: JavaObject, columns: Columns) -> Expression:
    child, type_ = translate(java.child(), columns), _type_of(java.dataType())
    mode = str(java.evalMode().toString())
    if child.type == type_:
        return child
    if isinstance(child, Constant) and child.value is None:
        return Constant(None, type_)
    cast = CastTo(child, type_, mode == "ANSI")
    if mode not in ("ANSI", "LEGACY") or not CastTo.is_supported(child.type, type_):
        raise _unknown(java)
    return cast


def _same_types(java: JavaObject, columns: Columns) -> tuple[Expression, Expression]:
    left, right = translate(java.left(), columns), translate(java.right(), columns)
    _type_of(java.left().dataType())  # no collation
    if left.type != right.type or pa.types.is_nested(left.type):
        raise _unknown(java)
    return left, right


def _boolean(java: JavaObject, columns: Columns) -> Expression:
    return translate(java, columns)


def _in(java: JavaObject, columns: Columns) -> Expression:
    child = translate(java.value(), columns)
    options = [translate(each, columns) for each in items_of(java.list())]
    if not options or any(each.type != child.type for each in options):
        raise _unknown(java)
    if pa.types.is_nested(child.type):
        raise _unknown(java)
    _type_of(java.value().dataType())
    if not pa.types.is_floating(child.type) and all(isinstance(o, Constant) for o in options):
        return IsIn(child, tuple(each.value for each in options if isinstance(each, Constant)))
    tests: list[Expression] = [Compare("equal", child, each) for each in options]
    return reduce(Either, tests)


def _in_set(java: JavaObject, columns: Columns) -> Expression:
    child = translate(java.child(), columns)
    type_ = _type_of(java.child().dataType())
    # Java distinguishes the zeros in a set of floating-point numbers
    if pa.types.is_floating(type_) or pa.types.is_nested(type_):
        raise _unknown(java)
    return IsIn(child, tuple(_value(each, type_) for each in items_of(java.hset().toSeq())))


def _without_null(java: JavaObject, columns: Columns) -> Expression:
    """Translate the condition of ``dropna``: enough of the values are neither null nor NaN."""
    children = [translate(each, columns) for each in items_of(java.children())]
    count = java.n()
    known: list[Expression] = [
        Not(Either(IsNull(each), IsNan(each)) if pa.types.is_floating(each.type) else IsNull(each))
        for each in children
    ]
    if children and count == len(known):
        return reduce(Both, known)
    if children and count == 1:
        return reduce(Either, known)
    raise _unknown(java)


def _coalesce(java: JavaObject, columns: Columns) -> Expression:
    operands = tuple(translate(each, columns) for each in items_of(java.children()))
    if any(each.type != operands[0].type for each in operands) or _may_fail(*operands[1:]):
        raise _unknown(java)
    return Coalesce(operands)


def _replace_nan(java: JavaObject, columns: Columns) -> Expression:
    left, right = _same_types(java, columns)
    if _may_fail(right):
        raise _unknown(java)
    return ReplaceNan(left, right)


def _may_fail(*expressions: Expression) -> bool:
    """Return True if expressions that Spark skips for some rows may raise an error for them."""
    return any(node.can_fail for each in expressions for node in each.nodes())


_TRANSLATIONS: dict[str, Callable[[JavaObject, Columns], Expression]] = {
    "Alias": _alias,
    "AttributeReference": _attribute,
    "Literal": _literal,
    "Cast": _cast,
    "EqualNullSafe": lambda java, columns: NullSafeEqual(*_same_types(java, columns)),
    "And": lambda java, columns: Both(
        translate(java.left(), columns), translate(java.right(), columns)
    ),
    "Or": lambda java, columns: Either(
        translate(java.left(), columns), translate(java.right(), columns)
    ),
    "Not": lambda java, columns: Not(translate(java.child(), columns)),
    "IsNull": lambda java, columns: IsNull(translate(java.child(), columns)),
    "IsNotNull": lambda java, columns: Not(IsNull(translate(java.child(), columns))),
    "IsNaN": lambda java, columns: IsNan(translate(java.child(), columns)),
    "In": _in,
    "InSet": _in_set,
    "AtLeastNNonNulls": _without_null,
    "Coalesce": _coalesce,
    "NaNvl": _replace_nan,
}
