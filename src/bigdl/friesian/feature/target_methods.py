"""Methods of feature tables that say of categories how often they occur, with which targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.base import Table
from bigdl.friesian.feature.operators import counts as counting
from bigdl.friesian.feature.operators import target, target_time
from bigdl.friesian.feature.operators.code_tables import (
    join_codes,
    look_up_codes,
    without_twins,
)
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_different,
    require_columns,
    temporary,
)
from bigdl.friesian.feature.target_code import TargetCode

__all__ = ["TargetMethods"]


class TargetMethods:
    """Means of targets, and counts."""

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
    ) -> tuple[Self, list[TargetCode]]:
        """Codes of categories: means of a target, which a row's own fold does not help to form.

        The code of a category with count n and sum s is ``(s + mean * smooth) / (n + smooth)``;
        nulls of the target count for nothing.  One aggregation finds everything.

        Parameters
        ----------
        cat_cols : str, list of str, or list with lists of str
            A list inside the list means the combination of its columns.
        target_cols : str or list of str
            Columns of numbers.
        target_mean : dict of str to float, optional
            The mean of every target; default: that of the data.
        smooth : float, default 20
        kfold : int, default 2
            Number of folds.  With 1 each row has the code of all rows, also of itself.
        fold_seed : int, optional
            Assign rows to folds by chance; default: in turn.  Both go by the place of a row, so
            :meth:`cache` a table that comes out of a join or an aggregation, or give it a column of
            folds.
        fold_col : str, default "__fold__"
            A column of folds (int) that the table has is used, otherwise it is made.
        drop_cat : bool, default False
            Leave out the category columns.
        drop_fold : bool, default True
            Leave out the column of folds, unless the table had it.
        out_cols : str, list of str, or list of lists of str, optional
            Names of the codes, for each of `cat_cols` those of all targets; default
            ``<column>_te_<target>`` or ``<column>_<column>_te_<target>``.  The name of a column
            replaces it in its place, also if it is a category: all codes are of the values before.

        Returns
        -------
        table : FeatureTable
            With the codes as double columns.
        codes : list of TargetCode
            Of each of `cat_cols`, by all rows, for :meth:`encode_target`.
        """
        targets = target.check_targets(self.df, target_cols)
        encodings = target.encodings_of(cat_cols, targets, out_cols)
        require_columns(self.df, [name for each in encodings for name in each.categories])
        means = target.check_means(target_mean, targets)
        target.check_smoothing(smooth, kfold, fold_seed)
        had_folds = target.check_fold_col(fold_col, encodings) in self.df.columns
        df = target.assign_folds(self.df, kfold, fold_seed, fold_col) if kfold > 1 else self.df
        folds = fold_col if kfold > 1 else None
        found = target.TargetStatistics(df, encodings, targets, folds, means, smooth)
        df = found.encode(df)
        if drop_cat:
            df = df.drop(*target.only_categories(encodings))
        if folds is not None and drop_fold and not had_folds:
            df = df.drop(fold_col)
        return self._clone(df), _codes_of(found)

    def target_encode_by_time(
        self,
        cat_cols: str | list,
        target_cols: str | list[str],
        time_col: str,
        folds: int | list = 10,
        target_mean: Mapping[str, float] | None = None,
        smooth: float = 20,
        drop_cat: bool = False,
        out_cols: str | list | None = None,
    ) -> tuple[Self, list[TargetCode]]:
        """Codes of categories: means of a target, which only rows of an earlier time help to form.

        Parameters
        ----------
        cat_cols, target_cols, target_mean, smooth, drop_cat, out_cols
            As in :meth:`target_encode`.  Without a `target_mean` the mean is that of all rows of
            earlier folds.
        time_col : str
            Numbers, dates or timestamps.  A null makes the job fail.
        folds : int or list of times, default 10
            Time is cut in so many folds of about as many rows each, or at these times, at each of
            which a fold begins.  The more there are, the fresher are the codes.

        Returns
        -------
        table : FeatureTable
            With the codes as double columns.  Rows of the first fold have the mean.
        codes : list of TargetCode
            Of each of `cat_cols`, by all rows, for :meth:`encode_target` on later data.
        """
        targets = target.check_targets(self.df, target_cols)
        encodings = target.encodings_of(cat_cols, targets, out_cols)
        require_columns(self.df, [name for each in encodings for name in each.categories])
        means = target.check_means(target_mean, targets)
        target.check_smoothing(smooth, 1)
        fold_col = temporary(self.df, "time_fold")
        df = target_time.time_folds(self.df, time_col, folds, fold_col)
        found = target_time.TimeStatistics(df, encodings, targets, fold_col, means, smooth)
        df = found.encode(df)
        names = target.only_categories(encodings) if drop_cat else []
        return self._clone(df.drop(fold_col, *names)), _codes_of(found)

    def count_encode(
        self,
        cat_cols: str | list,
        normalize: bool = False,
        out_cols: str | list[str] | None = None,
        counts: Table | Sequence[Table] | None = None,
    ) -> tuple[Self, list[Table]]:
        """Add how often categories occur.

        Parameters
        ----------
        cat_cols : str, list of str, or list with lists of str
            A list inside the list means the combination of its columns.
        normalize : bool, default False
            Their share of the rows that have a category, instead of the number of rows.
        out_cols : str or list of str, optional
            Default: ``<column>_count`` or ``<column>_frequency``, with the names of combined
            columns joined by ``_``.  The name of a column replaces it, as in :meth:`target_encode`.
        counts : Table or list of Table, optional
            What this method returned for other data, whose counts are taken.

        Returns
        -------
        table : FeatureTable
            Counts are bigint, frequencies double; 0 for a null, NaN, or a category that does not
            occur.
        counts : list of Table
            Of each of `cat_cols` its values, their ``count`` and their ``frequency``.
        """
        encodings = counting.count_encodings(cat_cols, normalize, out_cols)
        if counts is None:
            tables = [Table(each) for each in counting.count_categories(self.df, encodings)]
        else:
            tables = list(counts) if isinstance(counts, list | tuple) else [counts]
        if len(tables) != len(encodings) or not all(isinstance(each, Table) for each in tables):
            raise UsageError(
                f"counts should be {len(encodings)} Tables, one for each of cat_cols, but got "
                f"{counts!r}"
            )
        frames = [each.df for each in tables]
        if counts is not None:
            frames = counting.check_counts(frames, encodings)
        df = counting.encode_counts(self.df, encodings, frames)
        return self._clone(df), tables

    def encode_target(
        self,
        targets: TargetCode | Sequence[TargetCode],
        target_cols: str | list[str] | None = None,
        drop_cat: bool = True,
    ) -> Self:
        """Codes that were learned from other data.

        Parameters
        ----------
        targets : TargetCode or list of TargetCode
        target_cols : str or list of str, optional
            Only the codes of these targets.
        drop_cat : bool, default True
            Leave out the category columns.

        Returns
        -------
        FeatureTable
            An unknown category has the mean of the target.  Of several rows of a category in a
            TargetCode that of the most rows counts.
        """
        codes = list(targets) if isinstance(targets, list | tuple) else [targets]
        if not codes or not all(isinstance(each, TargetCode) for each in codes):
            raise UsageError(f"targets should be TargetCode or a list of them, got {targets!r}")
        wanted = None if target_cols is None else as_names(target_cols, "target_cols")
        known = {of for code in codes for of, _ in code.out_target_mean.values()}
        typos = [name for name in wanted or () if name not in known]
        if typos:
            raise UsageError(f"targets have no codes of {typos}, but of {sorted(known)}")
        look_ups, done = [], []
        for code in codes:
            names = as_names(code.cat_col)
            for name in names:
                if name not in self.df.columns:
                    raise UsageError(
                        f"{name} in TargetCode.cat_col in targets does not exist in Table, whose "
                        f"columns are {self.df.columns}"
                    )
            once = without_twins(code.df, code.key_cols, list(code.out_target_mean))
            found = look_up_codes(once, code.key_cols, names, code.out_target_mean, wanted)
            look_ups.append(found)
            done += names
        made = [name for each in look_ups for name in each.outputs]
        check_different(made, "The codes of targets")
        df = join_codes(self.df, look_ups)
        return self._clone(df.drop(*(set(done) - set(made))) if drop_cat else df)


def _codes_of(found: target.TargetStatistics) -> list[TargetCode]:
    return [
        TargetCode(
            found.codes(each),
            each.categories[0] if len(each.categories) == 1 else list(each.categories),
            {output: (name, found.means[name]) for name, output in each.outputs.items()},
            each.key_columns,
        )
        for each in found.encodings
    ]
