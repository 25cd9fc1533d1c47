"""Existing slow cases, and unique names of test files."""

import os
from collections import Counter
from pathlib import Path

import pytest
from slow_cases import UNSEEN


def test_cases_that_are_named_as_slow_exist(request):
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some cases were collected")
    unseen = request.config.stash.get(UNSEEN, {})
    assert {test: cases for test, cases in unseen.items() if cases} == {}


def test_modules_of_tests_have_unique_names():
    """Check the names of modules on `sys.path`: the first of two equal ones is imported."""
    root = Path(__file__).resolve().parents[2]
    tests = [file.name for file in (root / "python-tests").rglob("*.py")]
    programs = {name for part in ("examples", "benchmarks") for name in os.listdir(root / part)}
    programs |= {file.name for file in (root / "examples").rglob("*.py")}
    shared = {name for name, times in Counter(tests).items() if times > 1 or name in programs}
    assert shared - {"conftest.py", "__init__.py"} == set()
