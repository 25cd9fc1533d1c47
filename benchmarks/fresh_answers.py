"""Delay from an event to changed answers, by the user's history and by new weights, over Kafka.

    BIGDL_CLUSTERS=/path/to/clusters python benchmarks/fresh_answers.py [--rate 500] [--seconds 120]

A broker of Kafka, `bigdl-friesian-train` and `bigdl-friesian-serve` run on this machine. A client
sends events to the server (``POST /events``), which keeps the histories, and to Kafka, from which
the model is trained. Measured are

* history: from the creation of an event to the answer for its user that uses it, by ten probes per
  second, each of which posts one more event and then requests recommendations;
* weights: from the creation of each event to the server's use of the first version that was trained
  on it, for all events after a warm-up.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd

from bigdl.friesian.sequential import SequenceRecommender
from bigdl.friesian.serving import EmbeddedEvents

USERS, ITEMS, ROWS = 2000, 2000, 20_000
POSTS_PER_S, PROBES_PER_S, LOOKS_PER_S = 25, 10, 20
KAFKA = Path(__file__).parents[1] / "scripts" / "clusters" / "kafka.py"
VERSION = re.compile(r'bigdl_recommender_size\{of="model_version"\} ([\d.]+)')


def kafka(verb, folder):
    command = [sys.executable, str(KAFKA), verb, str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def prepare(folder):
    """Train a model and fill the event store."""
    random = np.random.default_rng(0)
    clicks = pd.DataFrame(
        {
            "user": random.integers(0, USERS, ROWS),
            "item": random.integers(0, ITEMS, ROWS),
            "time": time.time() - np.arange(ROWS, 0, -1.0),
        }
    )
    model = SequenceRecommender("sasrec", max_len=50, dim=64, epochs=1, loss="sampled_softmax")
    model.fit(clicks).save(folder / "model")
    with EmbeddedEvents(folder / "events") as events:
        events.append_table(clicks)


def configure(folder, address):
    (folder / "serve.yaml").write_text(
        "history: {events: events, deltas: versions}\nstages: [recall]\n"
        "server: {http_port: 0, recommender_port: 0}\n"
    )
    (folder / "train.yaml").write_text(
        f"train: {{kafka: '{address}', topic: clicks, model: model, checkpoint: state, "
        "publish: versions, interval_s: 0.5, most_rows: 5000}\n"
    )


def started(module, verb, config):
    """Start a program; return it and the words after "ready" in its first line."""
    command = [sys.executable, "-m", f"bigdl.friesian.{module}", verb, "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("ready"):
            return process, line
    raise SystemExit(f"{module} ended: {process.wait()}")


class Connection:
    """HTTP connection that one thread uses."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def __call__(self, verb, path, content=None):
        body = None if content is None else json.dumps(content)
        self.connection.request(verb, path, body, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise SystemExit(f"{verb} {path}: {answer.status} {text}")
        return text


def send(port, producer, rate, ending, sent):
    """Send events to the server and to Kafka; `sent` gets their times, in the order of Kafka."""
    call, random, number = Connection(port), np.random.default_rng(1), 0
    begin = time.time()
    while not ending.is_set():
        count = int((time.time() - begin) * rate) - number
        events = [
            {"user": int(random.integers(USERS)), "item": int(random.integers(ITEMS))}
            for _ in range(count)
        ]
        for each in events:
            each["time"] = time.time()
            producer.produce("clicks", json.dumps(each))
            sent.append(each["time"])
        producer.poll(0)
        if events:
            call("POST", "/events", {"events": events})
        number += count
        time.sleep(1 / POSTS_PER_S)


def probe(port, ending, delays):
    """Post one event, request recommendations, and record seconds and if the answer changed."""
    call, random = Connection(port), np.random.default_rng(2)
    while not ending.is_set():
        user, item = int(random.integers(USERS)), int(random.integers(ITEMS))
        before = json.loads(call("GET", f"/recommend/{user}?k=10"))["scores"]
        begin = time.time()
        event = {"user": user, "item": item, "time": begin}
        call("POST", "/events", {"events": [event]})
        after = json.loads(call("GET", f"/recommend/{user}?k=10"))
        delays.append(
            (time.time() - begin, after["scores"] != before and item not in after["items"])
        )
        time.sleep(1 / PROBES_PER_S)


def watch(port, ending, used):
    """Record when the server uses a new version."""
    call = Connection(port)
    while not ending.is_set():
        match = VERSION.search(call("GET", "/metrics"))
        version = int(float(match[1])) if match else 0
        if not used or used[-1][1] < version:
            used.append((time.time(), version))
        time.sleep(1 / LOOKS_PER_S)


def read_versions(trainer, trained):
    """Record the number of events of each version from the lines of the trainer."""
    for line in trainer.stdout:
        if match := re.match(r"version (\d+): (\{.*\})", line):
            trained.append((int(match[1]), json.loads(match[2])["events"]))


def delays_of_weights(sent, trained, used, skipped):
    """Return the seconds from each event to the use of weights trained on it."""
    delays, first = [], 0
    for version, events in trained[:-1]:
        moment = next((at for at, number in used if number >= version), None)
        if moment is None:
            break
        if version > skipped:
            delays += [moment - each for each in sent[first : first + int(events)]]
        first += int(events)
    return delays


def quantiles(values):
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"count": len(values), "p50_s": p50, "p90_s": p90, "p99_s": p99}


def main():
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--skipped", type=int, default=4, help="versions of the warm-up")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), []
        prepare(folder)
        try:
            kafka("start", folder / "kafka")
            address = (folder / "kafka" / "address").read_text()
            admin = AdminClient({"bootstrap.servers": address})
            admin.create_topics([NewTopic("clicks", 1, 1)])["clicks"].result()
            configure(folder, address)
            trainer, _ = started("stream_training", "run", folder / "train.yaml")
            processes.append(trainer)
            server, line = started("serving.program", "serve", folder / "serve.yaml")
            processes.append(server)
            port = int(re.search(r"http\D*(\d+)", line)[1])
            producer = Producer({"bootstrap.servers": address, "linger.ms": 5})
            ending, sent, probes, used, trained = threading.Event(), [], [], [], []
            threads = [
                threading.Thread(target=send, args=(port, producer, options.rate, ending, sent)),
                threading.Thread(target=probe, args=(port, ending, probes)),
                threading.Thread(target=watch, args=(port, ending, used)),
                threading.Thread(target=read_versions, args=(trainer, trained), daemon=True),
            ]
            for each in threads:
                each.start()
            time.sleep(options.seconds)
            ending.set()
            for each in threads[:3]:
                each.join()
            text = Connection(port)("GET", "/metrics")
        finally:
            for each in processes:
                each.terminate()
                each.wait()
            kafka("stop", folder / "kafka")
    rows = {
        "history": quantiles([seconds for seconds, _ in probes]),
        "weights": quantiles(delays_of_weights(sent, trained, used, options.skipped)),
    }
    print(pd.DataFrame(rows).T.round(3).to_string())
    changed = sum(is_changed for _, is_changed in probes)
    facts = {
        "events": len(sent),
        "probes whose answer changed": f"{changed} of {len(probes)}",
        "versions": len(trained),
        "events per version": round(float(np.mean([count for _, count in trained])), 1),
        "load": os.getloadavg(),
    }
    print(json.dumps(facts))
    print("\n".join(re.findall(r"bigdl_recommender_freshness_seconds_(?:sum|count).*", text)))
    if options.json:
        Path(options.json).write_text(json.dumps({**rows, **facts}, indent=1))


if __name__ == "__main__":
    main()
