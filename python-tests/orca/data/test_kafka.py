"""Test streams from and to a real Kafka broker: each record is processed exactly once."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import numpy as np
import pytest
import torch
from real_clusters import control
from refusals import refused

from bigdl.orca.cluster.versions import spark_release
from bigdl.orca.data.kafka import read_kafka, write_kafka
from bigdl.orca.inference import InferenceModel, map_batches
from bigdl.orca.learn.pytorch import Estimator

kafka = pytest.importorskip("confluent_kafka")
by_python = pytest.mark.skipif(
    spark_release() < (4, 0), reason="Spark 3.5 has no data sources in Python"
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """Return the folder of a running broker; skip the test if none is installed."""
    if not os.environ.get("BIGDL_CLUSTERS"):
        pytest.skip("BIGDL_CLUSTERS does not name a folder with a broker of Kafka")
    folder = tmp_path_factory.mktemp("kafka")
    control("kafka.py", "start", folder)
    yield folder
    control("kafka.py", "stop", folder)


@pytest.fixture
def servers(broker):
    return (broker / "address").read_text()


def make_topics(servers, *names, partitions=2):
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_topics([NewTopic(name, partitions, 1) for name in names]).values():
        made.result()


def send(servers, topic, numbers):
    producer = kafka.Producer({"bootstrap.servers": servers})
    for number in numbers:
        producer.produce(topic, json.dumps([number, 1.0]), str(number))
    assert producer.flush(60) == 0


def committed(servers, topic, count, quiet_s=60.0):
    """Count each key of a topic, after `count` records have arrived and no more follow."""
    settings = {"group.id": f"test-{time.time_ns()}", "auto.offset.reset": "earliest"}
    consumer = kafka.Consumer({"bootstrap.servers": servers, **settings})
    consumer.subscribe([topic])
    keys, last = Counter(), time.monotonic()
    while time.monotonic() - last < (quiet_s if sum(keys.values()) < count else 2.0):
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            keys[message.key().decode()] += 1
            last = time.monotonic()
    consumer.close()
    return keys


def doubled(batch, models):
    x = np.array([json.loads(value) for value in batch["value"]], np.float32)
    return {"answer": [json.dumps(float(y)) for y in models["double"].predict(x)[:, 0]]}


def answers(stream):
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(module.weight, 2.0)
    models = {"double": InferenceModel().load_module(module)}
    return map_batches(stream, doubled, "answer string", models=models, columns="value", keep="key")


@by_python
@pytest.mark.slow
def test_each_record_is_answered_once_by_several_queries_of_a_checkpoint(
    orca_spark, servers, tmp_path
):
    make_topics(servers, "numbers", "doubles")
    send(servers, "numbers", range(500))
    stream = read_kafka(servers, "numbers", most_records=60, connector="python")

    def start():
        return write_kafka(
            answers(stream), servers, "doubles", str(tmp_path / "checkpoint"), value="answer"
        )

    query = start()
    while query.lastProgress is None:  # it is stopped during its work
        time.sleep(0.05)
    query.stop()
    send(servers, "numbers", range(500, 600))
    query = start()
    query.processAllAvailable()
    sizes = [progress["numInputRows"] for progress in query.recentProgress]
    query.stop()
    assert max(sizes) <= 60
    assert committed(servers, "doubles", 600) == Counter(map(str, range(600)))


PROGRAM = """
    import sys
    sys.path[:0] = [{folder!r}, {helpers!r}]
    from bigdl.orca import init_orca_context
    from bigdl.orca.data.kafka import read_kafka, write_kafka
    from test_kafka import answers

    init_orca_context("local", cores=2)
    stream = read_kafka({servers!r}, "killed", most_records=40, connector="python")
    query = write_kafka(answers(stream), {servers!r}, "survived", {checkpoint!r}, value="answer")
    print("started", flush=True)
    query.awaitTermination()
