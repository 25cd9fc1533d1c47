"""The pipeline: operators that are recorded once, learn from data, and run in three ways."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.feature_table import FeatureTable
from bigdl.friesian.feature.pipeline.recording import Recording
from bigdl.friesian.feature.pipeline.step import Fitted, Schema, Step, executors_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from bigdl.friesian.feature.base import Table
    from bigdl.friesian.feature.pipeline.by_rows import RowExecutor
    from bigdl.friesian.feature.pipeline.hosts import Host
    from bigdl.friesian.feature.schema import FeatureSchema

__all__ = ["FeaturePipeline"]


class FeaturePipeline(Recording):
    """Operators of feature tables that are recorded, learn once, and run in three ways.

    Every method that records an operator returns a new pipeline, which has learned nothing.
    :meth:`fit` or :meth:`fit_files` learns what all of them need.  Then the executors give the same
    values:

    ============  =================================================  ==========================
    executor      runs                                               called by
    ============  =================================================  ==========================
    ``catalyst``  plans of Spark, by the operators of FeatureTable   :meth:`transform`
    ``arrow``     Parquet files in batches, by Spark or without it   :meth:`transform_files`
    ``row``       one row, in Python without Spark                   :meth:`transform_row`
    ============  =================================================  ==========================

    Columns of the data that were not there at ``fit`` are left out.  Columns that no operator reads
    may be missing, such as a label when the model is served; then they miss in the result.

    Examples
    --------
    >>> from bigdl.friesian.feature.pipeline import FeaturePipeline
    >>> pipeline = (
    ...     FeaturePipeline()
    ...     .category_encode(["user", "city"], freq_limit=10)
    ...     .fillna(0, ["user", "city"])
    ...     .min_max_scale("price")
    ... )
    >>> train = pipeline.fit_transform(table)  # doctest: +SKIP
    >>> pipeline.transform_row({"user": "u1", "city": "Oslo", "price": 2.5})  # doctest: +SKIP
    {'user': 17, 'city': 3, 'price': 0.25}
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._fitted: list[Fitted] | None = None
        self._schema: Schema = {}

    def _record(self, step: Step) -> Self:
        recorded = type(self)()
        recorded._steps = [*self._steps, step]
        return recorded

    def _learned(self, schema: Schema, fitted: list[Fitted]) -> None:
        self._schema, self._fitted = schema, fitted
        self.__dict__.pop("_row_executor", None)

    def _known(self) -> list[Fitted]:
        if self._fitted is None:
            raise UsageError("The pipeline has not learned; call fit first")
        return self._fitted

    # -- tables of Spark -----------------------------------------------------------------------

    def fit(self, table: Table | DataFrame) -> Self:
        """Learn what the operators need from a table.

        One job counts the values of all vocabularies and finds all extremes and medians, as far as
        they do not depend on each other; sums of targets take a job for each group of categories.

        Parameters
        ----------
        table : FeatureTable or pyspark.sql.DataFrame

        Returns
        -------
        FeaturePipeline
            This one.

        Raises
        ------
        UsageError
            If a column does not exist or is of a type that an operator does not take.
        """
        from bigdl.friesian.feature.pipeline import by_spark
        from bigdl.friesian.feature.pipeline.learning import learn

        df = _frame(table)
        schema = by_spark.schema_of(df)
        self._learned(
            schema, learn(self._steps, schema, lambda program: by_spark.answers(df, program))
        )
        return self

    def transform(self, table: Table | DataFrame) -> FeatureTable:
        """Run the operators on a table, by plans of Spark.

        Parameters
        ----------
        table : FeatureTable or pyspark.sql.DataFrame

        Returns
        -------
        FeatureTable
        """
        from bigdl.friesian.feature.pipeline import by_spark

        return FeatureTable(by_spark.transformed(_frame(table), self._known(), self._schema))

    def fit_transform(self, table: Table | DataFrame) -> FeatureTable:
        """:meth:`fit`, then :meth:`transform` on the same table.

        The only difference to calling both: ``target_encode`` gives each row a code that its own
        fold did not help to form.
        """
        from bigdl.friesian.feature.pipeline import by_spark

        self.fit(table)
        return FeatureTable(
            by_spark.transformed(_frame(table), self._known(), self._schema, is_training=True)
        )

    # -- files ---------------------------------------------------------------------------------

    def fit_files(
        self, src: str | list[str], executor: str = "arrow", host: Host | str | None = None
    ) -> Self:
        """Learn what the operators need from Parquet files.

        Parameters
        ----------
        src : str or list of str
            Files, folders or patterns.  Names of folders such as ``day=3`` are a column.
        executor : {"arrow", "catalyst"}
            ``"catalyst"`` reads them as a table of Spark and calls :meth:`fit`.
        host : {"spark", "local", "here"} or Host, optional
            Who runs the batches of ``"arrow"``: tasks of Spark, which have to see the same files;
            processes of this machine; or this process.  Default: Spark if a session is active,
            else processes.  A :class:`LocalWorkers` can be used for several calls.

        Returns
        -------
        FeaturePipeline
            This one.
        """
        if _check_executor(executor) == "catalyst":
            return self.fit(FeatureTable.read_parquet(src))
        from bigdl.friesian.feature.pipeline import by_files, files
        from bigdl.friesian.feature.pipeline.learning import learn

        self._check_runs("arrow")
        source = files.source_of(src)
        schema = source.schema
        with _host(host) as runner:
            pieces = files.pieces_of(source, runner.pieces)
            fitted = learn(
                self._steps,
                schema,
                lambda program: by_files.answers(program, schema, pieces, runner),
            )
        self._learned(schema, fitted)
        return self

    def transform_files(
        self,
        src: str | list[str],
        dst: str,
        executor: str = "arrow",
        host: Host | str | None = None,
        mode: str = "overwrite",
    ) -> int:
        """Run the operators on Parquet files and write others.

        Parameters
        ----------
        src : str or list of str
            Files, folders or patterns.
        dst : str
            A folder, for files that hold the rows in the order of those of `src`; behind
            ``add_hist_seq`` the rows of a user are together, in the order of time.
        executor : {"arrow", "catalyst"}
            ``"catalyst"`` reads and writes by Spark.
        host : {"spark", "local", "here"} or Host, optional
            See :meth:`fit_files`.
        mode : {"overwrite", "error"}
            What to do if `dst` exists.

        Returns
        -------
        int
            Number of rows.
        """
        fitted = self._known()
        if _check_executor(executor) == "catalyst":
            self.transform(FeatureTable.read_parquet(src)).write_parquet(dst, mode)
            return FeatureTable.read_parquet(dst).size()
        from bigdl.friesian.feature.pipeline import by_files, files
        from bigdl.friesian.feature.pipeline.step import check_schema, inputs_of

        self._check_runs("arrow")
        source = files.source_of(src)
        found = source.schema
        check_schema(found, self._schema, inputs_of(fitted))
        schema = {name: each for name, each in found.items() if name in self._schema}
        files.clear(dst, source.paths, mode)
        with _host(host) as runner:
            pieces = files.pieces_of(source, runner.pieces)
            rows = by_files.transformed(fitted, schema, pieces, os.fspath(dst), runner)
        files.mark_complete(dst)
        return rows

    def _check_runs(self, executor: str) -> None:
        others = [step.method for step in self._steps if executor not in executors_of(step)]
        if others:
            raise UsageError(
                f"The executor {executor} does not run {', '.join(others)}; use fit and transform "
                "on tables of Spark, or leave it out"
            )

    # -- rows ----------------------------------------------------------------------------------

    def transform_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Run the operators on one row, in this process and without Spark.

        Parameters
        ----------
        row : dict of str to object
            None for null; numbers of NumPy count as those of Python.

        Returns
        -------
        dict of str to object

        Raises
        ------
        UsageError
            If a column that an operator reads is missing, or a value is not of its type.
        """
        return self._row_executor(row)

    @cached_property
    def _row_executor(self) -> RowExecutor:
        from bigdl.friesian.feature.pipeline.by_rows import RowExecutor

        fitted = self._known()
        self._check_runs("row")
        return RowExecutor(fitted, self._schema)

    # -- folders -------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        """Write the pipeline and what it learned.

        Parameters
        ----------
        path : str
            A folder of any file system; it gets ``pipeline.json`` and Parquet files.  A pipeline
            that is there is replaced.
        """
        from bigdl.friesian.feature.pipeline import storage

        storage.save(path, self._steps, self._schema, self._fitted)

    @classmethod
    def load(cls, path: str) -> Self:
        """Read what :meth:`save` wrote; this needs neither Spark nor Java.

        Parameters
        ----------
        path : str

        Returns
        -------
        FeaturePipeline
        """
        from bigdl.friesian.feature.pipeline import storage

        loaded = cls()
        loaded._steps, loaded._schema, loaded._fitted = storage.load(path)
        return loaded

    # -- looking -------------------------------------------------------------------------------

    def feature_schema(self) -> FeatureSchema:
        """What models have to know of the columns of the result; no data are read.

        Returns
        -------
        FeatureSchema
            A column that the pipeline made of categories, hashes or bins has the cardinality of all
            its numbers, also of those that the data at ``fit`` had not.
        """
        from bigdl.friesian.feature.pipeline.explaining import feature_schema

        fitted = self._known()
        return feature_schema(fitted[-1].after if fitted else self._schema)

    def explain(self) -> str:
        """The steps as text: what each reads and makes, who can run it, and what it learned.

        Returns
        -------
        str
            A line for each step, and one for the columns of the result.
        """
        from bigdl.friesian.feature.pipeline.explaining import explain

        return explain(self._steps, self._fitted)

    def __repr__(self) -> str:
        state = "has not learned" if self._fitted is None else "has learned"
        return f"<FeaturePipeline of {len(self._steps)} steps, {state}>"


@contextmanager
def _host(host: Any) -> Iterator[Host]:
    """The host that a user named; one that was made for this call ends with it."""
    from bigdl.friesian.feature.pipeline.hosts import Host, host_of

    runner = host_of(host)
    try:
        yield runner
    finally:
        if not isinstance(host, Host):
            runner.close()


def _check_executor(executor: Any) -> str:
    if executor not in ("arrow", "catalyst"):
        raise UsageError(f"executor should be arrow or catalyst, got {executor!r}")
    return executor


def _frame(table: Any) -> DataFrame:
    from bigdl.friesian.feature.base import Table

    if isinstance(table, Table):
        return table.df
    if not hasattr(table, "sparkSession"):
        raise UsageError(
            "table should be a FeatureTable or a DataFrame of Spark, but got "
            f"{type(table).__name__}"
        )
    return table
