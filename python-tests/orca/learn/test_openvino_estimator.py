"""The OpenVINO Estimator: a network's outputs for distributed rows, in the form of the input."""

import numpy as np
import openvino
import pandas as pd
import pytest
from pyspark.ml.linalg import VectorUDT
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.data import XShards
from bigdl.orca.learn.openvino import Estimator

ops = openvino.opset13
ROWS = 13
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)


def save(network, folder):
    openvino.save_model(network, folder / "m.xml", compress_to_fp16=False)
    return str(folder / "m.xml")


def doubled(rows=-1):
    """2 x, for any number of rows or a fixed one that a constant in it demands."""
    x = ops.parameter([rows, 3], np.float32, name="x")
    flat = ops.reshape(x, np.array([rows * 3 if rows > 0 else -1], np.int64), False)
    back = ops.reshape(flat, np.array([rows, 3], np.int64), False)
    return openvino.Model([ops.multiply(back, np.array([2.0], np.float32))], [x])


def sums():
    """Two inputs, and outputs ``sum`` of shape (rows, 3) and ``first`` of shape (rows,)."""
    a = ops.parameter([1, 3], np.float32, name="a")
    b = ops.parameter([1, 3], np.float32, name="b")
    total, ratio = ops.add(a, ops.multiply(b, np.array([10.0], np.float32))), ops.subtract(a, b)
    first = ops.gather(ratio, np.array(0, np.int64), np.array(1, np.int64))
    total.output(0).set_names({"sum"})
    first.output(0).set_names({"first"})
    return openvino.Model([total, first], [a, b])


@pytest.fixture(scope="module", params=["any rows", "four rows"])
def single(request, tmp_path_factory):
    network = doubled(4 if request.param == "four rows" else -1)
    return Estimator.from_openvino(model_path=save(network, tmp_path_factory.mktemp("single")))


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    path = save(sums(), tmp_path_factory.mktemp("double"))
    return Estimator.from_openvino(model_path=path)


@pytest.fixture(scope="module")
def frame(orca_spark):
    table = pd.DataFrame({"id": range(ROWS), "x": list(X), "y": list(Y)})
    return orca_spark.createDataFrame(table).repartition(3, "id").cache()


@pytest.mark.slow_cases("four rows")
def test_one_output_of_every_kind_of_input(single, frame):
    found = single.predict(frame, feature_cols=["x"], batch_size=3)
    assert found.columns == ["id", "x", "y", "prediction"]
    assert isinstance(found.schema["prediction"].dataType, VectorUDT)
    for row in found.collect():
        np.testing.assert_allclose(row.prediction, 2 * X[row.id], rtol=1e-5)
    np.testing.assert_allclose(single.predict(X, batch_size=5), 2 * X, rtol=1e-5)
    shards = single.predict(XShards.partition({"x": X}, num_shards=2), batch_size=3).collect()
    assert all(list(shard) == ["x", "prediction"] for shard in shards)
    found = np.concatenate([shard["prediction"] for shard in shards])
    np.testing.assert_allclose(found, 2 * X, rtol=1e-5)


def test_several_outputs_are_columns_by_their_names(double, frame):
    found = double.predict(frame, feature_cols=["x", "y"])
    assert found.columns == ["id", "x", "y", "sum", "first"]
    for row in found.collect():
        np.testing.assert_allclose(row["sum"], X[row.id] + 10 * Y[row.id], rtol=1e-4, atol=1e-5)
        assert row["first"] == pytest.approx(X[row.id, 0] - Y[row.id, 0], abs=1e-5)
    named = double.predict(frame, feature_cols=["x", "y"], output_cols=["s", "f"])
    assert named.columns[-2:] == ["s", "f"]


def test_input_cols_say_which_feature_is_which_input(double, orca_spark):
    total, first = double.predict([Y, X], input_cols=["b", "a"], config={"CPU_THREADS_NUM": 1})
    np.testing.assert_allclose(total, X + 10 * Y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first, X[:, 0] - Y[:, 0], atol=1e-5)
    shards = double.predict(XShards.partition({"x": (Y, X)}), input_cols=["b", "a"]).collect()
    found = np.concatenate([shard["prediction"][1] for shard in shards])
    np.testing.assert_allclose(found, first, atol=1e-6)


