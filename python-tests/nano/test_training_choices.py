"""Precision and layout of a training are those that a measurement on this processor chooses."""

from __future__ import annotations

import json
import logging
import random
import stat
import warnings

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.common.cpu import processor_name
from bigdl.nano.acceleration import autotune
from bigdl.nano.acceleration.autotune import AutotuneResult, choose
from bigdl.nano.acceleration.median_interval import MedianInterval
from bigdl.nano.pytorch import TorchNano, Trainer
from bigdl.nano.pytorch.training import step_autotune
from bigdl.nano.pytorch.training.optimizers import align_layouts
from bigdl.nano.pytorch.training.step_autotune import StepAutotuner, StepBenchmark, StepConfig

WAYS = [StepConfig(bf16, last) for bf16 in (False, True) for last in (False, True)]
PLAIN = WAYS[0].name
FAST = "bfloat16 with channels_last"


@pytest.fixture
def times(monkeypatch):
    """Let each way of a step take as long as one says, and a measurement be worth three steps."""
    seconds = {way.name: 1.0 for way in WAYS}
    asked = []

    def measured(self, way, *, warm_up):
        real(self, way, warm_up=warm_up)
        asked.append(way.name)
        return seconds[way.name]

    real = StepBenchmark.seconds
    monkeypatch.setattr(StepBenchmark, "seconds", measured)
    monkeypatch.setattr(step_autotune, "REPAID_STEPS", 3)
    monkeypatch.setattr(step_autotune, "REPAID_STEPS_AMX", 3)
    monkeypatch.setattr(step_autotune, "SAMPLED_STEPS", 3)
    monkeypatch.setattr(step_autotune, "SAMPLED_STEPS_AMX", 3)
    monkeypatch.setattr(step_autotune, "bf16_instructions", lambda device="cpu": "avx512_bf16")
    monkeypatch.setattr("bigdl.nano.pytorch.training.steps.bf16_instructions", lambda device: "x")
    seconds["asked"] = asked
    return seconds


