"""The state of a training: torch's bytes of it, random generators, and what layers change.

Bytes are those of ``torch.save`` and load with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import io
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from bigdl.runtime.collectives.base import GradientSync

__all__ = [
    "RunningState",
    "capture_rng",
    "dumps",
    "isolated_rng",
    "loads",
    "restore_rng",
    "seed_everything",
]


def dumps(value: Any) -> bytes:
    """Tensors and plain containers as the bytes of ``torch.save``; all tensors on the CPU."""
    import torch

    from bigdl.training.device import to_cpu

    buffer = io.BytesIO()
    torch.save(to_cpu(value) if torch.cuda.is_available() else value, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The inverse of :func:`dumps`; runs no code of the data."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch, numpy and random; ranks draw different numbers."""
    import numpy as np
    import torch

    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    torch.manual_seed(mixed)
    np.random.seed(mixed)
    random.seed(mixed)


@contextlib.contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Run a block under a seed and leave the random generators of the process as they were."""
    before = capture_rng()
    seed_everything(seed)
    try:
        yield
    finally:
        restore_rng(before)


def capture_rng() -> dict:
    """The state of the random generators of torch, numpy and random."""
    import numpy as np
    import torch

    _, keys, position, has_gauss, cached = cast("tuple", np.random.get_state())
    version, numbers, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": torch.from_numpy(keys.astype("int64")),
        "numpy_rest": [int(position), int(has_gauss), float(cached)],
        "random": torch.tensor(numbers, dtype=torch.int64),
        "random_rest": [version, gauss],
    }


def restore_rng(state: dict) -> None:
    """The inverse of :func:`capture_rng`."""
    import numpy as np
    import torch

    torch.set_rng_state(state["torch"])
    if state.get("cuda") is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    position, has_gauss, cached = state["numpy_rest"]
    keys = state["numpy"].numpy().astype("uint32")
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    version, gauss = state["random_rest"]
    random.setstate((version, tuple(state["random"].tolist()), gauss))


class RunningState(ABC):
    """State that layers change besides the weights, merged over the workers at every epoch's end.

    A floating value becomes the mean over the workers, weighted by the rows that each has seen
    since the last merge; an integer one (a counter) becomes the largest.  A value that no worker
    has changed, such as a mask or a positional encoding, is left alone to the last bit.

    Parameters
    ----------
    model : torch.nn.Module or keras.Model
        Of equal values on all ranks.
    sync : GradientSync

    Attributes
    ----------
    rows : int
        Rows that this worker has seen since the last merge; the loop adds to it.
    """

    def __init__(self, model: Any, sync: GradientSync):
        self._model, self._sync = model, sync
        self.rows = 0
        self._merged = self.own()

    @abstractmethod
    def own(self) -> list:
        """A copy of this worker's values, as tensors."""

    @abstractmethod
    def put(self, values: list) -> None:
        """Set this worker's values, e.g. to what :meth:`own` gave."""

    def merge(self) -> None:
        """Make the values of all workers equal; a collective."""
        self.put(self._merge())
        self.rows = 0
        self._merged = self.own()

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Have merged values for the time of the block; a collective.

        What a checkpoint holds does not depend on when it is taken, and to take it does not change
        the run.
        """
        own = self.own()
        self.put(self._merge())
        try:
            yield
        finally:
            self.put(own)

    def _merge(self) -> list:
        import torch

        values = self.own()
        if self._sync.world_size == 1 or not values:
            return values
        changed = [float(not torch.equal(a, b)) for a, b in zip(values, self._merged, strict=True)]
        workers = self._sync.all_gather([float(self.rows), *changed])
        rows = sum(row[0] for row in workers)
        for i, value in enumerate(values):
            if not any(row[1 + i] for row in workers):
                continue
            if not (value.is_floating_point() or value.is_complex()):
                wide = torch.uint8 if value.dtype == torch.bool else torch.int64
                values[i] = self._sync.all_reduce(value.to(wide), "max").to(value.dtype)
                continue
            share = self.rows / rows if rows else 1.0 / len(workers)
            # what a worker without rows has may be anything, a nan included
            part = value * share if share else torch.zeros_like(value)
            values[i] = self._sync.all_reduce(part.contiguous())
        return values
