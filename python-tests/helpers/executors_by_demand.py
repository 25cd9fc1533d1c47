"""Trainings on a cluster whose Spark adds and removes executors by demand.

Run as ``executors_by_demand.py STORY FOLDER ARGUMENTS``, where ARGUMENTS are those of
``init_orca_context`` as JSON; without any a standalone cluster is started. What happened is printed
as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import faults
from pyspark.sql import SparkSession
from quick_jvm import QUICK_JVM

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.cluster.standalone import StandaloneCluster
from bigdl.orca.learn.trigger import SeveralIteration

CONF = {
    "spark.executor.extraJavaOptions": QUICK_JVM,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "3s",
    "spark.decommission.enabled": "true",
    "spark.executorEnv.PYTHONPATH": ":".join(sys.path),
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}
TRACKING = {  # what else lets Spark take executors whose shuffles were read
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.timeout": "3s",
}


def on_standalone(story):
    """Run a story on a standalone cluster of this program."""
    cluster = StandaloneCluster.start(1, "700m", 2)
    builder = SparkSession.builder.master(cluster.master)
    conf = {
        **CONF,
        **TRACKING,
        "spark.executor.cores": "1",
        "spark.executor.memory": "600m",
        "spark.authenticate": "true",
        "spark.authenticate.secret": cluster.secret,
    }
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        return story(spark)
    finally:
        spark.stop()
        cluster.stop()


def on_a_cluster(story, arguments):
    """Run a story where ``init_orca_context`` leads."""
    if arguments["cluster_mode"] != "spark-connect":  # whose server has the settings
        arguments = {**arguments, "conf": {**CONF, **arguments.get("conf", {})}}
    init_orca_context(**arguments)
    try:
        return story(OrcaContext.get_spark_session())
    finally:
        stop_orca_context()


def executors():
    return SparkCluster.from_active().slots()


def await_idle():
    """Wait until Spark has taken all executors back; returns how many it has."""
    end = time.monotonic() + 300
    while executors() and time.monotonic() < end:
        time.sleep(0.2)
    return executors()


def growing(spark):
    """From no executor to two, to none, and to two of which one is killed."""
    data = faults.frame(spark)
    facts = {"before": await_idle()}
    facts["expected"] = faults.fit(faults.estimator(workers_per_node=1), data)
    facts["grown to"] = executors()
    facts["idle"] = await_idle()
    attempts = faults.Attempts(FOLDER / "attempts")
    kill = faults.KillExecutor(FOLDER / "killed", 1, 17)
    est, every = faults.estimator(workers_per_node=1), SeveralIteration(5)
    facts["found"] = faults.fit(est, data, attempts, kill, checkpoint_trigger=every)
    return {**facts, "starts": attempts.starts()}


def decommissioned(spark):
    """An executor is told that it is about to go."""
    data = faults.frame(spark)
    expected = faults.fit(faults.estimator(workers_per_node=1), data)
    attempts = faults.Attempts(FOLDER / "attempts")
    leave = faults.Decommission(FOLDER / "left", 1, 8)
    est = faults.estimator(workers_per_node=1)
    found = faults.fit(est, data, attempts, leave, max_failures=0)
    told = {"told at": leave.last_step(), "starts": attempts.starts()}
    return {"expected": expected, "found": found, **told}


def searching(spark):
    """A search from no executor to two and to none, and one of trials on two workers each."""
    import optuna

    from bigdl.tuning import SparkStudy

    def objective(trial):
        trial.set_user_attr("executor", os.getppid())
        time.sleep(0.3)
        return trial.suggest_float("x", 0, 1)

    def until_two(study, trial):
        if len(seen(study)) == 2:
            study.stop()

    def seen(study):
        return {t.user_attrs["executor"] for t in study.trials if "executor" in t.user_attrs}

    def of_two(trial):
        return sum(trial.all_gather(trial.rank + 1)) + trial.suggest_float("x", 0, 0.5)

    counts = (lambda: 0) if "connect" in type(spark).__module__ else await_idle
    facts = {"before": counts()}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    SparkStudy(study).optimize(objective, n_trials=1000, callbacks=[until_two])
    facts |= {"grown to": len(seen(study)), "idle": counts()}
    joint = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    SparkStudy(joint).optimize(of_two, n_trials=3, workers_per_trial=2)
    facts |= {"joint": [int(t.value) for t in joint.trials], "idle again": counts()}
    return {**facts, "states": sorted({t.state.name for t in study.trials})}


if __name__ == "__main__":
    FOLDER, ARGUMENTS = Path(sys.argv[2]), json.loads(sys.argv[3])
    STORIES = {"growing": growing, "decommissioned": decommissioned, "searching": searching}
    TOLD = STORIES[sys.argv[1]]
    print(json.dumps(on_a_cluster(TOLD, ARGUMENTS) if ARGUMENTS else on_standalone(TOLD)))
