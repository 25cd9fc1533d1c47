"""Rows of a worker's spool as matrices of XGBoost.

XGBoost reads the spool in batches through its ``DataIter``, several times, and keeps only binned
values: in memory (``QuantileDMatrix``), or in a memory-mapped file next to the spool
(``ExtMemQuantileDMatrix``). Labels, weights and gradients stay in memory.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.common.memory import available_memory
from bigdl.nano.acceleration.trees import codes_of
from bigdl.runtime.shards.texts import is_text
from bigdl.runtime.shards.values import structured_columns

if TYPE_CHECKING:
    import xgboost

    from bigdl.runtime.shards.shard import Shard
    from bigdl.runtime.worker import Worker

BATCH_BYTES = 16 << 20
"""Size of a batch in float32. Each batch becomes a page, and very small pages are slow.

Measured with 1.5 million rows of 40 features: 64 MB need 49 MB more memory, and the same CPU time.
"""
_BINNED_BYTES = 5
"""Upper estimate of the memory of a binned value in a matrix with missing values."""
_MEMORY_SHARE = 4
"""Binned values use at most this part (one fourth) of the available memory."""

_BINARY = ("binary:logistic", "binary:logitraw", "binary:hinge", "binary")

Categories = dict[str, list[str]]


@dataclass(frozen=True)
class TreeColumns:
    """Names of the columns by role.

    Attributes
    ----------
    features : tuple of str or None
        None for arrays without names.
    labels : tuple of str
        Empty for arrays without names.
    weight, margin, group : str or None
    categorical : tuple of str
        Features that are categories.
    """

    features: tuple[str, ...] | None
    labels: tuple[str, ...]
    weight: str | None = None
    margin: str | None = None
    group: str | None = None
    categorical: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Source:
    """Consecutive matrix columns that one array of the shard contains."""

    start: int
    width: int
    array: int
    columns: slice | None  # None: the whole array
    name: str


class ShardMatrix:
    """Features and targets of a shard, read in batches of float32.

    Parameters
    ----------
    shard : Shard
    columns : TreeColumns
    categories : dict of str to list of str
        Texts of the categorical text columns; the position in the list is the code.
    widths : dict of str to int
        Number of matrix columns of each feature, also for a shard without rows.
    """

    def __init__(
        self, shard: Shard, columns: TreeColumns, categories: Categories, widths: dict[str, int]
    ):
        self._shard, self._columns, self._categories = shard, columns, categories
        self.rows = shard.rows
        features, labels = names_in(shard, columns)
        if not labels:
            raise UsageError(
                "The data has no labels; pass (x, y), or label_cols with the name of a column",
                code="argument-missing",
                argument="label_cols",
            )
        self.labels = labels
        self.widths = [widths[name] for name in features]
        self._sources: list[_Source] = []
        self.names: list[str] = []
        self.types: list[str] = []
        for name in features:
            self._add(name, widths[name])
        self._order: np.ndarray | None = None
        self._groups: np.ndarray | None = None
        if columns.group is not None:  # XGBoost requires ascending groups
            ids = self._values(columns.group)
            self._order = np.argsort(ids, kind="stable")
            sorted_ids = ids[self._order]
            self._groups = np.zeros(self.rows, np.int32)  # XGBoost's group ids have 32 bits
            self._groups[1:] = np.cumsum(sorted_ids[1:] != sorted_ids[:-1])

    def _add(self, name: str, width: int) -> None:
        (array, column) = self._shard.locate(name)[None]
        start, previous = len(self.names), self._sources[-1] if self._sources else None
        is_category = name in self._columns.categorical
        self.names += matrix_names(name, width)
        self.types += ["c" if is_category else "q"] * width
        if (
            column is not None
            and previous is not None
            and previous.array == array
            and previous.columns is not None
            and previous.columns.stop == column
        ):
            merged = slice(previous.columns.start, column + 1)
            self._sources[-1] = _Source(
                previous.start, previous.width + 1, array, merged, previous.name
            )
            return
        columns = None if column is None else slice(column, column + 1)
        self._sources.append(_Source(start, width, array, columns, name))

    @property
    def width(self) -> int:
        """Number of matrix columns."""
        return len(self.names)

    @property
    def names_are_positions(self) -> bool:
        """True for arrays, whose columns have no names."""
        return self._columns.features is None

    @property
    def nbytes(self) -> int:
        """Estimated size of the binned matrix in bytes."""
        return self.rows * self.width * _BINNED_BYTES

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last position of each batch; batches end at the end of a group."""
        size = max(1, BATCH_BYTES // (4 * max(1, self.width)))
        groups = self._groups
        low = 0
        while low < self.rows:
            high = min(self.rows, low + size)
            if groups is not None and high < self.rows:
                high = int(np.searchsorted(groups, groups[high - 1], side="right"))
            yield low, high
            low = high
        if not self.rows:  # XGBoost requires a batch
            yield 0, 0

    def batch(self, low: int, high: int, buffer: np.ndarray) -> dict[str, Any]:
        """Return the arguments of XGBoost's ``input_data`` for a batch.

        The features are written to `buffer`, of shape ``(at least high - low, width)``.
        """
        index: slice | np.ndarray = (
            slice(low, high) if self._order is None else self._order[low:high]
        )
        columns = self._columns
        block = buffer[: high - low]
        self._read_features(index, block)
        arguments: dict[str, Any] = {"data": block}
        if self.labels:
            labels = [self._values(name)[index] for name in self.labels]
            label = labels[0] if len(labels) == 1 else np.stack(labels, axis=1)
            arguments["label"] = np.ascontiguousarray(label, dtype=np.float32)
        for key, name in (("weight", columns.weight), ("base_margin", columns.margin)):
            if name is not None:
                arguments[key] = self._values(name)[index].astype(np.float32)
        if self._groups is not None:
            arguments["qid"] = groups = self._groups[low:high]
            if columns.weight is not None:  # XGBoost takes one weight per group
                starts = np.flatnonzero(np.diff(groups, prepend=-1))
                arguments["weight"] = arguments["weight"][starts]
        if columns.features is not None:
            arguments["feature_names"] = self.names
        arguments["feature_types"] = self.types
        return arguments

    def check_labels(self, params: dict[str, Any]) -> None:
        """Raise a UsageError for labels that the objective does not allow."""
        objective = params.get("objective")
        is_binary = objective in _BINARY
        is_multiclass = str(objective).startswith("multi")
        if not self.rows or not (is_binary or is_multiclass):
            return
        limit = 1 if is_binary else int(params.get("num_class", 1)) - 1
        for name in self.labels:
            values = self._values(name)
            low, high = values.min(), values.max()
            if not (low >= 0 and high <= limit):
                rule = "from 0 to 1" if is_binary else f"from 0 to num_class - 1 = {limit}"
                raise UsageError(
                    f"The labels of {objective} must be {rule}, but column '{name}' has values "
                    f"from {low:g} to {high:g}; encode the labels",
                    code="data-value",
                    column=name,
                )

    def _read_features(self, index: slice | np.ndarray, block: np.ndarray) -> None:
        rows = len(block)
        for source in self._sources:
            array = self._shard.arrays[source.array]
            values = array if source.columns is None else array[:, source.columns]
            values = values[index]
            if is_text(values.dtype.str.lstrip("|")):
                values = codes_of(values, self._categories[source.name])
            block[:, source.start : source.start + source.width] = values.reshape(
                rows, source.width
            )

    def _values(self, name: str) -> np.ndarray:
        """Return a target, weight, margin or group column."""
        values = self._shard.column(name)
        if isinstance(values, dict) or values.dtype.kind not in "biuf":
            raise UsageError(
                f"Column '{name}' holds {'maps' if isinstance(values, dict) else 'texts'}, but "
                "labels, weights, margins and groups must be numbers; encode it first",
                code="data-dtype",
                column=name,
            )
        return values[:, 0] if values.shape[1:] == (1,) else values


def matrix_names(name: str, width: int) -> list[str]:
    """Return the names of the matrix columns of a feature."""
    return [name] if width == 1 else [f"{name}_{index}" for index in range(width)]


def names_in(shard: Shard, columns: TreeColumns) -> tuple[list[str], list[str]]:
    """Return the names of a shard's feature and label columns."""
    if columns.features is None:
        return structured_columns(shard.names)
    return list(columns.features), list(columns.labels)


def feature_widths(shard: Shard, columns: TreeColumns) -> dict[str, int]:
    """Return the number of matrix columns of each feature; 0 if a shard without rows lacks it.

    Raises
    ------
    UsageError
        If a feature is a map, or a text column that is not in `categorical`.
    """
    widths = {}
    for name in names_in(shard, columns)[0]:
        locations = shard.locate(name)
        leaves = shard.spool.leaves
        if None not in locations:
            if not shard.rows:
                widths[name] = 0
                continue
            raise UsageError(
                f"Column '{name}' is a map, which trees cannot use; select its values as columns",
                code="data-dtype",
                column=name,
            )
        array, column = locations[None]
        leaf = leaves[array]
        if is_text(leaf.dtype) and name not in columns.categorical:
            raise UsageError(
                f"Column '{name}' holds texts; add it to categorical_cols, or encode it as numbers",
                code="data-dtype",
                column=name,
            )
        widths[name] = 1 if column is not None else math.prod(leaf.shape)
    return widths


def distinct_texts(shard: Shard, columns: TreeColumns) -> Categories:
    """Return the distinct texts of each categorical text column of a shard."""
    categories: Categories = {}
    for name in columns.categorical:
        array, column = shard.locate(name)[None]
        if not is_text(shard.spool.leaves[array].dtype):
            continue
        values = shard.arrays[array] if column is None else shard.arrays[array][:, column]
        distinct: set[bytes] = set()
        for low in range(0, shard.rows, 1 << 20):
            distinct.update(np.unique(values[low : low + (1 << 20)]).tolist())
        categories[name] = sorted(each.decode() for each in distinct)
    return categories


def shard_matrices(
    worker: Worker,
    shards: dict[str, Shard],
    columns: TreeColumns,
    known: Categories | None = None,
) -> tuple[dict[str, ShardMatrix], Categories]:
    """Return the matrix of each shard of a worker, and the categories of text columns.

    All workers agree on the categories and on the number of matrix columns.

    Parameters
    ----------
    worker : Worker
    shards : dict of str to Shard
    columns : TreeColumns
    known : dict of str to list of str, optional
        Categories of a fitted model; by default those of the training data of all workers.
    """
    first = next(iter(shards.values()))
    local: dict[str, Any] = {
        "widths": {name: feature_widths(shard, columns) for name, shard in shards.items()},
        "categories": distinct_texts(first, columns) if known is None else {},
        "rows": {name: shard.rows for name, shard in shards.items()},
    }
    gathered = [local]
    if worker.world_size > 1:
        gathered = worker.channel.all_gather("trees", worker.rank, local, worker.world_size)
    matrices = {}
    categories = known
    if categories is None:
        categories = {
            name: sorted(set().union(*(each["categories"].get(name, []) for each in gathered)))
            for name in local["categories"]
        }
    sizes: dict[str, int] = {}
    for name in shards:
        if not sum(each["rows"][name] for each in gathered):
            raise UsageError(
                f"{'validation_data' if name == 'validation' else 'data'} has no rows",
                code="data-empty",
            )
        for each in gathered:
            for feature, width in each["widths"][name].items():
                expected = sizes.setdefault(feature, width) or width
                if width and width != expected:
                    raise UsageError(
                        f"Column '{feature}' holds arrays of different lengths ({expected} and "
                        f"{width}); use arrays of one length",
                        code="data-shape",
                        column=feature,
                    )
                sizes[feature] = expected
    for name, shard in shards.items():
        matrices[name] = ShardMatrix(shard, columns, categories, sizes)
    return matrices, categories


def is_external(matrices: Sequence[ShardMatrix], workers_here: int) -> bool:
    """Return True if the binned matrices should be in a file instead of in memory."""
    size = sum(matrix.nbytes for matrix in matrices) * workers_here
    return size > available_memory() // _MEMORY_SHARE


def quantile_matrix(
    matrix: ShardMatrix,
    folder: str | None,
    params: dict[str, Any],
    missing: float,
    threads: int,
    reference: xgboost.DMatrix | None = None,
) -> xgboost.DMatrix:
    """Return XGBoost's binned matrix, in memory or in a file.

    Parameters
    ----------
    matrix : ShardMatrix
    folder : str or None
        Folder for the file; None keeps the matrix in memory.
    params : dict
        XGBoost parameters, for ``max_bin``.
    missing : float
    threads : int
    reference : optional
        Matrix of the training data, for validation data.
    """
    import xgboost

    options = {
        "missing": missing,
        "nthread": threads,
        "max_bin": params.get("max_bin"),
        "enable_categorical": "c" in matrix.types,
        "ref": reference,
    }
    if folder is None:
        return xgboost.QuantileDMatrix(_iterator(matrix), **options)
    return xgboost.ExtMemQuantileDMatrix(_iterator(matrix, os.path.join(folder, "bins")), **options)


def exact_matrix(matrix: ShardMatrix, folder: str, missing: float, threads: int) -> xgboost.DMatrix:
    """Return a matrix of exact values in a file, for the evaluation of any model."""
    import xgboost

    iterator = _iterator(matrix, os.path.join(folder, "values"))
    return xgboost.DMatrix(
        iterator, missing=missing, nthread=threads, enable_categorical="c" in matrix.types
    )


def dense_rows(matrix: ShardMatrix, folder: str, missing: float) -> dict[str, Any]:
    """Return the arguments of ``lightgbm.Dataset`` for a matrix.

    The features are a memory-mapped float32 array in a new file.

    Parameters
    ----------
    matrix : ShardMatrix
    folder : str
        Folder for the file.
    missing : float
        Value of missing features, in addition to NaN.
    """
    if len(matrix.labels) > 1:
        raise UsageError(
            f"LightGBM takes one label, got {matrix.labels}; fit one Estimator for each",
            code="unsupported",
            argument="label_cols",
        )
    handle, path = tempfile.mkstemp(dir=folder, suffix=".rows")
    os.close(handle)
    block = np.memmap(path, np.float32, "w+", shape=(max(1, matrix.rows), matrix.width))
    targets: dict[str, list[np.ndarray]] = {}
    for low, high in matrix.batches():
        arguments = matrix.batch(low, high, block[low:high])
        rows = arguments["data"]
        if not math.isnan(missing):
            rows[rows == np.float32(missing)] = np.nan
        for name in ("label", "weight", "base_margin", "qid"):
            if name in arguments:
                targets.setdefault(name, []).append(arguments[name])
    joined = {name: np.concatenate(pieces) for name, pieces in targets.items()}
    result: dict[str, Any] = {"data": block[: matrix.rows].view(np.ndarray)}
    result["label"] = joined["label"]
    if "base_margin" in joined:
        result["init_score"] = joined["base_margin"].astype(np.float64).ravel(order="F")
    if "qid" in joined:
        result["group"] = sizes = np.bincount(joined["qid"])
    if "weight" in joined:
        weight = joined["weight"]
        result["weight"] = np.repeat(weight, sizes) if "qid" in joined else weight
    return result


def _iterator(matrix: ShardMatrix, cache_prefix: str | None = None) -> xgboost.DataIter:
    import xgboost

    class Batches(xgboost.DataIter):
        def __init__(self) -> None:
            self._batches = list(matrix.batches())
            self._next = 0
            self._buffer: np.ndarray | None = None  # XGBoost keeps a batch until the next one
            super().__init__(cache_prefix=cache_prefix)

        def next(self, input_data):
            if self._next == len(self._batches):
                self._buffer = None
                return False
            if self._buffer is None:
                rows = max(high - low for low, high in self._batches)
                self._buffer = np.empty((rows, matrix.width), np.float32)
            arguments = matrix.batch(*self._batches[self._next], self._buffer)
            self._next += 1
            input_data(**arguments)
            return True

        def reset(self) -> None:
            self._next = 0

    return Batches()
