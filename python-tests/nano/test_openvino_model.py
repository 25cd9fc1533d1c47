import copy
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from refusals import refused

from bigdl.common.cpu import topology, usable_cores
from bigdl.common.errors import UsageError
from bigdl.nano.openvino import CompiledNetwork, OpenVINOModel

ov = pytest.importorskip("openvino")

RNG = np.random.default_rng(0)
W = RNG.standard_normal((6, 4)).astype(np.float32)


def network():
    """``x @ W + y``, and twice of it; any batch size."""
    from openvino import opset13 as op

    x = op.parameter([-1, 6], np.float32, name="x")
    y = op.parameter([-1, 4], np.float32, name="y")
    total = op.add(op.matmul(x, op.constant(W), False, False), y)
    twice = op.multiply(total, op.constant(np.float32(2)))
    return ov.Model([total, twice], [x, y], "two")


def classifier(width=16, classes=4, scale=1.0):
    from openvino import opset13 as op

    rng = np.random.default_rng(1)
    x = op.parameter([-1, width], np.float32, name="x")
    hidden = op.constant(rng.standard_normal((width, width)).astype(np.float32))
    last = op.constant(scale * rng.standard_normal((width, classes)).astype(np.float32))
    out = op.matmul(op.relu(op.matmul(x, hidden, False, False)), last, False, False)
    return ov.Model([out], [x], "classifier")


def rows(count):
    return RNG.standard_normal((count, 6)).astype(np.float32), np.ones((count, 4), np.float32)


def tensor(array):
    return pytest.importorskip("torch").from_numpy(array)


@pytest.fixture(scope="module")
def model():
    return OpenVINOModel(network())


@pytest.fixture
def own():
    return OpenVINOModel(network())


# --- calls


def test_inputs_go_by_position_by_name_or_both(model):
    x, y = rows(3)
    for outputs in (model(x, y), model(x, y=y), model(y=y, x=x)):
        assert isinstance(outputs, list)
        np.testing.assert_allclose(outputs[0], x @ W + y, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(outputs[1], 2 * (x @ W + y), rtol=1e-5, atol=1e-5)
    assert model.forward_args == ["x", "y"]


def test_one_output_is_an_array():
    assert OpenVINOModel(classifier())(np.zeros((2, 16), np.float32)).shape == (2, 4)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.astype(np.float64),
        lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, 0)[::2],
        lambda x: x.tolist(),
        lambda x: tensor(x),
        lambda x: tensor(x).requires_grad_(),
    ],
)
def test_arrays_of_all_kinds_give_the_same(model, form):
    x, y = rows(3)
    np.testing.assert_allclose(model(form(x), y)[0], model(x, y)[0], rtol=1e-6, atol=1e-6)


def test_an_array_that_may_not_be_written_to_is_read(model):
    x, y = rows(3)
    x.flags.writeable = False
    np.testing.assert_allclose(model(x, y)[0], x @ W + y, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_an_input_and_an_output_too():
    torch = pytest.importorskip("torch")
    from openvino import opset13 as op

    x = op.parameter([-1, 3], ov.Type.bf16, name="x")
    model = OpenVINOModel(ov.Model([op.relu(x)], [x], "bf16"))
    given = torch.tensor([[1.5, -2.0, 3.0]], dtype=torch.bfloat16)
    np.testing.assert_array_equal(model(given), [[1.5, 0, 3]])


def test_results_are_the_callers_own(model):
    x, y = rows(2)
    first = model(x, y)[0]
    kept = first.copy()
    model(x + 1, y)
    np.testing.assert_array_equal(first, kept)


def test_threads_may_call_at_the_same_time(model):
    wrong = []

    def call(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            x = rng.standard_normal((rng.integers(1, 9), 6)).astype(np.float32)
            y = np.full((len(x), 4), seed, np.float32)
            if not np.allclose(model(x, y)[0], x @ W + y, atol=1e-4):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, x, y: m(x), ("model-input", "2", "1")),
        (lambda m, x, y: m(x, y, y), ("model-input", "3")),
        (lambda m, x, y: m(x=x), ("argument-missing", "'y'")),
        (lambda m, x, y: m(x, z=y), ("argument-unknown", "'z'")),
        (lambda m, x, y: m(x, x=x), ("argument-conflict",)),
        (lambda m, x, y: m(x[:, :5], y), ("model-input", "6", "4", "3")),
        (lambda m, x, y: m(x + 1j, y), ("model-input", "complex64")),
        (
            lambda m, x, y: m.async_predict([(x, y)], num_requests=-1),
            ("argument-value", "num_requests", "0"),
        ),
    ],
)
def test_a_wrong_call_is_said_and_the_next_is_right(model, call, said):
    x, y = rows(3)
    with refused(*said):
        call(model, x, y)
    np.testing.assert_allclose(model(x, y)[0], x @ W + y, rtol=1e-5, atol=1e-5)


