"""The program examples/orca/parameter_layer.py, on little data."""

import contextlib

import numpy as np
import parameter_layer
import pytest

from bigdl.common.errors import UsageError


@pytest.fixture
def ray_beside_spark(orca_spark):
    """Ray, which the program starts, is stopped afterwards; Spark goes on."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
    yield
    from bigdl.orca.ray import OrcaRayContext

    with contextlib.suppress(UsageError):  # the program did not come that far
        OrcaRayContext.get(initialize=False).stop()


@pytest.mark.slow
def test_all_ways_of_exchanging_gradients_train_the_same_model(ray_beside_spark):
    found = parameter_layer.main(["--rows", "200", "--epochs", "3", "--batch-size", "50"])
    losses = {name: run["losses"] for name, run in found.items()}
    assert losses["bigdl, shuffle"] == losses["bigdl, barrier"]
    for name in ("spark", "ray"):
        assert np.allclose(losses["bigdl, shuffle"], losses[name], rtol=1e-4), name
    assert losses["spark"][-1] < losses["spark"][0]
    for name in ("bigdl, shuffle", "bigdl, barrier"):
        phases = found[name]["phases"]
        assert set(phases) == set(parameter_layer.PHASES.values())
        assert sum(phases.values()) - phases["whole step"] <= phases["whole step"]
