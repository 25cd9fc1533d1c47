"""Prediction: a lazy column that keeps everything else of the DataFrame."""

import datetime
import decimal
import gc
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml.linalg import DenseVector, Vectors, VectorUDT
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql import types as T
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch import Estimator

ROWS = 40


def estimator(model, **options):
    return Estimator.from_torch(model=model, loss=nn.MSELoss(), workers_per_node=2, **options)


def net(config=None):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3)
    )


class Returns(nn.Module):
    """A model of one array column whose output is any function of it."""

    def __init__(self, output, config=None):
        super().__init__()
        self.output = output
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, *columns):
        return self.output(*columns)


def returning(output):
    return estimator(lambda config: Returns(output))


@pytest.fixture(scope="module")
def frame(orca_spark):
    """40 rows in 3 partitions: an id and an array `x` of two floats."""
    rows = orca_spark.range(0, ROWS, 1, 3)
    return rows.selectExpr("id", "array(double(id), double(-id)) as x").cache()


def predictions(frame, est, **options):
    """The prediction of every row, in the order of the ids."""
    found = est.predict(frame, **{"feature_cols": ["x"], **options})
    return [row.prediction for row in found.orderBy("id").collect()]


# -- columns and rows ---------------------------------------------------------------------------


def test_all_columns_and_the_order_within_partitions_are_kept(orca_spark):
    schema = T.StructType(
        [
            T.StructField("id", T.LongType(), False),
            T.StructField("text", T.StringType()),
            T.StructField("map", T.MapType(T.StringType(), T.DoubleType())),
            T.StructField(
                "struct",
                T.StructType(
                    [
                        T.StructField("a", T.IntegerType()),
                        T.StructField("b", T.ArrayType(T.StringType())),
                    ]
                ),
            ),
            T.StructField("date", T.DateType()),
            T.StructField("time", T.TimestampType()),
            T.StructField("local", T.TimestampNTZType()),
            T.StructField("price", T.DecimalType(12, 3)),
            T.StructField("vector", VectorUDT()),
            T.StructField("bytes", T.BinaryType()),
            T.StructField("flag", T.BooleanType()),
            T.StructField("small", T.ByteType()),
            T.StructField("x", T.DoubleType()),
        ]
    )
    when = datetime.datetime(2026, 11, 21, 7, 0, 0, 123456)

    def row(i):
        if i % 7 == 3:
            return (i, *[None] * 11, float(i))
        sparse = i % 2 == 0
        vector = Vectors.sparse(3, [1], [float(i)]) if sparse else Vectors.dense([1.0, 2.0, i])
        return (
            i,
            f"row {i}",
            {"a": 1.0, "b": None},
            (i, ["x", None, "z"]),
            when.date(),
            when,
            when,
            decimal.Decimal("12.345"),
            vector,
            bytes([i]),
            sparse,
            i,
            float(i),
        )

    data = [row(i) for i in range(30)]
    frame = orca_spark.createDataFrame(data, schema).repartition(3).cache()
    place = F.spark_partition_id().alias("partition")
    before = frame.select("*", place).collect()
    found = returning(lambda x: 2 * x).predict(frame, feature_cols=["x"], batch_size=4)
    assert found.schema.fields[:-1] == schema.fields
    assert found.schema.fields[-1] == T.StructField("prediction", T.FloatType())
    after = found.select(*frame.columns, place, "prediction").collect()
    assert [r[:-1] for r in after] == [tuple(r) for r in before]
    assert [r.prediction for r in after] == [2 * r.x for r in before]


def test_nothing_runs_before_an_action(frame, tmp_path):
    log = tmp_path / "calls"
    log.touch()

    def output(x):
        with open(log, "a") as file:
            file.write(f"{len(x)}\n")
        return 2 * x

    tracker = frame.sparkSession.sparkContext.statusTracker()
    jobs = set(tracker.getJobIdsForGroup(None))
    found = returning(output).predict(frame, feature_cols=["id"], batch_size=7)
    assert set(tracker.getJobIdsForGroup(None)) == jobs
    assert log.read_text() == "2\n"  # made-up rows, on the driver
    assert found.agg(F.sum("prediction")).first()[0] == 1560
    assert set(tracker.getJobIdsForGroup(None)) != jobs
    assert sum(map(int, log.read_text().split())) == 2 + ROWS


