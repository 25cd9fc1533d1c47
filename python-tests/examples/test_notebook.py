"""The notebook, executed cell by cell in a kernel of its own."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "orca" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    check = "assert (accuracy, right) == (1.0, 600), (accuracy, right)"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
