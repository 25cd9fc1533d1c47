"""Start a cluster of `scripts/clusters` for a test, and run programs on it."""

import atexit
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "clusters"
MISSING = 3  # exit status of a script whose cluster cannot run on this machine


def control(script: str, verb: str, folder: Path, *arguments: str) -> str:
    """Run a command of a cluster; returns what it prints."""
    command = [sys.executable, str(SCRIPTS / script), verb, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, errors="replace", timeout=300, check=False)
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


def apply_account(cluster: Path, standard: str) -> None:
    """Apply docker/kubernetes/account.yaml, with a Pod Security standard for its namespace."""
    file = SCRIPTS.parents[1] / "docker" / "kubernetes" / "account.yaml"
    control("kubernetes.py", "kubectl", cluster, "apply", "-f", str(file))
    label = f"pod-security.kubernetes.io/enforce={standard}"
    control(
        "kubernetes.py", "kubectl", cluster, "label", "namespace", "bigdl", "--overwrite", label
    )


def with_claims(cluster: Path, namespace: str, template: dict) -> dict:
    """Make claims of the folders that a template of pods shows, which any namespace admits."""
    volumes, items = [], []
    for volume in template["spec"]["volumes"]:
        name = f"{namespace}-{volume['name']}"
        size = {"storage": "1Gi"}
        spec = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        items += [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": {**spec, "capacity": size, "hostPath": volume["hostPath"]},
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {**spec, "volumeName": name, "resources": {"requests": size}},
            },
        ]
        volumes.append({"name": volume["name"], "persistentVolumeClaim": {"claimName": name}})
    file = cluster / f"claims-{namespace}.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    control("kubernetes.py", "kubectl", cluster, "apply", "-f", str(file))
    return {**template, "spec": {**template["spec"], "volumes": volumes}}


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
    python: str = sys.executable,
) -> dict:
    """What WHOLE prints, with what it says of itself checked."""
    head = f"WORKERS_PER_NODE, FOLDER = {workers_per_node}, {saved!r}\n"
    program = head + textwrap.dedent(WHOLE)
    result = last_line(run(folder, program, arguments, environment, python=python))
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
    *,
    python: str = sys.executable,
) -> subprocess.CompletedProcess:
    """Run a program in a new folder to its end."""
    return finished(start(folder, program, arguments, environment, python=python), folder)


def finished(
    process: subprocess.Popen, folder: Path, seconds: float = 400
) -> subprocess.CompletedProcess:
    """Wait for the end of a program; what it prints is kept in its folder."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"The program did not end:\n{output}\n{errors}") from None
    (folder / "stdout").write_text(output)
    (folder / "stderr").write_text(errors)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def await_none(left: Callable[[], list], seconds: float = 30) -> float:
    """Wait until nothing is left; returns after how many seconds."""
    began = time.monotonic()
    while found := left():
        assert time.monotonic() - began < seconds, found
        time.sleep(0.1)
    return time.monotonic() - began


def start(
    folder: Path,
    program: str,
    arguments: dict,
    environment: dict[str, str] | None = None,
    *,
    python: str = sys.executable,
) -> subprocess.Popen:
    """Start a program in a new folder."""
    folder.mkdir()
    settings = f"ARGUMENTS = {arguments!r}\n"
    (folder / "program.py").write_text(settings + textwrap.dedent(program), encoding="utf-8")
    process = subprocess.Popen(
        [python, "program.py"],
        cwd=folder,
        env={**os.environ, "SPARK_LOCAL_DIRS": str(folder / "local"), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)  # of tests that are interrupted
    return process


def last_line(done: subprocess.CompletedProcess) -> dict:
    """The JSON that a program wrote at the end."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


#: what Spark's JVM may log after a program's error: a record, an exception, its causes, its stack
OF_THE_JVM = re.compile(r"\d\d/\d\d/\d\d |(Caused by: )?(java|org\.apache|io)\.|\t|$")


