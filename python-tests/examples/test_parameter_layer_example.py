"""The program examples/orca/parameter_layer.py, on little data."""

import numpy as np
import parameter_layer


def test_all_ways_of_exchanging_gradients_train_the_same_model(orca_spark):
    found = parameter_layer.main(["--rows", "200", "--epochs", "3", "--batch-size", "50"])
    losses = {name: run["losses"] for name, run in found.items()}
    assert losses["bigdl, shuffle"] == losses["bigdl, barrier"]
    assert np.allclose(losses["bigdl, shuffle"], losses["spark"], rtol=1e-4)
    assert losses["spark"][-1] < losses["spark"][0]
    for name in ("bigdl, shuffle", "bigdl, barrier"):
        phases = found[name]["phases"]
        assert set(phases) == set(parameter_layer.PHASES.values())
        assert sum(phases.values()) - phases["whole step"] <= phases["whole step"]
