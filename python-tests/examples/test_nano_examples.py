"""The programs and the notebook of examples/nano, on as little data as shows what they do."""

import runpy
from pathlib import Path

import multi_instance
import nbformat
import numpy as np
import optimize_resnet
import predict_with_orca
import pytest
import quantize_encoder
import serve
import switch_runtime
import torch
from nbclient import NotebookClient

NANO = Path(__file__).parents[2] / "examples" / "nano"


@pytest.mark.slow
def test_the_best_form_of_a_resnet_is_saved_and_loaded(tmp_path):
    argv = [
        "--images",
        "12",
        "--size",
        "32",
        "--epochs",
        "1",
        "--runs",
        "5",
        "--drop",
        "1",
        "--threads",
        "1",
    ]
    methods = ["bf16", "openvino_fp32", "openvino_int8"]
    output = ["--output", str(tmp_path / "found")]
    found = optimize_resnet.main([*argv, "--methods", *methods, *output])
    results = found["results"]
    assert list(results.index) == ["original", *methods]
    assert set(results["status"]) <= {"successful", "early stopped"}
    assert found["difference"] < 1e-4
    assert (tmp_path / "found" / "model" / "nano_model_meta.yml").exists()
    assert (tmp_path / "found" / "methods.html").exists()


def test_photographs_are_read(data_dir):
    images, labels = optimize_resnet.photographs(data_dir / "cats-dogs" / "val", 32, 3)
    assert images.shape == (6, 3, 32, 32)
    assert images.abs().max() <= 1
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime"])
def test_an_encoder_keeps_its_accuracy_in_int8(accelerator):
    argv = ["--accelerator", accelerator, "--size", "32", "--layers", "1", "--epochs", "6"]
    found = quantize_encoder.main([*argv, "--drop", "0.02"])
    assert found["fp32"] > 0.9
    assert found["int8"] > 0.8
    assert found["int8, accuracy kept"] >= found["fp32"] - 0.0201


@pytest.mark.slow
def test_instances_give_what_the_model_gives():
    argv = ["--processes", "2", "--batches", "4", "--batch-size", "1", "--size", "32"]
    found = multi_instance.main([*argv, "--accelerator", "openvino"])
    assert found["outputs"] == 4
    assert found["difference"] < 1e-4


@pytest.mark.slow
def test_a_server_answers_as_the_model_it_was_saved_from():
    found = serve.main(["--epochs", "60"])
    assert found["accuracy"] > 0.85
    assert found["difference"] < 1e-5


def test_a_wrong_request_is_answered_and_the_server_goes_on(tmp_path):
    import threading
    from http.server import ThreadingHTTPServer
    from urllib.error import HTTPError

    model = torch.nn.Linear(3, 2).eval().requires_grad_(False)

    def run(array):
        return model(torch.from_numpy(array)).numpy()

    with ThreadingHTTPServer(("127.0.0.1", 0), serve.handler_for(run)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(HTTPError) as refused:
            serve.asked(server.server_port, np.ones((2, 7), np.float32))
        assert refused.value.code == 400
        assert b"RuntimeError" in refused.value.read()
        answer = serve.asked(server.server_port, np.ones((2, 3), np.float32))
        server.shutdown()
    assert answer.shape == (2, 2)


@pytest.mark.slow
def test_a_model_is_switched_between_runtimes():
    found = switch_runtime.main(["--epochs", "2"])
    outputs, labels = found["outputs"], found["labels"]
    exact = outputs["PyTorch, fp32"]
    assert torch.equal(outputs["PyTorch again"], exact)
    assert torch.allclose(outputs["ONNX Runtime, fp32"], exact, atol=1e-4)
    assert not torch.allclose(outputs["ONNX Runtime, int8"], exact, atol=1e-4)
    for output in outputs.values():
        assert (output.argmax(1) == labels).float().mean() > 0.8


@pytest.mark.slow
def test_a_dataframe_is_predicted_in_int8(orca_spark):
    found = predict_with_orca.main(["--epochs", "6"])
    assert found["own"] > 0.9
    assert found["agreement"] > 0.95


# Another program of examples has the same name, so it cannot be imported.
def transfer_learning(*argv) -> dict:
    program = runpy.run_path(str(NANO / "training" / "transfer_learning.py"))
    return program["main"](["--drawn", "24", "--size", "32", "--epochs", "1", *argv])


@pytest.mark.slow
def test_a_head_learns_on_a_trunk_that_learned_other_shapes():
    found = transfer_learning()
    assert 0 <= found["accuracy"] <= 1
    assert found["report"].startswith("backbone: openvino_bf16, relative error")
    assert found["settings"][-1] == "frozen prefix openvino_bf16"


@pytest.mark.slow
def test_a_head_learns_on_photographs_and_a_trunk_of_a_file(data_dir, tmp_path):
    from bigdl.nano.pytorch.vision.models import resnet18

    weights = tmp_path / "resnet18.pth"
    torch.save(resnet18(include_top=True).state_dict(), weights)
    folders = ["--data-dir", str(data_dir / "cats-dogs"), "--images", "12"]
    found = transfer_learning(*folders, "--weights", str(weights), "--precision", "fp32")
    assert 0 <= found["accuracy"] <= 1
    assert found["report"] == "backbone: eager, relative error 0"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NANO / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    check = "assert right > 0.9, right\nassert same < 1e-5, same"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
