"""States that a group leaves with the executors are there for the next one, wherever that runs."""

import shutil

import numpy as np
import pytest

from bigdl.orca.parameter_layer.barrier import StateFiles
from bigdl.orca.parameter_layer.messages import ArrayMessage
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.launch import launch
from bigdl.runtime.worker import Worker

RANKS = 3


def state(rank):
    """States differ in size, too."""
    return ArrayMessage({"rank": rank, "values": np.full(1000 * (rank + 1), rank, np.float32)})


def in_processes(work, folder):
    """What ``work(rank, sync, folder)`` gives for each of three ranks that can talk."""
    (folder / "meet").mkdir()
    return launch(run, RANKS, (work, folder))


def run(rank, work, folder):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet' / 'here'}", rank=rank, world_size=RANKS
    )
    try:
        sync = TorchDistributedSync(Worker(rank, RANKS))
        sync.start()
        return work(rank, sync, folder)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def place_of(rank, folder):
    """Ranks 0 and 1 run on one executor, 2 on another."""
    return str(folder / ("one" if rank < 2 else "other"))


def is_own(rank, found):
    return bytes(found) == bytes(state(rank))


def lose(sync, rank, *folders):
    """Executors go away; nobody goes on before."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        for each in folders:
            shutil.rmtree(each)
    dist.barrier()


def use(rank, sync, folder):
    """A training whose executors are lost one after the other."""
    said = []
    states = StateFiles(sync, place_of(rank, folder))
    states.keep_only(None)
    states.write("first", state(rank))
    said.append(is_own(rank, states.read("first")))
    states.write("second", state(rank))
    states.keep_only("second")
    said.append(states.read("first") is None)
    said.append(is_own(rank, states.read("second")))
    lose(sync, rank, place_of(2, folder))
    states = StateFiles(sync, place_of(rank, folder))
    said.append(is_own(rank, states.read("second")))
    states.write("third", state(rank))
    lose(sync, rank, place_of(0, folder))
    states = StateFiles(sync, place_of(rank, folder))
    said.append(is_own(rank, states.read("third")))
    lose(sync, rank, place_of(0, folder), place_of(2, folder))
    states = StateFiles(sync, place_of(rank, folder))
    said.append(states.read("third") is None)
    return said


@pytest.mark.slow
def test_a_state_outlives_the_executor_that_it_is_of(tmp_path):
    for said in in_processes(use, tmp_path):
        assert said == [True] * 6


def swap(rank, sync, folder):
    """Every rank runs where another one has been."""
    StateFiles(sync, place_of(rank, folder)).write("state", state(rank))
    states = StateFiles(sync, place_of(RANKS - 1 - rank, folder))
    return is_own(rank, states.read("state"))


@pytest.mark.slow
def test_a_rank_that_runs_elsewhere_is_given_its_state(tmp_path):
    assert in_processes(swap, tmp_path) == [True] * RANKS
