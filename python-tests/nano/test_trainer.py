"""What Nano's Trainer adds to Lightning's in one process."""

import copy
import inspect
import logging
import os
import pickle
import re
from importlib.util import find_spec

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.plugins.precision import DoublePrecision
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training_models import Cnn, OneWeight, Regression, steps_and_zeros, table, trainer, viewed

from bigdl.common.errors import UsageError
from bigdl.common.memory import glibc_tunables
from bigdl.nano.pytorch import InferenceOptimizer, Trainer, compiling
from bigdl.nano.pytorch.algorithms import SelectiveBackprop
from bigdl.nano.pytorch.lightning import LightningModule
from bigdl.nano.pytorch.trainer import fitted_loader, gpu_of
from bigdl.nano.pytorch.training import rates
from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.pytorch.training.rates import AS_WRITTEN, COMPILED, COMPILING
from bigdl.nano.pytorch.training.steps import (
    CompiledForward,
    FastSteps,
    bf16_instructions,
    gains_from_bf16,
)

needs_bf16 = pytest.mark.skipif(
    bf16_instructions() is None, reason="the processor does not multiply bfloat16"
)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of CUDA")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The networks are too small for more, which would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def digits():
    """Loaders of handwritten digits, 1,347 to train and 450 to test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = [TensorDataset(x[rows], y[rows]) for rows in (order[450:], order[:450])]
    generator = torch.Generator().manual_seed(0)
    train = DataLoader(parts[0], batch_size=32, shuffle=True, generator=generator)
    return train, DataLoader(parts[1], batch_size=150)


def classifier(network: nn.Module) -> pl.LightningModule:
    return Trainer.compile(
        network,
        nn.CrossEntropyLoss(),
        torch.optim.Adam(network.parameters(), 2e-3),
        metrics=[torchmetrics.Accuracy("multiclass", num_classes=10)],
    )


def seeded_cnn(flatten=None) -> Cnn:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Cnn(flatten)


# --- compile


def test_an_ordinary_module_is_trained_with_loss_and_optimizer():
    net = OneWeight()
    module = Trainer.compile(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.25))
    assert isinstance(module, LightningModule)
    assert module.model is net
    assert module.forward_args == ["x"]
    run = trainer(max_epochs=2)
    run.fit(module, steps_and_zeros())
    assert net.fc.weight.item() == 0.25
    assert set(run.callback_metrics) == {"train/loss"}


def test_figures_are_logged_under_the_names_of_metrics_and_their_places():
    net = OneWeight()
    metrics = [torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()]
    module = Trainer.compile(net, nn.MSELoss(), metrics=metrics)
    run = trainer()
    expected = {"loss": 0.5, "MeanAbsoluteError_0": 0.5, "MeanSquaredError_1": 0.5}
    for stage, call in (("val", run.validate), ("test", run.test)):
        figures = call(module, steps_and_zeros(3), verbose=False)[0]
        assert figures == pytest.approx({f"{stage}/{name}": v for name, v in expected.items()})


def test_prediction_takes_the_leading_inputs_of_a_batch():
    predictions = trainer().predict(Trainer.compile(OneWeight()), steps_and_zeros())
    assert torch.cat(predictions).tolist() == [[0.0], [0.0], [1.0], [1.0]]


def test_the_scheduler_is_stepped_after_each_epoch():
    net = OneWeight()
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer(max_epochs=3).fit(
        Trainer.compile(net, nn.MSELoss(), optimizer, scheduler), steps_and_zeros()
    )
    assert scheduler.get_last_lr() == [0.125]


def test_a_lightning_module_is_returned_as_it_is_and_takes_nothing_else():
    module = Regression()
    assert Trainer.compile(module) is module
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with refused("argument-conflict"):
        Trainer.compile(module, nn.MSELoss(), optimizer)


def test_states_of_the_module_and_of_the_one_inside_can_be_loaded():
    net, other = OneWeight(), OneWeight()
    nn.init.constant_(net.fc.weight, 3.0)
    for state in (net.state_dict(), Trainer.compile(net).state_dict()):
        module = Trainer.compile(copy.deepcopy(other))
        module.load_state_dict(state)
        assert module.model.fc.weight.item() == 3.0


def test_a_compiled_module_is_saved_and_loaded_with_the_same_state(tmp_path):
    net = OneWeight()
    module = Trainer.compile(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.25))
    trainer(max_epochs=1).fit(module, steps_and_zeros())
    Trainer.save(module, tmp_path / "saved")
    loaded = Trainer.load(tmp_path / "saved", Trainer.compile(OneWeight()))
    assert loaded.model.fc.weight.item() == net.fc.weight.item() == 0.5


# --- settings


def test_what_a_fit_was_trained_with_is_said_in_one_line(caplog):
    run = trainer(max_epochs=1)
    with caplog.at_level(logging.INFO):
        run.fit(Regression(), DataLoader(table(), batch_size=8))
    lines = [line for line in caplog.messages if line.startswith("Nano trains with")]
    assert lines == [f"Nano trains with {', '.join(run.settings)}"]
    assert "fused SGD" in run.settings


@needs_bf16
def test_layers_compute_in_bfloat16_where_it_is_fast_and_the_program_sees_float32(kept):
    kept("bfloat16 with channels_last")
    seen = {}

    class Watching(Regression):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(288, 1))
            self.layers[1].register_forward_hook(
                lambda module, args, out: seen.update({self.training: out.dtype})
            )

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            self.copied = copy.deepcopy(self.layers)
            seen["out"] = out.detach().numpy().dtype
            seen["direct"] = self.layers(batch[0]).dtype
            with torch.no_grad():
                self.layers(batch[0])
            seen["frozen"] = seen[True]
            return nn.functional.mse_loss(out, batch[1])

    loader = DataLoader(TensorDataset(torch.randn(4, 1, 8, 8), torch.randn(4, 1)), batch_size=4)
    module = Watching()
    run = trainer(max_epochs=1)
    run.fit(module, loader, loader)
    assert "bfloat16 in training steps" in run.settings[0]
    assert seen[True] == seen["frozen"] == torch.bfloat16
    assert seen[False] == torch.float32
    assert seen["out"] == np.float32
    assert seen["direct"] == torch.float32
    assert module.layers(torch.randn(1, 1, 8, 8)).dtype == torch.float32  # no hook is left
    assert not module._forward_hooks


def test_bfloat16_is_for_convolutions_and_large_products():
    assert gains_from_bf16(Cnn())
    assert gains_from_bf16(nn.Linear(512, 512))
    assert not gains_from_bf16(nn.Sequential(nn.Linear(128, 128), nn.Embedding(10_000, 64)))
    assert not gains_from_bf16(Cnn().double())


@pytest.mark.parametrize("precision", [32, "32-true"])
def test_an_explicit_precision_of_32_stays(precision):
    run = trainer(max_epochs=1, precision=precision, limit_train_batches=1)
    loader = DataLoader(TensorDataset(torch.randn(4, 1, 8, 8), torch.randint(10, (4,))))
    run.fit(classifier(Cnn()), loader)
    assert "precision 32-true" in run.settings
    assert run.precision == "32-true"


def test_the_settings_can_be_switched_off():
    run = trainer(
        max_epochs=1, precision=32, channels_last=False, fused_optimizers=False, tune_process=False
    )
    loader = DataLoader(TensorDataset(torch.randn(4, 1, 8, 8), torch.randint(10, (4,))))
    run.fit(classifier(Cnn()), loader)
    assert len(run.settings) == 2
    assert run.settings[0] == "precision 32-true"
    assert "threads" in run.settings[1]


def test_tuning_of_the_process_is_told():
    run = trainer(max_epochs=1)
    run.fit(Regression(), DataLoader(table(), batch_size=8))
    is_tuned = bool(glibc_tunables()) and "GLIBC_TUNABLES" not in os.environ
    assert ("tuned allocator" in run.settings) == is_tuned


def test_one_process_stays_on_its_cores_during_a_fit():
    before, seen = os.sched_getaffinity(0), []

    class Looking(Regression):
        def on_train_epoch_end(self):
            seen.append((os.sched_getaffinity(0), torch.get_num_threads()))

    core = min(before)
    run = trainer(max_epochs=1, cpu_for_each_process=[[core]])
    run.fit(Looking(), DataLoader(table(), batch_size=8))
    assert seen == [({core}, 1)]
    assert f"cores [{core}]" in run.settings
    assert os.sched_getaffinity(0) == before


def test_a_precision_of_a_plugin_is_kept():
    seen = []

    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0].dtype)
            return super().training_step(batch, batch_idx)

    run = trainer(max_epochs=1, plugins=[DoublePrecision()])
    run.fit(Looking(), DataLoader(table(), batch_size=8))
    assert run.settings[0] == "precision 64-true"
    assert set(seen) == {torch.float64}


def test_a_copy_of_a_compiled_model_runs_by_its_own_weights():
    net = nn.Sequential(nn.Linear(2, 1, bias=False))
    steps = FastSteps(TrainingOptions(precision=32, inductor=True), net)
    twins = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    steps.undo()
    for twin in twins:
        nn.init.ones_(twin[0].weight)
        assert twin(torch.ones(1, 2)).item() == 2.0
    assert "forward" not in vars(net[0])


@pytest.mark.slow
def test_layers_may_be_compiled_for_a_fit():
    images, labels = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    losses = []
    for inductor in (False, True):
        net = seeded_cnn()
        run = trainer(max_epochs=2, precision=32, inductor=inductor)
        run.fit(classifier(net), loader)
        assert ("TorchInductor" in run.settings) == inductor
        losses.append(float(run.callback_metrics["train/loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert "forward" not in vars(net)


# --- a GPU


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ({}, "cuda:0"),
        ({"accelerator": "gpu"}, "cuda:0"),
        ({"accelerator": "cuda", "devices": [0]}, "cuda:0"),
        ({"accelerator": "gpu", "devices": 2}, None),
        ({"accelerator": "gpu", "strategy": "ddp"}, None),
        ({"accelerator": "cpu"}, None),
    ],
)
def test_one_gpu_is_nano_s_and_several_are_lightning_s(monkeypatch, arguments, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu_of(arguments) == (device and torch.device(device))


def test_layers_on_a_gpu_may_compute_in_bfloat16_where_it_multiplies_that(monkeypatch, kept):
    kept("bfloat16 with channels_last")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    for supported in (False, True):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: supported)  # noqa: B023
        net = seeded_cnn()
        steps = FastSteps(TrainingOptions(), net, device="cuda")
        assert steps.report == ["float32"]
        steps.begin(torch.rand(2, 1, 8, 8))
        chosen = ["bfloat16 in training steps", "channels_last"]
        assert steps.report == (chosen if supported else ["float32"])
        steps.undo()


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_learns_as_lightning_does_on_it(digits):
    losses = []
    for kind in (pl.Trainer, Trainer):
        net = seeded_cnn()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        run = kind(max_epochs=3, accelerator="gpu", devices=1, **quiet)
        run.fit(classifier(net), digits[0])
        losses.append(float(run.callback_metrics["train/loss"]))
        assert "forward" not in vars(net)
    assert run.settings == ("float32", "fused Adam", "cuda:0")  # too short to measure
    assert losses[1] == pytest.approx(losses[0], abs=0.1)


class Clock:
    """In the place of the module time, for the rates of steps: only forwards take time."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class LayerThatLasts(nn.Module):
    """A layer whose forward takes 4 ms of a clock."""

    def __init__(self, clock):
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.clock = clock

    def forward(self, x):
        self.clock.now += 0.004
        return self.fc(x)


