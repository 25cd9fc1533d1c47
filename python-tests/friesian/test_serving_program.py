"""Tests of the serving program: configuration, loading, shutdown and restart."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from functools import partial

import grpc
import numpy as np
import pytest
import torch
from refusals import refused
from served_catalogue import items_frame, users_frame
from served_program import COMMAND, ended, expected, made_in, started, wait_for, written

from bigdl.friesian.models import DeepFM
from bigdl.friesian.serving import (
    EmbeddedStore,
    ItemIndex,
    RecommenderClient,
    RemoteRecall,
)
from bigdl.friesian.serving.config import read_config
from bigdl.friesian.serving.program import Serving, main


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ("file-format",)),
        ("- a", ("file-format", "1")),
        ("store: [", ("file-format", "2", "1")),
        ("stor: x", ("argument-unknown", "1")),
        ("store: x\nrecall:\n  indx: y", ("argument-unknown", "3", "recall.indx")),
        ("server:\n  recall_port: x", ("argument-value", "2", "server.recall_port")),
        ("server:\n  expose: 1", ("argument-value", "2", "server.expose", "1")),
        ("ranking:\n  inputs: [a, 1]", ("argument-value", "2", "ranking.inputs")),
        ("recall:\n  index: a\n  index: b", ("argument-conflict", "3", "recall.index")),
        ("recall: index", ("argument-type", "1")),
        ("redisUrl: a\nredisType: ring", ("argument-value", "2")),
    ],
)
def test_errors_of_the_configuration_name_line_and_key(tmp_path, text, message):
    with refused(*message):
        read_config(written(tmp_path, text))


def test_files_that_are_missing_or_no_text_are_told(tmp_path):
    with refused("path-unusable"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with refused("path-unusable"):
        read_config(tmp_path / "b.yaml")


def test_the_keys_of_bigdl_2_are_understood_and_reported(tmp_path):
    old = """
servicePort: 8980
monitorPort: 8981
featureServiceURL: localhost:8082
recallServiceURL: localhost:8084
rankingServiceURL: localhost:8083
inferenceColumns: user, item
logInterval: 1
"""
    config = read_config(written(tmp_path, old))
    assert config.values == {
        "server.recommender_port": 8980,
        "server.http_port": 8981,
        "features.url": "localhost:8082",
        "recall.url": "localhost:8084",
        "ranking.url": "localhost:8083",
        "ranking.inputs": ["user", "item"],
    }
    assert "line 2: servicePort is server.recommender_port now" in config.notes
    assert "line 8: logInterval is not needed any more" in config.notes

    old = """
