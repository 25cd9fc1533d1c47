"""Workers that are killed during a fit: others keep their process, and the result is the same."""

import contextlib
import os
import random
import shutil
import signal
import threading
import time

import faults
import numpy as np
import pandas as pd
import pytest
import ray_models
import torch
from refusals import refused

from bigdl.common.errors import WorkerLost
from bigdl.orca.engine import LocalEngine
from bigdl.orca.learn.backends import LocalBackend, register_backend
from bigdl.orca.learn.optimizers import Adam
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.runtime.channel import Channel
from bigdl.runtime.engine import PeerLost
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.recovery import RecoveryMonitor, await_group, publish_record
from bigdl.testing.chaos import Chaos, ChaosReport
from bigdl.training.in_place import StepGuard, flat_values, shaped_values

pytestmark = pytest.mark.fault

ROWS, BATCH, EPOCHS = 160, 20, 3
STEPS = EPOCHS * ROWS // BATCH


class Net(torch.nn.Module):
    """A model with buffers and random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.2),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 1),
        )

    def forward(self, *columns):
        return self.layers(torch.stack(columns, 1)).squeeze(-1)


class Pids(Callback):
    """Leaves a line for each step of each worker."""

    def __init__(self, folder):
        self.folder = folder

    def after_train_iter(self, runner):
        with open(self.folder / f"steps-{runner.rank}", "a") as file:
            file.write(f"{os.getpid()} {runner.global_step} {time.time()}\n")

    def of(self, rank):
        lines = (self.folder / f"steps-{rank}").read_text().splitlines()
        return [tuple(map(int, line.split()[:2])) for line in lines]


class KillInCollective(faults.Once):
    """Kill a worker while the others wait for its gradients."""

    def before_train_iter(self, runner):
        if runner.global_step == self.step - 1:
            super().after_train_iter(_At(runner.rank, self.step, runner))

    def after_train_iter(self, runner):
        pass

    def act(self, runner):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)


class _At:
    def __init__(self, rank, step, runner):
        self.rank, self.global_step, self.runner = rank, step, runner


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    random_numbers = np.random.default_rng(0)
    x = random_numbers.normal(size=(ROWS, 3)).astype("float32")
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": x.sum(1)})
    path = str(tmp_path_factory.mktemp("table") / "rows.parquet")
    frame.to_parquet(path, row_group_size=40)
    return path


def train(data, *callbacks, workers=2, recovery="in_place", backend="local", **options):
    estimator = Estimator.from_torch(
        model=Net(),
        optimizer=Adam(0.01),
        loss=torch.nn.MSELoss(),
        backend=backend,
        workers_per_node=workers,
        **{key: options.pop(key) for key in ("model_dir",) if key in options},
    )
    options = {"epochs": EPOCHS, "max_failures": 9, "seed": 5, **options}
    history = estimator.fit(
        data,
        batch_size=BATCH,
        feature_cols=["a", "b", "c"],
        label_cols="y",
        callbacks=list(callbacks),
        recovery=recovery,
        **options,
    )
    state = {key: value.tolist() for key, value in estimator.get_model().state_dict().items()}
    return state, [(entry["train_loss"], entry["num_samples"]) for entry in history]


@pytest.fixture(scope="module")
def undisturbed(table):
    return train(table)


def test_a_killed_worker_is_replaced_and_the_other_one_continues(table, undisturbed, tmp_path):
    step = random.Random(3).randrange(9, 15)
    pids, kill = Pids(tmp_path), faults.Kill(tmp_path / "killed", 1, step)
    assert train(table, pids, kill) == undisturbed
    # the survivor has kept its process and repeats at most a step
    assert len({pid for pid, _ in pids.of(0)}) == 1
    assert len(pids.of(0)) <= STEPS + 1
    assert len({pid for pid, _ in pids.of(1)}) == 2


SLOW = [
    pytest.param([(0, 12)], {}, id="rank 0"),
    pytest.param([(1, 8)], {}, id="last step of an epoch"),
    pytest.param([(1, 4), (0, 13), (1, 20)], {}, id="three times"),
    pytest.param([(2, 13)], {"workers": 4}, id="one of four"),
    pytest.param([(1, 13)], {"exact": "bits", "virtual_shards": 4}, id="bits"),
    pytest.param([(1, 7)], {"accumulate_grad_batches": 2}, id="accumulated"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "options"), SLOW)
def test_kills_change_nothing(table, tmp_path, kills, options):
    killers = [faults.Kill(tmp_path / f"killed-{rank}-{step}", rank, step) for rank, step in kills]
    assert train(table, *killers, **options) == train(table, **options)
    assert all(killer.marker.exists() for killer in killers)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_worker_killed_while_the_others_wait_for_it(table, undisturbed, tmp_path, rank):
    kill = KillInCollective(tmp_path / "killed", rank, 13)
    assert train(table, kill) == undisturbed
    assert kill.marker.exists()


@pytest.mark.slow
def test_worker_killed_while_it_writes_a_checkpoint(table, undisturbed, tmp_path):
    folder = tmp_path / "model"
    kill = faults.Kill(tmp_path / "killed", 0, 13)
    trigger = SeveralIteration(1)
    found = train(table, kill, model_dir=str(folder), checkpoint_trigger=trigger)
    assert found == undisturbed
    assert [path.name for path in folder.rglob(".checkpoint-*")] == []
    resumed = train(table, model_dir=str(folder), resume="auto", epochs=EPOCHS)
    assert resumed == undisturbed


@pytest.mark.slow
def test_replacement_killed_at_its_start_is_replaced(table, undisturbed, tmp_path):
    class KillTwice(faults.Kill):
        def before_run(self, runner):
            if self.marker.exists() and len(self.marker.read_text().splitlines()) < 2:
                self.step = runner.global_step
                self.after_train_iter(runner)

    kill = KillTwice(tmp_path / "killed", 1, 12, times=2)
    assert train(table, kill) == undisturbed
    assert len(kill.marker.read_text().splitlines()) == 2


@pytest.mark.slow
def test_loss_of_a_worker_and_its_rows_restarts_the_fit(table, undisturbed, tmp_path):
    class LoseSpoolAndDie(faults.Kill):
        def act(self, runner):
            shutil.rmtree(runner.worker.shard.spool.path)
            super().act(runner)

    kill = LoseSpoolAndDie(tmp_path / "killed", 1, 13)
    # the loss counts once, although both ways of recovery are tried
    assert train(table, kill, recovery=None, max_failures=1) == undisturbed
    assert kill.marker.exists()


@pytest.mark.slow
def test_worker_that_hangs_is_replaced_after_the_timeout(table, undisturbed, tmp_path):
    class ShortTimeout(LocalBackend):
        def engine(self, min_workers=None, **options):
            return LocalEngine(timeout=4.0, **options)

    class Hang(faults.Once):
        def act(self, runner):
            time.sleep(600)

    register_backend("short-timeout", ShortTimeout)
    hang = Hang(tmp_path / "hung", 1, 13)
    started = time.monotonic()
    assert train(table, hang, backend="short-timeout") == undisturbed
    assert hang.marker.exists()
    assert time.monotonic() - started < 200


@pytest.mark.slow
def test_killed_actor_is_replaced_on_ray(table, tmp_path):
    ray_models.active_ray()
    pids, kill = Pids(tmp_path), faults.Kill(tmp_path / "killed", 0, 13)
    undisturbed = train(table, backend="ray")
    assert train(table, pids, kill, backend="ray") == undisturbed
    assert len({pid for pid, _ in pids.of(1)}) == 1
    assert len({pid for pid, _ in pids.of(0)}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "cut_off"])
def test_chaos_reports_what_it_did_and_the_result_is_the_same(table, undisturbed, action):
    class Slower(Callback):
        def after_train_iter(self, runner):
            time.sleep(0.15)

    with Chaos(every=1.0, actions=[action], most=2, seed=2) as chaos:
        assert train(table, Slower()) == undisturbed
    report = chaos.report
    assert 1 <= len(report.events) <= 2
    assert all(event["action"] == action and event["stall_s"] > 0 for event in report.events)
    assert 0 < report.goodput <= 1.1


def test_exchanged_buffers_keep_every_digit():
    values = [
        torch.tensor(2**60 + 1),
        torch.tensor([True, False, True]),
        torch.tensor([[0.1, float("nan")]], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.zeros(0),
        torch.tensor([-0.0, 1e-45]),
    ]
    found = shaped_values(flat_values(values), values)
    for one, other in zip(found, values, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class Driver:
    """Two ranks of a job without processes, and the driver's side of its recovery."""

    def __init__(self, max_failures, prepare=None):
        self.channel = Channel(None).attempt(1)
        policy, self.losses = FailurePolicy(max_failures), []

        def on_loss(error):
            self.losses.append(str(error))
            try:
                policy.allow_retry(error)
            except WorkerLost:
                return False
            return True

        self.monitor = RecoveryMonitor(self.channel, 2, 9.0, on_loss, prepare)
        publish_record(self.channel, b"")

    def regroup(self, *positions, lost=None):
        group = self.monitor.group
        if lost is not None and not self.monitor.accept(lost, WorkerLost("one is lost")):
            return False
        reports = [{"position": each, "cause": "reset by peer"} for each in positions]
        ranks = [
            threading.Thread(target=self.report, args=(group + 1, rank, report))
            for rank, report in enumerate(reports)
        ]
        for each in ranks:
            each.start()
        try:
            while self.monitor.group == group:
                self.monitor.poll(lambda rank: None)
        finally:
            self.channel.set("abort", "")  # ends the ranks that were not announced a group
            for each in ranks:
                each.join()
            self.channel.delete("abort")
        return True

    def report(self, group, rank, report):
        with contextlib.suppress(PeerLost):
            await_group(self.channel, group, rank, report, None)


