"""Test kills of processes of Ray on a standalone Spark cluster."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from quick_jvm import QUICK_JVM
from test_clusters_standalone import marked
from test_context import survivors

pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(600)]

GONE_S = 90  # seconds; it takes less than 15 on an idle machine

PROGRAM = f"""
    import json, os, sys, time
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.engines.ray import RayEngine

    init_orca_context(
        "standalone", cores=1, memory="700m", num_nodes=2, driver_memory="1g",
        conf={{"spark.executor.extraJavaOptions": {QUICK_JVM!r}}},
        init_ray_on_spark=True, object_store_memory="100m",
    )
    sc = OrcaContext.get_spark_context()
    context = OrcaContext.get_ray_context()

    def program(worker):
        return worker.world_size

    def say(*values):
        print(json.dumps(values), flush=True)

    session = context.address_info["session_dir"]
    say(context.num_ray_nodes, context.ray_node_cpu_cores, RayEngine().run(program),
        sc.parallelize(range(4), 2).sum(), os.path.dirname(session))
    sys.stdin.readline()
    say(RayEngine().run(program, num_workers=1))
    sys.stdin.readline()
    stop_orca_context()
"""


class Cluster:
    """Program with Ray on a Spark cluster; runs until :meth:`go_on` is called."""

    def __init__(self, folder):
        self.mark = str(folder)
        (folder / "local").mkdir()
        variable = f"import os; os.environ['SPARK_LOCAL_DIRS'] = {str(folder / 'local')!r}\n"
        (folder / "program.py").write_text(variable + textwrap.dedent(PROGRAM))
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "program.py")],
            env={
                **os.environ,
                "BIGDL_TEST": self.mark,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as below a program with a local Ray
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(folder / "stderr", "w"),  # noqa: SIM115 - as long as the process
            text=True,
        )

    def says(self):
        """Return the next line of JSON that the program prints."""
        for line in self.process.stdout:
            if line.startswith("["):
                return json.loads(line)
        logs = [*Path(self.mark, "local").rglob("bigdl-ray-node-*.log")]
        texts = [each.read_text()[-3000:] for each in [Path(self.mark, "stderr"), *logs]]
        raise AssertionError("\n".join(texts))

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def processes(self, *words) -> list[psutil.Process]:
        """Return the program's processes whose command contains all words."""
        matches = []
        for pid in marked(self.mark):
            try:
                process = psutil.Process(pid)
                command = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(word in command for word in words):
                matches.append(process)
        return matches

    def supervisors(self):
        return self.processes("ray-node")


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.process.kill()
    cluster.process.wait(60)
    for process in cluster.processes():  # after a test that failed
        process.kill()


def test_ray_runs_on_the_executors_and_leaves_nothing(cluster):
    nodes, cores, sizes, total, directory = cluster.says()
    assert (nodes, cores, sizes, total) == (2, 1, [2, 2], 6)
    assert len(cluster.supervisors()) == 2
    cluster.go_on()
    assert cluster.says() == [[1]]
    cluster.go_on()
    assert cluster.process.wait(120) == 0
    assert survivors(marked(cluster.mark), GONE_S) == []
    assert not os.path.exists(directory)


@pytest.mark.parametrize(
    ("victim", "nodes_left"),
    # both executors belong to one Spark worker, as they are on one machine
    [("executor.CoarseGrainedExecutorBackend", 1), ("deploy.worker.Worker", 0)],
    ids=["executor", "worker"],
)
def test_a_node_goes_with_its_executor_and_others_go_on(cluster, victim, nodes_left):
    cluster.says()
    trees = {
        supervisor: supervisor.children(recursive=True) for supervisor in cluster.supervisors()
    }
    assert len(trees) == 2
    cluster.processes(f"org.apache.spark.{victim}")[0].send_signal(signal.SIGKILL)
    give_up = time.monotonic() + GONE_S
    while len(left := cluster.supervisors()) > nodes_left and time.monotonic() < give_up:
        time.sleep(0.2)
    assert len(left) == nodes_left
    for lost in set(trees) - set(left):
        assert survivors([process.pid for process in trees[lost]], GONE_S) == []
    if nodes_left:
        cluster.go_on()
        assert cluster.says() == [[1]]


def test_nothing_lives_after_its_driver_was_killed(cluster):
    *_, directory = cluster.says()
    pids = marked(cluster.mark)
    assert len(pids) > 10
    cluster.process.kill()
    killed = time.monotonic()
    assert survivors(pids, GONE_S) == []
    print(f"\nno process was left after {time.monotonic() - killed:.1f} s")
    while os.path.exists(directory) and time.monotonic() < killed + GONE_S:
        time.sleep(0.1)
    assert not os.path.exists(directory)
    assert survivors(marked(cluster.mark), GONE_S) == []
