"""Test start, reuse and stop of a context, and that no process survives it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import other_users as others
import psutil
import pytest
from py4j.protocol import Py4JJavaError
from quick_jvm import QUICK_JVM
from refusals import refused

from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.cluster import launch
from bigdl.orca.cluster import spark as spark_module
from bigdl.orca.cluster.launch import attach, local_properties, loopback_properties
from bigdl.orca.cluster.spark import SparkCluster

# The programs below start short-lived JVMs.


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "JAVA_TOOL_OPTIONS": QUICK_JVM,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **more,
    }


def start(path: Path, program: str, command: tuple[str, ...] = (sys.executable,), **more: str):
    path.write_text(textwrap.dedent(program))
    return subprocess.Popen(
        [*command, str(path)],
        env=environment(SPARK_LOCAL_DIRS=str(path.parent), **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last_line(process: subprocess.Popen) -> dict:
    """Wait for a program and parse its last line as JSON."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    return json.loads(out.strip().splitlines()[-1])


def survivors(pids: list[int], seconds: float) -> list[int]:
    give_up = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < give_up:
        time.sleep(0.1)
    return left


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def no_context(monkeypatch):
    """Hide the active SparkContext from calls that are rejected before they start one."""
    monkeypatch.setattr(spark_module, "active_context", lambda: None)


# Import ----------------------------------------------------------------------------------------


def test_import_is_light_and_changes_nothing():
    program = """
        import json, os, sys, threading
        environment = dict(os.environ)
        import bigdl.orca, bigdl.orca.common
        heavy = {"torch", "pyspark", "py4j", "pandas", "numpy", "pyarrow"} & set(sys.modules)
        changed = dict(os.environ) != environment
        print(json.dumps([sorted(heavy), changed, threading.active_count()]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    actual = json.loads(subprocess.check_output(command, env=environment()))
    assert actual == [[], False, 1]


def test_old_import_path_has_the_same_objects():
    from bigdl.orca import common

    assert common.init_orca_context is init_orca_context
    assert common.stop_orca_context is stop_orca_context
    assert common.OrcaContext is OrcaContext


class Refusal(Py4JJavaError):
    """Error that PySpark raises if Spark's constructor fails."""

    def __init__(self, text: str):
        self.java_exception = SimpleNamespace(toString=lambda: text, getCause=lambda: None)


@pytest.mark.parametrize(
    ("failures", "starts"),
    [
        (["java.util.ConcurrentModificationException"], 2),
        (["java.util.ConcurrentModificationException"] * 3, 3),
        (["java.net.BindException: Address already in use"], 1),
    ],
)
def test_spark_starts_again_if_its_own_threads_were_in_the_way(monkeypatch, failures, starts):
    started = []

    class Context:
        _ensure_initialized = staticmethod(lambda: None)

        def __init__(self, conf, gateway):
            started.append(self)
            if len(started) <= len(failures):
                raise Refusal(failures[len(started) - 1])

    monkeypatch.setattr("pyspark.SparkContext", Context)
    if len(failures) == starts:
        with pytest.raises(UsageError, match=f"Spark refused to start: {failures[0]}"):
            attach({}, {})
    else:
        assert attach({}, {}) is started[-1]
    assert len(started) == starts


# Arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"cluster_mode": "mesos"},
            ("argument-value", "cluster_mode", "'local'", "'mesos'"),
        ),
        (
            {"cluster_mode": 3},
            ("argument-value", "cluster_mode", "'spark-submit'", "'bigdl-submit'"),
        ),
        ({"runtime": "dask"}, ("argument-value", "'spark'", "'ray'", "'dask'")),
        ({"runtime": "ray", "cluster_mode": "local"}, ("argument-conflict", "cluster_mode")),
        ({"init_ray_on_spark": 1}, ("argument-type", "init_ray_on_spark", "1")),
        ({"cores": 0}, ("argument-value", '"*"', "0")),
        ({"cores": "all"}, ("argument-type", "'all'")),
        ({"cores": 1.5}, ("argument-type", "1", "5")),
        ({"cores": True}, ("argument-type",)),
        ({"memory": "2 gigs"}, ("argument-value", "'2 gigs'")),
        ({"memory": "1.5g"}, ("argument-value", "1", "5g")),
        ({"memory": 2}, ("argument-value", "2")),
        ({"memory": "100m"}, ("argument-value", '"512m"')),
        ({"num_nodes": 0}, ("argument-value", "num_nodes", "0")),
        ({"conf": "spark.ui.enabled"}, ("argument-type",)),
        ({"conf": {1: 2}}, ("argument-type",)),
        ({"spark_log_level": "LOUD"}, ("argument-value", "spark_log_level", "'ALL'", "'LOUD'")),
        ({"python_location": "/no/python"}, ("argument-value", "python_location", "'/no/python'")),
        ({"core": 4}, ("argument-unknown", "'core'", "'cores'")),
        ({"sparkloglevel": "INFO"}, ("argument-unknown", "'sparkloglevel'", "'spark_log_level'")),
        ({"object_store": "1g"}, ("argument-unknown", "'object_store'", "'object_store_memory'")),
    ],
)
def test_a_wrong_argument_is_one_clear_sentence(arguments, message):
    with refused(*message) as error:
        init_orca_context(**arguments)
    assert "\n" not in str(error.value)


def test_local_mode_refuses_the_master_of_a_cluster(no_context):
    with refused("argument-conflict", "master=spark://host"):
        init_orca_context("local", conf={"spark.master": "spark://host:7077"})


def test_spark_connect_is_refused(no_context, monkeypatch):
    monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    with refused("cluster-config", "SPARK_REMOTE=sc://host"):
        init_orca_context()


def test_users_conf_wins_over_the_properties_of_local_mode():
    conf = {"spark.sql.shuffle.partitions": "3", "spark.master": "local[7]"}
    properties = local_properties(2, "3g", conf)
    assert properties.items() >= conf.items()
    assert properties["spark.driver.memory"] == "3g"
    assert properties["spark.ui.enabled"] == "false"
    assert local_properties(2, "3g", {"spark.ui.port": "4050"})["spark.ui.enabled"] == "true"


def test_the_command_line_of_the_jvm_shows_no_secrets():
    secrets = {
        "spark.authenticate.secret": "a",
        "spark.hadoop.fs.s3a.secret.key": "b",
        "spark.hadoop.fs.s3a.access.key": "c",
        "spark.ssl.keyPassword": "d",
        "spark.hadoop.fs.azure.account.key.x": "e",
    }
    others = {"spark.driver.memory": "1g", "spark.jars": "/x.jar"}
    assert launch.without_secrets({**secrets, **others}) == others
    fetched = {**secrets, **others, "spark.jars": "s3a://bucket/x.jar"}
    del secrets["spark.authenticate.secret"]
    assert launch.without_secrets(fetched).items() >= secrets.items()


def test_unix_sockets_only_where_their_paths_fit(monkeypatch):
    switch = "spark.python.unix.domain.socket.enabled"
    directory = "spark.python.unix.domain.socket.dir"
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        longest = f"{short}/{'x' * (103 - len(f'{short}//.{uuid.uuid4()}.sock'))}"
        for folder, fits in (longest, True), (f"{longest}x", False):
            os.makedirs(folder, exist_ok=True)
            assert (loopback_properties({directory: folder}).get(switch) == "true") is fits
            # by default they are in this process's folder, or in another folder in /tmp
            monkeypatch.setattr(tempfile, "tempdir", folder)
            monkeypatch.setattr("bigdl.common.private_folders.process_folders", {})
            chosen = local_properties(2, "3g", {})
            assert chosen[switch] == "true"
            assert chosen[directory].startswith("/tmp/bigdl-")
            assert len(chosen[directory]) + len(f"/.{uuid.uuid4()}.sock") <= 103
        assert local_properties(2, "3g", {switch: "false"})[switch] == "false"


# Settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "default", "accepted", "refused"),
    [
        ("log_output", False, {True: True}, ["true", 1, None]),
        ("pandas_read_backend", "spark", {"pandas": "pandas", "SPARK": "spark"}, ["dask", None]),
        ("_eager_mode", True, {False: False}, ["no", 0]),
        ("serialize_data_creator", False, {True: True}, ["yes", None]),
        (
            "train_data_store",
            "DRAM",
            {"pmem": "PMEM", "DISK_2": "DISK_2", "disk_10": "DISK_10"},
            ["TAPE", "DISK_", "DISK_0", "DISK_x", 2],
        ),
        ("_shard_size", None, {10: 10, None: None}, [0, -1, "10", 1.5, True]),
        ("barrier_mode", True, {False: False}, ["off", None]),
    ],
)
def test_settings_have_defaults_and_refuse_other_values(name, default, accepted, refused):
    assert getattr(OrcaContext, name) == default
    try:
        for value, kept in accepted.items():
            setattr(OrcaContext, name, value)
            assert getattr(OrcaContext, name) == kept
        for value in refused:
            with pytest.raises(UsageError, match=f"OrcaContext.{name}.* (must|should) be"):
                setattr(OrcaContext, name, value)
            assert getattr(OrcaContext, name) == kept
    finally:
        setattr(OrcaContext, name, default)


def test_without_a_context_the_getters_say_so(no_context):
    for get in (
        OrcaContext.get_spark_context,
        OrcaContext.get_spark_session,
        OrcaContext.get_sql_context,
        SparkCluster.from_active,
    ):
        with pytest.raises(RuntimeError, match=r"No active SparkContext\. Please create"):
            get()


# One local Spark -------------------------------------------------------------------------------


def test_local_mode_is_tuned_for_one_machine(orca_spark):
    conf = orca_spark.sparkContext.getConf()
    assert orca_spark.sparkContext.master == "local[2,4]"
    assert conf.get("spark.driver.host") == conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert orca_spark.sparkContext.uiWebUrl is None
    assert orca_spark.sparkContext.pythonExec == sys.executable
    assert orca_spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"
    assert int(orca_spark.conf.get("spark.sql.shuffle.partitions")) < 200


