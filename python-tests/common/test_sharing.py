"""Assignment of test files to processes of pytest-xdist."""

import pytest
import sharing

KINDS = {"a": "", "k1": "tensorflow", "r1": "ray", "k2": "tensorflow", "r2": "ray", "b": ""}


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    monkeypatch.setattr(sharing, "started_by", KINDS.get)


def test_files_that_start_the_same_are_run_by_one_process():
    left, owners, ran = list(KINDS), {}, {"one": [], "two": []}
    for runner in ("one", "two") * 3:
        ran[runner].append(sharing.next_file(left, runner, owners))
        left.remove(ran[runner][-1])
    assert ran == {"one": ["a", "r1", "r2"], "two": ["k1", "k2", "b"]}


def test_at_the_end_any_process_helps():
    owners = {"tensorflow": "one"}
    assert sharing.next_file(["k1", "k2"], "two", owners) == "k1"
    assert owners == {"tensorflow": "one"}
