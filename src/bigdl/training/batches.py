"""Batches of tensors from a shard or a DataLoader, and their conversion to common dtypes.

Training and validation data may have different sources.  A column that is integer in one and float
in the other reaches the model in the dtype of the training data.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, cast

import cloudpickle
import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.common.memory import available_memory
from bigdl.common.platform.processes import loader_context
from bigdl.runtime.shards.batches import BatchPlan, WindowedOrder, permutation
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.shard import LoaderShard, Shard, SpoolWriter
from bigdl.runtime.shards.table_batches import EpochRows, OrderFacts, TablePlan, table_order
from bigdl.runtime.shards.texts import TEXT, is_text
from bigdl.runtime.shards.values import columns_of, grouped, structured_columns
from bigdl.training.position import RunSettings
from bigdl.training.remaining_rows import LARGEST, as_ids, find_rows, row_ids, share_samples
from bigdl.training.state import isolated_rng, mixed_seed
from bigdl.training.virtual_shards import deal_rows

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.training.slices import SavedSlices

    ArrayPositions = dict[str | None, tuple[int, int | None]]  # array and column by key
    _Item = tuple[tuple[int, int], tuple[int, ...], list[Any]]  # see _BatchMaker
    from bigdl.runtime.worker import Worker

T = TypeVar("T")
BatchForm: TypeAlias = "tuple[torch.dtype, int] | dict[Any, BatchForm] | list[BatchForm] | None"
"""Dtype and dimension count of each tensor of a batch, in the structure of the batch."""


def casts(
    names: Sequence[str], types: list[Any], others: list[Any], *, is_target: bool
) -> dict[tuple[int, str | None], Callable[..., Any]]:
    """Return the casts that convert validation data to the dtypes of the training data.

    Parameters
    ----------
    names : sequence of str
        Names of the columns, for messages.
    types, others : list
        Key, dtype and row shape of every array of every column, see :attr:`BatchSource.types`.
    is_target : bool
        Targets may differ in more than their dtype, since the loss checks them.

    Returns
    -------
    dict of (int, str or None) to callable
        Functions of a tensor, by the index of the column and the key of its array.

    Raises
    ------
    UsageError
        If one feature is boolean and the other a number, or if keys, dimensions or the number of
        columns differ.
    """
    if len(types) != len(others) and not is_target:
        raise UsageError(
            f"validation_data has {len(types)} columns of features but the training data has "
            f"{len(others)}; give both the same",
            code="data-schema",
            argument="validation_data",
        )
    out: dict[tuple[int, str | None], Callable[..., Any]] = {}
    for number, (name, leaves, expected) in enumerate(zip(names, types, others, strict=False)):
        known = {key: spec for key, *spec in expected}
        for key, *spec in leaves:
            dtype = _dtype_like(spec, known.get(key), name, is_target)
            if dtype is not None:
                label = f"'{name}' of validation_data"
                out[number, key] = functools.partial(in_dtype, dtype=dtype, name=label)
    return out


def _dtype_like(
    this: Sequence[Any], others: Sequence[Any] | None, name: str, is_target: bool
) -> torch.dtype | None:
    """Return the dtype that a column must be cast to, or None if no cast is needed."""
    import torch

    if (
        others is not None
        and len(this[1]) == len(others[1])
        and all((this[0] == special) == (others[0] == special) for special in ("bool", TEXT))
    ):
        return None if this[0] == others[0] else cast("torch.dtype", getattr(torch, others[0]))
    if is_target:
        return None
    raise UsageError(
        f"'{name}' is {_describe_type(this)} in validation_data but {_describe_type(others)} in "
        "the training data; give both the same type",
        code="data-schema",
        argument="validation_data",
        column=name,
    )


def _describe_type(type_and_shape: Sequence[Any] | None) -> str:
    if type_and_shape is None:
        return "a dict without one of its keys"
    dtype, shape = type_and_shape
    dtype = "text" if dtype == TEXT else str(dtype)
    return f"{dtype} of {len(shape)} dimension{'s' * (len(shape) != 1)} per row" if shape else dtype


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast a tensor to another dtype; raise an error if it cannot hold the values."""
    import torch

    cast = tensor.to(dtype)
    if dtype.is_floating_point:
        return cast
    is_other = cast.to(tensor.dtype) != tensor
    if tensor.dtype == torch.float32:  # which cannot represent all larger integers
        is_other |= tensor.abs() >= 2**24
    if bool(is_other.any()):
        raise UsageError(
            f"{name} holds {tensor[is_other][0].item()}, which is no {str(dtype)[6:]}, its type in "
            "the training data; give both the same type",
            code="data-value",
        )
    return cast


# -- batches of a loader, whose dtypes are known only when they exist ------------------------------


def zero_column(leaves: list[Any], rows: int) -> np.ndarray | dict[str | None, np.ndarray]:
    """Build `rows` rows of zeros or empty texts for a column with the dtypes in `leaves`."""
    arrays = {key: np.zeros((rows, *shape), dtype) for key, dtype, shape in leaves}
    return arrays.get(None, arrays)


