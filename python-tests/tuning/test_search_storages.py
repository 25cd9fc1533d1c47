"""Optuna's published tests of storages, on the databases of searches; its dashboard shows them."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request

import optuna
import pytest
from optuna.testing.pytest_storages import StorageTestCase

from bigdl.tuning import open_study, optimize
from bigdl.tuning.storage import open_database

DASHBOARD = os.environ.get("BIGDL_OPTUNA_DASHBOARD") or shutil.which("optuna-dashboard")


class TestSQLiteStorageOfSearches(StorageTestCase):
    @pytest.fixture(params=["rollback journal", "write-ahead log"])
    def storage(self, request, tmp_path):
        is_ahead = request.param == "write-ahead log"
        storage = open_database(f"sqlite:///{tmp_path}/study.db", write_ahead=is_ahead)
        yield storage
        storage.remove_session()
        storage.engine.dispose()


@pytest.fixture
def dashboard(tmp_path):
    """The URL of a study's database, and that of a dashboard of it."""
    storage = f"sqlite:///{tmp_path}/study.db"
    open_study(storage=storage, name="search")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [DASHBOARD, storage, "--host", "127.0.0.1", "--port", str(port)]
    with (
        open(tmp_path / "dashboard.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield storage, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def get(address):
    """The JSON document at an address, whose server may still be starting."""
    give_up = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)
        except OSError:
            assert time.monotonic() < give_up, f"{address} gives no answer"
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(DASHBOARD is None, reason="optuna-dashboard is not installed")
def test_the_dashboard_shows_a_search_while_it_runs(dashboard):
    storage, address = dashboard
    listed = get(f"{address}/api/studies")["study_summaries"]
    assert [each["study_name"] for each in listed] == ["search"]
    shown = []

    def look(study, trial):
        if trial.number == 3:
            shown.append(get(f"{address}/api/studies/{listed[0]['study_id']}"))

    study = optuna.load_study(study_name="search", storage=storage)
    optimize(
        study,
        lambda trial: trial.suggest_float("x", 0, 1),
        6,
        backend="local",
        concurrency=1,
        callbacks=[look],
    )
    assert [each["state"] for each in shown[0]["trials"]].count("Complete") >= 4
    give_up = time.monotonic() + 60
    while len(get(f"{address}/api/studies/{listed[0]['study_id']}")["trials"]) < 6:
        assert time.monotonic() < give_up  # it reads the database every ten seconds
        time.sleep(0.5)
