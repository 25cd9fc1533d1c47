"""Tests of servers under faults: kills, timeouts, full disks, damage and hostile clients."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import venv
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress

import grpc
import numpy as np
import pandas as pd
import pytest
import torch
from damaged_bytes import damaged
from served_catalogue import Linear, items_frame, start_redis, users_frame
from served_program import ended, expected, made_in, started, wait_for, written

from bigdl.common.errors import UsageError
from bigdl.friesian.models import DeepFM
from bigdl.friesian.serving import (
    EmbeddedStore,
    FeatureService,
    GrpcServer,
    HttpServer,
    IndexRecall,
    ItemIndex,
    Limits,
    Recommender,
    RecommenderClient,
    RecommenderService,
    RemoteFeatures,
    open_store,
    wire,
)
from bigdl.nano.serving import ModelRepository
from bigdl.nano.serving.service import InferenceService, ServingLimits

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)
KNOWN, K = [1, 3, 5, 7], 5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_in(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="module")
def program(folder):
    """Start a server of all stages in a separate process; return it and its ports."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, 1 << 16)), hard))
    process = started(folder[1])
    yield process, folder[2]
    _, err = ended(process)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Build a store, an index and a recommender in this process."""
    users, items = users_frame(), items_frame()
    store = EmbeddedStore(tmp_path_factory.mktemp("store") / "s")
    store.replace({"user": users, "item": items.drop(columns="vector")})
    index = ItemIndex(items["item"], np.stack(items["vector"]))
    with Recommender(store, IndexRecall(store, index, seen_col="seen"), Linear()) as recommender:
        yield store, recommender


def answered(ports):
    """Recommend items to known users through a new client."""
    with RecommenderClient(f"127.0.0.1:{ports['recommender']}", timeout=20) as client:
        return [each.item_ids.tolist() for each in client.recommend(KNOWN, K)]


@contextmanager
def load(port, threads=4):
    """Run clients that send requests in a loop; return all answers and error names."""
    outcomes, ending = [], threading.Event()

    def ask():
        with RecommenderClient(f"127.0.0.1:{port}", timeout=20) as client:
            while not ending.is_set():
                try:
                    found = client.recommend(KNOWN, K)
                    outcomes.append([each.item_ids.tolist() for each in found])
                except grpc.RpcError as error:
                    outcomes.append(error.code().name)
                    time.sleep(0.05)

    asking = [threading.Thread(target=ask) for _ in range(threads)]
    for each in asking:
        each.start()
    try:
        yield outcomes
    finally:
        ending.set()
        for each in asking:
            each.join()


# Ends and beginnings ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault
def test_a_server_killed_under_load_is_back_without_a_wrong_answer(folder):
    _, config, ports, _ = folder
    wanted = expected(folder, KNOWN, K)
    process = started(config)
    with load(ports["recommender"]) as outcomes:
        wait_for(lambda: outcomes.count(wanted) > 50)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed = time.monotonic()
        process = started(config)
        ready = time.monotonic() - killed
        before = len(outcomes)
        wait_for(lambda: outcomes[before:].count(wanted) > 50)
        back = time.monotonic() - killed
    ended(process)
    print(f"ready {ready:.1f} s after the kill, answers again within {back:.1f} s")
    wrong = [each for each in outcomes if each not in (wanted, "UNAVAILABLE")]
    assert not wrong, wrong[:3]


@needs_redis
@pytest.mark.slow
@pytest.mark.fault
def test_popular_items_are_answered_while_redis_is_gone(folder, tmp_path):
    made, _, ports, _ = folder
    wanted = expected(folder, KNOWN, K)
    options = "--appendonly", "yes", "--appendfsync", "always"
    redis, port = start_redis(tmp_path, *options)
    try:
        with open_store(f"redis://127.0.0.1:{port}") as store:
            tables = {"user": users_frame(), "item": items_frame().drop(columns="vector")}
            store.replace(tables)
        text = (made / "serving.yaml").read_text()
        there = f"store:\n  location: redis://127.0.0.1:{port}\n"
        process = started(written(made, text.replace("store: features\n", there), "redis.yaml"))
        try:
            assert answered(ports) == wanted
            redis.kill()
            redis.wait()
            with load(ports["recommender"]) as outcomes:
                wait_for(lambda: len(outcomes) > 20)
            assert outcomes[-1] == [[3, 0, 6]] * len(KNOWN), outcomes[-1]
            redis, _ = start_redis(tmp_path, *options, port=port)
            wait_for(lambda: answered(ports) == wanted)
        finally:
            ended(process)
    finally:
        redis.kill()
        redis.wait()


@pytest.mark.slow
def test_fifty_reloads_under_load_lose_no_request_and_damaged_ones_are_refused(folder, tmp_path):
    """Test that each answer uses one version of the index and of the model during swaps."""
    from bigdl.nano.pytorch import InferenceOptimizer

    made, _, ports, model = folder
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    items = items_frame()
    vectors = np.stack(items["vector"])
    indexes = [ItemIndex(items["item"], each) for each in (vectors, -vectors)]
    torch.manual_seed(1)
    other = DeepFM({"user": 700, "item": 1300, "kind": 9}, ["price"], dim=4, hidden=(8,)).eval()
    store = EmbeddedStore(copy / "features")
    both = tmp_path / "index0", tmp_path / "index1"
    for index, path in zip(indexes, both, strict=True):
        index.save(path)
    sample = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64),
              torch.zeros(2, dtype=torch.int8), torch.zeros(2))  # fmt: skip
    for number, each in enumerate((model, other)):
        saved = InferenceOptimizer.trace(each, accelerator="openvino", input_sample=sample)
        InferenceOptimizer.save(saved, str(tmp_path / f"model{number}"))

    def of(index, ranker):
        from bigdl.friesian.serving import ModuleRanker

        recall = IndexRecall(store, indexes[index], seen_col="seen")
        scorer = ModuleRanker((model, other)[ranker])
        with Recommender(store, recall, scorer, candidates=40) as one:
            return [each.item_ids.tolist() for each in one.recommend(KNOWN, K)]

    right = {(i, m): of(i, m) for i in (0, 1) for m in (0, 1)}
    assert len({str(each) for each in right.values()}) == 4
    process = started(str(copy / "serving.yaml"))
    try:
        with load(ports["recommender"], 2) as outcomes:
            wait_for(lambda: outcomes.count(right[0, 0]) > 5)
            index, ranker = 0, 0
            for number in range(25):
                index, ranker = 1 - index, (number // 2) % 2 if number % 2 else 1 - ranker
                indexes[index].save(copy / "index")
                aside = copy / "model.new"
                shutil.copytree(tmp_path / f"model{ranker}", aside)
                os.rename(copy / "model", copy / f"old{number}")
                os.rename(aside, copy / "model")
                wanted, before = right[index, ranker], len(outcomes)
                wait_for(lambda w=wanted, b=before: w in outcomes[b:])
            (file,) = (copy / "index").glob("files-*/base.faiss")
            file.write_bytes(b"none")
            (copy / "index" / "index.json").write_text("{")
            damage = copy / "damaged.xml"
            damage.write_bytes((copy / "model" / "ov_saved_model.xml").read_bytes()[:500])
            os.replace(damage, copy / "model" / "ov_saved_model.xml")
            before = len(outcomes)
            time.sleep(5)
            assert outcomes[before:].count(wanted) > 5
            assert set(map(str, outcomes[before:])) == {str(wanted)}
    finally:
        _, err = ended(process)
    kinds = Counter(map(str, outcomes))
    assert set(kinds) <= {str(each) for each in right.values()}, kinds
    assert "The new index cannot be used" in err
    assert "the version loaded before stays in use" in err  # the model


@needs_redis
def test_a_full_redis_leaves_the_version_before(tmp_path):
    process, port = start_redis(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    try:
        with open_store(f"redis://127.0.0.1:{port}") as store:
            store.replace({"user": pd.DataFrame({"user": [1], "age": [1]})})
            large = pd.DataFrame({"user": range(60_000), "age": 2})
            with pytest.raises(UsageError, match="maxmemory"):
                store.replace({"user": large})
            assert store.read("user", [1, 2])["age"].tolist() == [1, 0]
            assert store.version == 1
    finally:
        process.kill()
        process.wait()


# Slow and idle clients --------------------------------------------------------------------------


def test_a_body_that_does_not_come_is_given_up(stages):
    limits = ServingLimits(body_timeout=0.5)
    service = InferenceService(ModelRepository(), limits, needs_models=False)
    with HttpServer(stages[1], service=service) as web:
        address = "127.0.0.1", web.port
        head = b"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
        with socket.create_connection(address, 30) as slow, ExitStack() as idle:
            for _ in range(100):
                idle.enter_context(socket.create_connection(address, 30))
            slow.sendall(head)
            content = json.dumps({"users": [1]}).encode()
            url = f"http://127.0.0.1:{web.port}/recommend"
            assert urllib.request.urlopen(url, content, 30).status == 200
            told = slow.recv(65536)
            assert b"408" in told.splitlines()[0]
            assert slow.recv(65536) == b""  # the connection is closed


class Stalled:
    """Open a connection to a server and never read its answers."""

    def __init__(self, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = socket.create_connection(("127.0.0.1", port))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self):
        client, _ = self._listener.accept()
        with client, suppress(OSError):  # closed at the end
            client.sendall(self._server.recv(4096))  # the settings, without which nothing is sent
            while content := client.recv(65536):
                self._server.sendall(content)

    def close(self):
        self._listener.close()
        self._server.close()


@pytest.mark.slow
def test_clients_that_do_not_read_keep_nobody_waiting(stages):
    with GrpcServer([FeatureService(stages[0])], threads=4) as server, ExitStack() as stack:
        request = wire.message("feature.IDs")(ID=[1] * 9_000).SerializeToString()
        late = []
        for _ in range(12):
            stalled = Stalled(server.port)
            stack.callback(stalled.close)
            options = [("grpc.max_receive_message_length", -1)]
            channel = grpc.insecure_channel(f"127.0.0.1:{stalled.port}", options)
            stack.callback(channel.close)
            late.append(channel.unary_unary("/feature.Feature/getUserFeatures").future(request))
        time.sleep(0.5)
        with RemoteFeatures(f"127.0.0.1:{server.port}", timeout=20) as features:
            assert features.read("user", [1]).found.tolist() == [True]
        assert not any(each.done() and each.exception() is None for each in late)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http", "recommender"])
def test_ten_thousand_idle_connections_keep_nobody_waiting(program, folder, kind):
    import resource

    process, ports = program
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 11_000:
        pytest.skip("a process may have fewer than 11,000 open files here")
    wanted = expected(folder, KNOWN, K)
    with ExitStack() as idle:
        for _ in range(10_000):
            line = socket.create_connection(("127.0.0.1", ports[kind]), 30)
            idle.enter_context(line)
            if kind == "recommender":
                line.sendall(PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert answered(ports) == wanted
        url = f"http://127.0.0.1:{ports['http']}/recommend/1"
        assert json.load(urllib.request.urlopen(url, timeout=30))["recommendations"]
    assert answered(ports) == wanted
    assert process.poll() is None


# Hostile messages -------------------------------------------------------------------------------


@pytest.mark.slow
def test_garbage_and_oversize_messages_on_every_port_harm_nobody(program, folder):
    process, ports = program
    chance = random.Random(3)
    wanted = expected(folder, KNOWN, K)
    huge = b"\x0a\x80\x80\x80\x10" + bytes(32 << 20)
    methods = {
        "feature": "/feature.Feature/getUserFeatures",
        "recall": "/recall.Recall/addItem",
        "ranking": "/ranking.Ranking/doPredict",
        "recommender": "/recommender.Recommender/getRecommendIDs",
    }
    for name, port in ports.items():
        for content in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01" + chance.randbytes(200),
            chance.randbytes(100_000),
            PREFACE + chance.randbytes(20_000),
            b"POST /recommend HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + bytes(1 << 20),
            b"POST /recommend HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFF\r\n",
            b"GET /" + b"a" * 200_000,
        ):
            try:
                with socket.create_connection(("127.0.0.1", port), 30) as line:
                    line.sendall(content)
            except OSError:
                pass  # it has closed the connection
        if name in methods:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.RpcError) as error:
                    channel.unary_unary(methods[name])(huge, timeout=30)
                assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    url = f"http://127.0.0.1:{ports['http']}/recommend"
    # the server may answer and close before all of it is sent
    with pytest.raises((urllib.error.HTTPError, urllib.error.URLError)) as error:
        urllib.request.urlopen(url, bytes(17 << 20), 30)
    assert getattr(error.value, "code", 413) == 413
    assert answered(ports) == wanted
    assert process.poll() is None


def requests_of_services():
    """Return a valid request per method, to be damaged."""
    columns = {"age": [20.0], "price": [0.5], "kind": [1], "user": [1], "item": [3]}
    from_arrays = {name: np.array(each) for name, each in columns.items()}
    arrow = wire.encode_arrow(wire.batch_of_arrays(from_arrays))
    values = {
        "feature.Feature/getUserFeatures": ("IDs", {"ID": [1, 2, 3]}),
        "recall.Recall/searchCandidates": ("Query", {"userID": 1, "k": 5}),
        "recall.Recall/addItem": ("Item", {"itemID": 3, "itemVector": [0.5] * 8}),
        "ranking.Ranking/doPredict": ("Content", {"encodedStr": wire.encode_json(columns)}),
        "ranking.Ranking/doPredict ": ("Content", {"encodedStr": arrow}),
        "recommender.Recommender/getRecommendIDs": (
            "RecommendRequest",
            {"recommendNum": 3, "candidateNum": 9, "ID": [1, 3]},
        ),
    }
    return [
        (method.strip(), wire.message(f"{method.partition('.')[0]}.{name}")(**fields))
        for method, (name, fields) in values.items()
    ]


@pytest.mark.slow
def test_damaged_messages_of_every_service_are_refused_or_answered(program, folder, tmp_path):
    """Yield requests with damaged message bytes, and with damaged Base64 payloads."""
    import base64

    process, ports = program
    chance, seen, wrong = random.Random(4), Counter(), []
    for method, request in requests_of_services():
        port = ports[method.partition(".")[0]]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(f"/{method}")
            for number in range(600):
                if method.endswith("doPredict") and number % 3:
                    payload = damaged(base64.b64decode(request.encodedStr), chance)
                    changed = type(request)(encodedStr=base64.b64encode(payload).decode())
                    content = changed.SerializeToString()
                else:
                    content = damaged(request.SerializeToString(), chance)
                try:
                    call(content, timeout=30)
                    seen["OK"] += 1
                except grpc.RpcError as error:
                    name = error.code().name
                    seen[name] += 1
                    if name in ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED"):
                        wrong.append((method, content, name, error.details()))
    assert not wrong, (len(wrong), wrong[:3])
    assert {"OK", "INVALID_ARGUMENT"} <= set(seen)
    assert process.poll() is None


@pytest.mark.slow
def test_damaged_json_is_refused_or_answered(program):
    import http.client

    process, ports = program
    chance, seen = random.Random(5), Counter()
    right = json.dumps({"users": [1, 3], "k": 3, "candidates": 9, "deadline_ms": 500.5}).encode()
    line = http.client.HTTPConnection("127.0.0.1", ports["http"], timeout=30)
    for _ in range(2000):
        body = damaged(right, chance)
        line.request("POST", "/recommend", body)
        answer = line.getresponse()
        content = answer.read()
        seen[answer.status] += 1
        assert answer.status in (200, 400), (body, content)
    assert set(seen) == {200, 400}
    assert process.poll() is None


@pytest.mark.slow
def test_schemathesis_finds_nothing(program, tmp_path):
    venv.create(tmp_path / "tools", with_pip=True)
    binary = tmp_path / "tools" / "bin"
    install = [binary / "python", "-m", "pip", "install", "-q", "schemathesis>=4,<5"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=280)
    if installed.returncode:
        pytest.skip(f"pip cannot install schemathesis: {installed.stderr[-200:]}")
    process, ports = program
    result = subprocess.run(
        [
            binary / "schemathesis",
            "run",
            f"http://127.0.0.1:{ports['http']}/openapi.json",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
            "response_schema_conformance",
            "--max-examples=40",
            "--seed=1",
            "--no-color",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    assert process.poll() is None


def test_more_requests_than_allowed_are_refused_at_once(stages):
    class Waiting(Linear):
        opened = threading.Event()

        def predict(self, inputs):
            assert self.opened.wait(30)
            return super().predict(inputs)

    store, recommender = stages
    with Recommender(store, recommender.recall, Waiting()) as slow:
        service, codes = RecommenderService(slow), Counter()
        with (
            GrpcServer([service], limits=Limits(max_requests=3)) as server,
            RecommenderClient(f"127.0.0.1:{server.port}", timeout=30) as client,
        ):

            def ask():
                try:
                    client.recommend([1], 2)
                    codes["OK"] += 1
                except grpc.RpcError as error:
                    codes[error.code().name] += 1

            asking = [threading.Thread(target=ask) for _ in range(8)]
            for each in asking:
                each.start()
            wait_for(lambda: codes["RESOURCE_EXHAUSTED"] == 5)
            Waiting.opened.set()
            for each in asking:
                each.join()
    assert codes == {"OK": 3, "RESOURCE_EXHAUSTED": 5}
