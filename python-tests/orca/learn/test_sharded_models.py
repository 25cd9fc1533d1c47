"""Models that are divided among the workers: they train as whole ones, and resume on any number."""

import json
import tempfile
from types import SimpleNamespace

import faults
import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback, MainCallback
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.sharding import divide_model
from bigdl.training.sharded_model import MemoryNeed, free_memory

WIDTH = 6
CLOSE = 1e-6


class FeedForward(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH))
        self.recomputes = recomputes

    def forward(self, x):
        if self.recomputes and self.training:
            return x + checkpoint(self._change, x, use_reentrant=False)
        return x + self._change(x)

    def _change(self, x):
        return self.inner(self.norm(x))


class Words(nn.Module):
    """Tied, frozen and scalar weights, a buffer without an entry in the state, recomputation."""

    def __init__(self, recomputes=True):
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.register_buffer("steps", torch.linspace(0, 1, WIDTH), persistent=False)
        self.layers = nn.ModuleList(FeedForward(recomputes) for _ in range(3))
        self.layers[1].inner[0].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.out = nn.Linear(WIDTH, 13)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.steps
        for layer in self.layers:
            x = layer(x)
        return self.out(x).mean(1) * self.scale


class Masked(Words):
    """Words whose backward pass reads a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(13))

    def forward(self, ids):
        return super().forward(ids) * self.mask


def words(config):
    return Words()


def adam(model, config):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def estimator(folder, workers, shard, **options):
    options = {"model": words, "optimizer": adam, "loss": nn.CrossEntropyLoss(), **options}
    return Estimator.from_torch(
        backend="local", workers_per_node=workers, model_dir=str(folder), shard=shard, **options
    )


def rows(count=37):
    rng = np.random.default_rng(0)
    return rng.integers(0, 13, (count, 4)), rng.integers(0, 13, count)


def weights_of(trained):
    return {name: value.clone() for name, value in trained.get_model().state_dict().items()}


def assert_close(weights, expected, close=CLOSE):
    assert set(weights) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=close)


def train(folder, workers, shard, data, *, clip=None, **options):
    keywords = {"batch_size": 16, "epochs": 2, "seed": 3}
    if accumulated := options.pop("accumulate_grad_batches", None):
        keywords["accumulate_grad_batches"] = accumulated
    trained = estimator(folder, workers, shard, **options)
    if clip is not None:
        trained.set_l2_norm_gradient_clipping(clip)
    history = trained.fit(data, validation_data=data, **keywords)
    return trained, history


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights and validation losses of a fit with the whole model in each of two workers."""
    trained, history = train(tmp_path_factory.mktemp("whole"), 2, None, rows())
    return weights_of(trained), [entry["val_loss"] for entry in history]


@pytest.mark.parametrize("shard", ["full", "optimizer", "auto"])
def test_a_divided_model_trains_as_a_whole_one(tmp_path, whole, shard):
    trained, history = train(tmp_path, 2, shard, rows())
    assert_close(weights_of(trained), whole[0])
    assert [entry["val_loss"] for entry in history] == pytest.approx(whole[1], abs=1e-6)
    metrics = trained.evaluate(rows(), batch_size=5)
    assert metrics["val_loss"] == pytest.approx(whole[1][-1], abs=1e-6)


CASES = {
    "accumulated and clipped": {"accumulate_grad_batches": 2, "clip": 0.1},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
    "ignored labels": {"loss": nn.CrossEntropyLoss(ignore_index=3)},
    "bf16": {"precision": "bf16"},  # whose gradients are rounded in another order
}


@pytest.mark.parametrize(
    "name", [next(iter(CASES)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*CASES][1:])]
)
def test_losses_and_gradients_are_those_of_a_whole_model(tmp_path, name):
    case = dict(CASES[name])
    expected, _ = train(tmp_path / "whole", 2, None, rows(), **case)
    trained, _ = train(tmp_path / "divided", 2, "full", rows(), **case)
    close = 5e-3 if name == "bf16" else CLOSE
    assert_close(weights_of(trained), weights_of(expected), close)


@pytest.mark.parametrize("model", [Words, Masked])
def test_a_worker_without_rows_takes_part(tmp_path, model):
    data, parts = rows(1), {"model": lambda config: model()}
    expected, _ = train(tmp_path / "whole", 2, None, data, **parts)
    trained, _ = train(tmp_path / "divided", 2, "full", data, **parts)
    assert_close(weights_of(trained), weights_of(expected))


