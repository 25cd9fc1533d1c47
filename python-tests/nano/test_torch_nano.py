"""Loops of the user's own, in one process and in two."""

import os

import pytest
import torch
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_models import Cnn, OneWeight, steps_and_zeros, table, viewed

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch import TorchNano, nano
from bigdl.nano.pytorch.patching import patch_cuda, unpatch_cuda
from bigdl.nano.pytorch.training.optimizers import LearningRateRamp
from bigdl.nano.pytorch.training.steps import bf16_instructions


def fit(model, optimizer, loader, backward, epochs=2):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()


class Loop(TorchNano):
    """Trains one weight."""

    def train(self, lr, net=None):
        net = OneWeight() if net is None else net
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        model, optimizer, loader = self.setup(net, optimizer, steps_and_zeros())
        fit(model, optimizer, loader, self.backward)
        return net.fc.weight.item()


def test_a_loop_in_one_process_trains_here_and_returns_its_result():
    loop, net = Loop(), OneWeight()
    assert loop.train(0.25, net=net) == net.fc.weight.item() == 0.25
    assert "fused SGD" in loop.settings


class Everything(TorchNano):
    """Uses what a loop may use, and keeps it."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.log = []

    def train(self, net, optimizer):
        head = torch.optim.Adam(net[2].parameters(), lr=0.01)
        loaders = [DataLoader(table(16), batch_size=4, shuffle=True) for _ in range(2)]
        model, optimizers, both = self.setup(net, [optimizer, head], *loaders)
        assert isinstance(optimizers, list)
        assert len(both) == 2
        assert model.mark == "mine"
        assert list(model.state_dict()) == list(net.state_dict())
        model.load_state_dict(model.state_dict())
        seen = []
        for x, y in both[0]:
            loss = nn.functional.mse_loss(model(x), y)
            for each in optimizers:
                each.zero_grad()
            self.backward(loss)
            for each in optimizers:
                each.step()
            seen += x[:, 0].tolist()
        self.log.append(self.world_size)
        self.rows = sorted(self.all_gather(torch.tensor(seen)).flatten().tolist())
        self.ratio = optimizers[0].cur_lr_ratio, optimizers[0].cur_step
        self.model = model
        self.pid = os.getpid()
        return {"model": model, "rank": self.global_rank}


@pytest.mark.slow
def test_a_loop_in_two_processes_brings_everything_home():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    net.mark = "mine"
    before = net[0].weight.clone()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    loop = Everything(num_processes=2, cpu_for_each_process=[[0], [0]], bucket_cap_mb=5)
    result = loop.train(net, optimizer)
    assert loop.pid != os.getpid()
    assert loop.log == [2]
    assert result == {"model": net, "rank": 0}
    assert loop.model is net
    assert not torch.equal(net[0].weight, before)
    assert optimizer.param_groups[0]["params"][0] is net[0].weight
    assert optimizer.state[net[0].weight]["momentum_buffer"].abs().sum() > 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert loop.ratio == (pytest.approx(1 + 2 / 1000), 2)
    assert loop.rows == pytest.approx(sorted(table(16).tensors[0][:, 0].tolist()))
    assert any(setting.startswith("2 processes") for setting in loop.settings)
    assert "gradients by 5 MB" in loop.settings


@pytest.fixture
def _cuda_to_cpu():
    patch_cuda()
    yield
    unpatch_cuda()


@pytest.mark.slow
@pytest.mark.usefixtures("_cuda_to_cpu")
def test_a_decorated_function_in_two_processes_trains_in_place():
    @nano(num_processes=2, auto_lr=False)
    def train(model, optimizer, loader, criterion, epochs):
        assert isinstance(optimizer, torch.optim.SGD)
        assert torch.tensor(1.0, device="cuda:0").device.type == "cpu"
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        return model

    net = OneWeight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    result = train(net, optimizer, criterion=nn.MSELoss(), loader=steps_and_zeros(), epochs=2)
    assert result is net
    assert net.fc.weight.item() == 0.25


def test_a_decorated_function_in_one_process_needs_no_parentheses():
    @nano
    def train(model, optimizer, loader):
        fit(model, optimizer, loader, torch.Tensor.backward)

    net = OneWeight()
    train(net, torch.optim.SGD(net.parameters(), lr=0.25), steps_and_zeros())
    assert net.fc.weight.item() == 0.25


def images(rows=8) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randn(rows, 10, generator=generator)), batch_size=4)


@pytest.mark.skipif(bf16_instructions() is None, reason="the processor has no bfloat16")
@pytest.mark.parametrize("precision", [None, "bf16", 16])
def test_the_loop_sees_float32_whatever_the_layers_compute_in(precision, kept):
    kept("bfloat16")
    seen = []

    @nano(precision=precision)
    def train(model, optimizer, loader):
        model.second.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        for x, y in loader:
            out = model(x)
            assert out.dtype == torch.float32
            nn.functional.mse_loss(out, y).backward()
            optimizer.step()

    net = Cnn()
    train(net, torch.optim.SGD(net.parameters(), lr=0.01), images())
    assert set(seen) == {torch.bfloat16}
    net(torch.randn(1, 1, 8, 8))
    assert seen[-1] == torch.float32


def test_inputs_follow_the_layout_and_views_are_borne(kept):
    kept("float32 with channels_last")
    results = {}
    for flatten in (None, viewed):
        for layout in (None, False):

            @nano(channels_last=layout, precision=32)
            def train(model, optimizer, loader):
                fit(model, optimizer, loader, torch.Tensor.backward)

            torch.manual_seed(0)
            net = Cnn(flatten)
            train(net, torch.optim.SGD(net.parameters(), lr=0.01), images())
            results[flatten, layout] = net.state_dict()
            assert net.first.weight.is_contiguous()
            assert not net._forward_pre_hooks
            assert "forward" not in vars(net)
            assert net.norm.num_batches_tracked == 4
    for flatten in (None, viewed):
        for name, value in results[flatten, None].items():
            torch.testing.assert_close(value, results[flatten, False][name], rtol=1e-4, atol=1e-5)


def test_rates_grow_within_1000_steps_and_are_the_user_s_in_between():
    net = OneWeight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    LearningRateRamp(optimizer, 3, max_step=4)
    moved = []
    for _ in range(6):
        before = net.fc.weight.item()
        net.fc.weight.grad = torch.ones(1, 1)
        optimizer.step()
        moved.append(before - net.fc.weight.item())
        ratio = (optimizer.max_lr_ratio - 1) * optimizer.cur_step / optimizer.max_step + 1
        assert optimizer.cur_lr_ratio == ratio
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert moved == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3], rel=1e-4)


def test_a_checkpoint_is_saved_and_loaded(tmp_path):
    class Saving(TorchNano):
        def train(self):
            net = OneWeight()
            model, _ = self.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
            self.save({"net": model.state_dict(), "epoch": 3}, tmp_path / "a.ckpt")
            return self.load(tmp_path / "a.ckpt")

    loaded = Saving().train()
    assert loaded["epoch"] == 3
    assert loaded["net"]["fc.weight"].item() == 1.0


WRONG = {
    "spawn": ({"distributed_backend": "spawn"}, "do not support spawn"),
    "deepspeed": ({"strategy": "deepspeed"}, "do not support deepspeed"),
    "processes": ({"num_processes": -1}, "num_processes should be a positive integer"),
    "precision": ({"precision": "fp4"}, "precision must be None"),
    "auto_lr": ({"auto_lr": {"warmup_epochs": 1}}, "auto_lr must be True or False"),
    "two strategies": ({"num_processes": 2, "strategy": "ddp"}, "strategy=.ddp. contradicts"),
    "cores": ({"cpu_for_each_process": [0]}, "a list of core numbers for each process"),
    "buckets": ({"bucket_cap_mb": 0}, "bucket_cap_mb should be a positive number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_cannot_apply_are_errors(name):
    arguments, said = WRONG[name]
    with pytest.raises(UsageError, match=said):
        nano(**arguments)(lambda model: None)


@pytest.mark.parametrize("count", [0, 2])
def test_there_must_be_one_module_among_the_arguments(count):
    train = nano()(lambda *args: None)
    models = [OneWeight() for _ in range(count)]
    with pytest.raises(UsageError, match=f"only one nn.Module .* but got {count}"):
        train(*models, nn.MSELoss())


def test_setup_outside_of_train_and_unknown_attributes_are_errors():
    loop = Loop()
    net = OneWeight()
    with refused("state"):
        loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        loop.nothing  # noqa: B018


def test_a_strategy_of_fabric_may_be_named_with_a_warning():
    with pytest.warns(UserWarning, match="passed to Lightning Fabric"):
        loop = Loop(distributed_backend="auto")
    assert loop.train(0.25) == 0.25


def test_a_loop_without_train_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        TorchNano()
