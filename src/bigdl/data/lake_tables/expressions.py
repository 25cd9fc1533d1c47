"""Expressions over the columns of record batches, with the values that Spark computes for them.

Spark and Arrow differ in comparisons with NaN, in overflows of casts and in nulls within lists of
values.  Each expression evaluates to what Spark returns, or raises an error where Spark raises one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError, require

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402
import pyarrow.compute as pc  # noqa: E402

if TYPE_CHECKING:
    from typing import TypeAlias

    Values: TypeAlias = "pa.Array | pa.Scalar"
    Columns: TypeAlias = Mapping[str, pa.Array]

_types = pa.types

# exact division of an unscaled decimal by a power of ten: digits and scale
_EXACT_DECIMALS = {pa.float64(): (15, 22), pa.float32(): (7, 10)}


class Expression(ABC):
    """Computation of one column.

    Attributes
    ----------
    type : pyarrow.DataType
        Type of the values.
    can_fail : bool
        True if some values raise an error, so evaluating more rows than Spark could raise one, too.
    """

    type: pa.DataType
    can_fail: bool = False

    @abstractmethod
    def evaluate(self, columns: Columns) -> Values:
        """Return the values for all rows, or a scalar if they are equal."""

    def children(self) -> Sequence[Expression]:
        """Return the operands."""
        return ()

    def nodes(self) -> Iterator[Expression]:
        """Yield the expression and everything within it."""
        yield self
        for child in self.children():
            yield from child.nodes()


@dataclass(frozen=True)
class InputColumn(Expression):
    """Column of the record batch."""

    name: str
    type: pa.DataType

    def evaluate(self, columns: Columns) -> Values:
        return columns[self.name]


@dataclass(frozen=True)
class Constant(Expression):
    """One value, or null.

    Attributes
    ----------
    value : object
        Python value, or pyarrow.Scalar of the type.
    type : pyarrow.DataType
    """

    value: object
    type: pa.DataType

    def evaluate(self, columns: Columns) -> Values:
        value = self.value
        return value if isinstance(value, pa.Scalar) else pa.scalar(value, self.type)


class _Predicate(Expression):
    """Expression with the values true, false and null."""

    type = pa.bool_()


@dataclass(frozen=True)
class Compare(_Predicate):
    """Comparison of two expressions of one type.

    NaN equals NaN and is greater than all other numbers; negative zero equals zero.

    Attributes
    ----------
    operator : str
        ``"equal"``, ``"less"``, ``"less_equal"``, ``"greater"`` or ``"greater_equal"``.
    left, right : Expression
    """

    operator: str
    left: Expression
    right: Expression

    def children(self) -> Sequence[Expression]:
        return self.left, self.right

    def evaluate(self, columns: Columns) -> Values:
        left, right = self.left.evaluate(columns), self.right.evaluate(columns)
        return _compared(self.operator, left, right)


def _compared(operator: str, left: Values, right: Values) -> Values:
    """Compare values of one type, see :class:`Compare`."""
    compare = getattr(pc, operator)
    if not _types.is_floating(left.type):
        return compare(left, right)
    if isinstance(right, pa.Scalar) and right.is_valid and right.as_py() == right.as_py():
        result = compare(left, right)  # of numbers with a number
        is_above = operator.startswith("greater")
        return pc.or_kleene(result, pc.is_nan(left)) if is_above else result
    is_left_nan, is_right_nan = pc.is_nan(left), pc.is_nan(right)
    nan_result = {
        "equal": lambda: pc.and_kleene(is_left_nan, is_right_nan),
        "less": lambda: pc.and_kleene(pc.invert(is_left_nan), is_right_nan),
        "less_equal": lambda: is_right_nan,
        "greater": lambda: pc.and_kleene(is_left_nan, pc.invert(is_right_nan)),
        "greater_equal": lambda: is_left_nan,
    }[operator]()
    # a null operand makes the comparison null, whatever the other one is
    return _null_unless(pc.or_kleene(compare(left, right), nan_result), left, right)


def _null_unless(values: Values, *operands: Values) -> Values:
    """Return the values, with null where an operand is null."""
    for operand in operands:
        if isinstance(operand, pa.Scalar):
            if not operand.is_valid:
                return pa.scalar(None, pa.bool_())
        elif operand.null_count:
            values = pc.if_else(operand.is_valid(), values, pa.scalar(None, pa.bool_()))
    return values


@dataclass(frozen=True)
class NullSafeEqual(_Predicate):
    """Comparison for equality in which null equals null."""

    left: Expression
    right: Expression

    def children(self) -> Sequence[Expression]:
        return self.left, self.right

    def evaluate(self, columns: Columns) -> Values:
        left, right = self.left.evaluate(columns), self.right.evaluate(columns)
        are_null = pc.and_(pc.is_null(left), pc.is_null(right))
        return pc.or_(are_null, pc.coalesce(_compared("equal", left, right), False))


@dataclass(frozen=True)
class IsNull(_Predicate):
    """Test for null."""

    child: Expression

    def children(self) -> Sequence[Expression]:
        return (self.child,)

    def evaluate(self, columns: Columns) -> Values:
        return pc.is_null(self.child.evaluate(columns))


@dataclass(frozen=True)
class IsNan(_Predicate):
    """Test for NaN; false for null."""

    child: Expression

    def children(self) -> Sequence[Expression]:
        return (self.child,)

    def evaluate(self, columns: Columns) -> Values:
        return pc.coalesce(pc.is_nan(self.child.evaluate(columns)), False)


@dataclass(frozen=True)
class Coalesce(Expression):
    """First operand that is not null.

    Attributes
    ----------
    operands : tuple of Expression
        Of one type.
    """

    operands: tuple[Expression, ...]

    @property
    def type(self) -> pa.DataType:  # type: ignore[override]
        return self.operands[0].type

    def children(self) -> Sequence[Expression]:
        return self.operands

    def evaluate(self, columns: Columns) -> Values:
        return pc.coalesce(*(each.evaluate(columns) for each in self.operands))


@dataclass(frozen=True)
class ReplaceNan(Expression):
    """First operand, or the second one where the first one is NaN."""

    child: Expression
    replacement: Expression

    @property
    def type(self) -> pa.DataType:  # type: ignore[override]
        return self.child.type

    def children(self) -> Sequence[Expression]:
        return self.child, self.replacement

    def evaluate(self, columns: Columns) -> Values:
        values, other = self.child.evaluate(columns), self.replacement.evaluate(columns)
        return pc.if_else(pc.coalesce(pc.is_nan(values), False), other, values)


@dataclass(frozen=True)
class Not(_Predicate):
    """Negation; null for null."""

    child: Expression

    def children(self) -> Sequence[Expression]:
        return (self.child,)

    def evaluate(self, columns: Columns) -> Values:
        return pc.invert(self.child.evaluate(columns))


@dataclass(frozen=True)
class Both(_Predicate):
    """Conjunction in three-valued logic."""

    left: Expression
    right: Expression

    def children(self) -> Sequence[Expression]:
        return self.left, self.right

    def evaluate(self, columns: Columns) -> Values:
        return pc.and_kleene(self.left.evaluate(columns), self.right.evaluate(columns))


@dataclass(frozen=True)
class Either(_Predicate):
    """Disjunction in three-valued logic."""

    left: Expression
    right: Expression

    def children(self) -> Sequence[Expression]:
        return self.left, self.right

    def evaluate(self, columns: Columns) -> Values:
        return pc.or_kleene(self.left.evaluate(columns), self.right.evaluate(columns))


@dataclass(frozen=True)
class IsIn(_Predicate):
    """Test for one of several values, which are not floating-point numbers.

    Attributes
    ----------
    child : Expression
    values : tuple
        May include None, which makes the test null for all other values.
    """

    child: Expression
    values: tuple[object, ...]

    def children(self) -> Sequence[Expression]:
        return (self.child,)

    def evaluate(self, columns: Columns) -> Values:
        operand = self.child.evaluate(columns)
        known = pa.array([each for each in self.values if each is not None], self.child.type)
        is_in = _null_unless(pc.is_in(operand, value_set=known), operand)
        has_null = len(known) < len(self.values)
        return pc.or_kleene(is_in, pa.scalar(None, pa.bool_())) if has_null else is_in


@dataclass(frozen=True)
class HasText(_Predicate):
    """Test for a part of a string or of binary data.

    Attributes
    ----------
    function : str
        ``"starts_with"``, ``"ends_with"`` or ``"match_substring"``.
    child : Expression
    text : str or bytes
    """

    function: str
    child: Expression
    text: str | bytes

    def children(self) -> Sequence[Expression]:
        return (self.child,)

    def evaluate(self, columns: Columns) -> Values:
        return getattr(pc, self.function)(self.child.evaluate(columns), self.text)


@dataclass(frozen=True)
class CastTo(Expression):
    """Conversion to another type, as by Spark's ``CAST``.

    Attributes
    ----------
    child : Expression
    type : pyarrow.DataType
    is_checked : bool
        True for ``spark.sql.ansi.enabled``: values that the type cannot represent raise an error.
        Otherwise integers wrap around, and floating-point numbers become the nearest integer.
    """

    child: Expression
    type: pa.DataType
    is_checked: bool

    @property
    def can_fail(self) -> bool:  # type: ignore[override]
        return self.is_checked and not _holds_all(self.child.type, self.type)

    @staticmethod
    def is_supported(source: pa.DataType, target: pa.DataType) -> bool:
        """Return True if casts between these types return Spark's values."""
        if source == target:
            return True
        if _types.is_list(source) and _types.is_list(target):
            return CastTo.is_supported(source.value_type, target.value_type)
        if _types.is_decimal(source) and target in _EXACT_DECIMALS:
            digits, scale = _EXACT_DECIMALS[target]
            return source.precision <= digits and 0 <= source.scale <= scale
        if _types.is_floating(source) and _types.is_integer(target):
            return bool(target.bit_width >= 32)
        return all(
            _types.is_integer(each) or _types.is_floating(each) or _types.is_boolean(each)
            for each in (source, target)
        )

    def children(self) -> Sequence[Expression]:
        return (self.child,)

    def evaluate(self, columns: Columns) -> Values:
        values = self.child.evaluate(columns)
        if isinstance(values, pa.Scalar):
            array = pa.array([values.as_py()], values.type)
            return self._cast(array, self.type)[0]
        return self._cast(values, self.type)

    def _cast(self, array: pa.Array, target: pa.DataType) -> pa.Array:
        source = array.type
        if source == target:
            return array
        if _types.is_list(target):
            if array.offset:  # a mask needs an array without offset
                array = pa.concat_arrays([array.slice(0, 0), array])
            inner = self._cast(array.values, target.value_type)
            nulls = array.is_null() if array.null_count else None
            return pa.ListArray.from_arrays(array.offsets, inner, target, mask=nulls)
        if _types.is_decimal(source):
            unscaled = np.frombuffer(array.buffers()[1], "<i8")[:: source.bit_width // 64]
            unscaled = unscaled[array.offset : array.offset + len(array)]
            dtype = target.to_pandas_dtype()
            return _with_nulls_of(array, unscaled.astype(dtype) / dtype(10**source.scale))
        if _types.is_floating(source) and _types.is_integer(target):
            return self._to_integers(array, target)
        if _types.is_boolean(target):
            return pc.not_equal(array, pa.scalar(0, source))
        try:
            return array.cast(target, safe=self.is_checked and _types.is_integer(target))
        except pa.ArrowInvalid:
            limits = np.iinfo(target.to_pandas_dtype())
            low, high = (pa.scalar(int(each), pa.int64()) for each in (limits.min, limits.max))
            wide = array.cast(pa.int64())
            outside = pc.or_(pc.less(wide, low), pc.greater(wide, high))
            raise _overflow(wide.filter(outside)[0], target) from None

    def _to_integers(self, array: pa.Array, target: pa.DataType) -> pa.Array:
        # a null's value is arbitrary, so it is replaced
        values = pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.float64)
        limits = np.iinfo(target.to_pandas_dtype())
        low, high = float(limits.min), float(limits.max)  # 2**63 for 64 bits
        if self.is_checked:
            is_inside = (np.floor(values) <= high) & (np.ceil(values) >= low)
            if not is_inside.all():
                raise _overflow(float(values[~is_inside][0]), target)
        with np.errstate(invalid="ignore"):
            integers = np.trunc(values).astype(limits.dtype)
        integers[values >= high] = limits.max
        integers[values <= low] = limits.min
        integers[np.isnan(values)] = 0
        return _with_nulls_of(array, integers)


