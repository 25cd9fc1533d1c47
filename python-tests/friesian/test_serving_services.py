"""Tests of the gRPC and HTTP services: old stubs, invalid requests, limits, tokens and TLS."""

import base64
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pyarrow as pa
import pytest
from refusals import refused
from served_catalogue import Linear, items_frame, users_frame

from bigdl.common.errors import UsageError
from bigdl.friesian.serving import (
    EmbeddedStore,
    FeatureService,
    GrpcServer,
    HttpServer,
    IndexRecall,
    ItemIndex,
    Limits,
    RankingService,
    RecallService,
    Recommender,
    RecommenderClient,
    RecommenderService,
    RemoteFeatures,
    RemoteRanker,
    RemoteRecall,
    Security,
    wire,
)
from bigdl.friesian.serving.recommender import CallerGoneError
from bigdl.nano.serving.protos import ProtoPool

HEALTH = ProtoPool("bigdl.nano.serving", "health.binpb")
PROTOS = Path(wire.__file__).parent / "protos"
LIMITS = Limits(max_ids=50, max_k=60, max_bytes=100_000)
METHODS = {
    "feature.Feature": ["getUserFeatures", "getItemFeatures", "getMetrics", "resetMetrics"],
    "ranking.Ranking": ["doPredict", "getMetrics", "resetMetrics"],
    "recall.Recall": ["searchCandidates", "addItem", "getMetrics", "resetMetrics"],
    "recommender.Recommender": [
        *("getRecommendIDs", "getMetrics", "resetMetrics", "getClientMetrics"),
    ],
}


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    store = EmbeddedStore(tmp_path_factory.mktemp("store"))
    items = items_frame()
    store.replace({"user": users_frame(), "item": items.drop(columns="vector")})
    index = ItemIndex(items["item"], np.stack(items["vector"]))
    recommender = Recommender(
        store, IndexRecall(store, index, seen_col="seen"), Linear(), candidates=40, popular=[3, 0]
    )
    return store, index, recommender


@pytest.fixture(scope="module")
def server(stages):
    """Start all services on one port."""
    store, index, recommender = stages
    services = [
        FeatureService(store, limits=LIMITS),
        RecallService(recommender.recall, index, limits=LIMITS),
        RankingService(Linear(), limits=LIMITS),
        RecommenderService(recommender, limits=LIMITS),
    ]
    with GrpcServer(services, security=Security(changes=True), limits=LIMITS) as made:
        yield made


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as made:
        yield made


@pytest.fixture(scope="module")
def web(stages):
    with HttpServer(stages[2], limits=LIMITS) as made:
        yield made


OLD_CLIENT = """
import base64, json, sys
import grpc
from google.protobuf.empty_pb2 import Empty
import feature_pb2, feature_pb2_grpc, ranking_pb2, ranking_pb2_grpc
import recall_pb2, recall_pb2_grpc, recommender_pb2, recommender_pb2_grpc

channel = grpc.insecure_channel(sys.argv[1])
features = feature_pb2_grpc.FeatureStub(channel)
recall = recall_pb2_grpc.RecallStub(channel)
ranking = ranking_pb2_grpc.RankingStub(channel)
recommender = recommender_pb2_grpc.RecommenderStub(channel)
found = features.getItemFeatures(feature_pb2.IDs(ID=[3, 1, 3]))
rows = [json.loads(base64.b64decode(each)) if each else None for each in found.b64Feature]
columns = {"age": [20], "price": [0.5], "kind": [1], "user": [1], "item": [3]}
content = base64.b64encode(json.dumps(columns).encode()).decode()
recall.addItem(recall_pb2.Item(itemID=8000, itemVector=[0.0] * 8))
answer = recommender.getRecommendIDs(
    recommender_pb2.RecommendRequest(recommendNum=3, candidateNum=20, ID=[1, 2])
)
print(json.dumps({
    "columns": list(found.colNames),
    "rows": rows,
    "ids": list(found.ID),
    "candidates": list(recall.searchCandidates(recall_pb2.Query(userID=1, k=5)).candidate),
    "scores": json.loads(base64.b64decode(
        ranking.doPredict(ranking_pb2.Content(encodedStr=content)).predictStr
    )),
    "items": [list(each.ID) for each in answer.IDProbList],
    "probs": [list(each.prob) for each in answer.IDProbList],
    "metrics": json.loads(recommender.getMetrics(Empty()).str),
    "client": json.loads(recommender.getClientMetrics(Empty()).str),
    "reset": [type(stub.resetMetrics(Empty())).__name__ for stub in (features, recall, ranking)],
}))
"""