def compiled_to(seconds):
    """What stands in the place of a compiled forward: one that takes another time."""

    class Compiled(CompiledForward):
        def __call__(self, x):
            self.module.clock.now += seconds
            return self.module.fc(x)

    return Compiled


def fit_that_may_compile(monkeypatch, seconds, cost=0.0, epochs=5):
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    monkeypatch.setattr(compiling, "CompiledForward", compiled_to(seconds))
    monkeypatch.setattr(compiling, "SECONDS", cost)
    monkeypatch.setattr(compiling, "SECONDS_PER_LAYER", 0)
    net = LayerThatLasts(clock)
    module = Trainer.compile(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1))
    run = trainer(max_epochs=epochs, precision=32, inductor="auto")
    run.fit(module, DataLoader(table(64), batch_size=4))  # 16 steps
    assert "forward" not in vars(net)
    return run


def test_layers_are_compiled_in_a_fit_where_that_is_faster(monkeypatch):
    run = fit_that_may_compile(monkeypatch, 0.001)
    assert run.settings[-1] == "TorchInductor (4 times as fast)"
    steps = {row["phase"]: row["steps"] for row in run.rates.rows()}
    assert (steps[AS_WRITTEN], steps[COMPILING]) == (20, 2)
    assert steps[COMPILED] >= 50
    assert COMPILED in run.rates.gain