def _holds_all(source: pa.DataType, target: pa.DataType) -> bool:
    """Return True if no value of type `source` is outside the range of type `target`."""
    if _types.is_list(source) and _types.is_list(target):
        return _holds_all(source.value_type, target.value_type)
    if not _types.is_integer(target):
        return True
    return not _types.is_floating(source) and source.bit_width <= target.bit_width


def _overflow(value: int | float, target: pa.DataType) -> UsageError:
    return UsageError(
        f"The value {value} cannot be cast to {target}, which a query of the DataFrame requests; "
        "cast to a type that holds it, or use try_cast to get null",
        code="data-value",
    )


def _with_nulls_of(array: pa.Array, values: np.ndarray) -> pa.Array:
    mask = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return pa.array(values, mask=mask)


@dataclass(frozen=True)
class Query:
    """Selection of rows, and computation of columns from the columns of files.

    Attributes
    ----------
    condition : Expression or None
        Rows for which it is true remain; None keeps all rows.
    outputs : tuple of Expression
        The resulting columns.
    """

    condition: Expression | None
    outputs: tuple[Expression, ...]

    def rows(self, columns: Columns) -> Columns:
        """Return the columns of the remaining rows."""
        mask = self._mask(columns)
        if mask is None:
            return columns
        batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        return dict(zip(columns, filter_rows(batch, mask).columns, strict=True))

    def count(self, columns: Columns) -> int:
        """Return the number of remaining rows."""
        mask = self._mask(columns)
        return rows_of(columns) if mask is None else int(mask.true_count)

    def _mask(self, columns: Columns) -> pa.Array | None:
        """Return a mask that is true for the remaining rows, or None if all remain."""
        if self.condition is None:
            return None
        mask = self.condition.evaluate(columns)
        if isinstance(mask, pa.Scalar):
            mask = pa.repeat(pa.scalar(bool(mask.as_py())), rows_of(columns))
        return None if not mask.null_count and mask.true_count == len(mask) else mask

    def select(self, columns: Columns) -> list[pa.Array]:
        """Return the resulting columns for columns of remaining rows."""
        values = [each.evaluate(columns) for each in self.outputs]
        rows = rows_of(columns)
        return [pa.repeat(v, rows) if isinstance(v, pa.Scalar) else v for v in values]


