"""Trainings on executors whose Spark encrypts what its processes say to each other."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import faults
import pyspark
import pytest
from quick_jvm import QUICK_JVM

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(600)]

PROGRAM = """
    import json, sys, threading
    from pathlib import Path

    sys.path.insert(0, sys.argv[1])
    import faults
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.engine import SparkEngine
    from bigdl.orca.learn.trigger import SeveralIteration

    conf, folder = json.loads(sys.argv[2]), Path(sys.argv[3])
    init_orca_context("local", cores=2, memory="1g", conf=conf)

    def look(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        TorchDistributedSync(worker).start()
        threads = {thread.name for thread in threading.enumerate()}
        return [worker.channel.store._address.certificate is not None, "bigdl-tunnels" in threads]

    data = faults.frame(OrcaContext.get_spark_session())
    kill = [faults.KillExecutor(folder / "killed", 1, 17)] if conf else []
    every = {"checkpoint_trigger": SeveralIteration(5)}
    facts = {
        "encrypted": SparkEngine().run(look, num_workers=2),
        "weights": faults.fit(faults.estimator(), data, *kill, **every),
    }
    stop_orca_context()
    print(json.dumps(facts))
"""


def run(folder: Path, conf: dict[str, str]) -> dict:
    """What the program says in a process of its own."""
    folder.mkdir()
    helpers = str(Path(faults.__file__).parent)
    home = folder / "spark"
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():  # executors write their logs below it
        (home / part.name).symlink_to(part)
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), helpers, json.dumps(conf)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([helpers, *filter(None, sys.path)]),
        "SPARK_HOME": str(home),
    }
    done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def clear(tmp_path_factory):
    facts = run(tmp_path_factory.mktemp("clear") / "run", {})
    assert facts["encrypted"] == [[False, False]] * 2
    return facts["weights"]


def on_executors(**conf: str) -> dict[str, str]:
    """Settings of two executors that encrypt."""
    return {
        "spark.master": "local-cluster[2,1,1024]",
        "spark.executor.memory": "1g",
        "spark.executor.extraJavaOptions": QUICK_JVM,
        "spark.authenticate": "true",
        "spark.authenticate.secret": "a secret of this test",
        **{f"spark.{name.replace('_', '.')}": value for name, value in conf.items()},
    }


def test_a_killed_executor_changes_nothing_where_spark_encrypts(clear, tmp_path):
    conf = on_executors(network_crypto_enabled="true", io_encryption_enabled="true")
    facts = run(tmp_path / "run", conf)
    assert facts["encrypted"] == [[True, True]] * 2
    assert facts["weights"] == clear
    assert (tmp_path / "run" / "killed").exists()


def test_a_killed_executor_changes_nothing_where_spark_speaks_tls(clear, tmp_path):
    store = tmp_path / "keys"
    command = ["keytool", "-genkeypair", "-alias", "spark", "-keyalg", "RSA", "-validity", "2"]
    command += ["-dname", "CN=spark", "-keystore", str(store), "-storetype", "JKS"]
    subprocess.run([*command, "-storepass", "secret-of-keys"], check=True, capture_output=True)
    keys = {"keyStore": str(store), "trustStore": str(store)}
    passwords = dict.fromkeys(
        ("keyStorePassword", "keyPassword", "trustStorePassword"), "secret-of-keys"
    )
    settings = {**keys, **passwords, "protocol": "TLSv1.3", "enabled": "true"}
    conf = on_executors(**{f"ssl_rpc_{name}": value for name, value in settings.items()})
    facts = run(tmp_path / "run", conf)
    assert facts["encrypted"] == [[True, True]] * 2
    assert facts["weights"] == clear
