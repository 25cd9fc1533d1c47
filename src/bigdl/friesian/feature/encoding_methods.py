"""Methods of feature tables that turn values into numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.base import Table
from bigdl.friesian.feature.operators import bins as binning
from bigdl.friesian.feature.operators import hashing, lookup, vocabulary
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_count,
    check_string,
    require_columns,
    type_of,
)
from bigdl.friesian.feature.string_index import StringIndex

__all__ = ["EncodingMethods"]


class EncodingMethods:
    """Vocabularies, hashes, indicators and bins."""

    # -- vocabularies --------------------------------------------------------------------------

    def gen_string_idx(
        self,
        columns: str | Mapping | list,
        freq_limit: int | Mapping[str, int] | None = None,
        order_by_freq: bool = False,
        do_split: bool = False,
        sep: str = ",",
    ) -> StringIndex | list[StringIndex]:
        """Learn the vocabularies of columns, all by one pass over the data.

        Numbers begin with 1, so that 0 is free for unknown values, and depend on nothing but the
        data: they follow the order of the values, or of the counts.  Nulls and NaN have none.

        Parameters
        ----------
        columns : str, dict or list of them
            A dict ``{"src_cols": [...], "col_name": ...}`` means one vocabulary of several columns,
            whose name is by default that of the first with ``_union``.
        freq_limit : int or dict of str to int, optional
            Values that occur less often are left out; a dict has the limits of some vocabularies.
        order_by_freq : bool, default False
            Number the values by falling count, equal counts by value.
        do_split : bool, default False
            Cells hold several values.
        sep : str, default ","
            Regular expression between them.

        Returns
        -------
        StringIndex or list of StringIndex
            A list if `columns` is one.  The numbers are in the column ``id``, or ``id_number`` if
            the values are in one called ``id``.
        """
        several = isinstance(columns, list | tuple)
        if several and not columns:
            raise UsageError("columns should be str, dict or a list of them, but got None.")
        sources = vocabulary.sources_of(columns if several else [columns], freq_limit)
        separator = check_string(sep, "sep") if do_split else None
        frames = vocabulary.learn(self.df, sources, order_by_freq, separator)
        indices = [
            StringIndex(frame, source.name) for frame, source in zip(frames, sources, strict=True)
        ]
        return indices if several else indices[0]

    def encode_string(
        self,
        columns: str | list[str],
        indices: StringIndex | Mapping[str, int] | list,
        broadcast: bool = True,
        do_split: bool = False,
        sep: str = ",",
        sort_for_array: bool = False,
        keep_most_frequent: bool = False,
        oov_buckets: int = 0,
    ) -> Self:
        """Replace the values of columns by their numbers, in the place of the columns.

        Parameters
        ----------
        columns : str or list of str
        indices : StringIndex, dict of str to int, or list of them
            One for each column.  Of equal values in an index the smallest number counts.
        broadcast : bool, default True
            Send the vocabulary to all executors, unless it has more than a million values.  Then,
            and without it, Spark chooses the kind of join.
        do_split : bool, default False
            Cells hold several values: they become arrays of the numbers of those that are known.
        sep : str, default ","
            Regular expression between them.
        sort_for_array : bool, default False
            Order the numbers of an array; otherwise they follow the values.
        keep_most_frequent : bool, default False
            Of an array only the smallest number, that of the most frequent value if the vocabulary
            is ordered by frequency.
        oov_buckets : int, default 0
            So many numbers behind the largest one are given to values that are not in the
            vocabulary, by their hash; not with `do_split`.

        Returns
        -------
        FeatureTable
            Nulls for what is not in the vocabulary, and for cells without any known value.
        """
        check_count(oov_buckets, "oov_buckets", 0)
        if oov_buckets and do_split:
            raise UsageError("oov_buckets cannot be used with do_split; leave one of them out")
        names = as_names(columns)
        require_columns(self.df, names)
        given = list(indices) if isinstance(indices, list | tuple) else [indices]
        if len(given) != len(names):
            raise UsageError(
                "columns and indices should have the same length, but got "
                f"{len(names)} and {len(given)}"
            )
        for name in names:
            lookup.check_single(name, type_of(self.df, name))
        dictionaries = {
            name: _dictionary(index, name) for name, index in zip(names, given, strict=True)
        }
        if not do_split:
            return self._clone(lookup.encode(self.df, dictionaries, broadcast, oov_buckets))
        return self._clone(
            lookup.encode_tokens(
                self.df,
                dictionaries,
                check_string(sep, "sep"),
                broadcast,
                sort_for_array,
                keep_most_frequent,
            )
        )

    def category_encode(
        self,
        columns: str | list[str],
        freq_limit: int | Mapping[str, int] | None = None,
        order_by_freq: bool = False,
        do_split: bool = False,
        sep: str = ",",
        sort_for_array: bool = False,
        keep_most_frequent: bool = False,
        broadcast: bool = True,
    ) -> tuple[Self, StringIndex | list[StringIndex]]:
        """:meth:`gen_string_idx` and :meth:`encode_string` in one.

        Returns
        -------
        (FeatureTable, StringIndex or list of StringIndex)
            A list if `columns` is one.
        """
        indices = self.gen_string_idx(columns, freq_limit, order_by_freq, do_split, sep)
        encoded = self.encode_string(
            columns, indices, broadcast, do_split, sep, sort_for_array, keep_most_frequent
        )
        return encoded, indices

    def joint_encode(
        self,
        columns: str | list[str],
        freq_limit: int | None = None,
        order_by_freq: bool = False,
        name: str | None = None,
        index: StringIndex | None = None,
    ) -> tuple[Self, StringIndex]:
        """Replace the values of several columns by numbers of one vocabulary.

        Parameters
        ----------
        columns : str or list of str
            Such as a user and a friend of hers.
        freq_limit, order_by_freq
            As in :meth:`gen_string_idx`; the counts of all columns are added.
        name : str, optional
            Of the vocabulary; default: that of the first column with ``_union``.
        index : StringIndex, optional
            The vocabulary that this method returned for other data.

        Returns
        -------
        (FeatureTable, StringIndex)
            Nulls for what is not in the vocabulary.
        """
        names = as_names(columns)
        require_columns(self.df, names)
        if index is None:
            source = {"src_cols": names, "col_name": name}
            index = self.gen_string_idx([source], freq_limit, order_by_freq)[0]
        elif not isinstance(index, StringIndex):
            raise UsageError(f"index should be a StringIndex, but got {type(index).__name__}")
        dictionary = index.dictionary_of(index.col_name)
        return self._clone(lookup.encode(self.df, dict.fromkeys(names, dictionary), True)), index

    def get_vocabularies(self, columns: str | list[str]) -> dict[str, list]:
        """The different values of columns, in their order; a null comes last.

        Returns
        -------
        dict of str to list
        """
        return vocabulary.distinct_values(self.df, as_names(columns))

    def gen_reindex_mapping(
        self, columns: str | Sequence[str] = (), freq_limit: int | Mapping[str, int] | None = 10
    ) -> list[Any]:
        """Number the values of columns by falling count, all by one pass over the data.

        Parameters
        ----------
        columns : str or list of str
        freq_limit : int or dict of str to int, default 10
            Values that occur less often are left out; a dict has the limit of every column.

        Returns
        -------
        list of FeatureTable
            For each column its values and, as ``<column>_new``, their numbers from 1 on.
        """
        names = as_names(columns)
        if isinstance(freq_limit, Mapping) and set(names) - set(freq_limit):
            raise UsageError(
                f"freq_limit should have a limit for each of {names}, but got {dict(freq_limit)!r}"
            )
        sources = vocabulary.sources_of(names, freq_limit)
        frames = vocabulary.learn(self.df, sources, True, None, "{}_new".format)
        return [self._clone(frame) for frame in frames]

    def reindex(self, columns: str | Sequence[str] = (), index_tbls: Any = ()) -> Self:
        """Replace values by what :meth:`gen_reindex_mapping` found, unknown ones by 0.

        Parameters
        ----------
        columns : str or list of str
        index_tbls : Table or list of Table
            One for each column.
        """
        names = as_names(columns)
        tables = list(index_tbls) if isinstance(index_tbls, list | tuple) else [index_tbls]
        if len(names) != len(tables):
            raise UsageError(
                "columns and index_tbls should have the same length, but got "
                f"{len(names)} and {len(tables)}"
            )
        table = self
        for name, each in zip(names, tables, strict=True):
            table = table.add_value_features(name, each, name, name)
        return table

    def filter_by_frequency(
        self, columns: str | list[str], min_freq: int = 2, keep_rows: bool = False
    ) -> Self:
        """The values that occur often enough.

        Parameters
        ----------
        columns : str or list of str
        min_freq : int, default 2
            How often the values of `columns` have to occur together.
        keep_rows : bool, default False
            Return all columns of all rows with such values, instead of the different values only.
        """
        from bigdl.friesian.feature.operators import rows

        return self._clone(rows.filter_by_frequency(self.df, columns, min_freq, keep_rows))

    # -- hashes --------------------------------------------------------------------------------

    def hash_encode(self, columns: str | list[str], bins: int, method: str = "md5") -> Self:
        """Replace values by the digest of their text modulo `bins`.

        Parameters
        ----------
        columns : str or list of str
        bins : int
        method : str, default "md5"
            The name of a hash function of ``hashlib``; the result is ``int(digest, 16) % bins`` of
            the text that Python has for a value, which is ``"None"`` for a null.  ``"xxhash64"`` is
            several times faster and leaves nulls alone in the bin of their own hash.

        Returns
        -------
        FeatureTable
            Columns of int.
        """
        return self._clone(hashing.hash_encode(self.df, columns, bins, method))

    def cross_hash_encode(
        self,
        cross_columns: list,
        bin_sizes: int | list[int],
        cross_col_names: list[str | None] | str | None = None,
        method: str = "md5",
        sep: str = "",
    ) -> Self:
        """New columns with the hash of several columns written one behind the other.

        Parameters
        ----------
        cross_columns : list of list of str
            A flat list is one cross.
        bin_sizes : list of int
            The bins of each cross.
        cross_col_names : list of str, optional
            Default: the names of the columns with ``_`` between them.
        method : str, default "md5"
            As in :meth:`hash_encode`.
        sep : str, default ""
            What stands between the values.  Without anything ("a", "bc") is equal to ("ab", "c"),
            as it was in BigDL 2.x.

        Returns
        -------
        FeatureTable
        """
        crosses = hashing.crosses_of(cross_columns, bin_sizes, cross_col_names)
        return self._clone(hashing.cross_hash_encode(self.df, crosses, method, sep))

    cross_columns = cross_hash_encode

    # -- indicators and bins -------------------------------------------------------------------

    def one_hot_encode(
        self,
        columns: str | list[str],
        sizes: int | list[int] | None = None,
        prefix: str | list[str] | None = None,
        keep_original_columns: bool = False,
    ) -> Self:
        """Columns of 0 and 1 in the place of columns of whole numbers.

        Parameters
        ----------
        columns : str or list of str
        sizes : int or list of int, optional
            How many indicators each column gets; default: its largest value plus 1.  A null or a
            value outside has no indicator that is 1.
        prefix : str or list of str, optional
            The indicators are ``<prefix>_0`` and so on, which must not be there yet; default: the
            names of the columns.
        keep_original_columns : bool, default False
        """
        found = binning.one_hot_sizes(self.df, columns, sizes)
        encoded = binning.one_hot_encode(self.df, found, prefix, keep_original_columns)
        return self._clone(encoded)

    def cut_bins(
        self,
        columns: str | list[str],
        bins: int | list | Mapping,
        labels: list[str] | Mapping | None = None,
        out_cols: str | list[str] | None = None,
        drop: bool = True,
    ) -> Self:
        """Put numbers into bins.

        Parameters
        ----------
        columns : str or list of str
        bins : int, list of numbers, or dict of str to one of them
            A list of n ascending edges makes the bins 0 (below the first edge) to n (from the last
            edge on).  An int makes so many equal parts from the smallest to the largest value: they
            are the bins from 1 on, below them is 0, and the largest value and what is above it form
            the last one.
        labels : list of str, or dict of str to them, optional
            Names of the bins, one more than there are edges.
        out_cols : str or list of str, optional
            Default: ``<column>_bin``.  The name of the column itself replaces it in its place.
        drop : bool, default True
            Leave out the original columns.

        Returns
        -------
        FeatureTable
            A null or NaN is in the bin n + 1, and has the label null.
        """
        edges = binning.bin_edges(self.df, columns, bins)
        return self._clone(binning.cut_bins(self.df, edges, labels, out_cols, drop))

    def quantile_edges(self, columns: str | list[str], parts: int) -> dict[str, list[float]]:
        """Edges that cut columns into bins of about as many rows each, for :meth:`cut_bins`.

        Parameters
        ----------
        columns : str or list of str
            Columns of numbers; nulls and NaN are not counted.
        parts : int
            How many bins.  Equal edges of a frequent value are one, so that there can be fewer.

        Returns
        -------
        dict of str to list of float
            At most ``parts - 1`` ascending edges for each column, exact to a thousandth of the
            rows.  One job finds all of them.
        """
        return binning.quantile_edges(self.df, columns, parts)


def _dictionary(index: Any, name: str) -> lookup.Dictionary:
    if isinstance(index, Mapping):
        index = StringIndex.from_dict(dict(index), name)
    if not isinstance(index, Table):
        raise UsageError(f"indices should be StringIndex or dict, or a list of them, got {index!r}")
    number = vocabulary.number_column(name)
    if name not in index.df.columns or number not in index.df.columns:
        raise UsageError(
            f"The index for the column {name} should have a column of this name and {number}, but "
            f"its columns are {index.df.columns}; rename them"
        )
    if not isinstance(index, StringIndex):
        index = StringIndex(index.df, name)
    return index.dictionary_of(name)
