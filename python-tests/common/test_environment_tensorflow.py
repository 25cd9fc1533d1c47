"""Missing packages of Keras, and TensorFlow's output during its import."""

import os
import re
import subprocess
import sys

import pytest

from bigdl.common import environment
from bigdl.training.metrics import EvaluationMetrics


@pytest.mark.parametrize(
    ("missing", "program"),
    [
        ("keras", "from bigdl.nano.tf.keras import Model"),
        ("keras", "from bigdl.nano.utils.tf import patch_attrs"),
        ("tensorflow", "import bigdl.nano.automl.tf.keras"),
    ],
)
def test_a_package_of_keras_that_is_missing_is_named_with_its_extra(missing, program):
    code = f"import sys; sys.modules[{missing!r}] = None\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f"{missing} is not installed; run: pip install 'bigdl[nano,tf]'")


def test_lines_about_the_start_of_tensorflow_are_left_out_and_others_kept(capfd):
    pattern = re.compile(environment.LINE_OF_ABSL.format("IWE"), re.MULTILINE)
    with environment.filter_stderr(pattern):
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are ...\n")
        os.write(2, b"I0000 00:00:1795.16  4259 port.cc:153] oneDNN custom operations are on.\n")
        os.write(2, b"the program's own line\n")
        os.write(2, b"F0000 00:00:1795.16  4259 cpu_feature_guard.cc:1] The library needs AVX.\n")
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["the", "F0000"]


def test_figures_of_an_evaluation_are_found_by_the_names_of_a_fit():
    metrics = EvaluationMetrics(validation_loss=0.5)
    assert metrics["val_loss"] == metrics.get("val_loss") == 0.5
    assert "val_loss" in metrics
    assert "val_mae" not in metrics
    assert dict(metrics) == {"validation_loss": 0.5}
    with pytest.raises(KeyError, match="val_mae"):
        metrics["val_mae"]
