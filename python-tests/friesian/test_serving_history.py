"""Tests of serving with event histories: sequence models, event stores, filters in the index."""

import contextlib
import json
import shutil
import sqlite3
import threading
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pandas as pd
import pytest
from served_catalogue import start_redis

from bigdl.common.errors import UsageError
from bigdl.friesian.baselines import History
from bigdl.friesian.sequential import SequenceRecommender
from bigdl.friesian.serving import (
    EmbeddedEvents,
    EmbeddedStore,
    Event,
    GrpcServer,
    HttpServer,
    IndexRecall,
    ItemAttributes,
    ItemFilter,
    ItemIndex,
    RecallService,
    Recommender,
    RecommenderClient,
    RecommenderService,
    RemoteRecall,
    SequenceRecall,
    open_events,
)
from bigdl.friesian.serving.attributes import StoreAttributes
from bigdl.friesian.serving.config import read_config
from bigdl.friesian.serving.program import Serving, initialise

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    process, port = start_redis(tmp_path_factory.mktemp("redis"))
    yield f"redis://127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.fixture(params=["folder", pytest.param("redis", marks=needs_redis)])
def opened(request, tmp_path):
    """Return a function that opens an empty event store."""
    stores = []

    def make(most=1000):
        if request.param == "folder":
            stores.append(open_events(str(tmp_path / "events"), most=most))
        else:
            url = request.getfixturevalue("redis_url")
            stores.append(open_events(url, f"{tmp_path.name}_", most))
        return stores[-1]

    yield make
    for each in stores:
        each.close()


def test_events_are_ordered_bounded_and_appended_once(opened):
    events = opened(most=3)
    first = [Event(1, 7, 30.0, "a"), Event(1, 9, 10.0, "b"), Event(2, 5, 1.0), Event(1, 3, 10.0)]
    assert events.append(first).added == 4
    assert events.append(first[:2]).repeated == 2
    history = events.read([1, 9, 2, 1])
    assert [each.items.tolist() for each in history] == [[3, 9, 7], [], [5], [3, 9, 7]]
    assert history[0].times.tolist() == [10.0, 10.0, 30.0]
    assert events.append([Event(1, 8, 40.0, "c"), Event(1, 2, 5.0, "d")]).added == 2
    assert events.read([1])[0].items.tolist() == [9, 7, 8]
    assert events.read([1])[0].total == 5
    late = events.append([Event(1, 6, 2.0, "e"), Event(1, 8, 40.0, "c")])
    assert (late.added, late.repeated, late.late) == (0, 1, 1)
    assert events.size() == 2


def test_a_table_of_events_can_be_loaded_again(opened):
    events = opened()
    rows = pd.DataFrame({"user": [1, 1, 1, 2], "item": [4, 4, 4, 4], "time": [5, 5, 6, 5]})
    assert events.append_table(rows).added == 4
    assert events.append_table(rows).repeated == 4
    assert events.read([1])[0].times.tolist() == [5.0, 5.0, 6.0]
    many = pd.DataFrame({"user": np.arange(10, 1211), "item": 4, "time": 5})
    assert events.append_table(many).added == 1201
    assert events.size() == 1203
    assert events.append_table(rows[:0]).added == 0


def test_times_that_are_not_finite_are_rejected(opened):
    events = opened()
    for wrong in (np.nan, np.inf, -1e30):
        with pytest.raises(UsageError, match="should be a finite number"):
            events.append([Event(1, 7, 30.0), Event(1, 7, wrong)])
        with pytest.raises(UsageError, match="in 1 of 2 rows"):
            events.append_table(pd.DataFrame({"user": [1, 2], "item": 4, "time": [5, wrong]}))
    assert events.size() == 0


def test_an_outage_of_the_events_is_no_error_of_the_client(tmp_path, caplog):
    events = EmbeddedEvents(tmp_path / "events")
    recommender = Recommender(None, None, None, stages=[], events=events)
    with events, HttpServer(recommender) as server:
        with contextlib.closing(sqlite3.connect(tmp_path / "events" / "events.sqlite")) as other:
            other.execute("DROP TABLE histories")
        content = json.dumps({"events": [{"user": 1, "item": 7}]}).encode()
        request = Request(f"http://127.0.0.1:{server.port}/events", content)
        for _ in range(2):
            with pytest.raises(HTTPError) as caught:
                urlopen(request)
            assert caught.value.code == 503
            assert json.load(caught.value)["error"].startswith("The event store does not work")
        request.add_header("Sec-Fetch-Site", "cross-site")
        with pytest.raises(HTTPError) as caught:
            urlopen(request)
        assert caught.value.code == 403
    assert caplog.text.count("no such table: histories") == 1


