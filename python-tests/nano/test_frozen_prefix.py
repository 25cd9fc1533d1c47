"""What is frozen runs fast, gives the gradients of the plain model, and leaves the model alone."""

import copy
import pickle

import pytest
import torch
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from bigdl.common.errors import UsageError
from bigdl.nano.openvino.network import supports_bf16
from bigdl.nano.pytorch.frozen import FrozenPrefixCallback, accelerate_frozen_prefix
from bigdl.nano.pytorch.frozen.features import code_of
from bigdl.nano.pytorch.vision.models import ImageClassifier, resnet18

needs_bf16 = pytest.mark.skipif(
    not supports_bf16(), reason="the processor does not multiply bfloat16"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start of training"),
    pytest.mark.filterwarnings("ignore:The .train_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


class Network(nn.Module):
    """Two stages without a module around them, and a head with dropout."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True)
        self.conv2, self.bn2, self.relu2 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True)
        self.conv3, self.bn3 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 2)

    @property
    def stages(self):
        return [self.conv1, self.bn1, self.relu1, self.conv2, self.bn2, self.relu2]

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(self.dropout(self.bn3(self.conv3(x)).mean((2, 3))))


def warmed(model, seed=0):
    """Statistics and scales of norms that are not those of a fresh model."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def trunk():
    """Small, frozen, in eval mode."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return warmed(nn.Sequential(*layers)).requires_grad_(False).eval()


@pytest.fixture
def network():
    """In train mode, with its first two stages frozen."""
    model = warmed(Network())
    for stage in model.stages:
        stage.requires_grad_(False).eval()
    return model


@pytest.fixture
def classifier():
    """A frozen trunk with a head that is trained."""
    torch.manual_seed(0)
    return nn.Sequential(trunk(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(1)
    return torch.rand(4, 3, 32, 32)


def gradients(model, images):
    """Gradients of a step, by the names of the parameters."""
    torch.manual_seed(2)
    model.zero_grad()
    labels = torch.arange(len(images)) % 2
    nn.functional.cross_entropy(model(images), labels).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def distance(one, other):
    """Relative distance of all gradients together; some are zero but for rounding."""
    one, other = (torch.cat([value.flatten() for value in each.values()]) for each in (one, other))
    return float((one - other).norm() / other.norm())


# -- gradients -------------------------------------------------------------------------------------


def test_gradients_of_an_fp32_prefix_are_equal(network, images):
    expected = gradients(copy.deepcopy(network), images)
    with accelerate_frozen_prefix(network, images, precision="fp32") as prefix:
        assert [segment.name for segment in prefix.segments] == ["conv1 … relu2"]
        got = gradients(network, images)
    assert (
        got.keys()
        == expected.keys()
        == {name for name, p in network.named_parameters() if p.requires_grad}
    )
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.slow_cases("int8-openvino_int8-0.2")
@pytest.mark.parametrize(
    ("precision", "method", "tolerance"),
    [
        pytest.param("bf16", "openvino_bf16", 0.03, marks=needs_bf16),
        ("int8", "openvino_int8", 0.2),
    ],
)
def test_gradients_of_other_precisions_are_close(network, images, precision, method, tolerance):
    expected = gradients(copy.deepcopy(network), images)
    calibration = [images, torch.rand(4, 3, 32, 32)]
    prefix = accelerate_frozen_prefix(
        network, images, precision=precision, calib_data=calibration, threads=1
    )
    assert [segment.method for segment in prefix.segments] == [method]
    assert 0 < prefix.segments[0].error < tolerance
    assert distance(gradients(network, images), expected) < tolerance


def test_a_stage_after_the_frozen_ones_is_trained(images):
    model = warmed(resnet18())
    model.eval()
    for name, child in model.named_children():
        child.requires_grad_(name == "layer4")
    expected = gradients(copy.deepcopy(model), images)
    prefix = accelerate_frozen_prefix(model, images, precision="fp32")
    assert [segment.names for segment in prefix.segments] == [
        ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
    ]
    got = gradients(model, images)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_training_steps_equal_those_of_the_plain_model(network, images):
    plain = copy.deepcopy(network)
    accelerate_frozen_prefix(network, images, precision="fp32")
    for model in (network, plain):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 0, 1])).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(network.state_dict()[name], value), name


# -- the user's model ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_model_stays_what_it_is(network, images):
    before, parameters = state_of(network), list(network.parameters())
    modes = [module.training for module in network.modules()]
    random = torch.get_rng_state()
    prefix = accelerate_frozen_prefix(network, images, precision="bf16", threads=1)
    assert list(map(id, network.parameters())) == list(map(id, parameters))
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    after = network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    prefix.release()
    assert not any("forward" in vars(module) for module in network.modules())


def test_copies_and_pickles_of_the_model_are_plain(network, images):
    expected = network.eval()(images)
    with accelerate_frozen_prefix(network, images, precision="fp32"):
        for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert torch.equal(other(images), expected)
            other.conv1.weight.data.zero_()
        assert torch.equal(network(images), expected)


@pytest.mark.slow
def test_a_resnet_in_bf16_takes_batches_of_any_size(images):
    torch.manual_seed(0)
    model = nn.Sequential(warmed(resnet18(freeze=True)), nn.Linear(512, 2))
    expected = model(images[:3])
    prefix = accelerate_frozen_prefix(model, images, threads=1)
    torch.testing.assert_close(model(images[:3]), expected, atol=0.05, rtol=0.05)
    assert prefix.segments[0].reason is None


@pytest.mark.slow
def test_batches_may_have_any_size(classifier, images):
    expected = classifier(images[:3])
    prefix = accelerate_frozen_prefix(classifier, images, threads=1)
    torch.testing.assert_close(classifier(images[:3]), expected, atol=0.02, rtol=0.02)
    assert prefix.segments[0].reason is None


# -- modules that are not accelerated --------------------------------------------------------------


def test_a_norm_in_train_mode_is_left_alone(network, images):
    network.train()
    before = state_of(network)
    expected = gradients(copy.deepcopy(network), images)
    prefix = accelerate_frozen_prefix(network, images)
    assert prefix.segments == []
    assert "bn1 (BatchNorm2d) is in train mode, so its statistics follow" in prefix.report()
    assert all(torch.equal(network.state_dict()[name], before[name]) for name in before)
    got = gradients(network, images)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def mode_asking():
    class Asking(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * (2 if self.training else 1)

    return Asking(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))


def watched():
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    trunk[1].register_forward_hook(lambda *_: None)
    return trunk


LEFT_ALONE = {
    "dropout": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 4, 3)),
        "draws random numbers",
    ),
    "statistics of the batch": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)
        ).eval(),
        "depends on its batch",
    ),
    "mode": (mode_asking, "reads its mode"),
    "hook": (watched, "a hook watches a module in it"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_may_change_is_left_alone_and_the_report_says_why(name, images):
    make, reason = LEFT_ALONE[name]
    model = nn.Sequential(
        make().requires_grad_(False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    prefix = accelerate_frozen_prefix(model, images)
    assert prefix.segments == []
    assert reason in prefix.report()


def test_frozen_modules_after_trained_ones_are_left_alone(images):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).requires_grad_(False),
    )
    prefix = accelerate_frozen_prefix(model, images)
    assert prefix.segments == []
    assert "1: not accelerated, gradients flow" in prefix.report()


def test_a_hook_of_a_replaced_module_sees_what_it_saw(classifier, images):
    seen = []
    classifier[0].register_forward_hook(lambda _, given, result: seen.append((*given, result)))
    expected = classifier[0](images)
    prefix = accelerate_frozen_prefix(classifier, images, precision="fp32")
    assert len(prefix.segments) == 1
    classifier(images)
    assert torch.equal(seen[-1][0], images)
    assert torch.equal(seen[-1][1], expected)


def test_modules_with_a_connection_around_them_are_not_joined(images):
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
            self.second = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            between = self.first(x)
            return self.head((self.second(between) + between).mean((2, 3)))

    model = Skipping()
    model.first.requires_grad_(False)
    model.second.requires_grad_(False)
    expected = gradients(copy.deepcopy(model), images)
    prefix = accelerate_frozen_prefix(model, images, precision="fp32")
    assert [segment.names for segment in prefix.segments] == [("first",), ("second",)]
    got = gradients(model, images)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


# -- changes later ---------------------------------------------------------------------------------

CHANGES = {
    "weights": (lambda m: nn.init.ones_(m.conv1.weight), "weights have changed"),
    "mode": (lambda m: m.bn1.train(), "between train and eval"),
    "gradients": (lambda m: m.conv1.requires_grad_(True), "require a gradient now"),
}


@pytest.mark.slow_cases("mode")
@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_has_changed_runs_as_written(name, network, images):
    change, reason = CHANGES[name]
    prefix = accelerate_frozen_prefix(network, images, threads=1)
    change(network)
    expected = gradients(copy.deepcopy(network), images)
    got = gradients(network, images)
    assert reason in prefix.report()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_refresh_takes_the_weights_of_now(network, images):
    prefix = accelerate_frozen_prefix(network, images, threads=1)
    nn.init.uniform_(network.conv1.weight, -0.3, 0.3)
    prefix.refresh()
    expected = gradients(copy.deepcopy(network), images)
    assert distance(gradients(network, images), expected) < 0.05
    assert prefix.segments[0].reason is None


# -- int8 and metrics ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("figures", "method"), [((1.0, 0.995), "int8"), ((1.0, 0.9), "bf16")])
def test_int8_is_kept_if_the_metric_allows(network, images, figures, method):
    left = list(figures)
    prefix = accelerate_frozen_prefix(
        network,
        images,
        precision="int8",
        calib_data=[images],
        metric=lambda model: left.pop(0),
        threads=1,
    )
    assert prefix.precision == method
    assert "metric 1 plain" in prefix.report()


WRONG = {
    "model": (lambda m, x: accelerate_frozen_prefix(len, x), "torch.nn.Module"),
    "precision": (
        lambda m, x: accelerate_frozen_prefix(m, x, precision="int4"),
        "precision should",
    ),
    "calibration": (lambda m, x: accelerate_frozen_prefix(m, x, precision="int8"), "calib_data"),
    "metric": (lambda m, x: accelerate_frozen_prefix(m, x, metric=len), "whether int8"),
    "method": (lambda m, x: accelerate_frozen_prefix(m, x, method="magic"), "no method 'magic'"),
    "sample": (lambda m, x: accelerate_frozen_prefix(m, x[:, :2]), "does not run on the sample"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name, network, images):
    call, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        call(network, images)


# -- cached features -------------------------------------------------------------------------------


def test_a_subset_is_not_taken_for_another(classifier, images, tmp_path):
    prefix = accelerate_frozen_prefix(classifier, images, precision="fp32")
    data = Counting()
    one = prefix.cached(Subset(data, [0, 1, 2]), tmp_path)
    other = prefix.cached(Subset(data, [0, 3, 2]), tmp_path)
    assert not other.reused
    assert not torch.equal(one[1][0], other[1][0])


class Counting(Dataset):
    """Images that count how often they are asked for."""

    transform = None

    def __init__(self, deterministic=True):
        torch.manual_seed(5)
        self.images, self.deterministic, self.asked = torch.rand(10, 3, 32, 32), deterministic, 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.asked += 1
        return self.images[index], index % 2


def test_features_are_computed_once_and_give_the_same_gradients(classifier, images, tmp_path):
    prefix = accelerate_frozen_prefix(classifier, images, precision="fp32")
    data = Counting()
    features = prefix.cached(data, tmp_path, batch_size=4)
    assert not features.reused
    batch, labels = next(iter(DataLoader(features, batch_size=4)))
    assert batch.shape == (4, 8)
    assert labels.tolist() == [0, 1, 0, 1]
    expected = gradients(classifier, data.images[:4])
    got = gradients(classifier, batch)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)
    asked = data.asked
    again = prefix.cached(data, tmp_path)
    assert again.reused
    assert data.asked <= asked + 8  # some are compared
    assert torch.equal(pickle.loads(pickle.dumps(again))[7][0], features[7][0])


def test_features_of_other_weights_are_computed_anew(classifier, images, tmp_path):
    prefix = accelerate_frozen_prefix(classifier, images, precision="fp32")
    prefix.cached(Counting(), tmp_path)
    nn.init.ones_(classifier[0][0].weight)
    prefix.refresh()
    assert not prefix.cached(Counting(), tmp_path).reused


def test_features_of_other_rows_or_of_another_activation_are_computed_anew(
    classifier, images, tmp_path
):
    prefix = accelerate_frozen_prefix(classifier, images, precision="fp32")
    rows = torch.rand(200, 3, 32, 32)
    prefix.cached(TensorDataset(rows, torch.arange(200)), tmp_path)
    assert prefix.cached(TensorDataset(rows.clone(), torch.arange(200)), tmp_path).reused
    rows[101] += 1  # between those that are compared
    assert not prefix.cached(TensorDataset(rows, torch.arange(200)), tmp_path).reused
    code = {code_of([nn.Sequential(nn.Linear(2, 2), each)]) for each in (nn.ReLU(), nn.GELU())}
    assert len(code) == 2  # of equal weights


def test_random_samples_cannot_be_cached(classifier, images, tmp_path):
    prefix = accelerate_frozen_prefix(classifier, images, precision="fp32")
    with refused("unsupported"):
        prefix.cached(Counting(deterministic=False), tmp_path)


def test_a_model_that_does_not_begin_frozen_has_no_features(images, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(2700, 2))
    prefix = accelerate_frozen_prefix(model, images)
    with refused("model-unsupported"):
        prefix.cached(Counting(), tmp_path)


# -- Lightning -------------------------------------------------------------------------------------


class Classifier(ImageClassifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), 0.1)


@pytest.mark.slow_cases("bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_callback_accelerates_a_fit_and_leaves_no_trace(images, tmp_path, precision):
    import pytorch_lightning as pl

    def fitted(*callbacks):
        torch.manual_seed(0)
        model = Classifier(trunk(), 2, head=nn.Linear(8, 2))
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=list(callbacks),
        )
        data = TensorDataset(images, torch.tensor([0, 1, 0, 1]))
        trainer.fit(model, DataLoader(data, batch_size=2))
        return model

    callback = FrozenPrefixCallback(precision=precision, threads=1)
    fast, plain = fitted(callback), fitted()
    assert len(callback.prefix.segments) == 1
    assert not any("forward" in vars(module) for module in fast.modules())
    tolerance = 0 if precision == "fp32" else 0.02
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(
            fast.state_dict()[name], value, atol=tolerance, rtol=tolerance, msg=name
        )


@needs_bf16
def test_nanos_trainer_takes_the_callback(images, tmp_path):
    from bigdl.nano.pytorch import Trainer

    torch.manual_seed(0)
    model = Classifier(trunk(), 2, head=nn.Linear(8, 2))
    callback = FrozenPrefixCallback(precision="bf16", threads=1)  # by default the fastest
    before = model.head.weight.clone()
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    )
    trainer.fit(model, DataLoader(TensorDataset(images, torch.arange(4) % 2), batch_size=2))
    assert [segment.reason for segment in callback.prefix.segments] == [None]
    assert callback.prefix.segments[0].method == "openvino_bf16"
    assert not torch.equal(model.head.weight, before)
