"""Embeddings in slices on the workers: N workers make the updates of one process."""

import faults
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_workers import Crew
from reference_training import largest_difference, rows_of, train_alone
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.pytorch.evaluation import TorchEvaluateProgram, TorchEvaluationSettings
from bigdl.orca.learn.pytorch.loop import Clipping, FitSettings, TorchFit
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.orca.torch import GrowingEmbedding, RowwiseAdagrad, ShardedEmbedding
from bigdl.runtime.collectives.rows import NumberedRows, RowExchange
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.training.checkpoint import CheckpointDirectory
from bigdl.training.embedding_tables.growing import (
    KeyIndex,
    ids_of_keys,
    keys_of_ids,
    owners_of_keys,
)
from bigdl.training.embedding_tables.torch_model import whole
from bigdl.training.position import StoppingCriterion
from bigdl.training.state import loads

SHARDS = {"11": [11], "7+4": [7, 4], "9+0": [9, 0], "1+5+3+2": [1, 5, 3, 2]}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "RowwiseAdagrad": lambda p: RowwiseAdagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}


@pytest.fixture(scope="module")
def crew():
    with Crew(4) as crew:
        yield crew


class Lookup(nn.Module):
    """Looks every id up twice, so that batches hold duplicates."""

    def __init__(self, storage="memory"):
        super().__init__()
        self.table = ShardedEmbedding(10, 3, storage=storage)
        self.pair = ShardedEmbedding([10, 20], 2)
        self.last = nn.Linear(3, 1)

    def forward(self, i):
        both = torch.stack([i, i + 10], -1)
        return self.last(self.table(i) + self.table(9 - i)) + self.pair(both).sum((1, 2))[:, None]


def lookup(config=None):
    torch.manual_seed(1)
    return Lookup((config or {}).get("storage", "memory"))


def squared(model, batch):
    return nn.functional.mse_loss(model(batch["i"])[:, 0], batch["y"])


def optimizer_of(kind):
    def optimizer(model, config=None):
        if kind == "SparseAdam":
            model.last.requires_grad_(False)
            parameters = [model.table.weight, model.pair.weight]
            return OPTIMIZERS[kind](parameters)
        return OPTIMIZERS[kind](model.parameters())

    return optimizer


def shards_of(sizes):
    return rows_of(sizes, dtype="float32")


def fit(
    crew, run, shards, optimizer, *, epochs=2, snapshot=None, config=None, model=lookup, **options
):
    """Train on a crew; what the run's newest checkpoint is then."""
    parts = ModelParts(model, optimizer, nn.MSELoss(), config=config or {})
    settings = FitSettings(
        StoppingCriterion(epochs=epochs),
        4,
        5,
        feature_cols=["i"],
        label_cols=["y"],
        run_url=run.url,
        **options,
    )
    doc, state = (None, None) if snapshot is None else snapshot.pack()

    def program(worker):
        fit = TorchFit(worker, TorchDistributedSync(worker), parts, settings)
        fit.epochs.run()
        return [weight.shape[0] for weight in fit.built.tables.weights]

    given_options = {} if doc is None else {"snapshot": doc}
    rows, _ = crew.run(program, [{"data": s} for s in shards], state, given_options)
    if model is lookup:
        assert [sum(each) for each in zip(*rows, strict=True)] == [10, 30]
    return run.latest()[1]


@pytest.fixture
def run(tmp_path):
    return CheckpointDirectory.create(str(tmp_path / "models"))


def weights_of(checkpoint):
    return loads(whole(checkpoint).files["model.pt"])


@pytest.mark.slow_cases("1+5+3+2-SGD", "11-SGD", "7+4-SGD")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS)
def test_workers_equal_one_process(crew, run, sizes, kind):
    shards, optimizer = shards_of(sizes), optimizer_of(kind)
    expected, _ = train_alone(lookup(), optimizer, squared, shards, epochs=2, batch_size=4, seed=5)
    found = weights_of(fit(crew, run, shards, optimizer))
    assert largest_difference(found, expected.state_dict()) <= 1e-6