def test_concurrent_appends_lose_no_event(opened):
    events = opened()

    def append(number):
        for each in range(20):
            events.append([Event(1, 100 * number + each, float(each))])

    threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert events.read([1])[0].total == len(set(events.read([1])[0].items.tolist())) == 80


# -- sequence models -------------------------------------------------------------------------------


def clicks(users=60, items=40, rows=1500, seed=0):
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "user": random.integers(0, users, rows),
            "item": random.integers(0, items, rows) * 3 + 5,
            "time": random.permutation(rows) + 10,
        }
    )


def trained(name="sasrec", rows=None, **options):
    options = {"max_len": 12, "dim": 8, "epochs": 1} | options
    return SequenceRecommender(name, **options).fit(clicks() if rows is None else rows)


def offline(model, newer, users, k):
    """Return the recommendations of a trained model after newer events, by user."""
    history = History.of(newer, "user", "item", "time")
    model._history = model._history.joined(history)
    lists = model.recommend(users, k)
    return lists.groupby("user")["item"].apply(list)


@pytest.mark.parametrize(("name", "stride"), [("sasrec", 1), ("hstu", 5), ("gru4rec", 5)])
def test_answers_after_events_equal_offline_ones(tmp_path, name, stride):
    rows = clicks()
    old, new = rows[rows.time < 1200], rows[rows.time >= 1200].sort_values("time")
    model = trained(name, old, stride=stride)
    model.save(tmp_path / "model")
    users = np.arange(60)
    with EmbeddedEvents(tmp_path / "events") as events:
        events.append_table(old)
        recall = SequenceRecall(events, tmp_path / "model")
        served = Recommender(None, recall, None, stages=["recall"])
        before = [each.item_ids.tolist() for each in served.recommend(users, 5)]
        for start in range(0, len(new), 30):
            for each in new[start : start + 30].itertuples(index=False):
                events.append([Event(each.user, each.item, float(each.time))])
            served.recommend(users, 5)
        answers = [each.item_ids.tolist() for each in served.recommend(users, 5)]
    wanted = offline(model, new, users, 5)
    assert answers == wanted.tolist()
    assert answers != before
    info = recall.cache_info()
    assert info["same"] >= 60
    assert info["extended"] > (0 if stride == 1 else 100)


def test_many_new_events_are_read_with_the_whole_history(tmp_path):
    trained(max_len=100).save(tmp_path / "model")
    with EmbeddedEvents(tmp_path / "events") as events:
        events.append_table(clicks())
        recall = SequenceRecall(events, tmp_path / "model")
        counts = []
        for new in (0, 8, 9):
            events.append([Event(1, 5 + 3 * each, 10_000.0 + each) for each in range(new)])
            recall.candidates(np.array([1]), 5)
            info = recall.cache_info()
            counts.append((info["whole"], info["extended"]))
    assert counts == [(1, 0), (1, 1), (2, 1)]


def test_a_small_cache_gives_the_same_answers(tmp_path):
    trained().save(tmp_path / "model")
    with EmbeddedEvents(tmp_path / "events") as events:
        events.append_table(clicks())
        users = np.arange(60)
        lists = []
        for most in (0, 20_000, 1 << 30):
            recall = SequenceRecall(events, tmp_path / "model", cache_bytes=most)
            for _ in range(2):
                lists.append(recall.candidates(users, 5).ids.tolist())
            assert recall.cache_info()["bytes"] <= most
        assert all(each == lists[0] for each in lists)


def test_an_event_over_http_or_grpc_changes_the_answer(tmp_path):
    model = trained()
    model.save(tmp_path / "model")
    with EmbeddedEvents(tmp_path / "events") as events:
        events.append_table(clicks())
        recall = SequenceRecall(events, tmp_path / "model")
        served = Recommender(None, recall, None, stages=["recall"], popular=[5, 8])
        grpc = GrpcServer([RecommenderService(served)])
        with HttpServer(served) as web, grpc:
            url = f"http://127.0.0.1:{web.port}"

            def post(path, content):
                body = json.dumps(content).encode()
                with urlopen(Request(f"{url}{path}", body)) as answer:
                    return json.load(answer)

            event = {"user": 3, "item": 8, "time": 5000, "id": 77}
            assert post("/events", {"events": [event]})["added"] == 1
            assert post("/events", {"events": [event]})["repeated"] == 1
            (over_http,) = post("/recommend", {"users": [3], "k": 5})["recommendations"]
            with RecommenderClient(f"127.0.0.1:{grpc.port}") as client:
                assert client.append([Event(3, 8, 5000.0, "77"), Event(4, 11, 6e3)]).added == 1
                over_grpc = client.recommend([3, 4, 999], 5)
                chosen = ItemFilter.of({"deny": [*over_http["items"][:2], 5]})
                denied = client.recommend([3, 999], 5, item_filter=chosen)
            with pytest.raises(HTTPError, match="400"):
                post("/events", {"events": [{"user": 1}]})
            with pytest.raises(HTTPError, match="400"):
                post("/recommend", {"users": [3], "filter": {"where": {"colour": "red"}}})
    newer = pd.DataFrame({"user": [3, 4], "item": [8, 11], "time": [5000, 6000]})
    wanted = offline(model, newer, [3, 4], 12)
    assert over_http["items"] == wanted[3][:5] == over_grpc[0].item_ids.tolist()
    assert over_grpc[1].item_ids.tolist() == wanted[4][:5]
    assert over_grpc[2].item_ids.tolist() == [5, 8]  # popular items for an unknown user
    free = [each for each in wanted[3] if each not in (*wanted[3][:2], 5)]
    assert denied[0].item_ids.tolist() == free[:5]
    assert denied[1].item_ids.tolist() == [8]  # the filter holds for popular items, too


