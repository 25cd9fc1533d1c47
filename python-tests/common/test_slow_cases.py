"""Existing slow cases, and unique names of test files."""

from collections import Counter
from pathlib import Path

import pytest
from slow_cases import UNSEEN


def test_cases_that_are_named_as_slow_exist(request):
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some cases were collected")
    unseen = request.config.stash.get(UNSEEN, {})
    assert {test: cases for test, cases in unseen.items() if cases} == {}


def test_files_of_tests_have_names_of_their_own():
    """Check unique names: pytest would collect only one of two equal ones."""
    files = Path(__file__).resolve().parents[1].rglob("test_*.py")
    assert [name for name, times in Counter(file.name for file in files).items() if times > 1] == []
