"""Type annotations of public objects, checked by mypy on user programs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("typed_program.py")
WRONG = """
import numpy as np
from bigdl.orca.learn.pytorch.estimator import PyTorchEstimator
def predict(estimator: PyTorchEstimator, x: np.ndarray) -> None:
    estimator.predict(x, batchsize=3)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    wrong = tmp_path_factory.mktemp("program") / "wrong.py"
    wrong.write_text(WRONG)
    # In a process of its own: mypy leaves millions of objects, which each collection would visit.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]
    run = subprocess.run([*command, PROGRAM, wrong], capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


@pytest.mark.slow
def test_types_of_the_readme_s_objects(report):
    revealed = re.findall(r':(\d+): note: Revealed type is "(.*)"', report)
    types = {int(line): re.sub(r"\b(\w+\.)+(?=\w)", "", revealed) for line, revealed in revealed}
    source = PROGRAM.read_text().splitlines()
    expected = {
        number: line.rpartition("  # ")[2]
        for number, line in enumerate(source, 1)
        if line.strip().startswith("reveal_type(")
    }
    assert types == expected, report


@pytest.mark.slow
def test_a_wrong_keyword_of_predict_is_an_error(report):
    assert re.search(r'wrong\.py:\d+: error: Unexpected keyword argument "batchsize"', report)
