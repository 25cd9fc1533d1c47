"""The list of tests that are slow names tests that exist."""

import re

from slow_list import COLLECTED, TESTS, listed


def test_every_listed_test_is_there(request):
    assert listed() == sorted(set(listed()))
    collected = request.config.stash[COLLECTED]
    some = any("::" in argument for argument in request.config.args)
    whole = set() if some else {name.partition("::")[0] for name in collected}
    for name in listed():
        path, _, test = name.partition("::")
        if path in whole:
            assert name in collected
        else:
            function = test.partition("[")[0].rpartition("::")[2]
            text = (TESTS / path).read_text(encoding="utf-8")
            assert re.search(rf"^ *def {function}\(", text, re.MULTILINE), name
