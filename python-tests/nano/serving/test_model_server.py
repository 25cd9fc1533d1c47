"""The servers for HTTP and gRPC: answers, refusals, limits, and what hostile clients send."""

import asyncio
import gzip
import http.client
import json
import re
import socket
import threading
import time
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.nano.serving import (
    BatchingOptions,
    Client,
    HttpAnswer,
    ModelRepository,
    ModelServer,
    OverloadError,
    ServedModel,
    ServerError,
    ServingLimits,
    Signature,
    TensorSpec,
)
from bigdl.nano.serving.http_app import BodyThreads
from bigdl.nano.serving.messages import SERVICE, check_fields, messages
from bigdl.nano.serving.open_inference import parse_json, read_request
from bigdl.nano.serving.runners import ModelRunner
from bigdl.nano.serving.service import InFlightBytes

ROWS = np.array([[1, 2, 3], [4, 5, 6]], "float32")
GOOD = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}


def join_runner():
    """Texts and numbers of several types, with two outputs."""
    inputs = TensorSpec.parsed("name: BYTES[-1]; count: INT32[-1]; half: FP16[-1]; flag: BOOL[-1]")
    outputs = TensorSpec.parsed("text: BYTES[-1]; sum: FP64[-1]")

    def run(arrays):
        names, counts, halves, flags = arrays
        texts = np.empty(len(names), object)
        texts[:] = [bytes(name) * int(count) for name, count in zip(names, counts, strict=True)]
        return [texts, counts + halves.astype("float64") + flags]

    return ModelRunner(run, Signature(tuple(inputs), tuple(outputs)), "python")


def double_runner():
    x, y = TensorSpec.parsed("x: FP32[-1,3]; y: FP32[-1,3]")
    return ModelRunner(lambda arrays: [arrays[0] * 2], Signature((x,), (y,)), "python")


@pytest.fixture(scope="module")
def server():
    async def hello(request, name):
        return HttpAnswer(f"hello {name}".encode(), content_type="text/plain")

    repository = ModelRepository()
    repository.add("double", ServedModel(double_runner()))
    repository.add("join", ServedModel(join_runner()))
    limits = ServingLimits(max_request_bytes=100_000, max_rows=1000, body_timeout=1)
    routes = {("GET", "/hello/{name}"): hello}
    options = {"limits": limits, "routes": routes, "changes": True}
    with ModelServer(repository, http_port=0, grpc_port=0, **options) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(server, request):
    port = getattr(server, f"{request.param}_port")
    with Client(f"{request.param}://127.0.0.1:{port}", timeout=30) as client:
        yield client


