"""Every public class and function of Orca and Friesian has an example, and all examples run."""

import contextlib

import pytest
from docstring_examples import check, pages_below

from bigdl.orca import init_orca_context, stop_orca_context


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory):
    """One for all processes: a relative path of an example means the same to those of Spark."""
    stop_orca_context()
    with contextlib.chdir(tmp_path_factory.mktemp("examples")):
        init_orca_context("local", cores=2)
        yield
        stop_orca_context()


@pytest.mark.parametrize(
    "page", pages_below("bigdl.common", "bigdl.dllib", "bigdl.friesian", "bigdl.orca")
)
def test_examples_run(page):
    check(page)
