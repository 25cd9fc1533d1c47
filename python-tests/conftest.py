"""Fixtures that several test modules share.

A process can have one SparkContext only, and starting one takes seconds.  So the session has one
local Spark (`orca_spark`), and the tests that need real executors (`local_cluster`) run after all
others, on a second one that takes its place.
"""

import gc
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import hypothesis
import other_platform
import pytest
from connect_server import ConnectServer, over_connect
from quick_jvm import QUICK_JVM
from slow_cases import mark_slow_case


def pytest_addoption(parser):
    parser.addoption(
        "--portable",
        default="",
        choices=("darwin", "win32"),
        help="run the tests with what macOS (or Windows) has of Python's os module and others; "
        "tests that call Linux themselves are skipped",
    )


def pytest_configure(config):
    if config.option.portable:  # before BigDL is imported
        other_platform.install(config.option.portable)
    if "gpu" not in config.option.markexpr:  # before anything asks CUDA
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # How fast this machine is today is no property of what is tested.
    slow = hypothesis.HealthCheck.too_slow
    hypothesis.settings.register_profile("bigdl", deadline=None, suppress_health_check=[slow])
    hypothesis.settings.load_profile("bigdl")
    os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_JVM)
    from bigdl.common.cpu import passive_waiting

    # Before PyTorch is imported: OpenMP threads that wait would spin, which takes half of the CPU
    # time of small models if several test processes share the cores.
    os.environ.update(passive_waiting())
    # A shell's background job ignores Ctrl-C, and so would the programs that tests interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(100_000)  # at 700, to parse all sources takes three times as long
    config.addinivalue_line(
        "markers", "local_cluster: runs late, with the tests that use the fixture of this name"
    )


