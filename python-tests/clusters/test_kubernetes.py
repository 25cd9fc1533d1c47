"""Programs on a real Kubernetes of two nodes, whose pods have the programs of this machine."""

import json
import os
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from cluster_programs import FASHION, MOVIELENS, ON_RAY, OTHER_BACKEND, SEARCH
from real_clusters import FIT, WHOLE, control, error_line, fitted_weights, last_line, run, run_whole

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

IMAGE = "localhost/machine:1"
NAMESPACE = "bigdl"
ROOT = Path(__file__).parents[2]
FILES = ROOT / "docker" / "kubernetes"


def kubectl(cluster: Path, *arguments: str) -> str:
    """What a command of kubectl prints."""
    return control("kubernetes.py", "kubectl", cluster, *arguments)


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


def shown(*paths: Path | str, role: str = "executor", read_only: bool = False) -> dict[str, str]:
    """Spark properties by which pods see folders of this machine."""
    conf = {}
    for place, path in enumerate(paths):
        volume = f"spark.kubernetes.{role}.volumes.hostPath.shown{place}"
        conf[f"{volume}.mount.path"] = conf[f"{volume}.options.path"] = str(path)
        conf[f"{volume}.mount.readOnly"] = str(read_only).lower()
    return conf


def in_pod(cluster: Path, conf: dict | None = None, **more) -> dict:
    """Arguments of init_orca_context for a driver in a pod."""
    arguments = on_kubernetes(cluster, **more)
    mine = {"spark.kubernetes.executor.podTemplateFile": "/code/pod.json", **(conf or {})}
    conf = {k: v for k, v in arguments["conf"].items() if not k.startswith("spark.driver.")}
    return {
        **arguments,
        "master": "k8s://https://kubernetes.default.svc",
        "conf": {**conf, **mine},
    }


def machine_template(cluster: Path, image: str, *folders: Path) -> dict:
    """The template of pods that show what an image has not, which that of this machine needs."""
    if image != IMAGE:
        return {"spec": {"containers": [{"volumeMounts": []}], "volumes": []}}
    template = json.loads((cluster / "pod.json").read_text())
    spec = template["spec"]
    for place, folder in enumerate(folders):
        spec["volumes"].append({"name": f"saved{place}", "hostPath": {"path": str(folder)}})
        spec["containers"][0]["volumeMounts"].append(
            {"name": f"saved{place}", "mountPath": str(folder)}
        )
    spec["securityContext"] = {"runAsUser": 185}  # the image names nobody
    return template


