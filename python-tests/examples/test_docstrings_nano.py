"""Every public name of Nano and of the loader of tables has an example, and all examples run."""

import pytest
from docstring_examples import check, pages_below


@pytest.mark.slow_cases(
    "bigdl.nano.automl",
    "bigdl.nano.openvino",
    "bigdl.nano.pytorch",
    "bigdl.nano.pytorch.vision",
    "bigdl.nano.serving",
    "bigdl.nano.tf.keras",
    "bigdl.nano.utils",
)
@pytest.mark.parametrize("page", pages_below("bigdl.nano", "bigdl.data"))
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(page)