def ask(server, method, path, body=b"", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def post(server, body, model="double", **headers):
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, content = ask(server, "POST", f"/v2/models/{model}/infer", encoded, **headers)
    return status, json.loads(content)


# Answers ----------------------------------------------------------------------------------------


def test_a_client_gets_what_the_model_gives(client):
    assert client.is_live()
    assert client.is_ready()
    assert client.is_ready("double", "1")
    assert not client.is_ready("other")
    assert client.metadata()["name"] == "bigdl"
    np.testing.assert_array_equal(client.infer("double", ROWS), ROWS * 2)
    np.testing.assert_array_equal(client.infer("double", {"x": ROWS}, binary=False), ROWS * 2)
    assert [str(spec) for spec in client.signature("double").inputs] == ["x: FP32[-1, 3]"]
    assert [each["name"] for each in client.models()] == ["double", "join"]


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_of_every_kind_arrive(client, binary):
    inputs = {
        "name": np.array(["ä", "bc"]),
        "count": np.array([2, 1], "int32"),
        "half": np.array([0.5, 1.5], "float16"),
        "flag": np.array([True, False]),
    }
    answer = client.infer("join", inputs, binary=binary)
    assert list(answer) == ["text", "sum"]
    assert list(answer["text"]) == ["ää".encode(), b"bc"]
    assert answer["sum"].tolist() == [3.5, 2.5]
    assert answer["sum"].dtype == "float64"
    only = client.infer("join", inputs, outputs=["sum"], binary=binary)
    assert only.tolist() == [3.5, 2.5]


def test_json_may_be_nested_and_carries_an_id(server):
    tensor = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": ROWS.tolist()}
    status, answer = post(server, {"id": "seven", "inputs": [tensor]})
    assert (status, answer["id"], answer["model_version"]) == (200, "seven", "1")
    assert answer["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [2, 3], "data": [2, 4, 6, 8, 10, 12]}
    ]


def test_versions_are_chosen_by_shares_keys_and_headers(repository_of):
    x, y = TensorSpec.parsed("x: FP32[-1,3]; y: FP32[-1,3]")
    triple = ModelRunner(lambda arrays: [arrays[0] * 3], Signature((x,), (y,)), "python")
    repository = repository_of(double=double_runner())
    repository.add("double", ServedModel(triple), "2")
    with ModelServer(repository, http_port=0, grpc_port=0, changes=True) as server:
        body = {"inputs": [GOOD]}
        assert post(server, body)[1]["model_version"] == "2"
        traffic = "/v2/repository/models/double/traffic"
        assert ask(server, "POST", traffic, b'{"shares": {"1": 1, "2": 1}}')[0] == 200
        answers = [post(server, body, X_Request_Key=f"user-{n % 20}")[1] for n in range(60)]
        versions = [answer["model_version"] for answer in answers]
        assert versions[:20] * 3 == versions
        assert set(versions) == {"1", "2"}
        assert post(server, body, X_Model_Version="1")[1]["model_version"] == "1"
        assert post(server, body, X_Model_Version="9")[0] == 404
        with Client(f"grpc://127.0.0.1:{server.grpc_port}") as client:
            factors = [client.infer("double", ROWS, key=f"user-{n}")[0, 0] for n in range(20)]
            assert [str(int(factor) - 1) for factor in factors] == versions[:20]
            assert client.infer("double", ROWS, version="1")[0, 0] == 2
        assert ask(server, "POST", traffic, b'{"shares": {"1": 1}, "shadow": "2"}')[0] == 200
        assert post(server, body)[1]["model_version"] == "1"
        shadowed = b'bigdl_shadow_requests_total{model="double",result="answered"} 1.0'
        end = time.monotonic() + 30
        while shadowed not in ask(server, "GET", "/metrics")[1]:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_further_route_answers_beside_the_protocol(server):
    assert ask(server, "GET", "/hello/you") == (200, b"hello you")
    assert ask(server, "HEAD", "/v2/health/live") == (200, b"")


def test_metrics_say_what_was_asked(server):
    post(
        server, {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
    )
    post(server, {"inputs": []})
    status, text = ask(server, "GET", "/metrics")
    assert status == 200
    lines = text.decode().splitlines()
    for start in [
        'bigdl_requests_total{code="ok",model="double",protocol="http",version="1"}',
        'bigdl_requests_total{code="bad_request",model="double",protocol="http",version="1"}',
        'bigdl_request_seconds_bucket{le="0.001",model="double",protocol="http"}',
        'bigdl_stage_seconds_count{model="double",stage="decode",version="1"}',
        'bigdl_stage_seconds_count{model="double",stage="queue",version="1"}',
        'bigdl_stage_seconds_count{model="double",stage="compute",version="1"}',
        'bigdl_stage_seconds_count{model="double",stage="encode",version="1"}',
        'bigdl_batch_rows_count{model="double",version="1"}',
        'bigdl_queue_length{model="double",version="1"} 0.0',
        'bigdl_model_info{method="",model="double",platform="python",version="1"} 1.0',
        "process_resident_memory_bytes",
    ]:
        assert any(line.startswith(start) for line in lines), start


def test_a_request_is_a_span_where_opentelemetry_is_installed(repository_of):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    repository = repository_of(double=double_runner())
    with ModelServer(repository, http_port=0, grpc_port=None) as server:
        post(server, {"inputs": [GOOD]})
        post(server, {"inputs": []})
    spans = exporter.get_finished_spans()
    assert [each.name for each in spans] == ["http infer double"] * 2
    assert spans[0].attributes == {"bigdl.model.name": "double", "bigdl.model.version": "1"}
    assert [each.status.is_ok for each in spans] == [True, False]


def test_the_interface_is_described(server):
    status, content = ask(server, "GET", "/openapi.json")
    assert status == 200
    described = json.loads(content)
    for path, methods in described["paths"].items():
        for method in methods:
            concrete = path.format(model="double", version="1")
            if path.endswith(("/unload", "/load")):
                continue
            assert ask(server, method.upper(), concrete, b"{}")[0] in (200, 400), path
    assert b"/v2/models/{model}/infer" in ask(server, "GET", "/docs")[1]


# Refusals ---------------------------------------------------------------------------------------


def wrong(**changes):
    return {"inputs": [{**GOOD, **changes}]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "The request is no JSON"),
        (b"[" * 100_000, "The request is no JSON"),
        (b"\xff\xfe", "The request is no JSON"),
        ([1], "has to be an object"),
        ({}, "needs 'inputs'"),
        ({"inputs": {}}, "needs 'inputs'"),
        ({"inputs": [1]}, "needs 'inputs'"),
        ({"inputs": []}, "takes the inputs x, but got none"),
        ({"inputs": [{"name": "x"}]}, "needs a name, a datatype and a shape"),
        ({"inputs": [GOOD, GOOD]}, "given twice"),
        ({"inputs": [GOOD], "id": 7}, "id of a request is a text"),
        ({"inputs": [GOOD], "parameters": {"timeout": -1}}, "timeout is a number of microseconds"),
        ({"inputs": [GOOD], "parameters": []}, "parameters have to be an object"),
        ({"inputs": [GOOD], "outputs": [{"name": "z"}]}, "no output 'z'; it has y"),
        ({"inputs": [GOOD], "outputs": [{}]}, "needs a name"),
        (
            {"inputs": [GOOD], "outputs": [{"name": "y", "parameters": {"classification": 2}}]},
            "does not offer",
        ),
        (wrong(name="z"), "takes the inputs x, but got z"),
        (wrong(datatype="FP31"), "no datatype 'FP31'"),
        (wrong(datatype="INT64"), "has the datatype FP32, but INT64 was given"),
        (wrong(shape=[1, 4]), "has the shape [-1, 3]"),
        (wrong(shape=[3]), r"has the shape [-1, 3]"),
        (wrong(shape=[-1, 3]), "has to be a list of at most 32 sizes"),
        (wrong(shape=[10**30]), "has to be a list of"),
        (wrong(shape=[10**18, 10**18]), "too large to be computed"),
        (wrong(shape=[1.5]), "has to be a list of"),
        (wrong(shape=[0, 2**63], data=[]), "too large to be computed"),
        (wrong(shape=[0, 2**62, 2**62], data=[]), "too large to be computed"),
        (wrong(shape=[0] * 20_000), "got a list of 20000 values"),
        (wrong(name="z" * 9000), "takes the inputs x, but got zzz"),
        (wrong(data=["a" * 9000, 2, 3]), "holds other values"),
        (wrong(data=[[]] * 9000), "holds 0"),
        (wrong(data=[True, 2.5, 3]), "holds other values"),
        ({"inputs": [GOOD], "outputs": [{"name": "y"}] * 2}, "requested twice"),
        ({"inputs": [GOOD] * 1000, "outputs": [{"name": "y"}]}, "given twice"),
        ({"inputs": [{}] * 5000}, "may have 4096 inputs"),
        (wrong(shape=[0, 3], data=[]), "hold no row"),
        (wrong(data=["1", "2", "3"]), "holds other values"),
        (wrong(data=[1, None, 3]), "holds other values"),
        (wrong(data=[[1, 2], [3]]), "different lengths"),
        (wrong(data="abc"), "has to hold 3 values"),
        (wrong(data={"a": 1}), "has to hold 3 values"),
        (wrong(shape=[1, 3], data=None), "has to hold 3 values"),
        (wrong(parameters={"binary_data_size": 12}), "go beyond the end"),
        (wrong(parameters={"binary_data_size": -1}), "is a number of bytes"),
        (wrong(parameters={"shared_memory_region": "r"}), "in shared memory"),
        (wrong(shape=[1001, 3], data=[0] * 3003), "may have 1000 at most"),
    ],
)
def test_a_wrong_request_is_told_in_a_sentence(server, body, sentence):
    status, answer = post(server, body)
    assert status == 400
    assert sentence in answer["error"]
    assert "\n" not in answer["error"]