@pytest.mark.slow
def test_instances_of_model_and_optimizer(tmp_path):
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer}
    expected, _ = train(tmp_path / "whole", 2, None, rows(), **parts)
    trained, _ = train(tmp_path / "divided", 2, "full", rows(), **parts)
    assert_close(weights_of(trained), weights_of(expected))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Parquet files, whose rows any number of workers reads in one order."""
    import pandas as pd

    x, y = rows(64)
    folder = tmp_path_factory.mktemp("table")
    pd.DataFrame({"x": list(x), "y": y}).to_parquet(folder / "part.parquet")
    return str(folder)


COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 16}


@pytest.fixture(scope="module")
def alone(table, tmp_path_factory):
    """Weights after three epochs of a single worker with a whole model."""
    trained = estimator(tmp_path_factory.mktemp("alone"), 1, None)
    trained.fit(table, epochs=3, seed=1, **COLUMNS)
    return weights_of(trained)


def test_a_fit_resumes_on_other_numbers_of_workers(table, alone, tmp_path):
    for epochs, workers in enumerate([2, 3, 1], start=1):
        trained = estimator(tmp_path, workers, "full")
        trained.fit(table, epochs=epochs, seed=1, resume="auto", **COLUMNS)
    assert_close(weights_of(trained), alone)


@pytest.mark.slow
def test_a_whole_model_continues_a_divided_one_and_the_reverse(table, alone, tmp_path):
    for epochs, (workers, shard) in enumerate([(2, "full"), (2, None), (3, "optimizer")], start=1):
        trained = estimator(tmp_path, workers, shard)
        trained.fit(table, epochs=epochs, seed=1, resume="auto", **COLUMNS)
    assert_close(weights_of(trained), alone)


def test_the_state_is_that_of_a_whole_model(table, tmp_path):
    expected, divided = (estimator(tmp_path / str(s), 2, s) for s in (None, "full"))
    for each in (expected, divided):
        each.fit(table, epochs=1, seed=1, **COLUMNS)
    states = [each.get_state_dict() for each in (divided, expected)]
    assert_close(states[0]["models"][0], states[1]["models"][0])
    of_optimizers = [state["optimizers"][0]["state"] for state in states]
    assert set(of_optimizers[0]) == set(of_optimizers[1])
    for number, entries in of_optimizers[1].items():
        for key, value in entries.items():
            close = {"rtol": 0, "atol": CLOSE}
            torch.testing.assert_close(of_optimizers[0][number][key], value, **close)

    ids = rows()[0]
    np.testing.assert_allclose(divided.predict(ids), expected.predict(ids), atol=1e-5)
    divided.save(str(tmp_path / "weights.pt"))
    loaded = estimator(tmp_path / "other", 1, None)
    loaded.load(str(tmp_path / "weights.pt"))
    assert_close(weights_of(loaded), weights_of(divided))


@pytest.mark.slow
def test_weights_of_another_dtype_are_converted(table, tmp_path):
    def half(config):
        return Words().to(torch.bfloat16)

    trained = estimator(tmp_path, 2, "full", model=half)
    trained.fit(table, epochs=1, seed=1, **COLUMNS)
    expected = {name: value.float() for name, value in weights_of(trained).items()}
    loaded = estimator(tmp_path / "other", 2, "full")
    loaded.load_orca_checkpoint(str(tmp_path))
    losses = [each.evaluate(rows(), batch_size=8)["val_loss"] for each in (trained, loaded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)

    resumed = estimator(tmp_path, 2, "full")
    resumed.fit(table, epochs=2, seed=1, resume="auto", **COLUMNS)
    assert_close(weights_of(resumed), expected, 0.2)
    for entries in resumed.get_state_dict()["optimizers"][0]["state"].values():
        assert {value.dtype for value in entries.values()} == {torch.float32}


def test_the_extra_state_of_a_module_is_loaded(table, tmp_path):
    class Counted(Words):
        passes = 0

        def forward(self, ids):
            self.passes += self.training
            return super().forward(ids)

        def get_extra_state(self):
            return {"passes": self.passes}

        def set_extra_state(self, state):
            self.passes = state["passes"]

    for epochs in (1, 2):
        trained = estimator(tmp_path, 2, "full", model=lambda config: Counted())
        trained.fit(table, epochs=epochs, seed=1, resume="auto", **COLUMNS)
    assert trained.get_model().passes == 8


def test_tasks_read_the_weights_of_large_models_from_the_checkpoint(table, tmp_path, monkeypatch):
    trained = estimator(tmp_path, 2, "full")
    trained.fit(table, epochs=1, seed=1, **COLUMNS)
    expected = trained.predict(rows()[0])
    monkeypatch.setattr("bigdl.training.slices.BROADCAST", 0)
    again = estimator(tmp_path, 2, "full")
    again.load_orca_checkpoint(str(tmp_path))
    np.testing.assert_array_equal(again.predict(rows()[0]), expected)


def test_a_killed_worker_restarts_the_fit_from_its_checkpoint(table, alone, tmp_path):
    kill = faults.Kill(tmp_path / "killed", 1, 10)
    trained = estimator(tmp_path / "models", 2, "full")
    trained.fit(table, epochs=3, seed=1, callbacks=[kill], **COLUMNS)
    assert kill.marker.exists()
    assert_close(weights_of(trained), alone)


@pytest.mark.slow
def test_ten_kills_change_nothing(table, alone, tmp_path):
    kills = [faults.Kill(tmp_path / f"killed-{n}", n % 3, n + 1) for n in range(10)]
    trained = estimator(tmp_path / "models", 3, "full")
    trained.fit(table, epochs=3, seed=1, callbacks=kills, max_failures=10, **COLUMNS)
    assert all(kill.marker.exists() for kill in kills)
    assert_close(weights_of(trained), alone)


# -- creation ------------------------------------------------------------------------------------


def test_only_weights_and_buffers_are_created_without_values(tmp_path):
    class Shifted(Words):
        def __init__(self):
            super().__init__()
            self.shifts = [torch.linspace(0, 1, 13)]  # neither a parameter nor a buffer

        def forward(self, ids):
            return super().forward(ids) + self.shifts[0]

    parts = {
        "model": lambda config: Shifted(),
        "loss": lambda config: nn.CrossEntropyLoss(weight=torch.linspace(1, 2, 13)),
        "initialization_hook": lambda: tempfile.mkstemp(dir=tmp_path / "calls"),
    }
    (tmp_path / "calls").mkdir()
    expected, _ = train(tmp_path / "whole", 2, None, rows(), **parts)
    calls = len([*(tmp_path / "calls").iterdir()])
    trained, _ = train(tmp_path / "divided", 2, "full", rows(), **parts)
    assert len([*(tmp_path / "calls").iterdir()]) == 2 * calls
    assert_close(weights_of(trained), weights_of(expected))


def test_a_single_worker_moves_model_and_loss_to_its_device():
    loss = nn.CrossEntropyLoss(weight=torch.ones(13))
    parts = ModelParts(model=Words(), loss=loss, shard="full")
    built, device = parts.build(training=False), torch.device("meta")  # as a GPU, without one
    alone = SimpleNamespace(world_size=1)
    assert divide_model(built, parts, alone, device) is None
    tensors = [*built.model.parameters(), *built.model.buffers(), built.criterion.weight]
    assert all(tensor.is_meta for tensor in tensors)


def test_evaluate_divides_the_model_before_any_fit(tmp_path):
    class Look(Callback):
        def before_val_epoch(self, runner):
            is_divided = isinstance(runner.model, FSDPModule)
            (tmp_path / f"divided-{runner.rank}").write_text(str(is_divided))

    whole, divided = (estimator(tmp_path / str(shard), 2, shard) for shard in (None, "full"))
    whole.load_state_dict(weights := Words().state_dict())
    divided.load_state_dict(weights)
    expected = whole.evaluate(rows(), batch_size=8)
    metrics = divided.evaluate(rows(), batch_size=8, callbacks=[Look()])
    assert metrics["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-6)
    assert [(tmp_path / f"divided-{rank}").read_text() for rank in range(2)] == ["True", "True"]


# -- what is not supported -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["bigdl", "horovod"])
def test_backends_without_torch_groups_refuse(backend, tmp_path, monkeypatch):
    monkeypatch.setattr("bigdl.orca.learn.backends.require_horovod", lambda: None)
    with refused("argument-conflict", f"backend='{backend}'", "shard='full'"):
        Estimator.from_torch(model=words, backend=backend, shard="full", model_dir=str(tmp_path))


def test_values_and_folder_are_checked():
    with refused("argument-value", "'half'"):
        Estimator.from_torch(model=words, backend="local", shard="half", model_dir="models")
    with refused("argument-missing", "model_dir"):
        Estimator.from_torch(model=words, backend="local", shard="full")


@pytest.mark.parametrize(
    "options", [{"recovery": "in_place"}, {"local_steps": 2}, {"exact": "bits"}]
)
def test_arguments_of_fit_that_need_whole_models(options, tmp_path):
    with refused("argument-conflict", "shard=", *options):
        estimator(tmp_path, 2, "full").fit(rows(), **options)


class AddsWholeTensors(torch.optim.Optimizer):
    """Optimizer that changes weights by tensors of their shape, as some of other libraries do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim:
                parameter.add_(torch.ones(parameter.shape))


