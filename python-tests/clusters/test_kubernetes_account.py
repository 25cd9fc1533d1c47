"""docker/kubernetes/account.yaml gives a driver what it needs, and nothing more."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml
from real_clusters import run
from test_kubernetes import FILES, IN_CLUSTER_MODE, NAMESPACE, in_cluster_mode, kubectl

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(600)]

DOCUMENTS = list(yaml.safe_load_all((FILES / "account.yaml").read_text()))
(ROLE,) = [each for each in DOCUMENTS if each["kind"] == "Role"]
RIGHTS = [
    (resource, verb)
    for rule in ROLE["rules"]
    for resource in rule["resources"]
    for verb in rule["verbs"]
]


def role_of(rights: list[tuple[str, str]]) -> dict:
    rules = [{"apiGroups": [""], "resources": [what], "verbs": [verb]} for what, verb in rights]
    return {**ROLE, "rules": rules}


def used_by(cluster: Path, folder: Path, rights: list[tuple[str, str]]) -> str:
    """What went wrong with a program in cluster mode, by an account with some rights."""
    (folder / "role.json").write_text(json.dumps(role_of(rights)))
    kubectl(cluster, "apply", "-f", str(folder / "role.json"))
    token = kubectl(cluster, "-n", NAMESPACE, "create", "token", "bigdl").strip()
    config = json.loads((cluster / "admin.conf").read_text())
    config["users"][0]["user"] = {"token": token}
    (folder / "account.conf").write_text(json.dumps(config))
    program = textwrap.dedent(IN_CLUSTER_MODE)
    there = folder / "there"
    variables = {"KUBECONFIG": str(folder / "account.conf")}
    arguments = in_cluster_mode(cluster, there)
    try:
        done = run(there, program, arguments, variables)
        wrong = [] if done.returncode == 0 else [f"exit code {done.returncode}"]
        printed = done.stdout + done.stderr
        wrong += [] if "the sum is 45" in done.stdout else ["nothing was printed"]
        wrong += [line for line in printed.splitlines() if "forbidden" in line.lower()][:3]
        kinds = "pods,services,configmaps"
        left = kubectl(cluster, "-n", NAMESPACE, "get", kinds, "-o", "name").split()
        known = ("configmap/kube-root-ca.crt", "-driver")  # the driver's pod stays for its log
        wrong += [f"left {name}" for name in left if not name.endswith(known)]
    finally:
        for what in ("pods", "services", "configmaps"):
            command = ["delete", what, "-l", "spark-app-selector", "--grace-period=0", "--force"]
            kubectl(cluster, "-n", NAMESPACE, *command)
        kubectl(cluster, "apply", "-f", str(FILES / "account.yaml"))
    return "; ".join(wrong)


def test_the_account_may_do_what_is_needed(account, tmp_path):
    assert not used_by(account, tmp_path, RIGHTS)


@pytest.mark.parametrize(("resource", "verb"), RIGHTS)
def test_each_right_is_needed(account, tmp_path, resource, verb):
    others = [right for right in RIGHTS if right != (resource, verb)]
    wrong = used_by(account, tmp_path, others)
    print(f"without {verb} of {resource}: {wrong}")
    assert wrong
