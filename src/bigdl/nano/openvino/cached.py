"""OpenVINO networks in the cache on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.network_cache import (
    CacheEntry,
    find_entry,
    largest_size,
    store_entry,
    surroundings,
)
from bigdl.nano.acceleration.search.results import fingerprint
from bigdl.nano.openvino.network import network_bytes, read_network, write_network

if TYPE_CHECKING:
    import openvino as ov


def load_network(key: str | None) -> ov.Model | None:
    """Return the cached network with this key, or None."""
    return _read_entry(find_entry(key))


def store_network(key: str | None, network: ov.Model, about: Mapping[str, Any]) -> ov.Model:
    """Add a network to the cache; return the stored network, or the network if it is not stored.

    The stored network computes the same. Networks derived from it are equal in all processes, while
    a converter numbers the operators of each process differently.
    """
    entry = store_entry(key, lambda folder: write_network(network, folder), about)
    stored = _read_entry(entry)
    return network if stored is None else stored


def _read_entry(entry: CacheEntry | None) -> ov.Model | None:
    if entry is None:
        return None
    try:
        return read_network(entry.folder)
    except UsageError:  # removed by another process, or damaged
        return None


def quantized_key(
    network: ov.Model, batches: Iterable[Sequence[np.ndarray]], *facts: object
) -> str | None:
    """Return the key of a network that is quantized with calibration data; None if not cached.

    Parameters
    ----------
    network : openvino.Model
        Network before quantization.
    batches : iterable of sequence of ndarray
        Calibration data.
    *facts
        Options of the quantization.
    """
    if not largest_size():
        return None
    digest = hashlib.blake2b(digest_size=20)
    for part in network_bytes(network):
        digest.update(part)
    for batch in batches:
        for array in map(np.ascontiguousarray, batch):
            if array.dtype.hasobject:
                return None
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
    return fingerprint("quantized", digest.hexdigest(), facts, surroundings())
