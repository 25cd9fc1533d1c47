"""Tests of the recommender against plain DataFrames, in one process and by services."""

import contextlib
import subprocess
import sys
import threading
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from refusals import refused
from served_catalogue import (
    BEST,
    CANDIDATES,
    Linear,
    assert_equal_offline,
    catalogue_index,
    catalogue_store,
    items_frame,
    offline,
    random_users,
    start_redis,
    users_frame,
)
from test_serving_store import needs_redis

from bigdl.friesian.feature import FeaturePipeline
from bigdl.friesian.serving import (
    EmbeddedStore,
    FeatureService,
    GrpcServer,
    IndexRecall,
    RankingService,
    RecallService,
    Recommender,
    RecommenderClient,
    RecommenderService,
    RemoteFeatures,
    RemoteRanker,
    RemoteRecall,
    ServingMetrics,
    open_store,
)

POPULAR = [9, 6, 3, 0, 12, 15]


@pytest.fixture(scope="module")
def catalogue():
    return users_frame(), items_frame()


@pytest.fixture(scope="module")
def index(catalogue):
    return catalogue_index(catalogue)


@pytest.fixture(scope="module")
def store(catalogue, tmp_path_factory):
    return catalogue_store(tmp_path_factory.mktemp("store"), catalogue)


def recommender_of(store, index, ranker=None, **options):
    recall = IndexRecall(store, index, seen_col="seen")
    options = {"candidates": CANDIDATES, "popular": POPULAR} | options
    return Recommender(store, recall, ranker or Linear(), **options)


def check_all(recommend, catalogue, count, at_once):
    numbers = random_users(count)
    wanted = offline(*catalogue, numbers)
    for start in range(0, count, at_once):
        part = numbers[start : start + at_once]
        assert_equal_offline(recommend(part.tolist(), BEST), wanted, part, POPULAR)


def test_answers_equal_those_of_frames_alone(catalogue, store, index):
    check_all(recommender_of(store, index).recommend, catalogue, 10_000, 97)


def test_answers_within_a_deadline_are_the_same(catalogue, store, index):
    with recommender_of(store, index) as recommender:
        users = catalogue[0]["user"].head(3).tolist()
        far = recommender.recommend(users, 4, deadline=1e300)  # no lock waits for that long
        assert far[0].item_ids.tolist() == recommender.recommend(users, 4)[0].item_ids.tolist()
    with recommender_of(store, index, deadline=30) as recommender:
        check_all(recommender.recommend, catalogue, 500, 7)


@needs_redis
def test_answers_with_redis_equal_those_of_frames_alone(catalogue, index, tmp_path):
    process, port = start_redis(tmp_path)
    try:
        with open_store(f"redis://127.0.0.1:{port}") as store:
            store.replace({"user": catalogue[0], "item": catalogue[1].drop(columns="vector")})
            check_all(recommender_of(store, index).recommend, catalogue, 10_000, 97)
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def four_services(store, index):
    """Return a client of a recommender whose stages are separate services."""
    with (
        GrpcServer([FeatureService(store)]) as features_at,
        GrpcServer([RankingService(Linear())]) as ranking_at,
        RemoteFeatures(f"127.0.0.1:{features_at.port}") as features,
        RemoteRanker(f"127.0.0.1:{ranking_at.port}") as ranker,
        GrpcServer([RecallService(IndexRecall(features, index, seen_col="seen"))]) as recall_at,
        RemoteRecall(f"127.0.0.1:{recall_at.port}") as recall,
        Recommender(
            features, recall, ranker, Linear.columns, candidates=CANDIDATES, popular=POPULAR
        ) as recommender,
        GrpcServer([RecommenderService(recommender)]) as server,
        RecommenderClient(f"127.0.0.1:{server.port}") as client,
    ):
        yield client


@pytest.mark.slow_cases("400")
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_answers_of_separate_services_equal_those_of_frames_alone(catalogue, store, index, count):
    with four_services(store, index) as client:
        check_all(client.recommend, catalogue, count, 97)


