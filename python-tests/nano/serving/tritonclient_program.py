"""Asks a model server with ``tritonclient``; its arguments are the ports of HTTP and gRPC."""

import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http

http_port, grpc_port = sys.argv[1:]
rows = np.array([[-1, 2, 3], [4, -5, 6]], "float32")


def check(client, module, **options):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("relu")
    assert client.is_model_ready("relu", "1")
    assert not client.is_model_ready("other")
    server = client.get_server_metadata(**options)
    assert server["name"] == "bigdl"
    assert "binary_tensor_data" in server["extensions"]
    model = client.get_model_metadata("relu", **options)
    assert model["inputs"][0]["datatype"] == "FP32"
    listed = client.get_model_repository_index(**options)
    listed = listed["models"] if isinstance(listed, dict) else listed
    assert [each["name"] for each in listed] == ["relu"]
    tensor = module.InferInput("x", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    asked = module.InferRequestedOutput("y")
    for outputs in (None, [asked]):
        answer = client.infer("relu", [tensor], outputs=outputs, request_id="seven")
        assert (answer.as_numpy("y") == np.maximum(rows, 0)).all()
        response = answer.get_response(**options)
        assert response["id"] == "seven"
        assert (response["model_name"], response["model_version"]) == ("relu", "1")
    answer = client.infer("relu", [tensor], model_version="1", timeout=5_000_000)
    assert (answer.as_numpy("y") == np.maximum(rows, 0)).all()
    client.load_model("relu")
    wrong = module.InferInput("x", [2, 4], "FP32")
    wrong.set_data_from_numpy(np.zeros((2, 4), "float32"))
    sentence = ""
    try:
        client.infer("relu", [wrong])
    except module.InferenceServerException as error:
        sentence = str(error)
    assert "has the shape [-1, 3]" in sentence
    client.close()


with_json = tritonclient.http.InferInput("x", list(rows.shape), "FP32")
with_json.set_data_from_numpy(rows, binary_data=False)
plain = tritonclient.http.InferRequestedOutput("y", binary_data=False)
client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{http_port}", concurrency=4)
for compression in (None, "gzip", "deflate"):
    answer = client.infer(
        "relu", [with_json], outputs=[plain], request_compression_algorithm=compression
    )
    assert (answer.as_numpy("y") == np.maximum(rows, 0)).all()
pending = [client.async_infer("relu", [with_json]) for _ in range(20)]
for each in pending:
    assert (each.get_result().as_numpy("y") == np.maximum(rows, 0)).all()
check(client, tritonclient.http)

client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}")
check(client, tritonclient.grpc, as_json=True)
print("conforms")
