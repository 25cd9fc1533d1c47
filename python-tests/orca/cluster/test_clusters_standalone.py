"""Test standalone clusters on this machine, and that no process survives them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from quick_jvm import QUICK_JVM
from test_context import environment, start, survivors

# Train on a cluster of this process, fail at a start, and stop.
OWN = """
    import json, os, stat, sys
    import numpy as np
    import psutil
    import torch
    from torch import nn
    import bigdl.orca.context as context
    from bigdl.dllib import nncontext
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.learn.pytorch import Estimator

    import sibling

    QUICK = {"spark.executor.extraJavaOptions": sys.argv[1]}
    facts = {}

    def processes():
        found = psutil.Process().children(recursive=True)
        return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]

    def files():
        return sorted(os.listdir(os.environ["SPARK_LOCAL_DIRS"]))

    def command(process):
        try:
            return " ".join(process.cmdline())
        except psutil.Error:
            return ""

    try:  # Spark refuses this one after the cluster was started for it
        init_orca_context("standalone", cores=1, conf={"spark.driver.port": "99999"})
    except ValueError as error:
        facts["refused"] = str(error)
    facts["after an error"] = [len(processes()), files()]

    sc = init_orca_context(
        "standalone", cores=1, memory="700m", num_nodes=2, conf=QUICK, driver_memory="1g",
        extra_python_lib=os.path.abspath("library.py"),
    )
    cluster = context._State.launched.cluster
    facts["master"] = sc.master == cluster.master
    described = SparkCluster.from_active()
    facts["cluster"] = [described.nodes, described.cores_per_node]

    def where(_):
        import library
        return [sys.executable, sibling.value, library.value, os.environ["SPARK_LOCAL_DIRS"]]

    (facts["executor"],) = {tuple(x[:3]) for x in sc.parallelize([0, 1], 2).map(where).collect()}
    facts["again is the same"] = nncontext.init_spark_standalone(
        2, 1, "700m", driver_memory="1g", conf=QUICK
    ) is sc

    spark = OrcaContext.get_spark_session()
    frame = spark.createDataFrame(
        [(i, [i / 40, 1 - i / 40], float(i)) for i in range(40)], "id long, x array<float>, y float"
    )

    def model(config):
        torch.manual_seed(0)
        return nn.Linear(2, 1)

    estimator = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
    )
    stats = estimator.fit(frame, epochs=1, batch_size=20, feature_cols=["x"], label_cols=["y"])
    facts["trained on"] = stats[0]["num_samples"]
    rows = estimator.predict(frame, feature_cols=["x"]).collect()
    with torch.no_grad():
        wanted = estimator.get_model()(torch.tensor([row.x for row in rows]))[:, 0].numpy()
    facts["predicted"] = [
        bool(np.allclose([float(row.prediction) for row in rows], wanted, atol=1e-5)),
        sorted(row.id for row in rows) == list(range(40)),
    ]

    below = processes()
    facts["listens at"] = sorted({
        connection.laddr.ip
        for process in below
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    })
    facts["secret is shown"] = any(cluster.secret in command(process) for process in below)
    facts["others may read"] = stat.S_IMODE(os.stat(cluster.directory).st_mode) & 0o77
    nncontext.stop_spark_standalone()
    facts["after the end"] = [len(processes()), files()]

    for _ in range(int(sys.argv[2])):
        sc = init_orca_context("standalone", cores=1, memory="600m", conf=QUICK)
        facts.setdefault("counts", []).append(sc.parallelize(range(7), 1).map(str).count())
        stop_orca_context()
        facts["after the end"][0] += len(processes())
        facts["after the end"][1] += files()
    print(json.dumps(facts))