def test_stubs_that_were_generated_elsewhere_talk_to_the_services(server, stages, tmp_path):
    names = ["feature", "ranking", "recall", "recommender"]
    outputs = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    files = [f"{name}.proto" for name in names]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *files]
    subprocess.run(protoc, check=True)
    done = subprocess.run(
        [sys.executable, "-c", OLD_CLIENT, f"127.0.0.1:{server.port}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    store, _, recommender = stages
    row = store.read("item", [3]).to_arrow().to_pylist()[0]
    assert said["columns"] == list(row)
    assert said["rows"] == [list(row.values()), None, list(row.values())]
    assert said["ids"] == [3, 1, 3]
    found = recommender.recall.candidates(np.array([1]), 5)
    assert said["candidates"] == found.ids.tolist()
    assert said["scores"] == pytest.approx([20 / 80 + 1 + 1 / 9 + (7919 + 3 * 104729) % 1000 / 100])
    here = recommender.recommend([1, 2], 3, 20)
    assert said["items"] == [each.item_ids.tolist() for each in here]
    assert said["probs"] == [each.scores.tolist() for each in here]
    names = {each["name"] for each in said["metrics"]}
    assert "recommender.Recommender/getRecommendIDs" in names
    assert {each["name"] for each in said["client"]} == {"recall", "features", "ranking"}
    assert said["reset"] == ["Empty"] * 3


def test_the_compiled_services_are_those_of_the_protos(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    try:
        from compile_protos import compiled
    finally:
        sys.path.pop(0)
    compiled(tmp_path / "services.binpb")
    same = (tmp_path / "services.binpb").read_bytes() == (PROTOS / "services.binpb").read_bytes()
    assert same, "run scripts/compile_protos.py"


@pytest.mark.parametrize("method", [f"{s}/{m}" for s, names in METHODS.items() for m in names])
def test_garbage_is_told_to_be_no_request(channel, method):
    call = channel.unary_unary(f"/{method}")
    random = np.random.default_rng(0)
    for size in (1, 3, 40, 5000):
        content = b"\x0a\xff" + random.bytes(size)
        with pytest.raises(grpc.RpcError) as error:
            call(content, timeout=10)
        assert error.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    assert isinstance(channel.unary_unary("/recall.Recall/getMetrics")(b"", timeout=10), bytes)


def test_bytes_that_are_no_grpc_do_not_end_the_services(server, channel):
    random = np.random.default_rng(6)
    for content in (b"GET / HTTP/1.1\r\n\r\n", random.bytes(10), random.bytes(100_000)):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(content)
    assert isinstance(channel.unary_unary("/recall.Recall/getMetrics")(b"", timeout=10), bytes)


def test_requests_that_are_too_large_are_refused(channel):
    call = channel.unary_unary("/ranking.Ranking/doPredict")
    with pytest.raises(grpc.RpcError) as error:
        call(b"\x0a" + b"x" * 200_000, timeout=10)
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def stub_of(channel, service, messages=wire):
    """Return an object with one method per method of a service."""
    made = {
        name: channel.unary_unary(
            f"/{service}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        for name, (_, answer) in messages.methods(service).items()
    }
    return SimpleNamespace(**made)


def sent(channel, service, method, request, **values):
    package = service.partition(".")[0]
    stub = stub_of(channel, service)
    return getattr(stub, method)(wire.message(f"{package}.{request}")(**values), timeout=10)


NO_VECTOR = r"should be of shape \(n, 8\), got \(1, 1\)"


@pytest.mark.parametrize(
    ("service", "method", "request_name", "values", "code", "message"),
    [
        (
            "feature.Feature",
            "getUserFeatures",
            "IDs",
            {"ID": range(51)},
            "INVALID_ARGUMENT",
            "50 ids",
        ),
        (
            "recall.Recall",
            "searchCandidates",
            "Query",
            {"userID": 1},
            "INVALID_ARGUMENT",
            "k should",
        ),
        (
            *("recall.Recall", "searchCandidates", "Query", {"userID": 1, "k": 61}),
            *("INVALID_ARGUMENT", "from 1 to 60, got 61"),
        ),
        (
            *("recall.Recall", "searchCandidates", "Query", {"userID": 2, "k": 5}),
            *("NOT_FOUND", "no candidates for the user 2"),
        ),
        (
            *("recall.Recall", "addItem", "Item", {"itemID": 2, "itemVector": [1]}),
            *("INVALID_ARGUMENT", NO_VECTOR),
        ),
        (
            *("recall.Recall", "addItem", "Item", {"itemID": 2, "itemVector": [float("nan")] * 8}),
            *("INVALID_ARGUMENT", "not finite"),
        ),
        (
            *("recommender.Recommender", "getRecommendIDs", "RecommendRequest", {"ID": [1]}),
            *("INVALID_ARGUMENT", "recommendNum should be"),
        ),
        (
            *("recommender.Recommender", "getRecommendIDs", "RecommendRequest"),
            {"ID": [1], "recommendNum": 5, "candidateNum": 4},
            *("FAILED_PRECONDITION", "at least recommendNum, got 4 and 5"),
        ),
        (
            *("ranking.Ranking", "doPredict", "Content", {"encodedStr": "%"}),
            *("INVALID_ARGUMENT", "not Base64"),
        ),
        (
            *("ranking.Ranking", "doPredict", "Content"),
            {"encodedStr": base64.b64encode(b"\xac\xed\x00\x05sr").decode()},
            *("INVALID_ARGUMENT", "serialized Java object, which is not supported"),
        ),
        (
            *("ranking.Ranking", "doPredict", "Content"),
            {"encodedStr": wire.encode_json({"age": [1]})},
            *("INVALID_ARGUMENT", "which the request lacks"),
        ),
        (
            *("ranking.Ranking", "doPredict", "Content"),
            {"encodedStr": wire.encode_json({name: ["x"] for name in Linear.columns})},
            *("INVALID_ARGUMENT", "The ranker needs numeric columns"),
        ),
        (
            *("ranking.Ranking", "doPredict", "Content"),
            {"encodedStr": wire.encode_json({"a": [1], "b": [1, 2]})},
            *("INVALID_ARGUMENT", "different lengths"),
        ),
    ],
)
def test_wrong_requests_are_told(channel, service, method, request_name, values, code, message):
    with pytest.raises(grpc.RpcError, match=message) as error:
        sent(channel, service, method, request_name, **values)
    assert error.value.code().name == code


def test_damaged_arrow_is_no_end_of_the_service(channel):
    batch = pa.record_batch({name: [1.0, 2.0] for name in Linear.columns})
    content = bytearray(base64.b64decode(wire.encode_arrow(batch)))
    random = np.random.default_rng(1)
    for _ in range(300):
        broken = bytearray(content)
        for at in random.integers(0, len(broken), 4):
            broken[at] = random.integers(0, 256)
        text = base64.b64encode(broken[: random.integers(1, len(broken) + 1)]).decode()
        stub = stub_of(channel, "ranking.Ranking")
        call = stub.doPredict.future(wire.message("ranking.Content")(encodedStr=text), timeout=10)
        assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), call.details()
    good = wire.encode_arrow(batch)
    assert sent(channel, "ranking.Ranking", "doPredict", "Content", encodedStr=good).predictStr


def arrow_of(column, **options):
    batch = pa.record_batch({"age": column})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue()).decode()


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (np.zeros(1_000_000), {"compression": "zstd"}, "compressed buffers"),
        (np.zeros(1_000_000), {"compression": "lz4"}, "compressed buffers"),
        (np.zeros(3), {"compression": "zstd"}, "compressed buffers"),
        (pa.nulls(10**9), {}, "type null, which is not supported"),
        (pa.array(["x" * 900] * 90).dictionary_encode(), {}, "dictionaries"),
        (pa.array([{}] * 90, pa.struct([])), {}, "which is not supported"),
        (pa.array([b""] * 90, pa.binary(0)), {}, "which is not supported"),
        (pa.array([[None]] * 90), {}, "which is not supported"),
        (pa.RunEndEncodedArray.from_arrays([10**9], [1.0]), {}, "which is not supported"),
        (pa.array(["x"] * 90, pa.string_view()), {}, "which is not supported"),
    ],
    ids=[
        *("zstd", "lz4", "small", "null", "dictionary", "struct", "binary", "nulls", "runs"),
        "views",
    ],
)
def test_arrow_that_becomes_larger_than_its_bytes_is_refused(channel, column, options, message):
    text = arrow_of(column, **options)
    assert len(text) < 100_000
    with pytest.raises(UsageError, match=message):
        wire.decode_payload(text)
    with pytest.raises(grpc.RpcError, match=message) as refused:
        sent(channel, "ranking.Ranking", "doPredict", "Content", encodedStr=text)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_arrow_of_the_other_byte_order_with_one_buffer_for_all_columns_is_refused():
    # PyArrow turns the bytes of each column round, so one buffer would become as many as columns.
    columns, size = 20, 80_000
    zeros = pa.array(np.zeros(size // 8))
    batch = pa.record_batch([zeros] * columns, ["a", *map(str, range(10, 9 + columns))])
    content = bytearray(base64.b64decode(wire.encode_arrow(batch)))
    body = struct.pack("<q", columns * size)
    content[(at := content.index(body)) : at + 8] = struct.pack("<q", size)
    for number in range(columns):
        pair = struct.pack("<4q", number * size, 0, number * size, size)
        content[(at := content.index(pair)) : at + 32] = struct.pack("<4q", 0, 0, 0, size)
    content = content[: -8 - (columns - 1) * size] + content[-8:]
    table = (
        content.index(struct.pack("<4H", 8, 8, 0, 4)) + 8
    )  # table of the schema, after its vtable
    one = content.index(struct.pack("<I", 1) + b"a\0") - table  # 1 stands for big endian
    content[table - 4 : table - 2] = struct.pack("<H", one)
    assert pa.ipc.open_stream(content).read_all().nbytes == columns * size
    with refused("request-invalid", str(columns * size), "write each buffer once"):
        wire.decode_payload(base64.b64encode(content).decode())
    before = pa.total_allocated_bytes()
    with refused("request-invalid"):
        wire.decode_payload(base64.b64encode(content).decode())
    assert pa.total_allocated_bytes() - before < 2 * size


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ([{f"k{number}": 1} for number in range(3000)], "not objects"),
        ([[{"a": 1}]], "not objects"),
        (json.loads("[" * 900 + "]" * 900), "8 deep"),
    ],
    ids=["objects", "inner", "deep"],
)
def test_json_that_becomes_far_larger_than_its_bytes_is_refused(channel, values, fact):
    text = wire.encode_json({"age": values})
    with refused("request-invalid", fact):
        wire.decode_payload(text)
    with pytest.raises(grpc.RpcError, match=fact) as error:
        sent(channel, "ranking.Ranking", "doPredict", "Content", encodedStr=text)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with refused("request-invalid", "5000 columns"):
        wire.decode_payload(wire.encode_json({str(number): [1] for number in range(5000)}))