def run_job(
    cluster: Path,
    file: str,
    folder: Path,
    program: str,
    arguments: dict,
    image: str = IMAGE,
    template: dict | None = None,
) -> tuple:
    """Run a program by a job of docker/kubernetes, with what the pods of a template show.

    Returns
    -------
    bool, str
        True if the job succeeded, and what it printed.
    """
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    name = "ARGUMENTS['conf']['spark.kubernetes.driver.pod.name'] = os.environ['BIGDL_POD']"
    head = f"import os\nARGUMENTS = {arguments!r}\nif 'BIGDL_POD' in os.environ:\n    {name}\n"
    (folder / "train.py").write_text(head + textwrap.dedent(program), encoding="utf-8")
    template = template or machine_template(cluster, image)
    (folder / "pod.json").write_text(json.dumps(template))
    documents = list(yaml.safe_load_all((FILES / file).read_text()))
    job = documents[-1]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container.update(image=image, imagePullPolicy="Never")
    mounts = template["spec"]["containers"][0]["volumeMounts"]
    if not any(mount["name"] == "code" for mount in [*container["volumeMounts"], *mounts]):
        mounts = [*mounts, {"name": "code", "mountPath": "/code"}]
        pod["volumes"].append({"name": "code", "configMap": {"name": "train"}})
    names = {volume["name"] for volume in pod["volumes"]}
    container["volumeMounts"] += [each for each in mounts if each not in container["volumeMounts"]]
    pod["volumes"] += [each for each in template["spec"]["volumes"] if each["name"] not in names]
    pod["securityContext"].update(template["spec"].get("securityContext", {}))
    (folder / "job.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    )
    here, name = ["-n", NAMESPACE], job["metadata"]["name"]
    code = [f"--from-file={folder / each}" for each in ("train.py", "pod.json")]
    kubectl(cluster, *here, "create", "configmap", "train", *code)
    try:
        kubectl(cluster, "apply", "-f", str(folder / "job.json"))
        end = time.monotonic() + 280
        status: dict = {}
        while not status.get("succeeded") and not status.get("failed"):
            assert time.monotonic() < end, kubectl(cluster, *here, "logs", f"job/{name}")
            time.sleep(0.5)
            found = kubectl(cluster, *here, "get", "job", name, "-o", "json")
            status = json.loads(found)["status"]
        return bool(status.get("succeeded")), kubectl(cluster, *here, "logs", f"job/{name}")
    finally:
        kubectl(cluster, "delete", "-f", str(folder / "job.json"))
        kubectl(cluster, *here, "delete", "configmap", "train")


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


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_results_equal_those_of_this_machine(account, tmp_path, cores):
    """On two and four workers, with what is saved in a folder that all pods have."""
    saved = tmp_path / "saved"
    saved.mkdir()
    there = run_whole(
        tmp_path / "there",
        on_kubernetes(account, cores=cores, conf=shown(saved)),
        environment(account),
        workers_per_node=cores,
        saved=str(saved),
    )
    workers = 2 * cores
    here = run_whole(tmp_path / "here", {"cores": workers}, workers_per_node=workers)
    assert there == here


@pytest.mark.slow
def test_results_in_a_pod_equal_those_of_this_machine(account, tmp_path):
    saved = tmp_path / "there"
    head = f"WORKERS_PER_NODE, FOLDER = 1, {str(saved)!r}\n"
    saved.mkdir()
    template = machine_template(account, IMAGE, saved)
    arguments, program = in_pod(account), head + textwrap.dedent(WHOLE)
    succeeded, printed = run_job(
        account, "client.yaml", saved, program, arguments, template=template
    )
    assert succeeded, printed
    here = run_whole(tmp_path / "here", {"cores": 2}, workers_per_node=2)
    assert json.loads(printed.strip().splitlines()[-1]) == here


@pytest.mark.slow
def test_a_driver_behind_a_headless_service(account, tmp_path):
    conf = {"spark.driver.host": f"train.{NAMESPACE}.svc.cluster.local"}
    arguments = in_pod(account, conf=conf)
    folder = tmp_path / "there"
    succeeded, printed = run_job(account, "client-service.yaml", folder, FIT, arguments)
    assert succeeded, printed
    found = json.loads(printed.strip().splitlines()[-1])
    np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)


IN_CLUSTER_MODE = """
    import os, sys
    from bigdl.orca import init_orca_context, stop_orca_context

    sc = init_orca_context(**ARGUMENTS)
    print("the sum is", sc.range(10).sum(), flush=True)
    print("this is", os.environ["HOSTNAME"], file=sys.stderr)
    stop_orca_context()
"""


def in_cluster_mode(cluster: Path, folder: Path, **more) -> dict:
    """Arguments of init_orca_context in cluster mode, for a program in a folder."""
    template = str(cluster / "pod.json")
    conf = {
        "spark.kubernetes.authenticate.driver.serviceAccountName": "bigdl",
        "spark.kubernetes.driver.podTemplateFile": template,
        "spark.kubernetes.driver.podTemplateContainerName": "main",
        "spark.kubernetes.driver.request.cores": "0.1",
        **shown(folder, role="driver"),
    }
    arguments = on_kubernetes(cluster, conf=conf, cluster_mode="k8s-cluster", **more)
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        del arguments["conf"][name]
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ('raise ValueError("the program\'s own error")', 1), ("sys.exit(7)", 7)],
)
def test_a_program_in_cluster_mode_prints_here(account, tmp_path, end, code):
    folder = tmp_path / "there"
    program = textwrap.dedent(IN_CLUSTER_MODE) + end
    done = run(folder, program, in_cluster_mode(account, folder), environment(account))
    assert done.returncode == code, done.stderr
    assert "the sum is 45" in done.stdout
    assert "this is orca-" in done.stdout
    raised = done.stdout.count("ValueError: the program's own error")
    assert raised == (code == 1), done.stdout


