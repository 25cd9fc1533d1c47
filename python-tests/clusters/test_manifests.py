"""Pods of ours satisfy the Pod Security standard "restricted", and servers are protected."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bigdl.orca.cluster import submit

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "docker" / "kubernetes"
TEMPLATES = Path(submit.__file__).parent / "pods"
SERVERS = ("model-server.yaml", "recommender.yaml")
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def documents(file: str) -> list[dict]:
    return [each for each in yaml.safe_load_all((MANIFESTS / file).read_text()) if each]


def of_kind(file: str, kind: str) -> list[dict]:
    return [each for each in documents(file) if each["kind"] == kind]


def pods() -> Iterator[tuple[str, dict]]:
    """Each specification of a pod, in manifests and in BigDL's own templates."""
    for path in sorted(TEMPLATES.glob("*.yaml")):
        yield path.name, yaml.safe_load(path.read_text())["spec"]
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for document in documents(path.name):
            spec = document.get("spec", {})
            spec = spec.get("jobTemplate", {}).get("spec", spec)  # of a CronJob
            if "containers" in spec.get("template", {}).get("spec", {}):
                yield f"{path.name}-{document['metadata']['name']}", spec["template"]["spec"]


PODS = dict(pods())


def broken_rules(pod: dict) -> list[str]:
    """The rules of the standard "restricted" that a pod breaks, of Kubernetes 1.34."""
    own = pod.get("securityContext", {})
    rules = {
        "hostNetwork, hostPID and hostIPC are unset": not any(
            pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")
        ),
        "volumes are of the kinds that are allowed": all(
            set(volume) - {"name"} <= VOLUMES for volume in pod.get("volumes", [])
        ),
        "no sysctls": not own.get("sysctls"),
    }
    containers = [
        container
        for name in ("containers", "initContainers", "ephemeralContainers")
        for container in pod.get(name, [])
    ]
    for container in containers:
        context = {**own, **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        rules |= {
            "runAsNonRoot": context.get("runAsNonRoot") is True,
            "runAsUser is not 0": context.get("runAsUser") != 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "not privileged": not context.get("privileged"),
            "capabilities": "ALL" in capabilities.get("drop", [])
            and set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "procMount": context.get("procMount", "Default") == "Default",
            "no ports of the host": not any("hostPort" in p for p in container.get("ports", [])),
        }
        broken = [f"{container['name']}: {name}" for name, kept in rules.items() if not kept]
        if broken:
            return broken
    return []


def test_pods_are_found():
    files = {name.partition("-")[0] for name in PODS}
    assert files >= {"executor.yaml", "driver.yaml", "client.yaml", "recommender.yaml"}
    assert len(PODS) >= 8


@pytest.mark.parametrize("name", PODS)
def test_a_pod_satisfies_the_restricted_standard(name):
    assert not broken_rules(PODS[name])


@pytest.mark.parametrize("name", [name for name in PODS if "-" in name])
def test_a_pod_of_a_manifest_writes_to_volumes_only(name):
    """Executors may have images of users, and what those write to is not known here."""
    for container in PODS[name]["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        writable = {
            mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
        }
        assert "/tmp" in writable


@pytest.mark.parametrize("name", PODS)
def test_only_drivers_have_the_account_of_their_pod(name):
    """The account that may make pods is of no use to servers and executors."""
    makes_pods = name == "driver.yaml" or name.startswith(("client", "cluster"))
    assert (PODS[name].get("automountServiceAccountToken", True)) is makes_pods


@pytest.mark.parametrize("file", [path.name for path in sorted(MANIFESTS.glob("*.yaml"))])
def test_what_a_manifest_makes_is_in_a_restricted_namespace(file):
    names = {
        each["metadata"]["name"]
        for path in MANIFESTS.glob("*.yaml")
        for each in of_kind(path.name, "Namespace")
        if each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    }
    for document in documents(file):
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] in names


def test_servers_live_apart_from_drivers():
    """A driver's account may read no token of a server, and none of its pods is one's neighbour."""
    homes = {file: of_kind(file, "Namespace")[0]["metadata"]["name"] for file in SERVERS}
    assert len({*homes.values(), "bigdl"}) == 3
    (role,) = of_kind("account.yaml", "Role")
    assert not any("secrets" in rule["resources"] for rule in role["rules"])


@pytest.mark.parametrize("file", SERVERS)
def test_a_server_has_a_budget_a_policy_and_probes_of_its_ports(file):
    (deployment,) = of_kind(file, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    (budget,) = of_kind(file, "PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"] == labels
    (scaler,) = of_kind(file, "HorizontalPodAutoscaler")
    assert scaler["spec"]["minReplicas"] > budget["spec"]["maxUnavailable"]
    (policy,) = of_kind(file, "NetworkPolicy")
    assert policy["spec"]["podSelector"] == {}  # all pods of the namespace
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert all("from" in rule for rule in policy["spec"]["ingress"])
    open_to_others = {
        p["port"] for rule in policy["spec"]["ingress"] for p in rule.get("ports", [])
    }
    assert open_to_others == ports
    for service in of_kind(file, "Service"):
        assert service["spec"]["selector"] == labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports


def test_the_pods_of_a_program_may_talk_to_each_other():
    """Spark's labels, and those of a driver that is a job of ours."""
    (policy,) = of_kind("network.yaml", "NetworkPolicy")
    ((rule,),) = [each["from"] for each in policy["spec"]["ingress"]]
    (expression,) = rule["podSelector"]["matchExpressions"]
    assert expression == {"key": "spark-role", "operator": "In", "values": ["driver", "executor"]}
    for file in ("client.yaml", "client-service.yaml"):
        (job,) = of_kind(file, "Job")
        assert job["spec"]["template"]["metadata"]["labels"] == {"spark-role": "driver"}


@pytest.mark.parametrize("file", SERVERS)
def test_metrics_are_asked_for_by_a_token_that_is_good_for_nothing_else(file):
    (deployment,) = of_kind(file, "Deployment")
    namespace = deployment["metadata"]["namespace"]
    pod = deployment["spec"]["template"]["spec"]
    (secret,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert secret["defaultMode"] == 0o440
    (monitor,) = (
        each for each in documents("monitoring.yaml") if each["metadata"]["namespace"] == namespace
    )
    (endpoint,) = monitor["spec"]["endpoints"]
    credentials = {"name": secret["secretName"], "key": "metrics-token"}
    assert endpoint["authorization"]["credentials"] == credentials
    text = (MANIFESTS / file).read_text()
    assert "/token/metrics-token" in text
    assert f"create secret generic {secret['secretName']}" in text
    assert "--from-literal=metrics-token=" in text
    services = of_kind(file, "Service")
    chosen = [
        service
        for service in services
        if service["metadata"].get("labels") == monitor["spec"]["selector"]["matchLabels"]
    ]
    (service,) = chosen
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
