"""Encoders of strings and scalers of numbers, for XShards of pandas frames.

Each is fitted on all shards in one pass, and transforms every shard in its partition.
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

# Programs for BigDL 2.x also import `np` and `OrcaContext` from here with a star import.
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
