#!/usr/bin/env python3
"""Write the address of the repository to setup.py and to the notebooks.

python scripts/set_repository.py https://github.com/owner/bigdl
python scripts/set_repository.py ''                           # remove it

setup.py gets it as project URL, from which the site takes its links to the repository, Colab and
Binder. The notebooks that need nothing else get a cell that installs BigDL where it is missing, as
in Colab.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {
    "orca/quickstart.ipynb": "orca,java",
    "orca/keras/quickstart.ipynb": "orca,java,nano,tf",
    "nano/quickstart.ipynb": "nano",
    "nano/automl/search.ipynb": "nano",
    "friesian/recommender.ipynb": "friesian,java",
}
"""Notebooks in examples that are a single file, and the extras that they need."""
CELL = "install"


def install_cell(address: str, extras: str) -> dict[str, object]:
    """Return the cell that installs BigDL in a kernel without it."""
    lines = [
        "# Colab and other kernels without BigDL: install it from its repository.",
        "from importlib.util import find_spec",
        "",
        'if find_spec("bigdl") is None:',
        f'    %pip install --quiet "bigdl[{extras}] @ git+{address}" scikit-learn',
    ]
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": CELL,
        "metadata": {"tags": [CELL]},
        "outputs": [],
        "source": [f"{line}\n" for line in lines[:-1]] + lines[-1:],
    }


def set_notebook(path: Path, address: str, extras: str) -> None:
    """Replace the cell after the title that installs BigDL; remove it if the address is empty."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell.get("id") != CELL]
    if address:
        cells.insert(1, install_cell(address, extras))
    notebook["cells"] = cells
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def set_repository(root: Path, address: str) -> None:
    """Write the address to setup.py and the notebooks of a checkout."""
    path = root / "setup.py"
    text = re.sub(r"    project_urls=\{[^}]*\},\n", "", path.read_text(encoding="utf-8"))
    if address:
        before = '    license_expression="Apache-2.0",\n'
        line = f'    project_urls={{"Source": "{address}"}},\n'
        text = text.replace(before, line + before)
    path.write_text(text, encoding="utf-8")
    for name, extras in EXTRAS.items():
        set_notebook(root / "examples" / name, address, extras)


def main() -> None:
    """Write the address that the command line has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="https address without .git; empty for none")
    address = parser.parse_args().address.rstrip("/").removesuffix(".git")
    if address and not re.fullmatch(r"https?://[^\s\"]+", address):
        raise SystemExit(f"expected an address like https://github.com/owner/name, got {address!r}")
    set_repository(ROOT, address)


if __name__ == "__main__":
    main()
