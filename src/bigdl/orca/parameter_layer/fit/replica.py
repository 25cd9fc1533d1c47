"""Model replicas of the parameter layer: flat weights, and the gradients of one rank's rows.

:class:`ParameterLayerReplica` runs on the ranks; the driver has a separate :class:`FlatModel`.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.parameter_layer.plan import FlatLayout, LayerStep
from bigdl.orca.parameter_layer.rank import Contribution, changed
from bigdl.training.batches import BatchSource, Pass, TensorShard
from bigdl.training.state import seed_everything

if TYPE_CHECKING:
    import torch

    from bigdl.common.types import Tensors
    from bigdl.runtime.shards.shard import Shard


class FlatModel:
    """View of a model's trained weights as one flat vector, and of its buffers.

    Parameters
    ----------
    trained, buffers : sequence
        Variables of the framework.
    read : callable
        ``read(variable)`` returns a variable as an array, maybe a view.
    assign : callable
        ``assign(variable, array)`` sets a variable to an array of its shape.
    widths : sequence of int, optional
        Row width of the trained weights that are tables with sparse gradients, 0 for others;
        default 0 for all.
    share : callable, optional
        Replaces `assign` for tables: the variable may keep using the memory of the array.

    Attributes
    ----------
    shapes, sizes : sequence
        Shapes and numbers of elements of the trained weights.
    initial : list of ndarray
        Initial values of the buffers.
    """

    def __init__(
        self,
        trained: Sequence[Any],
        buffers: Sequence[Any],
        read: Callable[[Any], np.ndarray],
        assign: Callable[[Any, np.ndarray], None],
        widths: Sequence[int] = (),
        share: Callable[[Any, np.ndarray], None] | None = None,
    ):
        self._trained, self._buffers, self._read, self._assign = trained, buffers, read, assign
        self.widths, self._share = tuple(widths) or (0,) * len(trained), share or assign
        self.shapes = [tuple(variable.shape) for variable in trained]
        self._whole = FlatLayout([math.prod(shape) for shape in self.shapes], 1)
        self.sizes = self._whole.sizes
        self.initial = self.buffers()

    def vector(self) -> np.ndarray:
        """Return a copy of the current trained weights."""
        return self._whole.flatten([self._read(variable) for variable in self._trained])

    def buffers(self) -> list[np.ndarray]:
        """Return a copy of the current buffers."""
        return [np.array(self._read(variable)) for variable in self._buffers]

    def with_initial(self, buffers: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """Return all buffers as a list; buffers that were not passed have their initial values."""
        return [buffers.get(number, initial) for number, initial in enumerate(self.initial)]

    def put(self, vector: np.ndarray, buffers: Sequence[np.ndarray]) -> None:
        """Set all trained weights, from a flat vector, and all buffers."""
        weights = zip(self._trained, self._whole.parts(vector), self.widths, strict=True)
        for variable, array, width in weights:
            put = self._share if width else self._assign
            put(variable, np.reshape(array, tuple(variable.shape)))
        for variable, array in zip(self._buffers, buffers, strict=True):
            self._assign(variable, np.reshape(array, tuple(variable.shape)))

    def flat_gradient(
        self, gradients: Sequence[np.ndarray | TouchedRows | None]
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Return the gradients of all trained weights as one vector; a missing gradient is 0.

        Parameters
        ----------
        gradients : sequence of ndarray, TouchedRows or None

        Returns
        -------
        ndarray of float32, dict of int to ndarray
            The vector, with only the touched rows of tables, and the indices of these rows.
        """
        touched, parts = {}, []
        weights = zip(gradients, self.sizes, self.widths, strict=True)
        for number, (gradient, size, width) in enumerate(weights):
            values: Any = gradient
            if isinstance(gradient, TouchedRows):
                touched[number], values = gradient.rows, gradient.values
            elif width and gradient is None:
                touched[number], values = np.empty(0, np.int64), np.empty((0, width), np.float32)
            elif width:  # dense, such as by a penalty on all rows
                touched[number] = np.arange(size // width)
            elif gradient is None:
                values = np.zeros(size, np.float32)
            parts.append(values)
        return self._whole.flatten(parts), touched


@dataclass(frozen=True)
class TouchedRows:
    """Sparse gradient of a table: the touched rows and their values.

    Attributes
    ----------
    rows : ndarray of int64
        Indices of the rows, in ascending order.
    values : ndarray of float32
        Gradient of each row.
    """

    rows: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, gradient: torch.Tensor) -> TouchedRows:
        """Convert a sparse torch tensor to touched rows."""
        summed = gradient.coalesce()
        return cls(summed.indices()[0].numpy(), summed.values().numpy())


