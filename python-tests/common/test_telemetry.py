"""Dependencies send no usage statistics while BigDL uses them."""

import os
import subprocess
import sys
import textwrap

import pytest
from outgoing import attempts, environment, files_at_home

from bigdl.common import telemetry

_CONVERSIONS = """
import torch
from bigdl.nano.pytorch import InferenceOptimizer
x, model = torch.rand(4, 3), torch.nn.Linear(3, 1)
for accelerator in ("openvino", "onnxruntime"):
    InferenceOptimizer.trace(model, input_sample=x, accelerator=accelerator)(x)
InferenceOptimizer.quantize(model, accelerator="openvino", calib_data=x)(x)
"""

_OTHERS = """
import mlflow, huggingface_hub  # the program's own
from bigdl.common.errors import require
require("mlflow", "mlflow")
require("transformers", "nano")
from mlflow.telemetry import get_telemetry_client
assert get_telemetry_client() is None
assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
huggingface_hub.utils.send_telemetry("a topic")
"""


def _run(program, folder, **variables):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=folder,
        env={**environment(folder), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_conversions_send_nothing_and_leave_no_file_at_home(tmp_path):
    pytest.importorskip("openvino_telemetry")
    _run(_CONVERSIONS, tmp_path)
    assert attempts(tmp_path) == []
    assert files_at_home(tmp_path) == []


@pytest.mark.slow
def test_what_a_program_imported_before_sends_nothing_in_our_calls(tmp_path):
    pytest.importorskip("openvino_telemetry")
    before = (
        "import openvino, onnxruntime, nncf, openvino_telemetry.main as main\n"
        "sent = []\n"
        "main.TelemetrySender.send = lambda self, backend, message: sent.append(message)\n"
    )
    _run(f"{before}{_CONVERSIONS}\nassert sent == [], sent", tmp_path)


def test_mlflow_and_hugging_face_send_nothing(tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("transformers")
    _run(_OTHERS, tmp_path)
    assert attempts(tmp_path) == []


def test_a_switch_leaves_the_dependencies_alone(tmp_path):
    pytest.importorskip("openvino_telemetry")
    program = "from bigdl.common.errors import require\nrequire('openvino', 'nano')"
    _run(program, tmp_path, BIGDL_DEPENDENCY_TELEMETRY="1")
    assert any(name.startswith("intel/") for name in files_at_home(tmp_path))


def test_variables_of_the_environment_hold_for_the_import_only(monkeypatch):
    for name in telemetry.OPT_OUT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")  # the user's own word
    before = dict(os.environ)
    with (
        telemetry.imported_without_telemetry("onnxruntime"),
        telemetry.imported_without_telemetry("ray"),
    ):
        assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "0"
    assert dict(os.environ) == before


def test_with_the_switch_no_variable_is_set(monkeypatch):
    monkeypatch.setenv(telemetry.SWITCH, "1")
    before = dict(os.environ)
    with telemetry.imported_without_telemetry("onnxruntime"):
        assert dict(os.environ) == before
