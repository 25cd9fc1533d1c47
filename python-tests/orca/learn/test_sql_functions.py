"""Models as functions of SQL."""

import os

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.learn.prediction.outputs import OutputColumns, OutputSpec
from bigdl.orca.learn.pytorch import Estimator

ROWS = 50


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.embedding = torch.nn.Linear(2, 3), torch.nn.Embedding(3, 2)

    def forward(self, features, item):
        return {"wide": self.linear(features), "deep": self.embedding(item).sum(1)}


class Pair(torch.nn.Module):
    def forward(self, features):
        return features[:, 0], torch.stack([features, features], 1)


@pytest.fixture(scope="module")
def table(orca_spark):
    frame = orca_spark.range(ROWS).selectExpr(
        "id", "array(double(id), double(id % 7)) as f", "int(id % 3) as i", "float(id) as x"
    )
    frame = frame.withColumn("v", array_to_vector("f"))
    frame.createOrReplaceTempView("t")
    return frame


def values(frame) -> dict:
    """By id; vectors and structs as plain values."""
    return {row[0]: plain(row[1]) for row in frame.collect()}


def plain(value):
    if hasattr(value, "toArray"):
        return np.float32(value.toArray()).tolist()
    if hasattr(value, "asDict"):
        return [plain(each) for each in value]
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.slow_cases("matrix", "squeezed", "number")
@pytest.mark.parametrize(
    ("model", "columns", "type_"),
    [
        (torch.nn.Linear(2, 1), ["f"], "float"),
        (torch.nn.Linear(2, 3), ["v"], "array<float>"),
        (torch.nn.Unflatten(1, (2, 1, 1)), ["f"], "array<float>"),
        (torch.nn.Unflatten(1, (1, 2)), ["f"], "array<array<float>>"),
        (Named(), ["f", "i"], "struct<wide:array<float>,deep:float>"),
    ],
    ids=["number", "vector", "squeezed", "matrix", "struct"],
)
def test_a_function_gives_what_predict_gives(orca_spark, table, model, columns, type_):
    estimator = Estimator.from_torch(model=model)
    estimator.register("score", feature_cols=columns, sample=table)
    scored = orca_spark.sql(f"select id, score({', '.join(columns)}) as y from t")
    assert scored.schema["y"].dataType.simpleString() == type_
    predicted = estimator.predict(table, feature_cols=columns)
    names = ["wide", "deep"] if type_.startswith("struct") else ["prediction"]
    if len(names) > 1:
        predicted = predicted.selectExpr("id", "struct(wide, deep) as y")
    else:
        predicted = predicted.select("id", *names)
    assert values(scored) == values(predicted)


@pytest.mark.slow
def test_several_outputs_without_names_are_arrays_and_names_make_a_struct(orca_spark, table):
    estimator = Estimator.from_torch(model=Pair())
    together = estimator.as_udf("f", sample=table)
    row = table.where("id = 9").select(together("f").alias("y")).first()
    assert row.y == [[9.0], [9.0, 2.0, 9.0, 2.0]]
    named = estimator.as_udf("f", output_cols=["first", "both"], sample=table)
    row = table.where("id = 9").select(named("f").alias("y")).first()
    assert row.y.asDict() == {"first": 9.0, "both": [[9.0, 2.0], [9.0, 2.0]]}


def test_a_fitted_model_needs_no_sample_and_its_function_keeps_it(orca_spark, table):
    data = table.selectExpr("f", "x as y")
    estimator = Estimator.from_torch(
        model=torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0)),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 1e-4),
        loss=torch.nn.MSELoss(),
        backend="local",
    )
    columns = {"feature_cols": ["f"], "label_cols": ["y"], "batch_size": 25}
    estimator.fit(data.toPandas(), **columns)
    expected = values(estimator.predict(table, feature_cols=["f"]).select("id", "prediction"))
    function = estimator.as_udf()
    estimator.fit(data.toPandas(), **columns)
    assert values(table.select("id", function("f"))) == expected
    empty = table.where("id < 0").select("id", function("f"))
    assert empty.collect() == []


@pytest.mark.slow
def test_an_accelerated_function_agrees_with_the_model(orca_spark, table):
    estimator = Estimator.from_torch(model=torch.nn.Linear(2, 3))
    with pytest.raises(UsageError, match="needs sample rows to convert the model"):
        estimator.as_udf("f", accelerate="openvino_fp32")
    fast = estimator.as_udf("f", accelerate="openvino_fp32", sample=table)
    predicted = estimator.predict(table, feature_cols=["f"], accelerate="openvino_fp32")
    scored = values(table.select("id", fast("f")))
    assert scored == values(predicted.select("id", "prediction"))


@pytest.mark.slow
def test_each_python_worker_loads_the_model_once(orca_spark, table, tmp_path):
    folder = str(tmp_path)

    def creator(config):
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write("loaded\n")
        return torch.nn.Linear(2, 1)

    function = Estimator.from_torch(model=creator).as_udf("f", 2, sample=table)
    for file in tmp_path.iterdir():
        file.unlink()
    for _ in range(2):
        assert len(table.repartition(4).select(function("f").alias("y")).collect()) == ROWS
    loads = [file.read_text().count("loaded") for file in tmp_path.iterdir()]
    assert loads
    assert set(loads) == {1}