class ParameterLayerReplica(ABC):
    """Replica that computes the gradients of one rank's rows.

    Batch sources use it as their worker, with a rank, a world size and exit functions.

    Parameters
    ----------
    program : FitProgram or KerasFitProgram
        Program with model and settings.
    weights : bytes
        Initial values of all weights; every step replaces the trained ones.
    ranks : int
    widths : tuple of int
        See :class:`~bigdl.orca.parameter_layer.plan.LayerPlan`.
    rank : int
    shards : dict of str to Shard

    Raises
    ------
    UsageError
        If the data does not support the sampling.
    """

    def __init__(
        self,
        program: Any,
        weights: bytes,
        ranks: int,
        widths: tuple[int, ...],
        rank: int,
        shards: dict,
    ):
        self.rank, self.world_size, self._widths = rank, ranks, widths
        self._resources = contextlib.ExitStack()
        self.at_exit, self.close = self._resources.callback, self._resources.close
        self._settings = program.settings
        self._is_exact = self._settings.parameter_layer.sampling == "exact"
        self._order: tuple[int, Any] = (-1, None)  # epoch and its row order
        self._config = program.config
        self._data, flat = self._open(program, weights, shards["data"])
        self._flat = cast("FlatModel", flat)  # a rank without rows computes no gradients
        if not self._is_exact and not isinstance(self._data, TensorShard):
            raise UsageError(
                "sampling='window' needs contiguous rows, and a DataLoader is read sample by "
                "sample; omit sampling= or pass arrays",
                code="argument-conflict",
                argument="sampling",
            )
        # a replica that is recreated elsewhere must shuffle alike, so the window must not depend
        # on free memory: by default shuffled rows may use all memory
        memory = self._config.get("shuffle_memory")
        self._window = 0 if memory is None else self._data.window(memory)

    # -- for frameworks -----------------------------------------------------------------

    @abstractmethod
    def _open(
        self, program: object, weights: bytes, shard: Shard
    ) -> tuple[BatchSource, FlatModel | None]:
        """Build the model; return its batch source and flat model (None if there are no rows)."""

    @abstractmethod
    def _gradient(
        self, batch: Tensors, rows: int, step: LayerStep, began: float
    ) -> tuple[list[np.ndarray | TouchedRows | None], float, dict]:
        """Compute the gradient of a batch.

        Parameters
        ----------
        batch : object
        rows : int
        step : LayerStep
        began : float
            Time when the batch was available, by ``time.perf_counter``.

        Returns
        -------
        list of ndarray, TouchedRows or None; float; dict
            Gradient of every trained weight, divisor of the loss, and metrics.
        """

    def _batch(self, step: LayerStep, start: int, stop: int) -> Tensors:
        """Return the rows `start`...`stop` of a step's epoch as a model batch."""
        settings, data = self._settings, self._data
        if step.epoch != self._order[0]:
            of = Pass(settings.shuffle, settings.seed, step.epoch, self.rank, self._window)
            self._order = step.epoch, data.order(of)
        order = self._order[1]
        if self._is_exact:
            return data.batch(start, stop, order)
        key = [settings.seed, step.epoch, step.number, self.rank]
        first = int(np.random.default_rng(key).integers(data.rows))
        indices = (first + np.arange(stop - start)) % data.rows
        if order is not None:
            whole = order if isinstance(order, np.ndarray) else order[0 : data.rows]
            indices = whole[indices]
        return data.batch(0, stop - start, indices)

    def _seed(self, step: LayerStep) -> None:
        """Seed the random generators by step and rank."""
        mixed = np.random.SeedSequence([self._settings.seed, step.epoch, step.number])
        seed_everything(int(mixed.generate_state(1)[0]), self.rank + 1)

    # -- for the parameter layer ---------------------------------------------------------

    def describe(self) -> dict:
        """Return the JSON-serializable facts about the rows that the driver needs."""
        facts, data = self._data.facts(self._window), self._data
        return {**facts, "stream": data.checksum if data.is_stream and data.rows else None}

    def compute(
        self, step: LayerStep, weights: np.ndarray, buffers: Mapping[int, np.ndarray]
    ) -> Contribution:
        """Compute the gradient at `weights`; missing buffers have their initial values."""
        started = time.perf_counter()
        start, stop = step.ranges[self.rank]
        if start == stop:
            return Contribution()
        batch = self._batch(step, start, stop)
        fetched = time.perf_counter()
        before = self._flat.with_initial(buffers)
        self._flat.put(weights, before)
        self._seed(step)
        gradients, counted, record = self._gradient(batch, stop - start, step, fetched)
        vector, touched = self._flat.flat_gradient(gradients)
        return Contribution(
            vector,
            counted,
            stop - start,
            [number for number, gradient in enumerate(gradients) if gradient is None],
            changed(before, self._flat.buffers()),
            {**record, "counted": counted, "fetch_s": fetched - started},
            touched=touched,
        )
