"""The names in docs/compat.md can be imported, and each kept name has a test."""

import importlib
import re
from pathlib import Path

import pytest

from bigdl.common.dropped import DROPPED

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "compat.md").read_text(encoding="utf-8")

# The test of each row that says "kept", by the beginning of its first cell.
KEPT = dict(
    line.rsplit(" | ", 1)
    for line in Path(__file__).with_name("kept_rows.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def rows():
    """Return the rows of all tables as lists of cells."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def is_kept(row):
    """Return True if a row, or the beginning of its second cell, says "kept"."""
    return len(row) == 3 and ("kept" in row[2].split(", ") or row[1].startswith("kept"))


KEPT_ROWS = [row[0] for row in rows() if is_kept(row)]


def test_each_row_that_is_kept_has_a_test_and_each_test_a_row():
    without = [row for row in KEPT_ROWS if not any(row.startswith(begin) for begin in KEPT)]
    assert without == [], "add the test of these rows to KEPT"
    assert [begin for begin in KEPT if not any(row.startswith(begin) for row in KEPT_ROWS)] == []


@pytest.mark.parametrize("test", sorted(set(KEPT.values())))
def test_a_test_that_is_named_exists(test):
    file, _, name = test.partition("::")
    assert f"def {name or 'test_'}" in (TESTS / file).read_text(encoding="utf-8")


def listed_names():
    """Return the modules and names that the page lists as existing."""
    gone = [line for line in PAGE.splitlines() if re.search(r"\| (dropped|removed) \|", line)]
    kept = [line for line in PAGE.splitlines() if line not in gone]
    names = set(re.findall(r"`(bigdl(?:\.\w+)+)", "\n".join(kept)))
    roots = tuple(f"{each}." for each in DROPPED)
    return sorted(name for name in names if not f"{name}.".startswith(roots))


@pytest.mark.parametrize("name", listed_names())
def test_a_name_of_the_page_is_there(name):
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        try:
            actual = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("bigdl"):
                pytest.skip(f"{error.name} is not installed")
            continue
        for attribute in parts[count:]:
            actual = getattr(actual, attribute)
        return
    pytest.fail(f"there is no {name}")


def test_the_modules_to_import_from_are_there():
    section = PAGE.split("## Imports")[1].split("\n## ")[0]
    for line in re.findall(r"^\| [^|]+ \| (.*) \|$", section, re.M):
        package = ""
        for token in re.findall(r"`([.\w]+)`", line):
            if token.startswith("bigdl."):
                package = name = token
            elif token.startswith("."):
                root = "bigdl.orca.learn" if token.startswith(".pytorch") else "bigdl.orca"
                package = name = root + token
            else:
                name = f"{package}.{token}"
            if name not in DROPPED:
                importlib.import_module(name)
