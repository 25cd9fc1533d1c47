"""Workers that are killed or paused, programs that raise, drivers that are interrupted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import faults
import psutil
import pytest

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.orca.engine import SparkEngine
from bigdl.orca.learn.trigger import EveryEpoch, SeveralIteration

pytestmark = pytest.mark.fault

PER_EPOCH = faults.STEPS // faults.EPOCHS


@pytest.fixture(scope="module")
def undisturbed(orca_spark):
    """Weights after the training of `faults`."""
    return faults.fit(faults.estimator(), faults.frame(orca_spark))


@pytest.fixture
def log(tmp_path):
    """Where the partitions of the input leave a line each time that they are computed."""
    path = tmp_path / "input"
    path.mkdir()
    return path


# Lost workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "in_directory", "seed"),
    [
        (EveryEpoch(), False, 1),
        (SeveralIteration(5), False, 2),
        (EveryEpoch(), True, 3),
        (SeveralIteration(5), True, 4),
    ],
)
def test_killed_worker_changes_nothing(
    orca_spark, undisturbed, tmp_path, log, trigger, in_directory, seed
):
    rank, step = faults.random_place(seed)
    est = faults.estimator(model_dir=str(tmp_path / "model") if in_directory else None)
    attempts = faults.Attempts(tmp_path / "attempts")
    kill = faults.Kill(tmp_path / "killed", rank, step)
    data = faults.frame(orca_spark, log)
    found = faults.fit(est, data, attempts, kill, checkpoint_trigger=trigger)
    assert found == undisturbed
    every = 5 if isinstance(trigger, SeveralIteration) else PER_EPOCH
    # the callback comes before the checkpoint of its step
    assert attempts.starts() == [0, (step - 1) // every * every]
    assert faults.times_computed(log) == [1] * faults.SOURCES


def test_all_workers_killed_twice_change_nothing(orca_spark, undisturbed, tmp_path, log):
    kills = [faults.Kill(tmp_path / f"killed-{rank}", rank, 17, times=2) for rank in (0, 1)]
    attempts = faults.Attempts(tmp_path / "attempts")
    data = faults.frame(orca_spark, log)
    trigger = SeveralIteration(4)
    found = faults.fit(faults.estimator(), data, attempts, *kills, checkpoint_trigger=trigger)
    assert found == undisturbed
    # whether the second one lives long enough to be killed too is chance
    assert set(attempts.starts()) == {0, 16}
    assert len(attempts.starts()) >= 3
    assert faults.times_computed(log) == [1] * faults.SOURCES


def test_lost_spool_is_made_again(orca_spark, undisturbed, tmp_path):
    class LoseSpoolAndDie(faults.Kill):
        def act(self, runner):
            (self.marker.parent / "local").symlink_to(runner.worker.local_dir)
            shutil.rmtree(runner.worker.shard.spool.path)
            super().act(runner)

    kill = LoseSpoolAndDie(tmp_path / "killed", 1, 20)
    attempts = faults.Attempts(tmp_path / "attempts")
    data = faults.frame(orca_spark)
    assert faults.fit(faults.estimator(), data, attempts, kill) == undisturbed
    assert attempts.starts() == [0, PER_EPOCH]
    assert faults.spools((tmp_path / "local").resolve()) == []


@pytest.mark.parametrize("max_failures", [0, 1])
def test_more_losses_than_forgiven_raise(orca_spark, tmp_path, max_failures):
    kill = faults.Kill(tmp_path / "killed", 1, 2, times=9)
    count = max_failures + 1
    noun = "loss is" if count == 1 else "losses are"
    with pytest.raises(WorkerLost, match=r"^Worker 1 \(process \d+ on 127.0.0.1\) was lost: ") as e:
        faults.fit(
            faults.estimator(), faults.frame(orca_spark), kill, max_failures=max_failures, epochs=1
        )
    assert "its Python process ended unexpectedly" in str(e.value)
    assert f"{count} {noun} more than {max_failures}" in str(e.value).replace(
        f"{count} losses are", f"{count} {noun}"
    )
    assert "\n" not in str(e.value)
    assert len(kill.marker.read_text().splitlines()) == count


def test_worker_killed_in_evaluate_changes_nothing(orca_spark, tmp_path):
    data = faults.frame(orca_spark)
    est = faults.estimator(metrics=["mse"])
    faults.fit(est, data, epochs=1)
    expected = est.evaluate(data, feature_cols="x", label_cols="y")
    marker = tmp_path / "killed"

    def deadly(output, target):
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ((output - target) ** 2).mean()

    again = faults.estimator(loss=deadly, metrics=["mse"])
    again.load(est.save(str(tmp_path / "weights")))
    assert again.evaluate(data, feature_cols="x", label_cols="y") == expected
    assert marker.exists()


def test_paused_worker_is_waited_for(orca_spark, undisturbed, tmp_path):
    class Pause(faults.Once):
        def act(self, runner):
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 8; kill -CONT {pid}"])
            time.sleep(1)  # in which it is stopped

    pause = Pause(tmp_path / "paused", 1, 11)
    attempts = faults.Attempts(tmp_path / "attempts")
    started = time.time()
    found = faults.fit(faults.estimator(), faults.frame(orca_spark), attempts, pause)
    assert found == undisturbed
    assert attempts.starts() == [0]
    assert time.time() - started > 8


def blocked_in_python(worker):
    while True:
        pass


def blocked_in_a_collective(worker):
    from bigdl.orca.sync.torch_distributed import TorchDistributedSync

    sync = TorchDistributedSync(worker)
    sync.start()
    while True:
        sync.all_gather([1.0])


def blocked_in_native_code(worker):
    """A regular expression that holds the interpreter's lock, so that no other thread runs."""
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


