"""Test the requests of Spark to Kubernetes, with an API server that records them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_context import start

PROGRAM = """
    import json, time
    from bigdl.orca import init_orca_context, stop_orca_context
    from bigdl.orca.cluster import kubernetes

    kubernetes.await_executors = lambda *_: None  # there are none
    sc = init_orca_context(
        "k8s-client", master=MASTER, container_image="bigdl:3", num_nodes=2, cores=2, memory="1g",
        extra_executor_memory_for_ray="3g", python_location="/image/python",
        conf={
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "1s",
            "spark.driver.host": "localhost",
            "spark.ui.enabled": False,
        },
    )
    print(json.dumps([sc.master, sc.pythonExec]), flush=True)
    give_up = time.monotonic() + 60
    while not open(NOTES).read() and time.monotonic() < give_up:
        time.sleep(0.1)
    stop_orca_context()
"""


@pytest.fixture
def api_server(tmp_path):
    notes = tmp_path / "notes"
    notes.touch()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, code, document):
            body = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            nothing = {"metadata": {"resourceVersion": "1"}, "items": []}
            self.answer(200, {"kind": "PodList", "apiVersion": "v1", **nothing})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked["kind"] == "Pod":
                with open(notes, "a") as file:
                    file.write(json.dumps(asked) + "\n")
            asked["metadata"]["uid"] = "1"
            self.answer(201, asked)

        def do_DELETE(self):
            self.answer(200, {"kind": "Status", "status": "Success"})

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"k8s://http://127.0.0.1:{server.server_address[1]}", notes
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_spark_asks_for_the_executors_of_the_arguments(api_server, tmp_path):
    master, notes = api_server
    program = PROGRAM.replace("MASTER", repr(master)).replace("NOTES", repr(str(notes)))
    process = start(tmp_path / "program.py", program)
    try:
        out, err = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[0]) == [master, "/image/python"]
    pod = json.loads(notes.read_text().splitlines()[0])["spec"]
    (container,) = pod["containers"]
    # as namespaces with the Pod Security standard "restricted" require
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["image"] == "bigdl:3"
    assert container["args"] == ["executor"]
    assert container["resources"]["requests"] == {"cpu": "2", "memory": "4096Mi"}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["SPARK_EXECUTOR_CORES"] == "2"
    assert variables["SPARK_EXECUTOR_MEMORY"] == "1024m"
    assert variables["SPARK_DRIVER_URL"].startswith("spark://CoarseGrainedScheduler@localhost:")