@pytest.mark.parametrize(
    ("head", "tail", "length", "sentence"),
    [
        (12, b"\0" * 12, "nine", "is a number of bytes"),
        (12, b"\0" * 12, "99999", "says 99999"),
        (12, b"\0" * 11, None, "go beyond the end"),
        (12, b"\0" * 13, None, "1 bytes after the JSON"),
        (8, b"\0" * 8, None, "needs 12 bytes, but 8 were given"),
    ],
)
def test_wrong_binary_tensors_are_told_in_a_sentence(server, head, tail, length, sentence):
    tensor = {k: v for k, v in GOOD.items() if k != "data"}
    described = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": head}}]})
    status, answer = post(
        server,
        described.encode() + tail,
        Inference_Header_Content_Length=length or str(len(described)),
    )
    assert (status, sentence in answer["error"]) == (400, True), answer


@pytest.mark.parametrize("size", [0, 3, 9, 12])
def test_wrong_texts_are_told_in_a_sentence(server, size):
    tensor = {"name": "name", "shape": [2], "datatype": "BYTES"}
    described = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]})
    body = described.encode() + b"\1\0\0\0a\xff\xff\xff\xff\0\0\0"[:size]
    status, answer = post(
        server, body, model="join", Inference_Header_Content_Length=str(len(described))
    )
    assert (status, "\n" in answer["error"]) == (400, False)


