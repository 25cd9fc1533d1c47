"""Every public class and function of Orca and Friesian has an example, and all examples run."""

import contextlib

import pytest
from docstring_examples import check, pages_below

from bigdl.orca import init_orca_context, stop_orca_context

SLOW = (
    "bigdl.dllib.nnframes",
    "bigdl.friesian.feature",
    "bigdl.mlflow.keras",
    "bigdl.orca.automl",
    "bigdl.orca.data",
    "bigdl.orca.learn.nnframes",
    "bigdl.orca.learn.tf2",
    "bigdl.orca.ray",
)
"""Pages whose examples train by Spark or Ray or import TensorFlow in workers, or are many."""


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory):
    """One for all processes: a relative path of an example means the same to those of Spark."""
    stop_orca_context()
    with contextlib.chdir(tmp_path_factory.mktemp("examples")):
        init_orca_context("local", cores=2)
        yield
        stop_orca_context()


def pages() -> list:
    names = pages_below(
        "bigdl.common",
        "bigdl.dllib",
        "bigdl.friesian",
        "bigdl.llm",
        "bigdl.mlflow",
        "bigdl.orca",
        "bigdl.testing",
    )
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


@pytest.mark.slow_cases(
    "bigdl.common.errors",
    "bigdl.dllib.nncontext",
    "bigdl.dllib.utils",
    "bigdl.friesian.feature.pipeline",
    "bigdl.friesian.automl",
    "bigdl.friesian.stream_training",
    "bigdl.friesian.baselines",
    "bigdl.friesian.metrics",
    "bigdl.friesian.splitters",
    "bigdl.friesian.models",
    "bigdl.friesian.serving",
    "bigdl.llm",
    "bigdl.mlflow",
    "bigdl.mlflow.pytorch",
    "bigdl.orca.data.pandas",
    "bigdl.orca.data.utils",
    "bigdl.orca.engine",
    "bigdl.orca.inference",
    "bigdl.orca.learn.openvino",
    "bigdl.orca.learn.optimizers",
    "bigdl.orca.learn.pytorch",
    "bigdl.orca.learn.utils",
)
@pytest.mark.parametrize("page", pages())
def test_examples_run(page):
    check(page)
