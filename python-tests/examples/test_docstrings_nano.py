"""Every public class and function of Nano has an example, and all examples run."""

import pytest
from docstring_examples import check, pages_below

SLOW = {"bigdl.nano.utils"}
PAGES = [
    pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())
    for page in pages_below("bigdl.nano")
]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(page)
