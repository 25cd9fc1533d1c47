"""Embeddings with sparse gradients by the parameter layer: the rows of a batch travel alone."""

import os
import signal

import numpy as np
import pytest
import torch
from layer_reference import hyper_of
from reference_training import largest_difference
from refusals import refused
from torch import nn

from bigdl.nano.pytorch.optim import SparseAdam
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.parameter_layer.optimizers import cut_state, joined_state, updates_rows
from bigdl.orca.parameter_layer.plan import FlatLayout, LayerPlan, LayerStep
from bigdl.orca.parameter_layer.rank import Contribution, Rank, RankState
from bigdl.orca.torch import RowwiseAdagrad, ShardedEmbedding

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "RowwiseAdagrad": lambda p: RowwiseAdagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "SparseAdam of Nano": lambda p: SparseAdam(p, lr=0.1),
}
SHAPES, WIDTHS = [(3, 2), (50, 4), (7,), (9, 3)], (0, 4, 0, 3)
SIZES = tuple(int(np.prod(shape)) for shape in SHAPES)


# -- ranks in this process ------------------------------------------------------------------------


def rows_of(rank, step):
    """Rows of the tables that a rank reads in a step: some, all or none."""
    rng = np.random.default_rng([7, rank, step])
    some = np.sort(rng.choice(50, 6, replace=False))
    return {1: some, 3: np.arange(9) if step % 3 == rank else np.arange(0)}


class Reader:
    """A replica whose gradient is a function of rank and step; it looks at all weights."""

    def __init__(self, rank):
        self.rank, self.seen = rank, []

    def compute(self, step, weights, buffers):
        self.seen.append(weights.copy())
        touched = rows_of(self.rank, step.number)
        return Contribution(self.at(step.number, touched), 1.0, 1, touched=touched)

    def at(self, number, touched):
        rng = np.random.default_rng([self.rank, number])
        parts = [
            rng.standard_normal(len(touched[n]) * w if w else size).astype(np.float32)
            for n, (size, w) in enumerate(zip(SIZES, WIDTHS, strict=True))
        ]
        return np.concatenate(parts)


def first_parameters():
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def trained_in_slices(make, ranks, steps, *, stays=False, compression="fp32"):
    parameters = first_parameters()
    optimizer = make(parameters)
    plan = LayerPlan(
        SIZES, (0,) * len(SIZES), type(optimizer), ranks, compression, widths=WIDTHS, norm=5.0
    )
    geometry = plan.geometry
    members = [Rank(plan, number, stays=stays) for number in range(ranks)]
    readers = [Reader(number) for number in range(ranks)]
    vector = geometry.flatten([p.detach().numpy() for p in parameters])
    state = optimizer.state_dict()["state"]
    states = [
        RankState(vector[low:high].copy(), cut_state(state, geometry, number))
        for number, (low, high) in enumerate(geometry.bounds)
    ]
    sent = []
    for number in range(steps):
        step = LayerStep(0, number, hyper_of(optimizer))
        weights = [bytes(r.weights(s)) for r, s in zip(members, states, strict=True)]
        pieces = [
            rank.gradients(reader, step, weights, None, rank.vector()[0])[0]
            for rank, reader in zip(members, readers, strict=True)
        ]
        sent.append((sum(map(len, weights)), sum(len(p) for of in pieces for p in of)))
        sums = [rank.reduce([of[rank.rank] for of in pieces]) for rank in members]
        statistics = [r.statistics(s, t) for r, s, t in zip(members, sums, states, strict=True)]
        for rank, summed, state in zip(members, sums, states, strict=True):
            rank.update(step, summed, state, statistics)
    vector = np.concatenate([state.weights for state in states])
    state = joined_state([state.optimizer for state in states], geometry, SHAPES)
    return vector, state, readers, sent


def trained_whole(make, ranks, steps):
    """One process, whose gradients of tables are sparse."""
    parameters = first_parameters()
    optimizer = make(parameters)
    for number in range(steps):
        of_ranks = [gradients_of(rank, number) for rank in range(ranks)]
        for parameter, *parts in zip(parameters, *of_ranks, strict=True):
            total = sum(parts[1:], parts[0]) / ranks
            parameter.grad = total.coalesce() if total.is_sparse else total
        norms = [(p.grad.values() if p.grad.is_sparse else p.grad).norm() for p in parameters]
        scale = min(1.0, float(5.0 / (torch.stack(norms).norm() + 1e-6)))
        for parameter in parameters:
            parameter.grad = parameter.grad * scale
        optimizer.step()
    return np.concatenate([p.detach().numpy().reshape(-1) for p in parameters]), optimizer


