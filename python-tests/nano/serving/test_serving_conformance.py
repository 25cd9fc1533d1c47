"""A model server is asked by what others wrote: tritonclient, Schemathesis, and fuzzers.

The two come from PyPI into an environment of their own, so they need a network.
"""

import json
import os
import random
import socket
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest
from damaged_bytes import damaged

from bigdl.nano.serving import Client, ModelServer, ServingLimits

HERE = Path(__file__).parent
ROWS = np.array([[-1, 2, 3]], "float32")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """Return the program folder of a virtual environment with tritonclient and Schemathesis."""
    home = tmp_path_factory.mktemp("tools")
    venv.create(home, with_pip=True)
    installed = subprocess.run(
        [home / "bin" / "python", "-m", "pip", "install", "-q", "tritonclient[http,grpc]>=2.60",
         "schemathesis>=4,<5"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"pip cannot install tritonclient and schemathesis: {installed.stderr[-200:]}")
    return home / "bin"


@pytest.fixture(scope="module")
def server(tmp_path_factory, save_network):
    root = tmp_path_factory.mktemp("models")
    save_network(root / "relu" / "1", lambda opset, x: opset.relu(x))
    limits = ServingLimits(max_request_bytes=1 << 20, body_timeout=2)
    with ModelServer(root, http_port=0, grpc_port=0, limits=limits) as server:
        yield server


def run(*command, folder=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"capture_output": True, "text": True, "timeout": 280}
    return subprocess.run(list(map(str, command)), env=environment, cwd=folder, **options)


def still_answers(server):
    for url in (f"http://127.0.0.1:{server.http_port}", f"grpc://127.0.0.1:{server.grpc_port}"):
        with Client(url) as client:
            np.testing.assert_array_equal(client.infer("relu", ROWS), np.maximum(ROWS, 0))


def test_tritonclient_is_answered(server, tools):
    program = HERE / "tritonclient_program.py"
    result = run(tools / "python", program, server.http_port, server.grpc_port)
    assert result.stdout == "conforms\n", result.stderr


def test_schemathesis_finds_nothing(server, tools, tmp_path):
    result = run(
        tools / "schemathesis",
        "run",
        f"http://127.0.0.1:{server.http_port}/openapi.json",
        "--exclude-path-regex=/unload$",
        "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance",
        "--max-examples=10",
        "--seed=1",
        "--no-color",
        folder=tmp_path,  # for what it keeps of a run
    )
    assert result.returncode == 0, result.stdout[-6000:]
    still_answers(server)


def test_damaged_tensors_over_http_are_refused_or_answered(server):
    import http.client

    chance = random.Random(1)
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 3]}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 24}}]}).encode()
    plain = json.dumps({"inputs": [{**tensor, "data": [1, 2, 3, 4, 5, 6]}]}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    seen = set()
    for number in range(3000):
        headers = {}
        if number % 2:
            body = damaged(head + np.zeros(6, "float32").tobytes(), chance)
            length = len(head) + chance.choice((0, 0, 0, 1, -1, -len(head), 10**9))
            headers["Inference-Header-Content-Length"] = str(length)
        else:
            body = damaged(plain, chance)
        connection.request("POST", "/v2/models/relu/infer", body, headers)
        response = connection.getresponse()
        content = response.read()
        seen.add(response.status)
        assert response.status in (200, 400), (body, content)
    assert seen == {200, 400}
    still_answers(server)


def test_damaged_messages_over_grpc_are_refused_or_answered(server):
    import grpc

    from bigdl.nano.serving.messages import SERVICE, messages

    chance = random.Random(2)
    request = messages()["ModelInferRequest"](model_name="relu", id="1")
    request.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    request.raw_input_contents.append(np.zeros(6, "float32").tobytes())
    request.parameters["timeout"].int64_param = 10**7
    content, seen, sentences = request.SerializeToString(), set(), []
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for _ in range(3000):
            try:
                call(damaged(content, chance), timeout=30)
                seen.add("OK")
            except grpc.RpcError as error:
                seen.add(error.code().name)
                sentences.append(error.details())
    # gRPC itself answers INTERNAL for bytes that are no message
    assert seen <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL", "DEADLINE_EXCEEDED"}, seen
    assert {"OK", "INVALID_ARGUMENT"} <= seen
    assert not [each for each in sentences if "log says why" in each]
    still_answers(server)


def test_thousands_of_idle_connections_keep_nobody_waiting(server):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 12_000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    count = min(5_000, wanted // 2 - 500)  # both ends are in this process
    try:
        for port in (server.http_port, server.grpc_port):
            idle = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(count)]
            still_answers(server)
            for each in idle:
                each.close()
        still_answers(server)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_requests_at_once_are_answered_or_refused(server):
    from concurrent.futures import ThreadPoolExecutor

    from bigdl.nano.serving import ServerError

    url = f"http://127.0.0.1:{server.http_port}"

    def ask(client):
        try:
            return client.infer("relu", {"x": ROWS}).tolist()
        except ServerError as error:
            return error.status

    with Client(url) as client, ThreadPoolExecutor(100) as threads:
        answers = list(threads.map(ask, [client] * 1000))
    expected = np.maximum(ROWS, 0).tolist()
    assert all(answer in (expected, 503) for answer in answers)
    assert answers.count(expected) > 900
