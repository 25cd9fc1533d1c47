"""N workers make the updates that one process would make with the same batches."""

import itertools

import numpy as np
import pytest
import torch
from engine_cases import syncs
from plain_workers import shared_crew
from reference_training import largest_difference, rows_of, train_alone, union_batches
from sklearn import metrics as sk
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.pytorch.evaluation import TorchEvaluateProgram, TorchEvaluationSettings
from bigdl.orca.learn.pytorch.loop import FitSettings, TorchFit
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.torch import RowwiseAdagrad
from bigdl.training.position import StoppingCriterion
from bigdl.training.state import dumps

SHARDS = {"7+4": [7, 4], "9+0": [9, 0], "1+5+3": [1, 5, 3]}
shards_param = pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS.keys())


@pytest.fixture(scope="module", params=syncs())
def crew(request):
    """Three processes, and the GradientSync of their programs."""
    crew = shared_crew(3)
    crew.sync = request.param
    return crew


def net(config=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def classifier(config=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model, config=None):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def squared(model, batch):
    return nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])


def trained(worker, parts, settings, sync):
    """The state dict, gradients' presence, figures and optimizer state of a rank after a fit."""
    fit = TorchFit(worker, sync(worker), parts, settings)
    fit.epochs.run()
    state = {k: v.numpy().copy() for k, v in fit.built.model.state_dict().items()}
    return state, fit.state.position.history


def fit(
    crew,
    shards,
    model=net,
    optimizer=sgd,
    loss=None,
    *,
    scheduler=None,
    features=("x",),
    labels=("y",),
    epochs=2,
    batch_size=4,
    seed=5,
    **settings,
):
    """Train on a crew; the state of rank 0 and the figures, after a look that all ranks agree."""
    parts = ModelParts(model, optimizer, loss or nn.MSELoss(), scheduler)
    settings = FitSettings(
        StoppingCriterion(epochs=epochs),
        batch_size,
        seed,
        feature_cols=features,
        label_cols=labels,
        **settings,
    )
    sync = crew.sync
    outcomes, _ = crew.run(
        lambda worker: trained(worker, parts, settings, sync), [{"data": s} for s in shards]
    )
    states = [state for state, _ in outcomes]
    for other in states[1:]:
        assert all(np.array_equal(states[0][k], other[k], equal_nan=True) for k in states[0])
    return outcomes[0]


def equals_one_process(
    crew,
    shards,
    model=net,
    optimizer=sgd,
    step_loss=squared,
    tolerance=1e-12,
    *,
    epochs=2,
    batch_size=4,
    seed=5,
    alone=(),
    together=(),
    **settings,
):
    """Compare; `alone` and `together` are arguments of the two sides that have different forms."""
    expected, means = train_alone(
        model(),
        optimizer,
        step_loss,
        shards,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        **settings,
        **dict(alone),
    )
    found, history = fit(
        crew,
        shards,
        model,
        optimizer,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        **settings,
        **dict(together),
    )
    difference = largest_difference(found, expected.state_dict())
    assert difference <= tolerance
    losses = [entry["train_loss"] for entry in history]
    assert losses == pytest.approx(means, rel=1e-6 if tolerance > 1e-9 else 1e-12)
    return found


@pytest.mark.slow_cases("torch-1-True-sgd-1+5+3", "torch-1-True-sgd-7+4", "torch-1-True-sgd-9+0")
@shards_param
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 100])
def test_workers_equal_one_process(crew, sizes, optimizer, shuffle, batch_size):
    equals_one_process(
        crew, rows_of(sizes), optimizer=optimizer, shuffle=shuffle, batch_size=batch_size, epochs=3
    )


@shards_param
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_workers_equal_one_process_in_float32(crew, sizes, optimizer):
    def model(config=None):
        return net().float()

    shards = rows_of(sizes, dtype="float32")
    equals_one_process(crew, shards, model, optimizer, tolerance=1e-6, epochs=3)


@shards_param
def test_the_last_batch_can_be_dropped(crew, sizes):
    equals_one_process(crew, rows_of(sizes), drop_last=True)


def test_one_worker_equals_one_process(crew):
    equals_one_process(crew, rows_of([11]))


# -- what is known to break equality ------------------------------------------------------------


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.unused = nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


@shards_param
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_unused_parameters_are_left_alone(crew, sizes, optimizer):
    def model(config=None):
        torch.manual_seed(1)
        return HalfUsed().double()

    found = equals_one_process(crew, rows_of(sizes), model, optimizer)
    assert np.array_equal(found["unused.weight"], model().unused.weight.detach())