servicePort: 8082
redisType: sentinel
redisSentinelMasterURL: a:26379,b:26379
redisSentinelMasterName: main
redisKeyPrefix: 2tower_
initialUserDataPath: users
userIDColumn: enaging_user_id
"""
    config = read_config(written(tmp_path, old))
    assert config.get("store.location") == "redis+sentinel://a:26379,b:26379/main"
    assert config.get("store.prefix") == "2tower_"
    assert config.get("server.feature_port") == 8082
    assert config.get("init.users") == str(tmp_path / "users")
    assert config.get("init.user_id") == "enaging_user_id"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_in(tmp_path_factory.mktemp("serving"))


@pytest.mark.slow
@pytest.mark.fault
def test_init_serve_and_client_answer_as_the_parts_do_until_it_ends(folder, capsys):
    """Test the answers of the program; SIGTERM during requests loses none."""
    _, config, ports, _ = folder
    users = [1, 3, 2, 1]
    process = started(config)
    try:
        address = f"127.0.0.1:{ports['recommender']}"
        with RecommenderClient(address) as client:
            answers = client.recommend(users, 5)
        assert [each.item_ids.tolist() for each in answers] == expected(folder, users, 5)
        assert main(["client", "--address", address, "--users", "1,2", "-k", "3"]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith("user 1 (ranked) ")
        assert said[1].startswith("user 2 (popular) 3:0.0000 0:")
        assert main(["client", "--address", address, "--users", "1,3", "--requests", "40"]) == 0
        assert json.loads(capsys.readouterr().out)["requests"] == 40
        url = f"http://127.0.0.1:{ports['http']}/metrics"
        text = urllib.request.urlopen(url).read().decode()
        assert 'bigdl_recommender_size{of="index_items"} 400.0' in text
        assert 'bigdl_recommender_size{of="store_version"}' in text
        outcomes, begun = [], threading.Event()

        def ask():
            with RecommenderClient(address) as client:
                while True:
                    try:
                        outcomes.append(len(client.recommend([1, 3, 5], 5)))
                        begun.set()
                    except grpc.RpcError as error:
                        outcomes.append(error.code().name)
                        return

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        assert begun.wait(20)
    finally:
        out, err = ended(process)
    for each in threads:
        each.join()
    assert "ending" in out
    assert "Traceback" not in err
    # a refusal after the end is right, a call that was taken and broken off is not
    assert {each for each in outcomes if isinstance(each, str)} <= {"UNAVAILABLE"}
    assert outcomes.count(3) > 4


@pytest.mark.slow
def test_versions_of_the_ranker_answer_by_the_open_inference_protocol(folder, tmp_path):
    """Test two model versions that share requests, by HTTP and by gRPC."""
    from bigdl.friesian.serving.program import Serving
    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.nano.serving import Client

    made, _, ports, model = folder
    other = DeepFM({"user": 700, "item": 1300, "kind": 9}, ["price"], dim=4, hidden=(8,)).eval()
    integers = torch.zeros(2, dtype=torch.int64)
    sample = (integers, integers, integers.to(torch.int8), torch.zeros(2))
    for version, each in (("1", model), ("2", other)):
        fast = InferenceOptimizer.trace(each, accelerator="openvino", input_sample=sample)
        InferenceOptimizer.save(fast, str(tmp_path / "models" / version))
    text = (made / "serving.yaml").read_text()
    text = text.replace("store: features", f"store: {made}/features")
    text = text.replace("index: index", f"index: {made}/index")
    text = text.replace("  model: model", "  model: models\n  shares: {1: 100}\n  shadow: 2")
    inputs = {
        "user": np.array([1, 1]),
        "item": np.array([3, 6]),
        "kind": np.array([1, 2], np.int8),
        "price": np.array([0.5, 0.1], np.float32),
    }
    with torch.inference_mode():
        wanted = [
            each(*(torch.from_numpy(inputs[name]) for name in model.feature_cols)).numpy()
            for each in (model, other)
        ]
    with Serving(read_config(written(tmp_path, text))):
        for url in (f"http://127.0.0.1:{ports['http']}", f"grpc://127.0.0.1:{ports['ranking']}"):
            with Client(url) as client:
                for version, scores in zip("12", wanted, strict=True):
                    found = client.infer("ranker", inputs, version=version)
                    np.testing.assert_allclose(found, scores, rtol=1e-4, atol=1e-6)
                np.testing.assert_allclose(client.infer("ranker", inputs), wanted[0], rtol=1e-4)
        with RecommenderClient(f"127.0.0.1:{ports['recommender']}") as client:
            answers = client.recommend([1, 3], 5)
        assert [each.item_ids.tolist() for each in answers] == expected(folder, [1, 3], 5)
        url = f"http://127.0.0.1:{ports['http']}"
        text = urllib.request.urlopen(f"{url}/metrics").read().decode()
        assert 'bigdl_model_info{method="openvino_fp32",model="ranker"' in text
        assert "/recommend/{user}" in urllib.request.urlopen(f"{url}/openapi.json").read().decode()


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_server_answers_right_when_it_is_back(folder):
    _, config, ports, _ = folder
    users = list(range(1, 40))
    wanted = expected(folder, users, 5)
    process = started(config)
    with RecommenderClient(f"127.0.0.1:{ports['recommender']}", timeout=20) as client:
        assert [each.item_ids.tolist() for each in client.recommend(users, 5)] == wanted
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = started(config)
    try:
        with RecommenderClient(f"127.0.0.1:{ports['recommender']}", timeout=20) as client:
            assert [each.item_ids.tolist() for each in client.recommend(users, 5)] == wanted
    finally:
        ended(process)


@pytest.mark.slow
def test_what_changes_is_used_and_what_is_damaged_is_refused(folder, tmp_path):
    """Test new and damaged versions of store and index during requests."""
    made, _, ports, _ = folder
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    process = started(str(copy / "serving.yaml"))
    try:
        with RecommenderClient(f"127.0.0.1:{ports['recommender']}", timeout=20) as client:
            assert client.recommend([1], 1)[0].source == "ranked"
            items = items_frame()
            vectors = np.stack(items["vector"])[:20]
            ItemIndex(items["item"][:20], vectors).save(copy / "index")
            wait_for(lambda: len(client.recommend([1], 40, 40)[0].item_ids) <= 20)
            (file,) = (copy / "index").glob("files-*/base.faiss")
            file.write_bytes(b"none")
            manifest = copy / "index" / "index.json"
            manifest.write_text(manifest.read_text() + " ")
            time.sleep(5)
            assert client.recommend([1], 1)[0].source == "ranked"
            users = users_frame().query("user != 1")
            tables = {"user": users, "item": items.drop(columns="vector")}
            EmbeddedStore(copy / "features").replace(tables)
            wait_for(lambda: client.recommend([1], 1)[0].source == "popular")
    finally:
        _, err = ended(process)
    assert "The new index cannot be used" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("store: features", "store: elsewhere"),
            r"line 2, store\.location: .* has no table 'user'",
        ),
        (("index: index", "index: none"), r"line 4, recall\.index: There is no index at"),
        (
            ("seen: seen", "seen: sene"),
            r"line 6, recall\.seen: the table user has no column 'sene'",
        ),
        (("model: model", "model: none"), r"line 8, ranking\.model: the model .* does not exist"),
        (('"price"', '"prize"'), r"line 9, ranking\.inputs: .* needs \['prize'\]"),
        (("server:", "server:\n  host: 0.0.0.0"), r"server\.host: .* set expose to True"),
        (("popular: [3, 0, 6]", "rerank: nothing:f"), r"recommender\.rerank: The function"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_sentence(folder, change, message, capsys):
    made = folder[0]
    text = (made / "serving.yaml").read_text()
    assert change[0] in text
    wrong = written(made, text.replace(*change, 1), "wrong.yaml")
    assert main(["serve", "--config", wrong]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, line), line


def is_allowed(call):
    try:
        call()
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.PERMISSION_DENIED:
            return False
        raise
    return True


def test_tokens_and_changes_are_set_in_the_file(folder, capsys):
    made = folder[0]
    text = re.sub(r"\n  \w+_port: \d+", "", (made / "serving.yaml").read_text())
    text = text.replace("  changes: true\n", "")
    for name in ("use", "change", "look"):
        (made / name).write_text(f"{name}\n")
        (made / name).chmod(0o600)
    files = "token_file: use\n  admin_token_file: change\n  metrics_token_file: look"
    config = read_config(
        written(
            made, text.replace("server:", f"server:\n  {files}\n  recall_port: 0"), "tokens.yaml"
        )
    )
    with Serving(config) as serving:
        address = f"127.0.0.1:{serving.ports['recall']}"
        for token, outcomes in (("use", "ynn"), ("look", "nyn"), ("change", "yyy")):
            with RemoteRecall(address, token=token) as recall:
                assert (
                    "".join(
                        "y" if is_allowed(call) else "n"
                        for call in (
                            partial(recall.candidates, np.array([1]), 2),
                            recall.metrics,
                            recall.reset_metrics,
                        )
                    )
                    == outcomes
                )
    changes = "token_file: use\n  changes: true\n  recall_port: 0"
    wrong = written(made, text.replace("server:", f"server:\n  {changes}"), "wrong.yaml")
    assert main(["serve", "--config", wrong]) == 2
    assert (
        "server.changes: Clients may change the server only by an admin" in capsys.readouterr().err
    )


def test_a_server_that_is_not_there_is_told(capsys):
    assert main(["client", "--address", "127.0.0.1:1", "--timeout", "2"]) == 2
    assert "does not answer: UNAVAILABLE" in capsys.readouterr().err
    assert main(["client", "--users", "a"]) == 2
    assert "--users should be integers" in capsys.readouterr().err


def test_help_needs_nothing_but_the_library():
    done = subprocess.run(
        [*COMMAND, "--help"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0
    assert "bigdl-friesian-serve client --address" in done.stdout
