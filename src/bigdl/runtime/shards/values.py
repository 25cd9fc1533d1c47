"""Conversion of in-memory arrays and frames to the columns of a shard.

Data has one of two forms.

*structured*
    ``{"x": ..., "y": ...}``, ``(x, y)`` or several arrays with the target last. ``x`` and ``y`` are
    an array, or a tuple or list of arrays. Each of them (or a part) may be a dict of arrays, which
    the model or its loss receives as a dict. The columns are named ``x[0]``, ``x[1]``, ... and
    ``y[0]``, ...; every shard has the names.
*named*
    A pandas frame, or a dict of arrays, with `feature_cols` and `label_cols`. Cells may be arrays
    of equal shapes within a column.

Floating-point values get the dtype of ``config["dtype"]``, as in a Spark DataFrame. Integers and
booleans keep their dtype. Unsigned integers of more than 8 bits, which torch does not support,
become signed integers that can hold them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import TEXT, are_texts, name_of_dtype, text_array

if TYPE_CHECKING:
    import pandas as pd

_ROLE = re.compile(r"(?P<role>[xy])\[(?P<index>[0-9]+)\]")
_SIGNED = {2: "int32", 4: "int64", 8: "int64"}

T = TypeVar("T")
Column = tuple[str, str | None, np.ndarray]  # name, key of a dict, values


def structured_columns(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the feature names ``x[i]`` and the target names ``y[i]`` in `names`, sorted by i."""
    matches = [m for name in names if (m := _ROLE.fullmatch(name))]
    matches.sort(key=lambda m: int(m["index"]))
    x, y = ([m[0] for m in matches if m["role"] == role] for role in "xy")
    return x, y


def is_frame(data: object) -> bool:
    """Return True for a pandas DataFrame without importing pandas."""
    return any(
        c.__name__ == "DataFrame" and c.__module__.split(".")[0] == "pandas"
        for c in type(data).__mro__
    )


def columns_of(
    data: object,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str] | None,
    floats: str | None,
    *,
    with_labels: bool = True,
    texts: bool = False,
    missing: Collection[str] = (),
) -> list[Column]:
    """Convert in-memory data to columns with equal numbers of rows.

    Parameters
    ----------
    data : pandas.DataFrame, dict, tuple, list or ndarray
    feature_cols, label_cols : sequence of str, optional
        Column names, for named data.
    floats : str or None
        dtype of floating-point values; None keeps theirs.
    with_labels : bool
        False treats all arrays of a tuple as features, and ignores ``"y"``.
    texts : bool
        Whether arrays may contain texts, see :mod:`bigdl.runtime.shards.texts`.
    missing : collection of str
        Frame columns whose nulls become NaN.

    Raises
    ------
    SourceError
    """
    if is_frame(data) or feature_cols:
        entries = _named(data, [*(feature_cols or ()), *(label_cols or ())])
    else:
        entries = _structured(data, with_labels)
    columns = [
        (
            name,
            key,
            as_array(
                _with_nan(values) if name in missing else values,
                _display_name(name, key),
                floats,
                texts=texts,
            ),
        )
        for name, key, values in entries
    ]
    sizes = {len(values) for _, _, values in columns}
    if len(sizes) > 1:
        rows = ", ".join(f"{_display_name(n, k)}: {len(v)}" for n, k, v in columns)
        raise SourceError(
            f"The arrays must be of equal numbers of rows, they have {rows}", code="data-shape"
        )
    return columns


def _named(data: Any, names: Sequence[str]) -> list[tuple[str, str | None, Any]]:
    """Return the selected columns of a frame or dict as (name, None, values)."""
    if not names:
        raise SourceError(
            "feature_cols is required for a pandas DataFrame; pass the names of the columns that "
            f"the model takes, of {list(data.columns)}",
            code="argument-missing",
            argument="feature_cols",
            columns=list(data.columns),
        )
    if not (is_frame(data) or isinstance(data, dict)):
        raise SourceError(
            "feature_cols belongs to a pandas DataFrame or to a dict of arrays, got "
            f"{type(data).__name__}",
            code="argument-conflict",
            argument="feature_cols",
        )
    existing = list(data.columns) if is_frame(data) else list(data)
    for name in names:
        if name not in existing:
            raise SourceError(
                f"There is no column '{name}'; there are {existing}",
                code="column-missing",
                column=name,
                columns=existing,
            )
        if is_frame(data) and getattr(data[name], "ndim", 1) != 1:
            raise SourceError(
                f"There is more than one column '{name}'; rename one first",
                code="column-duplicate",
                column=name,
            )
    return [(name, None, data[name]) for name in dict.fromkeys(names)]


