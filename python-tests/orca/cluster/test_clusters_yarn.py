"""A fit on a real YARN of two hosts; BIGDL_CLUSTERS names the folder of `yarn/yarn-cluster`."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyspark
import pytest
from test_context import last_line, start

COMMAND = Path(os.environ.get("BIGDL_CLUSTERS", "/nonexistent"), "yarn", "yarn-cluster")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not COMMAND.is_file(), reason="BIGDL_CLUSTERS names no folder with yarn/yarn-cluster"
    ),
]
PROGRAM = """
    import json, os
    import torch
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.learn.pytorch import Estimator

    sc = init_orca_context(**ARGUMENTS)
    folders = sc.range(8, numSlices=8).map(lambda _: os.getcwd()).distinct().collect()
    rows = OrcaContext.get_spark_session().range(64, numPartitions=2).selectExpr(
        "array(float(sin(id)), float(sin(2 * id)), float(sin(3 * id))) AS x",
        "float(sin(id) + 2 * cos(id)) AS y",
    )
    estimator = Estimator.from_torch(
        model=lambda config: torch.nn.Linear(3, 1),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
        loss=torch.nn.MSELoss(),
        **WORKERS,
    )
    estimator.fit(
        rows, epochs=3, batch_size=16, feature_cols=["x"], label_cols=["y"], seed=7
    )
    weight, bias = estimator.get_model().parameters()
    result = {"weights": [*weight.detach().reshape(-1).tolist(), bias.item()], "folders": folders}
    stop_orca_context()
    print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def hadoop_conf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("yarn")
    variables = {**os.environ, "SPARK_HOME": os.path.dirname(pyspark.__file__)}

    def control(verb):
        command = [sys.executable, str(COMMAND), verb, str(directory)]
        subprocess.run(command, env=variables, check=True, timeout=150)

    control("start")
    yield str(directory / "conf")
    control("stop")


def test_a_fit_on_yarn_equals_one_on_this_machine(hadoop_conf, tmp_path):
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.yarn.jars": f"local:{os.path.dirname(pyspark.__file__)}/jars/*",
    }
    on_yarn = {
        "cluster_mode": "yarn-client",
        "num_nodes": 2,
        "cores": 1,
        "memory": "1g",
        "hadoop_conf": hadoop_conf,
        "python_location": sys.executable,
        "conf": conf,
    }
    yarn = last_line(
        start(
            tmp_path / "yarn.py",
            _program(on_yarn, {}),
            SPARK_LOCAL_IP="127.0.0.1",
        )
    )
    local = last_line(start(tmp_path / "local.py", _program({"cores": 2}, {"workers_per_node": 2})))
    assert len(yarn["folders"]) == 2  # two containers, with folders too long for a Unix socket
    assert min(map(len, yarn["folders"])) > 65
    np.testing.assert_allclose(yarn["weights"], local["weights"], rtol=1e-5)


def _program(arguments, workers):
    return f"ARGUMENTS, WORKERS = {arguments!r}, {workers!r}\n" + textwrap.dedent(PROGRAM)
