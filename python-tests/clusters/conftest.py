"""Real clusters on this machine, each started once and stopped when other tests follow."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_clusters import control, running


@pytest.fixture(scope="package")
def yarn(tmp_path_factory) -> Iterator[Path]:
    """The folder of a YARN of two hosts with HDFS."""
    with running("yarn.py", tmp_path_factory.mktemp("yarn")) as folder:
        yield folder


@pytest.fixture(scope="package")
def kubernetes(tmp_path_factory) -> Iterator[Path]:
    """The folder of a Kubernetes of two nodes, with an image that has this machine's programs."""
    with running("kubernetes.py", tmp_path_factory.mktemp("kubernetes")) as folder:
        control("kubernetes.py", "machine", folder)
        yield folder


@pytest.fixture(scope="package")
def account(kubernetes) -> Path:
    """The same Kubernetes, with the namespace and the account of the documentation."""
    file = Path(__file__).parents[2] / "docker" / "kubernetes" / "account.yaml"
    control("kubernetes.py", "kubectl", kubernetes, "apply", "-f", str(file))
    return kubernetes


@pytest.fixture(scope="package")
def hosts(tmp_path_factory) -> Iterator[Path]:
    """The folder of four hosts and a driver's, with a standalone cluster of Spark on them."""
    with running("hosts.py", tmp_path_factory.mktemp("hosts")) as folder:
        control("hosts.py", "spark", folder)
        yield folder
