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
def listed() -> dict[str, None]:
    """Their names, in the order of the file."""
    lines = (TESTS / "slow_tests.txt").read_text(encoding="utf-8").splitlines()
    return dict.fromkeys(line for line in lines if line and not line.startswith("#"))
