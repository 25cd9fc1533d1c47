"""Caches of transformers as accelerated decoders fill and read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from bigdl.common.errors import UsageError
from bigdl.nano.openvino.stateful import NetworkState

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer."""


def cache_of(pairs: Iterable[Pair]) -> DynamicCache:
    """Return a cache that holds keys and values, one pair for each layer."""
    cache = DynamicCache()
    fill(cache, pairs)
    return cache


def fill(cache: Cache, pairs: Iterable[Pair]) -> None:
    """Let a cache hold other keys and values."""
    layers: list[Any] = []
    for keys, values in pairs:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        layers.append(layer)
    cache.layers = layers


def pairs_of(cache: Cache) -> list[Pair]:
    """Return the keys and values of each layer; none of an empty cache."""
    layers: Any = cache.layers
    return [(each.keys, each.values) for each in layers] if cache.get_seq_length() else []


def check_cache(cache: object) -> None:
    """Refuse a cache that does not hold the keys and values of all tokens.

    Raises
    ------
    UsageError
        With its class.
    """
    if not holds_all(cache):
        raise UsageError(
            "An accelerated decoder takes a DynamicCache of all tokens, not a "
            f"{type(cache).__name__}; leave cache_implementation out, or use the original",
            code="argument-type",
        )


def holds_all(cache: object) -> bool:
    """Return True if each layer of a cache holds the keys and values of all tokens."""
    return (
        isinstance(cache, Cache)
        and all(isinstance(each, DynamicLayer) for each in cache.layers)
        and not any(cache.is_sliding)
    )


class StateLayer(DynamicLayer):
    """One layer of a cache whose tensors are in a network of OpenVINO.

    Parameters
    ----------
    state : NetworkState
        Common to all layers of a cache: the first layer changes it for all.
    place : int
        Number of the layer.
    """

    def __init__(self, state: NetworkState, place: int):
        # not the base's, which sets keys and values
        self.state = state
        self._place = place
        self.is_initialized = True
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return copies of the keys and values."""
        if name not in ("keys", "values"):
            raise AttributeError(name)
        return torch.from_numpy(self.state.read()[2 * self._place + (name == "values")])

    def update(
        self, key_states: object, value_states: object, *args: object, **kwargs: object
    ) -> NoReturn:
        """Refuse tensors: only its network fills this layer."""
        raise UsageError(
            "This cache belongs to an accelerated decoder; the original needs its own",
            code="model-mismatch",
        )

    def get_seq_length(self) -> int:
        return self.state.tokens

    def reset(self) -> None:
        if self._place == 0:
            self.state.clear()

    def crop(self, tokens_to_remove: int) -> None:
        if self._place == 0 and tokens_to_remove < 0:
            self.state.crop(self.state.tokens + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self._place == 0:
            self.state.select(beam_idx.numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._place == 0:
            self.state.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._place == 0:
            self.state.select(indices.numpy())


def state_of(cache: Cache, network: Any, layers: int) -> NetworkState:
    """Return the state of a cache; an empty cache, or one with tensors, gets one.

    Parameters
    ----------
    cache : Cache
        Holds layers of the class :class:`StateLayer` afterwards.
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
    cache.layers = [StateLayer(state, place) for place in range(layers)]
    return state