@pytest.mark.slow
def test_functions_of_pandas_give_the_same(orca_spark, table, monkeypatch):
    from pyspark.sql import functions

    estimator = Estimator.from_torch(model=Named())
    expected = values(table.select("id", estimator.as_udf(["f", "i"], sample=table)("f", "i")))
    with monkeypatch.context() as patch:
        patch.delattr(functions, "arrow_udf")
        function = estimator.as_udf(["f", "i"], sample=table)
    assert values(table.select("id", function("f", "i"))) == expected
    assert values(table.select("id", function("v", "i"))) == expected


def test_what_a_function_does_not_take_is_told(orca_spark, table):
    estimator = Estimator.from_torch(model=torch.nn.Linear(2, 1))
    with refused("not-fitted"):
        estimator.as_udf()
    with refused("data-empty"):
        estimator.as_udf("f", sample=table.where("id < 0"))
    function = estimator.as_udf("f", sample=pd.DataFrame({"f": [[1.0, 2.0]]}))
    with pytest.raises(Exception, match=r"takes 1 arguments \(f\), got 2"):
        table.select(function("f", "i")).collect()


NULLS = """
    SELECT id,
    CASE id WHEN 1 THEN null WHEN 2 THEN array(1f, null) ELSE array(float(id), 2f) END AS x,
    CASE id WHEN 3 THEN null ELSE map('a', if(id = 4, null, float(id))) END AS m FROM range(6)
"""


def test_a_row_with_a_null_has_a_null_value(orca_spark):
    rows = orca_spark.sql(NULLS)
    rows.createOrReplaceTempView("holes")
    estimator = Estimator.from_torch(model=torch.nn.Linear(2, 1))
    estimator.register("score", feature_cols=["x"], sample=rows)
    expected = {r.id: r.prediction for r in estimator.predict(rows, feature_cols=["x"]).collect()}
    assert [i for i, value in expected.items() if value is None] == [1, 2]
    assert values(orca_spark.sql("SELECT id, score(x) FROM holes")) == expected
    when = "SELECT id, CASE WHEN x IS NOT NULL THEN score(x) END FROM holes"
    assert values(orca_spark.sql(when)) == expected
    vectors = rows.where("id != 2").withColumn(
        "x", F.when(F.col("x").isNotNull(), array_to_vector("x"))
    )
    function = estimator.as_udf("x", sample=rows)
    assert values(vectors.select("id", function("x"))) == {
        i: value for i, value in expected.items() if i != 2
    }
    named = Estimator.from_torch(model=Named()).as_udf(["f", "i"], sample=orca_spark.table("t"))
    assert values(rows.select("id", named("x", F.expr("int(id % 3)"))))[2] is None


class OfMap(torch.nn.Module):
    def forward(self, x, m):
        return x.sum(1).double() + m["a"]


def test_nulls_within_maps_and_several_arguments(orca_spark):
    rows = orca_spark.sql(NULLS)
    estimator = Estimator.from_torch(model=OfMap())
    function = estimator.as_udf(["x", "m"], sample=rows)
    found = rows.select("id", function("x", "m").alias("y"))
    assert found.schema["y"].dataType.simpleString() == "double"
    assert values(found) == {0: 2.0, **dict.fromkeys([1, 2, 3, 4]), 5: 12.0}


class Ids(torch.nn.Module):
    def forward(self, item):
        return {"next": item + 2, "both": torch.stack([item, item], 1), "odd": item % 2 == 1}


def test_values_have_the_dtypes_of_the_outputs(orca_spark):
    rows = orca_spark.sql("SELECT 1099511627777L AS item")
    function = Estimator.from_torch(model=Ids()).as_udf("item", sample=rows)
    found = rows.select(function("item").alias("y"))
    assert found.schema["y"].dataType.simpleString() == (
        "struct<next:bigint,both:array<bigint>,odd:boolean>"
    )
    assert plain(found.first().y) == [1099511627779, [1099511627777] * 2, True]


def test_a_function_ends_with_its_context(orca_spark, table, monkeypatch):
    function = Estimator.from_torch(model=torch.nn.Linear(2, 1)).as_udf("f", sample=table)
    with monkeypatch.context() as patch:
        patch.setattr(orca_spark.sparkContext, "_jsc", None)  # as stop leaves it
        with refused("context-stopped"):
            function("f")


def test_the_type_of_joined_outputs():
    arrays = [np.arange(2, dtype=np.float32), np.ones((2, 1, 2), np.float32)]
    outputs = [OutputSpec(None, "float32"), OutputSpec(None, "float32", (1, 2))]
    columns = OutputColumns.of(outputs, None)
    assert columns.ddl == "array<array<float>>"
    both = [[[0.0], [1.0, 1.0]], [[1.0], [1.0, 1.0]]]
    assert columns.sql_value(arrays, 2).to_pylist() == both
    assert columns.sql_value([], 0).to_pylist() == []
    columns = OutputColumns.of([OutputSpec(None, "float32"), OutputSpec(None, "int64", (2,))], None)
    assert columns.ddl == "struct<`_1`:float,`_2`:array<bigint>>"
