"""Programs on a real YARN of two hosts with HDFS."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from real_clusters import SCRIPTS

pytestmark = [pytest.mark.yarn, pytest.mark.timeout(600)]

FIT = """
    import json, os
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    sc = init_orca_context(**ARGUMENTS)
    folders = sc.range(8, numSlices=8).map(lambda _: os.getcwd()).distinct().collect()
    rows = OrcaContext.get_spark_session().range(64, numPartitions=2).selectExpr(
        "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
        "float(sin(id) + 2 * cos(id)) AS y",
    )
    torch.manual_seed(0)
    estimator = Estimator.from_torch(
        model=lambda config: torch.nn.Linear(3, 1),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
        loss=torch.nn.MSELoss(),
        **WORKERS,
    )
    estimator.fit(
        rows, epochs=3, batch_size=16, feature_cols=["x"], label_cols=["y"], seed=7
    )
    weight, bias = estimator.get_model().parameters()
    jars = sc.getConf().get("spark.yarn.archive", "")
    result = {
        "weights": [*weight.detach().reshape(-1).tolist(), bias.item()],
        "folders": folders,
        "jars": jars,
    }
    stop_orca_context()
    print(json.dumps(result))
"""


def run(
    folder: Path, program: str, *, yarn: Path | None, **arguments
) -> subprocess.CompletedProcess:
    """Run a program with ARGUMENTS of init_orca_context, on YARN or on this machine."""
    workers = {}
    if yarn is None:
        arguments = {"cores": 2, **arguments}
        workers = {"workers_per_node": 2}
    else:
        arguments = {
            "cluster_mode": "yarn-client",
            "num_nodes": 2,
            "cores": 1,
            "memory": "1g",
            "hadoop_conf": str(yarn / "conf"),
            "python_location": sys.executable,
            **arguments,
            "conf": {"spark.driver.host": "127.0.0.1", **arguments.get("conf", {})},
        }
    settings = f"ARGUMENTS, WORKERS = {arguments!r}, {workers!r}\n"
    (folder / "program.py").write_text(settings + textwrap.dedent(program), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess) -> dict:
    """The JSON that a program wrote at the end."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def hadoop(yarn: Path, *command: str) -> str:
    """What a command of Hadoop prints."""
    program = [sys.executable, str(SCRIPTS / "yarn.py"), "cli", str(yarn), *command]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout


def kept_files(yarn: Path) -> list[str]:
    """Name and time of what is kept on HDFS for the next programs."""
    lines = hadoop(yarn, "fs", "-ls", "/user/root/.bigdl").splitlines()
    return [" ".join(line.split()[5:]) for line in lines if line.startswith("-")]


def test_a_fit_on_yarn_equals_one_on_this_machine(yarn, tmp_path):
    (tmp_path / "yarn").mkdir()
    (tmp_path / "local").mkdir()
    on_yarn = last_line(run(tmp_path / "yarn", FIT, yarn=yarn))
    local = last_line(run(tmp_path / "local", FIT, yarn=None))
    assert len(on_yarn["folders"]) == 2  # two containers, with folders too long for a Unix socket
    assert min(map(len, on_yarn["folders"])) > 65
    np.testing.assert_allclose(on_yarn["weights"], local["weights"], rtol=1e-5)


@pytest.mark.slow
def test_jars_are_uploaded_once(yarn, tmp_path):
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        jars = last_line(run(tmp_path / name, FIT, yarn=yarn))["jars"]
        found.append((jars, kept_files(yarn)))
    assert found[0] == found[1]
    assert found[0][0].startswith("hdfs://")
    assert len(found[0][1]) == 1


@pytest.mark.slow
def test_a_program_in_cluster_mode_prints_here(yarn, tmp_path):
    program = """
        from bigdl.orca import init_orca_context, stop_orca_context

        sc = init_orca_context(**ARGUMENTS)
        print("the sum is", sc.range(10).sum(), flush=True)
        stop_orca_context()
        raise ValueError("the program's own error")
    """
    done = run(tmp_path, program, yarn=yarn, cluster_mode="yarn-cluster")
    assert done.returncode == 1, done.stderr
    assert "the sum is 45" in done.stdout
    assert "ValueError: the program's own error" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
