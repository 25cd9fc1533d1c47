"""Tables in a fit: each step has the TableLoader's rows, for any number of workers and resumes."""

import itertools
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from bigdl.data import TableLoader
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.digest import digest_of_rows
from bigdl.runtime.shards.joined import JoinedShard, common_leaves, widen_spool
from bigdl.runtime.shards.shard import Shard, SpoolWriter
from bigdl.runtime.shards.table_batches import EpochRows, PartRows, TablePlan, table_order
from bigdl.training.table_rows import in_table_order

ROWS, BATCH = 5003, 400


def joined_spools(folder, parts, width=3):
    """Spools of the rows 0, 1, ... in parts, joined, and the arrays of the whole table."""
    rows = sum(parts)
    numbers = np.arange(rows * width, dtype="float32").reshape(rows, width)
    texts = np.array([f"{i:x}" * (1 + i % 5) for i in range(rows)]).astype("S")
    spools, first = [], 0
    for rank, count in enumerate(parts):
        writer = SpoolWriter(folder, 1, f"data-{rank}", [])
        writer.number_rows("t", first, rows)
        of_part = slice(first, first + count)
        text = texts[of_part].astype(f"S{32 << rank}")
        leaves = [
            ArraySpec("x", None, "float32", (width,)),
            ArraySpec("t", None, text.dtype.str[1:], ()),
        ]
        writer.append(0, 0, count, leaves, [np.ascontiguousarray(numbers[of_part]), text])
        spools.append(writer.finish())
        first += count
    leaves = common_leaves(spools)
    for spool in spools:
        widen_spool(spool, leaves)
    return JoinedShard(spools, leaves), numbers, texts


@pytest.mark.parametrize("parts", [[7], [5, 6], [0, 9000, 1, 0, 4097], [4096, 4096]])
def test_one_gather_reads_rows_of_all_spools(tmp_path, parts):
    shard, numbers, texts = joined_spools(str(tmp_path), parts)
    rows = np.random.default_rng(0).permutation(sum(parts))
    stored = shard.stored_rows(rows)
    assert (shard.arrays[0][stored] == numbers[rows]).all()
    assert (shard.arrays[1][stored] == texts[rows]).all()
    assert isinstance(shard, Shard)
    assert shard.rows == sum(parts)


def test_spools_of_other_columns_are_not_joined(tmp_path):
    spools = []
    for dtype in ("float32", "float64"):
        writer = SpoolWriter(str(tmp_path), 1, dtype, [])
        writer.append(0, 0, 2, [ArraySpec("x", None, dtype, ())], [np.zeros(2, dtype)])
        spools.append(writer.finish())
    assert common_leaves(spools) is None


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(2, 40_000),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    row=st.floats(0, 0.999),
    other=st.floats(0, 0.999),
)
def test_the_digest_of_a_table_is_that_of_its_rows_in_any_parts(rows, cuts, row, other):
    x = np.random.default_rng(0).random((rows, 3)).astype("float32")
    texts = np.array([f"{i:x}" for i in range(rows)]).astype("S8")
    ends = [0, *sorted(int(each * rows) for each in cuts), rows]
    whole = digest_of_rows([x, texts], 0)
    parts = [
        digest_of_rows([x[low:high], texts[low:high].astype(f"S{8 << number}")], low)
        for number, (low, high) in enumerate(itertools.pairwise(ends))
    ]
    assert sum(parts) % (1 << 64) == whole
    i, j = int(row * rows), int(other * rows)
    changed = x.copy()
    changed[i, 1] += 1
    assert digest_of_rows([changed, texts], 0) != whole
    if i != j:
        exchanged = x.copy()
        exchanged[[i, j]] = x[[j, i]]
        assert digest_of_rows([exchanged, texts], 0) != whole


sizes = st.integers(1, 6000)