"""


@by_python
@pytest.mark.slow
@pytest.mark.fault
def test_programs_and_a_broker_that_are_killed_lose_and_double_nothing(broker, servers, tmp_path):
    make_topics(servers, "killed", "survived")
    here = os.path.dirname(__file__)
    helpers = os.path.join(os.path.dirname(os.path.dirname(here)), "helpers")
    text = textwrap.dedent(PROGRAM).format(
        folder=here, helpers=helpers, servers=servers, checkpoint=str(tmp_path / "checkpoint")
    )
    (tmp_path / "program.py").write_text(text)
    send(servers, "killed", range(3000))
    for attempt in range(4):
        log = tmp_path / "log"
        with open(log, "wb") as out:
            program = subprocess.Popen(
                [sys.executable, str(tmp_path / "program.py")],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=tmp_path,
            )
        try:
            give_up = time.monotonic() + 120
            while b"started" not in log.read_bytes():
                assert program.poll() is None, log.read_text()
                assert time.monotonic() < give_up
                time.sleep(0.1)
            if attempt < 2:
                time.sleep(6 + 2 * attempt)
            elif attempt == 2:
                time.sleep(4)
                control("kafka.py", "kill", broker)
                time.sleep(1)
                control("kafka.py", "start", broker)
                time.sleep(6)
            else:
                counts = committed(servers, "survived", 3000, 120.0)
        finally:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    assert counts == Counter(map(str, range(3000)))


@by_python
@pytest.mark.slow
def test_sparks_own_connector_gives_the_same_records(broker, servers, tmp_path):
    jars = os.path.join(os.environ["BIGDL_CLUSTERS"], "kafka", "spark-connector")
    if not os.path.isdir(jars):
        pytest.skip(f"{jars} holds no JAR")
    make_topics(servers, "same")
    send(servers, "same", range(50))
    text = f"""
        import glob
        from bigdl.orca import OrcaContext, init_orca_context
        from bigdl.orca.data.kafka import read_kafka
        conf = {{"spark.jars": ",".join(glob.glob({jars!r} + "/*.jar"))}}
        init_orca_context("local", cores=2, conf=conf)
        spark, found = OrcaContext.get_spark_session(), []
        for connector in ("spark", "python"):
            stream = read_kafka({servers!r}, "same", connector=connector)
            query = stream.writeStream.format("memory").queryName(connector).start()
            query.processAllAvailable()
            query.stop()
            found.append(sorted(map(tuple, spark.table(connector).collect())))
        assert len(found[0]) == 50 and found[0] == found[1], found
        print("equal")
    """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=200, check=False
    )
    assert "equal" in done.stdout, done.stdout + done.stderr


def test_a_stream_is_predicted_by_an_estimator(orca_spark, tmp_path):
    rows = orca_spark.range(0, 20, 1, 2).selectExpr("id", "array(float(id), float(1)) as x")
    rows.write.parquet(str(tmp_path / "rows"))
    stream = orca_spark.readStream.schema(rows.schema).parquet(str(tmp_path / "rows"))
    est = Estimator.from_torch(model=torch.nn.Linear(2, 1))
    done = est.predict_stream(stream, feature_cols="x", sample=rows)
    query = done.writeStream.format("memory").queryName("predicted").start()
    query.processAllAvailable()
    query.stop()
    expected = {row.id: row.prediction for row in est.predict(rows, feature_cols="x").collect()}
    predictions = {row.id: row.prediction for row in orca_spark.table("predicted").collect()}
    assert predictions == expected
    with refused("data-type", "DataFrame"):
        est.predict_stream(rows, feature_cols="x", sample=rows)
    with refused("not-fitted"):
        est.predict_stream(stream, feature_cols="x")


@by_python
@pytest.mark.parametrize("most", [1, 7, 50, 124, 125, 1000])
def test_a_limit_is_shared_by_the_partitions(most):
    from bigdl.orca.data.kafka.source import limit_offsets

    start, latest = {"t": {"0": 0, "1": 10}}, {"t": {"0": 100, "1": 30, "2": 5}}
    end = limit_offsets(start, latest, most)
    taken = {n: end["t"][n] - start["t"].get(n, 0) for n in latest["t"]}
    assert sum(taken.values()) == min(most, 125)
    assert all(0 <= count <= latest["t"][n] - start["t"].get(n, 0) for n, count in taken.items())


def test_a_spark_without_data_sources_in_python_is_told(orca_spark, monkeypatch):
    for each in (each for each in type(orca_spark).__mro__ if "dataSource" in vars(each)):
        monkeypatch.delattr(each, "dataSource")
    with refused("version-unsupported", 'connector="python"', "4"):
        read_kafka("broker:9092", "a", connector="python")
    with refused("package-missing"):
        read_kafka("broker:9092", "a")


def test_wrong_arguments_are_told(orca_spark):
    with refused("argument-value"):
        read_kafka("broker:9092", [])
    with refused("argument-value"):
        read_kafka("", "a")
    with refused("package-missing"):
        read_kafka("broker:9092", "a", connector="spark")
    rows = orca_spark.readStream.format("rate").load()
    with refused("data-dtype", "'value'"):
        write_kafka(rows.selectExpr("'a' as key", "value"), "broker:9092", "a", "checkpoint")
