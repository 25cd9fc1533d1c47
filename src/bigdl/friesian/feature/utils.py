"""Conversion of feature tables to XShards."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from bigdl.friesian.feature.relations import Table, check_table
from bigdl.friesian.ops.column_types import require_columns
from bigdl.friesian.ops.spark import as_names
from bigdl.orca.data import SparkXShards
from bigdl.orca.data.xshards.connect import rows_of

if TYPE_CHECKING:
    from pyspark.sql import Row


def featuretable_to_xshards(
    tbl: Table, convert_cols: str | list[str] | None = None
) -> SparkXShards:
    """Convert a table to XShards that hold one dict of arrays per partition.

    Parameters
    ----------
    tbl : Table
    convert_cols : str or list of str, optional
        Array columns to stack into matrices. Their arrays must have one length within a shard.
        Default: all array columns.

    Returns
    -------
    SparkXShards
        Dicts from column names to NumPy arrays.
    """
    columns = check_table("tbl", tbl).columns
    names = columns if convert_cols is None else as_names(convert_cols, "convert_cols")
    require_columns(columns, names)
    stacked = frozenset(names)

    def shard(rows: Iterable[Row]) -> Iterator[dict[Hashable, np.ndarray]]:
        import pandas as pd

        arrays = {}
        for name, cells in pd.DataFrame(list(rows), columns=columns).items():
            is_matrix = name in stacked and len(cells) and isinstance(cells.iloc[0], list)
            arrays[name] = np.array(cells.tolist()) if is_matrix else cells.to_numpy()
        yield arrays

    return SparkXShards(rows_of(tbl.df).mapPartitions(shard))
