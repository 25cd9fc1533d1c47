"""When the frozen part of a model is accelerated without being asked, and what is said of it."""

import pytest
import torch
from refusals import refused
from test_frozen_programs import (
    PROGRAMS,
    Assigning,
    CalledAlone,
    Growing,
    HooksLater,
    InTrainMode,
    Noisy,
    OtherSizeInValidation,
    Program,
    SideEffects,
    _one_thread,  # noqa: F401 - a fixture
    assert_same,
    fitted,
    rows,
    trunk,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_models import QUIET, Trainer

from bigdl.nano.pytorch import TorchNano, nano
from bigdl.nano.pytorch.frozen import FrozenPrefixCallback
from bigdl.nano.pytorch.frozen.automatic import ErrorTolerance
from bigdl.nano.pytorch.frozen.state import ModulesState
from bigdl.nano.pytorch.vision.models.backbones import mobilenet_v2, resnet18

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start of training"),
    pytest.mark.filterwarnings("ignore:The .(train|val)_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


# -- when it is built ------------------------------------------------------------------------------


class Wide(Program):
    """A trunk that takes some milliseconds; it stops once another runtime has made some steps."""

    most_steps = 400

    def __init__(self):
        super().__init__()
        self.steps_after, self.longest = 0, 0.0

    def make_trunk(self):
        layers = [nn.Conv2d(3, 32, 3, padding=1)]
        for _ in range(3):
            layers += [nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)]
        return nn.Sequential(*layers).requires_grad_(False).eval()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps_after += any("frozen prefix" in each for each in self.trainer.settings)
        if self.steps_after > 8 or self.trainer.global_step >= self.most_steps:
            self.trainer.should_stop = True


def wide_rows() -> DataLoader:
    images = torch.rand(32, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(images, torch.arange(32) % 2), batch_size=8)


def test_it_is_built_beside_the_training_where_many_steps_are_left(caplog):
    torch.manual_seed(0)
    module = Wide()
    run = Trainer(max_epochs=100_000, precision=32, **QUIET)
    with caplog.at_level("INFO"):
        run.fit(module, wide_rows())
    # On a machine that others use it may turn out to be no faster, which is said, too.
    assert "rozen prefix: trunk " in caplog.text
    assert "openvino_fp32" in caplog.text
    assert any("frozen prefix" in setting for setting in run.settings)
    assert run.global_step > 4  # steps were made while it was built
    rates = {row["phase"]: row for row in run.rates.rows()}
    assert rates["as written"]["times"] in (None, 1)
    if run.settings[-1].startswith("frozen prefix"):
        row = rates["with the frozen prefix"]
        assert row["steps_per_second"] == pytest.approx(1000 / row["milliseconds"])
        assert str(row["steps"]) in str(run.rates)
        if row["times"] is not None:
            assert f"{row['times']:.2g} times as fast" in caplog.text


def test_it_is_not_built_for_a_few_steps():
    torch.manual_seed(0)
    run = Trainer(max_epochs=2, precision=32, **QUIET)
    run.fit(Wide(), wide_rows())
    assert run.settings[-1].startswith("no frozen prefix (trunk: the ")
    assert run.settings[-1].endswith("steps left do not repay it)")


def test_a_small_part_is_left_alone():
    _, run = fitted(Program, frozen_prefix=None)
    assert run.settings[-1].startswith("no frozen prefix (trunk: ")
    # On a machine that others use its steps may seem long enough to be worth it.
    assert run.settings[-1].endswith(("the gain is too small)", "steps left do not repay it)"))


@pytest.mark.slow
def test_a_deterministic_training_has_to_ask_for_it():
    try:
        _, run = fitted(Program, None, deterministic=True)
        assert run.settings[-1].endswith("pass frozen_prefix=True)")
        _, run = fitted(Program, True, deterministic=True)
        assert run.settings[-1] == "frozen prefix openvino_fp32"
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_said_where_nothing_is_frozen():
    class Trained(Program):
        def make_trunk(self):
            return trunk().requires_grad_(True).train()

    _, run = fitted(Trained, frozen_prefix=None)
    assert not any("frozen" in setting for setting in run.settings)
    _, run = fitted(Program, frozen_prefix=False)
    assert not any("frozen" in setting for setting in run.settings)


def test_what_has_to_change_is_said():
    _, run = fitted(InTrainMode, frozen_prefix=None)
    assert run.settings[-1] == (
        "no frozen prefix (trunk: trunk.1 (BatchNorm2d) is in train mode, so its statistics follow "
        "the batches; call eval() on it)"
    )


def test_another_value_is_refused():
    with refused("argument-value", "frozen_prefix"):
        Trainer(frozen_prefix="fast")


@pytest.mark.slow
def test_each_of_two_processes_has_its_own():
    plain, _ = fitted(Program, False, num_processes=2)
    fast, run = fitted(Program, True, num_processes=2)
    assert run.settings[-1] == "frozen prefix openvino_fp32"
    assert_same(fast, plain)


# -- loops of one's own ----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = trunk(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.trunk(x))


def loop(model, optimizer, loader):
    for images, labels in loader:
        model.train()
        model.trunk.eval()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(images[:, :, :9])


class Loop(TorchNano):
    def train(self, model, optimizer, loader):
        loop(*self.setup(model, optimizer, loader))


def trained(run, **settings):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    loader = DataLoader(rows(), batch_size=4)
    run(precision=32, **settings)(model, optimizer, loader)
    return model


@pytest.mark.slow_cases("nano")
@pytest.mark.parametrize("kind", ["TorchNano", "nano"])
def test_a_loop_of_ones_own_is_accelerated(kind, caplog):
    def run(**settings):
        return Loop(**settings).train if kind == "TorchNano" else nano(**settings)(loop)

    plain = trained(run, frozen_prefix=False)
    with caplog.at_level("INFO"):
        fast = trained(run, frozen_prefix=True)
    assert_same(fast, plain)
    assert "Frozen prefix: trunk by openvino_fp32" in caplog.text
    assert not any("forward" in vars(part) for part in fast.modules())


# -- what is good enough ---------------------------------------------------------------------------


def test_a_result_may_be_as_far_away_as_the_allowed_precision():
    torch.manual_seed(0)
    layers, x = trunk(), torch.rand(4, 3, 12, 12)
    fp32, bf16 = (ErrorTolerance(layers, x, allowed) for allowed in (False, True))
    expected = layers(x)
    assert fp32.fp32 < 1e-5
    assert 1e-4 < bf16.bf16 < 2e-2
    assert fp32.judge(expected * (1 + 1e-7))[1] is None
    assert "is allowed" in fp32.judge(expected * (1 + 1e-3))[1]
    assert bf16.judge(expected * (1 + 0.5 * bf16.bf16))[1] is None
    assert "is allowed" in bf16.judge(expected * (1 + 2 * bf16.bf16))[1]
    one_row = expected.clone()
    one_row[0] *= 1 + 1.5 * bf16.bf16_row  # less than is allowed of all together
    assert bf16.judge(one_row)[1] is not None
    assert bf16.judge(expected * float("nan"))[1] is not None


def test_backbones_of_nano_are_known_to_be_pure():
    for make in (resnet18, mobilenet_v2):
        state = ModulesState([make(freeze=True)])
        assert state.unknown is None
        assert state.why_changed() is None


def test_each_kind_of_change_is_seen():
    changes = {
        "weights": lambda m: m[0].weight.data.mul_(1.001),
        "one weight": lambda m: m[3].weight.data[1, 2, 0, 0].add_(1),
        "another tensor": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight + 1)),
        "data": lambda m: setattr(m[0].weight, "data", m[0].weight + 1),
        "buffer": lambda m: m[1].running_mean.add_(1),
        "mode": lambda m: m[1].train(),
        "number": lambda m: setattr(m[1], "eps", 0.1),
        "layer": lambda m: m.__setitem__(0, nn.Conv2d(3, 8, 3)),
        "number and weight": lambda m: (
            setattr(m[1], "eps", float(str(m[1].eps))),
            m[3].weight.data[1, 2, 0, 0].add_(1),
        ),
        "hook": lambda m: m[0].register_forward_hook(lambda *_: None),
        "code": lambda m: setattr(m[0], "forward", lambda x: x),
        "class": lambda m: setattr(m[0], "__class__", type("Other", (nn.Conv2d,), {})),
    }
    for name, change in changes.items():
        layers = trunk()
        state = ModulesState([layers])
        assert state.why_changed() is None
        change(layers)
        assert state.why_changed() is not None, name


def test_the_same_again_is_no_change():
    layers = trunk()
    state = ModulesState([layers])
    layers.load_state_dict(layers.state_dict())
    layers.to(memory_format=torch.channels_last)
    layers[1].eps = float(str(layers[1].eps))
    layers.train()
    layers.eval()
    assert state.why_changed() is None


# -- the callback ----------------------------------------------------------------------------------

OF_CALLBACK = [
    OtherSizeInValidation,
    CalledAlone,
    Assigning,
    Growing,
    HooksLater,
    SideEffects,
    Noisy,
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_CALLBACK, ids=lambda kind: kind.__name__)
def test_a_program_trains_with_the_callback_as_without(kind):
    plain, _ = fitted(kind, frozen_prefix=False)
    callback = FrozenPrefixCallback(method="openvino_fp32")
    fast, _ = fitted(kind, frozen_prefix=None, callbacks=[callback])
    assert_same(fast, plain)
    assert bool(callback.prefix.segments) == (PROGRAMS[kind] != "never")
