"""Programs that lose their cluster, disk or limits: each must raise one clear error.

    python benchmarks/kills.py [--of "JVM, fit" disk ...] [--times 5] [--json out.json]

Each case is a separate program with a temporary folder. What it needs is killed with
SIGKILL, stopped or used up, ``--times`` times in a row; after each kill ``stop_orca_context`` and
``init_orca_context`` must work in the same program. A trial is good if the call ends with an error
of BigDL in one sentence within the bound of its case, counted from the kill, and nothing that the
program started runs any more after it was stopped. At the end of the program neither processes of
it nor files in its folder may be left, and its output shows no traceback.

It prints a table; the exit status is 1 if any case is not good. ``disk`` mounts a ``tmpfs``, so it
needs root. No other BigDL has to be stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

MARK = "BIGDL_KILLS"  # variable that all processes of a program inherit
BOUNDS = {  # seconds from the kill, or from the begin of a fit, to the sentence
    "master, fit": 15,
    "supervisor, fit": 15,
    "JVM, fit": 15,
    "JVM, predict": 15,
    "JVM, XShards": 15,
    "JVM, idle": 15,
    "Ray's GCS, fit": 30,
    "Ray's raylet, fit": 30,
    "disk, PyTorch": 60,
    "disk, Keras": 60,
    "ulimit -n 64": 60,
    "hung worker of bigdl-serve": 20,
    "parent of bigdl-serve": 20,
}
_GRACE_S = 15.0  # seconds that processes and folders have to go after a program
_TRACEBACK = "Traceback (most recent call last)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--of", nargs="+", choices=BOUNDS, default=list(BOUNDS), metavar="CASE")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all trials there, too")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        PROGRAMS[options.program](options.program, options.times)
        return 0
    results = {}
    print("| case | seconds to the sentence | good | left | the sentence, or what was wrong |")
    print("|---|---|---|---|---|")
    for case in options.of:
        results[case] = run(case, options.times)
        print(line_of(case, results[case], options.times), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return int(not all(is_good(case, results[case], options.times) for case in results))


# -- a program, seen from outside -----------------------------------------------------------------


def run(case: str, times: int) -> dict:
    """Run the program of a case; return its trials, remaining files and processes, and output."""
    folder = tempfile.mkdtemp(prefix="kills-")
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor"}  # of PyTorch
    environment = {**os.environ, **caches, "TMPDIR": folder, MARK: folder}
    command = [sys.executable, __file__, "--program", case, "--times", str(times)]
    before = set(os.listdir("/tmp"))
    output = Path(f"{folder}.log")
    with output.open("w") as file:
        try:
            ended = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=480)
            code = ended.returncode
        except subprocess.TimeoutExpired:
            code = None
    text = output.read_text(errors="replace")
    deadline = time.monotonic() + _GRACE_S
    while (left := leftovers(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = ("bigdl", "ray", "spark-", "blockmgr-", "artifacts-", "liblz4")  # of others, too
    new = {name for name in set(os.listdir("/tmp")) - before if name.startswith(names)}
    trials = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("TRIAL ")]
    for process in marked(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    result = {"trials": trials, "left": left, "code": code, "tracebacks": text.count(_TRACEBACK)}
    if code == 0 and not left and not result["tracebacks"]:
        output.unlink()
    else:
        result["output"] = str(output)
    shutil.rmtree(folder, ignore_errors=True)
    return {**result, "beside": sorted(new)}


def marked(folder: str) -> list[psutil.Process]:
    """Return the processes that inherited the environment mark of a program."""
    trials = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            text = Path(f"/proc/{process.pid}/environ").read_bytes()
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and f"{MARK}={folder}".encode() in text.split(b"\0"):
                trials.append(process)
    return trials


def leftovers(folder: str) -> list[str]:
    """Return the remaining processes of a program, with their ports, and files in its folder."""
    running = [f"process {' '.join(each.cmdline())[:80]}" for each in marked(folder)]
    return running + [str(path.relative_to(folder)) for path in Path(folder).rglob("*")]


def is_good(case: str, result: dict, times: int) -> bool:
    """Return True if all trials of a case passed."""
    good = sum(is_good_trial(case, trial) for trial in result["trials"])
    clean = result["code"] == 0 and not result["left"] and not result["tracebacks"]
    return good == times and clean


def is_good_trial(case: str, trial: dict) -> bool:
    """Return True if a kill raised an error in time and left no process."""
    told = trial["ours"] and "\n" not in trial["said"].strip()
    return told and trial["seconds"] <= BOUNDS[case] and not trial["left"]


def line_of(case: str, result: dict, times: int) -> str:
    """Return a row of the table."""
    seconds = sorted(trial["seconds"] for trial in result["trials"])
    span = (
        f"{seconds[len(seconds) // 2]:.1f} ({seconds[0]:.1f}–{seconds[-1]:.1f})" if seconds else ""
    )
    good = sum(is_good_trial(case, trial) for trial in result["trials"])
    wrong = [trial for trial in result["trials"] if not is_good_trial(case, trial)]
    said = [trial["said"] for trial in wrong or result["trials"]][:1]
    if wrong and wrong[0]["left"]:
        said += wrong[0]["left"]
    if result["tracebacks"]:
        said.append(f"{result['tracebacks']} tracebacks")
    if result["code"] != 0:
        said.append(f"exit status {result['code']}")
    if "output" in result:
        said.append(result["output"])
    text = re.sub(r"\s+", " ", "; ".join(said)).replace("|", "/")[:300]
    left = ", ".join(result["left"][:3]) or "nothing"
    return f"| {case} | {span} | {good} of {times} | {left} | {text} |"


# -- programs -------------------------------------------------------------------------------------


def trial(
    call: Callable[[], Any],
    killed: Callable[[], float],
    after: Callable[[], None] | None = None,
) -> None:
    """Make a call that must fail, clean up, and print the result.

    Without `after` there is nothing to stop: what a program keeps for later calls ends with it.
    """
    from bigdl.common.errors import UsageError
    from bigdl.runtime.failure import WorkerError, WorkerLost

    said, ours, end = "nothing was raised", False, 0.0
    try:
        call()
        end = time.monotonic()
    except Exception as error:
        end = time.monotonic()
        said = f"{type(error).__name__}: {error}"
        ours = isinstance(error, UsageError | WorkerLost) and not isinstance(error, WorkerError)
    seconds = end - killed()
    left = []
    if after is not None:
        with contextlib.suppress(Exception):
            after()
        left = children()
    report(said, ours, seconds, left)


def report(said: str, ours: bool, seconds: float, left: list[str]) -> None:
    facts = {"said": said, "ours": ours, "seconds": round(seconds, 2), "left": left}
    print("\nTRIAL " + json.dumps(facts), flush=True)


def children() -> list[str]:
    """Return the remaining child processes, except for helpers of Python."""
    deadline = time.monotonic() + 10
    while True:
        own = psutil.Process().children(recursive=True)
        running = []
        for each in own:
            with contextlib.suppress(psutil.Error):
                command = " ".join(each.cmdline())
                if each.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in command:
                    running.append(command[:80])
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.1)


class Killer(threading.Thread):
    """Thread that kills a process as soon as a file shows that the call has started."""

    def __init__(self, victim: Callable[[], int], begun: Path | None):
        super().__init__(daemon=True)
        self.victim, self.begun, self.time = victim, begun, time.monotonic()
        if begun is not None:
            begun.unlink(missing_ok=True)
        self.start()

    def run(self) -> None:
        while self.begun is not None and not self.begun.exists():
            time.sleep(0.02)
        time.sleep(0.3)
        pid = self.victim()
        self.time = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    def killed(self) -> float:
        self.join(60)
        return self.time


def network(config: dict) -> Any:
    """Return a small model with slow steps that signal their start."""
    import torch

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x):
            Path(config["begun"]).touch()
            time.sleep(0.05 if self.training else 0.5)
            return self.layer(x)

    torch.manual_seed(0)
    return Slow()


def estimator(begun: Path, **options: Any) -> Any:
    import torch

    from bigdl.orca.learn.pytorch import Estimator

    return Estimator.from_torch(
        model=network,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters()),
        loss=torch.nn.MSELoss(),
        config={"begun": str(begun)},
        **options,
    )


def arrays(rows: int = 256) -> Any:
    import numpy as np

    x = np.random.default_rng(0).random((rows, 4), "float32")
    return x, x[:, :1].copy()


def touch_and_wait(begun: str) -> Callable:
    """Signal the start of a shard function, then wait."""

    def wait(shard):
        import pathlib
        import time

        pathlib.Path(begun).touch()
        time.sleep(60)
        return shard

    return wait


def spark_program(case: str, times: int) -> None:
    """Kill the driver's JVM, or a process of a standalone cluster."""
    import numpy as np

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.data import XShards

    victim, _, call = case.partition(", ")
    begun = Path(os.environ[MARK], "begun")
    mode = "local" if victim == "JVM" else "standalone"
    for _ in range(times):
        sc = init_orca_context(mode, cores=2 if victim == "JVM" else 1, memory="1g", num_nodes=1)
        jvm = sc._gateway.proc.pid

        def pid(jvm: int = jvm) -> int:
            return jvm if victim == "JVM" else daemon_of(victim)

        est = estimator(begun, workers_per_node=1)
        calls = {
            "fit": lambda est=est: est.fit(arrays(), epochs=500, batch_size=64),
            "predict": lambda est=est: predicted(est),
            "XShards": lambda: (
                XShards.partition(np.zeros(8)).transform_shard(touch_and_wait(str(begun))).collect()
            ),
            "idle": lambda: OrcaContext.get_spark_session().range(5).count(),
        }
        killer = Killer(pid, None if call == "idle" else begun)
        if call == "idle":
            killer.join()
        trial(calls[call], killer.killed, stop_orca_context)
    begun.unlink(missing_ok=True)


