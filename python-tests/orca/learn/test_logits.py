"""Metrics and labels of models whose outputs are logits, with ``backend="local"``."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from bigdl.common.errors import UsageError, WorkerError
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
    with pytest.raises(
        UsageError, match="labels of a batch go from 1 to 2, but the model has 2 outputs"
    ):
        figures(TWO, torch.nn.CrossEntropyLoss(), None, LABELS + 1)


def test_an_input_that_does_not_fit_is_told_with_its_shape():
    estimator = Estimator.from_torch(
        model=torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), backend="local", workers_per_node=1
    )
    with pytest.raises(WorkerError, match=r"(?s)cannot be multiplied.*shape \(64,\).*unsqueeze"):
        estimator.evaluate((ONE[:, 0], ONE), batch_size=64)
