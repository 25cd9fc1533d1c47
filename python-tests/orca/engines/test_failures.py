"""Whole programs: errors, interrupts and drivers that are killed.

What holds for lost workers on every engine is in ``test_engines`` and ``test_engines_training``.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import faults
import psutil
import pytest

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def undisturbed(orca_spark):
    """Weights after the training of `faults`."""
    return faults.fit(faults.estimator(), faults.frame(orca_spark))


def start(path: Path, program: str, **variables: str) -> subprocess.Popen:
    path.write_text(textwrap.dedent(program))
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "SPARK_LOCAL_DIRS": str(path.parent / "local"),
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, str(path), str(path.parent)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_user_errors_are_reported_once_and_not_retried(tmp_path):
    program = """
        import json, sys, time
        from pathlib import Path

        import faults
        from bigdl.common.errors import WorkerError
        from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
        from bigdl.orca.engine import SparkEngine

        folder = Path(sys.argv[1])

        def fail(name):
            with open(folder / name, "a") as file:
                file.write(f"{time.time()}\\n")
            raise ZeroDivisionError("+".join(["marked", name]))

        def fn_of(name, ranks):
            def program(worker):
                if worker.rank in ranks:
                    fail(name)
                time.sleep(60)
            return program

        def creator(config):
            fail("creator")

        class Failing(faults.Once):
            def act(self, runner):
                fail("callback")

        def net(config):
            import torch

            class Net(torch.nn.Linear):
                def forward(self, x):
                    fail("forward")

            return Net(3, 1).double()

        def loss(output, target):
            fail("loss")

        def run(name, call):
            try:
                call()
            except WorkerError as error:
                now = time.time()
                seen.append([name, error.rank, error.kind, str(error), now])

        seen = []
        init_orca_context("local", cores=2, memory="1g")
        data = faults.frame(OrcaContext.get_spark_session())
        engine = SparkEngine()
        for name, ranks in [("fn0", [0]), ("fn1", [1]), ("fn01", [0, 1])]:
            run(name, lambda: engine.run(fn_of(name, ranks), num_workers=2))
        run("creator", lambda: faults.fit(faults.estimator(model=creator), data))
        run("forward", lambda: faults.fit(faults.estimator(model=net), data))
        run("loss", lambda: faults.fit(faults.estimator(loss=loss), data))
        failing = Failing(folder / "marker", 1, 14)
        run("callback", lambda: faults.fit(faults.estimator(), data, failing))
        (folder / "seen.json").write_text(json.dumps(seen))
        faults.fit(faults.estimator(model=creator), data)
    """
    process = start(tmp_path / "program.py", program)
    out, err = process.communicate(timeout=150)
    assert (tmp_path / "seen.json").exists(), err
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [s[0] for s in seen] == ["fn0", "fn1", "fn01", "creator", "forward", "loss", "callback"]
    for name, rank, kind, text, caught in seen:
        times = [float(line) for line in (tmp_path / name).read_text().splitlines()]
        alone = name in ("fn0", "fn1", "callback")
        # the last program is that of the creator again
        assert len(times) <= {"creator": 4}.get(name, 1 if alone else 2), name
        assert caught - times[0] < 5, name
        assert kind == "ZeroDivisionError"
        assert rank == {"fn0": 0, "fn1": 1, "callback": 1}.get(name, rank)
        assert text.startswith(f"ZeroDivisionError in worker {rank}:\nTraceback (most recent call")
        assert "in fail\n    raise ZeroDivisionError" in text
        assert text.endswith(f"ZeroDivisionError: marked+{name}")
        assert "bigdl/orca/engine" not in text
    # what nobody caught is on the output once, and nothing of Java is
    assert process.returncode == 1
    assert (out + err).count("marked+") == 1, err
    assert "bigdl.common.errors.WorkerError: ZeroDivisionError in worker" in err
    for frame in ("\tat org.apache", "at java.base", "Exception in thread", "Py4J"):
        assert frame not in out + err, err


@pytest.mark.slow
def test_interrupt_ends_the_fit_and_nothing_else(tmp_path):
    program = """
        import json, os, signal, sys, threading, time
        from pathlib import Path

        import faults
        from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

        folder = Path(sys.argv[1])

        class Slow(faults.Callback):
            def __init__(self, name):
                self.name = name

            def after_train_iter(self, runner):
                time.sleep(0.1)
                with open(folder / self.name, "a") as file:
                    file.write(f"{os.getpid()}\\n")

        def lines(name):
            path = folder / name
            return path.read_text().splitlines() if path.exists() else []

        def interrupt(name):
            def press():
                while len(lines(name)) < 6:
                    time.sleep(0.05)
                pressed.append(time.time())
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=press, daemon=True).start()

        def interrupted(name, code):
            interrupt(name)
            try:
                exec(compile(code, "<cell>", "exec"), {**globals(), "name": name})
            except KeyboardInterrupt:
                seconds = time.time() - pressed[-1]
                at_once = len(lines(name))
                time.sleep(2)
                return {"seconds": seconds, "steps_after": len(lines(name)) - at_once,
                        "pids": sorted(set(map(int, lines(name)))),
                        "handler": str(signal.getsignal(signal.SIGINT))}

        def other():
            def slow(batches):
                time.sleep(15)
                yield from batches
            rows = spark.range(0, 5, 1, 1)
            result["other"] = rows.mapInArrow(slow, rows.schema).count()

        pressed, result = [], {}
        init_orca_context("local", cores=3, memory="1g")
        spark = OrcaContext.get_spark_session()
        data = faults.frame(spark)
        thread = threading.Thread(target=other)
        thread.start()
        before = str(signal.getsignal(signal.SIGINT))
        cell = "faults.fit(faults.estimator(), data, Slow(name))"
        result["main"] = interrupted("main", cell)
        result["next"] = faults.fit(faults.estimator(), data)
        thread.join()
        assert str(signal.getsignal(signal.SIGINT)) == before
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a notebook kernel has it
        result["cell"] = interrupted("cell", cell)

        def in_thread():
            result["thread"] = faults.fit(faults.estimator(), data)

        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        stop_orca_context()
        (folder / "result.json").write_text(json.dumps(result))
    """
    process = start(tmp_path / "program.py", program)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["other"] == 5
    for case in ("main", "cell"):
        assert result[case]["seconds"] < 5
        assert result[case]["steps_after"] == 0
        assert len(result[case]["pids"]) == 2
    assert result["next"] == result["thread"]
    for frame in ("\tat org.apache", "at java.base", "Exception in thread", "Py4J"):
        assert frame not in out + err, err


@pytest.mark.slow
def test_killed_driver_leaves_nothing_and_its_program_goes_on(tmp_path, undisturbed):
    program = """
        import json, sys, time
        from pathlib import Path

        import faults
        from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
        from bigdl.orca.learn.trigger import SeveralIteration

        folder = Path(sys.argv[1])

        class Slow(faults.Callback):
            def after_train_iter(self, runner):
                (folder / "step").write_text(str(runner.global_step))
                time.sleep(0.1)

        init_orca_context("local", cores=2, memory="1g")
        data = faults.frame(OrcaContext.get_spark_session())
        est = faults.estimator(model_dir=str(folder / "model"))
        attempts = faults.Attempts(folder / "attempts")
        trigger = SeveralIteration(5)
        found = faults.fit(est, data, attempts, Slow(), resume="auto", checkpoint_trigger=trigger)
        (folder / "weights.json").write_text(json.dumps(found))
        stop_orca_context()
    """
    mark = uuid.uuid4().hex
    (tmp_path / "local").mkdir()
    process = start(tmp_path / "program.py", program, BIGDL_TEST_MARK=mark)
    step = tmp_path / "step"
    give_up = time.monotonic() + 90
    while not (step.exists() and int(step.read_text() or 0) >= 13):
        assert time.monotonic() < give_up
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    assert faults.spools(tmp_path / "local")
    process.kill()
    process.communicate()
    give_up = time.monotonic() + 30
    while marked(mark) or faults.spools(tmp_path / "local"):
        assert time.monotonic() < give_up, (marked(mark), faults.spools(tmp_path / "local"))
        time.sleep(0.2)

    process = start(tmp_path / "program.py", program)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    first, second = faults.Attempts(tmp_path / "attempts").starts()
    assert first == 0
    assert second in (10, 15)
    assert json.loads((tmp_path / "weights.json").read_text()) == undisturbed


def marked(mark: str) -> list[int]:
    """Processes that inherited the mark of a test."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BIGDL_TEST_MARK") == mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


