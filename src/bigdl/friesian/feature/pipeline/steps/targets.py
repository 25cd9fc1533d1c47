"""Categories replaced by what was learned about them: means of a target, and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import temporary
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.requests import Request, TargetSums
from bigdl.friesian.feature.pipeline.step import (
    Cell,
    Field,
    Function,
    Schema,
    State,
    Step,
    require_fields,
)
from bigdl.friesian.feature.pipeline.steps.cells import require_numbers
from bigdl.friesian.feature.pipeline.steps.encoding import Vocabulary

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["CountEncode", "TargetEncode"]


class Codes(Function):
    """What a table says about a value, or about several values together.

    Parameters
    ----------
    table : pyarrow.Table
    keys : list of str
        Columns of the table.
    code : str
        Column of the table.
    default : float, int or None
        For combinations that are not in the table.
    """

    is_costly = True

    def __init__(self, table: pa.Table, keys: Sequence[str], code: str, default: Any):
        self.table, self.keys, self.code, self.default = table, list(keys), code, default

    @cached_property
    def _codes(self) -> dict[tuple, Any]:
        keys = zip(*(self.table[name].to_pylist() for name in self.keys), strict=True)
        return dict(zip(keys, self.table[self.code].to_pylist(), strict=True))

    def array(self, *values: pa.Array) -> pa.Array:
        import pyarrow as pa

        kind = self.table.schema.field(self.code).type
        if len(values) == 1:
            return self._of_one(values[0], kind)
        found = self._codes
        rows = zip(*(each.to_pylist() for each in values), strict=True)
        return pa.array([found.get(row, self.default) for row in rows], kind)

    def _of_one(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        import pyarrow as pa

        places = Vocabulary(self.table[self.keys[0]].combine_chunks()).find(values)
        codes = pa.concat_arrays(
            [pa.array([self.default], kind), self.table[self.code].combine_chunks()]
        )
        return codes.take(places.fill_null(0))

    def value(self, *values: Any) -> Any:
        return self._codes.get(values, self.default)


def _categories(groups: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group))


def _check_categories(before: Schema, groups: Sequence[Sequence[str]]) -> None:
    names = _categories(groups)
    require_fields(before, names)
    for name in names:
        kind = before[name].kind
        if not (kinds.is_integral(kind) or kind in ("string", "boolean", "date")):
            raise UsageError(
                f"The column {name} of type {kind} has no categories in a pipeline: cells should "
                "be strings, whole numbers, booleans or dates; cast or bin them first"
            )


def _known(sums: pa.Table, keys: int) -> pa.Table:
    """The combinations without a null that occur, in their order."""
    import pyarrow.compute as pc

    sums = sums.filter(pc.greater(sums["rows"], 0))
    names = [f"key_{i}" for i in range(keys)]
    for name in names:
        sums = sums.filter(pc.is_valid(sums[name]))
    return sums.sort_by([(name, "ascending") for name in names])


def _total(sums: pa.Table, name: str) -> Any:
    import pyarrow.compute as pc

    return pc.sum(sums[name]).as_py() or 0


@dataclass(frozen=True)
class TargetEncode(Step):
    """``target_encode``; the state has a table of codes for each group, and the means.

    Attributes
    ----------
    groups : list of list of str
    targets : list of str
    out_cols : list of list of str
        For each group a name for each target.
    """

    groups: list[list[str]]
    targets: list[str]
    out_cols: list[list[str]]
    target_mean: dict[str, float]
    smooth: float
    kfold: int
    fold_seed: int | None
    fold_col: str
    drop_cat: bool
    drop_fold: bool
    method = "target_encode"

    @property
    def reads(self) -> list[str]:
        return _categories(self.groups) + self.targets

    def requests(self, before: Schema) -> dict[str, Request]:
        _check_categories(before, self.groups)
        require_numbers(before, self.targets)
        count = len(self.targets)
        return {
            str(i): TargetSums((*group, *self.targets), count)
            for i, group in enumerate(self.groups)
        }

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        first = next(iter(answers.values()))
        means = {}
        for i, name in enumerate(self.targets):
            count = _total(first, f"count_{i}")
            mean = _total(first, f"sum_{i}") / count if count else None
            means[name] = self.target_mean.get(name, mean)
        tables = {
            str(i): self._codes(answers[str(i)], len(group), means)
            for i, group in enumerate(self.groups)
        }
        return {"means": means, **tables}

    def _codes(self, sums: pa.Table, keys: int, means: Mapping[str, float | None]) -> pa.Table:
        import numpy as np
        import pyarrow as pa

        known = _known(sums, keys)
        found = {f"key_{i}": known[f"key_{i}"] for i in range(keys)}
        found["rows"] = known["rows"]
        for i, name in enumerate(self.targets):
            if means[name] is None:
                found[f"code_{i}"] = pa.nulls(len(known), pa.float64())
                continue
            weight = known[f"count_{i}"].to_numpy() + float(self.smooth)
            total = known[f"sum_{i}"].fill_null(0.0).to_numpy() + means[name] * float(self.smooth)
            with np.errstate(all="ignore"):
                codes = np.where(weight > 0, total / weight, means[name])
            found[f"code_{i}"] = pa.array(codes)
        return pa.table(found)

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        _check_categories(before, self.groups)
        cells = []
        for i, (group, outputs) in enumerate(zip(self.groups, self.out_cols, strict=True)):
            keys = [f"key_{j}" for j in range(len(group))]
            for j, (target, output) in enumerate(zip(self.targets, outputs, strict=True)):
                function = None
                if state is not None:
                    function = Codes(state[str(i)], keys, f"code_{j}", state["means"][target])
                cells.append(Cell(tuple(group), output, Field("double"), function))
        return cells

    def after(self, before: Schema, state: State | None) -> Schema:
        fields = super().after(before, state)
        return {name: each for name, each in fields.items() if name not in self._dropped}

    @property
    def _dropped(self) -> set[str]:
        """The categories that no code has taken the place of, if they are left out."""
        if not self.drop_cat:
            return set()
        made = {name for row in self.out_cols for name in row}
        return {name for group in self.groups for name in group} - made

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.operators.code_tables import join_codes, look_up_codes

        look_ups = []
        for i, (group, outputs) in enumerate(zip(self.groups, self.out_cols, strict=True)):
            keys = [f"key_{j}" for j in range(len(group))]
            codes = state[str(i)].drop_columns("rows")
            # behind hidden names: an output may be called as a key
            shown = [temporary(outputs, key) for key in keys]
            table = df.sparkSession.createDataFrame(codes.rename_columns([*shown, *outputs]))
            means = {
                output: (target, state["means"][target])
                for output, target in zip(outputs, self.targets, strict=True)
            }
            look_ups.append(look_up_codes(table, shown, group, means, None))
        return join_codes(df, look_ups).drop(*self._dropped)

    def training(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.feature_table import FeatureTable

        if self.kfold == 1:
            return self.catalyst(df, before, state)
        table, _ = FeatureTable(df).target_encode(
            self.groups,
            self.targets,
            state["means"],
            self.smooth,
            self.kfold,
            self.fold_seed,
            self.fold_col,
            self.drop_cat,
            self.drop_fold,
            self.out_cols,
        )
        return table.df


@dataclass(frozen=True)
class CountEncode(Step):
    """``count_encode``; the state has a table of counts for each group."""

    groups: list[list[str]]
    normalize: bool
    out_cols: list[str]
    method = "count_encode"

    @property
    def reads(self) -> list[str]:
        return _categories(self.groups)

    def requests(self, before: Schema) -> dict[str, Request]:
        _check_categories(before, self.groups)
        return {str(i): TargetSums(tuple(group), 0) for i, group in enumerate(self.groups)}

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        import pyarrow as pa

        found = {}
        for i, group in enumerate(self.groups):
            known = _known(answers[str(i)], len(group)).rename_columns({"rows": "count"})
            share = known["count"].to_numpy() / max(_total(known, "count"), 1)
            found[str(i)] = known.append_column("frequency", pa.array(share))
        return found

    @property
    def _wanted(self) -> str:
        return "frequency" if self.normalize else "count"

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        _check_categories(before, self.groups)
        field = Field("double" if self.normalize else "bigint")
        cells = []
        for i, (group, output) in enumerate(zip(self.groups, self.out_cols, strict=True)):
            keys, function = [f"key_{j}" for j in range(len(group))], None
            if state is not None:
                default = 0.0 if self.normalize else 0
                function = Codes(state[str(i)], keys, self._wanted, default)
            cells.append(Cell(tuple(group), output, field, function))
        return cells

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.operators.code_tables import join_codes
        from bigdl.friesian.feature.operators.counts import look_up_counts
        from bigdl.friesian.feature.operators.target import Encoding

        look_ups = []
        for i, (group, output) in enumerate(zip(self.groups, self.out_cols, strict=True)):
            keys = [f"key_{j}" for j in range(len(group))]
            table = df.sparkSession.createDataFrame(state[str(i)].select([*keys, self._wanted]))
            encoding = Encoding(tuple(group), {self._wanted: output})
            look_ups.append(look_up_counts(encoding, table, keys))
        return join_codes(df, look_ups)
