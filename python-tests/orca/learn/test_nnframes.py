"""Stages of Spark ML learn what the Estimator learns, and Spark can work with them."""

import functools

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.orca.learn.nnframes import (
    ChainedPreprocessing,
    FeatureLabelPreprocessing,
    MLlibVectorToTensor,
    NNClassifier,
    NNClassifierModel,
    NNEstimator,
    NNImageReader,
    NNModel,
    ScalarToTensor,
    SeqToMultipleTensors,
    SeqToTensor,
    TrainSummary,
    ValidationSummary,
    trusted_loading,
)
from bigdl.orca.learn.optimizers import SGD
from bigdl.orca.learn.trigger import (
    EveryEpoch,
    MaxEpoch,
    MaxIteration,
    MaxScore,
    MinLoss,
    TriggerOr,
)
from bigdl.orca.torch import TorchLoss, TorchModel, TorchOptim

ROWS = 24


def linear(width=3, out=1):
    torch.manual_seed(3)
    return nn.Linear(width, out)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3))
    return x, x @ [1.0, -2.0, 0.5] + 0.25


@pytest.fixture(scope="module")
def frame(orca_spark, table):
    """Features as a vector and as an array, a target, and three classes by its size."""
    from pyspark.ml.linalg import Vectors

    x, y = table
    rows = [
        (i, Vectors.dense(a), a.tolist(), float(a[0]), float(b), float(b > -1) + float(b > 1))
        for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]
    names = ["id", "features", "array", "number", "label", "class"]
    made = orca_spark.createDataFrame(rows, names).repartitionByRange(2, "id").cache()
    yield made
    made.unpersist()


def full_batch_sgd(x, y, steps, lr):
    model = linear(x.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x)[:, 0], y).backward()
        optimizer.step()
    return model


def column(frame, name):
    return np.array([row[name] for row in frame.orderBy("id").select(name).collect()])


