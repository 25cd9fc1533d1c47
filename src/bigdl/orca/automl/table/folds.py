"""Cross-validation folds of a table, divided before anything is fitted."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError

_HELD_OUT_PARTS = 8  # one of which decides when training stops


@dataclass
class TableFold:
    """Row indices of a fold.

    Attributes
    ----------
    train : ndarray
        Rows on which a model is trained.
    held_out : ndarray
        Rows that decide when training stops, taken from the training rows.
    test : ndarray or None
        Rows on which the model is scored; None for a model that is only trained.
    """

    train: np.ndarray
    held_out: np.ndarray
    test: np.ndarray | None


def create_folds(
    y: np.ndarray,
    count: int,
    seed: int,
    *,
    is_classification: bool,
    groups: np.ndarray | None = None,
    times: np.ndarray | None = None,
) -> list[TableFold]:
    """Divide rows into cross-validation folds.

    Parameters
    ----------
    y : ndarray
        Class indices, or values.
    count : int
        Number of folds.
    seed : int
    is_classification : bool
        Whether each fold has about the same share of each class.
    groups : ndarray, optional
        Group of each row. All rows of a group are on the same side of each division.
    times : ndarray, optional
        Time of each row. Each fold is trained on rows that are older than those on which it is
        scored; a last fold, without test rows, is trained on all rows.

    Raises
    ------
    UsageError
        If there are too few rows, groups or times.
    """
    for name, of in (("rows", None), ("groups", groups), ("times", times)):
        amount = len(y) if of is None else len(np.unique(of))
        if amount <= count:
            raise UsageError(
                f"The table has {amount} {name}, too few for {count} folds; pass fewer folds",
                code="data-empty" if amount == 0 else "argument-value",
                argument="folds",
            )
    if times is not None:
        return _folds_by_time(times, count)
    folds = []
    unit = "rows" if groups is None else "groups"
    for number, (train, test) in enumerate(_divisions(y, count, seed, is_classification, groups)):
        train_groups = None if groups is None else groups[train]
        amount = len(train) if train_groups is None else len(np.unique(train_groups))
        if amount < 2 or not len(test):
            raise UsageError(
                f"A fold of {count} would have {amount} training {unit} and {len(test)} test rows, "
                f"too few to train and score a model; pass more {unit} or another number of folds",
                code="argument-value",
                argument="folds",
            )
        parts = min(_HELD_OUT_PARTS, amount)
        inner = _divisions(y[train], parts, seed + 1 + number, is_classification, train_groups)
        kept, held_out = inner[0]
        folds.append(TableFold(train[kept], train[held_out], test))
    return folds


def _divisions(
    y: np.ndarray, count: int, seed: int, is_classification: bool, groups: np.ndarray | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    from sklearn import model_selection

    if is_classification and np.bincount(y).max() >= count:
        name = "StratifiedKFold" if groups is None else "StratifiedGroupKFold"
    else:
        name = "KFold" if groups is None else "GroupKFold"
    splitter = getattr(model_selection, name)(count, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class with fewer rows than folds is not in all of them
        return list(splitter.split(np.zeros(len(y)), y, groups))


def _folds_by_time(times: np.ndarray, count: int) -> list[TableFold]:
    """Divide rows in order of time; rows of the same time are in the same fold.

    The folds have about the same number of rows, or of distinct times if one time has too many
    rows.
    """
    order = np.argsort(times, kind="stable")
    values = times[order]
    starts = np.unique(values, return_index=True)[1]
    parts = np.arange(1, count + 1)
    cuts = np.searchsorted(values, values[len(order) * parts // (count + 1)])
    if cuts[0] == 0 or len(np.unique(cuts)) < count:
        cuts = starts[len(starts) * parts // (count + 1)]
    ends = [*cuts.tolist(), len(order)]
    folds = []
    for start, stop in [*itertools.pairwise(ends), (len(order), len(order))]:
        inner = int(np.searchsorted(values, values[int(start * (1 - 1 / _HELD_OUT_PARTS))]))
        if not inner or inner == start:
            inner = max(1, start - 1)  # all rows have nearly the same time
        is_last = start == len(order)
        if start >= 2 and (stop > start or is_last):
            test = None if is_last else order[start:stop]
            folds.append(TableFold(order[:inner], order[inner:start], test))
    if len(folds) <= count:
        raise UsageError(
            f"The oldest time has too few rows to train a model for the first of {count} folds; "
            "pass fewer folds",
            code="argument-value",
            argument="folds",
        )
    return folds