def test_a_pipeline_makes_the_inputs_as_it_did_for_the_training(tmp_path, catalogue, index):
    users, items = catalogue
    users = users[users["city"] != ""]
    joined = pd.merge(users, items.head(5), how="cross")[["user", "city", "age", "item", "price"]]
    joined.to_parquet(tmp_path / "joined.parquet")
    pipeline = FeaturePipeline().category_encode("city").min_max_scale(["age", "price"])
    pipeline.fit_files(str(tmp_path / "joined.parquet"), host="here")
    store = EmbeddedStore(tmp_path / "store")
    store.replace({"user": users, "item": items.drop(columns="vector")})
    asked = []

    class Recorder:
        columns = ("city", "age", "price", "item", "user")

        def predict(self, inputs):
            asked.append(inputs)
            return inputs["price"] + inputs["city"]

    recommender = recommender_of(store, index, Recorder(), pipeline=pipeline)
    recommender.check()
    numbers = users["user"].to_numpy()[:5]
    answers = recommender.recommend(numbers, 3)
    (inputs,) = asked
    raw_users, raw_items = users.set_index("user"), items.set_index("item")
    for place in range(0, len(inputs["item"]), 11):
        user, item = inputs["user"][place], inputs["item"][place]
        row = {"user": user, "item": item, "price": raw_items.loc[item, "price"]}
        row |= {name: raw_users.loc[user, name] for name in ("city", "age")}
        trained = pipeline.transform_row(row)
        assert {name: inputs[name][place] for name in trained} == trained
    assert [each.source for each in answers] == ["ranked"] * 5


