"""Encoders of strings and scalers of numbers, for XShards of pandas frames.

Each learns from all shards together, in one pass, and changes every shard where it lies.
"""

import numpy as np

from bigdl.orca.data.transformer.encoding import (
    StringIndex,
    StringIndexer,
    category_encode,
    encode_string,
    gen_string_idx,
)
from bigdl.orca.data.transformer.scalers import MinMaxScaler, StandardScaler
from bigdl.orca.settings import OrcaContext

# BigDL 2.x's programs also take `np` and `OrcaContext` from here, by a star.
__all__ = [
    "MinMaxScaler",
    "OrcaContext",
    "StandardScaler",
    "StringIndex",
    "StringIndexer",
    "category_encode",
    "encode_string",
    "gen_string_idx",
    "np",
]