def form_of(batch: object) -> BatchForm:
    """Return the dtype and dimension count of each tensor, in the structure of the batch."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.ndim
    if isinstance(batch, Mapping):
        return {key: form_of(value) for key, value in batch.items()}
    return [form_of(value) for value in batch] if isinstance(batch, list | tuple) else None


def in_form(batch: T, form: BatchForm, name: str = "batch") -> T:
    """Cast the tensors of a batch to the dtypes of another batch, where their structures agree."""
    import torch

    result: Any = batch
    if isinstance(batch, torch.Tensor) and isinstance(form, tuple):
        dtype, dimensions = form
        is_alike = dimensions == batch.ndim
        is_alike = is_alike and (dtype == torch.bool) == (batch.dtype == torch.bool)
        if is_alike and dtype != batch.dtype:
            result = in_dtype(batch, dtype, f"'{name}' of validation_data")
    elif isinstance(batch, Mapping) and isinstance(form, dict):
        result = {key: in_form(value, form.get(key), str(key)) for key, value in batch.items()}
    elif type(result) in (list, tuple) and isinstance(form, list) and len(form) == len(result):
        pairs = enumerate(zip(result, form, strict=True))
        result = type(result)(in_form(v, f, f"{name}[{i}]") for i, (v, f) in pairs)
    return cast("T", result)


def shuffle_memory(config: dict[str, Any], threads: int) -> int:
    """Return the memory limit for one worker's shuffled rows, in bytes.

    The limit is ``config["shuffle_memory"]``, or this worker's share of half of the free memory, in
    proportion to `threads`.
    """
    limit = config.get("shuffle_memory")
    if limit is not None:
        return check_positive('config["shuffle_memory"]', limit)
    return available_memory() // 2 // max(1, core_count() // max(1, threads))


@dataclass(frozen=True)
class Pass:
    """One pass over the rows of a worker, with the settings that determine their order.

    Attributes
    ----------
    shuffle : bool
    seed : int
    number : int
        Number of the pass, usually the epoch.
    rank : int
    window : int
        Rows of a shuffle window; 0 shuffles all rows together.
    ranges : callable
        ``ranges()`` yields the (start, stop) of the batches to read, in order.
    """

    shuffle: bool
    seed: int
    number: int
    rank: int = 0
    window: int = 0
    ranges: Callable[[], Iterator[tuple[int, int]]] = lambda: iter(())


RowOrder: TypeAlias = "np.ndarray | WindowedOrder"
"""Row indices of a pass, by position."""


class BatchSource(ABC):
    """Rows of a worker that can be read in batches, in any order.

    Attributes
    ----------
    rows : int
    fingerprint : int
        Hash that is equal for equal rows in equal order, as far as that is known.
    drop_last : bool
        True if an incomplete last batch is dropped.
    types : list or None
        Key, dtype and row shape of every array of every column, of the features and of the targets;
        None if unknown.
    """

    rows: int
    fingerprint: int
    drop_last = False
    types: list[Any] | None = None
    is_stream = False  # True if every worker has read iterable data

    @property
    def fetches_rows(self) -> bool:
        """True if the workers send each other rows at the start of an epoch."""
        return False

    @property
    def checksum(self) -> int:
        """Checksum of the rows; for iterable data it does not depend on their order."""
        return self.fingerprint

    @abstractmethod
    def take_types(self, types: list[Any] | None, training: BatchSource) -> None:
        """Cast numbers to the dtypes of the training data.

        Parameters
        ----------
        types : list or None
            Types of the training data.
        training : TensorShard or LoaderBatches
            The training data of this worker.

        Raises
        ------
        UsageError
            If the columns are incompatible.
        """

    @abstractmethod
    def window(self, memory: int) -> int:
        """Return the number of rows in a shuffle window, or 0 if all rows fit in `memory` bytes."""

    @abstractmethod
    def order(self, of: Pass) -> object:
        """Return the order of the rows in a pass."""

    def order_of_pass(
        self, plan: BatchPlan, settings: RunSettings, number: int, rank: int, window: int, step: int
    ) -> object:
        """Return the row order of a pass whose batches are read starting with batch `step`."""
        plan = copy.copy(plan)  # it caches the last position

        def ranges() -> Iterator[tuple[int, int]]:
            return (plan.batch(index, rank)[:2] for index in range(step, plan.steps))

        of = Pass(settings.shuffle, settings.seed, number, rank, window, ranges)
        return self.order(of) if plan.share is None else self.order_of_share(plan.share, of)

    @abstractmethod
    def ids_from(self, order: Any, start: int) -> np.ndarray | None:
        """Return the row ids of an order from index `start` to its end; None if rows have no ids.

        See :mod:`bigdl.training.remaining_rows`.
        """

    @abstractmethod
    def share_of_remaining(self, left: SavedSlices, sync: GradientSync) -> tuple[int, np.ndarray]:
        """Return the number and selection of this worker's remaining rows (collective operation).

        Parameters
        ----------
        left : SavedSlices
            Ids of :meth:`ids_from` of all workers.
        sync : GradientSync
        """

    @abstractmethod
    def order_of_share(self, share: np.ndarray, of: Pass) -> object:
        """Return the row order of a pass that reads only the rows in `share`."""

    def facts(self, window: int) -> dict[str, Any]:
        """Return the JSON-serializable facts about the rows that :func:`plan_batches` needs."""
        return {
            "rows": self.rows,
            "fingerprint": self.fingerprint,
            "drop_last": bool(self.drop_last),
            "window": window,
            "types": self.types,
        }

    @abstractmethod
    def in_order(self, batch_size: int) -> object:
        """Return the row order of an evaluation in batches of `batch_size` rows."""

    @abstractmethod
    def batch(self, start: int, stop: int, order: Any = None) -> Any:  # tensors
        """Read the rows `start`...`stop` of an order, by default of the evaluation order."""

    @property
    def can_read_ahead(self) -> bool:
        """True if a thread may prefetch batches without side effects, such as on random numbers."""
        return False

    def has_label(self, value: float) -> bool:
        """Return False if no target can equal `value`, else True."""
        return True

    def in_batches(self, batch_size: int) -> Iterator[tuple[int, Any]]:
        """Yield the number of rows and the contents of each batch, in evaluation order."""
        order = self.in_order(batch_size)
        for start in range(0, self.rows, batch_size):
            stop = min(start + batch_size, self.rows)
            yield stop - start, self.batch(start, stop, order)


class TensorShard(BatchSource):
    """Columns of a shard as tensors backed by the shard's memory-mapped files.

    Parameters
    ----------
    shard : bigdl.runtime.shards.shard.Shard
    feature_cols, label_cols : sequence of str or None
        Columns; None uses the names of the shard.
    as_dict : bool
        Return batches as dicts of the columns.

    Raises
    ------
    UsageError
        If the shard names no targets, or a target is text.

    Attributes
    ----------
    rows : int
    types : list or None
        None without rows.
    """

    def __init__(
        self,
        shard: Shard,
        feature_cols: Sequence[str] | None,
        label_cols: Sequence[str] | None,
        *,
        as_dict: bool = False,
    ):
        import torch

        self._is_dict = as_dict

        self.rows, self.fingerprint = shard.rows, shard.fingerprint
        self._features: list[ArrayPositions] = []
        self._labels: list[ArrayPositions] = []
        # casts to the dtypes of other data, by array position
        self._casts: dict[tuple[int, int | None], Callable[[torch.Tensor], torch.Tensor]] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._texts: dict[int, np.dtype] = {}  # dtypes of the tensors that hold text bytes
        if not self.rows:
            return
        if feature_cols is None:
            feature_cols, label_cols = structured_columns(shard.names)
            if not label_cols:
                raise UsageError(
                    'The data has no targets; pass (x, y) or {"x": ..., "y": ...} to fit or '
                    "evaluate",
                    code="data-structure",
                )
        label_cols = cast("Sequence[str]", label_cols)  # None only with the features
        self._features = [shard.locate(name) for name in feature_cols]
        self._labels = [shard.locate(name) for name in label_cols]
        for positions in (*self._features, *self._labels):
            for i, _ in positions.values():
                if i not in self._tensors:
                    array = shard.arrays[i]
                    if array.dtype.kind == TEXT:
                        self._texts[i] = array.dtype
                        array = array.reshape(*array.shape, 1).view("uint8")
                    self._tensors[i] = torch.from_numpy(array)
        # a matrix of scalar columns is transposed once per batch, so that columns are contiguous
        self._matrices = {
            i for p in (*self._features, *self._labels) for i, j in p.values() if j is not None
        }
        self._words = {i: w for i, t in self._tensors.items() if (w := _as_words(t)) is not None}
        leaves = shard.spool.leaves

        forms = [(TEXT if is_text(x.dtype) else x.dtype, list(x.shape)) for x in leaves]
        self.types = [
            [
                [[key, forms[i][0], forms[i][1] if j is None else []] for key, (i, j) in p.items()]
                for p in columns
            ]
            for columns in (self._features, self._labels)
        ]
        self._names = list(feature_cols), list(label_cols)
        for name, positions in zip(label_cols, self._labels, strict=True):
            if any(i in self._texts for i, _ in positions.values()):
                raise UsageError(
                    f"Column '{name}' of the targets holds text; encode it as numbers first, e.g. "
                    "with StringIndexer",
                    code="data-dtype",
                    column=name,
                )

    def take_types(self, types: list[Any] | None, training: BatchSource) -> None:
        if self.types is None or types is None:
            return
        both = zip((self._features, self._labels), self._names, self.types, types, strict=True)
        for is_target, (columns, names, known_types, others) in enumerate(both):
            column_casts = casts(names, known_types, others, is_target=bool(is_target))
            self._casts.update({columns[i][key]: cast for (i, key), cast in column_casts.items()})

    def follow(self, inputs: list[Any]) -> None:
        """Cast features to the dtypes of an earlier fit, where they are compatible.

        Parameters
        ----------
        inputs : list
            Feature types of that fit, see :attr:`types`.
        """
        import torch

        if self.types is None or len(inputs) != len(self.types[0]):
            return
        columns = zip(self._features, self._names[0], self.types[0], inputs, strict=True)
        for positions, name, leaves, others in columns:
            known = {key: dtype for key, dtype, _ in others}
            for leaf in leaves:
                key, dtype, _ = leaf
                wanted = known.get(key, dtype)
                if wanted != dtype and not {wanted, dtype} & {"bool", TEXT}:
                    self._casts[positions[key]] = functools.partial(
                        in_dtype, dtype=getattr(torch, wanted), name=f"'{name}'"
                    )
                    leaf[1] = wanted

    def has_label(self, value: float) -> bool:
        """Return True if any target equals `value`."""
        return any(
            bool(((self._tensors[i] if j is None else self._tensors[i][:, j]) == value).any())
            for positions in self._labels
            for i, j in positions.values()
        )

    @property
    def can_read_ahead(self) -> bool:
        return True

    def window(self, memory: int) -> int:
        """Return the number of rows in a shuffle window, or 0 if all rows fit in `memory` bytes."""
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        return 0 if total <= memory else max(1, memory * self.rows // total)

    def order(self, of: Pass) -> RowOrder | None:
        """Return the row order of a pass, for :meth:`batch`."""
        if not of.shuffle:
            return None
        if of.window:
            return WindowedOrder(self.rows, of.window, of.seed, of.number, of.rank)
        return permutation(self.rows, of.seed, of.number, of.rank)

    def in_order(self, batch_size: int) -> None:
        """Return None, which makes :meth:`batch` read rows in their stored order."""
        return None

    def deal(self, rank: int, size: int) -> None:
        """Keep this rank's share of rows that every worker holds, even if their order differs."""
        import torch

        order = torch.from_numpy(np.argsort(self._ids, kind="stable")[rank::size].copy())
        kept, _ = order.sort()
        self._tensors = {i: tensor.index_select(0, kept) for i, tensor in self._tensors.items()}
        self._words = {i: w for i, t in self._tensors.items() if (w := _as_words(t)) is not None}
        self.rows = len(kept)
        self.fingerprint = zlib.crc32(str((self.fingerprint, rank, size)).encode())
        self.__dict__.pop("_ids", None)

    def virtual_shards(
        self, count: int, sync: GradientSync, of_ranks: Sequence[TensorShard] = ()
    ) -> list[TensorShard]:
        """Exchange rows between workers; return this worker's virtual shards. Collective operation.

        The rows of a shard and their order depend only on the contents of all rows.

        Parameters
        ----------
        count : int
            Number of virtual shards of all workers, see :mod:`bigdl.training.virtual_shards`.
        sync : GradientSync
        of_ranks : sequence of TensorShard, optional
            Rows of all ranks, for a replacement of a lost worker.

        Raises
        ------
        UsageError
            If no worker has a row.
        """
        layout = self._without_rows()
        known = sync.gather(cloudpickle.dumps(layout) if self.rows else b"")
        first = None if known is None else next((each for each in known if each), b"")
        pickled = cast("bytes", sync.broadcast(first))
        if not pickled:
            raise UsageError("The training data has no rows", code="data-empty")
        layout = cloudpickle.loads(pickled)
        widths = sync.all_gather(
            [float(self._texts[i].itemsize if self.rows else 0) for i in sorted(layout._texts)]
        )
        for i, of_texts in zip(sorted(layout._texts), zip(*widths, strict=True), strict=True):
            layout._texts[i] = np.dtype(f"{TEXT}{int(max(of_texts))}")

        def rows_of(source: TensorShard) -> tuple[np.ndarray, dict[int, torch.Tensor]]:
            columns = source._tensors if source.rows else layout._tensors
            wide = {i: _padded(columns[i], text.itemsize) for i, text in layout._texts.items()}
            ids = source._ids if source.rows else np.empty(0, np.uint64)
            return ids, {**columns, **wide}

        shards = []
        everyone = [rows_of(each) for each in of_ranks]
        for shard_ids, tensors in deal_rows(*rows_of(self), count, sync, everyone):
            shard = copy.copy(layout)
            shard._tensors, shard.rows = tensors, len(shard_ids)
            shard._words = {i: w for i, t in tensors.items() if (w := _as_words(t)) is not None}
            shard.fingerprint = zlib.crc32(shard_ids.tobytes())
            shards.append(shard)
        return shards

    def _without_rows(self) -> TensorShard:
        """Return an empty copy with the columns, dtypes and casts of this shard."""
        layout = copy.copy(self)
        layout.__dict__.pop("_ids", None)
        layout.rows, layout._words = 0, {}
        layout._texts = dict(self._texts)
        layout._tensors = {i: tensor[:0].clone() for i, tensor in self._tensors.items()}
        return layout

    @property
    def checksum(self) -> int:
        """Order-independent checksum of the rows."""
        return int(self._ids.sum(dtype=np.uint64)) if self.rows else 0

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        return row_ids([tensor.numpy() for tensor in self._tensors.values()], self.rows)

    def ids_from(self, order: RowOrder | None, start: int) -> np.ndarray | None:
        if sum(tensor.nbytes for tensor in self._tensors.values()) > LARGEST:
            return None
        return self._ids[start:] if order is None else self._ids[order[start : len(order)]]

    def share_of_remaining(self, left: SavedSlices, sync: GradientSync) -> tuple[int, np.ndarray]:
        share = find_rows(self._ids, left, sync)
        return int(share.sum()), share

    def order_of_share(self, share: np.ndarray, of: Pass) -> np.ndarray:
        order = self.order(of)
        if order is None:
            return np.flatnonzero(share)
        rows = order[0 : self.rows]
        return np.asarray(rows[share[rows]])

    def batch(
        self, start: int, stop: int, order: RowOrder | EpochRows | None = None
    ) -> list[Any] | dict[str, Any]:
        """Copy the rows `start`...`stop` of an order.

        Parameters
        ----------
        start, stop : int
        order : ndarray of int, shape (rows,), WindowedOrder or EpochRows, optional
            Row order; default as spooled.

        Returns
        -------
        list of tensor (or dict of tensors)
            One tensor per feature column, then the target, if there are label columns: a tensor, or
            a tuple for several columns. Text is an ndarray of bytes.
        """
        import torch

        taken: dict[int, torch.Tensor | tuple[torch.Tensor, ...]] = {}
        if order is not None:
            index = torch.from_numpy(order[start:stop])
        for i, tensor in self._tensors.items():
            if order is None:
                rows = tensor[start:stop]
            elif i in self._words:
                rows = self._words[i].index_select(0, index).view(tensor.dtype)
                rows = rows.view(-1, *tensor.shape[1:])
            else:
                rows = tensor.index_select(0, index)
            if i in self._matrices:
                # clone() instead of contiguous(), which would not copy a single row
                turned = rows.t().clone(memory_format=torch.contiguous_format)
                taken[i] = turned.unbind(0)
            else:
                taken[i] = rows.clone() if order is None else rows

        def column(positions: ArrayPositions) -> object:
            values: dict[str | None, Any] = {}
            for key, (i, j) in positions.items():
                value = cast("torch.Tensor", taken[i] if j is None else taken[i][j])
                if i in self._texts:
                    values[key] = value.numpy().view(self._texts[i])[..., 0]
                else:
                    values[key] = self._casts[i, j](value) if (i, j) in self._casts else value
            return values.get(None, values)

        out = [column(positions) for positions in self._features]
        if self._is_dict:
            return dict(zip(self._names[0], out, strict=True))
        labels = [_target(column(positions)) for positions in self._labels]
        if labels:
            out.append(labels[0] if len(labels) == 1 else tuple(labels))
        return out