def test_a_swapped_model_is_used_with_its_items_and_an_empty_cache(tmp_path):
    first, second = trained(seed=1), trained(seed=2, dim=16)
    first.save(tmp_path / "first")
    second.save(tmp_path / "second")
    users = np.arange(60)
    with EmbeddedEvents(tmp_path / "events") as events:
        events.append_table(clicks())
        recall = SequenceRecall(events, tmp_path / "first")
        recall.candidates(users, 5)
        assert recall.swap(tmp_path / "second") == recall.version == 2
        ids = recall.candidates(users, 5).ids.reshape(60, 5).tolist()
    wanted = second.recommend(users, 5).groupby("user")["item"].apply(list).tolist()
    assert ids == wanted


def test_models_without_integer_items_or_with_long_windows_are_rejected(tmp_path):
    rows = clicks(rows=200)
    trained(rows=rows.assign(item=rows["item"].astype(str))).save(tmp_path / "strings")
    trained(rows=rows, max_len=50).save(tmp_path / "long")
    with EmbeddedEvents(tmp_path / "events", most=20) as events:
        with pytest.raises(UsageError, match="integer ids"):
            SequenceRecall(events, tmp_path / "strings")
        with pytest.raises(UsageError, match="reads 50 events"):
            SequenceRecall(events, tmp_path / "long")


# -- filters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_filters_apply_inside_the_search(kind):
    random = np.random.default_rng(3)
    ids = random.permutation(9000)[:6000]
    vectors = random.standard_normal((6000, 8)).astype("float32")
    items = pd.DataFrame(
        {"item": ids, "shelf": random.integers(0, 300, 6000), "stock": random.random(6000) < 0.9}
    )
    index = ItemIndex(ids, vectors, kind=kind)
    index.attributes = ItemAttributes(items)
    index.add_item(int(ids[0]), 5 * vectors[0])
    index.remove_items([int(ids[1])])
    vectors[0] *= 5
    queries = random.standard_normal((4, 8)).astype("float32")
    seen = [random.choice(ids, 500, replace=False) for _ in queries]
    for content in (
        {"where": {"shelf": [7, 9]}},
        {"where": {"shelf": {"min": 10, "max": 150}, "stock": True}},
        {"where": {"stock": True}, "deny": ids[:50].tolist()},
        {"allow": ids[:30].tolist()},
    ):
        chosen = ItemFilter.of(content)
        accepted = index.attributes.mask(ids, chosen) & (ids != ids[1])
        for row, found in enumerate(index.search(queries, 10, seen, item_filter=chosen).split()):
            free = accepted & ~np.isin(ids, seen[row])
            best = ids[free][np.argsort(-(vectors[free] @ queries[row]), kind="stable")][:10]
            assert len(found[0]) == len(best)
            if kind == "flat" or free.sum() < 4096:
                assert found[0].tolist() == best.tolist()
            assert np.isin(found[0], ids[free]).all()


