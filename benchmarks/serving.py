"""Recommendations of DeepFM: in one process and by services, against the same parts by hand.

    python benchmarks/serving.py [--items 100000] [--candidates 500] [--requests 300] [--json FILE]

100,000 items with vectors of 64 numbers (IVF, 8 of 400 parts searched), 26 categories of users and
items, 500 candidates for a user.  Sides take turns, in rounds of 20 requests:

``parts``         the search by Faiss and the model alone, on arrays that are ready: the floor;
``by hand``       Faiss, features by one MGET of Redis and the model, joined in a service of gRPC;
``one process``   a Recommender, by function calls;
``gRPC``          the same behind a service;
``four services`` each stage behind a service, in processes of their own.

Then rows of a store, 1, 50 and 500 at a time: of a folder, of Redis, and of hashes in Redis as most
feature stores keep them.  Needs ``redis-server``.
"""

import argparse
import json
import multiprocessing
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import faiss
import grpc
import numpy as np
import pandas as pd
import redis
import torch

from bigdl.friesian.models import DeepFM
from bigdl.friesian.serving import (
    EmbeddedStore,
    FeatureService,
    GrpcServer,
    IndexRecall,
    ItemIndex,
    ModuleRanker,
    RankingService,
    RecallService,
    Recommender,
    RecommenderClient,
    RecommenderService,
    RedisStore,
    RemoteFeatures,
    RemoteRanker,
    RemoteRecall,
)

USERS, DIM, BEST = 5000, 64, 10
NAMES = [f"c{number}" for number in range(26)]
PARTS, SEARCHED = 400, 8
ROUND = 20


def frames(items, seed=0):
    """Users and items with 13 categories each, and the items' vectors."""
    rng = np.random.default_rng(seed)

    def table(name, rows, columns):
        made = {each: rng.integers(0, 100, rows).astype(np.int32) for each in columns}
        return pd.DataFrame({name: np.arange(rows, dtype=np.int32), **made})

    users, films = table("user", USERS, NAMES[:13]), table("item", items, NAMES[13:])
    users["prediction"] = list(rng.standard_normal((USERS, DIM)).astype(np.float32))
    return users, films, rng.standard_normal((items, DIM)).astype(np.float32)


def ranker():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return ModuleRanker(DeepFM(dict.fromkeys(NAMES, 100), [], dim=16, hidden=(64, 32)))


class ByHand:
    """What one writes with Faiss, Redis and a model."""

    def __init__(self, index, port, model, candidates):
        self._index, self._model, self._candidates = index, model, candidates
        self._redis = redis.Redis(port=port)
        self._user = np.dtype([("c", np.int32, 13), ("v", np.float32, DIM)])
        self._parameters = faiss.SearchParametersIVF(nprobe=SEARCHED)

    def load(self, users, items):
        rows = np.zeros(len(users), self._user)
        rows["c"], rows["v"] = users[NAMES[:13]], np.stack(users["prediction"])
        self._redis.mset({f"u:{i}": row.tobytes() for i, row in enumerate(rows)})
        matrix = items[NAMES[13:]].to_numpy()
        for start in range(0, len(matrix), 10_000):
            part = enumerate(matrix[start : start + 10_000], start)
            self._redis.mset({f"i:{i}": row.tobytes() for i, row in part})

    def recommend(self, user):
        row = np.frombuffer(self._redis.get(f"u:{user}"), self._user)
        faiss.omp_set_num_threads(1)
        _, (ids,) = self._index.search(row["v"], self._candidates, params=self._parameters)
        ids = ids[ids >= 0]
        found = b"".join(self._redis.mget([f"i:{each}" for each in ids]))
        of_items = np.frombuffer(found, np.int32).reshape(-1, 13)
        inputs = dict(zip(NAMES[13:], of_items.T, strict=True))
        inputs |= {n: np.full(len(ids), v) for n, v in zip(NAMES[:13], row["c"][0], strict=True)}
        scores = self._model.predict(inputs)
        order = np.argsort(-scores)[:BEST]
        return ids[order], scores[order]

    def serve(self):
        """Start a service of gRPC; returns the server and its port."""

        def answer(content, context):
            ids, scores = self.recommend(int(content))
            return ids.tobytes() + scores.tobytes()

        server = grpc.server(ThreadPoolExecutor(16))
        handlers = {"ask": grpc.unary_unary_rpc_method_handler(answer)}
        generic = grpc.method_handlers_generic_handler("hand", handlers)
        server.add_generic_rpc_handlers([generic])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return server, port


def serve_stage(stage, folder, candidates, addresses, ready):
    """In a process of its own: one of the four services."""
    if stage == "feature":
        service = FeatureService(EmbeddedStore(f"{folder}/store"))
    elif stage == "ranking":
        service = RankingService(ranker())
    elif stage == "recall":
        index = ItemIndex.load(f"{folder}/index")
        service = RecallService(IndexRecall(RemoteFeatures(addresses["feature"]), index))
    else:
        stages = RemoteFeatures(addresses["feature"]), RemoteRecall(addresses["recall"])
        scores = RemoteRanker(addresses["ranking"])
        service = RecommenderService(Recommender(*stages, scores, NAMES, candidates=candidates))
    server = GrpcServer([service])
    ready.send(server.port)
    ready.recv()
    server.stop(0)


