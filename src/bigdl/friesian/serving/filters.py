"""Filters of recommended items: allowed and denied items, and conditions on item attributes.

A search of an :class:`ItemIndex` applies them inside the index, so that a restrictive filter does
not leave an answer with too few items.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.errors import UsageError
from bigdl.friesian.serving.rows import ids_of, table_of

if TYPE_CHECKING:
    from bigdl.friesian.serving.rows import TableSource

__all__ = ["ItemAttributes", "ItemFilter"]

_KEYS = ("allow", "deny", "where")
_MASKS = 32  # number of recent filters whose masks are kept
_BOUNDS = ("min", "max")


@dataclass(frozen=True)
class ItemFilter:
    """Filter of the items of a request.

    Attributes
    ----------
    allow : ndarray of int64, optional
        Recommend only these items.
    deny : ndarray of int64
        Recommend none of these items.
    where : dict
        Condition per attribute: a value, a list of values, or an object with ``min`` and ``max``.
        Items without a value do not match.

    Examples
    --------
    >>> from bigdl.friesian.serving import ItemFilter
    >>> chosen = ItemFilter.of({"deny": [7], "where": {"in_stock": True, "price": {"max": 9.5}}})
    >>> chosen.deny.tolist(), sorted(chosen.where)
    ([7], ['in_stock', 'price'])
    """

    allow: np.ndarray | None = None
    deny: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    where: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, content: object) -> ItemFilter:
        """Return the filter of a JSON object with ``allow``, ``deny`` and ``where``.

        Parameters
        ----------
        content : dict

        Raises
        ------
        UsageError
            If a key is unknown, or a value has the wrong type.
        """
        if not isinstance(content, Mapping):
            raise _invalid(f"filter should be an object with {list(_KEYS)}, got {content!r}")
        if strange := sorted(map(str, content.keys() - {*_KEYS})):
            raise _invalid(
                f"filter has the unknown key {strange[0]!r}; known are {', '.join(_KEYS)}"
            )
        lists: dict[str, np.ndarray] = {}
        for name in ("allow", "deny"):
            if name in content:
                if not isinstance(content[name], Sequence | np.ndarray):
                    raise _invalid(f"{name} of a filter should be a list of items")
                lists[name] = ids_of(content[name], f"{name} of the filter")
        where = content.get("where", {})
        if not isinstance(where, Mapping):
            raise _invalid(f"where of a filter should be an object, got {where!r}")
        for name, value in where.items():
            _check_condition(name, value)
        return cls(where=dict(where), **lists)

    @cached_property
    def key(self) -> tuple:
        """Hashable value that is equal for equal filters."""
        allow = None if self.allow is None else self.allow.tobytes()
        return allow, self.deny.tobytes(), repr(sorted(self.where.items()))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :meth:`of` reads."""
        content: dict[str, Any] = {}
        if self.allow is not None:
            content["allow"] = self.allow.tolist()
        if len(self.deny):
            content["deny"] = self.deny.tolist()
        if self.where:
            content["where"] = dict(self.where)
        return content


