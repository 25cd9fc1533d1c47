"""The servers of docker/kubernetes on a real Kubernetes, in restricted namespaces of their own."""

import contextlib
import json
import time

import pytest
import torch
import yaml
from real_clusters import control, with_claims
from served_program import expected, made_in
from test_kubernetes import FILES, IMAGE, machine_template

from bigdl.nano.pytorch import InferenceOptimizer

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

# or the scheduler puts a pod aside for minutes
ALL_BOUND = ("--for=jsonpath={.status.phase}=Bound", "pvc", "--all", "--timeout=60s")
TOKEN, METRICS = "let-me-in", "let-me-look"
ASK = """
import json, sys, urllib.request
def ask(token):
    headers = {"authorization": f"Bearer {token}"}
    content = json.dumps({"users": [1, 3], "k": 5, "candidates": 40}).encode()
    url = "http://bigdl-recommender.bigdl-recommender.svc.cluster.local:8000/recommend"
    request = urllib.request.Request(url, content, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
for _ in range(30):  # a busy machine may be too late to rank, and says so
    answer = ask(open("/token/token").read())
    if {each["source"] for each in answer["recommendations"]} == {"ranked"}:
        break
print(json.dumps(answer))
try:
    ask("wrong")
except urllib.error.HTTPError as error:
    print(error.code)
"""


def on_this_machine(cluster, documents, folder):
    """The manifests with the image of this machine, and a folder of it for their claim."""
    namespace = documents[0]["metadata"]["name"]
    control("kubernetes.py", "kubectl", cluster, "create", "namespace", namespace)
    shown = with_claims(cluster, namespace, machine_template(cluster, IMAGE))["spec"]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-data"},
        "spec": {
            "accessModes": ["ReadWriteMany", "ReadOnlyMany"],
            "storageClassName": "",
            "capacity": {"storage": "10Gi"},
            "hostPath": {"path": str(folder)},
        },
    }
    for document in documents:
        if document["kind"] == "PersistentVolumeClaim":
            document["spec"] |= {"volumeName": f"{namespace}-data", "storageClassName": ""}
        spec = document.get("spec", {}).get("template", {}).get("spec")
        if spec is None:
            continue
        (container,) = spec["containers"]
        container.update(image=IMAGE, imagePullPolicy="Never")
        container["volumeMounts"] += shown["containers"][0]["volumeMounts"]
        container["resources"] = {"requests": {"cpu": "100m", "memory": "500Mi"}}
        spec["securityContext"] |= shown["securityContext"]
        spec["volumes"] += shown["volumes"]
    return [volume, *documents]


@contextlib.contextmanager
def applied(cluster, documents, folder):
    """What a manifest makes, while a test runs; its secret follows, as in the documentation."""
    namespace = documents[0]["metadata"]["name"]
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o777)
    items = on_this_machine(cluster, documents, folder)
    of_data = [each for each in items if each["kind"].startswith("PersistentVolume")]
    files = [folder.parent / "data.json", folder.parent / "manifest.json"]
    for file, each in zip(files, (of_data, items), strict=True):
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": each}))
    claims = cluster / f"claims-{namespace}.json"

    def kubectl(*arguments):
        return control("kubernetes.py", "kubectl", cluster, "-n", namespace, *arguments)

    try:
        kubectl("apply", "-f", str(files[0]))
        kubectl("wait", *ALL_BOUND)
        kubectl("apply", "-f", str(files[1]))
        tokens = (f"--from-literal=token={TOKEN}", f"--from-literal=metrics-token={METRICS}")
        kubectl("create", "secret", "generic", namespace, *tokens)
        yield kubectl
    finally:
        kubectl("delete", "-f", str(files[1]), "-f", str(claims), "--wait=false")


def await_ready(kubectl, name, number, seconds=200):
    end = time.monotonic() + seconds
    found: dict = {}
    while found.get("readyReplicas", 0) < number:
        assert time.monotonic() < end, kubectl("describe", "pods")[-5000:]
        time.sleep(1)
        found = json.loads(kubectl("get", "deployment", name, "-o", "json"))["status"]