class Branches(nn.Module):
    """Which parameters get a gradient depends on the rows, so it differs between the workers."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x):
        out = torch.zeros(len(x), 1, dtype=x.dtype)
        for head, chosen in zip(self.heads, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if chosen.any():
                out = out.index_put((chosen,), head(x[chosen]))
        return out


@shards_param
def test_a_parameter_that_some_workers_do_not_use_is_updated(crew, sizes):
    def model(config=None):
        torch.manual_seed(1)
        return Branches().double()

    equals_one_process(crew, rows_of(sizes), model, adam, batch_size=2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_zeroed_or_dropped(crew, set_to_none):
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=set_to_none):
            super().zero_grad(set_to_none=set_to_none)

    def model(config=None):
        torch.manual_seed(1)
        return HalfUsed().double()

    def optimizer(model, config=None):
        return Own(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    equals_one_process(crew, rows_of([1, 5, 3]), model, optimizer)


@shards_param
def test_a_loss_that_adds_up(crew, sizes):
    def total(model, batch):
        return nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"], reduction="sum")

    def gentle(model, config=None):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    shards = rows_of(sizes)
    expected, _ = train_alone(net(), gentle, total, shards, epochs=2, batch_size=4, seed=5)
    found, history = fit(crew, shards, optimizer=gentle, loss=nn.MSELoss(reduction="sum"))
    assert largest_difference(found, expected.state_dict()) <= 1e-12
    assert history[0]["train_loss"] < 10  # per row


@shards_param
@pytest.mark.parametrize("ignored", [None, 1], ids=["weights", "weights and ignored labels"])
def test_a_loss_with_class_weights(crew, sizes, ignored):
    weight = torch.tensor([1.0, 5.0, 0.25], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight, ignore_index=-100 if ignored is None else ignored)
    equals_one_process(
        crew,
        rows_of(sizes),
        classifier,
        step_loss=lambda model, batch: loss(model(batch["x"]), batch["c"].long()),
        batch_size=6,
        together={"loss": loss, "labels": ["c"]},
    )


def test_ignored_labels_are_seen_without_being_announced(crew):
    shards = rows_of([1, 5, 3])
    shards[0]["c"][:] = shards[1]["c"][1:] = -100  # the only row of a worker, too
    loss = nn.CrossEntropyLoss()
    equals_one_process(
        crew,
        shards,
        classifier,
        step_loss=lambda model, batch: loss(model(batch["x"]), batch["c"].long()),
        batch_size=5,
        together={"loss": loss, "labels": ["c"]},
    )


@pytest.mark.parametrize("kind", ["int32", "float64"])
def test_labels_of_classes_may_be_integers_or_floats(crew, kind):
    shards = rows_of([7, 4])
    for shard in shards:
        shard["c"] = shard["c"].astype(kind)
    loss = nn.CrossEntropyLoss()
    equals_one_process(
        crew,
        shards,
        classifier,
        step_loss=lambda model, batch: loss(model(batch["x"]), batch["c"].long()),
        together={"loss": loss, "labels": ["c"]},
    )


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), lambda o, t: ((o - t) ** 2).mean()])
@pytest.mark.parametrize("shape", ["(n,) against (n, 1)", "(n, 1) against (n,)"])
def test_a_target_is_not_broadcast_against_the_output(crew, loss, shape):
    def model(config=None):
        return net() if shape.startswith("(n,)") else nn.Sequential(net(), nn.Flatten(0))

    shards = rows_of([7, 4])
    if shape.startswith("(n, 1)"):
        for shard in shards:
            shard["y"] = shard["y"][:, None]
    equals_one_process(
        crew,
        shards,
        model,
        step_loss=lambda model, batch: loss(model(batch["x"]).flatten(), batch["y"].flatten()),
        together={"loss": loss},
    )


def test_labels_of_integers_meet_a_loss_over_elements(crew):
    shards = rows_of([7, 4], classes=2)
    loss = nn.BCEWithLogitsLoss()
    equals_one_process(
        crew,
        shards,
        step_loss=lambda model, batch: loss(model(batch["x"])[:, 0], batch["c"].double()),
        together={"loss": loss, "labels": ["c"]},
    )


class Lookup(nn.Module):
    def __init__(self, sparse, is_bag=False):
        super().__init__()
        cls = nn.EmbeddingBag if is_bag else nn.Embedding
        self.table = cls(10, 3, sparse=sparse)
        self.last = nn.Linear(3, 1)
        self.is_bag = is_bag

    def forward(self, i):
        # a bag of two rows, one of which many bags have
        return self.last(self.table(torch.stack([i, i // 4], 1) if self.is_bag else i))


@shards_param
@pytest.mark.parametrize("is_bag", [False, True], ids=["rows", "bags"])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RowwiseAdagrad", "SparseAdam"])
def test_sparse_gradients(crew, sizes, kind, is_bag):
    def model(config=None):
        torch.manual_seed(1)
        return Lookup(sparse=True, is_bag=is_bag).double()

    def optimizer(model, config=None):
        if kind == "SparseAdam":
            model.last.requires_grad_(False)
            return torch.optim.SparseAdam(list(model.table.parameters()), lr=0.1)
        cls = RowwiseAdagrad if kind == "RowwiseAdagrad" else getattr(torch.optim, kind)
        return cls(model.parameters(), lr=0.1)

    equals_one_process(
        crew,
        rows_of(sizes),
        model,
        optimizer,
        lambda model, batch: nn.functional.mse_loss(model(batch["i"])[:, 0], batch["y"]),
        together={"features": ["i"]},
    )


def test_a_sparse_gradient_that_nothing_announces_is_refused(crew):
    class Functional(Lookup):
        def forward(self, i):
            return self.last(nn.functional.embedding(i, self.table.weight, sparse=True))

    with pytest.raises(UsageError, match=r"sparse gradient.*nn.Embedding\(sparse=True\)"):
        fit(crew, rows_of([7, 4]), lambda config: Functional(False).double(), features=["i"])


class Tied(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=sparse)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.table.weight

    def forward(self, i):
        return self.out(self.table(i))


@shards_param
@pytest.mark.parametrize("sparse", [False, True])
def test_tied_weights(crew, sizes, sparse):
    def model(config=None):
        torch.manual_seed(1)
        return Tied(sparse).double()

    def plain_sgd(model, config=None):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    loss = nn.CrossEntropyLoss()
    equals_one_process(
        crew,
        rows_of(sizes),
        model,
        plain_sgd,
        lambda model, batch: loss(model(batch["i"]), batch["c"].long()),
        together={"loss": loss, "features": ["i"], "labels": ["c"]},
    )


def test_frozen_parameters_do_not_move(crew):
    def model(config=None):
        model = net()
        model[0].weight.requires_grad_(False)
        return model

    found = equals_one_process(crew, rows_of([1, 5, 3]), model)
    assert np.array_equal(found["0.weight"], net()[0].weight.detach())


def test_two_groups_of_parameters(crew):
    def optimizer(model, config=None):
        groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
        return torch.optim.SGD(groups, lr=0.2, momentum=0.5)

    equals_one_process(crew, rows_of([1, 5, 3]), optimizer=optimizer)


def test_parameters_of_several_dtypes(crew):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4).double()
            self.last = nn.Linear(4, 1).float()

        def forward(self, x):
            return self.last(self.first(x).float()).double()

    def model(config=None):
        torch.manual_seed(1)
        return Mixed()

    equals_one_process(crew, rows_of([7, 4]), model, tolerance=1e-6)


def test_a_group_of_parameters_that_is_added_later(crew):
    class Unfreeze(Callback):
        def before_train_epoch(self, runner):
            if runner.epochs == 1:
                runner.optimizer.add_param_group({"params": runner.model[0].parameters()})

    def optimizer(model, config=None):
        return torch.optim.SGD(model[2].parameters(), lr=0.1)

    shards, losses = rows_of([7, 4]), []
    model = net()
    own = optimizer(model)
    for epoch in range(2):
        if epoch == 1:
            own.add_param_group({"params": model[0].parameters()})
        for batch in union_batches(shards, 4, 5, epoch):
            model.zero_grad()
            losses.append(squared(model, batch))
            losses[-1].backward()
            own.step()

    def leave_no_gradients(model, config=None):
        model[0].requires_grad_(True)
        return optimizer(model)

    class Zero(Callback):
        def before_train_iter(self, runner):
            runner.model.zero_grad()

    found, _ = fit(crew, shards, optimizer=optimizer, callbacks=[Unfreeze(), Zero()])
    assert largest_difference(found, model.state_dict()) <= 1e-12


@pytest.mark.parametrize("kind", ["StepLR", "ReduceLROnPlateau"])
def test_schedulers_step_once_per_epoch(crew, kind):
    def scheduler(optimizer, config=None):
        if kind == "StepLR":
            return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        # a loss must fall by 90 % to count
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=0.9
        )

    equals_one_process(
        crew,
        rows_of([1, 5, 3]),
        epochs=5,
        alone={"make_scheduler": scheduler, "plateau": kind != "StepLR"},
        together={"scheduler": scheduler},
    )


class LooksAtValidation(Callback):
    def after_run(self, runner):
        losses = [entry["val_loss"] for entry in runner.position.history]
        assert runner.scheduler.best == min(losses)


def test_a_plateau_looks_at_the_validation_loss(crew):
    def scheduler(optimizer, config=None):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=0.0)

    parts = ModelParts(net, sgd, nn.MSELoss(), scheduler)
    settings = FitSettings(
        StoppingCriterion(epochs=3),
        4,
        5,
        feature_cols=["x"],
        label_cols=["y"],
        callbacks=[LooksAtValidation()],
    )
    both = zip(rows_of([7, 4]), rows_of([2, 3], seed=1), strict=True)
    shards = [{"data": train, "validation": validation} for train, validation in both]
    sync = crew.sync
    crew.run(lambda worker: trained(worker, parts, settings, sync), shards)


# -- buffers and random numbers -----------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("positions", torch.tensor([0.1, 1 / 3, float("inf")]).double())
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        return self.last(self.norm(x))


@pytest.mark.parametrize("sizes", [[6, 2], [8, 0], [5, 3, 2]], ids=str)
def test_statistics_of_batches_are_merged_by_rows(crew, sizes):
    def model(config=None):
        torch.manual_seed(1)
        return Normed().double()

    shards = rows_of(sizes)
    found, _ = fit(crew, shards, model, epochs=1, batch_size=100)
    norms = []
    for shard in shards:
        norms.append(nn.BatchNorm1d(4).double())
        if len(shard["x"]):
            norms[-1](torch.from_numpy(shard["x"]))
    for name in ("running_mean", "running_var"):
        merged = sum(
            getattr(norm, name) * n / sum(sizes) for norm, n in zip(norms, sizes, strict=True)
        )
        assert found[f"norm.{name}"] == pytest.approx(merged.numpy(), abs=1e-15)
    assert found["norm.num_batches_tracked"] == 1
    assert np.array_equal(found["positions"], model().positions)
    assert np.array_equal(found["mask"], model().mask)


def noisy(config=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1)).double()


def test_dropout_depends_on_the_seed_alone(crew):
    shards = rows_of([7, 4])
    first, _ = fit(crew, shards, noisy, seed=3)
    again, _ = fit(crew, shards, noisy, seed=3)
    other, _ = fit(crew, shards, noisy, seed=4)
    assert all(np.array_equal(first[k], again[k]) for k in first)
    assert largest_difference(first, other) > 1e-3


def test_workers_draw_different_random_numbers(crew):
    drawn = Drawn()
    parts = ModelParts(net, sgd, nn.MSELoss())
    settings = FitSettings(
        StoppingCriterion(epochs=1), 4, 5, feature_cols=["x"], label_cols=["y"], callbacks=[drawn]
    )

    sync = crew.sync

    def program(worker):
        fit = TorchFit(worker, sync(worker), parts, settings)
        fit.epochs.run()
        return fit.runner.callbacks[0].numbers

    numbers, _ = crew.run(program, [{"data": s} for s in rows_of([7, 4])])
    assert not set(numbers[0]) & set(numbers[1])


class Drawn(Callback):
    def before_run(self, runner):
        self.numbers = [float(torch.rand(1)), float(np.random.rand())]


# -- evaluation ---------------------------------------------------------------------------------


def scorer(config=None):
    return nn.Sequential(net(), nn.Sigmoid())


@pytest.mark.slow_cases("torch-1000-[1, 59, 40]", "torch-1000-[100, 0, 0]")
@pytest.mark.parametrize("sizes", [[100], [40, 60], [1, 59, 40], [100, 0, 0]], ids=str)
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_evaluate_gives_the_figures_of_scikit_learn(crew, sizes, batch_size):
    (rows,) = rows_of([100], classes=2)
    cuts = np.cumsum([0, *sizes])
    shards = [
        {"data": {k: v[low:high] for k, v in rows.items()}}
        for low, high in itertools.pairwise(cuts)
    ]
    names = ["accuracy", "precision", "recall", "auc", "mse", "mae"]
    settings = TorchEvaluationSettings(batch_size, ["x"], ["c"], metrics=names, per_worker=True)
    program = TorchEvaluateProgram(ModelParts(scorer, loss=nn.MSELoss()), settings, [], crew.sync)
    results, _ = crew.run(program, shards, dumps(scorer().state_dict()))
    with torch.no_grad():
        score = scorer()(torch.from_numpy(rows["x"]))[:, 0].numpy()
    truth, guess = rows["c"], score >= 0.5
    for result in results:
        assert result["metrics"] == pytest.approx(
            {
                "Accuracy": sk.accuracy_score(truth, guess),
                "Precision": sk.precision_score(truth, guess),
                "Recall": sk.recall_score(truth, guess),
                "AUC": sk.roc_auc_score(truth, score),
                "MSE": sk.mean_squared_error(truth, score),
                "MAE": sk.mean_absolute_error(truth, score),
                "val_loss": sk.mean_squared_error(truth, score),
                "num_samples": 100,
            },
            rel=1e-6,
        )
        assert [worker["num_samples"] for worker in result["workers"]] == sizes
