"""Programs on a real Kubernetes of two nodes, whose pods have the programs of this machine."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from real_clusters import FIT, control, fitted_weights, last_line, run

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

IMAGE = "localhost/machine:1"
NAMESPACE = "bigdl"
ACCOUNT = Path(__file__).parents[2] / "docker" / "kubernetes" / "account.yaml"


def kubectl(cluster: Path, *arguments: str) -> str:
    """What a command of kubectl prints."""
    return control("kubernetes.py", "kubectl", cluster, *arguments)


@pytest.fixture(scope="module")
def account(kubernetes) -> Path:
    """The cluster, with the namespace and the account of the documentation."""
    kubectl(kubernetes, "apply", "-f", str(ACCOUNT))
    return kubernetes


def on_kubernetes(cluster: Path, **more) -> dict:
    """Arguments of init_orca_context in client mode, from this machine."""
    conf = {
        "spark.kubernetes.namespace": NAMESPACE,
        "spark.kubernetes.authenticate.executor.serviceAccountName": "bigdl",
        "spark.kubernetes.container.image.pullPolicy": "Never",
        "spark.kubernetes.executor.podTemplateFile": str(cluster / "pod.json"),
        "spark.kubernetes.executor.podTemplateContainerName": "main",
        "spark.kubernetes.executor.request.cores": "0.1",
        "spark.driver.bindAddress": "10.77.0.1",
        "spark.driver.host": "10.77.0.1",
        **more.pop("conf", {}),
    }
    return {
        "cluster_mode": "k8s-client",
        "master": "k8s://https://10.77.0.1:6443",
        "container_image": IMAGE,
        "num_nodes": 2,
        "cores": 1,
        "memory": "1g",
        "extra_executor_memory_for_ray": "1g",
        "python_location": sys.executable,
        **more,
        "conf": conf,
    }


def environment(cluster: Path) -> dict[str, str]:
    return {"KUBECONFIG": str(cluster / "admin.conf")}


def test_a_fit_on_kubernetes_is_exact(account, tmp_path):
    there = run(tmp_path / "there", FIT, on_kubernetes(account), environment(account))
    on_pods = last_line(there)
    assert len(on_pods["hosts"]) == 2
    np.testing.assert_allclose(on_pods["weights"], fitted_weights(), rtol=1e-5)
    pods = json.loads(kubectl(account, "-n", NAMESPACE, "get", "pods", "-o", "json"))
    phases = [(pod["metadata"].get("deletionTimestamp"), pod["status"]) for pod in pods["items"]]
    assert all(deleted for deleted, _ in phases), phases


START = """
    from bigdl.orca import init_orca_context, stop_orca_context

    try:
        init_orca_context(**ARGUMENTS)
    except RuntimeError as error:
        print(error)
    stop_orca_context()
"""


@pytest.mark.slow
def test_an_image_that_is_not_there_is_named(account, tmp_path):
    arguments = on_kubernetes(account, container_image="localhost/nothing:1")
    done = run(tmp_path / "there", START, arguments, environment(account))
    assert done.returncode == 0, done.stderr
    assert "ErrImageNeverPull of the image localhost/nothing:1" in done.stdout


@pytest.mark.slow
def test_pods_that_no_node_has_room_for_are_named(account, tmp_path):
    conf = {"spark.kubernetes.executor.request.cores": "1000"}
    done = run(tmp_path / "there", START, on_kubernetes(account, conf=conf), environment(account))
    assert done.returncode == 0, done.stderr
    assert "no node has room for" in done.stdout
    assert "Insufficient cpu" in done.stdout


@pytest.mark.slow
def test_a_quota_that_allows_no_pod_is_named(account, tmp_path):
    kubectl(account, "-n", NAMESPACE, "create", "quota", "none", "--hard=pods=0")
    try:
        done = run(tmp_path / "there", START, on_kubernetes(account), environment(account))
    finally:
        kubectl(account, "-n", NAMESPACE, "delete", "quota", "none")
    assert done.returncode == 0, done.stderr
    assert "the quota none of the namespace bigdl allows {'pods': '0'}" in done.stdout


@pytest.mark.slow
def test_a_missing_configuration_is_named(tmp_path, account):
    variables = {"KUBECONFIG": str(tmp_path / "nothing"), "HOME": str(tmp_path)}
    done = run(tmp_path / "there", START, on_kubernetes(account), variables)
    assert done.returncode == 0, done.stderr
    assert "Spark refused to start" in done.stdout
    assert "caused by" in done.stdout