"""


def in_directory(program: str, local: Path) -> str:
    """Make a program keep its local files in an otherwise empty directory."""
    variable = f'import os; os.environ["SPARK_LOCAL_DIRS"] = {str(local)!r}'
    return f"{variable}\n{textwrap.dedent(program)}"


def own(directory: Path, starts: int, seconds: float = 280) -> dict:
    (directory / "sibling.py").write_text("value = 1")
    (directory / "lib").mkdir()
    (directory / "lib" / "library.py").write_text("value = 2")
    local = directory / "local"
    local.mkdir()
    program = OWN.replace('"library.py"', repr(str(directory / "lib" / "library.py")))
    program = program.replace("sys.argv[1]", repr(QUICK_JVM))
    program = program.replace("sys.argv[2]", str(starts))
    process = start(directory / "own.py", in_directory(program, local))
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return json.loads(out.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return own(tmp_path_factory.mktemp("own"), 0)


@pytest.mark.slow
def test_executors_have_this_python_and_the_modules_of_the_program(facts):
    assert facts["executor"] == [sys.executable, 1, 2]


@pytest.mark.slow
def test_the_cluster_has_as_many_executors_as_nodes_were_asked_for(facts):
    assert facts["master"]
    assert facts["cluster"] == [2, 1]
    assert facts["again is the same"]


@pytest.mark.slow
def test_an_estimator_trains_and_predicts(facts):
    assert facts["trained on"] == 40
    assert facts["predicted"] == [True, True]


@pytest.mark.slow
def test_the_cluster_is_private(facts):
    assert set(facts["listens at"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert not facts["secret is shown"]
    assert facts["others may read"] == 0


@pytest.mark.slow
def test_nothing_is_left_after_the_end_or_an_error(facts):
    assert facts["refused"].startswith("Spark refused to start: ")
    assert facts["after an error"] == [0, []]
    assert facts["after the end"] == [0, []]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_starts_in_one_process(tmp_path):
    facts = own(tmp_path, 5, 580)
    assert facts["counts"] == [7] * 5
    assert facts["after the end"] == [0, []]


def ratings(folder: Path) -> Path:
    """Return the folder of ratings: $BIGDL_DATA, or users that rate items of equal parity."""
    dataset = Path(os.environ.get("BIGDL_DATA", ""), "ml-100k")
    if (dataset / "u.data").is_file():
        return dataset
    pairs = [(u, i) for u in range(1, 61) for i in range(1, 41) if (u + i) % 2 and (u * i) % 3]
    lines = [f"{u}\t{i}\t5\t{100 * u + 7 * i % 40}\n" for u, i in pairs]
    (folder / "u.data").write_text("".join(lines))
    return folder


def marked(mark: str) -> list[int]:
    """Return the processes with the value `mark` in their environment."""
    pids = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BIGDL_TEST") == mark:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


@pytest.mark.slow
def test_ncf_trains_and_predicts_and_leaves_nothing(tmp_path):
    local, out = tmp_path / "local", tmp_path / "out"
    local.mkdir()
    program = Path(__file__).parents[3] / "examples" / "orca" / "ncf" / "train_dataframe.py"
    argv = ["--cluster_mode", "standalone", "--data-dir", str(ratings(tmp_path))]
    argv += ["--cores", "2", "--memory", "1g", "--users", "60", "--epochs", "2"]
    argv += ["--lr", "0.02", "--candidates", "10", "--output", str(out)]
    process = subprocess.Popen(
        [sys.executable, str(program), *argv],
        env=environment(SPARK_LOCAL_DIRS=str(local), BIGDL_TEST=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    losses = dict(line.split() for line in printed.splitlines() if len(line.split()) == 2)
    assert float(losses["last_loss"]) < float(losses["first_loss"])
    predicted = pq.read_table(out / "predictions.parquet").to_pandas()
    assert predicted["prediction"].between(0, 1).all()
    assert predicted.groupby("user")["label"].sum().eq(1).all()
    assert survivors(marked(str(tmp_path)), 10) == []
    assert list(local.iterdir()) == []


# Join a cluster, as if its executors were on other machines, until killed.
JOINED = """
    import json, os, threading, time
    import psutil
    from bigdl.orca import init_orca_context
    from bigdl.orca.cluster.standalone import StandaloneCluster

    import sibling

    cluster = StandaloneCluster.start(1, "600m", directory=os.environ["SPARK_LOCAL_DIRS"])
    sc = init_orca_context(
        "standalone", cores=1, memory="600m", master=cluster.master,
        conf={
            "spark.authenticate": True,
            "spark.authenticate.secret": cluster.secret,
            "spark.driver.host": "localhost",
            "spark.ui.enabled": False,
            "spark.executor.extraJavaOptions": QUICK,
        },
    )
    origins = sc.parallelize([0], 1).map(lambda _: [sibling.value, sibling.__file__]).collect()

    def never_returns(rows):
        time.sleep(600)
        return rows

    job = sc.parallelize(range(2), 1).mapPartitions(never_returns)
    threading.Thread(target=job.count, daemon=True).start()

    def command(process):
        try:
            return " ".join(process.cmdline())
        except psutil.Error:
            return ""

    found = []
    while sum("pyspark.daemon" in text for _, text in found) < 2:
        time.sleep(0.05)
        found = [(p.pid, command(p)) for p in psutil.Process().children(recursive=True)]
    print(json.dumps([origins[0], [p for p, text in found if "java" in text or "python" in text]]))
    print(cluster.supervisor.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["driver", "supervisor"])
def test_a_killed_program_leaves_no_process_and_no_file(tmp_path, victim):
    local = tmp_path / "local"
    local.mkdir()
    (tmp_path / "sibling.py").write_text("value = 3")
    program = JOINED.replace("QUICK,", f"{QUICK_JVM!r},")
    driver = start(tmp_path / "joined.py", in_directory(program, local))
    try:
        (value, file), pids = json.loads(driver.stdout.readline())
        supervisor = int(driver.stdout.readline())
        # Sent with the context: the program's folder is not on the executors' path.
        assert value == 3
        assert "bigdl-modules-" in file
        assert len(pids) >= 5
        if victim == "supervisor":
            os.kill(supervisor, signal.SIGKILL)
            # The driver stops its JVM itself.
            left = survivors([pid for pid in pids if pid != supervisor], 20)
            assert [psutil.Process(pid).ppid() for pid in left] == [driver.pid]
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate(timeout=60)
    assert survivors(pids, 30) == []
    if victim == "driver":
        assert [each for each in local.iterdir() if "standalone" in each.name] == []
