"""Facts about items that metrics use: training counts, catalogue and features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.errors import UsageError
from bigdl.friesian.metrics.tables import (
    Table,
    as_arrow,
    as_table,
    check_same_type,
    column_names,
    ids,
    index_in,
)
from bigdl.orca.data.xshards.frames import quoted

__all__ = ["NEEDED_TABLES", "ItemFacts", "item_facts"]

NEEDED_TABLES: dict[str, tuple[str, ...]] = {
    "novelty": ("train",),
    "popularity": ("train",),
    "serendipity": ("train",),
    "coverage": ("catalogue", "train"),
    "gini": ("catalogue", "train"),
    "intra_list_diversity": ("item_features",),
}
"""Metrics that need another table, and the arguments of which at least one is required."""


@dataclass(frozen=True)
class ItemFacts:
    """Training counts, catalogue membership and feature codes of items.

    Attributes
    ----------
    items : pyarrow.Array
        Distinct ids.
    users, rows : numpy.ndarray of int64, shape (items,)
        Number of users and of rows of the training table with the item.
    all_users : int
        Number of users in the training table.
    in_catalogue : numpy.ndarray of bool, shape (items,)
        True for items that can be recommended.
    features : numpy.ndarray of int64, shape (items, columns)
        Codes of the items' features; -1 in all columns for an item without features.
    """

    items: pa.Array
    users: np.ndarray
    rows: np.ndarray
    all_users: int
    in_catalogue: np.ndarray
    features: np.ndarray

    # Computed once for all batches of users and all k.

    @cached_property
    def catalogue_size(self) -> int:
        return int(self.in_catalogue.sum())

    @cached_property
    def self_information(self) -> np.ndarray:
        """``-log2`` of the share of users with each item; the last entry is for unknown items."""
        users = np.append(np.maximum(self.users, 1), 1)
        return -np.log2(users / max(self.all_users, 1))

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of training rows of each item; the last entry is for unknown items."""
        return np.append(self.rows, 0).astype(np.float64)

    @cached_property
    def popularity(self) -> np.ndarray:
        """Share of items that are less popular than each item; 0 for unknown items."""
        size = self.catalogue_size
        _, dense = np.unique(-self.rows, return_inverse=True)
        share = np.maximum(size - dense, 0) / size
        return np.append(np.where(self.rows > 0, share, 0.0), 0.0)


def item_facts(
    train: Table | None,
    catalogue: Table | Iterable[Any] | None,
    features: Table | None,
    user_col: str,
    item_col: str,
) -> ItemFacts:
    """Count training rows and users per item, and add catalogue membership and features.

    Raises
    ------
    UsageError
        For tables with unsuitable columns, ids or rows.
    """
    counted, all_users = _train_counts(train, user_col, item_col)
    listed = counted["item"] if catalogue is None else _catalogue(catalogue, item_col)
    described, codes = _features(features, item_col)
    parts = {"train": counted["item"], "catalogue": listed, "item_features": described}
    kept = {name: each for name, each in parts.items() if len(each)}
    expected = next(iter(kept.values())).type if kept else pa.int64()
    for name, each in kept.items():
        check_same_type(expected, each.type, name, item_col)
    chunks = [chunk for each in kept.values() for chunk in each.chunks]
    items = pc.unique(pa.chunked_array(chunks, expected))
    users, rows = np.zeros((2, len(items)), dtype=np.int64)
    at = np.asarray(pc.index_in(counted["item"].cast(expected), value_set=items))
    users[at], rows[at] = np.asarray(counted["users"]), np.asarray(counted["rows"])
    return ItemFacts(
        items=items,
        users=users,
        rows=rows,
        all_users=all_users,
        in_catalogue=np.asarray(pc.is_in(items, value_set=listed.cast(expected))),
        features=codes[index_in(items, described.cast(expected))],
    )


def _train_counts(train: Table | None, user_col: str, item_col: str) -> tuple[pa.Table, int]:
    """Count the users and training rows of each item, and all users of the table."""
    names = ["item", "users", "rows"]
    if train is None:
        empty = pa.chunked_array([], pa.int64())
        return pa.table([empty] * 3, names=names), 0
    table = as_table(train, "train", [user_col, item_col])
    if isinstance(table, pa.Table):
        users = ids(table, user_col, "train")
        pairs = pa.table({"user": users, "item": ids(table, item_col, "train")})
        counted = pairs.group_by("item").aggregate([("user", "count_distinct"), ("user", "count")])
        counted = counted.select(["item", "user_count_distinct", "user_count"])
        return counted.rename_columns(names), len(pc.unique(users))
    from pyspark.sql import functions as F

    from bigdl.orca.cluster.versions import to_arrow

    user, item = F.col(quoted(user_col)), F.col(quoted(item_col))
    per_item = to_arrow(table.groupBy(item).agg(F.countDistinct(user), F.count(user)))
    per_item = per_item.rename_columns([item_col, *names[1:]])
    items = ids(per_item, item_col, "train")
    all_users = table.agg(F.countDistinct(user)).collect()[0][0]
    return pa.table([items, per_item["users"], per_item["rows"]], names=names), all_users


def _catalogue(catalogue: Table | Iterable[Any], item_col: str) -> pa.ChunkedArray:
    """Return the distinct items of a table or an iterable of ids."""
    table = catalogue
    if not column_names(catalogue):
        table = pa.table({item_col: pa.array(list(catalogue))})
    listed = as_table(table, "catalogue", [item_col])
    if not isinstance(listed, pa.Table):
        listed = as_arrow(listed.distinct(), "catalogue", [item_col])
    return pa.chunked_array([pc.unique(ids(listed, item_col, "catalogue"))])


def _features(features: Table | None, item_col: str) -> tuple[pa.ChunkedArray, np.ndarray]:
    """Return item ids and feature codes, with a final row of -1 for items without features."""
    if features is None:
        return pa.chunked_array([], pa.int64()), np.full((1, 1), -1)
    names = [each for each in column_names(features) if each != item_col]
    table = as_arrow(features, "item_features", [item_col, *names])
    items = ids(table, item_col, "item_features")
    if not names:
        raise UsageError(
            f"item_features has no column except {item_col!r}; add the features to compare",
            code="column-missing",
            argument="item_features",
        )
    if len(pc.unique(items)) < len(items):
        raise UsageError(
            "item_features has several rows of one item; give one row for each item",
            code="data-order",
            argument="item_features",
        )
    codes = np.full((len(items) + 1, len(names)), -1, dtype=np.int64)
    for index, name in enumerate(names):
        encoded = pc.dictionary_encode(table[name], null_encoding="encode").unify_dictionaries()
        codes[:-1, index] = np.concatenate([np.asarray(each.indices) for each in encoded.chunks])
    return items, codes
