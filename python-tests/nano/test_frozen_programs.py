"""Programs that change, use or watch what is frozen train as they do without acceleration."""

import copy
import pickle

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from training_models import QUIET, Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start of training"),
    pytest.mark.filterwarnings("ignore:The .(train|val)_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]
STEPS, BATCH = 6, 4


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The networks are too small for more, which would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trunk(*first: nn.Module) -> nn.Sequential:
    """A small frozen network from images to 8 features, with statistics that are not fresh."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3, 2)]
    made = nn.Sequential(*first, *layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for norm in (part for part in made if isinstance(part, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean, -0.2, 0.2)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return made.requires_grad_(False).eval()


class Program(pl.LightningModule):
    """Trains a head on a frozen trunk."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = self.make_trunk(), nn.Linear(8, 2)

    def make_trunk(self) -> nn.Module:
        return trunk()

    def forward(self, x):
        return self.head(self.trunk(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


def rows(size: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(STEPS * BATCH, 3, size, size, generator=generator)
    return TensorDataset(images, torch.arange(len(images)) % 2)


def fitted(kind: type[Program], frozen_prefix: bool | None, **arguments):
    """A program after two epochs over the rows, and its trainer."""
    torch.manual_seed(0)
    module = kind()
    options = {"max_epochs": 2, "precision": 32, **QUIET, **arguments}
    run = Trainer(frozen_prefix=frozen_prefix, **options)
    torch.manual_seed(3)
    validation = DataLoader(rows(16), batch_size=8) if "validation_step" in vars(kind) else None
    run.fit(module, DataLoader(rows(), batch_size=BATCH), validation)
    return module, run


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, value), (_, expected) in zip(
        one.state_dict().items(), other.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert getattr(one, "diary", None) == getattr(other, "diary", None)


# -- the faults of a replacement that does not ask -------------------------------------------------


class OtherSizeInValidation(Program):
    """Its rows of validation have 16 pixels where those of training have 12."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))


class Flat(Program):
    """Calls the layers of the trunk one by one, and its first also alone."""

    def __init__(self):
        super().__init__()
        self.layers = self.trunk
        del self.trunk
        self.between = []

    def training_step(self, batch, batch_idx):
        x = batch[0]
        alone = self.layers[0](x)
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x), batch[1])
        return loss + 0.01 * alone.mean() * self.head.weight.sum()


class Network(nn.Module):
    """Calls its layers one by one."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = trunk(), nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class CalledAlone(Program):
    """Calls the first layer alone, outside of the network that calls all."""

    def __init__(self):
        super().__init__()
        self.trunk = Network()

    def forward(self, x):
        return self.trunk(x)

    def training_step(self, batch, batch_idx):
        alone = self.trunk.layers[0](batch[0])
        loss = nn.functional.cross_entropy(self.trunk(batch[0]), batch[1])
        return loss + 0.01 * alone.mean() * self.trunk.head.weight.sum()


class Assigning(Program):
    """Other weights take the place of the trunk's in the second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            state = {name: value * 1.5 for name, value in self.trunk.state_dict().items()}
            self.trunk.load_state_dict(state, assign=True)
            self.trunk.requires_grad_(False)


class Growing(Program):
    """A layer that is trained is put into the trunk in the second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trunk[4] = nn.Conv2d(8, 8, 1)
            self.trainer.optimizers[0].add_param_group({"params": self.trunk[4].parameters()})


class HooksLater(Program):
    """A hook on a layer of the trunk is added in the second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.diary = []
            self.trunk[3].register_forward_hook(
                lambda module, given, output: self.diary.append(tuple(output.shape))
            )


class Counting(nn.Module):
    """Counts its calls, and scales by how many there were."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class SideEffects(Program):
    def make_trunk(self):
        return trunk(Counting())


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand(x.shape)


class Noisy(Program):
    def make_trunk(self):
        return trunk(Noise())


# -- programs of users -----------------------------------------------------------------------------


class TiedToTrained(Program):
    """The head is trained, and the trunk applies its weight, too."""

    def make_trunk(self):
        made = trunk()
        made.append(nn.Linear(8, 8, bias=False))
        return made

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.head.weight = self.trunk[-1].weight.requires_grad_(True)


class MovingAverage(Program):
    """A teacher follows the student by ``.data``, which no version of a tensor shows."""

    def __init__(self):
        super().__init__()
        self.student = copy.deepcopy(self.trunk).requires_grad_(True)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            wanted = self.trunk(batch[0])
        found = self.student(batch[0])
        return nn.functional.mse_loss(found, wanted) + super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for own, other in zip(self.trunk.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)


class MovingAverageLater(MovingAverage):
    """The teacher follows in the second epoch only."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch == 1:
            super().on_train_batch_end(outputs, batch, batch_idx)


class Checkpointed(Program):
    """What the backward pass needs of trunk and head is computed again."""

    def forward(self, x):
        return checkpoint(lambda x: self.head(self.trunk(x)), x, use_reentrant=False)


class LowRank(nn.Module):
    """A frozen convolution and a small one that is trained."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.down = layer, nn.Conv2d(8, 2, 3, 2)
        self.up = nn.Conv2d(2, 8, 1)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Lora(Program):
    def make_trunk(self):
        made = trunk()
        made[3] = LowRank(made[3])
        return made


class Unfreezing(Program):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trunk.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": self.trunk.parameters()})


class Functional(Program):
    """Calls the trunk by ``torch.func`` with weights that are not its own, and for each row."""

    def training_step(self, batch, batch_idx):
        other = {name: 1.1 * value for name, value in self.trunk.named_parameters()}
        called = torch.func.functional_call(self.trunk, other, batch[0])
        rowwise = torch.func.vmap(lambda row: self.trunk(row[None])[0])(batch[0])
        features = self.trunk(batch[0]) + 0.1 * called + 0.1 * rowwise
        return nn.functional.cross_entropy(self.head(features), batch[1])


class TwoOptimizers(Program):
    """A second optimizer trains the trunk in every third step, as a GAN does."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.trunk.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        of_head, of_trunk = self.optimizers()
        with torch.no_grad():
            features = self.trunk(batch[0])
        for optimizer, found in ((of_head, features), (of_trunk, None)):
            if found is None and batch_idx % 3 < 2:
                continue
            optimizer.zero_grad()
            found = self.trunk(batch[0]) if found is None else found
            self.manual_backward(nn.functional.cross_entropy(self.head(found), batch[1]))
            optimizer.step()

    def configure_optimizers(self):
        parts = (self.head, self.trunk)
        return [torch.optim.SGD(part.parameters(), 0.1) for part in parts]


class Resizing(Program):
    """Images grow from step to step."""

    def training_step(self, batch, batch_idx):
        size = 8 + 2 * batch_idx + 2 * self.current_epoch
        images = nn.functional.interpolate(batch[0], size=size)
        return super().training_step((images, batch[1]), batch_idx)


class MixupBefore(Program):
    def training_step(self, batch, batch_idx):
        order, share = torch.randperm(len(batch[0])), float(torch.rand(()))
        mixed = share * batch[0] + (1 - share) * batch[0][order]
        return super().training_step((mixed, batch[1]), batch_idx)


class MixupAfter(Program):
    """Changes features in place."""

    def training_step(self, batch, batch_idx):
        features = self.trunk(batch[0])
        order, share = torch.randperm(len(features)), float(torch.rand(()))
        features.mul_(share).add_((1 - share) * features[order])
        return nn.functional.cross_entropy(self.head(features), batch[1])


class DropoutInside(Program):
    def make_trunk(self):
        made = trunk(nn.Dropout(0.2))
        made[0].train()
        return made


class Looking(nn.Module):
    """Takes one of two ways by what it sees."""

    def forward(self, x):
        if x.mean() > 0.5:
            return x * 2
        return x - 1


class BranchOnData(Program):
    def make_trunk(self):
        return trunk(Looking())


class Scheduled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return x * self.scale


class AttributeLater(Program):
    def make_trunk(self):
        return trunk(Scheduled())

    def on_train_epoch_start(self):
        self.trunk[0].scale = 1.0 + self.current_epoch


class ClassLater(Program):
    """What a layer multiplies by is an attribute of its class, and changes."""

    def make_trunk(self):
        class Scaled(nn.Module):
            scale = 1.0

            def forward(self, x):
                return x * self.scale

        return trunk(Scaled())

    def on_train_epoch_start(self):
        type(self.trunk[0]).scale = 1.0 + self.current_epoch


class InTrainMode(Program):
    """Features depend on the batch, and statistics follow it."""

    def make_trunk(self):
        return trunk().train()


class LooksBetween(Flat):
    """Uses what is between the layers, in some steps only."""

    def training_step(self, batch, batch_idx):
        x, seen = batch[0], 0.0
        for layer in self.layers:
            x = layer(x)
            if batch_idx == 4 and x.dim() == 4:
                seen = seen + x.mean()
        return nn.functional.cross_entropy(self.head(x), batch[1]) + seen * self.head.weight.sum()


class MomentsOfBatch(nn.Module):
    """Rows depend on the other rows of their batch."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class BatchDependent(Program):
    """The last batch of an epoch is smaller."""

    def make_trunk(self):
        return trunk(MomentsOfBatch())

    def training_step(self, batch, batch_idx):
        kept = 3 if batch_idx == STEPS - 1 else BATCH
        return super().training_step((batch[0][:kept], batch[1][:kept]), batch_idx)


class WithoutGradients(Program):
    """Lightning's recipe: eval and ``no_grad``, while ``requires_grad`` stays true."""

    def make_trunk(self):
        return trunk().requires_grad_(True)

    def forward(self, x):
        self.trunk.eval()
        with torch.no_grad():
            features = self.trunk(x)
        return self.head(features)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, weight_decay=0.1)


class Broadcasting(Program):
    """Buffers are written in each step with what is in them, as DDP does."""

    def training_step(self, batch, batch_idx):
        for buffer in self.trunk.buffers():
            buffer.copy_(buffer.clone())
        return super().training_step(batch, batch_idx)


class Copying(Program):
    """Copies, pickles, scripts and traces the trunk while it runs."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            x, plain = batch[0], copy.deepcopy(self.trunk)
            others = [plain, pickle.loads(pickle.dumps(self.trunk))]
            others += [torch.jit.script(self.trunk), torch.jit.trace(self.trunk, x)]
            for other in others:
                assert torch.equal(other(x), plain(x))
        return super().training_step(batch, batch_idx)


class Pruned(Program):
    """One weight of the trunk becomes zero in the second epoch, by ``.data``."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trunk[3].weight.data[2, 1, 1, 1] = 5.0


# How the second fit ends: replaced to the end, as written again, or never replaced.
KEPT, LEFT, NEVER = "kept", "left", "never"
PROGRAMS = {
    OtherSizeInValidation: KEPT,
    Flat: LEFT,
    CalledAlone: KEPT,
    Assigning: KEPT,  # built again
    Growing: KEPT,  # what is before the new layer
    HooksLater: LEFT,
    SideEffects: NEVER,
    Noisy: NEVER,
    TiedToTrained: KEPT,
    MovingAverage: LEFT,
    MovingAverageLater: LEFT,
    Checkpointed: KEPT,
    Lora: KEPT,
    Unfreezing: LEFT,
    Functional: KEPT,
    TwoOptimizers: None,
    Resizing: None,
    MixupBefore: KEPT,
    MixupAfter: KEPT,
    DropoutInside: NEVER,
    BranchOnData: NEVER,
    AttributeLater: KEPT,
    ClassLater: KEPT,
    InTrainMode: NEVER,
    LooksBetween: None,
    BatchDependent: KEPT,
    WithoutGradients: KEPT,
    Broadcasting: KEPT,
    Copying: KEPT,
    Pruned: KEPT,
}


# Those that build anew several times.
SLOW = (MovingAverage, TwoOptimizers, Resizing, Assigning, LooksBetween, BatchDependent)
CASES = [
    pytest.param(kind, id=kind.__name__, marks=[pytest.mark.slow] if kind in SLOW else [])
    for kind in PROGRAMS
]


@pytest.mark.slow_cases(
    "AttributeLater",
    "Broadcasting",
    "CalledAlone",
    "Checkpointed",
    "ClassLater",
    "Copying",
    "Flat",
    "Functional",
    "Growing",
    "HooksLater",
    "Lora",
    "MixupAfter",
    "MixupBefore",
    "MovingAverageLater",
    "OtherSizeInValidation",
    "Pruned",
    "TiedToTrained",
    "Unfreezing",
    "WithoutGradients",
)
@pytest.mark.parametrize("kind", CASES)
def test_a_program_trains_as_it_does_without(kind, caplog):
    plain, _ = fitted(kind, frozen_prefix=False)
    with caplog.at_level("INFO"):
        fast, run = fitted(kind, frozen_prefix=True)
    assert_same(fast, plain)
    assert not any("forward" in vars(part) for part in fast.modules())
    end = PROGRAMS[kind]
    if end is not None:
        assert ("Frozen prefix: " in caplog.text) == (end != NEVER), caplog.text
        kept = [each for each in run.settings if each == "frozen prefix openvino_fp32"]
        assert bool(kept) == (end == KEPT), (run.settings, caplog.text)
