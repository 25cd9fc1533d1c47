"""The recommender of docker/kubernetes on a real Kubernetes: loaded, asked, one pod removed."""

import json
import time
from pathlib import Path

import pytest
import yaml
from real_clusters import control
from served_program import expected, made_in

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

FILE = Path(__file__).parents[2] / "docker" / "kubernetes" / "recommender.yaml"
TOKEN = "let-me-in"
ASK = """
import json, sys, urllib.request
def ask(token):
    headers = {"authorization": f"Bearer {token}"}
    content = json.dumps({"users": [1, 3], "k": 5, "candidates": 40}).encode()
    url = "http://bigdl-recommender.bigdl.svc.cluster.local:8000/recommend"
    request = urllib.request.Request(url, content, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
print(json.dumps(ask(open("/token/token").read())))
try:
    ask("wrong")
except urllib.error.HTTPError as error:
    print(error.code)
"""


def on_this_machine(documents, template, features):
    """The manifests with the image of this machine, and a folder of it for the claim."""
    shown = template["spec"]
    for document in documents:
        spec = document.get("spec", {}).get("template", {}).get("spec")
        if spec is None:
            continue
        (container,) = spec["containers"]
        container.update(image="localhost/machine:1", imagePullPolicy="Never")
        container["volumeMounts"] += shown["containers"][0]["volumeMounts"]
        container["resources"] = {"requests": {"cpu": "100m", "memory": "500Mi"}}
        spec["securityContext"] = {"runAsUser": 185}
        for volume in spec["volumes"]:
            if volume.pop("persistentVolumeClaim", None):
                volume["hostPath"] = {"path": str(features)}
        spec["volumes"] += shown["volumes"]
    return [each for each in documents if each["kind"] != "PersistentVolumeClaim"]


def test_a_recommender_is_loaded_served_asked_and_outlives_a_pod(account, tmp_path):
    def kubectl(*arguments):
        return control("kubernetes.py", "kubectl", account, "-n", "bigdl", *arguments)

    def ready_pods():
        found = json.loads(kubectl("get", "deployment", "bigdl-recommender", "-o", "json"))
        return found["status"].get("readyReplicas", 0)

    made, _, _, model = folder = made_in(tmp_path)
    features = tmp_path / "features-volume"
    (features / "tables").mkdir(parents=True)
    for name in ("users", "items", "vectors"):
        (made / f"{name}.parquet").rename(features / "tables" / f"{name}.parquet")
    (made / "model").rename(features / "model")
    for each in (features, *features.rglob("*")):
        each.chmod(0o777)
    documents = list(yaml.safe_load_all(FILE.read_text()))
    settings = yaml.safe_load(documents[0]["data"]["serving.yaml"])
    assert sorted(settings["ranking"]["inputs"]) == sorted(model.feature_cols)
    settings["ranking"]["inputs"] = model.feature_cols
    documents[0]["data"]["serving.yaml"] = yaml.safe_dump(settings)
    template = json.loads((account / "pod.json").read_text())
    items = on_this_machine(documents, template, features)
    file = tmp_path / "recommender.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    secret = "secret", "generic", "bigdl-recommender", f"--from-literal=token={TOKEN}"
    kubectl("create", *secret)
    try:
        kubectl("apply", "-f", str(file))
        kubectl("wait", "--for=condition=complete", "job/bigdl-recommender-init", "--timeout=200s")
        end = time.monotonic() + 200
        while ready_pods() < 2:
            assert time.monotonic() < end, kubectl("describe", "pods")[-5000:]
            time.sleep(1)
        command = ("exec", "deployment/bigdl-recommender", "--", "python", "-c", ASK)
        answer, refused = kubectl(*command).splitlines()
        found = json.loads(answer)["recommendations"]
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
        while ready_pods() < 2:
            assert time.monotonic() < end + 100, kubectl("describe", "pods")[-5000:]
            time.sleep(1)
        assert kubectl(*command).splitlines()[0] == answer
    finally:
        kubectl("delete", "-f", str(file), "--wait=false")
        kubectl("delete", "secret", "bigdl-recommender")
