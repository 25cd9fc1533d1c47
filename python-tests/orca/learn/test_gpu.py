"""Training, evaluation and prediction on a GPU: equal to the CPU's, and nothing of them is left."""

import contextlib
import copy
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import types

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from bigdl.common.errors import WorkerError
from bigdl.orca.engine import LocalEngine
from bigdl.orca.learn.metrics import AUC, Accuracy
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.device_batches import DeviceBatches
from bigdl.orca.learn.trigger import EveryEpoch
from bigdl.orca.torch import GrowingEmbedding, RowwiseAdagrad, ShardedEmbedding
from bigdl.runtime.shards.batches import BatchPlan, permutation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no GPU of CUDA is seen; pytest -m gpu shows tests those that there are",
    ),
]
GPU = "cuda"
ROWS = 203


def data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 6)).astype("float32")
    return {"x": x, "y": (x[:, :3].sum(1) > 0).astype("float32")[:, None]}


class Net(nn.Module):
    """Refuses to compute anywhere but on a GPU, if it is told so."""

    def __init__(self, dropout=0.0, on_gpu=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 1)
        )
        self.on_gpu = on_gpu

    def forward(self, x):
        if self.on_gpu:
            assert x.device.type == GPU, x.device
        return self.layers(x)


def sgd(model, config):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model, config):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def estimator(model, workers=1, optimizer=sgd, backend="local", **options):
    options.setdefault("loss", nn.BCEWithLogitsLoss())
    return Estimator.from_torch(
        model=model, optimizer=optimizer, backend=backend, workers_per_node=workers, **options
    )


def trained(model, data, workers=1, epochs=3, **options):
    made = estimator(model, workers, **options)
    made.fit(data, epochs=epochs, batch_size=32, feature_cols=["x"], label_cols=["y"], seed=1)
    return made


def plain(data, epochs):
    """What PyTorch makes of all the rows at a time on the CPU."""
    model = Net(on_gpu=False)
    optimizer = sgd(model, None)
    x, y = torch.tensor(data["x"]), torch.tensor(data["y"])
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def difference(one, other):
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in other)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left():
    yield
    LocalEngine().shutdown()


@pytest.fixture(params=["local", "ray", "spark"])
def backend(request):
    """A backend, and what it needs; Ray and Spark where they are installed."""
    if request.param == "ray":
        pytest.importorskip("ray")
        import ray_models

        ray_models.active_ray()
    elif request.param == "spark":
        pytest.importorskip("pyspark")
        request.getfixturevalue("orca_spark")
    return request.param


def test_a_fit_gives_the_weights_of_plain_pytorch_on_the_cpu(backend):
    rows = data()
    made = estimator(Net(), backend=backend)
    # batches of all the rows: their order is of no account
    made.fit(rows, epochs=10, batch_size=ROWS, feature_cols=["x"], label_cols=["y"])
    weights = made.get_model().state_dict()
    assert {value.device.type for value in weights.values()} == {"cpu"}
    assert difference(weights, plain(rows, 10)) <= 1e-4


def test_two_workers_on_one_gpu_equal_one(backend):
    class Still(Net):  # batch statistics are each worker's own
        def __init__(self):
            super().__init__()
            self.layers[1] = nn.Identity()

    rows = {key: value[:192] for key, value in data().items()}
    one, two = (estimator(Still(), workers, backend=backend) for workers in (1, 2))
    for each in (one, two):
        each.fit(rows, epochs=5, batch_size=192, feature_cols=["x"], label_cols=["y"])
    assert difference(two.get_model().state_dict(), one.get_model().state_dict()) <= 1e-5


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_fit_equals_one_that_was_never_interrupted(tmp_path, workers):
    def run(name, *epochs):
        for start, more in enumerate(epochs):
            made = estimator(Net(0.3), workers, adam, model_dir=str(tmp_path / name))
            if start:
                made.load_orca_checkpoint(str(tmp_path / name))
            made.fit(
                data(),
                epochs=more,
                batch_size=32,
                feature_cols=["x"],
                label_cols=["y"],
                seed=1,
                checkpoint_trigger=EveryEpoch(),
            )
        return made.get_model().state_dict()

    straight, resumed = run("once", 4), run("twice", 2, 2)
    assert difference(resumed, straight) == 0.0


def test_evaluate_and_predict_equal_those_of_the_cpu(backend):
    rows = data()
    made = trained(Net(), rows, backend=backend, metrics=[Accuracy(), AUC()])
    model = Net(on_gpu=False)
    model.load_state_dict(made.get_model().state_dict())
    model.eval()
    with torch.no_grad():
        expected = model(torch.tensor(rows["x"])).numpy()
    found = made.predict(rows, batch_size=50, feature_cols=["x"])
    np.testing.assert_allclose(np.reshape(found, -1), expected[:, 0], atol=2e-3)
    figures = made.evaluate(rows, batch_size=50, feature_cols=["x"], label_cols=["y"])
    assert figures["Accuracy"] == pytest.approx(((expected > 0) == rows["y"]).mean(), abs=0.01)
    assert figures["AUC"] > 0.9