def test_accumulated_batches_equal_larger_ones(crew, run):
    shards = shards_of([8, 8])
    sgd = optimizer_of("SGD")
    found = weights_of(fit(crew, run, shards, sgd, accumulate=2, shuffle=False))
    parts = shards_of([8, 8])
    one = [{k: np.concatenate([s[k] for s in parts]) for k in parts[0]}]
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    one = [{k: v[order] for k, v in one[0].items()}]
    expected, _ = train_alone(
        lookup(), sgd, squared, one, epochs=2, batch_size=8, seed=5, shuffle=False
    )
    assert largest_difference(found, expected.state_dict()) <= 1e-6


@pytest.mark.parametrize("clipping", [Clipping(norm=0.1), Clipping(-0.05, 0.05)])
def test_gradients_are_limited_as_in_one_process(crew, run, tmp_path, clipping):
    alone = CheckpointDirectory.create(str(tmp_path / "alone"))
    sgd = optimizer_of("SGD")
    three, one = shards_of([8, 4, 4]), shards_of([16])
    one = [{k: np.concatenate([s[k] for s in three]) for k in one[0]}]
    first = weights_of(fit(crew, run, three, sgd, clipping=clipping, epochs=1, drop_last=True))
    second = weights_of(fit(crew, alone, one, sgd, clipping=clipping, epochs=1, drop_last=True))
    # other rows form a batch, so only the sizes of the steps are alike
    assert largest_difference(first, second) < 1.0
    start = lookup().state_dict()
    steps = 16 // 4
    moved = [torch.cat([(w[k] - start[k]).flatten() for k in start]) for w in (first, second)]
    for each in moved:
        if clipping.norm is not None:
            assert 0 < each.norm() <= steps * 0.1 * 0.1 + 1e-6
        else:
            assert 0 < each.abs().max() <= steps * 0.1 * 0.05 + 1e-6


@pytest.mark.parametrize("kind", ["Adagrad", "RowwiseAdagrad", "SparseAdam"])
@pytest.mark.parametrize("storage", ["memory", "mmap"])
def test_a_fit_that_is_resumed_equals_one_that_is_not(crew, run, tmp_path, kind, storage):
    optimizer, shards = optimizer_of(kind), shards_of([7, 4])
    options = {"config": {"storage": storage}}
    straight = CheckpointDirectory.create(str(tmp_path / "straight"))
    expected = fit(crew, straight, shards, optimizer, epochs=3, **options)
    half = fit(crew, run, shards, optimizer, epochs=1, **options)
    found = fit(crew, run, shards, optimizer, epochs=3, snapshot=half, **options)
    for name in ("model.pt", "optimizer.pt"):
        a, b = (loads(whole(each).files[name]) for each in (expected, found))
        assert str(a) == str(b)
    assert largest_difference(weights_of(expected), weights_of(found)) == 0


@pytest.mark.parametrize("sizes", [[11], [4, 4, 3], [5, 3, 2, 1]], ids=str)
def test_another_number_of_workers_goes_on(crew, run, sizes):
    """The batches are others then, so what is compared is the state that they start from."""
    optimizer = optimizer_of("Adagrad")
    half = fit(crew, run, shards_of([7, 4]), optimizer, epochs=1)
    parts = ModelParts(lookup, optimizer, nn.MSELoss())
    settings = FitSettings(
        StoppingCriterion(epochs=1), 4, 5, feature_cols=["i"], label_cols=["y"], run_url=run.url
    )
    doc, state = half.pack()

    def program(worker):
        fit = TorchFit(worker, TorchDistributedSync(worker), parts, settings)
        return {name: array.copy() for name, array in fit.built.tables.arrays().items()}

    slices, _ = crew.run(program, [{"data": s} for s in shards_of(sizes)], state, {"snapshot": doc})
    saved = half.slices
    assert set(saved.names) == set(slices[0])
    for name in saved.names:
        for rank, own in enumerate(slices):
            assert np.array_equal(own[name], saved.read(name)[rank :: len(sizes)])