def pytest_itemcollected(item):
    mark_slow_case(item)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Exclude imported modules and tests from garbage collections, to save a second in each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    needed = item.get_closest_marker("linux")
    if needed and (other_platform.current() or sys.platform != "linux"):
        pytest.skip(f"only Linux has it: {needed.args[0]}")
    if other_platform.current() and needs_local_cluster(item):
        pytest.skip("only Linux has it: executors of a cluster")
    try:
        return (yield)
    except Exception as error:
        other_platform.skip_test_of_linux(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that asks for bfloat16 on a processor that has none, or calls Linux itself."""
    try:
        return (yield)
    except Exception as error:
        other_platform.skip_test_of_linux(error)
        if NO_BF16 in f"{error} {error.__cause__}":
            from bigdl.common.cpu import isa_flags

            if not isa_flags().intersection(("avx512_bf16", "amx_bf16", "bf16")):
                pytest.skip(NO_BF16)
        raise


NO_BF16 = "Platform doesn't support BF16 format"
"""What OpenVINO says on a processor without instructions for bfloat16."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let files that share something costly run in one process."""
    from sharing import SharingScheduling

    return SharingScheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Say how a process of pytest-xdist ended that was not asked to."""
    process = getattr(node.gateway._io, "popen", None)
    if error and process is not None:
        print(f"{node.gateway.id}: process {process.pid} ended with status {process.wait(10)}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Tests on executors come last, and with them the files that hold any; each real cluster, which
    takes long and much of the machine, has a place of its own before. Of several pytest processes
    each runs whole files in this order (``--no-loadscope-reorder``)."""
    late = {item.location[0] for item in items if needs_local_cluster(item)}

    def place(item):
        path = item.location[0]
        return path in late, path if path in late else "", needs_local_cluster(item)

    items.sort(key=place)  # a stable sort
    files: dict[str, list] = {}
    for item in items:
        files.setdefault(item.location[0], []).append(item)
    on_clusters = [path for path in files if on_real_cluster(files[path][0])]
    order = [path for path in files if path not in on_clusters]
    others = len(order)
    for number, path in enumerate(on_clusters):
        order.insert(number + number * others // len(on_clusters), path)
    items[:] = [item for path in order for item in files[path]]


def on_real_cluster(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("yarn", "kubernetes", "hosts"))


def needs_local_cluster(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    both = {"orca_spark", "local_cluster"}.issubset(fixtures)
    assert not both, f"{item.nodeid} uses orca_spark and local_cluster"
    return "local_cluster" in fixtures or item.get_closest_marker("local_cluster") is not None


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was():
    """What a test silences is heard again after it, or a later test misses its messages."""
    before = _silenced()
    yield
    after = _silenced()
    assert after == before, f"Logging was {before or 'on'}, and the test left {after or 'all on'}"


def _silenced() -> dict[str, object]:
    """What is off: all loggers up to a level, or one of ours."""
    manager = logging.root.manager
    found: dict[str, object] = {"": manager.disable} if manager.disable else {}
    if logging.root.level > logging.WARNING:  # below it, servers log more
        found["root"] = logging.root.level
    for name, logger in list(manager.loggerDict.items()):
        if name.split(".")[0] == "bigdl" and isinstance(logger, logging.Logger):
            level = logger.level > logging.WARNING
            if logger.disabled or not logger.propagate or level:
                found[name] = (logger.disabled, logger.propagate, logger.level)
    return found


@pytest.fixture(autouse=True)
def _gradients_are_left_on():
    """Where a test leaves them off, a later one in the same process cannot train."""
    yield
    torch = sys.modules.get("torch")
    if hasattr(torch, "is_grad_enabled") and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        raise AssertionError("The test, or what it called, left PyTorch's gradients off")


@pytest.fixture(scope="session", autouse=True)
def _stop_at_the_end():
    """All modules share Spark and the waiting workers of ``backend="local"``."""
    yield
    if "plain_workers" in sys.modules:
        sys.modules["plain_workers"].stop_shared_crews()
    if "bigdl.runtime.local" in sys.modules:
        from bigdl.runtime.local import LocalEngine

        LocalEngine().shutdown()
    if "bigdl.orca.context" in sys.modules:
        from bigdl.orca import stop_orca_context

        stop_orca_context()
    stop_servers()


@pytest.fixture(scope="module")
def orca_spark() -> "pyspark.sql.SparkSession":  # noqa: F821
    """A SparkSession on ``local[2,4]``, started by ``init_orca_context``.

    Where ``BIGDL_TEST_SPARK=connect``, it is one of a Spark Connect server with this master.
    """
    if over_connect():
        return connected_session()
    return session("local[2,4]", lambda context: context("local", cores=2, memory="2g"))


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory) -> "pyspark.sql.SparkSession":  # noqa: F821
    """A SparkSession on two executors of one core and 1 GB each, every one in its own JVM."""
    master = "local-cluster[2,1,1024]"
    if over_connect():
        return connected_session(master)

    def start(context):
        from bigdl.orca.cluster.spark import SparkCluster

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPARK_HOME", str(spark_home(tmp_path_factory.mktemp("spark-home"))))
            conf = {
                "spark.master": master,
                "spark.executor.memory": "1g",
                "spark.executor.extraJavaOptions": QUICK_JVM,
            }
            context("local", cores=2, memory="1g", conf=conf)
        give_up = time.monotonic() + 120
        while SparkCluster.from_active().slots() < 2:
            assert time.monotonic() < give_up, "the executors did not register within 120 s"
            time.sleep(0.1)

    return session(master, start)


def session(master: str, start) -> "pyspark.sql.SparkSession":  # noqa: F821
    """The session of all modules on this master; a test may have ended it, or started another."""
    from pyspark import SparkContext

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    active = SparkContext._active_spark_context
    if active is None or active._jsc is None or active.master != master or is_stopped(active):
        stop_orca_context()
        start(init_orca_context)
    return OrcaContext.get_spark_session()


_servers: dict = {}  # of Spark Connect, by master, with their folders


def connected_session(master: str = "local[2,4]"):
    """The session of all modules on the Spark Connect server of this test process."""
    from bigdl.orca import init_orca_context, stop_orca_context

    if master not in _servers:
        stop_orca_context()
        stop_servers()
        folder = tempfile.TemporaryDirectory(prefix="bigdl-connect-")
        conf = {"spark.executor.memory": "1g"} if master.startswith("local-cluster") else {}
        _servers[master] = ConnectServer(Path(folder.name), master, **conf), folder
    return init_orca_context("spark-connect", master=_servers[master][0].url)


def stop_servers():
    for server, folder in _servers.values():
        server.stop()
        folder.cleanup()
    _servers.clear()


def is_stopped(context) -> bool:
    try:
        return context._jsc.sc().isStopped()
    except Exception:  # the JVM is gone
        return True


def spark_home(directory: Path) -> Path:
    """PySpark's own Spark behind links: executors write their logs below it, in ``work``."""
    import pyspark

    for part in Path(pyspark.__file__).parent.iterdir():
        (directory / part.name).symlink_to(part)
    return directory


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of data sets that the environment variable BIGDL_DATA names."""
    name = os.environ.get("BIGDL_DATA")
    if not name:
        pytest.skip("BIGDL_DATA does not name a directory of data sets")
    if not Path(name).is_dir():
        pytest.skip(f"BIGDL_DATA={name} is not a directory")
    return Path(name)
