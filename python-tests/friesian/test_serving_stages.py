"""Tests of custom stages: one class, one line of configuration, and isolation of failures."""

import contextlib
import json
import sys
import threading
import types
import urllib.request

import numpy as np
import pytest
from refusals import refused
from served_catalogue import catalogue_index, catalogue_store, items_frame, users_frame
from served_program import written

from bigdl.friesian.serving import (
    Batch,
    Candidates,
    GrpcServer,
    HttpServer,
    IndexRecall,
    Recommender,
    RecommenderClient,
    RecommenderService,
    ServingMetrics,
)
from bigdl.friesian.serving.config import read_config
from bigdl.friesian.serving.program import Serving

STOCK = {item: item % 2 for item in items_frame()["item"].tolist()}  # a half is out of stock


class InStock:
    """Stage that removes items that are out of stock."""

    name = "in_stock"

    def __init__(self, minimum=1):
        self.minimum, self.may_end = minimum, threading.Event()
        self.may_end.set()

    def run(self, batch):
        self.may_end.wait(30)
        return batch.keep(np.array([STOCK[id] >= self.minimum for id in batch.candidates.ids]))


class ByPrice:
    columns = ("price",)

    def predict(self, inputs):
        return -inputs["price"]


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    """Write the configuration of a server with a small catalogue."""
    frames = users_frame(), items_frame()
    folder = tmp_path_factory.mktemp("stages")
    store = catalogue_store(folder / "store", frames)
    catalogue_index(frames).save(folder / "index")
    return folder, store, catalogue_index(frames)


@pytest.fixture
def shop(monkeypatch):
    """Write a module of another package that has the stage."""
    module = types.ModuleType("shop_stages")
    module.InStock, module.price = InStock, lambda: ByPrice()
    monkeypatch.setitem(sys.modules, "shop_stages", module)


CONFIG = """
store: store
recall: {index: index}
recommender: {candidates: 40, popular: [3, 0, 6]}
server: {recommender_port: 0, http_port: 0}
stages: [recall, STAGE]
"""


@pytest.mark.parametrize("stage", ["shop_stages:InStock", "{shop_stages.InStock: {minimum: 1}}"])
def test_a_stage_is_one_class_and_one_line_of_the_configuration(catalogue, shop, stage):
    path = written(catalogue[0], CONFIG.replace("STAGE", stage), f"{len(stage)}.yaml")
    recall = IndexRecall(catalogue[1], catalogue[2]).candidates(np.array([1]), 40)
    wanted = [item for item in recall.ids.tolist() if STOCK[item]][:5]
    with Serving(read_config(path)) as serving:
        address = f"127.0.0.1:{serving.ports['recommender']}"
        url = f"http://127.0.0.1:{serving.ports['http']}"
        with RecommenderClient(address) as client:
            (answer,) = client.recommend([1], 5)
            assert (answer.source, answer.item_ids.tolist()) == ("recalled", wanted)
            assert {"recall", "in_stock"} <= {each["name"] for each in client.metrics()}
        with urllib.request.urlopen(f"{url}/recommend/1?k=5") as content:
            assert json.load(content)["recommendations"][0]["items"] == wanted
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
        assert 'bigdl_recommender_stage_seconds_count{stage="in_stock"} 2.0' in metrics


def test_a_stage_is_found_by_its_entry_point(monkeypatch):
    from importlib.metadata import EntryPoint

    from bigdl.common import plugins
    from bigdl.friesian.serving import load_stage

    point = EntryPoint("in_stock", f"{__name__}:InStock", "bigdl.stages")
    monkeypatch.setattr(plugins, "entry_points", lambda group, name: [point])
    assert load_stage("in_stock", {"minimum": 2}).minimum == 2


@contextlib.contextmanager
def served(catalogue, stage, place, **options):
    """Serve a recommender with a custom stage at an index, by gRPC and by HTTP."""
    _, store, index = catalogue
    stages = ["recall", "features", "ranking"]
    stages.insert(place, stage)
    options = {"candidates": 40, "popular": [3, 0, 6], "stages": stages} | options
    with (
        Recommender(store, IndexRecall(store, index), ByPrice(), **options) as recommender,
        GrpcServer([RecommenderService(recommender)]) as server,
        HttpServer(recommender) as web,
        RecommenderClient(f"127.0.0.1:{server.port}") as client,
    ):
        yield recommender, client, f"http://127.0.0.1:{web.port}"


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_stage_may_leave_out_items_before_and_after_each_other_one(catalogue, place):
    with served(catalogue, InStock(), place) as (recommender, client, _):
        users = [1, 2, 3, 5]
        prices = items_frame().set_index("item")["price"]
        for each in client.recommend(users, 5):
            if each.user_id == 2:  # unknown
                assert each.source == "popular"
                continue
            recalled = recommender.recall.candidates(np.array([each.user_id]), 40).ids.tolist()
            wanted = sorted((i for i in recalled if STOCK[i]), key=lambda i: (prices[i], i))
            assert (each.source, each.item_ids.tolist()) == ("ranked", wanted[:5])


