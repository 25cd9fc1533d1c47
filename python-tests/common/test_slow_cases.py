"""The cases that tests name as slow exist."""

import pytest
from slow_cases import UNSEEN


def test_cases_that_are_named_as_slow_exist(request):
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some cases were collected")
    unseen = request.config.stash.get(UNSEEN, {})
    assert {test: cases for test, cases in unseen.items() if cases} == {}
