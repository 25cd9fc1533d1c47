"""Tests of histories from files: local shuffles give the values of Spark."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.feature.pipeline import FeaturePipeline, LocalWorkers
from bigdl.orca.cluster.versions import frame_of_arrow, to_arrow


def visits(count=400):
    """Generate visits with values of many types, nulls and equal times."""
    rng = np.random.default_rng(2)
    places = rng.integers(0, 25, count)
    reals = np.array([0.0, -0.0, np.nan, 1.5])[places % 4]
    time = rng.integers(0, 60, count)
    return pa.table(
        {
            "name": pa.array([f"u{p}" for p in places], mask=rng.random(count) < 0.05),
            "number": pa.array(places * 7 - 30, pa.int64(), mask=rng.random(count) < 0.05),
            "real": pa.array(reals, mask=rng.random(count) < 0.05),
            "time": pa.array(time, pa.int32()),
            "moment": pa.array(time * 1_000_000, pa.timestamp("us", "UTC")),
            "word": pa.array([f"t{t:03d}" for t in time]),
            "half": pa.array(np.where(time % 5, time / 2, -0.0 * time)),
            "item": pa.array(rng.integers(1, 30, count), pa.int32(), mask=rng.random(count) < 0.1),
            "tags": pa.array([[int(p)] * (p % 3) for p in places], pa.list_(pa.int32())),
            "row": pa.array(range(count), pa.int64()),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("visits")
    table = visits()
    pq.write_table(table.slice(0, 250), folder / "a.parquet", row_group_size=60)
    pq.write_table(table.slice(250), folder / "b.parquet")
    return str(folder)


@pytest.fixture(scope="module")
def table(orca_spark, folder):
    paths = [f"{folder}/a.parquet", f"{folder}/b.parquet"]
    return FeatureTable(frame_of_arrow(orca_spark, pa.concat_tables(map(pq.read_table, paths))))


def rows_of(table, key="row"):
    """Return the rows sorted by a column of distinct values."""
    return [repr(row) for row in sorted(table.to_pylist(), key=lambda row: row[key])]


@pytest.mark.parametrize(
    ("user", "time", "options"),
    [
        ("name", "time", {}),
        ("number", "moment", {"min_len": 0, "max_len": 3}),
        ("real", "word", {"min_len": 2, "num_seqs": 5}),
        ("name", "half", {"max_len": 1, "num_seqs": 1}),
    ],
)
def test_histories_of_files_are_those_of_a_table(table, folder, tmp_path, user, time, options):
    def record():
        return FeaturePipeline().add_hist_seq(["item", "word", "tags"], user, time, **options)

    pipeline, target = record(), str(tmp_path / "out")
    wanted = to_arrow(pipeline.fit_transform(table).df)
    by_files = record().fit_files(folder, host="here")
    assert by_files.transform_files(folder, target, host="here") == wanted.num_rows
    found = pq.read_table(target)
    assert found.column_names == wanted.column_names
    assert rows_of(found) == rows_of(wanted)
    assert by_files.feature_schema() == pipeline.feature_schema()


def encoded():
    names = ["name", "item"]
    return (
        FeaturePipeline()
        .category_encode(names)
        .fillna(0, names)
        .add_hist_seq("item", "name", "time", max_len=4)
        .pad("item_hist_seq", seq_len=4, mask_cols="item_hist_seq")
    )


@pytest.mark.slow_cases("spark")
@pytest.mark.parametrize("host", ["spark", "local"])
def test_steps_in_front_and_behind_run_on_every_host(table, folder, tmp_path, host):
    wanted = to_arrow(encoded().fit_transform(table).df)
    target = str(tmp_path / "out")
    runner = LocalWorkers(2) if host == "local" else host
    try:
        pipeline = encoded().fit_files(folder, host=runner)
        pipeline.transform_files(folder, target, host=runner)
    finally:
        if host == "local":
            runner.close()
    found = pq.read_table(target)
    assert rows_of(found) == rows_of(wanted)
    assert not [name for name in os.listdir(target) if name.startswith(".")]
    schema = pipeline.feature_schema()
    assert schema["item_hist_seq"].cardinality == schema["item"].cardinality
    (line,) = (line for line in pipeline.explain().splitlines() if "add_hist_seq" in line)
    assert "catalyst, arrow  " in line


def test_histories_can_be_made_of_histories(table, folder, tmp_path):
    def record():
        return (
            FeaturePipeline()
            .add_hist_seq("item", "name", "row", max_len=2)
            .add_hist_seq("time", "number", "row", max_len=2)
        )

    wanted = to_arrow(record().fit_transform(table).df)
    target = str(tmp_path / "out")
    record().fit_files(folder, host="here").transform_files(folder, target, host="here")
    assert rows_of(pq.read_table(target)) == rows_of(wanted)


def test_a_saved_pipeline_makes_the_same_histories(folder, tmp_path):
    pipeline = encoded().fit_files(folder, host="here")
    pipeline.save(str(tmp_path / "pipeline"))
    loaded = FeaturePipeline.load(str(tmp_path / "pipeline"))
    for each, name in ((pipeline, "a"), (loaded, "b")):
        each.transform_files(folder, str(tmp_path / name), host="here")
    assert rows_of(pq.read_table(tmp_path / "a")) == rows_of(pq.read_table(tmp_path / "b"))


def test_files_without_rows_have_histories_without_rows(tmp_path):
    (tmp_path / "src").mkdir()
    pq.write_table(visits().slice(0, 0), tmp_path / "src" / "a.parquet")
    pipeline = encoded().fit_files(str(tmp_path / "src"), host="here")
    assert pipeline.transform_files(str(tmp_path / "src"), str(tmp_path / "out"), host="here") == 0


def test_users_with_short_histories_leave_no_rows(folder, tmp_path):
    pipeline = FeaturePipeline().add_hist_seq("item", "name", "time", min_len=1000)
    target = str(tmp_path / "out")
    assert pipeline.fit_files(folder, host="here").transform_files(folder, target, host="here") == 0
    assert "item_hist_seq" in pq.read_table(target).column_names


def test_a_time_that_is_null_is_refused_and_nothing_is_left(folder, tmp_path):
    table = visits().drop_columns("time")
    table = table.append_column("time", pa.array([None, *range(399)], pa.int32()))
    (tmp_path / "src").mkdir()
    pq.write_table(table, tmp_path / "src" / "a.parquet")
    pipeline = encoded().fit_files(folder, host="here")
    with refused("data-null"):
        pipeline.transform_files(str(tmp_path / "src"), str(tmp_path / "out"), host="here")
    assert os.listdir(tmp_path / "out") == []


def test_what_files_cannot_do_is_refused(folder, tmp_path):
    histories = FeaturePipeline().add_hist_seq("item", "name", "time")
    with refused("unsupported", "add_hist_seq"):
        histories.min_max_scale("time").fit_files(folder, host="here")
    with refused("unsupported", "add_hist_seq"):
        histories.fit_files(folder, host="here").transform_row({"item": 1})
    with refused("column-missing", "'price'"):
        FeaturePipeline().add_hist_seq("price", "name", "time").fit_files(folder, host="here")
    with refused("argument-value", "max_len"):
        FeaturePipeline().add_hist_seq("item", "name", "time", max_len=0).fit_files(folder)
    pq.write_table(visits().drop_columns("time"), tmp_path / "a.parquet")
    with refused("column-missing", "'time'"):
        histories.transform_files(str(tmp_path / "a.parquet"), str(tmp_path / "o"), host="here")


@pytest.mark.slow
def test_columns_in_the_names_of_folders_are_those_of_spark(orca_spark, tmp_path):
    source = str(tmp_path / "visits")
    columns = "row % 3 day", "if(row % 5 = 0, null, concat('a b/', row % 2)) kind", "row", "item"
    frame = frame_of_arrow(orca_spark, visits(60).select(["row", "item"])).selectExpr(*columns)
    frame.write.partitionBy("day", "kind").parquet(source)

    def record():
        return FeaturePipeline().category_encode("kind").min_max_scale("day")

    by_spark = record().fit_files(source, executor="catalyst")
    by_files = record().fit_files(source, host="here")
    assert by_files.transform_files(source, str(tmp_path / "out"), host="here") == 60
    wanted = to_arrow(by_spark.transform(FeatureTable.read_parquet(source)).df)
    found = pq.read_table(tmp_path / "out")
    assert found.schema.equals(wanted.schema)
    assert rows_of(found) == rows_of(wanted)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-20"], "int"),
        (["1", "3000000000"], "bigint"),
        (["1", "2.5"], "double"),
        (["2024-05-01", "__HIVE_DEFAULT_PARTITION__"], "date"),
        (["x", "1"], "string"),
        (["__HIVE_DEFAULT_PARTITION__"], "string"),
    ],
)
def test_the_type_of_a_folder_is_the_first_that_fits_all(tmp_path, values, kind):
    for value in values:
        (tmp_path / f"k={value}").mkdir()
        pq.write_table(visits(3), tmp_path / f"k={value}" / "a.parquet")
    pipeline = FeaturePipeline().fillna(0, "item").fit_files(str(tmp_path), host="here")
    assert pipeline.feature_schema()["k"].dtype == kind
    assert list(pipeline.feature_schema())[-1] == "k"


def test_folders_that_name_different_columns_are_refused(tmp_path):
    for name in ("k=1", "m=1"):
        (tmp_path / name).mkdir()
        pq.write_table(visits(3), tmp_path / name / "a.parquet")
    with refused("data-schema"):
        FeaturePipeline().fillna(0, "item").fit_files(str(tmp_path), host="here")


def test_a_file_without_a_column_of_the_others_is_named(tmp_path):
    pq.write_table(visits(3), tmp_path / "a.parquet")
    pq.write_table(visits(3).drop_columns("name"), tmp_path / "b.parquet")
    with refused("column-missing"):
        FeaturePipeline().category_encode("name").fit_files(str(tmp_path), host="here")
