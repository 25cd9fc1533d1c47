"""The state of a training as bytes of torch and back, loadable with ``weights_only=True``."""

from __future__ import annotations

import contextlib
import io
import random

__all__ = [
    "capture_rng",
    "dumps",
    "isolated_rng",
    "loads",
    "restore_rng",
    "seed_everything",
]


def dumps(value) -> bytes:
    """Tensors and plain containers as the bytes of ``torch.save``; all tensors on the CPU."""
    import torch

    from bigdl.training.device import to_cpu

    buffer = io.BytesIO()
    torch.save(to_cpu(value) if torch.cuda.is_available() else value, buffer)
    return buffer.getvalue()


def loads(data: bytes):
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
def isolated_rng(seed: int):
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

    _, keys, position, has_gauss, cached = np.random.get_state()
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
