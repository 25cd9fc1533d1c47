"""Conversion of a Spark DataFrame to shards of columns.

The JVM converts the columns, sends them to Python as Arrow record batches, and workers spool them.
A barrier stage does not support ``coalesce``, so there are two ways to get exactly N shards:

*direct*
    A cached frame of N near-equal partitions is read unchanged, inside the barrier stage.
*packed*
    Otherwise an ordinary stage converts the rows, splits every record batch into N parts and packs
    each part in cells (:mod:`~bigdl.orca.data.feeds.packing`), which Spark shuffles.  The sizes of
    shards differ by at most one row per source partition.

Every chunk keeps its source partition and sequence number through the exchange, and the spool is
sorted by them, so the order of rows does not depend on the network.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError
from bigdl.orca.cluster import plan as spark_plan
from bigdl.orca.cluster.spark_calls import check_frame
from bigdl.orca.data.feeds.packing import CELL, PackedFeed, packer
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.columns import (
    column_spec,
    decode_batch,
    fitted_specs,
    project,
    unified_spec,
)
from bigdl.runtime.shards.feed import InputPlan, RowPredictor, RowSampler
from bigdl.runtime.shards.shard import Shard

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger("bigdl.orca")

_BATCH_BYTES = 64 << 20  # maximum size of an Arrow batch
_NEAR = 0.05  # maximum difference of near-equal partition sizes, relative to their mean


class SparkDataFrameFeed(PackedFeed):
    """Feed of a Spark DataFrame, for training, evaluation and ``Engine.run``.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        Frame of the active session, classic or Spark Connect.
    feature_cols, label_cols : sequence of str
        Feature and target columns, in the model's order.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating-point
        columns.
    name : str, optional
        Name of the frame in messages, e.g. ``"validation_data"``.

    Raises
    ------
    UsageError
        If a column is missing or cannot be converted to a tensor.
    """

    kind = "Spark DataFrame"
    is_in_spark = True

    def __init__(self, frame, feature_cols, label_cols=(), config=None, *, name=None):
        super().__init__(feature_cols, label_cols, config, name=name)
        self.frame = frame
        columns = [*(self.feature_cols or ()), *(self.label_cols or ())]
        types = check_columns(frame, columns, name)
        self.types = {column: types[column] for column in columns}
        self.specs = [column_spec(c, t, **self.dtypes) for c, t in self.types.items()]

    def follow(self, inputs: list | None) -> None:
        features = [(name, self.types[name]) for name in self.feature_cols or ()]
        specs = fitted_specs(features, **self.dtypes, known=inputs, owner=None)
        fitted = {spec.name: spec for spec in specs}
        self.specs = [fitted.get(spec.name, spec) for spec in self.specs]

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        from_files = self.from_files(cluster, num_workers, name)
        if from_files is not None:
            return from_files
        if cluster.moves_rows_by == "ray" or not self._is_cached_in(num_workers):
            return super().prepare(cluster, num_workers, name=name)
        direct = self.direct(name)
        # workers check the sizes after reading, because counting first needs another job
        direct.accept = _near_equal
        direct.otherwise = functools.partial(super().prepare, cluster, num_workers, name=name)
        return direct

    def from_files(
        self,
        cluster: Cluster,
        num_workers: int,
        name: str,
        reference: PackedFeed | None = None,
    ) -> InputPlan | None:
        # only for shuffled rows: each worker gets a contiguous part of them
        is_shuffled = self.config.get("shuffle", True)
        if cluster.moves_rows_by != "spark" or not is_shuffled:
            return None
        if spark_plan.is_connect(self.frame):
            if spark_plan.selects_from_parquet(self.frame):
                logger.info(
                    "Spark reads the Parquet files of %s. Pass their path instead of the DataFrame "
                    "to have them read by the workers, which is several times faster",
                    self.name or "the DataFrame",
                )
            return None
        from bigdl.orca.data.feeds.row_ranges import plan_of_ranges
        from bigdl.orca.data.lake_tables.scans import row_ranges_of

        specs = self._specs_like(reference)
        selected = self.frame.select([_quoted(spec.name) for spec in specs])
        ranges = row_ranges_of(selected)
        source = "Spark" if ranges is None else "Parquet files"
        logger.debug("The workers read the rows of %s from %s", self.name or name, source)
        if ranges is None:
            return None
        columns, row_ranges = ranges
        # Spark's order depends on the cores of the cluster
        row_ranges = sorted(row_ranges, key=lambda each: (each.file.path, each.group, each.start))
        return plan_of_ranges(columns, row_ranges, specs, num_workers, name, columns.url)

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> DataFrame:
        """Return a lazy DataFrame with all columns and the predictions, in the same row order."""
        return predictor.predict_frame(self.frame, cluster.threads_per_task)

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list:
        return sampler.take_from_frame(self.frame, partitions)

    def direct(self, name: str) -> InputPlan:
        """Return the input plan that uses the partitions of the frame as shards."""
        specs = self.specs

        def read(batches, open_spool):
            from pyspark import TaskContext

            source = TaskContext.get().partitionId()
            writer = open_spool(name, specs)
            for sequence, batch in enumerate(batches):
                if batch.num_rows:
                    leaves, arrays = decode_batch(specs, batch)
                    writer.append(source, sequence, batch.num_rows, leaves, arrays)
            return {name: Shard(writer.finish())}

        settings = _settings(self.frame, specs)
        return InputPlan(project(self.frame, specs), read, settings=settings)

    def cells(self, number, num_workers, reference=None):
        specs, frame = self._specs_like(reference), self.frame
        converted, close = project(frame, specs), lambda: None
        if not spark_plan.is_deterministic(frame):
            # a retry that runs this plan again may produce other rows
            close = converted.persist().unpersist
        packed = converted.mapInArrow(packer(number, self.name, specs, num_workers), CELL)
        return packed, specs, close

    def _specs_like(self, reference):
        """Return the column specs, with their types unified with those of the feed `reference`."""
        if reference is None:
            return self.specs
        owner, others = self.name or "the other data", {s.name: s for s in reference.specs}
        return [
            unified_spec(
                s.name, self.types[s.name], reference=others[s.name], owner=owner, **self.dtypes
            )
            if s.name in others
            else s
            for s in self.specs
        ]

    def _is_cached_in(self, num_workers):
        """Return True if the frame is cached in exactly one partition per worker."""
        return (
            not spark_plan.is_connect(self.frame)  # its partitions are not accessible
            and spark_plan.is_cached(self.frame)
            and self.frame.rdd.getNumPartitions() == num_workers
            and bool(spark_plan.fits_barrier(self.frame, num_workers))
        )


def _settings(frame, specs) -> dict[str, str]:
    """Return SQL settings that lift Arrow's byte limit per batch if the row limit suffices."""
    rows = int(frame.sparkSession.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"))
    scalars = all(spec.kind == "plain" and spec.ndim == 0 for spec in specs)
    if scalars and 0 < rows * len(specs) * 8 <= _BATCH_BYTES:
        return {"spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1)}
    return {}


def _near_equal(rows: list[int]) -> bool:
    return max(rows) - min(rows) <= 1 + _NEAR * sum(rows) / len(rows)


def check_columns(frame, columns: Sequence[str], name: str | None = None) -> dict:
    """Return the types of `columns` by name; raise UsageError if the frame lacks a column."""
    name = name or "The DataFrame"
    if not columns:
        raise UsageError(
            "feature_cols is required for a Spark DataFrame; pass the names of the feature "
            f"columns, from {list(frame.columns)}",
            code="argument-missing",
            argument="feature_cols",
            columns=list(frame.columns),
        )
    check_frame(frame)
    types: dict = {}
    ambiguous: dict[str, list[str]] = {}  # columns that Spark does not distinguish
    case_sensitive = frame.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    for field in frame.schema.fields:
        types[field.name] = field.dataType
        ambiguous.setdefault(field.name if case_sensitive else field.name.lower(), []).append(
            field.name
        )
    find_columns(columns, frame.columns, name)
    for column in columns:
        same = ambiguous[column if case_sensitive else column.lower()]
        if len(same) > 1:
            raise UsageError(
                f"{name} has more than one column '{column}': {same}; rename one first",
                code="column-duplicate",
                column=column,
                columns=same,
            )
    return types


def find_columns(columns: Sequence[str], available: Sequence[str], owner: str) -> None:
    """Raise UsageError if an input lacks any of `columns`."""
    for column in columns:
        if not isinstance(column, str):
            raise UsageError(f"Column names must be strings, got {column!r}", code="argument-type")
        if column not in available:
            raise UsageError(
                f"{owner} has no column '{column}'; it has {list(available)}"
                + _suggestion(column, available),
                code="column-missing",
                column=column,
                columns=list(available),
            )


def _suggestion(column, names):
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(column.lower(), lower, n=1)
    return f"; did you mean '{lower[near[0]]}'?" if near else ""


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