@settings(max_examples=60, deadline=None)
@given(
    rows=sizes,
    batch_size=st.integers(1, 700),
    workers=st.integers(1, 5),
    others=st.integers(1, 5),
    stop=st.floats(0, 1),
    shuffle=st.booleans(),
    window=st.sampled_from([0, 700]),
    epoch=st.integers(0, 3),
)
def test_steps_of_any_workers_are_those_of_one_order(
    rows, batch_size, workers, others, stop, shuffle, window, epoch
):
    table = {"table": "t", "table_rows": rows, "fingerprint": "0"}
    facts = table_order(table, shuffle, [window], [rows])

    def steps(count, first, last):
        plan = TablePlan([rows] + [0] * (count - 1), batch_size, False, facts)
        orders = [
            EpochRows(plan, facts, 3, epoch, rank, lambda each: each) for rank in range(count)
        ]
        for step in range(first, plan.steps if last is None else last):
            ranges = [plan.batch(step, rank) for rank in range(count)]
            parts = [
                o[low:high] for o, (low, high, _) in zip(orders, ranges, strict=True) if low < high
            ]
            seen = np.concatenate(parts)
            assert len(seen) == ranges[0][2]
            if len(seen) < batch_size and len(seen) > 1:
                assert min(map(len, parts)) > 1
            yield seen.tolist()

    whole = list(steps(1, 0, None))
    assert sorted(each for step in whole for each in step) == list(range(rows))
    middle = int(stop * len(whole))
    assert [*steps(workers, 0, middle), *steps(others, middle, None)] == whole


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(4096, 6000),
    hosts=st.lists(st.integers(0, 2), min_size=2, max_size=6),
    batch_size=st.integers(96, 700),
    window=st.sampled_from([0, 64, 700]),
    epoch=st.integers(0, 3),
)
def test_hosts_divide_each_step_by_the_rows_that_they_have(rows, hosts, batch_size, window, epoch):
    table = {"table": "t", "table_rows": rows, "fingerprint": "0"}
    facts = table_order(table, True, [window], [rows])
    ends = [rows * rank // len(hosts) for rank in range(len(hosts) + 1)]
    parts = list(itertools.pairwise(ends))
    whole = TablePlan([rows], batch_size, False, facts)
    order = EpochRows(whole, facts, 3, epoch, 0, lambda each: each)
    workers = []
    for rank, host in enumerate(hosts):
        ranks = [each for each, other in enumerate(hosts) if other == host]
        of_host = [parts[each] for each in ranks]
        plan = TablePlan([high - low for low, high in parts], batch_size, False, facts)
        member = ranks.index(rank), len(ranks)
        plan.pass_rows = PartRows(plan, facts, 3, epoch, lambda each: each, of_host, *member)
        workers.append((plan, of_host))
    assert workers[0][0].are_spread
    for step in range(rows // batch_size):
        start, stop, _ = whole.batch(step, 0)
        seen = []
        for rank, (plan, of_host) in enumerate(workers):
            low, high, count = plan.batch(step, rank)
            mine = plan.pass_rows[low:high]
            assert (low, len(mine), count) == (start, high - low, batch_size)
            assert all(any(a <= row < b for a, b in of_host) for row in mine)
            seen += mine.tolist()
        assert sorted(seen) == sorted(order[start:stop].tolist())


@settings(max_examples=15, deadline=None)
@given(rows=sizes, batch_size=st.integers(1, 700), shuffle=st.booleans(), epoch=st.integers(0, 2))
def test_the_order_is_that_of_a_table_loader(rows, batch_size, shuffle, epoch):
    loader = TableLoader(
        pa.table({"x": np.arange(rows)}), batch_size=batch_size, seed=5, shuffle=shuffle, threads=0
    )
    loader.set_epoch(epoch)
    facts = table_order(
        {"table": "t", "table_rows": rows, "fingerprint": "0"}, shuffle, [0, 0], [rows, 0]
    )
    plan = TablePlan([rows, 0], batch_size, False, facts)
    orders = [EpochRows(plan, facts, 5, epoch, rank, lambda each: each) for rank in (0, 1)]
    for step, batch in enumerate(loader):
        parts = [
            orders[rank][slice(*plan.batch(step, rank)[:2])]
            for rank in (0, 1)
            if plan.batch(step, rank)[0] < plan.batch(step, rank)[1]
        ]
        assert np.concatenate(parts).tolist() == batch["x"].tolist()
        assert sum(map(len, parts)) == loader.global_rows


# -- fits ------------------------------------------------------------------------------------------


class Steps(Callback):
    """Writes the rows of each step to a file."""

    def __init__(self, folder):
        self.folder = folder

    def before_run(self, runner):
        use_hosts(None)  # the rows are open

    def after_train_iter(self, runner):
        if runner.batch is not None:
            path = f"{self.folder}/{runner.global_step}-{runner.rank}"
            np.save(path, runner.batch[0].numpy())


def use_hosts(hosts):
    """Let the workers of this process map spools of their host only; None for all of a machine."""
    from bigdl.runtime.shards.joined import machine_of
    from bigdl.training import table_rows

    def ranks_of_host(rank, views):
        return [each for each, host in enumerate(hosts) if host == hosts[rank]]

    table_rows.machine_of = ranks_of_host if hosts else machine_of


def rows_of_steps(folder):
    steps = {}
    for name in os.listdir(folder):
        step, _, rank = name[:-4].partition("-")
        steps.setdefault(int(step), {})[int(rank)] = (
            np.load(f"{folder}/{name}").astype(int).tolist()
        )
    return [
        [row for rank in sorted(ranks) for row in ranks[rank]] for _, ranks in sorted(steps.items())
    ]


def sorted_steps(steps):
    return [sorted(step) for step in steps]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table")
    rows = pa.table({"x": np.arange(ROWS, dtype="float32"), "y": np.zeros(ROWS, "float32")})
    pq.write_table(rows.slice(0, 3000), path / "a.parquet", row_group_size=700)
    pq.write_table(rows.slice(3000), path / "b.parquet")
    return str(path)


@pytest.fixture(scope="module")
def expected(table):
    loader = TableLoader(table, batch_size=BATCH, seed=3)
    return [batch["x"].int().tolist() for _ in range(2) for batch in loader]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x[:, None] / ROWS)[:, 0]


def fit(data, workers, folder, model_dir=None, backend="local", hosts=None, config=None, **options):
    import torch

    def model(config):
        use_hosts(hosts)
        torch.manual_seed(0)
        return Scaled()

    estimator = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.MSELoss(),
        config=config,
        backend=backend,
        workers_per_node=workers,
        model_dir=None if model_dir is None else str(model_dir),
    )
    os.makedirs(folder, exist_ok=True)
    options = {
        "batch_size": BATCH,
        "seed": 3,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        **options,
    }
    estimator.fit(data, callbacks=[Steps(str(folder))], **options)
    return estimator


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_workers_of_a_fit_read_the_rows_of_a_table_loader(table, expected, tmp_path, workers):
    fit(table, workers, tmp_path, epochs=2)
    assert sorted_steps(rows_of_steps(tmp_path)) == sorted_steps(expected)