def _check_condition(name: object, value: object) -> None:
    values = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, Mapping):
        if not value or value.keys() - {*_BOUNDS}:
            raise _invalid(f"The condition on {name} should have min or max, got {dict(value)}")
        values = list(value.values())
        if not all(_is_number(each) for each in values):
            raise _invalid(f"min and max of {name} should be numbers, got {dict(value)}")
    if not all(isinstance(each, str | bool) or _is_number(each) for each in values):
        raise _invalid(
            f"The condition on {name} should be a string, a number, true or false, or a list of "
            f"them, got {value!r}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)


def _invalid(sentence: str) -> UsageError:
    return UsageError(sentence, code="request-invalid", argument="filter")


def _bound(value: float, dtype: pa.DataType) -> pa.Scalar:
    """Return a bound in the precision of the values, so that 0.1 in float32 is at most 0.1."""
    return pa.scalar(float(value), dtype) if pa.types.is_floating(dtype) else pa.scalar(value)


class ItemAttributes:
    """Attributes of items by which filters select, such as the category or the stock.

    Parameters
    ----------
    source : FeatureTable, DataFrame, pyarrow.Table or str
        A str is the path of Parquet files.
    id_col : str, default "item"
    columns : sequence of str, optional
        Default: all columns except the id.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import ItemAttributes, ItemFilter
    >>> items = pd.DataFrame({"item": [1, 2, 3], "kind": ["tea", "rice", "tea"]})
    >>> chosen = ItemFilter.of({"where": {"kind": "tea"}, "deny": [3]})
    >>> ItemAttributes(items).mask(np.array([3, 1, 2, 9]), chosen).tolist()
    [False, True, False, False]
    """

    def __init__(
        self,
        source: TableSource | None = None,
        id_col: str = "item",
        columns: Sequence[str] | None = None,
    ):
        self._ids = np.zeros(0, np.int64)
        self._columns: dict[str, pa.Array] = {}
        if source is not None:
            table = table_of(source, "the table of attributes").combine_chunks()
            wanted = [id_col, *(columns if columns is not None else table.column_names)]
            if missing := [name for name in wanted if name not in table.column_names]:
                raise UsageError(
                    f"The table of attributes has no columns {missing}, only {table.column_names}",
                    code="column-missing",
                    columns=missing,
                )
            ids = ids_of(table[id_col], "the table of attributes")
            order = np.argsort(ids, kind="stable")
            self._ids = ids[order]
            rows = table.take(pa.array(order))
            for name in dict.fromkeys(wanted):
                if name != id_col:
                    self._columns[name] = rows[name].combine_chunks()
        self._masks: OrderedDict[tuple, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._changing = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the attributes."""
        return list(self._columns)

    def check(self, chosen: ItemFilter) -> None:
        """Raise a UsageError if a filter uses an unknown attribute or values of another type."""
        for name, value in chosen.where.items():
            if name not in self._columns:
                known = f"known are {self.names}" if self._columns else "there are none"
                raise UsageError(
                    f"The items have no attribute {name!r} to filter by; {known}",
                    code="request-invalid",
                    argument=name,
                    allowed=self.names,
                )
            self._matching(name, value)

    def _matching(self, name: str, value: object) -> np.ndarray:
        column = self._columns[name]
        try:
            if isinstance(value, Mapping):
                if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
                    raise pa.ArrowInvalid("it has no order")
                matches = pc.is_valid(column)
                if "min" in value:
                    least = _bound(value["min"], column.type)
                    matches = pc.and_(matches, pc.greater_equal(column, least))
                if "max" in value:
                    most = _bound(value["max"], column.type)
                    matches = pc.and_(matches, pc.less_equal(column, most))
            else:
                values = list(value) if isinstance(value, list | tuple) else [value]
                wanted = pa.array(values).cast(column.type) if values else None
                if wanted is None:
                    return np.zeros(len(column), bool)
                matches = pc.is_in(column, value_set=wanted)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise UsageError(
                f"The attribute {name!r} is of type {column.type}, so it cannot be compared with "
                f"{value!r}: {error}",
                code="request-invalid",
                argument=name,
            ) from None
        return np.asarray(pc.fill_null(matches, False))

    def mask(self, ids: np.ndarray, chosen: ItemFilter) -> np.ndarray:
        """Return a mask of the items that a filter accepts.

        Parameters
        ----------
        ids : ndarray of int64
            Must not be changed later, because masks of recent filters are kept.
        chosen : ItemFilter
        """
        key = (*chosen.key, id(ids))
        with self._changing:
            known = self._masks.get(key)
            if known is not None:
                self._masks.move_to_end(key)
                return known[1]
        accepted = np.ones(len(ids), bool)
        if chosen.allow is not None:
            accepted &= np.isin(ids, chosen.allow)
        if len(chosen.deny):
            accepted &= ~np.isin(ids, chosen.deny)
        if chosen.where:
            self.check(chosen)
            at = np.searchsorted(self._ids, ids)
            at[at == len(self._ids)] = 0
            has_row = self._ids[at] == ids if len(self._ids) else np.zeros(len(ids), bool)
            matches = np.ones(len(self._ids), bool)
            for name, value in chosen.where.items():
                matches &= self._matching(name, value)
            accepted &= has_row & (matches[at] if len(matches) else False)
        with self._changing:
            self._masks[key] = ids, accepted  # the reference keeps the address in the key unique
            if len(self._masks) > _MASKS:
                self._masks.popitem(last=False)
        return accepted
