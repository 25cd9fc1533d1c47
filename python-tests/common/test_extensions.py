"""The extension types of CONTRIBUTING.md work with exactly the documented edits."""

import importlib
import inspect
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from refusals import refused

from bigdl.orca.data import feeds
from bigdl.orca.learn import backends
from bigdl.orca.learn.pytorch import Estimator
from bigdl.testing.feeds import FeedContract

REPOSITORY = Path(__file__).parents[2]
GUIDE = (REPOSITORY / "CONTRIBUTING.md").read_text()
X = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
Y = X.sum(1, keepdims=True)


def test_the_places_that_the_guide_names_exist():
    table = GUIDE.split("## How to add")[1].split("##")[0]
    paths = [name for name in re.findall(r"`([^`]+)`", table) if "/" in name and "<" not in name]
    assert len(paths) > 8
    for index in paths:
        roots = (REPOSITORY, REPOSITORY / "src" / "bigdl")
        assert any((root / index).exists() for root in roots), index


def fitted(data, backend="local", rate=0.1, workers=2, epochs=2, **options):
    """Return the weights of a linear model after two epochs."""

    def model(config):
        torch.manual_seed(0)
        return torch.nn.Linear(2, 1)

    est = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=rate),
        loss=torch.nn.MSELoss(),
        backend=backend,
        workers_per_node=workers,
    )
    est.fit(data, epochs=epochs, batch_size=8, seed=0, **options)
    return torch.cat([p.detach().flatten() for p in est.get_model().parameters()])


LINES = '''
import numpy as np

from bigdl.orca.data.feeds.in_memory import ArrayFeed


class Lines(str):
    """Numbers as text, a row in each line, the target last."""


class LinesFeed(ArrayFeed):
    kind = "Lines"

    def __init__(self, data, feature_cols, label_cols, config, *, name=None):
        rows = np.array([line.split() for line in data.splitlines()], "float64")
        super().__init__((rows[:, :-1], rows[:, -1]), config=config, name=name)

    def predict(self, predictor, cluster):  # without the target
        return ArrayFeed(self.data[0]).predict(predictor, cluster)
'''


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Install a module with a Feed for a custom input type."""
    offers = ["[bigdl.feeds]", "lines_of_text.Lines = lines_of_text:LinesFeed"]
    install(monkeypatch, tmp_path, "lines_of_text", LINES, *offers)
    yield importlib.import_module("lines_of_text")
    feeds.FEEDS.discard("lines_of_text.Lines")
    sys.modules.pop("lines_of_text", None)


class TestFeedOfAnotherPackage(FeedContract):
    @pytest.fixture(autouse=True)
    def _lines(self, lines):
        self.lines = lines

    def expected(self):
        return X, Y[:, 0]

    def data(self):
        rows = np.hstack([X, Y]).tolist()
        return self.lines.Lines("\n".join(" ".join(map(str, row)) for row in rows))


def test_the_feed_of_a_type_is_that_of_its_subclasses_and_the_only_one(lines):
    class Marked(lines.Lines):
        pass

    class Other(feeds.Feed):
        pass

    assert feeds.input_type_of(Marked("1 2")) == "Lines"
    with refused("argument-conflict", "LinesFeed"):
        feeds.register_feed(lines.Lines, Other)
    with refused("argument-type", "NoBackend"):
        feeds.register_feed(Marked, NoBackend)
    with refused("argument-type", "'Lines'"):
        feeds.register_feed("Lines", Other)


def test_a_gradient_sync():
    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

    class Doubled(TorchDistributedSync):
        def all_reduce_gradients(self, parameters, weight, may_be_sparse=()):
            super().all_reduce_gradients(parameters, 2 * weight, may_be_sparse)

    class DoubledBackend(backends.LocalBackend):
        def sync(self):
            return Doubled

    backends.register_backend("doubled", DoubledBackend)
    doubled = fitted((X, Y), "doubled", rate=0.05)
    backends.BACKENDS.discard("doubled")
    assert torch.allclose(doubled, fitted((X, Y), rate=0.1), atol=1e-6)


def test_a_trigger():
    from bigdl.orca.learn.trigger import Trigger

    class LowLoss(Trigger):
        def __call__(self, state):
            return state.loss is not None and state.epoch >= 2

    ended = fitted((X, Y), epochs=5, end_trigger=LowLoss())
    assert torch.equal(ended, fitted((X, Y), epochs=2))


@pytest.mark.slow
def test_an_engine():
    from bigdl.runtime.local import LocalEngine

    opened = []

    class Here(LocalEngine):
        def __init__(self, **options):
            super().__init__(in_process=True)

        def open(self, *arguments, **options):
            opened.append(self)
            return super().open(*arguments, **options)

    class HereBackend(backends.LocalBackend):
        def engine(self, min_workers=None, **options):
            return Here(**options)

    backends.register_backend("here", HereBackend)
    here = fitted((X, Y), "here", workers=1)
    backends.BACKENDS.discard("here")
    assert opened
    assert torch.equal(here, fitted((X, Y), workers=1))


def test_a_method_of_acceleration():
    from bigdl.nano.acceleration import find_method, register_method
    from bigdl.nano.acceleration.method import REGISTRY
    from bigdl.nano.pytorch import InferenceOptimizer

    method = register_method(replace(find_method("bf16"), name="bf16_of_mine", option="mine"))
    try:
        model = torch.nn.Linear(2, 1)
        made = InferenceOptimizer.build(model, "bf16_of_mine")
        assert torch.allclose(
            made(torch.from_numpy(X)).float(), model(torch.from_numpy(X)), atol=0.1
        )
        assert method in InferenceOptimizer.DEFAULT_INFERENCE_ACCELERATION_METHOD.values()
    finally:
        REGISTRY.discard("torch.bf16_of_mine")
    with refused("name-unknown", "'bf16_of_mine'"):
        InferenceOptimizer.build(model, "bf16_of_mine")


def test_a_precision(monkeypatch):
    from bigdl.nano.acceleration import PRECISIONS, Precision, find_method, register_method
    from bigdl.nano.acceleration.method import REGISTRY
    from bigdl.nano.pytorch import InferenceOptimizer

    monkeypatch.setitem(PRECISIONS, "bf12", Precision("bf12", 12, 0.2, 2.0**-4, "#000"))
    register_method(replace(find_method("bf16"), name="bf12_of_mine", precision="bf12"))
    try:
        made = InferenceOptimizer.quantize(torch.nn.Linear(2, 1), precision="bf12")
        assert made(torch.from_numpy(X)).shape == (len(X), 1)
    finally:
        REGISTRY.discard("torch.bf12_of_mine")


OPERATOR = """
from dataclasses import dataclass

