"""Test read_csv, read_json and read_parquet against pandas, on both backends."""

import subprocess
import sys
import textwrap

import case_names as naming
import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from refusals import refused

import bigdl.orca.data.pandas
from bigdl.common.errors import UsageError
from bigdl.orca import OrcaContext
from bigdl.orca.data.pandas import read_csv, read_json, read_parquet


@pytest.fixture(scope="module", autouse=True)
def session(orca_spark):
    return orca_spark


@pytest.fixture(params=["spark", "pandas"])
def backend(request):
    OrcaContext.pandas_read_backend = request.param
    yield request.param
    OrcaContext.pandas_read_backend = "spark"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("read")
    (path / "a.csv").write_text("id,x.y\n007,1.5\n008,\n")
    (path / "b.csv").write_text("id,x.y\n009,2.5\n")
    (path / "_SUCCESS").write_text("")
    return path


def rows(shards):
    return shards.concat_to_pdf().reset_index(drop=True)


def same(shards, expected):
    assert_frame_equal(rows(shards), expected, check_dtype=False)


@pytest.mark.slow
def test_a_path_is_a_file_a_folder_a_pattern_or_several(folder, backend, monkeypatch):
    expected = pd.concat(map(pd.read_csv, [folder / "a.csv", folder / "b.csv"]), ignore_index=True)
    one, two = str(folder / "a.csv"), str(folder / "b.csv")
    monkeypatch.chdir(folder)
    same(read_csv("a.csv"), expected[:2])
    for path in (str(folder), f"{folder}/*.csv", f"{one},{two}", [one, two], f"file://{folder}"):
        assert_frame_equal(
            rows(read_csv(path)).sort_values("id", ignore_index=True), expected, check_dtype=False
        )


@pytest.mark.slow_cases("spark")
def test_one_file_of_many_rows_is_one_shard(tmp_path, backend):
    frame = pd.DataFrame({"v": range(10010), "t": [f"t{i}" for i in range(10010)]})
    frame.to_csv(tmp_path / "many.csv", index=False)
    shards = bigdl.orca.data.pandas.read_csv(str(tmp_path / "many.csv"))
    (shard,) = shards.collect()
    assert_frame_equal(shard, frame, check_dtype=False)


@pytest.mark.parametrize(
    "options",
    [
        {"header": None},
        {"names": ["p", "q"], "header": 0, "usecols": ["q"]},
        {"names": ["p", "q"]},
        {"names": ["q"], "usecols": [1]},
        {"names": ["p"], "usecols": [0], "header": 0},
        {"usecols": [1]},
        {"usecols": lambda name: name == "x.y", "squeeze": True},
        {"index_col": "id"},
        {"index_col": 0, "dtype": {"x.y": "float32"}},
        {"dtype": {"id": str, 1: "float32"}},
        {"dtype": "str"},
        {"comment": "0", "header": 0},
    ],
    ids=naming.case,
)
def test_arguments_of_read_csv(folder, backend, options):
    path = str(folder / "a.csv")
    expected_options = dict(options)
    squeeze = expected_options.pop("squeeze", False)
    expected = pd.read_csv(path, **expected_options)
    (frame,) = read_csv(path, **options).collect()
    if options.get("header", 0) is None:
        assert list(map(str, frame)) == ["0", "1"]
        expected.columns = frame.columns
    if squeeze:
        pd.testing.assert_series_equal(frame, expected.squeeze("columns"))
        return
    is_typed = "dtype" in options and "index_col" not in options
    assert_frame_equal(frame, expected, check_dtype=is_typed, check_index_type=False)


def test_an_empty_file_has_columns_only_by_names(tmp_path, backend):
    path = str(tmp_path / "a.csv")
    (tmp_path / "a.csv").touch()
    with pytest.raises(UsageError, match="No columns to parse from file") as caught:
        read_csv(path).collect()
    assert path in str(caught.value)
    shards = read_csv(path, names=["p", "q"]).collect()
    assert [list(shard.columns) for shard in shards] == [["p", "q"]]
    assert not sum(map(len, shards))


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("a,b,c\n1,2,3\n4,5\n", {"a": [1, 4], "b": [2, 5], "c": [3, np.nan]}),
        ("\ufeffa,b\n1,2\n", {"a": [1], "b": [2]}),
        ('a,b\r\n1,"x,y"\r\n2,"z ""q"""\r\n', {"a": [1, 2], "b": ["x,y", 'z "q"']}),
    ],
)
def test_short_rows_marks_and_quotes_are_read_as_pandas_reads_them(tmp_path, backend, text, frame):
    (tmp_path / "r.csv").write_text(text, encoding="utf-8", newline="")
    same(read_csv(str(tmp_path / "r.csv")), pd.DataFrame(frame))