# --- many at a time


@pytest.mark.parametrize("num_requests", [0, 1, 3])
def test_async_predict_keeps_the_order(model, num_requests):
    data = [rows(count) for count in range(1, 8)]
    forms = [(x, y) if i % 2 else {"y": y, "x": x} for i, (x, y) in enumerate(data)]
    for outputs, (x, y) in zip(model.async_predict(forms, num_requests), data, strict=True):
        np.testing.assert_allclose(outputs[0], x @ W + y, rtol=1e-5, atol=1e-5)


def test_async_predict_of_single_arrays_gives_arrays():
    model = OpenVINOModel(classifier(), config={"PERFORMANCE_HINT": "THROUGHPUT"})
    data = [np.full((2, 16), i, np.float32) for i in range(5)]
    for output, given in zip(model.async_predict(iter(data)), data, strict=True):
        np.testing.assert_allclose(output, model(given), rtol=1e-5)


def test_an_error_in_one_of_many_is_raised_and_the_next_call_is_right(model):
    x, y = rows(2)
    with refused("model-input", "2", "5"):
        model.async_predict([(x, y), (x[:, :5], y), (x, y)], num_requests=2)
    assert len(model.async_predict([(x, y)] * 5, num_requests=2)) == 5


# --- shapes


def test_reshape_to_the_shapes_that_it_has_does_nothing(own):
    assert own.reshape("x[3,6],y[3,4]") == (True, None)
    compiled = own.nano_network.compiled
    assert own.reshape("x[3,6],y[3,4]") == (True, None)
    assert own.nano_network.compiled is compiled


@pytest.mark.parametrize(
    "shapes",
    ["x[3,6], y[3,4]", "x[3,?],y[3,-1]", {"x": (3, 6), "y": [3, 4]}, [[3, 6], (3, 4)]],
)
def test_shapes_are_written_in_many_ways(own, shapes):
    assert own.reshape(shapes) == (True, None)
    x, y = rows(3)
    np.testing.assert_allclose(own(x, y)[0], x @ W + y, rtol=1e-5, atol=1e-5)
    with refused("model-input"):
        own(*rows(2))


def test_an_impossible_shape_leaves_all_as_it_was(own):
    done, error = own.reshape("x[3,5]")
    assert not done
    assert "Failed to reshape this model." in error
    x, y = rows(3)
    np.testing.assert_allclose(own(x, y)[0], x @ W + y, rtol=1e-5, atol=1e-5)
    assert own.ie_network.inputs[0].partial_shape == ov.PartialShape([-1, 6])


@pytest.mark.parametrize("shapes", ["z[3,6]", "x[3", "x", 3.5, {"x": "a,b"}])
def test_shapes_that_make_no_sense_are_said(own, shapes):
    done, error = own.reshape(shapes)
    assert not done
    assert error.startswith("Failed to reshape this model. Error message: ")
    with pytest.raises(UsageError):
        OpenVINOModel(network(), shapes=shapes)


