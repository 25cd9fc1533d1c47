"""The notebook of examples/orca/keras, executed cell by cell in a kernel of its own."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.timeout(900)

FOLDER = Path(__file__).parents[2] / "examples" / "orca" / "keras"
CHECK = """
assert accuracy > 0.85, accuracy
assert min(accuracies.values()) > 0.8, accuracies
assert abs(accuracies["keras"] - accuracies["openvino"]) < 0.01, accuracies
"""


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(FOLDER / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    notebook.cells.append(nbformat.v4.new_code_cell(CHECK))
    client = NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
