"""Tests of files, pandas DataFrames and XShards."""

import datetime

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.feature.utils import featuretable_to_xshards


def test_parquet_goes_out_and_in(messy, rows, tmp_path):
    path = str(tmp_path / "table.parquet")
    messy.write_parquet(path)
    read = FeatureTable.read_parquet(path)
    assert read.dtypes == messy.dtypes
    assert read.size() == len(rows)
    messy.limit(3).write_parquet(path, mode="append")
    assert FeatureTable.read_parquet([path]).size() == len(rows) + 3
    messy.limit(2).write_parquet(path)
    assert FeatureTable.read_parquet(tmp_path / "table.parquet").size() == 2
    messy.limit(1).write_parquet(path, mode="ignore")
    assert FeatureTable.read_parquet(path).size() == 2
    with refused("argument-value", "'append'", "'overwrite'", "'error'"):
        messy.write_parquet(path, mode="replace")


def test_csv_goes_out_and_in(make, tmp_path):
    table = make([(1, 2.5, "x;y"), (2, None, "z")], "a int, b double, c string")
    path = str(tmp_path / "csv")
    table.write_csv(path, delimiter="|", num_partitions=1)
    assert len(list((tmp_path / "csv").glob("*.csv"))) == 1
    read = FeatureTable.read_csv(path, delimiter="|", header=True)
    assert read.dtypes == [("a", "int"), ("b", "double"), ("c", "string")]
    assert read.to_dict() == table.to_dict()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, [("_c0", "int"), ("_c1", "double"), ("_c2", "string")]),
        ({"names": ["a", "b", "c"]}, [("a", "int"), ("b", "double"), ("c", "string")]),
        ({"dtype": "str"}, [("_c0", "string"), ("_c1", "string"), ("_c2", "string")]),
        ({"dtype": ["float", "int", "str"]}, [("_c0", "float"), ("_c1", "int"), ("_c2", "string")]),
        (
            {"names": ["a", "b", "c"], "dtype": {"a": "long"}},
            [("a", "bigint"), ("b", "double"), ("c", "string")],
        ),
    ],
)
def test_types_of_csv_are_inferred_or_given(orca_spark, tmp_path, arguments, wanted):
    path = tmp_path / "data.csv"
    path.write_text("1,2.5,x\n3,4.5,y\n")
    found = FeatureTable.read_csv(str(path), **arguments)
    assert found.dtypes == wanted
    assert found.size() == 2


def test_known_types_of_csv_need_no_pass_over_the_data(orca_spark, tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("1,2.5\n3,4.5\n")
    found = FeatureTable.read_csv(str(path), names=["a", "b"], dtype={"a": "int", "b": "int"})
    assert found.to_dict() == {"a": [1, 3], "b": [2, 4]}


def test_csv_with_wrong_names_or_types(orca_spark, tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("1,2\n")
    with refused("argument-value"):
        FeatureTable.read_csv(str(path), names=["a"])
    with refused("argument-value"):
        FeatureTable.read_csv(str(path), dtype=["int"])
    with pytest.raises(UsageError, match="dtype should be string, boolean, int"):
        FeatureTable.read_csv(str(path), dtype="decimal")


def test_json_and_text(orca_spark, tmp_path):
    path = tmp_path / "data.json"
    path.write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n')
    assert FeatureTable.read_json(str(path)).to_dict() == {"a": [1, 2], "b": ["x", "y"]}
    assert FeatureTable.read_json([str(path)], cols=["b"]).columns == ["b"]
    assert FeatureTable.read_text(str(path)).columns == ["value"]
    assert FeatureTable.read_text(str(path), col_name="line").size() == 2


def test_pandas_in_and_out(orca_spark):
    frame = pd.DataFrame(
        {
            "n": [1, 2, 3],
            "x": [0.5, np.nan, 2.0],
            "s": ["a", None, "c"],
            "l": [[1, 2], [], None],
            "t": pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03"]),
        }
    )
    table = FeatureTable.from_pandas(frame)
    assert table.columns == ["n", "x", "s", "l", "t"]
    assert table.to_list("s") == ["a", None, "c"]
    assert table.to_list("l") == [[1, 2], [], None]
    assert table.to_list("t")[0] == datetime.datetime(2020, 1, 1)
    assert table.to_pandas()["n"].tolist() == [1, 2, 3]
    with refused("argument-type", "pandas_df", "DataFrame"):
        FeatureTable.from_pandas([1, 2])


def test_xshards_of_a_table_hold_arrays(make):
    table = make([(1, [1, 2]), (2, [3, 4]), (3, [5, 6])], "k int, v array<int>")
    shards = featuretable_to_xshards(table).collect()
    assert sorted(k for shard in shards for k in shard["k"].tolist()) == [1, 2, 3]
    assert all(shard["v"].ndim == 2 for shard in shards if len(shard["k"]))
    lists = featuretable_to_xshards(table, convert_cols="k").collect()
    assert all(shard["v"].ndim == 1 for shard in lists)
