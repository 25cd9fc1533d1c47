"""Tests of a recommender on Ray Serve, by handle and by HTTP."""

import json
import urllib.error
import urllib.request

import pytest
from served_catalogue import free_port
from served_program import expected, made_in

from bigdl.friesian.serving import ray_application

USERS, K = [1, 3, 2, 1], 5


@pytest.mark.slow
def test_replicas_answer_as_one_process_does(tmp_path):
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    folder = made_in(tmp_path)
    wanted = expected(folder, USERS, K)
    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="serving")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        application = ray_application(folder[1], replicas=2, cpus=0.5)
        handle = serve.run(application, route_prefix="/recommend")
        for _ in range(4):
            found = handle.recommend.remote(USERS, K).result()
            assert [each["items"] for each in found] == wanted
            assert [each["source"] for each in found] == ["ranked", "ranked", "popular", "ranked"]
        url = f"http://127.0.0.1:{port}/recommend"
        body = json.dumps({"users": USERS, "k": K}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
            found = json.load(answer)["recommendations"]
        assert [each["items"] for each in found] == wanted
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, b'{"users": 1}'))
        assert refused.value.code == 400
        assert "list of users" in json.load(refused.value)["error"]
    finally:
        serve.shutdown()
        ray.shutdown()
