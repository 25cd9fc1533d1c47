"""Programs that name CUDA, float64 or Lightning's own Trainer."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch import Trainer, patch_torch, unpatch_torch
from bigdl.nano.pytorch.patching import (
    get_cuda_status,
    patch_cuda,
    patch_dtype,
    unpatch_cuda,
    unpatch_dtype,
)


@pytest.fixture(autouse=True)
def _undone():
    yield
    unpatch_torch()
    unpatch_cuda()
    unpatch_dtype()


def test_lightning_s_trainer_is_nano_s_until_it_is_put_back():
    original = pl.Trainer
    patch_torch(cuda_to_cpu=False)
    patch_torch(cuda_to_cpu=False)
    assert pl.Trainer is pl.trainer.Trainer is Trainer
    assert not get_cuda_status()
    unpatch_torch()
    assert pl.Trainer is pl.trainer.Trainer is original
    unpatch_torch()


def test_a_program_for_cuda_runs_on_the_cpu():
    patch_torch()
    assert get_cuda_status()
    device = torch.device("cuda:0")
    model = nn.Linear(4, 2, device="cuda").to(device).cuda()
    x = torch.tensor([[1.0, 2, 3, 4]], device="cuda:0")
    assert x.device.type == x.cuda().device.type == x.to("cuda").device.type == "cpu"
    assert torch.zeros_like(x, device=device).device.type == "cpu"
    assert x.new_ones(2, device="cuda").device.type == "cpu"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.cuda.amp.GradScaler()
    with torch.cuda.amp.autocast(), torch.cuda.stream(torch.cuda.Stream()):
        y = model(x)
    with torch.autocast("cuda", torch.float16):
        assert model(x).dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16
    scaler.scale(y.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(start) == 0
    assert isinstance(device, torch.device)
    assert isinstance(copy.deepcopy(model), nn.Linear)


def test_everything_is_put_back():
    before = {name: getattr(torch, name) for name in ("tensor", "zeros", "autocast", "load")}
    methods = torch.Tensor.to, torch.Tensor.cuda, nn.Module.to, torch.cuda.Stream
    patch_cuda()
    patch_dtype()
    unpatch_dtype()
    unpatch_cuda()
    assert {name: getattr(torch, name) for name in before} == before
    assert (torch.Tensor.to, torch.Tensor.cuda, nn.Module.to, torch.cuda.Stream) == methods
    assert not get_cuda_status()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_float64_becomes_float32():
    patch_dtype()
    assert torch.zeros(2, dtype=torch.float64).dtype == torch.float32
    assert torch.ones(2).double().dtype == torch.float32
    assert torch.ones(2).to(torch.float64).dtype == torch.float32
    assert nn.Linear(2, 2).double().weight.dtype == torch.float32
    assert torch.zeros(2, dtype=torch.float16).dtype == torch.float16
    with pytest.raises(UsageError, match="call unpatch_dtype first"):
        patch_dtype("fp32", "bf16")


def test_an_unknown_type_is_an_error():
    with pytest.raises(UsageError, match="no type 'int8'"):
        patch_dtype("int8")
