"""Base classes of operators, of their cell functions and of the statistics for fitting.

An :class:`Operator` holds the arguments of one method. :meth:`Operator.cells` takes the fields of
the input columns and, if the operator learns, its state. It returns the output columns, each with
its input columns and the :class:`Function` that computes Arrow arrays. The executors ``arrow`` and
``row`` need nothing else. :meth:`Operator.catalyst` applies the operator to a Spark DataFrame; by
default it adds the Spark expression of each function.

A :class:`FeatureTable` runs an operator at once. A :class:`FeaturePipeline` records it and checks
its arguments. ``fit`` calls :meth:`Operator.requests`, computes the requested statistics of several
operators in one pass over the data, and passes the results to :meth:`Operator.fit_state`. A
:class:`FittedOperator` then holds the operator, its input fields and its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError
from bigdl.common.plugins import Registry
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.column_types import Field, Schema, require_columns, to_arrow
from bigdl.friesian.ops.spark import col, replace

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import Column, DataFrame

State = Mapping[str, Any]


class ColumnMapping(Protocol):
    """Mapping from column names to columns, such as a LazyBatch."""

    def __getitem__(self, name: str) -> Any: ...  # a pa.Array, or what the executor has


@dataclass(frozen=True)
class Statistic:
    """Base class of column statistics that operators are fitted with, such as value counts.

    Executors replace `columns` by the names that these columns have in their data.

    Attributes
    ----------
    columns : tuple of str
    """

    columns: tuple[str, ...]

    def partial_result(self, batch: ColumnMapping) -> object:
        """Compute the partial result of the statistic for one batch."""
        return self._of_columns([batch[name] for name in self.columns])

    def _of_columns(self, columns: list[Any]) -> object:
        raise NotImplementedError

    def merged(self, parts: Sequence[Any]) -> object:
        """Merge several partial results of the statistic into one."""
        raise NotImplementedError

    def result(self, part: Any) -> Any:  # the statistic's type
        """Convert the merged partial result to the value of the statistic."""
        return part


@dataclass(frozen=True)
class OutputSchema(Statistic):
    """Names and types of the columns that a Spark-only operator produces.

    The result is a dict from column names to Spark type names.

    Attributes
    ----------
    step : TableOperator
    """

    step: Any = None


class Function(ABC):
    """Base class of functions that compute a result from one or more cells of a row.

    Attributes
    ----------
    is_costly : bool
        Compute only the distinct values of an array. Set it where the function costs more than
        finding the distinct values.
    column : callable
        The same function for Spark columns. Needed unless the operator overrides ``catalyst``.

    Examples
    --------
    >>> import pyarrow as pa
    >>> import pyarrow.compute as pc
    >>> from bigdl.friesian.operators import Function
    >>> class Lower(Function):
    ...     def array(self, values):
    ...         return pc.utf8_lower(values)
    ...
    ...     def column(self, value):
    ...         from pyspark.sql import functions as F
    ...
    ...         return F.lower(value)
    >>> Lower().single("string")("Oslo")  # a single value, through an array of length 1
    'oslo'
    """

    is_costly: ClassVar[bool] = False
    column: Callable[..., Column]

    @abstractmethod
    def array(self, *values: pa.Array) -> pa.Array:
        """Compute the results for Arrow arrays of equal length."""

    def single(self, *input_types: str) -> Callable[..., Any]:
        """Return a function of single values of the given types.

        The default wraps each value in an array of length 1.
        """

        def of_values(*values: object) -> object:
            return self.array(*map(column_types.single_value_array, values, input_types))[0].as_py()

        return of_values


class NumberFunction(Function):
    """Numeric function computed by NumPy, for arrays and for single values.

    Attributes
    ----------
    kind : str
        Spark type name of the results.
    of_null : number or str, optional
        Result for null.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from bigdl.friesian.operators import NumberFunction
    >>> class Half(NumberFunction):
    ...     kind = "double"
    ...
    ...     def numbers(self, numbers):
    ...         return numbers / 2
    ...
    ...     def column(self, value):
    ...         return value / 2
    >>> Half().array(pa.array([1.0, None])).to_pylist()
    [0.5, None]
    """

    kind: str
    of_null: Any = None

    @abstractmethod
    def numbers(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | np.generic:
        """Compute the results for an array or a single number; inf and NaN are allowed."""

    def undefined(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Return a mask of the numbers whose result is null, or None if no result is null."""
        return None

    def array(self, *values: pa.Array) -> pa.Array:
        (column,) = values
        mask = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
        if mask is not None:
            column = column.fill_null(pa.scalar(0).cast(column.type))
        numbers = column.to_numpy(zero_copy_only=False)
        with np.errstate(all="ignore"):
            results, undefined = self.numbers(numbers), self.undefined(numbers)
        if undefined is not None:
            mask = undefined if mask is None else mask | undefined
        result = pa.array(results, to_arrow(self.kind), mask=mask)
        return result if self.of_null is None else result.fill_null(self.of_null)

    def single(self, *input_types: str) -> Callable[..., Any]:
        def of_number(number: Any) -> object:
            if number is None:
                return self.of_null
            if self.undefined(number):
                return None
            result = self.numbers(number)  # a NumPy or a Python number
            return result.item() if hasattr(result, "item") else result

        return of_number


