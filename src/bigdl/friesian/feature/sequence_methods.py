"""Methods of feature tables for histories, negative samples and arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.base import Table
from bigdl.friesian.feature.operators import lookup, negatives, sequences
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_different,
    check_string,
    col,
    is_numeric,
    replace,
    require_columns,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SequenceMethods"]


class SequenceMethods:
    """What users did before, what they did not choose, and arrays of equal length."""

    def add_hist_seq(
        self,
        cols: str | list[str],
        user_col: str,
        sort_col: str = "time",
        min_len: int = 1,
        max_len: int = 100,
        num_seqs: int = 2147483647,
    ) -> Self:
        """Add to each record what the same user did before.

        Parameters
        ----------
        cols : str or list of str
            Columns of any type.
        user_col : str
        sort_col : str, default "time"
            The order of the records of a user; equal ones keep the order of the table.  A null
            makes the job fail.
        min_len : int, default 1
            Leave out records with a shorter history, so that by default the first record of every
            user is left out.
        max_len : int, default 100
            Keep so many records before the current one.
        num_seqs : int, default 2147483647
            Keep only the last so many records of each user.

        Returns
        -------
        FeatureTable
            With ``<col>_hist_seq`` behind each of `cols`: arrays, the oldest value first.
        """
        df = sequences.add_hist_seq(self.df, cols, user_col, sort_col, min_len, max_len, num_seqs)
        return self._clone(df)

    def add_neg_hist_seq(
        self, item_size: int, item_history_col: str, neg_num: int, seed: int | None = None
    ) -> Self:
        """Add random items for each item of a history.

        Parameters
        ----------
        item_size : int
            The largest item number plus 1.  Items are drawn from 1 to ``item_size - 1``.
        item_history_col : str
            A column of arrays of item numbers.
        neg_num : int
            How many items for each one, all different from it.
        seed : int, optional
            The same seed gives the same items to the same rows at the same places.

        Returns
        -------
        FeatureTable
            With ``neg_<item_history_col>``: arrays of arrays.
        """
        df = negatives.add_neg_hist_seq(self.df, item_size, item_history_col, neg_num, seed)
        return self._clone(df)

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
        """Before each record put copies of it with other, random items.

        Parameters
        ----------
        item_size : int
            The largest item number plus 1, which is ``StringIndex.size() + 1``.  Items are drawn
            from 1 to ``item_size - 1``.
        item_col : str, default "item"
        label_col : str, default "label"
            It is 0 in the copies and 1 in the records.
        neg_num : int, default 1
            Copies of each record.
        seed : int, optional
            The same seed gives the same items to the same rows at the same places.
        exclude_history_col : str, optional
            A column of arrays of items that must not be drawn for the record either.  A record
            for which no other item is left has no copies.
        user_col : str, optional
            Items that this user has anywhere in the table are not drawn for her records either.
        popularity : float, optional
            Draw items that occur in the table, in proportion to their counts to this power: 1 as
            often as they occur, 0.75 as word2vec does, 0 all as often.  Default: draw any item
            number, all as often.

        Returns
        -------
        FeatureTable
        """
        df = negatives.add_negative_samples(
            self.df,
            item_size,
            item_col,
            label_col,
            neg_num,
            seed,
            exclude_history_col,
            user_col,
            popularity,
        )
        return self._clone(df)

    def add_value_features(
        self, columns: str | list[str], dict_tbl: Table, key: str, value: str
    ) -> Self:
        """Look up what a table says about the values of columns.

        Parameters
        ----------
        columns : str or list of str
            Columns of values, of arrays, or of arrays of arrays.
        dict_tbl : Table
            Its columns `key` and `value`; if it has not both of them, the first two.
        key, value : str
            The result is called as the column with `key` replaced by `value`: ``item_hist_seq``
            becomes ``category_hist_seq``.  A column that keeps its name is replaced.

        Returns
        -------
        FeatureTable
            Values without an entry, and nulls, become 0, or null if the entries are no numbers.
        """
        names = as_names(columns)
        require_columns(self.df, names)
        if not isinstance(dict_tbl, Table):
            raise UsageError(f"dict_tbl should be a Table, but got {type(dict_tbl).__name__}")
        check_string(key, "key")
        check_string(value, "value")
        known = dict_tbl.columns
        if len(known) < 2:
            raise UsageError(f"dict_tbl should have 2 columns, but its columns are {known}")
        source = (key, value) if key in known and value in known and key != value else known[:2]
        dictionary = lookup.Dictionary(dict_tbl.df, *source)
        default = 0 if is_numeric(dictionary.value_type) else None
        outputs = {name: name.replace(key, value) for name in names}
        check_different(list(outputs.values()), "The names of the results")
        df, hidden = self.df, {}
        for i, (name, output) in enumerate(outputs.items()):
            hidden[output] = temporary(df, f"found{i}")  # the output may be another of the columns
            df = lookup.value_features(df, name, hidden[output], dictionary, default)
        found = {output: col(other) for output, other in hidden.items()}
        return self._clone(replace(df, found).drop(*hidden.values()))

    def mask(self, mask_cols: str | list[str], seq_len: int = 100) -> Self:
        """Add ``<column>_mask``: 1 for each value that an array has, then 0, up to `seq_len`."""
        return self._clone(sequences.mask(self.df, mask_cols, seq_len))

    def pad(
        self,
        cols: str | list[str],
        seq_len: int = 100,
        mask_cols: str | list[str] | None = None,
        mask_token: float | str = 0,
        row_len: int = 0,
    ) -> Self:
        """Bring arrays to one length.

        Parameters
        ----------
        cols : str or list of str
            Columns of arrays, or of arrays of arrays, of which the outer ones are padded.
        seq_len : int, default 100
            Shorter arrays are filled up at their end; of longer ones the last values are kept.  A
            null counts as an empty array.
        mask_cols : str or list of str, optional
            Columns that get a :meth:`mask`, of their length before.
        mask_token : number or str, default 0
            What is filled in; for arrays of arrays rows of it, as wide as the first row.
        row_len : int, default 0
            How wide such rows are in an array that has no first row.

        Returns
        -------
        FeatureTable
        """
        df = self.df if mask_cols is None else sequences.mask(self.df, mask_cols, seq_len)
        return self._clone(sequences.pad(df, cols, seq_len, mask_token, row_len))

    def sample_listwise(
        self,
        columns: str | list[str],
        num_sampled_list: int,
        num_sampled_item: int,
        random_seed: int | None = None,
        replace: bool = True,
    ) -> Self:
        """Several random parts of each list.

        Parameters
        ----------
        columns : str or list of str
            Columns of arrays that have the same length in every row, or the job fails.
        num_sampled_list : int
            How many parts of each row, each of which becomes a row.
        num_sampled_item : int
            How many different places of the arrays are in a part, the same ones in all columns.
            Rows with shorter arrays are left out.
        random_seed : int, optional
            The same seed gives the same places to the same rows at the same places.
        replace : bool, default True
            Put the parts in the place of the arrays, otherwise into ``sampled_<column>``.
        """
        df = sequences.sample_listwise(
            self.df, columns, num_sampled_list, num_sampled_item, random_seed, replace
        )
        return self._clone(df)

    def difference_lag(
        self,
        columns: str | list[str],
        sort_cols: str | list[str],
        shifts: int | Sequence[int] = 1,
        partition_cols: str | list[str] | None = None,
        out_cols: Any = None,
    ) -> Self:
        """Add how much numbers differ from those of an earlier row.

        Parameters
        ----------
        columns : str or list of str
        sort_cols : str or list of str
            The order of the rows; equal ones keep the order of the table.
        shifts : int or list of int, default 1
            How many rows earlier; later ones if negative.
        partition_cols : str or list of str, optional
            The order is that of the rows with the same values here.  Without them a single task
            has to sort the whole table.
        out_cols : str, list of str, or list of lists of str, optional
            For each column a name for each shift; default
            ``<sort columns joined by _>_diff_lag_<column>_<shift>``.

        Returns
        -------
        FeatureTable
            With columns of the same types; null where either value is missing.
        """
        df = sequences.difference_lag(self.df, columns, sort_cols, shifts, partition_cols, out_cols)
        return self._clone(df)
