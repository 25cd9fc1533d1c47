"""Losses of the user's own: N workers make the update of one process, or say that they do not."""

import functools
import logging

import numpy as np
import pytest
import torch
from plain_workers import shared_crew
from reference_training import largest_difference, rows_of, train_alone, union_batches
from refusals import refused
from torch import nn
from torch.nn import functional

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import MainCallback
from bigdl.orca.learn.pytorch.evaluation import TorchEvaluateProgram, TorchEvaluationSettings
from bigdl.orca.learn.pytorch.loop import FitSettings, TorchFit
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.training.loss_form import (
    DIVISOR,
    ROWS,
    SUM,
    UNKNOWN,
    probe,
    read_form,
    readable_graph,
    requiring_grad,
    rows_at,
)
from bigdl.training.position import StoppingCriterion
from bigdl.training.state import dumps

WEIGHT = torch.tensor([1.0, 5.0, 0.25], dtype=torch.float64)


@pytest.fixture(scope="module")
def crew():
    return shared_crew(3)


def classifier(config=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adam(model, config=None):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def one_hot(output, labels):
    return functional.one_hot(labels.clamp(0).long(), 3).to(output.dtype)


def each(output, labels):
    return (output - one_hot(output, labels)) ** 2


def kept(labels):
    return (labels >= 0).double()


class OfMyOwn(nn.CrossEntropyLoss):
    """A subclass may compute anything; this one does not."""


class Masked(nn.Module):
    def forward(self, output, labels):
        return (each(output, labels).mean(1) * kept(labels)).sum() / kept(labels).sum().clamp(min=1)


LOSSES = {
    "ignored labels": lambda o, t: functional.cross_entropy(o, t.long()),
    "another ignored label": lambda o, t: functional.nll_loss(o, t.clamp(0), None, None, 0),
    "class weights": lambda o, t: functional.cross_entropy(o, t.long(), WEIGHT),
    "smoothing": lambda o, t: functional.cross_entropy(o, t.long(), label_smoothing=0.1),
    "of parts": lambda o, t: functional.nll_loss(functional.log_softmax(o, 1), t.long()),
    "a part": functools.partial(functional.cross_entropy, weight=WEIGHT),
    "subclass": OfMyOwn(),
    "masked mean": Masked(),
    "selected": lambda o, t: each(o, t)[t >= 0].mean(),
    "factor first": lambda o, t: (each(o, t).sum(1) * kept(t) / kept(t).sum().clamp(min=1)).sum(),
    "elements": lambda o, t: each(o, t).mean(),
    "sums of rows": lambda o, t: each(o, t).sum(1).mean(),
    "divided by rows": lambda o, t: each(o, t).sum() / len(o),
    "rows in a list": lambda o, t: sum(each(o, t)[i].mean() for i in range(len(o))) / len(o),
    "two means": lambda o, t: each(o, t).mean() + 0.1 * o.abs().mean(),
    "sum": lambda o, t: 0.1 * each(o, t).sum(),
    "sum of entropies": lambda o, t: 0.1
    * functional.cross_entropy(o, t.long(), reduction="sum"),
}  # fmt: skip


def labelled(sizes):
    """Rows of which a third have no label, all of a worker's in some batches."""
    shards = rows_of(sizes)
    for number, shard in enumerate(shards):
        shard["c"] = shard["c"].astype("int64")
        shard["c"][(np.arange(len(shard["c"])) + number) % 3 == 0] = -100
    return shards


def trained(worker, parts, settings):
    fit = TorchFit(worker, TorchDistributedSync(worker), parts, settings)
    fit.epochs.run()
    state = {k: v.numpy().copy() for k, v in fit.built.model.state_dict().items()}
    return state, fit.state.position.history


def fit(crew, shards, loss, *, model=classifier, optimizer=sgd, batch_size=4, **settings):
    """Weights and figures of a fit, and what the user is told."""
    loss_weight = settings.pop("loss_weight", None)
    parts = ModelParts(model, optimizer, loss, loss_weight=loss_weight)
    settings = FitSettings(
        StoppingCriterion(epochs=2), batch_size, 5, feature_cols=["x"], label_cols=["c"], **settings
    )
    outcomes, messages = crew.run(
        lambda worker: trained(worker, parts, settings), [{"data": s} for s in shards]
    )
    told = [doc["text"] for doc, _ in messages if doc["topic"] == "warning of loss"]
    state, history = outcomes[0]
    assert all(largest_difference(state, other) == 0.0 for other, _ in outcomes[1:])
    return state, history, told


@pytest.mark.parametrize(
    ("sizes", "optimizer"), [([7, 4], sgd), ([1, 5, 3], adam)], ids=["two", "three"]
)
@pytest.mark.parametrize("name", LOSSES)
def test_workers_equal_one_process(crew, name, sizes, optimizer):
    loss, shards = LOSSES[name], labelled(sizes)

    def step_loss(model, batch):
        return loss(model(batch["x"]), batch["c"])

    options = {"epochs": 2, "batch_size": 4, "seed": 5}
    expected, _ = train_alone(classifier(), optimizer, step_loss, shards, **options)
    found, _, told = fit(crew, shards, loss, optimizer=optimizer)
    assert largest_difference(found, expected.state_dict()) < 1e-12
    assert not told


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_an_epoch_does_not_depend_on_the_number_of_workers(crew, name):
    shards = labelled([1, 5, 3])
    options = {"batch_size": 9, "shuffle": False}
    (_, many, _), (_, one, _) = (
        fit(crew, cut, LOSSES[name], **options) for cut in (shards, [joined(shards)])
    )
    assert [e["train_loss"] for e in many] == pytest.approx([e["train_loss"] for e in one])


def joined(shards):
    return {key: np.concatenate([shard[key] for shard in shards]) for key in shards[0]}


@pytest.mark.parametrize("name", ["ignored labels", "masked mean", "sum", "elements"])
@pytest.mark.parametrize("sizes", [[11], [6, 5]], ids=str)
def test_accumulated_batches_equal_one_batch(crew, name, sizes):
    loss, shards = LOSSES[name], labelled(sizes)
    options = {"shuffle": False}
    many, _, told = fit(crew, shards, loss, batch_size=2, accumulate=6, **options)
    one, _, _ = fit(crew, [joined_as_batched(shards, 2)], loss, batch_size=12, **options)
    assert largest_difference(many, one) < 1e-12
    assert not told


def joined_as_batched(shards, batch_size):
    batches = list(union_batches(shards, batch_size, 5, 0, shuffle=False))
    return {key: np.concatenate([b[key].numpy() for b in batches]) for key in shards[0]}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_validation_is_that_of_all_rows_at_once(crew, name):
    loss, shards = LOSSES[name], labelled([1, 5, 3])
    rows = {key: torch.from_numpy(value) for key, value in joined(shards).items()}
    model = classifier()
    with torch.no_grad():
        expected = float(loss(model(rows["x"]), rows["c"]))
    if name.startswith("sum of e") or name == "sum":
        expected /= 9  # for each row
    found = []
    for cut, batch_size in ((shards, 3), ([joined(shards)], 2), ([joined(shards)], 100)):
        settings = TorchEvaluationSettings(batch_size, ["x"], ["c"])
        parts = ModelParts(classifier, None, loss)
        program = TorchEvaluateProgram(parts, settings, [], TorchDistributedSync)
        state = dumps(model.state_dict())
        outcomes, _ = crew.run(program, [{"data": s} for s in cut], state=state)
        found.append(outcomes[0]["metrics"]["val_loss"])
        assert outcomes[0]["warning"] is None
    assert found == pytest.approx([expected] * 3, rel=1e-12)


def contrast(output, labels):
    """Each row beside all others of its batch."""
    likeness = output @ output.T
    return functional.cross_entropy(likeness, torch.arange(len(output)))


def hidden(output, labels):
    shares = kept(labels) / kept(labels).sum().clamp(min=1)
    return (each(output, labels).sum(1) * shares).sum()


MIXED = {
    "rows beside each other": contrast,
    "a root": lambda o, t: each(o, t).mean().sqrt(),
    "a ratio of sums": lambda o, t: 1 - (o.sigmoid() * one_hot(o, t)).sum() / o.sigmoid().sum(),
    "hidden weights": hidden,
    "means of several counts": lambda o, t: functional.cross_entropy(o, t.long()) + o.abs().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_a_loss_that_nobody_can_divide_is_named_once(crew, name):
    shards = labelled([7, 4])
    _, _, told = fit(crew, shards, MIXED[name])
    assert 1 <= len(told) <= 2  # of which the driver shows the first
    assert "is neither a mean nor a sum over the rows" in told[0]
    assert "loss_weight=" in told[0]
    _, _, told = fit(crew, shards, MIXED[name], loss_weight="rows")
    assert not told
    _, _, told = fit(crew, [joined(shards)], MIXED[name])
    assert not told  # of one process there is nothing to say


def test_a_loss_that_says_what_it_is_divided_by(crew):
    shards = labelled([1, 5, 3])

    def step_loss(model, batch):
        return hidden(model(batch["x"]), batch["c"])

    expected, _ = train_alone(classifier(), sgd, step_loss, shards, epochs=2, batch_size=4, seed=5)
    found, _, told = fit(crew, shards, hidden, loss_weight=lambda o, t: kept(t).sum())
    assert largest_difference(found, expected.state_dict()) < 1e-12
    assert not told


def test_a_step_of_the_users_own_counts_what_its_loss_is_divided_by(crew):
    class Mine(MainCallback):
        def on_iter_forward(self, runner):
            x, labels = runner.batch
            runner.output, runner.target = runner.model(x), labels
            runner.loss = 2.0 * functional.cross_entropy(runner.output, labels)

    def step_loss(model, batch):
        return 2.0 * functional.cross_entropy(model(batch["x"]), batch["c"])

    shards = labelled([1, 5, 3])
    expected, _ = train_alone(classifier(), sgd, step_loss, shards, epochs=2, batch_size=4, seed=5)
    found, _, _ = fit(crew, shards, nn.CrossEntropyLoss(), callbacks=[Mine()])
    assert largest_difference(found, expected.state_dict()) < 1e-12


def test_labels_that_are_ignored_later_are_seen(crew):
    loss, shards = LOSSES["ignored labels"], rows_of([12, 12])
    for shard in shards:
        shard["c"] = shard["c"].astype("int64")
    shards[1]["c"][-5:] = -100

    def step_loss(model, batch):
        return loss(model(batch["x"]), batch["c"])

    options = {"epochs": 2, "batch_size": 4, "seed": 5, "shuffle": False}
    expected, _ = train_alone(classifier(), sgd, step_loss, shards, **options)
    found, _, _ = fit(crew, shards, loss, shuffle=False)
    assert largest_difference(found, expected.state_dict()) < 1e-12


OF_ROWS = {
    "ignored labels": functional.cross_entropy,
    "class weights": functools.partial(functional.cross_entropy, weight=WEIGHT),
    "subclass": OfMyOwn(WEIGHT),
    "elements": lambda o, t, reduction="mean": functional.mse_loss(
        o, one_hot(o, t), reduction=reduction
    ),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_weights_of_rows_multiply_what_labels_count(crew, name):
    loss, shards = OF_ROWS[name], labelled([5, 4])
    for shard in shards:
        shard["w"] = 1.0 + shard["i"] % 3

    def step_loss(model, batch):
        rows = torch.arange(len(batch["c"])).repeat_interleave(batch["w"].long())
        return loss(model(batch["x"])[rows], batch["c"][rows])  # a row of weight 2 is two rows

    options = {"epochs": 2, "batch_size": 4, "seed": 5}
    expected, _ = train_alone(classifier(), sgd, step_loss, shards, **options)
    parts = ModelParts(classifier, sgd, loss)
    settings = FitSettings(
        StoppingCriterion(epochs=2), 4, 5, feature_cols=["x"], label_cols=["c", "w"], weighted=True
    )
    outcomes, _ = crew.run(
        lambda worker: trained(worker, parts, settings), [{"data": s} for s in shards]
    )
    assert largest_difference(outcomes[0][0], expected.state_dict()) < 1e-12


# -- the look at a loss ------------------------------------------------------------------------


def looked_at(loss, output, target):
    rows = len(output)

    def loss_of(index):
        return loss(requiring_grad(rows_at(output, index, rows)), rows_at(target, index, rows))

    return probe(loss_of, rows).reduction


@pytest.mark.parametrize("rows", [1, 2, 7, 200])
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (ROWS, functional.mse_loss),
        (ROWS, lambda o, t: functional.smooth_l1_loss(o, t).mean()),
        (ROWS, lambda o, t: torch.linalg.vector_norm(o - t, dim=1).mean()),
        (SUM, lambda o, t: (o - t).abs().sum()),
        (DIVISOR, lambda o, t: ((o - t) ** 2)[t > 0].mean()),
        (UNKNOWN, lambda o, t: (o - o.mean()).pow(2).mean() + functional.mse_loss(o, t)),
        (UNKNOWN, lambda o, t: functional.cross_entropy(o @ t.T, torch.arange(len(o)))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_look_tells_what_a_loss_is(rows, kind, loss, dtype):
    if rows == 1 and kind == UNKNOWN:
        pytest.skip("a row beside itself is no batch")
    generator = torch.Generator().manual_seed(0)
    output, target = (torch.randn(rows, 5, generator=generator, dtype=dtype) for _ in range(2))
    assert looked_at(loss, output, target) == kind


class Opaque(torch.autograd.Function):
    """What a compiled or a fused loss looks like: a graph that tells nothing."""

    @staticmethod
    def forward(ctx, output, target, is_sum):
        squares = (output - target) ** 2
        return squares.sum() if is_sum else squares.mean()

    @staticmethod
    def backward(ctx, gradient):
        return None, None, None


@pytest.mark.parametrize(("is_sum", "kind"), [(True, SUM), (False, ROWS)])
def test_a_loss_without_a_graph_that_can_be_read_is_compared_alone(is_sum, kind):
    output, target = torch.randn(9, 2), torch.randn(9, 2)

    def loss(o, t):
        return Opaque.apply(o, t, is_sum)

    assert read_form(loss(output.requires_grad_(), target)) is None
    assert looked_at(loss, output, target) == kind


def test_a_look_changes_neither_random_numbers_nor_the_loss_nor_the_model():
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.calls = 0

        def forward(self, output, target):
            self.calls += 1
            return functional.mse_loss(functional.dropout(self.norm(output)), target)

    from bigdl.orca.learn.pytorch.forward import PlainForward

    model, criterion = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), Drawing()
    forward_pass = PlainForward(model, criterion)
    batch = [torch.randn(6, 2), torch.randn(6, 3)]
    output, target, loss = forward_pass.forward(batch, 0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    own, calls = {k: v.clone() for k, v in criterion.state_dict().items()}, criterion.calls
    torch.manual_seed(3)
    forward_pass.probe_loss(batch, output, target, 6, loss)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert drawn == torch.rand(1)
    assert criterion.calls == calls
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(v, own[k]) for k, v in criterion.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_graph_for_reading_keeps_no_large_tensor():
    with torch.no_grad(), readable_graph():
        output = torch.randn(50, 3).requires_grad_()
        loss = functional.cross_entropy(output * 2, torch.arange(50) % 3)
    assert loss.grad_fn._saved_self.device.type == "meta"
    assert read_form(loss).divisor == 50


# -- an Estimator ------------------------------------------------------------------------------


def of_estimator(loss, data, workers=2, **options):
    fit_options = {"epochs": 1, "batch_size": 8, "seed": 1, **options.pop("fit", {})}
    estimator = Estimator.from_torch(
        model=classifier().float(),
        optimizer=sgd,
        loss=loss,
        backend=options.pop("backend", "local"),
        workers_per_node=workers,
        config={"shuffle": False},
        **options,
    )
    figures = estimator.fit(data, **fit_options)
    return {k: v.numpy() for k, v in estimator.get_model().state_dict().items()}, figures


def test_an_estimator_names_a_loss_that_mixes_rows(caplog):
    rows = joined(labelled([16]))
    data = rows["x"].astype("float32"), rows["c"]
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        of_estimator(contrast, data, fit={"validation_data": data})
    told = [
        record.getMessage() for record in caplog.records if "neither a mean" in record.getMessage()
    ]
    assert len(told) == 1
    assert "The loss contrast is neither a mean nor a sum over the rows of a batch" in told[0]


@pytest.mark.parametrize("bad", ["mean", 3])
def test_a_wrong_loss_weight_is_refused(bad):
    with refused("argument-value", "loss_weight"):
        Estimator.from_torch(model=classifier, loss_weight=bad, backend="local")


def test_loss_weight_and_weights_of_rows_do_not_go_together():
    estimator = Estimator.from_torch(
        model=classifier, optimizer=sgd, loss=nn.MSELoss(), loss_weight="rows", backend="local"
    )
    data = {"x": np.zeros((2, 4)), "y": np.zeros(2), "w": np.ones(2)}
    with refused("argument-conflict", "weight_col", "loss_weight"):
        estimator.evaluate(data, feature_cols=["x"], label_cols=["y"], weight_col="w")


def test_local_steps_refuse_a_sum_that_they_see_first():
    rows = joined(labelled([16]))
    data = rows["x"].astype("float32"), rows["c"]
    with pytest.raises((UsageError, WorkerError), match="does not support a loss that is a sum"):
        of_estimator(LOSSES["sum"], data, fit={"local_steps": 2})


ON_SPARK = {"spark": {}, "bigdl": {}, "bigdl by barrier stages": {"transport": "barrier"}}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("ignored labels", "spark"),
        ("ignored labels", "bigdl"),
        ("sum", "bigdl"),
        ("elements", "bigdl"),
        ("masked mean", "bigdl by barrier stages"),
    ],
)
def test_every_backend_of_spark_divides_by_what_counts(orca_spark, name, engine, caplog):
    rows, whole = joined(labelled([16])), {"epochs": 1, "batch_size": 16}
    data = rows["x"].astype("float32"), rows["c"]
    expected, alone = of_estimator(LOSSES[name], data, 1, fit=whole)
    found, figures = of_estimator(
        LOSSES[name],
        data,
        backend=engine.split()[0],
        fit={**whole, **ON_SPARK[engine], "validation_data": data},
    )
    assert largest_difference(found, expected) < 1e-6
    assert figures[0]["train_loss"] == pytest.approx(alone[0]["train_loss"], rel=1e-5)
    assert not [r for r in caplog.records if "neither a mean" in r.getMessage()]


def test_the_parameter_layer_names_a_loss_that_mixes_rows(orca_spark, caplog):
    rows = joined(labelled([16]))
    data = rows["x"].astype("float32"), rows["c"]
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        of_estimator(contrast, data, backend="bigdl", fit={"epochs": 2})
    assert len([r for r in caplog.records if "neither a mean" in r.getMessage()]) == 1
