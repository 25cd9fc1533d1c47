"""What is lost on Kubernetes while a program runs: equal weights, or one sentence tells why."""

import functools
import json
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from cluster_programs import TOO_MUCH
from real_clusters import InAStep, await_none, control, error_line, last_line, run, undisturbed
from test_kubernetes import (
    NAMESPACE,
    environment,
    in_pods,
    kubectl,
    on_kubernetes,
    shown,
)

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(900)]

# Spark takes an executor for lost after two minutes of silence; here it has not to wait so long.
QUICK = {
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "3s",
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> list:
    """What the program ends with when nothing happens, on this machine."""
    return undisturbed(tmp_path_factory.mktemp("here") / "program")


def in_a_step(cluster: Path, folder: Path, conf: dict | None = None, **more) -> InAStep:
    """The program, which waits in a worker."""
    arguments = on_kubernetes(cluster, conf={**shown(folder), **QUICK, **(conf or {})})
    return InAStep(folder, arguments, environment(cluster), **more)


def executors(cluster: Path) -> dict[str, str]:
    """The executors that are no ending ones, and their nodes."""
    command = ("-n", NAMESPACE, "get", "pods", "-l", "spark-role=executor", "-o", "json")
    return {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in json.loads(kubectl(cluster, *command))["items"]
        if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] == "Running"
    }


def await_ready(cluster: Path) -> None:
    """Wait until both nodes are there."""
    end = time.monotonic() + 120
    while kubectl(cluster, "get", "nodes", "--no-headers").count(" Ready") < 2:
        assert time.monotonic() < end
        time.sleep(1)


def test_an_executor_that_is_deleted_is_replaced(account, tmp_path, weights):
    program = in_a_step(account, tmp_path / "there")
    program.waiting()
    name = min(executors(account))
    kubectl(account, "-n", NAMESPACE, "delete", "pod", name, "--wait=false")
    program.go_on()
    assert last_line(program.end()) == weights


@pytest.mark.parametrize("how", ["node-stop", "node-cut"])
def test_a_lost_node_is_replaced_by_the_other(account, tmp_path, weights, how):
    program = in_a_step(account, tmp_path / "there")
    program.waiting()
    node = "node2"
    assert node in executors(account).values()
    control("kubernetes.py", how, account, node)
    try:
        program.go_on()
        assert last_line(program.end()) == weights
    finally:
        back = "node-start" if how == "node-stop" else "node-mend"
        control("kubernetes.py", back, account, node)
        await_ready(account)


def test_a_node_may_be_cut_off_for_a_while(account, tmp_path, weights):
    program = in_a_step(account, tmp_path / "there")
    program.waiting()
    control("kubernetes.py", "node-cut", account, "node2")
    back = functools.partial(control, "kubernetes.py", "node-mend", account, "node2")
    assert program.end_after(5, back) == weights


def test_a_lost_node_without_room_on_the_other(account, tmp_path):
    """Executors that each need more than half of a node."""
    node = json.loads(kubectl(account, "get", "node", "node2", "-o", "json"))
    cores = 0.6 * float(node["status"]["allocatable"]["cpu"])
    conf = {"spark.kubernetes.executor.request.cores": f"{cores:g}"}
    program = in_a_step(account, tmp_path / "there", conf, fit={"max_failures": 1})
    program.waiting()
    control("kubernetes.py", "node-stop", account, "node2")
    try:
        program.go_on()
        done = program.end()
    finally:
        control("kubernetes.py", "node-start", account, "node2")
        await_ready(account)
    assert done.returncode == 1
    last = error_line(done)
    assert "the cluster can only run 1 tasks at once since executors were lost" in last
    assert "no node can run" in last


