"""Encoders of strings and scalers of numbers, for XShards of pandas frames.

Each learns from all shards together, in one pass, and changes every shard where it lies.
"""

from bigdl.orca.data.transformer.encoding import (
    StringIndex,
    StringIndexer,
    category_encode,
    encode_string,
    gen_string_idx,
)
from bigdl.orca.data.transformer.scalers import MinMaxScaler, StandardScaler

__all__ = [
    "MinMaxScaler",
    "StandardScaler",
    "StringIndex",
    "StringIndexer",
    "category_encode",
    "encode_string",
    "gen_string_idx",
]