@pytest.mark.slow_cases("four rows")
def test_a_function_of_sql_gives_what_predict_gives(single, double, frame, orca_spark):
    function = single.as_udf("x", batch_size=3)
    predicted = single.predict(frame, feature_cols=["x"]).collect()
    scored = frame.select("id", function("x").alias("y")).collect()
    found = {row.id: row.y for row in scored}
    assert found == {row.id: np.float32(row.prediction.toArray()).tolist() for row in predicted}
    double.register("both", input_cols=["b", "a"], sample=[Y, X])
    frame.createOrReplaceTempView("rows")
    scored = orca_spark.sql("select id, both(y, x) as z from rows")
    assert scored.schema["z"].dataType.simpleString() == "struct<sum:array<float>,first:float>"
    for row in scored.collect():
        np.testing.assert_allclose(row.z["sum"], X[row.id] + 10 * Y[row.id], rtol=1e-4, atol=1e-5)
        assert row.z["first"] == pytest.approx(X[row.id, 0] - Y[row.id, 0], abs=1e-5)


def test_a_function_of_inputs_of_any_size_needs_a_sample(orca_spark, tmp_path):
    x = ops.parameter([-1, -1], np.float32, name="x")
    network = openvino.Model([ops.relu(x)], [x])
    estimator = Estimator.from_openvino(model_path=save(network, tmp_path))
    with refused("argument-missing", "'x'"):
        estimator.as_udf()
    assert estimator.as_udf(sample=X) is not None


def test_load_replaces_the_network(frame, tmp_path):
    (tmp_path / "other").mkdir()
    est = Estimator.from_openvino(model_path=save(doubled(), tmp_path))
    np.testing.assert_allclose(est.predict(X), 2 * X, rtol=1e-5)
    x = ops.parameter([-1, 3], np.float32, name="x")
    column = ops.reduce_sum(x, np.array([1], np.int64), True)
    est.load(save(openvino.Model([column], [x]), tmp_path / "other"))
    np.testing.assert_allclose(est.predict(X), X.sum(1, keepdims=True), rtol=1e-4, atol=1e-5)


WRONG = {
    "fit": (lambda e: e.fit(X), "fit is not implemented"),
    "evaluate": (lambda e: e.evaluate(X), "evaluate is not implemented"),
    "get_model": (lambda e: e.get_model(), "not implemented"),
    "save": (lambda e: e.save("p"), "not implemented"),
    "tensorboard": (lambda e: e.set_tensorboard("d", "a"), "not implemented"),
    "train summary": (lambda e: e.get_train_summary(), "not implemented"),
    "validation summary": (lambda e: e.get_validation_summary(), "not implemented"),
    "clearing": (lambda e: e.clear_gradient_clipping(), "not implemented"),
    "constant": (lambda e: e.set_constant_gradient_clipping(0, 1), "not implemented"),
    "norm": (lambda e: e.set_l2_norm_gradient_clipping(1.0), "not implemented"),
    "checkpoint": (lambda e: e.load_orca_checkpoint("p"), "not implemented"),
    "batch size": (lambda e: e.predict([X, Y], batch_size=0), "positive integer"),
    "input names": (lambda e: e.predict([X, Y], input_cols=["a", "c"]), r"inputs \['a', 'b'\]"),
    "config": (lambda e: e.predict([X, Y], config=3), "config should be a dict"),
    "property": (lambda e: e.predict([X, Y], config={"NO": 1}), "NO"),
    "one input": (lambda e: e.predict(X), "2 inputs .*got 1 features"),
    "kind": (lambda e: e.predict(3), "Only XShards or Spark DataFrame"),
    "file": (lambda e: e.load("/nowhere/m.xml"), "cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_said(double, orca_spark, case):
    call, text = WRONG[case]
    with pytest.raises(UsageError, match=text):
        call(double)