def test_every_row_is_predicted_once(frame, tmp_path):
    def output(x):
        for value in x[:, 0].tolist():
            with open(tmp_path / str(value), "a") as file:
                file.write("x")
        return x[:, 0]

    est = returning(output)
    found = est.predict(frame, feature_cols=["x"], batch_size=6)
    for path in tmp_path.iterdir():  # what was tried beforehand
        path.unlink()
    assert sorted(r.prediction for r in found.collect()) == list(range(ROWS))
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        str(float(i)): "x" for i in range(ROWS)
    }


@pytest.mark.slow
def test_the_result_is_a_dataframe_like_any_other(frame):
    found = returning(lambda x: x[:, 0] + 0.5).predict(frame, feature_cols=["x"])
    assert found.filter("prediction > 30").count() == 10
    assert found.filter("prediction > 30").count() == 10
    assert len(found.limit(5).collect()) == 5
    joined = found.join(frame.selectExpr("id", "id % 2 as odd"), "id").groupBy("odd").count()
    assert {(r.odd, r["count"]) for r in joined.collect()} == {(0, 20), (1, 20)}
    twice = found.withColumnRenamed("prediction", "first")
    again = returning(lambda y: 2 * y).predict(twice, feature_cols=["first"])
    assert again.agg(F.sum("prediction")).first()[0] == 2 * (780 + 0.5 * ROWS)


def test_a_table_without_rows(frame):
    est = returning(lambda x: x)
    for nothing in (frame.limit(0), frame.filter("id < 0")):
        found = est.predict(nothing, feature_cols=["x"])
        assert found.columns == ["id", "x", "prediction"]
        assert found.collect() == []


def test_partitions_without_rows(frame):
    found = returning(lambda x: x[:, 0]).predict(frame.filter("id > 35"), feature_cols=["x"])
    assert sorted(r.prediction for r in found.collect()) == [36, 37, 38, 39]


def test_columns_may_have_any_name(frame):
    names = ["a.b", "with space", "quo`te", "ünï", "Id 2", "select", "c0"]
    renamed = frame.select("id", *[F.col("x").alias(name) for name in names])
    est = returning(lambda *xs: sum(x[:, 0] for x in xs))
    found = est.predict(renamed, feature_cols=names, output_cols="p.q`r")
    assert found.columns == ["id", *names, "p.q`r"]
    assert sum(r[-1] for r in found.collect()) == 780 * len(names)


def test_columns_of_one_name_are_kept(frame):
    doubled = frame.select("id", "x", F.lit("a").alias("t"), F.lit("b").alias("t"))
    found = returning(lambda x: x[:, 0]).predict(doubled, feature_cols=["x"])
    assert found.columns == ["id", "x", "t", "t", "prediction"]
    assert tuple(found.collect()[0])[2:4] == ("a", "b")


# -- what a model returns -----------------------------------------------------------------------

NUMBER, VECTOR = T.FloatType(), VectorUDT()