def _structured(data: object, with_labels: bool) -> list[tuple[str, str | None, Any]]:
    """Return the arrays of tuples, lists and dicts ``{"x", "y"}`` as (name, dict key, values)."""
    x, y = data, None
    if isinstance(data, dict):
        if "x" not in data:
            raise SourceError(
                'A dict must hold the features as "x" (and the targets as "y"), or feature_cols '
                f"must name some of its arrays; it has {list(data)}",
                code="data-structure",
            )
        x, y = data["x"], data.get("y")
    elif isinstance(data, tuple | list) and with_labels:
        if len(data) < 2:
            raise SourceError(
                "A tuple of arrays must end with the targets, as (x, y); this one has "
                f"{len(data)} entries",
                code="data-structure",
            )
        *features, y = data
        x = features[0] if len(features) == 1 else features
    out = [entry for i, each in enumerate(_parts(x)) for entry in _entries(f"x[{i}]", each)]
    if y is not None and with_labels:
        out += [entry for i, each in enumerate(_parts(y)) for entry in _entries(f"y[{i}]", each)]
    if not out:
        raise SourceError("There is no array of features in the data", code="data-structure")
    return out


def _parts(values: object) -> Sequence[Any]:
    return values if isinstance(values, tuple | list) else [values]


def _entries(name: str, values: object) -> list[tuple[str, str | None, Any]]:
    if isinstance(values, dict):
        return [(name, str(key), values[key]) for key in sorted(values, key=str)]
    return [(name, None, values)]


def _display_name(name: str, key: str | None) -> str:
    return f"'{name}'" if key is None else f"'{name}[{key!r}]'"


def as_array(values: Any, name: str, floats: str | None, *, texts: bool = False) -> np.ndarray:
    """Convert values to an array of a dtype that torch supports.

    Parameters
    ----------
    values : ndarray, tensor, pandas.Series or pandas.DataFrame
        A frame becomes a matrix of its columns.
    name : str
        Name in messages.
    floats : str or None
    texts : bool
        Whether texts are allowed.
    """
    if is_frame(values):
        parts = [
            as_array(values.iloc[:, index], f"{name}, column {column!r},", floats)
            for index, column in enumerate(values.columns)
        ]
        if not parts:
            raise SourceError(f"{name} is a DataFrame without columns", code="data-empty")
        values = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().numpy()
    elif hasattr(values, "isna"):  # a Series, with any null representation
        values = _from_series(values, name)
    elif not isinstance(values, np.ndarray):
        raise SourceError(
            f"{name} must be a numpy array, got {type(values).__name__}; convert it "
            "with np.asarray",
            code="data-type",
        )
    if values.ndim == 0:
        raise SourceError(f"{name} has no rows: it is a single value", code="data-shape")
    if values.dtype == object and not (texts and are_texts(values)):
        values = _stack_cells(values, name)
    if texts and are_texts(values):
        return text_array(values, name)
    if 0 in values.shape[1:]:
        raise SourceError(f"{name} holds empty arrays; leave it out", code="data-empty")
    dtype_kind = values.dtype.kind
    if dtype_kind not in "biufc":
        raise SourceError(
            f"{name} has type {values.dtype}, which cannot become a tensor; encode it as numbers "
            "first",
            code="data-dtype",
        )
    if dtype_kind == "f" and floats is not None:
        return cast("npt.NDArray[Any]", values.astype(floats, copy=False))
    if dtype_kind == "u" and values.itemsize > 1:
        if values.itemsize == 8 and len(values) and int(values.max()) >= 2**63:
            raise SourceError(f"{name} holds {values.max()}, which is no int64", code="data-value")
        return cast("npt.NDArray[Any]", values.astype(_SIGNED[values.itemsize]))
    if not values.dtype.isnative:
        return cast("npt.NDArray[Any]", values.astype(values.dtype.newbyteorder("=")))
    return cast("npt.NDArray[Any]", values)


def _from_series(series: pd.Series, name: str) -> npt.NDArray[Any]:
    if isinstance(series.dtype, np.dtype):
        return cast("npt.NDArray[Any]", series.to_numpy())
    nulls = int(series.isna().sum())
    if nulls:
        raise SourceError(
            f"Column {name} holds nulls ({nulls} of {len(series)}); fill or drop them",
            code="data-null",
        )
    inner = getattr(series.dtype, "numpy_dtype", None)
    return cast(
        "npt.NDArray[Any]",
        series.to_numpy(dtype=inner) if isinstance(inner, np.dtype) else series.to_numpy(),
    )