def test_one_shape_is_that_of_the_only_input():
    model = OpenVINOModel(classifier(), shapes="[2,16]")
    assert model(np.zeros((2, 16), np.float32)).shape == (2, 4)
    assert model.reshape([1, 16]) == (True, None)
    assert model.reshape("[1..3,16]") == (True, None)
    assert model(np.zeros((3, 16), np.float32)).shape == (3, 4)


# --- files and copies


def test_a_saved_model_is_the_same_and_may_be_saved_over(model, tmp_path):
    x, y = rows(3)
    model.save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["ov_saved_model.bin", "ov_saved_model.xml"]
    for path in (tmp_path / "saved", str(tmp_path / "saved" / "ov_saved_model.xml")):
        again = OpenVINOModel(path)
        np.testing.assert_array_equal(again(x, y)[0], model(x, y)[0])
        again.save(tmp_path / "saved")  # its weights are mapped from there
        np.testing.assert_array_equal(again(x, y)[0], model(x, y)[0])
    model.save(tmp_path / "other" / "name.xml")
    assert OpenVINOModel(tmp_path / "other" / "name.xml").forward_args == ["x", "y"]


def test_an_onnx_file_is_a_network(tmp_path):
    onnx = pytest.importorskip("onnx")
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 2])
        for name in ("a", "b")
    ]
    node = onnx.helper.make_node("Relu", ["a"], ["b"])
    graph = onnx.helper.make_graph([node], "relu", ports[:1], ports[1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    path = tmp_path / "relu.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    np.testing.assert_array_equal(OpenVINOModel(path)(np.float32([[1, -1]])), [[1, 0]])


def test_copies_and_pickles_are_models_of_their_own(own):
    x, y = rows(3)
    expected = own(x, y)[0]
    twins = [copy.deepcopy(own), pickle.loads(pickle.dumps(own))]
    own.reshape("x[1,6],y[1,4]")
    for twin in twins:
        np.testing.assert_array_equal(twin(x, y)[0], expected)
        assert twin.final_config == own.final_config


def test_another_network_can_be_set(own, tmp_path):
    own.ie_network = classifier()
    assert own(np.zeros((2, 16), np.float32)).shape == (2, 4)
    own.save(tmp_path)
    own.ie_network = network()
    own.ie_network = str(tmp_path / "ov_saved_model.xml")
    assert own.forward_args == ["x"]


# --- settings


@pytest.mark.parametrize("thread_num", [1, 2])
def test_the_number_of_threads_holds(thread_num):
    if len(topology().cores) < thread_num:
        pytest.skip("needs as many physical cores")
    model = OpenVINOModel(network(), thread_num=thread_num)
    assert model.thread_num == model.nano_network.num_threads == thread_num
    assert model.additional_config == {"INFERENCE_NUM_THREADS": thread_num}
    for change in (lambda: model.reshape("x[2,6],y[2,4]"), lambda: pickle.dumps(model)):
        change()
        assert model.nano_network.num_threads == thread_num


def test_one_thread_means_that_only_one_computes():
    model = OpenVINOModel(classifier(width=1024), thread_num=1)
    x = np.ones((64, 1024), np.float32)
    model(x)

    def ticks():
        found = {}
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            found[task] = int(fields[11]) + int(fields[12])
        return found

    before, deadline = ticks(), time.process_time() + 0.4
    while time.process_time() < deadline:
        model(x)
    busy = [task for task, count in ticks().items() if count - before.get(task, 0) > 5]
    assert len(busy) == 1


@pytest.mark.linux("CPU affinity")
def test_a_pinned_process_gets_the_threads_of_its_cores():
    program = (
        f"import os; os.sched_setaffinity(0, [{usable_cores()[-1]}])\n"
        "import numpy as np, openvino as ov\n"
        "from openvino import opset13 as op\n"
        "from bigdl.nano.openvino import CompiledNetwork\n"
        "x = op.parameter([1], np.float32)\n"
        "print(CompiledNetwork(ov.Model([op.relu(x)], [x], 'm')).num_threads)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1"]


def test_fp32_is_computed_in_fp32():
    assert OpenVINOModel(network()).final_config["INFERENCE_PRECISION_HINT"] == "f32"
    config = {"INFERENCE_PRECISION_HINT": "bf16"}
    assert OpenVINOModel(network(), config=config).final_config == config


def test_bf16_is_a_hint_where_the_platform_has_it():
    if "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        with pytest.raises(RuntimeError, match=r"^Platform doesn't support BF16 format"):
            OpenVINOModel(network(), precision="bf16")
        return
    model = OpenVINOModel(network(), precision="bf16")
    assert model.additional_config["INFERENCE_PRECISION_HINT"] == "bf16"
    assert model.final_config["INFERENCE_PRECISION_HINT"] == "bf16"
    x, y = rows(3)
    np.testing.assert_allclose(model(x, y)[0], x @ W + y, atol=0.2)


def test_compiled_networks_are_cached_where_the_caller_says(tmp_path):
    x, y = rows(3)
    for _ in range(2):
        model = OpenVINOModel(network(), cache_dir=tmp_path)
        np.testing.assert_allclose(model(x, y)[0], x @ W + y, rtol=1e-5, atol=1e-5)
    assert list(tmp_path.glob("*.blob"))
    assert model.additional_config["CACHE_DIR"] == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"device": "GPU.7"},
            r"Your machine don't have GPU.7 device \(only have .*CPU.*\), please",
        ),
        ({"device": "VPUX"}, "Your machine don't have NPU device"),
        ({"device": "AUTO:FPGA,CPU"}, "Your machine don't have FPGA device"),
        ({"precision": "fp8"}, "precision should be one of"),
        ({"thread_num": 0}, "thread_num should be a positive integer"),
        ({"thread_num": "2"}, "thread_num should be a positive integer"),
        ({"config": {"NO_SUCH": 1}}, "cannot compile the network for CPU with .*NO_SUCH"),
    ],
)
def test_settings_that_make_no_sense_are_said(arguments, said):
    with pytest.raises(RuntimeError, match=said):
        OpenVINOModel(network(), **arguments)