@pytest.mark.slow
def test_cluster_mode_from_a_pod(account, tmp_path):
    folder = tmp_path / "there"
    arguments = in_cluster_mode(account, folder)
    arguments["master"] = "k8s://https://kubernetes.default.svc"
    conf = arguments["conf"]
    for role in ("driver", "executor"):
        conf[f"spark.kubernetes.{role}.podTemplateFile"] = "/code/pod.json"
    conf["spark.kubernetes.driver.volumes.hostPath.shown0.mount.path"] = "/code"
    succeeded, printed = run_job(account, "cluster.yaml", folder, IN_CLUSTER_MODE, arguments)
    assert succeeded, printed
    assert "the sum is 45" in printed


@pytest.mark.slow
@pytest.mark.fault
def test_a_driver_whose_image_is_not_there_is_named(account, tmp_path):
    folder = tmp_path / "there"
    arguments = in_cluster_mode(account, folder, container_image="localhost/nothing:1")
    done = run(folder, IN_CLUSTER_MODE, arguments, environment(account))
    assert done.returncode == 1
    last = error_line(done)
    assert "The driver has not started in the Kubernetes namespace bigdl" in last
    assert "ErrImageNeverPull of the image localhost/nothing:1" in last


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ray", "bigdl"])
def test_other_backends_learn_the_same(account, tmp_path, backend):
    program = f"BACKEND = {backend!r}\n" + textwrap.dedent(OTHER_BACKEND)
    arguments = on_kubernetes(account, extra_executor_memory_for_ray="2g")
    found = last_line(run(tmp_path / "there", program, arguments, environment(account)))
    assert found["predicted"] == 64
    np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)


@pytest.mark.slow
def test_ray_runs_on_both_nodes_and_is_gone(account, tmp_path):
    arguments = on_kubernetes(account, init_ray_on_spark=True, extra_executor_memory_for_ray="2g")
    variables = {**environment(account), "BIGDL_TEST": str(tmp_path)}
    found = last_line(run(tmp_path / "there", ON_RAY, arguments, variables))
    assert len(found["nodes"]) == 2
    assert all(address.startswith("10.79.") for address in found["addresses"])  # of the pods
    assert not marked("BIGDL_TEST", str(tmp_path))
    assert not in_pods()


def marked(name: str, value: str) -> list[psutil.Process]:
    """The processes with a variable of the environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def in_pods() -> list[str]:
    """The commands that run in pods, on all nodes."""
    pids = set()
    for node in Path("/sys/fs/cgroup/pids").glob("node[1-9]"):
        for file in node.glob("kubepods*/**/cgroup.procs"):
            pids |= set(file.read_text().split())
    found = []
    for pid in pids:
        try:
            command = psutil.Process(int(pid)).cmdline()
        except psutil.Error:
            continue
        if command and not command[0].endswith("pause"):
            found.append(" ".join(command)[:200])
    return found


@pytest.mark.slow
def test_a_search_of_hyperparameters(account, tmp_path):
    arguments = on_kubernetes(account, init_ray_on_spark=True, extra_executor_memory_for_ray="2g")
    assert last_line(run(tmp_path / "there", SEARCH, arguments, environment(account)))["lr"] == 0.1


@pytest.mark.slow
def test_movielens_on_a_volume(account, tmp_path):
    data = os.environ.get("BIGDL_DATA")
    if not data:
        pytest.skip("BIGDL_DATA names no folder with ml-100k")
    output = tmp_path / "output"
    output.mkdir()
    examples = str(ROOT / "examples" / "orca" / "ncf")
    head = f"EXAMPLES, DATA, OUTPUT = {examples!r}, '{data}/ml-100k', {str(output)!r}\n"
    conf = shown(output, f"{data}/ml-100k")
    program = head + textwrap.dedent(MOVIELENS)
    arguments = on_kubernetes(account, conf=conf)
    found = last_line(run(tmp_path / "there", program, arguments, environment(account)))
    assert found["auc"] > 0.6


CLAIM = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: shared}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  hostPath: {path: FOLDER}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: nfsvolumeclaim, namespace: bigdl}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: shared
  resources: {requests: {storage: 1Gi}}
"""