import pyarrow.compute as pc

from bigdl.friesian.operators import Function, Operator, OutputColumn, register_operator


class Squared(Function):
    def array(self, values):
        return pc.multiply(values, values)

    def column(self, value):
        return value * value


@register_operator
@dataclass(frozen=True)
class Square(Operator):
    columns: list
    method = "square"

    def cells(self, before, state):
        return [OutputColumn((name,), name, before[name], Squared()) for name in self.columns]
"""


def install(monkeypatch, folder, name, code, *offers):
    """Install a package of one module that offers objects by entry points."""
    (folder / f"{name}.py").write_text(code)
    package = folder / f"{name}-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("\n".join(offers))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def square(tmp_path, monkeypatch):
    """Install and return the class of an operator from another package."""
    from bigdl.friesian.ops.operator import OPERATORS

    install(
        monkeypatch, tmp_path, "squares", OPERATOR, "[bigdl.operators]", "square = squares:Square"
    )
    yield OPERATORS["square"]
    OPERATORS.discard("square")
    sys.modules.pop("squares", None)


MINE = """
from dataclasses import dataclass

from bigdl.nano.acceleration import Method
from bigdl.orca.learn.backends import LocalBackend


def largest_error(preds, targets):
    return (preds - targets).abs().max()


class Backend(LocalBackend):
    pass


@dataclass(frozen=True)
class Same(Method):
    def build(self, source, options):
        return source.model