def test_a_row_with_too_many_fields_is_refused_by_its_file(tmp_path, backend):
    (tmp_path / "r.csv").write_text("a,b\n1,2\n3,4,5\n6,7\n")
    with pytest.raises(UsageError, match=r"r\.csv") as caught:
        read_csv(str(tmp_path / "r.csv"))
    what = "3 fields, but there are 2 columns: '3,4,5'"
    assert (what if backend == "spark" else "line 3, saw 3") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"usecols": ["a"]},
        {"header": 0, "names": "a int, b int"},
        {"dtype": str},
        {"sep": ";"},
        {"sep": "||"},
    ],
)
def test_too_many_fields_are_seen_whatever_the_options(tmp_path, options):
    sep = options.get("sep", ",")
    (tmp_path / "r.csv").write_text("a,b\n1,2\n3,4,5\n6,7\n".replace(",", sep))
    with pytest.raises(UsageError, match="has 3 fields"):
        read_csv(str(tmp_path / "r.csv"), **options)
    frame = read_csv(str(tmp_path / "r.csv"), mode="DROPMALFORMED", **options)
    assert rows(frame)["a"].astype(int).tolist() == [1, 6]


def test_an_end_of_a_line_within_quotes_needs_an_option_of_spark(tmp_path):
    (tmp_path / "r.csv").write_text('a,b\n1,"x\ny"\n2,z\n')
    with refused("file-damaged", "r.csv", "multiLine=True"):
        read_csv(str(tmp_path / "r.csv"))
    frame = pd.DataFrame({"a": [1, 2], "b": ["x\ny", "z"]})
    same(read_csv(str(tmp_path / "r.csv"), multiLine=True), frame)


