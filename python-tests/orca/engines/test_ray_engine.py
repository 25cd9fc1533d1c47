"""What only the engine of Ray promises: its actors stay, and take no CPUs while they wait."""

import os
import time

import pytest
import ray_models as rays
from refusals import refused

from bigdl.orca.engines.ray import RayEngine

pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")


@pytest.fixture
def engine():
    rays.active_ray()
    return RayEngine(workers_per_node=2)


def pid_of(worker):
    return os.getpid()


@pytest.mark.slow
def test_processes_live_from_one_program_to_the_next(engine):
    first = set(engine.run(pid_of))
    assert len(first) == 2
    assert set(engine.run(pid_of)) == first
    assert set(engine.run(pid_of, num_workers=1)) < first


def test_waiting_workers_hold_no_cpu(engine):
    import ray

    engine.run(pid_of)
    give_up = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 2 and time.monotonic() < give_up:
        time.sleep(0.05)
    assert ray.available_resources().get("CPU") == 2


def test_cpus_that_others_use_are_waited_for_but_not_for_ever(engine):
    import ray

    @ray.remote(num_cpus=1)
    class Busy:
        def ready(self):
            return True

    busy = Busy.remote()
    ray.get(busy.ready.remote())
    patient = RayEngine(workers_per_node=2, patience=0.5)
    with refused("resource-limit", "2", "1"):
        patient.run(pid_of)
    ray.kill(busy)
    assert len(engine.run(pid_of)) == 2
