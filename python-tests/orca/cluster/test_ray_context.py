"""Test Ray as Orca starts it: names, rejected arguments, and that no process survives."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import faults
import other_users as others
import pytest
import ray_models as rays
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca import OrcaContext, init_orca_context
from bigdl.orca.cluster.ray_launch import shortened
from bigdl.orca.ray import OrcaRayContext, RayContext
from bigdl.orca.ray.utils import resource_to_bytes


@pytest.fixture
def context():
    return rays.active_ray()


def test_the_context_has_its_old_names(context):
    assert RayContext is OrcaRayContext
    assert OrcaRayContext.get() is context
    assert OrcaContext.get_ray_context() is context
    assert context.initialized
    assert context.is_local
    assert (context.num_ray_nodes, context.ray_node_cpu_cores) == (1, 2)
    info = context.init()
    assert {"object_store_address", "redis_address", "node_ip_address"} <= set(info)
    assert info["redis_address"] == context.redis_address


def test_ray_listens_on_the_loopback_interface_only(context):
    import psutil

    directory = Path(context.address_info["session_dir"])
    ports = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # Ray starts and stops idle workers at any time
            connections = process.net_connections("tcp")
            ports += [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]
    assert directory.exists()
    assert ports
    assert {ip.removeprefix("::ffff:") for ip in ports} == {"127.0.0.1"}


def test_other_users_can_neither_read_nor_plant_what_ray_works_with(context):
    session = Path(context.address_info["session_dir"])
    assert (session / "sockets").is_dir()
    assert not others.can(lambda: os.listdir(session))
    assert not others.can(lambda: (session / "planted").write_text("x"))
    assert not others.can(lambda: session.rename(session.with_name("away")))
    assert not others.can(lambda: session.parent.rename(session.parent.with_name("away")))


def test_another_call_gives_the_ray_that_is_active(context, caplog):
    assert init_orca_context(runtime="ray", cores=1) is context
    assert "The active Ray is reused" in caplog.text


def test_ray_has_its_token_from_orca(context):
    assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize(
    ("size", "expected"), [("10b", 10), ("10k", 10_000), ("10m", 10**7), ("3G", 3 * 10**9), (5, 5)]
)
def test_sizes_are_decimal(size, expected):
    assert resource_to_bytes(size) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resource_to_bytes("10t"), "object_store_memory can be either b, k, m, g"),
        (lambda: resource_to_bytes("ten"), "object_store_memory can be either b, k, m, g"),
        (lambda: OrcaRayContext("dask"), "runtime should be one of 'spark', 'ray', got 'dask'"),
        (
            lambda: init_orca_context("local", runtime="ray"),
            "cluster_mode is not supported for runtime=\"ray\", but got 'local'",
        ),
        (
            lambda: OrcaRayContext("ray", adress="x"),
            "init_orca_context has no argument 'adress' with runtime=\"ray\"",
        ),
    ],
    ids=["unit", "word", "runtime", "cluster_mode", "argument"],
)
def test_wrong_arguments_are_one_sentence(call, message):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
    with pytest.raises(UsageError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused("package-missing", "'bigdl[ray]'"):
        init_orca_context(runtime="ray")


def run(program: str, **variables) -> dict:
    """Run a program and parse its last line of output as JSON."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_ADDRESS")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**environment, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_nothing_is_left_behind_and_ray_can_be_started_again(tmp_path):
    """Use another process, which has imported ray before."""
    results = run(
        """
        import json, os, psutil, ray
        from bigdl.orca import init_orca_context, stop_orca_context
        from bigdl.orca.engines.ray import RayEngine

        before = dict(os.environ)
        found = []
        for _ in range(2):
            context = init_orca_context(runtime="ray", cores=1, object_store_memory="100m")
            pids = RayEngine().run(lambda worker: os.getpid())
            directory = context.address_info["session_dir"]
            processes = psutil.Process().children(recursive=True)
            stop_orca_context()
            stop_orca_context()
            left = [p.pid for p in processes if p.is_running() and p.status() != "zombie"]
            found.append([left, os.path.exists(os.path.dirname(directory)), ray.is_initialized()])
        print(json.dumps([found, dict(os.environ) == before, os.listdir(os.environ["HOME"])]))
        """,
        HOME=str(tmp_path),
    )
    assert results == [[[[], False, False]] * 2, True, []]


