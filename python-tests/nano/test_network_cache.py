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

from bigdl.nano.acceleration import agreement
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


PROGRAMS = {
    "class attribute": (
        "class Model(nn.Linear):\n"
        "    limit = VALUE\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).clamp(max=self.limit)\n"
        "model = Model(6, 3)\n"
    ),
    "patched method": (
        "import types\n"
        "model = nn.Linear(6, 3)\n"
        "def forward(self, x):\n"
        "    return nn.functional.linear(x, self.weight).clamp(max=VALUE)\n"
        "model.forward = types.MethodType(forward, model)\n"
    ),
    "helper": (
        "import helper\n"
        "from helper import limited\n"
        "class Model(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return limited(helper.limited(super().forward(x)))\n"
        "model = Model(6, 3)\n"
    ),
    "globals": (
        "LIMITS = [{'max': torch.tensor(VALUE)}]\n"
        "class Model(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).minimum(LIMITS[0]['max'])\n"
        "model = Model(6, 3)\n"
    ),
}
BEGIN = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
END = """
from bigdl.nano.pytorch import InferenceOptimizer

x = torch.ones(4, 6)
fast = InferenceOptimizer.trace(model.eval(), accelerator="openvino", input_sample=x)
torch.testing.assert_close(fast(1000 * x), model(1000 * x))
"""


@pytest.mark.slow_cases("class attribute", "patched method")
@pytest.mark.parametrize("changed", PROGRAMS)
def test_a_changed_program_is_converted_again(tmp_path, changed):
    program = tmp_path / "program.py"
    for value in (6.0, 3.0):
        helper = f"def limited(x):\n    return x.clamp(max={value})\n"
        (tmp_path / "helper.py").write_text(helper)
        program.write_text(BEGIN + PROGRAMS[changed].replace("VALUE", str(value)) + END)
        subprocess.run([sys.executable, "-B", program], check=True)
    assert len(list_entries()) == 2


def test_an_operator_in_python_is_not_kept():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, gradient):
            return gradient * 2

    class Applying(Layers):
        def forward(self, x):
            return super().forward(Twice.apply(x))

    model = Applying()
    torch.testing.assert_close(traced(model)(X), model(X))


def test_constants_in_code_are_compared_in_full():
    for values in ([0.1] * 5 + [0.2], [0.1] * 5 + [0.2 + 1e-7]):

        class Constant(nn.Module):
            constant = torch.tensor(values)

            def forward(self, x):
                return x + self.constant

        torch.testing.assert_close(traced(Constant())(X), Constant()(X), rtol=0, atol=0)
    assert len(list_entries()) == 2


def test_a_low_precision_that_disagrees_keeps_the_conversion(monkeypatch):
    def disagree(*arguments, **options):
        raise agreement.DisagreementError("too inaccurate")

    traced(Layers())
    (entry,) = list_entries()
    before = entry.folder.stat().st_ino
    monkeypatch.setattr(agreement, "check_agreement", disagree)
    with refused("accuracy", "too inaccurate"):
        InferenceOptimizer.quantize(
            Layers(), precision="bf16", accelerator="openvino", input_sample=X
        )
    assert entry.folder.stat().st_ino == before


def test_a_quantized_network_that_disagrees_is_removed():
    def quantized(model):
        return InferenceOptimizer.quantize(
            model, accelerator="openvino", input_sample=X, calib_data=[X]
        )

    def entry_of(model):
        known = {each.key for each in list_entries()}
        quantized(model)
        added = [each for each in list_entries() if each.key not in known]
        return next(each for each in added if each.about["network"] == "int8")

    right, other = entry_of(Layers()), Layers()
    other.shift = 5.0
    for file in entry_of(other).folder.iterdir():
        shutil.copy(file, right.folder)
    wrong = right.folder.stat().st_ino
    model = Layers()
    difference = (quantized(model)(X) - model(X)).abs().max()
    assert difference < 1
    assert right.folder.stat().st_ino != wrong


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


def test_a_failure_to_write_stores_nothing(own_choices):
    def fail(folder):
        (folder / "x.bin").write_bytes(b"part")
        raise RuntimeError("No space left on device")

    assert store_entry("a" * 40, fail, {}) is None
    assert not list((own_choices.parent / "networks").iterdir())


def test_a_damaged_entry_is_replaced():
    entry = stored()
    (entry.folder / "x.bin").unlink()
    assert find_entry(entry.key) is None
    assert stored() is not None
    assert find_entry(entry.key).size == MIB


def test_a_damaged_entry_is_removed_when_another_is_stored():
    damaged = stored().folder
    (damaged / "about.json").unlink()
    stored("b" * 40)
    assert not damaged.exists()


def test_clearing_keeps_what_another_process_writes():
    fresh = stored().folder.parent / ".new-fresh"
    fresh.mkdir()
    assert clear_entries() == MIB
    assert fresh.exists()
    assert not list_entries()


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