def test_a_loss_counts_once_and_its_group_does_not():
    driver = Driver(1)
    assert driver.regroup([1], None, lost=1)
    assert not driver.regroup([1], None, lost=1)
    assert driver.losses == ["one is lost"] * 2
    assert driver.monitor.is_refused


def test_collectives_that_always_fail_end_the_fit():
    driver = Driver(2)
    assert driver.regroup([1], [1])
    assert driver.regroup([1], [1])
    with pytest.raises(WorkerLost, match="lost their connections: reset by peer") as caught:
        driver.regroup([1], [1])
    assert driver.monitor.group == 2
    assert len(driver.losses) == 3
    assert caught.value.is_counted


def test_preparation_that_fails_harms_no_fit(monkeypatch, caplog):
    def fail(modules):
        raise OSError("no more processes")

    monkeypatch.setattr("bigdl.runtime.recovery.SPARE_START_S", 0.0)
    driver = Driver(1, fail)
    for _ in range(3):
        driver.monitor.poll(lambda rank: None)
    assert ["no more processes" in message for message in caplog.messages] == [True]
    assert driver.regroup([1], None, lost=1)


class TwoRanks:
    """The part of a GradientSync that a StepGuard uses."""

    world_size, rank = 2, 0

    def __init__(self):
        self.of_other = None

    def all_gather(self, values):
        return [values, self.of_other or values]

    def carry(self, vector):
        self.carried = vector


