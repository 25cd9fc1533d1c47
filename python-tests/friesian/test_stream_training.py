"""Tests of training sequence models on streams, and of publishing the changed weights."""

import os
import signal
import subprocess
import sys
import threading
import time
from urllib.request import urlopen

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.friesian.models.sequences import SavedSequenceModel
from bigdl.friesian.sequential import SequenceRecommender
from bigdl.friesian.serving import EmbeddedEvents, EmbeddedStore
from bigdl.friesian.serving.config import read_config
from bigdl.friesian.serving.deltas import DeltaFolder, DeltaFollower, apply_tables
from bigdl.friesian.serving.program import Serving
from bigdl.friesian.stream_training import SequenceLearner, main, train
from bigdl.orca.learn.streaming import newest_batch

OPTIONS = {"dim": 8, "loss": "softmax"}


def clicks(rows=900, users=40, items=30, seed=0):
    random = np.random.default_rng(seed)
    user = random.integers(0, users, rows)
    return pd.DataFrame(
        {
            "user": user,
            "item": random.integers(0, items, rows) * 3 + 5,
            "time": np.arange(rows) + 10.0,
        }
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    recommender = SequenceRecommender("sasrec", max_len=10, epochs=1, **OPTIONS)
    recommender.fit(clicks()).save(folder)
    return folder


def arriving(first, count, new_item=None):
    rows = clicks(rows=first + count, seed=1)[first:]
    if new_item is not None:
        rows = rows.assign(item=np.where(rows["time"] % 7 == 0, new_item, rows["item"]))
    return pa.Table.from_pandas(rows.assign(time=rows["time"] + 900), preserve_index=False)


def assert_same_state(first, second):
    states = [each.model().network.state_dict() for each in (first, second)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=1e-6, msg=name)


def test_a_loaded_learner_continues_as_the_saved_one(saved, tmp_path):
    learner = SequenceLearner(saved)
    before = learner.model()
    metrics = learner.update(arriving(0, 60, new_item=7777))
    assert metrics["events"] == metrics["targets"] == 60
    assert metrics["new_items"] == 1
    assert 0 <= metrics["ndcg@10"] <= metrics["hit_rate@10"] <= 1
    after = learner.model()
    assert after.items[:-1].equals(before.items)
    assert after.items[-1].as_py() == 7777
    learner.save(tmp_path)
    loaded = SequenceLearner(saved)
    loaded.load(tmp_path)
    assert_same_state(learner, loaded)
    more = arriving(60, 60)  # no new item, which would create the optimizer again
    assert learner.update(more) == pytest.approx(loaded.update(more), abs=1e-5)
    assert_same_state(learner, loaded)
    assert loaded.sums["targets"] == 120


def test_a_follower_has_the_published_weights(saved, tmp_path):
    learner = SequenceLearner(saved)
    folder = DeltaFolder(tmp_path / "deltas", full_every=3, keep=1)
    steady, late = DeltaFollower(tmp_path / "deltas"), DeltaFollower(tmp_path / "deltas")
    assert steady.poll() is None
    published = {}
    for number in range(1, 7):
        if number > 1:
            learner.update(arriving(20 * number, 20, new_item=7000 + number // 2))
        published[number] = learner.model()
        folder.publish(number, published[number], learner.name, learner.options)
        version = steady.poll()
        assert steady.poll() is version  # until it is acknowledged
        steady.acknowledge(version)
        assert steady.poll() is None
        assert version.number == number
        for name, value in published[number].network.state_dict().items():
            assert torch.equal(value, version.model.network.state_dict()[name])
        assert version.model.items.equals(published[number].items)
    assert list(folder.versions().values()).count("full") == 1
    assert late.poll().model.items.equals(published[6].items)
    assert folder.rollback(5) == 5
    back = steady.poll()
    assert back.number == 5
    for name, value in published[5].network.state_dict().items():
        assert torch.equal(value, back.model.network.state_dict()[name])
    steady.acknowledge(back)
    folder.resume()
    assert steady.poll().number == 6
    with pytest.raises(UsageError, match="no version 99"):
        folder.rollback(99)
    (tmp_path / "deltas" / "6-delta" / "arrays.npz").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="cannot be read"):
        DeltaFollower(tmp_path / "deltas").poll()


def test_rows_of_tables_are_applied_although_versions_are_skipped_or_fail(saved, tmp_path):
    model, folder = SavedSequenceModel.read(saved), DeltaFolder(tmp_path / "deltas", full_every=3)
    prices = {1: [(5, 1.0)], 2: [(5, 2.0), (8, 2.0)], 3: [(8, 3.0)], 4: [], 5: [(5, 5.0)]}

    def publish(number):
        rows = pd.DataFrame(prices[number], columns=["item", "price"])
        tables = {"item": pa.Table.from_pandas(rows)} if len(rows) else {}
        folder.publish(number, model, "sasrec", OPTIONS, tables=tables)

    def read(ids):
        with EmbeddedStore(tmp_path / "store") as store:
            return store.read("item", ids)["price"].tolist()

    with EmbeddedStore(tmp_path / "store") as store:
        users = pd.DataFrame({"user": [1], "age": [30]})
        items = pd.DataFrame({"item": [5, 8], "price": [0.0, 0.0]})
        store.replace({"user": users, "item": items})
        publish(1)
        follower = DeltaFollower(tmp_path / "deltas")
        first = follower.poll()
        for number in (2, 3, 4):
            publish(number)
        assert folder.versions() == {1: "full", 2: "delta", 3: "delta", 4: "full"}
        assert follower.poll().tables["item"].num_rows == 4  # nothing was acknowledged
        with pytest.raises(UsageError, match="not the one that poll returned"):
            follower.acknowledge(first)
        apply_tables(store, follower.poll())
        assert read([5, 8]) == [2.0, 3.0]
        store.replace({"user": users, "item": items})
    with EmbeddedEvents(tmp_path / "events") as events:
        events.append_table(clicks())
    (tmp_path / "serving.yaml").write_text(
        "store: store\nhistory: {events: events, deltas: deltas}\nstages: [recall]\n"
        "server: {recommender_port: 0}\n"
    )
    with Serving(read_config(tmp_path / "serving.yaml")) as serving:
        assert read([5, 8]) == [2.0, 3.0]  # of the versions published before the start
        publish(5)
        while serving.recommender.recall.version != 5:
            time.sleep(0.02)
        assert read([5, 8]) == [5.0, 3.0]


def test_versions_of_another_checkpoint_are_rejected(saved, tmp_path):
    model, folder = SavedSequenceModel.read(saved), DeltaFolder(tmp_path / "deltas")
    for number in (1, 2):
        folder.publish(number, model, "sasrec", OPTIONS)
    with refused("argument-value", "up to 2, are newer than the checkpoint", "continues at 1"):
        train(read_config(write_config(tmp_path, saved)))


def test_a_server_follows_versions_without_a_failed_or_mixed_answer(saved, tmp_path):
    learner = SequenceLearner(saved)
    folder = DeltaFolder(tmp_path / "deltas")
    folder.publish(1, learner.model(), learner.name, learner.options)
    with EmbeddedEvents(tmp_path / "events") as events:
        events.append_table(clicks())
    (tmp_path / "serving.yaml").write_text(
        "history: {events: events, deltas: deltas}\nstages: [recall]\n"
        "server: {recommender_port: 0, http_port: 0}\n"
    )
    users = np.arange(40)
    seen, answers, ending = set(), [], threading.Event()
    with Serving(read_config(tmp_path / "serving.yaml")) as serving:
        recommender = serving.recommender

        def ask():
            while not ending.is_set():
                for each in recommender.recommend(users, 5):
                    seen.add((each.user_id, each.source, tuple(each.item_ids.tolist())))

        thread = threading.Thread(target=ask)
        thread.start()
        for number in (2, 3):
            learner.update(arriving(200 * number, 200))
            folder.publish(
                number,
                learner.model(),
                newest_event=time.time() - 1,
                name=learner.name,
                options=learner.options,
            )
            while recommender.recall.version != number:
                time.sleep(0.02)
            answers.append(recommender.recommend(users, 5))
        ending.set()
        thread.join()
        with urlopen(f"http://127.0.0.1:{serving.ports['http']}/metrics") as answer:
            text = answer.read().decode()
    assert {source for _, source, _ in seen} == {"recalled"}
    model = SequenceRecommender("sasrec", max_len=10, epochs=1, **OPTIONS).load(saved)
    model._network = learner.model().network
    wanted = model.recommend(users, 5).groupby("user")["item"].apply(list)
    assert [each.item_ids.tolist() for each in answers[-1]] == wanted.tolist()
    assert 'bigdl_recommender_freshness_seconds_count{of="weights"} 2.0' in text
    assert 'bigdl_recommender_size{of="model_version"} 3.0' in text


def test_models_that_cannot_be_trained_on_streams_are_rejected(tmp_path):
    for name in ("bert4rec", "gru4rec"):
        options = {"loss": "softmax"} if name == "bert4rec" else {}
        recommender = SequenceRecommender(name, max_len=5, dim=4, epochs=1, **options)
        recommender.fit(clicks(100)).save(tmp_path / name)
    with pytest.raises(UsageError, match="later events"):
        SequenceLearner(tmp_path / "bert4rec")
    with pytest.raises(UsageError, match="does not name its loss"):
        SequenceLearner(tmp_path / "gru4rec")


def write_config(tmp_path, saved):
    (tmp_path / "clicks").mkdir()
    for number in range(4):
        rows = arriving(30 * number, 30).to_pandas()
        skipped = pd.DataFrame({"user": 1, "item": 5, "time": [np.nan, np.inf, 1e30]})
        rows = pd.concat([rows, skipped], ignore_index=True)
        rows.to_parquet(tmp_path / "clicks" / f"{number}.parquet")
    path = tmp_path / "serving.yaml"
    path.write_text(
        f"history: {{events: events}}\ntrain: {{files: clicks, model: {saved}, checkpoint: state, "
        "publish: deltas, most_rows: 1}\n"
    )
    return path


@pytest.mark.slow
def test_killed_training_uses_each_event_once(saved, tmp_path):
    path = write_config(tmp_path, saved)
    command = [sys.executable, "-m", "bigdl.friesian.stream_training", "run", "-c", str(path)]
    random = np.random.default_rng(0)
    for _ in range(4):  # a start takes several seconds; kill during the training
        newest = newest_batch(tmp_path / "state") if (tmp_path / "state").exists() else None
        if newest is not None and newest.number == 3:
            break  # a run would wait for more files
        process = subprocess.Popen([*command], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.startswith("version"):
                break
        time.sleep(random.random())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    subprocess.run([*command, "--once"], check=True)
    learner = SequenceLearner(saved)
    learner.load(tmp_path / "state" / "batch-3")
    assert learner.sums["targets"] == 120
    assert newest_batch(tmp_path / "state").number == 3
    with EmbeddedEvents(tmp_path / "events") as events:
        assert sum(each.total for each in events.read(np.arange(40))) == 120
    again = SequenceLearner(saved)
    for number in range(4):
        rows = arriving(30 * number, 30)  # a stream of files sorts the rows of a micro-batch
        again.update(rows.sort_by([(name, "ascending") for name in ("user", "item", "time")]))
    assert_same_state(learner, again)
    newest = DeltaFollower(tmp_path / "deltas").poll()
    assert newest.number == 5
    for name, value in learner.model().network.state_dict().items():
        assert torch.equal(value, newest.model.network.state_dict()[name])
    assert main(["rollback", "-c", str(path)]) == 0
    assert DeltaFollower(tmp_path / "deltas").poll().number == 4
    assert isinstance(SavedSequenceModel.read(saved), SavedSequenceModel)
