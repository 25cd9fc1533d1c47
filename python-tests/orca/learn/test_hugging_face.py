"""Models of Hugging Face's kind: inputs by name, a loss of their own, outputs that are records."""

import collections
import dataclasses
import typing

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused
from torch import nn
from torch.nn import functional

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.metrics import Accuracy
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.forward import PlainForward, is_record, logits_of


class Output(collections.OrderedDict):
    """What a model of transformers returns, as far as it matters: a dict with attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tagger(nn.Module):
    """A model of that kind; the order of its arguments is none that columns have."""

    main_input_name = "input_ids"

    def __init__(self, config=None):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(20, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, input_ids=None, cache=None, attention_mask=None, labels=None):
        assert cache is None
        rows = self.embedding(input_ids) * attention_mask[..., None]
        logits = self.head(rows.sum(1) / attention_mask.sum(1, keepdim=True))
        out = Output(logits=logits, hidden=(rows, None))
        if labels is not None:
            out = Output(loss=functional.cross_entropy(logits, labels), **out)
        return out


RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 20, (24, 5))
MASK = (RANDOM.random((24, 5)) > 0.3).astype("int64")
MASK[:, 0] = 1
LABELS = RANDOM.integers(0, 3, 24)
LABELS[::3] = -100
FRAME = pd.DataFrame({"attention_mask": list(MASK), "input_ids": list(IDS), "labels": LABELS})
COLUMNS = {"feature_cols": ["attention_mask", "input_ids"], "label_cols": ["labels"]}


def sgd(model, config):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def estimator_of(model=Tagger, loss=None, workers=1, **options):
    return Estimator.from_torch(
        model=model,
        optimizer=sgd,
        loss=loss,
        metrics=[Accuracy()],
        backend="local",
        workers_per_node=workers,
        config={"shuffle": False},
        **options,
    )


LOSSES = {
    "its own": None,
    "a module": nn.CrossEntropyLoss(),
    "a function of torch": functional.cross_entropy,
    "a function of its logits": lambda out, labels: functional.cross_entropy(out.logits, labels),
}


@pytest.mark.parametrize("name", LOSSES)
def test_two_workers_equal_plain_torch(name):
    model = Tagger()
    loss = model(torch.from_numpy(IDS), None, torch.from_numpy(MASK), torch.from_numpy(LABELS)).loss
    optimizer = sgd(model, None)
    loss.backward()
    optimizer.step()
    estimator = estimator_of(loss=LOSSES[name], workers=2)
    figures = estimator.fit(FRAME, batch_size=24, validation_data=FRAME, seed=1, **COLUMNS)
    trained = estimator.get_model()
    for key, value in model.state_dict().items():
        assert torch.allclose(trained.state_dict()[key], value, atol=1e-6), key
    assert figures[0]["train_loss"] == pytest.approx(float(loss), rel=1e-5)
    with torch.no_grad():
        after = model(torch.from_numpy(IDS), None, torch.from_numpy(MASK), torch.from_numpy(LABELS))
    evaluated = estimator.evaluate(FRAME, batch_size=10, **COLUMNS)
    assert figures[0]["val_loss"] == pytest.approx(float(after.loss), rel=1e-5)
    assert evaluated["val_loss"] == pytest.approx(float(after.loss), rel=1e-5)
    predicted = estimator.predict(FRAME, feature_cols=COLUMNS["feature_cols"])["prediction"]
    np.testing.assert_allclose(np.stack(predicted), after.logits.numpy(), atol=1e-6)
    assert int(trained.norm.num_batches_tracked) == 0  # no look at the loss trains the model


def test_batches_that_are_dicts_and_labels_of_a_loader():
    rows = [
        {"input_ids": torch.from_numpy(i), "attention_mask": torch.from_numpy(m), "labels": int(c)}
        for i, m, c in zip(IDS, MASK, LABELS, strict=True)
    ]
    loader = torch.utils.data.DataLoader(rows, batch_size=12)
    figures = estimator_of().fit(loader, batch_size=24, label_cols=["labels"], seed=1)
    expected = estimator_of().fit(FRAME, batch_size=24, seed=1, **COLUMNS)
    assert figures[0]["train_loss"] == pytest.approx(expected[0]["train_loss"], rel=1e-6)


def test_a_model_that_returns_its_loss_in_a_tuple():
    class Pair(Tagger):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            out = super().forward(input_ids, None, attention_mask, labels)
            return (out.loss, out.logits) if labels is not None else (out.logits,)

    figures = estimator_of(Pair).fit(FRAME, batch_size=24, seed=1, **COLUMNS)
    expected = estimator_of().fit(FRAME, batch_size=24, seed=1, **COLUMNS)
    assert figures[0]["train_loss"] == pytest.approx(expected[0]["train_loss"], rel=1e-6)


def test_a_model_without_a_loss_says_so():
    class Silent(Tagger):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            return super().forward(input_ids, None, attention_mask)

    with pytest.raises((UsageError, WorkerError), match="got labels but returned no loss"):
        estimator_of(Silent).fit(FRAME, seed=1, **COLUMNS)
    with refused("argument-missing"):
        estimator_of(nn.Linear(2, 1)).fit((np.zeros((2, 2)), np.zeros(2)))


def test_weights_of_rows_need_a_loss_that_is_given():
    frame = FRAME.assign(w=1.0)
    with pytest.raises((UsageError, WorkerError), match="weight_col needs a loss"):
        estimator_of().fit(frame, weight_col="w", seed=1, **COLUMNS)


# -- records -------------------------------------------------------------------------------------


class Named(typing.NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor


@dataclasses.dataclass
class Data:
    mean: torch.Tensor
    spread: torch.Tensor


RECORDS = {
    "named tuple": Named,
    "dataclass": Data,
    "dict": lambda mean, spread: {"mean": mean, "spread": spread},
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_is_given_whole_or_field_by_field_as_the_loss_takes_it(kind):
    mean, spread, target = torch.randn(3), torch.rand(3) + 1, torch.randn(3)
    record = RECORDS[kind](mean, spread)
    assert is_record(record)

    def by_field(mean, spread, target):
        return functional.gaussian_nll_loss(mean, target, spread)

    def whole(output, target):
        mean, spread = output.values() if isinstance(output, dict) else (output.mean, output.spread)
        return functional.gaussian_nll_loss(mean, target, spread)

    expected = functional.gaussian_nll_loss(mean, target, spread)
    for loss in (by_field, whole):
        forward_pass = PlainForward(nn.Identity(), loss)
        assert forward_pass.call_criterion(loss, record, target) == expected


@pytest.mark.parametrize("record", [Output(logits=torch.ones(2)), Data(torch.ones(2), None)])
def test_logits_are_taken_where_there_are_some(record):
    found = logits_of(record)
    assert found is record.get("logits") if isinstance(record, Output) else found is record
    assert logits_of((1, 2)) == (1, 2)


# -- transformers --------------------------------------------------------------------------------


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification(config)
    weights = []
    for workers in (1, 2):
        estimator = estimator_of(model, workers=workers)
        estimator.fit(FRAME, batch_size=24, seed=1, **COLUMNS)
        weights.append(estimator.get_model().state_dict())
    assert all(torch.allclose(weights[0][k], weights[1][k], atol=1e-6) for k in weights[0])
    predicted = estimator.predict(FRAME, feature_cols=COLUMNS["feature_cols"])["prediction"]
    model.load_state_dict(weights[1])
    with torch.no_grad():
        ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
        expected = model.eval()(ids, attention_mask=mask).logits
    np.testing.assert_allclose(np.stack(predicted), expected.numpy(), atol=1e-5)