class Net(nn.Module):
    """Draws random numbers of two kinds, and has statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.norm(self.first(x)).relu().mean((2, 3))
        return self.head(self.drop(y)) * (1 + 0.1 * np.random.rand() + 0.1 * random.random())


def loader(rows=24):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 3, 8, 8, generator=generator)
    y = torch.randint(4, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)


QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fitted(kind=Trainer, epochs=1, **arguments):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = Net()
    module = Trainer.compile(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), 0.01))
    run = kind(max_epochs=epochs, **QUIET, **arguments)
    run.fit(module, loader())
    return net, run


def same(one, other):
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


# --- what measured times decide


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"float32": [2.0] * 5, "bfloat16": [1.0] * 5}, "bfloat16"),
        ({"float32": [1.0] * 5, "bfloat16": [1.5] * 5}, "float32"),
        ({"float32": [1.0] * 5, "bfloat16": [0.99] * 5}, "float32"),  # too little
        ({"float32": [1.0, 1, 1, 1, 1], "bfloat16": [0.5, 0.6, 1.2, 1.3, 1.4]}, "float32"),
        ({"float32": [1.0, 9, 1, 1, 1], "bfloat16": [0.5] * 5}, "bfloat16"),  # one is disturbed
        ({"float32": [1.0] * 5, "bfloat16": [0.5] * 5, "last": [0.4] * 5}, "last"),
        ({"float32": [1.0] * 5, "bfloat16": [0.2]}, "bfloat16"),
    ],
    ids=["faster", "slower", "equal", "noise", "outlier", "fastest", "few"],
)
def test_the_way_with_the_best_times_is_chosen_where_noise_separates_it(seconds, chosen):
    assert choose(seconds, "float32").name == chosen


def test_what_a_user_does_not_allow_is_measured_and_not_chosen():
    choice = choose({"bf16": [2.0] * 3, "fp32": [1.0] * 3}, "bf16", ["bf16"])
    assert choice.name == "bf16"
    assert choice.speedups["fp32"].middle == 2.0


# --- what is kept


def test_choices_are_kept_for_their_user_alone_and_bounded(own_choices, monkeypatch):
    monkeypatch.setattr(autotune, "MOST_FILES", 3)
    choice = AutotuneResult(
        "b", {"a": MedianInterval.of([1.0]), "b": MedianInterval.of([1.4, 1.5, 1.6])}
    )
    keys = [autotune.cache_key("model", number) for number in range(6)]
    for key in keys:
        autotune.save_result(key, choice)
    assert autotune.load_result(keys[-1]) == choice
    assert len(list(own_choices.iterdir())) == 3
    assert stat.S_IMODE(own_choices.stat().st_mode) == 0o700
    assert autotune.load_result("0" * 40) is None


def test_broken_and_foreign_files_are_no_choices(own_choices):
    autotune.save_result("key", AutotuneResult("b", {"b": MedianInterval.of([1.5])}))
    file = own_choices / "key.json"
    for text in (
        "",
        "[]",
        '{"name": "b"}',
        json.dumps({"name": "c", "speedups": {"b": [1, 1, 1]}}),
    ):
        file.write_text(text)
        assert autotune.load_result("key") is None
    autotune.save_result("key", AutotuneResult("b", {"b": MedianInterval.of([1.5])}))
    own_choices.chmod(0o777)
    assert autotune.load_result("key") is None


def test_a_directory_that_cannot_be_made_costs_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    autotune.save_result("key", AutotuneResult("b", {"b": MedianInterval.of([1.5])}))
    assert autotune.load_result("key") is None


def test_the_processor_has_a_name(tmp_path):
    (tmp_path / "proc").mkdir()
    text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: EPYC\n\nprocessor\t: 1\n"
    (tmp_path / "proc" / "cpuinfo").write_text(text)
    assert processor_name(tmp_path) == "AuthenticAMD EPYC"


# --- fits


def test_a_measurement_that_plain_wins_leaves_a_fit_as_it_is_without_one(times):
    plain, _ = fitted(precision=32, channels_last=False)
    assert not times["asked"]
    measured, run = fitted()
    assert set(times["asked"]) == {way.name for way in WAYS}
    assert same(measured, plain)
    assert measured.calls == plain.calls
    assert run.settings[0] == "float32"
    assert "channels_last" not in run.settings


def test_what_is_faster_is_chosen_and_told_in_one_line(times, caplog):
    times[FAST] = 0.5
    with caplog.at_level(logging.INFO):
        net, run = fitted()
    assert run.settings[:2] == ("bfloat16 in training steps", "channels_last")
    line = "Nano trains with bfloat16 with channels_last (2.00 times as fast as float32), measured"
    assert sum(text.startswith(line) for text in caplog.messages) == 1
    assert net.first.weight.is_contiguous()
    assert "forward" not in vars(net)


@pytest.mark.parametrize(
    ("fastest", "named"),
    [
        ("float32", {"precision": 32, "channels_last": False}),
        ("float32 with channels_last", {"precision": 32, "channels_last": True}),
        ("bfloat16", {"precision": "bf16", "channels_last": False}),
        (FAST, {"precision": "bf16", "channels_last": True}),
    ],
)
def test_a_measured_choice_trains_as_the_same_choice_named_by_hand(times, fastest, named):
    """From the first step: weights, optimizer, statistics, random numbers and rows are equal."""
    times[fastest] = 0.5
    measured, _ = fitted(epochs=2)
    assert times["asked"]
    times.update(dict.fromkeys((way.name for way in WAYS), 1.0))
    by_hand, _ = fitted(epochs=2, **named)
    assert same(measured, by_hand)
    again, _ = fitted(epochs=2)  # with the cached choice
    assert same(again, by_hand)


class Contrasting(pl.LightningModule):
    """Multiplies its network's results in the step, outside of modules."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.dtypes = set()

    def training_step(self, batch, index):
        z = self.net(batch[0])
        product = z @ z.T
        self.dtypes.add((z.dtype, product.dtype))
        return product.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def test_a_product_outside_of_modules_stays_in_float32_unless_bf16_is_named(times):
    times["bfloat16"] = 0.5
    for named, product in (({}, torch.float32), ({"precision": "bf16"}, torch.bfloat16)):
        module = Contrasting()
        run = Trainer(max_epochs=1, channels_last=False, **QUIET, **named)
        run.fit(module, loader())
        assert "bf" in run.settings[0]
        assert product in {dtypes[1] for dtypes in module.dtypes}
        assert named or {dtypes[0] for dtypes in module.dtypes} == {torch.float32}


