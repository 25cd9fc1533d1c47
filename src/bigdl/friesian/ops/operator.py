"""Base classes of operators, their cell functions, and the statistics that they learn from.

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
    """Columns by their names, such as those of a LazyBatch."""

    def __getitem__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Statistic:
    """A question; executors replace the columns by the names that these have for them.

    Attributes
    ----------
    columns : tuple of str
    """

    columns: tuple[str, ...]

    def of_batch(self, batch: ColumnMapping) -> Any:
        """The partial answer of one batch."""
        return self._of_columns([batch[name] for name in self.columns])

    def _of_columns(self, columns: list[Any]) -> Any:
        raise NotImplementedError

    def merged(self, parts: Sequence[Any]) -> Any:
        """One partial answer in the place of several."""
        raise NotImplementedError

    def answer(self, part: Any) -> Any:
        """The answer, from the partial one of all rows."""
        return part


@dataclass(frozen=True)
class OutputSchema(Statistic):
    """The columns behind an operator that only runs on tables of Spark.

    The answer is a dict from their names to their kinds.

    Attributes
    ----------
    step : TableOperator
    """

    step: Any = None


class Function(ABC):
    """A function of the cells of one column, or of several ones in the same row.

    Attributes
    ----------
    is_costly : bool
        Whether it pays to look for the different values of an array first.
    column : callable
        The function of columns of Spark; needed unless the operator has a plan of its own.

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
    >>> Lower().single("string")("Oslo")  # of one value, by an array of one
    'oslo'
    """

    is_costly: ClassVar[bool] = False
    column: Callable[..., Column]

    @abstractmethod
    def array(self, *values: pa.Array) -> pa.Array:
        """The results for arrays of the same length."""

    def single(self, *input_types: str) -> Callable[..., Any]:
        """Return the function of single values of some kinds, by default by arrays of one."""

        def of_values(*values: Any) -> Any:
            return self.array(*map(column_types.array_of, values, input_types))[0].as_py()

        return of_values


class NumberFunction(Function):
    """A numeric function computed by NumPy, for arrays and for single values.

    Attributes
    ----------
    kind : str
        Of the results.
    of_null : number or str, optional
        The result for null.

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
    def numbers(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The results for an array of numbers, or for one; they may be infinite or NaN."""

    def undefined(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Return True for numbers whose result is null; None if there are none."""
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
        made = pa.array(results, to_arrow(self.kind), mask=mask)
        return made if self.of_null is None else made.fill_null(self.of_null)

    def single(self, *input_types: str) -> Callable[..., Any]:
        def of_number(number: Any) -> Any:
            if number is None:
                return self.of_null
            if self.undefined(number):
                return None
            result = self.numbers(number)  # of NumPy, or what Python's operators make of it
            return result.item() if hasattr(result, "item") else result

        return of_number


@dataclass(frozen=True)
class OutputColumn:
    """A column that a step makes.

    Attributes
    ----------
    inputs : tuple of str
    output : str
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
    """One method with its arguments, which are values of JSON.

    :meth:`cells` is all that an operator needs that learns nothing; one that learns has
    :meth:`requests` and :meth:`fit_state`, too.

    Attributes
    ----------
    method : str
        Its name in saved pipelines and messages.
    executors : tuple of str
        Who runs it.

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
        """True if each row has one result that depends on no other row."""
        return "row" in self.executors

    @property
    def reads(self) -> Sequence[str] | None:
        """The columns that its arguments name, also those that it only learns from.

        None if they name none, which means all that fit.
        """
        columns = getattr(self, "columns", ())
        return None if columns is None else list(columns)

    @property
    def dropped(self) -> set[str]:
        """The input columns that the operator removes."""
        return set()

    def check(self, before: Schema) -> None:
        """Refuse columns that only Spark can work on; called before all else in pipelines."""

    def requests(self, before: Schema) -> dict[str, Statistic]:
        """Return questions about the data, by name; raises where a column does not fit."""
        return {}

    def fit_state(self, before: Schema, answers: Mapping[str, Any]) -> State:
        """The state that follows from the answers to :meth:`requests`."""
        return {}

    def hides_columns(self, before: Schema) -> bool:
        """Return True if its columns are unknown before it has learned."""
        return False

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        """The columns that it makes; without a state the functions may be None."""
        return []

    def after(self, before: Schema, state: State | None) -> Schema:
        """The fields of all columns behind it, in their order."""
        made = {cell.output: cell.field for cell in self.cells(before, state)}
        return {name: each for name, each in {**before, **made}.items() if name not in self.dropped}

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        """The step on a DataFrame, which may lack columns that the step does not read."""
        made = {
            cell.output: cell.function.column(*map(col, cell.inputs))
            for cell in self.cells(before, state)
            if cell.function is not None
        }
        return replace(df, made).drop(*self.dropped)

    def split_for_arrow(self, state: State) -> tuple[Operator | None, Operator | None]:
        """Return the part that is faster through Arrow batches, and the rest, if there are such."""
        return None, self

    def training(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        """:meth:`catalyst` on the very rows that the state was learned from."""
        return self.catalyst(df, before, state)


def _checked(method: str, operator: object) -> type[Operator]:
    if (
        not (isinstance(operator, type) and issubclass(operator, Operator))
        or not isinstance(method, str)
        or "__dataclass_fields__" not in vars(operator)
        or getattr(operator, "method", None) != method
    ):
        raise UsageError(
            "An operator should be a dataclass over Operator with a method, under whose name it is "
            f"registered, but got {operator!r}",
            code="argument-type",
            argument="operator",
        )
    return operator


OPERATORS = Registry[type[Operator]]("bigdl.operators", "an operator", _checked)
"""The operators by their methods, also those that other packages offer."""

_OperatorType = TypeVar("_OperatorType", bound=type[Operator])


def register_operator(operator: _OperatorType) -> _OperatorType:
    """Register a class of operators, so that saved pipelines with it can be loaded.

    A package that is not imported by the program which loads them also names the class as an entry
    point of the group ``bigdl.operators``, under its method.

    Parameters
    ----------
    operator : type
        A frozen dataclass over :class:`Operator` with a ``method``.

    Returns
    -------
    type
        The same class, so that this is a decorator.

    Raises
    ------
    UsageError
        If it is no such class, or another one has its method.

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
    ...         made = Field("double")
    ...         return [OutputColumn((name,), name, made, Squared()) for name in self.columns]
    >>> pd.DataFrame({"price": [1.0, 3.0]}).to_parquet("prices.parquet")
    >>> pipeline = FeaturePipeline().with_operator(Square(["price"]))
    >>> pipeline.fit_files("prices.parquet", host="here").transform_row({"price": -3.0})
    {'price': 9.0}
    """
    OPERATORS.register(getattr(operator, "method", ""), operator)
    return operator


@dataclass(frozen=True)
class FittedOperator:
    """An operator with the fields before it and its state."""

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
        """The columns that have to be there."""
        computed = (cell for cell in self.cells if cell.function is not None)
        return list(dict.fromkeys(name for cell in computed for name in cell.inputs))


@dataclass(frozen=True)
class StatisticsQuery:
    """Questions of one step, to be answered about the columns as they are at its place.

    Attributes
    ----------
    step : int
        Place of the step in the pipeline.
    requests : dict of str to Statistic
    """

    step: int
    requests: dict[str, Statistic]


Program = list[FittedOperator | StatisticsQuery]


def inputs_of(fitted: Sequence[FittedOperator]) -> list[str]:
    """The columns of the data that some step reads."""
    needed: set[str] = set()
    for each in reversed(fitted):
        renamed = {cell.output: cell.inputs[0] for cell in each.cells if cell.function is None}
        kept = needed - {cell.output for cell in each.cells}
        needed = kept | {renamed[name] for name in needed & set(renamed)} | set(each.inputs)
    return [name for name in (fitted[0].before if fitted else ()) if name in needed]


def check_schema(known: Schema, wanted: Schema, needed: Sequence[str]) -> None:
    """Check that data have the columns that a pipeline reads, of the types at ``fit``."""
    require_columns(known, needed, advice="; the pipeline reads them")
    for name in needed:
        if known[name].kind != wanted[name].kind:
            raise UsageError(
                f"The column {name} was {wanted[name].kind} when the pipeline learned, and is now "
                f"{known[name].kind}; cast it first",
                code="data-schema",
                column=name,
            )


class TableOperator(Operator):
    """An operator that needs several rows or filters rows; its state holds the output fields."""

    executors = ("catalyst",)

    def requests(self, before: Schema) -> dict[str, Statistic]:
        return {"after": OutputSchema(tuple(before), self)}

    def fit_state(self, before: Schema, answers: Mapping[str, Any]) -> State:
        after = answers["after"]
        same = [name for name in after if name in before and before[name].kind == after[name]]
        return {"kinds": after, "cardinalities": {name: before[name].cardinality for name in same}}

    def hides_columns(self, before: Schema) -> bool:
        return True

    def after(self, before: Schema, state: State | None) -> Schema:
        known = cast("State", state)  # not called before `fit`, since its columns are hidden
        return {
            name: Field(kind, self.cardinality(name, known))
            for name, kind in known["kinds"].items()
        }

    def cardinality(self, name: str, state: State) -> int | None:
        """Return the cardinality of a column behind the operator."""
        return state["cardinalities"].get(name)
