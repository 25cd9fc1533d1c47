"""A method that crashes, hangs or takes all memory costs its own row of `optimize`, no more."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from bigdl.nano.pytorch import InferenceOptimizer

X = torch.rand(2, 4)


class Fragile(torch.nn.Module):
    """Something happens to the process that copies it, as a bf16 conversion does."""

    def __init__(self, happens):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.happens = happens

    def forward(self, x):
        return self.linear(x)

    def __deepcopy__(self, memo):
        self.happens()
        return copy.deepcopy(self.linear, memo)


def search(model, includes=("bf16", "onnxruntime_fp32"), **keywords):
    optimizer = InferenceOptimizer()
    optimizer.optimize(model, X, latency_sample_num=10, includes=includes, **keywords)
    return optimizer.results()


def workers():
    children = psutil.Process().children(recursive=True)
    return [p for p in children if "_worker_main" in _command(p)]


def _command(process):
    """Nothing for one that has ended, of whatever test."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def leave():
    os._exit(3)


def hang():
    while True:
        time.sleep(1)


def take_memory():
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1 << 20) * 32))
        time.sleep(0.01)


def give_up():
    raise SystemExit(3)


@pytest.mark.slow_cases("SystemExit", "crash", "exit")
@pytest.mark.fault
@pytest.mark.parametrize(
    ("happens", "limits", "status", "reason"),
    [
        (crash, {}, "crashed", "SIGSEGV"),
        (leave, {}, "crashed", "exit code 3"),
        pytest.param(
            take_memory,
            {"memory_limit": 2 << 30},
            "out of memory",
            "more than 2048 MB",
            marks=pytest.mark.slow,
        ),
        (give_up, {}, "fail to convert", "SystemExit"),
    ],
    ids=["crash", "exit", "memory", "SystemExit"],
)
def test_a_method_that_ends_its_process_costs_its_row(happens, limits, status, reason):
    table = search(Fragile(happens), **limits)
    assert table.loc["bf16", "status"] == status
    assert reason in table.loc["bf16", "reason"]
    assert table.loc["original", "status"] == "successful"
    assert table.loc["onnxruntime_fp32", "status"] in ("successful", "early stopped")
    assert not workers()


@pytest.mark.slow
@pytest.mark.fault
def test_a_method_that_hangs_costs_its_row(tmp_path):
    def hang_once():
        if not (tmp_path / "hung").exists():
            (tmp_path / "hung").touch()
            hang()

    table = search(Fragile(hang_once), ["bf16", "bf16_channels_last"], time_limit=25)
    assert table.loc["bf16", "status"] == "timed out"
    assert table.loc["bf16", "reason"] == "it took more than 25 s, at stage 'convert'"
    assert table.loc["bf16_channels_last", "status"] in ("successful", "early stopped")
    assert not workers()


@pytest.mark.slow
@pytest.mark.fault
def test_an_interrupt_leaves_no_process():
    # in a process of its own: the signal may come when nothing waits for it any more
    program = "from test_optimize_isolation import *; search(Fragile(hang))"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path}
    child = subprocess.Popen([sys.executable, "-c", program], env=environ)
    seen = []
    while not seen and child.poll() is None:
        time.sleep(0.5)
        seen = workers()
    time.sleep(5)
    child.send_signal(signal.SIGINT)
    child.wait(60)
    assert seen
    assert child.returncode != 0
    assert not [process for process in seen if process.is_running()]


def test_a_model_that_cannot_travel_is_tried_in_this_process():
    model = torch.nn.Linear(4, 2)
    model.lock = threading.Lock()
    with pytest.warns(UserWarning, match="Methods are tried in this process"):
        table = search(model, includes=["onnxruntime_fp32"])
    assert table["status"].isin(["successful", "early stopped"]).all()
    assert model.training


@pytest.mark.slow
def test_a_model_that_cannot_be_saved_is_built_anew():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)

        def forward(self, x):
            return {"y": self.linear(x), "z": (1 + 2j)}  # a constant that no file can hold

    optimizer = InferenceOptimizer()
    optimizer.optimize(Odd(), X, includes=["onnxruntime_fp32"], latency_sample_num=10)
    table = optimizer.results()
    assert not table.loc["onnxruntime_fp32", "saved"]
    assert "cannot be saved" in table.loc["onnxruntime_fp32", "reason"]
    result = optimizer.get_model("onnxruntime_fp32")(X)
    assert result["z"] == 1 + 2j