def test_a_combination_of_devices_is_a_device():
    x, y = rows(3)
    model = OpenVINOModel(network(), device="AUTO:CPU")
    np.testing.assert_allclose(model(x, y)[0], x @ W + y, atol=0.2)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no_such.xml", ("path-missing", "no_such", "' doesn'")),
        ("model.pt", ("file-format",)),
        (3, ("argument-type",)),
        ((b"<net/>", b""), ("file-damaged", "OpenVINO")),
    ],
)
def test_what_is_no_network_is_said(source, said):
    with refused(*said):
        OpenVINOModel(source)


def test_a_stage_of_a_pipeline_may_be_a_network():
    pytest.importorskip("torch")
    from bigdl.nano.pytorch.inference.pipeline import Pipeline

    model = OpenVINOModel(classifier())
    data = [np.full((2, 16), i, np.float32) for i in range(3)]
    with Pipeline([("network", model, {"cores_per_worker": 1})]) as pipeline:
        outputs = pipeline.run(data)
    for output, given in zip(outputs, data, strict=True):
        np.testing.assert_allclose(output, model(given), rtol=1e-5, atol=1e-5)


def test_the_core_takes_and_gives_lists():
    x, y = rows(2)
    core = CompiledNetwork(network())
    outputs = core.infer([x, y])
    assert [each.shape for each in outputs] == [(2, 4), (2, 4)]
    assert core.output_names
    assert [len(each) for each in core.infer_many([[x, y]] * 3, 2)] == [2, 2, 2]