def test_batches_of_a_pipeline_equal_its_rows(tmp_path):
    frame = pd.DataFrame(
        {"city": ["Oslo", None, "Rome"], "age": [1, 2, 40], "tags": [["a"], None, ["b", "a"]]}
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    pipeline = FeaturePipeline().category_encode("city").fillna(0, "city").cut_bins("age", [2, 30])
    pipeline.fit_files(str(tmp_path / "rows.parquet"), host="here")
    columns = {
        "city": pa.array(["Rome", "Paris", None]),
        "age": np.array([2, 1, 99], np.int16),
        "tags": pa.array([None, ["x"], []]),
    }
    batch = pipeline.transform_batch(columns).to_pylist()
    rows = [
        {"city": "Rome", "age": 2, "tags": None},
        {"city": "Paris", "age": 1, "tags": ["x"]},
        {"city": None, "age": 99, "tags": []},
    ]
    assert batch == [pipeline.transform_row(row) for row in rows]
    with refused("column-missing", "'age'"):
        pipeline.transform_batch({"city": columns["city"]})
    with refused("data-dtype"):
        pipeline.transform_batch({**columns, "city": pa.array([{"a": 1}] * 3)})


def test_functions_join_and_rerank(catalogue, store, index):
    def prepare(columns):
        assert len(columns["user"]) == len(columns["item"]) == len(columns["price"])
        return {**columns, "price": 10 - columns["price"]}

    def rerank(user, items, scores):
        assert (np.diff(scores) <= 0).all()
        return items[::-1][:2], scores[::-1][:2]

    plain = recommender_of(store, index).recommend([1], CANDIDATES)[0]
    dear = recommender_of(store, index, prepare=prepare).recommend([1], CANDIDATES)[0]
    assert plain.item_ids.tolist() != dear.item_ids.tolist()
    assert sorted(plain.item_ids) == sorted(dear.item_ids)
    last = recommender_of(store, index, rerank=rerank).recommend([1], 5)[0]
    assert last.item_ids.tolist() == plain.item_ids[::-1][:2].tolist()


class Cheapest:
    """Ranker by price, whose scores a function may change."""

    columns = ("user", "item", "price")

    def __init__(self, change=lambda inputs, scores: scores):
        self.change = change

    def predict(self, inputs):
        return self.change(inputs, -inputs["price"])


@pytest.fixture(scope="module")
def known(store, index):
    """Return six users that have candidates."""
    answers = recommender_of(store, index).recommend(list(range(40)), 1)
    return [each.user_id for each in answers if each.source == "ranked"][:6]


def test_scores_that_are_no_number_cost_only_their_user_and_item(store, index, known):
    recall = IndexRecall(store, index, seen_col="seen")
    recalled = [ids for ids, _ in recall.candidates(np.array(known[:2]), CANDIDATES).split()]
    bad_item = recalled[1][0]

    def change(inputs, scores):
        is_bad = (inputs["user"] == known[0]) | (inputs["item"] == bad_item)
        return np.where(is_bad, np.nan, scores)

    one, two = recommender_of(store, index, Cheapest(change)).recommend(known[:2], CANDIDATES)
    assert (one.source, one.reason) == ("recalled", "no candidate has a finite score")
    assert one.item_ids.tolist() == recalled[0].tolist()
    assert two.source == "ranked"
    assert two.reason == f"1 of {len(recalled[1])} candidates have no finite score"
    assert set(recalled[1]) - set(two.item_ids) == {bad_item}


def test_an_error_of_one_user_costs_only_that_user(store, index, known):
    def change(inputs, scores):
        if (inputs["user"] == known[3]).any():
            raise ValueError("a wrong user")
        return scores

    recommender = recommender_of(store, index, Cheapest(change))
    users = known
    answers = recommender.recommend(users, 5)
    assert [each.user_id for each in answers] == users
    assert [each.source for each in answers] == [
        "recalled" if user == known[3] else "ranked" for user in users
    ]
    assert answers[3].reason == "ranking failed"
    for each in answers[:3]:
        alone = recommender.recommend([each.user_id], 5)[0]
        assert each.item_ids.tolist() == alone.item_ids.tolist()


def test_a_ranker_that_always_fails_is_not_called_for_each_user(store, index):
    calls = []

    def change(inputs, scores):
        calls.append(1)
        raise ValueError("dead")

    answers = recommender_of(store, index, Cheapest(change)).recommend(list(range(1, 65)), 5)
    assert {each.source for each in answers} <= {"recalled", "popular"}
    assert len(calls) < 32


def test_features_with_nulls_cost_only_their_items(tmp_path, catalogue, index):
    users, items = catalogue
    items = items.drop(columns="vector").copy()
    recalled = IndexRecall(
        catalogue_store(tmp_path / "whole", catalogue), index, seen_col="seen"
    ).candidates([1], CANDIDATES)
    bad = recalled.ids[0]
    items["price"] = items["price"].mask(items["item"] == bad)
    table = pa.Table.from_pandas(items, preserve_index=False)
    assert table["price"].null_count == 1
    store = EmbeddedStore(tmp_path / "store")
    store.replace({"user": users, "item": table})
    answer = recommender_of(store, index).recommend([1], CANDIDATES)[0]
    assert answer.source == "ranked"
    assert set(recalled.ids) - set(answer.item_ids) == {bad}
    assert answer.reason == f"1 of {len(recalled.ids)} candidates have no finite score"


def test_rerank_that_fails_for_one_user_costs_only_that_user(store, index, known):
    def rerank(user, items, scores):
        if user == known[1]:
            raise KeyError(user)
        return items, scores

    answers = recommender_of(store, index, rerank=rerank).recommend(known[:2], 3)
    assert [(each.source, each.reason) for each in answers] == [
        ("ranked", ""),
        ("recalled", "rerank failed"),
    ]


class Failing(Linear):
    def predict(self, inputs):
        raise OSError("the model is gone")


class Slow(Linear):
    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def predict(self, inputs):
        self.begun.set()
        self.may_end.wait(30)
        return super().predict(inputs)


def test_a_stage_that_fails_is_replaced_by_what_was_found_before(store, index, caplog):
    metrics = ServingMetrics()
    ranked, unknown = recommender_of(store, index, Failing(), metrics=metrics).recommend([1, 2], 3)
    assert (ranked.source, ranked.reason) == ("recalled", "ranking failed")
    recall = IndexRecall(store, index, seen_col="seen")
    best = recall.candidates(np.array([1]), 3)
    assert ranked.item_ids.tolist() == best.ids.tolist()
    assert (unknown.source, unknown.item_ids.tolist()) == ("popular", POPULAR[:3])
    assert "the model is gone" in caplog.text

    class NoRecall:
        def candidates(self, user_ids, k):
            raise ConnectionError

    lost = Recommender(store, NoRecall(), Linear(), popular=POPULAR).recommend([1], 2)[0]
    assert (lost.source, lost.reason) == ("popular", "recall failed")


def test_a_late_stage_is_not_waited_for(store, index):
    ranker = Slow()
    with recommender_of(store, index, ranker, deadline=0.3) as recommender:
        begin = time.monotonic()
        answer = recommender.recommend([1], 3)[0]
        assert 0.3 <= time.monotonic() - begin < 10
        assert (answer.source, answer.reason) == ("recalled", "ranking timed out")
        ranker.may_end.set()
        assert recommender.recommend([1], 3, deadline=30)[0].source == "ranked"


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({}, {"k": 0}, ("argument-value",)),
        ({}, {"k": 5, "candidates": 4}, ("argument-value", "5", "4")),
        ({}, {"user_ids": ["1"]}, ("data-type", "'1'")),
        ({"inputs": ["nothing"]}, None, ("column-missing", "'nothing'")),
        ({"deadline": 0}, None, ("argument-value",)),
        ({"candidates": 0}, None, ("argument-value",)),
    ],
)
def test_wrong_arguments_are_told(store, index, options, call, message):
    def work():
        made = recommender_of(store, index, **options)
        made.check() if call is None else made.recommend(**{"user_ids": [1]} | call)

    with refused(*message):
        work()