def test_other_refusals_have_their_status(server):
    big = json.dumps(wrong(data=[0.5] * 60_000)).encode()
    assert post(server, big)[0] == 413
    assert post(server, gzip.compress(b" " * 1_000_000), Content_Encoding="gzip")[0] == 413
    assert post(server, b"no gzip", Content_Encoding="gzip")[0] == 400
    assert post(server, b"{}", Content_Encoding="br")[0] == 415
    assert post(server, {"inputs": [GOOD]}, model="other")[0] == 404
    assert ask(server, "GET", "/v2/models/double/versions/9")[0] == 404
    assert ask(server, "GET", "/nothing")[0] == 404
    assert ask(server, "GET", "/v2/models/double/infer")[0] == 405
    assert ask(server, "POST", "/v2/repository/models/double/load")[0] == 404
    assert ask(server, "POST", "/v2/repository/models/double/traffic", b'{"shares": 3}')[0] == 400
    assert ask(server, "POST", "/v2/models/%2e%2e%2fetc/infer", b"{}")[0] == 404


def test_a_compressed_body_may_not_become_far_larger():
    repository = ModelRepository()
    repository.add("double", ServedModel(double_runner()))
    with ModelServer(repository, http_port=0, grpc_port=None) as server:
        zeros = gzip.compress(json.dumps(wrong(data=[0] * 500_000)).encode())
        status, answer = post(server, zeros, Content_Encoding="gzip")
        assert (status, "100 times" in answer["error"]) == (413, True)
        good = json.dumps({"inputs": [GOOD]}).encode()
        for pack, name in ((gzip.compress, "gzip"), (zlib.compress, "deflate")):
            assert post(server, pack(good), Content_Encoding=name)[0] == 200
            assert post(server, pack(good)[:-5], Content_Encoding=name)[0] == 400
            assert post(server, pack(good) + b"x", Content_Encoding=name)[0] == 400
        numbers = np.random.default_rng(1).random((9000, 3)).astype("float32")
        large = {"inputs": [{**GOOD, "shape": [9000, 3], "data": numbers.ravel().tolist()}]}
        packed = gzip.compress(json.dumps(large).encode())
        status, answer = post(server, packed, Content_Encoding="gzip")
        assert status == 200
        np.testing.assert_array_equal(
            np.array(answer["outputs"][0]["data"], "float32"), 2 * numbers.ravel()
        )


def test_large_answers_come_whole_and_too_large_ones_are_refused():
    rows = np.arange(120_000, dtype="float32").reshape(-1, 3) / 7
    repository = ModelRepository()
    repository.add("double", ServedModel(double_runner()))
    limits = ServingLimits(max_answer_bytes=3_000_000)
    with (
        ModelServer(repository, http_port=0, grpc_port=0, limits=limits) as server,
        Client(f"http://127.0.0.1:{server.http_port}") as http,
        Client(f"grpc://127.0.0.1:{server.grpc_port}") as over_grpc,
    ):
        np.testing.assert_array_equal(http.infer("double", rows, binary=False), 2 * rows)
        limits_of_all = (server.service, "limits", ServingLimits(max_answer_bytes=400_000))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*limits_of_all)
            for client, binary in ((http, True), (http, False), (over_grpc, True)):
                with pytest.raises(ServerError, match="answer would have about"):
                    client.infer("double", rows, binary=binary)
                client.infer("double", rows[:100], binary=binary)