@pytest.mark.slow
def test_fit_is_the_training_of_one_process(frame, table):
    stage = NNEstimator(linear(), nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(4)
    model = stage.setLearningRate(0.1).fit(frame)
    expected = full_batch_sgd(*table, steps=4, lr=0.1)
    torch.testing.assert_close(model.getModel().weight, expected.weight)
    assert [e["epoch"] for e in stage.train_stats] == [1, 2, 3, 4]

    found = model.setPredictionCol("guess").transform(frame)
    assert found.columns == [*frame.columns, "guess"]
    assert found.schema["guess"].dataType.typeName() == "double"
    with torch.no_grad():
        wanted = expected(torch.tensor(table[0], dtype=torch.float32))[:, 0]
    np.testing.assert_allclose(column(found, "guess"), wanted, rtol=1e-5, atol=1e-6)


def test_setters_chain_and_getters_give_back():
    stage = (
        NNEstimator(linear(), nn.MSELoss())
        .setBatchSize(8)
        .setMaxEpoch(3)
        .setLearningRate(0.5)
        .setLearningRateDecay(0.1)
        .setFeaturesCol("f")
        .setLabelCol("l")
        .setPredictionCol("p")
        .setCachingSample(False)
        .setDataCacheLevel("DISK_AND_DRAM", 10)
        .setEndWhen(MaxEpoch(2))
        .setConstantGradientClipping(-1, 1)
        .setGradientClippingByL2Norm(2.0)
        .clearGradientClipping()
        .setCheckpoint("somewhere", EveryEpoch())
    )
    assert stage.getBatchSize() == 8
    assert stage.getMaxEpoch() == 3
    assert stage.getLearningRate() == 0.5
    assert stage.getLearningRateDecay() == 0.1
    assert (stage.getFeaturesCol(), stage.getLabelCol(), stage.getPredictionCol()) == (
        "f",
        "l",
        "p",
    )
    assert stage.isCachingSample() is False
    assert stage.getDataCacheLevel() == ("DISK_AND_DRAM", 10)
    assert stage.getEndWhen().max_epoch == 2
    assert stage.getCheckpoint()[0] == "somewhere"
    assert NNEstimator(linear(), nn.MSELoss()).getBatchSize() == 1


def test_a_copy_has_its_own_params_and_options():
    stage = NNEstimator(linear(), nn.MSELoss()).setMaxEpoch(3)
    other = stage.copy({stage.maxEpoch: 9})
    other.setEndWhen(MaxEpoch(1)).setBatchSize(5)
    assert (stage.getMaxEpoch(), stage.getEndWhen(), stage.getBatchSize()) == (3, None, 1)
    assert (other.getMaxEpoch(), other.uid) == (9, stage.uid)


@pytest.mark.parametrize("features", ["array", "number"])
def test_arrays_and_numbers_are_features(frame, table, features):
    width = 3 if features == "array" else 1
    stage = NNEstimator(linear(width), nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(2)
    model = stage.setFeaturesCol(features).setLearningRate(0.1).fit(frame)
    expected = full_batch_sgd(table[0][:, :width], table[1], steps=2, lr=0.1)
    torch.testing.assert_close(model.getModel().weight, expected.weight)
    assert column(model.transform(frame), "prediction").shape == (ROWS,)


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = linear()

    def forward(self, image):
        assert image.shape[1:] == (1, 3)
        return self.line(image[:, 0])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = linear()

    def forward(self, first, second):
        return self.line(torch.cat([first, second], dim=1))


@pytest.mark.slow_cases("chain")
@pytest.mark.parametrize(
    ("model", "preprocessing"),
    [
        (Image(), [1, 3]),
        (lambda config: Image(), MLlibVectorToTensor([1, 3])),
        (Image(), lambda row: row.reshape(1, 3)),
        (Image(), ChainedPreprocessing([SeqToTensor([3]), lambda row: row[None]])),
        (Two(), [[1], [2]]),
    ],
    ids=["size", "named, creator", "function", "chain", "several"],
)
def test_features_are_preprocessed_in_fit_and_transform(frame, table, model, preprocessing):
    stage = NNEstimator(model, nn.MSELoss(), preprocessing).setBatchSize(ROWS).setMaxEpoch(1)
    trained = stage.setLearningRate(0.1).fit(frame)
    expected = full_batch_sgd(*table, steps=1, lr=0.1)
    torch.testing.assert_close(trained.getModel().line.weight, expected.weight)
    with torch.no_grad():
        wanted = expected(torch.tensor(table[0], dtype=torch.float32))[:, 0]
    np.testing.assert_allclose(
        column(trained.transform(frame), "prediction"), wanted, rtol=1e-5, atol=1e-6
    )


def test_labels_are_preprocessed(frame, table):
    stage = NNEstimator(linear(), nn.MSELoss(), [3], lambda label: label * 2)
    stage.setBatchSize(ROWS).setMaxEpoch(1).setLearningRate(0.1)
    expected = full_batch_sgd(table[0], table[1] * 2, steps=1, lr=0.1)
    torch.testing.assert_close(stage.fit(frame).getModel().weight, expected.weight)
    other = NNEstimator(linear(), nn.MSELoss()).setSamplePreprocessing(
        FeatureLabelPreprocessing(SeqToTensor([3]), ScalarToTensor())
    )
    other.setBatchSize(ROWS).setMaxEpoch(1).setLearningRate(0.1)
    expected = full_batch_sgd(*table, steps=1, lr=0.1)
    torch.testing.assert_close(other.fit(frame).getModel().weight, expected.weight)


def test_one_row_and_a_batch_agree():
    row = np.arange(6.0)
    for each in (SeqToTensor([2, 3]), ChainedPreprocessing([[6], SeqToTensor([3, 2])])):
        torch.testing.assert_close(each(row), each.batch(torch.tensor(row)[None].float())[0])
    first, second = SeqToMultipleTensors([[2], [2, 2]])(row)
    assert (first.shape, second.shape) == ((2,), (2, 2))
    assert ScalarToTensor()(3.0).tolist() == [3.0]


# -- when a training ends -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "epochs"),
    [
        (MaxEpoch(2), 2),
        (MaxIteration(3), 2),  # of two steps each
        (MinLoss(1e9), 1),
        (TriggerOr(MaxIteration(2), MinLoss(-1.0)), 1),
    ],
)
def test_end_when(frame, trigger, epochs):
    stage = NNEstimator(linear(), nn.MSELoss()).setBatchSize(ROWS // 2).setEndWhen(trigger)
    stage.fit(frame)
    assert len(stage.train_stats) == epochs


def test_a_score_ends_a_training(frame):
    stage = NNEstimator(linear(), nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(3)
    stage.setValidation(EveryEpoch(), frame, ["mse"], 4).setEndWhen(MaxScore(0.0)).fit(frame)
    assert len(stage.train_stats) == 1
    assert stage.train_stats[0]["val_mse"] > 0


# -- options ------------------------------------------------------------------------------------


def test_optimizers_in_every_form(frame):
    weights = []
    module = linear()
    forms = [
        torch.optim.Adam,
        "adam",
        lambda model, config: torch.optim.Adam(model.parameters(), lr=0.1),
        torch.optim.Adam(module.parameters(), lr=0.1),
    ]
    for form in forms:
        stage = NNEstimator(module, nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(1)
        trained = stage.setLearningRate(0.1).setOptimMethod(form).fit(frame)
        weights.append(trained.getModel().weight)
    for each in weights[1:]:
        torch.testing.assert_close(each, weights[0])
    torch.testing.assert_close(module.weight, linear().weight)  # what was given is not changed


def test_learning_rate_decays_by_step(frame, table):
    stage = NNEstimator(linear(), nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(2)
    trained = stage.setLearningRate(0.1).setLearningRateDecay(1.0).fit(frame)
    model = linear()
    x, y = (torch.tensor(a, dtype=torch.float32) for a in table)
    scheduled = torch.optim.SGD((given := linear()).parameters(), lr=0.1)
    halving = torch.optim.lr_scheduler.StepLR(scheduled, 1, gamma=0.5)
    wrapped = TorchOptim.from_pytorch(halving, "IterationDecay")
    same = [
        NNEstimator(TorchModel(given), TorchLoss(nn.MSELoss())).setOptimMethod(wrapped),
        NNEstimator(linear(), nn.MSELoss()).setOptimMethod(SGD(0.1, learningrate_decay=1.0)),
    ]
    for rate in (0.1, 0.05):
        model.zero_grad()
        nn.functional.mse_loss(model(x)[:, 0], y).backward()
        torch.optim.SGD(model.parameters(), lr=rate).step()
    torch.testing.assert_close(trained.getModel().weight, model.weight)
    for each in same:
        trained = each.setBatchSize(ROWS).setMaxEpoch(2).fit(frame)
        torch.testing.assert_close(trained.getModel().weight, model.weight)


def test_gradients_are_clipped(frame):
    stage = NNEstimator(linear(), nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(1)
    stage.setLearningRate(1.0)
    start = linear().weight
    by_value = stage.setConstantGradientClipping(-0.01, 0.01).fit(frame).getModel().weight
    assert float((by_value - start).detach().abs().max()) == pytest.approx(0.01, rel=1e-3)
    stage.clearGradientClipping().setGradientClippingByL2Norm(0.02)
    model = stage.fit(frame).getModel()
    moved = torch.cat([(model.weight - start)[0], model.bias - linear().bias])
    assert float(moved.detach().norm()) == pytest.approx(0.02, rel=1e-3)


def test_checkpoints_are_where_they_were_asked_for(frame, tmp_path):
    from bigdl.orca.learn.pytorch import Estimator

    stage = NNEstimator(linear(), nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(1)
    stage.setCheckpoint(str(tmp_path), EveryEpoch()).fit(frame)
    assert Estimator.latest_checkpoint(str(tmp_path)).startswith(str(tmp_path))


def test_summaries_are_read_when_a_training_has_ended(frame, tmp_path):
    train, validation = (kind(str(tmp_path), "app") for kind in (TrainSummary, ValidationSummary))
    with refused("not-fitted"):
        train.read_scalar("Loss")
    stage = NNEstimator(linear(), nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(2)
    stage.setValidation(EveryEpoch(), frame, ["mse"], 4)
    stage.setTrainSummary(train).setValidationSummary(validation).fit(frame)
    assert [row[0] for row in train.read_scalar("Loss")] == [1, 2]
    figures = [row[1] for row in validation.read_scalar("mse")]
    assert figures == pytest.approx([float(e["val_mse"]) for e in stage.train_stats])


# -- classes ------------------------------------------------------------------------------------


def classifier(out=3, loss=None):
    stage = NNClassifier(linear(out=out), loss or nn.CrossEntropyLoss())
    stage.setLabelCol("class").setBatchSize(ROWS).setMaxEpoch(20)
    return stage.setOptimMethod("adam").setLearningRate(0.1)


@pytest.mark.slow
def test_classes_are_doubles_that_evaluators_take(frame):
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    found = classifier().fit(frame).transform(frame)
    assert found.schema["prediction"].dataType.typeName() == "double"
    assert set(column(found, "prediction")) <= {0.0, 1.0, 2.0}
    evaluator = MulticlassClassificationEvaluator(labelCol="class", metricName="accuracy")
    right = np.mean(column(found, "prediction") == column(found, "class"))
    assert evaluator.evaluate(found) == pytest.approx(right)
    assert right > 0.6


@pytest.mark.slow
def test_classes_may_count_from_one(frame):
    from pyspark.sql import functions as F

    shifted = frame.withColumn("class", F.col("class") + 1)
    zero = classifier().setSeed(1).fit(frame).transform(frame)
    one = classifier().setSeed(1).setZeroBasedLabel(False).fit(shifted).transform(shifted)
    np.testing.assert_array_equal(column(one, "prediction"), column(zero, "prediction") + 1)
    with pytest.raises(UsageError, match=r"setZeroBasedLabel\(False\)"):
        classifier().fit(shifted)


@pytest.mark.slow_cases("chance")
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss()], ids=["logits", "chance"])
def test_one_output_is_compared_to_the_threshold(frame, loss):
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.sql import functions as F

    logits = isinstance(loss, nn.BCEWithLogitsLoss)
    binary = frame.withColumn("class", F.least("class", F.lit(1.0)))
    module = linear() if logits else nn.Sequential(linear(), nn.Sigmoid())
    stage = NNClassifier(module, loss).setLabelCol("class").setBatchSize(ROWS).setMaxEpoch(5)
    model = stage.fit(binary).setRawPredictionCol("raw")
    with torch.no_grad():
        score = model.getModel()(torch.tensor(column(binary, "array"), dtype=torch.float32))
    chance = (torch.sigmoid(score) if logits else score)[:, 0].numpy()
    for threshold in (0.5, 0.7):
        found = model.setThreshold(threshold).transform(binary)
        np.testing.assert_array_equal(column(found, "prediction"), chance > threshold)
    assert (
        0
        <= BinaryClassificationEvaluator(rawPredictionCol="raw", labelCol="class").evaluate(found)
        <= 1
    )


# -- Spark ML around it -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipeline_is_fitted_saved_and_loaded(frame, tmp_path):
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import StandardScaler

    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    pipeline = Pipeline(stages=[scaler, classifier().setFeaturesCol("scaled").setMaxEpoch(2)])
    pipeline.save(str(tmp_path / "estimator"))
    loaded = Pipeline.load(str(tmp_path / "estimator"))
    assert loaded.getStages()[1].getMaxEpoch() == 2
    model = loaded.fit(frame)
    model.save(str(tmp_path / "model"))
    again = PipelineModel.load(str(tmp_path / "model"))
    assert again.stages[1].uid == model.stages[1].uid
    assert again.stages[1].getFeaturesCol() == "scaled"
    np.testing.assert_array_equal(
        column(again.transform(frame), "prediction"), column(model.transform(frame), "prediction")
    )


def test_a_save_says_what_it_leaves_out(frame, tmp_path, caplog):
    stage = NNEstimator(linear(), nn.MSELoss()).setValidation("everyepoch", frame, ["mae"], 4)
    stage.setTrainSummary(TrainSummary(str(tmp_path), "app")).save(str(tmp_path / "stage"))
    (said,) = [r.getMessage() for r in caplog.records if r.name == "bigdl.orca"]
    assert said.startswith("The value of setValidation and setTrainSummary is not saved")
    again = NNEstimator.load(str(tmp_path / "stage"))
    assert again.getValidation() is None
    caplog.clear()
    again.save(str(tmp_path / "again"))
    assert not caplog.records


def test_metadata_of_vectors_spares_a_job(frame):
    from pyspark.ml.feature import VectorAssembler

    made = VectorAssembler(inputCols=["number", "label"], outputCol="both").transform(frame)
    tracker = frame.sparkSession.sparkContext.statusTracker()
    jobs = set(tracker.getJobIdsForGroup(None))
    found = NNModel(linear(2)).setFeaturesCol("both").transform(made)
    assert set(tracker.getJobIdsForGroup(None)) == jobs
    assert found.schema["prediction"].dataType.typeName() == "double"
    assert found.count() == ROWS


@pytest.mark.slow
def test_cross_validation_chooses_the_better_rate(frame):
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit

    stage = NNEstimator(linear(), nn.MSELoss()).setBatchSize(ROWS).setMaxEpoch(8)
    grid = ParamGridBuilder().addGrid(stage.learningRate, [1e-6, 0.2]).build()
    tools = {"estimator": stage, "estimatorParamMaps": grid, "evaluator": RegressionEvaluator()}
    for search in (CrossValidator(numFolds=2, seed=1, **tools), TrainValidationSplit(**tools)):
        model = search.fit(frame)
        figures = getattr(model, "avgMetrics", None) or model.validationMetrics
        assert figures[1] < figures[0]
        assert isinstance(model.bestModel, NNModel)
        assert model.transform(frame).count() == ROWS


class Sneaky(nn.Linear):
    """Its pickle calls a function when it is read."""

    def __reduce__(self):
        return functools.partial(pytest.fail, "the pickle was read"), ()


@pytest.mark.slow
def test_a_model_of_another_process_loads_with_trust_only(frame, tmp_path, monkeypatch):
    path = str(tmp_path / "model")
    stage = NNClassifierModel(linear(out=3), [3]).setBatchSize(7).setZeroBasedLabel(False)
    stage.save(path)
    with pytest.raises(Exception, match=r"(?i)already exists"):
        stage.save(path)
    stage.write().overwrite().save(path)
    monkeypatch.setattr("bigdl.orca.learn.nnframes.stages.written_pickles", set())
    with pytest.raises(UsageError, match="trust=True"):
        NNClassifierModel.load(path)
    with trusted_loading():
        NNClassifierModel.load(path)
    again = NNClassifierModel.load(path, trust=True)
    assert (again.getBatchSize(), again.isZeroBasedLabel()) == (7, False)
    torch.testing.assert_close(again.getModel().state_dict(), stage.getModel().state_dict())
    np.testing.assert_array_equal(
        column(again.transform(frame), "prediction"), column(stage.transform(frame), "prediction")
    )
    with pytest.raises(UsageError, match=r"has a .*NNClassifierModel, not a NNModel"):
        NNModel.load(path)


def test_buffers_and_tied_weights_survive_a_save(orca_spark, tmp_path):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    module[2].weight = module[0].weight
    module.register_buffer("hidden", torch.tensor([5.0]), persistent=False)
    module[0].bias.requires_grad_(False)
    NNModel(module).save(str(tmp_path / "m"))
    again = NNModel.load(str(tmp_path / "m")).getModel()
    torch.testing.assert_close(again.state_dict(), module.state_dict())
    assert again.hidden.tolist() == [5.0]
    assert again[2].weight is again[0].weight
    assert [p.requires_grad for p in again.parameters()] == [
        p.requires_grad for p in module.parameters()
    ]


def test_images_are_read_and_scaled(orca_spark, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for i, color in enumerate([(255, 0, 0), (0, 0, 255)]):
        pillow.new("RGB", (6, 4), color).save(tmp_path / f"{i}.png")
    (tmp_path / "text.txt").write_text("no image")
    for size, options in (((4, 6), {}), ((2, 3), {"resizeH": 2, "resizeW": 3})):
        images = [
            row["image"] for row in NNImageReader.readImages(str(tmp_path), **options).collect()
        ]
        images.sort(key=lambda image: image["origin"])
        assert [(image["height"], image["width"]) for image in images] == [size] * 2
        assert [bytes(image["data"][:3]) for image in images] == [b"\0\0\xff", b"\xff\0\0"]
    with refused("argument-missing"):
        NNImageReader.readImages(str(tmp_path), resizeH=3)


# -- wrong inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: NNEstimator(nn.Linear, nn.MSELoss()), "got the class Linear"),
        (lambda s: NNEstimator(linear(), nn.MSELoss), "criterion must be a loss"),
        (lambda s: NNEstimator(linear(), nn.MSELoss(), "abc"), "size of a row as a list of ints"),
        (lambda s: NNEstimator(linear(), nn.MSELoss(), SeqToTensor), r"write SeqToTensor\(\)"),
        (lambda s: s.setBatchSize(0), "batchSize"),
        (lambda s: s.setMaxEpoch(1.5), "maxEpoch"),
        (lambda s: s.setLearningRate(-1), "learningRate should be a number of at least 0"),
        (lambda s: s.setOptimMethod("adamm"), "has no optimizer 'adamm'"),
        (lambda s: s.setOptimMethod(3), "setOptimMethod takes"),
        (lambda s: s.setEndWhen("never"), "a trigger is expected"),
        (lambda s: s.setConstantGradientClipping(1, -1), "min must be at most max"),
        (lambda s: s.setGradientClippingByL2Norm(0), "greater than 0"),
        (lambda s: s.setDataCacheLevel("TAPE"), "dataCacheLevel should be"),
        (lambda s: s.setTrainSummary("dir"), "Expected a TrainSummary"),
        (lambda s: s.setSamplePreprocessing([3]), "takes a FeatureLabelPreprocessing"),
        (lambda s: SeqToTensor([4]).batch(torch.zeros(2, 3)), r"shape \(3,\) cannot be reshaped"),
        (lambda s: SeqToMultipleTensors([[1], [1]]).batch(torch.zeros(2, 3)), "row of 3 numbers"),
    ],
)
def test_wrong_inputs_are_named(call, text):
    with pytest.raises(UsageError, match=text):
        call(NNEstimator(linear(), nn.MSELoss()))


def test_a_missing_column_is_named(frame):
    with refused("column-missing", "'nothing'"):
        NNEstimator(linear(), nn.MSELoss()).setFeaturesCol("nothing").fit(frame)