def test_predictions_of_a_frame_keep_its_rows():
    frame = pd.DataFrame({"a": np.arange(90, dtype="float32"), "name": [str(i) for i in range(90)]})

    class OfColumn(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, a):
            assert a.is_cuda
            return a * self.scale

    made = estimator(OfColumn(), 2, loss=nn.MSELoss())
    found = made.predict(frame, batch_size=7, feature_cols=["a"])
    assert list(found["name"]) == list(frame["name"])
    np.testing.assert_allclose(found["prediction"], frame["a"] * 2)


def test_precision_bf16(tmp_path):
    seen = tmp_path / "dtype"

    class Mixed(Net):
        def forward(self, x):
            out = super().forward(x)
            seen.write_text(str(out.dtype))
            return out

    made = trained(Mixed(), data(), precision="bf16", epochs=5)
    same = trained(Net(), data(), epochs=5).get_model().state_dict()
    assert seen.read_text() == "torch.bfloat16"
    assert {v.dtype for v in made.get_model().parameters()} == {torch.float32}
    assert difference(made.get_model().state_dict(), same) < 0.2


def test_a_model_and_an_optimizer_that_are_on_the_gpu_already():
    model = Net().to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy(model.state_dict())
    made = trained(model, data(), optimizer=optimizer)
    expected = trained(Net(), data()).get_model().state_dict()
    found = {key: value.cpu() for key, value in made.get_model().state_dict().items()}
    assert difference(found, expected) <= 1e-5
    assert difference(model.state_dict(), before) == 0.0


def test_weights_of_classes_and_several_inputs_in_dicts():
    class OfDict(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
            self.last = nn.Linear(10, 3)

        def forward(self, x, i):
            assert x.is_cuda
            assert i.is_cuda
            return self.last(torch.cat([x, self.table(i)], 1))

    rng = np.random.default_rng(0)
    rows = {
        "x": rng.normal(size=(96, 6)).astype("float32"),
        "i": rng.integers(0, 50, (96, 3)),
        "y": rng.integers(0, 3, 96),
    }
    results = []
    for workers in (1, 2):
        made = estimator(
            OfDict(),
            workers,
            lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        )
        made.fit(rows, epochs=3, batch_size=96, feature_cols=["x", "i"], label_cols=["y"])
        results.append(made.get_model().state_dict())
    assert difference(*results) <= 1e-5


class Tables(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.table = ShardedEmbedding(60, 8) if kind == "sharded" else GrowingEmbedding(8)
        self.last = nn.Linear(8, 1)

    def forward(self, i):
        assert i.is_cuda
        return self.last(self.table(i).sum(1))


@pytest.mark.parametrize("kind", ["sharded", "growing"])
def test_tables_in_the_memory_of_workers_that_compute_on_a_gpu(tmp_path, kind):
    rng = np.random.default_rng(0)
    rows = {"i": rng.integers(0, 60, (128, 4)), "y": rng.random((128, 1)).astype("float32")}
    results = []
    for workers in (1, 2):
        made = estimator(
            Tables(kind),
            workers,
            lambda model, config: RowwiseAdagrad(model.parameters(), lr=0.1),
            loss=nn.MSELoss(),
            model_dir=str(tmp_path / f"{kind}{workers}"),
        )
        made.fit(rows, epochs=3, batch_size=128, feature_cols=["i"], label_cols=["y"])
        results.append(np.reshape(made.predict(rows, feature_cols=["i"]), -1))
        figures = made.evaluate(rows, feature_cols=["i"], label_cols=["y"])
        assert figures["val_loss"] == pytest.approx(
            float(np.square(results[-1] - rows["y"][:, 0]).mean()), rel=1e-3
        )
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)


@pytest.mark.parametrize("limit", ["norm", "value"])
def test_gradients_of_tables_and_of_the_gpu_are_limited_together(tmp_path, limit):
    rng = np.random.default_rng(0)
    rows = {"i": rng.integers(0, 60, (128, 4)), "y": rng.random((128, 1)).astype("float32") * 9}
    results = []
    for workers in (1, 2):
        made = estimator(
            Tables("sharded"),
            workers,
            lambda model, config: RowwiseAdagrad(model.parameters(), lr=0.1),
            loss=nn.MSELoss(),
            model_dir=str(tmp_path / str(workers)),
        )
        if limit == "norm":
            made.set_l2_norm_gradient_clipping(0.5)
        else:
            made.set_constant_gradient_clipping(-0.01, 0.01)
        made.fit(rows, epochs=3, batch_size=128, feature_cols=["i"], label_cols=["y"])
        results.append(np.reshape(made.predict(rows, feature_cols=["i"]), -1))
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)


