"""Shipping of a model from the driver to the tasks that predict.

A DataFrame's plan owns an immutable snapshot of the model, a broadcast that is never destroyed.
Each Python worker keeps its most recently used models loaded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from bigdl.common.trust import digest_of
from bigdl.runtime.serialization import pickled_by_value
from bigdl.training.state import device_of_task, isolated_rng

if TYPE_CHECKING:
    from bigdl.common.types import Tensors
    from bigdl.runtime.cluster import Broadcaster

_CACHE_BYTES = 2 << 30
_models: OrderedDict[tuple, tuple] = (
    OrderedDict()
)  # LRU cache of this Python worker: (model, size in bytes)


class LoadedModel(Protocol):
    """A model loaded on its device, ready for calls.

    Attributes
    ----------
    squeezes : bool
        Whether to drop trailing dimensions of size 1 from the outputs.
    """

    @property
    def squeezes(self) -> bool: ...

    def __call__(self, batch: list) -> Tensors:
        """Return the model's outputs for a batch of numpy columns."""


class WrappedModel:
    """Base class of loaded models that call another one, which has all other attributes.

    Attributes
    ----------
    model : LoadedModel
    """

    model: LoadedModel

    @property
    def squeezes(self) -> bool:
        """True if trailing dimensions of size 1 are dropped from the outputs."""
        return self.model.squeezes

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "model":  # requested during unpickling
            raise AttributeError(name)
        return getattr(self.model, name)


def cast_to_accepted(model: LoadedModel, batch: list) -> list:
    """Cast a batch with the model's method ``accepted``, if the model has one."""
    accepted = getattr(model, "accepted", None)
    return batch if accepted is None else accepted(batch)


class ModelBytes:
    """A pickled model; unpickling it can run arbitrary code.

    Parameters
    ----------
    data : bytes
        The pickled model, as :class:`ShippedModel` broadcasts it.
    """

    def __init__(self, data: bytes):
        self._data = data

    def snapshot(self) -> Any:  # the class of the Estimator that shipped it
        """Unpickle the snapshot; its ``load_on(device)`` returns the loaded model."""
        return cloudpickle.loads(self._data)

    def load(self) -> LoadedModel:
        """Load the model on the CPU."""
        import torch

        with isolated_rng(0):
            return _load(self._data, torch.device("cpu"))


class ShippedModel:
    """Immutable broadcast of a pickled model for prediction tasks.

    Parameters
    ----------
    model : object
        A picklable snapshot. ``load_on(device)`` loads it on a device and returns a
        :class:`LoadedModel`.
    sc : Broadcaster
    origin : tuple
        Values that the model was built from, for :meth:`has_origin`.

    Attributes
    ----------
    digest : str
        Digest of the broadcast bytes.
    broadcast : BroadcastBytes
    """

    def __init__(self, model: object, sc: Broadcaster, origin: tuple):
        self._origin = sc, *origin
        advice = "create such objects inside the model creator instead"
        data = pickled_by_value(model, "The model cannot be shipped to the workers", advice)
        self.digest = digest_of(data)
        self.broadcast = sc.broadcast(data)

    @property
    def owner(self) -> Broadcaster:
        """Object that broadcast the model."""
        return self._origin[0]

    def has_origin(self, *origin) -> bool:
        """Return True if the model was built from these values, starting with its owner."""
        return len(origin) == len(self._origin) and all(
            old is new or (isinstance(old, str | int) and old == new)
            for old, new in zip(self._origin, origin, strict=True)
        )

    def in_task(self, threads: int) -> Callable[[], contextlib.AbstractContextManager[LoadedModel]]:
        """Return a picklable function whose context manager yields the loaded model in a task.

        Parameters
        ----------
        threads : int
            Number of torch threads in the task.
        """
        paths = tuple(sys.path)  # user modules that the model's pickle refers to
        return functools.partial(_in_task, self.digest, self.broadcast, paths, threads)

    def load(self) -> LoadedModel:
        """Load the model on the driver's CPU."""
        return ModelBytes(self.broadcast.value).load()


def ship_model(
    make: Callable[[], Any], previous: ShippedModel | None, sc: Broadcaster, *origin: object
) -> ShippedModel:
    """Broadcast a model, or reuse the previous broadcast if `origin` is the same.

    Parameters
    ----------
    make : callable
        Returns the model to pickle.
    previous : ShippedModel, optional
        The latest broadcast.
    sc : Broadcaster
    *origin
        Values that the model is built from. Strings and integers are compared by value, other
        objects by identity.
    """
    if previous is not None and previous.has_origin(sc, *origin):
        return previous
    return ShippedModel(make(), sc, origin)


@contextlib.contextmanager
def _in_task(digest: str, broadcast, paths: tuple[str, ...], threads: int) -> Iterator[LoadedModel]:
    for path in reversed(paths):
        if path not in sys.path and os.path.exists(path):
            sys.path.insert(0, path)
    from bigdl.common.cpu import thread_scope
    from bigdl.common.memory import freeze_modules

    freeze_modules()
    with thread_scope(threads):
        yield _cached(digest, broadcast)


def _cached(digest: str, broadcast) -> LoadedModel:
    """Load a broadcast model through the LRU cache of this Python worker."""
    device = device_of_task()
    key = digest, str(device)
    if key in _models:
        _models.move_to_end(key)
        return _models[key][0]
    data = broadcast.value
    model = _load(data, device)
    _models[key] = (model, len(data))
    while len(_models) > 1 and sum(size for _, size in _models.values()) > _CACHE_BYTES:
        _models.popitem(last=False)
    return model


def _load(data: bytes, device) -> LoadedModel:
    return cloudpickle.loads(data).load_on(device)