def test_layers_go_on_as_written_where_compiled_ones_are_slower(monkeypatch):
    run = fit_that_may_compile(monkeypatch, 0.012)
    assert run.settings[-1] == "no TorchInductor (0.33 times as fast)"
    steps = {row["phase"]: row["steps"] for row in run.rates.rows()}
    assert steps[COMPILED] == 20
    assert steps[AS_WRITTEN] > 20


def test_layers_are_not_compiled_for_a_few_steps(monkeypatch):
    run = fit_that_may_compile(monkeypatch, 0.001, cost=1000.0, epochs=2)
    assert re.fullmatch(
        r"no TorchInductor \(the \d+ steps left do not repay it\)", run.settings[-1]
    )
    assert {row["phase"] for row in run.rates.rows()} == {AS_WRITTEN}


@pytest.mark.slow
def test_what_is_compiled_in_a_fit_learns_the_same(monkeypatch):
    monkeypatch.setattr(compiling, "SECONDS", 0)
    monkeypatch.setattr(compiling, "SECONDS_PER_LAYER", 0)
    monkeypatch.setattr(compiling, "LEAST_GAIN", 0)
    losses = []
    for inductor in (False, "auto"):
        net = seeded_cnn()
        images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(images, torch.arange(64) % 10), batch_size=8)
        run = trainer(max_epochs=7, precision=32, inductor=inductor)
        run.fit(classifier(net), loader)
        losses.append(float(run.callback_metrics["train/loss"]))
    assert run.settings[-1].startswith("TorchInductor (")
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_switched_off_it_trains_as_lightning_does():
    plain, ours = Regression(), Regression()
    loader = DataLoader(table(), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet).fit(
        plain, loader
    )
    trainer(max_epochs=2, precision=32, fused_optimizers=False).fit(ours, loader)
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)