BLOCKED = [blocked_in_python, blocked_in_a_collective, blocked_in_native_code]


def join_group_if(block, worker):
    if block is blocked_in_a_collective:
        from bigdl.orca.sync.torch_distributed import TorchDistributedSync

        TorchDistributedSync(worker).start()


@pytest.mark.parametrize("block", BLOCKED)
def test_dead_worker_does_not_hang_its_peers(orca_spark, tmp_path, block):
    def program(worker):
        (tmp_path / f"pid-{worker.rank}").write_text(str(os.getpid()))
        worker.line.meet("all", worker.world_size)
        if worker.rank == 0:
            block(worker)
        join_group_if(block, worker)
        time.sleep(0.5)
        (tmp_path / "time").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerLost, match=r"^Workers? [01]"):
        SparkEngine().run(program, num_workers=2)
    assert time.time() - float((tmp_path / "time").read_text()) < 5
    assert_leaves(int((tmp_path / "pid-0").read_text()), block)


@pytest.mark.parametrize("block", BLOCKED)
def test_error_frees_the_peers(orca_spark, tmp_path, block):
    def program(worker):
        (tmp_path / f"pid-{worker.rank}").write_text(str(os.getpid()))
        worker.line.meet("all", worker.world_size)
        if worker.rank == 0:
            block(worker)
        join_group_if(block, worker)
        time.sleep(0.5)
        (tmp_path / "time").write_text(str(time.time()))
        raise KeyError("this one")

    with pytest.raises(WorkerError, match="KeyError in worker 1:\nTraceback") as error:
        SparkEngine().run(program, num_workers=2)
    assert time.time() - float((tmp_path / "time").read_text()) < 5
    assert (error.value.rank, error.value.kind) == (1, "KeyError")
    assert_leaves(int((tmp_path / "pid-0").read_text()), block)


def assert_leaves(pid: int, block) -> None:
    """The worker is gone, or idle after an error that a collective gave it."""
    give_up = time.monotonic() + 5
    while faults.is_running(pid) and time.monotonic() < give_up:
        process = psutil.Process(pid)
        if block is blocked_in_a_collective and process.cpu_percent(0.3) < 50:
            return
        time.sleep(0.1)
    assert not faults.is_running(pid)


def test_error_with_a_collective_under_way_is_reported(orca_spark, tmp_path):
    def program(worker):
        import torch
        import torch.distributed as dist

        from bigdl.orca.sync.torch_distributed import TorchDistributedSync

        TorchDistributedSync(worker).start()
        if worker.rank == 0:
            blocked_in_python(worker)
        worker.pending = dist.all_reduce(torch.ones(1_000_000), async_op=True)
        (tmp_path / "time").write_text(str(time.time()))
        raise KeyError("this one")

    with pytest.raises(WorkerError, match="KeyError in worker 1"):
        SparkEngine().run(program, num_workers=2)
    assert time.time() - float((tmp_path / "time").read_text()) < 5


def test_the_cause_is_reported_and_not_what_it_did_to_others(orca_spark):
    """Also where a program uses torch.distributed by itself and sees a RuntimeError of gloo."""

    def program(worker):
        import torch
        import torch.distributed as dist

        from bigdl.orca.sync.torch_distributed import TorchDistributedSync

        TorchDistributedSync(worker).start()
        if worker.rank == 1:
            raise KeyError("this one")
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            raise OSError("a consequence") from error

    for _ in range(3):
        with pytest.raises(WorkerError, match="KeyError in worker 1"):
            SparkEngine().run(program, num_workers=2)


def test_usage_error_of_a_worker_stays_one(orca_spark):
    def program(worker):
        raise UsageError("there is no such thing; take another")

    with pytest.raises(UsageError, match=r"^there is no such thing; take another$"):
        SparkEngine().run(program, num_workers=2)


# Whole programs --------------------------------------------------------------------------------


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