@pytest.mark.slow_cases("large")
@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        ([0, 1], {}),
        ([0, 1, 0], {"config": {"shuffle_memory": 1000}}),
        ([0, 0, 1], {"batch_size": 47}),
        ([0, 1], {"config": {"shuffle": False}}),
    ],
    ids=["large", "windows", "small", "unshuffled"],
)
def test_workers_on_several_hosts_read_the_rows_of_one(table, tmp_path, hosts, options):
    several, one = tmp_path / "several", tmp_path / "one"
    a = fit(table, len(hosts), several, epochs=2, hosts=hosts, **options)
    if "shuffle_memory" in options.get("config", {}):  # a window of as many rows
        options = {"config": {"shuffle_memory": 1000 * len(hosts)}}
    b = fit(table, 1, one, epochs=2, **options)
    assert sorted_steps(rows_of_steps(several)) == sorted_steps(rows_of_steps(one))
    for left, right in zip(a.get_model().parameters(), b.get_model().parameters(), strict=True):
        np.testing.assert_allclose(left.detach(), right.detach(), rtol=1e-3)


def test_rows_that_hosts_exchange_are_those_of_one_host_for_each_worker(table, tmp_path):
    for name, hosts in [("several", [0, 1, 1]), ("one", None)]:
        fit(table, 3, tmp_path / name, epochs=1, hosts=hosts, batch_size=32)
    assert rows_of_steps(tmp_path / "several") == rows_of_steps(tmp_path / "one")


@pytest.mark.parametrize("batch_size", [BATCH, 47])
def test_a_fit_is_resumed_in_an_epoch_on_other_hosts(table, tmp_path, batch_size):
    steps, model_dir = tmp_path / "steps", tmp_path / "models"
    options = {"batch_size": batch_size, "checkpoint_trigger": SeveralIteration(1)}
    fit(table, 3, steps, model_dir, hosts=[0, 1, 1], max_steps=5, **options)
    fit(table, 2, steps, model_dir, hosts=[0, 1], max_steps=9, resume="auto", **options)
    fit(table, 1, steps, model_dir, epochs=2, resume="auto", batch_size=batch_size)
    loader = TableLoader(table, batch_size=batch_size, seed=3)
    whole = [batch["x"].int().tolist() for _ in range(2) for batch in loader]
    assert sorted_steps(rows_of_steps(steps)) == sorted_steps(whole)


