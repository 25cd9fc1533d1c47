"""An epoch that is begun by some workers and ended by others: each row is read once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, Dataset

from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.training.remaining_rows import row_ids

ROWS, BATCH = 50, 6


class Visits(nn.Module):
    """Every row has a weight of its own, from which SGD takes what the row weighs in its batch."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Embedding(ROWS, 1)
        nn.init.zeros_(self.weights.weight)

    def forward(self, row):
        return self.weights(row.long().reshape(-1))


def estimator(folder, workers, backend="local", **config):
    return Estimator.from_torch(
        model=lambda config: Visits(),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda output, target: output.mean(),
        model_dir=str(folder),
        backend=backend,
        workers_per_node=workers,
        config=config,
    )


class Samples(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(0.0)


def arrays():
    return np.arange(ROWS), np.zeros((ROWS, 1), "float32")


INPUTS = {
    "arrays": (arrays, True),
    "arrays in order": (arrays, False),
    "loader": (lambda: DataLoader(Samples(), batch_size=BATCH, shuffle=True), True),
}


def visits(fitted):
    """How often each row was read, where its batch had BATCH rows."""
    weights = fitted.get_model().weights.weight.detach().numpy()
    return np.rint(-BATCH * weights[:, 0]).astype(int)


def begin_and_end(make, data, turns=((2, 1), (3, 2), (1, 3), (2, 1))):
    """Read an epoch by several numbers of workers, one after the other, and the end by two.

    Parameters
    ----------
    make : callable
        ``make(workers)`` makes an Estimator, ``data(workers)`` its input.
    turns : sequence of (int, int)
        Numbers of workers, and how many steps they make.
    """
    options, steps = {"batch_size": BATCH, "seed": 5}, 0
    for workers, more in turns:
        est = make(workers)
        resume = "auto" if steps else None
        steps += more
        est.fit(data(workers), max_steps=steps, resume=resume, **options)
        assert sorted(visits(est)) == [0] * (ROWS - steps * BATCH) + [1] * steps * BATCH
    est = make(2)
    (figures,) = est.fit(data(2), epochs=1, resume="auto", **options)
    counts = visits(est)
    assert sorted(counts) == [1] * (ROWS - 2) + [3] * 2  # the last batch has two rows
    assert figures["num_samples"] == ROWS
    assert len(est.fit(data(2), epochs=2, **options)) == 2
    assert (visits(est) - counts).sum() == 2 * (ROWS - 2 + 3 * 2)
    est.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_each_row_is_read_once_whatever_the_number_of_workers(tmp_path, kind):
    make, shuffle = INPUTS[kind]
    begin_and_end(
        lambda workers: estimator(tmp_path, workers, shuffle=shuffle),
        lambda workers: make(),
    )


class Rated(nn.Module):
    """As :class:`Visits`, for pairs of a user and an item."""

    def __init__(self, users, items):
        super().__init__()
        self.items = items
        self.weights = nn.Embedding(users * items, 1, sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, user, item):
        return self.weights(user.long() * self.items + item.long())


@pytest.mark.slow
def test_ratings_are_read_once_by_two_workers_and_eight_and_three(tmp_path, data_dir):
    ratings = np.loadtxt(data_dir / "ml-100k" / "u.data", dtype=np.int32)[:40_500]
    users, items = ratings[:, 0].max() + 1, ratings[:, 1].max() + 1
    data = {"x": [ratings[:, 0], ratings[:, 1]], "y": ratings[:, 2].astype("float32")}
    options = {"batch_size": 1000, "seed": 5, "checkpoint_trigger": SeveralIteration(5)}
    for workers, steps in ((2, 10), (8, 20), (3, 25), (2, None)):
        est = Estimator.from_torch(
            model=lambda config: Rated(users, items),
            optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=1.0),
            loss=lambda output, target: output.mean(),
            model_dir=str(tmp_path),
            backend="local",
            workers_per_node=workers,
        )
        goal = {"max_steps": steps} if steps else {"epochs": 1}
        figures = est.fit(data, resume="auto", **goal, **options)
        est.shutdown()
    assert figures[-1]["num_samples"] == len(ratings)
    weights = est.get_model().weights.weight.detach().numpy()[:, 0]
    found = weights[ratings[:, 0].astype("int64") * items + ratings[:, 1]]
    # the last batch has 500 rows, which weigh twice as much
    visits = np.rint(-1000 * found).astype(int)
    assert np.bincount(visits).tolist() == [0, len(ratings) - 500, 500]


@pytest.mark.slow
def test_rows_of_a_frame_may_lie_in_other_partitions(tmp_path, orca_spark):
    columns = {"feature_cols": ["row"], "label_cols": ["y"]}

    def frame(workers):
        rows = orca_spark.range(ROWS).selectExpr("id as row", "cast(0 as float) as y")
        return rows.repartition(workers + 2, "row")

    class WithColumns:
        """An Estimator whose fits name the columns."""

        def __init__(self, workers):
            self._own = estimator(tmp_path, workers, "spark")

        def fit(self, data, **options):
            return self._own.fit(data, **columns, **options)

        def __getattr__(self, name):
            return getattr(self._own, name)

    begin_and_end(WithColumns, frame, ((2, 3), (1, 3)))


@pytest.mark.slow
def test_other_rows_are_refused(tmp_path):
    options = {"batch_size": BATCH, "seed": 5}
    estimator(tmp_path, 2).fit(arrays(), max_steps=3, **options)
    rows, targets = arrays()
    other = rows % (ROWS // 2), targets
    est = estimator(tmp_path, 1)
    with refused("checkpoint-mismatch"):
        est.fit(other, resume="auto", **options)
    with refused("checkpoint-mismatch", str(ROWS)):
        est.fit((rows[1:], targets[1:]), resume="auto", **options)
    est.shutdown()


@pytest.mark.slow
def test_rows_that_are_equal_stand_for_each_other(tmp_path):
    rows, targets = arrays()
    data = rows % 5, targets
    options = {"batch_size": BATCH, "seed": 5}
    estimator(tmp_path, 2).fit(data, max_steps=4, **options)
    est = estimator(tmp_path, 3)
    (figures,) = est.fit(data, resume="auto", **options)
    assert figures["num_samples"] == ROWS
    # of each of the five kinds there are ten, but for what the last, smaller batch weighs more
    assert visits(est)[:5].sum() == ROWS - 2 + 3 * 2
    assert min(visits(est)[:5]) == 10
    est.shutdown()


@given(
    width=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "float64", "int64", "int8", "S3", "uint8"]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_ids_tell_rows_apart_and_do_not_depend_on_their_place(width, dtype, seed):
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 9, (300, width))
    columns = [numbers.astype(dtype), random.integers(0, 3, 300).astype("float32")]
    ids = row_ids(columns, 300)
    rows = [(*map(bytes, columns[0][row]), bytes(columns[1][row])) for row in range(300)]
    assert len(set(ids.tolist())) == len(set(rows))
    order = random.permutation(300)
    assert np.array_equal(row_ids([column[order] for column in columns], 300), ids[order])


def test_ids_of_texts_do_not_depend_on_the_longest_one():
    texts, numbers = np.array([b"a", b"bc", b""]), np.arange(3)

    def ids(width):
        longer = texts.astype(f"S{width}").reshape(3, 1).view("uint8")
        return row_ids([longer, numbers], 3).tolist()

    assert ids(2) == ids(11) == ids(64)
