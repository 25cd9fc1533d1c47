"""Time limits: defined in one module, and in their required order."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from bigdl.common import timeouts
from bigdl.orca.cluster import supervisor

SRC = Path(__file__).resolve().parents[2] / "src" / "bigdl"
ELSEWHERE = (Path(timeouts.__file__), Path(supervisor.__file__))  # a script without the package
MEASURED = (  # of what is timed: no limits
    *("_LEAST_S", "_LEAST_CALL_S", "_RACE_S", "_LEAST_SECONDS"),
    *("_FIRST_START_S", "_WORTH_S"),
)


@pytest.mark.parametrize("limits", timeouts.ORDERS, ids=str)
def test_limits_grow_in_their_order(limits):
    assert all(first < second for first, second in pairwise(limits))


def test_the_supervisor_ends_what_it_runs_before_ray_is_given_up():
    limits = supervisor.TICK_S, supervisor.GRACE_S, supervisor.STOP_S, timeouts.RAY_SHUTDOWN_S
    assert all(first < second for first, second in pairwise(limits))


def test_every_limit_says_its_reason():
    lines = Path(timeouts.__file__).read_text().splitlines()
    limits = [n for n, line in enumerate(lines) if re.match(r"\w+_S = ", line)]
    assert limits
    assert all("  # " in lines[n] or lines[n - 1].startswith("# ") for n in limits)


def test_limits_stand_in_one_module():
    pattern = re.compile(r"^(\w*_(?:S|SECONDS)) = \d", re.MULTILINE)
    others = [
        f"{path.relative_to(SRC)}: {name}"
        for path in SRC.rglob("*.py")
        if path not in ELSEWHERE and not path.is_relative_to(SRC / "testing")
        for name in pattern.findall(path.read_text())
        if name not in MEASURED
    ]
    assert others == []
