"""Tests of the error messages for invalid arguments and tables."""

import time

import pytest

from bigdl.common.errors import UsageError, WorkerError
from bigdl.friesian.feature import FeatureTable, StringIndex, TargetCode
from bigdl.friesian.feature.table import Table


def _at_dates(table):
    """Return facts whose times are dates."""
    from pyspark.sql import functions as F

    facts = table.select("user").append_column("time", F.current_date())
    return facts.append_column("fact", F.lit(1))


CASES = {
    "fillna missing": (lambda t: t.fillna(0, ["age", "no"]), "do not exist in this Table"),
    "fillna kind": (
        lambda t: t.fillna(3.2, ["age", "city"]),
        "numeric does not match the type of column city",
    ),
    "fillna flag": (lambda t: t.fillna(True, "age"), "boolean does not match the type of column"),
    "fillna size": (lambda t: t.fillna(2**40, "age"), "cannot hold 1099511627776"),
    "fillna value": (lambda t: t.fillna([1], "age"), "value should be int, float, str or bool"),
    "dropna how": (lambda t: t.dropna(None, how="some"), "how should be one of 'any', 'all'"),
    "dropna thresh": (lambda t: t.dropna(None, thresh="2"), "thresh should be an integer"),
    "clip bounds": (lambda t: t.clip("age"), "at least one of min and max should be not None"),
    "clip order": (lambda t: t.clip("age", 3, 2), "min should be smaller than max"),
    "clip columns": (
        lambda t: t.clip(None, 0),
        "columns should be str or a list of str, but got None.",
    ),
    "clip text": (lambda t: t.clip("city", 0), "city should be a column of numbers"),
    "clip nan": (lambda t: t.clip("price", float("nan")), "min should be a number or None"),
    "clip bound": (lambda t: t.clip("age", "0"), "min should be a number or None"),
    "log clipping": (lambda t: t.log("age", 1), "clipping should be a boolean"),
    "median text": (
        lambda t: t.fill_median(["age", "city"]),
        "city with data type StringType is not supported",
    ),
    "cast": (
        lambda t: t.cast("age", "decimal"),
        "dtype should be string, boolean, int, long, short, float, double.",
    ),
    "cast missing": (lambda t: t.cast(["no"], "int"), "do not exist in this Table"),
    "add": (lambda t: t.add("city"), "city should be a column of numbers"),
    "add value": (lambda t: t.add("age", "1"), "value should be a number"),
    "rename": (lambda t: t.rename("age"), "columns should be a dictionary"),
    "rename to another": (
        lambda t: t.rename({"age": "city"}),
        "The result would have several columns ['city']",
    ),
    "rename to a number": (lambda t: t.rename({"age": 3}), "columns should be a dictionary"),
    "merge": (lambda t: t.merge_cols("age", "x"), "columns must be a list of column names"),
    "append": (lambda t: t.append_column("x", 3), "column should be a pyspark.sql.Column"),
    "select": (lambda t: t.select(), "cols should be str or a list of str, but got None."),
    "sort": (lambda t: t.sort(), "cols should be str or a list of str, but got None."),
    "sort flags": (lambda t: t.sort("age", ascending=[True, False]), "ascending should have one"),
    "filter": (lambda t: t.filter(3), "condition should be str or Column"),
    "split": (lambda t: t.split(0.5), "weights should be a list of numbers"),
    "concat mode": (lambda t: t.concat(t, mode="left"), "concat mode should be either"),
    "concat": (lambda t: t.concat([3]), "tables should be a Table or a list of Tables"),
    "duplicates": (lambda t: t.drop_duplicates("age", keep="last"), "keep should be either"),
    "duplicates missing": (lambda t: t.drop_duplicates("no"), "do not exist in this Table"),
    "join on": (lambda t: t.join(t), "on should be str or a list of str for a join"),
    "join": (lambda t: t.join(t.df, "age"), "table should be a Table"),
    "stats": (lambda t: t.get_stats("age", "median"), "aggr should be one of min, max"),
    "stats dict": (lambda t: t.get_stats("age", {"item": "min"}), "aggr has no entry for"),
    "stats typo": (
        lambda t: t.get_stats("age", {"age": "min", "agee": "max"}),
        "['agee'] do not exist in this Table",
    ),
    "extremes of text": (lambda t: t.max("city"), "city should be a column of numbers"),
    "subtract": (lambda t: t.subtract([1]), "other should be a Table, but got list"),
    "intersect": (lambda t: t.intersect(t.df), "other should be a Table, but got DataFrame"),
    "as of text": (
        lambda t: t.join_as_of(t.select("user", "city", "age"), "user", "city"),
        "city should be a column of numbers, dates or timestamps, but its type is string",
    ),
    "as of kinds": (
        lambda t: t.join_as_of(_at_dates(t), "user"),
        "time should hold numbers in both tables or in none",
    ),
    "stats text": (lambda t: t.get_stats("city", "avg"), "need numbers"),
    "group": (lambda t: t.group_by("age", "median"), "agg should be one of sum, avg"),
    "group agg": (lambda t: t.group_by("age", 3), "agg should be str, list or dict"),
    "group join": (lambda t: t.group_by(join=True), "columns should not be empty"),
    "frequency": (lambda t: t.filter_by_frequency("age", "2"), "min_freq should be an integer"),
    "index limit": (
        lambda t: t.gen_string_idx("city", freq_limit="3"),
        "freq_limit should be int, dict of str to int, or None",
    ),
    "index dict": (
        lambda t: t.gen_string_idx({"col_name": "x"}),
        "src_cols must be provided if columns is a dictionary",
    ),
    "index split": (lambda t: t.gen_string_idx("history", do_split=True), "cells of text"),
    "index none": (
        lambda t: t.gen_string_idx(None),
        "columns should be str or a list of str, but got None",
    ),
    "index missing": (lambda t: t.gen_string_idx("no"), "do not exist in this Table"),
    "encode": (lambda t: t.encode_string("city", [{}, {}]), "should have the same length"),
    "encode kind": (lambda t: t.encode_string("city", ["x"]), "indices should be StringIndex"),
    "encode array": (
        lambda t: t.encode_string("history", {}, oov_buckets=2),
        "oov_buckets cannot be used with ['history'], whose cells are arrays",
    ),
    "encode unknown": (
        lambda t: t.encode_string("city", {"x": 1}, oov_buckets=-1),
        "oov_buckets should be an integer of at least 0",
    ),
    "encode unknown tokens": (
        lambda t: t.encode_string("city", {"x": 1}, do_split=True, oov_buckets=3),
        "oov_buckets cannot be used with do_split",
    ),
    "quantiles": (lambda t: t.quantile_edges("age", 1), "parts should be an integer of at least 2"),
    "quantiles text": (lambda t: t.quantile_edges("city", 3), "city should be a column of numbers"),
    "encode name": (
        lambda t: t.encode_string("city", StringIndex.from_dict({"x": 1}, "town")),
        "The index for the column city should have a column of this name",
    ),
    "reindex": (lambda t: t.reindex("item", []), "should have the same length"),
    "mapping": (
        lambda t: t.gen_reindex_mapping(["item", "city"], {"item": 2}),
        "freq_limit should have a limit for each",
    ),
    "value features": (
        lambda t: t.add_value_features("no", t, "item", "age"),
        "do not exist in this Table",
    ),
    "dict_tbl": (
        lambda t: t.add_value_features("item", {1: 2}, "item", "age"),
        "dict_tbl should be a Table",
    ),
    "value features names": (
        lambda t: t.add_value_features(["item", "age"], t.select("item", "age"), "item", "age"),
        "The names of the results should differ from each other",
    ),
    "bins of a hash": (lambda t: t.hash_encode("city", 0), "bins should be a whole number"),
    "hash": (lambda t: t.hash_encode("city", 3, "crc"), "method should be the name of a hash"),
    "cross str": (
        lambda t: t.cross_columns("city", 3),
        "cross_columns should be a nested list of string",
    ),
    "cross mixed": (
        lambda t: t.cross_columns([["city", "tags"], "age"], [3, 4]),
        "cross_columns should be a nested list of string",
    ),
    "cross bins": (
        lambda t: t.cross_columns([["city", "tags"]], 3),
        "bin_sizes should be a list of int",
    ),
    "cross length": (
        lambda t: t.cross_columns([["city", "tags"]], [3, 4]),
        "cross_columns and bin_sizes should have the same length",
    ),
    "cross one": (
        lambda t: t.cross_columns([["city"]], [3]),
        "each element in cross_columns should have >= 2 columns",
    ),
    "cross names": (
        lambda t: t.cross_columns([["city", "tags"]], [3], "x"),
        "cross_col_names should be None or a list of string",
    ),
    "cross names length": (
        lambda t: t.cross_columns([["city", "tags"]], [3], ["x", "y"]),
        "cross_columns and cross_col_names should have the same length",
    ),
    "cross name": (
        lambda t: t.cross_columns([["city", "tags"]], [3], [1]),
        "each element in cross_col_names should be None or string",
    ),
    "cross twins": (
        lambda t: t.cross_columns([["city", "tags"], ["user", "tags"]], [3, 4], ["x", "x"]),
        "The names of the crosses should differ from each other, but ['x'] occur twice",
    ),
    "one hot": (lambda t: t.one_hot_encode("city"), "city should be a column of whole numbers"),
    "one hot names": (
        lambda t: t.append_column("age_0", t.age).one_hot_encode("age", 2),
        "The result would have several columns ['age_0']; use another prefix",
    ),
    "one hot sizes": (
        lambda t: t.one_hot_encode("age", [1, 2]),
        "sizes and columns should have the same",
    ),
    "one hot prefix": (
        lambda t: t.one_hot_encode("age", 2, ["a", "b"]),
        "prefix and columns should have",
    ),
    "bins": (lambda t: t.cut_bins("age", "4"), "bins should be int or a list of numbers"),
    "bins order": (lambda t: t.cut_bins("age", [3, 1]), "should be ascending"),
    "bins text": (lambda t: t.cut_bins("city", 3), "city should be a column of numbers"),
    "bins dict": (lambda t: t.cut_bins("age", {"item": 3}), "bins has no entry for the column"),
    "labels": (lambda t: t.cut_bins("age", [3], labels=["x"]), "labels should be of length 2"),
    "bins names": (
        lambda t: t.cut_bins("age", [3], out_cols=["x", "y"]),
        "out_cols and columns should have the same length",
    ),
    "bins twins": (
        lambda t: t.cut_bins(["age", "item"], [3], out_cols=["x", "x"]),
        "out_cols should differ from each other",
    ),
    "scale": (lambda t: t.min_max_scale("city"), "cannot be scaled"),
    "scale range": (lambda t: t.min_max_scale("age", 1, 0), "min should be smaller than max"),
    "scale extremes": (
        lambda t: t.transform_min_max_scale("age", {"age": ([0], [1])}),
        "should be numbers, got",
    ),
    "history": (
        lambda t: t.add_hist_seq("item", "user", max_len=0),
        "max_len should be a p",
    ),
    "history sort": (lambda t: t.add_hist_seq("item", "user", "no"), "do not exist in this Table"),
    "negatives": (lambda t: t.add_negative_samples(2), "item_size should be the largest item"),
    "negatives text": (
        lambda t: t.add_negative_samples(9, "city"),
        "city should be a column of whole numbers",
    ),
    "negatives of": (
        lambda t: t.add_neg_hist_seq(9, "item", 2),
        "item should be a column of arrays",
    ),
    "negatives seed": (lambda t: t.add_negative_samples(9, seed="1"), "seed should be an integer"),
    "negatives popularity": (
        lambda t: t.add_negative_samples(9, popularity=-1),
        "popularity should be a number of at least 0",
    ),
    "negatives popularity of nothing": (
        lambda t: t.add_negative_samples(9, popularity=float("nan")),
        "popularity should be a number of at least 0",
    ),
    "negatives user": (
        lambda t: t.add_negative_samples(9, user_col="no"),
        "do not exist in this Table",
    ),
    "mask": (lambda t: t.mask("age"), "age should be a column of arrays"),
    "pad token": (
        lambda t: t.pad("history", mask_token="x"),
        "mask_token should be of type int, but got 'x'",
    ),
    "pad length": (lambda t: t.pad("history", 0), "seq_len should be a positive integer"),
    "difference": (
        lambda t: t.difference_lag("city", "time"),
        "columns should be numeric: city should be a column of numbers",
    ),
    "difference shifts": (lambda t: t.difference_lag("age", "time", 1.5), "shifts should be int"),
    "difference names": (
        lambda t: t.difference_lag(["age", "item"], "time", [1, 2], out_cols=["x", "y"]),
        "out_cols should have 2 lists",
    ),
    "listwise": (
        lambda t: t.sample_listwise("age", 1, 1),
        "Each column should be of list type: age should be a column of arrays",
    ),
    "listwise missing": (
        lambda t: t.sample_listwise("no", 1, 1),
        "does not exist in this FeatureTable.",
    ),
    "kfold": (
        lambda t: t.target_encode("city", "age", kfold=0),
        "kfold should be an integer larger than 0",
    ),
    "target": (
        lambda t: t.target_encode("city", "tags"),
        "target_cols should be numeric: tags should be a column of numbers",
    ),
    "target mean": (
        lambda t: t.target_encode("city", "age", target_mean={"age": "x"}),
        "mean in target_mean should be numeric",
    ),
    "target means": (
        lambda t: t.target_encode("city", "age", target_mean={"item": 2}),
        "target_mean has no entry for",
    ),
    "target fold": (
        lambda t: t.target_encode("city", "age", fold_col="tags"),
        "fold_col should be integer type: tags should be a column of whole numbers",
    ),
    "target names": (
        lambda t: t.target_encode(["city", "tags"], "age", out_cols="x"),
        "out_cols should have 2 lists",
    ),
    "target twins": (
        lambda t: t.target_encode(["city", "tags"], "age", out_cols=["x", "x"]),
        "out_cols should differ from each other",
    ),
    "target fold name": (
        lambda t: t.target_encode("city", "age", out_cols="__fold__"),
        "out_cols and fold_col should differ",
    ),
    "target seed": (lambda t: t.target_encode("city", "age", fold_seed="1"), "fold_seed should be"),
    "target smooth nan": (
        lambda t: t.target_encode("city", "age", smooth=float("nan")),
        "smooth should be a number",
    ),
    "target smooth": (lambda t: t.target_encode("city", "age", smooth=-1), "smooth should be"),
    "time folds": (
        lambda t: t.target_encode_by_time("city", "age", "time", 1),
        "folds should be an integer from 2 on",
    ),
    "time folds list": (
        lambda t: t.target_encode_by_time("city", "age", "time", ["x"]),
        "folds should be an integer from 2 on or a list of numbers",
    ),
    "time folds order": (
        lambda t: t.target_encode_by_time("city", "age", "time", [3, 3]),
        "The times in folds should be ascending",
    ),
    "time kind": (
        lambda t: t.target_encode_by_time("city", "age", "tags", 2),
        "tags should be a column of numbers, dates or timestamps",
    ),
    "counts": (
        lambda t: t.count_encode(["city", "tags"], counts=t),
        "counts should be 2 Tables, one for each of cat_cols",
    ),
    "counts of others": (
        lambda t: t.count_encode("city", counts=t),
        "do not exist in this table of counts",
    ),
    "counts share": (
        lambda t: t.count_encode("city", normalize=1),
        "normalize should be a boolean",
    ),
    "joint": (lambda t: t.joint_encode(["city", "no"]), "do not exist in this Table"),
    "joint index": (lambda t: t.joint_encode("city", index=t), "index should be a StringIndex"),
    "codes": (lambda t: t.encode_target("city"), "targets should be TargetCode"),
    "codes elsewhere": (
        lambda t: t.drop("city").encode_target(t.target_encode("city", "age", kfold=1)[1]),
        "city in TargetCode.cat_col in targets does not exist in Table",
    ),
    "apply": (lambda t: t.apply("no", "x", len), "do not exist in this Table"),
    "apply func": (lambda t: t.apply("age", "x", 3), "func should be a function"),
    "embed": (lambda t: t.string_embed("age", len), "age should be a column of strings"),
    "embed model": (lambda t: t.string_embed("city", 3), "bert_model should be str, but get int"),
}


