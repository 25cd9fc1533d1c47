"""What steps ask about the data, each request about one or several columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Counts", "Extremes", "Outcome", "Quantiles", "Request", "TargetSums"]


@dataclass(frozen=True)
class Request:
    """A question; executors replace the columns by the names that these have for them.

    Attributes
    ----------
    columns : tuple of str
    """

    columns: tuple[str, ...]


@dataclass(frozen=True)
class Counts(Request):
    """How often each value occurs in the columns together, without nulls.

    The answer is a table of Arrow with the columns ``value`` and ``count`` (int64), in no order.

    Attributes
    ----------
    separator : str or None
        Between the several values of a cell.
    at_least : int
        Leave out values that occur less often.
    """

    separator: str | None = None
    at_least: int = 0


@dataclass(frozen=True)
class Extremes(Request):
    """The smallest and the largest value of a column of numbers, without nulls and NaN.

    The answer is a pair of float, or of int for whole numbers, or (None, None).

    Attributes
    ----------
    is_finite : bool
        Leave out infinite values too.
    """

    is_finite: bool = False


@dataclass(frozen=True)
class Quantiles(Request):
    """Values of a column of numbers at shares of the rows, without nulls and NaN.

    The answer is a list of float, exact to a thousandth of the rows; empty if there is no value.

    Attributes
    ----------
    shares : tuple of float
    """

    shares: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class TargetSums(Request):
    """Rows, sums and counts of targets for each combination of values; nulls make none.

    The columns are those of the categories, then those of the targets.  The answer is a table of
    Arrow with the columns ``key_<i>``, ``rows``, ``sum_<j>`` and ``count_<j>``, in no order; the
    combination of nulls, if there is one, is in it too.

    Attributes
    ----------
    targets : int
        How many of the columns are targets.
    """

    targets: int = 1


@dataclass(frozen=True)
class Outcome(Request):
    """The columns behind a step that only runs on tables of Spark.

    The answer is a dict from their names to their kinds.

    Attributes
    ----------
    step : TableStep
    """

    step: Any = None
