"""What a pipeline is made of: steps, what they do to cells, and what they have to learn first.

A :class:`Step` holds the arguments of one recorded method.  Given the fields of the columns before
it and, if it learns, its state, it says what it does in two ways.  :meth:`Step.catalyst` is a
function of a DataFrame of Spark.  :meth:`Step.cells` lists what each new column is computed from
and by which :class:`Function`, which knows how to compute an array of Arrow and a single value of
Python: the executors ``arrow`` and ``row`` need nothing else.

The life of a step: it is made while the pipeline is recorded, which checks its arguments.  ``fit``
calls :meth:`Step.requests`, has them answered together with those of other steps by one pass over
the data, and makes the state by :meth:`Step.settled`.  From then on a :class:`Fitted` holds step,
fields and state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from bigdl.friesian.feature.pipeline.requests import Request

__all__ = [
    "Cell",
    "Field",
    "Fitted",
    "Function",
    "GroupStep",
    "Schema",
    "State",
    "Step",
    "check_schema",
    "executors_of",
    "inputs_of",
    "require_fields",
]


@dataclass(frozen=True)
class Field:
    """What is known about a column.

    Attributes
    ----------
    kind : str
        Its type, as Spark writes it: ``"int"``, ``"array<double>"``.
    cardinality : int or None
        One more than the largest number that it can hold, for columns of category numbers from 0
        on; the number of rows of an embedding.
    length : int or None
        Of its arrays, if all have the same.
    """

    kind: str
    cardinality: int | None = None
    length: int | None = None


Schema = Mapping[str, Field]
State = Mapping[str, Any]


class Function(ABC):
    """What happens to the cells of one column, or of several ones in the same row.

    Attributes
    ----------
    is_costly : bool
        Whether it pays to look for the different values of an array first.
    """

    is_costly: ClassVar[bool] = False

    @abstractmethod
    def array(self, *values: pa.Array) -> pa.Array:
        """The results for arrays of the same length."""

    @abstractmethod
    def value(self, *values: Any) -> Any:
        """The result for one row; None is null."""


@dataclass(frozen=True)
class Cell:
    """A column that a step makes.

    Attributes
    ----------
    inputs : tuple of str
    output : str
    field : Field
    function : Function or None
        None if the column is only called differently.
    """

    inputs: tuple[str, ...]
    output: str
    field: Field
    function: Function | None


@dataclass(frozen=True)
class Step(ABC):
    """One recorded method; see the module for its life.

    Attributes
    ----------
    method : str
        Of :class:`FeaturePipeline`.
    is_row_wise : bool
        Whether each row has one result that depends on no other row.  Others run on Spark, and by
        ``arrow`` if they are a :class:`GroupStep`.
    """

    method: ClassVar[str]
    is_row_wise: ClassVar[bool] = True

    def arguments(self) -> dict[str, Any]:
        """The arguments of the method, which are values of JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def reads(self) -> Sequence[str] | None:
        """The columns that its arguments name, also those that it only learns from.

        None if they name none, which means all that fit.
        """
        columns = getattr(self, "columns", ())
        return None if columns is None else list(columns)

    def requests(self, before: Schema) -> dict[str, Request]:
        """What to learn from the data, by names of its own; raises where a column does not fit."""
        return {}

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        """The state that follows from the answers to :meth:`requests`."""
        return {}

    def hides_columns(self, before: Schema) -> bool:
        """Whether it cannot say before it has learned which columns it makes."""
        return False

    @abstractmethod
    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        """The columns that it makes; without a state the functions may be None."""

    def after(self, before: Schema, state: State | None) -> Schema:
        """The fields of all columns behind it, in their order."""
        made = {cell.output: cell.field for cell in self.cells(before, state)}
        return {**{name: made.get(name, each) for name, each in before.items()}, **made}

    @abstractmethod
    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        """The step on a DataFrame, which may lack columns that the step does not read."""

    def pays_in_batches(self, state: State) -> bool:
        """Whether ``catalyst`` is slower than a way through Arrow batches and back."""
        return False

    def training(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        """:meth:`catalyst` on the very rows that the state was learned from."""
        return self.catalyst(df, before, state)


class GroupStep(Step):
    """A step that looks at the rows with the same value in a column, and at no others."""

    @property
    @abstractmethod
    def key(self) -> str:
        """The column."""

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """All columns that it reads."""

    def check_rows(self, table: pa.Table) -> None:
        """Refuse rows that it cannot work on; they need not belong together."""

    @abstractmethod
    def of_groups(self, table: pa.Table) -> Iterator[pa.Table]:
        """What it makes of all rows with some values in the column, in their order."""


@dataclass(frozen=True)
class Fitted:
    """A step with the fields before it and its state."""

    step: Step
    before: Schema
    state: State = field(default_factory=dict)

    @cached_property
    def cells(self) -> list[Cell]:
        return self.step.cells(self.before, self.state)

    @cached_property
    def after(self) -> Schema:
        return self.step.after(self.before, self.state)

    @property
    def inputs(self) -> list[str]:
        """The columns that have to be there."""
        return list(
            dict.fromkeys(
                name for cell in self.cells if cell.function is not None for name in cell.inputs
            )
        )


def executors_of(step: Step) -> tuple[str, ...]:
    """The executors that a step runs by."""
    if step.is_row_wise:
        return "catalyst", "arrow", "row"
    return ("catalyst", "arrow") if isinstance(step, GroupStep) else ("catalyst",)


def inputs_of(fitted: Sequence[Fitted]) -> list[str]:
    """The columns of the data that some step reads."""
    needed: set[str] = set()
    for each in reversed(fitted):
        renamed = {cell.output: cell.inputs[0] for cell in each.cells if cell.function is None}
        kept = needed - {cell.output for cell in each.cells}
        needed = kept | {renamed[name] for name in needed & set(renamed)} | set(each.inputs)
    return [name for name in (fitted[0].before if fitted else ()) if name in needed]


def check_schema(found: Schema, wanted: Schema, needed: Sequence[str]) -> None:
    """Check that data have the columns that a pipeline reads, of the types at ``fit``."""
    missing = [name for name in needed if name not in found]
    if missing:
        raise UsageError(
            f"{missing} do not exist in this Table, whose columns are {list(found)}; the pipeline "
            "reads them"
        )
    for name in needed:
        if found[name].kind != wanted[name].kind:
            raise UsageError(
                f"The column {name} was {wanted[name].kind} when the pipeline learned, and is now "
                f"{found[name].kind}; cast it first"
            )


def require_fields(before: Schema, columns: Sequence[str]) -> None:
    """Check that all columns exist."""
    missing = [name for name in dict.fromkeys(columns) if name not in before]
    if missing:
        raise UsageError(f"{missing} do not exist in this Table, whose columns are {list(before)}")