@pytest.mark.slow_cases("codes elsewhere")
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_named(messy, name):
    call, message = CASES[name]
    with pytest.raises(UsageError) as caught:
        call(messy)
    assert message in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)


def test_wrong_tables_indices_and_codes(make):
    df = make([("x", 1, 1, 0.5)], "c string, id int, target_encode_count int, out double").df
    for call, message in [
        (lambda: Table([1]), "df should be a DataFrame of Spark"),
        (lambda: StringIndex(df, "no"), "no should be a column of the DataFrame"),
        (lambda: StringIndex(df.drop("id"), "c"), "id should be a column of the DataFrame"),
        (lambda: StringIndex.from_dict(["x"], "c"), "indices should be dict, but get list"),
        (lambda: StringIndex.from_dict({"x": 1}, None), "col_name should be str, but get None"),
        (lambda: StringIndex.from_dict({"x": 1}, 3), "col_name should be str, but get int"),
        (lambda: StringIndex.from_dict({"x": "y"}, "c"), "values of indices should be 32-bit int"),
        (lambda: StringIndex.from_dict({1: 1}, "c"), "keys of indices should be str"),
        (lambda: TargetCode(df, "no", {}), "do not exist in this Table"),
        (lambda: TargetCode(df, "c", {"no": ("y", 1)}), "do not exist in this Table"),
        (lambda: TargetCode(df, "c", ["out"]), "out_target_mean should be a dict"),
        (
            lambda: FeatureTable(df).encode_target(
                TargetCode(df.withColumnRenamed("c", "unknown"), "unknown", {"out": ("y", 1)})
            ),
            "unknown in TargetCode.cat_col in targets does not exist in Table",
        ),
    ]:
        with pytest.raises(UsageError) as caught:
            call()
        assert message in str(caught.value)


