"""Iterable data in several workers, and one Estimator in several threads."""

import logging
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from bigdl.orca.learn.pytorch import Estimator


class Stream(IterableDataset):
    """Rows from `first` on, in another order in each process if `is_shuffled`."""

    def __init__(self, first=0, step=1, is_shuffled=False):
        self.rows, self.is_shuffled = range(first, 101, step), is_shuffled

    def __iter__(self):
        rows = np.random.permutation(self.rows) if self.is_shuffled else self.rows
        for i in rows:
            yield torch.full((2,), float(i)), torch.tensor([float(i)])


def estimator(workers=2):
    return Estimator.from_torch(
        model=lambda config: nn.Linear(2, 1),
        loss=nn.MSELoss(),
        optimizer=lambda m, config: torch.optim.SGD(m.parameters(), lr=1e-6),
        metrics=["mse"],
        backend="local",
        workers_per_node=workers,
    )


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_rows_that_all_workers_read_are_shared_out(is_shuffled, caplog, capfd):
    loader = DataLoader(Stream(is_shuffled=is_shuffled), batch_size=10)
    est = estimator()
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        (entry,) = est.fit(loader, epochs=1, batch_size=10, seed=0, validation_data=loader)
    assert entry["num_samples"] == entry["val_num_samples"] == 101
    (text,) = {r.getMessage() for r in caplog.records if "iterable" in r.getMessage()}
    assert 'the part config["rank"] of config["size"]' in text
    evaluated = est.evaluate(loader, batch_size=10)
    assert evaluated["num_samples"] == 101
    assert "All 2 workers have read the same 101 rows" in capfd.readouterr().out
    rows = torch.arange(101.0)[:, None]
    with torch.no_grad():
        error = est.get_model()(rows.expand(-1, 2)) - rows
    assert float(evaluated["MSE"]) == pytest.approx(float((error**2).mean()), rel=1e-5)


def test_streams_that_are_cut_by_rank_are_left_alone(caplog):
    def data(config, batch_size):
        return DataLoader(Stream(config["rank"], config["size"]), batch_size)

    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        (entry,) = estimator().fit(data, epochs=1, batch_size=10)
    assert entry["num_samples"] == 101
    assert not caplog.records


def test_fits_of_one_estimator_in_two_threads_follow_each_other(caplog):
    x = np.ones((20, 2), "float32")
    est, results = estimator(workers=1), []

    def fit():
        results.append(est.fit((x, x[:, :1]), epochs=2, batch_size=10))

    threads = [threading.Thread(target=fit) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    epochs = sorted(entry["epoch"] for entries in results for entry in entries)
    assert epochs == [1, 2, 3, 4]
    assert any("Another thread trains this Estimator" in r.getMessage() for r in caplog.records)