MATRIX = T.ArrayType(T.ArrayType(NUMBER))
OUTPUTS = [
    (lambda x: x[:, 0], NUMBER, 3.0),
    (lambda x: x[:, :1], NUMBER, 3.0),
    (lambda x: x[:, :1, None], NUMBER, 3.0),
    (lambda x: x[:, :1].squeeze(), NUMBER, 3.0),
    (lambda x: x[:, 0].long() + 2**40, T.LongType(), 2**40 + 3),
    (lambda x: x[:, 0].int(), T.IntegerType(), 3),
    (lambda x: x[:, 0].to(torch.int8), T.ByteType(), 3),
    (lambda x: x[:, 0].abs().to(torch.uint8), T.ShortType(), 3),
    (lambda x: x[:, 0].abs().to(torch.uint64), T.LongType(), 3),
    (lambda x: x[:, 0] > 0, T.BooleanType(), True),
    (lambda x: x[:, 0].double() / 9, T.DoubleType(), 3 / 9),
    (lambda x: x[:, 0].bfloat16(), NUMBER, 3.0),
    (lambda x: x[:, 0].half(), NUMBER, 3.0),
    (lambda x: x.double() / 9, VECTOR, DenseVector([3 / 9, -3 / 9])),
    (lambda x: x.long() * 2**40, T.ArrayType(T.LongType()), [3 * 2**40, -3 * 2**40]),
    (lambda x: x > 0, T.ArrayType(T.BooleanType()), [True, False]),
    (lambda x: x[:, None].int(), T.ArrayType(T.ArrayType(T.IntegerType())), [[3, -3]]),
    (lambda x: x[:, 0].clone().requires_grad_(), NUMBER, 3.0),
    (lambda x: x, VECTOR, DenseVector([3, -3])),
    (lambda x: x[:, :, None], VECTOR, DenseVector([3, -3])),
    (lambda x: x.squeeze(), VECTOR, DenseVector([3, -3])),
    (lambda x: x[:, :0], VECTOR, DenseVector([])),
    (lambda x: x[:, None, :], MATRIX, [[3.0, -3.0]]),
    (lambda x: x[:, None, :].squeeze(), VECTOR, DenseVector([3, -3])),
    (
        lambda x: torch.stack([x, 2 * x], 2)[:, None],
        T.ArrayType(MATRIX),
        [[[3.0, 6.0], [-3.0, -6.0]]],
    ),
]


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("batch_size", [1, 5])
def test_outputs_become_columns(frame, batch_size):
    functions = [output for output, _, _ in OUTPUTS]

    def everything(x):
        return {f"o{i}": function(x) for i, function in enumerate(functions)}

    found = returning(everything).predict(frame, feature_cols=["x"], batch_size=batch_size)
    assert [field.dataType for field in found.schema.fields[2:]] == [kind for _, kind, _ in OUTPUTS]
    assert list(found.filter("id = 3").collect()[0][2:]) == [expected for _, _, expected in OUTPUTS]


def test_several_outputs_are_an_array_of_vectors(frame):
    est = returning(lambda x: [x, x[:, 0], x[:, None, :]])
    found = est.predict(frame, feature_cols=["x"], batch_size=7)
    assert found.schema["prediction"].dataType == T.ArrayType(VECTOR)
    both = DenseVector([3, -3])
    assert found.filter("id = 3").collect()[0].prediction == [both, DenseVector([3]), both]
    single = returning(lambda x: (x[:, 0],)).predict(frame, feature_cols=["x"])
    assert single.schema["prediction"].dataType == NUMBER


def test_outputs_can_have_names(frame):
    est = returning(lambda x: (x[:, 0], x))
    found = est.predict(frame, feature_cols=["x"], output_cols=["first", "both"])
    assert [f.dataType for f in found.schema.fields[-2:]] == [NUMBER, VECTOR]
    assert found.filter("id = 2").select("first", "both").collect()[0] == Row(
        2.0, DenseVector([2, -2])
    )
    with refused("argument-value", "2", "output_cols", "3"):
        est.predict(frame, feature_cols=["x"], output_cols=["a", "b", "c"])


@pytest.mark.slow
def test_a_dict_has_names_of_its_own(frame):
    est = returning(lambda x: {"logit": x[:, 0], "hidden": x})
    found = est.predict(frame, feature_cols=["x"])
    assert found.columns == ["id", "x", "logit", "hidden"]
    assert found.filter("id = 2").collect()[0][2:] == (2.0, DenseVector([2, -2]))
    chosen = est.predict(frame, feature_cols=["x"], output_cols=["hidden"])
    assert chosen.filter("id = 2").collect()[0][2:] == (DenseVector([2, -2]),)
    renamed = est.predict(frame, feature_cols=["x"], output_cols=["a", "b"])
    assert renamed.filter("id = 2").collect()[0][2:] == (2.0, DenseVector([2, -2]))
    with pytest.raises(UsageError, match=r"returns 2 outputs \(logit, hidden\) but output_cols"):
        est.predict(frame, feature_cols=["x"], output_cols=["a"])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: "text", ("model-output",)),
        (lambda x: [x, [x]], ("model-output",)),
        (lambda x: x.sum(), ("model-output", "2")),
        (lambda x: x.flatten(), ("model-output", "4", "2")),
        (lambda x: torch.complex(x, x), ("model-output", "view_as_real")),
    ],
)
def test_outputs_that_cannot_become_columns(frame, output, message):
    with refused(*message):
        returning(output).predict(frame, feature_cols=["x"])


