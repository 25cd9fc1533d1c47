"""Steps that look at several rows, or choose rows: most run on tables of Spark only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.friesian.feature.operators.cells import check_dropna
from bigdl.friesian.feature.operators.columns import check_string
from bigdl.friesian.feature.operators.negatives import check_sizes
from bigdl.friesian.feature.operators.popularity import check_popularity
from bigdl.friesian.feature.pipeline.requests import Outcome, Request
from bigdl.friesian.feature.pipeline.step import Cell, Field, Schema, State, Step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "AddNegHistSeq",
    "AddNegativeSamples",
    "DropNa",
    "Filter",
    "TableStep",
]

_ITEMS_OF = ("exclude_history_col", "user_col")  # columns that say which items are not drawn


@dataclass(frozen=True)
class TableStep(Step):
    """A method of :class:`FeatureTable`; the state has the fields behind it."""

    given: dict[str, Any]
    is_row_wise = False

    def __post_init__(self) -> None:
        """Check the arguments."""

    def on(self, df: DataFrame) -> DataFrame:
        """What the method makes of a DataFrame."""
        from bigdl.friesian.feature.feature_table import FeatureTable

        return getattr(FeatureTable(df), self.method)(**self.given).df

    def requests(self, before: Schema) -> dict[str, Request]:
        return {"after": Outcome(tuple(before), self)}

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        found = {}
        for name, kind in answers["after"].items():
            same = name in before and before[name].kind == kind
            found[name] = before[name].cardinality if same else None
        return {"kinds": answers["after"], "cardinalities": found}

    def hides_columns(self, before: Schema) -> bool:
        return True

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        return []

    def after(self, before: Schema, state: State | None) -> Schema:
        return {
            name: Field(kind, self.cardinality(name, before, state))
            for name, kind in state["kinds"].items()
        }

    def cardinality(self, name: str, before: Schema, state: State) -> int | None:
        """Of a column behind the step."""
        return state["cardinalities"][name]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        return self.on(df)


class DropNa(TableStep):
    """``dropna``."""

    method = "dropna"

    def __post_init__(self) -> None:
        check_dropna(self.given["how"], self.given["thresh"])

    @property
    def reads(self) -> list[str] | None:
        return self.given["columns"]


class Filter(TableStep):
    """``filter``."""

    method = "filter"

    @property
    def reads(self) -> list[str]:
        """The condition, of which only Spark knows what columns it names."""
        return [self.given["condition"]]


class AddNegHistSeq(TableStep):
    """``add_neg_hist_seq``."""

    method = "add_neg_hist_seq"

    def __post_init__(self) -> None:
        check_sizes(self.given["item_size"], self.given["neg_num"])
        check_string(self.given["item_history_col"], "item_history_col")

    @property
    def reads(self) -> list[str]:
        return [self.given["item_history_col"]]

    def cardinality(self, name: str, before: Schema, state: State) -> int | None:
        if name == f"neg_{self.given['item_history_col']}":
            return self.given["item_size"]
        return super().cardinality(name, before, state)


class AddNegativeSamples(TableStep):
    """``add_negative_samples``."""

    method = "add_negative_samples"

    def __post_init__(self) -> None:
        check_sizes(self.given["item_size"], self.given["neg_num"])
        for what in ("item_col", "label_col"):
            check_string(self.given[what], what)
        for what in _ITEMS_OF:
            if self.given.get(what) is not None:
                check_string(self.given[what], what)
        if self.given.get("popularity") is not None:
            check_popularity(self.given["popularity"])

    @property
    def reads(self) -> list[str]:
        others = [self.given.get(what) for what in _ITEMS_OF]
        return [self.given["item_col"], *(name for name in others if name is not None)]

    def requests(self, before: Schema) -> dict[str, Request]:
        # the columns behind it are the same without popularity, for which items would be counted
        alike = AddNegativeSamples({**self.given, "popularity": None})
        return {"after": Outcome(tuple(before), alike)}

    def cardinality(self, name: str, before: Schema, state: State) -> int | None:
        known = {self.given["item_col"]: self.given["item_size"], self.given["label_col"]: 2}
        return known.get(name) or super().cardinality(name, before, state)