def test_requests_that_are_too_large_together_are_refused_but_for_small_ones():
    budget = InFlightBytes(1_000_000)
    with budget.reservation() as first, budget.reservation() as second:
        first(1_000_000)
        with pytest.raises(OverloadError, match="too large together"):
            second(200_000)
        second(60_000)
        first(500_000)
        second(500_000)
    with budget.reservation() as third:
        third(1_000_000)


def test_bodies_wait_for_threads_and_the_event_loop_for_none_of_them():
    async def use():
        threads, gate, done = BodyThreads(), threading.Event(), []
        works = [asyncio.create_task(threads.run(gate.wait, 1 << 20)) for _ in range(256)]
        await asyncio.sleep(0)  # all have begun; the loop goes on
        with pytest.raises(OverloadError, match="Too many large requests"):
            await threads.run(gate.wait, 1 << 20)
        assert await threads.run(lambda: "small", 100) == "small"
        gate.set()
        done = await asyncio.gather(*works)
        assert done == [True] * 256

    asyncio.run(use())


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (["a" * 90_000] + ["b"] * 999, [1000]),  # NumPy makes 1000 texts of the longest's length
        ([[]] * 30_000, [1]),
        ([[[0] * 10] * 100] * 100, [1]),
        ("[" * 900 + "0, " * 9000 + "0" + "]" * 900, [2]),
    ],
    ids=["text", "empty", "nested", "deep"],
)
def test_memory_for_wrong_values_is_that_of_the_request(data, shape):
    tensor = json.dumps({**GOOD, "shape": shape, "data": 0})
    encoded = data if isinstance(data, str) else json.dumps(data)
    body = f'{{"inputs": [{tensor[:-2]}{encoded}}}]}}'.encode()
    spec = Signature((TensorSpec("x", np.dtype("float32"), (-1,)),), ())
    tracemalloc.start()
    try:
        with pytest.raises(UsageError):
            read_request(body, None, spec)
        assert tracemalloc.get_traced_memory()[1] < 50 * len(body)
    finally:
        tracemalloc.stop()


def test_json_and_messages_of_very_many_values_are_refused_before_they_are_read():
    for each in (b"0,", b"[],", b'"",', b'{"":0},'):
        body = b'{"inputs": [' + each * (5 << 20) + b"0]}"
        with pytest.raises(UsageError, match="send large tensors as binary data"):
            parse_json(body)
    made = messages()["ModelInferRequest"]
    empty = made(model_name="double")
    for name, count in (("inputs", 300_000), ("raw_input_contents", 300_000)):
        many = made()
        if name == "inputs":
            many.inputs.extend([made.InferInputTensor()] * count)
        else:
            many.raw_input_contents.extend([b""] * count)
        with pytest.raises(UsageError, match="fields and texts"):
            check_fields(many.SerializeToString())
    for field, value in (("int64_contents", 1), ("bool_contents", True), ("fp32_contents", 1.5)):
        typed = made.FromString(empty.SerializeToString())
        getattr(typed.inputs.add(name="x").contents, field).extend([value] * (5 << 20))
        with pytest.raises(UsageError, match="numbers in typed contents"):
            check_fields(typed.SerializeToString())
    raw = made(raw_input_contents=[bytes(20 << 20)])
    check_fields(raw.SerializeToString())
    check_fields(b"\xff" * 1_000_000)  # no message, as the parser will say


