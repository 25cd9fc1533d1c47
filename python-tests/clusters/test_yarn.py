"""Programs on a real YARN of two hosts with HDFS."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest
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


def kept_files(yarn: Path) -> list[str]:
    """Name and time of what is kept on HDFS for the next programs."""
    lines = hadoop(yarn, "fs", "-ls", "/user/root/.bigdl").splitlines()
    return [" ".join(line.split()[5:]) for line in lines if line.startswith("-")]


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
    program = """
        import json
        import torch
        from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
        from bigdl.orca.learn.pytorch import Estimator

        init_orca_context(**ARGUMENTS)
        rows = OrcaContext.get_spark_session().range(64, numPartitions=2).selectExpr(
            "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
            "array(float(sin(id) + 2 * cos(id))) AS y",
        )
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        estimator = Estimator.from_torch(
            model=model if BACKEND == "bigdl" else lambda config: model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1)
            if BACKEND == "bigdl"
            else lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
            loss=torch.nn.MSELoss(),
            backend=BACKEND,
        )
        estimator.fit(rows, epochs=3, batch_size=64, feature_cols=["x"], label_cols=["y"])
        predicted = estimator.predict(rows, feature_cols=["x"]).count()
        weight, bias = estimator.get_model().parameters()
        stop_orca_context()
        weights = [*weight.detach().reshape(-1).tolist(), bias.item()]
        print(json.dumps({"weights": weights, "predicted": predicted}))
    """
    program = f"BACKEND = {backend!r}\n" + textwrap.dedent(program)
    arguments = on_yarn(yarn, extra_executor_memory_for_ray="2g")
    found = last_line(run(tmp_path / "there", program, arguments, ENVIRONMENT))
    assert found["predicted"] == 64
    np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)


@pytest.mark.slow
def test_ray_runs_on_both_nodes_and_is_gone(yarn, tmp_path):
    program = """
        import json, os
        import ray
        from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

        init_orca_context(**ARGUMENTS)
        OrcaContext.get_ray_context()

        @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
        def place():
            return os.getcwd(), ray.get_runtime_context().get_node_id()

        nodes = [node for node in ray.nodes() if node["Resources"].get("CPU")]
        places = ray.get([place.remote() for _ in range(8)])
        stop_orca_context()
        addresses = [node["NodeManagerAddress"] for node in nodes]
        print(json.dumps({"addresses": addresses, "nodes": sorted({node for _, node in places})}))
    """
    arguments = on_yarn(yarn, init_ray_on_spark=True, extra_executor_memory_for_ray="2g")
    found = last_line(run(tmp_path / "there", program, arguments, ENVIRONMENT))
    assert len(found["nodes"]) == 2
    assert "raylet" not in {process.name() for process in psutil.process_iter()}


@pytest.mark.slow
def test_a_search_of_hyperparameters(yarn, tmp_path):
    program = """
        import json
        import numpy as np, torch
        from torch.utils.data import DataLoader, TensorDataset
        from bigdl.orca import init_orca_context, stop_orca_context
        from bigdl.orca.automl import hp
        from bigdl.orca.automl.auto_estimator import AutoEstimator

        def loader(config):
            x = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 3)).astype("float32"))
            return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)

        if __name__ == "__main__":
            init_orca_context(**ARGUMENTS)
            search = AutoEstimator.from_torch(
                model_creator=lambda config: torch.nn.Linear(3, 1),
                optimizer="SGD", loss="MSELoss", logs_dir="logs", name="search",
            )
            search.fit(
                loader, epochs=2, validation_data=loader, metric="mse", metric_mode="min",
                n_sampling=4, search_space={"lr": hp.choice([1e-4, 1e-1])},
            )
            best = search.get_best_config()
            stop_orca_context()
            print(json.dumps(best))
    """
    arguments = on_yarn(yarn, init_ray_on_spark=True, extra_executor_memory_for_ray="2g")
    assert last_line(run(tmp_path / "there", program, arguments, ENVIRONMENT))["lr"] == 0.1


@pytest.mark.slow
def test_movielens_on_hdfs(yarn, tmp_path):
    data = os.environ.get("BIGDL_DATA")
    if not data:
        pytest.skip("BIGDL_DATA names no folder with ml-100k")
    hadoop(yarn, "fs", "-mkdir", "-p", "/ml-100k")
    hadoop(yarn, "fs", "-put", "-f", f"{data}/ml-100k/u.data", "/ml-100k/u.data")
    program = """
        import json, sys
        sys.path.insert(0, EXAMPLES)
        import neumf
        import train_dataframe
        from bigdl.orca import init_orca_context, stop_orca_context

        neumf.start = lambda options: init_orca_context(**ARGUMENTS)
        report = train_dataframe.main([
            "--data-dir", "hdfs:///ml-100k", "--users", "100", "--epochs", "2",
            "--workers_per_node", "1", "--output", "hdfs:///ncf", "--fused",
        ])
        stop_orca_context()
        print(json.dumps({name: float(value) for name, value in report.items()}))
    """
    examples = Path(__file__).parents[2] / "examples" / "orca" / "ncf"
    program = f"EXAMPLES = {str(examples)!r}\n" + textwrap.dedent(program)
    variables = {**ENVIRONMENT, "HADOOP_CONF_DIR": str(yarn / "conf")}
    found = last_line(run(tmp_path / "there", program, on_yarn(yarn), variables))
    assert found["auc"] > 0.6


FASHION = """
    import argparse, json, os
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.optim as optim
    from torch.utils.data import DataLoader, TensorDataset
    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.learn.metrics import Accuracy
    from bigdl.orca.learn.pytorch import Estimator

    def images(seed, size):
        labels = np.random.default_rng(seed).integers(0, 10, size)
        pixels = np.zeros((size, 1, 28, 28), np.float32)
        for row, label in enumerate(labels):
            pixels[row, 0, 2 * label : 2 * label + 4] = 1
        return TensorDataset(torch.from_numpy(pixels), torch.from_numpy(labels))

    def train_data_creator(config, batch_size):
        return DataLoader(images(0, 640), batch_size=batch_size, shuffle=True, num_workers=0)

    def validation_data_creator(config, batch_size):
        return DataLoader(images(1, 160), batch_size=batch_size, num_workers=0)

    def model_creator(config):
        return nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten(), nn.Linear(864, 10)
        )

    def optimizer_creator(model, config):
        return optim.SGD(model.parameters(), lr=config.get("lr", 0.05), momentum=0.9)

    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster_mode", default="yarn-client")
    options = parser.parse_args()
    if options.cluster_mode == "bigdl-submit":
        init_orca_context(cluster_mode="bigdl-submit")
    else:
        init_orca_context(**{**ARGUMENTS, "cluster_mode": options.cluster_mode})
    orca_est = Estimator.from_torch(
        model=model_creator, optimizer=optimizer_creator, loss=nn.CrossEntropyLoss(),
        metrics=[Accuracy()], model_dir=MODEL_DIR, backend="spark",
        config={"lr": 0.05}, use_tqdm=True, workers_per_node=1,
    )
    orca_est.fit(data=train_data_creator, epochs=3, batch_size=32,
                 validation_data=validation_data_creator)
    result = orca_est.evaluate(data=validation_data_creator, batch_size=32)
    stop_orca_context()
    print(json.dumps({name: float(value) for name, value in result.items()}))
"""


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