class Source:
    """Rows in memory, as a shard has them."""

    can_read_ahead = True

    def __init__(self, rows):
        self.rows, self.threads = rows, set()

    def batch(self, start, stop, order):
        self.threads.add(threading.current_thread().name)
        index = torch.from_numpy(order[start:stop])
        return [self.rows[index], {"labels": self.rows[index, :1]}]


@pytest.mark.parametrize("width", [10, 20_000])
def test_batches_that_are_read_ahead_are_those_that_are_asked_for(width):
    """Of few bytes they are not; where an epoch starts in its middle or ends, none is wrong."""
    rows, exit_stack = torch.randn(203, width), contextlib.ExitStack()
    source, plan = Source(rows), BatchPlan([203], 32)
    worker = types.SimpleNamespace(rank=0, at_exit=exit_stack.callback)
    with exit_stack:
        batches = DeviceBatches(source, torch.device(GPU, 0), worker)
        for epoch, first in ((1, 0), (2, 3), (3, 0)):
            order = permutation(203, 0, epoch, 0)
            for step in range(first, plan.steps):
                start, stop, _ = plan.batch(step, 0)
                found, labels = batches.get(step, start, stop, plan, order)
                busy = found.square().sum()  # on the stream that computes
                expected = rows[torch.from_numpy(order[start:stop])]
                assert torch.equal(found.cpu(), expected)
                assert torch.equal(labels["labels"].cpu(), expected[:, :1])
                assert float(busy) == pytest.approx(float(expected.square().sum()), rel=1e-4)
    assert len(source.threads) == (2 if width > 10 else 1)


def test_an_error_in_a_batch_that_is_read_ahead_is_that_of_its_step():
    class Broken(Source):
        def batch(self, start, stop, order):
            if start:
                raise OSError("the file is gone")
            return super().batch(start, stop, order)

    plan, order = BatchPlan([203], 32), np.arange(203)
    with contextlib.ExitStack() as exit_stack:
        worker = types.SimpleNamespace(rank=0, at_exit=exit_stack.callback)
        batches = DeviceBatches(Broken(torch.randn(203, 20_000)), torch.device(GPU, 0), worker)
        batches.get(0, 0, 32, plan, order)
        with pytest.raises(OSError, match="gone"):
            batches.get(1, 32, 64, plan, order)


def test_a_program_that_has_used_the_gpu_itself():
    torch.ones(3, device=GPU).sum().item()
    assert trained(Net(), data(), workers=2).get_model() is not None


def test_out_of_memory_is_one_sentence_and_the_next_fit_has_all_of_it():
    class Large(Net):
        def forward(self, x):
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
            return super().forward(x)

    with pytest.raises(WorkerError, match="out of memory"):
        trained(Large(), data())
    trained(Net(), data())


def test_a_saved_model_loads_where_there_is_no_gpu(tmp_path):
    made = trained(Net(), data())
    made.save(str(tmp_path / "model.pt"))
    program = """
        import sys, torch
        assert not torch.cuda.is_available()
        state = torch.load(sys.argv[1], weights_only=False)
        print("loaded")
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "model.pt")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "loaded" in ran.stdout, ran.stderr


def test_idle_workers_hold_no_memory_of_the_gpu():
    LocalEngine().shutdown()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    trained(Net(), data(), workers=2)
    LocalEngine().shutdown()
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is not installed")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.parametrize("gpus", [0, 1])
def test_trials_compute_on_the_gpu_that_they_reserve(gpus):
    import ray_models

    from bigdl.orca.automl import hp
    from bigdl.orca.automl.auto_estimator import AutoEstimator

    ray_models.active_ray()

    class OnReserved(Net):
        def forward(self, x):
            assert x.is_cuda == bool(gpus), x.device
            return super().forward(x)

    auto = AutoEstimator.from_torch(
        model_creator=lambda config: OnReserved(on_gpu=bool(gpus)),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=config["lr"]),
        loss=nn.BCEWithLogitsLoss(),
        resources_per_trial={"cpu": 1, "gpu": gpus},
    )
    rows = data()
    auto.fit(
        (rows["x"], rows["y"]),
        validation_data=(rows["x"], rows["y"]),
        search_space={"lr": hp.choice([0.01, 0.1]), "batch_size": 32},
        metric="mse",
        epochs=1,
        n_sampling=2,
    )
    assert auto.get_best_config()["lr"] in (0.01, 0.1)
