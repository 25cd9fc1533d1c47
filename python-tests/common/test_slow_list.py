"""The list of tests that are slow names tests that exist."""

import pytest
from slow_list import COLLECTED, TESTS, listed


def test_every_listed_test_is_there(request):
    assert list(listed()) == sorted(listed())
    if any("::" in argument for argument in request.config.args):
        pytest.skip("files were not collected whole")
    collected = request.config.stash[COLLECTED]
    files = {name.partition("::")[0] for name in collected}

    def is_there(name: str) -> bool:
        file = name.partition("::")[0]
        return name in collected or (file not in files and (TESTS / file).is_file())

    assert [name for name in listed() if not is_there(name)] == []
