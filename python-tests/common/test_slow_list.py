"""The list of tests that are slow names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_listed_test_is_there():
    lines = (TESTS / "slow_tests.txt").read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed == sorted(set(listed))
    for line in listed:
        path, _, names = line.partition("::")
        name = names.partition("[")[0].rpartition("::")[2]
        text = (TESTS / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {name}\(", text, re.MULTILINE), line
