"""Start a cluster of `scripts/clusters` for a test, and run programs on it."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "clusters"
MISSING = 3  # exit status of a script whose cluster cannot run on this machine


def control(script: str, verb: str, folder: Path, *arguments: str) -> str:
    """Run a command of a cluster; returns what it prints."""
    command = [sys.executable, str(SCRIPTS / script), verb, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(script: str, folder: Path, *arguments: str) -> Iterator[Path]:
    """Start a cluster in a folder; the test is skipped where it cannot run.

    The cluster stops when this process ends, also by SIGKILL.
    """
    command = [sys.executable, str(SCRIPTS / script), "hold", str(folder), *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    holder = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    assert holder.stdout
    is_ready = any(line == "ready\n" for line in holder.stdout)
    try:
        if is_ready:
            yield folder
    finally:
        _, printed = holder.communicate(timeout=120)
    if holder.returncode == MISSING:
        pytest.skip(printed.strip().splitlines()[-1])
    assert is_ready, printed
    assert holder.returncode == 0, printed


# A program with ARGUMENTS of init_orca_context: three steps with all rows, from zero.
FIT = """
    import json, os
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    sc = init_orca_context(**ARGUMENTS)
    places = sc.range(2, numSlices=2).barrier()  # two tasks at once, when both executors are there
    places = places.mapPartitions(lambda _: [(os.getcwd(), os.uname().nodename)])
    folders, hosts = map(sorted, map(set, zip(*places.collect())))
    rows = OrcaContext.get_spark_session().range(64, numPartitions=2).selectExpr(
        "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
        "float(sin(id) + 2 * cos(id)) AS y",
    )

    def model(config):
        linear = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        return linear

    estimator = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
        loss=torch.nn.MSELoss(),
    )
    estimator.fit(
        rows, epochs=3, batch_size=64, feature_cols=["x"], label_cols=["y"], seed=7
    )
    weight, bias = estimator.get_model().parameters()
    jars = sc.getConf().get("spark.yarn.archive", "")
    result = {
        "weights": [*weight.detach().reshape(-1).tolist(), bias.item()],
        "folders": folders,
        "hosts": hosts,
        "jars": jars,
    }
    stop_orca_context()
    print(json.dumps(result))
"""


# A program with ARGUMENTS of init_orca_context, WORKERS_PER_NODE, and FOLDER for what it saves.
# What it prints is the same on every cluster, to the last bit.
WHOLE = """
    import json
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    init_orca_context(**ARGUMENTS)
    rows = OrcaContext.get_spark_session().range(240, numPartitions=4).selectExpr(
        "id",
        "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
        "float(sin(id) + 2 * cos(id)) AS y",
    )

    def model(config):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )

    def estimator(**options):
        return Estimator.from_torch(
            model=model,
            optimizer=lambda model, config: torch.optim.Adam(model.parameters(), 0.05),
            loss=torch.nn.MSELoss(),
            workers_per_node=WORKERS_PER_NODE,
            **options,
        )

    def weights(estimator):
        return [tensor.tolist() for tensor in estimator.get_model().state_dict().values()]

    data = {"feature_cols": ["x"], "label_cols": ["y"]}
    fit = {"batch_size": 24, "seed": 7, **data}
    whole = estimator()
    whole.fit(rows, epochs=4, validation_data=rows, **fit)
    predicted = whole.predict(rows, batch_size=50, feature_cols=["x"])
    predicted = predicted.selectExpr("id", "prediction AS y").orderBy("id").toPandas()
    whole.save(f"{FOLDER}/model.pt")
    loaded = estimator()
    loaded.load(f"{FOLDER}/model.pt")
    estimator(model_dir=f"{FOLDER}/run").fit(rows, epochs=2, **fit)
    resumed = estimator(model_dir=f"{FOLDER}/run")
    resumed.fit(rows, epochs=4, resume="auto", **fit)
    result = {
        "weights": weights(whole),
        "loaded": weights(loaded),
        "resumed": weights(resumed),
        "evaluated": whole.evaluate(rows, batch_size=50, **data),
        "predicted": predicted["y"].tolist(),
    }
    stop_orca_context()
    print(json.dumps(result))
"""


def run_whole(
    folder: Path,
    arguments: dict,
    environment: dict[str, str] | None = None,
    *,
    workers_per_node: int = 1,
    saved: str = "saved",
) -> dict:
    """What WHOLE prints, with what it says of itself checked."""
    head = f"WORKERS_PER_NODE, FOLDER = {workers_per_node}, {saved!r}\n"
    result = last_line(run(folder, head + textwrap.dedent(WHOLE), arguments, environment))
    assert result["weights"] == result["loaded"]
    assert result["weights"] == result["resumed"]
    assert len(result["predicted"]) == 240
    return result


def fitted_weights() -> np.ndarray:
    """The weights and the bias that FIT ends with."""
    ids = np.arange(64)
    x = np.column_stack([np.sin(ids), np.sin(2 * ids), np.sin(3 * ids), np.ones(64)])
    y = np.sin(ids) + 2 * np.cos(ids)
    weights = np.zeros(4)
    for _ in range(3):
        weights -= 0.1 * 2 / 64 * x.T @ (x @ weights - y)
    return weights


def run(
    folder: Path,
    program: str,
    arguments: dict,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Run a program in a new folder."""
    folder.mkdir()
    settings = f"ARGUMENTS = {arguments!r}\n"
    (folder / "program.py").write_text(settings + textwrap.dedent(program), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "SPARK_LOCAL_DIRS": str(folder), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess) -> dict:
    """The JSON that a program wrote at the end."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
