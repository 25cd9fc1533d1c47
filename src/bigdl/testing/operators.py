"""Contract tests of feature-table operators, on all executors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.common.errors import UsageError
from bigdl.friesian.feature import FeaturePipeline, FeatureTable
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.operator import OPERATORS, Operator
from bigdl.orca import OrcaContext, init_orca_context
from bigdl.orca.cluster.versions import frame_of_arrow, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["OperatorContract", "assert_executors_agree", "assert_same_values"]

_FILES_TOLERANCE = 1e-9  # relative tolerance: sums of doubles depend on their order


def _same(actual: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(wanted, dict):
        return list(actual) == list(wanted) and all(
            _same(actual[name], value, tolerance) for name, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return len(actual) == len(wanted) and all(
            _same(a, b, tolerance) for a, b in zip(actual, wanted, strict=True)
        )
    if isinstance(actual, float) and isinstance(wanted, float):
        if math.isnan(actual) or math.isnan(wanted):
            return math.isnan(actual) and math.isnan(wanted)
        return math.isclose(actual, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return type(actual) is type(wanted) and bool(actual == wanted)


def assert_same_values(
    found: object, wanted: object, tolerance: float = 0.0, what: str = ""
) -> None:
    """Assert that nested lists, dicts and values are equal; NaN equals NaN.

    Parameters
    ----------
    found, wanted : object
        Actual and expected value.
    tolerance : float, default 0.0
        Maximum relative and absolute difference of floats.
    what : str, optional
        First line of the error message.

    Examples
    --------
    >>> from bigdl.testing.operators import assert_same_values
    >>> assert_same_values({"price": [1.0, float("nan")]}, {"price": [1.0, float("nan")]})
    """
    if not _same(found, wanted, tolerance):
        raise AssertionError(f"{what}\nfound  {found!r}\nwanted {wanted!r}")


def assert_executors_agree(
    pipeline: FeaturePipeline,
    spark: SparkSession,
    folder: str | Path,
    rows: pa.Table,
    others: pa.Table | None = None,
    tolerance: float = 0.0,
) -> pa.Table:
    """Assert that a pipeline gives equal results on Spark, files, batches and single rows.

    Parameters
    ----------
    pipeline : FeaturePipeline
        A pipeline of operators that all executors support. It is fitted.
    spark : pyspark.sql.SparkSession
    folder : str or Path
        Folder for temporary files.
    rows : pyarrow.Table
        Rows to fit the pipeline on.
    others : pyarrow.Table, optional
        Further rows that are only transformed.
    tolerance : float, default 0.0
        See :func:`assert_same_values`.

    Returns
    -------
    pyarrow.Table
        All transformed rows, from Spark.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from bigdl.friesian.feature import FeaturePipeline
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.testing.operators import assert_executors_agree
    >>> sc = init_orca_context("local", cores=2)
    >>> spark = OrcaContext.get_spark_session()
    >>> rows, unseen = pa.table({"city": ["Oslo", "Rome"]}), pa.table({"city": ["Bern", None]})
    >>> pipeline = FeaturePipeline().category_encode("city")
    >>> assert_executors_agree(pipeline, spark, "files", rows, unseen)["city"].to_pylist()
    [1, 2, None, None]
    """
    every = rows if others is None else pa.concat_tables([rows, others])
    pipeline.fit(_frame(spark, rows))
    wanted = to_arrow(pipeline.transform(_frame(spark, every)).df)
    expected = wanted.to_pydict()
    source, target = _written(Path(folder), every), str(Path(folder) / "made")
    count = pipeline.transform_files(source, target, host="here")
    assert_same_values(count, len(every), what="the number of rows of files")
    by_files, batch = pq.read_table(target), pipeline.transform_batch(_batch(every))
    for what, made in (("files", by_files), ("a batch", batch)):
        assert_same_values(made.to_pydict(), expected, tolerance, f"{what} differ from Spark")
        assert_same_values(
            _column_types(made), _column_types(wanted), what=f"{what} have other types"
        )
    schema = {name: each.dtype for name, each in pipeline.feature_schema().items()}
    assert_same_values(schema, _inner(wanted), what="feature_schema() has other types")
    by_row = [pipeline.transform_row(row) for row in every.to_pylist()]
    assert_same_values(by_row, wanted.to_pylist(), tolerance, "single rows differ from Spark")
    return wanted


def _column_types(table: pa.Table | pa.RecordBatch) -> dict[str, str]:
    return {each.name: column_types.of_arrow(each.type) for each in table.schema}


def _inner(table: pa.Table) -> dict[str, str]:
    return {name: column_types.innermost(dtype)[0] for name, dtype in _column_types(table).items()}


def _batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def _frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    return frame_of_arrow(spark, table).coalesce(2)


def _written(folder: Path, table: pa.Table) -> str:
    """Write two Parquet files, one with several row groups and dictionaries."""
    folder = folder / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    half = len(table) // 2
    pq.write_table(table.slice(0, half), folder / "a.parquet", row_group_size=max(half // 2, 1))
    pq.write_table(table.slice(half), folder / "b.parquet", use_dictionary=False)
    return str(folder)


class OperatorContract:
    """Contract tests of operators; pytest runs the subclasses named ``Test...``.

    Attributes
    ----------
    operators : tuple of Operator
        Operators with their tested arguments.
    rows : pyarrow.Table
        Rows to fit the operators on.
    unknown : pyarrow.Table, optional
        Rows with equal columns and with values that `rows` lacks. They are only transformed.
    has_nulls : bool, default True
        Whether a row of nulls is also transformed.
    tolerance : float, default 0.0
        Maximum difference between numbers of Spark and Arrow, such as logarithms.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from bigdl.friesian.ops.numbers import Clip
    >>> from bigdl.testing.operators import OperatorContract
    >>> class TestClip(OperatorContract):
    ...     operators = (Clip(["age"], 0, None), Clip(["age"], -5, 120))
    ...     rows = pa.table({"age": [31, -1, 200]})
    >>> TestClip().test_arguments_are_values_of_json()  # pytest runs this and the other tests
    """

    operators: ClassVar[Sequence[Operator]] = ()
    rows: ClassVar[pa.Table]
    unknown: ClassVar[pa.Table | None] = None
    has_nulls: ClassVar[bool] = True
    tolerance: ClassVar[float] = 0.0

    def spark(self) -> SparkSession:
        """Return the Spark session: the active one, or a local one with two cores."""
        try:
            return OrcaContext.get_spark_session()
        except UsageError:
            init_orca_context("local", cores=2)
            return OrcaContext.get_spark_session()

    def _others(self) -> pa.Table:
        """Return rows that are transformed but not used for fitting."""
        parts = [self.rows.slice(0, 0)]
        if self.unknown is not None:
            parts.append(self.unknown.cast(self.rows.schema))
        if self.has_nulls:
            parts.append(pa.Table.from_pylist([{}], self.rows.schema))
        return pa.concat_tables(parts)

    def _row_wise(self) -> Iterator[Operator]:
        return (each for each in self.operators if each.is_row_wise)

    def test_arguments_are_values_of_json(self) -> None:
        """Check that operators are registered and can be rebuilt from JSON arguments."""
        for each in self.operators:
            known = OPERATORS.get(each.method)
            assert known is type(each), f"{each.method!r} is not registered as {type(each)}"
            arguments = json.loads(json.dumps(vars(each)))
            assert_same_values(vars(known(**arguments)), vars(each), what=each.method)

    def test_executors_agree(self, tmp_path: Path) -> None:
        """Check that all executors give equal results, even for unknown values and nulls."""
        for i, each in enumerate(self._row_wise()):
            pipeline = FeaturePipeline().with_operator(each)
            folder = tmp_path / str(i)
            others, spark = self._others(), self.spark()
            wanted = assert_executors_agree(
                pipeline, spark, folder, self.rows, others, self.tolerance
            )
            # fitting on files and on a table gives equal states, also when a table runs the
            # operator
            (folder / "taught").mkdir()
            pq.write_table(self.rows, folder / "taught" / "a.parquet", row_group_size=3)
            by_files = FeaturePipeline().with_operator(each)
            by_files.fit_files(str(folder / "taught"), host="here")
            every = _batch(pa.concat_tables([self.rows, others]))
            taught = by_files.transform_batch(every).to_pydict()
            tolerance = max(self.tolerance, _FILES_TOLERANCE)
            assert_same_values(taught, wanted.to_pydict(), tolerance, f"{each} learned from files")
            at_once = FeatureTable(_frame(spark, self.rows)).with_operator(each)
            first = wanted.slice(0, len(self.rows)).to_pydict()
            assert_same_values(to_arrow(at_once.df).to_pydict(), first, 0.0, f"{each} on a table")

    def test_saved_state_gives_the_same(self, tmp_path: Path) -> None:
        """Check that a pipeline is saved without a pickle and loaded unchanged."""
        for i, each in enumerate(self._row_wise()):
            (tmp_path / "rows").mkdir(exist_ok=True)
            pq.write_table(self.rows, tmp_path / "rows" / "a.parquet")
            pipeline = FeaturePipeline().with_operator(each)
            pipeline.fit_files(str(tmp_path / "rows"), host="here")
            pipeline.save(str(tmp_path / str(i)))
            names = {path.suffix for path in (tmp_path / str(i)).iterdir()}
            assert names <= {".json", ".parquet"}, f"{each} saved files {names}"
            loaded = FeaturePipeline.load(str(tmp_path / str(i)))
            every = pa.concat_tables([self.rows, self._others()]).to_pylist()
            wanted = [pipeline.transform_row(row) for row in every]
            assert_same_values([loaded.transform_row(row) for row in every], wanted, 0.0, str(each))

    def test_no_rows_are_a_table_of_the_same_columns(self, tmp_path: Path) -> None:
        """Check that an empty table keeps its columns and types."""
        pq.write_table(self.rows, tmp_path / "a.parquet")
        for each in self._row_wise():
            pipeline = FeaturePipeline().with_operator(each)
            pipeline.fit_files(str(tmp_path / "a.parquet"), host="here")
            none = self.rows.slice(0, 0)
            some, empty = (pipeline.transform_batch(_batch(each)) for each in (self.rows, none))
            assert empty.schema == some.schema, f"{each}: {empty.schema} instead of {some.schema}"
            made = pipeline.transform(_frame(self.spark(), none)).df
            assert dict(made.dtypes) == _column_types(some), (
                f"{each}: {made.dtypes}, not {_column_types(some)}"
            )

    def test_tables_and_pipelines_agree(self, tmp_path: Path) -> None:
        """Check that a table operator gives equal results when recorded, saved and loaded."""
        for each in self.operators:
            if each.is_row_wise:
                continue
            table = FeatureTable(_frame(self.spark(), self.rows))
            wanted = to_arrow(table.with_operator(each).df)
            pipeline = FeaturePipeline().with_operator(each).fit(table)
            pipeline.save(str(tmp_path / each.method))
            loaded = FeaturePipeline.load(str(tmp_path / each.method))
            actual = to_arrow(loaded.transform(table).df)
            assert_same_values(actual.to_pylist(), wanted.to_pylist(), 0.0, str(each))
            schema = {name: each.dtype for name, each in pipeline.feature_schema().items()}
            assert_same_values(schema, _inner(wanted), what=f"{each}: feature_schema()")
            if "arrow" in each.executors:
                source, target = _written(tmp_path / "files", self.rows), str(tmp_path / "made")
                by_files = FeaturePipeline().with_operator(each).fit_files(source, host="here")
                by_files.transform_files(source, target, host="here")
                made = sorted(pq.read_table(target).to_pylist(), key=repr)
                expected = sorted(wanted.to_pylist(), key=repr)
                assert_same_values(made, expected, self.tolerance, f"{each} on files")
