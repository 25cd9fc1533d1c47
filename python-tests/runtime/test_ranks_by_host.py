"""Ranks of workers whose hosts are known only once they run: those of one host lie side by side."""

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
    """Local workers that the engine has put on two hosts in turn."""

    def execute(spec, attempt, place, directory):
        host = f"127.0.0.{1 + place % 2}"
        with (
            mock.patch.object(task, "outgoing_address", return_value=host),
            mock.patch.dict("os.environ", GLOO_SOCKET_IFNAME="lo"),
        ):
            return task.execute(spec, attempt, iter(()), place, directory)

    monkeypatch.setattr(local, "execute_task", execute)
    monkeypatch.setattr(LocalEngine, "cluster_places_tasks", True)


def test_workers_of_one_host_have_ranks_side_by_side(two_hosts):
    found = LocalEngine().run(lambda worker: [worker.rank, worker.host], num_workers=4)
    assert found == [[0, "127.0.0.1"], [1, "127.0.0.1"], [2, "127.0.0.2"], [3, "127.0.0.2"]]


def training(callbacks=()):
    """Weights after a training of four workers."""
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


@pytest.mark.fault
def test_rows_and_retries_go_by_rank(two_hosts, tmp_path):
    """What a rank reads, learns and reads again after a loss does not depend on where it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "cluster_places_tasks", False)
        expected = training()
    assert training() == expected
    kill = faults.Kill(tmp_path / "killed", 1, 20)
    assert training([kill]) == expected
    assert kill.marker.exists()