def test_inputs_of_every_kind(orca_spark):
    schema = T.StructType(
        [
            T.StructField("id", T.LongType()),
            T.StructField("flag", T.BooleanType()),
            T.StructField("price", T.DecimalType(8, 2)),
            T.StructField("vector", VectorUDT()),
            T.StructField("map", T.MapType(T.StringType(), T.ArrayType(T.FloatType()))),
        ]
    )
    rows = [
        (i, i % 2 == 0, decimal.Decimal(i), Vectors.dense([i, 1]), {"b": [1.0 * i], "a": [0.5]})
        for i in range(6)
    ]
    frame = orca_spark.createDataFrame(rows, schema)

    def output(i, flag, price, vector, map):
        assert (i.dtype, flag.dtype) == (torch.int64, torch.bool)
        assert price.dtype == vector.dtype == map["b"].dtype == torch.float32
        return i + flag.float() + price + vector.sum(1) + map["b"][:, 0] + map["a"][:, 0]

    found = returning(output).predict(
        frame, feature_cols=["id", "flag", "price", "vector", "map"], batch_size=4
    )
    assert [r.prediction for r in found.orderBy("id").collect()] == [
        4 * i + (i % 2 == 0) + 1.5 for i in range(6)
    ]


# -- models -------------------------------------------------------------------------------------


def adam(model, config=None):
    return torch.optim.Adam(model.parameters())


def test_predictions_equal_those_of_the_local_model(frame):
    est = estimator(net)
    found = np.array([v.toArray() for v in predictions(frame, est, batch_size=7)])
    rows = torch.tensor([r.x for r in frame.orderBy("id").collect()])
    with torch.no_grad():
        expected = est.get_model().eval()(rows).numpy()
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


def test_after_a_fit_the_shapes_are_known(orca_spark, tmp_path):
    (tmp_path / "log").mkdir()

    def noted(batches):
        for batch in batches:
            (tmp_path / "log" / "computed").touch()
            yield batch

    rows = orca_spark.range(30).selectExpr("array(double(id), 1d) as x", "double(id) as y")
    logged = rows.mapInArrow(noted, rows.schema)
    est = estimator(lambda config: nn.Linear(2, 1), optimizer=adam)
    est.fit(rows, feature_cols=["x"], label_cols=["y"])
    found = est.predict(logged, feature_cols=["x"])
    assert not list((tmp_path / "log").iterdir())
    assert found.schema["prediction"].dataType == NUMBER
    assert found.count() == 30


def test_a_model_that_takes_no_zeros_is_shown_a_row(orca_spark):
    def output(i):
        assert (i > 0).all()
        return torch.stack([i, i], 1).float()

    frame = orca_spark.range(1, 5).withColumnRenamed("id", "i")
    found = returning(output).predict(frame, feature_cols=["i"])
    assert found.schema["prediction"].dataType == VECTOR
    assert found.count() == 4


def test_a_prediction_is_what_the_model_was_when_it_was_asked_for(frame):
    labelled = frame.selectExpr("id", "x", "double(id) as y")
    est = estimator(net, optimizer=adam)
    before = est.predict(labelled, feature_cols=["x"]).select("id", "prediction")
    first = before.orderBy("id").collect()
    est.fit(labelled.selectExpr("id", "x", "array(y, y, y) as y"), feature_cols=["x"],
            label_cols=["y"])  # fmt: skip
    after = est.predict(labelled, feature_cols=["x"]).select("id", "prediction")
    assert before.orderBy("id").collect() == first
    assert after.orderBy("id").collect() != first