def test_convolutions_train_with_the_channels_last_and_are_contiguous_afterwards(kept):
    kept("float32 with channels_last")
    layouts = []

    class Watching(Cnn):
        def forward(self, x):
            y = self.first(x)
            layouts.append(y.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    net = Watching()
    images = torch.randn(4, 1, 8, 8).expand(4, 1, 8, 8)
    loader = DataLoader(TensorDataset(images, torch.randint(10, (4,))), batch_size=2)
    run = trainer(max_epochs=1)
    run.fit(classifier(net), loader)
    assert all(layouts)
    assert "channels_last" in run.settings
    assert net.second.weight.is_contiguous()


def test_the_weights_of_a_convolution_are_exact_with_the_channels_last():
    conv = nn.Conv2d(1, 1, (2, 2), bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[[0.0, -1.0], [-1.25, 0.5]]]]))
    before = conv.weight.clone()
    net = nn.Sequential(conv, nn.Flatten())
    loader = DataLoader(TensorDataset(torch.zeros(2, 1, 2, 2), torch.zeros(2, 1)), batch_size=1)
    optimizer = torch.optim.SGD(net.parameters(), 0.25)
    run = trainer(max_epochs=2, channels_last=True)
    run.fit(Trainer.compile(net, nn.MSELoss(), optimizer), loader)
    assert torch.equal(conv.weight, before)


def test_a_model_that_takes_views_is_trained_contiguously_as_if_nothing_had_been_tried(kept):
    kept("float32 with channels_last")
    losses = {}
    for layout in (None, False):
        torch.manual_seed(0)
        net = seeded_cnn(viewed)
        loader = DataLoader(
            TensorDataset(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))), batch_size=4
        )
        run = trainer(max_epochs=2, channels_last=layout)
        run.fit(classifier(net), loader)
        losses[layout] = run.callback_metrics["train/loss"], net.norm.running_mean
        assert net.norm.num_batches_tracked == 4
    assert torch.equal(losses[None][0], losses[False][0])
    assert torch.equal(losses[None][1], losses[False][1])
    assert "channels_last" not in run.settings


