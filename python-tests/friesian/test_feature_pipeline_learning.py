"""Tests of pipelines: fitting, saving, explaining and errors."""

import datetime
import json
import subprocess
import sys
import tempfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.friesian.feature import FeatureTable, storage
from bigdl.friesian.feature.pipeline import FeaturePipeline, LocalWorkers
from bigdl.orca.cluster.versions import frame_of_arrow, to_arrow


@pytest.fixture(scope="module")
def clicks():
    """Return an Arrow table of clicks with skewed categories."""
    rng = np.random.default_rng(3)
    count = 600
    users = rng.zipf(1.4, count).clip(0, 60)
    return pa.table(
        {
            "user": pa.array([f"u{u}" for u in users], mask=rng.random(count) < 0.1),
            "item": pa.array(rng.integers(1, 30, count), pa.int32(), mask=rng.random(count) < 0.1),
            "price": pa.array(rng.normal(size=count).round(3), mask=rng.random(count) < 0.2),
            "time": pa.array(rng.permutation(count), pa.int64()),
            "label": pa.array(rng.integers(0, 2, count), pa.int32()),
        }
    )


@pytest.fixture(scope="module")
def folder(clicks, tmp_path_factory):
    """Write the clicks as two Parquet files of several row groups."""
    folder = tmp_path_factory.mktemp("clicks")
    pq.write_table(clicks.slice(0, 350), folder / "a.parquet", row_group_size=100)
    pq.write_table(clicks.slice(350), folder / "b.parquet")
    return str(folder)


@pytest.fixture(scope="module")
def table(orca_spark, folder):
    return FeatureTable(orca_spark.read.parquet(folder).coalesce(1).cache())


PIPELINE = (
    FeaturePipeline()
    .fill_median("price")
    .quantile_bins("price", 4, out_cols="bin", drop=False)
    .target_encode("user", "label", kfold=1)
    .category_encode(["user", "item"], freq_limit={"user": 3}, order_by_freq=True)
    .fillna(0, ["user", "item"])
    .min_max_scale("price")
    .one_hot_encode("bin")
)