def test_a_short_fit_measures_a_part_of_the_rows(times, monkeypatch):
    monkeypatch.setattr(step_autotune, "REPAID_STEPS", 100)
    rows = []
    real = Net.forward
    monkeypatch.setattr(Net, "forward", lambda net, x: rows.append(len(x)) or real(net, x))
    times[FAST] = 0.5
    torch.manual_seed(0)
    net = Net()
    module = Trainer.compile(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), 0.01))
    run = Trainer(max_epochs=2, **QUIET)
    batches = DataLoader(loader(64).dataset, batch_size=16)
    run.fit(module, batches)
    assert set(rows[: len(times["asked"])]) == {4}
    assert run.settings[:2] == ("bfloat16 in training steps", "channels_last")
    asked = len(times["asked"])
    Trainer(max_epochs=2, **QUIET).fit(module, batches)  # takes the kept choice
    assert len(times["asked"]) == asked
    monkeypatch.setattr(step_autotune, "REPAID_STEPS", 3)  # a long fit measures all rows
    Trainer(max_epochs=2, **QUIET).fit(module, batches)
    assert len(times["asked"]) > asked
    assert rows[-1] == 16


def test_a_step_that_takes_views_after_the_model_is_repeated_with_contiguous_tensors(times):
    class Viewing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3))

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).view(-1, 288).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def trained(**options):
        module = Viewing()
        run = Trainer(max_epochs=1, **QUIET, **options)
        run.fit(module, loader())
        return module, run

    times["float32 with channels_last"] = 0.5
    measured, run = trained()
    assert run.settings[1] == "contiguous (the model takes views of its activations)"
    by_hand, _ = trained(precision=32, channels_last=False)
    assert same(measured, by_hand)


def test_a_choice_is_kept_for_later_fits_of_such_a_model(times, own_choices):
    times["float32 with channels_last"] = 0.5
    fitted()
    asked = list(times["asked"])
    _, run = fitted()
    assert times["asked"] == asked
    assert "channels_last" in run.settings
    assert len(list(own_choices.iterdir())) == 1


def test_a_choice_that_noise_may_have_made_is_not_kept(times, own_choices):
    fitted()
    assert len(list(own_choices.iterdir())) == 1  # equal times: plain it is
    times[FAST] = 1 / 1.05
    choice = choose({PLAIN: [1.0] * 3, FAST: [0.8, 1.0, 1.2]}, PLAIN)
    assert choice.name == PLAIN
    assert not choice.is_clear(PLAIN)


def test_a_short_fit_is_the_plain_program_s(times, monkeypatch):
    for name in ("REPAID_STEPS", "SAMPLED_STEPS"):
        monkeypatch.setattr(step_autotune, name, 100)
    ours, run = fitted(fused_optimizers=False)
    plain, _ = fitted(pl.Trainer, accelerator="cpu")
    assert not times["asked"]
    assert same(ours, plain)
    assert run.settings[0] == "float32"


def test_a_deterministic_training_does_not_depend_on_time(times):
    torch.use_deterministic_algorithms(True)
    try:
        times[FAST] = 0.5
        _, run = fitted()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not times["asked"]
    assert run.settings[0] == "float32"


def test_a_precision_that_a_user_names_is_kept_with_one_warning_where_it_is_slower(times):
    times["bfloat16"] = times[FAST] = 3.0
    with pytest.warns(UserWarning, match="float32 trains this model 3.00 times as fast") as caught:
        _, run = fitted(precision="bf16")
    assert sum("times as fast" in str(each.message) for each in caught) == 1
    assert run.settings[0] == "precision bf16-mixed"


def test_a_precision_that_is_as_fast_is_not_warned_of(times):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(precision="bf16")
    assert not any("times as fast" in str(each.message) for each in caught)


def test_a_model_that_cannot_be_copied_is_trained_as_it_is(times):
    class Locked(Net):
        def __deepcopy__(self, memo):
            raise TypeError("cannot be copied")

    net = Locked()
    module = Trainer.compile(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters()))
    run = Trainer(max_epochs=1, **QUIET)
    run.fit(module, loader())
    assert not times["asked"]
    assert run.settings[0] == "float32"


def test_hooks_of_the_program_see_no_call_of_a_measurement(times):
    torch.manual_seed(0)
    net, seen = Net(), []
    net.first.register_forward_hook(lambda *call: seen.append(1))
    module = Trainer.compile(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters()))
    Trainer(max_epochs=1, **QUIET).fit(module, loader())
    assert times["asked"]
    assert len(seen) == len(loader())


# --- several processes


