"""The programs of examples/orca/ray, on little data."""

import sys
from pathlib import Path

import pytest
import ray_models as rays

pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")

sys.path.append(str(Path(__file__).parents[3] / "examples" / "orca" / "ray"))


@pytest.fixture(autouse=True)
def active():
    rays.active_ray()


@pytest.mark.slow
def test_the_quickstart_learns():
    import ray_quickstart

    found = ray_quickstart.main(["--rows", "400", "--epochs", "4"])
    assert found["losses"][-1] < found["losses"][0]
    assert found["error"] == pytest.approx(float(found["figures"]["MAE"]), rel=1e-4)


@pytest.mark.slow
def test_both_parameter_servers_learn():
    import parameter_server

    found = parameter_server.main(["--steps", "60"])
    assert set(found) == set(parameter_server.WAYS)
    assert min(found.values()) > 0.8