@pytest.mark.parametrize("once", [True, False])
def test_a_worker_that_needs_too_much_memory(account, tmp_path, once):
    place = tmp_path / "place"
    place.mkdir()
    program = f"PLACE, ONCE = {str(place / 'was')!r}, {once}\n" + textwrap.dedent(TOO_MUCH)
    arguments = on_kubernetes(account, conf=shown(place))
    done = run(tmp_path / "there", program, arguments, environment(account))
    if once:
        assert last_line(done) == {"epochs": 2}
    else:
        assert done.returncode == 1
        last = error_line(done)
        assert "memory" in last, done.stderr


THE_JVM_FIRST = """
    import psutil
    jvm = next(each for each in psutil.Process().parents() if each.name() == "java")
    Path(f"/proc/{jvm.pid}/oom_score_adj").write_text("1000")
"""


def test_a_container_that_is_killed_for_its_memory(account, tmp_path):
    """The kernel ends the JVM, as it ends all of a container where cgroups are of version 2."""
    first = textwrap.indent(textwrap.dedent(THE_JVM_FIRST), " " * 8)
    program = textwrap.dedent(TOO_MUCH).replace("        kept =", f"{first}        kept =")
    program = f"PLACE, ONCE = '/nothing', False\n{program}"
    conf = {"spark.executor.extraJavaOptions": "-XX:+AlwaysPreTouch"}
    arguments = on_kubernetes(account, memory="2g", conf=conf)
    done = run(tmp_path / "there", program, arguments, environment(account))
    assert done.returncode == 1
    last = error_line(done)
    assert "memory" in last, done.stderr


TOO_MANY_ROWS = """
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    init_orca_context(**ARGUMENTS)
    rows = OrcaContext.get_spark_session().range(300_000, numPartitions=2).selectExpr(
        "transform(sequence(1, 200), i -> float(rand())) AS x", "float(id) AS y"
    )
    estimator = Estimator.from_torch(
        model=lambda config: torch.nn.Linear(200, 1),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.0),
        loss=torch.nn.MSELoss(),
    )
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    estimator.fit(rows, epochs=1000, batch_size=3000, max_failures=0, **columns)
"""


def test_a_volume_for_spools_that_is_full(account, tmp_path):
    volume = "spark.kubernetes.executor.volumes.emptyDir.spark-local-dir-1"
    conf = {f"{volume}.mount.path": "/spools", f"{volume}.options.sizeLimit": "50Mi"}
    arguments = on_kubernetes(account, conf=conf)
    done = run(tmp_path / "there", TOO_MANY_ROWS, arguments, environment(account))
    assert done.returncode == 1
    last = error_line(done)
    assert 'Usage of EmptyDir volume "spark-local-dir-1" exceeds the limit "50Mi"' in last


def test_the_error_of_a_worker_is_told_here(account, tmp_path):
    program = """
        import torch
        from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
        from bigdl.orca.learn.pytorch import Estimator

        def model(config):
            raise KeyError("no such setting")

        init_orca_context(**ARGUMENTS)
        rows = OrcaContext.get_spark_session().range(8).selectExpr("float(id) x", "float(id) y")
        Estimator.from_torch(
            model=model, optimizer=lambda model, config: None, loss=torch.nn.MSELoss()
        ).fit(rows, epochs=1, batch_size=4, feature_cols=["x"], label_cols=["y"])
    """
    done = run(tmp_path / "there", program, on_kubernetes(account), environment(account))
    assert done.returncode == 1
    assert "WorkerError" in done.stderr
    assert error_line(done) == "KeyError: 'no such setting'", done.stderr


def test_a_driver_that_is_killed_leaves_nothing(account, tmp_path, trial, record_property):
    program = in_a_step(account, tmp_path / "there", rank=trial % 2)
    program.waiting()
    family = psutil.Process(program.process.pid).children(recursive=True)
    program.process.kill()
    program.process.wait()

    def left() -> list:
        pods = ("get", "pods", "-l", "spark-role=executor", "-o", "name")
        names = kubectl(account, "-n", NAMESPACE, *pods).split()
        return [each for each in family if each.is_running()] + in_pods() + names

    seconds = await_none(left)
    record_property("seconds", seconds)
    print(f"trial {trial}: nothing was left after {seconds:.1f} s")
