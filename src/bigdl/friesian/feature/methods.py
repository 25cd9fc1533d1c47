"""Methods that tables and pipelines share: a table runs an operator, a pipeline records it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.ops.cells import Cast, Drop, DropNa, FillMedian, FillNa, Rename
from bigdl.friesian.ops.hashing import CrossColumns, HashEncode
from bigdl.friesian.ops.numbers import Clip, CutBins, Log, OneHotEncode
from bigdl.friesian.ops.sequences import (
    AddHistSeq,
    AddNegativeSamples,
    AddNegHistSeq,
    Mask,
    PadSequences,
)
from bigdl.friesian.ops.spark import as_list, as_names, random_seed

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

    from bigdl.friesian.ops.operator import Operator


@hide_frames
class CellMethods(ABC):
    """Methods that change cells or columns."""

    @abstractmethod
    def with_operator(self, operator: Operator) -> Self:
        """Apply an operator to a table, or append it to a pipeline; return the result.

        Parameters
        ----------
        operator : Operator
            May come from another package; see :mod:`bigdl.friesian.operators`.
        """

    def fillna(self, value: float | str | bool, columns: str | list[str] | None) -> Self:
        """Replace nulls with a value; NaN values stay unchanged.

        Parameters
        ----------
        value : int, float, str or bool
            Cast to the type of each column.
        columns : str, list of str or None
            None for every column that can hold the value: numeric, string or boolean columns. With
            a 32-bit int, None means the columns of type int only, as in BigDL 2.x.

        Returns
        -------
        Table

        Raises
        ------
        UsageError
            If a column does not exist, or its type cannot hold the value.
        """
        return self.with_operator(FillNa(value, None if columns is None else as_names(columns)))

    def fill_median(self, columns: str | list[str] | None = None) -> Self:
        """Replace nulls by the median of the column, truncated for integer columns.

        The rank of a median is exact to a thousandth of the rows.

        Raises
        ------
        UsageError
            If a column has only nulls.
        """
        return self.with_operator(FillMedian(None if columns is None else as_names(columns)))

    def dropna(
        self, columns: str | list[str] | None, how: str = "any", thresh: int | None = None
    ) -> Self:
        """Remove rows with nulls (or NaN).

        Parameters
        ----------
        columns : str, list of str or None
            Columns to check; None for all columns.
        how : {"any", "all"}
            Remove a row if any of the columns is null, or only if all are.
        thresh : int, optional
            Keep rows with at least `thresh` non-null values, whatever `how` says.
        """
        return self.with_operator(
            DropNa(None if columns is None else as_names(columns), how, thresh)
        )

    def clip(
        self,
        columns: str | list[str] | None = None,
        min: float | None = None,
        max: float | None = None,
    ) -> Self:
        """Clip numbers to bounds, which are first cast to the type of the column.

        Parameters
        ----------
        columns : str or list of str
        min, max : number, optional
            At least one of them. Nulls and NaN stay.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"age": [-1, 40, 200]}))
        >>> table.clip("age", min=0, max=120).to_list("age")
        [0, 40, 120]
        """
        return self.with_operator(Clip(as_names(columns), min, max))

    def log(self, columns: str | list[str] | None = None, clipping: bool = True) -> Self:
        """Take natural logarithms; the columns become double.

        Parameters
        ----------
        columns : str or list of str
        clipping : bool, default True
            True computes ``log(x + 1)``, and 0 for negative x. False computes ``log(x)``, which is
            null unless x is positive.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"count": [0, 1, -5]}))
        >>> [round(value, 3) for value in table.log("count").to_list("count")]
        [0.0, 0.693, 0.0]
        """
        return self.with_operator(Log(as_names(columns), clipping))

    def cast(self, columns: str | list[str] | None, dtype: str | DataType) -> Self:
        """Cast columns to a type; values that cannot be converted become null.

        Parameters
        ----------
        columns : str, list of str or None
            None for all columns.
        dtype : str or DataType of Spark
            One of string, str, boolean, bool, int, integer, long, short, float, double. Pipelines
            accept names only, and do not cast fractional numbers to strings, because Spark and
            Python format them differently.
        """
        return self.with_operator(Cast(None if columns is None else as_names(columns), dtype))

    def drop(self, *cols: str | list[str]) -> Self:
        """Drop columns; skip names that do not exist."""
        return self.with_operator(Drop(as_names(as_list(cols))))

    def rename(self, columns: dict[str, str]) -> Self:
        """Rename columns.

        Parameters
        ----------
        columns : dict of str to str
            Old to new names. All columns are renamed at once; old names that do not exist are
            skipped.
        """
        if not isinstance(columns, dict) or not all(isinstance(e, str) for e in columns.values()):
            raise UsageError(
                "columns should be a dictionary of {'old_name1': 'new_name1', 'old_name2': "
                f"'new_name2'}}, but got {columns!r}",
                code="argument-type",
                argument="columns",
            )
        return self.with_operator(Rename(dict(columns)))


@hide_frames
class FeatureMethods(CellMethods):
    """Methods that feature tables and pipelines share."""

    # -- hashes --------------------------------------------------------------------------------

    def hash_encode(self, columns: str | list[str], bins: int, method: str = "md5") -> Self:
        """Replace values by the digest of their string representation, modulo `bins`.

        Parameters
        ----------
        columns : str or list of str
        bins : int
        method : str, default "md5"
            Name of a hash function of ``hashlib``. The result is ``int(digest, 16) % bins`` of
            ``str(value)`` in Python, which is ``"None"`` for null. ``"xxhash64"`` is several times
            faster. It hashes the string of Spark, which is ``"true"`` for True, and puts all nulls
            into one bin.

        Returns
        -------
        FeatureTable or FeaturePipeline
            With int columns.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"user": ["u1", "u2", "u1"]}))
        >>> first, second, again = table.hash_encode("user", bins=1000).to_list("user")
        >>> first == again, 0 <= second < 1000
        (True, True)
        """
        return self.with_operator(HashEncode(as_names(columns), bins, method))

    def cross_hash_encode(
        self,
        cross_columns: list,
        bin_sizes: int | list[int],
        cross_col_names: list[str | None] | str | None = None,
        method: str = "md5",
        sep: str = "",
    ) -> Self:
        """Add columns that hash the joined strings of several columns into bins.

        Parameters
        ----------
        cross_columns : list of list of str
            A flat list is one cross.
        bin_sizes : list of int
            Number of bins of each cross.
        cross_col_names : list of str, optional
            Output names. Default: the column names joined by ``_``.
        method : str, default "md5"
            As in :meth:`hash_encode`.
        sep : str, default ""
            Separator between the values. With the empty default, ("a", "bc") equals ("ab", "c"), as
            in BigDL 2.x.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> views = pd.DataFrame({"user": ["u1", "u1"], "city": ["Oslo", "Rome"]})
        >>> table = FeatureTable.from_pandas(views)
        >>> oslo, rome = table.cross_hash_encode(["user", "city"], 1000).to_list("user_city")
        >>> oslo == rome, max(oslo, rome) < 1000
        (False, True)
        """
        return self.with_operator(
            CrossColumns.of(cross_columns, bin_sizes, cross_col_names, method, sep)
        )

    cross_columns = cross_hash_encode

    # -- indicators and bins -------------------------------------------------------------------

    def one_hot_encode(
        self,
        columns: str | list[str],
        sizes: int | list[int] | None = None,
        prefix: str | list[str] | None = None,
        keep_original_columns: bool = False,
    ) -> Self:
        """Replace integer columns by 0/1 indicator columns at the same position.

        Parameters
        ----------
        columns : str or list of str
        sizes : int or list of int, optional
            Number of indicators per column. Default: the largest value plus 1; in a pipeline, the
            number of categories if an earlier step encoded the column. Null and out-of-range values
            have no indicator that is 1.
        prefix : str or list of str, optional
            The indicators are named ``<prefix>_0`` and so on; these names must be unused. Default:
            the column names.
        keep_original_columns : bool, default False

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"size": [0, 2]}))
        >>> table.one_hot_encode("size", sizes=3).to_dict()
        {'size_0': [1, 0], 'size_1': [0, 0], 'size_2': [0, 1]}
        """
        names = as_names(columns)
        wanted = None if sizes is None else as_list([sizes])
        prefixes = names if prefix is None else as_names(prefix, "prefix")
        return self.with_operator(OneHotEncode(names, wanted, prefixes, keep_original_columns))

    def cut_bins(
        self,
        columns: str | list[str],
        bins: int | list | Mapping,
        labels: list[str] | Mapping | None = None,
        out_cols: str | list[str] | None = None,
        drop: bool = True,
    ) -> Self:
        """Assign numbers to bins.

        Parameters
        ----------
        columns : str or list of str
        bins : int, list of numbers, or dict of str to one of them
            A list of n ascending edges gives the bins 0 (below the first edge) to n (from the last
            edge). An int gives that number of equal-width bins from the smallest to the largest
            value, numbered from 1. Bin 0 holds smaller values; the last bin holds the largest value
            and above.
        labels : list of str, or dict of str to them, optional
            Bin labels, one more than there are edges.
        out_cols : str or list of str, optional
            Output names. Default: ``<column>_bin``. The name of the column itself replaces it in
            place.
        drop : bool, default True
            Drop the original columns.

        Returns
        -------
        FeatureTable or FeaturePipeline
            Null and NaN are in bin n + 1, whose label is null.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"age": [7, 18, 70]}))
        >>> table.cut_bins("age", [18, 65], labels=["child", "adult", "senior"]).to_list("age_bin")
        ['child', 'adult', 'senior']
        """
        return self.with_operator(CutBins.of(columns, bins, labels, out_cols, drop=drop))

    # -- arrays --------------------------------------------------------------------------------

    def mask(self, mask_cols: str | list[str], seq_len: int = 100) -> Self:
        """Add ``<column>_mask`` of length `seq_len`: 1 for each value of the array, then 0."""
        return self.with_operator(Mask(as_names(mask_cols, "mask_cols"), seq_len))

    def pad(
        self,
        cols: str | list[str],
        seq_len: int = 100,
        mask_cols: str | list[str] | None = None,
        mask_token: float | str = 0,
        row_len: int = 0,
    ) -> Self:
        """Pad or truncate arrays to one length.

        Parameters
        ----------
        cols : str or list of str
            Columns of arrays, or of arrays of arrays, of which the outer ones are padded.
        seq_len : int, default 100
            Shorter arrays are padded at the end. Longer arrays keep their last values. Null counts
            as an empty array.
        mask_cols : str or list of str, optional
            Columns that get a :meth:`mask` of their length before padding.
        mask_token : number or str, default 0
            Padding value. Arrays of arrays are padded with rows of it, as wide as the first row.
        row_len : int, default 0
            Width of padding rows in an array that has no first row.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"items": [[7, 8], [1, 2, 3, 4]]}))
        >>> table.pad("items", seq_len=3, mask_cols="items").to_dict()
        {'items': [[7, 8, 0], [2, 3, 4]], 'items_mask': [[1, 1, 0], [1, 1, 1]]}
        """
        masked = self if mask_cols is None else self.mask(mask_cols, seq_len)
        return masked.with_operator(
            PadSequences(as_names(cols, "cols"), seq_len, mask_token, row_len)
        )

    # -- histories and negatives ---------------------------------------------------------------

    def add_hist_seq(
        self,
        cols: str | list[str],
        user_col: str,
        sort_col: str = "time",
        min_len: int = 1,
        max_len: int = 100,
        num_seqs: int = 2147483647,
    ) -> Self:
        """Add columns with the user's earlier values of `cols` to each row.

        Parameters
        ----------
        cols : str or list of str
            Columns of any type.
        user_col : str
        sort_col : str, default "time"
            Order of the records of a user; equal times keep the order of the table. A null makes
            the job fail.
        min_len : int, default 1
            Minimum length of a history; records with a shorter one are left out. The default leaves
            out the first record of every user.
        max_len : int, default 100
            Maximum length of a history; the latest values are kept.
        num_seqs : int, default 2147483647
            Keep only the last `num_seqs` records of each user.

        Returns
        -------
        FeatureTable or FeaturePipeline
            With ``<col>_hist_seq`` after each of `cols`: arrays, oldest value first.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> views = pd.DataFrame({"user": [1, 1, 1], "item": [7, 8, 9], "time": [1, 2, 3]})
        >>> table = FeatureTable.from_pandas(views).add_hist_seq("item", "user").sort("time")
        >>> table.select("item", "item_hist_seq").to_dict()  # the first view has no history
        {'item': [8, 9], 'item_hist_seq': [[7], [7, 8]]}
        """
        names = as_names(cols, "cols")
        return self.with_operator(AddHistSeq(names, user_col, sort_col, min_len, max_len, num_seqs))

    def add_neg_hist_seq(
        self, item_size: int, item_history_col: str, neg_num: int, seed: int | None = None
    ) -> Self:
        """Add random negative items for each item of a history.

        Parameters
        ----------
        item_size : int
            Largest item id plus 1. Items are drawn from 1 to ``item_size - 1``.
        item_history_col : str
            Column of arrays of item ids.
        neg_num : int
            Number of negatives per item, all different from that item.
        seed : int, optional
            The same seed gives the same items for the same rows in the same partitions and order.

        Returns
        -------
        FeatureTable or FeaturePipeline
            With ``neg_<item_history_col>``: arrays of arrays.
        """
        return self.with_operator(
            AddNegHistSeq(item_size, item_history_col, neg_num, random_seed(seed))
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
        """Insert copies of each row, with random negative items, before the row.

        Parameters
        ----------
        item_size : int
            Largest item id plus 1, which is ``StringIndex.size() + 1``. Items are drawn from 1 to
            ``item_size - 1``.
        item_col : str, default "item"
        label_col : str, default "label"
            New column: 0 in the copies and 1 in the records.
        neg_num : int, default 1
            Number of copies of each record.
        seed : int, optional
            The same seed gives the same items for the same rows in the same partitions and order.
        exclude_history_col : str, optional
            Column of arrays of items that must not be drawn for the record. A record without a
            remaining item gets no copies.
        user_col : str, optional
            Do not draw items that this user has anywhere in the table.
        popularity : float, optional
            Draw items that occur in the table, in proportion to their counts to this power: 1 as
            often as they occur, 0.75 as word2vec does, 0 uniformly. Default: draw any item id
            uniformly.

        Notes
        -----
        In a pipeline, the users' items and the popularity are those of the table that is
        transformed; nothing is learned at ``fit``.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> views = FeatureTable.from_pandas(pd.DataFrame({"user": [1, 2], "item": [1, 2]}))
        >>> views.add_negative_samples(item_size=3, seed=1).to_dict()  # items are 1 and 2
        {'user': [1, 1, 2, 2], 'item': [2, 1, 1, 2], 'label': [0, 1, 0, 1]}
        """
        options = random_seed(seed), exclude_history_col, user_col, popularity
        return self.with_operator(
            AddNegativeSamples(item_size, item_col, label_col, neg_num, *options)
        )
