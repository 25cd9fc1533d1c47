"""Preparation of a table's rows for one model, fitted on its training rows only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.orca.automl.table.columns import MatrixRows

_MOST_CATEGORIES = 254
_ID_ROWS = 50  # a column of texts with more distinct values, half of them unique, is an id


@dataclass
class FittedPreparation:
    """Categories, centers and scales of the training rows of a model.

    Attributes
    ----------
    codes : list of ndarray
        For each category column, the model's code of each category of the table; -1 for
        categories that the training rows lack or that are too rare, and for all categories of ids.
    centers, scales : ndarray
        Median and interquartile range of each column of numbers.
    """

    codes: list[np.ndarray]
    centers: np.ndarray
    scales: np.ndarray

    @classmethod
    def fit(cls, rows: MatrixRows, counts: list[int]) -> FittedPreparation:
        """Fit the preparation on training rows.

        Parameters
        ----------
        rows : MatrixRows
        counts : list of int
            Number of categories of each category column of the table.
        """
        codes = [_known_codes(rows.codes[:, i], count) for i, count in enumerate(counts)]
        if not len(rows.numbers) or not rows.numbers.shape[1]:
            width = rows.numbers.shape[1]
            return cls(codes, np.zeros(width, np.float32), np.ones(width, np.float32))
        known = np.where(np.isnan(rows.numbers).all(axis=0), np.float32(0), rows.numbers)
        low, centers, high = np.nanquantile(known, [0.25, 0.5, 0.75], axis=0)
        deviations = np.nanstd(known, axis=0, dtype=np.float64)
        scales = np.where(high > low, high - low, 2 * deviations)
        scales = np.where(scales > 0, scales, 1)
        return cls(codes, centers.astype(np.float32), scales.astype(np.float32))

    @property
    def widths(self) -> list[int]:
        """Number of known categories of each category column."""
        return [int(table.max(initial=-1)) + 1 for table in self.codes]

    def known_codes(self, rows: MatrixRows) -> np.ndarray:
        """Return the model's codes of the categories; -1 for missing and unknown ones."""
        result = np.empty(rows.codes.shape, np.int32)
        for index, table in enumerate(self.codes):
            result[:, index] = np.append(table, np.int32(-1))[rows.codes[:, index]]
        return result

    def tree_matrix(self, rows: MatrixRows) -> np.ndarray:
        """Return numbers and codes as one matrix, with NaN for missing values."""
        codes = self.known_codes(rows).astype(np.float32)
        codes[codes < 0] = np.nan
        return np.concatenate([rows.numbers, codes], axis=1)

    def scaled_numbers(self, rows: MatrixRows) -> np.ndarray:
        """Return numbers scaled to about -3 to 3, 0 if missing, and a mark of missing values."""
        is_missing = np.isnan(rows.numbers)
        scaled = (np.where(is_missing, self.centers, rows.numbers) - self.centers) / self.scales
        scaled = scaled / np.sqrt(1 + (scaled / 3) ** 2)
        return np.concatenate([scaled, is_missing], axis=1, dtype=np.float32)

    def state(self) -> dict[str, Any]:
        """Return the arrays of the preparation."""
        return {"codes": self.codes, "centers": self.centers, "scales": self.scales}


def _known_codes(column: np.ndarray, count: int) -> np.ndarray:
    """Return the code of each category of a column, the most frequent first."""
    table = np.full(count, -1, np.int32)
    frequencies = np.bincount(column[column >= 0], minlength=count)
    distinct = int((frequencies > 0).sum())
    if distinct > _ID_ROWS and (frequencies == 1).sum() > distinct / 2:
        is_id = 2 * distinct > frequencies.sum()
        if is_id:
            return table
    frequent = np.argsort(-frequencies, kind="stable")[: min(distinct, _MOST_CATEGORIES)]
    table[frequent] = np.arange(len(frequent))
    return table
