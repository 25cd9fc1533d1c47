"""The programs and the notebook of examples/nano/automl, on as little as shows what they do."""

import importlib.util
from pathlib import Path

import nbformat
import optuna
import pytest
import torch
from nbclient import NotebookClient

from bigdl.nano.automl import hpo_config

AUTOML = Path(__file__).parents[2] / "examples" / "nano" / "automl"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the notebook: others use the cores, too
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)
    torch.set_num_threads(threads)
    hpo_config.reset()


def program(name):
    spec = importlib.util.spec_from_file_location(name, AUTOML / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_are_searched_and_the_search_goes_on(tmp_path):
    argv = ["--trials", "4", "--epochs", "2", "--storage", f"sqlite:///{tmp_path}/digits.db"]
    search_digits = program("search_digits")
    first = search_digits.main(argv)
    second = search_digits.main([*argv, "--resume"])

    assert len(first["table"]) == 4
    assert len(second["table"]) == 8
    assert second["table"][:4].equals(first["table"])
    assert set(second["table"]["activation"]) <= {"ReLU", "Tanh"}
    assert second["best"] >= first["best"] > 0.5


@pytest.mark.slow
def test_a_keras_model_is_searched():
    found = program("search_keras").main(["--trials", "2", "--epochs", "1"])

    assert set(found["parameters"]) == {"filters", "hidden:units", "learning_rate", "batch_size"}
    assert 0.1 < found["best"] <= 1.0


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(AUTOML / "search.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    check = "assert len(table) == 8 and accuracy > 0.6 and chart is not None, accuracy"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
