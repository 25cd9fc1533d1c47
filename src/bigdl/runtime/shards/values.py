"""From arrays and frames in memory to the columns of a shard.

Data comes in one of two forms.

*structured*
    ``{"x": ..., "y": ...}``, ``(x, y)`` or several arrays of which the last is the target; ``x``
    and ``y`` are an array or a tuple or list of them, and each (or a part of it) may be a dict of
    arrays, which the model or its loss gets as a dict. The columns are called ``x[0]``, ``x[1]``,
    ... and ``y[0]``, ..., and every shard names them itself.
*named*
    A pandas frame, or a dict of arrays, with `feature_cols` and `label_cols`. A cell may be an
    array: those of a column have equal shapes.

Floating values get the dtype of ``config["dtype"]`` like those of a Spark DataFrame; whole numbers
and booleans keep theirs, but for unsigned ones of more than 8 bits, which torch cannot compute
with and which become signed ones that hold them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import TEXT, are_texts, name_of_dtype, text_array

_ROLE = re.compile(r"(?P<role>[xy])\[(?P<place>[0-9]+)\]")
_SIGNED = {2: "int32", 4: "int64", 8: "int64"}

Column = tuple[str, str | None, np.ndarray]  # name, key of a dict, values


def structured_columns(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of the columns of structured data, those of the model and the targets."""
    matches = [m for name in names if (m := _ROLE.fullmatch(name))]
    matches.sort(key=lambda m: int(m["place"]))
    x, y = ([m[0] for m in matches if m["role"] == role] for role in "xy")
    return x, y


def is_frame(data: object) -> bool:
    """Return True for a pandas DataFrame; does not import pandas."""
    return any(
        c.__name__ == "DataFrame" and c.__module__.split(".")[0] == "pandas"
        for c in type(data).__mro__
    )


