"""Fits in two processes: what comes home, and that two make the same steps as one."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader
from training_models import OneWeight, Regression, steps_and_zeros, table, trainer

from bigdl.common.errors import WorkerLost
from bigdl.nano.pytorch import Trainer
from bigdl.nano.pytorch.strategies import AutoLr
from bigdl.nano.pytorch.training.optimizers import scale_rates

ROWS = table(32)
VALIDATION = table(7, seed=2)


class Diary(pl.Callback):
    """Keeps what a user might keep, and a reference that must not be copied."""

    def __init__(self):
        self.losses = []
        self.module = None

    def on_train_epoch_end(self, trainer, pl_module):
        self.losses.append(trainer.callback_metrics["val"].item())
        self.module = pl_module


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A module of a local class, trained in two processes of four rows each and in one of eight."""

    class Local(Regression):  # as in a notebook, no module can import it
        def setup(self, stage):
            if stage == "fit":
                self.world = self.trainer.world_size, os.getpid(), torch.get_num_threads()
                self.added = nn.Linear(2, 2)
                nn.init.ones_(self.added.weight)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    runs = {}
    for processes, rows in ((2, 4), (1, 8)):
        module, diary = Local(), Diary()
        keep = ModelCheckpoint(tmp_path_factory.mktemp("best"), monitor="val")
        stop = EarlyStopping("val", patience=50)
        run = trainer(
            num_processes=processes,
            max_epochs=3,
            auto_lr=False,
            enable_checkpointing=True,
            callbacks=[diary, keep, stop],
        )
        run.fit(module, DataLoader(ROWS, batch_size=rows), DataLoader(VALIDATION, batch_size=4))
        runs[processes] = module, run, diary, keep, stop
    return runs


def assert_equal_weights(module, other, **tolerance):
    for own, their in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, their, **tolerance)


@pytest.mark.slow
def test_two_processes_make_the_steps_of_one_with_the_same_rows(fitted):
    (two, *_), (one, *_) = fitted[2], fitted[1]
    assert two.world[0] == 2
    assert two.world[1] != os.getpid()
    assert_equal_weights(two.layers, one.layers, rtol=0, atol=1e-6)


def test_figures_of_a_validation_count_each_row_once(fitted):
    two, one = fitted[2], fitted[1]
    assert two[1].callback_metrics["val"].item() == pytest.approx(
        one[1].callback_metrics["val"].item(), rel=1e-5
    )
    assert two[2].losses == pytest.approx(one[2].losses, rel=1e-5)


def test_trainer_and_callbacks_are_as_if_the_fit_had_run_here(fitted):
    for module, run, diary, keep, stop in fitted.values():
        assert module.diary == [0, 1, 2]
        assert torch.equal(module.added.weight, torch.ones(2, 2))
        assert diary.module is module
        assert run.state.finished
        assert (run.current_epoch, run.global_step) == (3, 12)
        assert set(run.callback_metrics) == set(run.logged_metrics) == {"loss", "val"}
        assert os.path.exists(keep.best_model_path)
        assert keep.best_model_score.item() == pytest.approx(min(diary.losses))
        assert stop.best_score.item() == pytest.approx(min(diary.losses))


@pytest.mark.slow
def test_the_folder_that_lightning_has_chosen_for_checkpoints_comes_home(tmp_path, recwarn):
    run = trainer(
        num_processes=2, max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path
    )
    run.fit(Regression(), DataLoader(ROWS, batch_size=4))
    keep = run.checkpoint_callback
    assert os.path.dirname(keep.best_model_path) == keep.dirpath
    assert os.path.exists(keep.best_model_path)
    assert not [each for each in recwarn if "dirpath" in str(each.message)]


def test_optimizers_come_home_and_refer_to_the_module_of_the_caller(fitted):
    module, run, *_ = fitted[2]
    (optimizer,) = run.optimizers
    parameters = list(module.layers.parameters())
    assert {id(each) for each in parameters} < {
        id(each) for each in optimizer.param_groups[0]["params"]
    }
    assert optimizer.param_groups[0]["lr"] == module.lr / 8
    assert optimizer.state[parameters[0]]["momentum_buffer"].shape == parameters[0].shape


@pytest.mark.slow
def test_the_trainer_keeps_the_loader_to_quantize_with(fitted):
    module, run, *_ = fitted[2]
    fast = run.quantize(module, onnx=True).eval_onnx()
    x = torch.randn(3, 4)
    torch.testing.assert_close(fast(x), module.eval()(x).detach(), rtol=0, atol=1e-5)