def test_an_explicit_layout_is_not_given_up():
    net = seeded_cnn(viewed)
    loader = DataLoader(TensorDataset(torch.randn(4, 1, 8, 8), torch.randint(10, (4,))), 2)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        trainer(max_epochs=1, channels_last=True).fit(classifier(net), loader)


def test_optimizers_that_a_user_has_chosen_otherwise_are_left_alone():
    class Sparse(Regression):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(5, 4, sparse=True)

        def training_step(self, batch, batch_idx):
            return self.layers(self.words(torch.arange(5))).square().mean()

    chosen = Regression()
    chosen.configure_optimizers = lambda: torch.optim.Adam(chosen.parameters(), foreach=True)
    for module in (chosen, Sparse()):
        run = trainer(max_epochs=1)
        run.fit(module, DataLoader(table(4)))
        assert not any("fused" in setting for setting in run.settings)
        assert not run.optimizers[0].param_groups[0].get("fused")


@needs_bf16
def test_the_automatic_settings_cost_no_accuracy(digits, kept):
    kept("bfloat16 with channels_last")
    train, test = digits
    accuracy = {}
    for name, arguments in (("fast", {}), ("float32", {"precision": 32, "channels_last": False})):
        module = classifier(seeded_cnn())
        train.generator.manual_seed(5)
        run = trainer(max_epochs=4, **arguments)
        run.fit(module, train)
        figures = run.test(module, test, verbose=False)[0]
        accuracy[name] = figures["test/MulticlassAccuracy_0"]
    assert accuracy["float32"] > 0.94
    assert accuracy["fast"] > accuracy["float32"] - 0.012


def test_a_fit_is_resumed_from_its_checkpoint(tmp_path):
    loader = DataLoader(table(), batch_size=8)
    whole, resumed = Regression(), Regression(seed=9)
    trainer(max_epochs=4).fit(whole, loader)
    first = trainer(max_epochs=2)
    first.fit(Regression(), loader)
    first.save_checkpoint(tmp_path / "half.ckpt")
    trainer(max_epochs=4).fit(resumed, loader, ckpt_path=tmp_path / "half.ckpt")
    for own, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own, other)


# --- arguments