def error_line(done: subprocess.CompletedProcess) -> str:
    """The last line of a program's error."""
    lines = done.stderr.strip().splitlines()
    return next((line for line in reversed(lines) if not OF_THE_JVM.match(line)), "")


# A program that stops in the middle of a step: the worker of RANK writes its pid to PLACE/waiting
# and goes on when PLACE/done is there. PLACE is a folder that all hosts see.
IN_A_STEP = """
    import json, os, time
    from pathlib import Path
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    def wait():
        place = Path(PLACE)
        if not (place / "waiting").exists():
            (place / "part").write_text(str(os.getpid()))
            (place / "part").rename(place / "waiting")
        while not (place / "done").exists():
            time.sleep(0.1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(3, 1)
            self.steps = 0

        def forward(self, x):
            self.steps += 1
            group = torch.distributed
            rank = group.get_rank() if group.is_initialized() else 0  # of a worker that is alone
            if self.steps == STEP and rank == RANK:
                wait()
            return self.linear(x)

    def fit():
        rows = OrcaContext.get_spark_session().range(96, numPartitions=2).selectExpr(
            "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
            "float(sin(id) + 2 * cos(id)) AS y",
        )
        estimator = Estimator.from_torch(
            model=lambda config: Model(),
            optimizer=lambda model, config: torch.optim.Adam(model.parameters(), 0.05),
            loss=torch.nn.MSELoss(),
            **OPTIONS,
        )
        estimator.fit(
            rows, epochs=5, batch_size=32, feature_cols=["x"], label_cols=["y"], seed=7, **FIT
        )
        return [tensor.tolist() for tensor in estimator.get_model().state_dict().values()]

    if __name__ == "__main__":
        sc = init_orca_context(**ARGUMENTS)
        result = fit()
        stop_orca_context()
        print(json.dumps(result))
"""


class InAStep:
    """A run of the program IN_A_STEP.

    Parameters
    ----------
    folder : Path
        New, and seen by all hosts.
    arguments : dict
        Of init_orca_context.
    rank, step : int
        Of the worker that waits, and when.
    options, fit : dict
        More arguments of the Estimator and of its fit.
    """

    def __init__(
        self,
        folder: Path,
        arguments: dict,
        environment: dict[str, str] | None = None,
        *,
        rank: int = 1,
        step: int = 5,
        options: dict | None = None,
        fit: dict | None = None,
        python: str = sys.executable,
    ):
        self.folder = folder
        head = (
            f"PLACE, RANK, STEP = {str(folder)!r}, {rank}, {step}\n"
            f"OPTIONS, FIT = {options or {}!r}, {fit or {}!r}\n"
        )
        program = head + textwrap.dedent(IN_A_STEP)
        self.process = start(folder, program, arguments, environment, python=python)

    def waiting(self) -> int:
        """The pid of the worker that waits."""
        end = time.monotonic() + 400
        while not (self.folder / "waiting").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, self.fail()
            time.sleep(0.1)
        return int((self.folder / "waiting").read_text())

    def go_on(self) -> None:
        (self.folder / "done").touch()

    def end_after(self, seconds: float, comes_back: Callable[[], object]) -> list:
        """Go on without what is gone, which comes back after some seconds; returns the weights."""
        self.go_on()
        time.sleep(seconds)
        comes_back()
        return last_line(self.end())

    def fail(self) -> str:
        """End the program; returns what it has printed."""
        self.process.kill()
        output, errors = self.process.communicate()
        return f"{output}\n{errors}"

    def end(self, seconds: float = 400) -> subprocess.CompletedProcess:
        """Wait for the program's end."""
        return finished(self.process, self.folder, seconds)


def undisturbed(folder: Path, workers: int = 2) -> list:
    """The weights that IN_A_STEP ends with when nothing happens."""
    options = {"workers_per_node": workers}
    run = InAStep(folder, {"cores": workers}, options=options)
    run.go_on()
    return last_line(run.end())
