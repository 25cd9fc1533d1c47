"""Metrics and labels of models whose outputs are logits, with ``backend="local"``."""

import json

import numpy as np
import pytest
import torch
from refusals import refused
from sklearn import metrics as sklearn_metrics

from bigdl.common.errors import WorkerError
from bigdl.orca.learn.metrics import (
    AUC,
    Accuracy,
    BinaryAccuracy,
    BinaryCrossEntropy,
    F1Score,
    Precision,
    SparseCategoricalCrossEntropy,
)
from bigdl.orca.learn.pytorch import Estimator

RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 2, 200)
ONE = (LABELS - 0.5 + RANDOM.standard_normal(200)).astype(np.float32)[:, None]
TWO = (RANDOM.standard_normal((200, 2)) + 2 * np.eye(2)[LABELS]).astype(np.float32)
TWO += 5 * RANDOM.standard_normal((200, 1)).astype(np.float32)  # which the softmax takes out


def figures(outputs, loss, metrics, labels=LABELS):
    estimator = Estimator.from_torch(
        model=torch.nn.Identity(), loss=loss, metrics=metrics, backend="local", workers_per_node=1
    )
    return estimator.evaluate((outputs, labels), batch_size=64)


def test_metrics_of_probabilities_get_the_sigmoid_of_what_a_loss_says_are_logits():
    metrics = [Accuracy(), BinaryAccuracy(), BinaryCrossEntropy(), F1Score(), AUC()]
    found = figures(ONE, torch.nn.BCEWithLogitsLoss(), metrics)
    chosen = ONE[:, 0] > 0
    right = pytest.approx(sklearn_metrics.accuracy_score(LABELS, chosen))
    assert (found["Accuracy"].item(), found["BinaryAccuracy"].item()) == (right, right)
    assert found["BinaryCrossEntropy"].item() == pytest.approx(float(found["val_loss"]), abs=1e-5)
    assert found["F1Score"].item() == pytest.approx(sklearn_metrics.f1_score(LABELS, chosen))
    assert found["AUC"].item() == pytest.approx(sklearn_metrics.roc_auc_score(LABELS, ONE[:, 0]))


def test_a_threshold_of_logits_is_one_of_logits():
    found = figures(ONE, torch.nn.BCEWithLogitsLoss(), [Precision(threshold=0.0)])
    expected = sklearn_metrics.precision_score(LABELS, ONE[:, 0] >= 0)
    assert found["Precision"].item() == pytest.approx(expected)


def test_two_columns_of_logits_are_ranked_by_their_difference():
    metrics = [AUC(), SparseCategoricalCrossEntropy(), Accuracy()]
    found = figures(TWO, torch.nn.CrossEntropyLoss(), metrics)
    odds = TWO[:, 1].astype(float) - TWO[:, 0]
    assert found["AUC"].item() == pytest.approx(sklearn_metrics.roc_auc_score(LABELS, odds))
    assert found["AUC"].item() > sklearn_metrics.roc_auc_score(LABELS, TWO[:, 1]) + 0.05
    entropy = found["SparseCategoricalCrossEntropy"].item()
    assert entropy == pytest.approx(float(found["val_loss"]), abs=1e-5)
    assert found["Accuracy"].item() == pytest.approx(np.mean((odds > 0) == LABELS))


def test_booleans_are_classes():
    loss = torch.nn.CrossEntropyLoss()
    found, expected = (figures(TWO, loss, None, labels) for labels in (LABELS == 1, LABELS))
    assert found["val_loss"] == expected["val_loss"]


def test_labels_beyond_the_outputs_are_named():
    with refused("data-value", "1", "2"):
        figures(TWO, torch.nn.CrossEntropyLoss(), None, LABELS + 1)


def test_an_input_that_does_not_fit_is_told_with_its_shape():
    estimator = Estimator.from_torch(
        model=torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), backend="local", workers_per_node=1
    )
    with pytest.raises(WorkerError, match=r"(?s)cannot be multiplied.*shapes \(64,\).*unsqueeze"):
        estimator.evaluate((ONE[:, 0], ONE), batch_size=64)


@pytest.mark.parametrize(
    "loss",
    [torch.nn.CrossEntropyLoss(), lambda o, t: torch.nn.functional.cross_entropy(o, t)],
    ids=["module", "function"],
)
def test_labels_that_the_loss_ignores_are_not_counted(loss):
    labels = np.where(np.arange(200) % 3 == 0, -100, LABELS)
    found = figures(TWO, loss, [Accuracy(), AUC(), "SparseCategoricalAccuracy"], labels)
    kept = labels >= 0
    right = np.mean((TWO.argmax(1) == labels)[kept])
    assert found["Accuracy"] == found["SparseCategoricalAccuracy"] == pytest.approx(right)
    text = np.stack([TWO, TWO], 1)  # tokens of a text, of which the loss takes classes second
    twice = np.stack([labels, np.full(200, -100)], 1)
    loss = torch.nn.CrossEntropyLoss()
    of_tokens = figures(text.transpose(0, 2, 1).copy(), loss, [Accuracy()], twice)
    assert of_tokens["Accuracy"] == pytest.approx(right)


def test_a_collection_of_torchmetrics_gives_its_metrics_by_its_names():
    torchmetrics = pytest.importorskip("torchmetrics")
    options = {"task": "multiclass", "num_classes": 2}
    metrics = [torchmetrics.Accuracy(**options), torchmetrics.F1Score(**options)]
    collection = torchmetrics.MetricCollection(metrics, prefix="test_")
    found = figures(TWO, torch.nn.CrossEntropyLoss(), collection)
    right = np.mean(TWO.argmax(1) == LABELS)
    assert found["test_MulticlassAccuracy"] == pytest.approx(right)
    assert set(found) == {
        *("num_samples", "val_loss"),
        *("test_MulticlassAccuracy", "test_MulticlassF1Score"),
    }


def test_figures_are_json_and_metrics_have_one_name_in_fit_and_evaluate():
    found = figures(TWO, torch.nn.CrossEntropyLoss(), [Accuracy()])
    assert json.loads(json.dumps(found)) == found
    assert found["val_accuracy"] == found["Accuracy"] == found.get("val_Accuracy")
    assert "val_accuracy" in found
    assert "val_accuracy" not in list(found)
    assert "accuracy_of_mine" not in found
    with pytest.raises(KeyError, match="accuracy_of_mine"):
        found["accuracy_of_mine"]
    number = found["Accuracy"]
    assert isinstance(number, float)
    assert number.item() == number.tolist() == number.numpy() == number
    assert torch.isclose(number, torch.tensor(float(number)))


def test_a_wrong_name_of_a_metric_gets_a_suggestion():
    with refused("name-unknown", "'acuracy'", "'Accuracy'"):
        figures(TWO, torch.nn.CrossEntropyLoss(), ["acuracy"])


def test_metrics_under_their_names_in_bigdl_2():
    from bigdl.orca.learn.pytorch import pytorch_metrics

    metric = pytorch_metrics.BinaryAccuracy()
    metric(torch.tensor([0.2, 0.4, 0.6]), torch.tensor([0, 1, 0]), threshold=0.3)
    assert metric.compute() == pytest.approx(2 / 3)
    other = BinaryAccuracy().get_metric("pytorch")
    other(torch.tensor([0.2, 0.4, 0.6]), torch.tensor([0, 1, 0]), threshold=0.3)
    assert other.compute() == metric.compute()