def test_local_mode_listens_on_loopback_only(orca_spark):
    addresses = {
        connection.laddr.ip
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses
    assert all(address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for address in addresses)


def test_other_users_can_neither_read_nor_plant_what_spark_works_with(orca_spark):
    tasks = orca_spark.sparkContext.parallelize([0], 1)
    (blocks,) = tasks.map(lambda _: os.environ["SPARK_LOCAL_DIRS"]).collect()
    folders = [
        *blocks.split(","),
        orca_spark.sparkContext._jvm.java.lang.System.getProperty("java.io.tmpdir"),
        orca_spark.sparkContext._temp_dir,
        orca_spark.conf.get("spark.python.unix.domain.socket.dir"),
    ]
    for folder in folders:
        assert os.path.isdir(folder)
        assert os.access(folder, os.W_OK)
        assert not others.can(lambda folder=folder: os.listdir(folder))
        assert not others.can(lambda folder=folder: Path(folder, "planted").touch())


def test_the_ports_of_local_mode_ask_for_the_secret_of_the_run(orca_spark):
    conf = orca_spark.sparkContext.getConf()
    assert conf.get("spark.authenticate") == "true"
    assert conf.get("spark.authenticate.secret") is None  # Spark does not print it
    asked = local_properties(1, "1g", {"spark.authenticate": "false"})
    assert asked["spark.authenticate"] == "false"
    for master in ("local-cluster[2,1,1024]", "spark://other:7077"):
        assert "spark.authenticate" not in local_properties(1, "1g", {"spark.master": master})


def test_a_failed_task_is_tried_again(orca_spark):
    def fail_once(rows):
        from pyspark import TaskContext

        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("the first attempt fails on purpose")
        return rows

    assert orca_spark.sparkContext.parallelize([1, 2], 1).mapPartitions(fail_once).count() == 2


def test_workers_import_what_the_driver_can(orca_spark):
    # `survivors` is pickled by reference to this module, which is not installed.
    actual = orca_spark.sparkContext.parallelize([[]], 1).map(lambda x: survivors(x, 0)).collect()
    assert actual == [[]]


def test_cluster_describes_local_mode(orca_spark):
    cluster = SparkCluster.from_active()
    assert (cluster.nodes, cluster.cores_per_node, cluster.slots()) == (1, 2, 2)
    assert cluster.is_local
    assert not cluster.dynamic_allocation
    assert cluster.driver_host == "127.0.0.1"
    assert cluster.sc is orca_spark.sparkContext
    assert cluster.spark is orca_spark


def test_getters_return_the_active_objects(orca_spark):
    assert OrcaContext.get_spark_context() is orca_spark.sparkContext
    assert OrcaContext.get_spark_session() is orca_spark
    assert OrcaContext.get_sql_context().sql("select 1 as one").first().one == 1


def test_an_active_context_is_reused_and_says_what_it_ignores(orca_spark, caplog):
    assert init_orca_context("local", cores=2, memory="2g") is orca_spark.sparkContext
    assert init_orca_context("spark-submit") is orca_spark.sparkContext
    assert init_orca_context() is orca_spark.sparkContext
    assert caplog.text == ""
    assert init_orca_context("yarn", cores=8, conf={"a": 1}) is orca_spark.sparkContext
    assert "cluster_mode, conf, cores: no effect" in caplog.text
    assert "the active SparkContext (master local[2,4]) is reused" in caplog.text


# Lives in one process --------------------------------------------------------------------------

LIVES = """
    import io, json, logging, os, signal, sys, threading, time
    import numpy as np
    import psutil
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.cluster.spark_calls import SparkCall, users_errors
    from bigdl.orca.data import XShards

    log = io.StringIO()
    logging.getLogger("bigdl.orca").addHandler(logging.StreamHandler(log))
    logging.getLogger("bigdl.orca").setLevel(logging.INFO)
    facts = {}

    def alive():
        return sorted(
            process.name()
            for process in psutil.Process().children(recursive=True)
            if process.status() != psutil.STATUS_ZOMBIE
        )

    def heap(sc):
        return sc._jvm.java.lang.Runtime.getRuntime().maxMemory() / 2**20

    def traces():
        of_pyspark = ("SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE")
        variables = {name: os.environ[name] for name in os.environ if name not in of_pyspark}
        return [variables, list(sys.path), str(signal.getsignal(signal.SIGINT))]

    def settled(expected):
        give_up = time.monotonic() + 3
        while (names := alive()) != expected and time.monotonic() < give_up:
            time.sleep(0.05)
        return names

    stop_orca_context()  # nothing to stop
    facts["before any context"] = alive()

    # A context that the program made itself.
    conf = SparkConf().setMaster("local[1]").setAppName("mine").set("spark.ui.enabled", "false")
    user_context = SparkContext(conf=conf)
    facts["reused"] = init_orca_context("local", memory="1g") is user_context
    facts["python of the reused context"] = user_context.pythonExec == sys.executable
    facts["reuse was said"] = "is reused" in log.getvalue()
    stop_orca_context()
    facts["user's context stopped"] = user_context._jsc is None
    try:
        with users_errors(user_context):
            pass
    except RuntimeError as error:
        facts["data of a stopped context"] = str(error)
    facts["user's JVM left alone"] = alive()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = [path for path in sys.path if "spark-" not in path or "userFiles" not in path]

    # Three lives with different memory.
    before = traces()
    log.truncate(0)
    sc = init_orca_context("LOCAL", cores="2", memory="512MB", num_nodes=2, driver_cores=4)
    facts["log"] = log.getvalue()
    facts["JVMs"] = [alive().count("java")]
    facts["sum"] = OrcaContext.get_spark_session().range(10).rdd.map(lambda row: row.id).sum()
    facts["heap"] = [heap(sc)]
    facts["signal handler taken"] = str(signal.getsignal(signal.SIGINT)) != before[2]
    sc.stop()  # as a user may do; the JVM is still there
    stop_orca_context()
    facts["left"] = [settled([])]
    facts["same as before"] = traces() == before
    stop_orca_context()

    OrcaContext.log_output = True
    streams, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), io.StringIO(), io.StringIO()
    sc = init_orca_context(memory="800m", spark_log_level="info")
    facts["master"] = sc.master
    facts["heap"].append(heap(sc))
    facts["count"] = SparkSession.builder.getOrCreate().range(5).count()
    output = sys.stdout.getvalue() + sys.stderr.getvalue()
    facts["output shown"] = "INFO SparkContext" in output

    # Kill it during a call, as the kernel does when memory runs out.
    os.kill(sc._gateway.proc.pid, signal.SIGSTOP)
    os.waitpid(sc._gateway.proc.pid, os.WUNTRACED)  # until all threads have stopped
    threading.Timer(0.5, os.kill, (sc._gateway.proc.pid, signal.SIGKILL)).start()
    facts["after a crash"] = []
    for use in (
        lambda: sc._jvm.functions,
        OrcaContext.get_spark_context,
        lambda: sc.parallelize([1], 1).count(),
        lambda: XShards.partition(np.zeros(2)).collect(),
        lambda: SparkCall(sc, lambda: None).wait(),
    ):
        try:
            use()
        except RuntimeError as error:
            facts["after a crash"].append(f"{type(error).__name__}: {error}")
    try:
        init_orca_context(memory="99999999t")
    except ValueError as error:
        facts["too much memory"] = str(error)
    facts["words of the JVM"] = "Invalid maximum heap size" in sys.stderr.getvalue()
    facts["left"].append(settled([]))
    sys.stdout, sys.stderr = streams
    OrcaContext.log_output = False

    sc = init_orca_context("local", cores=1, memory="700m", conf={"spark.app.name": "third"})
    facts["heap"].append(heap(sc))
    facts["JVMs"].append(settled(["java"]).count("java"))
    facts["name"] = sc.appName

    child = os.fork()
    if child == 0:
        stop_orca_context()  # the context belongs to the parent
        os._exit(0)
    os.waitpid(child, 0)
    facts["count after fork"] = sc.parallelize(range(7), 1).map(str).count()

    # The process exits without stop_orca_context.
    facts["pids at exit"] = [each.pid for each in psutil.Process().children(recursive=True)]
    print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lives")
    return last_line(start(directory / "lives.py", LIVES))


@pytest.mark.slow
def test_stop_without_a_context_does_nothing(lives):
    assert lives["before any context"] == []


def test_a_context_of_the_program_is_reused_and_its_jvm_left_alone(lives):
    assert lives["reused"]
    assert lives["reuse was said"]
    assert lives["python of the reused context"]
    assert lives["user's context stopped"]
    assert lives["user's JVM left alone"] == ["java"]


def test_data_of_a_stopped_context_says_so(lives):
    said = "This data belongs to a Spark context that has been stopped"
    assert lives["data of a stopped context"].startswith(said)


def test_each_life_has_the_memory_it_asked_for(lives):
    # The serial collector does not count one of its survivor spaces.
    for heap, asked in zip(lives["heap"], [512, 800, 700], strict=True):
        assert 0.94 * asked <= heap <= asked


def test_a_life_leaves_nothing_behind(lives):
    assert lives["left"] == [[], []]
    assert lives["JVMs"] == [1, 1]
    assert lives["signal handler taken"]
    assert lives["same as before"]


def test_jobs_run_in_every_life(lives):
    assert (lives["sum"], lives["count"], lives["count after fork"]) == (45, 5, 7)
    assert lives["master"] == f"local[{core_count()},4]"
    assert lives["name"] == "third"


def test_a_start_says_what_it_does_and_what_it_ignores(lives):
    assert "Initializing orca context" in lives["log"]
    assert "driver_cores, num_nodes: no effect, because this is local mode" in lives["log"]


def test_a_crash_of_the_jvm_is_noticed_and_survived(lives):
    (said,) = set(lives["after a crash"])
    assert said.startswith("SparkLost: Spark's JVM (process ")
    assert "call stop_orca_context and init_orca_context" in said
    assert len(lives["after a crash"]) == 5


def test_a_jvm_that_cannot_start_is_one_clear_sentence(lives):
    assert "memory was '99999999t'" in lives["too much memory"]
    assert lives["words of the JVM"]


def test_log_output_shows_the_jvm_in_pythons_streams(lives):
    assert lives["output shown"]


def test_the_exit_of_the_process_stops_everything(lives):
    assert lives["pids at exit"]
    assert survivors(lives["pids at exit"], 3) == []


SUBMITTED = """
    import json, logging, io, sys
    from bigdl.orca import init_orca_context, stop_orca_context

    log = io.StringIO()
    logging.getLogger("bigdl.orca").addHandler(logging.StreamHandler(log))
    sc = init_orca_context("bigdl-submit", cores=8, conf={"spark.app.name": "other"})
    facts = {"master": sc.master, "name": sc.appName, "log": log.getvalue()}
    stop_orca_context()
    # The command's JVM is still there; a cluster mode does not leave it.
    sc = init_orca_context("yarn-client", num_nodes=2)
    facts["python"] = [sys.executable, sc.pythonExec]
    facts["sum"] = sc.parallelize(range(5), 1).map(lambda x: x).sum()
    stop_orca_context()
    sc = init_orca_context("local", cores=1)
    facts["local"] = sc.master
    facts["local log"] = log.getvalue()
    print(json.dumps(facts))
"""


@pytest.mark.slow
def test_spark_submit_mode_takes_the_settings_of_the_command(tmp_path):
    submit = (sys.executable, "-m", "bigdl.orca.cluster.submit_main")
    options = ("--master", "local[3]", "--name", "submitted", "--conf", "spark.ui.enabled=false")
    process = start(tmp_path / "submitted.py", SUBMITTED, (*submit, *options))
    facts = last_line(process)
    assert (facts["master"], facts["name"]) == ("local[3]", "submitted")
    assert "conf, cores: no effect, because the settings are those of the" in facts["log"]
    assert facts["sum"] == 10
    assert facts["python"] == [sys.executable, sys.executable]
    assert facts["local"] == "local[1,4]"
    assert "replaces the master of the spark-submit command" in facts["local log"]


KILLED = """
    import json, os, threading, time
    import psutil
    from bigdl.orca import init_orca_context

    daemon = os.environ["DAEMON"]
    if "preloaded" in daemon:
        import torch

    def never_returns(rows):
        import time
        time.sleep(600)
        return rows

    sc = init_orca_context("local", cores=2, memory="512m")
    sc.parallelize(range(2), 2).count()
    job = sc.parallelize(range(2), 2).mapPartitions(never_returns)
    threading.Thread(target=job.count, daemon=True).start()
    def command(process):
        try:
            return " ".join(process.cmdline())
        except psutil.Error:
            return ""

    # The JVM, the daemon of the Python workers and two workers.
    found = []
    while sum(daemon in text for _, text in found) < 3:
        time.sleep(0.05)
        found = [(p.pid, command(p)) for p in psutil.Process().children(recursive=True)]
    pids = [pid for pid, text in found if "java" in text or daemon in text]
    print(json.dumps(pids), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow_cases("orca.cluster.python_daemon")
@pytest.mark.fault
@pytest.mark.parametrize("daemon", ["orca.cluster.python_daemon", "runtime.preloaded"])
def test_a_killed_driver_leaves_no_process(tmp_path, daemon):
    driver = start(tmp_path / "killed.py", KILLED, DAEMON=daemon)
    try:
        pids = json.loads(driver.stdout.readline())
        assert all(is_running(pid) for pid in pids)
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate(timeout=60)
    assert survivors(pids, 30) == []


# Executors -------------------------------------------------------------------------------------


def test_cluster_describes_executors(local_cluster):
    cluster = SparkCluster.from_active()
    assert (cluster.nodes, cluster.cores_per_node, cluster.slots()) == (2, 1, 2)
    assert not cluster.is_local
    assert not cluster.dynamic_allocation
    assert cluster.driver_host == "127.0.0.1"


@pytest.mark.slow
def test_executors_import_what_the_driver_can(local_cluster):
    numbers = local_cluster.sparkContext.parallelize([[], []], 2)
    assert numbers.map(lambda x: survivors(x, 0)).collect() == [[], []]
