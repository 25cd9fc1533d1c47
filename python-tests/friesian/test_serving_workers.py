"""Tests of several worker processes of one server: ports, peers and restarts."""

import re
import signal
import threading
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from served_program import ended, expected, logged, made_in, started, wait_for, written

from bigdl.friesian.serving import RecommenderClient, RemoteRecall
from bigdl.friesian.serving.program import main

pytestmark = pytest.mark.linux("ports that several processes share")

USERS, K = [1, 3, 5, 1], 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_in(tmp_path_factory.mktemp("serving"))


@pytest.fixture
def config(folder):
    text = Path(folder[1]).read_text()
    return written(folder[0], text.replace("server:\n", "server:\n  workers: 2\n"), "two.yaml")


def workers_of(process):
    return psutil.Process(process.pid).children()


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_worker_is_replaced_and_no_answer_is_wrong(folder, config):
    ports, wanted = folder[2], expected(folder, USERS, K)
    address = f"127.0.0.1:{ports['recommender']}"
    process = started(config)
    outcomes, is_over = [], threading.Event()

    def ask():
        while not is_over.is_set():
            with RecommenderClient(address) as client:  # another connection, perhaps other worker
                try:
                    found = [each.item_ids.tolist() for each in client.recommend(USERS, K)]
                    outcomes.append(found)
                except grpc.RpcError as error:
                    outcomes.append(error.code().name)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    try:
        first, second = workers_of(process)
        for each in threads:
            each.start()
        wait_for(lambda: outcomes.count(wanted) > 20)
        first.send_signal(signal.SIGKILL)
        wait_for(lambda: len(workers_of(process)) == 2 and first not in workers_of(process))
        assert second in workers_of(process)
        wait_for(lambda: {"0", "1"} <= seen_in_metrics(ports["http"]))
        before = len(outcomes)
        wait_for(lambda: outcomes[before:].count(wanted) > 20)
        is_over.set()
        for each in threads:
            each.join()
        with RemoteRecall(f"127.0.0.1:{ports['recall']}") as recall:
            recall.add_item(9999, np.full(8, 100.0))
        assert knows_the_item(ports)
        second.send_signal(signal.SIGKILL)
        wait_for(lambda: len(workers_of(process)) == 2 and second not in workers_of(process))
        wait_for(lambda: {"0", "1"} <= seen_in_metrics(ports["http"], 401))
        assert knows_the_item(ports)  # the new worker has learned it
    finally:
        is_over.set()
        for each in threads:
            each.join()
        children = workers_of(process)
        out, err = ended(process)
    assert "2 workers" in out or out.startswith("ending")
    assert f"The worker 0 ended with {-signal.SIGKILL}; another is started" in err
    assert "Traceback" not in err
    assert not any(each.is_running() for each in children)
    wrong = [each for each in outcomes if each not in (wanted, "UNAVAILABLE")]
    assert not wrong, wrong[:3]


def knows_the_item(ports):
    found = []
    for _ in range(8):  # each connection may be another worker's
        with RemoteRecall(f"127.0.0.1:{ports['recall']}") as recall:
            ids = np.concatenate([recall.candidates(np.array([u]), 40).ids for u in (1, 3, 5)])
        found.append(9999 in ids)
    return all(found)


def seen_in_metrics(port, items=400):
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    except OSError:  # of a worker that is gone
        return set()
    assert re.search(rf'bigdl_recommender_size\{{of="index_items",worker="\d"\}} {items}', text)
    return set(re.findall(r'worker="(\d)"', text))


@pytest.mark.fault
def test_workers_end_with_a_killed_parent(config):
    process = started(config)
    children = workers_of(process)
    assert len(children) == 2
    process.send_signal(signal.SIGKILL)
    assert "Traceback" not in "".join(map(str, process.communicate()))
    wait_for(lambda: not any(each.is_running() for each in children))


@pytest.mark.slow
def test_what_keeps_workers_from_starting_is_told(folder, config, capsys):
    broken = Path(config).read_text().replace("model: model", "model: nowhere")
    assert main(["serve", "--config", written(folder[0], broken, "broken.yaml")]) == 2
    assert "The worker 0 did not start and ended with 2" in capsys.readouterr().err
    with_none = Path(config).read_text().replace("workers: 2", "workers: 0")
    assert main(["serve", "--config", written(folder[0], with_none, "none.yaml")]) == 2
    assert re.search(r"line \d+, server\.workers: workers should be", capsys.readouterr().err)
    process = started(config)
    try:
        assert main(["serve", "--config", config]) == 2
        assert "cannot be used: [Errno 98]" in capsys.readouterr().err
    finally:
        ended(process)
    assert logged(process) == ""
