"""Streams of the OpenAI protocol with TLS, during a drain, and for clients that do harm."""

import json
import random
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPSConnection

import pytest
from damaged_bytes import damaged
from open_connections import wait_until_disconnected
from text_models import tiny_decoder, tiny_encoder

from bigdl.nano.serving import ModelRepository, ModelServer, ServingLimits

pytestmark = pytest.mark.slow

CHAT = {
    "model": "writer",
    "messages": [{"role": "user", "content": "the cat sat"}],
    "max_tokens": 200,
    "temperature": 0,
    "stream": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    tiny_decoder(root / "models" / "writer", positions=4096, longest=4096)
    tiny_encoder(root / "models" / "reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield root / "models"


@contextmanager
def served(models, **options):
    repository = ModelRepository(models)
    repository.load_all()
    limits = ServingLimits(max_new_tokens=2000, max_request_bytes=1 << 20, body_timeout=5)
    with ModelServer(repository, http_port=0, grpc_port=None, limits=limits, **options) as server:
        yield server


def post(connection, content, path="/v1/chat/completions", token=None):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request("POST", path, json.dumps(content), headers)
    return connection.getresponse()


def words(lines):
    """Return the text of a stream that ended as the protocol says."""
    parts = [line.removeprefix(b"data: ").strip() for line in lines if line.strip()]
    assert parts[-1] == b"[DONE]", parts[-1]
    choices = [json.loads(part)["choices"][0] for part in parts[:-1]]
    assert choices[-1]["finish_reason"] in ("length", "stop")
    return "".join(each["delta"].get("content", "") for each in choices)


def test_streams_over_tls_need_the_token(models, certificate):
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with served(models, tls=certificate, token="secret") as server:
        address = ("127.0.0.1", server.http_port)
        plain = HTTPSConnection(*address, context=context, timeout=200)
        assert post(plain, CHAT).status == 401
        plain.close()
        texts = set()
        for _ in range(2):
            connection = HTTPSConnection(*address, context=context, timeout=200)
            texts.add(words(post(connection, CHAT, token="secret").read().splitlines()))
            connection.close()
        assert len(texts) == 1


def test_a_drained_server_ends_its_streams_and_accepts_no_other(models):
    with served(models) as server:
        connection = HTTPConnection("127.0.0.1", server.http_port, timeout=200)
        response = post(connection, {**CHAT, "max_tokens": 1500, "logprobs": True})
        lines = [response.readline() for _ in range(4)]
        closing = threading.Thread(target=server.close)
        closing.start()
        while not server.service.draining:
            time.sleep(0.01)
        words([*lines, *response.read().splitlines()])
        connection.close()
        closing.join()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.http_port), 5)


def test_a_client_that_reads_nothing_is_cut_off(models, monkeypatch):
    from bigdl.nano.serving import http_thread

    monkeypatch.setattr(http_thread, "SENDING_S", 0.5)
    content = {**CHAT, "max_tokens": 2000, "n": 16, "logprobs": True}
    body = json.dumps(content).encode()
    with served(models) as server:
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", server.http_port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        line.sendall(f"{head}\r\n\r\n".encode() + body)
        assert line.recv(12) == b"HTTP/1.1 200"
        wait_until_disconnected(server.http_port, 120)
        line.close()
        connection = HTTPConnection("127.0.0.1", server.http_port, timeout=200)
        words(post(connection, CHAT).read().splitlines())  # others are answered
        connection.close()


def test_damaged_requests_are_refused_or_answered(models):
    chance = random.Random(2)
    bodies = {
        "/v1/chat/completions": {**CHAT, "stream": False, "max_tokens": 2, "stop": ["a"], "n": 1},
        "/v1/completions": {"model": "writer", "prompt": "the cat", "max_tokens": 2, "seed": 1},
        "/v1/embeddings": {"model": "reader", "input": ["a cat", "a dog"]},
        "/v1/rerank": {"model": "reader", "query": "cat", "documents": ["a", "b"], "top_n": 1},
    }
    seen = set()
    with served(models) as server:
        connection = HTTPConnection("127.0.0.1", server.http_port, timeout=200)
        for number in range(1200):
            path = list(bodies)[number % 4]
            body = damaged(json.dumps(bodies[path]).encode(), chance)
            connection.request("POST", path, body)
            response = connection.getresponse()
            content = response.read()
            seen.add(response.status)
            assert response.status in (200, 400, 404), (path, body, content)
            if response.status != 200:
                assert json.loads(content)["error"]["message"]
        connection.close()
        assert seen >= {200, 400}
        for path, content in bodies.items():
            connection = HTTPConnection("127.0.0.1", server.http_port, timeout=200)
            assert post(connection, content, path).status == 200
            connection.close()
