"""A model on its way from the driver to the tasks that predict.

The plan of a DataFrame owns an immutable snapshot of the model (a broadcast that nobody destroys),
and each Python worker keeps the few models that it used last.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bigdl.common.errors import UsageError
from bigdl.orca.learn.device import device_of_task, precision_of, to_device

__all__ = ["Ready", "Shipped", "Snapshot", "cached_model", "digest_of"]

_CACHE_BYTES = 2 << 30
_models: OrderedDict[tuple, tuple] = OrderedDict()  # of this Python worker, with their bytes


@dataclass(frozen=True)
class Ready:
    """A model where it computes.

    Attributes
    ----------
    model : torch.nn.Module
    device : torch.device
    precision : str
        ``"fp32"`` or ``"bf16"``.
    squeezes : bool
        Whether trailing dimensions of size 1 of its outputs are dropped.
    """

    model: Any
    device: Any
    precision: str
    squeezes: ClassVar[bool] = True

    def __call__(self, batch: list):
        """What the model returns for a batch of numpy columns."""
        import torch

        columns = to_device([_tensor(column) for column in batch], self.device)
        with torch.no_grad(), precision_of(self.precision, self.device)():
            return self.model(*columns)


@dataclass(frozen=True)
class Snapshot:
    """A model on its way to the tasks: anything with a method ``ready`` can take its place.

    Attributes
    ----------
    parts : ModelParts
    weights : bytes or None
        State dict of the model; None if the model carries its weights itself.
    precision : str
        ``"bf16"`` computes in bfloat16 where torch's autocast does; predictions are float32.
    """

    parts: Any
    weights: bytes | None
    precision: str = "fp32"

    @classmethod
    def of(cls, parts, weights: bytes, precision: str = "fp32") -> Snapshot:
        """The model of an Estimator's parts with these weights."""
        from bigdl.orca.learn.state import load_into

        parts = replace(parts, loss=None, optimizer=None, scheduler_creator=None)
        if not parts.is_instance:
            return cls(parts, weights, precision)
        parts = replace(parts, model=parts.build_model())
        load_into(parts.model, weights)
        return cls(parts, None, precision)

    def ready(self, device) -> Ready:
        """The model, in a process and on a device."""
        from bigdl.orca.learn.state import load_into

        model = self.parts.build_model()
        if self.weights is not None:
            load_into(model, self.weights)
        return Ready(model.eval().to(device), device, self.precision)


class Shipped:
    """A model as prediction ships it; what a DataFrame's plan holds of it never changes.

    Parameters
    ----------
    snapshot : Snapshot
        Or another object that can be pickled and has its method ``ready``.
    sc : pyspark.SparkContext
    origin : tuple
        What the snapshot was made of, for :meth:`is_of`.

    Attributes
    ----------
    digest : str
        Of what was broadcast.
    broadcast : pyspark.Broadcast
    """

    def __init__(self, snapshot, sc, origin: tuple = ()):
        import cloudpickle

        self._origin = sc, *origin
        try:
            data = cloudpickle.dumps(snapshot)
        except Exception as error:
            raise UsageError(
                f"The model cannot be shipped to the workers, since it refers to something that "
                f"cannot be pickled ({error}); create such objects inside the model creator instead"
            ) from error
        self.digest = digest_of(data)
        self.broadcast = sc.broadcast(data)

    @classmethod
    def of(
        cls, parts, weights: bytes, sc, precision: str, previous: Shipped | None = None
    ) -> Shipped:
        """Broadcast a model, unless it is what was broadcast last."""
        origin = parts, digest_of(weights)
        if previous is not None and previous.is_of(sc, *origin):
            return previous
        return cls(Snapshot.of(parts, weights, precision), sc, origin)

    def is_of(self, *origin) -> bool:
        """Whether it was made of the same, a SparkContext first."""
        return len(origin) == len(self._origin) and all(
            old is new or (isinstance(old, str | int) and old == new)
            for old, new in zip(self._origin, origin, strict=True)
        )

    def load(self):
        """The model, on the driver and its CPU."""
        import torch

        from bigdl.orca.learn.state import isolated_rng

        with isolated_rng(0):
            return _load(self.broadcast.value, torch.device("cpu"))


def digest_of(*pieces: bytes) -> str:
    """SHA-256, in hexadecimal, of bytes one after the other."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def cached_model(digest: str, broadcast) -> Ready:
    """The model of a snapshot, from this Python worker's cache of those used last."""
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


def _load(data: bytes, device) -> Ready:
    import cloudpickle

    return cloudpickle.loads(data).ready(device)


def _tensor(column):
    import torch

    if isinstance(column, dict):
        return {key: _tensor(value) for key, value in column.items()}
    return torch.tensor(column)
