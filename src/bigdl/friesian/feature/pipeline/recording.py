"""The methods of a pipeline that record operators: those of a table, with the same arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators import columns as names
from bigdl.friesian.feature.operators.columns import as_names, check_string
from bigdl.friesian.feature.pipeline.step import Step
from bigdl.friesian.feature.pipeline.steps import STEPS
from bigdl.friesian.feature.pipeline.steps.bins import CutBins, OneHotEncode
from bigdl.friesian.feature.pipeline.steps.casts import Cast
from bigdl.friesian.feature.pipeline.steps.cells import Clip, FillMedian, FillNa, Log
from bigdl.friesian.feature.pipeline.steps.encoding import CategoryEncode
from bigdl.friesian.feature.pipeline.steps.hashing import CrossColumns, HashEncode
from bigdl.friesian.feature.pipeline.steps.layout import Drop, Rename, Select
from bigdl.friesian.feature.pipeline.steps.scaling import MinMaxScale
from bigdl.friesian.feature.pipeline.steps.sequences import Mask, Pad
from bigdl.friesian.feature.pipeline.steps.targets import CountEncode, TargetEncode

__all__ = ["Recording"]


class Recording(ABC):
    """Methods that return the pipeline with one more step.

    They take what the methods of :class:`FeatureTable` take.  Those of the last group look at
    several rows or choose rows, and run on tables of Spark only.
    """

    @abstractmethod
    def _record(self, step: Step) -> Self:
        """A pipeline with one more step."""

    # -- cells ---------------------------------------------------------------------------------

    def fillna(self, value: float | str | bool, columns: str | list[str] | None) -> Self:
        """Replace nulls; see :meth:`FeatureTable.fillna`."""
        return self._record(FillNa(value, None if columns is None else as_names(columns)))

    def fill_median(self, columns: str | list[str] | None = None) -> Self:
        """Replace nulls by the median of the data at ``fit``; see :meth:`FeatureTable.fill_median`.

        NumPy's and Spark's medians of the same data are exact to a thousandth of the rows.
        """
        return self._record(FillMedian(None if columns is None else as_names(columns)))

    def clip(
        self,
        columns: str | list[str] | None = None,
        min: float | None = None,
        max: float | None = None,
    ) -> Self:
        """Bring numbers into bounds; see :meth:`FeatureTable.clip`."""
        return self._record(Clip(as_names(columns), min, max))

    def log(self, columns: str | list[str] | None = None, clipping: bool = True) -> Self:
        """Take logarithms; see :meth:`FeatureTable.log`."""
        return self._record(Log(as_names(columns), clipping))

    def cast(self, columns: str | list[str] | None, dtype: str) -> Self:
        """Change types; see :meth:`FeatureTable.cast`.

        Numbers with fractions cannot become text here: Spark and Python write them differently.
        """
        return self._record(Cast(None if columns is None else as_names(columns), dtype))

    def min_max_scale(
        self, columns: str | list[str], min: float = 0.0, max: float = 1.0, clip: bool = False
    ) -> Self:
        """Scale numbers to a range by the extremes of the data at ``fit``.

        Parameters
        ----------
        columns, min, max
            See :meth:`FeatureTable.min_max_scale`; columns of single numbers.
        clip : bool, default False
            Bring what is outside of the extremes to the ends of the range.
        """
        return self._record(MinMaxScale(as_names(columns), min, max, clip))

    # -- columns -------------------------------------------------------------------------------

    def select(self, *cols: str | list[str]) -> Self:
        """Only these columns, in this order."""
        wanted = cols[0] if len(cols) == 1 and isinstance(cols[0], list | tuple) else list(cols)
        return self._record(Select(as_names(wanted, "cols")))

    def drop(self, *cols: str | list[str]) -> Self:
        """All but some columns; names that do not exist are skipped."""
        unwanted = cols[0] if len(cols) == 1 and isinstance(cols[0], list) else list(cols)
        return self._record(Drop(as_names(unwanted)))

    def rename(self, columns: dict[str, str]) -> Self:
        """Give columns new names; see :meth:`FeatureTable.rename`."""
        if not isinstance(columns, dict) or not all(isinstance(e, str) for e in columns.values()):
            raise UsageError(
                "columns should be a dictionary of {'old_name1': 'new_name1', 'old_name2': "
                f"'new_name2'}}, but got {columns!r}"
            )
        return self._record(Rename(dict(columns)))

    # -- categories ----------------------------------------------------------------------------

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
        """Replace values by their numbers in the vocabularies of the data at ``fit``.

        Parameters
        ----------
        columns : str, dict or list of them
            A dict ``{"src_cols": [...], "col_name": ...}`` means that several columns have one
            vocabulary.  Strings, whole numbers, booleans or dates.
        sep : str, default ","
            Plain text, no regular expression.
        freq_limit, order_by_freq, do_split, sort_for_array, keep_most_frequent, broadcast
            See :meth:`FeatureTable.category_encode`.
        oov_buckets : int, default 0
            See :meth:`FeatureTable.encode_string`.

        Notes
        -----
        What is not in a vocabulary becomes null; :meth:`fillna` with 0 follows as a rule.
        """
        from bigdl.friesian.feature.operators.vocabulary import sources_of

        given = list(columns) if isinstance(columns, list | tuple) else [columns]
        if not given:
            raise UsageError("columns should be str, dict or a list of them, but got None.")
        sources = sources_of(given, freq_limit)
        return self._record(
            CategoryEncode(
                [{"src_cols": list(each.columns), "col_name": each.name} for each in sources],
                {each.name: each.at_least for each in sources if each.at_least},
                order_by_freq,
                do_split,
                check_string(sep, "sep"),
                sort_for_array,
                keep_most_frequent,
                broadcast,
                oov_buckets,
            )
        )

    def hash_encode(self, columns: str | list[str], bins: int, method: str = "md5") -> Self:
        """Replace values by hashes; see :meth:`FeatureTable.hash_encode`."""
        return self._record(HashEncode(as_names(columns), bins, method))

    def cross_hash_encode(
        self,
        cross_columns: list,
        bin_sizes: int | list[int],
        cross_col_names: list[str | None] | str | None = None,
        method: str = "md5",
        sep: str = "",
    ) -> Self:
        """Add hashes of several columns together; see :meth:`FeatureTable.cross_hash_encode`."""
        from bigdl.friesian.feature.operators.hashing import crosses_of

        crosses = crosses_of(cross_columns, bin_sizes, cross_col_names)
        return self._record(
            CrossColumns(
                [each.columns for each in crosses],
                [each.bins for each in crosses],
                [each.name for each in crosses],
                method,
                check_string(sep, "sep"),
            )
        )

    cross_columns = cross_hash_encode

    def one_hot_encode(
        self,
        columns: str | list[str],
        sizes: int | list[int] | None = None,
        prefix: str | list[str] | None = None,
        keep_original_columns: bool = False,
    ) -> Self:
        """Make columns of 0 and 1; see :meth:`FeatureTable.one_hot_encode`.

        Without `sizes` a column of numbers that the pipeline made has an indicator for each of
        them, and another one for each from 0 to the largest value at ``fit``.
        """
        chosen = as_names(columns)
        given = [sizes] if isinstance(sizes, int) else sizes
        return self._record(
            OneHotEncode(
                chosen,
                None if given is None else list(given),
                chosen if prefix is None else as_names(prefix, "prefix"),
                keep_original_columns,
            )
        )

    def cut_bins(
        self,
        columns: str | list[str],
        bins: int | list | Mapping,
        labels: list[str] | Mapping | None = None,
        out_cols: str | list[str] | None = None,
        drop: bool = True,
    ) -> Self:
        """Put numbers into bins; see :meth:`FeatureTable.cut_bins`."""
        return self._record(CutBins.of(columns, bins, labels, out_cols, drop))

    def quantile_bins(
        self,
        columns: str | list[str],
        parts: int,
        labels: list[str] | Mapping | None = None,
        out_cols: str | list[str] | None = None,
        drop: bool = True,
    ) -> Self:
        """Put numbers into bins of about as many rows each.

        Parameters
        ----------
        parts : int
            How many; see :meth:`FeatureTable.quantile_edges`.
        columns, labels, out_cols, drop
            See :meth:`FeatureTable.cut_bins`.
        """
        return self._record(CutBins.of(columns, parts, labels, out_cols, drop, by_quantiles=True))

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
        """Add means of targets for categories; see :meth:`FeatureTable.target_encode`.

        Only ``fit_transform`` makes codes without the rows of the own fold; ``transform`` has, for
        all rows, those of all rows at ``fit``.
        """
        from bigdl.friesian.feature.operators import target

        targets = as_names(target_cols, "target_cols")
        encodings = target.encodings_of(cat_cols, targets, out_cols)
        target.check_smoothing(smooth, kfold, fold_seed)
        return self._record(
            TargetEncode(
                [list(each.categories) for each in encodings],
                targets,
                [[each.outputs[name] for name in targets] for each in encodings],
                target.check_means(target_mean, targets),
                smooth,
                kfold,
                fold_seed,
                target.check_fold_col(fold_col, encodings),
                drop_cat,
                drop_fold,
            )
        )

    def count_encode(
        self,
        cat_cols: str | list,
        normalize: bool = False,
        out_cols: str | list[str] | None = None,
        counts: None = None,
    ) -> Self:
        """Add how often categories occurred at ``fit``; see :meth:`FeatureTable.count_encode`.

        Counts of other data cannot be given: `counts` is there to say so.
        """
        from bigdl.friesian.feature.operators.counts import count_encodings

        if counts is not None:
            raise UsageError(
                "counts cannot be given to a pipeline, which counts at fit; use count_encode of "
                "FeatureTable before it"
            )
        encodings = count_encodings(cat_cols, normalize, out_cols)
        return self._record(
            CountEncode(
                [list(each.categories) for each in encodings],
                normalize,
                [name for each in encodings for name in each.outputs.values()],
            )
        )

    # -- arrays --------------------------------------------------------------------------------

    def mask(self, mask_cols: str | list[str], seq_len: int = 100) -> Self:
        """Add masks of arrays; see :meth:`FeatureTable.mask`."""
        return self._record(Mask(as_names(mask_cols, "mask_cols"), seq_len))

    def pad(
        self,
        cols: str | list[str],
        seq_len: int = 100,
        mask_cols: str | list[str] | None = None,
        mask_token: float | str = 0,
        row_len: int = 0,
    ) -> Self:
        """Bring arrays to one length; see :meth:`FeatureTable.pad`."""
        masked = self if mask_cols is None else self.mask(mask_cols, seq_len)
        return masked._record(Pad(as_names(cols, "cols"), seq_len, mask_token, row_len))

    # -- rows: on tables of Spark only ---------------------------------------------------------

    def filter(self, condition: str) -> Self:
        """The rows for which an expression of SQL holds; on tables of Spark only."""
        return self._on_table("filter", condition=check_string(condition, "condition"))

    def dropna(
        self, columns: str | list[str] | None, how: str = "any", thresh: int | None = None
    ) -> Self:
        """Leave out rows with nulls; see :meth:`FeatureTable.dropna`; on tables of Spark only."""
        chosen = None if columns is None else as_names(columns)
        return self._on_table("dropna", columns=chosen, how=how, thresh=thresh)

    def add_hist_seq(
        self,
        cols: str | list[str],
        user_col: str,
        sort_col: str = "time",
        min_len: int = 1,
        max_len: int = 100,
        num_seqs: int = 2147483647,
    ) -> Self:
        """Add histories; see :meth:`FeatureTable.add_hist_seq`; on tables and files."""
        return self._on_table(
            "add_hist_seq",
            cols=as_names(cols, "cols"),
            user_col=user_col,
            sort_col=sort_col,
            min_len=min_len,
            max_len=max_len,
            num_seqs=num_seqs,
        )

    def add_neg_hist_seq(
        self, item_size: int, item_history_col: str, neg_num: int, seed: int | None = None
    ) -> Self:
        """Add random items for histories; see :meth:`FeatureTable.add_neg_hist_seq`.

        On tables of Spark only.
        """
        return self._on_table(
            "add_neg_hist_seq",
            item_size=item_size,
            item_history_col=item_history_col,
            neg_num=neg_num,
            seed=names.random_seed(seed),
        )

    def add_negative_samples(
        self,
        item_size: int,
        item_col: str = "item",
        label_col: str = "label",
        neg_num: int = 1,
        seed: int | None = None,
        exclude_history_col: str | None = None,
        user_col: str | None = None,
        popularity: float | None = None,
    ) -> Self:
        """Add records with random items; see :meth:`FeatureTable.add_negative_samples`.

        On tables of Spark only.  What users have and how popular items are is that of the table
        which is transformed; nothing is learned.
        """
        return self._on_table(
            "add_negative_samples",
            item_size=item_size,
            item_col=item_col,
            label_col=label_col,
            neg_num=neg_num,
            seed=names.random_seed(seed),
            exclude_history_col=exclude_history_col,
            user_col=user_col,
            popularity=popularity,
        )

    def _on_table(self, method: str, **given: Any) -> Self:
        return self._record(STEPS[method](given))