def test_arrow_of_all_kinds_that_features_have_is_read():
    for column in (
        np.arange(5),
        np.arange(5) > 2,
        pa.array(["a", None]),
        pa.array([[1, 2], None]),
        pa.array([[1.5, 2]], pa.list_(pa.float32(), 2)),
        pa.array([{"a": 1}]),
        pa.array([1], pa.timestamp("us")),
        pa.array([1], pa.decimal128(5)),
    ):
        assert wire.decode_payload(arrow_of(column))[1]["age"].equals(pa.array(column))


def test_users_times_candidates_are_bounded(stages):
    limits = Limits(max_pairs=400)
    with (
        GrpcServer([RecommenderService(stages[2], limits=limits)], limits=limits) as server,
        HttpServer(stages[2], limits=limits) as web,
        RecommenderClient(f"127.0.0.1:{server.port}", timeout=30) as client,
    ):
        assert len(client.recommend([1] * 10, 3)) == 10  # 40 candidates of each by default
        for users, candidates in ((11, 0), (5, 81), (400, 3)):
            with pytest.raises(grpc.RpcError, match="400 candidates for all its ids") as refused:
                client.recommend([1] * users, 2, candidates)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert asked(web, "/recommend", {"users": [1] * 10})[0] == 200
        status, said = asked(web, "/recommend", {"users": [1] * 11, "k": 3})
        assert (status, "400 candidates for all its ids" in said["error"]) == (400, True)


