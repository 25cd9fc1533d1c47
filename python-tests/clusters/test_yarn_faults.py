"""What is lost on YARN while a program runs: weights stay equal, or one sentence tells why."""

import contextlib
import functools
import os
import signal
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from cluster_programs import TOO_MUCH
from real_clusters import InAStep, await_none, control, error_line, last_line, run, undisturbed
from test_yarn import ENVIRONMENT, hadoop, on_yarn, processes_of_containers

pytestmark = [pytest.mark.yarn, pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> list:
    """What the program ends with when nothing happens, on this machine."""
    return undisturbed(tmp_path_factory.mktemp("here") / "program")


def executor_of(pid: int) -> psutil.Process:
    """The JVM of the executor that a Python worker belongs to."""
    return next(each for each in psutil.Process(pid).parents() if each.name() == "java")


def node_of(yarn: Path, process: psutil.Process) -> str:
    """The name of the NodeManager whose container a process runs in."""
    return Path(process.cwd()).relative_to(yarn).parts[0]


def lose(yarn: Path, node: str) -> None:
    """End a NodeManager and all containers on its node at once."""
    control("yarn.py", "kill", yarn, node)
    for process in processes_of_containers(yarn):
        with contextlib.suppress(psutil.Error):
            if node_of(yarn, process) == node:
                process.kill()


def bring_back(yarn: Path, node: str) -> None:
    """Start a NodeManager again, and wait until YARN counts on it."""
    control("yarn.py", "run", yarn, node)
    end = time.monotonic() + 60
    while hadoop(yarn, "node", "-list").count("RUNNING") < 2:
        assert time.monotonic() < end
        time.sleep(1)


def master(yarn: Path) -> psutil.Process:
    """The JVM of the application's master."""
    kinds = ("spark.deploy.yarn.ApplicationMaster", "spark.deploy.yarn.ExecutorLauncher")
    return next(
        each
        for each in processes_of_containers(yarn)
        if each.name() == "java" and any(word.endswith(kinds) for word in each.cmdline())
    )


def test_an_executor_that_is_killed_is_replaced(yarn, tmp_path, weights):
    program = InAStep(tmp_path / "there", on_yarn(yarn), ENVIRONMENT)
    executor_of(program.waiting()).kill()
    program.go_on()
    assert last_line(program.end()) == weights


def test_a_worker_that_is_killed_is_replaced(yarn, tmp_path, weights):
    program = InAStep(tmp_path / "there", on_yarn(yarn), ENVIRONMENT, rank=0)
    os.kill(program.waiting(), signal.SIGKILL)
    program.go_on()
    assert last_line(program.end()) == weights


def test_a_lost_node_is_replaced_by_the_other(yarn, tmp_path, weights):
    program = InAStep(tmp_path / "there", on_yarn(yarn), ENVIRONMENT)
    worker = psutil.Process(program.waiting())
    of_master = node_of(yarn, master(yarn))
    node = node_of(yarn, worker)
    lose(yarn, node)
    program.go_on()
    try:
        assert last_line(program.end()) == weights, (node, of_master)
    finally:
        bring_back(yarn, node)


@pytest.mark.parametrize("once", [True, False])
def test_a_container_with_too_much_memory(yarn, tmp_path, once):
    head = f"PLACE, ONCE = {str(tmp_path / 'was')!r}, {once}\n"
    program = head + textwrap.dedent(TOO_MUCH)
    done = run(tmp_path / "there", program, on_yarn(yarn), ENVIRONMENT)
    if once:
        assert last_line(done) == {"epochs": 2}
    else:
        assert done.returncode == 1
        last = error_line(done)
        assert "memory" in last, done.stderr


def test_the_error_of_a_worker_is_told_here_and_in_the_logs(yarn, tmp_path):
    program = """
        import torch
        from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
        from bigdl.orca.learn.pytorch import Estimator

        def model(config):
            raise KeyError("no such setting")

        sc = init_orca_context(**ARGUMENTS)
        print("APPLICATION", sc.applicationId, flush=True)
        rows = OrcaContext.get_spark_session().range(8).selectExpr("float(id) x", "float(id) y")
        Estimator.from_torch(
            model=model, optimizer=lambda model, config: None, loss=torch.nn.MSELoss()
        ).fit(rows, epochs=1, batch_size=4, feature_cols=["x"], label_cols=["y"])
    """
    done = run(tmp_path / "there", program, on_yarn(yarn), ENVIRONMENT)
    assert done.returncode == 1
    assert "KeyError: 'no such setting'" in done.stderr
    application = done.stdout.split("APPLICATION ")[1].split()[0]
    assert application.startswith("application_")
    end = time.monotonic() + 60
    logs = f"/tmp/logs/root/*/*/{application}/*"
    while application not in hadoop(yarn, "fs", "-ls", "-R", "/tmp/logs"):
        assert time.monotonic() < end
        time.sleep(1)
    time.sleep(5)  # until all nodes have written theirs
    assert "no such setting" in hadoop(yarn, "fs", "-cat", logs)


def test_a_driver_on_the_cluster_goes_on_after_its_loss(yarn, tmp_path, weights):
    arguments = on_yarn(yarn, cluster_mode="yarn-cluster")
    program = InAStep(
        tmp_path / "there",
        arguments,
        ENVIRONMENT,
        options={"model_dir": f"hdfs:///run-{time.time_ns()}"},
        fit={"resume": "auto"},
    )
    program.waiting()
    master(yarn).kill()
    program.go_on()
    assert last_line(program.end()) == weights


def test_the_name_node_may_be_gone_for_a_while(yarn, tmp_path, weights):
    program = InAStep(
        tmp_path / "there",
        on_yarn(yarn),
        {**ENVIRONMENT, "HADOOP_CONF_DIR": str(yarn / "conf")},
        options={"model_dir": f"hdfs:///run-{time.time_ns()}"},
    )
    program.waiting()
    control("yarn.py", "kill", yarn, "namenode")
    back = functools.partial(control, "yarn.py", "run", yarn, "namenode")
    assert program.end_after(5, back) == weights


def test_executors_that_another_queue_claims(yarn, tmp_path, weights):
    """The queue small may have a quarter when default wants its own part."""
    queue = {"spark.yarn.queue": "small"}
    arguments = on_yarn(yarn, memory="3g", conf=queue)
    program = InAStep(tmp_path / "there", arguments, ENVIRONMENT)
    program.waiting()
    two_tasks = """
        from bigdl.orca import init_orca_context, stop_orca_context

        sc = init_orca_context(**ARGUMENTS)
        print(sc.range(2, numSlices=2).barrier().mapPartitions(lambda _: [1]).count())
        stop_orca_context()
    """
    other = run(tmp_path / "other", two_tasks, on_yarn(yarn, memory="3g"), ENVIRONMENT)
    assert other.returncode == 0, other.stderr
    program.go_on()
    assert last_line(program.end()) == weights


def test_a_driver_that_is_killed_leaves_nothing(yarn, tmp_path, trial, record_property):
    program = InAStep(tmp_path / "there", on_yarn(yarn), ENVIRONMENT, rank=trial % 2)
    worker = psutil.Process(program.waiting())
    family = psutil.Process(program.process.pid).children(recursive=True)
    program.process.kill()
    program.process.wait()

    def left() -> list:
        return [each for each in family if each.is_running()] + processes_of_containers(yarn)

    seconds = await_none(left)
    assert not worker.is_running()
    record_property("seconds", seconds)
    print(f"trial {trial}: nothing was left after {seconds:.1f} s")
