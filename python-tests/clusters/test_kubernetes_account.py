"""docker/kubernetes/account.yaml gives a driver what it needs, and nothing more."""

import json
import re
from pathlib import Path

import pytest
import yaml
from real_clusters import apply_account, run
from test_kubernetes import FILES, NAMESPACE, in_cluster_mode, kubectl

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(600)]

DOCUMENTS = list(yaml.safe_load_all((FILES / "account.yaml").read_text()))
(ROLE,) = [each for each in DOCUMENTS if each["kind"] == "Role"]
RIGHTS = [
    (rule["apiGroups"][0], resource, verb)
    for rule in ROLE["rules"]
    for resource in rule["resources"]
    for verb in rule["verbs"]
]

# An executor is lost and replaced, which needs rights of its own.
PROGRAM = """
    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.cluster.spark import SparkCluster

    def lose(_):
        import psutil

        next(each for each in psutil.Process().parents() if each.name() == "java").kill()

    sc = init_orca_context(**ARGUMENTS)
    cluster = SparkCluster(sc)
    cluster.await_slots(2)
    try:
        sc.range(1, numSlices=1).foreach(lose)
    except Exception:
        print("an executor is lost", flush=True)
    print(cluster.await_slots(2), "executors", flush=True)
    stop_orca_context()
"""


def role_of(rights: list[tuple[str, str, str]]) -> dict:
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
        for group, resource, verb in rights
    ]
    return {**ROLE, "rules": rules}


def remove_programs(cluster: Path) -> None:
    """Remove what programs have left."""
    kinds = "pods,services,configmaps,networkpolicies"
    ours = ("-l", "spark-app-selector", "--force", "--grace-period=0")
    kubectl(cluster, "-n", NAMESPACE, "delete", kinds, *ours)


def used_by(cluster: Path, folder: Path, rights: list[tuple[str, str, str]], **more) -> str:
    """What went wrong with a program in cluster mode, by an account with some rights."""
    folder.mkdir(exist_ok=True)
    (folder / "role.json").write_text(json.dumps(role_of(rights)))
    kubectl(cluster, "apply", "-f", str(folder / "role.json"))
    token = kubectl(cluster, "-n", NAMESPACE, "create", "token", "bigdl").strip()
    config = json.loads((cluster / "admin.conf").read_text())
    config["users"][0]["user"] = {"token": token}
    (folder / "account.conf").write_text(json.dumps(config))
    there = folder / "there"
    variables = {"KUBECONFIG": str(folder / "account.conf")}
    arguments = in_cluster_mode(cluster, there, **more)
    arguments["conf"]["spark.task.maxFailures"] = "1"
    try:
        done = run(there, PROGRAM, arguments, variables)
        wrong = [] if done.returncode == 0 else [f"exit code {done.returncode}"]
        printed = done.stdout + done.stderr
        wrong += [] if "2 executors" in done.stdout else ["nothing was printed"]
        wrong += [line for line in printed.splitlines() if "forbidden" in line.lower()][:3]
        # the driver's pod stays for its log when it has run, and what belongs to it
        get = ["-n", NAMESPACE, "get", "-o", "name"]
        left = kubectl(cluster, *get, "pods", "--field-selector=status.phase!=Succeeded").split()
        others = kubectl(cluster, *get, "services,configmaps").split()
        left += [name for name in others if not re.search("root-ca|-driver-|-drv-", name)]
        wrong += [f"left {name}" for name in left]
    except AssertionError:
        wrong = ["it did not end"]
    finally:
        remove_programs(cluster)
        apply_account(cluster, "privileged")
    return "; ".join(wrong)


def test_the_account_may_do_what_is_needed(account, tmp_path):
    remove_programs(account)  # of other tests, such as the pods of drivers that failed
    assert not used_by(account, tmp_path, RIGHTS)


TO_REMOVE = ("", "pods", "delete")
IN_A_RUN = [right for right in RIGHTS if right != TO_REMOVE]


@pytest.mark.parametrize("right", IN_A_RUN, ids=lambda right: " ".join(right[1:]))
def test_each_right_is_needed(account, tmp_path, right):
    wrong = used_by(account, tmp_path, [each for each in RIGHTS if each != right])
    print(f"without {right}: {wrong}")
    assert wrong


@pytest.mark.fault
def test_a_driver_that_cannot_start_is_removed(account, tmp_path):
    """Which is what the right to delete pods is needed for, and pods on nodes that are lost."""
    image = {"container_image": "localhost/nothing:1"}
    assert "left" not in used_by(account, tmp_path / "with", RIGHTS, **image)
    assert "left pod/" in used_by(account, tmp_path / "without", IN_A_RUN, **image)