def offer(guard, *shapes):
    buffers = [torch.zeros(shape) for shape in shapes]
    guard.offer(flat_values(buffers), buffers)


def test_buffers_of_other_shapes_are_refused():
    guard = StepGuard(TwoRanks(), None, None)
    for _ in range(2):
        offer(guard, 3, (2, 2))
    with refused("unsupported", "the shape (3,), and in a later step (4,)", 'recovery="restart"'):
        offer(guard, 4, (2, 2))  # as many bytes, with the padding
    with refused("unsupported", "2 buffers, and in a later step 1"):
        offer(guard, 3)
    sync = TwoRanks()
    sync.of_other = [5, 0]
    with refused("unsupported", "[16, 40] bytes"):
        offer(StepGuard(sync, None, None), 3)


def test_goodput_is_the_share_of_time_for_steps_that_count():
    report = ChaosReport([{"stall_s": 2.0}], steps=30, step_s=0.1, wall_s=4.0)
    assert report.goodput == pytest.approx(0.75)
    assert report.longest_stall_s == 2.0


def test_unknown_disturbance_is_refused():
    with refused("argument-value", "'explode'"):
        Chaos(actions=["explode"])


def test_recovery_in_place_that_is_impossible_is_refused(table):
    with refused("argument-value", "'in-place'"):
        train(table, recovery="in-place")
    with refused("argument-conflict", "there is one worker"):
        train(table, workers=1, epochs=1)