def learned(pipeline):
    """Return the fitted operators of a saved and loaded pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline.save(f"{folder}/p")
        return storage.load(f"{folder}/p")[2]


def states(pipeline):
    return [
        {name: v.to_pydict() if hasattr(v, "to_pydict") else v for name, v in each.state.items()}
        for each in learned(pipeline)
    ]


def copy_of(pipeline):
    """Return an unfitted pipeline with the same steps."""
    return pipeline.drop("no such column")


def assert_same_states(found, wanted):
    for a, b in zip(states(found), states(wanted), strict=True):
        assert a == pytest.approx(b) if all(isinstance(v, float) for v in b.values()) else a == b


def test_files_and_tables_teach_the_same(table, folder):
    by_spark, by_files = copy_of(PIPELINE).fit(table), copy_of(PIPELINE)
    by_files.fit_files(folder, host="here")
    assert_same_states(by_files, by_spark)
    assert by_files.feature_schema() == by_spark.feature_schema()


@pytest.mark.slow_cases("local")
@pytest.mark.parametrize("host", ["spark", "local"])
def test_files_keep_the_order_of_their_rows_wherever_they_are_computed(
    table, folder, clicks, tmp_path, host
):
    pipeline = copy_of(PIPELINE)
    if host == "local":
        with LocalWorkers(2) as workers:
            pipeline.fit_files(folder, host=workers)
            rows = pipeline.transform_files(folder, str(tmp_path / "out"), host=workers)
    else:
        pipeline.fit_files(folder, host=host)
        rows = pipeline.transform_files(folder, str(tmp_path / "out"), host=host)
    assert rows == len(clicks)
    found = pq.read_table(tmp_path / "out")
    assert found["time"].to_pylist() == clicks["time"].to_pylist()
    assert found.to_pylist() == to_arrow(pipeline.transform(table).df).to_pylist()
    assert (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.slow
def test_spark_reads_what_the_executor_arrow_wrote(orca_spark, table, folder, tmp_path):
    pipeline = copy_of(PIPELINE).fit(table)
    pipeline.transform_files(folder, str(tmp_path), host="here")
    found = orca_spark.read.parquet(str(tmp_path))
    assert found.dtypes == pipeline.transform(table).dtypes
    assert found.count() == table.size()


@pytest.mark.slow
def test_files_can_be_transformed_by_spark_alone(table, folder, tmp_path):
    pipeline = copy_of(PIPELINE).fit_files(folder, executor="catalyst")
    assert pipeline.transform_files(folder, str(tmp_path / "out"), executor="catalyst") == 600


@pytest.mark.slow
def test_one_pass_learns_what_does_not_depend_on_each_other(table, monkeypatch):
    from bigdl.friesian.executors import spark

    passes = []
    compute_statistics = spark.compute_statistics
    monkeypatch.setattr(
        spark,
        "compute_statistics",
        lambda df, program: passes.append(1) or compute_statistics(df, program),
    )
    names = ["user", "item"]
    independent = FeaturePipeline().fillna(0.0, "price").category_encode(names).fillna(0, names)
    independent.min_max_scale("price").cross_columns([["time", "label"]], [9]).fit(table)
    assert len(passes) == 1
    passes.clear()
    FeaturePipeline().category_encode("item").min_max_scale("item").fit(table)
    assert len(passes) == 2


@pytest.mark.slow
def test_numbers_are_those_of_a_feature_table(table):
    names = ["user", "item"]
    wanted, _ = table.category_encode(names, freq_limit=4, order_by_freq=True)
    wanted = wanted.cross_columns([["user", "item", "time"]], [1000], sep="|")
    wanted, _ = wanted.fillna(0, names).fill_median("price").min_max_scale("price")
    pipeline = FeaturePipeline().category_encode(names, freq_limit=4, order_by_freq=True)
    pipeline = pipeline.cross_columns([["user", "item", "time"]], [1000], sep="|")
    pipeline = pipeline.fillna(0, names).fill_median("price").min_max_scale("price")
    found = pipeline.fit_transform(table)
    pd.testing.assert_frame_equal(found.to_pandas(), wanted.to_pandas())


@pytest.mark.slow
def test_codes_of_training_rows_do_not_know_their_own_fold(table):
    pipeline = FeaturePipeline().target_encode("user", "label", kfold=3)
    training = pipeline.fit_transform(table)
    wanted, codes = table.target_encode("user", "label", kfold=3)
    columns = ["time", "user_te_label"]
    found = training.select(columns).to_pandas().sort_values("time", ignore_index=True)
    expected = wanted.select(columns).to_pandas().sort_values("time", ignore_index=True)
    pd.testing.assert_frame_equal(found, expected)
    later = pipeline.transform(table).select(columns).to_pandas().sort_values("time")
    by_codes = table.encode_target(codes, drop_cat=False).select(columns).to_pandas()
    np.testing.assert_allclose(
        later["user_te_label"], by_codes.sort_values("time")["user_te_label"]
    )


@pytest.mark.slow
def test_several_columns_can_have_one_vocabulary(orca_spark):
    frame = orca_spark.createDataFrame([("a", "b"), ("c", "a"), ("a", None)], "x string, y string")
    pipeline = FeaturePipeline().category_encode({"src_cols": ["x", "y"], "col_name": "both"})
    found = pipeline.fit_transform(frame).to_pandas().astype("Int32").to_numpy(na_value=0)
    assert found.tolist() == [[1, 2], [3, 1], [1, 0]]
    assert pipeline.transform_row({"x": "c", "y": "d"}) == {"x": 3, "y": None}


@pytest.mark.slow
@pytest.mark.parametrize("oov_buckets", [0, 3])
def test_many_columns_are_encoded_as_few_are(orca_spark, oov_buckets):
    rng = np.random.default_rng(1)
    names = [f"c{i}" for i in range(8)]
    drawn = {name: rng.zipf(1.5, 80).clip(0, 30) for name in names}
    text = {name: pa.array([f"v{v}" for v in drawn[name]], mask=drawn[name] == 2) for name in names}
    table = pa.table(text | {"c7": pa.array(drawn["c7"], mask=drawn["c7"] == 3)})
    frame = frame_of_arrow(orca_spark, table)
    many = FeaturePipeline().category_encode(names, freq_limit=2, oov_buckets=oov_buckets)
    few = FeaturePipeline()
    for name in names:
        few = few.category_encode(name, freq_limit=2, oov_buckets=oov_buckets)
    found, wanted = (to_arrow(each.fit_transform(frame).df) for each in (many, few))
    assert found.to_pylist() == wanted.to_pylist()
    assert found.to_pylist() == [many.transform_row(row) for row in table.to_pylist()]


def test_vocabularies_of_many_columns_of_text_are_those_of_files(orca_spark, tmp_path):
    rng = np.random.default_rng(11)
    names = [f"c{i}" for i in range(9)]
    columns = {
        name: pa.array([f"{v}" for v in rng.zipf(1.5, 500)], mask=rng.random(500) < 0.1)
        for name in names
    }
    columns["c8"] = pa.nulls(500, pa.string())
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=200)
    encoded = [*names[2:], {"src_cols": names[:2], "col_name": "both"}]

    def record():
        return FeaturePipeline().category_encode(
            encoded, freq_limit={"both": 4, "c3": 2}, order_by_freq=True
        )

    by_spark = record().fit(orca_spark.read.parquet(str(tmp_path / "a.parquet")))
    by_files = record().fit_files(str(tmp_path / "a.parquet"), host="here")
    found = learned(by_spark)[0].state
    for name, wanted in learned(by_files)[0].state.items():
        assert found[name].equals(wanted), name


def test_files_without_rows_teach_and_give_tables_without_rows(clicks, tmp_path):
    (tmp_path / "src").mkdir()
    pq.write_table(clicks.slice(0, 0), tmp_path / "src" / "a.parquet")
    pipeline = FeaturePipeline().category_encode("user").min_max_scale("price")
    pipeline.fit_files(str(tmp_path / "src"), host="here")
    target = str(tmp_path / "out")
    assert pipeline.transform_files(str(tmp_path / "src"), target, host="here") == 0
    assert pq.read_table(target).column_names == clicks.column_names
    assert pipeline.transform_row(clicks.to_pylist()[0])["price"] is None


# -- steps on tables -------------------------------------------------------------------------------


@pytest.mark.slow
def test_histories_and_negatives_are_those_of_a_feature_table(table):
    def run(on):
        on = on.dropna(["user", "item"]).add_hist_seq("item", "user", max_len=4)
        on = on.add_negative_samples(item_size=31, neg_num=1, seed=5)
        return on.add_neg_hist_seq(31, "item_hist_seq", 2, seed=7).pad("item_hist_seq", seq_len=3)

    pipeline = run(FeaturePipeline()).min_max_scale("time")
    found = pipeline.fit_transform(table)
    wanted, _ = run(table).min_max_scale("time")
    columns = ["time", "item", "label", "item_hist_seq", "neg_item_hist_seq"]
    assert found.columns == wanted.columns
    key = ["time", "label"]
    for name in columns:
        a, b = (each.to_pandas().sort_values(key)[name].tolist() for each in (found, wanted))
        assert list(map(str, a)) == list(map(str, b))
    schema = pipeline.feature_schema()
    assert schema["item"].cardinality == 31
    assert schema.length("item_hist_seq") == 3


def test_figures_are_those_of_the_rows_at_their_place(table):
    pipeline = FeaturePipeline().category_encode("user").filter("time < 10").min_max_scale("time")
    found = pipeline.fit_transform(table)
    assert found.get_stats("time", ["min", "max"]) == {"time": [0.0, 1.0]}
    assert len(learned(pipeline)[0].state["user"]) > 10  # of all rows
    assert pipeline.explain().count("catalyst, arrow, row") == 2


def test_steps_on_tables_are_refused_elsewhere(table, folder, tmp_path):
    pipeline = FeaturePipeline().filter("label = 1").fit(table)
    for call in (
        lambda: pipeline.transform_row({"label": 1}),
        lambda: pipeline.transform_files(folder, str(tmp_path / "out")),
        lambda: pipeline.fit_files(folder),
    ):
        with refused("unsupported"):
            call()


# -- rows, folders ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_saved_pipeline_serves_rows_without_spark(table, clicks, tmp_path):
    path = str(tmp_path / "saved")
    pipeline = copy_of(PIPELINE).fit(table)
    pipeline.save(path)
    rows = clicks.slice(0, 20).to_pylist()
    program = (
        "import json, sys\n"
        "from bigdl.friesian.feature.pipeline import FeaturePipeline\n"
        "pipeline = FeaturePipeline.load(sys.argv[1])\n"
        "rows = [pipeline.transform_row(row) for row in json.loads(sys.argv[2])]\n"
        "assert 'pyspark' not in sys.modules and 'torch' not in sys.modules\n"
        "print(json.dumps(rows))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path, json.dumps(rows)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [pipeline.transform_row(row) for row in rows]


@pytest.mark.slow
def test_a_loaded_pipeline_is_the_one_that_was_saved(table, tmp_path):
    pipeline = copy_of(PIPELINE).fit(table)
    pipeline.save(str(tmp_path / "saved"))
    pipeline.save(str(tmp_path / "saved"))  # replaces the first
    loaded = FeaturePipeline.load(str(tmp_path / "saved"))
    assert states(loaded) == states(pipeline)
    assert loaded.explain() == pipeline.explain()
    assert loaded.feature_schema() == pipeline.feature_schema()
    assert loaded.transform(table).to_pandas().equals(pipeline.transform(table).to_pandas())
    assert not list((tmp_path / "saved").glob("*.pkl"))


@pytest.mark.slow
def test_a_pipeline_that_has_not_learned_can_be_saved(table, tmp_path):
    PIPELINE.save(str(tmp_path / "saved"))
    loaded = FeaturePipeline.load(str(tmp_path / "saved"))
    with pytest.raises(UsageError, match="call fit first"):
        loaded.transform_row({})
    assert_same_states(copy_of(loaded).fit(table), copy_of(PIPELINE).fit(table))


@pytest.mark.slow
def test_folders_of_any_file_system_hold_pipelines(table):
    copy_of(PIPELINE).fit(table).save("memory://pipelines/one")
    assert FeaturePipeline.load("memory://pipelines/one").transform_row(
        {"user": "u1", "item": 3, "price": None, "time": 0, "label": None}
    )


def test_columns_that_nobody_reads_may_be_missing(table, folder, tmp_path):
    pipeline = FeaturePipeline().category_encode("item").rename({"label": "clicked"})
    pipeline = pipeline.select("clicked", "item").fit(table)
    assert pipeline.transform_row({"item": 3, "more": 1}) == {"item": 3}
    assert pipeline.transform_row({"item": 3, "label": 1}) == {"clicked": 1, "item": 3}
    assert pipeline.transform(table.drop("label")).columns == ["item"]
    pq.write_table(pa.table({"item": pa.array([3], pa.int32())}), tmp_path / "one.parquet")
    pipeline.transform_files(str(tmp_path / "one.parquet"), str(tmp_path / "out"), host="here")
    assert pq.read_table(tmp_path / "out").to_pydict() == {"item": [3]}


def test_numbers_of_numpy_count_as_those_of_python(table):
    pipeline = FeaturePipeline().fillna(0.0, "price").category_encode("item").fit(table)
    row = {"item": np.int64(3), "price": np.float32(0.5)}
    assert pipeline.transform_row(row) == {"item": 3, "price": 0.5}


def test_a_recorded_method_leaves_the_pipeline_alone():
    first = FeaturePipeline().fillna(0, "a")
    second = first.fillna(0, "b")
    assert repr(first) == "<FeaturePipeline of 1 steps, has not learned>"
    assert repr(second) == "<FeaturePipeline of 2 steps, has not learned>"


def test_explain_says_what_was_learned(table):
    pipeline = FeaturePipeline().category_encode("item").min_max_scale("price")
    assert pipeline.explain().count("nothing yet") == 2
    text = pipeline.fit(table).explain()
    assert "29 rows" in text
    assert "2 values" in text
    assert "item int (30 values)" in text


def test_schema_has_all_numbers_that_can_occur(table):
    names = ["user", "item"]
    pipeline = FeaturePipeline().category_encode(names, oov_buckets=5).fillna(0, names)
    pipeline = pipeline.cross_columns([["user", "item"]], [99]).cut_bins("price", [0, 1])
    schema = pipeline.fit(table).feature_schema()
    assert schema.cardinality("item") == 29 + 5 + 1
    assert schema.cardinality("user_item") == 99
    assert schema.cardinality("price_bin") == 4
    assert schema["time"].cardinality is None


# -- wrong input -----------------------------------------------------------------------------------

WRONG = {
    "missing column": (lambda p: p.fillna(0, "nope"), "do not exist in this Table"),
    "fill of another kind": (lambda p: p.fillna("a", "item"), "string does not match the type"),
    "vocabulary of doubles": (lambda p: p.category_encode("price"), "cast or bin them first"),
    "cross of doubles": (lambda p: p.cross_columns(["user", "price"], 9), "cannot be hashed"),
    "double as text": (lambda p: p.cast("price", "string"), "cannot be cast to string"),
    "scaled text": (lambda p: p.min_max_scale("user"), "cannot be scaled"),
    "bins of text": (lambda p: p.cut_bins("user", 3), "should be a column of numbers"),
    "mask of numbers": (lambda p: p.mask("item"), "should be a column of arrays"),
    "renamed onto another": (lambda p: p.rename({"item": "user"}), "several columns"),
    "indicators of text": (lambda p: p.one_hot_encode("user"), "column of whole numbers"),
    "targets of text": (lambda p: p.target_encode("item", "user"), "column of numbers"),
    "labels too few": (lambda p: p.cut_bins("price", [0], ["a"]), "should be of length 2"),
    "mixed vocabulary": (
        lambda p: p.category_encode({"src_cols": ["user", "item"]}),
        "should be of one type",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_columns_that_do_not_fit_are_named_at_fit(table, wrong):
    record, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message):
        record(FeaturePipeline()).fit(table)


UNRECORDABLE = {
    "fill of a list": (lambda p: p.fillna([], "a"), "value should be int"),
    "no bound": (lambda p: p.clip("a"), "at least one of min and max"),
    "bounds in disorder": (lambda p: p.clip("a", 2, 1), "min should be smaller"),
    "empty range": (lambda p: p.min_max_scale("a", 1, 1), "min should be smaller"),
    "unknown hash": (lambda p: p.hash_encode("a", 5, "crc"), "method should be the name of a hash"),
    "no bins": (lambda p: p.hash_encode("a", 0), "bins should be a whole number"),
    "unknown type": (lambda p: p.cast("a", "money"), "dtype should be string"),
    "edges in disorder": (lambda p: p.cut_bins("a", [2, 1]), "should be ascending"),
    "one quantile": (lambda p: p.quantile_bins("a", 1), "integer of at least 2"),
    "regular expression": (lambda p: p.category_encode("a", sep="\\s"), "plain text"),
    "buckets of tokens": (
        lambda p: p.category_encode("a", do_split=True, oov_buckets=2),
        "cannot be used with do_split",
    ),
    "twins": (lambda p: p.select("a", "a"), "cols should differ from each other"),
    "no length": (lambda p: p.pad("a", 0), "seq_len should be a positive integer"),
    "no width": (lambda p: p.pad("a", 2, row_len=-1), "row_len should be an integer of at least 0"),
    "a list as token": (lambda p: p.pad("a", 2, mask_token=[0]), "mask_token should be a number"),
    "no mask": (lambda p: p.mask("a", 0), "seq_len should be a positive integer"),
    "negative history": (lambda p: p.add_hist_seq("a", "u", min_len=-1), "min_len should be"),
    "no history": (lambda p: p.add_hist_seq("a", "u", max_len=0), "max_len should be"),
    "no sequences": (lambda p: p.add_hist_seq("a", "u", num_seqs=0), "num_seqs should be"),
    "user of no text": (lambda p: p.add_hist_seq("a", 3), "user_col should be str"),
    "no other item": (lambda p: p.add_negative_samples(2), "item_size should be the largest item"),
    "no negatives": (lambda p: p.add_negative_samples(9, neg_num=0), "neg_num should be"),
    "item of no text": (lambda p: p.add_negative_samples(9, 3), "item_col should be str"),
    "no popularity": (
        lambda p: p.add_negative_samples(9, popularity=float("nan")),
        "popularity should be a number",
    ),
    "no other items": (lambda p: p.add_neg_hist_seq(2, "a", 1), "item_size should be the largest"),
    "how": (lambda p: p.dropna("a", how="some"), "how should be one of 'any', 'all'"),
    "columns of no text": (lambda p: p.dropna(3), "columns should be str or a list of str"),
    "labels": (lambda p: p.cut_bins("a", [1, 2], labels=["x"]), "labels should be of length 3"),
    "names of bins": (
        lambda p: p.cut_bins(["a", "b"], [1], out_cols=["x", "x"]),
        "out_cols should differ",
    ),
    "seed of folds": (lambda p: p.target_encode("a", "b", fold_seed="x"), "fold_seed should be"),
    "name of folds": (
        lambda p: p.target_encode("a", "b", out_cols="__fold__"),
        "out_cols and fold_col should differ",
    ),
    "a new name of no text": (lambda p: p.rename({"a": 3}), "columns should be a dictionary"),
    "counts of others": (lambda p: p.count_encode("a", counts=[]), "does not accept counts"),
    "condition of no text": (lambda p: p.filter(3), "condition should be str"),
}


@pytest.mark.parametrize("wrong", UNRECORDABLE)
def test_arguments_that_do_not_fit_are_refused_when_they_are_recorded(wrong):
    record, message = UNRECORDABLE[wrong]
    with pytest.raises(UsageError, match=message):
        record(FeaturePipeline())


ROWS = {
    "no column": ({}, r"lacks the columns \['item'\]"),
    "text for a number": ({"item": "3"}, "should be of type int"),
    "too large": ({"item": 2**31}, "cannot hold"),
    "truth for a number": ({"item": True}, "should be of type int"),
    "a fraction for a whole number": ({"item": 1.0}, "should be of type int"),
    "a date for text": ({"item": 1, "user": datetime.date.today()}, "should be of type string"),
}


@pytest.mark.parametrize("wrong", ROWS)
def test_rows_that_do_not_fit_are_refused(table, wrong):
    row, message = ROWS[wrong]
    pipeline = FeaturePipeline().category_encode("item").fit(table)
    with pytest.raises(UsageError, match=message):
        pipeline.transform_row(row)


def test_tables_and_files_that_do_not_fit_are_refused(table, folder, tmp_path):
    pipeline = FeaturePipeline().category_encode("item")
    with refused("not-fitted"):
        pipeline.transform(table)
    pipeline.fit(table)
    with refused("column-missing"):
        pipeline.transform(table.drop("item"))
    with refused("data-schema"):
        pipeline.transform(table.cast("item", "long"))
    with refused("argument-type", "FeatureTable", "DataFrame"):
        pipeline.fit([1])
    with refused("argument-conflict"):
        pipeline.transform_files(folder, folder, host="here")
    with refused("path-exists"):
        pipeline.transform_files(folder, str(tmp_path), host="here", mode="error")
    with refused("argument-value", "'arrow'", "'catalyst'"):
        pipeline.transform_files(folder, str(tmp_path), executor="dask")
    with refused("argument-value"):
        pipeline.transform_files(folder, str(tmp_path), host="moon")


def test_files_of_different_types_are_refused_by_every_host(table, folder, tmp_path):
    pq.write_table(pa.table({"item": pa.array([1], pa.int32())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"item": pa.array(["1"])}), tmp_path / "b.parquet")
    for host in ("here", "spark"):
        with refused("data-schema"):
            FeaturePipeline().category_encode("item").fit_files(str(tmp_path), host=host)


def test_folders_that_hold_no_pipeline_are_refused(tmp_path):
    with refused("path-missing"):
        FeaturePipeline.load(str(tmp_path / "nowhere"))
    (tmp_path / "data.csv").write_text("1")
    with refused("path-exists"):
        PIPELINE.save(str(tmp_path))
    path = tmp_path / "new"
    PIPELINE.save(str(path))
    content = json.loads((path / "pipeline.json").read_text())
    (path / "pipeline.json").write_text(json.dumps(content | {"version": 99}))
    with refused("version-unsupported", "99"):
        FeaturePipeline.load(str(path))
    (path / "pipeline.json").write_text("{")
    with refused("file-damaged"):
        FeaturePipeline.load(str(path))


@pytest.mark.slow
def test_tables_without_rows_teach_what_files_without_rows_do(table, clicks, tmp_path):
    pipeline = FeaturePipeline().category_encode("user").min_max_scale("price")
    spark = table.df.sparkSession
    empty = clicks.slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    for none in (
        table.filter("1 = 0"),
        spark.createDataFrame([], table.schema),
        spark.read.parquet(str(tmp_path / "empty.parquet")),
    ):
        found = pipeline.fit(none).transform(table)
        assert found.columns == table.columns
        assert pipeline.feature_schema()["user"].cardinality == 1
    with pytest.raises(UsageError, match="price"):
        pipeline.fill_median("price").fit(table.filter("1 = 0"))


@pytest.mark.slow
def test_negatives_of_a_pipeline_know_users_and_popularity(table):
    table = FeatureTable(table.fillna(1, "item").df.coalesce(1))
    arguments = {"item_size": 30, "seed": 3, "user_col": "user", "popularity": 0.75}
    pipeline = FeaturePipeline().add_negative_samples(**arguments)
    found = pipeline.fit_transform(table).sort("time", "label", "item")
    wanted = table.add_negative_samples(**arguments).sort("time", "label", "item")
    assert found.to_dict() == wanted.to_dict()
    assert pipeline.feature_schema()["item"].cardinality == 30


def test_explain_says_what_is_read(table):
    pipeline = (
        FeaturePipeline()
        .fillna(0, None)
        .cross_columns([["user", "item"]], [9])
        .target_encode("user", "label", kfold=1)
        .cut_bins("price", [0.0])
        .filter("item > 3")
        .add_hist_seq("item", "user")
        .add_negative_samples(30, user_col="user")
        .drop("label")
    )
    wanted = [
        "all that fit",
        "user, item",
        "user, label",
        "price",
        "item > 3",
        "item, user, time",
        "item, user",
        "",
    ]
    assert _reads(pipeline) == wanted
    fitted = _reads(pipeline.fit(table))
    assert fitted[1:] == wanted[1:]
    assert "label" in fitted[0]


def _reads(pipeline):
    """Return the second column of ``explain``."""
    heads, *lines = pipeline.explain().splitlines()
    begin, end = heads.index("reads"), heads.index("makes")
    return [line[begin:end].strip() for line in lines if not line.startswith("result")]
