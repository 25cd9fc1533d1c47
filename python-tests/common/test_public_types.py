"""An editor knows the types of what users hold: mypy reads a program of theirs."""

import re
from pathlib import Path

from mypy import api

PROGRAM = Path(__file__).with_name("typed_program.py")


def test_types_of_the_readme_s_objects():
    report, errors, _ = api.run(["--config-file", "pyproject.toml", str(PROGRAM)])
    revealed = re.findall(r':(\d+): note: Revealed type is "(.*)"', report)
    types = {int(line): re.sub(r"\b(\w+\.)+(?=\w)", "", revealed) for line, revealed in revealed}
    source = PROGRAM.read_text().splitlines()
    expected = {
        number: line.rpartition("  # ")[2]
        for number, line in enumerate(source, 1)
        if line.strip().startswith("reveal_type(")
    }
    assert types == expected, report + errors


def test_a_wrong_keyword_of_predict_is_an_error(tmp_path):
    program = tmp_path / "wrong.py"
    program.write_text(
        "import numpy as np\n"
        "from bigdl.orca.learn.pytorch.estimator import PyTorchEstimator\n"
        "def predict(estimator: PyTorchEstimator, x: np.ndarray) -> None:\n"
        "    estimator.predict(x, batchsize=3)\n"
    )
    report, _, status = api.run(["--config-file", "pyproject.toml", str(program)])
    assert status == 1
    assert 'Unexpected keyword argument "batchsize"' in report
