"""``backend="horovod"``: where its workers are, and what is said where Horovod is not usable."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import ray_models as rays
from engine_cases import HAS_HOROVOD
from refusals import refused

from bigdl.common.errors import MissingExtraError
from bigdl.orca.engine import SparkEngine
from bigdl.orca.learn.backends import BACKENDS

SCRIPT = Path(__file__).parents[3] / "scripts" / "install-horovod.sh"


def test_without_horovod_its_script_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    expected = r"^horovod is not installed; run scripts/install-horovod.sh .*backend=\"spark\""
    with pytest.raises(MissingExtraError, match=expected) as error:
        rays.estimator(backend="horovod")
    assert "\n" not in str(error.value)
    assert SCRIPT.exists()


def test_a_horovod_without_its_part_for_torch_is_refused(monkeypatch):
    package, part = types.ModuleType("horovod"), types.ModuleType("horovod.torch")
    package.torch = part
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", part)
    with refused("version-unsupported"):
        rays.estimator(backend="horovod")


def test_its_workers_are_on_ray_where_the_program_has_one(monkeypatch):
    for connected in (False, True):
        monkeypatch.setattr("bigdl.orca.cluster.ray.is_connected", lambda c=connected: c)
        assert BACKENDS["horovod"].is_on_ray() is connected
        assert BACKENDS["ray"].is_on_ray()
        assert not BACKENDS["spark"].is_on_ray()
        assert not BACKENDS["bigdl"].is_on_ray()


def test_the_script_explains_itself_and_names_what_is_missing(tmp_path):
    shown = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert "Build Horovod for the installed torch" in shown.stdout
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    refused = subprocess.run(
        [SCRIPT, "--python", python], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("install-horovod.sh: ")


@pytest.mark.horovod
@pytest.mark.skipif(not HAS_HOROVOD, reason="no Horovod, in any suite: scripts/install-horovod.sh")
def test_workers_know_their_place_in_horovod(orca_spark):
    """Users ask Horovod itself, in callbacks and creators that run while it is up."""
    from bigdl.runtime.collectives.horovod import HorovodSync

    def program(worker):
        import horovod.torch as hvd

        sync = HorovodSync(worker)
        sync.start()
        return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()]

    found = SparkEngine().run(program, num_workers=2)
    assert found == [[0, 2, 0, 2, 1], [1, 2, 1, 2, 1]]