def columns_of(
    data: Any,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str] | None,
    floats: str | None,
    *,
    with_labels: bool = True,
    texts: bool = False,
    missing: Collection[str] = (),
) -> list[Column]:
    """The columns of data in memory, all of as many rows.

    Parameters
    ----------
    data : pandas.DataFrame, dict, tuple, list or ndarray
    feature_cols, label_cols : sequence of str, optional
        For named data.
    floats : str or None
        dtype of floating values; None leaves it to them.
    with_labels : bool
        False takes all arrays of a tuple for features, and leaves ``"y"`` out.
    texts : bool
        Whether arrays may hold texts, see :mod:`bigdl.runtime.shards.texts`.
    missing : collection of str
        Columns of frames whose nulls become NaN.

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
                _spoken(name, key),
                floats,
                texts=texts,
            ),
        )
        for name, key, values in entries
    ]
    sizes = {len(values) for _, _, values in columns}
    if len(sizes) > 1:
        rows = ", ".join(f"{_spoken(n, k)}: {len(v)}" for n, k, v in columns)
        raise SourceError(
            f"The arrays must be of equal numbers of rows, they have {rows}", code="data-shape"
        )
    return columns


def _named(data: Any, names: Sequence[str]) -> list[tuple[str, str | None, Any]]:
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
    has = list(data.columns) if is_frame(data) else list(data)
    for name in names:
        if name not in has:
            raise SourceError(
                f"There is no column '{name}'; there are {has}",
                code="column-missing",
                column=name,
                columns=has,
            )
        if is_frame(data) and getattr(data[name], "ndim", 1) != 1:
            raise SourceError(
                f"There is more than one column '{name}'; rename one first",
                code="column-duplicate",
                column=name,
            )
    return [(name, None, data[name]) for name in dict.fromkeys(names)]


def _structured(data: Any, with_labels: bool) -> list[tuple[str, str | None, Any]]:
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


def _parts(values: Any) -> Sequence[Any]:
    return values if isinstance(values, tuple | list) else [values]


def _entries(name: str, values: Any) -> list[tuple[str, str | None, Any]]:
    if isinstance(values, dict):
        return [(name, str(key), values[key]) for key in sorted(values, key=str)]
    return [(name, None, values)]


def _spoken(name: str, key: str | None) -> str:
    return f"'{name}'" if key is None else f"'{name}[{key!r}]'"


def as_array(values: Any, name: str, floats: str | None, *, texts: bool = False) -> np.ndarray:
    """Values as an array of a dtype that torch has.

    Parameters
    ----------
    values : ndarray, tensor, pandas.Series or pandas.DataFrame
        The columns of a frame become those of one array.
    name : str
        For messages.
    floats : str or None
    texts : bool
        Whether they may be texts.
    """
    if is_frame(values):
        parts = [
            as_array(values.iloc[:, place], f"{name}, column {column!r},", floats)
            for place, column in enumerate(values.columns)
        ]
        if not parts:
            raise SourceError(f"{name} is a DataFrame without columns", code="data-empty")
        values = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().numpy()
    elif hasattr(values, "isna"):  # a Series, whose nulls may be of any kind
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
        values = _stacked(values, name)
    if texts and are_texts(values):
        return text_array(values, name)
    if 0 in values.shape[1:]:
        raise SourceError(f"{name} holds empty arrays; leave it out", code="data-empty")
    kind = values.dtype.kind
    if kind not in "biufc":
        raise SourceError(
            f"{name} has type {values.dtype}, which cannot become a tensor; encode it as numbers "
            "first",
            code="data-dtype",
        )
    if kind == "f" and floats is not None:
        return cast("npt.NDArray[Any]", values.astype(floats, copy=False))
    if kind == "u" and values.itemsize > 1:
        if values.itemsize == 8 and len(values) and int(values.max()) >= 2**63:
            raise SourceError(f"{name} holds {values.max()}, which is no int64", code="data-value")
        return cast("npt.NDArray[Any]", values.astype(_SIGNED[values.itemsize]))
    if not values.dtype.isnative:
        return cast("npt.NDArray[Any]", values.astype(values.dtype.newbyteorder("=")))
    return cast("npt.NDArray[Any]", values)


def _from_series(series: Any, name: str) -> npt.NDArray[Any]:
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


def _with_nan(values: Any) -> Any:
    """Return a Series whose nulls are NaN; what is no Series of numbers with nulls stays."""
    if not hasattr(values, "isna") or getattr(values, "ndim", 0) != 1 or not values.isna().any():
        return values
    try:
        return values.astype("Float64").to_numpy(dtype="float64", na_value=np.nan)
    except (TypeError, ValueError):
        return values  # texts and arrays are refused by their own sentence


def _stacked(cells: Any, name: str) -> npt.NDArray[Any]:
    """The arrays in the cells of a column, as one array."""
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
    """Columns as the arrays of a shard: scalar ones of one dtype become one matrix."""
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


def arrays_of(data: Any) -> Iterator[Any]:
    """The arrays of nested tuples, lists and dicts."""
    if isinstance(data, dict):
        for value in data.values():
            yield from arrays_of(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from arrays_of(value)
    else:
        yield data


def map_arrays(data: Any, func: Callable[[Any], Any]) -> Any:
    """A container like `data` of ``func(array)``."""
    if isinstance(data, dict):
        return {key: map_arrays(value, func) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_arrays(value, func) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_arrays(value, func) for value in data)
    return func(data)


def split_evenly(rows: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of `parts` ranges of `rows` rows, as equal as can be, the larger ones first."""
    size, larger = divmod(rows, parts)
    ends = [i * size + min(i, larger) for i in range(parts + 1)]
    return list(itertools.pairwise(ends))


def join_shards(parts: Sequence[Any], join: Callable[[Sequence[Any]], Any] | None = None) -> Any:
    """Return one container of the arrays of `parts`, joined by :func:`numpy.concatenate`."""
    join = join or np.concatenate
    first = parts[0]
    if isinstance(first, dict):
        return {key: join_shards([part[key] for part in parts], join) for key in first}
    if isinstance(first, list | tuple):
        joined = [join_shards(each, join) for each in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return join(parts)