@dataclass(frozen=True)
class OutputColumn:
    """Output column of an operator: its input columns, name, Field and function.

    Attributes
    ----------
    inputs : tuple of str
        Names of the input columns.
    output : str
        Name of the new column.
    field : Field
    function : Function or None
        None if the column is only renamed.

    Examples
    --------
    >>> from bigdl.friesian.operators import Field, OutputColumn
    >>> OutputColumn(("name",), "title", Field("string"), None).output  # renames a column
    'title'
    """

    inputs: tuple[str, ...]
    output: str
    field: Field
    function: Function | None


@dataclass(frozen=True)
class Operator:
    """Base class of operators; each records a feature table method call with JSON arguments.

    An operator that learns nothing only needs :meth:`cells`. An operator that learns also needs
    :meth:`requests` and :meth:`fit_state`.

    Attributes
    ----------
    method : str
        Name of the method in saved pipelines and in messages.
    executors : tuple of str
        Executors that can run the operator.

    Examples
    --------
    >>> from bigdl.friesian.feature import FeaturePipeline
    >>> step = FeaturePipeline().clip("age", min=0)
    >>> print(step.explain())  # an operator that was recorded
    step    reads  makes  executors             learned
    1 clip  age           catalyst, arrow, row  nothing yet
    """

    method: ClassVar[str]
    executors: ClassVar[tuple[str, ...]] = ("catalyst", "arrow", "row")

    @property
    def is_row_wise(self) -> bool:
        """True if each result depends on a single input row."""
        return "row" in self.executors

    @property
    def reads(self) -> Sequence[str] | None:
        """Columns named in the arguments, including columns that are read only for fitting.

        None if the arguments name no columns; the operator then reads all suitable columns.
        """
        columns = getattr(self, "columns", ())
        return None if columns is None else list(columns)

    @property
    def dropped(self) -> set[str]:
        """Input columns that the operator removes."""
        return set()

    def check(self, before: Schema) -> None:
        """Raise a UsageError for columns that only Spark tables support, not pipelines.

        Pipelines call it before all other methods.
        """

    def requests(self, before: Schema) -> dict[str, Statistic]:
        """Check the columns; return the statistics needed to fit the operator, by name."""
        return {}

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        """Return the fitted state, computed from the results of :meth:`requests`."""
        return {}

    def hides_columns(self, before: Schema) -> bool:
        """Return True if the output columns are unknown before the operator is fitted."""
        return False

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        """Return the operator's output columns; without a state, their functions may be None."""
        return []

    def after(self, before: Schema, state: State | None) -> Schema:
        """Return the fields of all output columns, in order."""
        added = {cell.output: cell.field for cell in self.cells(before, state)}
        return {
            name: each for name, each in {**before, **added}.items() if name not in self.dropped
        }

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        """Apply the operator to a DataFrame, which may lack columns that it does not read."""
        columns = {
            cell.output: cell.function.column(*map(col, cell.inputs))
            for cell in self.cells(before, state)
            if cell.function is not None
        }
        return replace(df, columns).drop(*self.dropped)

    def split_for_arrow(self, state: State) -> tuple[Operator | None, Operator | None]:
        """Return an operator to run in Arrow batches, and an operator for the remaining work.

        Either operator is None if it has no work.
        """
        return None, self

    def training(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        """Transform the rows that the operator was fitted on; by default, call :meth:`catalyst`."""
        return self.catalyst(df, before, state)


def _checked(method: str, operator: object) -> type[Operator]:
    if (
        not (isinstance(operator, type) and issubclass(operator, Operator))
        or not isinstance(method, str)
        or "__dataclass_fields__" not in vars(operator)
        or getattr(operator, "method", None) != method
    ):
        raise UsageError(
            "An operator should be a dataclass that subclasses Operator and sets `method` to the "
            f"name that it is registered under, but got {operator!r}",
            code="argument-type",
            argument="operator",
        )
    return operator


OPERATORS = Registry[type[Operator]]("bigdl.operators", "an operator", _checked)
"""Operator classes by method, including those that other packages register."""

_OperatorType = TypeVar("_OperatorType", bound=type[Operator])


def register_operator(operator: _OperatorType) -> _OperatorType:
    """Register an operator class, so that saved pipelines that use it can be loaded.

    A package that the loading program does not import also declares the class as an entry point of
    the group ``bigdl.operators``, named after its method.

    Parameters
    ----------
    operator : type
        Frozen dataclass that subclasses :class:`Operator` and sets ``method``.

    Returns
    -------
    type
        The same class, so that the function can be used as a decorator.

    Raises
    ------
    UsageError
        If `operator` is not such a class, or another class has the same method.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeaturePipeline
    >>> from bigdl.friesian.operators import Field, NumberFunction, Operator, OutputColumn
    >>> from bigdl.friesian.operators import register_operator
    >>> class Squared(NumberFunction):
    ...     kind = "double"
    ...
    ...     def numbers(self, numbers):
    ...         return numbers * 1.0 * numbers
    ...
    ...     def column(self, value):  # on Spark
    ...         return value.cast("double") * value
    >>> @register_operator
    ... @dataclass(frozen=True)
    ... class Square(Operator):
    ...     columns: list[str]
    ...     method = "square"
    ...
    ...     def cells(self, before, state):
    ...         field = Field("double")
    ...         return [OutputColumn((name,), name, field, Squared()) for name in self.columns]
    >>> pd.DataFrame({"price": [1.0, 3.0]}).to_parquet("prices.parquet")
    >>> pipeline = FeaturePipeline().with_operator(Square(["price"]))
    >>> pipeline.fit_files("prices.parquet", host="here").transform_row({"price": -3.0})
    {'price': 9.0}
    """
    OPERATORS.register(getattr(operator, "method", ""), operator)
    return operator


@dataclass(frozen=True)
class FittedOperator:
    """Fitted operator: an operator, its input schema and its state."""

    step: Operator
    before: Schema
    state: State = field(default_factory=dict)

    @cached_property
    def cells(self) -> list[OutputColumn]:
        return self.step.cells(self.before, self.state)

    @cached_property
    def after(self) -> Schema:
        return self.step.after(self.before, self.state)

    @property
    def inputs(self) -> list[str]:
        """Names of the input columns that the operator's functions read."""
        computed = (cell for cell in self.cells if cell.function is not None)
        return list(dict.fromkeys(name for cell in computed for name in cell.inputs))


@dataclass(frozen=True)
class StatisticsQuery:
    """Statistics that one operator requests about its input data.

    Attributes
    ----------
    step : int
        Index of the operator in the pipeline.
    requests : dict of str to Statistic
    """

    step: int
    requests: dict[str, Statistic]


Program = list[FittedOperator | StatisticsQuery]


def inputs_of(fitted: Sequence[FittedOperator]) -> list[str]:
    """Return the data columns that at least one of the fitted operators reads."""
    needed: set[str] = set()
    for each in reversed(fitted):
        renamed = {cell.output: cell.inputs[0] for cell in each.cells if cell.function is None}
        kept = needed - {cell.output for cell in each.cells}
        needed = kept | {renamed[name] for name in needed & set(renamed)} | set(each.inputs)
    return [name for name in (fitted[0].before if fitted else ()) if name in needed]


def check_schema(known: Schema, wanted: Schema, needed: Sequence[str]) -> None:
    """Check that data has the columns that a pipeline reads, with the same types as at ``fit``."""
    require_columns(known, needed, advice="; the pipeline reads them")
    for name in needed:
        if known[name].kind != wanted[name].kind:
            raise UsageError(
                f"The column {name} was {wanted[name].kind} when the pipeline was fitted, and is "
                f"now {known[name].kind}; cast it first",
                code="data-schema",
                column=name,
            )


class TableOperator(Operator):
    """Operator that needs several rows or filters rows; its state holds the output column types."""

    executors = ("catalyst",)

    def requests(self, before: Schema) -> dict[str, Statistic]:
        return {"after": OutputSchema(tuple(before), self)}

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        after = statistics["after"]
        same = [name for name in after if name in before and before[name].kind == after[name]]
        return {"kinds": after, "cardinalities": {name: before[name].cardinality for name in same}}

    def hides_columns(self, before: Schema) -> bool:
        return True

    def after(self, before: Schema, state: State | None) -> Schema:
        known = cast("State", state)  # not called before `fit`, since its columns are hidden
        return {
            name: Field(dtype, self.cardinality(name, known))
            for name, dtype in known["kinds"].items()
        }

    def cardinality(self, name: str, state: State) -> int | None:
        """Return the cardinality of an output column."""
        return state["cardinalities"].get(name)