class VirtualSource:
    """Batch source over the virtual shards of one worker, which are read in order.

    Parameters
    ----------
    shards : sequence of TensorShard

    Attributes
    ----------
    rows : int
    types : list or None
        As in ``BatchSource.types``.
    """

    fetches_rows = False

    def __init__(self, shards: Sequence[TensorShard]):
        self.shards = shards
        self.rows = sum(each.rows for each in shards)
        self.types = shards[0].types

    def in_batches(self, batch_size: int) -> Iterator[tuple[int, Any]]:
        """Yield the number of rows and the contents of each batch, shard by shard."""
        for shard in self.shards:
            yield from shard.in_batches(batch_size)

    def batch(self, start: int, stop: int) -> list[Any] | dict[str, Any]:
        """Read the rows `start`...`stop` of the first shard that has rows."""
        return next(each for each in self.shards if each.rows).batch(start, stop)

    def take_types(self, types: list[Any] | None, training: VirtualSource) -> None:
        """Cast all shards to the dtypes of the training data."""
        for shard in self.shards:
            shard.take_types(types, training.shards[0])

    def has_label(self, value: float) -> bool:
        """Return True if any target equals `value`."""
        return any(each.rows and each.has_label(value) for each in self.shards)


def _padded(octets: torch.Tensor, width: int) -> torch.Tensor:
    """Pad text bytes with zeros to a width."""
    import torch

    return torch.nn.functional.pad(octets, (0, width - octets.shape[-1]))