@pytest.mark.slow
@pytest.mark.fault
def test_ray_dies_with_a_driver_that_is_killed(tmp_path):
    """Use a temporary directory whose name may be too long for sockets."""
    program = """
        import json, os, psutil, signal
        from bigdl.orca import init_orca_context

        init_orca_context(runtime="ray", cores=1, object_store_memory="100m")
        pids = [p.pid for p in psutil.Process().children(recursive=True)]
        print(json.dumps(pids), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    import psutil

    pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    pids = json.loads(done.stdout.splitlines()[-1])
    assert pids
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(left, timeout=30)
    assert [p.pid for p in alive if faults.is_running(p.pid)] == []


@pytest.mark.slow
@pytest.mark.fault
def test_ctrl_c_ends_the_workers_and_leaves_ray_usable(tmp_path):
    results = run(
        """
        import json, os, psutil, signal, threading, time
        from bigdl.orca import init_orca_context, stop_orca_context
        from bigdl.orca.engines.ray import RayEngine

        def forever(worker):
            worker.send("pid", {}, str(os.getpid()).encode())
            while True:
                pass

        def interrupt(name, value):
            pids.append(int(value[1]))
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

        pids = []
        init_orca_context(runtime="ray", cores=1, object_store_memory="100m")
        interrupted = False
        with RayEngine().open(forever) as job:
            try:
                job.attempt(on_event=interrupt)
            except KeyboardInterrupt:
                interrupted = True
        ended = time.monotonic()
        while psutil.pid_exists(pids[0]) and time.monotonic() - ended < 60:
            time.sleep(0.05)
        again = RayEngine().run(lambda worker: worker.rank)
        print(json.dumps([interrupted, psutil.pid_exists(pids[0]), again]))
        stop_orca_context()
        """,
        HOME=str(tmp_path),
    )
    assert results == [True, False, [0]]


@pytest.mark.slow
def test_a_program_connects_to_a_ray_that_runs_already(tmp_path):
    results = run(
        """
        import json, os, ray
        from bigdl.orca import init_orca_context, stop_orca_context
        from bigdl.orca.engines.ray import RayEngine

        first = ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8)
        address = first.address_info["gcs_address"]
        with_own = RayEngine(workers_per_node=2).run(lambda worker: worker.world_size)
        import subprocess, sys, textwrap
        second = '''
        import sys, ray
        from bigdl.orca import init_orca_context, stop_orca_context
        from bigdl.orca.engines.ray import RayEngine
        context = init_orca_context(runtime="ray", address=sys.argv[1])
        print(RayEngine(context.cluster).run(lambda worker: worker.world_size))
        stop_orca_context()
        '''
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(second), address],
                              capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        print(json.dumps([with_own, done.stdout.splitlines()[-1], ray.cluster_resources()["CPU"]]))
        """,
        HOME=str(tmp_path),
    )
    assert results == [[2, 2], "[1]", 2.0]


def test_a_long_line_of_a_raylet_becomes_a_sentence():
    long = (
        "A worker died or was killed while executing a task by an unexpected system error. To "
        "troubleshoot the problem, check the logs for the dead worker. RayTask ID: ffff Worker "
        f"ID: {'0' * 100} Worker PID: 123 Worker exit type: SYSTEM_ERROR"
    )
    assert shortened(long) == (
        "A worker died or was killed while executing a task by an unexpected system error "
        "(process 123). Ray's logs have more."
    )
    assert shortened("Spilled 2 MiB. More follows.") == "Spilled 2 MiB. More follows."


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_in_a_sentence():
    results = run(
        """
        import io, json, os, signal, sys, time
        from bigdl.orca import init_orca_context, stop_orca_context

        from ray._private import worker
        original = worker.print_to_stdstream
        init_orca_context(runtime="ray", cores=1)
        import ray

        @ray.remote(max_retries=0)
        def dies():
            os.kill(os.getpid(), signal.SIGKILL)

        shown, usual = io.StringIO(), sys.stdout
        sys.stdout = shown
        try:
            ray.get(dies.remote())
        except ray.exceptions.WorkerCrashedError:
            pass
        end = time.monotonic() + 60
        while "Ray's logs" not in shown.getvalue() and time.monotonic() < end:
            time.sleep(0.1)
        sys.stdout = usual
        stop_orca_context()
        print(json.dumps([shown.getvalue(), worker.print_to_stdstream is original]))
        """
    )
    line, is_put_back = results
    assert "A worker died or was killed" in line
    assert len(line) < 250
    assert is_put_back
