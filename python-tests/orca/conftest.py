"""Fixtures that run a test once for every engine, or for every way in which gradients meet."""

import pytest
from engine_cases import ENGINES, WAYS


@pytest.fixture(scope="module", params=ENGINES)
def engine_way(request, orca_spark):
    """Every engine in turn, beside a local Spark; an engine does not see how gradients meet."""
    request.param.prepare()
    return request.param


@pytest.fixture(scope="module", params=WAYS)
def way(request, orca_spark):
    """Every engine and every way in which gradients meet on it, beside a local Spark."""
    request.param.prepare()
    return request.param
