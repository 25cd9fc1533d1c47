"""Real clusters on this machine, one at a time; each stops when tests of something else follow."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_clusters import apply_account, control, running

HERE = Path(__file__).parent

_running = ExitStack()
_folders: dict[str, Path] = {}


def started(script: str, prepare: str | None, tmp_path_factory) -> Path:
    """The folder of a cluster that runs; any other is stopped."""
    if script not in _folders:
        stop()
        folder = _running.enter_context(running(script, tmp_path_factory.mktemp("cluster")))
        if prepare:
            control(script, prepare, folder)
        _folders[script] = folder
    return _folders[script]


def stop() -> None:
    _folders.clear()
    _running.close()


@pytest.hookimpl(trylast=True)  # after the fixtures of the last test
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or HERE not in nextitem.path.parents:
        stop()


def pytest_generate_tests(metafunc):
    """Tests of faults run BIGDL_TRIALS times."""
    if metafunc.definition.get_closest_marker("fault"):
        trials = int(os.environ.get("BIGDL_TRIALS", "1"))
        metafunc.parametrize("trial", range(trials), indirect=True)


@pytest.fixture(autouse=True)
def trial(request) -> int:
    """The number of times that a test of a fault ran before."""
    return getattr(request, "param", 0)


@pytest.fixture(scope="module")
def yarn(tmp_path_factory) -> Path:
    """The folder of a YARN of two hosts with HDFS."""
    return started("yarn.py", None, tmp_path_factory)


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory) -> Path:
    """The folder of a Kubernetes of two nodes, with an image that has this machine's programs."""
    return started("kubernetes.py", "machine", tmp_path_factory)


@pytest.fixture(scope="module")
def account(kubernetes) -> Path:
    """The same Kubernetes, with the namespace and the account of the documentation.

    Its pods show folders of this machine, which namespaces of the standard "restricted" refuse.
    """
    apply_account(kubernetes, "privileged")
    return kubernetes


@pytest.fixture
def restricted(account) -> Iterator[Path]:
    """The same, with the namespace as it is in the documentation."""
    apply_account(account, "restricted")
    yield account
    apply_account(account, "privileged")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Path:
    """The folder of four hosts and a driver's, with a standalone cluster of Spark on them."""
    return started("hosts.py", "spark", tmp_path_factory)