def predicted(est: Any) -> Any:
    from bigdl.orca import OrcaContext

    spark = OrcaContext.get_spark_session()
    frame = spark.range(4000).selectExpr("array(sin(id), cos(id), 0.5D, 1D) as x")
    return est.predict(frame, feature_cols=["x"], batch_size=8).collect()


def daemon_of(name: str) -> int:
    """Return a process of a standalone cluster: its supervisor or its master."""
    word = "deploy.master.Master" if name == "master" else "cluster/supervisor.py"
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if word in " ".join(each.cmdline()):
                return each.pid
    raise RuntimeError(f"no process {name}")


def ray_program(case: str, times: int) -> None:
    """Kill a main process of the Ray that the program started, during a fit."""
    from bigdl.orca import init_orca_context, stop_orca_context

    begun = Path(os.environ[MARK], "begun")
    name = "gcs_server" if "GCS" in case else "raylet"

    def victim() -> int:
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if each.name() == name:
                    return each.pid
        raise RuntimeError(f"no process {name}")

    for _ in range(times):
        init_orca_context(runtime="ray", cores=2, memory="1g")
        est = estimator(begun, backend="ray", workers_per_node=1)
        killer = Killer(victim, begun)
        trial(
            lambda est=est: est.fit(arrays(), epochs=500, batch_size=64),
            killer.killed,
            stop_orca_context,
        )
    begun.unlink(missing_ok=True)