def test_processes_have_cores_of_their_own(fitted):
    module, run, *_ = fitted[2]
    assert any(setting.startswith("2 processes ×") for setting in run.settings)
    assert module.world[2] <= max(1, len(os.sched_getaffinity(0)) // 2)


def test_evaluation_and_prediction_run_here_on_all_rows_in_order(fitted):
    module, run, *_ = fitted[2]
    loader = DataLoader(VALIDATION, batch_size=3)
    figures = run.validate(module, loader, verbose=False)[0]
    x, y = VALIDATION.tensors
    with torch.no_grad():
        expected = module.layers(x)
    assert figures["val"] == pytest.approx(nn.functional.mse_loss(expected, y).item(), rel=1e-5)
    predictions = trainer(num_processes=2).predict(Trainer.compile(module.layers), loader)
    torch.testing.assert_close(torch.cat(predictions), expected)


def test_a_fit_of_two_processes_is_gone_on_with_in_one(fitted, tmp_path):
    module, run, *_ = fitted[2]
    run.save_checkpoint(tmp_path / "last.ckpt")
    resumed = type(module)()
    more = trainer(max_epochs=4)
    more.fit(resumed, DataLoader(ROWS, batch_size=8), ckpt_path=tmp_path / "last.ckpt")
    assert more.current_epoch == 4
    assert resumed.diary == [3]


@pytest.mark.slow
def test_what_a_process_raises_is_raised_here_and_nothing_is_left():
    class Trouble(KeyError):
        pass

    class Failing(Regression):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1:
                raise Trouble("row 17")
            return super().training_step(batch, batch_idx)

    run = trainer(num_processes=2, max_epochs=1)
    with pytest.raises(Trouble, match="row 17") as raised:
        run.fit(Failing(), DataLoader(ROWS, batch_size=8))
    assert "In process 1 of the training" in raised.value.__notes__[0]
    assert not workers_of(os.getpid())


@pytest.mark.slow
def test_rates_are_multiplied_and_warmed_up_in_two_processes():
    class TwoOptimizers(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.rates = []

        def training_step(self, batch, batch_idx):
            optimizers = self.optimizers()
            self.rates.append([each.param_groups[0]["lr"] for each in optimizers])
            for each in optimizers:
                each.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            for each in optimizers:
                each.step()

        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.layers[0].parameters(), lr=0.01),
                torch.optim.Adam(self.layers[2].parameters(), lr=0.02),
            ]

    module = TwoOptimizers()
    run = trainer(num_processes=2, max_epochs=5)
    run.fit(module, DataLoader(ROWS, batch_size=2))  # 8 steps in each epoch: 4 of warm-up
    assert len(module.rates) == 40
    factors = [min(1.0, 0.5 + 0.5 * step / 4) for step in range(40)]
    expected = [[0.01 * 2 * factor, 0.02 * 2 * factor] for factor in factors]
    assert module.rates == [pytest.approx(pair) for pair in expected]
    assert any("warm-up of 4 steps" in setting for setting in run.settings)


def of_two_processes(auto_lr, module, max_epochs=30):
    """Optimizers and schedulers as rank 0 of two makes them."""
    run = trainer(num_processes=2, max_epochs=max_epochs)
    strategy = run.strategy
    strategy.connect(module)
    strategy.cluster_environment.join(0, 2)
    run._data_connector.attach_data(module, train_dataloaders=DataLoader(ROWS, batch_size=4))
    super(type(strategy), strategy).setup_optimizers(run)
    AutoLr(auto_lr).apply(run, strategy)
    return strategy.optimizers[0].param_groups[0], strategy.lr_scheduler_configs


def test_the_warm_up_lasts_a_tenth_of_the_epochs_or_what_is_asked_for():
    for auto_lr, epochs in ((True, 3), ({"warmup_epochs": 7}, 7)):
        group, (config,) = of_two_processes(auto_lr, Regression(lr=0.1))
        assert config.interval == "epoch"
        assert config.scheduler.base_lrs == [0.2]
        factors = [config.scheduler.lr_lambdas[0](epoch) for epoch in range(epochs + 2)]
        assert factors == pytest.approx(
            [min(1.0, 0.5 + 0.5 * epoch / epochs) for epoch in range(epochs + 2)]
        )
        assert group["lr"] == pytest.approx(0.1)


def test_no_warm_up_and_no_scaling_when_they_are_switched_off():
    group, configs = of_two_processes({"warmup_epochs": 0}, Regression(lr=0.1))
    assert group["lr"] == pytest.approx(0.2)
    assert not configs
    group, configs = of_two_processes(False, Regression(lr=0.1))
    assert group["lr"] == 0.1
    assert not configs


def test_schedulers_of_the_user_are_multiplied_and_not_warmed_up():
    class Scheduled(Regression):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]

    with pytest.warns(UserWarning, match="has learning-rate schedulers"):
        group, (config,) = of_two_processes(True, Scheduled(lr=0.1))
    assert config.scheduler.base_lrs == [0.2]
    assert group["lr"] == pytest.approx(0.2)


def test_rates_that_were_multiplied_are_not_multiplied_again():
    optimizer = torch.optim.SGD(OneWeight().parameters(), lr=0.1)
    for factor, rate in ((2, 0.2), (2, 0.2), (4, 0.4), (1, 0.1)):
        scale_rates([optimizer], factor)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_arguments_that_cannot_travel_are_refused_in_one_sentence():
    module = Regression()
    module.lock = threading.Lock()
    with refused("model-copy"):
        trainer(num_processes=2, max_epochs=1).fit(module, DataLoader(ROWS))


