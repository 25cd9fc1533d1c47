"""Startup on real clusters: a context, the first job, the first fit, and the end.

    python benchmarks/clusters.py [yarn kubernetes] [--repeats 3] [--json results.json]

Each cluster of `scripts/clusters` is started on this machine. Programs of two executors with a core
each run one after the other: a bare Spark application that names Spark's JARs on the cluster itself
(YARN: an archive on HDFS, as its documentation advises), one that does not (it sends 400 MB each
time), and Orca. Times are seconds from the start of the process: the session, the first job that
needs both executors, the first fit and the end. The first program of Orca puts what the others need
on the cluster; it stands alone. Ratios are medians over the repeats of the ratio of Orca to the
bare application within one repeat, with their range: to the end of the first job, and the whole
program without the fit.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts" / "clusters"
MISSING = 3

BARE = """
import json, sys, time
T = {}
import psutil
begin = psutil.Process().create_time()
def mark(name): T[name] = time.time() - begin
from pyspark.sql import SparkSession
builder = SparkSession.builder
for name, value in json.loads(sys.argv[1]).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
mark("session")
spark.sparkContext.range(2, numSlices=2).barrier().mapPartitions(lambda _: [1]).collect()
mark("both executors")
spark.stop()
mark("end")
print(json.dumps(T))
"""
ORCA = """
import json, sys, time
T = {}
import psutil
begin = psutil.Process().create_time()
def mark(name): T[name] = time.time() - begin
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
sc = init_orca_context(**json.loads(sys.argv[1]))
mark("session")
sc.range(2, numSlices=2).barrier().mapPartitions(lambda _: [1]).collect()
mark("both executors")
if "fit" in sys.argv:
    import torch
    from bigdl.orca.learn.pytorch import Estimator
    rows = OrcaContext.get_spark_session().range(64, numPartitions=2).selectExpr(
        "array(float(id), float(-id)) AS x", "float(id) AS y")
    est = Estimator.from_torch(model=lambda config: torch.nn.Linear(2, 1),
        optimizer=lambda model, config: torch.optim.Adam(model.parameters()),
        loss=torch.nn.MSELoss())
    mark("imports")
    est.fit(rows, epochs=1, batch_size=16, feature_cols=["x"], label_cols=["y"])
    mark("fit")
stop_orca_context()
mark("end")
print(json.dumps(T))
"""


def control(script, *arguments):
    """Run a command of a cluster script and return its output."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def cluster(script):
    """Start a cluster that ends with this program, or return None if it cannot run."""
    with tempfile.TemporaryDirectory(prefix="bigdl-clusters-") as folder:
        command = [sys.executable, str(SCRIPTS / script), "hold", folder]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        holder = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        is_ready = any(line == "ready\n" for line in holder.stdout)
        try:
            yield Path(folder) if is_ready else None
        finally:
            holder.communicate()


def run(program, settings, *words, **environment):
    """Run a program and return the times that it prints."""
    command = [sys.executable, "-c", program, json.dumps(settings), *words]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{program}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


EXECUTORS = {
    "spark.executor.instances": "2",
    "spark.executor.cores": "1",
    "spark.executor.memory": "1g",
}


def on_yarn(folder):
    """Return variables, settings of plain applications by name, and arguments of Orca."""
    from pyspark import __file__ as pyspark

    own = {"spark.driver.host": "127.0.0.1"}
    bare = {**EXECUTORS, **own, "spark.master": "yarn", "spark.pyspark.python": sys.executable}
    jars = folder / "jars.zip"
    files = sorted((Path(pyspark).parent / "jars").glob("*.jar"))
    subprocess.run(["zip", "-q", "-0", "-j", jars, *files], check=True)
    control("yarn.py", "cli", folder, "fs", "-put", jars, "/jars.zip")
    jars.unlink()
    variables = {"SPARK_LOCAL_IP": "127.0.0.1", "HADOOP_CONF_DIR": str(folder / "conf")}
    arguments = {
        "cluster_mode": "yarn-client",
        "num_nodes": 2,
        "cores": 1,
        "memory": "1g",
        "python_location": sys.executable,
        "conf": own,
    }
    kinds = {
        "bare": {**bare, "spark.yarn.archive": "hdfs:///jars.zip"},
        "bare, JARs sent": bare,
    }
    return variables, kinds, arguments


def on_kubernetes(folder):
    control("kubernetes.py", "machine", folder)
    account = ROOT / "docker" / "kubernetes" / "account.yaml"
    control("kubernetes.py", "kubectl", folder, "apply", "-f", account)
    own = {
        "spark.kubernetes.namespace": "bigdl",
        "spark.kubernetes.container.image.pullPolicy": "Never",
        "spark.kubernetes.executor.podTemplateFile": str(folder / "pod.json"),
        "spark.kubernetes.executor.podTemplateContainerName": "main",
        "spark.kubernetes.executor.request.cores": "0.1",
        "spark.driver.bindAddress": "10.77.0.1",
        "spark.driver.host": "10.77.0.1",
    }
    bare = {
        **EXECUTORS,
        **own,
        "spark.master": "k8s://https://10.77.0.1:6443",
        "spark.kubernetes.container.image": "localhost/machine:1",
        "spark.pyspark.python": sys.executable,
    }
    arguments = {
        "cluster_mode": "k8s-client",
        "master": "k8s://https://10.77.0.1:6443",
        "container_image": "localhost/machine:1",
        "num_nodes": 2,
        "cores": 1,
        "memory": "1g",
        "extra_executor_memory_for_ray": "1g",
        "python_location": sys.executable,
        "conf": own,
    }
    return {"KUBECONFIG": str(folder / "admin.conf")}, {"bare": bare}, arguments


CLUSTERS = {"yarn": ("yarn.py", on_yarn), "kubernetes": ("kubernetes.py", on_kubernetes)}


def measure(name, repeats):
    """Return the times of the first program of Orca, and of all programs interleaved."""
    script, prepare = CLUSTERS[name]
    with cluster(script) as folder:
        if folder is None:
            return None
        variables, kinds, arguments = prepare(folder)
        first = run(ORCA, arguments, "fit", **variables)
        rounds = []
        for _ in range(repeats):
            each = {kind: run(BARE, conf, **variables) for kind, conf in kinds.items()}
            each["orca"] = run(ORCA, arguments, **variables)
            each["orca, with a fit"] = run(ORCA, arguments, "fit", **variables)
            rounds.append(each)
    return {"first": first, "rounds": rounds}


def report(name, result):
    rounds = result["rounds"]
    print(f"\n### {name}: seconds from the start of the process\n")
    moments = ["session", "both executors", "imports", "fit", "end"]
    print(f"| program | {' | '.join(moments)} |\n|---|{'---|' * len(moments)}")
    rows = {"orca, first program": [result["first"]]}
    rows.update({kind: [each[kind] for each in rounds] for kind in rounds[0]})
    for kind, times in rows.items():
        cells = [
            f"{statistics.median(t[moment] for t in times):.1f}" if moment in times[0] else ""
            for moment in moments
        ]
        print(f"| {kind} | {' | '.join(cells)} |")
    for moment in ("both executors", "end"):
        ratios = [each["orca"][moment] / each["bare"][moment] for each in rounds]
        low, high = min(ratios), max(ratios)
        middle = statistics.median(ratios)
        print(f"\nOrca / bare, {moment}: {middle:.2f} ({low:.2f}-{high:.2f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clusters", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.clusters:
        result = measure(name, options.repeats)
        if result is None:
            print(f"{name}: cannot run here")
            continue
        report(name, result)
        results[name] = result
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