def test_an_evaluation_equals_that_of_one_process(crew, run):
    half = fit(crew, run, shards_of([7, 4]), optimizer_of("SGD"))
    model = lookup()
    model.load_state_dict(weights_of(half))
    shards = shards_of([1, 6, 0, 4])
    whole_batch = {k: torch.from_numpy(np.concatenate([s[k] for s in shards])) for k in shards[0]}
    with torch.no_grad():
        expected = float(squared(model, whole_batch))
    program = TorchEvaluateProgram(
        ModelParts(lookup, loss=nn.MSELoss()),
        TorchEvaluationSettings(4, ["i"], ["y"]),
        (),
        TorchDistributedSync,
    )
    options = {"slices": half.slices.to_json()}
    found, _ = crew.run(program, [{"data": s} for s in shards], half.files["model.pt"], options)
    losses = [each["metrics"]["val_loss"] for each in found]
    assert losses == [pytest.approx(expected, rel=1e-6)] * 4


# -- the exchange of rows ------------------------------------------------------------------------

reads = st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 6), max_size=5)), max_size=3)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(plans=st.lists(reads, min_size=3, max_size=3), weights=st.tuples(*[st.integers(0, 2)] * 3))
def test_ranks_may_read_what_and_as_often_as_they_like(crew, plans, weights):
    tables = [torch.arange(14.0).view(7, 2), -torch.arange(21.0).view(7, 3)]

    def program(worker):
        sync = TorchDistributedSync(worker)
        sync.start()
        exchange, rank = RowExchange(sync), sync.rank
        own = [nn.Parameter(table[rank::3].clone()) for table in tables]
        for parameter in own:
            exchange.add(NumberedRows(parameter, 7))
        got, total = [], torch.zeros(())
        for number, (table, ids) in enumerate(plans[rank]):
            rows = exchange.fetch(table, torch.tensor(ids, dtype=torch.int64))
            got.append(rows.detach())
            total = total + (number + 1) * rows.sum()
        exchange.finish()
        if plans[rank]:
            total.backward()
        exchange.send_gradients(weights[rank])
        return got, [None if p.grad is None else p.grad.to_dense() for p in own]

    outcomes, _ = crew.run(program, [{}] * 3)
    expected = [torch.zeros_like(table) for table in tables]
    read = [False, False]
    for (got, _), plan, weight in zip(outcomes, plans, weights, strict=True):
        for number, ((table, ids), rows) in enumerate(zip(plan, got, strict=True)):
            assert torch.equal(rows, tables[table][ids])
            read[table] |= bool(weight)
            for i in ids:
                expected[table][i] += weight * (number + 1)
    for rank, (_, gradients) in enumerate(outcomes):
        for gradient, sums, is_read in zip(gradients, expected, read, strict=True):
            assert (gradient is None) == (not is_read)
            assert gradient is None or torch.equal(gradient, sums[rank::3])


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ShardedEmbedding(0, 2), ("argument-value", "num_embeddings", "0")),
        (lambda: ShardedEmbedding([], 2), ("argument-value",)),
        (lambda: ShardedEmbedding(2, 2, storage="disk"), ("argument-value",)),
        (lambda: ShardedEmbedding(2, 2, dtype=torch.float16), ("argument-value", "float16")),
        (lambda: ShardedEmbedding(2, 2, init=0.1), ("argument-type", "0", "1")),
        (lambda: ShardedEmbedding(2, 2)(torch.tensor([0, 2])), ("data-value", "2")),
        (lambda: ShardedEmbedding([2, 3], 2)(torch.tensor([[1, 3]])), ("data-value", "3", "1")),
        (lambda: ShardedEmbedding([2, 3], 2)(torch.tensor([1, 2, 0])), ("data-shape", "2", "3")),
        (lambda: RowwiseAdagrad([nn.Parameter(torch.zeros(1))], lr=0), ("argument-value",)),
    ],
)
def test_wrong_use_gets_one_sentence(make, text):
    with refused(*text):
        make()


def test_a_fit_needs_a_shared_folder(crew):
    parts = ModelParts(lookup, optimizer_of("SGD"), nn.MSELoss())
    settings = FitSettings(StoppingCriterion(epochs=1), 4, 5, feature_cols=["i"], label_cols=["y"])
    with refused("argument-missing", "ShardedEmbedding", "model_dir"):
        crew.run(
            lambda worker: TorchFit(worker, TorchDistributedSync(worker), parts, settings),
            [{"data": s} for s in shards_of([7, 4])],
        )