@pytest.mark.slow
def test_a_program_may_read_first(folder):
    program = """
        import sys
        from bigdl.orca import OrcaContext, stop_orca_context
        from bigdl.orca.data.pandas import read_csv

        print(len(read_csv(sys.argv[1]).collect()[0]))
        print(OrcaContext.get_spark_context().master)
        stop_orca_context()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder / "a.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2\nlocal[")
    assert "There is no SparkContext, so a local one is started" in done.stderr


def test_a_schema_as_ddl(folder):
    (frame,) = read_csv(str(folder / "a.csv"), header=0, names="p string, q float").collect()
    assert list(frame["p"]) == ["007", "008"]
    assert frame["q"].dtype == np.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["p", "q"], "usecols": ["r"]}, "Passed names did not match usecols"),
        ({"usecols": ["r"]}, "usecols do not match columns, columns expected but not found"),
        ({"index_col": "r"}, "column index to be set type is not in current dataframe"),
        ({"names": ["p", "p"]}, "Found duplicate names"),
        ({"names": ["p"]}, "does not match the number of columns, 2"),
        ({"names": ["p"], "usecols": [2]}, "does not match the number of columns, 2"),
        ({"header": 3}, "Unknown header argument"),
        ({"skiprows": 1}, "read_csv with Spark has no option 'skiprows'"),
        ({"comment": "##"}, "Only length-1 comment characters"),
        ({"mangle_dupe_cols": False}, "mangle_dupe_cols can only be True"),
        ({"parse_dates": True}, "parse_dates can only be False"),
        ({"dtype": {"r": "str"}}, "dtype has the column 'r'"),
    ],
)
def test_read_csv_on_spark_says_what_is_wrong(folder, options, message):
    with pytest.raises(UsageError, match=message):
        read_csv(str(folder / "a.csv"), **options)


def test_quotes_separators_and_dates(tmp_path):
    (tmp_path / "q.csv").write_text('a||b||c\n1||"say ""hi"", so"||2020-01-02\n2||||2020-01-03\n')
    frame = rows(read_csv(str(tmp_path / "q.csv"), sep="||"))
    assert frame["b"].tolist()[0] == 'say "hi", so'
    assert frame["b"].isna().tolist() == [False, True]
    assert frame["c"].tolist() == [pd.Timestamp("2020-01-02"), pd.Timestamp("2020-01-03")]


def test_columns_of_files_that_differ_in_order_are_joined_by_name(tmp_path, backend):
    (tmp_path / "a.csv").write_text("a,b\n1,x\n2,y\n")
    (tmp_path / "b.csv").write_text("b,a\nz,3\n")
    frame = rows(read_csv(str(tmp_path))).sort_values("a", ignore_index=True)
    assert frame.to_dict("list") == {"a": [1, 2, 3], "b": ["x", "y", "z"]}
    assert frame["a"].dtype == "int64"
    chosen = read_csv(str(tmp_path), usecols=["a"], dtype={"a": "float32"})
    assert sorted(rows(chosen)["a"]) == [1, 2, 3]


def test_a_file_of_other_columns_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,x\n")
    (tmp_path / "b.csv").write_text("b,c\nz,3\n")
    message = r"header of .*b\.csv is \['b', 'c'\].*lacks \['a'\] and also has \['c'\]"
    with pytest.raises(UsageError, match=message):
        read_csv(str(tmp_path))


@pytest.mark.parametrize("encoding", ["utf8", "utf-8-sig", "latin1", "ISO-8859-1"])
def test_encodings_have_pythons_names(tmp_path, encoding):
    (tmp_path / "a.csv").write_bytes("stadt,n\nköln,1\n".encode(encoding))
    frame = rows(read_csv(str(tmp_path / "a.csv"), encoding=encoding))
    assert frame.to_dict("list") == {"stadt": ["köln"], "n": [1]}


def test_an_encoding_that_spark_does_not_have_names_the_backend_that_does(tmp_path):
    (tmp_path / "a.csv").write_bytes("stadt\nköln\n".encode("gbk", "replace"))
    for read, name in ((read_csv, "gbk"), (read_json, "gbk"), (read_csv, "utf-16")):
        with pytest.raises(UsageError, match=f"{name!r}.*pandas_read_backend"):
            read(str(tmp_path / "a.csv"), encoding=name)
    with refused("argument-value", "'utf-80'"):
        read_csv(str(tmp_path / "a.csv"), encoding="utf-80")


def test_inferred_whole_numbers_are_int64_as_in_pandas(tmp_path):
    pd.DataFrame({"a": [1, 2], "t": ["x", "y"]}).to_csv(tmp_path / "a.csv", index=False)
    assert rows(read_csv(str(tmp_path / "a.csv")))["a"].dtype == "int64"
    pd.DataFrame({"k": [7, 8], "v": np.array([1, 2], "int32")}).to_parquet(
        tmp_path / "p", partition_cols=["k"]
    )
    types = rows(read_parquet(str(tmp_path / "p"))).dtypes.astype(str).to_dict()
    assert types == {
        "v": "int32",
        "k": "int64",
    }  # int32 was written; the types of the folder names are inferred


def test_json_takes_names_usecols_and_dtype_in_the_order_of_the_first_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"user": 1, "item": 2, "x": 0.5}\n{"user": 3, "item": 4, "x": null}\n')
    assert list(rows(read_json(str(path))).columns) == ["user", "item", "x"]
    frame = rows(
        read_json(str(path), names=["u", "i", "r"], usecols=["u", "i"], dtype={"i": "float32"})
    )
    assert frame.dtypes.astype(str).to_dict() == {"u": "int64", "i": "float32"}
    assert frame.to_dict("list") == {"u": [1, 3], "i": [2.0, 4.0]}
    with pytest.raises(UsageError, match="usecols do not match"):
        read_json(str(path), usecols=["z"])


def test_files_of_zero_bytes_are_told_in_one_sentence(tmp_path, backend):
    for read, end in ((read_csv, "csv"), (read_json, "json"), (read_parquet, "parquet")):
        path = tmp_path / f"empty.{end}"
        path.touch()
        with pytest.raises(UsageError, match=rf"empty\.{end}"):
            read(str(path)).collect()


def test_a_missing_path(tmp_path, backend):
    with pytest.raises(Exception, match=r"no file at|Path does not exist|PATH_NOT_FOUND"):
        read_csv(str(tmp_path / "no.csv"))


def test_a_file_without_rows_is_one_empty_shard(tmp_path, backend):
    (tmp_path / "e.csv").write_text("a,b\n")
    (frame,) = read_csv(str(tmp_path / "e.csv")).collect()
    assert (list(frame), len(frame)) == (["a", "b"], 0)


def test_json(tmp_path, backend):
    frame = pd.DataFrame({"a": [1, 2], "t": ["x", None]})
    frame.to_json(tmp_path / "f.json", orient="records", lines=True)
    same(read_json(str(tmp_path / "f.json"), lines=True, orient="records"), frame)


@pytest.mark.slow_cases("spark")
def test_parquet(tmp_path, backend):
    frame = pd.DataFrame({"a.b": range(5), "t": list("vwxyz"), "f": np.arange(5.0)})
    frame.to_parquet(tmp_path / "f.parquet")
    assert_frame_equal(rows(read_parquet(str(tmp_path / "f.parquet"))), frame)
    chosen = read_parquet(str(tmp_path), columns=["t", "a.b"])
    assert_frame_equal(rows(chosen), frame[["t", "a.b"]])


def test_a_remote_url_is_read_by_the_workers(orca_spark, tmp_path):
    # storage that all processes of this machine can access, with a remote scheme
    pd.DataFrame({"a": [1, 2]}).to_csv(tmp_path / "f.csv", index=False)
    OrcaContext.pandas_read_backend = "pandas"
    try:
        same(read_csv(f"local://{tmp_path}/f.csv"), pd.DataFrame({"a": [1, 2]}))
    finally:
        OrcaContext.pandas_read_backend = "spark"