@pytest.mark.slow
def test_the_published_quickstart(account, tmp_path):
    """With a claim of a volume that all pods have, at the same path as here."""
    shared = tmp_path / "nfsdata"
    shared.mkdir()
    (tmp_path / "claim.yaml").write_text(CLAIM.replace("FOLDER", str(shared)))
    kubectl(account, "apply", "-f", str(tmp_path / "claim.yaml"))
    volume = "spark.kubernetes.executor.volumes.persistentVolumeClaim.nfsvolumeclaim"
    conf = {
        f"{volume}.options.claimName": "nfsvolumeclaim",
        f"{volume}.mount.path": str(shared),
    }
    arguments = on_kubernetes(account, driver_cores=1, driver_memory="1g", conf=conf)
    program = f"MODEL_DIR = {str(shared)!r}\n" + textwrap.dedent(
        FASHION.replace("yarn-client", "k8s-client")
    )
    try:
        found = last_line(run(tmp_path / "there", program, arguments, environment(account)))
    finally:
        kubectl(account, "delete", "-f", str(tmp_path / "claim.yaml"))
    assert found["Accuracy"] > 0.9


@pytest.mark.slow
def test_a_quota_that_allows_what_is_needed(account, tmp_path):
    hard = "pods=2,requests.cpu=200m,requests.memory=4Gi,limits.memory=4Gi"
    kubectl(account, "-n", NAMESPACE, "create", "quota", "enough", f"--hard={hard}")
    try:
        found = last_line(run(tmp_path / "e", FIT, on_kubernetes(account), environment(account)))
        np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)
        arguments = on_kubernetes(account, num_nodes=3)
        done = run(tmp_path / "more", FIT, arguments, environment(account))
    finally:
        kubectl(account, "-n", NAMESPACE, "delete", "quota", "enough")
    assert done.returncode == 1
    last = error_line(done)
    assert "3 workers were asked for but the cluster can run 2 tasks at once" in last, done.stderr
    assert "the quota enough of the namespace bigdl allows" in last


START = """
    from bigdl.orca import init_orca_context, stop_orca_context

    try:
        init_orca_context(**ARGUMENTS)
    except RuntimeError as error:
        print(error)
    stop_orca_context()
"""


@pytest.mark.slow
@pytest.mark.fault
def test_an_image_that_is_not_there_is_named(account, tmp_path):
    arguments = on_kubernetes(account, container_image="localhost/nothing:1")
    done = run(tmp_path / "there", START, arguments, environment(account))
    assert done.returncode == 0, done.stderr
    assert "ErrImageNeverPull of the image localhost/nothing:1" in done.stdout


@pytest.mark.slow
@pytest.mark.fault
def test_pods_that_no_node_has_room_for_are_named(account, tmp_path):
    conf = {"spark.kubernetes.executor.request.cores": "1000"}
    done = run(tmp_path / "there", START, on_kubernetes(account, conf=conf), environment(account))
    assert done.returncode == 0, done.stderr
    assert "no node can run" in done.stdout
    assert "Insufficient cpu" in done.stdout


@pytest.mark.slow
@pytest.mark.fault
def test_a_quota_that_allows_no_pod_is_named(account, tmp_path):
    kubectl(account, "-n", NAMESPACE, "create", "quota", "none", "--hard=pods=0")
    try:
        done = run(tmp_path / "there", START, on_kubernetes(account), environment(account))
    finally:
        kubectl(account, "-n", NAMESPACE, "delete", "quota", "none")
    assert done.returncode == 0, done.stderr
    assert "the quota none of the namespace bigdl allows {'pods': '0'}" in done.stdout


@pytest.mark.slow
@pytest.mark.fault
def test_a_missing_configuration_is_named(tmp_path, account):
    variables = {"KUBECONFIG": str(tmp_path / "nothing"), "HOME": str(tmp_path)}
    done = run(tmp_path / "there", START, on_kubernetes(account), variables)
    assert done.returncode == 0, done.stderr
    assert "Spark refused to start" in done.stdout
    assert "caused by" in done.stdout