def _as_words(tensor: torch.Tensor) -> torch.Tensor | None:
    """View 8-byte rows as int64 to gather them twice as fast; return None for other row sizes."""
    import torch

    width = tensor[:1].nbytes
    if tensor.ndim < 2 or width != 8 or tensor.itemsize == width or tensor.is_complex():
        return None
    return tensor.reshape(len(tensor), -1).view(torch.int64)[:, 0]


def _target(tensor: object) -> object:
    """Convert small integer targets to int64, which classification losses need."""
    import torch

    small = (torch.int32, torch.int16, torch.int8, torch.uint8)
    if isinstance(tensor, torch.Tensor) and tensor.dtype in small:
        return tensor.to(torch.int64)
    return tensor


@dataclass(frozen=True)
class BatchLayout:
    """Settings, row counts and fingerprints that determine the batches of a run.

    Attributes
    ----------
    rows, fingerprint : sequence of int
        Rows and fingerprint of every worker's shard.
    windows : sequence of int
        Rows of every worker's shuffle window; 0 shuffles all rows together.
    order : dict or None
        Facts of the order of a table, whose rows all workers read together; see
        :mod:`bigdl.runtime.shards.table_batches`.
    """

    seed: int
    batch_size: int
    rows: Sequence[int]
    fingerprint: Sequence[int]
    shuffle: bool
    drop_last: bool
    windows: Sequence[int] = ()
    order: OrderFacts | None = None

    #: fields of a manifest that :meth:`check` reads
    facts: ClassVar = ("batch_size", "seed", "shuffle", "drop_last", "rows", "fingerprint")

    @classmethod
    def of(
        cls, settings: RunSettings, known: Sequence[dict[str, Any]], drop_last: bool = False
    ) -> BatchLayout:
        """Build the layout from the settings and from the facts that every worker reported."""
        rows, fingerprints, windows = (
            [each[fact] for each in known] for fact in ("rows", "fingerprint", "window")
        )
        drop_last = drop_last or settings.drop_last
        size, shuffle = settings.batch_size, settings.shuffle
        return cls(settings.seed, size, rows, fingerprints, shuffle, drop_last, windows)

    def check(self, manifest: dict[str, Any], rank: int, *, rows: bool = True) -> None:
        """Raise an error if the batches differ from those of the interrupted epoch.

        Parameters
        ----------
        manifest : dict
        rank : int
        rows : bool
            False if rows may have moved between workers, while their total must be the same.
        """
        if rows and manifest.get("order"):
            raise UsageError(
                "The checkpoint was taken in the middle of an epoch that reads the table "
                f"{manifest['order']['table']} in one order for all workers, which this input or "
                "backend does not have; resume with the same table and backend, or from a "
                "checkpoint at the end of an epoch",
                code="checkpoint-mismatch",
            )
        of_workers = ("rows",) if rows else ()
        for key in ("batch_size", "seed", "shuffle", "drop_last", *of_workers):
            now = getattr(self, key)
            if manifest[key] != now:
                raise UsageError(
                    f"The checkpoint was taken in the middle of an epoch with {key}="
                    f"{manifest[key]}, now it is {now}; resume with the same data, seed, "
                    "batch_size and number of workers, or from a checkpoint at the end of an epoch",
                    code="checkpoint-mismatch",
                    argument=key,
                )
        if not rows and sum(manifest["rows"]) != sum(self.rows):
            raise UsageError(
                "The checkpoint was taken in the middle of an epoch of "
                f"{sum(manifest['rows'])} rows, now there are {sum(self.rows)}; resume with the "
                "same data, or from a checkpoint at the end of an epoch",
                code="checkpoint-mismatch",
            )
        if rows and manifest["fingerprint"] != self.fingerprint and rank == 0:
            print(
                "The rows or their order differ from those of the interrupted run, so the result "
                "will not equal that of an uninterrupted one",
                flush=True,
            )


