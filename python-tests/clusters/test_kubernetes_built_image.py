"""Programs on a real Kubernetes in the image that docker/Dockerfile makes.

The image is an archive that the variable BIGDL_IMAGE names::

    buildah bud --isolation chroot -f docker/Dockerfile -t localhost/bigdl:3 .
    buildah push localhost/bigdl:3 docker-archive:bigdl.tar:localhost/bigdl:3
    BIGDL_IMAGE=$PWD/bigdl.tar make test-clusters
"""

import json
import os

import numpy as np
import pytest
from real_clusters import FIT, control, fitted_weights, last_line, run
from test_kubernetes import environment, in_pod, on_kubernetes, run_job

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600), pytest.mark.slow]

IMAGE = "localhost/bigdl:3"
PYTHON = "/usr/local/bin/python3"


@pytest.fixture(scope="module")
def built(account):
    """A Kubernetes whose nodes have the image."""
    archive = os.environ.get("BIGDL_IMAGE")
    if archive is None:
        pytest.skip("BIGDL_IMAGE names no archive of an image that was built of docker/Dockerfile")
    control("kubernetes.py", "load", account, archive)
    return account


def of_image(arguments: dict) -> dict:
    """Arguments of init_orca_context without what this machine shows to its pods."""
    conf = {k: v for k, v in arguments["conf"].items() if "podTemplate" not in k}
    return {**arguments, "conf": conf, "container_image": IMAGE, "python_location": PYTHON}


def test_executors_of_the_image_learn_what_is_learned_here(built, tmp_path):
    there = last_line(
        run(tmp_path / "there", FIT, of_image(on_kubernetes(built)), environment(built))
    )
    assert len(there["hosts"]) == 2
    np.testing.assert_allclose(there["weights"], fitted_weights(), rtol=1e-5)


def test_a_driver_of_the_image_has_executors_of_the_image(built, tmp_path):
    """By the job of the documentation, as a user of whom the image knows."""
    arguments = of_image(in_pod(built))
    succeeded, printed = run_job(built, "client.yaml", tmp_path, FIT, arguments, IMAGE)
    assert succeeded, printed
    found = json.loads(printed.strip().splitlines()[-1])
    assert len(found["hosts"]) == 2
    np.testing.assert_allclose(found["weights"], fitted_weights(), rtol=1e-5)


WHO = """
    import getpass, os
    from bigdl.orca import init_orca_context, stop_orca_context

    sc = init_orca_context(**ARGUMENTS)
    who = lambda _: (os.getuid(), getpass.getuser(), os.access("/opt/spark/home/jars", os.W_OK))
    print("programs run as", *set(sc.range(2, numSlices=2).map(who).collect()), flush=True)
    stop_orca_context()
"""


def test_cluster_mode_in_the_image(built, tmp_path):
    """The driver's pod is Spark's own; nobody is root, or may write what others import."""
    tmp_path.chmod(0o755)  # the image's user reads the program in it
    conf = {
        "spark.kubernetes.authenticate.driver.serviceAccountName": "bigdl",
        "spark.kubernetes.driver.request.cores": "0.1",
        "spark.kubernetes.driver.volumes.hostPath.code.mount.path": "/code",
        "spark.kubernetes.driver.volumes.hostPath.code.options.path": str(tmp_path),
    }
    arguments = of_image(in_pod(built, cluster_mode="k8s-cluster", conf=conf))
    succeeded, printed = run_job(built, "cluster.yaml", tmp_path, WHO, arguments, IMAGE)
    assert succeeded, printed
    assert "programs run as (185, 'spark', False)" in printed
