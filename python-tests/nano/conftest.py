"""Fixtures of the tests of Nano: choices that measurements make are kept apart from the user's."""

from __future__ import annotations

import pytest

from bigdl.nano.acceleration import autotune
from bigdl.nano.acceleration.autotune import AutotuneResult
from bigdl.nano.acceleration.median_interval import MedianInterval


@pytest.fixture(autouse=True)
def own_choices(tmp_path_factory, monkeypatch):
    """Keep choices in a directory of this test."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory / "bigdl" / "choices"


@pytest.fixture
def kept(monkeypatch):
    """Return a function that lets a way be the one that an earlier measurement has chosen."""

    def keep(name):
        found = AutotuneResult(name, {name: MedianInterval.of([2.0])})
        monkeypatch.setattr(autotune, "load_result", lambda key: found)

    return keep
