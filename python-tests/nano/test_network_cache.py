"""Converted networks are kept on disk: for equal models only, complete, bounded and private."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time

import pytest
import torch
from refusals import refused
from test_frozen_automatic import Wide, wide_rows
from torch import nn
from training_models import QUIET, Trainer

from bigdl.nano.acceleration.network_cache import (
    clear_entries,
    find_entry,
    list_entries,
    remove_entry,
    store_entry,
)
from bigdl.nano.cli.cache import main
from bigdl.nano.pytorch import InferenceOptimizer

X = torch.linspace(-1, 1, 24).reshape(4, 6)
MIB = 2**20


class Layers(nn.Module):
    """A network whose function depends on an attribute and on the code of its class."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.shift = 0.0

    def forward(self, x):
        return self.second(self.first(x).relu() * self.scale + self.shift)


def traced(model):
    return InferenceOptimizer.trace(model, accelerator="openvino", input_sample=X)


def stored(name="a" * 40, size=MIB):
    return store_entry(name, lambda folder: (folder / "x.bin").write_bytes(bytes(size)), {"a": 1})


# -- which networks are equal ----------------------------------------------------------------------


def test_an_equal_model_takes_the_network_of_an_earlier_one():
    first = traced(Layers())
    (entry,) = list_entries()
    assert entry.about["model"] == "Layers"
    os.utime(entry.folder, (1, 1))
    second = traced(Layers())
    (again,) = list_entries()
    assert again.key == entry.key
    assert again.used_s > 1
    assert torch.equal(first(X), second(X))


def test_another_sample_of_the_same_shape_takes_it_too():
    traced(Layers())
    InferenceOptimizer.trace(Layers(), accelerator="openvino", input_sample=X + 1)
    assert len(list_entries()) == 1
    InferenceOptimizer.trace(Layers(), accelerator="openvino", input_sample=X[:2])
    assert len(list_entries()) == 2


def change_weight(model):
    with torch.no_grad():
        model.first.weight[0, 0] += 1e-3


def change_attribute(model):
    model.shift = 1.0


def change_class(model):
    class Other(Layers):
        def forward(self, x):
            return self.second(self.first(x).tanh() * self.scale + self.shift)

    model.__class__ = Other


@pytest.mark.parametrize("change", [change_weight, change_attribute, change_class])
def test_another_weight_attribute_or_code_is_another_network(change):
    traced(Layers())
    model = Layers()
    change(model)
    torch.testing.assert_close(traced(model)(X), model(X))
    assert len(list_entries()) == 2


def test_a_network_that_disagrees_is_removed_and_converted_again():
    traced(Layers())
    (right,) = list_entries()
    other = Layers()
    change_attribute(other)
    traced(other)
    wrong = next(each for each in list_entries() if each.key != right.key)
    for file in wrong.folder.iterdir():
        shutil.copy(file, right.folder)
    model = Layers()
    torch.testing.assert_close(traced(model)(X), model(X))
    torch.testing.assert_close(traced(model)(X), model(X))


def test_a_branch_on_values_is_not_kept():
    class Branching(Layers):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    with refused("accuracy", "Branching"):
        traced(Branching())
    assert not list_entries()


def test_int8_is_kept_for_equal_calibration_data():
    def quantized(data):
        return InferenceOptimizer.quantize(
            Layers(), accelerator="openvino", input_sample=X, calib_data=data, strict_check=False
        )

    one = quantized([X])
    names = {entry.about["network"] for entry in list_entries()}
    assert names == {"converted", "int8"}
    two = quantized([X])
    assert len(list_entries()) == 2
    assert torch.equal(one(X), two(X))
    quantized([2 * X])
    assert len(list_entries()) == 3


def test_another_process_takes_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from bigdl.nano.pytorch import InferenceOptimizer\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU())\n"
        "InferenceOptimizer.trace(model, accelerator='openvino', input_sample=torch.ones(4, 6))\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, program], check=True)
    assert len(list_entries()) == 1


# -- the folder ------------------------------------------------------------------------------------


def test_entries_are_private_and_complete(own_choices):
    entry = stored()
    assert entry.size == MIB
    assert stat.S_IMODE(entry.folder.parent.stat().st_mode) == 0o700
    (entry.folder / "x.bin").write_bytes(b"truncated")
    assert find_entry(entry.key) is None
    remove_entry(entry.key)
    stored()
    entry.folder.parent.chmod(0o777)
    assert find_entry(entry.key) is None
    assert stored("b" * 40) is None


def test_the_least_recently_used_are_removed(monkeypatch):
    monkeypatch.setenv("BIGDL_NANO_CACHE_GB", str(3 / 1024))
    for age, name in ((30, "a"), (20, "b"), (10, "c")):
        entry = stored(name * 40)
        os.utime(entry.folder, (time.time() - age,) * 2)
    assert find_entry("a" * 40) is not None  # used now
    stored("d" * 40)
    assert {entry.key[0] for entry in list_entries()} == {"a", "c", "d"}
    assert stored("e" * 40, 4 * MIB) is None
    monkeypatch.setenv("BIGDL_NANO_CACHE_GB", "0")
    assert find_entry("a" * 40) is None
    assert stored("f" * 40) is None


def test_a_size_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("BIGDL_NANO_CACHE_GB", "much")
    with refused("argument-value", "BIGDL_NANO_CACHE_GB"):
        stored()


def test_what_crashes_leave_is_removed(own_choices):
    folder = stored().folder.parent / ".new-killed"
    folder.mkdir()
    os.utime(folder, (1, 1))
    stored("b" * 40)
    assert not folder.exists()
    assert not [each for each in folder.parent.iterdir() if each.name.startswith(".new-")]


def test_the_command_lists_and_clears(capsys):
    stored()
    assert main(["list"]) == 0
    assert "1.0 MiB" in capsys.readouterr().out
    assert main(["clear"]) == 0
    assert not list_entries()
    assert clear_entries() == 0


# -- frozen layers ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_frozen_layers_take_the_network_of_an_earlier_fit():
    for _ in range(2):
        torch.manual_seed(0)
        run = Trainer(max_epochs=2, precision=32, frozen_prefix=True, **QUIET)
        run.fit(Wide(), wide_rows())
        assert run.settings[-1].startswith("frozen prefix openvino_fp32")
    assert len(list_entries()) == 1
