"""Tables of Parquet files -> shards of columns, read by the workers themselves.

The driver reads the files' footers only, and the log of a Delta Lake or Iceberg table
(:mod:`bigdl.orca.data.lake_tables`). Every worker decodes its range of rows with pyarrow and
spools it. There is no scan by Spark, so the JVM never sees a row.

Needs pyarrow, so it is imported where it is used.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, cast

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.data.lake_tables.table import LakeTable, cut, read_ranges
from bigdl.orca.data.arrow_types import in_type_of, spark_type
from bigdl.orca.data.feeds import feed_of
from bigdl.orca.data.feeds.packing import ColumnFeed
from bigdl.orca.data.feeds.spark_dataframe import find_columns
from bigdl.orca.data.lake_tables import is_lake, open_table
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.columns import ColumnSpec, column_spec, decode, fitted_specs
from bigdl.runtime.shards.feed import Feed, InputPlan, RowPredictor, RowSampler
from bigdl.runtime.shards.shard import Shard
from bigdl.runtime.shards.values import grouped

logger = logging.getLogger("bigdl.orca")

_BATCH_BYTES = 512 << 10  # of a record batch, about


class ParquetFeed(ColumnFeed):
    """Tables of Parquet files as input.

    Parameters
    ----------
    data : str, path, sequence of them, deltalake.DeltaTable, pyiceberg.table.Table or DataScan
        Files, or directories of files, also partitioned by ``column=value`` directories; or a
        Delta Lake or Iceberg table, as :func:`~bigdl.orca.data.lake_tables.open_table` takes it.
        Local paths, or URLs of fsspec such as ``s3://...``. Every worker must see the files.
    feature_cols, label_cols : sequence of str
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating columns.
    name : str, optional

    Raises
    ------
    UsageError
        For a path without Parquet files, a missing column, a type that cannot become a tensor,
        files that differ in the type of a column, or a table that cannot be read exactly.
    """

    kind = "path"

    def __init__(self, data, feature_cols, label_cols=(), config=None, *, name=None):
        super().__init__(feature_cols, label_cols, config, name=name)
        self.data = data
        self._rows: Feed | None = None  # that predictions have read

    @functools.cached_property
    def _table(self) -> LakeTable:
        return open_table(self.data)

    @functools.cached_property
    def _types(self) -> dict:
        """Spark's types of the columns by name."""
        table, schema = self._table, self._table.schema
        if not self.feature_cols:
            raise UsageError(
                "feature_cols is required for Parquet files; pass the names of the columns that "
                f"the model takes, of {schema.names}",
                code="argument-missing",
                argument="feature_cols",
                columns=list(schema.names),
            )
        columns = list(dict.fromkeys([*self.feature_cols, *(self.label_cols or ())]))
        find_columns(columns, schema.names, self.name or table.name)
        return {column: spark_type(column, schema.field(column).type) for column in columns}

    @functools.cached_property
    def specs(self) -> list[ColumnSpec]:
        """Conversions of the columns."""
        return [column_spec(name, type_, **self.dtypes) for name, type_ in self._types.items()]

    @functools.cached_property
    def _ranges(self) -> list:
        return self._table.row_groups([spec.name for spec in self.specs])

    def check(self) -> None:
        self._ranges  # noqa: B018 - is made of the specs, and kept

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
        found = self._at(version, identity)
        if identity and found.version == version and found.identity != identity:
            logger.warning(
                "%s is not what the checkpoint was trained on: its files have changed since (%d "
                "then, %d now). The fit goes on with the rows that are there now",
                found._table.name,
                identity["count"],
                found._table.identity["count"],
            )
        return found

    def _at(self, version: str | None, identity: dict | None) -> ParquetFeed:
        if version is None or self.version is None:
            return self
        if (
            identity
            and _place(self.version) == _place(version)
            and self._table.identity["table"] != identity["table"]
        ):
            logger.warning(
                "The checkpoint was trained on %s of a table that was made anew since (its id was "
                "%s and is %s). The fit goes on with the new one, %s",
                version,
                identity["table"],
                self._table.identity["table"],
                self.version,
            )
            return self
        if self.version == version:
            return self
        if self._table.is_pinned or _place(self.version) != _place(version):
            logger.warning(
                "The checkpoint was trained on %s, and the fit goes on with %s",
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
        columns = self._table.columns([spec.name for spec in specs])
        ranges = cut(self._ranges, num_workers)
        batch_rows = _batch_rows(specs)

        def read(batches, open_spool):
            writer = open_spool(name, specs)
            of_worker = ranges[open_spool.rank]
            writer.expect(sum(each.rows for each in of_worker))
            for sequence, arrays in enumerate(read_ranges(columns, of_worker, batch_rows)):
                leaves_of = [
                    (spec.name, key, values)
                    for spec, array in zip(specs, arrays, strict=True)
                    for key, values in decode(spec, in_type_of(spec, array))
                ]
                # a batch is small enough to be turned to rows within a cache
                leaves, values = grouped(leaves_of)
                ready = [np.ascontiguousarray(each) for each in values]
                writer.append(0, sequence, len(arrays[0]), leaves, ready)
            return {name: Shard(writer.finish())}

        return InputPlan(None, read)

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> Any:
        """Return the rows with predictions as a lazy DataFrame, a Dataset of Ray or a pandas frame,
        whichever the tasks of the cluster read."""
        return self._read(cluster).predict(predictor, cluster)

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list:
        return self._read(cluster).sample(sampler, partitions, cluster)

    def _read(self, cluster: Cluster) -> Feed:
        """Return the Feed of the rows as the tasks of a cluster read them; it is made once."""
        if self._rows is None:
            columns = self.feature_cols, None, self.config
            self._rows = cast("Feed", feed_of(self._opened(cluster), *columns))
        return self._rows

    def _opened(self, cluster: Cluster) -> Any:
        """Return a DataFrame of Spark, a Dataset of Ray or a pandas frame."""
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


def _place(version: str | None) -> str:
    """The kind and path of the table that a version is of."""
    return (version or "").rpartition("@")[0]


def _batch_rows(specs):
    scalars = sum(spec.ndim == 0 and spec.kind == "plain" for spec in specs)
    # the lengths of arrays are not known: such rows may be long
    return max(1024, _BATCH_BYTES // (8 * max(1, scalars))) if scalars == len(specs) else 4096
