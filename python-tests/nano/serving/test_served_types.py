"""Files of ONNX and OpenVINO whose tensors are texts, bfloat16 or types that cannot be served."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.nano.serving import Client, ModelRepository, ModelServer, ServedModel

CITIES = ["oslo", "bern", "rome", ""]
NUMBERS = [1, 2, 0, 0]


def write_onnx(folder, nodes, inputs, outputs, domains=()):
    """Write a graph as `model.onnx` of a folder; the sides are lists of (name, type, shape)."""
    import onnx
    from onnx import helper

    sides = [[helper.make_tensor_value_info(*each) for each in side] for side in (inputs, outputs)]
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(*each) for each in domains)]
    model = helper.make_model(helper.make_graph(nodes, "graph", *sides), opset_imports=opsets)
    model.ir_version = 9
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")


def write_identity(folder, element_type):
    from onnx import helper

    node = helper.make_node("Identity", ["x"], ["y"])
    write_onnx(folder, [node], [("x", element_type, ["n"])], [("y", element_type, ["n"])])


def write_cities(folder):
    """Write a model of texts that returns the number of a city, and the city."""
    from onnx import TensorProto, helper

    words = {"keys_strings": CITIES[:2], "values_int64s": NUMBERS[:2], "default_int64": 0}
    nodes = [
        helper.make_node("LabelEncoder", ["city"], ["id"], domain="ai.onnx.ml", **words),
        helper.make_node("Identity", ["city"], ["name"]),
    ]
    text, number = ("city", TensorProto.STRING, ["n"]), ("id", TensorProto.INT64, ["n"])
    outputs = [number, ("name", TensorProto.STRING, ["n"])]
    write_onnx(folder, nodes, [text], outputs, [("ai.onnx.ml", 3)])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from onnx import TensorProto

    root = tmp_path_factory.mktemp("models")
    write_cities(root / "city" / "1")
    write_identity(root / "half" / "1", TensorProto.BFLOAT16)
    with ModelServer(root, http_port=0, grpc_port=0) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(server, request):
    port = getattr(server, f"{request.param}_port")
    with Client(f"{request.param}://127.0.0.1:{port}", timeout=30) as client:
        yield client


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("kind", [object, str, bytes])
def test_texts_reach_a_network_as_they_are(client, binary, kind):
    cities = np.array(CITIES, kind) if kind is not bytes else np.array([c.encode() for c in CITIES])
    answer = client.infer("city", {"city": cities}, binary=binary)
    assert answer["id"].tolist() == NUMBERS
    assert [bytes(each).decode() for each in answer["name"]] == CITIES


def test_texts_of_json_reach_a_network_as_they_are(server):
    import urllib.request

    body = {"inputs": [{"name": "city", "datatype": "BYTES", "shape": [4], "data": CITIES}]}
    url = f"http://127.0.0.1:{server.http_port}/v2/models/city/infer"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as response:
        outputs = {each["name"]: each["data"] for each in json.load(response)["outputs"]}
    assert outputs == {"id": NUMBERS, "name": CITIES}


def test_bytes_that_are_no_text_are_refused(client):
    broken = np.array([b"oslo", b"\xff"], object)
    with refused("cluster-refused", "'city'", "UTF-8", "'\\xff'"):
        client.infer("city", {"city": broken})


def test_a_network_of_openvino_takes_texts(tmp_path):
    import openvino
    from openvino import opset13

    x = opset13.parameter([-1], openvino.Type.string, name="x")
    x.output(0).set_names({"x"})
    network = openvino.Model([x.output(0)], [x], "texts")
    openvino.save_model(network, tmp_path / "model.xml")
    with ServedModel(tmp_path) as model:
        for texts in (np.array(CITIES), np.array([each.encode() for each in CITIES], object)):
            assert model.predict({"x": texts}).tolist() == CITIES
        with refused("data-value"):
            model.predict({"x": np.array(["a\0"], object)})


def test_bfloat16_is_served_as_float32_and_read_from_the_wire(server, client):
    assert client.metadata("half")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
    numbers = np.array([1, 1 / 3, -3e38, 1e-40, np.inf], "float32")
    rounded = client.infer("half", {"x": numbers})
    assert rounded.dtype == "float32"
    np.testing.assert_array_equal(rounded, numbers.astype(ml_dtypes.bfloat16).astype("float32"))


def test_tensors_of_bf16_are_read(server):
    import urllib.request

    head = {"name": "x", "datatype": "BF16", "shape": [2]}
    head["parameters"] = {"binary_data_size": 4}
    body = json.dumps({"inputs": [head]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.http_port}/v2/models/half/infer",
        body + bytes.fromhex("803f00c0"),  # 1 and -2
        {"Inference-Header-Content-Length": str(len(body))},
    )
    with urllib.request.urlopen(request) as response:
        (output,) = json.load(response)["outputs"]
    assert output["data"] == [1, -2]
    assert output["datatype"] == "FP32"


def test_a_model_that_cannot_be_served_keeps_no_other_from_being_loaded(tmp_path, caplog):
    from onnx import TensorProto, helper

    write_identity(tmp_path / "a" / "1", TensorProto.FLOAT)
    write_identity(tmp_path / "c" / "1", TensorProto.FLOAT)
    zip_map = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0])
    value = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    map_type = helper.make_map_type_proto(TensorProto.INT64, value)
    sequence = helper.make_value_info("y", helper.make_sequence_type_proto(map_type))
    import onnx

    graph = helper.make_graph(
        [zip_map],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1])],
        [sequence],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    (tmp_path / "b" / "1").mkdir(parents=True)
    onnx.save(model, tmp_path / "b" / "1" / "model.onnx")

    sentence = r"Version 1 of model 'b': 'y' of the network is a seq\(map\(.*zipmap=False"
    with ModelRepository(tmp_path) as repository:
        with pytest.raises(UsageError, match=sentence):
            repository.load_all()
        assert repository.names() == ["a", "c"]
        states = {each["name"]: each["state"] for each in repository.index()}
        assert states == {"a": "READY", "b": "UNAVAILABLE", "c": "READY"}
    with ModelRepository(tmp_path) as repository, caplog.at_level(logging.ERROR):
        repository.load_all(keep_going=True)
        assert repository.names() == ["a", "c"]
    assert "the other models are served" in caplog.text


@pytest.mark.parametrize("port", [-1, 65536])
@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_port_that_does_not_exist_is_refused(kind, port):
    ports = {"http_port": None, "grpc_port": None, f"{kind}_port": port}
    sentence = f"The port of {'HTTP' if kind == 'http' else 'gRPC'} should be an integer from 0"
    with pytest.raises(UsageError, match=sentence):
        ModelServer(ModelRepository(), **ports)