def disk_program(case: str, times: int) -> None:
    """Fit with a model_dir that is too small for its checkpoints."""
    begun = Path(os.environ[MARK], "begun")
    for number in range(times):
        with small_disk(Path(os.environ[MARK], "disk"), 16 + 12 * number) as folder:
            begin = time.monotonic()
            fit = keras_fit if "Keras" in case else torch_fit
            trial(lambda f=folder, fit=fit: fit(f, begun), lambda b=begin: b)
            halves = [p.name for p in folder.rglob(".*") if p.name != ".probe"]
            if halves:
                report(f"half a checkpoint is left: {halves}", False, 0.0, halves)
    begun.unlink(missing_ok=True)


def torch_fit(folder: Path, begun: Path) -> None:
    est = estimator(begun, backend="local", workers_per_node=1, model_dir=str(folder))
    for _ in range(30):
        est.fit(arrays(64), epochs=1, batch_size=64)


def keras_fit(folder: Path, begun: Path) -> None:
    from bigdl.orca.learn.tf2 import Estimator

    def model(config):
        import keras

        network = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        network.compile("adam", "mse")
        return network

    est = Estimator.from_keras(
        model_creator=model, backend="local", workers_per_node=1, model_dir=str(folder)
    )
    for _ in range(30):
        est.fit(arrays(64), epochs=1, batch_size=64)


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def limit_program(case: str, times: int) -> None:
    """Fit an input of many arrays on workers with a low limit of open files."""
    begun = Path(os.environ[MARK], "begun")
    for _ in range(times):
        child = os.fork()  # nobody gets a limit back
        if child == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            begin = time.monotonic()
            trial(lambda: many_arrays(begun), lambda b=begin: b)
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
    begun.unlink(missing_ok=True)


