"""Programs over Spark Connect: what they compute, and what happens when something goes away.

A process holds a SparkContext or a session of Spark Connect, so each program is a process. The
suites of all engines run over Spark Connect by ``test_connect_suites.py``.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from connect_server import ConnectServer
from same_bits_models import MODELS, fitted, random_rows

from bigdl.orca.cluster.versions import spark_release

PROGRAM = Path(__file__).parents[2] / "helpers" / "connect_program.py"
WAIT_S = 300  # on a machine that has other work, too

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # as many as init_orca_context("local", cores=2) has: the order of rows depends on it
    conf = {"spark.sql.shuffle.partitions": "8"}
    server = ConnectServer(tmp_path_factory.mktemp("connect"), **conf)
    yield server
    server.stop()


def started(name, url, folder, *arguments):
    folder.mkdir()
    command = [sys.executable, str(PROGRAM), name, url, str(folder), *arguments]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


def finish(process):
    try:
        _, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, errors[-3000:]


def run(name, url, folder, *arguments):
    finish(started(name, url, folder, *arguments))


def await_(condition, what):
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.1)


@pytest.mark.slow
def test_weights_figures_and_predictions_are_those_of_a_classic_spark(server, tmp_path):
    classic = started("train", "local", tmp_path / "classic")
    run("train", server.url, tmp_path / "connect")
    finish(classic)
    one, other = (
        pickle.loads((tmp_path / kind / "result").read_bytes()) for kind in ("classic", "connect")
    )
    assert one[0] == other[0]  # weights, to the last bit
    assert one[1] == other[1]  # figures
    assert one[2] == other[2]  # rows in their order, and predictions
    assert one[3] == other[3]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["shards", "tables"])
def test_what_needs_no_rdd_gives_the_same(server, tmp_path, program):
    for kind, url in (("classic", "local"), ("connect", server.url)):
        run(program, url, tmp_path / kind)
    one, other = (
        pickle.loads((tmp_path / kind / "result").read_bytes()) for kind in ("classic", "connect")
    )
    assert one.keys() == other.keys()
    for name in one:
        assert repr(one[name]) == repr(other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("models", [["mlp"], ["cnn", "transformer"]], ids=["mlp", "others"])
def test_exact_bits_are_those_of_local_workers_for_one_two_and_four(models, tmp_path):
    server = ConnectServer(tmp_path, "local[4,4]")
    try:
        run("same_bits", server.url, tmp_path / "connect", *models)
    finally:
        server.stop()
    digests = json.loads((tmp_path / "connect" / "result").read_text())
    rows = random_rows()
    for name in models:
        expected = json.loads(json.dumps(fitted(rows, MODELS[name], 2)))
        assert digests[name] == [expected] * 3, name


REFUSED = {
    '"spark-connect"': "needs master, the address of a Spark Connect server such as",
    '"connect", master="spark://host:7077"': "needs master, the address of a Spark Connect server",
    '"spark-connect", master="sc://127.0.0.1:9"': "No Spark Connect server answers at 127.0.0.1:9;",
    '"spark-connect", master="sc://host:port"': 'master must be like "sc://host:15002", but got',
    '"spark-connect", init_ray_on_spark=True': "Ray cannot be started on Spark's nodes over",
    '"spark-connect", num_nodes=0': "num_nodes should be a positive integer",
    '"local"': "pass cluster_mode=",  # SPARK_REMOTE is set there
}


def test_what_cannot_be_connected_to_is_one_sentence():
    program = "from bigdl.orca import init_orca_context\nimport os\n"
    for arguments in REFUSED:
        if "local" in arguments:
            program += 'os.environ["SPARK_REMOTE"] = "sc://host"\n'
        program += f"try:\n    init_orca_context({arguments})\n"
        program += "except ValueError as error:\n    print(error)\n"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARK_")}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = said.stdout.splitlines()
    assert len(lines) == len(REFUSED), said.stdout + said.stderr
    for line, expected in zip(lines, REFUSED.values(), strict=True):
        assert expected in line


@pytest.mark.slow
def test_ctrl_c_ends_the_workers(server, tmp_path):
    run("interrupted", server.url, tmp_path / "run")
    for rendezvous in ("driver", "rank0"):
        pids = json.loads((tmp_path / "run" / f"interrupted-{rendezvous}").read_text())
        assert len(pids) == 2
        await_(lambda pids=pids: not any(map(psutil.pid_exists, pids)), "a worker is still there")


@pytest.mark.slow
@pytest.mark.fault
def test_a_restarted_server_is_one_sentence_and_fit_resumes(tmp_path):
    server = ConnectServer(tmp_path)
    try:
        folder = tmp_path / "run"
        process = started("restarted", server.url, folder)
        await_((folder / "marker").exists, "the fit did not come to its step")
        server.kill()
        server.start()
        await_((folder / "error").exists, "the loss of the server was not noticed")
        assert "\n" not in (folder / "error").read_text()
        assert (folder / "error").read_text() == (
            "ServerLost: The Spark Connect server at 127.0.0.1 was lost or restarted, so the "
            "session is gone; connect again with init_orca_context, and call fit again with "
            'resume="auto" to continue from the newest checkpoint in model_dir'
        )
        (folder / "again").touch()
        finish(process)
        undisturbed = started("restarted", server.url, tmp_path / "undisturbed")
        (tmp_path / "undisturbed" / "marker").write_text("x 0\n")
        (tmp_path / "undisturbed" / "again").touch()
        finish(undisturbed)
        assert json.loads((folder / "result").read_text()) == json.loads(
            (tmp_path / "undisturbed" / "result").read_text()
        )
    finally:
        server.stop()


@pytest.mark.slow
def test_executors_without_bigdl_get_its_modules(tmp_path):
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(
        "import os, sys\n"
        "sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, 'bigdl'))]\n"
    )
    server = ConnectServer(tmp_path, environment={"PYTHONPATH": str(hiding)})
    try:
        run("where_modules_are", server.url, tmp_path / "run")
    finally:
        server.stop()
    files = json.loads((tmp_path / "run" / "result").read_text())
    assert len(files) == 2
    assert all(".zip" in file for file in files)


ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_program_of_the_docs_runs_with_another_first_line(server, page):
    listings = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    if page == "README.md":  # what follows there has programs of their own
        listings = [listing for listing in listings if "init_orca_context(" in listing]
    first_line = f'init_orca_context("spark-connect", master="{server.url}")'
    program, count = re.subn(r"init_orca_context\([^)]+\)", first_line, "\n".join(listings))
    assert count == 1
    path = server.folder / "program.py"  # where relative paths mean the same files
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, str(path)], cwd=server.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "prediction" in done.stdout


@pytest.mark.slow
def test_ncf_runs_on_a_server(server, data_dir, tmp_path):
    if spark_release() < (4, 0):
        pytest.skip("its StringIndexer is not on a server of Spark 3.5")
    figures = []
    for mode in ("local", "spark-connect"):
        command = [sys.executable, str(ROOT / "examples/orca/ncf/train_dataframe.py")]
        command += ["--data-dir", str(data_dir / "ml-100k"), "--users", "60", "--epochs", "2"]
        done = subprocess.run(
            [*command, "--cluster_mode", mode],
            cwd=tmp_path,
            env={**os.environ, **({"SPARK_REMOTE": server.url} if mode != "local" else {})},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        figures.append(re.sub(r"\d+(\.\d+)? s\b", "", done.stdout).splitlines()[-3:])
    assert figures[0] == figures[1]