@pytest.mark.slow
def test_a_prediction_outlives_its_estimator(frame):
    est = returning(lambda x: x[:, 0])
    found = est.predict(frame, feature_cols=["x"])
    est.shutdown()
    del est
    gc.collect()
    assert found.agg(F.sum("prediction")).first()[0] == 780
    frame.sparkSession.sparkContext._jvm.System.gc()
    assert found.agg(F.sum("prediction")).first()[0] == 780


def test_models_take_turns(frame):
    found = [
        returning(lambda x, k=k: k * x[:, 0]).predict(frame, feature_cols=["x"]) for k in range(3)
    ]
    for _ in range(2):
        sums = [f.agg(F.sum("prediction")).first()[0] for f in found]
        assert sums == [0, 780, 1560]
    both = found[1].join(found[2].selectExpr("id", "prediction as other"), "id")
    assert both.filter("other = 2 * prediction").count() == ROWS


@pytest.mark.parametrize("model", [lambda config: net(), net()], ids=["creator", "module"])
def test_one_model_is_broadcast_once(frame, model):
    est = estimator(model)
    est.predict(frame, feature_cols=["x"])
    first = est._shipped
    est.predict(frame, feature_cols=["x"])
    assert est._shipped is first


def test_a_module_of_the_user_is_predicted_with(frame):
    module = net().train()
    est = estimator(module)
    found = np.array([v.toArray() for v in predictions(frame, est)])
    rows = torch.tensor([r.x for r in frame.orderBy("id").collect()])
    assert module.training
    with torch.no_grad():
        expected = module.eval()(rows).numpy()
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_double_precision(frame):
    est = estimator(lambda config: nn.Linear(2, 1).double(), config={"dtype": "float64"})
    assert len(predictions(frame, est)) == ROWS


@pytest.mark.slow
def test_the_precision_is_that_of_the_estimator(frame):
    exact, rounded = (
        torch.tensor(np.stack([p.toArray() for p in predictions(frame, est)]))
        for est in (estimator(net), estimator(net, precision="bf16"))
    )
    assert torch.equal(rounded.to(torch.bfloat16).double(), rounded)
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).abs().max() < 0.02 * exact.abs().max()


def test_pandas_gets_the_predictions(frame):
    table = returning(lambda x: x[:, 0]).predict(frame, feature_cols=["x"]).toPandas()
    assert isinstance(table, pd.DataFrame)
    assert table["prediction"].dtype == np.float32


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_cols": "id"}, ("column-duplicate", "'id'")),
        ({"output_cols": "ID"}, ("column-duplicate", "'ID'")),
        ({"output_cols": ["a", "A"]}, ("column-duplicate", "'A'")),
        ({"feature_cols": None}, ("argument-missing", "feature_cols")),
        ({"feature_cols": ["y"]}, ("column-missing", "'y'")),
        ({"batch_size": 0}, ("argument-value", "batch_size", "0")),
        ({"callbacks": [print]}, ("argument-conflict",)),
        ({"data": 1.0}, ("data-type", "DataFrame")),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(frame, options, message):
    est = returning(lambda x: (x, x) if options.get("output_cols") == ["a", "A"] else x)
    with refused(*message):
        est.predict(**{"data": frame, "feature_cols": ["x"], **options})


def test_a_column_called_prediction_is_not_replaced(frame):
    est = returning(lambda x: x)
    taken = frame.withColumn("Prediction", F.lit(1))
    with refused("column-duplicate", "'prediction'"):
        est.predict(taken, feature_cols=["x"])
    assert est.predict(taken, feature_cols=["x"], output_cols="p").count() == ROWS


def test_outputs_of_several_dtypes_share_a_column_exactly(frame):
    """Ids and scores: an array has one type, a vector holds doubles."""
    est = returning(lambda x: (x, x.long() * (2**60 + 1)))
    found = est.predict(frame, feature_cols=["x"])
    assert found.schema["prediction"].dataType == T.StructType(
        [T.StructField("_1", VECTOR), T.StructField("_2", T.ArrayType(T.LongType()))]
    )
    (scores, ids) = found.filter("id = 3").first().prediction
    assert (scores, ids) == (DenseVector([3, -3]), [3 * (2**60 + 1), -3 * (2**60 + 1)])
    est = returning(lambda x: (x[:, 0].long(), x.long() * 2**60))
    found = est.predict(frame, feature_cols=["x"])
    assert found.schema["prediction"].dataType.simpleString() == "array<array<bigint>>"
    assert found.filter("id = 3").first().prediction == [[3], [3 * 2**60, -3 * 2**60]]