class KeepsMeans(AddsWholeTensors):
    """Optimizer whose state has one value for each row of a weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim > 1 and parameter.grad is not None:
                self.state[parameter]["mean"] = parameter.grad.mean(dim=1)


OPTIMIZERS = {
    "SGD(fused=True)": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "AddsWholeTensors": AddsWholeTensors,
    "KeepsMeans": KeepsMeans,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_need_whole_weights_are_named(name, tmp_path):
    make = OPTIMIZERS[name]
    with refused("optimizer-unsupported", name):
        train(tmp_path, 2, "full", rows(), optimizer=lambda m, c: make(m.parameters()))


def test_models_that_cannot_be_divided_are_named(tmp_path):
    def sparse(config):
        return nn.Sequential(nn.EmbeddingBag(13, 13, sparse=True))

    with refused("model-unsupported", "sparse=True"):
        train(tmp_path, 2, "full", rows(), model=sparse)


def test_a_fit_that_does_not_fit_is_named_with_its_parts():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))  # 34 MB
    need = MemoryNeed.of(model, "full", 2, 2.0)
    need.check(200 << 20, "host", "use more workers")
    with refused("resource-limit", "optimizer state 33.6 MB", "on host", "use more workers"):
        need.check(50 << 20, "host", "use more workers")


@pytest.mark.slow
def test_the_need_of_a_divided_hugging_face_model_is_that_of_its_layers(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "vocab_size": 13}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}

    def llama(config):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))

    class Need(Callback):
        def before_run(self, runner):
            need = vars(MemoryNeed.of(runner.model, "full", 2))
            (tmp_path / f"need-{runner.rank}").write_text(json.dumps(need))

    need = vars(MemoryNeed.of(llama({}), "full", 2))
    assert need["gathered"] < need["weights"] * 2 * 0.7
    ids = {"x": rows(8)[0], "y": rows(8)[0]}
    estimator(tmp_path, 2, "full", model=llama, loss=None).fit(
        ids, epochs=1, batch_size=4, callbacks=[Need()]
    )
    for rank in range(2):
        assert json.loads((tmp_path / f"need-{rank}").read_text()) == need


def test_the_free_memory_of_a_gpu_is_that_of_the_gpu(monkeypatch):
    gpu = torch.device("cuda", 1)
    free = {gpu: 50}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 99))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15)
    assert free_memory(gpu, 2) == 55
    assert free_memory(torch.device("cpu"), 2) > 1 << 20


@pytest.mark.slow
def test_a_model_with_a_built_in_loss_in_the_mode_that_keeps_gathered_weights(tmp_path):
    class WithLoss(Words):
        def forward(self, ids, labels=None):
            logits = super().forward(ids)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    parts = {"model": lambda config: WithLoss(), "loss": None}
    expected, _ = train(tmp_path / "whole", 2, None, rows(33), **parts)
    trained, _ = train(tmp_path / "divided", 2, "optimizer", rows(33), **parts)
    assert_close(weights_of(trained), weights_of(expected))


def test_a_callback_does_not_write_a_part_of_the_weights(tmp_path):
    class Save(Callback):
        def after_train_epoch(self, runner):
            runner.save_checkpoint(str(tmp_path / "part"))

    with refused("unsupported", "shard="):
        estimator(tmp_path, 2, "full").fit(rows(), callbacks=[Save()])


def test_a_custom_backward_pass_is_named(tmp_path):
    class Backward(MainCallback):
        def on_iter_backward(self, runner):
            runner.loss.backward()

    with refused("argument-conflict", "on_iter_backward"):
        estimator(tmp_path, 2, "full").fit(rows(), callbacks=[Backward()])


def test_weights_of_another_model_are_named(table, tmp_path):
    trained = estimator(tmp_path, 2, "full")
    trained.fit(table, epochs=1, seed=1, **COLUMNS)
    other = estimator(tmp_path, 2, "full", model=lambda config: nn.Linear(4, 13))
    with refused("model-mismatch", "embed.weight"):
        other.load_orca_checkpoint(str(tmp_path))


def test_shapes_are_compared_without_creating_the_weights(table, tmp_path):
    trained = estimator(tmp_path, 2, "full")
    trained.fit(table, epochs=1, seed=1, **COLUMNS)
    devices = []

    def other_words(config):
        model = Words()
        model.embed = nn.Embedding(7, WIDTH)
        model.out = nn.Linear(WIDTH, 7)
        model.out.weight = model.embed.weight
        devices.append(model.out.bias.device.type)
        return model

    other = estimator(tmp_path, 2, "full", model=other_words)
    with refused("model-mismatch", "embed.weight", "(13, 6)", "(7, 6)"):
        other.load_orca_checkpoint(str(tmp_path))
    assert devices == ["meta"]