def many_arrays(begun: Path) -> None:
    est = estimator(begun, backend="local", workers_per_node=2)
    x, y = arrays()
    data = {"x": tuple(x for _ in range(100)), "y": y}
    est.fit(data, epochs=1, batch_size=64)


def serve_program(case: str, times: int) -> None:
    """Stop a worker of bigdl-serve, or kill its parent process."""
    models = Path(os.environ[MARK], "models")
    models.mkdir()
    save_model(models / "scale" / "1")
    for _ in range(times):
        hang(models) if "hung" in case else orphan(models)
    shutil.rmtree(models)


def save_model(path: Path) -> None:
    import numpy as np
    import openvino
    from openvino import opset13

    from bigdl.nano.acceleration.saved import write_directory
    from bigdl.nano.openvino.network import SAVED_NAME, write_network

    x = opset13.parameter([-1, 3], np.float32, name="x")
    x.output(0).set_names({"x"})
    y = opset13.multiply(x, np.full(3, 2, np.float32))
    y.output(0).set_names({"y"})

    def write_files(directory):
        write_network(openvino.Model([y], [x]), directory)
        facts = {"xml_path": f"{SAVED_NAME}.xml", "weight_path": f"{SAVED_NAME}.bin"}
        return {"ModelType": "PytorchOpenVINOModel", **facts}

    write_directory(path, write_files)


def serve(models: Path) -> tuple[subprocess.Popen, list[psutil.Process], Path]:
    """Start a server with two workers; return it, its workers, and its error file."""
    program = Path(sys.executable).with_name("bigdl-serve")
    log = models.with_name("serve.log")
    command = [program, models, "--workers", "2", "--worker-timeout", "3"]
    command += ["--http-port", "0", "--grpc-port", "0"]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    deadline = time.monotonic() + 90
    while "bigdl-serve:" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    return server, workers_of(server), log


def workers_of(server: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(server.pid).children()


def hang(models: Path) -> None:
    server, workers, log = serve(models)
    begin = time.monotonic()
    workers[0].suspend()
    while time.monotonic() < begin + 60:
        now = workers_of(server)
        if workers[0] not in now and len(now) == 2:
            break
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    lines = [line for line in log.read_text().splitlines() if "no sign of life" in line]
    time.sleep(2)
    server.terminate()
    code = server.wait(60)
    said = lines[0] if lines else log.read_text()
    log.unlink()
    report(said, len(lines) == 1 and code == 0, seconds, children())


def orphan(models: Path) -> None:
    server, workers, log = serve(models)
    begin = time.monotonic()
    server.kill()
    server.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    root = [p for p in models.parent.iterdir() if p.name.startswith("bigdl")]
    while time.monotonic() < begin + 60 and any(
        "serve" in p.name for each in root if each.exists() for p in each.iterdir()
    ):
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    text = log.read_text()
    log.unlink()
    report(f"{len(workers)} workers ended", _TRACEBACK not in text, seconds, list(map(str, alive)))


PROGRAMS = {
    case: spark_program
    if case.startswith(("JVM", "master", "supervisor"))
    else ray_program
    if case.startswith("Ray")
    else disk_program
    if case.startswith("disk")
    else limit_program
    if case.startswith("ulimit")
    else serve_program
    for case in BOUNDS
}

if __name__ == "__main__":
    sys.exit(main())
