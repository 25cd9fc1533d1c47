"""Throughput and latency of a stream of sounds, and the effect of restarts.

    python benchmarks/streaming_speech.py [--data-dir spoken-digits] [--restarts 10] [--json FILE]
    python benchmarks/streaming_speech.py --servers host:port --only rates|restarts
    python benchmarks/streaming_speech.py --quick

The stream is that of ``examples/applications/streaming_speech.py``: WAV files as records of a topic
of Kafka, log-mel spectra and a network in OpenVINO in Spark's tasks, and the answers in another
topic, each exactly once. Without ``--servers`` ``scripts/clusters/kafka.py`` starts a broker.
Broker, sender, reader and Spark share the machine's cores.

==============  ===================================================================================
sustained       sounds in a second while a backlog is answered, from the first answer to the last
latency         from the timestamp of a sound to its answer in the hands of a reader, at 70 % of
                that rate (p50, p95, p99), without the first ten seconds
back-pressure   at twice the rate: rows of the largest micro-batch, how far the answers are behind
                when the last sound is sent, and that all are answered in the end
restarts        the program is killed (SIGKILL) again and again while sounds come, the broker once;
                sounds lost and doubled
==============  ===================================================================================
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "examples" / "applications")  # this file has the name of one there

import streaming_speech as program  # noqa: E402

KAFKA = str(ROOT / "scripts" / "clusters" / "kafka.py")


@contextlib.contextmanager
def broker(folder):
    """Start a Kafka broker and yield its address."""

    def control(verb):
        done = subprocess.run([sys.executable, KAFKA, verb, folder], check=False)
        if done.returncode:
            raise SystemExit(f"The broker does not {verb}")

    control("start")
    try:
        yield Path(folder, "address").read_text(encoding="utf-8"), control
    finally:
        control("stop")


@contextlib.contextmanager
def kafka(options):
    """Yield the address of a broker, and its control functions if this program started it."""
    if options.servers is not None:
        yield options.servers, None
        return
    with tempfile.TemporaryDirectory() as folder, broker(f"{folder}/kafka") as started:
        yield started


def start(servers, model, folder, connector, most=2000):
    from bigdl.orca.data.kafka import read_kafka, write_kafka

    stream = read_kafka(servers, program.SOUNDS, most_records=most, connector=connector)
    result = program.answered(stream, model)
    return write_kafka(
        result, servers, program.ANSWERS, f"{folder}/checkpoint", value="answer", name="speech"
    )


class Reader(threading.Thread):
    """Thread that collects answers by number with their arrival times, until it is closed."""

    def __init__(self, servers):
        super().__init__(daemon=True)
        self._servers, self._over = servers, threading.Event()
        self.came, self.lags, self.doubled = {}, {}, 0

    def run(self):
        answers = program.received(self._servers, float("inf"), float("inf"), self._over.is_set)
        for key, answer, now in answers:
            self.doubled += int(key) in self.came
            self.came[int(key)], self.lags[int(key)] = now, now - answer["sound"]

    def close(self):
        self._over.set()
        self.join()

    def wait_for(self, numbers, seconds):
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up and self.is_alive():
            if len(self.came.keys() & numbers) == len(numbers):
                break
            time.sleep(0.05)
        return numbers - self.came.keys()


def sent(servers, sounds, count, rate, first):
    """Send `count` sounds, repeating them, and return their numbers."""
    many = [sounds[i % len(sounds)] for i in range(count)]
    program.send(servers, many, rate, first)
    return set(range(first, first + count))


def measure(servers, model, sounds, options):
    report, first = {}, 0
    program.make_topics(servers)
    reader = Reader(servers)
    reader.start()
    with tempfile.TemporaryDirectory() as folder:
        query = start(servers, model, folder, options.connector)
        warm = sent(servers, sounds, 300, 200, first)
        first += len(warm)
        assert not reader.wait_for(warm, 120), "the warm-up was not answered"

        backlog = sent(servers, sounds, options.backlog, 1e9, first)
        first += len(backlog)
        lost = reader.wait_for(backlog, 240)
        times = np.sort([reader.came[i] for i in backlog - lost])
        tenth = len(times) // 10  # a micro-batch that began with few is no sign
        rate = (len(times) - tenth) / (times[-1] - times[tenth])
        report["sustained"] = {"sounds": len(backlog), "rate": rate, "lost": len(lost)}

        asked = 0.7 * rate
        steady = sent(servers, sounds, int(asked * options.seconds), asked, first)
        skipped = first + int(asked * min(10, options.seconds / 4))
        first += len(steady)
        lost = reader.wait_for(steady, 120)
        lags = [reader.lags[i] for i in steady - lost if i >= skipped]
        percentiles = dict(
            zip(("p50", "p95", "p99"), np.percentile(lags, [50, 95, 99]), strict=True)
        )
        report["latency"] = {"rate": asked, "lost": len(lost), **percentiles}

        double = sent(servers, sounds, int(2 * rate * options.seconds / 2), 2 * rate, first)
        first += len(double)
        behind = len(double - reader.came.keys())
        lost = reader.wait_for(double, 240)
        rows = [progress["numInputRows"] for progress in query.recentProgress]
        report["twice the rate"] = {
            "sounds": len(double),
            "behind at the end": behind,
            "largest batch": max(rows),
            "lost": len(lost),
        }
        report["doubled"] = reader.doubled
        query.stop()
    reader.close()
    return report


# -- restarts --------------------------------------------------------------------------------------


def serve(options):
    """Run the program that is killed: it answers until then."""
    import pickle

    from bigdl.orca import init_orca_context

    init_orca_context("local", cores=options.cores)
    model = program.InferenceModel.of_origin(pickle.loads(Path(options.model).read_bytes()))
    query = start(options.servers, model, options.serve, options.connector, most=200)
    print("started", flush=True)
    query.awaitTermination()


def restarts(servers, control, model, sounds, options):
    """Count lost and duplicated sounds while the program and once the broker are killed."""
    import cloudpickle

    reader = Reader(servers)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "model")
        saved.write_bytes(cloudpickle.dumps(model.origin))
        command = [sys.executable, __file__, "--serve", folder, "--model", str(saved)]
        command += ["--servers", servers, "--connector", options.connector]
        begun, stop = 10_000_000, threading.Event()
        numbers = set()

        def keep_sending():
            while not stop.is_set():
                numbers.update(sent(servers, sounds, 100, 100, begun + len(numbers)))

        sender = threading.Thread(target=keep_sending)
        sender.start()
        reader.start()
        for attempt in range(options.restarts + 1):
            served = subprocess.Popen(
                command, stdout=subprocess.PIPE, start_new_session=True, cwd=folder
            )
            try:
                assert any(line == b"started\n" for line in served.stdout), "it did not start"
                time.sleep(9 + attempt % 4 * 0.7)  # somewhere in a micro-batch
                if control is not None and attempt == options.restarts // 2:
                    control("kill")
                    control("start")
                    time.sleep(3)
                if attempt == options.restarts:
                    stop.set()
                    sender.join()
                    reader.wait_for(numbers, 150)
                    time.sleep(3)  # for what comes twice
            finally:
                os.killpg(served.pid, signal.SIGKILL)
                served.wait()
    reader.close()
    keys = reader.came.keys()
    return {
        "restarts": options.restarts,
        "restarts of the broker": int(control is not None),
        "sounds": len(numbers),
        "lost": len(numbers - keys),
        "doubled": reader.doubled,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="a folder of WAV files")
    parser.add_argument("--servers", help="of Kafka; default: starts a broker")
    parser.add_argument("--connector", default="python", choices=["auto", "spark", "python"])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--backlog", type=int, default=10_000, help="sounds")
    parser.add_argument("--seconds", type=float, default=40, help="of each measurement")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--only", choices=["rates", "restarts"])
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.backlog, options.seconds, options.restarts, options.epochs = 1500, 10, 2, 3
    if options.serve:
        serve(options)
        return
    if options.servers and not options.only:
        parser.error("topics of a broker can have the sounds of one measurement: add --only")

    from bigdl.orca import init_orca_context, stop_orca_context

    train, test = (
        program.read_sounds(options.data_dir) if options.data_dir else program.made_up_sounds()
    )
    with kafka(options) as (servers, _):
        context = init_orca_context("local", cores=options.cores)
        model, report = program.trained(train, options.epochs), {}
        version = context.version
        if options.only != "restarts":
            report |= measure(servers, model, test, options)
        stop_orca_context()
    if options.only != "rates":
        with kafka(options) as (servers, control):  # without the sounds of the others
            program.make_topics(servers)
            report["restarts"] = restarts(servers, control, model, test, options)
    print(
        f"\nPython {platform.python_version()}, pyspark {version}, {options.cores} cores, {_cpu()}"
    )
    for name, metrics in report.items():
        print(f"{name:16s} {json.dumps(metrics)}")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


def _cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")


if __name__ == "__main__":
    main()