def test_all_processes_do_what_rank_0_has_measured(times):
    """Rank 1 measures other times, and takes part in the same exchanges."""
    sent = []

    def chosen(broadcast, own):
        times.update(own)
        net = Net()
        chooser = StepAutotuner({"": net}, WAYS, steps_left=lambda: 50, broadcast=broadcast)
        batch = torch.rand(4, 3, 8, 8)
        assert chooser.begin(batch) is None
        with chooser.observed():
            net(batch).sum().backward()
        way, choice = chooser.begin(batch)
        assert chooser.is_over
        return way, choice

    def of_rank_0(value):
        sent.append(value)
        return value

    first = chosen(of_rank_0, {FAST: 0.5})
    replies = iter(list(sent))
    second = chosen(lambda value: next(replies), {FAST: 3.0, "bfloat16": 0.1})
    assert first == second
    assert first[0].name == FAST
    assert next(replies, None) is None


class Measuring(pl.LightningModule):
    """In each process other times are measured; afterwards the weights of all are compared."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def setup(self, stage):
        step_autotune.REPAID_STEPS = step_autotune.REPAID_STEPS_AMX = 3
        step_autotune.SAMPLED_STEPS = step_autotune.SAMPLED_STEPS_AMX = 3
        real, fast = StepBenchmark.seconds, "float32" if self.global_rank else WAYS[1].name

        def seconds(measurement, way, *, warm_up):
            real(measurement, way, warm_up=warm_up)
            return 0.5 if way.name == fast else 1.0

        StepBenchmark.seconds = seconds

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)

    def on_train_end(self):
        weight = self.net.first.weight.detach()
        assert not weight.is_contiguous()
        both = self.all_gather(weight.contiguous())
        assert torch.equal(both[0], both[1])


@pytest.mark.slow
def test_two_processes_agree_and_their_gradients_have_buckets_in_the_new_layout():
    run = Trainer(max_epochs=1, num_processes=2, **QUIET)
    run.fit(Measuring(), loader(64))
    assert run.settings[:2] == ("float32", "channels_last")


# --- layouts and fused optimizers


def test_fused_optimizers_compute_rightly_after_a_change_of_the_layout():
    weights = []
    for changes in (False, True):
        torch.manual_seed(0)
        conv = nn.Conv2d(4, 8, 3)
        optimizer = torch.optim.Adam(conv.parameters(), lr=0.01, fused=True)
        x = torch.randn(2, 4, 8, 8)
        for step in range(4):
            conv(x).square().mean().backward()
            if changes and step in (1, 3):
                layout = torch.channels_last if step == 1 else torch.contiguous_format
                conv.to(memory_format=layout)
                align_layouts([optimizer])
            optimizer.step()
            optimizer.zero_grad()
        weights.append(conv.weight.detach().contiguous())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


def test_a_fit_is_resumed_in_another_layout(tmp_path):
    """The states of a fused optimizer come from a checkpoint in the layout that they had."""
    nets = []
    for layout in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4))
        module = Trainer.compile(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters()))
        rows = DataLoader(loader().dataset, batch_size=4)
        first = Trainer(max_epochs=2, precision=32, channels_last=False, **QUIET)
        first.fit(module, rows)
        first.save_checkpoint(tmp_path / "half.ckpt")
        second = Trainer(max_epochs=4, precision=32, channels_last=layout, **QUIET)
        second.fit(module, rows, ckpt_path=tmp_path / "half.ckpt")
        nets.append(net)
    for own, other in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


# --- loops of one's own


class Loop(TorchNano):
    def train(self, steps):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        model, optimizer, batches = self.setup(net, optimizer, loader(4 * steps))
        for x, y in batches:
            optimizer.zero_grad()
            self.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        return net


def trained(steps=8, **arguments):
    random.seed(0)
    np.random.seed(0)
    loop = Loop(**arguments)
    return loop.train(steps), loop.settings


def test_a_loop_is_measured_in_its_calls(times):
    plain, _ = trained(precision=32, channels_last=False)
    measured, _ = trained()
    assert times["asked"]
    assert same(measured, plain)
    times[FAST] = 0.5
    net, settings = trained(steps=9, auto_lr=False, fused_optimizers=False)
    assert settings[0] == "float32"  # the choice of such a model is kept
    assert "forward" not in vars(net)


def test_a_loop_takes_what_is_faster(times):
    times[FAST] = 0.5
    net, settings = trained()
    assert settings[:2] == ("bfloat16 in training steps", "channels_last")
    assert net.first.weight.is_contiguous()
    assert "forward" not in vars(net)
