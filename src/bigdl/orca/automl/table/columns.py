"""Columns of a table as arrays: numbers, codes of categories, and the target."""

from __future__ import annotations

import decimal
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import input_type_of, is_path
from bigdl.runtime.shards.columns import quoted
from bigdl.runtime.shards.values import is_frame

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

logger = logging.getLogger("bigdl.orca")

NUMBER, CATEGORY, DATE = "number", "category", "date"
BINARY, MULTICLASS, REGRESSION = "binary", "multiclass", "regression"
TASKS = (BINARY, MULTICLASS, REGRESSION)

_NUMBERS = ("floating", "integer", "mixed-integer-float", "decimal", "boolean", "empty")
_DATES = ("datetime64", "datetime", "date")
_TEXTS = ("string", "mixed-integer", "categorical")
_LABELS = (str, bool, int, float, decimal.Decimal)
_MOST_CLASSES = 20  # integers with more distinct values are the target of a regression


def read_frame(data: object, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Read a table into a pandas DataFrame of this process.

    Parameters
    ----------
    data : pandas.DataFrame, pyspark.sql.DataFrame or str
        A path is of a CSV file, of Parquet files, or of a Delta or Iceberg table.
    columns : sequence of str, optional
        Columns to read, by default all.

    Raises
    ------
    UsageError
        If the type is not supported, or a column or file is missing.
    """
    if is_frame(data):
        frame = cast("pd.DataFrame", data)
    elif is_spark_frame(data):
        data = cast("DataFrame", data)
        check_columns(data.columns, columns)
        return (data if columns is None else data.select(*map(quoted, columns))).toPandas()
    elif is_path(data):
        frame = _read_path(data)
    else:
        raise UsageError(
            f"data must be a pandas or Spark DataFrame, or the path of a CSV file, Parquet files "
            f"or a lake table, got {input_type_of(data)}",
            code="data-type",
            argument="data",
        )
    check_columns(list(frame.columns), columns)
    return frame if columns is None else frame[list(columns)]


def is_spark_frame(data: object) -> bool:
    """Return True for a DataFrame of Spark or Spark Connect."""
    return not is_path(data) and input_type_of(data) == "Spark DataFrame"


def _read_path(path: object) -> pd.DataFrame:
    if str(path).lower().endswith((".csv", ".csv.gz")):
        import pandas as pd

        try:
            return pd.read_csv(str(path))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"The file {str(path)!r} cannot be read: {error}", code="path-unusable", path=path
            ) from error
    from bigdl.data.lake_tables import open_table
    from bigdl.orca.data.lake_tables.frames import pandas_frame

    return pandas_frame(open_table(path))


def check_columns(
    known: Sequence[str], wanted: Sequence[str] | None, argument: str | None = "data"
) -> None:
    """Raise a UsageError of `argument` if the columns `known` of the data lack one of `wanted`."""
    missing = [each for each in wanted or () if each not in set(known)]
    if missing:
        raise UsageError(
            f"data has no column {missing[0]!r}; its columns are {list(known)}",
            code="column-missing",
            column=missing[0],
            argument=argument,
        )


# Features ----------------------------------------------------------------------------------------


@dataclass
class MatrixRows:
    """Rows of a table as two matrices.

    Attributes
    ----------
    numbers : ndarray of shape (n, columns), float32
        NaN for missing values.
    codes : ndarray of shape (n, columns), int32
        Indices of categories; -1 for missing and unknown values.
    """

    numbers: np.ndarray
    codes: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, indices: np.ndarray) -> MatrixRows:
        """Return the rows at some indices."""
        return MatrixRows(self.numbers[indices], self.codes[indices])


@dataclass
class TableFeatures:
    """Feature columns of a table: their names, types and categories.

    Types and categories describe how values are stored. Which categories a model knows is
    decided by the rows that it is trained on.

    Attributes
    ----------
    types : dict of str to {"number", "category", "date"}
        By column name. A date becomes four numbers.
    categories : dict of str to list of str
        Texts of each category column.
    """

    types: dict[str, str]
    categories: dict[str, list[str]]

    @classmethod
    def of(
        cls, frame: pd.DataFrame, names: Sequence[str], categorical: Sequence[str]
    ) -> TableFeatures:
        """Determine the types of columns from their values.

        Raises
        ------
        UsageError
            If a column has values that are no number, text, boolean or date.
        """
        types = {n: CATEGORY if n in categorical else _type_of(frame[n], n) for n in names}
        categories = {n: _texts_of(frame[n]) for n, each in types.items() if each == CATEGORY}
        return cls(types, categories)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.types)

    @property
    def category_counts(self) -> list[int]:
        """Number of categories of each column of :attr:`MatrixRows.codes`."""
        return [len(each) for each in self.categories.values()]

    def encode(self, frame: pd.DataFrame) -> MatrixRows:
        """Convert rows to matrices.

        Raises
        ------
        UsageError
            If a column is missing, or its values have another type or are infinite.
        """
        check_columns(list(frame.columns), self.names)
        numbers: list[np.ndarray] = []
        for name, each in self.types.items():
            if each == NUMBER:
                numbers.append(_numbers_of(frame[name], name))
            elif each == DATE:
                numbers += _date_parts(frame[name], name)
        codes = [_codes_of(frame[name], texts) for name, texts in self.categories.items()]
        empty = np.empty((len(frame), 0))
        return MatrixRows(
            np.ascontiguousarray(np.stack(numbers, 1) if numbers else empty, np.float32),
            np.ascontiguousarray(np.stack(codes, 1) if codes else empty, np.int32),
        )


def _type_of(column: pd.Series, name: str) -> str:
    import pandas as pd

    inferred = pd.api.types.infer_dtype(column, skipna=True)
    for column_type, known in ((NUMBER, _NUMBERS), (DATE, _DATES), (CATEGORY, _TEXTS)):
        if inferred in known:
            return column_type
    raise UsageError(
        f"Column {name!r} has values of type {inferred}; a table takes numbers, texts, booleans "
        "and dates, so convert it or name the others in feature_cols",
        code="data-type",
        column=name,
    )


def _text(value: object) -> str:
    """Return the text of a category; 1.0 is 1, since integers with nulls become floats."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _texts_of(column: pd.Series) -> list[str]:
    return sorted({_text(value) for value in column.dropna().unique()})


def _codes_of(column: pd.Series, texts: list[str]) -> np.ndarray:
    import pandas as pd

    codes, values = pd.factorize(column)
    known = {text: index for index, text in enumerate(texts)}
    table = [known.get(_text(value), -1) for value in values]
    return np.array([*table, -1], np.int32)[codes]  # the code of a missing value is -1


def _numbers_of(column: pd.Series, name: str) -> np.ndarray:
    import pandas as pd

    if column.dtype.kind in "mM" or isinstance(column.dtype, pd.PeriodDtype):
        raise _other_values(name, "numbers", f"got {column.dtype}")
    try:
        values = pd.to_numeric(column).to_numpy("float64", na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise _other_values(name, "numbers", str(error)) from error
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if np.isinf(numbers).any():
        raise UsageError(
            f"Column {name!r} has infinite values; replace them, for example by nulls, which are "
            "missing values",
            code="data-value",
            column=name,
        )
    return numbers


def _other_values(name: str, expected: str, problem: str) -> UsageError:
    """Return the error of a column whose values have another type than expected."""
    return UsageError(
        f"Column {name!r} needs {expected}: {problem}; convert it",
        code="data-type",
        column=name,
    )


def _date_parts(column: pd.Series, name: str) -> list[np.ndarray]:
    import pandas as pd

    if pd.api.types.infer_dtype(column, skipna=True) in _NUMBERS and column.notna().any():
        raise _other_values(name, "dates", f"got {column.dtype}")
    try:
        dates = pd.to_datetime(column, utc=True)
    except (TypeError, ValueError) as error:
        raise _other_values(name, "dates", str(error)) from error
    days = (dates - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
    parts: list[pd.Series] = [days, dates.dt.month, dates.dt.day_of_week, dates.dt.hour]
    return [part.to_numpy("float32", na_value=np.nan) for part in parts]


# The target --------------------------------------------------------------------------------------


@dataclass
class TableTarget:
    """Target column of a table.

    Attributes
    ----------
    name : str
    task : {"binary", "multiclass", "regression"}
    classes : list
        Labels of the classes in sorted order; empty for a regression.
    """

    name: str
    task: str
    classes: list[Any]

    @classmethod
    def of(cls, column: pd.Series, task: str | None) -> TableTarget:
        """Determine the task of a target column, unless it is given, and its classes.

        Raises
        ------
        UsageError
            If labels are null or neither texts, booleans nor numbers, there is only one class,
            or the labels do not fit the task.
        """
        name = str(column.name)
        nulls = int(column.isna().sum())
        if nulls:
            raise UsageError(
                f"Column {name!r} has {nulls} rows without a label; drop them, for example with "
                "dropna",
                code="data-null",
                column=name,
            )
        if task is None:
            task = _task_of(column)
            logger.info("The task is %s; task= overrides it", task)
        if task == REGRESSION:
            _numbers_of(column, name)
            return cls(name, task, [])
        values = [_python_value(value) for value in column.unique()]
        others = [value for value in values if not isinstance(value, _LABELS)]
        if others:
            raise UsageError(
                f"Column {name!r} has the label {others[0]!r}; labels are texts, booleans or "
                "numbers, so convert it, for example with astype(str)",
                code="data-type",
                column=name,
            )
        classes = sorted(values, key=lambda value: (str(type(value)), value))
        if len(classes) < 2 or (task == BINARY and len(classes) > 2):
            raise UsageError(
                f"Column {name!r} has {len(classes)} different values, which is not a {task} "
                "target; pass another task or label",
                code="data-value",
                column=name,
                argument="task",
            )
        return cls(name, task, classes)

    @property
    def is_classification(self) -> bool:
        """True if the labels are classes."""
        return self.task != REGRESSION

    def encode(self, column: pd.Series) -> np.ndarray:
        """Convert labels to class indices, or to floats for a regression.

        Raises
        ------
        UsageError
            If a label is null, or is not one of the classes.
        """
        if not self.is_classification:
            return _numbers_of(column, self.name).astype(np.float64)
        known = {value: index for index, value in enumerate(self.classes)}
        labels = [_python_value(value) for value in column]
        unknown = [value for value in labels if value not in known]
        if unknown:
            raise UsageError(
                f"Column {self.name!r} has the label {unknown[0]!r}, which is not one of the "
                f"classes {self.classes}",
                code="data-value",
                column=self.name,
            )
        return np.array([known[value] for value in labels], np.int64)

    def decode(self, scores: np.ndarray) -> np.ndarray:
        """Convert probabilities to labels; return the values of a regression unchanged."""
        if not self.is_classification:
            return scores
        labels = np.empty(len(self.classes), object)
        labels[:] = self.classes
        chosen = labels[scores.argmax(axis=1)]
        types = {type(value) for value in self.classes}
        return chosen.astype(types.pop()) if types in ({int}, {float}, {bool}) else chosen


def _python_value(value: object) -> object:
    return value.item() if hasattr(value, "item") else value


def _task_of(column: pd.Series) -> str:
    import pandas as pd

    count = column.nunique()
    inferred = pd.api.types.infer_dtype(column, skipna=True)
    if inferred in ("floating", "decimal", "mixed-integer-float"):
        is_class = count <= _MOST_CLASSES and bool((column.astype(float) % 1 == 0).all())
    else:
        is_class = inferred != "integer" or count <= _MOST_CLASSES
    if not is_class:
        return REGRESSION
    return BINARY if count <= 2 else MULTICLASS
