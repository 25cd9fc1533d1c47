"""Tests that shards answer like one process, and that lost shards are reported."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack

import grpc
import numpy as np
import pyarrow as pa
import pytest
from served_catalogue import Linear, free_port, items_frame, start_redis, users_frame

from bigdl.common.errors import UsageError
from bigdl.friesian.serving import (
    EmbeddedStore,
    FeatureService,
    GrpcServer,
    IndexRecall,
    ItemIndex,
    LostShardError,
    RecallService,
    Recommender,
    RecommenderClient,
    RecommenderService,
    Shard,
    ShardedFeatures,
    ShardedRecall,
)
from bigdl.friesian.serving.config import read_config
from bigdl.friesian.serving.program import Serving, main

SPANS = [(0, 399), (400, 799), (800, 1199)]
USERS, ITEMS = users_frame(), items_frame()


def stages_of(folder, users, items):
    store = EmbeddedStore(folder)
    store.replace({"user": users, "item": items.drop(columns="vector")})
    return store, ItemIndex(items["item"], np.stack(items["vector"]))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store, index = stages_of(tmp_path_factory.mktemp("whole"), USERS, ITEMS)
    return Recommender(
        store, IndexRecall(store, index, seen_col="seen"), Linear(), candidates=40, popular=[3, 0]
    )


class Cluster:
    """Start shards as servers in this process that can be stopped one by one."""

    def __init__(self, folder, replicas=1):
        self.servers, self.shards = [], []
        for first, last in SPANS:
            part = ITEMS[ITEMS["item"].between(first, last)]
            store, index = stages_of(folder / str(first), USERS, part)
            recall = IndexRecall(store, index, seen_col="seen")
            services = [FeatureService(store), RecallService(recall, index)]
            made = [GrpcServer(services) for _ in range(replicas)]
            self.servers.append(made)
            places = tuple(f"127.0.0.1:{each.port}" for each in made)
            self.shards.append(Shard((first, last), places, places))

    def stop(self):
        for each in (one for made in self.servers for one in made):
            each.stop(0)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 2)
    yield made
    made.stop()


def router_of(cluster, stack, features_of=None):
    features = stack.enter_context(ShardedFeatures(features_of or cluster.shards, timeout=5))
    recall = stack.enter_context(ShardedRecall(cluster.shards, timeout=5))
    return Recommender(features, recall, Linear(), Linear.columns, candidates=40, popular=[3, 0])


def shown(answers):
    return [(each.user_id, each.item_ids.tolist(), each.scores.tolist()) for each in answers]


def test_answers_of_shards_equal_those_of_one_process(cluster, one_process):
    numbers = np.random.default_rng(3).integers(0, 700, 200)
    with ExitStack() as stack:
        router = router_of(cluster, stack)
        for part in np.split(numbers, 20):
            answers = router.recommend(part, 5)
            assert shown(answers) == shown(one_process.recommend(part, 5))
            assert not any(each.partial for each in answers)
        ids = np.random.default_rng(4).integers(-5, 1300, 300)
        rows = router.features.read("item", ids)
        whole = one_process.features.read("item", ids)
        assert rows.found.tolist() == whole.found.tolist()
        assert rows.to_arrow().equals(whole.to_arrow())
        assert len(router.features.read("item", [])) == 0


def test_a_replica_takes_the_place_of_another(cluster, one_process):
    with ExitStack() as stack:
        router = router_of(cluster, stack)
        for replicas, lost in zip(cluster.servers, (0, 1, 0), strict=True):
            replicas[lost].stop(0)
        for _ in range(4):
            answers = router.recommend([1, 3, 5], 5)
            assert shown(answers) == shown(one_process.recommend([1, 3, 5], 5))
            assert not any(each.partial for each in answers)


def test_items_of_a_lost_shard_are_missing_and_the_answer_says_so(cluster, one_process):
    for each in cluster.servers[1]:
        each.stop(0)
    with ExitStack() as stack:
        router = router_of(cluster, stack)
        server = stack.enter_context(GrpcServer([RecommenderService(router)]))
        client = stack.enter_context(RecommenderClient(f"127.0.0.1:{server.port}"))
        answers = client.recommend([1, 3, 5], 20)
        assert all(each.partial and each.source == "ranked" for each in answers)
        for each in answers:
            assert len(each.item_ids) == 20
            assert not ((each.item_ids >= 400) & (each.item_ids <= 799)).any()
        with pytest.raises(LostShardError, match="1 rows of item"):
            router.features.read("item", [3, 402])
        rows, lost = router.features.read_found("item", [402, 3])
        assert (lost.tolist(), rows.found.tolist()) == ([True, False], [False, True])


def test_candidates_whose_features_are_lost_are_left_out(cluster, one_process):
    """Test a shard without features: its candidates have no rows."""
    with ExitStack() as stack:
        gone = [
            Shard(each.items, each.recall, ("127.0.0.1:1",) if i == 1 else each.features)
            for i, each in enumerate(cluster.shards)
        ]
        router = router_of(cluster, stack, gone)
        whole = one_process.recommend([1, 2, 3], 40)
        answers = router.recommend([1, 2, 3], 40)
        assert all(each.partial for each in answers)
        for found, known in zip(answers, whole, strict=True):
            scores = dict(zip(known.item_ids.tolist(), known.scores.tolist(), strict=True))
            wanted = [each for each in known.item_ids.tolist() if not 400 <= each <= 799]
            assert found.item_ids.tolist() == wanted
            assert found.scores.tolist() == [scores[each] for each in wanted]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("[]", "at least one shard"),
        ("[{items: [5, 1], recall: 'a:1', features: 'a:2'}]", "the first and the last id"),
        ("[{items: [1, 5], recall: a, features: 'a:2'}]", "recall of shard 0 should be host:port"),
        ("[{item: [1, 5]}]", "item of shard 0 is unknown; did you mean items"),
        (
            "[{items: [1, 5], recall: 'a:1', features: 'a:2'},"
            " {items: [5, 9], recall: 'a:1', features: 'a:2'}]",
            "Two shards contain items 5",
        ),
    ],
)
def test_shards_that_mean_nothing_are_told_with_their_line(tmp_path, shards, message):
    path = tmp_path / "serving.yaml"
    path.write_text(f"store: x\nshards: {shards}\n")
    with pytest.raises(UsageError, match=f"line 2, shards.*{message}"):
        read_config(path)


# -- the program -----------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "bigdl.friesian.serving.program"]


def started(config, *options):
    process = subprocess.Popen(
        [*COMMAND, "serve", "--config", str(config), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline().startswith("ready")
    return process


def write_sources(folder):
    """Write files of users, items and vectors, and a model; return the model."""
    import torch

    from bigdl.friesian.models import DeepFM
    from bigdl.nano.pytorch import InferenceOptimizer

    USERS.to_parquet(folder / "users.parquet")
    ITEMS.drop(columns="vector").to_parquet(folder / "items.parquet")
    ITEMS[["item", "vector"]].to_parquet(folder / "vectors.parquet")
    torch.manual_seed(0)
    model = DeepFM({"user": 700, "item": 1300, "kind": 9}, ["price"], dim=4, hidden=(8,)).eval()
    sample = (*[torch.zeros(2, dtype=torch.int64)] * 3, torch.zeros(2))
    saved = InferenceOptimizer.trace(model, accelerator="openvino", input_sample=sample)
    InferenceOptimizer.save(saved, str(folder / "model"))
    return model


def stages_in_config(model):
    """Return the configuration sections for the files of `write_sources`."""
    return f"""
