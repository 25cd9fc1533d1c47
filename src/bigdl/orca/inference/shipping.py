"""A model on its way from the driver to the tasks that predict.

The plan of a DataFrame owns an immutable snapshot of the model (a broadcast that nobody destroys),
and each Python worker keeps the few models that it used last.
"""

import contextlib
import functools
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import cloudpickle

from bigdl.common.trust import digest_of
from bigdl.runtime.serialization import pickled_by_value
from bigdl.training.state import device_of_task, isolated_rng

_CACHE_BYTES = 2 << 30
_models: OrderedDict[tuple, tuple] = OrderedDict()  # of this Python worker, with their bytes


class LoadedModel(Protocol):
    """A model loaded on its device, ready for calls.

    Attributes
    ----------
    squeezes : bool
        Whether trailing dimensions of size 1 of its outputs are dropped.
    """

    @property
    def squeezes(self) -> bool: ...

    def __call__(self, batch: list) -> Any:
        """Return the model's outputs for a batch of numpy columns."""


def accepted_by(model: LoadedModel, batch: list) -> list:
    """Return a batch in the dtypes that a model takes, which its method ``accepted`` tells."""
    accepted = getattr(model, "accepted", None)
    return batch if accepted is None else accepted(batch)


class ModelBytes:
    """A model as bytes that a process can load; they run code of the model's author.

    Parameters
    ----------
    data : bytes
        The pickled model, as :class:`ShippedModel` broadcasts it.
    """

    def __init__(self, data: bytes):
        self._data = data

    def snapshot(self) -> Any:
        """Return the object that was pickled: its ``load_on(device)`` gives the model."""
        return cloudpickle.loads(self._data)

    def load(self) -> LoadedModel:
        """The model, on the CPU."""
        import torch

        with isolated_rng(0):
            return _load(self._data, torch.device("cpu"))


class ShippedModel:
    """A model as prediction ships it; what a DataFrame's plan holds of it never changes.

    Parameters
    ----------
    model : object
        It can be pickled; its ``load_on(device)`` loads it in a process on a device and returns a
        :class:`LoadedModel`.
    sc : pyspark.SparkContext
    origin : tuple
        What the model was made of, for :meth:`is_of`.

    Attributes
    ----------
    digest : str
        Of what was broadcast.
    broadcast : pyspark.Broadcast
    """

    def __init__(self, model: Any, sc: Any, origin: tuple):
        self._origin = sc, *origin
        advice = "create such objects inside the model creator instead"
        data = pickled_by_value(model, "The model cannot be shipped to the workers", advice)
        self.digest = digest_of(data)
        self.broadcast = sc.broadcast(data)

    @property
    def owner(self) -> Any:
        """The SparkContext in which it was broadcast."""
        return self._origin[0]

    def is_of(self, *origin) -> bool:
        """Return True if it was made from these values, the first of which is a SparkContext."""
        return len(origin) == len(self._origin) and all(
            old is new or (isinstance(old, str | int) and old == new)
            for old, new in zip(self._origin, origin, strict=True)
        )

    def in_task(self, threads: int) -> Callable[[], contextlib.AbstractContextManager[LoadedModel]]:
        """Return a picklable context manager that gives the model to a task.

        Parameters
        ----------
        threads : int
            Of torch in the task.
        """
        paths = tuple(sys.path)  # user modules that the model's pickle refers to
        return functools.partial(_in_task, self.digest, self.broadcast, paths, threads)

    def load(self) -> LoadedModel:
        """The model, on the driver and its CPU."""
        return ModelBytes(self.broadcast.value).load()


def shipped_of(
    make: Callable[[], Any], previous: ShippedModel | None, sc: Any, *origin: Any
) -> ShippedModel:
    """Broadcast a model, unless it is what was broadcast last.

    Parameters
    ----------
    make : callable
        Makes the model.
    previous : ShippedModel, optional
        What was broadcast last.
    sc : pyspark.SparkContext
    *origin
        What the model is made of: texts, whole numbers, and objects that are compared by identity.
    """
    if previous is not None and previous.is_of(sc, *origin):
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
    """The model of a broadcast, from this Python worker's cache of those used last."""
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
