"""The Python listings of the README and of the pages in docs, checked and run as they are printed.

The listings of a page, in their order, are one program. It is the page with all other lines left
empty, so that line 70 of a program is line 70 of its page.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CLUSTERS = ROOT / "docs" / "clusters"  # whose programs need a cluster of their own
QUICK = {"docs/nano/runtime.md"}
SECONDS = 280


def listings(page: Path) -> list[str]:
    """Every Python listing of a page, on the lines that it has there."""
    found: list[list[str]] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    inside = False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            inside = line == "```python"
            if inside:
                found.append([""] * (number + 1))
        elif inside:
            found[-1].append(line)
    return ["\n".join(listing) + "\n" for listing in found]


def program(page: Path) -> str:
    """All listings of a page, as one program."""
    lines: list[str] = []
    for listing in listings(page):
        lines += listing.splitlines()[len(lines) :]
    return "\n".join(lines) + "\n"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


DOCS = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
PAGES = [page for page in sorted([README, *DOCS]) if listings(page)]


def test_programs_define_all_names_that_they_use(tmp_path):
    for page in PAGES:
        path = tmp_path / Path(name(page)).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(program(page), encoding="utf-8")
    options = ["--isolated", "--no-cache", "--select", "F821,F823", "--output-format", "json"]
    command = [sys.executable, "-m", "ruff", "check", *options, "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [
        f"{Path(one['filename']).relative_to(tmp_path.resolve()).with_suffix('.md')}:"
        f"{one['location']['row']}: {one['message']}"
        for one in json.loads(done.stdout)
    ]
    assert not found, "\n".join(found)
    assert done.returncode == 0, done.stderr


def imports(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of all that a program imports from BigDL."""
    for node in ast.walk(ast.parse(program(page), name(page))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bigdl":
            for alias in node.names:
                yield node.lineno, str(node.module), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "bigdl":
                    yield node.lineno, alias.name, ""


IMPORTER = """
import importlib, json, sys

for place, module, name in json.load(sys.stdin):
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(module + "." + name)
    except ImportError as error:
        print(f"{place}: {error}")
"""


@pytest.mark.slow
def test_programs_import_what_there_is():
    wanted = [
        (f"{name(page)}:{line}", module, imported)
        for page in PAGES
        for line, module, imported in imports(page)
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTER],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout, done.stdout


def run(text: str, folder: Path) -> str:
    """What a program prints in an empty folder; it neither fails nor shows a traceback."""
    (folder / "program.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback (most recent call last)" not in done.stdout + done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_of_training_in_the_readme_runs(tmp_path):
    printed = run(listings(README)[0], tmp_path)
    assert "'Accuracy': 0." in printed
    assert "|[" in printed.splitlines()[-5], printed
    assert "prediction" in printed


@pytest.mark.slow
def test_the_example_of_inference_in_the_readme_runs(tmp_path):
    assert run(listings(README)[1], tmp_path).startswith("tensor([")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=() if name(page) in QUICK else pytest.mark.slow)
        for page in PAGES
        if page != README and CLUSTERS not in page.parents
    ],
)
def test_a_page_runs(page, tmp_path):
    needed = {
        "docs/orca/hugging-face.md": ["transformers"],
        "docs/data/accelerate.md": ["accelerate"],
        "docs/data/hugging-face.md": ["transformers", "accelerate"],
    }
    for module in needed.get(name(page), ()):
        pytest.importorskip(module)
    run(program(page), tmp_path)