def workers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "_worker_main" in _command(child)]


def _command(process: psutil.Process) -> str:
    """Nothing for one that has ended, of whatever test."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["subprocess", "spawn", "ray"])
def test_the_weight_is_exact_after_two_epochs_of_two_processes(backend):
    if backend == "ray":
        pytest.importorskip("ray")
    net = OneWeight()
    module = Trainer.compile(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.5))
    run = trainer(num_processes=2, distributed_backend=backend, max_epochs=1, auto_lr=False)
    run.validate(module, steps_and_zeros(), verbose=False)
    run.fit(module, steps_and_zeros())
    run.fit_loop.max_epochs = 2
    run.fit(module, steps_and_zeros())  # goes on
    assert net.fc.weight.item() == 0.25
    assert run.current_epoch == 2
    assert module.optimizer is run.optimizers[0]
    trainer(max_epochs=1).fit(module, steps_and_zeros())  # the same module once more, here
    assert net.fc.weight.item() == 0.0


@pytest.mark.slow
@pytest.mark.fault
def test_a_process_that_is_killed_is_said_to_be_lost():
    class Killed(Regression):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, batch_idx)

    with pytest.raises(WorkerLost, match="worker 1 was killed by SIGKILL"):
        trainer(num_processes=2, max_epochs=1).fit(Killed(), DataLoader(ROWS, batch_size=8))
    assert not workers_of(os.getpid())


SCRIPT = """
    import time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from bigdl.nano.pytorch import Trainer, TorchNano

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)
        def forward(self, x):
            print("step", flush=True)
            time.sleep({pause})
            return self.fc(x)

    net = Slow()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    def loss(output, target):
        return (output - target).square().mean()
    module = Trainer.compile(net, loss, optimizer)
    rows = TensorDataset(torch.ones(8, 1), torch.ones(8, 1))
    run = Trainer({arguments}, max_epochs=2, logger=False, enable_checkpointing=False)
    run.fit(module, DataLoader(rows, batch_size=2))
    print("home", run.global_step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["subprocess", "fork"])
def test_a_script_trains_its_own_classes_and_functions(backend, tmp_path):
    path = tmp_path / "script.py"
    arguments = f"2, distributed_backend={backend!r}"
    path.write_text(textwrap.dedent(SCRIPT.format(pause=0, arguments=arguments)))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | one_thread,
    )
    assert "home 4" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_process_that_keeps_the_memory_of_a_fit_can_be_copied_for_the_next(tmp_path):
    path = tmp_path / "script.py"
    program = textwrap.dedent(SCRIPT.format(pause=0, arguments="2, distributed_backend='fork'"))
    first = "Trainer(max_epochs=1, logger=False, enable_checkpointing=False)"
    fit = f"{first}.fit(module, DataLoader(rows))"
    path.write_text(program.replace("run = ", f"{fit}\nrun = "))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | one_thread,
    )
    assert "home 4" in done.stdout, done.stderr


def test_a_process_with_threads_is_not_copied():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(60,))
    thread.start()
    try:
        with refused("unsupported"):
            trainer(num_processes=2, distributed_backend="fork", max_epochs=1).fit(
                Regression(), DataLoader(ROWS)
            )
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.fault
def test_an_interrupt_ends_all_processes(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(pause=60, arguments="2")))
    program = subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        for line in program.stdout:
            if "step" in line:
                break
        workers = workers_of(program.pid)
        assert len(workers) == 2
        program.send_signal(signal.SIGINT)
        assert program.wait(60) != 0
        give_up = time.monotonic() + 10
        while any(worker.is_running() for worker in workers) and time.monotonic() < give_up:
            time.sleep(0.1)
        assert not any(worker.is_running() for worker in workers)
    finally:
        program.kill()
        program.wait()


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("death", ["SIGTERM", "SIGKILL"])
def test_copies_and_the_workers_of_their_loaders_end_with_a_killed_parent(tmp_path, death):
    path = tmp_path / "script.py"
    program = textwrap.dedent(SCRIPT.format(pause=60, arguments="2, distributed_backend='fork'"))
    path.write_text(program.replace("batch_size=2", "batch_size=2, num_workers=1"))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    parent = subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | one_thread,
    )
    left = []
    try:
        said = []
        for line in parent.stdout:
            said.append(line)
            if line == "step\n":
                break
        left = psutil.Process(parent.pid).children(recursive=True)
        assert len(left) >= 3, "".join(said)
        parent.send_signal(getattr(signal, death))
        parent.wait(60)
        _, left = psutil.wait_procs(left, 30)  # workers of loaders look every five seconds
        assert not left
    finally:
        parent.kill()
        parent.communicate()
        for process in left:
            process.kill()