WRONG = {
    "no processes": ({"num_processes": 0}, "num_processes should be a positive integer, got 0"),
    "processes as text": ({"num_processes": "2"}, "num_processes should be a positive integer"),
    "unknown backend": ({"distributed_backend": "mpi"}, "distributed_backend should be one of"),
    "k8s": ({"distributed_backend": "k8s"}, "PyTorchJob or torchrun"),
    "ccl": ({"process_group_backend": "ccl"}, "oneCCL"),
    "too few cores": (
        {"num_processes": 2, "cpu_for_each_process": [[0]]},
        "cores of each of 2 processes",
    ),
    "cores that are no lists": ({"cpu_for_each_process": [0]}, "a list of core numbers for each"),
    "cores that are not there": (
        {"cpu_for_each_process": [[9999]]},
        "among the cores that this process may",
    ),
    "no cores": ({"cpu_for_each_process": [[]]}, "at least one core for each process"),
    "unknown precision": ({"precision": 8}, "precision must be None"),
    "buckets": ({"bucket_cap_mb": -1}, "bucket_cap_mb should be a positive number, got -1"),
    "buckets as text": ({"bucket_cap_mb": "25"}, "bucket_cap_mb should be a positive number"),
    "one algorithm": ({"algorithms": SelectiveBackprop()}, "algorithms must be a list of callback"),
    "no algorithm": ({"algorithms": [3]}, "algorithms must be a list of callbacks"),
    "tuning": ({"tune_process": "yes"}, "tune_process must be True or False"),
    "compiler": ({"inductor": 1}, "inductor must be True, False or 'auto'"),
    "layout": ({"channels_last": "yes"}, "channels_last should be"),
    "warm-up that is no int": ({"auto_lr": {"warmup_epochs": 1.5}}, "warmup_epochs of auto_lr"),
    "auto_lr that is text": ({"auto_lr": "yes"}, "auto_lr must be"),
    "two strategies": ({"num_processes": 2, "strategy": "ddp"}, "strategy='ddp' contradicts"),
    "devices and processes": ({"num_processes": 2, "devices": 2}, "devices=2 contradicts"),
    "a GPU and processes": ({"num_processes": 2, "accelerator": "gpu"}, "trains on the CPU"),
    "an argument of Lightning 1": ({"resume_from_checkpoint": "a.ckpt"}, "pass ckpt_path to fit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_cannot_apply_are_errors(name):
    arguments, said = WRONG[name]
    with pytest.raises(UsageError, match=said):
        Trainer(**arguments)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_ray_is_needed_for_its_backend():
    with pytest.raises(UsageError, match=r"pip install 'bigdl\[ray\]'"):
        Trainer(num_processes=2, distributed_backend="ray")


def test_an_unknown_key_of_auto_lr_gives_a_warning():
    with pytest.warns(UserWarning, match="'warmup_steps' has no effect"):
        Trainer(auto_lr={"warmup_steps": 2})


def test_names_of_lightning_1_are_translated():
    run = Trainer(
        checkpoint_callback=False, progress_bar_refresh_rate=0, weights_summary=None, logger=False
    )
    assert run.checkpoint_callback is None
    assert run.progress_bar_callback is None


def test_use_ipex_is_accepted_and_says_what_it_means(caplog):
    with caplog.at_level("WARNING", "bigdl.nano.pytorch.training.options"):
        run = Trainer(1, True, logger=False)
    assert run.use_ipex is True
    assert "IPEX is discontinued" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": 3}, ("model-type",)),
        ({"loss": 3}, ("argument-type",)),
        ({"optimizer": 3}, ("argument-type",)),
        ({"metrics": [3]}, ("argument-type",)),
    ],
    ids=["model", "loss", "optimizer", "metrics"],
)
def test_what_cannot_be_compiled_is_an_error(arguments, said):
    with refused(*said):
        Trainer.compile(**({"model": OneWeight()} | arguments))


def test_training_needs_a_loss_and_an_optimizer():
    net = OneWeight()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"Loss must not be None for training\."):
        trainer(max_epochs=1).fit(Trainer.compile(net, optimizer=optimizer), steps_and_zeros())
    with refused("argument-missing"):
        trainer(max_epochs=1).fit(Trainer.compile(net, nn.MSELoss()), steps_and_zeros())


def test_a_trainer_traces_and_quantizes_as_the_inference_optimizer_does():
    assert issubclass(Trainer, pl.Trainer)
    net = seeded_cnn().eval()
    x = torch.randn(2, 1, 8, 8)
    with pytest.warns(DeprecationWarning, match=r"InferenceOptimizer\.trace") as said:
        traced = Trainer.trace(net, accelerator="jit", input_sample=x)
    with pytest.warns(DeprecationWarning, match=r"InferenceOptimizer\.quantize") as also_said:
        quantized = trainer().quantize(net, "bf16")
    for warning in (*said, *also_said):
        assert warning.filename == __file__ or "is deprecated; use" not in str(warning.message)
    with InferenceOptimizer.get_context(traced):
        torch.testing.assert_close(traced(x), net(x))
    with InferenceOptimizer.get_context(quantized):
        torch.testing.assert_close(quantized(x), net(x), rtol=0, atol=0.1)


def test_a_model_is_loaded_with_arguments_by_position(tmp_path):
    signatures = [inspect.signature(each.load) for each in (Trainer, InferenceOptimizer)]
    assert signatures[0] == signatures[1]
    net = OneWeight()
    Trainer.save(net, tmp_path / "saved")
    other = OneWeight()
    nn.init.zeros_(other.fc.weight)
    assert Trainer.load(tmp_path / "saved", other, None, True, None) is other
    assert other.fc.weight.item() == 1.0


class WithLoader(Regression):
    """Has its loader from a method."""

    def train_dataloader(self):
        return DataLoader(table(), batch_size=8)


