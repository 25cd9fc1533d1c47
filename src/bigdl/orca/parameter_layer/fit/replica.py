"""A model as the parameter layer sees it, and the rows of one rank, of which every step takes some.

:class:`ParameterLayerReplica` runs in the ranks; the driver has a :class:`FlatModel` of its own.
"""

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.parameter_layer.plan import FlatLayout, LayerStep
from bigdl.orca.parameter_layer.rank import Contribution, changed
from bigdl.training.batches import BatchSource, Pass, TensorShard
from bigdl.training.state import seed_everything


class FlatModel:
    """Trained weights of a model as one flat vector, and its buffers: what layers change besides.

    Parameters
    ----------
    trained, buffers : sequence
        Variables of the framework.
    read : callable
        Return a variable as an array, perhaps as a view.
    assign : callable
        ``assign(variable, array)`` sets a variable to an array of its shape.
    widths : sequence of int, optional
        Of the trained weights that are tables, whose gradients have some rows alone, the elements
        of a row; 0 of others, and by default of all.
    share : callable, optional
        The same as `assign`, for tables: the variable may use the memory of the array from then on.

    Attributes
    ----------
    shapes, sizes : sequence
        Of the trained weights.
    initial : list of ndarray
        The buffers as they were at the start.
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
        """Return the trained weights as they are now."""
        return self._whole.flatten([self._read(variable) for variable in self._trained])

    def buffers(self) -> list[np.ndarray]:
        """Return a copy of the buffers as they are now."""
        return [np.array(self._read(variable)) for variable in self._buffers]

    def with_initial(self, buffers: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """Return all buffers: those that are given by number, the others as at the start."""
        return [buffers.get(number, initial) for number, initial in enumerate(self.initial)]

    def put(self, vector: np.ndarray, buffers: Sequence[np.ndarray]) -> None:
        """Set the trained weights to those of a vector, and all buffers."""
        weights = zip(self._trained, self._whole.parts(vector), self.widths, strict=True)
        for variable, array, width in weights:
            put = self._share if width else self._assign
            put(variable, np.reshape(array, tuple(variable.shape)))
        for variable, array in zip(self._buffers, buffers, strict=True):
            self._assign(variable, np.reshape(array, tuple(variable.shape)))

    def flat_gradient(
        self, gradients: Sequence["np.ndarray | TouchedRows | None"]
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Return the gradients of all trained weights as a vector; one that is missing is 0.

        Parameters
        ----------
        gradients : sequence of ndarray, TouchedRows or None

        Returns
        -------
        ndarray of float32, dict of int to ndarray
            The vector, which has the touched rows of tables alone, and the numbers of these rows.
        """
        touched, parts = {}, []
        weights = zip(gradients, self.sizes, self.widths, strict=True)
        for number, (gradient, size, width) in enumerate(weights):
            values: Any = gradient
            if isinstance(gradient, TouchedRows):
                touched[number], values = gradient.rows, gradient.values
            elif width and gradient is None:
                touched[number], values = np.empty(0, np.int64), np.empty((0, width), np.float32)
            elif width:  # by a penalty on all rows, for example
                touched[number] = np.arange(size // width)
            elif gradient is None:
                values = np.zeros(size, np.float32)
            parts.append(values)
        return self._whole.flatten(parts), touched


@dataclass(frozen=True)
class TouchedRows:
    """A gradient of some rows of a table.

    Attributes
    ----------
    rows : ndarray of int64
        Their numbers, in ascending order.
    values : ndarray of float32
        A row for each.
    """

    rows: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, gradient: Any) -> "TouchedRows":
        """The rows of a sparse tensor of torch."""
        summed = gradient.coalesce()
        return cls(summed.indices()[0].numpy(), summed.values().numpy())


class ParameterLayerReplica(ABC):
    """Computes gradients of one rank's rows: a ``Replica`` of the parameter layer.

    To the sources of its batches it is the worker, with a rank, a world size and exit functions.

    Parameters
    ----------
    program : FitProgram or KerasFitProgram
        Model and settings, as workers get them.
    weights : bytes
        All weights at the start; trained ones are replaced in every step, others are not.
    ranks : int
    widths : tuple of int
        See :class:`~bigdl.orca.parameter_layer.plan.LayerPlan`.
    rank : int
    shards : dict of str to Shard

    Raises
    ------
    UsageError
        If the data cannot be sampled like that.
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
        self._order: tuple[int, Any] = (-1, None)  # of an epoch
        self._config = program.config
        self._data, flat = self._open(program, weights, shards["data"])
        self._flat = cast("FlatModel", flat)  # a rank without rows is never asked for a gradient
        if not self._is_exact and not isinstance(self._data, TensorShard):
            raise UsageError(
                "sampling='window' needs rows that are side by side, and a DataLoader is read "
                "sample by sample; leave sampling= out or pass arrays",
                code="argument-conflict",
                argument="sampling",
            )
        # a replica that is made again elsewhere shuffles alike, so it must not depend on what is
        # free there: by default shuffled rows may take all memory
        memory = self._config.get("shuffle_memory")
        self._window = 0 if memory is None else self._data.window(memory)

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def _open(
        self, program: Any, weights: bytes, shard: Any
    ) -> tuple[BatchSource, FlatModel | None]:
        """Make the model; return the source of its batches and the flat model, if it has rows."""

    @abstractmethod
    def _gradient(
        self, batch: Any, rows: int, step: LayerStep, began: float
    ) -> tuple[list[np.ndarray | TouchedRows | None], float, dict]:
        """Compute the gradient of a batch.

        Parameters
        ----------
        batch : object
        rows : int
        step : LayerStep
        began : float
            When the batch was there, by ``time.perf_counter``.

        Returns
        -------
        list of ndarray, TouchedRows or None; float; dict
            The gradient of every trained weight, what the loss was divided by, and figures.
        """

    def _batch(self, step: LayerStep, start: int, stop: int) -> Any:
        """The rows `start`...`stop` of a step's epoch, as the model takes them."""
        settings, data = self._settings, self._data
        if step.epoch != self._order[0]:
            of = Pass(settings.shuffle, settings.seed, step.epoch, self.rank, self._window)
            self._order = step.epoch, data.order(of)
        order = self._order[1]
        if self._is_exact:
            return data.batch(start, stop, order)
        key = [settings.seed, step.epoch, step.number, self.rank]
        first = int(np.random.default_rng(key).integers(data.rows))
        places = (first + np.arange(stop - start)) % data.rows
        if order is not None:
            whole = order if isinstance(order, np.ndarray) else order[0 : data.rows]
            places = whole[places]
        return data.batch(0, stop - start, places)

    def _seed(self, step: LayerStep) -> None:
        """Draw random numbers of this step and rank alone."""
        mixed = np.random.SeedSequence([self._settings.seed, step.epoch, step.number])
        seed_everything(int(mixed.generate_state(1)[0]), self.rank + 1)

    # -- what the parameter layer asks ---------------------------------------------------------

    def describe(self) -> dict:
        """Return what the driver needs to know of the rows; JSON-able."""
        facts, data = self._data.facts(self._window), self._data
        return {**facts, "stream": data.checksum if data.is_stream and data.rows else None}

    def compute(
        self, step: LayerStep, weights: np.ndarray, buffers: Mapping[int, np.ndarray]
    ) -> Contribution:
        """The gradient at `weights`; buffers that are not given are as they were at the start."""
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