recall: {{index: index, seen: seen}}
ranking: {{model: model, inputs: {json.dumps(model.feature_cols)}}}
recommender: {{candidates: 40, popular: [3, 0]}}
init: {{users: users.parquet, items: items.parquet, vectors: vectors.parquet, vector: vector}}
"""


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("with_user_ranges", [False, True])
def test_a_killed_shard_is_marked_under_load_and_whole_again_when_back(tmp_path, with_user_ranges):
    model = write_sources(tmp_path)
    user_spans = [(0, 199), (200, 399), (400, 700)]
    ports = [free_port() for _ in range(6)]
    shards = [
        {
            "items": list(span),
            "recall": f"127.0.0.1:{ports[2 * number]}",
            "features": [f"127.0.0.1:{ports[2 * number + 1]}"],
            **({"users": list(user_spans[number])} if with_user_ranges else {}),
        }
        for number, span in enumerate(SPANS)
    ]
    router_port, web_port, whole_port = free_port(), free_port(), free_port()
    common = stages_in_config(model)
    config, whole = tmp_path / "serving.yaml", tmp_path / "whole.yaml"
    server = f"server: {{recommender_port: {router_port}, http_port: {web_port}}}\n"
    config.write_text(f"store: features\n{common}{server}shards: {json.dumps(shards)}\n")
    alone = f"server: {{recommender_port: {whole_port}}}\n"
    whole.write_text(f"store: all\n{common.replace('index: index', 'index: all-index')}{alone}")
    assert main(["init", "--config", str(config)]) == 0
    assert main(["init", "--config", str(whole)]) == 0
    processes = [started(config, "--shard", str(number)) for number in range(3)]
    processes += [started(config), started(whole)]
    answers, failures, stopped = [], [], threading.Event()
    try:
        numbers = np.random.default_rng(5).integers(0, 700, 100)
        with (
            RecommenderClient(f"127.0.0.1:{router_port}", timeout=30) as client,
            RecommenderClient(f"127.0.0.1:{whole_port}", timeout=30) as other,
        ):
            known = shown(other.recommend(numbers, 5))
            assert shown(client.recommend(numbers, 5)) == known
            right = {user: (items, scores) for user, items, scores in known}
            everything = {
                each.user_id: dict(zip(each.item_ids.tolist(), each.scores.tolist(), strict=True))
                for each in other.recommend(numbers, 400, 400)
            }

            def ask(seed):
                rng = np.random.default_rng(seed)
                while not stopped.is_set():
                    try:
                        answers.extend(client.recommend(rng.choice(numbers, 3), 5))
                    except Exception as error:
                        failures.append(error)

            threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
            for each in threads:
                each.start()
            time.sleep(0.5)
            processes[1].send_signal(signal.SIGKILL)
            processes[1].wait()
            time.sleep(2)
            processes[1] = started(config, "--shard", "1")
            give_up = time.monotonic() + 30
            while any(each.partial for each in client.recommend(numbers, 5)):
                assert time.monotonic() < give_up
                time.sleep(0.1)
            stopped.set()
            for each in threads:
                each.join()
            assert shown(client.recommend(numbers, 5)) == known
        text = urllib.request.urlopen(f"http://127.0.0.1:{web_port}/metrics").read().decode()
    finally:
        stopped.set()
        for each in processes:
            each.kill()
            each.wait()
    assert not failures
    assert any(each.partial for each in answers)
    assert "bigdl_recommender_lost_shards_total{" in text
    for each in answers:
        if not each.partial:
            assert (each.item_ids.tolist(), each.scores.tolist()) == right[each.user_id]
        elif each.source == "ranked":  # less than all, but each with the score that it has
            scores = everything[each.user_id]
            for item, score in zip(each.item_ids.tolist(), each.scores.tolist(), strict=True):
                assert not 400 <= item <= 799 or item in scores
                assert scores[item] == pytest.approx(score, rel=1e-5)


def test_columns_of_shards_with_and_without_nulls_are_joined(tmp_path):
    stores = []
    for number, values in enumerate(([[1, 2], [3]], [[4], []])):
        store = EmbeddedStore(tmp_path / str(number))
        tags = pa.array(values, pa.list_(pa.int64()))
        ids = pa.array([10 * number, 10 * number + 1])
        store.replace({"item": pa.table({"item": ids, "tags": tags, "name": ["a", "ü"]})})
        stores.append(store)
    servers = [GrpcServer([FeatureService(each)]) for each in stores]
    shards = [
        Shard((10 * number, 10 * number + 9), (), (f"127.0.0.1:{each.port}",))
        for number, each in enumerate(servers)
    ]
    with servers[0], servers[1], ShardedFeatures(shards) as features:
        rows = features.read("item", [11, 0, 99, 10, 1])
        assert rows["tags"].to_pylist() == [[], [1, 2], [], [4], [3]]
        assert rows["name"].to_pylist() == ["ü", "a", "", "a", "ü"]
        assert rows["item"].tolist() == [11, 0, 99, 10, 1]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_shards_in_redis_answer_by_tls_and_token(tmp_path, certificate):
    cert, key = certificate
    model = write_sources(tmp_path)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    tls = f"certificate: {cert}, key: {key}, authority: {cert}, token_file: token, "
    ports = [free_port() for _ in range(6)]
    shards = [
        {
            "items": list(span),
            "recall": f"127.0.0.1:{ports[2 * number]}",
            "features": f"127.0.0.1:{ports[2 * number + 1]}",
        }
        for number, span in enumerate(SPANS)
    ]
    redis, redis_port = start_redis(tmp_path)
    try:
        config, whole = tmp_path / "serving.yaml", tmp_path / "whole.yaml"
        config.write_text(
            f"store: {{location: 'redis://127.0.0.1:{redis_port}', prefix: films_}}"
            f"{stages_in_config(model)}"
            f"server: {{{tls}recommender_port: 0}}\nshards: {json.dumps(shards)}\n"
        )
        common = stages_in_config(model).replace("index: index", "index: all-index")
        whole.write_text(f"store: all\n{common}server: {{recommender_port: 0}}\n")
        for each in (config, whole):
            assert main(["init", "--config", str(each)]) == 0
        numbers = np.random.default_rng(6).integers(0, 700, 200)
        with ExitStack() as stack:
            for number in range(len(SPANS)):
                stack.enter_context(Serving(read_config(config), number))
            router = stack.enter_context(Serving(read_config(config)))
            one = stack.enter_context(Serving(read_config(whole)))
            address = f"localhost:{router.ports['recommender']}"
            client = stack.enter_context(RecommenderClient(address, 30, "secret", cert))
            assert shown(client.recommend(numbers, 5)) == shown(
                one.recommender.recommend(numbers, 5)
            )
            for token, authority in ((None, cert), ("wrong", cert), ("secret", None)):
                with (
                    RecommenderClient(address, 5, token, authority) as other,
                    pytest.raises(grpc.RpcError),
                ):
                    other.recommend([1], 5)
    finally:
        redis.kill()
        redis.wait()
