"""Pods in namespaces of the Pod Security standard "restricted", which refuse all others."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from real_clusters import FIT, SCRIPTS, fitted_weights, last_line, run, with_claims
from test_kubernetes import (
    FILES,
    IMAGE,
    IN_CLUSTER_MODE,
    NAMESPACE,
    START,
    environment,
    in_pod,
    machine_template,
    on_kubernetes,
    run_job,
)

from bigdl.orca.cluster import submit

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(600)]

PODS = Path(submit.__file__).parent / "pods"


def shown_by_claims(cluster: Path, role: str) -> dict:
    """The template of BigDL's own pods, with what the image of this machine has not."""
    template = yaml.safe_load((PODS / f"{role}.yaml").read_text())
    machine = with_claims(cluster, NAMESPACE, machine_template(cluster, IMAGE))["spec"]
    spec = template["spec"]
    spec["securityContext"] |= machine["securityContext"]
    spec["volumes"] = machine["volumes"]
    spec["containers"][0]["volumeMounts"] = machine["containers"][0]["volumeMounts"]
    return template


def conf_of(role: str, file: Path | str) -> dict[str, str]:
    template = f"spark.kubernetes.{role}.podTemplate"
    return {
        f"{template}File": str(file),
        f"{template}ContainerName": f"spark-kubernetes-{role}",
    }


def test_a_fit_from_the_job_of_the_documentation(restricted, tmp_path):
    template = shown_by_claims(restricted, "executor")
    arguments = in_pod(restricted, conf=conf_of("executor", "/code/pod.json"))
    succeeded, printed = run_job(
        restricted, "client.yaml", tmp_path / "there", FIT, arguments, template=template
    )
    assert succeeded, printed
    found = json.loads(printed.strip().splitlines()[-1])
    assert len(found["hosts"]) == 2
    np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)


def test_a_fit_from_this_machine(restricted, tmp_path):
    file = tmp_path / "pod.json"
    file.write_text(json.dumps(shown_by_claims(restricted, "executor")))
    arguments = on_kubernetes(restricted, conf=conf_of("executor", file))
    found = last_line(run(tmp_path / "there", FIT, arguments, environment(restricted)))
    np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)


def test_cluster_mode_from_a_pod(restricted, tmp_path):
    template = shown_by_claims(restricted, "driver")
    template["spec"]["volumes"].append({"name": "code", "configMap": {"name": "train"}})
    mounts = template["spec"]["containers"][0]["volumeMounts"]
    mounts.append({"name": "code", "mountPath": "/code"})
    (tmp_path / "there").mkdir()
    conf = {
        **conf_of("driver", "/code/pod.json"),
        **conf_of("executor", "/code/pod.json"),
        "spark.kubernetes.executor.podTemplateContainerName": "spark-kubernetes-driver",
        "spark.kubernetes.authenticate.driver.serviceAccountName": "bigdl",
        "spark.kubernetes.driver.request.cores": "0.1",
    }
    arguments = in_pod(restricted, cluster_mode="k8s-cluster", conf=conf)
    succeeded, printed = run_job(
        restricted,
        "cluster.yaml",
        tmp_path / "there",
        IN_CLUSTER_MODE,
        arguments,
        template=template,
    )
    assert succeeded, printed
    assert "the sum is 45" in printed


@pytest.mark.fault
def test_an_image_whose_user_is_root_is_named_with_what_to_do(restricted, tmp_path):
    """By BigDL's own template of executors, as the image of this machine names nobody."""
    arguments = on_kubernetes(restricted)
    arguments["conf"] = {k: v for k, v in arguments["conf"].items() if "podTemplate" not in k}
    done = run(tmp_path / "there", START, arguments, environment(restricted))
    assert done.returncode == 0, done.stderr
    assert "container has runAsNonRoot and image will run as root" in done.stdout
    assert "or runAsUser in a pod template" in done.stdout


def test_a_pod_that_the_standard_refuses_is_refused(restricted, tmp_path):
    """Or the other tests of this file would say nothing."""
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain", "namespace": NAMESPACE}}
    file = tmp_path / "pod.json"
    file.write_text(json.dumps({**pod, "spec": {"containers": [container]}}))
    script = str(SCRIPTS / "kubernetes.py")
    command = [sys.executable, script, "kubectl", str(restricted), "apply", "-f", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 'violates PodSecurity "restricted' in done.stderr


def test_the_api_server_takes_every_manifest_without_a_warning(restricted):
    """With `warn: restricted` a pod of a job or a deployment that would be refused is named."""
    script = str(SCRIPTS / "kubernetes.py")
    for file in sorted(FILES.glob("*.yaml")):
        if file.name == "monitoring.yaml":  # objects of Prometheus's operator
            continue
        command = [sys.executable, script, "kubectl", str(restricted), "apply", "-f", str(file)]
        namespaces = {
            each["metadata"]["name"]: each
            for each in yaml.safe_load_all(file.read_text())
            if each["kind"] == "Namespace" and each["metadata"]["name"] != NAMESPACE
        }
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert "Warning" not in done.stderr, done.stderr
        finally:
            delete = ["delete", "--wait=false", "--ignore-not-found"]
            what = ["namespace", *namespaces] if namespaces else ["-f", str(file)]
            if file.name != "account.yaml":
                subprocess.run([*command[:4], *delete, *what], capture_output=True, check=False)
