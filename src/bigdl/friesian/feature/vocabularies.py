"""Table methods that encode values with vocabularies and look-up tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.feature.learned import StringIndex, dictionary_of
from bigdl.friesian.feature.relations import Table, check_table
from bigdl.friesian.ops import column_types, spark, vocabulary
from bigdl.friesian.ops.column_types import require_columns
from bigdl.friesian.ops.spark import F, as_names, check_string, schema_of


@hide_frames
class VocabularyEncoders(Table):
    """Table methods that replace values by ids, or by values from another table."""

    def gen_string_idx(
        self,
        columns: str | Mapping | list,
        freq_limit: int | Mapping[str, int] | None = None,
        order_by_freq: bool = False,
        do_split: bool = False,
        sep: str = ",",
    ) -> StringIndex | list[StringIndex]:
        """Learn the vocabularies of columns in one pass over the data.

        Ids start at 1, so that 0 is free for unknown values. They depend only on the data: ids
        follow the order of the values, or of the counts. Nulls and NaN get no id.

        Parameters
        ----------
        columns : str, dict or list of them
            A dict ``{"src_cols": [...], "col_name": ...}`` means one vocabulary of several columns.
            Its default name is that of the first column with ``_union``.
        freq_limit : int or dict of str to int, optional
            Minimum count of a value. A dict has the limits of some vocabularies.
        order_by_freq : bool, default False
            Order ids by falling count, equal counts by value.
        do_split : bool, default False
            Split each string cell into several values. Array cells need no split.
        sep : str, default ","
            Regular expression that separates the values.

        Returns
        -------
        StringIndex or list of StringIndex
            A list if `columns` is one. The ids are in the column ``id``, or ``id_number`` if the
            value column is called ``id``.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> cities = pd.DataFrame({"city": ["Rome", "Oslo", "Rome", "Bern"]})
        >>> table = FeatureTable.from_pandas(cities)
        >>> index = table.gen_string_idx("city", order_by_freq=True)
        >>> sorted(index.to_dict().items(), key=lambda item: item[1])
        [('Rome', 1), ('Bern', 2), ('Oslo', 3)]
        >>> table.encode_string("city", index).to_list("city")
        [1, 3, 1, 2]
        """
        sources = vocabulary.sources_of(columns, freq_limit)
        separator = check_string(sep, "sep") if do_split else None
        learned = vocabulary.learn(self.df, sources, order_by_freq, separator)
        indices = [
            StringIndex(each, source.name) for each, source in zip(learned, sources, strict=True)
        ]
        return indices if isinstance(columns, list | tuple) else indices[0]

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
        """Replace the values of columns by the ids in `indices`.

        Parameters
        ----------
        columns : str or list of str
        indices : StringIndex, dict of str to int, or list of them
            One per column. If a value occurs twice in an index, the smallest id counts.
        broadcast : bool, default True
            Broadcast the vocabulary to all executors, unless it has more than a million values.
            Otherwise Spark chooses the join strategy.
        do_split : bool, default False
            Split each string cell into several values. The result is an array of the ids of known
            values.
        sep : str, default ","
            Regular expression that separates the values.
        sort_for_array : bool, default False
            Sort the ids of an array. By default they keep the order of the values.
        keep_most_frequent : bool, default False
            Keep only the smallest id of an array. It belongs to the most frequent value if the
            vocabulary is ordered by frequency.
        oov_buckets : int, default 0
            Number of extra ids, after the largest id, for values that are not in the vocabulary. A
            hash selects the id. It cannot be combined with `do_split`.

        Returns
        -------
        FeatureTable
            Null for values that are not in the vocabulary, and for cells without a known value.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"city": ["Rome", "Bern"]}))
        >>> index = {"Oslo": 1, "Rome": 2}
        >>> table.encode_string("city", index).to_list("city")
        [2, None]
        >>> table.encode_string("city", index, oov_buckets=1).to_list("city")
        [2, 3]
        """
        vocabulary.check_oov_buckets(oov_buckets, do_split)
        names = as_names(columns)
        chosen = spark.as_list([indices])
        spark.check_lengths("columns", names, "indices", chosen)
        message = (
            "The column {name} of type {dtype} cannot be encoded: its cells should be single "
            "values, arrays of them, or with do_split their text; explode it, or use "
            "add_value_features"
        )
        before = schema_of(self.df)
        column_types.check_types(before, names, vocabulary.is_atomic_or_list, message)
        lists = [name for name in names if column_types.is_array(before[name].kind)]
        if lists and (do_split or oov_buckets):
            raise UsageError(
                f"{'do_split' if do_split else 'oov_buckets'} cannot be used with {lists}, whose "
                "cells are arrays; leave it out",
                code="argument-conflict",
                columns=lists,
            )
        dictionaries = {
            name: dictionary_of(index, name) for name, index in zip(names, chosen, strict=True)
        }
        separator = check_string(sep, "sep") if do_split else None
        options = broadcast, separator, sort_for_array, keep_most_frequent, oov_buckets
        return self._clone(vocabulary.encode_cells(self.df, dictionaries, *options))

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
        """Learn and apply vocabularies: :meth:`gen_string_idx`, then :meth:`encode_string`.

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
        """Replace the values of several columns by the ids of one vocabulary.

        Parameters
        ----------
        columns : str or list of str
            Such as a user column and a friend column.
        freq_limit, order_by_freq
            As in :meth:`gen_string_idx`; the counts of all columns are added.
        name : str, optional
            Name of the vocabulary. Default: that of the first column with ``_union``.
        index : StringIndex, optional
            Vocabulary that this method returned for other data.

        Returns
        -------
        (FeatureTable, StringIndex)
            Null for values that are not in the vocabulary.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> pairs = pd.DataFrame({"user": ["u1", "u2"], "friend": ["u2", "u3"]})
        >>> table = FeatureTable.from_pandas(pairs)
        >>> encoded, index = table.joint_encode(["user", "friend"])
        >>> encoded.to_dict()  # u2 has the same id in both columns
        {'user': [1, 2], 'friend': [2, 3]}
        """
        names = as_names(columns)
        require_columns(self.columns, names)
        if index is None:
            source = {"src_cols": names, "col_name": name}
            indices = self.gen_string_idx([source], freq_limit, order_by_freq)
            index = cast("list[StringIndex]", indices)[0]
        elif not isinstance(index, StringIndex):
            raise UsageError(
                f"index should be a StringIndex, but got {type(index).__name__}",
                code="argument-type",
                argument="index",
            )
        dictionary = index.dictionary_of(index.col_name)
        return self._clone(
            vocabulary.encode(self.df, dict.fromkeys(names, dictionary), True)
        ), index

    def get_vocabularies(self, columns: str | list[str]) -> dict[str, list]:
        """Return the distinct values of each column, sorted, null last.

        Returns
        -------
        dict of str to list
        """
        return vocabulary.distinct_values(self.df, as_names(columns))

    def gen_reindex_mapping(
        self, columns: str | Sequence[str] = (), freq_limit: int | Mapping[str, int] | None = 10
    ) -> list[Any]:
        """Assign ids to the values of each column, most frequent first, in one pass over the data.

        Parameters
        ----------
        columns : str or list of str
        freq_limit : int or dict of str to int, default 10
            Minimum count of a value. A dict has the limit of every column.

        Returns
        -------
        list of FeatureTable
            For each column its values and, as ``<column>_new``, their ids from 1.
        """
        names = as_names(columns)
        if isinstance(freq_limit, Mapping) and set(names) - set(freq_limit):
            raise UsageError(
                f"freq_limit should have a limit for each of {names}, but got {dict(freq_limit)!r}",
                code="argument-value",
                argument="freq_limit",
            )
        sources = vocabulary.sources_of(names, freq_limit)
        learned = vocabulary.learn(self.df, sources, True, None)
        return [
            self._clone(each.toDF(name, f"{name}_new"))
            for name, each in zip(names, learned, strict=True)
        ]

    def reindex(
        self, columns: str | Sequence[str] = (), index_tbls: Table | Sequence[Table] = ()
    ) -> Self:
        """Replace values by ids from :meth:`gen_reindex_mapping`, and unknown values by 0.

        Nulls stay null.

        Parameters
        ----------
        columns : str or list of str
        index_tbls : Table or list of Table
            One per column.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"item": [700, 900, 900]}))
        >>> mappings = table.gen_reindex_mapping("item", freq_limit=2)
        >>> table.reindex("item", mappings).to_list("item")  # 700 occurs only once
        [0, 1, 1]
        """
        names = as_names(columns)
        tables = spark.as_list([index_tbls])
        spark.check_lengths("columns", names, "index_tbls", tables)
        table = self
        for name, each in zip(names, tables, strict=True):
            number = spark.unused_name(table.df, "number")
            with_ids = table.add_value_features(name, each, name, number).df
            known = F.when(F.col(name).isNotNull(), F.col(number))
            table = table._clone(with_ids.withColumn(name, known).drop(number))
        return table

    def add_value_features(
        self, columns: str | list[str], dict_tbl: Table, key: str, value: str
    ) -> Self:
        """Look up the values of columns in another table, and add the results as columns.

        Parameters
        ----------
        columns : str or list of str
            Columns of values, of arrays, or of arrays of arrays.
        dict_tbl : Table
            Table with the columns `key` and `value`. If it lacks one of them, its first two columns
            are used.
        key, value : str
            The result has the column's name with `key` replaced by `value`: ``item_hist_seq``
            becomes ``category_hist_seq``. A column whose name does not change is replaced.

        Returns
        -------
        FeatureTable
            Values without an entry, and nulls, become 0, or null if the entries are not numbers.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> histories = FeatureTable.from_pandas(pd.DataFrame({"item_hist_seq": [[1, 2], [2]]}))
        >>> items = FeatureTable.from_pandas(pd.DataFrame({"item": [1, 2], "category": [10, 20]}))
        >>> table = histories.add_value_features("item_hist_seq", items, "item", "category")
        >>> table.to_list("category_hist_seq")
        [[10, 20], [20]]
        """
        names = as_names(columns)
        require_columns(self.columns, names)
        check_table("dict_tbl", dict_tbl)
        check_string(key, "key")
        check_string(value, "value")
        known = dict_tbl.columns
        if len(known) < 2:
            raise UsageError(
                f"dict_tbl should have 2 columns, but its columns are {known}",
                code="data-schema",
                argument="dict_tbl",
                columns=known,
            )
        source = (key, value) if key in known and value in known and key != value else known[:2]
        dictionary = vocabulary.Dictionary(dict_tbl.df, *source)
        default = 0 if column_types.is_number(dictionary.value_type) else None
        outputs = {name: name.replace(key, value) for name in names}
        spark.check_different(list(outputs.values()), "The names of the results")
        return self._clone(vocabulary.value_features(self.df, outputs, dictionary, default))