class Tables(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(table(), batch_size=8)


@pytest.mark.parametrize(("module", "data"), [(WithLoader, None), (Regression, Tables)])
def test_a_loader_of_a_fit_may_come_from_a_method(module, data):
    run = trainer(max_epochs=1)
    run.fit(module(), datamodule=None if data is None else data())
    assert fitted_loader(run).batch_size == 8


@pytest.mark.slow
def test_a_fitted_trainer_quantizes_with_the_loader_of_its_last_fit():
    module, run = Regression(), trainer(max_epochs=1)
    run.fit(module, DataLoader(table(), batch_size=8))
    run.validate(module, DataLoader(table(8), batch_size=8))
    assert_switches(run.quantize(module.layers, onnx=True), module)


def assert_switches(model, module):
    x = table(8)[:][0]
    expected = module.eval()(x).detach()
    for quantize, atol in ((True, 0.2), (False, 1e-5)):
        model.eval_onnx(quantize=quantize)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=atol)


class Closable(Dataset):
    """Rows that cannot be read any more once it is closed."""

    closed = False

    def __len__(self):
        return 32

    def __getitem__(self, index):
        assert not self.closed
        return table()[index]


@pytest.mark.slow
def test_calibration_data_that_are_given_come_first():
    module, rows = Regression(), Closable()
    run = trainer(max_epochs=1)
    with pytest.raises(UsageError, match="A sample of the input"):
        run.quantize(module, onnx=True)
    run.fit(module, DataLoader(rows, batch_size=8))
    rows.closed = True
    with pytest.raises(
        UsageError, match=r"^The calibration data cannot be read: AssertionError: assert not True"
    ):
        run.quantize(module, onnx=True)
    given = DataLoader(table(8), batch_size=4)
    assert_switches(run.quantize(module, calib_data=given, onnx=True), module)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x1, x2):
        return self.left(x1) + self.right(x2)


@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime", "jit"])
def test_a_compiled_model_of_two_inputs_is_accelerated_by_its_loader(accelerator):
    net = TwoInputs()
    model = Trainer.compile(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1))
    x1, x2, y = torch.rand(16, 4), torch.rand(16, 4), torch.arange(16) % 3
    loader = DataLoader(TensorDataset(x1, x2, y), 8)
    fast = InferenceOptimizer.trace(model, loader, accelerator=accelerator)
    torch.testing.assert_close(fast(x1, x2), net(x1, x2).detach())
    assert list(fast.forward_args) == ["x1", "x2"]
    if accelerator != "jit":
        int8 = InferenceOptimizer.quantize(model, accelerator=accelerator, calib_data=loader)
        torch.testing.assert_close(int8(x1, x2), net(x1, x2).detach(), atol=0.2, rtol=0)
    predicted = torch.cat(trainer(max_epochs=1).predict(fast, loader))
    torch.testing.assert_close(predicted, net(x1, x2).detach())


@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime"])
def test_batches_with_targets_are_predicted_by_an_accelerated_model(accelerator):
    net = nn.Linear(4, 3)
    model = Trainer.compile(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1))
    x, y = torch.rand(16, 4), torch.arange(16) % 3
    loader = DataLoader(TensorDataset(x, y), 8)
    run = trainer(max_epochs=1)
    int8 = InferenceOptimizer.quantize(model, accelerator=accelerator, calib_data=loader)
    for fast in (InferenceOptimizer.trace(model, x, accelerator=accelerator), int8):
        predicted = torch.cat(run.predict(fast, loader))
        torch.testing.assert_close(predicted, fast(x))


def test_an_accelerated_plain_module_is_validated_by_the_trainer_that_fitted_it():
    net = nn.Linear(4, 3)
    model = Trainer.compile(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1))
    x, y = torch.rand(16, 4), torch.arange(16) % 3
    loader = DataLoader(TensorDataset(x, y), 8)
    run = trainer(max_epochs=1)
    int8 = InferenceOptimizer.quantize(net, accelerator="onnxruntime", calib_data=loader)
    with refused("model-type"):
        run.validate(int8, loader, verbose=False)
    run.fit(model, loader)
    int8 = InferenceOptimizer.quantize(net, accelerator="onnxruntime", calib_data=loader)
    loss = run.validate(int8, loader, verbose=False)[0]["val/loss"]
    assert loss == pytest.approx(float(nn.functional.cross_entropy(int8(x), y)), rel=1e-4)