class Waiting(Linear):
    """Ranker that counts its calls and waits before it returns."""

    def __init__(self):
        self.calls = 0
        self.begun, self.may_end = threading.Event(), threading.Event()

    def predict(self, inputs):
        self.calls += 1
        self.begun.set()
        assert self.may_end.wait(60)
        return super().predict(inputs)


@pytest.mark.parametrize("protocol", ["grpc", "http", "deadline"])
def test_work_for_a_client_that_has_gone_ends(stages, protocol, monkeypatch):
    monkeypatch.setattr("bigdl.friesian.serving.recommender.PAIRS_AT_ONCE", 40)
    ranker, users, ended = Waiting(), list(range(1, 101, 2)), []

    class Watched(Recommender):
        def recommend(self, *arguments):
            ended.append(arguments[4])
            try:
                return super().recommend(*arguments)
            except CallerGoneError:
                ended.append("gone")
                raise

    deadline = 60.0 if protocol == "deadline" else None
    with (
        Watched(
            stages[0], stages[2].recall, ranker, candidates=20, deadline=deadline
        ) as recommender,
        GrpcServer([RecommenderService(recommender)]) as server,
        HttpServer(recommender) as web,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        if protocol == "http":
            body = json.dumps({"users": users}).encode()
            with socket.create_connection(("127.0.0.1", web.port)) as line:
                head = f"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
                line.sendall(f"{head}\r\n\r\n".encode() + body)
                assert ranker.begun.wait(60)
        else:
            stub = stub_of(channel, "recommender.Recommender")
            request = wire.message("recommender.RecommendRequest")
            call = stub.getRecommendIDs.future(request(recommendNum=2, ID=users))
            assert ranker.begun.wait(60)
            call.cancel()
        until(ended[0])
        ranker.may_end.set()
        until(lambda: ended[-1] == "gone")
    assert ranker.calls == 1  # of 25


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_features_come_as_arrow_with_the_columns_asked_for(server, stages):
    with RemoteFeatures(f"127.0.0.1:{server.port}", most_ids=20) as remote:
        ids = np.random.default_rng(2).integers(0, 600, 90)
        for columns in (None, ["city", "prediction", "age"]):
            here, there = stages[0].read("user", ids, columns), remote.read("user", ids, columns)
            assert there.to_arrow().to_pylist() == here.to_arrow().to_pylist()
            assert there.found.tolist() == here.found.tolist()
        assert remote.names("item") == ["item", "price", "kind"]


def test_answers_may_be_long(stages):
    """Test that headers do not grow with the request."""
    store, index, _ = stages
    recall = IndexRecall(store, index)
    with (
        GrpcServer([RecallService(recall)]) as recall_at,
        RemoteRecall(f"127.0.0.1:{recall_at.port}") as remote,
        Recommender(store, remote, Linear(), candidates=5, popular=[3]) as recommender,
        GrpcServer([RecommenderService(recommender)]) as server,
        RecommenderClient(f"127.0.0.1:{server.port}", timeout=60) as client,
    ):
        here, there = (each.candidates(np.array([1]), 400) for each in (recall, remote))
        assert there.ids.tolist() == here.ids.tolist()
        assert there.scores.tolist() == here.scores.tolist()
        answers = client.recommend([1, 2] * 1500, 1)
        assert [each.source for each in answers] == ["ranked", "popular"] * 1500


def test_health_is_said(channel):
    stub = stub_of(channel, "grpc.health.v1.Health", HEALTH)
    check = HEALTH.message("grpc.health.v1.HealthCheckRequest")
    for name in ("", "recall.Recall"):
        assert stub.Check(check(service=name), timeout=10).status == 1
    with pytest.raises(grpc.RpcError, match="no service 'x'"):
        stub.Check(check(service="x"), timeout=10)


def test_an_item_is_added_by_the_service(server, stages):
    with RemoteRecall(f"127.0.0.1:{server.port}") as remote:
        vector = 1000 * stages[0].read("user", [1], ["prediction"])["prediction"][0]
        remote.add_item(77_777, vector)
        assert remote.candidates(np.array([1]), 1).ids.tolist() == [77_777]
        stages[1].remove_items([77_777])


def test_a_deadline_of_the_caller_is_kept(stages):
    import threading

    ended = threading.Event()

    class Stuck(Linear):
        def predict(self, inputs):
            ended.wait(20)
            return super().predict(inputs)

    recommender = Recommender(stages[2].features, stages[2].recall, Stuck(), candidates=20)
    with (
        recommender,
        GrpcServer([RecommenderService(recommender)]) as server,
        RecommenderClient(f"127.0.0.1:{server.port}", timeout=4.0) as client,
    ):
        (answer,) = client.recommend([1], 3)
        assert (answer.source, len(answer.item_ids)) == ("recalled", 3)
        ended.set()


def test_services_behind_that_are_gone_are_told(stages):
    recall = IndexRecall(RemoteFeatures("127.0.0.1:1", timeout=5), stages[1])
    with (
        GrpcServer([RecallService(recall)]) as server,
        RemoteRecall(f"127.0.0.1:{server.port}") as client,
        pytest.raises(grpc.RpcError, match="A service that recall") as error,
    ):
        client.candidates(np.array([1]), 5)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE


def test_tokens_are_asked_for():
    with GrpcServer([RankingService(Linear())], security=Security(token="secret")) as server:
        address = f"127.0.0.1:{server.port}"
        inputs = {name: np.ones(2) for name in Linear.columns}
        for token in (None, "wrong", "sécret"):
            with RemoteRanker(address, token=token and token.encode().decode("latin1")) as ranker:
                with pytest.raises(grpc.RpcError) as error:
                    ranker.predict(inputs)
                assert error.value.code() in (
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.INTERNAL,  # a header that is no ASCII does not leave the client
                )
        with RemoteRanker(address, token="secret") as ranker:
            assert len(ranker.predict(inputs)) == 2


def test_each_token_is_good_for_its_purpose(stages):
    store, index = stages[:2]
    security = Security(token="use", admin_token="change", metrics_token="look")
    service = RecallService(IndexRecall(store, index), index)
    wanted = {
        None: ["UNAUTHENTICATED"] * 4,
        "use": ["OK", "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED"],
        "look": ["PERMISSION_DENIED", "OK", "PERMISSION_DENIED", "PERMISSION_DENIED"],
        "change": ["OK"] * 4,
    }

    def outcome(call, *arguments):
        try:
            call(*arguments)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    with GrpcServer([service], security=security) as server:
        address = f"127.0.0.1:{server.port}"
        for token, outcomes in wanted.items():
            with RemoteRecall(address, token=token) as remote:
                assert [
                    outcome(remote.candidates, np.array([1]), 3),
                    outcome(remote.metrics),
                    outcome(remote.add_item, 77_777, np.zeros(8)),
                    outcome(remote.reset_metrics),
                ] == outcomes
        with RemoteRecall(address, token="use", admin_token="change") as remote:
            remote.add_item(77_778, np.zeros(8))
            assert len(remote.candidates(np.array([1]), 3).ids) == 3
    index.remove_items([77_777, 77_778])


def test_changes_are_refused_unless_they_are_allowed(stages):
    service = RecallService(IndexRecall(*stages[:2]), stages[1])
    with GrpcServer([service]) as server, RemoteRecall(f"127.0.0.1:{server.port}") as remote:
        for change in (remote.reset_metrics, lambda: remote.add_item(77_777, np.zeros(8))):
            with pytest.raises(grpc.RpcError, match="does not let clients change it") as error:
                change()
            assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED
    with refused("argument-conflict"):
        Security(token="use", changes=True)


def test_an_item_reaches_its_shard_by_the_admin_token(stages):
    from bigdl.friesian.serving import Shard, ShardedRecall

    security = Security(token="use", admin_token="change")
    with GrpcServer([RecallService(IndexRecall(*stages[:2]), stages[1])], security=security) as one:
        shards = [Shard((0, 99_999), (f"127.0.0.1:{one.port}",), ())]
        with ShardedRecall(shards, token="use") as recall, pytest.raises(grpc.RpcError):
            recall.add_item(77_779, np.zeros(8))
        with ShardedRecall(shards, token="use", admin_token="change") as recall:
            recall.add_item(77_779, np.zeros(8))
    stages[1].remove_items([77_779])


def test_streams_that_send_no_message_keep_nobody_waiting(stages):
    import threading

    over = threading.Event()

    def nothing():
        over.wait()
        yield from ()

    with (
        GrpcServer(
            [FeatureService(stages[0])], security=Security(token="use"), threads=2
        ) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as silent,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        RemoteFeatures(f"127.0.0.1:{server.port}", token="use", timeout=20) as features,
    ):
        headers = (("authorization", "Bearer use"),)
        calls = {}
        for method, given in (
            ("/feature.Feature/getUserFeatures", ()),
            ("/feature.Feature/getUserFeatures", headers),
            ("/grpc.health.v1.Health/Check", ()),
        ):
            call = silent.stream_unary(method)
            streams = [call.future(nothing(), metadata=given) for _ in range(16)]
            calls[method, given] = streams
        refused = next(iter(calls.values()))
        assert {call.exception(30).code().name for call in refused} == {"UNAUTHENTICATED"}
        check = HEALTH.message("grpc.health.v1.HealthCheckRequest")
        stub = stub_of(channel, "grpc.health.v1.Health", HEALTH)
        for _ in range(3):
            assert stub.Check(check(service=""), timeout=20).status == 1
            assert features.read("user", [1]).found.tolist() == [True]
        over.set()


def test_tls_is_spoken(certificate, stages):
    cert, key = certificate
    security = Security(certificate=cert, key=key)
    inputs = {name: np.ones(2) for name in Linear.columns}
    with (
        GrpcServer([RankingService(Linear())], security=security) as server,
        RemoteRanker(f"127.0.0.1:{server.port}", authority=cert) as ranker,
        RemoteRanker(f"127.0.0.1:{server.port}", timeout=2) as plain,
    ):
        assert len(ranker.predict(inputs)) == 2
        with pytest.raises(grpc.RpcError):
            plain.predict(inputs)
    import ssl

    context = ssl.create_default_context(cafile=cert)
    with HttpServer(stages[2], security=security) as web:
        url = f"https://127.0.0.1:{web.port}/v2/health/ready"
        with urllib.request.urlopen(url, context=context) as answer:
            assert answer.status == 200


def test_another_address_has_to_be_meant():
    with refused("argument-missing"):
        Security(host="0.0.0.0")
    with pytest.warns(UserWarning, match="without TLS"):
        Security(host="0.0.0.0", expose=True, token="secret")
    with (
        pytest.warns(UserWarning, match="without TLS"),
        pytest.warns(
            UserWarning, match="without a token, so everybody .* can use it and change it"
        ),
    ):
        Security(host="0.0.0.0", expose=True, changes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Security(host="::1")
    with refused("argument-missing"):
        Security(certificate=__file__)


def test_a_port_in_use_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with refused("address-unusable"):
            GrpcServer([RankingService(Linear())], port)
        with refused("address-unusable"):
            HttpServer(None, port)


# -- HTTP ------------------------------------------------------------------------------------------


def asked(web, path, content=None, headers=()):
    """Return status and body of an HTTP answer."""
    data = (
        content if content is None or isinstance(content, bytes) else json.dumps(content).encode()
    )
    request = urllib.request.Request(
        f"http://127.0.0.1:{web.port}{path}", data, headers=dict(headers)
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_recommendations_come_as_json(web, stages):
    status, said = asked(web, "/recommend", {"users": [1, 2, 1], "k": 4, "candidates": 20})
    here = stages[2].recommend([1, 2, 1], 4, 20)
    assert status == 200
    assert [each["items"] for each in said["recommendations"]] == [
        each.item_ids.tolist() for each in here
    ]
    assert [each["source"] for each in said["recommendations"]] == ["ranked", "popular", "ranked"]
    _, said = asked(web, "/recommend/1?k=4&canK=20")
    assert said["recommendations"][0]["scores"] == here[0].scores.tolist()
    assert asked(web, "/v2/health/ready") == (200, {"ready": True})
    assert asked(web, "/v2/health/live") == (200, {"live": True})


@pytest.mark.parametrize(
    ("path", "content", "status", "message"),
    [
        ("/recommend", b"{", 400, "is no JSON"),
        ("/recommend", b"\xff\xfe", 400, "is no JSON"),
        ("/recommend", b"[" * 50_000, 400, "is no JSON"),
        ("/recommend", [], 400, "has to be an object of JSON"),
        ("/recommend", {"users": 1}, 400, "users should be a list"),
        ("/recommend", {"users": ["1"]}, 400, "should be a whole number"),
        ("/recommend", {"users": [1 << 70]}, 400, "should be a whole number"),
        ("/recommend", {"users": [1], "k": 0}, 400, "k should be"),
        ("/recommend", {"users": [1], "k": "x"}, 400, "k should be"),
        ("/recommend", {"users": [1], "k": 61}, 400, "from 1 to 60"),
        ("/recommend", {"users": [1] * 51}, 400, "50 ids"),
        ("/recommend", {"users": [1], "kk": 1}, 400, "unknown keys \\['kk'\\]"),
        ("/recommend", {"users": [1], "k": 5, "candidates": 2}, 400, "at least k"),
        ("/recommend", {"users": [1], "deadline_ms": -1}, 400, "deadline_ms should be"),
        ("/recommend", b'{"users": [1], "deadline_ms": NaN}', 400, "is no JSON"),
        ("/recommend", b" " * 200_000, 413, ""),
        ("/recommend/one", None, 400, "the user should be a whole number"),
        ("/recommend/1?k=", None, 400, "k should be a whole number"),
        ("/nothing", None, 404, ""),
        ("/recommend", None, 405, ""),
    ],
)
def test_wrong_requests_by_http_are_told(web, path, content, status, message):
    import re

    given, said = asked(web, path, content)
    assert given == status
    assert re.search(message, said["error"])


def test_bytes_that_are_no_http_do_not_end_the_server(web):
    random = np.random.default_rng(4)
    for size in (1, 50, 5000):
        with socket.create_connection(("127.0.0.1", web.port)) as line:
            line.sendall(random.bytes(size) + b"\r\n\r\n")
    assert asked(web, "/v2/health/live")[0] == 200


def test_tokens_are_asked_for_by_http(stages):
    with HttpServer(stages[2], security=Security(token="secret")) as web:
        assert asked(web, "/recommend/1")[0] == 401
        assert asked(web, "/recommend/1", headers=[("Authorization", "Bearer secret")])[0] == 200
        assert asked(web, "/v2/health/live")[0] == 200
