"""The tests that `slow_tests.txt` marks as slow."""

import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COLLECTED = pytest.StashKey[set[str]]()


def name_of(item: pytest.Item) -> str:
    """A test as the list names it."""
    path = item.path.relative_to(TESTS).as_posix()
    return f"{path}::{item.nodeid.partition('::')[2]}"


@functools.cache
def listed() -> list[str]:
    """The names in the file, in its order."""
    lines = (TESTS / "slow_tests.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
