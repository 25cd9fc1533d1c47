"""Clients that send too little, too much or nothing, and what a token is good for."""

import asyncio
import logging
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import warnings
from contextlib import suppress

import grpc
import numpy as np
import pytest
from open_connections import wait_until_disconnected

from bigdl.common.errors import UsageError
from bigdl.nano.serving import Client, HttpAnswer, ModelRepository, ModelServer, ServerError
from bigdl.nano.serving.access import ForbiddenError, Tokens, read_token
from bigdl.nano.serving.grpc_port import GrpcPort, shortened
from bigdl.nano.serving.messages import SERVICE, messages

ROWS = np.ones((1, 3), "float32")
INFER, LIVE = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ServerLive"
HEADERS = (("authorization", "Bearer use"),)


@pytest.fixture
def server(repository_of, slow_model):
    """Start a server with three tokens and a model that can be made to wait."""
    tokens = {"token": "use", "admin_token": "change", "metrics_token": "look"}
    repository = repository_of(slow=slow_model)
    with ModelServer(repository, http_port=0, grpc_port=0, **tokens) as server:
        yield server
        slow_model.open.set()


def read(server, method, path, token=None, body=None):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{server.http_port}{path}"
    return status_of(urllib.request.Request(url, body, headers, method=method))


def status_of(request):
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


class Silent:
    """Streams of gRPC that send their headers and no message."""

    def __init__(self, port, method, count, headers=()):
        self._over = threading.Event()
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
        call = self._channel.stream_unary(method)
        self.calls = [call.future(self._nothing(), metadata=headers) for _ in range(count)]

    def _nothing(self):
        self._over.wait()
        yield from ()

    def codes(self):
        return [call.exception(30).code().name for call in self.calls]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for call in self.calls:
            call.cancel()
        self._over.set()
        self._channel.close()


# gRPC -------------------------------------------------------------------------------------------


def test_streams_without_a_token_are_refused_before_their_message(server):
    with Silent(server.grpc_port, INFER, 64) as silent:
        assert silent.codes() == ["UNAUTHENTICATED"] * 64


@pytest.mark.parametrize(
    ("method", "headers"), [(INFER, HEADERS), ("/grpc.health.v1.Health/Check", ())]
)
def test_streams_without_a_message_keep_nobody_waiting(server, method, headers):
    with (
        Silent(server.grpc_port, method, 200, headers),
        Client(f"grpc://127.0.0.1:{server.grpc_port}", token="use", timeout=20) as client,
    ):
        for _ in range(5):
            assert client.is_live()
            assert client.is_ready("slow")
            np.testing.assert_array_equal(client.infer("slow", {"x": ROWS}), ROWS * 2)


def test_what_asks_about_the_server_is_answered_without_a_message(server):
    with Silent(server.grpc_port, LIVE, 3) as silent:
        answers = [messages()["ServerLiveResponse"].FromString(c.result(30)) for c in silent.calls]
    assert [each.live for each in answers] == [True] * 3


def echo_port(echo, **options):
    """Start a port with one method, `/echo/Echo`."""
    handler = grpc.unary_unary_rpc_method_handler(echo)
    handlers = [grpc.method_handlers_generic_handler("echo", {"Echo": handler})]
    given = {"threads": 1, "most_requests": 2, "most_bytes": 1 << 20, **options}
    port = GrpcPort("127.0.0.1", 0, handlers, check_access=lambda *_: None, **given)
    port.start()
    return port


def test_a_message_has_to_come_in_time():
    port = echo_port(lambda content, call: content, message_seconds=0.2)
    with Silent(port.port, "/echo/Echo", 3) as silent:
        assert silent.codes() == ["DEADLINE_EXCEEDED"] * 3
        assert "did not arrive within 0.2 s" in silent.calls[0].exception().details()
    port.stop(0)


def test_more_requests_than_allowed_get_a_sentence_and_their_places_come_back():
    is_open = threading.Event()

    def echo(content, call):
        assert is_open.wait(30)
        return content

    port = echo_port(echo)
    with grpc.insecure_channel(f"127.0.0.1:{port.port}") as channel:
        call = channel.unary_unary("/echo/Echo")
        asked = [call.future(b"a", wait_for_ready=True) for _ in range(6)]
        end = time.monotonic() + 30
        while sum(each.done() for each in asked) < 4:
            assert time.monotonic() < end
            time.sleep(0.01)
        refused = [each.exception() for each in asked if each.done()]
        assert {error.code().name for error in refused} == {"RESOURCE_EXHAUSTED"}
        assert {error.details() for error in refused} == {
            "Too many concurrent requests; try again later"
        }
        for each in asked:  # clients that go
            each.cancel()
        is_open.set()
        answer = b""
        while answer != b"b":
            assert time.monotonic() < end
            with suppress(grpc.RpcError):  # until the thread of a client that has gone is free
                answer = call(b"b", timeout=30)
    port.stop(0)