def test_a_damaged_slice_is_noticed(crew, run):
    checkpoint = fit(crew, run, shards_of([7, 4]), optimizer_of("SGD"), epochs=1)
    path = f"{checkpoint.url}/rows.table.weight.00001.npy"
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with refused("checkpoint-damaged", "00001"):
        whole(checkpoint)
    assert np.load(f"{checkpoint.url}/rows.table.weight.00000.npy").shape == (5, 3)


# -- Estimators ----------------------------------------------------------------------------------


def estimator(folder, kind="Adagrad", workers=2):
    return Estimator.from_torch(
        model=lookup,
        optimizer=optimizer_of(kind),
        loss=nn.MSELoss(),
        backend="local",
        workers_per_node=workers,
        model_dir=str(folder),
    )


@pytest.fixture(scope="module")
def data():
    (rows,) = shards_of([24])
    return rows["i"], rows["y"][:, None]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of the checkpoints of `trained`."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def trained(models, data):
    """An Estimator whose fit was not disturbed."""
    fitted = estimator(models)
    fitted.fit(data, epochs=2, batch_size=4, seed=3, checkpoint_trigger=SeveralIteration(2))
    yield fitted
    fitted.shutdown()


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(trained, data, tmp_path):
    disturbed = estimator(tmp_path / "models")
    figures = disturbed.fit(
        data,
        epochs=2,
        batch_size=4,
        seed=3,
        checkpoint_trigger=SeveralIteration(2),
        callbacks=[faults.Kill(tmp_path / "killed", 1, 9)],
    )
    assert (tmp_path / "killed").exists()
    assert len(figures) == 2
    for a, b in (
        (trained.get_model().state_dict(), disturbed.get_model().state_dict()),
        *(
            (x["state"][n], y["state"][n])
            for x, y in [[each.get_state_dict()["optimizers"][0] for each in (trained, disturbed)]]
            for n in x["state"]
        ),
    ):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.slow