def grpc_status(server, message, method="ModelInfer"):
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            call(message, timeout=30)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def test_wrong_requests_over_grpc_have_their_status(server):
    made = messages()["ModelInferRequest"]

    def request(raw=(), model="double", **tensor):
        built = made(model_name=model, raw_input_contents=raw)
        built.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [1, 3], **tensor})
        return built.SerializeToString()

    data = np.zeros(3, "float32").tobytes()
    values = {"fp32_contents": [1, 2, 3]}
    assert grpc_status(server, request([data])) == "OK"
    assert grpc_status(server, request(contents=values)) == "OK"
    assert grpc_status(server, request([data], model="other")) == "NOT_FOUND"
    for wrong_request in (
        request(),
        request([data, data]),
        request([data[:-1]]),
        request([data], contents=values),
        request([data], shape=[-1, 3]),
        request([data], datatype="FP31"),
        request([data], name="z"),
        request(contents={"fp64_contents": [1, 2, 3]}),
        request(datatype="FP16"),
        made(model_name="double").SerializeToString(),
    ):
        assert grpc_status(server, wrong_request) == "INVALID_ARGUMENT"
    assert grpc_status(server, b"\xff" * 100) in ("INTERNAL", "INVALID_ARGUMENT", "UNKNOWN")
    for wrong_request in (
        request(shape=[0, 2**62]),
        request([b""], shape=[0, 2**62, 2**62]),
        request([data], shape=[2**62, 2**62]),
        request(shape=[0] * 10_000),
        request([data], name="z" * 9000),
    ):
        assert grpc_status(server, wrong_request) == "INVALID_ARGUMENT"
    twice = made.FromString(request([data]))
    twice.outputs.add(name="y")
    assert grpc_status(server, twice.SerializeToString()) == "OK"
    twice.outputs.add(name="y")
    assert grpc_status(server, twice.SerializeToString()) == "INVALID_ARGUMENT"
    assert grpc_status(server, b"\0" * 200_000) == "RESOURCE_EXHAUSTED"
    assert grpc_status(server, b"", "Nothing") == "UNIMPLEMENTED"


def test_the_descriptors_are_those_of_the_proto_file():
    package = resources.files("bigdl.nano.serving")
    text = package.joinpath("open_inference.proto").read_text()
    content = package.joinpath("open_inference.binpb").read_bytes()
    (file,) = FileDescriptorSet.FromString(content).file
    fields, waiting = [], list(file.message_type)
    while waiting:
        message = waiting.pop()
        if not message.options.map_entry:
            fields += [(field.name, str(field.number)) for field in message.field]
        waiting += message.nested_type
    assert sorted(fields) == sorted(re.findall(r"(\w+) = (\d+);", text))


# Time and load ----------------------------------------------------------------------------------


@pytest.fixture
def slow_server(repository_of, slow_model):
    repository = repository_of(BatchingOptions(max_queue=2, max_batch_size=1), slow=slow_model)
    with ModelServer(repository, http_port=0, grpc_port=0) as server:
        slow_model.close()
        yield server
        slow_model.open.set()