# --- quantization


@pytest.fixture(scope="module")
def labelled():
    model = OpenVINOModel(classifier())
    batches = [np.float32(RNG.standard_normal((8, 16))) for _ in range(4)]
    return model, [(each, model(each).argmax(1)) for each in batches]


def accuracy(predictions, targets):
    return float((predictions.argmax(1) == targets).mean())


def test_a_quantized_model_has_integers_and_gives_nearly_the_same(labelled):
    pytest.importorskip("nncf")
    model, data = labelled
    before = model(data[0][0])
    quantized = model.pot(data, sample_size=16)
    kinds = [node.get_type_name() for node in quantized.ie_network.get_ops()]
    assert "FakeQuantize" in kinds
    assert accuracy(quantized(data[0][0]), data[0][1]) > 0.7
    np.testing.assert_array_equal(model(data[0][0]), before)


@pytest.mark.parametrize("form", ["tuple", "dict", "nested", "bare", "iterator"])
def test_calibration_data_come_in_many_forms(labelled, form):
    pytest.importorskip("nncf")
    model, data = labelled
    batches = {
        "tuple": data,
        "dict": [{"x": x} for x, _ in data],
        "nested": [((x,), y) for x, y in data],
        "bare": [x for x, _ in data],
        "iterator": iter(data),
    }[form]
    assert model.pot(batches, sample_size=20)(data[0][0]).shape == (8, 4)


@pytest.mark.parametrize("drop_type", ["relative", "absolute"])
@pytest.mark.parametrize("higher_better", [True, False])
def test_layers_stay_in_floating_point_until_the_figure_is_good(labelled, drop_type, higher_better):
    pytest.importorskip("nncf")
    model, data = labelled
    exact = np.concatenate([model(x) for x, _ in data])
    calls = []

    def closeness(predictions, targets):
        calls.append(len(targets))
        distance = float(np.abs(predictions - exact[: len(predictions)]).mean())
        return 1 - distance if higher_better else 1 + distance

    strict = model.pot(
        data,
        metric=closeness,
        higher_better=higher_better,
        drop_type=drop_type,
        maximal_drop=0.0,
        max_iter_num=10,
    )
    assert max(calls) == 32
    kinds = [node.get_type_name() for node in strict.ie_network.get_ops()]
    assert kinds.count("FakeQuantize") == 0


def _signal_stack():
    content = (ctypes.c_uint64 * 3)()  # as large as a stack_t, padding included
    ctypes.CDLL(None).sigaltstack(None, content)
    return list(content)


@pytest.mark.skipif(sys.platform != "linux", reason="sigaltstack(2) of Linux")
def test_signals_can_be_handled_after_quantizing(labelled):
    """NNCF's own Cores leave a stack for signals behind that is freed memory."""
    pytest.importorskip("nncf")
    model, data = labelled

    before = _signal_stack()
    model.pot(data, metric=lambda predictions, targets: 1.0, max_iter_num=2)
    assert _signal_stack() == before
    handled = []
    own = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, own)
    assert handled


@pytest.mark.parametrize(
    ("data", "arguments", "said"),
    [
        ([], {}, ("data-empty",)),
        (None, {"sample_size": 0}, ("argument-value", "sample_size")),
        (None, {"drop_type": "both"}, ("argument-value", "drop_type", "'relative'", "'absolute'")),
        ([{"z": np.zeros((1, 16))}], {}, ("model-input",)),
        ([((np.zeros(1), np.zeros(1)), 0)], {}, ("model-input", "1", "2")),
        ([np.zeros((1, 16), np.float32)], {"metric": accuracy}, ("data-structure",)),
    ],
)
def test_data_that_cannot_calibrate_are_said(labelled, data, arguments, said):
    pytest.importorskip("nncf")
    model, good = labelled
    with refused(*said):
        model.pot(good if data is None else data, **arguments)
