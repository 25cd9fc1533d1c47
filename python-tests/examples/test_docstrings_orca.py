"""Every public class and function of Orca and Friesian has an example, and all examples run."""

import pytest
from docstring_examples import check, pages_below


@pytest.mark.parametrize(
    "page", pages_below("bigdl.common", "bigdl.dllib", "bigdl.friesian", "bigdl.orca")
)
def test_examples_run(page, tmp_path, monkeypatch, orca_spark):
    monkeypatch.chdir(tmp_path)
    check(page)
