"""The examples in the docstrings of all public objects, as the pages of ``docs/api`` name them."""

import contextlib
import doctest
import importlib
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs" / "api"
NAMED = re.compile(
    r"^\.\. auto(module|class|exception|function):: (\S+)((?:\n +:.*)*)", re.MULTILINE
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class MethodFinder(doctest.DocTestFinder):
    """Finds also the examples of functions behind a decorator such as ``hide_frames``."""

    def _from_module(self, module: ModuleType, value: Any) -> bool:
        return super()._from_module(module, inspect.unwrap(value))


ALL = MethodFinder(exclude_empty=True)
ONE = MethodFinder(exclude_empty=True, recurse=False)


def pages_below(*packages: str) -> list[str]:
    """The pages whose modules lie in these packages."""
    names = [page.stem for page in sorted(PAGES.glob("bigdl.*.md"))]
    return [n for n in names if any(f"{n}.".startswith(f"{own}.") for own in packages)]


def check(page: str) -> None:
    """Run the examples of all modules, classes and functions of a page, and of their methods.

    Each docstring is a program of its own, as a reader would run it: what it leaves in the current
    directory is removed.
    """
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    modules, objects = _named(page)
    tests = [test for name, module in modules.items() for test in _tests(ONE, name, module)]
    for full, value in objects.items():
        if not _tests(ONE, full, value):
            said.append(f"{full} has no example: add a section Examples to its docstring\n")
    for full, value in _with_bases(objects).items():
        tests += _tests(ALL, full, value)
    for test in tests:
        with _clean_directory():
            runner.run(test, out=said.append)
    if said:
        pytest.fail("".join(said), pytrace=False)


@contextlib.contextmanager
def _clean_directory() -> Iterator[None]:
    """Remove what is new in the current directory, in which Spark's processes may run, too."""
    before = set(Path().iterdir())
    yield
    for new in set(Path().iterdir()) - before:
        shutil.rmtree(new) if new.is_dir() else new.unlink()


def _tests(finder: doctest.DocTestFinder, full: str, value: Any) -> list[doctest.DocTest]:
    return [test for test in finder.find(value, full, globs={}) if test.examples]


def _named(page: str) -> tuple[dict[str, ModuleType], dict[str, Any]]:
    """Modules of a page, and its classes and functions by their full names, each once.

    Public are the names in ``__all__`` of a module; where it has none, the classes and functions
    that are defined in it.
    """
    modules, objects = {}, {}
    for kind, name, options in NAMED.findall((PAGES / f"{page}.md").read_text()):
        names = [name]
        if kind == "module":
            modules[name] = importlib.import_module(name)
            names = [] if ":no-members:" in options else _public(modules[name])
        for full in names:
            place, _, last = full.rpartition(".")
            value = getattr(importlib.import_module(place), last)
            if inspect.isclass(value) or inspect.isfunction(value):
                objects.setdefault(value, full)
    return modules, {full: value for value, full in objects.items()}


def _public(module: ModuleType) -> Iterator[str]:
    own = getattr(module, "__all__", None)
    for name, value in vars(module).items():
        is_own = not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        if is_own if own is None else name in own:
            yield f"{module.__name__}.{name}"


def _with_bases(objects: dict[str, Any]) -> dict[str, Any]:
    """The objects, and the classes of the project that they inherit methods from."""
    names = {value: full for full, value in objects.items()}
    for value in objects.values():
        for base in inspect.getmro(value) if inspect.isclass(value) else ():
            if base.__module__.startswith("bigdl."):
                names.setdefault(base, f"{base.__module__}.{base.__qualname__}")
    return {full: value for value, full in names.items()}