def _with_nan(values: Any) -> object:
    """Convert a numeric Series with nulls to an array with NaN; return other values as is."""
    if not hasattr(values, "isna") or getattr(values, "ndim", 0) != 1 or not values.isna().any():
        return values
    try:
        return values.astype("Float64").to_numpy(dtype="float64", na_value=np.nan)
    except (TypeError, ValueError):
        return values  # later checks refuse texts and arrays


def _stack_cells(cells: Any, name: str) -> npt.NDArray[Any]:
    """Stack the arrays in the cells of a column into one array."""
    cells = cells.reshape(-1) if cells.ndim == 1 else list(cells)
    arrays = []
    for cell in cells:
        if cell is None:
            raise SourceError(
                f"Column {name} holds nulls; fill or drop them first", code="data-null"
            )
        if isinstance(cell, str | bytes):
            raise SourceError(
                f"{name} holds strings, which cannot become a tensor; encode them as numbers first",
                code="data-dtype",
            )
        arrays.append(np.asarray(cell.toArray() if hasattr(cell, "toArray") else cell))
    shapes = list(dict.fromkeys(a.shape for a in arrays))
    if len(shapes) > 1:
        raise SourceError(
            f"Column {name} holds arrays of different shapes ({shapes[0]} and {shapes[1]}); pad or "
            "cut them to one shape first",
            code="data-shape",
        )
    stacked = np.stack(arrays) if arrays else np.empty(0)
    if stacked.dtype == object and not are_texts(stacked):
        raise SourceError(
            f"{name} holds values of {type(cells[0]).__name__}, which are no numbers",
            code="data-dtype",
        )
    return stacked


def grouped(columns: Sequence[Column]) -> tuple[list[ArraySpec], list[np.ndarray]]:
    """Group columns into a shard's arrays: scalar columns of one dtype become one matrix."""
    alike: dict[Any, list[Column]] = {}
    for i, (name, key, values) in enumerate(columns):
        scalar = values.ndim == 1 and key is None and values.dtype.kind != TEXT
        alike.setdefault(values.dtype.name if scalar else i, []).append((name, key, values))
    leaves, arrays = [], []
    for members in alike.values():
        names: str | tuple[str, ...]
        names, key, values = members[0]
        if len(members) > 1:
            names, key = tuple(m[0] for m in members), None
            values = np.stack([m[2] for m in members], axis=1)
        leaves.append(ArraySpec(names, key, name_of_dtype(values), values.shape[1:]))
        arrays.append(values)
    return leaves, arrays


# -- arrays in containers -------------------------------------------------------------------------


def arrays_of(data: object) -> Iterator[Any]:
    """Yield the arrays in nested tuples, lists and dicts."""
    if isinstance(data, dict):
        for value in data.values():
            yield from arrays_of(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from arrays_of(value)
    else:
        yield data


def map_arrays(data: object, func: Callable[[Any], Any]) -> Any:  # `data` with what `func` returns
    """Apply a function to the arrays of a container; return a container of equal structure."""
    if isinstance(data, dict):
        return {key: map_arrays(value, func) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_arrays(value, func) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_arrays(value, func) for value in data)
    return func(data)


def split_evenly(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return the bounds of `parts` nearly equal ranges of `rows` rows, larger ones first."""
    size, larger = divmod(rows, parts)
    ends = [i * size + min(i, larger) for i in range(parts + 1)]
    return list(itertools.pairwise(ends))


def join_shards(parts: Sequence[T], join: Callable[[Sequence[Any]], Any] | None = None) -> T:
    """Join the arrays of equally structured containers, by default with numpy.concatenate."""
    join = join or cast("Callable[[Sequence[Any]], Any]", np.concatenate)
    first: Any = parts[0]
    result: Any
    if isinstance(first, dict):
        containers = cast("Sequence[dict[Any, Any]]", parts)
        result = {key: join_shards([part[key] for part in containers], join) for key in first}
    elif isinstance(first, list | tuple):
        columns = zip(*cast("Sequence[Sequence[Any]]", parts), strict=True)
        joined = [join_shards(each, join) for each in columns]
        result = type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    else:
        result = join(parts)
    return cast("T", result)