@pytest.mark.parametrize(
    ("scheme", "late", "full"),
    [("http", 504, 503), ("grpc", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")],
)
def test_late_and_too_many_requests_are_told_apart(slow_server, slow_model, scheme, late, full):
    url = f"{scheme}://127.0.0.1:{getattr(slow_server, f'{scheme}_port')}"
    deployed = slow_server.repository.find("slow")
    with Client(url) as client, ThreadPoolExecutor(3) as threads:
        first = threads.submit(client.infer, "slow", {"x": ROWS})
        assert slow_model.entered.acquire(timeout=30)
        with pytest.raises(ServerError) as error:
            client.infer("slow", {"x": ROWS}, timeout=0.1)
        assert error.value.status == late
        others = [threads.submit(client.infer, "slow", {"x": ROWS}) for _ in range(2)]
        end = time.monotonic() + 30
        while deployed.leases < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.2)
        with pytest.raises(ServerError, match="2 requests wait for the model already") as error:
            client.infer("slow", {"x": ROWS})
        assert error.value.status == full
        slow_model.open.set()
        answers = [each.result(30).tolist() for each in (first, *others)]
    assert answers == [(ROWS * 2).tolist()] * 3


def test_the_end_answers_what_has_begun(repository_of, slow_model):
    server = ModelServer(repository_of(slow=slow_model), http_port=0, grpc_port=0)
    slow_model.close()
    answers = []

    def go(url):
        with Client(url) as client:
            answers.append(client.infer("slow", {"x": ROWS}).tolist())

    urls = [f"http://127.0.0.1:{server.http_port}", f"grpc://127.0.0.1:{server.grpc_port}"]
    threads = [threading.Thread(target=go, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    assert slow_model.entered.acquire(timeout=30)
    time.sleep(0.3)  # the other one is in the queue
    closing = threading.Thread(target=server.close)
    closing.start()
    time.sleep(0.2)
    slow_model.open.set()
    for thread in (*threads, closing):
        thread.join(30)
    assert answers == [(ROWS * 2).tolist()] * 2
    with Client(urls[0]) as client, pytest.raises(ServerError, match="does not answer"):
        client.infer("slow", {"x": ROWS})


# Hostile clients --------------------------------------------------------------------------------


def test_garbage_on_every_port_harms_nobody(server, client):
    for port in (server.http_port, server.grpc_port):
        for content in (b"\0" * 1000, b"GET / HTTP/1.1\r\nA: " + b"a" * 300_000, b"POST"):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                try:
                    connection.sendall(content)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                except OSError:
                    pass
    np.testing.assert_array_equal(client.infer("double", ROWS), ROWS * 2)


def test_slow_and_idle_clients_keep_nobody_waiting(server):
    idle = [socket.create_connection(("127.0.0.1", server.http_port)) for _ in range(200)]
    slow = socket.create_connection(("127.0.0.1", server.http_port), timeout=30)
    slow.sendall(b"POST /v2/models/double/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    with Client(f"http://127.0.0.1:{server.http_port}") as client:
        np.testing.assert_array_equal(client.infer("double", ROWS), ROWS * 2)
    assert b"408" in slow.recv(65536).splitlines()[0]
    for connection in (slow, *idle):
        connection.close()


# Access -----------------------------------------------------------------------------------------


def test_tls_and_a_token_are_asked_for(repository_of, certificate):
    repository = repository_of(double=double_runner())
    with ModelServer(
        repository, http_port=0, grpc_port=0, tls=certificate, token="secret"
    ) as server:
        for scheme, port, denied in [
            ("https", server.http_port, 401),
            ("grpcs", server.grpc_port, "UNAUTHENTICATED"),
        ]:
            url, ca = f"{scheme}://127.0.0.1:{port}", str(certificate[0])
            with Client(url, token="secret", ca=ca) as client:
                np.testing.assert_array_equal(client.infer("double", ROWS), ROWS * 2)
            for token in (None, "other"):
                with Client(url, token=token, ca=ca) as client:
                    assert client.is_ready()
                    with pytest.raises(ServerError, match="Authorization: Bearer") as error:
                        client.infer("double", {"x": ROWS})
                    assert error.value.status == denied
            with Client(url, token="secret", timeout=5) as client:  # does not know the certificate
                assert not client.is_live()


def test_other_addresses_warn_without_tls_and_let_nobody_change_models(repository_of):
    repository = repository_of(double=double_runner())
    with (
        pytest.warns(UserWarning, match="listens at 0.0.0.0 without TLS"),
        pytest.warns(UserWarning, match="listens at 0.0.0.0 without a token"),
    ):
        server = ModelServer(repository, host="0.0.0.0", http_port=0, grpc_port=0)
    with server:
        assert ask(server, "POST", "/v2/repository/models/double/unload")[0] == 403
        assert ask(server, "POST", "/v2/models/double/infer", b"{}")[0] == 400


def test_wrong_arguments_leave_nothing_behind(repository_of, certificate, tmp_path):
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, sentence in [
            ({"http_port": port, "grpc_port": None}, "HTTP cannot listen on 127.0.0.1"),
            ({"http_port": 0, "grpc_port": port}, "gRPC cannot listen on 127.0.0.1"),
            ({"http_port": None, "grpc_port": None}, "Pass a port"),
            ({"http_port": 0, "tls": ("none", "none")}, "There is no file 'none'"),
            ({"http_port": 0, "tls": (broken, broken)}, "certificate or its key cannot be used"),
            ({"http_port": 0, "token": " "}, "The token is empty"),
        ]:
            threads = threading.active_count()
            with warnings.catch_warnings(), pytest.raises(UsageError, match=sentence):
                ModelServer(repository_of(double=double_runner()), **arguments)
            assert threading.active_count() <= threads
    with refused("argument-value"):
        Client("127.0.0.1:8000")