same = Same("same")
"""


def test_a_package_offers_metrics_backends_and_methods(tmp_path, monkeypatch):
    from bigdl.nano.acceleration.method import REGISTRY
    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.orca.learn.metrics.metric import METRICS

    offers = ["[bigdl.metrics]", "largest-error = mine:largest_error", "broken = missing:name"]
    offers += ["[bigdl.backends]", "of_mine = mine:Backend", "bad = mine:largest_error"]
    offers += ["[bigdl.methods]", "torch.same = mine:same"]
    install(monkeypatch, tmp_path, "mine", MINE, *offers)
    est = Estimator.from_torch(
        model=lambda config: torch.nn.Linear(2, 1),
        loss=torch.nn.MSELoss(),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        backend="of_mine",
        metrics=["largest_error"],
    )
    actual = est.evaluate((X, Y), batch_size=24)
    worst = np.abs(est.predict(X, batch_size=24).reshape(Y.shape) - Y).max()
    assert actual["largest_error"] == pytest.approx(worst, rel=1e-5)
    model = torch.nn.Linear(2, 1)
    assert "same" in InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD
    x = torch.from_numpy(X)
    assert torch.equal(InferenceOptimizer.build(model, "same")(x), model(x))
    with refused("argument-type", "'bad'"):
        Estimator.from_torch(model=lambda config: model, loss=torch.nn.MSELoss(), backend="bad")
    with refused("plugin-unusable", "mine", "'broken'"):
        Estimator.from_torch(
            model=lambda config: model, loss=torch.nn.MSELoss(), metrics=["broken"]
        ).evaluate((X, Y))
    monkeypatch.undo()
    METRICS.discard("largest_error")
    backends.BACKENDS.discard("of_mine")
    REGISTRY.discard("torch.same")


class NoBackend:
    pass


@pytest.mark.parametrize(
    ("register", "name", "value", "words"),
    [
        ("backend", "local", backends.SparkBackend, ("argument-conflict", "'local'")),
        ("backend", "mine", NoBackend, ("argument-type", "NoBackend", "'mine'")),
        ("backend", "mine", backends.Backend, ("argument-type", "abstract", "'mine'")),
        ("backend", 3, backends.LocalBackend, ("argument-type", "3")),
        ("metric", "F1_score", np.mean, ("argument-conflict", "'F1Score'")),
        ("metric", "mine", NoBackend, ("argument-type", "NoBackend", "'mine'")),
        ("metric", " ", np.mean, ("argument-type", "' '")),
    ],
)
def test_a_name_that_is_taken_or_a_wrong_class_is_refused(register, name, value, words):
    from bigdl.orca.learn.metrics import register_metric

    functions = {"backend": backends.register_backend, "metric": register_metric}
    with refused(*words):
        functions[register](name, value)


def test_a_method_with_a_taken_name_or_without_a_framework_is_refused():
    from bigdl.nano.acceleration import find_method, register_method
    from bigdl.nano.pytorch import InferenceOptimizer  # noqa: F401

    bf16 = find_method("bf16")
    assert register_method(bf16) is bf16
    with refused("argument-conflict", "'torch.bf16'"):
        register_method(replace(bf16, option="another"))
    with refused("argument-type", "'torch'", "'keras'"):
        register_method(bf16, "paddle")
    with refused("argument-type", "NoBackend"):
        register_method(NoBackend())


@pytest.mark.slow
def test_an_operator_of_another_package(orca_spark, square, tmp_path):
    from bigdl.friesian.feature import FeaturePipeline
    from bigdl.friesian.ops.operator import OPERATORS
    from bigdl.testing.operators import OperatorContract

    class OfSquare(OperatorContract):
        operators = (square(["x"]),)
        rows = pa.table({"x": [2.0, None, -3.0]})

    suite = OfSquare()
    for name in [name for name in dir(suite) if name.startswith("test_")]:
        (tmp_path / name).mkdir()
        test = getattr(suite, name)
        test(*[tmp_path / name] * len(inspect.signature(test).parameters))
    FeaturePipeline().with_operator(square(["x"])).save(str(tmp_path / "saved"))
    OPERATORS.discard("square")  # as in a program that has not imported the package
    loaded = FeaturePipeline.load(str(tmp_path / "saved"))
    assert "square" in loaded.explain()


def test_two_operators_have_no_common_method(square):
    from bigdl.friesian.operators import Operator, register_operator

    @dataclass(frozen=True)
    class Other(Operator):
        method = "square"

    with refused("argument-conflict", "squares.Square already has the name 'square'"):
        register_operator(Other)
    with refused("argument-type", "a dataclass that subclasses Operator"):
        register_operator(int)


@pytest.mark.parametrize("name", ["TPE", "Random", "NSGAII", "MOTPE"])
def test_a_sampler_is_a_line(name):
    pytest.importorskip("optuna")
    from bigdl.tuning.study import SamplerType, create_sampler

    assert SamplerType(name)
    assert type(create_sampler(name, seed=0)).__name__.endswith("Sampler")