def four_services(stack, folder, candidates):
    """Start all services; returns the address of the recommender."""
    start = multiprocessing.get_context("spawn")
    addresses = {}
    for stage in ("feature", "ranking", "recall", "recommender"):
        ours, theirs = start.Pipe()
        arguments = stage, folder, candidates, dict(addresses), theirs
        process = start.Process(target=serve_stage, args=arguments, daemon=True)
        process.start()
        stack.callback(process.join)
        stack.callback(ours.send, "end")
        addresses[stage] = f"127.0.0.1:{ours.recv()}"
    return addresses["recommender"]


def start_redis(stack, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while subprocess.run(["redis-cli", "-p", str(port), "ping"], capture_output=True).returncode:
        time.sleep(0.05)
    return port


def alternate(sides, requests, threads):
    """Milliseconds of each request, and requests per second in each round, by side."""
    rng = np.random.default_rng(9)
    times, rates = {name: [] for name in sides}, {name: [] for name in sides}
    with ThreadPoolExecutor(threads) as pool:
        for number in range(-1, requests // ROUND):
            for name, ask in sides.items():
                users = rng.integers(0, USERS, ROUND).tolist()

                def timed(user, ask=ask):
                    begin = time.perf_counter()
                    ask(user)
                    return 1000 * (time.perf_counter() - begin)

                begin = time.perf_counter()
                found = list(pool.map(timed, users))
                if number >= 0:  # the first round warms up
                    times[name] += found
                    rates[name].append(ROUND / (time.perf_counter() - begin))
    return {
        name: {
            "p50_ms": float(np.percentile(times[name], 50)),
            "p99_ms": float(np.percentile(times[name], 99)),
            "requests_per_s": float(np.median(rates[name])),
        }
        for name in sides
    }


def store_sides(store, remote, port, items):
    """Functions that read rows of items by id."""
    plain = redis.Redis(port=port)
    names = NAMES[13:]
    for start in range(0, len(items), 5000):
        pipe = plain.pipeline(transaction=False)
        for row in items.iloc[start : start + 5000].itertuples(index=False):
            pipe.hset(f"h:{row.item}", mapping={name: getattr(row, name) for name in names})
        pipe.execute()

    def hashes(ids):
        pipe = plain.pipeline(transaction=False)
        for each in ids:
            pipe.hmget(f"h:{each}", names)
        return np.array(pipe.execute()).astype(np.int32)

    return {
        "folder": lambda ids: store.read("item", ids).columns,
        "Redis": lambda ids: remote.read("item", ids).columns,
        "Redis hashes": hashes,
    }


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    users, items, vectors = frames(options.items)
    results = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        port = start_redis(stack, folder)
        store = EmbeddedStore(f"{folder}/store")
        store.replace({"user": users, "item": items})
        remote = stack.enter_context(RedisStore(f"redis://127.0.0.1:{port}", "ours_"))
        remote.replace({"user": users, "item": items})
        index = ItemIndex(items["item"], vectors, "ivf", nlist=PARTS, nprobe=SEARCHED)
        index.save(f"{folder}/index")
        model = ranker()
        by_hand = ByHand(index._state.base, port, model, options.candidates)
        by_hand.load(users, items)
        hand_server, hand_port = by_hand.serve()
        stack.callback(hand_server.stop, 0)
        hand = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{hand_port}"))
        hand_ask = hand.unary_unary("/hand/ask")
        recommender = Recommender(
            store, IndexRecall(store, index), model, candidates=options.candidates
        )
        server = stack.enter_context(GrpcServer([RecommenderService(recommender)]))
        client = stack.enter_context(RecommenderClient(f"127.0.0.1:{server.port}"))
        address = four_services(stack, folder, options.candidates)
        four = stack.enter_context(RecommenderClient(address))
        queries = np.stack(users["prediction"])
        parameters = faiss.SearchParametersIVF(nprobe=SEARCHED)
        ready = {name: np.zeros(options.candidates, np.int32) for name in NAMES}

        def parts(user):
            faiss.omp_set_num_threads(1)
            query = queries[user : user + 1]
            index._state.base.search(query, options.candidates, params=parameters)
            model.predict(ready)

        sides = {
            "parts": parts,
            "by hand": lambda user: hand_ask(str(user).encode()),
            "one process": lambda user: recommender.recommend([user], BEST),
            "gRPC": lambda user: client.recommend([user], BEST),
            "four services": lambda user: four.recommend([user], BEST),
        }
        for user in range(20):
            wanted = by_hand.recommend(user)[0].tolist()
            for each in (recommender, client, four):
                same = set(each.recommend([user], BEST)[0].item_ids.tolist()) & set(wanted)
                assert len(same) >= BEST - 1, "the sides do not answer the same"
        for threads in (1, 8):
            results[f"{threads} at a time"] = alternate(sides, options.requests, threads)
        rng = np.random.default_rng(3)
        readers = store_sides(store, remote, port, items)
        for count in (1, 50, 500):
            times = {name: [] for name in readers}
            for _ in range(options.requests):
                ids = rng.integers(0, options.items, count)
                for name, read in readers.items():
                    begin = time.perf_counter()
                    read(ids)
                    times[name].append(1000 * (time.perf_counter() - begin))
            results[f"{count} rows"] = {
                name: {
                    "p50_ms": float(np.percentile(each, 50)),
                    "p99_ms": float(np.percentile(each, 99)),
                }
                for name, each in times.items()
            }
    for what, table in results.items():
        print(f"\n{what}")
        for name, figures in table.items():
            shown = "  ".join(f"{key} {value:8.3f}" for key, value in figures.items())
            print(f"  {name:14} {shown}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return results


if __name__ == "__main__":
    main()