_FULL_DISK = """
    import numpy as np
    import torch

    from bigdl.common.errors import UsageError
    from bigdl.orca.learn.pytorch import Estimator

    def estimator(backend):
        return Estimator.from_torch(
            model=lambda config: torch.nn.Linear(100, 1),
            optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.MSELoss(), backend=backend, workers_per_node=2)

    def fit(backend, data, **options):
        try:
            estimator(backend).fit(data, epochs=1, batch_size=64, **options)
        except UsageError as error:
            print(error, flush=True)

    arrays = np.ones((40_000, 100), "float32"), np.ones((40_000, 1), "float32")
    fit("local", arrays)

    from bigdl.orca import OrcaContext, init_orca_context

    init_orca_context("local", cores=2, memory="1g")
    rows = OrcaContext.get_spark_session().range(100_000).selectExpr(
        "transform(sequence(1, 100), i -> float(i + id)) AS x", "array(float(id)) AS y")
    fit("spark", rows, feature_cols=["x"], label_cols=["y"])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can mount")
def test_a_full_disk_is_one_sentence(tmp_path):
    disk, program = tmp_path / "disk", tmp_path / "program.py"
    disk.mkdir()
    program.write_text(textwrap.dedent(_FULL_DISK))
    command = f"mount -t tmpfs -o size=8m tmpfs {disk} && exec {sys.executable} {program}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],  # the mount ends with the program
        env={**os.environ, "TMPDIR": str(disk), "SPARK_LOCAL_DIRS": str(disk)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    sentences = [line for line in done.stdout.splitlines() if line]
    assert len(sentences) == 2, done.stdout + done.stderr
    for sentence in sentences:
        assert sentence.startswith(f"The disk of {disk}")
        assert sentence.endswith("point spark.local.dir or TMPDIR to a larger one")
    assert "Traceback" not in done.stderr