def plan_batches(
    settings: RunSettings, known: Sequence[dict[str, Any]]
) -> tuple[BatchPlan, BatchLayout]:
    """Plan the batches of a run.

    Parameters
    ----------
    settings : RunSettings
    known : sequence of dict
        Facts of every worker's data: ``rows``, ``fingerprint``, ``window`` and ``drop_last``, and
        ``table`` if the workers together read a table in its global order.

    Raises
    ------
    UsageError
        If there is no batch.
    """
    layout = BatchLayout.of(settings, known, any(each["drop_last"] for each in known))
    if not sum(layout.rows):
        raise UsageError("The training data has no rows", code="data-empty")
    table = known[0].get("table")
    if table is None:
        plan = BatchPlan(layout.rows, settings.batch_size, layout.drop_last)
    else:
        order = table_order(table, settings.shuffle, layout.windows, layout.rows)
        layout = replace(layout, order=order)
        plan = TablePlan(layout.rows, settings.batch_size, layout.drop_last, order)
    if not plan.steps:
        raise UsageError(
            f"drop_last leaves no batch: the data has {sum(layout.rows)} rows and batch_size is "
            f"{settings.batch_size}",
            code="data-empty",
            argument="drop_last",
        )
    return plan, layout


def deal_streams(sources: Sequence[Any], sync: GradientSync, warn: Callable[[str], None]) -> None:
    """Split iterable data among the workers if all have read the same rows; a collective operation.

    Parameters
    ----------
    sources : sequence of BatchSource or other
        Sources, in the same number on every rank.
    sync : GradientSync
    warn : callable
        Called on rank 0 with a message.
    """
    streams = [each for each in sources if getattr(each, "is_stream", False)]
    if not streams or sync.world_size == 1:
        return
    everyone = all_gather_json(sync, [[each.rows, each.checksum] for each in streams])
    for number, source in enumerate(streams):
        facts = [known[number] for known in everyone]
        if source.rows and all(each == facts[0] for each in facts):
            if sync.rank == 0:
                warn(
                    f"All {sync.world_size} workers have read the same {source.rows} rows of the "
                    "iterable data; the rows are split among them. To read only a part in each "
                    "worker, pass a function data(config, batch_size) that creates the dataset of "
                    'the part config["rank"] of config["size"]'
                )
            source.deal(sync.rank, sync.world_size)