def test_evaluation_and_prediction_are_those_of_the_whole_model(trained, data, tmp_path):
    model = trained.get_model()
    with torch.no_grad():
        expected = model(torch.from_numpy(data[0])).numpy()
    assert np.allclose(trained.predict(data[0]), expected[:, 0], atol=1e-6)
    loss = float(np.square(expected - data[1]).mean())
    assert trained.evaluate(data, batch_size=4)["val_loss"] == pytest.approx(loss, rel=1e-5)
    # one file, for a program without workers and for another Estimator
    path = trained.save(str(tmp_path / "model.pt"))
    alone = lookup()
    alone.load_state_dict(torch.load(path))
    other = estimator(tmp_path / "other", workers=1)
    other.load(path)
    for each in (alone, other.get_model()):
        assert largest_difference(each.state_dict(), model.state_dict()) == 0
    assert other.evaluate(data)["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_tasks_read_rows_of_large_tables_from_the_checkpoint(trained, models, data, monkeypatch):
    expected = trained.predict(data[0])
    monkeypatch.setattr("bigdl.training.slices.BROADCAST", 0)
    path = max(models.rglob("rows.pair.weight.00001.npy"), key=lambda path: path.stat().st_mtime_ns)
    away = path.rename(path.with_suffix(".away"))
    try:
        with refused("checkpoint-missing", "num_to_keep"):
            trained.predict(data[0])
    finally:
        away.rename(path)
    assert np.array_equal(trained.predict(data[0]), expected)


@pytest.mark.slow
def test_a_checkpoint_is_loaded_by_another_number_of_workers(trained, models, data, tmp_path):
    (latest,) = models.glob("run-*")
    other = estimator(tmp_path / "models", workers=1)
    other.load_orca_checkpoint(str(latest))
    before = trained.get_state_dict()["optimizers"][0]["state"]
    after = other.get_state_dict()["optimizers"][0]["state"]
    for number in before:
        assert torch.equal(before[number]["sum"], after[number]["sum"])
    other.fit(data, epochs=1, batch_size=4)  # three epochs in all
    grown = other.get_state_dict()["optimizers"][0]["state"]
    assert all((grown[n]["sum"] >= before[n]["sum"]).all() for n in before)
    assert {int(each["step"]) for each in grown.values()} == {18}


def test_a_worker_does_not_write_a_part_of_the_model(data, tmp_path):
    class Save(Callback):
        def after_train_epoch(self, runner):
            runner.save_checkpoint(str(tmp_path / "part"))

    with refused("unsupported", "ShardedEmbedding"):
        estimator(tmp_path).fit(data, batch_size=4, callbacks=[Save()])


def test_a_whole_model_can_be_traced_and_exported():
    model, ids = lookup().eval(), torch.tensor([1, 2, 9])
    expected, other = model(ids), model(ids.flip(0))
    traced = torch.jit.trace(model, ids)
    exported = torch.export.export(model, (ids,)).module()
    for each in (traced, exported):
        assert torch.equal(each(ids), expected)
        assert torch.equal(each(ids.flip(0)), other)


# -- tables that grow ----------------------------------------------------------------------------

FAR = -(10**15)  # ids are not near zero


class Growing(nn.Module):
    """Looks every id up twice; the table has only rows of those that were read."""

    def __init__(self, **options):
        super().__init__()
        self.table = GrowingEmbedding(3, **options)
        self.last = nn.Linear(3, 1)

    def forward(self, i):
        return self.last(self.table(FAR + 7919 * i) + self.table(FAR + 7919 * (9 - i)))


def growing(config=None):
    torch.manual_seed(1)
    return Growing(**(config or {}))


def first_values(count=10):
    """First values of the rows of as many ids."""
    ids = FAR + 7919 * torch.arange(count)
    return growing().table.first_values(keys_of_ids(ids))


class ByHand(nn.Module):
    """The same as a whole table, whose ids are counted one by one."""

    def __init__(self, admit_after=1, expire_after=None):
        super().__init__()
        model = growing()
        self.table = nn.Embedding.from_pretrained(first_values(), freeze=False)
        self.last = model.last
        self._admit_after, self._expire_after = admit_after, expire_after
        self.is_admitted, self.counts = torch.zeros(10, dtype=torch.bool), torch.zeros(10)
        self.last_read, self._steps = torch.zeros(10), 0

    def expire(self):
        if self._expire_after and self._steps and self._steps % self._expire_after == 0:
            gone = self.last_read < self._steps - self._expire_after
            self.is_admitted &= ~gone
            self.counts[~self.is_admitted] = 0
            self.table.weight.data[gone] = first_values()[gone]

    def forward(self, i):
        self.expire()
        rows = []
        for ids in (i, 9 - i):
            self.counts += torch.bincount(ids, minlength=10)
            self.is_admitted |= self.counts >= self._admit_after
            self.last_read[ids] = self._steps
            rows.append(self.table(ids) * self.is_admitted[ids][:, None])
        self._steps += 1
        return self.last(sum(rows))


def rows_by_id(checkpoint):
    """The rows of a checkpoint's table, zeros for an id that has none; and the other weights."""
    state = weights_of(checkpoint)
    ids = (ids_of_keys(state["table.keys"]) - FAR) // 7919
    found = torch.zeros(10, 3)
    is_used = state["table.last_read"] >= 0
    found[ids[is_used]] = state["table.weight"][is_used]
    assert len(set(ids[is_used].tolist())) == int(is_used.sum())
    return {"table": found, **{key: state[key] for key in ("last.weight", "last.bias")}}


def rows_by_hand(model):
    model.expire()
    state = model.state_dict()
    table = state.pop("table.weight") * model.is_admitted[:, None]
    return {"table": table, **state}


GROWTH = {
    "all": {},
    "third time": {"admit_after": 3},
    "for two updates": {"expire_after": 2},
    "both": {"admit_after": 2, "expire_after": 3},
}


def passing_rows(sizes):
    """Rows whose ids come and go."""
    shards = shards_of(sizes)
    for shard in shards:
        shard["i"] = (np.arange(len(shard["i"])) // 2 % 5).astype(shard["i"].dtype)
    return shards


@pytest.mark.parametrize("options", GROWTH.values(), ids=GROWTH)
@pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS)
def test_workers_grow_as_one_process_does(crew, run, sizes, options):
    shards, sgd = passing_rows(sizes), optimizer_of("SGD")
    how = {"epochs": 3, "shuffle": False}
    by_hand, _ = train_alone(ByHand(**options), sgd, squared, shards, batch_size=4, seed=5, **how)
    found = rows_by_id(fit(crew, run, shards, sgd, model=growing, config=options, **how))
    assert largest_difference(found, rows_by_hand(by_hand)) <= 1e-6


@pytest.mark.parametrize("kind", ["Adagrad", "RowwiseAdagrad", "SparseAdam"])
@pytest.mark.parametrize("storage", ["memory", "mmap"])
@pytest.mark.parametrize("sizes", [[7, 4], [11], [5, 3, 2, 1]], ids=str)
def test_a_growing_table_goes_on_where_it_was(crew, run, tmp_path, kind, storage, sizes):
    """On as many workers to the last bit; on others from the same rows, states and counts."""

    def optimizer(model, config=None):
        model.last.requires_grad_(False)
        return OPTIMIZERS[kind]([model.table.weight])

    options = {
        "model": growing,
        "shuffle": False,
        "config": {"storage": storage, "admit_after": 2, "expire_after": 4},
    }
    half = fit(crew, run, passing_rows([7, 4]), optimizer, epochs=1, **options)
    if sizes == [7, 4]:
        straight = CheckpointDirectory.create(str(tmp_path / "straight"))
        expected = fit(crew, straight, passing_rows(sizes), optimizer, epochs=3, **options)
        found = fit(crew, run, passing_rows(sizes), optimizer, epochs=3, snapshot=half, **options)
        for name in expected.slices.names:
            for owner in range(2):
                one, two = (each.slices.of_owner(name, owner) for each in (expected, found))
                assert np.array_equal(one, two), name
        return
    config = options.pop("config")
    parts = ModelParts(growing, optimizer, nn.MSELoss(), config=config)
    settings = FitSettings(StoppingCriterion(epochs=1), 4, 5, ["i"], ["y"], run_url=run.url)
    doc, state = half.pack()

    def program(worker):
        fit = TorchFit(worker, TorchDistributedSync(worker), parts, settings)
        return {name: array.copy() for name, array in fit.built.tables.arrays().items()}

    shards = [{"data": s} for s in passing_rows(sizes)]
    slices, _ = crew.run(program, shards, state, {"snapshot": doc})
    expected = loads(whole(half).files["model.pt"])
    states = loads(whole(half).files["optimizer.pt"])["state"][0]
    keys = {"weight": "", "keys": "-keys", "last_read": "-last_read"}
    arrays = {f"table.weight{end}": expected[f"table.{key}"] for key, end in keys.items()}
    lengths = {k: v for k, v in states.items() if torch.is_tensor(v) and v.dim()}
    arrays |= {f"table.weight.{key}": value for key, value in lengths.items()}
    assert len(arrays) > 3
    order = torch.sort(expected["table.keys"][1:]).indices + 1
    for rank, own in enumerate(slices):
        owners = owners_of_keys(torch.from_numpy(own["table.weight-keys"][1:]), len(sizes))
        assert (owners == rank).all()
    for name, value in arrays.items():
        joined = np.concatenate([own[name][1:] for own in slices])
        by_key = np.argsort(np.concatenate([own["table.weight-keys"][1:] for own in slices]))
        assert np.array_equal(joined[by_key], value[order].numpy()), name
        assert not any(own["table.weight"][0].any() for own in slices)
    waiting = np.concatenate([own["table.weight-candidates"] for own in slices])
    assert sorted(waiting.tolist()) == sorted(expected["table.candidates"].tolist())


@pytest.mark.slow
def test_a_growing_table_is_evaluated_predicted_saved_and_loaded(data, tmp_path, monkeypatch):
    def fitted_on(workers, folder):
        return Estimator.from_torch(
            model=lambda config: growing({"admit_after": 2}),
            optimizer=optimizer_of("Adagrad"),
            loss=nn.MSELoss(),
            backend="local",
            workers_per_node=workers,
            model_dir=str(tmp_path / folder),
        )

    fitted = fitted_on(2, "models")
    fitted.fit(data, epochs=2, batch_size=4, seed=3)
    model = fitted.get_model()
    seen = np.unique(np.concatenate([data[0], 9 - data[0]]))
    assert model.table.ids().tolist() == sorted((FAR + 7919 * seen).tolist())
    with torch.no_grad():
        expected = model(torch.from_numpy(data[0])).numpy()
        unknown = model.table(torch.tensor([3, FAR - 1]))
    assert not unknown.any()
    loss = float(np.square(expected - data[1]).mean())
    assert np.allclose(fitted.predict(data[0]), expected[:, 0], atol=1e-6)
    assert fitted.evaluate(data, batch_size=4)["val_loss"] == pytest.approx(loss, rel=1e-5)
    arrow = model.table.to_arrow("user", "prediction")
    assert arrow["user"].to_pylist() == model.table.ids().tolist()
    rows = model.table(torch.tensor(arrow["user"].to_numpy())).detach().numpy()
    assert np.array_equal(np.stack(arrow["prediction"].to_numpy()), rows)
    path = fitted.save(str(tmp_path / "model.pt"))
    other = fitted_on(1, "other")
    other.load(path)
    assert largest_difference(other.get_model().state_dict(), model.state_dict()) == 0
    assert other.evaluate(data)["val_loss"] == pytest.approx(loss, rel=1e-5)
    other.fit(data, epochs=1, batch_size=4)
    grown = other.get_state_dict()["optimizers"][0]["state"][0]["sum"]
    assert grown.shape == other.get_model().table.weight.shape
    assert (grown[1:].sum(1) > 0).all()
    monkeypatch.setattr("bigdl.training.slices.BROADCAST", 0)
    assert np.allclose(fitted.predict(data[0]), expected[:, 0], atol=1e-6)
    for each in (fitted, other):
        each.shutdown()


def test_fields_have_ids_of_their_own():
    table = GrowingEmbedding(2, fields=3)
    ids = torch.tensor([[5, 5, -5], [0, 1, 5]])
    keys = keys_of_ids(table.with_fields(ids))
    assert len(keys.unique()) == 6
    rows, saved = table.rows, []
    rows.row_indices([(torch.stack([keys.flatten(), torch.ones(6).long()], 1).flatten(), True)])
    for field in range(3):
        found = table.to_arrow("id", "row", field)
        assert found["id"].to_pylist() == sorted(set(ids[:, field].tolist()))
        saved.append(np.stack(found["row"].to_numpy()))
    assert np.array_equal(table(ids)[0, 2].detach().numpy(), saved[2][0])


@settings(max_examples=50, deadline=None)
@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=40),
    parts=st.integers(1, 7),
)
def test_a_key_has_one_owner_and_one_place(ids, parts):
    keys = keys_of_ids(torch.tensor(ids, dtype=torch.int64))
    assert ids_of_keys(keys).tolist() == ids
    ordered = torch.sort(keys).values
    table = GrowingEmbedding(1)
    ends = table.rows.ends(ordered, parts)
    owners = owners_of_keys(ordered, parts)
    for owner in range(parts):
        assert (owners[ends[owner] : ends[owner + 1]] == owner).all()
    assert ends[-1] == len(ids)
    known = KeyIndex()
    half = len(ids) // 2
    known.put(keys[:half], torch.arange(half) + 1)
    assert known.find(keys[half:]).tolist() == [0] * (len(ids) - half)
    known.put(keys[half:], torch.arange(half, len(ids)) + 1)
    assert known.find(keys).tolist() == list(range(1, len(ids) + 1))


@pytest.mark.slow_cases("<lambda>-is no growing table")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: GrowingEmbedding(0), "embedding_dim.*0"),
        (lambda: GrowingEmbedding(2, fields=0), "fields.*0"),
        (lambda: GrowingEmbedding(2, admit_after=0), "admit_after.*0"),
        (lambda: GrowingEmbedding(2, expire_after=-1), "expire_after.*-1"),
        (lambda: GrowingEmbedding(2, init=0.1), "init.*0.1"),
        (lambda: GrowingEmbedding(2, fields=2)(torch.tensor([1, 2, 0])), r"dimension of 2.*3"),
        (lambda: GrowingEmbedding(2, fields=2)(torch.tensor([1, 2**63 - 1])), "should be from -"),
        (lambda: GrowingEmbedding(2).to_arrow(field=1), "field.*0.*1"),
        (
            lambda: GrowingEmbedding(2).load_state_dict(nn.Embedding(3, 2).state_dict()),
            "is no growing table",
        ),
    ],
)
def test_wrong_use_of_a_growing_table_gets_one_sentence(make, text):
    with pytest.raises((UsageError, RuntimeError), match=text):
        make()
