"""Cases of parametrized tests that are slow, as their mark `slow_cases` names them."""

import pytest

UNSEEN = pytest.StashKey[dict[str, set[str]]]()
"""Cases that a test names and that were not collected, by test."""


def mark_slow_case(item: pytest.Item) -> None:
    """Mark a case as slow if its test names it."""
    named = {case for mark in item.iter_markers("slow_cases") for case in mark.args}
    if named:
        case, test = item.callspec.id, item.nodeid.partition("[")[0]
        item.config.stash.setdefault(UNSEEN, {}).setdefault(test, set(named)).discard(case)
        if case in named:
            item.add_marker(pytest.mark.slow)