@pytest.mark.slow_cases("to_dict", "compute", "collect", "<lambda>0", "<lambda>1", "<lambda>2")
@pytest.mark.parametrize(
    "use",
    [
        FeatureTable.compute,
        FeatureTable.show,
        FeatureTable.collect,
        FeatureTable.to_pandas,
        FeatureTable.to_dict,
        lambda table: table.get_stats("y", "max"),
        lambda table: table.gen_string_idx("y"),
        lambda table: table.get_vocabularies(["y"]),
    ],
)
@pytest.mark.filterwarnings("error:toPandas")
def test_a_function_of_apply_that_fails_ends_with_the_users_frames(make, capfd, use):
    def fails(value):
        if value == 3:
            raise KeyError("row 3")
        return value

    table = make([(1,), (2,), (3,)], "x int").apply("x", "y", fails, "int")
    with pytest.raises(WorkerError, match=r"^KeyError in a task of Spark:") as caught:
        use(table)
    _first, *frames = str(caught.value).splitlines()
    assert f'File "{__file__}"' in frames[1]
    assert frames[-1] == "KeyError: 'row 3'"
    assert len(frames) < 12
    assert "org.apache.spark" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_long_function_that_fails_is_not_run_as_often_as_tasks_may_fail(make, tmp_path):
    def fails(value):
        (tmp_path / f"{time.monotonic_ns()}").touch()
        time.sleep(2)
        raise KeyError(value)

    with pytest.raises(WorkerError, match=r"^KeyError in a task of Spark:"):
        make([(1,)], "x int").apply("x", "y", fails, "int").write_csv(f"{tmp_path}/table")
    assert len([path for path in tmp_path.iterdir() if path.name != "table"]) < 4