def gradients_of(rank, number):
    """The gradient of a rank as one tensor for each parameter, sparse for a table."""
    touched = rows_of(rank, number)
    values, gradients, start = torch.from_numpy(Reader(rank).at(number, touched)), [], 0
    for index, (shape, size, width) in enumerate(zip(SHAPES, SIZES, WIDTHS, strict=True)):
        stop = start + (len(touched[index]) * width if width else size)
        part, start = values[start:stop], stop
        if width:
            rows = torch.from_numpy(touched[index])[None]
            sparse = torch.sparse_coo_tensor(
                rows, part.view(-1, width), shape, check_invariants=True
            )
            gradients.append(sparse.coalesce())
        else:
            gradients.append(part.view(shape))
    assert start == len(values)
    return gradients


@pytest.mark.slow_cases("SparseAdam of Nano-40", "RowwiseAdagrad-40", "Adagrad-40")
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_make_the_updates_of_the_whole(name, ranks):
    """Also where slices have few rows, a row is longer than a slice, or nobody reads a table."""
    vector, state, _, _ = trained_in_slices(OPTIMIZERS[name], ranks, 8)
    expected, optimizer = trained_whole(OPTIMIZERS[name], ranks, 8)
    np.testing.assert_allclose(vector, expected, rtol=1e-5, atol=1e-5)
    known = optimizer.state_dict()["state"]
    for number, values in known.items():
        for key, value in values.items():
            ours = torch.as_tensor(state[number][key])
            torch.testing.assert_close(ours, torch.as_tensor(value), rtol=1e-5, atol=1e-5)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


