"""Feed of Parquet files and lake tables, which the workers read themselves.

The driver reads the files' footers only, and the log of a Delta Lake or Iceberg table
(:mod:`bigdl.orca.data.lake_tables`). Every worker decodes its range of rows with pyarrow and
spools it. Spark does not scan the files, so no rows pass through the JVM.

The module needs pyarrow, so it is imported where it is used.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import UsageError
from bigdl.data.lake_tables.table import LakeTable
from bigdl.orca.data.arrow_types import spark_type
from bigdl.orca.data.feeds import feed_of
from bigdl.orca.data.feeds.packing import ColumnFeed
from bigdl.orca.data.feeds.row_ranges import plan_of_ranges
from bigdl.orca.data.feeds.spark_dataframe import find_columns
from bigdl.orca.data.lake_tables import is_lake, open_table
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.columns import ColumnSpec, column_spec, fitted_specs
from bigdl.runtime.shards.feed import Feed, InputPlan, RowPredictor, RowSampler

if TYPE_CHECKING:
    import pandas as pd
    import ray.data
    from pyspark.sql import DataFrame

logger = logging.getLogger("bigdl.orca")


class ParquetFeed(ColumnFeed):
    """Feed of Parquet files, or of a Delta Lake or Iceberg table.

    Parameters
    ----------
    data : str, path, sequence of them, deltalake.DeltaTable, pyiceberg.table.Table or DataScan
        Files, or directories of files, also partitioned by ``column=value`` directories; or a
        Delta Lake or Iceberg table for :func:`~bigdl.orca.data.lake_tables.open_table`. Paths are
        local or fsspec URLs such as ``s3://...``. Every worker must be able to read the files.
    feature_cols, label_cols : sequence of str
        Feature and target columns.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating-point
        columns.
    name : str, optional
        Name of the input in messages.

    Raises
    ------
    UsageError
        If a path has no Parquet files, a column is missing or cannot be converted to a tensor,
        the files have different types for a column, or the table cannot be read exactly.
    """

    kind = "path"

    def __init__(self, data, feature_cols, label_cols=(), config=None, *, name=None):
        super().__init__(feature_cols, label_cols, config, name=name)
        self.data = data
        self._cached_rows_feed: Feed | None = None  # the feed of predictions, once opened

    @functools.cached_property
    def _table(self) -> LakeTable:
        return open_table(self.data)

    @functools.cached_property
    def _types(self) -> dict:
        """Spark types of the columns by name."""
        table, schema = self._table, self._table.schema
        if not self.feature_cols:
            raise UsageError(
                "feature_cols is required for Parquet files; pass the names of the feature "
                f"columns, from {schema.names}",
                code="argument-missing",
                argument="feature_cols",
                columns=list(schema.names),
            )
        columns = list(dict.fromkeys([*self.feature_cols, *(self.label_cols or ())]))
        find_columns(columns, schema.names, self.name or table.name)
        return {column: spark_type(column, schema.field(column).type) for column in columns}

    @functools.cached_property
    def specs(self) -> list[ColumnSpec]:
        """Column specs, which define how each column is converted for the model."""
        return [column_spec(name, type_, **self.dtypes) for name, type_ in self._types.items()]

    @functools.cached_property
    def _ranges(self) -> list:
        return self._table.row_groups([spec.name for spec in self.specs])

    def check(self) -> None:
        self._ranges  # noqa: B018 - computes and caches it

    def follow(self, inputs: list | None) -> None:
        features = [(name, self._types[name]) for name in self.feature_cols or ()]
        specs = fitted_specs(features, **self.dtypes, known=inputs, owner=None)
        fitted = {spec.name: spec for spec in specs}
        self.specs = [fitted.get(spec.name, spec) for spec in self.specs]

    @property
    def version(self) -> str | None:
        return self._table.version

    @property
    def identity(self) -> dict | None:
        return self._table.identity or None

    def at(self, version: str | None, identity: dict | None = None) -> ParquetFeed:
        feed_at_version = self._at(version, identity)
        if identity and feed_at_version.version == version and feed_at_version.identity != identity:
            logger.warning(
                "The checkpoint was trained on other files of %s (%d files then, %d now). "
                "Training continues with the current rows",
                feed_at_version._table.name,
                identity["count"],
                feed_at_version._table.identity["count"],
            )
        return feed_at_version

    def _at(self, version: str | None, identity: dict | None) -> ParquetFeed:
        if version is None or self.version is None:
            return self
        if (
            identity
            and _table_path(self.version) == _table_path(version)
            and self._table.identity["table"] != identity["table"]
        ):
            logger.warning(
                "The checkpoint was trained on %s, but the table was recreated since (its id was "
                "%s and is %s). Training continues with the new table, %s",
                version,
                identity["table"],
                self._table.identity["table"],
                self.version,
            )
            return self
        if self.version == version:
            return self
        if self._table.is_pinned or _table_path(self.version) != _table_path(version):
            logger.warning(
                "The checkpoint was trained on %s; training continues with %s",
                version,
                self.version,
            )
            return self
        columns = self.feature_cols, self.label_cols
        feed = type(self)(version, *columns, self.config, name=self.name)
        feed.check()
        return feed

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        specs = self.specs
        table = self._table
        columns = table.columns([spec.name for spec in specs])
        return plan_of_ranges(columns, self._ranges, specs, num_workers, name, table.name)

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> object:
        """Return the rows with predictions, as a Spark, Ray or pandas frame.

        The cluster determines the type: a lazy Spark DataFrame, a Ray Dataset or a pandas frame.
        """
        return self._rows_feed(cluster).predict(predictor, cluster)

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list:
        return self._rows_feed(cluster).sample(sampler, partitions, cluster)

    def _rows_feed(self, cluster: Cluster) -> Feed:
        """Return the Feed from which the cluster's tasks read the rows; it is created once."""
        if self._cached_rows_feed is None:
            columns = self.feature_cols, None, self.config
            self._cached_rows_feed = cast("Feed", feed_of(self._open_frame(cluster), *columns))
        return self._cached_rows_feed

    def _open_frame(self, cluster: Cluster) -> DataFrame | ray.data.Dataset | pd.DataFrame:
        """Open the table as a Spark DataFrame, a Ray Dataset or a pandas frame."""
        spark: Any = cluster
        if not is_lake(self.data) and cluster.moves_rows_by != "files":
            data = self.data if isinstance(self.data, list | tuple) else [self.data]
            paths = [os.fspath(path) for path in data]
            if cluster.moves_rows_by == "spark":
                return spark.spark.read.parquet(*paths)
            from bigdl.orca.data.xshards.ray_exchange import parquet_dataset

            return parquet_dataset(paths)
        from bigdl.orca.data.lake_tables import frames

        if cluster.moves_rows_by == "ray":
            return frames.ray_dataset(self._table, cluster.slots())
        if cluster.moves_rows_by == "files":
            return frames.pandas_frame(self._table)
        return frames.spark_frame(self._table, spark.spark)


def _table_path(version: str | None) -> str:
    """Return the format and the path from a versioned table name."""
    return (version or "").rpartition("@")[0]