def all_gather_json(sync: GradientSync, value: object) -> list[Any]:
    """Gather a JSON-serializable value of every rank on every rank; a collective operation."""
    gathered = sync.gather(json.dumps(value).encode())
    both = None if gathered is None else b"[" + b",".join(gathered) + b"]"
    everyone: list[Any] = json.loads(cast("bytes", sync.broadcast(both)))
    return everyone


@dataclass
class BatchSettings:
    """Settings of the batches of a training or evaluation loop.

    Attributes
    ----------
    batch_size : int or None
        Rows of a global batch; None for a data function that does not need it.
    feature_cols, label_cols : sequence of str or None
        Columns, or the keys of batches that are dicts. With `weighted` the last label column holds
        the sample weights.
    num_steps : int, optional
        Maximum number of evaluation batches per worker; default all.
    weighted : bool
    inputs : list or None
        Types of the features in an earlier fit, as in ``BatchSource.types``.
    """

    batch_size: Any
    feature_cols: Sequence[str] | None = None
    label_cols: Sequence[str] | None = None
    num_steps: int | None = None
    weighted: bool = False
    inputs: list[Any] | None = field(default=None, kw_only=True)

    def open_columns(self, shard: Shard) -> TensorShard:
        """Open the source of batches over a shard of columns."""
        rows = TensorShard(shard, self.feature_cols, self.label_cols)
        if self.inputs is not None:
            rows.follow(self.inputs)
        return rows

    def open_batches(
        self, shard: Any, worker: Worker, config: dict[str, Any], made: Any = None
    ) -> BatchSource:
        """Return a source that reads the rows of a worker's shard in batches.

        Parameters
        ----------
        shard : Shard or LoaderShard
        worker : Worker
        config : dict
            Argument of a function that creates a loader.
        made : DataLoader or Dataset, optional
            Result of a data function that was already called; default unpickles the shard.

        Returns
        -------
        TensorShard or LoaderBatches
        """
        if not isinstance(shard, LoaderShard):
            return self.open_columns(shard)
        from torch.utils.data import IterableDataset

        made = cloudpickle.loads(shard.payload()) if made is None else made
        config = {**config, "rank": worker.rank, "size": worker.world_size}
        loader = as_loader(made, config, max(1, (self.batch_size or 1) // worker.world_size))
        if isinstance(loader.dataset, IterableDataset):
            spool, keys = spooled(loader, shard.spool.path, self.feature_cols, self.label_cols)
            source = TensorShard(
                spool, keys, None if keys is None else (), as_dict=keys is not None
            )
            source.is_stream = True
            return source
        batches = LoaderBatches(loader, worker.rank, worker.world_size)
        worker.at_exit(batches.close)
        return batches


def as_loader(loader: Any, config: dict[str, Any], batch_size: int) -> DataLoader[Any]:
    """Convert an input to a DataLoader.

    Parameters
    ----------
    loader : DataLoader, Dataset or callable
    config : dict
        Argument of a function; options such as ``num_workers`` for the loader of a Dataset.
    batch_size : int
        Batch size of this worker.

    Raises
    ------
    UsageError
        If it is no loader, or one with a custom batch sampler.
    """
    from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

    if not isinstance(loader, DataLoader | Dataset):
        loader = loader(config, batch_size)
    if isinstance(loader, Dataset) and not isinstance(loader, DataLoader):
        options = {k: config[k] for k in _OPTIONS if k in config}
        is_map = not isinstance(loader, IterableDataset)
        shuffle = {"shuffle": config.get("shuffle", True)} if is_map else {}
        loader = DataLoader(loader, batch_size=batch_size, **shuffle, **options)
    if not isinstance(loader, DataLoader):
        raise UsageError(
            "The function given as data must return a DataLoader or a Dataset, it returned "
            f"{type(loader).__name__}",
            code="function-result",
            argument="data",
        )
    if isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_sampler is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            "A DataLoader with batch_sampler= or without a batch size is not supported, since the "
            "batch_size of fit determines the batches; pass sampler= instead",
            code="unsupported",
            argument="batch_sampler",
        )
    return loader


_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn")


@dataclass
class _Epoch:
    """Row order of one epoch, and the iterator of its prefetched batches."""

    indices: np.ndarray
    seeds: tuple[int, ...]
    ahead: Iterator[Any] | None = None


class LoaderBatches(BatchSource):
    """A worker's part of a map-style DataLoader, read on demand.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    rank, world_size : int

    Attributes
    ----------
    rows : int
    drop_last : bool
    """

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int):
        from torch.utils.data import RandomSampler, SequentialSampler
        from torch.utils.data.distributed import DistributedSampler

        self._loader, self._rank, self._size = loader, rank, world_size
        sampler = loader.sampler
        self._sampler: Any = sampler
        self._shuffles = False
        dataset: Any = loader.dataset
        count = len(dataset)
        if type(sampler) is SequentialSampler:
            self._sampler = None
        elif type(sampler) is RandomSampler:
            plain = not sampler.replacement and sampler.num_samples == count
            self._sampler, self._shuffles = (None, True) if plain else (sampler, False)
        elif type(sampler) is DistributedSampler:  # rows are split here, without its padding
            self._sampler, self._shuffles = None, sampler.shuffle
        if self._sampler is not None:
            count = len(self._sampler)
        self._count = count
        self.rows = len(range(rank, count, world_size))
        self.drop_last = bool(loader.drop_last)
        self.fingerprint = zlib.crc32(str(count).encode())
        self._current: _Epoch | None = None  # epoch whose batches are prefetched
        self._processes: _Processes | None = None
        self._form: Any = None  # form of the first batch
        self._like: LoaderBatches | None = None
        self._one_by_one = _BatchMaker((loader.dataset, loader.collate_fn))

    def take_types(self, types: list[Any] | None, training: BatchSource) -> None:
        """Cast numbers to the dtypes of the batches that `training` has returned so far."""
        self._like = training if isinstance(training, LoaderBatches) else None

    def window(self, memory: int) -> int:
        """Return 0, since samples are shuffled without a window."""
        return 0

    def order(self, of: Pass) -> _Epoch:
        """Return the order of a pass, and start prefetching its batches."""
        indices = self._indices(self._shuffles, of.seed, of.number)
        return self._start(_Epoch(indices, (of.seed, of.number)), of.ranges())

    def ids_from(self, order: _Epoch, start: int) -> np.ndarray | None:
        return as_ids(order.indices[start:])

    def share_of_remaining(self, left: SavedSlices, sync: GradientSync) -> tuple[int, np.ndarray]:
        share = share_samples(left, sync.rank, sync.world_size)
        return len(share), share

    def order_of_share(self, share: np.ndarray, of: Pass) -> _Epoch:
        return self._start(_Epoch(share.astype(np.int64), (of.seed, of.number)), of.ranges())

    def in_order(self, batch_size: int) -> _Epoch:
        """Return the sample order of an evaluation in batches of `batch_size` samples."""
        starts = range(0, self.rows, batch_size)
        ranges = ((start, min(start + batch_size, self.rows)) for start in starts)
        return self._start(self._evaluation(), ranges)

    def _evaluation(self) -> _Epoch:
        return _Epoch(self._indices(False, 0, 0), (0, 0))

    def _indices(self, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
        """Return the indices of the samples that this worker reads, in reading order."""
        if self._sampler is None:
            indices = np.arange(self._rank, self._count, self._size)
            return indices[permutation(self.rows, seed, epoch, self._rank)] if shuffle else indices
        drawing_seed = mixed_seed(seed, epoch)
        with isolated_rng(drawing_seed):
            generator = getattr(self._sampler, "generator", None)
            if generator is not None:
                generator.manual_seed(drawing_seed)
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            drawn = list(itertools.islice(iter(self._sampler), self._count))
        if len(drawn) != self._count:
            raise UsageError(
                f"The sampler yielded {len(drawn)} samples in an epoch, but its length is "
                f"{self._count}; make both equal",
                code="data-shape",
            )
        out = np.empty(self.rows, object)
        out[:] = drawn[self._rank :: self._size]
        return out

    def _start(self, epoch: _Epoch, ranges: Iterator[tuple[int, int]]) -> _Epoch:
        if self._current is not None:
            self._current.ahead = None  # its next batches are loaded one by one
        self._current = epoch
        if self._loader.num_workers:
            if self._processes is None:
                self._processes = _Processes(self._loader)
            self._processes.close_epoch()
            items = (self._item(epoch, *bounds) for bounds in ranges if bounds[1] > bounds[0])
            epoch.ahead = self._processes.load(items)
        return epoch

    def _item(self, epoch: _Epoch, start: int, stop: int) -> _Item:
        seeds = (*epoch.seeds, self._rank, start)
        return (start, stop), seeds, epoch.indices[start:stop].tolist()

    def batch(self, start: int, stop: int, order: _Epoch | None = None) -> list[Any]:
        """Load the samples `start`...`stop` of an order, by default of the evaluation order."""
        if order is None:
            order = self._evaluation()
        loaded = None
        if order.ahead is not None:
            expected, loaded = next(order.ahead, ((), None))
            if tuple(expected) != (start, stop):  # pinning memory converts the tuple to a list
                order.ahead = loaded = None  # batches are read in another order than announced
        if loaded is None:
            _, loaded = self._one_by_one[self._item(order, start, stop)]
        loaded = list(loaded) if isinstance(loaded, tuple | list) else loaded
        if self._form is None:
            self._form = form_of(loaded)
        if self._like is not None and self._like._form is not None:
            loaded = in_form(loaded, self._like._form)
        return loaded

    def close(self) -> None:
        """Stop the loader processes."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None


class _BatchMaker:
    """Dataset whose items are whole batches, each collated with a separate random seed.

    An item has the bounds of a batch in an order, its seeds and its sample indices. The result has
    the bounds and the batch.
    """

    def __init__(self, dataset_and_collate: tuple[Any, Callable[[list[Any]], Any]]):
        from torch.utils.data import TensorDataset, default_collate

        self.dataset, self.collate = dataset_and_collate
        self._is_plain = type(self.dataset) is TensorDataset and self.collate is default_collate

    def __getitem__(self, item: _Item) -> tuple[tuple[int, int], Any]:
        bounds, seeds, indices = item
        if self._is_plain:
            import torch

            index = torch.as_tensor(indices)
            return bounds, tuple(t.index_select(0, index) for t in self.dataset.tensors)
        with isolated_rng(mixed_seed(*seeds)):
            fetch = getattr(self.dataset, "__getitems__", None)
            samples = fetch(indices) if fetch else [self.dataset[i] for i in indices]
            return bounds, self.collate(samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BatchMaker, (_ByValue((self.dataset, self.collate)),)


class _Processes:
    """Loader processes that run until the end of the fit or evaluation.

    They are forked from a server that has only imported torch, since processes forked from this one
    would inherit locks of its threads. The server ends with this process.
    """

    def __init__(self, loader: DataLoader[Any]):
        from torch.utils.data import DataLoader

        self._items: Iterator[_Item] = iter(())
        init = loader.worker_init_fn
        maker: Any = _BatchMaker((loader.dataset, loader.collate_fn))  # without a length
        self._loader: DataLoader[Any] = DataLoader(
            maker,
            sampler=self,
            batch_size=None,
            num_workers=loader.num_workers,
            collate_fn=_unchanged,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=None if init is None else cast("Any", _ByValue(init)),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=True,
            multiprocessing_context=loader_context(["torch", __name__]),
        )

    def load(self, items: Iterator[_Item]) -> Iterator[tuple[tuple[int, int], Any]]:
        """Yield the results of :class:`_BatchMaker` for `items`, prefetched by the processes."""
        self._items = items
        with isolated_rng(0):  # torch draws a seed for the processes, which need none
            batches = iter(self._loader)
        yield from batches

    def close_epoch(self) -> None:
        """Discard the items of the previous epoch."""
        self._items = iter(())

    def __iter__(self) -> Iterator[_Item]:
        yield from self._items

    def close(self) -> None:
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class _ByValue:
    """Wrapper that pickles its object by value, including classes of ``__main__``."""

    def __init__(self, value: object):
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (cloudpickle.dumps(self._value),)


def _unchanged(batch: T) -> T:
    return batch


# -- iterable data ------------------------------------------------------------------------------


def spooled(
    loader: DataLoader[Any],
    folder: str,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str] | None,
) -> tuple[Shard, list[str] | None]:
    """Spool all rows of an iterable loader to a folder.

    Returns
    -------
    Shard, list of str or None
        The shard of the rows, and the keys if batches are dicts: the columns, or all keys.
    """
    from torch.utils.data import DataLoader

    if loader.num_workers:  # every loader process would read the whole stream
        loader = DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn)
    writer = SpoolWriter(folder, 0, "rows", [])
    keys = None
    for sequence, batch in enumerate(loader):
        if isinstance(batch, Mapping):
            batch = dict(batch)
            keys = [*feature_cols, *(label_cols or ())] if feature_cols else list(batch)
        elif not isinstance(batch, tuple | list):
            raise UsageError(
                "The batches of iterable data must be tuples (*features, target) or dicts, got "
                f"{type(batch).__name__}",
                code="data-structure",
            )
        else:
            batch = tuple(batch)
        try:
            leaves, arrays = grouped(columns_of(batch, keys, None, None))
            ready = [np.ascontiguousarray(a) for a in arrays]
            writer.append(0, sequence, len(ready[0]), leaves, ready)
        except SourceError as error:
            raise error.with_message(
                f"Iterable data must yield numbers of equal shapes: {error}"
            ) from None
    return Shard(writer.finish()), keys
