"""Programs on a real YARN of two hosts with HDFS."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from cluster_programs import FASHION, MOVIELENS, ON_RAY, OTHER_BACKEND, SEARCH
from real_clusters import FIT, control, fitted_weights, last_line, run, run_whole

from bigdl.orca.cluster.standalone import spark_home

pytestmark = [pytest.mark.yarn, pytest.mark.timeout(600)]


def on_yarn(cluster: Path, **more) -> dict:
    """Arguments of init_orca_context."""
    return {
        "cluster_mode": "yarn-client",
        "num_nodes": 2,
        "cores": 1,
        "memory": "1g",
        "hadoop_conf": str(cluster / "conf"),
        "python_location": sys.executable,
        **more,
        "conf": {"spark.driver.host": "127.0.0.1", **more.get("conf", {})},
    }


ENVIRONMENT = {"SPARK_LOCAL_IP": "127.0.0.1"}


def hadoop(yarn: Path, *command: str) -> str:
    """What a command of Hadoop prints."""
    return control("yarn.py", "cli", yarn, *command)


def processes_of_containers(yarn: Path) -> list[psutil.Process]:
    """What runs in containers or was started there."""
    nodes = (f"{yarn}/nm1/", f"{yarn}/nm2/")
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            places = (process.environ().get("LOCAL_DIRS", ""), process.cwd())
            if any(place.startswith(nodes) for place in places):
                found.append(process)
    return found


def kept_files(yarn: Path) -> list[str]:
    """Name and time of what is kept on HDFS for the next programs."""
    lines = hadoop(yarn, "fs", "-ls", "/user/root/.bigdl").splitlines()
    return [" ".join(line.split()[5:]) for line in lines if line.startswith("-")]


@pytest.mark.slow
def test_a_fit_on_yarn_is_exact(yarn, tmp_path):
    there = last_line(run(tmp_path / "there", FIT, on_yarn(yarn), ENVIRONMENT))
    assert len(there["folders"]) == 2  # two containers, with folders too long for a Unix socket
    assert min(map(len, there["folders"])) > 65
    np.testing.assert_allclose(there["weights"], fitted_weights(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_results_equal_those_of_this_machine(yarn, tmp_path, cores):
    """On two and four workers, with what is saved on HDFS."""
    there = run_whole(
        tmp_path / "there",
        on_yarn(yarn, cores=cores),
        {**ENVIRONMENT, "HADOOP_CONF_DIR": str(yarn / "conf")},
        workers_per_node=cores,
        saved=f"hdfs:///saved-{cores}",
    )
    workers = 2 * cores
    here = run_whole(tmp_path / "here", {"cores": workers}, workers_per_node=workers)
    assert there == here


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ray", "bigdl"])
def test_other_backends_learn_the_same(yarn, tmp_path, backend):
    program = f"BACKEND = {backend!r}\n" + textwrap.dedent(OTHER_BACKEND)
    arguments = on_yarn(yarn, extra_executor_memory_for_ray="2g")
    found = last_line(run(tmp_path / "there", program, arguments, ENVIRONMENT))
    assert found["predicted"] == 64
    np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)


@pytest.mark.slow
def test_ray_runs_on_both_nodes_and_is_gone(yarn, tmp_path):
    arguments = on_yarn(yarn, init_ray_on_spark=True, extra_executor_memory_for_ray="2g")
    found = last_line(run(tmp_path / "there", ON_RAY, arguments, ENVIRONMENT))
    assert len(found["nodes"]) == 2
    end = time.monotonic() + 10
    while left := [each for each in processes_of_containers(yarn) if each.name() == "raylet"]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


@pytest.mark.slow
def test_a_search_of_hyperparameters(yarn, tmp_path):
    arguments = on_yarn(yarn, init_ray_on_spark=True, extra_executor_memory_for_ray="2g")
    assert last_line(run(tmp_path / "there", SEARCH, arguments, ENVIRONMENT))["lr"] == 0.1


@pytest.mark.slow
def test_movielens_on_hdfs(yarn, tmp_path):
    data = os.environ.get("BIGDL_DATA")
    if not data:
        pytest.skip("BIGDL_DATA names no folder with ml-100k")
    hadoop(yarn, "fs", "-mkdir", "-p", "/ml-100k")
    hadoop(yarn, "fs", "-put", "-f", f"{data}/ml-100k/u.data", "/ml-100k/u.data")
    examples = Path(__file__).parents[2] / "examples" / "orca" / "ncf"
    head = f"EXAMPLES, DATA, OUTPUT = {str(examples)!r}, 'hdfs:///ml-100k', 'hdfs:///ncf'\n"
    program = head + textwrap.dedent(MOVIELENS)
    variables = {**ENVIRONMENT, "HADOOP_CONF_DIR": str(yarn / "conf")}
    found = last_line(run(tmp_path / "there", program, on_yarn(yarn), variables))
    assert found["auc"] > 0.6


@pytest.mark.slow
def test_the_published_quickstart(yarn, tmp_path):
    arguments = on_yarn(
        yarn, driver_cores=1, driver_memory="1g", extra_executor_memory_for_ray="1g"
    )
    program = "MODEL_DIR = '.'\n" + textwrap.dedent(FASHION)
    found = last_line(run(tmp_path / "there", program, arguments, ENVIRONMENT))
    assert found["Accuracy"] > 0.9


@pytest.mark.slow
def test_the_published_quickstart_by_bigdl_submit(yarn, tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    program = f"MODEL_DIR, ARGUMENTS = {str(folder)!r}, {{}}\n" + textwrap.dedent(FASHION)
    (folder / "train.py").write_text(program, encoding="utf-8")
    command = [
        *(str(Path(sys.executable).with_name("bigdl-submit")), "--master", "yarn"),
        *("--deploy-mode", "client", "--executor-memory", "1g", "--driver-memory", "1g"),
        *("--executor-cores", "1", "--num-executors", "2", "--queue", "small"),
        *("--conf", "spark.executor.memoryOverhead=1g"),
        *("--conf", "spark.driver.host=127.0.0.1"),
        *("--conf", f"spark.pyspark.driver.python={sys.executable}"),
        *("--conf", f"spark.pyspark.python={sys.executable}"),
        *("--conf", f"spark.yarn.jars=local:{spark_home()}/jars/*"),
        *("train.py", "--cluster_mode", "bigdl-submit"),
    ]
    variables = {**os.environ, **ENVIRONMENT, "HADOOP_CONF_DIR": str(yarn / "conf")}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=280, check=False
    )
    assert last_line(done)["Accuracy"] > 0.9


@pytest.mark.slow
def test_an_environment_is_packed_and_sent_once(yarn, tmp_path):
    """A small environment, which takes the large packages from that of the tests."""
    prefix = tmp_path / "environment"
    for command in (
        [sys.executable, "-m", "venv", str(prefix)],
        [str(prefix / "bin/python"), "-m", "pip", "install", "-q", "venv-pack", "setuptools<81"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"venv-pack cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    packages = next((prefix / "lib").glob("python*/site-packages"))
    others = next(Path(sys.prefix, "lib").glob("python*/site-packages"))
    (packages / "others.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")
    arguments = on_yarn(yarn)
    del arguments["python_location"]
    variables = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = FIT.replace("os.uname().nodename", "sys.prefix").replace("os\n", "os, sys\n", 1)
    kept = []
    for name in ("first", "second"):
        python = str(prefix / "bin" / "python")
        found = last_line(run(tmp_path / name, program, arguments, variables, python=python))
        np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)
        assert all(path.startswith(str(yarn)) for path in found["hosts"])  # unpacked by YARN
        kept.append(kept_files(yarn))
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2  # the environment and Spark's JARs


@pytest.mark.slow
def test_jars_are_uploaded_once(yarn, tmp_path):
    found = []
    for name in ("first", "second"):
        jars = last_line(run(tmp_path / name, FIT, on_yarn(yarn), ENVIRONMENT))["jars"]
        found.append((jars, kept_files(yarn)))
    assert found[0] == found[1]
    assert found[0][0].startswith("hdfs://")
    # but for the environments that other programs have sent
    assert len([kept for kept in found[0][1] if not kept.endswith(".tar.gz")]) == 1


@pytest.mark.slow
def test_a_program_in_cluster_mode_prints_here(yarn, tmp_path):
    program = """
        from bigdl.orca import init_orca_context, stop_orca_context

        sc = init_orca_context(**ARGUMENTS)
        print("the sum is", sc.range(10).sum(), flush=True)
        stop_orca_context()
        raise ValueError("the program's own error")
    """
    arguments = on_yarn(yarn, cluster_mode="yarn-cluster")
    done = run(tmp_path / "there", program, arguments, ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    assert "the sum is 45" in done.stdout
    assert done.stdout.count("Traceback (most recent call last)") == 1, done.stdout
    assert "ValueError: the program's own error" in done.stdout


ON_HDFS = """
    import json, sys
    import numpy as np, pandas as pd, torch
    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.data import file
    from bigdl.orca.data.pandas import read_csv, read_parquet
    from bigdl.orca.learn.pytorch import Estimator

    init_orca_context(**ARGUMENTS)
    folder = "hdfs:///data"
    x = np.random.default_rng(0).normal(size=(64, 2))
    x = x.astype("float32")
    rows = pd.DataFrame({"x": list(x), "y": x.sum(1)})
    rows.to_parquet("rows.parquet")
    rows[["y"]].to_csv("rows.csv", index=False)
    for name in ("rows.parquet", "rows.csv"):
        assert file.put_local_file_to_remote(name, f"{folder}/{name}") == 0
    counts = [len(read(f"{folder}/rows.{kind}").to_spark_df().toPandas())
              for read, kind in ((read_parquet, "parquet"), (read_csv, "csv"))]

    def estimator(**options):
        torch.manual_seed(0)
        return Estimator.from_torch(
            model=lambda config: torch.nn.Linear(2, 1),
            optimizer=lambda model, config: torch.optim.Adam(model.parameters(), 0.1),
            loss=torch.nn.MSELoss(), **options)

    fit = {"batch_size": 16, "seed": 1, "feature_cols": ["x"], "label_cols": ["y"]}
    data = f"{folder}/rows.parquet"
    whole = estimator().fit(data, epochs=4, **fit)
    estimator(model_dir=f"{folder}/run").fit(data, epochs=2, **fit)
    rest = estimator(model_dir=f"{folder}/run").fit(data, epochs=4, resume="auto", **fit)
    names = file.listdir(f"{folder}/run")
    stop_orca_context()
    losses = [found[-1]["train_loss"] for found in (whole, rest)]
    print(json.dumps({"counts": counts, "losses": losses, "names": names}))
"""


@pytest.mark.slow
def test_data_and_checkpoints_are_on_hdfs(yarn, tmp_path):
    variables = {**ENVIRONMENT, "HADOOP_CONF_DIR": str(yarn / "conf")}
    found = last_line(run(tmp_path / "there", ON_HDFS, on_yarn(yarn), variables))
    assert found["counts"] == [64, 64]
    assert found["losses"][0] == found["losses"][1]
    assert all(name.startswith("hdfs:///data/run/") for name in found["names"])
