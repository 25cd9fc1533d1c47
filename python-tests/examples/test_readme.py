"""The examples of the README, run as a user would run them."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def run(number, tmp_path):
    codes = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "example.py").write_text(codes[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_example_of_inference_runs(tmp_path):
    assert run(1, tmp_path).stdout.startswith("tensor([")


def test_the_example_of_training_runs(tmp_path):
    done = run(0, tmp_path)
    assert "'Accuracy': tensor(" in done.stdout
    assert "|[" in done.stdout.splitlines()[-5], done.stdout
    assert "prediction" in done.stdout