def test_filters_follow_the_item_table_of_the_store(tmp_path):
    trained().save(tmp_path / "model" / "1")
    rows = clicks()
    rows.to_parquet(tmp_path / "events.parquet")
    items = pd.DataFrame({"item": np.sort(rows["item"].unique())})
    items["stock"] = True
    items.to_parquet(tmp_path / "items.parquet")
    users = pd.DataFrame({"user": np.arange(60), "age": 30})
    users.to_parquet(tmp_path / "users.parquet")
    (tmp_path / "serving.yaml").write_text(
        "store: store\n"
        "history: {events: events, model: model}\n"
        "recall: {attributes: [stock]}\n"
        "init: {users: users.parquet, items: items.parquet, events: events.parquet}\n"
        "stages: [recall]\n"
        "server: {recommender_port: 0, http_port: 0}\n"
    )
    config = read_config(tmp_path / "serving.yaml")
    assert initialise(config)["events"] == len(rows)
    with Serving(config) as serving:
        chosen = ItemFilter.of({"where": {"stock": True}})
        recommender = serving.recommender
        (before,) = recommender.recommend([1], 5, item_filter=chosen)
        gone = int(before.item_ids[0])
        with EmbeddedStore(tmp_path / "store") as store:
            store.update({"item": pd.DataFrame({"item": [gone], "stock": [False]})})
        (after,) = recommender.recommend([1], 5, item_filter=chosen)
        assert before.item_ids[1:].tolist() == after.item_ids[:4].tolist()
        with urlopen(f"http://127.0.0.1:{serving.ports['http']}/metrics") as answer:
            text = answer.read().decode()
        assert 'bigdl_recommender_size{of="users_with_events"} 60.0' in text
        assert 'bigdl_recommender_size{of="model_version"} 1.0' in text


def test_bounds_have_the_precision_of_the_attribute():
    frame = pd.DataFrame({"item": [1, 2], "price": np.array([0.1, 0.2], "float32"), "n": [3, 4]})
    attributes, ids = ItemAttributes(frame), np.array([1, 2])
    for where, wanted in (
        ({"price": {"max": 0.1}}, [True, False]),
        ({"price": {"min": 0.2}}, [False, True]),
        ({"price": {"max": 1e300}}, [True, True]),
        ({"n": {"min": 3.5}}, [False, True]),
    ):
        assert attributes.mask(ids, ItemFilter.of({"where": where})).tolist() == wanted


def test_attributes_are_read_once_for_concurrent_requests(tmp_path):
    reads, waiting, going = [], threading.Event(), threading.Event()

    class Slow(EmbeddedStore):
        def read(self, table, ids, columns=None):
            reads.append(len(ids))
            if len(reads) > 3:
                waiting.set()
                going.wait(10)
            return super().read(table, ids, columns)

    ids = np.arange(25_000)
    store = Slow(tmp_path / "attributes")
    store.replace({"item": pd.DataFrame({"item": ids, "stock": True})})
    attributes = StoreAttributes(store, "item", ["stock"], lambda: ids)
    chosen = ItemFilter.of({"where": {"stock": True}})
    assert attributes.mask(ids, chosen).all()
    assert reads == [10_000, 10_000, 5_000]
    store.update({"item": pd.DataFrame({"item": [7], "stock": [False]})})
    thread = threading.Thread(target=attributes.mask, args=(ids, chosen))
    thread.start()
    waiting.wait(10)
    assert attributes.mask(ids, chosen).all()  # at once, by the previous attributes
    going.set()
    thread.join()
    assert not attributes.mask(ids, chosen)[7]
    assert len(reads) == 6


def test_a_recall_without_filters_and_invalid_filters_are_errors():
    class Custom:
        def candidates(self, user_ids, k):
            raise AssertionError

    chosen = ItemFilter.of({"deny": [1]})
    with pytest.raises(UsageError, match="Custom, which does not support filters"):
        Recommender(None, Custom(), None, stages=["recall"]).recommend([1], item_filter=chosen)
    index = ItemIndex([1, 2], np.eye(2))
    index.attributes = ItemAttributes(pd.DataFrame({"item": [1, 2], "kind": ["a", "b"]}))
    recommender = Recommender(None, IndexRecall(None, index), None, stages=["recall"])
    for where, sentence in (
        ({"colour": 1}, "no attribute 'colour'"),
        ({"kind": {"min": 1}}, "cannot be compared"),
    ):
        with pytest.raises(UsageError, match=sentence):
            recommender.recommend([1], item_filter=ItemFilter.of({"where": where}))
    for content in ({"allowed": [1]}, {"where": {"kind": {"least": 1}}}, {"deny": 3}, [1]):
        with pytest.raises(UsageError):
            ItemFilter.of(content)
    with (
        GrpcServer([RecallService(recommender.recall)]) as server,
        RemoteRecall(f"127.0.0.1:{server.port}") as recall,
    ):
        for deadline in (None, 5.0):
            remote = Recommender(None, recall, None, stages=["recall"], deadline=deadline)
            for users in ([1], [1, 2, 3]):
                with pytest.raises(UsageError, match="no attribute 'colour'"):
                    remote.recommend(users, item_filter=ItemFilter.of({"where": {"colour": 1}}))
    with pytest.raises(UsageError, match="keeps no events"):
        recommender.append([Event(1, 2, 3.0)])
