"""Encoders based on aggregates of a table: scaling, binning, count and target encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.executors.spark import fit_operator, run_operator
from bigdl.friesian.feature.learned import TargetCode, codes_of
from bigdl.friesian.feature.relations import Table
from bigdl.friesian.ops import spark, vocabulary
from bigdl.friesian.ops.numbers import CutBins, MinMaxScale
from bigdl.friesian.ops.spark import F, as_names, col
from bigdl.friesian.ops.targets import CountEncode, TargetEncode, drop_duplicate_keys


@hide_frames
class AggregateEncoders(Table):
    """Table methods that encode columns by aggregates of the table."""

    def min_max_scale(
        self, columns: str | list[str], min: float = 0.0, max: float = 1.0
    ) -> tuple[Self, dict[str, tuple]]:
        """Scale numbers linearly to a range.

        Parameters
        ----------
        columns : str or list of str
            Number columns become float. Array columns become array<double> and are scaled by
            position. Vector columns stay vectors.
        min, max : float, default 0.0 and 1.0
            Range. A column whose values are all equal gets the middle of the range.

        Returns
        -------
        table : FeatureTable
            Nulls and NaN stay.
        extremes : dict of str to (min, max)
            Extremes of the data before scaling, for :meth:`transform_min_max_scale`; lists for
            arrays.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> train = FeatureTable.from_pandas(pd.DataFrame({"price": [10.0, 15.0, 20.0]}))
        >>> train, extremes = train.min_max_scale("price")
        >>> train.to_list("price"), extremes
        ([0.0, 0.5, 1.0], {'price': (10.0, 20.0)})
        >>> test = FeatureTable.from_pandas(pd.DataFrame({"price": [12.5, 30.0]}))
        >>> test.transform_min_max_scale("price", extremes, clip=True).to_list("price")
        [0.25, 1.0]
        """
        operator = MinMaxScale(as_names(columns), min, max, False)
        state = fit_operator(self.df, operator)
        extremes = {name: tuple(each) for name, each in state["extremes"].items()}
        return self._clone(run_operator(self.df, operator, state)), extremes

    def transform_min_max_scale(
        self,
        columns: str | list[str],
        min_max_dict: Mapping[str, tuple],
        min: float = 0.0,
        max: float = 1.0,
        clip: bool = False,
    ) -> Self:
        """Scale numbers by minimum and maximum values that were computed from other data.

        Parameters
        ----------
        columns : str or list of str
        min_max_dict : dict of str to (min, max)
            Extremes that :meth:`min_max_scale` returned.
        min, max : float, default 0.0 and 1.0
            Range. Pass that of :meth:`min_max_scale` again, because `min_max_dict` does not include
            it.
        clip : bool, default False
            Clip numbers outside of the extremes to the range.
        """
        names = as_names(columns)
        missing = [name for name in names if name not in min_max_dict]
        if missing:
            raise UsageError(
                f"min_max_dict has no entry for {missing}, got {dict(min_max_dict)!r}",
                code="argument-value",
                argument="min_max_dict",
                columns=missing,
            )
        extremes = {name: min_max_dict[name] for name in names}
        operator = MinMaxScale(names, min, max, clip)
        return self._clone(run_operator(self.df, operator, {"extremes": extremes}))

    def quantile_edges(self, columns: str | list[str], parts: int) -> dict[str, list[float]]:
        """Return the edges of bins with about the same number of rows each, for :meth:`cut_bins`.

        Parameters
        ----------
        columns : str or list of str
            Numeric columns; nulls and NaN are not counted.
        parts : int
            Number of bins. A frequent value may give equal edges, which are merged, so there may be
            fewer bins.

        Returns
        -------
        dict of str to list of float
            At most ``parts - 1`` ascending edges per column, exact to a thousandth of the rows. One
            job computes all of them.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"price": range(1, 101)}))
        >>> edges = table.quantile_edges("price", 4)
        >>> edges
        {'price': [25.0, 50.0, 75.0]}
        >>> table.cut_bins("price", edges).to_list("price_bin")[::30]
        [0, 1, 2, 3]
        """
        parts = check_integer("parts", parts, 2)
        operator = CutBins.of(columns, parts, None, None, drop=True, by_quantiles=True)
        return fit_operator(self.df, operator)["edges"]

    def count_encode(
        self,
        cat_cols: str | list,
        normalize: bool = False,
        out_cols: str | list[str] | None = None,
        counts: Table | Sequence[Table] | None = None,
    ) -> tuple[Self, list[Table]]:
        """Add columns with the counts or frequencies of categories.

        Parameters
        ----------
        cat_cols : str, list of str, or list with lists of str
            An inner list means the combination of its columns.
        normalize : bool, default False
            Return the share of rows with the category instead of the number of rows.
        out_cols : str or list of str, optional
            Output names. Default: ``<column>_count`` or ``<column>_frequency``, with combined
            column names joined by ``_``. The name of a column replaces it, as in
            :meth:`target_encode`.
        counts : Table or list of Table, optional
            Counts that this method returned for other data, to use instead.

        Returns
        -------
        table : FeatureTable
            Counts are bigint, frequencies double; 0 for null, NaN and unknown categories.
        counts : list of Table
            For each of `cat_cols` its values with their ``count`` and ``frequency``.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"]}))
        >>> counted, counts = table.count_encode("city")
        >>> counted.to_list("city_count")
        [2, 1, 2]
        """
        operator = CountEncode.of(cat_cols, normalize, out_cols)
        tables = spark.as_list([counts])
        if counts is None:
            tables = [Table(each) for each in operator.count(self.df)]
        groups = operator.groups
        if len(tables) != len(groups) or not all(isinstance(each, Table) for each in tables):
            raise UsageError(
                f"counts should be {len(groups)} Tables, one for each of cat_cols, but got "
                f"{counts!r}",
                code="argument-value",
                argument="counts",
            )
        df = operator.encode(self.df, [each.df for each in tables], is_unique=counts is None)
        return self._clone(df), tables

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
        """Add out-of-fold target encodings of categories.

        A category with count n and sum s has the code ``(s + mean * smooth) / (n + smooth)``,
        computed from the rows of all other folds. Nulls of the target are ignored. One aggregation
        computes all codes.

        Parameters
        ----------
        cat_cols : str, list of str, or list with lists of str
            An inner list means the combination of its columns.
        target_cols : str or list of str
            Numeric columns.
        target_mean : dict of str to float, optional
            Mean of every target. Default: the mean of the data.
        smooth : float, default 20
            Number of rows with the mean that are added to every category.
        kfold : int, default 2
            Number of folds. With 1, codes use all rows, including the row itself.
        fold_seed : int, optional
            Assign rows to folds at random. By default they are assigned round-robin. Both depend on
            the position of a row. So :meth:`cache` a table that results from a join or aggregation,
            or give it a fold column.
        fold_col : str, default "__fold__"
            Fold column (int). It is created if the table does not have it.
        drop_cat : bool, default False
            Drop the category columns.
        drop_fold : bool, default True
            Drop the fold column, unless the table had it before.
        out_cols : str, list of str, or list of lists of str, optional
            Output names, for each of `cat_cols` those of all targets. Default:
            ``<column>_te_<target>`` or ``<column>_<column>_te_<target>``. The name of an existing
            column replaces it in place, even a category column; all codes are computed from the
            values before.

        Returns
        -------
        table : FeatureTable
            With double columns of codes.
        codes : list of TargetCode
            Codes from all rows, for each of `cat_cols`, for :meth:`encode_target`.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> clicks = pd.DataFrame({"city": ["Oslo", "Oslo", "Rome", "Rome"], "click": [1, 1, 0, 1]})
        >>> table, codes = FeatureTable.from_pandas(clicks).target_encode(
        ...     "city", "click", kfold=1, smooth=0
        ... )
        >>> table.to_list("city_te_click")
        [1.0, 1.0, 0.5, 0.5]
        >>> new = FeatureTable.from_pandas(pd.DataFrame({"city": ["Rome", "Bern"]}))
        >>> new.encode_target(codes).to_list("city_te_click")  # Bern gets the mean of all clicks
        [0.5, 0.75]
        """
        folds = kfold, fold_seed, fold_col, drop_fold
        operator = TargetEncode.of(
            cat_cols, target_cols, target_mean, out_cols, smooth, drop_cat, *folds
        )
        df, statistics = operator.by_folds(self.df)
        return self._clone(df), codes_of(statistics)

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
        """Add target encodings of categories, computed only from rows of earlier time folds.

        Parameters
        ----------
        cat_cols, target_cols, target_mean, smooth, drop_cat, out_cols
            As in :meth:`target_encode`. Without a `target_mean` the mean is that of all rows of
            earlier folds.
        time_col : str
            Column of numbers, dates or timestamps. A null makes the job fail.
        folds : int or list of times, default 10
            Number of time folds with about equally many rows, or the start times of the folds. More
            folds give fresher codes.

        Returns
        -------
        table : FeatureTable
            With double columns of codes. Rows of the first fold get the mean.
        codes : list of TargetCode
            Codes from all rows, for each of `cat_cols`, for :meth:`encode_target` on later data.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> clicks = pd.DataFrame({"city": ["Oslo"] * 3, "day": [1, 2, 3], "click": [1, 0, 1]})
        >>> table, codes = FeatureTable.from_pandas(clicks).target_encode_by_time(
        ...     "city", "click", "day", folds=[2, 3], target_mean={"click": 0.5}, smooth=0
        ... )
        >>> table.sort("day").to_list("city_te_click")  # from the clicks before each day
        [0.5, 1.0, 0.5]
        """
        operator = TargetEncode.of(cat_cols, target_cols, target_mean, out_cols, smooth, drop_cat)
        df, statistics = operator.by_times(self.df, time_col, folds)
        return self._clone(df), codes_of(statistics)

    def encode_target(
        self,
        targets: TargetCode | Sequence[TargetCode],
        target_cols: str | list[str] | None = None,
        drop_cat: bool = True,
    ) -> Self:
        """Add target encodings that were computed from other data.

        Parameters
        ----------
        targets : TargetCode or list of TargetCode
        target_cols : str or list of str, optional
            Add only the codes of these targets.
        drop_cat : bool, default True
            Drop the category columns.

        Returns
        -------
        FeatureTable
            Unknown categories get the mean of the target. If a TargetCode has several rows of a
            category, the one with the largest count is used.
        """
        codes = spark.as_list([targets])
        if not codes or not all(isinstance(each, TargetCode) for each in codes):
            raise UsageError(
                f"targets should be TargetCode or a list of them, got {targets!r}",
                code="argument-type",
                argument="targets",
            )
        wanted = None if target_cols is None else as_names(target_cols, "target_cols")
        known = {of for code in codes for of, _ in code.out_target_mean.values()}
        typos = [name for name in wanted or () if name not in known]
        if typos:
            raise UsageError(
                f"targets have no codes of {typos}, but of {sorted(known)}",
                code="column-missing",
                columns=typos,
                allowed=list(known),
            )
        look_ups, used = [], []
        for code in codes:
            names = as_names(code.cat_col)
            for name in names:
                if name not in self.columns:
                    raise UsageError(
                        f"{name} in TargetCode.cat_col in targets does not exist in Table, whose "
                        f"columns are {self.columns}",
                        code="column-missing",
                        column=name,
                        allowed=list(self.columns),
                    )
            once = drop_duplicate_keys(code.df, code.key_cols, list(code.out_target_mean))
            outputs = {
                output: (output, F.lit(mean).cast("double"))
                for output, (target, mean) in code.out_target_mean.items()
                if wanted is None or target in wanted
            }
            at = dict(zip(code.key_cols, map(col, names), strict=True))
            look_ups.append(vocabulary.LookUp(once, at, outputs))
            used += names
        outputs_of_all = [name for each in look_ups for name in each.outputs]
        spark.check_different(outputs_of_all, "The codes of targets")
        df = vocabulary.join(self.df, look_ups)
        return self._clone(df.drop(*(set(used) - set(outputs_of_all))) if drop_cat else df)
