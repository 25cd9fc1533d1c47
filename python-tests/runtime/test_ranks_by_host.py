"""Ranks of workers by host: workers of one host have consecutive ranks."""

from unittest import mock

import faults
import numpy as np
import pytest
import torch

from bigdl.orca.engine import LocalEngine
from bigdl.orca.learn.pytorch import Estimator
from bigdl.runtime import local, task


@pytest.fixture
def two_hosts(monkeypatch):
    """Make local workers appear on two hosts alternately."""

    def execute(spec, attempt, task_index, directory):
        host = f"127.0.0.{1 + task_index % 2}"
        with (
            mock.patch.object(task, "outgoing_address", return_value=host),
            mock.patch.dict("os.environ", GLOO_SOCKET_IFNAME="lo"),
        ):
            return task.execute(spec, attempt, iter(()), task_index, directory)

    monkeypatch.setattr(local, "execute_task", execute)
    monkeypatch.setattr(LocalEngine, "cluster_places_tasks", True)


def test_workers_of_one_host_have_ranks_side_by_side(two_hosts):
    actual = LocalEngine().run(lambda worker: [worker.rank, worker.host], num_workers=4)
    assert actual == [[0, "127.0.0.1"], [1, "127.0.0.1"], [2, "127.0.0.2"], [3, "127.0.0.2"]]


def training(callbacks=()):
    """Return the weights after a training with four workers."""
    rows = np.arange(faults.ROWS, dtype="float64")
    data = {"x": np.stack([np.sin(rows), np.cos(rows), rows % 7], 1), "y": np.sin(rows) + rows % 3}
    estimator = Estimator.from_torch(
        model=faults.model,
        optimizer=faults.optimizer,
        loss=torch.nn.MSELoss(),
        config={"dtype": "float64"},
        backend="local",
        workers_per_node=4,
    )
    estimator.fit(
        data, epochs=faults.EPOCHS, batch_size=faults.BATCH, seed=7, callbacks=list(callbacks)
    )
    return faults.weights(estimator)


@pytest.mark.slow
@pytest.mark.fault
def test_rows_and_retries_go_by_rank(two_hosts, tmp_path):
    """Check that rows, training and retries of a rank do not depend on its host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "cluster_places_tasks", False)
        expected = training()
    assert training() == expected
    kill = faults.Kill(tmp_path / "killed", 1, 20)
    assert training([kill]) == expected
    assert kill.marker.exists()
