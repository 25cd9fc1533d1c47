"""Test encoders and scalers of XShards against pandas and Spark ML."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.data import SparkXShards
from bigdl.orca.data.transformer import (
    MinMaxScaler,
    StandardScaler,
    StringIndex,
    StringIndexer,
    category_encode,
    encode_string,
    gen_string_idx,
)
from bigdl.orca.data.transformer.scalers import Moments

FRAMES = [
    pd.DataFrame({"k": [1, 2], "city": ["oslo", None], "job": ["a,b", "c"]}),
    pd.DataFrame({"k": [3, 4, 5], "city": ["bern", "oslo", "rome"], "job": ["b", None, "b,b,a"]}),
    pd.DataFrame({"k": [], "city": [], "job": []}),
    pd.DataFrame({"k": [6], "city": ["bern"], "job": [""]}),
]


@pytest.fixture(scope="module")
def make(orca_spark):
    """Return a function that creates XShards from frames, one frame per partition."""

    def xshards(frames, parts=None):
        from bigdl.orca.data import shard

        rdd = orca_spark.sparkContext.parallelize(frames, parts or max(len(frames), 1))
        return shard.SparkXShards(rdd)

    return xshards


def table(shards):
    return pd.concat([f for f in shards.collect() if len(f)], ignore_index=True)


@pytest.mark.slow
def test_values_are_numbered_in_their_order_and_the_rest_is_zero(make):
    indexer = StringIndexer("city")
    encoded = indexer.fit_transform(make(FRAMES))
    assert table(encoded)["city"].tolist() == [2, 0, 1, 2, 3, 1]
    assert all(frame["city"].dtype == "int32" for frame in encoded.collect() if len(frame))
    assert [list(frame.columns) for frame in encoded.collect()] == [["k", "city", "job"]] * 4
    unseen = pd.DataFrame({"city": ["rome", "paris", np.nan, "bern"]}, index=[9, 7, 7, 1])
    after = table(indexer.transform(make([unseen, unseen.iloc[:0]])))
    assert after["city"].tolist() == [3, 0, 0, 1]


def test_the_numbers_do_not_depend_on_the_shards(make):
    values = [f"v{i % 7}" for i in range(60)]
    frame = pd.DataFrame({"a": values})
    whole = gen_string_idx(make([frame]), "a").to_dict()
    cut = [frame.iloc[i::5].sample(frac=1, random_state=i) for i in range(5)]
    assert gen_string_idx(make(cut), "a").to_dict() == whole
    assert whole == {f"v{i}": i + 1 for i in range(7)}


def test_order_by_frequency_and_limit(make):
    values = list("ccccaaabbbd")
    shards = make([pd.DataFrame({"x": values[:4]}), pd.DataFrame({"x": values[4:]})])
    index = gen_string_idx(shards, "x", order_by_freq=True)
    assert index.to_dict() == {"c": 1, "a": 2, "b": 3, "d": 4}
    assert gen_string_idx(shards, "x", freq_limit=3).to_dict() == {"a": 1, "b": 2, "c": 3}
    assert len(gen_string_idx(shards, "x", freq_limit={"x": 4})) == 1
    assert len(gen_string_idx(shards, "x", freq_limit={"other": 4})) == 4


def test_several_columns_and_one_vocabulary_for_two(make):
    frame = pd.DataFrame({"a": ["x", "y"], "b": ["y", "z"]})
    first, second, union = gen_string_idx(make([frame]), ["a", "b", {"src_cols": ["a", "b"]}])
    assert (first.to_dict(), second.to_dict()) == ({"x": 1, "y": 2}, {"y": 1, "z": 2})
    assert (union.col_name, union.to_dict()) == ("a_union", {"x": 1, "y": 2, "z": 3})
    encoded = encode_string(make([frame]), ["a", "b"], [union, union])
    assert encoded.collect()[0].to_numpy().tolist() == [[1, 2], [2, 3]]


def test_values_of_any_single_kind(make):
    frame = pd.DataFrame(
        {
            "int": [3, 1, 2, 1],
            "float": [2.5, np.nan, -1.0, 2.5],
            "bool": [True, False, False, True],
            "mixed": ["b", 2, None, "a"],
            "category": pd.Series(["y", "x", "y", "x"], dtype="category").cat.add_categories(["u"]),
            "nullable": pd.Series([5, None, 4, 5], dtype="Int64"),
            "object": pd.Series(["b", None, "a", np.nan], dtype=object),
            "time": pd.to_datetime(["2021-02-03", "2020-01-01", None, "2021-02-03"]),
            "nothing": [None] * 4,
        }
    )
    encoded, indices = category_encode(make([frame.iloc[:2], frame.iloc[2:]]), list(frame.columns))
    encoded = table(encoded)
    for name, index in zip(frame.columns, indices, strict=True):
        ids = index.to_dict()
        assert sorted(ids.values()) == list(range(1, frame[name].nunique() + 1)), name
        expected = [0 if pd.isna(v) else ids[v] for v in frame[name].tolist()]
        assert encoded[name].tolist() == expected, name


def test_cells_with_several_values(make):
    encoded, index = category_encode(make(FRAMES), "job", do_split=True, order_by_freq=True)
    assert index.to_dict() == {"b": 1, "a": 2, "": 3, "c": 4}
    jobs = [list(row) for row in table(encoded)["job"]]
    assert jobs == [[2, 1], [4], [1], [], [1, 1, 2], [3]]
    known = StringIndex.from_dict({"a": 2, "b": 1}, "job")
    rows = table(encode_string(make(FRAMES), "job", known, do_split=True, sort_for_array=True))
    assert rows["job"].tolist() == [[1, 2], [], [1], [], [1, 1, 2], []]
    best = encode_string(make(FRAMES), "job", known, do_split=True, keep_most_frequent=True)
    assert table(best)["job"].tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_spark_frames_get_the_same_numbers(make, orca_spark, split):
    frame = table(make(FRAMES))
    df = orca_spark.createDataFrame(
        [tuple(None if pd.isna(v) else v for v in row) for row in frame.itertuples(index=False)],
        "k bigint, city string, job string",
    )
    column = "job" if split else "city"
    here, index = category_encode(make(FRAMES), column, do_split=split)
    there, same = category_encode(df, column, do_split=split)
    assert same.to_dict() == index.to_dict()
    assert there.columns == ["k", "city", "job"]
    assert [row[column] for row in there.collect()] == table(here)[column].tolist()


@pytest.mark.slow
def test_an_index_is_a_spark_frame_too(orca_spark):
    index = StringIndex.from_dict({"b": 2, "a": 1}, "x")
    assert index.df.dtypes == [("x", "string"), ("id", "int")]
    assert StringIndex(index.df, "x").to_dict() == {"b": 2, "a": 1}
    index.broadcast()
    rows = orca_spark.createDataFrame([("a",), ("c",)], "x string").join(index.df, "x", "left")
    assert {tuple(row) for row in rows.collect()} == {("a", 1), ("c", None)}
    assert StringIndex.from_dict({1: 1, 5: 2}, "x").df.dtypes == [("x", "bigint"), ("id", "int")]
    assert StringIndex.from_dict({}, "x").df.count() == 0
    with pytest.raises(UsageError, match="y should be a column"):
        StringIndex(index.df, "y")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], "x"), "indices should be dict, but get list"),
        (({}, None), "col_name should be str, but get None"),
        (({}, 3), "col_name should be str, but get int"),
        (({"a": "b"}, "x"), "indices should have integers"),
    ],
)
def test_what_is_no_index(arguments, message):
    with pytest.raises(UsageError, match=message):
        StringIndex.from_dict(*arguments)


@pytest.mark.slow
def test_wrong_use_of_encoders_is_one_sentence(make):
    shards = make(FRAMES)
    with pytest.raises(UsageError, match="Please call fit_transform first"):
        StringIndexer("city").transform(shards)
    with pytest.raises(UsageError, match="no column 'town'"):
        StringIndexer("town").fit_transform(shards)
    with pytest.raises(UsageError, match="inputCol"):
        StringIndexer().fit_transform(shards)
    with pytest.raises(UsageError, match="SparkXShards"):
        gen_string_idx(FRAMES[0], "city")
    with pytest.raises(UsageError, match="dict"):
        gen_string_idx(make([{"city": 1}]), "city")
    with pytest.raises(UsageError, match="one index per column"):
        encode_string(shards, ["city", "job"], {})
    with pytest.raises(UsageError, match="freq_limit"):
        gen_string_idx(shards, "city", freq_limit="2")
    with pytest.raises(UsageError, match="src_cols"):
        gen_string_idx(shards, {"columns": ["city"]})
    indexer = StringIndexer("city")
    indexer.fit_transform(shards)
    with pytest.raises(UsageError, match="Please call fit_transform first"):
        indexer.setInputCol("job").transform(shards)


def numbers(rows=40, seed=0):
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "a": random.normal(1e6, 3.0, rows),
            "b": random.integers(-5, 5, rows),
            "same": np.full(rows, 7.0),
            "flag": random.integers(0, 2, rows).astype(bool),
            "vector": list(random.normal(size=(rows, 2))),
        }
    )


def spark_ml(spark, frame, columns, scaler):
    from pyspark.ml.feature import VectorAssembler

    df = spark.createDataFrame(frame[columns].astype(float).to_numpy().tolist(), columns)
    df = VectorAssembler(inputCols=columns, outputCol="in").transform(df)
    rows = scaler.setInputCol("in").setOutputCol("out").fit(df).transform(df).collect()
    return np.array([row["out"].toArray() for row in rows])


def test_min_max_is_that_of_spark_ml(make, orca_spark):
    from pyspark.ml import feature

    frame, columns = numbers(), ["a", "b", "same", "flag"]
    shards = make([frame.iloc[:7], frame.iloc[:0], frame.iloc[7:]])
    scaler = MinMaxScaler(min=-1.0, max=3.0, inputCol=columns, outputCol="out")
    out = np.stack(table(scaler.fit_transform(shards))["out"])
    oracle = spark_ml(orca_spark, frame, columns, feature.MinMaxScaler(min=-1.0, max=3.0))
    np.testing.assert_allclose(out, oracle, rtol=1e-9)
    assert (out.min(0)[[0, 1, 3]] == -1.0).all()
    assert (out.max(0)[[0, 1, 3]] == 3.0).all()


@pytest.mark.slow_cases("True-True")
@pytest.mark.parametrize(("mean", "std"), [(False, True), (True, True), (True, False)])
def test_standard_is_that_of_spark_ml(make, orca_spark, mean, std):
    from pyspark.ml import feature

    frame, columns = numbers(), ["a", "b", "same", "flag"]
    shards = make([frame.iloc[:7], frame.iloc[:0], frame.iloc[7:]])
    scaler = StandardScaler(withMean=mean, withStd=std, inputCol=columns, outputCol="out")
    out = np.stack(table(scaler.fit_transform(shards))["out"])
    oracle = spark_ml(
        orca_spark, frame, columns, feature.StandardScaler(withMean=mean, withStd=std)
    )
    np.testing.assert_allclose(out, oracle, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_scaler_keeps_the_rows_and_applies_what_it_learned(make):
    frame = numbers()
    low, high = frame["b"].min(), frame["b"].max()
    scaler = MinMaxScaler()
    scaler.setInputOutputCol("b", "scaled")
    out = table(scaler.fit_transform(make([frame.iloc[:30], frame.iloc[30:]])))
    pd.testing.assert_frame_equal(out.drop(columns="scaled"), frame)
    assert [cell.shape for cell in out["scaled"]] == [(1,)] * 40
    new = table(scaler.transform(make([pd.DataFrame({"b": [low, high, 2 * high - low]})])))
    np.testing.assert_allclose(np.stack(new["scaled"])[:, 0], [0, 1, 2])


def test_vectors_and_missing_values(make):
    frame = numbers(10)
    frame.loc[3, "a"] = np.nan
    frame["n"] = pd.array([None, *range(9)], dtype="Int64")
    frame.at[5, "vector"] = None
    scaler = StandardScaler(withMean=True, inputCol=["a", "vector", "n"], outputCol="out")
    out = np.stack(table(scaler.fit_transform(make([frame.iloc[:4], frame.iloc[4:]])))["out"])
    columns = {"a": frame["a"], "n": frame["n"].astype(float)}
    columns |= {i: frame["vector"].map(lambda v, i=i: v[i], na_action="ignore") for i in (0, 1)}
    oracle = pd.DataFrame({c: columns[c].astype(float) for c in ("a", 0, 1, "n")})
    np.testing.assert_allclose(out, ((oracle - oracle.mean()) / oracle.std()).to_numpy(), atol=1e-9)


def test_wrong_use_of_scalers_is_one_sentence(make):
    shards = make([numbers().assign(text="12"), numbers().assign(text="x")])
    with pytest.raises(UsageError, match="Please call fit_transform first"):
        MinMaxScaler(inputCol="a", outputCol="o").transform(shards)
    with refused("argument-type"):
        MinMaxScaler(inputCol="a").fit_transform(shards)
    with refused("argument-type"):
        StandardScaler(outputCol="a").fit_transform(shards)
    with refused("column-missing", "'z'"):
        StandardScaler(inputCol=["a", "z"], outputCol="o").fit_transform(shards)
    with refused("data-dtype", "'text'", "'12'"):
        StandardScaler(inputCol="text", outputCol="o").fit_transform(shards)
    with refused("argument-value"):
        MinMaxScaler(min=1.0, max=1.0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([[1.0], [np.nan]], ("data-empty",)),
        ([[[1.0], [1.0, 2.0]]], ("data-dtype", "'c0'")),
        ([], ("data-empty",)),
    ],
)
def test_what_cannot_be_scaled(make, columns, message):
    frame = pd.DataFrame({f"c{i}": values for i, values in enumerate(columns)})
    scaler = MinMaxScaler(inputCol=list(frame.columns) or "c0", outputCol="o")
    shards = make([frame] if columns else [])
    with refused(*message):
        scaler.fit_transform(shards)


def test_vectors_that_differ_between_shards_are_refused(make):
    frames = [pd.DataFrame({"v": [[1.0]]}), pd.DataFrame({"v": [[1.0, 2.0]]})]
    scaler, shards = MinMaxScaler(inputCol="v", outputCol="o"), make(frames)
    with pytest.raises(UsageError, match="different lengths"):
        scaler.fit_transform(shards)


@settings(max_examples=40)
@given(
    matrix=hnp.arrays(
        float,
        st.tuples(st.integers(2, 20), st.just(2)),
        elements=st.floats(-1e6, 1e6) | st.just(np.nan),
    ),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_moments_add_up(matrix, cuts):
    whole = Moments.of(matrix)
    total = Moments.merged([Moments.of(part) for part in np.split(matrix, sorted(cuts))])
    for name in ("known", "low", "high"):
        np.testing.assert_array_equal(getattr(total, name), getattr(whole, name))
    np.testing.assert_allclose(total.mean, whole.mean, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(total.squares, whole.squares, rtol=1e-9, atol=1e-3)


def test_star_import_has_the_names_of_programs():
    names = Counter()
    exec("from bigdl.orca.data.transformer import *", names)
    assert {"StringIndexer", "MinMaxScaler", "StandardScaler", "StringIndex"} <= set(names)
    assert {"np", "OrcaContext"} <= set(names)


def test_lists_of_values_are_encoded_value_by_value(orca_spark):
    cells = [["b", "a", None], [], None, ["a"]]
    frame = pd.DataFrame({"tags": cells})
    shards = SparkXShards(orca_spark.sparkContext.parallelize([frame], 1))
    spark_frame = orca_spark.createDataFrame([(each,) for each in cells], "tags array<string>")
    encoded, index = category_encode(shards, "tags")
    assert index.to_dict() == {"a": 1, "b": 2}
    assert encoded.first()["tags"].tolist() == [[2, 1], [], None, [1]]
    encoded, index = category_encode(spark_frame, "tags")
    assert [row["tags"] for row in encoded.collect()] == [[2, 1], [], None, [1]]