def filter_rows(batch: pa.RecordBatch, mask: pa.Array) -> pa.RecordBatch:
    """Return the rows of a batch for which the mask is true.

    Lists of one common length are filtered as fixed-size lists, which is ten times as fast.
    """
    columns = [_with_fixed_size(each) for each in batch.columns]
    fixed = pa.RecordBatch.from_arrays(columns, batch.schema.names).filter(mask)
    columns = [
        _with_offsets(each, field.type) if each.type != field.type else each
        for each, field in zip(fixed.columns, batch.schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _with_fixed_size(array: pa.Array) -> pa.Array:
    """Convert lists of one common length to fixed-size lists without copying their values."""
    list_type = array.type
    if not (_types.is_list(list_type) or _types.is_large_list(list_type)) or array.null_count:
        return array
    offsets = array.offsets.to_numpy()
    size = int(offsets[1] - offsets[0]) if len(array) else 0
    if not size or (np.diff(offsets) != size).any():
        return array
    values = array.values.slice(offsets[0], len(array) * size)
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(list_type.value_field, size))


def _with_offsets(array: pa.Array, list_type: pa.DataType) -> pa.Array:
    """Convert fixed-size lists without nulls to lists without copying their values."""
    size = array.type.list_size
    cls, dtype = (
        (pa.LargeListArray, np.int64)
        if _types.is_large_list(list_type)
        else (pa.ListArray, np.int32)
    )
    offsets = np.arange(0, len(array) * size + 1, size, dtype=dtype)
    return cls.from_arrays(pa.array(offsets), array.flatten(), type=list_type)


def rows_of(columns: Columns) -> int:
    """Return the number of rows of columns."""
    return len(next(iter(columns.values())))


def input_names(*expressions: Expression) -> list[str]:
    """Return the distinct names of the columns that expressions use."""
    nodes = (node for each in expressions for node in each.nodes())
    return list(dict.fromkeys(each.name for each in nodes if isinstance(each, InputColumn)))
