"""InferenceModel gives what the model gives, from several threads and from Spark."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.orca.inference import InferenceModel
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.torch import TorchLoss, TorchModel, TorchOptim

X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)


def module():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def expected(x=X):
    with torch.no_grad():
        return module().eval()(torch.from_numpy(x)).numpy()


def save_script(path):
    torch.jit.save(torch.jit.script(module()), path)


def save_export(path):
    rows = {"input": {0: torch.export.Dim("rows")}}
    program = torch.export.export(module().eval(), (torch.zeros(4, 3),), dynamic_shapes=rows)
    torch.export.save(program, path)


FILES = {
    "script": save_script,
    "export": save_export,
    "pickle": lambda path: torch.save(module(), path),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_every_file_of_torch_predicts(kind, tmp_path):
    path = str(tmp_path / "model.pt2")
    FILES[kind](path)
    with refused("file-untrusted", "trust=True"):
        InferenceModel().load_torch(path)
    model = InferenceModel(2).load_torch(path, trust=True)
    np.testing.assert_allclose(model.predict(X), expected(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.predict(X, batch_size=4), expected(), rtol=1e-5, atol=1e-6)


def test_other_files_are_named(tmp_path):
    (tmp_path / "text").write_text("no model")
    with refused("file-damaged"):
        InferenceModel().load_torch(str(tmp_path / "text"), trust=True)
    with refused("file-damaged"):
        InferenceModel().load_torch(str(tmp_path / "missing"))
    torch.save(module().state_dict(), tmp_path / "weights")
    with refused("model-type", "OrderedDict"):
        InferenceModel().load_torch(str(tmp_path / "weights"), trust=True)


class Busy(nn.Module):
    """Counts how many threads are inside copies of it."""

    lock, inside, most = threading.Lock(), 0, 0
    both = threading.Barrier(2)

    def forward(self, x):
        cls = type(self)
        with cls.lock:
            cls.inside += 1
            cls.most = max(cls.most, cls.inside)
        cls.both.wait(timeout=60)  # nobody passes unless two copies work at a time
        with cls.lock:
            cls.inside -= 1
        return x * 2


def test_as_many_threads_work_as_there_are_copies():
    model = InferenceModel(2).load_module(Busy())
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(model.predict, [X + i for i in range(6)]))
    for i, each in enumerate(found):
        np.testing.assert_array_equal(each, (X + i) * 2)
    assert Busy.most == 2


class Pair(nn.Module):
    def forward(self, a, b):
        return a + b, a - b


def test_several_inputs_and_outputs():
    model = InferenceModel().load_module(Pair())
    total, difference = model.predict([X, X * 2], batch_size=3)
    np.testing.assert_allclose(total, X * 3, rtol=1e-6)
    np.testing.assert_allclose(difference, -X, rtol=1e-6)
    assert model.predict([X[:0], X[:0]])[0].shape == (0, 3)


def test_a_model_is_not_changed_by_what_happens_to_the_original():
    original = module()
    model = InferenceModel().load_module(original)
    nn.init.zeros_(original[0].weight)
    np.testing.assert_allclose(model.predict(X), expected(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_predictions_on_an_rdd(orca_spark, tmp_path):
    batches = orca_spark.sparkContext.parallelize([X[:4], X[4:]], 2)
    save_script(str(tmp_path / "script"))
    for model in (
        InferenceModel().load_torch(str(tmp_path / "script"), trust=True),
        InferenceModel().load_module(module()),
    ):
        found = np.concatenate(model.distributed_predict(batches).collect())
        np.testing.assert_allclose(found, expected(), rtol=1e-5, atol=1e-6)


def test_onnx(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    weight, bias = (p.detach().numpy() for p in module()[0].parameters())
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)],
        "line",
        [helper.make_tensor_value_info("x", kind, ["n", 3])],
        [helper.make_tensor_value_info("y", kind, ["n", 4])],
        [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(bias, "b")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(made, tmp_path / "m.onnx")
    model = InferenceModel(2).load_onnx(str(tmp_path / "m.onnx"))
    np.testing.assert_allclose(model.predict(X, batch_size=4), X @ weight.T + bias, rtol=1e-5)
    with refused("model-input", "1", "2"):
        model.predict([X, X])
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with refused("model-unsupported"):
        InferenceModel().load_onnx(str(tmp_path / "bad.onnx"))


def test_openvino(tmp_path):
    openvino = pytest.importorskip("openvino")
    ops = openvino.opset13
    x = ops.parameter([-1, 3], np.float32, name="x")
    double = ops.multiply(x, np.array([2.0], np.float32))
    openvino.save_model(openvino.Model([double], [x]), tmp_path / "m.xml", compress_to_fp16=False)
    for batch_size in (0, 5):
        model = InferenceModel(2).load_openvino(str(tmp_path / "m.xml"), batch_size=batch_size)
        found = model.predict(X, batch_size=batch_size or None)
        np.testing.assert_allclose(found, X * 2, rtol=1e-6)
    with refused("file-damaged"):
        InferenceModel().load_openvino(str(tmp_path / "none.xml"))


@pytest.mark.parametrize("accelerator", ["openvino", "jit", None])
def test_models_of_nano(orca_spark, tmp_path, accelerator):
    original = module().eval()
    sample = torch.from_numpy(X)
    if accelerator is None:
        fast = InferenceOptimizer.quantize(original, "bf16", thread_num=1)
    else:
        fast = InferenceOptimizer.trace(original, sample, accelerator, thread_num=1)
    InferenceOptimizer.save(fast, tmp_path / "saved")
    model = InferenceModel(2).load_nano(tmp_path / "saved", None if accelerator else original)
    tolerance = {"atol": 1e-5 if accelerator else 0.02}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: model.predict(X + i, batch_size=4), range(12)))
    for i, each in enumerate(found):
        np.testing.assert_allclose(each, expected(X + i), rtol=0.01, **tolerance)
    batches = orca_spark.sparkContext.parallelize([X[:4], X[4:]], 2)
    found = np.concatenate(model.distributed_predict(batches).collect())
    np.testing.assert_allclose(found, expected(), rtol=0.01, **tolerance)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: InferenceModel().load_nano("/nowhere"), "a model that InferenceOptimizer.save"),
        (lambda: InferenceModel(0), "should be a positive integer"),
        (lambda: InferenceModel().predict(X), "No model is loaded"),
        (lambda: InferenceModel().load_module(3), "Expected a PyTorch module"),
        (lambda: InferenceModel().load_module(Pair()).predict([]), "got none"),
        (lambda: InferenceModel().load_module(Pair()).predict([X, X[:3]]), r"\[10, 3\]"),
        (lambda: InferenceModel().load_bigdl("m.bigdl"), "use load_onnx or load_torch"),
        (lambda: InferenceModel().load_caffe("m", "w"), "convert the model to ONNX"),
        (lambda: InferenceModel().load_tensorflow("m"), "TensorFlow 1 cannot be loaded"),
        (lambda: TorchModel.from_pytorch(3), "takes an nn.Module"),
        (lambda: TorchLoss.from_pytorch(nn.MSELoss), "takes a loss such as"),
        (lambda: TorchOptim.from_pytorch(3), "takes an optimizer or a scheduler"),
        (lambda: TorchOptim.from_pytorch(None, "Sometimes"), "decayType must be one of"),
    ],
)
def test_wrong_inputs_are_named(call, text):
    with pytest.raises(UsageError, match=text):
        call()


# -- the wrappers of torch ----------------------------------------------------------------------


def test_a_torch_model_is_the_model(tmp_path):
    model = TorchModel.from_pytorch(module)
    np.testing.assert_allclose(model.predict(X), expected(), rtol=1e-5, atol=1e-6)
    path = str(tmp_path / "model")
    model.saveModel(path)
    with refused("path-exists", "over_write=True"):
        model.saveModel(path)
    with refused("file-untrusted", "trust=True"):
        TorchModel.loadModel(path)
    again = TorchModel.loadModel(path, trust=True).to_pytorch()
    torch.testing.assert_close(again.state_dict(), model.to_pytorch().state_dict())
    loss = TorchLoss.from_pytorch(nn.MSELoss())
    assert float(loss(torch.ones(2), torch.zeros(2))) == 1.0


def test_a_scheduler_goes_on_with_another_optimizer():
    def walk(optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def pair():
        optimizer = torch.optim.SGD(module().parameters(), lr=1.0)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)

    optimizer, scheduler = pair()
    wanted = walk(*pair(), 5)
    wrapped = TorchOptim.from_pytorch(scheduler, "IterationDecay")
    assert wrapped.step_frequency == "batch"
    other = torch.optim.SGD(module().parameters(), lr=1.0)
    assert walk(other, wrapped.scheduler_creator(other, {}), 5) == pytest.approx(wanted)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert TorchOptim.from_pytorch(other).scheduler_creator is None


def test_graphs_of_nano_that_nobody_vouches_for_are_refused(tmp_path, monkeypatch):
    original = module().eval()
    fast = InferenceOptimizer.trace(original, torch.from_numpy(X), "jit")
    InferenceOptimizer.save(fast, tmp_path / "saved")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/home of another user")
    with refused("file-untrusted", "saved' is a saved graph of PyTorch"):
        InferenceModel().load_nano(tmp_path / "saved")
    model = InferenceModel().load_nano(tmp_path / "saved", trust=True)
    np.testing.assert_allclose(model.predict(X), expected(), rtol=1e-5, atol=1e-6)
    estimator = Estimator.from_torch(model=original, backend="local")
    with refused("file-untrusted", "save it again"):
        estimator.predict(X, accelerate=str(tmp_path / "saved"))
    InferenceOptimizer.save(
        InferenceOptimizer.load(tmp_path / "saved", trust=True), tmp_path / "mine"
    )
    found = estimator.predict(X, accelerate=str(tmp_path / "mine"))
    np.testing.assert_allclose(found, expected(), rtol=1e-5, atol=1e-6)