def test_a_column_of_both_tables_has_to_be_named_apart(tmp_path, catalogue, index):
    store = EmbeddedStore(tmp_path / "s")
    items = catalogue[1].drop(columns="vector").assign(age=1)
    store.replace({"user": catalogue[0], "item": items})
    with refused("column-duplicate", "'age'"):
        recommender_of(store, index).check()


def test_stages_are_spans_where_opentelemetry_is_set_up():
    program = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
from bigdl.friesian.serving import ServingMetrics
metrics = ServingMetrics()
try:
    with metrics.time("request"), metrics.time("ranking"):
        raise OSError
except OSError:
    pass
ranking, request = exporter.get_finished_spans()
assert (ranking.name, request.name) == ("ranking", "request")
assert ranking.parent.span_id == request.context.span_id
assert not ranking.status.is_ok
assert [each["name"] for each in metrics.summary()] == ["ranking", "request"]
"""
    pytest.importorskip("opentelemetry.sdk.trace")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_stages_are_measured(store, index):
    from prometheus_client import CollectorRegistry, generate_latest

    metrics = ServingMetrics(CollectorRegistry())
    recommender = recommender_of(store, index, metrics=metrics)
    for _ in range(3):
        recommender.recommend([1, 2], 3)
    figures = {each["name"]: each for each in metrics.summary()}
    assert {"request", "recall", "features", "ranking"} <= figures.keys()
    assert figures["ranking"]["count"] == 3
    assert figures["ranking"]["p99"] >= figures["ranking"]["median"] > 0
    text = generate_latest(metrics.registry).decode()
    assert 'bigdl_recommender_answers_total{source="ranked"} 3.0' in text
    assert 'bigdl_recommender_answers_total{source="popular"} 3.0' in text
    metrics.reset()
    assert metrics.summary() == []