@pytest.mark.slow_cases("Adagrad-40-fp32", "RowwiseAdagrad-40-fp32", "SparseAdam of Nano-40-fp32")
@pytest.mark.parametrize(("ranks", "compression"), [(3, "fp32"), (3, "bf16"), (40, "fp32")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_changed_rows_are_as_good_as_all(name, ranks, compression):
    make, options = OPTIMIZERS[name], {"compression": compression}
    whole, _, readers, all_sent = trained_in_slices(make, ranks, 8, **options)
    changed, _, others, sent = trained_in_slices(make, ranks, 8, **options, stays=True)
    assert np.array_equal(whole, changed)
    for one, other in zip(readers, others, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one.seen, other.seen, strict=True))
    assert sent[0][0] == all_sent[0][0]
    if compression == "fp32" and ranks == 3:  # else numbers are longer than these short rows
        assert all(few < most for (few, _), (most, _) in zip(sent[1:], all_sent[1:], strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_slices_end_between_rows(ranks):
    geometry = FlatLayout(SIZES, ranks, WIDTHS)
    assert geometry.bounds[0][0] == 0
    assert geometry.bounds[-1][1] == geometry.total
    rows = {number: [] for number, width in enumerate(WIDTHS) if width}
    for rank in range(ranks):
        for segment in geometry.segments(rank):
            if segment.width:
                assert (segment.stop - segment.start) % segment.width == 0
                count = (segment.stop - segment.start) // segment.width
                rows[segment.parameter] += range(segment.row, segment.row + count)
    assert rows == {1: [*range(50)], 3: [*range(9)]}


def test_only_what_changes_no_other_row_gets_rows_alone():
    table, other = nn.Embedding(5, 2).weight, nn.Linear(2, 2).weight
    assert all(updates_rows(make([table]), [2]) for make in OPTIMIZERS.values())
    assert updates_rows(torch.optim.SparseAdam([table]), [2])
    groups = [{"params": [table]}, {"params": [other], "momentum": 0.9}]
    assert updates_rows(torch.optim.SGD(groups, lr=0.1), [2, 0])
    for optimizer in (
        torch.optim.SGD([table], lr=0.1, momentum=0.9),
        torch.optim.SGD([table], lr=0.1, weight_decay=0.1),
        torch.optim.Adagrad([table], weight_decay=0.1),
        torch.optim.Adam([table]),
    ):
        assert not updates_rows(optimizer, [2])


# -- the Estimator --------------------------------------------------------------------------------

USERS, ROWS = 500, 96


class Ratings(nn.Module):
    """Two tables; of one every batch reads a few rows, some of them twice."""

    def __init__(self, table=nn.EmbeddingBag):
        super().__init__()
        torch.manual_seed(2)
        is_bag = table is nn.EmbeddingBag
        options = {"mode": "sum", "sparse": True} if is_bag else {}
        self.users = table(USERS, 4, **options)
        self.is_bag = is_bag
        self.kinds = nn.Embedding(10, 4, sparse=True)
        self.last = nn.Linear(8, 1)

    def forward(self, ids):
        users = torch.stack([ids[:, 0], ids[:, 0] // 2], 1)
        read = self.users(users) if self.is_bag else self.users(users).sum(1)
        return self.last(torch.cat([read, self.kinds(ids[:, 1])], 1))


def ratings(config):
    return Ratings(config.get("table", nn.EmbeddingBag))


def data():
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, USERS, ROWS), rng.integers(0, 10, ROWS)], 1)
    return ids, (ids.sum(1, keepdims=True) % 5).astype(np.float32)


def rated(name, *, backend="bigdl", workers=2, epochs=2, batch=16, options=None, **fit):
    estimator = Estimator.from_torch(
        model=ratings,
        optimizer=lambda model, config: OPTIMIZERS[name](model.parameters()),
        loss=nn.MSELoss(),
        backend=backend,
        workers_per_node=workers,
        **(options or {}),
    )
    estimator.fit(data(), epochs=epochs, batch_size=batch, seed=3, **fit)
    return estimator


def weights(estimator):
    return estimator.get_model().state_dict()


@pytest.mark.slow_cases(
    "barrier-Adagrad",
    "barrier-SGD",
    "barrier-SparseAdam of Nano",
    "shuffle-Adagrad",
    "shuffle-RowwiseAdagrad",
    "shuffle-SparseAdam of Nano",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "fit", [{}, {"transport": "barrier", "group_size": 5}], ids=["shuffle", "barrier"]
)
def test_a_fit_is_that_of_torch_distributed(orca_spark, name, fit):
    known = rated(name, backend="spark")
    estimator = rated(name, **fit)
    assert largest_difference(weights(estimator), weights(known)) < 1e-5
    ours, theirs = (each.get_state_dict()["optimizers"][0]["state"] for each in (estimator, known))
    for number, values in theirs.items():
        for key, value in values.items():
            torch.testing.assert_close(
                torch.as_tensor(ours[number][key]), torch.as_tensor(value), rtol=1e-4, atol=1e-5
            )


@pytest.mark.slow_cases("RowwiseAdagrad")
@pytest.mark.parametrize("name", ["SGD", "RowwiseAdagrad"])
def test_four_workers_are_one(orca_spark, name):
    one, four = (rated(name, workers=workers, epochs=5, batch=ROWS) for workers in (1, 4))
    assert largest_difference(weights(one), weights(four)) < 1e-5


@pytest.mark.slow
def test_both_transports_give_the_same_bits(orca_spark):
    by_shuffle, by_barrier = rated("RowwiseAdagrad"), rated("RowwiseAdagrad", transport="barrier")
    assert largest_difference(weights(by_shuffle), weights(by_barrier)) == 0


@pytest.mark.slow
def test_a_fit_goes_on_with_other_workers_and_another_backend(orca_spark, tmp_path):
    whole = rated("RowwiseAdagrad", epochs=4, batch=ROWS)
    rated("RowwiseAdagrad", batch=ROWS, options={"model_dir": str(tmp_path)})
    for backend, workers in (("bigdl", 3), ("spark", 2)):
        resumed = Estimator.from_torch(
            model=ratings,
            optimizer=lambda model, config: OPTIMIZERS["RowwiseAdagrad"](model.parameters()),
            loss=nn.MSELoss(),
            backend=backend,
            workers_per_node=workers,
        )
        resumed.load_orca_checkpoint(str(tmp_path))
        resumed.fit(data(), epochs=2, batch_size=ROWS, seed=3)
        assert largest_difference(weights(resumed), weights(whole)) < 1e-5


@pytest.mark.slow
def test_a_sharded_embedding_is_such_a_table(orca_spark):
    options = {"config": {"table": ShardedEmbedding}}
    sharded = rated("RowwiseAdagrad", options=options)
    estimator = rated("RowwiseAdagrad", transport="barrier", options=options)
    assert largest_difference(weights(estimator), weights(sharded)) == 0


def test_rounding_of_whole_gradients_is_refused_with_rows(orca_spark):
    with refused("argument-conflict", "RowwiseAdagrad", "compression='int8'"):
        rated("RowwiseAdagrad", compression="int8")
    rated("SGD", compression="int8", epochs=1)  # where it only takes longer


class Towers(Ratings):
    """Says of itself that it is sparse, too, and has no weight of its own."""

    sparse = True


class Tied(Ratings):
    def __init__(self):
        super().__init__()
        self.back = nn.Linear(4, 10, bias=False)
        self.back.weight = self.kinds.weight

    def forward(self, ids):
        return super().forward(ids) + self.back(self.kinds(ids[:, 1])).mean(1, keepdim=True)


@pytest.mark.slow_cases("Towers")
@pytest.mark.parametrize("kind", [Towers, Tied])
def test_other_models_with_tables(orca_spark, kind):
    def fitted(backend, **fit):
        estimator = Estimator.from_torch(
            model=lambda config: kind(),
            optimizer=lambda model, config: RowwiseAdagrad(model.parameters(), lr=0.1),
            loss=nn.MSELoss(),
            backend=backend,
            workers_per_node=2,
        )
        estimator.fit(data(), 2, batch_size=16, seed=3, **fit)
        return weights(estimator)

    assert largest_difference(fitted("bigdl", transport="barrier"), fitted("spark")) < 1e-5


class Punished(Ratings):
    def forward(self, ids):
        return super().forward(ids) + self.users.weight.square().mean()


class Normalizing(Ratings):
    def forward(self, ids):
        with torch.no_grad():
            self.kinds.weight.mul_(0.5)
        return super().forward(ids)


@pytest.mark.parametrize(
    ("kind", "said"), [(Punished, ("model-unsupported",)), (Normalizing, ("model-unsupported",))]
)
def test_what_changes_other_rows_is_refused(orca_spark, kind, said):
    estimator = Estimator.from_torch(
        model=lambda config: kind(),
        optimizer=lambda model, config: RowwiseAdagrad(model.parameters(), lr=0.1),
        loss=nn.MSELoss(),
        backend="bigdl",
        workers_per_node=2,
    )
    with refused(*said):
        estimator.fit(data(), 1, batch_size=16)


@pytest.mark.slow
def test_where_no_rows_travel_alone_a_model_writes_what_it_likes(orca_spark):
    estimator = Estimator.from_torch(
        model=lambda config: Normalizing(),
        optimizer=lambda model, config: torch.optim.Adam(model.parameters()),
        loss=nn.MSELoss(),
        backend="bigdl",
        workers_per_node=2,
    )
    (figures,) = estimator.fit(data(), 1, batch_size=16)
    assert figures["num_samples"] == ROWS


class LaterMomentum(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.9 if self.last_epoch > 2 else 0.0
        return [group["lr"] for group in self.optimizer.param_groups]


def test_momentum_that_comes_later_is_refused(orca_spark):
    options = {
        "scheduler_creator": lambda optimizer, config: LaterMomentum(optimizer),
        "scheduler_step_freq": "batch",
    }
    with refused("optimizer-unsupported", "0", "4"):
        rated("SGD", options=options)


class Hidden(Ratings):
    def forward(self, ids):
        rows = nn.functional.embedding(ids[:, 0], self.users.weight, sparse=True)
        return self.last(torch.cat([rows, self.kinds(ids[:, 1])], 1))


def test_rows_that_nothing_announces_are_refused(orca_spark):
    def hidden(config):
        model = Hidden()
        model.users.sparse = False
        return model

    estimator = Estimator.from_torch(
        model=hidden,
        optimizer=lambda model, config: RowwiseAdagrad(model.parameters(), lr=0.1),
        loss=nn.MSELoss(),
        backend="bigdl",
        workers_per_node=2,
    )
    with refused("model-unsupported", "0"):
        estimator.fit(data(), epochs=1, batch_size=16)


class Killer(Ratings):
    """Kills the process of rank 1 in one forward pass."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def forward(self, ids):
        from pyspark import TaskContext

        if TaskContext.get().partitionId() == 1 and self._passes() == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(ids)

    def _passes(self):
        with open(os.path.join(self.folder, "passes"), "a") as file:
            file.write(".")
            return file.tell()


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shuffle", "barrier"])
def test_a_worker_that_is_killed_changes_nothing(orca_spark, tmp_path, transport):
    undisturbed = rated("RowwiseAdagrad")
    estimator = Estimator.from_torch(
        model=lambda config: Killer(str(tmp_path)),
        optimizer=lambda model, config: OPTIMIZERS["RowwiseAdagrad"](model.parameters()),
        loss=nn.MSELoss(),
        backend="bigdl",
        workers_per_node=2,
    )
    estimator.fit(data(), 2, batch_size=16, seed=3, transport=transport, group_size=4)
    assert len((tmp_path / "passes").read_text()) > 12
    assert largest_difference(weights(estimator), weights(undisturbed)) == 0