@pytest.mark.slow
def test_a_recommender_is_loaded_served_asked_and_outlives_a_pod(kubernetes, tmp_path):
    made, _, _, model = folder = made_in(tmp_path)
    features = tmp_path / "features-volume"
    (features / "tables").mkdir(parents=True)
    for name in ("users", "items", "vectors"):
        (made / f"{name}.parquet").rename(features / "tables" / f"{name}.parquet")
    (made / "model").rename(features / "model")
    documents = list(yaml.safe_load_all((FILES / "recommender.yaml").read_text()))
    (configuration,) = (each for each in documents if each["kind"] == "ConfigMap")
    settings = yaml.safe_load(configuration["data"]["serving.yaml"])
    assert sorted(settings["ranking"]["inputs"]) == sorted(model.feature_cols)
    settings["ranking"]["inputs"] = model.feature_cols
    configuration["data"]["serving.yaml"] = yaml.safe_dump(settings)
    with applied(kubernetes, documents, features) as kubectl:
        kubectl("wait", "--for=condition=complete", "job/bigdl-recommender-init", "--timeout=200s")
        await_ready(kubectl, "bigdl-recommender", 2)
        command = ("exec", "deployment/bigdl-recommender", "--", "python", "-c", ASK)
        answer, refused = kubectl(*command).splitlines()
        found = json.loads(answer)["recommendations"]
        sources = {each["source"] for each in found}
        assert sources == {"ranked"}, kubectl("logs", "deployment/bigdl-recommender")
        assert [each["items"] for each in found] == expected(folder, [1, 3], 5)
        assert refused == "401"
        client = ("bigdl-friesian-serve", "client", "--users", "1,2", "-k", "3")
        address = ("--address", "bigdl-recommender:8980", "--token-file", "/token/token")
        said = kubectl("exec", "deployment/bigdl-recommender", "--", *client, *address)
        assert said.splitlines()[0].startswith("user 1 (ranked) ")
        scaler = json.loads(kubectl("get", "hpa", "bigdl-recommender", "-o", "json"))
        assert scaler["spec"]["minReplicas"] == 2
        name = kubectl("get", "pods", "-l", "app=bigdl-recommender", "-o", "name").split()[0]
        kubectl("delete", name, "--force", "--grace-period=0")
        await_ready(kubectl, "bigdl-recommender", 2, 300)
        assert kubectl(*command).splitlines()[0] == answer


ASK_A_MODEL = """
import json, urllib.error, urllib.request
url = "http://bigdl-serve.bigdl-serve.svc.cluster.local:8000/v2/models/sum"
def ask(token, path="", content=None):
    request = urllib.request.Request(url + path, content, {"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
token = open("/token/token").read()
(shown,) = ask(token)["inputs"]
rows = {**shown, "shape": [1, 3], "data": [1.0, 2.0, 3.0]}
content = json.dumps({"inputs": [rows]}).encode()
print(ask(token, "/infer", content)["outputs"][0]["data"])
try:
    ask("wrong", "/infer", content)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.mark.slow
def test_a_model_server_is_ready_and_answers_those_with_the_token(kubernetes, tmp_path):
    linear = torch.nn.Linear(3, 1)
    torch.nn.init.ones_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    models = tmp_path / "models"
    fast = InferenceOptimizer.trace(
        linear.eval(), input_sample=torch.zeros(1, 3), accelerator="openvino"
    )
    InferenceOptimizer.save(fast, models / "sum")
    documents = list(yaml.safe_load_all((FILES / "model-server.yaml").read_text()))
    with applied(kubernetes, documents, models) as kubectl:
        await_ready(kubectl, "bigdl-serve", 2)
        command = ("exec", "deployment/bigdl-serve", "--", "python", "-c", ASK_A_MODEL)
        assert kubectl(*command).splitlines() == ["[6.0]", "401"]