def test_a_client_of_many_requests_at_once_gets_answers_or_a_sentence():
    port, seen = echo_port(lambda content, call: content, threads=8, most_requests=64), set()
    with grpc.insecure_channel(f"127.0.0.1:{port.port}") as channel:
        call = channel.unary_unary("/echo/Echo")
        for each in [call.future(b"a", 30) for _ in range(2000)]:
            error = each.exception()
            seen.add("OK" if error is None else f"{error.code().name}: {error.details()}")
    assert "OK" in seen
    busy = "RESOURCE_EXHAUSTED: Too many concurrent requests; try again later"
    assert seen <= {"OK", busy}
    port.stop(0)


def test_what_further_services_do_is_answered_by_its_status(caplog):
    def echo(content, call):
        assert call.is_active()
        assert call.peer().startswith("ipv4:127.0.0.1")
        call.set_trailing_metadata((("size", str(len(content))),))
        if content == b"abort":
            call.abort(grpc.StatusCode.OUT_OF_RANGE, "too far")
        return content[: 1 // (content != b"error")]

    port = echo_port(echo)
    with grpc.insecure_channel(f"127.0.0.1:{port.port}") as channel:
        call = channel.unary_unary("/echo/Echo")
        answer, about = call.with_call(b"abc", timeout=30)
        assert (answer, dict(about.trailing_metadata())) == (b"a", {"size": "3"})
        with pytest.raises(grpc.RpcError, match="too far") as error:
            call(b"abort", timeout=30)
        assert error.value.code() == grpc.StatusCode.OUT_OF_RANGE
        with pytest.raises(grpc.RpcError, match="its log has the details") as error:
            call(b"error", timeout=30)
        assert error.value.code() == grpc.StatusCode.UNKNOWN
        assert "ZeroDivisionError" in caplog.text
    port.stop(0)


def test_a_message_is_measured_when_it_is_unpacked():
    port = echo_port(lambda content, call: content)
    with grpc.insecure_channel(f"127.0.0.1:{port.port}") as channel:
        call = channel.unary_unary("/echo/Echo")
        assert call(bytes(1000), 30, compression=grpc.Compression.Gzip) == bytes(1000)
        with pytest.raises(grpc.RpcError) as error:
            call(bytes(2 << 20), 30, compression=grpc.Compression.Gzip)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    port.stop(0)


def test_a_client_of_grpc_that_reads_nothing_is_cut(monkeypatch):
    from bigdl.nano.serving import grpc_port

    for name in ("keepalive_time", "keepalive_timeout"):
        monkeypatch.setitem(grpc_port.MILLISECONDS, name, 1000)
    port = echo_port(lambda content, call: bytes(16 << 20))
    with socket.create_server(("127.0.0.1", 0)) as between, suppress(OSError):
        channel = grpc.insecure_channel(f"127.0.0.1:{between.getsockname()[1]}")
        asked = channel.unary_unary("/echo/Echo").future(b"")
        client, _ = between.accept()
        with client, socket.create_connection(("127.0.0.1", port.port)) as line:
            line.settimeout(30)
            threading.Thread(target=forward, args=(client, line), daemon=True).start()
            client.sendall(line.recv(4096))  # the settings, without which nothing is sent
            wait_until_disconnected(port.port)
        asked.cancel()
        channel.close()
    port.stop(0)


def forward(source, target):
    with suppress(OSError):
        while content := source.recv(65536):
            target.sendall(content)


def test_bytes_that_are_no_message_are_told_without_a_traceback(server, caplog):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for method in ("ModelInfer", "ModelMetadata"):
            with pytest.raises(grpc.RpcError, match="is no message of") as error:
                channel.unary_unary(f"/{SERVICE}/{method}")(b"\xff" * 9, 30, metadata=HEADERS)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_long_name_is_cut_in_the_sentence(server):
    for name in ("n" * 100_000, "ä" * 50_000):
        with (
            Client(f"grpc://127.0.0.1:{server.grpc_port}", token="use") as client,
            pytest.raises(ServerError, match="There is no model") as error,
        ):
            client.infer(name, {"x": ROWS})
        assert error.value.status == "NOT_FOUND"
        assert len(str(error.value)) < 2100
    assert shortened("ä" * 1500) == "ä" * 1000 + "…"


# HTTP -------------------------------------------------------------------------------------------


def send(server, *parts):
    """Return the bytes that a server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as line:
        answer = b""
        try:
            for part in parts:
                line.sendall(part)
            while content := line.recv(65536):
                answer += content
        except OSError:
            pass  # it was cut
        return answer


@pytest.mark.parametrize("method", ["GET /v2/health/live", "POST /v2/models/slow/infer"])
@pytest.mark.parametrize(
    "endless", [b"X: " + b"a" * 1000 + b"\r\n", b"a" * 1000], ids=["lines", "one line"]
)
def test_trailers_without_end_are_cut(server, method, endless):
    head = f"{method} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "
    sent = 0
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as line:
        try:
            line.sendall(head.encode())
            while sent < 64 << 20:
                sent += line.send(endless * 64)
        except OSError:
            pass
    assert sent < 32 << 20  # most of it was in buffers of the system
    assert read(server, "GET", "/v2/models/slow/ready", "use") == 200


def test_chunks_with_endless_extensions_are_cut(server):
    head = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer use\r\n"
    answer = send(server, head + b"Transfer-Encoding: chunked\r\n\r\n5;", *[b"a" * 65536] * 100)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize("count", [0, 1])
def test_long_and_many_headers_are_refused_also_in_one_packet(server, count):
    many = b"".join(b"X%d: 1\r\n" % number for number in range(300))
    headers = [b"X: " + b"a" * 70_000 + b"\r\n", many][count]
    answer = send(server, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


def test_a_request_after_a_body_that_nobody_reads_gets_no_answer(server):
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
    answer = send(server, get + b"Content-Length: 4\r\n\r\nabcd" + get + b"\r\n")
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer
    assert send(server, get + b"Content-Length: 4\r\n\r\n").count(b"HTTP/1.1 200") == 1


def test_requests_before_their_answers_are_read_a_few_at_a_time():
    count, goes_on = 20_000, threading.Event()

    async def wait(request):
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        return HttpAnswer(b"here")

    routes = {("GET", "/wait"): wait}
    with (
        ModelServer(ModelRepository(), http_port=0, grpc_port=None, routes=routes) as server,
        socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as line,
    ):
        content = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" * count
        sending = threading.Thread(target=line.sendall, args=(content,), daemon=True)
        sending.start()
        time.sleep(0.3)
        protocol = next(iter(server._http._server.server_state.connections))
        assert 1 < len(protocol.pipeline) < 1000
        assert len(protocol.pending) < 1 << 20
        goes_on.set()
        answers = b""
        while answers.count(b"here") < count and (part := line.recv(1 << 20)):
            answers += part
        sending.join()
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == count


def test_a_refused_upload_gets_its_answer_and_its_connection_goes_on(server):
    head = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = send(server, head + b"a" * 1000, b"a" * 99_000, get)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"401", b"200"]


def test_a_client_that_offers_http2_is_answered_by_http1(server):
    described = (
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}'
    )
    post = (
        b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer use\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        + f"Content-Length: {len(described)}\r\n\r\n".encode()
    )
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for parts in (
        (post + described, get),
        (post, described + get),
        (post[:50], post[50:] + described + get),
    ):
        answer = send(server, *parts)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200"]
        assert b'"data":[2.0,4.0,6.0]' in answer.replace(b" ", b"")


@pytest.fixture
def quick_http(monkeypatch):
    from bigdl.nano.serving import http_thread

    for name in ("SENDING_S", "LATE_S", "HEAD_S", "IDLE_S"):
        monkeypatch.setattr(http_thread, name, 0.2)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n",
        b"GET /v2",
        b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
    ],
    ids=["does not read", "an empty line", "half a head", "half a body"],
)
def test_connections_on_which_nothing_goes_on_are_ended(repository_of, quick_http, sent):
    async def large(request):
        return HttpAnswer(bytes(64 << 20))

    routes = {("GET", "/large"): large}
    with (
        ModelServer(repository_of(), http_port=0, grpc_port=None, routes=routes) as server,
        socket.create_connection(("127.0.0.1", server.http_port)) as line,
    ):
        line.sendall(sent)
        time.sleep(0.1)
        wait_until_disconnected(server.http_port)


# Tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "statuses"),
    [
        (None, (401, 401, 401, 200)),
        ("other", (401, 401, 401, 200)),
        ("use", (200, 403, 403, 200)),
        ("look", (403, 403, 200, 200)),
        ("change", (200, 200, 200, 200)),
    ],
)
def test_each_token_is_good_for_its_purpose(server, token, statuses):
    traffic = "/v2/repository/models/slow/traffic"
    assert (
        read(server, "GET", "/v2/models/slow", token),
        read(server, "POST", traffic, token, b'{"shares": {"1": 1}}'),
        read(server, "GET", "/metrics", token),
        read(server, "GET", "/v2/health/live", token),
    ) == statuses
    with Client(f"grpc://127.0.0.1:{server.grpc_port}", token=token) as client:
        names = {200: "OK", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}
        for call, status in ((client.models, statuses[0]), (client.unload, statuses[1])):
            arguments = ("slow",) if call == client.unload else ()
            try:
                call(*arguments)
                outcome = "OK"
            except ServerError as error:
                outcome = error.status
            assert outcome == names[status]


def test_a_run_is_watched_by_the_token_of_metrics(server):
    from bigdl.nano.serving import ServingRun

    url = f"http://127.0.0.1:{server.http_port}"
    with (
        ServingRun(f"{url}/metrics", every=60, token="look") as run,
        Client(url, token="use") as client,
    ):
        client.infer("slow", {"x": ROWS})
    assert run.rows()[0]["requests"] == 1


def test_bearer_is_read_in_any_case_and_one_header_is_taken(server):
    def status(*headers):
        request = b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        content = b"".join(b"Authorization: " + each + b"\r\n" for each in headers)
        return send(server, request + content + b"\r\n").split()[1]

    assert status(b"Bearer use") == status(b"bearer use") == status(b"BEARER  use") == b"200"
    assert status(b"Basic use") == status(b"use") == status(b"Bearer") == b"401"
    assert status(b"Bearer use", b"Bearer use") == status(b"Bearer no", b"Bearer use") == b"401"
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ServerMetadata")
        assert call(b"", 30, metadata=(("authorization", "bearer use"),))
        with pytest.raises(grpc.RpcError, match="several headers") as error:
            call(b"", 30, metadata=HEADERS * 2)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_changes_are_off_unless_they_are_asked_for(repository_of, slow_model):
    def status(**options):
        repository = repository_of(slow=slow_model)
        with ModelServer(repository, http_port=0, grpc_port=None, **options) as server:
            traffic = "/v2/repository/models/slow/traffic"
            return read(server, "POST", traffic, options.get("token"), b"{}")

    assert status() == 403
    assert status(token="use") == 403
    assert status(changes=True) == 200
    assert status(admin_token="change", changes=False) == 401
    with pytest.raises(UsageError, match="only by an admin token"):
        status(token="use", changes=True)
    with pytest.raises(UsageError, match="admin token is the same as another one"):
        status(token="use", admin_token="use")
    with pytest.raises(UsageError, match="The metrics token is empty"):
        status(metrics_token=" ")


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-origin", 200)])
def test_pages_of_other_sites_change_nothing(repository_of, slow_model, site, status):
    repository = repository_of(slow=slow_model)
    with ModelServer(repository, http_port=0, grpc_port=None, changes=True) as server:
        url = f"http://127.0.0.1:{server.http_port}/v2/repository/models/slow/traffic"
        request = urllib.request.Request(url, b"{}", {"Sec-Fetch-Site": site}, method="POST")
        assert status_of(request) == status
        slow_model.open.set()


def test_metrics_take_the_token_of_requests_where_they_have_none_of_their_own():
    tokens = Tokens("use", "change")
    tokens.check("Bearer use", "metrics")
    with pytest.raises(ForbiddenError, match="takes the admin token"):
        tokens.check("Bearer use", "admin")
    Tokens(admin="change").check(None)
    assert "use" not in repr(tokens)


def test_a_server_that_others_reach_without_a_token_warns(repository_of):
    def sentences(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ModelServer(
                repository_of(), host="0.0.0.0", http_port=0, grpc_port=None, **options
            ).close()
        return [re.search("without ([^,]*)", str(each.message))[1] for each in caught]

    assert sentences() == ["TLS", "a token"]
    assert sentences(token="use") == ["TLS"]


@pytest.mark.parametrize(
    ("mode", "warns"), [(0o600, False), (0o440, False), (0o644, True), (0o660, True)]
)
def test_a_token_that_others_can_read_or_change_is_one_warning(tmp_path, mode, warns):
    file = tmp_path / "token"
    file.write_text("secret\n")
    os.chmod(file, mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read_token(file) == "secret"
    assert len(caught) == warns
    assert all(f"mode {mode:04o}" in str(each.message) for each in caught)