@pytest.mark.parametrize("others", [2, 3])
def test_a_fit_of_three_workers_is_resumed_in_an_epoch_after_the_last_row(
    table, expected, tmp_path, others
):
    steps, model_dir = tmp_path / "steps", tmp_path / "models"
    fit(table, 3, steps, model_dir, max_steps=5, checkpoint_trigger=SeveralIteration(1))
    assert sorted_steps(rows_of_steps(steps)) == sorted_steps(expected[:5])
    fit(table, others, steps, model_dir, epochs=2, resume="auto")
    assert sorted_steps(rows_of_steps(steps)) == sorted_steps(expected)


def test_changed_rows_are_refused_within_an_epoch(table, tmp_path):
    fit(table, 2, tmp_path / "steps", tmp_path, max_steps=5, checkpoint_trigger=SeveralIteration(1))
    changed = tmp_path / "changed.parquet"
    rows, x = pq.read_table(table), np.arange(ROWS, dtype="float32")
    x[1234] += 1  # a single value
    pq.write_table(rows.set_column(0, "x", pa.array(x)), changed)
    with refused("checkpoint-mismatch", "5,003 rows"):
        fit(str(changed), 2, tmp_path / "steps", tmp_path, epochs=2, resume="auto")
    with refused("checkpoint-mismatch", "one order for all workers"):
        x = np.arange(ROWS, dtype="float32")
        fit({"x": x, "y": x}, 2, tmp_path / "steps", tmp_path, epochs=2, resume="auto")


def test_a_checkpoint_with_hashes_of_rows_is_resumed_with_a_table(table, expected, tmp_path):
    x = np.arange(ROWS, dtype="float32")
    arrays = {"x": x, "y": np.zeros(ROWS, "float32")}
    steps, model_dir = tmp_path / "steps", tmp_path / "models"
    fit(arrays, 3, steps, model_dir, max_steps=5, checkpoint_trigger=SeveralIteration(1))
    fit(table, 2, steps, model_dir, epochs=2, resume="auto")
    seen = rows_of_steps(steps)
    of_epoch = len(expected) // 2
    assert sorted(row for step in seen[:of_epoch] for row in step) == list(range(ROWS))
    assert sorted_steps(seen[of_epoch:]) == sorted_steps(expected[of_epoch:])


@pytest.mark.parametrize("hosts", [[0], [0, 0], [0, 1]])
def test_a_frame_of_files_is_read_in_the_order_of_the_table(
    table, expected, tmp_path, orca_spark, hosts
):
    frame = orca_spark.read.parquet(table)
    fit(frame, len(hosts), tmp_path, backend="spark", epochs=2, hosts=hosts)
    assert sorted_steps(rows_of_steps(tmp_path)) == sorted_steps(expected)


# -- Keras ---------------------------------------------------------------------------------------


def counting_fit(path, model_dir, epochs, *, by_parts=False, **options):
    """Fit a linear model of one-hot rows whose weights count how often each row was read."""
    from bigdl.orca.learn.tf2 import Estimator

    def model(config):
        import keras

        from bigdl.training.keras import data

        data.in_table_order = (lambda source, *rest: source) if by_parts else in_table_order
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        net = keras.Sequential([keras.Input((48,)), layer])
        net.compile(keras.optimizers.SGD(8.0), loss=lambda target, output: -output)
        return net

    estimator = Estimator.from_keras(
        model_creator=model, backend="local", workers_per_node=2, model_dir=str(model_dir)
    )
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    estimator.fit(path, epochs, 8, resume="auto", **columns, **options)
    return np.round(estimator.get_model().get_weights()[0][:, 0]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("by_parts", [False, True])
def test_steps_per_epoch_end_a_pass_that_was_begun_in_the_order_of_the_parts(tmp_path, by_parts):
    rows = pa.FixedSizeListArray.from_arrays(np.eye(48, dtype="float32").reshape(-1), 48)
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"x": rows, "y": np.zeros(48, "float32")}), path)
    options = {"steps_per_epoch": 4}  # of the 6 steps of a pass
    assert sum(counting_fit(path, tmp_path, 1, by_parts=by_parts, **options)) == 32
    assert counting_fit(path, tmp_path, 3, **options) == [2] * 48
