#!/usr/bin/env python3
"""Execute the notebooks of the tutorials and write them with their outputs as pages of the site.

python scripts/notebook_pages.py                 # all
python scripts/notebook_pages.py nano/quickstart # those with one of these words in their path

The notebooks in examples have no outputs. A test compares the code of each page with its notebook.
"""

import argparse
import base64
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "orca/quickstart.ipynb": "orca",
    "orca/keras/quickstart.ipynb": "keras",
    "nano/quickstart.ipynb": "nano",
    "nano/automl/search.ipynb": "search",
    "friesian/recommender.ipynb": "recommender",
}
"""Notebooks in examples, and the names of their pages in docs/notebooks."""
NOISE = re.compile(
    r"^(WARNING|Using Spark's|Setting default log|To adjust logging|\d\d/\d\d/\d\d ).*\n?", re.M
)

WIDE = 110
"""Characters of a line that fits on a usual screen."""


def code_of(page: str) -> list[str]:
    """Return the code cells of a page."""
    return re.findall(r"^```\{code-block\} python\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)


def listing(text: str) -> str:
    """Return a listing of a text; wide ones have a smaller font."""
    if max(map(len, text.splitlines())) <= WIDE:
        return f"```text\n{text}\n```"
    return f"```{{code-block}} text\n:class: wide\n\n{text}\n```"


def output_text(data: Mapping[str, str], name: str, folder: Path) -> str:
    """Return the Markdown of an output; write a picture to a file."""
    if "text/html" in data and not data["text/html"].startswith("<pre"):  # rich has fixed colours
        return f'```{{raw}} html\n<div class="output">\n{data["text/html"]}\n</div>\n```'
    if "image/svg+xml" in data:
        return f'```{{raw}} html\n<div class="output">\n{data["image/svg+xml"]}\n</div>\n```'
    if "image/png" in data:
        (folder / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
        return f"![Output of the cell]({name}.png)"
    return listing(data["text/plain"].rstrip())


def page_of(notebook: Mapping[str, object], path: str, name: str, folder: Path) -> str:
    """Return the page of an executed notebook; write its pictures to the folder."""
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["id"] == "install":
            continue
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            if not number:
                parts.append(f"This page is the notebook `examples/{path}` with its outputs.")
            continue
        parts.append(f"```{{code-block}} python\n{cell['source']}\n```")
        printed, shown = "", []
        for index, output in enumerate(cell["outputs"]):
            if output.get("name") == "stdout":
                printed += output["text"]
            elif is_shown(output):
                shown.append(output_text(output["data"], f"{name}-{number}-{index}", folder))
        if text := NOISE.sub("", printed).strip("\n"):
            parts.append(listing(text))
        parts += shown
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def is_shown(output: Mapping[str, object]) -> bool:
    """Return False for what is written to stderr, and for the bars of a fit."""
    if output["output_type"] == "execute_result":
        return True
    return output["output_type"] == "display_data" and set(output["data"]) != {"text/plain"}


def execute(path: Path) -> Mapping[str, object]:
    """Return a notebook with its outputs, executed in an empty folder."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        return NotebookClient(notebook, timeout=600, resources=resources).execute()


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of paths; default: all")
    words = parser.parse_args().words
    folder = ROOT / "docs" / "notebooks"
    folder.mkdir(exist_ok=True)
    for path, name in PAGES.items():
        if words and not any(word in path for word in words):
            continue
        notebook = execute(ROOT / "examples" / path)
        for old in folder.glob(f"{name}-*.png"):
            old.unlink()
        page = page_of(notebook, path, name, folder)
        (folder / f"{name}.md").write_text(page, encoding="utf-8")
        print(folder / f"{name}.md", len(page), flush=True)


if __name__ == "__main__":
    main()