def test_columns_that_arrow_cannot_carry_stay(orca_spark):
    rows = orca_spark.sql(
        "SELECT float(id) x, id item, array() history, map() seen, make_ym_interval(1, 2) age,"
        " make_interval(0, 1, 0, 2) plan, struct(array() AS a) nested FROM range(3)"
    )
    if hasattr(T, "VariantType"):
        rows = rows.withColumn("document", F.parse_json(F.lit('{"a": 1}')))
    est = returning(
        lambda x, i: {"number": x, "i": i + 2**40, "both": torch.stack([x, x], 1), "no": x > 1}
    )
    found = est.predict(rows, feature_cols=["x", "item"])
    assert found.schema.fields[: len(rows.columns)] == rows.schema.fields
    shown = "item", "history", "seen", "string(age)", "string(plan)", "nested"
    assert found.selectExpr(*shown).collect() == rows.selectExpr(*shown).collect()
    plain = est.predict(rows.select("x", "item"), feature_cols=["x", "item"])
    names = "number", "i", "both", "no"
    assert found.select(*names).schema == plain.select(*names).schema
    assert found.select(*names).collect() == plain.select(*names).collect()
    for output in (lambda x, i: (x, x), lambda x, i: (x, i), lambda x, i: torch.stack([x, x], 1)):
        found = returning(output).predict(rows, feature_cols=["x", "item"]).select("prediction")
        plain = returning(output).predict(rows.select("x", "item"), feature_cols=["x", "item"])
        assert found.schema == plain.select("prediction").schema
        assert found.collect() == plain.select("prediction").collect()


def test_a_row_with_a_null_costs_itself_alone(orca_spark):
    rows = orca_spark.sql(
        "SELECT id, CASE id WHEN 1 THEN null WHEN 2 THEN array(1d, null) "
        "ELSE array(double(id), 2d) END AS x, if(id = 3, null, id) AS i FROM range(6)"
    ).coalesce(1)
    est = returning(lambda x, i: {"sum": x.sum(1), "both": x, "j": i, "many": x.long()})
    found = est.predict(rows, feature_cols=["x", "i"], batch_size=2).orderBy("id").collect()
    assert [(r["sum"], r["j"]) for r in found] == [
        *[(2.0, 0), (None, None), (None, None), (None, None)],
        *[(6.0, 4), (7.0, 5)],
    ]
    assert [r.both for r in found[3:5]] == [None, DenseVector([4, 2])]
    assert [r.many for r in found[3:5]] == [None, [4, 2]]
    nothing = rows.where("id IN (1, 2, 3)")
    assert [r["sum"] for r in est.predict(nothing, feature_cols=["x", "i"]).collect()] == [None] * 3


def test_a_model_that_cannot_be_shipped_is_refused(frame):
    lock = __import__("threading").Lock()
    with refused("model-copy"):
        returning(lambda x: (lock, x)[1]).predict(frame, feature_cols=["x"])


# -- what it imports -----------------------------------------------------------------------------

PROGRAMS = {
    "torch": "import torch; from bigdl.orca.learn.pytorch import Estimator; "
    "model = torch.nn.Linear(2, 1); make = Estimator.from_torch",
    "keras": "import keras; from bigdl.orca.learn.tf2 import Estimator; "
    "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]); "
    "make = Estimator.from_keras",
}


@pytest.mark.slow_cases("keras")
@pytest.mark.parametrize("framework", PROGRAMS)
def test_a_plain_prediction_imports_nothing_of_acceleration(framework):
    program = (
        f"{PROGRAMS[framework]}\n"
        "import sys, numpy as np\n"
        "make(model=model, backend='local').predict(np.zeros((3, 2), 'float32'))\n"
        "print([name for name in sys.modules if name.startswith('bigdl.nano.acceleration')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
