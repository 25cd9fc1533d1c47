"""Programs that name CUDA, float64 or Lightning's own Trainer."""

import copy
import subprocess
import sys

import pytest
import pytorch_lightning as pl
import torch
from refusals import refused
from torch import nn

from bigdl.nano.pytorch import TorchNano, Trainer, patch_torch, unpatch_torch
from bigdl.nano.pytorch.patching import (
    get_cuda_status,
    patch_cuda,
    patch_dtype,
    patch_encryption,
    unpatch_cuda,
    unpatch_dtype,
    unpatch_encryption,
)


@pytest.fixture(autouse=True)
def _undone():
    yield
    unpatch_torch()
    unpatch_cuda()
    unpatch_dtype()
    unpatch_encryption()


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
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_allocated() == 0
    for on_cpu in (x.to(0), x.to(device=1), x.type(torch.cuda.FloatTensor), model.to(0).weight):
        assert on_cpu.device.type == "cpu"
    assert torch.zeros(2, device=1).device.type == "cpu"
    assert x.type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert torch.cuda.FloatTensor([1, 2]).dtype == torch.float32
    x.record_stream(torch.cuda.current_stream())
    assert isinstance(device, torch.device)
    assert isinstance(copy.deepcopy(model), nn.Linear)


FRESH_PROGRAM = """
import sys
import torch
from bigdl.nano.pytorch.patching import patch_cuda, unpatch_cuda

assert "torch._dynamo" not in sys.modules
patch_cuda()
weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
for kind in (torch.optim.SGD, torch.optim.Adam):
    kind([weight], lr=0.1)
options = {"backend": "eager", "fullgraph": True}
more = torch.compile(lambda x: x.cuda() + torch.ones(2, device="cuda"), **options)
assert more(weight).sum() == 4
from bigdl.nano.pytorch import Trainer
unpatch_cuda()
assert torch.compile(lambda x: x + torch.zeros(2), **options)(weight).sum() == 2
print("done")
"""


@pytest.mark.slow
def test_a_fresh_process_that_is_patched_first_trains_and_compiles():
    command = [sys.executable, "-c", FRESH_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr


def test_each_name_of_cuda_has_an_object_of_its_own():
    names = [name for name in dir(torch.cuda) if callable(getattr(torch.cuda, name))]
    before = {name: getattr(torch.cuda, name) for name in names}
    patch_cuda()
    others = [
        getattr(torch.cuda, name) for name in names if getattr(torch.cuda, name) is not before[name]
    ]
    assert len({id(each) for each in others}) == len(others) > 10
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    assert not isinstance(torch.cuda.Event(), torch.cuda.Stream)


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
    with refused("state", "unpatch_dtype"):
        patch_dtype("fp32", "bf16")


def test_an_unknown_type_is_an_error():
    with refused("argument-value", "'int8'"):
        patch_dtype("int8")


USER_MODULE = """
from pytorch_lightning import Trainer
from torch import zeros


class Helper:
    def seen(self):
        return Trainer.__module__, zeros(1, device="cuda").device.type
"""


class Looking(TorchNano):
    """Each process tells what it sees of the patches."""

    def train(self, helper, path):
        import pytorch_lightning

        key = fernet_key()
        place = f"{path}-{self.global_rank}"
        torch.save({"rank": self.global_rank}, place, encryption_key=key)
        seen = {
            "rank": torch.load(place, decryption_key=key)["rank"],
            "helper": helper.seen(),
            "trainer": pytorch_lightning.Trainer.__module__,
            "cuda": torch.tensor([1.0], device="cuda:0").device.type,
            "type": torch.zeros(1, dtype=torch.float64).dtype,
            "default": torch.zeros(1).dtype,
        }
        every = [None] * self.world_size
        torch.distributed.all_gather_object(every, seen)
        return every


def fernet_key():
    return pytest.importorskip("cryptography.fernet").Fernet.generate_key()


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """An object of a module that only the program can import."""
    (tmp_path / "module_of_a_user.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_of_a_user", raising=False)
    import module_of_a_user

    return module_of_a_user.Helper()


@pytest.mark.slow_cases("subprocess")
@pytest.mark.parametrize(
    "backend", ["subprocess", pytest.param("ray", marks=pytest.mark.slow)], ids=str
)
def test_processes_of_a_training_are_patched_as_the_program_is(helper, tmp_path, backend):
    patch_encryption()
    patch_dtype("fp64", "fp16")
    patch_torch()
    torch.set_default_dtype(torch.bfloat16)
    try:
        loop = Looking(num_processes=2, distributed_backend=backend)
        seen = loop.train(helper, str(tmp_path / "saved"))
    finally:
        torch.set_default_dtype(torch.float32)
    ours = "bigdl.nano.pytorch.trainer"
    everywhere = {"helper": (ours, "cpu"), "trainer": ours, "cuda": "cpu"}
    types = {"type": torch.float16, "default": torch.bfloat16}
    assert seen == [{"rank": rank, **everywhere, **types} for rank in range(2)]
