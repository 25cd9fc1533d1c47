"""Key-value caches of transformers for accelerated decoders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from bigdl.common.errors import UsageError
from bigdl.nano.openvino.stateful import NetworkState

if TYPE_CHECKING:
    from bigdl.nano.openvino.network import CompiledNetwork

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer."""


def cache_of(pairs: Iterable[Pair]) -> DynamicCache:
    """Build a cache from keys and values, one pair per layer."""
    cache = DynamicCache()
    fill(cache, pairs)
    return cache


def fill(cache: Cache, pairs: Iterable[Pair]) -> None:
    """Replace a cache's content with the given keys and values, one pair per layer."""
    layers: list[Any] = []
    for keys, values in pairs:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        layers.append(layer)
    cache.layers = layers


def pairs_of(cache: Cache) -> list[Pair]:
    """Return the keys and values of each layer; an empty list for an empty cache."""
    layers: Any = cache.layers
    return [(each.keys, each.values) for each in layers] if cache.get_seq_length() else []


def check_cache(cache: object) -> None:
    """Raise UsageError unless a cache contains the keys and values of all tokens.

    Raises
    ------
    UsageError
        Names the class of the cache.
    """
    if not holds_all(cache):
        raise UsageError(
            "An accelerated decoder takes a DynamicCache of all tokens, not a "
            f"{type(cache).__name__}; leave cache_implementation out, or use the original",
            code="argument-type",
        )


def holds_all(cache: object) -> bool:
    """Return True if all layers of a cache contain the keys and values of all tokens."""
    return (
        isinstance(cache, Cache)
        and all(isinstance(each, DynamicLayer) for each in cache.layers)
        and not any(cache.is_sliding)
    )


class StateLayer(DynamicLayer):
    """Cache layer whose keys and values are stored in an OpenVINO network.

    Parameters
    ----------
    state : NetworkState
        State shared by all layers of a cache; only the first layer changes it.
    index : int
        Index of the layer.
    """

    def __init__(self, state: NetworkState, index: int):
        # does not call the base's __init__, which sets keys and values
        self.state = state
        self._index = index
        self.is_initialized = True
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return a copy of the keys or values."""
        if name not in ("keys", "values"):
            raise AttributeError(name)
        return torch.from_numpy(self.state.read()[2 * self._index + (name == "values")])

    def update(
        self, key_states: object, value_states: object, *args: object, **kwargs: object
    ) -> NoReturn:
        """Raise UsageError: only the network can fill this layer."""
        raise UsageError(
            "This cache belongs to an accelerated decoder; pass another cache to the original",
            code="model-mismatch",
        )

    def get_seq_length(self) -> int:
        return self.state.tokens

    def reset(self) -> None:
        if self._index == 0:
            self.state.clear()

    def crop(self, tokens_to_remove: int) -> None:
        if self._index == 0 and tokens_to_remove < 0:
            self.state.crop(self.state.tokens + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self._index == 0:
            self.state.select(beam_idx.numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._index == 0:
            self.state.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._index == 0:
            self.state.select(indices.numpy())


def state_of(cache: Cache, network: CompiledNetwork, layers: int) -> NetworkState:
    """Return the OpenVINO state that stores a cache's content; create it if the cache has none.

    Parameters
    ----------
    cache : Cache
        Cache; afterwards its layers are :class:`StateLayer` objects.
    network : CompiledNetwork
    layers : int
        Number of layers.
    """
    first = cache.layers[0] if cache.layers else None
    if isinstance(first, StateLayer):
        return first.state
    pairs = pairs_of(cache)
    state = NetworkState(network)
    if pairs:
        state.write([each.detach().float().numpy() for pair in pairs for each in pair])
    cache.layers = [StateLayer(state, index) for index in range(layers)]
    return state
