"""Feature pipelines: recorded and fitted once, run on Spark, on files or row by row.

A pipeline is fitted in passes over the data. Each pass computes all statistics that it can. A step
can be fitted as soon as fitted steps compute the columns that it learns from. Other steps, and
later steps that read their columns, wait for the next pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.executors import arrow, spark
from bigdl.friesian.executors.arrow import Host, LocalWorkers, host_of
from bigdl.friesian.feature import storage
from bigdl.friesian.feature.methods import FeatureMethods
from bigdl.friesian.feature.table import FeatureTable, Table
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.batches import decoded, lazy_batch
from bigdl.friesian.ops.cells import Filter, Select
from bigdl.friesian.ops.column_types import Field, Schema
from bigdl.friesian.ops.numbers import CutBins, MinMaxScale
from bigdl.friesian.ops.operator import (
    FittedOperator,
    Operator,
    Program,
    State,
    StatisticsQuery,
    check_schema,
    inputs_of,
)
from bigdl.friesian.ops.schema import Feature, FeatureSchema
from bigdl.friesian.ops.spark import as_list, as_names, check_string, schema_of
from bigdl.friesian.ops.targets import CountEncode, TargetEncode
from bigdl.friesian.ops.vocabulary import CategoryEncode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["FeaturePipeline", "LocalWorkers"]

_SHOWN = 4  # maximum number of column names in a line of `explain`


@hide_frames
class FeaturePipeline(FeatureMethods):
    """Sequence of recorded operators that is fitted once and runs on three executors.

    Every method that records an operator returns a new, unfitted pipeline. :meth:`fit` or
    :meth:`fit_files` fits all operators. Then all executors give the same values:

    ============  =================================================  ==========================
    executor      runs                                               called by
    ============  =================================================  ==========================
    ``catalyst``  Spark plans, with the operators of FeatureTable    :meth:`transform`
    ``arrow``     Parquet files in batches, with or without Spark    :meth:`transform_files`
    ``row``       one row, in Python without Spark                   :meth:`transform_row`
    ============  =================================================  ==========================

    Columns that the data did not have at ``fit`` are left out. Columns that no operator reads may
    be missing, such as the label when a model is served; the result then lacks them too.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeaturePipeline, FeatureTable
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> users = pd.DataFrame({"city": ["Oslo", "Rome", None], "price": [10.0, 20.0, 30.0]})
    >>> pipeline = FeaturePipeline().category_encode("city").fillna(0, "city")
    >>> pipeline = pipeline.min_max_scale("price")
    >>> train = pipeline.fit_transform(FeatureTable.from_pandas(users))
    >>> train.to_dict()
    {'city': [1, 2, 0], 'price': [0.0, 0.5, 1.0]}
    >>> pipeline.transform_row({"city": "Rome", "price": 15.0})  # as a server does
    {'city': 2, 'price': 0.25}
    """

    def __init__(self) -> None:
        self._steps: list[Operator] = []
        self._fitted: list[FittedOperator] | None = None
        self._schema: Schema = {}

    def with_operator(self, operator: Operator) -> Self:
        recorded = type(self)()
        recorded._steps = [*self._steps, operator]
        return recorded

    # -- operators that are fitted, or that select ---------------------------------------------

    def select(self, *cols: str | list[str]) -> Self:
        """Keep only these columns, in this order."""
        return self.with_operator(Select(as_names(as_list(cols), "cols")))

    def filter(self, condition: str) -> Self:
        """Keep the rows for which a SQL expression is true; supported on Spark tables only."""
        return self.with_operator(Filter(check_string(condition, "condition")))

    def min_max_scale(
        self, columns: str | list[str], min: float = 0.0, max: float = 1.0, clip: bool = False
    ) -> Self:
        """Scale numbers to a range by the minimum and maximum of the data passed to ``fit``.

        Parameters
        ----------
        columns, min, max
            See :meth:`FeatureTable.min_max_scale`; columns of single numbers.
        clip : bool, default False
            Clip numbers outside of the extremes to the range.
        """
        return self.with_operator(MinMaxScale(as_names(columns), min, max, clip))

    def quantile_bins(
        self,
        columns: str | list[str],
        parts: int,
        labels: list[str] | Mapping | None = None,
        out_cols: str | list[str] | None = None,
        drop: bool = True,
    ) -> Self:
        """Assign numbers to bins with about the same number of rows each.

        Parameters
        ----------
        parts : int
            Number of bins; see :meth:`FeatureTable.quantile_edges`.
        columns, labels, out_cols, drop
            See :meth:`FeatureTable.cut_bins`.
        """
        options = {"drop": drop, "by_quantiles": True}
        return self.with_operator(CutBins.of(columns, parts, labels, out_cols, **options))

    def category_encode(
        self,
        columns: str | Mapping | list,
        freq_limit: int | Mapping[str, int] | None = None,
        order_by_freq: bool = False,
        do_split: bool = False,
        sep: str = ",",
        sort_for_array: bool = False,
        keep_most_frequent: bool = False,
        broadcast: bool = True,
        oov_buckets: int = 0,
    ) -> Self:
        """Replace values by ids from vocabularies that ``fit`` learns.

        Parameters
        ----------
        columns : str, dict or list of them
            Columns of strings, integers, booleans or dates. A dict ``{"src_cols": [...],
            "col_name": ...}`` means one vocabulary of several columns.
        sep : str, default ","
            Plain text, not a regular expression.
        freq_limit, order_by_freq, do_split, sort_for_array, keep_most_frequent, broadcast
            See :meth:`FeatureTable.category_encode`.
        oov_buckets : int, default 0
            See :meth:`FeatureTable.encode_string`.

        Notes
        -----
        Values that are not in a vocabulary become null. Usually :meth:`fillna` with 0 follows.
        """
        options = sort_for_array, keep_most_frequent, broadcast, oov_buckets
        return self.with_operator(
            CategoryEncode.of(columns, freq_limit, order_by_freq, do_split, sep, *options)
        )

    def target_encode(
        self,
        cat_cols: str | list,
        target_cols: str | list[str],
        target_mean: Mapping[str, float] | None = None,
        smooth: float = 20,
        kfold: int = 2,
        fold_seed: int | None = None,
        fold_col: str = "__fold__",
        drop_cat: bool = False,
        drop_fold: bool = True,
        out_cols: str | list | None = None,
    ) -> Self:
        """Add target encodings of categories; see :meth:`FeatureTable.target_encode`.

        Only ``fit_transform`` gives out-of-fold codes. ``transform`` gives every row the codes of
        all rows at ``fit``.
        """
        options = smooth, drop_cat, kfold, fold_seed, fold_col, drop_fold
        return self.with_operator(
            TargetEncode.of(cat_cols, target_cols, target_mean, out_cols, *options)
        )

    def count_encode(
        self,
        cat_cols: str | list,
        normalize: bool = False,
        out_cols: str | list[str] | None = None,
        counts: None = None,
    ) -> Self:
        """Add category counts of the data passed to ``fit``; see :meth:`FeatureTable.count_encode`.

        `counts` of other data are not supported; passing them raises an error.
        """
        if counts is not None:
            raise UsageError(
                "A pipeline does not accept counts, because it counts at fit; use count_encode of "
                "FeatureTable before it",
                code="unsupported",
                argument="counts",
            )
        return self.with_operator(CountEncode.of(cat_cols, normalize, out_cols))

    # -- fitted state --------------------------------------------------------------------------

    def _learn(
        self, schema: Schema, compute: Callable[[Program], dict[tuple[int, str], Any]]
    ) -> Self:
        """Fit all operators with the statistics that `compute` returns; return this pipeline.

        Parameters
        ----------
        schema : dict of str to Field
            Schema of the data.
        compute : callable
            Computes the statistics of a program over the data; returns them by the index of the
            step and the name of the request.
        """
        states: dict[int, State] = {}
        while True:
            program, fitted = _program(self._steps, schema, states)
            queries = [each for each in program if isinstance(each, StatisticsQuery)]
            if not queries:
                self._schema, self._fitted = schema, fitted
                self.__dict__.pop("_row_executor", None)
                return self
            statistics = compute(program)
            for each in queries:
                known = {name: statistics[each.step, name] for name in each.requests}
                waiting = fitted[each.step]
                states[each.step] = waiting.step.fit_state(waiting.before, known)

    def _known(self) -> list[FittedOperator]:
        if self._fitted is None:
            raise UsageError("The pipeline is not fitted; call fit first", code="not-fitted")
        return self._fitted

    @property
    def inputs(self) -> list[str]:
        """Columns that the data must have because an operator reads them."""
        return inputs_of(self._known())

    def sources(self, column: str) -> set[str]:
        """Return the columns of the data that an output column is computed from.

        Parameters
        ----------
        column : str

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeaturePipeline
        >>> pd.DataFrame({"city": ["Oslo"], "type": ["a"]}).to_parquet("users.parquet")
        >>> pipeline = FeaturePipeline().cross_columns([["city", "type"]], [10])
        >>> pipeline = pipeline.fit_files("users.parquet", host="here")
        >>> sorted(pipeline.sources("city_type")), pipeline.sources("type")
        (['city', 'type'], {'type'})
        """
        wanted = {column}
        for each in reversed(self._known()):
            inputs = {cell.output: cell.inputs for cell in each.cells}
            wanted = {name for known in wanted for name in inputs.get(known, (known,))}
        return wanted

    # -- Spark tables --------------------------------------------------------------------------

    def fit(self, table: Table | DataFrame) -> Self:
        """Fit the operators on a table.

        One job counts the values of all vocabularies and computes all extremes and medians that do
        not depend on each other. Sums of targets take a job per group of categories.

        Parameters
        ----------
        table : FeatureTable or pyspark.sql.DataFrame

        Returns
        -------
        FeaturePipeline
            This pipeline.

        Raises
        ------
        UsageError
            If a column does not exist, or an operator does not accept its type.
        """
        df = _frame(table)
        return self._learn(schema_of(df), lambda program: spark.compute_statistics(df, program))

    def transform(self, table: Table | DataFrame) -> FeatureTable:
        """Apply the operators to a table on Spark.

        Parameters
        ----------
        table : FeatureTable or pyspark.sql.DataFrame

        Returns
        -------
        FeatureTable
        """
        return FeatureTable(spark.transform(_frame(table), self._known(), self._schema))

    def fit_transform(self, table: Table | DataFrame) -> FeatureTable:
        """Fit the pipeline on a table and transform the same table.

        It differs from :meth:`fit` and :meth:`transform` in one point: ``target_encode`` gives each
        row an out-of-fold code.
        """
        self.fit(table)
        return FeatureTable(
            spark.transform(_frame(table), self._known(), self._schema, is_training=True)
        )

    # -- files ---------------------------------------------------------------------------------

    def fit_files(
        self, src: str | list[str], executor: str = "arrow", host: Host | str | None = None
    ) -> Self:
        """Fit the operators on Parquet files.

        Parameters
        ----------
        src : str or list of str
            Files, folders or patterns. Folder names such as ``day=3`` become a column.
        executor : {"arrow", "catalyst"}
            ``"catalyst"`` reads the files as a Spark table and calls :meth:`fit`.
        host : {"spark", "local", "here"} or Host, optional
            Where ``"arrow"`` runs its batches: in Spark tasks, which need access to the same files;
            in local processes; or in this process. Default: Spark if a session is active, else
            local processes. A :class:`LocalWorkers` can be reused for several calls.

        Returns
        -------
        FeaturePipeline
            This pipeline.
        """
        if check_choice("executor", executor, ("arrow", "catalyst")) == "catalyst":
            return self.fit(FeatureTable.read_parquet(src))
        self._check_runs("arrow")
        source, schema = arrow.source_of(src)
        with host_of(host) as runner:
            pieces = arrow.pieces_of(source, schema, runner.pieces)
            return self._learn(
                schema, lambda program: arrow.compute_statistics(program, pieces, runner)
            )

    def transform_files(
        self,
        src: str | list[str],
        dst: str,
        executor: str = "arrow",
        host: Host | str | None = None,
        mode: str = "overwrite",
    ) -> int:
        """Apply the operators to Parquet files and write the results as files.

        Parameters
        ----------
        src : str or list of str
            Files, folders or patterns.
        dst : str
            Output folder. The rows keep the order of `src`. After ``add_hist_seq`` the rows are
            grouped by user, in time order.
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
        if check_choice("executor", executor, ("arrow", "catalyst")) == "catalyst":
            self.transform(FeatureTable.read_parquet(src)).write_parquet(dst, mode)
            return FeatureTable.read_parquet(dst).size()
        self._check_runs("arrow")
        source, known = arrow.source_of(src)
        check_schema(known, self._schema, inputs_of(fitted))
        schema = {name: each for name, each in known.items() if name in self._schema}
        arrow.prepare_folder(dst, source, mode)
        with host_of(host) as runner:
            pieces = arrow.pieces_of(source, schema, runner.pieces)
            return arrow.transform_pieces(fitted, pieces, os.fspath(dst), runner)

    def _check_runs(self, executor: str) -> None:
        others = [step.method for step in self._steps if executor not in step.executors]
        if others:
            raise UsageError(
                f"The executor {executor} does not run {', '.join(others)}; use fit and transform "
                "on Spark tables, or remove it",
                code="unsupported",
                method=others[0],
            )

    # -- rows ----------------------------------------------------------------------------------

    def transform_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the operators to one row, in this process and without Spark.

        Parameters
        ----------
        row : dict of str to object
            None for null; NumPy numbers count as Python numbers.

        Returns
        -------
        dict of str to object

        Raises
        ------
        UsageError
            If a column that an operator reads is missing, or a value has another type.
        """
        return self._row_executor(row)

    def transform_batch(self, columns: Mapping[str, Any] | pa.RecordBatch) -> pa.RecordBatch:
        """Apply the operators to in-memory arrays, in this process and without Spark.

        Parameters
        ----------
        columns : dict of str to array, or pyarrow.RecordBatch
            NumPy or Arrow arrays of one length; a matrix is a column of vectors.

        Returns
        -------
        pyarrow.RecordBatch
            The same values as :meth:`transform_row` for each row.

        Raises
        ------
        UsageError
            If a column that an operator reads is missing or has another type.

        Examples
        --------
        >>> import numpy as np
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeaturePipeline
        >>> pd.DataFrame({"price": [10.0, 30.0]}).to_parquet("prices.parquet")
        >>> pipeline = FeaturePipeline().min_max_scale("price")
        >>> pipeline = pipeline.fit_files("prices.parquet", host="here")
        >>> pipeline.transform_batch({"price": np.array([15.0, 20.0])})["price"].to_pylist()
        [0.25, 0.5]
        """
        fitted = self._known()
        self._check_runs("row")
        self._check_runs("arrow")
        inputs = (
            columns
            if isinstance(columns, Mapping)
            else dict(zip(columns.schema.names, columns.columns, strict=True))
        )
        if missing := [name for name in inputs_of(fitted) if name not in inputs]:
            raise UsageError(
                f"The rows lack the columns {missing}, which the pipeline reads",
                code="column-missing",
                columns=missing,
            )
        arrays = {
            name: column_types.to_typed_array(inputs[name], each.kind, name)
            for name, each in self._schema.items()
            if name in inputs
        }
        batch = lazy_batch(arrays).after_all(fitted)
        return pa.record_batch({name: decoded(batch[name]) for name in batch.names})

    @cached_property
    def _row_executor(self) -> RowExecutor:
        fitted = self._known()
        self._check_runs("row")
        return RowExecutor(fitted, self._schema)

    # -- folders -------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        """Write the pipeline and its fitted state to a folder.

        Parameters
        ----------
        path : str
            Folder on any file system. It gets ``pipeline.json`` and Parquet files. An existing
            pipeline is replaced.
        """
        storage.save(path, self._steps, self._schema, self._fitted)

    @classmethod
    def load(cls, path: str) -> Self:
        """Load a FeaturePipeline that :meth:`save` wrote; this needs neither Spark nor Java.

        Parameters
        ----------
        path : str

        Returns
        -------
        FeaturePipeline
        """
        loaded = cls()
        loaded._steps, loaded._schema, loaded._fitted = storage.load(path)
        return loaded

    # -- inspection ----------------------------------------------------------------------------

    def feature_schema(self) -> FeatureSchema:
        """Return types, cardinalities and lengths of the output columns, without reading data.

        Returns
        -------
        FeatureSchema
            The cardinality of an encoded, hashed or binned column covers all possible ids, also
            those that did not occur at ``fit``.
        """
        fitted = self._known()
        fields = fitted[-1].after if fitted else self._schema
        return FeatureSchema({name: _feature(field) for name, field in fields.items()})

    def explain(self) -> str:
        """Describe the operators as text: inputs, outputs, executors and fitted state.

        Returns
        -------
        str
            One line per step, and one for the output columns.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeaturePipeline
        >>> pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"]}).to_parquet("users.parquet")
        >>> pipeline = FeaturePipeline().category_encode("city")
        >>> pipeline = pipeline.fit_files("users.parquet", host="here")
        >>> print(pipeline.explain())
        step               reads  makes  executors             learned
        1 category_encode  city   city   catalyst, arrow, row  2 rows (1 kB)
        result: city int (3 values)
        """
        return _explained(self._steps, self._fitted)

    def __repr__(self) -> str:
        state = "has not learned" if self._fitted is None else "has learned"
        return f"<FeaturePipeline of {len(self._steps)} steps, {state}>"


def _frame(table: Table | DataFrame) -> DataFrame:
    if isinstance(table, Table):
        return table.df
    if not hasattr(table, "sparkSession"):
        raise UsageError(
            "table should be a FeatureTable or a DataFrame of Spark, but got "
            f"{type(table).__name__}",
            code="argument-type",
            argument="table",
        )
    return table


# -- learning --------------------------------------------------------------------------------------


def _program(
    steps: Sequence[Operator], schema: Schema, states: dict[int, State]
) -> tuple[Program, list[FittedOperator]]:
    """Return the program of the next pass over the data, and its operators with input schemas."""
    program: Program = []
    fitted: list[FittedOperator] = []
    unknown: set[str] = set()
    for index, step in enumerate(steps):
        if not step.is_row_wise and any(isinstance(each, StatisticsQuery) for each in program):
            break  # pending statistics are about the rows before this step
        step.check(schema)
        requests = {} if index in states else step.requests(schema)
        if not requests and index not in states:
            states[index] = step.fit_state(schema, {})
        state = states.get(index)
        each = FittedOperator(step, schema, cast("State", state))  # None until it is fitted
        fitted.append(each)
        is_known = state is not None and not unknown.intersection(each.inputs)
        asked = {name for request in requests.values() for name in request.columns}
        if is_known:
            program.append(each)
        elif requests and not asked & unknown:
            program.append(StatisticsQuery(index, requests))
        if state is None and step.hides_columns(schema):
            break
        cells = step.cells(schema, state)
        unknown = (unknown - {cell.output for cell in cells}) | {
            cell.output for cell in cells if not is_known or unknown.intersection(cell.inputs)
        }
        schema = step.after(schema, state)
    return program, fitted


# -- single rows -----------------------------------------------------------------------------------


class RowExecutor:
    """Executor ``row``: applies fitted operators to one row as plain Python functions.

    Parameters
    ----------
    fitted : list of FittedOperator
    schema : dict of str to Field
        Schema of the rows.
    """

    def __init__(self, fitted: Sequence[FittedOperator], schema: Schema):
        self._types = {name: each.kind for name, each in schema.items()}
        self._needed = inputs_of(fitted)
        self._work: list[tuple[Callable[..., Any], list[Hashable], Hashable]] = []
        keys: dict[str, Hashable] = {name: name for name in schema}
        for number, each in enumerate(fitted):
            new_keys: dict[str, Hashable] = {}
            for cell in each.cells:
                inputs = [keys[name] for name in cell.inputs]
                if cell.function is None:
                    (new_keys[cell.output],) = inputs
                    continue
                new_keys[cell.output] = number, cell.output
                function = cell.function.single(*(each.before[name].kind for name in cell.inputs))
                self._work.append((function, inputs, new_keys[cell.output]))
            keys = {name: new_keys.get(name, keys.get(name)) for name in each.after}
        self._outputs = keys

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in self._needed if name not in row]
        if missing:
            raise UsageError(
                f"The row lacks the columns {missing}, which the pipeline reads; pass None",
                code="column-missing",
                columns=missing,
            )
        values: dict[Hashable, Any] = {
            name: column_types.coerce_value(row[name], dtype, name)
            for name, dtype in self._types.items()
            if name in row
        }
        with np.errstate(all="ignore"):
            for function, inputs, key in self._work:
                values[key] = function(*map(values.__getitem__, inputs))
        return {name: values[key] for name, key in self._outputs.items() if key in values}


# -- pipelines as text and as schemas --------------------------------------------------------------


def _feature(field: Field) -> Feature:
    dtype, depth = column_types.innermost(field.kind)
    shape = (field.length, *[None] * depth)[:depth]
    return Feature(dtype, field.cardinality, shape)


def _explained(steps: Sequence[Operator], fitted: Sequence[FittedOperator] | None) -> str:
    """Return the text of :meth:`FeaturePipeline.explain`."""
    rows = [("step", "reads", "makes", "executors", "learned")]
    for index, step in enumerate(steps):
        executors = ", ".join(step.executors)
        name = f"{index + 1} {step.method}"
        if fitted is None:
            read = "all that fit" if step.reads is None else _few(step.reads)
            rows.append((name, read, "", executors, "nothing yet"))
            continue
        each = fitted[index]
        made = [cell.output for cell in each.cells] or [
            name for name in each.after if each.after[name] != each.before.get(name)
        ]
        names = dict.fromkeys(name for cell in each.cells for name in cell.inputs)
        names |= dict.fromkeys(step.reads or ())
        rows.append((name, _few(list(names)), _few(made), executors, _size(each.state)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    if fitted:
        shown = (f"{name} {_described(field)}" for name, field in fitted[-1].after.items())
        lines.append(f"result: {', '.join(shown)}")
    return "\n".join(line.rstrip() for line in lines)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _described(field: Field) -> str:
    return field.kind if field.cardinality is None else f"{field.kind} ({field.cardinality} values)"


def _size(state: State) -> str:
    tables = [value for value in state.values() if hasattr(value, "num_rows")]
    values = sum(map(_count_values, (v for v in state.values() if not hasattr(v, "num_rows"))))
    parts = []
    if tables:
        rows, size = sum(each.num_rows for each in tables), sum(each.nbytes for each in tables)
        shown = f"{-(-size // 1000)} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"
        parts.append(f"{rows} rows ({shown})")
    if values:
        parts.append(f"{values} values")
    return ", ".join(parts) or "-"


def _count_values(value: Any) -> int:
    values = value.values() if isinstance(value, dict) else value
    return sum(map(_count_values, values)) if isinstance(value, dict | list | tuple) else 1
