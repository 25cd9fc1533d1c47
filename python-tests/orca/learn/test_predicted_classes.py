"""``predict(output="class")`` and ``output="probability"`` of classifiers of both frameworks."""

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn
from torch.nn import functional as F

from bigdl.orca.learn.prediction.classes import Scores
from bigdl.orca.learn.pytorch import Estimator

X = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")


class Fixed(nn.Module):
    """Returns some of its inputs, through an activation."""

    def __init__(self, columns, activation=None):
        super().__init__()
        self.columns, self.activation = columns, activation

    def forward(self, x):
        out = x[:, : self.columns]
        return out if self.activation is None else self.activation(out)


def log_softmax(x):
    return x.log_softmax(1)


SOFTMAX = torch.from_numpy(X[:, :3]).softmax(1).numpy()
SIGMOID = torch.from_numpy(X).sigmoid().numpy()
CASES = {
    "cross entropy": (Fixed(3), nn.CrossEntropyLoss(), X[:, :3].argmax(1), SOFTMAX),
    "its function": (Fixed(3), F.cross_entropy, X[:, :3].argmax(1), SOFTMAX),
    "log-probabilities": (Fixed(3, log_softmax), nn.NLLLoss(), X[:, :3].argmax(1), SOFTMAX),
    "one logit": (Fixed(1), nn.BCEWithLogitsLoss(), X[:, 0] >= 0, SIGMOID[:, 0]),
    "one probability": (Fixed(1, torch.sigmoid), nn.BCELoss(), X[:, 0] >= 0, SIGMOID[:, 0]),
    "labels": (Fixed(3), nn.BCEWithLogitsLoss(), X[:, :3] >= 0, SIGMOID[:, :3]),
}


@pytest.mark.parametrize(("model", "loss", "classes", "probabilities"), CASES.values(), ids=CASES)
def test_classes_are_integers_and_probabilities_floats(model, loss, classes, probabilities):
    estimator = Estimator.from_torch(model=model, loss=loss, backend="local")
    predicted = estimator.predict(X, output="class")
    assert predicted.dtype == np.int64
    np.testing.assert_array_equal(predicted, classes)
    predicted = estimator.predict(X, output="probability")
    assert predicted.dtype == np.float32
    np.testing.assert_allclose(predicted, probabilities, rtol=1e-6)


@pytest.mark.slow
def test_frames_shards_and_sql_have_the_same_classes(orca_spark):
    from bigdl.orca.data import XShards

    rows = [(i, x.tolist()) for i, x in enumerate(X)]
    frame = orca_spark.createDataFrame(rows, ["id", "x"])
    estimator = Estimator.from_torch(model=Fixed(3), loss=nn.CrossEntropyLoss())
    expected = X[:, :3].argmax(1).tolist()

    predicted = estimator.predict(frame, feature_cols="x", output="class")
    assert dict(predicted.dtypes)["prediction"] == "bigint"
    assert [row.prediction for row in predicted.orderBy("id").collect()] == expected
    shards = estimator.predict(XShards.partition({"x": X}, num_shards=2), output="class")
    assert [n for each in shards.collect() for n in each["prediction"].tolist()] == expected

    frame.createOrReplaceTempView("classified")
    estimator.register("class_of", feature_cols="x", sample=frame, output="class")
    answers = orca_spark.sql("select id, class_of(x) as y from classified order by id").collect()
    assert [row.y for row in answers] == expected
    shares = estimator.predict(frame, feature_cols="x", output="probability").orderBy("id")
    found = np.stack([row.prediction.toArray() for row in shares.collect()])
    np.testing.assert_allclose(found, SOFTMAX, rtol=1e-6)


def test_an_accelerated_model_has_the_same_classes():
    pytest.importorskip("openvino")
    model = nn.Sequential(nn.Linear(4, 3))
    estimator = Estimator.from_torch(model=model, loss=nn.CrossEntropyLoss(), backend="local")
    plain = estimator.predict(X, output="class")
    fast = estimator.predict(X, output="class", accelerate="openvino_fp32")
    np.testing.assert_array_equal(plain, fast)


def test_images_have_a_class_per_pixel():
    scores = np.random.default_rng(1).normal(size=(2, 3, 4, 5)).astype("float32")
    estimator = Estimator.from_torch(
        model=nn.Identity(), loss=nn.CrossEntropyLoss(), backend="local"
    )
    predicted = estimator.predict(scores, output="class")
    np.testing.assert_array_equal(predicted, scores.argmax(1))


def test_probabilities_of_large_logits_are_finite():
    scores = np.array([[1000.0, -1000.0], [-800.0, 900.0]], "float32")
    assert Scores("logits", True).probabilities(scores).tolist() == [[1, 0], [0, 1]]
    assert Scores("logits", False).probabilities(scores).tolist() == [[1, 0], [0, 1]]


def two_outputs(x):
    return x, x


@pytest.mark.parametrize(
    ("model", "loss", "output", "code", "named"),
    [
        (Fixed(3), nn.MSELoss(), "class", "argument-conflict", "MSELoss"),
        (Fixed(3), None, "class", "argument-conflict", 'output="raw"'),
        (Fixed(3), nn.CrossEntropyLoss(), "label", "argument-value", "'label'"),
        (Fixed(3, two_outputs), nn.CrossEntropyLoss(), "class", "model-output", "2"),
        (Fixed(3, torch.Tensor.long), nn.CrossEntropyLoss(), "class", "model-output", "int64"),
    ],
    ids=["regression", "no loss", "typing error", "two outputs", "integers"],
)
def test_what_is_no_classifier_is_refused(model, loss, output, code, named):
    with refused(code, named):
        Estimator.from_torch(model=model, loss=loss, backend="local").predict(X, output=output)


@pytest.mark.parametrize(
    ("loss", "activation", "units"),
    [
        ("sparse_categorical_crossentropy", "softmax", 3),
        ("binary_crossentropy", "sigmoid", 1),
        ("logits", None, 3),
    ],
)
def test_classes_of_keras(loss, activation, units):
    keras = pytest.importorskip("keras")
    from bigdl.orca.learn.tf2 import Estimator as KerasEstimator

    if loss == "logits":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(units, activation=activation)
    model = keras.Sequential([keras.Input((4,)), dense])
    model.compile("sgd", loss)
    estimator = KerasEstimator.from_keras(model=model, backend="local")
    raw = estimator.predict(X)
    classes = estimator.predict(X, output="class")
    expected = raw.argmax(1) if units > 1 else (raw[:, 0] >= 0.5).astype("int64")
    assert classes.dtype == np.int64
    np.testing.assert_array_equal(classes, expected)
    shares = estimator.predict(X, output="probability")
    assert shares.shape == raw.shape
    if activation:
        np.testing.assert_array_equal(shares, raw)
    else:
        np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