def test_a_stage_that_is_late_or_fails_is_answered_by_what_was_found_before(catalogue, caplog):
    stage = InStock()
    with served(catalogue, stage, 1, deadline=1.5) as (recommender, client, url):
        recalled = recommender.recall.candidates(np.array([1]), 5).ids.tolist()
        stage.may_end.clear()
        body = json.dumps({"users": [1, 2], "k": 5}).encode()
        with urllib.request.urlopen(f"{url}/recommend", body) as content:
            known, unknown = json.load(content)["recommendations"]
        assert (known["source"], known["reason"]) == ("recalled", "in_stock timed out")
        assert (known["items"], unknown["source"]) == (recalled, "popular")
        assert client.recommend([1], 5)[0].source == "recalled"
        stage.may_end.set()
        stage.minimum = None  # cannot be compared
        (answer,) = recommender.recommend([1], 5, deadline=30)
        assert (answer.source, answer.reason) == ("recalled", "in_stock failed")
        assert "in_stock failed: TypeError" in caplog.text


def test_a_stage_that_fails_for_one_user_costs_that_one_alone(catalogue):
    class Choosy(InStock):
        def run(self, batch):
            if 3 in batch.users:
                raise ValueError("a wrong user")
            return super().run(batch)

    with served(catalogue, Choosy(), 2) as (recommender, _, _):
        answers = recommender.recommend([1, 3, 5, 7], 3)
        sources = [each.source for each in answers]
        assert sources == ["ranked", "recalled", "ranked", "ranked"]


def test_a_stage_may_take_the_place_of_another_and_read_the_store(catalogue):
    class Cheap:
        name = "cheap"

        def run(self, batch):
            ids = np.arange(0, 30, 3)
            prices = batch.store.read("item", ids, ["price"])["price"]
            kept, users = ids[prices < 0.9], len(batch.users)
            counts = np.full(users, len(kept))
            many = np.tile(kept, users)
            found = Candidates(many, np.zeros(len(many), np.float32), counts)
            return Batch(batch.users, batch.k, 0, candidates=found, scores=-many)

    store, metrics = catalogue[1], ServingMetrics()
    recommender = Recommender(store, None, None, stages=[Cheap()], metrics=metrics)
    prices = items_frame().set_index("item")["price"]
    wanted = [item for item in range(0, 30, 3) if prices[item] < 0.9][:2]
    assert recommender.recommend([4], 2)[0].item_ids.tolist() == wanted
    assert [each["name"] for each in metrics.summary()] == ["cheap", "request"]


def test_lists_that_cannot_be_served_are_refused(catalogue, shop):
    _, store, index = catalogue
    recall = IndexRecall(store, index)
    with refused("argument-missing", "ranker"):
        Recommender(store, recall, None, inputs=["price"])
    with refused("argument-type", "object"):
        Recommender(store, recall, ByPrice(), stages=["recall", object()])
    for stage, words in (
        ("shop", ("name-unknown", "'shop'", "line 6")),
        ("shop_stages:Nothing", ("name-unknown", "Nothing")),
        ("{shop_stages:InStock: {least: 1}}", ("argument-value", "least")),
        ("shop_stages:price", ("argument-type", "ByPrice")),
        ("{features: {columns: 1}}", ("argument-conflict", "features")),
        ("1", ("argument-value", "[recall, ")),
    ):
        path = written(catalogue[0], CONFIG.replace("STAGE", stage), "wrong.yaml")
        with refused(*words):
            Serving(read_config(path))


def test_a_stage_that_returns_no_batch_is_named(catalogue, caplog):
    class Nothing(InStock):
        def run(self, batch):
            return None

    class Short(InStock):
        def run(self, batch):
            from dataclasses import replace

            return replace(batch, scores=np.zeros(1))

    for stage, words in ((Nothing(), "should return a Batch"), (Short(), "scores for 40")):
        with served(catalogue, stage, 1) as (recommender, _, _):
            assert recommender.recommend([1], 3)[0].reason == "in_stock failed"
            assert words in caplog.text
