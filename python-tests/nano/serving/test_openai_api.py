"""The OpenAI protocol: chats, completions, embeddings and reranking of text models."""

import base64
import functools
import json
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection

import numpy as np
import pandas as pd
import pytest
from text_models import smollm, tiny_encoder

from bigdl.llm import TextModel, embed
from bigdl.llm.generator import StreamedText
from bigdl.nano.serving import ModelRepository, ModelServer, ServingLimits

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Give the module a cache of converted models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@contextmanager
def served(root, **options):
    repository = ModelRepository(root)
    repository.load_all()
    with ModelServer(repository, http_port=0, grpc_port=None, **options) as server:
        yield server


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    tiny_encoder(root / "tiny")
    with served(root, token="secret") as server:
        yield server, root / "tiny"


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    pytest.importorskip("openvino_genai")
    root = tmp_path_factory.mktemp("writers")
    (root / "smol").mkdir()
    (root / "smol" / "model.gguf").symlink_to(smollm())
    with served(root, limits=ServingLimits(max_new_tokens=256)) as server:
        yield server


def call(server, path, content=None, token="secret", method=None):
    """Return the status and the JSON of a request."""
    connection = HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    body = None if content is None else json.dumps(content)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection.request(method or ("GET" if content is None else "POST"), path, body, headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text[:1] in b"{[" else text.decode()


def events(server, content, most=None):
    """Return the events of a stream, of which at most `most` are read."""
    connection = HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    body = json.dumps({"model": "smol", "stream": True, **content})
    connection.request("POST", "/v1/chat/completions", body)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    parts = []
    while (line := response.readline()) and (most is None or len(parts) < most):
        if line.strip():
            parts.append(line.removeprefix(b"data: ").strip())
    connection.close()
    return parts


def text_of(parts):
    assert parts[-1] == b"[DONE]"
    choices = [json.loads(part)["choices"][0] for part in parts[:-1]]
    return "".join(each["delta"].get("content", "") for each in choices)


def metric(server, name):
    lines = call(server, "/metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_embeddings_are_those_of_the_table_functions(encoder):
    server, folder = encoder
    texts = ["a cat", "the dog sat on the mat", ""]
    status, answer = call(server, "/v1/embeddings", {"model": "tiny", "input": texts})
    assert status == 200
    vectors = np.array([each["embedding"] for each in answer["data"]])
    expected = embed(pd.DataFrame({"text": texts}), "text", model=TextModel(folder)).embedding
    assert np.allclose(vectors, np.stack(expected), atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == 4 + 8 + 2
    request = {"model": "tiny", "input": "a cat", "encoding_format": "base64"}
    cell = call(server, "/v1/embeddings", request)[1]["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(cell), "<f4"), vectors[0], atol=1e-6)
    documents = [{"text": text} for text in texts]
    request = {"model": "tiny", "query": "a cat", "documents": documents, "top_n": 2}
    results = call(server, "/v1/rerank", request)[1]["results"]
    assert results[0]["index"] == 0
    assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    assert len(results) == 2
    assert [each["id"] for each in call(server, "/v1/models")[1]["data"]] == ["tiny"]
    binary = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a cat"]}
    outputs = call(server, "/v2/models/tiny/infer", {"inputs": [binary]})[1]["outputs"]
    assert np.allclose(outputs[0]["data"], vectors[0], atol=1e-5)


def test_wrong_requests_are_named(encoder):
    server, _ = encoder
    request = {"model": "tiny", "input": "a"}
    assert call(server, "/v1/embeddings", request, token="wrong")[0] == 401
    for content, status, words in [
        ({**request, "model": "other"}, 404, "'other'"),
        ({**request, "input": [1, 2]}, 400, "token ids"),
        ({**request, "input": []}, 400, "got 0"),
        ({**request, "dimensions": 7}, 400, "dimensions must be 16"),
        ({"input": "a"}, 400, "model is missing"),
    ]:
        answer = call(server, "/v1/embeddings", content)
        assert answer[0] == status, answer
        assert words in answer[1]["error"]["message"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    for more, words in [
        ({}, "'embed'"),
        ({"messages": []}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ]:
        status, answer = call(server, "/v1/chat/completions", {**chat, **more})
        assert status == 400, answer
        assert words in answer["error"]["message"]
    often = "((a{999}){999}){999}"
    many = {"type": "array", "maxItems": 4096, "items": {"type": "array", "maxItems": 2}}
    for schema in [
        {"type": "text"},
        {"pattern": "((("},
        {"pattern": "(a{1,900}){1,900}"},
        {"properties": {"enum": {"type": "string", "pattern": often}}},
        {"patternProperties": {often: {}}},
        {"allOf": functools.reduce(lambda inner, _: [inner], range(99), [])},
        many,
        {"enum": ["a" * 70_000]},
    ]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, answer = call(server, "/v1/chat/completions", {**chat, "response_format": form})
        assert status == 400, schema
        assert "schema" in answer["error"]["message"], answer


def test_streamed_text_waits_for_characters_and_stop_strings():
    pieces = ["The", " caf", "\ufffd", "é is", " nice", " and", " STOPPED"]

    def decode(ids):  # tokens 2 and 3 are bytes of one character
        text = "".join(pieces[i] for i in ids)
        return text.replace("\ufffdé", "é")

    text = StreamedText(decode, ["nice and S"])
    parts = [text.add([index], index == 6) for index in range(7)]
    assert "".join(parts) == "The café is "
    assert parts[2:5] == ["", "é is", " "]
    assert text.stopped
    whole = StreamedText(decode, ["never"])
    assert "".join(whole.add([i], i == 6) for i in range(7)) == "The café is nice and STOPPED"


@pytest.mark.slow
def test_streams_of_many_clients_are_not_mixed(writer):
    answers: dict[int, str] = {}

    def client(index: int) -> None:
        if index % 5 == 3:  # leaves early
            events(writer, {"messages": QUESTION, "max_tokens": 200}, 2)
            return
        schema = {"enum": [f"answer number {index}"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        if index % 5 == 4:
            time.sleep(0.2)
        content = {"messages": QUESTION, "max_tokens": 40, "response_format": form}
        answers[index] = json.loads(text_of(events(writer, content)))

    threads = [threading.Thread(target=client, args=(index,)) for index in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {n: f"answer number {n}" for n in range(50) if n % 5 != 3}
    assert answers == expected
    for _ in range(100):
        if not metric(writer, "bigdl_requests_in_flight"):
            break
        time.sleep(0.1)
    assert metric(writer, "bigdl_requests_in_flight") == 0
    deployed = writer.repository.find("smol")
    for _ in range(100):
        if not deployed.leases:
            break
        time.sleep(0.1)
    assert deployed.leases == 0
    assert 1 <= metric(writer, 'bigdl_requests_total{code="cancelled"') <= 10


@pytest.mark.slow
def test_answers_follow_stop_schema_seed_and_limits(writer):
    def answer(**content):
        request = {"model": "smol", "messages": QUESTION, "temperature": 0, **content}
        status, result = call(writer, "/v1/chat/completions", request)
        assert status == 200, result
        return result["choices"][0]

    whole = answer(max_tokens=12, logprobs=True)
    assert "Paris" in whole["message"]["content"]
    assert len(whole["logprobs"]["content"]) <= 12
    cut = answer(max_tokens=12, stop=["capital of"])
    assert (cut["message"]["content"], cut["finish_reason"]) == ("The ", "stop")
    assert answer(max_tokens=2)["finish_reason"] == "length"
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    content = answer(max_tokens=40, response_format=form)["message"]["content"]
    assert list(json.loads(content)) == ["city"]
    draws = [answer(temperature=1, seed=5, max_tokens=8)["message"]["content"] for _ in range(2)]
    assert draws[0] == draws[1]
    long = [{"role": "user", "content": "word " * 9000}]
    status, result = call(writer, "/v1/chat/completions", {"model": "smol", "messages": long})
    assert status == 400
    assert "tokens" in result["error"]["message"]
    status, result = call(
        writer, "/v1/completions", {"model": "smol", "prompt": "The capital of France is"}
    )
    assert status == 200
    assert result["usage"]["completion_tokens"] <= 16


@pytest.mark.slow
def test_a_grammar_that_cannot_be_compiled_leaves_other_streams_alone(writer):
    texts = []
    content = {"messages": QUESTION, "temperature": 0, "max_tokens": 200}
    thread = threading.Thread(target=lambda: texts.append(text_of(events(writer, content))))
    thread.start()
    # A valid pattern for Python that the engine does not know.
    schema = {"type": "string", "pattern": "^(?P<name>a)(?P=name)(?<=a)$"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = {"model": "smol", "messages": QUESTION, "response_format": form}
    status, answer = call(writer, "/v1/chat/completions", request)
    assert status == 400, answer
    assert "cannot be generated" in answer["error"]["message"]
    thread.join()
    assert texts[0].startswith("The capital of France is Paris")


@pytest.mark.slow
def test_clients_that_leave_at_any_moment_leave_the_model_alive(writer):
    content = {"messages": QUESTION, "temperature": 0, "max_tokens": 64}

    def client(most: int) -> None:
        events(writer, content, most=most)

    clients = [threading.Thread(target=client, args=(index % 7,)) for index in range(40)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert text_of(events(writer, content)).startswith("The capital of France is Paris")
    # the most probable token only, as with temperature 0
    request = {**content, "model": "smol", "temperature": 1.5, "top_p": 0}
    answer = call(writer, "/v1/chat/completions", request)[1]
    assert answer["choices"][0]["message"]["content"].startswith("The capital of France is Paris")
