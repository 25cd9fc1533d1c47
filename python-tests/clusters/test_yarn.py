"""Programs on a real YARN of two hosts with HDFS."""

import sys
from pathlib import Path

import numpy as np
import pytest
from real_clusters import FIT, control, fitted_weights, last_line, run

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
