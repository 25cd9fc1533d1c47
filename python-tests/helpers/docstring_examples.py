"""The examples in the docstrings of all public objects, as the pages of ``docs/api`` name them."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs" / "api"
NAMED = re.compile(r"^\.\. auto(module|class|function):: (\S+)", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def pages_below(*packages: str) -> list[str]:
    """The pages whose modules lie in these packages."""
    names = [page.stem for page in sorted(PAGES.glob("bigdl.*.md"))]
    return [n for n in names if any(f"{n}.".startswith(f"{own}.") for own in packages)]


def check(page: str) -> None:
    """Run the examples of all classes and functions of a page, and of their methods.

    Each docstring is a program of its own, as a reader would run it in an empty directory.
    """
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for full, value in _objects(page).items():
        tests = doctest.DocTestFinder(exclude_empty=True).find(value, full, globs={})
        tests = [test for test in tests if test.examples]
        if not tests:
            said.append(f"{full} has no example: add a section Examples to its docstring\n")
        for test in tests:
            runner.run(test, out=said.append)
    if said:
        pytest.fail("".join(said), pytrace=False)


def _objects(page):
    """Classes and functions by their full names, each once."""
    objects = {}
    for kind, name in NAMED.findall((PAGES / f"{page}.md").read_text()):
        names = [name]
        if kind == "module":
            module = importlib.import_module(name)
            own = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
            names = [f"{name}.{n}" for n in own]
        for full in names:
            place, _, last = full.rpartition(".")
            value = getattr(importlib.import_module(place), last)
            if inspect.isclass(value) or inspect.isfunction(value):
                objects.setdefault(value, full)
    return {full: value for value, full in objects.items()}
